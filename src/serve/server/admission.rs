//! Admission: limits on connections, requests and their bytes, per listener and per client address.
//!
//! A connection above the limit is closed right after it is accepted, a request above the limit is answered before its
//! body is read; neither ever waits. Limits per address keep one client from using up the rest. Health checks are counted
//! apart from other requests, so that neither keeps out the other, and probes over HTTP not at all: restarting a busy
//! process makes the overload worse. Listeners for operators have few connections: each holds one page at most that its
//! client has not taken. This machine has some of its own, for those who forward a port.
//!
//! Most requests and responses are small, and their number is limited; only their bytes above
//! [`UNCOUNTED_BYTES_PER_BODY`] are counted, so the usual call touches no counter of bytes.
//!
//! Decides: what one client address, or all together, may have in connections, requests and bytes.
//! Decides: how many health checks (probes) and `Watch` streams pass an overload; connections of operators.
//! Decides: status and Retry-After of a refusal; that the limit of open files is raised at the start (RLIMIT_NOFILE).
//! Decides: how often refusals are logged; what counts as in progress, quota streams too.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::IntoResponse as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::base::client_network::client_network;
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::settings::client_limits::ClientLimits;
use crate::telemetry::listener_stats::{ExceededLimit, ListenerKind, ListenerStats, StatsByListener};
use crate::telemetry::log_throttle::LogThrottle;

/// Limits and counters that all listeners share.
#[derive(Debug)]
pub(super) struct AdmissionLimits {
    bounds: ClientLimits,
    /// Maximum number of open connections per listener.
    max_connections: usize,
    stats: Arc<StatsByListener>,
    /// Requests in flight on all listeners for clients.
    requests: CachePadded<AtomicUsize>,
    /// Health checks over gRPC in flight.
    health_checks: CachePadded<AtomicUsize>,
    /// Bytes that requests and responses in flight on them take.
    buffered_bytes: CachePadded<AtomicUsize>,
    log_throttles: [LogThrottle; ExceededLimit::ALL.len()],
}

/// A value on a cache line of its own, so that threads that change its neighbours do not slow it down.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// Admission of one listener.
#[derive(Debug)]
pub(super) struct ListenerAdmission {
    kind: ListenerKind,
    limits: Arc<AdmissionLimits>,
    usage: Mutex<HashMap<IpAddr, AddressUsage>>,
}

/// Connections and requests of one client address.
#[derive(Debug, Default)]
struct AddressUsage {
    connections: usize,
    in_flight: Arc<CachePadded<InFlightCounts>>,
}

/// What one client address has in flight.
#[derive(Debug, Default)]
struct InFlightCounts {
    requests: AtomicUsize,
    /// Health checks over gRPC.
    health_checks: AtomicUsize,
    /// Bytes that requests and responses take.
    buffered_bytes: AtomicUsize,
}

/// An admitted connection. It counts until the connection and its last request have ended.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    listener: Arc<ListenerAdmission>,
    /// Address of the client; `None` for a Unix socket.
    pub(super) peer: Option<SocketAddr>,
    of_address: Arc<CachePadded<InFlightCounts>>,
    /// Bytes that its requests and responses take.
    buffered_bytes: AtomicUsize,
    /// Set by each request, cleared by [`ConnectionPermit::take_had_request`].
    is_active: AtomicBool,
}

/// An admitted request. Dropping it frees its place.
#[derive(Debug)]
pub(super) struct RequestPermit {
    connection: Arc<ConnectionPermit>,
    is_health_check: bool,
}

/// Request that a limit on concurrent requests rejected.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverloadRejection(ListenerKind);

/// Divisor of the limit on requests in flight: so many health checks an address may have beside its requests, 2048 by
/// default.
const HEALTH_CHECKS_DIVISOR: usize = 32;
/// Least number of health checks that an address may have in flight.
const MIN_HEALTH_CHECKS: usize = 16;

/// Maximum number of open connections of a listener for operators. Over HTTP/1, each holds one page at most.
const MAX_OPERATOR_CONNECTIONS: usize = 64;
/// The same of each client address, so that none keeps out the others, nor the probes.
const MAX_OPERATOR_CONNECTIONS_PER_ADDRESS: usize = 48;
/// Open connections from this machine that such a listener takes beyond that.
const LOOPBACK_CONNECTIONS: usize = 8;

/// Start of the paths of health probes over gRPC.
const HEALTH_SERVICE_PATH_PREFIX: &str = "/grpc.health.v1.Health/";
/// Paths of health probes over HTTP.
const HTTP_PROBE_PATHS: [&str; 3] = ["/healthcheck", "/livez", "/readyz"];

