//! Counts at the edge of what memcached, this program and envoyproxy/ratelimit can read.

use tonic::Code;

use super::servers::keys_with;
use super::{call, call_with_hits, client_of, counting_in};
use kit::fixtures::in_parallel;
use kit::grpc::Client;
use kit::memcached::memcached;
use kit::wait_for;

#[test]
fn shared_count_stays_within_31_bits() {
    let server = memcached().start();
    let tollkeeper = counting_in(&server.address()).env("TOLLKEEPER_KEY_FORMAT", "ratelimit").start();
    drop(client_of(&tollkeeper));
    in_parallel(4, |thread| {
        let client = Client::connect(tollkeeper.grpc_port());
        for hits in [u64::from(u32::MAX), 1, 2_147_483_646, 7 + thread] {
            call_with_hits(&client, "user", "big", hits).expect("memcached counts");
        }
    });
    // envoyproxy/ratelimit takes a greater number as 0, and admits.
    let [key] = &keys_with(&server, "user_big")[..] else { panic!("one counter") };
    wait_for("the excess to be subtracted", || (server.count(key) == Some(2_147_483_647)).then_some(()));
    let client = Client::connect(tollkeeper.grpc_port());
    assert_eq!(call(&client, "user", "big"), Ok((false, 0)));
}

#[test]
fn values_of_other_programs_reject_or_fail_and_never_admit() {
    let server = memcached().start();
    let tollkeeper = counting_in(&server.address()).start();
    let client = client_of(&tollkeeper);
    assert_eq!(call(&client, "user", "x"), Ok((true, 2)));
    let [key] = &keys_with(&server, "user=x")[..] else { panic!("one counter") };
    for (value, expected) in [
        // The next increment wraps around.
        ("18446744073709551615", Ok((false, 0))),
        ("18446744073709551614", Ok((false, 0))),
        // As a decrement from 10 leaves it.
        ("9 ", Ok((false, 0))),
        ("1 ", Ok((true, 1))),
        ("18446744073709551616", Err(Code::Unavailable)),
        ("-1", Err(Code::Unavailable)),
        ("text", Err(Code::Unavailable)),
        ("", Err(Code::Unavailable)),
    ] {
        server.command(&format!("set {key} 0 0 {}\r\n{value}", value.len()), "STORED");
        assert_eq!(call(&client, "user", "x"), expected, "{value:?}");
    }
    // The connection and other counters are as before.
    assert_eq!(call(&client, "user", "y"), Ok((true, 2)));
}
