//! Counters of the charges that were requested of the store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::store::outcome::{DecidedBy, StoreOutcome};
use crate::telemetry::metrics::histogram::{Histogram, HistogramSnapshot};

/// Charges since the start.
#[derive(Debug, Default)]
pub(super) struct ChargeStats {
    requested: AtomicU64,
    abandoned: AtomicU64,
    latency: Histogram,
}

/// Charges in progress. If it is dropped before they finish, they are counted as abandoned.
pub(super) struct AbandonGuard<'a> {
    stats: &'a ChargeStats,
    started: Instant,
    charges: usize,
}

impl ChargeStats {
    /// Counts charges that begin now.
    pub(super) fn begin(&self, charges: usize) -> AbandonGuard<'_> {
        self.requested.fetch_add(charges as u64, Ordering::Relaxed);
        AbandonGuard { stats: self, started: Instant::now(), charges }
    }

    /// Returns the number of charges requested.
    pub(super) fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    /// Returns the number of charges whose caller gave up or timed out.
    pub(super) fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Returns the latency of charges that needed a round trip to the store.
    pub(super) fn latency(&self) -> HistogramSnapshot {
        self.latency.snapshot()
    }
}

impl AbandonGuard<'_> {
    /// Counts the outcomes of all charges: those that timed out are abandoned.
    pub(super) fn finish<E>(mut self, outcomes: &[Result<StoreOutcome, E>], is_timeout: impl Fn(&E) -> bool) {
        self.charges = outcomes.iter().filter(|outcome| outcome.as_ref().is_err_and(&is_timeout)).count();
        let is_local =
            |outcome: &Result<StoreOutcome, E>| outcome.as_ref().is_ok_and(|it| it.decided_by != DecidedBy::Store);
        if !outcomes.iter().all(is_local) {
            self.stats.latency.observe(self.started.elapsed());
        }
    }
}

impl Drop for AbandonGuard<'_> {
    fn drop(&mut self) {
        self.stats.abandoned.fetch_add(self.charges as u64, Ordering::Relaxed);
    }
}
