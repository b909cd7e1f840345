//! Metrics of a real process, read as Prometheus reads them and compared number by number with the requests sent.
//!
//! The submodules test exporters and bounds.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::SystemTime;

use serde_json::json;

use kit::grpc::{self, Client};
use kit::port::Port;
use kit::scrape::{Scrape, scrape, with_prometheus};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::{http, redis, statsd, wait_for};

mod bounds;
mod documented;
mod mapper;
mod otlp;
mod sent;
mod store;

/// A process with a listener for Prometheus.
struct Watched {
    server: Tollkeeper,
    port: Port,
}

impl Watched {
    fn start(setup: Setup) -> Self {
        let (setup, port) = with_prometheus(setup.env("TOLLKEEPER_DRAIN_PERIOD", "0s"));
        Self { server: setup.start(), port }
    }

    fn scrape(&self) -> Scrape {
        scrape(self.port.number())
    }

    /// Charges hits for a descriptor; true if it was admitted.
    fn admits(&self, domain: &str, descriptor: &str, hits: u32) -> bool {
        let entry = |entry: &str| {
            let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
            json!({ "key": key, "value": value })
        };
        let entries: Vec<_> = descriptor.split(',').map(entry).collect();
        let body = json!({ "domain": domain, "descriptors": [{ "entries": entries, "hitsAddend": hits }] });
        let response = self.server.post_json(&body.to_string());
        assert!([200, 429].contains(&response.status), "{descriptor}: {response:?}");
        response.status == 200
    }
}

const SHOP: &str = "\
domain: shop
descriptors:
  - key: user
    rate_limit: {unit: day, requests_per_unit: 2}
  - key: api
    value: v1
    descriptors:
      - key: method
        value: GET
        rate_limit: {unit: day, requests_per_unit: 10}
  - key: region
    descriptors:
      - key: team
        descriptors:
          - key: user
            rate_limit: {unit: day, requests_per_unit: 5}
  - key: trial
    shadow_mode: true
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: address
    value: 10.1.2.3
    rate_limit: {unit: day, requests_per_unit: 5}
  - key: pair
    rate_limit:
      - {unit: day, requests_per_unit: 3}
      - {unit: year, requests_per_unit: 5, name: yearly}
  - key: idle
    rate_limit: {unit: minute, requests_per_unit: 7, algorithm: token_bucket}
  - key: free
    rate_limit: {unlimited: true}
";

/// Sends the requests that [`EXPECTED`] counts, over gRPC and `/json`.
fn send_traffic(server: &Tollkeeper) {
    let client = Client::connect(server.grpc_port());
    let passes = |domain: &str, entries: &[(&str, &str)], hits: Option<u64>, refunds: bool| {
        let mut request = grpc::rate_limit_request(domain, entries);
        request.descriptors[0].hits_addend = hits;
        request.descriptors[0].is_negative_hits = refunds;
        let response = client.call(&request);
        response.map(|response| response.overall_code == 1).map_err(|status| status.message().to_owned())
    };
    let take = |entries: &[(&str, &str)], hits: u64| passes("shop", entries, Some(hits), false).unwrap();
    assert_eq!([1, 1, 1, 1].map(|hits| take(&[("user", "ann")], hits)), [true, true, false, false]);
    assert_eq!([3, 9].map(|hits| take(&[("api", "v1"), ("method", "GET")], hits)), [true, false]);
    assert!(take(&[("region", "eu"), ("team", "a"), ("user", "x")], 1));
    assert_eq!([1, 1, 1].map(|hits| take(&[("trial", "x")], hits)), [true, true, true]);
    assert!(take(&[("address", "10.1.2.3")], 1));
    assert_eq!([2, 2].map(|hits| take(&[("pair", "x")], hits)), [true, false]);
    assert_eq!([1, 1].map(|hits| take(&[("free", "x")], hits)), [true, true]);
    assert!(take(&[("unmatched", "x")], 1));
    assert!(passes("shop", &[("user", "bob")], Some(2), true).unwrap(), "a refund");
    assert!(take(&[("user", "bob")], 0), "a peek");
    let mut unmatched = grpc::rate_limit_request("nowhere", &[("a", "b")]);
    unmatched.descriptors.push(grpc::descriptor(&[("c", "d")]));
    assert_eq!(client.call(&unmatched).unwrap().overall_code, 1);
    assert_eq!(passes("", &[("a", "b")], None, false), Err("rate limit domain must not be empty".to_owned()));
    assert!(client.is_serving("").unwrap());
    let cat = json!({ "domain": "shop", "descriptors": [{ "entries": [{ "key": "user", "value": "cat" }] }] });
    assert_eq!(server.post_json(&cat.to_string()).status, 200);
}

