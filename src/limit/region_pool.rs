//! Pool of a region: hits of a global limit that the region's Redis hands out without asking.
//!
//! A region has its *part* of a global limit, an ordinary counter under [`Limit::region_part`], and beside it a pool of
//! hits that it holds ([`hold`](super::hold)) of the counter in the global Redis, which runs under
//! [`Limit::without_region_parts`]. A charge is made on the part, or if that does not admit it, on the pool.
//!
//! # Requests
//!
//! A charge that leaves little in the pool opens a request: it numbers the hits that were used and
//! not told yet. The process that made the charge sends them to the global Redis, and what it wants. An answer to the
//! last request replaces what is left. If none comes for [`ANSWER_TIMEOUT_US`], another charge opens a request with the
//! same hits, which names the first one that told them: so the global Redis charges them once, whatever was lost.
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
//! `store::redis::regions` sends requests; `lua/pool.lua` does the arithmetic of charges in Redis.
//!
//! Decides: from what a region admits a hit (part, then pool); when it asks the global Redis (`open_if_due`).
//! Decides: how many hits a region wants (`hits_wanted`), and for how long (`hold_length_us`).

use super::Limit;
use super::algorithm::Algorithm;
use super::algorithm::state::State;
use super::algorithm::stored_state::{MalformedReply, ReplyReader};
use super::charge::{ChargeRequest, ChargeResult, MAX_COUNT, clamp_to_u32};
use super::division::fair_share::FillLevel;
use super::hold::{HeldAmount, HoldAnswer, HoldRequest};
use super::request::Hits;
use crate::base::clock::Time;

/// Time after which a request without an answer is opened again, in microseconds.
pub const ANSWER_TIMEOUT_US: u64 = 3_000_000;
/// Step of a clock backwards after which a pool is dropped, in microseconds; a smaller one prolongs the pool by as much.
pub const MAX_CLOCK_STEP_US: u64 = 1_000_000;
/// Shortest time between two requests of a limit, in microseconds.
pub const MIN_REQUEST_INTERVAL_US: u64 = 1_000_000;
/// Time before the end of a window, or of a hold on a bucket, at which a region tells what it used and gives back what
/// it does not need, in microseconds. An answer from across an ocean is there before the end.
pub const LAST_REQUEST_LEAD_US: u64 = 500_000;

/// Shortest time over which demand is measured, in microseconds.
const MIN_DEMAND_SPAN_US: u64 = 250_000;
/// Time that the hits which are left must last: until an answer has crossed an ocean, with some margin.
const LOOKAHEAD_US: u64 = 1_500_000;
/// Time after the start of a window for which hits are wanted before it begins, in microseconds.
const NEXT_WINDOW_US: u64 = 500_000;
/// Length of a hold on windows, in microseconds; it lasts until the window of its end is over.
const WINDOW_HOLD_US: u64 = 2_000_000;

