//! Circuit breaker of one primary: counts consecutive failures and blocks calls while open.
//!
//! A breaker opens after [`MAX_FAILURES`] failures in a row and closes with the first success. The breaker only counts:
//! callers decide which failures count, how to respond while it is open, and when to probe the server.

use std::sync::atomic::{AtomicU32, Ordering};

/// Consecutive failures that open a breaker.
const MAX_FAILURES: u32 = 5;

/// Counter of consecutive failures.
#[derive(Debug, Default)]
pub(crate) struct CircuitBreaker {
    failures: AtomicU32,
}

impl CircuitBreaker {
    /// Returns true while calls are blocked.
    pub(crate) fn is_open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= MAX_FAILURES
    }

    /// Records a failure; returns true if this failure opened the breaker.
    pub(crate) fn record_failure(&self) -> bool {
        // The count stops at the maximum, so it cannot wrap.
        let max = MAX_FAILURES;
        let counted = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |failures| (failures < max).then_some(failures + 1));
        counted == Ok(max - 1)
    }

    /// Records a success; returns true if it closed the breaker.
    pub(crate) fn record_success(&self) -> bool {
        // Load first: in the common case, success after success, nothing is written.
        self.failures.load(Ordering::Relaxed) > 0 && self.failures.swap(0, Ordering::Relaxed) >= MAX_FAILURES
    }
}
