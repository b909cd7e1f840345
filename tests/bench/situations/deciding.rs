//! A decision with counters in memory: matching, charges, counting, and one verdict.

use std::hint::black_box;
use std::sync::Arc;

use tollkeeper::base::clock::Clock;
use tollkeeper::base::pb::codec::GRPC_FRAME_HEAD_BYTES;
use tollkeeper::decide::decider::Decider;
use tollkeeper::decide::log::value_form::ValueForm;
use tollkeeper::decide::log::{DecisionLog, LogHeaderContext};
use tollkeeper::limit::request::Request;
use tollkeeper::rules::live::{LiveRules, RuleSetOrigin};
use tollkeeper::rules::rule::Domain;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService};
use tollkeeper::settings::Settings;
use tollkeeper::settings::decisions::LimitHeaderNames;
use tollkeeper::store::memory::MemoryStore;
use tollkeeper::telemetry::service_metrics::ServiceMetrics;

use super::{BEGIN, CAPACITY_BYTES, NAME_BYTES, Situation, USERS, Walk, frame, key, many_rules};

/// Maximum number of descriptors of a request.
const MAX_DESCRIPTORS: usize = 10;
/// Limit that rejects nothing, with a counter that lives for hours.
const GENEROUS: &str = "{unit: day, requests_per_unit: 10, bucket_size: 4000000000, algorithm: token_bucket}";
/// Limit that rejects the second hit of the day.
const STINGY: &str = "{unit: day, requests_per_unit: 1, algorithm: fixed_window}";

/// Properties that differ between decisions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Number of descriptors; each matches its own rule.
    pub(crate) descriptors: usize,
    /// Number of rules, at least ten.
    pub(crate) rules: usize,
    /// True if each descriptor is rejected.
    pub(crate) rejected: bool,
    /// True if metrics are counted.
    pub(crate) metrics: bool,
    /// Number of rejected keys that the metrics track.
    pub(crate) top_keys: usize,
    /// True if the response has headers that describe the limits.
    pub(crate) headers: bool,
    /// Share of the keys in the decision log, as text; the log goes to /dev/null. Empty: no log.
    pub(crate) logged: &'static str,
}

impl Default for Options {
    /// One descriptor, admitted; counted; no headers.
    fn default() -> Self {
        Self {
            descriptors: 1,
            rules: 10,
            rejected: false,
            metrics: true,
            top_keys: 2048 * MAX_DESCRIPTORS,
            headers: false,
            logged: "",
        }
    }
}

impl Options {
    /// A service with these rules, and no counters yet.
    pub(super) fn service(self) -> RateLimitService {
        let (settings, _) = Settings::from_env(std::iter::empty()).expect("what is by default is right");
        let mut behaviour = settings.decisions;
        let [limit, remaining, reset] =
            ["RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"].map(str::to_owned);
        behaviour.limit_headers = self.headers.then_some(LimitHeaderNames { limit, remaining, reset });
        let metrics = ServiceMetrics::new(settings.metrics.max_request_series, self.top_keys);
        let metrics = if self.metrics { metrics } else { metrics.without_request_counts() };
        let mut decider = Decider::new(MemoryStore::new(CAPACITY_BYTES).into(), behaviour, Arc::new(metrics));
        decider.log = (!self.logged.is_empty()).then(|| Arc::new(log(self.logged)));
        let service = RateLimitService::new(Clock::manual(BEGIN), Arc::new(LiveRules::default()), decider);
        let rules = RuleSet::from_domains(self.rules(), &service.decider.metrics.limits);
        assert_eq!(rules.rule_count(), self.rules);
        service.rules.replace_rules(rules, RuleSetOrigin::default(), BEGIN);
        service
    }

    /// Ten rules that are met, and the others.
    fn rules(self) -> Vec<Domain> {
        let limit = if self.rejected { STINGY } else { GENEROUS };
        let met = (0..MAX_DESCRIPTORS).map(|i| format!("- {{key: {}, rate_limit: {limit}}}\n", key(i)));
        let other = format!("- {{key: path, value: /, rate_limit: {limit}}}\n");
        let descriptors: String = met.chain([other]).collect();
        many_rules(&descriptors, self.rules - MAX_DESCRIPTORS, |i, node| {
            node.value = format!("/service/{i}/items").into();
        })
    }
}

/// Log of all decisions on a share of the keys.
fn log(share: &str) -> DecisionLog {
    let vars = [
        ("TOLLKEEPER_DECISION_LOG", "file:/dev/null"),
        ("TOLLKEEPER_DECISION_LOG_WHEN", "all"),
        ("TOLLKEEPER_DECISION_LOG_SAMPLE", share),
    ];
    let vars = vars.into_iter().map(|(name, value)| (name.into(), value.into()));
    let (settings, _) = Settings::from_env(vars).expect("the settings are valid");
    let log = settings.decision_log.as_ref().expect("it is on");
    let facts = LogHeaderContext::new(&settings, Clock::manual(BEGIN));
    DecisionLog::start(log, ValueForm::Plain, facts).expect("a thread can be started")
}

/// Decisions on requests of all users in turn.
pub(crate) struct Deciding {
    service: RateLimitService,
    requests: Vec<Request<'static>>,
    walk: Walk,
}

impl Deciding {
    pub(crate) fn new(options: Options) -> Self {
        let requests = (0..USERS).map(|user| request(user, options.descriptors)).collect();
        let situation = Self { service: options.service(), requests, walk: Walk::over(USERS) };
        let mut situation = situation.warmed();
        let rejected = (0..USERS).filter(|_| situation.rejects()).count();
        assert_eq!(rejected, if options.rejected { USERS } else { 0 });
        situation
    }

    /// Decides the next request; true if it is rejected.
    fn rejects(&mut self) -> bool {
        let service = &self.service;
        service.clock.set(service.clock.now().plus_us(1));
        let request = black_box(&self.requests[self.walk.next()]);
        let rules = service.rules.current_rules();
        let context = service.build_decision_context(rules.as_deref(), DEFAULT_CALLER_DEADLINE);
        let decision = black_box(service.decider.decide_synchronously(context, request));
        decision.expect("it is decided").over_limit
    }
}

impl Situation for Deciding {
    fn step(&mut self) {
        black_box(self.rejects());
    }

    fn inputs(&self) -> usize {
        USERS
    }
}

/// Request of a user; leaks its few bytes.
pub(super) fn request(user: usize, descriptors: usize) -> Request<'static> {
    let frame: &'static [u8] = frame(user, descriptors, NAME_BYTES).to_vec().leak();
    decode::decode_borrowed_request(&frame[GRPC_FRAME_HEAD_BYTES..]).expect("nothing in it is unusual")
}
