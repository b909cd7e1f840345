//! Behaviour that is the same in every store: in memory, in one Redis, and in a cluster; that of fixed windows in
//! memcached too.
//!
//! Each behaviour is a function of a store, and a test on each of them, so that a failure names both. Tests set the
//! time, in Redis too. Other tests cover the decisions of the algorithms and the behaviour of a single store.

mod candidates;
mod model;
mod times;

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::settings::Settings;
use tollkeeper::store::Store;

use self::candidates::candidate_changes_no_verdict_and_counts_as_if_alone;
use kit::fixtures::{assert_responses, decide, in_parallel, load_shop_rules, shop_request};
use kit::memcached::{Memcached, memcached};
use kit::redis::cluster::Cluster;
use kit::redis::{Server, options};
use kit::redis_counters::{TimeSource, start_store, wait_until_connected};
use kit::test_service::{TestRequest, TestService, store_runtime};
use kit::wait_for;

/// Noon on Wednesday the 8th of July 2026.
const NOON: Time = Time::from_secs(1_783_512_000);
const MS: u64 = 1_000;
const SECOND: u64 = 1_000 * MS;
const HOUR: u64 = 3_600 * SECOND;

/// A store, and the settings that select it.
struct StoreUnderTest {
    /// Variables that name the servers; empty for memory.
    env: Vec<(&'static str, String)>,
    /// Algorithms that the store has.
    algorithms: &'static [Algorithm],
    /// Keeps the servers running while a test uses them.
    _servers: Option<Arc<dyn Any + Send + Sync>>,
}

impl StoreUnderTest {
    fn memory() -> Self {
        Self { env: Vec::new(), algorithms: &Algorithm::ALL, _servers: None }
    }

    fn redis() -> Self {
        static SERVER: Shared<Server> = Shared::new();
        let server = SERVER.get_or_start(|| options().start());
        let env = vec![("REDIS_SOCKET_TYPE", "tcp".to_owned()), ("REDIS_URL", server.address())];
        Self { env, algorithms: &Algorithm::ALL, _servers: Some(server) }
    }

    fn cluster() -> Self {
        static CLUSTER: Shared<Cluster> = Shared::new();
        let cluster = CLUSTER.get_or_start(Cluster::start);
        let env = vec![("REDIS_TYPE", "cluster".to_owned()), ("REDIS_URL", cluster.addresses().join(","))];
        Self { env, algorithms: &Algorithm::ALL, _servers: Some(cluster) }
    }

    fn memcache() -> Self {
        static SERVER: Shared<Memcached> = Shared::new();
        let server = SERVER.get_or_start(|| memcached().start());
        let env = vec![("BACKEND_TYPE", "memcache".to_owned()), ("MEMCACHE_HOST_PORT", server.address())];
        Self { env, algorithms: &[Algorithm::FixedWindow], _servers: Some(server) }
    }

    /// The store without its cache of rejections, which knows nothing of the time that a test sets.
    fn without_over_limit_cache(&self) -> Self {
        let mut env = self.env.clone();
        if !env.is_empty() {
            env.push(("TOLLKEEPER_OVER_LIMIT_CACHE_BYTES", "0".to_owned()));
        }
        Self { env, algorithms: self.algorithms, _servers: self._servers.clone() }
    }

    /// A service with its own counters in this store and rules of the domain `shop`, at noon.
    fn service(&self, env: &[(&str, &str)], rules: &str) -> TestService {
        static SERVICES: AtomicU64 = AtomicU64::new(0);
        let mut service = TestService::new(env.iter().copied().chain([("TOLLKEEPER_ON_STORE_ERROR", "error")]), NOON);
        if !self.env.is_empty() {
            let prefix = format!("{}:", SERVICES.fetch_add(1, Ordering::Relaxed));
            let mut of_store = vec![("CACHE_KEY_PREFIX", &*prefix), ("TOLLKEEPER_STORE_TIMEOUT", "5s")];
            of_store.extend(self.env.iter().map(|(name, value)| (*name, &**value)));
            service = service.with_store(start_shared_store(&of_store));
        }
        load_shop_rules(&service, rules);
        service
    }
}

/// A store in the servers that these variables name, connected.
fn start_shared_store(env: &[(&str, &str)]) -> Store {
    if env.iter().all(|(name, _)| *name != "BACKEND_TYPE") {
        let redis = start_store(env, TimeSource::Caller);
        wait_until_connected(&redis);
        return Store::from(redis);
    }
    let variables = env.iter().map(|(name, value)| (name.into(), value.into()));
    let (settings, _) = Settings::from_env(variables).expect("the settings are valid");
    let _within = store_runtime().enter();
    let store = Store::open(&settings.store, 1 << 20, settings.slots.holder_timeout);
    wait_for("all connections", || {
        let pools = store.stats().shared.expect("replicas share the store").pools;
        pools.iter().all(|pool| pool.open_connection_count == 2).then_some(())
    });
    store
}

/// Servers that tests running at the same time share; the last test to end stops them.
struct Shared<T>(Mutex<Weak<T>>);

impl<T> Shared<T> {
    const fn new() -> Self {
        Self(Mutex::new(Weak::new()))
    }

