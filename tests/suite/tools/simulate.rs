//! `simulate`: the effect of rules on recorded traffic.

mod chart;
mod fidelity;
mod formats;
mod gates;
mod results;
mod stream;
mod usage;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use kit::tollkeeper::{inherited_env, program_path};

/// Time of the first request of a log, in microseconds.
const START_US: u64 = 1_700_000_000_000_000;

/// Rules of the domain `shop`: five logins per minute and name.
const OLD_RULES: &str = "\
domain: shop
descriptors:
- {key: login, rate_limit: {unit: minute, requests_per_unit: 5, algorithm: sliding_window_log}}
";
/// The same with three logins.
const NEW_RULES: &str = "\
domain: shop
descriptors:
- {key: login, rate_limit: {unit: minute, requests_per_unit: 3, algorithm: sliding_window_log}}
";

/// A directory with files of a simulation, and the command in it.
struct Files(TempDir);

impl Files {
    /// A directory with the old and the new rules.
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap()).with("old.yaml", OLD_RULES).with("new.yaml", NEW_RULES)
    }

    fn with(self, name: &str, contents: impl AsRef<[u8]>) -> Self {
        fs::write(self.path(name), contents).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `simulate` with these arguments, split at blanks.
    fn simulate(&self, arguments: &str) -> Simulated {
        self.run(&arguments.split(' ').collect::<Vec<_>>())
    }

    fn run(&self, arguments: &[&str]) -> Simulated {
        self.run_with(arguments, &[])
    }

    fn run_with(&self, arguments: &[&str], env: &[(&str, &str)]) -> Simulated {
        let mut command = Command::new(program_path());
        command.arg("simulate").args(arguments).current_dir(self.0.path()).env_clear().envs(inherited_env());
        command.envs(env.iter().copied());
        Simulated(command.output().unwrap())
    }
}

/// Result of a run.
#[derive(Debug)]
struct Simulated(Output);

impl Simulated {
    fn stdout(&self) -> String {
        String::from_utf8(self.0.stdout.clone()).unwrap()
    }

    fn stderr(&self) -> String {
        String::from_utf8(self.0.stderr.clone()).unwrap()
    }

    fn code(&self) -> i32 {
        self.0.status.code().unwrap()
    }

    /// The JSON of a run that succeeds.
    fn json(&self) -> Value {
        assert_eq!(self.code(), 0, "{self:?}");
        serde_json::from_str(&self.stdout()).unwrap()
    }

    /// The message of a run that fails with this code.
    fn fails_with(&self, code: i32) -> String {
        assert_eq!(self.code(), code, "{self:?}");
        self.stderr()
    }
}

/// Decision log of one process, as text.
pub(crate) struct Log {
    process: &'static str,
    lines: Vec<String>,
    seq: u64,
}

impl Log {
    /// A log without a header.
    fn without_header(process: &'static str) -> Self {
        Self { process, lines: Vec::new(), seq: 0 }
    }

    /// A log that begins with the start of a process under these rules.
    pub(crate) fn new(process: &'static str, rules: &str) -> Self {
        Self::with_settings(process, rules, &json!({}))
    }

    /// A log whose header has these settings in place of the defaults.
    pub(crate) fn with_settings(process: &'static str, rules: &str, changes: &Value) -> Self {
        let mut settings = json!({
            "shadow_mode": false, "quota_mode": false, "stop_cache_key_increment_when_overlimit": false,
            "merge_domains": false, "calendar_months": false, "log_max": 10_000, "on_store_error": "local",
            "max_replicas": 16, "when": ["all"], "sample": 1.0, "values": "plain",
        });
        for (name, value) in changes.as_object().unwrap() {
            settings[name] = value.clone();
        }
        let mut log = Self::without_header(process);
        log.lines.push(
            json!({
                "v": 1, "type": "header", "event": "start", "process": process, "seq": 0, "time_us": START_US,
                "program": "0", "store": "redis", "settings": settings,
                "rules": {"id": "r1", "documents": [{"name": "rules.yaml", "format": "yaml", "text": rules}]},
            })
            .to_string(),
        );
        log
    }

    /// Adds a request at `at_ms` for descriptors `key=value`.
    pub(crate) fn request(mut self, at_ms: u64, descriptors: &[&str]) -> Self {
        let descriptor = |text: &&str| {
            let (key, value) = text.split_once('=').unwrap();
            json!({
                "entries": [{"key": key, "value": value}], "hits": 1, "sampled": true, "verdict": "ok",
            })
        };
        let descriptors: Vec<Value> = descriptors.iter().map(descriptor).collect();
        self.push(at_ms, &descriptors);
        self
    }

    /// Adds a request with these descriptors.
    pub(crate) fn push(&mut self, at_ms: u64, descriptors: &[Value]) {
        self.seq += 1;
        let is_rejected = descriptors.iter().any(|descriptor| descriptor["verdict"] == "over_limit");
        let decision = json!({
            "v": 1, "type": "decision", "process": self.process, "seq": self.seq,
            "time_us": START_US + at_ms * 1000, "domain": "shop", "descriptors": descriptors,
            "verdict": if is_rejected { "over_limit" } else { "ok" },
            "max_delay_us": 18_000, "rules": "r1", "duration_us": 3,
        });
        self.lines.push(decision.to_string());
    }

    /// Adds a request of `login=value` with the verdict of its only limit, that of the old rules.
    pub(crate) fn decided(mut self, at_ms: u64, value: &str, admitted: bool) -> Self {
        let result = json!({"admitted": admitted, "before": 0, "after": 0, "remaining": 0, "reset_us": 0});
        self.push(
            at_ms,
            &[json!({
                "entries": [{"key": "login", "value": value}], "hits": 1, "sampled": true,
                "limits": [{"algorithm": "sliding_window_log", "requests_per_unit": 5, "unit": "minute",
                            "result": result}],
                "decided_by": "counter", "verdict": if admitted { "ok" } else { "over_limit" },
            })],
        );
        self
    }

    /// Adds ten requests of `login=ann`, one every 100 ms, and two of `login=bob`, as the old rules decide them.
    fn ten_of_ann_and_two_of_bob(self) -> Self {
        let log = (0..10).fold(self, |log, number| log.decided(number * 100, "ann", number < 5));
        log.decided(1100, "bob", true).decided(1200, "bob", true)
    }

    pub(crate) fn text(&self) -> String {
        self.lines.join("\n") + "\n"
    }
}

/// Figures of the limit with this path.
fn limit<'j>(results: &'j Value, path: &str) -> &'j Value {
    let limits = results["limits"].as_array().unwrap();
    limits.iter().find(|limit| limit["path"] == path).unwrap_or_else(|| panic!("{path}: {results}"))
}

/// Bytes compressed by a command.
fn compressed(program: &str, path: &Path) -> Vec<u8> {
    let output = Command::new(program).arg("-c").arg(path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output.stdout
}
