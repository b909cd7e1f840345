//! Reloading of rules in a running server.
//!
//! Every way of replacing files must take effect through events alone, without polling; invalid rules must change
//! nothing; and no response may mix two rule sets. `watch` tests the watcher itself.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ::tollkeeper::base::pb::RateLimitResponse;
use serde_json::Value;
use tempfile::TempDir;
use tonic::Code;

use kit::grpc::{self, Client};
use kit::tollkeeper::{self, Setup, Tollkeeper};
use kit::wait_for;

/// Peek at the counter of the rule below.
const PEEK: &str = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}],"hitsAddend":"0"}]}"#;

fn rules(limit: u32) -> String {
    format!("domain: shop\ndescriptors:\n- key: user\n  rate_limit: {{unit: day, requests_per_unit: {limit}}}\n")
}

/// The current limit; `None` if no rule matches.
fn limit(server: &Tollkeeper) -> Option<u64> {
    let response = server.post_json(PEEK);
    let body: Value = serde_json::from_slice(&response.body).unwrap_or_else(|_| panic!("{response:?}"));
    body["statuses"][0]["currentLimit"]["requestsPerUnit"].as_u64()
}

fn wait_for_limit(server: &Tollkeeper, expected: u64) {
    wait_for(&format!("the limit of {expected}"), || (limit(server) == Some(expected)).then_some(()));
}

/// Waits until `count` rule sets were rejected; returns the last error.
fn wait_for_rejected_set(server: &Tollkeeper, count: u64) -> String {
    let status =
        wait_for("the set to be rejected", || Some(server.rules_status()).filter(|status| status["refused"] == count));
    status["last_error"].as_str().unwrap_or_else(|| panic!("{status}")).to_owned()
}

/// Only events: the contents are compared once a day.
fn without_polling(setup: Setup) -> Setup {
    setup.env("TOLLKEEPER_POLL_INTERVAL", "0").env("TOLLKEEPER_RELOAD_DEBOUNCE", "10ms")
}

