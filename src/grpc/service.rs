//! `ShouldRateLimit`: one question, one answer.
//!
//! The time and the rules are taken here, once for each request, and passed down. A decision by memory never waits; one
//! by Redis waits as long as the caller's deadline and the store's allow, and keeps the rules meanwhile. An
//! answer that a leaky bucket holds sleeps here, after the rules were let go, and costs a timer. This is the only
//! place where errors become gRPC codes. What a caller sends besides the message (its deadline, the trace that it is
//! of) is read here too.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use tonic::{Code, Response, Status};

use super::{decode, encode, spans};
use crate::clock::{Clock, micros};
use crate::config::live::{LiveRules, LoadedRules};
use crate::decide::{DecideError, Decider, DecisionContext};
use crate::decision::Decision;
use crate::pb::rate_limit_service_server::RateLimitService;
use crate::pb::{METHOD, RateLimitRequest, RateLimitResponse};
use crate::request::Request;
use crate::telemetry::traces::{Span, SpanKind, Tracer};

/// Answers requests, whichever way they came in.
#[derive(Debug)]
pub struct Service {
    /// Where the time comes from.
    pub clock: Clock,
    /// The rules in force.
    pub rules: Arc<LiveRules>,
    /// What decides.
    pub decider: Decider,
    /// What begins traces, if any are wanted.
    pub tracer: Option<Tracer>,
    held: AtomicUsize,
}

/// The most descriptors that one request may have: many times what any proxy sends, and little enough that a request
/// costs its sender more than it costs us.
pub const MOST_DESCRIPTORS: usize = 10_000;

/// How long a caller is taken to wait if it does not say.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(30);
/// The longest an answer is held, whatever a caller says.
const LONGEST_HOLD: Duration = Duration::from_secs(3600);
/// What a decision needs after the store's answer, or in place of it, to reach its caller before the deadline.
const ANSWER_MARGIN: Duration = Duration::from_millis(5);
/// What a held answer needs to reach its caller before the deadline.
const RETURN_MARGIN: Duration = Duration::from_millis(2);

/// Why a request was not answered. Whose fault it is shows in [`AnswerError::code`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The caller's fault.
    #[error("rate limit descriptor list has {count} entries, more than {MOST_DESCRIPTORS}")]
    TooManyDescriptors {
        /// How many there are.
        count: usize,
    },
    /// There is no decision.
    #[error(transparent)]
    Undecided(#[from] DecideError),
}

/// Response to a request, and its delay.
#[derive(Clone, Debug, PartialEq)]
pub struct DelayedResponse {
    /// The response.
    pub response: RateLimitResponse,
    /// Time from the decision until the response is due; zero unless a leaky bucket delays it.
    pub delay: Duration,
}

impl DelayedResponse {
    fn of(decision: &Decision<'_>) -> Self {
        Self { response: encode::response(decision), delay: Duration::from_micros(decision.delay_us) }
    }
}

impl AnswerError {
    /// The gRPC code of this error. Envoy treats all but OK alike: its `failure_mode_deny` decides.
    pub const fn code(&self) -> Code {
        match self {
            Self::TooManyDescriptors { .. }
            | Self::Undecided(DecideError::EmptyDomain | DecideError::NoDescriptors) => Code::InvalidArgument,
            Self::Undecided(DecideError::NoRules | DecideError::Store) => Code::Unavailable,
        }
    }
}

impl Service {
    /// A service that holds no answer yet.
    pub const fn new(clock: Clock, rules: Arc<LiveRules>, decider: Decider) -> Self {
        Self { clock, rules, decider, tracer: None, held: AtomicUsize::new(0) }
    }

    /// The span of a request with these headers, if it is sampled.
    pub fn begin<'h>(&self, name: &'static str, header: impl Fn(&'static str) -> Option<&'h [u8]>) -> Option<Span> {
        self.tracer.as_ref()?.begin(name, header)
    }

    /// Answers a call that came with these headers.
    pub(super) async fn call(&self, headers: &HeaderMap, request: &Request<'_>) -> Result<RateLimitResponse, Status> {
        let deadline = deadline(headers).unwrap_or(DEFAULT_DEADLINE);
        let mut span = self.begin(METHOD, |name| headers.get(name).map(HeaderValue::as_bytes));
        if let Some(span) = &mut span {
            spans::begin_call(span);
        }
        let (answer, took) = self.answer_timed(request, deadline, span.as_ref()).await;
        if let Some(took) = took {
            self.decider.metrics.calls.observe(took);
        }
        if let Some(span) = span {
            spans::end_call(span, answer.as_ref().err());
        }
        answer.map_err(|error| Status::new(error.code(), error.to_string()))
    }

    /// Decides a request, and holds the answer for as long as the decision says. `deadline` is how long the caller
    /// waits from now on; `span` is that of the whole request.
    pub async fn answer(
        &self,
        request: &Request<'_>,
        deadline: Duration,
        span: Option<&Span>,
    ) -> Result<RateLimitResponse, AnswerError> {
        self.answer_timed(request, deadline, span).await.0
    }