    fn get_or_start(&self, start: impl FnOnce() -> T) -> Arc<T> {
        // A test that could not start the servers panicked while holding the lock; the next test retries.
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let started = Arc::new(start());
            *shared = Arc::downgrade(&started);
            started
        })
    }
}

/// Makes each behaviour a test on every store with all algorithms: `memory::NAME`, `redis::NAME` and `cluster::NAME`.
macro_rules! on_every_store {
    ($($behaviour:ident),+ $(,)?) => {
        on_every_store!(@store memory: $($behaviour),+);
        on_every_store!(@store redis: $($behaviour),+);
        on_every_store!(@store cluster: $($behaviour),+);
    };
    (@store $store:ident: $($behaviour:ident),+) => {
        mod $store {
            $(
                #[test]
                fn $behaviour() {
                    super::$behaviour(&super::StoreUnderTest::$store());
                }
            )+
        }
    };
}

/// Makes each behaviour of fixed windows a test on every store: `memcache::NAME` too.
macro_rules! on_memcache_too {
    ($($behaviour:ident),+ $(,)?) => {
        on_every_store!(@store memcache: $($behaviour),+);
        mod fixed_windows {
            use super::{StoreUnderTest, $($behaviour),+};
            on_every_store!($($behaviour),+);
        }
    };
}

on_memcache_too![
    charge_refund_and_peek_report_what_remains,
    concurrent_charges_admit_exactly_the_limit,
    new_epoch_starts_a_new_counter,
    limit_overrides_of_one_unit_share_a_counter,
    only_values_under_share_threshold_share_a_counter,
    rejected_hits_count_until_the_window_ends,
    counter_outlives_a_change_of_its_rule,
    stop_cache_key_increment_spares_a_fixed_window,
    limit_above_32_bits_is_exact,
];

mod of_time {
    use super::StoreUnderTest;
    use super::times::*;

    on_every_store![
        ban_rejects_until_it_ends_with_any_algorithm,
        ban_begins_after_as_many_rejections_as_written,
        tries_prolong_a_ban_where_rejected_hits_count,
        rejected_peeks_begin_a_ban_that_counts_them,
        ban_of_one_limit_charges_no_other,
        reset_lifts_a_ban,
        window_ends_with_the_local_day_and_month,
        changed_window_starts_a_new_counter,
        limit_is_absent_outside_its_active_times,
        counter_of_two_times_of_day_begins_the_other_one_as_used_up_at_most,
        shortened_ban_ends_by_its_new_length,
    ];
}

on_every_store![
    limits_of_a_descriptor_are_charged_all_or_none,
    hits_rejected_by_one_limit_are_not_charged_to_the_others,
    shadow_limit_beside_an_enforced_limit_rejects_nothing,
    exceeded_quota_does_not_keep_other_limits_from_being_charged,
    peek_changes_nothing,
    refund_to_an_unused_counter_changes_nothing,
    reload_keeps_counters_of_limits_with_the_same_identity,
    changed_limit_counts_hits_charged_before,
    lowered_limit_makes_no_one_wait_for_the_former_one,
    windows_expire_and_buckets_refill,
    queued_requests_are_delayed_in_order,
    stop_cache_key_increment_spares_limits_beside_a_rejecting_one,
    decisions_and_counters_follow_the_reference_model,
    strict_and_eventual_charges_on_one_log_keep_their_own_periods,
    candidate_changes_no_verdict_and_counts_as_if_alone,
    sliding_window_above_32_bits_is_exact,
];

/// Remaining hits of each descriptor's limit, by a peek.
fn left(service: &TestService, descriptors: &str) -> Vec<u32> {
    let mut peek = shop_request(descriptors);
    peek.0.descriptors.iter_mut().for_each(|descriptor| descriptor.hits_addend = Some(0));
    decide(service, &peek).statuses().into_iter().map(|(_, left)| left).collect()
}

const NO_HEADER: &[(&str, &str)] = &[("TOLLKEEPER_RETRY_AFTER_HEADER", "")];

fn charge_refund_and_peek_report_what_remains(store: &StoreUnderTest) {
    let service = store.service(NO_HEADER, "descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 10}}]");
    let k = || shop_request("k");
    assert_responses(
        &service,
        &[
            (k(), "OK [OK 10/HOUR left 9 in 3600 s]"),
            (k().request_hits(3), "OK [OK 10/HOUR left 6 in 3600 s]"),
            (k().hits(0), "OK [OK 10/HOUR left 6 in 3600 s]"),
            (k().refund(3), "OK [OK 10/HOUR left 9 in 3600 s]"),
            (k().refund(100), "OK [OK 10/HOUR left 10 in 3600 s]"),
            (k().hits(11), "OVER [OVER 10/HOUR left 0 in 3600 s]"),
            (k().hits(0), "OVER [OVER 10/HOUR left 0 in 3600 s]"),
            (k().refund(1), "OK [OK 10/HOUR left 0 in 3600 s]"),
            (k(), "OVER [OVER 10/HOUR left 0 in 3600 s]"),
            (k().hits(u64::MAX), "OVER [OVER 10/HOUR left 0 in 3600 s]"),
            (k().refund(u64::MAX), "OK [OK 10/HOUR left 0 in 3600 s]"),
            (
                shop_request("k=2; k=2; k=2").request_hits(4),
                "OVER [OK 10/HOUR left 6 in 3600 s, OK 10/HOUR left 2 in 3600 s, OVER 10/HOUR left 0 in 3600 s]",
            ),
        ],
    );
}

