//! Fidelity: a replay under the recorded rules repeats every recorded verdict of the counters.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tempfile::tempdir;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::period::Unit;
use tollkeeper::settings::Settings;
use tollkeeper::store::Store;
use tollkeeper::tools::replay::merge::MergedTraffic;
use tollkeeper::tools::replay::replayer::{ReplayOptions, ReplayRules};
use tollkeeper::tools::replay::source::{SourceOptions, TrafficEvent, TrafficLocation};
use tollkeeper::tools::simulate::simulation::Verification;
use tollkeeper::tools::simulate::simulation::{Simulation, SimulationOptions};

use kit::fixtures::{load_shop_rules, shop_request};
use kit::redis::options;
use kit::redis_counters::{TimeSource, start_store, wait_until_connected};
use kit::test_service::{TestRequest, TestService};

const START: Time = Time::from_secs(1_783_512_000);

/// All algorithms, several limits, shadow and quota mode, a shared counter, and limits that replace others.
const RULES: &str = "descriptors:
- {key: token, rate_limit: {unit: second, unit_multiplier: 10, requests_per_unit: 6, algorithm: token_bucket, bucket_size: 9, max_wait: 20s}}
- {key: leaky, rate_limit: {unit: second, requests_per_unit: 5, algorithm: leaky_bucket, queue_size: 4}}
- {key: fixed, rate_limit: {unit: second, requests_per_unit: 4}}
- {key: log, rate_limit: {unit: minute, requests_per_unit: 5, algorithm: sliding_window_log}}
- {key: counter, rate_limit: {unit: second, requests_per_unit: 7, algorithm: sliding_window_counter, count_rejected: true}}
- key: many
  rate_limit:
  - {unit: second, requests_per_unit: 3, algorithm: sliding_window_log}
  - {unit: minute, requests_per_unit: 20, algorithm: token_bucket}
  - {unit: second, requests_per_unit: 2, name: trial, shadow_mode: true, algorithm: sliding_window_counter}
- {key: quota, quota_mode: true, rate_limit: {unit: second, requests_per_unit: 2, name: q}}
- {key: wild, value: a*, share_threshold: true, rate_limit: {unit: second, requests_per_unit: 3}}
- {key: vip, rate_limit: {unit: second, requests_per_unit: 9, replaces: [{name: q}]}}
";

/// Rules after a reload: the limits change, and one algorithm does.
fn reloaded() -> String {
    RULES.replace("requests_per_unit: 5", "requests_per_unit: 2").replace(
        "{key: fixed, rate_limit: {unit: second, requests_per_unit: 4}}",
        "{key: fixed, rate_limit: {unit: second, requests_per_unit: 4, algorithm: token_bucket}}",
    )
}

const KEYS: [&str; 10] =
    ["token=a", "leaky=a", "fixed=a", "log=a", "counter=a", "many=a", "quota=a", "wild=ab", "wild=ac", "vip=a"];

/// The rules with `shortest` in place of seconds. Redis removes counters by its own time; on a busy machine, the time of
/// a test may take longer than that for a second, but not for a minute.
fn with_shortest_period(rules: &str, shortest: Unit) -> String {
    rules.replace("unit: second", &format!("unit: {}", shortest.name()))
}

/// A service that logs all decisions to `file`.
fn service(file: &Path, env: &[(&str, &str)]) -> TestService {
    let sink = format!("file:{}", file.display());
    let own = [("TOLLKEEPER_DECISION_LOG", &*sink), ("TOLLKEEPER_DECISION_LOG_WHEN", "all")];
    TestService::new(own.into_iter().chain(env.iter().copied()), START)
}

/// A request for one or two keys: a charge, peek, refund or override.
fn random_request(random: &mut StdRng) -> TestRequest {
    let key = |random: &mut StdRng| KEYS[random.random_range(0..KEYS.len())];
    let mut descriptors = key(random).to_owned();
    if random.random_bool(0.3) {
        descriptors += &format!("; {}", key(random));
    }
    let request = shop_request(&descriptors);
    match random.random_range(0..10) {
        0 => request.hits(0),
        1 => request.refund(random.random_range(1..4)),
        2 => request.limit(random.random_range(0..4), 2, None),
        3..6 => request.hits(random.random_range(1..5)),
        _ => request,
    }
}

