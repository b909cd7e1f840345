//! Charges for all descriptors of a request.
//!
//! The store makes all charges of a request together, so that those in Redis cost one round trip. A charge that the
//! store fails to decide falls to the rule's failure policy.
//!
//! With STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT a dry run comes first. If it rejects the request, descriptors without
//! an exceeded limit are *held back*: they only peek. Counters may change between the two, and a descriptor may be
//! admitted from a lease that the dry run does not see. If the request passes after all, the descriptors held back are
//! charged, so that no hit is admitted without a charge.
//!
//! Decides: whether other descriptors are charged if one is rejected (`STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT`).
//! Decides: peeks under `local`; that SHADOW_MODE holds no charge back.
//! Decides: a release that the store fails to make (`decide_failed_release`).

use smallvec::SmallVec;

use super::outcome::{Answer, DescriptorOutcome, FailedCharge, LimitRejection, LimitVerdicts, combine_verdicts};
use super::selected_request::SelectedRequest;
use super::selection::Selection;
use super::store_failures::FailurePolicies;
use crate::limit::StoreFailurePolicy;
use crate::limit::charge::{Charge, ChargeRequest};
use crate::limit::request::Hits;
use crate::limit::slot::SlotChange;
use crate::store::charge::{ChargeResults, LimitAdmissions, StoreOutcome};
use crate::store::error::ChargeError;

/// Outcomes of the charges of a request, one for each descriptor.
pub(super) type OutcomesByDescriptor = SmallVec<[DescriptorOutcome; 2]>;
/// Dry runs of the charges of a request, one for each descriptor; empty without
/// STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT.
pub(super) type DryRuns = SmallVec<[DryRun; 2]>;

/// Result of the dry run of a charge.
#[derive(Clone, Copy, Debug)]
pub(super) struct DryRun {
    limit_verdicts: LimitVerdicts,
    /// A limit rejects the hits, in shadow mode too.
    is_exceeded: bool,
    /// Failure of the store.
    error: Option<ChargeError>,
}

