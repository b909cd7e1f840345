//! token_bucket: tokens are refilled continuously, `requests_per_unit` in a period; idle time earns a burst.
//!
//! used(now) = max(0, used(last) - (now - last) x requests_per_unit / period); a request of n hits passes if
//! used + n <= bucket_size. Source: the token bucket of RFC 2697 and of most cloud APIs, with the level stored as
//! tokens *used*. The refill is computed at each request; there is no timer.
//!
//! With `max_wait`, a request that lacks tokens takes them in advance and is delayed until they are refilled. The
//! tokens used can then exceed the bucket. Used tokens and waits are rounded up, so never in favour of the caller.
//!
//! Decides: the most tokens of a bucket, also after a refund.
//! Decides: the debt that rejected hits leave; the wait of `max_wait`.
//! Decides: how long a rejected request waits (Retry-After, reset).

use super::leaky_level::{LeakyLevel, LevelParts, RememberedSize, clamp_us, derive_level_wait_from_result_us};
use super::stored_state::{MAX_LUA_INTEGER, MalformedReply, ReplyReader, ShareRatio, StoredState};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, StateChange};

/// Tokens used: `used` whole ones and `part`/period of one more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Whole tokens.
    pub used: u64,
    /// Fraction of a token, 0 to period - 1 (microseconds).
    pub part: u64,
    /// Size of the bucket, if the level alone does not tell.
    pub mark: Option<RememberedSize>,
    /// Time of the last charge.
    pub last: Time,
}

/// Bits of the second packed word, above those of `part`: 16 more of `used`, and the mark. Its size is in the first
/// word.
const USED_SHIFT: u32 = 45;
const WAS_RESIZED: u64 = 1 << 62;
const HAS_SIZE: u64 = 1 << 63;
/// Most tokens used that are packed beside a mark.
const MAX_MARKED_USED: u64 = (1 << 48) - 1;

impl State {
    /// Returns the state after the refill until `now`; the default state if the bucket is full by then.
    ///
    /// A `now` before the last charge changes nothing.
    pub fn refilled(self, limit: &Limit, now: Time) -> Self {
        if now <= self.last {
            return self;
        }
        let level = self.level(limit, now);
        match (level.whole_and_part(), level.mark_to_keep()) {
            (LevelParts { whole: 0, part: 0 }, None) => Self::default(),
            (LevelParts { whole, part }, mark) => Self { used: whole, part, mark, last: now },
        }
    }

    fn level<'l>(&self, limit: &'l Limit, now: Time) -> LeakyLevel<'l> {
        LeakyLevel::at_request_time(limit, LevelParts { whole: self.used, part: self.part }, self.mark, self.last, now)
    }
}

impl StoredState for State {
    #[inline]
    fn to_packed_words(&self) -> [u64; 2] {
        let Some(mark) = self.mark else { return [self.used, self.part] };
        let used = self.used.min(MAX_MARKED_USED);
        let was_resized = if mark.was_resized { WAS_RESIZED } else { 0 };
        [
            u64::from(mark.size) << 32 | used & u64::from(u32::MAX),
            HAS_SIZE | was_resized | used >> 32 << USED_SHIFT | self.part,
        ]
    }

    #[inline]
    fn from_packed_words([used, part]: [u64; 2], last: Time) -> Self {
        if part < HAS_SIZE {
            return Self { used, part, mark: None, last };
        }
        let mark = RememberedSize { size: (used >> 32) as u32, was_resized: part & WAS_RESIZED > 0 };
        let used = used & u64::from(u32::MAX) | (part & !(HAS_SIZE | WAS_RESIZED)) >> USED_SHIFT << 32;
        Self { used, part: part & ((1 << USED_SHIFT) - 1), mark: Some(mark), last }
    }

    /// The mark is decoded by `TotalHold::read_from_reply`.
    #[inline]
    fn read_from_reply(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply> {
        Ok(Self { used: reply.read_number()?, part: reply.read_number()?, mark: None, last })
    }

    /// A share may drain faster than that part of the limit, so the hits that drained until now are excluded.
    fn scaled_to_fallback_share(&self, ratio: ShareRatio, limit: &Limit, now: Time) -> Self {
        let Self { used, part, mark, last } = self.refilled(limit, now);
        let LevelParts { whole, part } = ratio.scale_level(LevelParts { whole: used, part }, limit);
        Self { used: whole, part, mark: mark.map(|mark| ratio.scale_mark(mark)), last: last.min(now) }
    }

    /// The time in which 2^52 tokens refill: borrowed tokens must stay countable. At least 12 days.
    fn max_lua_exact_delay_us(limit: &Limit) -> u64 {
        let longest_us = (1 << 52) * u128::from(limit.period_us()) / u128::from(limit.requests_per_unit().max(1));
        clamp_us(longest_us).min(MAX_LUA_INTEGER - 1)
    }

    fn derive_wait_from_result_us(limit: &Limit, result: &ChargeResult, request: ChargeRequest) -> Option<u64> {
        derive_level_wait_from_result_us(limit, result, request)
    }
}

/// Applies a request to the bucket.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let mut used = state.level(limit, now);
    let before = used.hits_rounded_up();
    let fits = until_admitted_us(&used, request) == Some(0);
    let effect = request.state_change(fits, limit);
    match effect {
        StateChange::None => {}
        StateChange::Charge(hits) => used.units += used.hits_to_units(hits),
        StateChange::ChargeRejected(hits) => {
            // Rejected hits add up to one period's tokens beyond an empty bucket, and never lower what is used.
            let max = used.hits_to_units(limit.capacity() + limit.requests_per_unit());
            used.units = used.units.max(max.min(used.units + used.hits_to_units(hits)));
        }
        StateChange::Refund(hits) => {
            let min = used.units.min(used.hits_to_units(request.leased));
            used.units = used.units.saturating_sub(used.hits_to_units(hits)).max(min);
        }
    }
    if effect != StateChange::None {
        let LevelParts { whole, part } = used.whole_and_part();
        *state = State { used: whole, part, mark: used.mark_to_keep(), last: used.at };
    }
    ChargeResult {
        admitted: fits,
        before,
        after: used.hits_rounded_up(),
        remaining: used.remaining(),
        reset_us: used.until_empty_us(),
        retry_after_us: if fits { None } else { until_admitted_us(&used, request) },
        delay_us: match effect {
            // Tokens taken in advance are refilled once no more are used than the bucket holds.
            StateChange::Charge(_) => clamp_us(used.until_level_falls_us(used.hits_to_units(limit.capacity()))),
            StateChange::None | StateChange::ChargeRejected(_) | StateChange::Refund(_) => 0,
        },
        ..ChargeResult::default()
    }
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    until_admitted_us(&state.level(limit, now), request) == Some(0)
}

/// Microseconds until the request could pass with a delay that it accepts; 0 if it can now, `None` if it never will.
fn until_admitted_us(used: &LeakyLevel<'_>, request: ChargeRequest) -> Option<u64> {
    Some(clamp_us(used.until_hits_fit_us(request)?.saturating_sub(used.max_delay_us(request))))
}
