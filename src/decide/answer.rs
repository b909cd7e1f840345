//! The answer to a request by the verdicts on its descriptors: rejected or not, and when the same request could pass.
//!
//! A hard limit rejects the request alone. The quotas of one descriptor must all have room; quotas reject the request
//! only if there are any, and no descriptor with quotas has room.

use super::outcome::{CombinedVerdict, LimitRejection, LimitVerdicts};

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
