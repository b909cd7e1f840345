//! Level and format of the log.
//!
//! Decides: default level and format of the log.

use super::setting::settings;
use super::value::{Choice, WordTable};
use super::values::Values;
use crate::telemetry::logs::{Format, Level};

settings! { "Logs";
    LOG_LEVEL: Level = Level::Warn,
        "minimum level of log lines; start, stop and reload are shown with warn too" .often_set();
    LOG_FORMAT: Format = Format::Text, "format of log lines" .often_set();
}

impl Choice for Level {
    const ACCEPTED_WORDS: WordTable<Self> = Self::ACCEPTED_WORDS;
}

impl Choice for Format {
    const ACCEPTED_WORDS: WordTable<Self> = Self::ACCEPTED_WORDS;
}

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
