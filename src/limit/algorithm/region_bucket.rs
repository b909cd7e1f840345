//! region_bucket: a small bucket that a region always has, and prepaid hits beside it.
//!
//! A global token_bucket is counted by this state in the Redis of each region. The global Redis keeps the bucket that
//! all regions share ([`global_bucket`](super::global_bucket)); a region gets hits of it ahead of its demand, which it
//! may admit until a stated time of the global Redis.
//!
//! - The region's own tokens refill by global time, of which the region knows an interval, up to its lower end. So a
//!   jump of the region's clock creates nothing. If global time is unknown, nothing refills; if tokens are spent then,
//!   that refill is lost.
//! - What the uncertainty may refill later, beyond [`Limit::clock_slack_us`], lowers the capacity.
//! - Prepaid hits are admitted only while global time is surely before their end. Those of the last grant and of the
//!   ones before are kept apart, as they end at other times; the earlier ones are spent first, own tokens last.
//! - A refund returns at most the hits spent since the last grant: to the own tokens, then to the last grant.
//!
//! What else a region's counter does: see [`super::region`]. Tokens are rounded down.
//!
//! Decides: what a region admits of a token bucket while global time is unknown: its own part.
//! Decides: Retry-After while a grant may come; the order in which prepaid hits and own tokens are spent.
//!
//! # Stored numbers, in their order
//!
//! | Number | Meaning | Clock |
//! |---|---|---|
//! | `last` | time of the last charge; 0: the bucket is new | region |
//! | `tokens` | whole tokens of the region's own that are left | |
//! | `part` | fraction of one more token, in units of which it has as many as the period has microseconds | |
//! | `granted`, `granted_until` | hits of the last grant that are left, and their end | global |
//! | `earlier`, `earlier_until` | hits of the grants before that are left, and their end | global |
//! | `low` | a charge that leaves at most this many hits opens a grant request, while a grant lasts | |
//! | `refilled_until` | time up to which tokens have refilled; 0: unknown | global |
//! | `spent` | hits spent since the last grant, less refunds | |
//! | `requested` | hits that callers asked for since `requested_since`, admitted or not | |
//! | `requested_since` | start of that span | region |
//! | `exhausted` | 1: the global Redis had no tokens | |
//! | `open_request` | time at which the open grant request was opened, which identifies it; 0: none is open | region |
//! | `next_request_at` | time from which the next request may be opened | region |
//! | `epoch` | last reset that the counter follows; at first, its own creation | global |
//! | `cut_off.start` | start of the tumbling period of the cut-off allowance | region |
//! | `cut_off.used` | hits used in it | |

use super::leaky_level::clamp_us;
use super::region::{
    self, GlobalTimeInterval, GrantCycle, MIN_GRANT_REQUEST_INTERVAL_US, RegionCall, RegionCounter,
    RegionHitsByAllotment, RegionState, StoredRegionCounts,
};
use super::stored_state::{MalformedReply, ReplyReader};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, MAX_COUNT};

/// Time after which demand fades: what callers asked for longer ago counts half, then nothing; in microseconds.
pub const DEMAND_FADE_TIME_US: u64 = 4_000_000;

/// State of the counter.
pub type State = RegionState<BucketCounts>;

