//! Admissions under more demand than the limit, and their cost in calls; without faults.

use std::fmt::Write as _;

use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec, Overshoot};

use super::ledger::By;
use super::scenario::{Arrival, Network, Plan, counted, limit};
use super::simulation::World;
use super::{ALGORITHMS, publish};
use kit::seeded_random::Chance;

const MS: u64 = 1_000;
const S: u64 = 1_000_000;
/// Periods of a run; the last ones are measured, because a bucket starts full.
const PERIODS: u64 = 6;
const MEASURED: u64 = 3;

/// Run without faults, with one descriptor of this limit.
fn calm(limit: Limit, replicas: usize, periods: u64) -> Plan {
    let period = limit.period().micros();
    let start = 1_700_000_000 * S / period * period;
    Plan {
        replicas,
        places: 16,
        live: Some(replicas as u64),
        keys: vec![SmallVec::from_iter([counted(limit, true, 1)])],
        network: Network::quick((200, 2 * MS), 15 * MS),
        frozen: Vec::new(),
        cut: Vec::new(),
        replica_changes: Vec::new(),
        arrivals: Vec::new(),
        adjustments: Vec::new(),
        changed_keys: Vec::new(),
        reloads: Vec::new(),
        claim: 30 * S,
        bytes: 64 << 20,
        start,
        end: start + periods * period,
    }
}

/// Requests of one hit, this many per mille of the limit in each period.
fn add_requests(plan: &mut Plan, per_mille: u64, chance: &mut Chance) {
    let limit = plan.keys[0][0].limit;
    let count = limit.requests_per_unit() * per_mille / 1000 * PERIODS;
    let step = (plan.end - plan.start) / count;
    let arrival =
        |place| Arrival { at: plan.start + place * step + chance.below(step), key: 0, replica: None, hits: 1 };
    plan.arrivals = (0..count).map(arrival).collect();
}

/// Hits that a strict limit admits of a run's requests from a time on.
fn strict_admissions(plan: &Plan, limit: &Limit, from: u64) -> u64 {
    let mut state = State::empty(limit.algorithm());
    let mut admits =
        |it: &&Arrival| state.charge(limit, Time::from_micros(it.at), ChargeRequest::new(Hits::Charge(1), 0)).admitted;
    plan.arrivals.iter().filter(&mut admits).filter(|it| it.at >= from).count() as u64
}

#[test]
fn overload_admits_at_least_95_percent_of_the_limit() {
    let (mut table, mut wasted) = (String::new(), Vec::new());
    let limits = [(40, 1), (100, 1), (400, 1), (100, 10), (400, 10), (300, 60)];
    let each = ALGORITHMS.into_iter().flat_map(|algorithm| limits.map(|limit| (algorithm, limit)));
    let each = each.flat_map(|(algorithm, limit)| [1, 3, 8].map(|replicas| (algorithm, limit, replicas)));
    for (turn, (algorithm, (requests, seconds), replicas)) in each.enumerate() {
        let (per_mille, overshoot) = ([1300, 3000][turn / 3 % 2], [1, 5, 50][(turn + turn / 6) % 3]);
        let period = Period::new(Unit::Second, seconds).unwrap();
        let spec = LimitSpec::new(algorithm, requests, period);
        let line = admitted(limit(spec, Overshoot::MilliPercent(1000 * overshoot)), replicas, per_mille);
        let (charged, altogether, calls) = line;
        let what = format!("{algorithm} | {requests} per {seconds} s | {replicas} | {per_mille} | {overshoot} %");
        writeln!(table, "| {what} | {charged:.3} | {altogether:.3} | {calls} |").unwrap();
        if charged < 0.95 {
            wasted.push(format!("{what}: {charged:.3}, with shares {altogether:.3}"));
        }
    }
    publish(&table);
    assert!(wasted.is_empty(), "{}", wasted.join("\n"));
}

/// Hits admitted by leases and Redis, and with shares, relative to a strict limit; and calls per 1000 requests.
fn admitted(limit: Limit, replicas: usize, per_mille: u64) -> (f64, f64, u64) {
    let (mut charged, mut altogether, mut strict, mut calls, mut requests) = (0, 0, 0, 0, 0);
    for seed in 0..2 {
        let mut plan = calm(limit, replicas, PERIODS);
        add_requests(&mut plan, per_mille, &mut Chance::new(seed));
        let from = plan.end - MEASURED * limit.period_us();
        let (outcome, _) = World::live(&plan, seed);
        let used = outcome.uses[0].iter().filter(|it| it.at >= from);
        let used: Vec<_> = used.map(|it| (it.hits, it.by)).collect();
        charged += used.iter().filter(|(_, by)| *by != By::Share).map(|(hits, _)| hits).sum::<u64>();
        altogether += used.iter().map(|(hits, _)| hits).sum::<u64>();
        strict += strict_admissions(&plan, &limit, from);
        (calls, requests) = (calls + outcome.calls, requests + outcome.requests);
    }
    (charged as f64 / strict as f64, altogether as f64 / strict as f64, 1000 * calls / requests)
}

#[test]
fn key_at_one_replica_costs_at_most_one_call_per_request() {
    for algorithm in ALGORITHMS {
        for (requests, seconds) in [(100, 1), (1000, 60)] {
            let period = Period::new(Unit::Second, seconds).unwrap();
            let limit = limit(LimitSpec::new(algorithm, requests, period), Overshoot::MilliPercent(5_000));
            for pause in [5 * MS, 20 * MS, 60 * MS, 105 * MS, 150 * MS, 400 * MS, 1100 * MS, 1900 * MS, 7 * S] {
                // Each hit above the limit costs one call to reject.
                for hits in [1, 5].into_iter().filter(|hits| hits * limit.period_us() / pause < requests) {
                    check_calls_of_returning_caller(limit, pause, hits);
                }
            }
        }
    }
}

/// Checks that one caller that returns after a pause costs at most one call per request.
fn check_calls_of_returning_caller(limit: Limit, pause: u64, hits: u64) {
    for (seed, replicas) in [(0, 1), (1, 3)] {
        let mut plan = calm(limit, replicas, 1);
        let mut chance = Chance::new(seed);
        let mut at = plan.start;
        for _ in 0..200 {
            at += chance.between(pause * 9 / 10, pause * 11 / 10);
            plan.arrivals.push(Arrival { at, key: 0, replica: Some(0), hits });
        }
        plan.end = at;
        let (outcome, _) = World::live(&plan, seed);
        let (calls, requests) = (outcome.calls, outcome.requests);
        assert!(calls <= requests, "{calls} calls for {requests} visits of {hits}, {pause} us apart, under {limit:?}");
    }
}
