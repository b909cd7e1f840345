//! Rejections repeated without a call to Redis: for which charges, for how long, in how much memory.
//!
//! Most tests call the cache itself, at given times, with results of the algorithms. The others use a real Redis,
//! which counts the commands that it gets.

mod with_redis;

use std::slice::from_ref;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::joint_charge::charge_together;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::charge::{ChargeResults, OwnedCharge, OwnedCounter};
use tollkeeper::store::over_limit_cache::{CallTimes, OverLimitCache};

/// Start of an hour.
const NOW: Time = Time::from_secs(1_783_512_000);
const MIB: usize = 1 << 20;
const SECOND_US: u64 = 1_000_000;
/// Key of the counters of the test.
const ID: u128 = 7 << 64 | 9;

fn terms(algorithm: Algorithm, requests_per_unit: u32, unit: Unit) -> LimitSpec {
    LimitSpec { sole: false, ..LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(unit, 1).unwrap()) }
}

/// Limit that does not count rejected hits.
fn limit(algorithm: Algorithm, requests_per_unit: u32, unit: Unit) -> Limit {
    Limit::new(&terms(algorithm, requests_per_unit, unit)).unwrap()
}

/// Limit that counts rejected hits.
fn counting(algorithm: Algorithm, requests_per_unit: u32) -> Limit {
    let terms = terms(algorithm, requests_per_unit, Unit::Hour);
    Limit::new(&LimitSpec { count_rejected: Some(true), ..terms }).unwrap()
}

fn yearly(requests_per_unit: u32) -> Limit {
    limit(Algorithm::FixedWindow, requests_per_unit, Unit::Year)
}

/// Counters of one descriptor, as a store has them, and the cache in front.
struct Counters {
    limits: Vec<(Limit, bool)>,
    /// Limits below 10 are quotas.
    quotas: bool,
    states: SmallVec<[State; 1]>,
    over: OverLimitCache,
    origin: Instant,
}

impl Counters {
    fn new(limits: &[(Limit, bool)], over: OverLimitCache, origin: Instant) -> Self {
        let states = limits.iter().map(|(limit, _)| State::empty(limit.algorithm())).collect();
        Self { limits: limits.to_vec(), quotas: false, states, over, origin }
    }

    /// Counters of one enforced limit.
    fn of(limit: Limit) -> Self {
        let origin = Instant::now();
        Self::new(&[(limit, true)], OverLimitCache::new(MIB, false, origin), origin)
    }

    fn command(&self, request: ChargeRequest) -> OwnedCharge {
        let counted = |(limit, enforced): &(Limit, bool)| OwnedCounter {
            limit: *limit,
            shadow: !enforced,
            quota: self.quotas && limit.requests_per_unit() < 10,
            tag: 3,
        };
        OwnedCharge {
            counters: self.limits.iter().map(counted).collect(),
            request,
            dry_run: false,
            void_from: None,
            slot: None,
        }
    }

    /// Result of the store for a charge, at a time in microseconds.
    fn charge(&mut self, after_us: u64, request: ChargeRequest) -> ChargeResults {
        charge_together(&self.command(request).joint_limits(), &mut self.states, NOW.plus_us(after_us), request)
    }

    /// Decides a charge in the store, at once, and updates the cache.
    fn decide(&mut self, after_us: u64, request: ChargeRequest) -> ChargeResults {
        let results = self.charge(after_us, request);
        let at = self.at(after_us);
        self.over.record_results(
            ID,
            &[self.command(request)],
            from_ref(&results),
            CallTimes { sent: at, answered: at },
        );
        results
    }

    /// Result of the cache for the same charge.
    fn known(&self, after_us: u64, request: ChargeRequest) -> Option<ChargeResults> {
        self.over.find_rejection(ID, &[self.command(request)], self.at(after_us))
    }

    fn at(&self, after_us: u64) -> Instant {
        self.origin + Duration::from_micros(after_us)
    }
}

fn take(hits: u64) -> ChargeRequest {
    ChargeRequest::new(Hits::Charge(hits), 0)
}

