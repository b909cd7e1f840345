//! Rate limits for log lines: of repeated events, and of errors that last.
//!
//! Each call site has a `LogThrottle` as a static and logs when [`LogThrottle::allow`] returns the number of lines that
//! were suppressed since the last one. A suppressed line costs one atomic load and one addition. The call site writes
//! the line itself, with its own level and fields:
//!
//! ```
//! use std::time::Duration;
//! use tollkeeper::base::clock::Clock;
//! use tollkeeper::telemetry::log_throttle::LogThrottle;
//!
//! static UNKNOWN_UNIT: LogThrottle = LogThrottle::every(Duration::from_secs(60));
//! if let Some(suppressed) = UNKNOWN_UNIT.allow(Clock::System.now()) {
//!     tracing::warn!(suppressed, "limit in the request ignored: its unit is unknown");
//! }
//! ```
//!
//! Decides: how often the same line is logged; each caller has its interval.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::base::clock::Time;

/// Maximum difference between the clock readings of threads that call at the same time.
const MAX_CLOCK_DIFFERENCE_US: u64 = 1_000_000;

/// Allows one log line per interval.
#[derive(Debug)]
pub struct LogThrottle {
    interval_us: u64,
    /// Time of the next line in microseconds since the Unix epoch; 0 before the first.
    next_us: AtomicU64,
    suppressed: AtomicU64,
}

impl LogThrottle {
    /// Allows one line per `interval`, the first at once.
    pub const fn every(interval: Duration) -> Self {
        let micros = interval.as_micros();
        #[expect(clippy::cast_possible_truncation, reason = "compared with the largest value just before")]
        let interval_us = if micros > u64::MAX as u128 { u64::MAX } else { micros as u64 };
        Self { interval_us, next_us: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }

    /// Returns the number of suppressed lines if a line may be written at `now`, otherwise `None`.
    ///
    /// If several threads call at once, one of them may write. A wall clock that was set back suppresses lines for at
    /// most one interval and a second.
    pub fn allow(&self, now: Time) -> Option<u64> {
        let now_us = now.as_micros();
        let next_us = self.next_us.load(Ordering::Relaxed);
        // Concurrent callers can pass their times out of order.
        let is_early = next_us > now_us && next_us - now_us <= self.interval_us.saturating_add(MAX_CLOCK_DIFFERENCE_US);
        let is_allowed = !is_early
            && self
                .next_us
                .compare_exchange(
                    next_us,
                    now.plus_us(self.interval_us).as_micros(),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .is_ok();
        if is_allowed {
            Some(self.suppressed.swap(0, Ordering::Relaxed))
        } else {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            None
        }
    }
}

/// Time after which an error that lasts is logged again.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of different errors that one [`ErrorDedup`] logs in an interval; further ones are dropped uncounted.
const MAX_DISTINCT_ERRORS_PER_INTERVAL: usize = 6;

/// Errors that last and were logged since the last success.
///
/// An error is logged when it begins, when it changes, and once a minute while it lasts. Errors may alternate, as when
/// one connection is refused and another times out, so the last few are remembered. Their number is bounded: a server
/// that keeps inventing new errors must not flood the log.
#[derive(Debug, Default)]
pub struct ErrorDedup {
    logged: Vec<(String, Instant)>,
}

impl ErrorDedup {
    /// Returns true if the error should be logged now.
    pub fn should_log(&mut self, text: &str) -> bool {
        self.logged.retain(|(_, at)| at.elapsed() < REPEAT_INTERVAL);
        let is_new = self.logged.len() < MAX_DISTINCT_ERRORS_PER_INTERVAL
            && !self.logged.iter().any(|(logged, _)| logged == text);
        if is_new {
            self.logged.push((text.to_owned(), Instant::now()));
        }
        is_new
    }

    /// Forgets all errors after a success; returns true if any were logged.
    pub fn forget_errors(&mut self) -> bool {
        !std::mem::take(&mut self.logged).is_empty()
    }
}
