//! What clients may take of this process, so that one of them does not keep it from the others.

use std::time::Duration;

/// What clients may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Connections that each listener may have open; `None`: as many as there are files for.
    pub connections: Option<usize>,
    /// Those of them that may come from one address; `None`: all.
    pub connections_per_address: Option<usize>,
    /// Requests that may be read or answered at once, on all listeners for callers together; `None`: any number.
    pub requests: Option<usize>,
    /// Those of them that may come from one address to one listener; `None`: all.
    pub requests_per_address: Option<usize>,
    /// The largest head of a request from a caller, in bytes: at least 8 KiB.
    pub head_bytes: u32,
    /// How long a client may take to begin: for a TLS handshake, for its first request, and over HTTP/1 for the head of
    /// each, from the end of the one before.
    pub head_timeout: Duration,
    /// A gRPC connection without a new request for this time is asked to close; `None`: it may stay.
    pub idle_timeout: Option<Duration>,
}
