//! State of this process and what it decides: once, for its pages, `/live`, and the summary that other replicas read.
//!
//! Decides: what counts as a request, a rejection and a failed charge of a time.

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::metrics_collector::MetricsCollector;
use crate::base::clock::to_micros;
use crate::base::text::truncate_to_bytes;
use crate::limit::StoreFailurePolicy;
use crate::telemetry::decision_history::RequestTotals;
use crate::telemetry::metrics::histogram::{BUCKET_BOUNDS_US, quantile_bound_us};
use crate::telemetry::metrics::limit_stats::LimitStat;

/// Version of the bounds of latency histograms; changes together with [`BUCKET_BOUNDS_US`].
pub const LATENCY_BOUNDS_VERSION: u32 = 1;
/// Shortest time that a rate is computed from, in microseconds: a call in the first millisecond is not 1000 a second.
const MIN_RATE_SPAN_US: u64 = 1_000_000;
/// Maximum length of the version of the rules in bytes; readers show no longer text.
const MAX_RULES_VERSION_BYTES: usize = 256;

/// Loaded rules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RulesStatus {
    /// Number of the loaded set in this process; 0 before the first.
    pub load_number: u64,
    /// Version at the source, if it has versions.
    pub version: Option<String>,
    /// Hash of the rule texts; empty without rules.
    pub hash: String,
    /// Time of loading, in microseconds since the Unix epoch.
    pub loaded_at_us: Option<u64>,
    /// Number of domains.
    pub domains: usize,
    /// Number of rules.
    pub rules: usize,
    /// Number of limits.
    pub limits: usize,
    /// True if the last attempt to load rules failed.
    pub load_failed: bool,
}

/// State of the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreStatus {
    /// `memory`, `redis` or `memcache`.
    pub kind: String,
    /// True if charges reach the store.
    pub available: bool,
    /// Number of servers.
    pub servers: usize,
    /// Number of servers whose circuit breaker is open.
    pub breakers_open: usize,
    /// Number of open connections.
    pub connections: usize,
}

/// Numbers and latency of the decisions of a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentDecisionCounts {
    /// Duration in microseconds.
    pub span_us: u64,
    /// Number of calls.
    pub calls: u64,
    /// Number of requests that were rejected.
    pub rejected: u64,
    /// Number of descriptors that matched no rule.
    pub unmatched: u64,
    /// Number of charges that failed in the store.
    pub failed_charges: u64,
    /// Decisions of limits by verdict.
    pub verdicts: DecisionsByVerdict,
    /// Duration of decisions.
    pub latency: LatencyHistogram,
}

/// Decisions of limits by verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionsByVerdict {
    /// Admitted.
    pub ok: u64,
    /// Rejected.
    pub over_limit: u64,
    /// Exceeded in shadow mode.
    pub shadow: u64,
    /// Decided by the failure policy `local`.
    pub local: u64,
    /// Part of `local` that was rejected.
    pub local_rejected: u64,
    /// Decided by the failure policy `allow`.
    pub allow: u64,
    /// Decided by the failure policy `deny`.
    pub deny: u64,
    /// Decided by the failure policy `error`.
    pub error: u64,
}

/// Histogram of durations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyHistogram {
    /// Version of the bounds.
    pub bounds: u32,
    /// Number of durations in each bucket; the last one is above all bounds.
    pub counts: Vec<u64>,
}

/// Rates, verdicts and latency of the decisions of a time.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct RecentDecisionRates {
    /// Requests per second, over gRPC and `/json`.
    pub calls_per_s: f64,
    /// Decisions of limits per second.
    pub decisions_per_s: f64,
    /// Rejected requests per second.
    pub rejected_per_s: f64,
    /// Charges per second that failed in the store.
    #[serde(default)]
    pub failed_charges_per_s: f64,
    /// Decisions of limits by verdict.
    pub verdicts: DecisionsByVerdict,
    /// Duration of decisions; null if it has other bounds than this version of tollkeeper.
    pub latency_us: Option<LatencyPercentiles>,
    /// Number of replicas without a part in `latency_us`, because their histograms have other bounds.
    pub latency_left_out: usize,
}

/// Upper bounds of durations in microseconds; null without decisions, or above all bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct LatencyPercentiles {
    /// Median.
    pub p50: Option<u64>,
    /// 90th percentile.
    pub p90: Option<u64>,
    /// 99th percentile.
    pub p99: Option<u64>,
    /// 99.9th percentile.
    #[serde(default)]
    pub p999: Option<u64>,
}

