//! Streams: what a tollkeeper sends, and what it does with what it gets.

use std::time::{Duration, Instant};

use serde_json::Value;
use tollkeeper::base::pb::xds::{RateLimitConfig, RateLimitUnit};
use tollkeeper::rules::source::{RuleSource, SourceConfig};
use tollkeeper::rules::xds::XdsConfig;

use super::{accepted, client_of, facts, limit, stream_status, wait_for_limit, waiting_client_of, xds_settings};
use kit::scrape::{scrape, with_prometheus};
use kit::xds_server::{XdsServer, daily, limited, resource};
use kit::{http, wait_for};

#[test]
fn rules_are_in_force_before_they_are_accepted_and_change_without_restart() {
    let server = XdsServer::start();
    let (setup, prometheus) = with_prometheus(client_of(&server));
    let tollkeeper = setup
        .env("CONFIG_GRPC_XDS_NODE_METADATA", "zone=a,team=b=c")
        .env("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "x-token:secret,x-other:1:2")
        .start();
    let first = server.request(0, 0);
    assert_eq!(facts(&first), accepted("", ""));
    let node = first.node.unwrap();
    assert_eq!(node.id, "test-node");
    let fields = node.metadata.unwrap().fields;
    let text = |name: &str| format!("{:?}", fields[name].kind);
    assert!(text("zone").contains("\"a\"") && text("team").contains("\"b=c\""), "{fields:?}");
    assert_eq!(server.header(0, "x-token").as_deref(), Some("secret"));
    assert_eq!(server.header(0, "x-other").as_deref(), Some("1:2"));

    server.send(0, "1", "a", vec![resource(&daily("shop", &[("user", 2)]))]);
    assert_eq!(facts(&server.request(0, 1)), accepted("1", "a"));
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(2));
    server.send(0, "2", "b", vec![resource(&daily("shop", &[("user", 3)]))]);
    assert_eq!(facts(&server.request(0, 2)), accepted("2", "b"));
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(3));
    let metrics = scrape(prometheus.number());
    for (name, value) in [("stream_up", 1), ("streams_total", 1), ("accepted_total", 2), ("refused_total", 0)] {
        assert_eq!(metrics.count(&format!("tollkeeper_xds_{name}")), value, "{name}");
    }
    let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    let explained = tollkeeper.explain(body);
    assert_eq!((&explained["source_version"], &explained["known_domain"]), (&"2".into(), &true.into()), "{explained}");
    let page = http::get(tollkeeper.debug_port(), "/rlconfig").send();
    assert_eq!(page.text(), "shop.user: unit=DAY requests_per_unit=3, shadow_mode: false, quota_mode: false\n");
    assert_eq!(page.header("x-tollkeeper-rules-version").as_deref(), Some("2"));
    assert!(!tollkeeper.stderr().contains("secret"), "{}", tollkeeper.stderr());
}

#[test]
fn absent_number_of_requests_rejects_all() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    server.send(0, "1", "a", vec![resource(&daily("shop", &[("user", 0)]))]);
    server.request(0, 1);
    let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    assert_eq!(tollkeeper.post_json(body).status, 429);
}

#[test]
fn refused_response_changes_nothing_and_is_answered_at_a_pace() {
    // Two resources of one domain: the fault may be that of either, so both are refused, and the good one with them.
    let server = XdsServer::start();
    server.repeat_refused();
    let tollkeeper = client_of(&server).start();
    server.send(0, "1", "a", vec![resource(&daily("shop", &[("user", 2)]))]);
    server.request(0, 1);
    let mut wrong = RateLimitConfig { name: "bad".to_owned(), ..daily("shop", &[]) };
    wrong.descriptors.push(limited("user", RateLimitUnit::Unknown, 1));
    server.send(0, "2", "b", vec![resource(&daily("shop", &[("user", 9)])), resource(&wrong)]);
    let requests = server.requests(0, 5);
    let refusals: Vec<_> = requests[2..].iter().map(|received| facts(&received.request)).collect();
    for (refusal, nonce) in refusals.iter().zip(["b", "b+", "b++"]) {
        let (version, answered, error) = refusal;
        assert_eq!((version.as_str(), answered.as_str()), ("1", nonce));
        let error = error.as_deref().unwrap();
        assert!(error.starts_with("bad: invalid rate limit unit 'UNKNOWN'"), "{error}");
    }
    assert!(requests[3].at - requests[2].at >= Duration::from_millis(450), "the second refusal came at once");
    assert!(requests[4].at - requests[3].at >= Duration::from_millis(900), "the third refusal came too early");
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(2));
    let status = tollkeeper.rules_status();
    assert_eq!((&status["refused"], &status["source_version"]), (&1.into(), &"1".into()), "{status}");
    let refusal = &status["xds"]["last_refusal"];
    assert_eq!(refusal["version"], "2");
    assert!(refusal["error"].as_str().unwrap().contains("invalid rate limit unit"), "{status}");
    // Reading goes on while a refusal waits for its time.
    server.send(0, "3", "c", vec![resource(&daily("shop", &[("user", 4)]))]);
    wait_for_limit(&tollkeeper, "shop", "user", 4);
    assert_eq!(tollkeeper.rules_status()["last_error"], Value::Null);
}