fn sliding_window_above_32_bits_is_exact(store: &StoreUnderTest) {
    let most = (1_u64 << 53) - 1;
    let rules = format!(
        "descriptors:\n- key: sliding\n  rate_limit: {{unit: year, requests_per_unit: {most}, algorithm: sliding_window_counter}}\n"
    );
    let service = store.service(&[], &rules);
    // Rejected hits do not count.
    let sliding = [
        (shop_request("sliding").hits(most - 5_000_000_000), false),
        (shop_request("sliding").hits(5_000_000_001), true),
        (shop_request("sliding").hits(5_000_000_000), false),
        (shop_request("sliding").hits(1), true),
        (shop_request("sliding").refund(3), false),
        (shop_request("sliding").hits(4), true),
        (shop_request("sliding").hits(3), false),
        (shop_request("sliding").hits(u64::MAX), true),
        (shop_request("sliding").refund(u64::MAX), false),
        (shop_request("sliding").hits(most), false),
    ];
    for (request, is_over) in sliding {
        assert_eq!(decide(&service, &request).over_limit(), is_over, "{request:?}");
    }
}

fn limit_above_32_bits_is_exact(store: &StoreUnderTest) {
    let most = (1_u64 << 53) - 1;
    let service = store.service(
        &[("LIMIT_RESPONSE_HEADERS_ENABLED", "true"), ("TOLLKEEPER_POLICY_HEADERS", "true")],
        &format!(
            "descriptors:
  - key: most
    over_limit_body: '%LIMIT% %REMAINING%'
    rate_limit: {{unit: hour, requests_per_unit: {most}, name: most}}
  - {{key: budget, rate_limit: {{unit: month, requests_per_unit: 30000000000}}}}
  - {{key: small, rate_limit: {{unit: hour, requests_per_unit: 10}}}}"
        ),
    );
    let headers = |left: u64, wait_s: Option<u64>| {
        let (retry, seconds) = (wait_s.map(|wait_s| format!(" Retry-After: {wait_s}")).unwrap_or_default(), 3600);
        format!(
            "RateLimit-Limit: {most} RateLimit-Remaining: {left} RateLimit-Reset: {seconds}{retry} \
             RateLimit-Policy: \"most\";q={most};w=3600 RateLimit: \"most\";r={left};t={seconds}"
        )
    };
    // The protocol has 32 bits; headers and the body have all.
    let passes = |left: u64| {
        let shown = left.min(u32::MAX.into());
        format!("OK [OK most: 4294967295/HOUR left {shown} in 3600 s] {}", headers(left, None))
    };
    let rejection = format!("OVER [OVER most: 4294967295/HOUR left 0 in 3600 s] {}", headers(0, Some(3600)));
    let charge = |hits: u64| shop_request("most").hits(hits);
    for (request, expected) in [
        (charge(most - 5_000_000_000), passes(5_000_000_000)),
        (charge(0), passes(5_000_000_000)),
        (charge(4_999_999_999), passes(1)),
        (charge(1), passes(0)),
        (shop_request("most").refund(2), passes(2)),
        // Rejected hits count, here as elsewhere.
        (charge(3), rejection.clone()),
        (shop_request("most").refund(u64::MAX), passes(most - 1)),
        (charge(u64::MAX), rejection.clone()),
        (shop_request("most").refund(u64::MAX), passes(most - 1)),
        (charge(most - 1), passes(0)),
    ] {
        assert_eq!(decide(&service, &request).text(), expected, "{request:?}");
    }
    assert_eq!(decide(&service, &charge(1)).response.raw_body, format!("{most} 0").into_bytes());
    let month = |hits| decide(&service, &shop_request("budget").hits(hits)).over_limit();
    assert_eq!([29_999_999_999, 2, 1, 1].map(month), [false, true, true, true], "rejected hits count");
    let month = |hits| decide(&service, &shop_request("budget=b").hits(hits)).over_limit();
    assert_eq!([29_999_999_999, 1, 1].map(month), [false, false, true]);
    // Below 2^32 a request has 2^32 hits at most, so that an equal refund gives back as much.
    let small = |request| decide(&service, &request).text().split(" Rate").next().unwrap().to_owned();
    let k = || shop_request("small");
    assert_eq!(small(k().hits(4)), "OK [OK 10/HOUR left 6 in 3600 s]");
    assert_eq!(small(k().hits(u64::MAX)), "OVER [OVER 10/HOUR left 0 in 3600 s]");
    assert_eq!(small(k().refund(u64::MAX)), "OK [OK 10/HOUR left 6 in 3600 s]");
}

