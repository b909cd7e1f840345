//! Conditions on the text of a variable.

use std::fmt;

use crate::go_syntax::parse_bool;

/// A condition on the text of a variable that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Any text, the empty one included.
    Set,
    /// Any text except the empty one.
    NotEmpty,
    /// A word for true.
    True,
    /// Exactly this text.
    Is(&'static str),
    /// Any text except this one and the empty one.
    IsNot(&'static str),
    /// No text.
    Never,
}

impl Condition {
    /// Returns `true` if `text` meets the condition.
    pub fn applies(self, text: &str) -> bool {
        match self {
            Self::Set => true,
            Self::NotEmpty => !text.is_empty(),
            Self::True => parse_bool(text) == Some(true),
            Self::Is(word) => text == word,
            Self::IsNot(word) => !text.is_empty() && text != word,
            Self::Never => false,
        }
    }
}

/// Completes "refused ..." in the documentation.
impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Set => f.write_str("if set"),
            Self::NotEmpty => f.write_str("unless empty"),
            Self::True => f.write_str("if true"),
            Self::Is(word) => write!(f, "if {word}"),
            Self::IsNot(word) => write!(f, "unless {word}"),
            Self::Never => f.write_str("never"),
        }
    }
}
