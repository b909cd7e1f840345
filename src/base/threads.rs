//! Threads and tasks: priority, CPU time, and a task's budget of work.
//!
//! tokio gives a task a budget for each of its polls, and every operation of tokio consumes one unit. A task that does
//! much work per operation consumes more units here; its next operation of tokio yields once none is left.
//!
//! Decides: which threads have a lower priority.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::task::coop::{has_budget_remaining, poll_proceed};

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
