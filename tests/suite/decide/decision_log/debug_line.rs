//! Decisions as lines of the process's log, at the level debug.

use tollkeeper::base::clock::Clock;
use tollkeeper::telemetry::logs::{Format, Level};

use super::NOON;
use kit::fixtures::{load_shop_rules, shop_request};
use kit::log_capture::log_of;
use kit::test_service::{TestRequest, TestService};

const RULES: &str = "descriptors:
  - {key: user, rate_limit: {unit: minute, requests_per_unit: 1, algorithm: token_bucket}}
  - {key: trial, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: silent, decision_log: none, rate_limit: {unit: hour, requests_per_unit: 1}}
";

/// Lines about these decisions, at this level and with these settings.
fn lines(level: Level, env: &[(&str, &str)], requests: &[TestRequest]) -> Vec<String> {
    let service = TestService::new(env.iter().copied(), NOON);
    load_shop_rules(&service, RULES);
    let decide = || requests.iter().for_each(|request| drop(service.decide(request)));
    let text = log_of(level, Format::Text, Clock::manual(NOON), decide);
    text.lines().map(|line| line.split_once(" level=").unwrap().1.to_owned()).collect()
}

#[test]
fn each_decision_is_a_line_with_descriptors_and_rules() {
    let requests = [
        shop_request("user=alice"),
        shop_request("user=alice; trial=x; other=y; silent=token"),
        shop_request("other=y").limit(5, 2, None).refund(3),
        TestRequest::new("shop"),
    ];
    let rule = "-> shop.user (rules.yaml:3:17): 1 per minute by token_bucket, bucket_size 1";
    let expected = [
        format!(
            "debug msg=\"decision\" domain=shop verdict=ok delay_us=0 \
             descriptors=\"user=alice {rule}, 1 used, 0 remaining: ok\""
        ),
        format!(
            "debug msg=\"decision\" domain=shop verdict=over_limit delay_us=0 \
             descriptors=\"user=alice {rule}, 1 used, 0 remaining: over_limit; \
             trial=x -> shop.trial (rules.yaml:4:37): 0 per hour by fixed_window, rejected hits count, in shadow mode, \
             1 used, 0 remaining: shadow; other=y -> no limit: ok; \
             silent -> shop.silent (rules.yaml:5:39): 1 per hour by fixed_window, rejected hits count, \
             1 used, 0 remaining: ok\""
        ),
        "debug msg=\"decision\" domain=shop verdict=ok delay_us=0 descriptors=\"other=y (-3 hits) -> limit of the request: \
         5 per minute by fixed_window, rejected hits count, 0 used, 5 remaining: ok\""
            .to_owned(),
        "debug msg=\"decision\" domain=shop verdict=error error=no_descriptors delay_us=0 descriptors=\"\"".to_owned(),
    ];
    assert_eq!(lines(Level::Debug, &[], &requests), expected);
    assert_eq!(lines(Level::Info, &[], &requests), [] as [String; 0]);
}

#[test]
fn release_is_named_in_place_of_its_hits() {
    let service = TestService::new::<&str>([], NOON);
    load_shop_rules(&service, "descriptors: [{key: user, rate_limit: {concurrent: 2, max_duration: 1h}}]\n");
    let text = log_of(Level::Debug, Format::Text, Clock::manual(NOON), || {
        drop(service.decide(&shop_request("user=ann,slot=1,release=?")));
    });
    assert!(text.contains(" (release) -> shop.user") && !text.contains("hits)"), "{text}");
}

#[test]
fn values_of_a_line_are_escaped_bounded_and_in_the_form_of_the_decision_log() {
    let hostile = TestRequest::new("shop").descriptor(&[("user", "a\nlevel=error msg=forged\u{1b}[31m")]);
    let found = lines(Level::Debug, &[], &[hostile]);
    assert_eq!(found.len(), 1);
    assert!(found[0].contains(r"user=a\nlevel=error msg=forged\u001b[31m"), "{found:?}");
    let long = "x".repeat(100_000);
    let many = (0..1000).fold(TestRequest::new("shop"), |request, _| request.descriptor(&[("user", &long)]));
    let found = lines(Level::Debug, &[], &[many]);
    assert!(found[0].len() < 20_000 && found[0].contains("; 984 more"), "{}", found[0].len());
    let own = [("TOLLKEEPER_DECISION_LOG", "file:/dev/null"), ("TOLLKEEPER_DECISION_LOG_VALUES", "none")];
    let found = lines(Level::Debug, &own, &[shop_request("user=alice")]);
    assert!(found[0].contains("\"user -> shop.user"), "{found:?}");
    let own = [
        ("TOLLKEEPER_DECISION_LOG", "file:/dev/null"),
        ("TOLLKEEPER_DECISION_LOG_VALUES", "hashed"),
        ("TOLLKEEPER_DECISION_LOG_HASH_KEY", "a key of sixteen"),
    ];
    let found = lines(Level::Debug, &own, &[shop_request("user=alice")]);
    assert!(found[0].contains("\"user=#") && !found[0].contains("alice"), "{found:?}");
}
