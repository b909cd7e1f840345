//! What keeps a failing server from costing anybody time: a breaker for each primary.
//!
//! It opens after so many failures in a row and closes with the first success. While it is open no draw is sent and
//! nobody waits; whoever owns the server probes it until a probe succeeds. It counts and nothing else: which failures
//! count, and what is answered meanwhile, is decided elsewhere.

use std::sync::atomic::{AtomicU32, Ordering};

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
