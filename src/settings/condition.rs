//! Conditions on the text of a variable.

use crate::base::go_syntax::parse_bool;

/// A condition on the text of a variable that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Any text, the empty one included.
    Set,
    /// Any text except the empty one.
    NotEmpty,
    /// A word for true.
    True,
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
            Self::IsNot(word) => !text.is_empty() && text != word,
            Self::Never => false,
        }
    }
}
