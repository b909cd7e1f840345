//! Charges that the store failed to decide: counted and logged.
//!
//! Every failed charge counts, also where its policy answered without an error. The first failure of each kind is
//! logged at once; after that, one line per kind every 10 s, with the policy that decided and advice for the operator.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::base::clock::Time;
use crate::limit::StorePolicy;
use crate::store::error::ChargeError;
use crate::telemetry::log_throttle::LogThrottle;

/// Failed charges, by kind of failure and by the policy that decided.
#[derive(Debug)]
pub(super) struct Failures {
    kinds: [FailureCount; ChargeError::KINDS],
    policies: [AtomicU64; StorePolicy::ALL.len()],
}

#[derive(Debug)]
struct FailureCount {
    count: AtomicU64,
    throttle: LogThrottle,
}

impl Default for Failures {
    fn default() -> Self {
        const LOG_INTERVAL: Duration = Duration::from_secs(10);
        let kind = |_| FailureCount { count: AtomicU64::new(0), throttle: LogThrottle::every(LOG_INTERVAL) };
        Self { kinds: std::array::from_fn(kind), policies: Default::default() }
    }
}

impl Failures {
    /// Records a failed charge and the policy that decides it.
    pub(super) fn record(&self, error: ChargeError, policy: StorePolicy, now: Time) {
        let kind = &self.kinds[error.index()];
        kind.count.fetch_add(1, Ordering::Relaxed);
        self.policies[policy as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = kind.throttle.allow(now) {
            let (policy, advice) = (policy.name(), error.advice());
            tracing::error!(suppressed, policy, "store failed: {error}; `on_store_error` decides ({advice})");
        }
    }

    /// Number of failures of this kind.
    pub(super) fn count(&self, error: ChargeError) -> u64 {
        self.kinds[error.index()].count.load(Ordering::Relaxed)
    }

    /// Number of failed charges that this policy decided.
    pub(super) fn decided_by(&self, policy: StorePolicy) -> u64 {
        self.policies[policy as usize].load(Ordering::Relaxed)
    }
}
