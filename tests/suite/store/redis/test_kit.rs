//! Tests of the kit's Redis servers, proxy and failures.
//!
//! Each test checks one part from outside, through a plain client.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use ::redis::{ErrorKind, RedisError, RedisResult, Value};

use kit::redis::certificates::Certificates;
use kit::redis::client::RedisClient;
use kit::redis::cluster::{Cluster, SLOTS};
use kit::redis::sentinels::{NAME, Sentinels};
use kit::redis::{REPLY_TIMEOUT, Server, options};
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::tollkeeper::with_rules;
use kit::{http, wait_for};

/// Time to wait for a reply that must not come.
const MOMENT: Duration = Duration::from_millis(300);

fn code(error: &RedisError) -> String {
    error.code().unwrap_or_default().to_owned()
}

#[test]
fn server_listens_on_tcp_and_unix_without_persistence() {
    let server = options().unix_socket().with(&[("maxmemory", "3mb"), ("maxmemory-policy", "noeviction")]).start();
    assert_eq!(server.query::<String>(&["SET", "key", "1"]), "OK");
    let socket = format!("redis+unix://{}", server.socket().display());
    let mut caller = RedisClient::connect(&socket, REPLY_TIMEOUT).unwrap();
    assert_eq!(caller.command(&["GET", "key"]).unwrap(), Value::BulkString(b"1".to_vec()));
    assert_eq!(server.query::<(String, String)>(&["CONFIG", "GET", "save"]).1, "");
    assert_eq!(server.info("maxmemory"), (3 << 20).to_string());

    let full = (0..100).find_map(|key| server.command(&["SET", &key.to_string(), &"x".repeat(100_000)]).err());
    assert_eq!(code(&full.unwrap()), "OOM");

    let port = server.port();
    server.kill();
    assert!(server.command(&["PING"]).unwrap_err().is_connection_refusal());
    server.restart();
    assert_eq!((server.port(), server.query::<Option<String>>(&["GET", "key"])), (port, None));
}

#[test]
fn acl_users_have_their_rights_and_the_kit_user_all() {
    let server = options().password("secret").user("limited", "on >pass ~a* +get").start();
    let address = server.address();
    let connect = |user: &str| RedisClient::connect(&format!("redis://{user}{address}"), REPLY_TIMEOUT);

    let auth_error = connect("").unwrap().command(&["GET", "a"]).unwrap_err();
    assert_eq!(code(&auth_error), "NOAUTH");
    assert_eq!(connect(":wrong@").err().unwrap().kind(), ErrorKind::AuthenticationFailed);
    let mut limited = connect("limited:pass@").unwrap();
    assert_eq!(limited.command(&["GET", "a"]).unwrap(), Value::Nil);
    assert_eq!(code(&limited.command(&["GET", "b"]).unwrap_err()), "NOPERM");
    assert_eq!(code(&limited.command(&["SET", "a", "1"]).unwrap_err()), "NOPERM");

    server.query::<()>(&["CONFIG", "SET", "requirepass", "changed"]);
    assert!(connect(":secret@").is_err());
    assert!(connect(":changed@").is_ok());
    server.query::<()>(&["SET", "a", "1"]);
}

#[test]
fn tls_requires_the_right_authority() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    let open = options().tls(&certificates).start();
    let mutual = options().tls(&certificates).with(&[("tls-auth-clients", "yes")]).start();
    // server, host, authority, client certificate, whether the connection succeeds
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
        let reply = RedisClient::connect_tls(address, &certificates, authority, with_certificate)
            .and_then(|mut caller| caller.command(&["PING"]));
        assert_eq!(reply.is_ok(), served, "{host} {authority} {with_certificate}: {reply:?}");
    }
}

