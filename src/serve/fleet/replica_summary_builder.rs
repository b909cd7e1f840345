//! Summary of this replica, from the statistics that it keeps anyway.
//!
//! Counts are differences over the last minute or so, so a restart makes none negative.
//!
//! Decides: what a replica publishes about itself.
//! Decides: over which time requests count, also after a restart (`summarize_recent_decisions`).

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use serde::Serialize;
use tokio::time::Instant;

use super::alarms::find_own_alarms;
use super::finding::{Finding, FirstSeen};
use super::merge_keys::MAX_BUSY_KEYS;
use super::summary::*;
use super::view::{FleetView, FleetViewBuilder};
use crate::base::clock::{Time, to_micros};
use crate::base::sharded::lock_ignoring_poison;
use crate::serve::grpc::service::RateLimitService;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::status::{DecisionTotals, RecentDecisionCounts, RulesStatus, StoreStatus};
use crate::telemetry::metrics::limit_stats::LimitName;
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::top_keys::{KEPT_MINUTES, KeyCount, KeyCountsInMinute, UnenforcedMode};

/// Number of earlier totals that are kept: the recent decisions span this many intervals.
const MAX_KEPT_DECISION_TOTALS: usize = 12;
/// Room for rejected keys, with the names of their limits, in bytes.
const MAX_KEYS_BYTES: usize = 30 << 10;
/// Room for the busiest keys, and names of limits that only these have, in bytes.
const MAX_BUSY_KEYS_BYTES: usize = 4 << 10;

/// Facts about this process that do not change.
#[derive(Clone, Debug)]
pub(super) struct ReplicaFacts {
    /// Random id of the process.
    pub(super) incarnation: String,
    /// Host name.
    pub(super) name: String,
    /// Start of the process.
    pub(super) started: Instant,
    /// Form of published keys.
    pub(super) values: PublishedKeyForm,
}

/// Collects summaries of this replica.
#[derive(Debug)]
pub(super) struct ReplicaSummaryBuilder {
    collector: MetricsCollector,
    facts: ReplicaFacts,
    totals: VecDeque<DecisionTotals>,
    findings_seen: FirstSeen,
}

impl ReplicaSummaryBuilder {
    /// Builder of the summaries of the process whose statistics `collector` reads.
    pub(super) fn new(collector: MetricsCollector, facts: ReplicaFacts) -> Self {
        Self { collector, facts, totals: VecDeque::new(), findings_seen: FirstSeen::default() }
    }

    /// The service.
    pub(super) const fn service(&self) -> &Arc<RateLimitService> {
        &self.collector.service
    }

    /// Metrics of the service.
    pub(super) fn metrics(&self) -> &ServiceMetrics {
        &self.collector.service.decider.metrics
    }

    /// Collects a summary; `clock_offset_us` is the time of Redis less that of this process. Takes milliseconds.
    pub(super) fn build_summary(&mut self, clock_offset_us: i64) -> ReplicaSummary {
        let now = self.service().clock.now();
        let findings = self.find_own_alarms(now);
        let metrics = self.metrics();
        let at_redis = |time: Time| time.as_micros().saturating_add_signed(clock_offset_us);
        let mut summary = ReplicaSummary {
            v: SUMMARY_VERSION,
            incarnation: self.facts.incarnation.clone(),
            name: self.facts.name.clone(),
            build: env!("CARGO_PKG_VERSION").to_owned(),
            started_us: at_redis(now).saturating_sub(to_micros(self.facts.started.elapsed())),
            published_us: at_redis(now),
            clock_offset_us,
            rules: RulesStatus::new(&self.collector),
            slot: self.service().decider.store.stats().shared.and_then(|shared| shared.eventual?.place),
            store: StoreStatus::new(&self.collector),
            recent: self.summarize_recent_decisions(),
            blocks: self.summarize_blocks(now),
            quota: self.collector.quota.as_ref().map(|quota| quota.compute_totals()),
            values: self.facts.values,
            findings,
            ..ReplicaSummary::default()
        };
        let mut names = ListedLimitNames::default();
        if !metrics.top_keys.is_tracking() {
            summary.values = PublishedKeyForm::None;
        }
        if summary.values != PublishedKeyForm::None {
            add_rejected_keys(&mut summary, &metrics.top_keys.recent_keys_by_minute(now), &mut names, MAX_KEYS_BYTES);
        }
        if summary.values != PublishedKeyForm::None {
            let busiest = metrics.busiest_keys.snapshot(now, KEPT_MINUTES, |_| true);
            add_busiest_keys(&mut summary, &busiest.keys, &mut names);
        }
        (summary.names, summary.domains) = (names.listed, names.domains);
        summary
    }

    /// What is wrong with this process, since when.
    fn find_own_alarms(&mut self, now: Time) -> Vec<Finding> {
        let mut findings = find_own_alarms(&self.collector);
        self.findings_seen.set_since_and_forget_ended(&mut findings, now);
        findings
    }

    fn summarize_blocks(&self, now: Time) -> BlocksSummary {
        let blocks = &self.service().decider.blocks;
        let rejected = blocks.rejection_counts().iter().map(|(_, count)| count).sum();
        BlocksSummary { values: blocks.list(now).len() as u64, rejected_requests: rejected }
    }

    /// Sums up the decisions since the oldest totals that are kept.
    fn summarize_recent_decisions(&self) -> RecentDecisionCounts {
        let started = || DecisionTotals::zero_at(self.facts.started);
        DecisionTotals::new(&self.collector).since(&self.totals.front().cloned().unwrap_or_else(started))
    }

