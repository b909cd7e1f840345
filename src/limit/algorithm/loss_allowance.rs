//! Hits that a region admits on its own while it is cut off, in tumbling periods of the region's time.
//!
//! A period here is longer than that of the limit by a thousandth. Clocks drift by 500 ppm each, so a span of one
//! period by any clock meets two of these periods at most.

use crate::base::clock::Time;
use crate::limit::charge::ChargeRequest;

/// Hits used in the tumbling period that began last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LossPeriod {
    /// Start of the period.
    pub start: Time,
    /// Hits used in it.
    pub used: u64,
}

impl LossPeriod {
    /// Returns the period at `now`: this one, or a new one if it is over or lies more than a period ahead.
    pub(super) fn at(self, now: Time, period_us: u64) -> Self {
        let is_over = now >= self.start.plus_us(longer_us(period_us));
        let is_ahead = self.start > now.plus_us(period_us);
        if is_over || is_ahead { Self { start: now, used: 0 } } else { self }
    }

    /// Hits of `allowance` that are left.
    pub(super) const fn left(self, allowance: u64) -> u64 {
        allowance.saturating_sub(self.used)
    }

    /// Returns true if the hits of a request fit.
    pub(super) const fn fits(self, allowance: u64, request: ChargeRequest) -> bool {
        self.used.saturating_add(request.required_hits()) <= allowance
    }

    /// Microseconds from `now` until the period ends.
    pub(super) fn ends_us(self, now: Time, period_us: u64) -> u64 {
        self.start.plus_us(longer_us(period_us)).since_us(now)
    }
}

/// Returns the length of a tumbling period: a period is a whole number of milliseconds.
const fn longer_us(period_us: u64) -> u64 {
    period_us + period_us / 1000
}