#[test]
fn rejects_charges_of_at_least_the_rejected_hits() {
    let mut counters = Counters::of(yearly(10));
    counters.decide(0, take(5));
    assert_eq!(counters.known(0, take(5)), None, "what was admitted is not kept");
    assert!(!counters.decide(0, take(7))[0].admitted);
    for (hits, is_known) in [(5, false), (6, false), (7, true), (8, true), (10, true)] {
        assert_eq!(counters.known(1, take(hits)).is_some(), is_known, "{hits}");
    }
    let never = counters.known(1, take(11)).map(|results| results[0].retry_after_us);
    assert_eq!(never, Some(None), "more than the limit waits for ever, and not only for now");
    assert_eq!(counters.over.rejected_charge_count(), 4);
    assert!(!counters.decide(2, take(6))[0].admitted);
    assert!(counters.known(3, take(6)).is_some(), "what was refused last holds");
}

#[test]
fn charge_that_can_never_pass_is_rejected_as_such() {
    let mut counters = Counters::of(yearly(10));
    assert_eq!(counters.decide(0, take(11))[0].retry_after_us, None);
    assert_eq!(counters.known(SECOND_US - 1, take(12)).unwrap()[0].retry_after_us, None);
    assert_eq!(counters.known(SECOND_US, take(12)), None);
    assert_eq!(counters.known(0, take(10)), None);
}

#[test]
fn rejects_charges_that_accept_no_longer_delay() {
    let terms = LimitSpec { queue_size: Some(5), ..terms(Algorithm::LeakyBucket, 1, Unit::Hour) };
    let mut counters = Counters::of(Limit::new(&terms).unwrap());
    let within = |max_delay_us| ChargeRequest::new(Hits::Charge(1), max_delay_us);
    assert!(counters.decide(0, within(0))[0].admitted);
    assert!(!counters.decide(0, within(1_000))[0].admitted);
    for (max_delay_us, is_known) in [(0, true), (999, true), (1_000, true), (1_001, false), (u64::MAX, false)] {
        assert_eq!(counters.known(1, within(max_delay_us)).is_some(), is_known, "{max_delay_us}");
    }
}

#[test]
fn peeks_refunds_and_shadow_limits_are_never_rejected() {
    let mut counters = Counters::of(yearly(1));
    assert!(!counters.decide(0, take(2))[0].admitted);
    counters.decide(0, take(1));
    assert!(!counters.decide(0, take(1))[0].admitted);
    for hits in [Hits::Peek, Hits::Refund(1)] {
        assert_eq!(counters.known(1, ChargeRequest::new(hits, 0)), None, "{hits:?}");
    }
    let dry_run = OwnedCharge { dry_run: true, ..counters.command(take(1)) };
    assert_eq!(counters.over.find_rejection(ID, from_ref(&dry_run), counters.at(1)), None);
    // If one charge of a request must be sent, all are.
    let request = [counters.command(take(1)), counters.command(ChargeRequest::new(Hits::Refund(1), 0))];
    assert_eq!(counters.over.find_rejection(ID, &request, counters.at(1)), None);
    let request = [counters.command(take(1)), counters.command(take(2))];
    assert_eq!(
        counters.over.find_rejection(ID, &request, counters.at(1)),
        None,
        "the second never passes, the first may"
    );
    assert!(counters.over.find_rejection(ID, &request[..1], counters.at(1)).is_some());
}

#[test]
fn rejected_peek_or_shadow_charge_is_not_cached() {
    let mut counters = Counters::of(yearly(1));
    counters.decide(0, take(1));
    assert!(!counters.decide(0, ChargeRequest::new(Hits::Peek, 0))[0].admitted);
    let dry_run = OwnedCharge { dry_run: true, ..counters.command(take(1)) };
    let results = counters.charge(0, take(1));
    counters.over.record_results(
        ID,
        &[dry_run],
        &[results],
        CallTimes { sent: counters.at(0), answered: counters.at(0) },
    );
    assert_eq!((counters.known(0, take(1)), counters.over.entry_count()), (None, 0));
}

#[test]
fn entry_does_not_apply_to_another_limit() {
    let (ten, day) = ((yearly(10), true), (limit(Algorithm::TokenBucket, 50, Unit::Day), true));
    let origin = Instant::now();
    let mut counters = Counters::new(&[ten, day], OverLimitCache::new(MIB, false, origin), origin);
    counters.decide(0, take(10));
    assert!(!counters.decide(0, take(1))[0].admitted);
    assert!(counters.known(1, take(1)).is_some());
    let others: [&[(Limit, bool)]; 6] = [
        &[day, ten],
        &[ten],
        &[ten, day, ten],
        &[(yearly(11), true), day],
        &[(yearly(9), true), day],
        &[(ten.0, false), day],
    ];
    for limits in others {
        let other = Counters::new(limits, OverLimitCache::new(MIB, false, origin), origin);
        assert_eq!(counters.over.find_rejection(ID, &[other.command(take(1))], counters.at(1)), None, "{limits:?}");
    }
    assert_eq!(
        counters.over.find_rejection(ID + 1, &[counters.command(take(1))], counters.at(1)),
        None,
        "other counters"
    );
}

