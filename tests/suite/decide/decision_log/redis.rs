//! Decisions by Redis, by caches and leases of this process, and by failure policies.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::tempdir;
use tollkeeper::decide::log::record::{DecisionRecord, DecisionSource};
use tollkeeper::limit::StoreFailurePolicy;
use tollkeeper::store::Store;

use super::{decisions, logging_service};
use kit::fixtures::shop_request;
use kit::redis::options;
use kit::redis_counters::{TimeSource, start_store, wait_until_connected};
use kit::test_service::{TestService, store_runtime};

const RULES: &str = "descriptors:
  - {key: strict, rate_limit: {unit: day, requests_per_unit: 1, count_rejected: false}}
  - {key: shared, rate_limit: {unit: day, requests_per_unit: 1000, consistency: eventual}}
";
const ALL: (&str, &str) = ("TOLLKEEPER_DECISION_LOG_WHEN", "all");

fn with_redis(file: &Path, env: &[(&str, &str)]) -> TestService {
    let redis = start_store(env, TimeSource::Redis);
    wait_until_connected(&redis);
    let _within = store_runtime().enter();
    redis.claim_replica_place();
    logging_service(file, &[&[ALL], env].concat(), RULES).with_store(Store::from(redis))
}

fn decided_by(decision: &DecisionRecord<'_>) -> DecisionSource {
    decision.descriptors[0].decided_by.unwrap()
}

#[test]
fn record_tells_the_time_of_redis_and_who_decided() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let server = options().start();
    let address = server.address();
    let env = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", address.as_str())];
    let service = with_redis(&file, &env);
    (0..3).for_each(|_| drop(service.decide(&shop_request("strict=a")).unwrap()));
    service.finish_log();
    let found = decisions(&file);
    let times: Vec<_> = found.iter().map(|decision| decision.descriptors[0].now_us).collect();
    // The clock of the service stands; that of Redis is the machine's.
    assert!(times[0].unwrap() > found[0].time_us && times[1] > times[0], "{times:?}");
    // A rejection from the cache has no other time than its arrival.
    assert_eq!(times[2], None);
    let expected = [DecisionSource::Counter, DecisionSource::Counter, DecisionSource::OverLimitCache];
    assert_eq!(found.iter().map(decided_by).collect::<Vec<_>>(), expected);
}

#[test]
fn record_tells_shares_and_leases() {
    let directory = tempdir().unwrap();
    let server = options().start();
    let address = server.address();
    let env = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", address.as_str())];
    let until = Instant::now() + Duration::from_secs(30);
    let mut found = BTreeSet::new();
    for round in 0.. {
        let file = directory.path().join(round.to_string());
        let service = with_redis(&file, &env);
        for _ in 0..200 {
            service.decide(&shop_request(&format!("shared={round}"))).unwrap();
            std::thread::sleep(Duration::from_micros(200));
        }
        service.finish_log();
        found.extend(decisions(&file).iter().map(|decision| format!("{:?}", decided_by(decision))));
        if found.contains("Share") && found.contains("Lease") {
            break;
        }
        assert!(Instant::now() < until, "{found:?}");
    }
}

#[test]
fn record_tells_the_policy_and_its_reason() {
    let directory = tempdir().unwrap();
    for (policy, word) in
        [(StoreFailurePolicy::Local, "local"), (StoreFailurePolicy::Deny, "deny"), (StoreFailurePolicy::Error, "error")]
    {
        let file = directory.path().join(word);
        let env = [("REDIS_URL", "/does/not/exist.sock"), ("TOLLKEEPER_ON_STORE_ERROR", word)];
        let redis = start_store(&env, TimeSource::Redis);
        // Without a choice of decisions, those by a policy are logged.
        let service = logging_service(&file, &env, RULES).with_store(Store::from(redis));
        let _answer = service.decide(&shop_request("strict=a"));
        service.finish_log();
        let found = decisions(&file);
        let descriptor = &found[0].descriptors[0];
        assert_eq!((decided_by(&found[0]), descriptor.policy), (DecisionSource::Policy, Some(policy)));
        assert!(descriptor.reason.as_deref().is_some_and(|reason| !reason.is_empty()));
        assert_eq!(descriptor.limits[0].result.is_some(), policy == StoreFailurePolicy::Local);
        assert_eq!(found[0].error.as_deref(), (policy == StoreFailurePolicy::Error).then_some("store"));
    }
}
