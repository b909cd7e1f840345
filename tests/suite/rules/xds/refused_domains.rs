//! A domain that cannot be used is refused alone, and keeps its last rules.

use std::path::Path;

use prost_types::Any;
use serde_json::Value;
use tollkeeper::base::pb::xds::{RateLimitConfig, RateLimitUnit};

use super::{accepted, client_of, facts, limit, stream_status, waiting_client_of};
use kit::scrape::{scrape, with_prometheus};
use kit::xds_server::{TYPE_URL, XdsServer, daily, limited, resource};

fn good(domain: &str, requests: u32) -> Any {
    resource(&daily(domain, &[("user", requests)]))
}

/// Rules with a unit that does not exist.
fn bad(domain: &str) -> Any {
    let mut wrong = daily(domain, &[]);
    wrong.descriptors.push(limited("user", RateLimitUnit::Unknown, 1));
    resource(&wrong)
}

/// A resource that ends within its descriptors.
fn truncated(domain: &str) -> Any {
    let mut resource = good(domain, 1);
    resource.value.pop();
    resource
}

#[test]
fn usable_domains_are_applied_and_the_others_keep_their_last_rules() {
    let server = XdsServer::start();
    let (setup, prometheus) = with_prometheus(client_of(&server));
    let tollkeeper = setup.start();
    server.send(0, "1", "a", vec![good("shop", 1), good("api", 1), good("gone", 1), good("cut", 1)]);
    assert_eq!(facts(&server.request(0, 1)), accepted("1", "a"));
    server.send(0, "2", "b", vec![good("shop", 2), bad("api"), bad("new"), truncated("cut")]);
    let (version, nonce, error) = facts(&server.request(0, 2));
    assert_eq!((version.as_str(), nonce.as_str()), ("1", "b"));
    let error = error.unwrap();
    for part in ["api: invalid rate limit unit 'UNKNOWN'", "; cut: it cannot be decoded", "; new: invalid rate limit"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(error.ends_with(" (the other domains are applied)"), "{error}");
    let limits = || ["shop", "api", "gone", "new", "cut"].map(|domain| limit(&tollkeeper, domain, "user"));
    assert_eq!(limits(), [Some(2), Some(1), None, None, Some(1)]);

    let status = tollkeeper.rules_status();
    assert_eq!(
        (&status["source_version"], &status["domains"], &status["refused"]),
        (&"2".into(), &3.into(), &1.into())
    );
    assert!(status["last_error"].as_str().unwrap().contains("api: invalid rate limit unit"), "{status}");
    let stream = &status["xds"];
    assert_eq!((&stream["version"], &stream["partly_applied_version"]), (&"1".into(), &"2".into()), "{stream}");
    let old: Vec<_> = stream["refused_domains"].as_array().unwrap().iter().collect();
    let old: Vec<_> = old.iter().map(|old| (old["domain"].as_str().unwrap(), old["kept_version"].as_str())).collect();
    assert_eq!(old, [("api", Some("1")), ("cut", Some("1")), ("new", None)]);
    let metrics = scrape(prometheus.number());
    assert_eq!(metrics.count("tollkeeper_xds_refused_domains"), 3);
    assert_eq!(metrics.count("ratelimit_service_config_load_error"), 1);
    assert!(tollkeeper.stderr().contains("version '2' is refused for 'api', 'cut', 'new'"), "{}", tollkeeper.stderr());

    // A domain stays old over several versions, and is new once its rules are.
    server.send(0, "3", "c", vec![good("shop", 3), bad("api"), good("cut", 3)]);
    assert!(facts(&server.request(0, 3)).2.unwrap().starts_with("api: "));
    assert_eq!(limits(), [Some(3), Some(1), None, None, Some(3)]);
    assert_eq!(stream_status(&tollkeeper)["refused_domains"][0]["kept_version"], "1");
    server.send(0, "4", "d", vec![good("shop", 4), good("api", 4)]);
    assert_eq!(facts(&server.request(0, 4)), accepted("4", "d"));
    assert_eq!(limits(), [Some(4), Some(4), None, None, None]);
    let status = tollkeeper.rules_status();
    assert_eq!((&status["last_error"], &status["xds"]["refused_domains"]), (&Value::Null, &Value::Null), "{status}");
}

#[test]
fn same_bad_domain_is_refused_at_a_pace_and_applied_once() {
    let server = XdsServer::start();
    server.repeat_refused();
    let tollkeeper = client_of(&server).start();
    server.send(0, "1", "a", vec![good("shop", 1), bad("api")]);
    let requests = server.requests(0, 3);
    assert!((requests[2].at - requests[1].at).as_millis() >= 450, "the second refusal came at once");
    // The first rules are applied, so the process is ready, and they are not loaded again.
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(1));
    assert_eq!(tollkeeper.rules_status()["version"], 1);
}

#[test]
fn response_without_a_usable_domain_is_refused_as_a_whole() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    server.send(0, "1", "a", vec![good("shop", 1), good("api", 1)]);
    server.request(0, 1);
    let two = RateLimitConfig { name: "other".to_owned(), ..daily("shop", &[("user", 2)]) };
    let no_domain = Any { type_url: TYPE_URL.to_owned(), value: vec![0x1a, 0x05] };
    for (version, nonce, resources) in [
        ("2", "b", vec![bad("shop")]),
        ("3", "c", vec![good("shop", 2), resource(&two), bad("api")]),
        ("4", "d", vec![good("shop", 2), no_domain]),
    ] {
        let position = version.parse().unwrap();
        server.send(0, version, nonce, resources);
        assert!(facts(&server.request(0, position)).2.is_some(), "{version}");
        assert_eq!(["shop", "api"].map(|domain| limit(&tollkeeper, domain, "user")), [Some(1), Some(1)], "{version}");
    }
}

#[test]
fn domain_keeps_its_last_rules_over_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rules.cache");
    let with_cache = |server: &XdsServer, path: &Path| waiting_client_of(server).env("TOLLKEEPER_XDS_CACHE", path);
    let mut server = XdsServer::start();
    let tollkeeper = with_cache(&server, &path).start_unhealthy();
    server.send(0, "1", "a", vec![good("shop", 1), good("api", 1)]);
    server.request(0, 1);
    server.send(0, "2", "b", vec![good("shop", 2), bad("api")]);
    server.request(0, 2);
    drop(tollkeeper);
    let (setup, port) = (with_cache(&server, &path), server.port());
    server.stop();
    let tollkeeper = setup.start();
    let limits = || ["shop", "api"].map(|domain| limit(&tollkeeper, domain, "user"));
    assert_eq!(limits(), [Some(2), Some(1)]);
    let old = |status: &Value| status["refused_domains"][0].clone();
    let status = stream_status(&tollkeeper);
    assert_eq!((&old(&status)["domain"], &old(&status)["kept_version"]), (&"api".into(), &"1".into()), "{status}");
    assert!(status["cached_since"].is_string(), "{status}");

    let server = XdsServer::start_on(port);
    server.send(0, "1", "a", vec![good("shop", 3), bad("api")]);
    assert!(facts(&server.request(0, 1)).2.is_some());
    assert_eq!(limits(), [Some(3), Some(1)]);
    assert_eq!(old(&stream_status(&tollkeeper))["kept_version"], "1");
}
