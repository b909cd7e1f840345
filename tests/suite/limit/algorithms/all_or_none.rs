//! Several limits on one descriptor are charged all or none.
//!
//! If one limit rejects, only limits that count rejected hits are charged. Shadow limits reject nothing.

use proptest::prelude::*;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::Limit;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::joint_charge::charge_together;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{ChargeRequest, JointLimit};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Hits, MAX_HITS};

use super::model::Model;
use super::scenario::{config, limit};

/// A charge: microseconds since the previous one, hits, and maximum delay in microseconds.
type Charge = (u64, Hits, u64);

fn charges() -> impl Strategy<Value = Vec<Charge>> {
    let hits = prop_oneof![
        1 => Just(Hits::Peek),
        8 => (1..6_u64).prop_map(Hits::Charge),
        1 => Just(Hits::Charge(MAX_HITS)),
        1 => (1..6_u64).prop_map(Hits::Refund),
    ];
    let later = prop_oneof![3 => Just(0), 2 => 0..1_000_000_u64, 1 => 0..100_000_000_u64];
    let max_delay_us = prop_oneof![Just(0), 0..30_000_000_u64];
    proptest::collection::vec((later, hits, max_delay_us), 1..30)
}

/// A limit with its enforced flag.
fn enforced_limit() -> impl Strategy<Value = (Limit, bool)> {
    let period = proptest::sample::select(vec![(Unit::Second, 1), (Unit::Second, 10), (Unit::Minute, 1)]);
    (proptest::sample::select(&Algorithm::ALL[..]), period).prop_flat_map(|(algorithm, (unit, multiplier))| {
        let period = Period::new(unit, multiplier).expect("not too long");
        (limit(algorithm, period, false), prop_oneof![3 => Just(true), 1 => Just(false)])
    })
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn several_limits_are_charged_all_or_none(pairs in proptest::collection::vec(enforced_limit(), 0..5), charges in charges()) {
        let limits: Vec<_> = pairs.iter().map(|(limit, enforced)| JointLimit { limit, rejects_others: *enforced }).collect();
        let mut states: Vec<_> = limits.iter().map(|one| State::empty(one.limit.algorithm())).collect();
        let mut models: Vec<_> = limits.iter().map(|_| Model::new()).collect();
        let mut now = Time::from_secs(1_750_000_000);
        for (later_us, hits, max_delay_us) in charges {
            now = now.plus_us(later_us);
            let request = ChargeRequest::new(hits, max_delay_us);
            let before = states.clone();
            let results = charge_together(&limits, &mut states, now, request);
            prop_assert_eq!(results.len(), limits.len());
            let rejected = limits.iter().zip(&results).any(|(one, result)| one.rejects_others && !result.admitted);
            for (index, one) in limits.iter().enumerate() {
                let expected = models[index].charge(one.limit, now, ChargeRequest { rejected_elsewhere: rejected, ..request });
                prop_assert_eq!(results[index], expected, "{:?} under {:?}", request, one);
                if rejected && !one.limit.counts_rejected_hits() {
                    prop_assert_eq!(&states[index], &before[index]);
                    prop_assert_eq!(results[index].delay_us, 0);
                }
            }
        }
    }

    #[test]
    fn single_limit_in_a_group_equals_the_limit_alone((limit, enforced) in enforced_limit(), charges in charges()) {
        let (mut alone, mut together) = (State::empty(limit.algorithm()), [State::empty(limit.algorithm())]);
        let mut now = Time::from_secs(1_750_000_000);
        for (later_us, hits, max_delay_us) in charges {
            now = now.plus_us(later_us);
            let request = ChargeRequest::new(hits, max_delay_us);
            let results = charge_together(&[JointLimit { limit: &limit, rejects_others: enforced }], &mut together, now, request);
            prop_assert_eq!(results[0], alone.charge(&limit, now, request));
            prop_assert_eq!(&together[0], &alone);
        }
    }
}

/// A rule that changes its algorithm leaves a state of the old algorithm.
#[test]
fn state_of_another_algorithm_counts_as_empty() {
    let period = Period::new(Unit::Minute, 1).expect("not too long");
    let request = ChargeRequest::new(Hits::Charge(3), 0);
    for from in Algorithm::ALL {
        for to in Algorithm::ALL.into_iter().filter(|&to| to != from) {
            let mut spec = tollkeeper::limit::LimitSpec::new(to, 3, period);
            spec.queue_size = (to == Algorithm::LeakyBucket).then_some(3);
            let limit = Limit::new(&spec).expect("a plain limit");
            let now = Time::from_secs(1_750_000_000);
            let mut state = State::empty(from);
            assert!(state.admits(&limit, now, request), "{from} as {to}");
            assert_eq!(
                state.charge(&limit, now, request),
                State::empty(to).charge(&limit, now, request),
                "{from} as {to}"
            );
            assert!(!state.admits(&limit, now, request), "{from} as {to}: not kept");
        }
    }
}
