//! `RateLimit-Policy` and `RateLimit`, as a parser of structured fields that is not ours reads them.

use serde_json::Value;
use sfv::{List, ListEntry, Parser};

use kit::tollkeeper::{Setup, Tollkeeper, with_rules};

/// Parameters of each item of a field, by the item's name: `[("burst", "q=100 w=60")]`.
type Items = Vec<(String, String)>;

const RULES: &str = "\
domain: shop
descriptors:
- key: user
  rate_limit:
  - {name: burst, unit: minute, requests_per_unit: 3, algorithm: sliding_window_log}
  - {name: daily, unit: day, requests_per_unit: 1000}
  - {name: watched, unit: hour, requests_per_unit: 1, shadow_mode: true}
- {key: ip, rate_limit: {unit: hour, unit_multiplier: 2, requests_per_unit: 10}}
- {key: free, rate_limit: {unlimited: true}}
- {key: gold, quota_mode: true, rate_limit: {name: gold, unit: day, requests_per_unit: 1, algorithm: sliding_window_log}}
- {key: pool, quota_mode: true, rate_limit: {name: pool, unit: hour, requests_per_unit: 2, algorithm: sliding_window_log}}
- {key: export, rate_limit: {name: exports, concurrent: 2}}
- {key: tokens, rate_limit: {name: tokens, unit: minute, requests_per_unit: 100, reservations: 10m}}
";

fn start(rules: &str) -> Tollkeeper {
    switched_on(with_rules(rules)).start()
}

fn switched_on(setup: Setup) -> Setup {
    setup.env("TOLLKEEPER_POLICY_HEADERS", "true")
}

