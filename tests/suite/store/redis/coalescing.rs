//! Charges on one counter that arrive while its call is in flight: decided one by one, in few calls, with
//! cancellation.
//!
//! A frozen server, or one behind a proxy that stalls or delays, fixes which charges are sent and which wait; counters
//! follow the time in the charges where results are compared. The server counts the calls.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use tokio::time::{Instant, sleep};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::joint_charge::charge_together;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{ChargeRequest, JointLimit};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::charge::{ChargeResults, CommitMode};
use tollkeeper::store::client::redis::error::RedisError;

use crate::limit::algorithms::scenario::config;
use kit::redis::{Server, options};
use kit::redis_counters::{ChargeOutcomes, LONG_TIMEOUT, RedisCounters, TestCharge, TimeSource, poll_once};
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::test_service::store_runtime;

/// The middle of an hour, in the past.
const NOW: Time = Time::from_secs(1_783_513_800);
/// Upper bound on the charges of one call.
const MAX_CHARGES_PER_CALL: usize = 512;
/// Upper bound on the charges that wait for one counter.
const MOST_WAITING: usize = 16_384;

type Call<'c, T> = Pin<Box<dyn Future<Output = T> + Send + 'c>>;

fn limit(algorithm: Algorithm, requests_per_unit: u32) -> Limit {
    Limit::new(&LimitSpec {
        sole: false,
        ..LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(Unit::Year, 1).unwrap())
    })
    .unwrap()
}

fn counting(requests_per_unit: u32) -> Limit {
    limit(Algorithm::FixedWindow, requests_per_unit)
}

/// Connected counters of a server that has loaded the script.
fn primed(server: &Server, time: TimeSource) -> RedisCounters {
    primed_at(server, &server.address(), time)
}

fn primed_at(server: &Server, address: &str, time: TimeSource) -> RedisCounters {
    // Without the cache, so that rejected charges are sent too.
    let env = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", address), ("TOLLKEEPER_OVER_LIMIT_CACHE_BYTES", "0")];
    let counters = RedisCounters::new(&env, time);
    store_runtime().block_on(counters.charge(&[TestCharge::one("prime", counting(1))], CommitMode::Commit, NOW));
    server.reset_stats();
    counters
}

/// Number of script calls that the server has received.
fn calls(server: &Server) -> u64 {
    let commands = server.command_counts();
    assert_eq!(commands.get("eval"), None, "the script is known: {commands:?}");
    commands.get("evalsha").copied().unwrap_or(0)
}

/// Request of one hit that has been polled once: sent, or waiting.
async fn begin<'c>(counters: &'c RedisCounters, test_charges: &'c [TestCharge]) -> Call<'c, Vec<ChargeResults>> {
    let mut call: Call<'c, _> = Box::pin(counters.charge(test_charges, CommitMode::Commit, NOW));
    assert!(poll_once(&mut call).await.is_none(), "no outcome while the server is frozen");
    call
}

async fn begin_until<'c>(
    counters: &'c RedisCounters,
    test_charges: &'c [TestCharge],
    until: Instant,
) -> Call<'c, ChargeOutcomes> {
    let mut call: Call<'c, _> = Box::pin(counters.charge_until(test_charges, CommitMode::Commit, (NOW, until)));
    assert!(poll_once(&mut call).await.is_none(), "no outcome while the server is frozen");
    call
}

/// Hits charged to the counter of a value.
async fn counted(counters: &RedisCounters, value: &str, limit: Limit) -> u64 {
    let look = TestCharge::new(value, limit, Hits::Peek);
    counters.charge(&[look], CommitMode::Commit, NOW).await[0][0].before
}

/// Requests that arrive while a call is in flight, in this order, and again later.
#[derive(Clone, Debug)]
struct Meeting {
    /// Counters by algorithm and period, and the limits that each charge may use.
    kinds: Vec<(Algorithm, Unit)>,
    ways: Vec<Vec<(Limit, bool)>>,
    rounds: Vec<Round>,
}