/// What the last answer told of the counter in the global Redis. Only Rust reads it; `lua/pool.lua` keeps its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastAnswer {
    /// Hits that could be held beside all holds.
    pub room: u64,
    /// Most hits in a period that a region gets, by a max-min division; [`MAX_COUNT`]: as many as it wants.
    pub level: u64,
    /// Hits in a period that all other regions get by it.
    pub others: u64,
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
    /// Hits that were handed out, and that no request has told.
    pub untold: u64,
    /// Number of the last request: higher than all before it, and about its time in microseconds.
    pub number: u64,
    /// Number of the request that told [`Self::told`] first; 0: no request is open.
    pub first_number: u64,
    /// Hits that the open request tells.
    pub told: u64,
    /// Time at which the last request was opened.
    pub opened_at: Time,
    /// Time from which the next request may be opened, or the open one again.
    pub next_request_at: Time,
    /// Most hits left at which a charge opens a request.
    pub low: u64,
    /// Hits that callers asked for beyond the part since [`Self::demand_since`].
    pub demand: u64,
    /// Start of the time over which demand is counted.
    pub demand_since: Time,
    /// Most hits of one charge that did not fit, since the last request was opened.
    pub lacking: u64,
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
            untold: reply.read_number()?,
            number: reply.read_number()?,
            first_number: reply.read_number()?,
            told: reply.read_number()?,
            opened_at: reply.read_time()?,
            next_request_at: reply.read_time()?,
            low: reply.read_number()?,
            demand: reply.read_number()?,
            demand_since: reply.read_time()?,
            lacking: reply.read_number()?,
            answer: LastAnswer {
                room: reply.read_number()?,
                level: reply.read_number()?,
                others: reply.read_number()?,
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
    pub fn open_if_due(&mut self) {
        let due = self.next_request_at;
        if due <= self.last || due > self.last.plus_us(2 * ANSWER_TIMEOUT_US) {
            self.open();
        }
    }

    /// Opens a request that gives back what is left above `kept` hits.
    pub fn open_to_keep(&mut self, kept: u64) {
        self.left = self.left.min(kept);
        self.open();
    }

    fn open(&mut self) {
        self.number = self.last.as_micros().max(self.number + 1);
        if self.first_number == 0 {
            (self.first_number, self.told, self.untold) = (self.number, self.untold, 0);
        }
        self.opened_at = self.last;
        self.next_request_at = self.last.plus_us(ANSWER_TIMEOUT_US);
    }

    /// Takes an answer; false if it is not one to the open request.
    pub fn accept(&mut self, grant: &PoolGrant) -> bool {
        if self.first_number == 0 || self.number != grant.number {
            return false;
        }
        let PoolGrant { held, until, low, next_request_at, answer, .. } = *grant;
        let left = held.saturating_sub(self.untold);
        *self = Self { left, until, low, next_request_at, answer, first_number: 0, told: 0, lacking: 0, ..*self };
        true
    }

    /// Hits that are in use, as far as the region knows: those of all regions if the last answer still holds.
    fn used(&self, limit: &Limit) -> u64 {
        let own = self.untold + self.told;
        let window_is_over = self.answer.window_end != Time::default() && self.last >= self.answer.window_end;
        if self.until == Time::default() || window_is_over {
            return own;
        }
        let granted = u64::from(limit.without_region_parts().capacity());
        granted.saturating_sub(self.answer.room + self.left).max(own)
    }

    /// Time after which the pool may have hits for a rejected charge, in microseconds: the end of the window if all of
    /// it is used, else the next request.
    fn retry_after_us(&self, limit: &Limit) -> u64 {
        let LastAnswer { room, window_end, .. } = self.answer;
        let is_used_up = limit.algorithm() == Algorithm::FixedWindow && room == 0 && window_end > self.last;
        if is_used_up { window_end.since_us(self.last) } else { self.next_request_at.since_us(self.last).max(1) }
    }

    /// Hits that callers ask for in a span beyond the part, by the demand of the last seconds, rounded up.
    fn hits_asked_for_in(&self, span_us: u64) -> u64 {
        let measured_us = self.last.since_us(self.demand_since).max(MIN_DEMAND_SPAN_US);
        let hits = (u128::from(self.demand) * u128::from(span_us)).div_ceil(u128::from(measured_us));
        u64::try_from(hits).unwrap_or(u64::MAX).min(MAX_COUNT)
    }

    /// Hits to hold at the global Redis, without regard to what is left.
    ///
    /// Of windows: those that are asked for until the window ends, at most the region's part of what may be left of it.
    /// Of a bucket: those that are asked for while the hold lasts, at most the region's part of what is refilled.
    pub fn hits_wanted(&self, limit: &Limit) -> u64 {
        let period_us = limit.period_us();
        let demand = self.hits_asked_for_in(period_us);
        if demand == 0 {
            return self.lacking;
        }
        let is_contended = self.answer.level < MAX_COUNT;
        let LastAnswer { room, level, others, held_by_others, window_end } = self.answer;
        let level = if self.until == Time::default() { MAX_COUNT } else { level };
        let fair = demand.min(level);
        let scale = |hits: u64, part: u64, whole: u64| {
            u64::try_from(u128::from(hits) * u128::from(part) / u128::from(whole.max(1))).unwrap_or(u64::MAX)
        };
        let wanted = if limit.holds_take_capacity() {
            let lasts_us = hold_length_us(limit);
            // A region that gets less than it asks for holds a little more than its part, to use all that is refilled.
            match u128::from(fair) * 100 > u128::from(demand) * 97 {
                true => self.hits_asked_for_in(lasts_us),
                false => scale(fair.saturating_mul(13), lasts_us, 10 * period_us) + 1,
            }
        } else {
            let is_in_window = window_end > self.last;
            let (rest_us, available) = match is_in_window {
                true => (window_end.since_us(self.last), self.left + room + held_by_others),
                false => (period_us, u64::from(limit.without_region_parts().requests_per_unit())),
            };
            let part = scale(available, fair, fair + others);
            let until_end = self.hits_asked_for_in(rest_us + NEXT_WINDOW_US);
            // Where all get what they ask for, half as much again makes requests rare; what is too much goes back.
            let until_end = if is_contended { until_end } else { until_end + until_end / 2 + 4 };
            until_end.min(part.max(1))
        };
        (wanted + 1).max(self.lacking)
    }

    /// Hits to keep when a process looks at the pool, for [`Self::open_to_keep`]; `None`: there is nothing to tell.
    ///
    /// At the end of the window or of the hold all that are not wanted go back. Before it they do where others get less
    /// than they ask for and a fourth more than wanted is left, or where nobody does and four times as much is. Where
    /// little is left beside the holds, a region asks every sixth of a period how much the others ask for.
    pub fn hits_to_keep(&self, limit: &Limit) -> Option<u64> {
        let wanted = self.hits_wanted(limit);
        let LastAnswer { room, level, held_by_others, .. } = self.answer;
        let ends_soon = self.last_look_at() <= self.last && self.left + self.untold > 0;
        let most = if level < MAX_COUNT { wanted + wanted / 4 + 2 } else { 4 * wanted + 10 };
        let is_outdated = self.last > self.opened_at.plus_us(limit.period_us() / 6)
            && self.left > 0
            && room < self.left + held_by_others;
        (self.first_number == 0 && (ends_soon || self.left > most || is_outdated)).then_some(wanted)
    }

    /// Time at which a region tells what it used and gives back what it does not need: the first after the last request.
    pub fn last_look_at(&self) -> Time {
        let before = |end: Time| Time::from_micros(end.as_micros().saturating_sub(LAST_REQUEST_LEAD_US));
        let in_window = before(self.answer.window_end);
        if in_window > self.opened_at { in_window } else { before(self.until).max(self.opened_at) }
    }

    /// The request that the global Redis gets, for a pool whose request is open.
    pub fn hold_request(&self, limit: &Limit) -> HoldRequest {
        // What was used and is not in this request stays held until it is in one.
        let wanted = self.hits_wanted(limit).max(self.left).saturating_add(self.untold);
        let wanted = match limit.holds_take_capacity() {
            true => HeldAmount { hits: 0, capacity: wanted },
            false => HeldAmount { hits: wanted, capacity: 0 },
        };
        HoldRequest {
            used: self.told,
            number: self.number,
            repeats: self.first_number,
            wanted,
            lasts_us: hold_length_us(limit),
            demand: self.hits_asked_for_in(limit.period_us()),
        }
    }

    /// The grant of an answer to [`Self::hold_request`], whose next request comes after `pause_us`.
    ///
    /// All times count from when the request was opened, which was before the global Redis answered, and are shorter by
    /// a thousandth: clocks drift by 500 ppm at most.
    pub fn grant_of(&self, limit: &Limit, answer: &HoldAnswer, pause_us: u64) -> PoolGrant {
        let after = |at: Time| self.opened_at.plus_us(shorten_us(at.since_us(answer.now)));
        let amount = |held: HeldAmount| if limit.holds_take_capacity() { held.capacity } else { held.hits };
        let held = amount(answer.granted);
        let others = answer.others.iter();
        let mut wants: Vec<u64> = others.clone().map(|other| other.demand).collect();
        wants.push(self.hits_asked_for_in(limit.period_us()));
        let whole = u64::from(limit.without_region_parts().requests_per_unit());
        let level = FillLevel::fill(whole, &mut wants, 0).level.min(MAX_COUNT);
        PoolGrant {
            number: self.number,
            held,
            until: after(answer.until),
            low: self.hits_asked_for_in(LOOKAHEAD_US).min(held / 2).max(1),
            next_request_at: self.opened_at.plus_us(pause_us),
            answer: LastAnswer {
                room: amount(answer.room).min(MAX_COUNT),
                level,
                others: others.clone().map(|other| other.demand.min(level)).fold(0, u64::saturating_add).min(MAX_COUNT),
                held_by_others: others.map(|other| amount(other.held)).fold(0, u64::saturating_add).min(MAX_COUNT),
                window_end: answer.window_end.map_or(Time::default(), after),
            },
        }
    }
}

