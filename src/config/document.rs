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
pub struct Spot<T> {
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
    pub domain: Option<Spot<String>>,
    /// `defaults`, if written, and where.
    pub defaults: Option<Spot<Settings>>,
    /// `descriptors`.
    pub descriptors: Vec<Descriptor>,
    /// Whether a key of it could not be read; a missing domain may be that one, and is not reported again.
    pub unreadable: bool,
}

/// An element of `descriptors`.
#[derive(Clone, Debug, Default)]
pub struct Descriptor {
    /// Where it begins.
    pub at: Position,
    /// Its number in the list as written, from 0.
    pub index: usize,
    /// `key`; empty if it was not written.
    pub key: Spot<String>,
    /// `value`; empty if it was not written.
    pub value: String,
    /// `rate_limit`.
    pub rate_limit: RateLimit,
    /// `shadow_mode`.
    pub shadow_mode: bool,
    /// `quota_mode`.
    pub quota_mode: bool,
    /// `detailed_metric`.
    pub detailed_metric: bool,
    /// `value_to_metric`.
    pub value_to_metric: bool,
    /// `share_threshold`, and where if written.
    pub share_threshold: Option<Spot<bool>>,
    /// `metadata`.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// What a refusal says.
    pub refusal: Refusal,
    /// `descriptors`.
    pub descriptors: Vec<Descriptor>,
    /// Whether a key of it could not be read; what is missing may be that one, and is not reported again.
    pub unreadable: bool,
}

/// What `rate_limit` holds.
#[derive(Clone, Debug, Default)]
pub enum RateLimit {
    /// Nothing.
    #[default]
    None,
    /// A mapping, and where `rate_limit` stands.
    One(Spot<Box<Limit>>),
    /// A list, and where `rate_limit` stands.
    Many(Spot<Vec<Limit>>),
    /// Something unreadable, reported already.
    Unreadable,
}

/// One limit.
#[derive(Clone, Debug, Default)]
pub struct Limit {
    /// Where it begins.
    pub at: Position,
    /// Its number in the list as written, from 0; `None` for a mapping.
    pub index: Option<usize>,
    /// `unit`.
    pub unit: Option<Spot<String>>,
    /// `unit_multiplier`.
    pub unit_multiplier: Option<Spot<u32>>,
    /// `requests_per_unit`, 0 if it was not written.
    pub requests_per_unit: Spot<u32>,
    /// `unlimited`.
    pub unlimited: bool,
    /// `name`, empty if it was not written.
    pub name: Spot<String>,
    /// The names in `replaces`, empty ones too.
    pub replaces: Vec<Spot<String>>,
    /// `shadow_mode` in a list.
    pub shadow_mode: bool,
    /// `quota_mode` in a list.
    pub quota_mode: bool,
    /// `bucket_size`.
    pub bucket_size: Option<Spot<u32>>,
    /// What `defaults` may say too.
    pub settings: Settings,
    /// Whether something in it could not be read; it was reported, and what follows from it is not.
    pub unreadable: bool,
}

/// What may be said by a limit and, for all that do not say it, by `defaults`.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `algorithm`.
    pub algorithm: Option<Spot<Algorithm>>,
    /// `queue_size`.
    pub queue_size: Option<Spot<u32>>,
    /// `max_wait`, in microseconds.
    pub max_wait_us: Option<Spot<u64>>,
    /// `count_rejected`.
    pub count_rejected: Option<Spot<bool>>,
    /// `consistency`: whether it is `eventual`.
    pub eventual: Option<Spot<bool>>,
    /// `max_overshoot`.
    pub max_overshoot: Option<Spot<Overshoot>>,
    /// `on_store_error`.
    pub on_store_error: Option<Spot<StorePolicy>>,
    /// `epoch`.
    pub epoch: Option<Spot<u64>>,
    /// What a refusal says.
    pub refusal: Refusal,
}

impl Settings {
    /// The first key that was written, of those that mean nothing without a count: its name and where.
    pub fn first(&self) -> Option<Spot<&'static str>> {
        fn place<T>(name: &'static str, spot: Option<&Spot<T>>) -> Option<Spot<&'static str>> {
            spot.map(|spot| Spot { value: name, at: spot.at })
        }
        place("algorithm", self.algorithm.as_ref())
            .or_else(|| place("queue_size", self.queue_size.as_ref()))
            .or_else(|| place("max_wait", self.max_wait_us.as_ref()))
            .or_else(|| place("count_rejected", self.count_rejected.as_ref()))
            .or_else(|| place("consistency", self.eventual.as_ref()))
            .or_else(|| place("max_overshoot", self.max_overshoot.as_ref()))
            .or_else(|| place("on_store_error", self.on_store_error.as_ref()))
            .or_else(|| place("epoch", self.epoch.as_ref()))
            .or_else(|| place("over_limit_body", self.refusal.body.as_ref()))
            .or_else(|| place("over_limit_content_type", self.refusal.content_type.as_ref()))
    }
}

/// `over_limit_body` and `over_limit_content_type`.
#[derive(Clone, Debug, Default)]
pub struct Refusal {
    /// The body.
    pub body: Option<Spot<String>>,
    /// Its content type.
    pub content_type: Option<Spot<String>>,
}

impl<T: Default> Default for Spot<T> {
    fn default() -> Self {
        Self { value: T::default(), at: Position::default() }
    }
}
