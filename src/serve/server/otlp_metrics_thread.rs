//! Thread that exports metrics to an OpenTelemetry collector.
//!
//! The thread has a lower priority than decisions. A collector that is unreachable costs a log line per minute, and
//! nothing waits for it.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::base::clock::Clock;
use crate::base::threads;
use crate::serve::metrics_collector::MetricsCollector;
use crate::settings::otlp_metrics::OtlpMetricsSettings;
use crate::settings::problem::UnusableSetting;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::otlp_metrics::{BlockingMetricExporter, OtlpMetricsOptions};

/// Maximum time of the last export.
const LAST_EXPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Handle to the thread that exports metrics.
#[derive(Debug)]
pub(super) struct OtlpMetricsThread {
    stop: mpsc::Sender<oneshot::Sender<()>>,
    _thread: JoinHandle<()>,
}

/// Builds the exporter. Its certificates are read only now, not again when they change.
///
/// # Errors
/// Names the setting and the problem.
pub(super) fn build_metric_exporter(
    settings: &OtlpMetricsSettings,
    tags: &[(String, String)],
) -> Result<BlockingMetricExporter, UnusableSetting> {
    let collector = &settings.collector;
    let headers = settings.headers.iter().map(|(name, value)| (name.clone(), value.reveal().to_owned()));
    let options = OtlpMetricsOptions {
        collector: collector.build_otlp_options(threads::lower_thread_priority)?,
        headers: headers.collect(),
        is_compressed: settings.is_compressed,
        temporality: settings.temporality,
        tags: tags.to_vec(),
        resource: collector.resource.clone(),
    };
    BlockingMetricExporter::new(&options, Clock::System.now()).map_err(|error| UnusableSetting {
        setting: collector.setting,
        shown: collector.endpoint.clone(),
        what: error.to_string(),
    })
}

impl OtlpMetricsThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread.
    pub(super) fn start(
        exporter: BlockingMetricExporter,
        interval: Duration,
        collector: MetricsCollector,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let work = move || {
            threads::lower_thread_priority();
            export_until_stopped(exporter, interval, &collector, &stopped);
        };
        let thread = thread::Builder::new().name("otlp-metrics".to_owned()).spawn(work)?;
        Ok(Self { stop, _thread: thread })
    }

    /// Exports a last time, for at most a second, and stops the thread.
    pub(super) async fn export_last_metrics(self) {
        let (done, finished) = oneshot::channel();
        if self.stop.send(done).is_ok() && tokio::time::timeout(LAST_EXPORT_TIMEOUT, finished).await.is_err() {
            tracing::warn!("last metrics not sent: the collector of metrics takes longer than 1 s");
        }
    }
}

fn export_until_stopped(
    mut exporter: BlockingMetricExporter,
    interval: Duration,
    collector: &MetricsCollector,
    stop: &mpsc::Receiver<oneshot::Sender<()>>,
) {
    static EXPORT_FAILURE_LOG_THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
    loop {
        let stopping = match stop.recv_timeout(interval) {
            Ok(done) => Some(done),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let exported = exporter.export(Clock::System.now(), |emit| collector.collect(emit));
        if let Err(error) = exported
            && let Some(suppressed) = EXPORT_FAILURE_LOG_THROTTLE.allow(Clock::System.now())
        {
            let fix = "check OTEL_EXPORTER_OTLP_METRICS_ENDPOINT and the collector";
            tracing::warn!(error, suppressed, fix, "metrics not sent over OTLP: they are sent again");
        }
        if let Some(done) = stopping {
            // The receiver is gone if the timeout has expired.
            let _ = done.send(());
            return;
        }
    }
}
