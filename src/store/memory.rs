//! Counters in this process: exact, compact, bounded, expiring.
//!
//! A key is 128 bits of keyed hash, so what a stranger sends takes no room of its own. Keys fall into shards by their
//! path, each behind a lock that is held for one charge; all limits of a descriptor are in one shard and are decided
//! under one lock, and that is what makes concurrent charges exact. The shards grow by small chunks, never by doubling.
//!
//! When a shard is full, a new key takes the place of one of a few at random: an expired one, else the one with the
//! least of its limit used, never one that is over. Whoever rotates values therefore can not flush a counter of
//! their own that refuses them.

mod entry;
mod index;
mod shard;
pub mod usage;

use std::sync::{Mutex, MutexGuard};

use smallvec::SmallVec;

use self::shard::MemoryShard;
use self::usage::{MemoryFull, MemoryUsage};
use crate::algorithm::ChargeResult;
use crate::algorithm::state::State;
use crate::clock::Time;
use crate::counter::{Charge, Counter};
use crate::limit::Limit;
use crate::sharded::{Sharded, lock, upper_half};

/// The counters of this process.
#[derive(Debug)]
pub struct MemoryStore {
    shards: Sharded<MemoryShard>,
    /// For those that find no room in their shard and are to be limited all the same.
    overflow: Mutex<MemoryShard>,
}

/// A shard of less would be full after a few chunks.
const MIN_SHARD_BYTES: u64 = 256 * 1024;
/// A shard of more would be locked for long while it is swept or its index is rebuilt.
const MAX_SHARD_BYTES: u64 = 2 * 1024 * 1024;
/// As many shards as memory allows, up to this, lessen contention; beyond it only size asks for more.
const CONTENTION_SHARDS: u64 = 256;

impl MemoryStore {
    /// An empty store that takes at most about `capacity_bytes`, at least 256 KiB.
    pub fn new(capacity_bytes: u64) -> Self {
        let shards =
            (capacity_bytes / MIN_SHARD_BYTES).clamp(1, CONTENTION_SHARDS).max(capacity_bytes / MAX_SHARD_BYTES);
        let shard_bytes = (capacity_bytes / shards).max(MIN_SHARD_BYTES);
        let count = usize::try_from(shards).unwrap_or(usize::MAX);
        Self {
            shards: Sharded::new(count, || MemoryShard::new(shard_bytes)),
            overflow: Mutex::new(MemoryShard::evict_any(MIN_SHARD_BYTES.max(capacity_bytes / 256))),
        }
    }

    /// Decides all limits of a descriptor at once; the results stand in the order of the charge's counters. A look never
    /// adds a counter.
    pub fn charge(&self, charge: &Charge<'_>, now: Time) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        self.shard(charge.key).charge(charge, now)
    }

    /// Decides a charge for which there was no room, in a small table of its own in which any counter gives way: whoever
    /// fills the store is still limited, if not exactly, and so is everybody else.
    pub fn charge_overflow(&self, charge: &Charge<'_>, now: Time) -> SmallVec<[ChargeResult; 1]> {
        lock(&self.overflow).charge(charge, now).expect("it always has room")
    }

    /// Lets go of the counters of a charge; how many of them there were.
    pub fn reset(&self, charge: &Charge<'_>) -> usize {
        let reset = |counter: &Counter<'_>| {
            let key = charge.key ^ counter.tag;
            self.shard(charge.key).remove_key(key) | lock(&self.overflow).remove_key(key)
        };
        charge.counters.iter().filter(|counter| reset(counter)).count()
    }

    /// Whether [`MemoryStore::charge`] would pass all limits, trials too; changes nothing.
    pub fn admits(&self, charge: &Charge<'_>, now: Time) -> bool {
        self.shard(charge.key).admits(charge, now)
    }

    /// Puts states in place of what counters of a path hold: `each` is called once and says which, by limit, tag and
    /// state. One that is not there and finds no room is left out; `now` is the time at which they hold.
    pub fn put(&self, path: u128, now: Time, each: impl FnOnce(&mut dyn FnMut(&Limit, u128, State))) {
        let mut shard = self.shard(path);
        each(&mut |limit, tag, state| shard.put((path ^ tag, limit), state, now));
    }

    fn shard(&self, path: u128) -> MutexGuard<'_, MemoryShard> {
        self.shards.lock(upper_half(path))
    }

    /// Drops what has expired from a share of the shards: the `turn`th of `turns`. Each shard is locked by itself and
    /// briefly.
    pub fn sweep(&self, now: Time, turn: usize, turns: usize) {
        self.shards.iter_part(turn, turns).for_each(|mut shard| shard.sweep(now));
        if turn.is_multiple_of(turns) {
            lock(&self.overflow).sweep(now);
        }
    }

    /// What the store holds now, summed over shards one after the other.
    pub fn usage(&self) -> MemoryUsage {
        self.shards.iter().chain(std::iter::once_with(|| lock(&self.overflow))).fold(
            MemoryUsage::default(),
            |sum, shard| {
                let usage = shard.usage();
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
