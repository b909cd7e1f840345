//! Several servers: the choice of the server of a counter, and one that is away.

use tonic::Code;

use super::{call, client_of, counting_in, wait_until_counting};
use kit::memcached::{Memcached, memcached};
use kit::wait_for;

/// Number of counters of a test, enough for each server to hold some.
pub(super) const USERS: usize = 60;

fn three_servers() -> [Memcached; 3] {
    [(); 3].map(|()| memcached().start())
}

fn list(servers: &[&Memcached]) -> String {
    servers.iter().map(|server| server.address()).collect::<Vec<_>>().join(",")
}

pub(super) fn names() -> impl Iterator<Item = String> {
    (0..USERS).map(|number| format!("user{number}"))
}

/// Keys of the counters of users.
pub(super) fn keys(server: &Memcached) -> Vec<String> {
    keys_with(server, "user")
}

/// Keys of a server that contain `part`.
pub(super) fn keys_with(server: &Memcached, part: &str) -> Vec<String> {
    let keys = server.keys().into_keys().map(|key| String::from_utf8(key).expect("keys are ASCII"));
    keys.filter(|key| key.contains(part)).collect()
}

/// CRC-32 of IEEE 802.3, bit by bit.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[test]
fn server_is_that_of_envoyproxy_ratelimit() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    let [a, b, c] = three_servers();
    // A server that is in the list twice holds twice the keys.
    for order in [&[&a, &b, &c][..], &[&c, &a, &b], &[&b, &a, &b, &c]] {
        for server in [&a, &b, &c] {
            server.command("flush_all", "OK");
        }
        let tollkeeper = counting_in(&list(order)).env("TOLLKEEPER_KEY_FORMAT", "ratelimit").start();
        let client = client_of(&tollkeeper);
        for name in names() {
            assert_eq!(call(&client, "user", &name), Ok((true, 2)));
        }
        let mut seen = 0;
        for server in [&a, &b, &c] {
            for key in keys(server) {
                let index = crc32(key.as_bytes()) as usize % order.len();
                assert_eq!(order[index].port(), server.port(), "{key}");
                seen += 1;
            }
        }
        assert_eq!(seen, USERS);
    }
}

#[test]
fn counters_of_other_servers_go_on_while_one_is_away() {
    let [a, b, c] = three_servers();
    let tollkeeper = counting_in(&list(&[&a, &b, &c])).start();
    let client = client_of(&tollkeeper);
    for name in names() {
        assert_eq!(call(&client, "user", &name), Ok((true, 2)));
    }
    let of_b = keys(&b);
    let is_of_b = |name: &str| of_b.iter().any(|key| key.contains(&format!("={name}")) && is_exactly(key, name));
    assert!((1..USERS).contains(&names().filter(|name| is_of_b(name)).count()), "{of_b:?}");
    b.kill();
    for name in names() {
        let expected = if is_of_b(&name) { Err(Code::Unavailable) } else { Ok((true, 1)) };
        assert_eq!(call(&client, "user", &name), expected, "{name}");
    }
    b.restart();
    wait_until_counting(&client);
    for name in names() {
        let expected = if is_of_b(&name) { (true, 2) } else { (true, 0) };
        assert_eq!(call(&client, "user", &name), Ok(expected), "{name}");
    }
}

/// Returns `true` if the digits of the user's name end there.
fn is_exactly(key: &str, name: &str) -> bool {
    let rest = key.split_once(name).map_or("", |(_, rest)| rest);
    !rest.starts_with(|next: char| next.is_ascii_digit())
}

#[test]
fn process_that_starts_before_its_servers_uses_them_when_they_appear() {
    let server = memcached().start();
    server.kill();
    let tollkeeper = counting_in(&server.address()).start();
    let client = kit::grpc::Client::connect(tollkeeper.grpc_port());
    assert_eq!(call(&client, "user", "ann"), Err(Code::Unavailable));
    server.restart();
    wait_for("a charge", || (call(&client, "load", "x").is_ok()).then_some(()));
    assert_eq!(call(&client, "user", "ann"), Ok((true, 2)));
}
