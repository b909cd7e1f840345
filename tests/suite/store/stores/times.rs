//! Bans, windows of a calendar and active times: the same in every store, through whole decisions.

use tollkeeper::limit::algorithm::Algorithm;

use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::DEFAULT_CALLER_DEADLINE;
use tollkeeper::telemetry::metrics::limit_stats::LimitStat;

use super::{HOUR, MS, SECOND, StoreUnderTest};
use kit::fixtures::{assert_responses, decide, load_shop_rules, shop_request};
use kit::test_service::{TestResponse, TestService, store_runtime};

const ENV: &[(&str, &str)] = &[];

const MINUTE: u64 = 60 * SECOND;

/// Asks once, and returns whether the request is rejected and the seconds after which to retry.
fn ask(service: &TestService, descriptors: &str) -> (bool, Option<u64>) {
    retry_of(&decide(service, &shop_request(descriptors)))
}

/// Returns whether a request is rejected and the seconds after which to retry.
fn retry_of(response: &TestResponse) -> (bool, Option<u64>) {
    let headers = &response.response.response_headers_to_add;
    let retry = headers.iter().find(|header| header.key.eq_ignore_ascii_case("retry-after"));
    (response.over_limit(), retry.map(|header| header.value.parse().expect("seconds")))
}

/// Deletes the counters of a request; returns how many existed.
fn reset(service: &TestService, descriptors: &str) -> Vec<u64> {
    let rules = service.inner.rules.current_rules_owned().expect("rules are loaded");
    let context = service.inner.build_decision_context(Some(&rules), DEFAULT_CALLER_DEADLINE);
    let message = shop_request(descriptors).0;
    let request = decode::convert_request(&message);
    let deleted = store_runtime().block_on(service.inner.decider.reset_counters(context, &request));
    deleted.expect("the store answers")
}

pub(super) fn ban_rejects_until_it_ends_with_any_algorithm(store: &StoreUnderTest) {
    let rules: String = Algorithm::ALL
        .into_iter()
        .map(|algorithm| {
            let name = algorithm.name();
            format!(
                "\n  - {{key: {name}, rate_limit: {{unit: second, requests_per_unit: 1, algorithm: {name}, ban: 10m}}}}"
            )
        })
        .collect();
    let service = store.without_over_limit_cache().service(ENV, &format!("descriptors:{rules}"));
    for algorithm in Algorithm::ALL {
        let name = algorithm.name();
        assert!(!ask(&service, name).0, "{name}");
        assert_eq!(ask(&service, name), (true, Some(600)), "{name}");
    }
    service.advance_us(4 * MINUTE);
    for algorithm in Algorithm::ALL {
        // A further try does not prolong it.
        assert_eq!(ask(&service, algorithm.name()), (true, Some(360)), "{algorithm}");
        // A peek sees the ban, and a refund neither fails nor lifts it.
        assert!(decide(&service, &shop_request(algorithm.name()).hits(0)).over_limit(), "{algorithm}");
        assert!(!decide(&service, &shop_request(algorithm.name()).refund(5)).over_limit(), "{algorithm}");
    }
    service.advance_us(6 * MINUTE - 1);
    for algorithm in Algorithm::ALL {
        assert_eq!(ask(&service, algorithm.name()), (true, Some(1)), "{algorithm}");
    }
    service.advance_us(1);
    for algorithm in Algorithm::ALL {
        assert!(!ask(&service, algorithm.name()).0, "{algorithm}");
    }
}

pub(super) fn ban_begins_after_as_many_rejections_as_written(store: &StoreUnderTest) {
    let rules = "descriptors:
  - key: k
    rate_limit: {unit: minute, requests_per_unit: 1, algorithm: sliding_window_log, ban: {for: 1h, after: 3}}";
    let service = store.without_over_limit_cache().service(ENV, rules);
    assert_eq!(ask(&service, "k"), (false, None));
    assert_eq!(ask(&service, "k"), (true, Some(60)));
    assert_eq!(ask(&service, "k"), (true, Some(60)));
    assert_eq!(ask(&service, "k"), (true, Some(3600)));
    service.advance_us(HOUR);
    // After the ban, rejections count from 0; those that are a period apart do not add up.
    assert_eq!(ask(&service, "k"), (false, None));
    for _ in 0..3 {
        assert_eq!(ask(&service, "k"), (true, Some(60)));
        assert_eq!(ask(&service, "k"), (true, Some(60)));
        service.advance_us(MINUTE + 1);
        assert_eq!(ask(&service, "k"), (false, None));
    }
}

