//! Metric names of an operator's mapping file.

use std::path::PathBuf;

use tempfile::TempDir;
use tollkeeper::telemetry::metrics::MetricKind;
use tollkeeper::telemetry::metrics::mapper::Mapper;

use super::{SHOP, Watched, send_traffic, with_prometheus, with_rules};

fn file(text: &str) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("map.yaml");
    std::fs::write(&path, text).unwrap();
    (directory, path)
}

const MAPPINGS: &str = r#"
defaults:
  timer_type: histogram
  ttl: 5m
mappings:
  # Before the glob in the file, but tried after it.
  - match: ratelimit\.service\.rate_limit\.(.*)\.over_limit
    match_type: regex
    name: refused
    labels: {path: "$1"}
  - match: ratelimit.service.rate_limit.*.*.over_limit
    name: refused_by
    labels: {domain: "$1", key: "${2}_"}
  - match: ratelimit.service.rate_limit.*.*.near_limit
    name: never_seen
    action: drop
  - match: ratelimit\.service\.rate_limit\.shop\.(?P<path>[\w.]+)\.total_hits
    match_type: regex
    name: halves
    scale: 0.5
  - match: ratelimit_server.*.response_time
    match_metric_type: observer
    name: "rpc_$1_seconds"
    scale: 0.001
    buckets: [1, 2]
  - match: ratelimit_server.*.total_requests
    match_metric_type: gauge
    name: not_for_counters
"#;

