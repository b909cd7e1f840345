//! Tallies of one replay: counts of all requests, of each limit, and of each key of a limit, and counts over time.
//!
//! Keys are exact up to a bound. Further keys are not told apart: sketches estimate their number, and their runs of
//! rejections are unknown.
//!
//! A timeline counts in a bounded number of equal spans. They are one second long at first. Each time that the traffic
//! reaches beyond the last one, neighbours are joined, so the length is a power of two in seconds.
//!
//! Decides: which figures of `simulate` are exact; spans of its timeline (`Timeline`, `MAX_SPANS`).
//! Decides: which rejected keys it counts.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::Serialize;
use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::base::sharded::{PrehashedMap, upper_half};
use crate::decide::results::{DescriptorResults, LimitWithResult};
use crate::limit::request::Hits;
use crate::telemetry::hyperloglog::HyperLogLog;
use crate::tools::replay::recorded_request::RecordedRequest;
use crate::tools::replay::replayer::ReplayedAnswer;

/// Maximum number of limits with a timeline.
const MAX_TIMELINES: usize = 1000;

/// Counts of one replay.
#[derive(Debug)]
pub struct ReplayTally {
    /// Counts of all requests, without shares and losses.
    pub totals: ReplayTotals,
    /// Requests over time.
    pub timeline: Timeline,
    /// Counts of each limit that was met, in the order of its first request.
    pub limits: Vec<LimitTally>,
    by_id: HashMap<u64, usize>,
    by_path: HashMap<String, usize>,
    /// Id and index of the limit that was counted last.
    last: Option<(u64, usize)>,
    /// Counts by key.
    pub keys: KeyRejectionTallies,
    start: Time,
}

/// Rejection of a descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DescriptorRejection {
    /// Index of the first limit that rejects; `None`: none does.
    pub by: Option<usize>,
    /// Hash of the path of the counters; 0 without limits.
    pub path: u128,
    /// Text of the key, if the values of an entry share a counter; else it is that of the descriptor.
    pub shared_key: Option<Arc<str>>,
}

/// Rejection of each descriptor of a request.
pub type DescriptorRejections = SmallVec<[DescriptorRejection; 2]>;

impl ReplayTally {
    /// Creates empty counts of traffic that begins at `start`.
    pub fn new(start: Time, max_keys: usize) -> Self {
        Self {
            totals: ReplayTotals::default(),
            timeline: Timeline::new(start),
            limits: Vec::new(),
            by_id: HashMap::new(),
            by_path: HashMap::new(),
            last: None,
            keys: KeyRejectionTallies::new(max_keys),
            start,
        }
    }

    /// Counts a descriptor; returns its rejection. A descriptor whose key is not in the sample is not counted.
    pub fn add_descriptor(
        &mut self,
        recorded: &RecordedRequest,
        descriptor: &DescriptorResults<'_, '_>,
    ) -> DescriptorRejection {
        let path = descriptor.path_hash();
        let mut rejection = DescriptorRejection { by: None, path, shared_key: None };
        let Some(of) = recorded.descriptors().get(descriptor.index).filter(|of| of.is_sampled) else {
            return rejection;
        };
        self.totals.unmatched_descriptors += u64::from(descriptor.rule().is_none() && of.limit_override.is_none());
        for limit in descriptor.limits() {
            let index = self.find_or_add_limit(descriptor, &limit);
            let rejected = !limit.result.admitted;
            if rejected && !limit.shadow {
                rejection.by = rejection.by.or(Some(index));
            }
            let tally = &mut self.limits[index];
            if tally.add_hits(of.hits, recorded.arrival, &limit) {
                let change = self.keys.add_charge(KeyId::new(path, index), recorded.arrival, rejected);
                tally.add_key(path, change, rejected, || descriptor.key_text());
            }
        }
        if rejection.by.is_some() && descriptor.values_share_counter() {
            rejection.shared_key = Some(descriptor.key_text());
        }
        rejection
    }

