//! Outcome of the charge of one descriptor, failures of the store included, the verdicts of its limits, and the answer
//! to the request by the verdicts on all descriptors: rejected or not, and when the same request could pass.
//!
//! Limits in shadow mode never reject. The other limits are of two kinds: a *hard* limit rejects a request alone,
//! quotas reject it only together, so each kind has a verdict of its own. The quotas of one descriptor must all have
//! room; quotas reject the request only if there are any, and no descriptor with quotas has room. A failure policy may
//! replace a verdict.
//!
//! Decides: what rejects: hard limit, quota (`quota_mode`), shadow mode, policy.
//! Decides: which wins: a rejection by a counter, `error`, `deny`, `allow` (`combine_verdicts`).
//! Decides: the answer if no rule or no active limit matches, or the domain is unknown.
//! Decides: when a rejected request could pass (Retry-After, `retry_after_us`).
//! Decides: also after a policy (`POLICY_RETRY_AFTER_S`).

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
    by_policy: bool,
}

/// Retry time after a rejection by policy, in seconds: the store may recover at any moment.
pub(super) const POLICY_RETRY_AFTER_S: u64 = 1;

impl LimitRejection {
    /// Rejection by policy.
    const BY_POLICY: Self = Self { retry_after_us: Some(POLICY_RETRY_AFTER_S * 1_000_000) };

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

    /// Returns true if the store failed under the policy `error`.
    pub(super) fn fail(&self) -> bool {
        self.hard == CombinedVerdict::Fails || self.quotas == Some(CombinedVerdict::Fails)
    }

    /// Returns true if a limit of the descriptor rejects the hits.
    pub(super) fn rejects(&self) -> bool {
        self.hard.rejects() || self.quotas.is_some_and(CombinedVerdict::rejects)
    }
}

/// Answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Passes,
    Rejected,
    /// The store failed, and the answer depends on a limit with the policy `error`.
    Failed,
}

/// Verdicts that count as rejections in addition to rejections by counters, which always do.
#[derive(Clone, Copy)]
struct RejectionCriteria {
    /// Rejections by a failure policy.
    policies: bool,
    /// Failures under the policy `error`.
    failures: bool,
}

impl RejectionCriteria {
    /// Rejections by counters only.
    const COUNTERS_ONLY: Self = Self { policies: false, failures: false };

    const fn is_rejection(self, verdict: CombinedVerdict, by_policy: bool) -> bool {
        match verdict {
            CombinedVerdict::Admits => false,
            CombinedVerdict::Rejects(_) => self.policies || !by_policy,
            CombinedVerdict::Fails => self.failures,
        }
    }
}

/// Merges the verdicts of the limits of all descriptors of a request. `may_fail` is false if failures count as
/// admissions.
///
/// A rejection by counters takes precedence over a failure under the policy `error`, and that over the other policies.
/// A failure that cannot change the answer is ignored.
pub(super) fn combine_verdicts(
    limit_verdicts: &(impl Iterator<Item = LimitVerdicts> + Clone),
    may_fail: bool,
) -> Answer {
    let rejected = |counted| is_request_rejected(limit_verdicts.clone(), counted);
    let counters = RejectionCriteria::COUNTERS_ONLY;
    if !rejected(RejectionCriteria { policies: true, failures: may_fail }) {
        Answer::Passes
    } else if rejected(counters) {
        Answer::Rejected
    } else if rejected(RejectionCriteria { failures: may_fail, ..counters }) {
        Answer::Failed
    } else if rejected(RejectionCriteria { policies: true, ..counters }) {
        Answer::Rejected
    } else {
        Answer::Failed
    }
}

/// Returns true if a hard limit rejects the request, or if the quotas do.
fn is_request_rejected(limit_verdicts: impl Iterator<Item = LimitVerdicts>, counted: RejectionCriteria) -> bool {
    let (mut any_quota, mut all_exceeded) = (false, true);
    for LimitVerdicts { hard, quotas, by_policy } in limit_verdicts {
        if counted.is_rejection(hard, by_policy) {
            return true;
        }
        if let Some(quotas) = quotas {
            any_quota = true;
            all_exceeded &= counted.is_rejection(quotas, by_policy);
        }
    }
    any_quota && all_exceeded
}

/// Returns true if quotas reject the request: there are some, and those of every descriptor that has any are exceeded.
pub(super) fn quotas_reject(limit_verdicts: impl Iterator<Item = LimitVerdicts>) -> bool {
    let mut quotas = limit_verdicts.filter_map(|limit_verdicts| limit_verdicts.quotas).peekable();
    quotas.peek().is_some() && quotas.all(CombinedVerdict::rejects)
}

/// Microseconds until a rejected request could pass; `None`: it never will.
///
/// All hard limits must admit it and, if the quotas reject it, those of any one descriptor.
pub(super) fn retry_after_us(limit_verdicts: impl Iterator<Item = LimitVerdicts> + Clone) -> Option<u64> {
    let of_hard_us = limit_verdicts.clone().try_fold(0, |longest: u64, limit_verdicts| match limit_verdicts.hard {
        CombinedVerdict::Rejects(LimitRejection { retry_after_us }) => {
            retry_after_us.map(|wait_us| wait_us.max(longest))
        }
        CombinedVerdict::Admits | CombinedVerdict::Fails => Some(longest),
    })?;
    if !quotas_reject(limit_verdicts.clone()) {
        return Some(of_hard_us);
    }
    let waits = limit_verdicts.filter_map(|limit_verdicts| match limit_verdicts.quotas {
        Some(CombinedVerdict::Rejects(LimitRejection { retry_after_us })) => retry_after_us,
        Some(CombinedVerdict::Admits | CombinedVerdict::Fails) | None => None,
    });
    waits.min().map(|shortest| shortest.max(of_hard_us))
}
