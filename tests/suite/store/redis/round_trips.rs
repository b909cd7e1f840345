//! Calls to Redis for one request: one call per descriptor, all of them at once, at the right server.
//!
//! The servers count calls. Frozen servers show that no call waits for another: what arrived at one while another had
//! not replied was sent without waiting for it.

use std::future::Future;
use std::pin::Pin;

use futures_util::future::join_all;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::Store;
use tollkeeper::store::charge::{ChargeResults, CommitMode};

use kit::redis::cluster::Cluster;
use kit::redis::{Server, options};
use kit::redis_counters::{RedisCounters, TestCharge, TimeSource, poll_once, start_store, wait_until_connected};
use kit::tcp_proxy::TcpProxy;
use kit::test_service::{TestRequest, TestService, store_runtime};
use kit::wait_for;
use tokio::time::Instant;

/// Noon on Wednesday, July 8th 2026.
const NOON: Time = Time::from_secs(1_783_512_000);

type Call<'c> = Pin<Box<dyn Future<Output = Vec<ChargeResults>> + Send + 'c>>;

fn limit(algorithm: Algorithm) -> Limit {
    let year = Period::new(Unit::Year, 1).unwrap();
    let queue_size = (algorithm == Algorithm::LeakyBucket).then_some(1_000);
    Limit::new(&LimitSpec { sole: false, queue_size, ..LimitSpec::new(algorithm, 1_000, year) }).unwrap()
}

/// Service with these rules of the domain `shop`, and with the counters that the variables select.
fn test_service(env: &[(&str, &str)], rules: &str) -> TestService {
    let mut env = env.to_vec();
    env.push(("TOLLKEEPER_ON_STORE_ERROR", "error"));
    let redis = start_store(&env, TimeSource::Caller);
    wait_until_connected(&redis);
    let service = TestService::new(env, NOON).with_store(Store::from(redis));
    service.load([("rules.yaml", format!("domain: shop\n{rules}").as_str())]);
    service
}

/// Request for descriptors of `shop`: `key=value; key`.
fn about(descriptors: &str) -> TestRequest {
    descriptors.split("; ").fold(TestRequest::new("shop"), |request, descriptor| {
        request.descriptor(&[descriptor.split_once('=').unwrap_or((descriptor, ""))])
    })
}

fn text(service: &TestService, descriptors: &str) -> String {
    service.decide(&about(descriptors)).unwrap_or_else(|error| panic!("{error}: {descriptors}")).text()
}

/// Number of script calls that the server has received, by EVALSHA and by EVAL.
fn calls(server: &Server) -> (u64, u64) {
    let commands = server.command_counts();
    let count = |name: &str| commands.get(name).copied().unwrap_or(0);
    (count("evalsha"), count("eval"))
}

/// Charges of one hit on distinct values, algorithms in turn, without a deadline.
fn one_each(values: impl IntoIterator<Item = String>) -> Vec<TestCharge> {
    let algorithms = Algorithm::ALL.into_iter().cycle();
    let one = |(value, algorithm)| TestCharge {
        value,
        limits: vec![(limit(algorithm), true)],
        request: ChargeRequest::new(Hits::Charge(1), u64::MAX),
    };
    values.into_iter().zip(algorithms).map(one).collect()
}

#[test]
fn all_calls_of_a_request_are_pipelined() {
    let server = options().start();
    let proxy = TcpProxy::to(&server.address());
    // Calls at the caller's time do not share commands.
    let counters = RedisCounters::at(&format!("127.0.0.1:{}", proxy.port()), TimeSource::Caller);
    store_runtime().block_on(async {
        for test_charges in one_each((0..5).map(|n| format!("prime {n}"))) {
            counters.charge(&[test_charges], CommitMode::Commit, NOON).await;
        }
        let test_charges = one_each((0..10).map(|n| format!("value {n}")));
        let mut one_by_one = 0;
        for charge in &test_charges {
            let before = proxy.request_bytes();
            counters.charge(std::slice::from_ref(charge), CommitMode::Commit, NOON).await;
            one_by_one += proxy.request_bytes() - before;
        }
        server.freeze();
        let (sent, answered) = (proxy.request_bytes(), proxy.response_bytes());
        let mut call: Call<'_> = Box::pin(counters.charge(&test_charges, CommitMode::Commit, NOON));
        assert!(poll_once(&mut call).await.is_none());
        wait_for("the proxy to have all calls", || (proxy.request_bytes() - sent == one_by_one).then_some(()));
        assert_eq!(proxy.response_bytes(), answered);
        server.thaw();
        assert!(call.await.iter().all(|results| results[0].before == 1));
    });
}

