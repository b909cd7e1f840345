//! Merged summaries of all replicas at one time.
//!
//! `redis_client` has the time after which a silent replica is left out, and the maximum number of replicas; `merge_keys`
//! merges rejected and busiest keys.
//!
//! Decides: which replicas `/fleet` shows, in which order; two with one name.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::authentication::{AuthenticationKey, SummaryError, decode_summary};
use super::finding::{Finding, MAX_FINDINGS, merge_equal_findings};
use super::merge_keys::{MergedBusiestKeys, MergedRejectedKeys};
use super::redis_client::SUMMARY_LIFETIME;
use super::summary::ReplicaSummary;
use crate::base::clock::{Time, shorten_in_tests, to_micros};

/// Tolerated difference between the time in a summary and that of Redis, in microseconds.
const CLOCK_TOLERANCE_US: u64 = 5_000_000;
/// Microseconds in a minute.
const US_PER_MINUTE: u64 = 60_000_000;
/// Maximum length of a text in a summary that is shown, in bytes.
const MAX_SHOWN_TEXT_BYTES: usize = 256;
/// Number of characters of an incarnation that tell replicas of one name apart.
const SHOWN_ID_CHARS: usize = 6;

/// Merged summaries of all replicas at one time.
#[derive(Debug)]
pub struct FleetView {
    /// Reason why other replicas are missing; `None` if they were read.
    pub problem: Option<String>,
    /// Time of Redis, or of this process without Redis.
    pub now: Time,
    /// Summaries without keys and findings: this replica first, then the others by name.
    pub replicas: Vec<ReplicaSummary>,
    /// Rejected keys.
    pub keys: MergedRejectedKeys,
    /// Keys with most hits.
    pub busiest: MergedBusiestKeys,
    /// What is wrong: with this replica, with others, and between them.
    pub findings: Vec<Finding>,
    /// Number of summaries that were left out, by reason.
    pub left_out: BTreeMap<SummaryError, usize>,
}

/// Merges summaries one after the other.
#[derive(Debug)]
pub struct FleetViewBuilder {
    view: FleetView,
    known: HashSet<String>,
    /// What replicas published, by incarnation.
    findings: Vec<(String, Finding)>,
}

impl FleetView {
    /// Minute of the view since the Unix epoch.
    pub const fn unix_minute(&self) -> u64 {
        self.now.as_micros() / US_PER_MINUTE
    }
}

impl FleetViewBuilder {
    /// Starts with the summary of this replica.
    pub fn new(own: ReplicaSummary, now: Time) -> Self {
        let view = FleetView {
            problem: None,
            now,
            replicas: Vec::new(),
            keys: MergedRejectedKeys::default(),
            busiest: MergedBusiestKeys::default(),
            findings: Vec::new(),
            left_out: BTreeMap::new(),
        };
        let mut builder = Self { view, known: HashSet::new(), findings: Vec::new() };
        builder.known.insert(own.incarnation.clone());
        builder.merge_summary(own);
        builder
    }

    /// Adds a summary that was published under `id`; that of this replica is not added again.
    pub fn add_published_summary(&mut self, id: &str, sealed: &[u8], key: Option<&AuthenticationKey>) {
        if !self.known.insert(id.to_owned()) {
            return;
        }
        let summary = decode_summary(sealed, key).and_then(|summary| self.check_summary(id, summary));
        match summary {
            Ok(summary) => self.merge_summary(summary),
            Err(reason) => *self.view.left_out.entry(reason).or_default() += 1,
        }
    }

    fn check_summary(&self, id: &str, summary: ReplicaSummary) -> Result<ReplicaSummary, SummaryError> {
        let now_us = self.view.now.as_micros();
        let oldest =
            now_us.saturating_sub(to_micros(shorten_in_tests(SUMMARY_LIFETIME))).saturating_sub(CLOCK_TOLERANCE_US);
        let newest = now_us.saturating_add(CLOCK_TOLERANCE_US);
        match check_identity(id, summary)? {
            summary if !(oldest..=newest).contains(&summary.published_us) => Err(SummaryError::Outdated),
            summary => Ok(summary),
        }
    }

    fn merge_summary(&mut self, mut summary: ReplicaSummary) {
        if !self.view.keys.add_summary(&summary, self.view.unix_minute()) {
            *self.view.left_out.entry(SummaryError::Contradictory).or_default() += 1;
        }
        self.view.busiest.add_summary(&summary);
        let findings = std::mem::take(&mut summary.findings).into_iter();
        self.findings.extend(findings.map(|finding| (summary.incarnation.clone(), finding)));
        // Only what is shown for each replica is kept.
        summary.names = Vec::new();
        summary.domains = Vec::new();
        summary.keys = Vec::new();
        summary.minutes = Vec::new();
        summary.busy = Vec::new();
        if !summary.recent.latency.has_known_bounds() {
            summary.recent.latency.counts = Vec::new();
        }
        self.view.replicas.push(summary);
    }

    /// Ends the view. `problem` tells why other replicas are missing.
    pub fn finish_view(mut self, problem: Option<String>) -> FleetView {
        self.view.problem = problem;
        if let Some((_, others)) = self.view.replicas.split_first_mut() {
            others.sort_by(|a, b| (&a.name, &a.incarnation).cmp(&(&b.name, &b.incarnation)));
        }
        make_names_unique(&mut self.view.replicas);
        let names: HashMap<&str, &str> =
            self.view.replicas.iter().map(|replica| (&*replica.incarnation, &*replica.name)).collect();
        let named = self.findings.into_iter().filter_map(|(id, finding)| Some((*names.get(&*id)?, finding)));
        self.view.findings = merge_equal_findings(named);
        self.view
    }

    /// Records that this many replicas were left out because they are beyond the maximum.
    pub(super) fn record_replicas_beyond_maximum(&mut self, count: usize) {
        if count > 0 {
            *self.view.left_out.entry(SummaryError::TooMany).or_default() += count;
        }
    }
}

/// Returns the summary if it is that of the process `id`, and its texts are short.
fn check_identity(id: &str, summary: ReplicaSummary) -> Result<ReplicaSummary, SummaryError> {
    let texts = [
        Some(&summary.name),
        Some(&summary.build),
        Some(&summary.rules.hash),
        summary.rules.version.as_ref(),
        Some(&summary.store.kind),
    ];
    let is_short = texts.into_iter().flatten().all(|text| text.len() <= MAX_SHOWN_TEXT_BYTES);
    let is_short =
        is_short && summary.findings.len() <= MAX_FINDINGS && summary.findings.iter().all(Finding::fits_bounds);
    if summary.incarnation == id && is_short { Ok(summary) } else { Err(SummaryError::Malformed) }
}

/// Adds the start of the incarnation to names that several replicas have, as processes of one host do.
fn make_names_unique(replicas: &mut [ReplicaSummary]) {
    let mut counts: HashMap<String, usize> = HashMap::new();
    replicas.iter().for_each(|replica| *counts.entry(replica.name.clone()).or_default() += 1);
    for replica in replicas.iter_mut().filter(|replica| counts.get(&replica.name).is_some_and(|count| *count > 1)) {
        let id: String = replica.incarnation.chars().take(SHOWN_ID_CHARS).collect();
        replica.name = format!("{}/{id}", replica.name);
    }
}
