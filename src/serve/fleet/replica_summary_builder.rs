//! Summary of this replica, from the statistics that it keeps anyway.
//!
//! Counts are differences over the last minute or so, so a restart makes none negative.
//!
//! Decides: what a replica publishes about itself.
//! Decides: over which time requests count, also after a restart (`summarize_recent_decisions`).

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use super::merge_keys::MAX_BUSY_KEYS;
use super::summary::*;
use super::view::{FleetView, FleetViewBuilder};
use crate::base::clock::{Time, to_micros};
use crate::base::sharded::lock_ignoring_poison;
use crate::base::text::truncate_to_bytes;
use crate::serve::grpc::service::RateLimitService;
use crate::serve::health::Health;
use crate::serve::quota::service::QuotaService;
use crate::serve::report::rules::SlotCounts;
use crate::telemetry::metrics::histogram::HistogramSnapshot;
use crate::telemetry::metrics::limit_stats::{LimitName, LimitStat, LimitStats};
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::top_keys::{KEPT_MINUTES, RejectedKey, RejectedKeysInMinute};

/// Number of earlier totals that are kept: the recent decisions span this many intervals.
const MAX_KEPT_DECISION_TOTALS: usize = 12;
/// Room for the lists of a summary, in bytes: what its other fields leave.
const SUMMARY_LISTS_ROOM_BYTES: usize = MAX_SUMMARY_BYTES - 2048;
/// Part of [`SUMMARY_LISTS_ROOM_BYTES`] for rejected keys.
const MAX_KEYS_BYTES: usize = 30 << 10;
/// Part of [`SUMMARY_LISTS_ROOM_BYTES`] for limits and their names.
const MAX_LIMITS_BYTES: usize = SUMMARY_LISTS_ROOM_BYTES - MAX_KEYS_BYTES - MAX_BUSY_KEYS_BYTES;
/// Part of [`SUMMARY_LISTS_ROOM_BYTES`] for the busiest keys, and names of limits that only these have.
const MAX_BUSY_KEYS_BYTES: usize = 4 << 10;
/// JSON punctuation and names of fields of one count, key, limit, in bytes.
const COUNT_JSON_OVERHEAD_BYTES: usize = r#"{"k":,"l":,"u":,"r":},"#.len();
const BUSY_KEY_JSON_OVERHEAD_BYTES: usize = r#"{"n":,"t":,"h":},"#.len();
const KEY_JSON_OVERHEAD_BYTES: usize = r#"{"n":,"t":}"#.len();
const LIMIT_JSON_OVERHEAD_BYTES: usize = r#"{"n":,"m":,"r":,"h":},"#.len();
/// Maximum length of the version of the rules in bytes; readers show no longer text.
const MAX_RULES_VERSION_BYTES: usize = 256;

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
    service: Arc<RateLimitService>,
    /// The quota service; `None` if it is off.
    quota: Option<Arc<QuotaService>>,
    health: Arc<Health>,
    facts: ReplicaFacts,
    totals: VecDeque<DecisionTotals>,
}

/// Numbers of decisions since the start of the process, at one time.
#[derive(Clone, Debug)]
struct DecisionTotals {
    /// Time by a clock that never jumps.
    at: Instant,
    calls: u64,
    /// Rejected requests.
    rejected: u64,
    /// Descriptors that matched no rule.
    unmatched: u64,
    verdicts: DecisionsByVerdict,
    latency: HistogramSnapshot,
}

impl ReplicaSummaryBuilder {
    /// Collector of this service.
    pub(super) fn new(
        service: Arc<RateLimitService>,
        quota: Option<Arc<QuotaService>>,
        health: Arc<Health>,
        facts: ReplicaFacts,
    ) -> Self {
        Self { service, quota, health, facts, totals: VecDeque::new() }
    }

    /// The service.
    pub(super) const fn service(&self) -> &Arc<RateLimitService> {
        &self.service
    }

    /// Metrics of the service.
    pub(super) fn metrics(&self) -> &ServiceMetrics {
        &self.service.decider.metrics
    }