#[derive(Clone, Debug)]
struct Round {
    passed_us: u64,
    requests: Vec<Request>,
}

#[derive(Clone, Debug)]
struct Request {
    charges: Vec<Hit>,
    mode: CommitMode,
    /// Cancelled before any outcome arrives.
    given_up: bool,
}

#[derive(Clone, Debug)]
struct Hit {
    value: u8,
    way: usize,
    request: ChargeRequest,
}

const WAYS: usize = 3;

fn meeting() -> impl Strategy<Value = Meeting> {
    let all: Vec<_> =
        Algorithm::ALL.into_iter().flat_map(|algorithm| [(algorithm, Unit::Minute), (algorithm, Unit::Day)]).collect();
    let kinds = prop_oneof![3 => prop::sample::subsequence(all.clone(), 1), 2 => prop::sample::subsequence(all, 2..4)];
    let ways = kinds.prop_flat_map(|kinds| {
        let way: Vec<_> = kinds.iter().map(|kind| a_limit(*kind)).collect();
        (Just(kinds), prop::collection::vec(way, WAYS))
    });
    let rounds = prop::collection::vec(
        (prop_oneof![Just(0), 0..100_000_000_u64], prop::collection::vec(request(), 1..24))
            .prop_map(|(passed_us, requests)| Round { passed_us, requests }),
        1..4,
    );
    (ways, rounds).prop_map(|((kinds, ways), rounds)| Meeting { kinds, ways, rounds })
}

fn a_limit((algorithm, unit): (Algorithm, Unit)) -> impl Strategy<Value = (Limit, bool)> {
    let count_rejected = prop_oneof![Just(None), any::<bool>().prop_map(Some)];
    (0..30_u32, 1..20_u32, count_rejected, prop_oneof![Just(None), (0..90_000_000_u64).prop_map(Some)], any::<bool>())
        .prop_map(move |(requests_per_unit, capacity, count_rejected, max_wait_us, enforced)| {
            let (leaky, token) = (algorithm == Algorithm::LeakyBucket, algorithm == Algorithm::TokenBucket);
            let terms = LimitSpec {
                bucket_size: token.then_some(capacity),
                queue_size: leaky.then_some(capacity),
                max_wait_us: max_wait_us.filter(|_| leaky || token),
                count_rejected: count_rejected.filter(|_| !leaky),
                sole: false,
                ..LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(unit, 1).unwrap())
            };
            (Limit::new(&terms).unwrap(), enforced)
        })
}

fn request() -> impl Strategy<Value = Request> {
    let hits = prop_oneof![
        1 => Just(Hits::Peek),
        4 => Just(Hits::Charge(1)),
        2 => (2..12_u64).prop_map(Hits::Charge),
        1 => Just(Hits::Charge(1 << 32)),
        2 => (1..12_u64).prop_map(Hits::Refund),
    ];
    let max_delay_us = prop_oneof![Just(0), 0..90_000_000_u64, Just(u64::MAX)];
    let hit = (0..2_u8, 0..WAYS, hits, max_delay_us).prop_map(|(value, way, hits, max_delay_us)| Hit {
        value,
        way,
        request: ChargeRequest::new(hits, max_delay_us),
    });
    let charges = prop_oneof![3 => prop::collection::vec(hit.clone(), 1), 2 => prop::collection::vec(hit, 2..7)];
    let mode = prop_oneof![4 => Just(CommitMode::Commit), 1 => Just(CommitMode::DryRun)];
    (charges, mode, prop::bool::weighted(0.2)).prop_map(|(charges, mode, given_up)| Request { charges, mode, given_up })
}

/// Decides charges one by one.
struct OneByOne<'m> {
    meeting: &'m Meeting,
    states: HashMap<u8, Vec<State>>,
}

