//! `/live`: values, and when its stream ends.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::server;
use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::tollkeeper::Tollkeeper;
use kit::{PATIENCE, wait_for};

/// A listener of `/live`.
struct Listener(BufReader<TcpStream>);

impl Listener {
    /// Connects and reads the head of the response.
    fn connect(server: &Tollkeeper) -> Self {
        let mut stream = http::connect(server.debug_port(), Ipv4Addr::LOCALHOST).unwrap();
        stream.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut listener = Self(BufReader::new(stream));
        let mut head = String::new();
        while listener.0.read_line(&mut head).unwrap() > 2 {}
        assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("content-type: text/event-stream\r\n"), "{head}");
        listener
    }

    /// The next event; `None` at the end of the stream or the connection.
    fn next(&mut self) -> Option<Value> {
        const LAST_CHUNK: &str = "0\r\n";
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).ok().filter(|read| *read > 0 && line != LAST_CHUNK)?;
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(serde_json::from_str(data).unwrap());
            }
        }
    }
}

#[test]
fn event_has_the_counts_of_its_interval() {
    let server = server().start();
    let mut listener = Listener::connect(&server);
    let first = listener.next().unwrap();
    assert_eq!(first["interval_us"], 0, "{first}");
    let recent = &first["recent"];
    assert_eq!((&recent["calls_per_s"], &recent["latency_us"]["p50"]), (&Value::from(0.0), &Value::Null));
    assert_eq!((&first["store"]["kind"], &first["store"]["available"]), (&"memory".into(), &true.into()));
    assert_eq!((&first["rules"]["load_number"], &first["rules"]["limits"]), (&1.into(), &1.into()), "{first}");
    assert_eq!((&first["ready"], &first["draining"], &first["replicas"]), (&true.into(), &false.into(), &Value::Null));

    let client = Client::connect(server.grpc_port());
    for _ in 0..5 {
        client.call(&rate_limit_request("shop", &[("login", "ann")])).unwrap();
    }
    let (mut per_s, mut rejected_per_s, mut rejected, mut ok) = (0.0, 0.0, 0, 0);
    while rejected + ok < 5 {
        let event = listener.next().unwrap();
        let recent = &event["recent"];
        per_s += recent["calls_per_s"].as_f64().unwrap();
        rejected_per_s += recent["rejected_per_s"].as_f64().unwrap();
        rejected += recent["verdicts"]["over_limit"].as_u64().unwrap();
        ok += recent["verdicts"]["ok"].as_u64().unwrap();
        assert_eq!(recent["calls_per_s"] == 0.0, recent["latency_us"]["p999"].is_null(), "{event}");
        assert!(event["interval_us"].as_u64().unwrap() >= 500_000, "more than one event a second: {event}");
    }
    assert_eq!((rejected, ok), (2, 3));
    // Rates of about a second each, or of more on a slow machine.
    assert!(per_s > 0.0 && per_s <= 5.0 && rejected_per_s > 0.0 && rejected_per_s <= 2.0, "{per_s}, {rejected_per_s}");
}

#[test]
fn local_decisions_are_split_into_passed_and_rejected() {
    let server =
        server().env("REDIS_URL", "redis://127.0.0.1:1").env("TOLLKEEPER_STORE_TIMEOUT", "1s").start_unhealthy();
    let mut listener = Listener::connect(&server);
    listener.next().unwrap();
    for _ in 0..5 {
        server.post_json(r#"{"domain":"shop","descriptors":[{"entries":[{"key":"login","value":"ann"}]}]}"#);
    }
    let (mut local, mut rejected) = (0, 0);
    while local < 5 {
        let event = listener.next().unwrap();
        local += event["recent"]["verdicts"]["local"].as_u64().unwrap();
        rejected += event["recent"]["verdicts"]["local_rejected"].as_u64().unwrap();
    }
    // The limit is 3, and this process has all of it.
    assert_eq!((local, rejected), (5, 2));
    let history = http::get(server.debug_port(), "/history?rule=shop.login&exact=true").send();
    let history: Value = serde_json::from_slice(&history.body).unwrap();
    let sum = |name: &str| {
        history["limits"][name].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!((sum("matched"), sum("passed"), sum("rejected")), (5, 3, 2), "{history}");
}

#[test]
fn nothing_is_computed_without_a_listener() {
    let server = server().start();
    let mut listener = Listener::connect(&server);
    let first = listener.next().unwrap();
    listener.next().unwrap();
    drop(listener);
    // A sampler that ended starts again with zeros, one that runs on would send its last interval.
    let again = wait_for("the sampler to end", || {
        thread::sleep(Duration::from_secs(2));
        let event = Listener::connect(&server).next().unwrap();
        (event["interval_us"] == 0).then_some(event)
    });
    assert!(again["time_us"].as_u64() > first["time_us"].as_u64());
}

#[test]
fn stream_ends_when_the_process_stops() {
    let mut server = server().start();
    let mut listener = Listener::connect(&server);
    let silent: Vec<_> = (0..7).map(|_| Listener::connect(&server)).collect();
    listener.next().unwrap();
    let began = Instant::now();
    server.signal("TERM");
    while listener.next().is_some() {}
    assert_eq!(server.wait().code(), Some(0));
    assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
    drop(silent);
}

#[test]
fn stream_ends_when_the_drain_period_begins() {
    let mut server = server().env("TOLLKEEPER_DRAIN_PERIOD", "30s").env("TOLLKEEPER_SHUTDOWN_TIMEOUT", "40s").start();
    let mut listener = Listener::connect(&server);
    listener.next().unwrap();
    let began = Instant::now();
    server.signal("TERM");
    while listener.next().is_some() {}
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(http::get(server.debug_port(), "/livez").send().status, 200, "the process still serves");
    server.kill();
}
