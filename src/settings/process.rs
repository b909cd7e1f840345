//! Shutdown and logs of the process.

use std::time::Duration;

use super::table::logs::{LOG_FORMAT, LOG_LEVEL};
use super::table::process::{TOLLKEEPER_DRAIN_PERIOD, TOLLKEEPER_SHUTDOWN_TIMEOUT};
use super::values::Values;
use crate::base::go_syntax::DurationText;
use crate::telemetry::logs::{Level, LogFormat};

/// Time limits of a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownSettings {
    /// Time that requests are still served while health checks fail; at most `timeout`.
    pub drain_period: Duration,
    /// Maximum time from the signal to the exit, the drain period included.
    pub timeout: Duration,
}

impl ShutdownSettings {
    pub(super) fn read(values: &mut Values) -> Self {
        let drain_period = values.get(&TOLLKEEPER_DRAIN_PERIOD);
        let timeout = values.get(&TOLLKEEPER_SHUTDOWN_TIMEOUT);
        let is_valid = !values.is_invalid(&TOLLKEEPER_DRAIN_PERIOD) && !values.is_invalid(&TOLLKEEPER_SHUTDOWN_TIMEOUT);
        if drain_period > timeout && is_valid {
            let (drain, timeout) = (DurationText(drain_period), DurationText(timeout));
            if values.is_set(&TOLLKEEPER_SHUTDOWN_TIMEOUT) {
                let what = format!("shorter than the TOLLKEEPER_DRAIN_PERIOD of {drain}, which it includes");
                let fix = format!("give more, or a TOLLKEEPER_DRAIN_PERIOD of at most {timeout}");
                values.problem(&TOLLKEEPER_SHUTDOWN_TIMEOUT, what, fix);
            } else {
                let what = format!("longer than the TOLLKEEPER_SHUTDOWN_TIMEOUT of {timeout}, which includes it");
                let fix = format!("give at most {timeout}, or a longer TOLLKEEPER_SHUTDOWN_TIMEOUT");
                values.problem(&TOLLKEEPER_DRAIN_PERIOD, what, fix);
            }
        }
        Self { drain_period, timeout }
    }
}

/// Level and format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// Minimum level of events that are written.
    pub level: Level,
    /// LogFormat of a line.
    pub format: LogFormat,
}

impl LogSettings {
    pub(super) fn read(values: &Values) -> Self {
        Self { level: values.get(&LOG_LEVEL), format: values.get(&LOG_FORMAT) }
    }
}
