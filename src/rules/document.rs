//! A rule document as written, with positions: nothing is merged, defaulted or compared.
//!
//! `read` converts a tree of YAML nodes into these types and reports errors of single keys: unknown and misplaced keys,
//! wrong types, numbers out of range. Such a key is left out, so that the rest is still read. Contradictions between
//! keys are for `compile`.

pub mod value;
pub mod fields;
pub mod defaults;
pub mod read;

use std::sync::Arc;

use crate::limit::RegionLossPolicy;
use crate::limit::algorithm::Algorithm;
use crate::limit::{Overshoot, StorePolicy};
use crate::rules::rule::RuleLogging;
use crate::rules::yaml::Position;

/// A value with its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spanned<T> {
    /// Value as written.
    pub value: T,
    /// Position of its key; in a list, that of the value.
    pub at: Position,
}

/// One document: one domain.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// Position of its first key.
    pub at: Position,
    /// `domain`; can be absent.
    pub domain: Option<Spanned<String>>,
    /// `defaults`, if written.
    pub defaults: Option<Spanned<DefaultableKeys>>,
    /// `descriptors`.
    pub descriptors: Vec<DescriptorSpec>,
    /// A key could not be read and was reported, so that a missing domain is not reported too.
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
    /// `rate_limit`.
    pub rate_limit: RateLimitSpec,
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
    /// `over_limit_body` and `over_limit_content_type`.
    pub over_limit_body: OverLimitBodySpec,
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
    /// `bucket_size`.
    pub bucket_size: Option<Spanned<u32>>,
    /// Keys that `defaults` can contain too.
    pub defaultable: DefaultableKeys,
    /// A key could not be read and was reported, so that errors that follow from it are not.
    pub unreadable: bool,
}

/// Keys of a limit that `defaults` can contain too, for limits without them.
#[derive(Clone, Debug, Default)]
pub struct DefaultableKeys {
    /// `algorithm`.
    pub algorithm: Option<Spanned<Algorithm>>,
    /// `queue_size`.
    pub queue_size: Option<Spanned<u32>>,
    /// `max_wait`, in microseconds.
    pub max_wait_us: Option<Spanned<u64>>,
    /// `count_rejected`.
    pub count_rejected: Option<Spanned<bool>>,
    /// `consistency`; true for `eventual`.
    pub eventual: Option<Spanned<bool>>,
    /// `max_overshoot`.
    pub max_overshoot: Option<Spanned<Overshoot>>,
    /// `scope`; true for `global`.
    pub global: Option<Spanned<bool>>,
    /// `reserve`, in thousandths of a percent.
    pub reserve_milli_percent: Option<Spanned<u32>>,
    /// `on_region_loss`.
    pub on_region_loss: Option<Spanned<RegionLossPolicy>>,
    /// `on_store_error`.
    pub on_store_error: Option<Spanned<StorePolicy>>,
    /// `epoch`.
    pub epoch: Option<Spanned<u64>>,
    /// `over_limit_body` and `over_limit_content_type`.
    pub over_limit_body: OverLimitBodySpec,
}

impl DefaultableKeys {
    /// No keys.
    pub const NONE: Self = Self {
        algorithm: None,
        queue_size: None,
        max_wait_us: None,
        count_rejected: None,
        eventual: None,
        max_overshoot: None,
        global: None,
        reserve_milli_percent: None,
        on_region_loss: None,
        on_store_error: None,
        epoch: None,
        over_limit_body: OverLimitBodySpec { body: None, content_type: None },
    };

