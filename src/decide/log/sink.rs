//! Sinks: destinations of the lines of the log.
//!
//! A sink blocks with its destination, in a thread of its own. To add one: a variant of
//! [`SinkSettings`] and of [`Sink`], and a file beside this one.

mod file;
mod otlp;
mod redis;
mod stdout;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use self::file::FileSink;
use self::otlp::OtlpSink;
use self::redis::RedisSink;
use self::stdout::StdoutSink;
use super::header::HeaderRecord;
use super::queue::LostRecords;
use crate::base::threads;
use crate::settings::decision_log::{DecisionLogSettings, SinkSettings, TOLLKEEPER_DECISION_LOG};
use crate::settings::problem::UnusableSetting;
use crate::settings::setting::AnySetting as _;
use crate::store::client::redis::connect::find_settings_with_unusable_files;

/// Destination of the lines of the log.
#[derive(Debug)]
pub(super) enum Sink {
    Stdout(StdoutSink),
    File(FileSink),
    Redis(RedisSink),
    Otlp(Box<OtlpSink>),
}

impl Sink {
    /// Opens a sink; a file that cannot be opened is opened later.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn new(sink: &SinkSettings, settings: &DecisionLogSettings) -> io::Result<Self> {
        Ok(match sink {
            SinkSettings::Stdout => Self::Stdout(StdoutSink::default()),
            SinkSettings::File(path) => Self::File(FileSink::new(path, settings)),
            SinkSettings::Redis(stream) => Self::Redis(RedisSink::start(stream)?),
            SinkSettings::Otlp(collector) => Self::Otlp(Box::new(OtlpSink::start(collector)?)),
        })
    }

    /// Time for which lines gather before they are written.
    pub(super) const fn gather_time(&self) -> Duration {
        match self {
            Self::File(file) if file.is_compressed() => Duration::from_secs(1),
            Self::Stdout(_) | Self::File(_) | Self::Redis(_) | Self::Otlp(_) => Duration::from_millis(100),
        }
    }

    /// Writes the line of a header.
    ///
    /// # Errors
    /// The header was not written.
    pub(super) fn write_header(&mut self, header: &Arc<HeaderRecord>) -> Result<(), LostRecords> {
        match self {
            Self::File(file) => file.write_header(header).map_err(|error| LostRecords { count: 1, error }),
            Self::Redis(redis) => redis.write_header(header),
            Self::Stdout(_) | Self::Otlp(_) => self.write_lines(&header.to_line()),
        }
    }

    /// Writes whole lines.
    ///
    /// # Errors
    /// Some of the lines are not known to be written; none was written in part.
    pub(super) fn write_lines(&mut self, lines: &[u8]) -> Result<(), LostRecords> {
        let written = match self {
            Self::Stdout(stdout) => stdout.write_lines(lines),
            Self::File(file) => file.write_lines(lines),
            Self::Redis(redis) => return redis.write_lines(lines),
            Self::Otlp(otlp) => otlp.write_lines(lines),
        };
        written.map_err(|error| LostRecords::from_lost_lines(lines, error))
    }
}

/// Name of a sink in logs and metrics.
pub(super) const fn sink_name(sink: &SinkSettings) -> &'static str {
    match sink {
        SinkSettings::Stdout => "stdout",
        SinkSettings::File(_) => "file",
        SinkSettings::Redis(_) => "redis",
        SinkSettings::Otlp(_) => "otlp",
    }
}

/// Settings for which a sink cannot be opened, with a fix. Nothing is opened or created.
pub(super) fn find_sink_problems(sink: &SinkSettings) -> Vec<UnusableSetting> {
    match sink {
        SinkSettings::Stdout => Vec::new(),
        SinkSettings::File(path) => {
            let (setting, shown) = (TOLLKEEPER_DECISION_LOG.name(), format!("file:{}", path.display()));
            file::check_file_is_writable(path)
                .err()
                .map(|what| UnusableSetting { setting, shown, what })
                .into_iter()
                .collect()
        }
        SinkSettings::Redis(stream) => find_settings_with_unusable_files(&stream.deployment),
        SinkSettings::Otlp(collector) => {
            collector.build_otlp_options(threads::lower_thread_priority).err().into_iter().collect()
        }
    }
}
