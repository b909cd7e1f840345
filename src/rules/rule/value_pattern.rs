//! What a descriptor of a rule file matches in an entry: the pattern of its value, and the kind of match that it gives.
//!
//! A new kind of pattern is a variant of [`ValuePattern`], which holds what it compares with, and one of [`MatchKind`],
//! which has its rank among siblings. No `match` on them has a `_` arm, so the compiler lists the places that must know
//! a new one.

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
}

named_enum! {
    /// Kind of match between an entry and a descriptor, with its word in explanations. The first kind that matches
    /// wins.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum MatchKind {
        /// The value is equal.
        Exact = "exact",
        /// A wildcard matches the value; of several, the first in the file wins.
        Wildcard = "wildcard",
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
        }
    }

    /// Returns the kind of match of a descriptor with this pattern and this key. A `*` in a key is a wildcard too.
    pub fn match_kind(&self, key: &str) -> MatchKind {
        match self {
            Self::Any | Self::Exact(_) | Self::Wildcard(_) if has_star(key) => MatchKind::Wildcard,
            Self::Any => MatchKind::Any,
            Self::Exact(_) => MatchKind::Exact,
            Self::Wildcard(_) => MatchKind::Wildcard,
        }
    }
}

fn has_star(text: &str) -> bool {
    text.contains('*')
}

impl MatchKind {
    /// Returns true if the values of a match can be different, so that a metric name may contain the value.
    pub const fn has_many_values(self) -> bool {
        match self {
            Self::Exact => false,
            Self::Wildcard | Self::Any => true,
        }
    }

    /// Returns true if `share_threshold` applies: the values of a match can share one counter.
    pub const fn can_share_counter(self) -> bool {
        match self {
            Self::Wildcard => true,
            Self::Exact | Self::Any => false,
        }
    }
}
