//! Reports for the people who set limits: the keys that are rejected most, and findings about the limits.
//!
//! A report is computed on demand from statistics that are kept anyway. It is data, encoded as JSON, with one text form
//! that the debug listener and the command line share. The reports here are about this process; the one about all
//! replicas is in `fleet/report`.
//!
//! This file has what the reports share: the words of a search.

pub mod history;
pub mod live;
pub mod rules;
pub mod rule_text;
pub mod top;
pub mod rejections;
pub mod unmatched;

use serde::Deserialize;

/// Maximum length of the text of a search in bytes.
const MAX_SEARCH_BYTES: usize = 256;
/// Maximum number of words of a search.
const MAX_SEARCH_WORDS: usize = 16;

/// Words, in lower case, that a text must contain in any case; without words every text has them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "String")]
pub struct SearchWords(Vec<String>);

/// Error of a search whose text has too many words or bytes: each word is looked for in every limit.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("search: at most {MAX_SEARCH_WORDS} words and {MAX_SEARCH_BYTES} bytes (use fewer words)")]
pub struct SearchTooLong;

impl SearchWords {
    /// Splits a text at white space.
    ///
    /// # Errors
    /// The text has too many words or bytes.
    pub fn new(text: &str) -> Result<Self, SearchTooLong> {
        if text.len() > MAX_SEARCH_BYTES || text.split_whitespace().nth(MAX_SEARCH_WORDS).is_some() {
            return Err(SearchTooLong);
        }
        Ok(Self(text.split_whitespace().map(str::to_lowercase).collect()))
    }

    /// Returns `true` if there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns `true` if `text` contains all of them.
    pub fn are_in(&self, text: &str) -> bool {
        if self.is_empty() {
            return true;
        }
        let text = text.to_lowercase();
        self.0.iter().all(|word| text.contains(&**word))
    }
}

impl TryFrom<String> for SearchWords {
    type Error = SearchTooLong;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::new(&text)
    }
}
