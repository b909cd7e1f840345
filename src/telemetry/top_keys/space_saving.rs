//! The heaviest of a stream of keys, by a bounded number of counters.
//!
//! Space-Saving (Metwally, Agrawal and El Abbadi, "Efficient computation of frequent and top-k elements in data
//! streams", 2005): a key without a counter takes over the smallest one, and what that had counted becomes the new
//! key's error. So a count is never too low, and too high by its error at most; and a key that has no counter came no
//! more often than the smallest counter says, which is at most the sum of all divided by the number of counters.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

use priority_queue::PriorityQueue;

/// The counters.
#[derive(Debug)]
pub struct SpaceSaving<T> {
    counters: PriorityQueue<Key<T>, Counter>,
    most: usize,
}

/// What is counted of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// How much, never too little.
    pub count: u64,
    /// By how much `count` may be too high.
    pub error: u64,
    /// A mark for each part of the time in which the key came: see [`SpaceSaving::note`].
    pub marks: u64,
}

/// The smallest count first.
impl Ord for Counter {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.count, other.error, other.marks).cmp(&(self.count, self.error, self.marks))
    }
}

impl PartialOrd for Counter {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A key by its hash, and what it is.
#[derive(Debug)]
struct Key<T> {
    id: u128,
    label: T,
}

impl<T> PartialEq for Key<T> {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl<T> Eq for Key<T> {}

impl<T> Hash for Key<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

impl<T> Borrow<u128> for Key<T> {
    fn borrow(&self) -> &u128 {
        &self.id
    }
}

impl<T> SpaceSaving<T> {
    /// No counters yet, and at most so many, at least one.
    pub fn new(most: usize) -> Self {
        Self { counters: PriorityQueue::new(), most: most.max(1) }
    }

    /// Counts `by` for the key `id`, and sets its mark; `what` it is is asked only if it has no counter yet.
    pub fn note(&mut self, id: u128, (by, mark): (u64, u64), label: impl FnOnce() -> T) {
        let known = self.counters.change_priority_by(&id, |counter| {
            counter.count += by;
            counter.marks |= mark;
        });
        if known {
            return;
        }
        let error = match self.counters.len() < self.most {
            true => 0,
            false => self.counters.pop().map_or(0, |(_, counter)| counter.count),
        };
        self.counters.push(Key { id, label: label() }, Counter { count: error + by, error, marks: mark });
    }

    /// All counters, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (u128, &T, Counter)> {
        self.counters.iter().map(|(key, counter)| (key.id, &key.label, *counter))
    }

    /// The most that a key without a counter can have come to.
    pub fn most_missed(&self) -> u64 {
        if self.counters.len() < self.most { 0 } else { self.counters.peek().map_or(0, |(_, counter)| counter.count) }
    }
}