pub(super) fn tries_prolong_a_ban_where_rejected_hits_count(store: &StoreUnderTest) {
    let rules = "descriptors:
  - {key: k, rate_limit: {unit: second, requests_per_unit: 1, count_rejected: true, ban: 10m}}";
    let service = store.without_over_limit_cache().service(ENV, rules);
    assert_eq!(ask(&service, "k"), (false, None));
    assert_eq!(ask(&service, "k"), (true, Some(600)));
    service.advance_us(9 * MINUTE);
    assert_eq!(ask(&service, "k"), (true, Some(600)));
    service.advance_us(9 * MINUTE);
    assert!(decide(&service, &shop_request("k").hits(0)).over_limit());
    service.advance_us(MINUTE);
    assert_eq!(ask(&service, "k"), (false, None));
}

pub(super) fn rejected_peeks_begin_a_ban_that_counts_them(store: &StoreUnderTest) {
    let rules = "descriptors:
  - key: failed
    rate_limit: {unit: minute, requests_per_unit: 3, algorithm: sliding_window_log, ban: {for: 1h, count_peeks: true}}
  - key: twice
    rate_limit:
      - {unit: minute, requests_per_unit: 3, count_rejected: true, ban: {for: 1h, after: 2, count_peeks: true}}
      - {unit: day, requests_per_unit: 4}
  - {key: none, rate_limit: {unit: minute, requests_per_unit: 0, ban: {for: 1h, count_peeks: true}}}
  - {key: old, rate_limit: {unit: minute, requests_per_unit: 3, algorithm: sliding_window_log, ban: 1h}}";
    let service = store.without_over_limit_cache().service(ENV, rules);
    let peek = |key: &str| retry_of(&decide(&service, &shop_request(key).hits(0)));
    for key in ["failed", "old", "twice"] {
        // Ask first, report after.
        for _ in 0..3 {
            assert_eq!(peek(key), (false, None), "{key}");
            assert_eq!(ask(&service, key), (false, None), "{key}");
        }
    }
    assert_eq!(peek("failed"), (true, Some(3600)));
    // No peek begins the ban of a limit that does not count them, nor does a look at its counter.
    assert_eq!((peek("old"), peek("old")), ((true, Some(60)), (true, Some(60))));
    // A fixed window that counts rejected hits rejects a peek only past its limit.
    assert_eq!(peek("twice"), (false, None));
    ask(&service, "twice");
    service.advance_us(SECOND);
    assert_eq!(peek("twice"), (true, Some(3600)));
    // The day has four hits, and a peek charges none.
    service.advance_us(HOUR);
    assert_eq!(peek("failed"), (false, None));
    assert_eq!(peek("old"), (false, None));
    // Without a counter there is a ban too.
    assert!(peek("none").0);
    let banned = service.inner.decider.metrics.limits.rule_limit_stats();
    let bans = banned.iter().map(|limit| limit.counter_value(LimitStat::Bans)).sum::<u64>();
    assert_eq!(bans, 3, "one each of failed, twice and none");
}

pub(super) fn ban_of_one_limit_charges_no_other(store: &StoreUnderTest) {
    let rules = "descriptors:
  - key: k
    rate_limit:
      - {unit: second, requests_per_unit: 1, ban: 10m}
      - {unit: day, requests_per_unit: 5}
  - key: shadow
    shadow_mode: true
    rate_limit: {unit: second, requests_per_unit: 1, ban: 10m}";
    let service = store.without_over_limit_cache().service(&[("TOLLKEEPER_RETRY_AFTER_HEADER", "")], rules);
    for _ in 0..20 {
        ask(&service, "k");
    }
    let left: Vec<u32> = decide(&service, &shop_request("k").hits(0)).statuses().into_iter().map(|it| it.1).collect();
    assert_eq!(left, [0]);
    service.advance_us(10 * MINUTE);
    // One hit of the day was charged before the ban.
    assert_responses(&service, &[(shop_request("k").hits(0), "OK [OK 5/DAY left 4 in 42600 s]")]);
    for _ in 0..3 {
        assert!(!ask(&service, "shadow").0);
    }
}

