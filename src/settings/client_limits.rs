//! Limits on connections and requests, so that one client cannot starve the others.
//!
//! Decides: what one client may have in connections, requests and bytes: a part of what all may have.

use std::time::Duration;

use super::grpc::TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES;
use super::setting::{Setting, settings};
use super::value::number::ByteSize;
use super::values::Values;

settings! { "Limits on clients";
    TOLLKEEPER_MAX_CONNECTIONS: usize = "10000",
        "open connections per listener, a fifth per client address; capped at a third of the open-file limit; 0: that cap";
    TOLLKEEPER_MAX_CONCURRENT_REQUESTS: usize = "65536",
        "requests in progress over gRPC and /json, a quarter per client address; 0: no limit";
    TOLLKEEPER_MAX_BUFFERED_BYTES: ByteSize = "128MiB",
        "bytes of requests and untaken responses, beyond 2 KiB each, a quarter per client address; 0: no limit"
        .within("0 to 1024GiB");
    TOLLKEEPER_MAX_DESCRIPTORS: usize = "10000", "most descriptors of a request; more are an error"
        .within("1 to 10000");
    TOLLKEEPER_HEAD_TIMEOUT: Duration = "1m",
        "time limit of a TLS handshake, the first request, a call's message, and HTTP/1 headers"
        .within("100ms to 1h");
    TOLLKEEPER_IDLE_TIMEOUT: Duration = "1h",
        "time without a new request after which a gRPC connection gets GOAWAY; 0: no limit"
        .within("0 or 100ms to 24h");
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
    /// Descriptors of a request, 1 to 10 000.
    pub descriptors: usize,
    /// Time limit for a TLS handshake, for the first request, for the message of a call, and over HTTP/1 for the
    /// headers of each request, from the end of the previous one.
    pub head_timeout: Duration,
    /// Time without a new request after which a gRPC connection gets GOAWAY; `None` means never.
    pub idle_timeout: Option<Duration>,
}

impl ClientLimits {
    /// Reads the limits on all clients; an address or connection gets a part of each.
    pub(super) fn from_values(values: &Values) -> Self {
        let limit = |setting: &Setting<usize>| Some(values.get(setting)).filter(|limit| *limit > 0);
        let part = |limit: Option<usize>, divisor: usize| limit.map(|limit| (limit / divisor).max(1));
        let (connections, requests) = (limit(&TOLLKEEPER_MAX_CONNECTIONS), limit(&TOLLKEEPER_MAX_CONCURRENT_REQUESTS));
        let bytes = Some(values.get(&TOLLKEEPER_MAX_BUFFERED_BYTES).to_usize_saturating()).filter(|bytes| *bytes > 0);
        // A message of the maximum size must fit.
        let message_bytes = values.get(&TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES).to_usize_saturating();
        let part_of_bytes = |divisor: usize| bytes.map(|bytes| (bytes / divisor).max(message_bytes));
        Self {
            connections,
            connections_per_address: part(connections, 5),
            requests,
            requests_per_address: part(requests, 4),
            buffered_bytes: part_of_bytes(1),
            buffered_bytes_per_address: part_of_bytes(4),
            buffered_bytes_per_connection: part_of_bytes(8),
            descriptors: values.get(&TOLLKEEPER_MAX_DESCRIPTORS),
            head_timeout: values.get(&TOLLKEEPER_HEAD_TIMEOUT),
            idle_timeout: values.duration_unless_zero(&TOLLKEEPER_IDLE_TIMEOUT),
        }
    }
}
