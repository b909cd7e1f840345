//! Resets of global limits: `/reset` in one region reaches all.
//!
//! First the counter in the global Redis forgets all hits and takes a new *epoch*, the time of the reset. Then the
//! reset is added to a list in the global Redis, and only then the region's own counters are deleted. Each process
//! reads the list every second and lets its region's counters follow; a counter that has the epoch, or began later,
//! stays as it is, so repeating a reset changes nothing. A region that was cut off reads the list when it is back,
//! and one that missed more than the list holds follows with its next grant, which carries the epoch.
//!
//! Decides: how `/reset` reaches other regions.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use tokio::time::{Instant, sleep_until};

use super::calls::{BreakerRecording, GLOBAL_REDIS_TIMEOUT, REGION_REDIS_TIMEOUT, SingleKeyScriptCall};
use super::grant_encoding::{self, GlobalBucketAction, GlobalWindowAction};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::Algorithm;
use crate::limit::algorithm::global_bucket::GlobalBucketParameters;
use crate::limit::algorithm::global_window::GlobalWindowParameters;
use crate::limit::algorithm::stored_state::{MalformedReply, ReplyReader};
use crate::store::client::redis::connection::Script;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::{reply_bytes, reply_integer};
use crate::store::redis::key::{self, global_key, is_counted_in_region};
use crate::store::redis::script::{
    global_bucket_script, global_resets_script, global_window_script, put_time, region_reset_script,
};

/// Time from one read of the list to the next.
const READ_INTERVAL: Duration = Duration::from_secs(1);
/// Upper bound on counters that are reset at a time.
const MAX_RESETS_IN_FLIGHT: usize = 32;
/// Upper bound on the period of a counter in the list, in milliseconds.
const MAX_PERIOD_MS: u64 = 1 << 44;

/// Counter of a region that an operator resets.
#[derive(Clone, Debug)]
pub(crate) struct RegionCounterToReset {
    /// Key in the region's Redis.
    pub(crate) key: Bytes,
    pub(crate) limit: Limit,
}

/// Resets of global limits, and the task that follows those of other regions.
#[derive(Clone, Debug)]
pub(super) struct GlobalResetClient {
    global: Arc<Deployment>,
    region: Arc<Deployment>,
    list_key: Bytes,
    /// Start of this region's keys.
    key_head: Bytes,
}

impl GlobalResetClient {
    /// Creates the resets of a region; `prefix` is `CACHE_KEY_PREFIX`.
    pub(super) fn new(global: Arc<Deployment>, region: Arc<Deployment>, prefix: &str) -> Self {
        Self { global, region, list_key: resets_key(prefix), key_head: key::key_head(prefix).freeze() }
    }

    /// Resets counters in the global Redis, and tells all regions.
    ///
    /// # Errors
    /// The global Redis failed: some counters may be reset there, and no region may have been told.
    pub(super) async fn reset(&self, counters: &[RegionCounterToReset], deadline: Instant) -> Result<(), RedisError> {
        let mut newest = Time::default();
        for counter in counters {
            newest = newest.max(self.reset_globally(counter, deadline).await?);
        }
        let listed = |RegionCounterToReset { key, limit }: &RegionCounterToReset| CounterToReset {
            key: key.clone(),
            period_ms: limit.period_us() / 1000,
        };
        let listed: Vec<CounterToReset> = counters.iter().map(listed).collect();
        if !listed.is_empty() {
            self.call_reset_list(&encode_resets_addition(newest, &listed, None), deadline).await?;
        }
        Ok(())
    }

    /// Resets the counter of all regions, and returns its epoch.
    async fn reset_globally(&self, counter: &RegionCounterToReset, deadline: Instant) -> Result<Time, RedisError> {
        let algorithm = counter.limit.algorithm();
        let key = global_key(&counter.key);
        if algorithm == Algorithm::TokenBucket {
            let pool = GlobalBucketParameters::from_limit(&counter.limit);
            let argument = grant_encoding::encode_global_bucket_call(pool, GlobalBucketAction::Reset, None);
            let reply = self.run_global_script(global_bucket_script(), &key, &argument, deadline).await?;
            return grant_encoding::decode_global_bucket_reply(&reply)
                .map(|reply| reply.epoch)
                .map_err(|_| RedisError::BadReply);
        }
        let argument = grant_encoding::encode_global_window_call(
            GlobalWindowParameters::from_limit(&counter.limit),
            GlobalWindowAction::Reset,
            None,
        );
        let reply = self.run_global_script(global_window_script(), &key, &argument, deadline).await?;
        grant_encoding::decode_global_window_reply(&reply).map(|reply| reply.epoch).map_err(|_| RedisError::BadReply)
    }

    async fn call_reset_list(&self, argument: &[u8], deadline: Instant) -> Result<ResetsReply, RedisError> {
        let reply = self.run_global_script(global_resets_script(), &self.list_key, argument, deadline).await?;
        decode_resets_reply(&reply).map_err(|_| RedisError::BadReply)
    }

