//! Opening of connections: socket, TLS and a first command.

use std::io;
use std::time::{Duration, Instant};

use super::error::{MemcacheConnectError, MemcacheError};
use super::protocol::MemcacheProtocol;
use super::reply::MemcacheReply;
use crate::settings::address::Endpoint;
use crate::settings::tls::StoreTls;
use crate::store::client::connect::{ConnectAdvice, Connected, PlaintextProbe, TlsAdviceTexts, connect_to_endpoint};
use crate::store::client::pipeline::Pipeline;
use crate::store::client::supervisor::ConnectFileHashes;

/// Open connection to a server.
pub(crate) type MemcacheConnection = Pipeline<MemcacheProtocol>;

/// Upper bound on connecting, the TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

const CONNECT_ADVICE: ConnectAdvice = ConnectAdvice {
    tls_settings: TlsAdviceTexts {
        prefix: "MEMCACHE",
        address: "MEMCACHE_HOST_PORT",
        plaintext: "unset MEMCACHE_TLS",
        server: "memcached",
    },
    plaintext_probe: PlaintextProbe { command: b"version\r\n", replies: b"VEC" },
    server_lacks_tls: "the server speaks no TLS: unset MEMCACHE_TLS",
    server_needs_tls: "the server speaks TLS: set MEMCACHE_TLS=true",
};

/// Options of connections to all servers.
#[derive(Clone, Debug)]
pub(crate) struct MemcacheConnectOptions {
    /// TLS; `None` for plaintext.
    pub(crate) tls: Option<StoreTls>,
    /// Number of connections to each server.
    pub(crate) connections: usize,
    /// Upper bound on the first command of a connection, the same as on a call.
    pub(crate) call_timeout: Duration,
}

impl MemcacheConnectOptions {
    /// Hash of the files that connecting reads, to detect changes; `None` if connecting reads none.
    pub(crate) fn hash_connect_files(&self) -> Option<ConnectFileHashes> {
        ConnectFileHashes::of_files(None, self.tls.iter().flat_map(StoreTls::certificate_paths))
    }
}

/// Connects to a server and checks that it answers.
///
/// # Errors
/// The server cannot be reached in time, or is no memcached; the text names the setting to check.
pub(crate) async fn connect(
    endpoint: &Endpoint,
    options: &MemcacheConnectOptions,
) -> Result<Connected<MemcacheConnection>, MemcacheConnectError> {
    CONNECT_ADVICE
        .connect_with_advice(endpoint, options.tls.is_some(), CONNECT_TIMEOUT, open_connection(endpoint, options))
        .await
}

async fn open_connection(
    endpoint: &Endpoint,
    options: &MemcacheConnectOptions,
) -> Result<Connected<MemcacheConnection>, MemcacheConnectError> {
    let tls = options.tls.as_ref().map(StoreTls::build_client_config).transpose();
    let tls = tls.map_err(|unusable| MemcacheConnectError::misconfigured(unusable.to_string()))?;
    let uses_tls = tls.is_some();
    let socket_error = |error: &io::Error| CONNECT_ADVICE.socket_error(error, uses_tls);
    let stream = connect_to_endpoint(endpoint, tls).await.map_err(|error| socket_error(&error))?;
    let (connection, closed) = Pipeline::open(stream);
    match check_server_answers(&connection, Some(Instant::now() + options.call_timeout)).await {
        Ok(()) => Ok(Connected { connection, closed }),
        Err(error) if error.kind == MemcacheError::Broken => {
            let reason = closed.await.unwrap_or_else(|_| io::Error::other(error.text));
            Err(socket_error(&reason))
        }
        Err(error) => Err(error),
    }
}

/// Checks that a server answers, by its deadline if it has one.
pub(crate) async fn check_server_answers(
    connection: &MemcacheConnection,
    deadline: Option<Instant>,
) -> Result<(), MemcacheConnectError> {
    match connection.call(&[b"version"], None, deadline).await {
        Ok(MemcacheReply::Version) => Ok(()),
        Ok(MemcacheReply::Error(text)) => {
            let kind = match MemcacheError::from_reply(&text) {
                MemcacheError::BadReply => MemcacheError::Broken,
                kind => kind,
            };
            Err(MemcacheConnectError { kind, text })
        }
        Ok(_) => Err(MemcacheConnectError { kind: MemcacheError::BadReply, text: "not a memcached".to_owned() }),
        Err(error) => {
            let kind = MemcacheError::from(error);
            Err(MemcacheConnectError { kind, text: kind.to_string() })
        }
    }
}