#[test]
fn calls_of_a_request_are_one_write_to_each_server() {
    let server = options().start();
    let proxy = TcpProxy::to(&server.address());
    let counters = RedisCounters::at(&format!("127.0.0.1:{}", proxy.port()), TimeSource::Redis);
    store_runtime().block_on(async {
        // More keys than fit into one command.
        let test_charges = one_each((0..20).map(|n| format!("value {n}")));
        for _ in 0..3 {
            counters.charge(&test_charges, CommitMode::Commit, NOON).await;
        }
        let mut writes = 0;
        for _ in 0..100 {
            let before = proxy.request_reads();
            counters.charge(&test_charges, CommitMode::Commit, NOON).await;
            writes += proxy.request_reads() - before;
        }
        // A connection that still handles the replies to one request may write a part of the next one.
        assert!((100..120).contains(&writes), "{writes} writes for 100 requests");
    });
}

#[test]
fn calls_of_a_request_to_a_node_of_a_cluster_are_one_write_and_one_read() {
    let cluster = Cluster::start_with(&options(), 0);
    let nodes = cluster.addresses().join(",");
    let counters = RedisCounters::new(&[("REDIS_TYPE", "cluster"), ("REDIS_URL", &nodes)], TimeSource::Redis);
    wait_until_connected(&counters.redis);
    let slot = |value: &String| cluster.slot(&format!("{{counters|value={value}}}"));
    let values = (0..).map(|n| format!("value {n}")).filter(|value| cluster.primary_of(slot(value)) == 0);
    let test_charges = one_each(values.take(20));
    let node = cluster.node(0);
    // The node reads what the client writes, and the other way around.
    let transfers = || {
        let count = |field| node.info(field).parse::<u64>().expect("a count");
        [count("total_reads_processed"), count("total_writes_processed")]
    };
    store_runtime().block_on(async {
        for _ in 0..3 {
            counters.charge(&test_charges, CommitMode::Commit, NOON).await;
        }
        let before = transfers();
        for _ in 0..100 {
            counters.charge(&test_charges, CommitMode::Commit, NOON).await;
        }
        let after = transfers();
        let counts = [after[0] - before[0], after[1] - before[1]];
        // The kit's own queries and health checks are a few.
        assert!(counts.iter().all(|count| (100..130).contains(count)), "{counts:?} for 100 requests");
    });
}

#[test]
fn cluster_nodes_are_called_concurrently() {
    let cluster = Cluster::start();
    let nodes = cluster.addresses().join(",");
    let counters = RedisCounters::new(&[("REDIS_TYPE", "cluster"), ("REDIS_URL", &nodes)], TimeSource::Redis);
    wait_until_connected(&counters.redis);
    let values: Vec<String> = (0..30).map(|n| format!("value {n}")).collect();
    let owner = |value: &String| cluster.primary_of(cluster.slot(&format!("{{counters|value={value}}}")));
    let owners: Vec<usize> = values.iter().map(owner).collect();
    let share = |node: usize| owners.iter().filter(|owner| **owner == node).count() as u64;
    assert!((0..3).all(|node| share(node) > 0), "{owners:?}");
    let test_charges = one_each(values);
    store_runtime().block_on(async {
        // Each node loads its scripts.
        for _ in 0..2 {
            counters.charge(&test_charges, CommitMode::Commit, NOON).await;
        }
        for first in 0..3 {
            // The node that is thawed first has all its calls, independent of their order in the request.
            (0..3).for_each(|node| cluster.node(node).reset_stats());
            (0..3).for_each(|node| cluster.node(node).freeze());
            let mut call: Call<'_> = Box::pin(counters.charge(&test_charges, CommitMode::Commit, NOON));
            assert!(poll_once(&mut call).await.is_none());
            for node in [first, (first + 1) % 3, (first + 2) % 3] {
                assert!(poll_once(&mut call).await.is_none(), "node {node} has not answered");
                cluster.node(node).thaw();
                wait_for("a node to have its calls", || (calls(cluster.node(node)).0 == share(node)).then_some(()));
            }
            assert!(call.await.iter().all(|results| results[0].before == 2 + first as u64));
        }
    });
}

