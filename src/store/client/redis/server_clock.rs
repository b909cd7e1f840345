//! Offset of a server's clock from the monotonic clock of this process.
//!
//! Each reading of the clock tells an interval: the server read it between sending and answer. A [`ServerClock`]
//! intersects these intervals, and widens its own with time, because clocks drift by up to 500 ppm each. The true
//! offset always lies inside. If a reading contradicts the interval, a clock jumped: that of the server, or that of
//! this process, which stops while its machine is suspended. So all clocks that are compared start over, with readings
//! sent after the jump was noticed. A jump shorter than the interval cannot be noticed. Earlier intervals are still
//! compared with the first reading, so that a jump of one clock hides none of another.
//!
//! Reading takes no lock and allocates nothing. Most readings change nothing worth keeping, and are dropped.
//!
//! Decides: when the clock of a Redis has jumped; how exactly its offset is known.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use tokio::time::Instant;

use crate::base::clock::{Time, to_micros};

/// Process time in which two clocks may move apart by 1: each drifts by up to 500 ppm, (1 + 0.0005) / (1 - 0.0005).
const US_PER_DRIFT_US: u64 = 999;
/// Age from which a reading replaces the interval although it is hardly narrower.
const REFRESH_AGE_US: i64 = 100_000;
/// Largest time of a server that is believed, as in scripts.
const MAX_SERVER_TIME_US: u64 = 1 << 53;

/// Converts an instant to process time: microseconds since a fixed instant of this process; negative before it.
pub fn process_time_us(at: Instant) -> i64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    let origin = *ORIGIN.get_or_init(|| at);
    let signed = |duration| i64::try_from(to_micros(duration)).unwrap_or(i64::MAX);
    match at.checked_duration_since(origin) {
        Some(after) => signed(after),
        // Rounded down, as times after the origin are.
        None => -signed(origin.saturating_duration_since(at)) - 1,
    }
}

/// Range of instants of the monotonic clock of this process.
#[derive(Clone, Copy, Debug)]
pub struct InstantRange {
    /// Its start.
    pub from: Instant,
    /// Its end, not before its start.
    pub until: Instant,
}

/// Clock reading of a server, between the sending of a command and its answer.
#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    /// Time before the command was sent and time after its reply was received.
    pub within: InstantRange,
    /// Time of the server while it ran the command.
    pub server: Time,
}

/// Interval that contains the server's time minus [`process_time_us`], in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetInterval {
    /// Lower end.
    pub lo_us: i64,
    /// Upper end, not below the lower end.
    pub hi_us: i64,
}

impl OffsetInterval {
    /// Returns the difference of the ends.
    pub fn width_us(self) -> u64 {
        self.lo_us.abs_diff(self.hi_us)
    }

    /// Widens the interval by the drift in `elapsed_us`.
    fn widened_by_drift(self, elapsed_us: u64) -> Self {
        let drift = i64::try_from(elapsed_us.div_ceil(US_PER_DRIFT_US)).unwrap_or(i64::MAX);
        Self { lo_us: self.lo_us.saturating_sub(drift), hi_us: self.hi_us.saturating_add(drift) }
    }

    /// Returns the common part; `None` if there is none.
    fn intersection(self, other: Self) -> Option<Self> {
        let common = Self { lo_us: self.lo_us.max(other.lo_us), hi_us: self.hi_us.min(other.hi_us) };
        (common.lo_us <= common.hi_us).then_some(common)
    }
}

/// Size of a jump from which it is large, in microseconds.
const LARGE_JUMP_US: u64 = 1_000_000;

/// Jumps of the clocks of one deployment, which are compared with those of others.
#[derive(Debug)]
pub struct ClockJumps {
    compared: Arc<SharedClockJumps>,
    /// Process time at which the last large jump of this deployment was noticed.
    last_large_jump_at_us: AtomicI64,
}

/// Jumps of all clocks that one process compares.
#[derive(Debug)]
struct SharedClockJumps {
    count: AtomicU64,
    /// Process time at which the last jump was noticed; readings sent before it prove nothing.
    readings_void_before_us: AtomicI64,
}

impl Default for ClockJumps {
    fn default() -> Self {
        let compared = SharedClockJumps { count: AtomicU64::new(0), readings_void_before_us: AtomicI64::new(i64::MIN) };
        Self { compared: Arc::new(compared), last_large_jump_at_us: AtomicI64::new(i64::MIN) }
    }
}

impl ClockJumps {
    /// Creates the jumps of another deployment, whose clocks are compared with those of this one.
    #[must_use]
    pub fn for_other_deployment(&self) -> Self {
        Self { compared: Arc::clone(&self.compared), last_large_jump_at_us: AtomicI64::new(i64::MIN) }
    }

    /// Returns the number of jumps noticed since the start, of all clocks that are compared.
    pub fn count(&self) -> u64 {
        self.compared.count.load(Ordering::Relaxed)
    }

    /// Process time at which the last jump of this deployment that may exceed a second was noticed; the smallest number
    /// if there was none.
    pub fn last_large_jump_at_us(&self) -> i64 {
        self.last_large_jump_at_us.load(Ordering::Acquire)
    }

    /// Process time before which no reading that was sent proves anything, in microseconds.
    fn readings_void_before_us(&self) -> i64 {
        self.compared.readings_void_before_us.load(Ordering::Acquire)
    }

