//! Reservations of counters in this process, in a table for each counter beside its shard, and the charges on counters
//! that have some.
//!
//! As tables of slots, they are kept apart from the counters, and together take up to a quarter of the store's capacity
//! beside it. A reservation without room is not recorded: its estimate stays charged, so no cost is beyond the limit.
//!
//! Decides: how much memory reservations may take.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use super::{CounterLookup, MemoryShard};
use crate::base::clock::Time;
use crate::base::sharded::{DEFAULT_SHARDS, PrehashedMap, Sharded, upper_half};
use crate::limit::algorithm::joint_charge::charge_together;
use crate::limit::algorithm::state::State;
use crate::limit::charge::{Charge, ChargeRequest, ChargeResult, JointLimit};
use crate::limit::request::Hits;
use crate::limit::reservation_table::{ReservationQuery, ReservationTable};
use crate::limit::slot::{HolderId, SlotUse};
use crate::limit::slot_table::SlotSummary;
use crate::store::charge::LimitAdmissions;
use crate::store::error::MemoryFull;
use crate::store::holders::SlotHolderTable;

/// Divisor of the store's capacity: tables of reservations may take one such part beside it.
const RESERVATION_CAPACITY_DIVISOR: u64 = 4;

/// Tables of reservations, by the key of their counter.
#[derive(Debug)]
pub(crate) struct ReservationTables {
    shards: Sharded<PrehashedMap<ReservationTable>>,
    bytes: AtomicU64,
    capacity_bytes: u64,
}

/// Counters of a charge, and who holds reservations of them.
#[derive(Clone, Copy)]
pub(crate) struct ReservationContext<'c> {
    /// Time of the request.
    pub(crate) now: Time,
    /// Envoys that hold reservations.
    pub(crate) holders: &'c SlotHolderTable,
    /// The counters.
    pub(crate) counters: &'c Sharded<MemoryShard>,
}

/// A request, as tables of reservations know it.
#[derive(Clone, Copy)]
struct ReservationRequest<'t> {
    /// Time of the request.
    now: Time,
    /// Use of a reservation by the request.
    slot: &'t SlotUse,
    /// Tells whether a holder is dead.
    is_freed_by_death: &'t dyn Fn(HolderId, Time) -> bool,
}

/// Inputs of a charge on counters of which some have reservations.
struct ReservedChargeInputs<'t> {
    /// The request.
    caller: ReservationRequest<'t>,
    /// Tables, by the keys of their counters.
    tables: &'t mut PrehashedMap<ReservationTable>,
    /// There is no memory for one more reservation.
    is_full: bool,
}

