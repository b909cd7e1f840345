//! Charges on a counter with reservations: a request reserves an estimate, a release settles it.
//!
//! See [`reservation`](crate::limit::reservation) for the cases.
//!
//! Decides: what settling a reservation gives back or charges; debt of a late or higher cost (`charge_debt`).
//! Decides: how many reserved hits still count (`refundable_hits`).

use super::fixed_window::window_bounds;
use super::state::{CounterWithReservations, State};
use super::stored_state::{MalformedReply, ReplyReader};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult};
use crate::limit::request::Hits;
use crate::limit::reservation::{OwnReservation, ReservationMark, ReservationView, ReservedHits};
use crate::limit::slot::{SlotAction, SlotChange, SlotToken, SlotUse, TOMBSTONE_US};

impl State {
    /// Adds what a request sees of the reservations of a counter.
    #[must_use]
    pub fn with_reservations(self, view: ReservationView) -> Self {
        Self::WithReservations(Box::new(CounterWithReservations { counter: self, view }))
    }

    /// Adds what a request sees of the reservations of a counter, which follows the counter and its ban in a
    /// script's reply, if the limit has some.
    ///
    /// # Errors
    /// The script cannot have returned these numbers.
    pub fn with_reservations_from_reply(
        self,
        limit: &Limit,
        slot: &SlotUse,
        reply: &mut ReplyReader<'_>,
    ) -> Result<Self, MalformedReply> {
        if limit.reservations().is_none() {
            return Ok(self);
        }
        let (kind, token) = (reply.read_number()?, SlotToken(reply.read_word()?));
        let (hits, refundable) = (reply.read_number()?, reply.read_number()?);
        let own = match kind {
            0 => OwnReservation::Absent,
            1 => OwnReservation::Open { token, hits, refundable },
            2 => OwnReservation::Tombstone,
            3 => OwnReservation::Over,
            _ => return Err(MalformedReply),
        };
        let (returned, unsettled, is_full) = (reply.read_number()?, reply.read_u32()?, reply.read_number()? != 0);
        Ok(self.with_reservations(ReservationView {
            own,
            returned,
            unsettled,
            is_full,
            ..ReservationView::empty_for(slot)
        }))
    }

    /// Gives hits of unsettled reservations back to the counter, before a request is decided.
    pub fn give_back_unsettled_hits(&mut self, limit: &Limit, now: Time) {
        if let Self::WithReservations(both) = self
            && both.view.returned > 0
        {
            both.counter.charge_counter(
                &limit.without_reservations(),
                now,
                build_give_back_request(both.view.returned),
            );
        }
    }

    /// Applies a request to the counter and to its reservation. A request whose reservation cannot be recorded charges
    /// its estimate, and settles nothing.
    pub(super) fn charge_with_reservations(
        &mut self,
        limit: &Limit,
        now: Time,
        request: ChargeRequest,
    ) -> ChargeResult {
        let Self::WithReservations(both) = self else {
            return match request.hits {
                Hits::Refund(_) => peek_as_admitted(self, limit, now),
                Hits::Peek => peek_at_estimate(self, limit, now, request),
                Hits::Charge(_) => self.charge_counter(limit, now, replace_hits_by_estimate(limit, request)),
            };
        };
        let CounterWithReservations { counter, view } = &mut **both;
        let result = match request.hits {
            Hits::Peek => peek(counter, view, limit, now, request),
            Hits::Charge(_) => reserve(counter, view, limit, now, request),
            Hits::Refund(cost) if view.slot.action.is_release() => settle(counter, view, limit, now, cost),
            Hits::Refund(_) => peek_as_admitted(counter, limit, now),
        };
        // Told once: the next charge of the call may have the same counter.
        ChargeResult { expired_seats: std::mem::take(&mut view.unsettled), ..result }
    }

    /// Returns `true` if [`State::charge_with_reservations`] would admit the hits; changes nothing.
    pub(super) fn admits_with_reservations(&self, limit: &Limit, now: Time, request: ChargeRequest) -> bool {
        let Self::WithReservations(both) = self else { return self.has_room_for_estimate(limit, now, request) };
        match (both.view.own, request.hits) {
            (_, Hits::Refund(_)) | (OwnReservation::Open { .. }, _) => true,
            (OwnReservation::Tombstone, _) => false,
            (OwnReservation::Absent | OwnReservation::Over, _) => {
                both.counter.has_room_for_estimate(limit, now, request)
            }
        }
    }

