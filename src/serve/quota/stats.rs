//! Counts of the quota service, for metrics and pages.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the start.
#[derive(Debug, Default)]
pub struct QuotaStats {
    /// Messages with reports.
    pub reports: Count,
    /// Assignments that were sent, renewals included.
    pub assignments: Count,
    /// Hits that were assigned: lent ones.
    pub assigned_hits: Count,
    /// Requests that proxies let pass.
    pub allowed_hits: Count,
    /// Requests that proxies denied.
    pub denied_hits: Count,
    /// Requests that proxies let pass without a rule.
    pub unmatched_hits: Count,
    /// Requests beyond what a proxy was assigned.
    pub debt_hits: Count,
    /// Buckets that proxies were told to forget.
    pub abandoned: Count,
    /// Reports of buckets whose ids cannot be answered.
    pub unassignable: Count,
    /// Reports of buckets whose rule has a limit that cannot be divided.
    pub refused: Count,
    /// Streams that were ended because the proxy did not read.
    pub unread_streams: Count,
}

/// A count that only grows.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds to the count.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// The count.
    pub fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