#[test]
fn server_loads_a_certificate_issued_later() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    let server = options().tls(&certificates).start();
    certificates.issue_server("second");
    let path = |name| certificates.path(name).to_str().unwrap().to_owned();
    let (certificate, key) = (path("second.crt"), path("second.key"));
    server.query::<()>(&["CONFIG", "SET", "tls-cert-file", &certificate, "tls-key-file", &key]);
    let reply = RedisClient::connect_tls(("localhost", server.tls_port()), &certificates, "ca.crt", false)
        .and_then(|mut caller| caller.command(&["PING"]));
    assert!(reply.is_ok(), "{reply:?}");
}

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

#[test]
fn runaway_script_keeps_the_server_busy() {
    let server = options().with(&[("busy-reply-threshold", "20")]).start();
    let mut caller = server.connect(REPLY_TIMEOUT).unwrap();
    caller.send(&["EVAL", "while true do end", "0"]).unwrap();
    wait_for("BUSY", || (code(&server.command(&["GET", "key"]).err()?) == "BUSY").then_some(()));
    server.query::<()>(&["SCRIPT", "KILL"]);
    assert!(caller.receive().is_err());
    server.query::<()>(&["SET", "key", "1"]);
}

#[test]
fn commands_are_counted_by_name() {
    let server = options().start();
    server.query::<()>(&["SET", "key", "1"]);
    server.reset_stats();
    assert_eq!(server.command_counts(), [].into());
    for _ in 0..3 {
        server.query::<()>(&["INCR", "key"]);
    }
    server.query::<()>(&["EVAL", "return redis.call('GET', KEYS[1])", "1", "key"]);
    server.query::<()>(&["CONFIG", "GET", "save"]);
    let expected = [("incr", 3), ("eval", 1), ("get", 1), ("config|get", 1)];
    assert_eq!(server.command_counts(), expected.map(|(name, calls)| (name.to_owned(), calls)).into());
}

#[test]
#[should_panic(expected = "run tests/run.sh")]
fn missing_program_is_named_with_a_fix() {
    options().program("no-redis-of-that-name").start();
}

