//! Counters in this process: exact, compact, bounded, expiring.
//!
//! A key is 128 bits of keyed hash, so the length of descriptors does not matter. The path of a key chooses its shard,
//! whose lock is held for one charge. All limits of a descriptor are in one shard and are decided under one lock, which
//! makes concurrent charges exact. Shards grow by small chunks and never double.
//!
//! If a shard is full, a new counter evicts one of a few random ones: an expired one, else the one with the least of
//! its limit used, but never one that is over its limit. Clients that rotate values therefore cannot evict a counter
//! that rejects them.
//!
//! Decides: how many shards memory has; the overflow shard that decides when memory is full (`local`).
//! Decides: that two descriptors with one counter are charged in order; no look for collisions.
//! Decides: what `/reset` deletes in memory.

mod entries;
mod shard;
mod slots;

use std::sync::{Mutex, MutexGuard};

use smallvec::SmallVec;

use self::shard::reservations::{ReservationContext, ReservationTables};
use self::shard::{MemoryShard, ban_key};
use self::slots::{SlotChargeOptions, SlotRoom, SlotTables};
use super::charge::LimitAdmissions;
use super::holders::SlotHolderTable;
use crate::base::clock::Time;
use crate::base::sharded::{Sharded, lock_ignoring_poison, upper_half};
use crate::limit::Limit;
use crate::limit::algorithm::state::State;
use crate::limit::charge::{Charge, ChargeResult, Counter};
use crate::limit::hold::{HoldAnswer, HoldRequest, PoolId};
use crate::limit::slot::SlotUse;
use crate::limit::slot_table::SlotSummary;
use crate::store::error::MemoryFull;
use crate::store::stats::MemoryUsage;

/// Counters of this process.
#[derive(Debug)]
pub struct MemoryStore {
    shards: Sharded<MemoryShard>,
    /// Counters without room in their shard that must be limited nevertheless.
    overflow: Mutex<MemoryShard>,
    /// Slots of concurrent limits.
    slots: Box<SlotTables>,
    /// Reservations of limits that have some.
    reservations: Box<ReservationTables>,
}

/// Smallest shard; a smaller one would be full after a few chunks.
const MIN_SHARD_BYTES: u64 = 256 * 1024;
/// Largest shard; a larger one would be locked too long by a sweep or a rebuild of its index.
const MAX_SHARD_BYTES: u64 = 2 * 1024 * 1024;
/// Number of shards that avoids contention; more are made only to keep shards small.
const UNCONTENDED_SHARDS: u64 = 256;

impl MemoryStore {
    /// Creates an empty store of about `capacity_bytes` at most, at least 256 KiB.
    pub fn new(capacity_bytes: u64) -> Self {
        let shards =
            (capacity_bytes / MIN_SHARD_BYTES).clamp(1, UNCONTENDED_SHARDS).max(capacity_bytes / MAX_SHARD_BYTES);
        let shard_bytes = (capacity_bytes / shards).max(MIN_SHARD_BYTES);
        let count = usize::try_from(shards).unwrap_or(usize::MAX);
        Self {
            shards: Sharded::new(count, || MemoryShard::new(shard_bytes)),
            slots: Box::new(SlotTables::new(capacity_bytes)),
            reservations: Box::new(ReservationTables::new(capacity_bytes)),
            overflow: Mutex::new(MemoryShard::new_evicting_any_counter(MIN_SHARD_BYTES.max(capacity_bytes / 256))),
        }
    }

