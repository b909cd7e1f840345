//! Values without a type in YAML, and formats of values in messages.
//!
//! Durations are Go's (`150us`, `1h30m`), because every other setting of the service writes them so. Overshoots are a
//! percentage or a count. Parsers here return what is wrong in words, without a section; the reader knows that.
//!
//! Decides: how durations, percentages, `max_overshoot` and `reserve` are written; their range.

use std::fmt::Write as _;

use crate::base::go_syntax::{DurationError, parse_unsigned_duration};
use crate::limit::Overshoot;
use crate::limit::period::MAX_PERIOD_US;
use crate::rules::diagnostic::escape_for_message;
use crate::rules::yaml::{Scalar, ScalarValue, YamlContent, YamlNode};

/// Reason why a value is invalid, and a valid one to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidValue {
    /// Error message.
    pub message: String,
    /// Suggested fix.
    pub hint: String,
}

fn invalid_value<T>(message: impl Into<String>, hint: impl Into<String>) -> Result<T, InvalidValue> {
    Err(InvalidValue { message: message.into(), hint: hint.into() })
}

/// Parses a duration in Go's notation: microseconds, 366 days at most; what is finer is cut off.
pub fn parse_duration_us(text: &str) -> Result<u64, InvalidValue> {
    let too_long =
        || invalid_value(format!("`{}` is longer than 366 days", escape_for_message(text)), "write a shorter one");
    match parse_unsigned_duration(text) {
        Ok(duration) => match u64::try_from(duration.as_micros()) {
            Ok(micros) if micros <= MAX_PERIOD_US => Ok(micros),
            _ => too_long(),
        },
        Err(DurationError::TooLong) => too_long(),
        Err(_) => invalid_value(
            format!("`{}` is not a duration", escape_for_message(text)),
            "write it like 10ms, 1.5s or 1h30m",
        ),
    }
}

/// A decimal number times `scale`, rounded down.
fn parse_scaled_decimal(digits: &str, scale: u128) -> Option<u128> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    // Beyond these lengths a number is out of every range, or its rest below every precision.
    if (whole.is_empty() && fraction.is_empty()) || whole.len() > 18 || fraction.contains('.') {
        return None;
    }
    let fraction = fraction.get(..18).unwrap_or(fraction);
    let value = |digits: &str| if digits.is_empty() { Some(0) } else { digits.parse::<u128>().ok() };
    let parts = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    value(whole)?.checked_mul(scale)?.checked_add(value(fraction)? * scale / parts)
}

/// Parses a percentage to a thousandth, from `least` to 100 000 thousandths of a percent.
pub fn parse_milli_percent(scalar: &Scalar<'_>, least: u32) -> Result<u32, InvalidValue> {
    let text = scalar.text().trim();
    let milli = text.strip_suffix('%').and_then(|percent| parse_scaled_decimal(percent.trim_end(), 1_000));
    match milli.and_then(|milli| u32::try_from(milli).ok()) {
        Some(milli) if (least..=100_000).contains(&milli) => Ok(milli),
        _ => invalid_value(
            format!("`{}` is not a percentage from {}% to 100%", escape_for_message(text), f64::from(least) / 1e3),
            "write a percentage such as 10%",
        ),
    }
}

/// Parses `max_overshoot`: a percentage to a thousandth, or a number of hits.
pub fn parse_overshoot(scalar: &Scalar<'_>) -> Result<Overshoot, InvalidValue> {
    let text = scalar.text().trim();
    let hint = "write a percentage such as 5% or 0.5%, or a number of hits";
    let none = || invalid_value("`max_overshoot` of 0", "use `consistency: strict`");
    if let Some(percent) = text.strip_suffix('%').map(str::trim_end) {
        let (milli, exact) = (parse_scaled_decimal(percent, 1_000), parse_scaled_decimal(percent, 1_000_000));
        return match (milli, exact) {
            (Some(0), Some(0)) => none(),
            (Some(milli), Some(exact)) if milli * 1_000 != exact => {
                invalid_value(format!("`{}` is finer than 0.001%", escape_for_message(text)), "round it")
            }
            (Some(milli @ 1..=100_000), _) => {
                Ok(Overshoot::MilliPercent(u32::try_from(milli).expect("100 000 fits in 32 bits")))
            }
            (Some(_), _) => {
                invalid_value(format!("`{}` is more than 100%", escape_for_message(text)), "raise the limit instead")
            }
            (None, _) => invalid_value(format!("`{}` is not a percentage", escape_for_message(text)), hint),
        };
    }
    match scalar.value() {
        ScalarValue::Int(0) => none(),
        ScalarValue::Int(hits) if u32::try_from(hits).is_ok() => {
            Ok(Overshoot::Hits(u32::try_from(hits).expect("checked by the guard")))
        }
        _ => {
            invalid_value(format!("`{}` is neither a percentage nor a number of hits", escape_for_message(text)), hint)
        }
    }
}

