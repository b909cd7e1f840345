//! Metrics of Redis: its failures under every policy, its latency, and local rejections.

use super::{Watched, redis, wait_for, with_rules};
use kit::tollkeeper::Setup;

fn counting_in(setup: Setup, redis: &redis::Server) -> Setup {
    setup.env("REDIS_URL", redis.address()).env("REDIS_SOCKET_TYPE", "tcp")
}

const POLICIES: &str = "\
domain: shop
descriptors:
  - {key: local, rate_limit: {unit: day, requests_per_unit: 2, on_store_error: local}}
  - {key: allow, rate_limit: {unit: day, requests_per_unit: 2, on_store_error: allow}}
  - {key: deny, rate_limit: {unit: day, requests_per_unit: 2, on_store_error: deny}}
";

#[test]
fn failed_charges_count_as_redis_errors_under_every_policy() {
    let redis = redis::options().start();
    let watched = Watched::start(counting_in(with_rules(POLICIES), &redis).env("TOLLKEEPER_STORE_TIMEOUT", "10s"));
    let errors = "ratelimit_service_should_rate_limit_error{err_type=\"redis_error\"}";
    wait_for("the connection", || (watched.scrape().count("tollkeeper_store_lost") == 0).then_some(()));
    assert!(watched.admits("shop", "allow=x", 1));
    let found = watched.scrape();
    assert_eq!(found.count(errors), 0);
    assert_eq!(found.count("tollkeeper_store_duration_seconds_count"), 1);
    assert_eq!(found.count("tollkeeper_store_info{store=\"redis\"}"), 1);
    assert!(found.count("ratelimit_redis_pool_cx_active") >= 1 && found.count("ratelimit_redis_pool_cx_total") >= 1);
    redis.kill();
    wait_for("the loss to be noticed", || (watched.scrape().count("tollkeeper_store_lost") == 1).then_some(()));
    let before = watched.scrape().count(errors);
    assert_eq!([1, 1, 1].map(|hits| watched.admits("shop", "local=x", hits)), [true, true, false]);
    assert_eq!([1, 1, 1, 1].map(|hits| watched.admits("shop", "allow=x", hits)), [true; 4]);
    assert_eq!([1, 1].map(|hits| watched.admits("shop", "deny=x", hits)), [false; 2]);
    let found = watched.scrape();
    println!("{}", found.with_prefix("tollkeeper_policy_verdicts_total").join("\n"));
    assert_eq!(found.count(errors) - before, 9);
    let of = |policy: &str| found.count(&format!("tollkeeper_policy_verdicts_total{{policy=\"{policy}\"}}"));
    assert_eq!(["local", "allow", "deny", "error"].map(of), [3, 4, 2, 0]);
    let verdicts = |rule: &str| {
        let start = format!("tollkeeper_decisions_total{{domain=\"shop\",rule=\"shop.{rule}\",verdict=\"");
        found.with_prefix(&start).iter().map(|line| line[start.len()..].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(verdicts("local"), ["local\"} 3", "ok\"} 0"]);
    assert_eq!(verdicts("allow"), ["allow\"} 4", "ok\"} 1"]);
    assert_eq!(verdicts("deny"), ["deny\"} 2", "ok\"} 0"]);
    // The counts by kind have the same sum.
    let kinds: u64 = found
        .samples
        .keys()
        .filter(|name| name.starts_with("tollkeeper_store_errors_total"))
        .fold(0, |sum, name| sum + found.count(name));
    assert_eq!(kinds, found.count(errors));
    redis.restart();
    wait_for("Redis to be found again", || (watched.scrape().count("tollkeeper_store_lost") == 0).then_some(()));
}

#[test]
fn open_breaker_is_exported_per_node() {
    let redis = redis::options().start();
    let watched = Watched::start(counting_in(with_rules(POLICIES), &redis));
    let node = format!("tollkeeper_breaker_open{{node=\"{}\"}}", redis.address());
    // A server without a connection attempt has not failed.
    wait_for("the connection", || (watched.scrape().count("ratelimit_redis_pool_cx_active") > 0).then_some(()));
    assert_eq!(watched.scrape().count(&node), 0);
    redis.freeze();
    wait_for("the breaker to open", || {
        watched.admits("shop", "allow=x", 1);
        (watched.scrape().count(&node) == 1).then_some(())
    });
    redis.thaw();
    wait_for("the breaker to close", || {
        watched.admits("shop", "allow=x", 1);
        (watched.scrape().count(&node) == 0).then_some(())
    });
}

const CACHED: &str = "\
domain: shop
descriptors:
  - key: api
    descriptors:
      - key: user
        rate_limit: {unit: day, requests_per_unit: 2, count_rejected: false}
";

#[test]
fn rejection_from_the_local_cache_is_counted_once() {
    let redis = redis::options().start();
    let watched = Watched::start(counting_in(with_rules(CACHED), &redis).env("TOLLKEEPER_STORE_TIMEOUT", "10s"));
    let found = wait_for("a refusal from memory", || {
        watched.admits("shop", "api=v1,user=x", 1);
        let found = watched.scrape();
        (found.count("tollkeeper_known_over_hits_total") >= 3).then_some(found)
    });
    let labels = "{domain=\"shop\",key1=\"api\",key2=\"user\"}";
    let of = |name: &str| found.count(&format!("ratelimit_service_rate_limit_{name}{labels}"));
    assert_eq!(of("over_limit_with_local_cache"), found.count("tollkeeper_known_over_hits_total"));
    // Each hit counts once, as within or over limit.
    assert_eq!(of("total_hits"), of("within_limit") + of("over_limit"));
    assert_eq!(of("within_limit"), 2);
    assert!(of("over_limit_with_local_cache") <= of("over_limit"));
    assert_eq!(found.with_prefix("ratelimit_service_rate_limit_over_limit{").len(), 1);
}

const EVENTUAL: &str = "\
domain: shop
descriptors:
  - key: user
    rate_limit: {unit: day, requests_per_unit: 1000, algorithm: token_bucket, consistency: eventual}
";

#[test]
fn leases_and_their_calls_are_exported() {
    let redis = redis::options().start();
    let watched = Watched::start(counting_in(with_rules(EVENTUAL), &redis).env("TOLLKEEPER_STORE_TIMEOUT", "10s"));
    for _ in 0..50 {
        assert!(watched.admits("shop", "user=x", 1));
    }
    let found = watched.scrape();
    println!("{}", found.with_prefix("tollkeeper_eventual").join("\n"));
    let from = |name: &str| found.count(&format!("tollkeeper_eventual_hits_total{{from=\"{name}\"}}"));
    let charged = found.count("tollkeeper_draws_total");
    assert!(from("share") + from("lease") <= 50 && charged >= from("share") + from("lease"), "{}", found.text);
    assert!(found.count("tollkeeper_leased_hits_total") >= from("lease"));
    assert!(found.count("tollkeeper_store_calls_total") < charged, "leases save calls");
    assert_eq!(found.with_prefix("tollkeeper_live_replicas").len(), 1);
}
