//! Text to values, by the syntax of Go, which the environments of envoyproxy/ratelimit are written in.
//!
//! `value` knows the kinds and says what is wrong and how to put it right; the functions below it know the syntax and
//! say only yes or no. Nothing here knows the name of a variable.

use std::time::Duration;

use super::address::Address;
use super::setting::{BYTE_UNITS, Kind, one_of};
use super::value::{Secret, Value};

/// Why a text is no value: what is wrong, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What is wrong.
    pub what: String,
    /// What to write instead.
    pub fix: String,
}

impl Fault {
    pub(crate) fn new(what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { what: what.into(), fix: fix.into() }
    }
}

/// The value that `text` stands for under `kind`.
pub fn value(kind: Kind, text: &str) -> Result<Value, Fault> {
    let may_be_empty = match kind {
        Kind::Bool | Kind::Int { .. } | Kind::Float { .. } | Kind::Duration { .. } | Kind::Bytes { .. } => false,
        Kind::OneOf { words, .. } => words.contains(&""),
        _ => true,
    };
    if text.is_empty() && !may_be_empty {
        return Err(Fault::new("set but empty", format!("unset it or give {}", wanted(kind))));
    }
    match kind {
        Kind::Bool => bool(text).map(Value::Bool).ok_or_else(|| Fault::new("not a bool", "give true or false")),
        Kind::Int { min, max } => {
            within(int(text).ok_or("not a whole number"), |n| *n >= min && *n <= max, kind).map(Value::Int)
        }
        Kind::Float { min, max } => {
            within(float(text).ok_or("not a number"), |n| *n >= min && *n <= max, kind).map(Value::Float)
        }
        Kind::Bytes { min, max } => {
            within(bytes(text).ok_or("not a size"), |n| *n >= min && *n <= max, kind).map(Value::Bytes)
        }
        Kind::Duration { min, max, zero } => {
            if text.bytes().all(|b| b.is_ascii_digit()) && text != "0" {
                return Err(Fault::new("a duration needs a unit", format!("write {text}s for seconds")));
            }
            let in_bounds = |span: &Duration| (zero && span.is_zero()) || (*span >= min && *span <= max);
            within(duration(text), in_bounds, kind).map(Value::Duration)
        }
        Kind::Text => Ok(Value::Text(text.to_owned())),
        Kind::Path if text.contains('\0') => Err(Fault::new("not a path", "remove the NUL character")),
        Kind::Path => Ok(Value::Path(text.into())),
        Kind::List => Ok(Value::List(if text.trim().is_empty() { Vec::new() } else { parts(text).collect() })),
        Kind::Map => map(text),
        Kind::Header => header(text),
        Kind::Address => Address::parse(text)
            .map(Value::Address)
            .ok_or_else(|| Fault::new("not an address", "give host:port or :port, with a port of 0 to 65535")),
        Kind::OneOf { words, any_case } => word(words, any_case, text),
        Kind::Secret | Kind::Url => Ok(Value::Secret(Secret::new(text))),
    }
}

/// What to write: the kind in words.
fn wanted(kind: Kind) -> String {
    let bounds = kind.to_string();
    let bounds = bounds.split_once(", ").map_or("", |(_, bounds)| bounds);
    match kind {
        Kind::Bool => "true or false".to_owned(),
        Kind::OneOf { words, .. } => one_of(words),
        Kind::Int { .. } => format!("a whole number, {bounds}").trim_end_matches(", ").to_owned(),
        Kind::Float { .. } => format!("a number, {bounds}").trim_end_matches(", ").to_owned(),
        Kind::Duration { .. } if bounds.is_empty() => "a duration such as 150us, 10s or 1h30m".to_owned(),
        Kind::Duration { .. } => format!("a duration such as 1.5s, {bounds}"),
        Kind::Bytes { .. } => format!("bytes, or a size such as 64MiB, {bounds}"),
        other => other.to_string(),
    }
}

/// `parsed`, if it is within its bounds.
fn within<T>(parsed: Result<T, &str>, in_bounds: impl Fn(&T) -> bool, kind: Kind) -> Result<T, Fault> {
    match parsed {
        Ok(value) if in_bounds(&value) => Ok(value),
        Ok(_) => Err(Fault::new("out of range", format!("give {}", wanted(kind)))),
        Err(what) => Err(Fault::new(what, format!("give {}", wanted(kind)))),
    }
}

fn parts(text: &str) -> impl Iterator<Item = String> {
    text.split(',').map(str::to_owned)
}

fn map(text: &str) -> Result<Value, Fault> {
    if text.trim().is_empty() {
        return Ok(Value::Map(Vec::new()));
    }
    let pairs = text.split(',').map(|pair| {
        let (key, value) = pair.split_once(':')?;
        (!value.contains(':')).then(|| (key.to_owned(), value.to_owned()))
    });
    pairs.collect::<Option<Vec<_>>>().map(Value::Map).ok_or_else(|| Fault::new("not a map", "give key:value,key:value"))
}

