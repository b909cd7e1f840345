//! Forms in which Envoy's configuration comes: those that are read, and those that are refused.

use std::sync::Arc;

use super::{check, checks};
use kit::{read, repository};
use tollkeeper::tools::envoy_check::check_bootstrap;

const FILTER: &str = r#"{ name: limit, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit, domain: edge, timeout: 1s, rate_limit_service: { grpc_service: { envoy_grpc: { cluster_name: outbound } } } } }"#;
const LIMITS: &str = "{ rate_limits: [{ actions: [{ generic_key: { descriptor_value: all } }] }] }";

fn istio(patches: &str) -> String {
    format!("apiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\nspec:\n  configPatches:\n{patches}")
}

fn gateway(patches: &str) -> String {
    format!(
        "apiVersion: gateway.envoyproxy.io/v1alpha1\nkind: EnvoyPatchPolicy\nspec:\n  type: JSONPatch\n  jsonPatches:\n{patches}"
    )
}

fn istio_patch(apply_to: &str, value: &str) -> String {
    format!("    - {{ applyTo: {apply_to}, patch: {{ operation: MERGE, value: {value} }} }}\n")
}

fn json_patch(kind: &str, path: &str, value: &str) -> String {
    format!(
        "    - {{ type: type.googleapis.com/envoy.config.{kind}, name: x, operation: {{ op: add, path: {path}, value: {value} }} }}\n"
    )
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of patches")]
fn patches_of_istio_and_envoy_gateway_are_read() {
    let shipped = read(&repository("deploy/istio/envoyfilter.yaml"));
    assert_eq!(checks(&check(&shipped, None)), ["descriptor-may-be-dropped"]);
    let host = |stage: &str| LIMITS.replace("{ actions", &format!("{{ {stage} actions"));
    let listener = "listener.v3.Listener";
    let filter_path = "/default_filter_chain/filters/0/typed_config/http_filters/0";
    let routes = "route.v3.RouteConfiguration";
    let items = "[{ actions: [{ generic_key: { descriptor_value: all } }] }]";
    let addition = r#"{ request_headers_to_add: [{ header: { key: x-made, value: v } }], rate_limits: [{ actions: [{ request_headers: { header_name: x-made, descriptor_key: made } }] }] }"#;
    for (text, expected) in [
        (istio(&(istio_patch("HTTP_FILTER", FILTER) + &istio_patch("VIRTUAL_HOST", &host("")))), &[][..]),
        (
            istio(&(istio_patch("HTTP_FILTER", FILTER) + &istio_patch("VIRTUAL_HOST", &host("stage: 1,")))),
            &["filter-never-asks", "stage-without-filter"],
        ),
        (
            istio(
                &(istio_patch("HTTP_FILTER", FILTER) + &istio_patch("HTTP_ROUTE", &format!("{{ route: {LIMITS} }}"))),
            ),
            &[],
        ),
        (
            istio(
                &(istio_patch("HTTP_FILTER", FILTER)
                    + &istio_patch("VIRTUAL_HOST", &host(""))
                    + &istio_patch("HTTP_ROUTE", &format!("{{ route: {LIMITS} }}"))),
            ),
            &["host-limits-replaced"],
        ),
        (istio(&(istio_patch("HTTP_FILTER", FILTER) + &istio_patch("VIRTUAL_HOST", addition))), &["value-never-set"]),
        // In two documents, as most have them, and as `kubectl get -o yaml` prints them.
        (
            format!(
                "{}---\n{}",
                istio(&istio_patch("HTTP_FILTER", FILTER)),
                istio(&istio_patch("VIRTUAL_HOST", &host("stage: 1,")))
            ),
            &["filter-never-asks", "stage-without-filter"],
        ),
        (
            format!(
                "apiVersion: v1\nkind: List\nitems: [{{ apiVersion: x, kind: EnvoyFilter, spec: {{ configPatches: [{{ applyTo: HTTP_FILTER, patch: {{ value: {FILTER} }} }}, {{ applyTo: VIRTUAL_HOST, patch: {{ value: {LIMITS} }} }}] }} }}]\n"
            ),
            &[],
        ),
        (istio(&istio_patch("HTTP_FILTER", FILTER)), &["not-in-file"]),
        (
            format!(
                "{}---\napiVersion: v1\nkind: Service\n",
                istio(&(istio_patch("HTTP_FILTER", FILTER) + &istio_patch("VIRTUAL_HOST", &host(""))))
            ),
            &["not-read"],
        ),
        (
            gateway(
                &(json_patch(listener, filter_path, FILTER)
                    + &json_patch(routes, "/virtual_hosts/0/rate_limits", items)),
            ),
            &[],
        ),
        (
            gateway(
                &(json_patch(listener, filter_path, FILTER)
                    + &json_patch(routes, "/virtual_hosts/0/routes/0/route/rate_limits", items)),
            ),
            &[],
        ),
        (
            gateway(
                &(json_patch(listener, filter_path, FILTER)
                    + &json_patch(
                        routes,
                        "/virtual_hosts/0/rate_limits/-",
                        "{ stage: 2, actions: [{ generic_key: { descriptor_value: all } }] }",
                    )),
            ),
            &["filter-never-asks", "stage-without-filter"],
        ),
        (
            gateway(
                &(json_patch(listener, filter_path, FILTER)
                    + &json_patch("cluster.v3.Cluster", "\"\"", "{ name: outbound }")
                    + &json_patch(routes, "/virtual_hosts/0/rate_limits", items)),
            ),
            &["cluster-not-http2", "default-circuit-breakers"],
        ),
    ] {
        let mut found = checks(&check(&text, None));
        found.sort_unstable();
        assert_eq!(found, expected, "{text}");
    }
}

#[test]
fn what_is_not_understood_is_refused() {
    let manager =
        "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    for (text, message) in [
        ("", "the input is empty"),
        ("\n# nothing\n", "the input is empty"),
        ("null", "the input is empty"),
        ("{}", "no configuration of Envoy"),
        ("no healthy upstream", "no configuration of Envoy"),
        ("a: 1\nb: [x]\n", "no configuration of Envoy"),
        ("domain: shop\ndescriptors: [{ key: user }]\n", "a rule file"),
        ("apiVersion: projectcontour.io/v1\nkind: HTTPProxy\nspec: {}\n", "a HTTPProxy of Kubernetes"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: { envoy.yaml: '' }\n", "a ConfigMap of Kubernetes"),
        (&istio(&istio_patch("VIRTUAL_HOST", LIMITS)), "these patches add no rate limit filter"),
        ("http_filters: []\n", "a part of a configuration"),
        ("dynamic_resources: { lds_config: { ads: {} } }\n", "listeners of this bootstrap come from elsewhere"),
        (r#"{"configs": [{"@type": "type.googleapis.com/envoy.admin.v3.ClustersConfigDump"}]}"#, "not all listeners"),
        (
            r#"{"@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster", "name": "x"}"#,
            "this part of a configuration",
        ),
        (&format!("resources: [{{ \"@type\": {manager}, http_filters: [] }}]"), "this part of a configuration"),
    ] {
        let problems = check_bootstrap(&Arc::from("x"), text, None).expect_err(text);
        assert!(problems.to_string().contains(message), "{text:?}: {problems}");
    }
    let bootstrap = "static_resources: { listeners: [{ filter_chains: [{ filters: [{ typed_config: { \"@type\": MANAGER, route_config: {}, http_filters: [FILTER] } }] }] }] }";
    let text = |filter: &str| bootstrap.replace("MANAGER", manager).replace("FILTER", filter);
    for (filter, expected) in [
        ("{ name: limit, config_discovery: { config_source: { ads: {} } } }", "not-in-file"),
        ("{ name: router }", "no-limits"),
    ] {
        assert!(checks(&check(&text(filter), None)).contains(&expected), "{filter}");
    }
}

#[test]
fn parts_of_a_configuration_dump_are_read_once() {
    let listener = format!(
        r#"{{"name": "l", "filter_chains": [{{"filters": [{{"typed_config": {{
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "http_filters": [{FILTER}], "route_config": {{}} }} }}] }}] }}"#
    );
    let of_bootstrap = format!(
        r#"{{"@type": "type.googleapis.com/envoy.admin.v3.BootstrapConfigDump", "bootstrap": {{"static_resources": {{"listeners": [{listener}]}} }} }}"#
    );
    let of_listeners = format!(
        r#"{{"@type": "type.googleapis.com/envoy.admin.v3.ListenersConfigDump", "static_listeners": [{{"listener": {listener}}}],
            "dynamic_listeners": [{{"name": "d", "active_state": {{"listener": {listener}}}, "draining_state": {{"listener": {listener}}} }}] }}"#
    );
    let clusters = r#"{"@type": "type.googleapis.com/envoy.admin.v3.ClustersConfigDump"}"#;
    let dump = format!(r#"{{"configs": [{of_bootstrap}, {of_listeners}, {clusters}]}}"#);
    let found = check(&dump, None);
    let names: Vec<_> = found.kept().iter().map(|finding| finding.check.name()).collect();
    let expected = ["cluster-unknown", "cluster-unknown", "filter-never-asks", "filter-never-asks"];
    assert_eq!(names, expected, "the static listener once, the dynamic one once");
    // The page `/config_dump?resource=static_listeners`.
    let part = format!(
        r#"{{"configs": [{{"@type": "type.googleapis.com/envoy.admin.v3.ListenersConfigDump.StaticListener", "listener": {listener}}}]}}"#
    );
    assert_eq!(checks(&check(&part, None)), ["filter-never-asks"], "clusters are not in it");
}
