//! Heartbeats of Envoys, shared between replicas through a sorted set in Redis.
//!
//! Each replica tells what it heard since its last call, and learns which holders no replica heard for the timeout, by
//! the clock of Redis. Scripts that look for dead holders get the list as an argument, because the set has a hash slot
//! of its own. Without an answer, the last list stays: a holder that died meanwhile keeps its slots for longer.
//!
//! Decides: how often replicas exchange what they heard of Envoys; whose `TOLLKEEPER_HOLDER_TIMEOUT` counts.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use super::calls::RedisCallSender;
use super::key;
use super::script::{holders_script, put_time};
use crate::base::clock::to_micros;
use crate::limit::slot::HolderId;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::{Reply, reply_bytes};
use crate::telemetry::log_throttle::LogThrottle;

/// Calls in the time of silence after which a holder is dead.
const CALLS_PER_HOLDER_TIMEOUT: u32 = 6;
/// Shortest time between two calls.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Upper bound on the wait for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Task that exchanges heartbeats until it is dropped.
#[derive(Debug)]
pub(super) struct HolderExchange(AbortHandle);

impl Drop for HolderExchange {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl HolderExchange {
    /// Starts the task. Must be called within a tokio runtime.
    pub(super) fn start(calls: &Arc<RedisCallSender>, deployment: &Arc<Deployment>, prefix: &str) -> Self {
        let (calls, deployment, key) = (Arc::clone(calls), Arc::clone(deployment), holder_table_key(prefix));
        calls.fallback.slot_holders().set_shared_dead_holders(std::iter::empty(), calls.clock.now());
        let exchange = async move {
            static FAILURE_LOG: LogThrottle = LogThrottle::every(LOG_INTERVAL);
            loop {
                let holders = calls.fallback.slot_holders();
                // Without holders there is nothing to learn.
                if !holders.is_empty()
                    && let Err(error) = exchange_heartbeats(&calls, &deployment, &key).await
                    && let Some(suppressed) = FAILURE_LOG.allow(calls.clock.now())
                {
                    tracing::warn!(%error, suppressed, "heartbeats of envoys that hold slots are not shared");
                }
                sleep((holders.timeout() / CALLS_PER_HOLDER_TIMEOUT).max(MIN_INTERVAL)).await;
            }
        };
        Self(tokio::spawn(exchange).abort_handle())
    }
}

/// Key of the table. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
fn holder_table_key(prefix: &str) -> Bytes {
    let mut key = key::key_head(prefix);
    key.extend_from_slice(b"holders}");
    key.freeze()
}

async fn exchange_heartbeats(calls: &RedisCallSender, deployment: &Deployment, key: &Bytes) -> Result<(), RedisError> {
    let holders = calls.fallback.slot_holders();
    let asked = calls.clock.now();
    let heartbeats = holders.take_heartbeats(asked);
    let mut argument = BytesMut::with_capacity(16 + 24 * heartbeats.len());
    put_time(&mut argument, None);
    argument.put_u64_le(to_micros(holders.timeout()));
    for heartbeat in &heartbeats {
        argument.put_u64_le(heartbeat.id.0);
        argument.put_u64_le(heartbeat.age_us);
        argument.put_u64_le(heartbeat.has_heartbeats.into());
    }
    let script = holders_script();
    let words: [&[u8]; 5] = [b"EVAL", script.text.as_bytes(), b"1", key, &argument];
    let called = deployment.call_key_unrecorded(key, &words, Instant::now() + REPLY_TIMEOUT).await;
    let dead = called.and_then(|reply| decode_dead_holders(&reply).ok_or(RedisError::BadReply));
    match dead {
        Ok(dead) => {
            holders.set_shared_dead_holders(dead.into_iter(), asked);
            Ok(())
        }
        Err(error) => {
            holders.put_back_heartbeats(&heartbeats);
            Err(error)
        }
    }
}

fn decode_dead_holders(reply: &Reply) -> Option<Vec<HolderId>> {
    let read = |reply: &Reply| Some(HolderId(u64::from_le_bytes(*reply_bytes(reply)?.first_chunk()?)));
    let Reply::Array(holders) = reply else { return None };
    holders.iter().map(read).collect()
}