#[test]
fn descriptor_costs_one_call_whatever_its_limits() {
    let server = options().start();
    let rules = "descriptors:
  - {key: one, rate_limit: {unit: hour, requests_per_unit: 10}}
  - key: five
    rate_limit:
      - {unit: hour, requests_per_unit: 10}
      - {unit: hour, requests_per_unit: 10, algorithm: token_bucket}
      - {unit: day, requests_per_unit: 10, algorithm: leaky_bucket}
      - {unit: hour, requests_per_unit: 10, algorithm: sliding_window_log}
      - {unit: day, requests_per_unit: 10, algorithm: sliding_window_counter}
  - key: two
    rate_limit:
      - {unit: hour, requests_per_unit: 10}
      - {unit: day, requests_per_unit: 10}
  - {key: free, rate_limit: {unlimited: true}}";
    let service = test_service(&[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &server.address())], rules);
    let table = [
        // descriptors, calls
        ("one", 1),
        ("five", 1),
        ("two", 1),
        ("free", 0),
        ("unknown", 0),
        ("one; five; two; free", 3),
        ("one=a; one=b; one=c", 3),
        // Repeated descriptors share a call.
        ("one; one; one", 1),
        ("five; one; five; one; two", 3),
    ];
    text(&service, "one=p; five=p; two=p");
    for (descriptors, expected) in table {
        server.reset_stats();
        text(&service, descriptors);
        assert_eq!(calls(&server), (expected, 0), "{descriptors}");
    }
    let twice = text(&service, "one=twice; two=twice; one=twice");
    assert_eq!(twice, "OK [OK 10/HOUR left 9 in 3600 s, OK 10/HOUR left 9 in 3600 s, OK 10/HOUR left 8 in 3600 s]");
}

#[test]
fn noscript_sends_the_script_once_without_double_charge() {
    let server = options().start();
    let counters = RedisCounters::at(&server.address(), TimeSource::Redis);
    let test_charges = [TestCharge::one("script", limit(Algorithm::TokenBucket))];
    let charge = || store_runtime().block_on(counters.charge(&test_charges, CommitMode::Commit, NOON))[0][0].before;
    assert_eq!(charge(), 0);
    server.reset_stats();
    server.query::<()>(&["SCRIPT", "FLUSH"]);
    for (charges, expected) in [(1, (1, 1)), (2, (2, 1)), (3, (3, 1))] {
        assert_eq!(charge(), charges);
        assert_eq!(calls(&server), expected);
    }
    // Many at once, on one counter and on different ones.
    server.query::<()>(&["SCRIPT", "FLUSH"]);
    let values = |n: usize| if n < 50 { "many".to_owned() } else { format!("value {n}") };
    let requests: Vec<_> = (0..100).map(|n| [TestCharge::one(&values(n), limit(Algorithm::TokenBucket))]).collect();
    let responses =
        store_runtime().block_on(join_all(requests.iter().map(|one| counters.charge(one, CommitMode::Commit, NOON))));
    let found: Vec<u64> = responses.iter().map(|results| results[0][0].before).collect();
    let expected: Vec<u64> = (0..50).chain([0; 50]).collect();
    assert_eq!(found, expected);
}

