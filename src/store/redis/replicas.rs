//! Places and number of the replicas that share the limits: what this replica knows of them, the argument and reply of
//! `lua/replicas.lua`, and the heartbeat that calls it.
//!
//! A replica that has one of R places may use a share of eventual limits. Redis assigns places by its own clock, for
//! 30 s from each renewal; no replica's wall clock matters. Claim: **in any span of one period, at most one replica
//! uses a share by a given place**, so all replicas use at most R shares. Proof:
//!
//! 1. A replica uses its place until 30 s after it *sent* the last renewal that was answered. Redis ran the renewal
//!    later, so the claim in Redis ends no sooner, and no other replica gets the place before.
//! 2. The next owner uses its share of a limit only when, by Redis, a period of that limit has passed since the end of
//!    the claim before its own. At the local instant t, the time of Redis is at least the time in its last reply plus t
//!    minus the instant at which that reply was *received*, because Redis wrote it before.
//! 3. Losses err on the safe side: a lost reply ends the use of the place sooner; a renewal that Redis runs late keeps
//!    others from the place longer.
//!
//! Assumptions: clocks run at one rate, the clock of Redis does not jump ahead, and Redis does not lose a claim. The
//! number of live replicas tunes the size of leases; no promise depends on it.
//!
//! The heartbeat renews the claim on a place every 10 s. No charge waits for it. A failure only lets the place expire; it
//! opens no breaker. The script is always sent as text, because it is sent too rarely for its size to matter.
//!
//! Decides: which replica place and share this replica has (`ProcessId`).
//! Decides: when a place of a dead replica is free (`CLAIM_DURATION`), and its share usable (`may_use_share`).
//! Decides: the number of replicas that divides `local` (without `TOLLKEEPER_REPLICAS`).

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use bytes::{BufMut, Bytes, BytesMut};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::key;
use super::script::{put_time, replicas_script};
use crate::base::clock::{Clock, Time, to_micros};
use crate::base::random::random_id;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::algorithm::stored_state::MalformedReply;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::reply_bytes;
use crate::store::fallback::ReplicaCount;
use crate::telemetry::log_throttle::LogThrottle;

/// Duration of a claim after it was sent; `lua/replicas.lua` has the same.
pub const CLAIM_DURATION: Duration = Duration::from_secs(30);

/// Time for which the last reply tells the number of live replicas.
const LIVE_COUNT_VALIDITY: Duration = Duration::from_secs(60);

/// Place of this replica and number of live replicas, by the last reply of Redis. Reading takes no lock.
#[derive(Debug)]
pub struct ReplicaMembership {
    max_replicas: NonZeroU32,
    last_reply: ArcSwapOption<LastReply>,
}

#[derive(Clone, Copy, Debug)]
struct LastReply {
    held: Option<HeldPlace>,
    live: Option<NonZeroU32>,
    /// Time of Redis in the reply.
    now: Time,
    received: Instant,
}

/// Place that Redis assigned to this replica.
#[derive(Clone, Copy, Debug)]
struct HeldPlace {
    number: u32,
    previous_end: Time,
    /// Arrival of the first reply about this claim.
    received: Instant,
    /// Time for which the place had been free then; `u64::MAX` if it never had an owner.
    free_us: u64,
    /// End of its use.
    until: Instant,
}

impl ReplicaMembership {
    /// Creates the state of a replica without a place; `max_replicas` is `TOLLKEEPER_MAX_REPLICAS`.
    pub const fn new(max_replicas: NonZeroU32) -> Self {
        Self { max_replicas, last_reply: ArcSwapOption::const_empty() }
    }

    /// Returns true if a share of a limit with this period may be used at `at`.
    pub fn may_use_share(&self, period_us: u64, at: Instant) -> bool {
        let last_reply = self.last_reply.load();
        let Some(held) = last_reply.as_ref().and_then(|reply| reply.held.as_ref()) else { return false };
        // An instant before the reply proves nothing: the place may have been assigned after it.
        let is_held = held.received <= at && at < held.until;
        is_held && held.free_us.saturating_add(to_micros(at - held.received)) >= period_us
    }

    /// Returns the number of live replicas, this one included; `None` if the last reply is older than a minute.
    pub fn live_replicas(&self) -> Option<NonZeroU32> {
        self.last_reply.load().as_ref().filter(|reply| reply.received.elapsed() <= LIVE_COUNT_VALIDITY)?.live
    }

    /// Returns R, the number of places that this replica is configured with: 1 to 1000.
    pub const fn max_replicas(&self) -> NonZeroU32 {
        self.max_replicas
    }

    /// Returns the place that Redis last assigned, below R; the claim may have ended since.
    pub fn place(&self) -> Option<u32> {
        self.last_reply.load().as_ref()?.held.map(|held| held.number)
    }

