//! Keys of envoyproxy/ratelimit: `<prefix><domain>_<key>_<value>_..._<start of the window in seconds>`.

use bytes::{BufMut, Bytes, BytesMut};

use crate::algorithm::fixed_window;
use crate::clock::Time;
use crate::counter::{Charge, Counter, Path};
use crate::limit::algorithm::Algorithm;
use crate::limit::{Consistency, Limit};

/// Key of one window's counter, and its lifetime.
#[derive(Clone, Debug)]
pub(crate) struct WindowKey {
    key: Bytes,
    expire_s: u64,
}

impl WindowKey {
    /// Creates the key of the window in which `charge` counts; `None` if envoyproxy/ratelimit has no such counter. The
    /// key outlives the window by `jitter_s`.
    pub(crate) fn of(prefix: &str, charge: &Charge<'_>, now: Time, jitter_s: u64) -> Option<Self> {
        let limit = ratelimit_limit(charge)?;
        let (start, end) = fixed_window::window(limit, now);
        // As envoyproxy/ratelimit: a calendar month's key expires with the month, others one window after the last hit.
        let from = if limit.calendar_months() { now } else { start };
        let expire_s = end.since_us(from).div_ceil(1_000_000) + jitter_s;
        Some(Self { key: write_key(prefix, &charge.path, seconds(start)), expire_s })
    }

    /// Returns the start of the window in which `charge` counts, in seconds since the Unix epoch; `None` if
    /// envoyproxy/ratelimit has no such counter.
    pub(crate) fn start_s(charge: &Charge<'_>, now: Time) -> Option<u64> {
        ratelimit_limit(charge).map(|limit| seconds(fixed_window::window(limit, now).0))
    }

    /// Returns the key.
    pub(crate) const fn key(&self) -> &Bytes {
        &self.key
    }

    /// Returns the lifetime of the key in seconds, for EXPIRE.
    pub(crate) const fn expire_s(&self) -> u64 {
        self.expire_s
    }
}

/// Returns the limit of a charge that envoyproxy/ratelimit could make.
fn ratelimit_limit<'a>(charge: &Charge<'a>) -> Option<&'a Limit> {
    let [Counter { limit, epoch: 0, .. }] = *charge.counters else { return None };
    let is_known = limit.algorithm() == Algorithm::FixedWindow
        && limit.consistency() == Consistency::Strict
        && limit.count_rejected()
        && limit.period().multiplier() == 1;
    is_known.then_some(limit)
}

fn seconds(time: Time) -> u64 {
    time.as_micros() / 1_000_000
}

fn write_key(prefix: &str, path: &Path<'_>, start_s: u64) -> Bytes {
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
