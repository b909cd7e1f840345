//! What keeps a process's claim alive: it asks Redis every ten seconds, as long as the store is there.
//!
//! Nobody waits for it, and whether it succeeds says nothing about a server: a failure makes shares lapse, and opens no
//! breaker. The script is always sent as its text; so seldom, that costs nothing, and no server has to know it.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::Replicas;
use super::claim::{self, ClaimAction, Owner, Reply};
use crate::clock::Clock;
use crate::redis::deployment::Deployment;
use crate::redis::error::RedisError;
use crate::redis::hash_slot::hash_slot;
use crate::redis::redirects::Redirects;
use crate::redis::reply::bytes;
use crate::settings::choices::KeyFormat;
use crate::store::fallback::ReplicaCount;
use crate::store::redis::Redis;
use crate::store::redis::script;
use crate::telemetry::log_throttle::LogThrottle;

/// Between an answer and the next question.
const EVERY: Duration = Duration::from_secs(10);
/// Between a failure and the next question.
const AGAIN: Duration = Duration::from_secs(1);
/// The longest that an answer is waited for.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often the same is said.
const SAID: Duration = Duration::from_secs(60);

/// Keeps a claim alive, once it is started, until it is dropped.
#[derive(Debug)]
pub(in crate::store::redis) struct Heartbeat {
    body: Arc<Body>,
    beating: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Body {
    replicas: Replicas,
    /// Rung to have it ask before its time.
    sooner: Notify,
    route: Arc<Deployment>,
    key: Bytes,
    owner: Owner,
    /// Whom to tell how many are alive.
    sharers: Option<ReplicaCount>,
    disagreements: LogThrottle,
    failures: LogThrottle,
}

/// The store among those of other processes.
impl Redis {
    /// What is known of this process's slot, and of the others.
    pub fn replicas(&self) -> &Replicas {
        self.shared.heartbeat.replicas()
    }

    /// Claims a slot, now and from then on, and counts who else does; by scripts, so only where they count all there
    /// is. To be called within a tokio runtime. Called again, it asks at once.
    pub fn claim_slot(&self) {
        if self.shared.format == KeyFormat::Tollkeeper {
            self.shared.heartbeat.start();
        }
    }

    /// Ends the claim of a slot, because the process ends; takes half a second at most.
    pub async fn give_up_slot(&self) {
        self.shared.heartbeat.stop().await;
    }
}

impl Heartbeat {
    /// One that does not beat yet, for a claim on one of so many slots beside the counters of `route`. Where there are
    /// `sharers`, they get to know how many processes are alive.
    pub(in crate::store::redis) fn new(
        slots: NonZeroU32,
        route: &Arc<Deployment>,
        prefix: &str,
        sharers: Option<ReplicaCount>,
    ) -> Self {
        let body = Body {
            replicas: Replicas::new(slots),
            sooner: Notify::new(),
            route: Arc::clone(route),
            key: claim::key(prefix),
            owner: Owner::random(),
            sharers,
            disagreements: LogThrottle::every(SAID),
            failures: LogThrottle::every(SAID),
        };
        Self { body: Arc::new(body), beating: Mutex::default() }
    }

    /// What it knows.
    pub(in crate::store::redis) fn replicas(&self) -> &Replicas {
        &self.body.replicas
    }

    /// Asks at once, and from then on. To be called within a tokio runtime.
    pub(in crate::store::redis) fn start(&self) {
        let mut beating = self.beating.lock().unwrap_or_else(PoisonError::into_inner);
        if beating.is_some() {
            self.body.sooner.notify_one();
        } else {
            let body = Arc::clone(&self.body);
            *beating = Some(tokio::spawn(async move { body.beat().await }));
        }
    }

    /// Ends the claim, if it beats: the slot is free from now on. Takes as long as an answer is waited for at most.
    pub(in crate::store::redis) async fn stop(&self) {
        let beating = self.beating.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(beating) = beating {
            beating.abort();
            // Once it has ended, no answer is taken note of.
            let _ = beating.await;
            self.body.replicas.let_go();
            // Without an answer the claim ends by itself.
            let _ = self.body.ask(ClaimAction::Release).await;
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        let beating = self.beating.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(beating) = beating {
            beating.abort();
        }
    }
}

impl Body {
    async fn beat(&self) {
        loop {
            let sent = Instant::now();
            let pause = match self.ask(ClaimAction::Claim).await {
                Ok(reply) => {
                    self.heard(&reply, sent);
                    EVERY
                }
                Err(error) => {
                    self.failed(error);
                    AGAIN
                }
            };
            let _ = timeout(pause, self.sooner.notified()).await;
        }
    }

    async fn ask(&self, wish: ClaimAction) -> Result<Reply, RedisError> {
        let until = Instant::now() + PATIENCE;
        let argument = claim::argument(self.owner, self.replicas.slots().get(), wish, None);
        let script = script::compose::replicas_script();
        let words: [&[u8]; 5] = [b"EVAL", script.text.as_bytes(), b"1", &self.key, &argument];
        let slot = || hash_slot(&self.key);
        let mut redirects = Redirects::start(&self.route, slot, until).await?;
        let reply = loop {
            match redirects.node.call_unrecorded(&words, redirects.asking, until).await {
                Ok(reply) => break reply,
                Err(refused) => redirects.follow(refused, slot)?,
            }
        };
        bytes(&reply).and_then(|reply| claim::read(reply).ok()).ok_or(RedisError::BadReply)
    }

    fn heard(&self, reply: &Reply, sent: Instant) {
        let had = self.replicas.slot();
        self.replicas.heard(reply, sent, Instant::now());
        if let (Some(sharers), Some(live)) = (&self.sharers, NonZeroU32::new(reply.live)) {
            sharers.set(live);
        }
        let ours = self.replicas.slots().get();
        if reply.slots != ours {
            if let Some(suppressed) = self.disagreements.allow(Clock::System.now()) {
                tracing::warn!(
                    ours,
                    in_force = reply.slots,
                    suppressed,
                    "TOLLKEEPER_MAX_REPLICAS is {} in replicas that run and {ours} here: until they have ended, no share of \
                     an eventual limit is used here",
                    reply.slots
                );
            }
        } else if reply.slot != had {
            tracing::info!(slot = reply.slot, live = reply.live, "this replica's slot has changed");
        }
    }

    /// What ails a server is said elsewhere; here is what somebody has to mend and nothing else needs.
    fn failed(&self, error: RedisError) {
        let is_ours = matches!(error, RedisError::WrongType | RedisError::BadReply | RedisError::Misconfigured);
        if is_ours && let Some(suppressed) = self.failures.allow(Clock::System.now()) {
            let key = String::from_utf8_lossy(&self.key);
            tracing::warn!(%key, %error, suppressed, "no replica slot can be claimed, and replicas are not counted");
        }
    }
}
