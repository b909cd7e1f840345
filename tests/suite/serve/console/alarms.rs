//! `/alarms`: what it says of traffic and of rules that do nothing.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tollkeeper::base::clock::Time;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::live::RuleSetOrigin;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::serve::fleet::alarms::find_own_alarms;
use tollkeeper::serve::fleet::finding::FirstSeen;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService};
use tollkeeper::serve::health::{Health, HealthRequirements};
use tollkeeper::serve::metrics_collector::MetricsCollector;
use tollkeeper::serve::status::read_request_totals;
use tollkeeper::store::health::StoreHealth;

use kit::fixtures::shop_request;
use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::redis;
use kit::tcp_proxy::{Mode, TcpProxy};
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
    // The time is that of the first look.
    let times = || {
        let report: Value = serde_json::from_slice(&http::get(server.debug_port(), "/alarms").send().body).unwrap();
        let of_kind = report["alarms"].as_array().unwrap().iter().find(|alarm| alarm["kind"] == "mostly_rejected");
        of_kind.map(|alarm| (alarm["since"].clone(), alarm["runbook"].clone(), report["alarms"].clone()))
    };
    let (since, runbook, all) = times().unwrap();
    assert!(since.as_str().is_some_and(|since| since.parse::<jiff::Timestamp>().is_ok()), "{all}");
    assert_eq!(runbook, "docs/runbooks.md#tollkeeper-refusals-surging");
    assert_eq!(times().unwrap().0, since);
}

#[test]
fn rejections_by_the_policy_deny_are_not_blamed_on_a_limit() {
    let redis = redis::options().start();
    let server = with_rules(RULES)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("BACKEND_TYPE", "redis")
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("REDIS_URL", redis.address())
        .env("TOLLKEEPER_ON_STORE_ERROR", "deny")
        .start();
    drop(redis);
    call(&server, &[("user", "ann")], 200);
    let found = wait_for("the alarm", || Some(alarms(&server, "mostly_rejected")).filter(|found| !found.is_empty()));
    assert!(
        found[0]
            .ends_with("because the store failed: `on_store_error: local` in `defaults` of the rule file ends that"),
        "{found:?}"
    );
}

#[test]
fn lost_control_plane_is_an_alarm() {
    let server = kit::tollkeeper::without_rules().env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("TEST_PACE", "100");
    let server = server.env("CONFIG_TYPE", "GRPC_XDS_SOTW").env("CONFIG_GRPC_XDS_SERVER_URL", "127.0.0.1:1");
    let server = server.start_unhealthy();
    let found = wait_for("the alarm", || alarms(&server, "xds_stream_lost").first().cloned());
    assert!(found.starts_with("no stream to the control plane 127.0.0.1:1 since 2"), "{found}");
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
    says(&refused, ["the store fails, redis (127.0.0.1:1: ", "Connection refused"]);

    let redis = redis::options().start();
    let server = lost(&redis.address(), "TOLLKEEPER_STORE_TIMEOUT", "100ms").start();
    redis.query::<()>(&["REPLICAOF", "127.0.0.1", "1"]);
    call(&server, &[("user", "ann")], 10);
    says(&server, [&redis.address(), "read-only"]);
    redis.query::<()>(&["REPLICAOF", "NO", "ONE"]);
    wait_for("the end of the alarm", || alarms(&server, "store_lost").is_empty().then_some(()));
    redis.freeze();
    call(&server, &[("user", "ann")], 10);
    says(&server, [&redis.address(), "no answer within 100 ms (TOLLKEEPER_STORE_TIMEOUT)"]);
    redis.thaw();

    let protected = redis::options().password("secret").start();
    let wrong = lost(&protected.address(), "REDIS_AUTH", "another").start_unhealthy();
    says(&wrong, [&protected.address(), "REDIS_AUTH"]);
    assert!(!alarms(&wrong, "store_lost")[0].contains("another"));
}

/// The page of `/store`, once its only server says `is_it`.
fn wait_for_server(server: &Tollkeeper, is_it: impl Fn(&Value) -> bool) -> Value {
    wait_for("the state of the server of the store", || {
        let servers = server.store_stats()["servers"].clone();
        assert_eq!(servers.as_array().map(Vec::len), Some(1), "{servers}");
        is_it(&servers[0]).then(|| servers[0].clone())
    })
}

#[test]
fn late_answers_of_the_store_are_measured_and_told() {
    let redis = redis::options().start();
    let proxy = TcpProxy::to(&redis.address());
    let address = format!("127.0.0.1:{}", proxy.port());
    let setup = with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("TOLLKEEPER_STORE_TIMEOUT", "40ms");
    let server = setup.env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", &address).start();
    let found = wait_for_server(&server, |found| {
        call(&server, &[("user", "ann")], 1);
        found["answer_ms"].is_number() && found["last_success_s"].is_number()
    });
    assert_eq!((&found["address"], &found["is_breaker_open"]), (&json!(address), &json!(false)));
    proxy.set(Mode::Delay(Duration::from_millis(30)));
    let found = wait_for_server(&server, |found| {
        call(&server, &[("user", "ann")], 1);
        found["last_late_answer_ms"].is_number() && found["is_breaker_open"] == true
    });
    assert!(found["last_late_answer_ms"].as_f64().unwrap() >= 60.0, "{found}");
    let told = "no answer within 40 ms (TOLLKEEPER_STORE_TIMEOUT); the last late one came after ";
    assert!(found["last_error"].as_str().unwrap().starts_with(told), "{found}");
    wait_for("the alarm", || alarms(&server, "store_lost").iter().any(|text| text.contains(told)).then_some(()));
    // The line of a timeout tells both: how late this process was, and the time that the store has.
    let log = server.stderr();
    let line = log.lines().find(|line| line.contains("store failed: no answer in time")).expect("it is logged");
    let late: u64 = line.split("process_late_ms=").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(
        line.contains(&format!("late by {late} ms in the last seconds, and TOLLKEEPER_STORE_TIMEOUT is 40 ms")),
        "{line}"
    );
    assert_eq!(line.contains("give it more CPU"), 2 * late >= 40, "{line}");
}

