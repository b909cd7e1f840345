//! region_bucket: a bucket of a region, refilled at the rate that the region always has and, for a term, at more.
//!
//! A global token_bucket is counted by this state in the Redis of each region. The rates and capacities of all regions
//! add up to those of the limit. The region's own part holds at all times; the global Redis grants a rate and a
//! capacity for a term, which ends at a time of the global Redis.
//!
//! - Tokens refill at both rates during the term, then at the region's own. They never exceed the capacity of the
//!   moment, so a grant that ends takes the tokens above it. A grant creates no tokens.
//! - Tokens refill by global time, of which the region knows an interval, up to its lower end; the granted capacity
//!   ends when the upper end reaches the end of the term. So a jump of the region's clock creates nothing. If global
//!   time is unknown, nothing refills and the term has ended; if tokens are spent then, that refill is lost.
//! - What the uncertainty may refill later, beyond [`Limit::clock_slack_us`], lowers the capacity.
//! - A charge that leaves at most half of the capacity opens a grant request.
//! - A refund returns at most the tokens spent since the last grant.
//!
//! What else a region's counter does: see [`super::region`]. Tokens are rounded down.
//!
//! # Stored numbers, in their order
//!
//! | Number | Meaning | Clock |
//! |---|---|---|
//! | `last` | time of the last charge; 0: the bucket is new | region |
//! | `tokens` | whole tokens that are left, because the capacity changes with each term | |
//! | `part` | fraction of one more token, in units of which it has as many as the period has microseconds | |
//! | `rate`, `capacity` | tokens per period, and tokens that the bucket holds, beside the region's own: the grant | |
//! | `term_end` | end of the grant | global |
//! | `refilled_until` | time up to which tokens have refilled; 0: unknown | global |
//! | `spent` | tokens spent since the last grant, less refunds | |
//! | `requested` | hits that callers asked for since `requested_since`, admitted or not | |
//! | `requested_since` | start of that span | region |
//! | `exhausted` | 1: the global Redis had less than was wanted | |
//! | `open_request` | time at which the open grant request was opened, which identifies it; 0: none is open | region |
//! | `next_request_at` | time from which the next request may be opened | region |
//! | `epoch` | last reset that the counter follows; at first, its own creation | global |
//! | `cut_off.start` | start of the tumbling period of the cut-off allowance | region |
//! | `cut_off.used` | hits used in it | |

use super::leaky_level::to_us;
use super::region::{
    self, GlobalTime, GrantCycle, REQUEST_INTERVAL_US, RegionCall, RegionCounter, RegionState, RegionUse, StoredCounts,
};
use super::stored_state::{MalformedReply, ReplyReader};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, MAX_COUNT};

/// State of the counter.
pub type State = RegionState<BucketCounts>;

/// Tokens, the grant, and the grant cycle: see the table of the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketCounts {
    /// Whole tokens that are left.
    pub tokens: u64,
    /// Fraction of a token, 0 to period - 1 (microseconds).
    pub part: u64,
    /// Granted rate in tokens per period, beside the region's own.
    pub rate: u64,
    /// Granted capacity, beside the region's own.
    pub capacity: u64,
    /// Global time at which the grant ends.
    pub term_end: Time,
    /// Global time up to which tokens have refilled; 0 if that is unknown.
    pub refilled_until: Time,
    /// Tokens spent since the last grant, less refunds.
    pub spent: u64,
    /// Hits that callers asked for since `requested_since`, admitted or not.
    pub requested: u64,
    /// Start of the span of `requested`.
    pub requested_since: Time,
    /// Grant request, last reset and cut-off use.
    pub cycle: GrantCycle,
}

/// Answer of the global Redis to a grant request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateGrant {
    /// Identity of the request: the time of the region's Redis at which it was opened.
    pub request: u64,
    /// Epoch of the global counter.
    pub epoch: u64,
    /// Tokens per period, beside the region's own.
    pub rate: u32,
    /// Tokens that the bucket holds, beside the region's own.
    pub capacity: u32,
    /// Time of the global Redis at which the grant was made.
    pub start: Time,
    /// Time of the global Redis at which the grant ends.
    pub end: Time,
    /// True if the global Redis had less than was wanted.
    pub exhausted: bool,
    /// Time of the region's Redis before which the next request is not opened.
    pub next_request_at: Time,
}

impl StoredCounts for BucketCounts {
    fn read(reply: &mut ReplyReader<'_>) -> Result<Self, MalformedReply> {
        Ok(Self {
            tokens: reply.number()?,
            part: reply.number()?,
            rate: reply.number_u32()?.into(),
            capacity: reply.number_u32()?.into(),
            term_end: reply.time()?,
            refilled_until: reply.time()?,
            spent: reply.number()?,
            requested: reply.number()?,
            requested_since: reply.time()?,
            cycle: GrantCycle::read(reply)?,
        })
    }
}