fn concurrent_charges_admit_exactly_the_limit(store: &StoreUnderTest) {
    for &algorithm in store.algorithms {
        let leaky = algorithm == Algorithm::LeakyBucket;
        // One leaves every 40 ms, and the last one in the bucket within the caller's deadline.
        let (unit, limit, queue) = if leaky { ("second", 25, ", queue_size: 50") } else { ("hour", 50, "") };
        let rules = format!(
            "descriptors: [{{key: k, rate_limit: {{unit: {unit}, requests_per_unit: {limit}, algorithm: {algorithm}{queue}}}}}]"
        );
        let service = store.service(&[], &rules);
        for round in 0..3 {
            let request = shop_request(&format!("k={round}"));
            let delays = Mutex::new(Vec::new());
            in_parallel(8, |_| {
                for _ in 0..25 {
                    let response = decide(&service, &request);
                    if !response.over_limit() {
                        delays.lock().unwrap().push(response.delay.as_millis());
                    }
                }
            });
            let delays = delays.into_inner().unwrap();
            assert_eq!(delays.len(), 50, "{algorithm}, round {round}");
            let expected = if leaky { (0..50).map(|place| place * 40).collect() } else { BTreeSet::from([0]) };
            assert_eq!(delays.into_iter().collect::<BTreeSet<_>>(), expected, "{algorithm}");
        }
    }
}

fn limits_of_a_descriptor_are_charged_all_or_none(store: &StoreUnderTest) {
    let service = store.service(
        &[],
        "descriptors:
  - key: k
    rate_limit:
      - {unit: day, requests_per_unit: 60, algorithm: sliding_window_log, name: a}
      - {unit: hour, requests_per_unit: 40, algorithm: token_bucket, name: b}
      - {unit: day, requests_per_unit: 90, algorithm: fixed_window, name: c}
  - key: k
    value: alone
    rate_limit: {unit: day, requests_per_unit: 90, algorithm: fixed_window}",
    );
    let admitted = AtomicU64::new(0);
    in_parallel(8, |thread| {
        for turn in 0..20 {
            let hits = 1 + (thread + turn) % 3;
            if !decide(&service, &shop_request("k=x").hits(hits)).over_limit() {
                admitted.fetch_add(hits, Ordering::Relaxed);
            }
        }
    });
    assert_eq!(admitted.into_inner(), 40, "a charge of 1 always found the last place");
    // An hour later the bucket has room again, and the log has the admitted hits.
    service.advance_us(HOUR);
    assert_eq!(
        decide(&service, &shop_request("k=x").hits(21)).text(),
        "OVER [OVER a: 60/DAY left 0 in 82800 s] Retry-After: 82800"
    );
    assert_eq!(decide(&service, &shop_request("k=x").hits(20)).statuses(), [(false, 0)]);
}

fn hits_rejected_by_one_limit_are_not_charged_to_the_others(store: &StoreUnderTest) {
    let service = store.service(
        &[],
        "descriptors:
  - key: k
    rate_limit:
      - {unit: second, requests_per_unit: 10}
      - {unit: day, requests_per_unit: 1000}",
    );
    for _ in 0..10 {
        assert_eq!((0..40).filter(|_| !decide(&service, &shop_request("k")).over_limit()).count(), 10);
        service.advance_us(SECOND);
    }
    assert_eq!(decide(&service, &shop_request("k").hits(0)).text(), "OK [OK 1000/DAY left 900 in 43190 s]");
}

fn shadow_limit_beside_an_enforced_limit_rejects_nothing(store: &StoreUnderTest) {
    let service = store.service(
        &[],
        "descriptors:
  - key: k
    rate_limit:
      - {unit: minute, requests_per_unit: 1, shadow_mode: true, name: shadow}
      - {unit: hour, requests_per_unit: 3}",
    );
    assert_responses(
        &service,
        &[
            (shop_request("k"), "OK [OK 3/HOUR left 2 in 3600 s]"),
            (shop_request("k"), "OK [OK 3/HOUR left 1 in 3600 s]"),
            (shop_request("k"), "OK [OK 3/HOUR left 0 in 3600 s]"),
            (shop_request("k"), "OVER [OVER 3/HOUR left 0 in 3600 s] Retry-After: 3600"),
        ],
    );
}

/// A rule for each algorithm, under its name; rejected hits do not count. The leaky bucket drains in a second what the
/// others admit in an hour, because its requests are delayed.
fn of_each_algorithm(limit: u32) -> String {
    let rule = |algorithm| {
        let (unit, more) = match algorithm {
            Algorithm::LeakyBucket => ("second", format!("queue_size: {limit}")),
            _ => ("hour", "count_rejected: false".to_owned()),
        };
        format!(
            "  - {{key: {algorithm}, rate_limit: {{unit: {unit}, requests_per_unit: {limit}, algorithm: {algorithm}, {more}}}}}\n"
        )
    };
    format!("descriptors:\n{}", Algorithm::ALL.map(rule).concat())
}