#[test]
fn share_of_charges_that_fail_in_the_store_is_an_alarm() {
    let redis = redis::options().start();
    let setup = with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("TOLLKEEPER_STORE_TIMEOUT", "5s");
    let server = setup.env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", redis.address()).start();
    wait_for("the store", || {
        (server.post_json("{}").status != 0 && alarms(&server, "store_lost").is_empty()).then_some(())
    });
    call(&server, &[("user", "ann")], 1);
    let key: Vec<String> = redis.query(&["KEYS", "tk1:*user=ann*"]);
    redis.query::<()>(&["EVAL", "redis.call('DEL', KEYS[1]) redis.call('HSET', KEYS[1], 'a', 'b')", "1", &key[0]]);
    call(&server, &[("user", "ann")], 15);
    assert_eq!(alarms(&server, "answers_by_policy"), [""; 0], "few may fail");
    call(&server, &[("user", "ann")], 15);
    call(&server, &[("user", "bob")], 69);
    let found = wait_for("the alarm", || {
        Some(alarms(&server, "answers_by_policy")).filter(|found| found.iter().any(|text| text.contains("of 100")))
    });
    assert_eq!(found.len(), 1, "{found:?}");
    for part in
        ["30.0 % of the charges", "(30 of 100: local 30); ", &redis.address(), "the key holds a value of another type"]
    {
        assert!(found[0].contains(part), "{part}: {found:?}");
    }
    call(&server, &[("user", "bob")], 3000);
    wait_for("the end of the alarm, less than 1 %", || alarms(&server, "answers_by_policy").is_empty().then_some(()));
}

#[test]
fn one_server_of_two_deployments_counts_once_everywhere() {
    let redis = redis::options().start();
    let setup = with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("TOLLKEEPER_FLEET", "true");
    let setup = setup.env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", redis.address()).env("REDIS_PERSECOND", "true");
    let server = setup.env("REDIS_PERSECOND_SOCKET_TYPE", "tcp").env("REDIS_PERSECOND_URL", redis.address()).start();
    wait_for_server(&server, |found| found["address"] == redis.address());
    let page =
        |path| -> Value { serde_json::from_slice(&http::get(server.debug_port(), path).send().body).expect("JSON") };
    assert_eq!(page("/problems")["servers"].as_array().map(Vec::len), Some(1));
    wait_for("the replica in the fleet", || (page("/fleet")["replicas"][0]["store"]["servers"] == 1).then_some(()));
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

/// A view without replicas.
/// Texts of the alarms about a rise after a load.
fn rises(collector: &MetricsCollector) -> Vec<String> {
    let alarms = find_own_alarms(collector).into_iter();
    alarms.filter(|alarm| alarm.kind == "rejections_rose_after_load").map(|alarm| alarm.text).collect()
}

#[test]
fn replicas_in_one_process_have_alarms_of_their_own() {
    let replicas = [collector(), collector(), collector()];
    replicas[1].service.clock.set(START.plus_us(MINUTE_US));
    let mut seen = replicas.each_ref().map(|_| FirstSeen::default());
    let mut since = || {
        let refused = replicas.iter().zip(&mut seen).map(|(replica, seen)| {
            let mut alarms = find_own_alarms(replica);
            seen.set_since_and_forget_ended(&mut alarms, replica.service.clock.now());
            alarms.into_iter().find(|alarm| alarm.kind == "rlqs_off").map(|alarm| alarm.since)
        });
        refused.collect::<Vec<_>>()
    };
    for replica in &replicas[..2] {
        assert!(replica.service.refused_calls.record_quota_stream(replica.service.clock.now()));
    }
    let expected = [Some(START.to_string()), Some(START.plus_us(MINUTE_US).to_string()), None];
    assert_eq!(since(), expected);
    replicas[0].service.clock.set(START.plus_us(MINUTE_US));
    assert_eq!(since(), expected, "it holds since then");
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
    let expected = "rejections rose from 4 % to 86 % of the requests after rules were loaded at 08:10 UTC (set 3 of the \
                    process): most by shop.user, from 0 to 45 decisions a minute; the load: shop.user 1000 -> 10 a minute; \
                    1 changed, 0 added, 0 removed";
    assert_eq!(rises(&collector), [expected]);
    load(&collector.service, 1000);
    (0..4).for_each(|_| pass_minute(&collector));
    assert_eq!(rises(&collector), [""; 0], "a better load ended it");
}
