//! The memory store: exact under concurrency, compact, bounded, and evicting only counters that no longer matter.
//!
//! The algorithms are tested elsewhere. Here the store must decide as they do, under concurrent charges, sweeps and
//! any number of values.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use proptest::prelude::*;
use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::joint_charge::charge_together;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{Charge, ChargeRequest, ChargeResult, Counter, JointLimit};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::error::MemoryFull;
use tollkeeper::store::memory::MemoryStore;

use kit::fixtures::in_parallel;
use kit::test_service::{TestRequest, TestService};

/// A Wednesday in July, well inside windows of every length.
const NOW: Time = Time::from_secs(1_783_513_296);
const SECOND_US: u64 = 1_000_000;
const HOUR_US: u64 = 3_600 * SECOND_US;
/// Smallest store: one shard.
const SMALLEST: u64 = 256 * 1024;

fn spec(algorithm: Algorithm, requests_per_unit: u32, unit: Unit) -> LimitSpec {
    LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(unit, 1).unwrap())
}

/// A limit that this many concurrent hits exhaust; a leaky bucket delays them.
fn limit(algorithm: Algorithm, requests_per_unit: u32, unit: Unit) -> Limit {
    let queue_size = (algorithm == Algorithm::LeakyBucket).then_some(requests_per_unit);
    Limit::new(&LimitSpec { queue_size, sole: false, ..spec(algorithm, requests_per_unit, unit) }).unwrap()
}

/// Charges all `limits` of one value.
fn charge(
    store: &MemoryStore,
    value: &[u8],
    limits: &[Limit],
    hits: Hits,
    now: Time,
) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
    with_charge(value, limits, hits, |charge| store.charge(charge, now))
}

fn with_charge<T>(value: &[u8], limits: &[Limit], hits: Hits, then: impl FnOnce(&Charge<'_>) -> T) -> T {
    let entries = [Entry { key: b"user", value }];
    let counter = |limit| Counter { limit, shadow: false, quota: false, tag: hash_limit_identity(limit, 0), epoch: 0 };
    then(&Charge::new(
        CounterPath { domain: "shop", entries: &entries, shared: &[], candidate: None },
        limits.iter().map(counter).collect(),
        ChargeRequest::new(hits, u64::MAX),
    ))
}

/// Charges one hit from one limit of a key with a number.
fn hit(store: &MemoryStore, key: u64, limit: &Limit, now: Time) -> Result<ChargeResult, MemoryFull> {
    charge(store, &key.to_be_bytes(), std::slice::from_ref(limit), Hits::Charge(1), now).map(|levels| levels[0])
}

#[test]
fn of_200_concurrent_charges_exactly_the_limit_of_50_pass() {
    for algorithm in Algorithm::ALL {
        let limit = limit(algorithm, 50, Unit::Hour);
        let store = MemoryStore::new(1 << 20);
        for round in 0..20 {
            let departures = Mutex::new(Vec::new());
            in_parallel(8, |thread| {
                for turn in 0..25 {
                    // Threads read the clock at different times and overtake one another.
                    let now = NOW.plus_us(turn * 8 + thread);
                    let level = hit(&store, round, &limit, now).unwrap();
                    if level.admitted {
                        departures.lock().unwrap().push(now.plus_us(level.delay_us));
                    }
                }
            });
            let mut departures = departures.into_inner().unwrap();
            assert_eq!(departures.len(), 50, "{algorithm}, round {round}");
            if algorithm == Algorithm::LeakyBucket {
                departures.sort_unstable();
                let gaps: BTreeSet<u64> = departures.windows(2).map(|pair| pair[1].since_us(pair[0])).collect();
                assert_eq!(gaps, BTreeSet::from([HOUR_US / 50]), "one leaves every 72 s");
            }
        }
    }
}

#[test]
fn limits_of_a_descriptor_are_charged_all_or_none_under_concurrency() {
    for (place, first) in Algorithm::ALL.into_iter().enumerate() {
        for second in Algorithm::ALL.into_iter().skip(place + 1) {
            let limits = [limit(first, 60, Unit::Day), limit(second, 40, Unit::Hour)];
            let store = MemoryStore::new(1 << 20);
            let charged = AtomicU64::new(0);
            in_parallel(8, |thread| {
                for turn in 0..20 {
                    let hits = 1 + (thread + turn) % 3;
                    let levels = charge(&store, b"u", &limits, Hits::Charge(hits), NOW).unwrap();
                    if levels.iter().all(|level| level.admitted) {
                        assert_eq!(levels[0].after, levels[1].after, "{first} and {second}");
                        charged.fetch_add(hits, Ordering::Relaxed);
                    }
                }
            });
            let levels = charge(&store, b"u", &limits, Hits::Peek, NOW).unwrap();
            let charged = charged.into_inner();
            assert_eq!(levels.iter().map(|level| level.before).collect::<Vec<_>>(), [charged; 2], "{first}, {second}");
            assert_eq!(charged, 40, "a charge of 1 always found the last place");
        }
    }
}

#[test]
fn ever_new_values_stay_within_capacity() {
    const CAPACITY: u64 = 1 << 20;
    // With remaining hits, so that counters may be evicted.
    let limits = Algorithm::ALL.map(|algorithm| limit(algorithm, 2, Unit::Day));
    let store = MemoryStore::new(CAPACITY);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let feed = |thread: u64| {
            for key in 0..75_000 {
                let level = hit(&store, key * 2 + thread, &limits[usize::try_from(key % 5).unwrap()], NOW);
                assert!(level.is_ok_and(|level| level.admitted && level.before == 0), "key {key}");
            }
        };
        let feeders = [scope.spawn(move || feed(0)), scope.spawn(move || feed(1))];
        let watcher = scope.spawn(|| {
            let mut peak_bytes = 0;
            while !done.load(Ordering::Relaxed) {
                store.sweep(NOW, 0, 1);
                peak_bytes = peak_bytes.max(store.memory_usage().bytes);
                thread::yield_now();
            }
            peak_bytes
        });
        feeders.into_iter().for_each(|feeder| feeder.join().unwrap());
        done.store(true, Ordering::Relaxed);
        let peak_bytes = watcher.join().unwrap().max(store.memory_usage().bytes);
        assert!(peak_bytes <= CAPACITY, "{peak_bytes} bytes");
    });
    let usage = store.memory_usage();
    assert_eq!(usage.counters + usage.evicted, 150_000);
    assert!(usage.counters > 10_000, "{usage:?}");
}