/// Expected counts of the traffic.
///
/// `near_limit` starts at 0.8 of a limit, rounded down: the second of 2, the ninth of 10.
/// A charge that crosses the limit counts as within and over limit if rejected hits are charged, otherwise as over
/// limit.
const EXPECTED: &str = r#"
ratelimit_service_config_load_error 0
ratelimit_service_config_load_success 1
ratelimit_service_global_shadow_mode 0
ratelimit_service_rate_limit_domain_not_found{domain="nowhere"} 2
ratelimit_service_rate_limit_near_limit{domain="shop",key1="address_10_1_2_3"} 0
ratelimit_service_rate_limit_near_limit{domain="shop",key1="api_v1",key2="method_GET"} 2
ratelimit_service_rate_limit_near_limit{domain="shop",key1="idle"} 0
ratelimit_service_rate_limit_near_limit{domain="shop",key1="pair",key2="yearly"} 0
ratelimit_service_rate_limit_near_limit{domain="shop",key1="pair"} 0
ratelimit_service_rate_limit_near_limit{domain="shop",key1="region",key2="team",key3="user"} 0
ratelimit_service_rate_limit_near_limit{domain="shop",key1="trial"} 1
ratelimit_service_rate_limit_near_limit{domain="shop",key1="user"} 1
ratelimit_service_rate_limit_over_limit{domain="shop",key1="address_10_1_2_3"} 0
ratelimit_service_rate_limit_over_limit{domain="shop",key1="api_v1",key2="method_GET"} 2
ratelimit_service_rate_limit_over_limit{domain="shop",key1="idle"} 0
ratelimit_service_rate_limit_over_limit{domain="shop",key1="pair",key2="yearly"} 0
ratelimit_service_rate_limit_over_limit{domain="shop",key1="pair"} 2
ratelimit_service_rate_limit_over_limit{domain="shop",key1="region",key2="team",key3="user"} 0
ratelimit_service_rate_limit_over_limit{domain="shop",key1="trial"} 2
ratelimit_service_rate_limit_over_limit{domain="shop",key1="user"} 2
ratelimit_service_rate_limit_shadow_mode{domain="shop",key1="address_10_1_2_3"} 0
ratelimit_service_rate_limit_shadow_mode{domain="shop",key1="api_v1",key2="method_GET"} 0
ratelimit_service_rate_limit_shadow_mode{domain="shop",key1="idle"} 0
ratelimit_service_rate_limit_shadow_mode{domain="shop",key1="pair",key2="yearly"} 0
ratelimit_service_rate_limit_shadow_mode{domain="shop",key1="pair"} 0
ratelimit_service_rate_limit_shadow_mode{domain="shop",key1="region",key2="team",key3="user"} 0
ratelimit_service_rate_limit_shadow_mode{domain="shop",key1="trial"} 2
ratelimit_service_rate_limit_shadow_mode{domain="shop",key1="user"} 0
ratelimit_service_rate_limit_total_hits{domain="shop",key1="address_10_1_2_3"} 1
ratelimit_service_rate_limit_total_hits{domain="shop",key1="api_v1",key2="method_GET"} 12
ratelimit_service_rate_limit_total_hits{domain="shop",key1="idle"} 0
ratelimit_service_rate_limit_total_hits{domain="shop",key1="pair",key2="yearly"} 4
ratelimit_service_rate_limit_total_hits{domain="shop",key1="pair"} 4
ratelimit_service_rate_limit_total_hits{domain="shop",key1="region",key2="team",key3="user"} 1
ratelimit_service_rate_limit_total_hits{domain="shop",key1="trial"} 3
ratelimit_service_rate_limit_total_hits{domain="shop",key1="user"} 5
ratelimit_service_rate_limit_total_negative_hits{domain="shop",key1="user"} 2
ratelimit_service_rate_limit_within_limit{domain="shop",key1="address_10_1_2_3"} 1
ratelimit_service_rate_limit_within_limit{domain="shop",key1="api_v1",key2="method_GET"} 3
ratelimit_service_rate_limit_within_limit{domain="shop",key1="idle"} 0
ratelimit_service_rate_limit_within_limit{domain="shop",key1="pair",key2="yearly"} 2
ratelimit_service_rate_limit_within_limit{domain="shop",key1="pair"} 2
ratelimit_service_rate_limit_within_limit{domain="shop",key1="region",key2="team",key3="user"} 1
ratelimit_service_rate_limit_within_limit{domain="shop",key1="trial"} 1
ratelimit_service_rate_limit_within_limit{domain="shop",key1="user"} 3
ratelimit_service_response_time_seconds_count{grpc_method="Check"} 1
ratelimit_service_response_time_seconds_count{grpc_method="ShouldRateLimit"} 20
tollkeeper_unknown_grpc_calls_total{service="envoy.service.ratelimit.v2"} 0
tollkeeper_unknown_grpc_calls_total{service="pb.lyft.ratelimit"} 0
tollkeeper_unknown_grpc_calls_total{service="other"} 0
ratelimit_service_should_rate_limit_error{err_type="redis_error"} 0
ratelimit_service_should_rate_limit_error{err_type="service_error"} 1
ratelimit_service_total_requests{grpc_method="Check"} 1
ratelimit_service_total_requests{grpc_method="ShouldRateLimit"} 20
tollkeeper_answers_held 0
tollkeeper_blocked_values 0
tollkeeper_build_info{version="VERSION"} 1
tollkeeper_config_last_load_successful 1
tollkeeper_config_version 1
tollkeeper_decision_duration_seconds_count 21
tollkeeper_decisions_total{domain="shop",rule="shop.address_10_1_2_3",verdict="ok"} 1
tollkeeper_decisions_total{domain="shop",rule="shop.api_v1.method_GET",verdict="ok"} 1
tollkeeper_decisions_total{domain="shop",rule="shop.api_v1.method_GET",verdict="over_limit"} 1
tollkeeper_decisions_total{domain="shop",rule="shop.idle",verdict="ok"} 0
tollkeeper_decisions_total{domain="shop",rule="shop.pair",verdict="ok"} 1
tollkeeper_decisions_total{domain="shop",rule="shop.pair",verdict="over_limit"} 1
tollkeeper_decisions_total{domain="shop",rule="shop.pair.yearly",verdict="ok"} 2
tollkeeper_decisions_total{domain="shop",rule="shop.region.team.user",verdict="ok"} 1
tollkeeper_decisions_total{domain="shop",rule="shop.trial",verdict="ok"} 1
tollkeeper_decisions_total{domain="shop",rule="shop.trial",verdict="shadow"} 2
tollkeeper_decisions_total{domain="shop",rule="shop.user",verdict="ok"} 5
tollkeeper_decisions_total{domain="shop",rule="shop.user",verdict="over_limit"} 2
tollkeeper_domains 1
tollkeeper_http2_refusals_total{reason="connection_headers_too_large"} 0
tollkeeper_http2_refusals_total{reason="headers_too_large"} 0
tollkeeper_http2_refusals_total{reason="malformed_authority"} 0
tollkeeper_http2_refusals_total{reason="malformed_headers"} 0
tollkeeper_keys_evicted_total 0
tollkeeper_metric_series 1
tollkeeper_metric_series_limit 10000
tollkeeper_metric_series_overflow_total 0
tollkeeper_overload_refusals_total{reason="buffered_bytes"} 0
tollkeeper_overload_refusals_total{reason="buffered_bytes_per_address"} 0
tollkeeper_overload_refusals_total{reason="buffered_bytes_per_connection"} 0
tollkeeper_overload_refusals_total{reason="concurrent_requests"} 0
tollkeeper_overload_refusals_total{reason="concurrent_requests_per_address"} 0
tollkeeper_overload_refusals_total{reason="frames"} 0
tollkeeper_overload_refusals_total{reason="message_timeout"} 0
tollkeeper_policy_verdicts_total{policy="allow"} 0
tollkeeper_policy_verdicts_total{policy="deny"} 0
tollkeeper_policy_verdicts_total{policy="error"} 0
tollkeeper_policy_verdicts_total{policy="local"} 0
tollkeeper_ready 1
tollkeeper_rule_decisions_total{domain="shop",rule="shop.address_10_1_2_3"} 1
tollkeeper_rule_decisions_total{domain="shop",rule="shop.api_v1.method_GET"} 2
tollkeeper_rule_decisions_total{domain="shop",rule="shop.idle"} 0
tollkeeper_rule_decisions_total{domain="shop",rule="shop.pair"} 2
tollkeeper_rule_decisions_total{domain="shop",rule="shop.pair.yearly"} 2
tollkeeper_rule_decisions_total{domain="shop",rule="shop.region.team.user"} 1
tollkeeper_rule_decisions_total{domain="shop",rule="shop.trial"} 3
tollkeeper_rule_decisions_total{domain="shop",rule="shop.user"} 7
tollkeeper_reached_levels_total{outcome="dropped"} 0
tollkeeper_reached_levels_total{outcome="told"} 0
tollkeeper_reached_levels_total{outcome="told_elsewhere"} 0
tollkeeper_reached_levels_total{outcome="unconfirmed"} 0
tollkeeper_rules 8
tollkeeper_store_info{store="memory"} 1
tollkeeper_store_lost 0
tollkeeper_store_misconfigured 0
tollkeeper_streams_reset_total 0
tollkeeper_unmatched_descriptors_total{domain="shop"} 1
"#;

