//! Instruction counts of the steps of a decision, by situation, independent of the machine's load.
//!
//! Each figure covers 1000 steps and their loop, so its last three digits are thousandths of a step.
//! Steps run in callgrind, after two passes over all inputs. Its simulated caches (32 KiB for data, 8 MiB for the last
//! level, on every machine) are then as warm as those of a busy server. `LL Hits` are misses of the first cache,
//! `RAM Hits` misses of the last one. Estimated cycles are 1 per access, 5 per `LL Hit` and 35 per `RAM Hit`: use them
//! to compare situations, not as a time.
//!
//! Hashes have random seeds, so counts differ by some thousandths between runs. There is one thread: callgrind
//! serializes threads, so contention would not show. The bench asserts nothing.
//!
//! In `tests/bench`: `cargo bench --bench instructions [-- '*PART-OF-A-NAME*']` takes about ten minutes, mostly to prepare
//! the inputs, and compares with the previous run. It needs valgrind, and `cargo install gungraun-runner` in the version
//! of `gungraun` in Cargo.lock there.

#![expect(missing_docs, reason = "what the macros make has none")]

#[path = "situations.rs"]
mod situations;

use std::mem::forget;

use gungraun::{library_benchmark, library_benchmark_group, main};
use tollkeeper::limit::algorithm::Algorithm;

use self::situations::Situation;
use self::situations::charging::Charging;
use self::situations::deciding::{Deciding, Options};
use self::situations::holding::Holding;
use self::situations::matching::Matching;
use self::situations::messages::{Answering, Decoding, Encoding};
use self::situations::tables::LookingUp;

/// Same allocator as the program, because allocation is part of the measurement.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Runs the steps of one figure.
const STEPS: usize = 1000;

fn steps<S: Situation>(mut situation: S) -> S {
    (0..STEPS).for_each(|_| situation.step());
    situation
}

#[library_benchmark(teardown = forget)]
#[benches::exact_value(args = [10, 1000, 100_000], setup = Matching::exact)]
#[benches::key_alone(args = [10, 1000, 100_000], setup = Matching::default_key)]
#[benches::wildcard(args = [10, 1000, 100_000], setup = Matching::wildcard)]
#[benches::list(args = [10, 1000, 10_000], setup = Matching::lists)]
#[benches::network(args = [10, 1000, 10_000], setup = Matching::networks)]
#[benches::expression(args = [10, 1000], setup = Matching::expressions)]
#[benches::two_levels(args = [10, 1000, 100_000], setup = Matching::nested)]
#[benches::wildcard_in_file_order(args = [10, 1000, 10_000], setup = Matching::wildcard_in_order)]
fn find(situation: Matching) -> Matching {
    steps(situation)
}

#[library_benchmark(teardown = forget)]
#[benches::token_bucket(args = [1, 10_000, 1_000_000], setup = token_bucket)]
#[benches::leaky_bucket(args = [1, 10_000, 1_000_000], setup = leaky_bucket)]
#[benches::fixed_window(args = [1, 10_000, 1_000_000], setup = fixed_window)]
#[benches::sliding_window_counter(args = [1, 10_000, 1_000_000], setup = sliding_window_counter)]
#[benches::sliding_window_log(args = [1, 10_000, 1_000_000], setup = sliding_window_log)]
#[benches::long_log(args = [10, 100, 1000], setup = Charging::long_log)]
fn charge(situation: Charging) -> Charging {
    steps(situation)
}

fn token_bucket(keys: usize) -> Charging {
    Charging::new(Algorithm::TokenBucket, keys)
}

fn leaky_bucket(keys: usize) -> Charging {
    Charging::new(Algorithm::LeakyBucket, keys)
}

fn fixed_window(keys: usize) -> Charging {
    Charging::new(Algorithm::FixedWindow, keys)
}

fn sliding_window_counter(keys: usize) -> Charging {
    Charging::new(Algorithm::SlidingWindowCounter, keys)
}

fn sliding_window_log(keys: usize) -> Charging {
    Charging::new(Algorithm::SlidingWindowLog, keys)
}