    /// The same, and how long it took, if that is of interest.
    async fn answer_timed(
        &self,
        request: &Request<'_>,
        deadline: Duration,
        span: Option<&Span>,
    ) -> (Result<RateLimitResponse, AnswerError>, Option<Duration>) {
        let metrics = &self.decider.metrics;
        let begun = metrics.begin();
        let span = span.map(|span| span.span_ref().child("decide", SpanKind::Internal));
        let decided = self.decide(request, deadline, span.as_ref()).await;
        let took = begun.map(|begun| begun.elapsed());
        if let Some(took) = took {
            metrics.decisions.observe(took);
        }
        if decided.as_ref().is_err_and(|error| *error != AnswerError::Undecided(DecideError::Store)) {
            metrics.record_service_error();
        }
        if let Some(span) = span {
            let shows_descriptors = self.tracer.as_ref().is_some_and(|tracer| tracer.shows_descriptors);
            spans::conclude(span, request, &decided, shows_descriptors);
        }
        match decided {
            Ok(DelayedResponse { response, delay: Duration::ZERO }) => (Ok(response), took),
            Ok(DelayedResponse { response, delay }) => {
                let _held = Held::new(&self.held);
                tokio::time::sleep(delay).await;
                (Ok(response), begun.map(|begun| begun.elapsed()))
            }
            Err(error) => (Err(error), took),
        }
    }

    /// How many answers are held now: decided, and not yet due.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Decides a request; returns the response and the delay before it is due. `span` is that of the decision.
    ///
    /// # Errors
    /// The request is invalid, or there is no decision.
    pub async fn decide(
        &self,
        request: &Request<'_>,
        deadline: Duration,
        span: Option<&Span>,
    ) -> Result<DelayedResponse, AnswerError> {
        check_size(request)?;
        if let Some(decided) = self.decide_now(request, deadline) {
            return decided;
        }
        // Boxed, so that futures of immediate decisions stay small.
        Box::pin(self.decide_later(request, deadline, span)).await
    }

    /// Decides with an immediate store; `None` if the store is not immediate.
    fn decide_now(&self, request: &Request<'_>, deadline: Duration) -> Option<Result<DelayedResponse, AnswerError>> {
        if !self.decider.store.is_immediate() {
            return None;
        }
        // A guard is cheaper than an `Arc` of the rules, but must not be kept across an await.
        let rules = self.rules.load();
        let decision = self.decider.decide_now(self.context(rules.as_deref(), deadline), request)?;
        Some(decision.map(|decision| DelayedResponse::of(&decision)).map_err(AnswerError::from))
    }

    async fn decide_later(
        &self,
        request: &Request<'_>,
        deadline: Duration,
        span: Option<&Span>,
    ) -> Result<DelayedResponse, AnswerError> {
        let rules = self.rules.load_full();
        let context =
            DecisionContext { span_ref: span.map(Span::span_ref), ..self.context(rules.as_deref(), deadline) };
        Ok(DelayedResponse::of(&self.decider.decide(context, request).await?))
    }

    /// What is taken once for a decision that is needed within `deadline` from now.
    pub fn context<'r>(&self, rules: Option<&'r LoadedRules>, deadline: Duration) -> DecisionContext<'r> {
        let store_time = self.decider.store.timeout().min(deadline.saturating_sub(ANSWER_MARGIN));
        let hold = deadline.saturating_sub(store_time + RETURN_MARGIN).min(LONGEST_HOLD);
        DecisionContext {
            rules: rules.map(|loaded| &loaded.rules),
            now: self.clock.now(),
            max_delay_us: micros(hold),
            deadline: (!store_time.is_zero()).then(|| Instant::now() + store_time),
            span_ref: None,
        }
    }
}

fn check_size(request: &Request<'_>) -> Result<(), AnswerError> {
    match request.descriptors.len() {
        0..=MOST_DESCRIPTORS => Ok(()),
        count => Err(AnswerError::TooManyDescriptors { count }),
    }
}

/// Counts an answer for as long as it is held, also if its caller gives up.
struct Held<'a>(&'a AtomicUsize);

impl<'a> Held<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The service as tonic serves it.
#[derive(Clone, Debug)]
pub struct Rpc(pub Arc<Service>);

#[tonic::async_trait]
impl RateLimitService for Rpc {
    async fn should_rate_limit(
        &self,
        request: tonic::Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let (metadata, _, message) = request.into_parts();
        self.0.call(&metadata.into_headers(), &decode::request(&message)).await.map(Response::new)
    }
}

/// What `grpc-timeout` says: up to eight digits and a unit. `None` if it is not there or says nothing.
fn deadline(headers: &HeaderMap) -> Option<Duration> {
    static GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
    let text = headers.get(&GRPC_TIMEOUT)?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = (digits.len() <= 8).then(|| digits.parse().ok())??;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}
