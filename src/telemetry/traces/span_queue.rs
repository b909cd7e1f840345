//! Bounded queue of ended spans, and the thread that exports them.
//!
//! Ending a span never waits: if the queue is full, the span is counted and dropped. An unreachable collector costs the
//! spans and one log line per minute. Queued spans and spans being sent share one limit, so a collector that hangs
//! cannot use more memory.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use opentelemetry::InstrumentationScope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanExporter, SpanProcessor as _};

use crate::base::clock::Clock;
use crate::telemetry::log_throttle::LogThrottle;

/// Semantic conventions that the attribute names follow.
const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/1.42.0";

/// Limits of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanQueueOptions {
    /// Maximum number of spans that are queued or being sent.
    pub max_spans: usize,
    /// Maximum number of spans per export.
    pub max_batch_spans: usize,
    /// Maximum time a span waits for its batch to fill.
    pub delay: Duration,
}

/// Context of the exporting thread.
#[derive(Clone, Copy, Debug)]
pub struct ExportThreadContext {
    /// Environment variable that holds the collector's address, for the log.
    pub setting: &'static str,
    /// Called once on the thread.
    pub on_start: fn(),
}

/// Bounded queue of ended spans.
#[derive(Debug)]
pub struct SpanQueue {
    processor: BatchSpanProcessor,
    scope: InstrumentationScope,
    counters: Arc<ExportCounters>,
    max_spans: usize,
}

#[derive(Debug, Default)]
struct ExportCounters {
    queued: AtomicUsize,
    sent: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
    setting: &'static str,
}

/// Number of ended spans since the start, by outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanCountsByOutcome {
    /// Accepted by the collector.
    pub sent: u64,
    /// Dropped because the queue was full.
    pub dropped: u64,
    /// Lost because an export failed.
    pub failed: u64,
}

impl SpanQueue {
    /// Starts the thread that sends spans with `exporter`.
    pub fn start<E: SpanExporter + 'static>(
        exporter: E,
        resource: &Resource,
        options: SpanQueueOptions,
        thread: ExportThreadContext,
    ) -> Self {
        let counters = Arc::new(ExportCounters { setting: thread.setting, ..ExportCounters::default() });
        let exporter = CountingExporter {
            exporter,
            counters: Arc::clone(&counters),
            on_thread_start: thread.on_start,
            started: Once::new(),
        };
        let config = BatchConfigBuilder::default()
            .with_max_queue_size(options.max_spans)
            .with_max_export_batch_size(options.max_batch_spans)
            .with_scheduled_delay(options.delay)
            .build();
        let mut processor = BatchSpanProcessor::new(exporter, config);
        processor.set_resource(resource);
        let scope = InstrumentationScope::builder("tollkeeper")
            .with_version(env!("CARGO_PKG_VERSION"))
            .with_schema_url(SCHEMA_URL)
            .build();
        Self { processor, scope, counters, max_spans: options.max_spans }
    }

    /// Returns the number of ended spans by outcome.
    pub fn span_counts_by_outcome(&self) -> SpanCountsByOutcome {
        let ExportCounters { sent, dropped, failed, .. } = &*self.counters;
        let [sent, dropped, failed] = [sent, dropped, failed].map(|count| count.load(Ordering::Relaxed));
        SpanCountsByOutcome { sent, dropped, failed }
    }

    /// Sends the queued spans and stops, within `timeout`. Returns false if spans were left.
    pub fn export_remaining_and_stop(&self, timeout: Duration) -> bool {
        self.processor.shutdown_with_timeout(timeout).is_ok()
    }

    /// Instrumentation scope of all spans: name and version of this program.
    pub(super) fn instrumentation_scope(&self) -> InstrumentationScope {
        self.scope.clone()
    }

    /// Queues a span that ended, or drops it if the queue is full.
    pub(super) fn queue_span(&self, span: SpanData) {
        if self.counters.queued.fetch_add(1, Ordering::Relaxed) < self.max_spans {
            self.processor.on_end(span);
            return;
        }
        self.counters.queued.fetch_sub(1, Ordering::Relaxed);
        self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        self.counters.log_lost_spans("the queue is full");
    }
}

impl ExportCounters {
    fn log_lost_spans(&self, reason: &str) {
        static THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
        if let Some(suppressed) = THROTTLE.allow(Clock::System.now()) {
            let [failed, dropped] = [&self.failed, &self.dropped].map(|count| count.load(Ordering::Relaxed));
            tracing::warn!(failed, dropped, suppressed, "spans are lost: {reason} (check {})", self.setting);
        }
    }
}

/// Exporter that counts the outcome of each export.
#[derive(Debug)]
struct CountingExporter<E> {
    exporter: E,
    counters: Arc<ExportCounters>,
    on_thread_start: fn(),
    started: Once,
}

impl<E: SpanExporter> SpanExporter for CountingExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.started.call_once(self.on_thread_start);
        let count = batch.len();
        let result = self.exporter.export(batch).await;
        self.counters.queued.fetch_sub(count, Ordering::Relaxed);
        let counter = if result.is_ok() { &self.counters.sent } else { &self.counters.failed };
        counter.fetch_add(count as u64, Ordering::Relaxed);
        if let Err(error) = &result {
            self.counters.log_lost_spans(&error.to_string());
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}
