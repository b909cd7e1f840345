//! Statistics of a store, as plain values for metrics, `/store` and health.

use super::memory::usage::MemoryUsage;
use super::redis::eventual::table::EventualStats;
use crate::redis::stats::DeploymentStats;
use crate::telemetry::metrics::histogram::HistogramSnapshot;

/// Statistics of a store since the start of the process.
#[derive(Clone, Debug)]
pub struct StoreStats {
    /// `memory` or `redis`.
    pub store: &'static str,
    /// Counters in this process: all counters of the memory store, the fallback counters of a Redis store.
    pub memory: MemoryUsage,
    /// Statistics that only a Redis store has.
    pub redis: Option<RedisStats>,
}

/// Statistics of a Redis store since the start of the process.
#[derive(Clone, Debug)]
pub struct RedisStats {
    /// Charges requested.
    pub charges: u64,
    /// Calls of scripts, or of commands in their place; coalesced charges share one.
    pub calls: u64,
    /// Charges whose caller gave up or timed out; Redis may have counted them.
    pub abandoned: u64,
    /// Refunds dropped because they would have gone below 0; only with the key format of envoyproxy/ratelimit.
    pub refunds_dropped: u64,
    /// Charges rejected by the over-limit cache.
    pub rejected_locally: u64,
    /// Latency of charges that needed a Redis round trip.
    pub latency: HistogramSnapshot,
    /// Hits of eventual rules.
    pub eventual: EventualStats,
    /// Descriptors of eventual rules that are tracked now.
    pub eventual_descriptors: usize,
    /// Slot whose free share this process may use; `None`: it has no slot.
    pub slot: Option<u32>,
    /// Number of slots.
    pub slots: u32,
    /// Processes that share this Redis, at the last count; `None`: unknown.
    pub live_replicas: Option<u32>,
    /// Connections and servers of `REDIS_URL`.
    pub main: DeploymentStats,
    /// Connections and servers of `REDIS_PERSECOND_URL`.
    pub per_second: Option<DeploymentStats>,
}
