//! `/alarms`: what it says of traffic and of rules that do nothing.

use std::sync::Arc;

use serde_json::Value;
use tollkeeper::base::clock::Time;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::live::RuleSetOrigin;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::serve::fleet::alarms::AlarmReport;
use tollkeeper::serve::fleet::view::FleetView;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService};
use tollkeeper::serve::health::{Health, HealthRequirements};
use tollkeeper::serve::metrics_collector::MetricsCollector;
use tollkeeper::serve::report::history::read_request_totals;
use tollkeeper::store::health::StoreHealth;

use kit::fixtures::shop_request;
use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::redis;
use kit::test_service::{TestService, store_runtime};
use kit::tollkeeper::{Tollkeeper, with_rules};
use kit::wait_for;

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 20}}
- key: campaign
  descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 5}}
";

/// Texts of the alarms of a kind.
fn alarms(server: &Tollkeeper, kind: &str) -> Vec<String> {
    let response = http::get(server.debug_port(), "/alarms").send();
    let report: Value = serde_json::from_slice(&response.body).unwrap();
    let alarms = report["alarms"].as_array().unwrap().iter().filter(|alarm| alarm["kind"] == kind);
    alarms.map(|alarm| alarm["text"].as_str().unwrap().to_owned()).collect()
}

fn call(server: &Tollkeeper, entries: &[(&str, &str)], times: usize) {
    let client = Client::connect(server.grpc_port());
    (0..times).for_each(|_| drop(client.call(&rate_limit_request("shop", entries)).unwrap()));
}

#[test]
fn rejections_of_most_requests_are_an_alarm_that_names_the_limit() {
    let server = with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    call(&server, &[("user", "ann")], 39);
    call(&server, &[("other", "x")], 21);
    assert_eq!(alarms(&server, "mostly_rejected"), [""; 0], "19 of 60 are few");
    call(&server, &[("user", "ann")], 80);
    let found = wait_for("the alarm", || Some(alarms(&server, "mostly_rejected")).filter(|found| !found.is_empty()));
    let expected =
        "99 of 140 requests of the last two to three minutes were rejected, 99 decisions of them by shop.user";
    assert_eq!(found, [expected]);
}

#[test]
fn entries_in_another_order_than_a_rule_are_an_alarm() {
    let server = with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    // The first rule takes `user` alone, so both match nothing.
    call(&server, &[("user", "ann"), ("campaign", "spring")], 40);
    call(&server, &[("tenant", "x")], 40);
    let found =
        wait_for("the alarm", || Some(alarms(&server, "almost_matches_rule")).filter(|found| !found.is_empty()));
    assert_eq!(found.len(), 1, "another key is no mistake: {found:?}");
    let parts =
        ["descriptors of shop are not limited: shop.campaign.user has the entries in another order", "rules.yaml:6:"];
    assert!(parts.iter().all(|part| found[0].contains(part)), "{found:?}");
}

#[test]
fn one_key_with_most_rejected_hits_for_some_time_is_an_alarm() {
    let setup = || with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s");
    let plain = setup().start();
    let private = setup().env("TOLLKEEPER_DECISION_LOG_VALUES", "none").start();
    let charge = |server: &Tollkeeper, user: &str, hits: u32| {
        let mut request = rate_limit_request("shop", &[("user", user)]);
        request.hits_addend = hits;
        Client::connect(server.grpc_port()).call(&request).unwrap();
    };
    charge(&plain, "ann", 5000);
    assert_eq!(alarms(&plain, "hot_key"), [""; 0], "one large request is no flood");
    let found = wait_for("the alarm", || {
        for server in [&plain, &private] {
            charge(server, "ann", 500);
            charge(server, "bob", 100);
            // Two keys may be in one register of the sketch that counts them.
            charge(server, "carl", 1);
        }
        let found = [alarms(&plain, "hot_key"), alarms(&private, "hot_key")];
        found.iter().all(|found| !found.is_empty()).then_some(found)
    });
    assert!(found[0].len() == 1 && found[0][0].contains("minutes: user=ann, by shop.user ("), "{found:?}");
    assert!(found[1][0].contains("by shop.user") && !found[1][0].contains("ann"), "{found:?}");
}