#[test]
fn counter_over_its_limit_is_never_evicted() {
    let used_up = limit(Algorithm::FixedWindow, 1, Unit::Day);
    let ample = limit(Algorithm::FixedWindow, 10, Unit::Day);
    let store = MemoryStore::new(SMALLEST);
    for key in 0..400 {
        assert!(hit(&store, key, &used_up, NOW).unwrap().admitted);
    }
    for key in 1_000..40_000 {
        assert!(hit(&store, key, &ample, NOW).unwrap().admitted);
    }
    assert!(store.memory_usage().evicted > 30_000, "{:?}", store.memory_usage());
    for key in 0..400 {
        assert!(!hit(&store, key, &used_up, NOW).unwrap().admitted, "{key} was forgotten");
    }
}

#[test]
fn rotating_values_cannot_evict_a_rejecting_counter() {
    for algorithm in Algorithm::ALL {
        let limit = limit(algorithm, 3, Unit::Hour);
        let store = MemoryStore::new(SMALLEST);
        let own = || charge(&store, b"own", &[limit], Hits::Charge(1), NOW).unwrap()[0].admitted;
        assert_eq!([own(), own(), own(), own()], [true, true, true, false]);
        for key in 0..10_000 {
            hit(&store, key, &limit, NOW).unwrap();
        }
        assert!(store.memory_usage().evicted > 4_000, "{algorithm}: {:?}", store.memory_usage());
        assert!(!own(), "{algorithm}: flushed");
    }
}

/// A store of one shard full of counters over their limits, with one hit each.
fn full_of_rejecting_counters(limit: &Limit) -> (MemoryStore, u64) {
    let store = MemoryStore::new(SMALLEST);
    let count = (0..20_000).find(|key| hit(&store, *key, limit, NOW).is_err()).unwrap();
    (store, count)
}

