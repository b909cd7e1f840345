//! Candidates of processes and of a store in trouble: eventual counters, a frozen Redis, the trace.

use super::{in_redis, rows, send, stat};
use kit::fixtures::{load_shop_rules, shop_request};
use kit::grpc::{Client, rate_limit_request};
use kit::otlp_collector::OtlpCollector;
use kit::redis::options;
use kit::tollkeeper::with_rules;
use kit::wait_for;
use tollkeeper::telemetry::metrics::limit_stats::LimitStat;

#[test]
fn eventual_candidate_keeps_its_bound_beside_a_strict_limit() {
    let server = options().start();
    let service = in_redis(&server, &[]);
    load_shop_rules(
        &service,
        "descriptors:
- key: user
  rate_limit:
  - {unit: day, requests_per_unit: 5, count_rejected: false}
  - {unit: day, requests_per_unit: 100, consistency: eventual, max_overshoot: 10%, shadow_mode: true, name: looser}
",
    );
    assert_eq!(send(&service, &shop_request("user=ann"), 300), 295, "the strict limit is exact");
    wait_for("all outcomes", || (rows(&service)[1].1 == 300).then_some(()));
    let (name, _, rejected, is_candidate) = &rows(&service)[1];
    assert!(name == "shop.user.looser" && *is_candidate);
    assert!((190..=200).contains(rejected), "{rejected} of 300 rejected by 100 and 10 % more");
    let calls: u64 = ["evalsha", "eval"].iter().filter_map(|name| server.command_counts().get(*name).copied()).sum();
    assert!(
        calls < 100,
        "{calls} calls: a strict candidate makes one for each of its 100 hits, and five for the limit"
    );
}

#[test]
fn frozen_redis_fails_candidates_while_the_over_limit_cache_rejects() {
    let server = options().start();
    let service = in_redis(&server, &[]);
    assert_eq!(send(&service, &shop_request("user=ann"), 10), 5);
    wait_for("all outcomes", || (rows(&service).iter().all(|row| row.1 == 10)).then_some(()));
    let cached = stat(&service, "shop.user", LimitStat::OverLimitWithLocalCache);
    server.freeze();
    assert_eq!(send(&service, &shop_request("user=ann"), 10), 10);
    assert_eq!(stat(&service, "shop.user", LimitStat::OverLimitWithLocalCache), cached + 10, "no answer needed Redis");
    assert_eq!(service.inner.decider.failed_charge_counts().map(|(_, count)| count).sum::<u64>(), 0);
    for candidate in ["shop.user.lower", "shop.user.higher"] {
        wait_for("the failures", || {
            let cached = stat(&service, candidate, LimitStat::OverLimitWithLocalCache);
            (stat(&service, candidate, LimitStat::Error) + cached == 10).then_some(())
        });
        assert!(stat(&service, candidate, LimitStat::Error) > 0, "{candidate}: its charges need Redis");
    }
    server.thaw();
}

#[test]
fn trace_has_a_span_for_each_candidate() {
    let collector = OtlpCollector::start();
    let rules = "domain: shop\ndescriptors:\n- key: user\n  rate_limit:\n  - {unit: day, requests_per_unit: 5}\n  \
                 - {unit: day, requests_per_unit: 1, shadow_mode: true, name: lower}\n";
    let server = with_rules(rules)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TRACING_ENABLED", "true")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
        .env("OTEL_BSP_SCHEDULE_DELAY", "10")
        .start();
    let client = Client::connect(server.grpc_port());
    for verdict in ["ok", "shadow"] {
        client.call(&rate_limit_request("shop", &[("user", "ann")])).unwrap();
        let count = if verdict == "ok" { 1 } else { 2 };
        let span = collector.wait_for("candidate", count).pop().unwrap();
        let attribute = |name: &str| span.attributes.get(name).map(String::as_str);
        assert_eq!(attribute("tollkeeper.limit"), Some("shop.user.lower"));
        assert_eq!(attribute("tollkeeper.verdict"), Some(verdict));
        let decision = collector.wait_for("decide", count);
        assert!(decision.iter().any(|decision| decision.ids()[..2] == [span.ids()[0].clone(), span.ids()[2].clone()]));
        assert!(!format!("{span:?}").contains("ann"), "{span:?}");
    }
}
