//! region_bucket: tokens of a bucket that a region refills at the rate that it always has.

use super::algorithm_state::AlgorithmState;
use super::global_clock::GlobalClock;
use super::loss_allowance::LossPeriod;
use super::reply_reader::{MalformedReply, ReplyReader};
use super::share_ratio::ShareRatio;
use super::{ChargeRequest, ChargeResult, effective_time, to_u32};
use crate::clock::Time;
use crate::limit::Limit;
use crate::request::Hits;

/// State of the counter, with the clock of the call that charges it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Time of the last charge.
    pub last: Time,
    /// Tokens and grants.
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
    /// Granted rate, in hits per period.
    pub rate: u64,
    /// Granted capacity, above the region's own.
    pub capacity: u64,
    /// Global time at which the grant ends.
    pub term_end: Time,
    /// Identity of the open grant request: the time at which it was opened; 0: none is open.
    pub open_request: u64,
    /// Time of the region's Redis from which the next request may be opened.
    pub next_request_at: Time,
    /// Epoch of the global counter.
    pub epoch: u64,
    /// Hits that callers asked for since `requested_since`, admitted or not.
    pub requested: u64,
    /// Start of the span of `requested`.
    pub requested_since: Time,
    /// True if the global Redis had nothing left.
    pub exhausted: bool,
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
            rate: reply.number()?,
            capacity: reply.number()?,
            term_end: reply.time()?,
            open_request: reply.number()?,
            next_request_at: reply.time()?,
            epoch: reply.number()?,
            requested: reply.number()?,
            requested_since: reply.time()?,
            exhausted: reply.number()? != 0,
            loss: LossPeriod { start: reply.time()?, used: reply.number()? },
        };
        Ok(Self { last, counts: Box::new(counts), clock: Box::default() })
    }

    /// The fallback counters never hold hits that a region was granted.
    fn scaled(&self, _ratio: ShareRatio, _limit: &Limit, _now: Time) -> Self {
        self.clone()
    }
}

/// Applies a request to the bucket.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let before = refilled(limit, state, now);
    let capacity = u64::from(limit.region_capacity());
    let fits = request.required_hits() <= before.tokens;
    let mut after = before;
    let is_changed = match request.hits {
        Hits::Charge(hits) if fits && !request.rejected_elsewhere => {
            after.tokens -= hits;
            true
        }
        Hits::Refund(hits) => {
            after.tokens = after.tokens.saturating_add(hits).min(capacity);
            true
        }
        Hits::Charge(_) | Hits::Peek => false,
    };
    if is_changed {
        state.last = effective_time(now, state.last, limit.period_us()).map_or(now, |time| time.at);
        *state.counts = after;
    }
    ChargeResult {
        admitted: fits,
        before: capacity - before.tokens,
        after: capacity - after.tokens,
        remaining: to_u32(after.tokens),
        reset_us: 0,
        retry_after_us: (!fits && request.required_hits() <= capacity).then_some(limit.period_us()),
        delay_us: 0,
    }
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    request.required_hits() <= refilled(limit, state, now).tokens
}

/// Returns the counts at `now`; a full bucket if there is no state.
fn refilled(limit: &Limit, state: &State, now: Time) -> RegionBucketCounts {
    let capacity = u64::from(limit.region_capacity());
    let period = u128::from(limit.period_us());
    let elapsed = if state.last == Time::default() { u64::MAX } else { now.since_us(state.last) };
    let units = u128::from(state.counts.tokens) * period
        + u128::from(state.counts.part)
        + u128::from(elapsed) * u128::from(limit.region_reserve());
    let units = units.min(u128::from(capacity) * period);
    let narrow = |units: u128| u64::try_from(units).unwrap_or(u64::MAX);
    RegionBucketCounts { tokens: narrow(units / period), part: narrow(units % period), ..*state.counts }
}
