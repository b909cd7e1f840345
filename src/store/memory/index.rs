//! Hash index of entries: 32 bits per slot, about 5.3 bytes per entry; it grows by a quarter instead of doubling.
//!
//! Open addressing with linear probing. A slot has the index of an entry and eight bits of its hash, so that a probe
//! reads the entry only if those bits agree. Library tables double, so that an entry costs up to twice as much, and
//! they need one byte more per slot. A rebuild reads the hashes from the entries in order.

/// A slot without an entry.
const EMPTY: u32 = u32::MAX;
/// Bits of a slot for the entry's index; the rest is the tag.
const INDEX_BITS: u32 = 24;
/// Maximum number of entries in an index.
pub(super) const MAX_ENTRIES: usize = (1 << INDEX_BITS) - 1;
/// Minimum number of slots, once there are any.
const MIN_SLOTS: usize = 16;

/// Indices of entries by hash.
#[derive(Debug, Default)]
pub(super) struct Index {
    slots: Vec<u32>,
    length: usize,
}

impl Index {
    /// Finds the index of the entry with this hash that `is_it` accepts.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        self.slot_of(hash, is_it).map(|slot| index_of(self.slots[slot]))
    }

    /// True if `more` insertions need [`Index::rebuild`] first: at most five of six slots may be occupied.
    pub(super) const fn is_full(&self, more: usize) -> bool {
        (self.length + more) * 6 > self.slots.len() * 5
    }

    /// Rebuilds the index from the hashes of all entries, in the order of their indices, with room for half as many
    /// more.
    pub(super) fn rebuild(&mut self, hashes: impl ExactSizeIterator<Item = u64>) {
        // Free the old slots before the new ones are allocated.
        self.slots = Vec::new();
        self.slots = vec![EMPTY; slots_for(hashes.len())];
        self.length = 0;
        for (index, hash) in hashes.enumerate() {
            self.insert(hash, index);
        }
    }

    /// Adds a new entry; the index must not be full.
    pub(super) fn insert(&mut self, hash: u64, index: usize) {
        let mut slot = self.home(hash);
        while self.slots[slot] != EMPTY {
            slot = self.after(slot);
        }
        self.slots[slot] = filled(hash, index);
        self.length += 1;
    }

    /// Changes the index of an entry from `from` to `to`.
    pub(super) fn relocate(&mut self, hash: u64, from: usize, to: usize) {
        if let Some(slot) = self.slot_of(hash, |index| index == from) {
            self.slots[slot] = filled(hash, to);
        }
    }

    /// Removes an entry, and moves the ones behind it closer to their home slots, so that no probe ends early.
    pub(super) fn remove(&mut self, hash: u64, index: usize, hash_of: impl Fn(usize) -> u64) {
        let Some(mut hole) = self.slot_of(hash, |other| other == index) else { return };
        self.length -= 1;
        let mut slot = self.after(hole);
        while self.slots[slot] != EMPTY {
            let home = self.home(hash_of(index_of(self.slots[slot])));
            // An entry may move if the hole lies between its home slot and its slot.
            if self.distance(home, slot) >= self.distance(hole, slot) {
                self.slots[hole] = self.slots[slot];
                hole = slot;
            }
            slot = self.after(slot);
        }
        self.slots[hole] = EMPTY;
    }

    /// True if it has many times the slots that it needs.
    pub(super) fn is_sparse(&self) -> bool {
        self.slots.len() > 8 * self.length.max(MIN_SLOTS)
    }

    /// Size in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.slots.len() * size_of::<u32>()
    }

    /// Additional bytes after a rebuild for `more` entries.
    pub(super) const fn growth_bytes(&self, more: usize) -> usize {
        (slots_for(self.length + more) * size_of::<u32>()).saturating_sub(self.bytes())
    }

    fn slot_of(&self, hash: u64, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let mut slot = self.home(hash);
        while self.slots[slot] != EMPTY {
            if self.slots[slot] >> INDEX_BITS == tag(hash) && is_it(index_of(self.slots[slot])) {
                return Some(slot);
            }
            slot = self.after(slot);
        }
        None
    }

    /// Home slot of a hash: its upper half, scaled to the number of slots.
    const fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.slots.len() as u64) >> 32) as usize
    }

    const fn after(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.len() { 0 } else { slot + 1 }
    }

    /// Number of slots from `from` to `to`, wrapping around.
    const fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.slots.len() - from }
    }
}

const fn slots_for(entries: usize) -> usize {
    let slots = entries + entries / 2;
    if slots < MIN_SLOTS { MIN_SLOTS } else { slots }
}

const fn tag(hash: u64) -> u32 {
    (hash & 0xff) as u32
}

fn filled(hash: u64, index: usize) -> u32 {
    let index = u32::try_from(index).expect("a shard has at most MAX_ENTRIES");
    tag(hash) << INDEX_BITS | index
}

const fn index_of(slot: u32) -> usize {
    (slot & ((1 << INDEX_BITS) - 1)) as usize
}