/// Text of the response to a rejected request.
const TOO_MANY_REQUESTS_TEXT: &str = "too many concurrent requests; try again later";

/// Interval between log lines about rejections.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

impl AdmissionLimits {
    /// Raises the limit of open files to its maximum and derives the connection limit from it.
    pub(super) fn new(bounds: ClientLimits, stats: Arc<StatsByListener>) -> Self {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        // If raising RLIMIT_NOFILE fails, derive the connection limit from the current value.
        let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
        let open_files = if raised { maximum } else { current };
        let third = open_files.map_or(usize::MAX, |files| usize::try_from(files / 3).unwrap_or(usize::MAX));
        let max_connections = bounds.connections.unwrap_or(third).min(third);
        tracing::info!(max_connections, open_files, "connection limit of each listener");
        let log_throttles = [const { LogThrottle::every(LOG_INTERVAL) }; ExceededLimit::ALL.len()];
        let [requests, health_checks, buffered_bytes] = Default::default();
        Self { bounds, max_connections, stats, requests, health_checks, buffered_bytes, log_throttles }
    }

    /// Admission of one listener under these limits.
    pub(super) fn build_listener_admission(self: &Arc<Self>, kind: ListenerKind) -> Arc<ListenerAdmission> {
        Arc::new(ListenerAdmission { kind, limits: Arc::clone(self), usage: Mutex::default() })
    }
}

impl ListenerAdmission {
    /// Counters of this listener.
    pub(super) fn stats(&self) -> &ListenerStats {
        self.limits.stats.of_listener(self.kind)
    }

    /// The listener that is guarded.
    pub(super) const fn kind(&self) -> ListenerKind {
        self.kind
    }

    /// Admits a connection; `None` if a connection limit is reached.
    pub(super) fn admit_connection(self: &Arc<Self>, peer: Option<SocketAddr>) -> Option<Arc<ConnectionPermit>> {
        let mut max = self.limits.max_connections;
        let mut max_per_address = self.limits.bounds.connections_per_address.unwrap_or(usize::MAX);
        if !self.kind.serves_clients() {
            let is_from_here = peer.is_none_or(|peer| peer.ip().to_canonical().is_loopback());
            let own = if is_from_here { LOOPBACK_CONNECTIONS } else { 0 };
            max = max.min(MAX_OPERATOR_CONNECTIONS + own);
            max_per_address = max_per_address.min(MAX_OPERATOR_CONNECTIONS_PER_ADDRESS);
        }
        if self.stats().open_connection_count() >= max {
            self.reject_connection("TOLLKEEPER_MAX_CONNECTIONS", max, peer);
            return None;
        }
        let Some(of_address) = self.add_connection_of_address(peer, max_per_address) else {
            self.reject_connection("TOLLKEEPER_MAX_CONNECTIONS / 5 for one address", max_per_address, peer);
            return None;
        };
        self.stats().record_opened_connection();
        let (buffered_bytes, is_active) = (AtomicUsize::new(0), AtomicBool::new(false));
        Some(Arc::new(ConnectionPermit { listener: Arc::clone(self), peer, of_address, buffered_bytes, is_active }))
    }

    /// Adds a connection to those of its address. Returns the address's counts of what is in flight; `None` at `max`.
    fn add_connection_of_address(
        &self,
        peer: Option<SocketAddr>,
        max: usize,
    ) -> Option<Arc<CachePadded<InFlightCounts>>> {
        let Some(peer) = peer else { return Some(Arc::default()) };
        let mut usage = lock_ignoring_poison(&self.usage);
        let address = usage.entry(client_network(peer.ip())).or_default();
        if address.connections >= max {
            return None;
        }
        address.connections += 1;
        Some(Arc::clone(&address.in_flight))
    }

    fn reject_connection(&self, bound: &'static str, max: usize, peer: Option<SocketAddr>) {
        static REJECTED_CONNECTION_LOG_THROTTLE: LogThrottle = LogThrottle::every(LOG_INTERVAL);
        self.limits.stats.record_rejected_connection();
        if let Some(suppressed) = REJECTED_CONNECTION_LOG_THROTTLE.allow(Clock::System.now()) {
            let (listener, peer) = (self.kind.name(), peer.map(|peer| peer.to_string()));
            let limit = if self.kind.serves_clients() { bound } else { "the limit on connections of operators" };
            let fix = if self.kind.serves_clients() { "raise it" } else { "close consoles that nobody needs" };
            tracing::warn!(listener, peer, suppressed, "connection closed: {limit} of {max} is reached ({fix})");
        }
    }
}

