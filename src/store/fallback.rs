//! Fallback counters for `on_store_error: local`: in this process, under its share of each limit.
//!
//! The share is the limit divided by the number of replicas, rounded down, at least 1 unless the limit is 0
//! (`Limit::fallback_share`); `redis::replicas` counts the replicas. The policy is chosen in `decide`. While Redis
//! answers, the states that it reports for such rules are kept here, scaled to the share and rounded up, so that a
//! replica that loses Redis continues from the last known level.
//!
//! Of a global limit the share is the replica's part of the region's cut-off allowance: what the region holds may have
//! been used before its Redis was lost.
//!
//! The most recent report from Redis overwrites local state, including hits admitted locally since. Those hits are
//! never charged to Redis.
//!
//! The number of replicas may change, but stored hits stay scaled to the share at the time of the report, until the
//! next report or until they drain. If the share has shrunk since, fewer hits pass than should. If the share has grown,
//! hits that other replicas charged may pass once more.
//!
//! Memory is bounded like that of [`MemoryStore`]. States without room are dropped, and charges without room are
//! limited in its overflow shard.
//!
//! Decides: what a replica admits without Redis (`on_store_error: local`), also of a global limit.
//! Decides: slots and held hits under `local`.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use smallvec::SmallVec;

use super::charge::LimitAdmissions;
use super::holders::SlotHolderTable;
use super::memory::MemoryStore;
use super::stats::MemoryUsage;
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::state::State;
use crate::limit::charge::{Charge, ChargeResult, Counter};
use crate::limit::hold::{HoldAnswer, HoldRequest, PoolId};
use crate::limit::request::Hits;
use crate::limit::slot::FULL_LIMIT_RETRY_AFTER_US;
use crate::store::error::MemoryFull;

/// Fallback counters.
#[derive(Debug)]
pub struct Fallback {
    memory: MemoryStore,
    replicas: ReplicaCount,
}

/// Number of processes that share each limit; it may change.
#[derive(Clone, Debug)]
pub struct ReplicaCount(Arc<AtomicU32>);

impl ReplicaCount {
    /// Creates a count, this process included.
    pub fn new(replicas: NonZeroU32) -> Self {
        Self(Arc::new(AtomicU32::new(replicas.get())))
    }

    /// Replaces the count.
    pub fn set_count(&self, replicas: NonZeroU32) {
        self.0.store(replicas.get(), Ordering::Relaxed);
    }

    /// The current count.
    pub fn count(&self) -> NonZeroU32 {
        NonZeroU32::new(self.0.load(Ordering::Relaxed)).expect("only nonzero numbers are stored")
    }
}

impl Fallback {
    /// Creates an empty table of about `capacity_bytes`, at least 256 KiB, for one of `replicas` processes.
    pub fn new(capacity_bytes: u64, replicas: NonZeroU32) -> Self {
        Self { memory: MemoryStore::new(capacity_bytes), replicas: ReplicaCount::new(replicas) }
    }

    /// Returns true if slots are held.
    pub fn has_slots_or_reservations(&self) -> bool {
        self.memory.has_slots_or_reservations()
    }

    /// Envoys that hold slots.
    pub fn slot_holders(&self) -> &SlotHolderTable {
        self.memory.slot_holders()
    }

    /// Number of processes that share each limit.
    pub const fn replica_count(&self) -> &ReplicaCount {
        &self.replicas
    }

    /// Decides a charge under this process's share of its limits; the results are those of the share.
    ///
    /// More hits than the share holds, but not than the limit, may be admitted once Redis is back: their retry time is
    /// the reset of the share instead of never; that of a full concurrent limit for slots, which have no reset.
    pub fn charge(&self, charge: &Charge<'_>, now: Time) -> SmallVec<[ChargeResult; 1]> {
        let mut results = self.with_charge_under_shares(charge, |charge| {
            self.memory.charge(charge, now).unwrap_or_else(|_| self.memory.charge_in_overflow_shard(charge, now))
        });
        for (counter, result) in charge.counters.iter().zip(&mut results) {
            let fits_the_limit = matches!(charge.request.hits, Hits::Charge(hits) if hits <= counter.limit.capacity());
            if !result.admitted && result.retry_after_us.is_none() && fits_the_limit {
                let is_concurrent = counter.limit.is_concurrent();
                result.retry_after_us = Some(if is_concurrent { FULL_LIMIT_RETRY_AFTER_US } else { result.reset_us });
            }
        }
        results
    }

    /// Returns which limits would admit the charge; charges nothing.
    pub fn peek_admissions(&self, charge: &Charge<'_>, now: Time) -> LimitAdmissions {
        self.with_charge_under_shares(charge, |charge| self.memory.peek_admissions(charge, now))
    }

    /// Adjusts a hold on the counter of the charge under this process's share of its limit.
    pub fn adjust_hold(
        &self,
        charge: &Charge<'_>,
        pool: PoolId,
        request: HoldRequest,
        now: Time,
    ) -> Result<HoldAnswer, MemoryFull> {
        self.with_charge_under_shares(charge, |charge| self.memory.adjust_hold(charge, pool, request, now))
    }

    /// Stores the states that Redis reported for counters of a path, each given by its limit and tag. Times later than
    /// `now`, the time of this process, are reduced to it. States of global limits are left out: they tell what a
    /// region was granted.
    pub fn store_reported_states(&self, path: u128, counters: &[(Limit, u128)], states: &[State], now: Time) {
        let replicas = self.replicas.count();
        self.memory.put_states(path, now, |put| {
            // Slots are not shared out: those of the time without Redis are counted alone.
            let is_reported = |limit: &Limit| !limit.is_counted_in_region() && !limit.is_concurrent();
            let reported = counters.iter().zip(states);
            for ((limit, tag), state) in reported.filter(|((limit, _), _)| is_reported(limit)) {
                let share = limit.fallback_share(replicas);
                put(&share, *tag, state.scaled_to_share(limit, &share, now));
            }
        });
    }

    /// Deletes the counters of a charge.
    pub fn reset(&self, charge: &Charge<'_>) {
        self.memory.reset(charge);
    }

    /// Drops expired counters from one of `parts` equal parts of the table: the one at `part`.
    pub fn sweep(&self, now: Time, part: usize, parts: usize) {
        self.memory.sweep(now, part, parts);
    }

    /// Size of the table.
    pub fn memory_usage(&self) -> MemoryUsage {
        self.memory.memory_usage()
    }

    /// Returns this process's share of a limit.
    fn share(&self, limit: &Limit, replicas: NonZeroU32) -> Limit {
        limit.fallback_share(replicas)
    }

    /// Calls `then` with the same charge under this process's share of its limits.
    fn with_charge_under_shares<T>(&self, charge: &Charge<'_>, then: impl FnOnce(&Charge<'_>) -> T) -> T {
        let replicas = self.replicas.count();
        let is_undivided = |counter: &Counter<'_>| counter.limit.global_scope().is_none();
        if replicas == NonZeroU32::MIN && charge.counters.iter().all(is_undivided) {
            return then(charge);
        }
        let shares: SmallVec<[Limit; 2]> =
            charge.counters.iter().map(|counter| self.share(counter.limit, replicas)).collect();
        let under = |(counter, limit): (&Counter<'_>, _)| Counter { limit, ..*counter };
        // A new charge, because the borrowed shares live shorter than the given charge.
        let counters = charge.counters.iter().zip(&shares).map(under).collect();
        then(&Charge {
            path: charge.path,
            path_hash: charge.path_hash,
            counters,
            request: charge.request,
            slot: charge.slot,
        })
    }
}
