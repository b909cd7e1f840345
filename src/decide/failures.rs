//! What the store failed, counted and said.
//!
//! Every failed charge counts, also where policy answered it and nobody noticed. Each kind is said at once and then now
//! and then, with the policy that decided and what an operator might set.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Time;
use crate::limit::StorePolicy;
use crate::store::error::ChargeError;
use crate::telemetry::log_throttle::LogThrottle;

/// Failed charges, by kind, and by the policy that decided.
#[derive(Debug)]
pub(super) struct Failures {
    kinds: [FailureCount; ChargeError::KINDS],
    policies: [AtomicU64; StorePolicy::ALL.len()],
}

#[derive(Debug)]
struct FailureCount {
    count: AtomicU64,
    said: LogThrottle,
}

impl Default for Failures {
    fn default() -> Self {
        const INTERVAL: Duration = Duration::from_secs(10);
        let kind = |_| FailureCount { count: AtomicU64::new(0), said: LogThrottle::every(INTERVAL) };
        Self { kinds: std::array::from_fn(kind), policies: Default::default() }
    }
}

impl Failures {
    /// Notes that a charge failed and what decides in its place.
    pub(super) fn record(&self, error: ChargeError, policy: StorePolicy, now: Time) {
        let kind = &self.kinds[error.index()];
        kind.count.fetch_add(1, Ordering::Relaxed);
        self.policies[policy as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = kind.said.allow(now) {
            let (policy, advice) = (policy.name(), error.advice());
            tracing::error!(suppressed, policy, "{error}; `on_store_error` decides. {advice}");
        }
    }

    /// How many of this kind there were.
    pub(super) fn count(&self, error: ChargeError) -> u64 {
        self.kinds[error.index()].count.load(Ordering::Relaxed)
    }

    /// How many were decided by this policy.
    pub(super) fn decided_by(&self, policy: StorePolicy) -> u64 {
        self.policies[policy as usize].load(Ordering::Relaxed)
    }
}
