//! Merged summaries of all replicas at one time.

use std::collections::{BTreeMap, HashSet};

use super::envelope::{SummaryError, SummaryKey, open};
use super::exchange::SUMMARY_LIFETIME;
use super::merge_keys::MergedKeys;
use super::merge_limits::MergedLimits;
use super::summary::ReplicaSummary;
use crate::clock::{Time, micros};

/// Tolerated difference between the time in a summary and that of Redis, in microseconds.
const CLOCK_TOLERANCE_US: u64 = 5_000_000;
/// Microseconds in a minute.
const MINUTE_US: u64 = 60_000_000;
/// Maximum length of a text in a summary that is shown, in bytes.
const MAX_SHOWN_BYTES: usize = 256;

/// Merged summaries of all replicas at one time.
#[derive(Debug)]
pub struct FleetView {
    /// Reason why other replicas are missing; `None` if they were read.
    pub problem: Option<String>,
    /// Time of Redis, or of this process without Redis.
    pub now: Time,
    /// Summaries without keys and limits: this replica first, then the others by name.
    pub replicas: Vec<ReplicaSummary>,
    /// Rejected keys.
    pub keys: MergedKeys,
    /// Decisions by limit.
    pub limits: MergedLimits,
    /// Number of summaries that were left out, by reason.
    pub left_out: BTreeMap<SummaryError, usize>,
}

/// Merges summaries one after the other.
#[derive(Debug)]
pub(super) struct ViewBuilder {
    view: FleetView,
    distinct_seed: Option<String>,
    known: HashSet<String>,
}

impl FleetView {
    /// Minute of the view since the Unix epoch.
    pub const fn minute(&self) -> u64 {
        self.now.as_micros() / MINUTE_US
    }
}

impl ViewBuilder {
    /// Starts with the summary of this replica.
    pub(super) fn new(own: ReplicaSummary, now: Time) -> Self {
        let view = FleetView {
            problem: None,
            now,
            replicas: Vec::new(),
            keys: MergedKeys::default(),
            limits: MergedLimits::default(),
            left_out: BTreeMap::new(),
        };
        let mut builder = Self { view, distinct_seed: own.distinct_seed.clone(), known: HashSet::new() };
        builder.known.insert(own.incarnation.clone());
        builder.merge(own);
        builder
    }

    /// Adds a summary that was published under `id`; that of this replica is not added again.
    pub(super) fn add(&mut self, id: &str, sealed: &[u8], key: Option<&SummaryKey>) {
        if !self.known.insert(id.to_owned()) {
            return;
        }
        let summary = open(sealed, key).and_then(|summary| self.check(id, summary));
        match summary {
            Ok(summary) => self.merge(summary),
            Err(reason) => *self.view.left_out.entry(reason).or_default() += 1,
        }
    }

    fn check(&self, id: &str, summary: ReplicaSummary) -> Result<ReplicaSummary, SummaryError> {
        let now_us = self.view.now.as_micros();
        let oldest = now_us.saturating_sub(micros(SUMMARY_LIFETIME)).saturating_sub(CLOCK_TOLERANCE_US);
        let newest = now_us.saturating_add(CLOCK_TOLERANCE_US);
        let texts = [
            Some(&summary.name),
            Some(&summary.build),
            Some(&summary.rules.hash),
            summary.rules.version.as_ref(),
            Some(&summary.store.kind),
        ];
        let is_short = texts.into_iter().flatten().all(|text| text.len() <= MAX_SHOWN_BYTES);
        match summary {
            _ if summary.incarnation != id || !is_short => Err(SummaryError::Malformed),
            _ if !(oldest..=newest).contains(&summary.published_us) => Err(SummaryError::Outdated),
            summary => Ok(summary),
        }
    }

    fn merge(&mut self, mut summary: ReplicaSummary) {
        if !self.view.keys.add(&summary, self.view.minute()) {
            *self.view.left_out.entry(SummaryError::Contradictory).or_default() += 1;
        }
        self.view.limits.add(&summary, self.distinct_seed.as_deref());
        // Only what is shown for each replica is kept.
        summary.names = Vec::new();
        summary.limits = Vec::new();
        summary.keys = Vec::new();
        summary.minutes = Vec::new();
        if !summary.recent.latency.has_known_bounds() {
            summary.recent.latency.counts = Vec::new();
        }
        self.view.replicas.push(summary);
    }

    /// Ends the view. `problem` tells why other replicas are missing.
    pub(super) fn finish(mut self, problem: Option<String>) -> FleetView {
        self.view.problem = problem;
        if let Some((_, others)) = self.view.replicas.split_first_mut() {
            others.sort_by(|a, b| (&a.name, &a.incarnation).cmp(&(&b.name, &b.incarnation)));
        }
        self.view
    }

    /// Counts replicas beyond the maximum.
    pub(super) fn left_out_beyond_maximum(&mut self, count: usize) {
        if count > 0 {
            *self.view.left_out.entry(SummaryError::TooMany).or_default() += count;
        }
    }
}
