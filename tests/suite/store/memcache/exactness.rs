//! Exact limits over several replicas, refunds and peeks.

use tollkeeper::base::pb::RateLimitDescriptor;
use tollkeeper::base::pb::rate_limit_response::Code;

use super::servers::keys_with;
use super::{call, call_with_hits, client_of, counting_in};
use kit::PATIENCE;
use kit::fixtures::in_parallel;
use kit::grpc::{Client, rate_limit_request};
use kit::memcached::{Memcached, memcached};
use kit::tollkeeper::Tollkeeper;

/// Counts of all counters whose key contains `part`.
fn counts(server: &Memcached, part: &str) -> Vec<u64> {
    keys_with(server, part).iter().filter_map(|key| server.count(key)).collect()
}

#[test]
fn three_replicas_admit_exactly_the_limit() {
    const THREADS: u64 = 6;
    const CALLS: usize = 150;
    for format in ["tollkeeper", "ratelimit"] {
        let server = memcached().start();
        let start = |_| counting_in(&server.address()).env("TOLLKEEPER_KEY_FORMAT", format).start();
        let replicas: Vec<Tollkeeper> = (0..3).map(start).collect();
        replicas.iter().for_each(|replica| drop(client_of(replica)));
        let admitted = std::sync::atomic::AtomicUsize::new(0);
        in_parallel(THREADS, |thread| {
            let replica = &replicas[usize::try_from(thread % 3).unwrap()];
            let client = Client::connect(replica.grpc_port());
            let request = rate_limit_request("shop", &[("load", "parallel")]);
            let responses = client.call_concurrently(&request, CALLS, PATIENCE);
            let is_ok = |code: Code| code == Code::Ok;
            let ok = responses.into_iter().filter(|response| is_ok(response.as_ref().unwrap().overall_code())).count();
            admitted.fetch_add(ok, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(admitted.into_inner(), 500, "{format}");
        // Rejected hits count, too.
        assert_eq!(counts(&server, "parallel"), [900], "{format}");
    }
}

#[test]
fn peeks_charge_nothing_and_refunds_stop_at_zero() {
    let server = memcached().start();
    let tollkeeper = counting_in(&server.address()).start();
    let client = client_of(&tollkeeper);
    let refund = |hits| {
        let mut request = rate_limit_request("shop", &[("user", "ann")]);
        request.descriptors[0].hits_addend = Some(hits);
        request.descriptors[0].is_negative_hits = true;
        client.call(&request).map(|response| response.overall_code()).unwrap()
    };
    // A refund to a counter that does not exist changes nothing.
    assert_eq!(refund(2), Code::Ok);
    assert_eq!(call_with_hits(&client, "user", "ann", 0), Ok((true, 3)));
    assert_eq!(call_with_hits(&client, "user", "ann", 2), Ok((true, 1)));
    assert_eq!(call_with_hits(&client, "user", "ann", 0), Ok((true, 1)));
    assert_eq!(refund(1), Code::Ok);
    assert_eq!(call_with_hits(&client, "user", "ann", 0), Ok((true, 2)));
    // More than was charged.
    assert_eq!(refund(100), Code::Ok);
    assert_eq!(counts(&server, "ann"), [0]);
    assert_eq!([(); 4].map(|()| call(&client, "user", "ann")), [(true, 2), (true, 1), (true, 0), (false, 0)].map(Ok));
    assert_eq!(call_with_hits(&client, "user", "ann", 0).map(|(_, remaining)| remaining), Ok(0));
    assert_eq!(counts(&server, "ann"), [4]);
}

#[test]
fn charges_of_one_request_on_a_new_counter_are_made_in_their_order() {
    let server = memcached().start();
    let tollkeeper = counting_in(&server.address()).start();
    let client = client_of(&tollkeeper);
    for number in 0..20 {
        let value = format!("new{number}");
        let entry: &[(&str, &str)] = &[("user", &value)];
        // Two hits are charged, one is given back, none is asked for; then again.
        let hits = [(2, false), (1, true), (0, false), (2, false)];
        let mut request = rate_limit_request("shop", entry);
        let descriptor = request.descriptors[0].clone();
        let descriptors = hits.map(|(hits, is_negative_hits)| {
            let hits_addend = Some(hits);
            RateLimitDescriptor { hits_addend, is_negative_hits, ..descriptor.clone() }
        });
        request.descriptors = descriptors.to_vec();
        let response = client.call(&request).unwrap();
        let remaining: Vec<_> = response.statuses.iter().map(|status| status.limit_remaining).collect();
        assert_eq!((response.overall_code(), remaining), (Code::Ok, vec![1, 2, 2, 0]), "{value}");
        assert_eq!(counts(&server, &value), [3], "{value}");
    }
}

#[test]
fn hits_beyond_32_bits_are_counted_and_rejected() {
    let server = memcached().start();
    let tollkeeper = counting_in(&server.address()).start();
    let client = client_of(&tollkeeper);
    assert_eq!(call_with_hits(&client, "user", "big", 1), Ok((true, 2)));
    for hits in [u64::from(u32::MAX), u64::MAX, u64::MAX] {
        assert_eq!(call_with_hits(&client, "user", "big", hits), Ok((false, 0)), "{hits}");
        // A sum that wraps around would admit again.
        assert_eq!(call(&client, "user", "big"), Ok((false, 0)), "{hits}");
    }
}
