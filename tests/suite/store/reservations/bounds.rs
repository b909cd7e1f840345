//! What the memory store keeps of reservations: how many, in how much memory, and for how long.

use std::time::Duration;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::Limit;
use tollkeeper::limit::charge::ChargeResult;
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::reservation::{MAX_RESERVATIONS, UnsettledPolicy};
use tollkeeper::limit::slot::{HolderId, SlotAction, SlotChange, SlotId, SlotToken, SlotUse};
use tollkeeper::limit::slot_table::SlotSummary;
use tollkeeper::store::memory::MemoryStore;

use super::steps::{Kind, SETTLE_WITHIN_S, Step, charge_of, reserving_limit};

/// Envoy of the streams, unless a test names another.
const ENVOY: HolderId = HolderId(1);

/// A counter with reservations in a store of its own.
struct OneCounter {
    store: MemoryStore,
    limits: [Limit; 1],
    now: Time,
}

impl OneCounter {
    /// A limit of a month, in the middle of one.
    fn new(store_bytes: u64, requests: u32, unsettled: UnsettledPolicy) -> Self {
        Self::of_kind(Kind::Months, store_bytes, requests, unsettled)
    }

    fn of_kind(kind: Kind, store_bytes: u64, requests: u32, unsettled: UnsettledPolicy) -> Self {
        let limits = [reserving_limit(kind, requests, unsettled, None)];
        Self { store: MemoryStore::new(store_bytes), limits, now: Time::from_secs(1_800_000_000) }
    }

    fn send(&self, stream: u32, holder: HolderId, action: SlotAction, hits: Hits) -> ChargeResult {
        // Ids are hashes.
        let id = SlotId(u128::from(stream + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835));
        let slot = SlotUse { id, token: SlotToken(stream.into()), holder, action };
        let step = Step { slot, hits, limit: 0, now: self.now };
        let entries = [Entry { key: b"k", value: b"v" }];
        let charge = charge_of(&step, &self.limits, &entries);
        self.store.charge(&charge, self.now).unwrap_or_else(|_| panic!("no room for the counter"))[0]
    }

    fn reserve(&self, stream: u32, hits: u64) -> ChargeResult {
        self.send(stream, ENVOY, SlotAction::Acquire, Hits::Charge(hits))
    }

    fn settle(&self, stream: u32, cost: u64) -> ChargeResult {
        self.send(stream, ENVOY, SlotAction::Release, Hits::Refund(cost))
    }

    fn settle_unanswered(&self, stream: u32, cost: u64) -> ChargeResult {
        self.send(stream, ENVOY, SlotAction::ReleaseUnanswered, Hits::Refund(cost))
    }

    fn open(&self) -> SlotSummary {
        let slot = SlotUse { id: SlotId(1), token: SlotToken(1), holder: ENVOY, action: SlotAction::Acquire };
        let step = Step { slot, hits: Hits::Peek, limit: 0, now: self.now };
        let entries = [Entry { key: b"k", value: b"v" }];
        let charge = charge_of(&step, &self.limits, &entries);
        self.store.summarize_reservations(charge.path_hash, charge.counters[0].tag, self.now)
    }

    fn let_time_to_settle_pass(&mut self) {
        self.now = self.now.plus_us(u64::from(SETTLE_WITHIN_S) * 1_000_000);
    }
}

#[test]
fn reservations_beyond_the_maximum_are_charged_and_not_remembered() {
    let mut counter = OneCounter::new(256 << 20, 1_000_000, UnsettledPolicy::Keep);
    for stream in 0..MAX_RESERVATIONS {
        assert_eq!(counter.reserve(stream, 1).slot, SlotChange::Taken, "{stream}");
    }
    let used = u64::from(MAX_RESERVATIONS) + 1;
    let one_more = counter.reserve(MAX_RESERVATIONS, 1);
    assert_eq!((one_more.admitted, one_more.slot, one_more.after), (true, SlotChange::None, used));
    assert_eq!(counter.settle(MAX_RESERVATIONS, 0).after, used, "the estimate stays");
    for spent in 1..3 {
        let unknown = counter.settle_unanswered(MAX_RESERVATIONS + 1, 1);
        assert_eq!(unknown.after, used + spent, "it leaves no tombstone, so it counts again");
    }
    assert_eq!(counter.reserve(0, 1).slot, SlotChange::Renewed, "those that are open go on");
    assert_eq!(counter.settle(0, 1).slot, SlotChange::Freed);
    assert_eq!(counter.reserve(MAX_RESERVATIONS, 1).slot, SlotChange::Taken, "there is room for one");
    assert_eq!(counter.reserve(0, 1).slot, SlotChange::None);
    counter.let_time_to_settle_pass();
    let after_all = counter.reserve(0, 1);
    assert_eq!((after_all.slot, after_all.expired_seats), (SlotChange::Taken, MAX_RESERVATIONS));
    assert_eq!(counter.open().slots, 1);
}

