//! region_window: hits of a window that a region was granted, and those that it always has.
//!
//! A global fixed_window or sliding_window_counter is counted by this state in the Redis of each region. Windows are
//! numbered by global time: window(g) = floor(g / period). Global time is known as an interval, so a hit may lie in
//! either of two adjacent windows; it must then fit both. In each window a region may spend the hits that the global
//! Redis granted to it, then its reserve. Grants end with their window.
//!
//! - If global time is unknown, nothing granted is spent: only the loss allowance is, in tumbling periods of the
//!   region's time. A cut-off region uses the allowance once its other hits are used.
//! - A charge that leaves little, or is rejected, opens a *grant request*: the caller that made it asks the global
//!   Redis. At most one is opened each second, whatever the number of callers.
//! - Rejected hits count as demand, so that a request asks for enough.
//! - A refund returns what this region used of this window, and nothing while global time is unknown.
//!
//! Numbers are whole hits, so nothing is rounded.

use super::algorithm_state::AlgorithmState;
use super::global_clock::{GlobalClock, GlobalTime};
use super::loss_allowance::LossPeriod;
use super::region_use::RegionUse;
use super::reply_reader::{MalformedReply, ReplyReader};
use super::share_ratio::ShareRatio;
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, MAX_COUNT, effective_time, to_u32};
use crate::limit::request::Hits;

/// Shortest time between two grant requests, in microseconds.
pub const REQUEST_INTERVAL_US: u64 = 1_000_000;

/// Time after which a grant request without an answer counts as lost, and the next one may be opened, in microseconds.
pub const ANSWER_TIME_US: u64 = 3_000_000;

/// State of the counter, with the clock of the call that charges it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Time of the last charge.
    pub last: Time,
    /// RegionWindowCounts of the window, and the grant request.
    pub counts: Box<RegionWindowCounts>,
    /// Global clock of the call; not stored.
    pub clock: Box<GlobalClock>,
}

/// RegionWindowCounts of a window, and the grant request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionWindowCounts {
    /// Number of the window.
    pub window: u64,
    /// Granted hits that are left.
    pub granted: u64,
    /// Hits granted for this window.
    pub granted_total: u64,
    /// Hits of the reserve used in this window.
    pub reserve_used: u64,
    /// Hits of the reserve used in the next window, by hits that may lie in it.
    pub next_reserve_used: u64,
    /// Hits that callers asked for in this window, admitted or not.
    pub requested: u64,
    /// Hits that callers asked for in the previous window.
    pub previous_requested: u64,
    /// A charge that leaves at most this many hits opens a grant request; half of the reserve if nothing is granted.
    pub low: u64,
    /// True if the global Redis has nothing left for this window.
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

impl RegionWindowCounts {
    /// Begins another window: nothing is granted yet, and a reserve used for the next window is used in this one.
    pub(super) fn begin(&mut self, window: u64) {
        let is_next = window == self.window + 1;
        *self = Self {
            window,
            granted: 0,
            granted_total: 0,
            reserve_used: if is_next { self.next_reserve_used } else { 0 },
            next_reserve_used: 0,
            requested: 0,
            previous_requested: if is_next { self.requested } else { 0 },
            low: 0,
            exhausted: false,
            ..*self
        };
    }
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
        let counts = RegionWindowCounts {
            window: reply.number()?,
            granted: reply.number()?,
            reserve_used: reply.number()?,
            requested: reply.number()?,
            low: reply.number()?,
            granted_total: reply.number()?,
            next_reserve_used: reply.number()?,
            previous_requested: reply.number()?,
            exhausted: reply.number()? != 0,
            open_request: reply.number()?,
            next_request_at: reply.time()?,
            epoch: reply.number()?,
            loss: LossPeriod { start: reply.time()?, used: reply.number()? },
        };
        Ok(Self { last, counts: Box::new(counts), clock: Box::default() })
    }

    /// The fallback counters never hold hits that a region was granted.
    fn scaled(&self, _ratio: ShareRatio, _limit: &Limit, _now: Time) -> Self {
        self.clone()
    }
}

impl State {
    /// Returns the time in microseconds until the window of a charge at `now` may end; 0 if that window is not surely
    /// known, or the region is cut off.
    pub(super) fn grant_left_us(&self, limit: &Limit, now: Time) -> u64 {
        let window = RegionWindow::at(limit, self, now);
        let Some(global) = window.global.filter(|_| !window.clock.cut_off) else { return 0 };
        (window.counts.window + 1).saturating_mul(window.period_us).saturating_sub(global.hi)
    }
}

