//! Opening of connections within a time, and the explanation of failures.

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::time::timeout;

use super::connect_error::{ConnectError, ErrorKind};
use super::pipeline::Closed;
use super::stream::io_error_text;
use super::tls_advice::TlsSettingNames;
use super::tls_mismatch::{self, PlaintextProbe, TlsMismatch};
use crate::settings::endpoint::Endpoint;

/// Connection that is ready for commands.
#[derive(Debug)]
pub(crate) struct Connected<C> {
    pub(crate) connection: C,
    /// Receives the reason once the connection is closed.
    pub(crate) closed: Closed,
}

/// Advice for connections to one kind of server.
pub(crate) struct ConnectAdvice {
    /// Names of the client's TLS settings.
    pub(crate) tls_settings: TlsSettingNames,
    /// Command that the server answers in plaintext.
    pub(crate) plaintext_probe: PlaintextProbe,
    /// Error text if only the client uses TLS.
    pub(crate) server_lacks_tls: &'static str,
    /// Error text if only the server uses TLS.
    pub(crate) server_needs_tls: &'static str,
}

impl ConnectAdvice {
    /// Runs `open` for at most `limit`. Explains a failure that comes of a difference in TLS.
    pub(crate) async fn connect<T, K: ErrorKind>(
        &self,
        endpoint: &Endpoint,
        uses_tls: bool,
        limit: Duration,
        open: impl Future<Output = Result<T, ConnectError<K>>>,
    ) -> Result<T, ConnectError<K>> {
        let late = || Err(ConnectError { kind: K::TIMEOUT, text: "no answer in time".to_owned() });
        match timeout(limit, open).await.unwrap_or_else(|_| late()) {
            // A server with the other protocol closes the connection or waits for more, which looks like an outage.
            Err(error) if error.kind == K::TIMEOUT || error.kind == K::BROKEN => {
                let advice = match tls_mismatch::detect(endpoint, uses_tls, &self.plaintext_probe).await {
                    None => return Err(error),
                    Some(TlsMismatch::ServerLacksTls) => self.server_lacks_tls,
                    Some(TlsMismatch::ServerNeedsTls) => self.server_needs_tls,
                };
                Err(ConnectError::misconfigured(advice.to_owned()))
            }
            outcome => outcome,
        }
    }

    /// Returns the error for a failed socket or TLS handshake.
    pub(crate) fn socket_error<K: ErrorKind>(&self, error: &io::Error, uses_tls: bool) -> ConnectError<K> {
        let text = io_error_text(error);
        match self.tls_settings.advice(error).filter(|_| uses_tls) {
            Some(advice) => ConnectError::misconfigured(format!("the TLS handshake failed: {text}; {advice}")),
            None => ConnectError { kind: K::BROKEN, text },
        }
    }
}
