//! Limits that overflow into each other (`overflow_to`): decisions, what they tell, and counters in Redis.

use std::thread;

use serde_json::{Value, json};
use tollkeeper::base::clock::Time;
use tollkeeper::telemetry::metrics::limit_stats::LimitStat;

use super::decisions::metadata;
use kit::fixtures::{assert_responses, decide, load_shop_rules, shop_request};
use kit::redis::options;
use kit::scrape::{scrape, with_prometheus};
use kit::test_service::TestService;
use kit::tollkeeper::{Tollkeeper, with_rules};

/// Noon on Wednesday the 8th of July 2026.
const NOON: Time = Time::from_secs(1_783_512_000);

/// 3 a day, then 2 of the year, which ends on 2026-12-18 at midnight.
const PLAN_AND_CREDITS: &str = "descriptors:
- key: user
  rate_limit:
  - {name: plan, unit: day, requests_per_unit: 3, overflow_to: credits}
  - {name: credits, unit: year, requests_per_unit: 2}
";

fn service(rules: &str) -> TestService {
    let env = [("TOLLKEEPER_RETRY_AFTER_HEADER", "Retry-After"), ("TOLLKEEPER_METADATA_VERDICTS", "true")];
    let service = TestService::new(env, NOON);
    load_shop_rules(&service, rules);
    service
}

#[test]
fn status_shows_the_limit_that_takes_the_next_hit() {
    let service = service(PLAN_AND_CREDITS);
    let one = || shop_request("user=ann");
    assert_responses(
        &service,
        &[
            (one().hits(2), "OK [OK plan: 3/DAY left 1 in 43200 s]"),
            (one(), "OK [OK credits: 2/YEAR left 2 in 14040000 s]"),
            (one(), "OK [OK credits: 2/YEAR left 1 in 14040000 s]"),
            // All or nothing.
            (one().hits(2), "OVER [OVER plan: 3/DAY left 0 in 43200 s] Retry-After: 43200"),
            (one(), "OK [OK credits: 2/YEAR left 0 in 14040000 s]"),
            (one(), "OVER [OVER plan: 3/DAY left 0 in 43200 s] Retry-After: 43200"),
            (one().hits(6), "OVER [OVER credits: 2/YEAR left 0 in 14040000 s]"),
            (one().refund(1), "OK [OK credits: 2/YEAR left 1 in 14040000 s]"),
            (shop_request("user=bob").hits(5), "OK [OK credits: 2/YEAR left 0 in 14040000 s]"),
        ],
    );
    service.advance_us(43_200_000_000);
    assert_responses(&service, &[(one().hits(4), "OK [OK credits: 2/YEAR left 0 in 13996800 s]")]);
}

#[test]
fn metadata_names_the_limits_that_took_the_overflow() {
    let service = service(PLAN_AND_CREDITS);
    let ask = |hits| metadata(&decide(&service, &shop_request("user=ann").hits(hits)));
    assert_eq!(ask(3), json!({}));
    assert_eq!(ask(1), json!({ "overflow": [{ "rule": "shop.user.credits", "name": "credits", "hits": 1 }] }));
    let rejected = ask(2);
    assert_eq!(rejected["over_limit"][0]["name"], "plan", "{rejected}");
    assert_eq!(rejected["overflow"], Value::Null);
}

#[test]
fn replaced_limit_takes_its_overflow_along() {
    let service = service(
        "descriptors:
- key: user
  rate_limit:
  - {name: plan, unit: day, requests_per_unit: 3, overflow_to: pool}
  - {name: pool, unit: week, requests_per_unit: 9, overflow_to: credits}
  - {name: credits, unit: year, requests_per_unit: 2}
- key: vip
  rate_limit: {unit: day, requests_per_unit: 100, replaces: [{name: plan}]}
- key: poor
  rate_limit: {unit: day, requests_per_unit: 100, replaces: [{name: pool}]}
",
    );
    let statuses = |text: &str| decide(&service, &shop_request(text).hits(4)).statuses();
    assert_eq!(statuses("vip=1; user=ann"), [(false, 99), (false, 0)], "no limit is left");
    assert_eq!(statuses("poor=1; user=ann"), [(false, 99), (true, 0)], "the plan is alone");
    assert_eq!(statuses("user=ann"), [(false, 8)], "plan and pool");
}

/// Replaced halves of two chains do not become one.
#[test]
fn replaced_limits_do_not_join_two_chains() {
    let service = service(
        "descriptors:
- key: user
  rate_limit:
  - {name: x, unit: day, requests_per_unit: 2, overflow_to: y}
  - {name: y, unit: year, requests_per_unit: 5}
  - {name: p, unit: hour, requests_per_unit: 2, overflow_to: q}
  - {name: q, unit: week, requests_per_unit: 100}
- {key: b, rate_limit: {unit: day, requests_per_unit: 1000, replaces: [{name: y}, {name: p}]}}
",
    );
    let over = decide(&service, &shop_request("b=1; user=ann").hits(10));
    assert_eq!(over.statuses(), [(false, 999), (true, 0)], "x is alone");
}

