//! `events`: the records of a stream, each printed by one consumer of a group.

mod deployments;
mod hostile;
mod takeover;
mod worker;

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use kit::redis::{Server, options};
use kit::tollkeeper::{inherited_env, program_path};
use kit::{read, signal, wait_for};

const STREAM: &str = "decisions";
const GROUP: &str = "workers";

/// The command on the stream of this server.
fn command(server: &Server, arguments: &str) -> Command {
    let mut command = Command::new(program_path());
    command.args(["events", "--stream", STREAM, "--group", GROUP]).args(arguments.split_whitespace());
    command.env_clear().envs(inherited_env()).env("TOLLKEEPER_DECISION_LOG_REDIS_URL", server.address());
    command
}

fn run(server: &Server, arguments: &str) -> Output {
    command(server, arguments).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Appends an entry for each number.
fn append(server: &Server, numbers: impl IntoIterator<Item = u64>) {
    let mut client = server.connect(Duration::from_secs(10)).unwrap();
    for number in numbers {
        client.command(&["XADD", STREAM, "*", "record", &record(number)]).unwrap();
    }
}

fn record(number: u64) -> String {
    json!({"v": 1, "type": "decision", "seq": number, "verdict": "over_limit"}).to_string()
}

/// Numbers of printed records.
fn numbers(lines: &str) -> Vec<u64> {
    lines.lines().map(number).collect()
}

fn number(line: &str) -> u64 {
    let line: Value = serde_json::from_str(line).unwrap();
    line.get("record").unwrap_or(&line)["seq"].as_u64().unwrap()
}

/// Number of entries that were delivered and not acknowledged.
fn pending(server: &Server) -> u64 {
    let summary: Vec<redis::Value> = server.query(&["XPENDING", STREAM, GROUP]);
    redis::from_redis_value_ref(&summary[0]).unwrap()
}

/// A consumer that runs; killed when dropped.
struct Consumer {
    child: Child,
    lines: Receiver<String>,
    stdin: Option<ChildStdin>,
    files: TempDir,
}

impl Consumer {
    fn start(server: &Server, arguments: &str) -> Self {
        Self::start_with(&mut command(server, arguments))
    }

    fn start_with(command: &mut Command) -> Self {
        let files = tempfile::tempdir().unwrap();
        let stderr = File::create(files.path().join("stderr")).unwrap();
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let stdin = child.stdin.take();
        Self { child, lines, stdin, files }
    }

    /// Waits for the next line.
    fn line(&self) -> String {
        let wait = Duration::from_secs(60);
        self.lines.recv_timeout(wait).unwrap_or_else(|_| panic!("no line; its messages: {}", self.stderr()))
    }

    /// Waits for the next line, and parses it.
    fn json(&self) -> Value {
        serde_json::from_str(&self.line()).unwrap()
    }

    /// Acknowledges an entry.
    fn acknowledge(&mut self, id: &Value) {
        writeln!(self.stdin.as_ref().unwrap(), "{}", id.as_str().unwrap()).unwrap();
    }

    fn stderr(&self) -> String {
        read(&self.files.path().join("stderr"))
    }

    /// Kills it (`kill -9`).
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM, and waits for the exit code.
    fn terminate(&mut self) -> Option<i32> {
        signal::terminate(self.child.id());
        self.wait()
    }

    fn wait(&mut self) -> Option<i32> {
        wait_for("the consumer to end", || self.child.try_wait().unwrap()).code()
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn records_are_printed_in_order_and_acknowledged() {
    let server = options().start();
    append(&server, 1..=250);
    let output = run(&server, "");
    assert_eq!((output.status.code(), numbers(&text(&output.stdout))), (Some(0), (1..=250).collect()), "{output:?}");
    assert!(text(&output.stderr).contains("created the group 'workers'"), "{output:?}");
    assert_eq!(pending(&server), 0);
    append(&server, [251]);
    let output = run(&server, "");
    assert_eq!((numbers(&text(&output.stdout)), text(&output.stderr)), (vec![251], String::new()));
}

#[test]
fn count_leaves_the_other_records_to_the_next_run() {
    let server = options().start();
    append(&server, 1..=150);
    assert_eq!(numbers(&text(&run(&server, "--count 120").stdout)), (1..=120).collect::<Vec<_>>());
    assert_eq!(numbers(&text(&run(&server, "--count 120").stdout)), (121..=150).collect::<Vec<_>>());
}

#[test]
fn records_that_a_closed_pipe_did_not_take_stay_pending() {
    let server = options().start();
    append(&server, 1..=3);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command(&server, "--consumer one").stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), pending(&server)), (Some(0), 3), "{output:?}");
    assert!(!text(&output.stderr).contains("pipe"), "{output:?}");
    assert_eq!(numbers(&text(&run(&server, "--consumer one").stdout)), [1, 2, 3]);
}

