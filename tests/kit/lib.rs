//! The test kit: starts and talks to a tollkeeper, an Envoy, a Redis, and to HTTP as it is on the wire.
//!
//! The suite, the `deploy` tests, the `serve` bench and `allocations` share it. Everything started here listens on
//! reserved loopback ports, quotes its log on failure, and ends when its value is dropped. Nothing sleeps for a fixed
//! time: [`wait_for`] polls until a condition is met, with a deadline that only a broken server reaches. Nothing is
//! skipped: a missing Envoy or Redis fails the test.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking, its kit too")]

pub mod chromium;
pub mod dns_server;
pub mod envoy;
pub mod fixtures;
pub mod grpc;
pub mod http;
pub mod http2_frames;
pub mod http_server;
pub mod json_schema;
pub mod log_capture;
pub mod memcached;
pub mod otlp_collector;
pub mod port;
pub mod redis;
pub mod redis_counters;
pub mod replica;
pub mod scrape;
pub mod seeded_random;
pub mod signal;
pub mod statsd;
pub mod streams;
pub mod tcp_proxy;
pub mod test_service;
pub mod tollkeeper;
pub mod xds_server;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Deadline of all waiting, far above what a loaded machine needs.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Polls `condition` every 10 ms until it gives a value; panics with `what` after [`PATIENCE`].
pub fn wait_for<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    wait_at_most(PATIENCE, what, condition)
}

/// Polls `condition` as [`wait_for`] does; panics with `what` after `limit`.
pub fn wait_at_most<T>(limit: Duration, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(began.elapsed() < limit, "gave up waiting for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Number of random histories that a test tries: `per_change` if `PROPTEST_CASES` is 64 or not set, as in the run of a change,
/// and in proportion with other values.
pub fn histories(per_change: u64) -> u64 {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(64_u64);
    (per_change * cases).div_ceil(64)
}

/// True if `PROPTEST_CASES` asks for more than the run of a change tries, as `.ci/nightly` does.
pub fn is_nightly() -> bool {
    histories(1) > 1
}

/// Configuration of a property whose cases are costly: [`histories`] of them.
pub fn costly_property(per_change: u64) -> proptest::test_runner::Config {
    let cases = u32::try_from(histories(per_change)).expect("PROPTEST_CASES is small");
    proptest::test_runner::Config { cases, ..Default::default() }
}

/// A path below the root of the repository.
pub fn repository(path: &str) -> PathBuf {
    let kit = Path::new(env!("CARGO_MANIFEST_DIR"));
    kit.ancestors().nth(2).expect("the kit is in tests/kit").join(path)
}

/// The text of a file; panics with its name if it cannot be read.
pub fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
