//! `ban` of a limit: how long a client that exceeded it is banned, and after how many rejections.
//!
//! What a ban does is in [`ban_state`](crate::limit::algorithm::ban_state).
//!
//! Decides: the longest ban, and the most rejections (`after`) before one.

use std::fmt;
use std::num::NonZeroU64;

use super::period::MAX_PERIOD_US;
use crate::base::clock::to_micros;
use crate::base::go_syntax::parse_unsigned_duration;

/// Maximum number of rejections before a ban begins.
pub const MAX_REJECTIONS_BEFORE_BAN: u32 = 100_000;

/// `ban` of a limit, in one word: limits are copied in every decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ban(NonZeroU64);

/// Bits of the number of rejections; the length is in those above.
const REJECTION_COUNT_BITS: u32 = 17;
/// Bit that is set if rejected peeks count; the length ends below it.
const COUNTS_PEEKS: u64 = 1 << 63;

impl Ban {
    /// Creates a ban of `length_us` microseconds, 366 days at most, that begins with the rejection number `after`, up
    /// to [`MAX_REJECTIONS_BEFORE_BAN`]; `None` if one is 0 or too large.
    pub const fn new(length_us: u64, after: u32) -> Option<Self> {
        if length_us == 0 || length_us > MAX_PERIOD_US || after == 0 || after > MAX_REJECTIONS_BEFORE_BAN {
            return None;
        }
        match NonZeroU64::new(length_us << REJECTION_COUNT_BITS | after as u64) {
            Some(packed) => Some(Self(packed)),
            None => None,
        }
    }

    /// The same ban, whose rejections are also those of peeks if `counts_peeks`.
    #[must_use]
    pub const fn with_count_of_peeks(self, counts_peeks: bool) -> Self {
        if counts_peeks { Self(self.0.saturating_add(COUNTS_PEEKS & !self.0.get())) } else { self }
    }

    /// Reads what `Display` writes, as in the decision log.
    pub fn from_text(text: &str) -> Option<Self> {
        let Some(keys) = text.strip_prefix("{for: ").and_then(|keys| keys.strip_suffix('}')) else {
            return Self::new(to_micros(parse_unsigned_duration(text).ok()?), 1);
        };
        let (keys, counts_peeks) = match keys.strip_suffix(", count_peeks: true") {
            Some(keys) => (keys, true),
            None => (keys, false),
        };
        let (length, after) = match keys.split_once(", after: ") {
            None if counts_peeks => (keys, "1"),
            after => after?,
        };
        let ban = Self::new(to_micros(parse_unsigned_duration(length).ok()?), after.parse().ok()?)?;
        Some(ban.with_count_of_peeks(counts_peeks))
    }

    /// Length in microseconds, at least 1.
    pub const fn length_us(self) -> u64 {
        (self.0.get() & !COUNTS_PEEKS) >> REJECTION_COUNT_BITS
    }

    /// True if the rejections before a ban are also those of peeks.
    pub const fn counts_peeks(self) -> bool {
        self.0.get() & COUNTS_PEEKS != 0
    }

    /// Number of rejections after which the ban begins, at least 1.
    pub const fn rejections_before_ban(self) -> u64 {
        self.0.get() & ((1 << REJECTION_COUNT_BITS) - 1)
    }
}

/// Writes the value of `ban` in a rule file: `10m`, or `{for: 10m, after: 20, count_peeks: true}`.
impl fmt::Display for Ban {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = DurationText(self.length_us());
        let after = self.rejections_before_ban();
        match (after, self.counts_peeks()) {
            (1, false) => write!(f, "{length}"),
            (1, true) => write!(f, "{{for: {length}, count_peeks: true}}"),
            (after, false) => write!(f, "{{for: {length}, after: {after}}}"),
            (after, true) => write!(f, "{{for: {length}, after: {after}, count_peeks: true}}"),
        }
    }
}

/// Duration in microseconds, in Go's notation and the largest unit that it is a multiple of.
pub(super) struct DurationText(pub(super) u64);

impl fmt::Display for DurationText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] = [(3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s"), (1_000, "ms")];
        let whole = UNITS.into_iter().find(|(length_us, _)| self.0.is_multiple_of(*length_us));
        let (length_us, unit) = whole.unwrap_or((1, "us"));
        write!(f, "{}{unit}", self.0 / length_us)
    }
}