#[test]
fn alarm_of_a_lost_store_names_the_kind_of_failure() {
    let lost = |url: &str, name: &str, value: &str| {
        let setup = with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("REDIS_SOCKET_TYPE", "tcp");
        setup.env("REDIS_URL", url).env(name, value)
    };
    let says = |server: &Tollkeeper, parts: [&str; 2]| {
        wait_for(parts[1], || {
            let found = alarms(server, "store_lost");
            found.iter().any(|text| parts.iter().all(|part| text.contains(part))).then_some(())
        });
    };
    let refused = lost("127.0.0.1:1", "REDIS_POOL_SIZE", "1").start_unhealthy();
    says(&refused, ["no charge reaches redis (127.0.0.1:1: ", "Connection refused"]);

    let redis = redis::options().start();
    let server = lost(&redis.address(), "TOLLKEEPER_STORE_TIMEOUT", "100ms").start();
    redis.query::<()>(&["REPLICAOF", "127.0.0.1", "1"]);
    call(&server, &[("user", "ann")], 10);
    says(&server, [&redis.address(), "read-only"]);
    redis.query::<()>(&["REPLICAOF", "NO", "ONE"]);
    wait_for("the end of the alarm", || alarms(&server, "store_lost").is_empty().then_some(()));
    redis.freeze();
    call(&server, &[("user", "ann")], 10);
    says(&server, [&redis.address(), "no answer in time"]);
    redis.thaw();

    let protected = redis::options().password("secret").start();
    let wrong = lost(&protected.address(), "REDIS_AUTH", "another").start_unhealthy();
    says(&wrong, [&protected.address(), "REDIS_AUTH"]);
    assert!(!alarms(&wrong, "store_lost")[0].contains("another"));
}

/// Start of a minute: 08:00 UTC.
const START: Time = Time::from_secs(1_800_000_000);
const MINUTE_US: u64 = 60_000_000;

/// A service in this process, with a manual clock.
fn collector() -> MetricsCollector {
    let service = Arc::new(TestService::new::<&str>([], START).inner);
    let (store, needs) = (Arc::new(StoreHealth::default()), HealthRequirements::default());
    let health = Arc::new(Health::new(Arc::clone(&service.rules), store, needs));
    MetricsCollector { service, health, listeners: Arc::default(), path_label: false, quota: None }
}

fn load(service: &RateLimitService, users_a_minute: u32) {
    let rules = format!(
        "domain: shop\ndescriptors:\n- {{key: user, rate_limit: {{unit: minute, requests_per_unit: {users_a_minute}}}}}\n\
         - {{key: login, rate_limit: {{unit: minute, requests_per_unit: 5}}}}\n"
    );
    let text = RuleText { name: "rules.yaml".into(), bytes: rules.into(), documents: DocumentSelection::FirstOnly };
    let compiled = compile_texts(&[text], &CompileOptions::default()).expect("good rules");
    let rules = RuleSet::from_domains(compiled.domains, &service.decider.metrics.limits);
    service.rules.replace_rules(rules, RuleSetOrigin::default(), service.clock.now());
}

/// Sends a minute of requests, and records it at its end: 100 by a user, ten logins of which five are rejected.
fn pass_minute(collector: &MetricsCollector) {
    let MetricsCollector { service, .. } = collector;
    let send = |request: &str, times: usize| {
        let request = shop_request(request);
        let request = decode::convert_request(&request.0);
        let answer = || store_runtime().block_on(service.answer_request(&request, DEFAULT_CALLER_DEADLINE, None));
        (0..times).for_each(|_| drop(answer().expect("it is decided")));
    };
    send("user=ann", 100);
    send("login=ann", 10);
    service.clock.set(service.clock.now().plus_us(MINUTE_US));
    let metrics = &service.decider.metrics;
    let totals = read_request_totals(collector);
    metrics.history.record_minute(service.clock.now(), &metrics.limits.rule_limit_stats(), totals);
}

/// Texts of the alarms about a rise after a load.
fn rises(collector: &MetricsCollector) -> Vec<String> {
    let view = FleetView {
        problem: None,
        now: collector.service.clock.now(),
        replicas: Vec::new(),
        gone: Vec::new(),
        keys: Default::default(),
        busiest: Default::default(),
        limits: Default::default(),
        left_out: Default::default(),
    };
    let alarms = AlarmReport::new(collector, &view).alarms.into_iter();
    alarms.filter(|alarm| alarm.kind == "rejections_rose_after_load").map(|alarm| alarm.text).collect()
}

#[test]
fn rejections_that_rise_after_a_load_name_the_load_and_the_limit() {
    let collector = collector();
    load(&collector.service, 1000);
    (0..5).for_each(|_| pass_minute(&collector));
    load(&collector.service, 1000);
    (0..5).for_each(|_| pass_minute(&collector));
    assert_eq!(rises(&collector), [""; 0], "the load changed nothing");
    load(&collector.service, 10);
    pass_minute(&collector);
    assert_eq!(rises(&collector), [""; 0], "the minute of the load has requests of both sets");
    pass_minute(&collector);
    let expected = "rejections rose from 4 % to 86 % of the requests after rules were loaded at 08:10 UTC (set 3 of this \
                    process): most by shop.user, from 0 to 45 decisions a minute; the load: shop.user 1000 -> 10 a minute; \
                    1 changed, 0 added, 0 removed";
    assert_eq!(rises(&collector), [expected]);
    load(&collector.service, 1000);
    (0..4).for_each(|_| pass_minute(&collector));
    assert_eq!(rises(&collector), [""; 0], "a better load ended it");
}
