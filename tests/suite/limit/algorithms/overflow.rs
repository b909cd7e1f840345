//! Limits that overflow into each other admit together what they have room for, in their order.

use proptest::prelude::*;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::joint_charge::{admits_each, charge_together};
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult, JointLimit};
use tollkeeper::limit::overflow::ChainPosition;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};

use super::scenario::config;

/// Algorithms whose limits may overflow.
const OVERFLOWING: [Algorithm; 4] =
    [Algorithm::FixedWindow, Algorithm::TokenBucket, Algorithm::SlidingWindowCounter, Algorithm::SlidingWindowLog];

/// A limit of `requests` at a place of a chain.
fn chained(algorithm: Algorithm, requests: u64, period: Period, index: usize) -> Limit {
    let chain_position = if index == 0 { ChainPosition::First } else { ChainPosition::After };
    let spec = LimitSpec { sole: false, chain_position, ..LimitSpec::new(algorithm, requests, period) };
    Limit::new(&spec).expect("it may overflow")
}

/// Two to four limits of a chain.
fn chain() -> impl Strategy<Value = Vec<Limit>> {
    let unit = proptest::sample::select(vec![Unit::Second, Unit::Minute, Unit::Hour]);
    let one = (proptest::sample::select(&OVERFLOWING[..]), 0..8_u64, unit);
    proptest::collection::vec(one, 2..=4).prop_map(|limits| {
        let limits = limits.into_iter().enumerate();
        let limits = limits.map(|(index, (algorithm, requests, unit))| {
            chained(algorithm, requests, Period::new(unit, 1).expect("short"), index)
        });
        limits.collect()
    })
}

fn requests() -> impl Strategy<Value = Vec<(u64, Hits)>> {
    let hits = prop_oneof![
        1 => Just(Hits::Peek),
        6 => (1..9_u64).prop_map(Hits::Charge),
        1 => (1..9_u64).prop_map(Hits::Refund),
    ];
    let later_us = prop_oneof![3 => Just(0), 2 => 0..2_000_000_u64, 1 => 0..4_000_000_000_u64];
    proptest::collection::vec((later_us, hits), 1..40)
}

/// Hits that a limit would admit alone, `most` at most.
fn room(limit: &Limit, state: &State, now: Time, most: u64) -> u64 {
    let admits = |hits: &u64| state.admits(limit, now, ChargeRequest::new(Hits::Charge(*hits), 0));
    (1..=most).rev().find(admits).unwrap_or(0)
}

fn joint(limits: &[Limit]) -> Vec<JointLimit<'_>> {
    limits.iter().map(|limit| JointLimit { limit, rejects_others: true }).collect()
}

fn change(result: &ChargeResult) -> u64 {
    result.after.abs_diff(result.before)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn chain_takes_hits_in_its_order(limits in chain(), requests in requests()) {
        let joint = joint(&limits);
        let mut states: Vec<State> = limits.iter().map(State::empty_for).collect();
        let mut now = Time::from_secs(1_750_000_000);
        for (later_us, hits) in requests {
            now = now.plus_us(later_us);
            let request = ChargeRequest::new(hits, 0);
            let before = states.clone();
            let would_admit = admits_each(&joint, &before, now, request);
            let results = charge_together(&joint, &mut states, now, request);
            let admitted = results[0].admitted;
            prop_assert!(results.iter().all(|result| result.admitted == admitted), "one verdict");
            prop_assert!(would_admit.iter().all(|one| *one == admitted));
            match hits {
                Hits::Peek => {
                    let any = limits.iter().zip(&before).any(|(limit, state)| room(limit, state, now, 1) > 0);
                    prop_assert_eq!(admitted, any);
                    prop_assert_eq!(&states, &before);
                }
                Hits::Charge(count) => {
                    let mut rest = count;
                    let mut parts = Vec::new();
                    for (limit, state) in limits.iter().zip(&before) {
                        parts.push(room(limit, state, now, rest));
                        rest -= parts[parts.len() - 1];
                    }
                    prop_assert_eq!(admitted, rest == 0);
                    if admitted {
                        prop_assert_eq!(results.iter().map(change).collect::<Vec<_>>(), parts);
                    } else {
                        prop_assert_eq!(&states, &before);
                    }
                }
                Hits::Refund(count) => {
                    prop_assert!(admitted);
                    let mut rest = count;
                    for index in (0..limits.len()).rev() {
                        let given = rest.min(results[index].before);
                        if index > 0 && limits[index].algorithm() != Algorithm::SlidingWindowCounter {
                            prop_assert_eq!(change(&results[index]), given, "of {:?}", results);
                        }
                        rest -= given;
                    }
                }
            }
        }
    }

    #[test]
    fn rejected_request_passes_after_its_wait(limits in chain(), requests in requests()) {
        let joint = joint(&limits);
        let mut states: Vec<State> = limits.iter().map(State::empty_for).collect();
        let mut now = Time::from_secs(1_750_000_000);
        for (later_us, hits) in requests {
            now = now.plus_us(later_us);
            let request = ChargeRequest::new(hits, 0);
            let results = charge_together(&joint, &mut states, now, request);
            if results[0].admitted {
                prop_assert!(results.iter().all(|result| result.retry_after_us.is_none()));
                continue;
            }
            prop_assert!(results.iter().all(|result| result.retry_after_us == results[0].retry_after_us));
            let later = |wait_us| charge_together(&joint, &mut states.clone(), now.plus_us(wait_us), request);
            match results[0].retry_after_us {
                Some(wait_us) => prop_assert!(later(wait_us)[0].admitted, "after {} us", wait_us),
                None => prop_assert!(!later(1 << 45)[0].admitted),
            }
        }
    }
}