fn decisions_and_counters_follow_the_reference_model(store: &StoreUnderTest) {
    let is_memory = store.env.is_empty();
    model::compare(store, if is_memory { 100 } else { 12 });
}

fn strict_and_eventual_charges_on_one_log_keep_their_own_periods(store: &StoreUnderTest) {
    // The log of the eventual rule keeps hits for longer, the strict override only for its period.
    let service = store.service(
        &[],
        "defaults: {algorithm: sliding_window_log}
descriptors:
  - key: k
    rate_limit: {unit: second, unit_multiplier: 10, requests_per_unit: 10, consistency: eventual}",
    );
    let by_override = |request: TestRequest| request.limit(10, 1, Some(10));
    let eventual_first = by_override(shop_request("k; k"));
    let mut strict_first = by_override(shop_request("k; k"));
    strict_first.0.descriptors.reverse();
    decide(&service, &shop_request("k").hits(10));
    service.advance_us(10 * SECOND + 100 * MS);
    let mut admitted = 0;
    for (request, strict) in [(&eventual_first, 1), (&strict_first, 0)] {
        for _ in 0..20 {
            admitted += u32::from(!decide(&service, request).statuses()[strict].0);
        }
    }
    assert!(admitted <= 10, "{admitted} of 10 in 10 s");
}

fn exceeded_quota_does_not_keep_other_limits_from_being_charged(store: &StoreUnderTest) {
    let rules = "descriptors:
  - key: k
    rate_limit:
      - {unit: minute, requests_per_unit: 10}
      - {unit: hour, requests_per_unit: 3, quota_mode: true, name: quota}
  - {key: room, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1000}}";
    let service = store.service(&[], rules);
    let passed = (0..60).filter(|_| !decide(&service, &shop_request("k; room")).over_limit()).count();
    assert_eq!(passed, 10, "the minute is charged beside the used-up quota");
    // Beside a limit that rejects, a quota is not charged.
    let quota_beside_zero = "descriptors:
  - key: z
    rate_limit:
      - {unit: hour, requests_per_unit: 5, quota_mode: true}
      - {unit: minute, requests_per_unit: 0}";
    load_shop_rules(&service, quota_beside_zero);
    (0..3).for_each(|_| assert!(decide(&service, &shop_request("z")).over_limit()));
    load_shop_rules(&service, "descriptors: [{key: z, rate_limit: {unit: hour, requests_per_unit: 5}}]");
    assert_eq!(left(&service, "z"), [5]);
}

fn peek_changes_nothing(store: &StoreUnderTest) {
    let service = store.service(&[], &of_each_algorithm(5));
    for algorithm in Algorithm::ALL {
        assert_eq!(left(&service, algorithm.name()), [5], "{algorithm}");
        assert_eq!(decide(&service, &shop_request(algorithm.name()).hits(2)).statuses(), [(false, 3)], "{algorithm}");
        for _ in 0..10 {
            assert_eq!(left(&service, algorithm.name()), [3], "{algorithm}");
        }
    }
}

fn refund_to_an_unused_counter_changes_nothing(store: &StoreUnderTest) {
    let service = store.service(&[], &of_each_algorithm(5));
    for algorithm in Algorithm::ALL {
        let refund = shop_request(algorithm.name()).refund(3);
        assert_eq!(decide(&service, &refund).statuses(), [(false, 5)], "{algorithm}");
        assert_eq!(decide(&service, &shop_request(algorithm.name()).hits(5)).statuses(), [(false, 0)], "{algorithm}");
        assert!(decide(&service, &shop_request(algorithm.name())).over_limit(), "{algorithm}");
    }
}

