//! Counts of grants, since the start of the process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::clock::micros;
use crate::store::stats::GrantTotals;

/// Counts of requests and hits.
#[derive(Debug, Default)]
pub(super) struct GrantCounts {
    requested: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
    granted: AtomicU64,
    wasted: AtomicU64,
    returned: AtomicU64,
    last_grant: Mutex<Option<Instant>>,
}

impl GrantCounts {
    pub(super) fn add_requested(&self) {
        self.requested.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_granted(&self, hits: u64, at: Instant) {
        self.granted.fetch_add(hits, Ordering::Relaxed);
        *self.last_grant.lock().unwrap_or_else(PoisonError::into_inner) = Some(at);
    }

    pub(super) fn add_wasted(&self, hits: u64) {
        self.wasted.fetch_add(hits, Ordering::Relaxed);
    }

    pub(super) fn add_returned(&self, hits: u64) {
        self.returned.fetch_add(hits, Ordering::Relaxed);
    }

    pub(super) fn totals(&self, at: Instant) -> GrantTotals {
        let last = *self.last_grant.lock().unwrap_or_else(PoisonError::into_inner);
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        GrantTotals {
            requested: load(&self.requested),
            failed: load(&self.failed),
            dropped: load(&self.dropped),
            granted: load(&self.granted),
            wasted: load(&self.wasted),
            returned: load(&self.returned),
            last_grant_us: last.map(|last| micros(at.duration_since(last))),
        }
    }
}
