//! Headers for the upstream, as `/json` shows them.

use serde_json::Value;

use kit::tollkeeper::{Setup, Tollkeeper, with_rules};

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 1, name: per-user}}
- {key: team, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
- {key: org, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 100}}
- {key: ip, rate_limit: {unit: minute, unit_multiplier: 5, requests_per_unit: 3}}
- {key: free, rate_limit: {unlimited: true}}
- key: tried
  rate_limit:
  - {unit: day, requests_per_unit: 100}
  - {unit: day, requests_per_unit: 0, name: lower, shadow_mode: true}
- key: many
  shadow_mode: true
  rate_limit: {unit: day, requests_per_unit: 0}
";

fn ask(server: &Tollkeeper, descriptors: &[(&str, &str)]) -> Value {
    let descriptors: Vec<_> = descriptors
        .iter()
        .map(|(key, value)| format!(r#"{{"entries":[{{"key":"{key}","value":"{value}"}}]}}"#))
        .collect();
    let body = format!(r#"{{"domain":"shop","descriptors":[{}]}}"#, descriptors.join(","));
    serde_json::from_slice(&server.post_json(&body).body).unwrap()
}

/// `name: value` of each header.
fn lines(response: &Value, field: &str) -> Vec<String> {
    let headers = response[field].as_array().cloned().unwrap_or_default();
    let text = |header: &Value, part: &str| header[part].as_str().unwrap().to_owned();
    headers.iter().map(|header| format!("{}: {}", text(header, "key"), text(header, "value"))).collect()
}

fn exceeded(setup: Setup) -> Setup {
    setup.env("TOLLKEEPER_EXCEEDED_LIMITS_HEADER", "x-exceeded")
}

#[test]
fn exceeded_limits_are_named_once_while_the_request_passes() {
    let server = exceeded(with_rules(RULES)).start();
    let all = [("user", "ann"), ("user", "ann"), ("team", "a"), ("org", "a"), ("ip", "1"), ("free", "x")];
    assert_eq!(lines(&ask(&server, &all), "requestHeadersToAdd"), ["x-exceeded: per-user;shadow"]);
    let second = ask(&server, &all);
    assert_eq!(lines(&second, "requestHeadersToAdd"), ["x-exceeded: per-user;shadow, shop.team;quota"], "{second}");
    assert_eq!(lines(&second, "responseHeadersToAdd"), [""; 0]);
    ask(&server, &all);
    // The fourth is rejected, and never reaches the upstream.
    let rejected = ask(&server, &all);
    assert_eq!(
        (rejected["overallCode"].as_str(), lines(&rejected, "requestHeadersToAdd").len()),
        (Some("OVER_LIMIT"), 0)
    );
}

#[test]
fn limits_are_in_shadow_mode_under_the_global_one() {
    let server = exceeded(with_rules(RULES)).env("SHADOW_MODE", "true").start();
    for _ in 0..3 {
        assert_eq!(lines(&ask(&server, &[("ip", "1")]), "requestHeadersToAdd"), [""; 0]);
    }
    assert_eq!(lines(&ask(&server, &[("ip", "1")]), "requestHeadersToAdd"), ["x-exceeded: shop.ip;shadow"]);
}

/// A candidate is tried beside the limits of its rule, and exceeds nothing.
#[test]
fn candidates_are_not_named() {
    let server = exceeded(with_rules(RULES)).start();
    assert_eq!(lines(&ask(&server, &[("tried", "x")]), "requestHeadersToAdd"), [""; 0]);
}

#[test]
fn number_of_names_is_bounded() {
    let rules: String = (0..40)
        .map(|number| {
            format!("- {{key: k{number}, shadow_mode: true, rate_limit: {{unit: day, requests_per_unit: 0}}}}\n")
        })
        .collect();
    let server = exceeded(with_rules(&format!("domain: shop\ndescriptors:\n{rules}"))).start();
    let keys: Vec<_> = (0..40).map(|number| format!("k{number}")).collect();
    let descriptors: Vec<_> = keys.iter().map(|key| (key.as_str(), "x")).collect();
    let headers = lines(&ask(&server, &descriptors), "requestHeadersToAdd");
    assert!(headers[0].ends_with("shop.k15;shadow, ...") && headers[0].matches(", ").count() == 16, "{headers:?}");
}

#[test]
fn nothing_is_sent_unless_it_is_switched_on() {
    let server = with_rules(RULES).start();
    for _ in 0..2 {
        let response = ask(&server, &[("user", "ann"), ("ip", "1")]);
        let fields = ["requestHeadersToAdd", "responseHeadersToAdd"].map(|field| lines(&response, field).len());
        assert_eq!(fields, [0, 0], "{response}");
    }
}

#[test]
fn headers_of_the_tightest_limit_go_to_both_sides_under_their_names() {
    let server = with_rules(RULES)
        .env("LIMIT_RESPONSE_HEADERS_ENABLED", "true")
        .env("LIMIT_REQUEST_HEADERS_ENABLED", "true")
        .env("LIMIT_REQUEST_LIMIT_HEADER", "x-limit")
        .start();
    let response = ask(&server, &[("ip", "1"), ("free", "x"), ("org", "a")]);
    assert_eq!(lines(&response, "responseHeadersToAdd")[..2], ["RateLimit-Limit: 3", "RateLimit-Remaining: 2"]);
    let upstream = lines(&response, "requestHeadersToAdd");
    assert_eq!(upstream[..2], ["x-limit: 3", "RateLimit-Remaining: 2"]);
    assert!(upstream[2].starts_with("RateLimit-Reset: "), "{upstream:?}");
}

mod limit_names {
    use tollkeeper::decide::merge::encode_limit_name;

    const MAX_LIMIT_NAME_BYTES: usize = 128;

    #[test]
    fn name_is_encoded_for_a_header_and_cut() {
        for (name, encoded) in [
            ("per-key", "per-key"),
            ("shop.user_*", "shop.user_*"),
            ("a, b;c%\r\nx: y", "a%2C%20b%3Bc%25%0D%0Ax:%20y"),
            ("\u{fc}\u{202e}\"\\", "%C3%BC%E2%80%AE%22%5C"),
        ] {
            assert_eq!(encode_limit_name(name), encoded);
        }
        assert_eq!(encode_limit_name(&"x".repeat(128)), "x".repeat(128));
        assert_eq!(encode_limit_name(&"x".repeat(129)), "x".repeat(128) + "...");
        let cut = encode_limit_name(&"\u{fc}".repeat(1000));
        assert!(cut.len() <= MAX_LIMIT_NAME_BYTES + 3 && cut.ends_with("C..."), "{cut}");
    }
}
