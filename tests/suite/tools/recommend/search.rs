//! Search: bisection finds what a scan of all limits finds, because a larger limit never rejects more keys.

use proptest::prelude::*;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::tools::recommend::demand::{ChargeSequence, RecordedCharge};
use tollkeeper::tools::recommend::recommendation::{
    FixedLimitFields, LimitTemplate, SearchRange, admits_all, find_smallest_admitting_all,
};

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
    fn bisection_finds_the_first_limit_of_a_scan(sequence in sequence(), factor in 1..4_u32, first in 1..100_u32) {
        for algorithm in Algorithm::ALL {
            let can_wait = matches!(algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket);
            for max_wait_us in [None, can_wait.then_some(250_000)] {
                let fixed_keys = FixedLimitFields { max_wait_us, calendar_months: false, window: None, ban: None, log_max: 10_000 };
                let period = Period::new(Unit::Second, 1).unwrap();
                let template = LimitTemplate { algorithm, period, capacity_factor: factor, fixed_keys };
                let admitted_from = |limit_of: &dyn Fn(u32) -> Option<tollkeeper::limit::Limit>| {
                    let admitted: Vec<bool> = (0..=MAX).map(|n| admits_all(&limit_of(n).unwrap(), &sequence)).collect();
                    prop_assert!(admitted.is_sorted(), "{algorithm}: a larger limit rejects more: {admitted:?}");
                    let scanned = admitted.iter().position(|admitted| *admitted).map(|n| u32::try_from(n).unwrap());
                    let found = find_smallest_admitting_all(&sequence, SearchRange { first, max: MAX }, limit_of);
                    prop_assert_eq!(found, scanned, "{}", algorithm);
                    Ok(())
                };
                admitted_from(&|n| template.build_limit(n, None))?;
                if template.has_capacity_key() {
                    admitted_from(&|capacity| template.build_limit(20, Some(capacity)))?;
                }
            }
        }
    }
}