/// Loads the rules and decides random requests, with times between them and a reload now and then.
fn decide_randomly(service: &TestService, shortest: Unit, seed: u64, count: u32) {
    let mut random = StdRng::seed_from_u64(seed);
    let rules = with_shortest_period(RULES, shortest);
    load_shop_rules(service, &rules);
    for _ in 0..count {
        match random.random_range(0..200) {
            0 => load_shop_rules(service, &with_shortest_period(&reloaded(), shortest)),
            1 => load_shop_rules(service, &rules),
            2..60 => service.advance_us(random.random_range(1..400_000 * shortest.seconds())),
            60 => service.advance_us(random.random_range(1..90_000_000 * shortest.seconds())),
            _ => {}
        }
        // Beyond the time that the store may take, it bounds the delay.
        let deadline = service.inner.decider.store.timeout() + Duration::from_millis(random.random_range(10..2000));
        service.decide_within(&random_request(&mut random), deadline).unwrap();
    }
    service.finish_log();
}

/// Replays a log under its own rules.
fn verify(file: &Path) -> Verification {
    let (settings, _) = Settings::from_env(std::iter::empty()).unwrap();
    let options = SimulationOptions {
        replay: ReplayOptions { memory_bytes: 1 << 24, behaviour: Arc::new(settings.decisions.clone()) },
        max_keys: 1000,
    };
    let mut simulation = Simulation::new(ReplayRules::Recorded, None, &options);
    let sources = SourceOptions::new(None, settings.decisions);
    let file = TrafficLocation::File(file.to_owned());
    let mut traffic = MergedTraffic::open(&[file], &sources, &Arc::default()).unwrap();
    while let Some(event) = traffic.next_event().unwrap() {
        match event {
            TrafficEvent::Request(request) => simulation.replay_request(request).unwrap(),
            TrafficEvent::Header(header) => simulation.apply_header(header).unwrap(),
            TrafficEvent::Dropped(count) => panic!("the log lost {count} decisions"),
        }
    }
    simulation.new.verification.unwrap()
}

#[test]
fn replay_repeats_every_verdict_of_counters_in_memory() {
    let modes: [&[(&str, &str)]; 4] = [
        &[],
        &[("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")],
        &[("SHADOW_MODE", "true")],
        &[("QUOTA_MODE", "true")],
    ];
    for (seed, env) in (0..12).zip(modes.iter().cycle()) {
        let directory = tempdir().unwrap();
        let file = directory.path().join("log");
        decide_randomly(&service(&file, env), Unit::Second, seed, 600);
        let found = verify(&file);
        assert_eq!((found.compared, found.agreed), (600, 600), "seed {seed}, {env:?}: {found:?}");
    }
}

#[test]
fn replay_repeats_every_verdict_of_counters_in_redis() {
    let server = options().start();
    let address = server.address();
    // The cache decides without the counters.
    let env = [
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", address.as_str()),
        ("TOLLKEEPER_STORE_TIMEOUT", "2s"),
        ("TOLLKEEPER_OVER_LIMIT_CACHE_BYTES", "0"),
    ];
    for (seed, clock) in [(1, TimeSource::Caller), (2, TimeSource::Caller), (3, TimeSource::Redis)] {
        server.query::<()>(&["FLUSHALL"]);
        let directory = tempdir().unwrap();
        let file = directory.path().join("log");
        let redis = start_store(&env, clock);
        wait_until_connected(&redis);
        decide_randomly(&service(&file, &env).with_store(Store::from(redis)), Unit::Minute, seed, 600);
        let found = verify(&file);
        assert_eq!((found.compared, found.agreed), (600, 600), "seed {seed}: {found:?}");
    }
}

#[test]
fn replay_of_other_counters_is_noticed() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    decide_randomly(&service(&file, &[]), Unit::Second, 1, 600);
    // Without some of its decisions, the log does not explain the others.
    let text = kit::read(&file);
    let kept: Vec<_> = text.lines().enumerate().filter(|(line, _)| line % 5 != 1).map(|(_, text)| text).collect();
    std::fs::write(&file, kept.join("\n") + "\n").unwrap();
    let found = verify(&file);
    assert!(found.compared > 400 && found.agreed < found.compared, "{found:?}");
}