    /// Returns the time of Redis at `at` by the last reply, however old; it is late by the reply's time on the network.
    pub fn redis_time(&self, at: Instant) -> Option<Time> {
        let last_reply = self.last_reply.load();
        let reply = last_reply.as_ref()?;
        let before_us = to_micros(reply.received.saturating_duration_since(at));
        let after_us = to_micros(at.saturating_duration_since(reply.received));
        Some(Time::from_micros(reply.now.plus_us(after_us).as_micros().saturating_sub(before_us)))
    }

    /// Records a reply, with the times at which its request was sent and it was received. Replies must be recorded in
    /// the order of their requests.
    pub fn record_claim_reply(&self, reply: &ClaimReply, sent: Instant, received: Instant) {
        let known = self.last_reply.load().as_ref().and_then(|last| last.held);
        let held = reply.place.map(|number| {
            let until = sent + CLAIM_DURATION;
            match known {
                // A renewal: the start of the claim stays.
                Some(held) if (held.number, held.previous_end) == (number, reply.previous_end) => {
                    HeldPlace { until, ..held }
                }
                Some(_) | None => {
                    let had_holder = reply.previous_end > Time::default();
                    let free_us = if had_holder { reply.now.since_us(reply.previous_end) } else { u64::MAX };
                    HeldPlace { number, previous_end: reply.previous_end, received, free_us, until }
                }
            }
        });
        let last_reply = LastReply { held, live: NonZeroU32::new(reply.live), now: reply.now, received };
        self.last_reply.store(Some(last_reply.into()));
    }

    /// Ends the use of the place.
    pub fn end_place_use(&self) {
        let last_reply = self.last_reply.load();
        if let Some(reply) = &*last_reply {
            self.last_reply.store(Some(LastReply { held: None, ..**reply }.into()));
        }
    }
}

/// Random identity of a process, different from all others, earlier ones included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId(pub [u8; 16]);

impl ProcessId {
    /// Creates a new identity.
    pub fn random() -> Self {
        Self(random_id())
    }
}

/// Action on a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimAction {
    /// Makes or renews the claim.
    Claim,
    /// Ends the claim, because the process stops.
    Release,
}

/// Reply of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimReply {
    /// Time of Redis.
    pub now: Time,
    /// Place of the process, from 0 on; `None`: all are taken, or claims under another number of places still run.
    pub place: Option<u32>,
    /// End of the claim before the process's own; 0 if there was none.
    pub previous_end: Time,
    /// Number of live processes, with and without a place.
    pub live: u32,
    /// Number of places that applies in Redis.
    pub max_replicas: u32,
}

/// Returns the key of the registry. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
pub fn replica_registry_key(prefix: &str) -> Bytes {
    let mut key = key::key_head(prefix);
    key.extend_from_slice(b"replicas}");
    key.freeze()
}

/// Encodes the argument of the script. The claim is made at `now`, or at the server's own time if `now` is `None`.
pub fn encode_claim_argument(owner: ProcessId, max_replicas: u32, action: ClaimAction, now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(40);
    put_time(&mut argument, now);
    argument.put_i64_le(i64::from(max_replicas));
    argument.put_i64_le(i64::from(action == ClaimAction::Release));
    argument.put_slice(&owner.0);
    argument.freeze()
}

/// Decodes the reply of the script.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_claim_reply(reply: &[u8]) -> Result<ClaimReply, MalformedReply> {
    let (words, []) = reply.as_chunks::<8>() else { return Err(MalformedReply) };
    let &[now, place, previous_end, live, max_replicas] = words else { return Err(MalformedReply) };
    let time = |word| u64::try_from(i64::from_le_bytes(word)).map(Time::from_micros).map_err(|_| MalformedReply);
    let count = |word| u32::try_from(i64::from_le_bytes(word)).map_err(|_| MalformedReply);
    let place = if i64::from_le_bytes(place) == -1 { None } else { Some(count(place)?) };
    Ok(ClaimReply {
        now: time(now)?,
        place,
        previous_end: time(previous_end)?,
        live: count(live)?,
        max_replicas: count(max_replicas)?,
    })
}

/// Time between a reply and the next renewal.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);
/// Time between a failure and the next attempt.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Upper bound on the wait for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Handle to the heartbeat task, which runs from [`ReplicaHeartbeat::start`] until it is dropped.
#[derive(Debug)]
pub(crate) struct ReplicaHeartbeat {
    state: Arc<HeartbeatState>,
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct HeartbeatState {
    replicas: Arc<ReplicaMembership>,
    /// Notified to renew the claim at once.
    renew_now: Notify,
    deployment: Arc<Deployment>,
    key: Bytes,
    owner: ProcessId,
    /// Receives the number of live replicas.
    live_count: Option<ReplicaCount>,
    mismatch_log: LogThrottle,
    failure_log: LogThrottle,
}

impl ReplicaHeartbeat {
    /// Creates a heartbeat that is not started. The registry is in `deployment`; `live_count` receives the number of
    /// live replicas.
    pub(crate) fn new(
        replicas: Arc<ReplicaMembership>,
        deployment: &Arc<Deployment>,
        prefix: &str,
        live_count: Option<ReplicaCount>,
    ) -> Self {
        let state = HeartbeatState {
            replicas,
            renew_now: Notify::new(),
            deployment: Arc::clone(deployment),
            key: replica_registry_key(prefix),
            owner: ProcessId::random(),
            live_count,
            mismatch_log: LogThrottle::every(LOG_INTERVAL),
            failure_log: LogThrottle::every(LOG_INTERVAL),
        };
        Self { state: Arc::new(state), task: Mutex::default() }
    }