    /// Counts the answer to a request.
    pub fn add_answer(&mut self, at: Time, answer: ReplayedAnswer) {
        let rejected = answer.over_limit || answer.shadowed;
        self.totals.rejected += u64::from(rejected);
        self.totals.failed += u64::from(answer.failed);
        self.totals.without_recorded_rules += u64::from(answer.has_unknown_rules);
        self.timeline.add_request(at, rejected);
    }

    /// Index of a limit, which is added if it is new. Limits of one path are one, as after a reload.
    fn find_or_add_limit(&mut self, descriptor: &DescriptorResults<'_, '_>, limit: &LimitWithResult<'_, '_>) -> usize {
        if let Some((_, index)) = self.last.filter(|(id, _)| *id == limit.id) {
            return index;
        }
        if let Some(index) = self.by_id.get(&limit.id) {
            self.last = Some((limit.id, *index));
            return *index;
        }
        let label = LimitLabel::new(descriptor, limit);
        let index = match self.by_path.get(&label.path) {
            Some(index) => {
                self.limits[*index].label = label;
                *index
            }
            None => {
                let index = self.limits.len();
                self.by_path.insert(label.path.clone(), index);
                let timeline_start = (index < MAX_TIMELINES).then_some(self.start);
                self.limits.push(LimitTally::new(label, timeline_start));
                index
            }
        };
        self.by_id.insert(limit.id, index);
        index
    }

    /// Returns the counts of a limit by its path.
    pub fn find_by_path(&self, path: &str) -> Option<&LimitTally> {
        self.by_path.get(path).map(|index| &self.limits[*index])
    }
}

/// Counts of one limit.
#[derive(Debug)]
pub struct LimitTally {
    /// Identity and text of the limit.
    pub label: LimitLabel,
    /// Its counts; shares, keys, runs, delays and the timeline are added at the end.
    pub figures: LimitFigures,
    /// Distinct keys.
    pub keys: DistinctKeyCounter,
    /// Distinct keys that the limit rejected at least once.
    pub rejected_keys: DistinctKeyCounter,
    /// Longest run of rejections of one key.
    pub longest_run: RejectionRun,
    /// Key of the longest run.
    pub longest_run_key: Arc<str>,
    longest_run_path: u128,
    /// Delays of admitted requests.
    pub delays: DelayCounts,
    /// Requests over time; `None` beyond a number of limits.
    pub timeline: Option<Timeline>,
}

/// All requests under one rule set.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ReplayTotals {
    /// Rejected requests, also those that SHADOW_MODE admits.
    pub rejected: u64,
    /// Share of the requests, 0 to 1.
    pub rejected_share: f64,
    /// Descriptors without a rule.
    pub unmatched_descriptors: u64,
    /// Requests without an answer: no rules, or no room for a counter.
    pub failed: u64,
    /// Those of them whose recorded rules the traffic does not have.
    pub without_recorded_rules: u64,
    /// Counters evicted from a full memory.
    pub evicted_counters: u64,
    /// Charges for which a full memory had no room.
    pub charges_without_counter: u64,
    /// Charges of keys beyond the bound of keys.
    pub untracked_requests: u64,
}

/// Figures of one limit under one rule set.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LimitFigures {
    /// The limit in words.
    pub limit: String,
    /// Charges.
    pub requests: u64,
    /// Hits of the charges.
    pub hits: u64,
    /// Peeks.
    pub peeks: u64,
    /// Refunds.
    pub refunds: u64,
    /// Rejected charges.
    pub rejected: u64,
    /// Share of the charges, 0 to 1.
    pub rejected_share: f64,
    /// Requests that only these rules reject, and this limit first.
    pub rejected_here_only: u64,
    /// Distinct keys.
    pub keys: u64,
    /// Keys with a rejected charge.
    pub rejected_keys: u64,
    /// Share of the keys, 0 to 1.
    pub rejected_keys_share: f64,
    /// The numbers of keys are estimates.
    pub keys_are_estimates: bool,
    /// Longest run of rejections of one key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_run: Option<LongestRejectionRun>,
    /// Delays; absent if there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delays: Option<DelayResults>,
    /// Charges over time; absent beyond 1000 limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeline: Option<TimelineResults>,
}