impl ConnectionPermit {
    /// Admits a request by its path; `None` for one that is not limited: on a listener for operators, and a probe.
    ///
    /// # Errors
    /// A limit on requests in flight is reached.
    pub(super) fn admit_request(self: &Arc<Self>, path: &str) -> Result<Option<RequestPermit>, OverloadRejection> {
        self.mark_active();
        let kind = self.listener_kind();
        // A probe is answered at once, whatever its body, and holds nothing.
        if !kind.serves_clients() || kind != ListenerKind::Grpc && HTTP_PROBE_PATHS.contains(&path) {
            return Ok(None);
        }
        self.admit_client_request(path.starts_with(HEALTH_SERVICE_PATH_PREFIX)).map(Some).map_err(|limit| {
            self.record_refusal(limit);
            OverloadRejection(kind)
        })
    }

    /// Admits a request of a client; a health check is counted apart from others, with the same total.
    ///
    /// # Errors
    /// The limit on requests in flight that is reached.
    fn admit_client_request(self: &Arc<Self>, is_health_check: bool) -> Result<RequestPermit, ExceededLimit> {
        let bounds = &self.listener.limits.bounds;
        let at_least = |max: usize| max.max(MIN_HEALTH_CHECKS);
        let (max, max_of_address) = match is_health_check {
            true => (bounds.requests.map(at_least), bounds.requests.map(|max| at_least(max / HEALTH_CHECKS_DIVISOR))),
            false => (bounds.requests, bounds.requests_per_address),
        };
        // Dropping the permit subtracts from both counters.
        let permit = RequestPermit { connection: Arc::clone(self), is_health_check };
        let [total, of_address] = permit.counters().map(|counter| counter.fetch_add(1, Ordering::Relaxed));
        let is_reached = |count: usize, max: Option<usize>| max.is_some_and(|max| count >= max);
        if is_reached(total, max) {
            Err(ExceededLimit::Requests)
        } else if is_reached(of_address, max_of_address) {
            Err(ExceededLimit::RequestsPerAddress)
        } else {
            Ok(permit)
        }
    }

    /// Adds bytes, unless a limit is reached.
    fn add_buffered_bytes(&self, bytes: usize) -> Result<(), ExceededLimit> {
        let (limits, bounds) = (&self.listener.limits, &self.listener.limits.bounds);
        let is_exceeded = |before: usize, max: Option<usize>| max.is_some_and(|max| before + bytes > max);
        let of_connection = self.buffered_bytes.fetch_add(bytes, Ordering::Relaxed);
        let of_address = self.of_address.0.buffered_bytes.fetch_add(bytes, Ordering::Relaxed);
        let total = limits.buffered_bytes.0.fetch_add(bytes, Ordering::Relaxed);
        let exceeded = if is_exceeded(of_connection, bounds.buffered_bytes_per_connection) {
            ExceededLimit::BufferedBytesPerConnection
        } else if is_exceeded(of_address, bounds.buffered_bytes_per_address) {
            ExceededLimit::BufferedBytesPerAddress
        } else if is_exceeded(total, bounds.buffered_bytes) {
            ExceededLimit::BufferedBytes
        } else {
            return Ok(());
        };
        self.remove_buffered_bytes(bytes);
        Err(exceeded)
    }

