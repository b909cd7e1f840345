//! gRPC connections.

use std::time::Duration;

use crate::base::go_syntax::MAX_DURATION;
use crate::settings::setting::settings;
use crate::settings::value::number::{DurationRange, IntRange};
use crate::settings::value::size::{ByteSize, SizeRange};

const MAX_AGE: DurationRange = DurationRange::new(Duration::from_millis(1), MAX_DURATION).or_zero();
const KEEPALIVE_INTERVAL: DurationRange =
    DurationRange::new(Duration::from_secs(1), Duration::from_secs(86_400)).or_zero();
const KEEPALIVE_TIMEOUT: DurationRange = DurationRange::new(Duration::from_millis(100), Duration::from_secs(3600));

settings! { "gRPC";
    GRPC_MAX_CONNECTION_AGE: Duration = Duration::from_secs(86_400),
        "age at which a connection gets GOAWAY, so that clients rebalance; 0 means never" .allowed(MAX_AGE);
    GRPC_MAX_CONNECTION_AGE_GRACE: Duration = Duration::from_secs(3600),
        "time after that GOAWAY until the connection is closed; 0 means no limit" .allowed(MAX_AGE);
    TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(60),
        "time between HTTP/2 pings to a client; 0 means no pings" .allowed(KEEPALIVE_INTERVAL);
    TOLLKEEPER_GRPC_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20),
        "time limit of the answer to a ping; then the connection is closed" .allowed(KEEPALIVE_TIMEOUT);
    TOLLKEEPER_GRPC_MAX_CONCURRENT_STREAMS: u32 = 4096,
        "maximum number of concurrent calls on one connection, delayed responses included"
        .allowed(IntRange::new(1, 1 << 30));
    TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES: ByteSize = 4 << 20,
        "maximum size of a request message" .allowed(SizeRange::new(1 << 10, 1 << 30));
    TOLLKEEPER_GRPC_MAX_HEADER_BYTES: ByteSize = 128 << 10,
        "maximum size of the headers of a call; values above 16 KiB are dropped and do not count"
        .allowed(SizeRange::new(8 << 10, 16 << 20));
    TOLLKEEPER_REFLECTION: bool = false, "offer gRPC server reflection, for tools such as grpcurl";
}