impl ReservationTables {
    pub(crate) fn new(store_bytes: u64) -> Self {
        Self {
            shards: Sharded::new(DEFAULT_SHARDS, PrehashedMap::default),
            bytes: AtomicU64::new(0),
            capacity_bytes: store_bytes / RESERVATION_CAPACITY_DIVISOR,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Removes a table.
    pub(crate) fn remove(&self, path: u128, tag: u128) {
        let removed = self.lock_shard(path).remove(&(path ^ tag));
        self.bytes.fetch_sub(removed.as_ref().map_or(0, ReservationTable::bytes), Ordering::Relaxed);
    }

    /// Sums of the reservations of a counter.
    pub(crate) fn summarize(&self, path: u128, tag: u128, now: Time, holders: &SlotHolderTable) -> SlotSummary {
        let shard = self.lock_shard(path);
        let table = shard.get(&(path ^ tag));
        table.map(|table| table.summarize(now, &|holder| holders.is_dead(holder, now))).unwrap_or_default()
    }

    /// Removes reservations that are over from one of `parts` equal parts of the tables: the one at `part`.
    pub(crate) fn sweep(&self, now: Time, part: usize, parts: usize) {
        for mut shard in self.shards.lock_each_of_part(part, parts) {
            shard.retain(|_, table| {
                let before = table.bytes();
                table.drop_expired(now);
                let after = if table.is_empty() { 0 } else { table.bytes() };
                self.bytes.fetch_sub(before.saturating_sub(after), Ordering::Relaxed);
                !table.is_empty()
            });
        }
    }

    /// Charges counters of a descriptor, of which some have reservations, in their shard.
    #[cold]
    pub(crate) fn charge(
        &self,
        charge: &Charge<'_>,
        slot: &SlotUse,
        context: ReservationContext<'_>,
    ) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        let ReservationContext { now, holders, counters } = context;
        let mut tables = self.lock_shard(charge.path_hash);
        let before = sum_table_bytes(&tables, charge);
        let is_full = self.bytes() >= self.capacity_bytes;
        let is_freed_by_death = |holder, made| holders.is_slot_freed_by_death(holder, made, now);
        let caller = ReservationRequest { now, slot, is_freed_by_death: &is_freed_by_death };
        let terms = ReservedChargeInputs { caller, tables: &mut tables, is_full };
        let results = counters.lock_shard(upper_half(charge.path_hash)).charge_with_reservations(charge, terms);
        let after = sum_table_bytes(&tables, charge);
        self.bytes.fetch_add(after.saturating_sub(before), Ordering::Relaxed);
        self.bytes.fetch_sub(before.saturating_sub(after), Ordering::Relaxed);
        results
    }

    /// Returns which counters of a descriptor would admit a charge; changes nothing.
    #[cold]
    pub(crate) fn peek_admissions(
        &self,
        charge: &Charge<'_>,
        slot: &SlotUse,
        context: ReservationContext<'_>,
    ) -> LimitAdmissions {
        let ReservationContext { now, holders, counters } = context;
        let mut tables = self.lock_shard(charge.path_hash);
        let is_freed_by_death = |holder, made| holders.is_slot_freed_by_death(holder, made, now);
        let caller = ReservationRequest { now, slot, is_freed_by_death: &is_freed_by_death };
        let terms = ReservedChargeInputs { caller, tables: &mut tables, is_full: false };
        counters.lock_shard(upper_half(charge.path_hash)).peek_reserved_admissions(charge, &terms)
    }

    fn lock_shard(&self, path: u128) -> MutexGuard<'_, PrehashedMap<ReservationTable>> {
        self.shards.lock_shard(upper_half(path))
    }
}

/// Bytes of the tables of a charge's counters.
fn sum_table_bytes(tables: &PrehashedMap<ReservationTable>, charge: &Charge<'_>) -> u64 {
    let keys = charge.counters.iter().map(|counter| charge.path_hash ^ counter.tag);
    keys.filter_map(|key| tables.get(&key)).map(ReservationTable::bytes).sum()
}

impl MemoryShard {
    /// Charges all counters of a descriptor, and writes the reservation of the request.
    fn charge_with_reservations(
        &mut self,
        charge: &Charge<'_>,
        mut terms: ReservedChargeInputs<'_>,
    ) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        let mut lookups = self.find_counters(charge);
        // A settlement may charge a counter of a later window, which is new.
        let hits = if matches!(charge.request.hits, Hits::Refund(1..)) { Hits::Charge(1) } else { charge.request.hits };
        if let Err(full) = self.make_room(&mut lookups, matches!(hits, Hits::Charge(_)), terms.caller.now) {
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
    fn peek_reserved_admissions(&mut self, charge: &Charge<'_>, terms: &ReservedChargeInputs<'_>) -> LimitAdmissions {
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
    let ReservationRequest { now, slot, is_freed_by_death } = caller;
    let limit = lookup.joint_limit.limit;
    let lacks_hits = matches!(request.hits, Hits::Charge(_)) && !counter.has_room_for_estimate(limit, now, request);
    let is_peek = matches!(request.hits, Hits::Peek);
    ReservationQuery { slot, limit, counter, is_peek, lacks_hits, now, is_freed_by_death }
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
