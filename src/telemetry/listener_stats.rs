//! Counters of the listeners: open connections, rejections and the expiry of certificates, with those that this process
//! presents to servers.
//!
//! A connection above its limit is *rejected* on accept. A request, or a connection in use, is *refused* by one of the
//! limits of [`ExceededLimit`]. Refusals of h2, which this program never sees, are in `http2_refusals`.
//!
//! Decides: when a connection counts as rejected, and a request as refused; what the log says of it (`explanation`).

use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

use crate::base::named_enum::named_enum;

/// Counters of all listeners.
#[derive(Debug, Default)]
pub struct StatsByListener {
    listeners: [ListenerStats; ListenerKind::ALL.len()],
    rejected_connections: AtomicU64,
    refusals: [AtomicU64; ExceededLimit::ALL.len()],
    /// Expiry of the certificates that this process presents to servers; 0 without a certificate.
    client_certificates_not_after: [AtomicI64; OutgoingTlsConnection::ALL.len()],
}

named_enum! {
    /// The listener that a connection came to, with its name in metrics and logs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ListenerKind {
        /// Rate limit service over gRPC.
        Grpc = "grpc",
        /// `/json` and the health pages.
        Http = "http",
        /// Debug pages for operators.
        Debug = "debug",
        /// Metrics for Prometheus.
        Prometheus = "prometheus",
    }
}

impl ListenerKind {
    /// True for listeners that clients use, false for those of operators.
    pub const fn serves_clients(self) -> bool {
        matches!(self, Self::Grpc | Self::Http)
    }
}

named_enum! {
    /// Connection for which this process has a client certificate, with its value of the label `client`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum OutgoingTlsConnection {
        /// Connections to Redis servers.
        Redis = "redis",
        /// Connections to memcached servers.
        Memcached = "memcached",
        /// Stream of rules from the control plane.
        Xds = "xds",
        /// Export of traces.
        OtlpTraces = "otlp_traces",
        /// Export of the decision log.
        OtlpLogs = "otlp_logs",
        /// Export of metrics.
        OtlpMetrics = "otlp_metrics",
    }
}

named_enum! {
    /// Limit that a refused request or a closed connection exceeded, with its value of the label `reason`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ExceededLimit {
        /// Requests in progress.
        Requests = "concurrent_requests",
        /// Requests in progress of one address.
        RequestsPerAddress = "concurrent_requests_per_address",
        /// Bytes of requests and responses in progress.
        BufferedBytes = "buffered_bytes",
        /// Bytes of requests and responses in progress of one address.
        BufferedBytesPerAddress = "buffered_bytes_per_address",
        /// Bytes of requests and responses in progress of one connection.
        BufferedBytesPerConnection = "buffered_bytes_per_connection",
        /// Time for the message of a call.
        MessageTimeout = "message_timeout",
        /// SETTINGS and GOAWAY frames of one connection.
        Frames = "frames",
    }
}

impl ExceededLimit {
    /// Log line: what happened, why, and what to do.
    pub const fn explanation(self) -> &'static str {
        match self {
            Self::Requests => {
                "request rejected: TOLLKEEPER_MAX_CONCURRENT_REQUESTS is reached (raise it, or add replicas)"
            }
            Self::RequestsPerAddress => {
                "request rejected: TOLLKEEPER_MAX_CONCURRENT_REQUESTS / 4 for one address is reached (raise it, or add replicas)"
            }
            Self::BufferedBytes => "request rejected: TOLLKEEPER_MAX_BUFFERED_BYTES is reached (raise it)",
            Self::BufferedBytesPerAddress => {
                "request rejected: TOLLKEEPER_MAX_BUFFERED_BYTES / 4 for one address is reached (raise it)"
            }
            Self::BufferedBytesPerConnection => {
                "request rejected: TOLLKEEPER_MAX_BUFFERED_BYTES / 8 for one connection is reached (raise it)"
            }
            Self::MessageTimeout => "call rejected: no whole message within TOLLKEEPER_HEAD_TIMEOUT (check the client)",
            Self::Frames => "connection closed: too many SETTINGS or GOAWAY frames (check the client)",
        }
    }
}

/// Counters of one listener.
#[derive(Debug, Default)]
pub struct ListenerStats {
    connections: AtomicUsize,
    /// 0 without a certificate.
    certificate_not_after: AtomicI64,
}

/// Number of streams that clients reset, before or after the answer: calls that Envoy gave up.
pub static RESET_STREAMS: AtomicU64 = AtomicU64::new(0);

impl StatsByListener {
    /// Counters of a listener.
    pub const fn of_listener(&self, kind: ListenerKind) -> &ListenerStats {
        &self.listeners[kind as usize]
    }

    /// Returns the listeners with their names.
    pub fn named_listeners(&self) -> impl Iterator<Item = (&'static str, &ListenerStats)> {
        ListenerKind::ALL.into_iter().map(|kind| (kind.name(), self.of_listener(kind)))
    }

    /// Counts a connection that a connection limit rejected.
    pub fn record_rejected_connection(&self) {
        self.rejected_connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of connections that a connection limit rejected.
    pub fn rejected_connection_count(&self) -> u64 {
        self.rejected_connections.load(Ordering::Relaxed)
    }

    /// Counts a request or connection that a limit refused.
    pub fn record_refusal(&self, limit: ExceededLimit) {
        self.refusals[limit as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Number of requests and connections that a limit refused.
    pub fn refusal_count(&self, limit: ExceededLimit) -> u64 {
        self.refusals[limit as usize].load(Ordering::Relaxed)
    }

    /// Expiry of the certificate that this process presents on a connection, in seconds since the Unix epoch.
    ///
    /// `None` without a certificate.
    pub fn presented_certificate_not_after(&self, client: OutgoingTlsConnection) -> Option<i64> {
        let seconds = self.client_certificates_not_after[client as usize].load(Ordering::Relaxed);
        Some(seconds).filter(|seconds| *seconds != 0)
    }

    /// Sets the expiry of the certificate that this process presents on a connection, in seconds since the Unix epoch.
    pub fn set_presented_certificate_not_after(&self, client: OutgoingTlsConnection, seconds: i64) {
        self.client_certificates_not_after[client as usize].store(seconds, Ordering::Relaxed);
    }
}

impl ListenerStats {
    /// Number of open connections.
    pub fn open_connection_count(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts a connection that was opened.
    pub fn record_opened_connection(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection that was closed.
    pub fn record_closed_connection(&self) {
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
