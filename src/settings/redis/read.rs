//! Reading of the Redis settings.
//!
//! The two deployments differ only in their settings, so each is read by a list of settings. Contradictions are
//! problems that name both variables. A setting that nothing reads, such as a certificate without TLS, is only ignored:
//! an environment that works elsewhere must not fail here because of it.

mod addresses;
mod credentials;
mod deployment;
pub(crate) mod regions;

use std::time::Duration;

use super::{DeploymentSettings, OverLimitCacheSettings, RedisSettings};
use crate::settings::choices::KeyFormat;
use crate::settings::table::counters::*;
use crate::settings::table::redis::*;
use crate::settings::values::Values;
use deployment::{CERTIFICATES, MAIN, PER_SECOND, STREAM};

/// Reads the settings of counters in Redis.
pub(crate) fn redis(values: &mut Values) -> RedisSettings {
    let main = MAIN.read(values);
    let per_second = values.get(&REDIS_PERSECOND).then(|| PER_SECOND.read(values));
    if per_second.is_none() {
        for setting in PER_SECOND.all() {
            values.ignore_if_changed(setting, "it is only read with REDIS_PERSECOND=true");
        }
    }
    let key_format = values.get(&TOLLKEEPER_KEY_FORMAT);
    let regions = regions::regions(values, &main);
    RedisSettings {
        main,
        per_second,
        regions,
        timeout: values.get(&TOLLKEEPER_STORE_TIMEOUT),
        replicas: values.get(&TOLLKEEPER_REPLICAS),
        max_replicas: values.get(&TOLLKEEPER_MAX_REPLICAS),
        eventual_bytes: values.get(&TOLLKEEPER_EVENTUAL_BYTES).as_usize(),
        key_prefix: key_prefix(values),
        key_format,
        expiration_jitter: expiration_jitter(values, key_format),
        over_limit_cache: over_limit_cache(values),
        health_needs_connection: values.get(&REDIS_HEALTH_CHECK_ACTIVE_CONNECTION),
    }
}

/// Notes the certificates if there are deployments, and none has TLS.
pub(crate) fn ignore_unused_certificates<'d>(
    values: &mut Values,
    deployments: impl Iterator<Item = &'d DeploymentSettings>,
) {
    let mut deployments = deployments.peekable();
    if deployments.peek().is_some() && deployments.all(|deployment| deployment.tls.is_none()) {
        for setting in CERTIFICATES.all() {
            values.ignore_if_changed(setting, "no connection to Redis uses TLS");
        }
    }
}

/// Reads the deployment of the decision log's stream.
pub(crate) fn stream(values: &mut Values) -> DeploymentSettings {
    STREAM.read(values)
}

/// Reads both sizes of the cache; envoyproxy/ratelimit's, if it is set, can only enlarge it.
pub(crate) fn over_limit_cache(values: &mut Values) -> OverLimitCacheSettings {
    let own_bytes = values.get(&TOLLKEEPER_OVER_LIMIT_CACHE_BYTES).as_usize();
    let peer_bytes = values.get(&LOCAL_CACHE_SIZE_IN_BYTES);
    if own_bytes == 0 {
        let why = "TOLLKEEPER_OVER_LIMIT_CACHE_BYTES=0 turns the cache off";
        values.ignore_if_changed(&LOCAL_CACHE_SIZE_IN_BYTES, why);
        return OverLimitCacheSettings { capacity_bytes: 0, caches_counting_windows: false };
    }
    OverLimitCacheSettings { capacity_bytes: own_bytes.max(peer_bytes), caches_counting_windows: peer_bytes > 0 }
}

pub(crate) fn key_prefix(values: &mut Values) -> String {
    const MAX_PREFIX_BYTES: usize = 256;
    let prefix = values.get(&CACHE_KEY_PREFIX);
    if prefix.len() > MAX_PREFIX_BYTES {
        values.problem(&CACHE_KEY_PREFIX, "too long", format!("give at most {MAX_PREFIX_BYTES} bytes"));
    }
    prefix
}

pub(crate) fn expiration_jitter(values: &mut Values, key_format: KeyFormat) -> Duration {
    const MAX_JITTER_S: u64 = 366 * 86_400;
    if key_format != KeyFormat::Ratelimit {
        let why = "it is only read with TOLLKEEPER_KEY_FORMAT=ratelimit";
        values.ignore_if_changed(&EXPIRATION_JITTER_MAX_SECONDS, why);
    }
    let seconds = u64::try_from(values.get(&EXPIRATION_JITTER_MAX_SECONDS)).unwrap_or(0);
    if seconds > MAX_JITTER_S {
        let fix = format!("give at most {MAX_JITTER_S}");
        values.problem(&EXPIRATION_JITTER_MAX_SECONDS, "more than a year", fix);
    }
    Duration::from_secs(seconds)
}
