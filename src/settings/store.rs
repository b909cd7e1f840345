//! The store of the counters: this process, Redis or memcached.
//!
//! Decides: which store is chosen (memory, Redis, memcached, `is_redis_asked_for`).

use std::num::NonZeroU16;

use super::counters::{BACKEND_TYPE, BackendType};
use super::decision_log::TOLLKEEPER_DECISION_LOG_REDIS_URL;
use super::memcache::MemcacheSettings;
use super::redis::RedisSettings;
use super::redis::deployment::DeploymentSettings;
use super::redis::regions::refuse_regions_without_redis;
use super::setting::AnySetting as _;
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

    /// Reads the store that `BACKEND_TYPE` or any other of the variables asks for; without them it is this process.
    pub(super) fn from_values(values: &mut Values, variables: &[Variable]) -> Self {
        let redis = is_redis_asked_for(variables).then_some(BackendType::Redis);
        match values.get(&BACKEND_TYPE).or(redis) {
            Some(BackendType::Redis) => Self::Redis(RedisSettings::from_values(values)),
            Some(BackendType::Memcache) => {
                refuse_regions_without_redis(values, "counters are in memcache");
                Self::Memcache(MemcacheSettings::from_values(values))
            }
            None => {
                refuse_regions_without_redis(values, "counters are in this process");
                Self::Memory
            }
        }
    }
}

/// Returns `true` if a variable asks for Redis; one without effect does too.
fn is_redis_asked_for(variables: &[Variable]) -> bool {
    let is_set = |variable: &Variable| variable.text.as_ref().is_some_and(|text| !text.is_empty());
    // Certificates may be those of the decision log's stream alone.
    let is_url = |variable: &Variable| variable.name == TOLLKEEPER_DECISION_LOG_REDIS_URL.name();
    let has_stream = variables.iter().any(|variable| is_url(variable) && is_set(variable));
    let is_of_stream = |name: &str| has_stream && name.starts_with("REDIS_TLS_");
    variables
        .iter()
        .any(|variable| variable.name.starts_with("REDIS_") && !is_of_stream(&variable.name) && is_set(variable))
}
