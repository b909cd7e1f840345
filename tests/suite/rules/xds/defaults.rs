//! Defaults for rules over xDS: a control plane that says only unit and number, and a file that says the rest.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tempfile::TempDir;
use tollkeeper::base::clock::Time;
use tollkeeper::base::pb::xds::{RateLimitConfig, RateLimitUnit};
use tollkeeper::decide::log::header;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::rule_defaults::RuleDefaults;
use tollkeeper::rules::source::SourceRules;
use tollkeeper::rules::xds::resource::parse_resources;

use super::{client_of, limit, waiting_client_of};
use kit::http;
use kit::scrape::{scrape, with_prometheus};
use kit::test_service::{TestRequest, TestService};
use kit::tollkeeper::{Setup, Tollkeeper};
use kit::wait_for;
use kit::xds_server::{XdsServer, daily, limited, resource};

/// A file of defaults that a test edits.
struct DefaultsFile {
    directory: TempDir,
}

impl DefaultsFile {
    fn new(text: &str) -> Self {
        let file = Self { directory: tempfile::tempdir().unwrap() };
        file.write(text);
        file
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("defaults.yaml")
    }

    /// Replaces it, as editors do.
    fn write(&self, text: &str) {
        let next = self.directory.path().join("next");
        fs::write(&next, text).unwrap();
        fs::rename(next, self.path()).unwrap();
    }
}

/// A tollkeeper with this file of defaults, which notices changes by events only.
fn with_defaults(setup: Setup, path: &Path) -> Setup {
    let setup = setup.env("TOLLKEEPER_RULE_DEFAULTS", path);
    setup.env("TOLLKEEPER_POLL_INTERVAL", "0").env("TOLLKEEPER_RELOAD_DEBOUNCE", "10ms")
}

/// Limit and guarantee of `shop.user`, in words.
fn explained(tollkeeper: &Tollkeeper) -> (String, String) {
    let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    let page = tollkeeper.explain(body);
    let limit = &page["descriptors"][0]["limits"][0];
    let text = |field: &str| limit[field].as_str().unwrap_or_else(|| panic!("{page}")).to_owned();
    (text("limit"), text("guarantee"))
}

fn wait_for_algorithm(tollkeeper: &Tollkeeper, algorithm: &str) {
    wait_for(&format!("a limit by {algorithm}"), || explained(tollkeeper).0.contains(algorithm).then_some(()));
}

/// `rule_defaults` of `/rlconfig/status`.
fn defaults_status(tollkeeper: &Tollkeeper) -> Value {
    tollkeeper.rules_status()["rule_defaults"].clone()
}

fn shop(requests: u32) -> RateLimitConfig {
    daily("shop", &[("user", requests)])
}

#[test]
fn limit_of_a_control_plane_slides_if_the_defaults_say_so() {
    let text = "defaults: {shop: {algorithm: sliding_window_counter}}";
    let (defaults, _) = RuleDefaults::parse_file(&Arc::from("defaults.yaml"), text.as_bytes()).unwrap();
    let mut config = daily("shop", &[]);
    config.descriptors.push(limited("user", RateLimitUnit::Minute, 10));
    // At the end of a minute, and at the beginning of the next one.
    let admitted = |defaults: RuleDefaults| {
        let minute_us = 60_000_000;
        let service = TestService::new([("LOG_LEVEL", "error")], Time::from_micros(1_000 * minute_us - 1_000_000));
        let options = CompileOptions { rule_defaults: Arc::new(defaults), ..CompileOptions::default() };
        let rules = SourceRules::Resources(parse_resources(vec![resource(&config)]).unwrap());
        let recorded = header::build_rule_set_record(&rules, None, &options.rule_defaults);
        service.replace(rules.compile(&options).unwrap(), recorded);
        let request = || TestRequest::new("shop").descriptor(&[("user", "ann")]);
        let count = || (0..20).filter(|_| !service.decide(&request()).unwrap().over_limit()).count();
        let before = count();
        service.advance_us(2_000_000);
        (before, count())
    };
    assert_eq!(admitted(RuleDefaults::default()), (10, 10), "fixed windows admit twice the limit within two seconds");
    // A second of the window has gone, and a sixtieth of its hits.
    assert_eq!(admitted(defaults), (10, 1));
}

