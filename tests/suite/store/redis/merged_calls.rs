//! Calls on several keys that share a command: how many do, whose error counts, and where none may.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use bytes::BytesMut;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::charge::CommitMode;
use tollkeeper::store::client::redis::error::RedisError;
use tollkeeper::store::client::redis::resp::{Reply, decode_reply, reply_bytes};

use kit::port::Port;
use kit::redis::cluster::Cluster;
use kit::redis::{Server, options};
use kit::redis_counters::{LONG_TIMEOUT, RedisCounters, TestCharge, TimeSource, wait_until_connected};
use kit::test_service::store_runtime;

fn limit(algorithm: Algorithm) -> Limit {
    let year = Period::new(Unit::Year, 1).unwrap();
    let queue_size = (algorithm == Algorithm::LeakyBucket).then_some(1_000);
    Limit::new(&LimitSpec { sole: false, queue_size, ..LimitSpec::new(algorithm, 1_000, year) }).unwrap()
}

/// Charges of these hits on distinct values; they accept any delay.
fn charges(algorithm: Algorithm, count: usize, hits: Hits) -> Vec<TestCharge> {
    let request = ChargeRequest::new(hits, u64::MAX);
    let charge = |number| TestCharge { request, ..TestCharge::new(&format!("value {number}"), limit(algorithm), hits) };
    (0..count).map(charge).collect()
}

fn counters(server: &Server) -> Arc<RedisCounters> {
    let counters = RedisCounters::at(&server.address(), TimeSource::Redis);
    wait_until_connected(&counters.redis);
    Arc::new(counters)
}

/// Hits charged before each of the charges of one request, which a thread of the runtime serves, as in a server.
fn before(counters: &Arc<RedisCounters>, test_charges: &[TestCharge]) -> Vec<u64> {
    let (counters, test_charges) = (Arc::clone(counters), test_charges.to_vec());
    let request = async move { counters.charge(&test_charges, CommitMode::Commit, Time::from_secs(1)).await };
    let results = store_runtime().block_on(store_runtime().spawn(request)).unwrap();
    results.iter().map(|results| results[0].before).collect()
}

/// Number of commands that ran a script since the last look.
fn scripts_run(server: &Server) -> u64 {
    let counts = server.command_counts();
    server.reset_stats();
    ["eval", "evalsha"].iter().filter_map(|name| counts.get(*name)).sum()
}

#[test]
fn calls_on_many_keys_share_commands() {
    let server = options().start();
    for algorithm in Algorithm::ALL {
        let counters = counters(&server);
        // Loads the scripts, one of them for a call alone.
        for count in [1, 33] {
            before(&counters, &charges(algorithm, count, Hits::Charge(2)));
        }
        scripts_run(&server);
        let mut expected = vec![2; 33];
        expected[0] = 4;
        assert_eq!(before(&counters, &charges(algorithm, 33, Hits::Charge(1))), expected, "{algorithm}");
        // A health check may be among them.
        let commands = scripts_run(&server);
        assert!((3..=5).contains(&commands), "{commands} for {algorithm}");
        assert_eq!(before(&counters, &charges(algorithm, 5, Hits::Refund(1)))[0], 5, "{algorithm}");
        server.query::<()>(&["FLUSHALL"]);
    }
}

#[test]
fn calls_of_different_rules_share_commands_by_algorithm() {
    let server = options().start();
    let counters = counters(&server);
    let mixed: Vec<TestCharge> = (0..40)
        .map(|number| {
            let algorithm = [Algorithm::FixedWindow, Algorithm::TokenBucket][number % 2];
            TestCharge::new(&format!("value {number}"), limit(algorithm), Hits::Charge(1 + (number % 3) as u64))
        })
        .collect();
    assert_eq!(before(&counters, &mixed), [0; 40]);
    scripts_run(&server);
    let hits: Vec<u64> = (0..40).map(|number| 1 + number % 3).collect();
    assert_eq!(before(&counters, &mixed), hits);
    let commands = scripts_run(&server);
    assert!((4..=6).contains(&commands), "{commands}");
}

