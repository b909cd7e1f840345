//! Slot of a request in its answer, and the slots and reservations that a rejection gives back.
//!
//! A call that is rejected by a limit of another descriptor gives back the slots and reservations that it took: its
//! answer says `-`, so Envoy will not. If the store did not answer in time and a policy rejects, nobody knows whether a
//! slot was taken: the call gives it back all the same, and the answer says `?`, so that a release frees what there is.
//!
//! Decides: the token of a slot in an answer (`-`, `?`), also of a blocked request.
//! Decides: who gives slots and reservations back that another descriptor's limit rejects.

use super::charged_request::ChargedRequest;
use super::decision::Decision;
use super::outcome::DescriptorOutcome;
use super::selected_request::SelectedRequest;
use super::selection::Selection;
use crate::limit::charge::Charge;
use crate::limit::request::Hits;
use crate::limit::slot::{
    SlotAction, SlotChange, SlotIdWithToken, SlotUse, TOKEN_OF_REJECTED_REQUEST, TOKEN_OF_UNANSWERED_REQUEST,
};

/// Key of the dynamic metadata that has the token.
const SLOT_METADATA_KEY: &str = "slot";

impl SelectedRequest<'_, '_, '_> {
    /// Records the caller of a request that uses slots, as a sign of life.
    pub(super) fn record_slot_holder(&self) {
        let Self { decider, context, selections, .. } = self;
        if let Some(slot) = selections.iter().find_map(|selection| selection.slot.as_ref()) {
            decider.store.slot_holders().record_slot_call(slot.holder, &context.slots.holder.name(), context.store.now);
        }
    }
}

impl ChargedRequest<'_, '_, '_> {
    /// Puts the token of the slots that a request took into the metadata of its answer, and gives them back if the
    /// answer is a rejection.
    #[cold]
    pub(super) fn add_slot_token_or_free_slots(&self, decision: &mut Decision<'_>) {
        let selections = self.selected.selections;
        let mut uses = selections.iter().filter_map(|selection| selection.slot.as_deref());
        let Some(slot) = uses.find(|slot| slot.action == SlotAction::Acquire) else { return };
        let token = match decision.over_limit {
            // By the id, as if Envoy had seen no answer: nothing else would free the slot.
            true if may_failed_charge_hold_slot(selections, self.outcomes) => TOKEN_OF_UNANSWERED_REQUEST.to_owned(),
            true => TOKEN_OF_REJECTED_REQUEST.to_owned(),
            false => SlotIdWithToken { id: slot.id, token: slot.token }.to_string(),
        };
        decision.metadata.get_or_insert_default().insert(SLOT_METADATA_KEY.to_owned(), token.into());
        if decision.over_limit {
            self.give_back_slots();
        }
    }

    /// Frees the slots that a rejected request took.
    fn give_back_slots(&self) {
        let (SelectedRequest { decider, context, request, selections, .. }, outcomes) = (*self.selected, self.outcomes);
        let took_slot = |outcome: &DescriptorOutcome, selection: &Selection<'_>| {
            let mut results = (0..selection.limits.len()).filter_map(|index| outcome.limit_result(index));
            results.any(|result| matches!(result.slot, SlotChange::Taken | SlotChange::Renewed))
        };
        // By token, so that a retry of the request with the same id keeps the slot that it got meanwhile.
        let releases: Vec<Option<SlotUse>> = selections
            .iter()
            .map(|selection| selection.slot.as_deref().map(|slot| SlotUse { action: SlotAction::Release, ..*slot }))
            .collect();
        let mut charges: Vec<(usize, Charge<'_>)> = Vec::new();
        for (index, (selection, release)) in selections.iter().zip(&releases).enumerate() {
            let Some(release) = release else { continue };
            let deciding = selection.build_charge(request, index, 0);
            let outcome = &outcomes[index];
            let mut deciding = deciding.filter(|_| took_slot(outcome, selection) || may_have_charged(outcome));
            if let Some(charge) = &mut deciding {
                remove_renewed_reservations(charge, outcome);
            }
            let is_unmade = matches!(outcome, DescriptorOutcome::Failed(_)) && !may_have_charged(outcome);
            let candidates = if is_unmade { 0 } else { selection.candidates.len() };
            let candidates = (0..candidates).map(|at| selection.build_shadow_candidate_charge(request, index, at, 0));
            for mut charge in deciding.into_iter().chain(candidates) {
                charge.counters.retain(|counter| counter.limit.follows_streams());
                (charge.request.hits, charge.slot) = (Hits::Refund(0), Some(release));
                if !charge.counters.is_empty() {
                    charges.push((index, charge));
                }
            }
        }
        if charges.is_empty() {
            return;
        }
        // A slot of a local policy is in the fallback.
        for (index, charge) in &charges {
            if matches!(outcomes[*index], DescriptorOutcome::Failed(_)) {
                decider.store.charge_fallback(charge, context.store.now);
            }
        }
        decider.store.give_back_slots(&charges, context.store);
    }
}

/// Removes the counters of reservations that the request renewed: they stand for what an attempt before it, such as one
/// that was redirected, has used up. They keep their estimate, because its true cost comes with an old token.
fn remove_renewed_reservations(charge: &mut Charge<'_>, outcome: &DescriptorOutcome) {
    let mut index = 0;
    charge.counters.retain(|counter| {
        let is_renewed = outcome.limit_result(index).is_some_and(|result| result.slot == SlotChange::Renewed);
        index += 1;
        !is_renewed || counter.limit.reservations().is_none()
    });
}

/// Returns true if the store may have given out a slot that a failed charge asked for.
fn may_failed_charge_hold_slot(selections: &[Selection<'_>], outcomes: &[DescriptorOutcome]) -> bool {
    selections.iter().zip(outcomes).any(|(selection, outcome)| selection.slot.is_some() && may_have_charged(outcome))
}

/// Returns true if a charge failed that the store may have made.
fn may_have_charged(outcome: &DescriptorOutcome) -> bool {
    matches!(outcome, DescriptorOutcome::Failed(failed) if failed.error.may_have_charged())
}
