//! Servers of a DNS SRV record.

use tonic::Code;

use super::servers::{USERS, crc32, keys, names};
use super::{RULES, call, client_of};
use kit::dns_server::{DnsServer, SrvTarget, in_own_network};
use kit::grpc::Client;
use kit::memcached::memcached;
use kit::tollkeeper::{Setup, with_rules};
use kit::wait_for;

/// A process that reads the record every second.
fn counting_by_record() -> Setup {
    with_rules(RULES)
        .env("BACKEND_TYPE", "memcache")
        .env("MEMCACHE_SRV", "_memcache._tcp.store.test")
        .env("MEMCACHE_SRV_REFRESH", "1s")
        .env("TOLLKEEPER_KEY_FORMAT", "ratelimit")
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
        .env("TOLLKEEPER_ON_STORE_ERROR", "error")
}

#[test]
fn servers_of_the_record_are_sorted_and_followed() {
    if in_own_network("store::memcache::srv::servers_of_the_record_are_sorted_and_followed") {
        return;
    }
    let (a, b) = (memcached().start(), memcached().start());
    let (target_a, target_b) =
        (SrvTarget { host: "a.store.test", port: a.port() }, SrvTarget { host: "b.store.test", port: b.port() });
    let dns = DnsServer::start(&[target_b.clone(), target_a]);
    let tollkeeper = counting_by_record().start();
    let client = client_of(&tollkeeper);
    for name in names() {
        assert_eq!(call(&client, "user", &name), Ok((true, 2)));
    }
    let (of_a, of_b) = (keys(&a), keys(&b));
    assert_eq!(of_a.len() + of_b.len(), USERS);
    // `a` is the first by name, though it is the last in the record.
    assert!(of_a.iter().all(|key| crc32(key.as_bytes()).is_multiple_of(2)), "{of_a:?}");
    assert!(of_b.iter().all(|key| crc32(key.as_bytes()) % 2 == 1), "{of_b:?}");

    dns.set(&[target_b]);
    a.kill();
    wait_for("the remaining server to hold all counters", || {
        names().all(|name| call(&client, "user", &name).is_ok()).then_some(())
    });
    assert_eq!(keys(&b).len(), USERS);
    // A record that is gone leaves the servers as they are.
    dns.set(&[]);
    wait_for("a line about the record", || tollkeeper.stderr().contains("MEMCACHE_SRV").then_some(()));
    assert!(names().all(|name| call(&client, "user", &name).is_ok()));
}

#[test]
fn record_that_appears_after_the_start_is_used() {
    if in_own_network("store::memcache::srv::record_that_appears_after_the_start_is_used") {
        return;
    }
    let server = memcached().start();
    let dns = DnsServer::start(&[]);
    let tollkeeper = counting_by_record().start();
    let client = Client::connect(tollkeeper.grpc_port());
    assert_eq!(call(&client, "user", "ann"), Err(Code::Unavailable));
    wait_for("a line about the record", || tollkeeper.stderr().contains("MEMCACHE_SRV").then_some(()));
    dns.set(&[SrvTarget { host: "a.store.test", port: server.port() }]);
    wait_for("the server", || call(&client, "load", "x").ok());
    assert_eq!(call(&client, "user", "ann"), Ok((true, 2)));
}
