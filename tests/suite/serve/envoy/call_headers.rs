//! Headers of Envoy's call that a client or a name in the bootstrap chooses: the limit must hold with all of them.

use super::{Pair, rejection_after};
use kit::tollkeeper;

const RULES: &str = "\
domain: gateway
descriptors:
- {key: api_key, rate_limit: {unit: day, requests_per_unit: 2}}
";

/// Inserts `more` after each line that contains `line`, with the indentation of that line.
fn insert_after(bootstrap: &str, line: &str, more: &str) -> String {
    assert!(bootstrap.contains(line), "the bootstrap has no {line}");
    let mut changed = String::new();
    for old in bootstrap.lines() {
        changed += &format!("{old}\n");
        if old.contains(line) {
            let indentation = &old[..old.len() - old.trim_start().len()];
            changed.extend(more.lines().map(|new| format!("{indentation}{new}\n")));
        }
    }
    changed
}

/// Adds Envoy's OpenTelemetry tracer, which copies `traceparent` and `tracestate` into its calls.
fn with_tracer(bootstrap: &str) -> String {
    let larger = insert_after(bootstrap, "stat_prefix: upstream", "max_request_headers_kb: 8192");
    let tracer = "\
max_request_headers_kb: 8192
tracing:
  provider:
    name: envoy.tracers.opentelemetry
    typed_config:
      \"@type\": type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig
      grpc_service: { envoy_grpc: { cluster_name: upstream } }
";
    insert_after(&larger, "stat_prefix: gateway", tracer)
}

#[test]
fn limit_holds_with_a_tracestate_up_to_the_bound_on_headers() {
    let setup = tollkeeper::with_rules(RULES).env("TOLLKEEPER_GRPC_MAX_HEADER_BYTES", "1MiB");
    let pair = Pair::start_changed("gateway", setup, |bootstrap| with_tracer(&bootstrap));
    for (key, bytes) in [("a", 1000), ("b", 17_000), ("c", 58_000), ("d", 400_000)] {
        let request = pair.envoy.get("/").header("x-api-key", key);
        let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let request =
            request.header("traceparent", traceparent).header("tracestate", format!("v={}", "x".repeat(bytes)));
        rejection_after(2, &request);
    }
    pair.assert_no_call_failed();
}

/// Renames the cluster of tollkeeper; Envoy sends the name as `:authority`.
fn with_cluster_name(bootstrap: &str, name: &str) -> String {
    let changed = bootstrap.replace("cluster_name: tollkeeper", &format!("cluster_name: \"{name}\""));
    let changed = changed.replace("- name: tollkeeper\n", &format!("- name: \"{name}\"\n"));
    assert_ne!(changed, bootstrap);
    changed
        .lines()
        .filter(|line| line.trim_start() != "authority: tollkeeper")
        .map(|line| format!("{line}\n"))
        .collect()
}

#[test]
fn limit_holds_with_a_cluster_of_any_name() {
    for name in ["outbound|8081||ratelimit.default.svc.cluster.local", "extension/ns/name"] {
        let change = |bootstrap: String| with_cluster_name(&bootstrap, name);
        let pair = Pair::start_changed("gateway", tollkeeper::with_rules(RULES), change);
        for key in ["a", "b", "c"] {
            rejection_after(2, &pair.envoy.get("/").header("x-api-key", key));
        }
        pair.assert_no_call_failed();
    }
}
