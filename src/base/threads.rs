//! Threads and tasks: priority, CPU time, a task's budget of work, and the lateness of this process: how long a task
//! that is due waits for a thread.
//!
//! tokio gives a task a budget for each of its polls, and every operation of tokio consumes one unit. A task that does
//! much work per operation consumes more units here; its next operation of tokio yields once none is left.
//!
//! [`measure_task_lag`] sleeps for short times and records how late it wakes. A process without enough CPU, or with a
//! thread that blocks, is late; a slow server or network is not.
//!
//! Decides: which threads have a lower priority; how late a due task ran (lag, `process_late_ms`).

use std::sync::Mutex;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::task::coop::{has_budget_remaining, poll_proceed};
use tokio::time::{Instant, sleep_until};

use super::sharded::lock_ignoring_poison;

/// Upper bound on the units consumed at once: more than tokio's budget for one poll.
pub const MAX_CONSUMED_BUDGET_UNITS: usize = 256;

/// Lowers the priority of the calling thread, so that its work delays no decision on a busy machine.
///
/// The thread keeps its priority if the process lacks the permission.
pub fn lower_thread_priority() {
    const NICENESS: i32 = 10;
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::debug!(%error, "a background thread runs at full priority");
    }
}

/// Returns the CPU time that the calling thread has used.
pub fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Consumes up to `units` of the running task's budget. Outside a task it does nothing.
pub fn consume_task_budget(units: usize) {
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..units.min(MAX_CONSUMED_BUDGET_UNITS) {
        match poll_proceed(&mut context) {
            Poll::Ready(unit) => unit.made_progress(),
            Poll::Pending => return,
        }
    }
}

/// True if the running task need not yield yet.
pub fn has_task_budget() -> bool {
    has_budget_remaining()
}

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
