//! Reported times come true to the microsecond; peeks and rejections change nothing.

use std::collections::VecDeque;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::algorithm::{
    fixed_window, leaky_bucket, sliding_window_counter, sliding_window_log, token_bucket,
};
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult, MAX_COUNT};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Hits, MAX_HITS};
use tollkeeper::limit::{Limit, LimitSpec};

use super::model::{can_ever_pass, window};
use super::scenario::{WILD, config, last_counted, limit, scenario};

proptest! {
    #![proptest_config(config())]

    #[test]
    fn rejected_until_retry_after_and_admitted_exactly_then(scenario in scenario(WILD), probes: [u64; 4]) {
        let mut state = State::empty(scenario.limits[0].algorithm());
        scenario.run(|limit, now, request| {
            let result = state.charge(limit, now, request);
            prop_assert_eq!(result.retry_after_us.is_some(), !result.admitted && can_ever_pass(limit, request));
            if let Some(retry_us) = result.retry_after_us {
                prop_assert!(retry_us > 0);
                for wait_us in before(retry_us, probes) {
                    prop_assert!(!state.admits(limit, now.plus_us(wait_us), request), "passes after {} us", wait_us);
                }
                if comes(now, retry_us) {
                    prop_assert!(state.admits(limit, now.plus_us(retry_us), request), "does not pass");
                }
            }
            Ok(result)
        })?;
    }

    #[test]
    fn full_again_at_reset_and_not_before(scenario in scenario(WILD), probes: [u64; 4]) {
        let mut state = State::empty(scenario.limits[0].algorithm());
        scenario.run(|limit, now, request| {
            let result = state.charge(limit, now, request);
            if limit.requests_per_unit() == 0 {
                return Ok(result);
            }
            let full = |wait_us| {
                let peek = state.clone().charge(limit, now.plus_us(wait_us), ChargeRequest::new(Hits::Peek, u64::MAX));
                peek.remaining == limit.capacity()
            };
            let last = last_counted(&state);
            if last.since_us(now) > limit.period_us() {
                // The state is discarded, but no charge has replaced it: it applies again if the clock comes near it.
                return Ok(result);
            }
            if limit.algorithm() == Algorithm::FixedWindow {
                let end = window(limit, i128::from(now.max(last).as_micros())).1;
                prop_assert_eq!(i128::from(result.reset_us), end - i128::from(now.as_micros()));
            } else {
                for wait_us in before(result.reset_us, probes) {
                    prop_assert!(!full(wait_us), "full after {} us", wait_us);
                }
            }
            if comes(now, result.reset_us) {
                prop_assert!(full(result.reset_us), "not full");
            }
            Ok(result)
        })?;
    }

    #[test]
    fn peeks_and_rejections_change_nothing_and_refunds_are_admitted(scenario in scenario(WILD)) {
        let mut state = State::empty(scenario.limits[0].algorithm());
        scenario.run(|limit, now, request| {
            let before = state.clone();
            let result = state.charge(limit, now, request);
            match request.hits {
                Hits::Peek => {
                    prop_assert_eq!(&state, &before);
                    prop_assert_eq!((result.before, result.delay_us), (result.after, 0));
                }
                Hits::Refund(hits) => {
                    prop_assert!(result.admitted && result.delay_us == 0 && result.after <= result.before);
                    prop_assert!(result.before - result.after <= hits, "more hits came back than were refunded");
                }
                Hits::Charge(_) if result.admitted => {}
                Hits::Charge(_) => {
                    prop_assert_eq!(result.delay_us, 0);
                    if limit.counts_rejected_hits() {
                        prop_assert!(result.after >= result.before, "rejected hits lowered the count");
                    } else {
                        prop_assert_eq!(&state, &before);
                    }
                }
            }
            Ok(result)
        })?;
    }

    #[test]
    fn admits_agrees_with_charge(scenario in scenario(WILD)) {
        let mut state = State::empty(scenario.limits[0].algorithm());
        scenario.run(|limit, now, request| {
            for rejected_elsewhere in [true, false] {
                let request = ChargeRequest { rejected_elsewhere, ..request };
                prop_assert_eq!(state.admits(limit, now, request), state.clone().charge(limit, now, request).admitted);
            }
            Ok(state.charge(limit, now, request))
        })?;
    }

    /// Counted rejected hits delay later charges by one period at most.
    ///
    /// No charge waits more than a period longer than after a charge of the whole capacity.
    #[test]
    fn debt_costs_at_most_one_period(scenario in scenario(WILD)) {
        let mut state = State::empty(scenario.limits[0].algorithm());
        scenario.run(|limit, now, request| {
            let result = state.charge(limit, now, request);
            if limit.counts_rejected_hits() && limit.requests_per_unit() > 0 {
                let all = Hits::Charge(limit.capacity());
                let mut spent = State::empty(limit.algorithm());
                spent.charge(limit, now, ChargeRequest::new(all, 0));
                let owed = ChargeRequest::new(Hits::Charge(MAX_HITS), 0);
                let mut owing = spent.clone();
                owing.charge(limit, now, owed);
                owing.charge(limit, now, owed);
                for hits in [Hits::Charge(1), all] {
                    let wait = |state: &State| {
                        // The limit counts no rejected hits, so this charge changes nothing.
                        let found = state.clone().charge(&forgiving(limit), now, ChargeRequest::new(hits, 0));
                        found.retry_after_us.expect("rejected, but not forever")
                    };
                    prop_assert!(wait(&owing) <= wait(&spent).saturating_add(limit.period_us()));
                }
            }
            Ok(result)
        })?;
    }

    #[test]
    fn any_state_and_time_is_handled_without_panic(
        (limit, state) in limit_and_state(),
        times in proptest::collection::vec(any_time(), 1..6),
        hits: i64,
        max_delay_us: u64,
        rejected_elsewhere: bool,
    ) {
        let mut state = state;
        for now in times {
            for hits in [Hits::new(hits.unsigned_abs(), hits < 0), Hits::Peek, Hits::Charge(1), Hits::Charge(MAX_HITS)] {
                for max_delay_us in [0, max_delay_us, u64::MAX] {
                    let result = state.charge(&limit, now, ChargeRequest { rejected_elsewhere, ..ChargeRequest::new(hits, max_delay_us) });
                    check_sane(&limit, &result, max_delay_us)?;
                }
            }
        }
    }
}

