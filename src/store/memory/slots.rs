//! Slots of concurrent limits in this process, in a table for each counter.
//!
//! Tables are kept apart from other counters, because they grow with the slots in use: all tables together take up to a
//! quarter of the store's capacity, beside it. A slot without room is refused, and the failure policy decides; a slot
//! is never evicted, because it stands for a stream that goes on.
//!
//! Decides: charges of a descriptor beside a concurrent limit (`charge_with_slots`); how much memory slots may take.
//! Decides: when a slot that nothing released counts as expired.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::base::sharded::{DEFAULT_SHARDS, PrehashedMap, Sharded, lock_ignoring_poison, upper_half};
use crate::limit::algorithm::slots;
use crate::limit::charge::{Charge, ChargeRequest, ChargeResult, Counter};
use crate::limit::request::Hits;
use crate::limit::slot::{HolderId, SlotUse};
use crate::limit::slot_table::{SlotQuery, SlotSummary, SlotTable};
use crate::store::charge::LimitAdmissions;
use crate::store::error::MemoryFull;
use crate::store::holders::SlotHolderTable;

/// Divisor of the store's capacity: tables of slots may take one such part beside it.
const SLOT_CAPACITY_DIVISOR: u64 = 4;

/// Maximum number of limits whose [`UnreportedExpiredSeats`] are kept.
const MAX_LIMITS_WITH_UNREPORTED_SEATS: usize = 10_000;

/// Tables of slots, by the key of their counter.
#[derive(Debug)]
pub(super) struct SlotTables {
    shards: Sharded<PrehashedMap<SlotTable>>,
    bytes: AtomicU64,
    capacity_bytes: u64,
    /// Envoys that hold slots.
    pub(super) holders: SlotHolderTable,
    unreported_seats: UnreportedExpiredSeats,
}

/// Seats that were found over while no charge was there to tell of them, by the tag of their counters: the next charge
/// of the limit tells.
#[derive(Debug, Default)]
struct UnreportedExpiredSeats {
    by_tag: Mutex<PrehashedMap<u64>>,
    /// Sum of all.
    total: AtomicU64,
}

impl UnreportedExpiredSeats {
    fn add(&self, tag: u128, seats: u64) {
        if seats == 0 {
            return;
        }
        let mut by_tag = lock_ignoring_poison(&self.by_tag);
        if by_tag.len() < MAX_LIMITS_WITH_UNREPORTED_SEATS || by_tag.contains_key(&tag) {
            *by_tag.entry(tag).or_insert(0) += seats;
            self.total.fetch_add(seats, Ordering::Relaxed);
        }
    }

    fn move_to_charge_result(&self, tag: u128, result: &mut ChargeResult) {
        if self.total.load(Ordering::Relaxed) == 0 {
            return;
        }
        let seats = lock_ignoring_poison(&self.by_tag).remove(&tag).unwrap_or(0);
        self.total.fetch_sub(seats, Ordering::Relaxed);
        let seats = u32::try_from(seats).unwrap_or(u32::MAX);
        result.expired_seats = result.expired_seats.saturating_add(seats);
    }
}

/// Whether new slots may take memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotRoom {
    /// Up to the capacity.
    Bounded,
    /// None: only slots that exist are admitted.
    Nothing,
}

