//! The store of the counters: this process or Redis.

use super::redis::RedisSettings;
use super::redis::read;
use super::setting::AnySetting;
use super::table::counters::*;
use super::table::redis::*;
use super::values::Values;

/// Store of the counters.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a process has one")]
pub enum StoreSettings {
    /// This process: every replica counts for itself.
    Memory,
    /// Redis, shared by all replicas.
    Redis(RedisSettings),
}

/// Counters in this process: all of them, or the fallback while Redis is unavailable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySettings {
    /// Memory of the counters, at least 1 MiB.
    pub capacity_bytes: usize,
}

impl MemorySettings {
    pub(super) fn read(values: &Values) -> Self {
        Self { capacity_bytes: values.get(&TOLLKEEPER_MEMORY_BYTES).as_usize() }
    }
}

/// Settings of counters in Redis that do not by themselves select Redis.
static ONLY_WITH_REDIS: [&dyn AnySetting; 12] = [
    &CACHE_KEY_PREFIX,
    &EXPIRATION_JITTER_MAX_SECONDS,
    &TOLLKEEPER_STORE_TIMEOUT,
    &TOLLKEEPER_REPLICAS,
    &TOLLKEEPER_EVENTUAL_BYTES,
    &TOLLKEEPER_KEY_FORMAT,
    &LOCAL_CACHE_SIZE_IN_BYTES,
    &TOLLKEEPER_OVER_LIMIT_CACHE_BYTES,
    &TOLLKEEPER_REDIS_AUTH_FILE,
    &TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE,
    &TOLLKEEPER_REDIS_PERSECOND_AUTH_FILE,
    &TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE,
];

impl StoreSettings {
    /// Reads the store; `in_redis` tells whether the environment selects Redis.
    pub(super) fn read(values: &mut Values, in_redis: bool) -> Self {
        if in_redis {
            return Self::Redis(read::redis(values));
        }
        for setting in ONLY_WITH_REDIS {
            values.ignore_if_changed(setting, "counters are in this process, not in Redis");
        }
        Self::Memory
    }
}
