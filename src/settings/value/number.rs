//! Booleans, numbers, durations and sizes, in Go's notation, within inclusive ranges.
//!
//! A size is a number of bytes, or a number with KiB, MiB or GiB.
//!
//! Decides: how durations, sizes, numbers and booleans of variables are written; what is out of range.
//! Decides: white space around them.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use super::SettingValue;
use crate::base::go_syntax::{DurationError, DurationText, MAX_GO_DURATION, parse_bool, parse_duration, parse_int};
use crate::settings::problem::InvalidSetting;

/// Fails if `text` is empty: no value of these types is.
fn require_nonempty(text: &str, wanted: &str) -> Result<(), InvalidSetting> {
    if text.is_empty() {
        Err(InvalidSetting::new("set but empty", format!("unset it or give {wanted}")))
    } else {
        Ok(())
    }
}

impl SettingValue for bool {
    type Default = Self;
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "bool";

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        require_nonempty(text, "true or false")?;
        parse_bool(text).ok_or_else(|| InvalidSetting::new("not a bool", "give true or false"))
    }

    fn from_default(default: Self) -> Self {
        default
    }

    fn default_text(default: Self) -> String {
        default.to_string()
    }
}

/// Inclusive range of a whole number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntRange {
    min: i64,
    max: i64,
}

impl IntRange {
    /// The numbers from `min` to `max`.
    pub(crate) const fn new(min: i64, max: i64) -> Self {
        Self { min, max }
    }

    /// The numbers from `min` on.
    pub(crate) const fn at_least(min: i64) -> Self {
        Self { min, max: i64::MAX }
    }

    fn describe(self) -> Option<String> {
        match self {
            Self { min: i64::MIN, .. } => None,
            Self { min, max: i64::MAX } => Some(format!("{min} or more")),
            Self { min, max } => Some(format!("{min} to {max}")),
        }
    }

    /// Parses a number of the range that `convert` accepts.
    fn parse<T>(self, text: &str, convert: impl Fn(i64) -> Option<T>) -> Result<T, InvalidSetting> {
        let wanted = || match self.describe() {
            Some(range) => format!("a whole number, {range}"),
            None => "a whole number".to_owned(),
        };
        require_nonempty(text, &wanted())?;
        let invalid = |what: &str| InvalidSetting::new(what, format!("give {}", wanted()));
        let number = parse_int(text).ok_or_else(|| invalid("not a whole number"))?;
        let in_range = Some(number).filter(|number| (self.min..=self.max).contains(number));
        in_range.and_then(convert).ok_or_else(|| invalid("out of range"))
    }
}

/// Implements `SettingValue` for a type of whole numbers with its widest range and its conversion from `i64`.
macro_rules! whole_number {
    ($type:ty, $any:expr, $convert:expr) => {
        impl SettingValue for $type {
            type Default = Self;
            type AllowedValues = IntRange;
            const UNRESTRICTED: IntRange = $any;
            const TYPE_NAME: &'static str = "int";

            fn parse(text: &str, allowed: &IntRange) -> Result<Self, InvalidSetting> {
                allowed.parse(text, $convert)
            }

            fn from_default(default: Self) -> Self {
                default
            }

            fn default_text(default: Self) -> String {
                default.to_string()
            }

            fn allowed_values_text(allowed: &IntRange) -> Option<String> {
                allowed.describe()
            }
        }
    };
}

whole_number!(i64, IntRange::at_least(i64::MIN), Some);
whole_number!(u16, IntRange::new(0, 65_535), |number| Self::try_from(number).ok());
whole_number!(u32, IntRange::new(0, 4_294_967_295), |number| Self::try_from(number).ok());
whole_number!(u64, IntRange::at_least(0), |number| Self::try_from(number).ok());
whole_number!(usize, IntRange::at_least(0), |number| Self::try_from(number).ok());
whole_number!(NonZeroU32, IntRange::new(1, 4_294_967_295), |number| u32::try_from(number).ok().and_then(Self::new));
whole_number!(NonZeroUsize, IntRange::at_least(1), |number| usize::try_from(number).ok().and_then(Self::new));

/// Inclusive range of a decimal number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FloatRange {
    min: f64,
    max: f64,
}

impl FloatRange {
    /// The numbers from `min` to `max`.
    pub(crate) const fn new(min: f64, max: f64) -> Self {
        Self { min, max }
    }
}

impl SettingValue for f64 {
    type Default = Self;
    type AllowedValues = FloatRange;
    const UNRESTRICTED: FloatRange = FloatRange::new(Self::MIN, Self::MAX);
    const TYPE_NAME: &'static str = "float";

    /// Parses a finite number.
    fn parse(text: &str, allowed: &FloatRange) -> Result<Self, InvalidSetting> {
        let wanted = || match Self::allowed_values_text(allowed) {
            Some(range) => format!("a number, {range}"),
            None => "a number".to_owned(),
        };
        require_nonempty(text, &wanted())?;
        let invalid = |what: &str| InvalidSetting::new(what, format!("give {}", wanted()));
        let number = text.parse::<Self>().ok().filter(|number| number.is_finite());
        let number = number.ok_or_else(|| invalid("not a number"))?;
        let is_allowed = (allowed.min..=allowed.max).contains(&number);
        if is_allowed { Ok(number) } else { Err(invalid("out of range")) }
    }