impl SlotTables {
    pub(super) fn new(store_bytes: u64) -> Self {
        Self {
            shards: Sharded::new(DEFAULT_SHARDS, PrehashedMap::default),
            bytes: AtomicU64::new(0),
            capacity_bytes: store_bytes / SLOT_CAPACITY_DIVISOR,
            holders: SlotHolderTable::default(),
            unreported_seats: UnreportedExpiredSeats::default(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Removes a table; returns true if it existed.
    pub(super) fn remove(&self, path: u128, tag: u128) -> bool {
        let removed = self.lock_shard(path).remove(&(path ^ tag));
        let bytes = removed.as_ref().map_or(0, SlotTable::bytes);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        removed.is_some()
    }

    /// Removes slots that are over from one of `parts` equal parts of the tables: the one at `part`.
    pub(super) fn sweep(&self, now: Time, part: usize, parts: usize) {
        for mut shard in self.shards.lock_each_of_part(part, parts) {
            shard.retain(|_, table| {
                let before = table.bytes();
                let seats = table.sweep(now, &|holder, taken| self.holders.is_slot_freed_by_death(holder, taken, now));
                self.unreported_seats.add(table.counter_tag(), seats);
                let after = if table.is_empty() { 0 } else { table.bytes() };
                self.bytes.fetch_sub(before.saturating_sub(after), Ordering::Relaxed);
                !table.is_empty()
            });
        }
    }

    /// Sums of the slots of a counter.
    pub(super) fn summarize(&self, path: u128, tag: u128, now: Time) -> SlotSummary {
        let shard = self.lock_shard(path);
        let table = shard.get(&(path ^ tag));
        table.map(|table| table.summarize(now, &|holder| self.holders.is_dead(holder, now))).unwrap_or_default()
    }

    fn lock_shard(&self, path: u128) -> MutexGuard<'_, PrehashedMap<SlotTable>> {
        self.shards.lock_shard(upper_half(path))
    }
}

/// Time of a charge with slots, and the memory that it may take.
#[derive(Clone, Copy)]
pub(super) struct SlotChargeOptions {
    /// Time of the request.
    pub(super) now: Time,
    /// Whether new slots may take memory.
    pub(super) room: SlotRoom,
}

/// A concurrent limit of a charge: its counter, and what the request sees of it.
struct SlotCounter<'c> {
    /// Index among the counters of the charge.
    index: usize,
    counter: &'c Counter<'c>,
    key: u128,
    state: slots::State,
}

/// Charges.
impl SlotTables {
    /// Decides a charge with concurrent limits, and takes or frees a slot in all of them, or in none. `charge_others`
    /// decides its other limits.
    #[cold]
    pub(super) fn charge_with_slots(
        &self,
        charge: &Charge<'_>,
        slot: &SlotUse,
        SlotChargeOptions { now, room }: SlotChargeOptions,
        charge_others: impl FnOnce(&Charge<'_>) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull>,
    ) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        let mut shard = self.lock_shard(charge.path_hash);
        let mut counters = self.view_counters(&mut shard, charge, slot, SlotChargeOptions { now, room });
        let slots_reject = concurrent_limit_rejects(&counters, now, charge.request);
        if room == SlotRoom::Bounded && !slots_reject && matches!(charge.request.hits, Hits::Charge(_)) {
            self.check_slot_room(&shard, &counters)?;
        }
        let mut results = SmallVec::<[ChargeResult; 1]>::from_elem(ChargeResult::default(), charge.counters.len());
        let mut rejected = slots_reject;
        let others: SmallVec<[usize; 4]> =
            (0..charge.counters.len()).filter(|index| !charge.counters[*index].limit.is_concurrent()).collect();
        if !others.is_empty() {
            let request = ChargeRequest { rejected_elsewhere: slots_reject, ..charge.request };
            let of_others = Charge {
                counters: others.iter().map(|index| charge.counters[*index]).collect(),
                request,
                slot: slot_of_reservations(charge),
                ..charge.clone()
            };
            for (index, result) in others.into_iter().zip(charge_others(&of_others)?) {
                rejected |= !result.admitted && charge.counters[index].as_joint_limit().rejects_others;
                results[index] = result;
            }
        }
        let request =
            ChargeRequest { rejected_elsewhere: charge.request.rejected_elsewhere || rejected, ..charge.request };
        for SlotCounter { index, counter, key, state } in &mut counters {
            results[*index] = slots::charge(counter.limit, state, now, request);
            self.unreported_seats.move_to_charge_result(counter.tag, &mut results[*index]);
            let is_release = matches!(request.hits, Hits::Refund(_));
            if is_release && state.own == slots::OwnSlot::Tombstone && self.bytes() >= self.capacity_bytes {
                // No room: a request that comes after its release then keeps its slot until that expires.
                state.own = slots::OwnSlot::Absent;
            }
            let is_needed = shard.contains_key(key) || state.own != slots::OwnSlot::Absent;
            if is_needed {
                let table = shard.entry(*key).or_insert_with(|| {
                    let table = SlotTable::with_counter_tag(counter.tag);
                    self.bytes.fetch_add(table.bytes(), Ordering::Relaxed);
                    table
                });
                let before = table.bytes();
                table.write_back(slot, state, now, counter.limit.period_us());
                let (after, is_empty) = (table.bytes(), table.is_empty());
                self.bytes.fetch_add(after.saturating_sub(before), Ordering::Relaxed);
                self.bytes.fetch_sub(before.saturating_sub(after), Ordering::Relaxed);
                if is_empty {
                    shard.remove(key);
                    self.bytes.fetch_sub(after, Ordering::Relaxed);
                }
            }
        }
        Ok(results)
    }

