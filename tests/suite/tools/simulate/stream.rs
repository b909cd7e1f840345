//! Decision logs in a stream of Redis.

use super::{Files, Log, OLD_RULES};
use kit::redis::{Server, options};
use kit::tollkeeper::{inherited_env, program_path};

/// Runs `simulate` on the stream `decisions` of a server.
fn simulate(files: &Files, server: &Server, user: &str) -> std::process::Output {
    let mut command = std::process::Command::new(program_path());
    command.args(["simulate", "--rules", "new.yaml", "--traffic", "redis:decisions", "--json"]);
    command.current_dir(files.0.path()).env_clear().envs(inherited_env());
    command.env("TOLLKEEPER_DECISION_LOG_REDIS_URL", server.address());
    command.env("TOLLKEEPER_DECISION_LOG_REDIS_AUTH", user).output().unwrap()
}

/// Decision log of more requests than one read of the stream has.
fn log() -> Log {
    (0..1200).fold(Log::new("p", OLD_RULES), |log, number| log.request(number * 100, &["login=ann"]))
}

fn append(server: &Server, record: &str) {
    server.query::<String>(&["XADD", "decisions", "*", "record", record]);
}

#[test]
fn stream_gives_the_results_of_a_file() {
    let server = options().user("reader", "on >secret ~decisions +xrange +xrevrange").start();
    let files = Files::new().with("decisions.jsonl", log().text());
    log().text().lines().for_each(|line| append(&server, line));
    let output = simulate(&files, &server, "reader:secret");
    assert!(output.status.success(), "{output:?}");
    let results = |text: &[u8]| {
        let mut results: serde_json::Value = serde_json::from_slice(text).unwrap();
        results.as_object_mut().unwrap().remove("speed");
        results
    };
    let of_file = files.simulate("--rules new.yaml --traffic decisions.jsonl --json").stdout();
    assert_eq!(results(&output.stdout), results(of_file.as_bytes()));
    assert_eq!(results(&output.stdout)["traffic"]["requests"], 1200);
}

#[test]
fn decisions_of_a_trimmed_stream_before_its_header_need_old_rules() {
    let server = options().start();
    let lines = log().lines;
    lines[1..].iter().for_each(|line| append(&server, line));
    append(&server, &lines[0].replace("\"event\":\"start\"", "\"event\":\"rotation\""));
    let output = simulate(&Files::new(), &server, "");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("give the rules of that time as --against"), "{text}");
}

#[test]
fn entries_larger_than_a_reply_are_read_one_by_one() {
    let server = options().start();
    let padding = " ".repeat(3 << 20);
    log().text().lines().take(12).for_each(|line| append(&server, &(line.to_owned() + &padding)));
    let output = simulate(&Files::new(), &server, "");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn problems_of_a_stream_are_told() {
    let server = options().user("weak", "on >secret ~decisions +ping").start();
    let fails_with = |user: &str, expected: &str| {
        let output = simulate(&Files::new(), &server, user);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && text.contains(expected), "{text}");
    };
    fails_with("", "redis:decisions: the stream has no entries");
    fails_with("weak:secret", "the user needs +xrange +xrevrange");
    fails_with("weak:other", "TOLLKEEPER_DECISION_LOG_REDIS_AUTH");
    append(&server, "no \u{1b}[2J\nJSON");
    fails_with("", "redis:decisions:1: not a record of a decision log");
    server.query::<()>(&["DEL", "decisions"]);
    server.query::<String>(&["XADD", "decisions", "*", "other", "field"]);
    fails_with("", "has no field `record`");
    server.query::<()>(&["DEL", "decisions"]);
    server.query::<()>(&["SET", "decisions", "text"]);
    fails_with("", "WRONGTYPE");
    server.kill();
    fails_with("", "onnection refused");
}
