//! Counters of the listeners: open connections, rejections and the expiry of certificates.

use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

/// Counters of all listeners.
#[derive(Debug, Default)]
pub struct ServerStats {
    /// Rate limit service over gRPC.
    pub grpc: ListenerStats,
    /// `/json` and the health pages.
    pub http: ListenerStats,
    /// Debug pages.
    pub debug: ListenerStats,
    /// Metrics for Prometheus.
    pub prometheus: ListenerStats,
    rejected_connections: AtomicU64,
    rejected_requests: AtomicU64,
}

/// Counters of one listener.
#[derive(Debug, Default)]
pub struct ListenerStats {
    connections: AtomicUsize,
    /// 0 without a certificate.
    certificate_not_after: AtomicI64,
}

impl ServerStats {
    /// Returns the listeners with their names.
    pub fn all(&self) -> [(&'static str, &ListenerStats); 4] {
        [("grpc", &self.grpc), ("http", &self.http), ("debug", &self.debug), ("prometheus", &self.prometheus)]
    }

    /// Counts a connection that a connection limit rejected.
    pub fn record_rejected_connection(&self) {
        self.rejected_connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of connections that a connection limit rejected.
    pub fn rejected_connections(&self) -> u64 {
        self.rejected_connections.load(Ordering::Relaxed)
    }

    /// Counts a request that a request limit rejected.
    pub fn record_rejected_request(&self) {
        self.rejected_requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of requests that a request limit rejected.
    pub fn rejected_requests(&self) -> u64 {
        self.rejected_requests.load(Ordering::Relaxed)
    }
}

impl ListenerStats {
    /// Number of open connections.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts a connection that was opened.
    pub fn connection_opened(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection that was closed.
    pub fn connection_closed(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Expiry of the certificate in seconds since the Unix epoch; `None` without TLS.
    pub fn certificate_not_after(&self) -> Option<i64> {
        Some(self.certificate_not_after.load(Ordering::Relaxed)).filter(|seconds| *seconds != 0)
    }

    /// Sets the expiry of the certificate in seconds since the Unix epoch.
    pub fn set_certificate_not_after(&self, seconds: i64) {
        self.certificate_not_after.store(seconds, Ordering::Relaxed);
    }
}
