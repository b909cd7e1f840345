//! Tests of the kit's proxy, and of servers that stand still.
//!
//! Each test checks one part from outside, through a plain client.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use ::redis::{RedisResult, Value};

use kit::redis::client::RedisClient;
use kit::redis::{REPLY_TIMEOUT, Server, options};
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::tollkeeper::with_rules;
use kit::{http, wait_for};

/// Time to wait for a reply that must not come.
const MOMENT: Duration = Duration::from_millis(300);

#[test]
fn frozen_server_accepts_and_replies_after_thaw() {
    let server = options().start();
    let mut caller = server.connect(REPLY_TIMEOUT).unwrap();
    caller.set_timeout(MOMENT).unwrap();
    server.freeze();
    assert!(caller.command(&["INCR", "key"]).unwrap_err().is_timeout());
    assert!(server.connect(MOMENT).err().unwrap().is_timeout());
    server.thaw();
    // A thawed server executes what it received while frozen, although no client waits for it.
    wait_for("the command sent while frozen", || (server.query::<u64>(&["EXISTS", "key"]) == 1).then_some(()));
    server.freeze();
}

/// A server behind a proxy.
fn proxied() -> (Server, TcpProxy) {
    let server = options().start();
    let proxy = TcpProxy::to(&server.address());
    (server, proxy)
}

fn through(proxy: &TcpProxy) -> RedisResult<RedisClient> {
    RedisClient::connect(&format!("redis://127.0.0.1:{}", proxy.port()), REPLY_TIMEOUT)
}

#[test]
fn proxy_passes_and_counts_bytes() {
    let (server, proxy) = proxied();
    let (mut one, mut other) = (through(&proxy).unwrap(), through(&proxy).unwrap());
    let large = "x".repeat(1 << 20);
    one.command(&["SET", "key", &large]).unwrap();
    assert_eq!(other.command(&["STRLEN", "key"]).unwrap(), Value::Int(1 << 20));
    assert_eq!(other.command(&["GET", "key"]).unwrap(), Value::BulkString(large.into_bytes()));
    assert_eq!((proxy.accepted_connections(), proxy.open_connections()), (2, 2));
    assert!(proxy.request_bytes() > 1 << 20 && proxy.response_bytes() > 1 << 20, "{proxy:?}");
    drop(one);
    wait_for("the proxy to close", || (proxy.open_connections() == 1).then_some(()));
    server.kill();
    assert!(other.command(&["PING"]).is_err());
    assert!(through(&proxy).and_then(|mut caller| caller.command(&["PING"])).is_err());
}

#[test]
fn proxy_refuses_and_recovers() {
    let (_server, proxy) = proxied();
    let mut open = through(&proxy).unwrap();
    proxy.set(Mode::Refuse);
    assert!(through(&proxy).err().unwrap().is_connection_refusal());
    assert!(open.command(&["PING"]).unwrap_err().is_connection_dropped());
    proxy.set(Mode::Pass);
    through(&proxy).unwrap().command(&["PING"]).unwrap();
}

#[test]
fn proxy_resets_open_and_new_connections() {
    let (_server, proxy) = proxied();
    let mut open = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    wait_for("the connection to be accepted", || (proxy.open_connections() == 1).then_some(()));
    proxy.set(Mode::Reset);
    let mut new = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    for stream in [&mut open, &mut new] {
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
    proxy.set(Mode::Pass);
    through(&proxy).unwrap().command(&["PING"]).unwrap();
}

#[test]
fn proxy_blackholes_for_good_and_stalls_for_a_while() {
    for (mode, arrives) in [(Mode::Blackhole, false), (Mode::Stall, true)] {
        let (server, proxy) = proxied();
        let mut open = through(&proxy).unwrap();
        open.command(&["PING"]).unwrap();
        proxy.set(mode);
        open.set_timeout(MOMENT).unwrap();
        assert!(open.command(&["INCR", "old"]).unwrap_err().is_timeout(), "{mode:?}");
        let mut new = through(&proxy).unwrap();
        new.set_timeout(MOMENT).unwrap();
        assert!(new.command(&["INCR", "new"]).unwrap_err().is_timeout(), "{mode:?}");
        assert_eq!(server.query::<u64>(&["EXISTS", "old", "new"]), 0, "{mode:?}");
        proxy.set(Mode::Pass);
        if arrives {
            let both = || (server.query::<u64>(&["EXISTS", "old", "new"]) == 2).then_some(());
            wait_for("what was held", both);
        } else {
            let last = RedisClient::command(&mut through(&proxy).unwrap(), &["EXISTS", "old", "new"]);
            assert_eq!(last.unwrap(), Value::Int(0));
        }
    }
}

#[test]
fn proxy_delays_without_throttling() {
    const DELAY: Duration = Duration::from_millis(40);
    let (_server, proxy) = proxied();
    let mut callers: Vec<_> = (0..30).map(|_| through(&proxy).unwrap()).collect();
    proxy.set(Mode::Delay(DELAY));
    let began = Instant::now();
    for caller in &mut callers {
        caller.send(&["PING"]).unwrap();
    }
    for caller in &mut callers {
        caller.receive().unwrap();
    }
    let took = began.elapsed();
    assert!(took >= 2 * DELAY, "there and back took {took:?}");
    assert!(took < 25 * DELAY, "one after the other: {took:?}");
}

#[test]
fn proxy_truncates_responses() {
    let (_server, proxy) = proxied();
    let mut caller = through(&proxy).unwrap();
    caller.command(&["SET", "key", "0123456789"]).unwrap();
    // `+PONG` is 7 bytes with its line end.
    proxy.set(Mode::Truncate(10));
    caller.command(&["PING"]).unwrap();
    assert!(caller.command(&["GET", "key"]).unwrap_err().is_connection_dropped());

    let mut stream = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    stream.write_all(b"GET key\r\n").unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).unwrap();
    assert_eq!(response, b"$10\r\n01234");
}

#[test]
fn several_tollkeepers_run_side_by_side_and_freeze_alone() {
    const RULES: &str = "domain: shop\ndescriptors: [{ key: user, rate_limit: { unit: day, requests_per_unit: 9 } }]\n";
    const BODY: &str = r#"{"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]}"#;
    let replicas = [(); 3].map(|()| with_rules(RULES).start());
    assert!(replicas.iter().all(|replica| replica.post_json(BODY).status == 200));
    assert!(replicas.iter().all(|replica| !replica.stderr().is_empty()));
    replicas[0].freeze();
    let request = http::post(replicas[0].http_port(), "/json", BODY);
    thread::scope(|scope| {
        let response = scope.spawn(|| request.send().status);
        assert_eq!(replicas[1].post_json(BODY).status, 200);
        assert!(!response.is_finished());
        replicas[0].thaw();
        assert_eq!(response.join().unwrap(), 200);
    });
}
