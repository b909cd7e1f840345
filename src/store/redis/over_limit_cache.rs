//! Refusals that Redis has just given, and gives again here without being asked.
//!
//! A counter that is over its limit stays so until hits run out or are given back. When they run out is known: it is
//! what the refusal promised. When they are given back through another replica is not, so a refusal is believed for
//! 1 s at most, counted from when the call that brought it was *sent*. It speaks for charges that it must hold for too:
//! on the same counters under the same limits, of at least its hits and of no longer a hold. Looks, refunds and trials
//! always go to Redis, and so does what comes after a refund that went through this process.
//!
//! Only refusals are kept, so a wrong entry refuses for 1 s and never admits. Where refused hits count, a refusal that
//! is given here is one that is not counted: such counters are left alone unless the operator says otherwise, and then
//! only fixed windows, whose end no count moves. No clock here: who asks says what time it is.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::coalescer::IdentityHasher;
use super::command::{ChargeCommand, OwnedCounter};
use crate::algorithm::ChargeResult;
use crate::clock::micros;
use crate::limit::algorithm::Algorithm;
use crate::request::Hits;
use crate::sharded::{Sharded, upper_half};
use crate::store::outcome::ChargeResults;

/// The longest that a refusal is believed.
pub const LONGEST: Duration = Duration::from_secs(1);
/// Enough that threads seldom meet.
const SHARDS: usize = 64;
/// What a cache takes at least, so that each shard holds some.
const LEAST_BYTES: usize = 128 << 10;
/// How often a full shard is searched for what has ended.
const SEARCHED_EVERY_US: u64 = 50_000;

/// The refusals that are believed, by the id of the counters.
#[derive(Debug)]
pub struct OverLimitCache {
    /// None if it is off.
    shards: Option<Sharded<Shard>>,
    most_bytes: usize,
    /// Whether fixed windows that count refused hits are kept too.
    counting: bool,
    /// From here times are counted.
    origin: Instant,
    /// How many are kept, so that as long as none is nobody takes a lock.
    kept: AtomicUsize,
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    entries: HashMap<u128, Entry, BuildHasherDefault<IdentityHasher>>,
    bytes: usize,
    searched_us: u64,
}

/// A refusal.
#[derive(Debug)]
struct Entry {
    /// When its levels were right.
    at_us: u64,
    /// From when on it is not believed.
    end_us: u64,
    hits: u64,
    max_delay_us: u64,
    limits: Box<[(OwnedCounter, ChargeResult)]>,
}