/// Asks with one descriptor for each text `key=value key=value`.
fn ask(server: &Tollkeeper, descriptors: &[&str]) -> Value {
    let entry = |text: &str| {
        let (key, value) = text.split_once('=').unwrap();
        format!(r#"{{"key":"{key}","value":"{value}"}}"#)
    };
    let descriptor = |text: &&str| {
        let entries: Vec<_> = text.split(' ').map(entry).collect();
        format!(r#"{{"entries":[{}]}}"#, entries.join(","))
    };
    let descriptors: Vec<_> = descriptors.iter().map(descriptor).collect();
    let body = format!(r#"{{"domain":"shop","descriptors":[{}]}}"#, descriptors.join(","));
    serde_json::from_slice(&server.post_json(&body).body).unwrap()
}

/// Value of a header of the response.
fn header<'a>(response: &'a Value, name: &str) -> Option<&'a str> {
    let headers = response["responseHeadersToAdd"].as_array()?;
    headers.iter().find(|header| header["key"] == name)?["value"].as_str()
}

/// The items of a header; none if it is not sent.
#[track_caller]
fn items(response: &Value, name: &str) -> Items {
    let Some(value) = header(response, name) else { return Items::new() };
    let list: List = Parser::new(value).parse().unwrap_or_else(|error| panic!("{value}: {error}"));
    let item = |entry: &ListEntry| {
        let ListEntry::Item(item) = entry else { panic!("an inner list: {value}") };
        let parameter = |(key, value): (&sfv::Key, &sfv::BareItem)| match value {
            sfv::BareItem::Integer(number) => format!("{key}={number}"),
            sfv::BareItem::String(text) => format!("{key}={text}"),
            other => panic!("{key}: {other:?}"),
        };
        let name = item.bare_item.as_string().unwrap_or_else(|| panic!("{value}: not a string"));
        (name.as_str().to_owned(), item.params.iter().map(parameter).collect::<Vec<_>>().join(" "))
    };
    list.iter().map(item).collect()
}

#[track_caller]
fn assert_items(response: &Value, name: &str, expected: &[(&str, &str)]) {
    let expected: Items = expected.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
    assert_eq!(items(response, name), expected, "{response}");
}

/// Value of a parameter.
fn number(parameters: &str, key: &str) -> u64 {
    let parameter = parameters.split(' ').find_map(|parameter| parameter.strip_prefix(&format!("{key}=")));
    parameter.unwrap_or_else(|| panic!("{key}: {parameters}")).parse().unwrap()
}

#[test]
fn both_headers_name_each_limit_that_is_not_in_shadow_mode() {
    let server = start(RULES);
    let response = ask(&server, &["user=ann", "ip=1", "free=x", "none=x"]);
    let policies = [("burst", "q=3 w=60"), ("daily", "q=1000 w=86400"), ("shop.ip", "q=10 w=7200")];
    assert_items(&response, "RateLimit-Policy", &policies);
    let left = items(&response, "RateLimit");
    let names: Vec<_> = left.iter().map(|(name, text)| (name.as_str(), number(text, "r"))).collect();
    assert_eq!(names, [("burst", 2), ("daily", 999), ("shop.ip", 9)]);
    for ((_, text), window) in left.iter().zip([60, 86_400, 7_200]) {
        assert!((1..=window).contains(&number(text, "t")), "{response}");
    }
}

#[test]
fn rejection_shows_the_limits_that_reject_until_retry_after_at_most() {
    let server = start(&RULES.replacen("descriptors:", "descriptors:\n- {key: slow, jitter: 100%, rate_limit: {name: slow, unit: hour, requests_per_unit: 1, algorithm: sliding_window_log}}", 1));
    for _ in 0..3 {
        ask(&server, &["user=ann"]);
    }
    let rejection = ask(&server, &["user=ann", "ip=1"]);
    assert_eq!(rejection["overallCode"], "OVER_LIMIT");
    let retry_after = header(&rejection, "Retry-After").unwrap().parse::<u64>().unwrap();
    assert_items(&rejection, "RateLimit", &[("burst", &format!("r=0 t={retry_after}"))]);
    assert_eq!(items(&rejection, "RateLimit-Policy").len(), 3, "{rejection}");
    ask(&server, &["slow=a"]);
    for _ in 0..20 {
        let rejection = ask(&server, &["slow=a", "user=ann"]);
        let retry_after = header(&rejection, "Retry-After").unwrap().parse::<u64>().unwrap();
        let left = items(&rejection, "RateLimit");
        assert_eq!(left.len(), 2, "{rejection}");
        assert!(left.iter().all(|(_, text)| number(text, "t") <= retry_after), "{rejection}");
    }
}

#[test]
fn quotas_are_shown_as_exceeded_only_if_they_reject() {
    let server = start(RULES);
    ask(&server, &["gold=a", "pool=a"]);
    let passing = ask(&server, &["gold=a", "pool=a"]);
    assert_eq!(passing["overallCode"], "OK");
    let left = items(&passing, "RateLimit");
    assert_eq!(left.iter().map(|(_, text)| number(text, "r")).collect::<Vec<_>>(), [0, 0], "{passing}");
    let rejection = ask(&server, &["gold=a", "pool=a", "ip=1"]);
    let retry_after = header(&rejection, "Retry-After").unwrap();
    let shown = format!("r=0 t={retry_after}");
    assert_items(&rejection, "RateLimit", &[("gold", &shown), ("pool", &shown)]);
    // A hard limit rejects, and the pool has room.
    for _ in 0..10 {
        ask(&server, &["ip=2"]);
    }
    let rejection = ask(&server, &["gold=a", "pool=b", "ip=2"]);
    assert_eq!(items(&rejection, "RateLimit").len(), 1, "{rejection}");
}

#[test]
fn streams_have_a_unit_and_no_window() {
    let server = start(RULES);
    let stream = |number: usize| ask(&server, &[&format!("export=a slot={number}")]);
    let first = stream(1);
    assert_items(&first, "RateLimit-Policy", &[("exports", "q=2 qu=concurrent-requests")]);
    assert_items(&first, "RateLimit", &[("exports", "r=1")]);
    stream(2);
    assert_items(&stream(3), "RateLimit", &[("exports", "r=0")]);
    let reserved = ask(&server, &["tokens=a slot=4"]);
    assert_items(&reserved, "RateLimit-Policy", &[("tokens", "q=100 w=60")]);
    assert_eq!(number(&items(&reserved, "RateLimit")[0].1, "r"), 99);
}

#[test]
fn months_of_a_calendar_have_no_window() {
    let months = "rate_limit: {name: months, unit: month, requests_per_unit: 5";
    for (key, parameters) in [
        (format!("{months}}}"), "q=5 w=2592000"),
        (format!("{months}, window: {{timezone: UTC}}}}"), "q=5"),
        ("rate_limit: {name: months, unit: day, requests_per_unit: 5, window: {timezone: UTC}}".into(), "q=5 w=86400"),
    ] {
        let server = start(&format!("domain: shop\ndescriptors:\n- {{key: user, {key}}}\n"));
        assert_items(&ask(&server, &["user=ann"]), "RateLimit-Policy", &[("months", parameters)]);
    }
}

#[test]
fn nothing_is_sent_in_shadow_mode_for_blocks_or_unless_switched_on() {
    let shadowed = switched_on(with_rules(RULES)).env("SHADOW_MODE", "true").start();
    let off = with_rules(RULES).start();
    let watched = start(&RULES.replace("- {key: ip,", "- {key: ip, shadow_mode: true,"));
    for (server, descriptor) in [(&shadowed, "user=ann"), (&off, "user=ann"), (&watched, "ip=1")] {
        let response = ask(server, &[descriptor]);
        assert_eq!([header(&response, "RateLimit"), header(&response, "RateLimit-Policy")], [None, None], "{response}");
    }
}

#[test]
fn hostile_names_stay_in_their_string() {
    let long = "n".repeat(300);
    let names = [r#"a\"b\\c"#, r"x\r\ny: z", "caf\u{e9}", "a;q=9, b", long.as_str()];
    let rules: Vec<_> = (names.iter().enumerate())
        .map(|(index, name)| {
            format!("- {{key: k{index}, rate_limit: {{name: \"{name}\", unit: day, requests_per_unit: 5}}}}\n")
        })
        .collect();
    let server = start(&format!("domain: shop\ndescriptors:\n{}", rules.concat()));
    let response = ask(&server, &["k0=a", "k1=a", "k2=a", "k3=a", "k4=a"]);
    let cut = "n".repeat(128) + "...";
    for field in ["RateLimit-Policy", "RateLimit"] {
        let items = items(&response, field);
        let names: Vec<_> = items.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, [r#"a"b\c"#, "x%0D%0Ay: z", "caf%C3%A9", "a;q=9, b", cut.as_str()]);
    }
}

#[test]
fn name_appears_once_with_the_fewest_hits_left() {
    let server = start(RULES);
    ask(&server, &["ip=1"]);
    let response = ask(&server, &["ip=2", "ip=1", "ip=3"]);
    assert_eq!(items(&response, "RateLimit-Policy").len(), 1, "{response}");
    assert_eq!(number(&items(&response, "RateLimit")[0].1, "r"), 8, "{response}");
}

#[test]
fn number_of_limits_is_bounded_and_those_that_reject_come_first() {
    let rules: String = (0..40)
        .map(|number| format!("- {{key: k{number}, rate_limit: {{unit: day, requests_per_unit: {}}}}}\n", number % 39))
        .collect();
    let server = start(&format!("domain: shop\ndescriptors:\n{rules}"));
    let descriptors: Vec<_> = (0..40).map(|number| format!("k{number}=a")).collect();
    let descriptors: Vec<_> = descriptors.iter().map(String::as_str).collect();
    let rejection = ask(&server, &descriptors);
    let names: Vec<_> = items(&rejection, "RateLimit-Policy").into_iter().map(|(name, _)| name).collect();
    assert_eq!((names.len(), names[0].as_str(), names[1].as_str()), (16, "shop.k0", "shop.k39"), "{rejection}");
    assert_eq!(items(&rejection, "RateLimit").len(), 2, "{rejection}");
}
