//! What the suites start and talk to: a tollkeeper, an Envoy, a Redis, and HTTP as it is on the wire.
//!
//! Everything started here runs on loopback ports of its own, says what went wrong with its last words, and ends
//! when its value is dropped. Nothing sleeps for a fixed time: [`wait_for`] asks until a condition holds, and gives up
//! at a deadline that only a broken server reaches. Nothing is skipped: a missing Envoy or Redis fails the test.

pub(crate) mod otlp_collector;
pub(crate) mod redis_counters;
pub(crate) mod test_service;
pub(crate) mod envoy;
pub(crate) mod http2_frames;
pub(crate) mod grpc;
pub(crate) mod http;
pub(crate) mod port;
pub(crate) mod tcp_proxy;
pub(crate) mod redis;
pub(crate) mod replica;
pub(crate) mod fixtures;
pub(crate) mod scrape;
pub(crate) mod signal;
pub(crate) mod statsd;
pub(crate) mod tollkeeper;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long anything is waited for: far above what a loaded machine needs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Asks until there is an answer, every 10 ms; panics after [`PATIENCE`], naming `what` was waited for.
pub(crate) fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(began.elapsed() < PATIENCE, "gave up waiting for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A path below the root of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The text of a file; panics with its name if it can not be read.
pub(crate) fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