/// Tokens, prepaid hits, and the grant cycle: see the table of the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketCounts {
    /// Whole tokens of the region's own that are left.
    pub tokens: u64,
    /// Fraction of a token, 0 to period - 1 (microseconds).
    pub part: u64,
    /// Hits of the last grant that are left.
    pub granted: u64,
    /// Global time at which they end.
    pub granted_until: Time,
    /// Hits of earlier grants that are left.
    pub earlier: u64,
    /// Global time at which the first of them end, and all of them with it.
    pub earlier_until: Time,
    /// A charge that leaves at most this many hits opens a grant request, while a grant lasts.
    pub low: u64,
    /// Global time up to which tokens have refilled; 0 if that is unknown.
    pub refilled_until: Time,
    /// Hits spent since the last grant, less refunds.
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
pub struct PrepaidHitsGrant {
    /// Identity of the request: the time of the region's Redis at which it was opened.
    pub request: u64,
    /// Epoch of the global counter.
    pub epoch: u64,
    /// Number of hits; 0 if there were none.
    pub hits: u64,
    /// A charge that leaves at most this many hits opens the next request.
    pub low: u64,
    /// Time of the global Redis at which the grant was made.
    pub start: Time,
    /// Time of the global Redis at which the hits end.
    pub end: Time,
    /// True if the global Redis had no tokens.
    pub exhausted: bool,
    /// Time of the region's Redis before which the next request is not opened.
    pub next_request_at: Time,
}

impl StoredRegionCounts for BucketCounts {
    fn read_from_reply(reply: &mut ReplyReader<'_>) -> Result<Self, MalformedReply> {
        Ok(Self {
            tokens: reply.read_number()?,
            part: reply.read_number()?,
            granted: reply.read_number()?,
            granted_until: reply.read_time()?,
            earlier: reply.read_number()?,
            earlier_until: reply.read_time()?,
            low: reply.read_number()?,
            refilled_until: reply.read_time()?,
            spent: reply.read_number()?,
            requested: reply.read_number()?,
            requested_since: reply.read_time()?,
            cycle: GrantCycle::read_from_reply(reply)?,
        })
    }
}

impl BucketCounts {
    /// Hits that are left, own and prepaid.
    pub const fn hits_left(&self) -> u64 {
        self.tokens + self.granted + self.earlier
    }

    /// Adds the hits of a grant; false if it does not answer the open request. `own_capacity` is that of the region's
    /// own bucket, which is full after a reset.
    pub fn accept_grant(&mut self, own_capacity: u64, grant: &PrepaidHitsGrant) -> bool {
        if !self.cycle.is_open_request(grant.request) {
            return false;
        }
        if grant.epoch > self.cycle.epoch {
            (self.tokens, self.part, self.granted, self.earlier) = (own_capacity, 0, 0, 0);
            self.cycle.epoch = grant.epoch;
        }
        self.drop_expired_hits(grant.start);
        if self.earlier == 0 {
            self.earlier_until = self.granted_until;
        } else if self.granted > 0 {
            // A later grant ends earlier if the clock of the global Redis was set back.
            self.earlier_until = self.earlier_until.min(self.granted_until);
        }
        self.earlier += self.granted;
        (self.granted, self.granted_until, self.low, self.spent) = (grant.hits, grant.end, grant.low, 0);
        self.cycle.close_request(grant.exhausted, grant.next_request_at);
        true
    }

    /// Drops the prepaid hits that have ended at a global time.
    fn drop_expired_hits(&mut self, global: Time) {
        if self.granted_until <= global {
            self.granted = 0;
        }
        if self.earlier_until <= global {
            self.earlier = 0;
        }
    }
}

impl State {
    /// Returns the time in microseconds until the first prepaid hits end: `u64::MAX` without such, 0 if global time is
    /// unknown or the region is cut off.
    pub(super) fn grant_time_left_us(&self, now: Time) -> u64 {
        match self.view.global_time_at(now) {
            Some(GlobalTimeInterval { hi, .. }) if !self.view.cut_off => {
                let counts = &self.counts;
                let ends = [(counts.earlier, counts.earlier_until), (counts.granted, counts.granted_until)];
                let left_us =
                    ends.into_iter().filter(|(hits, _)| *hits > 0).map(|(_, end)| end.as_micros().saturating_sub(hi));
                left_us.min().unwrap_or(u64::MAX)
            }
            _ => 0,
        }
    }

