//! Responses while Redis misbehaves: in time, by policy while Redis is unreachable, and strict again soon after it
//! recovers.
//!
//! Whole processes run against real servers, under a steady load. `TOLLKEEPER_FAULT_TABLE=path` appends a line for
//! each fault to that file: `fault | calls | not judged | in 20 ms % | strict during % | policy during % | longest ms
//! | back after ms`. Of the tests that judge latencies, few run at a time.

mod fake_server;
pub(crate) mod load;
mod topology;
mod rotation;
mod misconfiguration;

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::load::{Load, with_policies};
use kit::redis::{REPLY_TIMEOUT, Server, options};
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::tollkeeper::Tollkeeper;
use kit::wait_for;

/// Number of calls during a fault.
pub(crate) const CALLS_PER_FAULT: usize = 80;

/// Waits for one of the places of tests that judge latencies: so few run at a time that they leave each other the CPU.
pub(crate) fn wait_for_place() -> MutexGuard<'static, ()> {
    static PLACES: [Mutex<()>; 3] = [const { Mutex::new(()) }; 3];
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    PLACES[NEXT.fetch_add(1, Ordering::Relaxed) % PLACES.len()].lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that faults did not fill the log: some lines for each fault, and few a second while a busy machine prolongs them.
pub(crate) fn assert_log_is_bounded(tollkeeper: &Tollkeeper, began: Instant) {
    let lines = tollkeeper.stderr().lines().count();
    let most = 200 + 5 * usize::try_from(began.elapsed().as_secs()).expect("a test ends");
    assert!(lines < most, "{lines} lines were logged:\n{}", tollkeeper.stderr());
}

/// Files and connections that the process has open.
pub(crate) fn open_files(tollkeeper: &Tollkeeper) -> usize {
    fs::read_dir(format!("/proc/{}/fd", tollkeeper.id())).expect("the process runs").count()
}

/// Checks that the process leaks nothing after a fault.
pub(crate) fn keeps_no_more_files_than(tollkeeper: &Tollkeeper, before: usize) {
    wait_for("old connections to be closed", || (open_files(tollkeeper) <= before + 2).then_some(()));
}

#[test]
fn server_faults_are_answered_in_time() {
    let _place = wait_for_place();
    let began = Instant::now();
    let server = options().with(&[("busy-reply-threshold", "50")]).start();
    let tollkeeper = with_policies().env("REDIS_URL", server.address()).start();
    let load = Load::strict_on(&tollkeeper);
    let before = open_files(&tollkeeper);

    load.run_fault("none", |load| load.wait_for_calls(CALLS_PER_FAULT)).expect_contract().expect_strict(90.0, |_| true);
    let killed = load.run_fault("single: kill -9 and restart, scripts gone", |load| {
        server.kill();
        load.wait_for_calls(CALLS_PER_FAULT);
        server.restart();
    });
    killed.expect_contract().expect_by_policy();
    let flushed = load.run_fault("single: scripts flushed", |load| {
        server.query::<()>(&["SCRIPT", "FLUSH"]);
        load.wait_for_calls(CALLS_PER_FAULT);
    });
    flushed.expect_contract().expect_strict(90.0, |_| true);
    let frozen = load.run_fault("single: frozen (SIGSTOP)", |load| {
        server.freeze();
        load.wait_for_calls(CALLS_PER_FAULT);
        server.thaw();
    });
    frozen.expect_contract().expect_by_policy().expect_immediate_decisions();
    let demoted = load.run_fault("single: demoted, READONLY", |load| {
        server.query::<()>(&["REPLICAOF", "127.0.0.1", "1"]);
        load.wait_for_calls(CALLS_PER_FAULT);
        server.query::<()>(&["REPLICAOF", "NO", "ONE"]);
    });
    demoted.expect_contract().expect_by_policy();
    let full = load.run_fault("single: memory full, OOM", |load| {
        server.query::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
        load.wait_for_calls(CALLS_PER_FAULT);
        server.query::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    });
    full.expect_contract().expect_by_policy();
    let busy = load.run_fault("single: a runaway script, BUSY", |load| {
        let mut caller = server.connect(REPLY_TIMEOUT).expect("the server accepts");
        caller.send(&["EVAL", "while true do end", "0"]).expect("it can be sent");
        load.wait_for_calls(CALLS_PER_FAULT);
        server.query::<()>(&["SCRIPT", "KILL"]);
        assert!(caller.receive().is_err());
    });
    busy.expect_contract().expect_by_policy();
    let cut_off = load.run_fault("single: connections killed again and again", |load| {
        for _ in 0..CALLS_PER_FAULT / 5 {
            server.query::<()>(&["CLIENT", "KILL", "USER", "default"]);
            load.wait_for_calls(5);
        }
    });
    cut_off.expect_contract().expect_strict(50.0, |_| true);
    let planted = load.run_fault("single: wrong types under some keys", |load| {
        plant(&server);
        load.wait_for_calls(2 * CALLS_PER_FAULT);
        server.query::<()>(&["FLUSHALL"]);
    });
    // A hash, a list and a text under one value of each of four rules: 12 of 160 counters.
    planted.expect_contract().expect_strict(85.0, |_| true);

    drop(load);
    keeps_no_more_files_than(&tollkeeper, before);
    assert_log_is_bounded(&tollkeeper, began);
}