    /// Keeps the totals, from which later summaries tell what is recent, and since when findings are there; to be called
    /// every 5 s.
    pub(super) fn record_totals_and_alarm_times(&mut self) {
        self.find_own_alarms(self.service().clock.now());
        self.totals.push_back(DecisionTotals::new(&self.collector));
        if self.totals.len() > MAX_KEPT_DECISION_TOTALS {
            self.totals.pop_front();
        }
    }
}

/// Builds the view of this replica alone.
pub(super) fn build_view_of_this_replica(
    collector: &Mutex<ReplicaSummaryBuilder>,
    clock_offset_us: i64,
    problem: String,
) -> FleetView {
    let own = build_own_summary(collector, clock_offset_us);
    let now = Time::from_micros(own.published_us);
    FleetViewBuilder::new(own, now).finish_view(Some(problem))
}

/// Collects a summary of this replica.
pub(super) fn build_own_summary(collector: &Mutex<ReplicaSummaryBuilder>, clock_offset_us: i64) -> ReplicaSummary {
    lock_ignoring_poison(collector).build_summary(clock_offset_us)
}

/// Names of limits, each listed once.
#[derive(Debug, Default)]
pub struct ListedLimitNames {
    /// The names, in the order in which they were listed.
    pub listed: Vec<String>,
    /// Domain of each name.
    pub domains: Vec<String>,
    indexes: HashMap<LimitName, usize>,
}

impl ListedLimitNames {
    /// Index of a name, which is listed if it was not, at the cost of `room` in bytes; `None` if there is no room.
    fn find_or_add_name_index(&mut self, name: &LimitName, room: &mut usize) -> Option<usize> {
        if let Some(index) = self.indexes.get(name) {
            return Some(*index);
        }
        let domain = name.known_domain().unwrap_or_default();
        *room = room.checked_sub(count_json_bytes(&name.as_str()) + count_json_bytes(&domain))?;
        self.listed.push(name.as_str().to_owned());
        self.domains.push(domain.to_owned());
        self.indexes.insert(name.clone(), self.listed.len() - 1);
        Some(self.listed.len() - 1)
    }
}

/// Adds as many keys of each minute as there is room for in bytes, the same number in each.
pub fn add_rejected_keys(
    summary: &mut ReplicaSummary,
    minutes: &[KeyCountsInMinute],
    names: &mut ListedLimitNames,
    mut room: usize,
) {
    let mut indexes: HashMap<(usize, Option<UnenforcedMode>, Arc<str>), usize> = HashMap::new();
    summary.minutes = minutes
        .iter()
        .map(|minute| RejectedKeysMinuteSummary {
            minute: minute.minute,
            max_missed: minute.max_missed,
            counts: Vec::new(),
        })
        .collect();
    let deepest = minutes.iter().map(|minute| minute.keys.len()).max().unwrap_or(0);
    'ranks: for rank in 0..deepest {
        for (minute, of_summary) in minutes.iter().zip(&mut summary.minutes) {
            let Some(rejected) = minute.keys.get(rank) else { continue };
            let KeyCount { limit, mode, text, at_least, at_most, requests, .. } = rejected;
            let name = names.find_or_add_name_index(limit, &mut room);
            let key = name.and_then(|name| {
                let known = indexes.get(&(name, *mode, Arc::clone(text))).copied();
                known.or_else(|| {
                    let key = RejectedKeySummary { name, text: text.to_string(), mode: *mode };
                    room = room.checked_sub(count_json_bytes(&key))?;
                    summary.keys.push(key);
                    indexes.insert((name, *mode, Arc::clone(text)), summary.keys.len() - 1);
                    Some(summary.keys.len() - 1)
                })
            });
            let Some(key) = key else { break 'ranks };
            let [at_least, at_most, requests] = [at_least, at_most, requests].map(|count| *count);
            let count = RejectedKeyCountSummary { key, at_least, at_most, requests };
            match room.checked_sub(count_json_bytes(&count)) {
                Some(left) => room = left,
                None => break 'ranks,
            }
            of_summary.counts.push(count);
        }
    }
    for (minute, of_summary) in minutes.iter().zip(&mut summary.minutes) {
        // Keys are ordered by their upper bound, so the first one without room has the most hits of those left out.
        let left_out = minute.keys.get(of_summary.counts.len()).map_or(0, |key| key.at_most);
        of_summary.max_missed = of_summary.max_missed.max(left_out);
    }
}

/// Adds the busiest keys, as far as there is room.
fn add_busiest_keys(summary: &mut ReplicaSummary, keys: &[KeyCount], names: &mut ListedLimitNames) {
    let mut room = MAX_BUSY_KEYS_BYTES;
    for key in keys.iter().take(MAX_BUSY_KEYS) {
        let Some(name) = names.find_or_add_name_index(&key.limit, &mut room) else { return };
        let busy = BusyKeySummary { name, text: key.text.to_string(), hits: key.at_least };
        let Some(left) = room.checked_sub(count_json_bytes(&busy)) else { return };
        room = left;
        summary.busy.push(busy);
    }
}

/// Length of a value as JSON in a list, in bytes.
fn count_json_bytes(value: &impl Serialize) -> usize {
    serde_json::to_vec(value).map_or(0, |json| json.len()) + ",".len()
}
