//! A replica in the simulation: its local budget, and for each key the call in flight.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tollkeeper::clock::Time;
use tollkeeper::store::redis::command::{ChargeCommand, OwnedCounter};
use tollkeeper::store::redis::eventual::budget::LocalBudget;
use tollkeeper::store::redis::eventual::counters::{DescriptorId, EventualCounters};
use tollkeeper::store::redis::eventual::lease::LeaseTicket;
use tollkeeper::store::redis::eventual::table::EventualTable;

use super::scenario::slots;

/// A process.
#[derive(Debug)]
pub(super) struct Replica {
    /// Processes that came one after the other in its place.
    pub(super) life: u32,
    pub(super) alive: bool,
    pub(super) slots: u32,
    /// Its monotonic clock when the run began.
    pub(super) base: Instant,
    /// Offset of its wall clock, in microseconds.
    pub(super) ahead: i64,
    pub(super) eventual: EventualTable,
    pub(super) lendings: Vec<EventualCounters>,
    pub(super) keys: Vec<Queue>,
    pub(super) hold: Option<Hold>,
    /// Leases that are out.
    pub(super) out: Vec<(usize, LeaseTicket)>,
}

/// The charges on one key.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// The call that is in flight.
    pub(super) call: Option<u64>,
    /// Those that wait, and until when.
    pub(super) waiting: VecDeque<(ChargeCommand, u64)>,
}

/// A slot that is claimed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    /// Time at which the claim was sent.
    pub(super) sent: Instant,
    /// End of the previous claim, by the clock of Redis.
    pub(super) before: Time,
    /// The time that Redis told, and when that came.
    pub(super) told: (Time, Instant),
}

impl Replica {
    pub(super) fn new(base: Instant, bytes: usize, keys: usize) -> Self {
        Self {
            life: 0,
            alive: false,
            slots: 1,
            base,
            ahead: 0,
            eventual: EventualTable::new(bytes),
            lendings: Vec::new(),
            keys: (0..keys).map(|_| Queue::default()).collect(),
            hold: None,
            out: Vec::new(),
        }
    }

    /// A new process, that knows nothing.
    pub(super) fn begin(&mut self, descriptors: &[SmallVec<[OwnedCounter; 1]>], count: u32, bytes: usize) {
        self.life += 1;
        (self.alive, self.slots, self.hold) = (true, count, None);
        self.eventual = EventualTable::new(bytes);
        self.out.clear();
        let lend = |(path, counters): (u128, &SmallVec<[OwnedCounter; 1]>)| EventualCounters {
            // All in one part of the table.
            id: DescriptorId { path: path + 1, tags: 7 },
            budget: LocalBudget::of(counters, slots(count)).unwrap(),
            counters: counters.clone(),
        };
        self.lendings = (0..).zip(descriptors).map(lend).collect();
        self.keys = descriptors.iter().map(|_| Queue::default()).collect();
    }

    /// Its share of a limit may be used while the slot is surely its own, from a period after the claim before on.
    pub(super) fn may_share(&self, key: usize, at: Instant, claim: u64) -> bool {
        let Some(Hold { sent, before, told: (told, came) }) = self.hold else { return false };
        let now = told.plus_us(u64::try_from(at.duration_since(came).as_micros()).unwrap());
        let from = before.plus_us(self.lendings[key].budget.period_us);
        at < sent + Duration::from_micros(claim) && (before == Time::default() || now >= from)
    }
}
