//! Records of a consumer that dies, waits or is restarted.

use std::time::Duration;

use super::{Consumer, GROUP, STREAM, append, number, numbers, pending, run, text};
use kit::redis::options;
use kit::wait_for;

#[test]
fn consumer_that_restarts_begins_with_its_own_records() {
    let server = options().start();
    append(&server, 1..=3);
    let mut first = Consumer::start(&server, "--follow --ack stdin --consumer one");
    let printed: Vec<_> = (0..3).map(|_| first.json()).collect();
    assert!(printed.iter().all(|line| line["deliveries"] == 1), "{printed:?}");
    first.acknowledge(&printed[1]["id"]);
    wait_for("the acknowledgement", || (pending(&server) == 2).then_some(()));
    first.kill();
    append(&server, [4]);
    // An hour: no other consumer would get them before.
    let again = Consumer::start(&server, "--follow --ack stdin --consumer one --claim-after 1h");
    let again: Vec<_> = (0..3).map(|_| again.json()).collect();
    assert_eq!(again.iter().map(|line| number(&line.to_string())).collect::<Vec<_>>(), [1, 3, 4]);
    assert_eq!(again.iter().map(|line| line["deliveries"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 2, 1]);
}

#[test]
fn records_of_a_dead_consumer_are_taken_over() {
    let server = options().start();
    append(&server, 1..=250);
    let mut dead = Consumer::start(&server, "--follow --ack stdin");
    (0..250).for_each(|_| drop(dead.line()));
    dead.kill();
    let other = Consumer::start(&server, "--follow --claim-after 1s");
    let mut found: Vec<u64> = (0..250).map(|_| number(&other.line())).collect();
    found.sort_unstable();
    assert_eq!(found, (1..=250).collect::<Vec<_>>());
    wait_for("the acknowledgements", || (pending(&server) == 0).then_some(()));
}

#[test]
fn records_of_a_live_consumer_are_not_taken_over() {
    let server = options().start();
    append(&server, [1]);
    let mut waits = Consumer::start(&server, "--ack stdin --claim-after 1s --consumer waits");
    let line = waits.json();
    let other = Consumer::start(&server, "--follow --claim-after 1s --consumer other");
    let idle_ms = || {
        let rows: Vec<(String, String, u64, u64)> = server.query(&["XPENDING", STREAM, GROUP, "-", "+", "1"]);
        assert_eq!(rows[0].1, "waits");
        rows[0].2
    };
    // It is kept several times, for longer than the time of the takeover.
    let (mut last, mut kept) = (idle_ms(), 0);
    wait_for("the record to be kept", || {
        let now = idle_ms();
        kept += u32::from(now < last);
        last = now;
        (kept >= 8).then_some(())
    });
    append(&server, [2]);
    assert_eq!(number(&other.line()), 2);
    waits.acknowledge(&line["id"]);
    wait_for("the acknowledgement", || (pending(&server) == 0).then_some(()));
}

#[test]
fn worker_that_closes_its_pipe_ends_the_consumer_after_the_last_acknowledgement() {
    let server = options().start();
    append(&server, 1..=3);
    let mut consumer = Consumer::start(&server, "--follow --ack stdin");
    let lines: Vec<_> = (0..3).map(|_| consumer.json()).collect();
    consumer.acknowledge(&lines[0]["id"]);
    consumer.acknowledge(&lines[2]["id"]);
    consumer.stdin = None;
    assert_eq!((consumer.wait(), pending(&server)), (Some(0), 1));
}

#[test]
fn without_follow_the_consumer_waits_for_acknowledgements_and_ends() {
    let server = options().start();
    append(&server, 1..=2);
    let mut consumer = Consumer::start(&server, "--ack stdin");
    let lines: Vec<_> = (0..2).map(|_| consumer.json()).collect();
    // The second read finds nothing; a consumer that did not wait would end.
    wait_for("the second read", || (server.command_counts()["xreadgroup"] >= 2).then_some(()));
    std::thread::sleep(Duration::from_millis(500));
    for line in &lines {
        assert_eq!(consumer.child.try_wait().unwrap(), None);
        consumer.acknowledge(&line["id"]);
    }
    assert_eq!((consumer.wait(), pending(&server)), (Some(0), 0));
}

#[test]
fn line_that_is_not_an_id_ends_the_consumer() {
    use std::io::Write as _;
    let server = options().start();
    append(&server, [1]);
    let mut consumer = Consumer::start(&server, "--follow --ack stdin");
    consumer.line();
    let long = "x\u{1b}[2J".repeat(1 << 12);
    let _ = writeln!(consumer.stdin.as_ref().unwrap(), "{long}");
    assert_eq!(consumer.wait(), Some(1));
    let told = consumer.stderr();
    assert!(told.contains("is not the id of a printed record") && !told.contains('\u{1b}'), "{told:?}");
    assert!(told.len() < 1000, "{} bytes", told.len());
}

#[test]
fn trimmed_records_are_told_and_no_longer_pending() {
    let server = options().start();
    append(&server, 1..=30);
    let mut dead = Consumer::start(&server, "--follow --ack stdin --consumer one");
    (0..30).for_each(|_| drop(dead.line()));
    dead.kill();
    server.query::<u64>(&["XTRIM", STREAM, "MAXLEN", "1"]);
    let output = run(&server, "--consumer one");
    let told = text(&output.stderr);
    assert_eq!((numbers(&text(&output.stdout)), pending(&server)), (vec![30], 0), "{told}");
    assert_eq!(told.matches("was trimmed from the stream").count(), 10, "{told}");
    assert!(told.contains("29 entries trimmed before an acknowledgement"), "{told}");
}

#[test]
fn two_consumers_share_the_records() {
    let server = options().start();
    let consumers = [Consumer::start(&server, "--follow"), Consumer::start(&server, "--follow")];
    for number in 1..=2000 {
        append(&server, [number]);
    }
    wait_for("all records", || {
        let groups: Vec<std::collections::HashMap<String, redis::Value>> = server.query(&["XINFO", "GROUPS", STREAM]);
        (groups[0]["lag"] == redis::Value::Int(0) && pending(&server) == 0).then_some(())
    });
    let mut found: Vec<u64> = Vec::new();
    for consumer in &consumers {
        let own: Vec<u64> = std::iter::from_fn(|| consumer.lines.recv_timeout(Duration::from_secs(1)).ok())
            .map(|line| number(&line))
            .collect();
        assert!(!own.is_empty());
        found.extend(own);
    }
    found.sort_unstable();
    assert_eq!(found, (1..=2000).collect::<Vec<_>>());
}
