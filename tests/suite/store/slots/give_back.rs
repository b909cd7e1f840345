//! Slots that a rejected request gives back while Redis is away.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tollkeeper::base::clock::Clock;
use tollkeeper::limit::charge::{Charge, ChargeRequest, ChargeResult, Counter};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::slot::{HolderId, SlotAction, SlotChange, SlotId, SlotToken, SlotUse};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::charge::{ChargeContext, CommitMode};
use tollkeeper::store::redis::Redis;

use super::table::concurrent_limit;
use kit::redis::{Server, options};
use kit::redis_counters::{TimeSource, start_store, wait_until_connected};
use kit::test_service::store_runtime;
use kit::wait_for;
use tokio::time::Instant;

fn start_redis_store(server: &Server) -> Arc<Redis> {
    let address = server.address();
    let env = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &*address), ("TOLLKEEPER_STORE_TIMEOUT", "1s")];
    let redis = Arc::new(start_store(&env, TimeSource::Redis));
    wait_until_connected(&redis);
    redis
}

/// Passes the charge of a slot of the only seat to `make`.
fn with_charge<T>(
    (id, token): (u128, u64),
    action: SlotAction,
    make: impl FnOnce(&Charge<'_>, ChargeContext<'_>) -> T,
) -> T {
    let (limit, entries) = (concurrent_limit(1), [Entry { key: b"k", value: b"v" }]);
    let slot = SlotUse { id: SlotId(id), token: SlotToken(token), holder: HolderId(1), action };
    let counter = Counter { limit: &limit, shadow: false, quota: false, tag: hash_limit_identity(&limit, 0), epoch: 0 };
    let path = CounterPath { domain: "slots", entries: &entries, shared: &[], candidate: None };
    let hits = if action.is_release() { Hits::Refund(0) } else { Hits::Charge(1) };
    let charge = Charge::new(path, SmallVec::from_iter([counter]), ChargeRequest::new(hits, 0));
    let context = ChargeContext::new(Clock::System.now(), Instant::now() + Duration::from_secs(1));
    make(&Charge { slot: Some(&slot), ..charge }, context)
}

/// Asks for a slot; `None`: Redis did not answer.
fn acquire(redis: &Redis, id: u128) -> Option<ChargeResult> {
    acquire_with_token(redis, id, 1)
}

fn acquire_with_token(redis: &Redis, id: u128, token: u64) -> Option<ChargeResult> {
    with_charge((id, token), SlotAction::Acquire, |charge, context| {
        let charges = std::slice::from_ref(charge);
        let outcomes = store_runtime().block_on(redis.charge_all(charges, CommitMode::Commit, context));
        outcomes[0].as_ref().ok().map(|outcome| outcome.results[0])
    })
}

/// Gives back the first slot with its first token.
fn give_back(redis: &Arc<Redis>) {
    let _within = store_runtime().enter();
    with_charge((1, 1), SlotAction::Release, |charge, context| {
        drop(redis.charge_and_repeat_releases(std::slice::from_ref(charge), context));
    });
}

#[test]
fn slot_is_given_back_when_redis_is_there_again() {
    let server = options().with(&[("appendonly", "yes"), ("appendfsync", "always")]).start();
    let redis = start_redis_store(&server);
    let taken = wait_for("the slot", || acquire(&redis, 1).filter(|result| result.admitted));
    assert_eq!(taken.slot, SlotChange::Taken);
    assert!(!acquire(&redis, 2).expect("Redis answers").admitted);
    server.kill();
    wait_for("the connection to break", || acquire(&redis, 2).is_none().then_some(()));
    give_back(&redis);
    // It has failed when a call that was sent later has.
    assert_eq!(acquire(&redis, 2), None);
    server.restart();
    wait_for("the slot that was given back", || acquire(&redis, 2).filter(|result| result.admitted));
}

#[test]
fn slot_of_a_retry_is_not_given_back() {
    let server = options().start();
    let redis = start_redis_store(&server);
    let retry = wait_for("the slot", || acquire_with_token(&redis, 1, 2));
    assert_eq!(retry.slot, SlotChange::Taken);
    give_back(&redis);
    // Redis answers in order.
    assert!(!acquire(&redis, 2).expect("Redis answers").admitted);
}
