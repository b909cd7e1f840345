//! Charges for all descriptors of a request.
//!
//! The store makes all charges of a request together, so that those in Redis cost one round trip. A charge that the
//! store fails to decide falls to the rule's failure policy. With STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT a dry run
//! comes first: if it rejects any descriptor, those that it admits only peek, and are not charged for a rejected
//! request.

use smallvec::SmallVec;

use super::context::DecisionContext;
use super::failures::Failures;
use super::outcome::DescriptorOutcome;
use super::selection::{SelectedRequest, Selection};
use crate::counter::Charge;
use crate::limit::StorePolicy;
use crate::request::Hits;
use crate::store::Store;
use crate::store::error::ChargeError;

/// Outcomes of the charges of a request, one for each descriptor.
pub(super) type Outcomes = SmallVec<[DescriptorOutcome; 2]>;
/// Dry runs of the charges of a request, one for each descriptor; empty if there was none.
pub(super) type DryRuns = SmallVec<[Option<DryRun>; 2]>;

/// Result of the dry run of a charge.
#[derive(Clone, Copy, Debug)]
pub(super) struct DryRun {
    /// All limits would admit the hits; if the store failed, the failure policy would.
    passes: bool,
    /// Failure of the store.
    error: Option<ChargeError>,
}

/// Charges the counters of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Charger<'a, 'r, 'm> {
    pub(super) store: &'a Store,
    pub(super) failures: &'a Failures,
    pub(super) context: DecisionContext<'r>,
    pub(super) selected: SelectedRequest<'a, 'r, 'm>,
}

impl<'a> Charger<'a, '_, '_> {
    /// Runs all charges dry, into `dry_runs`; `None` if that is done when the call returns.
    pub(super) fn dry_run_all(self, dry_runs: &mut DryRuns) -> Option<impl Future<Output = ()>> {
        let SelectedRequest { request, selections } = self.selected;
        dry_runs.resize(selections.len(), None);
        let charges = selections.iter().enumerate().filter_map(move |(index, selection)| {
            Some((index, selection.charge(request, index, self.context.max_delay_us)?))
        });
        let record = move |index: usize, charge: &Charge<'_>, admits: Result<bool, ChargeError>| {
            dry_runs[index] = Some(match admits {
                Ok(passes) => DryRun { passes, error: None },
                Err(error) => DryRun { passes: self.policy_passes(&selections[index], charge), error: Some(error) },
            });
        };
        self.store.dry_run_all(charges, self.context.of_store(), record)
    }

    /// Makes all charges, into `outcomes`; `None` if that is done when the call returns.
    pub(super) fn charge_all(
        self,
        dry_runs: &'a DryRuns,
        outcomes: &'a mut Outcomes,
    ) -> Option<impl Future<Output = ()>> {
        let SelectedRequest { request, selections } = self.selected;
        outcomes.extend(selections.iter().map(|_| DescriptorOutcome::Unlimited));
        let any_rejected = dry_runs.iter().flatten().any(|dry_run| !dry_run.passes);
        let charge_of = move |index: usize, selection: &'a Selection<'_>| {
            let charge = selection.charge(request, index, self.context.max_delay_us)?;
            let passes = dry_runs.get(index).is_some_and(|dry_run| dry_run.is_some_and(|dry_run| dry_run.passes));
            Some(if any_rejected && passes { peek_only(charge) } else { charge })
        };
        let failure_of = move |index: usize| dry_runs.get(index).copied().flatten()?.error;
        // A charge whose dry run failed is not sent again: its policy decides.
        for index in 0..dry_runs.len() {
            if let (Some(error), Some(charge)) = (failure_of(index), charge_of(index, &selections[index])) {
                outcomes[index] = self.decide_by_policy(error, &selections[index], &charge);
            }
        }
        let charges = selections.iter().enumerate().filter(move |(index, _)| failure_of(*index).is_none());
        let charges = charges.filter_map(move |(index, selection)| Some((index, charge_of(index, selection)?)));
        let record = move |index: usize, charge: &Charge<'_>, outcome| {
            let selection: &Selection<'_> = &selections[index];
            outcomes[index] = match outcome {
                Ok(outcome) => {
                    selection.warn_lost_reports(request.descriptors[index].hits, &outcome);
                    DescriptorOutcome::Charged(outcome)
                }
                Err(error) => self.decide_by_policy(error, selection, charge),
            };
        };
        self.store.charge_all(charges, self.context.of_store(), record)
    }

    /// Tells whether the failure policy would admit a charge.
    fn policy_passes(&self, selection: &Selection<'_>, charge: &Charge<'_>) -> bool {
        match selection.store_policy(charge.request.hits) {
            StorePolicy::Allow => true,
            StorePolicy::Local => self.store.fallback_admits(charge, self.context.now),
            StorePolicy::Deny | StorePolicy::Error => false,
        }
    }

    /// Decides a charge that the store failed to decide. Refunds, peeks and limits in shadow mode are never rejected.
    fn decide_by_policy(
        &self,
        error: ChargeError,
        selection: &Selection<'_>,
        charge: &Charge<'_>,
    ) -> DescriptorOutcome {
        let policy = selection.store_policy(charge.request.hits);
        self.failures.record(error, policy, self.context.now);
        if policy != StorePolicy::Local {
            return DescriptorOutcome::Failed(policy);
        }
        let mut results = self.store.charge_fallback(charge, self.context.now);
        if charge.request.hits == Hits::Peek {
            results.iter_mut().for_each(|result| result.admitted = true);
        }
        DescriptorOutcome::Fallback(results)
    }
}

/// The same charge as a peek; refunds stay.
const fn peek_only(mut charge: Charge<'_>) -> Charge<'_> {
    if matches!(charge.request.hits, Hits::Charge(_)) {
        charge.request.hits = Hits::Peek;
    }
    charge
}
