//! sliding_window_counter: the count of this window plus that of the previous one, weighted by the part of it that
//! overlaps the last period.
//!
//! weight = current + floor(previous x (period - elapsed) / period), with `elapsed` the time since this window began.
//! A request of n hits passes if weight + n <= requests_per_unit. Source: Cloudflare's "How we built rate limiting
//! capable of scaling to millions of domains" (2017).
//!
//! The algorithm assumes that the hits of the previous window were evenly spaced, so the weight can be too high or too
//! low. A state has two counts only. The weight is rounded down: the one rounding in favour of the caller.
//!
//! Decides: weight of the previous window and its rounding; what a refund takes back first.
//! Decides: how long a rejected request waits (Retry-After, reset).

use super::stored_state::{MalformedReply, ReplyReader, ShareRatio, StoredState};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, EffectiveTime, MAX_COUNT, StateChange, effective_time};

/// Counts of two adjacent windows, aligned to the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Hits in the window of the last charge.
    pub current: u64,
    /// Hits in the window before it.
    pub previous: u64,
    /// Time of the last charge.
    pub last: Time,
}

impl StoredState for State {
    #[inline]
    fn to_packed_words(&self) -> [u64; 2] {
        [self.current, self.previous]
    }

    #[inline]
    fn from_packed_words([current, previous]: [u64; 2], last: Time) -> Self {
        Self { current, previous, last }
    }

    #[inline]
    fn read_from_reply(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply> {
        Ok(Self { current: reply.read_number()?, previous: reply.read_number()?, last })
    }

    fn scaled_to_fallback_share(&self, ratio: ShareRatio, _limit: &Limit, now: Time) -> Self {
        Self {
            current: ratio.scale_rounded_up(self.current),
            previous: ratio.scale_rounded_up(self.previous),
            last: self.last.min(now),
        }
    }
}

/// Applies a request to the counts.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let mut counts = WindowCounts::at_request_time(limit, state, now);
    let before = counts.weighted_count();
    let max = limit.requests_per_unit();
    let fits = counts.fits(limit, request);
    let effect = request.state_change(fits, limit);
    match effect {
        StateChange::None => {}
        StateChange::Charge(hits) => counts.current += hits,
        // Rejected hits add up to twice the limit, and never lower the count.
        StateChange::ChargeRejected(hits) => {
            counts.current = counts.current.max((2 * max).min(counts.current + hits).min(MAX_COUNT));
        }
        StateChange::Refund(hits) => {
            let beyond = hits.saturating_sub(counts.current);
            counts.current = counts.current.saturating_sub(hits).max(counts.current.min(request.leased));
            counts.previous = counts.previous.saturating_sub(beyond);
        }
    }
    if effect != StateChange::None {
        *state = State { current: counts.current, previous: counts.previous, last: counts.at };
    }
    let after = counts.weighted_count();
    ChargeResult {
        admitted: fits,
        before,
        after,
        remaining: max.saturating_sub(after),
        reset_us: counts.until_count_falls_us(0),
        retry_after_us: match max.checked_sub(request.required_hits()) {
            Some(room) if !fits => Some(counts.until_count_falls_us(room)),
            Some(_) | None => None,
        },
        delay_us: 0,
        ..ChargeResult::default()
    }
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    WindowCounts::at_request_time(limit, state, now).fits(limit, request)
}

/// Counts of the windows around a request.
struct WindowCounts {
    current: u64,
    previous: u64,
    at: Time,
    /// Microseconds by which `at` lies ahead of the request's `now`.
    ahead_us: u64,
    /// Microseconds since this window began, less than the period.
    elapsed_us: u64,
    period_us: u64,
    /// Hits of a window that count, at most. A lowered limit finds more, and would wait for them a window longer than
    /// for its own.
    most: u64,
}

impl WindowCounts {
    fn at_request_time(limit: &Limit, state: &State, now: Time) -> Self {
        let period_us = limit.period_us();
        let (state, EffectiveTime { at, ahead_us }) = match effective_time(now, state.last, period_us) {
            Some(time) => (*state, time),
            None => (State::default(), EffectiveTime { at: now, ahead_us: 0 }),
        };
        let windows = at.as_micros() / period_us - state.last.as_micros() / period_us;
        let (current, previous) = match windows {
            0 => (state.current, state.previous),
            1 => (0, state.current),
            _ => (0, 0),
        };
        // A limit of 0 rejects everything, and leaves what another one counted.
        let most = if limit.size_without_holds() == 0 { u64::MAX } else { limit.most_hits_of_window() };
        Self { current, previous, at, ahead_us, elapsed_us: at.as_micros() % period_us, period_us, most }
    }

    fn weighted_count(&self) -> u64 {
        let previous = self.previous.min(self.most);
        self.current.min(self.most)
            + weighted_previous_count(previous, self.period_us - self.elapsed_us, self.period_us)
    }

    fn fits(&self, limit: &Limit, request: ChargeRequest) -> bool {
        request.required_hits() == 0 || self.weighted_count() + request.required_hits() <= limit.requests_per_unit()
    }

    /// Microseconds from the request's `now` until the weight is at most `max`; 0 if it is.
    ///
    /// In this window only the share of the previous count falls; in the next one that of this window's count does.
    fn until_count_falls_us(&self, max: u64) -> u64 {
        let (current, previous) = (self.current.min(self.most), self.previous.min(self.most));
        let until_us = match max.checked_sub(current) {
            _ if self.weighted_count() <= max => return 0,
            Some(room) => offset_when_share_falls_us(previous, room, self.period_us) - self.elapsed_us,
            None => self.period_us - self.elapsed_us + offset_when_share_falls_us(current, max, self.period_us),
        };
        self.ahead_us + until_us
    }
}

/// Returns the part of the previous window's `count` that still counts: floor(count x left / period).
fn weighted_previous_count(count: u64, left_us: u64, period_us: u64) -> u64 {
    let product = u128::from(count) * u128::from(left_us) / u128::from(period_us);
    u64::try_from(product).unwrap_or(u64::MAX)
}

/// Returns the first time t in a window, in microseconds from its start, at which the share of the previous window's
/// `count` is at most `max`: count x (period - t) < (max + 1) x period. At most the window's end. `count` > `max`.
fn offset_when_share_falls_us(count: u64, max: u64, period_us: u64) -> u64 {
    let left = (u128::from(max + 1) * u128::from(period_us)).div_ceil(u128::from(count));
    let left = u64::try_from(left).unwrap_or(period_us).min(period_us);
    (period_us - left + 1).min(period_us)
}
