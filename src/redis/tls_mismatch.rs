//! Detection of a server that uses TLS when the client does not, or the reverse.
//!
//! Such a server closes the connection or waits for more bytes, which looks like an outage. The probe opens a separate
//! connection and sends bytes that hold no secret and that only the other protocol answers: PING in plaintext, or an
//! invalid ClientHello, which a TLS server answers with an alert.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::settings::endpoint::Endpoint;

/// Upper bound on the probe.
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);

/// ClientHello without contents.
const INVALID_CLIENT_HELLO: &[u8] = &[0x16, 3, 1, 0, 4, 1, 0, 0, 0];
/// First byte of a TLS alert.
const ALERT: u8 = 0x15;

/// Returns the setting to change if the server uses TLS and the client does not (`uses_tls`), or the reverse.
pub(crate) async fn detect(endpoint: &Endpoint, uses_tls: bool) -> Option<String> {
    let Endpoint::Tcp { host, port } = endpoint else { return None };
    let probe: &[u8] = if uses_tls { b"PING\r\n" } else { INVALID_CLIENT_HELLO };
    let first = timeout(PROBE_TIMEOUT, first_reply_byte(host, *port, probe)).await.ok()??;
    match (uses_tls, first) {
        (true, b'+' | b'-') => Some("the server speaks no TLS: unset REDIS_TLS, and write redis:// in the URL"),
        (false, ALERT) => Some("the server speaks TLS: set REDIS_TLS=true, or write rediss:// in the URL"),
        _ => None,
    }
    .map(str::to_owned)
}

async fn first_reply_byte(host: &str, port: u16, probe: &[u8]) -> Option<u8> {
    let mut stream = TcpStream::connect((host, port)).await.ok()?;
    stream.write_all(probe).await.ok()?;
    stream.read_u8().await.ok()
}
