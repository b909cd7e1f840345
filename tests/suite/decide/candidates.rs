//! Candidate limits in reports, explanations and Redis: what each would have rejected stands beside what was rejected.
//!
//! `stores` compares their verdicts with those of the same limits alone.

mod faults;

use tollkeeper::base::clock::Time;
use tollkeeper::decide::explain::Explanation;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::DEFAULT_CALLER_DEADLINE;
use tollkeeper::serve::report::rules::{LimitReport, RuleUsageReport, RulesQuery};
use tollkeeper::serve::report::top::{TopQuery, TopReport, TopTextContent};
use tollkeeper::store::Store;
use tollkeeper::telemetry::metrics::limit_stats::LimitStat;

use kit::fixtures::{decide, load_shop_rules, shop_request};
use kit::redis::{Server, options};
use kit::redis_counters::{TimeSource, start_store, wait_until_connected};
use kit::test_service::{TestRequest, TestService, store_runtime};
use kit::wait_for;

const NOON: Time = Time::from_secs(1_783_512_000);

const RULES: &str = "descriptors:
- key: user
  rate_limit:
  - {unit: day, requests_per_unit: 9, shadow_mode: true, name: higher}
  - {unit: day, requests_per_unit: 5, count_rejected: false}
  - {unit: day, requests_per_unit: 2, shadow_mode: true, name: lower}
- {key: gold, rate_limit: {unit: day, requests_per_unit: 100, replaces: [{name: lower}]}}
";

fn in_memory() -> TestService {
    let service = TestService::new::<&str>([], NOON);
    load_shop_rules(&service, RULES);
    service
}

