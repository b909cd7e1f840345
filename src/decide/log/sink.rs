//! Sinks: destinations of the lines of the log. Those to standard output and to a collector of OpenTelemetry are here.
//!
//! A sink blocks with its destination, in a thread of its own. To add one: a variant of [`SinkSettings`] and of
//! [`Sink`], and a file beside this one.
//!
//! The log of the process goes to standard error, so it does not mix with a sink to standard output. A collector gets
//! one log record per line, with the line as its body. Its exporter has a connection of its own, and sends again after
//! an error that passes, so that the collector may get a record twice; `process` and `seq` tell.
//!
//! Decides: how long a record waits for others (batch, compressed or not).
//! Decides: when it is flushed (each batch, never fsync); severity of a record over OTLP.

mod file;
mod redis;

use std::borrow::Cow;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use self::file::FileSink;
use self::redis::RedisSink;
use super::header::HeaderRecord;
use super::queue::LostRecords;
use super::record::RecordedVerdict;
use crate::base::threads;
use crate::settings::collector::CollectorSettings;
use crate::settings::decision_log::{DecisionLogSettings, SinkSettings, TOLLKEEPER_DECISION_LOG};
use crate::settings::problem::UnusableSetting;
use crate::settings::setting::AnySetting as _;
use crate::store::client::redis::connect::find_settings_with_unusable_files;
use crate::telemetry::otlp::{BlockingLogExporter, ExportedLog, Severity};

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

/// Standard output.
#[derive(Debug, Default)]
pub(crate) struct StdoutSink {
    /// The last write failed, so that the current line may have no end.
    has_open_line: bool,
}

impl StdoutSink {
    /// Writes whole lines.
    fn write_lines(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        if self.has_open_line {
            stdout.write_all(b"\n")?;
        }
        self.has_open_line = true;
        stdout.write_all(lines)?;
        stdout.flush()?;
        self.has_open_line = false;
        Ok(())
    }
}

/// Writer of logs to a collector.
#[derive(Debug)]
pub(crate) struct OtlpSink {
    client: BlockingLogExporter,
    /// The variable that names the collector.
    setting: &'static str,
}

impl OtlpSink {
    /// Creates an exporter, which connects when it sends.
    ///
    /// # Errors
    /// A certificate cannot be used, or a thread cannot be started.
    fn start(settings: &CollectorSettings) -> io::Result<Self> {
        let options = settings.build_otlp_options(threads::lower_thread_priority).map_err(io::Error::other)?;
        Ok(Self { client: BlockingLogExporter::new(&options, &settings.resource)?, setting: settings.setting })
    }

    /// Exports whole lines.
    ///
    /// # Errors
    /// The collector is not known to have them.
    fn write_lines(&self, lines: &[u8]) -> io::Result<()> {
        let lines: Vec<Cow<'_, str>> =
            lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(String::from_utf8_lossy).collect();
        let fields: Vec<LineFields<'_>> =
            lines.iter().map(|line| serde_json::from_str(line).unwrap_or_default()).collect();
        let exported =
            self.client.export_logs(lines.iter().zip(&fields).map(|(line, fields)| fields.to_exported_log(line)));
        exported.map_err(|error| io::Error::other(format!("otlp: {error}: {} names the collector", self.setting)))
    }
}

/// Fields of a line that its log record repeats. A line without them is exported too.
#[derive(Debug, Default, Deserialize)]
struct LineFields<'l> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'l, str>,
    time_us: u64,
    /// Set in decisions.
    verdict: Option<RecordedVerdict>,
    #[serde(borrow)]
    trace_id: Option<Cow<'l, str>>,
}

impl LineFields<'_> {
    fn to_exported_log<'a>(&'a self, line: &'a str) -> ExportedLog<'a> {
        ExportedLog {
            event_name: match &*self.kind {
                "header" => "tollkeeper.header",
                "dropped" => "tollkeeper.dropped",
                "threshold" => "tollkeeper.threshold",
                _ => "tollkeeper.decision",
            },
            time_us: self.time_us,
            severity: match (&*self.kind, self.verdict) {
                ("dropped", _) | (_, Some(RecordedVerdict::OverLimit)) => Severity::Warn,
                (_, Some(RecordedVerdict::Error)) => Severity::Error,
                _ => Severity::Info,
            },
            body: line,
            trace_id: self.trace_id.as_deref(),
        }
    }
}
