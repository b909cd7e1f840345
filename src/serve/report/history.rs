//! Report of the last hour by minute: of all requests, or of the limits that a query selects.
//!
//! Times are of the process's clock, in seconds since the Unix epoch. The last minute still runs. A minute that is
//! absent was not recorded: the process did not run, or its clock moved.
//!
//! Decides: what `/history` counts.

use serde::{Deserialize, Serialize};

use crate::rules::live::LoadRecord;
use crate::rules::rule::set::RuleSet;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::status::read_request_totals;
use crate::telemetry::decision_history::{MinuteCounts, RequestMinute};
use crate::telemetry::metrics::limit_stats::LimitStats;

/// Query of `/history`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HistoryQuery {
    /// Name of a limit, `domain.key_value.key`, or the start of one up to a dot; without it all requests.
    pub rule: Option<String>,
    /// True if `rule` is the whole name.
    pub exact: bool,
}

/// Counts by minute. Lists have one number for each minute, in the order of `start_s`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HistoryReport {
    /// Starts of the minutes, in seconds since the Unix epoch, the oldest first; the last minute runs.
    pub start_s: Vec<u64>,
    /// Time of the report, in seconds since the Unix epoch.
    pub now_s: u64,
    /// Requests; absent of limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<RequestSeries>,
    /// Decisions of the limits; absent of requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSeries>,
    /// Attempts to load rules, the oldest first.
    pub loads: Vec<LoadRecord>,
    /// Memory of the history of this process in bytes.
    pub memory_bytes: usize,
    /// Number of limits with a history.
    pub limits_with_history: usize,
    /// Number of limits for which there was no room.
    pub limits_left_out: usize,
}

/// Requests by minute.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RequestSeries {
    /// Decided requests.
    pub requests: Vec<u64>,
    /// Rejected requests.
    pub rejected: Vec<u64>,
    /// Charges that failed in the store.
    pub failed_charges: Vec<u64>,
    /// Upper bounds of the 99th percentile of latency in microseconds; null without requests or a bound.
    pub p99_at_most_us: Vec<Option<u64>>,
}

/// Decisions of limits by minute.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LimitSeries {
    /// Number of limits that the query selects.
    pub selected: usize,
    /// Decisions.
    pub matched: Vec<u32>,
    /// Decisions that admitted, in shadow mode too.
    pub passed: Vec<u32>,
    /// Decisions that rejected.
    pub rejected: Vec<u32>,
    /// Decisions that exceeded the limit in shadow mode.
    pub exceeded_in_shadow: Vec<u32>,
}

impl HistoryReport {
    /// Computes the report.
    pub fn new(collector: &MetricsCollector, rules: Option<&RuleSet>, query: &HistoryQuery) -> Self {
        let (service, now) = (&collector.service, collector.service.clock.now());
        let history = &service.decider.metrics.history;
        let size = history.size();
        let mut report = Self {
            now_s: now.as_micros() / 1_000_000,
            loads: service.rules.load_history(),
            memory_bytes: size.bytes,
            limits_with_history: size.limits,
            limits_left_out: size.left_out,
            ..Self::default()
        };
        match &query.rule {
            None => report.add_requests(&history.requests_by_minute(now, &read_request_totals(collector))),
            Some(rule) => {
                let limits: Vec<&LimitStats> = rules
                    .into_iter()
                    .flat_map(RuleSet::rules)
                    .flat_map(|rule| &rule.limits)
                    .map(|limit| &*limit.stats)
                    .filter(|stats| stats.name().is_selected_by(rule, query.exact))
                    .collect();
                report.add_limits(limits.len(), &history.sum_limits_by_minute(now, &limits));
            }
        }
        let first = report.start_s.first().copied().unwrap_or_default();
        report.loads.retain(|load| load.at_s >= first);
        report
    }

    fn add_requests(&mut self, minutes: &[(u64, RequestMinute)]) {
        self.start_s = minutes.iter().map(|(minute, _)| minute * 60).collect();
        self.requests = Some(RequestSeries {
            requests: minutes.iter().map(|(_, counts)| counts.requests).collect(),
            rejected: minutes.iter().map(|(_, counts)| counts.rejected).collect(),
            failed_charges: minutes.iter().map(|(_, counts)| counts.failed_charges()).collect(),
            p99_at_most_us: minutes.iter().map(|(_, counts)| counts.p99_at_most_us).collect(),
        });
    }

    fn add_limits(&mut self, selected: usize, minutes: &[(u64, MinuteCounts)]) {
        self.start_s = minutes.iter().map(|(minute, _)| minute * 60).collect();
        self.limits = Some(LimitSeries {
            selected,
            matched: minutes.iter().map(|(_, counts)| counts.matched).collect(),
            passed: minutes.iter().map(|(_, counts)| counts.passed).collect(),
            rejected: minutes.iter().map(|(_, counts)| counts.rejected).collect(),
            exceeded_in_shadow: minutes.iter().map(|(_, counts)| counts.exceeded_in_shadow).collect(),
        });
    }
}
