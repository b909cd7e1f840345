//! Results of a decision by limit, for tools that replay decisions.

use std::sync::Arc;

use super::candidates::CandidateCharges;
use super::key_text::key_text;
use super::outcome::DescriptorOutcome;
use super::selected_request::SelectedRequest;
use super::selection::{SelectedLimit, Selection};
use crate::decide::log::value_form::ValueForm;
use crate::limit::Limit;
use crate::limit::charge::ChargeResult;
use crate::limit::counter_path::CounterPath;
use crate::limit::request::Request;
use crate::rules::rule::set::{CompiledRule, DomainRules};

/// A decided descriptor.
#[derive(Clone, Copy, Debug)]
pub struct DescriptorResults<'a, 'r> {
    /// Path of its counters.
    pub(super) path: CounterPath<'a>,
    /// Index in the request.
    pub index: usize,
    pub(super) selection: &'a Selection<'r>,
    pub(super) outcome: &'a DescriptorOutcome,
    pub(super) candidates: Option<&'a CandidateCharges>,
}

/// A limit of a decided descriptor.
#[derive(Clone, Copy, Debug)]
pub struct LimitWithResult<'a, 'r> {
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
    /// Candidate: charged as if it were the only limit of its rule.
    pub candidate: bool,
    /// Result of the charge.
    pub result: &'a ChargeResult,
}

impl<'a, 'r> LimitWithResult<'a, 'r> {
    fn new(selected: &'a SelectedLimit<'r>, result: &'a ChargeResult, others: u64, candidate: bool) -> Self {
        let SelectedLimit { ref limit, index, name, shadow, quota, stats, .. } = *selected;
        let id = stats.map_or(others, |stats| stats.id());
        Self { limit, index, name, shadow, quota, id, candidate, result }
    }
}

impl<'a, 'r> DescriptorResults<'a, 'r> {
    /// The rule that matched; `None` if there is none, or if a limit of the request took precedence.
    pub const fn rule(&self) -> Option<&'r CompiledRule> {
        self.selection.rule
    }

    /// Rules of the domain, if it has any.
    pub const fn domain(&self) -> Option<&'r DomainRules> {
        self.selection.domain
    }

    /// Hash of the path of its counters; 0 without limits. Stable within a process.
    pub const fn path_hash(&self) -> u128 {
        self.selection.key
    }

    /// True if the values of an entry share one counter (`share_threshold`).
    pub fn values_share_counter(&self) -> bool {
        self.selection.values_share_counter()
    }

    /// Text of the key of its counters, `key=value,key=value`, cut off if it is long.
    pub fn key_text(&self) -> Arc<str> {
        key_text(&self.path, &ValueForm::Plain)
    }

    /// Limits with their results, candidates last; without those that the store failed to charge.
    pub fn limits(&self) -> impl Iterator<Item = LimitWithResult<'a, 'r>> + use<'a, 'r> {
        let results: &[ChargeResult] = match self.outcome {
            DescriptorOutcome::Charged(outcome) => &outcome.results,
            DescriptorOutcome::WithoutLimits | DescriptorOutcome::Failed(_) => &[],
        };
        let others = self.selection.domain.map_or(u64::MAX, |domain| domain.others.id());
        let (index, selection) = (self.index, self.selection);
        let known = self.candidates.into_iter().flat_map(CandidateCharges::known_outcomes);
        let candidates = known.filter(move |known| known.candidate.descriptor == index).filter_map(move |known| {
            let result = known.outcome.as_ref().ok()?.results.first()?;
            Some(LimitWithResult::new(&selection.candidates[known.candidate.at], result, others, true))
        });
        let deciding = selection.limits.iter().zip(results);
        deciding.map(move |(selected, result)| LimitWithResult::new(selected, result, others, false)).chain(candidates)
    }

    /// True if the store failed to charge, so that a failure policy decided. The memory store fails only if it has no
    /// room for a counter.
    pub const fn store_failed(&self) -> bool {
        matches!(self.outcome, DescriptorOutcome::Failed(_))
    }
}

impl<'r> SelectedRequest<'_, 'r, '_> {
    /// Results of each descriptor, of its candidates those that are known.
    pub(super) fn results<'a>(
        &'a self,
        outcomes: &'a [DescriptorOutcome],
        candidates: Option<&'a CandidateCharges>,
    ) -> impl Iterator<Item = DescriptorResults<'a, 'r>> {
        // No index that could be out of bounds: where nobody takes the results, nothing is left of the loop.
        let charged = self.selections.iter().zip(outcomes).zip(&self.request.descriptors).enumerate();
        charged.map(move |(index, ((selection, outcome), descriptor))| {
            let path = selection.path_of_entries(self.request.domain, &descriptor.entries);
            DescriptorResults { path, index, selection, outcome, candidates }
        })
    }
}

/// Text of the key of the descriptor at `index`, whose values share no counter.
pub fn descriptor_key_text(request: &Request<'_>, index: usize) -> Arc<str> {
    let entries = request.descriptors.get(index).map_or(&[][..], |descriptor| &descriptor.entries);
    key_text(&CounterPath { domain: request.domain, entries, shared: &[], candidate: None }, &ValueForm::Plain)
}
