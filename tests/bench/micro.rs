//! Wall time of the steps of a decision, by situation.
//!
//! Compare only figures of one run on an idle machine; `instructions` counts the same situations independent of load.
//! With several threads, the figure is the time of a charge on its own thread: without contention it equals the time
//! with one thread. The bench asserts nothing.
//!
//! In `tests/bench`: `cargo bench --bench micro [-- PART-OF-A-NAME]`, groups: match, table, charge, decide, hold, decode,
//! encode, answer.

#[path = "situations.rs"]
mod situations;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
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

const RULES: [usize; 5] = [10, 100, 1000, 10_000, 100_000];
const KEYS: [usize; 4] = [1, 10_000, 100_000, 1_000_000];
const DESCRIPTORS: [usize; 4] = [1, 2, 5, 10];

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500))
        .configure_from_args();
    matches(&mut criterion.benchmark_group("match"));
    tables(&mut criterion.benchmark_group("table"));
    charges(&mut criterion.benchmark_group("charge"));
    decisions(&mut criterion.benchmark_group("decide"));
    logged_decisions(&mut criterion.benchmark_group("decide with log"));
    streams(&mut criterion.benchmark_group("hold"));
    messages(&mut criterion);
    criterion.final_summary();
}

type Group<'c> = BenchmarkGroup<'c, WallTime>;

/// Measures the situation that `make` builds, if it is selected.
fn measure<S: Situation>(group: &mut Group<'_>, name: &str, make: impl Fn() -> S) {
    let mut made = None;
    group.bench_function(name, |bencher| {
        let situation = made.get_or_insert_with(&make);
        bencher.iter(|| situation.step());
    });
}

fn matches(group: &mut Group<'_>) {
    for rules in RULES {
        measure(group, &format!("exact value/{rules} rules"), || Matching::exact(rules));
        measure(group, &format!("key alone/{rules} rules"), || Matching::default_key(rules));
        measure(group, &format!("wildcard/{rules} rules"), || Matching::wildcard(rules));
        measure(group, &format!("list/{rules} rules"), || Matching::lists(rules));
        measure(group, &format!("network/{rules} rules"), || Matching::networks(rules));
        measure(group, &format!("two levels/{rules} rules"), || Matching::nested(rules));
    }
    for rules in &RULES[..3] {
        measure(group, &format!("expression/{rules} rules"), || Matching::expressions(*rules));
    }
    // The time is linear in the number of rules, so the largest number adds no information.
    for rules in &RULES[..4] {
        measure(group, &format!("wildcard in file order/{rules} rules"), || Matching::wildcard_in_order(*rules));
    }
}

fn tables(group: &mut Group<'_>) {
    for rows in [1000, 1_000_000] {
        measure(group, &format!("look-up/{rows} rows"), || LookingUp::each_in_turn(rows));
    }
    measure(group, "look-up/1000000 rows by Zipf's law", || LookingUp::by_zipf(1_000_000));
}

fn charges(group: &mut Group<'_>) {
    for algorithm in Algorithm::ALL {
        for keys in KEYS {
            let mut made = None;
            for threads in [1, 2] {
                let name = format!("{algorithm}/{keys} keys/{threads} threads");
                group.bench_function(name, |bencher| {
                    let situation = made.get_or_insert_with(|| Charging::new(algorithm, keys));
                    bencher.iter_custom(|charges| charge_at_once(situation, threads, charges));
                });
            }
        }
    }
    measure(group, "sliding_window_log/1 keys, 1000 records/1 threads", || Charging::long_log(1000));
}

/// Time for several threads to make `charges` charges each, on the same counters at once.
fn charge_at_once(situation: &mut Charging, threads: usize, charges: u64) -> Duration {
    if threads == 1 {
        let started = Instant::now();
        (0..charges).for_each(|_| situation.step());
        return started.elapsed();
    }
    let ready = Barrier::new(threads);
    let took = std::thread::scope(|scope| {
        let command = |part| {
            let (mut situation, ready) = (situation.clone(), &ready);
            // Threads start at distant positions.
            situation.walk.at = situation.walk.positions * part / threads;
            scope.spawn(move || {
                ready.wait();
                let started = Instant::now();
                (0..charges).for_each(|_| situation.step());
                (started.elapsed(), situation)
            })
        };
        let threads: Vec<_> = (0..threads).map(command).collect();
        threads.into_iter().map(|thread| thread.join().expect("it charges")).collect::<Vec<_>>()
    });
    let longest = took.iter().map(|(took, _)| *took).max().unwrap_or_default();
    // The simulated time continues from the first thread's.
    if let Some((_, last)) = took.into_iter().next() {
        *situation = last;
    }
    longest
}

fn decisions(group: &mut Group<'_>) {
    for rules in [10, 100_000] {
        for descriptors in DESCRIPTORS {
            for (rejected, metrics) in [(false, true), (true, true), (false, false), (true, false)] {
                let name = format!(
                    "{descriptors} descriptors/{rules} rules/{}/metrics {}",
                    if rejected { "rejected" } else { "admitted" },
                    if metrics { "on" } else { "off" }
                );
                let options = Options { descriptors, rules, rejected, metrics, ..Options::default() };
                measure(group, &name, || Deciding::new(options));
            }
        }
    }
}

fn logged_decisions(group: &mut Group<'_>) {
    for logged in ["0.01", "1"] {
        let options = Options { logged, ..Options::default() };
        measure(group, &format!("1 descriptors/10 rules/admitted/logged {logged}"), || Deciding::new(options));
    }
}

fn streams(group: &mut Group<'_>) {
    measure(group, "decision by fixed_window", Holding::fixed_window);
    for open in [10, 1_000_000] {
        measure(group, &format!("stream/{open} open"), || Holding::streams(open));
        measure(group, &format!("rejected/{open} open"), || Holding::rejections(open));
        measure(group, &format!("rejected after a walk/{open} open"), || Holding::walks(open));
    }
    for open in [10, 10_000] {
        measure(group, &format!("reservation/{open} open"), || Holding::reservations(open));
    }
}

fn messages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    for descriptors in [1, 10] {
        for bytes in [13, 1000] {
            let name = format!("{descriptors} descriptors/values of {bytes} bytes");
            measure(&mut group, &name, || Decoding::in_place(descriptors, bytes));
            measure(&mut group, &format!("{name}/by a message"), || Decoding::by_message(descriptors, bytes));
        }
    }
    group.finish();
    let mut group = criterion.benchmark_group("encode");
    for descriptors in [1, 10] {
        for headers in [false, true] {
            let name = format!("{descriptors} descriptors/headers {}", if headers { "on" } else { "off" });
            let options = Options { descriptors, headers, ..Options::default() };
            measure(&mut group, &name, || Encoding::new(options));
        }
    }
    group.finish();
    let mut group = criterion.benchmark_group("answer");
    for descriptors in [1, 10] {
        let options = Options { descriptors, ..Options::default() };
        measure(&mut group, &format!("{descriptors} descriptors"), || Answering::new(options));
    }
}
