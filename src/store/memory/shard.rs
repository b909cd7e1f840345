//! One shard of the memory store, behind one lock.
//!
//! Entries are stored densely in chunks; a hash index finds them by key. Removing an entry moves the last one into its
//! slot, so that there are no holes: a sweep is a walk, and a random index is a random counter. Nothing doubles:
//! entries grow by a chunk at a time, the index by a quarter.
//!
//! Decides: which counter is evicted when memory is full, and which never is (`evict_one`, `make_room`).
//! Decides: a full shard in which nothing can be evicted; which expired counters a sweep removes.

mod holds;
pub(super) mod reservations;

use smallvec::SmallVec;

use super::entries::{CounterEntry, EntryIndex, MAX_ENTRIES, seconds_rounded_down};
use crate::base::clock::Time;
use crate::base::sharded::PrehashedMap;
use crate::limit::Limit;
use crate::limit::algorithm::ban_state::BanState;
use crate::limit::algorithm::joint_charge::{admits_each, charge_together};
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::{Algorithm, CountingMethod, sliding_window_log};
use crate::limit::charge::{Charge, ChargeRequest, ChargeResult, JointLimit};
use crate::limit::hold::CounterHolds;
use crate::limit::overflow::ChainPosition;
use crate::limit::request::Hits;
use crate::store::charge::LimitAdmissions;
use crate::store::error::MemoryFull;
use crate::store::stats::MemoryUsage;

/// Upper bound on the size of a chunk. Allocators have blocks of this size; with 3 KiB they wasted a sixth.
const CHUNK_BYTES: usize = 4096;
/// Entries in a chunk: 85.
const CHUNK_ENTRIES: usize = CHUNK_BYTES / size_of::<CounterEntry>();
/// Size of a log without its records.
const EMPTY_LOG_BYTES: usize = size_of::<sliding_window_log::State>();
/// Size of the first allocation of a log: a deque begins with four records.
const FIRST_LOG_ALLOCATION_BYTES: usize = 4 * size_of::<sliding_window_log::LoggedHits>();
/// Number of random counters that are considered for an eviction.
const EVICTION_SAMPLE_SIZE: u64 = 8;

/// One shard of the memory store.
#[derive(Debug)]
pub(super) struct MemoryShard {
    index: EntryIndex,
    chunks: Vec<Vec<CounterEntry>>,
    length: usize,
    logs: Vec<sliding_window_log::State>,
    free_logs: Vec<usize>,
    log_bytes: usize,
    capacity_bytes: u64,
    evicted: u64,
    random: u64,
    /// Counters over their limits may be evicted too.
    evicts_any: bool,
    /// Holds on counters, by the keys of these.
    holds: PrehashedMap<CounterHolds>,
}

/// Result of the search for a charged counter: the index of its entry, if it exists.
struct CounterLookup<'r> {
    key: u128,
    joint_limit: JointLimit<'r>,
    index: Option<usize>,
}

/// Limits of these counters, as [`charge_together`] takes them.
fn joint_limits<'r>(slots: &[CounterLookup<'r>]) -> SmallVec<[JointLimit<'r>; 4]> {
    slots.iter().map(|slot| slot.joint_limit).collect()
}

impl CounterLookup<'_> {
    /// Returns true for the entry of the counter, and for that of its ban.
    fn owns_entry(&self, entry: &CounterEntry) -> bool {
        entry.has_key(self.key) || self.joint_limit.limit.ban().is_some() && entry.has_key(ban_key(self.key))
    }
}

