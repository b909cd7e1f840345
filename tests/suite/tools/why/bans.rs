//! Bans: since when and until when one lasts; and entries in any order.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::tempdir;

use super::{Logs, SECOND_US, changed, decision, descriptor};
use kit::grpc::{Client, rate_limit_request};
use kit::tollkeeper::{inherited_env, program_path, with_rules};

/// A rejection of `login=ann` at a second after noon by a limit with a ban, of which so many seconds are left.
fn rejection(second: u64, ban: &str, left_s: u64) -> Value {
    let mut rejected = descriptor("login=ann", "over_limit");
    rejected["limits"][0]["ban"] = ban.into();
    if left_s > 0 {
        let left_us = left_s * SECOND_US;
        let changes = json!({"banned_us": left_us, "retry_after_us": left_us});
        rejected["limits"][0]["result"] = changed(rejected["limits"][0]["result"].clone(), &changes);
    }
    decision(second * SECOND_US, &[rejected])
}

#[test]
fn ban_has_its_beginning_and_its_end() {
    let ban = "{for: 10m, after: 3}";
    let at = [rejection(1, ban, 0), rejection(2, ban, 0), rejection(9, ban, 600), rejection(69, ban, 540)];
    let logs = Logs::new(&at);
    let results = logs.json("");
    let facts = |index: usize| results["decisions"][index]["rejected_by"][0]["ban"].clone();
    assert_eq!(facts(0), Value::Null, "no ban yet");
    let expected = json!({"since": "2026-07-08T12:00:09.000000Z", "until": "2026-07-08T12:10:09.000000Z", "ban": ban});
    assert_eq!((facts(2), facts(3)), (expected.clone(), expected));
    let text = logs.text("");
    let line = "banned from 2026-07-08 12:00:09.000000 until 2026-07-08 12:10:09.000000 UTC\n";
    assert_eq!(text.matches(line).count(), 2, "{text}");
    assert!(
        text.contains(
            "  1 by shop.login (rules.yaml:7), 10 per minute token_bucket, ban {for: 10m, after: 3}, during its ban"
        ),
        "{text}"
    );
    // A larger limit would not have ended the ban.
    let remedies = |index: usize| results["decisions"][index]["rejected_by"][0]["remedies"].to_string();
    assert!(remedies(2).contains("bucket_size") && !remedies(3).contains("bucket_size"), "{results}");
}

/// Serves requests with these entries by rules, and returns the log.
fn serve(rules: &str, requests: &[&[(&str, &str)]]) -> String {
    let directory = tempdir().unwrap();
    let log = directory.path().join("log.jsonl");
    let mut server = with_rules(rules)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TOLLKEEPER_DECISION_LOG", format!("file:{}", log.display()))
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
        .start();
    let client = Client::connect(server.grpc_port());
    for entries in requests {
        client.call(&rate_limit_request("shop", entries)).unwrap();
    }
    server.signal("TERM");
    assert!(server.wait().success());
    fs::read_to_string(log).unwrap()
}

/// Results about a descriptor.
fn why(log: &str, descriptor: &str) -> Value {
    let directory = tempdir().unwrap();
    fs::write(directory.path().join("log.jsonl"), log).unwrap();
    let mut command = Command::new(program_path());
    command.args(["why", "--domain", "shop", "--json", "--all", "--log", "log.jsonl", "--descriptor", descriptor]);
    let output = command.current_dir(directory.path()).env_clear().envs(inherited_env()).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn ban_of_a_server_is_explained() {
    let rules = "\
domain: shop
descriptors:
- key: login
  rate_limit:
    unit: day
    requests_per_unit: 1
    window: { timezone: Europe/Berlin }
    active: { days: mon-sun, timezone: UTC }
    ban: { for: 10m, after: 2 }
";
    let log = serve(rules, &[&[("login", "ann")][..]; 5]);
    let results = why(&log, "login=ann");
    assert_eq!((&results["requests"], &results["rejected"]), (&json!(5), &json!(4)), "{results}");
    let ban = |index: usize| results["decisions"][index]["rejected_by"][0]["ban"].clone();
    assert_eq!(ban(1), Value::Null);
    assert_eq!((&ban(2)["until"], &ban(2)["ban"]), (&ban(4)["until"], &json!("{for: 10m, after: 2}")), "{results}");
    let limit = &results["decisions"][0]["record"]["descriptors"][0]["limits"][0];
    assert_eq!(limit["window"], "{timezone: Europe/Berlin}", "{limit}");
    assert_eq!(limit["ban"], "{for: 10m, after: 2}", "{limit}");
    assert!(limit["active"].as_str().unwrap().ends_with("timezone: UTC}"), "{limit}");
}

#[test]
fn entries_are_found_in_any_order() {
    let rules = |matching: &str| {
        format!(
            "domain: shop\n{matching}descriptors:\n- key: login\n  descriptors:\n  \
             - {{key: path, rate_limit: {{unit: day, requests_per_unit: 1}}}}\n"
        )
    };
    let requests: [&[(&str, &str)]; 3] =
        [&[("path", "/"), ("login", "ann")], &[("login", "ann"), ("path", "/")], &[("login", "bob"), ("path", "/")]];
    let any = serve(&rules("matching: {order: any}\n"), &requests);
    for asked in ["login=ann,path=/", "path=/,login=ann"] {
        let results = why(&any, asked);
        assert_eq!((&results["requests"], &results["rejected"]), (&json!(2), &json!(1)), "{asked}: {results}");
    }
    assert_eq!(why(&any, "path=/,login=/")["requests"], 0);
    assert_eq!(why(&any, "path=/,path=/")["requests"], 0);
    let ordered = serve(&rules(""), &requests);
    for asked in ["login=ann,path=/", "path=/,login=ann"] {
        assert_eq!(why(&ordered, asked)["requests"], 2, "{asked}");
    }
}