fn in_redis(server: &Server, env: &[(&str, &str)]) -> TestService {
    let address = server.address();
    let mut variables = vec![("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &*address)];
    variables.extend_from_slice(env);
    let redis = start_store(&variables, TimeSource::Redis);
    wait_until_connected(&redis);
    let service = TestService::new::<&str>([], NOON).with_store(Store::from(redis));
    load_shop_rules(&service, RULES);
    service
}

fn send(service: &TestService, request: &TestRequest, times: usize) -> usize {
    (0..times).filter(|_| decide(service, request).over_limit()).count()
}

fn rules(service: &TestService) -> Vec<LimitReport> {
    let loaded = service.inner.rules.current_rules_owned().expect("rules are loaded");
    RuleUsageReport::new(&loaded.rules, &service.inner.decider.metrics, service.now(), &RulesQuery::default()).rules
}

/// Name, decisions and rejections of each limit of `user`, candidates marked.
fn rows(service: &TestService) -> Vec<(String, u64, u64, bool)> {
    let mut rows: Vec<_> = rules(service).into_iter().filter(|limit| limit.rule.starts_with("shop.user")).collect();
    rows.sort_by(|a, b| a.rule.cmp(&b.rule));
    rows.into_iter().map(|limit| (limit.rule, limit.matched, limit.rejected, limit.candidate)).collect()
}

fn row(rule: &str, matched: u64, rejected: u64, candidate: bool) -> (String, u64, u64, bool) {
    (rule.to_owned(), matched, rejected, candidate)
}

fn stat(service: &TestService, rule: &str, stat: LimitStat) -> u64 {
    let all = service.inner.decider.metrics.limits.all_limit_stats();
    all.iter().find(|limit| limit.name().as_str() == rule).map_or(0, |limit| limit.counter_value(stat))
}

fn explain(service: &TestService, descriptor: &str) -> Explanation {
    let request = shop_request(descriptor);
    let request = decode::convert_request(&request.0);
    let loaded = service.inner.rules.current_rules_owned().unwrap();
    let context = service.inner.build_decision_context(Some(&loaded), DEFAULT_CALLER_DEADLINE);
    let counters = store_runtime().block_on(service.inner.decider.peek_counters(context, &request));
    Explanation::explain_request(
        &service.inner.decider.behaviour,
        &loaded.rules,
        &request,
        &counters,
        context.store.now,
    )
}

#[test]
fn reports_show_what_candidates_would_have_rejected() {
    let service = in_memory();
    assert_eq!(send(&service, &shop_request("user=ann"), 10), 5);
    assert_eq!(
        rows(&service),
        [row("shop.user", 10, 5, false), row("shop.user.higher", 10, 1, true), row("shop.user.lower", 10, 8, true)]
    );
    assert_eq!(stat(&service, "shop.user.lower", LimitStat::ShadowMode), 8);
    let report = TopReport::new(&service.inner.decider.metrics.top_keys, service.now(), &TopQuery::default());
    let top: Vec<_> = report.overall.iter().map(|key| (&*key.rule, &*key.key, key.rejected_at_least)).collect();
    let expected =
        [("shop.user.lower", "user=ann", 8), ("shop.user", "user=ann", 5), ("shop.user.higher", "user=ann", 1)];
    assert_eq!(top, expected);
    let loaded = service.inner.rules.current_rules_owned().unwrap();
    let text = report.format_text(TopTextContent::Rejected);
    assert!(text.starts_with("Hits rejected, or that would be, in the last 5 minutes"), "{text}");
    assert!(text.contains("shop.user.lower (candidate) ") && text.contains("shop.user  "), "{text}");
    assert!(text.contains("shop.user.lower (candidate): at least 8"), "{text}");
    let report = RuleUsageReport::new(&loaded.rules, &service.inner.decider.metrics, NOON, &RulesQuery::default());
    assert!(report.format_text().contains("shop.user.lower (candidate)\n"), "{}", report.format_text());
}

#[test]
fn explanation_shows_counters_of_candidates() {
    let service = in_memory();
    send(&service, &shop_request("user=ann"), 7);
    let explained = explain(&service, "user=ann");
    let limits = explained.descriptors[0].limits.iter();
    let limits: Vec<_> = limits
        .map(|limit| {
            let counter = limit.counter.as_ref().unwrap();
            (&*limit.name, limit.candidate, counter.used, counter.passes)
        })
        .collect();
    // A candidate alone is a single strict fixed window, so its rejected hits count.
    assert_eq!(limits, [("", false, 5, false), ("higher", true, 7, true), ("lower", true, 7, false)]);
}

#[test]
fn override_and_replaces_switch_candidates_off() {
    let service = in_memory();
    send(&service, &shop_request("user=ann").limit(3, 4, None), 2);
    assert!(rows(&service).iter().all(|(_, matched, ..)| *matched == 0), "{:?}", rows(&service));
    send(&service, &shop_request("user=ann; gold"), 2);
    let matched: Vec<u64> = rows(&service).into_iter().map(|(_, matched, ..)| matched).collect();
    assert_eq!(matched, [2, 2, 0]);
}

#[test]
fn reset_deletes_counters_of_candidates() {
    let service = in_memory();
    send(&service, &shop_request("user=ann"), 3);
    let request = shop_request("user=ann");
    let request = decode::convert_request(&request.0);
    let loaded = service.inner.rules.current_rules_owned().unwrap();
    let context = service.inner.build_decision_context(Some(&loaded), DEFAULT_CALLER_DEADLINE);
    let deleted = store_runtime().block_on(service.inner.decider.reset_counters(context, &request));
    assert_eq!(deleted.unwrap(), [3]);
    let explained = explain(&service, "user=ann");
    let used = explained.descriptors[0].limits.iter().map(|limit| limit.counter.as_ref().unwrap().used);
    assert_eq!(used.collect::<Vec<_>>(), [0, 0, 0]);
}

#[test]
fn candidate_is_charged_while_the_over_limit_cache_rejects() {
    let server = options().start();
    let service = in_redis(&server, &[]);
    assert_eq!(send(&service, &shop_request("user=ann"), 40), 35);
    assert!(stat(&service, "shop.user", LimitStat::OverLimitWithLocalCache) > 0, "the cache rejects");
    // Outcomes that came after the answer are recorded by a task.
    wait_for("all outcomes", || {
        let expected = [
            row("shop.user", 40, 35, false),
            row("shop.user.higher", 40, 31, true),
            row("shop.user.lower", 40, 38, true),
        ];
        (rows(&service) == expected).then_some(())
    });
}

#[test]
fn failed_candidate_is_counted_and_changes_no_answer() {
    let server = options().start();
    let service = in_redis(&server, &[]);
    server.query::<String>(&["SET", "tk1:{shop|user=ann}:candidate=lower:fixed_window:86400s", "no hash"]);
    assert_eq!(send(&service, &shop_request("user=ann"), 6), 1);
    wait_for("all outcomes", || (stat(&service, "shop.user.lower", LimitStat::Error) == 6).then_some(()));
    wait_for("the others", || (stat(&service, "shop.user.higher", LimitStat::Ok) == 6).then_some(()));
    assert_eq!(stat(&service, "shop.user", LimitStat::Ok), 5);
    assert_eq!(service.inner.decider.failed_charge_counts().map(|(_, count)| count).sum::<u64>(), 0);
}

#[test]
fn keys_of_other_limits_stay_as_they_are_in_both_formats() {
    for (env, enforced) in [(&[][..], None), (&[("TOLLKEEPER_KEY_FORMAT", "ratelimit")][..], Some("shop_user_ann_"))] {
        let server = options().start();
        let service = in_redis(&server, env);
        load_shop_rules(&service, &RULES.replace(", count_rejected: false", ""));
        decide(&service, &shop_request("user=ann"));
        let expected = |key: &String| match enforced {
            Some(start) => key.starts_with(start),
            None => key == "tk1:{shop|user=ann}:fixed_window:86400s",
        };
        wait_for("all keys", || {
            let keys: Vec<String> = server.query(&["KEYS", "*user=ann*"]);
            let ratelimit: Vec<String> = server.query(&["KEYS", "shop_user_ann_*"]);
            let keys: Vec<String> = keys.into_iter().chain(ratelimit).collect();
            let candidate = |name: &str| format!("tk1:{{shop|user=ann}}:candidate={name}:fixed_window:86400s");
            let all = keys.iter().any(expected)
                && keys.contains(&candidate("higher"))
                && keys.contains(&candidate("lower"))
                && keys.len() == 3;
            all.then_some(())
        });
    }
}
