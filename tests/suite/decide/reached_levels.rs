//! Levels of `notify`: which charges reach them, that each is told once in a period over all replicas, and the records.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use proptest::prelude::*;
use serde_json::Value;
use tokio::sync::mpsc::Receiver;
use tollkeeper::base::clock::Time;
use tollkeeper::decide::reached_levels::{LevelOutcome, ReachedLevel, ReachedLevelSender};
use tollkeeper::rules::rule::notify_levels::{NotifyLevel, NotifyLevels};

use super::decision_log::schema::assert_valid;
use crate::limit::algorithms::scenario::config;
use kit::fixtures::{decide, load_shop_rules, shop_request};
use kit::redis::options;
use kit::scrape::{scrape, with_prometheus};
use kit::test_service::{TestRequest, TestService};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::wait_for;

/// Noon on Wednesday the 8th of July 2026.
const NOON: Time = Time::from_secs(1_783_512_000);
const DAY: u64 = 86_400_000_000;

fn service(rules: &str) -> (TestService, Receiver<ReachedLevel>) {
    let mut service = TestService::new([("TOLLKEEPER_RETRY_AFTER_HEADER", "")], NOON);
    let (levels, reached) = ReachedLevelSender::new();
    service.inner.decider.reached_levels = Some(levels);
    load_shop_rules(&service, rules);
    (service, reached)
}

/// Records of the levels that were reached since the last call.
fn records(reached: &mut Receiver<ReachedLevel>) -> Vec<Value> {
    let lines = std::iter::from_fn(|| reached.try_recv().ok());
    lines.map(|level| serde_json::from_slice(&level.line).unwrap()).collect()
}

/// `level of key=value: count` of each.
fn told(reached: &mut Receiver<ReachedLevel>) -> Vec<String> {
    let text = |record: Value| {
        let entry = &record["entries"][0];
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let after = &record["limit"]["result"]["after"];
        format!("{} of {}={}: {after}", word(&record["level"]), word(&entry["key"]), word(&entry["value"]))
    };
    records(reached).into_iter().map(text).collect()
}

#[test]
fn each_level_is_reached_once_in_a_window_and_again_in_the_next() {
    let rule = "{key: user, rate_limit: {unit: day, requests_per_unit: 10, notify: [100%, 50%, 85%]}}";
    let (service, mut reached) = service(&format!("descriptors:\n  - {rule}"));
    let charge = |hits| drop(decide(&service, &shop_request("user=ann").hits(hits)));
    charge(4);
    assert_eq!(told(&mut reached), [""; 0]);
    charge(1);
    assert_eq!(told(&mut reached), ["50% of user=ann: 5"]);
    charge(0);
    // 85 % of 10 hits are 8.5, so 9 hits.
    charge(3);
    assert_eq!(told(&mut reached), [""; 0]);
    charge(2);
    assert_eq!(told(&mut reached), ["85% of user=ann: 10", "100% of user=ann: 10"]);
    charge(1);
    decide(&service, &shop_request("user=ann").refund(9));
    charge(9);
    assert_eq!(told(&mut reached), [""; 0], "once in a period, whatever is given back");
    decide(&service, &shop_request("user=bob").hits(6));
    assert_eq!(told(&mut reached), ["50% of user=bob: 6"]);
    service.advance_us(DAY);
    charge(9);
    assert_eq!(told(&mut reached), ["50% of user=ann: 9", "85% of user=ann: 9"]);
}

#[test]
fn rejection_reaches_the_whole_limit() {
    let rule =
        "{key: k, rate_limit: {unit: hour, requests_per_unit: 10, algorithm: sliding_window_log, notify: [90%, 100%]}}";
    let (service, mut reached) = service(&format!("descriptors:\n  - {rule}"));
    decide(&service, &shop_request("k").hits(8));
    for _ in 0..3 {
        assert!(decide(&service, &shop_request("k").hits(5)).over_limit());
    }
    // The hits that did not fit are not counted.
    assert_eq!(told(&mut reached), ["90% of k=: 8", "100% of k=: 8"]);
}

