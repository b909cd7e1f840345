//! Report of the last second: requests, verdicts, latency, store and rules.
//!
//! Counts are differences of two totals. All of them are statistics that are kept anyway.
//!
//! Decides: what `/live` counts.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::history::read_request_totals;
use crate::base::clock::Time;
use crate::serve::metrics_collector::MetricsCollector;
use crate::telemetry::decision_history::RequestTotals;
use crate::telemetry::metrics::histogram::{BUCKET_BOUNDS_US, HistogramSnapshot, quantile_bound_us};
use crate::telemetry::metrics::limit_stats::LimitStat;

/// Numbers of decisions and failed charges since the start of the process.
#[derive(Clone, Debug, Default)]
pub struct LiveTotals {
    at: Time,
    requests: RequestTotals,
    verdicts: [u64; LimitStat::VERDICT_COUNTERS.len()],
    local_rejected: u64,
}

/// State of this replica, with the counts of an interval.
#[derive(Clone, Debug, Serialize)]
pub struct LiveReport {
    /// End of the interval, in microseconds since the Unix epoch.
    pub time_us: u64,
    /// Duration of the interval in microseconds; 0 in the first report.
    pub interval_us: u64,
    /// Number of decided requests.
    pub requests: u64,
    /// Number of rejected requests.
    pub rejected: u64,
    /// Decisions of limits, by verdict.
    pub verdicts: BTreeMap<&'static str, u64>,
    /// Part of the verdicts `local` that rejected.
    pub local_rejected: u64,
    /// Duration of decisions; `null` without any.
    pub latency_us: Option<LatencyPercentiles>,
    /// State of the store.
    pub store: LiveStoreReport,
    /// Loaded rules.
    pub rules: LoadedRulesReport,
    /// Processes that share the store; `null` if they are not counted.
    pub replicas: Option<LiveReplicasReport>,
    /// True if the process can decide requests.
    pub ready: bool,
    /// Reason why it cannot.
    pub not_ready_reason: Option<&'static str>,
    /// True while the process stops.
    pub draining: bool,
}

/// Percentiles of durations in microseconds, each the upper bound of its bucket; the last bound stands for more, too.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LatencyPercentiles {
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
}

/// State of the store in the report of the last second.
#[derive(Clone, Debug, Serialize)]
pub struct LiveStoreReport {
    /// `memory`, `redis` or `memcache`.
    pub kind: &'static str,
    /// True if charges reach the store.
    pub available: bool,
    /// Number of servers.
    pub nodes: usize,
    /// Number of servers whose circuit breaker is open.
    pub breakers_open: usize,
    /// Number of open connections.
    pub connections: usize,
    /// Charges of the interval that failed in the store.
    pub failed_charges: u64,
}

/// Loaded rules.
#[derive(Clone, Debug, Serialize)]
pub struct LoadedRulesReport {
    /// Number of the loaded set in this process; 0 before the first.
    pub version: u64,
    /// Version at the source, if it has versions.
    pub source_version: Option<Arc<str>>,
    /// Time of loading, in microseconds since the Unix epoch.
    pub loaded_at_us: Option<u64>,
    /// Number of domains.
    pub domains: usize,
    /// Number of limits.
    pub limits: usize,
    /// Number of problems of the last attempt to load rules.
    pub problems: usize,
    /// True if that attempt failed.
    pub reload_failed: bool,
}

/// Processes that share the store.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LiveReplicasReport {
    /// Number at the last count; `null`: unknown.
    pub live: Option<u32>,
    /// Slot of this process; `null`: none.
    pub slot: Option<u32>,
}

