//! `why`: the time line of a descriptor from decision logs.

mod bans;
mod gaps;
mod remedies;
mod served;
mod slots;
mod time_line;

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use kit::tollkeeper::{inherited_env, program_path};

/// 2026-07-08T12:00:00Z in microseconds since the Unix epoch.
const NOON_US: u64 = 1_783_512_000_000_000;
const SECOND_US: u64 = 1_000_000;
const DAY_US: u64 = 86_400 * SECOND_US;

/// A directory with logs, and the command in it.
struct Logs(TempDir);

impl Logs {
    fn new(records: &[Value]) -> Self {
        Self(tempfile::tempdir().unwrap()).with("log.jsonl", lines(records))
    }

    fn with(self, name: &str, contents: impl AsRef<[u8]>) -> Self {
        fs::write(self.path(name), contents).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(program_path());
        command.arg("why").args(arguments.split(' ')).current_dir(self.0.path()).env_clear().envs(inherited_env());
        command
    }

    /// Asks for `login=ann` of the domain `shop`.
    fn ask(&self, arguments: &str) -> Output {
        self.command(&format!("--domain shop --descriptor login=ann {arguments}")).output().unwrap()
    }

    /// Text about `login=ann` in `log.jsonl`.
    fn text(&self, arguments: &str) -> String {
        let output = self.ask(format!("--log log.jsonl {arguments}").trim_end());
        assert!(output.status.code() != Some(2), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &str) -> Value {
        serde_json::from_str(&self.text(&format!("--json {arguments}"))).unwrap()
    }

    /// Asks with a log on standard input.
    fn ask_about_input(&self, log: &[u8]) -> Output {
        let mut command = self.command("--domain shop --descriptor login=ann --log -");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(log).unwrap();
        child.wait_with_output().unwrap()
    }
}

fn lines(records: &[Value]) -> String {
    records.iter().map(|record| format!("{record}\n")).collect()
}

/// Replaces fields of an object.
fn changed(mut object: Value, changes: &Value) -> Value {
    for (name, value) in changes.as_object().unwrap() {
        object[name] = value.clone();
    }
    object
}

/// A descriptor `key=value` that a limit of 10 per minute rejected or admitted.
fn descriptor(text: &str, verdict: &str) -> Value {
    let (key, value) = text.split_once('=').unwrap();
    let admitted = verdict == "ok";
    let result = match admitted {
        true => json!({"admitted": true, "before": 3, "after": 4, "remaining": 6, "reset_us": 24_000_000}),
        false => json!({"admitted": false, "before": 10, "after": 10, "remaining": 0, "reset_us": 60_000_000,
                        "retry_after_us": 6_000_000}),
    };
    json!({
        "entries": [{"key": key, "value": value}], "hits": 1, "sampled": true,
        "rule": {"path": format!("shop.{key}"), "file": "rules.yaml", "line": 7},
        "limits": [{"algorithm": "token_bucket", "requests_per_unit": 10, "unit": "minute", "result": result}],
        "decided_by": "counter", "verdict": verdict,
    })
}

/// A decision `at_us` after noon on these descriptors.
fn decision(at_us: u64, descriptors: &[Value]) -> Value {
    let verdicts = || descriptors.iter().map(|descriptor| descriptor["verdict"].as_str().unwrap());
    let verdict = verdicts().find(|verdict| *verdict != "ok").unwrap_or("ok");
    json!({
        "v": 1, "type": "decision", "process": "p", "seq": at_us + 1, "time_us": NOON_US + at_us, "domain": "shop",
        "descriptors": descriptors, "verdict": verdict, "max_delay_us": 0, "rules": "r1", "duration_us": 4,
    })
}

/// A decision on `login=ann` at a second after noon.
fn of_ann(second: u64, verdict: &str) -> Value {
    decision(second * SECOND_US, &[descriptor("login=ann", verdict)])
}

/// A header at a second after noon, with changed settings.
fn header(second: u64, event: &str, rules: &str, settings: &Value) -> Value {
    let defaults = json!({
        "shadow_mode": false, "quota_mode": false, "stop_cache_key_increment_when_overlimit": false,
        "merge_domains": false, "calendar_months": false, "log_max": 10_000, "on_store_error": "local",
        "max_replicas": 16, "when": ["all"], "sample": 1.0, "values": "plain",
    });
    json!({
        "v": 1, "type": "header", "event": event, "process": "p", "seq": 0, "time_us": NOON_US + second * SECOND_US,
        "program": "0", "store": "redis", "settings": changed(defaults, settings),
        "rules": {"id": rules, "documents": []},
    })
}
