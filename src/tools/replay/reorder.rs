//! Sorting of traffic that is nearly in order: an access log is written when responses end, not when requests begin.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::recorded::RecordedRequest;
use crate::base::clock::Time;

/// Requests that wait to be sorted.
const MAX_WAITING: usize = 1 << 16;

/// Sorts requests by time, as far as [`MAX_WAITING`] requests reach.
#[derive(Debug, Default)]
pub(super) struct ReorderBuffer {
    waiting: BinaryHeap<WaitingRequest>,
    added: u64,
    last: Time,
    /// Requests that came too late to be sorted.
    pub(super) late: u64,
}

#[derive(Debug)]
struct WaitingRequest {
    order: (Time, u64),
    request: RecordedRequest,
}

impl ReorderBuffer {
    /// Adds a request. Returns the earliest one if the buffer is full.
    pub(super) fn push(&mut self, mut request: RecordedRequest) -> Option<RecordedRequest> {
        self.added += 1;
        if request.arrival < self.last {
            self.late += 1;
            request.arrival = self.last;
        }
        self.waiting.push(WaitingRequest { order: (request.arrival, self.added), request });
        if self.waiting.len() > MAX_WAITING { self.pop() } else { None }
    }

    /// Returns the earliest request.
    pub(super) fn pop(&mut self) -> Option<RecordedRequest> {
        let request = self.waiting.pop()?.request;
        self.last = request.arrival;
        Some(request)
    }
}

/// The earliest request is the greatest, because a heap returns the greatest.
impl Ord for WaitingRequest {
    fn cmp(&self, other: &Self) -> Ordering {
        other.order.cmp(&self.order)
    }
}

impl PartialOrd for WaitingRequest {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for WaitingRequest {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for WaitingRequest {}
