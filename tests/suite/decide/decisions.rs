//! Decisions, from a message and the text of rule files to the response, in this process at known times.
//!
//! Each test is a table of requests with the response as text (see `TestResponse::text`): verdict, each descriptor's
//! limit, its remaining hits and the seconds until its reset, headers. The tests cover rules, settings, matching,
//! charging and merging.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName};
use jiff::Timestamp;
use serde_json::{Value, json};
use tollkeeper::base::clock::Time;
use tollkeeper::base::pb::RateLimitDescriptor;
use tollkeeper::decide::merge::jitter_s;
use tollkeeper::rules::rule::RejectionResponse;
use tollkeeper::serve::grpc::call::CallHead;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::health::{Health, HealthRequirements};
use tollkeeper::serve::metrics_collector::MetricsCollector;
use tollkeeper::telemetry::metrics::limit_stats::LimitStat;
use tollkeeper::telemetry::metrics::statsd::{StatsdEncoder, StatsdFormat};
use tollkeeper::telemetry::metrics::{Family, MetricKind, MetricValue, Series};
use tonic::Code;

use kit::fixtures::{assert_responses, decide, load_shop_rules, shop_request};
use kit::test_service::{TestRequest, TestResponse, TestService};

/// Noon on Wednesday the 8th of July 2026: full minutes and hours begin, the day and the week are half a day from
/// their end.
const NOON: Time = Time::from_secs(1_783_512_000);
const MS: u64 = 1_000;
const SECOND: u64 = 1_000 * MS;

/// A service with rules of the domain `shop`, given from `descriptors` or `defaults` on, at noon.
fn test_service(env: &[(&str, &str)], rules: &str) -> TestService {
    let service = TestService::new(env.iter().copied(), NOON);
    load_shop_rules(&service, rules);
    service
}

#[test]
fn charge_refund_and_peek_report_what_remains() {
    let service = test_service(
        &[("TOLLKEEPER_RETRY_AFTER_HEADER", "")],
        "descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 10}}",
    );
    let k = || shop_request("k");
    assert_responses(
        &service,
        &[
            (k(), "OK [OK 10/HOUR left 9 in 3600 s]"),
            (k().request_hits(3), "OK [OK 10/HOUR left 6 in 3600 s]"),
            (k().hits(2).request_hits(5), "OK [OK 10/HOUR left 4 in 3600 s]"),
            (k().hits(0), "OK [OK 10/HOUR left 4 in 3600 s]"),
            (k().hits(0).request_hits(5), "OK [OK 10/HOUR left 4 in 3600 s]"),
            (k().refund(3), "OK [OK 10/HOUR left 7 in 3600 s]"),
            (k().refund(100), "OK [OK 10/HOUR left 10 in 3600 s]"),
            (k().hits(11), "OVER [OVER 10/HOUR left 0 in 3600 s]"),
            // Rejected hits count, as in envoyproxy/ratelimit, and a peek is rejected only past the limit.
            (k().hits(0), "OVER [OVER 10/HOUR left 0 in 3600 s]"),
            (k().refund(1), "OK [OK 10/HOUR left 0 in 3600 s]"),
            (k().hits(0), "OK [OK 10/HOUR left 0 in 3600 s]"),
            (k(), "OVER [OVER 10/HOUR left 0 in 3600 s]"),
            (k().hits(u64::MAX), "OVER [OVER 10/HOUR left 0 in 3600 s]"),
            // Both are clamped to the same number, so the eleven hits from before remain.
            (k().refund(u64::MAX), "OK [OK 10/HOUR left 0 in 3600 s]"),
            (
                shop_request("k=2; k=2; k=2").request_hits(4),
                "OVER [OK 10/HOUR left 6 in 3600 s, OK 10/HOUR left 2 in 3600 s, \
                                            OVER 10/HOUR left 0 in 3600 s]",
            ),
        ],
    );
}

#[test]
fn override_takes_precedence_over_rule_if_its_unit_is_known() {
    let service = test_service(
        &[("TOLLKEEPER_RETRY_AFTER_HEADER", "")],
        "descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 5, name: own}}",
    );
    let own = "OK [OK own: 5/HOUR left 4 in 3600 s]";
    let table = [
        // unit, multiplier, response
        (1, None, "OK [OK 3/SECOND left 2 in 1 s]"),
        (2, None, "OK [OK 3/MINUTE left 2 in 60 s]"),
        (3, None, "OK [OK 3/HOUR left 2 in 3600 s]"),
        (4, None, "OK [OK 3/DAY left 2 in 43200 s]"),
        (5, None, "OK [OK 3/MONTH left 2 in 2376000 s]"),
        (6, None, "OK [OK 3/YEAR left 2 in 14040000 s]"),
        (7, None, "OK [OK 3/WEEK left 2 in 43200 s]"),
        (2, Some(1), "OK [OK 3/MINUTE left 2 in 60 s]"),
        (2, Some(5), "OK [OK 3/5 MINUTE left 2 in 300 s]"),
        (7, Some(2), "OK [OK 3/2 WEEK left 2 in 648000 s]"),
        (4, Some(366), "OK [OK 3/366 DAY left 2 in 18964800 s]"),
        (1, Some(31_622_400), "OK [OK 3/31622400 SECOND left 2 in 18964800 s]"),
        (0, None, own),
        (8, None, own),
        (-1, None, own),
        (i32::MAX, None, own),
        (i32::MIN, Some(1), own),
        (2, Some(0), own),
        (7, Some(0), own),
        (4, Some(367), own),
        (1, Some(31_622_401), own),
        (1, Some(u32::MAX), own),
        (6, Some(2), own),
        (6, Some(u32::MAX), own),
    ];
    for (place, (unit, multiplier, expected)) in table.into_iter().enumerate() {
        let request = shop_request(&format!("k={place}")).limit(3, unit, multiplier);
        assert_eq!(decide(&service, &request).text(), expected, "{unit} times {multiplier:?}");
    }
    assert_responses(
        &service,
        &[
            // Only the limit decides: the request needs no rule.
            (shop_request("x=1,y=2").limit(1, 3, None), "OK [OK 1/HOUR left 0 in 3600 s]"),
            (shop_request("x=1,y=2").limit(1, 3, None), "OVER [OVER 1/HOUR left 0 in 3600 s]"),
            (shop_request("x=1,y=2").limit(1, 0, None), "OK [OK]"),
            (shop_request("x").limit(0, 3, None), "OVER [OVER 0/HOUR left 0 in 3600 s]"),
            (shop_request("x").limit(u32::MAX, 3, None), "OK [OK 4294967295/HOUR left 4294967293 in 3600 s]"),
            // It needs a domain with rules.
            (TestRequest::new("elsewhere").descriptor(&[("k", "")]).limit(0, 3, None), "OK [OK]"),
        ],
    );
}

#[test]
fn override_uses_the_domain_defaults() {
    let table = [
        // defaults, then the responses to charges of 1, 1 and 3 at 4 per minute
        ("{}", ["OK 4/MINUTE left 3 in 60 s", "OK 4/MINUTE left 2 in 60 s", "OVER 4/MINUTE left 0 in 60 s"]),
        (
            "{algorithm: token_bucket}",
            ["OK 4/MINUTE left 3 in 15 s", "OK 4/MINUTE left 2 in 30 s", "OVER 4/MINUTE left 0 in 15 s"],
        ),
        (
            "{algorithm: leaky_bucket}",
            ["OK 4/MINUTE left 0 in 15 s", "OVER 4/MINUTE left 0 in 15 s", "OVER 4/MINUTE left 0 in 15 s"],
        ),
        (
            "{algorithm: leaky_bucket, queue_size: 3}",
            ["OK 4/MINUTE left 2 in 15 s", "OK 4/MINUTE left 1 in 30 s", "OVER 4/MINUTE left 0 in 30 s"],
        ),
        (
            "{algorithm: leaky_bucket, queue_size: 3, max_wait: 14s}",
            ["OK 4/MINUTE left 2 in 15 s", "OVER 4/MINUTE left 0 in 1 s", "OVER 4/MINUTE left 0 in 15 s"],
        ),
        (
            "{algorithm: sliding_window_log}",
            ["OK 4/MINUTE left 3 in 60 s", "OK 4/MINUTE left 2 in 60 s", "OVER 4/MINUTE left 0 in 60 s"],
        ),
        (
            // The previous window counts in full at its very end; a microsecond later one hit less.
            "{algorithm: sliding_window_counter}",
            ["OK 4/MINUTE left 3 in 61 s", "OK 4/MINUTE left 2 in 91 s", "OVER 4/MINUTE left 0 in 61 s"],
        ),
    ];
    for (defaults, expected) in table {
        let service = test_service(&[], &format!("defaults: {defaults}"));
        let statuses = [1, 1, 3].map(|hits| {
            let text = decide(&service, &shop_request("k").hits(hits).limit(4, 2, None)).text();
            text[text.find('[').unwrap() + 1..text.find(']').unwrap()].to_owned()
        });
        assert_eq!(statuses, expected, "{defaults}");
    }
}