    /// Collects a summary; `clock_offset_us` is the time of Redis less that of this process. Takes milliseconds.
    pub(super) fn build_summary(&self, clock_offset_us: i64) -> ReplicaSummary {
        let now = self.service.clock.now();
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
            rules: self.summarize_rules(),
            recent: self.summarize_recent_decisions(),
            blocks: self.summarize_blocks(now),
            quota: self.quota.as_ref().map(|quota| quota.compute_totals()),
            values: self.facts.values,
            ..ReplicaSummary::default()
        };
        self.add_store_summary(&mut summary);
        let mut names = ListedLimitNames::default();
        if !metrics.top_keys.is_tracking() {
            summary.values = PublishedKeyForm::None;
        }
        if summary.values != PublishedKeyForm::None {
            add_rejected_keys(&mut summary, &metrics.top_keys.rejected_keys_by_minute(now), &mut names, MAX_KEYS_BYTES);
        }
        if summary.values != PublishedKeyForm::None {
            let busiest = metrics.busiest_keys.snapshot(now, KEPT_MINUTES, |_| true);
            add_busiest_keys(&mut summary, &busiest.keys, &mut names);
        }
        add_limit_summaries(&mut summary, metrics, &mut names);
        (summary.names, summary.domain_bytes) = (names.listed, names.domain_bytes);
        summary
    }

    fn summarize_rules(&self) -> RulesSummary {
        let status = self.service.rules.status();
        let hash = self.service.rules.current_rules().as_ref().map(|loaded| loaded.rules.contents_hash.to_string());
        RulesSummary {
            version: status
                .source_version
                .map(|version| truncate_to_bytes(&version, MAX_RULES_VERSION_BYTES).to_owned()),
            hash: hash.unwrap_or_default(),
            rules: status.rules,
            load_failed: status.last_error.is_some(),
        }
    }

    fn summarize_blocks(&self, now: Time) -> BlocksSummary {
        let blocks = &self.service.decider.blocks;
        let rejected = blocks.rejection_counts().iter().map(|(_, count)| count).sum();
        BlocksSummary { values: blocks.list(now).len() as u64, rejected_requests: rejected }
    }

    fn add_store_summary(&self, summary: &mut ReplicaSummary) {
        let stats = self.service.decider.store.stats();
        let shared = stats.shared.as_ref();
        let servers = shared.map(|shared| &*shared.servers).unwrap_or_default();
        summary.slot = shared.and_then(|shared| shared.eventual?.place);
        summary.store = StoreSummary {
            kind: stats.store.to_owned(),
            available: !self.health.is_store_lost(),
            breakers_open: servers.iter().filter(|server| server.is_breaker_open).count(),
            servers: servers.len(),
        };
    }

    /// Sums up the decisions since the oldest totals that are kept.
    fn summarize_recent_decisions(&self) -> RecentDecisionsSummary {
        let totals = DecisionTotals::from_metrics(self.metrics());
        let since = self.totals.front().cloned().unwrap_or_else(|| DecisionTotals::zero_at(self.facts.started));
        let counts = totals.latency.counts.iter().zip(since.latency.counts);
        RecentDecisionsSummary {
            span_us: to_micros(totals.at.saturating_duration_since(since.at)),
            calls: totals.calls.saturating_sub(since.calls),
            rejected: Some(totals.rejected.saturating_sub(since.rejected)),
            unmatched: Some(totals.unmatched.saturating_sub(since.unmatched)),
            verdicts: totals.verdicts.combine_counts(since.verdicts, u64::saturating_sub),
            latency: LatencySummary {
                bounds: LATENCY_BOUNDS_VERSION,
                counts: counts.map(|(count, before)| count.saturating_sub(before)).collect(),
            },
        }
    }

    /// Keeps the totals, from which later summaries tell what is recent; to be called every 5 s.
    pub(super) fn record_decision_totals(&mut self) {
        self.totals.push_back(DecisionTotals::from_metrics(self.metrics()));
        if self.totals.len() > MAX_KEPT_DECISION_TOTALS {
            self.totals.pop_front();
        }
    }
}

impl DecisionTotals {
    fn zero_at(at: Instant) -> Self {
        Self {
            at,
            calls: 0,
            rejected: 0,
            unmatched: 0,
            verdicts: DecisionsByVerdict::default(),
            latency: HistogramSnapshot::default(),
        }
    }