pub(super) fn reset_lifts_a_ban(store: &StoreUnderTest) {
    let rules = "descriptors:
  - {key: k, rate_limit: {unit: second, requests_per_unit: 1, ban: 10m}}
  - {key: log, rate_limit: {unit: second, requests_per_unit: 1, algorithm: sliding_window_log, ban: 10m}}";
    let service = store.without_over_limit_cache().service(ENV, rules);
    for key in ["k", "log"] {
        ask(&service, key);
        assert_eq!(ask(&service, key), (true, Some(600)));
        assert_eq!(reset(&service, key), [1], "{key}");
        assert_eq!(ask(&service, key), (false, None), "{key}");
    }
}

pub(super) fn window_ends_with_the_local_day_and_month(store: &StoreUnderTest) {
    // It is noon UTC on Wednesday the 8th of July 2026, 14:00 in Berlin.
    let rules = "descriptors:
  - {key: day, rate_limit: {unit: day, requests_per_unit: 2, window: {timezone: Europe/Berlin, day_starts: '06:00'}}}
  - {key: week, rate_limit: {unit: week, requests_per_unit: 2, window: {timezone: Europe/Berlin, week_starts: sunday}}}
  - key: month
    rate_limit:
      unit: month
      requests_per_unit: 2
      window: {timezone: Europe/Berlin, week_starts: monday, month: calendar, month_day: 15, day_starts: '06:00'}
  - {key: year, rate_limit: {unit: year, requests_per_unit: 2, window: {}}}
  - {key: hour, rate_limit: {unit: hour, requests_per_unit: 2, window: {timezone: Asia/Kolkata}}}";
    let service = store.without_over_limit_cache().service(&[("TOLLKEEPER_RETRY_AFTER_HEADER", "")], rules);
    let day = 86_400;
    let until = [
        ("day", "DAY", 16 * 3600),
        ("week", "WEEK", 3 * day + 10 * 3600),
        ("month", "MONTH", 6 * day + 16 * 3600),
        ("year", "YEAR", 176 * day + 12 * 3600),
        ("hour", "HOUR", 1800),
    ];
    for (key, unit, seconds) in until {
        let line = |verdict: &str, left: u32, seconds: u64| {
            format!("{verdict} [{verdict} 2/{unit} left {left} in {seconds} s]")
        };
        let ask = || decide(&service, &shop_request(key)).text();
        assert_eq!([ask(), ask(), ask()], [line("OK", 1, seconds), line("OK", 0, seconds), line("OVER", 0, seconds)]);
    }
    service.advance_us(1800 * SECOND);
    assert_eq!(decide(&service, &shop_request("hour")).text(), "OK [OK 2/HOUR left 1 in 3600 s]");
    service.advance_us(16 * HOUR - 1800 * SECOND);
    assert_eq!(decide(&service, &shop_request("day")).text(), "OK [OK 2/DAY left 1 in 86400 s]");
    service.advance_us((6 * day) * SECOND - MS);
    assert!(decide(&service, &shop_request("month")).over_limit());
    service.advance_us(MS);
    // Until the 15th of August.
    assert_eq!(decide(&service, &shop_request("month")).text(), format!("OK [OK 2/MONTH left 1 in {} s]", 31 * day));
}

pub(super) fn changed_window_starts_a_new_counter(store: &StoreUnderTest) {
    let service = store.without_over_limit_cache().service(ENV, "descriptors: []");
    for (window, rejected) in [
        ("{timezone: Europe/Berlin}", false),
        ("{timezone: Europe/Berlin}", true),
        // Without effect on a day.
        ("{timezone: europe/berlin, month_day: 3}", true),
        ("{timezone: Europe/Berlin, day_starts: '01:00'}", false),
        ("{timezone: Europe/Paris}", false),
        ("{timezone: Europe/Berlin}", true),
    ] {
        let rate_limit = format!("{{unit: day, requests_per_unit: 1, window: {window}}}");
        load_shop_rules(&service, &format!("descriptors: [{{key: k, rate_limit: {rate_limit}}}]"));
        assert_eq!(ask(&service, "k").0, rejected, "{window}");
    }
}

