//! State of this process in the last second.
//!
//! Decides: what `/live` shows.

use serde::Serialize;

use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::status::{DecisionTotals, RecentDecisionRates, RulesStatus, StoreStatus};

/// State of this replica, with the decisions of an interval.
#[derive(Clone, Debug, Serialize)]
pub struct LiveReport {
    /// End of the interval, in microseconds since the Unix epoch.
    pub time_us: u64,
    /// Duration of the interval in microseconds; 0 in the first report.
    pub interval_us: u64,
    /// Decisions of the interval.
    pub recent: RecentDecisionRates,
    /// State of the store.
    pub store: StoreStatus,
    /// Loaded rules.
    pub rules: RulesStatus,
    /// Processes that share the store; `null` if they are not counted.
    pub replicas: Option<LiveReplicasReport>,
    /// True if the process can decide requests.
    pub ready: bool,
    /// Reason why it cannot.
    pub not_ready_reason: Option<&'static str>,
    /// True while the process stops.
    pub draining: bool,
}

/// Processes that share the store.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LiveReplicasReport {
    /// Number at the last count; `null`: unknown.
    pub live: Option<u32>,
    /// Slot of this process; `null`: none.
    pub slot: Option<u32>,
}

impl LiveReport {
    /// Report of the interval between two totals.
    pub fn new(collector: &MetricsCollector, before: &DecisionTotals, now: &DecisionTotals) -> Self {
        let health = &collector.health;
        let recent = now.since(before);
        let sharing = collector.service.decider.store.stats().shared.and_then(|shared| shared.eventual);
        let not_ready_reason = health.not_ready_reason();
        Self {
            time_us: collector.service.clock.now().as_micros(),
            interval_us: recent.span_us,
            recent: RecentDecisionRates::sum(std::iter::once(&recent)),
            store: StoreStatus::new(collector),
            rules: RulesStatus::new(collector),
            replicas: sharing.map(|sharing| LiveReplicasReport { live: sharing.live_replicas, slot: sharing.place }),
            ready: not_ready_reason.is_none(),
            not_ready_reason,
            draining: health.is_draining(),
        }
    }
}