#[test]
fn file_replaced_in_any_way_is_reloaded() {
    type Replacement = (&'static str, fn(&Path, &str));
    let replacements: [Replacement; 3] = [
        ("written in place", |path, text| fs::write(path, text).unwrap()),
        ("renamed over", |path, text| {
            let new = path.with_extension("new");
            fs::write(&new, text).unwrap();
            fs::rename(new, path).unwrap();
        }),
        ("moved away, written again, and the old one removed", |path, text| {
            let old = path.with_extension("yaml~");
            fs::rename(path, &old).unwrap();
            fs::write(path, text).unwrap();
            fs::remove_file(old).unwrap();
        }),
    ];
    let server = without_polling(tollkeeper::with_rules(&rules(1))).start();
    for (round, (how, replace)) in (0..6).zip(replacements.into_iter().cycle()) {
        let next = 2 + round;
        replace(&server.rules_path(), &rules(next));
        wait_for(&format!("a file that was {how}"), || (limit(&server) == Some(next.into())).then_some(()));
    }
    assert_eq!(server.rules_status()["last_error"], Value::Null);
}

#[test]
fn each_of_several_configs_is_watched() {
    let files = tempfile::tempdir().unwrap();
    let (file, directory) = (files.path().join("one.yaml"), files.path().join("more"));
    fs::write(&file, rules(1)).unwrap();
    fs::create_dir(&directory).unwrap();
    let other = |limit| rules(limit).replace("shop", "other");
    fs::write(directory.join("two.yaml"), other(1)).unwrap();
    let setup = tollkeeper::without_rules().arg("--config").arg(&file).arg("--config").arg(&directory);
    let server = without_polling(setup).start();
    assert_eq!(server.rules_status()["domains"], 2);

    fs::write(&file, rules(2)).unwrap();
    wait_for_limit(&server, 2);
    fs::write(directory.join("three.yaml"), rules(3).replace("shop", "third")).unwrap();
    wait_for("the new file", || (server.rules_status()["domains"] == 3).then_some(()));
    fs::remove_file(directory.join("two.yaml")).unwrap();
    wait_for("the file to be gone", || (server.rules_status()["domains"] == 2).then_some(()));
}

/// A directory as a Kubernetes ConfigMap is mounted.
struct ConfigMap {
    directory: PathBuf,
}

impl ConfigMap {
    fn mount(directory: PathBuf, files: &[(&str, String)]) -> Self {
        fs::create_dir_all(&directory).unwrap();
        let this = Self { directory };
        this.swap(1, files);
        for (name, _) in files {
            symlink(Path::new("..data").join(name), this.directory.join(name)).unwrap();
        }
        this
    }

    /// Puts all files in place at once, and removes the version before.
    fn swap(&self, version: u32, files: &[(&str, String)]) {
        let name = |version: u32| format!("..2026_11_21_{version}");
        fs::create_dir(self.directory.join(name(version))).unwrap();
        for (file, text) in files {
            fs::write(self.directory.join(name(version)).join(file), text).unwrap();
        }
        symlink(name(version), self.directory.join("..data_tmp")).unwrap();
        fs::rename(self.directory.join("..data_tmp"), self.directory.join("..data")).unwrap();
        if version > 1 {
            fs::remove_dir_all(self.directory.join(name(version - 1))).unwrap();
        }
    }
}

/// `RUNTIME_*` for files in `ROOT/config`, as a ConfigMap needs it.
fn in_config_below(root: &Path) -> Setup {
    tollkeeper::without_rules()
        .env("RUNTIME_ROOT", root)
        .env("RUNTIME_APPDIRECTORY", "config")
        .env("RUNTIME_WATCH_ROOT", "false")
        .env("RUNTIME_IGNOREDOTFILES", "true")
}

#[test]
fn swapped_config_map_is_reloaded() {
    let root = tempfile::tempdir().unwrap();
    let map = ConfigMap::mount(root.path().join("config"), &[("rules.yaml", rules(1))]);
    let server = without_polling(in_config_below(root.path())).start();
    assert_eq!(limit(&server), Some(1));
    for version in 2..5 {
        map.swap(version, &[("rules.yaml", rules(version))]);
        wait_for_limit(&server, version.into());
    }
    assert_eq!(server.rules_status()["sources"], serde_json::json!(["rules.yaml"]));
    assert_eq!(server.rules_status()["refused"], 0);
}

#[test]
fn swapped_runtime_root_link_is_reloaded() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("current");
    let deploy = |version: u32| {
        let directory = place.path().join(format!("v{version}"));
        fs::create_dir_all(directory.join("ratelimit/config")).unwrap();
        fs::write(directory.join("ratelimit/config/shop.yaml"), rules(version)).unwrap();
        let link = place.path().join("next");
        symlink(directory, &link).unwrap();
        fs::rename(link, &root).unwrap();
    };
    deploy(1);
    let setup = tollkeeper::without_rules().env("RUNTIME_ROOT", &root).env("RUNTIME_SUBDIRECTORY", "ratelimit");
    let server = without_polling(setup).start();
    assert_eq!(limit(&server), Some(1));
    for version in 2..5 {
        deploy(version);
        wait_for_limit(&server, version.into());
    }
    assert_eq!(server.rules_status()["sources"], serde_json::json!(["config.shop.yaml"]));
}

#[test]
fn sighup_reloads_the_rules() {
    let mut server = without_polling(tollkeeper::with_rules(&rules(1))).start();
    for version in 2..4 {
        server.signal("HUP");
        wait_for("the rules to be read again", || (server.rules_status()["version"] == version).then_some(()));
    }
    assert!(server.try_wait().is_none());
    assert_eq!(limit(&server), Some(1));
}

