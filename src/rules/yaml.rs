//! YAML text as a tree of nodes with positions, and the values of its scalars.
//!
//! Aliases share the node that they name, so a tree is never larger in memory than its text. Keys of a mapping are
//! unique.
//!
//! Plain scalars follow YAML 1.1 as gopkg.in/yaml.v2 implements it, because existing rule files rely on it. `yes` and
//! `on` are booleans; `0x10`, `010`, `0b1` and `1_000` are whole numbers; `~` and an empty scalar are null. Dates and
//! sexagesimal numbers are text. A scalar that is quoted, or tagged `!!str`, is always text.
//!
//! Decides: whether `1`, `yes` or `010` is a number, a boolean or text (`resolve_plain_scalar`).

pub mod parse;
pub mod text;

use std::borrow::Cow;
use std::rc::Rc;

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

    /// Number of mappings that are elements of lists, here and below: at least that of descriptors.
    pub fn count_listed_mappings(&self) -> usize {
        let (mut count, mut waiting) = (0, vec![self]);
        while let Some(node) = waiting.pop() {
            match &node.content {
                YamlContent::Scalar(_) => {}
                YamlContent::List(list) => {
                    let is_mapping = |element: &&Self| matches!(element.content, YamlContent::Map(_));
                    count += list.iter().filter(is_mapping).count();
                    waiting.extend(list.iter());
                }
                YamlContent::Map(map) => waiting.extend(map.iter().map(|(_, value)| value)),
            }
        }
        count
    }

    fn is_merge_key(&self) -> bool {
        self.as_scalar().is_some_and(|scalar| scalar.is_plain() && scalar.text() == "<<")
    }

    /// Text of a key, for messages.
    fn key_label(&self) -> Cow<'_, str> {
        self.as_scalar().map_or("?".into(), |scalar| scalar.text().into())
    }
}

/// Text of a scalar, with the form in which it was written.
#[derive(Clone, Debug)]
pub struct Scalar<'a> {
    text: Cow<'a, str>,
    form: ScalarForm,
}

/// Form in which a scalar was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScalarForm {
    /// Plain, or tagged with the type of its text: the text decides.
    Plain,
    /// Quoted, a block, or tagged as text or something unknown.
    Text,
    /// Tagged `!!float`: whole numbers are floats too.
    Float,
}

/// Value of a scalar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScalarValue {
    /// Null.
    Null,
    /// Boolean.
    Bool(bool),
    /// Whole number.
    Int(i64),
    /// Whole number above the range of `i64`.
    Large(u64),
    /// Any other number.
    Float(f64),
    /// Anything else.
    Text,
}

impl<'a> Scalar<'a> {
    /// Creates a scalar. `tag` is the word after `!!`, or empty for a tag of another schema.
    pub fn new(text: Cow<'a, str>, plain: bool, tag: Option<&str>) -> Self {
        let form = match tag {
            None if plain => ScalarForm::Plain,
            None => ScalarForm::Text,
            Some("float") => ScalarForm::Float,
            Some("int" | "bool" | "null" | "timestamp") => ScalarForm::Plain,
            Some(_) => ScalarForm::Text,
        };
        Self { text, form }
    }

    /// Text, with escapes resolved.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns `true` if the text decides the type.
    pub fn is_plain(&self) -> bool {
        self.form == ScalarForm::Plain
    }

    /// Returns `true` for null.
    pub fn is_null(&self) -> bool {
        self.is_plain() && matches!(&*self.text, "" | "~" | "null" | "Null" | "NULL")
    }

    /// Returns the value.
    pub fn value(&self) -> ScalarValue {
        match (self.form, resolve_plain_scalar(&self.text)) {
            (ScalarForm::Text, _) => ScalarValue::Text,
            (ScalarForm::Plain, value) => value,
            // The rounding does not matter: floats are rejected wherever a number is expected.
            (ScalarForm::Float, ScalarValue::Int(number)) => ScalarValue::Float(number as f64),
            (ScalarForm::Float, ScalarValue::Large(number)) => ScalarValue::Float(number as f64),
            (ScalarForm::Float, value) => value,
        }
    }
}

fn resolve_plain_scalar(text: &str) -> ScalarValue {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return ScalarValue::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            return ScalarValue::Bool(true);
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            return ScalarValue::Bool(false);
        }
        ".nan" | ".NaN" | ".NAN" => return ScalarValue::Float(f64::NAN),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => return ScalarValue::Float(f64::INFINITY),
        "-.inf" | "-.Inf" | "-.INF" => return ScalarValue::Float(f64::NEG_INFINITY),
        _ => {}
    }
    match text.as_bytes()[0] {
        b'.' => parse_decimal(text),
        b'+' | b'-' | b'0'..=b'9' => {
            let digits = text.replace('_', "");
            parse_whole_number(&digits).unwrap_or_else(|| parse_decimal(&digits))
        }
        _ => ScalarValue::Text,
    }
}

/// Parses a whole number with Go's prefixes; a leading 0 means octal.
fn parse_whole_number(text: &str) -> Option<ScalarValue> {
    let (negative, unsigned) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let lower = unsigned.get(..2).map(str::to_ascii_lowercase);
    let (radix, digits) = match lower.as_deref() {
        Some("0x") => (16, &unsigned[2..]),
        Some("0o") => (8, &unsigned[2..]),
        Some("0b") => (2, &unsigned[2..]),
        Some(other) if other.starts_with('0') => (8, &unsigned[1..]),
        _ => (10, unsigned),
    };
    // `from_str_radix` would accept a second sign.
    if !digits.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return None;
    }
    let magnitude = u64::from_str_radix(digits, radix).ok()?;
    if negative {
        return 0_i64.checked_sub_unsigned(magnitude).map(ScalarValue::Int);
    }
    Some(i64::try_from(magnitude).map_or(ScalarValue::Large(magnitude), ScalarValue::Int))
}

/// Parses a number with a point or an exponent; anything else is text.
fn parse_decimal(text: &str) -> ScalarValue {
    let numeric = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'+' | b'-' | b'e' | b'E'));
    match text.parse() {
        Ok(number) if numeric => ScalarValue::Float(number),
        _ => ScalarValue::Text,
    }
}