fn reload_keeps_counters_of_limits_with_the_same_identity(store: &StoreUnderTest) {
    let service = store.service(NO_HEADER, "descriptors: []");
    let rule =
        |rate_limit: &str| load_shop_rules(&service, &format!("descriptors: [{{key: k, rate_limit: {rate_limit}}}]"));
    let table = [
        // rule, response to one hit
        ("{unit: hour, requests_per_unit: 10}", "OK [OK 10/HOUR left 9 in 3600 s]"),
        ("{unit: hour, requests_per_unit: 10}", "OK [OK 10/HOUR left 8 in 3600 s]"),
        // A lowered and a raised limit apply at once.
        ("{unit: hour, requests_per_unit: 2}", "OVER [OVER 2/HOUR left 0 in 3600 s]"),
        ("{unit: hour, requests_per_unit: 5}", "OK [OK 5/HOUR left 1 in 3600 s]"),
        ("{unit: hour, requests_per_unit: 0}", "OVER [OVER 0/HOUR left 0 in 3600 s]"),
        // Not part of the key.
        ("{unit: HOUR, requests_per_unit: 10, name: n}", "OK [OK n: 10/HOUR left 4 in 3600 s]"),
        ("{unit: hour, requests_per_unit: 10, on_store_error: deny}", "OK [OK 10/HOUR left 3 in 3600 s]"),
        ("{unlimited: true}", "OK [OK unlimited]"),
        // The same period in another unit.
        ("{unit: minute, unit_multiplier: 60, requests_per_unit: 20}", "OK [OK 20/60 MINUTE left 12 in 3600 s]"),
        (
            "[{unit: hour, requests_per_unit: 10}, {unit: year, requests_per_unit: 999}]",
            "OK [OK 10/HOUR left 1 in 3600 s]",
        ),
        // Part of the key.
        ("{unit: minute, requests_per_unit: 10}", "OK [OK 10/MINUTE left 9 in 60 s]"),
        ("{unit: hour, unit_multiplier: 2, requests_per_unit: 10}", "OK [OK 10/2 HOUR left 9 in 7200 s]"),
        ("{unit: hour, requests_per_unit: 10, epoch: 1}", "OK [OK 10/HOUR left 9 in 3600 s]"),
        ("{unit: hour, requests_per_unit: 10, algorithm: sliding_window_log}", "OK [OK 10/HOUR left 9 in 3600 s]"),
        ("{unit: hour, requests_per_unit: 10, algorithm: token_bucket}", "OK [OK 10/HOUR left 9 in 360 s]"),
        // None of these touched the counter.
        ("{unit: hour, requests_per_unit: 10}", "OK [OK 10/HOUR left 0 in 3600 s]"),
        ("{unit: hour, requests_per_unit: 10, epoch: 1}", "OK [OK 10/HOUR left 8 in 3600 s]"),
        ("{unit: hour, requests_per_unit: 10, algorithm: token_bucket}", "OK [OK 10/HOUR left 8 in 720 s]"),
    ];
    for (rate_limit, expected) in table {
        rule(rate_limit);
        assert_eq!(decide(&service, &shop_request("k")).text(), expected, "{rate_limit}");
    }
    // A rule that is restored finds its counter again; a rule elsewhere in the tree has another counter.
    load_shop_rules(&service, "descriptors: []");
    assert_responses(&service, &[(shop_request("k"), "OK [OK]")]);
    load_shop_rules(
        &service,
        "descriptors: [{key: k, descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 10}}]}]",
    );
    assert_responses(&service, &[(shop_request("k,k"), "OK [OK 10/HOUR left 9 in 3600 s]")]);
    rule("{unit: hour, requests_per_unit: 10}");
    assert_responses(&service, &[(shop_request("k"), "OVER [OVER 10/HOUR left 0 in 3600 s]")]);
}

fn new_epoch_starts_a_new_counter(store: &StoreUnderTest) {
    let service = store.service(NO_HEADER, "descriptors: []");
    for &algorithm in store.algorithms {
        // A leaky bucket has one request, which leaves within the hour.
        let used_up = |epoch: u32| {
            load_shop_rules(
                &service,
                &format!(
                    "descriptors: [{{key: k, rate_limit: {{unit: hour, requests_per_unit: 1, algorithm: {algorithm}, epoch: {epoch}}}}}]"
                ),
            );
            decide(&service, &shop_request("k")).over_limit()
        };
        assert_eq!([0, 0, 7, 7, 0, 8, 7].map(used_up), [false, true, false, true, true, false, true], "{algorithm}");
    }
}

fn changed_limit_counts_hits_charged_before(store: &StoreUnderTest) {
    for algorithm in Algorithm::ALL {
        let service = store.service(NO_HEADER, "descriptors: []");
        let rule = |limit: u32| load_shop_rules(&service, &of_each_algorithm(limit));
        rule(10);
        let remaining = |hits| decide(&service, &shop_request(algorithm.name()).hits(hits)).statuses();
        assert_eq!(remaining(6), [(false, 4)], "{algorithm}");
        rule(4);
        assert_eq!(remaining(1), [(true, 0)], "{algorithm}");
        rule(20);
        assert_eq!(left(&service, algorithm.name()), [14], "{algorithm}");
    }
}

/// However the limit of one counter is changed: by a reload, by an override in the request, or by `bucket_size` alone.
fn lowered_limit_makes_no_one_wait_for_the_former_one(store: &StoreUnderTest) {
    let rule = |hits: u32, size: u32, more: &str| {
        format!(
            "descriptors: [{{key: k, rate_limit: {{unit: minute, requests_per_unit: {hits}, bucket_size: {size}, algorithm: token_bucket{more}}}}}]"
        )
    };
    for (lowered, seconds) in [((10, 10), 6), ((600, 10), 1), ((10, 1000), 0)] {
        for more in ["", ", consistency: eventual"] {
            let service = store.without_over_limit_cache().service(NO_HEADER, &rule(1000, 1000, more));
            assert_eq!(decide(&service, &shop_request("k").hits(900)).statuses(), [(false, 100)]);
            load_shop_rules(&service, &rule(lowered.0, lowered.1, more));
            let over = || decide(&service, &shop_request("k")).over_limit();
            assert_eq!(over(), seconds > 0, "{lowered:?}{more}");
            service.advance_us(seconds * SECOND);
            assert!(!over(), "{lowered:?}{more}");
        }
    }
}

