//! Traces of sampled requests.
//!
//! Sampling is decided first, from the headers and the trace id, without an allocation. A request that is not sampled
//! has no span, and all code below receives `None`. A span is queued for export when it is dropped, so that every
//! return path and every cancelled request ends its span. `span_queue` exports in the background.

pub mod propagation;
pub mod span_queue;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use opentelemetry::trace::{Link, SpanContext, SpanId, Status, TraceFlags, TraceId};
use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanLinks};

pub use opentelemetry::trace::SpanKind;

use self::propagation::{PropagationFormats, RemoteParent};
use self::span_queue::SpanQueue;

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

impl Tracer {
    /// Starts the server span of a request with these headers; `None` if it is not sampled.
    pub fn start_server_span<'h>(
        &self,
        name: &'static str,
        header: impl Fn(&'static str) -> Option<&'h [u8]>,
    ) -> Option<Span> {
        let ids = RandomIdGenerator::default();
        let RemoteParent { ids: remote, sampled } = self.formats.read_remote_parent(&header);
        let decided = sampled.filter(|_| self.sampler.follows_parent);
        if decided == Some(false) {
            return None;
        }
        let trace = remote.map_or_else(|| ids.new_trace_id(), |(trace, _)| trace);
        if decided.is_none() && !self.sampler.is_sampled(trace) {
            return None;
        }
        let parent = ParentSpan { id: remote.map_or(SpanId::INVALID, |(_, span)| span), is_remote: remote.is_some() };
        let state = remote.map(|_| propagation::read_trace_state(&header)).unwrap_or_default();
        let context = SpanContext::new(trace, ids.new_span_id(), TraceFlags::SAMPLED, false, state);
        let identity = SpanIdentity { context, span_queue: Arc::clone(&self.span_queue) };
        Some(Span::new(name, SpanKind::Server, identity, parent))
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
        let end =
            (0..=text.len().min(MAX_TEXT_ATTRIBUTE_BYTES)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        self.set_attribute(key, text[..end].to_owned());
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