impl OneByOne<'_> {
    fn charge(&mut self, hit: &Hit, mode: CommitMode, now: Time) -> ChargeResults {
        let limits = &self.meeting.ways[hit.way];
        let terms: Vec<_> =
            limits.iter().map(|(limit, enforced)| JointLimit { limit, rejects_others: *enforced }).collect();
        let empty = || self.meeting.kinds.iter().map(|(algorithm, _)| State::empty(*algorithm)).collect();
        let states = self.states.entry(hit.value).or_insert_with(empty);
        match mode {
            CommitMode::Commit => charge_together(&terms, states, now, hit.request),
            CommitMode::DryRun => charge_together(&terms, &mut states.clone(), now, hit.request),
        }
    }

    /// Expected outcomes if requests arrive in this order, and the first call on each counter is sent before any is
    /// cancelled.
    fn answers(&mut self, round: &Round, now: Time) -> Vec<Vec<ChargeResults>> {
        let mut sent = [false; 2];
        let mut responses = Vec::new();
        for request in &round.requests {
            // Charges of one request on one counter stay in one call.
            let leads =
                [0, 1].map(|value| !sent[value] && request.charges.iter().any(|hit| usize::from(hit.value) == value));
            let mut levels = Vec::new();
            for hit in &request.charges {
                let charged = leads[usize::from(hit.value)] || !request.given_up;
                let mode = if charged { request.mode } else { CommitMode::DryRun };
                levels.push(self.charge(hit, mode, now));
                sent[usize::from(hit.value)] = true;
            }
            responses.push(levels);
        }
        responses
    }
}

/// Submits the requests while the server is frozen, and compares their outcomes.
fn check(server: &Server, counters: &RedisCounters, meeting: &Meeting) -> TestCaseResult {
    static MEETINGS: AtomicU64 = AtomicU64::new(0);
    let number = MEETINGS.fetch_add(1, Ordering::Relaxed);
    let mut model = OneByOne { meeting, states: HashMap::new() };
    let mut now = NOW;
    for round in &meeting.rounds {
        now = now.plus_us(round.passed_us);
        let test_charges = |hit: &Hit| {
            let (value, limits) = (format!("{number} {}", hit.value), meeting.ways[hit.way].clone());
            TestCharge { value, limits, request: hit.request }
        };
        let requests: Vec<Vec<TestCharge>> =
            round.requests.iter().map(|request| request.charges.iter().map(test_charges).collect()).collect();
        server.freeze();
        let responses = store_runtime().block_on(async {
            let mut under_way = Vec::new();
            for (request, test_charges) in round.requests.iter().zip(&requests) {
                let mut call: Call<'_, _> = Box::pin(counters.charge(test_charges, request.mode, now));
                assert!(poll_once(&mut call).await.is_none(), "no outcome while the server is frozen");
                under_way.push((call, request.given_up));
            }
            let waiting: Vec<_> = under_way.into_iter().map(|(call, given_up)| (!given_up).then_some(call)).collect();
            server.thaw();
            let responses = join_all(waiting.into_iter().map(|call| async { Some(call?.await) })).await;
            // If all are cancelled, calls are still in flight.
            let look = |value| Hit { value, way: 0, request: ChargeRequest::new(Hits::Peek, 0) };
            counters.charge(&[test_charges(&look(0)), test_charges(&look(1))], CommitMode::Commit, now).await;
            responses
        });
        for (place, (answered, expected)) in responses.into_iter().zip(model.answers(round, now)).enumerate() {
            if let Some(answered) = answered {
                prop_assert_eq!(answered, expected, "request {} at {:?}", place, now);
            }
        }
    }
    Ok(())
}

