//! The cache in front of a real Redis, which counts the commands that it gets.
//!
//! A rejection is cached for 1 s of real time. So a test that counts calls in that time allows one more call for each
//! second that it took.

use std::time::{Duration, Instant};

use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::Store;
use tollkeeper::store::charge::{ChargeResults, CommitMode};

use super::{NOW, limit, yearly};
use kit::redis::{Server, options};
use kit::redis_counters::{self, RedisCounters, TestCharge, TimeSource, poll_once};
use kit::test_service::{TestService, store_runtime};
use kit::{fixtures, wait_for};

const CACHE: &str = "TOLLKEEPER_OVER_LIMIT_CACHE_BYTES";
const LOCAL_CACHE: &str = "LOCAL_CACHE_SIZE_IN_BYTES";

fn environment<'e>(address: &'e str, env: &[(&'e str, &'e str)]) -> Vec<(&'e str, &'e str)> {
    [&[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", address)], env].concat()
}

/// Connected counters of a server that has loaded the script.
fn primed(server: &Server, env: &[(&str, &str)]) -> RedisCounters {
    let counters = RedisCounters::new(&environment(&server.address(), env), TimeSource::Redis);
    for limit in [yearly(1), plain(1)] {
        charge(&counters, &[TestCharge::one("prime", limit)]);
    }
    counters
}

/// Limit that counts rejected hits, which is the default of a rule.
fn plain(requests_per_unit: u32) -> Limit {
    Limit::new(&LimitSpec::new(Algorithm::FixedWindow, requests_per_unit.into(), Period::new(Unit::Year, 1).unwrap()))
        .unwrap()
}

fn charge(counters: &RedisCounters, test_charges: &[TestCharge]) -> Vec<ChargeResults> {
    store_runtime().block_on(counters.charge(test_charges, CommitMode::Commit, NOW))
}

fn admits(counters: &RedisCounters, test_charges: &TestCharge) -> bool {
    charge(counters, std::slice::from_ref(test_charges))[0].iter().all(|result| result.admitted)
}

/// Number of commands of these names that the server has received.
fn command_calls(server: &Server, names: &[&str]) -> u64 {
    let commands = server.command_counts();
    names.iter().filter_map(|name| commands.get(*name)).sum()
}

#[test]
fn counter_over_its_limit_costs_no_call() {
    const CALLS: u64 = 500;
    let server = options().start();
    for algorithm in Algorithm::ALL {
        let counters = primed(&server, &[]);
        let one = TestCharge::one(algorithm.name(), limit(algorithm, 2, Unit::Year));
        let first = (0..3).take_while(|_| admits(&counters, &one)).count();
        // A leaky bucket without delay admits one.
        assert_eq!(first, if algorithm == Algorithm::LeakyBucket { 1 } else { 2 }, "{algorithm}");
        let rejected = Instant::now();
        server.reset_stats();
        for _ in 0..CALLS {
            assert!(!admits(&counters, &one), "{algorithm}");
        }
        let seconds = rejected.elapsed().as_secs();
        let (commands, calls) = (server.command_counts(), command_calls(&server, &["evalsha", "eval"]));
        assert!(calls <= seconds, "{algorithm}: {commands:?} in {seconds} s");
        assert!(calls > 0 || commands.is_empty(), "{algorithm}: {commands:?}");
        assert_eq!(counters.redis.stats().rejected_locally, CALLS - calls, "{algorithm}");
    }
}

#[test]
fn cache_can_be_turned_off() {
    let server = options().start();
    let counters = primed(&server, &[(CACHE, "0"), (LOCAL_CACHE, "1000000")]);
    for (value, limit) in [("yearly", yearly(1)), ("plain", plain(1))] {
        let one = TestCharge::one(value, limit);
        assert!(admits(&counters, &one));
        server.reset_stats();
        (0..10).for_each(|_| assert!(!admits(&counters, &one)));
        assert_eq!(command_calls(&server, &["evalsha"]), 10, "{value}");
    }
    assert_eq!(counters.redis.stats().rejected_locally, 0);
}

#[test]
fn limits_counting_rejected_hits_call_redis_unless_local_cache_is_set() {
    let server = options().start();
    for (env, value, is_known) in [(None, "counted", false), (Some((LOCAL_CACHE, "1000000")), "cached", true)] {
        let counters = primed(&server, env.as_slice());
        let one = TestCharge::one(value, plain(1));
        assert!(admits(&counters, &one) && !admits(&counters, &one));
        let rejected = Instant::now();
        (0..10).for_each(|_| assert!(!admits(&counters, &one)));
        let least = if is_known { 10 - rejected.elapsed().as_secs().min(10) } else { 0 };
        let known = counters.redis.stats().rejected_locally;
        assert!((least..=if is_known { 10 } else { 0 }).contains(&known), "{value}: {known}");
        let peek = charge(&counters, &[TestCharge::new(value, plain(1), Hits::Peek)]);
        assert_eq!(peek[0][0].before, 12 - known, "what is refused here is not counted");
    }
}

#[test]
fn refund_through_another_replica_is_seen_within_a_second() {
    let server = options().start();
    let (here, there) = (primed(&server, &[]), primed(&server, &[]));
    let one = TestCharge::one("refunded", yearly(1));
    assert!(admits(&here, &one) && !admits(&here, &one));
    let rejected = Instant::now();
    charge(&there, &[TestCharge::new("refunded", yearly(1), Hits::Refund(1))]);
    wait_for("the refund to be seen", || {
        let is_over = rejected.elapsed() >= Duration::from_secs(1);
        let admitted = admits(&here, &one);
        assert!(admitted || !is_over, "a second after the refusal nothing is left of it");
        admitted.then_some(())
    });
    // A refund through this process takes effect at once.
    assert!(!admits(&here, &one));
    charge(&here, &[TestCharge::new("refunded", yearly(1), Hits::Refund(1))]);
    assert!(admits(&here, &one));
}

#[test]
fn coalesced_rejections_are_cached() {
    let server = options().start();
    let counters = primed(&server, &[]);
    let one = TestCharge::one("together", yearly(1));
    assert!(admits(&counters, &one));
    store_runtime().block_on(async {
        server.freeze();
        // A leading peek does not update the cache; its followers do.
        let peek = [TestCharge::new("together", yearly(1), Hits::Peek)];
        let waits = [one.clone(), one.clone()];
        let mut led = Box::pin(counters.charge(&peek, CommitMode::Commit, NOW));
        assert!(poll_once(&mut led).await.is_none());
        let mut waiting = Box::pin(counters.charge(&waits, CommitMode::Commit, NOW));
        assert!(poll_once(&mut waiting).await.is_none());
        server.thaw();
        assert!(!led.await[0][0].admitted);
        assert!(waiting.await.iter().all(|results| !results[0].admitted));
    });
    let (rejected, calls) = (Instant::now(), counters.redis.stats().calls);
    (0..10).for_each(|_| assert!(!admits(&counters, &one)));
    assert!(counters.redis.stats().calls - calls <= rejected.elapsed().as_secs() + 1);
    assert!(counters.redis.stats().rejected_locally > 0);
}

#[test]
fn rejection_older_than_a_second_is_not_cached() {
    let server = options().start();
    let counters = primed(&server, &[]);
    let one = TestCharge::one("late", yearly(1));
    assert!(admits(&counters, &one));
    store_runtime().block_on(async {
        server.freeze();
        let test_charges = [one.clone()];
        let mut late = Box::pin(counters.charge(&test_charges, CommitMode::Commit, NOW));
        assert!(poll_once(&mut late).await.is_none());
        let sent = Instant::now();
        wait_for("a second", || (sent.elapsed() >= Duration::from_secs(1)).then_some(()));
        server.thaw();
        assert!(!late.await[0][0].admitted);
    });
    let calls = counters.redis.stats().calls;
    assert!(!admits(&counters, &one));
    assert_eq!((counters.redis.stats().calls - calls, counters.redis.stats().rejected_locally), (1, 0));
}

#[test]
fn request_sends_only_uncached_charges() {
    let server = options().start();
    let counters = primed(&server, &[]);
    let (over, free) = (TestCharge::one("over", yearly(1)), TestCharge::one("free", yearly(1_000)));
    assert!(admits(&counters, &over) && !admits(&counters, &over));
    let (rejected, calls) = (Instant::now(), counters.redis.stats().calls);
    for charged in 0..10 {
        let request = [free.clone(), over.clone(), free.clone(), over.clone()];
        let found: Vec<_> =
            charge(&counters, &request).iter().map(|results| (results[0].admitted, results[0].before)).collect();
        assert_eq!(found, [(true, 2 * charged), (false, 1), (true, 2 * charged + 1), (false, 1)]);
    }
    let calls = counters.redis.stats().calls - calls;
    assert!((10..=10 + rejected.elapsed().as_secs()).contains(&calls), "{calls}");
}

#[test]
fn entry_ends_with_its_window() {
    let server = options().start();
    let counters = primed(&server, &[("TOLLKEEPER_KEY_FORMAT", "ratelimit"), (LOCAL_CACHE, "1000000")]);
    let minute = Limit::new(&LimitSpec::new(Algorithm::FixedWindow, 1, Period::new(Unit::Minute, 1).unwrap())).unwrap();
    let one = [TestCharge::one("window", minute)];
    let admits = |now| store_runtime().block_on(counters.charge(&one, CommitMode::Commit, now))[0][0].admitted;
    // The last half second of a window, and the start of the next.
    let late = NOW.plus_us(59_500_000);
    assert!(admits(late) && !admits(late));
    let (rejected, before) = (Instant::now(), command_calls(&server, &["incrby"]));
    (0..10).for_each(|_| assert!(!admits(late)));
    // The window ends in half a second, and with it the rejection.
    let max_calls = rejected.elapsed().as_secs() * 2 + u64::from(rejected.elapsed() >= Duration::from_millis(500));
    assert!(command_calls(&server, &["incrby"]) - before <= max_calls);
    assert!(admits(NOW.plus_us(60_000_000)), "a new window owes nothing to the last one");
}

#[test]
fn cached_response_equals_that_of_redis() {
    let server = options().start();
    let address = server.address();
    let env = environment(&address, &[("LIMIT_RESPONSE_HEADERS_ENABLED", "true"), ("TOLLKEEPER_STORE_TIMEOUT", "10s")]);
    let store = Store::from(redis_counters::start_store(&env, TimeSource::Redis));
    let service = TestService::new(env.iter().copied(), NOW).with_store(store);
    // Nothing refills during the test, and a reset of up to 366 days stays the same in whole seconds.
    let several =
        "{unit: year, requests_per_unit: 3, name: slow}, {unit: day, requests_per_unit: 9, algorithm: token_bucket}";
    fixtures::load_shop_rules(
        &service,
        &format!("defaults: {{on_store_error: error}}\ndescriptors: [{{key: user, rate_limit: [{several}]}}]"),
    );
    let one = fixtures::shop_request("user=anna");
    let seen = |response: &kit::test_service::TestResponse| {
        let status = &response.response.statuses[0];
        (response.over_limit(), status.limit_remaining, status.current_limit.clone().map(|limit| limit.name))
    };
    (0..3).for_each(|_| assert!(!fixtures::decide(&service, &one).over_limit()));
    let from_redis = fixtures::decide(&service, &one);
    assert_eq!(
        (
            from_redis.over_limit(),
            service.inner.decider.build_store_totals().shared.map_or(0, |redis| redis.rejected_locally)
        ),
        (true, 0)
    );
    let from_here = fixtures::decide(&service, &one);
    assert_eq!(seen(&from_here), seen(&from_redis));
    let resets =
        [&from_redis, &from_here].map(|response| response.response.statuses[0].duration_until_reset.unwrap().seconds);
    assert!((0..=1 + 30).contains(&(resets[0] - resets[1])), "{resets:?}");
    wait_for("a refusal from here", || {
        fixtures::decide(&service, &one);
        (service.inner.decider.build_store_totals().shared.map_or(0, |redis| redis.rejected_locally) > 0).then_some(())
    });
}