impl State {
    /// Returns the time in microseconds until the granted capacity ends: `u64::MAX` without a grant, 0 if global time
    /// is unknown or the region is cut off.
    pub(super) fn grant_left_us(&self, now: Time) -> u64 {
        match self.view.at(now) {
            Some(GlobalTime { hi, .. }) if !self.view.cut_off => {
                let left_us = self.counts.term_end.as_micros().saturating_sub(hi);
                if left_us == 0 { u64::MAX } else { left_us }
            }
            _ => 0,
        }
    }

    /// Returns the hits used at `now`, since the last grant and in the tumbling period of the cut-off allowance.
    pub(super) fn region_use(&self, limit: &Limit, now: Time) -> RegionUse {
        let RegionBucket { call, counts, is_granted, .. } = RegionBucket::at(limit, self, now);
        let (grant, reserve) = if is_granted { (counts.spent, 0) } else { (0, counts.spent) };
        RegionUse { grant, reserve, cut_off_allowance: call.cut_off.used }
    }

    /// Replaces the grant by another one, after the refill under the one before up to its start; false if it does not
    /// answer the open request. The global Redis holds what it granted back until the term ends, so nothing is doubled.
    pub fn take_grant(&mut self, limit: &Limit, now: Time, grant: &RateGrant) -> bool {
        if !self.counts.cycle.waits_for(grant.request) {
            return false;
        }
        let RegionBucket { mut counts, own_capacity, .. } = RegionBucket::after(limit, self, now, grant.start);
        (counts.rate, counts.capacity, counts.term_end) = (grant.rate.into(), grant.capacity.into(), grant.end);
        (counts.spent, counts.requested, counts.requested_since) = (0, 0, now);
        counts.cycle.close(grant.exhausted, grant.next_request_at);
        // The limit was reset: the bucket of the region's own capacity is full.
        if grant.epoch > counts.cycle.epoch {
            counts.cycle.epoch = grant.epoch;
            (counts.tokens, counts.part) = (own_capacity, 0);
        }
        self.store(counts, now, limit.period_us());
        true
    }
}

/// Applies a request to the bucket.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    region::charge::<RegionBucket>(limit, state, now, request)
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    region::admits::<RegionBucket>(limit, state, now, request)
}

/// Bucket at the time of a request, refilled.
#[derive(Clone, Copy)]
struct RegionBucket {
    call: RegionCall,
    counts: BucketCounts,
    /// Rate and capacity that the region always has.
    own_rate: u64,
    own_capacity: u64,
    /// Uncertainty of global time that needs no smaller capacity, in microseconds.
    slack_us: u64,
    /// The term of the grant lasts.
    is_granted: bool,
    /// Capacity of the moment.
    max_tokens: u64,
}

impl RegionCounter for RegionBucket {
    type Counts = BucketCounts;

    fn at(limit: &Limit, state: &State, now: Time) -> Self {
        Self::after(limit, state, now, Time::default())
    }

    fn call(&self) -> &RegionCall {
        &self.call
    }

    fn counts(&self) -> BucketCounts {
        self.counts
    }

    fn cycle_mut(&mut self) -> (&mut RegionCall, &mut GrantCycle) {
        (&mut self.call, &mut self.counts.cycle)
    }

    fn room(&self) -> Option<u64> {
        Some(self.counts.tokens)
    }

    fn used(&self) -> u64 {
        self.max_tokens.saturating_sub(self.counts.tokens)
    }

    /// Lets the demand of more than a period ago fade, and adds the hits.
    fn count_demand(&mut self, hits: u64) {
        let (now, period_us) = (self.call.now, self.call.period_us);
        let seen_us = now.since_us(self.counts.requested_since);
        if seen_us > 2 * period_us {
            (self.counts.requested, self.counts.requested_since) = (0, now);
        } else if seen_us > period_us {
            self.counts.requested /= 2;
            self.counts.requested_since = Time::from_micros(now.as_micros() - period_us / 2);
        }
        self.counts.requested = self.counts.requested.saturating_add(hits).min(MAX_COUNT);
    }

    fn spend(&mut self, hits: u64) {
        if self.call.global.is_none() && hits > 0 {
            self.counts.refilled_until = Time::default();
        }
        self.counts.tokens -= hits;
        self.counts.spent = self.counts.spent.saturating_add(hits).min(MAX_COUNT);
    }

    fn refund(&mut self, hits: u64, lent: u64) {
        let returned = hits.min(self.counts.spent.saturating_sub(lent));
        self.counts.spent -= returned;
        self.add(u128::from(returned) * u128::from(self.call.period_us), self.max_tokens);
    }

