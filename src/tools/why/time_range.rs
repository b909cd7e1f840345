//! The asked time: an instant, or a time of day on the last day that the logs reach.
//!
//! Decides: which day `why --at 10:05` means; how `why` writes a time.

use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::{DateTime, Time};
use jiff::tz::TimeZone;

/// Length of a day in microseconds.
const DAY_US: u64 = 86_400_000_000;

/// Time that was asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskedTime {
    /// Microseconds since the Unix epoch.
    Instant(u64),
    /// Microseconds since midnight, UTC.
    TimeOfDay(u64),
}

/// Text that is no time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write 10:05, 10:05:30 or 2026-07-08T10:05 in UTC, or with an offset, such as 2026-07-08T10:05:30+02:00")]
pub struct InvalidTime;

impl FromStr for AskedTime {
    type Err = InvalidTime;

    fn from_str(text: &str) -> Result<Self, InvalidTime> {
        // A date alone would be its midnight.
        if !text.contains(':') {
            return Err(InvalidTime);
        }
        let instant = |time: Timestamp| u64::try_from(time.as_microsecond()).map(Self::Instant).ok();
        let without_offset = || text.parse::<DateTime>().ok()?.to_zoned(TimeZone::UTC).ok();
        let time_of_day = || {
            let time = text.parse::<Time>().ok().filter(|_| !text.contains('-'))?;
            let micros = u64::try_from(time.duration_since(Time::midnight()).as_micros()).ok()?;
            Some(Self::TimeOfDay(micros))
        };
        let parsed = match text.parse::<Timestamp>() {
            Ok(time) => instant(time),
            Err(_) => without_offset().and_then(|time| instant(time.timestamp())).or_else(time_of_day),
        };
        parsed.ok_or(InvalidTime)
    }
}

/// Range of time around the asked time, found while the logs are read.
#[derive(Clone, Copy, Debug)]
pub struct TimeRange {
    asked: Option<AskedTime>,
    /// Microseconds to each side.
    half_us: u64,
    /// Middle of the range, in microseconds since the Unix epoch; `None`: everything, or not found yet.
    middle_us: Option<u64>,
}

impl TimeRange {
    /// Creates a range of `half_us` microseconds to each side of a time; `None`: everything.
    ///
    /// Around a time of day, a side is shorter than half a day, so that ranges of two days do not overlap.
    pub const fn new(asked: Option<AskedTime>, half_us: u64) -> Self {
        let half_us = match asked {
            Some(AskedTime::TimeOfDay(_)) if half_us >= DAY_US / 2 => DAY_US / 2 - 1,
            _ => half_us,
        };
        let middle_us = match asked {
            Some(AskedTime::Instant(time_us)) => Some(time_us),
            _ => None,
        };
        Self { asked, half_us, middle_us }
    }

    /// Moves the range to the day of a time in the logs. Returns true if that is a later one.
    pub fn move_to_day_of(&mut self, time_us: u64) -> bool {
        let Some(AskedTime::TimeOfDay(since_midnight)) = self.asked else { return false };
        let Some(reached) = time_us.saturating_add(self.half_us).checked_sub(since_midnight) else { return false };
        let middle_us = reached / DAY_US * DAY_US + since_midnight;
        let is_later = self.middle_us.is_none_or(|current| current < middle_us);
        if is_later {
            self.middle_us = Some(middle_us);
        }
        is_later
    }

    /// True if the range contains a time.
    pub fn contains(&self, time_us: u64) -> bool {
        self.asked.is_none() || self.middle_us.is_some_and(|middle_us| middle_us.abs_diff(time_us) <= self.half_us)
    }

    /// True if the range contains a part of the time between these two.
    pub fn overlaps(&self, first_us: u64, last_us: u64) -> bool {
        let bounds = self.bounds();
        self.asked.is_none() || bounds.is_some_and(|range| range.from_us <= last_us && first_us <= range.to_us)
    }

    /// Distance of a time from the middle in microseconds; without a middle, late times are nearer.
    pub fn distance_from_middle_us(&self, time_us: u64) -> u64 {
        self.middle_us.map_or(u64::MAX - time_us, |middle_us| middle_us.abs_diff(time_us))
    }

    /// Start, middle and end in microseconds since the Unix epoch; `None`: everything, or no time was found.
    pub fn bounds(&self) -> Option<RangeBounds> {
        let at_us = self.middle_us?;
        let (from_us, to_us) = (at_us.saturating_sub(self.half_us), at_us.saturating_add(self.half_us));
        Some(RangeBounds { from_us, at_us, to_us })
    }

    /// True if a time of day was asked for that the logs do not reach.
    pub const fn is_unreached_by_logs(&self) -> bool {
        self.asked.is_some() && self.middle_us.is_none()
    }
}

/// Bounds of a range, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeBounds {
    /// Start.
    pub from_us: u64,
    /// Asked time.
    pub at_us: u64,
    /// End.
    pub to_us: u64,
}

/// Formats a time as RFC 3339 in UTC.
pub fn format_time(time_us: u64) -> String {
    let time = i64::try_from(time_us).ok().and_then(|time_us| Timestamp::from_microsecond(time_us).ok());
    format!("{:.6}", time.unwrap_or(Timestamp::MAX))
}
