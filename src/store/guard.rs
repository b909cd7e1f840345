//! What keeps a failing server from costing anybody time: a deadline for each charge, a breaker for each primary.
//!
//! A breaker opens after so many failures in a row and closes with the first success. While it is open no charge is
//! sent and nobody waits; whoever owns the server probes it until a probe succeeds. It counts and nothing else: which
//! failures count, and what is answered meanwhile, is decided elsewhere.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use tokio::task::yield_now;
use tokio::time::sleep_until;

/// How many failures in a row open a breaker.
pub const MOST_FAILURES: u32 = 5;

/// Failures in a row.
#[derive(Debug, Default)]
pub struct Breaker {
    failures: AtomicU32,
}

impl Breaker {
    /// Whether nothing is to be sent.
    pub fn is_open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= MOST_FAILURES
    }

    /// Takes note of a failure; whether this one opened the breaker.
    pub fn failed(&self) -> bool {
        // It can not wrap: it stands still while it is open, but for the calls that were under way.
        let most = MOST_FAILURES;
        let counted = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |failures| (failures < most).then_some(failures + 1));
        counted == Ok(most - 1)
    }

    /// Takes note of a success; whether it closed the breaker.
    pub fn succeeded(&self) -> bool {
        // A load first: a success after a success is the common case, and writes nothing.
        self.failures.load(Ordering::Relaxed) > 0 && self.failures.swap(0, Ordering::Relaxed) >= MOST_FAILURES
    }

    /// Opens it at once; whether it was closed.
    pub fn open(&self) -> bool {
        self.failures.swap(MOST_FAILURES, Ordering::Relaxed) < MOST_FAILURES
    }
}

/// How often others are let go first before an answer is given up.
pub const YIELDS: usize = 3;

/// Waits for `work` until `until`; `None` if it has not come to its end by then.
///
/// On expiry what has been received already is read before it is given up: a process that was not let run for a while
/// finds the clock and the answer at once.
pub async fn patiently<F: Future>(work: F, until: Instant) -> Option<F::Output> {
    let mut work = pin!(work);
    tokio::select! {
        biased;
        outcome = &mut work => return Some(outcome),
        () = sleep_until(until.into()) => {}
    }
    for _ in 0..YIELDS {
        tokio::select! {
            biased;
            outcome = &mut work => return Some(outcome),
            () = yield_now() => {}
        }
    }
    None
}
