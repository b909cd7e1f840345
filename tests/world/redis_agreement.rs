//! The simulated Redis agrees with redis-server: the same commands at the same times get the same replies, and leave
//! the same keys, values and expiries.
//!
//! Texts of errors are those of Redis 7.0; another version differs in some. The clock of the redis-server stands still
//! and is set before commands, so that all comparisons are exact.
//! `WORLD_REDIS_STEPS=100000 cargo test --test world redis_agreement` runs more steps, `WORLD_REDIS_SEED=7` others.

mod server_pair;
mod random_commands;
mod script_language;
mod states;
mod protocol;
mod faults;
mod script_calls;
mod charges;
mod shared_records;

use std::time::Instant;

use kit::seeded_random::Chance;

use charges::{DESCRIPTOR_KINDS, Descriptor};
use script_calls::ScriptCalls;
use server_pair::{Protocol, ServerPair};

/// Number of random steps of a test.
fn step_count() -> u64 {
    number_of_variable("WORLD_REDIS_STEPS", 10_000)
}

fn number_of_variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

fn chance() -> Chance {
    Chance::new(number_of_variable("WORLD_REDIS_SEED", 1))
}

#[test]
fn replies_keys_and_expiries_of_random_commands_agree() {
    for protocol in [Protocol::Resp2, Protocol::Resp3] {
        let (mut pair, mut chance) = (ServerPair::start(), chance());
        pair.select_protocol(protocol);
        for step in 0..step_count() / 2 {
            if chance.one_in(3) {
                random_commands::pass_time(&mut pair, &mut chance);
            }
            let now_ms = pair.now_us() / 1000;
            pair.compare_replies(&random_commands::command(&mut chance, now_ms));
            if step % 50 == 0 {
                pair.compare_keys();
            }
        }
        pair.compare_keys();
    }
}

#[test]
fn values_and_errors_of_scripts_agree() {
    let (mut pair, mut chance) = (ServerPair::start(), chance());
    script_language::compare_scripts(&mut pair);
    for _ in 0..step_count() / 5 {
        script_language::compare_struct(&mut pair, &mut chance);
    }
}

#[test]
fn charges_and_grants_of_all_scripts_agree() {
    let mut calls = ScriptCalls::new(ServerPair::start(), chance());
    let mut descriptors: Vec<Descriptor> =
        (0..DESCRIPTOR_KINDS).map(|tag| Descriptor::random(&mut calls, tag)).collect();
    let began = Instant::now();
    for step in 0..step_count() {
        if calls.chance.one_in(3) {
            calls.pass_time();
        }
        let descriptor = calls.chance.place(descriptors.len());
        match calls.chance.below(20) {
            0..=11 => calls.charge(&descriptors[descriptor]),
            12 => calls.charge_merged(&descriptors),
            13 | 14 => calls.adjust_hold(&descriptors[descriptor]),
            _ => calls.call_shared_record(&descriptors),
        }
        if step % 50 == 49 {
            calls.pair.compare_keys();
        }
        if step % 100 == 99 {
            descriptors[descriptor] = descriptors[descriptor].replacement(&mut calls);
        }
        if step % 2000 == 1999 {
            calls.command(&[b"FLUSHALL"]);
        }
    }
    let rate = step_count() * 1_000_000 / u64::try_from(began.elapsed().as_micros()).expect("a short time");
    println!("{rate} steps per second; results {:?}, errors {:?}", calls.done, calls.failed);
    let expired = calls.pair.simulated.expired_keys();
    assert!(expired > 0, "no key expired");
    assert_eq!(calls.done.len(), CALL_NAMES, "calls of all kinds have results: {:?}", calls.done);
}

/// Number of kinds of calls.
const CALL_NAMES: usize = 24;