#[test]
fn override_above_log_max_uses_sliding_window_counter() {
    let service = test_service(&[("TOLLKEEPER_LOG_MAX", "100")], "defaults: {algorithm: sliding_window_log}");
    assert_responses(
        &service,
        &[
            (shop_request("a").limit(100, 2, None), "OK [OK 100/MINUTE left 99 in 60 s]"),
            // A counter resets at the end of the next window, a log earlier.
            (shop_request("a").limit(101, 2, None), "OK [OK 101/MINUTE left 100 in 61 s]"),
        ],
    );
}

#[test]
fn unlimited_rule_is_not_counted() {
    let service = test_service(
        &[],
        "descriptors:
  - {key: free, rate_limit: {unlimited: true}}
  - {key: none, rate_limit: {unit: hour, requests_per_unit: 0}}",
    );
    assert_responses(
        &service,
        &[
            (shop_request("free"), "OK [OK unlimited]"),
            (shop_request("free").hits(u64::MAX), "OK [OK unlimited]"),
            (shop_request("free").hits(0), "OK [OK unlimited]"),
            (shop_request("free; none"), "OVER [OK unlimited, OVER 0/HOUR left 0 in 3600 s]"),
            (shop_request("free; other"), "OK [OK unlimited, OK]"),
            // Nothing was charged: a peek at an empty counter passes.
            (shop_request("none").hits(0), "OVER [OVER 0/HOUR left 0 in 3600 s] Retry-After: 3600"),
            (shop_request("none=2").hits(0), "OK [OK 0/HOUR left 0 in 3600 s]"),
        ],
    );
    assert_eq!(service.inner.decider.store.stats().memory.counters, 1);
}

#[test]
fn shadow_rule_is_counted_and_rejects_nothing() {
    let rules = "descriptors:
  - {key: shadow, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: real, rate_limit: {unit: hour, requests_per_unit: 2}}";
    assert_responses(
        &test_service(&[], rules),
        &[
            (shop_request("shadow"), "OK [OK 1/HOUR left 0 in 3600 s]"),
            (shop_request("shadow"), "OK [OK 1/HOUR left 0 in 3600 s]"),
            (shop_request("shadow; real"), "OK [OK 1/HOUR left 0 in 3600 s, OK 2/HOUR left 1 in 3600 s]"),
            (shop_request("real"), "OK [OK 2/HOUR left 0 in 3600 s]"),
            (
                shop_request("shadow; real"),
                "OVER [OK 1/HOUR left 0 in 3600 s, OVER 2/HOUR left 0 in 3600 s] Retry-After: 3600",
            ),
        ],
    );
    // SHADOW_MODE changes the verdict only.
    assert_responses(
        &test_service(&[("SHADOW_MODE", "true")], rules),
        &[
            (shop_request("real"), "OK [OK 2/HOUR left 1 in 3600 s]"),
            (shop_request("real").hits(2), "OK [OVER 2/HOUR left 0 in 3600 s]"),
            (shop_request("x").limit(0, 3, None), "OK [OVER 0/HOUR left 0 in 3600 s]"),
        ],
    );
}

#[test]
fn quota_limits_reject_only_if_every_quota_is_exceeded() {
    let rules = "descriptors:
  - {key: real, value: 'no', rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: real, rate_limit: {unit: hour, requests_per_unit: 999}}
  - {key: quota, value: 'no', quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: quota, value: 'no2', quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: quota, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 999}}
  - {key: shadow, shadow_mode: true, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: free, rate_limit: {unlimited: true}}";
    let (plain, all) = (test_service(&[], rules), test_service(&[("QUOTA_MODE", "true")], rules));
    let table = [
        // request, rejected, rejected with QUOTA_MODE
        ("real", false, false),
        ("real=no", true, true),
        ("real; real=no", true, false),
        ("real=no; real=no", true, true),
        ("quota", false, false),
        ("quota=no", true, true),
        ("quota=no; quota", false, false),
        ("quota=no; quota=no2", true, true),
        ("quota=no; real", true, false),
        ("quota; real=no", true, false),
        ("quota=no; shadow", false, false),
        // An unlimited rule is not a quota; under QUOTA_MODE a descriptor without a limit is one.
        ("quota=no; free", true, true),
        ("quota=no; other", true, false),
        ("real=no; free", true, true),
        ("real=no; other", true, false),
        ("other", false, false),
        ("free", false, false),
    ];
    for (request, rejected, rejected_with_quota_mode) in table {
        assert_eq!(decide(&plain, &shop_request(request)).over_limit(), rejected, "{request}");
        assert_eq!(
            decide(&all, &shop_request(request)).over_limit(),
            rejected_with_quota_mode,
            "{request}, all quotas"
        );
    }
}

#[test]
fn replaces_disables_named_limits_of_the_same_request() {
    let service = test_service(
        &[],
        "descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 9, name: a, replaces: [{name: b}]}}
  - {key: b, rate_limit: {unit: hour, requests_per_unit: 9, name: b, replaces: [{name: c}]}}
  - {key: c, rate_limit: {unit: hour, requests_per_unit: 9, name: c}}
  - {key: free, rate_limit: {unlimited: true, replaces: [{name: c}]}}
  - key: list
    rate_limit:
      - {unit: minute, requests_per_unit: 3, name: c}
      - {unit: hour, requests_per_unit: 9}
  - key: twice
    rate_limit:
      - {unit: minute, requests_per_unit: 9, replaces: [{name: a}]}
      - {unit: hour, requests_per_unit: 9, replaces: [{name: b}]}",
    );
    assert_responses(
        &service,
        &[
            (shop_request("b"), "OK [OK b: 9/HOUR left 8 in 3600 s]"),
            (shop_request("a; b"), "OK [OK a: 9/HOUR left 8 in 3600 s, OK]"),
            (shop_request("b; a"), "OK [OK, OK a: 9/HOUR left 7 in 3600 s]"),
            // A replaced rule still replaces others.
            (shop_request("c; b; a"), "OK [OK, OK, OK a: 9/HOUR left 6 in 3600 s]"),
            (shop_request("c; b"), "OK [OK, OK b: 9/HOUR left 7 in 3600 s]"),
            (shop_request("c; c"), "OK [OK c: 9/HOUR left 8 in 3600 s, OK c: 9/HOUR left 7 in 3600 s]"),
            (shop_request("free; c"), "OK [OK unlimited, OK]"),
            (shop_request("list"), "OK [OK c: 3/MINUTE left 2 in 60 s]"),
            (shop_request("list; free"), "OK [OK 9/HOUR left 7 in 3600 s, OK unlimited]"),
            (shop_request("list"), "OK [OK c: 3/MINUTE left 1 in 60 s]"),
            (shop_request("twice; a; b; c").hits(0), "OK [OK 9/MINUTE left 8 in 60 s, OK, OK, OK]"),
        ],
    );
}

#[test]
fn exact_value_beats_wildcard_and_wildcard_beats_bare_key() {
    let service = test_service(
        &[],
        "descriptors:
  - {key: path, rate_limit: {unit: hour, requests_per_unit: 1000}}
  - {key: path, value: '/api/*', share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 100}}
  - {key: path, value: '/api/v*', rate_limit: {unit: hour, requests_per_unit: 200}}
  - {key: path, value: '/*/img', rate_limit: {unit: hour, requests_per_unit: 300}}
  - {key: path, value: '/api/v1', rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: path, value: '/deep', descriptors: [{key: user, value: u1, rate_limit: {unit: hour, requests_per_unit: 7}}]}",
    );
    assert_responses(
        &service,
        &[
            (shop_request("path=/api/v1"), "OK [OK 10/HOUR left 9 in 3600 s]"),
            (shop_request("path=/other"), "OK [OK 1000/HOUR left 999 in 3600 s]"),
            (shop_request("path=/another"), "OK [OK 1000/HOUR left 999 in 3600 s]"),
            // The first wildcard in the file wins, not the longest; its values share a counter.
            (shop_request("path=/api/v2"), "OK [OK 100/HOUR left 99 in 3600 s]"),
            (shop_request("path=/api/img"), "OK [OK 100/HOUR left 98 in 3600 s]"),
            (shop_request("path=/api/"), "OK [OK 100/HOUR left 97 in 3600 s]"),
            // Without share_threshold each value has a counter of its own.
            (shop_request("path=/a/img"), "OK [OK 300/HOUR left 299 in 3600 s]"),
            (shop_request("path=/b/img"), "OK [OK 300/HOUR left 299 in 3600 s]"),
            // A value equal to the pattern matches the rule, but does not use the shared counter.
            (shop_request("path=/api/*"), "OK [OK 100/HOUR left 99 in 3600 s]"),
            (shop_request("path=/api/v3"), "OK [OK 100/HOUR left 96 in 3600 s]"),
            // Matching descends one branch and never backtracks.
            (shop_request("path=/deep,user=u1"), "OK [OK 7/HOUR left 6 in 3600 s]"),
            (shop_request("path=/deep,user=u2"), "OK [OK]"),
            (shop_request("path=/deep"), "OK [OK]"),
            (shop_request("path=/api/v1,user=u1"), "OK [OK]"),
        ],
    );
}

