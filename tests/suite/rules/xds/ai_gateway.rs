//! The protocol of Envoy AI Gateway's QuotaPolicy: its node id, its rules, and its two calls for each request.

use tollkeeper::base::pb::xds::{RateLimitConfig, RateLimitDescriptor, RateLimitUnit};
use tollkeeper::base::pb::{RateLimitDescriptor as AskedDescriptor, RateLimitRequest};

use super::waiting_client_of;
use kit::grpc::{Client, descriptor};
use kit::http;
use kit::xds_server::{XdsServer, limited, resource};

const DOMAIN: &str = "ai-gateway-quota";
const NODE_ID: &str = "envoy-ai-gateway-ratelimit";
const BACKEND: (&str, &str) = ("backend_name", "default/openai");

/// A budget of tokens, as the controller translates a quota.
fn budget(key: &str, value: &str, unit: RateLimitUnit, tokens: u32) -> RateLimitDescriptor {
    RateLimitDescriptor { value: value.to_owned(), quota_mode: true, ..limited(key, unit, tokens) }
}

/// Rules of a policy for one backend.
fn policy(models: Vec<RateLimitDescriptor>) -> RateLimitConfig {
    let (key, value) = BACKEND;
    let backend = RateLimitDescriptor {
        key: key.to_owned(),
        value: value.to_owned(),
        descriptors: models,
        ..RateLimitDescriptor::default()
    };
    RateLimitConfig { name: DOMAIN.to_owned(), domain: DOMAIN.to_owned(), descriptors: vec![backend] }
}

/// A gateway that asks for one backend.
struct Gateway(Client);

impl Gateway {
    /// Asks when a request comes; one descriptor for each list of further entries. `true` if it is rejected.
    fn ask(&self, model: &str, buckets: &[&[(&str, &str)]]) -> bool {
        self.call(model, buckets, None)
    }

    /// Charges the tokens when the response ends.
    fn charge(&self, model: &str, buckets: &[&[(&str, &str)]], tokens: u64) {
        self.call(model, buckets, Some(tokens));
    }

    fn call(&self, model: &str, buckets: &[&[(&str, &str)]], tokens: Option<u64>) -> bool {
        let base = [BACKEND, ("model_name_override", model)];
        let ask = |further: &[(&str, &str)]| AskedDescriptor {
            hits_addend: tokens,
            ..descriptor(&[&base[..], further].concat())
        };
        let descriptors = std::iter::once(ask(&[])).chain(buckets.iter().map(|further| ask(further))).collect();
        let request = RateLimitRequest { domain: DOMAIN.to_owned(), descriptors, hits_addend: 0 };
        // 2 is OVER_LIMIT.
        self.0.call(&request).expect("an answer").overall_code == 2
    }
}

#[test]
fn quota_policy_of_envoy_ai_gateway_is_enforced_in_tokens() {
    let server = XdsServer::start();
    let tollkeeper = waiting_client_of(&server)
        .env("CONFIG_GRPC_XDS_NODE_ID", NODE_ID)
        .invoked_as("ratelimit", &["--quotaRateLimitServiceHost=envoy-ai-gateway-ratelimit.envoy-gateway-system"])
        .launch();
    assert_eq!(server.request(0, 0).node.expect("a node").id, NODE_ID);
    let models = vec![
        budget("model_name_override", "gpt-4", RateLimitUnit::Day, 10),
        // The quota of the whole service has no model.
        budget("model_name_override", "", RateLimitUnit::Day, 1000),
    ];
    server.send(0, "1", "a", vec![resource(&policy(models))]);
    server.request(0, 1);
    let page = http::get(tollkeeper.debug_port(), "/rlconfig").send().text();
    let line = "ai-gateway-quota.backend_name_default/openai.model_name_override_gpt-4: unit=DAY requests_per_unit=10, \
                shadow_mode: false, quota_mode: true\n";
    assert!(page.contains(line), "{page}");
    assert!(tollkeeper.stderr().contains("quotaRateLimitServiceHost"), "{}", tollkeeper.stderr());

    let gateway = Gateway(Client::connect(tollkeeper.grpc_port()));
    assert!(!gateway.ask("gpt-4", &[]));
    // The response has more tokens than are left: it has passed, and the next request does not.
    gateway.charge("gpt-4", &[], 30);
    assert!(gateway.ask("gpt-4", &[]));
    assert!(!gateway.ask("gpt-5", &[]));
    gateway.charge("gpt-5", &[], 2000);
    assert!(gateway.ask("gpt-5", &[]));
}

#[test]
fn bucket_rules_of_a_quota_policy_have_budgets_of_their_own() {
    let server = XdsServer::start();
    let tollkeeper = waiting_client_of(&server).env("CONFIG_GRPC_XDS_NODE_ID", NODE_ID).launch();
    // One rule for a value of a header, one for each value of another, and the default bucket.
    let exact = "rule-0-x-team|a-match-0";
    let distinct = "rule-1-x-user-match-0";
    let default = "rule-2-match--1";
    let model = RateLimitDescriptor {
        key: "model_name_override".to_owned(),
        value: "gpt-4".to_owned(),
        descriptors: vec![
            budget(exact, exact, RateLimitUnit::Day, 100),
            budget(distinct, "", RateLimitUnit::Day, 10),
            budget(default, default, RateLimitUnit::Day, 20),
        ],
        ..RateLimitDescriptor::default()
    };
    server.send(0, "1", "a", vec![resource(&policy(vec![model]))]);
    server.request(0, 1);
    let gateway = Gateway(Client::connect(tollkeeper.grpc_port()));
    let ann: &[&[(&str, &str)]] = &[&[(distinct, "ann")], &[(default, default)]];
    let bob: &[&[(&str, &str)]] = &[&[(distinct, "bob")], &[(default, default)]];
    let team: &[&[(&str, &str)]] = &[&[(exact, exact)], &[(default, default)]];
    assert!(!gateway.ask("gpt-4", ann));
    gateway.charge("gpt-4", ann, 15);
    // The budget of ann is used up; the default bucket is not, and one that is left is enough.
    assert!(!gateway.ask("gpt-4", ann));
    gateway.charge("gpt-4", ann, 15);
    assert!(gateway.ask("gpt-4", ann));
    // Others have budgets of their own beside the default one.
    assert!(!gateway.ask("gpt-4", bob));
    assert!(!gateway.ask("gpt-4", team));
    gateway.charge("gpt-4", team, 100);
    assert!(gateway.ask("gpt-4", team));
}