#[test]
fn coalesced_charges_are_decided_in_order_of_arrival() {
    let server = options().start();
    let counters = primed(&server, TimeSource::Caller);
    let mut runner = TestRunner::new(ProptestConfig { source_file: Some(file!()), ..config() });
    runner.run(&meeting(), |meeting| check(&server, &counters, &meeting)).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn hot_counter_is_exact_with_far_fewer_calls_than_charges() {
    const CALLERS: u64 = 400;
    const EACH: u64 = 25;
    const LIMIT: u32 = 7_000;
    let server = options().start();
    for algorithm in Algorithm::ALL {
        // A leaky bucket delays admitted requests: here, all but the first beyond the callers' deadline.
        let expected = if algorithm == Algorithm::LeakyBucket { 1 } else { u64::from(LIMIT) };
        let limit = limit(algorithm, LIMIT);
        let counters = Arc::new(primed(&server, TimeSource::Redis));
        let value = algorithm.name();
        let prime = TestCharge::new(value, limit, Hits::Peek);
        store_runtime().block_on(counters.charge(&[prime], CommitMode::Commit, NOW));
        server.reset_stats();
        let before = counters.redis.stats().calls;
        let admitted = store_runtime().block_on(async {
            let callers = (0..CALLERS).map(|_| {
                let counters = Arc::clone(&counters);
                tokio::spawn(async move {
                    let mut admitted = 0;
                    for _ in 0..EACH {
                        let levels = counters.charge(&[TestCharge::one(value, limit)], CommitMode::Commit, NOW).await;
                        admitted += u64::from(levels[0][0].admitted);
                    }
                    admitted
                })
            });
            join_all(callers).await.into_iter().map(Result::unwrap).sum::<u64>()
        });
        assert_eq!(admitted, expected, "{algorithm}");
        let (calls, charges) = (calls(&server), CALLERS * EACH);
        println!("{algorithm}: {charges} charges in {calls} calls");
        assert_eq!(calls, counters.redis.stats().calls - before, "{algorithm}");
        assert!(calls * 20 <= charges, "{algorithm}: {calls} calls for {charges} charges");
    }
}

#[test]
fn idle_counter_costs_one_call_per_request() {
    let server = options().start();
    let counters = primed(&server, TimeSource::Redis);
    let limit = counting(1_000);
    store_runtime().block_on(async {
        for charge in 1..=5 {
            counters.charge(&[TestCharge::one("idle", limit)], CommitMode::Commit, NOW).await;
            assert_eq!(calls(&server), charge);
        }
        for (charges, expected) in [(2, 1), (16, 1), (17, 1), (300, 1), (512, 1), (513, 2), (1_200, 3)] {
            server.reset_stats();
            let value = format!("{charges} charges");
            let test_charges = vec![TestCharge::one(&value, limit); charges];
            let levels = counters.charge(&test_charges, CommitMode::Commit, NOW).await;
            assert_eq!(calls(&server), expected, "{charges} charges");
            let found: Vec<u64> = levels.iter().map(|levels| levels[0].before).collect();
            assert_eq!(found, (0..charges as u64).map(|place| place.min(1_000)).collect::<Vec<_>>(), "in their order");
        }
        // Alternating charges on two counters need two calls.
        server.reset_stats();
        let test_charges: Vec<_> = (0..40).map(|place| TestCharge::one(["one", "other"][place % 2], limit)).collect();
        let levels = counters.charge(&test_charges, CommitMode::Commit, NOW).await;
        assert_eq!(calls(&server), 2);
        assert_eq!(
            levels.iter().map(|levels| levels[0].before).collect::<Vec<_>>(),
            (0..40).map(|n| n / 2).collect::<Vec<_>>()
        );
    });
}

#[test]
fn busy_counter_costs_two_round_trips_with_calls_of_512_charges() {
    let server = options().start();
    let counters = primed(&server, TimeSource::Redis);
    let table: &[(&[usize], u64)] = &[
        // charges of each waiting request, calls after the first one
        (&[], 0),
        (&[1], 1),
        (&[1; 511], 1),
        (&[1; 512], 1),
        (&[1; 513], 2),
        (&[1; 1_300], 3),
        // Charges of one request are never split.
        (&[300, 212], 1),
        (&[300, 213], 2),
        (&[1, 512, 1], 3),
        (&[500, 500, 500], 3),
    ];
    for (place, (waiting, expected)) in table.iter().enumerate() {
        let (value, limit) = (format!("row {place}"), counting(100_000));
        let first = [TestCharge::one(&value, limit)];
        let requests: Vec<_> = waiting.iter().map(|charges| vec![TestCharge::one(&value, limit); *charges]).collect();
        server.reset_stats();
        server.freeze();
        let found = store_runtime().block_on(async {
            let mut under_way = vec![begin(&counters, &first).await];
            for request in &requests {
                under_way.push(begin(&counters, request).await);
            }
            server.thaw();
            join_all(under_way).await.into_iter().flatten().map(|levels| levels[0].before).collect::<Vec<_>>()
        });
        assert_eq!(calls(&server), 1 + expected, "{waiting:?}");
        assert_eq!(found, (0..found.len() as u64).collect::<Vec<_>>(), "each in its turn");
    }
}

#[test]
fn waiting_charges_are_decided_at_the_latest_time() {
    let server = options().start();
    let counters = primed(&server, TimeSource::Caller);
    let hourly = Limit::new(&LimitSpec::new(Algorithm::FixedWindow, 1, Period::new(Unit::Hour, 1).unwrap())).unwrap();
    let test_charges = [TestCharge::one("late", hourly)];
    server.freeze();
    let admitted = store_runtime().block_on(async {
        let mut under_way: Vec<Call<'_, Vec<ChargeResults>>> = Vec::new();
        for hours in [0, 0, 1] {
            let mut call: Call<'_, _> =
                Box::pin(counters.charge(&test_charges, CommitMode::Commit, NOW.plus_us(hours * hourly.period_us())));
            assert!(poll_once(&mut call).await.is_none());
            under_way.push(call);
        }
        server.thaw();
        join_all(under_way).await.iter().map(|levels| levels[0][0].admitted).collect::<Vec<_>>()
    });
    // The second waited until the next hour began, and its window was empty.
    assert_eq!(admitted, [true, true, false]);
}

#[test]
fn cancelled_charge_counts_only_if_sent_and_others_are_decided() {
    let server = options().start();
    let counters = primed(&server, TimeSource::Redis);
    let limit = counting(1_000);
    // Six requests with these hits, leading or following: the cancelled ones, and the hits charged.
    let table: &[(&[usize], u64)] = &[
        (&[], 0b111_111),
        (&[0], 0b111_111),
        (&[1], 0b111_101),
        (&[5], 0b011_111),
        (&[1, 2, 3, 4, 5], 0b000_001),
        (&[0, 1, 2, 3, 4], 0b100_001),
        (&[0, 1, 2, 3, 4, 5], 0b000_001),
    ];
    for (gone, charged) in table {
        let value = format!("{gone:?}");
        let requests: Vec<_> = (0..6).map(|place| [TestCharge::new(&value, limit, Hits::Charge(1 << place))]).collect();
        server.freeze();
        let responses = store_runtime().block_on(async {
            let mut under_way = Vec::new();
            for request in &requests {
                under_way.push(Some(begin(&counters, request).await));
            }
            gone.iter().for_each(|place| under_way[*place] = None);
            server.thaw();
            let responses = join_all(under_way.into_iter().flatten()).await;
            // A new request finds no call in flight, or follows the remaining requests.
            assert_eq!(counted(&counters, &value, limit).await, *charged, "{gone:?}");
            responses
        });
        assert_eq!(responses.len(), 6 - gone.len());
    }
}

#[test]
fn cancelled_request_cancels_all_its_charges() {
    let server = options().start();
    let counters = primed(&server, TimeSource::Redis);
    let limit = counting(1_000);
    let (one, many) = ([TestCharge::one("many", limit)], vec![TestCharge::one("many", limit); 100]);
    server.reset_stats();
    server.freeze();
    store_runtime().block_on(async {
        let first = begin(&counters, &one).await;
        let gone = begin(&counters, &many).await;
        let stays = begin(&counters, &many).await;
        let last = begin(&counters, &one).await;
        drop(gone);
        server.thaw();
        let (_, stays, last) = tokio::join!(first, stays, last);
        let found: Vec<u64> = stays.iter().chain(&last).map(|levels| levels[0].before).collect();
        assert_eq!(found, (1..=101).collect::<Vec<_>>());
        assert_eq!(calls(&server), 2);
    });
}

#[test]
fn charge_cancelled_after_sending_stays_charged() {
    let server = options().start();
    let proxy = TcpProxy::to(&server.address());
    let address = format!("127.0.0.1:{}", proxy.port());
    let counters = primed_at(&server, &address, TimeSource::Redis);
    let limit = counting(1_000);
    let requests: Vec<_> = (0..3).map(|place| [TestCharge::new("gone", limit, Hits::Charge(1 << place))]).collect();
    // The network is slow, so the second call is in flight meanwhile.
    proxy.set(Mode::Delay(Duration::from_millis(100)));
    store_runtime().block_on(async {
        let first = begin(&counters, &requests[0]).await;
        let goes = begin(&counters, &requests[1]).await;
        let stays = begin(&counters, &requests[2]).await;
        first.await;
        let asked = proxy.request_bytes();
        let mut waited = Duration::ZERO;
        while proxy.request_bytes() == asked && waited < LONG_TIMEOUT {
            sleep(Duration::from_millis(1)).await;
            waited += Duration::from_millis(1);
        }
        drop(goes);
        assert_eq!(stays.await[0][0].before, 0b011);
        assert_eq!(counted(&counters, "gone", limit).await, 0b111);
    });
}

#[test]
fn call_past_its_deadline_frees_its_counter() {
    let server = options().start();
    let address = server.address();
    let env = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &*address), ("TOLLKEEPER_STORE_TIMEOUT", "500ms")];
    let counters = RedisCounters::new(&env, TimeSource::Redis);
    let limit = counting(1_000);
    let requests: Vec<_> = (0..4).map(|place| [TestCharge::new("held", limit, Hits::Charge(1 << place))]).collect();
    store_runtime().block_on(async {
        counters.charge(&[TestCharge::one("prime", limit)], CommitMode::Commit, NOW).await;
        server.freeze();
        let began = Instant::now();
        let soon = began + Duration::from_millis(500);
        let first = begin_until(&counters, &requests[0], soon).await;
        let stays = begin_until(&counters, &requests[1], began + LONG_TIMEOUT).await;
        let hurried = begin_until(&counters, &requests[2], began + Duration::from_millis(50)).await;
        assert_eq!(hurried.await, [Err(RedisError::Timeout)]);
        assert_eq!(first.await, [Err(RedisError::Timeout)]);
        assert!(began.elapsed() >= Duration::from_millis(500));
        // The waiting charge is sent now, after the first one, which was cancelled.
        server.thaw();
        assert_eq!(stays.await[0].as_ref().unwrap()[0].before, 0b001);
        let next = counters.charge(&requests[3], CommitMode::Commit, NOW).await;
        assert_eq!(next[0][0].before, 0b011, "who gave up while it waited is not charged");
    });
}

