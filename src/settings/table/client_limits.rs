//! Limits on connections and requests, so that one client cannot starve the others.

use std::time::Duration;

use crate::settings::setting::settings;
use crate::settings::value::number::DurationRange;
use crate::settings::value::size::{ByteSize, SizeRange};

const HEAD_TIMEOUT: DurationRange = DurationRange::new(Duration::from_millis(100), Duration::from_secs(3600));
const IDLE_TIMEOUT: DurationRange =
    DurationRange::new(Duration::from_millis(100), Duration::from_secs(86_400)).or_zero();

const BUFFERED_BYTES: SizeRange = SizeRange::new(0, 1 << 40);

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
        "bytes of gRPC requests and untaken responses in progress, beyond 2 KiB each; 0 means no limit"
        .allowed(BUFFERED_BYTES);
    TOLLKEEPER_MAX_BUFFERED_BYTES_PER_ADDRESS: ByteSize = 32 << 20,
        "the same per client address; 0 means no limit" .allowed(BUFFERED_BYTES);
    TOLLKEEPER_MAX_BUFFERED_BYTES_PER_CONNECTION: ByteSize = 16 << 20,
        "the same per connection; 0 means no limit" .allowed(BUFFERED_BYTES);
    TOLLKEEPER_MAX_HEADER_BYTES: ByteSize = 16 << 10,
        "maximum size of the headers of an HTTP request, such as to /json" .allowed(SizeRange::new(8 << 10, 1 << 20));
    TOLLKEEPER_HEAD_TIMEOUT: Duration = Duration::from_secs(60),
        "time limit of a TLS handshake, the first request, a call's message, and over HTTP/1 each request's headers"
        .allowed(HEAD_TIMEOUT);
    TOLLKEEPER_IDLE_TIMEOUT: Duration = Duration::from_secs(3600),
        "time without a new request after which a gRPC connection gets GOAWAY; 0 means no limit" .allowed(IDLE_TIMEOUT);
}
