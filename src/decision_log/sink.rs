//! Sinks: destinations of the lines of the log.
//!
//! A sink blocks with its destination, in a thread of its own. To add one: a variant of
//! [`SinkSettings`] and of [`Sink`], and a file beside this one.

mod file;
mod stdout;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use self::file::FileSink;
use self::stdout::StdoutSink;
use super::header::HeaderRecord;
use crate::settings::decision_log::{DecisionLogSettings, SinkSettings};

/// Destination of the lines of the log.
#[derive(Debug)]
pub(super) enum Sink {
    Stdout(StdoutSink),
    File(FileSink),
}

impl Sink {
    /// Opens a sink; a file that cannot be opened is opened later.
    pub(super) fn new(sink: &SinkSettings, settings: &DecisionLogSettings) -> Self {
        match sink {
            SinkSettings::Stdout => Self::Stdout(StdoutSink::default()),
            SinkSettings::File(path) => Self::File(FileSink::new(path, settings)),
        }
    }

    /// Time for which lines gather before they are written.
    pub(super) const fn gather_time(&self) -> Duration {
        match self {
            Self::File(file) if file.is_compressed() => Duration::from_secs(1),
            Self::Stdout(_) | Self::File(_) => Duration::from_millis(100),
        }
    }

    /// Writes the line of a header.
    ///
    /// # Errors
    /// The header was not written.
    pub(super) fn write_header(&mut self, header: &Arc<HeaderRecord>) -> io::Result<()> {
        match self {
            Self::Stdout(stdout) => stdout.write(&header.line()),
            Self::File(file) => file.write_header(header),
        }
    }

    /// Writes whole lines.
    ///
    /// # Errors
    /// Some of the lines were not written; none was written in part.
    pub(super) fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        match self {
            Self::Stdout(stdout) => stdout.write(lines),
            Self::File(file) => file.write(lines),
        }
    }
}

/// Name of a sink in logs and metrics.
pub(super) const fn name(sink: &SinkSettings) -> &'static str {
    match sink {
        SinkSettings::Stdout => "stdout",
        SinkSettings::File(_) => "file",
    }
}

/// Checks that a sink can be opened, without opening or creating it.
///
/// # Errors
/// The reason why it cannot, with a fix.
pub(super) fn check(sink: &SinkSettings) -> Result<(), String> {
    match sink {
        SinkSettings::Stdout => Ok(()),
        SinkSettings::File(path) => file::check(path),
    }
}