impl<'a> SelectedRequest<'a, '_, '_> {
    /// Runs all charges dry, into `dry_runs`; `None` if that is done when the call returns.
    pub(super) fn dry_run_descriptors(&self, dry_runs: &mut DryRuns) -> Option<impl Future<Output = ()>> {
        let Self { request, selections, .. } = *self;
        let without_limits = |selection: &Selection<'_>| DryRun {
            limit_verdicts: DescriptorOutcome::WithoutLimits.limit_verdicts(&self.decider.behaviour, selection),
            is_exceeded: false,
            error: None,
        };
        dry_runs.extend(selections.iter().map(without_limits));
        let charges = selections.iter().enumerate().filter_map(move |(index, selection)| {
            Some((index, selection.build_charge(request, index, self.context.max_delay_us)?))
        });
        let record = move |index: usize, charge: &Charge<'_>, admissions: Result<LimitAdmissions, ChargeError>| {
            dry_runs[index] = self.build_dry_run(&selections[index], charge, admissions);
        };
        self.decider.store.dry_run_all(charges, self.context.store, record)
    }

    fn build_dry_run(
        &self,
        selection: &Selection<'_>,
        charge: &Charge<'_>,
        admissions: Result<LimitAdmissions, ChargeError>,
    ) -> DryRun {
        let limit_verdicts = |admissions: &LimitAdmissions| {
            let rejection = |admits: &bool| (!admits).then_some(LimitRejection { retry_after_us: None });
            LimitVerdicts::from_rejections_by(&selection.limits, |index| admissions.get(index).and_then(rejection))
        };
        match admissions {
            Ok(admissions) => DryRun {
                limit_verdicts: limit_verdicts(&admissions),
                is_exceeded: admissions.iter().any(|admits| !admits),
                error: None,
            },
            Err(error) => {
                let policies = FailurePolicies::for_charge(&selection.limits, charge.request.hits);
                let mut admissions = LimitAdmissions::new();
                if policies.uses_fallback() {
                    admissions = self.decider.store.dry_run_fallback(charge, self.context.store.now);
                }
                let limit_verdicts = limit_verdicts(&admissions).replaced_by_policies(policies);
                DryRun { limit_verdicts, is_exceeded: limit_verdicts.rejects(), error: Some(error) }
            }
        }
    }

    /// Makes all charges, into `outcomes`; `None` if that is done when the call returns.
    pub(super) fn charge_descriptors(
        &'a self,
        dry_runs: &'a DryRuns,
        outcomes: &'a mut OutcomesByDescriptor,
    ) -> Option<impl Future<Output = ()>> {
        let selections = self.selections;
        outcomes.reserve_exact(selections.len());
        outcomes.extend(selections.iter().map(|_| DescriptorOutcome::WithoutLimits));
        let holds_back_any = self.limits_reject_request(&dry_runs.iter().map(|dry_run| dry_run.limit_verdicts));
        let charge_of = move |index: usize| {
            let charge = self.build_descriptor_charge(index)?;
            let is_held_back = holds_back_any && dry_runs.get(index).is_some_and(|dry_run| !dry_run.is_exceeded);
            Some(if is_held_back { to_peek(charge) } else { charge })
        };
        self.make_charges(charge_of, dry_runs, outcomes)
    }

    /// Charges the descriptors held back if the request is not rejected after all; `None` if there is nothing to do, or
    /// if that is done when the call returns.
    pub(super) fn charge_held_back_descriptors(
        &'a self,
        dry_runs: &'a DryRuns,
        outcomes: &'a mut OutcomesByDescriptor,
    ) -> Option<impl Future<Output = ()>> {
        let limit_verdicts = outcomes.iter().zip(self.selections);
        let limit_verdicts =
            limit_verdicts.map(|(outcome, selection)| outcome.limit_verdicts(&self.decider.behaviour, selection));
        if !self.limits_reject_request(&dry_runs.iter().map(|dry_run| dry_run.limit_verdicts))
            || self.limits_reject_request(&limit_verdicts)
        {
            return None;
        }
        // Refunds and peeks were made as they are.
        let charge_of = move |index: usize| {
            let charge =
                self.build_descriptor_charge(index).filter(|charge| matches!(charge.request.hits, Hits::Charge(_)))?;
            (!dry_runs[index].is_exceeded).then_some(charge)
        };
        self.make_charges(charge_of, dry_runs, outcomes)
    }

    /// Makes the charge of each descriptor that has one. A charge whose dry run failed is not sent: its policy decides.
    fn make_charges(
        &'a self,
        charge_of: impl Fn(usize) -> Option<Charge<'a>> + Copy,
        dry_runs: &'a DryRuns,
        outcomes: &'a mut OutcomesByDescriptor,
    ) -> Option<impl Future<Output = ()>> {
        let Self { request, selections, .. } = *self;
        let failure_of = move |index: usize| dry_runs.get(index)?.error;
        for index in 0..dry_runs.len() {
            if let (Some(error), Some(charge)) = (failure_of(index), charge_of(index)) {
                outcomes[index] = self.decide_failed_charge(error, &selections[index], &charge);
            }
        }
        let charges = (0..selections.len()).filter(move |index| failure_of(*index).is_none());
        let charges = charges.filter_map(move |index| Some((index, charge_of(index)?)));
        let record = move |index: usize, charge: &Charge<'_>, outcome: Result<StoreOutcome, ChargeError>| {
            let selection: &Selection<'_> = &selections[index];
            outcomes[index] = match outcome {
                Ok(outcome) => {
                    if selection.is_release() {
                        self.release_fallback_slot(charge);
                    }
                    selection.warn_if_hits_lost_after_peek(request.descriptors[index].hits, &outcome);
                    DescriptorOutcome::Charged(outcome)
                }
                Err(error) => self.decide_failed_charge(error, selection, charge),
            };
        };
        self.decider.store.charge_all(charges, self.context.store, record)
    }

    fn build_descriptor_charge(&self, index: usize) -> Option<Charge<'a>> {
        let Self { request, selections, .. } = *self;
        selections[index].build_charge(request, index, self.context.max_delay_us)
    }

    /// Returns true if the limits reject the request.
    fn limits_reject_request(&self, limit_verdicts: &(impl Iterator<Item = LimitVerdicts> + Clone)) -> bool {
        combine_verdicts(limit_verdicts, !self.decider.behaviour.shadow_mode) == Answer::Rejected
    }

    /// Decides a charge that the store failed to decide. Refunds, peeks and limits in shadow mode are never rejected.
    fn decide_failed_charge(
        &self,
        error: ChargeError,
        selection: &Selection<'_>,
        charge: &Charge<'_>,
    ) -> DescriptorOutcome {
        if selection.is_release() {
            return self.decide_failed_release(error, charge);
        }
        let policies = FailurePolicies::for_charge(&selection.limits, charge.request.hits);
        self.decider.failures.record_and_log_failure(
            error,
            policies.strictest(),
            self.context.store.now,
            &self.decider.store,
        );
        let mut fallback = ChargeResults::new();
        if policies.uses_fallback() {
            fallback = self.decider.store.charge_fallback(charge, self.context.store.now);
        }
        for (selected, result) in selection.limits.iter().zip(&mut fallback) {
            let is_allowed = policies.policy_for_limit(selected) == StoreFailurePolicy::Allow;
            result.admitted |= is_allowed || charge.request.hits == Hits::Peek;
        }
        DescriptorOutcome::Failed(FailedCharge { error, policies, fallback })
    }
}

/// Releases of slots.
impl SelectedRequest<'_, '_, '_> {
    /// Frees a slot that this process gave out while the store failed. The store may have given it out too, later.
    #[cold]
    fn release_fallback_slot(&self, charge: &Charge<'_>) {
        if !self.decider.store.is_immediate() && self.decider.store.has_fallback_slots() {
            self.decider.store.charge_fallback(charge, self.context.store.now);
        }
    }

    /// Decides a release that the store failed to make, and repeats it later. It is an error unless this process gave
    /// out the slot, so that Envoy repeats the call too: this process may end before.
    #[cold]
    fn decide_failed_release(&self, error: ChargeError, charge: &Charge<'_>) -> DescriptorOutcome {
        // By its token, a release frees the slot of its request only, however late.
        self.decider.store.give_back_slots(&[(0, charge.clone())], self.context.store);
        let results = self.decider.store.charge_fallback(charge, self.context.store.now);
        if results.iter().any(|result| result.slot == SlotChange::Freed) {
            return DescriptorOutcome::Charged(StoreOutcome::from_store_results(results, self.context.store.now));
        }
        let policies = FailurePolicies { hard: StoreFailurePolicy::Error, quotas: StoreFailurePolicy::Error };
        self.decider.failures.record_and_log_failure(
            error,
            StoreFailurePolicy::Error,
            self.context.store.now,
            &self.decider.store,
        );
        DescriptorOutcome::Failed(FailedCharge { error, policies, fallback: ChargeResults::new() })
    }
}

/// The same charge as a peek; refunds stay.
const fn to_peek(mut charge: Charge<'_>) -> Charge<'_> {
    if matches!(charge.request.hits, Hits::Charge(_)) {
        charge.request = ChargeRequest { hits: Hits::Peek, is_sent_by_client: false, ..charge.request };
    }
    charge
}
