//! Memory of the tables of slots in the memory store: bounded, and given back.

use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::charge::{Charge, ChargeRequest, ChargeResult, Counter};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::slot::{HolderId, SlotAction, SlotChange, SlotId, SlotToken, SlotUse};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::error::MemoryFull;
use tollkeeper::store::memory::MemoryStore;

use super::table::{MAX_DURATION_S, concurrent_limit};

const NOON: Time = Time::from_secs(1_800_000_000);

/// Use of the slot with this number.
fn slot(id: u128, action: SlotAction) -> SlotUse {
    // Ids are hashes.
    let id = SlotId(id.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835));
    SlotUse { id, token: SlotToken(1), holder: HolderId(1), action }
}

/// Charges the limit of `value` that has so many seats.
fn charge(store: &MemoryStore, value: &str, seats: u32, slot: SlotUse, now: Time) -> Result<ChargeResult, MemoryFull> {
    let limit = concurrent_limit(seats);
    let entries = [Entry { key: b"k", value: value.as_bytes() }];
    let path = CounterPath { domain: "slots", entries: &entries, shared: &[], candidate: None };
    let tag = hash_limit_identity(&limit, 0);
    let counter = Counter { limit: &limit, shadow: false, quota: false, tag, epoch: 0 };
    let hits = if slot.action.is_release() { Hits::Refund(1) } else { Hits::Charge(1) };
    let charge = Charge::new(path, SmallVec::from_iter([counter]), ChargeRequest::new(hits, 0));
    store.charge(&Charge { slot: Some(&slot), ..charge }, now).map(|results| results[0])
}

#[test]
fn memory_of_slots_that_expired_is_given_back() {
    const SLOTS: u32 = 5000;
    // Tables may take 4 MiB, as much as a dozen rounds would if their memory stayed counted.
    let store = MemoryStore::new(16 << 20);
    let mut now = NOON;
    for round in 0..40 {
        for id in 0..SLOTS {
            let id = u128::from(round * SLOTS + id + 1);
            let taken = charge(&store, "a", SLOTS, slot(id, SlotAction::Acquire), now);
            let taken = taken.unwrap_or_else(|_| panic!("no memory is left in round {round}"));
            assert_eq!(taken.slot, SlotChange::Taken, "round {round}");
        }
        // The first one of the next round finds all of them over.
        now = now.plus_us(u64::from(MAX_DURATION_S) * 1_000_000);
    }
}

#[test]
fn seats_that_a_sweep_found_over_are_told_by_the_next_charge_of_the_limit() {
    let store = MemoryStore::new(1 << 20);
    for id in 0..3 {
        charge(&store, "a", 5, slot(id, SlotAction::Acquire), NOON).expect("there is room");
    }
    let later = NOON.plus_us(u64::from(MAX_DURATION_S) * 1_000_000);
    store.sweep(later, 0, 1);
    let expired = || charge(&store, "b", 5, slot(9, SlotAction::Acquire), later).map(|result| result.expired_seats);
    assert_eq!((expired().ok(), expired().ok()), (Some(3), Some(0)));
}

#[test]
fn slots_without_room_are_refused_and_come_back_with_room() {
    let store = MemoryStore::new(1 << 20);
    let taken = (0..100_000_u128)
        .map_while(|id| charge(&store, "a", 1_000_000, slot(id, SlotAction::Acquire), NOON).ok())
        .count();
    assert!((1000..20_000).contains(&taken), "{taken} slots in 256 KiB");
    // What exists goes on, and can be freed.
    let again = charge(&store, "a", 1_000_000, slot(0, SlotAction::Acquire), NOON);
    assert_eq!(again.map(|result| result.slot).ok(), Some(SlotChange::Renewed));
}

#[test]
fn tombstones_of_many_counters_take_no_more_than_the_room_of_slots() {
    let store = MemoryStore::new(1 << 20);
    let before = store.memory_usage().bytes;
    for number in 0..20_000 {
        let value = number.to_string();
        charge(&store, &value, 5, slot(1, SlotAction::ReleaseUnanswered), NOON).unwrap_or_else(|_| panic!("refused"));
    }
    let grown = store.memory_usage().bytes - before;
    assert!(grown <= 300 << 10, "{grown} bytes");
}
