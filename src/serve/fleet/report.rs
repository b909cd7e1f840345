//! Report on the fleet: the body of `/fleet`.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::findings::{FleetFinding, find};
use super::merge_limits::MergedLimit;
use super::summary::{DecisionsByVerdict, LatencySummary, ReplicaSummary, RulesSummary, StoreSummary, SummaryValues};
use super::view::FleetView;
use crate::rules::rule::set::RuleSet;
use crate::serve::report::ReportFormat;
use crate::serve::report::top::{TopQuery, TopReport};
use crate::telemetry::hyperloglog::STANDARD_ERROR;

/// Query of `/fleet`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FleetQuery {
    /// Format of the report.
    pub format: ReportFormat,
    /// Contents of the text form.
    pub show: FleetPart,
    /// Number of minutes, including the current one: 1 to 10, default 5.
    pub minutes: Option<u64>,
    /// Maximum number of keys and of limits: 1 to 1000, default 100 limits and 10 keys.
    pub most: Option<usize>,
    /// Name of a limit, `domain.key_value.key`, or the start of one up to a dot.
    pub rule: Option<String>,
}

/// Contents of the text form.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FleetPart {
    /// Replicas, findings and rejected keys.
    #[default]
    Keys,
    /// Replicas, findings and limits.
    Rules,
}

const DEFAULT_LIMITS: usize = 100;
/// Shortest time that a rate is computed from, in microseconds: a call in the first millisecond is not 1000 a second.
const MIN_SPAN_US: u64 = 1_000_000;
const MAX_LIMITS: usize = 1000;

/// Report on the fleet.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct FleetReport {
    /// Reason why other replicas are missing; null if they are not.
    pub problem: Option<String>,
    /// Time of the report, RFC 3339 in UTC, by the clock of Redis.
    pub at: String,
    /// All replicas: this one first.
    pub replicas: Vec<ReplicaReport>,
    /// Summaries that were left out.
    pub left_out: Vec<LeftOutSummaries>,
    /// Findings.
    pub findings: Vec<FleetFinding>,
    /// Decisions of all replicas in about the last minute.
    pub recent: FleetRecent,
    /// Keys that all replicas together rejected most.
    pub top: TopReport,
    /// Number of limits that match the query, in the report or not.
    pub limits: usize,
    /// Number of times that a replica had no room for a limit in its summary.
    pub limits_left_out: usize,
    /// Relative standard error of the numbers of distinct keys.
    pub distinct_standard_error: f64,
    /// Limits, ordered by rejected and then by matched decisions.
    pub rules: Vec<FleetLimit>,
}

/// A replica.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ReplicaReport {
    /// Host name; with the start of `incarnation` if several replicas have it.
    pub name: String,
    /// Random id of the process.
    pub incarnation: String,
    /// True for the replica that made the report.
    pub this: bool,
    /// Version of tollkeeper.
    pub build: String,
    /// Seconds since the start.
    pub age_s: u64,
    /// Seconds since it published its summary.
    pub published_s_ago: u64,
    /// Time of Redis less that of the replica, in milliseconds.
    pub clock_offset_ms: i64,
    /// Loaded rules.
    pub rules: RulesSummary,
    /// Slot of eventual rules.
    pub slot: Option<u32>,
    /// State of the store.
    pub store: StoreSummary,
    /// Form of the keys that it published.
    pub values: SummaryValues,
    /// Decisions in about the last minute.
    pub recent: FleetRecent,
}

/// Decisions in about the last minute.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct FleetRecent {
    /// Calls per second.
    pub calls_per_s: f64,
    /// Decisions of limits per second.
    pub decisions_per_s: f64,
    /// Rejections by limits per second.
    pub rejected_per_s: f64,
    /// Decisions of limits by verdict.
    pub verdicts: DecisionsByVerdict,
    /// Duration of decisions; null if it has other bounds than this version of tollkeeper.
    pub latency_us: Option<Latency>,
    /// Number of replicas without a part in `latency_us`, because their histograms have other bounds.
    pub latency_left_out: usize,
}

/// Upper bounds of durations in microseconds; null without decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Latency {
    /// Median.
    pub p50: Option<u64>,
    /// 90th percentile.
    pub p90: Option<u64>,
    /// 99th percentile.
    pub p99: Option<u64>,
}

/// Summaries that were left out.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct LeftOutSummaries {
    /// Reason.
    pub reason: String,
    /// Number of summaries.
    pub summaries: usize,
}

/// Decisions of a limit over all replicas, since each of them loaded it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct FleetLimit {
    /// Name: `domain.key_value.key`.
    pub rule: String,
    /// Number of replicas that have the limit in their summaries.
    pub replicas: usize,
    /// True in shadow mode, by the rules of this replica.
    pub shadow_mode: bool,
    /// True for a candidate, by the rules of this replica.
    pub candidate: bool,
    /// Number of decisions.
    pub matched: u64,
    /// Number of decisions that rejected.
    pub rejected: u64,
    /// Hits within the limit and above NEAR_LIMIT_RATIO of it.
    pub near_limit_hits: u64,
    /// Estimated number of distinct keys; null if a replica published no sketch.
    pub distinct_keys: Option<u64>,
    /// Estimated number of distinct keys that were rejected; null if a replica published no sketch.
    pub distinct_rejected_keys: Option<u64>,
}

