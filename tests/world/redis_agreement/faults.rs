//! Faults of a simulated server, and what a simulation sees of it: the parts that no redis-server can be asked about.

use bytes::{Bytes, BytesMut};
use simulated_redis::cluster::Address;
use simulated_redis::keyspace::Value;
use simulated_redis::refusals::Refusal;
use simulated_redis::server::{Connection, Kind, Options, Outcome, Role, Server};

const NOW_US: u64 = 1_700_000_000_000_000;

/// Reply to a command, words separated by spaces.
fn reply(server: &mut Server, now_us: u64, command: &str) -> String {
    let words: Vec<Bytes> = command.split(' ').map(|word| Bytes::copy_from_slice(word.as_bytes())).collect();
    let mut reply = BytesMut::new();
    server.execute(&mut Connection::new(), now_us, &words, &mut reply);
    String::from_utf8(reply.to_vec()).unwrap()
}

fn outcome(server: &mut Server, command: &str) -> (Outcome, String) {
    let words: Vec<Bytes> = command.split(' ').map(|word| Bytes::copy_from_slice(word.as_bytes())).collect();
    let mut reply = BytesMut::new();
    let outcome = server.execute(&mut Connection::new(), NOW_US, &words, &mut reply);
    (outcome, String::from_utf8(reply.to_vec()).unwrap())
}

#[test]
fn crash_loses_keys_and_scripts() {
    let mut server = Server::new(Options::default());
    reply(&mut server, NOW_US, "SET key value");
    let loaded = reply(&mut server, NOW_US, "SCRIPT LOAD return(1)");
    let call = format!("EVALSHA {} 0", &loaded[5..45]);
    assert_eq!(reply(&mut server, NOW_US, &call), ":1\r\n");
    server.crash();
    assert_eq!(reply(&mut server, NOW_US, "GET key"), "$-1\r\n");
    assert!(reply(&mut server, NOW_US, &call).starts_with("-NOSCRIPT "));
    assert_eq!(server.statistics().errors_with_code("NOSCRIPT"), 1);
}

#[test]
fn restored_snapshot_is_older_and_its_keys_expire_by_the_clock() {
    let mut server = Server::new(Options::default());
    reply(&mut server, NOW_US, "SET old value PX 1000");
    reply(&mut server, NOW_US, "SET kept value");
    let snapshot = server.snapshot();
    reply(&mut server, NOW_US, "SET new value");
    reply(&mut server, NOW_US, "DEL old");
    server.restore(&snapshot);
    assert_eq!(reply(&mut server, NOW_US + 1_000_000, "GET old"), "$5\r\nvalue\r\n");
    assert_eq!(reply(&mut server, NOW_US + 1_000_000, "GET new"), "$-1\r\n");
    assert_eq!(server.key_count(), 2);
    assert_eq!(reply(&mut server, NOW_US + 1_001_000, "GET old"), "$-1\r\n");
    assert_eq!((server.key_count(), server.expired_keys()), (1, 1));
}

#[test]
fn expiry_follows_a_clock_that_jumps_back() {
    let mut server = Server::new(Options::default());
    reply(&mut server, NOW_US, "SET key value PX 1000");
    assert_eq!(server.live_keys(NOW_US + 1_001_000).len(), 0);
    assert_eq!(reply(&mut server, NOW_US - 5_000_000, "PTTL key"), ":6000\r\n");
    let live = server.live_keys(NOW_US);
    let (name, entry) = live[0];
    assert_eq!((&name[..], entry.expires_at_ms), (&b"key"[..], Some(1_700_000_001_000)));
    assert_eq!(entry.value, Value::String("value".into()));
}

#[test]
fn evicted_key_is_counted_and_copies_are_independent() {
    let mut server = Server::new(Options::default());
    reply(&mut server, NOW_US, "RPUSH key a b");
    let bytes = server.memory_estimate();
    let copy = server.clone();
    let mut copy = std::thread::spawn(move || copy).join().unwrap();
    assert!(server.evict(&"key".into()) && !server.evict(&"key".into()));
    assert_eq!((server.statistics().evicted_keys, server.memory_estimate()), (1, 0));
    assert_eq!((reply(&mut copy, NOW_US, "LLEN key"), copy.memory_estimate()), (":2\r\n".to_owned(), bytes));
}

