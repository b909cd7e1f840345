//! Clock of the global Redis for one call on a region's Redis.
//!
//! Both offsets are intervals relative to this process at the time of the call. If the script runs between sending and
//! deadline, its `now` lies between `valid_from` and `valid_until`, and global time minus that `now` between both
//! offsets: clocks are read rounded down, and the ends of intervals are whole. If it does not run then, because a clock
//! jumped or another server answers, the script sees it by its own clock.
//!
//! All ends are rounded outwards, so that calls of the same moment have the same clock and can share a command.

use crate::base::clock::Time;
use crate::limit::algorithm::global_clock::GlobalClock;
use crate::store::client::redis::server_clock::{InstantRange, OffsetInterval, process_us};

/// Unit of the times between which the offsets hold, in microseconds.
const TIME_GRAIN_US: i64 = 5_000;
/// Unit of the offsets, in microseconds.
const OFFSET_GRAIN_US: i64 = 500;

/// Offsets of both servers' clocks from this process, valid while a call may run.
#[derive(Clone, Copy, Debug)]
pub struct ClockOffsets {
    /// Offset of the region's Redis.
    pub region: OffsetInterval,
    /// Offset of the global Redis.
    pub global: OffsetInterval,
}

/// Returns the clock for a call that is sent and answered `within` a range, also if the region's clock has jumped and
/// still shows a time at which the call may run; unknown if a time would be before 1970.
pub fn global_clock(offsets: ClockOffsets, within: InstantRange) -> GlobalClock {
    let ClockOffsets { region, global } = offsets;
    let time = |us: i64| u64::try_from(us).ok().map(Time::from_micros);
    let valid_from = time(round_down(process_us(within.from).saturating_add(region.lo_us), TIME_GRAIN_US));
    // Exclusive.
    let valid_until = process_us(within.until).saturating_add(region.hi_us).saturating_add(1);
    let valid_until = time(round_up(valid_until, TIME_GRAIN_US));
    let (Some(valid_from), Some(valid_until)) = (valid_from, valid_until) else { return GlobalClock::UNKNOWN };
    // A jump that keeps the time within these bounds is not noticed before the reply.
    let unnoticed_us = i64::try_from(valid_until.since_us(valid_from)).unwrap_or(i64::MAX);
    GlobalClock {
        valid_from,
        valid_until,
        offset_lo: round_down(global.lo_us.saturating_sub(region.hi_us).saturating_sub(unnoticed_us), OFFSET_GRAIN_US),
        offset_hi: round_up(global.hi_us.saturating_sub(region.lo_us).saturating_add(unnoticed_us), OFFSET_GRAIN_US),
        ..GlobalClock::UNKNOWN
    }
}

const fn round_down(us: i64, grain_us: i64) -> i64 {
    us.saturating_sub(us.rem_euclid(grain_us))
}

const fn round_up(us: i64, grain_us: i64) -> i64 {
    us.saturating_add((-us.rem_euclid(grain_us)).rem_euclid(grain_us))
}
