//! Shutdown and threads of the process.
//!
//! Decides: times of a shutdown: `TOLLKEEPER_DRAIN_PERIOD` longer than `TOLLKEEPER_SHUTDOWN_TIMEOUT`.

use std::time::Duration;

use super::setting::settings;
use super::values::Values;
use crate::base::go_syntax::DurationText;

settings! { "Process";
    TOLLKEEPER_DRAIN_PERIOD: Duration = "5s",
        "time after SIGTERM in which requests are served and health checks fail"
        .within("0 to 1h") .often_set();
    TOLLKEEPER_SHUTDOWN_TIMEOUT: Duration = "25s",
        "time after SIGTERM until the process exits; includes TOLLKEEPER_DRAIN_PERIOD"
        .within("0 to 1h");
    TOLLKEEPER_WORKER_THREADS: usize = "0", "worker threads; 0: one per core" .within("0 to 1024");
    GOMAXPROCS: String = "", "threads of a Go program"
        .without_effect("see TOLLKEEPER_WORKER_THREADS");
    GOMEMLIMIT: String = "", "memory of a Go program"
        .without_effect("see TOLLKEEPER_MEMORY_BYTES");
}

/// Time limits of a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownSettings {
    /// Time that requests are still served while health checks fail; at most `timeout`.
    pub drain_period: Duration,
    /// Maximum time from the signal to the exit, the drain period included.
    pub timeout: Duration,
}

impl ShutdownSettings {
    pub(super) fn from_values(values: &mut Values) -> Self {
        let drain_period = values.get(&TOLLKEEPER_DRAIN_PERIOD);
        let timeout = values.get(&TOLLKEEPER_SHUTDOWN_TIMEOUT);
        let is_valid = !values.is_invalid(&TOLLKEEPER_DRAIN_PERIOD) && !values.is_invalid(&TOLLKEEPER_SHUTDOWN_TIMEOUT);
        if drain_period > timeout && is_valid {
            let (drain, timeout) = (DurationText(drain_period), DurationText(timeout));
            if values.is_set(&TOLLKEEPER_SHUTDOWN_TIMEOUT) {
                let what = format!("shorter than the TOLLKEEPER_DRAIN_PERIOD of {drain}, which it includes");
                let fix = format!("give more, or a TOLLKEEPER_DRAIN_PERIOD of at most {timeout}");
                values.add_problem(&TOLLKEEPER_SHUTDOWN_TIMEOUT, what, fix);
            } else {
                let what = format!("longer than the TOLLKEEPER_SHUTDOWN_TIMEOUT of {timeout}, which includes it");
                let fix = format!("give at most {timeout}, or a longer TOLLKEEPER_SHUTDOWN_TIMEOUT");
                values.add_problem(&TOLLKEEPER_DRAIN_PERIOD, what, fix);
            }
        }
        Self { drain_period, timeout }
    }
}
