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
//! - The loss allowance applies to hits that the tokens do not admit, while global time is unknown or the region is cut
//!   off.
//! - A charge that leaves at most half of the capacity, or is rejected, opens a *grant request*, as in region_window.
//! - A refund returns at most the tokens spent since the last grant.
//!
//! The state keeps tokens that are *left*, because the capacity changes with each term. Tokens are rounded down.

use super::algorithm_state::AlgorithmState;
use super::global_clock::{GlobalClock, GlobalTime};
use super::leaky_level::to_us;
use super::loss_allowance::LossPeriod;
use super::region_use::RegionUse;
use super::region_window::{ANSWER_TIME_US, REQUEST_INTERVAL_US};
use super::reply_reader::{MalformedReply, ReplyReader};
use super::share_ratio::ShareRatio;
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, MAX_COUNT, effective_time, to_u32};
use crate::limit::request::Hits;

/// State of the counter, with the clock of the call that charges it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Time of the last charge; 0: the bucket is new.
    pub last: Time,
    /// Tokens, the grant, and the grant request.
    pub counts: Box<RegionBucketCounts>,
    /// Global clock of the call; not stored.
    pub clock: Box<GlobalClock>,
}

/// Tokens, the grant, and the grant request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionBucketCounts {
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
    /// True if the global Redis had nothing left.
    pub exhausted: bool,
    /// Identity of the open grant request: the time at which it was opened; 0: none is open.
    pub open_request: u64,
    /// Time of the region's Redis from which the next request may be opened.
    pub next_request_at: Time,
    /// Last reset of the limit that this counter follows, in global time; at first, its own creation.
    pub epoch: u64,
    /// Use of the loss allowance.
    pub loss: LossPeriod,
}

impl AlgorithmState for State {
    /// The memory store never counts in a region.
    fn to_words(&self) -> [u64; 2] {
        [0, 0]
    }

    fn from_words(_words: [u64; 2], last: Time) -> Self {
        Self { last, ..Self::default() }
    }

    fn read(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply> {
        let counts = RegionBucketCounts {
            tokens: reply.number()?,
            part: reply.number()?,
            rate: reply.number_u32()?.into(),
            capacity: reply.number_u32()?.into(),
            term_end: reply.time()?,
            refilled_until: reply.time()?,
            spent: reply.number()?,
            requested: reply.number()?,
            requested_since: reply.time()?,
            exhausted: reply.number()? != 0,
            open_request: reply.number()?,
            next_request_at: reply.time()?,
            epoch: reply.number()?,
            loss: LossPeriod { start: reply.time()?, used: reply.number()? },
        };
        Ok(Self { last, counts: Box::new(counts), clock: Box::default() })
    }

    /// The fallback counters never hold what a region was granted.
    fn scaled(&self, _ratio: ShareRatio, _limit: &Limit, _now: Time) -> Self {
        self.clone()
    }
}

impl State {
    /// Returns the time in microseconds until the granted capacity ends: `u64::MAX` without a grant, 0 if global time
    /// is unknown or the region is cut off.
    pub(super) fn grant_left_us(&self, now: Time) -> u64 {
        match self.clock.at(now) {
            Some(GlobalTime { hi, .. }) if !self.clock.cut_off => {
                let left_us = self.counts.term_end.as_micros().saturating_sub(hi);
                if left_us == 0 { u64::MAX } else { left_us }
            }
            _ => 0,
        }
    }
}

/// Applies a request to the bucket.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let mut bucket = RegionBucket::at(limit, state, now);
    let before = bucket.used();
    let source = bucket.source(request);
    match request.hits {
        Hits::Peek => {}
        Hits::Refund(hits) => bucket.refund(hits, request.lent),
        Hits::Charge(_) if source.is_some() && request.rejected_elsewhere => {}
        Hits::Charge(hits) => bucket.charge(hits, source),
    }
    if request.hits != Hits::Peek {
        bucket.store(state);
    }
    ChargeResult {
        admitted: source.is_some(),
        before,
        after: bucket.used(),
        remaining: to_u32(bucket.remaining()).min(limit.capacity()),
        reset_us: bucket.until_tokens_us(bucket.max_tokens).unwrap_or(0).max(bucket.loss_ends_us()),
        retry_after_us: if source.is_some() { None } else { bucket.retry_after_us(limit, request) },
        delay_us: 0,
    }
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    RegionBucket::at(limit, state, now).source(request).is_some()
}

