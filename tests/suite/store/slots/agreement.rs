//! The script of slots in Redis against the pure table, over random histories: each result is the same.

use std::time::Duration;

use smallvec::SmallVec;
use tollkeeper::limit::charge::{Charge, ChargeRequest, Counter};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::request::Entry;
use tollkeeper::limit::slot_table::SlotTable;
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::charge::{ChargeContext, CommitMode};

use super::table::{LEAST_AGE_US, Steps, concurrent_limit, take_step};
use kit::redis::cluster::Cluster;
use kit::redis::options;
use kit::redis_counters::{LONG_TIMEOUT, TimeSource, start_store, wait_until_connected};
use kit::test_service::store_runtime;
use tokio::time::Instant;

fn compare_with_table(env: &[(&str, &str)], seeds: u64) {
    let redis = start_store(env, TimeSource::Caller);
    wait_until_connected(&redis);
    redis.fallback().slot_holders().set_timeout(Duration::from_micros(2 * LEAST_AGE_US));
    for seed in 0..kit::histories(seeds) {
        let (mut steps, mut table) = (Steps::new(seed), SlotTable::default());
        let value = format!("seed {seed}");
        let entries = [Entry { key: b"k", value: value.as_bytes() }];
        for turn in 0..300 {
            let step = steps.next_step();
            // Dead holders are an argument of each call.
            redis.fallback().slot_holders().set_shared_dead_holders(steps.dead.iter().copied(), step.now);
            let expected = take_step(&mut table, step, &steps.dead);
            let limit = concurrent_limit(step.limit);
            let tag = hash_limit_identity(&limit, 0);
            let counter = Counter { limit: &limit, shadow: false, quota: false, tag, epoch: 0 };
            let path = CounterPath { domain: "slots", entries: &entries, shared: &[], candidate: None };
            let request = ChargeRequest::new(step.hits, 0);
            let charge = Charge::new(path, SmallVec::from_iter([counter]), request);
            let charge = Charge { slot: Some(&step.slot), ..charge };
            let context = ChargeContext::new(step.now, Instant::now() + LONG_TIMEOUT);
            let outcomes = store_runtime().block_on(redis.charge_all(&[charge], CommitMode::Commit, context));
            let outcome = outcomes[0].as_ref().unwrap_or_else(|error| panic!("seed {seed}, turn {turn}: {error}"));
            assert_eq!(outcome.results[0], expected, "seed {seed}, turn {turn}: {step:?}");
        }
    }
}

#[test]
fn script_agrees_with_the_table() {
    let server = options().start();
    compare_with_table(&[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &server.address())], 10);
}

#[test]
fn script_agrees_with_the_table_in_a_cluster() {
    let cluster = Cluster::start();
    compare_with_table(&[("REDIS_TYPE", "cluster"), ("REDIS_URL", &cluster.addresses().join(","))], 3);
}
