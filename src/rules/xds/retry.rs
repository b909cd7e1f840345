//! Delays between streams.
//!
//! The first delay after a stream that was answered is `XDS_CLIENT_BACKOFF_INITIAL_INTERVAL`; each further one is twice
//! as long, up to the maximum. They are randomized, so that replicas do not connect at the same time.

use std::time::Duration;

use crate::settings::xds::XdsBackoff;

/// Lower bound of a delay, so that no setting makes the client spin.
const MIN_DELAY: Duration = Duration::from_millis(100);

/// Delays between streams.
#[derive(Debug)]
pub struct RetryDelays {
    backoff: XdsBackoff,
    /// Delay before randomization.
    next: Duration,
}

impl RetryDelays {
    /// Delays by these settings.
    pub const fn new(backoff: XdsBackoff) -> Self {
        Self { backoff, next: backoff.initial }
    }

    /// Starts from the first delay again.
    pub const fn reset(&mut self) {
        self.next = self.backoff.initial;
    }

    /// Returns the next delay. `random` is in 0 to 1.
    pub fn next_delay(&mut self, random: f64) -> Duration {
        let XdsBackoff { initial, max, random_factor, jitter } = self.backoff;
        let max = max.max(MIN_DELAY);
        let delay = self.next.min(max);
        self.next = delay.max(initial).saturating_mul(2).min(max);
        let factor = if jitter { random_factor.mul_add(random.mul_add(2.0, -1.0), 1.0) } else { 1.0 };
        Duration::try_from_secs_f64(delay.as_secs_f64() * factor).unwrap_or(max).clamp(MIN_DELAY, max)
    }
}
