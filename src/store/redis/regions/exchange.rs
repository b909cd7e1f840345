//! Requests of a region's pools to the global Redis, and checks of pools that may have too much.
//!
//! A charge opens a request, and the process that made the charge sends it here, in the background: an adjustment of
//! the hold in the global Redis, whose answer the pool takes in the region's Redis. A pool takes only the answer to its
//! last request, so one that is lost or late wastes time and no hits: the next request tells the same hits again.
//!
//! The process that got an answer checks the pool again, until the hold ends: it gives back what the region does not
//! need, and tells what was used before the window ends.
//!
//! Decides: which process of a region asks; how many requests wait.
//! Decides: when a process checks a pool (`check_interval_us`).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};

use super::calls::{BreakerRecording, GLOBAL_REDIS_TIMEOUT, REGION_REDIS_TIMEOUT, ScriptOnKeys};
use crate::base::clock::Time;
use crate::base::random::random_u64;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::Limit;
use crate::limit::algorithm::region_pool::{LastAnswer, PoolGrant, RegionPool};
use crate::limit::algorithm::stored_state::{MalformedReply, ReplyReader};
use crate::limit::hold::PoolId;
use crate::limit::region_requests::{check_interval_us, request_interval_us};
use crate::settings::redis::regions::RegionSettings;
use crate::store::charge::OwnedCounter;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::reply_bytes;
use crate::store::redis::global_answers::GlobalAnswers;
use crate::store::redis::hold_call::{decode_hold_answer, encode_hold_request};
use crate::store::redis::key::{counter_key_of_pool, global_key, holds_key};
use crate::store::redis::script::{CallTime, hold_script, pool_exchange_script, put_time};
use crate::store::stats::GrantCounts;

/// Upper bound on requests that wait to be sent; further ones are dropped, and the pool opens another.
const MAX_WAITING_REQUESTS: usize = 65_536;
/// Upper bound on requests that wait for answers.
const MAX_REQUESTS_IN_FLIGHT: usize = 1024;
/// Upper bound on pools that this process checks; what others do not need stays held until the hold ends.
const MAX_CHECKS: usize = 100_000;
/// Upper bound on checks that wait for answers.
const MAX_CHECKS_IN_FLIGHT: usize = 256;

/// Open request of a pool.
#[derive(Clone, Debug)]
pub(super) struct PendingRequest {
    /// Key of the pool.
    pub(super) pool_key: Bytes,
    /// Limit of its counter.
    pub(super) limit: Limit,
    /// The pool when the request was opened.
    pub(super) pool: RegionPool,
}

/// What a process does to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolOperation<'g> {
    /// Gives it an answer.
    Accept(&'g PoolGrant),
    /// Only reads it.
    Read,
    /// Opens a request that gives back what is left above so many hits.
    RequestKeeping(u64),
}

/// A pool in a script's reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolReply {
    /// Time of the region's Redis.
    pub now: Time,
    /// The pool, after the change.
    pub pool: RegionPool,
}

/// Sender of the requests of this process, and of its checks.
#[derive(Debug)]
pub(super) struct PoolExchange {
    global: Arc<Deployment>,
    region: Arc<Deployment>,
    answers: Arc<GlobalAnswers>,
    region_number: u32,
    wait_replicas: u32,
    counts: GrantCounts,
    requests: mpsc::Sender<PendingRequest>,
    checks: Mutex<CheckSchedule>,
    added: Notify,
}

impl PoolExchange {
    /// Creates the sender, and the queue of its requests.
    pub(super) fn new(
        settings: &RegionSettings,
        global: Arc<Deployment>,
        region: Arc<Deployment>,
        answers: Arc<GlobalAnswers>,
    ) -> (Self, mpsc::Receiver<PendingRequest>) {
        let (requests, opened) = mpsc::channel(MAX_WAITING_REQUESTS);
        let exchange = Self {
            global,
            region,
            answers,
            region_number: settings.own_region_number(),
            wait_replicas: settings.wait_replicas,
            counts: GrantCounts::default(),
            requests,
            checks: Mutex::default(),
            added: Notify::new(),
        };
        (exchange, opened)
    }

    /// Counts of requests and hits.
    pub(super) const fn counts(&self) -> &GrantCounts {
        &self.counts
    }

    /// Sends a request in the background; drops it if too many wait.
    pub(super) fn push(&self, request: PendingRequest) {
        if self.requests.try_send(request).is_err() {
            self.counts.count_dropped_request();
        }
    }

    /// Sends requests until it is dropped.
    pub(super) async fn run_requests(&self, requests: mpsc::Receiver<PendingRequest>) {
        let requests = stream::unfold(requests, |mut requests| async move { Some((requests.recv().await?, requests)) });
        requests.for_each_concurrent(MAX_REQUESTS_IN_FLIGHT, |request| self.send_request(request)).await;
    }

