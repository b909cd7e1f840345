//! A limit as it is divided: as a rate that each proxy refills by itself, or as hits that are lent.
//!
//! Decides: which limits are assigned as a rate, and which as lent hits.

use crate::limit::Limit;
use crate::limit::algorithm::Algorithm;
use crate::limit::hold::HeldAmount;

/// Longest time in which the full limit is there again, for limits that are divided as rates.
const MAX_RATE_REFILL_US: u64 = 20_000_000;

/// Form in which a limit is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AssignmentForm {
    /// Proxies have shares of the limit per period, and refill them by themselves. Their use is not charged.
    Rate,
    /// Proxies have hits, which are used once. Their use is charged when they report it.
    Lent,
}

/// A limit, by what its division needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DividedLimit {
    /// Form of the shares.
    pub form: AssignmentForm,
    /// Hits per period.
    pub hits: u64,
    /// Tokens that a bucket holds; `hits` for windows.
    pub capacity: u64,
    /// Period in whole seconds.
    pub period_s: u64,
    algorithm: Algorithm,
}

impl DividedLimit {
    /// The divided form of a limit.
    pub fn new(limit: &Limit) -> Self {
        let is_bucket = limit.algorithm() == Algorithm::TokenBucket;
        let hits = limit.requests_per_unit();
        let capacity = if is_bucket { limit.capacity() } else { hits };
        let period_s = limit.period_us().div_ceil(1_000_000).max(1);
        let mut divided = Self { form: AssignmentForm::Lent, hits, capacity, period_s, algorithm: limit.algorithm() };
        if divided.refill_us() < MAX_RATE_REFILL_US {
            divided.form = AssignmentForm::Rate;
        }
        divided
    }

    /// True if a token bucket counts the hits.
    pub(super) const fn is_token_bucket(&self) -> bool {
        matches!(self.algorithm, Algorithm::TokenBucket)
    }

    /// True if a proxy's bucket and its refill may be different parts of the limit: the bucket is small and soon full
    /// again, and both are rounded down.
    pub(super) const fn divides_buckets_apart(&self) -> bool {
        match self.algorithm {
            Algorithm::FixedWindow => true,
            Algorithm::TokenBucket => self.capacity <= self.hits,
            Algorithm::SlidingWindowCounter
            | Algorithm::SlidingWindowLog
            | Algorithm::LeakyBucket
            | Algorithm::Concurrent => false,
        }
    }

    /// Microseconds in which the full limit is there again.
    pub fn refill_us(&self) -> u64 {
        let period_us = self.period_s * 1_000_000;
        match self.hits {
            0 => period_us,
            hits => {
                let full = (u128::from(self.capacity) * u128::from(period_us)).div_ceil(u128::from(hits));
                u64::try_from(full).unwrap_or(u64::MAX)
            }
        }
    }

    /// Tokens that refill a share in a period.
    ///
    /// Of a sliding window, what arrives in a period and what the bucket holds must fit in the share together: three
    /// quarters arrive.
    pub const fn fill_of_share(&self, share: u64) -> u64 {
        match self.algorithm {
            Algorithm::SlidingWindowCounter | Algorithm::SlidingWindowLog => share - share.div_ceil(4),
            Algorithm::FixedWindow | Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Concurrent => share,
        }
    }

    /// Tokens that the bucket of a share holds; 0 if the share is too small to be refilled.
    pub fn bucket_size_of_share(&self, share: u64) -> u64 {
        match self.algorithm {
            Algorithm::SlidingWindowCounter | Algorithm::SlidingWindowLog if share < 2 => 0,
            Algorithm::SlidingWindowCounter | Algorithm::SlidingWindowLog => share.div_ceil(4),
            Algorithm::TokenBucket => {
                let tokens = u128::from(share) * u128::from(self.capacity) / u128::from(self.hits.max(1));
                u64::try_from(tokens).unwrap_or(u64::MAX)
            }
            Algorithm::FixedWindow | Algorithm::LeakyBucket | Algorithm::Concurrent => share,
        }
    }

    /// Share whose bucket holds `tokens`, rounded up.
    pub(super) fn share_of_tokens(&self, tokens: u64) -> u64 {
        match self.algorithm {
            Algorithm::SlidingWindowCounter | Algorithm::SlidingWindowLog => tokens.saturating_mul(4),
            Algorithm::TokenBucket => {
                let share = (u128::from(tokens) * u128::from(self.hits)).div_ceil(u128::from(self.capacity.max(1)));
                u64::try_from(share).unwrap_or(u64::MAX)
            }
            Algorithm::FixedWindow | Algorithm::LeakyBucket | Algorithm::Concurrent => tokens,
        }
    }

    /// Share that `tokens` in a period refill, rounded up.
    pub(super) const fn share_of_fill(&self, tokens: u64) -> u64 {
        match self.algorithm {
            Algorithm::SlidingWindowCounter | Algorithm::SlidingWindowLog => tokens.saturating_add(tokens / 3 + 1),
            Algorithm::FixedWindow | Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Concurrent => tokens,
        }
    }

    /// Capacity of the bucket that goes with a share of `share` hits per period.
    pub fn capacity_of_share(&self, share: u64) -> u64 {
        match self.algorithm {
            Algorithm::TokenBucket if self.form == AssignmentForm::Rate => self.bucket_size_of_share(share),
            Algorithm::TokenBucket => share,
            Algorithm::SlidingWindowCounter
            | Algorithm::SlidingWindowLog
            | Algorithm::FixedWindow
            | Algorithm::LeakyBucket
            | Algorithm::Concurrent => 0,
        }
    }

    /// Amount that a hold of `share` takes from the counter.
    pub fn held_amount(&self, share: u64) -> HeldAmount {
        match (self.algorithm, self.form) {
            (Algorithm::TokenBucket, AssignmentForm::Lent) => HeldAmount { hits: 0, capacity: share },
            _ => HeldAmount { hits: share, capacity: self.capacity_of_share(share) },
        }
    }

    /// Share that an amount allows.
    pub fn share_of_amount(&self, amount: HeldAmount) -> u64 {
        match (self.algorithm, self.form) {
            (Algorithm::TokenBucket, AssignmentForm::Lent) => amount.capacity,
            (Algorithm::TokenBucket, AssignmentForm::Rate) => {
                let by_capacity =
                    u128::from(amount.capacity) * u128::from(self.hits) / u128::from(self.capacity.max(1));
                amount.hits.min(u64::try_from(by_capacity).unwrap_or(u64::MAX))
            }
            _ => amount.hits,
        }
    }

    /// Maximum that can be divided: the hits per period of a rate, else the capacity.
    pub const fn total(&self) -> u64 {
        match self.form {
            AssignmentForm::Rate => self.hits,
            AssignmentForm::Lent => self.capacity,
        }
    }
}