/// Numbers of decisions since the start of the process, at one time.
#[derive(Clone, Debug)]
pub struct DecisionTotals {
    /// Time by a clock that never jumps.
    at: Instant,
    requests: RequestTotals,
    /// Descriptors that matched no rule.
    unmatched: u64,
    verdicts: DecisionsByVerdict,
}

/// Reads the totals of all requests.
pub fn read_request_totals(collector: &MetricsCollector) -> RequestTotals {
    let decider = &collector.service.decider;
    let decisions = decider.metrics.decisions.snapshot();
    RequestTotals {
        // Charges of the memory store are not counted, and do not fail by a server.
        charges: decider.store.stats().shared.map_or(decisions.observation_count(), |shared| shared.charges),
        failed_by_policy: StoreFailurePolicy::ALL.map(|policy| decider.policy_decided_charge_count(policy)),
        decisions,
        rejected: decider.metrics.rejected_request_count(),
    }
}

impl RulesStatus {
    /// Rules that are loaded now.
    pub fn new(collector: &MetricsCollector) -> Self {
        let rules = &collector.service.rules;
        let (status, loaded) = (rules.status(), rules.current_rules_owned());
        let loaded = loaded.as_deref();
        Self {
            load_number: status.version,
            version: status
                .source_version
                .map(|version| truncate_to_bytes(&version, MAX_RULES_VERSION_BYTES).to_owned()),
            hash: loaded.map(|loaded| loaded.rules.contents_hash.to_string()).unwrap_or_default(),
            loaded_at_us: loaded.map(|loaded| loaded.loaded_at.as_micros()),
            domains: status.domains,
            rules: status.rules,
            limits: loaded.map_or(0, |loaded| loaded.rules.rules().map(|rule| rule.limits.len()).sum()),
            load_failed: status.last_error.is_some(),
        }
    }
}

impl StoreStatus {
    /// State of the store now.
    pub fn new(collector: &MetricsCollector) -> Self {
        let stats = collector.service.decider.store.stats();
        let (servers, pools) = stats.shared.map(|shared| (shared.servers, shared.pools)).unwrap_or_default();
        Self {
            kind: stats.store.to_owned(),
            available: !collector.health.is_store_lost(),
            servers: servers.len(),
            breakers_open: servers.iter().filter(|server| server.is_breaker_open).count(),
            connections: pools.iter().map(|pool| pool.open_connection_count).sum(),
        }
    }
}

impl DecisionTotals {
    /// Totals of a process that has decided nothing.
    pub fn zero_at(at: Instant) -> Self {
        Self { at, requests: RequestTotals::default(), unmatched: 0, verdicts: DecisionsByVerdict::default() }
    }

    /// Totals now. Reads the statistics of every limit.
    pub fn new(collector: &MetricsCollector) -> Self {
        let limits = &collector.service.decider.metrics.limits;
        let of_unknown_domains: u64 = limits.unknown_domain_counts().iter().map(|(_, count)| count).sum();
        let all = limits.all_limit_stats();
        let of_domains: u64 = all.iter().map(|limit| limit.counter_value(LimitStat::Unmatched)).sum();
        let verdicts = all.iter().fold(DecisionsByVerdict::default(), |sum, limit| {
            let of_limit = DecisionsByVerdict {
                ok: limit.counter_value(LimitStat::Ok),
                over_limit: limit.counter_value(LimitStat::Over),
                shadow: limit.counter_value(LimitStat::Shadow),
                local: limit.counter_value(LimitStat::Local),
                local_rejected: limit.counter_value(LimitStat::LocalRejected),
                allow: limit.counter_value(LimitStat::Allow),
                deny: limit.counter_value(LimitStat::Deny),
                error: limit.counter_value(LimitStat::Error),
            };
            sum.combine_counts(of_limit, u64::saturating_add)
        });
        let unmatched = of_domains.saturating_add(of_unknown_domains);
        Self { at: Instant::now(), requests: read_request_totals(collector), unmatched, verdicts }
    }

