//! Counters, in this process, Redis or memcached: the settings that do not depend on which of them has the counters.
//!
//! Decides: bytes and shards of counters in memory.
//! Decides: which windows are in the over-limit cache, and its size (`LOCAL_CACHE_SIZE_IN_BYTES`).
//! Decides: the longest `CACHE_KEY_PREFIX`.

use std::time::Duration;

use super::setting::settings;
use super::value::choices;
use super::value::number::ByteSize;
use super::values::Values;
use crate::base::named_enum::named_enum;

settings! { "Counters";
    BACKEND_TYPE: Option<BackendType> = "",
        "store of counters; not set: Redis if a REDIS_ variable is set, else this process" .often_set();
    TOLLKEEPER_MEMORY_BYTES: ByteSize = "512MiB",
        "memory for counters in this process; beyond it, those with the least of their limit used are evicted"
        .within("1MiB to 1024GiB") .often_set();
    TOLLKEEPER_OVER_LIMIT_CACHE_BYTES: ByteSize = "4MiB",
        "memory of the over-limit cache; 0: none"
        .within("0 to 1024GiB") .only_read("with counters in Redis or memcached");
    LOCAL_CACHE_SIZE_IN_BYTES: usize = "0",
        "same memory; above 0, also for fixed windows, whose rejected hits then go uncounted"
        .differs_by_value("an entry is kept for 1 s at most")
        .only_read("with counters in Redis or memcached, and without TOLLKEEPER_OVER_LIMIT_CACHE_BYTES=0");
    EXPIRATION_JITTER_MAX_SECONDS: i64 = "300",
        "maximum random addition to the TTL of a counter in Redis, in seconds"
        .differs("only with TOLLKEEPER_KEY_FORMAT=ratelimit")
        .only_read("with TOLLKEEPER_KEY_FORMAT=ratelimit and counters in Redis or memcached");
    TOLLKEEPER_HOLDER_TIMEOUT: Duration = "30s",
        "time without health check or call after which the slots of an Envoy are free (`concurrent`)"
        .within("1s to 1h");
    CACHE_KEY_PREFIX: String = "", "prefix of all keys in Redis, at most 256 bytes"
        .only_read("with counters in Redis or memcached");
}

named_enum! {
    /// Kind of store for counters.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum BackendType {
        /// Redis.
        Redis = "redis",
        /// Memcached.
        Memcache = "memcache",
    }
}

choices! { BackendType: CASE_SENSITIVE }

named_enum! {
    /// Format of the keys of counters in Redis and memcached.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum KeyFormat {
        /// tollkeeper's format, for every algorithm.
        Tollkeeper = "tollkeeper",
        /// envoyproxy/ratelimit's format, byte for byte, for strict fixed windows; tollkeeper's for the rest.
        Ratelimit = "ratelimit",
    }
}

choices! { KeyFormat }

/// Counters in this process: all of them, or the fallback while the store is unavailable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryStoreSettings {
    /// Memory of the counters, at least 1 MiB.
    pub capacity_bytes: usize,
}

impl MemoryStoreSettings {
    pub(super) fn from_values(values: &Values) -> Self {
        Self { capacity_bytes: values.get(&TOLLKEEPER_MEMORY_BYTES).to_usize_saturating() }
    }
}

/// Slots of concurrent limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConcurrentLimitSettings {
    /// Time of silence after which a holder is dead.
    pub holder_timeout: Duration,
}

impl ConcurrentLimitSettings {
    pub(super) fn from_values(values: &Values) -> Self {
        Self { holder_timeout: values.get(&TOLLKEEPER_HOLDER_TIMEOUT) }
    }
}

/// Cache of limits that the store has just reported as exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimitCacheSettings {
    /// Memory of the cache, in bytes; 0 means no cache.
    pub capacity_bytes: usize,
    /// `true` if fixed windows that count rejected hits are cached too; hits rejected here are then not counted.
    pub caches_counting_windows: bool,
}

impl OverLimitCacheSettings {
    /// Reads both sizes of the cache; envoyproxy/ratelimit's, if it is set, can only enlarge it.
    pub(super) fn from_values(values: &Values) -> Self {
        let own_bytes = values.get(&TOLLKEEPER_OVER_LIMIT_CACHE_BYTES).to_usize_saturating();
        let peer_bytes = values.get_if(own_bytes > 0, &LOCAL_CACHE_SIZE_IN_BYTES);
        Self { capacity_bytes: own_bytes.max(peer_bytes), caches_counting_windows: peer_bytes > 0 }
    }
}

/// Reads the prefix of all keys, at most 256 bytes.
pub(super) fn read_key_prefix(values: &mut Values) -> String {
    const MAX_PREFIX_BYTES: usize = 256;
    let prefix = values.get(&CACHE_KEY_PREFIX);
    if prefix.len() > MAX_PREFIX_BYTES {
        values.add_problem(&CACHE_KEY_PREFIX, "too long", format!("give at most {MAX_PREFIX_BYTES} bytes"));
    }
    prefix
}

/// Reads the upper bound of the random time added to the TTL of keys, at most a year.
pub(super) fn read_expiration_jitter(values: &mut Values, key_format: KeyFormat) -> Duration {
    const MAX_JITTER_S: u64 = 366 * 86_400;
    let seconds = values.get_if(key_format == KeyFormat::Ratelimit, &EXPIRATION_JITTER_MAX_SECONDS);
    let seconds = u64::try_from(seconds).unwrap_or(0);
    if seconds > MAX_JITTER_S {
        let fix = format!("give at most {MAX_JITTER_S}");
        values.add_problem(&EXPIRATION_JITTER_MAX_SECONDS, "more than a year", fix);
    }
    Duration::from_secs(seconds)
}
