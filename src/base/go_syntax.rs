//! Go's notation for durations, integers and booleans.
//!
//! The settings of envoyproxy/ratelimit and its command-line tools are written in it, and rule files use it for
//! durations. These functions parse text and know no setting and no file. Sizes, maps and lists are not Go's and are
//! not here.
//!
//! Decides: which text is a duration, an integer or a boolean (`1h30m`, `0x10`, `t`) in settings and flags.

use std::fmt;
use std::time::Duration;

/// Reason why a text is not a duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// The text is not in the notation.
    #[error("not a duration")]
    Syntax,
    /// The text is a number without a unit.
    #[error("a duration needs a unit")]
    NoUnit,
    /// The duration is less than 0.
    #[error("a duration cannot be negative")]
    Negative,
    /// The duration exceeds 2^64 nanoseconds, about 584 years.
    #[error("out of range")]
    TooLong,
}

/// Longest duration that Go can represent, rounded down to whole hours: about 292 years.
pub const MAX_GO_DURATION: Duration = Duration::from_secs(2_562_047 * 3600);

/// Parses a duration: `0`, or decimal numbers with units in sequence, such as `1h30m`, with an optional sign.
///
/// Fractions of a nanosecond are cut off.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    if text != "0" && !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(DurationError::NoUnit);
    }
    match text.strip_prefix('-') {
        None => parse_unsigned_duration(text.strip_prefix('+').unwrap_or(text)),
        Some(span) => match parse_unsigned_duration(span)? {
            Duration::ZERO => Ok(Duration::ZERO),
            _ => Err(DurationError::Negative),
        },
    }
}

/// Parses a duration that has no sign.
pub fn parse_unsigned_duration(text: &str) -> Result<Duration, DurationError> {
    let mut rest = text;
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(DurationError::Syntax);
    }
    let mut total_ns: u64 = 0;
    while !rest.is_empty() {
        let (whole, after) = split_leading_digits(rest);
        let (fraction, after) = after.strip_prefix('.').map_or(("", after), split_leading_digits);
        if whole.is_empty() && fraction.is_empty() {
            return Err(DurationError::Syntax);
        }
        let (unit_ns, after) = split_leading_unit(after).ok_or(DurationError::Syntax)?;
        let whole = if whole.is_empty() { Ok(0) } else { whole.parse::<u64>() };
        let whole_ns = whole.ok().and_then(|whole| whole.checked_mul(unit_ns)).ok_or(DurationError::TooLong)?;
        let part_ns = whole_ns.checked_add(fraction_to_ns(fraction, unit_ns)).ok_or(DurationError::TooLong)?;
        total_ns = total_ns.checked_add(part_ns).ok_or(DurationError::TooLong)?;
        rest = after;
    }
    Ok(Duration::from_nanos(total_ns))
}

/// Splits `text` after its leading digits.
fn split_leading_digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

/// Splits `text` after its leading unit, and returns the unit in nanoseconds.
fn split_leading_unit(text: &str) -> Option<(u64, &str)> {
    let (name, rest) = text.split_at(text.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(text.len()));
    let nanos = match name {
        "ns" => 1,
        // The micro sign and the Greek letter look alike; Go accepts both.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    };
    Some((nanos, rest))
}

/// Converts the decimal fraction `0.fraction` of a unit to nanoseconds; digits after the fifteenth are insignificant.
fn fraction_to_ns(fraction: &str, unit_ns: u64) -> u64 {
    let mut scale: u128 = 1;
    let mut value: u128 = 0;
    for digit in fraction.bytes().take(15) {
        scale *= 10;
        value = value * 10 + u128::from(digit - b'0');
    }
    u64::try_from(value * u128::from(unit_ns) / scale).expect("a fraction of a unit is less than the unit")
}

/// Displays a duration in the notation, in the largest unit that needs no fraction.
#[derive(Clone, Copy, Debug)]
pub struct DurationText(pub Duration);

impl fmt::Display for DurationText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u128, &str); 6] = [
            (3_600_000_000_000, "h"),
            (60_000_000_000, "m"),
            (1_000_000_000, "s"),
            (1_000_000, "ms"),
            (1_000, "us"),
            (1, "ns"),
        ];
        let nanos = self.0.as_nanos();
        match UNITS.iter().find(|(unit, _)| nanos >= *unit && nanos.is_multiple_of(*unit)) {
            Some((unit, name)) => write!(f, "{}{name}", nanos / unit),
            None => f.write_str("0"),
        }
    }
}

/// Parses a boolean as `strconv.ParseBool` does.
pub fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

/// Parses an integer literal of 64 bits.
///
/// The prefixes `0x`, `0o`, `0b` and a leading 0 choose the base; with one of them `_` may separate digits.
pub fn parse_int(text: &str) -> Option<i64> {
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
    let is_separated = radix != 10 && !digits.ends_with('_') && !digits.contains("__");
    let digits = if is_separated { digits.replace('_', "") } else { digits.to_owned() };
    // A second sign would pass from_str_radix.
    if !digits.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return None;
    }
    i64::from_str_radix(&format!("{sign}{digits}"), radix).ok()
}
