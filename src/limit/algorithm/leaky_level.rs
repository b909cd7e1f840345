//! A level that falls linearly, by `requests_per_unit` hits in a period: the common part of token_bucket and
//! leaky_bucket.
//!
//! The level is kept in hits x period, in microseconds. In this unit a microsecond lowers it by a whole number,
//! `requests_per_unit`, so passing time is never rounded; only results are, upwards. A state keeps the level as
//! quotient and remainder by the period, so that both fit a Lua number. Capacity and debt are bounded by the
//! algorithms.
//!
//! A counter outlives a change of its limit, and a level that is too high for the new one would make its client wait for
//! what the old one admitted. A level above the size of the bucket is therefore cut to it, a full one. The state then
//! remembers the size ([`RememberedSize`]): under another limit, what was *left* stays, so that limits in turn admit no more
//! than a bucket of the largest size and the highest rate. A level that is above the size for another reason (debt,
//! tokens taken in advance) has the mark too, so a level without it tells that the size was another one.
//!
//! Decides: fractions of a token at a refill; remaining hits of buckets.
//! Decides: what a changed size does to a bucket (`LeakyLevel::fit_to_size`).

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, EffectiveTime, clamp_to_u32, effective_time};
use crate::limit::request::Hits;

/// A level as a state keeps it: `whole` hits and `part`/period of one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LevelParts {
    pub(super) whole: u64,
    /// Fraction of a hit, 0 to period - 1 (microseconds).
    pub(super) part: u64,
}

/// Size of the bucket that a level is of, which a state keeps only if the level alone does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RememberedSize {
    /// Hits that the bucket holds.
    pub size: u32,
    /// The level was cut, or is what another size left of it: the mark stays as long as the state. Otherwise the level
    /// is above the size, and the mark goes when it is not.
    pub was_resized: bool,
}

/// A level at the time of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeakyLevel<'l> {
    limit: &'l Limit,
    /// Hits x period in microseconds.
    pub(super) units: u128,
    /// Mark that belongs to the level.
    mark: Option<RememberedSize>,
    /// Time of the level.
    pub(super) at: Time,
    /// Microseconds by which `at` lies ahead of the request's `now`.
    ahead_us: u64,
}

impl<'l> LeakyLevel<'l> {
    /// Computes the level at `now` from that at `last`; 0 if the state is discarded.
    pub(super) fn at_request_time(
        limit: &'l Limit,
        level: LevelParts,
        mark: Option<RememberedSize>,
        last: Time,
        now: Time,
    ) -> Self {
        let Some(EffectiveTime { at, ahead_us }) = effective_time(now, last, limit.period_us()) else {
            return Self { limit, units: 0, mark: None, at: now, ahead_us: 0 };
        };
        let units = u128::from(level.whole) * u128::from(limit.period_us()) + u128::from(level.part);
        let leaked = u128::from(at.since_us(last)) * u128::from(limit.requests_per_unit());
        let mut found = Self { limit, units, mark, at, ahead_us };
        if found.units > found.size_units() || mark.is_some() {
            found.fit_to_size();
        }
        found.units = found.units.saturating_sub(leaked);
        found
    }

    /// Size of the bucket, in the unit of the level.
    fn size_units(&self) -> u128 {
        self.hits_to_units(self.limit.size_without_holds())
    }

    /// Makes the level that of a bucket of the limit's size: cuts what no charge under this size led to, or keeps what
    /// another size left. Debt stays, up to the hits of a period; so do tokens taken in advance under the same size, up to
    /// those of `max_wait`. A size of 0 leaves everything as it is.
    fn fit_to_size(&mut self) {
        let size = clamp_to_u32(self.limit.size_without_holds());
        if size == 0 || self.limit.never_cuts_level() {
            return;
        }
        let most = self.size_units() + self.hits_to_units(self.limit.requests_per_unit());
        // A raise takes effect at once on debt, too: nothing was cut from what was used.
        let is_raised = self.mark.is_some_and(|mark| !mark.was_resized && mark.size < size);
        let was_changed = !is_raised && self.mark.is_none_or(|mark| mark.size != size);
        self.units = match self.mark {
            None => self.size_units(),
            Some(_) if is_raised => self.units.min(most),
            Some(_) if !was_changed => match self.limit.max_tokens_wait_us() {
                Limit::UNBOUNDED_MAX_WAIT_US => self.units,
                wait_us => {
                    let in_advance = u128::from(wait_us) * u128::from(self.limit.requests_per_unit());
                    self.units.min(most.max(self.size_units() + in_advance))
                }
            },
            Some(mark) => {
                let left = self.units + self.size_units();
                left.saturating_sub(self.hits_to_units(u64::from(mark.size))).min(most)
            }
        };
        if was_changed {
            self.mark = Some(RememberedSize { size, was_resized: true });
        }
    }

