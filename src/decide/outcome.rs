//! Outcome of the charge of one descriptor, failures included.

use super::answer::{LimitRejection, LimitVerdicts};
use super::failure_policies::FailurePolicies;
use super::selection::Selection;
use crate::limit::charge::ChargeResult;
use crate::settings::decisions::DecisionSettings;
use crate::store::error::ChargeError;
use crate::store::outcome::{ChargeResults, StoreOutcome};

/// Outcome of the charge of one descriptor.
#[derive(Clone, Debug)]
pub(super) enum DescriptorOutcome {
    /// The descriptor has no limit.
    Unlimited,
    /// The store decided.
    Charged(StoreOutcome),
    /// The store failed, and failure policies decide.
    Failed(FailedCharge),
}

/// Charge that the store failed to decide.
#[derive(Clone, Debug)]
pub(super) struct FailedCharge {
    /// Failure of the store.
    pub(super) error: ChargeError,
    /// Policies that decide.
    pub(super) policies: FailurePolicies,
    /// Results of the fallback counters; empty if no policy is `local`. A limit whose policy is `allow` is admitted.
    pub(super) fallback: ChargeResults,
}

impl DescriptorOutcome {
    /// CombinedVerdict of the outcome on its descriptor.
    pub(super) fn limit_verdicts(&self, behaviour: &DecisionSettings, selection: &Selection<'_>) -> LimitVerdicts {
        let by_results = |results: &ChargeResults| {
            LimitVerdicts::of(&selection.limits, |index| results.get(index).and_then(LimitRejection::of))
        };
        match self {
            Self::Unlimited => LimitVerdicts::without_limits(behaviour.quota_mode && !selection.unlimited),
            Self::Charged(outcome) => by_results(&outcome.results),
            Self::Failed(failed) => by_results(&failed.fallback).under_policies(failed.policies),
        }
    }

    /// Result of the limit at `index`; `None` if no counter decided it.
    pub(super) fn result(&self, index: usize) -> Option<&ChargeResult> {
        match self {
            Self::Unlimited => None,
            Self::Charged(StoreOutcome { results, .. }) | Self::Failed(FailedCharge { fallback: results, .. }) => {
                results.get(index)
            }
        }
    }

    /// Tells whether the limit at `index` rejected the charge.
    pub(super) fn rejects(&self, index: usize) -> bool {
        self.result(index).is_some_and(|result| !result.admitted)
    }
}