#[test]
fn entry_expires_at_retry_after_and_within_a_second() {
    // 100 ms until the next token, and the rest of the year until the next window.
    for (limit, valid_us) in [(limit(Algorithm::TokenBucket, 10, Unit::Second), 100_000), (yearly(10), SECOND_US)] {
        let mut counters = Counters::of(limit);
        counters.decide(0, take(10));
        let rejected = counters.charge(0, take(1));
        // From the time of sending, not of the reply.
        let (sent, answered) = (counters.at(5_000), counters.at(12_000));
        counters.over.record_results(ID, &[counters.command(take(1))], &[rejected], CallTimes { sent, answered });
        assert!(counters.known(5_000 + valid_us - 1, take(1)).is_some(), "{limit:?}");
        assert_eq!(counters.known(5_000 + valid_us, take(1)), None, "{limit:?}");
        assert_eq!(counters.over.entry_count(), 0, "what has ended goes when it is met");
    }
}

#[test]
fn late_rejection_is_not_cached() {
    let mut counters = Counters::of(limit(Algorithm::TokenBucket, 10, Unit::Second));
    counters.decide(0, take(10));
    let rejected = counters.charge(0, take(1));
    let times = CallTimes { sent: counters.at(0), answered: counters.at(100_000) };
    counters.over.record_results(ID, &[counters.command(take(1))], &[rejected], times);
    assert_eq!(counters.over.entry_count(), 0);
}

#[test]
fn cached_times_count_down() {
    let mut counters = Counters::of(limit(Algorithm::SlidingWindowLog, 10, Unit::Minute));
    counters.decide(0, take(10));
    let rejected = counters.charge(0, take(1));
    // The results are those at the time of the reply.
    let times = CallTimes { sent: counters.at(0), answered: counters.at(10) };
    counters.over.record_results(ID, &[counters.command(take(1))], from_ref(&rejected), times);
    for passed_us in [0, 1, 700_000] {
        let known = counters.known(10 + passed_us, take(1)).unwrap();
        let mut expected = rejected.clone();
        expected[0].reset_us -= passed_us;
        expected[0].retry_after_us = Some(60_000_000 - passed_us);
        assert_eq!(known, expected, "{passed_us}");
    }
}

#[test]
fn refund_or_admission_ends_an_entry() {
    let full = || {
        let mut counters = Counters::of(yearly(10));
        counters.decide(0, take(10));
        counters.decide(0, take(1));
        assert!(counters.known(0, take(1)).is_some());
        counters
    };
    let mut refunded = full();
    refunded.decide(0, ChargeRequest::new(Hits::Refund(1), 0));
    assert_eq!(refunded.known(0, take(1)), None);

    let mut smaller = Counters::of(yearly(10));
    smaller.decide(0, take(8));
    smaller.decide(0, take(4));
    assert!(smaller.known(0, take(4)).is_some());
    assert!(smaller.decide(0, take(2))[0].admitted);
    assert_eq!(smaller.known(0, take(4)), None, "its levels are no longer right");

    let tried = full();
    let dry_run = OwnedCharge { dry_run: true, ..tried.command(take(1)) };
    let passes = Counters::of(yearly(10)).charge(0, take(1));
    tried.over.record_results(
        ID,
        from_ref(&dry_run),
        from_ref(&passes),
        CallTimes { sent: tried.at(0), answered: tried.at(0) },
    );
    assert_eq!(tried.known(0, take(1)), None);

    // The last charge of a call wins.
    let (rejection, refund) = (full().charge(0, take(1)), full().charge(0, ChargeRequest::new(Hits::Refund(1), 0)));
    for (charges, is_known) in [([1, -1], false), ([-1, 1], true)] {
        let counters = Counters::of(yearly(10));
        let charge = |refund_first: i32| if refund_first < 0 { Hits::Refund(1) } else { Hits::Charge(1) };
        let commands = charges.map(|hits| counters.command(ChargeRequest::new(charge(hits), 0)));
        let results = charges.map(|hits| if hits < 0 { refund.clone() } else { rejection.clone() });
        counters.over.record_results(
            ID,
            &commands,
            &results,
            CallTimes { sent: counters.at(0), answered: counters.at(0) },
        );
        assert_eq!(counters.known(0, take(1)).is_some(), is_known, "{charges:?}");
    }
}

