//! The Redis store in this process, without rules and requests: tests choose limits, values and hits.
//!
//! Charges are futures that only the test polls, so that it controls their order, waiting and cancellation. Their
//! timeout is long enough for a loaded machine, unless the environment sets one.

use std::ffi::OsString;
use std::future::{Future, poll_fn};
use std::num::NonZeroU32;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::charge::{Charge, ChargeRequest, Counter};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::settings::{self, Settings};
use tollkeeper::store::charge::{ChargeContext, ChargeResults, CommitMode};
use tollkeeper::store::client::redis::error::RedisError;
use tollkeeper::store::fallback::Fallback;
use tollkeeper::store::redis::Redis;

use super::test_service::store_runtime;
use super::wait_for;

/// Default timeout of a charge, and of a caller.
pub const LONG_TIMEOUT: Duration = Duration::from_secs(10);

/// Outcome of each charge of a request.
pub type ChargeOutcomes = Vec<Result<ChargeResults, RedisError>>;

/// Clock that counters follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeSource {
    /// The clock of Redis.
    Redis,
    /// The time in each charge.
    Caller,
}

/// Counters in Redis.
#[derive(Debug)]
pub struct RedisCounters {
    /// The store.
    pub redis: Redis,
}

/// A charge on the counters of a value.
#[derive(Clone, Debug)]
pub struct TestCharge {
    /// Value of the only entry of the path.
    pub value: String,
    /// Its limits, and whether they are enforced.
    pub limits: Vec<(Limit, bool)>,
    /// The charge.
    pub request: ChargeRequest,
}

impl TestCharge {
    /// Hits on one limit.
    pub fn new(value: &str, limit: Limit, hits: Hits) -> Self {
        Self { value: value.to_owned(), limits: vec![(limit, true)], request: ChargeRequest::new(hits, 0) }
    }

    /// One hit on one limit.
    pub fn one(value: &str, limit: Limit) -> Self {
        Self::new(value, limit, Hits::Charge(1))
    }
}

/// A store in Redis by these variables, as settings make one. It connects in the background.
pub fn start_store(env: &[(&str, &str)], time: TimeSource) -> Redis {
    let mut variables: Vec<(OsString, OsString)> = vec![("TOLLKEEPER_STORE_TIMEOUT".into(), "10s".into())];
    for (name, value) in env {
        variables.retain(|(known, _)| known != name);
        variables.push((name.into(), value.into()));
    }
    let (settings, _) = Settings::from_env(variables.into_iter()).expect("the settings are valid");
    let settings::store::StoreSettings::Redis(settings) = settings.store else { panic!("it counts in Redis") };
    let local = Fallback::new(1 << 20, NonZeroU32::MIN);
    let _within = store_runtime().enter();
    match time {
        TimeSource::Redis => Redis::start(&settings, local),
        TimeSource::Caller => Redis::start_with_client_clock(&settings, local),
    }
}

impl RedisCounters {
    /// Counters of the Redis that the variables name; drop them before the suite's runtime ends.
    pub fn new(env: &[(&str, &str)], time: TimeSource) -> Self {
        Self { redis: start_store(env, time) }
    }

    /// Counters of a single server at this address.
    pub fn at(address: &str, time: TimeSource) -> Self {
        Self::new(&[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", address)], time)
    }

    /// Charges one request with a long deadline; panics if it cannot be decided.
    pub async fn charge(&self, test_charges: &[TestCharge], mode: CommitMode, now: Time) -> Vec<ChargeResults> {
        let responses = self.charge_until(test_charges, mode, (now, Instant::now() + LONG_TIMEOUT)).await;
        responses.into_iter().map(|response| response.expect("Redis decides")).collect()
    }

    /// Charges one request; returns the outcome of each charge.
    pub async fn charge_until(
        &self,
        test_charges: &[TestCharge],
        mode: CommitMode,
        when: (Time, Instant),
    ) -> ChargeOutcomes {
        let entries: Vec<_> = test_charges
            .iter()
            .map(|test_charges| [Entry { key: b"value", value: test_charges.value.as_bytes() }])
            .collect();
        let charges: Vec<_> = test_charges
            .iter()
            .zip(&entries)
            .map(|(test_charges, entries)| {
                let path = CounterPath { domain: "counters", entries, shared: &[], candidate: None };
                Charge::new(path, counters(&test_charges.limits), test_charges.request)
            })
            .collect();
        let responses = self.redis.charge_all(&charges, mode, ChargeContext::new(when.0, when.1)).await;
        responses.into_iter().map(|response| response.map(|found| found.results)).collect()
    }
}

fn counters(limits: &[(Limit, bool)]) -> SmallVec<[Counter<'_>; 1]> {
    let mut counters = SmallVec::new();
    for (limit, enforced) in limits {
        counters.push(Counter { limit, shadow: !enforced, quota: false, tag: hash_limit_identity(limit, 0), epoch: 0 });
    }
    counters
}

/// Waits until the topology is discovered; earlier charges fail at once.
pub fn wait_until_connected(redis: &Redis) {
    let limit = Limit::new(&LimitSpec::new(Algorithm::FixedWindow, 1, Period::new(Unit::Second, 1).expect("a period")));
    let limits = [(limit.expect("a limit"), true)];
    let entries = [Entry { key: b"known", value: b"" }];
    wait_for("a charge from redis", || {
        let path = CounterPath { domain: "counters", entries: &entries, shared: &[], candidate: None };
        let peek = Charge::new(path, counters(&limits), ChargeRequest::new(Hits::Peek, 0));
        let until = Instant::now() + LONG_TIMEOUT;
        let responses = store_runtime().block_on(redis.charge_all(
            &[peek],
            CommitMode::Commit,
            ChargeContext::new(Time::from_secs(1), until),
        ));
        responses[0].is_ok().then_some(())
    });
}

/// Polls a future once; returns its output if it is ready.
pub async fn poll_once<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> Option<F::Output> {
    poll_fn(|context| {
        Poll::Ready(match future.as_mut().poll(context) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    })
    .await
}
