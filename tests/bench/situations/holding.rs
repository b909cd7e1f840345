//! Streams with counters in memory: whole decisions that take a slot and free it, or reserve an estimate and settle it.

use std::hint::black_box;
use std::sync::Arc;

use tollkeeper::base::clock::Clock;
use tollkeeper::decide::decider::Decider;
use tollkeeper::limit::request::{Descriptor, Entry, Hits, Request};
use tollkeeper::rules::live::{LiveRules, RuleSetOrigin};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService};
use tollkeeper::settings::Settings;
use tollkeeper::store::memory::MemoryStore;
use tollkeeper::telemetry::service_metrics::ServiceMetrics;

use super::{BEGIN, CAPACITY_BYTES, DOMAIN, Situation, rules};

/// Room for the tables of a million slots, which get a quarter of it.
const ROOM_BYTES: u64 = 2 * CAPACITY_BYTES;

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// One decision by a fixed window, for comparison.
    FixedWindow,
    /// A stream begins and ends, or reserves and settles: two decisions.
    Stream,
    /// A stream is rejected.
    Rejection,
    /// A stream is rejected after a walk over all slots, which is due once a second.
    Walk,
}

/// Streams of one user, beside those that stay open.
pub(crate) struct Holding {
    service: RateLimitService,
    step: Step,
    names: Vec<String>,
    at: usize,
}

impl Holding {
    /// Decisions by a fixed window.
    pub(crate) fn fixed_window() -> Self {
        let limit = "{unit: day, requests_per_unit: 4000000000, algorithm: fixed_window}";
        Self::new(Step::FixedWindow, limit, 0)
    }

    /// Streams that begin and end, while `open` others go on.
    pub(crate) fn streams(open: usize) -> Self {
        Self::new(Step::Stream, &format!("{{concurrent: {}, max_duration: 8000h}}", open + 1), open)
    }

    /// Streams that reserve an estimate and settle it, while `open` others go on.
    pub(crate) fn reservations(open: usize) -> Self {
        let limit = "{unit: day, requests_per_unit: 4000000000, algorithm: fixed_window, reservations: 24h}";
        Self::new(Step::Stream, limit, open)
    }

    /// Rejected streams, as `open` others use up the limit.
    pub(crate) fn rejections(open: usize) -> Self {
        Self::new(Step::Rejection, &format!("{{concurrent: {open}, max_duration: 8000h}}"), open)
    }

    /// Rejected streams that look at all of the `open` slots.
    #[allow(dead_code, reason = "timed only: its instructions say little")]
    pub(crate) fn walks(open: usize) -> Self {
        Self::new(Step::Walk, &format!("{{concurrent: {open}, max_duration: 8000h}}"), open)
    }

    fn new(step: Step, limit: &str, open: usize) -> Self {
        let (settings, _) = Settings::from_env(std::iter::empty()).expect("what is by default is right");
        let metrics = Arc::new(ServiceMetrics::new(settings.metrics.max_request_series, 20_000));
        let decider = Decider::new(MemoryStore::new(ROOM_BYTES).into(), settings.decisions, metrics);
        let service = RateLimitService::new(Clock::manual(BEGIN), Arc::new(LiveRules::default()), decider);
        let domains = rules(&format!("- {{key: user, rate_limit: {limit}}}\n"));
        let set = RuleSet::from_domains(domains, &service.decider.metrics.limits);
        service.rules.replace_rules(set, RuleSetOrigin::default(), BEGIN);
        let names = (0..1000).map(|name| format!("stream-{name:06}")).collect();
        let situation = Self { service, step, names, at: 0 };
        for stream in 0..open {
            assert!(situation.decide(&format!("open-{stream}"), None).is_some(), "a slot is free");
        }
        situation.warmed()
    }

    /// Asks for the slot of a stream, or frees it with its token; returns the token of an admitted request.
    fn decide(&self, stream: &str, release: Option<&str>) -> Option<String> {
        let mut entries = smallvec::smallvec![Entry { key: b"user", value: b"user-00000ann" }];
        if self.step != Step::FixedWindow {
            entries.push(Entry { key: b"slot", value: stream.as_bytes() });
        }
        entries.extend(release.map(|token| Entry { key: b"release", value: token.as_bytes() }));
        let descriptor = Descriptor { entries, hits: Hits::Charge(1), hits_addend: None, limit_override: None };
        let request = Request { domain: DOMAIN, descriptors: smallvec::smallvec![descriptor], hits_addend: 0 };
        let rules = self.service.rules.current_rules();
        let context = self.service.build_decision_context(rules.as_deref(), DEFAULT_CALLER_DEADLINE);
        let decision = self.service.decider.decide_synchronously(context, black_box(&request)).expect("it is decided");
        if decision.over_limit {
            return None;
        }
        let token = decision.metadata.as_ref().and_then(|metadata| metadata.get("slot"));
        Some(token.and_then(|token| token.as_str()).unwrap_or_default().to_owned())
    }
}

impl Situation for Holding {
    fn step(&mut self) {
        let pause_us = if self.step == Step::Walk { 1_000_000 } else { 1 };
        self.service.clock.set(self.service.clock.now().plus_us(pause_us));
        self.at = (self.at + 1) % self.names.len();
        let stream = &self.names[self.at];
        let token = black_box(self.decide(stream, None));
        match self.step {
            Step::FixedWindow => assert!(token.is_some(), "the limit is high"),
            Step::Stream => {
                let token = token.expect("a slot is free");
                black_box(self.decide(stream, Some(&token)));
            }
            Step::Rejection | Step::Walk => assert_eq!(token, None, "no slot is free"),
        }
    }

    fn inputs(&self) -> usize {
        // Few, because a walk takes long.
        if self.step == Step::Walk { 3 } else { self.names.len() }
    }
}
