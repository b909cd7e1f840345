//! One memcached server: how its connections are opened (socket, TLS and a first command), and its circuit breaker.
//!
//! Background tasks keep the connections open; calls wait only for the first connection. While the breaker is open,
//! calls fail at once, and a task checks the server ten times a second. A command is sent once. Commands on one key use
//! one connection, so they run in the order of their calls.
//!
//! Decides: which connection takes a command of memcached: by key, so that commands keep their order.
//! Decides: how a memcached server is probed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::protocol::{MemcacheConnectError, MemcacheError, MemcacheProtocol, MemcacheReply};
use crate::settings::address::Endpoint;
use crate::settings::tls::StoreTls;
use crate::store::client::connect::{
    Connected, Network, PlaintextProbe, ServerToConnect, TlsAdviceTexts, TlsFailureDiagnosis,
};
use crate::store::client::deadline::timeout_with_grace;
use crate::store::client::pipeline::Pipeline;
use crate::store::client::server_status::ServerStatus;
use crate::store::client::supervised_server::{
    ConnectFileHashes, ServerLogNames, ServerState, SupervisedHandle, SupervisedServer,
};

/// Client of one server; dropping it closes its connections once their pending commands are done.
#[derive(Debug)]
pub(crate) struct MemcacheServer {
    state: SupervisedHandle<MemcacheServerState>,
}

impl MemcacheServer {
    /// Starts to connect to `endpoint`. Needs a tokio runtime.
    pub(super) fn start(endpoint: Endpoint, options: Arc<MemcacheConnectOptions>) -> Arc<Self> {
        Arc::new(Self { state: SupervisedHandle::start(MemcacheServerState::new(endpoint, options)) })
    }

    /// Address of the server.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.state.server.endpoint
    }

    /// Returns true if calls are sent to the server now.
    pub(crate) fn is_available(&self) -> bool {
        self.state.server.is_available()
    }

    /// State of the server, for pages and metrics.
    pub(crate) fn status(&self) -> ServerStatus {
        let connections = self.state.server.pool.open_connections();
        let lateness = connections.filter_map(|connection| connection.last_lateness());
        self.state.server.status(lateness.min_by_key(|(age_s, _)| *age_s))
    }

    /// Records the answer to a charge that was sent at `sent`.
    pub(crate) fn record_answer(&self, sent: Instant, answered: Instant) {
        self.state.server.record_answer(sent, answered);
    }

    /// Returns true while calls fail at once because the server failed too often.
    fn is_breaker_open(&self) -> bool {
        self.state.server.is_breaker_open()
    }

    /// Number of open connections.
    pub(crate) fn open_connection_count(&self) -> usize {
        self.state.server.pool.open_connection_count()
    }

    /// Number of connections opened since the start.
    pub(crate) fn opened_connections_total(&self) -> u64 {
        self.state.opened_connections_total.load(Ordering::Relaxed)
    }

    /// Text of a configuration error, free of secrets; `None` without one.
    pub(crate) fn misconfiguration(&self) -> Option<Arc<String>> {
        self.state.server.misconfiguration()
    }

    /// Last reason why the server could not be used, with its address; `None` before the first.
    pub(crate) fn last_failure(&self) -> Option<Arc<String>> {
        self.state.server.last_failure()
    }

    /// Sends a command, whose second word is the key, and waits for its reply until `deadline`. An error reply is an
    /// error.
    pub(crate) async fn call(&self, words: &[&[u8]], deadline: Instant) -> Result<MemcacheReply, MemcacheError> {
        let connection = self.connection(words.get(1).copied().unwrap_or_default(), deadline).await?;
        let outcome = match connection.call(words, None, Some(deadline)).await {
            Ok(MemcacheReply::Error(text)) => Err(MemcacheError::from_reply(&text)),
            Ok(reply) => Ok(reply),
            Err(error) => Err(error.into()),
        };
        match &outcome {
            Ok(_) => self.state.server.record_success(),
            Err(error) => self.record_failure(*error),
        }
        outcome
    }

    fn record_failure(&self, error: MemcacheError) {
        let _opened_breaker = self.state.server.record_failure(error);
    }

    /// Returns a connection, unless the breaker is open.
    async fn connection(&self, key: &[u8], deadline: Instant) -> Result<Arc<MemcacheConnection>, MemcacheError> {
        if self.is_breaker_open() {
            return Err(MemcacheError::BreakerOpen);
        }
        // The lower bits have selected the server.
        let slot = (crc32fast::hash(key) >> 16) as usize;
        if let Some(connection) = self.state.server.pool.connection_from_slot(slot) {
            return Ok(connection);
        }
        match timeout_with_grace(self.state.server.pool.wait_for_connection(), deadline).await {
            Some(connection) => connection.ok_or(MemcacheError::Unreachable),
            None => {
                self.record_failure(MemcacheError::Timeout);
                Err(MemcacheError::Timeout)
            }
        }
    }
}