#[test]
fn limits_counting_rejected_hits_are_cached_only_for_fixed_windows_if_allowed() {
    let plain = yearly(1);
    let (window, log) = (counting(Algorithm::FixedWindow, 1), counting(Algorithm::SlidingWindowLog, 1));
    let bucket = counting(Algorithm::TokenBucket, 1);
    let cases: [(&[Limit], bool, bool); 7] = [
        (&[plain], true, true),
        (&[window], false, true),
        (&[window, plain], false, true),
        (&[window, window], false, true),
        (&[log], false, false),
        (&[bucket], false, false),
        (&[window, plain, log], false, false),
    ];
    for (limits, by_default, if_counting) in cases {
        for (counting, is_kept) in [(false, by_default), (true, if_counting)] {
            let limits: Vec<_> = limits.iter().map(|limit| (*limit, true)).collect();
            let origin = Instant::now();
            let mut counters = Counters::new(&limits, OverLimitCache::new(MIB, counting, origin), origin);
            counters.decide(0, take(1));
            assert!(!counters.decide(0, take(1))[0].admitted);
            assert_eq!(counters.known(1, take(1)).is_some(), is_kept, "{counting} {limits:?}");
        }
    }
}

#[test]
fn only_rejections_by_enforced_limits_are_cached() {
    let hourly = limit(Algorithm::FixedWindow, 5, Unit::Hour);
    let origin = Instant::now();
    let mut counters =
        Counters::new(&[(hourly, false), (yearly(10), true)], OverLimitCache::new(MIB, false, origin), origin);
    counters.decide(0, take(5));
    assert!(!counters.decide(0, take(5))[0].admitted, "by the trial limit");
    assert_eq!(counters.over.entry_count(), 0);
    let rejected = counters.decide(0, take(1));
    assert_eq!(counters.known(0, take(1)), Some(rejected));
}

#[test]
fn rejection_by_a_quota_is_cached_unless_other_limits_are_charged_beside_it() {
    let hourly = limit(Algorithm::FixedWindow, 3, Unit::Hour);
    let origin = Instant::now();
    let cache = || OverLimitCache::new(MIB, false, origin);
    let mut alone = Counters { quotas: true, ..Counters::new(&[(hourly, true)], cache(), origin) };
    alone.decide(0, take(3));
    let rejected = alone.decide(0, take(1));
    assert_eq!(alone.known(0, take(1)), Some(rejected));

    let mut beside = Counters { quotas: true, ..Counters::new(&[(hourly, true), (yearly(10), true)], cache(), origin) };
    beside.decide(0, take(3));
    for after in 4..=10 {
        let results = beside.decide(0, take(1));
        assert_eq!((results[0].admitted, results[1].after), (false, after));
        assert_eq!(beside.known(0, take(1)), None, "the other limit must be charged");
    }
    let rejected = beside.decide(0, take(1));
    assert_eq!(beside.known(0, take(1)), Some(rejected), "both reject");
}

#[test]
fn entry_of_several_limits_ends_when_the_first_could_pass() {
    let (fast, slow) = (limit(Algorithm::TokenBucket, 10, Unit::Second), yearly(10));
    let origin = Instant::now();
    let mut counters = Counters::new(&[(fast, true), (slow, true)], OverLimitCache::new(MIB, false, origin), origin);
    counters.decide(0, take(10));
    counters.decide(0, take(1));
    assert!(counters.known(99_999, take(1)).is_some());
    assert_eq!(counters.known(100_000, take(1)), None);
}

#[test]
fn more_hits_than_another_limit_allows_miss_the_cache() {
    let origin = Instant::now();
    let limits = [(yearly(10), true), (limit(Algorithm::FixedWindow, 12, Unit::Day), true)];
    let mut counters = Counters::new(&limits, OverLimitCache::new(MIB, false, origin), origin);
    counters.decide(0, take(10));
    let rejected = counters.decide(0, take(1));
    assert_eq!((rejected[0].admitted, rejected[1].admitted, rejected[1].remaining), (false, true, 2));
    assert!(counters.known(0, take(1)).is_some());
    assert!(counters.known(0, take(2)).is_some());
    assert_eq!(counters.known(0, take(3)), None, "the other limit would refuse it as well, and for longer");
}