#[test]
fn first_refusal_on_a_stream_claims_no_version() {
    let server = XdsServer::start();
    let _tollkeeper = client_of(&server).start();
    server.send(0, "1", "a", vec![resource(&daily("", &[]))]);
    let (version, nonce, error) = facts(&server.request(0, 1));
    assert_eq!((version.as_str(), nonce.as_str()), ("", "a"));
    assert!(error.unwrap().contains("config file cannot have empty domain"));
}

#[test]
fn same_rules_under_a_new_version_are_not_loaded_again() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    let [one, two] = [daily("one", &[("user", 1)]), daily("two", &[("user", 2)])].map(|config| resource(&config));
    server.send(0, "1", "a", vec![one.clone(), two.clone()]);
    server.request(0, 1);
    server.send(0, "2", "b", vec![two, one]);
    assert_eq!(facts(&server.request(0, 2)), accepted("2", "b"));
    let status = tollkeeper.rules_status();
    assert_eq!((&status["version"], &status["source_version"]), (&1.into(), &"2".into()), "{status}");
}

#[test]
fn response_without_resources_clears_the_rules_with_a_warning() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    server.send(0, "1", "a", vec![resource(&daily("shop", &[("user", 1)]))]);
    server.request(0, 1);
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(1));
    server.send(0, "", "b", Vec::new());
    assert_eq!(facts(&server.request(0, 2)), accepted("", "b"));
    assert_eq!(limit(&tollkeeper, "shop", "user"), None);
    assert_eq!(tollkeeper.rules_status()["domains"], 0);
    assert!(tollkeeper.stderr().contains("has no rules: no request is limited"), "{}", tollkeeper.stderr());
}

#[test]
fn new_stream_claims_nothing_and_rules_stay_while_the_server_is_away() {
    let mut server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    server.send(0, "1", "a", vec![resource(&daily("shop", &[("user", 1)]))]);
    server.request(0, 1);
    server.end(0);
    assert_eq!(facts(&server.request(1, 0)), accepted("", ""));
    server.send(1, "1", "a", vec![resource(&daily("shop", &[("user", 1)]))]);
    assert_eq!(facts(&server.request(1, 1)), accepted("1", "a"));
    assert_eq!(tollkeeper.rules_status()["version"], 1, "the same rules were loaded again");

    let port = server.port();
    server.stop();
    let down = wait_for("the stream to be reported as lost", || {
        Some(stream_status(&tollkeeper)).filter(|status| status["stream"] == "down")
    });
    let error = down["stream_error"].as_str().unwrap();
    assert!(!error.contains("source:") && !error.contains("Unknown error") && !error.contains('"'), "{error}");
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(1));
    assert_eq!(tollkeeper.healthcheck(), 200);
    // The control plane counts from 1 again; what changed meanwhile has the number that was accepted before.
    let server = XdsServer::start_on(port);
    let began = Instant::now();
    assert_eq!(facts(&server.request(0, 0)), accepted("", ""));
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    server.send(0, "1", "a", vec![resource(&daily("shop", &[("user", 5)]))]);
    server.request(0, 1);
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(5));
    let status = stream_status(&tollkeeper);
    assert_eq!((&status["stream"], &status["version"]), (&"up".into(), &"1".into()), "{status}");
}