#[library_benchmark(teardown = forget)]
#[benches::admitted(args = [1, 2, 5, 10], setup = admitted)]
#[benches::rejected(args = [1, 2, 5, 10], setup = rejected)]
#[benches::rejected_untracked(args = [1, 10], setup = rejected_untracked)]
#[benches::without_metrics(args = [1, 10], setup = without_metrics)]
#[benches::among_100_000_rules(args = [1, 10], setup = among_many_rules)]
#[benches::logged_1_percent(args = [1, 10], setup = logged_1_percent)]
#[benches::logged(args = [1, 10], setup = logged)]
fn decide(situation: Deciding) -> Deciding {
    steps(situation)
}

fn admitted(descriptors: usize) -> Deciding {
    Deciding::new(Options { descriptors, ..Options::default() })
}

fn rejected(descriptors: usize) -> Deciding {
    Deciding::new(Options { descriptors, rejected: true, ..Options::default() })
}

/// Rejections of keys of which each replaces another among the tracked ones.
fn rejected_untracked(descriptors: usize) -> Deciding {
    Deciding::new(Options { descriptors, rejected: true, top_keys: 256, ..Options::default() })
}

fn without_metrics(descriptors: usize) -> Deciding {
    Deciding::new(Options { descriptors, metrics: false, ..Options::default() })
}

fn among_many_rules(descriptors: usize) -> Deciding {
    Deciding::new(Options { descriptors, rules: 100_000, ..Options::default() })
}

fn logged_1_percent(descriptors: usize) -> Deciding {
    Deciding::new(Options { descriptors, logged: "0.01", ..Options::default() })
}

fn logged(descriptors: usize) -> Deciding {
    Deciding::new(Options { descriptors, logged: "1", ..Options::default() })
}

#[library_benchmark(teardown = forget)]
#[benches::values_of_13_bytes(args = [(1, 13), (10, 13)], setup = Decoding::in_place)]
#[benches::values_of_1000_bytes(args = [(1, 1000), (10, 1000)], setup = Decoding::in_place)]
#[benches::by_a_message(args = [(1, 13), (10, 13)], setup = Decoding::by_message)]
fn decode(situation: Decoding) -> Decoding {
    steps(situation)
}

#[library_benchmark(teardown = forget, setup = encoding)]
#[benches::without_headers((1, false), (10, false))]
#[benches::with_headers((1, true), (10, true))]
fn encode(situation: Encoding) -> Encoding {
    steps(situation)
}

fn encoding(descriptors: usize, headers: bool) -> Encoding {
    Encoding::new(Options { descriptors, headers, ..Options::default() })
}

#[library_benchmark(teardown = forget)]
#[benches::descriptors(args = [1, 2, 5, 10], setup = answering)]
fn answer(situation: Answering) -> Answering {
    steps(situation)
}

fn answering(descriptors: usize) -> Answering {
    Answering::new(Options { descriptors, ..Options::default() })
}

#[library_benchmark(teardown = forget)]
#[benches::rows(args = [10, 1_000_000], setup = LookingUp::each_in_turn)]
#[benches::by_zipf(args = [1_000_000], setup = LookingUp::by_zipf)]
fn look_up(situation: LookingUp) -> LookingUp {
    steps(situation)
}

#[library_benchmark(teardown = forget)]
#[benches::fixed_window(args = [0], setup = fixed_window_decision)]
#[benches::stream(args = [10, 100_000], setup = Holding::streams)]
#[benches::rejected(args = [10], setup = Holding::rejections)]
#[benches::reservation(args = [10, 10_000], setup = Holding::reservations)]
fn hold(situation: Holding) -> Holding {
    steps(situation)
}

/// Decisions by a fixed window, to compare with.
fn fixed_window_decision(_: usize) -> Holding {
    Holding::fixed_window()
}

library_benchmark_group!(
    name = steps_of_a_decision,
    benchmarks = [find, charge, decide, hold, decode, encode, answer, look_up]
);
main!(library_benchmark_groups = steps_of_a_decision);