#[test]
fn store_full_of_rejecting_counters_keeps_them_and_takes_no_new_key() {
    for algorithm in Algorithm::ALL {
        let limit = limit(algorithm, 1, Unit::Day);
        let (store, count) = full_of_rejecting_counters(&limit);
        assert!(count > 1_000, "{algorithm}: full at {count}");
        for key in count..count + 100 {
            assert_eq!(hit(&store, key, &limit, NOW), Err(MemoryFull), "{algorithm}");
            // Peeks and refunds need no room.
            let peek = charge(&store, &key.to_be_bytes(), &[limit], Hits::Peek, NOW).unwrap()[0];
            assert!(peek.admitted, "{algorithm}");
            assert!(charge(&store, &key.to_be_bytes(), &[limit], Hits::Refund(1), NOW).is_ok(), "{algorithm}");
        }
        for key in 0..count {
            assert!(!hit(&store, key, &limit, NOW).unwrap().admitted, "{algorithm}: {key} was forgotten");
        }
        assert_eq!(store.memory_usage().evicted, 0);
        // The counters have expired, buckets a day later than others, and new ones replace them without a sweep.
        let later = NOW.plus_us(2 * 24 * HOUR_US + SECOND_US);
        for key in count..count + 100 {
            assert!(hit(&store, key, &limit, later).unwrap().admitted, "{algorithm}");
        }
    }
}

#[test]
fn growing_logs_stay_within_capacity_and_keep_their_limit() {
    // 200 logs of up to 1000 records would need 3 MB.
    let log = limit(Algorithm::SlidingWindowLog, 1_000, Unit::Day);
    let store = MemoryStore::new(SMALLEST);
    for turn in 0..100_000 {
        let _ = hit(&store, turn % 200, &log, NOW.plus_us(turn));
        let bytes = store.memory_usage().bytes;
        assert!(bytes <= SMALLEST, "{bytes} bytes after {turn}");
    }
    assert!(store.memory_usage().evicted > 0);

    // A log larger than a shard evicts what it can, and then continues to grow.
    let long = limit(Algorithm::SlidingWindowLog, 10_000, Unit::Day);
    let charge = |turn: u64| hit(&store, 1_000, &long, NOW.plus_us(200_000 + turn)).unwrap().admitted;
    assert_eq!((0..20_000).filter(|turn| charge(*turn)).count(), 10_000);
    assert!(store.memory_usage().bytes < 3 * SMALLEST, "{:?}", store.memory_usage());
}

#[test]
fn refunds_and_peeks_create_no_counter() {
    let store = MemoryStore::new(SMALLEST);
    for algorithm in Algorithm::ALL {
        let limit = [limit(algorithm, 5, Unit::Day)];
        for key in 0_u32..100 {
            for hits in [Hits::Refund(3), Hits::Peek] {
                let levels = charge(&store, &key.to_be_bytes(), &limit, hits, NOW).unwrap();
                assert!(levels[0].admitted && levels[0].remaining == 5, "{algorithm}: {levels:?}");
            }
        }
    }
    assert_eq!(store.memory_usage().counters, 0);
}

#[test]
fn key_without_room_is_decided_by_policy() {
    let mut service = TestService::new([("TOLLKEEPER_ON_STORE_ERROR", "allow")], NOW);
    service.load([(
        "rules.yaml",
        "domain: shop
descriptors:
  - {key: fill, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: allow}}
  - {key: unsaid, rate_limit: {unit: day, requests_per_unit: 7, name: n}}
  - {key: local, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: local}}
  - {key: allow, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: allow}}
  - {key: deny, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: deny}}
  - {key: error, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: error}}
  - {key: trial, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: error}}
  - key: both
    rate_limit:
      - {unit: day, requests_per_unit: 7, on_store_error: allow}
      - {unit: hour, requests_per_unit: 7, on_store_error: deny}