#[test]
fn foreign_value_fails_only_its_own_charge() {
    let server = options().start();
    let counters = counters(&server);
    for algorithm in Algorithm::ALL {
        let test_charges = charges(algorithm, 10, Hits::Charge(1));
        before(&counters, &test_charges);
        let keys: Vec<String> = server.query(&["KEYS", "*value 7*"]);
        let [key] = &keys[..] else { panic!("{keys:?}") };
        server.query::<()>(&["DEL", key]);
        server.query::<()>(&["HSET", key, "field", "value"]);
        let until = tokio::time::Instant::now() + LONG_TIMEOUT;
        let when = (Time::from_secs(1), until);
        let outcomes = store_runtime().block_on(counters.charge_until(&test_charges, CommitMode::Commit, when));
        for (number, outcome) in outcomes.into_iter().enumerate() {
            let before = outcome.map(|results| results[0].before);
            assert_eq!(before, if number == 7 { Err(RedisError::WrongType) } else { Ok(1) }, "{algorithm} {number}");
        }
        assert_eq!(server.query::<String>(&["TYPE", key]), "hash");
        server.query::<()>(&["FLUSHALL"]);
    }
}

#[test]
fn scripts_that_the_server_forgot_are_sent_again() {
    let server = options().start();
    let counters = counters(&server);
    let test_charges = charges(Algorithm::FixedWindow, 20, Hits::Charge(1));
    for round in 0..3 {
        assert_eq!(before(&counters, &test_charges), [round; 20]);
        server.query::<()>(&["SCRIPT", "FLUSH"]);
    }
}

#[test]
fn calls_in_a_cluster_stay_alone() {
    let cluster = Cluster::start();
    let nodes = cluster.addresses().join(",");
    let env = [("REDIS_TYPE", "cluster"), ("REDIS_URL", nodes.as_str())];
    let counters = Arc::new(RedisCounters::new(&env, TimeSource::Redis));
    wait_until_connected(&counters.redis);
    let test_charges = charges(Algorithm::FixedWindow, 50, Hits::Charge(1));
    assert_eq!(before(&counters, &test_charges), [0; 50]);
    assert_eq!(before(&counters, &test_charges), [1; 50]);
}

#[test]
fn calls_through_a_proxy_that_divides_keys_stay_alone() {
    let servers = [options().start(), options().start()];
    let proxy = divide_keys([servers[0].address(), servers[1].address()]);
    let address = format!("127.0.0.1:{}", proxy.number());
    let counters = Arc::new(RedisCounters::at(&address, TimeSource::Redis));
    wait_until_connected(&counters.redis);
    let test_charges = charges(Algorithm::FixedWindow, 50, Hits::Charge(1));
    assert_eq!(before(&counters, &test_charges), [0; 50]);
    for (number, charge) in test_charges.iter().enumerate() {
        // Each by itself reaches the server that has the key.
        assert_eq!(before(&counters, std::slice::from_ref(charge)), [1], "value {number}");
    }
    assert!(servers.iter().all(|server| scripts_run(server) > 20));
}

/// Starts a proxy that sends each command to the server that its first key selects.
fn divide_keys(servers: [String; 2]) -> Port {
    let port = Port::reserve();
    let listener = TcpListener::bind(("127.0.0.1", port.number())).unwrap();
    thread::spawn(move || {
        for client in listener.incoming() {
            let servers = servers.clone();
            thread::spawn(move || {
                let servers = servers.map(|address| TcpStream::connect(address).unwrap());
                let _closed = forward(client.unwrap(), servers);
            });
        }
    });
    port
}

fn forward(mut client: TcpStream, mut servers: [TcpStream; 2]) -> Option<()> {
    let mut input = BytesMut::new();
    loop {
        let command = read_reply(&mut client, &mut input)?;
        let Reply::Array(words) = &command else { return None };
        let words: Vec<&[u8]> = words.iter().filter_map(reply_bytes).collect();
        let key = match words[0] {
            b"EVAL" | b"EVALSHA" => words.get(3),
            _ => words.get(1),
        };
        let sum: usize = key.map_or(0, |key| key.iter().map(|byte| usize::from(*byte)).sum());
        let server = &mut servers[sum % 2];
        let mut text = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            text.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            text.extend_from_slice(word);
            text.extend_from_slice(b"\r\n");
        }
        server.write_all(&text).ok()?;
        client.write_all(&read_raw(server)?).ok()?;
    }
}

/// Reads one reply of a server as it was sent; nothing else is on the way.
fn read_raw(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut raw = Vec::new();
    loop {
        let mut bytes = [0; 4096];
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => return None,
            Ok(length) => raw.extend_from_slice(&bytes[..length]),
        }
        if decode_reply(&mut BytesMut::from(&raw[..])).ok()?.is_some() {
            return Some(raw);
        }
    }
}

fn read_reply(stream: &mut TcpStream, input: &mut BytesMut) -> Option<Reply> {
    loop {
        if let Some(reply) = decode_reply(input).ok()? {
            return Some(reply);
        }
        let mut bytes = [0; 4096];
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => return None,
            Ok(length) => input.extend_from_slice(&bytes[..length]),
        }
    }
}
