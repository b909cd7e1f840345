//! Policy for gRPC connections: their age, pings and sizes.
//!
//! Decides: the largest message and header list.
//! Decides: age and grace of connections (`GRPC_MAX_CONNECTION_AGE_GRACE`); quota streams and buckets.
//! Decides: who gets reflection.

use std::time::Duration;

use super::listeners::GrpcListenAddress;
use super::setting::settings;
use super::value::number::{ByteSize, ByteSizeRange, DurationRange, IntRange};
use super::values::Values;
use crate::base::go_syntax::MAX_GO_DURATION;

const CONNECTION_AGE_RANGE: DurationRange =
    DurationRange::new(Duration::from_millis(1), MAX_GO_DURATION).allowing_zero();
const KEEPALIVE_INTERVAL_RANGE: DurationRange =
    DurationRange::new(Duration::from_secs(1), Duration::from_secs(86_400)).allowing_zero();
settings! { "gRPC";
    GRPC_MAX_CONNECTION_AGE: Duration = Duration::from_secs(86_400),
        "age at which a connection gets GOAWAY, so that clients rebalance; 0 means never" .with_allowed(CONNECTION_AGE_RANGE);
    GRPC_MAX_CONNECTION_AGE_GRACE: Duration = Duration::from_secs(3600),
        "time after that GOAWAY until the connection is closed; 0 means no limit" .with_allowed(CONNECTION_AGE_RANGE);
    TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(60),
        "time between HTTP/2 pings to a client, a third of which is the time limit of the answer; 0 means no pings" .with_allowed(KEEPALIVE_INTERVAL_RANGE);
    TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES: ByteSize = 4 << 20,
        "maximum size of a request message" .with_allowed(ByteSizeRange::new(1 << 10, 1 << 30));
    TOLLKEEPER_GRPC_MAX_HEADER_BYTES: ByteSize = 128 << 10,
        "maximum size of the headers of a call"
        .with_allowed(ByteSizeRange::new(8 << 10, 16 << 20));
    TOLLKEEPER_REFLECTION: Option<bool> = None,
        "offer gRPC server reflection, for tools such as grpcurl; unset: only on loopback addresses and unix sockets";
    TOLLKEEPER_RLQS: bool = false, "offer the rate limit quota service, by which proxies decide by themselves"
        .often_set();
    TOLLKEEPER_RLQS_MAX_BUCKETS: usize = 100_000,
        "buckets of all proxies, of which one stream gets at most 4/5; further ones are abandoned"
        .only_read("with TOLLKEEPER_RLQS=true") .with_allowed(IntRange::new(1, 100_000_000));
    TOLLKEEPER_RLQS_MAX_ID_BYTES: ByteSize = 64 << 20,
        "the same for the bytes of their keys and values" .only_read("with TOLLKEEPER_RLQS=true")
        .with_allowed(ByteSizeRange::new(1 << 10, 1 << 40));
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
    /// The rate limit quota service; `None` if it is off.
    pub quota: Option<QuotaSettings>,
}

/// Bounds of the rate limit quota service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaSettings {
    /// Maximum number of buckets of all streams.
    pub buckets: usize,
    /// Maximum number of bytes of their ids.
    pub id_bytes: usize,
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
            quota: values.get(&TOLLKEEPER_RLQS).then(|| QuotaSettings {
                buckets: values.get(&TOLLKEEPER_RLQS_MAX_BUCKETS),
                id_bytes: values.get(&TOLLKEEPER_RLQS_MAX_ID_BYTES).to_usize_saturating(),
            }),
        }
    }
}
