//! `/problems`: the log, errors in rule files with their lines, and failures of the store.

use std::fs;

use serde_json::Value;

use super::server;
use kit::http;
use kit::tollkeeper::Tollkeeper;
use kit::wait_for;

fn problems(server: &Tollkeeper) -> Value {
    serde_json::from_slice(&http::get(server.debug_port(), "/problems").send().body).unwrap()
}

#[test]
fn failed_reload_is_told_with_the_lines_of_the_file() {
    let server = server().start();
    assert_eq!(problems(&server)["diagnostics"], Value::Array(Vec::new()));
    let long = "x".repeat(100_000);
    fs::write(server.rules_path(), format!("domain: shop\n# {long}\ndescriptors:\n- {{key: login, nonsense: <b>}}\n"))
        .unwrap();
    let found =
        wait_for("the failed reload", || Some(problems(&server)).filter(|found| found["diagnostics"][0].is_object()));
    let diagnostic = &found["diagnostics"][0];
    assert_eq!(diagnostic["line"], 4, "{found:#}");
    let lines = diagnostic["lines"].as_array().unwrap();
    assert_eq!(lines.iter().map(|line| line["number"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 3, 4, 5]);
    assert_eq!(lines[2]["text"], "- {key: login, nonsense: <b>}");
    assert_eq!(lines[0]["text"].as_str().unwrap().len(), 200, "a long line is cut");
    assert!(diagnostic["message"].as_str().unwrap().contains("nonsense"), "{found:#}");
    let log = found["log"].as_array().unwrap();
    let line = log.iter().find(|line| line["level"] == "error").unwrap_or_else(|| panic!("{found:#}"));
    assert!(line["message"].as_str().unwrap().contains("Error loading new configuration"), "{line}");

    fs::write(server.rules_path(), super::RULES).unwrap();
    wait_for("the mended rules", || (problems(&server)["diagnostics"] == Value::Array(Vec::new())).then_some(()));
}

#[test]
fn audit_lines_and_secrets_are_not_among_the_problems() {
    let token = "correct horse battery staple";
    let server = server()
        .env("TOLLKEEPER_ADMIN_TOKEN", token)
        .env("REDIS_URL", "redis://user:sesame@127.0.0.1:1")
        .env("TOLLKEEPER_STORE_TIMEOUT", "1s")
        .start_unhealthy();
    for sent in [token, "wrong"] {
        let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"login","value":"ann"}]}]}"#;
        let request = http::post(server.debug_port(), "/reset", body);
        request.header("authorization", format!("Bearer {sent}")).send();
    }
    server.post_json(r#"{"domain":"shop","descriptors":[{"entries":[{"key":"login","value":"ann"}]}]}"#);
    let found = wait_for("the failed store", || {
        Some(problems(&server))
            .filter(|found| found["failed_charges"].as_object().is_some_and(|kinds| !kinds.is_empty()))
    });
    let text = found.to_string();
    for secret in ["sesame", token, "login=ann", "audit"] {
        assert!(!text.contains(secret), "{secret}: {found:#}");
    }
    assert!(
        found["log"].as_array().unwrap().iter().any(|line| line["message"].as_str().unwrap().contains("redis")),
        "{found:#}"
    );
    assert!(found["decided_by_policy"]["local"].as_u64() >= Some(1), "{found:#}");
}
