//! Redis and memory agree on held counters: on the answers to holders, and on every result of a charge.
//!
//! Random histories go to a store in memory and to one in Redis, call by call, at the same times. Both of them decide
//! descriptors of one to three counters, with charges, peeks and refunds, of which some counters are held.

use std::cell::Cell;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::calendar::Zone;
use tollkeeper::limit::charge::Charge;
use tollkeeper::limit::hold::{HeldAmount, HoldRequest};
use tollkeeper::limit::period::Unit;
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::window::WindowSpec;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::charge::StoreOutcome;
use tollkeeper::store::error::ChargeError;
use tollkeeper::store::memory::MemoryStore;
use tollkeeper::store::{Store, StoreContext};

use super::{SECOND_US, charge, holder, spec};
use crate::limit::algorithms::scenario::config;
use kit::redis::cluster::Cluster;
use kit::redis::options;
use kit::redis_counters::{TimeSource, start_store, wait_until_connected};
use kit::test_service::store_runtime;
use tokio::time::Instant;

const START: Time = Time::from_secs(1_783_513_790);

#[derive(Clone, Debug)]
enum Call {
    Charge(Hits),
    Adjust { counter: usize, holder: u8, request: HoldRequest },
}

#[derive(Clone, Debug)]
struct History {
    limits: Vec<Limit>,
    calls: Vec<(i64, Call)>,
}

/// Limits with counters of their own: no two have the same algorithm and unit.
fn limits() -> impl Strategy<Value = Vec<Limit>> {
    let one = |algorithm, unit, calendar: Option<&'static str>| {
        (0..60_u32, 1..60_u32, any::<bool>(), prop_oneof![Just(0), 0..3_000_000_u64]).prop_map(
            move |(requests, size, counted, wait)| {
                let is_bucket = algorithm == Algorithm::TokenBucket;
                let limit = LimitSpec {
                    bucket_size: is_bucket.then_some(size),
                    max_wait_us: (is_bucket && wait > 0).then_some(wait),
                    count_rejected: Some(counted && !is_bucket),
                    calendar_months: calendar == Some("months"),
                    window: calendar.filter(|zone| *zone != "months").map(window_in),
                    ..spec(algorithm, requests, unit)
                };
                Limit::new(&limit).unwrap()
            },
        )
    };
    let all = (
        one(Algorithm::FixedWindow, Unit::Minute, None),
        one(Algorithm::SlidingWindowCounter, Unit::Minute, None),
        one(Algorithm::TokenBucket, Unit::Minute, None),
        one(Algorithm::TokenBucket, Unit::Hour, None),
        one(Algorithm::FixedWindow, Unit::Month, Some("months")),
        one(Algorithm::FixedWindow, Unit::Hour, Some("Europe/Berlin")),
    );
    let all = all.prop_map(|(a, b, c, d, e, f)| vec![a, b, c, d, e, f]);
    all.prop_flat_map(|all| proptest::sample::subsequence(all, 1..=3))
}

/// Number that a division of 2026 begins with: the time in microseconds.
const FIRST_NUMBER: u64 = 1_767_225_600 * SECOND_US;

fn window_in(zone: &str) -> WindowSpec {
    WindowSpec::in_zone(Zone::from_name(zone).unwrap())
}

fn call() -> impl Strategy<Value = Call> {
    let hits = prop_oneof![
        5 => (1..40_u64).prop_map(Hits::Charge),
        1 => Just(Hits::Peek),
        1 => (1..40_u64).prop_map(Hits::Refund),
    ];
    let size = || prop_oneof![20 => 0..50_u64, 1 => 1_000_000_000..u64::from(u32::MAX)];
    let amount = (size(), size()).prop_map(|(hits, capacity)| HeldAmount { hits, capacity });
    let lasts_us = prop_oneof![3 => 0..120_000_000_u64, 1 => Just(u64::MAX)];
    // Numbers as divisions give them: they begin with the time in microseconds.
    let number = prop_oneof![1 => Just(0), 3 => FIRST_NUMBER..FIRST_NUMBER + 3];
    let request = (0..30_u64, number.clone(), number, amount, lasts_us, 0..3_u64).prop_map(
        |(used, number, first_number, wanted, lasts_us, demand)| HoldRequest {
            used,
            number,
            first_number,
            wanted,
            lasts_us,
            demand,
        },
    );
    prop_oneof![
        1 => hits.prop_map(Call::Charge),
        1 => (0..3_usize, 0..3_u8, request)
            .prop_map(|(counter, holder, request)| Call::Adjust { counter, holder, request }),
    ]
}