#[test]
fn mapping_file_sets_names_and_labels() {
    let (_directory, path) = file(MAPPINGS);
    let watched = Watched::start(with_rules(SHOP).env("PROMETHEUS_MAPPER_YAML", &path).env("EXTRA_TAGS", "env:prod"));
    send_traffic(&watched.server);
    let found = watched.scrape();
    println!("{}", found.text);
    let lines = |start: &str| found.with_prefix(start);
    // Globs are tried before regular expressions, and tags are not part of the name.
    assert_eq!(found.count(r#"refused_by{domain="shop",env="prod",key="user_"}"#), 2);
    assert_eq!(found.count(r#"refused{env="prod",path="shop.api_v1.method_GET"}"#), 2);
    assert_eq!((lines("refused_by").len(), lines("refused{").len()), (5, 3));
    assert_eq!(lines("never_seen"), [""; 0]);
    assert!(!found.text.contains("shop_user_near_limit"), "dropped is not unmapped");
    // Series that are mapped to one name are added up: 30 hits.
    assert_eq!(lines("halves"), [r#"halves{env="prod"} 15"#]);
    assert_eq!(found.count(r#"rpc_ShouldRateLimit_seconds_count{env="prod"}"#), 20);
    assert_eq!(found.count(r#"rpc_ShouldRateLimit_seconds_bucket{env="prod",le="10"}"#), 20);
    assert!(found.value(r#"rpc_ShouldRateLimit_seconds_sum{env="prod"}"#) < 30.0, "seconds, not milliseconds");
    // Series without a mapping or a statsd name keep their names.
    assert_eq!(found.count(r#"ratelimit_server_ShouldRateLimit_total_requests{env="prod"}"#), 20);
    assert_eq!(found.count(r#"ratelimit_service_rate_limit_shop_api_v1_method_GET_within_limit{env="prod"}"#), 3);
    assert_eq!(found.count(r#"ratelimit_service_rate_limit_nowhere_domain_not_found{env="prod"}"#), 2);
    assert_eq!(found.count(r#"tollkeeper_rules{env="prod"}"#), 8);
    for (_, kind) in found.types.iter().filter(|(name, _)| name.starts_with("rpc_")) {
        assert_eq!(kind, "histogram");
    }
}

/// Part of the mapping that envoyproxy/ratelimit documents for statsd_exporter.
const OF_PEER: &str = r#"
mappings:
  - match: "ratelimit.service.rate_limit.*.*.over_limit"
    name: "ratelimit_service_rate_limit_over_limit"
    timer_type: "histogram"
    labels:
      domain: "$1"
      key1: "$2"
  - match: "ratelimit.service.rate_limit.*.*.*.over_limit"
    name: "ratelimit_service_rate_limit_over_limit"
    timer_type: "histogram"
    labels:
      domain: "$1"
      key1: "$2"
      key2: "$3"
  - match: "ratelimit.service.call.should_rate_limit.*"
    name: "ratelimit_service_should_rate_limit_error"
    match_metric_type: counter
    labels:
      err_type: "$1"
  - match: "ratelimit.service.*"
    name: "ratelimit_service_${1}"
    match_metric_type: counter
"#;

#[test]
fn mapping_file_of_envoyproxy_ratelimit_gives_native_names() {
    let (_directory, path) = file(OF_PEER);
    let mapped = Watched::start(with_rules(SHOP).env("PROMETHEUS_MAPPER_YAML", &path));
    let native = Watched::start(with_rules(SHOP));
    let [mapped, native] = [mapped, native].map(|watched| {
        send_traffic(&watched.server);
        watched.scrape()
    });
    for start in [
        "ratelimit_service_rate_limit_over_limit{domain=\"shop\",key1=\"user\"}",
        "ratelimit_service_rate_limit_over_limit{domain=\"shop\",key1=\"api_v1\",key2=\"method_GET\"}",
        "ratelimit_service_should_rate_limit_error",
        "ratelimit_service_config_load_",
        "ratelimit_service_global_shadow_mode",
    ] {
        assert_eq!(mapped.with_prefix(start), native.with_prefix(start));
        assert_ne!(native.with_prefix(start).len(), 0, "{start}");
    }
}

#[test]
fn regex_matches_the_whole_name() {
    let text = "mappings: [{match: 'a\\.(.*)\\.over_limit', match_type: regex, name: over, labels: {key: $1}}]";
    let mapper = Mapper::parse(text).unwrap();
    let map = |name: &str| mapper.map_name(name, MetricKind::Counter).expect("nothing is dropped");
    assert_eq!(map("a.b.over_limit").name, "over");
    assert_eq!(map("a.b.over_limit").labels, [("key".to_owned(), "b".to_owned())]);
    assert_eq!(map("a.b.over_limit_with_local_cache").name, "a_b_over_limit_with_local_cache");
    assert_eq!(map("9.\u{e9}").name, "_9__");
}

#[test]
fn invalid_mapping_file_is_one_error_line() {
    let mapping = |rest: &str| format!("mappings: [{{match: a.b, name: ok}}, {{match: a.*, {rest}}}]");
    for (text, line) in [
        (mapping("labels: {a: b}"), "mapping 2: name is missing"),
        (mapping("name: x, match_type: glop"), "mapping 2: match_type `glop` is neither glob nor regex"),
        (mapping("name: x, action: copy"), "mapping 2: action `copy` is neither map nor drop"),
        (
            mapping("name: x, match_metric_type: set"),
            "mapping 2: match_metric_type `set` is none of counter, gauge and observer",
        ),
        (mapping("name: x, labels: {a-b: c}"), "mapping 2: `a-b` is not a valid label name"),
        (mapping("name: x, labels: {le: c}"), "mapping 2: `le` is not a valid label name"),
        (mapping("name: x, labels: {__name__: c}"), "mapping 2: `__name__` is not a valid label name"),
        (mapping("name: tollkeeper_rules"), "mapping 2: `tollkeeper_rules` is the name of another metric"),
        (mapping("name: x, scale: .nan"), "mapping 2: scale is not a number"),
        (
            "mappings: [{match: '(', match_type: regex, name: x}]".into(),
            "mapping 1: match `(` is not a regular expression",
        ),
    ] {
        assert_eq!(Mapper::parse(&text).unwrap_err().to_string(), line, "{text}");
    }
    for text in ["mappings: 1", "mappings: [{name: x}]", "mappings: [", "a: &a [*a]", "\u{0}"] {
        let error = Mapper::parse(text).map(|_| ()).map_err(|error| error.to_string());
        assert!(error.as_ref().is_err_and(|line| !line.contains('\n')) || text.starts_with("a:"), "{text}: {error:?}");
    }
    let (_directory, path) = file("mappings: [{match: a.b}]");
    let (setup, _port) = with_prometheus(with_rules(SHOP));
    let ended = setup.env("PROMETHEUS_MAPPER_YAML", &path).run();
    let line = format!(
        "PROMETHEUS_MAPPER_YAML={}: mapping 1: name is missing (fix the file or unset the variable)",
        path.display()
    );
    assert!(ended.code != Some(0) && ended.stderr.contains(&line), "{}", ended.stderr);
}

#[test]
fn missing_mapping_file_does_not_stop_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gone.yaml");
    let watched = Watched::start(with_rules(SHOP).env("PROMETHEUS_MAPPER_YAML", &path));
    let warning =
        format!("PROMETHEUS_MAPPER_YAML={}: there is no such file: metrics keep their own names", path.display());
    assert!(watched.server.stderr().contains(&warning), "{}", watched.server.stderr());
}
