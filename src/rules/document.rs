//! A rule document as written, with positions: nothing is merged, defaulted or compared.
//!
//! Each structure declares the keys of a mapping, and how their values are read ([`keys`]). Errors of single keys are
//! reported: unknown and misplaced keys, wrong types, numbers out of range. Such a key is left out, so that the rest is
//! still read. Contradictions between keys are for `compile`.
//!
//! Decides: which keys a rule file has, where, and their defaults.

pub mod value;
pub mod fields;
pub mod keys;
pub mod defaults;
pub mod matching;
pub mod notify;
pub mod rejection;
pub mod times;
pub mod defaults_file;
pub mod read;

use std::sync::Arc;

use self::defaults::DefaultableKeys;
use self::keys::rule_keys;
use self::matching::{MatchSpec, MatchingSpec};
use self::rejection::RejectionKeys;
use crate::limit::MAX_REQUESTS_PER_UNIT;
use crate::limit::active::ActiveSpec;
use crate::limit::ban::Ban;
use crate::limit::reservation::ReservationPolicy;
use crate::rules::rule::notify_levels::NotifyLevels;
use crate::rules::rule::rejection_body::{RejectionBody, RejectionFormat};
use crate::rules::rule::{RejectionHeaders, RuleLogging};
use crate::rules::yaml::{Position, Spanned};

/// Maximum number of descriptors of all rules that are compiled together.
pub const MAX_DESCRIPTORS: usize = 300_000;

rule_keys! {
    /// One document: one domain.
    #[derive(Clone, Debug, Default)]
    pub struct Document of [Root] {
        envoy "domain" domain: Option<Spanned<String>>,
            "The namespace that requests name. Required, and unique over all files unless domains are merged.";
        tollkeeper "defaults" defaults: Option<Spanned<DefaultableKeys>>,
            "Defaults for every rule of the domain, and for limits that are sent with a request.";
        tollkeeper "plans" plans: Vec<PlanSpec>,
            "Named limits for `plan`: each is one limit as a mapping, or several as a list, as in `rate_limit`.";
        tollkeeper "tables" tables: Vec<TableSpec>, "Tables that map values to plans, by name.";
        envoy "descriptors" descriptors: Vec<DescriptorSpec>,
            "The rules of this level, in order. An entry matches one of them: the exact value, else the first wildcard or match in this order, else the bare key.";
        tollkeeper "matching" matching: Option<Spanned<MatchingSpec>>,
            "How the descriptors of the domain are matched.";
    }
    also {
        /// Position of its first key.
        at: Position,
        /// A key could not be read and was reported, so that a missing domain is not reported too.
        unreadable: bool,
    }
}

/// An element of `plans`.
#[derive(Clone, Debug, Default)]
pub struct PlanSpec {
    /// Name.
    pub name: Spanned<String>,
    /// Limits of the plan, as in `rate_limit`.
    pub rate_limit: RateLimitSpec,
}

rule_keys! {
    /// An element of `tables`.
    #[derive(Clone, Debug, Default)]
    pub struct TableSpec of [Table] {
        tollkeeper "file" file: Option<Spanned<String>>,
            "File of the table, relative to the directory of the rule file: .csv with a heading, or .jsonl. It is watched.";
        tollkeeper "redis" redis: Option<Spanned<String>>,
            "Name of a table in the Redis of the counters, in place of file: a hash from values to plans or limits.";
        tollkeeper "keep" keep_us: Option<Spanned<u64>> as Duration,
            "redis only: lifetime of a row in this process; absent: 5m. A row that is used is looked up again after half of it. 1s to 24h.";
    }
    also {
        /// Name.
        name: Spanned<String>,
        /// A key could not be read and was reported, so that a missing key is not reported too.
        unreadable: bool,
    }
}

rule_keys! {
    /// Value of `plan`.
    #[derive(Clone, Debug, Default)]
    pub struct PlanLookupSpec of [Plan] {
        tollkeeper "from" from: Option<Spanned<String>>, "Name of the table. Required.";
        envoy "key" key: Option<Spanned<String>>,
            "The key of the entry whose value is looked up, if it is not the last.";
        tollkeeper "default" default: Option<Spanned<String>>, "Plan of values without a row. Required.";
    }
    also {
        /// A key could not be read and was reported, so that a missing key is not reported too.
        unreadable: bool,
    }
}

