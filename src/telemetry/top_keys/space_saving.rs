//! Space-Saving: the heaviest keys of a stream with a bounded number of counters.
//!
//! Metwally, Agrawal and El Abbadi, "Efficient computation of frequent and top-k elements in data streams", 2005: a key
//! without a counter takes over the smallest counter, whose count becomes the key's error. A count is never too low,
//! and too high by its error at most. A key without a counter has at most the smallest count, which is at most the sum
//! of all counts divided by the number of counters.
//!
//! A heap finds the smallest counter. An addition to a counter leaves the heap as it is; a count in the heap is brought
//! up to date when it is the smallest there.
//!
//! Decides: how exact the most rejected and the busiest keys are.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use hashbrown::HashTable;

use crate::base::sharded::{lower_half, upper_half};

/// Sketch of a stream of keys.
#[derive(Debug)]
pub struct SpaceSaving<T> {
    counters: Vec<LabelledCounter<T>>,
    /// Indices of counters, by the hash of their key.
    by_key: HashTable<usize>,
    /// One entry for each counter, the smallest count first.
    heap: BinaryHeap<HeapEntry>,
    max_counters: usize,
}

/// Count of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountEstimate {
    /// Upper bound of the count.
    pub count: u64,
    /// Maximum overestimate in `count`.
    pub error: u64,
    /// Number of additions since the key has its counter.
    pub additions: u64,
    /// Union of the marks of [`SpaceSaving::add_count`].
    pub marks: u64,
}

#[derive(Debug)]
struct LabelledCounter<T> {
    id: u128,
    count: CountEstimate,
    /// `None` until it is set for the first key.
    label: Option<T>,
}

/// Counter in the heap; the greatest entry is the one with the smallest count.
#[derive(Clone, Copy, Debug)]
struct HeapEntry {
    /// Count that the counter had once; at most its count.
    count: u64,
    /// Index of the counter.
    index: usize,
}

impl<T> SpaceSaving<T> {
    /// An empty sketch with room for `max_counters`, at least one.
    pub fn new(max_counters: usize) -> Self {
        let max_counters = max_counters.max(1);
        Self { counters: Vec::new(), by_key: HashTable::new(), heap: BinaryHeap::new(), max_counters }
    }

    /// Adds `count` to the key `id`, a hash, and the bits of `mark` to its marks.
    ///
    /// `set_label` is called if the key is new, with the label of the key whose counter it takes over, or `None`.
    pub fn add_count(&mut self, id: u128, count: u64, mark: u64, set_label: impl FnOnce(&mut Option<T>)) {
        let counters = &mut self.counters;
        if let Some(index) = self.by_key.find(combine_hash_halves(id), |index| counters[*index].id == id) {
            let known = &mut counters[*index].count;
            known.count += count;
            known.additions += 1;
            known.marks |= mark;
            return;
        }
        let index = if counters.len() < self.max_counters {
            let index = counters.len();
            let mut label = None;
            set_label(&mut label);
            let count_of_key = CountEstimate { count, error: 0, additions: 1, marks: mark };
            counters.push(LabelledCounter { id, count: count_of_key, label });
            self.heap.push(HeapEntry { count, index });
            index
        } else {
            let Some(index) = self.find_smallest_and_add(count) else { return };
            let counter = &mut self.counters[index];
            if let Ok(replaced) = self.by_key.find_entry(combine_hash_halves(counter.id), |other| *other == index) {
                replaced.remove();
            }
            let error = counter.count.count;
            set_label(&mut counter.label);
            counter.id = id;
            counter.count = CountEstimate { count: error + count, error, additions: 1, marks: mark };
            index
        };
        let counters = &self.counters;
        self.by_key.insert_unique(combine_hash_halves(id), index, |index| combine_hash_halves(counters[*index].id));
    }

    /// Finds the smallest counter, and adds `added` to its entry in the heap.
    fn find_smallest_and_add(&mut self, added: u64) -> Option<usize> {
        loop {
            let mut smallest = self.heap.peek_mut()?;
            let HeapEntry { count: known, index } = *smallest;
            let count = self.counters[index].count.count;
            let is_current = known == count;
            smallest.count = if is_current { count + added } else { count };
            drop::<PeekMut<'_, _>>(smallest);
            if is_current {
                return Some(index);
            }
        }
    }

    /// Iterates over all counters, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (u128, &T, CountEstimate)> {
        self.counters.iter().filter_map(|counter| Some((counter.id, counter.label.as_ref()?, counter.count)))
    }

    /// Upper bound of the count of every key without a counter.
    pub fn max_missed(&self) -> u64 {
        if self.counters.len() < self.max_counters {
            0
        } else {
            self.counters.iter().map(|counter| counter.count.count).min().unwrap_or(0)
        }
    }
}

impl Ord for HeapEntry {
    fn cmp(&self, other: &Self) -> Ordering {
        other.count.cmp(&self.count)
    }
}

impl PartialOrd for HeapEntry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for HeapEntry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for HeapEntry {}

/// Both halves of a hash, because shards are chosen by its lower half.
const fn combine_hash_halves(id: u128) -> u64 {
    upper_half(id) ^ lower_half(id)
}