    /// Subtracts bytes that were added.
    fn remove_buffered_bytes(&self, bytes: usize) {
        let total = &self.listener.limits.buffered_bytes.0;
        for counter in [&self.buffered_bytes, &self.of_address.0.buffered_bytes, total] {
            counter.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Counts a refusal, and logs it unless one for the same limit was logged within a minute.
    pub(super) fn record_refusal(&self, limit: ExceededLimit) {
        let limits = &self.listener.limits;
        limits.stats.record_refusal(limit);
        if let Some(suppressed) = limits.log_throttles[limit as usize].allow(Clock::System.now()) {
            let peer = self.peer.map(|peer| peer.to_string());
            tracing::warn!(peer, suppressed, "{}", limit.explanation());
        }
    }

    /// The listener that the connection came to.
    pub(super) fn listener_kind(&self) -> ListenerKind {
        self.listener.kind
    }

    /// Marks the connection as active. Reads first: most requests find the mark set and keep the cache line shared.
    pub(super) fn mark_active(&self) {
        if !self.is_active.load(Ordering::Relaxed) {
            self.is_active.store(true, Ordering::Relaxed);
        }
    }

    /// Returns and clears the mark: true if a request came since the last call.
    pub(super) fn take_had_request(&self) -> bool {
        self.is_active.swap(false, Ordering::Relaxed)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.listener.stats().record_closed_connection();
        let Some(peer) = self.peer else { return };
        let mut usage = lock_ignoring_poison(&self.listener.usage);
        if let Entry::Occupied(mut address) = usage.entry(client_network(peer.ip())) {
            address.get_mut().connections -= 1;
            if address.get().connections == 0 {
                address.remove();
            }
        }
    }
}

impl RequestPermit {
    /// Counters of all clients and of the address that the request is in.
    fn counters(&self) -> [&AtomicUsize; 2] {
        let (limits, of_address) = (&self.connection.listener.limits, &self.connection.of_address.0);
        match self.is_health_check {
            true => [&limits.health_checks.0, &of_address.health_checks],
            false => [&limits.requests.0, &of_address.requests],
        }
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        for counter in self.counters() {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl OverloadRejection {
    /// Response to the client, which may retry: no hits were charged.
    pub(super) fn into_response(self) -> axum::response::Response {
        match self.0 {
            ListenerKind::Grpc => tonic::Status::resource_exhausted(TOO_MANY_REQUESTS_TEXT).into_http(),
            _ => {
                let headers = [(header::RETRY_AFTER, HeaderValue::from_static("1"))];
                (StatusCode::SERVICE_UNAVAILABLE, headers, format!("{TOO_MANY_REQUESTS_TEXT}\n")).into_response()
            }
        }
    }
}

/// Response over HTTP to a request whose body, or whose response, does not fit beside those in progress.
pub(super) fn build_too_many_bytes_http_response() -> axum::response::Response {
    let headers = [(header::RETRY_AFTER, HeaderValue::from_static("1"))];
    let text = "too many bytes of requests and responses in progress; try again later\n";
    (StatusCode::SERVICE_UNAVAILABLE, headers, text).into_response()
}

/// Bytes of a request or response that are not counted.
const UNCOUNTED_BYTES_PER_BODY: usize = 2048;

/// Bytes of one request or response that count towards the limits. Dropping the value subtracts them.
#[derive(Debug)]
pub(super) struct BufferedBytes {
    connection: Arc<ConnectionPermit>,
    bytes: usize,
}

impl BufferedBytes {
    /// No bytes yet, of a request on this connection.
    pub(super) const fn new(connection: Arc<ConnectionPermit>) -> Self {
        Self { connection, bytes: 0 }
    }

    /// Counts the bytes of a response until the value is dropped; `None` if they are too few to be counted.
    ///
    /// # Errors
    /// The limit that is reached.
    pub(super) fn reserve_for_response(
        connection: &Arc<ConnectionPermit>,
        bytes: usize,
    ) -> Result<Option<Self>, ExceededLimit> {
        if bytes <= UNCOUNTED_BYTES_PER_BODY {
            return Ok(None);
        }
        let mut this = Self::new(Arc::clone(connection));
        this.add_bytes(bytes)?;
        Ok(Some(this))
    }

    /// Adds bytes. Those on a listener for operators do not count.
    ///
    /// # Errors
    /// The limit that is reached; the bytes are not added then.
    pub(super) fn add_bytes(&mut self, bytes: usize) -> Result<(), ExceededLimit> {
        if !self.connection.listener_kind().serves_clients() {
            return Ok(());
        }
        let more = count_bytes_above_uncounted(self.bytes + bytes) - count_bytes_above_uncounted(self.bytes);
        if more > 0 {
            self.connection.add_buffered_bytes(more)?;
        }
        self.bytes += bytes;
        Ok(())
    }

    /// The connection of the request or response.
    pub(super) const fn connection(&self) -> &Arc<ConnectionPermit> {
        &self.connection
    }

    /// Subtracts all bytes.
    pub(super) fn clear(&mut self) {
        let counted = count_bytes_above_uncounted(std::mem::take(&mut self.bytes));
        if counted > 0 {
            self.connection.remove_buffered_bytes(counted);
        }
    }
}

impl Drop for BufferedBytes {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Returns how many of `bytes` count: those above [`UNCOUNTED_BYTES_PER_BODY`].
const fn count_bytes_above_uncounted(bytes: usize) -> usize {
    bytes.saturating_sub(UNCOUNTED_BYTES_PER_BODY)
}