#[test]
fn changed_defaults_apply_to_accepted_rules_without_the_control_plane() {
    let file = DefaultsFile::new("defaults: {shop: {algorithm: sliding_window_counter, consistency: eventual}}");
    let server = XdsServer::start();
    let tollkeeper = with_defaults(client_of(&server), &file.path()).start();
    server.send(0, "7", "a", vec![resource(&shop(1000))]);
    server.request(0, 1);
    let (limit_text, guarantee) = explained(&tollkeeper);
    assert_eq!(limit_text, "1000 per day by sliding_window_counter");
    assert!(guarantee.starts_with("eventual"), "{guarantee}");

    file.write("defaults: {\"*\": {by_unit: {day: {algorithm: token_bucket}}}, gone: {epoch: 1}}");
    wait_for_algorithm(&tollkeeper, "token_bucket");
    assert!(explained(&tollkeeper).1.starts_with("strict"));
    let status = tollkeeper.rules_status();
    assert_eq!((&status["version"], &status["source_version"]), (&2.into(), &"7".into()), "{status}");
    assert_eq!(status["rule_defaults"]["domains_without_rules"], serde_json::json!(["gone"]));
    // The control plane sent nothing, was asked for nothing and got no second answer.
    assert_eq!((server.streams(), server.requests(0, 2).len()), (1, 2));
    let page = http::get(tollkeeper.debug_port(), "/rlconfig").send();
    assert_eq!(
        page.text(),
        "shop.user: unit=DAY requests_per_unit=1000, shadow_mode: false, quota_mode: false, algorithm: token_bucket\n"
    );

    // Further rules get the new defaults.
    server.send(0, "8", "b", vec![resource(&shop(2000))]);
    server.request(0, 2);
    assert_eq!(explained(&tollkeeper).0, "2000 per day by token_bucket, bucket_size 2000");
}

#[test]
fn counters_stay_when_defaults_change_that_are_not_part_of_their_key() {
    let file = DefaultsFile::new("defaults: {}");
    let server = XdsServer::start();
    let tollkeeper = with_defaults(client_of(&server), &file.path()).start();
    server.send(0, "1", "a", vec![resource(&shop(2))]);
    server.request(0, 1);
    let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    assert_eq!([200, 200].map(|_| tollkeeper.post_json(body).status), [200, 200]);
    file.write("defaults: {shop: {on_store_error: deny}}");
    wait_for("the change", || (tollkeeper.rules_status()["version"] == 2).then_some(()));
    assert_eq!(tollkeeper.post_json(body).status, 429);
    file.write("defaults: {shop: {epoch: 1}}");
    wait_for("the change", || (tollkeeper.rules_status()["version"] == 3).then_some(()));
    assert_eq!(tollkeeper.post_json(body).status, 200);
}

