//! Slots in a request: trailing entries `slot` and `release` identify a stream, and are not matched.
//!
//! In a domain with a `concurrent` limit or `reservations` they are taken off before anything else sees the request, so
//! they are in no metric, key or log. A descriptor with `release` frees the slots of its concurrent limits, settles the
//! reservations of others with its hits, and charges nothing else.
//!
//! Decides: which entries identify a stream (`slot`, `release`).
//! Decides: values that are refused (INVALID_ARGUMENT): all begin with `%`, a formatter that Envoy did not expand.

use smallvec::SmallVec;

use super::decision::DecideError;
use crate::limit::request::{Entry, Hits, Request};
use crate::limit::slot::{
    HolderId, RELEASE_KEY, ReleaseValue, SLOT_KEY, SlotAction, SlotCaller, SlotId, SlotIdWithToken, SlotToken, SlotUse,
};
use crate::rules::rule::set::RuleSet;

/// A request without its entries `slot` and `release`, and what they say.
#[derive(Debug)]
pub(super) struct RequestAndSlotUses<'m> {
    /// The request without these entries. Releases have the hits of a refund: the cost that they settle with, also 0.
    pub(super) request: Request<'m>,
    /// Use of a slot by each descriptor; empty in a domain where no limit follows streams.
    pub(super) uses: SmallVec<[SlotUse; 2]>,
}

impl<'m> RequestAndSlotUses<'m> {
    /// Takes the entries `slot` and `release` off a request; `None` in a domain where no limit follows streams.
    ///
    /// # Errors
    /// The values are formatters that Envoy sent as text.
    pub(super) fn separate(
        rules: &RuleSet,
        caller: SlotCaller<'_>,
        request: &Request<'m>,
    ) -> Result<Option<Box<Self>>, DecideError> {
        if !rules.domain(request.domain).is_some_and(|domain| domain.follows_streams) {
            return Ok(None);
        }
        let mut separated = Box::new(Self::without_slots(request));
        if caller.recorded.len() == request.descriptors.len() {
            separated.uses.extend(caller.recorded.iter().copied());
            for (descriptor, slot) in separated.request.descriptors.iter_mut().zip(caller.recorded) {
                if slot.action.is_release() && descriptor.hits == Hits::Peek {
                    descriptor.hits = Hits::Refund(0);
                }
            }
            return Ok(Some(separated));
        }
        let holder = HolderId::from_name(&caller.holder.name());
        let (token, unnamed, mut token_id) = (SlotToken::random(), SlotId::random(), None);
        for descriptor in &mut separated.request.descriptors {
            let own = descriptor.entries.iter().rev().take_while(|entry| is_slot_entry(entry)).count();
            let own: SmallVec<[Entry<'m>; 4]> = descriptor.entries.drain(descriptor.entries.len() - own..).collect();
            if are_literal_formatters(&own) {
                return Err(DecideError::LiteralFormatter);
            }
            let release =
                own.iter().find(|entry| entry.key == RELEASE_KEY).map(|entry| ReleaseValue::parse(entry.value));
            let mut values = own.iter().filter(|entry| entry.key == SLOT_KEY).map(|entry| entry.value).peekable();
            let named = values.peek().is_some().then(|| SlotId::from_values(holder, values));
            let own_id = named.unwrap_or(unnamed);
            let (id, token, action) = match release {
                None => (own_id, token, SlotAction::Acquire),
                Some(ReleaseValue::Admitted(SlotIdWithToken { id, token })) => {
                    token_id = Some(id);
                    (named.unwrap_or(id), token, SlotAction::Release)
                }
                Some(ReleaseValue::Unanswered) if named.is_some() => {
                    (own_id, SlotToken::default(), SlotAction::ReleaseUnanswered)
                }
                // Without entries `slot` nothing says which slot it is.
                Some(ReleaseValue::Unanswered | ReleaseValue::Rejected) => {
                    (own_id, SlotToken::default(), SlotAction::ReleaseRejected)
                }
            };
            if action.is_release() {
                descriptor.hits = Hits::Refund(settled_cost(descriptor.hits));
            }
            separated.uses.push(SlotUse { id, token, holder, action });
        }
        // The token knows its slot, also if the release comes from another address, or without the name of its Envoy.
        if let Some(id) = token_id.filter(|id| separated.uses.iter().all(|slot| slot.id != *id)) {
            let by_token = separated.uses.iter_mut().filter(|slot| slot.action == SlotAction::Release);
            by_token.for_each(|slot| slot.id = id);
        }
        Ok(Some(separated))
    }

    /// A copy of a request in a domain where no limit follows streams.
    pub(super) fn without_slots(request: &Request<'m>) -> Self {
        Self { request: request.clone(), uses: SmallVec::new() }
    }
}

/// Returns true if an entry is one of those that identify a stream.
fn is_slot_entry(entry: &Entry<'_>) -> bool {
    entry.key == SLOT_KEY || entry.key == RELEASE_KEY
}

/// Returns true if Envoy sent formatters as text, so that all streams have the same values. A client may choose a value,
/// such as `x-request-id`, and must not be able to make its call fail: a value counts as a formatter if it looks like one.
fn are_literal_formatters(own: &[Entry<'_>]) -> bool {
    let is_literal = |entry: &Entry<'_>| is_formatter(entry.value);
    let mut slots = own.iter().filter(|entry| entry.key == SLOT_KEY).peekable();
    let all_are_literal = slots.peek().is_some() && slots.all(is_literal);
    all_are_literal || own.iter().any(|entry| entry.key == RELEASE_KEY && is_literal(entry))
}

/// Returns true for a text with a command operator of Envoy, such as `%STREAM_ID%` or `%REQ(x-request-id)%`, at its start.
fn is_formatter(value: &[u8]) -> bool {
    let Some(value) = value.strip_prefix(b"%") else { return false };
    let name = value.iter().take_while(|byte| matches!(byte, b'A'..=b'Z' | b'0'..=b'9' | b'_')).count();
    name > 0 && matches!(value[name..].first(), Some(b'%' | b'(' | b':')) && value[name..].contains(&b'%')
}

/// Returns true if a request may free a slot: such a call is carried out though its caller gives up.
pub fn may_release_slot(request: &Request<'_>) -> bool {
    request.descriptors.iter().any(|descriptor| descriptor.entries.last().is_some_and(|last| last.key == RELEASE_KEY))
}

/// True cost of a request whose release has these hits; a cost below 0 counts as 0.
const fn settled_cost(hits: Hits) -> u64 {
    match hits {
        Hits::Charge(cost) => cost,
        Hits::Peek | Hits::Refund(_) => 0,
    }
}