/// Samples that depend on the requests only, not on time, memory or the machine.
fn fixed(scrape: &Scrape) -> Vec<String> {
    let is_fixed = |name: &&String| {
        let apart = ["process_", "tollkeeper_memory_", "tollkeeper_keys{", "tollkeeper_connections"];
        let is_free = [
            "tollkeeper_config_hash",
            "tollkeeper_config_last_load_timestamp_seconds",
            "tollkeeper_keys",
            "tollkeeper_scheduler_lag_seconds",
            "tollkeeper_time_seconds",
        ]
        .contains(&name.as_str())
            || apart.iter().any(|start| name.starts_with(start))
            || name.contains("_bucket{")
            || name.contains("_sum");
        !is_free && !name.starts_with("tollkeeper_store_errors_total") && !name.starts_with("tollkeeper_rule_limit")
    };
    scrape.samples.keys().filter(is_fixed).map(|name| format!("{name} {}", scrape.value(name))).collect()
}

#[test]
fn replicas_with_equal_rules_have_equal_hashes_and_their_clocks_show() {
    let hash_of = |rules: &str| Watched::start(with_rules(rules)).scrape().count("tollkeeper_config_hash");
    assert_eq!(hash_of(SHOP), hash_of(SHOP));
    assert_ne!(hash_of(SHOP), hash_of(&SHOP.replace("requests_per_unit: 2", "requests_per_unit: 3")));
    let watched = Watched::start(with_rules(SHOP));
    let now_s = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    let before = now_s();
    let shown = watched.scrape().value("tollkeeper_time_seconds");
    assert!(before - 0.001 <= shown && shown <= now_s() + 0.001, "{before} {shown}");
}

