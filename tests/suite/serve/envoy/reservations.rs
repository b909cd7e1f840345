//! Reservations behind a real Envoy: streams that run at once spend no more than the limit.

use std::thread;

use super::Pair;
use kit::tollkeeper;
use kit::{read, repository};

/// Streams at once.
const STREAMS: usize = 50;
/// What each of them costs.
const COST: u64 = 10;

/// A pair whose upstream answers after a second, so that all streams of a wave run at once.
fn start_slow(name: &str) -> Pair {
    let rules = read(&repository(&format!("envoy/{name}.rules.yaml")));
    Pair::start_changed(name, tollkeeper::with_rules(&rules), |bootstrap| {
        let slow = "stat_prefix: upstream
                http_filters:
                  - name: envoy.filters.http.fault
                    typed_config:
                      \"@type\": type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault
                      delay: { fixed_delay: 1s, percentage: { numerator: 100 } }";
        bootstrap.replace("stat_prefix: upstream\n                http_filters:", slow)
    })
}

/// Sends a wave of streams of one user; returns how many passed.
fn send_wave(pair: &Pair) -> u64 {
    let streams: Vec<_> = (0..STREAMS)
        .map(|_| {
            let request = pair.envoy.get("/small").header("x-user", "ann");
            thread::spawn(move || request.send().status)
        })
        .collect();
    streams.into_iter().map(|stream| u64::from(stream.join().unwrap() == 200)).sum()
}

#[test]
fn streams_at_once_spend_no_more_than_the_limit() {
    let pair = start_slow("usage-reservations");
    let mut passed = 0;
    for wave in 1..=12 {
        let admitted = send_wave(&pair);
        assert!(admitted <= 2, "two estimates of 50 fit at once, and {admitted} passed");
        passed += admitted;
        // Each request makes two calls; the settlements come after the responses.
        pair.wait_for_calls(wave * 2 * STREAMS as u64);
    }
    let spent = passed * COST;
    println!("reserve and settle: {spent} of 100 units were spent by waves of {STREAMS} streams");
    // What is left is less than an estimate. A unit is refilled every 36 s.
    assert!((60..=105).contains(&spent), "{spent} units were spent of 100");
    pair.assert_no_call_failed();
}

#[test]
fn settlement_gives_back_what_the_estimate_exceeds() {
    let pair = Pair::start("usage-reservations");
    let request = |path| pair.envoy.get(path).header("x-user", "bob").send().number("x-ratelimit-remaining");
    assert_eq!(request("/small"), 50, "the estimate is charged");
    pair.wait_for_calls(2);
    assert_eq!(request("/other"), 40, "10 were spent, and 50 are reserved");
    pair.wait_for_calls(4);
    // An answer of unknown cost settles with the estimate.
    assert_eq!(pair.envoy.get("/small").header("x-user", "bob").send().status, 429);
    pair.assert_no_call_failed();
}

/// The measured overspend of the way without reservations: printed, since how many streams peek at once is up to the
/// machine.
#[test]
fn peek_and_report_overspends_by_what_runs_at_once() {
    let pair = start_slow("usage");
    let passed = send_wave(&pair);
    println!("peek and report: {} of 100 units were spent by one wave of {STREAMS} streams", passed * COST);
    assert!(passed > 0);
}