    /// Returns the state that the replies update.
    pub(crate) fn replica_membership(&self) -> &ReplicaMembership {
        &self.state.replicas
    }

    /// Claims a place now and from then on; renews the claim now if it is started. Must be called within a tokio
    /// runtime.
    pub(crate) fn start(&self) {
        let mut task = lock_ignoring_poison(&self.task);
        if task.is_some() {
            self.state.renew_now.notify_one();
        } else {
            let state = Arc::clone(&self.state);
            *task = Some(tokio::spawn(async move { state.renew_repeatedly().await }));
        }
    }

    /// Stops the heartbeat and releases the place. Takes up to 500 ms; does nothing if it is not started.
    pub(crate) async fn stop(&self) {
        let task = lock_ignoring_poison(&self.task).take();
        if let Some(task) = task {
            task.abort();
            // No reply is recorded once the task has ended.
            let _aborted = task.await;
            self.state.replicas.end_place_use();
            // If this fails, the claim expires.
            let _failed = self.state.send_claim(ClaimAction::Release).await;
        }
    }
}

impl Drop for ReplicaHeartbeat {
    fn drop(&mut self) {
        let task = self.task.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            task.abort();
        }
    }
}

impl HeartbeatState {
    async fn renew_repeatedly(&self) {
        loop {
            let sent = Instant::now();
            let pause = match self.send_claim(ClaimAction::Claim).await {
                Ok(reply) => {
                    self.record_reply(&reply, sent);
                    RENEWAL_INTERVAL
                }
                Err(error) => {
                    self.log_failure(error);
                    RETRY_INTERVAL
                }
            };
            let _elapsed = timeout(pause, self.renew_now.notified()).await;
        }
    }

    async fn send_claim(&self, action: ClaimAction) -> Result<ClaimReply, RedisError> {
        let deadline = Instant::now() + REPLY_TIMEOUT;
        let argument = encode_claim_argument(self.owner, self.replicas.max_replicas().get(), action, None);
        let script = replicas_script();
        let words: [&[u8]; 5] = [b"EVAL", script.text.as_bytes(), b"1", &self.key, &argument];
        let reply = self.deployment.call_key_unrecorded(&self.key, &words, deadline).await?;
        reply_bytes(&reply).and_then(|reply| decode_claim_reply(reply).ok()).ok_or(RedisError::BadReply)
    }

    fn record_reply(&self, reply: &ClaimReply, sent: Instant) {
        let previous_place = self.replicas.place();
        self.replicas.record_claim_reply(reply, sent, Instant::now());
        if let (Some(live_count), Some(live)) = (&self.live_count, NonZeroU32::new(reply.live)) {
            live_count.set_count(live);
        }
        let configured = self.replicas.max_replicas().get();
        if reply.max_replicas != configured {
            if let Some(suppressed) = self.mismatch_log.allow(Clock::System.now()) {
                tracing::warn!(
                    configured,
                    other_replicas = reply.max_replicas,
                    suppressed,
                    "TOLLKEEPER_MAX_REPLICAS differs between replicas: {configured} here, {} in running replicas; this \
                     replica uses no share of eventual limits until they have stopped",
                    reply.max_replicas
                );
            }
        } else if reply.place != previous_place {
            match reply.place {
                Some(place) => tracing::info!(
                    place,
                    live = reply.live,
                    "this replica has a place, and so a share of eventual limits"
                ),
                None => tracing::info!(
                    live = reply.live,
                    "this replica has lost its place: it has no share of eventual limits"
                ),
            }
        }
    }

    /// Logs failures that an operator can fix and that no other log line reports.
    fn log_failure(&self, error: RedisError) {
        let is_reported_here =
            matches!(error, RedisError::WrongType | RedisError::BadReply | RedisError::Misconfigured);
        if is_reported_here && let Some(suppressed) = self.failure_log.allow(Clock::System.now()) {
            let key = String::from_utf8_lossy(&self.key);
            tracing::warn!(%key, %error, suppressed, "cannot register this replica: it has no share of eventual limits, and replicas are not counted");
        }
    }
}
