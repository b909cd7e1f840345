//! Holds in real stores: what two stores on one Redis admit together, and what outlasts a reset, a write and a failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tollkeeper::base::clock::{Clock, Time};
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::charge::Charge;
use tollkeeper::limit::hold::{HeldAmount, HoldAnswer, HoldRequest};
use tollkeeper::limit::period::Unit;
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::{Consistency, Limit, LimitSpec, Overshoot};
use tollkeeper::store::charge::{ChargeResults, StoreOutcome};
use tollkeeper::store::error::ChargeError;
use tollkeeper::store::memory::MemoryStore;
use tollkeeper::store::redis::key::holds_key;
use tollkeeper::store::{Store, StoreContext};

use super::{HELD, SECOND_US, charge, hold, holder, lent, limit, size, spec};
use kit::redis::cluster::Cluster;
use kit::redis::sentinels::{NAME, Sentinels};
use kit::redis::{Server, options};
use kit::redis_counters::{LONG_TIMEOUT, TimeSource, start_store, wait_until_connected};
use kit::seeded_random::Chance;
use kit::test_service::store_runtime;
use kit::wait_for;
use tokio::time::Instant;

/// A store, and one value whose counters the test uses.
struct TestStore {
    store: Store,
}

impl Drop for TestStore {
    fn drop(&mut self) {
        // Background tasks of the store end within its runtime.
        let _within = store_runtime().enter();
        self.store = MemoryStore::new(1 << 18).into();
    }
}

impl TestStore {
    fn memory() -> Self {
        Self { store: MemoryStore::new(1 << 20).into() }
    }

    fn with(env: &[(&str, &str)]) -> Self {
        let redis = start_store(env, TimeSource::Redis);
        wait_until_connected(&redis);
        Self { store: redis.into() }
    }

    fn on(server: &Server) -> Self {
        Self::with(&[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &server.address())])
    }

    fn context() -> StoreContext<'static> {
        let deadline = Some(Instant::now() + LONG_TIMEOUT);
        StoreContext { now: Clock::System.now(), deadline, span_ref: None, charge_times: &[] }
    }

    async fn charge_async(&self, value: &str, limits: &[Limit], hits: u64) -> ChargeResults {
        let entries = [Entry { key: b"value", value: value.as_bytes() }];
        let charge = charge(&entries, limits, Hits::Charge(hits));
        let mut results = None;
        let each = |_: usize, _: &Charge<'_>, outcome: Result<StoreOutcome, ChargeError>| {
            results = Some(outcome.expect("the store decides").results);
        };
        if let Some(pending) = self.store.charge_all(std::iter::once((0, charge)), Self::context(), each) {
            pending.await;
        }
        results.expect("there is one outcome")
    }

    fn charge(&self, value: &str, limits: &[Limit], hits: u64) -> ChargeResults {
        store_runtime().block_on(self.charge_async(value, limits, hits))
    }

    /// Charges single hits until one is rejected; returns how many were admitted.
    fn exhaust(&self, value: &str, limits: &[Limit]) -> u64 {
        (0..1000).take_while(|_| self.charge(value, limits, 1).iter().all(|result| result.admitted)).count() as u64
    }

    async fn adjust_async(&self, value: &str, limit: &Limit, number: u8, request: HoldRequest) -> HoldAnswer {
        let entries = [Entry { key: b"value", value: value.as_bytes() }];
        let charge = charge(&entries, std::slice::from_ref(limit), Hits::Peek);
        let pending = self.store.adjust_hold(&charge, holder(number), request, Self::context());
        pending.await.expect("the store decides")
    }

    fn adjust(&self, value: &str, limit: &Limit, number: u8, request: HoldRequest) -> HoldAnswer {
        store_runtime().block_on(self.adjust_async(value, limit, number, request))
    }
}

/// Key of the only counter of a server.
fn only_key(server: &Server) -> String {
    let keys: Vec<String> = server.query(&["KEYS", "tk1:*"]);
    let mut counters = keys.into_iter().filter(|key| key.contains("value=v") && !key.ends_with(":holds"));
    counters.next().expect("there is a counter")
}

fn stored_bytes(server: &Server) -> Vec<u8> {
    server.query(&["GET", &only_key(server)])
}

/// Limits that no test outlives.
fn yearly(algorithm: Algorithm, requests: u32) -> Limit {
    limit(algorithm, requests, Unit::Year)
}

