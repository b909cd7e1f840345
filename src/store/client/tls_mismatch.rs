//! Detection of a server that uses TLS when the client does not, or the reverse.
//!
//! Such a server closes the connection or waits for more bytes, which looks like an outage. The probe opens a separate
//! connection and sends bytes that hold no secret and that only the other protocol answers: a command in plaintext, or
//! an invalid ClientHello, which a TLS server answers with an alert.

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

/// Command that a server answers in plaintext.
pub(crate) struct PlaintextProbe {
    /// The command.
    pub(crate) command: &'static [u8],
    /// Bytes that a reply may start with.
    pub(crate) replies: &'static [u8],
}

/// Difference between the client and the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TlsMismatch {
    /// Only the client uses TLS.
    ServerLacksTls,
    /// Only the server uses TLS.
    ServerNeedsTls,
}

/// Probes a server that does not answer a client with TLS (`uses_tls`) or without; `None` if TLS is not the reason.
pub(crate) async fn detect(endpoint: &Endpoint, uses_tls: bool, plaintext: &PlaintextProbe) -> Option<TlsMismatch> {
    let Endpoint::Tcp { host, port } = endpoint else { return None };
    let probe = if uses_tls { plaintext.command } else { INVALID_CLIENT_HELLO };
    let first = timeout(PROBE_TIMEOUT, first_reply_byte(host, *port, probe)).await.ok()??;
    match (uses_tls, first) {
        (true, byte) if plaintext.replies.contains(&byte) => Some(TlsMismatch::ServerLacksTls),
        (false, ALERT) => Some(TlsMismatch::ServerNeedsTls),
        _ => None,
    }
}

async fn first_reply_byte(host: &str, port: u16, probe: &[u8]) -> Option<u8> {
    let mut stream = TcpStream::connect((host, port)).await.ok()?;
    stream.write_all(probe).await.ok()?;
    stream.read_u8().await.ok()
}
