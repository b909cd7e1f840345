//! A request as it is matched: without the entries that identify a stream, its entries in the order of the rules.
//!
//! Every reader of a request, a decision as well as an operator's command, prepares it here, so that all of them select
//! the same limits and counters. Most requests are matched as they were sent, without a copy.

use std::sync::LazyLock;

use super::decision::DecideError;
use super::slot_entries::RequestAndSlotUses;
use crate::limit::request::Request;
use crate::limit::slot::{SlotCaller, SlotUse};
use crate::rules::rule::set::RuleSet;

/// Empty rule set, for requests that only a block can reject.
pub(super) static NO_RULES: LazyLock<RuleSet> = LazyLock::new(|| RuleSet::new(Vec::new()));

/// A request as these rules match it.
#[derive(Debug)]
pub struct PreparedRequest<'a, 'r, 'm> {
    /// The rules.
    pub(super) rules: &'r RuleSet,
    sent: &'a Request<'m>,
    /// `None`: it is matched as it was sent.
    changed: Option<Box<RequestAndSlotUses<'m>>>,
}

impl<'a, 'r, 'm> PreparedRequest<'a, 'r, 'm> {
    /// Prepares a request.
    ///
    /// # Errors
    /// The values that identify a stream are formatters that Envoy sent as text.
    #[inline]
    pub fn new(rules: &'r RuleSet, caller: SlotCaller<'_>, sent: &'a Request<'m>) -> Result<Self, DecideError> {
        // Most rule sets follow no streams, which spares the call.
        let mut changed = match rules.follows_streams() {
            true => RequestAndSlotUses::separate(rules, caller, sent)?,
            false => None,
        };
        if let Some(domain) = rules.find_domain_with_any_order(sent.domain) {
            let changed = changed.get_or_insert_with(|| Box::new(RequestAndSlotUses::without_slots(sent)));
            rules.sort_request_entries(domain, &mut changed.request);
        }
        Ok(Self { rules, sent, changed })
    }

    /// Prepares a request for an operator; one that a decision would refuse stays as it was sent.
    pub(super) fn new_or_as_sent(rules: &'r RuleSet, caller: SlotCaller<'_>, sent: &'a Request<'m>) -> Self {
        Self::new(rules, caller, sent).unwrap_or_else(|_| Self::as_sent(rules, sent))
    }

    /// A request that is matched as it was sent.
    pub(super) const fn as_sent(rules: &'r RuleSet, sent: &'a Request<'m>) -> Self {
        Self { rules, sent, changed: None }
    }

    /// The same request with an empty rule set.
    pub(super) fn with_empty_rules(self) -> Self {
        Self { rules: &NO_RULES, ..self }
    }

    /// The request as it is matched.
    pub fn request(&self) -> &Request<'m> {
        self.changed.as_deref().map_or(self.sent, |changed| &changed.request)
    }

    /// Use of a slot by each descriptor; empty in a domain where no limit follows streams.
    pub(super) fn slot_uses(&self) -> &[SlotUse] {
        self.changed.as_deref().map_or(&[], |changed| &changed.uses)
    }

    /// Returns true if all descriptors free slots.
    pub(super) fn is_release(&self) -> bool {
        let uses = self.slot_uses();
        !uses.is_empty() && uses.iter().all(|slot| slot.action.is_release())
    }
}
