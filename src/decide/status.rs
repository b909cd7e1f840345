//! Status of one descriptor: the results of its limits as the response shows them.
//!
//! The status of a descriptor with several limits shows one of them. A failure of the store becomes a status by the
//! rule's failure policy.
//!
//! Decides: the status of a descriptor, also if another limit of its list rejects.
//! Decides: which limit it names (longest wait, least share left).
//! Decides: remaining hits, reset (`duration_until_reset`), Retry-After and delay of a descriptor.

use std::cmp::{Ordering, Reverse};

use super::outcome::{DescriptorOutcome, FailedCharge, LimitVerdicts, POLICY_RETRY_AFTER_S};
use super::selection::{SelectedLimit, Selection};
use crate::decide::decision::{CurrentLimit, ReportedStatus};
use crate::limit::algorithm::Algorithm;
use crate::limit::charge::ChargeResult;
use crate::limit::overflow::{ChainPosition, split_into_overflow_chains};
use crate::limit::{Limit, StoreFailurePolicy};
use crate::settings::decisions::DecisionSettings;

/// Status of one descriptor, with the verdicts that it follows from.
#[derive(Debug)]
pub(super) struct DescriptorStatus<'r> {
    /// What the response shows.
    pub(super) shown: ReportedStatus<'r>,
    /// Index of the limit that it shows, among those selected.
    pub(super) shown_limit: Option<usize>,
    pub(super) limit_verdicts: LimitVerdicts,
    /// Delay of the response for this descriptor, in microseconds.
    pub(super) delay_us: u64,
}

impl<'r> DescriptorStatus<'r> {
    /// Status by an outcome.
    pub(super) fn from_outcome(
        behaviour: &DecisionSettings,
        selection: &Selection<'r>,
        outcome: &DescriptorOutcome,
    ) -> Self {
        let limit_verdicts = outcome.limit_verdicts(behaviour, selection);
        match outcome {
            DescriptorOutcome::WithoutLimits => {
                Self::without_limit(limit_verdicts, if selection.unlimited { u32::MAX.into() } else { 0 })
            }
            DescriptorOutcome::Charged(charged) => Self::from_results(selection, &charged.results, limit_verdicts),
            DescriptorOutcome::Failed(failed) => Self::from_policies(selection, failed, limit_verdicts),
        }
    }

    /// Path of the shown limit, as in `/rlconfig` and metrics.
    pub(super) fn shown_limit_path(&self, selection: &Selection<'_>) -> Option<String> {
        let selected = selection.limits.get(self.shown_limit?)?;
        selection.rule.map(|compiled| compiled.rule.limit_path(selected.index))
    }

    fn without_limit(limit_verdicts: LimitVerdicts, remaining: u64) -> Self {
        Self {
            shown: ReportedStatus { remaining, ..ReportedStatus::default() },
            shown_limit: None,
            limit_verdicts,
            delay_us: 0,
        }
    }

    /// Status by failure policies. It shows the first limit whose policy denies. If all policies admit, it
    /// shows none, because the counters are unknown.
    fn from_policies(selection: &Selection<'r>, failed: &FailedCharge, limit_verdicts: LimitVerdicts) -> Self {
        let denies = |selected: &SelectedLimit<'_>| {
            let policy = failed.policies.policy_for_limit(selected);
            !selected.shadow && policy == StoreFailurePolicy::Deny && selected.limit.on_store_error() == policy
        };
        let denying = selection.limits.iter().enumerate().filter(|(_, selected)| denies(selected));
        match denying.min_by_key(|(_, selected)| selected.quota) {
            Some((index, selected)) => {
                let shown = ReportedStatus {
                    over_limit: true,
                    current_limit: Some(to_current_limit(selected)),
                    remaining: 0,
                    until_reset_s: Some(POLICY_RETRY_AFTER_S),
                };
                Self { shown, shown_limit: Some(index), limit_verdicts, delay_us: 0 }
            }
            None if failed.fallback.is_empty() => Self::without_limit(limit_verdicts, 0),
            None => Self::from_results(selection, &failed.fallback, limit_verdicts),
        }
    }

    /// Status by limits that were decided together.
    fn from_results(selection: &Selection<'r>, results: &[ChargeResult], limit_verdicts: LimitVerdicts) -> Self {
        let index = index_of_shown_limit(&selection.limits, results);
        let (selected, result) = (&selection.limits[index], &results[index]);
        let until_reset_s =
            until_reset_us(&selected.limit, result).div_ceil(1_000_000).max(u64::from(!result.admitted));
        let deciding = selection.limits.iter().zip(results).filter(|(selected, _)| !selected.shadow);
        Self {
            shown: ReportedStatus {
                over_limit: !result.admitted && !selected.shadow,
                current_limit: Some(to_current_limit(selected)),
                remaining: if result.admitted { result.remaining } else { 0 },
                until_reset_s: Some(until_reset_s),
            },
            shown_limit: Some(index),
            limit_verdicts,
            delay_us: deciding.map(|(_, result)| result.delay_us).max().unwrap_or(0),
        }
    }
}

