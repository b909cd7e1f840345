//! Summary of this replica, from the statistics that it keeps anyway.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::summary::*;
use super::view::{FleetView, ViewBuilder};
use crate::base::clock::{Time, to_micros};
use crate::base::printable_text::truncate_to_bytes;
use crate::base::sharded::lock_ignoring_poison;
use crate::serve::grpc::service::Service;
use crate::serve::health::Health;
use crate::telemetry::metrics::histogram::HistogramSnapshot;
use crate::telemetry::metrics::limit_stats::{LimitStat, LimitStats};
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::top_keys::{RejectedInMinute, RejectedKey};

/// Number of earlier totals that are kept: the recent decisions span this many intervals.
const KEPT_TOTALS: usize = 12;
/// Maximum size of the text of a summary in bytes.
const TEXT_BUDGET: usize = MAX_BYTES - 2048;
/// Part of it for rejected keys.
const KEYS_BUDGET: usize = 30 << 10;
/// Part of it for limits, their names and sketches.
const LIMITS_BUDGET: usize = TEXT_BUDGET - KEYS_BUDGET;
/// Part of the latter for sketches.
const SKETCHES_BUDGET: usize = 16 << 10;
/// Punctuation and names of fields of one count, key, limit, in bytes.
const COUNT_OVERHEAD: usize = r#"{"k":,"l":,"u":},"#.len();
const KEY_OVERHEAD: usize = r#"{"n":,"t":}"#.len();
const LIMIT_OVERHEAD: usize = r#"{"n":,"m":,"r":,"h":},"#.len();
/// Maximum length of the version of the rules in bytes; readers show no longer text.
const MAX_VERSION_BYTES: usize = 256;

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
    pub(super) values: SummaryValues,
}

/// Collects summaries of this replica.
#[derive(Debug)]
pub(super) struct SummaryCollector {
    service: Arc<Service>,
    health: Arc<Health>,
    facts: ReplicaFacts,
    totals: VecDeque<Totals>,
}

/// Totals since the start.
#[derive(Clone, Debug)]
struct Totals {
    /// Time by a clock that never jumps.
    at: Instant,
    calls: u64,
    verdicts: DecisionsByVerdict,
    latency: HistogramSnapshot,
}

impl SummaryCollector {
    /// Collector of this service.
    pub(super) fn new(service: Arc<Service>, health: Arc<Health>, facts: ReplicaFacts) -> Self {
        Self { service, health, facts, totals: VecDeque::new() }
    }

    /// The service.
    pub(super) const fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Metrics of the service.
    pub(super) fn metrics(&self) -> &ServiceMetrics {
        &self.service.decider.metrics
    }

    /// Collects a summary; `clock_offset_us` is the time of Redis less that of this process. Takes milliseconds.
    pub(super) fn collect(&self, clock_offset_us: i64) -> ReplicaSummary {
        let now = self.service.clock.now();
        let metrics = self.metrics();
        let at_redis = |time: Time| time.as_micros().saturating_add_signed(clock_offset_us);
        let mut summary = ReplicaSummary {
            v: VERSION,
            incarnation: self.facts.incarnation.clone(),
            name: self.facts.name.clone(),
            build: env!("CARGO_PKG_VERSION").to_owned(),
            started_us: at_redis(now).saturating_sub(to_micros(self.facts.started.elapsed())),
            published_us: at_redis(now),
            clock_offset_us,
            rules: self.summarize_rules(),
            recent: self.summarize_recent(),
            distinct_seed: metrics.distinct_key_seed().map(|seed| seed.fingerprint()),
            values: self.facts.values,
            ..ReplicaSummary::default()
        };
        self.add_store(&mut summary);
        let mut names = Names::default();
        if !metrics.top_keys.is_on() {
            summary.values = SummaryValues::None;
        }
        if summary.values != SummaryValues::None {
            add_keys(&mut summary, &metrics.top_keys.by_minute(now), &mut names, KEYS_BUDGET);
        }
        add_limits(&mut summary, metrics, &mut names);
        summary.names = names.listed;
        summary
    }

    fn summarize_rules(&self) -> RulesSummary {
        let status = self.service.rules.status();
        let hash = self.service.rules.load().as_ref().map(|loaded| loaded.rules.contents_hash.to_string());
        RulesSummary {
            version: status.source_version.map(|version| truncate_to_bytes(&version, MAX_VERSION_BYTES).to_owned()),
            hash: hash.unwrap_or_default(),
            rules: status.rules,
            load_failed: status.last_error.is_some(),
        }
    }

    fn add_store(&self, summary: &mut ReplicaSummary) {
        let stats = self.service.decider.store.stats();
        let shared = stats.shared.as_ref();
        let servers = shared.map(|shared| &*shared.servers).unwrap_or_default();
        summary.slot = shared.and_then(|shared| shared.eventual?.slot);
        summary.store = StoreSummary {
            kind: stats.store.to_owned(),
            available: !self.health.is_store_lost(),
            breakers_open: servers.iter().filter(|server| server.is_breaker_open).count(),
            servers: servers.len(),
        };
    }