/// Longest run of rejections of one key.
#[derive(Clone, Debug, Serialize)]
pub struct LongestRejectionRun {
    /// Rejected requests.
    pub requests: u32,
    /// Seconds from the first to the last.
    pub seconds: f64,
    /// `key=value,key=value`.
    pub key: String,
}

/// Delays of admitted requests, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DelayResults {
    /// Delayed requests.
    pub requests: u64,
    /// Median.
    pub p50_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// Longest.
    pub max_us: u64,
}

/// Counts in equal spans of time.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TimelineResults {
    /// Start of the first span, RFC 3339 in UTC.
    pub start: String,
    /// Length of a span.
    pub span_seconds: u64,
    /// Requests of each span.
    pub requests: Vec<u64>,
    /// Rejected requests of each span.
    pub rejected: Vec<u64>,
    /// Requests of each span that the old rules reject.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejected_before: Option<Vec<u64>>,
}

/// Identity and text of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitLabel {
    /// Path of the limit, as in `/rlconfig` and metrics.
    pub path: String,
    /// Path of its rule; that of the domain for limits that came with requests.
    pub rule: String,
    /// Location of the rule; empty for limits that came with requests.
    pub location: String,
    /// Name; empty if it has none.
    pub name: String,
    /// The limit in words; empty for limits that came with requests.
    pub text: String,
    /// Shadow mode.
    pub shadow: bool,
    /// Quota mode.
    pub quota: bool,
    /// Candidate: charged as if it were the only limit of its rule.
    pub candidate: bool,
}

/// Number of distinct keys: exact while keys are tracked, else estimated.
#[derive(Debug, Default)]
pub struct DistinctKeyCounter {
    exact: u64,
    sketch: HyperLogLog,
    is_estimate: bool,
}

/// Delays by their length.
#[derive(Debug, Default)]
pub struct DelayCounts {
    /// Number of delays by length in microseconds, rounded up: at most 128 lengths for each power of two.
    by_length: BTreeMap<u64, u64>,
    count: u64,
}

/// Suffix of the path of limits that came with requests.
const OVERRIDES_SUFFIX: &str = "(limits of requests)";

impl LimitLabel {
    /// Label of a limit of a descriptor.
    pub fn new(descriptor: &DescriptorResults<'_, '_>, limit: &LimitWithResult<'_, '_>) -> Self {
        let (path, rule, location, text) = match descriptor.rule() {
            Some(compiled) => {
                let rule = &compiled.rule;
                let location = rule.location.to_string();
                (rule.limit_path(limit.index), rule.path.clone(), location, limit.limit.to_string())
            }
            None => {
                let domain = descriptor.domain().map_or("", |domain| &domain.name);
                let path = format!("{domain} {OVERRIDES_SUFFIX}");
                (path.clone(), path, String::new(), String::new())
            }
        };
        let LimitWithResult { shadow, quota, candidate, .. } = *limit;
        // With `enforced_share` the limit is in shadow mode for some keys.
        let shares = descriptor.rule().filter(|compiled| compiled.rule.enforced_share.is_some());
        let shadow = shares.and_then(|compiled| compiled.limits.get(limit.index)).map_or(shadow, |limit| limit.shadow);
        Self { path, rule, location, text, name: limit.name.to_owned(), shadow, quota, candidate }
    }
}

impl LimitTally {
    /// Creates the counts of a limit. `timeline_start` is the start of its timeline, if it has one.
    pub fn new(label: LimitLabel, timeline_start: Option<Time>) -> Self {
        Self {
            label,
            figures: LimitFigures::default(),
            keys: DistinctKeyCounter::default(),
            rejected_keys: DistinctKeyCounter::default(),
            longest_run: RejectionRun::default(),
            longest_run_key: Arc::from(""),
            longest_run_path: 0,
            delays: DelayCounts::default(),
            timeline: timeline_start.map(Timeline::new),
        }
    }

