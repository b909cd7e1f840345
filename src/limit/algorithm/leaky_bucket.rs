//! leaky_bucket: a queue that requests leave one by one, every period / `requests_per_unit`.
//!
//! level(now) = max(0, level(last) - (now - last) x requests_per_unit / period); a request of n hits passes if
//! level + n <= queue_size, and is delayed until everything before it has left. Source: the leaky bucket as a queue
//! (Turner 1986; nginx `limit_req` with a burst).
//!
//! A full queue rejects at once; so does one in which the request would wait longer than it accepts. n hits take n
//! places and leave together with the first of them. Levels and waits are rounded up.
//!
//! A refund takes places from the end of the queue only, never before a departure that was promised. The state
//! therefore keeps the number of places that belong to the request admitted last.
//!
//! Decides: how long a request is delayed, and when it is rejected in place of that.
//! Decides: how long a rejected request waits (Retry-After, reset).

use super::leaky_level::{LeakyLevel, LevelParts, RememberedSize, clamp_us, derive_level_wait_from_result_us};
use super::stored_state::{MalformedReply, ReplyReader, ShareRatio, StoredState};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, StateChange, clamp_to_u32};

/// Places taken: `queued` whole ones and `part`/period of one more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Whole places, at most `queue_size`.
    pub queued: u32,
    /// Fraction of a place, 0 to period - 1 (microseconds).
    pub part: u64,
    /// Places at the end that a refund may remove: those left of the request admitted last. 0 beside a mark.
    pub tail: u32,
    /// Size of the queue, if the level alone does not tell; below `TAIL_IS_SIZE`.
    pub mark: Option<RememberedSize>,
    /// Time of the last charge.
    pub last: Time,
}

/// Flag in the stored number of places of the tail: the number is the size of a mark, and the tail is 0.
const TAIL_IS_SIZE: u32 = 1 << 31;

impl State {
    fn encode_tail(&self) -> u32 {
        self.mark.map_or(self.tail, |mark| mark.size | TAIL_IS_SIZE)
    }

    fn with_encoded_tail(self, tail: u32) -> Self {
        match tail & TAIL_IS_SIZE {
            0 => Self { tail, mark: None, ..self },
            _ => Self { tail: 0, mark: Some(RememberedSize { size: tail ^ TAIL_IS_SIZE, was_resized: true }), ..self },
        }
    }

    /// Returns the state after departures until `now`; the default state if the queue is empty by then.
    ///
    /// A `now` before the last charge changes nothing.
    pub fn drained(self, limit: &Limit, now: Time) -> Self {
        if now <= self.last {
            return self;
        }
        let level = self.level(limit, now);
        match (level.whole_and_part(), level.mark_to_keep()) {
            (LevelParts { whole: 0, part: 0 }, None) => Self::default(),
            (parts, mark) => Self::at_level(parts, self.tail, mark, now),
        }
    }

    fn at_level(level: LevelParts, tail: u32, mark: Option<RememberedSize>, last: Time) -> Self {
        let mark = mark.filter(|mark| mark.size < TAIL_IS_SIZE);
        let tail = if mark.is_some() { 0 } else { tail.min(TAIL_IS_SIZE - 1) };
        Self { queued: clamp_to_u32(level.whole), part: level.part, tail, mark, last }
    }

    fn level<'l>(&self, limit: &'l Limit, now: Time) -> LeakyLevel<'l> {
        LeakyLevel::at_request_time(
            limit,
            LevelParts { whole: u64::from(self.queued), part: self.part },
            self.mark,
            self.last,
            now,
        )
    }
}

impl StoredState for State {
    #[inline]
    fn to_packed_words(&self) -> [u64; 2] {
        [u64::from(self.queued) << 32 | u64::from(self.encode_tail()), self.part]
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "each half is meant")]
    fn from_packed_words([queued_and_tail, part]: [u64; 2], last: Time) -> Self {
        let level = Self { queued: (queued_and_tail >> 32) as u32, part, last, ..Self::default() };
        level.with_encoded_tail(queued_and_tail as u32)
    }

    #[inline]
    fn read_from_reply(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply> {
        let level = Self { queued: reply.read_u32()?, part: reply.read_number()?, last, ..Self::default() };
        Ok(level.with_encoded_tail(reply.read_u32()?))
    }

    /// A share may drain faster than that part of the limit, so the hits that drained until now are excluded.
    fn scaled_to_fallback_share(&self, ratio: ShareRatio, limit: &Limit, now: Time) -> Self {
        let Self { queued, part, tail, mark, last } = self.drained(limit, now);
        let level = ratio.scale_level(LevelParts { whole: u64::from(queued), part }, limit);
        // Rounded down, because refunds of these hits favour the caller.
        let tail = clamp_to_u32(ratio.scale_rounded_down(u64::from(tail)));
        Self::at_level(level, tail, mark.map(|mark| ratio.scale_mark(mark)), last.min(now))
    }

    fn derive_wait_from_result_us(limit: &Limit, result: &ChargeResult, request: ChargeRequest) -> Option<u64> {
        // A request leaves when everything before it has left.
        let delay_us = request.longest_delay_us(limit);
        let without_delay = ChargeRequest { max_delay_us: 0, ..request };
        Some(
            derive_level_wait_from_result_us(limit, result, without_delay)?
                .max(result.reset_us.saturating_sub(delay_us)),
        )
    }
}

/// Applies a request to the queue.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let mut level = state.level(limit, now);
    let before = level.hits_rounded_up();
    let until_admitted_us = until_admitted_us(&level, request);
    let fits = until_admitted_us == Some(0);
    let effect = request.state_change(fits, limit);
    let delay_us = if matches!(effect, StateChange::Charge(_)) { clamp_us(level.until_level_falls_us(0)) } else { 0 };
    // What is cut comes from the end.
    let mut tail = if level.mark_to_keep().is_some() { 0 } else { state.tail };
    match effect {
        // Rejected hits never count: see the table of algorithms.
        StateChange::None | StateChange::ChargeRejected(_) => {}
        StateChange::Charge(hits) => {
            level.units += level.hits_to_units(hits);
            tail = clamp_to_u32(hits);
        }
        StateChange::Refund(hits) => {
            let removed = tail.min(clamp_to_u32(hits));
            level.units = level.units.saturating_sub(level.hits_to_units(u64::from(removed)));
            tail -= removed;
        }
    }
    if effect != StateChange::None {
        *state = State::at_level(level.whole_and_part(), tail, level.mark_to_keep(), level.at);
    }
    ChargeResult {
        admitted: fits,
        before,
        after: level.hits_rounded_up(),
        remaining: level.remaining(),
        reset_us: level.until_empty_us(),
        retry_after_us: if fits { None } else { until_admitted_us },
        delay_us,
        ..ChargeResult::default()
    }
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    until_admitted_us(&state.level(limit, now), request) == Some(0)
}

/// Microseconds until the request could pass with a delay that it accepts; 0 if it can now, `None` if it never will.
fn until_admitted_us(level: &LeakyLevel<'_>, request: ChargeRequest) -> Option<u64> {
    let until_hits_fit_us = level.until_hits_fit_us(request)?;
    if request.required_hits() == 0 {
        return Some(0);
    }
    // A request leaves when everything before it has left.
    let departure_us = level.until_level_falls_us(0);
    Some(clamp_us(until_hits_fit_us.max(departure_us.saturating_sub(level.max_delay_us(request)))))
}
