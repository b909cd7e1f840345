//! Knowledge of a process about the clocks of two Redis, at one call: that of its region and the global one.
//!
//! A process measures both clocks and cannot know either exactly, so the difference is an interval. It holds while the
//! region's clock runs within the bounds that the process expects. A call that runs at another time (a clock jumped, or
//! another server answers) knows nothing about global time.

use crate::base::clock::Time;

/// Clock of the global Redis, as a call on a region's Redis knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalClock {
    /// Time of the region's Redis from which the offset holds.
    pub valid_from: Time,
    /// Time of the region's Redis until which the offset holds, exclusive; 0: the clock is unknown.
    pub valid_until: Time,
    /// Lower bound on global time minus the time of the region's Redis, in microseconds.
    pub offset_lo: i64,
    /// Upper bound on it, in microseconds.
    pub offset_hi: i64,
    /// The process reaches the global Redis, so the call may open a grant request.
    pub can_request: bool,
    /// The region is cut off from the global Redis: the loss allowance applies.
    pub cut_off: bool,
    /// The reserve and the loss allowance of the region must not be used: regions disagree about their parts.
    pub parts_unusable: bool,
}

/// Interval that contains global time, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GlobalTime {
    pub(super) lo: u64,
    pub(super) hi: u64,
}

impl GlobalClock {
    /// Clock of a process that has measured nothing.
    pub const UNKNOWN: Self = Self {
        valid_from: Time::from_micros(0),
        valid_until: Time::from_micros(0),
        offset_lo: 0,
        offset_hi: 0,
        can_request: false,
        cut_off: false,
        parts_unusable: false,
    };

    /// Returns global time at `now` of the region's Redis; `None` if it is unknown.
    pub(super) fn at(&self, now: Time) -> Option<GlobalTime> {
        if now < self.valid_from || now >= self.valid_until {
            return None;
        }
        let lo = now.as_micros().checked_add_signed(self.offset_lo)?;
        let hi = now.as_micros().checked_add_signed(self.offset_hi)?;
        (lo <= hi).then_some(GlobalTime { lo, hi })
    }
}

impl Default for GlobalClock {
    fn default() -> Self {
        Self::UNKNOWN
    }
}