/// Length of a hold that a region asks for, in microseconds: of windows until the window is over, of a bucket a
/// twentieth of the period within 2 to 30 s.
pub fn hold_length_us(limit: &Limit) -> u64 {
    match limit.holds_take_capacity() {
        true => (limit.period_us() / 20).clamp(WINDOW_HOLD_US, 15 * WINDOW_HOLD_US),
        false => WINDOW_HOLD_US,
    }
}

/// Time between two requests of a pool, in microseconds: a second, or a thirtieth of a shorter sliding window and a
/// twentieth of another short period, because what becomes free between two requests lies idle.
pub fn request_interval_us(limit: &Limit) -> u64 {
    let divisor = if limit.algorithm() == Algorithm::SlidingWindowCounter { 30 } else { 20 };
    (limit.period_us() / divisor).clamp(MIN_REQUEST_INTERVAL_US / 4, MIN_REQUEST_INTERVAL_US)
}

/// Longest time between two looks at a pool, whether it has more than it needs, in microseconds.
pub fn look_interval_us(limit: &Limit) -> u64 {
    (limit.period_us() / 20).clamp(500_000, 5_000_000)
}

/// Time after which demand counts by half, in microseconds.
fn demand_span_us(limit: &Limit) -> u64 {
    (limit.period_us() / 5).clamp(2_000_000, 4_000_000)
}