#[test]
fn scrape_matches_the_requests_sent() {
    let watched = Watched::start(with_rules(SHOP));
    send_traffic(&watched.server);
    let found = watched.scrape();
    println!("{}", found.text);
    let lines = fixed(&found);
    let expected = EXPECTED.replace("VERSION", env!("CARGO_PKG_VERSION"));
    let expected: BTreeSet<&str> = expected.lines().filter(|line| !line.is_empty()).collect();
    let ours: BTreeSet<&str> = lines.iter().map(String::as_str).collect();
    let lacks: Vec<_> = expected.difference(&ours).collect();
    let more: Vec<_> = ours.difference(&expected).collect();
    assert!(lacks.is_empty() && more.is_empty(), "not there: {lacks:#?}\nnot expected: {more:#?}");
    // A scrape changes nothing.
    assert_eq!(fixed(&watched.scrape()), lines);
}

#[test]
fn limit_of_each_rule_is_exported() {
    let watched = Watched::start(with_rules(SHOP));
    let of = |rule: &str, algorithm: &str, period: &str| {
        format!(
            "tollkeeper_rule_limit{{algorithm=\"{algorithm}\",consistency=\"strict\",domain=\"shop\",\
             period=\"{period}\",rule=\"shop.{rule}\",scope=\"region\"}}"
        )
    };
    let found = watched.scrape();
    for (rule, algorithm, period, limit) in [
        ("user", "fixed_window", "day", 2),
        ("api_v1.method_GET", "fixed_window", "day", 10),
        ("pair", "fixed_window", "day", 3),
        ("pair.yearly", "fixed_window", "year", 5),
        ("idle", "token_bucket", "minute", 7),
    ] {
        assert_eq!(found.count(&of(rule, algorithm, period)), limit, "{rule}");
    }
    assert_eq!(found.with_prefix("tollkeeper_rule_limit").len(), 8);
}

