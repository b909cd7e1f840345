//! Traces of sampled requests: the decision to sample, spans, and the bounded queue of ended spans with the thread that
//! exports them.
//!
//! Sampling is decided first, from the headers and the trace id, without an allocation. A request that is not sampled
//! has no span, and all code below receives `None`. A span is queued for export when it is dropped, so that every
//! return path and every cancelled request ends its span.
//!
//! Ending a span never waits: if the queue is full, the span is counted and dropped. An unreachable collector costs the
//! spans and one log line per minute. Queued spans and spans being sent share one limit, so a collector that hangs
//! cannot use more memory.
//!
//! Decides: which traces are sampled; how many spans wait for the collector (`SpanQueue`), links (`MAX_LINKS`).
//! Decides: the longest text of a span (`MAX_TEXT_ATTRIBUTE_BYTES`).

pub mod propagation;

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{Link, SpanContext, SpanId, Status, TraceFlags, TraceId};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanExporter,
    SpanLinks, SpanProcessor as _,
};
use tokio::time::Instant;

use self::propagation::{PropagationFormats, RemoteParent};
use super::log_throttle::LogThrottle;
use crate::base::clock::Clock;
use crate::base::text::truncate_to_bytes;

pub use opentelemetry::trace::SpanKind;

/// Maximum length of a text attribute in bytes; the rest is cut off.
pub const MAX_TEXT_ATTRIBUTE_BYTES: usize = 1024;
/// Maximum number of links of a span.
pub const MAX_LINKS: usize = 32;

/// Sampling decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceSampler {
    /// True if the caller's decision applies, where it made one.
    pub follows_parent: bool,
    /// Share of the other traces that is sampled, 0 to 1.
    pub ratio: f64,
}

impl TraceSampler {
    /// Decides by trace id, so that all services with the same ratio sample the same traces.
    ///
    /// This is TraceIdRatioBased of other OpenTelemetry libraries: the lower 63 bits of the id, against the ratio.
    fn is_sampled(self, trace: TraceId) -> bool {
        const TRACE_ID_RANGE: f64 = (1_u64 << 63) as f64;
        let [.., a, b, c, d, e, f, g, h] = trace.to_bytes();
        let number = u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1;
        #[expect(clippy::cast_precision_loss, reason = "a ratio needs no more digits")]
        {
            (number as f64) < self.ratio * TRACE_ID_RANGE
        }
    }
}

/// Starts traces, or continues those of callers.
#[derive(Debug)]
pub struct Tracer {
    /// Sampling decision.
    pub sampler: TraceSampler,
    /// Header formats in which callers pass their trace.
    pub formats: PropagationFormats,
    /// True if spans show the keys and values of descriptors.
    pub shows_descriptors: bool,
    /// Queue of ended spans.
    pub span_queue: Arc<SpanQueue>,
}

/// Trace of a request that is sampled, with what its headers say of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampledTrace {
    id: TraceId,
    /// Span of the caller; `None` if the trace starts here.
    parent: Option<SpanId>,
    /// `tracestate` of the caller, at most 512 bytes.
    state: Box<[u8]>,
}

impl Tracer {
    /// Decides whether a request with these headers is sampled; `None` if it is not.
    pub fn sample_trace<'h>(&self, header: impl Fn(&'static str) -> Option<&'h [u8]>) -> Option<SampledTrace> {
        let RemoteParent { ids: remote, sampled } = self.formats.read_remote_parent(&header);
        let decided = sampled.filter(|_| self.sampler.follows_parent);
        if decided == Some(false) {
            return None;
        }
        let id = remote.map_or_else(|| RandomIdGenerator::default().new_trace_id(), |(trace, _)| trace);
        if decided.is_none() && !self.sampler.is_sampled(id) {
            return None;
        }
        let state = remote.map(|_| propagation::copy_trace_state(&header)).unwrap_or_default();
        Some(SampledTrace { id, parent: remote.map(|(_, span)| span), state })
    }

    /// Starts the server span of a request.
    pub fn start_server_span(&self, name: &'static str, trace: &SampledTrace) -> Span {
        let parent = ParentSpan { id: trace.parent.unwrap_or(SpanId::INVALID), is_remote: trace.parent.is_some() };
        let state = propagation::parse_trace_state(&trace.state);
        let id = RandomIdGenerator::default().new_span_id();
        let context = SpanContext::new(trace.id, id, TraceFlags::SAMPLED, false, state);
        let identity = SpanIdentity { context, span_queue: Arc::clone(&self.span_queue) };
        Span::new(name, SpanKind::Server, identity, parent)
    }
}