#[test]
fn store_that_holds_nothing_sees_what_another_holds() {
    let server = options().start();
    let (holding, other) = (TestStore::on(&server), TestStore::on(&server));
    for algorithm in HELD {
        let limits = [yearly(algorithm, 10)];
        let value = format!("v-{algorithm}");
        assert_eq!(size(holding.adjust(&value, &limits[0], 1, hold(0, lent(algorithm, 6))).granted), 6);
        let first = other.charge(&value, &limits, 1);
        assert_eq!((first[0].admitted, first[0].remaining), (true, 3), "{algorithm}");
        assert_eq!(other.exhaust(&value, &limits), 3, "{algorithm}");
        // Given back, the hits can be used at once: the rejection was not cached.
        assert_eq!(size(holding.adjust(&value, &limits[0], 1, hold(2, lent(algorithm, 1))).granted), 1);
        assert_eq!(other.exhaust(&value, &limits), 3, "{algorithm}");
    }
}

#[test]
fn hits_that_only_the_whole_limit_admits_may_pass_when_the_hold_ends() {
    let server = options().start();
    for store in [TestStore::memory(), TestStore::on(&server)] {
        for algorithm in HELD {
            let limits = [yearly(algorithm, 10)];
            store.adjust("v", &limits[0], 1, hold(0, lent(algorithm, 10)));
            let result = store.charge("v", &limits, 5)[0];
            assert!(!result.admitted && result.retry_after_us.is_some_and(|us| us > 10 * SECOND_US), "{result:?}");
        }
    }
}

#[test]
fn stores_on_one_redis_never_admit_more_than_the_limit() {
    let server = options().start();
    let stores: Arc<[TestStore]> = Arc::new([TestStore::on(&server), TestStore::on(&server)]);
    for algorithm in HELD {
        let limit = yearly(algorithm, 1500);
        let admitted = Arc::new(AtomicU64::new(0));
        let until = Instant::now() + Duration::from_millis(1500);
        let tasks = (0..8_u8).map(|task| {
            let (stores, admitted) = (Arc::clone(&stores), Arc::clone(&admitted));
            store_runtime().spawn(async move {
                let store = &stores[usize::from(task % 2)];
                let mut random = Chance::new(u64::from(task) + 7);
                let value = format!("v-{algorithm}");
                let (mut held, mut used) = (0, 0);
                while Instant::now() < until {
                    if task < 4 {
                        let hits = 1 + random.below(3);
                        if store.charge_async(&value, &[limit], hits).await[0].admitted {
                            admitted.fetch_add(hits, Ordering::Relaxed);
                        }
                        continue;
                    }
                    // What the holder admits without asking, it reports with the next call.
                    let wanted = lent(algorithm, random.below(200));
                    held = size(store.adjust_async(&value, &limit, task, hold(used, wanted)).await.granted);
                    used = random.below(held + 1);
                    admitted.fetch_add(used, Ordering::Relaxed);
                }
                held - used
            })
        });
        let unused = store_runtime().block_on(join_all(tasks)).into_iter().map(|task| task.unwrap()).sum::<u64>();
        let admitted = admitted.load(Ordering::Relaxed);
        assert!(admitted + unused <= 1500, "{algorithm}: {admitted} admitted, {unused} held");
        assert!(admitted + unused >= 1400, "{algorithm}: {admitted} admitted, {unused} held");
    }
}

#[test]
fn writes_of_charges_keep_what_is_held() {
    // A user without SETRANGE writes by SET.
    for user in ["+@all", "+@all -setrange"] {
        let server = options().start();
        server.query::<()>(&["ACL", "SETUSER", "default", user.split(' ').next_back().unwrap()]);
        for algorithm in HELD {
            server.query::<()>(&["FLUSHALL"]);
            let store = TestStore::on(&server);
            let limits = [yearly(algorithm, 10)];
            store.adjust("v", &limits[0], 1, hold(0, lent(algorithm, 6)));
            let held = stored_bytes(&server);
            let hold_bytes = &held[held.len() - 24..];
            assert_eq!(&hold_bytes[4..8], b"hold", "{algorithm}");
            server.reset_stats();
            assert_eq!(store.exhaust("v", &limits), 4, "{algorithm}, {user}");
            let charged = stored_bytes(&server);
            assert_eq!((charged.len(), &charged[charged.len() - 24..]), (held.len(), hold_bytes), "{algorithm}");
            let overwritten = server.command_counts().get("setrange").copied().unwrap_or(0);
            assert_eq!(overwritten > 0, user == "+@all", "{algorithm}, {user}: {overwritten}");
        }
    }
}