#[test]
fn unusable_file_keeps_the_last_defaults_and_refuses_no_rules() {
    let file = DefaultsFile::new("defaults: {shop: {algorithm: token_bucket}}");
    let server = XdsServer::start();
    let (setup, prometheus) = with_prometheus(with_defaults(client_of(&server), &file.path()));
    let tollkeeper = setup.start();
    server.send(0, "1", "a", vec![resource(&shop(5))]);
    server.request(0, 1);
    let metric = |name: &str| scrape(prometheus.number()).count(&format!("tollkeeper_rule_defaults_{name}"));
    assert_eq!((metric("valid"), metric("refused_total")), (1, 0));

    for (count, broken) in ["defaults: {shop: {algorithm: tokens}}", "", "defaults: [", "\0"].iter().enumerate() {
        file.write(broken);
        let refused = count as u64 + 1;
        wait_for("the refusal", || (defaults_status(&tollkeeper)["refused"] == refused).then_some(()));
        assert_eq!((metric("valid"), metric("refused_total")), (0, refused));
        let status = tollkeeper.rules_status();
        assert!(status["rule_defaults"]["last_error"].as_str().unwrap().contains("defaults.yaml:1:"), "{status}");
        assert_eq!((&status["refused"], &status["last_error"]), (&0.into(), &Value::Null), "{status}");
        assert!(explained(&tollkeeper).0.contains("token_bucket"));
    }
    let log = tollkeeper.stderr();
    let refusals = log.matches("TOLLKEEPER_RULE_DEFAULTS cannot be used, the last usable defaults stay").count();
    assert_eq!(refusals, 4, "{log}");

    // Rules are accepted meanwhile.
    server.send(0, "2", "b", vec![resource(&shop(6))]);
    let answer = server.request(0, 2);
    assert_eq!((answer.version_info.as_str(), answer.error_detail), ("2", None));
    assert_eq!(explained(&tollkeeper).0, "6 per day by token_bucket, bucket_size 6");
    fs::remove_file(file.path()).unwrap();
    wait_for("the refusal", || (defaults_status(&tollkeeper)["refused"] == 5).then_some(()));

    file.write("defaults: {shop: {algorithm: sliding_window_counter}}");
    wait_for_algorithm(&tollkeeper, "sliding_window_counter");
    wait_for("the status", || defaults_status(&tollkeeper)["last_error"].is_null().then_some(()));
    assert_eq!((metric("valid"), metric("refused_total")), (1, 5));
}

#[test]
fn start_without_a_usable_file_limits_by_the_built_in_defaults() {
    let directory = tempfile::tempdir().unwrap();
    let server = XdsServer::start();
    // A directory cannot be used, either.
    let paths = [directory.path().join("missing.yaml"), directory.path().to_owned()];
    for (index, path) in paths.iter().enumerate() {
        let tollkeeper = with_defaults(waiting_client_of(&server), path).launch();
        server.send(index, "1", "a", vec![resource(&shop(5))]);
        assert_eq!(server.request(index, 1).error_detail, None);
        wait_for("health", || (tollkeeper.healthcheck() == 200).then_some(()));
        assert!(explained(&tollkeeper).0.contains("fixed_window"));
        let status = defaults_status(&tollkeeper);
        assert_eq!((&status["loaded_at"], &status["refused"]), (&Value::Null, &1.into()), "{status}");
        assert!(tollkeeper.stderr().contains("TOLLKEEPER_RULE_DEFAULTS cannot be used, the built-in defaults apply"));
    }
}

#[test]
fn file_of_a_config_map_is_followed_through_its_links() {
    let directory = tempfile::tempdir().unwrap();
    let mount = directory.path();
    let version = |name: &str, algorithm: &str| {
        fs::create_dir(mount.join(name)).unwrap();
        fs::write(mount.join(name).join("defaults.yaml"), format!("defaults: {{\"*\": {{algorithm: {algorithm}}}}}"))
            .unwrap();
    };
    version("..2026_01", "token_bucket");
    symlink("..2026_01", mount.join("..data")).unwrap();
    symlink("..data/defaults.yaml", mount.join("defaults.yaml")).unwrap();
    let server = XdsServer::start();
    let tollkeeper = with_defaults(client_of(&server), &mount.join("defaults.yaml")).start();
    server.send(0, "1", "a", vec![resource(&shop(5))]);
    server.request(0, 1);
    assert!(explained(&tollkeeper).0.contains("token_bucket"));
    version("..2026_02", "sliding_window_log");
    symlink("..2026_02", mount.join("..data_tmp")).unwrap();
    fs::rename(mount.join("..data_tmp"), mount.join("..data")).unwrap();
    fs::remove_dir_all(mount.join("..2026_01")).unwrap();
    wait_for_algorithm(&tollkeeper, "sliding_window_log");
}

