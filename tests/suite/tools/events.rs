//! `events`: the records of a stream, from its start or after an entry.

mod deployments;
mod hostile;
mod worker;

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use kit::redis::{Server, options};
use kit::tollkeeper::{inherited_env, program_path};
use kit::{read, signal, wait_for};

const STREAM: &str = "decisions";

/// The command on the stream of this server.
fn command(server: &Server, arguments: &str) -> Command {
    let mut command = Command::new(program_path());
    command.args(["events", "--stream", STREAM]).args(arguments.split_whitespace());
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

/// A reader that runs; killed when dropped.
struct Reader {
    child: Child,
    lines: Receiver<String>,
    files: TempDir,
}

impl Reader {
    fn start(server: &Server, arguments: &str) -> Self {
        Self::start_with(&mut command(server, arguments))
    }

    fn start_with(command: &mut Command) -> Self {
        let files = tempfile::tempdir().unwrap();
        let stderr = File::create(files.path().join("stderr")).unwrap();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, lines, files }
    }

    /// Waits for the next line.
    fn line(&self) -> String {
        let wait = Duration::from_secs(60);
        self.lines.recv_timeout(wait).unwrap_or_else(|_| panic!("no line; its messages: {}", self.stderr()))
    }

    fn stderr(&self) -> String {
        read(&self.files.path().join("stderr"))
    }

    /// Sends SIGTERM, and waits for the exit code.
    fn terminate(&mut self) -> Option<i32> {
        signal::terminate(self.child.id());
        self.wait()
    }

    fn wait(&mut self) -> Option<i32> {
        wait_for("the reader to end", || self.child.try_wait().unwrap()).code()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn records_are_printed_in_order_from_the_start_or_after_an_entry() {
    let server = options().start();
    append(&server, 1..=1250);
    let all = run(&server, "");
    assert_eq!((all.status.code(), numbers(&text(&all.stdout))), (Some(0), (1..=1250).collect()), "{all:?}");
    let first = text(&run(&server, "--ids --count 620").stdout);
    assert_eq!(numbers(&first), (1..=620).collect::<Vec<_>>());
    let last: Value = serde_json::from_str(first.lines().last().unwrap()).unwrap();
    let rest = run(&server, &format!("--after {}", last["id"].as_str().unwrap()));
    assert_eq!((numbers(&text(&rest.stdout)), text(&rest.stderr)), ((621..=1250).collect(), String::new()));
    let end = run(&server, "--after 9999999999999-0");
    assert_eq!((end.status.code(), text(&end.stdout)), (Some(0), String::new()));
}

#[test]
fn removed_flags_say_what_to_use_instead() {
    let server = options().start();
    let output = run(&server, "--group workers");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text(&output.stderr).contains("follow the stream with --ids and --after"), "{output:?}");
}

#[test]
fn closed_pipe_ends_it_without_an_error() {
    let server = options().start();
    append(&server, 1..=3);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command(&server, "").stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
}

#[test]
fn signal_stops_a_reader_that_waits_and_one_whose_output_is_not_read() {
    let server = options().start();
    let mut waits = Reader::start(&server, "--follow");
    append(&server, [1]);
    assert_eq!(number(&waits.line()), 1);
    assert_eq!(waits.terminate(), Some(0), "{}", waits.stderr());

    append(&server, 1..=5000);
    let mut child = command(&server, "--follow").stdout(Stdio::piped()).spawn().unwrap();
    // After the first byte the others are being written, more than a pipe takes.
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    signal::terminate(child.id());
    let status = wait_for("the end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
}

#[test]
fn following_reader_survives_a_restart_of_redis() {
    let server = options().start();
    let mut reader = Reader::start(&server, "--follow");
    append(&server, [1]);
    assert_eq!(number(&reader.line()), 1);
    server.kill();
    wait_for("a message", || reader.stderr().contains("trying again").then_some(()));
    // Time for several attempts, of which one is told.
    thread::sleep(Duration::from_secs(2));
    // Empty: it has no persistence.
    server.restart();
    append(&server, [2]);
    assert_eq!(number(&reader.line()), 2);
    wait_for("a message", || reader.stderr().contains("redis answers again").then_some(()));
    assert_eq!(reader.stderr().matches("trying again").count(), 1, "{}", reader.stderr());
    assert_eq!(reader.terminate(), Some(0));
}

#[test]
fn frozen_redis_is_told_and_no_record_is_lost() {
    let server = options().start();
    let reader = Reader::start(&server, "--follow");
    append(&server, [1]);
    assert_eq!(number(&reader.line()), 1);
    server.freeze();
    wait_for("a message", || reader.stderr().contains("no answer in time").then_some(()));
    server.thaw();
    append(&server, [2]);
    assert_eq!(number(&reader.line()), 2);
}

#[test]
fn problems_are_told_with_a_fix() {
    let permissions = "on >secret ~decisions +xrange";
    let server = options().user("reader", permissions).start();
    let fails_with = |command: &mut Command, code: i32, expected: &str| {
        let output = command.output().unwrap();
        let text = text(&output.stderr);
        assert!(output.status.code() == Some(code) && text.contains(expected), "{expected}: {output:?}");
        assert!(code == 2 || text.lines().count() == 1, "{text}");
    };
    let auth = "TOLLKEEPER_DECISION_LOG_REDIS_AUTH";
    fails_with(&mut command(&server, ""), 1, "there is no stream 'decisions'");
    fails_with(command(&server, "").env(auth, "reader:secret"), 1, "+xread of the key decisions");
    fails_with(command(&server, "").env(auth, "reader:other"), 1, auth);
    fails_with(&mut command(&server, "--after yesterday"), 2, "not an id of an entry");
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
    let rules = "on >secret ~decisions +xread";
    let server = options().user("worker", rules).start();
    append(&server, 1..=3);
    let output = command(&server, "").env("TOLLKEEPER_DECISION_LOG_REDIS_AUTH", "worker:secret").output().unwrap();
    assert_eq!((output.status.code(), numbers(&text(&output.stdout))), (Some(0), vec![1, 2, 3]), "{output:?}");
}
