//! Booleans, numbers, durations and sizes, in Go's notation, within inclusive ranges.
//!
//! A size is a number of bytes, or a number with KiB, MiB or GiB.
//!
//! Decides: how durations, sizes, numbers and booleans of variables are written; what is out of range.
//! Decides: white space around them.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use super::SettingValue;
use crate::base::go_syntax::{DurationError, parse_bool, parse_duration, parse_int};
use crate::settings::problem::InvalidSetting;

/// Parses a value that must be in `range`; the fix asks for `noun`.
fn parse_in_range<T: PartialOrd>(
    text: &str,
    range: &str,
    noun: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T, InvalidSetting> {
    let wanted = if range.is_empty() { noun.to_owned() } else { format!("{noun}, {range}") };
    if text.is_empty() {
        return Err(InvalidSetting::new("set but empty", format!("unset it or give {wanted}")));
    }
    let value = parse(text).map_err(|what| InvalidSetting::new(what, format!("give {wanted}")))?;
    let bound = |text: &str| parse(text).expect("a test parses all ranges");
    if is_in_range(&value, range, bound) {
        Ok(value)
    } else {
        Err(InvalidSetting::new("out of range", format!("give {wanted}")))
    }
}

/// Returns `true` if a value is in a range such as `1 to 5`, `0 or 1s to 24h` or `1 or more`; all are in the empty one.
fn is_in_range<T: PartialOrd>(value: &T, range: &str, bound: impl Fn(&str) -> T) -> bool {
    if let Some(range) = range.strip_prefix("0 or ").filter(|rest| *rest != "more") {
        return *value == bound("0") || is_in_range(value, range, bound);
    }
    match (range.strip_suffix(" or more"), range.split_once(" to ")) {
        (Some(min), _) => *value >= bound(min),
        (None, Some((min, max))) => (bound(min)..=bound(max)).contains(value),
        (None, None) => true,
    }
}

impl SettingValue for bool {
    const TYPE_NAME: &'static str = "bool";

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        parse_in_range(text, "", "true or false", |text| parse_bool(text).ok_or_else(|| "not a bool".to_owned()))
    }
}

/// Implements `SettingValue` for a type of whole numbers with its range and its conversion from `i64`.
macro_rules! whole_number {
    ($type:ty, $range:literal, $convert:expr) => {
        impl SettingValue for $type {
            const TYPE_NAME: &'static str = "int";
            const RANGE: &'static str = $range;

            fn parse(text: &str, range: &str) -> Result<Self, InvalidSetting> {
                let parse = |text: &str| parse_int(text).ok_or_else(|| "not a whole number".to_owned());
                let number = parse_in_range(text, range, "a whole number", parse)?;
                let convert: fn(i64) -> Option<Self> = $convert;
                convert(number)
                    .ok_or_else(|| InvalidSetting::new("out of range", format!("give a whole number, {range}")))
            }
        }
    };
}

whole_number!(i64, "", Some);
whole_number!(u16, "0 to 65535", |number| Self::try_from(number).ok());
whole_number!(u32, "0 to 4294967295", |number| Self::try_from(number).ok());
whole_number!(u64, "0 or more", |number| Self::try_from(number).ok());
whole_number!(usize, "0 or more", |number| Self::try_from(number).ok());
whole_number!(NonZeroU32, "1 to 4294967295", |number| u32::try_from(number).ok().and_then(Self::new));
whole_number!(NonZeroUsize, "1 or more", |number| usize::try_from(number).ok().and_then(Self::new));

impl SettingValue for f64 {
    const TYPE_NAME: &'static str = "float";

    /// Parses a finite number.
    fn parse(text: &str, range: &str) -> Result<Self, InvalidSetting> {
        parse_in_range(text, range, "a number", |text| {
            let number = text.parse::<Self>().ok().filter(|number| number.is_finite());
            number.ok_or_else(|| "not a number".to_owned())
        })
    }
}

impl SettingValue for Duration {
    const TYPE_NAME: &'static str = "duration";

    fn parse(text: &str, range: &str) -> Result<Self, InvalidSetting> {
        if let Err(error @ DurationError::NoUnit) = parse_duration(text) {
            const UNITS: [(&str, &str); 3] = [("s", "seconds"), ("ms", "milliseconds"), ("us", "microseconds")];
            let is_allowed = |(unit, _): &(&str, &str)| Self::parse(&format!("{text}{unit}"), range).is_ok();
            if let Some((unit, name)) = UNITS.into_iter().find(is_allowed) {
                return Err(InvalidSetting::new(error.to_string(), format!("write {text}{unit} for {name}")));
            }
        }
        let example = if range.is_empty() { "150us, 10s or 1h30m" } else { "1.5s" };
        let noun = format!("a duration such as {example}");
        parse_in_range(text, range, &noun, |text| parse_duration(text).map_err(|error| error.to_string()))
    }
}

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// Returns the number of bytes, or the largest that this machine can address.
    pub(crate) fn to_usize_saturating(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// Units of sizes, largest first, in bytes.
const SIZE_UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl SettingValue for ByteSize {
    const TYPE_NAME: &'static str = "bytes";

    fn parse(text: &str, range: &str) -> Result<Self, InvalidSetting> {
        parse_in_range(text, range, "bytes, or a size such as 64MiB", |text| {
            parse_byte_size(text).map(Self).ok_or_else(|| "not a size".to_owned())
        })
    }
}

fn parse_byte_size(text: &str) -> Option<u64> {
    let unit = SIZE_UNITS.iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, *bytes)));
    let (number, bytes) = unit.unwrap_or((text, 1));
    let number = if bytes == 1 { number } else { number.trim_end() };
    let is_plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    number.parse::<u64>().ok().filter(|_| is_plain)?.checked_mul(bytes)
}
