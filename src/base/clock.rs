//! Time and clock of a decision.
//!
//! [`Time`] is a point in microseconds since the Unix epoch. A [`Clock`] is read once for each decision, where the
//! request arrives, and the value is passed down; no other code of the decision path reads the time of day.
//! [`Clock::Manual`] is for tests and simulation.
//!
//! Decides: how a time is written by commands and pages: UTC, microseconds since the Unix epoch inside.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;

/// Converts a duration to whole microseconds, rounded down; clamped to 64 bits (half a million years).
pub fn to_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Interval of a background task; in debug builds a part of it, so that tests need not wait as long: the interval divided by
/// the variable `TEST_PACE`, a whole number from 1 on (1 without it). Intervals and lifetimes that depend on each
/// other must all be passed through here, so that their ratios stay.
pub fn shorten_in_tests(interval: Duration) -> Duration {
    static PACE: LazyLock<u32> = LazyLock::new(|| {
        let variable = std::env::var("TEST_PACE");
        variable.ok().and_then(|pace| pace.parse().ok()).filter(|pace| *pace > 0).unwrap_or(1)
    });
    if cfg!(debug_assertions) { interval / *PACE } else { interval }
}

/// Point in time, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// Creates the point `micros` microseconds after the Unix epoch.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Creates the point `seconds` seconds after the Unix epoch.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds * 1_000_000)
    }

    /// Microseconds since the Unix epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the point `micros` microseconds later; saturates.
    pub const fn plus_us(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros))
    }

    /// Microseconds from `earlier` to this point; 0 if `earlier` is later.
    pub const fn since_us(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Writes RFC 3339 in UTC, with microseconds.
impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timestamp = i64::try_from(self.0).ok().and_then(|micros| Timestamp::from_microsecond(micros).ok());
        timestamp.unwrap_or(Timestamp::MAX).fmt(f)
    }
}

/// Source of the current time.
#[derive(Clone, Default)]
pub enum Clock {
    /// Wall clock of the machine.
    #[default]
    System,
    /// Clock that moves only when it is set, in microseconds since the Unix epoch.
    Manual(Arc<AtomicU64>),
    /// Clock of a simulated machine.
    Simulated(Arc<dyn Fn() -> Time + Send + Sync>),
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.write_str("System"),
            Self::Manual(_) => write!(f, "Manual({})", self.now()),
            Self::Simulated(_) => write!(f, "Simulated({})", self.now()),
        }
    }
}

impl Clock {
    /// Creates a manual clock at `start`; [`Clock::set`] moves it.
    pub fn manual(start: Time) -> Self {
        Self::Manual(Arc::new(AtomicU64::new(start.as_micros())))
    }

    /// Returns the current time. A wall clock before 1970 reads as 1970.
    pub fn now(&self) -> Time {
        match self {
            Self::System => {
                let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Time(to_micros(since_epoch))
            }
            Self::Manual(micros) => Time(micros.load(Ordering::Relaxed)),
            Self::Simulated(now) => now(),
        }
    }

    /// Moves a manual clock to `time`, forwards or backwards; no effect on other clocks.
    pub fn set(&self, time: Time) {
        if let Self::Manual(micros) = self {
            micros.store(time.as_micros(), Ordering::Relaxed);
        }
    }
}
