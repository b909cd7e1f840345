//! Counters of a shard: their entries, of 48 bytes for every algorithm, and the hash index that finds an entry.
//!
//! An entry is a counter, or the ban beside one. A state is packed into three words. The records of a log are stored
//! outside the entries, and the entry has their index. The remaining bytes are the inputs of expiry and eviction, so
//! that neither needs the limit.
//!
//! The index has 32 bits per cell, about 5.3 bytes per entry; it grows by a quarter instead of doubling. Open
//! addressing with linear probing: a cell has the index of an entry and eight bits of its hash, so that a probe reads
//! the entry only if those bits agree. Library tables double, so that an entry costs up to twice as much, and they need
//! one byte more per cell. A rebuild reads the hashes from the entries in order. The cells are in segments of one size.
//! One block that is replaced by a larger one leaves memory behind until the allocator reuses it: 2 to 12 bytes per
//! entry with four threads.
//!
//! Decides: how the table of a shard grows and shrinks; how many counters it may have (`MAX_ENTRIES`).
//! Decides: bytes of a counter, and when it expires.

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::ban_state::BanState;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::{CountingMethod, HitExpiry, sliding_window_log};
use crate::limit::charge::ChargeResult;

/// One counter.
#[derive(Clone, Copy, Debug)]
pub(super) struct CounterEntry {
    /// Key of the path, mixed with the tag of the limit; two words, because a `u128` would be padded.
    key: [u64; 2],
    /// Packed state; the first word is the time of the last charge in microseconds.
    words: [u64; 3],
    /// Time from which on the state equals an empty one, in seconds since the Unix epoch, rounded up.
    expires_s: u32,
    /// Time after the last charge for which the counter is over its limit, in seconds, rounded up; `u16::MAX`: until it
    /// expires.
    over_s: u16,
    /// Used share of the limit, 0 to [`FULLY_USED`].
    used: u8,
    kind: EntryKind,
}

/// What an entry holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryKind {
    Counter(CountingMethod),
    /// The ban beside a counter.
    Ban,
}

/// `used` of a counter without remaining hits.
const FULLY_USED: u8 = u8::MAX;

impl CounterEntry {
    /// Creates a counter without charges.
    pub(super) fn new(key: u128, counting: CountingMethod) -> Self {
        Self::of_kind(key, EntryKind::Counter(counting))
    }

    /// Creates a ban.
    pub(super) fn new_ban(key: u128) -> Self {
        Self::of_kind(key, EntryKind::Ban)
    }

    fn of_kind(key: u128, kind: EntryKind) -> Self {
        Self { key: split_key(key), words: [0; 3], expires_s: 0, over_s: 0, used: 0, kind }
    }

    pub(super) fn has_key(&self, key: u128) -> bool {
        self.key == split_key(key)
    }

    /// Lower half of the key, which the index hashes by.
    pub(super) const fn hash(&self) -> u64 {
        self.key[0]
    }

    /// True if the state equals an empty one at `now_s`, which is rounded down, so never too early.
    pub(super) const fn is_expired(&self, now_s: u32) -> bool {
        // The seconds overflow in 2106; from then on counters are only evicted.
        self.expires_s <= now_s && now_s != u32::MAX
    }

    /// Used share of the limit, 0 to 255; `None` if the counter is over its limit at `now_s`, which is rounded down.
    pub(super) fn used_share(&self, now_s: u32) -> Option<u8> {
        let last_s = seconds_rounded_up(Time::from_micros(self.words[0]));
        let over_until_s = match self.over_s {
            0 => 0,
            u16::MAX => self.expires_s,
            over_s => last_s.saturating_add(u32::from(over_s)),
        };
        (now_s >= over_until_s).then_some(self.used)
    }

    /// Index of the counter's log, if it has one.
    pub(super) fn log_index(&self) -> Option<usize> {
        (self.kind == EntryKind::Counter(CountingMethod::SlidingWindowLog))
            .then(|| usize::try_from(self.words[2]).unwrap_or(usize::MAX))
    }

    /// Sets the index of the counter's log.
    pub(super) fn set_log_index(&mut self, index: usize) {
        self.words[2] = index as u64;
    }

    /// Unpacks the state; `log` has the records of a log.
    pub(super) fn state(&self, log: sliding_window_log::State) -> State {
        match self.kind {
            EntryKind::Counter(CountingMethod::SlidingWindowLog) => State::SlidingWindowLog(log),
            EntryKind::Counter(counting) => State::from_packed_words(counting, self.words),
            // The key of a ban is that of no counter.
            EntryKind::Ban => State::empty(CountingMethod::FixedWindow),
        }
    }

    /// Unpacks the state of a ban.
    pub(super) const fn ban_state(&self) -> BanState {
        BanState::from_packed_words(self.words)
    }

