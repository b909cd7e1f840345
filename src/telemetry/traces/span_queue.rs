//! Where spans go when they end: a bounded queue, and a thread that sends what is in it.
//!
//! Whoever ends a span never waits: it is counted and dropped when there is no room. A collector that is away costs the
//! spans, one line of the log a minute, and nothing else. What is queued and what is being sent count together, so
//! what a collector that hangs can hold here is bounded too.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use opentelemetry::InstrumentationScope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanExporter, SpanProcessor as _};

use crate::clock::Clock;
use crate::telemetry::log_throttle::LogThrottle;

/// The conventions that names of attributes follow.
const CONVENTIONS: &str = "https://opentelemetry.io/schemas/1.42.0";

/// How spans are queued and sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanQueueOptions {
    /// Spans that wait or are being sent, at most.
    pub max_spans: usize,
    /// Spans that are sent at once, at most.
    pub max_batch_spans: usize,
    /// The longest that a span waits for others.
    pub delay: Duration,
}

/// Where spans go.
#[derive(Debug)]
pub struct SpanQueue {
    processor: BatchSpanProcessor,
    scope: InstrumentationScope,
    counts: Arc<ExportCounters>,
    max_spans: usize,
}

#[derive(Debug, Default)]
struct ExportCounters {
    queued: AtomicUsize,
    sent: AtomicU64,
    /// For want of room.
    dropped: AtomicU64,
    /// Not taken by the collector.
    failed: AtomicU64,
    setting: &'static str,
}

/// What became of spans since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportCounts {
    /// The collector has them.
    pub sent: u64,
    /// There was no room for them.
    pub dropped: u64,
    /// The collector did not take them.
    pub failed: u64,
}

impl SpanQueue {
    /// Sends by `exporter`; `setting` is the variable that says where to. `on_thread` is called once on the thread that
    /// does it.
    pub fn start<E: SpanExporter + 'static>(
        exporter: E,
        resource: &Resource,
        queue: SpanQueueOptions,
        (setting, on_thread): (&'static str, fn()),
    ) -> Self {
        let counts = Arc::new(ExportCounters { setting, ..ExportCounters::default() });
        let exporter = CountingExporter { exporter, counts: Arc::clone(&counts), on_thread, first: Once::new() };
        let config = BatchConfigBuilder::default()
            .with_max_queue_size(queue.max_spans)
            .with_max_export_batch_size(queue.max_batch_spans)
            .with_scheduled_delay(queue.delay)
            .build();
        let mut processor = BatchSpanProcessor::new(exporter, config);
        processor.set_resource(resource);
        let scope = InstrumentationScope::builder("tollkeeper")
            .with_version(env!("CARGO_PKG_VERSION"))
            .with_schema_url(CONVENTIONS)
            .build();
        Self { processor, scope, counts, max_spans: queue.max_spans }
    }

    /// What became of spans since the start.
    pub fn export_counts(&self) -> ExportCounts {
        let ExportCounters { sent, dropped, failed, .. } = &*self.counts;
        let [sent, dropped, failed] = [sent, dropped, failed].map(|count| count.load(Ordering::Relaxed));
        ExportCounts { sent, dropped, failed }
    }

    /// Sends what is queued, and ends; waits for that no longer than `timeout`. False if something was left.
    pub fn finish(&self, timeout: Duration) -> bool {
        self.processor.shutdown_with_timeout(timeout).is_ok()
    }

    /// Who says what spans say.
    pub(super) fn scope(&self) -> InstrumentationScope {
        self.scope.clone()
    }

    /// Queues a span that ended.
    pub(super) fn push(&self, span: SpanData) {
        if self.counts.queued.fetch_add(1, Ordering::Relaxed) < self.max_spans {
            self.processor.on_end(span);
            return;
        }
        self.counts.queued.fetch_sub(1, Ordering::Relaxed);
        self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        self.counts.log_lost_spans("the queue is full");
    }
}

impl ExportCounters {
    fn log_lost_spans(&self, why: &str) {
        static THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
        if let Some(suppressed) = THROTTLE.allow(Clock::System.now()) {
            let [failed, dropped] = [&self.failed, &self.dropped].map(|count| count.load(Ordering::Relaxed));
            tracing::warn!(failed, dropped, suppressed, "{}: spans are lost: {why}", self.setting);
        }
    }
}

/// ExportCounters what an exporter does.
#[derive(Debug)]
struct CountingExporter<E> {
    exporter: E,
    counts: Arc<ExportCounters>,
    on_thread: fn(),
    first: Once,
}

impl<E: SpanExporter> SpanExporter for CountingExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.first.call_once(self.on_thread);
        let count = batch.len();
        let outcome = self.exporter.export(batch).await;
        self.counts.queued.fetch_sub(count, Ordering::Relaxed);
        let counter = if outcome.is_ok() { &self.counts.sent } else { &self.counts.failed };
        counter.fetch_add(count as u64, Ordering::Relaxed);
        if let Err(error) = &outcome {
            self.counts.log_lost_spans(&error.to_string());
        }
        outcome
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
