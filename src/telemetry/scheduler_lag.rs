//! Lateness of this process: how long a task that is due waits for a thread.
//!
//! [`measure_task_lag`] sleeps for short times and records how late it wakes. A process without enough CPU, or with a
//! thread that blocks, is late; a slow server or network is not.
//!
//! Decides: how late a due task ran (lag, `process_late_ms`).

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::base::sharded::lock_ignoring_poison;

/// Time between two measurements.
const MEASUREMENT_INTERVAL: Duration = Duration::from_millis(20);

/// Shortest time for which a lag is remembered; the longest is twice this.
const LAG_RETENTION: Duration = Duration::from_secs(5);

/// Lag of this process.
pub static SCHEDULER_LAG: SchedulerLag = SchedulerLag::new();

/// Largest lag of the last seconds.
#[derive(Debug)]
pub struct SchedulerLag {
    windows: Mutex<LagWindows>,
}

#[derive(Debug)]
struct LagWindows {
    started: Option<Instant>,
    current: Duration,
    previous: Duration,
}

impl Default for SchedulerLag {
    fn default() -> Self {
        Self::new()
    }
}

impl SchedulerLag {
    /// Creates a lag of zero.
    pub const fn new() -> Self {
        let windows = LagWindows { started: None, current: Duration::ZERO, previous: Duration::ZERO };
        Self { windows: Mutex::new(windows) }
    }

    /// Records how late a task ran at `now`.
    pub fn record(&self, lag: Duration, now: Instant) {
        let mut windows = lock_ignoring_poison(&self.windows);
        windows.rotate_if_due(now);
        windows.current = windows.current.max(lag);
    }

    /// Returns the largest lag of the last 5 to 10 seconds.
    pub fn recent_maximum(&self, now: Instant) -> Duration {
        let mut windows = lock_ignoring_poison(&self.windows);
        windows.rotate_if_due(now);
        windows.current.max(windows.previous)
    }
}

impl LagWindows {
    /// Begins a new window if the current one is over at `now`; the current one becomes the previous one.
    fn rotate_if_due(&mut self, now: Instant) {
        let age = self.started.map_or(LAG_RETENTION * 2, |started| now.saturating_duration_since(started));
        if age >= LAG_RETENTION {
            self.previous = if age < LAG_RETENTION * 2 { self.current } else { Duration::ZERO };
            (self.started, self.current) = (Some(now), Duration::ZERO);
        }
    }
}

/// Measures the lag of the runtime that runs this, until it is dropped.
pub async fn measure_task_lag() {
    loop {
        let due = Instant::now() + MEASUREMENT_INTERVAL;
        sleep_until(due).await;
        let now = Instant::now();
        SCHEDULER_LAG.record(now.saturating_duration_since(due), now);
    }
}
