//! Keys of counters in memcached, their lifetimes and bounds.
//!
//! A counter has one key for each window. In the format of envoyproxy/ratelimit that is its key; otherwise
//! `<key in Redis>:<start of the window in seconds>`. A key that memcached or envoyproxy/ratelimit refuses (over 250
//! bytes, spaces, control bytes) becomes `tkh:` and the 64 hexadecimal digits of its BLAKE3.
//!
//! Decides: key and life of a counter in memcached.

use bytes::Bytes;

use crate::base::clock::Time;
use crate::limit::algorithm::fixed_window;
use crate::limit::charge::{Charge, MAX_COUNT};
use crate::settings::counters::KeyFormat;
use crate::store::redis::key;
use crate::store::window_key::{EnvoyRatelimitKey, ExpiryJitter};

/// Longest key that memcached takes, in bytes.
const MAX_KEY_BYTES: usize = 250;
/// Longest relative lifetime in seconds; memcached takes a greater number as a Unix time.
const MAX_RELATIVE_LIFETIME_S: u64 = 30 * 86_400;
/// Greatest Unix time that memcached takes; it parses 32 bits.
const MAX_EXPIRATION_UNIX_S: u64 = i32::MAX as u64;
/// Time in seconds that a key outlives its window: memcached counts seconds in whole ticks of its clock, and clocks of
/// replicas differ.
const LIFETIME_MARGIN_S: u64 = 5;
/// Greatest count that envoyproxy/ratelimit reads; it takes a greater one as 0.
const MAX_ENVOY_RATELIMIT_COUNT: u64 = i32::MAX as u64;

/// Key format, and the settings that belong to it.
#[derive(Debug)]
pub struct MemcacheKeyScheme {
    /// Text before every key.
    pub prefix: String,
    /// Format of the keys.
    pub format: KeyFormat,
    /// Jitter of lifetimes.
    pub jitter: ExpiryJitter,
}

/// Key of a counter in one window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterKey {
    /// The key as sent.
    pub bytes: Bytes,
    /// Lifetime of the key in seconds.
    pub life_s: u64,
    /// Count that increments do not exceed for long.
    pub max_count: u64,
}

impl MemcacheKeyScheme {
    /// Returns the key of a charge on a fixed window at `now`; `None` if the charge has no single counter.
    pub fn counter_key(&self, charge: &Charge<'_>, now: Time) -> Option<CounterKey> {
        let [counter] = &*charge.counters else { return None };
        let shared = (self.format == KeyFormat::Ratelimit)
            .then(|| EnvoyRatelimitKey::for_charge(&self.prefix, charge, now, self.jitter.random_s()))
            .flatten();
        if let Some(window) = shared {
            // A limit above what envoyproxy/ratelimit can read is never shared with it.
            let is_readable = counter.limit.requests_per_unit() < MAX_ENVOY_RATELIMIT_COUNT;
            let max_count = if is_readable { MAX_ENVOY_RATELIMIT_COUNT } else { MAX_COUNT };
            let bytes = hash_if_refused(window.key().clone());
            return Some(CounterKey { bytes, life_s: window.lifetime_s() + LIFETIME_MARGIN_S, max_count });
        }
        let (start, end) = fixed_window::window_bounds(counter.limit, now);
        let [in_redis] = &key::build_counter_keys(&self.prefix, &charge.path, &charge.counters)[..] else {
            return None;
        };
        let start_s = start.as_micros() / 1_000_000;
        let bytes = hash_if_refused([in_redis, format!(":{start_s}").as_bytes()].concat().into());
        let life_s = end.since_us(now).div_ceil(1_000_000) + LIFETIME_MARGIN_S;
        Some(CounterKey { bytes, life_s, max_count: MAX_COUNT })
    }
}

impl CounterKey {
    /// Returns the expiration as `add` takes it; `now_s` is the Unix time.
    pub fn expiration_s(&self, now_s: u64) -> u64 {
        match now_s.saturating_add(self.life_s) {
            _ if self.life_s <= MAX_RELATIVE_LIFETIME_S => self.life_s.max(1),
            at if at <= MAX_EXPIRATION_UNIX_S => at,
            _ => MAX_RELATIVE_LIFETIME_S,
        }
    }
}

/// Returns the key, or its hash if memcached or envoyproxy/ratelimit refuses the key.
pub fn hash_if_refused(key: Bytes) -> Bytes {
    let is_refused = |byte: &u8| *byte <= b' ' || *byte == 0x7f;
    if key.len() <= MAX_KEY_BYTES && !key.iter().any(is_refused) {
        return key;
    }
    format!("tkh:{}", blake3::hash(&key).to_hex()).into()
}