#[test]
fn polling_finds_a_change_without_event() {
    // A write through another hard link causes no event in the watched directory.
    let (place, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (file, other_name) = (place.path().join("rules.yaml"), elsewhere.path().join("rules"));
    fs::write(&file, rules(1)).unwrap();
    fs::hard_link(&file, &other_name).unwrap();
    let setup = tollkeeper::without_rules().arg("--config").arg(&file);
    let server = setup.env("TOLLKEEPER_POLL_INTERVAL", "100ms").env("TOLLKEEPER_RELOAD_DEBOUNCE", "10ms").start();
    fs::write(&other_name, rules(2)).unwrap();
    wait_for_limit(&server, 2);
}

#[test]
fn invalid_rules_are_rejected_as_a_whole() {
    let files = tempfile::tempdir().unwrap();
    let (good, other) = (files.path().join("good.yaml"), files.path().join("other.yaml"));
    fs::write(&good, rules(1)).unwrap();
    fs::write(&other, rules(1).replace("shop", "other")).unwrap();
    let server = without_polling(tollkeeper::without_rules().arg("--config").arg(files.path())).start();
    let before = server.rules_status();

    // The good half of the change must not take effect either.
    fs::write(&good, rules(2)).unwrap();
    fs::write(&other, "domain: other\ndescriptors:\n- key: user\n  rate_limt: {}\n").unwrap();
    let after =
        wait_for("the reason", || Some(server.rules_status()).filter(|status| status["last_error"].is_string()));
    let reason = after["last_error"].as_str().unwrap();
    assert!(reason.contains("other.yaml:4:3: ") && reason.contains("rate_limt"), "{reason}");
    // The watcher may have seen the two writes as two changes.
    let version = after["version"].as_u64().unwrap();
    assert!(version == 1 || (version == 2 && limit(&server) == Some(2)), "{after}");
    if version == 1 {
        assert_eq!(after["loaded_at"], before["loaded_at"]);
        assert_eq!(limit(&server), Some(1));
    }
    assert_eq!(server.healthcheck(), 200);
    let log = server.stderr();
    let line =
        log.lines().find(|line| line.contains("Error loading new configuration: ")).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains("level=error") && line.contains("other.yaml:4:3"), "{line}");

    fs::write(&other, rules(3).replace("shop", "other")).unwrap();
    let mended =
        wait_for("the mended set", || Some(server.rules_status()).filter(|status| status["last_error"].is_null()));
    assert_eq!(mended["version"], version + 1);
    assert_eq!(limit(&server), Some(2));
}

#[test]
fn last_good_rules_serve_after_files_vanish() {
    type Layout = (&'static str, fn(&Path) -> Setup, &'static str);
    let layouts: [Layout; 3] = [
        ("--config", |root| tollkeeper::without_rules().arg("--config").arg(root.join("app/config")), "app/config"),
        ("the directory", |root| in_config_below(&root.join("app")), "app/config"),
        (
            "the root",
            |root| tollkeeper::without_rules().env("RUNTIME_ROOT", root.join("app")).env("RUNTIME_SUBDIRECTORY", "sub"),
            "app/sub/config",
        ),
    ];
    for (name, setup, directory) in layouts {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join(directory);
        let fill = |limit| {
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("rules.yaml"), rules(limit)).unwrap();
        };
        fill(1);
        let server = without_polling(setup(place.path())).start();
        fs::remove_file(directory.join("rules.yaml")).unwrap();
        let reason = wait_for_rejected_set(&server, 1);
        assert!(reason.contains("config") || reason.contains("sub"), "{name}: {reason}");
        assert_eq!(limit(&server), Some(1), "{name}: the file was deleted");
        fill(2);
        wait_for_limit(&server, 2);
        let rejected = server.rules_status()["refused"].as_u64().unwrap();
        fs::remove_dir_all(place.path().join("app")).unwrap();
        wait_for("the set to be rejected", || {
            (server.rules_status()["refused"].as_u64() > Some(rejected)).then_some(())
        });
        assert_eq!(limit(&server), Some(2), "{name}: the directory was deleted");
        assert_eq!(server.rules_status()["version"], 2);
        fill(3);
        wait_for_limit(&server, 3);
    }
}

#[test]
fn server_started_without_rules_serves_once_they_appear() {
    for (setting, healthy) in [("false", true), ("true", false)] {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("later/rules.yaml");
        let setup = tollkeeper::without_rules().arg("--config").arg(&file);
        let setup = without_polling(setup).env("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", setting);
        let server = setup.env("FORCE_START_WITHOUT_INITIAL_CONFIG", setting).start_unhealthy();
        let client = Client::connect(server.grpc_port());
        let request = grpc::rate_limit_request("shop", &[("user", "ann")]);
        let error = client.call(&request).unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::Unavailable, "no rate limit configuration loaded"));
        assert_eq!(server.healthcheck() == 200, healthy);
        assert_eq!(client.is_serving("ratelimit").unwrap(), healthy);
        assert_eq!(
            (server.rules_status()["version"].as_u64(), server.rules_status()["refused"].as_u64()),
            (Some(0), Some(1))
        );

        fs::create_dir(place.path().join("later")).unwrap();
        fs::write(&file, rules(1)).unwrap();
        wait_for("the rules", || client.call(&request).ok());
        wait_for("gRPC health", || client.is_serving("ratelimit").unwrap().then_some(()));
        assert_eq!(server.healthcheck(), 200);
        assert_eq!(server.rules_status()["version"], 1);
    }
}

