//! Limits in turn on one counter, as with overrides, reloads and `active`.
//!
//! After a change nobody waits longer than for an exhausted counter of the new limit, and all limits together admit no
//! more in a period than one with the largest capacity and the largest number of hits of them.

use proptest::prelude::*;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Hits, MAX_HITS};
use tollkeeper::limit::{Limit, LimitSpec};

use super::scenario::{Backwards, HistoryOptions, Scenario, config, scenario};

/// Alternating limits, and a clock that only moves forwards.
const ALTERNATING: HistoryOptions = HistoryOptions { many_limits: true, backwards: Backwards::Never, refunds: false };

proptest! {
    #![proptest_config(config())]

    #[test]
    fn no_one_waits_longer_than_for_an_exhausted_counter_of_the_new_limit(
        scenario in scenario(ALTERNATING),
        hits in prop_oneof![Just(1_u64), 1..30_u64],
    ) {
        let has_debt = scenario.limits.iter().any(Limit::counts_rejected_hits);
        run(&scenario, |state, now| {
            for limit in &scenario.limits {
                let request = ChargeRequest::new(Hits::Charge(hits.min(limit.capacity()).max(1)), 0);
                let waits = wait_us(&state.clone().charge(limit, now, request));
                let exhausted = wait_us(&exhausted(limit, has_debt, now).charge(limit, now, request));
                prop_assert!(waits <= exhausted, "{waits:?} us for {request:?} under {limit:?}, exhausted {exhausted:?}");
            }
            Ok(())
        })?;
    }

    #[test]
    fn limits_in_turn_admit_no_more_in_a_period_than_the_largest(scenario in scenario(ALTERNATING)) {
        let passed = run(&scenario, |_, _| Ok(()))?;
        let most = |of: fn(&Limit) -> u64| scenario.limits.iter().map(of).max().map_or(0, u128::from);
        let (capacity, rate) = (most(Limit::capacity), most(Limit::requests_per_unit));
        let period = u128::from(scenario.limits[0].period_us());
        for (index, &(first, _)) in passed.iter().enumerate() {
            let mut sum = 0;
            for &(at, hits) in &passed[index..] {
                sum += u128::from(hits);
                let span = u128::from(at.since_us(first));
                let bound = match scenario.limits[0].algorithm() {
                    Algorithm::TokenBucket | Algorithm::LeakyBucket => capacity + (span * rate) / period,
                    Algorithm::SlidingWindowLog if span < period => capacity,
                    Algorithm::SlidingWindowLog => sum,
                    // Both windows that a period touches.
                    _ if span < period => 2 * capacity,
                    _ => sum,
                };
                prop_assert!(sum <= bound, "{sum} of {bound} in {span} us");
            }
        }
    }
}

/// Runs a history without delays; returns the time and the hits of each admitted charge.
fn run(
    scenario: &Scenario,
    check: impl Fn(&State, Time) -> Result<(), TestCaseError>,
) -> Result<Vec<(Time, u64)>, TestCaseError> {
    let mut state = State::empty(scenario.limits[0].algorithm());
    let mut passed = Vec::new();
    scenario.run(|limit: &Limit, now: Time, request: ChargeRequest| {
        check(&state, now)?;
        // Tokens that a request takes in advance come on top of what passes at once.
        let delays = limit.algorithm() == Algorithm::LeakyBucket;
        let request = ChargeRequest { max_delay_us: if delays { request.max_delay_us } else { 0 }, ..request };
        let result = state.charge(limit, now, request);
        if let Hits::Charge(hits) = request.hits
            && result.admitted
        {
            passed.push((now, hits));
        }
        Ok(result)
    })?;
    Ok(passed)
}

/// State of a counter that admitted all at `now`, and with `debt` rejected as much as counts.
fn exhausted(limit: &Limit, debt: bool, now: Time) -> State {
    let mut state = State::empty(limit.algorithm());
    let whole = ChargeRequest::new(Hits::Charge(limit.capacity()), u64::MAX);
    assert!(limit.requests_per_unit() == 0 || state.charge(limit, now, whole).admitted);
    if debt && limit.algorithm() != Algorithm::LeakyBucket {
        let counting = Limit::new(&LimitSpec {
            bucket_size: (limit.algorithm() == Algorithm::TokenBucket)
                .then(|| u32::try_from(limit.capacity()).unwrap())
                .filter(|size| *size > 0),
            count_rejected: Some(true),
            ..LimitSpec::new(limit.algorithm(), limit.requests_per_unit(), limit.period())
        });
        state.charge(&counting.expect("every key applies"), now, ChargeRequest::new(Hits::Charge(MAX_HITS), 0));
    }
    state
}

/// Wait of a charge; `u64::MAX`: for ever.
fn wait_us(result: &ChargeResult) -> u64 {
    if result.admitted { 0 } else { result.retry_after_us.unwrap_or(u64::MAX) }
}

/// What a lowered limit cuts is not forgotten: a client with two limits in turn has no more than the larger one.
#[test]
fn lowered_bucket_is_raised_again_with_what_was_left() {
    let minute = Period::new(Unit::Minute, 1).unwrap();
    let limit = |hits| Limit::new(&LimitSpec::new(Algorithm::TokenBucket, hits, minute)).unwrap();
    let (large, small, mut state) = (limit(1000), limit(10), State::empty(Algorithm::TokenBucket));
    let mut charge = |limit: &Limit, hits: u64, seconds: u64| {
        let now = Time::from_secs(1_783_512_000 + seconds);
        state.charge(limit, now, ChargeRequest::new(Hits::Charge(hits), 0))
    };
    assert_eq!(charge(&large, 900, 0).remaining, 100);
    assert_eq!(charge(&small, 1, 0).retry_after_us, Some(6_000_000));
    assert!(charge(&small, 1, 6).admitted);
    assert_eq!(charge(&small, 1, 6).retry_after_us, Some(6_000_000));
    assert!(charge(&small, 6, 45).admitted, "6.5 tokens are back");
    assert_eq!(charge(&large, 1, 45).retry_after_us, Some(30_000), "half a token was left, and no more");
}