    /// Sends a request, and gives its answer to the pool.
    async fn send_request(&self, request: PendingRequest) {
        self.counts.count_request();
        match self.ask_global_redis(&request).await {
            Ok(grant) => self.give_answer(&request, &grant).await,
            Err(error) => {
                self.counts.count_failed_request();
                tracing::debug!(%error, "the global redis did not answer a request for hits");
            }
        }
    }

    async fn ask_global_redis(&self, request: &PendingRequest) -> Result<PoolGrant, RedisError> {
        let PendingRequest { pool_key, limit, pool } = request;
        let counter = OwnedCounter { limit: limit.without_region_parts(), shadow: false, quota: false, tag: 0 };
        let key = global_key(counter_key_of_pool(pool_key));
        let keys = [key.clone(), holds_key(&key)];
        let hold = pool.hold_request(limit);
        let argument = encode_hold_request(&counter, self.pool_id(pool), hold, CallTime::Server { about: pool.last });
        let call =
            ScriptOnKeys { script: hold_script(counter.limit.counting_method()), keys: &keys, argument: &argument };
        let deadline = Instant::now() + GLOBAL_REDIS_TIMEOUT;
        let reply = call.run(&self.global, BreakerRecording::Replicated(self.wait_replicas), deadline).await?;
        let answer = reply_bytes(&reply).and_then(|reply| decode_hold_answer(reply, &counter.limit).ok());
        let answer = answer.ok_or(RedisError::BadReply)?;
        self.answers.record(Instant::now());
        // Regions that ask at equal distances would keep their order, and the first gets most of what becomes free.
        let interval_us = request_interval_us(limit);
        let pause_us = interval_us / 4 * 3 + interval_us / 2 * (random_u64() % 1001) / 1000;
        Ok(pool.grant_of(limit, &answer, pause_us))
    }

    /// Identity of a pool at the global Redis; a pool that replaces a lost one has another.
    fn pool_id(&self, pool: &RegionPool) -> PoolId {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&self.region_number.to_le_bytes());
        id[8..].copy_from_slice(&pool.id.to_le_bytes());
        PoolId(id)
    }

    async fn give_answer(&self, request: &PendingRequest, grant: &PoolGrant) {
        let PendingRequest { pool_key, limit, pool } = request;
        let added = grant.held.saturating_sub(pool.left);
        match self.operate_on_pool(pool_key, grant.number, PoolOperation::Accept(grant)).await {
            Ok(Some(reply)) => {
                self.counts.add_granted_hits(added, Instant::now());
                self.schedule_check(pool_key, limit, &reply);
            }
            // Another request was opened since: it tells the same hits, and what is held stays held.
            Ok(None) => self.counts.add_wasted_hits(added),
            Err(_) => {
                self.counts.count_failed_request();
                self.counts.add_wasted_hits(added);
            }
        }
    }

    /// Runs the script on a pool in the region's Redis; `None` if `number` is not that of its last request.
    async fn operate_on_pool(
        &self,
        pool_key: &Bytes,
        number: u64,
        operation: PoolOperation<'_>,
    ) -> Result<Option<PoolReply>, RedisError> {
        let argument = encode_pool_operation(None, number, operation);
        let call =
            ScriptOnKeys { script: pool_exchange_script(), keys: std::slice::from_ref(pool_key), argument: &argument };
        let deadline = Instant::now() + REGION_REDIS_TIMEOUT;
        let reply = call.run(&self.region, BreakerRecording::Unrecorded, deadline).await?;
        let bytes = reply_bytes(&reply).ok_or(RedisError::BadReply)?;
        decode_pool_reply(bytes).map_err(|_| RedisError::BadReply)
    }

    fn schedule_check(&self, pool_key: &Bytes, limit: &Limit, reply: &PoolReply) {
        let PoolReply { now, pool } = reply;
        if pool.left + pool.unreported == 0 || *now >= pool.until {
            return;
        }
        let after_us = pool.final_check_at().since_us(*now).clamp(MIN_CHECK_INTERVAL_US, check_interval_us(limit));
        let at = Instant::now() + Duration::from_micros(after_us);
        self.lock_checks().add(pool_key.clone(), PoolCheck { limit: *limit, number: pool.number }, at);
        self.added.notify_one();
    }

    /// Makes each check at its time; runs until it is dropped.
    pub(super) async fn run_checks(&self) {
        loop {
            let next = self.lock_checks().next_due_at();
            tokio::select! {
                () = self.added.notified() => {}
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    let due = self.lock_checks().take_due(Some(Instant::now()));
                    self.check_all(due).await;
                }
            }
        }
    }

    /// Makes all checks now, because the process stops.
    pub(super) async fn check_all_now(&self) {
        let due = self.lock_checks().take_due(None);
        self.check_all(due).await;
    }

    async fn check_all(&self, due: Vec<(Bytes, PoolCheck)>) {
        stream::iter(due).for_each_concurrent(MAX_CHECKS_IN_FLIGHT, |(key, check)| self.check_pool(key, check)).await;
    }

    /// Looks at a pool whose last request is still the one that this process sent, and gives back what it does not
    /// need.
    async fn check_pool(&self, pool_key: Bytes, check: PoolCheck) {
        let PoolCheck { limit, number } = check;
        let Ok(Some(reply)) = self.operate_on_pool(&pool_key, number, PoolOperation::Read).await else { return };
        let pool = reply.pool.at(&limit, reply.now);
        let Some(kept) = pool.hits_to_keep(&limit) else {
            return self.schedule_check(&pool_key, &limit, &reply);
        };
        if let Ok(Some(opened)) = self.operate_on_pool(&pool_key, number, PoolOperation::RequestKeeping(kept)).await {
            self.counts.add_returned_hits(pool.left.saturating_sub(opened.pool.left));
            self.send_request(PendingRequest { pool_key, limit, pool: opened.pool.at(&limit, opened.now) }).await;
        }
    }

    fn lock_checks(&self) -> MutexGuard<'_, CheckSchedule> {
        lock_ignoring_poison(&self.checks)
    }
}

