//! The store of the counters: this process, Redis or memcache.

use std::num::NonZeroU16;

use super::choices::BackendType;
use super::memcache::MemcacheSettings;
use super::redis::read;
use super::redis::read::regions::require_redis;
use super::redis::{DeploymentSettings, RedisSettings};
use super::setting::AnySetting;
use super::table::counters::*;
use super::table::decision_log::TOLLKEEPER_DECISION_LOG_REDIS_URL;
use super::table::memcache;
use super::table::redis::{self, *};
use super::values::Values;

/// Store of the counters.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a process has one")]
pub enum StoreSettings {
    /// This process: every replica counts for itself.
    Memory,
    /// Redis, shared by all replicas.
    Redis(RedisSettings),
    /// Memcached, shared by all replicas.
    Memcache(MemcacheSettings),
}

/// Counters in this process: all of them, or the fallback while the store is unavailable.
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

/// Settings of any store that all replicas share.
static SHARED_STORE: [&dyn AnySetting; 7] = [
    &CACHE_KEY_PREFIX,
    &EXPIRATION_JITTER_MAX_SECONDS,
    &TOLLKEEPER_STORE_TIMEOUT,
    &TOLLKEEPER_REPLICAS,
    &TOLLKEEPER_KEY_FORMAT,
    &LOCAL_CACHE_SIZE_IN_BYTES,
    &TOLLKEEPER_OVER_LIMIT_CACHE_BYTES,
];

/// Settings of Redis that the stream of the decision log needs too, wherever the counters are.
static STREAM: [&dyn AnySetting; 5] = [
    &REDIS_TIMEOUT,
    &REDIS_TLS_CACERT,
    &REDIS_TLS_CLIENT_CERT,
    &REDIS_TLS_CLIENT_KEY,
    &REDIS_TLS_SKIP_HOSTNAME_VERIFICATION,
];

impl StoreSettings {
    /// Number of regions that share the store's global limits; `None` if there is only one.
    pub fn number_of_regions(&self) -> Option<NonZeroU16> {
        let Self::Redis(redis) = self else { return None };
        NonZeroU16::new(u16::try_from(redis.regions.as_ref()?.names.len()).ok()?)
    }

    /// Deployments of Redis that hold counters.
    pub(super) fn deployments(&self) -> impl Iterator<Item = &DeploymentSettings> {
        let redis = match self {
            Self::Redis(redis) => Some(redis),
            Self::Memory | Self::Memcache(_) => None,
        };
        redis.into_iter().flat_map(|redis| {
            let global = redis.regions.as_ref().map(|regions| &regions.global);
            [Some(&redis.main), redis.per_second.as_ref(), global].into_iter().flatten()
        })
    }

    /// Reads the store that the environment asks for; `None` means this process.
    pub(super) fn read(values: &mut Values, backend: Option<BackendType>) -> Self {
        let is_of_redis = |setting: &&&dyn AnySetting| !is_shared(**setting);
        let of_redis = redis::GROUP.settings.iter().filter(is_of_redis);
        if backend != Some(BackendType::Memcache) {
            for setting in memcache::GROUP.settings {
                values.ignore_if_changed(*setting, "it is only read with BACKEND_TYPE=memcache");
            }
        }
        match backend {
            Some(BackendType::Redis) => Self::Redis(read::redis(values)),
            Some(BackendType::Memcache) => {
                require_redis(values, "counters are in memcache");
                let has_stream = !values.get(&TOLLKEEPER_DECISION_LOG_REDIS_URL).reveal().is_empty();
                let is_of_stream = |name: &str| STREAM.iter().any(|of_stream| of_stream.name() == name);
                for setting in of_redis.filter(|setting| !(has_stream && is_of_stream(setting.name()))) {
                    values.ignore_if_changed(*setting, "counters are in memcache, not in Redis");
                }
                Self::Memcache(MemcacheSettings::read(values))
            }
            None => {
                require_redis(values, "counters are in this process");
                // Any REDIS_ variable selects Redis, and lints about rules read TOLLKEEPER_MAX_REPLICAS without it too.
                let is_unread = |name: &str| name.starts_with("TOLLKEEPER_") && name != TOLLKEEPER_MAX_REPLICAS.name();
                for setting in of_redis.filter(|setting| is_unread(setting.name())).chain(&SHARED_STORE) {
                    values.ignore_if_changed(*setting, "counters are in this process");
                }
                Self::Memory
            }
        }
    }
}

fn is_shared(setting: &dyn AnySetting) -> bool {
    SHARED_STORE.iter().any(|shared| shared.name() == setting.name())
}
