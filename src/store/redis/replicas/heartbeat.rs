//! Heartbeat of this replica: renews its claim on a slot every 10 s, and learns the number of live replicas.
//!
//! No charge waits for it. A failure only lets the slot expire; it opens no breaker. The script is always sent as text,
//! because it is sent too rarely for its size to matter.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::ReplicaMembership;
use super::claim_call::{self, ClaimAction, ClaimReply, OwnerId};
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::reply_bytes;
use crate::store::fallback::ReplicaCount;
use crate::store::redis::script::replicas_script;
use crate::telemetry::log_throttle::LogThrottle;

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
    owner: OwnerId,
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
            key: claim_call::replica_registry_key(prefix),
            owner: OwnerId::random(),
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

    /// Claims a slot now and from then on; renews the claim now if it is started. Must be called within a tokio
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

    /// Stops the heartbeat and releases the slot. Takes up to 500 ms; does nothing if it is not started.
    pub(crate) async fn stop(&self) {
        let task = lock_ignoring_poison(&self.task).take();
        if let Some(task) = task {
            task.abort();
            // No reply is recorded once the task has ended.
            let _aborted = task.await;
            self.state.replicas.end_slot_use();
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
        let argument = claim_call::encode_claim_argument(self.owner, self.replicas.slot_count().get(), action, None);
        let script = replicas_script();
        let words: [&[u8]; 5] = [b"EVAL", script.text.as_bytes(), b"1", &self.key, &argument];
        let reply = self.deployment.call_key_unrecorded(&self.key, &words, deadline).await?;
        reply_bytes(&reply).and_then(|reply| claim_call::decode_claim_reply(reply).ok()).ok_or(RedisError::BadReply)
    }

    fn record_reply(&self, reply: &ClaimReply, sent: Instant) {
        let previous_slot = self.replicas.slot();
        self.replicas.record_reply(reply, sent, Instant::now());
        if let (Some(live_count), Some(live)) = (&self.live_count, NonZeroU32::new(reply.live)) {
            live_count.set_count(live);
        }
        let configured = self.replicas.slot_count().get();
        if reply.slots != configured {
            if let Some(suppressed) = self.mismatch_log.allow(Clock::System.now()) {
                tracing::warn!(
                    configured,
                    other_replicas = reply.slots,
                    suppressed,
                    "TOLLKEEPER_MAX_REPLICAS differs between replicas: {configured} here, {} in running replicas; this \
                     replica uses no share of eventual limits until they have stopped",
                    reply.slots
                );
            }
        } else if reply.slot != previous_slot {
            tracing::info!(slot = reply.slot, live = reply.live, "replica slot changed");
        }
    }

    /// Logs failures that an operator can fix and that no other log line reports.
    fn log_failure(&self, error: RedisError) {
        let is_reported_here =
            matches!(error, RedisError::WrongType | RedisError::BadReply | RedisError::Misconfigured);
        if is_reported_here && let Some(suppressed) = self.failure_log.allow(Clock::System.now()) {
            let key = String::from_utf8_lossy(&self.key);
            tracing::warn!(%key, %error, suppressed, "cannot claim a replica slot: replicas are not counted");
        }
    }
}