pub(super) fn limit_is_absent_outside_its_active_times(store: &StoreUnderTest) {
    // 14:00 in Berlin on a Wednesday.
    let rules = "descriptors:
  - key: k
    rate_limit:
      unit: month
      requests_per_unit: 1
      active: {days: mon-fri, from: '08:00', to: '20:00', timezone: Europe/Berlin}
  - key: two
    rate_limit:
      - {unit: hour, requests_per_unit: 1, active: {from: '08:00', to: '20:00', timezone: Europe/Berlin}}
      - {unit: hour, requests_per_unit: 3, active: {from: '20:00', to: '08:00', timezone: Europe/Berlin}}";
    let service = store.without_over_limit_cache().service(&[("TOLLKEEPER_RETRY_AFTER_HEADER", "")], rules);
    let text = |key: &str| decide(&service, &shop_request(key)).text();
    assert_eq!(
        [text("k"), text("two")].map(|text| text.split_once(" in ").unwrap().0.to_owned()),
        ["OK [OK 1/MONTH left 0", "OK [OK 1/HOUR left 0"]
    );
    assert!(decide(&service, &shop_request("k")).over_limit());
    service.advance_us(6 * HOUR - 1);
    assert!(decide(&service, &shop_request("k")).over_limit());
    service.advance_us(1);
    // Neither charged, shown nor rejected.
    assert_eq!(text("k"), "OK [OK]");
    assert_eq!(text("two"), "OK [OK 3/HOUR left 2 in 3600 s]");
    // On Friday at 14:00 in Berlin the counter of the week is still used up; on Saturday the limit is absent.
    service.advance_us(42 * HOUR);
    assert!(decide(&service, &shop_request("k")).over_limit());
    service.advance_us(24 * HOUR);
    assert_eq!(text("k"), "OK [OK]");
}

/// What the night admits of what the day used, and the morning after it.
pub(super) fn counter_of_two_times_of_day_begins_the_other_one_as_used_up_at_most(store: &StoreUnderTest) {
    for (algorithm, size) in
        [("token_bucket", ""), ("leaky_bucket", ", queue_size: 6000"), ("sliding_window_counter", "")]
    {
        // 14:00 in Berlin; a leaky bucket of 6000 in the day holds 10 in the night.
        let night = size.replace("6000", "10");
        let rules = format!(
            "descriptors:
  - key: two
    rate_limit:
      - {{unit: minute, requests_per_unit: 6000, algorithm: {algorithm}{size}, active: {{from: '08:00', to: '20:00', timezone: Europe/Berlin}}}}
      - {{unit: minute, requests_per_unit: 60, algorithm: {algorithm}{night}, active: {{from: '20:00', to: '08:00', timezone: Europe/Berlin}}}}"
        );
        let service = store.without_over_limit_cache().service(&[("TOLLKEEPER_RETRY_AFTER_HEADER", "")], &rules);
        let hits = |hits| decide(&service, &shop_request("two").hits(hits)).over_limit();
        service.advance_us(6 * HOUR - 1);
        assert!(!hits(6000), "{algorithm}");
        service.advance_us(1);
        assert!(hits(1), "{algorithm}: used up");
        // A window ends with the minute; from then on what is left of a used-up one falls as for 60.
        service.advance_us(if algorithm == "sliding_window_counter" { 1 } else { SECOND });
        assert!(!hits(1), "{algorithm}");
        service.advance_us(12 * HOUR - 1);
        assert!(!hits(6000), "{algorithm}: the day begins anew");
    }
}

pub(super) fn shortened_ban_ends_by_its_new_length(store: &StoreUnderTest) {
    let rule = |length: &str| {
        format!(
            "descriptors: [{{key: k, rate_limit: {{unit: second, requests_per_unit: 1, algorithm: token_bucket, ban: {length}}}}}]"
        )
    };
    let service = store.without_over_limit_cache().service(ENV, &rule("1h"));
    assert_eq!([ask(&service, "k"), ask(&service, "k")], [(false, None), (true, Some(3600))]);
    service.advance_us(MINUTE);
    load_shop_rules(&service, &rule("5m"));
    assert_eq!(ask(&service, "k"), (true, Some(240)));
    service.advance_us(4 * MINUTE);
    assert_eq!(ask(&service, "k"), (false, None));
}
