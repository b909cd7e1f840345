//! Wall clocks of simulated hosts: each has an offset, drifts, and may jump.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use tokio::time::Instant;
use tollkeeper::base::clock::{Clock, Time, to_micros};

/// Largest drift of a clock, in parts per million: what NTP corrects at most.
pub const MAX_DRIFT_PPM: i64 = 500;

/// Wall clock of a host.
#[derive(Debug)]
pub struct HostClock {
    started: Instant,
    start: Time,
    drift_ppm: i64,
    offset_us: AtomicI64,
}

impl HostClock {
    /// Creates a clock that shows `start` plus `offset_us` now.
    pub fn new(start: Time, offset_us: i64, drift_ppm: i64) -> Arc<Self> {
        Arc::new(Self { started: Instant::now(), start, drift_ppm, offset_us: AtomicI64::new(offset_us) })
    }

    /// Time that the clock shows.
    pub fn now(&self) -> Time {
        let elapsed_us = i64::try_from(to_micros(self.started.elapsed())).unwrap();
        let shown = i64::try_from(self.start.as_micros()).unwrap()
            + elapsed_us
            + elapsed_us * self.drift_ppm / 1_000_000
            + self.offset_us.load(Ordering::Relaxed);
        Time::from_micros(u64::try_from(shown).unwrap())
    }

    /// Sets the clock forwards, or backwards if `by_us` is negative.
    pub fn jump(&self, by_us: i64) {
        self.offset_us.fetch_add(by_us, Ordering::Relaxed);
    }

    /// The clock, as a process on this host reads it.
    pub fn as_process_clock(self: &Arc<Self>) -> Clock {
        let clock = Arc::clone(self);
        Clock::Simulated(Arc::new(move || clock.now()))
    }
}
