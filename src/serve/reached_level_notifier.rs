//! Tells the levels of `notify` that keys reached: in the decision log, and in the log of the process.
//!
//! Replicas that share a Redis tell each level of a key once in a period: the first one sets a key with NX, which
//! expires with the period. If Redis does not answer, the level is told all the same, as `unconfirmed`.
//!
//! Decides: which replica tells a reached level, and what happens if Redis fails.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::base::clock::Clock;
use crate::decide::reached_levels::{LevelOutcome, ReachedLevel};
use crate::serve::grpc::service::RateLimitService;
use crate::serve::level_webhook::LevelWebhook;
use crate::settings::store::StoreSettings;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::key_connection::KeyOwnerConnection;
use crate::store::client::redis::resp::Reply;
use crate::telemetry::log_throttle::LogThrottle;

/// Upper bound on the wait for Redis.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of tries of Redis for a level.
const MAX_TRIES: u32 = 3;
/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(500);
/// Time for which Redis is not asked after that many tries failed, so that levels do not wait for each other.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Interval of the line that tells a level.
const LEVEL_LOG_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which Redis keeps what was told after the end of the period: clocks of replicas differ.
const KEPT_AFTER_PERIOD_MS: u64 = 60_000;
/// Interval of the warning that Redis fails.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Task that tells reached levels.
#[derive(Debug)]
pub struct ReachedLevelNotifier {
    /// The Redis of the counters, and the start of keys there; `None`: replicas share nothing.
    redis: Option<(KeyOwnerConnection, String)>,
    service: Arc<RateLimitService>,
    webhook: Option<LevelWebhook>,
    /// Time until which Redis is not asked.
    paused_until: Option<Instant>,
}

impl ReachedLevelNotifier {
    /// Creates the task; it connects to Redis with the first level. Needs a tokio runtime.
    pub fn new(service: Arc<RateLimitService>, store: &StoreSettings, webhook: Option<LevelWebhook>) -> Self {
        let redis = match store {
            StoreSettings::Redis(settings) => {
                let prefix = format!("{}tk1:{{reached_levels}}:", settings.key_prefix);
                Some((KeyOwnerConnection::start(&settings.main, prefix.as_bytes()), prefix))
            }
            StoreSettings::Memory | StoreSettings::Memcache(_) => None,
        };
        Self { redis, service, webhook, paused_until: None }
    }

    /// Tells reached levels until the decisions end.
    pub async fn tell_all(mut self, mut reached: mpsc::Receiver<ReachedLevel>) {
        while let Some(level) = reached.recv().await {
            match self.claim(&level).await {
                Claim::Won => self.tell(&level, false),
                Claim::Lost => self.count(LevelOutcome::ToldElsewhere),
                Claim::Unknown => self.tell(&level, true),
            }
        }
    }

    fn tell(&self, level: &ReachedLevel, is_unconfirmed: bool) {
        static LEVEL_LOG: LogThrottle = LogThrottle::every(LEVEL_LOG_INTERVAL);
        let line = line_of(level, is_unconfirmed);
        if let Some(log) = &self.service.decider.log {
            log.write_line(&line);
        }
        if let Some(webhook) = &self.webhook {
            webhook.send(&level.id, &line);
        }
        if let Some(suppressed) = LEVEL_LOG.allow(Clock::System.now()) {
            tracing::info!(unconfirmed = is_unconfirmed, suppressed, "limit used up to a level: {}", level.text);
        }
        self.count(if is_unconfirmed { LevelOutcome::Unconfirmed } else { LevelOutcome::Told });
    }

    fn count(&self, outcome: LevelOutcome) {
        self.service.decider.reached_levels.iter().for_each(|levels| levels.count(outcome));
    }

    /// Asks Redis whether another replica has told the level in this period.
    async fn claim(&mut self, level: &ReachedLevel) -> Claim {
        static FAILURE_LOG: LogThrottle = LogThrottle::every(LOG_INTERVAL);
        let Some((connection, prefix)) = &mut self.redis else { return Claim::Won };
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return Claim::Unknown;
        }
        let key = format!("{prefix}{}", level.id);
        let left_ms = level.until.since_us(Clock::System.now()) / 1000;
        let life_ms = (left_ms + KEPT_AFTER_PERIOD_MS).to_string();
        let words: [&[u8]; 6] = [b"SET", key.as_bytes(), b"1", b"NX", b"PX", life_ms.as_bytes()];
        // The command may have run without a reply: then the key that the next try finds may be this process's own.
        let mut may_have_run = false;
        for number in 1..=MAX_TRIES {
            match connection.call(&words, REPLY_TIMEOUT).await {
                Ok(Reply::Null) if may_have_run => return Claim::Unknown,
                Ok(Reply::Null) => return Claim::Lost,
                Ok(_) => return Claim::Won,
                Err(error) => {
                    may_have_run |= matches!(error.kind, RedisError::Timeout | RedisError::Broken);
                    if let Some(suppressed) = FAILURE_LOG.allow(Clock::System.now()) {
                        let what =
                            "cannot ask Redis whether another replica told a level of `notify`: it may be told twice";
                        tracing::warn!(%error, suppressed, "{what}");
                    }
                }
            }
            if number < MAX_TRIES {
                sleep(PAUSE).await;
            }
        }
        self.paused_until = Some(Instant::now() + PAUSE_AFTER_FAILURE);
        Claim::Unknown
    }
}

/// Who tells a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    /// This replica.
    Won,
    /// Another one, or this one before.
    Lost,
    /// Redis did not answer.
    Unknown,
}

/// Line of the decision log, which says if Redis did not answer.
fn line_of(level: &ReachedLevel, is_unconfirmed: bool) -> Vec<u8> {
    let mut line = level.line.clone();
    if is_unconfirmed {
        line.truncate(line.len() - b"}\n".len());
        line.extend_from_slice(b",\"unconfirmed\":true}\n");
    }
    line
}
