//! The rate limit service for Envoy AI Gateway: its manifest, and the names that the gateway expects.

use std::process::Command;

use serde_json::Value;

use super::{documents, list, validate};
use kit::tollkeeper::program_path;
use kit::{read, repository};

const FILE: &str = "deploy/envoy-ai-gateway/ratelimit.yaml";

fn manifest(kind: &str) -> Value {
    let all = documents(&read(&repository(FILE)));
    all.into_iter().find(|manifest| manifest["kind"] == kind).unwrap_or_else(|| panic!("no {kind}"))
}

#[test]
fn ai_gateway_manifest_matches_kubernetes_schemas() {
    let text = read(&repository(FILE));
    validate(&text).unwrap();
    assert!(validate(&text.replace("enableServiceLinks", "enableServiceLink")).is_err());
}

#[test]
fn ai_gateway_finds_the_service_and_its_settings_pass_check_env() {
    let (service, deployment) = (manifest("Service"), manifest("Deployment"));
    for manifest in [&service, &deployment] {
        let metadata = &manifest["metadata"];
        let found = (metadata["name"].as_str(), metadata["namespace"].as_str());
        assert_eq!(found, (Some("envoy-ai-gateway-ratelimit"), Some("envoy-gateway-system")));
    }
    assert_eq!(service["spec"]["ports"][0]["port"], 8081);
    assert_eq!(service["spec"]["selector"], deployment["spec"]["template"]["metadata"]["labels"]);
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let environment: Vec<(&str, &str)> = list(&container["env"])
        .iter()
        .map(|variable| (variable["name"].as_str().unwrap(), variable["value"].as_str().unwrap()))
        .collect();
    assert!(environment.contains(&("CONFIG_GRPC_XDS_NODE_ID", "envoy-ai-gateway-ratelimit")));
    let mut check = Command::new(program_path());
    check.args(["check", "--env", "--format", "json"]).env_clear().envs(environment.iter().copied());
    let report: Value = serde_json::from_slice(&check.output().unwrap().stdout).unwrap();
    let rows = report["environment"].as_array().unwrap();
    assert_eq!(rows.len(), environment.len(), "{report:#}");
    for row in rows {
        assert!(row["prevents_start"] != true && row["disposition"] != "unusable", "{row:#}");
    }
    let grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(grace > 60, "{grace}: shorter than TOLLKEEPER_SHUTDOWN_TIMEOUT");
}
