//! `check --envoy`: what it says of Envoy bootstraps.
//!
//! Each check has a sample in `envoy_check/bad`, which Envoy accepts, with the findings beside it. After a deliberate
//! change, `.ci/generate` rewrites those texts; read them before the commit.

mod asked;
mod forms;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use proptest::prelude::*;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::tools::envoy_check::check_bootstrap;
use tollkeeper::tools::envoy_check::finding::{EnvoyCheck, EnvoyFindings, FindingSeverity};

use crate::generated::{self, ENVOY_SAMPLES, assert_up_to_date};
use crate::tools::cli::{ExitResult, Run};
use kit::envoy::validate;
use kit::{read, repository};

/// Checks that the tables of [`forms`] have, and that of rules.
const OF_OTHER_TABLES: [&str; 3] = ["not-in-file", "not-read", "rule-unreachable"];

/// YAML files of a folder of samples, by name.
fn samples(folder: &str) -> Vec<(String, PathBuf)> {
    let files = fs::read_dir(repository(&format!("{ENVOY_SAMPLES}/{folder}"))).unwrap();
    let mut files: Vec<_> = files
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), path))
        .collect();
    files.sort();
    files
}

fn rule_set(text: &str) -> RuleSet {
    let text = RuleText { name: "rules.yaml".into(), bytes: text.into(), documents: DocumentSelection::All };
    RuleSet::new(compile_texts(&[text], &CompileOptions::default()).expect("good rules").domains)
}

fn check(text: &str, rules: Option<&str>) -> EnvoyFindings {
    let rules = rules.map(rule_set);
    check_bootstrap(&Arc::from("envoy.yaml"), text, rules.as_ref()).expect("it is YAML")
}

