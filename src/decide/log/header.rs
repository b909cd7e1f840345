//! Headers of the decision log: the settings and rules from which a tool repeats the decisions that follow.

use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

use crate::limit::StoreFailurePolicy;

/// Settings and rules: at the start of a process, at each reload, at the start of each file, and in a stream again once
/// the last one is trimmed away.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeaderRecord {
    /// Reason for the header.
    pub event: HeaderReason,
    /// Random id of the process.
    pub process: String,
    /// Number of the last record before; 0 at the start.
    pub seq: u64,
    /// Time in microseconds since the Unix epoch.
    pub time_us: u64,
    /// Version of the program.
    pub program: String,
    /// Store of the counters: `memory`, `redis` or `memcache`.
    pub store: String,
    /// Settings that change answers, and those of the log.
    pub settings: SettingsRecord,
    /// Rules; absent before any were loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<RuleSetRecord>,
}

/// Reason for a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeaderReason {
    /// The process started; counters in memory are empty.
    Start,
    /// The rules were replaced.
    Reload,
    /// A new file begins, or a stream was trimmed; settings and rules are those of before.
    Rotation,
}

/// Settings that change answers, and those of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SettingsRecord {
    /// `SHADOW_MODE`.
    pub shadow_mode: bool,
    /// `QUOTA_MODE`.
    pub quota_mode: bool,
    /// `STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT`.
    pub stop_cache_key_increment_when_overlimit: bool,
    /// `MERGE_DOMAIN_CONFIG`.
    pub merge_domains: bool,
    /// `USE_CALENDAR_MONTH_RATE_LIMIT`.
    pub calendar_months: bool,
    /// `TOLLKEEPER_LOG_MAX`.
    pub log_max: u32,
    /// `TOLLKEEPER_ON_STORE_ERROR`.
    pub on_store_error: StoreFailurePolicy,
    /// `TOLLKEEPER_MAX_REPLICAS`.
    pub max_replicas: u32,
    /// Number of regions of `TOLLKEEPER_REGIONS`; absent if there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub regions: Option<NonZeroU16>,
    /// `TOLLKEEPER_DECISION_LOG_WHEN`.
    pub when: Vec<String>,
    /// `TOLLKEEPER_DECISION_LOG_SAMPLE`, 0 to 1.
    pub sample: f64,
    /// `TOLLKEEPER_DECISION_LOG_VALUES`.
    pub values: String,
}

/// A rule set, from which the same rules can be compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleSetRecord {
    /// Hash of the documents: equal in all replicas with equal rules.
    pub id: String,
    /// Version that the control plane gives the rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Rule files or resources, in the order in which they are compiled.
    pub documents: Vec<RuleDocumentRecord>,
}

/// A rule file, or a resource of a control plane. It has either `text` or `base64`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleDocumentRecord {
    /// Name in messages.
    pub name: String,
    /// Format of the contents.
    pub format: RuleDocumentFormat,
    /// Contents, if they are UTF-8 text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Any other contents, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
}

/// Format of a rule document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleDocumentFormat {
    /// YAML or JSON; all documents of the text count.
    Yaml,
    /// YAML or JSON; only the first document of the text counts.
    YamlFirst,
    /// A `RateLimitConfig` of a control plane, in protobuf.
    Xds,
    /// The file of `TOLLKEEPER_RULE_DEFAULTS`, in YAML or JSON.
    RuleDefaults,
    /// A file with a set that a rule names; the name is that of the rule file, `#`, and that in the rule.
    Set,
    /// The same, with the hash of the contents in their place: they are too large for the log.
    SetHash,
}
