//! Reports of proxies where other decisions show: explanations, logs, what is made of logs, counters in shadow mode.

use std::process::Command;

use serde_json::Value;

use super::proxy::{Assigned, Proxy};
use super::{ANN, RULES, start};
use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::redis;
use kit::tollkeeper::{inherited_env, program_path, with_rules};
use kit::wait_for;

#[test]
fn explanation_says_who_holds_what() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    proxy.report(&[(&ANN, 1, 0)]);
    let Assigned::Tokens { max, .. } = proxy.next(&ANN) else { panic!("{proxy:?}") };
    let explain = |more: &[&str]| {
        let mut command = Command::new(program_path());
        let addr = format!("127.0.0.1:{}", server.debug_port());
        command.args(["explain", "--addr", &addr, "--domain", "quota", "--descriptor", "api=v1,user=ann"]).args(more);
        String::from_utf8(command.env_clear().envs(inherited_env()).output().unwrap().stdout).unwrap()
    };
    let page = explain(&[]);
    assert!(page.contains("divided among proxies over RLQS") && page.contains(&format!("{max} tokens")), "{page}");
    let explained: Value = serde_json::from_str(&explain(&["--json"])).unwrap();
    let quota = &explained["descriptors"][0]["quota"];
    assert_eq!(quota["proxies"][0]["reserved"], max, "{quota}");
    assert!(quota["proxies"][0]["ends_s"].as_u64().unwrap() > 0, "{quota}");
    assert!(quota["limits"][0]["held"].as_u64().unwrap() >= u64::from(max), "{quota}");
    let rules = http::get(server.debug_port(), "/rules").send().text();
    let rules: Value = serde_json::from_str(&rules).unwrap();
    let of_rule = |rule: &&Value| rule["rule_path"] == "quota.api_v1.user";
    let divided = &rules["rules"].as_array().unwrap().iter().find(of_rule).unwrap()["quota"];
    assert!(divided["keys"] == 1 && divided["proxies"] == 1 && divided["ends_s"].as_u64() > Some(0), "{divided}");
}

#[test]
fn proxies_with_most_hits_come_first() {
    let server = start(RULES);
    let mut proxies = [(); 3].map(|()| Proxy::connect(server.grpc_port(), "quota"));
    for proxy in &mut proxies {
        proxy.report(&[(&ANN, 0, 1)]);
        proxy.next(&ANN);
    }
    let page: Value = http::get(server.debug_port(), "/quota").send().text().parse().unwrap();
    let shown = page["keys"][0]["proxies"].as_array().unwrap();
    let reserved: Vec<u64> = shown.iter().map(|proxy| proxy["reserved"].as_u64().unwrap()).collect();
    assert!(reserved.is_sorted_by(|one, other| one >= other) && reserved[0] > reserved[2], "{page}");
    assert_eq!(page["keys"][0]["proxy_count"], 3);
}

#[test]
fn page_names_the_key_unless_its_rule_keeps_values_private() {
    let rules = "
domain: quota
descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 40}}
  - {key: private, decision_log: none, rate_limit: {unit: day, requests_per_unit: 40}}
";
    let server = start(rules);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    let (user, private) = ([("user", "ann")], [("private", "secret")]);
    proxy.report(&[(&user, 1, 0), (&private, 1, 0)]);
    proxy.next(&user);
    proxy.next(&private);
    let page = http::get(server.debug_port(), "/quota").send().text();
    assert!(!page.contains("secret"), "{page}");
    let page: Value = page.parse().unwrap();
    let keys = page["keys"].as_array().unwrap();
    let of_rule = |rule: &str| keys.iter().find(|key| key["rule"] == rule).unwrap_or_else(|| panic!("{page}"));
    let (shown, hidden) = (of_rule("quota.user"), of_rule("quota.private"));
    assert_eq!((&shown["domain"], &shown["proxy_count"]), (&"quota".into(), &1.into()));
    assert_eq!(shown["entries"], serde_json::json!([{"key": "user", "value": "ann"}]));
    assert_eq!((&hidden["key"], &hidden["entries"]), (&"private".into(), &Value::Null));
}

