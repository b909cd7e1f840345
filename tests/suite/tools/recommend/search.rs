//! Search: bisection finds what a scan of all limits finds, because a larger limit never rejects more keys.

use proptest::prelude::*;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::tools::recommend::demand::{ChargeSequence, ExistingLimit, LimitDemand, RecordedCharge};
use tollkeeper::tools::recommend::recommendation::{RejectedKeysGoal, admits_all, build_limit, recommend_limits};

/// Largest limit of the scan.
const MAX: u32 = 60;
const START_US: i64 = 1_783_512_000_000_000;

/// Charges and refunds, forwards and now and then backwards in time.
fn sequence() -> impl Strategy<Value = ChargeSequence> {
    let gap =
        prop_oneof![4 => 0..20_000_i64, 2 => 0..900_000_i64, 1 => -300_000..0_i64, 1 => -5_000_000..5_000_000_i64];
    let hits = prop_oneof![6 => Just(1_i64), 2 => 2..6_i64, 2 => -4..0_i64];
    let max_delay_us = prop_oneof![Just(0_u64), 0..400_000_u64];
    proptest::collection::vec((gap, hits, max_delay_us), 1..60).prop_map(|steps| {
        let mut at = START_US;
        let charges = steps.into_iter().map(|(gap, hits, max_delay_us)| {
            at += gap;
            let hits = Hits::new(hits.unsigned_abs(), hits < 0);
            RecordedCharge { at: Time::from_micros(at.unsigned_abs()), hits, max_delay_us }
        });
        ChargeSequence { key: 0, charges: charges.collect() }
    })
}

proptest! {
    #[test]
    fn bisection_finds_the_first_limit_of_a_scan(sequence in sequence()) {
        for algorithm in Algorithm::ALL {
            let period = Period::new(Unit::Second, 1).unwrap();
            let can_wait = matches!(algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket);
            for max_wait_us in [None, can_wait.then_some(250_000)] {
                let spec = LimitSpec { max_wait_us, ..LimitSpec::new(algorithm, 5, period) };
                let asked = ExistingLimit {
                    rule: "shop.login".to_owned(),
                    location: String::new(),
                    plan: None,
                    name: String::new(),
                    limit: Limit::new(&spec).unwrap(),
                    active: None,
                    log_max: 10_000,
                };
                let admitted = |number| admits_all(&build_limit(&asked, period, number).unwrap(), &sequence);
                let admitted: Vec<bool> = (0..=MAX).map(admitted).collect();
                prop_assert!(admitted.is_sorted(), "{algorithm}: a larger limit rejects more: {admitted:?}");
                let scanned = admitted.iter().position(|admitted| *admitted).map(|n| u64::try_from(n).unwrap());
                let demand = LimitDemand { keys: 1, sequences: vec![sequence.clone()], ..LimitDemand::default() };
                let found = recommend_limits(&demand, &asked, RejectedKeysGoal::Keys(0)).limits;
                let found = found.first().map(|found| found.limit.requests_per_unit());
                prop_assert_eq!(found.filter(|number| *number <= MAX.into()), scanned, "{}", algorithm);
            }
        }
    }
}
