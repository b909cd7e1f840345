//! The decision path in this process: settings, rules and a manual clock.
//!
//! The kit assembles it as the server does, from an environment and the text of rule files, and calls it with decoded
//! wire messages. Responses are not delayed; they carry the delay instead.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::LazyLock;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::runtime::Runtime;
use tollkeeper::base::clock::{Clock, Time};
use tollkeeper::base::pb::rate_limit_descriptor::{Entry, RateLimitOverride};
use tollkeeper::base::pb::rate_limit_response::{Code, DescriptorStatus};
use tollkeeper::base::pb::{RateLimitDescriptor, RateLimitRequest, RateLimitResponse};
use tollkeeper::decide::decider::Decider;
use tollkeeper::decide::log::header::{self, RuleSetRecord};
use tollkeeper::decide::log::{self, DecisionLog, LogHeaderContext};
use tollkeeper::limit::request::Request;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{CompiledRules, RuleText, compile_texts};
use tollkeeper::rules::live::{LiveRules, RuleSetOrigin};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::source::SourceRules;
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::encode::{AnswerError, ResponseWithDelay};
use tollkeeper::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService};
use tollkeeper::settings::Settings;
use tollkeeper::store::Store;
use tollkeeper::store::memory::MemoryStore;

/// The decision path with a manual clock.
#[derive(Debug)]
pub struct TestService {
    /// The service under test.
    pub inner: RateLimitService,
    options: CompileOptions,
}

impl TestService {
    /// Settings from these variables; no rules yet, at `start`.
    pub fn new<N: AsRef<str>>(env: impl IntoIterator<Item = (N, N)>, start: Time) -> Self {
        let variables = env.into_iter().map(|(name, value)| (OsString::from(name.as_ref()), value.as_ref().into()));
        let (settings, _) = Settings::from_env(variables).expect("the settings are valid");
        let options = CompileOptions {
            merge_domains: settings.rules.merge_domains,
            calendar_months: settings.decisions.calendar_months,
            log_max: settings.decisions.log_max,
            on_store_error: settings.rules.on_store_error,
            ..CompileOptions::default()
        };
        let memory = MemoryStore::new(settings.memory.capacity_bytes as u64);
        let clock = Clock::manual(start);
        let log = settings.decision_log.as_ref().map(|log| {
            let values = log::check_sinks_and_build_value_form(log).expect("the log can be opened");
            let facts = LogHeaderContext::new(&settings, clock.clone());
            Arc::new(DecisionLog::start(log, values, facts).expect("threads can be started"))
        });
        let mut decider = Decider::new(memory.into(), settings.decisions, Arc::default());
        decider.log = log;
        let service = RateLimitService::new(clock, Arc::new(LiveRules::default()), decider);
        Self { inner: service, options }
    }

    /// Replaces the store of the counters.
    pub fn with_store(mut self, store: Store) -> Self {
        self.inner.decider.store = store;
        self
    }

    /// Replaces the rules; each file is a name and a text.
    pub fn load<N: AsRef<str>>(&self, files: impl IntoIterator<Item = (N, N)>) {
        let sources: Vec<RuleText> = files
            .into_iter()
            .map(|(name, text)| RuleText {
                name: Arc::from(name.as_ref()),
                bytes: text.as_ref().as_bytes().to_vec(),
                documents: DocumentSelection::FirstOnly,
            })
            .collect();
        let compiled = compile_texts(&sources, &self.options).unwrap_or_else(|found| panic!("{found}"));
        let recorded =
            header::build_rule_set_record(&SourceRules::Texts(sources.into()), None, &self.options.rule_defaults);
        self.replace(compiled, recorded);
    }

    /// Replaces the rules by compiled ones, which the decision log records so.
    pub fn replace(&self, compiled: CompiledRules, recorded: RuleSetRecord) {
        let names = recorded.documents.iter().map(|document| Arc::from(document.name.as_str())).collect();
        let from = RuleSetOrigin { names, ..RuleSetOrigin::default() };
        let mut rules = RuleSet::from_domains(compiled.domains, &self.inner.decider.metrics.limits);
        if let Some(log) = &self.inner.decider.log {
            rules.id = recorded.id.as_str().into();
            log.write_header(Some(recorded));
        }
        self.inner.rules.replace_rules(rules, from, self.now());
    }

    /// Writes all records of the decision log and ends it.
    pub fn finish_log(&self) {
        let log = self.inner.decider.log.as_ref().expect("TOLLKEEPER_DECISION_LOG is set");
        assert!(log.flush_and_end(Duration::from_secs(30)), "a sink did not take the records");
    }

    /// Current time of the manual clock.
    pub fn now(&self) -> Time {
        self.inner.clock.now()
    }

    /// Advances the clock, in microseconds.
    pub fn advance_us(&self, micros: u64) {
        self.inner.clock.set(self.now().plus_us(micros));
    }

    /// Decides a request with the default deadline.
    pub fn decide(&self, request: &TestRequest) -> Result<TestResponse, AnswerError> {
        self.decide_within(request, DEFAULT_CALLER_DEADLINE)
    }

