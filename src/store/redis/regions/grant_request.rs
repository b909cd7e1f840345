//! Grant request that a charge opened on a region's counter.

use bytes::Bytes;

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::Algorithm;
use crate::limit::algorithm::global_clock::GlobalClock;
use crate::limit::algorithm::global_window::WindowPool;
use crate::limit::algorithm::region_bucket::RegionBucketCounts;
use crate::limit::algorithm::region_window::RegionWindowCounts;
use crate::limit::algorithm::state::State;

/// Grant request that a charge opened.
#[derive(Clone, Debug)]
pub(crate) struct GrantRequest {
    /// Key of the region's counter.
    pub(crate) key: Bytes,
    pub(crate) limit: Limit,
    /// State of the counter after the charge.
    pub(crate) counts: RegionCounts,
    pub(crate) clock: GlobalClock,
    /// Time of the charge, by the region's Redis.
    pub(crate) now: Time,
}

/// State of a region's counter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RegionCounts {
    /// Of windows.
    Window(RegionWindowCounts),
    /// Of a token bucket.
    Bucket(RegionBucketCounts),
}

impl RegionCounts {
    /// Returns the state of a counter that a region counts; `None` of another one.
    pub(crate) fn of(state: &State) -> Option<(Self, GlobalClock)> {
        match state {
            State::RegionWindow(state) => Some((Self::Window(*state.counts), *state.clock)),
            State::RegionBucket(state) => Some((Self::Bucket(*state.counts), *state.clock)),
            _ => None,
        }
    }
}

impl GrantRequest {
    /// Global time of the request in microseconds: the middle of the interval that contains it.
    pub(super) fn global_us(&self) -> u64 {
        let offset = self.clock.offset_lo / 2 + self.clock.offset_hi / 2;
        self.now.as_micros().saturating_add_signed(offset)
    }
}

/// Returns the counter of a limit in the global Redis.
pub(super) const fn pool(limit: &Limit) -> WindowPool {
    WindowPool {
        period_us: limit.period_us(),
        is_sliding: matches!(limit.algorithm(), Algorithm::SlidingWindowCounter),
        max: limit.max_granted(),
    }
}