    /// Returns the hits used at `now`, since the last grant and in the tumbling period of the cut-off allowance.
    pub(super) fn region_hits_by_allotment(&self, limit: &Limit, now: Time) -> RegionHitsByAllotment {
        let bucket = RegionBucket::at_request_time(limit, self, now);
        let RegionBucket { call, counts, .. } = bucket;
        let (grant, reserve) = if bucket.is_last_grant_valid() { (counts.spent, 0) } else { (0, counts.spent) };
        RegionHitsByAllotment { grant, reserve, cut_off_allowance: call.cut_off.used }
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
    /// Without prepaid hits that have ended.
    counts: BucketCounts,
    /// Rate and capacity that the region always has.
    own_rate: u64,
    own_capacity: u64,
    /// Uncertainty of global time that needs no smaller capacity, in microseconds.
    slack_us: u64,
    /// Capacity of the moment, of the region's own bucket.
    max_tokens: u64,
}

impl RegionCounter for RegionBucket {
    type Counts = BucketCounts;

    fn at_request_time(limit: &Limit, state: &State, now: Time) -> Self {
        let call = RegionCall::new(limit, *state.view, state.counts.cycle.cut_off, now);
        let mut bucket = Self {
            call,
            counts: *state.counts,
            own_rate: call.usable_own_part(limit.region_reserve()),
            own_capacity: call.usable_own_part(limit.region_capacity()),
            slack_us: limit.clock_slack_us(),
            max_tokens: 0,
        };
        if let Some(global) = call.global {
            bucket.counts.cycle.set_epoch_if_none(global);
            bucket.counts.drop_expired_hits(Time::from_micros(global.hi));
        }
        if state.last == Time::default() {
            bucket.counts.tokens = bucket.own_capacity;
            bucket.counts.requested_since = now;
        }
        bucket.refill();
        bucket.counts.cycle.cut_off = call.cut_off;
        bucket
    }

    fn region_call(&self) -> &RegionCall {
        &self.call
    }

    fn stored_counts(&self) -> BucketCounts {
        self.counts
    }

    fn call_and_grant_cycle_mut(&mut self) -> (&mut RegionCall, &mut GrantCycle) {
        (&mut self.call, &mut self.counts.cycle)
    }

    fn usable_hits(&self) -> Option<u64> {
        Some(self.counts.tokens + self.usable_prepaid_hits())
    }

    fn used(&self) -> u64 {
        self.counts.spent
    }

    /// Lets older demand fade, and adds the hits.
    fn count_demand(&mut self, hits: u64) {
        let now = self.call.now;
        let seen_us = now.since_us(self.counts.requested_since);
        if seen_us > 2 * DEMAND_FADE_TIME_US {
            (self.counts.requested, self.counts.requested_since) = (0, now);
        } else if seen_us > DEMAND_FADE_TIME_US {
            self.counts.requested /= 2;
            self.counts.requested_since = Time::from_micros(now.as_micros() - DEMAND_FADE_TIME_US / 2);
        }
        self.counts.requested = self.counts.requested.saturating_add(hits).min(MAX_COUNT);
    }

    fn spend(&mut self, hits: u64) {
        if self.call.global.is_none() && hits > 0 {
            self.counts.refilled_until = Time::default();
        }
        let counts = &mut self.counts;
        let mut left = hits;
        if self.call.global.is_some() {
            for prepaid in [&mut counts.earlier, &mut counts.granted] {
                let spent = left.min(*prepaid);
                *prepaid -= spent;
                left -= spent;
            }
        }
        counts.tokens -= left;
        counts.spent = counts.spent.saturating_add(hits).min(MAX_COUNT);
    }

    fn refund(&mut self, hits: u64, lent: u64) {
        let returned = hits.min(self.counts.spent.saturating_sub(lent));
        self.counts.spent -= returned;
        let own = returned.min(self.max_tokens - self.counts.tokens);
        self.add_tokens(u128::from(own) * u128::from(self.call.period_us), self.max_tokens);
        if self.is_last_grant_valid() {
            self.counts.granted = (self.counts.granted + returned - own).min(MAX_COUNT);
        }
    }