    fn from_default(default: Self) -> Self {
        default
    }

    fn default_text(default: Self) -> String {
        default.to_string()
    }

    fn allowed_values_text(allowed: &FloatRange) -> Option<String> {
        let FloatRange { min, max } = *allowed;
        (min > Self::MIN).then(|| format!("{min} to {max}"))
    }
}

/// Inclusive range of a duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DurationRange {
    min: Duration,
    max: Duration,
    allows_zero: bool,
}

impl DurationRange {
    /// The durations from `min` to `max`.
    pub const fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, allows_zero: false }
    }

    /// Returns the range with 0 added, which turns off what the duration is for.
    pub const fn allowing_zero(self) -> Self {
        Self { allows_zero: true, ..self }
    }
}

impl SettingValue for Duration {
    type Default = Self;
    type AllowedValues = DurationRange;
    const UNRESTRICTED: DurationRange = DurationRange::new(Self::ZERO, MAX_GO_DURATION);
    const TYPE_NAME: &'static str = "duration";

    fn parse(text: &str, allowed: &DurationRange) -> Result<Self, InvalidSetting> {
        let wanted = || match Self::allowed_values_text(allowed) {
            Some(range) => format!("a duration such as 1.5s, {range}"),
            None => "a duration such as 150us, 10s or 1h30m".to_owned(),
        };
        require_nonempty(text, &wanted())?;
        match parse_duration(text) {
            Ok(value) if allowed.allows_zero && value.is_zero() => Ok(value),
            Ok(value) if (allowed.min..=allowed.max).contains(&value) => Ok(value),
            Err(error @ DurationError::NoUnit) => {
                const UNITS: [(&str, &str); 3] = [("s", "seconds"), ("ms", "milliseconds"), ("us", "microseconds")];
                let is_allowed = |(unit, _): &(&str, &str)| Self::parse(&format!("{text}{unit}"), allowed).is_ok();
                let fix = match UNITS.into_iter().find(is_allowed) {
                    Some((unit, name)) => format!("write {text}{unit} for {name}"),
                    None => format!("give {}", wanted()),
                };
                Err(InvalidSetting::new(error.to_string(), fix))
            }
            Ok(_) => Err(InvalidSetting::new(DurationError::TooLong.to_string(), format!("give {}", wanted()))),
            Err(error) => Err(InvalidSetting::new(error.to_string(), format!("give {}", wanted()))),
        }
    }

    fn from_default(default: Self) -> Self {
        default
    }

    fn default_text(default: Self) -> String {
        DurationText(default).to_string()
    }

    fn allowed_values_text(allowed: &DurationRange) -> Option<String> {
        let DurationRange { min, max, allows_zero } = *allowed;
        let zero = if allows_zero && !min.is_zero() { "0 or " } else { "" };
        (max < MAX_GO_DURATION).then(|| format!("{zero}{} to {}", DurationText(min), DurationText(max)))
    }
}

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// Returns the number of bytes, or the largest that this machine can address.
    pub(crate) fn to_usize_saturating(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// Inclusive range of a size, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSizeRange {
    min: u64,
    max: u64,
}

impl ByteSizeRange {
    /// The sizes from `min` to `max` bytes.
    pub const fn new(min: u64, max: u64) -> Self {
        Self { min, max }
    }
}

/// Units of sizes, largest first, in bytes.
const SIZE_UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl SettingValue for ByteSize {
    type Default = u64;
    type AllowedValues = ByteSizeRange;
    const UNRESTRICTED: ByteSizeRange = ByteSizeRange::new(0, u64::MAX);
    const TYPE_NAME: &'static str = "bytes";

    fn parse(text: &str, allowed: &ByteSizeRange) -> Result<Self, InvalidSetting> {
        let range = Self::allowed_values_text(allowed).unwrap_or_default();
        let wanted = format!("bytes, or a size such as 64MiB, {range}");
        require_nonempty(text, &wanted)?;
        let invalid = |what: &str| InvalidSetting::new(what, format!("give {wanted}"));
        let bytes = parse_byte_size(text).ok_or_else(|| invalid("not a size"))?;
        if (allowed.min..=allowed.max).contains(&bytes) { Ok(Self(bytes)) } else { Err(invalid("out of range")) }
    }

    fn from_default(default: u64) -> Self {
        Self(default)
    }

    fn default_text(default: u64) -> String {
        format_byte_size(default)
    }

    fn allowed_values_text(allowed: &ByteSizeRange) -> Option<String> {
        Some(format!("{} to {}", format_byte_size(allowed.min), format_byte_size(allowed.max)))
    }
}

fn parse_byte_size(text: &str) -> Option<u64> {
    let unit = SIZE_UNITS.iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, *bytes)));
    let (number, bytes) = unit.unwrap_or((text, 1));
    let number = if bytes == 1 { number } else { number.trim_end() };
    let is_plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    number.parse::<u64>().ok().filter(|_| is_plain)?.checked_mul(bytes)
}

/// Formats a size in the largest unit that needs no fraction.
fn format_byte_size(size: u64) -> String {
    match SIZE_UNITS.iter().find(|(_, bytes)| size >= *bytes && size.is_multiple_of(*bytes)) {
        Some((name, bytes)) => format!("{}{name}", size / bytes),
        None => size.to_string(),
    }
}