/// Shortest time between two checks of a pool, in microseconds.
const MIN_CHECK_INTERVAL_US: u64 = 10_000;

/// Encodes the argument of the script `exchange` in `lua/pool.lua`, for `now`, or the server's own time if it is `None`.
pub fn encode_pool_operation(now: Option<Time>, number: u64, operation: PoolOperation<'_>) -> Vec<u8> {
    let mut argument = BytesMut::new();
    put_time(&mut argument, now);
    let mut numbers = vec![number];
    match operation {
        PoolOperation::Accept(grant) => {
            let PoolGrant { held, until, low, next_request_at, answer, .. } = *grant;
            let LastAnswer { room, fair_share, others_share, held_by_others, window_end } = answer;
            numbers.extend([0, held, until.as_micros(), low, next_request_at.as_micros()]);
            numbers.extend([room, fair_share, others_share, held_by_others, window_end.as_micros()]);
        }
        PoolOperation::Read => numbers.push(1),
        PoolOperation::RequestKeeping(kept) => numbers.extend([2, kept]),
    }
    numbers.iter().for_each(|number| argument.put_u64_le(*number));
    argument.into()
}

/// Decodes its reply; `None` if it is empty.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_pool_reply(reply: &[u8]) -> Result<Option<PoolReply>, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    if reader.is_empty() {
        return Ok(None);
    }
    let (now, pool) = (reader.read_time()?, RegionPool::read_from_reply(&mut reader)?);
    if reader.is_empty() { Ok(Some(PoolReply { now, pool })) } else { Err(MalformedReply) }
}

/// A check of a pool.
#[derive(Clone, Copy, Debug)]
struct PoolCheck {
    limit: Limit,
    /// Number of the last request that this process sent.
    number: u64,
}

/// Looks in the order of their times, one for each pool.
#[derive(Debug, Default)]
struct CheckSchedule {
    by_time: BinaryHeap<Reverse<(Instant, Bytes)>>,
    checks: HashMap<Bytes, PoolCheck>,
}

impl CheckSchedule {
    /// Adds a check; one of the same pool that is due before takes its place.
    fn add(&mut self, pool_key: Bytes, check: PoolCheck, at: Instant) {
        let is_full = self.checks.len() >= MAX_CHECKS;
        if let Some(scheduled) = self.checks.get_mut(&pool_key) {
            *scheduled = check;
        } else if !is_full {
            self.checks.insert(pool_key.clone(), check);
            self.by_time.push(Reverse((at, pool_key)));
        }
    }

    fn next_due_at(&self) -> Option<Instant> {
        self.by_time.peek().map(|Reverse((at, _))| *at)
    }

    /// Removes the checks that are due at `now`; all if it is `None`.
    fn take_due(&mut self, now: Option<Instant>) -> Vec<(Bytes, PoolCheck)> {
        let mut due = Vec::new();
        while self.next_due_at().is_some_and(|at| now.is_none_or(|now| at <= now)) {
            let Some(Reverse((_, key))) = self.by_time.pop() else { break };
            due.extend(self.checks.remove(&key).map(|check| (key, check)));
        }
        due
    }
}
