//! Verdicts of limits, and the answer to a request: rejected or not, and when the same request could pass.
//!
//! Limits in shadow mode never reject. A limit that is not a quota rejects a request alone. The quotas of one
//! descriptor must all have room; quotas reject a request only if there are any, and no descriptor with quotas has
//! room.

use super::failure_policies::FailurePolicies;
use super::selection::SelectedLimit;
use crate::limit::StorePolicy;
use crate::limit::charge::ChargeResult;

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
    /// Verdict of the limits that reject a request alone.
    pub(super) enforced: CombinedVerdict,
    /// Verdict of the quotas; `None`: the descriptor has none.
    pub(super) quotas: Option<CombinedVerdict>,
    /// A failure policy ruled.
    pub(super) by_policy: bool,
}

/// Answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Passes,
    Rejected,
    /// The store failed, and the answer depends on a limit with the policy `error`.
    Failed,
}

impl LimitRejection {
    /// Retry time after a rejection by policy: the store may recover at any moment.
    pub(super) const BY_POLICY: Self = Self { retry_after_us: Some(1_000_000) };

    /// LimitRejection of a charge by its result; `None` if the limit admits it.
    pub(super) fn of(result: &ChargeResult) -> Option<Self> {
        (!result.admitted).then_some(Self { retry_after_us: result.retry_after_us })
    }

    /// LimitRejection by two limits, which must both admit the hits.
    fn and(self, other: Self) -> Self {
        Self { retry_after_us: self.retry_after_us.zip(other.retry_after_us).map(|(one, two)| one.max(two)) }
    }
}

impl CombinedVerdict {
    fn of(rejections: impl Iterator<Item = LimitRejection>) -> Self {
        rejections.reduce(LimitRejection::and).map_or(Self::Admits, Self::Rejects)
    }

    /// CombinedVerdict of a policy, if the fallback counters do not rule.
    const fn of_policy(policy: StorePolicy) -> Self {
        match policy {
            StorePolicy::Allow | StorePolicy::Local => Self::Admits,
            StorePolicy::Deny => Self::Rejects(LimitRejection::BY_POLICY),
            StorePolicy::Error => Self::Fails,
        }
    }

    /// Returns true if a limit rejects the hits.
    pub(super) const fn rejects(self) -> bool {
        matches!(self, Self::Rejects(_))
    }
}

impl LimitVerdicts {
    /// CombinedVerdict on a descriptor without limits; `is_quota` under QUOTA_MODE, unless its rule is unlimited.
    pub(super) fn without_limits(is_quota: bool) -> Self {
        Self {
            enforced: CombinedVerdict::Admits,
            quotas: is_quota.then_some(CombinedVerdict::Admits),
            by_policy: false,
        }
    }

    /// CombinedVerdict of counters: `rejection` returns that of the limit at an index.
    pub(super) fn of(limits: &[SelectedLimit<'_>], rejection: impl Fn(usize) -> Option<LimitRejection>) -> Self {
        let of_kind = |quota: bool| {
            let decisive = |selected: &SelectedLimit<'_>| selected.quota == quota && !selected.shadow;
            let rejections = limits.iter().enumerate().filter(|(_, selected)| decisive(selected));
            CombinedVerdict::of(rejections.filter_map(|(index, _)| rejection(index)))
        };
        // A quota in shadow mode always has room.
        let has_quotas = limits.iter().any(|selected| selected.quota);
        Self { enforced: of_kind(false), quotas: has_quotas.then(|| of_kind(true)), by_policy: false }
    }

    /// The verdicts with that of the failure policies in place of each that is not `local`.
    pub(super) fn under_policies(self, policies: FailurePolicies) -> Self {
        let under =
            |verdict, policy| if policy == StorePolicy::Local { verdict } else { CombinedVerdict::of_policy(policy) };
        Self {
            enforced: under(self.enforced, policies.enforced),
            quotas: self.quotas.map(|verdict| under(verdict, policies.quotas)),
            by_policy: true,
        }
    }

    /// Returns true if a limit of the descriptor rejects the hits.
    pub(super) fn rejects(&self) -> bool {
        self.enforced.rejects() || self.quotas.is_some_and(CombinedVerdict::rejects)
    }
}

/// Merges the verdicts of the limits of all descriptors of a request. `may_fail` is false if failures count as
/// admissions.
///
/// A rejection by counters takes precedence over a failure under the policy `error`, and that over the other policies.
/// A failure that cannot change the answer is ignored.
pub(super) fn answer(limit_verdicts: &(impl Iterator<Item = LimitVerdicts> + Clone), may_fail: bool) -> Answer {
    let rejects = |by_policies: bool, by_failures: bool| {
        is_rejected(limit_verdicts.clone(), |verdict, by_policy| match verdict {
            CombinedVerdict::Admits => false,
            CombinedVerdict::Rejects(_) => by_policies || !by_policy,
            CombinedVerdict::Fails => by_failures,
        })
    };
    if !rejects(true, may_fail) {
        Answer::Passes
    } else if rejects(false, false) {
        Answer::Rejected
    } else if rejects(false, may_fail) {
        Answer::Failed
    } else if rejects(true, false) {
        Answer::Rejected
    } else {
        Answer::Failed
    }
}

/// Returns true if quotas reject the request: there are some, and those of every descriptor that has any are exceeded.
pub(super) fn quotas_reject(limit_verdicts: impl Iterator<Item = LimitVerdicts>) -> bool {
    let mut quotas = limit_verdicts.filter_map(|limit_verdicts| limit_verdicts.quotas).peekable();
    quotas.peek().is_some() && quotas.all(CombinedVerdict::rejects)
}

/// Microseconds until a rejected request could pass; `None`: it never will.
///
/// All limits that are not quotas must admit it and, if the quotas reject it, those of any one descriptor.
pub(super) fn retry_after_us(limit_verdicts: impl Iterator<Item = LimitVerdicts> + Clone) -> Option<u64> {
    let enforced =
        limit_verdicts.clone().try_fold(0, |longest: u64, limit_verdicts| match limit_verdicts.enforced {
            CombinedVerdict::Rejects(LimitRejection { retry_after_us }) => {
                retry_after_us.map(|wait_us| wait_us.max(longest))
            }
            CombinedVerdict::Admits | CombinedVerdict::Fails => Some(longest),
        })?;
    if !quotas_reject(limit_verdicts.clone()) {
        return Some(enforced);
    }
    let waits = limit_verdicts.filter_map(|limit_verdicts| match limit_verdicts.quotas {
        Some(CombinedVerdict::Rejects(LimitRejection { retry_after_us })) => retry_after_us,
        Some(CombinedVerdict::Admits | CombinedVerdict::Fails) | None => None,
    });
    waits.min().map(|shortest| shortest.max(enforced))
}

/// Returns true if a limit that is not a quota rejects the request, or if the quotas do; `counts` tells which verdicts,
/// by policy or not, are rejections.
fn is_rejected(
    limit_verdicts: impl Iterator<Item = LimitVerdicts>,
    counts: impl Fn(CombinedVerdict, bool) -> bool,
) -> bool {
    let (mut any_quota, mut all_exceeded) = (false, true);
    for LimitVerdicts { enforced, quotas, by_policy } in limit_verdicts {
        if counts(enforced, by_policy) {
            return true;
        }
        if let Some(quotas) = quotas {
            any_quota = true;
            all_exceeded &= counts(quotas, by_policy);
        }
    }
    any_quota && all_exceeded
}