/// State of a server, and the options of its connections.
#[derive(Debug)]
struct MemcacheServerState {
    server: ServerState<MemcacheConnection>,
    options: Arc<MemcacheConnectOptions>,
    opened_connections_total: AtomicU64,
}

impl MemcacheServerState {
    /// Creates the state of the server at `endpoint`, without connections.
    fn new(endpoint: Endpoint, options: Arc<MemcacheConnectOptions>) -> Self {
        let on_failure = "`on_store_error` decides";
        let names = ServerLogNames {
            program: "memcached",
            files: "certificates",
            setting: None,
            on_failure,
            decides: true,
            call_timeout: options.call_timeout,
            timeout_setting: Some("TOLLKEEPER_STORE_TIMEOUT"),
            login_setting: None,
        };
        let server = ServerState::new(endpoint, options.connections, names);
        Self { server, options, opened_connections_total: AtomicU64::new(0) }
    }
}

impl SupervisedServer for MemcacheServerState {
    type Connection = MemcacheConnection;
    type Error = MemcacheError;

    fn state(&self) -> &ServerState<MemcacheConnection> {
        &self.server
    }

    fn record_opened_connection(&self) {
        self.opened_connections_total.fetch_add(1, Ordering::Relaxed);
    }

    fn hash_connect_files(&self) -> Option<ConnectFileHashes> {
        self.options.hash_connect_files()
    }

    async fn connect(&self) -> Result<Connected<MemcacheConnection>, MemcacheConnectError> {
        connect(&self.server.endpoint, &self.options).await
    }

    async fn check_health(&self, connection: &MemcacheConnection) -> Result<(), MemcacheConnectError> {
        check_server_answers(connection, Some(Instant::now() + self.options.call_timeout)).await
    }
}

/// Open connection to a server.
pub(crate) type MemcacheConnection = Pipeline<MemcacheProtocol>;

/// Upper bound on connecting, the TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

const TLS_FAILURE_DIAGNOSIS: TlsFailureDiagnosis = TlsFailureDiagnosis {
    tls_settings: TlsAdviceTexts {
        prefix: "MEMCACHE",
        address: "MEMCACHE_HOST_PORT or the record of MEMCACHE_SRV",
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
    let server = ServerToConnect { network: &Network::default(), endpoint, uses_tls: options.tls.is_some() };
    TLS_FAILURE_DIAGNOSIS.connect_or_diagnose(server, CONNECT_TIMEOUT, open_connection(endpoint, options)).await
}

async fn open_connection(
    endpoint: &Endpoint,
    options: &MemcacheConnectOptions,
) -> Result<Connected<MemcacheConnection>, MemcacheConnectError> {
    let tls = options.tls.as_ref().map(StoreTls::build_client_config).transpose();
    let tls = tls.map_err(|unusable| MemcacheConnectError::misconfigured(unusable.to_string()))?;
    let uses_tls = tls.is_some();
    let socket_error = |error: &io::Error| TLS_FAILURE_DIAGNOSIS.socket_error(error, uses_tls, None);
    let stream = Network::default().connect(endpoint, tls).await.map_err(|error| socket_error(&error))?;
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