impl LiveTotals {
    /// Totals now. Reads the statistics of every limit.
    pub fn new(collector: &MetricsCollector) -> Self {
        let decider = &collector.service.decider;
        let (mut verdicts, mut local_rejected) = ([0; LimitStat::VERDICT_COUNTERS.len()], 0);
        for limit in decider.metrics.limits.all_limit_stats() {
            for (sum, (stat, _)) in verdicts.iter_mut().zip(LimitStat::VERDICT_COUNTERS) {
                *sum += limit.counter_value(stat);
            }
            local_rejected += limit.counter_value(LimitStat::LocalRejected);
        }
        Self { at: collector.service.clock.now(), requests: read_request_totals(collector), verdicts, local_rejected }
    }
}

impl LiveReport {
    /// Report of the interval between two totals.
    pub fn new(collector: &MetricsCollector, before: &LiveTotals, now: &LiveTotals) -> Self {
        let health = &collector.health;
        let (requests, earlier) = (&now.requests, &before.requests);
        let mut decisions = HistogramSnapshot::default();
        for (index, count) in decisions.counts.iter_mut().enumerate() {
            *count = requests.decisions.counts[index].saturating_sub(earlier.decisions.counts[index]);
        }
        let counts = now.verdicts.iter().zip(before.verdicts).map(|(now, before)| now.saturating_sub(before));
        let verdicts: BTreeMap<_, _> = LimitStat::VERDICT_COUNTERS.iter().map(|(_, name)| *name).zip(counts).collect();
        let sharing = collector.service.decider.store.stats().shared.and_then(|shared| shared.eventual);
        let not_ready_reason = health.not_ready_reason();
        Self {
            time_us: now.at.as_micros(),
            interval_us: now.at.since_us(before.at),
            requests: decisions.observation_count(),
            local_rejected: now.local_rejected.saturating_sub(before.local_rejected),
            rejected: requests.rejected.saturating_sub(earlier.rejected),
            latency_us: LatencyPercentiles::new(&decisions),
            store: LiveStoreReport::new(collector, requests.failed_charges().saturating_sub(earlier.failed_charges())),
            rules: LoadedRulesReport::new(collector),
            replicas: sharing.map(|sharing| LiveReplicasReport { live: sharing.live_replicas, slot: sharing.place }),
            ready: not_ready_reason.is_none(),
            not_ready_reason,
            draining: health.is_draining(),
            verdicts,
        }
    }
}

impl LatencyPercentiles {
    fn new(durations: &HistogramSnapshot) -> Option<Self> {
        let percentile = |per_mille| {
            let last = BUCKET_BOUNDS_US[BUCKET_BOUNDS_US.len() - 1];
            quantile_bound_us(&durations.counts, per_mille).unwrap_or(last)
        };
        (durations.observation_count() > 0).then(|| Self {
            p50: percentile(500),
            p90: percentile(900),
            p99: percentile(990),
            p999: percentile(999),
        })
    }
}

impl LiveStoreReport {
    fn new(collector: &MetricsCollector, failed_charges: u64) -> Self {
        let stats = collector.service.decider.store.stats();
        let (servers, pools) = stats.shared.map(|shared| (shared.servers, shared.pools)).unwrap_or_default();
        Self {
            kind: stats.store,
            available: !collector.health.is_store_lost(),
            nodes: servers.len(),
            breakers_open: servers.iter().filter(|server| server.is_breaker_open).count(),
            connections: pools.iter().map(|pool| pool.open_connection_count).sum(),
            failed_charges,
        }
    }
}

impl LoadedRulesReport {
    fn new(collector: &MetricsCollector) -> Self {
        let rules = &collector.service.rules;
        let (status, loaded) = (rules.status(), rules.current_rules_owned());
        let loaded = loaded.as_deref();
        Self {
            version: status.version,
            source_version: status.source_version,
            loaded_at_us: loaded.map(|loaded| loaded.loaded_at.as_micros()),
            domains: status.domains,
            limits: loaded.map_or(0, |loaded| loaded.rules.rules().map(|rule| rule.limits.len()).sum()),
            problems: status.last_error.as_ref().map_or(0, |error| error.lines().count()),
            reload_failed: status.last_error.is_some(),
        }
    }
}