rule_keys! {
    /// An element of `descriptors`.
    #[derive(Clone, Debug, Default)]
    pub struct DescriptorSpec of [Descriptor] {
        envoy "key" key: Spanned<String>, "The key of a descriptor entry. Required.";
        envoy "value" value: String,
            "The value of the entry. If absent: any value, each with a counter of its own. Each `*` matches any run of characters, also an empty one.";
        tollkeeper "match" matching: Option<Spanned<Option<MatchSpec>>>,
            "The values of the entry, by one operator, in place of value.";
        envoy "rate_limit" rate_limit: RateLimitSpec,
            "Limits of a descriptor that ends here: one as a mapping, or several as a list, all of which must pass. If absent: no limit.";
        tollkeeper "plan" plan: Option<Spanned<PlanLookupSpec>>,
            "Plan whose limits decide, chosen by a table for each value; in place of rate_limit.";
        envoy "shadow_mode" shadow_mode: bool = "false",
            "Shadow mode: the limits of the descriptor are counted and reported, but reject nothing.";
        tollkeeper "enforced_share" enforced_share: Option<Spanned<u32>> as Percentage(1),
            "Percentage of keys whose requests the limits of the descriptor reject, chosen by a hash of the key; for other keys they are in shadow mode. If absent: all keys.";
        envoy "quota_mode" quota_mode: bool = "false",
            "Quota mode: the limits of the descriptor reject a request only together with all other quotas of that request.";
        tollkeeper "over_limit_body" over_limit_body: Option<Spanned<RejectionBody>>,
            "Body of a rejection, 64 KiB at most. It can have %LIMIT_NAME%, %LIMIT%, %REMAINING%, %RETRY_AFTER% (seconds) and %RETRY_AT%.";
        tollkeeper "over_limit_content_type" over_limit_content_type: Option<Spanned<Arc<str>>> as ContentType,
            "Content type of over_limit_body.";
        tollkeeper "over_limit_format" over_limit_format: Option<Spanned<RejectionFormat>>,
            "Body and content type of a rejection as in a well-known API, in place of over_limit_body.";
        tollkeeper "over_limit_headers" over_limit_headers: Option<Spanned<Arc<RejectionHeaders>>>,
            "Headers of a rejection, 16 at most: a mapping from names to values.";
        tollkeeper "jitter" jitter: Option<Spanned<u32>> as Percentage(0),
            "Random addition to the Retry-After of a rejection: at most this percentage of the wait, rounded up to whole seconds. If absent: none.";
        envoy "detailed_metric" detailed_metric: bool = "false",
            "Metrics of this rule are named after the whole path with the request's values. Avoid it where clients choose the values.";
        envoy "value_to_metric" value_to_metric: bool = "false",
            "Metrics of this rule and those below it are named after the request's value of this entry.";
        tollkeeper "decision_log" logging: Option<Spanned<RuleLogging>>,
            "Decisions of this rule that the decision log has, in place of TOLLKEEPER_DECISION_LOG_WHEN.";
        envoy "share_threshold" share_threshold: Option<Spanned<bool>> = "false",
            "All values that the wildcard or match matches share one counter.";
        envoy "metadata" metadata: Option<Spanned<serde_json::Map<String, serde_json::Value>>>,
            "Dynamic metadata to return when the descriptor passes, if RESPONSE_DYNAMIC_METADATA is on.";
        envoy "descriptors" descriptors: Vec<DescriptorSpec>,
            "The rules of the next level: what follows this entry in a descriptor.";
    }
    also {
        /// Position of its first key.
        at: Position,
        /// Index in the list as written, from 0.
        index: usize,
        /// An unknown or misplaced key was reported, so that a missing key is not reported too.
        unreadable: bool,
    }
}

impl DescriptorSpec {
    /// Keys of what a rejection tells.
    pub fn rejection_keys(&self) -> RejectionKeys<'_> {
        RejectionKeys {
            body: self.over_limit_body.as_ref(),
            content_type: self.over_limit_content_type.as_ref(),
            format: self.over_limit_format.as_ref(),
            headers: self.over_limit_headers.as_ref(),
            jitter: self.jitter.as_ref(),
        }
    }
}

/// Value of `rate_limit`.
#[derive(Clone, Debug, Default)]
pub enum RateLimitSpec {
    /// Not written.
    #[default]
    None,
    /// Mapping; the position is that of `rate_limit`.
    One(Spanned<Box<RateLimitEntry>>),
    /// List; the position is that of `rate_limit`.
    Many(Spanned<Vec<RateLimitEntry>>),
    /// Unreadable value, reported already.
    Unreadable,
}

