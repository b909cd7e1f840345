//! Pool of a region: hits of a global limit that the region's Redis hands out without asking.
//!
//! A region has its *part* of a global limit, an ordinary counter under [`Limit::region_part`], and beside it a pool of
//! hits that it holds ([`hold`](crate::limit::hold)) of the counter in the global Redis, which runs under
//! [`Limit::without_region_parts`]. A charge is made on the part, or if that does not admit it, on the pool.
//!
//! # Requests
//!
//! A charge that leaves little in the pool opens a request: it numbers the hits that were used and not reported yet. The
//! process that made the charge sends them to the global Redis, and what it wants. An answer to the last request
//! replaces what is left. If none comes for [`ANSWER_TIMEOUT_US`], another charge opens a request with the same hits,
//! which names the first one that reported them: so the global Redis charges them once, whatever was lost. Only if all
//! answers are lost until ten seconds after the end of the hold, it charges them again.
//!
//! # Why regions together keep the limit
//!
//! The counter in the global Redis runs under the limit without the parts, and lowers it by what is held. A hit of a
//! pool is missing there from the grant until it is charged, so it is charged at its time or later. It is used before
//! the hold ends: the pool ends by the region's clock, a thousandth sooner than the hold, counted from before the
//! request was sent. So no two clocks need to agree. Parts are independent counters of the same algorithm. What an
//! algorithm admits in any span is linear in the limit, so all of them together admit what the limit would.
//!
//! A pool that is lost has a new [`id`](RegionPool::id), so what the lost one held counts as used. What breaks this:
//! a clock of the region that is set back by more than [`MAX_CLOCK_STEP_US`] between two charges (noticed by the next
//! charge, which drops what is left, unless the last one was longer ago), and a copy of the region's Redis: both may
//! use what one holds, at most what one hold has left.
//!
//! [`region_requests`](crate::limit::region_requests) says what a request asks for, and `store::redis::regions` sends
//! it; `pool_charge` and `lua/pool.lua` do the arithmetic of charges.
//!
//! Decides: when a region asks the global Redis (`start_request_if_due`); which answers its pool takes (`accept`).

use std::iter::Sum;

use super::Algorithm;
use super::stored_state::{MalformedReply, ReplyReader};
use crate::base::clock::Time;
use crate::limit::Limit;

/// Time after which a request without an answer is opened again, in microseconds.
pub const ANSWER_TIMEOUT_US: u64 = 3_000_000;
/// Step of a clock backwards after which a pool is dropped, in microseconds; a smaller one prolongs the pool by as much.
pub const MAX_CLOCK_STEP_US: u64 = 1_000_000;
/// What the last answer told of the counter in the global Redis. Only Rust reads it; `lua/pool.lua` keeps its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastAnswer {
    /// Hits that could be held beside all holds.
    pub room: u64,
    /// Most hits in a period that a region gets, by a max-min division; [`MAX_COUNT`](crate::limit::charge::MAX_COUNT): as many as it wants.
    pub fair_share: u64,
    /// Hits in a period that all other regions get by it.
    pub others_share: u64,
    /// Hits that they held.
    pub held_by_others: u64,
    /// End of the window by the clock of the region's Redis, not later than the true one; 0 for a bucket.
    pub window_end: Time,
}

/// Pool of a region, as its Redis stores it: 19 numbers in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionPool {
    /// Time of the last charge; 0: the pool is new.
    pub last: Time,
    /// Identity among the pools of the region: the time of its creation in microseconds.
    pub id: u64,
    /// Hits that may be handed out.
    pub left: u64,
    /// Time at which they end.
    pub until: Time,
    /// Hits that were handed out, and that no request has reported.
    pub unreported: u64,
    /// Number of the last request: higher than all before it, and about its time in microseconds.
    pub number: u64,
    /// Number of the request that reported [`Self::reported`] first; 0: no request is open.
    pub first_number: u64,
    /// Hits that the open request tells.
    pub reported: u64,
    /// Time at which the last request was opened.
    pub requested_at: Time,
    /// Time from which the next request may be opened, or the open one again.
    pub next_request_at: Time,
    /// Most hits left at which a charge opens a request.
    pub low: u64,
    /// Hits that callers asked for beyond the part since [`Self::demand_since`].
    pub demand: u64,
    /// Start of the time over which demand is counted.
    pub demand_since: Time,
    /// Most hits of one charge that did not fit, since the last request was opened.
    pub unmet: u64,
    /// What the last answer told.
    pub answer: LastAnswer,
}

/// Answer to the open request of a pool, in terms of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolGrant {
    /// Number of the request.
    pub number: u64,
    /// Hits held.
    pub held: u64,
    /// Time at which the pool ends.
    pub until: Time,
    /// See [`RegionPool::low`].
    pub low: u64,
    /// See [`RegionPool::next_request_at`].
    pub next_request_at: Time,
    /// See [`RegionPool::answer`].
    pub answer: LastAnswer,
}

impl RegionPool {
    /// Number of bytes in Redis.
    pub const STORED_BYTES: usize = 152;

