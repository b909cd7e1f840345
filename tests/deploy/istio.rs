//! The EnvoyFilter for Istio: the test merges its patches into a gateway's configuration, and Envoy validates the
//! result. The tests run without Istio, so they do not cover where Istio inserts a patch.

use std::fs;

use serde_json::{Value, json};

use super::{RENDERINGS, documents, list, validate};
use kit::envoy;
use kit::{read, repository};

const FILE: &str = "deploy/istio/envoyfilter.yaml";

/// Value of the patch with this `applyTo`.
fn patch<'a>(filter: &'a Value, apply_to: &str) -> &'a Value {
    let patches = list(&filter["spec"]["configPatches"]);
    let found = patches.iter().find(|patch| patch["applyTo"] == apply_to).unwrap_or_else(|| panic!("no {apply_to}"));
    &found["patch"]["value"]
}

/// Bootstrap of a gateway like Istio's, with the EnvoyFilter's patches merged in.
fn bootstrap(filter: &Value) -> Value {
    let limit = patch(filter, "HTTP_FILTER");
    let cluster = &limit["typed_config"]["rate_limit_service"]["grpc_service"]["envoy_grpc"]["cluster_name"];
    let mut host = json!({
        "name": "any", "domains": ["*"],
        "routes": [{ "match": { "prefix": "/" }, "route": { "cluster": cluster } }],
    });
    host.as_object_mut().unwrap().extend(patch(filter, "VIRTUAL_HOST").as_object().unwrap().clone());
    let router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
    let manager =
        "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let manager = json!({
        "@type": manager, "stat_prefix": "gateway",
        "http_filters": [limit, { "name": "envoy.filters.http.router", "typed_config": { "@type": router } }],
        "route_config": { "virtual_hosts": [host] },
    });
    let name = "envoy.filters.network.http_connection_manager";
    json!({ "static_resources": {
        "listeners": [{
            "name": "gateway",
            "address": { "socket_address": { "address": "127.0.0.1", "port_value": 0 } },
            "filter_chains": [{ "filters": [{ "name": name, "typed_config": manager }] }],
        }],
        "clusters": [{ "name": cluster, "type": "STATIC" }],
    } })
}

fn load(filter: &Value) -> Result<(), String> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("envoy.json");
    fs::write(&file, bootstrap(filter).to_string()).unwrap();
    let validated = envoy::validate(&file);
    if validated.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&validated.stderr).into_owned()) }
}

#[test]
fn envoy_accepts_the_merged_envoy_filter() {
    let text = read(&repository(FILE));
    validate(&text).unwrap();
    let filter = documents(&text).remove(0);
    load(&filter).unwrap();
    // Envoy rejects an invalid filter, so the check above is meaningful.
    let wrong = documents(&text.replace("failure_mode_deny", "failure_mode_deni")).remove(0);
    assert!(load(&wrong).unwrap_err().contains("failure_mode_deni"));
}

#[test]
fn filter_calls_the_service_of_the_chart() {
    let filter = documents(&read(&repository(FILE))).remove(0);
    let limit = &patch(&filter, "HTTP_FILTER")["typed_config"];
    let rules = RENDERINGS[0].named("ConfigMap", "edge-tollkeeper-rules").unwrap();
    let rules = documents(rules["data"]["example.yaml"].as_str().unwrap()).remove(0);
    assert_eq!(limit["domain"], rules["domain"]);
    let keys: Vec<_> = list(&rules["descriptors"]).iter().map(|it| it["key"].as_str().unwrap()).collect();
    let descriptor_keys = list(&patch(&filter, "VIRTUAL_HOST")["rate_limits"]).iter().map(|it| &it["actions"][0]);
    let descriptor_keys: Vec<_> = descriptor_keys
        .map(|action| action["request_headers"]["descriptor_key"].as_str().unwrap_or("remote_address"))
        .collect();
    assert_eq!(descriptor_keys, keys);
    let cluster = &limit["rate_limit_service"]["grpc_service"]["envoy_grpc"]["cluster_name"];
    let port = RENDERINGS[0].container()["ports"][0]["containerPort"].to_string();
    assert!(cluster.as_str().unwrap().starts_with(&format!("outbound|{port}||")), "{cluster}");
}