    /// Packs the state of a ban, with the inputs of expiry and eviction.
    pub(super) fn set_ban(&mut self, ban: BanState, limit: &Limit) {
        self.words = ban.to_packed_words();
        self.expires_s = seconds_rounded_up(ban.expires_at(limit));
        self.used = FULLY_USED;
        let over_s = ban.until.since_us(ban.last).div_ceil(1_000_000);
        self.over_s = u16::try_from(over_s).unwrap_or(u16::MAX);
    }

    /// Packs a state; returns the records of a log, to be stored at [`CounterEntry::log_index`].
    pub(super) fn set_state(&mut self, state: State) -> Option<sliding_window_log::State> {
        match state {
            // The last word stays the index of the log.
            State::SlidingWindowLog(log) => {
                (self.words[0], self.words[1]) = (log.last.as_micros(), log.held);
                Some(log)
            }
            state => {
                self.words = state.to_packed_words();
                None
            }
        }
    }

    /// Updates the inputs of expiry and eviction after a charge at `now`.
    pub(super) fn update_expiry_and_usage(&mut self, limit: &Limit, result: &ChargeResult, now: Time) {
        let last = Time::from_micros(self.words[0]);
        // A draining level is empty sooner if the limit is higher. It is kept for one more period, so that it still
        // counts if a reload lowers the limit, or raises one that cut it. Windows end at times that do not depend on the
        // limit.
        let drains = limit.algorithm().properties().hit_expiry == HitExpiry::Continuous;
        let beyond_us = if drains { limit.period_us() } else { 0 };
        let empty_at = if result.reset_us > 0 { now.plus_us(result.reset_us) } else { last };
        // Kept at least until its own time is past, because a counter's time never runs backwards.
        self.expires_s = seconds_rounded_up(empty_at.plus_us(beyond_us).max(last));
        let capacity = limit.capacity().max(1);
        let left = result.remaining.min(capacity);
        self.used = u8::try_from((capacity - left) * u64::from(FULLY_USED) / capacity).unwrap_or(FULLY_USED);
        let over_us = match result.retry_after_us {
            _ if result.remaining > 0 => 0,
            Some(retry_after_us) => retry_after_us,
            None => result.reset_us,
        };
        let over_s = now.plus_us(over_us).since_us(last).div_ceil(1_000_000);
        self.over_s = if over_us == 0 { 0 } else { u16::try_from(over_s).unwrap_or(u16::MAX) };
    }
}

