//! Warnings about rules that load and probably do not do what was meant.
//!
//! Each is about something that is seen only in production otherwise. A plain good file gets none: whoever has to
//! ignore a warning ignores them all.

use std::collections::HashSet;
use std::num::NonZeroU32;

use super::options::CompileOptions;
use crate::config::document::fields::{DocumentReader, FieldPath};
use crate::config::document::{DescriptorSpec, RateLimitEntry, RateLimitSpec};
use crate::config::yaml::Position;
use crate::limit::Limit;
use crate::limit::algorithm::Capacity;
use crate::rule::RuleNode;
use crate::store::redis::command::OwnedCounter;
use crate::store::redis::eventual::budget::LocalBudget;

/// How long Envoy's rate limit filter waits for an answer unless it is configured otherwise, in microseconds.
const ENVOY_TIMEOUT_US: u64 = 20_000;

/// The most wildcards of one level that may have to be tried one by one.
const MAX_WILDCARDS: usize = 1000;

/// A descriptor that neither limits, nor leads on, nor exempts a value.
pub(super) fn on_descriptor(reader: &mut DocumentReader<'_>, written: &DescriptorSpec, field_path: &FieldPath<'_>) {
    if !written.key.value.is_empty() && !written.unreadable && !does_something(written) {
        let message = "this descriptor does nothing";
        reader.warning(
            written.at,
            field_path,
            message,
            "give it a `rate_limit`, `descriptors`, or a `value` to exempt",
        );
    }
}

/// Whether a descriptor says anything at all to a request that ends there or goes on.
fn does_something(written: &DescriptorSpec) -> bool {
    let has_rule = !matches!(written.rate_limit, RateLimitSpec::None);
    has_rule || !written.descriptors.is_empty() || !written.value.is_empty() || written.key.value.contains('*')
}

/// A queue or a loan that Envoy does not wait for, and a share that is too small to give.
pub(super) fn on_limit(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    limit: &Limit,
    (options, field_path): (&CompileOptions, &FieldPath<'_>),
) {
    let each_us = limit.period_us() / u64::from(limit.requests_per_unit().max(1));
    let is_queue = limit.algorithm().properties().capacity == Capacity::QueueSize;
    let waits = is_queue && limit.capacity() > 1 && limit.max_wait_us() >= each_us;
    if waits && each_us > ENVOY_TIMEOUT_US {
        let message = format!("a request that waits in this queue waits {} ms or more", each_us / 1000);
        let hint = "Envoy gives up after 20 ms unless `timeout` of its rate limit filter says otherwise";
        reader.warning(written.at, field_path, message, hint);
    }
    on_eventual(reader, written, limit, (options, field_path));
}

/// An overshoot that leaves nothing to answer without the store.
fn on_eventual(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    limit: &Limit,
    (options, field_path): (&CompileOptions, &FieldPath<'_>),
) {
    let slots = NonZeroU32::new(options.max_replicas).unwrap_or(NonZeroU32::MIN);
    let counted = OwnedCounter { limit: *limit, enforced: true, tag: 0 };
    let Some(terms) = LocalBudget::of(&[counted], slots).filter(|_| limit.requests_per_unit() > 0) else { return };
    let at = written.defaultable.eventual.map_or(written.at, |eventual| eventual.at);
    if terms.life_us == 0 {
        let message = "with so small an overshoot and so short a period hits can not be leased";
        reader.warning(at, field_path, message, "each request asks the store; raise `max_overshoot` or use strict");
    } else if terms.share == 0 {
        let message = format!("the overshoot is too small to share it among {slots} replicas");
        let hint = "the first hits on each key ask the store; raise `max_overshoot` or use strict";
        reader.warning(at, field_path, message, hint);
    }
}

/// Wildcards of one level that begin alike: each is tried until one matches.
pub(super) fn on_wildcards(reader: &mut DocumentReader<'_>, nodes: &[RuleNode], field_path: &FieldPath<'_>) {
    let mut wildcards = 0;
    let mut prefixes = HashSet::new();
    for node in nodes.iter().filter(|node| node.value.contains('*') || node.key.contains('*')) {
        wildcards += 1;
        if wildcards > MAX_WILDCARDS || nodes.len() > MAX_WILDCARDS {
            prefixes.insert((&node.key, node.value.split('*').next()));
        }
    }
    let Some(first) = nodes.first() else { return };
    if wildcards > prefixes.len() + MAX_WILDCARDS {
        let alike = wildcards - prefixes.len();
        let at = Position { line: first.location.line, column: first.location.column };
        let message = format!("{alike} wildcards of this level begin like another one");
        reader.warning(at, field_path, message, "they are tried one after the other; begin each with text of its own");
    }
}