    /// Returns `true` if the counter has room for a request, or for the rule's estimate in its place.
    pub fn has_room_for_estimate(&self, limit: &Limit, now: Time, request: ChargeRequest) -> bool {
        self.counter_admits(limit, now, replace_hits_by_estimate(limit, request))
    }

    /// Mark of a reservation that was charged to this counter at `now`; `given_back` hits were given back to it so far.
    pub(crate) fn reservation_mark(&self, limit: &Limit, now: Time, given_back: u64) -> ReservationMark {
        let at = self.effective_charge_time(limit, now);
        let base = match self {
            Self::FixedWindow(_) => window_bounds(limit, at).1.as_micros(),
            Self::CalendarWindow(state) => state.end.as_micros(),
            Self::SlidingWindowCounter(_) => at.as_micros() / limit.period_us(),
            Self::TokenBucket(state) => state.used.saturating_add(given_back),
            _ => 0,
        };
        ReservationMark { at, base }
    }

    /// Hits of a reservation that certainly still count at `now`.
    ///
    /// A bucket refills at most the hits of the reservation itself. It refills those of others first if they were in it
    /// before, and are not given back.
    pub(crate) fn refundable_hits(&self, limit: &Limit, now: Time, reserved: ReservedHits) -> u64 {
        let ReservedHits { hits, mark, given_back, highest_rate } = reserved;
        let at = self.effective_charge_time(limit, now);
        // The clock was set back by more than a period: the state is discarded.
        if at < mark.at {
            return 0;
        }
        let all_if = |counts: bool| if counts { hits } else { 0 };
        match self {
            Self::FixedWindow(_) => all_if(at.as_micros() < mark.base),
            Self::CalendarWindow(state) => all_if(state.end.as_micros() == mark.base && at < state.end),
            Self::SlidingWindowCounter(_) => all_if(at.as_micros() / limit.period_us() == mark.base),
            Self::SlidingWindowLog(_) => all_if(at.since_us(mark.at) < limit.period_us()),
            Self::TokenBucket(_) => {
                let rate = u64::from(highest_rate).max(limit.requests_per_unit());
                let units = u128::from(at.since_us(mark.at)) * u128::from(rate);
                let refilled = u64::try_from(units.div_ceil(u128::from(limit.period_us()))).unwrap_or(u64::MAX);
                mark.base.saturating_sub(given_back).max(hits).saturating_sub(refilled).min(hits)
            }
            _ => 0,
        }
    }
}

/// Builds the refund of hits that were reserved.
const fn build_give_back_request(hits: u64) -> ChargeRequest {
    ChargeRequest { gives_back: true, ..ChargeRequest::new(Hits::Refund(hits), 0) }
}

/// Returns the request with the rule's estimate in place of its hits; a peek asks whether the estimate fits.
fn replace_hits_by_estimate(limit: &Limit, request: ChargeRequest) -> ChargeRequest {
    match limit.reservations().and_then(|reservations| reservations.fixed_estimate()) {
        Some(estimate) if !matches!(request.hits, Hits::Refund(_)) => {
            ChargeRequest { hits: Hits::Charge(u64::from(estimate.get())), ..request }
        }
        _ => request,
    }
}

/// Peeks at the counter; the result admits whatever it has.
fn peek_as_admitted(counter: &mut State, limit: &Limit, now: Time) -> ChargeResult {
    let result = counter.charge_counter(limit, now, ChargeRequest::new(Hits::Peek, 0));
    ChargeResult { admitted: true, retry_after_us: None, ..result }
}

/// Rejects a request whose settlement came first: its stream is gone. Another one of the same id may pass later.
fn reject_after_settlement(counter: &mut State, limit: &Limit, now: Time) -> ChargeResult {
    ChargeResult { admitted: false, retry_after_us: Some(TOMBSTONE_US), ..peek_as_admitted(counter, limit, now) }
}

