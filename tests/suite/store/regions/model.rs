//! Global limits in a simulation of regions: what all of them admit stays within the promise, over thousands of runs.
//!
//! The counters of both Redis, the clocks and the membership do no I/O, so a run needs no Redis and no time: one thread
//! goes from event to event. Clocks are hours apart and drift; calls are late, and some run after their deadline; links
//! to the global Redis take 50 to 300 ms, lose and repeat messages, and are cut for long; replicas crash, the global
//! Redis pauses, a region's Redis loses its data or jumps in time, and rules change in one region first. [`ledger`]
//! checks the admissions by the true time of the global Redis.
//!
//! `PROPTEST_CASES=40000 cargo test --test suite regions::model` executes 5000 runs of each algorithm.

mod ledger;
mod world;

use tollkeeper::limit::algorithm::Algorithm;

use self::ledger::check;
use self::world::{Breakage, Plan, Tally, World};

const ALGORITHMS: [Algorithm; 3] = [Algorithm::FixedWindow, Algorithm::SlidingWindowCounter, Algorithm::TokenBucket];

fn runs() -> u64 {
    kit::histories(8)
}

/// Executes one run, and checks its admissions.
fn run(algorithm: Algorithm, seed: u64, breakage: Option<Breakage>) -> Result<Tally, String> {
    let plan = Plan::random(algorithm, seed, breakage);
    let world = World::live(&plan);
    check(&plan, &world).map_err(|problem| format!("{problem} in run {seed} of {plan:?}"))?;
    Ok(world.tally)
}

#[test]
fn all_regions_together_keep_the_promise() {
    for algorithm in ALGORITHMS {
        let mut tally = Tally::default();
        for seed in 0..runs() {
            tally.add(&run(algorithm, seed, None).unwrap_or_else(|problem| panic!("{problem}")));
        }
        // A model in which nothing happens would prove nothing.
        let Tally { requests, admitted, from_loss, grants, void_grants, unknown, cut_off, jumps } = tally;
        let counts = [requests, admitted, from_loss, grants, void_grants, unknown, cut_off, jumps];
        assert!(counts.iter().all(|count| *count > 10), "{algorithm:?}: {tally:?}");
        assert!(admitted * 5 > requests && grants * 3 > void_grants, "{algorithm:?}: {tally:?}");
    }
}

#[test]
fn broken_rules_are_noticed() {
    for (breakage, algorithms) in Breakage::ALL {
        for algorithm in algorithms {
            let broken = (0..20 * runs()).find_map(|seed| run(*algorithm, seed, Some(breakage)).err());
            assert!(broken.is_some(), "{breakage:?} of {algorithm:?} changes nothing that is checked");
        }
    }
}
