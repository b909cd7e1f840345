//! calendar_window: the state of a fixed_window with a `window`: one count for each window of a calendar.
//!
//! The count is that of fixed_window. The state also holds the end of its window, and the end holds until it is
//! reached, whatever this process's calendar says: replicas with other zone data never open a second window inside a
//! stored one.
//!
//! Decides: that the stored end of a window holds, whatever this replica's time zone data says.

use super::fixed_window::CurrentWindow;
use super::stored_state::{MalformedReply, ReplyReader, ScriptCharge, ShareRatio, StoredState};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, EffectiveTime, effective_time};

/// Hits in the window of the last charge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Hits counted, at most [`MAX_COUNT`](crate::limit::charge::MAX_COUNT).
    pub count: u64,
    /// End of the window.
    pub end: Time,
    /// Time of the last charge.
    pub last: Time,
}

/// Bits of a length in the script argument `b`: windows of up to 776 days.
const WINDOW_LENGTH_BITS: u32 = 26;

impl StoredState for State {
    #[inline]
    fn to_packed_words(&self) -> [u64; 2] {
        [self.count, self.end.as_micros()]
    }

    #[inline]
    fn from_packed_words([count, end]: [u64; 2], last: Time) -> Self {
        Self { count, end: Time::from_micros(end), last }
    }

    #[inline]
    fn read_from_reply(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply> {
        Ok(Self { count: reply.read_number()?, end: reply.read_time()?, last })
    }

    fn scaled_to_fallback_share(&self, ratio: ShareRatio, _limit: &Limit, now: Time) -> Self {
        Self { count: ratio.scale_rounded_up(self.count), end: self.end, last: self.last.min(now) }
    }

    /// `a`: start of the window that contains this process's now, in seconds since the Unix epoch. `b`: its length in
    /// seconds times 2^26, plus the length of the next window. The script chooses by the time of Redis.
    fn script_arguments<'c>(mut charges: impl Iterator<Item = ScriptCharge<'c>>, now: Time) -> [i64; 2] {
        let Some(window) = charges.next().and_then(|charge| charge.limit.calendar_windows()) else { return [0, 0] };
        let current = window.bounds_at(now);
        let next = window.bounds_at_later_time(current.end);
        let seconds = |us: u64| i64::try_from(us / 1_000_000).unwrap_or(0);
        let length = |start: Time, end: Time| seconds(end.since_us(start)).clamp(1, (1 << WINDOW_LENGTH_BITS) - 1);
        let lengths = length(current.start, current.end) << WINDOW_LENGTH_BITS | length(next.start, next.end);
        [seconds(current.start.as_micros()), lengths]
    }

    fn derive_wait_from_result_us(_limit: &Limit, result: &ChargeResult, _request: ChargeRequest) -> Option<u64> {
        Some(result.reset_us)
    }
}

/// Applies a request to the count.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let window = current_window(limit, state, now);
    let (count, result) = window.compute_charge(limit, request);
    if let Some(count) = count {
        *state = State { count, end: window.end, last: window.at };
    }
    result
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    current_window(limit, state, now).fits(limit, request)
}

/// Returns the window of a request: the stored one until its end, then that of the calendar.
fn current_window(limit: &Limit, state: &State, now: Time) -> CurrentWindow {
    let time = effective_time(now, state.last, limit.period_us());
    let is_live = time.is_some_and(|time| time.at < state.end);
    let EffectiveTime { at, ahead_us } = time.unwrap_or(EffectiveTime { at: now, ahead_us: 0 });
    if is_live {
        return CurrentWindow { count: state.count, at, ahead_us, end: state.end };
    }
    CurrentWindow { count: 0, at, ahead_us, end: super::fixed_window::window_bounds(limit, at).1 }
}