",
    )]);
    service.inner.decider.store = MemoryStore::new(SMALLEST).into();
    let response_text = |keys: &[&str]| {
        let request = keys.iter().fold(TestRequest::new("shop"), |request, key| request.descriptor(&[(key, "x")]));
        service
            .decide(&request)
            .map_or_else(|error| format!("{}: {error}", error.grpc_code()), |response| response.text())
    };
    let fill = |value: u32| {
        service.decide(&TestRequest::new("shop").descriptor(&[("fill", &value.to_string())])).unwrap().text()
    };
    // A charge without room is allowed without a limit.
    (0..20_000).find(|value| fill(*value) == "OK [OK]").unwrap();

    let error = "The service is currently unavailable: \
                 the store failed, and the policy is `on_store_error: error`";
    let table: [(&[&str], &str); 10] = [
        (&["unsaid"], "OK [OK]"),
        // `local`: it is limited in the overflow shard.
        (&["local"], "OK [OK 7/DAY left 6 in 41904 s]"),
        (&["allow"], "OK [OK]"),
        (&["deny"], "OVER [OVER 7/DAY left 0 in 1 s] Retry-After: 1"),
        (&["error"], error),
        (&["trial"], "OK [OK]"),
        // The status shows the limit that has the policy.
        (&["both"], "OVER [OVER 7/HOUR left 0 in 1 s] Retry-After: 1"),
        (&["allow", "error"], error),
        // A rejection by policy ranks below an error.
        (&["error", "deny"], error),
        (&["allow", "deny", "local"], "OVER [OK, OVER 7/DAY left 0 in 1 s, OK 7/DAY left 5 in 41904 s] Retry-After: 1"),
    ];
    for (keys, expected) in table {
        assert_eq!(response_text(keys), expected, "{keys:?}");
    }
    // An existing counter that rejects takes precedence over an error.
    let rejection =
        service.decide(&TestRequest::new("shop").descriptor(&[("fill", "0")]).descriptor(&[("error", "x")])).unwrap();
    assert!(rejection.over_limit(), "{}", rejection.text());
    // A peek needs no room.
    let peek = service.decide(&TestRequest::new("shop").descriptor(&[("error", "x")]).hits(0)).unwrap();
    assert_eq!(peek.statuses(), [(false, 7)]);
}

/// A service whose store has no room for a new counter; `prepare` runs before it is filled.
fn full_service(env: &[(&str, &str)], rules: &str, prepare: impl FnOnce(&TestService)) -> TestService {
    let mut service = TestService::new(env.iter().copied(), NOW);
    let fill = "  - {key: fill, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: allow}}";
    service.load([("rules.yaml", format!("domain: shop\ndescriptors:\n{fill}\n{rules}").as_str())]);
    service.inner.decider.store = MemoryStore::new(SMALLEST).into();
    prepare(&service);
    fill_up(&service, 0);
    service
}

/// Charges new keys, numbered from `first` on, until one has no room.
fn fill_up(service: &TestService, first: u32) {
    let fill = |value: u32| {
        service.decide(&TestRequest::new("shop").descriptor(&[("fill", &value.to_string())])).unwrap().text()
    };
    (first..first + 20_000).find(|value| fill(*value) == "OK [OK]").unwrap();
}

#[test]
fn existing_counter_of_a_list_rejects_if_another_has_no_room() {
    for policy in ["local", "allow", "error"] {
        let rules = format!(
            "  - key: list
    rate_limit:
      - {{unit: day, requests_per_unit: 3, on_store_error: {policy}}}
      - {{unit: hour, requests_per_unit: 1000, on_store_error: {policy}}}"
        );
        let list = || TestRequest::new("shop").descriptor(&[("list", "x")]);
        let service =
            full_service(&[], &rules, |service| assert!(!service.decide(&list().hits(3)).unwrap().over_limit()));
        // The counter of the hour expires and gives its room to another; that of the day is at its limit and stays.
        service.advance_us(3 * 3_600_000_000);
        service.inner.decider.store.sweep(service.now(), 0, 1);
        fill_up(&service, 20_000);
        for _ in 0..5 {
            let response = service.decide(&list()).map(|response| response.over_limit());
            assert!(matches!(response, Ok(true)), "{policy}: {response:?}");
        }
    }
}

#[test]
fn spared_limit_is_charged_if_a_policy_admits_the_request_after_all() {
    let env = [("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")];
    let rules = "  - {key: new, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: allow}}
  - {key: limited, rate_limit: {unit: day, requests_per_unit: 3, on_store_error: deny}}";
    let limited = || TestRequest::new("shop").descriptor(&[("limited", "x")]);
    // The counter exists, and is refunded once the store is full.
    let service =
        full_service(&env, rules, |service| assert!(!service.decide(&limited().hits(3)).unwrap().over_limit()));
    service.decide(&limited().refund(3)).unwrap();
    // The dry run rejects two hits of a new key, but the charge has no room, and its policy admits.
    let request = |key: u32| limited().descriptor(&[("new", &key.to_string())]).hits(2);
    let admitted = (0..20).filter(|key| !service.decide(&request(*key)).unwrap().over_limit()).count();
    assert_eq!(admitted, 3);
}