/// Describes a value for a type error: YAML's short tag, and its text unless it is a collection.
pub fn describe_node(node: &YamlNode<'_>) -> String {
    let scalar = match &node.content {
        YamlContent::List(_) => return "!!seq".into(),
        YamlContent::Map(_) => return "!!map".into(),
        YamlContent::Scalar(scalar) => scalar,
    };
    let tag = match scalar.value() {
        ScalarValue::Null => "!!null",
        ScalarValue::Bool(_) => "!!bool",
        ScalarValue::Int(_) | ScalarValue::Large(_) => "!!int",
        ScalarValue::Float(_) => "!!float",
        ScalarValue::Text => "!!str",
    };
    // Truncated as envoyproxy/ratelimit's YAML reader does.
    let text = scalar.text();
    if text.len() > 10 {
        let end = (0..=7).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        return format!("{tag} `{}...`", escape_for_message(&text[..end]));
    }
    format!("{tag} `{}`", escape_for_message(text))
}

/// Formats a value as Go prints it, truncated after about 200 bytes. Envoyproxy/ratelimit shows list elements so.
pub fn format_as_go(node: &YamlNode<'_>) -> String {
    let mut out = String::new();
    write_as_go(node, &mut out);
    escape_for_message(&out)
}

fn write_as_go(node: &YamlNode<'_>, out: &mut String) {
    if out.len() > 200 {
        return;
    }
    match &node.content {
        YamlContent::Scalar(scalar) => {
            // Writing to a string does not fail.
            let _ = match scalar.value() {
                ScalarValue::Null => write!(out, "<nil>"),
                ScalarValue::Bool(truth) => write!(out, "{truth}"),
                ScalarValue::Int(number) => write!(out, "{number}"),
                ScalarValue::Large(number) => write!(out, "{number}"),
                ScalarValue::Float(number) => write!(out, "{number}"),
                ScalarValue::Text => write!(out, "{}", scalar.text()),
            };
        }
        YamlContent::List(list) => {
            out.push('[');
            for (index, node) in list.iter().enumerate().take(100) {
                out.push_str(if index == 0 { "" } else { " " });
                write_as_go(node, out);
            }
            out.push(']');
        }
        YamlContent::Map(map) => {
            out.push_str("map[");
            for (index, (key, value)) in map.iter().enumerate().take(100) {
                out.push_str(if index == 0 { "" } else { " " });
                write_as_go(key, out);
                out.push(':');
                write_as_go(value, out);
            }
            out.push(']');
        }
    }
}

/// Converts a value to JSON. Infinities and NaN, which JSON lacks, become their names; keys become text.
pub fn to_json(node: &YamlNode<'_>) -> serde_json::Value {
    match &node.content {
        YamlContent::Scalar(scalar) => match scalar.value() {
            ScalarValue::Null => serde_json::Value::Null,
            ScalarValue::Bool(truth) => truth.into(),
            ScalarValue::Int(number) => number.into(),
            ScalarValue::Large(number) => number.into(),
            ScalarValue::Float(number) if number.is_finite() => number.into(),
            ScalarValue::Float(number) if number.is_nan() => "NaN".into(),
            ScalarValue::Float(number) => if number > 0.0 { "Infinity" } else { "-Infinity" }.into(),
            ScalarValue::Text => scalar.text().into(),
        },
        YamlContent::List(list) => list.iter().map(to_json).collect(),
        YamlContent::Map(map) => map.iter().map(|(key, value)| (key_to_json(key), to_json(value))).collect(),
    }
}

fn key_to_json(key: &YamlNode<'_>) -> String {
    key.as_scalar().map_or_else(|| format_as_go(key), |scalar| scalar.text().to_owned())
}
