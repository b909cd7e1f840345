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
pub(super) struct MemcacheKeyScheme {
    pub(super) prefix: String,
    pub(super) format: KeyFormat,
    pub(super) jitter: ExpiryJitter,
}

/// Key of a counter in one window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CounterKey {
    pub(super) bytes: Bytes,
    /// Lifetime of the key in seconds.
    pub(super) life_s: u64,
    /// Count that increments do not exceed for long.
    pub(super) max_count: u64,
}

impl MemcacheKeyScheme {
    /// Returns the key of a charge on a fixed window at `now`; `None` if the charge has no single counter.
    pub(super) fn counter_key(&self, charge: &Charge<'_>, now: Time) -> Option<CounterKey> {
        let [counter] = &*charge.counters else { return None };
        let shared = (self.format == KeyFormat::Ratelimit)
            .then(|| EnvoyRatelimitKey::for_charge(&self.prefix, charge, now, self.jitter.random_s()))
            .flatten();
        if let Some(window) = shared {
            // A limit above what envoyproxy/ratelimit can read is never shared with it.
            let is_readable = u64::from(counter.limit.requests_per_unit()) < MAX_ENVOY_RATELIMIT_COUNT;
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
    pub(super) fn expiration_s(&self, now_s: u64) -> u64 {
        match now_s.saturating_add(self.life_s) {
            _ if self.life_s <= MAX_RELATIVE_LIFETIME_S => self.life_s.max(1),
            at if at <= MAX_EXPIRATION_UNIX_S => at,
            _ => MAX_RELATIVE_LIFETIME_S,
        }
    }
}

/// Returns the key, or its hash if memcached or envoyproxy/ratelimit refuses the key.
fn hash_if_refused(key: Bytes) -> Bytes {
    let is_refused = |byte: &u8| *byte <= b' ' || *byte == 0x7f;
    if key.len() <= MAX_KEY_BYTES && !key.iter().any(is_refused) {
        return key;
    }
    format!("tkh:{}", blake3::hash(&key).to_hex()).into()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use smallvec::smallvec;

    use super::{CounterKey, MAX_EXPIRATION_UNIX_S, MAX_KEY_BYTES, MemcacheKeyScheme, hash_if_refused};
    use crate::base::clock::Time;
    use crate::limit::algorithm::Algorithm;
    use crate::limit::charge::{Charge, ChargeRequest, Counter};
    use crate::limit::counter_path::CounterPath;
    use crate::limit::period::{Period, Unit};
    use crate::limit::request::{Entry, Hits};
    use crate::limit::{Limit, LimitSpec};
    use crate::settings::counters::KeyFormat;
    use crate::store::window_key::ExpiryJitter;

    fn expiration(life_s: u64, now_s: u64) -> u64 {
        CounterKey { bytes: Default::default(), life_s, max_count: 0 }.expiration_s(now_s)
    }

    #[test]
    fn life_of_more_than_thirty_days_is_a_unix_time() {
        const NOW: u64 = 1_800_000_000;
        const MONTH: u64 = 2_592_000;
        assert_eq!([0, 1, 3600, MONTH].map(|life| expiration(life, NOW)), [1, 1, 3600, MONTH]);
        assert_eq!(expiration(MONTH + 1, NOW), NOW + MONTH + 1);
        assert_eq!(expiration(31_536_000, NOW), NOW + 31_536_000);
        // Beyond 32 bits, the longest relative life is the best there is.
        assert_eq!(expiration(31_536_000, MAX_EXPIRATION_UNIX_S), MONTH);
        assert_eq!(expiration(u64::MAX, NOW), MONTH);
    }

    #[test]
    fn key_outlives_its_window_by_ticks_of_the_clock_of_memcached() {
        let period = Period::new(Unit::Second, 1).expect("a period");
        let spec = LimitSpec { count_rejected: Some(true), ..LimitSpec::new(Algorithm::FixedWindow, 1, period) };
        let limit = Limit::new(&spec).expect("a limit");
        let entries = [Entry { key: b"k", value: b"v" }];
        let counter = Counter { limit: &limit, shadow: false, quota: false, tag: 0, epoch: 0 };
        let path = CounterPath { domain: "d", entries: &entries, shared: &[], candidate: None };
        let charge = Charge::new(path, smallvec![counter], ChargeRequest::new(Hits::Charge(1), 0));
        for (format, bytes) in
            [(KeyFormat::Tollkeeper, "p:tk1:{d|k=v}:fixed_window:1s:7"), (KeyFormat::Ratelimit, "p:d_k_v_7")]
        {
            let keys =
                MemcacheKeyScheme { prefix: "p:".to_owned(), format, jitter: ExpiryJitter::up_to(Duration::ZERO) };
            let key = keys.counter_key(&charge, Time::from_secs(7)).expect("a key");
            // A tick may come at once, so a life of 1 s may end within the window.
            assert!(key.life_s > 2, "{key:?}");
            assert_eq!(key.bytes, bytes);
        }
    }

    #[test]
    fn refused_keys_are_hashed() {
        let longest = "k".repeat(MAX_KEY_BYTES);
        for kept in [&longest[..], "d_k_v_1", "d_k_\u{e9}_1", "tkh"] {
            assert_eq!(hash_if_refused(kept.to_owned().into()), kept);
        }
        let too_long = "k".repeat(MAX_KEY_BYTES + 1);
        for refused in [&too_long[..], "a b", "a\r\nflush_all", "a\0", "a\x7f"] {
            let key = hash_if_refused(refused.to_owned().into());
            assert_eq!((key.len(), &key[..4]), (68, &b"tkh:"[..]), "{key:?}");
        }
        assert_ne!(hash_if_refused("a b".into()), hash_if_refused("a  b".into()));
    }

    proptest! {
        #[test]
        fn any_key_is_a_word_of_at_most_250_bytes(bytes in vec(any::<u8>(), 0..400)) {
            let key = hash_if_refused(bytes.into());
            prop_assert!(key.len() <= MAX_KEY_BYTES && key.iter().all(|byte| *byte > b' ' && *byte != 0x7f));
        }
    }
}
