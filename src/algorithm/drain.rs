//! A level that drains at `requests_per_unit` a period: what token_bucket and leaky_bucket have in common.
//!
//! The level is kept in hit-microseconds: hits times the period. In these units the drain of a microsecond is a whole
//! number, `requests_per_unit`, so that nothing is ever rounded while time passes; only what is told to a caller is.
//! A state keeps it as quotient and remainder by the period, so that it fits a Lua number.

use super::effective_now;
use crate::clock::Time;
use crate::limit::Limit;

/// A level at the time of a draw.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drain<'l> {
    limit: &'l Limit,
    /// Hits times the period in microseconds.
    pub(super) units: u128,
    /// The time it is at.
    pub(super) at: Time,
    /// How far that lies ahead of the draw's own now, in microseconds.
    pub(super) ahead_us: u64,
}

impl<'l> Drain<'l> {
    /// A level of `hits` and `part`/period more at `last`, drained until `now`.
    pub(super) fn at(limit: &'l Limit, (hits, part): (u64, u64), last: Time, now: Time) -> Self {
        let Some((at, ahead_us)) = effective_now(now, last, limit.period_us()) else {
            return Self { limit, units: 0, at: now, ahead_us: 0 };
        };
        let units = u128::from(hits) * u128::from(limit.period_us()) + u128::from(part);
        let drained = u128::from(at.since_us(last)) * u128::from(limit.requests_per_unit());
        Self { limit, units: units.saturating_sub(drained), at, ahead_us }
    }

    /// Whole hits and what is left of the level, as a state keeps it.
    pub(super) fn parts(&self) -> (u64, u64) {
        let period = u128::from(self.limit.period_us());
        let narrow = |units: u128| u64::try_from(units).unwrap_or(u64::MAX);
        (narrow(self.units / period), narrow(self.units % period))
    }

    /// The level in hits, rounded up.
    pub(super) fn hits(&self) -> u64 {
        let (whole, part) = self.parts();
        whole + u64::from(part > 0)
    }

    /// `hits` in the units of the level.
    pub(super) fn units_of(&self, hits: u64) -> u128 {
        u128::from(hits) * u128::from(self.limit.period_us())
    }

    /// Microseconds until the level has drained to `units`, rounded up; 0 if it has. The limit must not be 0.
    pub(super) fn until_us(&self, units: u128) -> u64 {
        let wait = self.units.saturating_sub(units).div_ceil(u128::from(self.limit.requests_per_unit()));
        u64::try_from(wait).unwrap_or(u64::MAX)
    }

    /// Microseconds from the draw's own now until the level is empty; 0 if it is, or if it never drains.
    pub(super) fn until_empty_us(&self) -> u64 {
        match (self.units, self.limit.requests_per_unit()) {
            (0, _) | (_, 0) => 0,
            _ => self.ahead_us.saturating_add(self.until_us(0)),
        }
    }
}
