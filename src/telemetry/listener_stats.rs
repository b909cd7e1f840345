//! What is counted at the listeners: connections, what was turned away, and how long certificates are good for.

use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

/// All listeners.
#[derive(Debug, Default)]
pub struct ServerStats {
    /// Of the rate limit service.
    pub grpc: ListenerStats,
    /// Of `/json` and the health pages.
    pub http: ListenerStats,
    /// Of what shows the inside.
    pub debug: ListenerStats,
    /// Of Prometheus.
    pub prometheus: ListenerStats,
    refused_connections: AtomicU64,
    refused_requests: AtomicU64,
}

/// One listener.
#[derive(Debug, Default)]
pub struct ListenerStats {
    connections: AtomicUsize,
    /// 0 where there is no certificate.
    not_after: AtomicI64,
}

impl ServerStats {
    /// The listeners by name.
    pub fn all(&self) -> [(&'static str, &ListenerStats); 4] {
        [("grpc", &self.grpc), ("http", &self.http), ("debug", &self.debug), ("prometheus", &self.prometheus)]
    }

    /// Counts a connection that was closed at once, because there were too many.
    pub fn note_refused_connection(&self) {
        self.refused_connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Connections that were closed at once.
    pub fn refused_connections(&self) -> u64 {
        self.refused_connections.load(Ordering::Relaxed)
    }

    /// Counts a request that was refused at once, because there were too many.
    pub fn note_refused_request(&self) {
        self.refused_requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Requests that were refused at once.
    pub fn refused_requests(&self) -> u64 {
        self.refused_requests.load(Ordering::Relaxed)
    }
}

impl ListenerStats {
    /// Connections that are open.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts one more.
    pub fn connection_opened(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one less.
    pub fn connection_closed(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// When the certificate ends, in seconds since 1970; `None` without TLS.
    pub fn not_after(&self) -> Option<i64> {
        Some(self.not_after.load(Ordering::Relaxed)).filter(|seconds| *seconds != 0)
    }

    /// Notes when the certificate that is shown from now on ends, in seconds since 1970.
    pub fn note_not_after(&self, seconds: i64) {
        self.not_after.store(seconds, Ordering::Relaxed);
    }
}
