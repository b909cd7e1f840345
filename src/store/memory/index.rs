//! Hash index of entries: 32 bits per slot, about 5.3 bytes per entry; it grows by a quarter instead of doubling.
//!
//! Open addressing with linear probing. A slot has the index of an entry and eight bits of its hash, so that a probe
//! reads the entry only if those bits agree. Library tables double, so that an entry costs up to twice as much, and
//! they need one byte more per slot. A rebuild reads the hashes from the entries in order.
//!
//! The slots are in segments of one size. One block that is replaced by a larger one leaves memory behind until the
//! allocator reuses it: 2 to 12 bytes per entry with four threads.

/// A slot without an entry.
const EMPTY_SLOT: u32 = u32::MAX;
/// Bits of a slot for the entry's index; the rest is the tag.
const INDEX_BITS: u32 = 24;
/// Maximum number of entries in an index.
pub(super) const MAX_ENTRIES: usize = (1 << INDEX_BITS) - 1;
/// Slots of a segment: 1 KiB.
const SEGMENT_SLOTS: usize = 256;
/// Minimum number of entries that sparseness is judged by: an index of one segment is never sparse.
const MIN_ENTRIES_FOR_SPARSENESS: usize = SEGMENT_SLOTS / SPARSE_FACTOR;
/// Slots per entry beyond which an index is sparse.
const SPARSE_FACTOR: usize = 8;

/// Indices of entries by hash.
#[derive(Debug, Default)]
pub(super) struct EntryIndex {
    #[expect(clippy::vec_box, reason = "a vector of arrays would be one block that is replaced by a larger one")]
    segments: Vec<Box<[u32; SEGMENT_SLOTS]>>,
    length: usize,
}

impl EntryIndex {
    /// Finds the index of the entry with this hash that `is_it` accepts.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        self.find_slot(hash, is_it).map(|slot| entry_index(self.slot_value(slot)))
    }

    /// True if `more` insertions need [`EntryIndex::rebuild`] first: at most five of six slots may be occupied.
    pub(super) const fn needs_rebuild_for(&self, more: usize) -> bool {
        (self.length + more) * 6 > self.slot_count() * 5
    }

    /// Rebuilds the index from the hashes of all entries, in the order of their indices, with room for half as many
    /// more.
    pub(super) fn rebuild(&mut self, hashes: impl ExactSizeIterator<Item = u64>) {
        let segments = segments_for(hashes.len());
        self.segments.truncate(segments);
        self.segments.iter_mut().for_each(|segment| segment.fill(EMPTY_SLOT));
        self.segments.resize_with(segments, || Box::new([EMPTY_SLOT; SEGMENT_SLOTS]));
        self.length = 0;
        for (index, hash) in hashes.enumerate() {
            self.insert(hash, index);
        }
    }

    /// Adds a new entry; the index must not be full.
    pub(super) fn insert(&mut self, hash: u64, index: usize) {
        let mut slot = self.home_slot(hash);
        while self.slot_value(slot) != EMPTY_SLOT {
            slot = self.next_slot(slot);
        }
        self.set_slot(slot, pack_slot(hash, index));
        self.length += 1;
    }

    /// Changes the index of an entry from `from` to `to`.
    pub(super) fn change_entry_index(&mut self, hash: u64, from: usize, to: usize) {
        if let Some(slot) = self.find_slot(hash, |index| index == from) {
            self.set_slot(slot, pack_slot(hash, to));
        }
    }

    /// Removes an entry, and moves the ones behind it closer to their home slots, so that no probe ends early.
    pub(super) fn remove(&mut self, hash: u64, index: usize, hash_of: impl Fn(usize) -> u64) {
        let Some(mut hole) = self.find_slot(hash, |other| other == index) else { return };
        self.length -= 1;
        let mut slot = self.next_slot(hole);
        while self.slot_value(slot) != EMPTY_SLOT {
            let home = self.home_slot(hash_of(entry_index(self.slot_value(slot))));
            // An entry may move if the hole lies between its home slot and its slot.
            if self.probe_distance(home, slot) >= self.probe_distance(hole, slot) {
                self.set_slot(hole, self.slot_value(slot));
                hole = slot;
            }
            slot = self.next_slot(slot);
        }
        self.set_slot(hole, EMPTY_SLOT);
    }

    /// True if the index has many times the slots that its entries need.
    pub(super) fn is_sparse(&self) -> bool {
        self.slot_count() > SPARSE_FACTOR * self.length.max(MIN_ENTRIES_FOR_SPARSENESS)
    }

    /// Size in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.slot_count() * size_of::<u32>()
    }

    /// Additional bytes after a rebuild for `more` entries.
    pub(super) const fn growth_bytes(&self, more: usize) -> usize {
        (segments_for(self.length + more) * SEGMENT_SLOTS * size_of::<u32>()).saturating_sub(self.bytes())
    }

    fn find_slot(&self, hash: u64, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        if self.segments.is_empty() {
            return None;
        }
        let mut slot = self.home_slot(hash);
        loop {
            let found = self.slot_value(slot);
            if found == EMPTY_SLOT {
                return None;
            }
            if found >> INDEX_BITS == tag_of_hash(hash) && is_it(entry_index(found)) {
                return Some(slot);
            }
            slot = self.next_slot(slot);
        }
    }

    const fn slot_count(&self) -> usize {
        self.segments.len() * SEGMENT_SLOTS
    }

    fn slot_value(&self, slot: usize) -> u32 {
        self.segments[slot / SEGMENT_SLOTS][slot % SEGMENT_SLOTS]
    }

    fn set_slot(&mut self, slot: usize, value: u32) {
        self.segments[slot / SEGMENT_SLOTS][slot % SEGMENT_SLOTS] = value;
    }

    /// Home slot of a hash: its upper half, scaled to the number of slots.
    const fn home_slot(&self, hash: u64) -> usize {
        (((hash >> 32) * self.slot_count() as u64) >> 32) as usize
    }

    const fn next_slot(&self, slot: usize) -> usize {
        if slot + 1 == self.slot_count() { 0 } else { slot + 1 }
    }

    /// Number of slots from `from` to `to`, wrapping around.
    const fn probe_distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.slot_count() - from }
    }
}

/// Number of segments with room for half as many more entries; at least one.
const fn segments_for(entries: usize) -> usize {
    (entries + entries / 2) / SEGMENT_SLOTS + 1
}

/// Returns the tag of a hash: its lowest eight bits.
const fn tag_of_hash(hash: u64) -> u32 {
    (hash & 0xff) as u32
}

/// Packs the tag of a hash and the index of an entry into a slot.
fn pack_slot(hash: u64, index: usize) -> u32 {
    let index = u32::try_from(index).expect("a shard has at most MAX_ENTRIES");
    tag_of_hash(hash) << INDEX_BITS | index
}

/// Unpacks the index of the entry from a slot.
const fn entry_index(slot: u32) -> usize {
    (slot & ((1 << INDEX_BITS) - 1)) as usize
}
