//! `ShouldRateLimit`: one request, one response, one span.
//!
//! [`ShouldRateLimitMethod`] reads the message of a call and frames the response, without tonic's router, boxed futures
//! and boxed bodies, which cost more than the decision. [`RateLimitService`] answers a decoded request, also for
//! `/json`: it takes the time and the rules once and passes them down.
//!
//! An immediate store (the memory store) completes its charges in the call that makes them, so a decision by it never
//! waits. Any other decision waits no longer than the caller's deadline and the store's timeout allow, and keeps its
//! rules meanwhile. A response that a leaky bucket delays sleeps here, after the rules were released, and costs a
//! timer. Errors get their gRPC codes in `encode` and become statuses here.
//!
//! The trace of a call is read here, and the attributes of its span are recorded. Their names follow OpenTelemetry's
//! conventions where there are any: `rpc.*` as of their release candidate. Descriptors are recorded only if the
//! operator asks for them, because keys and values may identify persons.
//!
//! Decides: how long a decision may take without a deadline (`DEFAULT_CALLER_DEADLINE`).
//! Decides: the longest delay of a response (`MAX_RESPONSE_DELAY`).
//! Decides: margins before the caller's deadline (`STORE_ANSWER_MARGIN`, `DELAYED_RESPONSE_MARGIN`).
//! Decides: a caller that goes away meanwhile: hits are not given back.
//! Decides: a release whose caller gave up (`answer_release`, `MAX_RELEASE_TASKS_KIB`); `redis_error`, `service_error`.
//! Decides: which calls have a span (health checks: none), what is in it (`MAX_RECORDED_DESCRIPTORS`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::BoxError;
use bytes::Bytes;
use hyper::body::Body;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::Instant;
use tonic::Status;

use super::call::{CallHead, MessageReader};
use super::decode;
use super::encode::{AnswerError, ResponseWithDelay};
use super::unknown_methods::RefusedCalls;
use crate::base::clock::{Clock, to_micros};
use crate::base::pb::codec::{self, encode_grpc_frame};
use crate::base::pb::rate_limit_response::Code;
use crate::base::pb::{RATE_LIMIT_METHOD_NAME, RATE_LIMIT_METHOD_PATH, RateLimitRequest, RateLimitResponse};
use crate::base::threads;
use crate::decide::decider::Decider;
use crate::decide::decision::{DecideError, DecisionContext};
use crate::decide::prepared_request::PreparedRequest;
use crate::decide::slot_entries::may_release_slot;
use crate::limit::request::Request;
use crate::limit::slot::SlotCaller;
use crate::rules::live::{LiveRules, LoadedRules};
use crate::settings::client_limits::TOLLKEEPER_MAX_DESCRIPTORS;
use crate::store::StoreContext;
use crate::telemetry::traces::{SampledTrace, Span, SpanKind, Tracer};

/// Bytes of a message that cost one of the 128 units of a task's budget, so that a connection yields after a long one.
const MESSAGE_BYTES_PER_TASK_BUDGET_UNIT: usize = 512;
/// Descriptors of a request that cost one of these units.
const DESCRIPTORS_PER_TASK_BUDGET_UNIT: usize = 4;
/// Memory of all tasks that carry out releases, in KiB. A release beyond it ends with its caller, as other calls do.
const MAX_RELEASE_TASKS_KIB: usize = 64 * 1024;
/// Memory of such a task beside its message, in bytes.
const RELEASE_TASK_BYTES: usize = 8 * 1024;

/// Answers calls of `ShouldRateLimit`.
#[derive(Clone, Debug)]
pub struct ShouldRateLimitMethod {
    service: Arc<RateLimitService>,
    max_message_bytes: usize,
    /// A permit for each KiB that tasks of releases may take.
    release_tasks: Arc<Semaphore>,
}

impl ShouldRateLimitMethod {
    /// Path of the method in HTTP/2 requests.
    pub const PATH: &'static str = RATE_LIMIT_METHOD_PATH;

    /// Creates the method of a service; messages are limited to `max_message_bytes`.
    pub fn new(service: Arc<RateLimitService>, max_message_bytes: usize) -> Self {
        Self { service, max_message_bytes, release_tasks: Arc::new(Semaphore::new(MAX_RELEASE_TASKS_KIB)) }
    }

    /// True if responses that no limit delays are ready on the first poll.
    pub fn answers_immediately(&self) -> bool {
        self.service.decider.store.is_immediate()
    }

    /// Tracer of the calls; `None`: traces are off.
    pub fn tracer(&self) -> Option<&Tracer> {
        self.service.tracer.as_ref()
    }