#[test]
fn value_that_is_not_utf8_matches_like_any_other() {
    let service = test_service(
        &[],
        "descriptors:
  - {key: agent, rate_limit: {unit: hour, requests_per_unit: 1}}",
    );
    let with = |value: &'static [u8]| {
        let mut request = shop_request("agent");
        request.0.descriptors[0].entries[0].value = value.into();
        request
    };
    for value in [&b"\xff"[..], b"\xfe", b"\xff\x00", b"\x00", b"\xef\xbf\xbd"] {
        assert!(!decide(&service, &with(value)).over_limit(), "{value:?} has a counter of its own");
        assert!(decide(&service, &with(value)).over_limit(), "{value:?} is counted");
    }
}

const LIST: &str = "descriptors:
  - key: k
    rate_limit:
      - {unit: second, requests_per_unit: 2}
      - {unit: minute, requests_per_unit: 3, name: slow}
      - {unit: day, requests_per_unit: 100}";

#[test]
fn status_shows_the_longest_rejection_else_the_smallest_share_left() {
    let service = test_service(&[("TOLLKEEPER_RETRY_AFTER_HEADER", "")], LIST);
    let k = || shop_request("k");
    assert_responses(
        &service,
        &[
            (k().hits(0), "OK [OK 2/SECOND left 2 in 1 s]"),
            (k(), "OK [OK 2/SECOND left 1 in 1 s]"),
            (k(), "OK [OK 2/SECOND left 0 in 1 s]"),
            (k(), "OVER [OVER 2/SECOND left 0 in 1 s]"),
            // Two limits reject: the longer wait is shown.
            (k().hits(2), "OVER [OVER slow: 3/MINUTE left 0 in 60 s]"),
            // Hits that can never pass wait longest.
            (k().hits(3), "OVER [OVER 2/SECOND left 0 in 1 s]"),
        ],
    );
    service.advance_us(SECOND);
    assert_responses(
        &service,
        &[
            // Rejected hits were charged to none of the limits.
            (k(), "OK [OK slow: 3/MINUTE left 0 in 59 s]"),
            (k(), "OVER [OVER slow: 3/MINUTE left 0 in 59 s]"),
            (k().hits(0), "OVER [OVER slow: 3/MINUTE left 0 in 59 s]"),
        ],
    );
    service.advance_us(59 * SECOND);
    assert_responses(&service, &[(k().hits(0), "OK [OK 100/DAY left 97 in 43140 s]")]);
}

#[test]
fn hits_rejected_by_one_limit_are_not_charged_to_the_others() {
    let service = test_service(
        &[],
        "descriptors:
  - key: k
    rate_limit:
      - {unit: second, requests_per_unit: 10}
      - {unit: day, requests_per_unit: 1000}",
    );
    for _ in 0..10 {
        let passed = (0..100).filter(|_| !decide(&service, &shop_request("k")).over_limit()).count();
        assert_eq!(passed, 10);
        service.advance_us(SECOND);
    }
    // 900 are left of the day: the same share as of the second, so that a charge shows which limit is used.
    assert_eq!(decide(&service, &shop_request("k").hits(0)).text(), "OK [OK 1000/DAY left 900 in 43190 s]");
}

#[test]
fn shadow_limit_beside_an_enforced_limit_is_charged_but_not_reported() {
    let service = test_service(
        &[],
        "descriptors:
  - key: k
    rate_limit:
      - {unit: minute, requests_per_unit: 1, shadow_mode: true, name: shadow}
      - {unit: hour, requests_per_unit: 3}
  - key: shadows
    shadow_mode: true
    rate_limit:
      - {unit: minute, requests_per_unit: 1, name: one}
      - {unit: hour, requests_per_unit: 2, name: two}",
    );
    assert_responses(
        &service,
        &[
            (shop_request("k"), "OK [OK 3/HOUR left 2 in 3600 s]"),
            (shop_request("k"), "OK [OK 3/HOUR left 1 in 3600 s]"),
            (shop_request("k"), "OK [OK 3/HOUR left 0 in 3600 s]"),
            (shop_request("k"), "OVER [OVER 3/HOUR left 0 in 3600 s] Retry-After: 3600"),
            // If all limits are in shadow mode, the status shows one of them and rejects nothing.
            (shop_request("shadows"), "OK [OK one: 1/MINUTE left 0 in 60 s]"),
            (shop_request("shadows"), "OK [OK one: 1/MINUTE left 0 in 60 s]"),
            (shop_request("shadows"), "OK [OK two: 2/HOUR left 0 in 3600 s]"),
        ],
    );
}

#[test]
fn stop_cache_key_increment_spares_the_other_descriptors() {
    let rules = "descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: b, rate_limit: {unit: hour, requests_per_unit: 9}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 0}}";
    let both = || shop_request("a; b; other");
    let over = |left: u32| {
        format!("OVER [OVER 1/HOUR left 0 in 3600 s, OK 9/HOUR left {left} in 3600 s, OK] Retry-After: 3600")
    };
    let charged = test_service(&[], rules);
    let spared = test_service(&[("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")], rules);
    for service in [&charged, &spared] {
        assert_responses(service, &[(both(), "OK [OK 1/HOUR left 0 in 3600 s, OK 9/HOUR left 8 in 3600 s, OK]")]);
    }
    assert_responses(&charged, &[(both(), &over(7)), (both(), &over(6))]);
    assert_responses(
        &spared,
        &[
            (both(), &over(8)),
            (both(), &over(8)),
            // The rejecting counter is charged: two rejections offset two refunds, and the third shows.
            (shop_request("a").refund(2), "OK [OK 1/HOUR left 0 in 3600 s]"),
            (shop_request("a").refund(1), "OK [OK 1/HOUR left 1 in 3600 s]"),
            // The request passes, so the limit beside a rule in shadow mode is charged; refunds always count.
            (shop_request("shadow; b").hits(1), "OK [OK 0/HOUR left 0 in 3600 s, OK 9/HOUR left 7 in 3600 s]"),
            (shop_request("shadow; b").refund(1), "OK [OK 0/HOUR left 0 in 3600 s, OK 9/HOUR left 8 in 3600 s]"),
        ],
    );
}

fn at(time: &str) -> Time {
    let timestamp: Timestamp = time.parse().unwrap();
    Time::from_micros(u64::try_from(timestamp.as_microsecond()).unwrap())
}

