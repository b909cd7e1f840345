//! Heartbeats of Envoys, shared between replicas through a sorted set in Redis.
//!
//! Each replica tells what it heard since its last call, and learns which holders no replica heard for the timeout, by
//! the clock of Redis. The set is in the slot of its own key, so scripts that look for dead holders get their list as an
//! argument. Without an answer, the last list stays: a holder that died meanwhile keeps its slots for longer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::Redis;
use super::calls::RedisCallSender;
use super::key;
use super::script::{holders_script, put_time};
use crate::base::clock::{Clock, Time, to_micros};
use crate::limit::charge::Charge;
use crate::limit::slot::HolderId;
use crate::limit::slot_table::{SlotSummary, SummarizedSlot};
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::{Reply, reply_bytes};
use crate::telemetry::log_throttle::LogThrottle;

/// Calls in the time of silence after which a holder is dead.
const CALLS_PER_TIMEOUT: u32 = 6;
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
        calls.fallback.holders().set_shared_dead(std::iter::empty());
        let exchange = async move {
            static FAILURE: LogThrottle = LogThrottle::every(LOG_INTERVAL);
            loop {
                let holders = calls.fallback.holders();
                // Without holders there is nothing to learn.
                if !holders.is_empty()
                    && let Err(error) = exchange_heartbeats(&calls, &deployment, &key).await
                    && let Some(suppressed) = FAILURE.allow(Clock::System.now())
                {
                    tracing::warn!(%error, suppressed, "heartbeats of envoys that hold slots are not shared");
                }
                sleep((holders.timeout() / CALLS_PER_TIMEOUT).max(MIN_INTERVAL)).await;
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
    let holders = calls.fallback.holders();
    let heartbeats = holders.take_heartbeats(Clock::System.now());
    let mut argument = BytesMut::with_capacity(16 + 16 * heartbeats.len());
    put_time(&mut argument, None);
    argument.put_u64_le(to_micros(holders.timeout()));
    for heartbeat in &heartbeats {
        argument.put_u64_le(heartbeat.id.0);
        argument.put_u64_le(heartbeat.age_us);
    }
    let script = holders_script();
    let words: [&[u8]; 5] = [b"EVAL", script.text.as_bytes(), b"1", key, &argument];
    let called = deployment.call_key_unrecorded(key, &words, Instant::now() + REPLY_TIMEOUT).await;
    let dead = called.and_then(|reply| read_holders(&reply).ok_or(RedisError::BadReply));
    match dead {
        Ok(dead) => {
            holders.set_shared_dead(dead.into_iter());
            Ok(())
        }
        Err(error) => {
            holders.put_back_heartbeats(&heartbeats);
            Err(error)
        }
    }
}

fn read_holders(reply: &Reply) -> Option<Vec<HolderId>> {
    let read = |reply: &Reply| Some(HolderId(u64::from_le_bytes(*reply_bytes(reply)?.first_chunk()?)));
    let Reply::Array(holders) = reply else { return None };
    holders.iter().map(read).collect()
}

/// Most slots that a summary looks at.
const MAX_SUMMARIZED_SLOTS: usize = 10_000;

impl Redis {
    /// Sums up to about 10 000 slots of the concurrent limit at `index` of a charge.
    ///
    /// # Errors
    /// Redis failed, or its user may not run HSCAN.
    pub async fn summarize_slots(
        &self,
        charge: &Charge<'_>,
        index: usize,
        now: Time,
        deadline: Instant,
    ) -> Result<SlotSummary, RedisError> {
        let call = self.prepare_call(charge, self.keys.counter_id(charge, now), None, now);
        let key = call.command.keys().get(index).ok_or(RedisError::Misconfigured)?;
        let (mut cursor, mut slots) = (b"0".to_vec(), Vec::new());
        loop {
            let words: [&[u8]; 5] = [b"HSCAN", key, &cursor, b"COUNT", b"1000"];
            let reply = call.deployment.client.call_key_unrecorded(key, &words, deadline).await?;
            cursor = read_slot_page(&reply, &mut slots).ok_or(RedisError::BadReply)?;
            if cursor == b"0" || slots.len() >= MAX_SUMMARIZED_SLOTS {
                break;
            }
        }
        let holders = self.fallback().holders();
        let summary = SlotSummary::new(slots.into_iter(), now, &|holder| holders.is_dead(holder, now));
        Ok(SlotSummary { is_partial: cursor != b"0", ..summary })
    }
}

/// Appends the slots of a page of a hash that `lua/slots.lua` wrote; returns the cursor of the next one.
fn read_slot_page(reply: &Reply, slots: &mut Vec<SummarizedSlot>) -> Option<Vec<u8>> {
    let Reply::Array(parts) = reply else { return None };
    let [cursor, Reply::Array(fields)] = &**parts else { return None };
    for pair in fields.chunks_exact(2) {
        let [field, value] = pair else { return None };
        let (field, value) = (reply_bytes(field)?, reply_bytes(value)?);
        if field.len() == 16 {
            let word = |at: usize| Some(u64::from_le_bytes(*value.get(at..)?.first_chunk()?));
            let seats = u32::from_le_bytes(*value.get(24..)?.first_chunk()?);
            slots.push(SummarizedSlot { holder: HolderId(word(8)?), expires: Time::from_micros(word(16)?), seats });
        }
    }
    Some(reply_bytes(cursor)?.to_vec())
}