/// Plan 3 and credits 2 admit 5 of 7, then the plan's window ends and its 3 are free again.
#[test]
fn plan_and_credits_admit_what_both_have() {
    let day = Period::new(Unit::Day, 1).expect("short");
    let year = Period::new(Unit::Year, 1).expect("short");
    let limits = [chained(Algorithm::FixedWindow, 3, day, 0), chained(Algorithm::FixedWindow, 2, year, 1)];
    let joint = joint(&limits);
    let mut states = limits.each_ref().map(State::empty_for);
    // The window of 365 days ends in 80 days.
    let now = Time::from_secs(1_750_000_000);
    let mut charge = |hits, now| charge_together(&joint, &mut states, now, ChargeRequest::new(hits, 0));
    let admitted: Vec<bool> = (0..7).map(|_| charge(Hits::Charge(1), now)[0].admitted).collect();
    assert_eq!(admitted, [true, true, true, true, true, false, false]);
    // The credits come back first.
    let given_back = charge(Hits::Refund(1), now);
    assert_eq!(given_back.iter().map(|result| result.after).collect::<Vec<_>>(), [3, 1]);
    let tomorrow = now.plus_us(86_400_000_000);
    let results = charge(Hits::Charge(4), tomorrow);
    assert_eq!(
        results.iter().map(|result| (result.admitted, result.after)).collect::<Vec<_>>(),
        [(true, 3), (true, 2)]
    );
}

/// A limit beside a chain rejects for all, and the chain is not charged.
#[test]
fn limit_beside_a_chain_keeps_it_uncharged() {
    let minute = Period::new(Unit::Minute, 1).expect("short");
    let alone = Limit::new(&LimitSpec { sole: false, ..LimitSpec::new(Algorithm::TokenBucket, 1, minute) });
    let limits = [
        alone.expect("plain"),
        chained(Algorithm::FixedWindow, 3, minute, 0),
        chained(Algorithm::FixedWindow, 2, minute, 1),
    ];
    let joint = joint(&limits);
    let mut states = limits.each_ref().map(State::empty_for);
    let now = Time::from_secs(1_750_000_000);
    let mut charge = |hits| charge_together(&joint, &mut states, now, ChargeRequest::new(Hits::Charge(hits), 0));
    assert!(charge(1).iter().all(|result| result.admitted));
    let rejected = charge(1);
    assert_eq!(rejected.iter().map(|result| result.admitted).collect::<Vec<_>>(), [false, true, true]);
    assert_eq!(rejected.iter().map(|result| result.after).collect::<Vec<_>>(), [1, 1, 0]);
}

/// A bucket of a limit of 0 holds tokens, and admits none.
#[test]
fn request_beyond_all_limits_has_no_wait() {
    let minute = Period::new(Unit::Minute, 1).expect("short");
    let spec = LimitSpec { bucket_size: Some(10), ..LimitSpec::new(Algorithm::TokenBucket, 0, minute) };
    let first = Limit::new(&LimitSpec { sole: false, chain_position: ChainPosition::First, ..spec }).expect("plain");
    let limits = [first, chained(Algorithm::FixedWindow, 4, minute, 1)];
    let mut states = limits.each_ref().map(State::empty_for);
    let request = ChargeRequest::new(Hits::Charge(12), 0);
    let results = charge_together(&joint(&limits), &mut states, Time::from_secs(1_750_000_000), request);
    assert_eq!(results.iter().map(|result| result.retry_after_us).collect::<Vec<_>>(), [None, None]);
}
