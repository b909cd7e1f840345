//! The simulated Redis agrees with redis-server: the same commands at the same times get the same replies, and leave the
//! same keys, values and expiries.
//!
//! The clock of the redis-server stands still and is set before commands, so that all comparisons are exact.
//! `WORLD_REDIS_STEPS=100000 cargo test --test world redis_agreement` runs more steps, `WORLD_REDIS_SEED=7` others.

mod server_pair;
mod random_commands;
mod script_language;
mod states;

use kit::seeded_random::Chance;

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
            pair.compare_replies(&random_commands::command(&mut chance));
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
