//! Counters that memcached loses: by eviction and by a restart.

use super::servers::keys_with;
use super::{call, client_of, counting_in, wait_until_counting};
use kit::memcached::memcached;

#[test]
fn evicted_counter_starts_at_zero() {
    let server = memcached().smallest_memory().start();
    let tollkeeper = counting_in(&server.address()).start();
    let client = client_of(&tollkeeper);
    let user = || call(&client, "user", "ann");
    assert_eq!([user(), user(), user(), user()], [(true, 2), (true, 1), (true, 0), (false, 0)].map(Ok));
    let [key] = &keys_with(&server, "ann")[..] else { panic!("the counter is there") };
    server.fill(key.len(), || server.count(key).is_none());
    assert_ne!(server.stat("evictions"), 0);
    assert_eq!([user(), user(), user(), user()], [(true, 2), (true, 1), (true, 0), (false, 0)].map(Ok));
}

#[test]
fn counters_of_a_restarted_server_start_at_zero() {
    let server = memcached().start();
    let tollkeeper = counting_in(&server.address()).start();
    let client = client_of(&tollkeeper);
    let user = || call(&client, "user", "ann");
    assert_eq!([user(), user(), user(), user()], [(true, 2), (true, 1), (true, 0), (false, 0)].map(Ok));
    server.kill();
    server.restart();
    wait_until_counting(&client);
    assert_eq!([user(), user(), user(), user()], [(true, 2), (true, 1), (true, 0), (false, 0)].map(Ok));
}
