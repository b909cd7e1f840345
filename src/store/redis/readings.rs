//! What counters in Redis know of themselves, for whoever reads metrics.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Redis;
use crate::redis::stats::DeploymentStats;
use crate::store::stats::RedisStats;
use crate::telemetry::metrics::histogram::Histogram;

/// Charges that were asked for and have no answer yet; if it is dropped before they have, nobody waits for them.
pub(super) struct Asked<'a> {
    pub(super) abandoned: &'a AtomicU64,
    pub(super) charges: usize,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.abandoned.fetch_add(self.charges as u64, Ordering::Relaxed);
    }
}

impl Redis {
    /// Statistics since the start.
    pub fn stats(&self) -> RedisStats {
        let (main, per_second) = self.conditions();
        let replicas = self.replicas();
        RedisStats {
            charges: self.charges(),
            calls: self.calls(),
            abandoned: self.abandoned(),
            refused_locally: self.refused_locally(),
            latency: self.waits().snapshot(),
            eventual: self.eventual().usage(),
            eventual_descriptors: self.eventual().known(),
            slot: replicas.slot(),
            slots: replicas.slots().get(),
            live_replicas: replicas.live().map(NonZeroU32::get),
            main,
            per_second,
        }
    }

    /// How many calls were made: fewer than charges where they were combined.
    pub fn calls(&self) -> u64 {
        self.shared.calls.load(Ordering::Relaxed)
    }

    /// How its servers are: those of REDIS_URL, and those of REDIS_PERSECOND_URL if there are any.
    pub fn conditions(&self) -> (DeploymentStats, Option<DeploymentStats>) {
        (self.shared.main.stats(), self.shared.per_second.as_ref().map(|route| route.stats()))
    }

    /// How many charges were asked for.
    pub fn charges(&self) -> u64 {
        self.shared.charges.load(Ordering::Relaxed)
    }

    /// How many charges nobody waited for to the end: their callers gave up, or their time was over.
    pub fn abandoned(&self) -> u64 {
        self.shared.abandoned.load(Ordering::Relaxed)
    }

    /// How long charges waited for an answer of Redis, or for its absence.
    pub fn waits(&self) -> &Histogram {
        &self.shared.waits
    }

    /// How many charges were refused without a call since the start: by what Redis had just said of their counters.
    pub fn refused_locally(&self) -> u64 {
        self.shared.over.refused()
    }
}