    fn is_low(&self) -> bool {
        2 * self.counts.tokens <= self.max_tokens
    }

    fn until_full_us(&self) -> u64 {
        self.until_tokens_us(self.max_tokens).unwrap_or(0)
    }

    fn retry_after_us(&self, limit: &Limit, request: ChargeRequest) -> Option<u64> {
        let (call, hits) = (&self.call, request.required_hits());
        if hits > u64::from(limit.capacity()) || limit.requests_per_unit() == 0 {
            return None;
        }
        let refill_us = self.until_tokens_us(hits);
        let allowance_us = (call.may_use_allowance() && hits <= call.allowance).then(|| call.allowance_ends_us());
        let next_grant_us = (!call.view.cut_off && !self.counts.cycle.exhausted).then_some(REQUEST_INTERVAL_US);
        let waits = [refill_us, allowance_us, next_grant_us].into_iter().flatten();
        Some(waits.min().unwrap_or(REQUEST_INTERVAL_US).max(1))
    }
}

impl RegionBucket {
    /// Refills the bucket at `now`, which is not before the global time `past`.
    fn after(limit: &Limit, state: &State, now: Time, past: Time) -> Self {
        let mut call = RegionCall::new(limit, *state.view, state.counts.cycle.cut_off, now);
        call.global = call.global.map(|time| GlobalTime { lo: time.lo.max(past.as_micros()).min(time.hi), ..time });
        let mut bucket = Self {
            call,
            counts: *state.counts,
            own_rate: call.own(limit.region_reserve()),
            own_capacity: call.own(limit.region_capacity()),
            slack_us: limit.clock_slack_us(),
            is_granted: false,
            max_tokens: 0,
        };
        if let Some(global) = call.global {
            bucket.counts.cycle.begin_epoch(global);
        }
        if state.last == Time::default() {
            bucket.counts.tokens = bucket.own_capacity;
            bucket.counts.requested_since = now;
        }
        bucket.refill();
        bucket.counts.cycle.cut_off = call.cut_off;
        bucket
    }

    /// Adds the tokens that have refilled by the lower end of global time, and finds the capacity of the moment.
    fn refill(&mut self) {
        self.max_tokens = self.own_capacity;
        if let Some(GlobalTime { lo, hi }) = self.call.global {
            let counts = self.counts;
            let from = match counts.refilled_until.as_micros() {
                0 => hi,
                refilled_until => refilled_until,
            };
            let (until, term_end) = (from.max(lo), counts.term_end.as_micros());
            let granted_us = until.min(term_end).saturating_sub(from);
            let both_rates = self.own_rate + counts.rate;
            self.add(u128::from(granted_us) * u128::from(both_rates), self.own_capacity + counts.capacity);
            self.is_granted = hi < term_end;
            if self.is_granted {
                self.max_tokens += counts.capacity;
            } else {
                let own_us = until - from - granted_us;
                self.add(u128::from(own_us) * u128::from(self.own_rate), self.own_capacity);
            }
            let rate = if until < term_end { both_rates } else { self.own_rate };
            let unsure_us = hi.saturating_sub(until).saturating_sub(self.slack_us);
            let unsure = (u128::from(unsure_us) * u128::from(rate)).div_ceil(u128::from(self.call.period_us));
            self.max_tokens = self.max_tokens.saturating_sub(u64::try_from(unsure).unwrap_or(u64::MAX));
            self.counts.refilled_until = Time::from_micros(until);
        }
        self.add(0, self.max_tokens);
    }

    /// Adds tokens, given in tokens x period, to a bucket of `capacity`, which may be smaller than before.
    fn add(&mut self, units: u128, capacity: u64) {
        let period = u128::from(self.call.period_us);
        let cap = |units: u128| units.min(u128::from(capacity) * period);
        let left = cap(u128::from(self.counts.tokens) * period + u128::from(self.counts.part));
        let left = cap(left + units);
        let narrow = |units: u128| u64::try_from(units).unwrap_or(u64::MAX);
        (self.counts.tokens, self.counts.part) = (narrow(left / period), narrow(left % period));
    }

    /// Microseconds until the bucket holds `tokens` at the rate of the moment; `None` if it never will.
    fn until_tokens_us(&self, tokens: u64) -> Option<u64> {
        let rate = self.own_rate + if self.is_granted { self.counts.rate } else { 0 };
        if tokens > self.max_tokens || rate == 0 {
            return None;
        }
        let period = u128::from(self.call.period_us);
        let left = u128::from(self.counts.tokens) * period + u128::from(self.counts.part);
        Some(to_us((u128::from(tokens) * period).saturating_sub(left).div_ceil(rate.into())))
    }
}
