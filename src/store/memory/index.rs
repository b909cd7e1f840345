//! Finds entries by key: 32 bits a slot, about 5.3 bytes an entry, and it grows by a quarter instead of doubling.
//!
//! Open addressing with linear probing. A slot holds the place of an entry and eight bits of its hash, so that a probe
//! reads the entry only where those agree. Library tables were measured: they double, so that at the wrong size an
//! entry costs twice as much, and a byte more a slot. A rebuild reads the hashes from the entries, one after the other.

/// A slot without an entry.
const EMPTY: u32 = u32::MAX;
/// Bits of a slot that are the place; the rest is the tag.
const INDEX_BITS: u32 = 24;
/// Most entries that an index finds.
pub(super) const MAX_ENTRIES: usize = (1 << INDEX_BITS) - 1;
/// Fewest slots, once there are any.
const MIN_SLOTS: usize = 16;

/// Places by hash.
#[derive(Debug, Default)]
pub(super) struct Index {
    slots: Vec<u32>,
    length: usize,
}

impl Index {
    /// The place of the entry of this hash that `is_it` recognises.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        self.slot_of(hash, is_it).map(|slot| index_of(self.slots[slot]))
    }

    /// Whether [`Index::rebuild`] must come before the next insertion: at most five slots of six are taken.
    pub(super) const fn is_full(&self, more: usize) -> bool {
        (self.length + more) * 6 > self.slots.len() * 5
    }

    /// Makes room for one entry in two beyond those whose hashes are given, in the order of their indices.
    pub(super) fn rebuild(&mut self, hashes: impl ExactSizeIterator<Item = u64>) {
        // What is dropped first need not be held beside what comes.
        self.slots = Vec::new();
        self.slots = vec![EMPTY; slots_for(hashes.len())];
        self.length = 0;
        for (place, hash) in hashes.enumerate() {
            self.insert(hash, place);
        }
    }

    /// Adds an entry that is not there; the index must not be full.
    pub(super) fn insert(&mut self, hash: u64, place: usize) {
        let mut slot = self.home(hash);
        while self.slots[slot] != EMPTY {
            slot = self.after(slot);
        }
        self.slots[slot] = filled(hash, place);
        self.length += 1;
    }

    /// Notes that the entry at `from` stands at `to` from now on.
    pub(super) fn relocate(&mut self, hash: u64, from: usize, to: usize) {
        if let Some(slot) = self.slot_of(hash, |place| place == from) {
            self.slots[slot] = filled(hash, to);
        }
    }

    /// Removes the entry at `place`, and moves those behind it nearer to their homes, so that no probe ends too soon.
    pub(super) fn remove(&mut self, hash: u64, place: usize, hash_of: impl Fn(usize) -> u64) {
        let Some(mut hole) = self.slot_of(hash, |other| other == place) else { return };
        self.length -= 1;
        let mut slot = self.after(hole);
        while self.slots[slot] != EMPTY {
            let home = self.home(hash_of(index_of(self.slots[slot])));
            // It may move if the hole lies on its way from home.
            if self.distance(home, slot) >= self.distance(hole, slot) {
                self.slots[hole] = self.slots[slot];
                hole = slot;
            }
            slot = self.after(slot);
        }
        self.slots[hole] = EMPTY;
    }

    /// Whether it has many times the slots that it needs.
    pub(super) fn is_sparse(&self) -> bool {
        self.slots.len() > 8 * self.length.max(MIN_SLOTS)
    }

    /// What it takes.
    pub(super) const fn bytes(&self) -> usize {
        self.slots.len() * size_of::<u32>()
    }

    /// What it takes more once it was rebuilt for so many entries more.
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

    /// Where the search for a hash begins: its upper half, scaled to the slots.
    const fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.slots.len() as u64) >> 32) as usize
    }

    const fn after(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.len() { 0 } else { slot + 1 }
    }

    /// Slots from `from` on to `to`, round the end.
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

fn filled(hash: u64, place: usize) -> u32 {
    let place = u32::try_from(place).expect("a shard has at most MAX_ENTRIES");
    tag(hash) << INDEX_BITS | place
}

const fn index_of(slot: u32) -> usize {
    (slot & ((1 << INDEX_BITS) - 1)) as usize
}
