//! A level that drains at `requests_per_unit` a period: what token_bucket and leaky_bucket have in common.
//!
//! The level is kept in hit-microseconds: hits times the period. In these units the drain of a microsecond is a whole
//! number, `requests_per_unit`, so that nothing is ever rounded while time passes; only what is told to a caller is.
//! A state keeps it as quotient and remainder by the period, so that it fits a Lua number.

use super::{ChargeRequest, effective_now, to_u32};
use crate::clock::Time;
use crate::limit::Limit;

/// A level at the time of a charge.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeakyLevel<'l> {
    limit: &'l Limit,
    /// Hits times the period in microseconds.
    pub(super) units: u128,
    /// The time it is at.
    pub(super) at: Time,
    /// How far that lies ahead of the charge's own now, in microseconds.
    pub(super) ahead_us: u64,
}

impl<'l> LeakyLevel<'l> {
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
        whole.saturating_add(u64::from(part > 0))
    }

    /// Hits that there is room for; a limit of 0 has room for none, whatever its bucket holds.
    pub(super) fn remaining(&self) -> u32 {
        match self.limit.requests_per_unit() {
            0 => 0,
            _ => to_u32(u64::from(self.limit.capacity()).saturating_sub(self.hits())),
        }
    }

    /// `hits` in the units of the level.
    pub(super) fn units_of(&self, hits: u64) -> u128 {
        u128::from(hits) * u128::from(self.limit.period_us())
    }

    /// Microseconds from the charge's own now until the level has drained to `units`, rounded up; 0 if it has.
    ///
    /// More than 64 bits hold: 2^32 hits that drain at one a year do so long after time as [`Time`] has it ends.
    /// The limit must not be 0.
    pub(super) fn until_us(&self, units: u128) -> u128 {
        match self.units.saturating_sub(units) {
            0 => 0,
            excess => u128::from(self.ahead_us) + excess.div_ceil(u128::from(self.limit.requests_per_unit())),
        }
    }

    /// Microseconds from the charge's own now until its hits have room; 0 if they have, `None` if they never will.
    pub(super) fn until_room_us(&self, request: ChargeRequest) -> Option<u128> {
        if request.wanted() == 0 {
            return Some(0);
        }
        let room = u64::from(self.limit.capacity()).checked_sub(request.wanted())?;
        (self.limit.requests_per_unit() > 0).then(|| self.until_us(self.units_of(room)))
    }

    /// Microseconds from the charge's own now until the level is empty; 0 if it is, or if it never drains.
    pub(super) fn until_empty_us(&self) -> u64 {
        if self.limit.requests_per_unit() == 0 { 0 } else { to_us(self.until_us(0)) }
    }

    /// The longest that the answer to a charge may be held, in microseconds.
    pub(super) fn patience_us(&self, request: ChargeRequest) -> u128 {
        u128::from(request.max_delay_us.min(self.limit.max_wait_us()))
    }
}

/// A wait for the caller's eyes; the end of time if it is longer.
pub(super) fn to_us(wait_us: u128) -> u64 {
    u64::try_from(wait_us).unwrap_or(u64::MAX)
}
