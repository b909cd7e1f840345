//! The store of the counters: this process, Redis or memcached.
//!
//! Decides: which store is chosen (memory, Redis, memcached, `requested_backend`).
//! Decides: which variables have no effect with it.

use std::num::NonZeroU16;

use super::counters::*;
use super::decision_log::{self, TOLLKEEPER_DECISION_LOG_REDIS_URL};
use super::memcache::MemcacheSettings;
use super::redis::deployment::DeploymentSettings;
use super::redis::regions::refuse_regions_without_redis;
use super::redis::{self, *};
use super::setting::AnySetting;
use super::values::{Values, Variable};

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

/// Settings of any store that all replicas share.
static SETTINGS_OF_SHARED_STORES: [&dyn AnySetting; 7] = [
    &CACHE_KEY_PREFIX,
    &EXPIRATION_JITTER_MAX_SECONDS,
    &TOLLKEEPER_STORE_TIMEOUT,
    &TOLLKEEPER_REPLICAS,
    &TOLLKEEPER_KEY_FORMAT,
    &LOCAL_CACHE_SIZE_IN_BYTES,
    &TOLLKEEPER_OVER_LIMIT_CACHE_BYTES,
];

/// Settings of Redis that the stream of the decision log needs too, wherever the counters are.
static SHARED_WITH_LOG_STREAM: [&dyn AnySetting; 5] = [
    &REDIS_TIMEOUT,
    &REDIS_TLS_CACERT,
    &REDIS_TLS_CLIENT_CERT,
    &REDIS_TLS_CLIENT_KEY,
    &REDIS_TLS_SKIP_HOSTNAME_VERIFICATION,
];

impl StoreSettings {
    /// Returns the settings of counters in Redis, if they are there.
    pub(super) const fn redis(&self) -> Option<&RedisSettings> {
        match self {
            Self::Redis(redis) => Some(redis),
            Self::Memory | Self::Memcache(_) => None,
        }
    }

    /// Number of regions that share the store's global limits; `None` if there is only one.
    pub fn number_of_regions(&self) -> Option<NonZeroU16> {
        NonZeroU16::new(u16::try_from(self.redis()?.regions.as_ref()?.names.len()).ok()?)
    }

    /// Deployments of Redis that hold counters.
    pub(super) fn redis_deployments(&self) -> impl Iterator<Item = &DeploymentSettings> {
        self.redis().into_iter().flat_map(|redis| {
            let global = redis.regions.as_ref().map(|regions| &regions.global);
            [Some(&redis.main), redis.per_second.as_ref(), global].into_iter().flatten()
        })
    }

    /// Reads the store that the environment asks for; `None` means this process.
    pub(super) fn from_values(values: &mut Values, backend: Option<BackendType>) -> Self {
        let is_of_redis = |setting: &&&dyn AnySetting| !applies_to_shared_stores(**setting);
        let of_redis = redis::GROUP.settings.iter().filter(is_of_redis);
        match backend {
            Some(BackendType::Redis) => Self::Redis(RedisSettings::from_values(values)),
            Some(BackendType::Memcache) => {
                refuse_regions_without_redis(values, "counters are in memcache");
                let has_stream = decision_log::stream_has_own_redis(values);
                let is_of_stream = |name: &str| SHARED_WITH_LOG_STREAM.iter().any(|of_stream| of_stream.name() == name);
                for setting in of_redis.filter(|setting| !(has_stream && is_of_stream(setting.name()))) {
                    values.mark_ignored_unless_default(*setting, "counters are in memcache, not in Redis");
                }
                Self::Memcache(MemcacheSettings::from_values(values))
            }
            None => {
                refuse_regions_without_redis(values, "counters are in this process");
                // Any REDIS_ variable selects Redis. Warnings about rules read TOLLKEEPER_MAX_REPLICAS without it too.
                let is_unread = |name: &str| name.starts_with("TOLLKEEPER_") && name != TOLLKEEPER_MAX_REPLICAS.name();
                for setting in of_redis.filter(|setting| is_unread(setting.name())).chain(&SETTINGS_OF_SHARED_STORES) {
                    values.mark_ignored_unless_default(*setting, "counters are in this process");
                }
                Self::Memory
            }
        }
    }
}

/// Returns `true` if the setting concerns every store that all replicas share, Redis and memcached.
fn applies_to_shared_stores(setting: &dyn AnySetting) -> bool {
    SETTINGS_OF_SHARED_STORES.iter().any(|shared| shared.name() == setting.name())
}

/// Returns the store that the variables ask for; a variable without effect can ask for Redis too.
pub(super) fn requested_backend(variables: &[Variable]) -> Option<BackendType> {
    let text = |variable: &Variable| variable.text.clone().unwrap_or_default();
    let is_backend = |text: &str| {
        variables.iter().any(|variable| variable.name == BACKEND_TYPE.name() && variable.text.as_deref() == Some(text))
    };
    if is_backend("memcache") {
        return Some(BackendType::Memcache);
    }
    // Certificates may be those of the decision log's stream alone.
    let is_url = |variable: &Variable| variable.name == TOLLKEEPER_DECISION_LOG_REDIS_URL.name();
    let has_stream = variables.iter().any(|variable| is_url(variable) && !text(variable).is_empty());
    let is_of_stream = |name: &str| has_stream && name.starts_with("REDIS_TLS_");
    let is_redis = |variable: &Variable| {
        variable.name.starts_with("REDIS_") && !is_of_stream(&variable.name) && !text(variable).is_empty()
    };
    (is_backend("redis") || variables.iter().any(is_redis)).then_some(BackendType::Redis)
}
