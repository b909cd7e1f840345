//! Responses while memcached misbehaves: in time and by policy, and strict again soon after it recovers.
//!
//! The load and the contract are those of the faults of Redis.

use std::time::{Duration, Instant};

use super::servers::keys_with;
use crate::store::redis::faults::load::{Load, with_policies};
use crate::store::redis::faults::{
    CALLS_PER_FAULT, assert_log_is_bounded, keeps_no_more_files_than, open_files, wait_for_place,
};
use kit::memcached::{Memcached, memcached};
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::tollkeeper::Tollkeeper;
use kit::wait_for;

fn counting_in(servers: &str) -> Tollkeeper {
    with_policies().env("BACKEND_TYPE", "memcache").env("MEMCACHE_HOST_PORT", servers).start()
}

#[test]
fn server_faults_are_answered_in_time() {
    let _place = wait_for_place();
    let began = Instant::now();
    let server = memcached().start();
    let tollkeeper = counting_in(&server.address());
    let load = Load::strict_on(&tollkeeper);
    let before = open_files(&tollkeeper);

    let none = load.run_fault("memcached: none", |load| load.wait_for_calls(CALLS_PER_FAULT));
    none.expect_contract().expect_strict(90.0, |_| true);
    let killed = load.run_fault("memcached: kill -9 and restart", |load| {
        server.kill();
        load.wait_for_calls(CALLS_PER_FAULT);
        server.restart();
    });
    killed.expect_contract().expect_by_policy();
    let frozen = load.run_fault("memcached: frozen (SIGSTOP)", |load| {
        server.freeze();
        load.wait_for_calls(CALLS_PER_FAULT);
        server.thaw();
    });
    frozen.expect_contract().expect_by_policy().expect_immediate_decisions();
    let flushed = load.run_fault("memcached: flushed again and again", |load| {
        for _ in 0..10 {
            server.command("flush_all", "OK");
            load.wait_for_calls(CALLS_PER_FAULT / 10);
        }
    });
    flushed.expect_contract().expect_strict(90.0, |_| true);
    let planted = load.run_fault("memcached: texts under some keys", |load| {
        plant(&server);
        load.wait_for_calls(2 * CALLS_PER_FAULT);
        server.command("flush_all", "OK");
    });
    // A text under three values of each of four rules: 12 of 160 counters.
    planted.expect_contract().expect_strict(85.0, |_| true);

    drop(load);
    keeps_no_more_files_than(&tollkeeper, before);
    assert_log_is_bounded(&tollkeeper, began);
}

/// Replaces some counters by text, once the load has made them again.
fn plant(server: &Memcached) {
    let is_chosen = |key: &String| ["=1}", "=2}", "=3}"].iter().any(|it| key.contains(it));
    let keys = wait_for("the counters of three values", || {
        let keys: Vec<_> = keys_with(server, "faults|").into_iter().filter(is_chosen).collect();
        (keys.len() == 12).then_some(keys)
    });
    for key in keys {
        server.command(&format!("set {key} 0 0 8\r\nnonsense"), "STORED");
    }
}

#[test]
fn link_faults_are_answered_in_time() {
    let _place = wait_for_place();
    let server = memcached().start();
    let proxy = TcpProxy::to(&server.address());
    let tollkeeper = counting_in(&format!("127.0.0.1:{}", proxy.port()));
    let load = Load::strict_on(&tollkeeper);
    let before = open_files(&tollkeeper);
    let faults = [
        ("memcached: refused", Mode::Refuse),
        ("memcached: reset", Mode::Reset),
        ("memcached: packets held until it heals", Mode::Stall),
        ("memcached: late by 60 ms", Mode::Delay(Duration::from_millis(30))),
        // Its version, and a part of the first number.
        ("memcached: cut after each 17 bytes of answers", Mode::Truncate(17)),
    ];
    for (name, mode) in faults {
        let fault_effects = load.run_fault(name, |load| {
            proxy.set(mode);
            load.wait_for_calls(CALLS_PER_FAULT);
            proxy.set(Mode::Pass);
        });
        fault_effects.expect_contract().expect_by_policy();
    }
    drop(load);
    keeps_no_more_files_than(&tollkeeper, before);
}
