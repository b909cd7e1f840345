//! The stream in Redis: entries, a cluster, and a server that freezes.

use std::time::{Duration, Instant};

use tollkeeper::decide::log::RecordCounts;

use super::NOON;
use super::schema::assert_valid;
use kit::fixtures::shop_request;
use kit::redis::cluster::Cluster;
use kit::redis::{Server, options};
use kit::test_service::TestService;
use kit::wait_for;

const RULES: &str = "domain: shop\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 2}}]\n";
const STREAM: &str = "decisions";

/// A service with counters in memory that logs all decisions to a stream.
fn service(url: &str, env: &[(&str, &str)]) -> TestService {
    let own = [
        ("TOLLKEEPER_DECISION_LOG", "redis:decisions"),
        ("TOLLKEEPER_DECISION_LOG_REDIS_URL", url),
        ("TOLLKEEPER_DECISION_LOG_WHEN", "all"),
    ];
    let service = TestService::new(own.into_iter().chain(env.iter().copied()), NOON);
    service.load([("rules.yaml", RULES)]);
    service
}

fn decide(service: &TestService, count: u32) {
    (0..count).for_each(|number| drop(service.decide(&shop_request(&format!("user={number}"))).unwrap()));
}

fn counts(service: &TestService) -> RecordCounts {
    service.inner.decider.log.as_ref().unwrap().counts_by_sink().next().unwrap()
}

/// Records in the stream, all of which fit the schema.
fn stream(server: &Server) -> Vec<serde_json::Value> {
    let entries: Vec<(String, Vec<String>)> = server.query(&["XRANGE", STREAM, "-", "+"]);
    let record = |(_, fields): (String, Vec<String>)| {
        assert_eq!((fields.len(), &*fields[0]), (2, "record"));
        assert_valid(&format!("{}\n", fields[1]));
        serde_json::from_str(&fields[1]).unwrap()
    };
    entries.into_iter().map(record).collect()
}

#[test]
fn stream_has_a_header_and_each_decision_in_order() {
    let server = options().password("secret").start();
    let service = service(&server.address(), &[("TOLLKEEPER_DECISION_LOG_REDIS_AUTH", "secret")]);
    decide(&service, 50);
    service.finish_log();
    let found = stream(&server);
    assert_eq!(found[0]["type"], "header");
    let sequence: Vec<_> = found[1..].iter().map(|record| record["seq"].as_u64().unwrap()).collect();
    assert_eq!(sequence, (1..=50).collect::<Vec<_>>());
    assert_eq!(counts(&service).written, 50);
}

#[test]
fn stream_is_trimmed_to_about_its_length() {
    let server = options().with(&[("stream-node-max-entries", "10")]).start();
    let service = service(&server.address(), &[("TOLLKEEPER_DECISION_LOG_STREAM_LENGTH", "20")]);
    decide(&service, 200);
    service.finish_log();
    let length: u64 = server.query(&["XLEN", STREAM]);
    assert!((20..=40).contains(&length), "{length}");
}

/// A stream of 20 entries, in nodes of ten, and the header that it has again after 200 decisions.
fn header_after_trimming(user: &str) -> serde_json::Value {
    let auth = user.split_once(' ').map_or(String::new(), |(name, _)| format!("{name}:secret"));
    let options = options().with(&[("stream-node-max-entries", "10")]);
    let server = match user.split_once(' ') {
        Some((name, permissions)) => options.user(name, permissions).start(),
        None => options.start(),
    };
    let service = service(
        &server.address(),
        &[("TOLLKEEPER_DECISION_LOG_STREAM_LENGTH", "20"), ("TOLLKEEPER_DECISION_LOG_REDIS_AUTH", &auth)],
    );
    decide(&service, 200);
    let header = wait_for("a header again", || {
        decide(&service, 1);
        let is_renewed = |record: &serde_json::Value| record["type"] == "header" && record["event"] == "rotation";
        stream(&server).into_iter().find(is_renewed)
    });
    service.finish_log();
    header
}

#[test]
fn stream_gets_its_header_again_when_it_is_trimmed_away() {
    let header = header_after_trimming("");
    assert_eq!(header["rules"]["documents"][0]["text"], RULES);
    let records = "on >secret ~decisions +@connection +info +cluster +xadd +xtrim";
    let header = header_after_trimming(&format!("log {records}"));
    assert_eq!(header["rules"]["documents"][0]["text"], RULES);
}

