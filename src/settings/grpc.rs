//! Policy for gRPC connections.

use std::time::Duration;

use super::table::grpc::*;
use super::values::Values;

/// Policy for gRPC connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcSettings {
    /// Age at which a connection gets GOAWAY; `None` means never.
    pub max_connection_age: Option<Duration>,
    /// Time after that GOAWAY until the connection is closed; `None` means no limit.
    pub max_connection_age_grace: Option<Duration>,
    /// Time between pings; `None` means no pings.
    pub keepalive_interval: Option<Duration>,
    /// Time to wait for the answer to a ping before the connection is closed.
    pub keepalive_timeout: Duration,
    /// Maximum number of concurrent calls on one connection, at least 1.
    pub max_concurrent_streams: u32,
    /// Maximum size of a request message, at least 1 KiB.
    pub max_message_bytes: usize,
    /// Maximum size of the headers of a call, in bytes, at least 8 KiB.
    pub max_header_bytes: u32,
    /// `true` if server reflection is offered.
    pub reflection: bool,
}

impl GrpcSettings {
    pub(super) fn read(values: &Values) -> Self {
        Self {
            max_connection_age: values.nonzero(&GRPC_MAX_CONNECTION_AGE),
            max_connection_age_grace: values.nonzero(&GRPC_MAX_CONNECTION_AGE_GRACE),
            keepalive_interval: values.nonzero(&TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL),
            keepalive_timeout: values.get(&TOLLKEEPER_GRPC_KEEPALIVE_TIMEOUT),
            max_concurrent_streams: values.get(&TOLLKEEPER_GRPC_MAX_CONCURRENT_STREAMS),
            max_message_bytes: values.get(&TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES).as_usize(),
            max_header_bytes: u32::try_from(values.get(&TOLLKEEPER_GRPC_MAX_HEADER_BYTES).0).unwrap_or(u32::MAX),
            reflection: values.get(&TOLLKEEPER_REFLECTION),
        }
    }
}
