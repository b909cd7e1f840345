//! Division of a global limit among regions, and the parts of the service that leave global limits alone.

use std::num::{NonZeroU16, NonZeroU32};
use std::slice::from_ref;

use proptest::prelude::*;
use smallvec::SmallVec;
use tokio::time::Instant;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::RegionConnection;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{Charge, ChargeRequest, Counter};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::{GlobalScope, Limit, LimitError, LimitSpec, Overshoot, RegionLossPolicy, Scope};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::fallback::Fallback;
use tollkeeper::store::over_limit_cache::{CallTimes, OverLimitCache};
use tollkeeper::store::redis::key::build_counter_keys;

const NOW: Time = Time::from_secs(1_783_468_800);

fn global(regions: u16) -> GlobalScope {
    GlobalScope::new(NonZeroU16::new(regions).unwrap())
}

fn spec(algorithm: Algorithm, requests: u32, scope: GlobalScope) -> LimitSpec {
    let minute = Period::new(Unit::Minute, 1).unwrap();
    LimitSpec { scope: Some(Scope::Global(scope)), ..LimitSpec::new(algorithm, requests.into(), minute) }
}

fn with_charge<T>(limit: &Limit, hits: u64, then: impl FnOnce(&Charge<'_>) -> T) -> T {
    let entries = [Entry { key: b"user", value: b"ann" }];
    let counter = Counter { limit, shadow: false, quota: false, tag: hash_limit_identity(limit, 0), epoch: 0 };
    let path = CounterPath { domain: "shop", entries: &entries, shared: &[], candidate: None };
    then(&Charge::new(path, SmallVec::from_iter([counter]), ChargeRequest::new(Hits::Charge(hits), 0)))
}

proptest! {
    #[test]
    fn parts_of_all_regions_add_up_to_the_limit(
        requests in any::<u32>(),
        bucket_size in proptest::option::of(1..=u32::MAX),
        reserve_milli_percent in 0..=100_000_u32,
        overshoot in 1..=100_000_u32,
        regions in 1..=u16::MAX,
    ) {
        let scope = GlobalScope {
            reserve_milli_percent,
            max_overshoot: Overshoot::MilliPercent(overshoot),
            ..global(regions)
        };
        let spec = LimitSpec { bucket_size, ..spec(Algorithm::TokenBucket, requests, scope) };
        let Ok(limit) = Limit::new(&spec) else { return Ok(()) };
        let n = u64::from(regions);
        let sum = |own: u32, granted: u32| n * u64::from(own) + u64::from(granted);
        let is_zero = requests == 0;
        prop_assert_eq!(sum(limit.region_reserve().try_into().unwrap(), limit.max_granted_hits().try_into().unwrap()), u64::from(requests));
        let capacity = if is_zero { 0 } else { limit.capacity() };
        prop_assert_eq!(sum(limit.region_capacity().try_into().unwrap(), limit.max_granted_capacity().try_into().unwrap()), capacity);
        prop_assert!(is_zero || limit.region_reserve() > 0 && limit.region_capacity() > 0);
        // In thousandths of a hit; a span meets two allowances, and a bucket refills too.
        let overshoot = u64::from(requests) * u64::from(overshoot) / 100;
        prop_assert!(4 * n * limit.cut_off_allowance() * 1000 <= overshoot);
        let part = limit.region_part();
        prop_assert_eq!((part.requests_per_unit(), part.capacity()), (limit.region_reserve(), limit.region_capacity()));
        let above = limit.without_region_parts();
        let granted = (limit.max_granted_hits(), limit.max_granted_capacity());
        prop_assert_eq!((above.requests_per_unit(), above.capacity()), granted);
    }
}

#[test]
fn part_of_a_cut_off_region_follows_the_policy() {
    // 5 % of 1000 is 50, of which a region of two may admit an eighth in each period.
    let policies = [
        (RegionLossPolicy::Share, 6, 56),
        (RegionLossPolicy::Local, 500, 500),
        (RegionLossPolicy::Deny, 0, 50),
        (RegionLossPolicy::Allow, 1 << 40, u32::MAX.into()),
    ];
    for (on_region_loss, allowance, part) in policies {
        let scope = GlobalScope { on_region_loss, ..global(2) };
        let limit = Limit::new(&spec(Algorithm::FixedWindow, 1000, scope)).unwrap();
        assert_eq!(limit.cut_off_allowance(), allowance, "{on_region_loss:?}");
        let counted = |connection| limit.as_counted_in_region(connection).region_part().requests_per_unit();
        let both = [RegionConnection::Connected, RegionConnection::CutOff].map(counted);
        assert_eq!(both, [50, part], "{on_region_loss:?}");
    }
}

#[test]
fn global_limit_refuses_what_regions_cannot_decide_alone() {
    let plain = |algorithm| spec(algorithm, 1000, global(3));
    let month = Period::new(Unit::Month, 1).unwrap();
    let window = plain(Algorithm::FixedWindow);
    let bucket = plain(Algorithm::TokenBucket);
    let refused = [
        (plain(Algorithm::LeakyBucket), "leaky_bucket"),
        (plain(Algorithm::SlidingWindowLog), "sliding_window_log"),
        (LimitSpec { count_rejected: Some(true), ..window }, "count_rejected"),
        (LimitSpec { max_wait_us: Some(1), ..bucket }, "max_wait"),
        (LimitSpec { calendar_months: true, period: month, ..window }, "calendar months"),
    ];
    for (spec, with) in refused {
        let error = Limit::new(&spec).unwrap_err();
        assert_eq!(error.rule_file_key(), "scope", "{error}");
        assert!(error.to_string().contains(with), "{error}");
    }
    let small = Limit::new(&spec(Algorithm::FixedWindow, 29, global(3)));
    assert_eq!(small, Err(LimitError::ReserveTooSmall { regions: 3 }));
    assert!(Limit::new(&spec(Algorithm::FixedWindow, 30, global(3))).is_ok());
    assert!(
        !Limit::new(&window).unwrap().counts_rejected_hits(),
        "a sole window counts rejected hits, but not a global one"
    );
}

#[test]
fn counter_of_a_region_has_a_key_of_its_own() {
    let key_of = |limit: &Limit| {
        with_charge(limit, 1, |charge| build_counter_keys("", &charge.path, &charge.counters).remove(0))
    };
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindowCounter, Algorithm::TokenBucket] {
        let limit = Limit::new(&spec(algorithm, 1000, global(3))).unwrap();
        assert_eq!(key_of(&limit), format!("tk1:{{shop|user=ann}}:{algorithm}:60s"));
        assert_eq!(
            key_of(&limit.as_counted_in_region(RegionConnection::Connected)),
            format!("tk1:{{shop|user=ann}}:part_{algorithm}:60s")
        );
    }
}

