//! Ends leases whose life is over, and returns their unused hits to Redis in the background.
//!
//! Each lease is added when it is granted, with the call that its return needs. A task ends expired leases in groups:
//! the returns of a group are sent together, and the next group is sent after their replies. Hits that cannot be
//! returned in time, or whose return fails, stay charged. The number of outstanding leases is bounded; no more are
//! requested above it.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use smallvec::smallvec;
use tokio::time::sleep;

use super::table::EventualTable;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::charge::ChargeRequest;
use crate::limit::request::Hits;
use crate::store::charge::{ChargeBatch, OwnedCharge};
use crate::store::over_limit_cache::OverLimitCache;
use crate::store::redis::eventual::LeaseTicket;
use crate::store::redis::lease_arguments::{LeaseArguments, LeasePurpose, OwnLease};
use crate::store::redis::prepared_call::PreparedCall;

/// Upper bound on outstanding leases.
const MAX_OUTSTANDING_LEASES: usize = 65_536;
/// Upper bound on the returns that are sent together.
const MAX_RETURNS_PER_BATCH: usize = 256;
/// Time between two searches for expired leases.
const SEARCH_INTERVAL: Duration = Duration::from_millis(20);
/// Upper bound on the wait for a return.
const RETURN_TIMEOUT: Duration = Duration::from_millis(100);

/// Outstanding leases, whose unused hits are returned when they end.
#[derive(Debug, Default)]
pub(super) struct LeaseReaper {
    outstanding: Mutex<BinaryHeap<OutstandingLease>>,
}

/// Lease that has not ended; the one that ends first is the greatest.
#[derive(Debug)]
struct OutstandingLease {
    ticket: LeaseTicket,
    call: Arc<PreparedCall>,
}

impl LeaseReaper {
    /// Returns true if another lease may be requested.
    pub(super) fn has_room(&self) -> bool {
        self.lock_outstanding().len() < MAX_OUTSTANDING_LEASES
    }

    /// Adds a lease that `call` charged.
    pub(super) fn add_lease(&self, ticket: LeaseTicket, call: Arc<PreparedCall>) {
        self.lock_outstanding().push(OutstandingLease { ticket, call });
    }

    /// Ends leases when their life is over; runs until it is dropped.
    pub(super) async fn end_due_leases(&self, table: &EventualTable, rejections: &OverLimitCache) {
        loop {
            sleep(SEARCH_INTERVAL).await;
            while self.end_lease_batch(table, rejections, Some(Instant::now())).await {}
        }
    }

    /// Ends all leases now.
    pub(super) async fn end_all(&self, table: &EventualTable, rejections: &OverLimitCache) {
        while self.end_lease_batch(table, rejections, None).await {}
    }

    /// Ends up to [`MAX_RETURNS_PER_BATCH`] leases that are over at `by`, any leases if it is `None`; returns true if
    /// there were any.
    async fn end_lease_batch(&self, table: &EventualTable, rejections: &OverLimitCache, by: Option<Instant>) -> bool {
        let ended: Vec<OutstandingLease> = {
            let mut outstanding = self.lock_outstanding();
            let is_over = |lease: &OutstandingLease| by.is_none_or(|by| lease.ticket.end <= by);
            let mut ended = Vec::new();
            while ended.len() < MAX_RETURNS_PER_BATCH && outstanding.peek().is_some_and(is_over) {
                ended.extend(outstanding.pop());
            }
            ended
        };
        let had_some = !ended.is_empty();
        join_all(ended.into_iter().map(|lease| lease.end_lease(table, rejections))).await;
        had_some
    }

    fn lock_outstanding(&self) -> MutexGuard<'_, BinaryHeap<OutstandingLease>> {
        lock_ignoring_poison(&self.outstanding)
    }
}

impl OutstandingLease {
    /// Ends the lease and returns its unused hits; a cached rejection of its counters is out of date then.
    async fn end_lease(self, table: &EventualTable, rejections: &OverLimitCache) {
        let Some(descriptor) = &self.call.eventual else { return };
        let unused = table.end_lease(descriptor.id, self.ticket.serial).saturating_sub(self.ticket.refilled);
        let Some(void_from) = self.ticket.void_from.filter(|_| unused > 0) else { return };
        let refund = OwnedCharge {
            void_from: Some(void_from),
            ..OwnedCharge::new(descriptor.counters.clone(), ChargeRequest::new(Hits::Refund(unused), 0))
        };
        let charges: ChargeBatch = smallvec![refund];
        let own = smallvec![OwnLease { lease: self.ticket.recorded, done: self.ticket.recorded.hits }];
        let leases = LeaseArguments { purpose: LeasePurpose::Return, own };
        // If it fails, the hits stay charged, which is safe.
        let _failed = self.call.send_charges(&charges, Some(&leases), Instant::now() + RETURN_TIMEOUT, None).await;
        rejections.remove(self.call.id.counters);
    }
}

impl Ord for OutstandingLease {
    fn cmp(&self, other: &Self) -> Ordering {
        other.ticket.end.cmp(&self.ticket.end)
    }
}

impl PartialOrd for OutstandingLease {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for OutstandingLease {
    fn eq(&self, other: &Self) -> bool {
        self.ticket.end == other.ticket.end
    }
}

impl Eq for OutstandingLease {}