/// A field name by RFC 9110, section 5.1, 256 bytes at most: nothing that could end a header or begin another.
fn header(text: &str) -> Result<Value, Fault> {
    const LONGEST_NAME_BYTES: usize = 256;
    let name = text.trim();
    let is_token = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b));
    if !is_token || name.len() > LONGEST_NAME_BYTES {
        return Err(Fault::new("not a header name", "give letters, digits and hyphens, 256 at most"));
    }
    Ok(Value::Text(name.to_owned()))
}

/// The word of `words` that `text` is.
fn word(words: &'static [&'static str], any_case: bool, text: &str) -> Result<Value, Fault> {
    let same = |word: &&str| if any_case { word.eq_ignore_ascii_case(text) } else { *word == text };
    let known = words.iter().copied().find(same);
    known.map(Value::Word).ok_or_else(|| Fault::new("not known", format!("give {}", one_of(words))))
}

/// Go's words for true and false.
pub(crate) fn bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

/// A Go integer literal: `0x`, `0o`, `0b` and a leading 0 choose the base, and `_` may part digits where one of them
/// stands.
fn int(text: &str) -> Option<i64> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_ascii_lowercase();
    let (radix, digits) = match (lower.get(..2), digits.strip_prefix('0')) {
        (Some("0x"), _) => (16, &digits[2..]),
        (Some("0o"), _) => (8, &digits[2..]),
        (Some("0b"), _) => (2, &digits[2..]),
        (Some(_), Some(octal)) => (8, octal),
        _ => (10, digits),
    };
    let parted = radix != 10 && !digits.ends_with('_') && !digits.contains("__");
    let digits = if parted { digits.replace('_', "") } else { digits.to_owned() };
    // A second sign would pass from_str_radix.
    if !digits.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return None;
    }
    i64::from_str_radix(&format!("{sign}{digits}"), radix).ok()
}

/// A decimal number; neither infinite nor NaN.
fn float(text: &str) -> Option<f64> {
    text.parse::<f64>().ok().filter(|value| value.is_finite())
}

/// Plain bytes, or a number with KiB, MiB or GiB.
fn bytes(text: &str) -> Option<u64> {
    let unit = BYTE_UNITS.iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, *bytes)));
    let (number, bytes) = unit.unwrap_or((text, 1));
    let number = if bytes == 1 { number } else { number.trim_end() };
    let is_plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    number.parse::<u64>().ok().filter(|_| is_plain)?.checked_mul(bytes)
}

/// A Go duration: `0`, or decimal numbers with units, one after the other. What is smaller than a nanosecond is
/// dropped.
fn duration(text: &str) -> Result<Duration, &'static str> {
    match text.strip_prefix('-') {
        None => unsigned_duration(text.strip_prefix('+').unwrap_or(text)),
        Some(span) => match unsigned_duration(span)? {
            Duration::ZERO => Ok(Duration::ZERO),
            _ => Err("a duration can not be negative"),
        },
    }
}

fn unsigned_duration(text: &str) -> Result<Duration, &'static str> {
    const SYNTAX: &str = "not a duration";
    const TOO_LONG: &str = "out of range";
    let mut rest = text;
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(SYNTAX);
    }
    let mut total_ns: u64 = 0;
    while !rest.is_empty() {
        let (whole, after) = digits(rest);
        let (fraction, after) = after.strip_prefix('.').map_or(("", after), digits);
        if whole.is_empty() && fraction.is_empty() {
            return Err(SYNTAX);
        }
        let (unit_ns, after) = unit(after).ok_or(SYNTAX)?;
        let whole = if whole.is_empty() { Ok(0) } else { whole.parse::<u64>() };
        let whole_ns = whole.ok().and_then(|whole| whole.checked_mul(unit_ns)).ok_or(TOO_LONG)?;
        let part_ns = whole_ns.checked_add(fraction_ns(fraction, unit_ns)).ok_or(TOO_LONG)?;
        total_ns = total_ns.checked_add(part_ns).ok_or(TOO_LONG)?;
        rest = after;
    }
    Ok(Duration::from_nanos(total_ns))
}

/// The digits at the head of `text`, and what follows them.
fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

/// The unit at the head of `text` in nanoseconds, and what follows it.
fn unit(text: &str) -> Option<(u64, &str)> {
    let (name, rest) = text.split_at(text.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(text.len()));
    let nanos = match name {
        "ns" => 1,
        // The micro sign and the Greek letter look alike; Go takes both.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    };
    Some((nanos, rest))
}

/// `0.fraction` units in nanoseconds; digits past the fifteenth are too small to matter.
fn fraction_ns(fraction: &str, unit_ns: u64) -> u64 {
    let mut scale: u128 = 1;
    let mut value: u128 = 0;
    for digit in fraction.bytes().take(15) {
        scale *= 10;
        value = value * 10 + u128::from(digit - b'0');
    }
    u64::try_from(value * u128::from(unit_ns) / scale).expect("a fraction of a unit is less than the unit")
}
