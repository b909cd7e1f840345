//! The reports `/top` and `/rules`: most rejected keys and unusual limits, within the stated bounds, on any store.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;
use tollkeeper::base::clock::Time;
use tollkeeper::decide::key_text::KeyEntry;
use tollkeeper::serve::report::rejections::{KeyRejectionsInMinute, RejectionsQuery, RejectionsReport};
use tollkeeper::serve::report::rules::{self, LimitFindingKind};
use tollkeeper::serve::report::top;
use tollkeeper::telemetry::hyperloglog::HyperLogLog;
use tollkeeper::telemetry::metrics::limit_stats::{LimitName, LimitStats};
use tollkeeper::telemetry::top_keys::space_saving::SpaceSaving;
use tollkeeper::telemetry::top_keys::{KEPT_MINUTES, KeyHits, TopKeys, UnenforcedMode};

use kit::fixtures::{decide, in_parallel, load_shop_rules, shop_request};
use kit::test_service::{TestRequest, TestService};
use kit::tollkeeper::with_rules;
use kit::{grpc, http};

/// Start of a minute.
const NOON: Time = Time::from_secs(1_800_000_000);
const SECOND_US: u64 = 1_000_000;

fn test_service(rules: &str) -> TestService {
    let service = TestService::new::<&str>([], NOON);
    load_shop_rules(&service, rules);
    service
}

fn send(service: &TestService, descriptors: &str, times: usize) {
    (0..times).for_each(|_| drop(decide(service, &shop_request(descriptors))));
}

fn top(service: &TestService, query: &top::TopQuery) -> top::TopReport {
    top::TopReport::new(&service.inner.decider.metrics.top_keys, service.now(), query)
}

fn rules(service: &TestService) -> BTreeMap<String, rules::LimitReport> {
    let loaded = service.inner.rules.current_rules_owned().expect("rules are loaded");
    let top = &service.inner.decider.metrics;
    let report = rules::RuleUsageReport::new(&loaded.rules, top, service.now(), &rules::RulesQuery::default());
    report.rules.into_iter().map(|limit| (limit.rule.clone(), limit)).collect()
}

/// Text of `top --rules`.
fn rules_text(service: &TestService) -> String {
    let loaded = service.inner.rules.current_rules_owned().expect("rules are loaded");
    let top = &service.inner.decider.metrics;
    rules::RuleUsageReport::new(&loaded.rules, top, service.now(), &rules::RulesQuery::default()).format_text()
}

fn findings(limit: &rules::LimitReport) -> Vec<LimitFindingKind> {
    limit.findings.iter().map(|finding| finding.kind).collect()
}

/// Formats keys as `rule key: lower to upper bound`, in the order of the report.
fn lines(keys: &[top::TopKey]) -> Vec<String> {
    let line =
        |key: &top::TopKey| format!("{} {}: {} to {}", key.rule, key.key, key.rejected_at_least, key.rejected_at_most);
    keys.iter().map(line).collect()
}

