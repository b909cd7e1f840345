//! A trouble that repeats is said once in a while, with a count of what was left unsaid.
//!
//! One `LogThrottle` stands at each call site, as a static, and says when the site may speak. It costs one atomic load
//! while it is silent. It writes nothing itself, so that the site keeps its own level and fields:
//!
//! ```
//! use std::time::Duration;
//! use tollkeeper::clock::Clock;
//! use tollkeeper::telemetry::log_throttle::LogThrottle;
//!
//! static UNKNOWN_UNIT: LogThrottle = LogThrottle::every(Duration::from_secs(60));
//! if let Some(suppressed) = UNKNOWN_UNIT.allow(Clock::System.now()) {
//!     tracing::warn!(suppressed, "a limit sent with the request has an unknown unit and is ignored");
//! }
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Time;

/// Times this far apart may belong to threads that ask at once.
const SLACK_US: u64 = 1_000_000;

/// Permission to speak, at most once in an interval.
#[derive(Debug)]
pub struct LogThrottle {
    interval_us: u64,
    /// When the next line may be written, in microseconds since the Unix epoch; 0 before the first.
    next_us: AtomicU64,
    suppressed: AtomicU64,
}

impl LogThrottle {
    /// At most one line in `interval`, the first at once.
    pub const fn every(interval: Duration) -> Self {
        let micros = interval.as_micros();
        #[expect(clippy::cast_possible_truncation, reason = "compared with the largest value just before")]
        let interval_us = if micros > u64::MAX as u128 { u64::MAX } else { micros as u64 };
        Self { interval_us, next_us: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }

    /// Whether a line may be written at `now`: if so, how many were suppressed since the last one.
    ///
    /// Of several threads that ask at once one gets the permission. A wall clock that was set back does not silence the
    /// site for longer than one interval and a second.
    pub fn allow(&self, now: Time) -> Option<u64> {
        let now_us = now.as_micros();
        let next_us = self.next_us.load(Ordering::Relaxed);
        // Those who ask at once need not ask in the order of their times.
        let waiting = next_us > now_us && next_us - now_us <= self.interval_us.saturating_add(SLACK_US);
        let mine = !waiting
            && self
                .next_us
                .compare_exchange(
                    next_us,
                    now.plus_us(self.interval_us).as_micros(),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .is_ok();
        if mine {
            Some(self.suppressed.swap(0, Ordering::Relaxed))
        } else {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            None
        }
    }
}