/// Seconds since the Unix epoch, rounded up; `u32::MAX` from the year 2106 on.
fn seconds_rounded_up(time: Time) -> u32 {
    u32::try_from(time.as_micros().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}

/// Seconds since the Unix epoch, rounded down, so that no later time counts as reached.
pub(super) fn seconds_rounded_down(time: Time) -> u32 {
    u32::try_from(time.as_micros() / 1_000_000).unwrap_or(u32::MAX)
}

#[expect(clippy::cast_possible_truncation, reason = "each half is meant")]
const fn split_key(key: u128) -> [u64; 2] {
    [key as u64, (key >> 64) as u64]
}

/// A cell without an entry.
const EMPTY_CELL: u32 = u32::MAX;
/// Bits of a cell for the entry's index; the rest is the tag.
const INDEX_BITS: u32 = 24;
/// Maximum number of entries in an index.
pub(super) const MAX_ENTRIES: usize = (1 << INDEX_BITS) - 1;
/// Cells of a segment: 1 KiB.
const SEGMENT_CELLS: usize = 256;
/// Minimum number of entries that sparseness is judged by: an index of one segment is never sparse.
const MIN_ENTRIES_FOR_SPARSENESS: usize = SEGMENT_CELLS / SPARSE_FACTOR;
/// Cells per entry beyond which an index is sparse.
const SPARSE_FACTOR: usize = 8;

/// Indices of entries by hash.
#[derive(Debug, Default)]
pub(super) struct EntryIndex {
    #[expect(clippy::vec_box, reason = "a vector of arrays would be one block that is replaced by a larger one")]
    segments: Vec<Box<[u32; SEGMENT_CELLS]>>,
    length: usize,
}

impl EntryIndex {
    /// Finds the index of the entry with this hash that `is_it` accepts.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        self.find_cell(hash, is_it).map(|cell| entry_index(self.cell_value(cell)))
    }

    /// True if `more` insertions need [`EntryIndex::rebuild`] first: at most five of six cells may be occupied.
    pub(super) const fn needs_rebuild_for(&self, more: usize) -> bool {
        (self.length + more) * 6 > self.cell_count() * 5
    }

    /// Rebuilds the index from the hashes of all entries, in the order of their indices, with room for half as many
    /// more.
    pub(super) fn rebuild(&mut self, hashes: impl ExactSizeIterator<Item = u64>) {
        let segments = segments_for(hashes.len());
        self.segments.truncate(segments);
        self.segments.iter_mut().for_each(|segment| segment.fill(EMPTY_CELL));
        self.segments.resize_with(segments, || Box::new([EMPTY_CELL; SEGMENT_CELLS]));
        self.length = 0;
        for (index, hash) in hashes.enumerate() {
            self.insert(hash, index);
        }
    }

    /// Adds a new entry; the index must not be full.
    pub(super) fn insert(&mut self, hash: u64, index: usize) {
        let mut cell = self.home_cell(hash);
        while self.cell_value(cell) != EMPTY_CELL {
            cell = self.next_cell(cell);
        }
        self.set_cell(cell, pack_cell(hash, index));
        self.length += 1;
    }

    /// Changes the index of an entry from `from` to `to`.
    pub(super) fn change_entry_index(&mut self, hash: u64, from: usize, to: usize) {
        if let Some(cell) = self.find_cell(hash, |index| index == from) {
            self.set_cell(cell, pack_cell(hash, to));
        }
    }

    /// Removes an entry, and moves the ones behind it closer to their home cells, so that no probe ends early.
    pub(super) fn remove(&mut self, hash: u64, index: usize, hash_of: impl Fn(usize) -> u64) {
        let Some(mut hole) = self.find_cell(hash, |other| other == index) else { return };
        self.length -= 1;
        let mut cell = self.next_cell(hole);
        while self.cell_value(cell) != EMPTY_CELL {
            let home = self.home_cell(hash_of(entry_index(self.cell_value(cell))));
            // An entry may move if the hole lies between its home cell and its cell.
            if self.probe_distance(home, cell) >= self.probe_distance(hole, cell) {
                self.set_cell(hole, self.cell_value(cell));
                hole = cell;
            }
            cell = self.next_cell(cell);
        }
        self.set_cell(hole, EMPTY_CELL);
    }

    /// True if the index has many times the cells that its entries need.
    pub(super) fn is_sparse(&self) -> bool {
        self.cell_count() > SPARSE_FACTOR * self.length.max(MIN_ENTRIES_FOR_SPARSENESS)
    }

    /// Size in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.cell_count() * size_of::<u32>()
    }

    /// Additional bytes after a rebuild for `more` entries.
    pub(super) const fn growth_bytes(&self, more: usize) -> usize {
        (segments_for(self.length + more) * SEGMENT_CELLS * size_of::<u32>()).saturating_sub(self.bytes())
    }

    fn find_cell(&self, hash: u64, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        if self.segments.is_empty() {
            return None;
        }
        let mut cell = self.home_cell(hash);
        loop {
            let found = self.cell_value(cell);
            if found == EMPTY_CELL {
                return None;
            }
            if found >> INDEX_BITS == tag_of_hash(hash) && is_it(entry_index(found)) {
                return Some(cell);
            }
            cell = self.next_cell(cell);
        }
    }

    const fn cell_count(&self) -> usize {
        self.segments.len() * SEGMENT_CELLS
    }

    fn cell_value(&self, cell: usize) -> u32 {
        self.segments[cell / SEGMENT_CELLS][cell % SEGMENT_CELLS]
    }

    fn set_cell(&mut self, cell: usize, value: u32) {
        self.segments[cell / SEGMENT_CELLS][cell % SEGMENT_CELLS] = value;
    }

    /// Home cell of a hash: its upper half, scaled to the number of cells.
    const fn home_cell(&self, hash: u64) -> usize {
        (((hash >> 32) * self.cell_count() as u64) >> 32) as usize
    }

    const fn next_cell(&self, cell: usize) -> usize {
        if cell + 1 == self.cell_count() { 0 } else { cell + 1 }
    }

    /// Number of cells from `from` to `to`, wrapping around.
    const fn probe_distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.cell_count() - from }
    }
}

/// Number of segments with room for half as many more entries; at least one.
const fn segments_for(entries: usize) -> usize {
    (entries + entries / 2) / SEGMENT_CELLS + 1
}

/// Returns the tag of a hash: its lowest eight bits.
const fn tag_of_hash(hash: u64) -> u32 {
    (hash & 0xff) as u32
}

/// Packs the tag of a hash and the index of an entry into a cell.
fn pack_cell(hash: u64, index: usize) -> u32 {
    let index = u32::try_from(index).expect("a shard has at most MAX_ENTRIES");
    tag_of_hash(hash) << INDEX_BITS | index
}

/// Unpacks the index of the entry from a cell.
const fn entry_index(cell: u32) -> usize {
    (cell & ((1 << INDEX_BITS) - 1)) as usize
}
