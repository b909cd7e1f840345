//! The admission of a listener: who is let in, and how many at once.
//!
//! A connection too many is closed as soon as it is accepted, a request too many is answered before it is read; nothing
//! ever waits for its request_permit. An address has a share of both, so that one client does not keep the rest out. Probes are
//! answered however full it is, since a process that is restarted for being busy helps nobody, and what is for
//! operators has no bound but that on connections.

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

/// What a listener is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The rate limit service.
    Grpc,
    /// `/json` and the health pages.
    Http,
    /// What shows the inside.
    Debug,
    /// Prometheus.
    Prometheus,
}

impl Purpose {
    /// Its name in metrics and logs.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Http => "http",
            Self::Debug => "debug",
            Self::Prometheus => "prometheus",
        }
    }

    /// Whether anybody may come, rather than operators.
    pub(super) const fn is_public(self) -> bool {
        matches!(self, Self::Grpc | Self::Http)
    }
}

/// What all server_stats share.
#[derive(Debug)]
pub(super) struct AdmissionLimits {
    bounds: ClientLimits,
    /// Connections that each admission may have open.
    most_connections: usize,
    server_stats: Arc<ServerStats>,
    requests: CachePadded<AtomicUsize>,
}

/// A number that many threads change, on a line of memory of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// The admission of a listener.
#[derive(Debug)]
pub(super) struct ListenerAdmission {
    purpose: Purpose,
    limits: Arc<AdmissionLimits>,
    shares: Mutex<HashMap<IpAddr, Share>>,
}

/// What one address has.
#[derive(Debug)]
struct Share {
    connections: usize,
    requests: Arc<CachePadded<AtomicUsize>>,
}

/// Who is at the other end of a connection. It counts until the last request of it is answered.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    admission: Arc<ListenerAdmission>,
    /// Where it is; `None`: on this machine, by a unix socket.
    pub(super) peer: Option<SocketAddr>,
    /// InFlightRequests from its address.
    requests: Arc<CachePadded<AtomicUsize>>,
    /// Whether it has sent a request since this was last looked at.
    has_asked: AtomicBool,
}

/// A request that is being read or answered.
#[derive(Debug)]
pub(super) struct RequestPermit(Arc<ConnectionPermit>);

/// Refusals are told this often.
const TOLD: Duration = Duration::from_secs(60);

impl AdmissionLimits {
    /// Asks the system for as many open files as it gives.
    pub(super) fn new(bounds: ClientLimits, server_stats: Arc<ServerStats>) -> Self {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        // What is not given is not needed: the bound below follows what there is.
        let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
        let files = if raised { maximum } else { current };
        let share = files.map_or(usize::MAX, |files| usize::try_from(files / 3).unwrap_or(usize::MAX));
        let most_connections = bounds.connections.unwrap_or(share).min(share);
        tracing::info!(most_connections, open_files = files, "connections that each listener may have");
        Self { bounds, most_connections, server_stats, requests: CachePadded::default() }
    }

    /// The admission of a listener.
    pub(super) fn admission(self: &Arc<Self>, purpose: Purpose) -> Arc<ListenerAdmission> {
        Arc::new(ListenerAdmission { purpose, limits: Arc::clone(self), shares: Mutex::default() })
    }
}

impl ListenerAdmission {
    /// What is counted at it.
    pub(super) fn stats(&self) -> &ListenerStats {
        let server_stats = &self.limits.server_stats;
        match self.purpose {
            Purpose::Grpc => &server_stats.grpc,
            Purpose::Http => &server_stats.http,
            Purpose::Debug => &server_stats.debug,
            Purpose::Prometheus => &server_stats.prometheus,
        }
    }