#[test]
fn calendar_months_follow_the_calendar() {
    let rules = "descriptors:
  - {key: month, rate_limit: {unit: month, requests_per_unit: 1}}
  - {key: quarter, rate_limit: {unit: month, unit_multiplier: 3, requests_per_unit: 1}}
  - {key: bucket, rate_limit: {unit: month, requests_per_unit: 1, algorithm: token_bucket}}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 1}}";
    let service = test_service(&[("USE_CALENDAR_MONTH_RATE_LIMIT", "true")], rules);
    let day = 86_400;
    let table = [
        // time; seconds to the end of the month and of the quarter
        ("2026-01-01T00:00:00Z", 31 * day, 90 * day),
        ("2026-01-31T23:59:59Z", 1, 59 * day + 1),
        ("2026-01-31T23:59:59.999999Z", 1, 59 * day + 1),
        ("2026-02-01T00:00:00Z", 28 * day, 59 * day),
        ("2026-02-28T23:59:00Z", 60, 31 * day + 60),
        ("2026-03-01T00:00:00Z", 31 * day, 31 * day),
        ("2026-04-30T12:00:00Z", day / 2, 61 * day + day / 2),
        ("2026-12-31T23:59:59Z", 1, 1),
        ("2027-01-01T00:00:00Z", 31 * day, 90 * day),
        ("2028-02-29T00:00:00Z", day, 32 * day),
        ("2028-02-01T00:00:00Z", 29 * day, 60 * day),
        ("2100-02-28T00:00:00Z", day, 32 * day),
    ];
    for (time, month, quarter) in table {
        service.inner.clock.set(at(time));
        assert_responses(
            &service,
            &[(
                shop_request(&format!("month={time}; quarter={time}; x={time}")).limit(2, 5, None),
                &format!(
                    "OK [OK 1/MONTH left 0 in {month} s, OK 1/3 MONTH left 0 in {quarter} s, OK 2/MONTH left 1 in {month} s]"
                ),
            )],
        );
    }
    // A counter ends with its month.
    for (time, rejected) in [
        ("2026-01-31T23:59:59.999998Z", false),
        ("2026-01-31T23:59:59.999999Z", true),
        ("2026-02-01T00:00:00Z", false),
        ("2026-02-28T23:59:59.999999Z", true),
        ("2026-03-01T00:00:00Z", false),
    ] {
        service.inner.clock.set(at(time));
        assert_eq!(decide(&service, &shop_request("month=end")).over_limit(), rejected, "{time}");
    }
    service.inner.clock.set(NOON);
    assert_responses(
        &service,
        &[
            (shop_request("bucket"), "OK [OK 1/MONTH left 0 in 2592000 s]"),
            (shop_request("day"), "OK [OK 1/DAY left 0 in 43200 s]"),
        ],
    );
}

#[test]
fn headers_show_the_last_enforced_rejection_else_the_least_remaining() {
    let rules = "descriptors:
  - {key: five, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: five2, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: nine, rate_limit: {unit: hour, requests_per_unit: 9}}
  - {key: one, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: one2, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: none, rate_limit: {unit: minute, requests_per_unit: 0}}
  - {key: none2, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: quota, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: free, rate_limit: {unlimited: true}}
  - {key: most, rate_limit: {unit: hour, requests_per_unit: 4294967295}}";
    let table = [
        // request, the three headers, the header of a rejection
        ("five", Some((5, 4, 60)), None),
        // The longest wait of the rejections, unless one is permanent.
        ("one; one", Some((1, 0, 60)), Some(60)),
        ("one2; one; one; one2", Some((1, 0, 3600)), Some(3600)),
        ("one; one; none", Some((0, 0, 60)), None),
        ("nine; five", Some((5, 4, 60)), None),
        ("five; five2", Some((5, 4, 60)), None),
        ("five2; five", Some((5, 4, 3600)), None),
        ("five; free; other", Some((5, 4, 60)), None),
        ("free; other", None, None),
        ("none; five", Some((0, 0, 60)), None),
        ("none; none2", Some((0, 0, 3600)), None),
        ("none2; none", Some((0, 0, 60)), None),
        ("shadow; five", Some((0, 0, 43_200)), None),
        ("five; none; shadow", Some((0, 0, 60)), None),
        // An exceeded quota counts as a limit without remaining hits.
        ("quota; none", Some((0, 0, 60)), None),
        ("none; quota", Some((0, 0, 60)), None),
        ("quota; five", Some((0, 0, 43_200)), None),
        ("most", Some((u32::MAX, u32::MAX - 1, 3600)), None),
    ];
    for (request, limit, retry_after) in table {
        let mut expected = String::new();
        if let Some((limit, remaining, reset)) = limit {
            expected += &format!(" RateLimit-Limit: {limit} RateLimit-Remaining: {remaining} RateLimit-Reset: {reset}");
        }
        if let Some(seconds) = retry_after {
            expected += &format!(" Retry-After: {seconds}");
        }
        let text =
            decide(&test_service(&[("LIMIT_RESPONSE_HEADERS_ENABLED", "true")], rules), &shop_request(request)).text();
        assert_eq!(text[text.find(']').unwrap() + 1..], expected, "{request}");
    }
    let names = [
        ("LIMIT_RESPONSE_HEADERS_ENABLED", "true"),
        ("LIMIT_LIMIT_HEADER", "x-limit"),
        ("LIMIT_REMAINING_HEADER", "x-left"),
        ("LIMIT_RESET_HEADER", "x-reset"),
        ("TOLLKEEPER_RETRY_AFTER_HEADER", "x-again"),
    ];
    assert_responses(
        &test_service(&names, rules),
        &[
            (shop_request("one"), "OK [OK 1/MINUTE left 0 in 60 s] x-limit: 1 x-left: 0 x-reset: 60"),
            (shop_request("one"), "OVER [OVER 1/MINUTE left 0 in 60 s] x-limit: 1 x-left: 0 x-reset: 60 x-again: 60"),
        ],
    );
    // SHADOW_MODE reports remaining hits, and no retry time.
    let shadow = [("LIMIT_RESPONSE_HEADERS_ENABLED", "true"), ("SHADOW_MODE", "true")];
    assert_responses(
        &test_service(&shadow, rules),
        &[(
            shop_request("none"),
            "OK [OVER 0/MINUTE left 0 in 60 s] RateLimit-Limit: 0 RateLimit-Remaining: 0 RateLimit-Reset: 60",
        )],
    );
}

#[test]
fn retry_after_is_when_the_same_request_could_pass() {
    let service = test_service(
        &[],
        "descriptors:
  - {key: log, rate_limit: {unit: minute, requests_per_unit: 2, algorithm: sliding_window_log}}
  - {key: token, rate_limit: {unit: minute, requests_per_unit: 2, algorithm: token_bucket}}
  - {key: fixed, rate_limit: {unit: minute, requests_per_unit: 2}}",
    );
    for key in ["log", "token", "fixed"] {
        decide(&service, &shop_request(key));
    }
    service.advance_us(10 * SECOND + 1);
    assert_responses(
        &service,
        &[
            (shop_request("log"), "OK [OK 2/MINUTE left 0 in 60 s]"),
            (shop_request("log"), "OVER [OVER 2/MINUTE left 0 in 50 s] Retry-After: 50"),
            (shop_request("log").hits(2), "OVER [OVER 2/MINUTE left 0 in 60 s] Retry-After: 60"),
            // It can never pass: no retry time, but the time to the reset.
            (shop_request("log").hits(3), "OVER [OVER 2/MINUTE left 0 in 60 s]"),
            (shop_request("token"), "OK [OK 2/MINUTE left 0 in 50 s]"),
            (shop_request("token"), "OVER [OVER 2/MINUTE left 0 in 20 s] Retry-After: 20"),
            (shop_request("token").hits(3), "OVER [OVER 2/MINUTE left 0 in 50 s]"),
            (shop_request("fixed"), "OK [OK 2/MINUTE left 0 in 50 s]"),
            (shop_request("fixed"), "OVER [OVER 2/MINUTE left 0 in 50 s] Retry-After: 50"),
            (
                shop_request("token; log; fixed").hits(0),
                "OVER [OVER 2/MINUTE left 0 in 20 s, OVER 2/MINUTE left 0 in 50 s, \
                                              OVER 2/MINUTE left 0 in 50 s] Retry-After: 50",
            ),
        ],
    );
    // To the microsecond.
    service.advance_us(50 * SECOND - 2);
    assert!(decide(&service, &shop_request("log")).over_limit());
    service.advance_us(1);
    assert!(!decide(&service, &shop_request("log")).over_limit());
}

/// A statistic of each limit, by domain and name.
fn stats(service: &TestService, stat: LimitStat) -> Vec<(String, String, u64)> {
    let limits = service.inner.decider.metrics.limits.all_limit_stats();
    limits
        .iter()
        .map(|it| (it.name().domain().to_owned(), it.name().as_str().to_owned(), it.counter_value(stat)))
        .collect()
}

#[test]
fn hits_rejected_by_a_limit_of_the_list_are_not_within_the_others() {
    let service = test_service(
        &[],
        "descriptors:
  - key: k
    rate_limit:
      - {unit: second, requests_per_unit: 2}
      - {unit: day, requests_per_unit: 8, name: day}
      - {unit: hour, requests_per_unit: 1, quota_mode: true, name: quota}",
    );
    (0..100).for_each(|_| drop(decide(&service, &shop_request("k"))));
    let of = |stat| {
        let of_rules = stats(&service, stat).into_iter().filter(|(_, name, _)| !name.ends_with("_other"));
        of_rules.map(|(_, _, count)| count).collect::<Vec<_>>()
    };
    // The second, the day, the quota.
    assert_eq!(of(LimitStat::TotalHits), [100, 100, 100]);
    assert_eq!(of(LimitStat::WithinLimit), [2, 2, 1]);
    assert_eq!(of(LimitStat::OverLimit), [98, 0, 99]);
    assert_eq!(of(LimitStat::NearLimit)[1], 0, "80 % of 8 were not charged");
}

