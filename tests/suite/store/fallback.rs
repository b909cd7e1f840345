//! The in-process fallback of a lost Redis: its share of each limit, and the last reported levels.

use std::num::NonZeroU32;

use proptest::prelude::*;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{Charge, ChargeRequest, ChargeResult, Counter};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::fallback::Fallback;

use crate::limit::algorithms::scenario::config;

/// The first instant of a day, which begins a window of each unit used here.
const MIDNIGHT: Time = Time::from_secs(1_783_468_800);
const ENOUGH: u64 = 1 << 20;

/// One counter of a value, and the limit that counts.
struct FallbackCounter {
    local: Fallback,
    limit: Limit,
}

impl FallbackCounter {
    fn new(limit: Limit, replicas: u32) -> Self {
        Self { local: Fallback::new(ENOUGH, NonZeroU32::new(replicas).unwrap()), limit }
    }

    fn with_charge<T>(&self, value: &[u8], hits: Hits, then: impl FnOnce(&Charge<'_>) -> T) -> T {
        let entries = [Entry { key: b"user", value }];
        let counter = Counter {
            limit: &self.limit,
            shadow: false,
            quota: false,
            tag: hash_limit_identity(&self.limit, 0),
            epoch: 0,
        };
        then(&Charge::new(
            CounterPath { domain: "shop", entries: &entries, shared: &[], candidate: None },
            [counter].into_iter().collect(),
            ChargeRequest::new(hits, 0),
        ))
    }

    fn charge(&self, hits: Hits, now: Time) -> ChargeResult {
        self.with_charge(b"ann", hits, |charge| self.local.charge(charge, now)[0])
    }

    /// Number of single hits that pass at once.
    fn pass(&self, now: Time) -> u64 {
        let max_attempts = self.limit.capacity() + 2;
        (0..max_attempts).filter(|_| self.charge(Hits::Charge(1), now).admitted).count() as u64
    }

    fn remember(&self, value: &[u8], state: &State, now: Time) {
        let path = self.with_charge(value, Hits::Peek, |charge| charge.path_hash);
        let counters = [(self.limit, hash_limit_identity(&self.limit, 0))];
        self.local.store_reported_states(path, &counters, std::slice::from_ref(state), now);
    }
}

fn limit(algorithm: Algorithm, requests_per_unit: u32, capacity: u32, unit: Unit) -> Limit {
    let terms = LimitSpec {
        bucket_size: (algorithm == Algorithm::TokenBucket).then_some(capacity),
        queue_size: (algorithm == Algorithm::LeakyBucket).then_some(capacity),
        sole: false,
        ..LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(unit, 1).unwrap())
    };
    Limit::new(&terms).unwrap()
}

fn any_limit(algorithms: &'static [Algorithm]) -> impl Strategy<Value = Limit> {
    let unit = proptest::sample::select(&[Unit::Second, Unit::Minute, Unit::Day][..]);
    (proptest::sample::select(algorithms), 1..60_u32, 1..60_u32, unit)
        .prop_map(|(algorithm, limit_of, capacity, unit)| limit(algorithm, limit_of, capacity, unit))
}

const WINDOWS: &[Algorithm] = &[Algorithm::FixedWindow, Algorithm::SlidingWindowLog, Algorithm::SlidingWindowCounter];

/// State after random charges, at these thousandths of two periods from midnight on, and the time of the last charge.
fn charged(limit: &Limit, charges: &[(u64, u64)]) -> (State, Time) {
    let mut state = State::empty(limit.algorithm());
    let mut now = MIDNIGHT;
    for (step, hits) in charges {
        now = now.plus_us(limit.period_us() * step / 1000);
        state.charge(limit, now, ChargeRequest::new(Hits::Charge(*hits), u64::MAX));
    }
    (state, now)
}

fn charges() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..400_u64, 1..30_u64), 0..12)
}

