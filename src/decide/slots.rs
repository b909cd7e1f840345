//! Slots in a request: trailing entries `slot` and `release` identify a stream, and are not matched.
//!
//! In a domain with a `concurrent` limit they are taken off before anything else sees the request, so they are in no
//! metric, key or log. A descriptor with `release` frees the slots of its concurrent limits and charges nothing else.
//! A call that is rejected by a limit of another descriptor gives back the slots that it took: its answer says `-`, so
//! Envoy will not.

use std::borrow::Cow;
use std::net::IpAddr;
use std::time::Duration;

use smallvec::SmallVec;

use super::Decider;
use super::decision::{DecideError, Decision, DecisionContext};
use super::outcome::DescriptorOutcome;
use super::selection::{RequestWithSelections, Selection};
use crate::limit::charge::Charge;
use crate::limit::request::{Entry, Hits, Request};
use crate::limit::slot::{
    HolderId, REJECTED_TOKEN, RELEASE_KEY, ReleaseValue, SLOT_KEY, SlotAction, SlotChange, SlotId, SlotToken, SlotUse,
    TokenText,
};
use crate::rules::rule::set::RuleSet;
use crate::store::charge::{DeferredOutcomes, spawn_outcome_handler};
use crate::telemetry::log_throttle::LogThrottle;

/// Key of the dynamic metadata that has the token.
const METADATA_KEY: &str = "slot";
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Who makes a call, as far as slots are concerned.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotCaller<'r> {
    /// Envoy that makes the call.
    pub holder: Holder<'r>,
    /// Uses of a recorded call, one for each descriptor, in place of entries `slot` and `release`: for a replay.
    pub recorded: &'r [SlotUse],
}

/// Envoy that makes a call.
#[derive(Clone, Copy, Debug, Default)]
pub enum Holder<'r> {
    /// Nothing is known.
    #[default]
    Unknown,
    /// By the metadata `x-tollkeeper-holder`.
    Named(&'r [u8]),
    /// By its address: without a port, because both filters of an Envoy may have connections of their own.
    Address(IpAddr),
}

impl<'r> Holder<'r> {
    /// Name of the holder; empty if nothing is known.
    pub fn name(self) -> Cow<'r, [u8]> {
        match self {
            Self::Unknown => Cow::Borrowed(b""),
            Self::Named(name) => Cow::Borrowed(name),
            Self::Address(address) => Cow::Owned(address.to_string().into_bytes()),
        }
    }
}

/// A request without its entries `slot` and `release`, and what they say.
#[derive(Debug)]
pub struct SeparatedRequest<'m> {
    /// The request as it is matched. Releases have the hits of a refund.
    pub request: Request<'m>,
    /// Use of a slot by each descriptor.
    pub(super) uses: SlotUses,
}

/// Use of a slot by each descriptor; empty in a domain without concurrent limits.
pub(super) type SlotUses = SmallVec<[SlotUse; 2]>;

/// Uses of a request in a domain without concurrent limits.
static NO_USES: SlotUses = SlotUses::new_const();

impl<'m> SeparatedRequest<'m> {
    /// The request as it is matched, and its uses of slots: `whole` and none if nothing was separated.
    pub(super) fn parts_or<'a>(
        separated: Option<&'a Self>,
        whole: &'a Request<'m>,
    ) -> (&'a Request<'m>, &'a [SlotUse]) {
        separated.map_or((whole, &*NO_USES), |separated| (&separated.request, &separated.uses))
    }

    /// Returns true if all descriptors free slots.
    pub(super) fn is_release(&self) -> bool {
        self.uses.iter().all(|slot| slot.action.is_release())
    }
}

/// Returns true if an entry is one of those that identify a stream.
fn is_slot_entry(entry: &Entry<'_>) -> bool {
    entry.key == SLOT_KEY || entry.key == RELEASE_KEY
}

/// Returns true if a request may free a slot: such a call is carried out though its caller gives up.
pub fn may_release(request: &Request<'_>) -> bool {
    request.descriptors.iter().any(|descriptor| descriptor.entries.last().is_some_and(|last| last.key == RELEASE_KEY))
}

impl RuleSet {
    /// Takes the entries `slot` and `release` off a request; `None` in a domain without concurrent limits.
    ///
    /// # Errors
    /// A value is a formatter that Envoy sent as text.
    pub fn separate_slots<'m>(
        &self,
        caller: SlotCaller<'_>,
        request: &Request<'m>,
    ) -> Result<Option<Box<SeparatedRequest<'m>>>, DecideError> {
        if !self.has_slots() || !self.domain(request.domain).is_some_and(|domain| domain.has_slots) {
            return Ok(None);
        }
        let mut separated = Box::new(SeparatedRequest { request: request.clone(), uses: SmallVec::new() });
        if caller.recorded.len() == request.descriptors.len() {
            separated.uses.extend(caller.recorded.iter().copied());
            return Ok(Some(separated));
        }
        let holder = HolderId::from_name(&caller.holder.name());
        let (token, unnamed) = (SlotToken::random(), SlotId::random());
        for descriptor in &mut separated.request.descriptors {
            let own = descriptor.entries.iter().rev().take_while(|entry| is_slot_entry(entry)).count();
            let own: SmallVec<[Entry<'m>; 4]> = descriptor.entries.drain(descriptor.entries.len() - own..).collect();
            if own.iter().any(|entry| entry.value.starts_with(b"%")) {
                return Err(DecideError::LiteralFormatter);
            }
            let release =
                own.iter().find(|entry| entry.key == RELEASE_KEY).map(|entry| ReleaseValue::parse(entry.value));
            let mut values = own.iter().filter(|entry| entry.key == SLOT_KEY).map(|entry| entry.value).peekable();
            let named = values.peek().is_some().then(|| SlotId::from_values(holder, values));
            let (id, token, action) = match release {
                None => (unnamed, token, SlotAction::Acquire),
                Some(ReleaseValue::Admitted(TokenText { id, token })) => (id, token, SlotAction::Release),
                Some(ReleaseValue::Unanswered) if named.is_some() => {
                    (unnamed, SlotToken::default(), SlotAction::ReleaseUnanswered)
                }
                // Without entries `slot` nothing says which slot it is.
                Some(ReleaseValue::Unanswered | ReleaseValue::Rejected) => {
                    (unnamed, SlotToken::default(), SlotAction::ReleaseRejected)
                }
            };
            if action.is_release() {
                descriptor.hits = Hits::Refund(1);
            }
            separated.uses.push(SlotUse { id: named.unwrap_or(id), token, holder, action });
        }
        Ok(Some(separated))
    }
}