    /// Answers a call; returns the framed response or the status of the error.
    pub async fn answer_call<B>(&self, call: CallHead, body: B) -> Result<Bytes, Status>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    {
        let message = MessageReader::new(&call, self.max_message_bytes).read_message(body).await?;
        let mut decoded = None;
        let request = decode_message(&message, &mut decoded)?;
        if !self.answers_immediately() && may_release_slot(&request) && self.service.follows_streams() {
            let kib = (RELEASE_TASK_BYTES + message.len()).div_ceil(1024);
            let kib = u32::try_from(kib).unwrap_or(u32::MAX);
            if let Ok(permits) = Arc::clone(&self.release_tasks).try_acquire_many_owned(kib) {
                return Box::pin(self.answer_release(call, message.clone(), permits)).await;
            }
        }
        let response = self.service.answer_decoded_grpc_call(&call, &request).await;
        threads::consume_task_budget(
            message.len() / MESSAGE_BYTES_PER_TASK_BUDGET_UNIT
                + request.descriptors.len() / DESCRIPTORS_PER_TASK_BUDGET_UNIT,
        );
        Ok(encode_grpc_frame(&response?))
    }

    /// Answers a call that may free a slot, in a task: it is carried out though its caller gives up. A release that the
    /// store fails to make is repeated (`Store::give_back_slots`).
    async fn answer_release(
        &self,
        call: CallHead,
        message: Bytes,
        permits: OwnedSemaphorePermit,
    ) -> Result<Bytes, Status> {
        let service = Arc::clone(&self.service);
        let (sender, answer) = oneshot::channel();
        tokio::spawn(async move {
            let _permits = permits;
            let mut decoded = None;
            let request = match decode_message(&message, &mut decoded) {
                Ok(request) => request,
                Err(status) => return drop(sender.send(Err(status))),
            };
            let answered = service.answer_decoded_grpc_call(&call, &request).await;
            // Nobody waits if the caller gave up.
            let _unsent = sender.send(answered.map(|response| encode_grpc_frame(&response)));
        });
        answer.await.map_err(|error| Status::internal(error.to_string()))?
    }
}

/// Decodes a message; `decoded` has the parts that cannot be borrowed from it.
fn decode_message<'m>(message: &'m Bytes, decoded: &'m mut Option<RateLimitRequest>) -> Result<Request<'m>, Status> {
    Ok(match decode::decode_borrowed_request(message) {
        Some(request) => request,
        None => decode::convert_request(decoded.insert(codec::decode_with_field_bound(message.clone())?)),
    })
}

/// Answers requests of every listener.
#[derive(Debug)]
pub struct RateLimitService {
    /// Source of the time.
    pub clock: Clock,
    /// The rules that are loaded.
    pub rules: Arc<LiveRules>,
    /// Decides the requests.
    pub decider: Decider,
    /// Starts traces; `None`: traces are off.
    pub tracer: Option<Tracer>,
    /// Maximum number of descriptors of a request.
    pub max_descriptors: usize,
    /// Calls of methods that are not offered.
    pub refused_calls: RefusedCalls,
    delayed_responses: AtomicUsize,
}

/// Deadline of a caller that sends none.
pub const DEFAULT_CALLER_DEADLINE: Duration = Duration::from_secs(30);
/// Longest delay of a response, regardless of the caller's deadline.
const MAX_RESPONSE_DELAY: Duration = Duration::from_secs(3600);
/// Time reserved after the store's answer, so that the response reaches the caller before its deadline.
const STORE_ANSWER_MARGIN: Duration = Duration::from_millis(5);
/// Time reserved after a delay, so that the response reaches the caller before its deadline.
const DELAYED_RESPONSE_MARGIN: Duration = Duration::from_millis(2);

/// Deadline, span and head of the call that a request came with.
#[derive(Clone, Copy)]
struct CallContext<'c> {
    /// Time that the caller waits.
    deadline: Duration,
    /// Parent of the decision's span, if the request is sampled.
    span: Option<&'c Span>,
    /// Head of a gRPC call.
    head: Option<&'c CallHead>,
}

/// An answer, and the time that it took.
struct TimedAnswer {
    answer: Result<RateLimitResponse, AnswerError>,
    /// Duration including the delay; `None` if metrics are off.
    took: Option<Duration>,
}

impl RateLimitService {
    /// Returns true if a loaded rule has a limit that follows streams: a concurrent one, or one with reservations.
    fn follows_streams(&self) -> bool {
        self.rules.current_rules().as_deref().is_some_and(|loaded| loaded.rules.follows_streams())
    }

    /// Creates a service without a tracer, and with the default of `TOLLKEEPER_MAX_DESCRIPTORS`.
    pub fn new(clock: Clock, rules: Arc<LiveRules>, decider: Decider) -> Self {
        let max_descriptors = TOLLKEEPER_MAX_DESCRIPTORS.default();
        let (refused_calls, delayed_responses) = (RefusedCalls::new(), AtomicUsize::new(0));
        Self { clock, rules, decider, tracer: None, max_descriptors, refused_calls, delayed_responses }
    }

