//! Outcome of the charge of one descriptor, failures of the store included, and the verdicts of its limits.
//!
//! Limits in shadow mode never reject. The other limits are of two kinds: a *hard* limit rejects a request alone,
//! quotas reject it only together, so each kind has a verdict of its own. A failure policy may replace a verdict.

use super::selection::{SelectedLimit, Selection};
use super::store_failures::FailurePolicies;
use crate::limit::StoreFailurePolicy;
use crate::limit::charge::ChargeResult;
use crate::settings::decisions::DecisionSettings;
use crate::store::charge::{ChargeResults, StoreOutcome};
use crate::store::error::ChargeError;

/// Outcome of the charge of one descriptor.
#[derive(Clone, Debug)]
pub(super) enum DescriptorOutcome {
    /// The descriptor has no limit.
    WithoutLimits,
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
    /// Verdicts of the limits of the descriptor.
    pub(super) fn limit_verdicts(&self, behaviour: &DecisionSettings, selection: &Selection<'_>) -> LimitVerdicts {
        let by_results = |results: &ChargeResults| {
            LimitVerdicts::from_rejections_by(&selection.limits, |index| {
                results.get(index).and_then(LimitRejection::from_result)
            })
        };
        match self {
            Self::WithoutLimits => LimitVerdicts::without_limits(behaviour.quota_mode && !selection.unlimited),
            Self::Charged(outcome) => by_results(&outcome.results),
            Self::Failed(failed) => by_results(&failed.fallback).replaced_by_policies(failed.policies),
        }
    }

    /// Result of the limit at `index`; `None` if no counter decided it.
    pub(super) fn limit_result(&self, index: usize) -> Option<&ChargeResult> {
        match self {
            Self::WithoutLimits => None,
            Self::Charged(StoreOutcome { results, .. }) | Self::Failed(FailedCharge { fallback: results, .. }) => {
                results.get(index)
            }
        }
    }

    /// Tells whether the limit at `index` rejected the charge.
    pub(super) fn limit_rejects(&self, index: usize) -> bool {
        self.limit_result(index).is_some_and(|result| !result.admitted)
    }
}

/// Rejection of hits by limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LimitRejection {
    /// Microseconds until the limits admit the same hits; `None`: they never will.
    pub(super) retry_after_us: Option<u64>,
}

/// Verdict of some limits of a descriptor, which must all admit its hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CombinedVerdict {
    /// All limits admit the hits.
    Admits,
    /// A limit rejects the hits.
    Rejects(LimitRejection),
    /// The store failed under the policy `error`.
    Fails,
}

/// Verdicts of the limits of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LimitVerdicts {
    /// Verdict of the hard limits, each of which rejects a request alone.
    pub(super) hard: CombinedVerdict,
    /// Verdict of the quotas; `None`: the descriptor has none.
    pub(super) quotas: Option<CombinedVerdict>,
    /// A failure policy decided.
    pub(super) by_policy: bool,
}

/// Retry time after a rejection by policy, in seconds: the store may recover at any moment.
pub(super) const POLICY_RETRY_AFTER_S: u64 = 1;

impl LimitRejection {
    /// Rejection by policy.
    pub(super) const BY_POLICY: Self = Self { retry_after_us: Some(POLICY_RETRY_AFTER_S * 1_000_000) };

    /// Rejection of a charge by its result; `None` if the limit admits it.
    pub(super) fn from_result(result: &ChargeResult) -> Option<Self> {
        (!result.admitted).then_some(Self { retry_after_us: result.retry_after_us })
    }

    /// Rejection by two limits, which must both admit the hits.
    fn combined_with(self, other: Self) -> Self {
        Self { retry_after_us: self.retry_after_us.zip(other.retry_after_us).map(|(one, two)| one.max(two)) }
    }
}

impl CombinedVerdict {
    /// Verdict of limits by the rejections among them.
    fn from_rejections(rejections: impl Iterator<Item = LimitRejection>) -> Self {
        rejections.reduce(LimitRejection::combined_with).map_or(Self::Admits, Self::Rejects)
    }

    /// Verdict of a policy for a charge that neither the store nor the fallback counters decided.
    const fn from_policy(policy: StoreFailurePolicy) -> Self {
        match policy {
            StoreFailurePolicy::Allow | StoreFailurePolicy::Local => Self::Admits,
            StoreFailurePolicy::Deny => Self::Rejects(LimitRejection::BY_POLICY),
            StoreFailurePolicy::Error => Self::Fails,
        }
    }

    /// Returns true if a limit rejects the hits.
    pub(super) const fn rejects(self) -> bool {
        matches!(self, Self::Rejects(_))
    }
}

impl LimitVerdicts {
    /// Verdicts on a descriptor without limits; `is_quota` under QUOTA_MODE, unless its rule is unlimited.
    pub(super) fn without_limits(is_quota: bool) -> Self {
        Self { hard: CombinedVerdict::Admits, quotas: is_quota.then_some(CombinedVerdict::Admits), by_policy: false }
    }

    /// Verdicts by counters: `rejection` returns the rejection by the limit at an index.
    pub(super) fn from_rejections_by(
        limits: &[SelectedLimit<'_>],
        rejection: impl Fn(usize) -> Option<LimitRejection>,
    ) -> Self {
        let of_kind = |quota: bool| {
            let decisive = |selected: &SelectedLimit<'_>| selected.quota == quota && !selected.shadow;
            let rejections = limits.iter().enumerate().filter(|(_, selected)| decisive(selected));
            CombinedVerdict::from_rejections(rejections.filter_map(|(index, _)| rejection(index)))
        };
        // A quota in shadow mode always has room.
        let has_quotas = limits.iter().any(|selected| selected.quota);
        Self { hard: of_kind(false), quotas: has_quotas.then(|| of_kind(true)), by_policy: false }
    }

    /// Replaces the verdict of each kind of limits by that of its failure policy, unless this is `local`.
    pub(super) fn replaced_by_policies(self, policies: FailurePolicies) -> Self {
        let under = |verdict, policy| {
            if policy == StoreFailurePolicy::Local { verdict } else { CombinedVerdict::from_policy(policy) }
        };
        Self {
            hard: under(self.hard, policies.hard),
            quotas: self.quotas.map(|verdict| under(verdict, policies.quotas)),
            by_policy: true,
        }
    }

    /// Returns true if a limit of the descriptor rejects the hits.
    pub(super) fn rejects(&self) -> bool {
        self.hard.rejects() || self.quotas.is_some_and(CombinedVerdict::rejects)
    }
}