fn used(limit: &Limit, state: &State, now: Time) -> u64 {
    state.clone().charge(limit, now, ChargeRequest::new(Hits::Peek, 0)).after
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn burst_admits_at_most_the_share(limit in any_limit(&Algorithm::ALL), replicas in 1..100_u32) {
        let counter = FallbackCounter::new(limit, replicas);
        let share = (limit.capacity() / u64::from(replicas)).max(1);
        // Requests of a leaky bucket that must wait are rejected here: the caller does not wait.
        let share = if limit.algorithm() == Algorithm::LeakyBucket { 1 } else { share };
        prop_assert_eq!(counter.pass(MIDNIGHT), share);
    }

    #[test]
    fn window_admits_at_most_the_share(
        limit in any_limit(WINDOWS),
        replicas in 1..100_u32,
        steps in prop::collection::vec((0..1000_u64, 1..5_u64), 1..200),
    ) {
        let counter = FallbackCounter::new(limit, replicas);
        let mut steps = steps;
        steps.sort_unstable();
        let at = |step| MIDNIGHT.plus_us(limit.period_us() * step / 1000);
        let passed: u64 = steps
            .into_iter()
            .filter(|(step, hits)| counter.charge(Hits::Charge(*hits), at(*step)).admitted)
            .map(|(_, hits)| hits)
            .sum();
        prop_assert!(passed <= (limit.requests_per_unit() / u64::from(replicas)).max(1), "{passed} passed");
    }

    #[test]
    fn fallback_continues_from_the_last_reported_level(
        limit in any_limit(&Algorithm::ALL),
        replicas in 1..100_u32,
        charges in charges(),
    ) {
        let (state, now) = charged(&limit, &charges);
        let counter = FallbackCounter::new(limit, replicas);
        counter.remember(b"ann", &state, now);
        let left = limit.capacity().saturating_sub(used(&limit, &state, now));
        let passed = counter.pass(now);
        prop_assert!(passed <= left.div_ceil(replicas.into()), "{passed} of {left} passed");
    }

    #[test]
    fn reported_window_usage_lasts_until_the_window_ends(
        limit in any_limit(WINDOWS),
        replicas in 1..100_u32,
        charges in charges(),
        later in 0..2500_u64,
    ) {
        let (state, now) = charged(&limit, &charges);
        let counter = FallbackCounter::new(limit, replicas);
        counter.remember(b"ann", &state, now);
        let then = now.plus_us(limit.period_us() * later / 1000);
        let left = limit.requests_per_unit().saturating_sub(used(&limit, &state, then));
        prop_assert!(counter.pass(then) <= left.div_ceil(replicas.into()));
    }

    #[test]
    fn single_replica_decides_like_redis(
        limit in any_limit(&Algorithm::ALL),
        charges in charges(),
        later in 0..2500_u64,
        hits in 1..30_u64,
    ) {
        let (mut state, now) = charged(&limit, &charges);
        let counter = FallbackCounter::new(limit, 1);
        counter.remember(b"ann", &state, now);
        let then = now.plus_us(limit.period_us() * later / 1000);
        let expected = state.charge(&limit, then, ChargeRequest::new(Hits::Charge(hits), 0));
        prop_assert_eq!(counter.charge(Hits::Charge(hits), then), expected);
    }

    #[test]
    fn last_report_wins(
        limit in any_limit(&Algorithm::ALL),
        replicas in 1..10_u32,
        (first, last) in (charges(), charges()),
    ) {
        let ((high, _), (low, now)) = (charged(&limit, &first), charged(&limit, &last));
        let [counter, fresh] = [FallbackCounter::new(limit, replicas), FallbackCounter::new(limit, replicas)];
        counter.remember(b"ann", &high, now);
        counter.pass(now);
        counter.remember(b"ann", &low, now);
        fresh.remember(b"ann", &low, now);
        prop_assert_eq!(counter.charge(Hits::Peek, now), fresh.charge(Hits::Peek, now));
    }
}

#[test]
fn share_follows_the_replica_count() {
    for algorithm in Algorithm::ALL {
        let limit = limit(algorithm, 100, 100, Unit::Day);
        let counter = FallbackCounter::new(limit, 1);
        let mut state = State::empty(algorithm);
        state.charge(&limit, MIDNIGHT, ChargeRequest::new(Hits::Charge(40), u64::MAX));
        let left = |replicas: u32| {
            counter.local.replica_count().set_count(NonZeroU32::new(replicas).unwrap());
            counter.charge(Hits::Peek, MIDNIGHT).remaining
        };
        counter.remember(b"ann", &state, MIDNIGHT);
        assert_eq!(left(1), 60, "{algorithm}");
        // The stored hits exceed the smaller share.
        assert_eq!(left(4), 0, "{algorithm}");
        counter.remember(b"ann", &state, MIDNIGHT);
        assert_eq!(left(4), 15, "{algorithm}");
        assert_eq!(left(2), 40, "{algorithm}");
    }
}

#[test]
fn report_from_a_clock_ahead_counts_as_now() {
    for algorithm in Algorithm::ALL {
        let limit = limit(algorithm, 4, 4, Unit::Second);
        let counter = FallbackCounter::new(limit, 2);
        let mut state = State::empty(algorithm);
        let ahead = MIDNIGHT.plus_us(20_000_000);
        state.charge(&limit, ahead, ChargeRequest::new(Hits::Charge(4), u64::MAX));
        counter.remember(b"ann", &state, MIDNIGHT);
        assert_eq!(counter.pass(MIDNIGHT), 0, "{algorithm}");
        assert_ne!(counter.pass(MIDNIGHT.plus_us(2_000_000)), 0, "{algorithm}");
    }
}

#[test]
fn remembered_levels_are_bounded_and_empty_ones_are_dropped() {
    for algorithm in Algorithm::ALL {
        let limit = limit(algorithm, 300, 300, Unit::Day);
        let counter = FallbackCounter::new(limit, 2);
        counter.remember(b"ann", &State::empty(algorithm), MIDNIGHT);
        assert_eq!(counter.local.memory_usage().counters, 0, "{algorithm}");
        let mut state = State::empty(algorithm);
        for step in 0..200 {
            state.charge(&limit, MIDNIGHT.plus_us(step), ChargeRequest::new(Hits::Charge(1), u64::MAX));
        }
        for value in 0..50_000_u32 {
            counter.remember(&value.to_be_bytes(), &state, MIDNIGHT.plus_us(200));
        }
        let usage = counter.local.memory_usage();
        assert!(usage.bytes <= ENOUGH && usage.counters > 100, "{algorithm}: {usage:?}");
        // A report of an empty state frees the counter.
        let last = 49_999_u32.to_be_bytes();
        counter.remember(&last, &State::empty(algorithm), MIDNIGHT.plus_us(200));
        let look =
            counter.with_charge(&last, Hits::Peek, |charge| counter.local.charge(charge, MIDNIGHT.plus_us(200))[0]);
        assert_eq!(look.remaining, 150, "{algorithm}");
    }
}
