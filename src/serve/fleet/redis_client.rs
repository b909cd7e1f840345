//! Exchange of summaries through Redis.
//!
//! A replica writes its summary under a key of its own with a lifetime, and its name to an index. All keys are in one
//! hash slot and the commands are plain, so any server, cluster or proxy will do. The connections are apart from those
//! of the counters: whatever another user of this Redis writes here, no decision waits for it. Which replica is silent
//! is decided in `findings`.
//!
//! Decides: how often a replica publishes, when it is gone, how many replicas there may be.
//! Decides: how long resets are kept (`MAX_KEPT_RESETS`, `RESETS_LIFETIME_MS`).

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::Instant;

use super::summary::MAX_SUMMARY_BYTES;
use crate::base::clock::{Time, shorten_in_tests};
use crate::settings::redis::deployment::DeploymentSettings;
use crate::store::client::redis::connect::ConnectOptions;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::deployment_context::DeploymentOptions;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::health_check::{CommandWords, HealthCheck};
use crate::store::client::redis::resp::{Reply, reply_bytes, time_in_reply};

/// Interval between two summaries of a replica.
pub(super) const PUBLISH_INTERVAL: Duration = Duration::from_secs(5);
/// Lifetime of a published summary; a replica that publishes no other is gone after this time.
pub(super) const SUMMARY_LIFETIME: Duration = Duration::from_secs(30);
/// Maximum number of replicas that are read, those that published last.
pub(super) const MAX_REPLICAS: usize = 1000;
/// Number of summaries that are read at a time.
const SUMMARIES_PER_READ: usize = 16;
/// Upper bound on each call. Only the fleet waits for it.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Approximate number of resets that are kept.
const MAX_KEPT_RESETS: &[u8] = b"1000";
/// Time for which resets are kept after the last one, in milliseconds.
const RESETS_LIFETIME_MS: &[u8] = b"60000";
/// Maximum length of the id of a process in bytes.
const MAX_REPLICA_ID_BYTES: usize = 64;

/// Client of the Redis keys through which replicas exchange summaries and resets.
#[derive(Debug)]
pub(super) struct FleetRedisClient {
    client: Deployment,
    keys: FleetRedisKeys,
}

/// Keys in Redis, in one hash slot.
#[derive(Clone, Debug)]
pub(super) struct FleetRedisKeys {
    index: Bytes,
    pub(super) resets: Bytes,
    summary_prefix: Vec<u8>,
}

/// Time of Redis when it answered, and how uncertain that is.
#[derive(Clone, Copy, Debug)]
pub(super) struct RedisTime {
    /// Time of Redis.
    pub(super) redis: Time,
    /// Half of the round trip.
    pub(super) uncertainty: Duration,
}

impl FleetRedisKeys {
    /// Keys under `CACHE_KEY_PREFIX`.
    pub(super) fn new(prefix: &str) -> Self {
        let key = |name: &str| Bytes::from(format!("{prefix}tk1:{{fleet}}:{name}"));
        Self { index: key("replicas"), resets: key("resets"), summary_prefix: key("replica:").to_vec() }
    }

    fn summary_key(&self, incarnation: &[u8]) -> Vec<u8> {
        [&self.summary_prefix, incarnation].concat()
    }
}

impl FleetRedisClient {
    /// Starts to connect. Needs a tokio runtime.
    pub(super) fn start(settings: &DeploymentSettings, prefix: &str) -> Self {
        let connect = ConnectOptions::for_noncritical_servers(settings, "`/fleet` lacks this replica");
        let keys = FleetRedisKeys::new(prefix);
        let check = ReplicaIndexHealthCheck { index: keys.index.clone(), auth_setting: connect.auth_setting() };
        let options = DeploymentOptions {
            connections: 1,
            call_timeout: CALL_TIMEOUT,
            optional_commands: None,
            health_check: Box::new(check),
            connect,
        };
        Self { client: Deployment::start(settings.topology.clone(), options), keys }
    }

    /// Reads the clock of the server that has the keys.
    ///
    /// # Errors
    /// Redis failed.
    pub(super) async fn read_redis_time(&self) -> Result<RedisTime, RedisError> {
        let sent = Instant::now();
        let reply = self.send_command(&[b"TIME"]).await?;
        let uncertainty = sent.elapsed() / 2;
        let redis = time_in_reply(&reply).ok_or(RedisError::BadReply)?;
        Ok(RedisTime { redis, uncertainty })
    }

    /// Publishes the summary of the process `incarnation`; `now` is the time of Redis.
    ///
    /// # Errors
    /// Redis failed.
    pub(super) async fn publish_summary(&self, incarnation: &str, summary: &[u8], now: Time) -> Result<(), RedisError> {
        let key = self.keys.summary_key(incarnation.as_bytes());
        let lifetime = shorten_in_tests(SUMMARY_LIFETIME).as_millis().to_string();
        self.send_command(&[b"SET", &key, summary, b"PX", lifetime.as_bytes()]).await?;
        let score = unix_seconds(now).to_string();
        self.send_command(&[b"ZADD", &self.keys.index, score.as_bytes(), incarnation.as_bytes()]).await?;
        Ok(())
    }

    /// Clears the index of replicas whose summaries have expired; `now` is the time of Redis.
    ///
    /// # Errors
    /// Redis failed.
    pub(super) async fn remove_outdated_replicas(&self, now: Time) -> Result<(), RedisError> {
        let oldest = latest_expired_publish_second(now).to_string();
        self.send_command(&[b"ZREMRANGEBYSCORE", &self.keys.index, b"-inf", oldest.as_bytes()]).await?;
        Ok(())
    }