    /// Decides a request with this deadline.
    pub fn decide_within(&self, request: &TestRequest, deadline: Duration) -> Result<TestResponse, AnswerError> {
        let request = decode::convert_request(&request.0);
        let decided = decide_within(&self.inner, &request, deadline);
        match self.inner.decider.store.is_immediate() {
            true => decided.now_or_never().expect("an immediate store answers at once"),
            false => store_runtime().block_on(decided),
        }
    }
}

/// Decides a request with this deadline, and returns the response with its delay, without waiting for it.
pub async fn decide_within(
    service: &RateLimitService,
    request: &Request<'_>,
    deadline: Duration,
) -> Result<TestResponse, AnswerError> {
    decode::check_descriptor_count(request, service.max_descriptors)?;
    let (rules, decider) = (service.rules.current_rules_owned(), &service.decider);
    let context = service.build_decision_context(rules.as_deref(), deadline);
    let decision = match decider.store.is_immediate() {
        true => decider.decide_synchronously(context, request)?,
        false => decider.decide(context, request).await?,
    };
    let ResponseWithDelay { response, delay } = ResponseWithDelay::from_decision(&decision);
    Ok(TestResponse { response, delay })
}

/// Runtime of stores that wait; it lives until the process ends.
pub fn store_runtime() -> &'static Runtime {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
    });
    &RUNTIME
}

/// Builds a request; methods about a descriptor change the last one.
#[derive(Clone, Debug)]
pub struct TestRequest(pub RateLimitRequest);

impl TestRequest {
    /// A request for a domain, without descriptors.
    pub fn new(domain: &str) -> Self {
        Self(RateLimitRequest { domain: domain.to_owned(), ..RateLimitRequest::default() })
    }

    /// Adds a descriptor of these keys and values.
    pub fn descriptor(mut self, entries: &[(&str, &str)]) -> Self {
        let entry = |(key, value): &(&str, &str)| Entry {
            key: key.as_bytes().to_vec().into(),
            value: value.as_bytes().to_vec().into(),
        };
        let entries = entries.iter().map(entry).collect();
        self.0.descriptors.push(RateLimitDescriptor { entries, ..RateLimitDescriptor::default() });
        self
    }

    /// Sets the hits of the last descriptor.
    pub fn hits(mut self, hits: u64) -> Self {
        self.last().hits_addend = Some(hits);
        self
    }

    /// Makes the last descriptor a refund of `hits` hits.
    pub fn refund(mut self, hits: u64) -> Self {
        self.last().is_negative_hits = true;
        self.hits(hits)
    }

    /// Overrides the limit of the last descriptor: requests per unit, enum value of the unit, multiplier.
    pub fn limit(mut self, requests_per_unit: u32, unit: i32, unit_multiplier: Option<u32>) -> Self {
        self.last().limit = Some(RateLimitOverride { requests_per_unit, unit, unit_multiplier });
        self
    }

    /// Sets the hits of descriptors without their own.
    pub fn request_hits(mut self, hits: u32) -> Self {
        self.0.hits_addend = hits;
        self
    }

    fn last(&mut self) -> &mut RateLimitDescriptor {
        self.0.descriptors.last_mut().expect("there is a descriptor")
    }
}

/// A response, and the delay that the server would have added.
#[derive(Clone, Debug)]
pub struct TestResponse {
    /// The message as sent to the client.
    pub response: RateLimitResponse,
    /// Delay of the response.
    pub delay: Duration,
}

impl TestResponse {
    /// True if the request is rejected.
    pub fn over_limit(&self) -> bool {
        self.response.overall_code() == Code::OverLimit
    }

    /// For each descriptor, whether it is over its limit and what remains.
    pub fn statuses(&self) -> Vec<(bool, u32)> {
        let seen = |status: &DescriptorStatus| (status.code() == Code::OverLimit, status.limit_remaining);
        self.response.statuses.iter().map(seen).collect()
    }

    /// One line: the verdict, then for each descriptor its verdict, limit, remaining hits and seconds to the reset,
    /// then the headers.
    ///
    /// `OVER [OK 5/MINUTE left 3 in 12 s, OVER n: 7/2 DAY left 0 in 1 s, OK, OK unlimited] Retry-After: 1`
    pub fn text(&self) -> String {
        let statuses: Vec<String> = self.response.statuses.iter().map(status_text).collect();
        let mut text = format!("{} [{}]", code_text(self.response.overall_code()), statuses.join(", "));
        for header in &self.response.response_headers_to_add {
            let _ = write!(text, " {}: {}", header.key, header.value);
        }
        text
    }
}

fn code_text(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::OverLimit => "OVER",
        Code::Unknown => "UNKNOWN",
    }
}

fn status_text(status: &DescriptorStatus) -> String {
    let code = code_text(status.code());
    let Some(limit) = &status.current_limit else {
        return match status.limit_remaining {
            0 => code.to_owned(),
            u32::MAX => format!("{code} unlimited"),
            left => format!("{code} left {left}"),
        };
    };
    let name = if limit.name.is_empty() { String::new() } else { format!("{}: ", limit.name) };
    let multiplier = limit.unit_multiplier.map_or_else(String::new, |multiplier| format!("{multiplier} "));
    let seconds = status.duration_until_reset.map_or(-1, |duration| duration.seconds);
    let (limit, unit) = (limit.requests_per_unit, limit.unit().as_str_name());
    format!("{code} {name}{limit}/{multiplier}{unit} left {} in {seconds} s", status.limit_remaining)
}
