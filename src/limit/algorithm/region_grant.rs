//! Grants as a region's counter of windows takes them, and returns of what it has not used.
//!
//! A grant answers the request that the counter has open, once: an answer that is repeated, or that comes after the
//! next request was opened, or after its window, changes nothing. Its hits are wasted, never doubled.

use super::region_window::RegionWindowCounts;
use crate::base::clock::Time;

/// Answer of the global Redis to a grant request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionGrant {
    /// Identity of the request: the time of the region's Redis at which it was opened.
    pub request: u64,
    /// Window in which the hits may be spent.
    pub window: u64,
    /// Epoch of the global counter.
    pub epoch: u64,
    /// Number of hits; 0 if none were free.
    pub hits: u64,
    /// A charge that leaves at most this many hits opens the next request.
    pub low: u64,
    /// True if the global Redis has nothing left for this window.
    pub exhausted: bool,
    /// Time of the region's Redis before which the next request is not opened.
    pub next_request_at: Time,
}

impl RegionWindowCounts {
    /// Adds the hits of a grant; false if it does not answer the open request.
    pub fn take_grant(&mut self, grant: &RegionGrant) -> bool {
        if grant.request == 0 || grant.request != self.open_request {
            return false;
        }
        // The global Redis has seen that the next window began.
        if grant.window == self.window + 1 {
            self.begin(grant.window);
        }
        if grant.window != self.window {
            return false;
        }
        if grant.epoch > self.epoch {
            (self.granted, self.granted_total, self.reserve_used, self.next_reserve_used) = (0, 0, 0, 0);
            self.epoch = grant.epoch;
        }
        self.granted += grant.hits;
        self.granted_total += grant.hits;
        (self.low, self.exhausted, self.open_request) = (grant.low, grant.exhausted, 0);
        self.next_request_at = grant.next_request_at;
        true
    }

    /// Removes the granted hits of a window that are left, and returns them; 0 in another window.
    pub fn give_back(&mut self, window: u64) -> u64 {
        if window != self.window {
            return 0;
        }
        let unused = std::mem::take(&mut self.granted);
        self.granted_total -= unused.min(self.granted_total);
        unused
    }
}