    async fn run_global_script(
        &self,
        script: &'static Script,
        key: &[u8],
        argument: &[u8],
        deadline: Instant,
    ) -> Result<Bytes, RedisError> {
        let reply = SingleKeyScriptCall::new(script, key, argument)
            .run(&self.global, BreakerRecording::Recorded, deadline)
            .await?;
        reply_bytes(&reply.reply).map(Bytes::copy_from_slice).ok_or(RedisError::BadReply)
    }

    /// Applies the resets of all regions to this region's counters; runs until it is dropped.
    pub(super) async fn apply_resets_repeatedly(&self) {
        let mut followed = Time::default();
        loop {
            let next = Instant::now() + READ_INTERVAL;
            match self.apply_resets_after(followed).await {
                Ok(newest) => followed = newest,
                Err(error) => tracing::debug!(%error, "resets of other regions could not be followed"),
            }
            sleep_until(next).await;
        }
    }

    /// Applies the resets after a time, and returns the time of the newest.
    async fn apply_resets_after(&self, followed: Time) -> Result<Time, RedisError> {
        let argument = encode_resets_read(followed, None);
        let ResetsReply { newest, resets, .. } =
            self.call_reset_list(&argument, Instant::now() + GLOBAL_REDIS_TIMEOUT).await?;
        let own = resets.into_iter().filter(|ListedReset { counter, .. }| {
            counter.period_ms <= MAX_PERIOD_MS && is_counted_in_region(&self.key_head, &counter.key)
        });
        let outcomes: Vec<Result<(), RedisError>> = stream::iter(own)
            .map(|reset| self.apply_one_reset(reset))
            .buffer_unordered(MAX_RESETS_IN_FLIGHT)
            .collect()
            .await;
        outcomes.into_iter().collect::<Result<(), RedisError>>()?;
        Ok(newest)
    }

    async fn apply_one_reset(&self, ListedReset { time, counter }: ListedReset) -> Result<(), RedisError> {
        let argument = grant_encoding::encode_counter_reset(counter.period_ms, time);
        let call = SingleKeyScriptCall::new(region_reset_script(), &counter.key, &argument);
        let reply = call.run(&self.region, BreakerRecording::Unrecorded, Instant::now() + REGION_REDIS_TIMEOUT).await?;
        reply_integer(&reply.reply).map(|_| ()).ok_or(RedisError::BadReply)
    }
}

/// Counter of a region that follows a reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterToReset {
    /// Key of the counter, in all regions.
    pub key: Bytes,
    /// Its period in milliseconds.
    pub period_ms: u64,
}

/// Reset in the list of the global Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedReset {
    /// Time of the reset, by the global Redis.
    pub time: Time,
    /// The counter.
    pub counter: CounterToReset,
}

/// Reply of `lua/regions/global_resets.lua`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetsReply {
    /// Time of the global Redis.
    pub now: Time,
    /// Time of the newest reset; 0: there is none.
    pub newest: Time,
    /// Resets that were asked for, newest first.
    pub resets: Vec<ListedReset>,
}

/// Returns the key of the list. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
pub fn resets_key(prefix: &str) -> Bytes {
    let mut key = key::key_head(prefix);
    key.extend_from_slice(b"resets}");
    key.freeze()
}

/// Encodes a read of the resets after a time, at `now`, or at the server's own time if `now` is `None`.
pub fn encode_resets_read(after: Time, now: Option<Time>) -> Bytes {
    begin_resets_argument(after, now).freeze()
}

/// Encodes the addition of counters that were reset at a time, at `now`, or at the server's own time if `now` is
/// `None`.
pub fn encode_resets_addition(time: Time, counters: &[CounterToReset], now: Option<Time>) -> Bytes {
    let mut argument = begin_resets_argument(time, now);
    for CounterToReset { key, period_ms } in counters {
        argument.put_u64_le(*period_ms);
        argument.put_u64_le(key.len() as u64);
        argument.put_slice(key);
    }
    argument.freeze()
}

/// Decodes the reply of `lua/regions/global_resets.lua`.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_resets_reply(reply: &[u8]) -> Result<ResetsReply, MalformedReply> {
    let (times, mut rest) = reply.split_at_checked(16).ok_or(MalformedReply)?;
    let mut reader = ReplyReader::new(times);
    let (now, newest, mut resets) = (reader.read_time()?, reader.read_time()?, Vec::new());
    while !rest.is_empty() {
        let (numbers, after) = rest.split_at_checked(24).ok_or(MalformedReply)?;
        let mut reader = ReplyReader::new(numbers);
        let (time, period_ms, length) = (reader.read_time()?, reader.read_number()?, reader.read_number()?);
        let length = usize::try_from(length).map_err(|_| MalformedReply)?;
        let (key, after) = after.split_at_checked(length).ok_or(MalformedReply)?;
        resets.push(ListedReset { time, counter: CounterToReset { key: Bytes::copy_from_slice(key), period_ms } });
        rest = after;
    }
    Ok(ResetsReply { now, newest, resets })
}

fn begin_resets_argument(time: Time, now: Option<Time>) -> BytesMut {
    let mut argument = BytesMut::with_capacity(128);
    put_time(&mut argument, now);
    argument.put_u64_le(time.as_micros());
    argument
}