    fn record(&self, jump_us: u64, noticed_us: i64) {
        if jump_us > LARGE_JUMP_US {
            self.last_large_jump_at_us.fetch_max(noticed_us, Ordering::AcqRel);
        }
        self.compared.readings_void_before_us.fetch_max(noticed_us, Ordering::AcqRel);
        self.compared.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Interval of the offset, and the start of the readings that it comes from.
#[derive(Clone, Copy, Debug)]
struct ClockOffsetEstimate {
    offset: OffsetInterval,
    /// Process time of the interval; it is wider before and after.
    at_us: i64,
    /// Process time at which the first reading was sent.
    first_sent_us: i64,
}

impl ClockOffsetEstimate {
    /// Returns the interval of one reading; `None` if its times are impossible.
    fn of_reading(reading: &ClockReading) -> Option<Self> {
        let server_us = reading.server.as_micros();
        let (sent_us, answered_us) = (process_time_us(reading.within.from), process_time_us(reading.within.until));
        let server_us = i64::try_from(server_us).ok().filter(|_| server_us <= MAX_SERVER_TIME_US)?;
        let elapsed_us = u64::try_from(answered_us.checked_sub(sent_us)?).ok()?;
        // All three times are rounded down.
        let offset = OffsetInterval { lo_us: server_us - answered_us - 1, hi_us: server_us - sent_us + 1 };
        Some(Self { offset: offset.widened_by_drift(elapsed_us), at_us: answered_us, first_sent_us: sent_us })
    }

    fn offset_at(&self, process_time_us: i64) -> OffsetInterval {
        self.offset.widened_by_drift(self.at_us.abs_diff(process_time_us))
    }

    /// Adds the knowledge of a later or earlier reading; `None` if they contradict each other.
    fn combined(&self, other: &Self) -> Option<Self> {
        let at_us = self.at_us.max(other.at_us);
        let offset = self.offset_at(at_us).intersection(other.offset_at(at_us))?;
        Some(Self { offset, at_us, first_sent_us: self.first_sent_us.min(other.first_sent_us) })
    }

    /// Returns the upper bound on the difference between two estimates that contradict each other, in microseconds.
    fn max_jump_us(&self, other: &Self) -> u64 {
        let at_us = self.at_us.max(other.at_us);
        let (own, other) = (self.offset_at(at_us), other.offset_at(at_us));
        own.lo_us.abs_diff(other.hi_us).max(own.hi_us.abs_diff(other.lo_us))
    }

    /// Returns true if `next` tells enough more to replace the estimate.
    fn is_worth_replacing(&self, next: &Self) -> bool {
        let (width, next_width) = (self.offset_at(next.at_us).width_us(), next.offset.width_us());
        next_width.saturating_add(next_width / 8) < width || next.at_us - self.at_us >= REFRESH_AGE_US
    }
}

/// Clock of one server.
#[derive(Debug)]
pub struct ServerClock {
    estimate: ArcSwapOption<ClockOffsetEstimate>,
    jumps: Arc<ClockJumps>,
}

impl ServerClock {
    /// Creates the clock of a server that was not asked yet.
    pub const fn new(jumps: Arc<ClockJumps>) -> Self {
        Self { estimate: ArcSwapOption::const_empty(), jumps }
    }

    /// Jumps of the clocks of its deployment.
    pub fn deployment_jumps(&self) -> &ClockJumps {
        &self.jumps
    }

    /// Returns an interval that contains the offset at all times of `range`; `None` without a reading since the last
    /// jump.
    pub fn offset(&self, range: InstantRange) -> Option<OffsetInterval> {
        let estimate = self.estimate.load();
        let estimate = estimate.as_ref().filter(|estimate| self.is_valid(estimate))?;
        let distance = |at| estimate.at_us.abs_diff(process_time_us(at));
        Some(estimate.offset.widened_by_drift(distance(range.from).max(distance(range.until))))
    }

    /// Process time of the last reading that was kept; `None` without one since the last jump.
    pub fn last_read_us(&self) -> Option<i64> {
        self.estimate.load().as_ref().filter(|estimate| self.is_valid(estimate)).map(|estimate| estimate.at_us)
    }

    /// Records a reading. Returns the largest possible size of the jump in microseconds if it proves that a clock
    /// jumped, otherwise `None`.
    pub fn record(&self, reading: &ClockReading) -> Option<u64> {
        let next = ClockOffsetEstimate::of_reading(reading).filter(|next| self.is_valid(next))?;
        {
            let known = self.estimate.load();
            if let Some(known) = known.as_ref() {
                let Some(combined) = known.combined(&next) else {
                    let jump_us = known.max_jump_us(&next);
                    // Later readings are compared with this one. It is void too, because it was sent before the notice.
                    self.jumps.record(jump_us, next.at_us);
                    self.estimate.store(Some(Arc::new(next)));
                    return Some(jump_us);
                };
                if self.is_valid(known) && !known.is_worth_replacing(&combined) {
                    return None;
                }
            }
        }
        self.estimate.rcu(|known| {
            let known = known.as_ref().filter(|known| self.is_valid(known));
            // If another thread just recorded a contradiction, its jump makes both invalid.
            let combined = known.and_then(|known| known.combined(&next)).unwrap_or(next);
            Some(Arc::new(combined))
        });
        None
    }

    fn is_valid(&self, estimate: &ClockOffsetEstimate) -> bool {
        estimate.first_sent_us >= self.jumps.readings_void_before_us()
    }
}
