//! Policy for gRPC connections: their age, pings and sizes.
//!
//! Decides: the largest message and header list.
//! Decides: age and grace of connections (`GRPC_MAX_CONNECTION_AGE_GRACE`); quota streams and buckets.
//! Decides: who gets reflection.

use std::time::Duration;

use super::listeners::GrpcListenAddress;
use super::setting::settings;
use super::value::number::ByteSize;
use super::values::Values;

settings! { "gRPC";
    GRPC_MAX_CONNECTION_AGE: Duration = "24h",
        "age at which a connection gets GOAWAY, so that clients rebalance; 0: never";
    GRPC_MAX_CONNECTION_AGE_GRACE: Duration = "1h",
        "time from that GOAWAY until the connection is closed; 0: no limit";
    TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL: Duration = "1m",
        "time between HTTP/2 pings to a client, which has a third of it to answer; 0: none"
        .within("0 or 1s to 24h");
    TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES: ByteSize = "4MiB",
        "maximum size of a request message" .within("1KiB to 1GiB");
    TOLLKEEPER_GRPC_MAX_HEADER_BYTES: ByteSize = "128KiB",
        "maximum size of the headers of a call"
        .within("8KiB to 16MiB");
    TOLLKEEPER_REFLECTION: Option<bool> = "",
        "offer gRPC reflection (grpcurl); unset: only on loopback addresses and unix sockets";
    TOLLKEEPER_RLQS: bool = "false", "offer the rate limit quota service (RLQS)"
        .often_set();
    TOLLKEEPER_RLQS_MAX_BUCKETS: usize = "100000",
        "buckets of all proxies, counted once for each 640 bytes of their ids; a stream gets 4/5 at most; others are abandoned"
        .only_read("with TOLLKEEPER_RLQS=true") .within("1 to 100000000");
}

/// Policy for gRPC connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcSettings {
    /// Age at which a connection gets GOAWAY; `None` means never.
    pub max_connection_age: Option<Duration>,
    /// Time after that GOAWAY until the connection is closed; `None` means no limit.
    pub max_connection_age_grace: Option<Duration>,
    /// Time between pings, a third of which is the time limit of the answer; `None` means no pings.
    pub keepalive_interval: Option<Duration>,
    /// Maximum size of a request message, at least 1 KiB.
    pub max_message_bytes: usize,
    /// Maximum size of the headers of a call, in bytes, at least 8 KiB.
    pub max_header_bytes: u32,
    /// `true` if server reflection is offered.
    pub reflection: bool,
    /// Maximum number of buckets of the rate limit quota service, 1 to 100 000 000, of which a bucket with a long id takes
    /// several; `None` if the service is off.
    pub max_quota_buckets: Option<usize>,
}

impl GrpcSettings {
    /// Reads the settings; the address to listen on decides what is not set.
    pub(super) fn from_values(values: &Values, listener: &GrpcListenAddress) -> Self {
        Self {
            max_connection_age: values.duration_unless_zero(&GRPC_MAX_CONNECTION_AGE),
            max_connection_age_grace: values.duration_unless_zero(&GRPC_MAX_CONNECTION_AGE_GRACE),
            keepalive_interval: values.duration_unless_zero(&TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL),
            max_message_bytes: values.get(&TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES).to_usize_saturating(),
            max_header_bytes: u32::try_from(values.get(&TOLLKEEPER_GRPC_MAX_HEADER_BYTES).0).unwrap_or(u32::MAX),
            reflection: values.get(&TOLLKEEPER_REFLECTION).unwrap_or_else(|| listener.is_local()),
            max_quota_buckets: values.get(&TOLLKEEPER_RLQS).then(|| values.get(&TOLLKEEPER_RLQS_MAX_BUCKETS)),
        }
    }
}
