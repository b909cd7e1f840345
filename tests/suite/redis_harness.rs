//! That the Redis of the harness does what suites take from it: a harness that pretends a failure proves nothing.
//!
//! Each test checks one part from outside, by what a plain client sees.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use ::redis::{ErrorKind, RedisError, RedisResult, Value};

use super::harness::proxy::{Mode, Proxy};
use super::harness::redis::caller::Caller;
use super::harness::redis::certificates::Certificates;
use super::harness::redis::{REPLY_TIMEOUT, Server, options};
use super::harness::wait_for;

/// Long enough for a healthy server on a busy machine not to be taken for a frozen one, where that would matter.
const MOMENT: Duration = Duration::from_millis(300);

fn code(error: &RedisError) -> String {
    error.code().unwrap_or_default().to_owned()
}

#[test]
fn a_server_answers_on_tcp_and_unix_and_keeps_nothing() {
    let server = options().unix_socket().with(&[("maxmemory", "3mb"), ("maxmemory-policy", "noeviction")]).start();
    assert_eq!(server.ask::<String>(&["SET", "key", "1"]), "OK");
    let socket = format!("redis+unix://{}", server.socket().display());
    let mut caller = Caller::connect(&socket, REPLY_TIMEOUT).unwrap();
    assert_eq!(caller.command(&["GET", "key"]).unwrap(), Value::BulkString(b"1".to_vec()));
    assert_eq!(server.ask::<(String, String)>(&["CONFIG", "GET", "save"]).1, "");
    assert_eq!(server.info("maxmemory"), (3 << 20).to_string());

    let full = (0..100).find_map(|key| server.command(&["SET", &key.to_string(), &"x".repeat(100_000)]).err());
    assert_eq!(code(&full.unwrap()), "OOM");

    let port = server.port();
    server.kill();
    assert!(server.command(&["PING"]).unwrap_err().is_connection_refusal());
    server.start_again();
    assert_eq!((server.port(), server.ask::<Option<String>>(&["GET", "key"])), (port, None));
}

#[test]
fn users_may_do_what_their_rules_say_and_the_harness_everything() {
    let server = options().password("secret").user("limited", "on >pass ~a* +get").start();
    let address = server.address();
    let connect = |user: &str| Caller::connect(&format!("redis://{user}{address}"), REPLY_TIMEOUT);

    let refused = connect("").unwrap().command(&["GET", "a"]).unwrap_err();
    assert_eq!(code(&refused), "NOAUTH");
    assert_eq!(connect(":wrong@").err().unwrap().kind(), ErrorKind::AuthenticationFailed);
    let mut limited = connect("limited:pass@").unwrap();
    assert_eq!(limited.command(&["GET", "a"]).unwrap(), Value::Nil);
    assert_eq!(code(&limited.command(&["GET", "b"]).unwrap_err()), "NOPERM");
    assert_eq!(code(&limited.command(&["SET", "a", "1"]).unwrap_err()), "NOPERM");

    server.ask::<()>(&["CONFIG", "SET", "requirepass", "changed"]);
    assert!(connect(":secret@").is_err());
    assert!(connect(":changed@").is_ok());
    server.ask::<()>(&["SET", "a", "1"]);
}

#[test]
fn tls_is_for_those_who_trust_the_right_authority() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    let open = options().tls(&certificates).start();
    let mutual = options().tls(&certificates).with(&[("tls-auth-clients", "yes")]).start();
    // A server, the host, the authority, the client's certificate; and whether that is to be served.
    let cases = [
        (&open, "localhost", "ca.crt", false, true),
        (&open, "127.0.0.1", "ca.crt", true, true),
        (&open, "127.0.0.1", "other_ca.crt", false, false),
        (&open, "127.0.0.2", "ca.crt", false, false),
        (&mutual, "127.0.0.1", "ca.crt", true, true),
        (&mutual, "127.0.0.1", "ca.crt", false, false),
    ];
    for (server, host, authority, with_certificate, served) in cases {
        let address = (host, server.tls_port());
        let reply = Caller::connect_tls(address, &certificates, authority, with_certificate)
            .and_then(|mut caller| caller.command(&["PING"]));
        assert_eq!(reply.is_ok(), served, "{host} {authority} {with_certificate}: {reply:?}");
    }
}

#[test]
fn a_server_takes_a_certificate_issued_later() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    let server = options().tls(&certificates).start();
    certificates.issue_server("second");
    let path = |name| certificates.path(name).to_str().unwrap().to_owned();
    let (certificate, key) = (path("second.crt"), path("second.key"));
    server.ask::<()>(&["CONFIG", "SET", "tls-cert-file", &certificate, "tls-key-file", &key]);
    let reply = Caller::connect_tls(("localhost", server.tls_port()), &certificates, "ca.crt", false)
        .and_then(|mut caller| caller.command(&["PING"]));
    assert!(reply.is_ok(), "{reply:?}");
}

#[test]
fn a_frozen_server_accepts_and_does_not_answer_until_thawed() {
    let server = options().start();
    let mut caller = server.connect(MOMENT).unwrap();
    server.freeze();
    assert!(caller.command(&["INCR", "key"]).unwrap_err().is_timeout());
    assert!(server.connect(MOMENT).err().unwrap().is_timeout());
    server.thaw();
    // What it was sent while frozen is done, though nobody waits for it.
    wait_for("the command sent while frozen", || (server.ask::<u64>(&["EXISTS", "key"]) == 1).then_some(()));
    server.freeze();
}

