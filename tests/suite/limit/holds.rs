//! Holds on counters: bounds that hold for any history, and every store.
//!
//! `bounds` is a property of the pure arithmetic. `agreement` compares Redis with memory, call by call. `in_stores` has
//! the behaviour of the stores: shared Redis, deployments, resets, expiry, the fallback.

mod agreement;
mod bounds;
mod in_stores;

use smallvec::SmallVec;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::charge::{Charge, ChargeRequest, Counter};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::hold::{HeldAmount, HoldRequest, PoolId};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;

const SECOND_US: u64 = 1_000_000;

/// Algorithms whose hits can be held.
const HELD: [Algorithm; 3] = [Algorithm::FixedWindow, Algorithm::SlidingWindowCounter, Algorithm::TokenBucket];

fn spec(algorithm: Algorithm, requests_per_unit: u32, unit: Unit) -> LimitSpec {
    let spec = LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(unit, 1).unwrap());
    LimitSpec { sole: false, count_rejected: None, ..spec }
}

fn limit(algorithm: Algorithm, requests_per_unit: u32, unit: Unit) -> Limit {
    Limit::new(&spec(algorithm, requests_per_unit, unit)).unwrap()
}

fn holder(number: u8) -> PoolId {
    PoolId([number; 16])
}

/// Hits of windows, or capacity of a bucket.
fn lent(algorithm: Algorithm, hits: u64) -> HeldAmount {
    match algorithm {
        Algorithm::TokenBucket => HeldAmount { hits: 0, capacity: hits },
        _ => HeldAmount { hits, capacity: 0 },
    }
}

/// Size of a lent amount.
fn size(amount: HeldAmount) -> u64 {
    amount.hits + amount.capacity
}

/// Request to hold hits for 20 s.
fn hold(used: u64, wanted: HeldAmount) -> HoldRequest {
    HoldRequest { used, wanted, lasts_us: 20 * SECOND_US, demand: size(wanted), ..HoldRequest::default() }
}

/// Charge on the counters of a value.
fn charge<'a>(entries: &'a [Entry<'a>], limits: &'a [Limit], hits: Hits) -> Charge<'a> {
    let counters: SmallVec<[Counter<'a>; 1]> = limits
        .iter()
        .map(|limit| Counter { limit, shadow: false, quota: false, tag: hash_limit_identity(limit, 0), epoch: 0 })
        .collect();
    let path = CounterPath { domain: "held", entries, shared: &[], candidate: None };
    Charge::new(path, counters, ChargeRequest::new(hits, 0))
}

#[test]
fn refusal_names_what_cannot_be_divided() {
    for algorithm in Algorithm::ALL {
        let refusal = limit(algorithm, 5, Unit::Minute).reason_against_holds();
        assert_eq!(refusal.is_none(), HELD.contains(&algorithm), "{algorithm}: {refusal:?}");
        assert!(refusal.is_none_or(|reason| reason.starts_with(algorithm.name())), "{refusal:?}");
    }
}
