//! Limits on connections and requests, per listener and per client address.
//!
//! A connection above the limit is closed right after it is accepted, a request above the limit is answered before its
//! body is read; neither ever waits. Limits per address keep one client from using up the rest. Health probes are
//! always answered, because restarting a busy process makes the overload worse. Listeners for operators limit
//! connections only.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::clock::Clock;
use crate::settings::client_limits::ClientLimits;
use crate::telemetry::listener_stats::{ListenerStats, ServerStats};
use crate::telemetry::log_throttle::LogThrottle;

/// The listener that a connection came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListenerKind {
    /// Rate limit service over gRPC.
    Grpc,
    /// `/json` and the health pages.
    Http,
    /// Debug pages for operators.
    Debug,
    /// Metrics for Prometheus.
    Prometheus,
}

impl ListenerKind {
    /// Name in metrics and logs.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Http => "http",
            Self::Debug => "debug",
            Self::Prometheus => "prometheus",
        }
    }

    /// True for listeners that clients use, false for those of operators.
    pub(super) const fn is_public(self) -> bool {
        matches!(self, Self::Grpc | Self::Http)
    }
}

/// Limits and counters that all listeners share.
#[derive(Debug)]
pub(super) struct AdmissionLimits {
    bounds: ClientLimits,
    /// Maximum number of open connections per listener.
    max_connections: usize,
    stats: Arc<ServerStats>,
    /// Requests in flight on all public listeners.
    requests: CachePadded<AtomicUsize>,
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
#[derive(Debug)]
struct AddressUsage {
    connections: usize,
    requests: Arc<CachePadded<AtomicUsize>>,
}

/// An admitted connection. It counts until the connection and its last request have ended.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    listener: Arc<ListenerAdmission>,
    /// Address of the client; `None` for a Unix socket.
    pub(super) peer: Option<SocketAddr>,
    /// Requests in flight from the client's address.
    address_requests: Arc<CachePadded<AtomicUsize>>,
    /// Set by each request, cleared by [`ConnectionPermit::take_active`].
    is_active: AtomicBool,
}

/// An admitted request. Dropping it frees its place.
#[derive(Debug)]
pub(super) struct RequestPermit(Arc<ConnectionPermit>);

/// Interval between log lines about rejections.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

impl AdmissionLimits {
    /// Raises the limit of open files to its maximum and derives the connection limit from it.
    pub(super) fn new(bounds: ClientLimits, stats: Arc<ServerStats>) -> Self {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        // If raising RLIMIT_NOFILE fails, derive the connection limit from the current value.
        let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
        let open_files = if raised { maximum } else { current };
        let third = open_files.map_or(usize::MAX, |files| usize::try_from(files / 3).unwrap_or(usize::MAX));
        let max_connections = bounds.connections.unwrap_or(third).min(third);
        tracing::info!(max_connections, open_files, "connection limit of each listener");
        Self { bounds, max_connections, stats, requests: CachePadded::default() }
    }

    /// Admission of one listener under these limits.
    pub(super) fn listener(self: &Arc<Self>, kind: ListenerKind) -> Arc<ListenerAdmission> {
        Arc::new(ListenerAdmission { kind, limits: Arc::clone(self), usage: Mutex::default() })
    }
}

impl ListenerAdmission {
    /// Counters of this listener.
    pub(super) fn stats(&self) -> &ListenerStats {
        let stats = &self.limits.stats;
        match self.kind {
            ListenerKind::Grpc => &stats.grpc,
            ListenerKind::Http => &stats.http,
            ListenerKind::Debug => &stats.debug,
            ListenerKind::Prometheus => &stats.prometheus,
        }
    }

    /// The listener that is guarded.
    pub(super) const fn kind(&self) -> ListenerKind {
        self.kind
    }

    /// Admits a connection; `None` if a connection limit is reached.
    pub(super) fn admit(self: &Arc<Self>, peer: Option<SocketAddr>) -> Option<Arc<ConnectionPermit>> {
        let max = self.limits.max_connections;
        if self.stats().connections() >= max {
            self.reject_connection("TOLLKEEPER_MAX_CONNECTIONS", max, peer);
            return None;
        }
        let max = self.limits.bounds.connections_per_address.unwrap_or(usize::MAX);
        let Some(address_requests) = self.add_connection(peer, max) else {
            self.reject_connection("TOLLKEEPER_MAX_CONNECTIONS_PER_ADDRESS", max, peer);
            return None;
        };
        self.stats().connection_opened();
        let is_active = AtomicBool::new(false);
        Some(Arc::new(ConnectionPermit { listener: Arc::clone(self), peer, address_requests, is_active }))
    }