    /// Counts hits at `at`; returns true for a charge.
    pub fn add_hits(&mut self, hits: Hits, at: Time, limit: &LimitWithResult<'_, '_>) -> bool {
        let figures = &mut self.figures;
        let count = match hits {
            Hits::Charge(count) => count,
            Hits::Peek => {
                figures.peeks += 1;
                return false;
            }
            Hits::Refund(_) => {
                figures.refunds += 1;
                return false;
            }
        };
        let rejected = !limit.result.admitted;
        figures.requests += 1;
        figures.hits = figures.hits.saturating_add(count);
        figures.rejected += u64::from(rejected);
        if limit.result.delay_us > 0 && !rejected {
            self.delays.add_delay(limit.result.delay_us);
        }
        if let Some(timeline) = &mut self.timeline {
            timeline.add_request(at, rejected);
        }
        true
    }

    /// Counts the key of a charge. `text` is called if the key has a new longest run.
    pub fn add_key(
        &mut self,
        path: u128,
        change: Option<ChargeEffectOnKey>,
        rejected: bool,
        text: impl FnOnce() -> Arc<str>,
    ) {
        self.keys.add_key(path, change.map(|change| change.is_new));
        if rejected {
            self.rejected_keys.add_key(path, change.map(|change| change.is_first_rejection));
        }
        let Some(ChargeEffectOnKey { run, .. }) = change else { return };
        if run > self.longest_run {
            self.longest_run = run;
            if self.longest_run_path != path {
                (self.longest_run_path, self.longest_run_key) = (path, text());
            }
        }
    }
}

impl DelayCounts {
    /// Binary digits of a length that are exact: lengths are at most 0.8 % too long.
    const PRECISION_BITS: u32 = 8;

    fn add_delay(&mut self, delay_us: u64) {
        let rounded_bits = (u64::BITS - delay_us.leading_zeros()).saturating_sub(Self::PRECISION_BITS);
        *self.by_length.entry(delay_us | ((1 << rounded_bits) - 1)).or_default() += 1;
        self.count += 1;
    }

    /// Number of delays.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Delay at a quantile in microseconds, by nearest rank; 0 without delays.
    pub fn value_at_quantile(&self, quantile: f64) -> u64 {
        let rank = (quantile * self.count as f64).ceil();
        let mut counted = 0;
        let mut lengths = self.by_length.iter();
        let found = lengths.find(|(_, count)| {
            counted += **count;
            counted as f64 >= rank
        });
        found.map_or(0, |(length, _)| *length)
    }
}

impl DistinctKeyCounter {
    /// Adds a key; `is_new` is `None` if that is not known.
    fn add_key(&mut self, path: u128, is_new: Option<bool>) {
        match is_new {
            Some(false) => {}
            Some(true) => {
                self.exact += 1;
                self.sketch.add_hash(upper_half(path));
            }
            None => {
                self.is_estimate = true;
                self.sketch.add_hash(upper_half(path));
            }
        }
    }

    /// Number of distinct keys.
    pub fn count(&self) -> u64 {
        if self.is_estimate { self.sketch.estimate().max(self.exact) } else { self.exact }
    }

    /// True if the number is an estimate.
    pub const fn is_estimate(&self) -> bool {
        self.is_estimate
    }
}

/// Rejections by limit and key.
#[derive(Debug)]
pub struct KeyRejectionTallies {
    keys: PrehashedMap<KeyRejectionState>,
    max_keys: usize,
    /// Charges of keys beyond the bound.
    pub untracked: u64,
}

/// What one limit did to one key: whether it saw and rejected it, and its rejections since the last admission.
#[derive(Clone, Copy, Debug, Default)]
struct KeyRejectionState {
    /// Rejections since the last admission.
    run: u32,
    is_known: bool,
    was_rejected: bool,
    run_start_us: u64,
}

/// Changes that a charge makes to its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChargeEffectOnKey {
    /// First charge of the key.
    pub is_new: bool,
    /// First rejection of the key.
    pub is_first_rejection: bool,
    /// Rejections in a row until now.
    pub run: RejectionRun,
}

