//! Opening of connections: socket, TLS and a first command.

use std::io;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::error::{MemcacheConnectError, MemcacheError};
use super::protocol::MemcacheProtocol;
use super::reply::MemcacheReply;
use crate::settings::endpoint::Endpoint;
use crate::settings::store_tls::StoreTls;
use crate::store_client::connect::Connected;
use crate::store_client::pipeline::Pipeline;
use crate::store_client::stream::{self, io_error_text};
use crate::store_client::supervisor::hash_files;
use crate::store_client::tls_advice::TlsSettingNames;
use crate::store_client::tls_mismatch::{self, PlaintextProbe, TlsMismatch};

/// Open connection to a server.
pub(crate) type MemcacheConnection = Pipeline<MemcacheProtocol>;

/// Upper bound on connecting, the TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

const TLS_SETTINGS: TlsSettingNames = TlsSettingNames {
    prefix: "MEMCACHE",
    address: "MEMCACHE_HOST_PORT",
    plaintext: "unset MEMCACHE_TLS",
    server: "memcached",
};
const PLAINTEXT_PROBE: PlaintextProbe = PlaintextProbe { command: b"version\r\n", replies: b"VEC" };

/// Options of connections to all servers.
#[derive(Clone, Debug)]
pub(crate) struct MemcacheOptions {
    /// TLS; `None` for plaintext.
    pub(crate) tls: Option<StoreTls>,
    /// Number of connections to each server.
    pub(crate) connections: usize,
    /// Upper bound on the first command of a connection, the same as on a call.
    pub(crate) call_timeout: Duration,
}

impl MemcacheOptions {
    /// Hash of the files that connecting reads, to detect changes; `None` if connecting reads none.
    pub(crate) fn fingerprint(&self) -> Option<[u8; 32]> {
        hash_files(self.tls.iter().flat_map(StoreTls::files))
    }
}

/// Connects to a server and checks that it answers.
///
/// # Errors
/// The server cannot be reached in time, or is no memcached; the text names the setting to check.
pub(crate) async fn connect(
    endpoint: &Endpoint,
    options: &MemcacheOptions,
) -> Result<Connected<MemcacheConnection>, MemcacheConnectError> {
    match timeout(CONNECT_TIMEOUT, open(endpoint, options)).await.unwrap_or_else(|_| Err(late())) {
        // A server with the other protocol closes the connection or waits for more, which looks like an outage.
        Err(error) if matches!(error.kind, MemcacheError::Timeout | MemcacheError::Broken) => {
            let mismatch = tls_mismatch::detect(endpoint, options.tls.is_some(), &PLAINTEXT_PROBE).await;
            Err(mismatch.map_or(error, mismatch_error))
        }
        outcome => outcome,
    }
}

async fn open(
    endpoint: &Endpoint,
    options: &MemcacheOptions,
) -> Result<Connected<MemcacheConnection>, MemcacheConnectError> {
    let tls = options.tls.as_ref().map(StoreTls::config).transpose();
    let tls = tls.map_err(|unusable| MemcacheConnectError::misconfigured(unusable.to_string()))?;
    let uses_tls = tls.is_some();
    let socket_error = |error: &io::Error| {
        let text = io_error_text(error);
        match TLS_SETTINGS.advice(error).filter(|_| uses_tls) {
            Some(advice) => MemcacheConnectError::misconfigured(format!("the TLS handshake failed: {text}; {advice}")),
            None => MemcacheConnectError { kind: MemcacheError::Broken, text },
        }
    };
    let stream = stream::open(endpoint, tls).await.map_err(|error| socket_error(&error))?;
    let (connection, closed) = Pipeline::open(stream);
    match check(&connection, Some(Instant::now() + options.call_timeout)).await {
        Ok(()) => Ok(Connected { connection, closed }),
        Err(error) if error.kind == MemcacheError::Broken => {
            let reason = closed.await.unwrap_or_else(|_| io::Error::other(error.text));
            Err(socket_error(&reason))
        }
        Err(error) => Err(error),
    }
}

/// Checks that a server answers, by its deadline if it has one.
pub(crate) async fn check(
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

fn mismatch_error(mismatch: TlsMismatch) -> MemcacheConnectError {
    MemcacheConnectError::misconfigured(match mismatch {
        TlsMismatch::ServerLacksTls => "the server speaks no TLS: unset MEMCACHE_TLS".to_owned(),
        TlsMismatch::ServerNeedsTls => "the server speaks TLS: set MEMCACHE_TLS=true".to_owned(),
    })
}

fn late() -> MemcacheConnectError {
    MemcacheConnectError { kind: MemcacheError::Timeout, text: "no answer in time".to_owned() }
}