#[test]
fn per_second_limits_use_the_per_second_redis() {
    let (main, per_second) = (options().start(), options().start());
    let rules = "descriptors:
  - {key: second, rate_limit: {unit: second, requests_per_unit: 10}}
  - {key: bucket, rate_limit: {unit: second, requests_per_unit: 10, algorithm: token_bucket}}
  - {key: log, rate_limit: {unit: second, requests_per_unit: 10, algorithm: sliding_window_log}}
  - {key: seconds, rate_limit: {unit: second, unit_multiplier: 2, requests_per_unit: 10}}
  - {key: minute, rate_limit: {unit: minute, requests_per_unit: 10}}
  - key: both
    rate_limit:
      - {unit: second, requests_per_unit: 10}
      - {unit: day, requests_per_unit: 10}
  - key: two
    rate_limit:
      - {unit: second, requests_per_unit: 10}
      - {unit: second, requests_per_unit: 10, algorithm: token_bucket}";
    let service = test_service(
        &[
            ("REDIS_SOCKET_TYPE", "tcp"),
            ("REDIS_URL", &main.address()),
            ("REDIS_PERSECOND", "true"),
            ("REDIS_PERSECOND_SOCKET_TYPE", "tcp"),
            ("REDIS_PERSECOND_URL", &per_second.address()),
        ],
        rules,
    );
    let table = [
        // descriptors, calls at the main Redis and at the other
        ("second", (0, 1)),
        ("bucket", (0, 1)),
        ("log", (0, 1)),
        ("two", (0, 1)),
        ("seconds", (1, 0)),
        ("minute", (1, 0)),
        // Limits of one descriptor are decided in one place.
        ("both", (1, 0)),
        ("second; minute; bucket; both", (2, 2)),
    ];
    for (descriptors, expected) in table {
        // Twice: each server loads the script.
        text(&service, descriptors);
        main.reset_stats();
        per_second.reset_stats();
        text(&service, descriptors);
        assert_eq!((calls(&main).0, calls(&per_second).0), expected, "{descriptors}");
    }
}

#[test]
fn every_endpoint_type_works() {
    let rules = "descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 10}}]";
    let plain = || options();
    let served = |env: &[(&str, &str)], what: &str| {
        let service = test_service(env, rules);
        assert_eq!(text(&service, "k"), "OK [OK 10/HOUR left 9 in 3600 s]", "{what}");
        assert_eq!(text(&service, "k; k"), "OK [OK 10/HOUR left 8 in 3600 s, OK 10/HOUR left 7 in 3600 s]", "{what}");
    };
    let tcp = ("REDIS_SOCKET_TYPE", "tcp");

    let server = plain().unix_socket().start();
    let socket = server.socket().to_str().unwrap().to_owned();
    served(&[("REDIS_URL", &socket)], "socket");
    let typed = [("REDIS_SOCKET_TYPE", "unix"), ("REDIS_URL", &*socket), ("CACHE_KEY_PREFIX", "typed:")];
    served(&typed, "socket, by type");

    let server = plain().start();
    served(&[tcp, ("REDIS_URL", &server.address())], "TCP");
    let server = plain().password("secret").start();
    let env = [tcp, ("REDIS_URL", &*server.address()), ("REDIS_AUTH", "secret")];
    served(&env, "a password");
    let server = plain().user("ann", "on >pass ~* +@all").start();
    let env = [tcp, ("REDIS_URL", &*server.address()), ("REDIS_AUTH", "ann:pass")];
    served(&env, "a user");
}

#[test]
fn selected_database_has_all_keys() {
    let rules = "descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 10}}]";
    let server = options().start();
    for (number, database) in ["/3", "/15", "?db=7"].into_iter().enumerate() {
        let url = format!("redis://{}{database}", server.address());
        let service = test_service(&[("REDIS_URL", &url)], rules);
        assert_eq!(text(&service, "k"), "OK [OK 10/HOUR left 9 in 3600 s]", "{database}");
        let used: String = server.query(&["INFO", "keyspace"]);
        assert_eq!(used.matches(":keys=").count(), 1 + number, "{database}: {used}");
        assert!(!used.contains("db0:"), "{used}");
    }
}

#[test]
fn call_without_time_left_fails_at_once() {
    let server = options().start();
    let counters = RedisCounters::at(&server.address(), TimeSource::Redis);
    let test_charges = one_each((0..3).map(|n| format!("value {n}")));
    wait_until_connected(&counters.redis);
    server.freeze();
    let responses =
        store_runtime().block_on(counters.charge_until(&test_charges, CommitMode::Commit, (NOON, Instant::now())));
    assert_eq!(responses.len(), 3);
    assert!(responses.iter().all(Result::is_err), "{responses:?}");
    server.thaw();
}