/// Names of the checks that find something, each once.
fn checks(found: &EnvoyFindings) -> Vec<&'static str> {
    let mut names: Vec<_> = found.kept().iter().map(|finding| finding.check.name()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn run(arguments: &[&str]) -> ExitResult {
    Run { directory: &repository(ENVOY_SAMPLES), ..Run::default() }.with(arguments)
}

#[test]
fn each_check_has_a_sample_with_the_expected_findings() {
    assert_up_to_date(&generated::envoy_findings());
    let rules = read(&repository(&format!("{ENVOY_SAMPLES}/rules.yaml")));
    let mut names = Vec::new();
    for (name, path) in samples("bad") {
        let found = check(&read(&path), Some(&rules));
        assert!(checks(&found).contains(&&*name), "{name}: {:?}", checks(&found));
        names.push(name);
    }
    assert!(names.len() > 20, "{names:?}");
}

#[test]
fn good_samples_and_shipped_bootstraps_have_no_findings() {
    let rules = read(&repository(&format!("{ENVOY_SAMPLES}/rules.yaml")));
    let mut files: Vec<(String, PathBuf, String)> =
        samples("good").into_iter().map(|(name, path)| (name, path, rules.clone())).collect();
    for file in fs::read_dir(repository("envoy")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if let Some(stem) = name.strip_suffix(".yaml").filter(|stem| !stem.ends_with(".rules")) {
            let rules = read(&path.with_file_name(format!("{stem}.rules.yaml")));
            files.push((stem.to_owned(), path, rules));
        }
    }
    assert!(files.len() >= 13, "{files:?}");
    for (name, path, rules) in files {
        let found = check(&read(&path), Some(&rules));
        assert!(found.kept().is_empty(), "{name}: {:#?}", found.kept());
    }
}

#[test]
fn envoy_accepts_every_sample() {
    for (name, path) in samples("bad").into_iter().chain(samples("good")) {
        let output = validate(&path);
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn page_lists_every_check_with_its_severity() {
    let page = read(&repository("docs/reference/envoy-check.md"));
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| `")).collect();
    for check in EnvoyCheck::ALL {
        let start = format!("| `{}` | {} |", check.name(), check.text().severity.name());
        assert_eq!(rows.iter().filter(|row| row.starts_with(&start)).count(), 1, "a row that starts with {start}");
    }
    assert_eq!(rows.len(), EnvoyCheck::ALL.len(), "a row for each check");
}

#[test]
fn json_with_names_in_camel_case_is_read_too() {
    let text = r#"{"staticResources": {"listeners": [{"filterChains": [{"filters": [{"typedConfig": {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "httpFilters": [{"name": "limit", "typedConfig": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit",
            "domain": "edge", "timeout": "0.1s", "rateLimits": [{"actions": [{"requestHeaders": {
                "headerName": "x-user", "descriptorKey": "User"}}]}],
            "rateLimitService": {"grpcService": {"envoyGrpc": {"clusterName": "gone"}}}}}],
        "routeConfig": {}}}]}]}]}}"#;
    let rules = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 1}}]\n";
    assert_eq!(
        checks(&check(text, Some(rules))),
        ["cluster-unknown", "descriptor-may-be-dropped", "descriptor-unmatched"]
    );
}

#[test]
fn empty_input_is_an_error() {
    let ended = run(&["check", "--envoy", "/dev/null"]);
    assert_eq!(ended.code, 1, "{ended:?}");
    assert!(ended.stdout.contains("error: the input is empty") && ended.stdout.contains("1 error"), "{ended:?}");
}

#[test]
fn items_of_a_route_are_those_of_the_filter_that_they_name() {
    let sample = read(&repository(&format!("{ENVOY_SAMPLES}/good/slots-per-route.yaml")));
    let rules = read(&repository(&format!("{ENVOY_SAMPLES}/rules.yaml")));
    let of_acquire = sample.replace("                            release:\n", "                            acquire:\n");
    assert_ne!(sample, of_acquire);
    let found = checks(&check(&of_acquire, Some(&rules)));
    assert!(found.contains(&"release-behind-acquire"), "the filters have each other's items: {found:?}");
    let replaced = sample.replace("                            release:\n", "                            other:\n");
    let found = checks(&check(&replaced, Some(&rules)));
    assert!(found.contains(&"release-missing"), "no filter has the name: {found:?}");
}

#[test]
fn items_beside_those_of_a_route_for_every_filter_are_ignored() {
    let of_route = "rate_limits:\n                              - actions:";
    let sample = read(&repository(&format!("{ENVOY_SAMPLES}/good/slots-per-route.yaml")));
    assert!(sample.contains(of_route));
    let own = format!(
        "                            acquire:\n                              \"@type\": \
         type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute\n\
         {:30}rate_limits: [{{ actions: [{{ generic_key: {{ descriptor_value: x }} }}] }}]\n",
        ""
    );
    let release = "                            release:\n";
    let found = check(&sample.replace(release, &format!("{own}{release}")), None);
    let ignored: Vec<_> = found.kept().iter().filter(|one| one.check == EnvoyCheck::RouteLimitsIgnored).collect();
    assert_eq!(ignored.len(), 1, "{:#?}", found.kept());
    assert!(ignored[0].message.contains("RateLimitPerRoute"), "{}", ignored[0].message);
}

#[test]
fn timeout_is_compared_with_the_longest_wait_of_a_queue() {
    let sample = read(&repository(&format!("{ENVOY_SAMPLES}/bad/queue-beyond-timeout.yaml")));
    for (limit, timeout, is_found) in [
        ("queue_size: 50", "0.2s", true),
        ("queue_size: 50", "4.8s", true),
        ("queue_size: 50", "4.9s", false),
        ("queue_size: 50, max_wait: 1s", "0.9s", true),
        ("queue_size: 50, max_wait: 1s", "1s", false),
        ("queue_size: 1", "0.01s", false),
    ] {
        let rules = format!(
            "domain: queue\ndescriptors:\n  - key: backend\n    rate_limit: {{ unit: second, requests_per_unit: 10, \
             algorithm: leaky_bucket, {limit} }}\n"
        );
        let text = sample.replace("timeout: 0.05s", &format!("timeout: {timeout}"));
        let found = checks(&check(&text, Some(&rules)));
        assert_eq!(found.contains(&"queue-beyond-timeout"), is_found, "{limit} {timeout}: {found:?}");
        let shadow = rules.replace("  - key: backend\n", "  - key: backend\n    shadow_mode: true\n");
        assert_eq!(checks(&check(&text, Some(&shadow))), [""; 0], "nothing waits in shadow mode");
    }
}

#[test]
fn timeout_of_the_filter_answers_the_warning_about_a_queue() {
    let queue = "../../../../envoy/queue.rules.yaml";
    let warnings = |arguments: &[&str]| run(arguments).json()["warnings"].clone();
    assert_eq!(warnings(&["check", "--format", "json", queue]), 1);
    assert_eq!(warnings(&["check", "--format", "json", queue, "--envoy", "../../../../envoy/queue.yaml"]), 0);
    assert_eq!(warnings(&["check", "--format", "json", queue, "--envoy", "bad/queue-beyond-timeout.yaml"]), 1);
    assert_eq!(warnings(&["check", "--format", "json", queue, "--envoy", "good/http.yaml"]), 1);
}

#[test]
fn routes_and_clusters_of_a_configuration_dump_are_found() {
    let manager =
        "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let text = format!(
        r#"{{"configs": [
        {{"dynamic_listeners": [{{"active_state": {{"listener": {{"filter_chains": [{{"filters": [{{"typed_config": {{
            "@type": "{manager}", "rds": {{"route_config_name": "main"}},
            "http_filters": [{{"name": "limit", "typed_config": {{
                "@type": "type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit", "domain": "edge",
                "timeout": "1s",
                "rate_limit_service": {{"grpc_service": {{"envoy_grpc": {{"cluster_name": "rls"}}}}}}}}}}]}}}}]}}]}}}}}}]}},
        {{"dynamic_route_configs": [{{"route_config": {{
            "@type": "type.googleapis.com/envoy.config.route.v3.RouteConfiguration", "name": "main", "virtual_hosts": [{{
                "rate_limits": [{{"stage": 3, "actions": [{{"generic_key": {{"descriptor_value": "x"}}}}]}}]}}]}}}}]}},
        {{"dynamic_active_clusters": [{{"cluster": {{
            "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster", "name": "rls"}}}}]}}]}}"#
    );
    let found = checks(&check(&text, None));
    assert_eq!(found, ["cluster-not-http2", "default-circuit-breakers", "filter-never-asks", "stage-without-filter"]);
}

#[test]
fn warnings_are_acknowledged_and_errors_are_not() {
    let text = read(&repository(&format!("{ENVOY_SAMPLES}/bad/default-circuit-breakers.yaml")));
    let acknowledged = text.replace("    - name: tollkeeper", "    # check: ok, few calls\n    - name: tollkeeper");
    assert_ne!(text, acknowledged);
    let found = check(&acknowledged, None);
    assert_eq!((checks(&found), found.acknowledged), (vec!["descriptor-may-be-dropped"], 1));
    let text = read(&repository(&format!("{ENVOY_SAMPLES}/bad/hits-addend-dropped.yaml")));
    let hits = "hits_addend: { number: 5 }";
    let acknowledged = text.replace(hits, &format!("{hits} # check: ok"));
    let found = check(&acknowledged, None);
    assert_eq!((found.count(FindingSeverity::Error), found.acknowledged), (2, 0));
}

#[test]
fn flag_of_the_runtime_may_be_nested_or_come_from_elsewhere() {
    let sample = read(&repository(&format!("{ENVOY_SAMPLES}/bad/formatter-literal.yaml")));
    let name = "enable_formatter_for_ratelimit_action_descriptor_value";
    for (runtime, severity) in [
        (format!("static_layer: {{ envoy: {{ reloadable_features: {{ {name}: true }} }} }}"), None),
        (format!("static_layer: {{ envoy.reloadable_features: {{ {name}: true }} }}"), None),
        (format!("static_layer: {{ envoy.reloadable_features.{name}: false }}"), Some(FindingSeverity::Error)),
        ("rtds_layer: { name: x, rtds_config: { ads: {} } }".to_owned(), Some(FindingSeverity::Warning)),
        ("admin_layer: {}".to_owned(), Some(FindingSeverity::Error)),
    ] {
        let text = format!("layered_runtime: {{ layers: [{{ name: x, {runtime} }}] }}\n{sample}");
        let found = check(&text, None);
        assert_eq!(found.kept().first().map(|finding| finding.severity), severity, "{runtime}");
    }
}

#[test]
fn text_output_has_place_consequence_and_fix() {
    let ended = run(&["check", "--envoy", "bad/hits-addend-dropped.yaml"]);
    assert_eq!(ended.code, 1, "{ended:?}");
    let lines: Vec<_> = ended.stdout.lines().filter(|line| !line.contains(" | ")).collect();
    let expected = "\
bad/hits-addend-dropped.yaml:32:27: error: `hits_addend` in a virtual host [hits-addend-dropped]
bad/hits-addend-dropped.yaml:35:27: error: `is_negative_hits` in a virtual host [hits-addend-dropped]
  so: Envoy leaves it out in virtual hosts and routes: the call counts one hit, and a refund is one hit more
  fix: move this item into `rate_limits` of the filter, or of a RateLimitPerRoute
";
    assert_eq!(lines[..4].iter().map(|line| format!("{line}\n")).collect::<String>(), expected, "so and fix once");
    assert_eq!(lines.last(), Some(&"1 Envoy file, 2 errors, 0 warnings, 2 hints"));
}

#[test]
fn exit_code_follows_errors_only() {
    for (arguments, code) in [
        (&["check", "--envoy", "good/http.yaml"][..], 0),
        (&["check", "--envoy", "good/http.yaml", "rules.yaml"], 0),
        (&["check", "--envoy", "bad/default-circuit-breakers.yaml"], 0),
        (&["check", "--envoy", "bad/keepalive-missing.yaml"], 0),
        (&["check", "--envoy", "bad/domain-unknown.yaml"], 0),
        (&["check", "--envoy", "bad/domain-unknown.yaml", "rules.yaml"], 1),
        (&["check", "--envoy", "bad/cluster-unknown.yaml", "--envoy", "good/http.yaml"], 1),
        (&["check", "--envoy", "gone.yaml"], 1),
    ] {
        let ended = run(arguments);
        assert_eq!(ended.code, code, "{arguments:?}: {ended:?}");
    }
}

#[test]
fn rules_that_no_file_reaches_are_a_hint() {
    let hints = |files: &[&str]| {
        let arguments = [&["check", "rules.yaml", "--format", "json"], files].concat();
        let found = run(&arguments).json()["envoy"]["findings"].clone();
        let of_rules = found.as_array().unwrap().iter().filter(|one| one["check"] == "rule-unreachable");
        of_rules.map(|one| one["path"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let one = hints(&["--envoy", "good/http.yaml"]);
    assert!(!one.contains(&"edge.user".to_owned()) && one.contains(&"edge.plan".to_owned()), "{one:?}");
    assert!(one.iter().all(|path| path.starts_with("edge.")), "no filter asks in the other domains: {one:?}");
    let both = hints(&["--envoy", "good/http.yaml", "--envoy", "good/slots.yaml"]);
    assert!(both.len() < one.len(), "{both:?} {one:?}");
    assert_eq!(hints(&["--envoy", "good/http.yaml", "--envoy", "good/quota.yaml"]), [""; 0], "buckets are not read");
    let page = run(&["check", "rules.yaml", "--envoy", "good/http.yaml"]).stdout;
    assert_eq!(page.matches("  so: no descriptor of these files reaches this rule").count(), 1, "{page}");
}

#[test]
fn json_output_has_every_field() {
    let found = run(&["check", "--envoy", "bad/domain-unknown.yaml", "rules.yaml", "--format", "json"]).json();
    assert_eq!(found["ok"], false);
    let envoy = &found["envoy"];
    for (name, value) in [("files", 1), ("errors", 1), ("warnings", 0), ("hints", 1), ("acknowledged", 0)] {
        assert_eq!(envoy[name], value, "{name}");
    }
    let finding = &envoy["findings"][0];
    assert_eq!(finding["check"], "domain-unknown");
    assert_eq!(finding["severity"], "error");
    assert_eq!(finding["fix"], "did you mean `domain: edge`?");
    assert!(finding["path"].as_str().unwrap().ends_with("http_filters[0].typed_config.domain"), "{finding}");
    let unreadable = run(&["check", "--envoy", "gone.yaml", "--format", "json"]).json();
    assert_eq!(unreadable["envoy"]["findings"][0]["check"], "unreadable");
}

#[test]
fn hostile_files_are_bounded() {
    let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
    assert!(check_bootstrap(&Arc::from("x"), &deep, None).is_err());
    // Each level doubles what the aliases expand to.
    let bomb: String = (1..40).map(|at| format!("a{at}: &a{at} [*a{}, *a{}]\n", at - 1, at - 1)).collect();
    assert!(check_bootstrap(&Arc::from("x"), &format!("a0: &a0 [x, x]\n{bomb}"), None).is_err());
    let manager =
        "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let filter = "type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit";
    let one = format!("{{ name: x, typed_config: {{ \"@type\": {filter} }} }}");
    let filters: Vec<String> = (0..20_000).map(|_| format!("  - {one}\n")).collect();
    let text = format!("\"@type\": {manager}\nroute_config: {{}}\nhttp_filters:\n{}", filters.concat());
    let found = check(&text, None);
    assert_eq!(found.count(FindingSeverity::Warning), 64, "no more filters are checked");
    // Each cluster of many is checked once.
    let clusters: Vec<String> = (0..20_000).map(|at| format!("  - {{ name: c{at} }}\n")).collect();
    let entries =
        "    - actions: [{ generic_key: { descriptor_value: x } }]\n      hits_addend: { number: 1 }\n".repeat(20_000);
    let text = format!(
        "static_resources:\n  clusters:\n{}\"@type\": {manager}\nroute_config:\n  virtual_hosts:\n  - rate_limits:\n{entries}http_filters: [{one}]\n",
        clusters.concat()
    );
    let found = check(&text, Some("domain: edge\n"));
    assert!(found.kept().len() <= 1000, "{}", found.kept().len());
    assert!(found.count(FindingSeverity::Error) > 9000, "{}", found.count(FindingSeverity::Error));
}

proptest! {

    /// A sample with a part of it removed or repeated neither panics nor is refused for what is left out.
    #[test]
    fn damaged_samples_do_not_panic(sample in 0..40_usize, from in 0..2000_usize, length in 1..200_usize, twice: bool) {
        let files = samples("bad");
        let text = read(&files[sample % files.len()].1);
        let letters: Vec<char> = text.chars().collect();
        let (from, to) = (from.min(letters.len()), (from + length).min(letters.len()));
        let middle: String = if twice { letters[from..to].iter().chain(&letters[from..to]).collect() } else { String::new() };
        let text = letters[..from].iter().collect::<String>() + &middle + &letters[to..].iter().collect::<String>();
        let rules = rule_set("domain: edge\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 1}}]\n");
        let _ = check_bootstrap(&Arc::from("x"), &text, Some(&rules));
    }
}

mod field_names {
    use tollkeeper::tools::envoy_check::config_node::names_field;

    #[test]
    fn fields_have_two_names() {
        for (written, name, is_name) in [
            ("rate_limits", "rate_limits", true),
            ("rateLimits", "rate_limits", true),
            ("RateLimits", "rate_limits", false),
            ("rateLimit", "rate_limits", false),
            ("rateLimitsX", "rate_limits", false),
            ("domain", "domain", true),
        ] {
            assert_eq!(names_field(written, name), is_name, "{written}");
        }
    }
}

mod formatters {
    use tollkeeper::tools::envoy_check::descriptors::find_formatter;

    #[test]
    fn formatters_are_found_in_text() {
        for (text, formatter) in [
            ("%REQ(x-user)%", Some("%REQ(x-user)%")),
            ("a-%PROTOCOL%-b", Some("%PROTOCOL%")),
            ("100% of %STREAM_ID%", Some("%STREAM_ID%")),
            ("%START_TIME(%s.%9f)%", Some("%START_TIME(%s.%9f)%")),
            ("50%", None),
            ("100%25", None),
            ("%%", None),
            ("%req(x)%", None),
            ("%REQ(x", None),
        ] {
            assert_eq!(find_formatter(text), formatter, "{text}");
        }
    }
}
