//! Resets of global limits: `/reset` in one region reaches all.
//!
//! First the counter in the global Redis forgets all hits and takes a new *epoch*, the time of the reset. Then the
//! reset is added to a list in the global Redis, and only then the region's own counters are deleted. Each process
//! reads the list every second and lets its region's counters follow; a counter that has the epoch, or began later,
//! stays as it is, so repeating a reset changes nothing. A region that was cut off reads the list when it is back,
//! and one that missed more than the list holds follows with its next grant, which carries the epoch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use tokio::time::sleep_until;

use super::bucket_grants;
use super::grant_request::pool;
use super::heartbeat::GLOBAL_TIMEOUT;
use super::region_call;
use super::reset_list::{self, Reset, ResetCounter, ResetsReply, resets_key};
use super::script_call::{CallKind, KeyScript};
use super::window_grants::{self, WindowCall};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::Algorithm;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::reply::{bytes, integer};
use crate::store::client::redis::script::Script;
use crate::store::redis::key::{self, global_key, is_region_key};
use crate::store::redis::script::compose::{
    global_bucket_script, global_resets_script, global_window_script, region_reset_script,
};

/// Time from one read of the list to the next.
const INTERVAL: Duration = Duration::from_secs(1);
/// Upper bound on the reset of a region's counter.
const REGION_TIMEOUT: Duration = Duration::from_millis(500);
/// Upper bound on counters that are reset at a time.
const MAX_IN_FLIGHT: usize = 32;
/// Upper bound on the period of a counter in the list, in milliseconds.
const MAX_PERIOD_MS: u64 = 1 << 44;

/// Counter of a region that an operator resets.
#[derive(Clone, Debug)]
pub(crate) struct RegionCounter {
    /// Key in the region's Redis.
    pub(crate) key: Bytes,
    pub(crate) limit: Limit,
}

/// Resets of global limits, and the task that follows those of other regions.
#[derive(Clone, Debug)]
pub(super) struct Resets {
    global: Arc<Deployment>,
    region: Arc<Deployment>,
    list_key: Bytes,
    /// Start of this region's keys.
    key_head: Bytes,
}

impl Resets {
    /// Creates the resets of a region; `prefix` is `CACHE_KEY_PREFIX`.
    pub(super) fn new(global: Arc<Deployment>, region: Arc<Deployment>, prefix: &str) -> Self {
        Self { global, region, list_key: resets_key(prefix), key_head: key::head(prefix).freeze() }
    }

    /// Resets counters in the global Redis, and tells all regions.
    ///
    /// # Errors
    /// The global Redis failed: some counters may be reset there, and no region may have been told.
    pub(super) async fn reset(&self, counters: &[RegionCounter], deadline: Instant) -> Result<(), RedisError> {
        let mut newest = Time::default();
        for counter in counters {
            newest = newest.max(self.reset_globally(counter, deadline).await?);
        }
        let listed = |RegionCounter { key, limit }: &RegionCounter| ResetCounter {
            key: key.clone(),
            period_ms: limit.period_us() / 1000,
        };
        let listed: Vec<ResetCounter> = counters.iter().map(listed).collect();
        if !listed.is_empty() {
            self.call_list(&reset_list::encode_add(newest, &listed, None), deadline).await?;
        }
        Ok(())
    }

    /// Resets the counter of all regions, and returns its epoch.
    async fn reset_globally(&self, counter: &RegionCounter, deadline: Instant) -> Result<Time, RedisError> {
        let algorithm = counter.limit.algorithm();
        let key = global_key(&counter.key);
        if algorithm == Algorithm::TokenBucket {
            let argument = bucket_grants::encode_reset(None);
            let reply = self.call_global(global_bucket_script(), &key, &argument, deadline).await?;
            return bucket_grants::decode_reset(&reply).map(|reply| reply.epoch).map_err(|_| RedisError::BadReply);
        }
        let argument = window_grants::encode(pool(&counter.limit), WindowCall::Reset, None);
        let reply = self.call_global(global_window_script(), &key, &argument, deadline).await?;
        window_grants::decode(&reply).map(|reply| reply.epoch).map_err(|_| RedisError::BadReply)
    }

    async fn call_list(&self, argument: &[u8], deadline: Instant) -> Result<ResetsReply, RedisError> {
        let reply = self.call_global(global_resets_script(), &self.list_key, argument, deadline).await?;
        reset_list::decode(&reply).map_err(|_| RedisError::BadReply)
    }

    async fn call_global(
        &self,
        script: &'static Script,
        key: &[u8],
        argument: &[u8],
        deadline: Instant,
    ) -> Result<Bytes, RedisError> {
        let reply =
            KeyScript { script, key, argument, more: &[] }.run(&self.global, CallKind::Recorded, deadline).await?;
        bytes(&reply.reply).map(Bytes::copy_from_slice).ok_or(RedisError::BadReply)
    }

    /// Lets the region's counters follow all resets; runs until it is dropped.
    pub(super) async fn follow(&self) {
        let mut followed = Time::default();
        loop {
            let next = Instant::now() + INTERVAL;
            match self.follow_after(followed).await {
                Ok(newest) => followed = newest,
                Err(error) => tracing::debug!(%error, "resets of other regions could not be followed"),
            }
            sleep_until(next.into()).await;
        }
    }

    /// Follows the resets after a time, and returns the time of the newest.
    async fn follow_after(&self, followed: Time) -> Result<Time, RedisError> {
        let argument = reset_list::encode_read(followed, None);
        let ResetsReply { newest, resets, .. } = self.call_list(&argument, Instant::now() + GLOBAL_TIMEOUT).await?;
        let own = resets.into_iter().filter(|Reset { counter, .. }| {
            counter.period_ms <= MAX_PERIOD_MS && is_region_key(&self.key_head, &counter.key)
        });
        let outcomes: Vec<Result<(), RedisError>> =
            stream::iter(own).map(|reset| self.follow_one(reset)).buffer_unordered(MAX_IN_FLIGHT).collect().await;
        outcomes.into_iter().collect::<Result<(), RedisError>>()?;
        Ok(newest)
    }

    async fn follow_one(&self, Reset { time, counter }: Reset) -> Result<(), RedisError> {
        let argument = region_call::encode_reset(counter.period_ms, time);
        let call = KeyScript { script: region_reset_script(), key: &counter.key, argument: &argument, more: &[] };
        let reply = call.run(&self.region, CallKind::Unrecorded, Instant::now() + REGION_TIMEOUT).await?;
        integer(&reply.reply).map(|_| ()).ok_or(RedisError::BadReply)
    }
}
