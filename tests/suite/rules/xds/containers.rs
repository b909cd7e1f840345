//! The containers of Envoy Gateway and Envoy AI Gateway: `/bin/ratelimit` as process 1, without privileges, with a
//! read-only root and the environment of their Deployments. Only ports differ.
//!
//! `statsd_exporter.yaml` is the ConfigMap of Envoy Gateway 1.9.

use std::fs;
use std::path::{Path, PathBuf};

use ::tollkeeper::base::pb::xds::{RateLimitConfig, RateLimitDescriptor, RateLimitUnit};

use super::tls::{issue, rsa_key, start};
use super::{accepted, facts};
use kit::fixtures::ENVOY_GATEWAY;
use kit::port::Port;
use kit::scrape::scrape;
use kit::tollkeeper::{self, Setup, Tollkeeper, Volume};
use kit::xds_server::{XdsServer, daily, limited, resource};
use kit::{http, read, redis, signal, wait_for};

/// Variables of the Deployment in the documentation of Envoy AI Gateway, but for addresses.
const ENVOY_AI_GATEWAY: &[(&str, &str)] = &[
    ("RUNTIME_ROOT", "/data"),
    ("LOG_LEVEL", "info"),
    ("USE_STATSD", "false"),
    ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
    ("CONFIG_GRPC_XDS_NODE_ID", "envoy-ai-gateway-ratelimit"),
    ("REDIS_SOCKET_TYPE", "tcp"),
];

