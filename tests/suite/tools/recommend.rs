//! `recommend`: the smallest limits that reject few keys of recorded traffic.

mod exact;
mod figures;
mod search;
mod usage;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::tools::simulate::Log;
use kit::tollkeeper::{inherited_env, program_path};

/// Rules of the domain `shop`: five logins per minute and name.
const RULES: &str = "\
domain: shop
descriptors:
- {key: login, rate_limit: {unit: minute, requests_per_unit: 5, algorithm: sliding_window_log}}
";

/// A directory with files of a recommendation, and the command in it.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn with(self, name: &str, contents: impl AsRef<[u8]>) -> Self {
        fs::write(self.path(name), contents).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `recommend` with these arguments, split at blanks.
    fn recommend(&self, arguments: &str) -> Recommended {
        self.run("recommend", arguments)
    }

    fn run(&self, command: &str, arguments: &str) -> Recommended {
        let mut program = Command::new(program_path());
        program.arg(command).args(arguments.split(' ')).current_dir(self.0.path());
        Recommended(program.env_clear().envs(inherited_env()).output().unwrap())
    }
}

/// Result of a run.
#[derive(Debug)]
struct Recommended(Output);

impl Recommended {
    fn stdout(&self) -> String {
        String::from_utf8(self.0.stdout.clone()).unwrap()
    }

    /// The JSON of a run that succeeds.
    fn json(&self) -> Value {
        assert_eq!(self.0.status.code(), Some(0), "{self:?}");
        serde_json::from_str(&self.stdout()).unwrap()
    }

    /// The message of a run that fails with this code.
    fn fails_with(&self, code: i32) -> String {
        assert_eq!(self.0.status.code(), Some(code), "{self:?}");
        String::from_utf8(self.0.stderr.clone()).unwrap()
    }
}

/// A log in which ten names `u1` to `u10` log in once to ten times each, one every 100 ms, for two minutes.
fn ten_users() -> Log {
    let mut log = Log::new("p", RULES);
    for user in 1..=10 {
        for number in 0..user {
            log = log.request(number * 100, &[&format!("login=u{user}")]);
        }
    }
    log.request(120_000, &["login=u1"])
}

/// `requests_per_unit` of the limit of a period.
fn limit_of(results: &Value, period: &str) -> Value {
    let mut rows = results["limits"].as_array().unwrap().iter();
    let row = rows.find(|row| row["period"] == period).unwrap_or_else(|| panic!("{period}: {results}"));
    row["requests_per_unit"].clone()
}

/// Header settings of a log that differ from the defaults.
fn settings(changes: &Value) -> Value {
    json!(changes)
}