    /// Starts the span of a request; `None` if the request is not sampled.
    pub fn start_request_span(&self, name: &'static str, trace: Option<&SampledTrace>) -> Option<Span> {
        Some(self.tracer.as_ref()?.start_server_span(name, trace?))
    }

    /// Answers a call with this head.
    ///
    /// # Errors
    /// The request is invalid, or there is no decision.
    pub async fn answer_decoded_grpc_call(
        &self,
        head: &CallHead,
        request: &Request<'_>,
    ) -> Result<RateLimitResponse, Status> {
        let deadline = head.timeout.unwrap_or(DEFAULT_CALLER_DEADLINE);
        let mut span = self.start_request_span(RATE_LIMIT_METHOD_NAME, head.trace());
        if let Some(span) = &mut span {
            record_call_start(span);
        }
        let terms = CallContext { deadline, span: span.as_ref(), head: Some(head) };
        let TimedAnswer { answer, took } = self.answer_and_time(request, terms).await;
        if let Some(took) = took {
            self.decider.metrics.calls.observe(took);
        }
        if let Some(span) = span {
            record_call_end(span, answer.as_ref().err());
        }
        answer.map_err(|error| Status::new(error.grpc_code(), error.to_string()))
    }

    /// Decides a request, and sleeps for the delay of its response. `deadline` is the time that the caller waits from
    /// now on; `span` is the span of the request.
    ///
    /// # Errors
    /// The request is invalid, or there is no decision.
    pub async fn answer_request(
        &self,
        request: &Request<'_>,
        deadline: Duration,
        span: Option<&Span>,
    ) -> Result<RateLimitResponse, AnswerError> {
        self.answer_and_time(request, CallContext { deadline, span, head: None }).await.answer
    }

    async fn answer_and_time(&self, request: &Request<'_>, terms: CallContext<'_>) -> TimedAnswer {
        let metrics = &self.decider.metrics;
        let begun = metrics.start_timer();
        let span = terms.span.map(|span| span.span_ref().start_child_span("decide", SpanKind::Internal));
        let terms = CallContext { span: span.as_ref(), ..terms };
        let decided = if self.decider.store.is_immediate() {
            self.decide_call_synchronously(request, terms)
        } else {
            // Boxed, so that futures of immediate decisions stay small.
            Box::pin(self.decide_call(request, terms)).await
        };
        let took = begun.map(|begun| begun.elapsed());
        if let Some(took) = took {
            metrics.decisions.observe(took);
        }
        if decided.as_ref().is_err_and(|error| *error != AnswerError::Undecided(DecideError::Store)) {
            metrics.record_error_outside_store();
        }
        if decided.as_ref().is_ok_and(|decided| decided.response.overall_code() == Code::OverLimit) {
            metrics.record_rejected_request();
        }
        if let Some(span) = span {
            let shows_descriptors = self.tracer.as_ref().is_some_and(|tracer| tracer.shows_descriptors);
            let rules = self.rules.current_rules();
            let rules = rules.as_deref().filter(|_| shows_descriptors).map(|loaded| &loaded.rules);
            let prepared = rules.and_then(|rules| PreparedRequest::new(rules, SlotCaller::default(), request).ok());
            let shown = prepared.as_ref().map_or(request, PreparedRequest::request);
            record_decision(span, shown, &decided, shows_descriptors);
        }
        match decided {
            Ok(ResponseWithDelay { response, delay: Duration::ZERO }) => TimedAnswer { answer: Ok(response), took },
            Ok(ResponseWithDelay { response, delay }) => {
                let _counted = DelayedResponseGuard::new(&self.delayed_responses);
                tokio::time::sleep(delay).await;
                TimedAnswer { answer: Ok(response), took: begun.map(|begun| begun.elapsed()) }
            }
            Err(error) => TimedAnswer { answer: Err(error), took },
        }
    }

    /// Number of responses that are delayed now: decided, and not yet due.
    pub fn delayed_response_count(&self) -> usize {
        self.delayed_responses.load(Ordering::Relaxed)
    }

    fn decide_call_synchronously(
        &self,
        request: &Request<'_>,
        terms: CallContext<'_>,
    ) -> Result<ResponseWithDelay, AnswerError> {
        decode::check_descriptor_count(request, self.max_descriptors)?;
        // A guard is cheaper than an `Arc` of the rules, but must not be kept across an await.
        let rules = self.rules.current_rules();
        let context = self.build_decision_context_of_call(rules.as_deref(), terms);
        let decision = self.decider.decide_synchronously(context, request)?;
        Ok(ResponseWithDelay::from_decision(&decision))
    }

