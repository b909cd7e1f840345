//! Counters that memcached loses: by eviction and by a restart.

use super::{call, client_of, counting_in, wait_until_counting};
use crate::kit::memcached::memcached;

#[test]
fn evicted_counter_counts_anew() {
    let server = memcached().smallest_memory().start();
    let tollkeeper = counting_in(&server.address()).start();
    let client = client_of(&tollkeeper);
    let user = || call(&client, "user", "ann");
    assert_eq!([user(), user(), user(), user()], [(true, 2), (true, 1), (true, 0), (false, 0)].map(Ok));
    let keys = server.keys().into_keys().map(|key| String::from_utf8(key).expect("keys are ASCII"));
    let key = keys.into_iter().find(|key| key.contains("ann")).expect("the counter is there");
    server.fill(key.len(), || server.count(&key).is_none());
    assert_ne!(server.stat("evictions"), 0);
    assert_eq!([user(), user(), user(), user()], [(true, 2), (true, 1), (true, 0), (false, 0)].map(Ok));
}

#[test]
fn restarted_server_counts_anew() {
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