fn windows_expire_and_buckets_refill(store: &StoreUnderTest) {
    let service = store.service(&[], &of_each_algorithm(6));
    for algorithm in Algorithm::ALL {
        assert_eq!(decide(&service, &shop_request(algorithm.name()).hits(6)).statuses(), [(false, 0)], "{algorithm}");
    }
    service.advance_us(HOUR / 2);
    let lefts = || Algorithm::ALL.map(|algorithm| left(&service, algorithm.name())[0]);
    let by_name = |wanted: &str| Algorithm::ALL.into_iter().position(|algorithm| algorithm.name() == wanted).unwrap();
    let half = lefts();
    let of = |lefts: &[u32], name| lefts[by_name(name)];
    assert_eq!((of(&half, "token_bucket"), of(&half, "leaky_bucket"), of(&half, "fixed_window")), (3, 6, 0));
    service.advance_us(HOUR / 2 - 1);
    let just_before = lefts();
    assert_eq!((of(&just_before, "fixed_window"), of(&just_before, "sliding_window_log")), (0, 0));
    service.advance_us(1);
    let after = lefts();
    assert_eq!((of(&after, "fixed_window"), of(&after, "sliding_window_log"), of(&after, "token_bucket")), (6, 6, 6));
    assert_eq!(of(&after, "sliding_window_counter"), 0, "the window before counts in full");
    service.advance_us(HOUR);
    assert_eq!(lefts(), [6; Algorithm::ALL.len()]);
}

fn queued_requests_are_delayed_in_order(store: &StoreUnderTest) {
    let service = store.service(
        &[],
        "descriptors:
  - {key: q, rate_limit: {unit: second, requests_per_unit: 10, algorithm: leaky_bucket, queue_size: 4}}
  - {key: ahead, rate_limit: {unit: second, requests_per_unit: 10, algorithm: token_bucket, bucket_size: 1, max_wait: 150ms}}",
    );
    let delay = |request: &TestRequest| {
        let response = decide(&service, request);
        (!response.over_limit()).then_some(response.delay.as_millis())
    };
    let delays = |requests: &[TestRequest]| requests.iter().map(delay).collect::<Vec<_>>();
    let q = || shop_request("q");
    assert_eq!(delays(&[q(), q(), q(), q(), q()]), [Some(0), Some(100), Some(200), Some(300), None]);
    service.advance_us(100 * MS);
    assert_eq!(delays(&[q(), q()]), [Some(300), None]);
    assert_eq!(
        delays(&[shop_request("q=2").hits(3), shop_request("q=2"), shop_request("q=2")]),
        [Some(0), Some(300), None]
    );
    assert_eq!(delays(&vec![shop_request("ahead"); 3]), [Some(0), Some(100), None]);
}