#[test]
#[should_panic(expected = "no-such-directive")]
fn log_of_a_server_that_exits_is_quoted() {
    options().with(&[("no-such-directive", "1")]).start();
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

/// A whole cluster, a key of node 1, and the key's slot.
fn cluster_with_key() -> (Cluster, String, u16) {
    let cluster = Cluster::start();
    let key = cluster.key_on(1, "key");
    let slot = cluster.slot(&key);
    assert_eq!(cluster.node(1).query::<String>(&["SET", &key, "1"]), "OK");
    (cluster, key, slot)
}

/// Code of a redirection error, and its target.
fn redirection(error: &RedisError) -> (String, Option<(&str, u16)>) {
    (code(error), error.redirect_node())
}

#[test]
fn cluster_redirects_during_migration_and_is_down_without_a_slot() {
    let (cluster, key, slot) = cluster_with_key();
    let (old, new) = (cluster.node(1), cluster.node(2));
    assert_eq!(cluster.addresses().len(), 6);
    // The check value of CRC-16/XMODEM.
    assert_eq!(cluster.slot("123456789"), 0x31C3);
    assert_eq!([0, 8000, SLOTS - 1].map(|slot| cluster.primary_of(slot)), [0, 1, 2]);
    assert_eq!([0, 1, 2].map(|primary| cluster.replicas_of(primary)), [[3], [4], [5]]);
    let moved = cluster.node(0).command(&["GET", &key]).unwrap_err();
    assert_eq!(redirection(&moved), ("MOVED".to_owned(), Some((&*old.address(), slot))));

    // During the migration the old primary serves its remaining keys and redirects the others with ASK.
    let from = cluster.begin_migration(slot, 2);
    assert_eq!((from, old.query::<String>(&["GET", &key])), (1, "1".to_owned()));
    let ask = old.command(&["GET", &format!("{{{key}}}absent")]).unwrap_err();
    assert_eq!(redirection(&ask), ("ASK".to_owned(), Some((&*new.address(), slot))));
    assert_eq!(cluster.migrate_keys(slot, from, 2, 100), 1);
    assert_eq!(code(&old.command(&["GET", &key]).unwrap_err()), "ASK");
    assert_eq!(code(&new.command(&["GET", &key]).unwrap_err()), "MOVED");
    cluster.end_migration(slot, from, 2);
    assert_eq!((cluster.primary_of(slot), new.query::<String>(&["GET", &key])), (2, "1".to_owned()));
    cluster.migrate_slot(slot, 1);
    assert_eq!((cluster.primary_of(slot), old.query::<String>(&["GET", &key])), (1, "1".to_owned()));

    assert_eq!(cluster.lose_slot(0), 0);
    assert_eq!(code(&old.command(&["GET", &key]).unwrap_err()), "CLUSTERDOWN");
    cluster.restore_slot(0, 0);
    assert_eq!(old.query::<String>(&["GET", &key]), "1");
}

#[test]
fn cluster_fails_over_on_command_and_on_failure() {
    let (cluster, key, slot) = cluster_with_key();
    let old = cluster.node(1);
    cluster.planned_failover(1, 4);
    assert_eq!(cluster.primary_of(slot), 4);
    assert_eq!(code(&old.command(&["SET", &key, "2"]).unwrap_err()), "MOVED");

    assert_eq!(cluster.fail_over(4), 1);
    assert_eq!(old.query::<String>(&["GET", &key]), "1");
    cluster.node(4).restart();
    cluster.wait_until_healthy();
    assert_eq!(cluster.replicas_of(1), [4]);

    // A frozen primary counts as dead, and becomes a replica when it continues.
    cluster.set_fast_failover(true);
    cluster.node(2).freeze();
    assert_eq!(cluster.wait_for_successor(2, SLOTS - 1), 5);
    cluster.node(2).thaw();
    cluster.wait_until_healthy();
    assert_eq!(cluster.replicas_of(5), [2]);
}

#[test]
fn cluster_uses_tls_between_nodes_and_to_clients() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    let cluster = Cluster::start_with(&options().tls(&certificates).password("secret"), 1);
    let (key, from) = (cluster.key_on(0, "key"), cluster.node(0));
    from.query::<()>(&["SET", &key, "1"]);
    cluster.migrate_slot(cluster.slot(&key), 1);
    assert_eq!(cluster.node(1).query::<String>(&["GET", &key]), "1");

    // A client with TLS is redirected to a port with TLS.
    let mut caller = RedisClient::connect_tls(("127.0.0.1", from.tls_port()), &certificates, "ca.crt", false).unwrap();
    assert_eq!(code(&caller.command(&["GET", &key]).unwrap_err()), "NOAUTH");
    caller.command(&["AUTH", "secret"]).unwrap();
    let moved = caller.command(&["GET", &key]).unwrap_err();
    let there = format!("127.0.0.1:{}", cluster.node(1).tls_port());
    assert_eq!(redirection(&moved).1, Some((&*there, cluster.slot(&key))));
}

#[test]
fn sentinels_fail_over_on_command_and_on_failure() {
    let all = Sentinels::start_with(&options().password("secret"), &options().password("of sentinels"));
    assert_eq!((all.addresses().len(), all.primary()), (3, 0));
    let reply = RedisClient::connect(&format!("redis://{}", all.addresses()[0]), REPLY_TIMEOUT)
        .and_then(|mut caller| caller.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]));
    assert_eq!(code(&reply.unwrap_err()), "NOAUTH");
    all.server(0).query::<()>(&["SET", "key", "1"]);

    let second = all.planned_failover();
    assert_ne!(second, 0);
    assert_eq!(code(&all.server(0).command(&["SET", "key", "2"]).unwrap_err()), "READONLY");
    assert_eq!(all.server(second).query::<String>(&["GET", "key"]), "1");

    all.sentinel(0).kill();
    let third = all.fail_over();
    assert_ne!(third, second);
    all.server(third).query::<()>(&["SET", "key", "3"]);
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