    /// Returns which limits would admit a charge with concurrent limits; changes nothing.
    #[cold]
    pub(super) fn peek_slot_admissions(
        &self,
        charge: &Charge<'_>,
        slot: &SlotUse,
        now: Time,
        other_admissions: impl FnOnce(&Charge<'_>) -> LimitAdmissions,
    ) -> LimitAdmissions {
        let mut shard = self.lock_shard(charge.path_hash);
        let terms = SlotChargeOptions { now, room: SlotRoom::Bounded };
        let counters = self.view_counters(&mut shard, charge, slot, terms);
        for SlotCounter { counter, state, .. } in &counters {
            self.unreported_seats.add(counter.tag, u64::from(state.expired));
        }
        let of_others = Charge {
            counters: charge.counters.iter().filter(|counter| !counter.limit.is_concurrent()).copied().collect(),
            slot: slot_of_reservations(charge),
            ..charge.clone()
        };
        let mut others = other_admissions(&of_others).into_iter();
        let mut counters = counters.iter();
        let admits = |counter: &Counter<'_>| match counter.limit.is_concurrent() {
            true => counters.next().is_none_or(|own| slots::admits(counter.limit, &own.state, now, charge.request)),
            false => others.next().unwrap_or(true),
        };
        charge.counters.iter().map(admits).collect()
    }

    /// Returns what a request sees of each of its concurrent limits.
    fn view_counters<'c>(
        &self,
        shard: &mut PrehashedMap<SlotTable>,
        charge: &'c Charge<'_>,
        slot: &SlotUse,
        SlotChargeOptions { now, room }: SlotChargeOptions,
    ) -> SmallVec<[SlotCounter<'c>; 1]> {
        let is_freed_by_death = |holder: HolderId, taken: Time| self.holders.is_slot_freed_by_death(holder, taken, now);
        let view = |(index, counter): (usize, &'c Counter<'c>)| {
            let (key, limit) = (charge.path_hash ^ counter.tag, counter.limit.requests_per_unit());
            let (seats, life_us) = (charge.request.required_hits(), counter.limit.period_us());
            let query = SlotQuery { slot, now, seats, limit, life_us, is_freed_by_death: &is_freed_by_death };
            let mut state = match shard.get_mut(&key) {
                Some(table) => {
                    let before = table.bytes();
                    let state = table.prune_and_view(query);
                    // The look may have shrunk the table.
                    self.bytes.fetch_sub(before.saturating_sub(table.bytes()), Ordering::Relaxed);
                    state
                }
                None => slots::State { last: now, ..slots::State::default() }.with_slot_use(slot),
            };
            if room == SlotRoom::Nothing {
                state.used = state.used.max(limit);
            }
            SlotCounter { index, counter, key, state }
        };
        charge.counters.iter().enumerate().filter(|(_, counter)| counter.limit.is_concurrent()).map(view).collect()
    }

    fn check_slot_room(&self, shard: &PrehashedMap<SlotTable>, counters: &[SlotCounter<'_>]) -> Result<(), MemoryFull> {
        let growth = |counter: &SlotCounter<'_>| match shard.get(&counter.key) {
            Some(table) => table.max_bytes_of_next_slot(),
            None => SlotTable::default().bytes() + SlotTable::default().max_bytes_of_next_slot(),
        };
        let new = counters.iter().filter(|counter| counter.state.own == slots::OwnSlot::Absent);
        let growth: u64 = new.map(growth).sum();
        let fits = growth == 0 || self.bytes() + growth <= self.capacity_bytes;
        if fits { Ok(()) } else { Err(MemoryFull) }
    }
}

/// Returns the slot of a charge if one of its limits has reservations, which the slot identifies.
fn slot_of_reservations<'c>(charge: &Charge<'c>) -> Option<&'c SlotUse> {
    charge.slot.filter(|_| charge.counters.iter().any(|counter| counter.limit.reservations().is_some()))
}

/// Returns true if a concurrent limit rejects the request for all limits.
fn concurrent_limit_rejects(counters: &[SlotCounter<'_>], now: Time, request: ChargeRequest) -> bool {
    let mut decisive = counters.iter().filter(|own| own.counter.as_joint_limit().rejects_others);
    decisive.any(|own| !slots::admits(own.counter.limit, &own.state, now, request))
}