/// Applies a request to the counts.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let mut window = RegionWindow::at(limit, state, now);
    let before = window.used();
    let source = window.source(request);
    match request.hits {
        Hits::Peek => {}
        Hits::Refund(hits) => window.refund(hits, request.lent),
        Hits::Charge(_) if source.is_some() && request.rejected_elsewhere => {}
        Hits::Charge(hits) => window.charge(hits, source),
    }
    if request.hits != Hits::Peek {
        state.last = effective_time(now, state.last, limit.period_us()).map_or(now, |time| time.at);
        *state.counts = window.counts;
    }
    ChargeResult {
        admitted: source.is_some(),
        before,
        after: window.used(),
        remaining: to_u32(window.remaining()).min(limit.requests_per_unit()),
        reset_us: window.reset_us(),
        retry_after_us: if source.is_some() { None } else { window.retry_after_us(limit, request) },
        delay_us: 0,
    }
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    RegionWindow::at(limit, state, now).source(request).is_some()
}

/// Returns the hits used at `now`.
pub(super) fn region_use(limit: &Limit, state: &State, now: Time) -> RegionUse {
    RegionWindow::at(limit, state, now).used_by_source()
}

/// Hits that a charge is admitted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HitSource {
    /// Grants and the reserve.
    Window,
    /// The loss allowance.
    Loss,
}

/// RegionWindowCounts at the time of a request.
#[derive(Clone, Copy)]
struct RegionWindow {
    counts: RegionWindowCounts,
    now: Time,
    period_us: u64,
    clock: GlobalClock,
    reserve: u64,
    allowance: u64,
    /// Global time, if it is known to lie in the window of the counts or in the next one.
    global: Option<GlobalTime>,
    /// True if the hit may lie in the next window.
    spans_two: bool,
    /// Use of the loss allowance at the time of the request.
    loss: LossPeriod,
}

impl RegionWindow {
    fn at(limit: &Limit, state: &State, now: Time) -> Self {
        let (period_us, clock) = (limit.period_us(), *state.clock);
        let is_usable = !clock.parts_unusable;
        let mut window = Self {
            counts: *state.counts,
            now,
            period_us,
            clock,
            reserve: if is_usable { u64::from(limit.region_reserve()) } else { 0 },
            allowance: if is_usable { limit.loss_allowance() } else { 0 },
            global: None,
            spans_two: false,
            loss: state.counts.loss.at(now, period_us),
        };
        if let Some(global) = clock.at(now) {
            let last = global.hi / period_us;
            // RegionWindowCounts of a window further ahead come from a clock that was wrong.
            let first = match window.counts.window {
                ahead if ahead > last + 1 => global.lo / period_us,
                current => current.max(global.lo / period_us),
            };
            if first <= last && last <= first + 1 {
                if first != window.counts.window {
                    window.counts.begin(first);
                }
                // An older reset of the limit does not concern this counter.
                if window.counts.epoch == 0 {
                    window.counts.epoch = global.hi;
                }
                window.global = Some(global);
                window.spans_two = last > first;
            }
        }
        window
    }

    /// Hits left of the grants and the reserve, in the window of the counts.
    const fn left(&self) -> u64 {
        self.counts.granted + self.reserve.saturating_sub(self.counts.reserve_used)
    }

    /// Hits that grants and the reserve would admit at once.
    fn room(&self) -> u64 {
        match (self.global, self.spans_two) {
            (None, _) => 0,
            (Some(_), false) => self.left(),
            (Some(_), true) => self.left().min(self.reserve.saturating_sub(self.counts.next_reserve_used)),
        }
    }

    const fn may_use_allowance(&self) -> bool {
        self.global.is_none() || self.clock.cut_off
    }

    /// Returns the hits that the request is admitted from; `None` if it is rejected.
    fn source(&self, request: ChargeRequest) -> Option<HitSource> {
        let hits = request.required_hits();
        if let Hits::Refund(_) = request.hits {
            Some(HitSource::Window)
        } else if self.global.is_some() && hits <= self.room() {
            Some(HitSource::Window)
        } else if self.may_use_allowance() && self.loss.fits(self.allowance, request) {
            Some(HitSource::Loss)
        } else {
            None
        }
    }

