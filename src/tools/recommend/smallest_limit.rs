//! Search for the smallest limit that rejects nothing of a key, by replay through the algorithm.
//!
//! Bisection is exact. If a limit admits all charges of a counter, a larger one does too: until the first rejection,
//! the window algorithms hold the same state under both; a bucket or queue drains at least as fast under the larger
//! limit, so its level is never higher, refunds included, and its capacity is never smaller. `count_rejected` plays
//! no part, because nothing is rejected. So the share of keys with a rejection never grows with the limit.

use std::num::NonZero;
use std::thread;

use super::demand::{ChargeSequence, LimitDemand};
use crate::limit::Limit;
use crate::limit::algorithm::state::State;
use crate::limit::charge::ChargeRequest;

/// Smallest limit (`requests_per_unit` or capacity) of each key that rejects nothing of it, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SmallestLimitByKey(Vec<u64>);

/// Number of a key that every limit rejects.
const ADMITTED_BY_NO_LIMIT: u64 = u64::MAX;

/// Range of a search, and the first number to try.
#[derive(Clone, Copy, Debug)]
pub struct SearchRange {
    /// Number that is tried first.
    pub first: u32,
    /// Largest number.
    pub max: u32,
}

/// Returns true if the limit admits every charge of the sequence.
pub fn admits_all(limit: &Limit, sequence: &ChargeSequence) -> bool {
    let mut state = State::empty(limit.algorithm());
    let mut requests =
        sequence.charges.iter().map(|charge| (charge.at, ChargeRequest::new(charge.hits, charge.max_delay_us)));
    requests.all(|(at, request)| state.charge(limit, at, request).admitted)
}

/// Returns the smallest number whose limit admits every charge of the sequence; `None` if there is none.
///
/// `limit_of` returns the limit of a number, and `None` for numbers that are too large.
pub fn find_smallest_admitting_all(
    sequence: &ChargeSequence,
    range: SearchRange,
    limit_of: impl Fn(u32) -> Option<Limit>,
) -> Option<u32> {
    let admits = |number: u32| limit_of(number).is_some_and(|limit| admits_all(&limit, sequence));
    if admits(0) {
        return Some(0);
    }
    let (mut low, mut high) = (0, range.first.min(range.max).max(1));
    let mut below = 1;
    if admits(high) {
        // The first number is often the smallest: look right below it, then twice as far.
        while high - low > 1 {
            let next = high.saturating_sub(below).max(low + 1);
            if !admits(next) {
                low = next;
                break;
            }
            high = next;
            below = u32::saturating_mul(below, 2);
        }
    } else {
        while !admits(high) {
            if high >= range.max {
                return None;
            }
            (low, high) = (high, high.saturating_mul(2).min(range.max));
        }
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if admits(middle) { high = middle } else { low = middle }
    }
    Some(high)
}

/// Finds the smallest number for each key, on all processors.
///
/// `first` are the numbers to try first, one for each sequence.
pub fn find_smallest_limit_admitting_each_key(
    demand: &LimitDemand,
    first: &[u32],
    max: u32,
    limit_of: impl Fn(u32) -> Option<Limit> + Sync,
) -> SmallestLimitByKey {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let part = demand.sequences.len().div_ceil(threads).max(1);
    let limit_of = &limit_of;
    let search = move |sequences: &[ChargeSequence], first: &[u32]| -> Vec<u64> {
        let one = |(sequence, first): (&ChargeSequence, &u32)| {
            find_smallest_admitting_all(sequence, SearchRange { first: *first, max }, limit_of)
                .map_or(ADMITTED_BY_NO_LIMIT, u64::from)
        };
        sequences.iter().zip(first).map(one).collect()
    };
    let found: Vec<u64> = thread::scope(|scope| {
        let parts = demand.sequences.chunks(part).zip(first.chunks(part));
        let handles: Vec<_> = parts.map(|(sequences, first)| scope.spawn(move || search(sequences, first))).collect();
        // A thread that panicked has printed why; its keys then count as never admitted.
        let results = handles.into_iter().zip(demand.sequences.chunks(part));
        results
            .flat_map(|(handle, part)| handle.join().unwrap_or_else(|_| vec![ADMITTED_BY_NO_LIMIT; part.len()]))
            .collect()
    });
    let mut by_key = vec![0; demand.keys];
    for (sequence, number) in demand.sequences.iter().zip(found) {
        by_key[sequence.key] = number.max(by_key[sequence.key]);
    }
    by_key.sort_unstable();
    SmallestLimitByKey(by_key)
}

impl SmallestLimitByKey {
    /// Number of keys that a limit of `number` rejects at least once.
    pub fn count_rejected_keys(&self, number: u32) -> u64 {
        (self.0.len() - self.0.partition_point(|smallest| *smallest <= u64::from(number))) as u64
    }

    /// Returns the smallest number that rejects at most `allowed` keys; `None` if there is none.
    pub fn find_smallest_rejecting_at_most_keys(&self, allowed: u64) -> Option<u32> {
        let allowed = usize::try_from(allowed).unwrap_or(usize::MAX);
        match self.0.len().checked_sub(allowed).filter(|kept| *kept > 0) {
            Some(kept) => u32::try_from(self.0[kept - 1]).ok(),
            None => Some(0),
        }
    }

    /// The numbers of all keys that have one, ascending.
    pub fn smallest_numbers(&self) -> impl DoubleEndedIterator<Item = u32> {
        self.0.iter().filter_map(|number| u32::try_from(*number).ok())
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True without keys.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