/// Clonable handle to a span, for children and links. Valid after the span has ended.
#[derive(Clone, Debug)]
pub struct SpanRef(Arc<SpanIdentity>);

#[derive(Debug)]
struct SpanIdentity {
    context: SpanContext,
    span_queue: Arc<SpanQueue>,
}

/// Parent of a span.
#[derive(Clone, Copy)]
struct ParentSpan {
    id: SpanId,
    is_remote: bool,
}

impl SpanRef {
    /// Id of the trace.
    pub fn trace_id(&self) -> TraceId {
        self.0.context.trace_id()
    }

    /// Starts a child span.
    pub fn start_child_span(&self, name: &'static str, kind: SpanKind) -> Span {
        let SpanIdentity { context, span_queue } = &*self.0;
        let id = RandomIdGenerator::default().new_span_id();
        let state = context.trace_state().clone();
        let own = SpanContext::new(context.trace_id(), id, TraceFlags::SAMPLED, false, state);
        let identity = SpanIdentity { context: own, span_queue: Arc::clone(span_queue) };
        Span::new(name, kind, identity, ParentSpan { id: context.span_id(), is_remote: false })
    }
}

/// A running span. Dropping it ends it and queues it for export.
#[derive(Debug)]
pub struct Span {
    span_ref: SpanRef,
    started: Instant,
    /// `None` only after the drop.
    data: Option<Box<SpanData>>,
}

impl Span {
    fn new(name: &'static str, kind: SpanKind, identity: SpanIdentity, parent: ParentSpan) -> Self {
        let now = SystemTime::now();
        let data = SpanData {
            span_context: identity.context.clone(),
            parent_span_id: parent.id,
            parent_span_is_remote: parent.is_remote,
            span_kind: kind,
            name: Cow::Borrowed(name),
            start_time: now,
            end_time: now,
            attributes: Vec::with_capacity(8),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: identity.span_queue.instrumentation_scope(),
        };
        Self { span_ref: SpanRef(Arc::new(identity)), started: Instant::now(), data: Some(Box::new(data)) }
    }

    /// Handle for children and links.
    pub const fn span_ref(&self) -> &SpanRef {
        &self.span_ref
    }

    /// Adds an attribute.
    pub fn set_attribute(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(data) = &mut self.data {
            data.attributes.push(KeyValue::new(key, value));
        }
    }

    /// Sets an attribute that may have been set before.
    pub fn replace_attribute(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(data) = &mut self.data {
            data.attributes.retain(|attribute| attribute.key.as_str() != key);
        }
        self.set_attribute(key, value);
    }

    /// Adds an attribute with text from outside, cut to [`MAX_TEXT_ATTRIBUTE_BYTES`].
    pub fn set_text_attribute(&mut self, key: &'static str, text: &str) {
        self.set_attribute(key, truncate_to_bytes(text, MAX_TEXT_ATTRIBUTE_BYTES).to_owned());
    }

    /// Sets the status to error. `kind` is a short class of the error, `message` describes it.
    pub fn set_error(&mut self, kind: &'static str, message: impl Into<Cow<'static, str>>) {
        self.set_attribute("error.type", kind);
        if let Some(data) = &mut self.data {
            data.status = Status::error(message);
        }
    }

    /// Links another span; links beyond [`MAX_LINKS`] are only counted.
    pub fn add_link(&mut self, other: &SpanRef) {
        let Some(data) = &mut self.data else { return };
        if data.links.links.len() < MAX_LINKS {
            data.links.links.push(Link::with_context(other.0.context.clone()));
        } else {
            data.links.dropped_count += 1;
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(mut data) = self.data.take() {
            // The monotonic clock: a span never ends before it starts.
            data.end_time = data.start_time + self.started.elapsed();
            self.span_ref.0.span_queue.queue_span(*data);
        }
    }
}

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
    fn instrumentation_scope(&self) -> InstrumentationScope {
        self.scope.clone()
    }

    /// Queues a span that ended, or drops it if the queue is full.
    fn queue_span(&self, span: SpanData) {
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
