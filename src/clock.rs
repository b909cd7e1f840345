//! The time of a decision.
//!
//! `Time` is a point in microseconds since the Unix epoch; the algorithms see nothing finer. A `Clock` is read once
//! for each decision, at the edge, and the value is passed down: nothing below the edge asks for the time.
//! `Clock::Manual` serves tests and simulation.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;

/// A span of time in whole microseconds, rounded down; one that does not fit, of half a million years, is the longest
/// that does.
pub fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// A point in time, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The point `micros` microseconds after the Unix epoch.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// The point `seconds` seconds after the Unix epoch.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds * 1_000_000)
    }

    /// Microseconds since the Unix epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The point `micros` microseconds later, at most the end of time.
    pub const fn plus_us(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros))
    }

    /// Microseconds from `earlier` to here; 0 if `earlier` lies ahead.
    pub const fn since_us(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Writes it as RFC 3339 in UTC, to the microsecond.
impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timestamp = i64::try_from(self.0).ok().and_then(|micros| Timestamp::from_microsecond(micros).ok());
        timestamp.unwrap_or(Timestamp::MAX).fmt(f)
    }
}

/// Where the time comes from.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// The machine's wall clock.
    #[default]
    System,
    /// A clock that stands until it is set, in microseconds since the Unix epoch.
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// A clock that stands at `start` until [`Clock::set`] moves it.
    pub fn manual(start: Time) -> Self {
        Self::Manual(Arc::new(AtomicU64::new(start.as_micros())))
    }

    /// The time now. A wall clock before 1970 reads as 1970.
    pub fn now(&self) -> Time {
        match self {
            Self::System => {
                let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Time(micros(since_epoch))
            }
            Self::Manual(micros) => Time(micros.load(Ordering::Relaxed)),
        }
    }

    /// Moves a manual clock to `time`, back too; a system clock stays as it is.
    pub fn set(&self, time: Time) {
        if let Self::Manual(micros) = self {
            micros.store(time.as_micros(), Ordering::Relaxed);
        }
    }
}
