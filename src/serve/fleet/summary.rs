//! Summary that a replica publishes about itself: one JSON object of at most [`MAX_SUMMARY_BYTES`].
//!
//! Readers ignore fields that they do not know; a change that old readers would misread raises [`SUMMARY_VERSION`].
//! Names and keys are listed once and referred to by index. Anyone who can write to Redis can publish a summary, so a
//! reader trusts no number and no index in it.
//!
//! Decides: fields and size of the summary that a replica publishes.

use serde::{Deserialize, Serialize};

use super::findings::Finding;
use crate::serve::quota::page::QuotaTotals;
use crate::telemetry::metrics::histogram::BUCKET_BOUNDS_US;

/// Version of the format.
pub const SUMMARY_VERSION: u32 = 2;
/// Version of the bounds of latency histograms; changes together with [`BUCKET_BOUNDS_US`].
pub const LATENCY_BOUNDS_VERSION: u32 = 1;
/// Maximum size of a published summary in bytes, its authentication code included.
pub const MAX_SUMMARY_BYTES: usize = 64 << 10;

/// Summary of a replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaSummary {
    /// Version of the format.
    pub v: u32,
    /// Random id of the process.
    pub incarnation: String,
    /// Host name.
    pub name: String,
    /// Version of tollkeeper.
    pub build: String,
    /// Start of the process, in microseconds of Redis's clock.
    pub started_us: u64,
    /// Time of publishing, in microseconds of Redis's clock.
    pub published_us: u64,
    /// Time of Redis less that of the process, in microseconds.
    pub clock_offset_us: i64,
    /// Loaded rules.
    pub rules: RulesSummary,
    /// Slot of eventual rules.
    pub slot: Option<u32>,
    /// State of the store.
    pub store: StoreSummary,
    /// What is wrong with the replica, at most [`MAX_FINDINGS`](super::findings::MAX_FINDINGS).
    pub findings: Vec<Finding>,
    /// Decisions of about the last minute.
    pub recent: RecentDecisionsSummary,
    /// Blocked values.
    pub blocks: BlocksSummary,
    /// Quota streams, and what the replica holds for them; `None` if the service is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<QuotaTotals>,
    /// Names of limits.
    pub names: Vec<String>,
    /// Length of the domain at the start of each name, in bytes.
    pub domain_bytes: Vec<u32>,
    /// Form of the keys.
    pub values: PublishedKeyForm,
    /// Rejected keys.
    pub keys: Vec<RejectedKeySummary>,
    /// Rejected hits of these keys by minute.
    pub minutes: Vec<RejectedKeysMinuteSummary>,
    /// Keys with most hits in ten minutes, rejected or not, the busiest first.
    pub busy: Vec<BusyKeySummary>,
}

/// Loaded rules of a replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RulesSummary {
    /// Version at the source, if it has versions.
    pub version: Option<String>,
    /// Hash of the rule texts; empty without rules.
    pub hash: String,
    /// Number of rules.
    pub rules: usize,
    /// True if the last attempt to load rules failed.
    pub load_failed: bool,
}

/// Blocked values of a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlocksSummary {
    /// Number of blocked values.
    pub values: u64,
    /// Number of requests that were rejected because of them, since the start.
    pub rejected_requests: u64,
}

/// State of a replica's store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreSummary {
    /// `redis`.
    pub kind: String,
    /// True if the store answers.
    pub available: bool,
    /// Number of servers whose breaker is open.
    pub breakers_open: usize,
    /// Number of servers.
    pub servers: usize,
}

/// Numbers and latency of the decisions of about the last minute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentDecisionsSummary {
    /// Duration in microseconds.
    pub span_us: u64,
    /// Number of calls.
    pub calls: u64,
    /// Number of requests that were rejected.
    pub rejected: u64,
    /// Number of descriptors that matched no rule.
    pub unmatched: u64,
    /// Decisions of limits by verdict.
    pub verdicts: DecisionsByVerdict,
    /// Duration of decisions.
    pub latency: LatencySummary,
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
pub struct LatencySummary {
    /// Version of the bounds.
    pub bounds: u32,
    /// Number of durations in each bucket; the last one is above all bounds.
    pub counts: Vec<u64>,
}

/// Form of the keys in a summary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PublishedKeyForm {
    /// With values as sent.
    #[default]
    Plain,
    /// With hashes of the values, by a key that all replicas share.
    Hashed,
    /// There are no keys.
    None,
}

/// A rejected key: its text, and the index of its limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectedKeySummary {
    /// Index of the limit's name.
    #[serde(rename = "n")]
    pub name: usize,
    /// Text of the key.
    #[serde(rename = "t")]
    pub text: String,
}

/// A key with many hits: its text, the index of its limit, and an estimate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusyKeySummary {
    /// Index of the limit's name.
    #[serde(rename = "n")]
    pub name: usize,
    /// Text of the key.
    #[serde(rename = "t")]
    pub text: String,
    /// Estimated number of hits.
    #[serde(rename = "h")]
    pub hits: u64,
}

/// Rejected hits in one minute, by key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectedKeysMinuteSummary {
    /// Minutes of Redis's clock since the Unix epoch.
    #[serde(rename = "m")]
    pub minute: u64,
    /// Upper bound of the rejected hits of every key that the minute lacks.
    #[serde(rename = "f")]
    pub max_missed: u64,
    /// Counts of keys, the most rejected first.
    #[serde(rename = "k")]
    pub counts: Vec<RejectedKeyCountSummary>,
}

/// Bounds of the rejected hits of a key in one minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectedKeyCountSummary {
    /// Index of the key.
    #[serde(rename = "k")]
    pub key: usize,
    /// Lower bound of the hits.
    #[serde(rename = "l")]
    pub at_least: u64,
    /// Upper bound of the hits.
    #[serde(rename = "u")]
    pub at_most: u64,
    /// Lower bound of the requests.
    #[serde(rename = "r")]
    pub requests: u64,
}

impl PublishedKeyForm {
    /// Name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Hashed => "hashed",
            Self::None => "no",
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

impl LatencySummary {
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
