//! What a descriptor of a rule file matches in an entry: the pattern of its value, with the pattern of a `match`, and
//! the kind of match that it gives.
//!
//! A new kind of pattern is a variant of [`ValuePattern`], which holds what it compares with, and one of [`MatchKind`],
//! which has its rank among siblings. No `match` on them has a `_` arm, so the compiler lists the places that must know
//! a new one.
//!
//! A [`MatchPattern`] is one operator, negated or not. Its text names it in `/rlconfig`, metrics and keys of shared
//! counters: `in(GET, HEAD)`, `cidr(10.0.0.0/8)`, `not_regex(/v[0-9]+)`. Two patterns of one level have different texts
//! unless they match the same values. Long ones are cut and end in a hash. That of a set from a file has the file's
//! name, so it stays when the file changes.
//!
//! Decides: which patterns can share a counter (`share_threshold`); the name of a `match` in metrics and keys.

use std::fmt::Write as _;
use std::sync::Arc;

use super::expression::compile_and_match_expression;
use super::network::{Network, NetworkSet, NumericIpAddress};
use super::value_set::ValueSet;
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

/// Pattern of a `match`.
#[derive(Clone, Debug)]
pub struct MatchPattern {
    /// What it compares values with.
    pub operator: Operator,
    /// It matches the values that the operator does not.
    pub negated: bool,
    /// Text in names.
    text: Arc<str>,
}

/// Operator of a `match`.
#[derive(Clone, Debug)]
pub enum Operator {
    /// The value is one of these; ascending and distinct.
    In(Arc<[Box<str>]>),
    /// The value is in this file.
    InFile(SetFile<ValueSet>),
    /// The value is an address in one of these networks; ascending and distinct.
    Cidr(Arc<[Network]>),
    /// The value is an address in a network of this file.
    CidrFile(SetFile<NetworkSet>),
    /// The expression matches the whole value.
    Regex(Arc<str>),
}

/// Set that a file contains.
#[derive(Debug)]
pub struct SetFile<T> {
    /// Name of the file as the rule has it.
    pub name: Arc<str>,
    /// Contents.
    pub set: Arc<T>,
}

impl<T> Clone for SetFile<T> {
    fn clone(&self) -> Self {
        Self { name: Arc::clone(&self.name), set: Arc::clone(&self.set) }
    }
}

/// Two patterns are equal if their texts are.
impl PartialEq for MatchPattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for MatchPattern {}

/// Maximum length of a text, without the hash of a cut one, in bytes.
const MAX_TEXT_BYTES: usize = 100;

impl MatchPattern {
    /// Creates a pattern. Lists must be sorted and distinct, expressions valid.
    pub fn new(operator: Operator, negated: bool) -> Self {
        let not = if negated { "not_" } else { "" };
        let text = match &operator {
            Operator::In(values) => format!("{not}in({})", join_bounded(values.iter().map(|value| quote_value(value)))),
            Operator::InFile(file) => format!("{not}in(file {})", file.name),
            Operator::Cidr(networks) => format!("{not}cidr({})", join_bounded(networks.iter().map(Network::to_string))),
            Operator::CidrFile(file) => format!("{not}cidr(file {})", file.name),
            Operator::Regex(expression) => format!("{not}regex({})", cut_text(expression)),
        };
        Self { operator, negated, text: text.into() }
    }

    /// Text in names.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns `true` if the pattern matches the value. A look-up in an index is faster.
    pub fn matches(&self, value: &[u8]) -> bool {
        let contains = match &self.operator {
            Operator::In(values) => values.binary_search_by(|one| one.as_bytes().cmp(value)).is_ok(),
            Operator::InFile(file) => file.set.contains(value),
            Operator::Cidr(networks) => NumericIpAddress::from_value(value)
                .is_some_and(|address| networks.iter().copied().collect::<NetworkSet>().contains(address)),
            Operator::CidrFile(file) => {
                NumericIpAddress::from_value(value).is_some_and(|address| file.set.contains(address))
            }
            Operator::Regex(expression) => compile_and_match_expression(expression, value),
        };
        contains != self.negated
    }
}

/// Joins items by `, `; a list that is too long is cut and ends in its length and a hash.
fn join_bounded(items: impl ExactSizeIterator<Item = String>) -> String {
    let count = items.len();
    let (mut text, mut is_cut) = (String::new(), false);
    let mut hasher = blake3::Hasher::new();
    for item in items {
        hasher.update(&(item.len() as u64).to_le_bytes()).update(item.as_bytes());
        let separator = if text.is_empty() { "" } else { ", " };
        is_cut |= text.len() + separator.len() + item.len() > MAX_TEXT_BYTES;
        if !is_cut {
            text += separator;
            text += &item;
        }
    }
    if is_cut {
        let separator = if text.is_empty() { "" } else { ", " };
        // Writing to a string does not fail. An item with a space is quoted, so none looks like this.
        let _ = write!(text, "{separator}{count} in all #{}", &hasher.finalize().to_hex()[..16]);
    }
    text
}

fn cut_text(text: &str) -> String {
    if text.len() <= MAX_TEXT_BYTES {
        return text.to_owned();
    }
    let end = (0..=MAX_TEXT_BYTES).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    format!("{}... #{}", &text[..end], &blake3::hash(text.as_bytes()).to_hex()[..16])
}

/// Quotes a value that could be taken for several, or for none.
fn quote_value(value: &str) -> String {
    let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && !",()\"\\".contains(c);
    if !value.is_empty() && value.chars().all(is_plain) {
        return value.to_owned();
    }
    serde_json::Value::from(value).to_string()
}