#[test]
fn fleet_shows_what_each_replica_holds_for_proxies() {
    let redis = redis::options().start();
    let replica = |is_on: &str| {
        with_rules(RULES)
            .env("TOLLKEEPER_RLQS", is_on)
            .env("TOLLKEEPER_FLEET", "true")
            .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
            .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
            .env("REDIS_URL", redis.address())
            .env("REDIS_SOCKET_TYPE", "tcp")
            .start()
    };
    let (with_streams, without) = (replica("true"), replica("false"));
    let mut proxy = Proxy::connect(with_streams.grpc_port(), "quota");
    proxy.report(&[(&ANN, 1, 0), (&[("free", "x")], 1, 0)]);
    let Assigned::Tokens { max, .. } = proxy.next(&ANN) else { panic!("{proxy:?}") };
    let fleet = |query: &str| http::get(without.debug_port(), &format!("/fleet{query}")).send().text();
    let report = wait_for("the other replica to publish its stream", || {
        let report: Value = fleet("").parse().unwrap();
        let other = report["replicas"].as_array().unwrap().iter().find(|replica| replica["this"] == false)?;
        (other["quota"]["assigned_hits"].as_u64()? >= max.into()).then(|| report.clone())
    });
    let quota = &report["replicas"][1]["quota"];
    assert_eq!((&quota["streams"], &quota["buckets"], &quota["failed_keys"]), (&1.into(), &2.into(), &0.into()));
    let number = |field: &str| quota[field].as_u64().unwrap();
    let (held, assigned) = (number("held_hits"), number("assigned_hits"));
    assert!(held >= assigned && assigned >= max.into() && held <= 40, "{quota}");
    assert!(number("held_for_s") > 0, "{quota}");
    assert_eq!(report["replicas"][0]["quota"], Value::Null, "its service is off");
    let text = fleet("?format=text");
    let row = text.lines().skip_while(|line| !line.contains("HITS HELD")).nth(1).unwrap_or_else(|| panic!("{text}"));
    let cells: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(cells[..3], ["1", "2", "1"], "{text}");
}

#[test]
fn limits_in_shadow_mode_and_candidates_count_reports() {
    let rules = "
domain: quota
descriptors:
  - key: watched
    rate_limit: {unit: day, requests_per_unit: 10}
    shadow_mode: true
  - key: tried
    rate_limit:
      - {unit: day, requests_per_unit: 1000}
      - {name: tight, shadow_mode: true, unit: day, requests_per_unit: 4}
";
    let server = start(rules);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    let (watched, tried) = ([("watched", "x")], [("tried", "x")]);
    proxy.report(&[(&watched, 7, 0), (&tried, 7, 0)]);
    assert_eq!(proxy.next(&watched), Assigned::Allow);
    let mut peek = rate_limit_request("quota", &watched);
    peek.descriptors[0].hits_addend = Some(0);
    wait_for("the limit in shadow mode to count", || {
        let response = Client::connect(server.grpc_port()).call(&peek).unwrap();
        (response.statuses[0].limit_remaining == 3).then_some(())
    });
    wait_for("the candidate to count", || {
        let page: Value = http::get(server.debug_port(), "/rules").send().text().parse().unwrap();
        let rules = page["rules"].as_array().unwrap().iter();
        let tight = rules.filter(|limit| limit["rule"] == "quota.tried.tight").collect::<Vec<_>>();
        (tight.len() == 1 && tight[0]["rejected"] == 1).then_some(())
    });
}

#[test]
fn log_of_reports_is_read_by_all_tools() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log.jsonl");
    std::fs::write(directory.path().join("rules.yaml"), RULES).unwrap();
    let mut server = with_rules(RULES)
        .env("TOLLKEEPER_RLQS", "true")
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TOLLKEEPER_DECISION_LOG", format!("file:{}", log.display()))
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
        .start();
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    proxy.report(&[(&ANN, 1, 0)]);
    proxy.next(&ANN);
    proxy.report(&[(&ANN, 20, 9)]);
    let top = || http::get(server.debug_port(), "/top?format=text").send().text();
    wait_for("the hits to be among the most rejected", || top().contains("user=ann").then_some(()));
    server.signal("TERM");
    assert!(server.wait().success());
    let run = |arguments: &[&str]| {
        let mut command = Command::new(program_path());
        command.args(arguments).current_dir(directory.path()).env_clear().envs(inherited_env());
        let output = command.output().unwrap();
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    };
    let why = run(&["why", "--domain", "quota", "--descriptor", "api=v1,user=ann", "--all", "--log", "log.jsonl"]);
    assert!(why.contains("a proxy, by its assignment over RLQS"), "{why}");
    let simulated = run(&["simulate", "--traffic", "log.jsonl", "--rules", "rules.yaml", "--json"]);
    let simulated: Value = serde_json::from_str(&simulated).unwrap_or_else(|error| panic!("{error}: {simulated}"));
    assert!(simulated.to_string().contains("quota.api_v1.user"), "{simulated}");
    let recommended = run(&["recommend", "--traffic", "log.jsonl", "--rule", "quota.api_v1.user"]);
    assert!(recommended.contains("quota.api_v1.user"), "{recommended}");
}
