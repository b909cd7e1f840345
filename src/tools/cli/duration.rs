//! Durations in flags, in the notation of settings: `5s`, `1m30s`.

use std::time::Duration;

use crate::settings::value::SettingValue as _;
use crate::settings::value::number::DurationRange;

/// Parses a duration of `range`. The error says what to write.
pub(super) fn parse(text: &str, range: &DurationRange) -> Result<Duration, String> {
    Duration::parse(text, range).map_err(|invalid| format!("{}; {}", invalid.what, invalid.fix))
}