    /// What was decided since earlier totals.
    pub fn since(&self, earlier: &Self) -> RecentDecisionCounts {
        let (requests, before) = (&self.requests, &earlier.requests);
        let counts = requests.decisions.counts.iter().zip(before.decisions.counts);
        let counts: Vec<u64> = counts.map(|(count, before)| count.saturating_sub(before)).collect();
        RecentDecisionCounts {
            span_us: to_micros(self.at.saturating_duration_since(earlier.at)),
            calls: counts.iter().sum(),
            rejected: requests.rejected.saturating_sub(before.rejected),
            unmatched: self.unmatched.saturating_sub(earlier.unmatched),
            failed_charges: requests.failed_charges().saturating_sub(before.failed_charges()),
            verdicts: self.verdicts.combine_counts(earlier.verdicts, u64::saturating_sub),
            latency: LatencyHistogram { bounds: LATENCY_BOUNDS_VERSION, counts },
        }
    }
}

impl DecisionsByVerdict {
    /// Number of decisions.
    pub const fn total(&self) -> u64 {
        let Self { ok, over_limit, shadow, .. } = self;
        ok.saturating_add(*over_limit).saturating_add(*shadow).saturating_add(self.decided_by_policy())
    }

    /// Number of decisions by failure policies.
    pub const fn decided_by_policy(&self) -> u64 {
        let Self { local, allow, deny, error, .. } = self;
        local.saturating_add(*allow).saturating_add(*deny).saturating_add(*error)
    }

    /// Combines the counts of both, one by one.
    #[must_use]
    pub fn combine_counts(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            ok: with(self.ok, other.ok),
            over_limit: with(self.over_limit, other.over_limit),
            shadow: with(self.shadow, other.shadow),
            local: with(self.local, other.local),
            local_rejected: with(self.local_rejected, other.local_rejected),
            allow: with(self.allow, other.allow),
            deny: with(self.deny, other.deny),
            error: with(self.error, other.error),
        }
    }
}

impl LatencyHistogram {
    /// True if the buckets are those of this version.
    pub const fn has_known_bounds(&self) -> bool {
        self.bounds == LATENCY_BOUNDS_VERSION && self.counts.len() == BUCKET_BOUNDS_US.len() + 1
    }

    /// Adds the durations of another histogram; `None` if its bounds are not known.
    pub fn merge(mut self, other: &Self) -> Option<Self> {
        if !other.has_known_bounds() {
            return None;
        }
        self.bounds = other.bounds;
        self.counts.resize(other.counts.len(), 0);
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
        Some(self)
    }
}

impl RecentDecisionRates {
    /// Sums what replicas decided; rates are sums of their rates.
    pub fn sum<'r>(replicas: impl Iterator<Item = &'r RecentDecisionCounts>) -> Self {
        let mut sum = Self::default();
        let mut latency: Option<LatencyHistogram> = None;
        for one in replicas {
            #[expect(clippy::cast_precision_loss, reason = "rates need no more digits")]
            let rate = |count: u64| count as f64 * 1e6 / one.span_us.max(MIN_RATE_SPAN_US) as f64;
            sum.calls_per_s += rate(one.calls);
            sum.decisions_per_s += rate(one.verdicts.total());
            sum.rejected_per_s += rate(one.rejected);
            sum.failed_charges_per_s += rate(one.failed_charges);
            sum.verdicts = sum.verdicts.combine_counts(one.verdicts, u64::saturating_add);
            match latency.clone().unwrap_or_default().merge(&one.latency) {
                Some(merged) => latency = Some(merged),
                None => sum.latency_left_out += 1,
            }
        }
        sum.latency_us = latency.map(|latency| LatencyPercentiles {
            p50: quantile_bound_us(&latency.counts, 500),
            p90: quantile_bound_us(&latency.counts, 900),
            p99: quantile_bound_us(&latency.counts, 990),
            p999: quantile_bound_us(&latency.counts, 999),
        });
        sum
    }

    /// Formats the cells of the rates and of the duration.
    pub fn format_rate_cells(&self) -> [String; 3] {
        let p99 = self.latency_us.and_then(|latency| latency.p99);
        let rate = |per_s: f64| format!("{per_s:.1}");
        [rate(self.calls_per_s), rate(self.rejected_per_s), p99.map_or_else(|| "-".to_owned(), format_duration)]
    }
}

/// Formats microseconds with the unit that gives the fewest digits.
fn format_duration(us: u64) -> String {
    match us {
        0..1000 => format!("{us}us"),
        1000..1_000_000 => format!("{}.{}ms", us / 1000, us % 1000 / 100).replace(".0ms", "ms"),
        _ => format!("{}.{}s", us / 1_000_000, us % 1_000_000 / 100_000).replace(".0s", "s"),
    }
}
