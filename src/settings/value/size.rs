//! Sizes: plain bytes, or a number with KiB, MiB or GiB.

use super::SettingValue;
use super::number::require;
use crate::settings::invalid::InvalidSetting;

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// Returns the number of bytes, or the largest that this machine can address.
    pub(crate) fn as_usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// Inclusive range of a size, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeRange {
    min: u64,
    max: u64,
}

impl SizeRange {
    /// The sizes from `min` to `max` bytes.
    pub(crate) const fn new(min: u64, max: u64) -> Self {
        Self { min, max }
    }
}

/// Units of sizes, largest first, in bytes.
const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl SettingValue for ByteSize {
    type Default = u64;
    type Allowed = SizeRange;
    const ANY: SizeRange = SizeRange::new(0, u64::MAX);
    const KIND: &'static str = "bytes";

    fn parse(text: &str, allowed: &SizeRange) -> Result<Self, InvalidSetting> {
        let range = Self::allowed_text(allowed).unwrap_or_default();
        let wanted = format!("bytes, or a size such as 64MiB, {range}");
        require(text, &wanted)?;
        let invalid = |what: &str| InvalidSetting::new(what, format!("give {wanted}"));
        let bytes = bytes(text).ok_or_else(|| invalid("not a size"))?;
        if (allowed.min..=allowed.max).contains(&bytes) { Ok(Self(bytes)) } else { Err(invalid("out of range")) }
    }

    fn from_default(default: u64) -> Self {
        Self(default)
    }

    fn default_text(default: u64) -> String {
        size_text(default)
    }

    fn allowed_text(allowed: &SizeRange) -> Option<String> {
        Some(format!("{} to {}", size_text(allowed.min), size_text(allowed.max)))
    }
}

fn bytes(text: &str) -> Option<u64> {
    let unit = UNITS.iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, *bytes)));
    let (number, bytes) = unit.unwrap_or((text, 1));
    let number = if bytes == 1 { number } else { number.trim_end() };
    let is_plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    number.parse::<u64>().ok().filter(|_| is_plain)?.checked_mul(bytes)
}

/// Formats a size in the largest unit that needs no fraction.
fn size_text(size: u64) -> String {
    match UNITS.iter().find(|(_, bytes)| size >= *bytes && size.is_multiple_of(*bytes)) {
        Some((name, bytes)) => format!("{}{name}", size / bytes),
        None => size.to_string(),
    }
}
