//! Traces: what became of a request, for those that are sampled.
//!
//! Whether a request is sampled is decided first, from its headers and a number, and nothing is allocated before. One
//! that is not has no span, and everything further down is handed `None`. A span is sent when it is dropped: so no
//! way out of a function forgets one, and a request that its caller gave up has one too. Sending is the affair of
//! `span_queue`, behind a bounded queue, on a thread of its own.

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

/// The longest text of an attribute, in bytes; the rest is cut.
pub const MAX_TEXT_BYTES: usize = 1024;
/// The most links that a span has.
pub const MAX_LINKS: usize = 32;

/// Which requests are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// Whether what the caller decided holds, where it decided.
    pub follows_parent: bool,
    /// The share of the other traces that is sampled, 0 to 1.
    pub ratio: f64,
}

impl Sampler {
    /// Whether a trace is in the share: by its id, so that all who look at it with one ratio agree. This is
    /// TraceIdRatioBased as other OpenTelemetry libraries have it: the last 63 bits, from the eighth byte on.
    fn samples(self, trace: TraceId) -> bool {
        const RANGE: f64 = (1_u64 << 63) as f64;
        let [.., a, b, c, d, e, f, g, h] = trace.to_bytes();
        let number = u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1;
        #[expect(clippy::cast_precision_loss, reason = "a share of 2^63 traces is meant no finer")]
        {
            (number as f64) < self.ratio * RANGE
        }
    }
}

/// Begins traces, or goes on with those that callers began.
#[derive(Debug)]
pub struct Tracer {
    /// Which requests are sampled.
    pub sampler: Sampler,
    /// In which forms callers may say of which trace they are.
    pub formats: PropagationFormats,
    /// Whether spans tell what was asked for: keys and values of descriptors.
    pub shows_descriptors: bool,
    /// Where spans go.
    pub span_queue: Arc<SpanQueue>,
}

impl Tracer {
    /// The span of a request with these headers, if it is sampled.
    pub fn begin<'h>(&self, name: &'static str, header: impl Fn(&'static str) -> Option<&'h [u8]>) -> Option<Span> {
        let ids = RandomIdGenerator::default();
        let RemoteParent { ids: remote, sampled } = self.formats.remote(&header);
        let decided = sampled.filter(|_| self.sampler.follows_parent);
        if decided == Some(false) {
            return None;
        }
        let trace = remote.map_or_else(|| ids.new_trace_id(), |(trace, _)| trace);
        if decided.is_none() && !self.sampler.samples(trace) {
            return None;
        }
        let parent = remote.map_or(SpanId::INVALID, |(_, span)| span);
        let state = remote.map(|_| propagation::trace_state(&header)).unwrap_or_default();
        let context = SpanContext::new(trace, ids.new_span_id(), TraceFlags::SAMPLED, false, state);
        Some(Span::new(name, SpanKind::Server, (context, Arc::clone(&self.span_queue)), (parent, remote.is_some())))
    }
}

/// Where a span stands: what its children and links to it need to know, while it lasts and later.
#[derive(Clone, Debug)]
pub struct SpanRef(Arc<SpanIdentity>);

#[derive(Debug)]
struct SpanIdentity {
    context: SpanContext,
    span_queue: Arc<SpanQueue>,
}

impl SpanRef {
    /// A span below this one.
    pub fn child(&self, name: &'static str, kind: SpanKind) -> Span {
        let SpanIdentity { context, span_queue } = &*self.0;
        let id = RandomIdGenerator::default().new_span_id();
        let state = context.trace_state().clone();
        let own = SpanContext::new(context.trace_id(), id, TraceFlags::SAMPLED, false, state);
        Span::new(name, kind, (own, Arc::clone(span_queue)), (context.span_id(), false))
    }
}

/// Something that takes its time; sent when dropped.
#[derive(Debug)]
pub struct Span {
    span_ref: SpanRef,
    started: Instant,
    /// There until it is dropped.
    data: Option<Box<SpanData>>,
}

impl Span {
    fn new(
        name: &'static str,
        kind: SpanKind,
        (context, span_queue): (SpanContext, Arc<SpanQueue>),
        (parent, parent_is_remote): (SpanId, bool),
    ) -> Self {
        let now = SystemTime::now();
        let data = SpanData {
            span_context: context.clone(),
            parent_span_id: parent,
            parent_span_is_remote: parent_is_remote,
            span_kind: kind,
            name: Cow::Borrowed(name),
            start_time: now,
            end_time: now,
            attributes: Vec::with_capacity(8),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: span_queue.scope(),
        };
        Self {
            span_ref: SpanRef(Arc::new(SpanIdentity { context, span_queue })),
            started: Instant::now(),
            data: Some(Box::new(data)),
        }
    }

    /// Where it stands.
    pub const fn span_ref(&self) -> &SpanRef {
        &self.span_ref
    }

    /// Notes a number or a word.
    pub fn note(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(data) = &mut self.data {
            data.attributes.push(KeyValue::new(key, value));
        }
    }

    /// Notes what may have been noted before, and then holds no more.
    pub fn replace(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(data) = &mut self.data {
            data.attributes.retain(|attribute| attribute.key.as_str() != key);
        }
        self.note(key, value);
    }

    /// Notes a text that came from outside: no more of it than [`MAX_TEXT_BYTES`].
    pub fn note_text(&mut self, key: &'static str, text: &str) {
        let cut = (0..=text.len().min(MAX_TEXT_BYTES)).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        self.note(key, text[..cut].to_owned());
    }

    /// Notes what went wrong: a word for its kind, and the whole of it.
    pub fn fail(&mut self, kind: &'static str, why: impl Into<Cow<'static, str>>) {
        self.note("error.type", kind);
        if let Some(data) = &mut self.data {
            data.status = Status::error(why);
        }
    }

    /// Says that another span has to do with it; what is past [`MAX_LINKS`] is counted only.
    pub fn link(&mut self, other: &SpanRef) {
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
            // By the clock that does not jump: a span never ends before it begins.
            data.end_time = data.start_time + self.started.elapsed();
            self.span_ref.0.span_queue.push(*data);
        }
    }
}