/// Returns the hits used at `now`, since the last grant and in the period of the loss allowance.
pub(super) fn region_use(limit: &Limit, state: &State, now: Time) -> RegionUse {
    let RegionBucket { counts, is_granted, .. } = RegionBucket::at(limit, state, now);
    let (grant, reserve) = if is_granted { (counts.spent, 0) } else { (0, counts.spent) };
    RegionUse { grant, reserve, loss_allowance: counts.loss.used }
}

/// Hits that a charge is admitted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenSource {
    /// Tokens of the bucket.
    Bucket,
    /// The loss allowance.
    Loss,
}

/// Bucket at the time of a request, refilled.
#[derive(Clone, Copy)]
pub(super) struct RegionBucket {
    pub(super) counts: RegionBucketCounts,
    now: Time,
    /// The later of `now` and the last charge.
    at: Time,
    period_us: u64,
    clock: GlobalClock,
    global: Option<GlobalTime>,
    /// Rate and capacity that the region always has.
    own_rate: u64,
    own_capacity: u64,
    allowance: u64,
    /// Uncertainty of global time that needs no smaller capacity, in microseconds.
    slack_us: u64,
    /// The term of the grant lasts.
    is_granted: bool,
    /// Capacity of the moment.
    max_tokens: u64,
}

impl RegionBucket {
    fn at(limit: &Limit, state: &State, now: Time) -> Self {
        Self::after(limit, state, now, Time::default())
    }

    /// Refills the bucket at `now`, which is not before the global time `past`.
    pub(super) fn after(limit: &Limit, state: &State, now: Time, past: Time) -> Self {
        let clock = *state.clock;
        let usable = |part: u64| if clock.parts_unusable { 0 } else { part };
        let period_us = limit.period_us();
        let mut bucket = Self {
            counts: *state.counts,
            now,
            at: effective_time(now, state.last, period_us).map_or(now, |time| time.at),
            period_us,
            clock,
            global: clock.at(now).map(|time| GlobalTime { lo: time.lo.max(past.as_micros()).min(time.hi), ..time }),
            own_rate: usable(limit.region_reserve().into()),
            own_capacity: usable(limit.region_capacity().into()),
            allowance: usable(limit.loss_allowance()),
            slack_us: limit.clock_slack_us(),
            is_granted: false,
            max_tokens: 0,
        };
        if let Some(GlobalTime { hi, .. }) = bucket.global
            && bucket.counts.epoch == 0
        {
            bucket.counts.epoch = hi;
        }
        if state.last == Time::default() {
            bucket.counts.tokens = bucket.own_capacity;
            bucket.counts.requested_since = now;
        }
        bucket.refill();
        bucket.counts.loss = bucket.counts.loss.at(now, period_us);
        bucket
    }

    /// Adds the tokens that have refilled by the lower end of global time, and finds the capacity of the moment.
    fn refill(&mut self) {
        self.max_tokens = self.own_capacity;
        if let Some(GlobalTime { lo, hi }) = self.global {
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
            let unsure = (u128::from(unsure_us) * u128::from(rate)).div_ceil(u128::from(self.period_us));
            self.max_tokens = self.max_tokens.saturating_sub(u64::try_from(unsure).unwrap_or(u64::MAX));
            self.counts.refilled_until = Time::from_micros(until);
        }
        self.add(0, self.max_tokens);
    }

    /// Adds tokens, given in tokens x period, to a bucket of `capacity`, which may be smaller than before.
    fn add(&mut self, units: u128, capacity: u64) {
        let period = u128::from(self.period_us);
        let cap = |units: u128| units.min(u128::from(capacity) * period);
        let left = cap(u128::from(self.counts.tokens) * period + u128::from(self.counts.part));
        let left = cap(left + units);
        let narrow = |units: u128| u64::try_from(units).unwrap_or(u64::MAX);
        (self.counts.tokens, self.counts.part) = (narrow(left / period), narrow(left % period));
    }

    /// Fills the bucket of the region's own capacity: the limit was reset.
    pub(super) const fn fill(&mut self) {
        (self.counts.tokens, self.counts.part) = (self.own_capacity, 0);
    }

    /// Writes the bucket to a state.
    pub(super) fn store(&self, state: &mut State) {
        state.last = self.at;
        *state.counts = self.counts;
    }

    const fn may_use_allowance(&self) -> bool {
        self.global.is_none() || self.clock.cut_off
    }