#[test]
fn signal_stops_a_consumer_that_waits_and_one_whose_output_is_not_read() {
    let server = options().start();
    let mut waits = Consumer::start(&server, "--follow");
    append(&server, [1]);
    assert_eq!(number(&waits.line()), 1);
    wait_for("the acknowledgement", || (pending(&server) == 0).then_some(()));
    assert_eq!(waits.terminate(), Some(0), "{}", waits.stderr());

    append(&server, 1..=5000);
    let mut child = command(&server, "--follow").stdout(Stdio::piped()).spawn().unwrap();
    // A pipe takes a part of them; the first that it does not take stay pending.
    let is_stuck = || {
        let before = pending(&server);
        thread::sleep(Duration::from_millis(200));
        before > 0 && pending(&server) == before
    };
    wait_for("a record that the pipe does not take", || is_stuck().then_some(()));
    signal::terminate(child.id());
    let status = wait_for("the end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
}

#[test]
fn following_consumer_survives_a_restart_of_redis() {
    let server = options().start();
    let mut consumer = Consumer::start(&server, "--follow");
    append(&server, [1]);
    assert_eq!(number(&consumer.line()), 1);
    server.kill();
    wait_for("a message", || consumer.stderr().contains("trying again").then_some(()));
    // Time for several attempts, of which one is told.
    thread::sleep(Duration::from_secs(2));
    // Empty: it has no persistence.
    server.restart();
    append(&server, [2]);
    assert_eq!(number(&consumer.line()), 2);
    wait_for("a message", || consumer.stderr().contains("redis answers again").then_some(()));
    assert_eq!(consumer.stderr().matches("trying again").count(), 1, "{}", consumer.stderr());
    assert_eq!(consumer.stderr().matches("created the group").count(), 2, "{}", consumer.stderr());
    assert_eq!(consumer.terminate(), Some(0));
}

#[test]
fn frozen_redis_is_told_and_no_record_is_lost() {
    let server = options().start();
    let consumer = Consumer::start(&server, "--follow");
    append(&server, [1]);
    assert_eq!(number(&consumer.line()), 1);
    server.freeze();
    wait_for("a message", || consumer.stderr().contains("no answer in time").then_some(()));
    server.thaw();
    append(&server, [2]);
    assert_eq!(number(&consumer.line()), 2);
}

#[test]
fn group_that_is_destroyed_is_created_again() {
    let server = options().start();
    let consumer = Consumer::start(&server, "--follow");
    append(&server, [1]);
    assert_eq!(number(&consumer.line()), 1);
    server.query::<()>(&["XGROUP", "DESTROY", STREAM, GROUP]);
    // From the start of the stream.
    assert_eq!(number(&consumer.line()), 1);
    assert_eq!(consumer.stderr().matches("created the group").count(), 2, "{}", consumer.stderr());
}

#[test]
fn problems_are_told_with_a_fix() {
    let reader = "on >secret ~decisions +xreadgroup +xpending";
    let server = options().user("reader", reader).start();
    let fails_with = |command: &mut Command, code: i32, expected: &str| {
        let output = command.output().unwrap();
        let text = text(&output.stderr);
        assert!(output.status.code() == Some(code) && text.contains(expected), "{expected}: {output:?}");
        assert!(code == 2 || text.lines().count() == 1, "{text}");
    };
    let auth = "TOLLKEEPER_DECISION_LOG_REDIS_AUTH";
    fails_with(&mut command(&server, ""), 1, "there is no stream 'decisions'");
    fails_with(command(&server, "").env(auth, "reader:secret"), 1, "+xgroup to create the group workers");
    fails_with(command(&server, "").env(auth, "reader:other"), 1, auth);
    fails_with(&mut command(&server, "--claim-after 1ms"), 2, "--claim-after");
    fails_with(&mut command(&server, "--url http://x"), 2, "--url=http://x: not an address");
    // A variable that the stream does not use prevents nothing, and is not named.
    for (unused, value) in [("GRPC_PORT", "abc"), ("REDIS_TYPE", "none"), ("BACKEND_TYPE", "memcache")] {
        fails_with(command(&server, "").env(unused, value), 1, "there is no stream 'decisions'");
    }
    fails_with(command(&server, "").env("REDIS_TIMEOUT", "soon"), 2, "REDIS_TIMEOUT=soon");
    let url = format!("--url redis://reader:other@{}", server.address());
    fails_with(&mut command(&server, &url), 1, "or the password in --url");
    fails_with(
        command(&server, "").env_remove("TOLLKEEPER_DECISION_LOG_REDIS_URL"),
        2,
        "stream 'decisions': names a stream, but",
    );
    server.query::<()>(&["SET", STREAM, "text"]);
    fails_with(&mut command(&server, ""), 1, "the key 'decisions' is not a stream");
    server.kill();
    fails_with(&mut command(&server, ""), 1, "onnection refused");
}

#[test]
fn permissions_of_the_help_suffice() {
    let rules = "on >secret ~decisions +xreadgroup +xpending +xclaim +xrange +xack +xgroup";
    let server = options().user("worker", rules).start();
    append(&server, 1..=3);
    let output = command(&server, "").env("TOLLKEEPER_DECISION_LOG_REDIS_AUTH", "worker:secret").output().unwrap();
    assert_eq!((output.status.code(), numbers(&text(&output.stdout))), (Some(0), vec![1, 2, 3]), "{output:?}");
}
