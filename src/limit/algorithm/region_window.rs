//! region_window: hits of a window that a region was granted, and those that it always has.
//!
//! A global fixed_window or sliding_window_counter is counted by this state in the Redis of each region. Windows are
//! numbered by global time: window(g) = floor(g / period). Global time is known as an interval, so a hit may lie in
//! either of two adjacent windows; it must then fit both. In each window a region may spend the hits that the global
//! Redis granted to it, then its reserve. Grants end with their window. If global time is unknown, nothing of this is
//! spent, and a refund returns nothing. What else a region's counter does: see [`super::region`].
//!
//! Numbers are whole hits, so nothing is rounded.
//!
//! Decides: what a region admits of a window while global time is unknown: only the cut-off allowance.
//! Decides: Retry-After while a grant may come, and after.

use super::region::{
    self, GrantCycle, MIN_GRANT_REQUEST_INTERVAL_US, RegionCall, RegionCounter, RegionHitsByAllotment, RegionState,
    StoredRegionCounts,
};
use super::stored_state::{MalformedReply, ReplyReader};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, MAX_COUNT};

/// State of the counter.
pub type State = RegionState<WindowCounts>;

/// Counts of a window, and the grant cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowCounts {
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
    /// Grant request, last reset and cut-off use.
    pub cycle: GrantCycle,
}

/// Answer of the global Redis to a grant request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HitsGrant {
    /// Identity of the request: the time of the region's Redis at which it was opened.
    pub request: u64,
    /// Window in which the hits may be spent.
    pub window: u64,
    /// Epoch of the global counter.
    pub epoch: u64,
    /// Number of hits; 0 if none were free.
    pub hits: u64,
    /// A charge that leaves at most this many hits opens the next request.
    pub low: u64,
    /// True if the global Redis has nothing left for this window.
    pub exhausted: bool,
    /// Time of the region's Redis before which the next request is not opened.
    pub next_request_at: Time,
}

impl WindowCounts {
    /// Begins another window: nothing is granted yet, and a reserve used for the next window is used in this one.
    fn begin_window(&mut self, window: u64) {
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
            cycle: GrantCycle { exhausted: false, ..self.cycle },
        };
    }

    /// Adds the hits of a grant; false if it does not answer the open request, or its window is over.
    pub fn accept_grant(&mut self, grant: &HitsGrant) -> bool {
        if !self.cycle.is_open_request(grant.request) {
            return false;
        }
        // The global Redis has seen that the next window began.
        if grant.window == self.window + 1 {
            self.begin_window(grant.window);
        }
        if grant.window != self.window {
            return false;
        }
        if grant.epoch > self.cycle.epoch {
            (self.granted, self.granted_total, self.reserve_used, self.next_reserve_used) = (0, 0, 0, 0);
            self.cycle.epoch = grant.epoch;
        }
        self.granted += grant.hits;
        self.granted_total += grant.hits;
        self.low = grant.low;
        self.cycle.close_request(grant.exhausted, grant.next_request_at);
        true
    }

    /// Removes the granted hits of a window that are left, and returns them; 0 in another window.
    pub fn take_unused_hits(&mut self, window: u64) -> u64 {
        if window != self.window {
            return 0;
        }
        let unused = std::mem::take(&mut self.granted);
        self.granted_total -= unused.min(self.granted_total);
        unused
    }
}

impl StoredRegionCounts for WindowCounts {
    fn read_from_reply(reply: &mut ReplyReader<'_>) -> Result<Self, MalformedReply> {
        Ok(Self {
            window: reply.read_number()?,
            granted: reply.read_number()?,
            reserve_used: reply.read_number()?,
            requested: reply.read_number()?,
            low: reply.read_number()?,
            granted_total: reply.read_number()?,
            next_reserve_used: reply.read_number()?,
            previous_requested: reply.read_number()?,
            cycle: GrantCycle::read_from_reply(reply)?,
        })
    }
}

impl State {
    /// Returns the time in microseconds until the window of a charge at `now` may end; 0 if that window is not surely
    /// known, or the region is cut off.
    pub(super) fn grant_time_left_us(&self, limit: &Limit, now: Time) -> u64 {
        let RegionWindow { call, counts, .. } = RegionWindow::at_request_time(limit, self, now);
        let Some(global) = call.global.filter(|_| !call.view.cut_off) else { return 0 };
        (counts.window + 1).saturating_mul(call.period_us).saturating_sub(global.hi)
    }

    /// Returns the hits used at `now`.
    pub(super) fn region_hits_by_allotment(&self, limit: &Limit, now: Time) -> RegionHitsByAllotment {
        let RegionWindow { call, counts, .. } = RegionWindow::at_request_time(limit, self, now);
        RegionHitsByAllotment {
            grant: counts.granted_total.saturating_sub(counts.granted),
            reserve: counts.reserve_used,
            cut_off_allowance: call.cut_off.used,
        }
    }
}

/// Applies a request to the counts.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    region::charge::<RegionWindow>(limit, state, now, request)
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    region::admits::<RegionWindow>(limit, state, now, request)
}