/// Returns a thousandth less of a time.
const fn shorten_us(us: u64) -> u64 {
    us - us.div_ceil(1000)
}

/// State of a region's counter: its part, and its pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterWithPool {
    /// State of the part, under [`Limit::region_part`].
    pub part: State,
    /// The pool.
    pub pool: RegionPool,
    /// Hits that charges on this value took from the pool, and from the part; not stored.
    pub taken: TakenHits,
}

/// Hits that a region admitted, by what they were taken from; refunded hits do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenHits {
    /// Hits of the pool.
    pub pool: u64,
    /// Hits of the region's part.
    pub part: u64,
}

/// Hits of a charge, by what they are taken from.
struct Split {
    of_pool: u64,
    /// Request to the part; `None` if the pool has all hits.
    of_part: Option<ChargeRequest>,
    fits: bool,
}

impl CounterWithPool {
    /// A counter without hits.
    pub fn empty(limit: &Limit) -> Self {
        let part = State::empty(limit.counting_method());
        Self { part, pool: RegionPool::default(), taken: TakenHits::default() }
    }

    /// Splits hits: the part has them, or else the pool what is left there and the part the rest.
    fn split(&self, part_limit: &Limit, pool: &RegionPool, now: Time, request: ChargeRequest) -> Split {
        if matches!(request.hits, Hits::Refund(_)) || self.part.admits(part_limit, now, request) {
            return Split { of_pool: 0, of_part: Some(request), fits: true };
        }
        let of_pool = pool.left.min(request.required_hits());
        let rest = request.required_hits() - of_pool;
        if rest == 0 {
            return Split { of_pool, of_part: None, fits: of_pool > 0 };
        }
        let own = ChargeRequest { hits: Hits::Charge(rest), ..request };
        Split { of_pool, of_part: Some(own), fits: of_pool > 0 && self.part.admits(part_limit, now, own) }
    }

