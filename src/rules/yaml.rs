//! YAML text as a tree of nodes with positions.
//!
//! Plain scalars follow YAML 1.1 (`yes`, `0x10`, `1_000`), because existing rule files rely on it. Aliases share the
//! node that they name, so a tree is never larger in memory than its text. Keys of a mapping are unique.

pub mod parse;
pub mod scalar;
pub mod text;

use std::borrow::Cow;
use std::rc::Rc;

use scalar::Scalar;

/// Position in a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
}

/// A value with its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spanned<T> {
    /// Value as written.
    pub value: T,
    /// Position of its key; in a list, that of the value.
    pub at: Position,
}

impl<T: Default> Default for Spanned<T> {
    fn default() -> Self {
        Self { value: T::default(), at: Position::default() }
    }
}

/// A node with its position. A node behind an alias has the position of its anchor.
#[derive(Clone, Debug)]
pub struct YamlNode<'a> {
    /// Position of the first character.
    pub at: Position,
    /// Content of the node.
    pub content: YamlContent<'a>,
}

/// Content of a node. Clones share it.
#[derive(Clone, Debug)]
pub enum YamlContent<'a> {
    /// Text, a number, a boolean or null.
    Scalar(Scalar<'a>),
    /// Sequence.
    List(Rc<Vec<YamlNode<'a>>>),
    /// Mapping in order, without duplicate keys.
    Map(Rc<Vec<YamlEntry<'a>>>),
}

/// Key and value of a mapping.
pub type YamlEntry<'a> = (YamlNode<'a>, YamlNode<'a>);

/// Documents of a file that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DocumentSelection {
    /// All documents.
    All,
    /// The first document; a warning reports that there are more.
    FirstOnly,
}

impl<'a> YamlNode<'a> {
    /// Returns the scalar, if the node is one.
    pub fn as_scalar(&self) -> Option<&Scalar<'a>> {
        match &self.content {
            YamlContent::Scalar(scalar) => Some(scalar),
            _ => None,
        }
    }

    /// Returns `true` for null: `~`, `null`, or no text.
    pub fn is_null(&self) -> bool {
        self.as_scalar().is_some_and(Scalar::is_null)
    }

    fn is_merge_key(&self) -> bool {
        self.as_scalar().is_some_and(|scalar| scalar.is_plain() && scalar.text() == "<<")
    }

    /// Text of a key, for messages.
    fn key_label(&self) -> Cow<'_, str> {
        self.as_scalar().map_or("?".into(), |scalar| scalar.text().into())
    }
}