/// Rejections of one key in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RejectionRun {
    /// Rejected requests.
    pub requests: u32,
    /// Microseconds from the first to the last.
    pub duration_us: u64,
}

/// Identity of a key of a limit.
#[derive(Clone, Copy, Debug)]
pub struct KeyId(u128);

impl KeyId {
    /// Combines the hash of a path with the index of a limit.
    pub const fn new(path: u128, limit: usize) -> Self {
        Self(path ^ (limit as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }
}

impl KeyRejectionTallies {
    /// Creates counts of up to `max_keys` keys.
    pub fn new(max_keys: usize) -> Self {
        Self { keys: PrehashedMap::default(), max_keys, untracked: 0 }
    }

    /// Counts a charge; `None` if the key is beyond the bound.
    pub fn add_charge(&mut self, key: KeyId, at: Time, rejected: bool) -> Option<ChargeEffectOnKey> {
        let is_full = self.keys.len() >= self.max_keys;
        let tally = if is_full { self.keys.get_mut(&key.0) } else { Some(self.keys.entry(key.0).or_default()) };
        let Some(tally) = tally else {
            self.untracked += 1;
            return None;
        };
        let is_new = !std::mem::replace(&mut tally.is_known, true);
        if !rejected {
            tally.run = 0;
            return Some(ChargeEffectOnKey { is_new, ..ChargeEffectOnKey::default() });
        }
        if tally.run == 0 {
            tally.run_start_us = at.as_micros();
        }
        tally.run = tally.run.saturating_add(1);
        let is_first_rejection = !std::mem::replace(&mut tally.was_rejected, true);
        let duration_us = at.since_us(Time::from_micros(tally.run_start_us));
        Some(ChargeEffectOnKey { is_new, is_first_rejection, run: RejectionRun { requests: tally.run, duration_us } })
    }
}

/// Maximum number of spans.
const MAX_SPANS: usize = 120;
/// Length of the first spans, in microseconds.
const INITIAL_SPAN_US: u64 = 1_000_000;

/// Counts over time.
#[derive(Clone, Debug)]
pub struct Timeline {
    start: Time,
    span_us: u64,
    spans: Vec<SpanCounts>,
}

/// Counts of one span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// Requests.
    pub requests: u64,
    /// Rejected requests.
    pub rejected: u64,
}

impl Timeline {
    /// Creates an empty timeline that begins at `start`.
    pub const fn new(start: Time) -> Self {
        Self { start, span_us: INITIAL_SPAN_US, spans: Vec::new() }
    }

    /// Counts a request at `at`; one before the start counts in the first span.
    pub fn add_request(&mut self, at: Time, rejected: bool) {
        let since_us = at.since_us(self.start);
        let mut index = since_us / self.span_us;
        while index >= MAX_SPANS as u64 {
            self.join_neighbouring_spans();
            index = since_us / self.span_us;
        }
        let index = usize::try_from(index).unwrap_or(MAX_SPANS - 1);
        if index >= self.spans.len() {
            self.spans.resize(index + 1, SpanCounts::default());
        }
        let span = &mut self.spans[index];
        span.requests += 1;
        span.rejected += u64::from(rejected);
    }

    fn join_neighbouring_spans(&mut self) {
        let joined = self.spans.chunks(2).map(|pair| {
            pair.iter().fold(SpanCounts::default(), |sum, span| SpanCounts {
                requests: sum.requests + span.requests,
                rejected: sum.rejected + span.rejected,
            })
        });
        self.spans = joined.collect();
        self.span_us *= 2;
    }

    /// Joins spans until each is `span_us` long or longer, to compare with another timeline.
    pub fn widen_spans(&mut self, span_us: u64) {
        while self.span_us < span_us {
            self.join_neighbouring_spans();
        }
    }

    /// Start of the first span.
    pub const fn start_time(&self) -> Time {
        self.start
    }

    /// Length of a span, in microseconds.
    pub const fn span_length_us(&self) -> u64 {
        self.span_us
    }

    /// Counts of each span, up to the last one with a request.
    pub fn spans(&self) -> &[SpanCounts] {
        &self.spans
    }
}
