//! Leases that end: what was not used is given back to Redis, in the background.
//!
//! Each lease is noted here when it is granted, with what its return needs. A task ends those whose time is over, some
//! at a time: their returns go out together, and the next ones when these are answered, so that giving back never
//! costs Redis more than a charge at a time for each. What can not be given back in time is void, and stays charged; so
//! does what a failed call took along. Leases are bounded: while too many are out, none is asked for.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::time::sleep;

use super::coalescer::ChargeBatch;
use super::command::ChargeCommand;
use super::eventual::{EventualTable, LeaseTicket};
use super::prepared_call::PreparedCall;
use crate::algorithm::ChargeRequest;
use crate::request::Hits;

/// Leases that may be out at once.
const MOST_OUT: usize = 65_536;
/// Returns that go out together.
const TOGETHER: usize = 256;
/// How often it is looked for leases that have ended.
const OFTEN: Duration = Duration::from_millis(20);
/// The longest that a return is waited for.
const PATIENCE: Duration = Duration::from_millis(100);

/// The leases that are out.
#[derive(Debug, Default)]
pub(super) struct LeaseReaper {
    out: Mutex<BinaryHeap<OutstandingLease>>,
}

/// A lease that is out; the one that ends first is the greatest.
#[derive(Debug)]
struct OutstandingLease {
    lent: LeaseTicket,
    place: Arc<PreparedCall>,
}

impl LeaseReaper {
    /// Whether there may be more.
    pub(super) fn has_room(&self) -> bool {
        self.out().len() < MOST_OUT
    }

    /// Takes note of a lease on the counters of `place`, which is eventual.
    pub(super) fn note(&self, lent: LeaseTicket, place: Arc<PreparedCall>) {
        self.out().push(OutstandingLease { lent, place });
    }

    /// Ends leases when their time is over, for as long as it is run.
    pub(super) async fn run(&self, eventual: &EventualTable) {
        loop {
            sleep(OFTEN).await;
            while self.end_some(eventual, Some(Instant::now())).await {}
        }
    }

    /// Ends all leases at once.
    pub(super) async fn end_all(&self, eventual: &EventualTable) {
        while self.end_some(eventual, None).await {}
    }

    /// Ends some leases that are over at that time, or any; whether there were any.
    async fn end_some(&self, eventual: &EventualTable, by: Option<Instant>) -> bool {
        let over: Vec<OutstandingLease> = {
            let mut out = self.out();
            let is_over = |next: &OutstandingLease| by.is_none_or(|by| next.lent.end <= by);
            let mut over = Vec::new();
            while over.len() < TOGETHER && out.peek().is_some_and(is_over) {
                over.extend(out.pop());
            }
            over
        };
        let some = !over.is_empty();
        join_all(over.into_iter().map(|ended| ended.give_back(eventual))).await;
        some
    }

    fn out(&self) -> MutexGuard<'_, BinaryHeap<OutstandingLease>> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OutstandingLease {
    async fn give_back(self, eventual: &EventualTable) {
        let Some(lending) = &self.place.lending else { return };
        let left = eventual.collect(lending.id, self.lent.serial).saturating_sub(self.lent.less);
        let Some(until) = self.lent.until.filter(|_| left > 0) else { return };
        let refund = ChargeCommand {
            counters: lending.counters.clone(),
            request: ChargeRequest::new(Hits::Refund(left), 0),
            dry_run: false,
            void_from: Some(until),
        };
        let commands: ChargeBatch = SmallVec::from_iter([refund]);
        // If it fails they stay charged: what was charged may always go unused.
        let _lost = self.place.call(&commands, Instant::now() + PATIENCE, None).await;
    }
}

impl Ord for OutstandingLease {
    fn cmp(&self, other: &Self) -> Ordering {
        other.lent.end.cmp(&self.lent.end)
    }
}

impl PartialOrd for OutstandingLease {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for OutstandingLease {
    fn eq(&self, other: &Self) -> bool {
        self.lent.end == other.lent.end
    }
}

impl Eq for OutstandingLease {}