/// Replaces some counters by values of other types.
fn plant(server: &Server) {
    let keys: Vec<String> = server.query(&["KEYS", "tk1:*"]);
    let mut planted = 0;
    for (value, what) in [("=1}", "HSET"), ("=2}", "RPUSH"), ("=3}", "SET")] {
        for key in keys.iter().filter(|key| key.contains(value)) {
            // In one step: a call between the two commands would make the counter again.
            let script = "redis.call('DEL', KEYS[1]) redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))";
            let words: &[&str] = if what == "HSET" { &[what, "a", "b"] } else { &[what, "nonsense"] };
            server.query::<()>(&[&["EVAL", script, "1", key], words].concat());
            planted += 1;
        }
    }
    assert_eq!(planted, 12, "{keys:?}");
}

#[test]
fn link_faults_are_answered_in_time() {
    let _place = wait_for_place();
    let began = Instant::now();
    let server = options().start();
    let proxy = TcpProxy::to(&server.address());
    let tollkeeper = with_policies().env("REDIS_URL", format!("127.0.0.1:{}", proxy.port())).start();
    let load = Load::strict_on(&tollkeeper);
    let before = open_files(&tollkeeper);
    let by_policy = |name: &str, mode: Mode| {
        let fault_effects = load.run_fault(name, |load| {
            proxy.set(mode);
            load.wait_for_calls(CALLS_PER_FAULT);
            proxy.set(Mode::Pass);
        });
        fault_effects.expect_contract().expect_by_policy().expect_immediate_decisions();
    };
    by_policy("link: refused", Mode::Refuse);
    by_policy("link: reset", Mode::Reset);
    by_policy("link: packets held until it heals", Mode::Stall);
    by_policy("link: late by 60 ms", Mode::Delay(Duration::from_millis(30)));
    by_policy("link: cut after each 100 bytes of answers", Mode::Truncate(100));
    let slow = load.run_fault("link: late by 4 ms", |load| {
        proxy.set(Mode::Delay(Duration::from_millis(2)));
        load.wait_for_calls(CALLS_PER_FAULT);
        proxy.set(Mode::Pass);
    });
    slow.expect_contract().expect_strict(80.0, |_| true);
    let dropped = load.run_fault("link: packets dropped, connections lost", |load| {
        proxy.set(Mode::Blackhole);
        load.wait_for_calls(CALLS_PER_FAULT);
        // A TCP connection cannot continue after lost bytes, so open connections are reset.
        proxy.set(Mode::Reset);
        proxy.set(Mode::Pass);
    });
    dropped.expect_contract().expect_by_policy();

    drop(load);
    keeps_no_more_files_than(&tollkeeper, before);
    assert_log_is_bounded(&tollkeeper, began);
}
