//! Rules that survive a restart while the control plane is away.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use prost_types::Any;
use serde_json::Value;
use tempfile::TempDir;
use tollkeeper::base::clock::Time;
use tollkeeper::base::pb::xds::RateLimitUnit;
use tollkeeper::rules::xds::cache::{CachedResources, ResourceCache};

use super::{limit, stream_status, waiting_client_of, xds_settings};
use kit::tollkeeper::Setup;
use kit::wait_for;
use kit::xds_server::{XdsServer, daily, limited, resource};

fn shop(requests: u32) -> Vec<Any> {
    vec![resource(&daily("shop", &[("user", requests)]))]
}

fn with_cache(server: &XdsServer, path: &Path) -> Setup {
    waiting_client_of(server).env("TOLLKEEPER_XDS_CACHE", path)
}

/// A cache with the rules `shop(3)`, and the control plane that sent them.
struct FilledCache {
    _directory: TempDir,
    path: PathBuf,
    server: XdsServer,
}

impl FilledCache {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (path, server) = (directory.path().join("rules.cache"), XdsServer::start());
        fill(&server, &path, shop(3));
        Self { _directory: directory, path, server }
    }
}

/// Accepts `resources` in a process, which then ends.
fn fill(server: &XdsServer, path: &Path, resources: Vec<Any>) {
    let stream = server.streams();
    let tollkeeper = with_cache(server, path).launch();
    server.send(stream, "7", "a", resources);
    server.request(stream, 1);
    drop(tollkeeper);
}

#[test]
fn accepted_rules_apply_at_the_start_while_the_server_is_away() {
    let FilledCache { _directory, path, mut server } = FilledCache::new();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let (setup, port) = (with_cache(&server, &path), server.port());
    server.stop();
    // Healthy: cached rules count as the first ones.
    let tollkeeper = setup.start();
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(3));
    let status = stream_status(&tollkeeper);
    assert_eq!(status["version"], "7");
    assert!(status["cached_since"].is_string(), "{status}");

    let server = XdsServer::start_on(port);
    server.send(0, "1", "a", shop(4));
    server.request(0, 1);
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(4));
    assert_eq!(stream_status(&tollkeeper)["cached_since"], Value::Null);
}

#[test]
fn refused_rules_are_not_kept_and_an_empty_set_is() {
    let FilledCache { _directory, path, mut server } = FilledCache::new();
    let before = fs::read(&path).unwrap();
    let mut wrong = daily("shop", &[]);
    wrong.descriptors.push(limited("user", RateLimitUnit::Unknown, 1));
    fill(&server, &path, vec![resource(&wrong)]);
    assert_eq!(fs::read(&path).unwrap(), before);
    fill(&server, &path, Vec::new());
    let setup = with_cache(&server, &path);
    server.stop();
    let tollkeeper = setup.start();
    let status = tollkeeper.rules_status();
    assert_eq!((&status["version"], &status["domains"]), (&1.into(), &0.into()), "{status}");
}

#[test]
fn unusable_cache_is_ignored_with_a_warning() {
    let FilledCache { _directory, path, mut server } = FilledCache::new();
    let good = fs::read(&path).unwrap();
    let setup = || with_cache(&server, &path);
    let other_node = setup().env("CONFIG_GRPC_XDS_NODE_ID", "other");
    let (truncated, flipped, empty) = (setup(), setup(), setup());
    server.stop();
    let mut changed = good.clone();
    *changed.last_mut().unwrap() ^= 1;
    let cases = [
        (other_node, good.clone(), "it is of node"),
        (truncated, good[..good.len() - 1].to_vec(), "it is damaged"),
        (flipped, changed, "it is damaged"),
        (empty, Vec::new(), "it is damaged"),
    ];
    for (setup, bytes, warning) in cases {
        fs::write(&path, bytes).unwrap();
        let tollkeeper = setup.start_unhealthy();
        assert!(tollkeeper.stderr().contains(warning), "{warning}: {}", tollkeeper.stderr());
        assert_eq!(tollkeeper.rules_status()["version"], 0, "{warning}");
        assert_eq!(tollkeeper.healthcheck(), 500, "{warning}");
    }
}

#[test]
fn cached_rules_that_no_longer_compile_are_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rules.cache");
    let mut server = XdsServer::start();
    let setup = with_cache(&server, &path);
    let settings = xds_settings(&server.address(), &[("TOLLKEEPER_XDS_CACHE", path.to_str().unwrap())]);
    server.stop();
    let cache = ResourceCache::new(&settings).unwrap();
    let resources = vec![resource(&daily("", &[]))];
    let accepted_at = Time::from_secs(1);
    cache
        .write_resources(CachedResources { version: "1".to_owned(), accepted_at, resources, refused: Vec::new() })
        .unwrap();
    let tollkeeper = setup.start_unhealthy();
    assert!(tollkeeper.stderr().contains("TOLLKEEPER_XDS_CACHE is ignored"), "{}", tollkeeper.stderr());
    assert_eq!(tollkeeper.healthcheck(), 500);
    assert_eq!(stream_status(&tollkeeper)["cached_since"], Value::Null);
}

#[test]
fn cache_that_cannot_be_written_does_not_refuse_rules() {
    let server = XdsServer::start();
    let tollkeeper = with_cache(&server, Path::new("/nonexistent/rules.cache")).start_unhealthy();
    server.send(0, "1", "a", shop(3));
    assert!(server.request(0, 1).error_detail.is_none());
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(3));
    wait_for("the warning", || tollkeeper.stderr().contains("cannot be written").then_some(()));
}