#[test]
fn counter_lives_until_its_hold_has_ended() {
    let server = options().start();
    for algorithm in HELD {
        server.query::<()>(&["FLUSHALL"]);
        let store = TestStore::on(&server);
        let limits = [limit(algorithm, 10, Unit::Second)];
        store.adjust("v", &limits[0], 1, hold(0, lent(algorithm, 6)));
        for _ in 0..3 {
            store.charge("v", &limits, 1);
            let key = only_key(&server);
            let holds = String::from_utf8(holds_key(key.as_bytes()).to_vec()).unwrap();
            for key in [key, holds] {
                let left_ms: i64 = server.query(&["PTTL", &key]);
                assert!((19_000..60_000).contains(&left_ms), "{algorithm}: {key} lives for {left_ms} ms");
            }
        }
    }
}

#[test]
fn hold_that_has_ended_leaves_the_state() {
    let server = options().start();
    for algorithm in HELD {
        server.query::<()>(&["FLUSHALL"]);
        let store = TestStore::on(&server);
        let limits = [limit(algorithm, 10, Unit::Second)];
        let request = HoldRequest { lasts_us: 1000, ..hold(0, lent(algorithm, 10)) };
        store.adjust("v", &limits[0], 1, request);
        let held = stored_bytes(&server).len();
        wait_for("the end of the hold", || store.charge("v", &limits, 1)[0].admitted.then_some(()));
        assert_eq!(stored_bytes(&server).len(), held - 24, "{algorithm}");
    }
}

#[test]
fn reset_empties_the_count_and_leaves_what_is_held() {
    let server = options().start();
    for store in [TestStore::memory(), TestStore::on(&server)] {
        let limits = HELD.map(|algorithm| yearly(algorithm, 10));
        for several in [false, true] {
            for held in limits {
                let limits: &[Limit] = if several { &limits } else { &[held] };
                let value = format!("v-{several}-{}", held.algorithm());
                store.adjust(&value, &held, 1, hold(0, lent(held.algorithm(), 6)));
                assert_eq!(store.exhaust(&value, limits), 4);
                let entries = [Entry { key: b"value", value: value.as_bytes() }];
                let of_value = charge(&entries, limits, Hits::Peek);
                let until = Instant::now() + LONG_TIMEOUT;
                let reset = store.store.reset_counters(&of_value, Clock::System.now(), until);
                store_runtime().block_on(reset).unwrap();
                assert_eq!(store.exhaust(&value, limits), 4, "{}, several: {several}", held.algorithm());
            }
        }
    }
}

#[test]
fn holds_work_in_every_deployment() {
    let (single, cluster, sentinels) =
        (options().start(), Cluster::start(), Sentinels::start_with(&options(), &options()));
    let sentinel_url = format!("{NAME},{}", sentinels.addresses().join(","));
    let envs: [&[(&str, &str)]; 3] = [
        &[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &single.address())],
        &[("REDIS_TYPE", "cluster"), ("REDIS_URL", &cluster.addresses().join(","))],
        &[("REDIS_TYPE", "sentinel"), ("REDIS_URL", &sentinel_url)],
    ];
    for env in envs {
        let store = TestStore::with(env);
        // Values in many slots, and charges of several calls that may share a command.
        let limits = HELD.map(|algorithm| yearly(algorithm, 10));
        store_runtime().block_on(join_all((0..40).map(|number| {
            let (store, limits) = (&store, &limits);
            async move {
                let value = format!("v{number}");
                for limit in limits {
                    store.adjust_async(&value, limit, 1, hold(0, lent(limit.algorithm(), 6))).await;
                    let charges = join_all((0..10).map(|_| store.charge_async(&value, std::slice::from_ref(limit), 1)));
                    let admitted = charges.await.iter().filter(|results| results[0].admitted).count();
                    assert_eq!(admitted, 4, "{env:?}: {}", limit.algorithm());
                }
                assert!(!store.charge_async(&value, limits, 1).await[0].admitted, "{env:?}");
            }
        })));
    }
}

