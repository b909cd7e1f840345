//! Calls of gRPC methods that are not offered: refused with UNIMPLEMENTED, counted, and told in the log.
//!
//! The caller chooses the path, so only the names of older rate limit services are labels; of others, the log has one
//! line a minute, cut and escaped.
//!
//! Decides: what callers of `envoy.service.ratelimit.v2` and `pb.lyft.ratelimit` get, and what the log says of them.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use tonic::Status;
use tower::service_fn;

use super::call::CallPeer;
use crate::base::clock::Clock;
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

/// Calls that were refused.
pub static UNKNOWN_METHOD_CALLS: UnknownMethodCalls = UnknownMethodCalls {
    counts: [const { AtomicU64::new(0) }; OLDER_SERVICES.len() + 1],
    logs: [const { LogThrottle::every(LOG_INTERVAL) }; OLDER_SERVICES.len() + 1],
};

/// Calls of methods that are not offered, and the throttle of their log lines: those of older services, then others.
#[derive(Debug)]
pub struct UnknownMethodCalls {
    counts: [AtomicU64; OLDER_SERVICES.len() + 1],
    logs: [LogThrottle; OLDER_SERVICES.len() + 1],
}

impl UnknownMethodCalls {
    /// Number of calls by service.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let names = OLDER_SERVICES.iter().map(|(service, _)| *service).chain([OTHER]);
        names.zip(&self.counts).map(|(name, count)| (name, count.load(Ordering::Relaxed)))
    }

    /// Counts and logs a call; returns the text of its status.
    fn refuse(&self, path: &str, peer: Option<CallPeer>, clock: &Clock) -> &'static str {
        let package_of = |(package, _): &(&str, &str)| {
            path.strip_prefix('/').and_then(|path| path.strip_prefix(package)).is_some_and(|rest| rest.starts_with('.'))
        };
        let found = OLDER_SERVICES.iter().position(package_of);
        let index = found.unwrap_or(OLDER_SERVICES.len());
        self.counts[index].fetch_add(1, Ordering::Relaxed);
        let fix = found.map_or("", |found| OLDER_SERVICES[found].1);
        if let Some(suppressed) = self.logs[index].allow(clock.now()) {
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

/// Has `router` refuse all methods that it does not have.
pub(super) fn refuse_unknown_methods(router: Router, clock: &Clock) -> Router {
    let clock = Arc::new(clock.clone());
    router.fallback_service(service_fn(move |request: Request<Body>| {
        let peer = request.extensions().get::<CallPeer>().copied();
        let fix = UNKNOWN_METHOD_CALLS.refuse(request.uri().path(), peer, &clock);
        async move { Ok::<_, Infallible>(Status::unimplemented(fix).into_http::<Body>()) }
    }))
}
