//! Summary that a replica publishes about itself: one JSON object of at most [`MAX_SUMMARY_BYTES`].
//!
//! Readers ignore fields that they do not know; a change that old readers would misread raises [`SUMMARY_VERSION`].
//! Names and keys are listed once and referred to by index. Anyone who can write to Redis can publish a summary, so a
//! reader trusts no number and no index in it.
//!
//! Decides: fields and size of the summary that a replica publishes.

use serde::{Deserialize, Serialize};

use super::finding::Finding;
use crate::serve::quota::page::QuotaTotals;
use crate::serve::status::{RecentDecisionCounts, RulesStatus, StoreStatus};
use crate::telemetry::top_keys::UnenforcedMode;

/// Version of the format.
pub const SUMMARY_VERSION: u32 = 2;
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
    pub rules: RulesStatus,
    /// Slot of eventual rules.
    pub slot: Option<u32>,
    /// State of the store.
    pub store: StoreStatus,
    /// What is wrong with the replica, at most [`MAX_FINDINGS`](super::finding::MAX_FINDINGS).
    pub findings: Vec<Finding>,
    /// Decisions of about the last minute.
    pub recent: RecentDecisionCounts,
    /// Blocked values.
    pub blocks: BlocksSummary,
    /// Quota streams, and what the replica holds for them; `None` if the service is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<QuotaTotals>,
    /// Names of limits.
    pub names: Vec<String>,
    /// Domain of each name, as requests name it.
    #[serde(default)]
    pub domains: Vec<String>,
    /// Form of the keys.
    pub values: PublishedKeyForm,
    /// Rejected keys.
    pub keys: Vec<RejectedKeySummary>,
    /// Rejected hits of these keys by minute.
    pub minutes: Vec<RejectedKeysMinuteSummary>,
    /// Keys with most hits in ten minutes, rejected or not, the busiest first.
    pub busy: Vec<BusyKeySummary>,
}

/// Blocked values of a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlocksSummary {
    /// Number of blocked values.
    pub values: u64,
    /// Number of requests that were rejected because of them, since the start.
    pub rejected_requests: u64,
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
    /// Why the limit rejected nothing; absent if it did.
    #[serde(rename = "m", default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<UnenforcedMode>,
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
