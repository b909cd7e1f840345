//! Limits on connections and requests, so that one client cannot starve the others.
//!
//! Decides: defaults of what one client may have in connections, requests and bytes; size of headers over HTTP.

use std::time::Duration;

use super::grpc::TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES;
use super::setting::{Setting, settings};
use super::value::number::{ByteSize, ByteSizeRange, DurationRange};
use super::values::Values;

const HEAD_TIMEOUT_RANGE: DurationRange = DurationRange::new(Duration::from_millis(100), Duration::from_secs(3600));
const IDLE_TIMEOUT_RANGE: DurationRange =
    DurationRange::new(Duration::from_millis(100), Duration::from_secs(86_400)).allowing_zero();

const BUFFERED_BYTES_RANGE: ByteSizeRange = ByteSizeRange::new(0, 1 << 40);

settings! { "Limits on clients";
    TOLLKEEPER_MAX_CONNECTIONS: usize = 10_000,
        "open connections per listener, capped at a third of the open-file limit; 0 means that cap";
    TOLLKEEPER_MAX_CONNECTIONS_PER_ADDRESS: usize = 2000,
        "open connections per listener and client address (IPv6: per /64); 0 means no limit";
    TOLLKEEPER_MAX_CONCURRENT_REQUESTS: usize = 65_536,
        "requests in progress over gRPC and /json; more are rejected at once; 0 means no limit";
    TOLLKEEPER_MAX_CONCURRENT_REQUESTS_PER_ADDRESS: usize = 16_384,
        "requests in progress per listener and client address; 0 means no limit";
    TOLLKEEPER_MAX_BUFFERED_BYTES: ByteSize = 128 << 20,
        "bytes of requests and untaken responses in progress over gRPC and /json, beyond 2 KiB each; 0 means no limit"
        .with_allowed(BUFFERED_BYTES_RANGE);
    TOLLKEEPER_MAX_BUFFERED_BYTES_PER_ADDRESS: ByteSize = 32 << 20,
        "the same per client address; 0 means no limit" .with_allowed(BUFFERED_BYTES_RANGE);
    TOLLKEEPER_MAX_BUFFERED_BYTES_PER_CONNECTION: ByteSize = 16 << 20,
        "the same per connection; 0 means no limit" .with_allowed(BUFFERED_BYTES_RANGE);
    TOLLKEEPER_MAX_HEADER_BYTES: ByteSize = 16 << 10,
        "maximum size of the headers of an HTTP request, such as to /json" .with_allowed(ByteSizeRange::new(8 << 10, 1 << 20));
    TOLLKEEPER_HEAD_TIMEOUT: Duration = Duration::from_secs(60),
        "time limit of a TLS handshake, the first request, a call's message, and over HTTP/1 each request's headers"
        .with_allowed(HEAD_TIMEOUT_RANGE);
    TOLLKEEPER_IDLE_TIMEOUT: Duration = Duration::from_secs(3600),
        "time without a new request after which a gRPC connection gets GOAWAY; 0 means no limit" .with_allowed(IDLE_TIMEOUT_RANGE);
}

/// Limits on the connections and requests of clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    /// Open connections of each listener; `None` means a third of the open-file limit.
    pub connections: Option<usize>,
    /// Open connections of each listener and client address; `None` means no limit.
    pub connections_per_address: Option<usize>,
    /// Requests in progress on the gRPC and HTTP listeners together; `None` means no limit.
    pub requests: Option<usize>,
    /// Requests in progress of each listener and client address; `None` means no limit.
    pub requests_per_address: Option<usize>,
    /// Bytes that requests and responses in progress over gRPC and `/json` take; `None` means no limit.
    pub buffered_bytes: Option<usize>,
    /// The same for each client address; `None` means no limit.
    pub buffered_bytes_per_address: Option<usize>,
    /// The same for each connection; `None` means no limit.
    pub buffered_bytes_per_connection: Option<usize>,
    /// Maximum size of the headers of an HTTP request, in bytes, at least 8 KiB.
    pub head_bytes: u32,
    /// Time limit for a TLS handshake, for the first request, for the message of a call, and over HTTP/1 for the
    /// headers of each request, from the end of the previous one.
    pub head_timeout: Duration,
    /// Time without a new request after which a gRPC connection gets GOAWAY; `None` means never.
    pub idle_timeout: Option<Duration>,
}

impl ClientLimits {
    pub(super) fn from_values(values: &Values) -> Self {
        let limit = |setting: &Setting<usize>| Some(values.get(setting)).filter(|limit| *limit > 0);
        // A message of the maximum size must fit.
        let message_bytes = values.get(&TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES).to_usize_saturating();
        let bytes = |setting: &Setting<ByteSize>| {
            Some(values.get(setting).to_usize_saturating())
                .filter(|limit| *limit > 0)
                .map(|limit| limit.max(message_bytes))
        };
        Self {
            connections: limit(&TOLLKEEPER_MAX_CONNECTIONS),
            connections_per_address: limit(&TOLLKEEPER_MAX_CONNECTIONS_PER_ADDRESS),
            requests: limit(&TOLLKEEPER_MAX_CONCURRENT_REQUESTS),
            requests_per_address: limit(&TOLLKEEPER_MAX_CONCURRENT_REQUESTS_PER_ADDRESS),
            buffered_bytes: bytes(&TOLLKEEPER_MAX_BUFFERED_BYTES),
            buffered_bytes_per_address: bytes(&TOLLKEEPER_MAX_BUFFERED_BYTES_PER_ADDRESS),
            buffered_bytes_per_connection: bytes(&TOLLKEEPER_MAX_BUFFERED_BYTES_PER_CONNECTION),
            head_bytes: u32::try_from(values.get(&TOLLKEEPER_MAX_HEADER_BYTES).0).unwrap_or(u32::MAX),
            head_timeout: values.get(&TOLLKEEPER_HEAD_TIMEOUT),
            idle_timeout: values.duration_unless_zero(&TOLLKEEPER_IDLE_TIMEOUT),
        }
    }
}
