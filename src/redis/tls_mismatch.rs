//! Finds out whether a server speaks TLS, where a connection failed: one that waits for the other protocol hangs up or
//! says nothing, and must not pass for one that is away.
//!
//! It knocks on a connection of its own, with a word that holds no secret and that only a server of the other kind
//! answers: PING without TLS, or a broken greeting of TLS, which is answered with an alert.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::settings::redis::Endpoint;

/// The longest that knocking takes.
const PATIENCE: Duration = Duration::from_millis(200);

/// A greeting without contents.
const BROKEN_GREETING: &[u8] = &[0x16, 3, 1, 0, 4, 1, 0, 0, 0];
/// The first byte of an alert.
const ALERT: u8 = 0x15;

/// What to set, if the server speaks TLS and is not spoken to so (`by_tls`), or the reverse.
pub(crate) async fn detect(endpoint: &Endpoint, by_tls: bool) -> Option<String> {
    let Endpoint::Tcp { host, port } = endpoint else { return None };
    let words: &[u8] = if by_tls { b"PING\r\n" } else { BROKEN_GREETING };
    let first = timeout(PATIENCE, first_byte((host, *port), words)).await.ok()??;
    match (by_tls, first) {
        (true, b'+' | b'-') => Some("the server speaks no TLS: unset REDIS_TLS, and write redis:// in the URL"),
        (false, ALERT) => Some("the server speaks TLS: set REDIS_TLS=true, or write rediss:// in the URL"),
        _ => None,
    }
    .map(str::to_owned)
}

async fn first_byte((host, port): (&str, u16), words: &[u8]) -> Option<u8> {
    let mut stream = TcpStream::connect((host, port)).await.ok()?;
    stream.write_all(words).await.ok()?;
    stream.read_u8().await.ok()
}