fn check_sane(limit: &Limit, result: &ChargeResult, max_delay_us: u64) -> TestCaseResult {
    prop_assert!(result.remaining <= limit.capacity());
    prop_assert!(result.delay_us <= max_delay_us.min(limit.max_wait_us()));
    prop_assert!(result.admitted || result.delay_us == 0);
    prop_assert!(!result.admitted || result.retry_after_us.is_none());
    Ok(())
}

/// True if `now` plus the wait fits into 64 bits of microseconds.
fn comes(now: Time, wait_us: u64) -> bool {
    wait_us < u64::MAX && now.as_micros().checked_add(wait_us).is_some()
}

/// Points from 0 to just before `end`: both ends, the middle, and some random points.
fn before(end: u64, probes: [u64; 4]) -> impl Iterator<Item = u64> {
    let fixed = [0, end / 2, end.saturating_sub(1)];
    fixed.into_iter().chain(probes.map(|probe| probe % end.max(1))).filter(move |&point| point < end)
}

/// Returns the same limit without `count_rejected`.
fn forgiving(limit: &Limit) -> Limit {
    let token = limit.algorithm() == Algorithm::TokenBucket;
    Limit::new(&LimitSpec {
        bucket_size: token.then(|| limit.capacity().try_into().unwrap()),
        count_rejected: Some(false),
        calendar_months: limit.follows_calendar_months(),
        ..LimitSpec::new(limit.algorithm(), limit.requests_per_unit(), limit.period())
    })
    .expect("as valid as the limit it is made from")
}

/// Times up to half of the range.
fn any_time() -> impl Strategy<Value = Time> {
    let max_time = u64::MAX / 2;
    prop_oneof![0..3_u64, Just(max_time), max_time - 3..=max_time, 0..=max_time, 0..4_000_000_000_000_u64]
        .prop_map(Time::from_micros)
}

/// A limit and any state that its fields allow, reachable or not.
fn limit_and_state() -> impl Strategy<Value = (Limit, State)> {
    let period = prop_oneof![
        Just(Period::new(Unit::Second, 1).expect("not too long")),
        Just(Period::new(Unit::Month, 1).expect("not too long")),
        Just(Period::new(Unit::Day, 366).expect("not too long")),
    ];
    (proptest::sample::select(&Algorithm::ALL[..]), period, any::<bool>()).prop_flat_map(
        |(algorithm, period, calendar)| (limit(algorithm, period, calendar), state(algorithm, period.micros())),
    )
}

fn state(algorithm: Algorithm, period_us: u64) -> BoxedStrategy<State> {
    let count = prop_oneof![0..10_u64, Just(MAX_COUNT), 0..=MAX_COUNT, Just(u64::from(u32::MAX))].boxed();
    let part = 0..period_us;
    match algorithm {
        Algorithm::Concurrent => unreachable!("slots have a model of their own"),
        Algorithm::TokenBucket => (count, part, any_time())
            .prop_map(|(used, part, last)| State::TokenBucket(token_bucket::State { used, part, mark: None, last }))
            .boxed(),
        Algorithm::LeakyBucket => (any::<u32>(), part, any::<u32>(), any_time())
            .prop_map(|(queued, part, tail, last)| {
                State::LeakyBucket(leaky_bucket::State { queued, part, tail, mark: None, last })
            })
            .boxed(),
        Algorithm::FixedWindow => (count, any_time())
            .prop_map(|(count, last)| State::FixedWindow(fixed_window::State { count, last }))
            .boxed(),
        Algorithm::SlidingWindowLog => (proptest::collection::btree_map(any_time(), 1..=u32::MAX, 0..5), 0..=period_us)
            .prop_map(|(hits, later)| {
                let records: VecDeque<_> =
                    hits.into_iter().map(|(at, hits)| sliding_window_log::LoggedHits { at, hits }).collect();
                let held = records.iter().map(|record| u64::from(record.hits)).sum();
                let last = records.back().map_or(Time::default(), |newest| newest.at.plus_us(later));
                State::SlidingWindowLog(sliding_window_log::State { records, held, last })
            })
            .boxed(),
        Algorithm::SlidingWindowCounter => (count.clone(), count, any_time())
            .prop_map(|(current, previous, last)| {
                State::SlidingWindowCounter(sliding_window_counter::State { current, previous, last })
            })
            .boxed(),
    }
}
