//! Space-Saving: the heaviest keys of a stream with a bounded number of counters.
//!
//! Metwally, Agrawal and El Abbadi, "Efficient computation of frequent and top-k elements in data streams", 2005: a key
//! without a counter takes over the smallest counter, whose count becomes the key's error. A count is never too low,
//! and too high by its error at most. A key without a counter has at most the smallest count, which is at most the sum
//! of all counts divided by the number of counters.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::hash::{BuildHasherDefault, Hash, Hasher};

use priority_queue::PriorityQueue;

use crate::identity_hasher::IdentityHasher;

/// Sketch of a stream of keys.
#[derive(Debug)]
pub struct SpaceSaving<T> {
    counters: PriorityQueue<LabelledKey<T>, KeyCount, BuildHasherDefault<IdentityHasher>>,
    max_counters: usize,
}

/// Count of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyCount {
    /// Upper bound of the count.
    pub count: u64,
    /// Maximum overestimate in `count`.
    pub error: u64,
    /// Union of the marks of [`SpaceSaving::add`].
    pub marks: u64,
}

/// Orders the smallest count first.
impl Ord for KeyCount {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.count, other.error, other.marks).cmp(&(self.count, self.error, self.marks))
    }
}

impl PartialOrd for KeyCount {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Hash of a key and its label. Equality and hash use the first only.
#[derive(Debug)]
struct LabelledKey<T> {
    id: u128,
    label: T,
}

impl<T> PartialEq for LabelledKey<T> {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl<T> Eq for LabelledKey<T> {}

impl<T> Hash for LabelledKey<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

impl<T> Borrow<u128> for LabelledKey<T> {
    fn borrow(&self) -> &u128 {
        &self.id
    }
}

impl<T> SpaceSaving<T> {
    /// An empty sketch with room for `max_counters`, at least one.
    pub fn new(max_counters: usize) -> Self {
        Self { counters: PriorityQueue::with_default_hasher(), max_counters: max_counters.max(1) }
    }

    /// Adds `count` to the key `id`, a hash, and the bits of `mark` to its marks. `label` is called if the key is new.
    pub fn add(&mut self, id: u128, count: u64, mark: u64, label: impl FnOnce() -> T) {
        let is_known = self.counters.change_priority_by(&id, |counter| {
            counter.count += count;
            counter.marks |= mark;
        });
        if is_known {
            return;
        }
        let error = match self.counters.len() < self.max_counters {
            true => 0,
            false => self.counters.pop().map_or(0, |(_, smallest)| smallest.count),
        };
        self.counters.push(LabelledKey { id, label: label() }, KeyCount { count: error + count, error, marks: mark });
    }

    /// Iterates over all counters, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (u128, &T, KeyCount)> {
        self.counters.iter().map(|(key, count)| (key.id, &key.label, *count))
    }

    /// Upper bound of the count of every key without a counter.
    pub fn max_missed(&self) -> u64 {
        if self.counters.len() < self.max_counters {
            0
        } else {
            self.counters.peek().map_or(0, |(_, least)| least.count)
        }
    }
}