#[test]
fn without_forced_start_it_is_healthy_once_rules_are_loaded() {
    let server = XdsServer::start();
    let tollkeeper = waiting_client_of(&server).start_unhealthy();
    assert_eq!(tollkeeper.healthcheck(), 500);
    server.send(0, "1", "a", Vec::new());
    wait_for("health", || (tollkeeper.healthcheck() == 200).then_some(()));
}

#[test]
fn health_may_need_a_domain() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).env("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "true").start_unhealthy();
    server.send(0, "1", "a", Vec::new());
    server.request(0, 1);
    assert_eq!(tollkeeper.healthcheck(), 500);
    server.send(0, "2", "b", vec![resource(&daily("shop", &[("user", 1)]))]);
    wait_for("health", || (tollkeeper.healthcheck() == 200).then_some(()));
}

#[test]
fn forced_start_is_healthy_while_the_server_is_away() {
    let mut server = XdsServer::start();
    let setup = client_of(&server);
    server.stop();
    let tollkeeper = setup.start();
    assert_eq!(tollkeeper.rules_status()["version"], 0);
    let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    assert_eq!(tollkeeper.post_json(body).status, 400);
}

#[test]
fn sighup_changes_nothing() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    server.send(0, "1", "a", vec![resource(&daily("shop", &[("user", 1)]))]);
    server.request(0, 1);
    tollkeeper.signal("HUP");
    wait_for("the signal", || tollkeeper.stderr().contains("there is nothing to reload").then_some(()));
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(1));
    assert_eq!((tollkeeper.rules_status()["version"].clone(), server.streams()), (1.into(), 1));
}

#[test]
fn large_response_is_accepted_by_default_and_within_the_set_size() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    // 6 MiB, more than the 4 MiB that gRPC accepts by default.
    let keys: Vec<String> = (0..10_000).map(|number| format!("{number:0600}")).collect();
    let limits: Vec<_> = keys.iter().map(|key| (key.as_str(), 1)).collect();
    server.send(0, "1", "a", vec![resource(&daily("shop", &limits))]);
    assert_eq!(facts(&server.request(0, 1)), accepted("1", "a"));
    assert_eq!(tollkeeper.rules_status()["rules"], 10_000);

    let server = XdsServer::start();
    let tollkeeper = client_of(&server).env("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "1000000").start();
    server.send(0, "1", "a", vec![resource(&daily("shop", &limits))]);
    server.request(1, 0);
    let error = stream_status(&tollkeeper);
    assert_eq!(tollkeeper.rules_status()["version"], 0, "{error}");
}

#[test]
fn many_versions_are_each_answered() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    for number in 1..=200 {
        server.send(0, &number.to_string(), &number.to_string(), vec![resource(&daily("shop", &[("user", number)]))]);
    }
    let requests = server.requests(0, 201);
    for (number, received) in requests.iter().enumerate().skip(1) {
        assert_eq!(facts(&received.request), accepted(&number.to_string(), &number.to_string()));
    }
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(200));
}

/// The 30 s after which the warning comes are shortened.
#[test]
fn server_that_does_not_answer_is_named_with_the_node_id() {
    let server = XdsServer::start();
    let settings = xds_settings(&server.address(), &[]);
    let config = XdsConfig { answer_timeout: Duration::from_millis(50), ..XdsConfig::new(settings) };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _entered = runtime.enter();
    let (source, first) = RuleSource::start(SourceConfig::Xds(Box::new(config))).unwrap();
    assert!(first.is_none());
    let status = source.xds_stream_status().unwrap();
    let error = wait_for("the warning", || status.snapshot().stream_error);
    assert!(error.contains("CONFIG_GRPC_XDS_NODE_ID=test-node"), "{error}");
    // The stream stays open: the control plane may still be starting.
    assert_eq!(server.streams(), 1);
}

#[test]
fn ten_thousand_rules_are_loaded() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    let keys: Vec<String> = (0..10_000).map(|number| format!("rule-{number}")).collect();
    let limits: Vec<_> = keys.iter().map(|key| (key.as_str(), 1)).collect();
    server.requests(0, 1);
    server.send(0, "1", "a", vec![resource(&daily("shop", &limits))]);
    server.request(0, 1);
    assert_eq!(limit(&tollkeeper, "shop", "rule-9999"), Some(1));
}