/// Microseconds until the full limit is available again or, after a rejection, until the same request can be admitted.
pub(super) fn until_reset_us(limit: &Limit, result: &ChargeResult) -> u64 {
    match result.retry_after_us {
        // The end of one window of a chain may not be enough.
        Some(retry_after_us)
            if !result.admitted
                && (limit.algorithm() != Algorithm::FixedWindow
                    || result.ban_left_us > 0
                    || limit.chain_position() != ChainPosition::NotInChain) =>
        {
            retry_after_us
        }
        _ => result.reset_us,
    }
}

fn to_current_limit<'r>(selected: &SelectedLimit<'r>) -> CurrentLimit<'r> {
    CurrentLimit {
        name: selected.name,
        requests_per_unit: selected.limit.requests_per_unit(),
        period: selected.limit.period(),
    }
}

/// Index of the limit that the status shows: among exceeded limits the one with the longest wait, quotas last; else the
/// one with the least share left; the first on a tie. Limits in shadow mode only if there are no others.
fn index_of_shown_limit(limits: &[SelectedLimit<'_>], results: &[ChargeResult]) -> usize {
    // Most descriptors have one limit.
    if limits.len() == 1 {
        return 0;
    }
    let any_decides = limits.iter().any(|selected| !selected.shadow);
    let eligible = (0..limits.len())
        .filter(|index| !(any_decides && limits[*index].shadow))
        .filter(|index| represents_its_chain(limits, results, *index));
    let exceeded = eligible.clone().filter(|index| !results[*index].admitted);
    // Without a promised time the wait is the longest. `min_by_key` returns the first on a tie.
    let longest =
        |index: &usize| (limits[*index].quota, Reverse(results[*index].retry_after_us.map_or(u64::MAX, |wait| wait)));
    exceeded.min_by_key(longest).unwrap_or_else(|| {
        let least = eligible.min_by(|a, b| compare_share_left(limits, results, *a, *b));
        least.unwrap_or(0)
    })
}

/// Of the limits of a chain, true of one: that which takes the next hit or, after a rejection, that which is reset first,
/// or last if the request can never pass.
#[inline]
fn represents_its_chain(limits: &[SelectedLimit<'_>], results: &[ChargeResult], index: usize) -> bool {
    if limits[index].limit.chain_position() == ChainPosition::NotInChain {
        return true;
    }
    let mut chains = split_into_overflow_chains(limits.iter().map(|selected| selected.limit.chain_position()));
    let Some(mut chain) = chains.find(|chain| chain.contains(&index)) else { return true };
    let last = chain.end - 1;
    let shown = match results[index].admitted {
        true => chain.find(|at| results[*at].remaining > 0).unwrap_or(last),
        false if results[index].retry_after_us.is_none() => {
            chain.max_by_key(|at| results[*at].reset_us).unwrap_or(last)
        }
        // A limit of 0 is never reset.
        false => {
            let end = |at: &usize| (limits[*at].limit.requests_per_unit() == 0, results[*at].reset_us);
            chain.min_by_key(end).unwrap_or(last)
        }
    };
    shown == index
}

/// Compares the hits left of two limits, as shares of their capacities.
fn compare_share_left(limits: &[SelectedLimit<'_>], results: &[ChargeResult], a: usize, b: usize) -> Ordering {
    let share =
        |of: usize, other: usize| u128::from(results[of].remaining) * u128::from(limits[other].limit.capacity().max(1));
    share(a, b).cmp(&share(b, a))
}
