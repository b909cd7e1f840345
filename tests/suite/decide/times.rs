//! Bans and active times in memory: what responses, metrics, `explain` and rules with several limits show.

use jiff::Timestamp;
use tollkeeper::base::clock::{Clock, Time};
use tollkeeper::decide::explain::Explanation;
use tollkeeper::limit::active::{ActiveSpec, ActiveTimes, Weekdays};
use tollkeeper::limit::calendar::{CalendarDay, TimeOfDay, Zone};
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::DEFAULT_CALLER_DEADLINE;
use tollkeeper::telemetry::metrics::limit_stats::LimitStat;

use kit::fixtures::{decide, load_shop_rules, shop_request};
use kit::test_service::{TestService, store_runtime};
use kit::tollkeeper::{Tollkeeper, with_rules};
use kit::{http, redis, wait_for};

/// Noon on Wednesday the 8th of July 2026.
const NOON: Time = Time::from_secs(1_783_512_000);
const HOUR_US: u64 = 3_600_000_000;

fn service(rules: &str) -> TestService {
    let service = TestService::new([("TOLLKEEPER_RETRY_AFTER_HEADER", "")], NOON);
    load_shop_rules(&service, rules);
    service
}

fn text(service: &TestService, descriptors: &str) -> String {
    decide(service, &shop_request(descriptors)).text()
}

fn explain(service: &TestService, descriptors: &str) -> Explanation {
    let request = shop_request(descriptors);
    let request = decode::convert_request(&request.0);
    let loaded = service.inner.rules.current_rules_owned().unwrap();
    let context = service.inner.build_decision_context(Some(&loaded), DEFAULT_CALLER_DEADLINE);
    let now = context.store.now;
    let counters = store_runtime().block_on(service.inner.decider.peek_counters(context, &request));
    Explanation::explain_request(&service.inner.decider.behaviour, &loaded.rules, &request, &counters, now)
}

fn count(service: &TestService, limit: &str, stat: LimitStat) -> u64 {
    let limits = service.inner.decider.metrics.limits.all_limit_stats();
    limits.iter().filter(|stats| stats.name().as_str() == limit).map(|stats| stats.counter_value(stat)).sum()
}

#[test]
fn bans_are_counted_in_shadow_mode_and_of_candidates_too() {
    let service = service(
        "descriptors:
  - {key: enforced, rate_limit: {unit: second, requests_per_unit: 1, ban: 10m}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: second, requests_per_unit: 1, ban: 10m}}
  - key: tried
    rate_limit:
      - {unit: second, requests_per_unit: 9}
      - {unit: second, requests_per_unit: 1, ban: {for: 10m, after: 2}, shadow_mode: true, name: strict}",
    );
    for key in ["enforced", "shadow", "tried"] {
        for _ in 0..5 {
            let rejected = decide(&service, &shop_request(key)).over_limit();
            assert!(!rejected || key == "enforced", "{key}");
        }
    }
    let counts = |limit| [LimitStat::Bans, LimitStat::Banned].map(|stat| count(&service, limit, stat));
    // One passes; each rejection is one of a ban, from the one that begins it on.
    assert_eq!(counts("shop.enforced"), [1, 4]);
    assert_eq!(counts("shop.shadow"), [1, 4]);
    assert_eq!(counts("shop.tried.strict"), [1, 3]);
    assert_eq!(counts("shop.tried"), [0, 0]);
}

#[test]
fn explanation_tells_until_when_a_client_is_banned() {
    let service = service("descriptors: [{key: k, rate_limit: {unit: second, requests_per_unit: 1, ban: 10m}}]");
    let counter = || explain(&service, "k").descriptors[0].limits[0].counter.clone().unwrap();
    assert_eq!(counter().banned_us, 0);
    text(&service, "k");
    assert_eq!(text(&service, "k"), "OVER [OVER 1/SECOND left 0 in 600 s]");
    let counter = counter();
    assert_eq!((counter.passes, counter.banned_us, counter.retry_after_us), (false, 600_000_000, Some(600_000_000)));
    assert_eq!(explain(&service, "k").descriptors[0].limits[0].limit, "1 per second by fixed_window, ban 10m");
}

#[test]
fn rejection_lasts_for_the_longer_of_the_ban_and_the_limit() {
    let service = service("descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 1, ban: 10m}}]");
    text(&service, "k");
    assert_eq!(text(&service, "k"), "OVER [OVER 1/HOUR left 0 in 3600 s]");
}

#[test]
fn limit_of_zero_bans_without_a_promise() {
    let service = service("descriptors: [{key: k, rate_limit: {requests_per_unit: 0, ban: 10m}}]");
    for _ in 0..2 {
        assert!(text(&service, "k").starts_with("OVER [OVER 0/SECOND left 0 in"));
    }
}

#[test]
fn inactive_limit_replaces_nothing() {
    let service = service(
        "descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1, name: small}}
  - key: b
    rate_limit:
      {unit: hour, requests_per_unit: 9, name: big, replaces: [{name: small}], active: {from: '08:00', to: '13:00'}}",
    );
    assert_eq!(text(&service, "a; b"), "OK [OK, OK big: 9/HOUR left 8 in 3600 s]");
    service.advance_us(HOUR_US);
    assert_eq!(text(&service, "a; b"), "OK [OK small: 1/HOUR left 0 in 3600 s, OK]");
}

