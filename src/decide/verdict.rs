//! The verdict on one descriptor: what its limits found, as one status.
//!
//! A descriptor with several limits shows one of them. A store that failed becomes a status by the rule's policy.

use std::cmp::{Ordering, Reverse};

use super::DescriptorOutcome;
use super::selection::{SelectedLimit, Selection};
use crate::algorithm::ChargeResult;
use crate::decision::{CurrentLimit, LimitStatus};
use crate::limit::StorePolicy;
use crate::limit::algorithm::Algorithm;

/// What is known of one descriptor once it was decided.
#[derive(Debug)]
pub(super) struct Verdict<'r> {
    pub(super) status: LimitStatus<'r>,
    /// The place of the limit that the status is of, among those selected.
    pub(super) shown: Option<usize>,
    /// The limit that the status is of is a quota.
    pub(super) quota: bool,
    /// How long the answer is to be held for it, in microseconds.
    pub(super) delay_us: u64,
    /// The same hits can never pass.
    pub(super) permanent: bool,
    /// The store failed, and this is what the rule's policy says.
    pub(super) by_policy: bool,
    /// The store failed, and the policy is that nobody says anything.
    pub(super) failed: bool,
}

impl<'r> Verdict<'r> {
    /// The verdict on one descriptor.
    pub(super) fn of(selection: &Selection<'r>, outcome: &DescriptorOutcome) -> Self {
        let free = |remaining| Verdict {
            status: LimitStatus { remaining, ..LimitStatus::default() },
            shown: None,
            quota: false,
            delay_us: 0,
            permanent: false,
            by_policy: false,
            failed: false,
        };
        match outcome {
            DescriptorOutcome::Unlimited => free(if selection.unlimited { u32::MAX } else { 0 }),
            DescriptorOutcome::Charged(found) => charged(selection, &found.results),
            DescriptorOutcome::Fallback(results) => Verdict { by_policy: true, ..charged(selection, results) },
            DescriptorOutcome::Failed(policy) => failed(selection, *policy, free(0)),
        }
    }

    /// The name of the limit that the status is of, as `/rlconfig` and metrics know it.
    pub(super) fn limit_path(&self, selection: &Selection<'_>) -> Option<String> {
        let selected = selection.limits.get(self.shown?)?;
        selection.rule.map(|compiled| compiled.rule.limit_path(selected.place))
    }
}

/// The verdict of a policy, in the name of the limit that has it; a policy that passes shows no limit, because nothing
/// is known of any.
fn failed<'r>(selection: &Selection<'r>, policy: StorePolicy, free: Verdict<'r>) -> Verdict<'r> {
    let place = selection.governing_limit();
    let selected = &selection.limits[place];
    // One that passes is still a quota: all others may refuse, and the request passes.
    let verdict = Verdict { by_policy: true, quota: selected.quota, ..free };
    match policy {
        StorePolicy::Local | StorePolicy::Allow => verdict,
        StorePolicy::Error => Verdict { failed: true, ..verdict },
        StorePolicy::Deny => {
            let status = LimitStatus {
                over_limit: true,
                current_limit: Some(current_limit(selected)),
                remaining: 0,
                until_reset_s: Some(DENIED_FOR_S),
            };
            Verdict { status, shown: Some(place), ..verdict }
        }
    }
}

/// When to come back after a refusal by policy, in seconds: the store may be back any moment.
const DENIED_FOR_S: u64 = 1;

/// The verdict of limits that were decided together.
fn charged<'r>(selection: &Selection<'r>, results: &[ChargeResult]) -> Verdict<'r> {
    let shown = shown(&selection.limits, results);
    let (selected, result) = (&selection.limits[shown], &results[shown]);
    let until_us = match result.retry_after_us {
        Some(retry_after_us) if !result.admitted && selected.limit.algorithm() != Algorithm::FixedWindow => {
            retry_after_us
        }
        _ => result.reset_us,
    };
    let until_reset_s = until_us.div_ceil(1_000_000).max(u64::from(!result.admitted));
    let held = selection.limits.iter().zip(results).filter(|(selected, _)| !selected.shadow);
    Verdict {
        status: LimitStatus {
            over_limit: !result.admitted && !selected.shadow,
            current_limit: Some(current_limit(selected)),
            remaining: if result.admitted { result.remaining } else { 0 },
            until_reset_s: Some(until_reset_s),
        },
        shown: Some(shown),
        quota: selected.quota,
        delay_us: held.map(|(_, result)| result.delay_us).max().unwrap_or(0),
        permanent: !result.admitted && result.retry_after_us.is_none(),
        by_policy: false,
        failed: false,
    }
}

fn current_limit<'r>(selected: &SelectedLimit<'r>) -> CurrentLimit<'r> {
    CurrentLimit {
        name: selected.name,
        requests_per_unit: selected.limit.requests_per_unit(),
        period: selected.limit.period(),
    }
}

/// Which of a descriptor's limits its status is of: a refused one before others, one that is no quota before quotas,
/// the longest wait; else the one with the least share left; the first on a tie. Trials speak only among themselves.
fn shown(limits: &[SelectedLimit<'_>], results: &[ChargeResult]) -> usize {
    let any_enforced = limits.iter().any(|selected| !selected.shadow);
    let eligible = (0..limits.len()).filter(|place| !(any_enforced && limits[*place].shadow));
    let refused = eligible.clone().filter(|place| !results[*place].admitted);
    // No promise at all is the longest wait. `min_by_key` gives the first on a tie.
    let longest =
        |place: &usize| (limits[*place].quota, Reverse(results[*place].retry_after_us.map_or(u64::MAX, |wait| wait)));
    refused.min_by_key(longest).unwrap_or_else(|| {
        let least = eligible.min_by(|a, b| share_left(limits, results, *a, *b));
        least.unwrap_or(0)
    })
}

/// Compares what is left of two limits, as shares of what can pass at once.
fn share_left(limits: &[SelectedLimit<'_>], results: &[ChargeResult], a: usize, b: usize) -> Ordering {
    let share =
        |of: usize, other: usize| u64::from(results[of].remaining) * u64::from(limits[other].limit.capacity().max(1));
    share(a, b).cmp(&share(b, a))
}