#[test]
fn histogram_buckets_are_cumulative_and_resolve_20_ms() {
    let watched = Watched::start(with_rules(SHOP));
    send_traffic(&watched.server);
    let found = watched.scrape();
    for (name, labels, count) in [
        ("tollkeeper_decision_duration_seconds", "", 21),
        ("ratelimit_service_response_time_seconds", "grpc_method=\"ShouldRateLimit\",", 20),
    ] {
        let start = format!("{name}_bucket{{{labels}le=\"");
        let mut buckets: Vec<(f64, f64)> = found
            .samples
            .iter()
            .filter_map(|(name, value)| Some((name.strip_prefix(&start)?.strip_suffix("\"}")?.parse().ok()?, *value)))
            .collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(buckets.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{buckets:?}");
        let bounds: Vec<f64> = buckets.iter().map(|(bound, _)| *bound).collect();
        // All default buckets of Prometheus, and twelve more below 20 ms.
        for bound in [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, f64::INFINITY] {
            assert!(bounds.contains(&bound), "{bound} is none of {bounds:?}");
        }
        assert_eq!(bounds.iter().filter(|bound| **bound <= 0.02).count(), 13, "{bounds:?}");
        assert_eq!(buckets.last().map(|(_, count)| *count), Some(f64::from(count)));
    }
    let sum = found.value("tollkeeper_decision_duration_seconds_sum");
    assert!(sum > 0.0 && sum < 30.0, "{sum}");
}

#[test]
fn response_time_is_in_milliseconds_if_enabled() {
    let setup = with_rules(SHOP).env("PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS", "true");
    let found = Watched::start(setup).scrape();
    let peer = found.with_prefix("ratelimit_service_response_time_seconds_bucket{grpc_method=\"Check\",le=\"10000\"}");
    assert_eq!(peer.len(), 1, "10 s are 10000 ms");
    // Metrics that envoyproxy/ratelimit lacks are always in seconds.
    assert_eq!(found.with_prefix("tollkeeper_decision_duration_seconds_bucket{le=\"10\"}").len(), 1);
    assert_eq!(found.with_prefix("tollkeeper_decision_duration_seconds_bucket{le=\"10000\"}").len(), 0);
}

const DEEP: &str = r#"
domain: shop.eu
descriptors:
  - key: a
    value: x.y
    descriptors:
      - key: b
        value: "say \"hi\" \\ now"
        descriptors:
          - key: c
            value: 'one: two | three'
            descriptors:
              - key: d
                descriptors:
                  - key: e
                    value: 1.2.3.4.5
                    descriptors:
                      - key: f
                        descriptors:
                          - key: g
                            descriptors:
                              - key: h
                                rate_limit: {unit: day, requests_per_unit: 9}
"#;

#[test]
fn labels_are_escaped_at_every_depth() {
    let watched = Watched::start(with_rules(DEEP).env("TOLLKEEPER_METRIC_PATH_LABEL", "true"));
    let entries = [
        ("a", "x.y"),
        ("b", r#"say "hi" \ now"#),
        ("c", "one: two | three"),
        ("d", "1"),
        ("e", "1.2.3.4.5"),
        ("f", "2"),
        ("g", "3"),
        ("h", "4"),
    ];
    let client = Client::connect(watched.server.grpc_port());
    assert_eq!(client.call(&grpc::rate_limit_request("shop.eu", &entries)).unwrap().statuses[0].limit_remaining, 8);
    let parts = r"a_x.y;b_say \qhi\q \\ now;c_one_ two _ three;d;e_1_2_3_4.5;f;g;h";
    let parts: Vec<String> = parts.split(';').map(|part| part.replace("\\q", "\\\"")).collect();
    let keys: Vec<String> = (1..).zip(&parts).map(|(depth, part)| format!("key{depth}=\"{part}\"")).collect();
    let path = format!("shop.eu.{}", parts.join("."));
    let name =
        format!("ratelimit_service_rate_limit_total_hits{{domain=\"shop.eu\",{},path=\"{path}\"}} 1", keys.join(","));
    let found = watched.scrape();
    assert_eq!(found.with_prefix("ratelimit_service_rate_limit_total_hits"), [name]);
    // The same without the `path` label, which is off by default.
    let plain = Watched::start(with_rules(DEEP)).scrape();
    let name = format!("ratelimit_service_rate_limit_total_hits{{domain=\"shop.eu\",{}}} 0", keys.join(","));
    assert_eq!(plain.with_prefix("ratelimit_service_rate_limit_total_hits"), [name]);
}

#[test]
fn tags_become_labels_of_every_series() {
    let setup = with_rules(SHOP).env("EXTRA_TAGS", "env:prod,zone:eu-1,domain:never,note:a \"b\"");
    let watched = Watched::start(setup);
    send_traffic(&watched.server);
    let found = watched.scrape();
    assert!(found.samples.len() > 100);
    for name in found.samples.keys() {
        assert!(name.contains(r#"env="prod""#) && name.contains(r#"zone="eu-1""#), "{name}");
        assert!(name.contains(r#"note="a \"b\"""#), "{name}");
        assert_eq!(name.matches("domain=").count(), 1, "{name}");
    }
    let user = r#"{domain="shop",env="prod",key1="user",note="a \"b\"",zone="eu-1"}"#;
    assert_eq!(found.count(&format!("ratelimit_service_rate_limit_total_hits{user}")), 5);
}

#[test]
fn reload_keeps_counts_of_unchanged_rules() {
    let watched = Watched::start(with_rules(SHOP));
    let user = "ratelimit_service_rate_limit_total_hits{domain=\"shop\",key1=\"user\"}";
    assert!(watched.admits("shop", "user=ann", 1));
    let reload = |rules: &str| {
        let before = watched.server.rules_status();
        std::fs::write(watched.server.rules_path(), rules).unwrap();
        wait_for("the rules to be read again", || (watched.server.rules_status() != before).then_some(()));
    };
    reload("domain: shop\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 50}}]\n");
    assert!(watched.admits("shop", "user=ann", 1));
    let found = watched.scrape();
    assert_eq!(found.count(user), 2);
    assert_eq!(found.with_prefix("tollkeeper_rule_limit").len(), 1, "removed rules have no limit series");
    let loads = |found: &Scrape| {
        let last = found.count("tollkeeper_config_last_load_successful");
        let of = |name: &str| found.count(&format!("ratelimit_service_config_load_{name}"));
        (of("success"), of("error"), found.count("tollkeeper_config_version"), last)
    };
    assert_eq!(loads(&found), (2, 0, 2, 1));
    reload("domain: shop\ndescriptors: [{key: ''}]\n");
    let found = watched.scrape();
    assert_eq!((loads(&found), found.count(user)), ((2, 1, 2, 0), 2));
}

#[test]
fn stats_page_lists_counters_by_their_statsd_names() {
    let server = with_rules(SHOP).start();
    send_traffic(&server);
    let page = http::get(server.debug_port(), "/stats").send().text();
    for line in [
        "ratelimit.service.rate_limit.shop.user.total_hits: 5",
        "ratelimit.service.rate_limit.shop.region.team.user.within_limit: 1",
        "ratelimit.service.rate_limit.shop.idle.over_limit: 0",
        "ratelimit.service.rate_limit.nowhere.domain_not_found: 2",
        "ratelimit.service.call.should_rate_limit.service_error: 1",
        "ratelimit_server.ShouldRateLimit.total_requests: 20",
        "tollkeeper_domains: 1",
    ] {
        assert!(page.lines().any(|found| found == line), "no {line} in\n{page}");
    }
    assert!(page.lines().is_sorted());
}

#[test]
fn metrics_listener_is_off_by_default_and_when_disabled() {
    for disabled in [false, true] {
        let port = Port::reserve();
        let address = format!("127.0.0.1:{}", port.number());
        let setup = with_rules(SHOP).env("PROMETHEUS_ADDR", address);
        let setup = if disabled { setup.env("USE_PROMETHEUS", "true").env("DISABLE_STATS", "true") } else { setup };
        let server = setup.start();
        assert!(http::get(port.number(), "/metrics").try_send().is_err());
        assert_eq!(http::get(server.http_port(), "/metrics").send().status, 404);
        send_traffic(&server);
        let page = |path: &str| http::get(server.debug_port(), path).send();
        let hits = if disabled { 0 } else { 5 };
        let line = format!("ratelimit.service.rate_limit.shop.user.total_hits: {hits}\n");
        assert!(page("/stats").text().contains(&line), "{disabled}: {}", page("/stats").text());
        for path in ["/top", "/rules"] {
            let response = page(path);
            assert_eq!(response.status, if disabled { 503 } else { 200 }, "{path}");
            let what = "DISABLE_STATS=true: keys and rules are not counted (unset it and restart)\n";
            assert_eq!(response.text() == what, disabled, "{path}");
        }
    }
}

#[test]
fn unusable_prometheus_address_is_one_error_line() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (name, value, words) in [
        ("PROMETHEUS_ADDR", address.as_str(), "PROMETHEUS_ADDR"),
        ("PROMETHEUS_ADDR", "9090", "PROMETHEUS_ADDR=9090: not an address; give host:port or :port"),
        ("PROMETHEUS_PATH", "metrics", "PROMETHEUS_PATH=metrics: not a path; give one that begins with `/`"),
        ("EXTRA_TAGS", "a-b:c", "EXTRA_TAGS=a-b:c: holds a name that Prometheus does not accept"),
        ("EXTRA_TAGS", "a:b,a:c", "EXTRA_TAGS=a:b,a:c: names a tag twice; give each tag once"),
        ("TOLLKEEPER_METRIC_SERIES", "-1", "TOLLKEEPER_METRIC_SERIES=-1: out of range"),
        ("NEAR_LIMIT_RATIO", "80%", "NEAR_LIMIT_RATIO=80%: not a number"),
    ] {
        let (setup, _port) = with_prometheus(with_rules(SHOP));
        let ended = setup.env(name, value).run();
        assert_ne!(ended.code, Some(0), "{name}={value}");
        let matching: Vec<&str> = ended.stderr.lines().filter(|line| line.contains(words)).collect();
        assert_eq!(matching.len(), 1, "{name}={value}: {}", ended.stderr);
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    }
}

#[test]
fn promtool_check_metrics_passes() {
    let setup = with_rules(SHOP).env("EXTRA_TAGS", "env:prod").env("TOLLKEEPER_METRIC_PATH_LABEL", "true");
    let watched = Watched::start(setup);
    send_traffic(&watched.server);
    let program = std::env::var_os("TOLLKEEPER_TEST_PROMTOOL").unwrap_or_else(|| "promtool".into());
    let mut promtool = Command::new(program)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool is there: run tests/run.sh, or install the package prometheus");
    promtool.stdin.take().expect("it is piped").write_all(watched.scrape().text.as_bytes()).unwrap();
    let ended = promtool.wait_with_output().unwrap();
    // Counters of envoyproxy/ratelimit keep their names, without `_total`.
    let findings = [ended.stdout, ended.stderr].concat();
    let findings = String::from_utf8_lossy(&findings);
    let own: Vec<&str> = findings
        .lines()
        .filter(|line| {
            !(line.starts_with("ratelimit_") && line.contains("counter metrics should have \"_total\" suffix"))
        })
        .collect();
    println!("{findings}");
    assert!(own.is_empty(), "{own:#?}");
    // 3: lint findings; 1 and 2: it cannot be read.
    assert!(matches!(ended.status.code(), Some(0 | 3)), "{:?}", ended.status);
}