    fn from_metrics(metrics: &ServiceMetrics) -> Self {
        let (at, latency) = (Instant::now(), metrics.decisions.snapshot());
        let limits = metrics.limits.all_limit_stats();
        let of_unknown_domains: u64 = metrics.limits.unknown_domain_counts().iter().map(|(_, count)| count).sum();
        let of_domains: u64 = limits.iter().map(|limit| limit.counter_value(LimitStat::Unmatched)).sum();
        let verdicts = limits.iter().fold(DecisionsByVerdict::default(), |sum, limit| {
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
        Self {
            at,
            calls: latency.observation_count(),
            rejected: metrics.rejected_request_count(),
            unmatched: of_domains.saturating_add(of_unknown_domains),
            verdicts,
            latency,
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
    /// Length of the domain in each name.
    pub domain_bytes: Vec<u32>,
    indexes: HashMap<LimitName, usize>,
}

impl ListedLimitNames {
    /// Bytes that listing a name would add.
    fn count_added_bytes(&self, name: &LimitName) -> usize {
        let domain_digits = count_digits(name.domain().len() as u64);
        if self.indexes.contains_key(name) {
            0
        } else {
            count_json_string_bytes(name.as_str()) + domain_digits + ",".len()
        }
    }

    /// Upper bound of the number of digits of a name's index.
    fn max_index_digits(&self) -> usize {
        count_digits(self.listed.len() as u64)
    }

    fn find_or_add_name_index(&mut self, name: &LimitName) -> usize {
        *self.indexes.entry(name.clone()).or_insert_with(|| {
            self.listed.push(name.as_str().to_owned());
            self.domain_bytes.push(u32::try_from(name.domain().len()).unwrap_or(u32::MAX));
            self.listed.len() - 1
        })
    }
}

/// Adds as many keys of each minute as there is room for in bytes, the same number in each.
pub fn add_rejected_keys(
    summary: &mut ReplicaSummary,
    minutes: &[RejectedKeysInMinute],
    names: &mut ListedLimitNames,
    mut room: usize,
) {
    let mut indexes: HashMap<(usize, Arc<str>), usize> = HashMap::new();
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
            let RejectedKey { limit, text, at_least, at_most, requests, .. } = rejected;
            let known = names.indexes.get(&**limit).and_then(|name| indexes.get(&(*name, Arc::clone(text))));
            let of_key = KEY_JSON_OVERHEAD_BYTES
                + names.max_index_digits()
                + names.count_added_bytes(limit)
                + count_json_string_bytes(text);
            let of_count = COUNT_JSON_OVERHEAD_BYTES
                + count_digits(summary.keys.len() as u64)
                + count_digits(*at_least)
                + count_digits(*at_most)
                + count_digits(*requests);
            let cost = of_count + if known.is_some() { 0 } else { of_key };
            if cost > room {
                break 'ranks;
            }
            room -= cost;
            let name = names.find_or_add_name_index(limit);
            let key = *indexes.entry((name, Arc::clone(text))).or_insert_with(|| {
                summary.keys.push(RejectedKeySummary { name, text: text.to_string() });
                summary.keys.len() - 1
            });
            of_summary.counts.push(RejectedKeyCountSummary {
                key,
                at_least: *at_least,
                at_most: *at_most,
                requests: *requests,
            });
        }
    }
    for (minute, of_summary) in minutes.iter().zip(&mut summary.minutes) {
        // Keys are ordered by their upper bound, so the first one without room has the most hits of those left out.
        let left_out = minute.keys.get(of_summary.counts.len()).map_or(0, |key| key.at_most);
        of_summary.max_missed = of_summary.max_missed.max(left_out);
    }
}

/// Adds the busiest keys, as far as there is room.
fn add_busiest_keys(summary: &mut ReplicaSummary, keys: &[RejectedKey], names: &mut ListedLimitNames) {
    let mut room = MAX_BUSY_KEYS_BYTES;
    for key in keys.iter().take(MAX_BUSY_KEYS) {
        let cost = BUSY_KEY_JSON_OVERHEAD_BYTES
            + names.max_index_digits()
            + names.count_added_bytes(&key.limit)
            + count_json_string_bytes(&key.text)
            + count_digits(key.at_least);
        let Some(left) = room.checked_sub(cost) else { return };
        room = left;
        let name = names.find_or_add_name_index(&key.limit);
        summary.busy.push(BusyKeySummary { name, text: key.text.to_string(), hits: key.at_least });
    }
}

/// Adds the limits that rejected most, then those that matched most, as far as there is room.
pub fn add_limit_summaries(summary: &mut ReplicaSummary, metrics: &ServiceMetrics, names: &mut ListedLimitNames) {
    let mut limits: Vec<(Arc<LimitStats>, u64, u64)> = metrics
        .limits
        .all_limit_stats()
        .into_iter()
        .map(|limit| {
            let decisions = limit.total_decision_counts();
            (limit, decisions.rejected, decisions.total)
        })
        .collect();
    limits.sort_by(|(a, a_rejected, a_total), (b, b_rejected, b_total)| {
        (b_rejected, b_total, a.name().as_str()).cmp(&(a_rejected, a_total, b.name().as_str()))
    });
    let mut room = MAX_LIMITS_BYTES;
    for (limit, rejected, matched) in &limits {
        let near_limit_hits = limit.counter_value(LimitStat::NearLimit);
        let of_counts: usize = [*matched, *rejected, near_limit_hits].into_iter().map(count_digits).sum();
        let slots = Some(SlotCounts::of_stats(limit)).filter(|counts| *counts != SlotCounts::default());
        let slots = slots.map(PublishedSlotCounts::from);
        let of_slots = slots.map_or(0, |PublishedSlotCounts(counts)| {
            counts.into_iter().map(|count| count_digits(count) + ",".len()).sum::<usize>() + "\"s\":[],".len()
        });
        let cost = LIMIT_JSON_OVERHEAD_BYTES
            + names.max_index_digits()
            + of_counts
            + of_slots
            + names.count_added_bytes(limit.name());
        if cost > room {
            break;
        }
        room -= cost;
        summary.limits.push(LimitSummary {
            name: names.find_or_add_name_index(limit.name()),
            matched: *matched,
            rejected: *rejected,
            near_limit_hits,
            slots,
        });
    }
    summary.limits_left_out = limits.len() - summary.limits.len();
}

/// Length of a text as a JSON string, with a comma.
fn count_json_string_bytes(text: &str) -> usize {
    let escaped = text.chars().map(|character| match character {
        '"' | '\\' => 2,
        character if character.is_control() => 6,
        character => character.len_utf8(),
    });
    escaped.sum::<usize>() + "\"\",".len()
}

/// Number of decimal digits.
fn count_digits(number: u64) -> usize {
    number.checked_ilog10().map_or(1, |digits| digits as usize + 1)
}
