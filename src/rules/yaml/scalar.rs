//! Values of plain scalars, by the rules of YAML 1.1 as gopkg.in/yaml.v2 implements them.
//!
//! `yes` and `on` are booleans; `0x10`, `010`, `0b1` and `1_000` are whole numbers; `~` and an empty scalar are null.
//! Dates and sexagesimal numbers are text. A scalar that is quoted, or tagged `!!str`, is always text.

use std::borrow::Cow;

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
