//! `config/example.yaml` does what its comments say: each rule admits its limit and rejects the next hit.

use std::ffi::OsString;
use std::sync::Arc;

use tollkeeper::base::clock::Time;
use tollkeeper::decide::decider::Decider;
use tollkeeper::decide::decision::DecisionContext;
use tollkeeper::limit::request::{Descriptor, Entry, Hits, Request};
use tollkeeper::limit::slot::SlotCaller;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::settings::Settings;
use tollkeeper::store::StoreContext;
use tollkeeper::store::memory::MemoryStore;

/// 2026-01-01 00:00:00 UTC, a Thursday: a second, a minute, an hour, a day and a week begin.
const ORIGIN: Time = Time::from_secs(1_767_225_600);

const SECOND: u64 = 1_000_000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// A gateway that has loaded the example.
struct ExampleService {
    rules: RuleSet,
    decider: Decider,
}

impl ExampleService {
    fn new() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/config/example.yaml");
        let text = std::fs::read(path).expect("it is there");
        let source = RuleText { name: Arc::from("example.yaml"), bytes: text, documents: DocumentSelection::All };
        let (settings, _) = Settings::from_env(std::iter::empty::<(OsString, OsString)>()).expect("the defaults");
        Self {
            rules: RuleSet::new(compile_texts(&[source], &CompileOptions::default()).expect("it is good").domains),
            decider: Decider::new(MemoryStore::new(1 << 22).into(), settings.decisions, Arc::default()),
        }
    }

    /// Number of `times` requests for a descriptor that pass at once.
    fn pass(&self, at_us: u64, entries: &[(&str, &str)], times: u64) -> u64 {
        let entries =
            entries.iter().map(|(key, value)| Entry { key: key.as_bytes(), value: value.as_bytes() }).collect();
        let descriptor = Descriptor { entries, hits: Hits::Charge(1), hits_addend: None, limit_override: None };
        let request = Request { domain: "example", descriptors: [descriptor].into_iter().collect(), hits_addend: 0 };
        let edge = DecisionContext {
            rules: Some(&self.rules),
            max_delay_us: 0,
            store: StoreContext { now: ORIGIN.plus_us(at_us), deadline: None, span_ref: None, charge_times: &[] },
            slots: SlotCaller::default(),
        };
        let passes = |_: &u64| {
            let decision = self.decider.decide_synchronously(edge, &request);
            !decision.expect("a good request").over_limit
        };
        u64::try_from((0..times).filter(passes).count()).expect("a small number")
    }
}

#[test]
fn each_rule_admits_its_limit_and_rejects_the_next() {
    // descriptor, hits that pass at once, time until the next calls, hits that pass then
    type Row = (&'static [(&'static str, &'static str)], u64, u64, u64);
    let table: [Row; 14] = [
        (&[("marketing", "ann")], 5, DAY, 5),
        (&[("login", "ann")], 5, MINUTE - 1, 0),
        (&[("login", "bob")], 5, MINUTE, 5),
        (&[("post", "ann")], 2, SECOND, 2),
        (&[("signup_ip", "192.0.2.1")], 10, DAY - 1, 0),
        (&[("reward_device", "a1")], 5, 7 * DAY, 5),
        (&[("message", "ann")], 300, 3 * HOUR + HOUR + HOUR / 2, 150),
        (&[("read", "ann")], 50, SECOND, 5),
        (&[("user", "ann"), ("action", "post")], 1, SECOND, 1),
        // A bucket of 150 a day refills one token every 576 s.
        (&[("user", "ann"), ("action", "friend")], 150, 576 * SECOND, 1),
        (&[("user", "ann"), ("action", "like")], 5, SECOND, 5),
        (&[("generic_key", "everyone")], 10_000, SECOND / 100, 100),
        (&[("api_key", "k1")], 20, SECOND, 10),
        (&[("api_key", "anonymous")], 30, MINUTE, 30),
    ];
    let service = ExampleService::new();
    for (entries, at_once, later_us, then) in table {
        assert_eq!(service.pass(0, entries, at_once + 50), at_once, "{entries:?}");
        assert_eq!(service.pass(later_us, entries, then + 50), then, "{entries:?}, {later_us} us later");
    }
}

#[test]
fn each_value_and_action_has_its_own_counter() {
    let service = ExampleService::new();
    for user in ["ann", "bob"] {
        assert_eq!(service.pass(0, &[("login", user)], 6), 5, "{user}");
        for (action, limit) in [("post", 1), ("friend", 150), ("like", 5)] {
            assert_eq!(service.pass(0, &[("user", user), ("action", action)], 200), limit, "{user} {action}");
        }
    }
}

#[test]
fn health_checks_are_not_limited_and_other_paths_are() {
    let service = ExampleService::new();
    assert_eq!(service.pass(0, &[("path", "/health")], 1_000), 1_000);
    assert_eq!(service.pass(0, &[("path", "/")], 1_000), 100);
}

#[test]
fn api_key_has_a_daily_limit_beside_the_per_second_limit() {
    let service = ExampleService::new();
    let passed: u64 = (0..1_100).map(|second| service.pass(second * SECOND, &[("api_key", "k1")], 25)).sum();
    assert_eq!(passed, 10_000);
    assert_eq!(service.pass(DAY, &[("api_key", "k1")], 25), 20);
}

#[test]
fn unmatched_entry_is_not_limited() {
    assert_eq!(ExampleService::new().pass(0, &[("colour", "red")], 1_000), 1_000);
}