#[test]
fn call_outlives_a_leader_with_a_short_deadline() {
    let server = options().start();
    let counters = primed(&server, TimeSource::Redis);
    let limit = counting(1_000);
    let requests: Vec<_> = (0..2).map(|place| [TestCharge::new("hurry", limit, Hits::Charge(1 << place))]).collect();
    server.freeze();
    store_runtime().block_on(async {
        let soon = Instant::now() + Duration::from_millis(50);
        let hurried = begin_until(&counters, &requests[0], soon).await;
        let waits = begin(&counters, &requests[1]).await;
        assert_eq!(hurried.await, [Err(RedisError::Timeout)]);
        server.thaw();
        assert_eq!(waits.await[0][0].before, 1, "it was sent, and stays charged");
        assert_eq!(calls(&server), 2);
    });
}

#[test]
fn waiters_on_a_frozen_server_time_out_in_time() {
    // A charge that waited for the call before its own would be late by as much; a busy machine is not.
    const TIMEOUT: Duration = Duration::from_secs(3);
    let server = options().start();
    let address = server.address();
    let env = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &*address), ("TOLLKEEPER_STORE_TIMEOUT", "3s")];
    let counters = RedisCounters::new(&env, TimeSource::Redis);
    let limit = counting(100_000);
    // Longer than three calls: no charge waits for the calls before its own.
    let requests = vec![[TestCharge::one("crowd", limit)]; 4 * MAX_CHARGES_PER_CALL];
    store_runtime().block_on(async {
        counters.charge(&[TestCharge::one("prime", limit)], CommitMode::Commit, NOW).await;
        server.freeze();
        let mut under_way = Vec::new();
        for request in &requests {
            let until = Instant::now() + TIMEOUT;
            let call = begin_until(&counters, request, until).await;
            under_way.push(async move {
                let responses = call.await;
                (responses, Instant::now().saturating_duration_since(until))
            });
        }
        let answered = join_all(under_way).await;
        server.thaw();
        assert!(answered.iter().all(|(responses, _)| *responses == [Err(RedisError::Timeout)]));
        let late = answered.into_iter().map(|(_, late)| late).max().expect("there are answers");
        assert!(late < TIMEOUT, "{late:?}");
    });
}