#[test]
fn limits_whose_dotted_names_are_equal_have_their_own_statistics() {
    let service = TestService::new([("LOG_LEVEL", "info")], NOON);
    let limit = "rate_limit: {unit: hour, requests_per_unit: 100}";
    service.load([
        (
            "a.yaml".to_owned(),
            format!(
                "domain: a\ndescriptors:\n  - {{key: b.c, {limit}}}\n  - {{key: b, descriptors: [{{key: c, {limit}}}]}}"
            ),
        ),
        ("a.b.yaml".to_owned(), format!("domain: a.b\ndescriptors: [{{key: c, {limit}}}]")),
    ]);
    let decide_times = |times: usize, domain: &str, entries: &[(&str, &str)]| {
        (0..times).for_each(|_| drop(decide(&service, &TestRequest::new(domain).descriptor(entries))));
    };
    decide_times(3, "a.b", &[("c", "")]);
    decide_times(5, "a", &[("b.c", "")]);
    decide_times(7, "a", &[("b", ""), ("c", "")]);
    let mut found = stats(&service, LimitStat::TotalHits);
    found.retain(|(_, name, _)| !name.ends_with("_other"));
    found.sort();
    let name = |domain: &str, hits| (domain.to_owned(), "a.b.c".to_owned(), hits);
    assert_eq!(found, [name("a", 5), name("a", 7), name("a.b", 3)]);

    // On the page for Prometheus no series occurs twice: those of equal labels are added up.
    let TestService { inner, .. } = service;
    let needs = HealthRequirements::default();
    let health = Arc::new(Health::new(Arc::clone(&inner.rules), Arc::default(), needs));
    let collector = MetricsCollector {
        service: Arc::new(inner),
        health,
        listeners: Arc::default(),
        path_label: false,
        quota: None,
    };
    let mut decisions = Vec::new();
    collector.collect(&mut |family| {
        let mut labels: Vec<_> = family.series.iter().map(|series| series.labels.clone()).collect();
        labels.sort();
        labels.dedup();
        assert_eq!(labels.len(), family.series.len(), "{}", family.name);
        if family.name == "tollkeeper_rule_decisions_total" {
            decisions = family.series.iter().map(|series| series.value.clone()).collect();
        }
    });
    decisions.sort_by_key(|value| format!("{value:?}"));
    assert_eq!(decisions, [MetricValue::Counter(12), MetricValue::Counter(3)]);
}

#[test]
fn statsd_receives_the_sum_of_series_of_one_name() {
    let family = |counts: [u64; 2]| {
        let series = |count| Series::new(MetricValue::Counter(count)).with_statsd_name("a.b.c");
        Family::new("n", MetricKind::Counter, "").add_series(series(counts[0])).add_series(series(counts[1]))
    };
    let mut encoder = StatsdEncoder::new(StatsdFormat::Statsd, Vec::new());
    for (counts, expected) in [([3, 5], "a.b.c:8|c\n"), ([4, 5], "a.b.c:1|c\n"), ([4, 5], ""), ([4, 7], "a.b.c:2|c\n")]
    {
        encoder.add_family(&family(counts));
        let mut sent = String::new();
        encoder
            .send_report(|packet| {
                sent += packet;
                Ok(())
            })
            .unwrap();
        assert_eq!(sent, expected, "{counts:?}");
    }
}

#[test]
fn retry_after_and_body_are_those_of_the_limits_that_reject() {
    let service = test_service(
        &[],
        "descriptors:
  - {key: bucket, over_limit_body: bucket, rate_limit: {unit: minute, requests_per_unit: 20, bucket_size: 1, algorithm: token_bucket}}
  - {key: month, quota_mode: true, over_limit_body: month, rate_limit: {unit: month, requests_per_unit: 1}}
  - {key: day, quota_mode: true, over_limit_body: day, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: none, quota_mode: true, over_limit_body: none, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: room, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 1000000}}
  - key: two
    quota_mode: true
    over_limit_body: two
    rate_limit:
      - {unit: minute, requests_per_unit: 1}
      - {unit: hour, requests_per_unit: 1}
  - key: mixed
    over_limit_body: mixed
    rate_limit:
      - {unit: minute, requests_per_unit: 1}
      - {unit: hour, requests_per_unit: 1, quota_mode: true}",
    );
    let said = |descriptors: &str| {
        let response = decide(&service, &shop_request(descriptors));
        let retry_after = response.response.response_headers_to_add.iter().find(|header| header.key == "Retry-After");
        let body = String::from_utf8(response.response.raw_body.clone()).unwrap();
        (response.over_limit(), retry_after.map(|header| header.value.parse::<u64>().unwrap()), body)
    };
    for key in ["bucket", "month", "day", "two", "mixed"] {
        assert!(!decide(&service, &shop_request(key)).over_limit());
    }
    let table = [
        // request, seconds, body
        ("bucket", Some(3), "bucket"),
        // Another quota has room, so the quotas do not decide.
        ("month; bucket; room", Some(3), "bucket"),
        ("none; bucket; room", Some(3), "bucket"),
        // Any one quota suffices: the shortest wait.
        ("month; day", Some(43_200), "month"),
        ("month; two", Some(3_600), "month"),
        ("none; day", Some(43_200), "none"),
        ("none; none", None, "none"),
        // Limits that reject alone must admit too: the longest of both.
        ("none; two; bucket", Some(3_600), "none"),
        ("bucket; none", None, "bucket"),
        ("mixed", Some(3_600), "mixed"),
        ("mixed; room", Some(60), "mixed"),
    ];
    for (request, seconds, body) in table {
        assert_eq!(said(request), (true, seconds, body.to_owned()), "{request}");
    }
    assert_eq!(said("month; room"), (false, None, String::new()));
}

/// Body, and headers but for `Retry-After`, of a rejection.
fn rejection(service: &TestService, descriptors: &str) -> (String, Vec<(String, String)>) {
    let response = decide(service, &shop_request(descriptors));
    assert!(response.over_limit(), "{descriptors}");
    let headers = response.response.response_headers_to_add.iter().filter(|header| header.key != "Retry-After");
    let body = String::from_utf8(response.response.raw_body.clone()).expect("text");
    (body, headers.map(|header| (header.key.clone(), header.value.clone())).collect())
}