    /// Returns the mark that a state with this level keeps.
    pub(super) fn mark_to_keep(&self) -> Option<RememberedSize> {
        let size = clamp_to_u32(self.limit.size_without_holds());
        match self.mark {
            Some(RememberedSize { was_resized: true, .. }) => self.mark,
            _ if size == 0 => self.mark,
            _ => (self.units > self.size_units()).then_some(RememberedSize { size, was_resized: false }),
        }
    }

    /// Returns the level as whole hits and a fraction, as a state keeps it.
    pub(super) fn whole_and_part(&self) -> LevelParts {
        let period = u128::from(self.limit.period_us());
        let narrow = |units: u128| u64::try_from(units).unwrap_or(u64::MAX);
        LevelParts { whole: narrow(self.units / period), part: narrow(self.units % period) }
    }

    /// The level in hits, rounded up.
    pub(super) fn hits_rounded_up(&self) -> u64 {
        let LevelParts { whole, part } = self.whole_and_part();
        whole.saturating_add(u64::from(part > 0))
    }

    /// Hits up to the capacity; 0 for a limit of 0, whatever its capacity.
    pub(super) fn remaining(&self) -> u64 {
        match self.limit.requests_per_unit() {
            0 => 0,
            _ => self.limit.capacity().saturating_sub(self.hits_rounded_up()),
        }
    }

    /// `hits` in the unit of the level.
    pub(super) fn hits_to_units(&self, hits: u64) -> u128 {
        u128::from(hits) * u128::from(self.limit.period_us())
    }

    /// Microseconds from the request's `now` until the level has fallen to `units`, rounded up; 0 if it has.
    ///
    /// The result can exceed 64 bits: 2^32 hits at one a year. The limit must not be 0.
    pub(super) fn until_level_falls_us(&self, units: u128) -> u128 {
        match self.units.saturating_sub(units) {
            0 => 0,
            excess => u128::from(self.ahead_us) + excess.div_ceil(u128::from(self.limit.requests_per_unit())),
        }
    }

    /// Microseconds from the request's `now` until its hits fit under the capacity; 0 if they do, `None` if they never
    /// will.
    pub(super) fn until_hits_fit_us(&self, request: ChargeRequest) -> Option<u128> {
        if request.required_hits() == 0 {
            return Some(0);
        }
        let room = self.limit.capacity().checked_sub(request.required_hits())?;
        (self.limit.requests_per_unit() > 0).then(|| self.until_level_falls_us(self.hits_to_units(room)))
    }

    /// Microseconds from the request's `now` until the level is 0; 0 if it is, or if it never falls.
    pub(super) fn until_empty_us(&self) -> u64 {
        if self.limit.requests_per_unit() == 0 { 0 } else { clamp_us(self.until_level_falls_us(0)) }
    }

    /// Maximum delay of the answer, in microseconds.
    pub(super) fn max_delay_us(&self, request: ChargeRequest) -> u128 {
        u128::from(request.longest_delay_us(self.limit))
    }
}

/// Derives the wait of a charge, in microseconds, from the `result` of another charge on the same level.
///
/// The level falls evenly, and the result's `reset_us` is the time until it is 0.
pub(super) fn derive_level_wait_from_result_us(
    limit: &Limit,
    result: &ChargeResult,
    request: ChargeRequest,
) -> Option<u64> {
    let Hits::Charge(hits) = request.hits else { return None };
    let room = u128::from(limit.capacity().checked_sub(hits)?);
    let room_us = clamp_us(room * u128::from(limit.period_us()) / u128::from(limit.requests_per_unit().max(1)));
    let delay_us = request.longest_delay_us(limit);
    Some(result.reset_us.saturating_sub(room_us).saturating_sub(delay_us))
}

/// Clamps a duration in microseconds to 64 bits.
pub(super) fn clamp_us(duration_us: u128) -> u64 {
    u64::try_from(duration_us).unwrap_or(u64::MAX)
}
