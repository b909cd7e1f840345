//! Logs.

use crate::settings::setting::settings;
use crate::telemetry::logs::{Level, LogFormat};

settings! { "Logs";
    LOG_LEVEL: Level = Level::Warn,
        "minimum level of log lines; start, stop and reload are logged as warnings";
    LOG_FORMAT: LogFormat = LogFormat::Text, "format of log lines";
}
