//! Durations in flags, written as settings write theirs: `5s`, `1m30s`.

use std::time::Duration;

use crate::settings::parse;
use crate::settings::setting::Kind;
use crate::settings::value::Value;

/// The duration that `text` says, from `min` to `max`. The error says what to write.
pub(super) fn within(min: Duration, max: Duration, text: &str) -> Result<Duration, String> {
    of_kind(Kind::Duration { min, max, zero: false }, text)
}

/// The same, or 0.
pub(super) fn within_or_none(min: Duration, max: Duration, text: &str) -> Result<Duration, String> {
    of_kind(Kind::Duration { min, max, zero: true }, text)
}

fn of_kind(kind: Kind, text: &str) -> Result<Duration, String> {
    match parse::value(kind, text) {
        Ok(Value::Duration(duration)) => Ok(duration),
        Ok(_) => Err("not a duration".to_owned()),
        Err(fault) => Err(format!("{}; {}", fault.what, fault.fix)),
    }
}
