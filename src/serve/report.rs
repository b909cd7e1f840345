//! Reports for the people who set limits: the keys that are rejected most, and findings about the limits.
//!
//! A report is computed on demand from statistics that are kept anyway. It is data, encoded as JSON, with one text form
//! that the debug listener and the command line share. The reports here are about this process; the one about all
//! replicas is in `fleet/report`.
//!
//! This file has what the reports share: the words of a search, and the domains of their rows. Metrics
//! replace some characters of a domain by `_`, so a name there may stand for several domains. A row has a domain only
//! if it is certain, because an operator resets counters by it.

pub mod history;
pub mod live;
pub mod rules;
pub mod rule_text;
pub mod top;
pub mod rejections;
pub mod unmatched;

use std::collections::HashMap;

use serde::Deserialize;

use crate::rules::rule::set::RuleSet;
use crate::telemetry::metrics::limit_stats::LimitName;

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

/// Domains of the loaded rules, by their names in metrics.
#[derive(Clone, Debug, Default)]
pub struct DomainsByMetricName {
    /// `None` for a name that several domains have.
    by_metric_name: HashMap<String, Option<String>>,
}

impl DomainsByMetricName {
    /// Domains of these rules.
    pub fn new(rules: Option<&RuleSet>) -> Self {
        let mut by_metric_name: HashMap<String, Option<String>> = HashMap::new();
        for domain in rules.into_iter().flat_map(RuleSet::domains) {
            let in_metrics = LimitName::new([&*domain.name]).as_str().to_owned();
            by_metric_name
                .entry(in_metrics)
                .and_modify(|domain| *domain = None)
                .or_insert_with(|| Some(domain.name.to_string()));
        }
        Self { by_metric_name }
    }

    /// Domain of a limit; `None` if it is not certain.
    pub fn find_domain(&self, limit: &LimitName) -> Option<String> {
        self.find_domain_by_metric_name(limit.known_domain()?)
    }

    /// Returns the domain that has this name in metrics; `None` if it is not certain.
    pub fn find_domain_by_metric_name(&self, in_metrics: &str) -> Option<String> {
        match self.by_metric_name.get(in_metrics) {
            Some(domain) => domain.clone(),
            // No character was replaced.
            None => (!in_metrics.contains('_')).then(|| in_metrics.to_owned()),
        }
    }
}