fn peek(counter: &mut State, view: &ReservationView, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
    match view.own {
        OwnReservation::Open { .. } => peek_as_admitted(counter, limit, now),
        OwnReservation::Tombstone => reject_after_settlement(counter, limit, now),
        OwnReservation::Absent | OwnReservation::Over => peek_at_estimate(counter, limit, now, request),
    }
}

/// Asks whether the rule's estimate fits. Rejected hits do not count, so nothing is charged.
fn peek_at_estimate(counter: &mut State, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
    let asked = ChargeRequest { rejected_elsewhere: true, ..replace_hits_by_estimate(limit, request) };
    ChargeResult { delay_us: 0, ..counter.charge_counter(limit, now, asked) }
}

fn reserve(
    counter: &mut State,
    view: &mut ReservationView,
    limit: &Limit,
    now: Time,
    request: ChargeRequest,
) -> ChargeResult {
    let token = view.slot.token;
    match view.own {
        OwnReservation::Tombstone => {
            ChargeResult { slot: SlotChange::Late, ..reject_after_settlement(counter, limit, now) }
        }
        OwnReservation::Open { .. } if request.rejected_elsewhere => peek_as_admitted(counter, limit, now),
        OwnReservation::Open { hits, refundable, .. } => {
            view.own = OwnReservation::Open { token, hits, refundable };
            ChargeResult { slot: SlotChange::Renewed, ..peek_as_admitted(counter, limit, now) }
        }
        OwnReservation::Absent | OwnReservation::Over => {
            let request = replace_hits_by_estimate(limit, request);
            let result = counter.charge_counter(limit, now, request);
            let is_charged = result.admitted && !request.rejected_elsewhere;
            match request.hits {
                Hits::Charge(hits) if is_charged && !view.is_full => {
                    view.own = OwnReservation::Open { token, hits, refundable: hits };
                    ChargeResult { slot: SlotChange::Taken, ..result }
                }
                _ => result,
            }
        }
    }
}

fn settle(counter: &mut State, view: &mut ReservationView, limit: &Limit, now: Time, cost: u64) -> ChargeResult {
    let slot = view.slot;
    let is_unanswered = slot.action == SlotAction::ReleaseUnanswered;
    match view.own {
        OwnReservation::Open { token, hits, refundable } if is_unanswered || token == slot.token => {
            // A repeated settlement without an answer, or a request that it overtook, must find that it was here.
            view.own = if is_unanswered { OwnReservation::Tombstone } else { OwnReservation::Absent };
            if cost > hits {
                let result = charge_debt(counter, limit, now, cost - hits);
                return ChargeResult { slot: SlotChange::Freed, above_estimate: cost - hits, ..result };
            }
            view.given_back = (hits - cost).min(refundable);
            let result = match view.given_back {
                0 => peek_as_admitted(counter, limit, now),
                hits => counter.charge_counter(limit, now, build_give_back_request(hits)),
            };
            ChargeResult { slot: SlotChange::Freed, ..result }
        }
        OwnReservation::Absent | OwnReservation::Over if is_unanswered => {
            let is_over = view.own == OwnReservation::Over;
            if !view.is_full {
                view.own = OwnReservation::Tombstone;
            }
            // The estimate stands for the cost. One that is repeated finds the tombstone.
            if is_over {
                return peek_as_admitted(counter, limit, now);
            }
            let result = match cost {
                0 => peek_as_admitted(counter, limit, now),
                cost => charge_debt(counter, limit, now, cost),
            };
            ChargeResult { slot: SlotChange::ReleasedEarly, above_estimate: cost, ..result }
        }
        OwnReservation::Open { .. } | OwnReservation::Absent | OwnReservation::Over | OwnReservation::Tombstone => {
            peek_as_admitted(counter, limit, now)
        }
    }
}

/// Charges a cost that has been incurred: what exceeds the limit is debt, as rejected hits that count are.
fn charge_debt(counter: &mut State, limit: &Limit, now: Time, hits: u64) -> ChargeResult {
    let result = counter.charge_counter(&limit.for_excess_settlement(), now, ChargeRequest::new(Hits::Charge(hits), 0));
    ChargeResult { admitted: true, retry_after_us: None, delay_us: 0, ..result }
}