#[test]
fn empty_runtime_directory_limits_nothing_until_rules_appear() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("config")).unwrap();
    let setup = in_config_below(root.path()).env("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "true");
    let server = without_polling(setup).start_unhealthy();
    let response = server.post_json(PEEK);
    assert_eq!(
        (response.status, response.text().as_str()),
        (200, r#"{"overallCode":"OK","statuses":[{"code":"OK"}]}"#)
    );
    assert_eq!(server.healthcheck(), 500);
    assert!(server.stderr().contains("has no rule files"), "{}", server.stderr());
    fs::write(root.path().join("config/rules"), rules(1)).unwrap();
    wait_for_limit(&server, 1);
    assert_eq!(server.healthcheck(), 200);
}

/// Remaining hits after one more hit.
fn remaining_after_hit(server: &Tollkeeper) -> u64 {
    let response = server.post_json(&PEEK.replace(r#""0""#, r#""1""#));
    let body: Value = serde_json::from_slice(&response.body).unwrap();
    body["statuses"][0]["limitRemaining"].as_u64().unwrap_or(0)
}

#[test]
fn counter_survives_a_change_that_keeps_its_key() {
    let bucket =
        |rate_limit: &str| format!("domain: shop\ndescriptors:\n- key: user\n  rate_limit: {{{rate_limit}}}\n");
    let server = without_polling(tollkeeper::with_rules(&bucket("unit: day, requests_per_unit: 10"))).start();
    assert_eq!((remaining_after_hit(&server), remaining_after_hit(&server)), (9, 8));
    let changes = [
        ("unit: day, requests_per_unit: 20, name: another", 17),
        ("unit: day, requests_per_unit: 5", 1),
        ("unit: year, requests_per_unit: 5", 4),
        ("unit: year, requests_per_unit: 5, algorithm: token_bucket", 4),
        ("unit: year, requests_per_unit: 6, algorithm: token_bucket", 4),
    ];
    for (round, (rate_limit, expected)) in (2..).zip(changes) {
        fs::write(server.rules_path(), bucket(rate_limit)).unwrap();
        wait_for("the change", || (server.rules_status()["version"] == round).then_some(()));
        assert_eq!(remaining_after_hit(&server), expected, "{rate_limit}");
    }
    // Raising the epoch empties the counters.
    let text = bucket("unit: year, requests_per_unit: 6, algorithm: token_bucket, epoch: 1");
    fs::write(server.rules_path(), text).unwrap();
    wait_for("the epoch", || (server.rules_status()["version"] == 7).then_some(()));
    assert_eq!(remaining_after_hit(&server), 5);
}

/// A ConfigMap of two files that make one domain; both limits change together.
fn halves(limit: u32) -> [(&'static str, String); 2] {
    [("a.yaml", rules(limit)), ("b.yaml", rules(limit).replace("user", "path"))]
}

#[test]
fn no_response_mixes_two_rule_sets() {
    const SWAPS: u32 = 200;
    let root = TempDir::new().unwrap();
    let map = ConfigMap::mount(root.path().join("config"), &halves(1_000_001));
    let setup = in_config_below(root.path()).env("MERGE_DOMAIN_CONFIG", "true");
    let server = setup.env("TOLLKEEPER_POLL_INTERVAL", "0").env("TOLLKEEPER_RELOAD_DEBOUNCE", "1ms").start();
    let mut request = grpc::rate_limit_request("shop", &[("user", "ann")]);
    request.descriptors.push(grpc::descriptor(&[("path", "/")]));

    let done = AtomicBool::new(false);
    let responses = thread::scope(|scope| {
        let hammer = || {
            let client = Client::connect(server.grpc_port());
            let mut seen = [0_u32; 2];
            while !done.load(Ordering::Relaxed) {
                seen[set_of(&client.call(&request).unwrap())] += 1;
            }
            seen
        };
        let hammers: Vec<_> = (0..3).map(|_| scope.spawn(hammer)).collect();
        for version in 2..=SWAPS {
            map.swap(version, &halves(1_000_001 + (version + 1) % 2));
            wait_for("the swap", || (server.rules_status()["version"] == version).then_some(()));
        }
        done.store(true, Ordering::Relaxed);
        hammers.into_iter().map(|hammer| hammer.join().unwrap()).collect::<Vec<_>>()
    });
    for seen in responses {
        assert!(seen.iter().all(|count| *count > 0), "a thread saw only one of the sets: {seen:?}");
    }
    assert_eq!(server.rules_status()["refused"], 0);
}

/// Index of the rule set that decided; panics if both did.
fn set_of(response: &RateLimitResponse) -> usize {
    let limits = response.statuses.iter().map(|status| status.current_limit.as_ref().unwrap().requests_per_unit);
    match limits.collect::<Vec<_>>()[..] {
        [1_000_001, 1_000_001] => 0,
        [1_000_002, 1_000_002] => 1,
        ref mixed => panic!("one answer from two sets: {mixed:?}"),
    }
}

/// Expressions that are more work to compile than a file may take.
fn costly_rules(limit: u32) -> String {
    let rule = |at| {
        format!("- {{key: k, match: {{regex: '{at}(?u:\\w+)'}}, rate_limit: {{unit: day, requests_per_unit: 1}}}}\n")
    };
    rules(limit).replace("shop", "costly") + &(0..40).map(rule).collect::<String>()
}

#[test]
fn file_whose_expressions_take_too_much_work_is_refused_alone() {
    let files = tempfile::tempdir().unwrap();
    let (usual, costly) = (files.path().join("b.yaml"), files.path().join("a.yaml"));
    fs::write(&usual, rules(1)).unwrap();
    fs::write(&costly, rules(7).replace("shop", "costly")).unwrap();
    let setup = tollkeeper::without_rules().arg("--config").arg(files.path());
    let server = without_polling(setup).start();
    let of_costly = |server: &Tollkeeper| {
        let body: Value = serde_json::from_slice(&server.post_json(&PEEK.replace("shop", "costly")).body).unwrap();
        body["statuses"][0]["currentLimit"]["requestsPerUnit"].as_u64()
    };
    fs::write(&costly, costly_rules(8)).unwrap();
    let error = wait_for_rejected_set(&server, 1);
    assert!(error.contains("a.yaml:") && error.contains("take too much work to compile"), "{error}");
    // The file keeps its last rules, and others are still loaded.
    fs::write(&usual, rules(2)).unwrap();
    wait_for_limit(&server, 2);
    assert_eq!(of_costly(&server), Some(7));
    fs::write(&costly, rules(9).replace("shop", "costly")).unwrap();
    wait_for("the mended file", || (of_costly(&server) == Some(9)).then_some(()));
    assert_eq!(server.rules_status()["last_error"], Value::Null);

    // A start has the rules of the other files.
    fs::write(&costly, costly_rules(8)).unwrap();
    let setup = tollkeeper::without_rules().arg("--config").arg(files.path());
    let started = without_polling(setup).start();
    assert_eq!((limit(&started), of_costly(&started)), (Some(2), None));
}

#[test]
fn load_says_which_limits_it_changed() {
    let server = without_polling(tollkeeper::with_rules(&rules(300))).start();
    let first = server.rules_status();
    assert!(first["changes"].is_null() && first["id"].as_str().is_some_and(|id| id.len() >= 16), "{first}");
    fs::write(server.rules_path(), rules(5) + "- {key: path, rate_limit: {unit: day, requests_per_unit: 1}}\n")
        .unwrap();
    wait_for_limit(&server, 5);
    let second = wait_for("the status", || Some(server.rules_status()).filter(|status| status["version"] == 2));
    assert_ne!(second["id"], first["id"]);
    let limits = ["shop.user 300 -> 5 a day", "shop.path added: 1 a day, algorithm fixed_window"];
    assert_eq!(second["changes"], serde_json::json!({"changed": 1, "added": 1, "removed": 0, "limits": limits}));
    let line = format!("{}; {}; 1 changed, 1 added, 0 removed", limits[0], limits[1]);
    wait_for("the line of the log", || server.stderr().contains(&line).then_some(()));
}
