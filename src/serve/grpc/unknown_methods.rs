//! Calls of gRPC methods that are not offered: refused with UNIMPLEMENTED, counted, and told in the log. The router is
//! that of [`super`].
//!
//! The caller chooses the path, so only the names of older rate limit services are labels; of others, the log has one
//! line a minute, cut and escaped.
//!
//! Decides: what callers of `envoy.service.ratelimit.v2` and `pb.lyft.ratelimit` get, and what the log says of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::call::CallPeer;
use crate::base::clock::{Time, to_micros};
use crate::base::text::truncate_and_escape;
use crate::telemetry::log_throttle::LogThrottle;

/// Protobuf packages of older rate limit services, with what an Envoy that calls them needs.
const OLDER_SERVICES: [(&str, &str); 2] = [
    ("envoy.service.ratelimit.v2", "set `transport_api_version: V3` in the `rate_limit_service` of Envoy's filter"),
    ("pb.lyft.ratelimit", "upgrade that Envoy, or set `use_data_plane_proto: true` in its rate limit service"),
];
/// Label of all other services.
const OTHER: &str = "other";
/// Minimum time between two log lines of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum length of a path in the log, in characters.
const MAX_LOGGED_PATH_CHARS: usize = 100;

/// Calls of methods that are not offered, and the throttle of their log lines: those of older services, then others.
#[derive(Debug)]
pub struct RefusedCalls {
    counts: [AtomicU64; OLDER_SERVICES.len() + 1],
    logs: [LogThrottle; OLDER_SERVICES.len() + 1],
    /// Time of the last quota stream that was refused because RLQS is off, in microseconds; 0: none was refused.
    last_quota_stream_us: AtomicU64,
}

impl RefusedCalls {
    pub(super) const fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; OLDER_SERVICES.len() + 1],
            logs: [const { LogThrottle::every(LOG_INTERVAL) }; OLDER_SERVICES.len() + 1],
            last_quota_stream_us: AtomicU64::new(0),
        }
    }

    /// Records a refused quota stream; returns `true` for the first.
    pub fn record_quota_stream(&self, now: Time) -> bool {
        self.last_quota_stream_us.swap(now.as_micros().max(1), Ordering::Relaxed) == 0
    }

    /// Returns `true` if a quota stream was refused within `age` before `now`.
    pub fn has_recent_quota_stream(&self, now: Time, age: Duration) -> bool {
        let last_us = self.last_quota_stream_us.load(Ordering::Relaxed);
        last_us > 0 && now.since_us(Time::from_micros(last_us)) <= to_micros(age)
    }

    /// Number of calls by service, quota streams left out.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let names = OLDER_SERVICES.iter().map(|(service, _)| *service).chain([OTHER]);
        names.zip(&self.counts).map(|(name, count)| (name, count.load(Ordering::Relaxed)))
    }

    /// Counts and logs a call; returns the text of its status.
    pub(super) fn refuse(&self, path: &str, peer: Option<CallPeer>, now: Time) -> &'static str {
        let package_of = |(package, _): &(&str, &str)| {
            path.strip_prefix('/').and_then(|path| path.strip_prefix(package)).is_some_and(|rest| rest.starts_with('.'))
        };
        let found = OLDER_SERVICES.iter().position(package_of);
        let index = found.unwrap_or(OLDER_SERVICES.len());
        self.counts[index].fetch_add(1, Ordering::Relaxed);
        let fix = found.map_or("", |found| OLDER_SERVICES[found].1);
        if let Some(suppressed) = self.logs[index].allow(now) {
            let peer = peer.map_or_else(|| "unix socket".to_owned(), |peer| peer.0.to_string());
            match found.map(|found| OLDER_SERVICES[found].0) {
                Some(service) => tracing::warn!(
                    service,
                    peer,
                    suppressed,
                    "a call was refused: only envoy.service.ratelimit.v3 is served, so that Envoy lets requests pass \
                     unless failure_mode_deny is set ({fix})"
                ),
                None => {
                    let path = truncate_and_escape(path, MAX_LOGGED_PATH_CHARS);
                    tracing::warn!(path, peer, suppressed, "a call was refused: there is no such gRPC method here");
                }
            }
        }
        fix
    }
}