#[test]
fn eventual_limit_is_lowered_by_what_is_held() {
    let server = options().start();
    let store = TestStore::on(&server);
    for algorithm in HELD {
        let eventual = Consistency::Eventual(Overshoot::Hits(10));
        let limits =
            [Limit::new(&LimitSpec { consistency: Some(eventual), ..spec(algorithm, 1000, Unit::Year) }).unwrap()];
        let value = format!("v-{algorithm}");
        store.adjust(&value, &limits[0], 1, hold(0, lent(algorithm, 600)));
        let admitted = (0..1500).filter(|_| store.charge(&value, &limits, 1)[0].admitted).count();
        // On a busy machine a lease may end before its hits are used.
        assert!((300..=410).contains(&admitted), "{algorithm}: {admitted}");
    }
}

#[test]
fn fallback_counts_what_was_held_as_used() {
    let server = options().start();
    let store = TestStore::on(&server);
    for algorithm in HELD {
        let limits = [yearly(algorithm, 10)];
        let value = format!("v-{algorithm}");
        store.adjust(&value, &limits[0], 1, hold(0, lent(algorithm, 6)));
        store.charge(&value, &limits, 1);
        let entries = [Entry { key: b"value", value: value.as_bytes() }];
        let one = || charge(&entries, &limits, Hits::Charge(1));
        let now = Clock::System.now();
        // Hits of the share can be held too, and the other decisions of this process leave them out.
        let held = store.store.adjust_fallback_hold(&one(), holder(1), hold(0, lent(algorithm, 2)), now).unwrap();
        assert_eq!(size(held.granted), 2, "{algorithm}");
        let admitted = (0..10).filter(|_| store.store.charge_fallback(&one(), now)[0].admitted).count();
        assert_eq!(admitted, 1, "{algorithm}");
    }
}

#[test]
fn records_of_holders_are_no_counters() {
    let server = options().start();
    let store = TestStore::on(&server);
    let limits = [yearly(Algorithm::FixedWindow, 10)];
    store.adjust("v", &limits[0], 1, hold(0, lent(Algorithm::FixedWindow, 6)));
    let scan = || {
        let list_counter_paths = store.store.list_counter_paths("held", 10, Instant::now() + LONG_TIMEOUT, |_| true);
        store_runtime().block_on(list_counter_paths).unwrap().expect("Redis lists its keys").paths.len()
    };
    assert_eq!(scan(), 1);
    server.query::<()>(&["DEL", &only_key(&server)]);
    assert_eq!(scan(), 0);
    // A lost counter loses what is held until the next call of a holder.
    assert_eq!(store.charge("v", &limits, 1)[0].remaining, 9);
    store.adjust("v", &limits[0], 2, hold(0, HeldAmount::default()));
    assert_eq!(store.charge("v", &limits, 1)[0].remaining, 2);
}

#[test]
fn store_that_cannot_hold_says_so_and_grants_nothing() {
    let server = options().start();
    let env = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &*server.address()), ("TOLLKEEPER_KEY_FORMAT", "ratelimit")];
    let store = TestStore::with(&env);
    let hourly = limit(Algorithm::FixedWindow, 10, Unit::Hour);
    let refusal = store.store.reason_against_holds(&hourly);
    assert!(refusal.is_some_and(|reason| reason.contains("TOLLKEEPER_KEY_FORMAT")), "{refusal:?}");
    let answer = store.adjust("v", &hourly, 1, hold(0, lent(Algorithm::FixedWindow, 6)));
    assert_eq!((size(answer.granted), answer.others.len()), (0, 0));
    assert_eq!(store.charge("v", &[hourly], 1)[0].remaining, 9);
}

#[test]
fn memory_of_holds_is_bounded_and_freed() {
    let store = MemoryStore::new(1 << 18);
    let limits = [limit(Algorithm::TokenBucket, 10, Unit::Second)];
    let start = Time::from_secs(1_783_512_000);
    let adjust = |number: u32| {
        let value = number.to_le_bytes();
        let entries = [Entry { key: b"value", value: &value }];
        store.adjust_hold(
            &charge(&entries, &limits, Hits::Peek),
            holder(1),
            hold(0, lent(Algorithm::TokenBucket, 6)),
            start,
        )
    };
    let granted = (0..2000).filter(|number| adjust(*number).is_ok_and(|answer| size(answer.granted) == 6)).count();
    assert!((50..1000).contains(&granted), "{granted}");
    assert!(store.memory_usage().bytes <= (1 << 18) * 5 / 4, "{:?}", store.memory_usage());
    let end = start.plus_us(60 * SECOND_US);
    store.sweep(end, 0, 1);
    assert_eq!(store.memory_usage().counters, 0);
    assert!(adjust(3000).is_ok_and(|answer| size(answer.granted) == 6));
}
