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
pub struct Queue {
    /// Spans that wait or are being sent, at most.
    pub most_spans: usize,
    /// Spans that are sent at once, at most.
    pub most_at_once: usize,
    /// The longest that a span waits for others.
    pub delay: Duration,
}

/// Where spans go.
#[derive(Debug)]
pub struct Sink {
    processor: BatchSpanProcessor,
    scope: InstrumentationScope,
    counts: Arc<Counts>,
    most_spans: usize,
}

#[derive(Debug, Default)]
struct Counts {
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
pub struct Fates {
    /// The collector has them.
    pub sent: u64,
    /// There was no room for them.
    pub dropped: u64,
    /// The collector did not take them.
    pub failed: u64,
}

impl Sink {
    /// Sends by `exporter`; `setting` is the variable that says where to. `on_thread` is called once on the thread that
    /// does it.
    pub fn start<E: SpanExporter + 'static>(
        exporter: E,
        resource: &Resource,
        queue: Queue,
        (setting, on_thread): (&'static str, fn()),
    ) -> Self {
        let counts = Arc::new(Counts { setting, ..Counts::default() });
        let exporter = Watched { exporter, counts: Arc::clone(&counts), on_thread, first: Once::new() };
        let config = BatchConfigBuilder::default()
            .with_max_queue_size(queue.most_spans)
            .with_max_export_batch_size(queue.most_at_once)
            .with_scheduled_delay(queue.delay)
            .build();
        let mut processor = BatchSpanProcessor::new(exporter, config);
        processor.set_resource(resource);
        let scope = InstrumentationScope::builder("tollkeeper")
            .with_version(env!("CARGO_PKG_VERSION"))
            .with_schema_url(CONVENTIONS)
            .build();
        Self { processor, scope, counts, most_spans: queue.most_spans }
    }

    /// What became of spans since the start.
    pub fn fates(&self) -> Fates {
        let Counts { sent, dropped, failed, .. } = &*self.counts;
        let [sent, dropped, failed] = [sent, dropped, failed].map(|count| count.load(Ordering::Relaxed));
        Fates { sent, dropped, failed }
    }

    /// Sends what is queued, and ends; waits for that no longer than `patience`. False if something was left.
    pub fn finish(&self, patience: Duration) -> bool {
        self.processor.shutdown_with_timeout(patience).is_ok()
    }

    /// Who says what spans say.
    pub(super) fn scope(&self) -> InstrumentationScope {
        self.scope.clone()
    }

    /// Queues a span that ended.
    pub(super) fn take(&self, span: SpanData) {
        if self.counts.queued.fetch_add(1, Ordering::Relaxed) < self.most_spans {
            self.processor.on_end(span);
            return;
        }
        self.counts.queued.fetch_sub(1, Ordering::Relaxed);
        self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        self.counts.complain("the queue is full");
    }
}

impl Counts {
    fn complain(&self, why: &str) {
        static SAID: LogThrottle = LogThrottle::every(Duration::from_secs(60));
        if let Some(suppressed) = SAID.allow(Clock::System.now()) {
            let [failed, dropped] = [&self.failed, &self.dropped].map(|count| count.load(Ordering::Relaxed));
            tracing::warn!(failed, dropped, suppressed, "{}: spans are lost: {why}", self.setting);
        }
    }
}

/// Counts what an exporter does.
#[derive(Debug)]
struct Watched<E> {
    exporter: E,
    counts: Arc<Counts>,
    on_thread: fn(),
    first: Once,
}

impl<E: SpanExporter> SpanExporter for Watched<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.first.call_once(self.on_thread);
        let count = batch.len();
        let outcome = self.exporter.export(batch).await;
        self.counts.queued.fetch_sub(count, Ordering::Relaxed);
        let fate = if outcome.is_ok() { &self.counts.sent } else { &self.counts.failed };
        fate.fetch_add(count as u64, Ordering::Relaxed);
        if let Err(error) = &outcome {
            self.counts.complain(&error.to_string());
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
