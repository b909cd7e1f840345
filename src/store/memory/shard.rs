//! A part of the table, behind one lock.
//!
//! Entries stand densely in chunks; an index of 32-bit indices finds them by key. Removing an entry moves the last one
//! into its place, so there are no holes, a sweep is a walk and a random place is a random counter. Nothing doubles:
//! entries grow by a chunk at a time, the index by a quarter.

use smallvec::SmallVec;

use super::entry::{CounterEntry, seconds_down};
use super::index::{Index, MAX_ENTRIES};
use super::usage::{MemoryFull, MemoryUsage};
use crate::algorithm::state::{State, charge_together};
use crate::algorithm::{ChargeRequest, ChargeResult, EnforcedLimit, sliding_window_log};
use crate::clock::Time;
use crate::counter::Charge;
use crate::limit::Limit;
use crate::limit::algorithm::Algorithm;
use crate::request::Hits;

/// Entries in a chunk: 3 KiB.
const CHUNK_ENTRIES: usize = 64;
const CHUNK_BYTES: usize = CHUNK_ENTRIES * size_of::<CounterEntry>();
/// A log without its records, and the least that those take: a deque begins with four.
const LOG_BYTES: usize = size_of::<sliding_window_log::State>();
const MIN_RECORDS_BYTES: usize = 4 * size_of::<sliding_window_log::LogRecord>();
/// How many counters are looked at when one has to give way.
const EVICTION_SAMPLE: u64 = 8;

/// A part of the table.
#[derive(Debug)]
pub(super) struct MemoryShard {
    index: Index,
    chunks: Vec<Vec<CounterEntry>>,
    length: usize,
    logs: Vec<sliding_window_log::State>,
    free_logs: Vec<usize>,
    log_bytes: usize,
    capacity_bytes: u64,
    evicted: u64,
    random: u64,
    /// Counters that are over their limits give way too.
    evicts_any: bool,
}

/// A counter of a charge, and where it stands if it is there.
struct CounterSlot<'r> {
    key: u128,
    enforced_limit: EnforcedLimit<'r>,
    place: Option<usize>,
}

