//! Counters that the memory store evicts while reservations of them are open.

use tollkeeper::base::clock::Time;
use tollkeeper::limit::Limit;
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::reservation::UnsettledPolicy;
use tollkeeper::limit::slot::{HolderId, SlotAction, SlotId, SlotToken, SlotUse};
use tollkeeper::store::memory::MemoryStore;

use super::steps::{Kind, Step, charge_of, reserving_limit};

/// Requests of a store with little room.
struct SmallStore {
    store: MemoryStore,
    limits: [Limit; 1],
    now: Time,
}

impl SmallStore {
    fn new(kind: Kind) -> Self {
        let limits = [reserving_limit(kind, 40, UnsettledPolicy::Keep, None)];
        Self { store: MemoryStore::new(1 << 20), limits, now: Time::from_secs(1_800_000_000) }
    }

    /// Charges or settles a stream of a key, whose token is its number; returns the hits that are used then.
    fn send(&self, key: &str, stream: u64, hits: Hits) -> Option<u64> {
        let action = if matches!(hits, Hits::Refund(_)) { SlotAction::Release } else { SlotAction::Acquire };
        let slot = SlotUse { id: SlotId(stream.into()), token: SlotToken(stream), holder: HolderId(1), action };
        let step = Step { slot, hits, limit: 40, now: self.now };
        let entries = [Entry { key: b"k", value: key.as_bytes() }];
        let results = self.store.charge(&charge_of(&step, &self.limits, &entries), step.now).ok()?;
        Some(results[0].after)
    }
}

/// What a settlement charges to a later window is a new counter, and takes the room of others.
#[test]
fn settlement_above_the_estimate_makes_room_for_its_counter() {
    const STREAMS: u64 = 300;
    let mut store = SmallStore::new(Kind::Fixed);
    for stream in 1..=STREAMS {
        assert_eq!(store.send(&format!("stream {stream}"), stream, Hits::Charge(3)), Some(3));
    }
    // The windows are over, the reservations are not.
    store.now = store.now.plus_us(10_000_000);
    store.store.sweep(store.now, 0, 1);
    let mut others = 1000..400_000;
    while store.store.memory_usage().evicted < 2000 {
        let other = others.next().expect("the store has a bound");
        store.send(&other.to_string(), other, Hits::Charge(30));
        store.send(&other.to_string(), other, Hits::Refund(30));
    }
    let evicted = store.store.memory_usage().evicted;
    for stream in 1..=STREAMS {
        assert_eq!(store.send(&format!("stream {stream}"), stream, Hits::Refund(9)), Some(6));
    }
    assert!(store.store.memory_usage().evicted > evicted, "the store grows beyond its bound");
}