    /// Sums up the decisions since the oldest totals that are kept.
    fn summarize_recent(&self) -> RecentSummary {
        let totals = Totals::now(self.metrics());
        let since = self.totals.front().cloned().unwrap_or_else(|| Totals::zero(self.facts.started));
        let counts = totals.latency.counts.iter().zip(since.latency.counts);
        RecentSummary {
            span_us: to_micros(totals.at.saturating_duration_since(since.at)),
            calls: totals.calls.saturating_sub(since.calls),
            verdicts: totals.verdicts.combine(since.verdicts, u64::saturating_sub),
            latency: LatencySummary {
                bounds: LATENCY_BOUNDS_VERSION,
                counts: counts.map(|(count, before)| count.saturating_sub(before)).collect(),
            },
        }
    }

    /// Keeps the totals, from which later summaries tell what is recent; to be called every 5 s.
    pub(super) fn keep_totals(&mut self) {
        self.totals.push_back(Totals::now(self.metrics()));
        if self.totals.len() > KEPT_TOTALS {
            self.totals.pop_front();
        }
    }
}

impl Totals {
    fn zero(at: Instant) -> Self {
        Self { at, calls: 0, verdicts: DecisionsByVerdict::default(), latency: HistogramSnapshot::default() }
    }

    fn now(metrics: &ServiceMetrics) -> Self {
        let at = Instant::now();
        let verdicts = metrics.limits.all().iter().fold(DecisionsByVerdict::default(), |sum, limit| {
            let of_limit = DecisionsByVerdict {
                ok: limit.get(LimitStat::Ok),
                over_limit: limit.get(LimitStat::Over),
                shadow: limit.get(LimitStat::Shadow),
                local: limit.get(LimitStat::Local),
                allow: limit.get(LimitStat::Allow),
                deny: limit.get(LimitStat::Deny),
                error: limit.get(LimitStat::Error),
            };
            sum.combine(of_limit, u64::saturating_add)
        });
        Self { at, calls: metrics.calls.snapshot().count(), verdicts, latency: metrics.decisions.snapshot() }
    }
}

/// Builds the view of this replica alone.
pub(super) fn view_own_summary(
    collector: &Mutex<SummaryCollector>,
    clock_offset_us: i64,
    problem: String,
) -> FleetView {
    let own = collect_summary(collector, clock_offset_us);
    let now = Time::from_micros(own.published_us);
    ViewBuilder::new(own, now).finish(Some(problem))
}

/// Collects a summary of this replica.
pub(super) fn collect_summary(collector: &Mutex<SummaryCollector>, clock_offset_us: i64) -> ReplicaSummary {
    lock_ignoring_poison(collector).collect(clock_offset_us)
}

/// Names of limits, each listed once.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) listed: Vec<String>,
    indexes: HashMap<String, usize>,
}

impl Names {
    /// Bytes that listing a name would add.
    fn cost(&self, name: &str) -> usize {
        if self.indexes.contains_key(name) { 0 } else { json_length(name) }
    }

    /// Upper bound of the number of digits of a name's index.
    fn index_digits(&self) -> usize {
        digits(self.listed.len() as u64)
    }

    fn index(&mut self, name: &str) -> usize {
        *self.indexes.entry(name.to_owned()).or_insert_with(|| {
            self.listed.push(name.to_owned());
            self.listed.len() - 1
        })
    }
}

/// Adds as many keys of each minute as there is room for in bytes, the same number in each.
pub(super) fn add_keys(summary: &mut ReplicaSummary, minutes: &[RejectedInMinute], names: &mut Names, mut room: usize) {
    let mut indexes: HashMap<(usize, Arc<str>), usize> = HashMap::new();
    summary.minutes = minutes
        .iter()
        .map(|minute| MinuteSummary { minute: minute.minute, max_missed: minute.max_missed, counts: Vec::new() })
        .collect();
    let deepest = minutes.iter().map(|minute| minute.keys.len()).max().unwrap_or(0);
    'ranks: for rank in 0..deepest {
        for (minute, of_summary) in minutes.iter().zip(&mut summary.minutes) {
            let Some(RejectedKey { limit, text, at_least, at_most, .. }) = minute.keys.get(rank) else { continue };
            let known = names.indexes.get(limit.key()).and_then(|name| indexes.get(&(*name, Arc::clone(text))));
            let of_key = KEY_OVERHEAD + names.index_digits() + names.cost(limit.key()) + json_length(text);
            let of_count = COUNT_OVERHEAD + digits(summary.keys.len() as u64) + digits(*at_least) + digits(*at_most);
            let cost = of_count + if known.is_some() { 0 } else { of_key };
            if cost > room {
                break 'ranks;
            }
            room -= cost;
            let name = names.index(limit.key());
            let key = *indexes.entry((name, Arc::clone(text))).or_insert_with(|| {
                summary.keys.push(KeySummary { name, text: text.to_string() });
                summary.keys.len() - 1
            });
            of_summary.counts.push(KeyCountSummary { key, at_least: *at_least, at_most: *at_most });
        }
    }
    for (minute, of_summary) in minutes.iter().zip(&mut summary.minutes) {
        // Keys are ordered by their upper bound, so the first one without room has the most hits of those left out.
        let left_out = minute.keys.get(of_summary.counts.len()).map_or(0, |key| key.at_most);
        of_summary.max_missed = of_summary.max_missed.max(left_out);
    }
}

