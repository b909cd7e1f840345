//! What a descriptor of a rule file matches in an entry: the pattern of its value, and the kind of match that it gives.
//!
//! A new kind of pattern is a variant of [`ValuePattern`], which holds what it compares with, and one of [`MatchKind`],
//! which has its rank among siblings. No `match` on them has a `_` arm, so the compiler lists the places that must know
//! a new one.

use std::sync::Arc;

use super::match_pattern::MatchPattern;
use crate::base::named_enum::named_enum;

/// Values of an entry that a descriptor matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValuePattern {
    /// Any value: the descriptor has only a key.
    Any,
    /// This value.
    Exact(String),
    /// Values that this text matches; each `*` in it matches any run of bytes.
    Wildcard(String),
    /// Values that this `match` matches.
    Match(Arc<MatchPattern>),
}

named_enum! {
    /// Kind of match between an entry and a descriptor, with its word in explanations. The first kind that matches
    /// wins.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum MatchKind {
        /// The value is equal.
        Exact = "exact",
        /// A wildcard matches the value; of several, and of `match` patterns, the first in the file wins.
        Wildcard = "wildcard",
        /// A `match` matches the value; it has the rank of a wildcard.
        Match = "match",
        /// The descriptor has only the key.
        Any = "default",
    }
}

/// Converts a `value` as written; an empty one is the same as none.
impl From<String> for ValuePattern {
    fn from(text: String) -> Self {
        match text {
            text if text.is_empty() => Self::Any,
            text if has_star(&text) => Self::Wildcard(text),
            text => Self::Exact(text),
        }
    }
}

impl ValuePattern {
    /// Text in names, as written; empty for any value.
    pub fn pattern_text(&self) -> &str {
        match self {
            Self::Any => "",
            Self::Exact(text) | Self::Wildcard(text) => text,
            Self::Match(pattern) => pattern.text(),
        }
    }

    /// Returns the kind of match of a descriptor with this pattern and this key. A `*` in a key is a wildcard too.
    pub fn match_kind(&self, key: &str) -> MatchKind {
        match self {
            // The compiler refuses a `match` beside such a key.
            Self::Match(_) => MatchKind::Match,
            Self::Any | Self::Exact(_) | Self::Wildcard(_) if has_star(key) => MatchKind::Wildcard,
            Self::Any => MatchKind::Any,
            Self::Exact(_) => MatchKind::Exact,
            Self::Wildcard(_) => MatchKind::Wildcard,
        }
    }
}

/// Returns `true` if the text has a `*`, so that it is a wildcard.
pub(crate) fn has_star(text: &str) -> bool {
    text.contains('*')
}

impl MatchKind {
    /// Returns true if the values of a match can be different, so that a metric name may contain the value.
    pub const fn has_many_values(self) -> bool {
        match self {
            Self::Exact => false,
            Self::Wildcard | Self::Match | Self::Any => true,
        }
    }

    /// Returns true if `share_threshold` applies: the values of a match can share one counter.
    pub const fn can_share_counter(self) -> bool {
        match self {
            Self::Wildcard | Self::Match => true,
            Self::Exact | Self::Any => false,
        }
    }
}
