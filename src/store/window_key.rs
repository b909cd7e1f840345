//! Keys of envoyproxy/ratelimit: `<prefix><domain>_<key>_<value>_..._<start of the window in seconds>`.
//!
//! Decides: which limits and keys are shared with envoyproxy/ratelimit (`TOLLKEEPER_KEY_FORMAT`).
//! Decides: how much later keys expire (`EXPIRATION_JITTER_MAX_SECONDS`).

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::base::random::random_u64;
use crate::limit::algorithm::{Algorithm, fixed_window};
use crate::limit::charge::{Charge, Counter};
use crate::limit::counter_path::CounterPath;
use crate::limit::{Consistency, Limit};

/// Key of one window's counter, and its lifetime.
#[derive(Clone, Debug)]
pub struct EnvoyRatelimitKey {
    /// The key.
    pub key: Bytes,
    /// Lifetime of the key in seconds.
    pub lifetime_s: u64,
}

/// Random addition to the lifetime of keys, so that they do not expire together.
#[derive(Clone, Copy, Debug)]
pub struct ExpiryJitter {
    bound_s: u64,
}

impl ExpiryJitter {
    /// Creates a jitter below `bound`, in whole seconds; none if that is 0.
    pub const fn up_to(bound: Duration) -> Self {
        Self { bound_s: bound.as_secs() }
    }

    /// Returns a number of seconds below the bound, random enough to spread expirations.
    pub(crate) fn random_s(self) -> u64 {
        if self.bound_s == 0 { 0 } else { random_u64() % self.bound_s }
    }
}

impl EnvoyRatelimitKey {
    /// Creates the key of the window in which `charge` counts; `None` if envoyproxy/ratelimit has no such counter. The
    /// key outlives the window by `jitter_s`.
    pub(crate) fn for_charge(prefix: &str, charge: &Charge<'_>, now: Time, jitter_s: u64) -> Option<Self> {
        let limit = limit_known_to_envoy_ratelimit(charge)?;
        let (start, end) = fixed_window::window_bounds(limit, now);
        // As envoyproxy/ratelimit: a calendar month's key expires with the month, others one window after the last hit.
        let from = if limit.follows_calendar_months() { now } else { start };
        let lifetime_s = end.since_us(from).div_ceil(1_000_000) + jitter_s;
        Some(Self { key: build_key(prefix, &charge.path, whole_seconds(start)), lifetime_s })
    }

    /// Returns the start of the window in which `charge` counts, in seconds since the Unix epoch; `None` if
    /// envoyproxy/ratelimit has no such counter.
    pub(crate) fn window_start_s(charge: &Charge<'_>, now: Time) -> Option<u64> {
        limit_known_to_envoy_ratelimit(charge).map(|limit| whole_seconds(fixed_window::window_bounds(limit, now).0))
    }

    /// Returns the key.
    pub(crate) const fn key(&self) -> &Bytes {
        &self.key
    }

    /// Returns the lifetime of the key in seconds.
    pub(crate) const fn lifetime_s(&self) -> u64 {
        self.lifetime_s
    }
}

/// Returns the limit of a charge that envoyproxy/ratelimit could make.
fn limit_known_to_envoy_ratelimit<'a>(charge: &Charge<'a>) -> Option<&'a Limit> {
    let [Counter { limit, epoch: 0, .. }] = *charge.counters else { return None };
    // A key of envoyproxy/ratelimit has no room for the name of a candidate.
    let is_known = charge.path.candidate.is_none()
        && limit.algorithm() == Algorithm::FixedWindow
        && limit.consistency() == Consistency::Strict
        && limit.counts_rejected_hits()
        && limit.calendar_windows().is_none()
        && limit.ban().is_none()
        && limit.reservations().is_none()
        && limit.period().multiplier() == 1;
    is_known.then_some(limit)
}

fn whole_seconds(time: Time) -> u64 {
    time.as_micros() / 1_000_000
}

fn build_key(prefix: &str, path: &CounterPath<'_>, start_s: u64) -> Bytes {
    let mut key = BytesMut::with_capacity(128);
    key.put_slice(prefix.as_bytes());
    key.put_slice(path.domain.as_bytes());
    key.put_u8(b'_');
    let mut shared = path.shared.iter().peekable();
    for (index, entry) in path.entries.iter().enumerate() {
        let pattern = shared.next_if(|(shared_index, _)| *shared_index == index);
        key.put_slice(entry.key);
        key.put_u8(b'_');
        key.put_slice(pattern.map_or(entry.value, |(_, pattern)| pattern));
        key.put_u8(b'_');
    }
    key.put_slice(start_s.to_string().as_bytes());
    key.freeze()
}