    /// Decides all limits of a descriptor together; the results have the order of the charge's counters. A peek never
    /// adds a counter.
    pub fn charge(&self, charge: &Charge<'_>, now: Time) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        match charge.slot {
            None => self.charge_counters(charge, now),
            Some(slot) => self.charge_with_slots(charge, slot, SlotChargeOptions { now, room: SlotRoom::Bounded }),
        }
    }

    fn charge_with_slots(
        &self,
        charge: &Charge<'_>,
        slot: &SlotUse,
        terms: SlotChargeOptions,
    ) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        self.slots.charge_with_slots(charge, slot, terms, |others| match others.slot {
            None => self.charge_counters(others, terms.now),
            // The caller takes this for a full store, so the overflow shard charges the estimate.
            Some(slot) if terms.room == SlotRoom::Nothing && !slot.action.is_release() => Err(MemoryFull),
            Some(slot) => self.reservations.charge(others, slot, self.reservation_context(terms.now)),
        })
    }

    fn reservation_context(&self, now: Time) -> ReservationContext<'_> {
        ReservationContext { now, holders: self.slot_holders(), counters: &self.shards }
    }

    fn charge_counters(&self, charge: &Charge<'_>, now: Time) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        self.lock_shard(charge.path_hash).charge(charge, now)
    }

    /// Returns true if slots are held, or reservations are open.
    pub fn has_slots_or_reservations(&self) -> bool {
        self.slots.bytes() > 0 || self.reservations.bytes() > 0
    }

    /// Envoys that hold slots.
    pub fn slot_holders(&self) -> &SlotHolderTable {
        &self.slots.holders
    }

    /// Sums of the slots of a concurrent limit's counter, by the hash of its path and its tag.
    pub fn summarize_slots(&self, path: u128, tag: u128, now: Time) -> SlotSummary {
        self.slots.summarize(path, tag, now)
    }

    /// Sums of the reservations of a counter, by the hash of its path and its tag.
    pub fn summarize_reservations(&self, path: u128, tag: u128, now: Time) -> SlotSummary {
        self.reservations.summarize(path, tag, now, self.slot_holders())
    }

    /// Decides a charge without room in its shard, in the overflow shard, where any counter may be evicted. Clients
    /// that fill the store are still limited, if not exactly, and so are all others.
    pub fn charge_in_overflow_shard(&self, charge: &Charge<'_>, now: Time) -> SmallVec<[ChargeResult; 1]> {
        if let Some(slot) = charge.slot
            && let Ok(results) =
                self.charge_with_slots(charge, slot, SlotChargeOptions { now, room: SlotRoom::Nothing })
        {
            return results;
        }
        lock_ignoring_poison(&self.overflow).charge(charge, now).expect("the overflow shard evicts any counter")
    }

    /// Deletes the counters of a charge; returns how many existed.
    pub fn reset(&self, charge: &Charge<'_>) -> usize {
        let reset = |counter: &Counter<'_>| {
            let key = charge.path_hash ^ counter.tag;
            if counter.limit.is_concurrent() {
                return self.slots.remove(charge.path_hash, counter.tag);
            }
            self.reservations.remove(charge.path_hash, counter.tag);
            let remove = |shard: &mut MemoryShard| shard.remove_key(key) | shard.remove_key(ban_key(key));
            remove(&mut self.lock_shard(charge.path_hash)) | remove(&mut lock_ignoring_poison(&self.overflow))
        };
        charge.counters.iter().filter(|counter| reset(counter)).count()
    }

    /// Returns which limits would admit a charge; charges nothing.
    pub fn peek_admissions(&self, charge: &Charge<'_>, now: Time) -> LimitAdmissions {
        match charge.slot {
            None => self.peek_counter_admissions(charge, now),
            Some(slot) => self.slots.peek_slot_admissions(charge, slot, now, |others| match others.slot {
                None => self.peek_counter_admissions(others, now),
                Some(slot) => self.reservations.peek_admissions(others, slot, self.reservation_context(now)),
            }),
        }
    }

    fn peek_counter_admissions(&self, charge: &Charge<'_>, now: Time) -> LimitAdmissions {
        self.lock_shard(charge.path_hash).peek_admissions(charge, now)
    }

    /// Adjusts the hold of a pool on the only counter of the charge. A reset of the counter leaves its holds.
    pub fn adjust_hold(
        &self,
        charge: &Charge<'_>,
        pool: PoolId,
        request: HoldRequest,
        now: Time,
    ) -> Result<HoldAnswer, MemoryFull> {
        self.lock_shard(charge.path_hash).adjust_hold(charge, pool, request, now)
    }

    /// Replaces the states of counters of a path. `each` is called once, with a function that takes limit, tag and
    /// state of each counter; `now` is the time of the states. A new counter without room is left out.
    pub fn put_states(&self, path: u128, now: Time, each: impl FnOnce(&mut dyn FnMut(&Limit, u128, State))) {
        let mut shard = self.lock_shard(path);
        each(&mut |limit, tag, state| shard.replace_state(path ^ tag, limit, state, now));
    }

    fn lock_shard(&self, path: u128) -> MutexGuard<'_, MemoryShard> {
        self.shards.lock_shard(upper_half(path))
    }

    /// Drops expired counters from one of `parts` equal parts of the shards: the one at `part`. Locks one shard at a
    /// time.
    pub fn sweep(&self, now: Time, part: usize, parts: usize) {
        self.shards.lock_each_of_part(part, parts).for_each(|mut shard| shard.sweep(now));
        self.slots.sweep(now, part, parts);
        self.reservations.sweep(now, part, parts);
        if part.is_multiple_of(parts) {
            lock_ignoring_poison(&self.overflow).sweep(now);
        }
    }

    /// Size of the store, summed over one shard after the other.
    pub fn memory_usage(&self) -> MemoryUsage {
        self.shards.lock_each().chain(std::iter::once_with(|| lock_ignoring_poison(&self.overflow))).fold(
            MemoryUsage { bytes: self.slots.bytes() + self.reservations.bytes(), ..MemoryUsage::default() },
            |sum, shard| {
                let usage = shard.memory_usage();
                MemoryUsage {
                    counters: sum.counters + usage.counters,
                    bytes: sum.bytes + usage.bytes,
                    evicted: sum.evicted + usage.evicted,
                    capacity_bytes: sum.capacity_bytes + usage.capacity_bytes,
                }
            },
        )
    }
}