rule_keys! {
    /// One limit: the mapping of `rate_limit`, or an element of its list.
    #[derive(Clone, Debug, Default)]
    pub struct RateLimitEntry of [RateLimit, Limit] {
        envoy "unit" unit: Option<Spanned<String>> as Unit,
            "The unit of the period; only a limit of 0 needs none: second, minute, hour, day, week (from Thursday 00:00 UTC), month (30 days) or year (365 days).";
        tollkeeper "unit_multiplier" unit_multiplier: Option<Spanned<u32>> as Count(1, u32::MAX as u64) = "1",
            "The period is the unit times this, 366 days at most.";
        envoy "requests_per_unit" requests_per_unit: Option<Spanned<u64>> as Count(0, MAX_REQUESTS_PER_UNIT) = "0",
            "Hits allowed in a period; 0 rejects everything. Above 4294967295 with a fixed_window or sliding_window_counter only.";
        envoy "unlimited" unlimited in [RateLimit]: bool = "false",
            "Admits everything, uncounted. Must not have a unit.";
        tollkeeper "ban" ban: Option<Spanned<Ban>>,
            "Bans a client that exceeds the limit: its counter rejects everything for this long. Further tries do not prolong it, unless count_rejected is true. Not for eventual and global limits.";
        tollkeeper "reservations" reservations: Option<Spanned<ReservationPolicy>>,
            "Requests charge an estimate of their cost, and the end of their streams settles with the true one. A duration is settle_within. Envoy must report the end of streams. Not for leaky_bucket, eventual and global limits.";
        tollkeeper "concurrent" concurrent: Option<Spanned<u32>>,
            "Streams at once, in place of requests in a period: each takes a slot, and frees it when it ends. 0 rejects everything. Envoy must report the end of streams.";
        tollkeeper "max_duration" max_duration_us: Option<Spanned<u64>> as WholeSeconds = "1h",
            "concurrent only: hard end of a slot whose stream is never reported to have ended, in whole seconds. Longer than any stream.";
        tollkeeper "active" active: Option<Spanned<ActiveSpec>>,
            "Times at which the limit exists. Outside them it counts nothing, rejects nothing and replaces nothing. If absent: always.";
        tollkeeper "bucket_size" bucket_size: Option<Spanned<u32>> as Count(1, u32::MAX as u64),
            "token_bucket: number of tokens, which can pass at once. If absent: requests_per_unit.";
        envoy "name" name: Spanned<String>, "The limit's name, returned to the client and used by replaces.";
        envoy "replaces" replaces: Vec<Spanned<String>>,
            "Names of the limits that this one replaces in the same request.";
        tollkeeper "overflow_to" overflow_to: Option<Spanned<String>>,
            "Name of the next limit of the list, which takes the hits that this one has no room for. Both together admit what both have room for. Not for leaky_bucket, concurrent, eventual and global limits, nor beside ban, reservations, count_rejected and max_wait.";
        tollkeeper "notify" notify: Option<Spanned<NotifyLevels>>,
            "Percentages of the limit, such as [50%, 80%, 100%]: when a key reaches one, the decision log and the process's log tell, once in each period. Not for concurrent.";
        envoy "shadow_mode" shadow_mode in [Limit]: bool = "false",
            "Shadow mode: the limit is counted and reported, but rejects nothing. With a name, beside a limit without these two: a candidate, which is charged as if it were the only limit.";
        envoy "quota_mode" quota_mode in [Limit]: bool = "false",
            "Quota mode: the limit rejects a request only together with all other quotas of that request.";
    }
    and defaultable: DefaultableKeys;
    also {
        /// Position of its first key.
        at: Position,
        /// Index in the list as written, from 0; `None` for a mapping.
        index: Option<usize>,
        /// A key could not be read and was reported, so that errors that follow from it are not.
        unreadable: bool,
    }
}

impl RateLimitEntry {
    /// Hits allowed in a period; 0 if not written.
    pub fn requests(&self) -> u64 {
        self.requests_per_unit.map_or(0, |requests| requests.value)
    }

    /// Position of a key; `None` if it is not written, or if the type of its field keeps no position (`name`,
    /// `replaces`, `unlimited`, the modes).
    pub fn written_position(&self, key: &str) -> Option<Position> {
        self.written_keys().find(|written| written.value == key).map(|written| written.at)
    }
}

rule_keys! {
    /// An element of `replaces`.
    #[derive(Clone, Debug, Default)]
    pub struct ReplacesKeys of [Replaces] {
        envoy "name" name: Option<Spanned<String>>, "The name of a limit that is replaced. Required.";
    }
}