#[test]
fn a_runaway_script_keeps_a_server_busy() {
    let server = options().with(&[("busy-reply-threshold", "20")]).start();
    let mut caller = server.connect(REPLY_TIMEOUT).unwrap();
    caller.send(&["EVAL", "while true do end", "0"]).unwrap();
    // The harness can not even log in then.
    let mut other = Caller::connect(&format!("redis://{}", server.address()), REPLY_TIMEOUT).unwrap();
    wait_for("BUSY", || (code(&other.command(&["GET", "key"]).err()?) == "BUSY").then_some(()));
    other.command(&["SCRIPT", "KILL"]).unwrap();
    server.ask::<()>(&["SET", "key", "1"]);
}

#[test]
fn commands_are_counted_by_name() {
    let server = options().start();
    server.ask::<()>(&["SET", "key", "1"]);
    server.reset_stats();
    assert_eq!(server.commands(), [].into());
    for _ in 0..3 {
        server.ask::<()>(&["INCR", "key"]);
    }
    server.ask::<()>(&["EVAL", "return redis.call('GET', KEYS[1])", "1", "key"]);
    server.ask::<()>(&["CONFIG", "GET", "save"]);
    let expected = [("incr", 3), ("eval", 1), ("get", 1), ("config|get", 1)];
    assert_eq!(server.commands(), expected.map(|(name, calls)| (name.to_owned(), calls)).into());
}

#[test]
#[should_panic(expected = "run tests/run.sh")]
fn a_missing_program_is_named_with_the_way_to_get_it() {
    options().program("no-redis-of-that-name").start();
}

#[test]
#[should_panic(expected = "no-such-directive")]
fn a_server_that_ends_at_once_is_quoted() {
    options().with(&[("no-such-directive", "1")]).start();
}

/// A server behind a proxy.
fn proxied() -> (Server, Proxy) {
    let server = options().start();
    let proxy = Proxy::to(&server.address());
    (server, proxy)
}

fn through(proxy: &Proxy) -> RedisResult<Caller> {
    Caller::connect(&format!("redis://127.0.0.1:{}", proxy.port()), MOMENT)
}

#[test]
fn a_proxy_passes_and_counts() {
    let (server, proxy) = proxied();
    let (mut one, mut other) = (through(&proxy).unwrap(), through(&proxy).unwrap());
    let large = "x".repeat(1 << 20);
    one.command(&["SET", "key", &large]).unwrap();
    assert_eq!(other.command(&["STRLEN", "key"]).unwrap(), Value::Int(1 << 20));
    assert_eq!(other.command(&["GET", "key"]).unwrap(), Value::BulkString(large.into_bytes()));
    assert_eq!((proxy.accepted(), proxy.open()), (2, 2));
    assert!(proxy.asked_bytes() > 1 << 20 && proxy.answered_bytes() > 1 << 20, "{proxy:?}");
    drop(one);
    wait_for("the proxy to close", || (proxy.open() == 1).then_some(()));
    server.kill();
    assert!(other.command(&["PING"]).is_err());
    assert!(through(&proxy).and_then(|mut caller| caller.command(&["PING"])).is_err());
}

#[test]
fn a_proxy_refuses_and_comes_back() {
    let (_server, proxy) = proxied();
    let mut open = through(&proxy).unwrap();
    proxy.set(Mode::Refuse);
    assert!(through(&proxy).err().unwrap().is_connection_refusal());
    assert!(open.command(&["PING"]).unwrap_err().is_connection_dropped());
    proxy.set(Mode::Pass);
    through(&proxy).unwrap().command(&["PING"]).unwrap();
}

#[test]
fn a_proxy_resets_open_and_new_connections() {
    let (_server, proxy) = proxied();
    let mut open = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    wait_for("the connection to be accepted", || (proxy.open() == 1).then_some(()));
    proxy.set(Mode::Reset);
    let mut new = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    for stream in [&mut open, &mut new] {
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
    proxy.set(Mode::Pass);
    through(&proxy).unwrap().command(&["PING"]).unwrap();
}

#[test]
fn a_proxy_swallows_for_good_and_holds_for_a_while() {
    for (mode, arrives) in [(Mode::Swallow, false), (Mode::Hold, true)] {
        let (server, proxy) = proxied();
        let mut open = through(&proxy).unwrap();
        open.command(&["PING"]).unwrap();
        proxy.set(mode);
        assert!(open.command(&["INCR", "old"]).unwrap_err().is_timeout(), "{mode:?}");
        let mut new = through(&proxy).unwrap();
        assert!(new.command(&["INCR", "new"]).unwrap_err().is_timeout(), "{mode:?}");
        assert_eq!(server.ask::<u64>(&["EXISTS", "old", "new"]), 0, "{mode:?}");
        proxy.set(Mode::Pass);
        if arrives {
            let both = || (server.ask::<u64>(&["EXISTS", "old", "new"]) == 2).then_some(());
            wait_for("what was held", both);
        } else {
            let last = Caller::command(&mut through(&proxy).unwrap(), &["EXISTS", "old", "new"]);
            assert_eq!(last.unwrap(), Value::Int(0));
        }
    }
}

#[test]
fn a_proxy_delays_without_slowing() {
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
fn a_proxy_cuts_answers_after_so_many_bytes() {
    let (_server, proxy) = proxied();
    let mut caller = through(&proxy).unwrap();
    caller.command(&["SET", "key", "0123456789"]).unwrap();
    // `+PONG` is 7 bytes with its line end.
    proxy.set(Mode::Cut(10));
    caller.command(&["PING"]).unwrap();
    assert!(caller.command(&["GET", "key"]).unwrap_err().is_connection_dropped());

    let mut stream = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    stream.write_all(b"GET key\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"$10\r\n01234");
}
