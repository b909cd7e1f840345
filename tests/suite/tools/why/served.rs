//! Logs of a server: a file, and a stream in Redis.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::tempdir;

use kit::grpc::{Client, rate_limit_request};
use kit::redis::options;
use kit::tollkeeper::{inherited_env, program_path, with_rules};
use kit::wait_for;

const RULES: &str = "\
domain: shop
descriptors:
- key: login
  rate_limit:
    unit: day
    requests_per_unit: 3
    algorithm: sliding_window_log
";

/// Makes five requests of `login=ann` with a log at `sink`.
fn serve(sink: &str, url: &str) {
    let mut server = with_rules(RULES)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TOLLKEEPER_DECISION_LOG", sink)
        .env("TOLLKEEPER_DECISION_LOG_REDIS_URL", url)
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
        .start();
    let client = Client::connect(server.grpc_port());
    for _ in 0..5 {
        client.call(&rate_limit_request("shop", &[("login", "ann")])).unwrap();
    }
    server.signal("TERM");
    assert!(server.wait().success());
}

fn why(log: &str, url: &str, arguments: &[&str]) -> Value {
    let mut command = Command::new(program_path());
    command.args(["why", "--domain", "shop", "--descriptor", "login=ann", "--json", "--log", log]).args(arguments);
    command.env_clear().envs(inherited_env()).env("TOLLKEEPER_DECISION_LOG_REDIS_URL", url);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn check(results: &Value) {
    assert_eq!((&results["requests"], &results["rejected"]), (&json!(5), &json!(2)), "{results}");
    let cause = results["causes"][0]["cause"].as_str().unwrap();
    assert!(cause.starts_with("shop.login (") && cause.ends_with("3 per day sliding_window_log"), "{cause}");
    let remedies = results["decisions"][0]["rejected_by"][0]["remedies"].as_array().unwrap();
    let limit = json!({"change": "limit", "key": "requests_per_unit", "value": 4, "counted": 3});
    assert!(remedies.contains(&limit), "{remedies:?}");
}

/// True if the results tell the begin of the log.
fn has_begin(results: &Value) -> bool {
    results["notes"].as_array().unwrap().iter().any(|note| note.as_str().unwrap().contains("the logs begin"))
}

#[test]
fn log_of_a_server_tells_why() {
    let directory = tempdir().unwrap();
    let path = directory.path().join("decisions.jsonl");
    serve(&format!("file:{}", path.display()), "");
    let results = why(path.to_str().unwrap(), "", &[]);
    check(&results);
    assert_eq!(results["rule_changes"][0]["event"], "start");
    let at = results["first_rejected"].as_str().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 6, "a header and five decisions: {text}");
    let results = why(path.to_str().unwrap(), "", &["--at", at]);
    check(&results);
    assert!(has_begin(&results), "{results}");
}

#[test]
fn stream_of_a_server_tells_why() {
    let redis = options().start();
    let url = redis.address();
    serve("redis:decisions", &url);
    wait_for("the records", || (redis.query::<u64>(&["XLEN", "decisions"]) == 6).then_some(()));
    let results = why("redis:decisions", &url, &[]);
    check(&results);
    let at = results["first_rejected"].as_str().unwrap();
    let results = why("redis:decisions", &url, &["--at", at]);
    check(&results);
    assert!(!has_begin(&results), "only a part of the stream is read: {results}");
    let mut missing = Command::new(program_path());
    missing.args(["why", "--domain", "shop", "--descriptor", "a=b", "--log", "redis:missing"]);
    missing.env_clear().envs(inherited_env()).env("TOLLKEEPER_DECISION_LOG_REDIS_URL", &url);
    let output = missing.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("redis:missing: the stream has no entries"));
}
