//! CPU time of a thread, for figures that do not depend on what else the machine does.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time that the calling thread has used.
pub fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}