#[test]
fn limits_in_shadow_mode_of_plans_and_of_lists_tell_with_their_names() {
    let (service, mut reached) = service(
        "descriptors:
  - key: k
    shadow_mode: true
    rate_limit:
      - {name: plan, unit: day, requests_per_unit: 2, notify: [100%]}
      - {name: burst, unit: second, requests_per_unit: 2, algorithm: token_bucket, bucket_size: 4, notify: [50%]}
  - {key: quiet, rate_limit: {unit: day, requests_per_unit: 1}}",
    );
    for _ in 0..3 {
        decide(&service, &shop_request("k; quiet"));
    }
    let records = records(&mut reached);
    let names: BTreeSet<_> = records.iter().map(|record| record["limit"]["name"].as_str().unwrap()).collect();
    assert_eq!((records.len(), names), (2, BTreeSet::from(["burst", "plan"])), "{records:?}");
    assert!(records.iter().all(|record| record["limit"]["shadow"] == true && record["rule"]["path"] == "shop.k"));
}

#[test]
fn levels_are_dropped_and_counted_if_too_many_wait() {
    let rule = "{key: k, rate_limit: {unit: day, requests_per_unit: 1, notify: [100%]}}";
    let (service, mut reached) = service(&format!("descriptors:\n  - {rule}"));
    let all =
        |from: usize, to: usize| (from..to).for_each(|n| drop(decide(&service, &shop_request(&format!("k={n}")))));
    all(0, 1_500);
    assert_eq!(told(&mut reached).len(), 1_000);
    let dropped = |levels: &ReachedLevelSender| {
        levels.counts_by_outcome().find(|(outcome, _)| *outcome == LevelOutcome::Dropped).unwrap().1
    };
    assert_eq!(service.inner.decider.reached_levels.as_ref().map(dropped), Some(500));
    // What was dropped is told with the next request that finds it reached.
    all(1_400, 1_500);
    assert_eq!(told(&mut reached).len(), 100);
}

proptest! {
    #![proptest_config(config())]

    /// Levels that a fixed window reaches, against its count after each charge.
    #[test]
    fn window_reaches_each_level_once(
        limit in 1..60_u64,
        percents in prop::collection::btree_set(1..=100_u32, 1..8),
        steps in prop::collection::vec((any::<bool>(), 1..20_u64, 0..30_000_000_000_u64), 1..60),
    ) {
        let levels: Vec<_> = percents.iter().map(|percent| format!("{percent}%")).collect();
        let rule = format!(
            "{{key: k, rate_limit: {{unit: day, requests_per_unit: {limit}, notify: [{}]}}}}", levels.join(", ")
        );
        let (service, mut reached) = service(&format!("descriptors:\n  - {rule}"));
        let mut expected = BTreeMap::<u64, BTreeSet<u32>>::new();
        let mut found = Vec::new();
        let mut count = 0;
        for (is_refund, hits, later) in steps {
            let window = service.now().as_micros() / DAY;
            service.advance_us(later);
            if service.now().as_micros() / DAY != window {
                count = 0;
            }
            let window = service.now().as_micros() / DAY;
            let request = shop_request("k");
            decide(&service, &if is_refund { request.refund(hits) } else { request.hits(hits) });
            // Rejected hits count.
            count = if is_refund { u64::saturating_sub(count, hits) } else { count + hits };
            if !is_refund {
                let is_reached = |percent: &&u32| u128::from(count) * 100 >= u128::from(**percent) * u128::from(limit);
                expected.entry(window).or_default().extend(percents.iter().filter(is_reached));
            }
            found.extend(records(&mut reached).iter().map(|record| {
                let end_us = record["period_end_us"].as_u64().unwrap();
                let level = record["level"].as_str().unwrap().trim_end_matches('%').parse::<u32>().unwrap();
                (end_us / DAY - 1, level)
            }));
        }
        let expected: Vec<_> =
            expected.into_iter().flat_map(|(window, levels)| levels.into_iter().map(move |level| (window, level))).collect();
        found.sort_unstable();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn hits_of_a_level_are_its_share_rounded_up(capacity in 1..=(1_u64 << 53), milli_percent in 1_000..=100_000_u32) {
        let share = u128::from(capacity) * u128::from(milli_percent);
        prop_assert_eq!(u128::from(NotifyLevel { milli_percent }.hits_of(capacity)), share.div_ceil(100_000));
    }
}

#[test]
fn levels_are_sorted_distinct_and_bounded() {
    let levels = |percents: &[u32]| {
        NotifyLevels::new(percents.iter().map(|percent| NotifyLevel { milli_percent: percent * 1000 }).collect())
    };
    assert_eq!(levels(&[80, 50]).map(|levels| levels.to_string()), Some("[50%, 80%]".to_owned()));
    assert_eq!([levels(&[]), levels(&[50, 50]), levels(&[1, 2, 3, 4, 5, 6, 7, 8, 9])], [None, None, None]);
}

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: year, requests_per_unit: 200, notify: [50%, 80%, 100%]}}
- {key: lease, rate_limit: {unit: year, requests_per_unit: 200, notify: [50%], consistency: eventual}}
- {key: secret, decision_log: none, rate_limit: {unit: year, requests_per_unit: 1, notify: [100%]}}
";

