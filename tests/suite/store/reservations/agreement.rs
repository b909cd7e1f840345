//! The script of reservations in Redis against the memory store, over random histories: each result is the same.

use std::time::Duration;

use tollkeeper::limit::Limit;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Entry;
use tollkeeper::limit::reservation::UnsettledPolicy;
use tollkeeper::limit::slot::SlotChange;
use tollkeeper::limit::{LimitSpec, charge::ChargeResult};
use tollkeeper::store::charge::{ChargeContext, CommitMode};
use tollkeeper::store::memory::MemoryStore;

use super::steps::{Kind, Steps, charge_of, reserving_limit};
use kit::redis::cluster::Cluster;
use kit::redis::options;
use kit::redis_counters::{LONG_TIMEOUT, TimeSource, start_store, wait_until_connected};
use kit::test_service::store_runtime;
use tokio::time::Instant;

/// Limits that are charged together, of which one at least reserves.
fn limits_of(kind: Kind, variant: u64, requests: u32) -> Vec<Limit> {
    let unsettled = if variant.is_multiple_of(2) { UnsettledPolicy::Keep } else { UnsettledPolicy::Return };
    let own = reserving_limit(kind, requests, unsettled, None);
    let plain = |algorithm, requests| {
        Limit::new(&LimitSpec::new(algorithm, requests, Period::new(Unit::Minute, 1).unwrap())).unwrap()
    };
    match variant % 5 {
        0 | 1 => vec![own],
        2 => vec![own, plain(Algorithm::Concurrent, 4)],
        3 => vec![plain(Algorithm::TokenBucket, 100), own],
        // Two fixed windows would share a counter.
        _ if kind == Kind::Fixed => vec![own],
        _ => vec![reserving_limit(Kind::Fixed, 60, UnsettledPolicy::Return, Some(5)), own],
    }
}

/// Numbers of steps that met a case, so that a history that meets none fails.
#[derive(Debug, Default)]
struct Met {
    taken: u32,
    settled: u32,
    late: u32,
    unsettled: u32,
    above_estimate: u32,
    gave_back: u32,
}

impl Met {
    fn count(&mut self, result: &ChargeResult) {
        self.taken += u32::from(result.slot == SlotChange::Taken);
        self.settled += u32::from(result.slot == SlotChange::Freed);
        self.late += u32::from(result.slot == SlotChange::Late);
        self.unsettled += result.expired_seats;
        self.above_estimate += u32::from(result.above_estimate > 0);
        self.gave_back += u32::from(result.after < result.before);
    }
}

fn compare(env: &[(&str, &str)], seeds: u64) {
    let redis = start_store(env, TimeSource::Caller);
    wait_until_connected(&redis);
    for kind in Kind::ALL {
        let mut met = Met::default();
        for seed in 0..kit::histories(seeds) {
            let memory = MemoryStore::new(64 << 20);
            let mut steps = Steps::new(seed, kind);
            let value = format!("{kind:?} {seed}");
            let entries = [Entry { key: b"k", value: value.as_bytes() }];
            for turn in 0..300 {
                let step = steps.next_step();
                for holders in [redis.fallback().slot_holders(), memory.slot_holders()] {
                    holders.set_timeout(Duration::from_secs(4));
                    holders.set_shared_dead_holders(steps.dead.iter().copied(), step.now);
                }
                let mut limits = limits_of(kind, seed, step.limit);
                if step.slot.action.is_release() {
                    // A release is sent to no other limits.
                    limits.retain(Limit::follows_streams);
                }
                let charge = charge_of(&step, &limits, &entries);
                let decide_in_memory = || memory.charge(&charge, step.now).expect("there is room");
                let mut expected = vec![decide_in_memory()];
                // Two descriptors of a request may have one counter.
                if turn % 3 == 0 {
                    expected.push(decide_in_memory());
                }
                let charges = vec![charge.clone(); expected.len()];
                let context = ChargeContext::new(step.now, Instant::now() + LONG_TIMEOUT);
                let outcomes = store_runtime().block_on(redis.charge_all(&charges, CommitMode::Commit, context));
                let at = format!("{kind:?}, seed {seed}, turn {turn}: {step:?}");
                for (expected, outcome) in expected.iter().zip(&outcomes) {
                    let outcome = outcome.as_ref().unwrap_or_else(|error| panic!("{at}: {error}"));
                    assert_eq!(outcome.results, *expected, "{at}");
                    expected.iter().for_each(|result| met.count(result));
                }
            }
        }
        let Met { taken, settled, late, unsettled, above_estimate, gave_back } = met;
        let each = [taken, settled, late, unsettled, above_estimate, gave_back];
        assert!(each.iter().all(|times| *times > 0), "{kind:?} {met:?}");
    }
}

#[test]
fn script_agrees_with_memory() {
    let server = options().start();
    compare(&[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &server.address())], 5);
}

#[test]
fn script_agrees_with_memory_in_a_cluster() {
    let cluster = Cluster::start();
    compare(&[("REDIS_TYPE", "cluster"), ("REDIS_URL", &cluster.addresses().join(","))], 2);
}