#[test]
fn more_than_16384_waiters_fail_and_it_recovers() {
    let server = options().start();
    let counters = primed(&server, TimeSource::Redis);
    let limit = counting(1 << 20);
    let one = [TestCharge::one("crowd", limit)];
    server.freeze();
    store_runtime().block_on(async {
        let mut under_way = Vec::with_capacity(1 + MOST_WAITING);
        for _ in 0..=MOST_WAITING {
            under_way.push(begin(&counters, &one).await);
        }
        // At once, while the server is frozen.
        for charges in [1, 3] {
            let test_charges = vec![one[0].clone(); charges];
            let responses =
                counters.charge_until(&test_charges, CommitMode::Commit, (NOW, Instant::now() + LONG_TIMEOUT)).await;
            assert_eq!(responses, vec![Err(RedisError::Overloaded); charges]);
        }
        // Other counters are not affected, and cancelled charges do not count.
        let other = [TestCharge::one("other", limit)];
        let beside = begin(&counters, &other).await;
        server.thaw();
        let found: Vec<u64> = join_all(under_way).await.iter().map(|levels| levels[0][0].before).collect();
        assert_eq!(found, (0..=MOST_WAITING as u64).collect::<Vec<_>>());
        assert_eq!(beside.await[0][0].before, 0);
        assert_eq!(counters.charge(&one, CommitMode::Commit, NOW).await[0][0].before, 1 + MOST_WAITING as u64);
    });
    assert_eq!(calls(&server), 1 + (MOST_WAITING / MAX_CHARGES_PER_CALL) as u64 + 2);
}

#[test]
fn limits_differing_only_in_numbers_share_a_counter() {
    assert_eq!(
        hash_limit_identity(&counting(1), 0),
        hash_limit_identity(&counting(2), 0),
        "or the others would prove nothing"
    );
    let server = options().start();
    let counters = primed(&server, TimeSource::Redis);
    let requests: Vec<_> =
        [9, 3, 5, 4].map(|limit| [TestCharge::new("shared", counting(limit), Hits::Charge(2))]).into();
    server.freeze();
    let admitted = store_runtime().block_on(async {
        let mut under_way = Vec::new();
        for request in &requests {
            under_way.push(begin(&counters, request).await);
        }
        server.thaw();
        join_all(under_way).await.iter().map(|levels| levels[0][0].admitted).collect::<Vec<_>>()
    });
    assert_eq!(admitted, [true, false, true, false]);
    assert_eq!(calls(&server), 2);
}
