//! Counters, in this process, Redis or memcached.

use crate::settings::choices::BackendType;
use crate::settings::condition::Condition;
use crate::settings::setting::settings;
use crate::settings::value::size::{ByteSize, SizeRange};

settings! { "Counters";
    BACKEND_TYPE: Option<BackendType> = None,
        "store of counters; not set: Redis if a REDIS_ variable is set, else this process";
    TOLLKEEPER_MEMORY_BYTES: ByteSize = 512 << 20,
        "memory for counters in this process; beyond it, those with the least of their limit used are evicted"
        .allowed(SizeRange::new(1 << 20, 1 << 40));
    TOLLKEEPER_OVER_LIMIT_CACHE_BYTES: ByteSize = 4 << 20,
        "memory for limits that Redis just reported as exceeded, rejected without a call; 0 means none"
        .allowed(SizeRange::new(0, 1 << 40));
    LOCAL_CACHE_SIZE_IN_BYTES: usize = 0,
        "same memory; above 0, also for fixed windows that count rejected hits, which then go uncounted"
        .differs(Condition::IsNot("0"), "an entry is kept for at most 1 s, and only for its own limit");
    EXPIRATION_JITTER_MAX_SECONDS: i64 = 300,
        "maximum random addition to the TTL of a counter in Redis, in seconds; 0 or less means none"
        .differs(Condition::Never, "only with TOLLKEEPER_KEY_FORMAT=ratelimit");
    CACHE_KEY_PREFIX: String = "", "prefix of all keys in Redis, at most 256 bytes";
}
