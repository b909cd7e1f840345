//! slots: requests at once. The state is what one request sees of the table of slots.
//!
//! A table can have a million slots, so no state has them all: a [`State`] is the number of seats in use, and the slot
//! of the request itself. The store that has the table makes one, the algorithm changes it, and the store writes what
//! changed. The same arithmetic serves both stores.
//!
//! - A request whose slot exists passes at the limit too: it is a retried call, or an internal redirect of its stream.
//! - A release frees the slot if it brings the slot's newest token, or if Envoy saw no answer; the latter leaves a
//!   *tombstone*, so that a request that comes later cannot take the slot.
//!
//! Decides: how many seats a request takes; a stream that asks again for its slot; a request for more than the limit.
//! Decides: a lowered concurrent limit; no slot in shadow mode when all are taken; what a release frees.
//! Decides: a request that comes after its `?` release (rejected for 15 s, `Late`).

use super::stored_state::{MalformedReply, ReplyReader, ScriptCharge, ShareRatio, StoredState};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult};
use crate::limit::request::Hits;
use crate::limit::slot::{FULL_LIMIT_RETRY_AFTER_US, SlotAction, SlotChange, SlotToken, SlotUse, TOMBSTONE_US};

/// Slot of a request in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OwnSlot {
    /// It is not there.
    #[default]
    Absent,
    /// It is taken.
    Held {
        /// Token of the newest answer.
        token: SlotToken,
        /// Seats that it takes.
        seats: u32,
    },
    /// Its release came first.
    Tombstone,
}

/// What one request sees of the slots of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Time of the request.
    pub last: Time,
    /// Seats in use.
    pub used: u64,
    /// Slot of the request.
    pub own: OwnSlot,
    /// Seats that were found expired, or held by a dead holder, and are not among those in use.
    pub expired: u32,
    /// Token of the request.
    pub token: SlotToken,
    /// The request frees its slot whatever the token is.
    pub is_unanswered: bool,
}

impl State {
    /// Adds what the request brings.
    #[must_use]
    pub fn with_slot_use(self, slot: &SlotUse) -> Self {
        Self { token: slot.token, is_unanswered: slot.action == SlotAction::ReleaseUnanswered, ..self }
    }

    fn acquire(&mut self, seats: u64) -> SlotChange {
        match self.own {
            OwnSlot::Held { seats, .. } => {
                self.own = OwnSlot::Held { token: self.token, seats };
                SlotChange::Renewed
            }
            OwnSlot::Absent | OwnSlot::Tombstone => {
                self.own = OwnSlot::Held { token: self.token, seats: u32::try_from(seats).unwrap_or(u32::MAX) };
                self.used += seats;
                SlotChange::Taken
            }
        }
    }

    fn release(&mut self) -> SlotChange {
        match self.own {
            OwnSlot::Held { token, seats } if self.is_unanswered || token == self.token => {
                // An unanswered request may be an internal redirect that has yet to come, and the slot that of the
                // attempt before: without a tombstone it would take the slot again, and nothing would free it.
                self.own = if self.is_unanswered { OwnSlot::Tombstone } else { OwnSlot::Absent };
                self.used = self.used.saturating_sub(u64::from(seats));
                SlotChange::Freed
            }
            OwnSlot::Absent if self.is_unanswered => {
                self.own = OwnSlot::Tombstone;
                SlotChange::ReleasedEarly
            }
            OwnSlot::Held { .. } | OwnSlot::Absent | OwnSlot::Tombstone => SlotChange::None,
        }
    }
}

/// Applies a request: takes its slot, asks for one, or frees it.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let before = state.used;
    let admitted = admits(limit, state, now, request);
    let change = match request.hits {
        Hits::Charge(_) if state.own == OwnSlot::Tombstone => SlotChange::Late,
        Hits::Charge(seats) if admitted && !request.rejected_elsewhere => state.acquire(seats),
        Hits::Refund(_) => state.release(),
        Hits::Charge(_) | Hits::Peek => SlotChange::None,
    };
    let seats = limit.requests_per_unit();
    let can_ever_pass = request.required_hits() <= seats;
    // A request whose release came first can pass once that is forgotten.
    let retry_after_us = if state.own == OwnSlot::Tombstone { TOMBSTONE_US } else { FULL_LIMIT_RETRY_AFTER_US };
    ChargeResult {
        admitted,
        before,
        after: state.used,
        remaining: seats.saturating_sub(state.used),
        reset_us: if state.used > 0 { limit.period_us() } else { 0 },
        retry_after_us: (!admitted && can_ever_pass).then_some(retry_after_us),
        slot: change,
        // Told once: the next charge of the call may have the same counter.
        expired_seats: std::mem::take(&mut state.expired),
        ..ChargeResult::default()
    }
}

/// Returns true if [`charge`] would admit the request; changes nothing.
pub fn admits(limit: &Limit, state: &State, _now: Time, request: ChargeRequest) -> bool {
    if matches!(request.hits, Hits::Refund(_)) {
        return true;
    }
    match state.own {
        OwnSlot::Held { .. } => true,
        OwnSlot::Tombstone => false,
        OwnSlot::Absent => state.used.saturating_add(request.required_hits()) <= limit.requests_per_unit(),
    }
}

// Numbers that stand for the kinds of `OwnSlot` in a script's reply.
const ABSENT: u64 = 0;
const HELD: u64 = 1;
const TOMBSTONE: u64 = 2;

impl StoredState for State {
    /// The memory store keeps the table, and never packs what a request sees of it.
    fn to_packed_words(&self) -> [u64; 2] {
        [self.used, 0]
    }

    fn from_packed_words([used, _]: [u64; 2], last: Time) -> Self {
        Self { last, used, ..Self::default() }
    }

    fn read_from_reply(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply> {
        let (used, kind) = (reply.read_number()?, reply.read_number()?);
        let (token, seats) = (SlotToken(reply.read_word()?), reply.read_u32()?);
        let own = match kind {
            ABSENT => OwnSlot::Absent,
            HELD => OwnSlot::Held { token, seats },
            TOMBSTONE => OwnSlot::Tombstone,
            _ => return Err(MalformedReply),
        };
        Ok(Self { last, used, own, expired: reply.read_u32()?, ..Self::default() })
    }

    /// The limit, and the seats that the request needs, negative for a release.
    fn script_arguments<'c>(mut charges: impl Iterator<Item = ScriptCharge<'c>>, _now: Time) -> [i64; 2] {
        let Some(ScriptCharge { limit, hits }) = charges.next() else { return [0, 0] };
        let seats = match hits {
            Hits::Charge(seats) => i64::try_from(seats).unwrap_or(i64::MAX),
            Hits::Peek => 1,
            Hits::Refund(_) => -1,
        };
        [limit.requests_per_unit().cast_signed(), seats]
    }

    /// Slots are not shared out: the fallback has a table of its own.
    fn scaled_to_fallback_share(&self, _ratio: ShareRatio, _limit: &Limit, _now: Time) -> Self {
        *self
    }
}