#[test]
fn fallback_admits_the_cut_off_allowance_of_a_global_limit() {
    // 5 % of 1200 is 60, of which a region of four may admit a sixteenth, as its policy says; `local` says 300.
    let policies = [(RegionLossPolicy::Share, 3), (RegionLossPolicy::Deny, 0), (RegionLossPolicy::Local, 300)];
    for ((on_region_loss, share), replicas) in policies.into_iter().flat_map(|it| [(it, 1), (it, 3)]) {
        let scope = GlobalScope { on_region_loss, ..global(4) };
        let limit = Limit::new(&spec(Algorithm::FixedWindow, 1200, scope)).unwrap();
        let fallback = Fallback::new(1 << 20, NonZeroU32::new(replicas).unwrap());
        let admits = |hits| with_charge(&limit, hits, |charge| fallback.charge(charge, NOW)[0].admitted);
        let share = share / u64::from(replicas);
        assert_eq!((share == 0 || admits(share), admits(1)), (true, false), "{on_region_loss:?}, {replicas} replicas");
    }
}

#[test]
fn fallback_divides_a_limit_of_one_region_by_replicas() {
    let limit = Limit::new(&LimitSpec { scope: None, ..spec(Algorithm::FixedWindow, 120, global(4)) }).unwrap();
    for (replicas, share) in [(1, 120), (2, 60)] {
        let fallback = Fallback::new(1 << 20, NonZeroU32::new(replicas).unwrap());
        let admits = |hits| with_charge(&limit, hits, |charge| fallback.charge(charge, NOW)[0].admitted);
        assert_eq!((admits(share), admits(1)), (true, false), "{replicas} replicas");
    }
}

#[test]
fn fallback_keeps_its_hits_whatever_a_region_reports() {
    let scope = GlobalScope { on_region_loss: RegionLossPolicy::Local, ..global(4) };
    let limit = Limit::new(&spec(Algorithm::FixedWindow, 120, scope)).unwrap();
    let fallback = Fallback::new(1 << 20, NonZeroU32::MIN);
    let counted = limit.as_counted_in_region(RegionConnection::Connected);
    let mut state = State::empty_for(&counted);
    state.charge(&counted, NOW, ChargeRequest::new(Hits::Charge(1), 0));
    with_charge(&limit, 30, |charge| {
        assert!(fallback.charge(charge, NOW)[0].admitted);
        fallback.store_reported_states(
            charge.path_hash,
            &[(counted, hash_limit_identity(&limit, 0))],
            from_ref(&state),
            NOW,
        );
        assert!(!fallback.charge(charge, NOW)[0].admitted);
    });
}

#[test]
fn over_limit_cache_keeps_no_rejection_of_a_global_limit() {
    let plain =
        Limit::new(&LimitSpec { scope: None, ..spec(Algorithm::SlidingWindowCounter, 120, global(4)) }).unwrap();
    let shared = Limit::new(&spec(Algorithm::SlidingWindowCounter, 120, global(4))).unwrap();
    let shared = shared.as_counted_in_region(RegionConnection::Connected);
    for (limit, is_kept) in [(plain, true), (shared, false)] {
        let cache = OverLimitCache::new(1 << 20, true, Instant::now());
        let counter = OwnedCounter { limit, shadow: false, quota: false, tag: 0 };
        let request = ChargeRequest::new(Hits::Charge(100), 0);
        let command = OwnedCharge::new(SmallVec::from_iter([counter]), request);
        let mut state = State::empty_for(&limit);
        let results = [(); 2].map(|()| state.charge(&limit, NOW, request));
        assert!(!results[1].admitted && results[1].retry_after_us.is_some(), "{results:?}");
        let at = Instant::now();
        cache.record_results(
            1,
            from_ref(&command),
            &[SmallVec::from_iter([results[1]])],
            CallTimes { sent: at, answered: at },
        );
        assert_eq!(cache.find_rejection(1, from_ref(&command), at).is_some(), is_kept, "{limit:?}");
    }
}
