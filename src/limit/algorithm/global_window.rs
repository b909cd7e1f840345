//! Grants of a window's hits to regions: the count that the global Redis keeps of a global fixed_window or
//! sliding_window_counter.
//!
//! window(now) = floor(now / period). A grant is a charge of as many hits as are wanted, at most a quarter of what is
//! free or a small rest as a whole, so that several regions come to an even end. The algorithm admits it, under the
//! limit less the reserves of all regions:
//!
//! - fixed_window: count + hits <= max
//! - sliding_window_counter: current + floor(previous x (period - elapsed) / period) + hits <= max
//!
//! A region spends a grant only while global time lies in the grant's window, so each hit is admitted in the window
//! that counts it. There the weight of the previous window only falls. What a region returns before the window ends is
//! free again.
//!
//! Decides: how many hits of a window the global Redis grants to a region.
//! Decides: the part kept back for regions that never reported.

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::Algorithm;
use crate::limit::charge::clamp_to_u32;

/// A request gets at most the free hits divided by this number, rounded up.
const GRANT_DIVISOR: u64 = 4;
/// A request may get as much as the limit divided by this number, rounded up, if as many hits are free.
const UNDIVIDED_GRANT_DIVISOR: u64 = 32;
/// A request may get as much as is granted evenly in this time, in microseconds, if that is more.
const UNDIVIDED_GRANT_TIME_US: u64 = 1_500_000;

/// Granted hits of two adjacent windows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Number of the window.
    pub window: u64,
    /// Hits granted in it, less those returned.
    pub current: u64,
    /// Hits of the window before it.
    pub previous: u64,
    /// Time of the last reset; 0: none is known.
    pub epoch: Time,
}

/// Parameters of a window's counter in the global Redis, as the region's rules give them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalWindowParameters {
    /// Length of a window in microseconds.
    pub period_us: u64,
    /// The previous window counts too: sliding_window_counter.
    pub is_sliding: bool,
    /// Hits that all regions together may be granted: the limit less the reserves.
    pub max: u32,
}

impl GlobalWindowParameters {
    /// Returns the parameters of a limit's counter in the global Redis.
    pub const fn from_limit(limit: &Limit) -> Self {
        Self {
            period_us: limit.period_us(),
            is_sliding: matches!(limit.algorithm(), Algorithm::SlidingWindowCounter),
            max: limit.max_granted_hits(),
        }
    }

    /// Returns the part of the hits that `reported` of `listed` regions may be granted, rounded down.
    #[must_use]
    pub fn scaled_to_reported_regions(self, reported: u32, listed: u32) -> Self {
        Self { max: part_for_reported_regions(self.max, reported, listed), ..self }
    }
}

/// Hits granted to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowGrant {
    /// Window in which the hits may be spent.
    pub window: u64,
    /// Number of hits; 0 if none are free.
    pub hits: u32,
    /// Hits that stay free.
    pub free: u32,
}

/// Granted hits that a region has not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReturnedHits {
    /// Window of the grants.
    pub window: u64,
    /// Number of hits.
    pub hits: u64,
    /// Epoch of the grants.
    pub epoch: Time,
}

impl State {
    /// Grants at most `wanted` hits of the window that contains `now`.
    pub fn grant(&mut self, now: Time, pool: GlobalWindowParameters, wanted: u32) -> WindowGrant {
        let left_us = self.advance_window(now, pool.period_us);
        let weight = if pool.is_sliding { scale_rounded_down(self.previous, left_us, pool.period_us) } else { 0 };
        let free = u64::from(pool.max).saturating_sub(self.current.saturating_add(weight));
        let max = u64::from(pool.max);
        let small = free
            .min(max.div_ceil(UNDIVIDED_GRANT_DIVISOR).max((max * UNDIVIDED_GRANT_TIME_US).div_ceil(pool.period_us)));
        let hits = free.div_ceil(GRANT_DIVISOR).max(small).min(u64::from(wanted));
        self.current += hits;
        WindowGrant { window: self.window, hits: clamp_to_u32(hits), free: clamp_to_u32(free - hits) }
    }

    /// Takes back unused hits; nothing if their window is over, or if they were granted before a reset, which has
    /// forgotten them. Returns the number of hits.
    pub fn take_back(&mut self, now: Time, pool: GlobalWindowParameters, unused: ReturnedHits) -> u64 {
        self.advance_window(now, pool.period_us);
        let is_counted = unused.window == self.window && unused.epoch >= self.epoch;
        let taken = if is_counted { unused.hits.min(self.current) } else { 0 };
        self.current -= taken;
        taken
    }

    /// Forgets all hits, and starts a new epoch: each region forgets its own when it learns of it.
    pub fn reset(&mut self, now: Time, pool: GlobalWindowParameters) {
        self.advance_window(now, pool.period_us);
        (self.current, self.previous, self.epoch) = (0, 0, self.epoch.max(now));
    }

    /// Moves to the window that contains `now`; returns the microseconds that are left of it. A clock that was set back
    /// stays in the window, and a state two windows ahead comes from a clock that was wrong.
    fn advance_window(&mut self, now: Time, period_us: u64) -> u64 {
        let window = now.as_micros() / period_us;
        if self.window == window + 1 {
            return period_us;
        }
        if window == self.window + 1 {
            (self.previous, self.current) = (self.current, 0);
        } else if window != self.window {
            (self.previous, self.current) = (0, 0);
        }
        self.window = window;
        period_us - now.as_micros() % period_us
    }
}

/// Computes floor(hits x reported / listed), at most `hits`.
pub(super) fn part_for_reported_regions(hits: u32, reported: u32, listed: u32) -> u32 {
    let (part, whole) = (u64::from(reported.min(listed)), u64::from(listed.max(1)));
    clamp_to_u32(scale_rounded_down(u64::from(hits), part, whole))
}

/// Computes floor(count x part / whole).
fn scale_rounded_down(count: u64, part: u64, whole: u64) -> u64 {
    clamp_to_u64(u128::from(count) * u128::from(part) / u128::from(whole))
}

fn clamp_to_u64(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