fn with_vars(vars: &[(&str, &str)], arguments: &[&'static str]) -> Setup {
    let setup = tollkeeper::without_rules().invoked_as("ratelimit", arguments);
    vars.iter().fold(setup, |setup, (name, value)| setup.env(name, value))
}

/// Process id of the container's first process, as seen outside of it.
fn first_process(tollkeeper: &Tollkeeper) -> u32 {
    let children = |id: u32| read(&PathBuf::from(format!("/proc/{id}/task/{id}/children")));
    let mut id = tollkeeper.id();
    while read(&PathBuf::from(format!("/proc/{id}/comm"))).trim() != "ratelimit" {
        id = children(id).split_whitespace().next().unwrap().parse().unwrap();
    }
    id
}

/// Lines of `/proc/PID/FILE` of the first process.
fn proc_lines(tollkeeper: &Tollkeeper, file: &str) -> Vec<String> {
    let text = read(&PathBuf::from(format!("/proc/{}/{file}", first_process(tollkeeper))));
    text.lines().map(str::to_owned).collect()
}

fn assert_restricted(tollkeeper: &Tollkeeper) {
    let status = proc_lines(tollkeeper, "status");
    let field = |name: &str| {
        let value = status.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t")).unwrap();
        value.split_whitespace().last().unwrap().to_owned()
    };
    assert_eq!((field("NSpid"), field("NoNewPrivs")), ("1".to_owned(), "1".to_owned()), "{status:?}");
    assert_ne!(field("Uid"), "0", "{status:?}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&field(set), 16), Ok(0), "{set}: {status:?}");
    }
    let (mounts, mut checked) = (proc_lines(tollkeeper, "mountinfo"), 0);
    for mount in mounts.iter().map(|line| line.split(' ').collect::<Vec<_>>()) {
        checked += 1;
        let is_device = mount[4] == "/proc" || mount[4].starts_with("/dev/");
        assert!(is_device || mount[5].split(',').any(|option| option == "ro"), "{mount:?}");
    }
    assert!(checked > 2, "{mounts:?}");
}

/// Sends SIGTERM to the first process, which then ends with status 0.
fn assert_ends_cleanly(mut tollkeeper: Tollkeeper) {
    signal::terminate(first_process(&tollkeeper));
    let status = tollkeeper.wait();
    assert_eq!(status.code(), Some(0), "{}", tollkeeper.stderr());
}

/// Answer to the probes of the Deployments.
fn probe(tollkeeper: &Tollkeeper) -> u16 {
    http::get(tollkeeper.http_port(), "/healthcheck").send().status
}

/// A limit of one route, below the route's own descriptor as Envoy Gateway nests them.
fn route_rule(route: &str, rule: &str, requests: u32) -> RateLimitDescriptor {
    let inner = RateLimitDescriptor { value: rule.to_owned(), ..limited(rule, RateLimitUnit::Day, requests) };
    let (key, value) = (route.to_owned(), route.to_owned());
    RateLimitDescriptor { key, value, descriptors: vec![inner], ..RateLimitDescriptor::default() }
}

fn json_request(domain: &str, entries: &[(&str, &str)]) -> String {
    let entries: Vec<_> =
        entries.iter().map(|(key, value)| serde_json::json!({ "key": key, "value": value })).collect();
    serde_json::json!({ "domain": domain, "descriptors": [{ "entries": entries }] }).to_string()
}

fn write(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn container_of_envoy_gateway_is_ready_and_shows_rules_and_metrics() {
    let directory = tempfile::tempdir().unwrap();
    issue(directory.path(), rsa_key(), &["envoy-gateway"]);
    for (from, to) in [("client.crt", "tls.crt"), ("client.key", "tls.key")] {
        fs::copy(directory.path().join(from), directory.path().join(to)).unwrap();
    }
    let mapper = include_str!("statsd_exporter.yaml");
    let volumes = vec![
        Volume { source: directory.path().to_owned(), target: "/certs" },
        Volume { source: write(directory.path(), "conf.yaml", mapper), target: "/etc/statsd-exporter/conf.yaml" },
        Volume { source: write(directory.path(), "hosts", "127.0.0.1 envoy-gateway\n"), target: "/etc/hosts" },
    ];
    let (server, redis, metrics) = (start(directory.path()), redis::options().start(), Port::reserve());
    let tollkeeper = with_vars(ENVOY_GATEWAY, &[])
        .env("CONFIG_GRPC_XDS_SERVER_URL", format!("envoy-gateway:{}", server.port()))
        .env("REDIS_URL", redis.address())
        // A busy machine must not look like an unreachable Redis.
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
        .env("PROMETHEUS_ADDR", format!(":{}", metrics.number()))
        .in_container(volumes)
        .start();
    assert_eq!(tollkeeper.rules_status()["version"], 0, "it is ready without rules");
    assert_restricted(&tollkeeper);

    let (domain, route, rule) = ("default/eg/http", "httproute/default/app/rule/0/match/0/*", "rule-0-match--1");
    let config = RateLimitConfig { descriptors: vec![route_rule(route, rule, 1)], ..daily(domain, &[]) };
    server.send(0, "1", "a", vec![resource(&config)]);
    assert_eq!(facts(&server.request(0, 1)), accepted("1", "a"));
    let request = json_request(domain, &[(route, route), (rule, rule)]);
    let statuses = [(); 2].map(|()| tollkeeper.post_json(&request).status);
    assert_eq!((statuses, probe(&tollkeeper)), ([200, 429], 200));

    let page = http::get(tollkeeper.debug_port(), "/rlconfig").send().text();
    let line = format!("{domain}.{route}_{route}.{rule}_{rule}: unit=DAY requests_per_unit=1");
    assert!(page.starts_with(&line), "{page}");
    let scraped = scrape(metrics.number());
    let labels = format!("{{domain=\"{domain}\",key1=\"{route}_{route}\",key2=\"{rule}_{rule}\"}}");
    for (series, expected) in [("total_hits", 2), ("over_limit", 1), ("near_limit", 1)] {
        let name = format!("ratelimit_service_rate_limit_{series}{labels}");
        let value = scraped.samples.get(&name).copied().unwrap_or_default();
        assert!((value - f64::from(expected)).abs() < f64::EPSILON, "{name} is {value}:\n{}", scraped.text);
    }
    assert_ends_cleanly(tollkeeper);
}

/// The Deployment has plaintext, an unknown argument, no forced start, and quotas.
#[test]
fn container_of_envoy_ai_gateway_is_ready_with_rules_and_serves_quotas() {
    let (server, redis) = (XdsServer::start(), redis::options().start());
    let tollkeeper = with_vars(ENVOY_AI_GATEWAY, &["--quotaRateLimitServiceHost=envoy-ai-gateway"])
        .env("CONFIG_GRPC_XDS_SERVER_URL", format!("127.0.0.1:{}", server.port()))
        .env("REDIS_URL", redis.address())
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
        .in_container(Vec::new())
        .start_unhealthy();
    assert_eq!(probe(&tollkeeper), 500);
    assert_restricted(&tollkeeper);
    let model = RateLimitDescriptor { quota_mode: true, ..limited("model", RateLimitUnit::Day, 1) };
    let mut quota = daily("ai-gateway-quota", &[]);
    quota.descriptors.push(RateLimitDescriptor {
        key: "backend_name".to_owned(),
        value: "openai".to_owned(),
        descriptors: vec![model],
        ..RateLimitDescriptor::default()
    });
    server.send(0, "1", "a", vec![resource(&quota)]);
    assert_eq!(facts(&server.request(0, 1)), accepted("1", "a"));
    wait_for("health", || (probe(&tollkeeper) == 200).then_some(()));
    assert!(tollkeeper.stderr().contains("--quotaRateLimitServiceHost=envoy-ai-gateway: this argument has no effect"));
    let request = json_request("ai-gateway-quota", &[("backend_name", "openai"), ("model", "m")]);
    let statuses = [(); 2].map(|()| tollkeeper.post_json(&request).status);
    assert_eq!(statuses, [200, 429]);
    assert_ends_cleanly(tollkeeper);
}
