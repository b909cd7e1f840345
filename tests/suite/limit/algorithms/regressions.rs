//! Regression tests for bugs that the property tests found.

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};

const NOW: Time = Time::from_secs(1_750_000_000);

fn spec(algorithm: Algorithm, requests_per_unit: u32, unit: Unit) -> LimitSpec {
    LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(unit, 1).expect("not too long"))
}

fn limit(spec: LimitSpec) -> Limit {
    Limit::new(&spec).expect("keys that the algorithm knows")
}

fn charge(hits: u64, max_delay_us: u64) -> ChargeRequest {
    ChargeRequest::new(Hits::Charge(hits), max_delay_us)
}

#[test]
fn limit_of_zero_has_nothing_remaining_whatever_its_capacity() {
    for spec in [
        LimitSpec { bucket_size: Some(5), ..spec(Algorithm::TokenBucket, 0, Unit::Minute) },
        LimitSpec { queue_size: Some(5), ..spec(Algorithm::LeakyBucket, 0, Unit::Minute) },
    ] {
        for hits in [Hits::Peek, Hits::Charge(1), Hits::Refund(1)] {
            let result = State::empty(spec.algorithm).charge(&limit(spec), NOW, ChargeRequest::new(hits, 0));
            assert_eq!(result.remaining, 0, "{} {hits:?}", spec.algorithm);
        }
    }
}

#[test]
fn log_of_limit_zero_keeps_no_rejected_hits() {
    let limit = limit(LimitSpec { count_rejected: Some(true), ..spec(Algorithm::SlidingWindowLog, 0, Unit::Day) });
    let mut state = State::empty(Algorithm::SlidingWindowLog);
    for later_us in 0..1_000 {
        let result = state.charge(&limit, NOW.plus_us(later_us), charge(1, 0));
        assert_eq!((result.admitted, result.reset_us), (false, 0));
    }
    let State::SlidingWindowLog(log) = state else { unreachable!("it stays of its algorithm") };
    assert_eq!((log.records.len(), log.held), (0, 0));
}

/// A full counter of 2^32 - 1 hits, refilled at one a year, needs 2^57 seconds: 64 bits of microseconds overflow.
#[test]
fn wait_beyond_the_end_of_time_is_rejected_without_overflow() {
    for spec in [
        LimitSpec {
            bucket_size: Some(u32::MAX),
            max_wait_us: Some(u64::MAX),
            ..spec(Algorithm::TokenBucket, 1, Unit::Year)
        },
        LimitSpec { queue_size: Some(u32::MAX), ..spec(Algorithm::LeakyBucket, 1, Unit::Year) },
    ] {
        let limit = limit(spec);
        let mut state = State::empty(spec.algorithm);
        assert!(state.charge(&limit, NOW, charge(u64::from(u32::MAX), u64::MAX)).admitted);
        // A clock that stepped back adds to the wait.
        for now in [NOW, Time::from_micros(NOW.as_micros() - 1)] {
            let result = state.charge(&limit, now, charge(u64::from(u32::MAX), u64::MAX));
            assert!(!result.admitted, "{}", spec.algorithm);
            assert_eq!((result.reset_us, result.delay_us), (u64::MAX, 0));
            assert!(result.retry_after_us.is_some(), "it is a wait all the same");
        }
    }
}
