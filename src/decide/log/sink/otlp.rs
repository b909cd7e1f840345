//! Sink that exports OpenTelemetry logs: one log record per line, with the line as its body.
//!
//! The exporter has its own connection. It sends again after an error that passes, so that the collector may get a
//! record twice; `process` and `seq` tell.

use std::borrow::Cow;
use std::io;

use serde::Deserialize;

use crate::base::threads;
use crate::decide::log::record::RecordedVerdict;
use crate::settings::collector::CollectorSettings;
use crate::telemetry::otlp::{BlockingLogExporter, ExportedLog, Severity};

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
    pub(super) fn start(settings: &CollectorSettings) -> io::Result<Self> {
        let options = settings.build_otlp_options(threads::lower_thread_priority).map_err(io::Error::other)?;
        Ok(Self { client: BlockingLogExporter::new(&options, &settings.resource)?, setting: settings.setting })
    }

    /// Exports whole lines.
    ///
    /// # Errors
    /// The collector is not known to have them.
    pub(super) fn write_lines(&self, lines: &[u8]) -> io::Result<()> {
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