    /// Returns `true` if [`Self::charge`] would admit the hits; changes nothing.
    pub fn admits(&self, limit: &Limit, now: Time, request: ChargeRequest) -> bool {
        self.split(&limit.region_part(), &self.pool.at(limit, now), now, request).fits
    }

    /// Applies a request.
    pub fn charge(&mut self, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
        let part_limit = limit.region_part();
        let mut pool = self.pool.at(limit, now);
        let before = pool.used(limit) + self.part.clone().charge(&part_limit, now, PEEK).before;
        let Split { of_pool, of_part, fits } = self.split(&part_limit, &pool, now, request);
        let mut retry_after_us = None;
        match request.hits {
            Hits::Peek => {}
            Hits::Refund(hits) => {
                let back = hits.min(pool.untold.saturating_sub(request.lent));
                pool.untold -= back;
                if pool.last < pool.until {
                    pool.left += back;
                }
                if hits > back {
                    let rest = ChargeRequest { hits: Hits::Refund(hits - back), ..request };
                    self.part.charge(&part_limit, now, rest);
                }
            }
            Hits::Charge(_) if fits && request.rejected_elsewhere => {}
            Hits::Charge(hits) => {
                let asked_of_pool = if fits { of_pool } else { hits };
                pool.demand = pool.demand.saturating_add(asked_of_pool).min(MAX_COUNT);
                if fits {
                    pool.left -= of_pool;
                    pool.untold = pool.untold.saturating_add(of_pool).min(MAX_COUNT);
                    self.taken.pool += of_pool;
                    if let Some(own) = of_part {
                        self.taken.part += own.required_hits();
                        self.part.charge(&part_limit, now, own);
                    }
                } else {
                    pool.lacking = pool.lacking.max(hits.min(MAX_COUNT));
                }
                if asked_of_pool > 0 && pool.left <= pool.low {
                    pool.open_if_due();
                }
            }
        }
        let of_part_now = self.part.clone().charge(&part_limit, now, PEEK);
        if !fits {
            let most = u64::from(limit.without_region_parts().capacity()) + u64::from(part_limit.capacity());
            let of_part = of_part.and_then(|own| self.part.clone().charge(&part_limit, now, own).retry_after_us);
            let of_pool = (request.required_hits() <= most).then(|| pool.retry_after_us(limit));
            retry_after_us = [of_part, of_pool].into_iter().flatten().min();
        }
        if request.hits != Hits::Peek {
            self.pool = pool;
        }
        let until_window_end_us = pool.answer.window_end.since_us(pool.last);
        ChargeResult {
            admitted: fits,
            before,
            after: pool.used(limit) + of_part_now.before,
            remaining: clamp_to_u32(pool.left + u64::from(of_part_now.remaining)).min(limit.capacity()),
            reset_us: of_part_now.reset_us.max(until_window_end_us),
            retry_after_us,
            ..ChargeResult::default()
        }
    }
}

/// Request that changes nothing.
const PEEK: ChargeRequest = ChargeRequest::new(Hits::Peek, 0);