#[test]
fn explanation_tells_which_limit_is_inactive() {
    let service = service(
        "descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 1, active: {days: sat, to: '08:00'}}}]",
    );
    assert_eq!(text(&service, "k"), "OK [OK]");
    let outcome = &explain(&service, "k").descriptors[0].outcome;
    let active = "{days: \"sat\", from: \"00:00\", to: \"08:00\", timezone: UTC}";
    let expected = format!(
        "no limit of this rule is active at this time, so it passes; limits of other times: 1 per hour by \
         fixed_window, rejected hits count {active}"
    );
    assert_eq!(*outcome, expected);
}

#[test]
fn inactive_candidate_is_not_charged() {
    let service = service(
        "descriptors:
  - key: k
    rate_limit:
      - {unit: second, requests_per_unit: 9}
      - {unit: second, requests_per_unit: 1, shadow_mode: true, name: night, active: {from: '22:00', to: '06:00'}}",
    );
    for _ in 0..3 {
        text(&service, "k");
    }
    assert_eq!(count(&service, "shop.k.night", LimitStat::TotalHits), 0);
    service.advance_us(10 * HOUR_US);
    text(&service, "k");
    assert_eq!(count(&service, "shop.k.night", LimitStat::TotalHits), 1);
}

fn times(days: &str, from: &str, to: &str, zone: &str) -> ActiveTimes {
    ActiveTimes::new(ActiveSpec {
        days: Weekdays::parse(days).unwrap(),
        first_day: None,
        last_day: None,
        from: TimeOfDay::parse(from).unwrap(),
        to: TimeOfDay::parse(to).unwrap(),
        zone: Zone::from_name(zone).unwrap(),
    })
}

/// Every quarter of an hour of a year, against the clock on the wall as chrono-tz has it.
#[test]
fn active_times_follow_the_clock_on_the_wall() {
    use chrono::{Datelike, Timelike};
    let cases = [
        ("mon-fri", "08:00", "20:00"),
        ("sat,sun", "22:00", "06:00"),
        ("fri-mon", "00:00", "00:00"),
        ("wed", "00:15", "23:45"),
        ("mon-sun", "12:00", "11:45"),
    ];
    for zone in ["Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"] {
        let wall: chrono_tz::Tz = zone.parse().unwrap();
        for (days, from, to) in cases {
            let times = times(days, from, to, zone);
            let minutes = |text: &str| u32::from(TimeOfDay::parse(text).unwrap().minutes_since_midnight());
            let (from, to) = (minutes(from), minutes(to));
            let names = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
            let set = times.spec().days.to_string();
            let on = |weekday: u32| set.contains(names[weekday as usize]);
            for quarter in 0..(366 * 96) {
                let second = 1_704_067_200 + quarter * 900;
                let local = chrono::DateTime::from_timestamp(second, 0).unwrap().with_timezone(&wall);
                let (weekday, minute) = (local.weekday().num_days_from_monday(), local.hour() * 60 + local.minute());
                let expected = if to > from {
                    on(weekday) && (from..to).contains(&minute)
                } else {
                    on(weekday) && minute >= from || on((weekday + 6) % 7) && minute < to
                };
                let at = Time::from_secs(second.unsigned_abs());
                assert_eq!(times.contains(at), expected, "{zone} {days} {from}-{to} at {local}");
            }
        }
    }
}

/// Times of Berlin from one day to another.
fn dated(first_day: &str, last_day: &str, from: &str, to: &str) -> ActiveSpec {
    let spec = times("mon-sun", from, to, "Europe/Berlin").spec();
    ActiveSpec { first_day: CalendarDay::parse(first_day), last_day: CalendarDay::parse(last_day), ..spec }
}

#[test]
fn limit_is_active_from_its_first_day_to_its_last() {
    let at = |text: &str| {
        let second = text.parse::<Timestamp>().expect("a time").as_second();
        Time::from_secs(second.unsigned_abs())
    };
    for (spec, inactive, active) in [
        (
            dated("2026-12-04", "2026-12-06", "00:00", "00:00"),
            &["2025-12-05T12:00:00Z", "2026-12-03T22:59:59Z", "2026-12-06T23:00:00Z", "2027-12-05T12:00:00Z"][..],
            &["2026-12-03T23:00:00Z", "2026-12-05T12:00:00Z", "2026-12-06T22:59:59Z"][..],
        ),
        // The last span ends in the morning after.
        (
            dated("2026-12-04", "2026-12-04", "22:00", "06:00"),
            &["2026-12-04T04:00:00Z", "2026-12-04T20:59:59Z", "2026-12-05T05:00:00Z", "2026-12-05T22:00:00Z"],
            &["2026-12-04T21:00:00Z", "2026-12-05T04:59:59Z"],
        ),
        (dated("", "2026-12-04", "00:00", "00:00"), &["2026-12-05T12:00:00Z"], &["1999-12-04T12:00:00Z"]),
        (dated("2026-12-04", "", "00:00", "00:00"), &["2026-12-03T12:00:00Z"], &["2999-12-04T12:00:00Z"]),
    ] {
        let times = ActiveTimes::new(spec);
        // Twice, and forth and back: the last answer is remembered.
        for _ in 0..2 {
            assert!(inactive.iter().all(|text| !times.contains(at(text))), "{spec}");
            assert!(active.iter().all(|text| times.contains(at(text))), "{spec}");
        }
    }
}

