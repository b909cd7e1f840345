//! leaky_bucket: admitted requests leave one every period / `requests_per_unit`; those that wait are held.
//!
//! The state is the level of the bucket: the requests in it, the one that is leaving in part. A request leaves when
//! what was in the bucket before it has drained, and is answered then. A full bucket refuses at once, and so does one
//! in which the request would wait longer than its caller. n hits take n places and leave at the first of them.
//!
//! A refund takes places from the end of the queue only, and never those before a departure that was promised: the
//! state therefore keeps how many of the places belong to the request admitted last.

use super::leaky_level::{LeakyLevel, to_us};
use super::{ChargeRequest, ChargeResult, Effect, to_u32};
use crate::clock::Time;
use crate::limit::Limit;

/// What is in the bucket: `queued` whole places and `part`/period of one more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Whole places, at most `queue_size`.
    pub queued: u32,
    /// The rest, in parts of which a place has as many as the period has microseconds.
    pub part: u64,
    /// Places at the end that a refund may take: what is left of the request admitted last.
    pub tail: u32,
    /// When this was so.
    pub last: Time,
}

impl State {
    /// What is in it at `now`, as if nothing ever was if that is nothing; what was, if `now` is not later.
    pub fn drained(self, limit: &Limit, now: Time) -> Self {
        if now <= self.last {
            return self;
        }
        let (queued, part) = LeakyLevel::at(limit, (u64::from(self.queued), self.part), self.last, now).parts();
        if (queued, part) == (0, 0) {
            return Self::default();
        }
        Self { queued: to_u32(queued), part, tail: self.tail, last: now }
    }
}

/// Puts hits into the bucket.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let mut bucket = LeakyLevel::at(limit, (u64::from(state.queued), state.part), state.last, now);
    let before = bucket.hits();
    let early_us = early_us(&bucket, request);
    let fits = early_us == Some(0);
    let effect = request.effect(fits, limit);
    let delay_us = if matches!(effect, Effect::Charge(_)) { to_us(bucket.until_us(0)) } else { 0 };
    let mut tail = state.tail;
    match effect {
        Effect::Nothing | Effect::Debt(_) => {}
        Effect::Charge(hits) => {
            bucket.units += bucket.units_of(hits);
            tail = to_u32(hits);
        }
        Effect::Refund(hits) => {
            let taken = tail.min(to_u32(hits));
            bucket.units = bucket.units.saturating_sub(bucket.units_of(u64::from(taken)));
            tail -= taken;
        }
    }
    if effect != Effect::Nothing {
        let (queued, part) = bucket.parts();
        *state = State { queued: to_u32(queued), part, tail, last: bucket.at };
    }
    ChargeResult {
        admitted: fits,
        before,
        after: bucket.hits(),
        remaining: bucket.remaining(),
        reset_us: bucket.until_empty_us(),
        retry_after_us: if fits { None } else { early_us },
        delay_us,
    }
}

/// Whether [`charge`] would pass.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    early_us(&LeakyLevel::at(limit, (u64::from(state.queued), state.part), state.last, now), request) == Some(0)
}

/// How much too early a charge comes, in microseconds: until its hits have room and need not wait longer than they may.
/// `None` if they will never have room.
fn early_us(bucket: &LeakyLevel<'_>, request: ChargeRequest) -> Option<u64> {
    let until_room_us = bucket.until_room_us(request)?;
    if request.wanted() == 0 {
        return Some(0);
    }
    // A request leaves when all that stood before it has left.
    let departure_us = bucket.until_us(0);
    Some(to_us(until_room_us.max(departure_us.saturating_sub(bucket.patience_us(request)))))
}