    /// Removes all that is published of the process `incarnation`, which stops cleanly.
    ///
    /// # Errors
    /// Redis failed.
    pub(super) async fn withdraw_summary(&self, incarnation: &str) -> Result<(), RedisError> {
        self.send_command(&[b"ZREM", &self.keys.index, incarnation.as_bytes()]).await?;
        self.send_command(&[b"UNLINK", &self.keys.summary_key(incarnation.as_bytes())]).await?;
        Ok(())
    }

    /// Passes the published summaries to `read`, each with the id that it is published under; `now` is the time of
    /// Redis. Returns the number of replicas beyond [`MAX_REPLICAS`], as far as Redis tells.
    ///
    /// # Errors
    /// Redis failed; some summaries may have been read.
    pub(super) async fn read_all_summaries(
        &self,
        now: Time,
        mut read: impl FnMut(&str, &[u8]),
    ) -> Result<usize, RedisError> {
        // Scores far ahead are not those of replicas.
        let newest = unix_seconds(now).saturating_add(60).to_string();
        let oldest = format!("({}", latest_expired_publish_second(now));
        let limit = (MAX_REPLICAS + 1).to_string();
        let words: [&[u8]; 7] = [
            b"ZREVRANGEBYSCORE",
            &self.keys.index,
            newest.as_bytes(),
            oldest.as_bytes(),
            b"LIMIT",
            b"0",
            limit.as_bytes(),
        ];
        let reply = self.send_command(&words).await?;
        let Reply::Array(members) = &reply else { return Err(RedisError::BadReply) };
        let ids: Vec<&str> = members
            .iter()
            .filter_map(|member| std::str::from_utf8(reply_bytes(member)?).ok())
            .filter(|id| id.len() <= MAX_REPLICA_ID_BYTES)
            .collect();
        let read_ids = &ids[..ids.len().min(MAX_REPLICAS)];
        for chunk in read_ids.chunks(SUMMARIES_PER_READ) {
            for (id, summary) in chunk.iter().zip(join_all(chunk.iter().map(|id| self.read_summary(id))).await) {
                let summary = match summary {
                    // Another program wrote under this name.
                    Err(RedisError::WrongType) => Reply::BulkString(Bytes::from_static(b"-")),
                    summary => summary?,
                };
                if let Some(summary) = reply_bytes(&summary).filter(|summary| !summary.is_empty()) {
                    read(id, summary);
                }
            }
        }
        Ok(ids.len() - read_ids.len())
    }

    /// Reads a summary, up to one byte beyond the maximum size, so that a longer one is noticed.
    async fn read_summary(&self, id: &str) -> Result<Reply, RedisError> {
        let key = self.keys.summary_key(id.as_bytes());
        let last = MAX_SUMMARY_BYTES.to_string();
        self.send_command(&[b"GETRANGE", &key, b"0", last.as_bytes()]).await
    }

    /// Tells all replicas about a reset.
    ///
    /// # Errors
    /// Redis failed.
    pub(super) async fn announce_counter_reset(&self, sealed: &[u8]) -> Result<(), RedisError> {
        let key = &self.keys.resets;
        self.send_command(&[b"XADD", key, b"MAXLEN", b"~", MAX_KEPT_RESETS, b"*", b"reset", sealed]).await?;
        self.send_command(&[b"PEXPIRE", key, RESETS_LIFETIME_MS]).await?;
        Ok(())
    }

    /// Sends a command to the server that has the keys.
    async fn send_command(&self, words: &[&[u8]]) -> Result<Reply, RedisError> {
        self.client.call_key(&self.keys.index, words, Instant::now() + CALL_TIMEOUT).await
    }

    /// Text of a configuration error, free of secrets; `None` without one.
    pub(super) fn configuration_error(&self) -> Option<String> {
        self.client.misconfiguration().map(|text| text.to_string())
    }
}

const fn unix_seconds(time: Time) -> u64 {
    time.as_micros() / 1_000_000
}

/// Latest second at which a summary that has expired by now can have been published.
fn latest_expired_publish_second(now: Time) -> u64 {
    unix_seconds(now).saturating_sub(shorten_in_tests(SUMMARY_LIFETIME).as_secs())
}

/// Health check of a server: writes to the index of replicas without a change.
#[derive(Debug)]
struct ReplicaIndexHealthCheck {
    index: Bytes,
    auth_setting: &'static str,
}

impl HealthCheck for ReplicaIndexHealthCheck {
    /// Other nodes of a cluster redirect the command, which is an answer too.
    fn commands(&self, _hash_tag: u32) -> Vec<CommandWords> {
        let word = Bytes::from_static;
        vec![vec![word(b"ZREMRANGEBYSCORE"), self.index.clone(), word(b"-inf"), word(b"-inf")]]
    }

    fn advice(&self, error: RedisError, text: &str) -> String {
        match error {
            RedisError::Unauthenticated => format!("{text} (check {})", self.auth_setting),
            RedisError::Misconfigured => {
                let key = String::from_utf8_lossy(&self.index);
                format!(
                    "{text} (to publish under {key} the user needs the commands of docs/redis.md, or set \
                         TOLLKEEPER_FLEET=false)"
                )
            }
            _ => format!("{text} ({})", error.advice()),
        }
    }
}