#[test]
fn days_that_follow_each_other_do_not_overlap() {
    let before = dated("2026-12-01", "2026-12-03", "00:00", "00:00");
    let after = dated("2026-12-04", "", "00:00", "00:00");
    assert!(!before.overlaps(&after) && !after.overlaps(&before));
    assert!(before.overlaps(&dated("2026-12-03", "", "00:00", "00:00")));
    // A night reaches into the next day.
    let night = dated("", "2026-12-03", "22:00", "06:00");
    assert!(night.overlaps(&dated("2026-12-04", "", "05:00", "07:00")));
    assert!(!night.overlaps(&dated("2026-12-05", "", "05:00", "07:00")));
    assert!(!night.overlaps(&dated("2026-12-04", "", "06:00", "07:00")), "never at the same time of day");
    assert!(!dated("", "2026-12-03", "22:00", "00:00").overlaps(&after));
    assert_eq!(
        night.to_string(),
        r#"{last_day: 2026-12-03, days: "mon,tue,wed,thu,fri,sat,sun", from: "22:00", to: "06:00", timezone: Europe/Berlin}"#
    );
}

#[test]
fn days_are_written_as_ranges_and_lists() {
    let days = |text: &str| Weekdays::parse(text).map(|days| days.to_string());
    assert_eq!(days("mon-fri").unwrap(), "mon,tue,wed,thu,fri");
    assert_eq!(days("Sat, sunday").unwrap(), "sat,sun");
    assert_eq!(days("fri-mon").unwrap(), "mon,fri,sat,sun");
    assert_eq!(days("mon-sun,tue").unwrap(), "mon,tue,wed,thu,fri,sat,sun");
    for text in ["", "mon-", "weekday", "mon;tue", "1-5"] {
        assert_eq!(days(text), None, "{text}");
    }
}

/// Two processes with one Redis: a ban holds in both, costs no call for each try, and ends with `/reset`.
#[test]
fn ban_holds_in_all_replicas_until_it_is_reset() {
    const TOKEN: &str = "correct horse battery staple";
    let rules = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: second, requests_per_unit: 1, ban: {for: 1h, after: 2}}}
";
    let redis = redis::options().start();
    let start = || {
        with_rules(rules)
            .env("REDIS_URL", redis.address())
            .env("REDIS_SOCKET_TYPE", "tcp")
            .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
            .env("TOLLKEEPER_ADMIN_TOKEN", TOKEN)
            .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
            .start()
    };
    let (first, second) = (start(), start());
    let ask = |server: &Tollkeeper| {
        let body = r#"{"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]}"#;
        server.post_json(body)
    };
    wait_for("a ban", || {
        let answer = ask(&first);
        (answer.status == 429 && answer.number("retry-after") > 3500).then_some(())
    });
    for server in [&first, &second, &second, &second, &second] {
        let answer = ask(server);
        assert_eq!(answer.status, 429);
        assert!(answer.number("retry-after") > 3500, "{answer:?}");
    }
    let body = r#"{"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]}"#;
    let explained = second.explain(body);
    let banned_us = explained["descriptors"][0]["limits"][0]["counter"]["banned_us"].as_u64();
    assert!(banned_us > Some(3_500_000_000), "{explained}");
    let reset =
        http::post(first.debug_port(), "/reset", body).header("authorization", format!("Bearer {TOKEN}")).send();
    assert_eq!(reset.status, 200, "{reset:?}");
    // The other replica may keep the rejection for a second.
    wait_for("the end of the ban", || (ask(&second).status == 200).then_some(()));
}

/// The limit of this hour decides, and that of the rest of the day is absent.
#[test]
fn process_leaves_out_a_limit_that_is_not_active() {
    let minute_of_day = (Clock::System.now().as_micros() / 60_000_000) % 1440;
    let time = |minutes: u64| format!("{:02}:{:02}", minutes % 1440 / 60, minutes % 60);
    let (before, after) = (time(minute_of_day + 1440 - 60), time(minute_of_day + 60));
    let rules = format!(
        "\
domain: shop
descriptors:
- {{key: now, rate_limit: {{unit: day, requests_per_unit: 0, active: {{from: '{before}', to: '{after}'}}}}}}
- {{key: later, rate_limit: {{unit: day, requests_per_unit: 0, active: {{from: '{after}', to: '{before}'}}}}}}
"
    );
    let server = with_rules(&rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    let ask = |key: &str| {
        let body = format!(r#"{{"domain": "shop", "descriptors": [{{"entries": [{{"key": "{key}"}}]}}]}}"#);
        server.post_json(&body).status
    };
    assert_eq!(["now", "later"].map(ask), [429, 200]);
}
