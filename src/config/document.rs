//! A rule file as written, with positions: nothing is merged, defaulted or compared yet.
//!
//! `read` turns a tree of YAML nodes into these types and reports what can be said about one place alone: unknown and
//! misplaced keys, wrong types, numbers out of range. What is missing or wrong is reported and left out, so that the
//! rest is still read. What keys mean to each other is for `compile`.

pub mod value;
pub mod fields;
pub mod read;

use crate::config::yaml::Position;
use crate::limit::algorithm::Algorithm;
use crate::limit::{Overshoot, StorePolicy};

/// A value and where it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spanned<T> {
    /// What was written.
    pub value: T,
    /// Where its key stands, or the value itself in a list.
    pub at: Position,
}

/// One document: one domain.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// Where it begins.
    pub at: Position,
    /// `domain`; not checked to be there.
    pub domain: Option<Spanned<String>>,
    /// `defaults`, if written, and where.
    pub defaults: Option<Spanned<DefaultableKeys>>,
    /// `descriptors`.
    pub descriptors: Vec<DescriptorSpec>,
    /// Whether a key of it could not be read; a missing domain may be that one, and is not reported again.
    pub unreadable: bool,
}

/// An element of `descriptors`.
#[derive(Clone, Debug, Default)]
pub struct DescriptorSpec {
    /// Where it begins.
    pub at: Position,
    /// Its number in the list as written, from 0.
    pub index: usize,
    /// `key`; empty if it was not written.
    pub key: Spanned<String>,
    /// `value`; empty if it was not written.
    pub value: String,
    /// `rate_limit`.
    pub rate_limit: RateLimitSpec,
    /// `shadow_mode`.
    pub shadow_mode: bool,
    /// `quota_mode`.
    pub quota_mode: bool,
    /// `detailed_metric`.
    pub detailed_metric: bool,
    /// `value_to_metric`.
    pub value_to_metric: bool,
    /// `share_threshold`, and where if written.
    pub share_threshold: Option<Spanned<bool>>,
    /// `metadata`.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// What a over_limit_body says.
    pub over_limit_body: OverLimitBodySpec,
    /// `descriptors`.
    pub descriptors: Vec<DescriptorSpec>,
    /// Whether a key of it could not be read; what is missing may be that one, and is not reported again.
    pub unreadable: bool,
}

/// What `rate_limit` holds.
#[derive(Clone, Debug, Default)]
pub enum RateLimitSpec {
    /// Nothing.
    #[default]
    None,
    /// A mapping, and where `rate_limit` stands.
    One(Spanned<Box<RateLimitEntry>>),
    /// A list, and where `rate_limit` stands.
    Many(Spanned<Vec<RateLimitEntry>>),
    /// Something unreadable, reported already.
    Unreadable,
}

/// One limit.
#[derive(Clone, Debug, Default)]
pub struct RateLimitEntry {
    /// Where it begins.
    pub at: Position,
    /// Its number in the list as written, from 0; `None` for a mapping.
    pub index: Option<usize>,
    /// `unit`.
    pub unit: Option<Spanned<String>>,
    /// `unit_multiplier`.
    pub unit_multiplier: Option<Spanned<u32>>,
    /// `requests_per_unit`, 0 if it was not written.
    pub requests_per_unit: Spanned<u32>,
    /// `unlimited`.
    pub unlimited: bool,
    /// `name`, empty if it was not written.
    pub name: Spanned<String>,
    /// The names in `replaces`, empty ones too.
    pub replaces: Vec<Spanned<String>>,
    /// `shadow_mode` in a list.
    pub shadow_mode: bool,
    /// `quota_mode` in a list.
    pub quota_mode: bool,
    /// `bucket_size`.
    pub bucket_size: Option<Spanned<u32>>,
    /// What `defaults` may say too.
    pub defaultable: DefaultableKeys,
    /// Whether something in it could not be read; it was reported, and what follows from it is not.
    pub unreadable: bool,
}

/// What may be said by a limit and, for all that do not say it, by `defaults`.
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
    /// `consistency`: whether it is `eventual`.
    pub eventual: Option<Spanned<bool>>,
    /// `max_overshoot`.
    pub max_overshoot: Option<Spanned<Overshoot>>,
    /// `on_store_error`.
    pub on_store_error: Option<Spanned<StorePolicy>>,
    /// `epoch`.
    pub epoch: Option<Spanned<u64>>,
    /// What a over_limit_body says.
    pub over_limit_body: OverLimitBodySpec,
}

impl DefaultableKeys {
    /// The first key that was written, of those that mean nothing without a count: its name and where.
    pub fn first(&self) -> Option<Spanned<&'static str>> {
        fn place<T>(name: &'static str, spanned: Option<&Spanned<T>>) -> Option<Spanned<&'static str>> {
            spanned.map(|spanned| Spanned { value: name, at: spanned.at })
        }
        place("algorithm", self.algorithm.as_ref())
            .or_else(|| place("queue_size", self.queue_size.as_ref()))
            .or_else(|| place("max_wait", self.max_wait_us.as_ref()))
            .or_else(|| place("count_rejected", self.count_rejected.as_ref()))
            .or_else(|| place("consistency", self.eventual.as_ref()))
            .or_else(|| place("max_overshoot", self.max_overshoot.as_ref()))
            .or_else(|| place("on_store_error", self.on_store_error.as_ref()))
            .or_else(|| place("epoch", self.epoch.as_ref()))
            .or_else(|| place("over_limit_body", self.over_limit_body.body.as_ref()))
            .or_else(|| place("over_limit_content_type", self.over_limit_body.content_type.as_ref()))
    }
}

/// `over_limit_body` and `over_limit_content_type`.
#[derive(Clone, Debug, Default)]
pub struct OverLimitBodySpec {
    /// The body.
    pub body: Option<Spanned<String>>,
    /// Its content type.
    pub content_type: Option<Spanned<String>>,
}

impl<T: Default> Default for Spanned<T> {
    fn default() -> Self {
        Self { value: T::default(), at: Position::default() }
    }
}
