//! Level and format of the log.
//!
//! Decides: default level and format of the log.

use super::setting::settings;
use super::value::choices;
use super::values::Values;
use crate::telemetry::logs::{Format, Level};

settings! { "Logs";
    LOG_LEVEL: Level = "warn",
        "minimum level of log lines; start, stop and reload are shown with warn too" .often_set();
    LOG_FORMAT: Format = "text", "format of log lines" .often_set();
}

choices! { Level }

choices! { Format }

/// Level and format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// Minimum level of events that are written.
    pub level: Level,
    /// Format of a line.
    pub format: Format,
}

impl LogSettings {
    pub(super) fn from_values(values: &Values) -> Self {
        Self { level: values.get(&LOG_LEVEL), format: values.get(&LOG_FORMAT) }
    }
}
