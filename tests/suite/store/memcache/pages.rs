//! Health, pages and metrics of a process that counts in memcache.

use super::{call, client_of, counting_in};
use kit::http;
use kit::memcached::memcached;
use kit::port::Port;
use kit::wait_for;

#[test]
fn process_is_healthy_while_it_counts_and_ready_again_after_an_outage() {
    let server = memcached().start();
    let tollkeeper = counting_in(&server.address()).env("TOLLKEEPER_STORE_TIMEOUT", "100ms").start();
    let client = client_of(&tollkeeper);
    let status = |path: &str| http::get(tollkeeper.http_port(), path).send().status;
    let statuses = || ["/healthcheck", "/readyz", "/livez"].map(status);
    // envoyproxy/ratelimit answers 500 for ever. Readiness follows the first connection, which is made after the start.
    wait_for("readiness", || (statuses() == [200, 200, 200]).then_some(()));
    assert!(client.is_serving("ratelimit").unwrap());
    server.kill();
    wait_for("readiness to end, because the rules say error", || (status("/readyz") == 503).then_some(()));
    assert_eq!([status("/healthcheck"), status("/livez")], [200, 200]);
    server.restart();
    wait_for("readiness", || (statuses() == [200, 200, 200]).then_some(()));
}

#[test]
fn pages_show_the_store_and_its_counters() {
    let server = memcached().start();
    let prometheus = Port::reserve();
    let tollkeeper = counting_in(&server.address())
        .env("USE_PROMETHEUS", "true")
        .env("PROMETHEUS_ADDR", format!("127.0.0.1:{}", prometheus.number()))
        .start();
    let client = client_of(&tollkeeper);
    assert_eq!(call(&client, "user", "ann"), Ok((true, 2)));
    assert_eq!(call(&client, "user", "ann"), Ok((true, 1)));

    let store = tollkeeper.store_stats();
    assert_eq!(store["store"], "memcache", "{store}");
    assert!(store["calls"].as_u64().is_some_and(|calls| calls >= 42), "{store}");

    let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    let explained = tollkeeper.explain(body);
    let limit = &explained["descriptors"][0]["limits"][0];
    assert_eq!(limit["counter"]["remaining"], 1, "{explained}");
    // The explanation charged nothing.
    assert_eq!(call(&client, "user", "ann"), Ok((true, 0)));

    let metrics = http::get(prometheus.number(), "/metrics").send().text();
    for line in [
        "ratelimit_memcache_add{code=\"success\"} ",
        "ratelimit_memcache_increment{code=\"success\"} ",
        "ratelimit_memcache_increment{code=\"miss\"} ",
        "tollkeeper_store_calls_total ",
        &format!("tollkeeper_breaker_open{{node=\"{}\"}} 0", server.address()),
    ] {
        assert!(metrics.lines().any(|found| found.starts_with(line)), "{line}\n{metrics}");
    }
    assert!(tollkeeper.stderr().contains("counters=\"memcache "), "{}", tollkeeper.stderr());
}