fn history() -> impl Strategy<Value = History> {
    let step = prop_oneof![
        6 => 0..30_000_000_i64,
        1 => 0..900_000_000_i64,
        1 => -90_000_000..0_i64,
        1 => Just(40 * 86_400_000_000),
    ];
    (limits(), proptest::collection::vec((step, call()), 1..40), any::<bool>()).prop_map(
        |(limits, calls, backwards)| {
            // A refund to a new counter is written in Redis only, which shows if the clock then runs backwards.
            let calls = calls.into_iter().map(|(step, call)| match call {
                Call::Charge(Hits::Refund(hits)) if backwards => (step, Call::Charge(Hits::Charge(hits))),
                call => (if backwards { step } else { step.abs() }, call),
            });
            History { limits, calls: calls.collect() }
        },
    )
}

impl History {
    fn check(&self, redis: &Store, value: &str) -> TestCaseResult {
        let memory = Store::from(MemoryStore::new(1 << 20));
        let entries = [Entry { key: b"value", value: value.as_bytes() }];
        let mut now = START;
        for (step, call) in &self.calls {
            now = Time::from_micros(now.as_micros().saturating_add_signed(*step));
            let deadline = Some(Instant::now() + Duration::from_secs(10));
            let context = StoreContext { now, deadline, span_ref: None, charge_times: &[] };
            match call {
                Call::Charge(hits) => {
                    let results = |store: &Store| {
                        let charge = charge(&entries, &self.limits, *hits);
                        let mut results = Vec::new();
                        let each = |_: usize, _: &Charge<'_>, outcome: Result<StoreOutcome, ChargeError>| {
                            results.push(outcome.expect("the store decides").results);
                        };
                        if let Some(pending) = store.charge_all(std::iter::once((0, charge)), context, each) {
                            store_runtime().block_on(pending);
                        }
                        results
                    };
                    prop_assert_eq!(results(redis), results(&memory), "{:?} at {}", call, now);
                }
                Call::Adjust { counter, holder: number, request } => {
                    let limit = &self.limits[counter % self.limits.len()];
                    let charge = charge(&entries, std::slice::from_ref(limit), Hits::Peek);
                    let answer = |store: &Store| {
                        store_runtime()
                            .block_on(store.adjust_hold(&charge, holder(*number), *request, context))
                            .expect("the store decides")
                    };
                    prop_assert_eq!(answer(redis), answer(&memory), "{:?} at {}", call, now);
                }
            }
        }
        Ok(())
    }
}

fn check(env: &[(&str, &str)]) {
    let redis = start_store(env, TimeSource::Caller);
    wait_until_connected(&redis);
    let redis = Store::from(redis);
    let values = Cell::new(0);
    let config = ProptestConfig { source_file: Some(file!()), ..config() };
    let outcome = TestRunner::new(config).run(&history(), |history| {
        values.set(values.get() + 1);
        history.check(&redis, &values.get().to_string())
    });
    let _within = store_runtime().enter();
    drop(redis);
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn redis_holds_like_memory() {
    let server = options().start();
    check(&[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &server.address())]);
}

#[test]
fn cluster_holds_like_memory() {
    let cluster = Cluster::start();
    check(&[("REDIS_TYPE", "cluster"), ("REDIS_URL", &cluster.addresses().join(","))]);
}