#[test]
fn reservations_take_no_more_than_their_part_of_the_memory() {
    let counter = OneCounter::new(1 << 20, 1_000_000, UnsettledPolicy::Keep);
    counter.reserve(0, 1);
    let before = counter.store.memory_usage().bytes;
    let mut remembered = 0;
    for stream in 1..50_000 {
        let result = counter.reserve(stream, 1);
        assert!(result.admitted && result.after == u64::from(stream) + 1, "{stream}");
        remembered += u32::from(result.slot == SlotChange::Taken);
    }
    assert!((1000..10_000).contains(&remembered), "{remembered} reservations in 256 KiB");
    let grown = counter.store.memory_usage().bytes - before;
    assert!(grown <= 600 << 10, "{grown} bytes");
}

#[test]
fn memory_of_settled_reservations_is_given_back() {
    const STREAMS: u32 = 1000;
    // Tables may take 512 KiB, as much as three rounds would if their memory stayed counted.
    let counter = OneCounter::new(2 << 20, 1_000_000, UnsettledPolicy::Keep);
    for round in 0..12 {
        let streams = round * STREAMS..(round + 1) * STREAMS;
        for stream in streams.clone() {
            assert_eq!(counter.reserve(stream, 1).slot, SlotChange::Taken, "round {round}");
        }
        for stream in streams {
            assert_eq!(counter.settle(stream, 0).slot, SlotChange::Freed, "round {round}");
        }
    }
    assert!(!counter.store.has_slots_or_reservations());
}

#[test]
fn store_forgets_what_is_over_and_keeps_what_may_be_given_back() {
    for unsettled in [UnsettledPolicy::Keep, UnsettledPolicy::Return] {
        let mut counter = OneCounter::new(16 << 20, 40, unsettled);
        counter.reserve(1, 40);
        counter.let_time_to_settle_pass();
        counter.store.sweep(counter.now, 0, 1);
        assert_eq!(counter.store.has_slots_or_reservations(), unsettled == UnsettledPolicy::Return);
        let next = counter.reserve(2, 30);
        assert_eq!(next.admitted, unsettled == UnsettledPolicy::Return, "{next:?}");
    }
}

#[test]
fn settlement_charges_a_counter_that_the_store_forgot() {
    let mut counter = OneCounter::of_kind(Kind::Fixed, 16 << 20, 40, UnsettledPolicy::Keep);
    counter.reserve(1, 5);
    // The window is over, the reservation is not.
    counter.now = counter.now.plus_us(10_000_000);
    counter.store.sweep(counter.now, 0, 1);
    assert_eq!(counter.settle(1, 9).after, 4);
    assert_eq!(counter.reserve(2, 1).after, 5);
}

#[test]
fn reservations_of_a_dead_envoy_are_over_and_its_tombstones_stay() {
    let mut counter = OneCounter::new(16 << 20, 40, UnsettledPolicy::Return);
    counter.store.slot_holders().set_timeout(Duration::from_secs(2));
    counter.settle_unanswered(1, 0);
    counter.reserve(2, 20);
    counter.reserve(3, 20);
    counter.now = counter.now.plus_us(1_000_000);
    counter.store.slot_holders().set_shared_dead_holders([ENVOY].into_iter(), counter.now);
    let next = counter.send(4, HolderId(2), SlotAction::Acquire, Hits::Charge(30));
    assert_eq!((next.admitted, next.after, next.expired_seats), (true, 30, 2));
    assert_eq!(counter.settle(2, 0).after, 30, "it settles no more");
    assert_eq!(counter.reserve(1, 1).slot, SlotChange::Late);
}