/// Lines of a decision log, the records of levels among them.
fn logged_levels(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().filter(|line| line.contains(r#""type":"threshold""#));
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ask(server: &Tollkeeper, key: &str, value: &str) {
    let body = format!(r#"{{"domain":"shop","descriptors":[{{"entries":[{{"key":"{key}","value":"{value}"}}]}}]}}"#);
    server.post_json(&body);
}

fn logging(setup: Setup, path: &Path) -> Setup {
    let log = format!("file:{}", path.display());
    setup
        .env("TOLLKEEPER_DECISION_LOG", log)
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "errors")
        .env("LOG_LEVEL", "info")
        .env("TOLLKEEPER_STORE_TIMEOUT", "5s")
}

#[test]
fn replicas_on_one_redis_tell_each_level_once() {
    let redis = options().start();
    let files = tempfile::tempdir().unwrap();
    let path = |number: usize| files.path().join(format!("{number}.jsonl"));
    let start = |number| {
        let setup = logging(with_rules(RULES), &path(number));
        let (setup, metrics) = with_prometheus(setup);
        (setup.env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", redis.address()).start(), metrics)
    };
    let servers = [start(0), start(1), start(2)];
    thread::scope(|scope| {
        for (server, _) in &servers {
            for user in ["ann", "bob", "q\\\"\\n"] {
                scope.spawn(move || (0..90).for_each(|_| ask(server, "user", user)));
                scope.spawn(move || (0..90).for_each(|_| ask(server, "lease", user)));
            }
        }
    });
    let all = || (0..3).flat_map(|number| logged_levels(&path(number))).collect::<Vec<_>>();
    // Three levels of each user of the strict limit, and one of each of the eventual limit.
    let records = wait_for("all levels", || Some(all()).filter(|records| records.len() >= 12));
    thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(all().len(), 12, "{records:#?}");
    let keys: BTreeSet<_> = records.iter().map(|record| format!("{} {}", record["entries"], record["level"])).collect();
    assert_eq!(keys.len(), 12, "{keys:#?}");
    (0..3).for_each(|number| assert_valid(&fs::read_to_string(path(number)).unwrap()));
    let count = |outcome: &str| {
        let name = format!("tollkeeper_reached_levels_total{{outcome=\"{outcome}\"}}");
        servers.iter().map(|(_, port)| scrape(port.number()).count(&name)).sum::<u64>()
    };
    assert_eq!([count("told"), count("unconfirmed"), count("dropped")], [12, 0, 0]);
    assert!(count("told_elsewhere") <= 24, "each of the other two replicas finds a level once");
}

#[test]
fn level_is_told_unconfirmed_if_redis_does_not_answer_and_values_stay_hidden() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("log.jsonl");
    let setup = logging(with_rules(RULES), &path).env("TOLLKEEPER_DECISION_LOG_VALUES", "none");
    let server = setup.start();
    ask(&server, "secret", "4711");
    (0..100).for_each(|_| ask(&server, "user", "private"));
    wait_for("the levels", || Some(()).filter(|()| logged_levels(&path).len() == 2));
    let text = fs::read_to_string(&path).unwrap() + &server.stderr();
    assert!(text.contains("limit used up to a level: 100% of shop.secret reached"), "{text}");
    assert!(!text.contains("4711") && !text.contains("private"), "{text}");
    assert_valid(&fs::read_to_string(&path).unwrap());
    drop(server);

    // A user that may not touch the keys of levels.
    let redis = options().start();
    redis.command(&["ACL", "SETUSER", "default", "resetkeys", "~tk1:{[^r]*", "~tk1:{replicas}*"]).unwrap();
    let path = files.path().join("with-redis.jsonl");
    let setup = logging(with_rules(RULES), &path);
    let server = setup.env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", redis.address()).start();
    (0..160).for_each(|_| ask(&server, "user", "ann"));
    let records = wait_for("the levels", || Some(logged_levels(&path)).filter(|records| records.len() == 2));
    assert!(records.iter().all(|record| record["unconfirmed"] == true), "{records:?}");
    assert!(server.stderr().contains("cannot ask Redis whether another replica told a level"), "{}", server.stderr());
    assert_valid(&fs::read_to_string(&path).unwrap());
}

#[test]
fn request_with_many_descriptors_tells_all_its_levels() {
    let rules = "descriptors:\n  - {key: k, rate_limit: {unit: day, requests_per_unit: 1, notify: [100%]}}";
    let (service, mut reached) = service(rules);
    let request = (0..20).fold(TestRequest::new("shop"), |request, n| request.descriptor(&[("k", &n.to_string())]));
    decide(&service, &request);
    assert_eq!(told(&mut reached).len(), 20);
}

#[test]
fn rejection_by_a_limit_that_was_lowered_reaches_it() {
    let rules = |limit: u32| {
        format!("descriptors:\n  - {{key: k, rate_limit: {{unit: day, requests_per_unit: {limit}, notify: [100%]}}}}")
    };
    let (service, mut reached) = service(&rules(10));
    decide(&service, &shop_request("k").hits(6));
    load_shop_rules(&service, &rules(4));
    for _ in 0..2 {
        assert!(decide(&service, &shop_request("k")).over_limit());
    }
    assert_eq!(told(&mut reached), ["100% of k=: 7"]);
}

/// Starts a proxy before Redis that ends the connection of the first claim of a level in place of its reply.
fn start_proxy_that_loses_a_reply(redis: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let has_lost = Arc::new(AtomicBool::new(false));
    thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(client), Ok(server)) = (client, TcpStream::connect(&redis)) else { return };
            let loses_reply = Arc::new(AtomicBool::new(false));
            let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let (has_lost, is_claim) = (Arc::clone(&has_lost), Arc::clone(&loses_reply));
            thread::spawn(move || {
                pass_bytes(&mut from_client, &mut to_server, |sent| {
                    let is_level = String::from_utf8_lossy(sent).contains("reached_levels");
                    if is_level && !has_lost.swap(true, Ordering::Relaxed) {
                        is_claim.store(true, Ordering::Relaxed);
                    }
                    true
                });
            });
            let (mut from_server, mut to_client) = (server, client);
            thread::spawn(move || {
                pass_bytes(&mut from_server, &mut to_client, |_| !loses_reply.load(Ordering::Relaxed));
            });
        }
    });
    address
}

/// Passes bytes on until the connection ends, or `passes` says no; then ends it.
fn pass_bytes(from: &mut TcpStream, to: &mut TcpStream, passes: impl Fn(&[u8]) -> bool) {
    let mut buffer = [0; 65_536];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if !passes(&buffer[..read]) || to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
}

#[test]
fn level_whose_claim_lost_its_reply_is_told_unconfirmed() {
    let redis = options().start();
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("log.jsonl");
    let address = start_proxy_that_loses_a_reply(redis.address());
    let setup = logging(with_rules(RULES), &path);
    let server = setup.env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", address).start();
    (0..160).for_each(|_| ask(&server, "user", "ann"));
    let records = wait_for("the levels", || Some(logged_levels(&path)).filter(|records| records.len() == 2));
    let told: Vec<_> = records.iter().map(|record| (&record["level"], record["unconfirmed"] == true)).collect();
    assert_eq!(told, [(&Value::from("50%"), true), (&Value::from("80%"), false)]);
}