#[test]
fn sweep_drops_expired_counters_and_no_others() {
    // Halfway into a second, where rounding would show.
    let now = NOW.plus_us(SECOND_US / 2);
    for algorithm in Algorithm::ALL {
        let limit = limit(algorithm, 1, Unit::Second);
        let store = MemoryStore::new(8 << 20);
        // Buckets are kept for one more period, in case the limit is lowered.
        let beyond = match algorithm {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => SECOND_US,
            _ => 0,
        };
        let expires = hit(&store, 0, &limit, now).unwrap().reset_us + beyond;
        for key in 1..3_000 {
            hit(&store, key, &limit, now).unwrap();
        }
        let full = store.memory_usage();
        let sweep_all = |now| (0..7).for_each(|turn| store.sweep(now, turn, 7));
        for early in [now, now.plus_us(expires / 2), now.plus_us(expires - 1)] {
            sweep_all(early);
            assert_eq!(
                store.memory_usage().counters,
                3_000,
                "{algorithm}: dropped {} us early",
                expires - early.since_us(now)
            );
        }
        sweep_all(now.plus_us(expires + SECOND_US));
        let swept = store.memory_usage();
        assert_eq!((swept.counters, swept.evicted), (0, 0), "{algorithm}");
        assert!(swept.bytes < full.bytes / 4, "{algorithm}: {full:?}, then {swept:?}");
    }
}

#[test]
fn token_bucket_takes_at_most_64_bytes() {
    // Keys are distributed evenly and shards are independent, so a fifth of a million keys in a fifth of the shards
    // measures the same. The size per counter is checked during growth, where it is largest just after an index grew.
    let limit = limit(Algorithm::TokenBucket, 5, Unit::Hour);
    let store = MemoryStore::new(51 * SMALLEST);
    for key in 0..200_000 {
        hit(&store, key, &limit, NOW).unwrap();
        if key >= 50_000 && key % 1_000 == 0 {
            let usage = store.memory_usage();
            assert!(usage.bytes <= 64 * usage.counters, "{usage:?}");
        }
    }
    let usage = store.memory_usage();
    assert_eq!((usage.counters, usage.evicted), (200_000, 0));
    assert!(usage.bytes <= 64 * usage.counters, "{usage:?}");
}

/// Limits of a descriptor in the model test: alone and together, some that count rejected hits. Limits of one algorithm
/// and period share counters; buckets among them drain at one rate, because an expiry is valid for one rate only.
fn palette() -> Vec<Vec<Limit>> {
    let counting =
        |algorithm| LimitSpec { count_rejected: Some(true), sole: false, ..spec(algorithm, 4, Unit::Second) };
    let mut sets: Vec<Vec<Limit>> = Algorithm::ALL.map(|algorithm| vec![limit(algorithm, 4, Unit::Second)]).into();
    sets.extend(
        [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindowLog, Algorithm::SlidingWindowCounter]
            .map(|algorithm| vec![Limit::new(&counting(algorithm)).unwrap()]),
    );
    sets.push(vec![
        limit(Algorithm::SlidingWindowLog, 3, Unit::Second),
        limit(Algorithm::TokenBucket, 9, Unit::Minute),
    ]);
    sets.push(vec![limit(Algorithm::LeakyBucket, 4, Unit::Second), limit(Algorithm::FixedWindow, 9, Unit::Minute)]);
    sets.push(Algorithm::ALL.map(|algorithm| limit(algorithm, 4, Unit::Second)).into());
    sets
}

