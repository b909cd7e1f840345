//! Metric names made from requests: the rules that enable them, and their bounds.

use super::{Watched, with_rules};
use kit::grpc::{self, Client};

const NAMED: &str = "\
domain: shop
descriptors:
  - key: path
    detailed_metric: true
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: tenant
    value_to_metric: true
    descriptors:
      - key: user
        rate_limit:
          - {unit: day, requests_per_unit: 100}
          - {unit: year, requests_per_unit: 100}
  - key: host
    value: '*.example.com'
    share_threshold: true
    value_to_metric: true
    rate_limit: {unit: day, requests_per_unit: 100}
  - key: agent
    value: curl*
    value_to_metric: true
    rate_limit: {unit: day, requests_per_unit: 100}
";

/// `labels value` of the nonzero series of a limit's counter.
fn counted(watched: &Watched, name: &str) -> Vec<String> {
    let start = format!("ratelimit_service_rate_limit_{name}{{domain=");
    let found = watched.scrape().with_prefix(&start);
    let lines = found.iter().filter(|line| !line.ends_with(" 0")).map(|line| line[start.len()..].to_owned());
    lines.collect()
}

#[test]
fn detailed_metric_puts_values_into_names() {
    let watched = Watched::start(with_rules(NAMED));
    for (descriptor, passes) in [
        ("path=/a", true),
        ("path=/a", false),
        ("path=/b|c", true),
        ("path=", true),
        ("tenant=t1,user=x", true),
        ("tenant=t2,user=x", true),
        ("tenant=t2,user=y", true),
        ("host=a.example.com", true),
        ("host=b.example.com", true),
        ("agent=curl/8", true),
    ] {
        assert_eq!(watched.admits("shop", descriptor, 1), passes, "{descriptor}");
    }
    let expected = [
        r#""shop",key1="agent_curl/8"} 1"#,
        // Values that share a counter share a series.
        r#""shop",key1="host_*.example.com"} 2"#,
        r#""shop",key1="path_"} 1"#,
        r#""shop",key1="path_/a"} 2"#,
        r#""shop",key1="path_/b_c"} 1"#,
        r#""shop",key1="tenant_t1",key2="user",key3="year_fixed_window"} 1"#,
        r#""shop",key1="tenant_t1",key2="user"} 1"#,
        r#""shop",key1="tenant_t2",key2="user",key3="year_fixed_window"} 2"#,
        r#""shop",key1="tenant_t2",key2="user"} 2"#,
    ];
    assert_eq!(counted(&watched, "total_hits"), expected);
    assert_eq!(counted(&watched, "over_limit"), [r#""shop",key1="path_/a"} 1"#]);
    let found = watched.scrape();
    let verdict = "tollkeeper_decisions_total{domain=\"shop\",rule=\"shop.path_/a\",verdict=\"over_limit\"}";
    assert_eq!((found.count(verdict), found.count("tollkeeper_metric_series_overflow_total")), (1, 0));
    // agent, three of path, two of tenant with two limits each; the pattern of host is the rule's own name.
    assert_eq!(found.count("tollkeeper_metric_series"), 8);
}

#[test]
fn overflowing_names_are_counted_under_their_rule() {
    let watched = Watched::start(with_rules(NAMED).env("TOLLKEEPER_METRIC_SERIES", "3"));
    for value in 0..10 {
        assert!(watched.admits("shop", &format!("path=/{value}"), 1));
    }
    // Known series still count.
    assert!(!watched.admits("shop", "path=/0", 1));
    let expected = [
        r#""shop",key1="path"} 7"#,
        r#""shop",key1="path_/0"} 2"#,
        r#""shop",key1="path_/1"} 1"#,
        r#""shop",key1="path_/2"} 1"#,
    ];
    assert_eq!(counted(&watched, "total_hits"), expected, "all 11 hits are somewhere");
    let series = |watched: &Watched| {
        let found = watched.scrape();
        ["", "_limit", "_overflow_total"].map(|name| found.count(&format!("tollkeeper_metric_series{name}")))
    };
    assert_eq!(series(&watched), [3, 3, 7]);
    // A name that is too long overflows too.
    let long = Watched::start(with_rules(NAMED));
    assert!(long.admits("shop", &format!("path=/{}", "x".repeat(600)), 1));
    assert_eq!(counted(&long, "total_hits"), [r#""shop",key1="path"} 1"#]);
    assert_eq!(series(&long), [0, 10_000, 1]);
}

#[test]
fn unmatched_names_share_one_overflow_name() {
    let watched = Watched::start(with_rules(NAMED).env("TOLLKEEPER_METRIC_SERIES", "2"));
    for domain in 0..6 {
        assert!(watched.admits(&format!("d{domain}"), "a=b", 1));
    }
    assert!(watched.admits(&"d".repeat(1000), "a=b", 1));
    let expected = [r#""_other"} 5"#, r#""d0"} 1"#, r#""d1"} 1"#];
    assert_eq!(counted(&watched, "domain_not_found"), expected);
    // Limits sent with a request are named by it too.
    let client = Client::connect(watched.server.grpc_port());
    for value in ["x", "y"] {
        let mut request = grpc::rate_limit_request("shop", &[("brought", value)]);
        request.descriptors[0].limit = Some(tollkeeper::base::pb::rate_limit_descriptor::RateLimitOverride {
            requests_per_unit: 5,
            unit: 3,
            ..Default::default()
        });
        assert_eq!(client.call(&request).unwrap().statuses[0].limit_remaining, 4);
    }
    assert_eq!(counted(&watched, "total_hits"), [r#""shop",key1="_other"} 2"#]);
    let found = watched.scrape();
    // One more than the setting: `_other` for all others.
    assert_eq!(found.count("tollkeeper_metric_series"), 3);
    assert!(found.samples.keys().all(|name| !name.contains("d5") && !name.contains("dddd")));
}

#[test]
fn request_text_cannot_break_exposition_or_statsd_lines() {
    let watched = Watched::start(with_rules(NAMED));
    let evil = "x\ntollkeeper_rules 99\r\n\u{1b}[31m\"\\{}:|@#=é";
    assert!(watched.admits("shop", &format!("path={evil}"), 1));
    assert!(watched.admits(evil, "a=b", 1));
    let found = watched.scrape();
    assert_eq!(found.count("tollkeeper_rules"), 4);
    let name = counted(&watched, "total_hits");
    assert_eq!(name.len(), 1, "{name:?}");
    assert!(name[0].contains("path_x_tollkeeper_rules 99__") && !name[0].contains(['\n', '\r', '\u{1b}']), "{name:?}");
    let stats = kit::http::get(watched.server.debug_port(), "/stats").send().text();
    let line = stats.lines().find(|line| line.contains("tollkeeper_rules 99")).expect("the metric is listed");
    assert_eq!(line.matches([':', '|']).count(), 1, "{line}");
}
