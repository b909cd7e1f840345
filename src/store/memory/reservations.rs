//! Reservations of counters in this process, in a table for each counter.
//!
//! As tables of slots, they are kept apart from the counters, and together take up to a quarter of the store's capacity
//! beside it. A reservation without room is not recorded: its estimate stays charged, so no cost is beyond the limit.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use super::shard::MemoryShard;
use crate::base::clock::Time;
use crate::base::sharded::{DEFAULT_SHARDS, PrehashedMap, Sharded, upper_half};
use crate::limit::charge::{Charge, ChargeResult};
use crate::limit::reservation_table::ReservationTable;
use crate::limit::slot::{HolderId, SlotUse};
use crate::limit::slot_table::SlotSummary;
use crate::store::charge::LimitAdmissions;
use crate::store::error::MemoryFull;
use crate::store::holders::SlotHolderTable;

/// Divisor of the store's capacity: tables of reservations may take one such part beside it.
const RESERVATION_CAPACITY_DIVISOR: u64 = 4;

/// Tables of reservations, by the key of their counter.
#[derive(Debug)]
pub(super) struct ReservationTables {
    shards: Sharded<PrehashedMap<ReservationTable>>,
    bytes: AtomicU64,
    capacity_bytes: u64,
}

/// Counters of a charge, and who holds reservations of them.
#[derive(Clone, Copy)]
pub(super) struct ReservationContext<'c> {
    /// Time of the request.
    pub(super) now: Time,
    /// Envoys that hold reservations.
    pub(super) holders: &'c SlotHolderTable,
    /// The counters.
    pub(super) counters: &'c Sharded<MemoryShard>,
}

/// A request, as tables of reservations know it.
#[derive(Clone, Copy)]
pub(super) struct ReservationRequest<'t> {
    /// Time of the request.
    pub(super) now: Time,
    /// Use of a reservation by the request.
    pub(super) slot: &'t SlotUse,
    /// Tells whether a holder is dead.
    pub(super) is_dead: &'t dyn Fn(HolderId) -> bool,
}

/// Inputs of a charge on counters of which some have reservations.
pub(super) struct ReservedChargeInputs<'t> {
    /// The request.
    pub(super) caller: ReservationRequest<'t>,
    /// Tables, by the keys of their counters.
    pub(super) tables: &'t mut PrehashedMap<ReservationTable>,
    /// There is no memory for one more reservation.
    pub(super) is_full: bool,
}

impl ReservationTables {
    pub(super) fn new(store_bytes: u64) -> Self {
        Self {
            shards: Sharded::new(DEFAULT_SHARDS, PrehashedMap::default),
            bytes: AtomicU64::new(0),
            capacity_bytes: store_bytes / RESERVATION_CAPACITY_DIVISOR,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Removes a table.
    pub(super) fn remove(&self, path: u128, tag: u128) {
        let removed = self.lock_shard(path).remove(&(path ^ tag));
        self.bytes.fetch_sub(removed.as_ref().map_or(0, ReservationTable::bytes), Ordering::Relaxed);
    }

    /// Sums of the reservations of a counter.
    pub(super) fn summarize(&self, path: u128, tag: u128, now: Time, holders: &SlotHolderTable) -> SlotSummary {
        let shard = self.lock_shard(path);
        let table = shard.get(&(path ^ tag));
        table.map(|table| table.summarize(now, &|holder| holders.is_dead(holder, now))).unwrap_or_default()
    }

    /// Removes reservations that are over from one of `parts` equal parts of the tables: the one at `part`.
    pub(super) fn sweep(&self, now: Time, part: usize, parts: usize) {
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
    pub(super) fn charge(
        &self,
        charge: &Charge<'_>,
        slot: &SlotUse,
        context: ReservationContext<'_>,
    ) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        let ReservationContext { now, holders, counters } = context;
        let mut tables = self.lock_shard(charge.path_hash);
        let before = sum_table_bytes(&tables, charge);
        let is_full = self.bytes() >= self.capacity_bytes;
        let is_dead = |holder| holders.is_dead(holder, now);
        let caller = ReservationRequest { now, slot, is_dead: &is_dead };
        let terms = ReservedChargeInputs { caller, tables: &mut tables, is_full };
        let results = counters.lock_shard(upper_half(charge.path_hash)).charge_with_reservations(charge, terms);
        let after = sum_table_bytes(&tables, charge);
        self.bytes.fetch_add(after.saturating_sub(before), Ordering::Relaxed);
        self.bytes.fetch_sub(before.saturating_sub(after), Ordering::Relaxed);
        results
    }

    /// Returns which counters of a descriptor would admit a charge; changes nothing.
    #[cold]
    pub(super) fn peek_admissions(
        &self,
        charge: &Charge<'_>,
        slot: &SlotUse,
        context: ReservationContext<'_>,
    ) -> LimitAdmissions {
        let ReservationContext { now, holders, counters } = context;
        let mut tables = self.lock_shard(charge.path_hash);
        let is_dead = |holder| holders.is_dead(holder, now);
        let caller = ReservationRequest { now, slot, is_dead: &is_dead };
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
