//! Parts of buckets that nobody has any more, and may be empty: refill that nobody has fills them.
//!
//! A proxy begins with a full bucket, so a part is handed out again only once it is full. Which refill fills it does
//! not matter, as long as no proxy had it in that time.
//!
//! Decides: when a part of a bucket that a proxy gave up is full, and another may have it.

use super::holder::Part;
use crate::base::clock::Time;

/// The empty parts of the buckets of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct EmptyBuckets {
    /// Tokens to fill, as a share of the limit.
    pub share: u64,
    /// Least refill that nobody has had since `filled_until`.
    unowned_refill: u64,
    filled_until: Time,
    /// What was filled of the next hit, in shares x microseconds.
    filled: u128,
}

impl EmptyBuckets {
    /// Adds a part of a bucket that went out of use `idle_us` ago with `refill`, which nobody has had since then.
    pub fn add(&mut self, Part { refill, bucket }: Part, idle_us: u64, refill_us: u64) {
        let full = u128::from(refill) * u128::from(idle_us) / u128::from(refill_us.max(1));
        let empty = bucket.saturating_sub(u64::try_from(full).unwrap_or(u64::MAX));
        self.share = self.share.saturating_add(empty);
    }

    /// Records that `refill` belongs to nobody now. The time since the last filling counts with the least of these.
    pub fn lower_unowned_refill_to(&mut self, refill: u64) {
        self.unowned_refill = self.unowned_refill.min(refill);
    }

    /// Fills with what nobody had until `now`; the full limit is there again in `refill_us`.
    pub fn fill(&mut self, refill_us: u64, now: Time) {
        let idle_us = now.since_us(self.filled_until);
        self.filled_until = self.filled_until.max(now);
        if self.share == 0 {
            self.filled = 0;
            return;
        }
        self.filled += u128::from(self.unowned_refill) * u128::from(idle_us);
        let refill_us = u128::from(refill_us.max(1));
        let full = u64::try_from(self.filled / refill_us).unwrap_or(u64::MAX);
        self.filled %= refill_us;
        self.share = self.share.saturating_sub(full);
    }

    /// Begins to fill with `refill`, which nobody has from now on; the time until now must be filled first.
    pub fn set_unowned_refill(&mut self, refill: u64) {
        self.unowned_refill = refill;
    }

    /// Time at which all is full; `None`: nothing is empty, or nothing fills it.
    pub fn full_at(&self, refill_us: u64) -> Option<Time> {
        let left = (u128::from(self.share) * u128::from(refill_us)).saturating_sub(self.filled);
        let left_us = left.div_ceil(u128::from(self.unowned_refill.max(1)));
        let is_filling = self.share > 0 && self.unowned_refill > 0;
        is_filling.then(|| self.filled_until.plus_us(u64::try_from(left_us).unwrap_or(u64::MAX)))
    }
}

/// Refill that went out of use lately, as a share of the limit: it has not rested.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecentlyUsedRefill {
    /// Since `since`, and in the span before it.
    shares: [u64; 2],
    since: Time,
    /// Time that the last of it went out of use.
    last: Time,
}

impl RecentlyUsedRefill {
    /// Adds what went out of use at `now`; `rest_us` later it has rested.
    pub fn add(&mut self, refill: u64, rest_us: u64, now: Time) {
        match now.since_us(self.since) {
            since_us if since_us < rest_us => {}
            since_us if since_us < rest_us.saturating_mul(2) => (self.shares, self.since) = ([0, self.shares[0]], now),
            _ => (self.shares, self.since) = ([0, 0], now),
        }
        self.shares[0] = self.shares[0].saturating_add(refill);
        self.last = self.last.max(now);
    }

    /// What has not rested at `now`, or may not have.
    pub fn share(&self, rest_us: u64, now: Time) -> u64 {
        match now.since_us(self.since) {
            _ if now.since_us(self.last) >= rest_us => 0,
            since_us if since_us < rest_us => self.shares[0].saturating_add(self.shares[1]),
            since_us if since_us < rest_us.saturating_mul(2) => self.shares[0],
            _ => 0,
        }
    }
}