    /// RegionWindowCounts the demand of a charge, spends its hits, and opens a grant request if one is due.
    fn charge(&mut self, hits: u64, source: Option<HitSource>) {
        self.counts.requested = self.counts.requested.saturating_add(hits).min(MAX_COUNT);
        match source {
            Some(HitSource::Window) => {
                let granted = hits.min(self.counts.granted);
                self.counts.granted -= granted;
                self.counts.reserve_used += hits - granted;
                if self.spans_two {
                    self.counts.next_reserve_used += hits;
                }
            }
            Some(HitSource::Loss) => {
                self.loss.used += hits;
                self.counts.loss = self.loss;
            }
            None => {}
        }
        let low = if self.counts.granted_total == 0 { self.reserve / 2 } else { self.counts.low };
        let is_low = source != Some(HitSource::Window) || self.left() <= low;
        if self.clock.can_request && self.global.is_some() && is_low && self.may_request() {
            self.counts.open_request = self.now.as_micros();
            self.counts.next_request_at = self.now.plus_us(ANSWER_TIME_US);
        }
    }

    /// Returns true if the next request is due, or its time comes from a clock that was wrong.
    fn may_request(&self) -> bool {
        let next = self.counts.next_request_at;
        next <= self.now || next > self.now.plus_us(self.period_us.max(ANSWER_TIME_US))
    }

    /// Returns hits, but leaves those charged that replicas may still admit.
    fn refund(&mut self, hits: u64, lent: u64) {
        if self.global.is_none() {
            return;
        }
        let counts = &mut self.counts;
        let used = counts.granted_total.saturating_sub(counts.granted) + counts.reserve_used;
        let hits = hits.min(used.saturating_sub(lent));
        let reserve = hits.min(counts.reserve_used);
        counts.reserve_used -= reserve;
        counts.granted = (counts.granted + hits - reserve).min(counts.granted_total).max(counts.granted);
    }

    const fn used_by_source(&self) -> RegionUse {
        RegionUse {
            grant: self.counts.granted_total.saturating_sub(self.counts.granted),
            reserve: self.counts.reserve_used,
            loss_allowance: self.loss.used,
        }
    }

    const fn used(&self) -> u64 {
        let RegionUse { grant, reserve, loss_allowance } = self.used_by_source();
        grant + reserve + loss_allowance
    }

    fn remaining(&self) -> u64 {
        let allowance = if self.may_use_allowance() { self.loss.left(self.allowance) } else { 0 };
        self.room().max(allowance)
    }

    /// Microseconds until the last window that the request may lie in ends; `None` if global time is unknown.
    fn window_ends_us(&self) -> Option<u64> {
        let global = self.global?;
        let windows = self.counts.window + 1 + u64::from(self.spans_two);
        Some(windows * self.period_us - global.lo)
    }

    /// Microseconds until the tumbling period of the loss allowance ends; 0 if nothing of it is used.
    fn loss_ends_us(&self) -> u64 {
        if self.loss.used == 0 { 0 } else { self.loss.ends_us(self.now, self.period_us) }
    }

    fn reset_us(&self) -> u64 {
        self.window_ends_us().unwrap_or(0).max(self.loss_ends_us())
    }

    /// Microseconds until a rejected request may pass; `None` if it never will.
    fn retry_after_us(&self, limit: &Limit, request: ChargeRequest) -> Option<u64> {
        let hits = request.required_hits();
        if hits > u64::from(limit.requests_per_unit()) {
            return None;
        }
        // A loss period without any hit used cannot be waited for.
        let loss_ends_us = (hits <= self.allowance).then(|| self.loss_ends_us()).filter(|ends_us| *ends_us > 0);
        let wait_us = match self.window_ends_us() {
            Some(ends_us) if self.clock.cut_off => loss_ends_us.map_or(ends_us, |loss_us| loss_us.min(ends_us)),
            Some(ends_us) if self.counts.exhausted => ends_us,
            Some(ends_us) => ends_us.min(REQUEST_INTERVAL_US),
            None if self.clock.cut_off => loss_ends_us.unwrap_or(REQUEST_INTERVAL_US),
            None => loss_ends_us.map_or(REQUEST_INTERVAL_US, |loss_us| loss_us.min(REQUEST_INTERVAL_US)),
        };
        Some(wait_us.max(1))
    }
}