    /// What the listener is for.
    pub(super) const fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Lets a connection in; `None` if there are too many.
    pub(super) fn admit(self: &Arc<Self>, peer: Option<SocketAddr>) -> Option<Arc<ConnectionPermit>> {
        let most = self.limits.most_connections;
        if self.stats().connections() >= most {
            self.refuse_connection("TOLLKEEPER_MAX_CONNECTIONS", most, peer);
            return None;
        }
        let most = self.limits.bounds.connections_per_address.unwrap_or(usize::MAX);
        let Some(requests) = self.share(peer, most) else {
            self.refuse_connection("TOLLKEEPER_MAX_CONNECTIONS_PER_ADDRESS", most, peer);
            return None;
        };
        self.stats().connection_opened();
        Some(Arc::new(ConnectionPermit {
            admission: Arc::clone(self),
            peer,
            requests,
            has_asked: AtomicBool::new(false),
        }))
    }

    /// One connection more of an address, and its requests; `None` if there are too many.
    fn share(&self, peer: Option<SocketAddr>, most: usize) -> Option<Arc<CachePadded<AtomicUsize>>> {
        let Some(peer) = peer else { return Some(Arc::default()) };
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let share = shares.entry(place(peer)).or_insert_with(|| Share { connections: 0, requests: Arc::default() });
        if share.connections >= most {
            return None;
        }
        share.connections += 1;
        Some(Arc::clone(&share.requests))
    }

    fn refuse_connection(&self, setting: &'static str, most: usize, peer: Option<SocketAddr>) {
        static THROTTLE: LogThrottle = LogThrottle::every(TOLD);
        self.limits.server_stats.note_refused_connection();
        if let Some(suppressed) = THROTTLE.allow(Clock::System.now()) {
            let (listener, peer) = (self.purpose.name(), peer.map(|peer| peer.to_string()));
            tracing::warn!(listener, peer, suppressed, "{setting}: connections were closed: there are {most} already");
        }
    }
}

/// What counts as one address: whoever has one of IPv6 has a whole network of them.
fn place(peer: SocketAddr) -> IpAddr {
    match peer.ip() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

impl ConnectionPermit {
    /// Lets a request in; `None` if there are too many.
    pub(super) fn begin(self: &Arc<Self>) -> Option<RequestPermit> {
        let (limits, bounds) = (&self.admission.limits, &self.admission.limits.bounds);
        let all = limits.requests.0.fetch_add(1, Ordering::Relaxed);
        let own = self.requests.0.fetch_add(1, Ordering::Relaxed);
        // Dropping it undoes both.
        let request_permit = RequestPermit(Arc::clone(self));
        let over = |count: usize, most: Option<usize>| most.is_some_and(|most| count >= most);
        let setting = if over(all, bounds.requests) {
            "TOLLKEEPER_MAX_CONCURRENT_REQUESTS"
        } else if over(own, bounds.requests_per_address) {
            "TOLLKEEPER_MAX_CONCURRENT_REQUESTS_PER_ADDRESS"
        } else {
            return Some(request_permit);
        };
        static THROTTLE: LogThrottle = LogThrottle::every(TOLD);
        if let Some(suppressed) = THROTTLE.allow(Clock::System.now()) {
            let peer = self.peer.map(|peer| peer.to_string());
            tracing::warn!(peer, suppressed, "{setting}: requests were refused: too many are being answered");
        }
        None
    }

    /// Counts a request that was refused.
    pub(super) fn note_refused(&self) {
        self.admission.limits.server_stats.note_refused_request();
    }

    /// What the listener is for that it came to.
    pub(super) fn purpose(&self) -> Purpose {
        self.admission.purpose
    }

    /// Notes a request. Most find it noted already, and leave the line of memory to others that read it.
    pub(super) fn ask(&self) {
        if !self.has_asked.load(Ordering::Relaxed) {
            self.has_asked.store(true, Ordering::Relaxed);
        }
    }

    /// Whether there was a request since this was last asked.
    pub(super) fn has_asked(&self) -> bool {
        self.has_asked.swap(false, Ordering::Relaxed)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.admission.stats().connection_closed();
        let Some(peer) = self.peer else { return };
        let mut shares = self.admission.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut share) = shares.entry(place(peer)) {
            share.get_mut().connections -= 1;
            if share.get().connections == 0 {
                share.remove();
            }
        }
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        self.0.admission.limits.requests.0.fetch_sub(1, Ordering::Relaxed);
        self.0.requests.0.fetch_sub(1, Ordering::Relaxed);
    }
}