    /// Returns the hits that the request is admitted from; `None` if it is rejected.
    fn source(&self, request: ChargeRequest) -> Option<TokenSource> {
        if request.required_hits() <= self.counts.tokens {
            Some(TokenSource::Bucket)
        } else if self.may_use_allowance() && self.counts.loss.fits(self.allowance, request) {
            Some(TokenSource::Loss)
        } else {
            None
        }
    }

    /// Counts the demand of a charge, spends its hits, and opens a grant request if one is due.
    fn charge(&mut self, hits: u64, source: Option<TokenSource>) {
        self.forget_old_demand();
        self.counts.requested = self.counts.requested.saturating_add(hits).min(MAX_COUNT);
        match source {
            Some(TokenSource::Bucket) => {
                if self.global.is_none() && hits > 0 {
                    self.counts.refilled_until = Time::default();
                }
                self.counts.tokens -= hits;
                self.counts.spent = self.counts.spent.saturating_add(hits).min(MAX_COUNT);
            }
            Some(TokenSource::Loss) => self.counts.loss.used += hits,
            None => {}
        }
        let is_low = source != Some(TokenSource::Bucket) || 2 * self.counts.tokens <= self.max_tokens;
        if self.clock.can_request && self.global.is_some() && is_low && self.may_request() {
            self.counts.open_request = self.now.as_micros();
            self.counts.next_request_at = self.now.plus_us(ANSWER_TIME_US);
        }
    }

    /// Lets the demand of more than a period ago fade.
    fn forget_old_demand(&mut self) {
        let seen_us = self.now.since_us(self.counts.requested_since);
        if seen_us > 2 * self.period_us {
            (self.counts.requested, self.counts.requested_since) = (0, self.now);
        } else if seen_us > self.period_us {
            self.counts.requested /= 2;
            self.counts.requested_since = Time::from_micros(self.now.as_micros() - self.period_us / 2);
        }
    }

    /// Returns true if the next request is due, or its time comes from a clock that was wrong.
    fn may_request(&self) -> bool {
        let next = self.counts.next_request_at;
        next <= self.now || next > self.now.plus_us(self.period_us.max(ANSWER_TIME_US))
    }

    /// Returns tokens, but leaves those spent that replicas may still admit.
    fn refund(&mut self, hits: u64, lent: u64) {
        let returned = hits.min(self.counts.spent.saturating_sub(lent));
        self.counts.spent -= returned;
        self.add(u128::from(returned) * u128::from(self.period_us), self.max_tokens);
    }

    const fn used(&self) -> u64 {
        self.max_tokens.saturating_sub(self.counts.tokens) + self.counts.loss.used
    }

    fn remaining(&self) -> u64 {
        let allowance = if self.may_use_allowance() { self.counts.loss.left(self.allowance) } else { 0 };
        self.counts.tokens.max(allowance)
    }

    /// Microseconds until the bucket holds `tokens` at the rate of the moment; `None` if it never will.
    fn until_tokens_us(&self, tokens: u64) -> Option<u64> {
        let rate = self.own_rate + if self.is_granted { self.counts.rate } else { 0 };
        if tokens > self.max_tokens || rate == 0 {
            return None;
        }
        let period = u128::from(self.period_us);
        let left = u128::from(self.counts.tokens) * period + u128::from(self.counts.part);
        Some(to_us((u128::from(tokens) * period).saturating_sub(left).div_ceil(rate.into())))
    }

    /// Microseconds until the tumbling period of the loss allowance ends; 0 if nothing of it is used.
    fn loss_ends_us(&self) -> u64 {
        if self.counts.loss.used == 0 { 0 } else { self.counts.loss.ends_us(self.now, self.period_us) }
    }

    /// Microseconds until a rejected request may pass; `None` if it never will.
    fn retry_after_us(&self, limit: &Limit, request: ChargeRequest) -> Option<u64> {
        let hits = request.required_hits();
        if hits > u64::from(limit.capacity()) || limit.requests_per_unit() == 0 {
            return None;
        }
        let refill_us = self.until_tokens_us(hits);
        let loss_us = (self.may_use_allowance() && hits <= self.allowance).then(|| self.loss_ends_us());
        let next_grant_us = (!self.clock.cut_off && !self.counts.exhausted).then_some(REQUEST_INTERVAL_US);
        let waits = [refill_us, loss_us, next_grant_us].into_iter().flatten();
        Some(waits.min().unwrap_or(REQUEST_INTERVAL_US).max(1))
    }
}