    fn needs_grant(&self) -> bool {
        self.counts.tokens + self.usable_prepaid_hits()
            <= if self.is_last_grant_valid() { self.counts.low } else { self.own_capacity / 2 }
    }

    fn until_replenished_us(&self) -> u64 {
        self.until_tokens_us(self.max_tokens).unwrap_or(0)
    }

    fn retry_after_us(&self, limit: &Limit, request: ChargeRequest) -> Option<u64> {
        let (call, hits) = (&self.call, request.required_hits());
        if hits > u64::from(limit.capacity()) || limit.requests_per_unit() == 0 {
            return None;
        }
        let refill_us = self.until_tokens_us(hits);
        let allowance_us =
            (call.cut_off_allowance_applies() && hits <= call.allowance).then(|| call.until_allowance_ends_us());
        let next_grant_us =
            (!call.view.cut_off && !self.counts.cycle.exhausted).then_some(MIN_GRANT_REQUEST_INTERVAL_US);
        let waits = [refill_us, allowance_us, next_grant_us].into_iter().flatten();
        Some(waits.min().unwrap_or(MIN_GRANT_REQUEST_INTERVAL_US).max(1))
    }
}

impl RegionBucket {
    /// True if hits of the last grant may be admitted.
    fn is_last_grant_valid(&self) -> bool {
        self.call.global.is_some_and(|global| global.hi < self.counts.granted_until.as_micros())
    }

    /// Prepaid hits that may be admitted; 0 while global time is unknown.
    const fn usable_prepaid_hits(&self) -> u64 {
        if self.call.global.is_some() { self.counts.earlier + self.counts.granted } else { 0 }
    }

    /// Adds the tokens that have refilled by the lower end of global time, and finds the capacity of the moment.
    fn refill(&mut self) {
        self.max_tokens = self.own_capacity;
        if let Some(GlobalTimeInterval { lo, hi }) = self.call.global {
            let from = match self.counts.refilled_until.as_micros() {
                0 => hi,
                refilled_until => refilled_until,
            };
            let until = from.max(lo);
            self.add_tokens(u128::from(until - from) * u128::from(self.own_rate), self.own_capacity);
            let unsure_us = hi.saturating_sub(until).saturating_sub(self.slack_us);
            let unsure = (u128::from(unsure_us) * u128::from(self.own_rate)).div_ceil(u128::from(self.call.period_us));
            self.max_tokens = self.max_tokens.saturating_sub(u64::try_from(unsure).unwrap_or(u64::MAX));
            self.counts.refilled_until = Time::from_micros(until);
        }
        self.add_tokens(0, self.max_tokens);
    }

    /// Adds tokens, given in tokens x period, to a bucket of `capacity`, which may be smaller than before.
    fn add_tokens(&mut self, units: u128, capacity: u64) {
        let period = u128::from(self.call.period_us);
        let cap = |units: u128| units.min(u128::from(capacity) * period);
        let left = cap(u128::from(self.counts.tokens) * period + u128::from(self.counts.part));
        let left = cap(left + units);
        let narrow = |units: u128| u64::try_from(units).unwrap_or(u64::MAX);
        (self.counts.tokens, self.counts.part) = (narrow(left / period), narrow(left % period));
    }

    /// Microseconds until the region's own bucket holds `tokens`; `None` if it never will.
    fn until_tokens_us(&self, tokens: u64) -> Option<u64> {
        if tokens > self.max_tokens || self.own_rate == 0 {
            return None;
        }
        let period = u128::from(self.call.period_us);
        let left = u128::from(self.counts.tokens) * period + u128::from(self.counts.part);
        Some(clamp_us((u128::from(tokens) * period).saturating_sub(left).div_ceil(self.own_rate.into())))
    }
}
