//! Responses while Redis misbehaves: in time, by policy while Redis is unreachable, and strict again soon after it
//! recovers.
//!
//! Whole processes run against real servers, under a steady load. `TOLLKEEPER_FAULT_TABLE=path` appends a line for
//! each fault to that file: `fault | calls | not judged | in 20 ms % | strict during % | policy during % | longest ms
//! | back after ms`. Tests that judge latencies run one at a time.

mod fake_server;
mod load;
mod topology;
mod rotation;
mod misconfiguration;

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::load::{Load, with_policies};
use crate::kit::redis::{REPLY_TIMEOUT, Server, options};
use crate::kit::tcp_proxy::{Mode, TcpProxy};
use crate::kit::tollkeeper::Tollkeeper;
use crate::kit::wait_for;

/// Calls while a fault lasts.
const WHILE: usize = 100;

/// Serializes the tests that judge latencies.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Files and connections that the process has open.
fn open_files(tollkeeper: &Tollkeeper) -> usize {
    fs::read_dir(format!("/proc/{}/fd", tollkeeper.id())).expect("the process runs").count()
}

/// Checks that the process leaks nothing after a fault.
fn keeps_no_more_files_than(tollkeeper: &Tollkeeper, before: usize) {
    wait_for("old connections to be closed", || (open_files(tollkeeper) <= before + 2).then_some(()));
}

#[test]
fn server_faults_are_answered_in_time() {
    let _alone = alone();
    let server = options().with(&[("busy-reply-threshold", "50")]).start();
    let tollkeeper = with_policies().env("REDIS_URL", server.address()).start();
    let load = Load::strict_on(&tollkeeper);
    let before = open_files(&tollkeeper);

    load.through("none", |load| load.pass(WHILE)).expect_calm().expect_strict(90.0, |_| true);
    let killed = load.through("single: kill -9 and restart, scripts gone", |load| {
        server.kill();
        load.pass(WHILE);
        server.restart();
    });
    killed.expect_calm().expect_by_policy();
    let flushed = load.through("single: scripts flushed", |load| {
        server.query::<()>(&["SCRIPT", "FLUSH"]);
        load.pass(WHILE);
    });
    flushed.expect_calm().expect_strict(90.0, |_| true);
    let frozen = load.through("single: frozen (SIGSTOP)", |load| {
        server.freeze();
        load.pass(WHILE);
        server.thaw();
    });
    frozen.expect_calm().expect_by_policy().expect_not_waited_for();
    let demoted = load.through("single: demoted, READONLY", |load| {
        server.query::<()>(&["REPLICAOF", "127.0.0.1", "1"]);
        load.pass(WHILE);
        server.query::<()>(&["REPLICAOF", "NO", "ONE"]);
    });
    demoted.expect_calm().expect_by_policy();
    let full = load.through("single: memory full, OOM", |load| {
        server.query::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
        load.pass(WHILE);
        server.query::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    });
    full.expect_calm().expect_by_policy();
    let busy = load.through("single: a runaway script, BUSY", |load| {
        let mut caller = server.connect(REPLY_TIMEOUT).expect("the server accepts");
        caller.send(&["EVAL", "while true do end", "0"]).expect("it can be sent");
        load.pass(WHILE);
        server.query::<()>(&["SCRIPT", "KILL"]);
        assert!(caller.receive().is_err());
    });
    busy.expect_calm().expect_by_policy();
    let cut_off = load.through("single: connections killed again and again", |load| {
        for _ in 0..WHILE / 5 {
            server.query::<()>(&["CLIENT", "KILL", "USER", "default"]);
            load.pass(5);
        }
    });
    cut_off.expect_calm().expect_strict(50.0, |_| true);
    let planted = load.through("single: wrong types under some keys", |load| {
        plant(&server);
        load.pass(2 * WHILE);
        server.query::<()>(&["FLUSHALL"]);
    });
    // A hash, a list and a text under one value of each of four rules: 12 of 160 counters.
    planted.expect_calm().expect_strict(85.0, |_| true);

    drop(load);
    keeps_no_more_files_than(&tollkeeper, before);
    let lines = tollkeeper.stderr().lines().count();
    assert!(lines < 200, "{lines} lines were logged:\n{}", tollkeeper.stderr());
}

/// Puts something else under some of the counters.
fn plant(server: &Server) {
    let keys: Vec<String> = server.query(&["KEYS", "tk1:*"]);
    let mut planted = 0;
    for (value, what) in [("=1}", "HSET"), ("=2}", "RPUSH"), ("=3}", "SET")] {
        for key in keys.iter().filter(|key| key.contains(value)) {
            server.query::<()>(&["DEL", key]);
            let words: &[&str] = if what == "HSET" { &[what, key, "a", "b"] } else { &[what, key, "nonsense"] };
            server.query::<()>(words);
            planted += 1;
        }
    }
    assert_eq!(planted, 12, "{keys:?}");
}

#[test]
fn link_faults_are_answered_in_time() {
    let _alone = alone();
    let server = options().start();
    let proxy = TcpProxy::to(&server.address());
    let tollkeeper = with_policies().env("REDIS_URL", format!("127.0.0.1:{}", proxy.port())).start();
    let load = Load::strict_on(&tollkeeper);
    let before = open_files(&tollkeeper);
    let by_policy = |name: &str, mode: Mode| {
        let seen = load.through(name, |load| {
            proxy.set(mode);
            load.pass(WHILE);
            proxy.set(Mode::Pass);
        });
        seen.expect_calm().expect_by_policy().expect_not_waited_for();
    };
    by_policy("link: refused", Mode::Refuse);
    by_policy("link: reset", Mode::Reset);
    by_policy("link: packets held until it heals", Mode::Stall);
    by_policy("link: late by 60 ms", Mode::Delay(Duration::from_millis(30)));
    by_policy("link: cut after each 100 bytes of answers", Mode::Truncate(100));
    let slow = load.through("link: late by 4 ms", |load| {
        proxy.set(Mode::Delay(Duration::from_millis(2)));
        load.pass(WHILE);
        proxy.set(Mode::Pass);
    });
    slow.expect_calm().expect_strict(80.0, |_| true);
    let dropped = load.through("link: packets dropped, connections lost", |load| {
        proxy.set(Mode::Blackhole);
        load.pass(WHILE);
        // No TCP goes on with a gap in it: what was open is lost.
        proxy.set(Mode::Reset);
        proxy.set(Mode::Pass);
    });
    dropped.expect_calm().expect_by_policy();

    drop(load);
    keeps_no_more_files_than(&tollkeeper, before);
    let lines = tollkeeper.stderr().lines().count();
    assert!(lines < 200, "{lines} lines were logged:\n{}", tollkeeper.stderr());
}