    async fn decide_call(
        &self,
        request: &Request<'_>,
        terms: CallContext<'_>,
    ) -> Result<ResponseWithDelay, AnswerError> {
        decode::check_descriptor_count(request, self.max_descriptors)?;
        let rules = self.rules.current_rules_owned();
        let context = self.build_decision_context_of_call(rules.as_deref(), terms);
        Ok(ResponseWithDelay::from_decision(&self.decider.decide(context, request).await?))
    }

    /// Context of the decision on a call.
    fn build_decision_context_of_call<'r>(
        &self,
        rules: Option<&'r LoadedRules>,
        terms: CallContext<'r>,
    ) -> DecisionContext<'r> {
        let mut context = self.build_decision_context(rules, terms.deadline);
        context.store.span_ref = terms.span.map(Span::span_ref);
        if let (Some(head), Some(_)) = (terms.head, context.rules.filter(|rules| rules.follows_streams())) {
            context.slots.holder = head.slot_holder();
        }
        context
    }

    /// Context of a decision that is due within `deadline` from now: time, rules, deadline of the store, longest delay.
    pub fn build_decision_context<'r>(
        &self,
        rules: Option<&'r LoadedRules>,
        deadline: Duration,
    ) -> DecisionContext<'r> {
        let store_time = self.decider.store.timeout().min(deadline.saturating_sub(STORE_ANSWER_MARGIN));
        let max_delay = deadline.saturating_sub(store_time + DELAYED_RESPONSE_MARGIN).min(MAX_RESPONSE_DELAY);
        DecisionContext {
            rules: rules.map(|loaded| &loaded.rules),
            max_delay_us: to_micros(max_delay),
            store: StoreContext {
                now: self.clock.now(),
                deadline: (!store_time.is_zero()).then(|| Instant::now() + store_time),
                span_ref: None,
                charge_times: &[],
            },
            slots: SlotCaller::default(),
        }
    }
}

/// Counts itself while it exists, also if the caller gives up.
struct DelayedResponseGuard<'a>(&'a AtomicUsize);

impl<'a> DelayedResponseGuard<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for DelayedResponseGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

const STATUS_CODE_ATTRIBUTE: &str = "rpc.response.status_code";

/// Maximum number of descriptors recorded of a request.
const MAX_RECORDED_DESCRIPTORS: usize = 16;

/// Records what is known at the start of a call.
fn record_call_start(span: &mut Span) {
    span.set_attribute("rpc.system.name", "grpc");
    span.set_attribute("rpc.method", RATE_LIMIT_METHOD_NAME);
    // Replaced when the call ends; stays if the caller gives up before.
    span.set_attribute(STATUS_CODE_ATTRIBUTE, "CANCELLED");
}

/// Records the end of a call.
fn record_call_end(mut span: Span, error: Option<&AnswerError>) {
    let code = error.map_or("OK", |error| grpc_code_name(error.grpc_code()));
    span.replace_attribute(STATUS_CODE_ATTRIBUTE, code);
    match error {
        // A fault of the caller is not a server error.
        Some(error) if error.grpc_code() != tonic::Code::InvalidArgument => span.set_error(code, error.to_string()),
        Some(_) | None => {}
    }
}

/// Name of a code that calls end with.
const fn grpc_code_name(code: tonic::Code) -> &'static str {
    match code {
        tonic::Code::Ok => "OK",
        tonic::Code::InvalidArgument => "INVALID_ARGUMENT",
        tonic::Code::Unavailable => "UNAVAILABLE",
        _ => "UNKNOWN",
    }
}

/// Records a decision.
fn record_decision(
    mut span: Span,
    request: &Request<'_>,
    decided: &Result<ResponseWithDelay, AnswerError>,
    shows_descriptors: bool,
) {
    span.set_text_attribute("tollkeeper.domain", request.domain);
    span.set_attribute("tollkeeper.descriptors", i64::try_from(request.descriptors.len()).unwrap_or(i64::MAX));
    if shows_descriptors {
        let descriptors = request.descriptors.iter().take(MAX_RECORDED_DESCRIPTORS).map(ToString::to_string);
        span.set_text_attribute("tollkeeper.request", &descriptors.collect::<Vec<_>>().join("; "));
    }
    match decided {
        Ok(ResponseWithDelay { response, delay }) => {
            let code = match response.overall_code() {
                Code::OverLimit => "OVER_LIMIT",
                Code::Ok => "OK",
                Code::Unknown => "UNKNOWN",
            };
            span.set_attribute("tollkeeper.code", code);
            if !delay.is_zero() {
                span.set_attribute("tollkeeper.hold_ms", i64::try_from(delay.as_millis()).unwrap_or(i64::MAX));
            }
        }
        Err(error) => span.set_error(grpc_code_name(error.grpc_code()), error.to_string()),
    }
}
