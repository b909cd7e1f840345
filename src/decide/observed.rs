//! Results of a decision by limit, for tools that replay decisions.

use std::sync::Arc;

use super::outcome::DescriptorOutcome;
use super::record::key_text;
use super::selection::Selection;
use crate::algorithm::ChargeResult;
use crate::counter::Path;
use crate::limit::Limit;
use crate::request::Request;
use crate::rule::set::{CompiledRule, DomainRules};
use crate::telemetry::metrics::limit_stats::LimitStats;

/// A decided descriptor.
#[derive(Clone, Copy, Debug)]
pub struct ObservedDescriptor<'a, 'r> {
    /// Index in the request.
    pub index: usize,
    pub(super) selection: &'a Selection<'r>,
    pub(super) outcome: &'a DescriptorOutcome,
}

/// A limit of a decided descriptor.
#[derive(Clone, Copy, Debug)]
pub struct ObservedLimit<'a, 'r> {
    /// The limit.
    pub limit: &'a Limit,
    /// Index among the limits of its rule.
    pub index: usize,
    /// Name; empty if it has none.
    pub name: &'r str,
    /// Shadow mode.
    pub shadow: bool,
    /// Quota mode.
    pub quota: bool,
    /// Identifier of its statistics, unique in this process. Limits that came with requests share that of their domain.
    pub id: u64,
    /// Result of the charge.
    pub result: &'a ChargeResult,
}

impl<'a, 'r> ObservedDescriptor<'a, 'r> {
    /// The rule that matched; `None` if there is none, or if a limit of the request took precedence.
    pub const fn rule(&self) -> Option<&'r CompiledRule> {
        self.selection.rule
    }

    /// Rules of the domain, if it has any.
    pub const fn domain(&self) -> Option<&'r DomainRules> {
        self.selection.domain
    }

    /// Hash of the path of its counters; 0 without limits. Stable within a process.
    pub const fn key(&self) -> u128 {
        self.selection.key
    }

    /// True if values of an entry share a counter.
    pub fn shares_values(&self) -> bool {
        self.selection.shares_values()
    }

    /// Text of the key of its counters, `key=value,key=value`, cut off if it is long.
    pub fn key_text(&self, request: &Request<'_>) -> Arc<str> {
        key_text(&self.selection.path(request, self.index))
    }

    /// Limits with their results; none if the store failed.
    pub fn limits(&self) -> impl Iterator<Item = ObservedLimit<'a, 'r>> + use<'a, 'r> {
        let results: &[ChargeResult] = match self.outcome {
            DescriptorOutcome::Charged(outcome) => &outcome.results,
            DescriptorOutcome::Unlimited | DescriptorOutcome::Failed(_) => &[],
        };
        let others = self.selection.domain.map_or(u64::MAX, |domain| domain.others.id());
        self.selection.limits.iter().zip(results).map(move |(selected, result)| ObservedLimit {
            limit: &selected.limit,
            index: selected.index,
            name: selected.name,
            shadow: selected.shadow,
            quota: selected.quota,
            id: selected.stats.map_or(others, LimitStats::id),
            result,
        })
    }

    /// True if the store had no room for a counter, so that a failure policy decided.
    pub const fn failed(&self) -> bool {
        matches!(self.outcome, DescriptorOutcome::Failed(_))
    }
}

/// Text of the key of the descriptor at `index`, whose values share no counter.
pub fn plain_key_text(request: &Request<'_>, index: usize) -> Arc<str> {
    let entries = request.descriptors.get(index).map_or(&[][..], |descriptor| &descriptor.entries);
    key_text(&Path { domain: request.domain, entries, shared: &[] })
}