impl MemoryShard {
    /// An empty shard that takes at most about `capacity_bytes`.
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self {
            index: Index::default(),
            chunks: Vec::new(),
            length: 0,
            logs: Vec::new(),
            free_logs: Vec::new(),
            log_bytes: 0,
            capacity_bytes,
            evicted: 0,
            random: 0x9e37_79b9_7f4a_7c15,
            evicts_any: false,
        }
    }

    /// A shard in which any counter gives way to another, one that is over its limit too.
    pub(super) fn evict_any(capacity_bytes: u64) -> Self {
        Self { evicts_any: true, ..Self::new(capacity_bytes) }
    }

    /// Decides all limits of a descriptor.
    pub(super) fn charge(&mut self, charge: &Charge<'_>, now: Time) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        if let [counter] = &*charge.counters {
            let mut slots = [self.slot(charge.key ^ counter.tag, counter.enforced_limit())];
            self.make_room(&mut slots, charge.request.hits, now)?;
            let mut state = self.take_state(&slots[0]);
            let result = state.charge(counter.limit, now, charge.request);
            self.put_state(&slots[0], state, (charge.request.hits, &result), now);
            return Ok(SmallVec::from([result]));
        }
        let mut slots: SmallVec<[CounterSlot<'_>; 4]> = charge
            .counters
            .iter()
            .map(|counter| self.slot(charge.key ^ counter.tag, counter.enforced_limit()))
            .collect();
        self.make_room(&mut slots, charge.request.hits, now)?;
        let limits: SmallVec<[EnforcedLimit<'_>; 4]> = slots.iter().map(|slot| slot.enforced_limit).collect();
        let mut states: SmallVec<[State; 4]> = slots.iter().map(|slot| self.take_state(slot)).collect();
        let results = charge_together(&limits, &mut states, now, charge.request);
        for ((slot, state), result) in slots.iter().zip(states).zip(&results) {
            self.put_state(slot, state, (charge.request.hits, result), now);
        }
        Ok(results)
    }

    /// Whether all limits of a descriptor would let the charge pass, trials too.
    pub(super) fn admits(&mut self, charge: &Charge<'_>, now: Time) -> bool {
        charge.counters.iter().all(|counter| {
            let slot = self.slot(charge.key ^ counter.tag, counter.enforced_limit());
            let state = self.take_state(&slot);
            let admits = state.admits(counter.limit, now, charge.request);
            if let Some(place) = slot.place {
                self.keep_state(place, state);
            }
            admits
        })
    }

    /// Lets go of a counter; whether it was there.
    pub(super) fn remove_key(&mut self, key: u128) -> bool {
        let place = self.index_of(key);
        place.is_some_and(|place| {
            self.remove(place);
            true
        })
    }

    /// Puts a state in place of what a counter holds; one that is not there and finds no room is left out.
    pub(super) fn put(&mut self, (key, limit): (u128, &Limit), mut state: State, now: Time) {
        let mut slots = [self.slot(key, EnforcedLimit { limit, enforced: true })];
        let is_empty = state == State::empty(limit.algorithm());
        if (slots[0].place.is_none() && is_empty) || self.make_room(&mut slots, Hits::Charge(1), now).is_err() {
            return;
        }
        // Room was made for one record; a log brings all of them.
        let [slot] = slots;
        let brought = if let State::SlidingWindowLog(log) = &state { bytes_of(log) } else { 0 };
        let replaced = slot.place.and_then(|place| self.entry(place).log()).map_or(0, |log| bytes_of(&self.logs[log]));
        if brought > replaced && self.bytes() + (brought - replaced) as u64 > self.capacity_bytes {
            return;
        }
        drop(self.take_state(&slot));
        let result = state.charge(limit, now, ChargeRequest::new(Hits::Peek, 0));
        self.put_state(&slot, state, (Hits::Charge(1), &result), now);
    }

    /// Drops what has expired, and gives back what index and logs no longer need.
    pub(super) fn sweep(&mut self, now: Time) {
        let now_s = seconds_down(now);
        let mut place = 0;
        while place < self.length {
            if self.entry(place).is_expired(now_s) {
                self.remove(place);
            } else {
                place += 1;
            }
        }
        if self.index.is_sparse() {
            self.rebuild_index();
        }
        if self.logs.len() > 4 * (self.logs.len() - self.free_logs.len()) {
            self.compact_logs();
        }
    }

    /// Moves the logs that are in use together.
    fn compact_logs(&mut self) {
        let mut logs = Vec::with_capacity(self.logs.len() - self.free_logs.len());
        for place in 0..self.length {
            if let Some(log) = self.entry(place).log() {
                logs.push(std::mem::take(&mut self.logs[log]));
                self.entry_mut(place).set_log(logs.len() - 1);
            }
        }
        (self.logs, self.free_logs) = (logs, Vec::new());
    }

    pub(super) fn usage(&self) -> MemoryUsage {
        MemoryUsage {
            counters: self.length as u64,
            bytes: self.bytes(),
            evicted: self.evicted,
            capacity_bytes: self.capacity_bytes,
        }
    }

    /// Entries by chunks, the index, and the records of logs.
    fn bytes(&self) -> u64 {
        let entries = self.chunks.len() * CHUNK_BYTES;
        let logs = self.log_bytes + self.logs.capacity() * LOG_BYTES + self.free_logs.capacity() * size_of::<usize>();
        (entries + self.index.bytes() + logs) as u64
    }

    /// Finds a counter.
    fn slot<'r>(&self, key: u128, enforced_limit: EnforcedLimit<'r>) -> CounterSlot<'r> {
        CounterSlot { key, enforced_limit, place: self.index_of(key) }
    }

    /// Makes room for what a charge may add: counters that are not there yet, and records of logs.
    ///
    /// A log that is there may outgrow the shard by itself, once all others that can give way have: its limit bounds
    /// it, and a rule with a long log would hold for nobody in a shard that is too small for it.
    fn make_room(&mut self, slots: &mut [CounterSlot<'_>], hits: Hits, now: Time) -> Result<(), MemoryFull> {
        // Neither a look nor a refund adds anything.
        if !matches!(hits, Hits::Charge(_)) {
            return Ok(());
        }
        loop {
            let growth = self.growth(slots);
            let countable = self.length + slots.len() <= MAX_ENTRIES;
            if countable && (growth == 0 || self.bytes() + growth <= self.capacity_bytes) {
                return Ok(());
            }
            if let Err(full) = self.evict(slots, seconds_down(now)) {
                let is_there = slots.iter().all(|slot| slot.place.is_some());
                let outgrows = is_there && growth > self.capacity_bytes / 4;
                return if self.evicts_any || outgrows { Ok(()) } else { Err(full) };
            }
            slots.iter_mut().for_each(|slot| slot.place = self.index_of(slot.key));
        }
    }

    /// The most bytes that a charge from these counters may add.
    fn growth(&self, slots: &[CounterSlot<'_>]) -> u64 {
        let missing = slots.iter().filter(|slot| slot.place.is_none()).count();
        let free = self.chunks.len() * CHUNK_ENTRIES - self.length;
        let mut bytes = if missing > free { CHUNK_BYTES } else { 0 };
        if self.index.is_full(missing) {
            bytes += self.index.growth_bytes(missing);
        }
        let logs = slots.iter().filter(|slot| slot.enforced_limit.limit.algorithm() == Algorithm::SlidingWindowLog);
        for slot in logs {
            bytes += match slot.place.and_then(|place| self.entry(place).log()) {
                Some(log) if self.logs[log].records.len() < self.logs[log].records.capacity() => 0,
                Some(log) => bytes_of(&self.logs[log]).max(MIN_RECORDS_BYTES),
                None if !self.free_logs.is_empty() || self.logs.len() < self.logs.capacity() => MIN_RECORDS_BYTES,
                None => MIN_RECORDS_BYTES + self.logs.capacity().max(4) * LOG_BYTES,
            };
        }
        bytes as u64
    }

    /// Removes an expired counter or, of a few at random, the one with the least of its limit used. Neither one that is
    /// over nor one of this charge gives way.
    fn evict(&mut self, kept: &[CounterSlot<'_>], now_s: u32) -> Result<(), MemoryFull> {
        let mut least: Option<(u8, usize)> = None;
        for _ in 0..EVICTION_SAMPLE.min(self.length as u64) {
            let place = self.random_index();
            let entry = self.entry(place);
            if kept.iter().any(|slot| entry.has_key(slot.key)) {
                continue;
            }
            if entry.is_expired(now_s) {
                least = Some((0, place));
                break;
            }
            // One that is over its limit stays, unless nothing may.
            if let Some(used) = entry.used_share(now_s).or(self.evicts_any.then_some(u8::MAX))
                && least.is_none_or(|(least_used, _)| used < least_used)
            {
                least = Some((used, place));
            }
        }
        let (_, place) = least.ok_or(MemoryFull)?;
        self.remove(place);
        self.evicted += 1;
        Ok(())
    }

    /// xorshift64: which counters are looked at need not be secret, only spread.
    fn random_index(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % self.length as u64).expect("it is less than a usize")
    }

    fn entry(&self, place: usize) -> &CounterEntry {
        at(&self.chunks, place)
    }

    fn entry_mut(&mut self, place: usize) -> &mut CounterEntry {
        &mut self.chunks[place / CHUNK_ENTRIES][place % CHUNK_ENTRIES]
    }

    fn index_of(&self, key: u128) -> Option<usize> {
        let probe = CounterEntry::new(key, Default::default());
        self.index.find(probe.hash(), |place| self.entry(place).has_key(key))
    }

    /// The state of a counter; a log's records are moved out until [`MemoryShard::put_state`] brings them back.
    fn take_state(&mut self, slot: &CounterSlot<'_>) -> State {
        let Some(place) = slot.place else { return State::empty(slot.enforced_limit.limit.algorithm()) };
        let entry = *self.entry(place);
        let log = match entry.log() {
            Some(log) => {
                let log = std::mem::take(&mut self.logs[log]);
                self.log_bytes -= bytes_of(&log);
                log
            }
            None => Default::default(),
        };
        entry.state(log)
    }

    /// Keeps the state of a counter, adding the counter if it was not there and has something to keep: of a refund or a
    /// look nothing is left to keep.
    fn put_state(&mut self, slot: &CounterSlot<'_>, state: State, (hits, result): (Hits, &ChargeResult), now: Time) {
        let limit = slot.enforced_limit.limit;
        let place = match slot.place {
            Some(place) => place,
            None if !matches!(hits, Hits::Charge(_)) || state == State::empty(limit.algorithm()) => return,
            None => self.insert(CounterEntry::new(slot.key, limit.algorithm())),
        };
        self.keep_state(place, state);
        self.entry_mut(place).note(limit, result, now);
    }

    fn keep_state(&mut self, place: usize, state: State) {
        let log = self.entry_mut(place).set_state(state);
        if let (Some(mut log), Some(log_index)) = (log, self.entry(place).log()) {
            if log.records.capacity() > 4 * log.records.len().max(4) {
                log.records.shrink_to(2 * log.records.len());
            }
            self.log_bytes += bytes_of(&log);
            self.logs[log_index] = log;
        }
    }

    fn insert(&mut self, mut entry: CounterEntry) -> usize {
        if entry.log().is_some() {
            let log = self.free_logs.pop().unwrap_or_else(|| {
                self.logs.push(Default::default());
                self.logs.len() - 1
            });
            entry.set_log(log);
        }
        let place = self.length;
        if place == self.chunks.len() * CHUNK_ENTRIES {
            self.chunks.push(Vec::with_capacity(CHUNK_ENTRIES));
        }
        self.chunks[place / CHUNK_ENTRIES].push(entry);
        self.length += 1;
        if self.index.is_full(1) {
            self.rebuild_index();
        } else {
            self.index.insert(entry.hash(), place);
        }
        place
    }

    fn rebuild_index(&mut self) {
        let Self { index, chunks, length, .. } = self;
        index.rebuild((0..*length).map(|place| at(chunks, place).hash()));
    }

    /// Removes an entry and moves the last one into its place.
    fn remove(&mut self, place: usize) {
        let entry = *self.entry(place);
        if let Some(log) = entry.log() {
            self.log_bytes -= bytes_of(&self.logs[log]);
            self.logs[log] = Default::default();
            self.free_logs.push(log);
        }
        let Self { index, chunks, .. } = self;
        index.remove(entry.hash(), place, |other| at(chunks, other).hash());
        let last = self.length - 1;
        if place != last {
            let moved = *self.entry(last);
            self.index.relocate(moved.hash(), last, place);
            *self.entry_mut(place) = moved;
        }
        self.chunks[last / CHUNK_ENTRIES].pop();
        if last.is_multiple_of(CHUNK_ENTRIES) {
            self.chunks.pop();
        }
        self.length = last;
    }
}

fn at(chunks: &[Vec<CounterEntry>], place: usize) -> &CounterEntry {
    &chunks[place / CHUNK_ENTRIES][place % CHUNK_ENTRIES]
}

fn bytes_of(log: &sliding_window_log::State) -> usize {
    log.records.capacity() * size_of::<sliding_window_log::LogRecord>()
}
