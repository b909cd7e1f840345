//! The worker of the documentation, with decisions of a running server.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use super::STREAM;
use kit::redis::{Server, options};
use kit::tollkeeper::{inherited_env, program_path, with_rules};
use kit::{read, repository, wait_for};

/// One request in three seconds.
const RULES: &str =
    "domain: shop\ndescriptors:\n- {key: user, rate_limit: {unit: second, unit_multiplier: 3, requests_per_unit: 1}}\n";

/// Notes its start, waits while there is a file `hold`, and notes its end. The job of the number in `fails` fails.
const JOB: &str = r#"#!/bin/sh
grep -q '"over_limit"' || exit 9
echo "$JOB_ID" >> started
while [ -e hold ]; do sleep 0.05; done
grep -qx "$JOB_ID" fails && exit 1
echo "$JOB_ID $(date +%s%6N)" >> done
"#;

/// Directory of a worker, with a shorter example: it tries again at once.
struct Workplace(TempDir);

/// A worker that runs; killed when dropped.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Workplace {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let mut example = read(&repository("docs/examples/worker.py"));
        let (line, short) = ("FIRST_BACKOFF_S = 1.0", "FIRST_BACKOFF_S = 0.01");
        assert!(example.contains(line), "{line}");
        example = example.replace(line, short);
        fs::write(path.join("worker.py"), example).unwrap();
        fs::write(path.join("do-job"), JOB).unwrap();
        fs::set_permissions(path.join("do-job"), fs::Permissions::from_mode(0o755)).unwrap();
        ["started", "done", "fails", "dead.jsonl", "position"]
            .iter()
            .for_each(|name| fs::write(path.join(name), "").unwrap());
        symlink(program_path(), path.join("tollkeeper")).unwrap();
        Self(directory)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn lines(&self, name: &str) -> Vec<String> {
        read(&self.path(name)).lines().map(str::to_owned).collect()
    }

    /// True if the worker is through with all entries of the stream.
    fn is_at_the_end(&self, server: &Server) -> bool {
        let newest: Vec<(String, Vec<String>)> = server.query(&["XREVRANGE", STREAM, "+", "-", "COUNT", "1"]);
        read(&self.path("position")) == newest[0].0
    }

    fn start(&self, server: &Server) -> Worker {
        let mut worker = Command::new("python3");
        worker.args(["-B", "worker.py", STREAM, "position", "dead.jsonl", "./do-job"]).current_dir(self.0.path());
        worker.env_clear().envs(inherited_env());
        let path = std::env::var("PATH").unwrap();
        worker.env("PATH", format!("{}:{path}", self.0.path().display()));
        worker.env("TOLLKEEPER_DECISION_LOG_REDIS_URL", server.address());
        Worker(worker.stdin(Stdio::null()).spawn().expect("python3 can be run"))
    }
}

/// Sends requests to a server that logs to the stream, until this many are rejected.
fn rejections(server: &Server, count: usize) -> Vec<Value> {
    let service = with_rules(RULES)
        .env("TOLLKEEPER_DECISION_LOG", format!("redis:{STREAM}"))
        .env("TOLLKEEPER_DECISION_LOG_REDIS_URL", server.address())
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
        .start();
    let call = || {
        let mut call = Command::new(program_path());
        let address = format!("127.0.0.1:{}", service.grpc_port());
        call.args(["call", "--addr", &address, "--domain", "shop", "--descriptor", "user=ann", "--count", "5"]);
        call.output().unwrap();
    };
    wait_for("rejections", || {
        call();
        Some(rejected(server)).filter(|found| found.len() >= count)
    });
    drop(service);
    rejected(server)
}

/// Rejections in the stream.
fn rejected(server: &Server) -> Vec<Value> {
    let entries: Vec<(String, Vec<String>)> = server.query(&["XRANGE", STREAM, "-", "+"]);
    let records = entries.into_iter().map(|(_, fields)| serde_json::from_str::<Value>(&fields[1]).unwrap());
    records.filter(|record| record["verdict"] == "over_limit").collect()
}

fn job_id(record: &Value) -> String {
    format!("{}-{}", record["process"].as_str().unwrap(), record["seq"])
}

fn exists(path: &Path) -> bool {
    path.try_exists().unwrap()
}

#[test]
fn rejected_jobs_of_a_killed_worker_are_done_when_it_is_started_again() {
    let server = options().start();
    let workplace = Workplace::new();
    let records = rejections(&server, 8);
    fs::write(workplace.path("hold"), "").unwrap();
    let mut first = workplace.start(&server);
    wait_for("a job to start", || (!workplace.lines("started").is_empty()).then_some(()));
    assert!(exists(&workplace.path("hold")));
    first.0.kill().unwrap();
    first.0.wait().unwrap();
    fs::remove_file(workplace.path("hold")).unwrap();
    let _second = workplace.start(&server);
    wait_for("all jobs to be done", || {
        let all_done =
            records.iter().all(|record| workplace.lines("done").iter().any(|line| line.starts_with(&job_id(record))));
        (all_done && workplace.is_at_the_end(&server)).then_some(())
    });
    for line in workplace.lines("done") {
        let (id, done_us) = line.split_once(' ').unwrap();
        let record = records.iter().find(|record| job_id(record) == id).unwrap();
        let due = record["time_us"].as_u64().unwrap() + record["retry_after_us"].as_u64().unwrap();
        assert!(done_us.parse::<u64>().unwrap() >= due, "{line} before {due}");
    }
    // The job that was running when its worker died ran twice.
    let started = workplace.lines("started");
    assert_eq!(started.iter().filter(|id| **id == started[0]).count(), 2, "{started:?}");
    assert_eq!(workplace.lines("dead.jsonl"), [""; 0]);
}

#[test]
fn job_that_fails_becomes_a_dead_letter_and_holds_up_no_other() {
    let server = options().start();
    let workplace = Workplace::new();
    let records = rejections(&server, 6);
    let fails = job_id(&records[0]);
    fs::write(workplace.path("fails"), format!("{fails}\n")).unwrap();
    // A request that never passes.
    let mut never = records[1].clone();
    never["seq"] = 1_000_000.into();
    never.as_object_mut().unwrap().remove("retry_after_us");
    server.query::<String>(&["XADD", STREAM, "*", "record", &never.to_string()]);
    let _worker = workplace.start(&server);
    wait_for("two dead letters", || (workplace.lines("dead.jsonl").len() >= 2).then_some(()));
    wait_for("the other jobs", || (workplace.lines("done").len() == records.len() - 1).then_some(()));
    wait_for("the end of the stream", || workplace.is_at_the_end(&server).then_some(()));
    let dead: BTreeSet<String> =
        workplace.lines("dead.jsonl").iter().map(|line| job_id(&serde_json::from_str(line).unwrap())).collect();
    assert_eq!(dead, BTreeSet::from([fails.clone(), job_id(&never)]));
    assert_eq!(workplace.lines("started").iter().filter(|id| **id == fails).count(), 5);
}
