//! Export of log records to an OpenTelemetry collector, in the caller's thread.

use std::io;
use std::time::{Duration, SystemTime};

use opentelemetry::InstrumentationScope;
use opentelemetry::logs::{AnyValue, LogRecord as _, Logger as _, LoggerProvider as _};
use opentelemetry::trace::{SpanId, TraceFlags, TraceId};
use opentelemetry_otlp::LogExporter;
use opentelemetry_sdk::logs::{LogBatch, LogExporter as _, SdkLogRecord, SdkLogger, SdkLoggerProvider};
use tokio::runtime::{Builder, Runtime};

pub use opentelemetry::logs::Severity;

use super::otlp::{self, OtlpOptions};

/// Log record to export.
#[derive(Clone, Debug)]
pub struct ExportedLog<'l> {
    /// Name of the event.
    pub event_name: &'static str,
    /// Time of the event in microseconds since the Unix epoch.
    pub time_us: u64,
    /// Severity.
    pub severity: Severity,
    /// Body, as text.
    pub body: &'l str,
    /// Sampled trace in hexadecimal; an invalid one is left out.
    pub trace_id: Option<&'l str>,
}

/// Exporter of logs that blocks its caller.
#[derive(Debug)]
pub struct BlockingLogExporter {
    exporter: LogExporter,
    /// Creates records.
    logger: SdkLogger,
    scope: InstrumentationScope,
    /// Timers of the exporter, which run in the caller's thread.
    runtime: Runtime,
    timeout: Duration,
}

impl BlockingLogExporter {
    /// Creates an exporter, which connects when it sends. `resource` is as for [`otlp::build_resource`].
    ///
    /// # Errors
    /// The options are invalid, or a thread cannot be started.
    pub fn new(options: &OtlpOptions, resource: &[(String, String)]) -> io::Result<Self> {
        let mut exporter = otlp::build_log_exporter(options).map_err(io::Error::other)?;
        exporter.set_resource(&otlp::build_resource(resource));
        let scope = InstrumentationScope::builder("tollkeeper").with_version(env!("CARGO_PKG_VERSION")).build();
        let logger = SdkLoggerProvider::builder().build().logger_with_scope(scope.clone());
        let runtime = Builder::new_current_thread().enable_time().build()?;
        Ok(Self { exporter, logger, scope, runtime, timeout: options.timeout })
    }

    /// Exports records in one request, which is sent again after an error that passes, until the time limit.
    ///
    /// # Errors
    /// The collector is not known to have them. The text has no secrets.
    pub fn export_logs<'l>(&self, logs: impl Iterator<Item = ExportedLog<'l>>) -> Result<(), String> {
        let records: Vec<SdkLogRecord> = logs.map(|log| self.build_record(&log)).collect();
        let batch: Vec<_> = records.iter().map(|record| (record, &self.scope)).collect();
        let exported = self.runtime.block_on(async {
            let export = self.exporter.export(LogBatch::new(&batch));
            tokio::time::timeout(self.timeout, export).await
        });
        match exported {
            Ok(exported) => exported.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no answer of the collector in {:?}", self.timeout)),
        }
    }

    fn build_record(&self, log: &ExportedLog<'_>) -> SdkLogRecord {
        let now = SystemTime::now();
        let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(log.time_us));
        let mut record = self.logger.create_log_record();
        record.set_event_name(log.event_name);
        record.set_timestamp(time.unwrap_or(now));
        record.set_observed_timestamp(now);
        record.set_severity_number(log.severity);
        record.set_severity_text(log.severity.name());
        record.set_body(AnyValue::String(log.body.to_owned().into()));
        if let Some(trace_id) = log.trace_id.and_then(|id| TraceId::from_hex(id).ok()) {
            record.set_trace_context(trace_id, SpanId::INVALID, Some(TraceFlags::SAMPLED));
        }
        record
    }
}