#[test]
fn headers_of_earlier_rules_stay_while_their_decisions_do() {
    let server = options().with(&[("stream-node-max-entries", "10")]).start();
    let service = service(&server.address(), &[("TOLLKEEPER_DECISION_LOG_STREAM_LENGTH", "100")]);
    let earlier = "domain: shop\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 9}}]\n";
    let ids = |server: &Server, kind: &str| -> Vec<String> {
        let found = stream(server).into_iter().filter(|record| record["type"] == kind);
        let id = if kind == "header" { "/rules/id" } else { "/rules" };
        found.filter_map(|record| Some(record.pointer(id)?.as_str()?.to_owned())).collect()
    };
    wait_for("the header", || (ids(&server, "header").len() == 1).then_some(()));
    decide(&service, 60);
    wait_for("decisions by the first rules", || (ids(&server, "decision").len() == 60).then_some(()));
    let first = ids(&server, "header")[0].clone();
    service.load([("rules.yaml", earlier)]);
    wait_for("another header", || (ids(&server, "header").len() == 2).then_some(()));
    // The first header is trimmed away, and many of its decisions are not.
    decide(&service, 70);
    wait_for("the first header again", || {
        let decisions = ids(&server, "decision");
        assert!(decisions.contains(&first), "its decisions are gone: {decisions:?}");
        decide(&service, 1);
        std::thread::sleep(Duration::from_millis(300));
        ids(&server, "header").contains(&first).then_some(())
    });
    service.finish_log();
}

#[test]
fn stream_in_a_cluster_is_on_the_node_of_its_key() {
    let cluster = Cluster::start();
    let urls = cluster.addresses().join(",");
    let service = service(&urls, &[]);
    decide(&service, 20);
    service.finish_log();
    let owner = cluster.node(cluster.primary_of(cluster.slot(STREAM)));
    assert_eq!((stream(owner).len(), counts(&service).written), (21, 20));
}

#[test]
fn frozen_redis_delays_no_decision_and_losses_are_told() {
    let server = options().start();
    let service = service(&server.address(), &[("TOLLKEEPER_DECISION_LOG_QUEUE_BYTES", "64KiB")]);
    wait_for("the header", || (stream(&server).len() == 1).then_some(()));
    server.freeze();
    let started = Instant::now();
    decide(&service, 3000);
    // A decision that waited for the server would wait for seconds.
    assert!(started.elapsed() < Duration::from_secs(20));
    wait_for("losses", || (counts(&service).dropped > 0 && counts(&service).failed > 0).then_some(()));
    assert_eq!(counts(&service).written, 0);
    server.thaw();
    let told = |reason: &str| {
        let is_of = |record: &serde_json::Value| record["type"] == "dropped" && record["reason"] == reason;
        stream(&server).iter().filter(|record| is_of(record)).count() > 0
    };
    wait_for("the losses to be told", || {
        decide(&service, 1);
        told("write_failed").then_some(())
    });
    wait_for("a decision to be written", || {
        decide(&service, 1);
        (counts(&service).written > 0).then_some(())
    });
}

mod json_lines {
    use tollkeeper::decide::log::redis_stream::{UnusableRecord, format_json_line};

    #[test]
    fn line_is_the_same_json_without_control_characters() {
        let record = "{\n\"a\":\t\"x\u{7f}\u{9b}2J\\u001b \u{e9}\"\r\n}\n";
        let line = format_json_line(Some(record.as_bytes())).unwrap();
        assert!(!line.contains(char::is_control), "{line:?}");
        let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(parse(&line), parse(record));
    }

    #[test]
    fn record_that_is_not_an_object_of_json_is_unusable() {
        assert_eq!(format_json_line(None), Err(UnusableRecord::Missing));
        let nested = "{\"a\":".to_owned() + &"[".repeat(1 << 20);
        for record in
            [&b""[..], b"text", b"[1]", b"{}\n{}", b"{\"a\":\"\x1b\"}", b"{\"a\":\"\xff\"}", nested.as_bytes()]
        {
            assert_eq!(format_json_line(Some(record)), Err(UnusableRecord::NotJson));
        }
    }
}