proptest! {
    #[test]
    fn space_saving_counts_stay_within_their_error(
        keys in prop::collection::vec((0_u128..40, 1_u64..5), 1..400),
        most in 1_usize..12,
    ) {
        let mut sketch = SpaceSaving::new(most);
        let mut truth: BTreeMap<u128, u64> = BTreeMap::new();
        for (key, hits) in &keys {
            let (is_known, smallest) = (sketch.iter().any(|(id, ..)| id == *key), sketch.max_missed());
            sketch.add_count(*key, *hits, 1, |label| *label = Some(*key));
            let error = sketch.iter().find(|(id, ..)| id == key).map(|(.., counter)| counter.error);
            prop_assert!(is_known || error == Some(smallest), "{key} did not take over the smallest counter");
            *truth.entry(*key).or_default() += hits;
        }
        let counted: BTreeMap<u128, _> = sketch.iter().map(|(id, _, counter)| (id, counter)).collect();
        prop_assert!(counted.len() <= most);
        prop_assert!(sketch.iter().all(|(id, label, _)| id == *label));
        let smallest = counted.values().map(|counter| counter.count).min().unwrap_or(0);
        prop_assert_eq!(sketch.max_missed(), if counted.len() < most { 0 } else { smallest });
        let sum: u64 = truth.values().sum();
        prop_assert_eq!(counted.values().map(|counter| counter.count).sum::<u64>(), sum);
        prop_assert!(sketch.max_missed() <= sum / most as u64);
        for (key, hits) in truth {
            match counted.get(&key) {
                Some(counter) => {
                    prop_assert!(counter.count - counter.error <= hits && hits <= counter.count, "{key}: {hits}");
                }
                None => prop_assert!(hits <= sketch.max_missed(), "{key}: {hits} > {}", sketch.max_missed()),
            }
        }
    }

    #[test]
    fn top_keys_of_several_minutes_stay_within_their_bounds(
        rejections in prop::collection::vec((0_u64..6, 0_usize..30, 1_u64..4), 1..300),
    ) {
        // The minimum: one counter per shard.
        let top = TopKeys::new(8);
        let stats = LimitStats::new(LimitName::new(["shop", "key"]));
        let mut truth: BTreeMap<String, u64> = BTreeMap::new();
        let mut rejections = rejections;
        rejections.sort_by_key(|(minute, ..)| *minute);
        for (minute, key, hits) in rejections {
            let id = (key as u128 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
            let now = NOON.plus_us(minute * 60 * SECOND_US);
            top.record_key(KeyHits { id, limit: &stats, mode: None, hits }, now, |text| text.extend_from_slice(key.to_string().as_bytes()));
            *truth.entry(key.to_string()).or_default() += hits;
        }
        let found = top.snapshot(NOON.plus_us(5 * 60 * SECOND_US), KEPT_MINUTES, |_| true);
        let reported: BTreeMap<&str, _> = found.keys.iter().map(|key| (&*key.text, key)).collect();
        for (key, hits) in &truth {
            match reported.get(&**key) {
                Some(bounds) => {
                    prop_assert!(bounds.at_least <= *hits && *hits <= bounds.at_most, "{key}: {hits}, {bounds:?}");
                }
                None => prop_assert!(*hits <= found.max_missed, "{key}: {hits} > {}", found.max_missed),
            }
        }
    }
}

#[test]
fn distinct_keys_are_estimated_within_a_few_standard_errors() {
    let distinct = HyperLogLog::default();
    assert_eq!(distinct.estimate(), 0);
    let (mut added, mut checked) = (0_u64, 0);
    for most in [1_u64, 10, 100, 1000, 10_000, 100_000, 1_000_000] {
        while added < most {
            added += 1;
            // Adding a key a second time changes nothing.
            let hash = mixed(added);
            distinct.add_hash(hash);
            distinct.add_hash(hash);
        }
        let estimate = distinct.estimate();
        assert!(estimate.abs_diff(most) * 100 <= most * 15, "{estimate} for {most}");
        checked += 1;
    }
    assert_eq!(checked, 7);
}

/// A uniform hash that is the same in every run.
fn mixed(number: u64) -> u64 {
    // splitmix64
    let mut hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[test]
fn most_rejected_keys_are_reported_overall_and_by_limit() {
    let service = test_service(
        "descriptors:\n\
         - {key: login, rate_limit: {unit: hour, requests_per_unit: 2}}\n\
         - {key: path, value: /a*, share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 1}}\n\
         - {key: trial, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}\n",
    );
    send(&service, "login=ann", 9);
    send(&service, "login=bob", 4);
    send(&service, "login=eve", 2);
    send(&service, "path=/a1", 3);
    send(&service, "path=/a2", 3);
    send(&service, "trial=x", 4);
    let report = top(&service, &top::TopQuery::default());
    assert_eq!(report.max_missed_hits, 0);
    assert_eq!(
        lines(&report.overall),
        [
            "shop.login login=ann: 7 to 7",
            "shop.path_/a* path=/a*: 5 to 5",
            "shop.trial trial=x: 3 to 3",
            "shop.login login=bob: 2 to 2"
        ]
    );
    let sums: Vec<_> = report.by_limit.iter().map(|of| (of.rule.as_str(), of.rejected_at_least)).collect();
    assert_eq!(sums, [("shop.login", 9), ("shop.path_/a*", 5), ("shop.trial", 3)]);
    let only = top(&service, &top::TopQuery { rule: Some("shop.login".into()), most: Some(1), ..Default::default() });
    assert_eq!(lines(&only.overall), ["shop.login login=ann: 7 to 7"]);
    assert_eq!(only.by_limit.len(), 1);
    // A prefix must end at a dot.
    let none = top(&service, &top::TopQuery { rule: Some("shop.log".into()), ..Default::default() });
    assert!(none.overall.is_empty());
}

#[test]
fn rejected_peeks_are_in_the_report_with_their_requests() {
    let limit = "{unit: hour, requests_per_unit: 2, algorithm: sliding_window_log}";
    let service = test_service(&format!("descriptors:\n- {{key: login, rate_limit: {limit}}}\n"));
    send(&service, "login=ann", 2);
    for hits in [0, 0, 0, 4, 0] {
        let _ = decide(&service, &shop_request("login=ann").hits(hits));
    }
    let report = top(&service, &top::TopQuery::default());
    // A peek asks whether one more hit fits.
    assert_eq!(lines(&report.overall), ["shop.login login=ann: 8 to 8"]);
    assert_eq!(report.overall[0].requests_at_least, 5);
    let limit = &rules(&service)["shop.login"];
    assert_eq!((limit.rejected, limit.distinct_rejected_keys), (5, 1));
}

#[test]
fn rejections_leave_the_report_with_their_minute() {
    let service = test_service("descriptors:\n- {key: login, rate_limit: {unit: day, requests_per_unit: 1}}\n");
    send(&service, "login=ann", 6);
    service.advance_us(2 * 60 * SECOND_US);
    send(&service, "login=ann", 3);
    let rejected_hits = |minutes: u64| {
        let report = top(&service, &top::TopQuery { minutes: Some(minutes), ..Default::default() });
        report.overall.first().map_or(0, |key| key.rejected_at_least)
    };
    assert_eq!([1, 2, 3, 10].map(rejected_hits), [3, 3, 8, 8]);
    service.advance_us(8 * 60 * SECOND_US);
    assert_eq!([1, 10].map(rejected_hits), [0, 3]);
    service.advance_us(2 * 60 * SECOND_US);
    assert_eq!(rejected_hits(10), 0);
}

#[test]
fn rejections_keep_the_mode_in_which_they_happened() {
    let rule = |mode: &str| {
        format!("descriptors:\n- {{key: login, {mode} rate_limit: {{unit: day, requests_per_unit: 1}}}}\n")
    };
    let service = test_service(&rule("shadow_mode: true,"));
    send(&service, "login=ann", 4);
    assert!(rules_text(&service).contains(" shop.login (shadow mode)\n"), "{}", rules_text(&service));
    load_shop_rules(&service, &rule(""));
    send(&service, "login=ann", 2);
    let report = top(&service, &top::TopQuery::default());
    let modes = report.overall.iter().map(|key| (key.rejected_at_least, key.mode));
    assert_eq!(modes.collect::<Vec<_>>(), [(3, Some(UnenforcedMode::Shadow)), (2, None)]);
    let text = report.format_text(top::TopTextContent::Rejected);
    assert!(
        text.contains("\nshop.login (shadow): at least 3\n") && text.contains("\nshop.login: at least 2\n"),
        "{text}"
    );
    let top_keys = &service.inner.decider.metrics.top_keys;
    let rows = RejectionsReport::new(top_keys, service.now(), &RejectionsQuery::default(), true).unwrap().rejections;
    let modes = rows.iter().map(|row| (row.rejected_at_least, row.mode));
    assert_eq!(modes.collect::<Vec<_>>(), [(3, Some(UnenforcedMode::Shadow)), (2, None)]);
    assert!(
        rules_text(&service).contains(" shop.login (3 of the rejected in shadow mode)\n"),
        "{}",
        rules_text(&service)
    );
    load_shop_rules(&service, &rule("shadow_mode: true,"));
    assert!(
        rules_text(&service).contains(" shop.login (shadow mode, 2 rejected before)\n"),
        "{}",
        rules_text(&service)
    );
}

/// Rows of `/rejections`, as `minute key requests`.
fn rejections(service: &TestService, query: &RejectionsQuery) -> Vec<String> {
    let report = RejectionsReport::new(&service.inner.decider.metrics.top_keys, service.now(), query, true).unwrap();
    let row = |row: &KeyRejectionsInMinute| format!("{} {} {}", &row.minute[11..16], row.key, row.requests_at_least);
    report.rejections.iter().map(row).collect()
}

#[test]
fn rejections_of_the_last_hour_are_found_by_key_and_minute() {
    let service = test_service("descriptors:\n- {key: login, rate_limit: {unit: day, requests_per_unit: 1}}\n");
    send(&service, "login=ann", 4);
    service.advance_us(30 * 60 * SECOND_US);
    send(&service, "login=bob", 3);
    send(&service, "login=ann", 1);
    let find = |query| rejections(&service, &query);
    let (ann, bob) = ("08:00 login=ann 3".to_owned(), "08:30 login=bob 2".to_owned());
    let later = "08:30 login=ann 1".to_owned();
    assert_eq!(find(RejectionsQuery::default()), [&bob, &later, &ann].map(Clone::clone));
    let by_key = RejectionsQuery { key: Some("login=ann".to_owned()), ..Default::default() };
    assert_eq!(find(by_key.clone()), [later.clone(), ann.clone()]);
    for (at, expected) in
        [("08:01", vec![ann.clone()]), ("2027-01-15T08:28:59Z", vec![bob, later.clone()]), ("08:10", vec![])]
    {
        assert_eq!(find(RejectionsQuery { at: Some(at.to_owned()), ..Default::default() }), expected, "{at}");
    }
    for at in ["8", "24:00", "08:60", "now", "08:1"] {
        let query = RejectionsQuery { at: Some(at.to_owned()), ..Default::default() };
        let top_keys = &service.inner.decider.metrics.top_keys;
        assert!(RejectionsReport::new(top_keys, service.now(), &query, true).is_err(), "{at}");
    }
    service.advance_us(29 * 60 * SECOND_US);
    assert_eq!(rejections(&service, &by_key), [later.clone(), ann]);
    service.advance_us(60 * SECOND_US);
    assert_eq!(rejections(&service, &by_key), [later], "an hour has passed");
}

#[test]
fn remembered_rejections_are_bounded_and_those_with_most_hits() {
    let top = TopKeys::remembering_past(2048);
    let stats = LimitStats::new(LimitName::new(["shop", "key"]));
    let reject = |key: u64, hits: u64, now: Time| {
        let id = u128::from(mixed(key)) << 64 | u128::from(mixed(key + 1_000_000));
        top.record_key(KeyHits { id, limit: &stats, mode: None, hits }, now, |text| {
            text.extend_from_slice(key.to_string().as_bytes());
        });
    };
    for minute in 0..60 {
        let now = NOON.plus_us(minute * 60 * SECOND_US);
        (1..=1000).for_each(|key| reject(key, key, now));
    }
    let minutes = top.remembered_keys_by_minute(NOON.plus_us(59 * 60 * SECOND_US));
    assert_eq!(minutes.len(), 60);
    for (number, minute) in minutes.iter().enumerate() {
        let is_past = number < 50;
        assert_eq!(minute.keys.len(), if is_past { 256 } else { 1000 }, "32 of each of 8 shards");
        let listed: HashSet<_> = minute.keys.iter().map(|key| key.text.parse::<u64>().unwrap()).collect();
        let missing = (1..=1000).filter(|key| !listed.contains(key)).max().unwrap_or(0);
        assert!(missing <= minute.max_missed && minute.max_missed < 1000, "{missing}, {}", minute.max_missed);
        assert!(listed.contains(&1000));
    }
}

#[test]
fn rotating_values_use_bounded_memory_and_hide_no_key() {
    let service = TestService::new([("TOLLKEEPER_TOP_KEYS", "64")], NOON);
    load_shop_rules(&service, "descriptors:\n- {key: id, rate_limit: {unit: hour, requests_per_unit: 0}}\n");
    for round in 0..2000 {
        send(&service, &format!("id=rotating{round}"), 1);
        send(&service, "id=heavy", 1);
    }
    let report = top(&service, &top::TopQuery { most: Some(1000), ..Default::default() });
    // Metrics of a test service have room for 256 keys.
    assert!(report.overall.len() <= 256, "{}", report.overall.len());
    let heavy = &report.overall[0];
    assert_eq!(heavy.key, "id=heavy");
    assert!(heavy.rejected_at_least <= 2000 && 2000 <= heavy.rejected_at_most, "{heavy:?}");
    assert!(report.max_missed_hits <= 4000 / 32, "{}", report.max_missed_hits);
}

#[test]
fn concurrent_rejections_are_all_counted() {
    let service = test_service("descriptors:\n- {key: login, rate_limit: {unit: hour, requests_per_unit: 0}}\n");
    in_parallel(4, |thread| send(&service, &format!("login=k{}", thread % 2), 500));
    let report = top(&service, &top::TopQuery::default());
    assert_eq!(lines(&report.overall), ["shop.login login=k0: 1000 to 1000", "shop.login login=k1: 1000 to 1000"]);
}

#[test]
fn findings_name_unusual_limits() {
    let service = test_service(
        "descriptors:\n\
         - {key: never, rate_limit: {unit: minute, requests_per_unit: 5}}\n\
         - {key: wide, rate_limit: {unit: minute, requests_per_unit: 500}}\n\
         - {key: request, rate_limit: {unit: minute, requests_per_unit: 5}}\n\
         - {key: bursty, rate_limit: {unit: second, requests_per_unit: 10}}\n\
         - {key: steady, rate_limit: {unit: second, requests_per_unit: 10}}\n\
         - {key: bucket, rate_limit: {unit: second, requests_per_unit: 10, algorithm: token_bucket}}\n",
    );
    send(&service, "wide=x", 150);
    (0..200).for_each(|number| send(&service, &format!("request={number}"), 1));
    for second in 0..60 {
        if second < 3 {
            send(&service, "bursty=x", 40);
            send(&service, "bucket=x", 40);
        }
        send(&service, "steady=x", 12);
        service.advance_us(SECOND_US);
    }
    let limits = rules(&service);
    let found: Vec<_> = limits.iter().map(|(name, limit)| (name.as_str(), findings(limit))).collect();
    assert_eq!(
        found,
        [
            ("shop.bucket", vec![]),
            ("shop.bursty", vec![LimitFindingKind::TokenBucket]),
            ("shop.never", vec![LimitFindingKind::NeverMatched]),
            ("shop.request", vec![LimitFindingKind::NeverRejected, LimitFindingKind::KeysSeenOnce]),
            ("shop.steady", vec![]),
            ("shop.wide", vec![LimitFindingKind::NeverRejected]),
        ]
    );
    // Most limits reject nothing: the text says once how many, and names those with other findings.
    let text = rules_text(&service);
    let told = "2 limits with decisions rejected nothing, 2 of them had no hit near the limit either";
    assert_eq!((text.matches("rejected nothing").count(), text.contains(told)), (1, true), "{text}");
    assert!(
        !text.contains("\nshop.wide (") && text.contains("\nshop.request (") && !text.contains("too high"),
        "{text}"
    );
    let numbers = |name: &str| {
        let limit = &limits[name];
        (limit.matched, limit.rejected, limit.distinct_keys, limit.distinct_rejected_keys, limit.burst_share)
    };
    assert_eq!(numbers("shop.bursty"), (120, 90, 1, 1, Some(1.0)));
    assert_eq!(numbers("shop.steady"), (720, 120, 1, 1, Some(0.0)));
    let advice = &limits["shop.bursty"].findings[0].advice;
    assert!(advice.contains("90 of 90 hits") && advice.contains("`bucket_size: 100`"), "{advice}");
    let (request, distinct) = (&limits["shop.request"], limits["shop.request"].distinct_keys);
    assert!(request.matched == 200 && distinct.abs_diff(200) < 40, "{distinct}");
}

#[test]
fn detailed_metric_rule_is_reported_as_one() {
    let service = test_service(
        "descriptors:\n- {key: user, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 1}}\n",
    );
    send(&service, "user=a", 3);
    send(&service, "user=b", 1);
    let limits = rules(&service);
    assert_eq!(limits.keys().collect::<Vec<_>>(), ["shop.user"]);
    let limit = &limits["shop.user"];
    assert_eq!((limit.matched, limit.rejected, limit.distinct_keys), (4, 2, 2));
}

#[test]
fn request_text_cannot_control_a_terminal() {
    let service = test_service("descriptors:\n- {key: login, rate_limit: {unit: hour, requests_per_unit: 0}}\n");
    send(&service, "login=\u{1b}[2Jx\n\u{202e}y", 1);
    send(&service, &format!("login={}", "ä".repeat(400)), 1);
    let report = top(&service, &top::TopQuery::default());
    let text = report.format_text(top::TopTextContent::Rejected);
    assert!(text.contains(r"login=\u{1b}[2Jx\n\u{202e}y"), "{text}");
    assert!(!text.chars().any(|c| c != '\n' && c.is_control()), "{text:?}");
    let longest = report.overall.iter().map(|key| key.key.len()).max();
    assert!(longest <= Some(256 + ",#0123456789abcdef".len()), "{longest:?}");
}

#[test]
fn top_and_rules_pages_report_and_reject_unknown_parameters() {
    let server =
        with_rules("domain: shop\ndescriptors:\n- {key: login, rate_limit: {unit: day, requests_per_unit: 1}}\n")
            .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
            .start();
    let client = grpc::Client::connect(server.grpc_port());
    (0..5).for_each(|_| drop(client.call(&grpc::rate_limit_request("shop", &[("login", "ann")])).unwrap()));
    let page = |path: &str| http::get(server.debug_port(), path).send();
    let json: serde_json::Value = serde_json::from_slice(&page("/top?minutes=10").body).unwrap();
    assert_eq!(json["overall"][0]["key"], "login=ann");
    assert_eq!(json["overall"][0]["rejected_at_least"], 4);
    assert_eq!(json["overall"][0]["entries"], serde_json::json!([{"key": "login", "value": "ann"}]));
    let minutes = json["by_minute"].as_array().unwrap();
    assert_eq!(minutes.len(), 10);
    assert_eq!(minutes.iter().map(|minute| minute["rejected_at_least"].as_u64().unwrap()).sum::<u64>(), 4, "{json:#}");
    assert!(
        minutes.is_sorted_by_key(|minute| minute["start_s"].as_u64()) && minutes[9]["at"].as_str().unwrap().len() == 5
    );
    let other: serde_json::Value = serde_json::from_slice(&page("/top?rule=shop.other").body).unwrap();
    assert!(other["by_minute"].as_array().unwrap().iter().all(|minute| minute["rejected_at_least"] == 0), "{other:#}");
    let text = page("/top?format=text").text();
    assert!(text.contains("login=ann"), "{text}");
    let json: serde_json::Value = serde_json::from_slice(&page("/rules").body).unwrap();
    assert_eq!(json["rules"][0]["matched"], 5);
    let rule = &json["rules"][0];
    assert_eq!((&rule["domain"], &rule["line"], &rule["of"]), (&"shop".into(), &3.into(), &serde_json::Value::Null));
    assert!(
        rule["file"].as_str().unwrap().ends_with(".yaml") && rule["path"] == serde_json::json!(["login"]),
        "{rule:#}"
    );
    assert!(page("/rules?format=text").text().starts_with("10 MIN"));
    assert!(page("/rules?finding=never_matched").text().contains("\"limits\": 0"));
    for wrong in ["/top?minute=1", "/top?minutes=x", "/rules?finding=nothing", "/rules?format=xml"] {
        assert_eq!(page(wrong).status, 400, "{wrong}");
    }
    let index = page("/").text();
    let listed: HashSet<_> = index.lines().filter_map(|line| line.split([':', '?']).next()).collect();
    assert!(["/top", "/rules", "/settings", "/counters", "/reset"].iter().all(|page| listed.contains(page)), "{index}");
}

#[test]
fn override_has_one_name_in_top_metadata_and_stats() {
    let server =
        with_rules("domain: shop\ndescriptors:\n- {key: user, rate_limit: {unit: day, requests_per_unit: 9}}\n")
            .env("TOLLKEEPER_METADATA_VERDICTS", "true")
            .start();
    let long = "x".repeat(600);
    for (value, name) in [("ann", "shop.user_ann"), ("", "shop.user"), (&*long, "shop._other")] {
        let request = serde_json::json!({
            "domain": "shop",
            "descriptors": [{
                "entries": [{"key": "user", "value": value}],
                "limit": {"requestsPerUnit": 0, "unit": "HOUR"},
            }],
        });
        let answer: serde_json::Value =
            serde_json::from_str(&http::post(server.http_port(), "/json", request.to_string()).send().text()).unwrap();
        assert_eq!(answer["dynamicMetadata"]["over_limit"][0]["rule"], name, "{answer:#}");
        let page = |path: &str| http::get(server.debug_port(), path).send().text();
        let top: serde_json::Value = serde_json::from_str(&page(&format!("/top?rule={name}"))).unwrap();
        let named = top["overall"].as_array().unwrap().iter().filter(|key| key["rule"] == name).count();
        assert_eq!(named, 1, "{top:#}");
        let stats = page("/stats");
        let line = format!("ratelimit.service.rate_limit.{name}.over_limit: 1");
        assert!(stats.lines().any(|found| found == line), "{line} is not in {stats}");
    }
}

#[test]
fn hostile_keys_have_exact_entries_or_none() {
    let service = test_service("descriptors:\n- {key: login, rate_limit: {unit: day, requests_per_unit: 0}}\n");
    let long = "x".repeat(300);
    let cut_escape = format!("{},", "x".repeat(256 - "login=".len() - 1));
    let values = ["a,b=c\\d", "", "=", "\\", ",#0123456789abcdef", &*long, &*cut_escape];
    for value in values {
        drop(decide(&service, &TestRequest::new("shop").descriptor(&[("login", value)])));
    }
    let report = top(&service, &top::TopQuery::default());
    let mut found: Vec<_> = report.overall.iter().map(|key| key.entries.clone()).collect();
    assert_eq!(found.len(), values.len());
    found.retain(Option::is_some);
    assert_eq!(found.len(), values.len() - 2, "{report:#?}");
    for value in &values[..5] {
        let entry = KeyEntry { key: "login".to_owned(), value: Some((*value).to_owned()) };
        assert!(found.contains(&Some(vec![entry])), "{value}: {found:?}");
    }
}

#[test]
fn hashed_values_are_not_in_top() {
    let server =
        with_rules("domain: shop\ndescriptors:\n- {key: login, rate_limit: {unit: day, requests_per_unit: 1}}\n")
            .env("TOLLKEEPER_TOP_VALUES", "hashed")
            .env("TOLLKEEPER_DECISION_LOG_HASH_KEY", "a secret of all replicas")
            .start();
    let client = grpc::Client::connect(server.grpc_port());
    (0..5).for_each(|_| drop(client.call(&grpc::rate_limit_request("shop", &[("login", "ann")])).unwrap()));
    for page in ["/top", "/top?format=text", "/fleet", "/rules"] {
        let text = http::get(server.debug_port(), page).send().text();
        assert!(!text.contains("ann\"") && !text.contains("=ann"), "{page}: {text}");
    }
    let json: serde_json::Value = serde_json::from_slice(&http::get(server.debug_port(), "/top").send().body).unwrap();
    let key = &json["overall"][0];
    assert_eq!(key["key"].as_str().unwrap().len(), "login=".len() + 32, "{json:#}");
    assert_eq!(key["entries"], serde_json::json!([{"key": "login"}]), "{json:#}");
}