    /// Decodes the pool that follows the state of its counter in a script's reply.
    ///
    /// # Errors
    /// The script cannot have returned these numbers.
    pub fn read_from_reply(reply: &mut ReplyReader<'_>) -> Result<Self, MalformedReply> {
        Ok(Self {
            last: reply.read_time()?,
            id: reply.read_number()?,
            left: reply.read_number()?,
            until: reply.read_time()?,
            unreported: reply.read_number()?,
            number: reply.read_number()?,
            first_number: reply.read_number()?,
            reported: reply.read_number()?,
            requested_at: reply.read_time()?,
            next_request_at: reply.read_time()?,
            low: reply.read_number()?,
            demand: reply.read_number()?,
            demand_since: reply.read_time()?,
            unmet: reply.read_number()?,
            answer: LastAnswer {
                room: reply.read_number()?,
                fair_share: reply.read_number()?,
                others_share: reply.read_number()?,
                held_by_others: reply.read_number()?,
                window_end: reply.read_time()?,
            },
        })
    }

    /// Returns the pool as it is at `now`: without hits that have ended, or whose end a wrong clock told.
    #[must_use]
    pub fn at(mut self, limit: &Limit, now: Time) -> Self {
        if self.last == Time::default() {
            return Self { last: now, id: now.as_micros(), demand_since: now, ..Self::default() };
        }
        if self.last > now.plus_us(MAX_CLOCK_STEP_US) {
            self = Self { last: now, left: 0, demand: 0, demand_since: now, next_request_at: now, ..self };
        }
        self.last = self.last.max(now);
        if self.last >= self.until {
            self.left = 0;
        }
        let span_us = self.last.since_us(self.demand_since);
        let halved_after_us = demand_span_us(limit);
        if span_us > 2 * halved_after_us {
            (self.demand, self.demand_since) = (0, self.last);
        } else if span_us > halved_after_us {
            self.demand /= 2;
            self.demand_since = Time::from_micros(self.last.as_micros() - halved_after_us / 2);
        }
        self
    }

    /// Opens a request if the next one is due: numbers what was used, or repeats the open request.
    pub fn start_request_if_due(&mut self) {
        let due = self.next_request_at;
        if due <= self.last || due > self.last.plus_us(2 * ANSWER_TIMEOUT_US) {
            self.start_request();
        }
    }

    /// Opens a request that gives back what is left above `kept` hits.
    pub fn start_request_keeping(&mut self, kept: u64) {
        self.left = self.left.min(kept);
        self.start_request();
    }

    fn start_request(&mut self) {
        self.number = self.last.as_micros().max(self.number + 1);
        if self.first_number == 0 {
            (self.first_number, self.reported, self.unreported) = (self.number, self.unreported, 0);
        }
        self.requested_at = self.last;
        self.next_request_at = self.last.plus_us(ANSWER_TIMEOUT_US);
    }

    /// Takes an answer; false if it is not one to the open request.
    pub fn accept(&mut self, grant: &PoolGrant) -> bool {
        if self.first_number == 0 || self.number != grant.number {
            return false;
        }
        let PoolGrant { held, until, low, next_request_at, answer, .. } = *grant;
        let left = held.saturating_sub(self.unreported);
        *self = Self { left, until, low, next_request_at, answer, first_number: 0, reported: 0, unmet: 0, ..*self };
        true
    }

    /// Hits that are in use, as far as the region knows: those of all regions if the last answer still holds.
    pub(super) fn used(&self, limit: &Limit) -> u64 {
        let own = self.unreported + self.reported;
        let window_is_over = self.answer.window_end != Time::default() && self.last >= self.answer.window_end;
        if self.until == Time::default() || window_is_over {
            return own;
        }
        let granted = limit.without_region_parts().capacity();
        granted.saturating_sub(self.answer.room + self.left).max(own)
    }

    /// Time after which the pool may have hits for a rejected charge, in microseconds: the end of the window if all of
    /// it is used, else the next request.
    pub(super) fn retry_after_us(&self, limit: &Limit) -> u64 {
        let LastAnswer { room, window_end, .. } = self.answer;
        let is_used_up = limit.algorithm() == Algorithm::FixedWindow && room == 0 && window_end > self.last;
        if is_used_up { window_end.since_us(self.last) } else { self.next_request_at.since_us(self.last).max(1) }
    }
}

/// Time after which demand counts by half, in microseconds.
fn demand_span_us(limit: &Limit) -> u64 {
    (limit.period_us() / 5).clamp(2_000_000, 4_000_000)
}

/// Returns a thousandth less of a time in microseconds: two clocks that drift by 500 ppm measure at least that.
pub const fn less_drift_us(us: u64) -> u64 {
    us - us.div_ceil(1000)
}

/// Hits that a region admitted, by what they were taken from; refunded hits do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenHits {
    /// Hits of the pool.
    pub pool: u64,
    /// Hits of the region's part.
    pub part: u64,
}

impl Sum for TakenHits {
    fn sum<I: Iterator<Item = Self>>(taken: I) -> Self {
        taken.fold(Self::default(), |sum, more| Self { pool: sum.pool + more.pool, part: sum.part + more.part })
    }
}
