//! Rules over xDS: a scripted control plane, and a tollkeeper that takes its rules from it.

#[path = "xds/ai_gateway.rs"]
mod ai_gateway;
#[path = "xds/cache.rs"]
mod cache;
#[path = "xds/connection.rs"]
mod connection;
#[path = "xds/containers.rs"]
mod containers;
#[path = "xds/defaults.rs"]
mod defaults;
#[path = "xds/delays.rs"]
mod delays;
#[path = "xds/depth.rs"]
mod depth;
#[path = "xds/refused_domains.rs"]
mod refused_domains;
#[path = "xds/resources.rs"]
mod resources;
#[path = "xds/streams.rs"]
mod streams;
#[path = "xds/subscription.rs"]
mod subscription;
#[path = "xds/tls.rs"]
mod tls;

use ::tollkeeper::base::pb::xds::DiscoveryRequest;
use ::tollkeeper::settings::Settings;
use ::tollkeeper::settings::xds::XdsSettings;
use serde_json::Value;

use kit::tollkeeper::{self, Setup, Tollkeeper};
use kit::wait_for;
use kit::xds_server::XdsServer;

/// A tollkeeper that takes its rules from `server` and is healthy at once.
fn client_of(server: &XdsServer) -> Setup {
    waiting_client_of(server).env("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")
}

/// A tollkeeper that takes its rules from `server` and is healthy once it has some.
fn waiting_client_of(server: &XdsServer) -> Setup {
    tollkeeper::without_rules()
        .env("CONFIG_TYPE", "GRPC_XDS_SOTW")
        .env("CONFIG_GRPC_XDS_SERVER_URL", server.address())
        .env("CONFIG_GRPC_XDS_NODE_ID", "test-node")
}

/// Settings of the stream to a control plane at `host:port`, with more variables.
fn xds_settings(server: &str, more: &[(&str, &str)]) -> XdsSettings {
    let vars = [
        ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
        ("CONFIG_GRPC_XDS_SERVER_URL", server),
        ("CONFIG_GRPC_XDS_NODE_ID", "test-node"),
    ];
    let vars = vars.iter().chain(more).map(|(name, value)| (name.into(), value.into()));
    let (settings, _) = Settings::from_env(vars).unwrap();
    settings.xds.unwrap()
}

/// The daily limit of a key in a domain; `None` if no rule matches.
fn limit(tollkeeper: &Tollkeeper, domain: &str, key: &str) -> Option<u64> {
    let body = format!(
        r#"{{"domain":"{domain}","descriptors":[{{"entries":[{{"key":"{key}","value":"x"}}],"hitsAddend":"0"}}]}}"#
    );
    let response = tollkeeper.post_json(&body);
    let body: Value = serde_json::from_slice(&response.body).ok()?;
    body["statuses"][0]["currentLimit"]["requestsPerUnit"].as_u64()
}

fn wait_for_limit(tollkeeper: &Tollkeeper, domain: &str, key: &str, expected: u64) {
    wait_for(&format!("a limit of {expected} for {key}"), || {
        (limit(tollkeeper, domain, key) == Some(expected)).then_some(())
    });
}

/// `xds` of `/rlconfig/status`.
fn stream_status(tollkeeper: &Tollkeeper) -> Value {
    tollkeeper.rules_status()["xds"].clone()
}

/// Version, nonce and error of a request.
fn facts(request: &DiscoveryRequest) -> (String, String, Option<String>) {
    let error = request.error_detail.as_ref().map(|status| status.message.clone());
    (request.version_info.clone(), request.response_nonce.clone(), error)
}

fn accepted(version: &str, nonce: &str) -> (String, String, Option<String>) {
    (version.to_owned(), nonce.to_owned(), None)
}