impl FleetReport {
    /// Computes the report; `rules` are those of this replica.
    pub fn new(view: &FleetView, rules: Option<&RuleSet>, query: &FleetQuery) -> Self {
        let top = TopQuery { minutes: query.minutes, most: query.most, rule: query.rule.clone(), ..Default::default() };
        let snapshot = |minutes| view.keys.snapshot(view.minute(), minutes, |name| top.matches(name));
        let mut limits: Vec<FleetLimit> = view
            .limits
            .by_name
            .iter()
            .filter(|(name, _)| query.matches(name))
            .map(|(name, limit)| FleetLimit::new(name, limit))
            .collect();
        limits.sort_by(|a, b| (b.rejected, b.matched, &a.rule).cmp(&(a.rejected, a.matched, &b.rule)));
        let all_limits = limits.len();
        limits.truncate(query.most.unwrap_or(DEFAULT_LIMITS).clamp(1, MAX_LIMITS));
        if let Some(rules) = rules {
            mark(&mut limits, rules);
        }
        Self {
            problem: view.problem.clone(),
            at: view.now.to_string(),
            replicas: (0..).zip(&view.replicas).map(|(index, replica)| of_replica(view, index, replica)).collect(),
            left_out: view
                .left_out
                .iter()
                .map(|(reason, count)| LeftOutSummaries { reason: reason.text().to_owned(), summaries: *count })
                .collect(),
            findings: find(&view.replicas, view.now),
            recent: recent(&view.replicas),
            top: TopReport::of_snapshots(snapshot, &top),
            limits: all_limits,
            limits_left_out: view.limits.left_out,
            distinct_standard_error: STANDARD_ERROR,
            rules: limits,
        }
    }
}

impl FleetQuery {
    fn matches(&self, name: &str) -> bool {
        let Some(rule) = &self.rule else { return true };
        name.strip_prefix(rule.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

fn of_replica(view: &FleetView, index: usize, replica: &ReplicaSummary) -> ReplicaReport {
    let since_s = |at_us: u64| view.now.as_micros().saturating_sub(at_us) / 1_000_000;
    ReplicaReport {
        name: replica.name.clone(),
        incarnation: replica.incarnation.clone(),
        this: index == 0,
        build: replica.build.clone(),
        age_s: since_s(replica.started_us),
        published_s_ago: since_s(replica.published_us),
        clock_offset_ms: replica.clock_offset_us / 1000,
        rules: replica.rules.clone(),
        slot: replica.slot,
        store: replica.store.clone(),
        values: replica.values,
        recent: recent(std::slice::from_ref(replica)),
    }
}

impl FleetLimit {
    fn new(name: &str, limit: &MergedLimit) -> Self {
        Self {
            rule: name.to_owned(),
            replicas: limit.replicas,
            shadow_mode: false,
            candidate: false,
            matched: limit.matched,
            rejected: limit.rejected,
            near_limit_hits: limit.near_limit_hits,
            distinct_keys: limit.distinct_keys(),
            distinct_rejected_keys: limit.distinct_rejected_keys(),
        }
    }
}

/// Marks the limits that are in shadow mode or candidates.
fn mark(limits: &mut [FleetLimit], rules: &RuleSet) {
    let mut by_name: HashMap<String, &mut FleetLimit> =
        limits.iter_mut().map(|limit| (limit.rule.clone(), limit)).collect();
    for compiled in rules.rules() {
        for limit in compiled.limits.iter().filter(|limit| limit.shadow || limit.candidate) {
            if let Some(found) = by_name.get_mut(limit.stats.name().key()) {
                (found.shadow_mode, found.candidate) = (limit.shadow, limit.candidate);
            }
        }
    }
}

/// Sums what the replicas decided; rates are sums of their rates.
fn recent(replicas: &[ReplicaSummary]) -> FleetRecent {
    let mut sum = FleetRecent::default();
    let mut latency: Option<LatencySummary> = None;
    for replica in replicas {
        let of_replica = &replica.recent;
        #[expect(clippy::cast_precision_loss, reason = "rates need no more digits")]
        let rate = |count: u64| count as f64 * 1e6 / of_replica.span_us.max(MIN_SPAN_US) as f64;
        sum.calls_per_s += rate(of_replica.calls);
        sum.decisions_per_s += rate(of_replica.verdicts.total());
        sum.rejected_per_s += rate(of_replica.verdicts.over_limit);
        sum.verdicts = sum.verdicts.combine(of_replica.verdicts, u64::saturating_add);
        match latency.clone().unwrap_or_default().merge(&of_replica.latency) {
            Some(merged) => latency = Some(merged),
            None => sum.latency_left_out += 1,
        }
    }
    sum.latency_us = latency.map(|latency| Latency {
        p50: latency.quantile_us(0.5),
        p90: latency.quantile_us(0.9),
        p99: latency.quantile_us(0.99),
    });
    sum
}