#[derive(Clone, Debug)]
enum Step {
    /// Advances the time.
    Pass { micros: u64 },
    /// Sweeps all shards.
    Sweep,
    /// A charge by a caller whose clock is `ahead_us` ahead.
    Charge { key: u8, set: usize, hits: Hits, ahead_us: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let hits = prop_oneof![
        1 => Just(Hits::Peek),
        6 => (1_u64..4).prop_map(Hits::Charge),
        1 => (1_u64..4).prop_map(Hits::Refund),
    ];
    let ahead_us = prop_oneof![3 => Just(0), 1 => 0..SECOND_US / 4];
    prop_oneof![
        2 => prop_oneof![0..SECOND_US / 10, 0..2 * SECOND_US, 0..90 * SECOND_US].prop_map(|micros| Step::Pass { micros }),
        1 => Just(Step::Sweep),
        9 => (0_u8..4, 0..palette().len(), hits, ahead_us).prop_map(|(key, set, hits, ahead_us)| {
            // A refund to a missing counter stores nothing, not even its time.
            let ahead_us = if matches!(hits, Hits::Refund(_)) { 0 } else { ahead_us };
            Step::Charge { key, set, hits, ahead_us }
        }),
    ]
}

proptest! {

    /// Model: a map of states without shards, packing, expiry or eviction.
    #[test]
    fn decisions_equal_those_of_an_unbounded_map(steps in prop::collection::vec(step(), 1..120)) {
        let palette = palette();
        let store = MemoryStore::new(1 << 20);
        let mut states: HashMap<(u8, u128), State> = HashMap::new();
        let mut now = NOW;
        for step in steps {
            match step {
                Step::Pass { micros } => now = now.plus_us(micros),
                Step::Sweep => store.sweep(now, 0, 1),
                Step::Charge { key, set, hits, ahead_us } => {
                    let limits = &palette[set];
                    let at = now.plus_us(ahead_us);
                    let spec: Vec<JointLimit<'_>> = limits.iter().map(|limit| JointLimit { limit, rejects_others: true }).collect();
                    let tags: Vec<u128> = limits.iter().map(|limit| hash_limit_identity(limit, 0)).collect();
                    let state = |(limit, tag): (&Limit, &u128)| {
                        states.get(&(key, *tag)).cloned().unwrap_or_else(|| State::empty(limit.algorithm()))
                    };
                    let mut charged: Vec<State> = limits.iter().zip(&tags).map(state).collect();
                    let request = ChargeRequest::new(hits, u64::MAX);
                    let expected = charge_together(&spec, &mut charged, at, request);
                    let peek_admissions = with_charge(&[key], limits, hits, |charge| store.peek_admissions(charge, at).iter().all(|peek_admissions| *peek_admissions));
                    prop_assert_eq!(peek_admissions, expected.iter().all(|level| level.admitted));
                    prop_assert_eq!(charge(&store, &[key], limits, hits, at), Ok(expected));
                    states.extend(tags.into_iter().map(|tag| (key, tag)).zip(charged));
                }
            }
        }
        prop_assert!(store.memory_usage().counters <= states.len() as u64);
        prop_assert_eq!(store.memory_usage().evicted, 0);
    }
}

#[test]
fn bucket_expiry_accounts_for_a_lowered_limit() {
    for algorithm in [Algorithm::TokenBucket, Algorithm::LeakyBucket] {
        let limit = |count| {
            let mut spec = LimitSpec::new(algorithm, count, Period::new(Unit::Minute, 1).unwrap());
            (spec.bucket_size, spec.queue_size) = match algorithm {
                Algorithm::TokenBucket => (Some(100), None),
                _ => (None, Some(100)),
            };
            Limit::new(&spec).unwrap()
        };
        let store = MemoryStore::new(SMALLEST);
        assert!(charge(&store, b"x", &[limit(6_000)], Hits::Charge(100), NOW).unwrap()[0].admitted);
        // At 6000 per minute the bucket is empty after a second; at 60 per minute after a hundred seconds.
        let later = NOW.plus_us(10 * SECOND_US);
        (0..32).for_each(|turn| store.sweep(later, turn, 32));
        let level = charge(&store, b"x", &[limit(60)], Hits::Peek, later).unwrap()[0];
        assert_eq!((level.after, level.remaining), (90, 10), "{algorithm}");
    }
}

#[test]
fn overflow_key_is_limited_too() {
    let one = limit(Algorithm::FixedWindow, 1, Unit::Day);
    let (store, count) = full_of_rejecting_counters(&one);
    let three = [limit(Algorithm::FixedWindow, 3, Unit::Day)];
    let spilled = |key: u64| {
        with_charge(&key.to_be_bytes(), &three, Hits::Charge(1), |charge| store.charge_in_overflow_shard(charge, NOW))
            [0]
        .admitted
    };
    assert_eq!([(); 5].map(|()| spilled(count + 7)), [true, true, true, false, false]);
    // The overflow shard stays within its capacity.
    let before = store.memory_usage().bytes;
    for key in 0..50_000 {
        let _ = spilled(1_000_000 + key);
    }
    assert!(store.memory_usage().bytes < before + (1 << 19), "{} bytes after {before}", store.memory_usage().bytes);
}