/// Adds the limits that rejected most, then those that matched most, as far as there is room.
fn add_limits(summary: &mut ReplicaSummary, metrics: &ServiceMetrics, names: &mut Names) {
    let mut limits: Vec<(Arc<LimitStats>, u64, u64)> = metrics
        .limits
        .all()
        .into_iter()
        .map(|limit| {
            let decisions = limit.all_decisions();
            (limit, decisions.rejected, decisions.total)
        })
        .collect();
    limits.sort_by(|(a, a_rejected, a_total), (b, b_rejected, b_total)| {
        (b_rejected, b_total, a.name().key()).cmp(&(a_rejected, a_total, b.name().key()))
    });
    let (mut room, mut sketches) = (LIMITS_BUDGET - SKETCHES_BUDGET, SKETCHES_BUDGET);
    for (limit, rejected, matched) in &limits {
        let near_limit_hits = limit.get(LimitStat::NearLimit);
        let of_counts: usize = [*matched, *rejected, near_limit_hits].into_iter().map(digits).sum();
        let cost = LIMIT_OVERHEAD + names.index_digits() + of_counts + names.cost(limit.name().key());
        if cost > room {
            break;
        }
        room -= cost;
        let mut sketch = |keys: String| {
            let cost = keys.len() + "\"k\":\"\",".len();
            sketches = sketches.checked_sub(cost)?;
            Some(keys)
        };
        summary.limits.push(LimitSummary {
            name: names.index(limit.name().key()),
            matched: *matched,
            rejected: *rejected,
            near_limit_hits,
            keys: sketch(encode_sketch(&limit.keys.snapshot())),
            rejected_keys: sketch(encode_sketch(&limit.rejected_keys.snapshot())),
        });
    }
    summary.limits_left_out = limits.len() - summary.limits.len();
}

/// Length of a text as a JSON string, with a comma.
fn json_length(text: &str) -> usize {
    let escaped = text.chars().map(|character| match character {
        '"' | '\\' => 2,
        character if character.is_control() => 6,
        character => character.len_utf8(),
    });
    escaped.sum::<usize>() + "\"\",".len()
}

/// Number of decimal digits.
fn digits(number: u64) -> usize {
    number.checked_ilog10().map_or(1, |digits| digits as usize + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::fleet::authentication::seal_summary;
    use crate::telemetry::metrics::limit_stats::LimitName;
    use crate::telemetry::top_keys::{KeyRejection, TopKeys};

    /// Rejected keys of each of ten minutes: `texts` are the same in all.
    fn minutes(limits: &[Arc<LimitStats>], texts: impl Fn(usize) -> String) -> Vec<RejectedInMinute> {
        let top_keys = TopKeys::new(2048);
        for minute in 0..10 {
            for key in 0..2000 {
                let rejection = KeyRejection {
                    id: (key as u128 + 1) << 64 | key as u128,
                    limit: &limits[key % limits.len()],
                    hits: 1,
                };
                top_keys.record(rejection, Time::from_secs((30_000_000 + minute) * 60), |text| {
                    text.extend_from_slice(texts(key).as_bytes());
                });
            }
        }
        top_keys.by_minute(Time::from_secs(30_000_009 * 60))
    }

    #[test]
    fn summary_of_many_limits_and_keys_fits() {
        let metrics = ServiceMetrics::new(2048, 0);
        let limits: Vec<Arc<LimitStats>> =
            (0..10_000).map(|limit| metrics.limits.of_rule(LimitName::new(["d", &limit.to_string()]))).collect();
        let texts: [fn(usize) -> String; 3] =
            [|key| key.to_string(), |key| format!("{key}={}", "x".repeat(300)), |key| format!("{key}\u{1}\"")];
        for text in texts {
            let (mut summary, mut names) =
                (ReplicaSummary { v: VERSION, ..ReplicaSummary::default() }, Names::default());
            add_keys(&mut summary, &minutes(&limits, text), &mut names, KEYS_BUDGET);
            let keys_bytes = serde_json::to_vec(&(&summary.keys, &summary.minutes, &names.listed)).unwrap().len();
            assert!(keys_bytes <= KEYS_BUDGET + 1024, "{keys_bytes}");
            add_limits(&mut summary, &metrics, &mut names);
            summary.names = names.listed;
            let sealed = seal_summary(&summary, None).map(|sealed| sealed.len());
            assert!(sealed.is_some_and(|bytes| bytes > MAX_BYTES / 2 && bytes <= MAX_BYTES - 1024), "{sealed:?}");
            assert_eq!(summary.limits.len() + summary.limits_left_out, limits.len());
            assert!(summary.limits_left_out > 0);
            // Keys without room are within the bound of each minute.
            assert!(summary.minutes.iter().all(|minute| minute.counts.len() == 2000 || minute.max_missed > 0));
        }
    }
}