#[test]
fn body_says_what_the_limit_that_rejects_is() {
    let rules = "defaults: {over_limit_body: '%LIMIT_NAME% %LIMIT% %REMAINING% %RETRY_AFTER% %RETRY_AT%'}
descriptors:
  - {key: named, rate_limit: {name: \"a \\\"b\\\" <c>\", unit: hour, requests_per_unit: 1}}
  - {key: path, rate_limit: {unit: minute, requests_per_unit: 2}}
  - {key: bucket, rate_limit: {unit: minute, requests_per_unit: 60, bucket_size: 3, algorithm: token_bucket}}
  - {key: never, rate_limit: {unit: day, requests_per_unit: 0}}
  - key: list
    rate_limit:
      - {name: lower, unit: minute, requests_per_unit: 1}
      - {name: higher, unit: hour, requests_per_unit: 1}
  - {key: static, over_limit_body: 100% of %20% %CE%B1 %%LIMIT% %limit% and 5 %%, rate_limit: {requests_per_unit: 0}}
  - {key: percent, over_limit_body: 5%%LIMIT%%LIMIT%%LIMIT%, rate_limit: {requests_per_unit: 0}}";
    let service = test_service(&[], rules);
    for key in ["named", "path", "list", "bucket"] {
        assert!(!decide(&service, &shop_request(key)).over_limit());
    }
    let table = [
        ("named", "a \"b\" <c> 1 0 3600 2026-07-08T13:00:00Z"),
        ("path=x2", "shop.path 2 0 60 2026-07-08T12:01:00Z"),
        ("bucket=x3", "shop.bucket 60 0 1 2026-07-08T12:00:01Z"),
        ("never", "shop.never 0 0 86400 2026-07-09T12:00:00Z"),
        ("list", "higher 1 0 3600 2026-07-08T13:00:00Z"),
        ("static", "100% of %20% %CE%B1 %LIMIT% %limit% and 5 %%"),
        // A doubled percent sign before a place is the place as text.
        ("percent", "5%LIMIT%00"),
    ];
    for (descriptors, body) in table {
        let (key, hits) = descriptors.split_once("=x").unwrap_or((descriptors, "1"));
        let response = decide(&service, &shop_request(key).hits(hits.parse().expect("a number")));
        assert_eq!(String::from_utf8_lossy(&response.response.raw_body), body, "{descriptors}");
    }
}

#[test]
fn values_are_escaped_for_the_content_type_of_the_body() {
    let name = r#"a"} , {\"b<i>&'"#;
    for (content_type, body) in [
        ("application/json", r#""a\"} , {\\\"b<i>&'""#),
        ("application/problem+json; charset=utf-8", r#""a\"} , {\\\"b<i>&'""#),
        ("text/html; charset=utf-8", r#""a&quot;} , {\&quot;b&lt;i&gt;&amp;&#39;""#),
        ("application/soap+xml", r#""a&quot;} , {\&quot;b&lt;i&gt;&amp;&#39;""#),
        ("text/plain", r#""a"} , {\"b<i>&'""#),
    ] {
        let rules = format!(
            "descriptors:
  - key: k
    over_limit_body: '\"%LIMIT_NAME%\"'
    over_limit_content_type: {content_type}
    rate_limit: {{name: {}, unit: hour, requests_per_unit: 0}}",
            serde_json::to_string(name).expect("text"),
        );
        let found = rejection(&test_service(&[], &rules), "k");
        assert_eq!(found, (body.to_owned(), vec![("content-type".to_owned(), content_type.to_owned())]));
    }
}

#[test]
fn formats_are_those_of_well_known_apis() {
    let at = |body: &Value, path: &str| body.pointer(path).cloned().unwrap_or_default();
    for (format, content_type, found) in [
        (
            "problem+json",
            "application/problem+json",
            vec![
                ("/type", json!("https://iana.org/assignments/http-problem-types#quota-exceeded")),
                ("/status", json!(429)),
                ("/violated-policies/0", json!("a \"b\"")),
            ],
        ),
        (
            "json-rpc",
            "application/json",
            vec![
                ("/jsonrpc", json!("2.0")),
                ("/error/code", json!(-32029)),
                ("/error/data/retryAfterSeconds", json!(3600)),
            ],
        ),
        ("openai", "application/json", vec![("/error/code", json!("rate_limit_exceeded"))]),
        ("anthropic", "application/json", vec![("/type", json!("error")), ("/error/type", json!("rate_limit_error"))]),
        (
            "gemini",
            "application/json",
            vec![("/error/status", json!("RESOURCE_EXHAUSTED")), ("/error/details/0/retryDelay", json!("3600s"))],
        ),
    ] {
        let rules = format!(
            "descriptors:
  - {{key: k, over_limit_format: {format}, rate_limit: {{name: 'a \"b\"', unit: hour, requests_per_unit: 1}}}}"
        );
        let service = test_service(&[], &rules);
        assert!(!decide(&service, &shop_request("k")).over_limit());
        let (body, headers) = rejection(&service, "k");
        assert_eq!(headers, [("content-type".to_owned(), content_type.to_owned())], "{format}");
        let body: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{format}: {error}: {body}"));
        for (path, value) in found {
            assert_eq!(at(&body, path), value, "{format}: {body}");
        }
    }
}

#[test]
fn headers_and_body_of_a_rejection_are_the_first_of_the_rules_that_reject() {
    let rules = "defaults: {over_limit_format: openai, over_limit_headers: {x-should-retry: true}}
descriptors:
  - {key: own, over_limit_body: own, over_limit_headers: {X-Own: 'a b', x-2: 2}, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: room, over_limit_headers: {x-room: yes}, rate_limit: {unit: day, requests_per_unit: 100}}
  - {key: default, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: inside, rate_limit: {unit: day, requests_per_unit: 0, over_limit_headers: {x-inside: 1}, over_limit_format: gemini}}";
    let service = test_service(&[], rules);
    let headers = |names: &[(&str, &str)]| -> Vec<(String, String)> {
        names.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    let own = headers(&[("x-own", "a b"), ("x-2", "2")]);
    assert_eq!(rejection(&service, "own"), ("own".to_owned(), own.clone()));
    assert_eq!(rejection(&service, "room; own; default"), ("own".to_owned(), own));
    let (body, found) = rejection(&service, "default; own");
    assert!(body.contains("rate_limit_exceeded"), "{body}");
    assert_eq!(found, headers(&[("content-type", "application/json"), ("x-should-retry", "true")]));
    let (body, found) = rejection(&service, "inside");
    assert!(body.contains("RESOURCE_EXHAUSTED"), "{body}");
    assert_eq!(found, headers(&[("content-type", "application/json"), ("x-inside", "1")]));
}

#[test]
fn retry_after_has_jitter_of_the_rule_that_rejects() {
    let rules = "defaults: {jitter: 50%}
descriptors:
  - {key: hour, jitter: 10%, rate_limit: [{unit: hour, requests_per_unit: 1}]}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: none, jitter: 0%, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: shadow, jitter: 100%, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}";
    let service = test_service(&[], rules);
    let waits = |descriptors: &str| {
        let wait = |_| {
            let response = decide(&service, &shop_request(descriptors));
            let headers = &response.response.response_headers_to_add;
            let retry_after = headers.iter().find(|header| header.key == "Retry-After").expect("a Retry-After");
            retry_after.value.parse::<u64>().expect("seconds")
        };
        let all: Vec<u64> = (0..200).map(wait).collect();
        (*all.iter().min().expect("200"), *all.iter().max().expect("200"))
    };
    decide(&service, &shop_request("hour; day; none; shadow"));
    assert_eq!(waits("none"), (3_600, 3_600));
    // Of 200 random numbers none is in the first tenth, or in the last, once in a billion runs.
    let table = [("hour", 3_600, 360), ("hour; shadow", 3_600, 360), ("day", 43_200, 21_600)];
    for (descriptors, wait, most) in table {
        let (shortest, longest) = waits(descriptors);
        assert!((wait..wait + most / 10).contains(&shortest), "{descriptors}: {shortest}");
        assert!((wait + most * 9 / 10..=wait + most).contains(&longest), "{descriptors}: {longest}");
    }
}

#[test]
fn jitter_of_a_rule_goes_before_that_of_its_plan_also_if_it_is_none() {
    let response = |jitter| RejectionResponse { jitter_milli_percent: jitter, ..RejectionResponse::default() };
    let plan = response(Some(10_000));
    assert_eq!(response(Some(0)).with_fallback(&plan), response(Some(0)));
    assert_eq!(response(None).with_fallback(&plan), plan);
}

/// Which of 1000 users a rule of no hits rejects, with these keys beside its limit.
fn rejected_users(keys: &str) -> BTreeSet<usize> {
    let rule = format!("  - {{key: user, {keys}, rate_limit: {{unit: day, requests_per_unit: 0}}}}");
    let service = test_service(&[], &format!("descriptors:\n{rule}"));
    let rejects = |user: &usize| decide(&service, &shop_request(&format!("user={user}"))).text().starts_with("OVER");
    (0..1000).filter(rejects).collect()
}

#[test]
fn enforced_share_grows_by_keys_and_chooses_the_same_in_every_process() {
    let shares = ["0.001%", "1%", "10%", "50%", "99.9%", "100%"];
    let chosen = shares.map(|share| rejected_users(&format!("enforced_share: {share}")));
    assert!(chosen.windows(2).all(|two| two[0].is_subset(&two[1])));
    // The hash has no secret, so these are the numbers of every process and version.
    assert_eq!(chosen.each_ref().map(BTreeSet::len), [0, 17, 115, 492, 998, 1000]);
    assert_eq!(rejected_users("detailed_metric: false"), chosen[5], "without the key all are enforced");
}

#[test]
fn key_outside_the_enforced_share_is_counted_in_shadow_mode() {
    let service = test_service(
        &[("TOLLKEEPER_EXCEEDED_LIMITS_HEADER", "x-exceeded")],
        "descriptors:
  - {key: user, enforced_share: 10%, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: all, enforced_share: 100%, rate_limit: [{unit: hour, requests_per_unit: 1}, {unit: day, requests_per_unit: 5, shadow_mode: true}]}",
    );
    let users = rejected_users("enforced_share: 10%");
    for user in 0..50 {
        let request = shop_request(&format!("user={user}"));
        decide(&service, &request);
        let second = decide(&service, &request);
        let exceeded = second.response.request_headers_to_add.iter().map(|header| header.value.as_str());
        if users.contains(&user) {
            assert!(second.text().starts_with("OVER"), "{user}: {}", second.text());
        } else {
            assert!(second.text().starts_with("OK"), "{user}: {}", second.text());
            assert_eq!(exceeded.collect::<Vec<_>>(), ["shop.user;shadow"]);
        }
    }
    assert!(decide(&service, &shop_request("all")).text().starts_with("OK"));
    assert!(decide(&service, &shop_request("all")).text().starts_with("OVER"));
}

#[test]
fn jitter_is_rounded_up_and_equally_likely() {
    for (wait_s, jitter, counts) in
        [(60, 10_000, &[143_u32; 7][..]), (1, 10_000, &[910, 90]), (25, 10_000, &[286, 286, 286, 142])]
    {
        let mut found = vec![0_u32; counts.len()];
        for step in 0..1_000 {
            let added_s = jitter_s(wait_s, jitter, step * (u64::MAX / 1_000));
            found[usize::try_from(added_s).expect("few seconds")] += 1;
        }
        assert!(
            found.iter().zip(counts).all(|(found, expected)| found.abs_diff(*expected) <= 1),
            "{wait_s}: {found:?}"
        );
    }
    assert!(jitter_s(u64::MAX, 100_000, u64::MAX) > 0, "no overflow");
}

#[test]
fn quota_counts_as_one_whichever_limit_of_its_list_the_status_shows() {
    let service = test_service(
        &[],
        "descriptors:
  - key: list
    rate_limit:
      - {unit: minute, requests_per_unit: 3}
      - {unit: hour, requests_per_unit: 1000, quota_mode: true}
  - {key: none, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 0}}",
    );
    // The minute has the smaller share left, but the quota beside it has room.
    let response = decide(&service, &shop_request("list; none"));
    assert_eq!(response.text(), "OK [OK 3/MINUTE left 2 in 60 s, OVER 0/HOUR left 0 in 3600 s]");
}

#[test]
fn rejection_carries_the_response_body_of_its_rule() {
    let rules = "defaults: {over_limit_body: domain, over_limit_content_type: text/x}
descriptors:
  - {key: plain, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: own, over_limit_body: own, rate_limit: {unit: hour, requests_per_unit: 0}}
  - key: json
    over_limit_body: '{}'
    over_limit_content_type: application/json
    rate_limit: {unit: hour, requests_per_unit: 1}
  - {key: shadow, shadow_mode: true, over_limit_body: shadow, rate_limit: {unit: hour, requests_per_unit: 0}}";
    let plain = test_service(&[("TOLLKEEPER_RETRY_AFTER_HEADER", "")], rules);
    let said = |service: &TestService, request: &TestRequest| {
        let response = decide(service, request).response;
        let headers: Vec<String> =
            response.response_headers_to_add.iter().map(|header| format!("{}: {}", header.key, header.value)).collect();
        (String::from_utf8(response.raw_body).unwrap(), headers.join(" "))
    };
    let table = [
        (shop_request("plain"), "domain", "content-type: text/x"),
        (shop_request("own"), "own", "content-type: text/x"),
        (shop_request("json"), "", ""),
        (shop_request("json"), "{}", "content-type: application/json"),
        (shop_request("shadow"), "", ""),
        (shop_request("shadow; json"), "{}", "content-type: application/json"),
        (shop_request("own; json"), "own", "content-type: text/x"),
        (shop_request("x").limit(0, 3, None), "domain", "content-type: text/x"),
        (shop_request("other"), "", ""),
    ];
    for (request, body, headers) in table {
        assert_eq!(said(&plain, &request), (body.to_owned(), headers.to_owned()), "{request:?}");
    }
    let shadow = test_service(&[("SHADOW_MODE", "true")], rules);
    assert_eq!(said(&shadow, &shop_request("own")), (String::new(), String::new()));
}

/// A protobuf struct as JSON, whole numbers as such.
pub(super) fn metadata(response: &TestResponse) -> Value {
    let line = tollkeeper::base::pb::proto_json::response_to_json(&response.response).unwrap();
    let response: Value = serde_json::from_str(&line).unwrap();
    response["dynamicMetadata"].clone()
}

#[test]
fn metadata_names_the_rejecting_limits() {
    let service = test_service(
        &[("TOLLKEEPER_METADATA_VERDICTS", "true")],
        "descriptors:
  - {key: none, rate_limit: {unit: hour, requests_per_unit: 0, name: ban}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: ok, rate_limit: {unit: hour, requests_per_unit: 100}}
  - key: tree
    value: 'a*'
    descriptors:
      - key: list
        rate_limit:
          - {unit: hour, requests_per_unit: 100}
          - {unit: day, requests_per_unit: 0}
          - {unit: week, requests_per_unit: 0, name: weekly}",
    );
    let ban = json!({"rule": "shop.none", "name": "ban"});
    let table = [
        (shop_request("ok; shadow; other"), json!({})),
        (shop_request("ok; none"), json!({"over_limit": [ban]})),
        (shop_request("none; none=x"), json!({"over_limit": [ban, ban]})),
        (
            shop_request("tree=abc,list"),
            json!({"over_limit": [{"rule": "shop.tree_a*.list.day_fixed_window", "name": ""}]}),
        ),
        (shop_request("x").limit(0, 3, None), json!({"over_limit": [{"rule": "shop.x", "name": ""}]})),
    ];
    for (request, expected) in table {
        assert_eq!(metadata(&decide(&service, &request)), expected, "{request:?}");
    }
}

#[test]
fn metadata_describes_the_request_and_merges_what_rules_attach_without_changing_them() {
    let service = test_service(&[("RESPONSE_DYNAMIC_METADATA", "true")], "descriptors:
  - {key: a, metadata: {own: a, deep: {x: 1, only: a}, list: [1]}, rate_limit: {unit: hour, requests_per_unit: 99}}
  - {key: b, metadata: {own: b, deep: {x: 2, other: b}, list: [2], b: 1}, rate_limit: {unit: hour, requests_per_unit: 99}}
  - {key: clash, metadata: {deep: text}, rate_limit: {unit: hour, requests_per_unit: 99}}
  - {key: none, metadata: {none: 1}, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: shadow, shadow_mode: true, metadata: {shadow: 1}, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: free, metadata: {free: 1}, rate_limit: {unlimited: true}}
  - key: detailed
    detailed_metric: true
    metadata: {kept: true}
    rate_limit: {unit: hour, requests_per_unit: 99}");
    let (a, b) = (
        json!({"own": "a", "deep": {"x": 1, "only": "a"}, "list": [1]}),
        json!({"own": "b", "deep": {"x": 2, "other": "b"}, "list": [2], "b": 1}),
    );
    let merged = json!({"own": "a", "deep": {"x": 1, "only": "a", "other": "b"}, "list": [1], "b": 1});
    let table = [
        ("a", Some(a.clone())),
        ("a; b", Some(merged)),
        // Each alone as before.
        ("b", Some(b.clone())),
        ("a", Some(a.clone())),
        ("b; a", Some(json!({"own": "b", "deep": {"x": 2, "other": "b", "only": "a"}, "list": [2], "b": 1}))),
        ("a; clash", Some(a)),
        ("clash; b", Some(json!({"own": "b", "deep": "text", "list": [2], "b": 1}))),
        ("clash", Some(json!({"deep": "text"}))),
        // Metadata of descriptors that pass, those in shadow mode included; not of unlimited or unmatched ones.
        ("none; b", Some(b)),
        ("shadow", Some(json!({"shadow": 1}))),
        ("free; other; none", None),
        ("detailed=x", Some(json!({"kept": true}))),
    ];
    for (request, expected) in table {
        let metadata = metadata(&decide(&service, &shop_request(request)));
        assert_eq!(metadata.get("metadata").cloned(), expected, "{request}");
    }

    let mut request =
        shop_request("a=1,b=2; other").hits(0).limit(10, 3, None).descriptor(&[("c", "\u{fc}")]).request_hits(3);
    request.0.descriptors[0].entries[1].value = b"\xff".as_slice().into();
    assert_eq!(
        metadata(&decide(&service, &request)),
        json!({
            "domain": "shop",
            "descriptors": [
                {"entries": ["a=1", "b=\u{fffd}"]},
                {"entries": ["other="], "hitsAddend": 0, "limit": "requests_per_unit:10 unit:HOUR"},
                {"entries": ["c=\u{fc}"]},
            ],
            "hitsAddend": 3,
        })
    );
}

#[test]
fn undecidable_request_is_an_error_with_text() {
    let (domain, list, none) = (
        "rate limit domain must not be empty",
        "rate limit descriptor list must not be empty",
        "no rate limit configuration loaded",
    );
    let mut many = shop_request("k");
    many.0.descriptors = vec![RateLimitDescriptor::default(); 10_001];
    let too_many = "rate limit descriptor list has 10001 entries, more than 10000";
    let (empty, loaded) = (TestService::new([("SHADOW_MODE", "true")], NOON), test_service(&[], "descriptors: []"));
    let table = [
        (&empty, TestRequest::new(""), Code::InvalidArgument, domain),
        (&empty, TestRequest::new("").descriptor(&[("k", "")]), Code::InvalidArgument, domain),
        (&empty, TestRequest::new("shop"), Code::InvalidArgument, list),
        (&empty, shop_request("k"), Code::Unavailable, none),
        (&loaded, TestRequest::new(""), Code::InvalidArgument, domain),
        (&loaded, TestRequest::new("elsewhere"), Code::InvalidArgument, list),
        (&loaded, many.clone(), Code::InvalidArgument, too_many),
    ];
    for (service, request, code, text) in table {
        let error = service.decide(&request).unwrap_err();
        assert_eq!((error.grpc_code(), error.to_string().as_str()), (code, text));
    }
    many.0.descriptors.pop();
    assert_eq!(decide(&loaded, &many).response.statuses.len(), 10_000);
    assert_responses(
        &loaded,
        &[
            (TestRequest::new("shop").descriptor(&[]), "OK [OK]"),
            (TestRequest::new("elsewhere").descriptor(&[("k", "v")]), "OK [OK]"),
        ],
    );
}

const QUEUES: &str = "descriptors:
  - {key: q, rate_limit: {unit: second, requests_per_unit: 10, algorithm: leaky_bucket, queue_size: 4}}
  - {key: slow, rate_limit: {unit: second, requests_per_unit: 2, algorithm: leaky_bucket, queue_size: 4}}
  - {key: brief, rate_limit: {unit: second, requests_per_unit: 10, algorithm: leaky_bucket, queue_size: 4, max_wait: 150ms}}
  - {key: ahead, rate_limit: {unit: second, requests_per_unit: 10, algorithm: token_bucket, bucket_size: 1, max_wait: 150ms}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: second, requests_per_unit: 2, algorithm: leaky_bucket, queue_size: 4}}
  - {key: none, rate_limit: {unit: hour, requests_per_unit: 0}}";

/// Delays of the responses in milliseconds, `None` for a rejection, for a caller that waits 10 s.
fn delays_ms(service: &TestService, requests: &[TestRequest]) -> Vec<Option<u128>> {
    let delay_ms = |request: &TestRequest| {
        let response = service.decide_within(request, Duration::from_secs(10)).unwrap();
        assert!(!response.over_limit() || response.delay.is_zero(), "a rejection is not delayed");
        (!response.over_limit()).then_some(response.delay.as_millis())
    };
    requests.iter().map(delay_ms).collect()
}

#[test]
fn response_is_delayed_until_its_slot() {
    let service = test_service(&[], QUEUES);
    let q = || shop_request("q");
    assert_eq!(delays_ms(&service, &[q(), q(), q(), q(), q()]), [Some(0), Some(100), Some(200), Some(300), None]);
    service.advance_us(50 * MS);
    assert_eq!(delays_ms(&service, &[q()]), [None]);
    service.advance_us(50 * MS);
    assert_eq!(delays_ms(&service, &[q(), q()]), [Some(300), None]);
    // Several hits occupy several slots and leave with the first.
    assert_eq!(
        delays_ms(&service, &[shop_request("q=2").hits(3), shop_request("q=2"), shop_request("q=2")]),
        [Some(0), Some(300), None]
    );
    // The `max_wait` of the rule; a token bucket that lends tokens.
    assert_eq!(delays_ms(&service, &vec![shop_request("brief"); 4]), [Some(0), Some(100), None, None]);
    assert_eq!(delays_ms(&service, &vec![shop_request("ahead"); 3]), [Some(0), Some(100), None]);
}

#[test]
fn response_is_delayed_by_the_longest_of_its_descriptors() {
    let service = test_service(&[], QUEUES);
    let both = || shop_request("q; slow");
    assert_eq!(delays_ms(&service, &[both(), both(), both()]), [Some(0), Some(500), Some(1000)]);
}

#[test]
fn rejections_peeks_and_shadow_limits_are_not_delayed() {
    let service = test_service(&[], QUEUES);
    assert_eq!(delays_ms(&service, &vec![shop_request("q"); 2]), [Some(0), Some(100)]);
    // Peeks and refunds; the refund frees the last slot.
    assert_eq!(
        delays_ms(&service, &[shop_request("q").hits(0), shop_request("q").refund(1), shop_request("q")]),
        [Some(0), Some(0), Some(100)]
    );
    // A rejected request is not delayed by the descriptors that would have passed.
    assert_eq!(delays_ms(&service, &[shop_request("q; none")]), [None]);
    // Limits in shadow mode delay nothing, and all limits are in shadow mode under SHADOW_MODE.
    assert_eq!(delays_ms(&service, &vec![shop_request("shadow"); 6]), [Some(0); 6]);
    let shadow = test_service(&[("SHADOW_MODE", "true")], QUEUES);
    assert_eq!(delays_ms(&shadow, &vec![shop_request("q; none"); 6]), [Some(0); 6]);
}

#[test]
fn delay_longer_than_the_callers_deadline_is_rejected() {
    let table = [
        // milliseconds the caller waits, whether the request that leaves after 500 ms is admitted
        (0, false),
        (1, false),
        (2, false),
        (501, false),
        (502, true),
        (503, true),
        (3_600_000, true),
    ];
    for (waits_ms, passes) in table {
        let service = test_service(&[], QUEUES);
        assert_eq!(delays_ms(&service, &[shop_request("slow")]), [Some(0)]);
        let second = service.decide_within(&shop_request("slow"), Duration::from_millis(waits_ms)).unwrap();
        assert_eq!(!second.over_limit(), passes, "{waits_ms} ms");
        assert_eq!(second.delay, Duration::from_millis(if passes { 500 } else { 0 }), "{waits_ms} ms");
        // A rejected request occupied no slot.
        let next = if passes { 1000 } else { 500 };
        assert_eq!(delays_ms(&service, &[shop_request("slow")]), [Some(next)], "{waits_ms} ms");
    }
}

#[test]
fn call_deadline_bounds_the_delay() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _context = runtime.enter();
    let table = [
        // grpc-timeout, whether the call waits for a response delayed by 10 s
        (None, true),
        (Some("10001m"), false),
        (Some("10002m"), true),
        (Some("10S"), false),
        (Some("11S"), true),
        (Some("1M"), true),
        (Some("1H"), true),
        (Some("10001999u"), false),
        (Some("10002000u"), true),
        (Some("99999999n"), false),
        (Some("0S"), false),
    ];
    for (timeout, waits) in table {
        let service = test_service(
            &[],
            "descriptors:
  - {key: q, rate_limit: {unit: minute, requests_per_unit: 6, algorithm: leaky_bucket, queue_size: 2}}",
        );
        decide(&service, &shop_request("q"));
        let headers: HeaderMap = timeout
            .map(|timeout| (HeaderName::from_static("grpc-timeout"), timeout.parse().unwrap()))
            .into_iter()
            .collect();
        let message = shop_request("q").0;
        let (head, request) = (CallHead::from_headers(&headers, None).unwrap(), decode::convert_request(&message));
        let polled = pin!(service.inner.answer_decoded_grpc_call(&head, &request))
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        match polled {
            Poll::Pending => assert!(waits, "{timeout:?} is delayed"),
            Poll::Ready(answered) => {
                assert!(!waits, "{timeout:?} is answered at once");
                assert!(TestResponse { response: answered.unwrap(), delay: Duration::ZERO }.over_limit());
            }
        }
    }
}

#[test]
fn changed_limit_applies_at_once_to_hits_already_charged() {
    let table = [
        // algorithm; remaining of 4 after 6 of 10 were used; remaining of 20
        ("fixed_window", (true, 0), (false, 13)),
        ("token_bucket", (true, 0), (false, 13)),
        ("sliding_window_log", (true, 0), (false, 13)),
        ("sliding_window_counter", (true, 0), (false, 13)),
    ];
    for (algorithm, lowered, raised) in table {
        let service = TestService::new([("TOLLKEEPER_RETRY_AFTER_HEADER", "")], NOON);
        let rule = |limit: u32| {
            load_shop_rules(
                &service,
                &format!(
                    "descriptors:
  - {{key: k, rate_limit: {{unit: hour, requests_per_unit: {limit}, algorithm: {algorithm}, count_rejected: false}}}}"
                ),
            );
        };
        rule(10);
        assert_eq!(decide(&service, &shop_request("k").hits(6)).statuses(), [(false, 4)], "{algorithm}");
        rule(4);
        assert_eq!(decide(&service, &shop_request("k")).statuses(), [lowered], "{algorithm}");
        rule(20);
        assert_eq!(decide(&service, &shop_request("k")).statuses(), [raised], "{algorithm}");
    }
}
