//! Charges on counters of a shard of which some have reservations: their tables are beside the shard.

use smallvec::SmallVec;

use super::{CounterLookup, MemoryShard};
use crate::limit::algorithm::state::{State, charge_together};
use crate::limit::charge::{Charge, ChargeRequest, ChargeResult, JointLimit};
use crate::limit::request::Hits;
use crate::limit::reservation_table::{ReservationQuery, ReservationTable};
use crate::store::charge::LimitAdmissions;
use crate::store::error::MemoryFull;
use crate::store::memory::reservations::ReservationTerms;

impl MemoryShard {
    /// Charges all counters of a descriptor, and writes the reservation of the request.
    pub(in crate::store::memory) fn charge_reserved(
        &mut self,
        charge: &Charge<'_>,
        mut terms: ReservationTerms<'_>,
    ) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        let mut lookups = self.find_counters(charge);
        // A settlement may charge a counter of a later window, which is new.
        let hits = if matches!(charge.request.hits, Hits::Refund(1..)) { Hits::Charge(1) } else { charge.request.hits };
        self.make_room(&mut lookups, hits, terms.now)?;
        let mut states: SmallVec<[State; 4]> = SmallVec::new();
        for lookup in &lookups {
            states.push(self.take_reserved_state(lookup, charge.request, &mut terms));
        }
        let limits: SmallVec<[JointLimit<'_>; 4]> = lookups.iter().map(|lookup| lookup.joint_limit).collect();
        let results = charge_together(&limits, &mut states, terms.now, charge.request);
        for ((lookup, state), result) in lookups.iter().zip(states).zip(&results) {
            let is_peek = matches!(charge.request.hits, Hits::Peek);
            let state = write_reservation(lookup, state, &mut terms, is_peek);
            if lookup.index.is_some() || !is_peek {
                self.put_state(lookup, state, result, terms.now);
            }
        }
        Ok(results)
    }

    /// Returns which counters of a descriptor would admit a charge; changes nothing.
    pub(in crate::store::memory) fn reserved_admissions(
        &mut self,
        charge: &Charge<'_>,
        terms: &ReservationTerms<'_>,
    ) -> LimitAdmissions {
        let admits = self.find_counters(charge).into_iter().map(|lookup| {
            let (key, limit) = (lookup.key, lookup.joint_limit.limit);
            let mut copy = terms.tables.get(&key).cloned().unwrap_or_default();
            let counter = self.take_state(&lookup);
            if limit.reservations().is_none() {
                let admits = counter.admits(limit, terms.now, charge.request);
                self.return_state(&lookup, counter);
                return admits;
            }
            let view = copy.view(query_of(&counter, &lookup, charge.request, terms));
            let mut state = counter.clone().with_reservations(view);
            state.apply_returned_hits(limit, terms.now);
            self.return_state(&lookup, counter);
            state.admits(limit, terms.now, charge.request)
        });
        admits.collect()
    }

    /// Takes the state of a counter, with what the request sees of its reservations if its limit has some.
    fn take_reserved_state(
        &mut self,
        lookup: &CounterLookup<'_>,
        request: ChargeRequest,
        terms: &mut ReservationTerms<'_>,
    ) -> State {
        let (counter, limit) = (self.take_state(lookup), lookup.joint_limit.limit);
        if limit.reservations().is_none() {
            return counter;
        }
        let mut none = ReservationTable::default();
        let mut table = terms.tables.remove(&lookup.key);
        let mut view = table.as_mut().unwrap_or(&mut none).view(query_of(&counter, lookup, request, terms));
        view.is_full |= terms.is_full;
        if let Some(table) = table {
            terms.tables.insert(lookup.key, table);
        }
        let mut state = counter.with_reservations(view);
        state.apply_returned_hits(limit, terms.now);
        state
    }

    /// Puts back the state of a counter that was not changed.
    fn return_state(&mut self, lookup: &CounterLookup<'_>, state: State) {
        if let Some(index) = lookup.index {
            self.write_state(index, state);
        }
    }
}

fn query_of<'q>(
    counter: &'q State,
    lookup: &CounterLookup<'q>,
    request: ChargeRequest,
    terms: &'q ReservationTerms<'_>,
) -> ReservationQuery<'q> {
    let (limit, now) = (lookup.joint_limit.limit, terms.now);
    let lacks_hits = matches!(request.hits, Hits::Charge(_)) && !counter.fits_estimate(limit, now, request);
    let is_peek = matches!(request.hits, Hits::Peek);
    let (counter_is_new, is_dead) = (lookup.index.is_none(), terms.is_dead);
    ReservationQuery { slot: terms.slot, limit, counter, counter_is_new, is_peek, lacks_hits, now, is_dead }
}

/// Writes what a charge made of a request's reservation; returns the state of the counter.
fn write_reservation(
    lookup: &CounterLookup<'_>,
    state: State,
    terms: &mut ReservationTerms<'_>,
    is_peek: bool,
) -> State {
    let State::WithReservations(both) = state else { return state };
    let is_known = terms.tables.contains_key(&lookup.key);
    if !is_peek && (is_known || both.view.is_recorded()) {
        let table = terms.tables.entry(lookup.key).or_default();
        table.apply(&both.view, lookup.joint_limit.limit, &both.counter, terms.now);
        if table.is_empty() {
            terms.tables.remove(&lookup.key);
        }
    }
    both.counter
}