fn stop_cache_key_increment_spares_limits_beside_a_rejecting_one(store: &StoreUnderTest) {
    let rules = "descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: b, rate_limit: {unit: hour, requests_per_unit: 9}}
  - {key: free, rate_limit: {unit: hour, requests_per_unit: 9, count_rejected: false}}
  - {key: bucket, rate_limit: {unit: hour, requests_per_unit: 9, algorithm: token_bucket}}
  - key: both
    rate_limit:
      - {unit: hour, requests_per_unit: 9}
      - {unit: day, requests_per_unit: 9}";
    let charged = store.service(NO_HEADER, rules);
    let spared = store
        .service(&[("TOLLKEEPER_RETRY_AFTER_HEADER", ""), ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")], rules);
    let table: &[(TestRequest, [&[u32]; 2])] = &[
        // request; remaining hits of a, b, free, bucket and both, charged and spared
        (shop_request("a; b; free; bucket; both"), [&[0, 8, 8, 8, 8], &[0, 8, 8, 8, 8]]),
        (shop_request("a; b; free; bucket; both"), [&[0, 7, 7, 7, 7], &[0, 8, 8, 8, 8]]),
        (shop_request("both; bucket; a"), [&[0, 7, 7, 6, 6], &[0, 8, 8, 8, 8]]),
        (shop_request("b; both"), [&[0, 6, 7, 6, 5], &[0, 7, 8, 8, 7]]),
        // A refund counts beside a rejection.
        (shop_request("a; b").refund(1), [&[0, 7, 7, 6, 5], &[0, 8, 8, 8, 7]]),
        // The same descriptor twice: each has a dry run of its own, as in envoyproxy/ratelimit.
        (shop_request("free; free").request_hits(5), [&[0, 7, 2, 6, 5], &[0, 8, 3, 8, 7]]),
        (shop_request("a; free; free").request_hits(2), [&[0, 7, 0, 6, 5], &[0, 8, 3, 8, 7]]),
    ];
    for (step, (request, expected)) in table.iter().enumerate() {
        for (service, expected) in [&charged, &spared].into_iter().zip(expected) {
            decide(service, request);
            assert_eq!(left(service, "a; b; free; bucket; both"), *expected, "step {step}: {request:?}");
        }
    }
    // One counter charged twice, which rejects the first charge for its size only.
    let twice = TestRequest::new("shop").descriptor(&[("b", "x")]).hits(10).descriptor(&[("b", "x")]).hits(2);
    let text = decide(&spared, &twice).text();
    assert_eq!(text, "OVER [OVER 9/HOUR left 0 in 3600 s, OVER 9/HOUR left 0 in 3600 s]");
    let back = decide(&spared, &shop_request("b=x").refund(10)).text();
    assert_eq!(back, "OK [OK 9/HOUR left 9 in 3600 s]", "the second was spared");
}

fn limit_overrides_of_one_unit_share_a_counter(store: &StoreUnderTest) {
    let service = store.service(NO_HEADER, "descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 10}}]");
    let k = || shop_request("k");
    assert_responses(
        &service,
        &[
            (k().limit(20, 3, None), "OK [OK 20/HOUR left 19 in 3600 s]"),
            (k(), "OK [OK 10/HOUR left 8 in 3600 s]"),
            (k().limit(5, 3, None).hits(3), "OK [OK 5/HOUR left 0 in 3600 s]"),
            (k().limit(5, 4, None), "OK [OK 5/DAY left 4 in 43200 s]"),
            (k(), "OK [OK 10/HOUR left 4 in 3600 s]"),
        ],
    );
}

fn only_values_under_share_threshold_share_a_counter(store: &StoreUnderTest) {
    let service = store.service(
        NO_HEADER,
        r"descriptors:
  - {key: each, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: all, value: 'v*', share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 5}}",
    );
    for (request, expected) in [
        ("each=a", [4]),
        ("each=b", [4]),
        ("each=a", [3]),
        // Characters with a meaning in keys, and long values.
        ("each={a}", [4]),
        ("each=a|each", [4]),
        ("each=\\", [4]),
        ("all=v1", [4]),
        ("all=v2", [3]),
        ("all=v3", [2]),
    ] {
        let left: Vec<u32> =
            decide(&service, &shop_request(request)).statuses().into_iter().map(|(_, left)| left).collect();
        assert_eq!(left, expected, "{request}");
    }
    let long = |end: &str| shop_request(&format!("each={}{end}", "x".repeat(5_000)));
    let remaining = |request: &TestRequest| decide(&service, request).statuses()[0].1;
    assert_eq!([remaining(&long("1")), remaining(&long("2")), remaining(&long("1"))], [4, 4, 3]);
}

fn rejected_hits_count_until_the_window_ends(store: &StoreUnderTest) {
    let service = store.service(NO_HEADER, "descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 5}}]");
    let k = || shop_request("k");
    let used_up = [
        // A refund and peeks leave an unused counter as it is.
        (k().refund(3), "OK [OK 5/HOUR left 5 in 3600 s]"),
        (k().hits(0), "OK [OK 5/HOUR left 5 in 3600 s]"),
        (k().hits(4), "OK [OK 5/HOUR left 1 in 3600 s]"),
        (k().hits(2), "OVER [OVER 5/HOUR left 0 in 3600 s]"),
        (k().refund(2), "OK [OK 5/HOUR left 1 in 3600 s]"),
        (k().hits(2), "OVER [OVER 5/HOUR left 0 in 3600 s]"),
        (k().refund(1), "OK [OK 5/HOUR left 0 in 3600 s]"),
    ];
    assert_responses(&service, &used_up);
    service.advance_us(HOUR - SECOND);
    assert_responses(
        &service,
        &[(k().hits(0), "OK [OK 5/HOUR left 0 in 1 s]"), (k(), "OVER [OVER 5/HOUR left 0 in 1 s]")],
    );
    service.advance_us(SECOND);
    assert_responses(&service, &used_up);
}

fn counter_outlives_a_change_of_its_rule(store: &StoreUnderTest) {
    let service = store.service(NO_HEADER, "descriptors: []");
    for (rate_limit, expected) in [
        ("{unit: hour, requests_per_unit: 10}", "OK [OK 10/HOUR left 9 in 3600 s]"),
        ("{unit: minute, unit_multiplier: 60, requests_per_unit: 20}", "OK [OK 20/60 MINUTE left 18 in 3600 s]"),
        ("{unit: minute, requests_per_unit: 10}", "OK [OK 10/MINUTE left 9 in 60 s]"),
        ("{unit: hour, requests_per_unit: 10, epoch: 1}", "OK [OK 10/HOUR left 9 in 3600 s]"),
        ("{unit: hour, requests_per_unit: 2}", "OVER [OVER 2/HOUR left 0 in 3600 s]"),
    ] {
        load_shop_rules(&service, &format!("descriptors: [{{key: k, rate_limit: {rate_limit}}}]"));
        assert_eq!(decide(&service, &shop_request("k")).text(), expected, "{rate_limit}");
    }
}

fn stop_cache_key_increment_spares_a_fixed_window(store: &StoreUnderTest) {
    let rules = "descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: b, rate_limit: {unit: hour, requests_per_unit: 9}}";
    let service = store
        .service(&[("TOLLKEEPER_RETRY_AFTER_HEADER", ""), ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")], rules);
    for expected in [[0, 8], [0, 8]] {
        decide(&service, &shop_request("a; b"));
        assert_eq!(left(&service, "a; b"), expected);
    }
}