/// Counts of a window at the time of a request. Global time is that of the call if it is known to lie in the window of
/// the counts or in the next one.
#[derive(Clone, Copy)]
struct RegionWindow {
    call: RegionCall,
    counts: WindowCounts,
    reserve: u64,
    /// True if the hit may lie in the next window.
    spans_two: bool,
}

impl RegionCounter for RegionWindow {
    type Counts = WindowCounts;

    fn at_request_time(limit: &Limit, state: &State, now: Time) -> Self {
        let mut call = RegionCall::new(limit, *state.view, state.counts.cycle.cut_off, now);
        let (mut counts, period_us, mut spans_two) = (*state.counts, call.period_us, false);
        call.global = call.global.filter(|global| {
            let last = global.hi / period_us;
            // Counts of a window further ahead come from a clock that was wrong.
            let first = match counts.window {
                ahead if ahead > last + 1 => global.lo / period_us,
                current => current.max(global.lo / period_us),
            };
            let is_known = first <= last && last <= first + 1;
            if is_known {
                if first != counts.window {
                    counts.begin_window(first);
                }
                counts.cycle.set_epoch_if_none(*global);
                spans_two = last > first;
            }
            is_known
        });
        Self { call, counts, reserve: call.usable_own_part(limit.region_reserve()), spans_two }
    }

    fn region_call(&self) -> &RegionCall {
        &self.call
    }

    fn stored_counts(&self) -> WindowCounts {
        self.counts
    }

    fn call_and_grant_cycle_mut(&mut self) -> (&mut RegionCall, &mut GrantCycle) {
        (&mut self.call, &mut self.counts.cycle)
    }

    fn usable_hits(&self) -> Option<u64> {
        self.call.global?;
        let next_left = self.reserve.saturating_sub(self.counts.next_reserve_used);
        Some(if self.spans_two { self.unused_hits_in_window().min(next_left) } else { self.unused_hits_in_window() })
    }

    fn used(&self) -> u64 {
        self.counts.granted_total.saturating_sub(self.counts.granted) + self.counts.reserve_used
    }

    fn count_demand(&mut self, hits: u64) {
        self.counts.requested = self.counts.requested.saturating_add(hits).min(MAX_COUNT);
    }

    fn spend(&mut self, hits: u64) {
        let granted = hits.min(self.counts.granted);
        self.counts.granted -= granted;
        self.counts.reserve_used += hits - granted;
        if self.spans_two {
            self.counts.next_reserve_used += hits;
        }
    }

    fn refund(&mut self, hits: u64, lent: u64) {
        if self.call.global.is_none() {
            return;
        }
        let hits = hits.min(self.used().saturating_sub(lent));
        let counts = &mut self.counts;
        let reserve = hits.min(counts.reserve_used);
        counts.reserve_used -= reserve;
        counts.granted = (counts.granted + hits - reserve).min(counts.granted_total).max(counts.granted);
    }

    fn needs_grant(&self) -> bool {
        self.unused_hits_in_window() <= if self.counts.granted_total == 0 { self.reserve / 2 } else { self.counts.low }
    }

    fn until_replenished_us(&self) -> u64 {
        self.until_window_ends_us().unwrap_or(0)
    }

    fn retry_after_us(&self, limit: &Limit, request: ChargeRequest) -> Option<u64> {
        let hits = request.required_hits();
        if hits > u64::from(limit.requests_per_unit()) {
            return None;
        }
        let (cut_off, exhausted) = (self.call.view.cut_off, self.counts.cycle.exhausted);
        // A tumbling period without any hit used cannot be waited for.
        let allowance_ends_us =
            (hits <= self.call.allowance).then(|| self.call.until_allowance_ends_us()).filter(|ends_us| *ends_us > 0);
        let wait_us = match self.until_window_ends_us() {
            Some(ends_us) if cut_off => allowance_ends_us.map_or(ends_us, |allowance_us| allowance_us.min(ends_us)),
            Some(ends_us) if exhausted => ends_us,
            Some(ends_us) => ends_us.min(MIN_GRANT_REQUEST_INTERVAL_US),
            None if cut_off => allowance_ends_us.unwrap_or(MIN_GRANT_REQUEST_INTERVAL_US),
            None => allowance_ends_us
                .map_or(MIN_GRANT_REQUEST_INTERVAL_US, |ends_us| ends_us.min(MIN_GRANT_REQUEST_INTERVAL_US)),
        };
        Some(wait_us.max(1))
    }
}

impl RegionWindow {
    /// Hits left of the grants and the reserve, in the window of the counts.
    const fn unused_hits_in_window(&self) -> u64 {
        self.counts.granted + self.reserve.saturating_sub(self.counts.reserve_used)
    }

    /// Microseconds until the last window that the request may lie in ends; `None` if global time is unknown.
    fn until_window_ends_us(&self) -> Option<u64> {
        let global = self.call.global?;
        let windows = self.counts.window + 1 + u64::from(self.spans_two);
        Some(windows * self.call.period_us - global.lo)
    }
}