#[test]
fn reads_that_wait_and_writes_that_wait_for_replicas_say_so() {
    let mut server = Server::new(Options::default());
    let read = "XREAD BLOCK 250 STREAMS key 0";
    assert_eq!(outcome(&mut server, read), (Outcome::Blocked(250), String::new()));
    assert_eq!(outcome(&mut server, "XREAD STREAMS key 0"), (Outcome::Replied, "*-1\r\n".to_owned()));
    let mut ended = BytesMut::new();
    Connection::new().end_blocked_read(&mut ended);
    assert_eq!(&ended[..], b"*-1\r\n");
    reply(&mut server, NOW_US, "XADD key 5-1 field value");
    assert_eq!(outcome(&mut server, read).0, Outcome::Replied);

    assert_eq!(outcome(&mut server, "WAIT 1 70"), (Outcome::RepliedAfter(70), ":0\r\n".to_owned()));
    server.set_replicas_in_sync(2);
    assert_eq!(outcome(&mut server, "WAIT 1 70"), (Outcome::Replied, ":2\r\n".to_owned()));
    assert_eq!(server.statistics().commands["wait"], 2);
}

#[test]
fn roles_policies_and_watched_primaries_are_told() {
    let mut server = Server::new(Options { maxmemory_policy: "allkeys-lru".to_owned(), ..Options::default() });
    let info = reply(&mut server, NOW_US, "INFO memory");
    assert!(info.contains("\r\nmaxmemory_policy:allkeys-lru\r\n") && !info.contains("role:"), "{info}");
    assert!(reply(&mut server, NOW_US, "INFO").contains("\r\nrole:master\r\n"));
    assert!(reply(&mut server, NOW_US, "ROLE").starts_with("*3\r\n$6\r\nmaster\r\n"));
    let primary = Address { host: "10.0.0.1".to_owned(), port: 6379 };
    server.set_role(Role::Replica { primary: primary.clone(), is_connected: true });
    assert!(reply(&mut server, NOW_US, "INFO replication").contains("role:slave\r\nmaster_host:10.0.0.1\r\n"));
    assert!(reply(&mut server, NOW_US, "SET key value").starts_with("-READONLY "));
    assert!(reply(&mut server, NOW_US, "SENTINEL GET-MASTER-ADDR-BY-NAME main").starts_with("-ERR unknown command"));

    let mut sentinel = Server::new(Options { kind: Kind::Sentinel, ..Options::default() });
    let query = "SENTINEL GET-MASTER-ADDR-BY-NAME main";
    assert_eq!(reply(&mut sentinel, NOW_US, query), "*-1\r\n");
    sentinel.set_watched_primary("main", Some(primary));
    assert_eq!(reply(&mut sentinel, NOW_US, query), "*2\r\n$8\r\n10.0.0.1\r\n$4\r\n6379\r\n");
    assert!(reply(&mut sentinel, NOW_US, "GET key").starts_with("-ERR unknown command"));
}

#[test]
fn refused_password_keeps_open_connections() {
    let mut server = Server::new(Options { password: Some("secret".to_owned()), ..Options::default() });
    let (mut open, mut out) = (Connection::new(), BytesMut::new());
    let words =
        |command: &str| command.split(' ').map(|word| Bytes::copy_from_slice(word.as_bytes())).collect::<Vec<_>>();
    server.execute(&mut open, NOW_US, &words("AUTH secret"), &mut out);
    server.set_refusal(Some(Refusal::WrongPassword));
    server.execute(&mut open, NOW_US, &words("PING"), &mut out);
    assert_eq!(&out[..], b"+OK\r\n+PONG\r\n");
    assert!(reply(&mut server, NOW_US, "AUTH secret").starts_with("-WRONGPASS "));
    server.set_refusal(Some(Refusal::NoAuth));
    out.clear();
    server.execute(&mut open, NOW_US, &words("PING"), &mut out);
    assert!(out.starts_with(b"-NOAUTH "));
}