#[test]
fn default_that_a_limit_cannot_have_is_a_finding() {
    let file = DefaultsFile::new("defaults: {shop: {algorithm: sliding_window_log, on_store_error: deny}}");
    let server = XdsServer::start();
    let (setup, prometheus) = with_prometheus(with_defaults(client_of(&server), &file.path()));
    let tollkeeper = setup.start();
    server.send(0, "1", "a", vec![resource(&daily("shop", &[("user", 5), ("large", 10_001)]))]);
    assert_eq!(server.request(0, 1).error_detail, None);
    assert!(explained(&tollkeeper).0.contains("sliding_window_log"));
    assert_eq!(limit(&tollkeeper, "shop", "large"), Some(10_001));
    let expected = "defaults.yaml:1:19 is left out: sliding_window_log keeps an entry for each hit";
    let status = defaults_status(&tollkeeper);
    let finding = status["findings"][0].as_str().unwrap();
    assert!(status["left_out"] == 1 && finding.starts_with("shop.large: ") && finding.contains(expected), "{status}");
    let page = http::get(tollkeeper.debug_port(), "/rules?finding=default_left_out").send();
    let page: Value = serde_json::from_slice(&page.body).unwrap();
    assert_eq!((&page["limits"], &page["rules"][0]["rule"]), (&1.into(), &"shop.large".into()), "{page}");
    assert!(page["rules"][0]["findings"].to_string().contains(expected), "{page}");
    assert_eq!(scrape(prometheus.number()).count("tollkeeper_rule_defaults_left_out"), 1);

    // The same finding is logged once, however often rules change.
    server.send(0, "2", "b", vec![resource(&daily("shop", &[("user", 6), ("large", 10_001)]))]);
    server.request(0, 2);
    assert_eq!(tollkeeper.stderr().matches(expected).count(), 1, "{}", tollkeeper.stderr());
}

#[test]
fn requests_are_rejected_without_a_store_if_the_defaults_say_so() {
    let file = DefaultsFile::new("defaults: {shop: {on_store_error: deny}}");
    let server = XdsServer::start();
    let setup = with_defaults(client_of(&server), &file.path());
    let setup = setup.env("BACKEND_TYPE", "redis").env("REDIS_URL", "127.0.0.1:1").env("REDIS_SOCKET_TYPE", "tcp");
    let tollkeeper = setup.start_unhealthy();
    server.send(0, "1", "a", vec![resource(&shop(5)), resource(&daily("free", &[("user", 5)]))]);
    server.request(0, 1);
    let ask = |domain: &str| {
        let body = format!(r#"{{"domain":"{domain}","descriptors":[{{"entries":[{{"key":"user","value":"a"}}]}}]}}"#);
        tollkeeper.post_json(&body).status
    };
    assert_eq!((ask("shop"), ask("free")), (429, 200));
}

#[test]
fn sighup_reads_the_file_again() {
    let file = DefaultsFile::new("defaults: {shop: {algorithm: token_bucket}}");
    let server = XdsServer::start();
    let tollkeeper = with_defaults(client_of(&server), &file.path()).start();
    server.send(0, "1", "a", vec![resource(&shop(5))]);
    server.request(0, 1);
    tollkeeper.signal("HUP");
    wait_for("the rules to be compiled again", || (tollkeeper.rules_status()["version"] == 2).then_some(()));
    assert!(!tollkeeper.stderr().contains("there is nothing to reload"), "{}", tollkeeper.stderr());
}

#[test]
fn cached_rules_get_the_defaults_at_the_start() {
    let file = DefaultsFile::new("defaults: {shop: {algorithm: token_bucket}}");
    let cache = file.directory.path().join("rules.cache");
    let mut server = XdsServer::start();
    let setup = || with_defaults(waiting_client_of(&server), &file.path()).env("TOLLKEEPER_XDS_CACHE", &cache);
    let (first, second) = (setup(), setup());
    let tollkeeper = first.launch();
    server.send(0, "1", "a", vec![resource(&shop(5))]);
    wait_for("the cache", || cache.exists().then_some(()));
    drop(tollkeeper);
    server.stop();
    let tollkeeper = second.start();
    assert!(explained(&tollkeeper).0.contains("token_bucket"));
    file.write("defaults: {shop: {algorithm: sliding_window_counter}}");
    wait_for_algorithm(&tollkeeper, "sliding_window_counter");
}
