//! Grants as a region's bucket takes them.
//!
//! A grant answers the request that the counter has open, once: a repeated answer, or one after the next request was
//! opened, changes nothing. The global Redis holds what it granted back until the term ends, so nothing is doubled.

use super::region_bucket::{RegionBucket, State};
use crate::base::clock::Time;
use crate::limit::Limit;

/// Answer of the global Redis to a grant request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionTerm {
    /// Identity of the request: the time of the region's Redis at which it was opened.
    pub request: u64,
    /// Epoch of the global counter.
    pub epoch: u64,
    /// Tokens per period, beside the region's own.
    pub rate: u32,
    /// Tokens that the bucket holds, beside the region's own.
    pub capacity: u32,
    /// Time of the global Redis at which the grant was made.
    pub start: Time,
    /// Time of the global Redis at which the grant ends.
    pub end: Time,
    /// True if the global Redis had less than was wanted.
    pub exhausted: bool,
    /// Time of the region's Redis before which the next request is not opened.
    pub next_request_at: Time,
}

impl State {
    /// Replaces the grant by another one, after the refill under the one before up to its start; false if it does not
    /// answer the open request.
    pub fn take_term(&mut self, limit: &Limit, now: Time, term: &RegionTerm) -> bool {
        if term.request == 0 || term.request != self.counts.open_request {
            return false;
        }
        let mut bucket = RegionBucket::after(limit, self, now, term.start);
        let counts = &mut bucket.counts;
        (counts.rate, counts.capacity, counts.term_end) = (term.rate.into(), term.capacity.into(), term.end);
        (counts.spent, counts.requested, counts.requested_since) = (0, 0, now);
        (counts.exhausted, counts.open_request) = (term.exhausted, 0);
        counts.next_request_at = term.next_request_at;
        if term.epoch > counts.epoch {
            counts.epoch = term.epoch;
            bucket.fill();
        }
        bucket.store(self);
        true
    }
}
