//! Checks of the services that filters call, and of their clusters.
//!
//! Decides: which clusters of the rate limit service `check --envoy` reports.

use super::bootstrap::Bootstrap;
use super::config_node::ConfigNode;
use super::finding::{EnvoyCheck, EnvoyFindings, FindingSeverity};
use super::routes::RateLimitFilter;

/// Timeout from which on so many calls may wait that the default circuit breakers matter, in seconds.
const LONG_TIMEOUT_S: f64 = 0.5;

/// Field with the options of HTTP of a cluster.
const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// Use of a service by a filter.
struct ServiceUse<'n, 'a> {
    grpc_service: ConfigNode<'n, 'a>,
    /// More calls may be open at a time than the default circuit breakers let through.
    has_many_calls: bool,
    is_quota_stream: bool,
}

/// Checks all services that filters call.
pub(super) fn check_clusters(bootstrap: &Bootstrap<'_, '_>, found: &mut EnvoyFindings) {
    for service in find_services(bootstrap) {
        let Some(envoy_grpc) = service.grpc_service.field("envoy_grpc") else { continue };
        let Some(named) = envoy_grpc.field("cluster_name") else { continue };
        let name = named.as_text().unwrap_or_default();
        let Some(cluster) = bootstrap.clusters.get(name) else {
            if bootstrap.has_all_clusters {
                found.report(EnvoyCheck::ClusterUnknown, &named, format!("this file has no cluster '{name}'"));
            }
            continue;
        };
        check_cluster(cluster, &service, found);
    }
}

fn find_services<'n, 'a>(bootstrap: &Bootstrap<'n, 'a>) -> Vec<ServiceUse<'n, 'a>> {
    let mut services = Vec::new();
    for manager in &bootstrap.managers {
        for (at, filter) in manager.filters.iter().enumerate() {
            let entries = manager.entries_of(at);
            let holds_slots = entries.iter().any(|entry| entry.has_slot() || entry.is_release());
            services.extend(filter.grpc_service().map(|grpc_service| ServiceUse {
                has_many_calls: holds_slots || has_long_calls(filter) || grpc_service.field("retry_policy").is_some(),
                grpc_service,
                is_quota_stream: false,
            }));
        }
        let streams = manager.quota_filters.iter().filter_map(|filter| filter.field("rlqs_server"));
        services.extend(streams.map(|grpc_service| ServiceUse {
            grpc_service,
            has_many_calls: false,
            is_quota_stream: true,
        }));
    }
    let others = bootstrap.network_filters.iter();
    let services_of_others = others.filter_map(|filter| filter.field_at(&["rate_limit_service", "grpc_service"]));
    services.extend(services_of_others.map(|grpc_service| ServiceUse {
        grpc_service,
        has_many_calls: false,
        is_quota_stream: false,
    }));
    services
}

fn has_long_calls(filter: &RateLimitFilter<'_, '_>) -> bool {
    filter.node.seconds("timeout").is_some_and(|seconds| seconds >= LONG_TIMEOUT_S)
}

fn check_cluster(cluster: &ConfigNode<'_, '_>, service: &ServiceUse<'_, '_>, found: &mut EnvoyFindings) {
    let name = cluster.text("name").unwrap_or_default();
    let options = cluster.field("typed_extension_protocol_options").and_then(|options| options.field(HTTP_OPTIONS));
    match find_http2_options(cluster, options.as_ref()) {
        None => {
            let message = format!("the cluster '{name}' does not speak HTTP/2");
            found.report(EnvoyCheck::ClusterNotHttp2, cluster, message);
        }
        Some(http2) if http2.field("connection_keepalive").is_none() => {
            let message = format!("no `connection_keepalive` in the cluster '{name}'");
            found.report(EnvoyCheck::KeepaliveMissing, &http2, message);
        }
        Some(_) => {}
    }
    let thresholds = cluster.field("circuit_breakers").map_or_else(Vec::new, |breakers| breakers.items("thresholds"));
    // Thresholds for high priority do not concern calls.
    let default = thresholds.iter().find(|one| one.text("priority").is_none_or(|priority| priority == "DEFAULT"));
    let is_set = |field: &str| default.is_some_and(|one| one.field(field).is_some());
    let needs_retries = service.has_many_calls && service.grpc_service.field("retry_policy").is_some();
    if !service.is_quota_stream && (!is_set("max_requests") || (needs_retries && !is_set("max_retries"))) {
        let severity = if service.has_many_calls { FindingSeverity::Warning } else { FindingSeverity::Hint };
        let message = match needs_retries && is_set("max_requests") {
            true => format!("no `max_retries` in the circuit breakers of the cluster '{name}'"),
            false => format!("the default circuit breakers in the cluster '{name}'"),
        };
        found.report_with_severity(severity, EnvoyCheck::DefaultCircuitBreakers, cluster, message);
    }
}

/// Returns the options of HTTP/2 of a cluster that speaks it.
fn find_http2_options<'n, 'a>(
    cluster: &ConfigNode<'n, 'a>,
    options: Option<&ConfigNode<'n, 'a>>,
) -> Option<ConfigNode<'n, 'a>> {
    let Some(options) = options else { return cluster.field("http2_protocol_options") };
    ["explicit_http_config", "use_downstream_protocol_config", "auto_config"]
        .iter()
        .find_map(|config| options.field_at(&[config, "http2_protocol_options"]))
}
