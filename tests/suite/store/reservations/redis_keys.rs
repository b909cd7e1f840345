//! The hash of reservations in Redis: how many fields it has, and for how long.

use tollkeeper::base::clock::Time;
use tollkeeper::limit::charge::ChargeResult;
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::reservation::{MAX_RESERVATIONS, UnsettledPolicy};
use tollkeeper::limit::slot::{HolderId, SlotAction, SlotChange, SlotId, SlotToken, SlotUse};
use tollkeeper::store::charge::{ChargeContext, CommitMode};
use tollkeeper::store::redis::Redis;

use super::steps::{Kind, SETTLE_WITHIN_S, Step, charge_of, reserving_limit};
use kit::redis::{Server, options};
use kit::redis_counters::{LONG_TIMEOUT, TimeSource, start_store, wait_until_connected};
use kit::test_service::store_runtime;
use tokio::time::Instant;

/// Sets the number of fields that the head of a hash tells.
const SET_FIELDS: &str = "local head = redis.call('HGET', KEYS[1], '')
return redis.call('HSET', KEYS[1], '', struct.pack('<I8', tonumber(ARGV[1])) .. string.sub(head, 9))";

/// A counter of 100 hits a month.
struct OneCounter {
    redis: Redis,
    unsettled: UnsettledPolicy,
    now: Time,
}

impl OneCounter {
    fn new(server: &Server, unsettled: UnsettledPolicy) -> Self {
        let address = server.address();
        let redis = start_store(&[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &address)], TimeSource::Caller);
        wait_until_connected(&redis);
        Self { redis, unsettled, now: Time::from_secs(1_800_000_000) }
    }

    fn send(&self, stream: u64, action: SlotAction, hits: Hits) -> ChargeResult {
        let slot = SlotUse { id: SlotId(stream.into()), token: SlotToken(stream), holder: HolderId(1), action };
        let step = Step { slot, hits, limit: 0, now: self.now };
        let (limits, entries) =
            ([reserving_limit(Kind::Months, 100, self.unsettled, None)], [Entry { key: b"k", value: b"v" }]);
        let charge = charge_of(&step, &limits, &entries);
        let context = ChargeContext::new(self.now, Instant::now() + LONG_TIMEOUT);
        let outcomes = store_runtime().block_on(self.redis.charge_all(&[charge], CommitMode::Commit, context));
        outcomes[0].as_ref().expect("Redis answers").results[0]
    }

    fn reserve(&self, stream: u64) -> ChargeResult {
        self.send(stream, SlotAction::Acquire, Hits::Charge(10))
    }
}

fn key_of_reservations(server: &Server) -> String {
    let keys: Vec<String> = server.query(&["KEYS", "*:reservations"]);
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys.into_iter().next().unwrap()
}

#[test]
fn full_hash_takes_no_more_until_something_is_over() {
    let server = options().start();
    let mut counter = OneCounter::new(&server, UnsettledPolicy::Keep);
    assert_eq!(counter.reserve(1).slot, SlotChange::Taken);
    let fields = MAX_RESERVATIONS.to_string();
    let _: i64 = server.query(&["EVAL", SET_FIELDS, "1", &key_of_reservations(&server), &fields]);
    let one_more = counter.reserve(2);
    assert_eq!((one_more.admitted, one_more.slot, one_more.after), (true, SlotChange::None, 20));
    assert_eq!(counter.send(2, SlotAction::Release, Hits::Refund(0)).after, 20, "the estimate stays");
    for used in [25, 30] {
        let unknown = counter.send(3, SlotAction::ReleaseUnanswered, Hits::Refund(5));
        assert_eq!(unknown.after, used, "it leaves no tombstone, so it counts again");
    }
    assert_eq!(counter.reserve(1).slot, SlotChange::Renewed, "those that are open go on");
    counter.now = counter.now.plus_us(u64::from(SETTLE_WITHIN_S) * 1_000_000);
    let next = counter.reserve(4);
    assert_eq!((next.slot, next.expired_seats), (SlotChange::Taken, 1));
}

#[test]
fn hash_outlives_what_may_be_given_back() {
    const MONTH_MS: i64 = 28 * 86_400_000;
    for unsettled in [UnsettledPolicy::Keep, UnsettledPolicy::Return] {
        let server = options().start();
        OneCounter::new(&server, unsettled).reserve(1);
        let ttl_ms: i64 = server.query(&["PTTL", &key_of_reservations(&server)]);
        assert!(ttl_ms > 0, "{ttl_ms}");
        assert_eq!(ttl_ms > MONTH_MS, unsettled == UnsettledPolicy::Return, "{ttl_ms}");
    }
}