    /// Counts a connection of an address and returns its request counter; `None` if it has `max` connections already.
    fn add_connection(&self, peer: Option<SocketAddr>, max: usize) -> Option<Arc<CachePadded<AtomicUsize>>> {
        let Some(peer) = peer else { return Some(Arc::default()) };
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || AddressUsage { connections: 0, requests: Arc::default() };
        let address = usage.entry(address_key(peer)).or_insert_with(new);
        if address.connections >= max {
            return None;
        }
        address.connections += 1;
        Some(Arc::clone(&address.requests))
    }

    fn reject_connection(&self, setting: &'static str, max: usize, peer: Option<SocketAddr>) {
        static THROTTLE: LogThrottle = LogThrottle::every(LOG_INTERVAL);
        self.limits.stats.record_rejected_connection();
        if let Some(suppressed) = THROTTLE.allow(Clock::System.now()) {
            let (listener, peer) = (self.kind.name(), peer.map(|peer| peer.to_string()));
            tracing::warn!(listener, peer, suppressed, "connection closed: {setting} of {max} is reached (raise it)");
        }
    }
}

/// Key under which an address is limited: IPv4 addresses each, IPv6 addresses by their /64 network.
fn address_key(peer: SocketAddr) -> IpAddr {
    match peer.ip() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

impl ConnectionPermit {
    /// Admits a request; `None` if a request limit is reached.
    pub(super) fn admit_request(self: &Arc<Self>) -> Option<RequestPermit> {
        let (limits, bounds) = (&self.listener.limits, &self.listener.limits.bounds);
        let total = limits.requests.0.fetch_add(1, Ordering::Relaxed);
        let of_address = self.address_requests.0.fetch_add(1, Ordering::Relaxed);
        // Dropping the permit subtracts from both counters.
        let permit = RequestPermit(Arc::clone(self));
        let is_reached = |count: usize, max: Option<usize>| max.is_some_and(|max| count >= max);
        let setting = if is_reached(total, bounds.requests) {
            "TOLLKEEPER_MAX_CONCURRENT_REQUESTS"
        } else if is_reached(of_address, bounds.requests_per_address) {
            "TOLLKEEPER_MAX_CONCURRENT_REQUESTS_PER_ADDRESS"
        } else {
            return Some(permit);
        };
        static THROTTLE: LogThrottle = LogThrottle::every(LOG_INTERVAL);
        if let Some(suppressed) = THROTTLE.allow(Clock::System.now()) {
            let peer = self.peer.map(|peer| peer.to_string());
            tracing::warn!(peer, suppressed, "request rejected: {setting} is reached (raise it, or add replicas)");
        }
        None
    }

    /// Counts a rejected request.
    pub(super) fn record_rejected_request(&self) {
        self.listener.limits.stats.record_rejected_request();
    }

    /// The listener that the connection came to.
    pub(super) fn kind(&self) -> ListenerKind {
        self.listener.kind
    }

    /// Marks the connection as active. Reads first: most requests find the mark set and keep the cache line shared.
    pub(super) fn set_active(&self) {
        if !self.is_active.load(Ordering::Relaxed) {
            self.is_active.store(true, Ordering::Relaxed);
        }
    }

    /// Returns and clears the mark: true if a request came since the last call.
    pub(super) fn take_active(&self) -> bool {
        self.is_active.swap(false, Ordering::Relaxed)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.listener.stats().connection_closed();
        let Some(peer) = self.peer else { return };
        let mut usage = self.listener.usage.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut address) = usage.entry(address_key(peer)) {
            address.get_mut().connections -= 1;
            if address.get().connections == 0 {
                address.remove();
            }
        }
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        self.0.listener.limits.requests.0.fetch_sub(1, Ordering::Relaxed);
        self.0.address_requests.0.fetch_sub(1, Ordering::Relaxed);
    }
}