/// Logs that Envoy sends formatters as text.
pub(super) fn warn_about_literal_formatter(context: DecisionContext<'_>, request: &Request<'_>) {
    static LITERAL_FORMATTER: LogThrottle = LogThrottle::every(LOG_INTERVAL);
    if let Some(suppressed) = LITERAL_FORMATTER.allow(context.store.now) {
        tracing::warn!(domain = request.domain, suppressed, "call refused: {}", DecideError::LiteralFormatter);
    }
}

impl Decider {
    /// Records the caller of a request that uses slots, as a sign of life.
    pub(super) fn record_slot_holder(&self, context: DecisionContext<'_>, selections: &[Selection<'_>]) {
        if let Some(slot) = selections.iter().find_map(|selection| selection.slot.as_ref()) {
            self.store.holders().record_call(slot.holder, &context.slots.holder.name(), context.store.now);
        }
    }

    /// Puts the token of the slots that a request took into the metadata of its answer, and gives them back if the
    /// answer is a rejection.
    #[cold]
    pub(super) fn finish_slots<'r>(
        &'r self,
        context: DecisionContext<'r>,
        selected: RequestWithSelections<'_, 'r, '_>,
        outcomes: &[DescriptorOutcome],
        decided: &mut Result<Decision<'r>, DecideError>,
    ) {
        let Ok(decision) = decided else { return };
        let mut uses = selected.selections.iter().filter_map(|selection| selection.slot);
        let Some(slot) = uses.find(|slot| slot.action == SlotAction::Acquire) else { return };
        let token = match decision.over_limit {
            true => REJECTED_TOKEN.to_owned(),
            false => TokenText { id: slot.id, token: slot.token }.to_string(),
        };
        decision.metadata.get_or_insert_default().insert(METADATA_KEY.to_owned(), token.into());
        if decision.over_limit {
            self.give_back_slots(context, selected, outcomes);
        }
    }

    /// Metadata of a rejection by a block: that the request has no slot.
    pub(super) fn build_blocked_metadata(
        &self,
        context: DecisionContext<'_>,
        request: &Request<'_>,
    ) -> Option<serde_json::Map<String, serde_json::Value>> {
        let domain = context.rules?.domain(request.domain).filter(|domain| domain.has_slots);
        domain.map(|_| [(METADATA_KEY.to_owned(), REJECTED_TOKEN.into())].into_iter().collect())
    }

    /// Frees the slots that a rejected request took.
    fn give_back_slots(
        &self,
        context: DecisionContext<'_>,
        selected: RequestWithSelections<'_, '_, '_>,
        outcomes: &[DescriptorOutcome],
    ) {
        let RequestWithSelections { request, selections } = selected;
        let took_slot = |outcome: &DescriptorOutcome, selection: &Selection<'_>| {
            let mut results = (0..selection.limits.len()).filter_map(|index| outcome.limit_result(index));
            results.any(|result| matches!(result.slot, SlotChange::Taken | SlotChange::Renewed))
        };
        let releases: Vec<Option<SlotUse>> = selections
            .iter()
            .map(|selection| selection.slot.map(|slot| SlotUse { action: SlotAction::Release, ..slot }))
            .collect();
        let mut charges: Vec<(usize, Charge<'_>)> = Vec::new();
        for (index, (selection, release)) in selections.iter().zip(&releases).enumerate() {
            let Some(release) = release else { continue };
            let deciding = selection.build_charge(request, index, 0);
            let deciding = deciding.filter(|_| took_slot(&outcomes[index], selection));
            let candidates =
                (0..selection.candidates.len()).map(|at| selection.build_candidate_charge(request, index, at, 0));
            for mut charge in deciding.into_iter().chain(candidates) {
                charge.counters.retain(|counter| counter.limit.is_concurrent());
                (charge.request.hits, charge.slot) = (Hits::Refund(1), Some(release));
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
                self.store.charge_fallback(charge, context.store.now);
            }
        }
        match self.store.charge_deferred(&charges, context.store) {
            DeferredOutcomes::Ready(_) => {}
            DeferredOutcomes::Pending(pending) => spawn_outcome_handler(pending, |_outcomes| ()),
        }
    }
}