#[test]
fn memory_is_bounded_and_expired_entries_make_room() {
    let mut counters = Counters::of(yearly(1));
    counters.decide(0, take(1));
    let rejected = counters.charge(0, take(1));
    let command = counters.command(take(1));
    let origin = counters.origin;
    let over = OverLimitCache::new(MIB, false, origin);
    // All shards are used, for any ids.
    let id = |key: u128| key.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    let learn = |keys: std::ops::Range<u128>, at: Instant| {
        keys.for_each(|key| {
            over.record_results(id(key), from_ref(&command), from_ref(&rejected), CallTimes { sent: at, answered: at });
        });
    };
    learn(0..100_000, origin);
    let kept = over.entry_count();
    println!("{} bytes each", MIB / kept);
    // An entry with one limit takes 200 to 500 bytes.
    assert!((MIB / 500..MIB / 200).contains(&kept), "{kept}");
    let first = over.find_rejection(id(0), from_ref(&command), origin);
    assert!(first.is_some(), "what is there stays");
    let ended = origin + Duration::from_secs(1);
    learn(100_000..200_000, ended);
    assert!(over.entry_count().abs_diff(kept) < kept / 10, "{} {kept}", over.entry_count());
    assert!(over.find_rejection(id(100_000), from_ref(&command), ended).is_some());

    over.sweep(ended, 0, 2);
    assert!(over.entry_count() > 0);
    (0..2).for_each(|turn| over.sweep(ended + Duration::from_secs(1), turn, 2));
    assert_eq!(over.entry_count(), 0);
}

#[test]
fn zero_capacity_caches_nothing() {
    let origin = Instant::now();
    let mut counters = Counters::new(&[(yearly(1), true)], OverLimitCache::new(0, true, origin), origin);
    counters.decide(0, take(2));
    assert_eq!((counters.known(0, take(2)), counters.over.entry_count()), (None, 0));
}

/// Reproducible random times: the upper bits of a linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn one_of<T: Copy, const N: usize>(&mut self, choices: [T; N]) -> T {
        choices[usize::try_from(self.below(N as u64)).unwrap()]
    }
}

#[test]
fn cached_rejection_agrees_with_the_counter() {
    let mut random = Random(5);
    let mut known_before = 0;
    for _ in 0..2_000 {
        let limits: Vec<_> = (0..=random.below(2))
            .map(|_| {
                let algorithm = random.one_of(Algorithm::ALL);
                let unit = random.one_of([Unit::Second, Unit::Minute]);
                let requests_per_unit = u32::try_from(random.below(6)).unwrap();
                (limit(algorithm, requests_per_unit, unit), random.below(4) > 0)
            })
            .collect();
        let origin = Instant::now();
        let mut counters = Counters::new(&limits, OverLimitCache::new(MIB, false, origin), origin);
        let mut now_us = 0;
        for _ in 0..60 {
            let most_us = random.one_of([10, 100_000, 2_000_000]);
            now_us += random.below(most_us);
            let max_delay_us = random.one_of([0, 300_000]);
            let request = ChargeRequest::new(Hits::Charge(1 + random.below(4)), max_delay_us);
            let Some(known) = counters.known(now_us, request) else {
                counters.decide(now_us, request);
                continue;
            };
            known_before += 1;
            let found = counters.charge(now_us, request);
            assert!(
                limits.iter().zip(&found).any(|((_, enforced), result)| *enforced && !result.admitted),
                "{limits:?} {request:?} at {now_us}: {known:?} {found:?}"
            );
            for (known, found) in known.iter().zip(&found) {
                assert_eq!(known.admitted, found.admitted, "{limits:?} {request:?} at {now_us}");
                let (promised, found_us) = (known.retry_after_us, found.retry_after_us);
                assert_eq!(promised.is_none(), found_us.is_none(), "{limits:?} {request:?} at {now_us}");
                // Both are rounded up to microseconds.
                let early = promised.zip(found_us).map_or(0, |(promised, found_us)| promised.abs_diff(found_us));
                assert!(early <= 1, "{promised:?} {found_us:?}: {limits:?} {request:?} at {now_us}");
            }
        }
    }
    assert!(known_before > 10_000, "{known_before}");
}