    /// Returns `true` if both have the same keys with the same values, at any position.
    pub fn has_values_of(&self, other: &Self) -> bool {
        fn same<T: PartialEq>(one: Option<&Spanned<T>>, other: Option<&Spanned<T>>) -> bool {
            one.map(|spanned| &spanned.value) == other.map(|spanned| &spanned.value)
        }
        // Exhaustive, so that a new key cannot be forgotten here.
        let Self {
            algorithm,
            queue_size,
            max_wait_us,
            count_rejected,
            eventual,
            max_overshoot,
            global,
            reserve_milli_percent,
            on_region_loss,
            on_store_error,
            epoch,
            over_limit_body: OverLimitBodySpec { body, content_type },
        } = self;
        same(algorithm.as_ref(), other.algorithm.as_ref())
            && same(queue_size.as_ref(), other.queue_size.as_ref())
            && same(max_wait_us.as_ref(), other.max_wait_us.as_ref())
            && same(count_rejected.as_ref(), other.count_rejected.as_ref())
            && same(eventual.as_ref(), other.eventual.as_ref())
            && same(max_overshoot.as_ref(), other.max_overshoot.as_ref())
            && same(global.as_ref(), other.global.as_ref())
            && same(reserve_milli_percent.as_ref(), other.reserve_milli_percent.as_ref())
            && same(on_region_loss.as_ref(), other.on_region_loss.as_ref())
            && same(on_store_error.as_ref(), other.on_store_error.as_ref())
            && same(epoch.as_ref(), other.epoch.as_ref())
            && same(body.as_ref(), other.over_limit_body.body.as_ref())
            && same(content_type.as_ref(), other.over_limit_body.content_type.as_ref())
    }

    /// Returns these keys, and those of `lower` that are not written here.
    pub fn or(self, lower: &Self) -> Self {
        // Exhaustive, so that a new key cannot be forgotten here.
        let Self {
            algorithm,
            queue_size,
            max_wait_us,
            count_rejected,
            eventual,
            max_overshoot,
            global,
            reserve_milli_percent,
            on_region_loss,
            on_store_error,
            epoch,
            over_limit_body: OverLimitBodySpec { body, content_type },
        } = self;
        Self {
            algorithm: algorithm.or(lower.algorithm),
            queue_size: queue_size.or(lower.queue_size),
            max_wait_us: max_wait_us.or(lower.max_wait_us),
            count_rejected: count_rejected.or(lower.count_rejected),
            eventual: eventual.or(lower.eventual),
            max_overshoot: max_overshoot.or(lower.max_overshoot),
            global: global.or(lower.global),
            reserve_milli_percent: reserve_milli_percent.or(lower.reserve_milli_percent),
            on_region_loss: on_region_loss.or(lower.on_region_loss),
            on_store_error: on_store_error.or(lower.on_store_error),
            epoch: epoch.or(lower.epoch),
            over_limit_body: OverLimitBodySpec {
                body: body.or_else(|| lower.over_limit_body.body.clone()),
                content_type: content_type.or_else(|| lower.over_limit_body.content_type.clone()),
            },
        }
    }

    /// Returns the name of the first written key that does not apply to an unlimited rule.
    pub fn first(&self) -> Option<Spanned<&'static str>> {
        fn named<T>(name: &'static str, spanned: Option<&Spanned<T>>) -> Option<Spanned<&'static str>> {
            spanned.map(|spanned| Spanned { value: name, at: spanned.at })
        }
        named("algorithm", self.algorithm.as_ref())
            .or_else(|| named("queue_size", self.queue_size.as_ref()))
            .or_else(|| named("max_wait", self.max_wait_us.as_ref()))
            .or_else(|| named("count_rejected", self.count_rejected.as_ref()))
            .or_else(|| named("consistency", self.eventual.as_ref()))
            .or_else(|| named("max_overshoot", self.max_overshoot.as_ref()))
            .or_else(|| named("scope", self.global.as_ref()))
            .or_else(|| named("reserve", self.reserve_milli_percent.as_ref()))
            .or_else(|| named("on_region_loss", self.on_region_loss.as_ref()))
            .or_else(|| named("on_store_error", self.on_store_error.as_ref()))
            .or_else(|| named("epoch", self.epoch.as_ref()))
            .or_else(|| named("over_limit_body", self.over_limit_body.body.as_ref()))
            .or_else(|| named("over_limit_content_type", self.over_limit_body.content_type.as_ref()))
    }
}

/// `over_limit_body` and `over_limit_content_type`.
#[derive(Clone, Debug, Default)]
pub struct OverLimitBodySpec {
    /// `over_limit_body`; rules share the text.
    pub body: Option<Spanned<Arc<str>>>,
    /// `over_limit_content_type`.
    pub content_type: Option<Spanned<Arc<str>>>,
}

impl<T: Default> Default for Spanned<T> {
    fn default() -> Self {
        Self { value: T::default(), at: Position::default() }
    }
}