/// A request with more hits waits for the window of the limit that has room for them, also in its status.
#[test]
fn reset_of_a_rejection_is_its_wait() {
    let service = service(
        "descriptors:
- key: user
  rate_limit:
  - {name: plan, unit: minute, requests_per_unit: 3, overflow_to: credits}
  - {name: credits, unit: day, requests_per_unit: 4}
- key: none
  rate_limit:
  - {name: plan, unit: minute, requests_per_unit: 0, overflow_to: credits}
  - {name: credits, unit: day, requests_per_unit: 4}
",
    );
    assert_responses(
        &service,
        &[
            (shop_request("user=ann").hits(4), "OK [OK credits: 4/DAY left 3 in 43200 s]"),
            (shop_request("user=ann").hits(7), "OVER [OVER plan: 3/MINUTE left 0 in 43200 s] Retry-After: 43200"),
            (shop_request("none=ann").hits(4), "OK [OK credits: 4/DAY left 0 in 43200 s]"),
            (shop_request("none=ann"), "OVER [OVER credits: 4/DAY left 0 in 43200 s] Retry-After: 43200"),
        ],
    );
}

#[test]
fn metrics_count_the_hits_that_each_limit_took_and_gave_back() {
    let service = service(PLAN_AND_CREDITS);
    decide(&service, &shop_request("user=ann").hits(5));
    decide(&service, &shop_request("user=ann").refund(3));
    let stats = service.inner.decider.metrics.limits.all_limit_stats();
    let count = |name: &str, stat| {
        let of_name = stats.iter().find(|stats| stats.name().as_str() == name).expect("the limit has stats");
        of_name.counter_value(stat)
    };
    let counts = |name| [LimitStat::WithinLimit, LimitStat::TotalNegativeHits].map(|stat| count(name, stat));
    assert_eq!([counts("shop.user"), counts("shop.user.credits")], [[3, 1], [2, 2]]);
}

/// Three replicas and a Redis: five requests of each user pass, and the counters have them in their order.
#[test]
fn limits_hold_together_over_replicas() {
    let redis = options().start();
    let rules = format!("domain: shop\n{PLAN_AND_CREDITS}");
    let start = || {
        let (setup, metrics) = with_prometheus(with_rules(&rules));
        let setup = setup
            .env("REDIS_SOCKET_TYPE", "tcp")
            .env("REDIS_URL", redis.address())
            .env("TOLLKEEPER_STORE_TIMEOUT", "5s");
        (setup.start(), metrics)
    };
    let servers = [start(), start(), start()];
    let body = |user: &str| {
        let entries = json!([{ "key": "user", "value": user }]);
        json!({ "domain": "shop", "descriptors": [{ "entries": entries }] }).to_string()
    };
    let users = ["ann", "bob", "cem", "dee"];
    let passed = |server: &Tollkeeper, user| (0..6).filter(|_| server.post_json(&body(user)).status == 200).count();
    let all: usize = thread::scope(|scope| {
        let each = servers.iter().flat_map(|(server, _)| users.map(|user| scope.spawn(move || passed(server, user))));
        each.collect::<Vec<_>>().into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    assert_eq!(all, 5 * users.len());
    assert_eq!(passed(&servers[0].0, "ann"), 0);
    let rejected_locally = servers[0].0.store_stats()["rejected_locally"].as_u64().expect("a number");
    assert!(rejected_locally > 0, "rejections of one hit are known for a while");
    let explained = servers[0].0.explain(&body("ann"));
    let limits = explained["descriptors"][0]["limits"].as_array().expect("limits");
    let used: Vec<_> = limits.iter().map(|limit| (&limit["name"], &limit["counter"]["used"])).collect();
    assert_eq!(used, [(&json!("plan"), &json!(3)), (&json!("credits"), &json!(2))]);
    assert!(limits[1]["limit"].as_str().expect("a text").contains("takes the overflow of the limit before it"));
    let keys = redis.command(&["KEYS", "*user=ann*"]).expect("keys");
    assert!(format!("{keys:?}").contains(":overflow_fixed_window:31536000s"), "{keys:?}");
    let total = |name: &str| servers.iter().map(|(_, port)| scrape(port.number()).count(name)).sum::<u64>();
    assert_eq!(total("ratelimit_service_rate_limit_within_limit{domain=\"shop\",key1=\"user\"}"), 12);
    assert_eq!(total("ratelimit_service_rate_limit_within_limit{domain=\"shop\",key1=\"user\",key2=\"credits\"}"), 8);
}