impl MemoryShard {
    /// Creates an empty shard of about `capacity_bytes` at most.
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self {
            index: EntryIndex::default(),
            chunks: Vec::new(),
            length: 0,
            logs: Vec::new(),
            free_logs: Vec::new(),
            log_bytes: 0,
            capacity_bytes,
            evicted: 0,
            random: 0x9e37_79b9_7f4a_7c15,
            evicts_any: false,
            holds: PrehashedMap::default(),
        }
    }

    /// Creates a shard in which any counter may be evicted, also one that is over its limit.
    pub(super) fn new_evicting_any_counter(capacity_bytes: u64) -> Self {
        Self { evicts_any: true, ..Self::new(capacity_bytes) }
    }

    /// Charges all counters of a descriptor; returns the result of each limit.
    pub(super) fn charge(&mut self, charge: &Charge<'_>, now: Time) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        if self.is_any_counter_held(charge) {
            return self.charge_with_holds(charge, now);
        }
        let may_add = may_add_entry(charge);
        if let [counter] = &*charge.counters {
            let mut slots = [self.find_counter(charge.path_hash ^ counter.tag, counter.as_joint_limit())];
            if let Err(full) = self.make_room(&mut slots, may_add, now) {
                return self.reject_by_existing_counter(&slots, charge, now).ok_or(full);
            }
            let mut state = self.take_state(&slots[0]);
            let result = state.charge(counter.limit, now, charge.request);
            if slots[0].index.is_some() || may_add {
                self.put_state(&slots[0], state, &result, now);
            }
            return Ok(SmallVec::from([result]));
        }
        let mut slots: SmallVec<[CounterLookup<'_>; 4]> = charge
            .counters
            .iter()
            .map(|counter| self.find_counter(charge.path_hash ^ counter.tag, counter.as_joint_limit()))
            .collect();
        if let Err(full) = self.make_room(&mut slots, may_add, now) {
            return self.reject_by_existing_counter(&slots, charge, now).ok_or(full);
        }
        let mut states: SmallVec<[State; 4]> = slots.iter().map(|slot| self.take_state(slot)).collect();
        let results = charge_together(&joint_limits(&slots), &mut states, now, charge.request);
        for ((slot, state), result) in slots.iter().zip(states).zip(&results) {
            if slot.index.is_some() || may_add {
                self.put_state(slot, state, result, now);
            }
        }
        Ok(results)
    }

    /// Returns the results of a charge if an existing counter rejects it for all limits; changes no counter. `None` if
    /// the charge needs room.
    ///
    /// A rejection needs no room. Without this, a descriptor over its limit would be decided by a failure policy
    /// whenever a new counter beside it has no room, as after the end of a shorter period.
    fn reject_by_existing_counter(
        &mut self,
        slots: &[CounterLookup<'_>],
        charge: &Charge<'_>,
        now: Time,
    ) -> Option<SmallVec<[ChargeResult; 1]>> {
        let states: SmallVec<[State; 4]> = slots.iter().map(|slot| self.take_state(slot)).collect();
        let is_rejected = slots.iter().zip(&states).any(|(slot, state)| {
            let JointLimit { limit, rejects_others } = slot.joint_limit;
            // Of an overflow no limit rejects alone.
            let is_apart = limit.chain_position() == ChainPosition::NotInChain;
            let decides = slot.index.is_some() && is_apart && (rejects_others || slots.len() == 1);
            decides && !state.admits(limit, now, charge.request)
        });
        let results =
            is_rejected.then(|| charge_together(&joint_limits(slots), &mut states.clone(), now, charge.request));
        for (slot, state) in slots.iter().zip(states) {
            if let Some(index) = slot.index {
                self.write_state(index, state);
            }
        }
        results
    }

    /// Returns which limits of a descriptor would admit a charge.
    pub(super) fn peek_admissions(&mut self, charge: &Charge<'_>, now: Time) -> LimitAdmissions {
        if self.is_any_counter_held(charge) {
            return self.peek_held_admissions(charge, now);
        }
        let slots = self.find_counters(charge);
        let states: SmallVec<[State; 4]> = slots.iter().map(|slot| self.take_state(slot)).collect();
        let admits = admits_each(&joint_limits(&slots), &states, now, charge.request);
        for (slot, state) in slots.iter().zip(states) {
            if let Some(index) = slot.index {
                self.write_state(index, state);
            }
        }
        admits
    }

    /// Removes a counter; returns true if it existed.
    pub(super) fn remove_key(&mut self, key: u128) -> bool {
        let index = self.find_index(key);
        index.is_some_and(|index| {
            self.swap_remove_entry(index);
            true
        })
    }

    /// Replaces the state of a counter; a new counter without room is left out.
    pub(super) fn replace_state(&mut self, key: u128, limit: &Limit, mut state: State, now: Time) {
        let mut slots = [self.find_counter(key, JointLimit { limit, rejects_others: true })];
        let is_empty = state == State::empty_for(limit);
        if (slots[0].index.is_none() && is_empty && !self.has_ban(key))
            || self.make_room(&mut slots, true, now).is_err()
        {
            return;
        }
        // Room was made for one record, but a log has many.
        let [slot] = slots;
        let counter = if let State::WithBan(both) = &state { &both.counter } else { &state };
        let added = if let State::SlidingWindowLog(log) = counter { window_log_bytes(log) } else { 0 };
        let replaced = slot
            .index
            .and_then(|index| self.entry(index).log_index())
            .map_or(0, |log| window_log_bytes(&self.logs[log]));
        if added > replaced && self.bytes() + (added - replaced) as u64 > self.capacity_bytes {
            return;
        }
        drop(self.take_state(&slot));
        let result = state.charge(limit, now, ChargeRequest::new(Hits::Peek, 0));
        self.put_state(&slot, state, &result, now);
    }

    /// Removes expired counters, and shrinks the index and the logs.
    pub(super) fn sweep(&mut self, now: Time) {
        let now_s = seconds_rounded_down(now);
        let mut index = 0;
        while index < self.length {
            if self.entry(index).is_expired(now_s) {
                self.swap_remove_entry(index);
            } else {
                index += 1;
            }
        }
        if self.index.is_sparse() {
            self.rebuild_index();
        }
        if self.logs.len() > 4 * (self.logs.len() - self.free_logs.len()) {
            self.compact_logs();
        }
        self.sweep_holds(now);
    }

    /// Drops unused logs, so that the used ones are contiguous.
    fn compact_logs(&mut self) {
        let mut logs = Vec::with_capacity(self.logs.len() - self.free_logs.len());
        for index in 0..self.length {
            if let Some(log) = self.entry(index).log_index() {
                logs.push(std::mem::take(&mut self.logs[log]));
                self.entry_mut(index).set_log_index(logs.len() - 1);
            }
        }
        (self.logs, self.free_logs) = (logs, Vec::new());
    }

    pub(super) fn memory_usage(&self) -> MemoryUsage {
        MemoryUsage {
            counters: self.length as u64,
            bytes: self.bytes() + self.hold_table_bytes(),
            evicted: self.evicted,
            capacity_bytes: self.capacity_bytes,
        }
    }

    /// Bytes of chunks, index and logs.
    fn bytes(&self) -> u64 {
        let entries = self.chunks.len() * CHUNK_BYTES;
        let logs =
            self.log_bytes + self.logs.capacity() * EMPTY_LOG_BYTES + self.free_logs.capacity() * size_of::<usize>();
        (entries + self.index.bytes() + logs) as u64
    }

    /// Finds a counter.
    fn find_counter<'r>(&self, key: u128, joint_limit: JointLimit<'r>) -> CounterLookup<'r> {
        CounterLookup { key, joint_limit, index: self.find_index(key) }
    }

    /// Makes room for a charge: for new counters and for records of logs.
    ///
    /// An existing log may outgrow the shard once all other counters that can be evicted are: its limit bounds it, and
    /// a rule with a long log would otherwise fail for everyone in a shard that is too small for it.
    fn make_room(&mut self, slots: &mut [CounterLookup<'_>], may_add: bool, now: Time) -> Result<(), MemoryFull> {
        // A counter that is there grows only with its log or its ban.
        let grows = |slot: &CounterLookup<'_>| {
            let limit = slot.joint_limit.limit;
            slot.index.is_none() || limit.ban().is_some() || limit.algorithm() == Algorithm::SlidingWindowLog
        };
        if !may_add || !slots.iter().any(grows) {
            return Ok(());
        }
        loop {
            let growth = self.growth_bytes(slots);
            let countable = self.length + 2 * slots.len() <= MAX_ENTRIES;
            if countable && (growth == 0 || self.bytes() + growth <= self.capacity_bytes) {
                return Ok(());
            }
            if let Err(full) = self.evict_one(slots, seconds_rounded_down(now)) {
                let is_there = slots.iter().all(|slot| slot.index.is_some());
                let outgrows = is_there && growth > self.capacity_bytes / 4;
                return if self.evicts_any || outgrows { Ok(()) } else { Err(full) };
            }
            slots.iter_mut().for_each(|slot| slot.index = self.find_index(slot.key));
        }
    }

    /// Upper bound on the bytes that a charge of these counters adds.
    fn growth_bytes(&self, slots: &[CounterLookup<'_>]) -> u64 {
        let missing = slots.iter().filter(|slot| slot.index.is_none()).count() + self.count_missing_bans(slots);
        let free = self.chunks.len() * CHUNK_ENTRIES - self.length;
        let mut bytes = if missing > free { CHUNK_BYTES } else { 0 };
        if self.index.needs_rebuild_for(missing) {
            bytes += self.index.growth_bytes(missing);
        }
        let logs = slots.iter().filter(|slot| slot.joint_limit.limit.algorithm() == Algorithm::SlidingWindowLog);
        for slot in logs {
            bytes += match slot.index.and_then(|index| self.entry(index).log_index()) {
                Some(log) if self.logs[log].records.len() < self.logs[log].records.capacity() => 0,
                Some(log) => window_log_bytes(&self.logs[log]).max(FIRST_LOG_ALLOCATION_BYTES),
                None if !self.free_logs.is_empty() || self.logs.len() < self.logs.capacity() => {
                    FIRST_LOG_ALLOCATION_BYTES
                }
                None => FIRST_LOG_ALLOCATION_BYTES + self.logs.capacity().max(4) * EMPTY_LOG_BYTES,
            };
        }
        bytes as u64
    }

    /// Evicts one of a few random counters: an expired one, else the one with the least of its limit used. Counters
    /// over their limits and those of this charge stay.
    fn evict_one(&mut self, kept: &[CounterLookup<'_>], now_s: u32) -> Result<(), MemoryFull> {
        let mut least: Option<(u8, usize)> = None;
        for _ in 0..EVICTION_SAMPLE_SIZE.min(self.length as u64) {
            let index = self.random_index();
            let entry = self.entry(index);
            if kept.iter().any(|slot| slot.owns_entry(entry)) {
                continue;
            }
            if entry.is_expired(now_s) {
                least = Some((0, index));
                break;
            }
            // A counter over its limit stays, except in the overflow shard.
            if let Some(used) = entry.used_share(now_s).or(self.evicts_any.then_some(u8::MAX))
                && least.is_none_or(|(least_used, _)| used < least_used)
            {
                least = Some((used, index));
            }
        }
        let (_, index) = least.ok_or(MemoryFull)?;
        self.swap_remove_entry(index);
        self.evicted += 1;
        Ok(())
    }

    /// Random index by xorshift64; it needs to be well distributed, not secret.
    fn random_index(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % self.length as u64).expect("it is less than a usize")
    }

    fn entry(&self, index: usize) -> &CounterEntry {
        entry_at(&self.chunks, index)
    }

    fn entry_mut(&mut self, index: usize) -> &mut CounterEntry {
        &mut self.chunks[index / CHUNK_ENTRIES][index % CHUNK_ENTRIES]
    }

    fn find_index(&self, key: u128) -> Option<usize> {
        let probe = CounterEntry::new(key, CountingMethod::FixedWindow);
        self.index.find(probe.hash(), |index| self.entry(index).has_key(key))
    }

    /// Takes the state of a counter; the records of a log are moved out until [`MemoryShard::put_state`] returns them.
    fn take_state(&mut self, slot: &CounterLookup<'_>) -> State {
        if slot.joint_limit.limit.ban().is_some() {
            let ban = self.find_ban(slot.key);
            return self.take_counter_state(slot).with_ban(ban);
        }
        self.take_counter_state(slot)
    }

    fn take_counter_state(&mut self, slot: &CounterLookup<'_>) -> State {
        let Some(index) = slot.index else { return State::empty(slot.joint_limit.limit.counting_method()) };
        let entry = *self.entry(index);
        let log = match entry.log_index() {
            Some(log) => {
                let log = std::mem::take(&mut self.logs[log]);
                self.log_bytes -= window_log_bytes(&log);
                log
            }
            None => Default::default(),
        };
        entry.state(log)
    }

    /// Stores the state of a counter. Adds a new counter unless its state is empty.
    fn put_state(&mut self, slot: &CounterLookup<'_>, state: State, result: &ChargeResult, now: Time) {
        let limit = slot.joint_limit.limit;
        let state = match state {
            State::WithBan(both) => {
                self.put_ban(slot.key, both.ban, limit);
                both.counter
            }
            state => state,
        };
        let index = match slot.index {
            Some(index) => index,
            None if state == State::empty(limit.counting_method()) => return,
            None => self.insert(CounterEntry::new(slot.key, limit.counting_method())),
        };
        self.write_state(index, state);
        self.entry_mut(index).update_expiry_and_usage(limit, result, now);
    }

    fn write_state(&mut self, index: usize, state: State) {
        // A ban is written by `put_state` only: other callers have not changed it.
        let state = if let State::WithBan(both) = state { both.counter } else { state };
        let log = self.entry_mut(index).set_state(state);
        if let (Some(mut log), Some(log_index)) = (log, self.entry(index).log_index()) {
            if log.records.capacity() > 4 * log.records.len().max(4) {
                log.records.shrink_to(2 * log.records.len());
            }
            self.log_bytes += window_log_bytes(&log);
            self.logs[log_index] = log;
        }
    }

    fn has_ban(&self, key: u128) -> bool {
        self.find_index(ban_key(key)).is_some()
    }

    /// Returns the ban beside a counter.
    fn find_ban(&self, key: u128) -> BanState {
        self.find_index(ban_key(key)).map_or_else(BanState::default, |index| self.entry(index).ban_state())
    }

    /// Stores the ban beside a counter. Adds an entry unless there is nothing to store.
    fn put_ban(&mut self, key: u128, ban: BanState, limit: &Limit) {
        let index = match self.find_index(ban_key(key)) {
            Some(index) => index,
            None if ban == BanState::default() => return,
            None => self.insert(CounterEntry::new_ban(ban_key(key))),
        };
        if self.entry(index).ban_state() != ban {
            self.entry_mut(index).set_ban(ban, limit);
        }
    }

    fn count_missing_bans(&self, slots: &[CounterLookup<'_>]) -> usize {
        let is_missing = |slot: &&CounterLookup<'_>| slot.joint_limit.limit.ban().is_some() && !self.has_ban(slot.key);
        slots.iter().filter(is_missing).count()
    }

    fn insert(&mut self, mut entry: CounterEntry) -> usize {
        if entry.log_index().is_some() {
            let log = self.free_logs.pop().unwrap_or_else(|| {
                self.logs.push(Default::default());
                self.logs.len() - 1
            });
            entry.set_log_index(log);
        }
        let index = self.length;
        if index == self.chunks.len() * CHUNK_ENTRIES {
            self.chunks.push(Vec::with_capacity(CHUNK_ENTRIES));
        }
        self.chunks[index / CHUNK_ENTRIES].push(entry);
        self.length += 1;
        if self.index.needs_rebuild_for(1) {
            self.rebuild_index();
        } else {
            self.index.insert(entry.hash(), index);
        }
        index
    }

    fn rebuild_index(&mut self) {
        let Self { index, chunks, length, .. } = self;
        index.rebuild((0..*length).map(|index| entry_at(chunks, index).hash()));
    }

    /// Removes an entry and moves the last one into its slot.
    fn swap_remove_entry(&mut self, removed: usize) {
        let entry = *self.entry(removed);
        if let Some(log) = entry.log_index() {
            self.log_bytes -= window_log_bytes(&self.logs[log]);
            self.logs[log] = Default::default();
            self.free_logs.push(log);
        }
        let Self { index, chunks, .. } = self;
        index.remove(entry.hash(), removed, |other| entry_at(chunks, other).hash());
        let last = self.length - 1;
        if removed != last {
            let moved = *self.entry(last);
            self.index.change_entry_index(moved.hash(), last, removed);
            *self.entry_mut(removed) = moved;
        }
        self.chunks[last / CHUNK_ENTRIES].pop();
        if last.is_multiple_of(CHUNK_ENTRIES) {
            self.chunks.pop();
        }
        self.length = last;
    }
}

/// True if a charge may add an entry. Refunds and peeks add none, but for the ban that a rejected peek begins.
fn may_add_entry(charge: &Charge<'_>) -> bool {
    let begins_ban = || charge.counters.iter().any(|counter| charge.request.counts_for_ban(counter.limit));
    matches!(charge.request.hits, Hits::Charge(_)) || begins_ban()
}

/// Returns the key of the ban beside a counter.
pub(super) const fn ban_key(key: u128) -> u128 {
    key ^ 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d
}

fn entry_at(chunks: &[Vec<CounterEntry>], index: usize) -> &CounterEntry {
    &chunks[index / CHUNK_ENTRIES][index % CHUNK_ENTRIES]
}

fn window_log_bytes(log: &sliding_window_log::State) -> usize {
    log.records.capacity() * size_of::<sliding_window_log::LoggedHits>()
}
