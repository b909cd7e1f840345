//! Charges for all descriptors of a request.
//!
//! The store makes all charges of a request together, so that those in Redis cost one round trip. A charge that the
//! store fails to decide falls to the rule's failure policy. With STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT a dry run comes
//! first: if it rejects any descriptor, those that it admits only peek, and are not charged for a rejected request.

use smallvec::SmallVec;

use super::selection::Selection;
use super::{Decider, DecisionContext, DescriptorOutcome};
use crate::clock::Time;
use crate::counter::Charge;
use crate::limit::StorePolicy;
use crate::request::{Hits, Request};
use crate::store::error::ChargeError;

/// Outcomes of the charges of a request, one for each descriptor.
pub(super) type Outcomes = SmallVec<[DescriptorOutcome; 2]>;

/// Result of the dry run of a charge.
#[derive(Clone, Copy, Debug)]
struct DryRun {
    /// All limits would admit the hits; if the store failed, the failure policy would.
    passes: bool,
    /// Failure of the store.
    error: Option<ChargeError>,
}

impl Decider {
    /// Charges the counters of all selections.
    pub(super) async fn charge(
        &self,
        context: DecisionContext<'_>,
        request: &Request<'_>,
        selections: &[Selection<'_>],
    ) -> Outcomes {
        let mut outcomes: Outcomes = selections.iter().map(|_| DescriptorOutcome::Unlimited).collect();
        let mut dry_runs: SmallVec<[Option<DryRun>; 2]> = SmallVec::new();
        let mut any_rejected = false;
        if self.behaviour.stop_cache_key_increment_when_overlimit {
            dry_runs = self.dry_run(context, request, selections).await;
            any_rejected = dry_runs.iter().flatten().any(|dry_run| !dry_run.passes);
            // A charge whose dry run failed is not sent again: its policy decides.
            for (index, dry_run) in dry_runs.iter().enumerate() {
                let Some(DryRun { passes, error: Some(error) }) = *dry_run else { continue };
                let charge = selections[index].charge(request, index, context.max_delay_us);
                let Some(charge) = charge else { continue };
                let charge = if any_rejected && passes { peek_only(charge) } else { charge };
                outcomes[index] = self.by_policy(error, &selections[index], &charge, context.now);
            }
        }
        let charges = selections.iter().enumerate().filter_map(|(index, selection)| {
            let charge = selection.charge(request, index, context.max_delay_us)?;
            Some((
                index,
                match dry_runs.get(index).copied().flatten() {
                    Some(DryRun { error: Some(_), .. }) => return None,
                    Some(DryRun { passes: true, .. }) if any_rejected => peek_only(charge),
                    _ => charge,
                },
            ))
        });
        let record = |index: usize, charge: &Charge<'_>, outcome| {
            let selection: &Selection<'_> = &selections[index];
            outcomes[index] = match outcome {
                Ok(outcome) => {
                    selection.warn_lost_reports(request.descriptors[index].hits, &outcome);
                    DescriptorOutcome::Charged(outcome)
                }
                Err(error) => self.by_policy(error, selection, charge, context.now),
            };
        };
        self.store.charge_all(charges, context.of_store(), record).await;
        outcomes
    }

    /// Runs all charges dry; `None` for descriptors without limits.
    async fn dry_run(
        &self,
        context: DecisionContext<'_>,
        request: &Request<'_>,
        selections: &[Selection<'_>],
    ) -> SmallVec<[Option<DryRun>; 2]> {
        let mut dry_runs: SmallVec<[Option<DryRun>; 2]> = selections.iter().map(|_| None).collect();
        let charges = selections.iter().enumerate();
        let charges = charges
            .filter_map(|(index, selection)| Some((index, selection.charge(request, index, context.max_delay_us)?)));
        let record = |index: usize, charge: &Charge<'_>, admits| {
            dry_runs[index] = Some(match admits {
                Ok(passes) => DryRun { passes, error: None },
                Err(error) => {
                    DryRun { passes: self.policy_passes(&selections[index], charge, context.now), error: Some(error) }
                }
            });
        };
        self.store.dry_run_all(charges, context.of_store(), record).await;
        dry_runs
    }

    /// Tells whether the failure policy would let a charge pass.
    fn policy_passes(&self, selection: &Selection<'_>, charge: &Charge<'_>, now: Time) -> bool {
        match selection.store_policy(charge.request.hits) {
            StorePolicy::Allow => true,
            StorePolicy::Local => self.store.fallback_admits(charge, now),
            StorePolicy::Deny | StorePolicy::Error => false,
        }
    }

    /// Decides a charge that the store failed to decide. Refunds, peeks and limits in shadow mode are never rejected.
    fn by_policy(
        &self,
        error: ChargeError,
        selection: &Selection<'_>,
        charge: &Charge<'_>,
        now: Time,
    ) -> DescriptorOutcome {
        let policy = selection.store_policy(charge.request.hits);
        self.failures.record(error, policy, now);
        if policy != StorePolicy::Local {
            return DescriptorOutcome::Failed(policy);
        }
        let mut results = self.store.charge_fallback(charge, now);
        if charge.request.hits == Hits::Peek {
            results.iter_mut().for_each(|result| result.admitted = true);
        }
        DescriptorOutcome::Fallback(results)
    }
}

/// The same charge without hits: a peek in place of a charge; refunds stay.
const fn peek_only(mut charge: Charge<'_>) -> Charge<'_> {
    if matches!(charge.request.hits, Hits::Charge(_)) {
        charge.request.hits = Hits::Peek;
    }
    charge
}
