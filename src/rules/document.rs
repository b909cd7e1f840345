//! A rule document as written, with positions: nothing is merged, defaulted or compared.
//!
//! `read` converts a tree of YAML nodes into these types and reports errors of single keys: unknown and misplaced keys,
//! wrong types, numbers out of range. Such a key is left out, so that the rest is still read. Contradictions between
//! keys are for `compile`.

pub mod value;
pub mod fields;
pub mod defaults;
pub mod matching;
pub mod read;

use std::sync::Arc;

use self::defaults::DefaultableKeys;
use self::matching::{MatchSpec, MatchingSpec};
use crate::limit::active::ActiveSpec;
use crate::limit::ban::Ban;
use crate::limit::reservation::ReservationPolicy;
use crate::rules::rule::RuleLogging;
use crate::rules::yaml::{Position, Spanned};

/// Maximum number of descriptors of all rules that are compiled together.
pub const MAX_DESCRIPTORS: usize = 300_000;

/// One document: one domain.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// Position of its first key.
    pub at: Position,
    /// `domain`; can be absent.
    pub domain: Option<Spanned<String>>,
    /// `defaults`, if written.
    pub defaults: Option<Spanned<DefaultableKeys>>,
    /// `matching`, if written.
    pub matching: Option<Spanned<MatchingSpec>>,
    /// `plans`, in the order written.
    pub plans: Vec<PlanSpec>,
    /// `tables`, in the order written.
    pub tables: Vec<TableSpec>,
    /// `descriptors`.
    pub descriptors: Vec<DescriptorSpec>,
    /// A key could not be read and was reported, so that a missing domain is not reported too.
    pub unreadable: bool,
}

/// An element of `plans`.
#[derive(Clone, Debug, Default)]
pub struct PlanSpec {
    /// Name.
    pub name: Spanned<String>,
    /// Limits of the plan, as in `rate_limit`.
    pub rate_limit: RateLimitSpec,
}

/// An element of `tables`.
#[derive(Clone, Debug, Default)]
pub struct TableSpec {
    /// Name.
    pub name: Spanned<String>,
    /// `file`.
    pub file: Option<Spanned<String>>,
    /// `redis`.
    pub redis: Option<Spanned<String>>,
    /// `keep`, in microseconds.
    pub keep_us: Option<Spanned<u64>>,
    /// A key could not be read and was reported, so that a missing key is not reported too.
    pub unreadable: bool,
}

/// Value of `plan`.
#[derive(Clone, Debug, Default)]
pub struct PlanChoiceSpec {
    /// `from`: name of the table.
    pub from: Option<Spanned<String>>,
    /// `key`: key of the entry whose value is looked up.
    pub key: Option<Spanned<String>>,
    /// `default`: name of the plan of values without a row.
    pub default: Option<Spanned<String>>,
    /// A key could not be read and was reported, so that a missing key is not reported too.
    pub unreadable: bool,
}

/// An element of `descriptors`.
#[derive(Clone, Debug, Default)]
pub struct DescriptorSpec {
    /// Position of its first key.
    pub at: Position,
    /// Index in the list as written, from 0.
    pub index: usize,
    /// `key`; empty if not written.
    pub key: Spanned<String>,
    /// `value`; empty if not written.
    pub value: String,
    /// `match`, if written; without a value if that was reported.
    pub matching: Option<Spanned<Option<MatchSpec>>>,
    /// `rate_limit`.
    pub rate_limit: RateLimitSpec,
    /// `plan`, if written.
    pub plan: Option<Spanned<PlanChoiceSpec>>,
    /// `shadow_mode`.
    pub shadow_mode: bool,
    /// `quota_mode`.
    pub quota_mode: bool,
    /// `detailed_metric`.
    pub detailed_metric: bool,
    /// `decision_log`.
    pub logging: Option<RuleLogging>,
    /// `value_to_metric`.
    pub value_to_metric: bool,
    /// `share_threshold`, if written.
    pub share_threshold: Option<Spanned<bool>>,
    /// `metadata`.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// `over_limit_body`; rules share the text.
    pub over_limit_body: Option<Spanned<Arc<str>>>,
    /// `over_limit_content_type`.
    pub over_limit_content_type: Option<Spanned<Arc<str>>>,
    /// `descriptors`.
    pub descriptors: Vec<DescriptorSpec>,
    /// A key could not be read and was reported, so that a missing key is not reported too.
    pub unreadable: bool,
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

/// One limit: the mapping of `rate_limit`, or an element of its list.
#[derive(Clone, Debug, Default)]
pub struct RateLimitEntry {
    /// Position of its first key.
    pub at: Position,
    /// Index in the list as written, from 0; `None` for a mapping.
    pub index: Option<usize>,
    /// `unit`.
    pub unit: Option<Spanned<String>>,
    /// `unit_multiplier`.
    pub unit_multiplier: Option<Spanned<u32>>,
    /// `requests_per_unit`; 0 if not written.
    pub requests_per_unit: Spanned<u32>,
    /// `unlimited`.
    pub unlimited: bool,
    /// `name`; empty if not written.
    pub name: Spanned<String>,
    /// Names in `replaces`, including empty ones.
    pub replaces: Vec<Spanned<String>>,
    /// `shadow_mode` in a list.
    pub shadow_mode: bool,
    /// `quota_mode` in a list.
    pub quota_mode: bool,
    /// `requests_per_unit` is written, and 0.
    pub rejects_all: bool,
    /// `ban`.
    pub ban: Option<Spanned<Ban>>,
    /// `reservations`.
    pub reservations: Option<Spanned<ReservationPolicy>>,
    /// `concurrent`.
    pub concurrent: Option<Spanned<u32>>,
    /// `max_duration`, in microseconds.
    pub max_duration_us: Option<Spanned<u64>>,
    /// Position of `requests_per_unit`, if written.
    pub requests_at: Option<Position>,
    /// `active`.
    pub active: Option<Spanned<ActiveSpec>>,
    /// `bucket_size`.
    pub bucket_size: Option<Spanned<u32>>,
    /// Keys that `defaults` can contain too.
    pub defaultable: DefaultableKeys,
    /// A key could not be read and was reported, so that errors that follow from it are not.
    pub unreadable: bool,
}
