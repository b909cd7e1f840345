//! What the store failed, counted and said.
//!
//! Every failed draw counts, also where policy answered it and nobody noticed. Each kind is said at once and then now
//! and then, with the policy that decided and what an operator might set.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Time;
use crate::limit::StorePolicy;
use crate::store::DrawError;
use crate::telemetry::occasionally::Occasionally;

/// Failed draws, by kind.
#[derive(Debug)]
pub(super) struct Failures([Kind; DrawError::KINDS]);

#[derive(Debug)]
struct Kind {
    count: AtomicU64,
    said: Occasionally,
}

impl Default for Failures {
    fn default() -> Self {
        const INTERVAL: Duration = Duration::from_secs(10);
        Self(std::array::from_fn(|_| Kind { count: AtomicU64::new(0), said: Occasionally::every(INTERVAL) }))
    }
}

impl Failures {
    /// Notes that a draw failed and what decides in its place.
    pub(super) fn note(&self, error: DrawError, policy: StorePolicy, now: Time) {
        let kind = &self.0[error.place()];
        kind.count.fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = kind.said.due(now) {
            let (policy, advice) = (policy.name(), error.advice());
            tracing::error!(suppressed, policy, "{error}; `on_store_error` decides. {advice}");
        }
    }

    /// How many of this kind there were.
    pub(super) fn count(&self, error: DrawError) -> u64 {
        self.0[error.place()].count.load(Ordering::Relaxed)
    }
}
