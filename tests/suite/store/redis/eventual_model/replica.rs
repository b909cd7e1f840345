//! A replica in the simulation: its local budget, and for each key the call in flight.

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::local_budget::LocalBudget;
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::redis::eventual::LeaseTicket;
use tollkeeper::store::redis::eventual::descriptor::{DescriptorId, EventualDescriptor};
use tollkeeper::store::redis::eventual::table::EventualTable;

use super::scenario::{Plan, places};

/// Process of a replica.
#[derive(Debug)]
pub(super) struct Replica {
    /// Number of processes that this replica has had.
    pub(super) life: u32,
    pub(super) alive: bool,
    pub(super) places: u32,
    /// Its monotonic clock at the start of the run.
    pub(super) base: Instant,
    /// Offset of its wall clock, in microseconds.
    pub(super) ahead: i64,
    pub(super) eventual: EventualTable,
    pub(super) descriptors: Vec<EventualDescriptor>,
    /// Descriptors with the limits that a reload replaces or brings.
    pub(super) others: Vec<EventualDescriptor>,
    pub(super) keys: Vec<Queue>,
    pub(super) place_claim: Option<PlaceClaim>,
    /// Outstanding leases.
    pub(super) out: Vec<(usize, LeaseTicket)>,
}

/// Charges on one key.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Call in flight.
    pub(super) call: Option<u64>,
    /// Waiting charges and their deadlines.
    pub(super) waiting: VecDeque<(OwnedCharge, u64)>,
}

/// Claimed place.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlaceClaim {
    /// Time at which the claim was sent.
    pub(super) sent: Instant,
    /// End of the previous claim, by the clock of Redis.
    pub(super) before: Time,
    /// Time of Redis in the reply, and when the reply arrived.
    pub(super) reply_time: (Time, Instant),
}

impl Replica {
    pub(super) fn new(base: Instant, bytes: usize, keys: usize) -> Self {
        Self {
            life: 0,
            alive: false,
            places: 1,
            base,
            ahead: 0,
            eventual: EventualTable::new(bytes),
            descriptors: Vec::new(),
            others: Vec::new(),
            keys: (0..keys).map(|_| Queue::default()).collect(),
            place_claim: None,
            out: Vec::new(),
        }
    }

    /// Starts a new process without any state.
    pub(super) fn begin(&mut self, plan: &Plan, count: u32) {
        self.life += 1;
        (self.alive, self.places, self.place_claim) = (true, count, None);
        self.eventual = EventualTable::new(plan.bytes);
        self.out.clear();
        let lend = |(path, counters): (u128, &SmallVec<[OwnedCounter; 1]>)| EventualDescriptor {
            // All in one shard of the table.
            id: DescriptorId::new(path + 1, counters),
            budget: LocalBudget::for_limits(counters.iter().map(|counter| &counter.limit), places(count)).unwrap(),
            counters: counters.clone(),
        };
        self.descriptors = (0..).zip(&plan.keys).map(lend).collect();
        self.others = (0..).zip(&plan.changed_keys).map(lend).collect();
        self.keys = plan.keys.iter().map(|_| Queue::default()).collect();
    }

    /// Returns true if a share may be used: the place is certainly its own, and one period has passed since the previous
    /// claim.
    pub(super) fn may_use_share(&self, key: usize, at: Instant, claim: u64) -> bool {
        let Some(PlaceClaim { sent, before, reply_time: (reply_time, came) }) = self.place_claim else { return false };
        let now = reply_time.plus_us(u64::try_from(at.duration_since(came).as_micros()).unwrap());
        let from = before.plus_us(self.descriptors[key].budget.period_us);
        at < sent + Duration::from_micros(claim) && (before == Time::default() || now >= from)
    }
}