impl OverLimitCache {
    /// Nothing is kept yet. It takes about `capacity_bytes` at most, and at least 128 KiB; 0: it is off. `counting`
    /// says whether fixed windows that count refused hits are kept too.
    pub fn new(capacity_bytes: usize, counting: bool, origin: Instant) -> Self {
        Self {
            shards: (capacity_bytes > 0).then(|| Sharded::new(SHARDS, Shard::default)),
            most_bytes: capacity_bytes.max(LEAST_BYTES) / SHARDS,
            counting,
            origin,
            kept: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// What each of these charges finds, if all of them are known to be refused: the levels of the refusal, their times
    /// less what has passed since. `id` is that of their counters, `now` the time.
    pub fn refuse(&self, id: u128, commands: &[ChargeCommand], now: Instant) -> Option<ChargeResults> {
        if self.kept() == 0 {
            return None;
        }
        let now_us = self.micros(now);
        let mut shard = self.shard(id)?;
        let entry = shard.entries.get(&id)?;
        if entry.end_us <= now_us {
            self.drop_from(&mut shard, id);
            return None;
        }
        if !commands.iter().all(|command| entry.speaks_for(command)) {
            return None;
        }
        let levels = entry.levels(now_us);
        self.refused.fetch_add(commands.len() as u64, Ordering::Relaxed);
        Some(levels)
    }

    /// Learns from a call what its charges, in their order, found; it was sent and answered at these times. A refusal is
    /// kept in place of an older one; after what was admitted or given back nothing is.
    pub fn learn(
        &self,
        id: u128,
        commands: &[ChargeCommand],
        levels: &[ChargeResults],
        (sent, answered): (Instant, Instant),
    ) {
        if self.shards.is_none() {
            return;
        }
        for (command, levels) in commands.iter().zip(levels).rev() {
            match (command.request.hits, refuses(command, levels)) {
                (Hits::Charge(hits), true) if !command.dry_run => {
                    return self.keep(id, (command, hits), levels, (sent, answered));
                }
                // Also after a trial: what is charged then must not be refused by what is older.
                (Hits::Charge(_), false) | (Hits::Refund(_), _) => return self.forget(id),
                (Hits::Charge(_) | Hits::Peek, _) => {}
            }
        }
    }

    /// Drops what has ended from a share of what is kept: the `turn`th of `turns`.
    pub fn sweep(&self, now: Instant, turn: usize, turns: usize) {
        if self.kept() > 0 {
            let now_us = self.micros(now);
            let shards = self.shards.iter().flat_map(|shards| shards.iter_part(turn, turns));
            shards.for_each(|mut shard| self.search(&mut shard, now_us));
        }
    }

    /// How many refusals are kept, also those that have ended since.
    pub fn kept(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }

    /// How many charges were refused here since the start.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    fn keep(
        &self,
        id: u128,
        (command, hits): (&ChargeCommand, u64),
        levels: &ChargeResults,
        (sent, answered): (Instant, Instant),
    ) {
        let is_kept = |counted: &OwnedCounter| {
            !counted.limit.count_rejected() || self.counting && counted.limit.algorithm() == Algorithm::FixedWindow
        };
        if !command.counters.iter().all(is_kept) {
            return;
        }
        // Once one of those that refuse could pass, what is said of it would no longer be true.
        let waits = levels.iter().filter(|level| !level.admitted).filter_map(|level| level.retry_after_us);
        let holds_us = waits.fold(micros(LONGEST), u64::min);
        let (at_us, end_us) = (self.micros(answered), self.micros(sent).saturating_add(holds_us));
        if end_us <= at_us {
            return;
        }
        let limits = command.counters.iter().copied().zip(levels.iter().copied()).collect();
        let entry = Entry { at_us, end_us, hits, max_delay_us: command.request.max_delay_us, limits };
        let Some(mut shard) = self.shard(id) else { return };
        self.drop_from(&mut shard, id);
        let bytes = entry.bytes();
        if shard.bytes + bytes > self.most_bytes && shard.searched_us.saturating_add(SEARCHED_EVERY_US) <= at_us {
            self.search(&mut shard, at_us);
        }
        if shard.bytes + bytes <= self.most_bytes {
            shard.bytes += bytes;
            shard.entries.insert(id, entry);
            self.kept.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lets go of a refusal: the counter is no longer what it was.
    pub fn forget(&self, id: u128) {
        if self.kept() > 0
            && let Some(mut shard) = self.shard(id)
        {
            self.drop_from(&mut shard, id);
        }
    }

    fn drop_from(&self, shard: &mut Shard, id: u128) {
        if let Some(entry) = shard.entries.remove(&id) {
            shard.bytes -= entry.bytes();
            self.kept.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn search(&self, shard: &mut Shard, now_us: u64) {
        shard.searched_us = now_us;
        let before = shard.entries.len();
        let bytes = &mut shard.bytes;
        shard.entries.retain(|_, entry| {
            let stays = now_us < entry.end_us;
            *bytes -= if stays { 0 } else { entry.bytes() };
            stays
        });
        self.kept.fetch_sub(before - shard.entries.len(), Ordering::Relaxed);
        if shard.entries.is_empty() {
            shard.entries.shrink_to_fit();
        }
    }

    fn shard(&self, id: u128) -> Option<MutexGuard<'_, Shard>> {
        Some(self.shards.as_ref()?.lock(upper_half(id)))
    }

    fn micros(&self, at: Instant) -> u64 {
        micros(at.saturating_duration_since(self.origin))
    }
}

impl Entry {
    /// Whether this refusal means that a charge is refused too, and in the same words.
    fn speaks_for(&self, command: &ChargeCommand) -> bool {
        let Hits::Charge(hits) = command.request.hits else { return false };
        let same = command.counters.iter().eq(self.limits.iter().map(|(counted, _)| counted));
        let like = |(counted, level): &(OwnedCounter, ChargeResult)| {
            // More hits may be too many for good, or too many for a limit that had room.
            let for_good = |hits| hits > u64::from(counted.limit.capacity());
            for_good(hits) == for_good(self.hits) && (!level.admitted || hits <= u64::from(level.remaining))
        };
        !command.dry_run
            && same
            && command.request.max_delay_us <= self.max_delay_us
            && (hits == self.hits || hits > self.hits && self.limits.iter().all(like))
    }

    fn levels(&self, now_us: u64) -> ChargeResults {
        let passed_us = now_us.saturating_sub(self.at_us);
        let later = |(_, level): &(OwnedCounter, ChargeResult)| ChargeResult {
            reset_us: level.reset_us.saturating_sub(passed_us),
            retry_after_us: level.retry_after_us.map(|wait_us| wait_us.saturating_sub(passed_us).max(1)),
            ..*level
        };
        self.limits.iter().map(later).collect()
    }

    /// About what it takes: its place in a table that has just grown, and its limits with what an allocation costs.
    fn bytes(&self) -> usize {
        const PLACE: usize = (size_of::<(u128, Entry)>() + 1) * 16 / 7;
        const ALLOCATION: usize = 16;
        PLACE + ALLOCATION + size_of_val(&*self.limits)
    }
}

/// Whether an enforced limit refuses.
fn refuses(command: &ChargeCommand, levels: &ChargeResults) -> bool {
    command.counters.iter().zip(levels).any(|(counted, level)| counted.enforced && !level.admitted)
}
