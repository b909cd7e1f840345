//! Prepaid hits of a token bucket: the bucket that the global Redis keeps for all regions.
//!
//! A region asks for hits ahead of its demand. The bucket spends their tokens at once, so the region may admit them
//! without asking again, until a time of the global Redis ([`Limit::prepaid_lifetime_us`] later). What it has not
//! admitted by then is lost.
//!
//! A span s of global time meets hits whose tokens were spent in the span or up to T before it. So regions admit at
//! most what the bucket holds plus rate x (s + T) / period. The bucket of this file holds rate x T / period less than
//! the limit has for grants ([`Limit::max_granted_capacity`]), which makes up for it.
//!
//! A region gets at most a quarter of the tokens at a time, so that several regions find some, whoever asks first.
//! Tokens are whole; a fraction of one refills in units of which a token has as many as the period has microseconds.
//!
//! Decides: how many prepaid hits the global Redis grants to a region.
//! Decides: the part kept back for regions that never reported.

use super::global_window::part_for_reported_regions;
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::clamp_to_u32;

/// A request gets at most the tokens divided by this number, rounded up.
const GRANT_DIVISOR: u64 = 4;

/// Tokens that are left for grants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Time of the last refill; 0: the bucket is new, and full.
    pub last: Time,
    /// Whole tokens.
    pub tokens: u64,
    /// Fraction of a token, 0 to period - 1 (microseconds).
    pub part: u64,
    /// Time of the last reset; 0: none is known.
    pub epoch: Time,
}

/// Parameters of a token bucket in the global Redis, as the region's rules give them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalBucketParameters {
    /// Time in which `rate` tokens refill, in microseconds.
    pub period_us: u64,
    /// Tokens per period.
    pub rate: u32,
    /// Tokens that the bucket holds.
    pub capacity: u32,
    /// Time for which a region may admit the hits of a grant, in microseconds.
    pub prepaid_lifetime_us: u64,
}

impl GlobalBucketParameters {
    /// Returns the parameters of a limit's bucket in the global Redis: all tokens but the reserves.
    pub fn from_limit(limit: &Limit) -> Self {
        Self {
            period_us: limit.period_us(),
            rate: limit.max_granted_hits(),
            capacity: limit.prepaid_capacity(),
            prepaid_lifetime_us: limit.prepaid_lifetime_us(),
        }
    }

    /// Returns the part of the tokens that `reported` of `listed` regions may be granted, rounded down.
    #[must_use]
    pub fn scaled_to_reported_regions(self, reported: u32, listed: u32) -> Self {
        let part = |tokens| part_for_reported_regions(tokens, reported, listed);
        Self { rate: part(self.rate), capacity: part(self.capacity), ..self }
    }
}

/// Hits granted to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketGrant {
    /// Time of the global Redis at which the hits end.
    pub end: Time,
    /// Number of hits; 0 if the bucket is empty.
    pub hits: u32,
    /// Tokens that stay in the bucket.
    pub free: u32,
}

impl State {
    /// Grants at most `wanted` hits at `now`.
    pub fn grant(&mut self, now: Time, pool: GlobalBucketParameters, wanted: u32) -> BucketGrant {
        self.refill(now, pool);
        let hits = self.tokens.div_ceil(GRANT_DIVISOR).min(u64::from(wanted));
        self.tokens -= hits;
        BucketGrant {
            end: now.plus_us(pool.prepaid_lifetime_us),
            hits: clamp_to_u32(hits),
            free: clamp_to_u32(self.tokens),
        }
    }

    /// Fills the bucket, and starts a new epoch: each region forgets its hits when it learns of it.
    pub fn reset(&mut self, now: Time, pool: GlobalBucketParameters) {
        self.refill(now, pool);
        (self.tokens, self.part, self.epoch) = (u64::from(pool.capacity), 0, self.epoch.max(now));
    }

    /// Adds what has refilled since the last call. A clock that was set back refills nothing until it is where it was;
    /// a last call more than a period ahead comes from a clock that was wrong, and only its time is forgotten.
    fn refill(&mut self, now: Time, pool: GlobalBucketParameters) {
        let capacity = u64::from(pool.capacity);
        if self.last == Time::default() {
            (self.tokens, self.part) = (capacity, 0);
        }
        let units = u128::from(now.since_us(self.last)) * u128::from(pool.rate) + u128::from(self.part);
        let period = u128::from(pool.period_us);
        let refilled = u64::try_from(units / period).unwrap_or(u64::MAX);
        self.tokens = self.tokens.saturating_add(refilled);
        self.part = u64::try_from(units % period).unwrap_or(0);
        if self.tokens >= capacity {
            (self.tokens, self.part) = (capacity, 0);
        }
        if now > self.last || self.last > now.plus_us(pool.period_us) {
            self.last = now;
        }
    }
}
