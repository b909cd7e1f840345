//! Results of a decision by limit, for tools that replay decisions.

use super::outcome::DescriptorOutcome;
use super::selection::Selection;
use crate::algorithm::ChargeResult;
use crate::limit::Limit;
use crate::rule::set::{CompiledRule, DomainRules};

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

    /// Returns the pattern that replaces the value of the entry at `index`, if its values share a counter.
    pub fn pattern(&self, index: usize) -> Option<&'r [u8]> {
        self.selection.shared_pattern(index)
    }

    /// Limits with their results; none if the store failed.
    pub fn limits(&self) -> impl Iterator<Item = ObservedLimit<'a, 'r>> + use<'a, 'r> {
        let results: &[ChargeResult] = match self.outcome {
            DescriptorOutcome::Charged(outcome) => &outcome.results,
            DescriptorOutcome::Unlimited | DescriptorOutcome::Failed(_) => &[],
        };
        self.selection.limits.iter().zip(results).map(|(selected, result)| ObservedLimit {
            limit: &selected.limit,
            index: selected.index,
            name: selected.name,
            shadow: selected.shadow,
            quota: selected.quota,
            result,
        })
    }

    /// True if the store had no room for a counter, so that a failure policy decided.
    pub const fn failed(&self) -> bool {
        matches!(self.outcome, DescriptorOutcome::Failed(_))
    }
}
