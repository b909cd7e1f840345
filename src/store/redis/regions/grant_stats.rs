//! Counts of grants, since the start of the process.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::base::clock::to_micros;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::algorithm::region::RegionHitsBySource;
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
    used_grant: AtomicU64,
    used_reserve: AtomicU64,
    used_cut_off_allowance: AtomicU64,
    last_grant: Mutex<Option<Instant>>,
}

impl GrantCounts {
    pub(super) fn count_request(&self) {
        self.requested.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_failed_request(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_dropped_request(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_granted_hits(&self, hits: u64, at: Instant) {
        self.granted.fetch_add(hits, Ordering::Relaxed);
        *lock_ignoring_poison(&self.last_grant) = Some(at);
    }

    pub(super) fn add_wasted_hits(&self, hits: u64) {
        self.wasted.fetch_add(hits, Ordering::Relaxed);
    }

    pub(super) fn add_returned_hits(&self, hits: u64) {
        self.returned.fetch_add(hits, Ordering::Relaxed);
    }

    /// Adds hits that a call admitted.
    pub(super) fn add_used_hits(&self, admitted: RegionHitsBySource) {
        let RegionHitsBySource { grant, reserve, cut_off_allowance } = admitted;
        let counts = [
            (&self.used_grant, grant),
            (&self.used_reserve, reserve),
            (&self.used_cut_off_allowance, cut_off_allowance),
        ];
        for (count, hits) in counts.into_iter().filter(|(_, hits)| *hits > 0) {
            count.fetch_add(hits, Ordering::Relaxed);
        }
    }

    pub(super) fn totals(&self, at: Instant) -> GrantTotals {
        let last = *lock_ignoring_poison(&self.last_grant);
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        GrantTotals {
            requested: load(&self.requested),
            failed: load(&self.failed),
            dropped: load(&self.dropped),
            granted: load(&self.granted),
            wasted: load(&self.wasted),
            returned: load(&self.returned),
            used: RegionHitsBySource {
                grant: load(&self.used_grant),
                reserve: load(&self.used_reserve),
                cut_off_allowance: load(&self.used_cut_off_allowance),
            },
            last_grant_us: last.map(|last| to_micros(at.duration_since(last))),
        }
    }
}
