//! Charges on counters of a shard of which some have reservations: their tables are beside the shard.

use smallvec::SmallVec;

use super::{CounterLookup, MemoryShard};
use crate::limit::algorithm::state::{State, charge_together};
use crate::limit::charge::{Charge, ChargeRequest, ChargeResult, JointLimit};
use crate::limit::request::Hits;
use crate::limit::reservation_table::{ReservationQuery, ReservationTable};
use crate::store::charge::LimitAdmissions;
use crate::store::error::MemoryFull;
use crate::store::memory::reservations::{ReservationRequest, ReservedChargeInputs};

impl MemoryShard {
    /// Charges all counters of a descriptor, and writes the reservation of the request.
    pub(in crate::store::memory) fn charge_with_reservations(
        &mut self,
        charge: &Charge<'_>,
        mut terms: ReservedChargeInputs<'_>,
    ) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        let mut lookups = self.find_counters(charge);
        // A settlement may charge a counter of a later window, which is new.
        let hits = if matches!(charge.request.hits, Hits::Refund(1..)) { Hits::Charge(1) } else { charge.request.hits };
        if let Err(full) = self.make_room(&mut lookups, hits, terms.caller.now) {
            return self.reject_by_existing_counter(&lookups, charge, terms.caller.now).ok_or(full);
        }
        let mut states: SmallVec<[State; 4]> = SmallVec::new();
        for lookup in &lookups {
            states.push(self.take_state_with_reservations(lookup, charge.request, &mut terms));
        }
        let limits: SmallVec<[JointLimit<'_>; 4]> = lookups.iter().map(|lookup| lookup.joint_limit).collect();
        let results = charge_together(&limits, &mut states, terms.caller.now, charge.request);
        for ((lookup, state), result) in lookups.iter().zip(states).zip(&results) {
            let is_peek = matches!(charge.request.hits, Hits::Peek);
            let state = write_reservation(lookup, state, &mut terms, is_peek);
            if lookup.index.is_some() || !is_peek {
                self.put_state(lookup, state, result, terms.caller.now);
            }
        }
        Ok(results)
    }

    /// Returns which counters of a descriptor would admit a charge; changes nothing.
    pub(in crate::store::memory) fn peek_reserved_admissions(
        &mut self,
        charge: &Charge<'_>,
        terms: &ReservedChargeInputs<'_>,
    ) -> LimitAdmissions {
        let none = ReservationTable::default();
        let admits = self.find_counters(charge).into_iter().map(|lookup| {
            let limit = lookup.joint_limit.limit;
            let mut state = self.take_state(&lookup);
            if limit.reservations().is_some() {
                let table = terms.tables.get(&lookup.key).unwrap_or(&none);
                let view = table.view_for_peek(build_reservation_query(&state, &lookup, charge.request, terms.caller));
                state = state.with_reservations(view);
            }
            let admits = state.admits(limit, terms.caller.now, charge.request);
            let state = if let State::WithReservations(both) = state { both.counter } else { state };
            if let Some(index) = lookup.index {
                self.write_state(index, state);
            }
            admits
        });
        admits.collect()
    }

    /// Takes the state of a counter, with what the request sees of its reservations if its limit has some.
    fn take_state_with_reservations(
        &mut self,
        lookup: &CounterLookup<'_>,
        request: ChargeRequest,
        terms: &mut ReservedChargeInputs<'_>,
    ) -> State {
        let (counter, limit) = (self.take_state(lookup), lookup.joint_limit.limit);
        if limit.reservations().is_none() {
            return counter;
        }
        let mut none = ReservationTable::default();
        let table = terms.tables.get_mut(&lookup.key).unwrap_or(&mut none);
        let mut view = table.prune_and_view(build_reservation_query(&counter, lookup, request, terms.caller));
        view.is_full |= terms.is_full;
        let mut state = counter.with_reservations(view);
        state.give_back_unsettled_hits(limit, terms.caller.now);
        state
    }
}

fn build_reservation_query<'q>(
    counter: &'q State,
    lookup: &CounterLookup<'q>,
    request: ChargeRequest,
    caller: ReservationRequest<'q>,
) -> ReservationQuery<'q> {
    let ReservationRequest { now, slot, is_dead } = caller;
    let limit = lookup.joint_limit.limit;
    let lacks_hits = matches!(request.hits, Hits::Charge(_)) && !counter.has_room_for_estimate(limit, now, request);
    let is_peek = matches!(request.hits, Hits::Peek);
    let counter_is_new = lookup.index.is_none();
    ReservationQuery { slot, limit, counter, counter_is_new, is_peek, lacks_hits, now, is_dead }
}

/// Writes what a charge made of a request's reservation; returns the state of the counter.
fn write_reservation(
    lookup: &CounterLookup<'_>,
    state: State,
    terms: &mut ReservedChargeInputs<'_>,
    is_peek: bool,
) -> State {
    let State::WithReservations(both) = state else { return state };
    let is_known = terms.tables.contains_key(&lookup.key);
    if !is_peek && (is_known || both.view.needs_record()) {
        let table = terms.tables.entry(lookup.key).or_default();
        table.write_back(&both.view, lookup.joint_limit.limit, &both.counter, terms.caller.now);
        if table.is_empty() {
            terms.tables.remove(&lookup.key);
        }
    }
    both.counter
}
