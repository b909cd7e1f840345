//! Supervisor of one store server: background tasks that keep the connections to it open, and find out when a failing
//! server serves again.
//!
//! [`SupervisedHandle`] starts the tasks and ends them when it is dropped. A kind of server implements
//! [`SupervisedServer`].

use std::future::Future;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::connect::{CallErrorKind, ConnectError, Connected, io_error_text};
use super::pipeline::ClosedReceiver;
use super::server_state::ServerState;
use crate::base::clock::Clock;

/// Pause between two connection attempts or checks of a failing server.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time that a server fails before its connections are replaced.
pub(crate) const RECONNECT_AFTER: Duration = Duration::from_millis(200);
/// Lifetime below which a closed connection is reopened only after [`RETRY_INTERVAL`].
const MIN_LIFETIME_FOR_IMMEDIATE_RECONNECT: Duration = Duration::from_millis(20);
/// Pause between two attempts to replace a connection that still works.
const REPLACE_INTERVAL: Duration = Duration::from_secs(1);
/// Pause between two checks for changed files and renewed tokens.
pub(crate) const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Kind of store server whose connections a supervisor keeps open.
pub(crate) trait SupervisedServer: Send + Sync + 'static {
    /// Open connection.
    type Connection: Send + Sync + 'static;
    /// Reason of a failed call.
    type Error: CallErrorKind;

    /// State that the supervisor and calls share.
    fn state(&self) -> &ServerState<Self::Connection>;

    /// Records that a connection was opened, before calls use it.
    fn record_opened_connection(&self);

    /// Hashes the files that connecting reads, to detect changes; `None` if connecting reads none.
    fn hash_connect_files(&self) -> Option<ConnectFileHashes>;

    /// Logs in again on the open connections, with credentials that changed. Returns false if they have to be replaced.
    fn renew_credentials(&self) -> impl Future<Output = bool> + Send {
        async { false }
    }

    /// Opens a connection that is ready for commands.
    fn connect(&self) -> impl Future<Output = Result<Connected<Self::Connection>, ConnectError<Self::Error>>> + Send;

    /// Checks that the server serves again, over an open connection.
    fn check_health(
        &self,
        connection: &Self::Connection,
    ) -> impl Future<Output = Result<(), ConnectError<Self::Error>>> + Send;

    /// Warns of settings of the server, before its first connection is used.
    fn warn_if_keys_may_be_evicted(&self, _connection: &Self::Connection) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Requests a discovery: another server may be responsible now.
    fn request_discovery(&self) {}
}

/// Handle to a server and its tasks; dropping it closes the connections once their pending commands are done.
#[derive(Debug)]
pub(crate) struct SupervisedHandle<S: SupervisedServer> {
    server: Arc<S>,
    tasks: Vec<AbortHandle>,
}

impl<S: SupervisedServer> SupervisedHandle<S> {
    /// Starts the tasks of a server. Needs a tokio runtime.
    pub(crate) fn start(server: S) -> Self {
        let server = Arc::new(server);
        let connections = (0..server.state().pool.size())
            .map(|slot| tokio::spawn(keep_pool_slot_connected(Arc::clone(&server), slot)));
        let mut tasks: Vec<AbortHandle> = connections.map(|task| task.abort_handle()).collect();
        tasks.push(tokio::spawn(check_until_recovered(Arc::clone(&server))).abort_handle());
        tasks.push(tokio::spawn(watch_credentials(Arc::clone(&server))).abort_handle());
        Self { server, tasks }
    }
}

impl<S: SupervisedServer> Deref for SupervisedHandle<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.server
    }
}

impl<S: SupervisedServer> Drop for SupervisedHandle<S> {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.server.state().pool.clear();
    }
}

/// Keeps the connection of one pool slot open.
async fn keep_pool_slot_connected<S: SupervisedServer>(server: Arc<S>, slot: usize) {
    let state = server.state();
    loop {
        match server.connect().await {
            Ok(connected) => {
                state.log_connected();
                if slot == 0 {
                    server.warn_if_keys_may_be_evicted(&connected.connection).await;
                }
                let closed = put_connection_into_use(&*server, slot, connected);
                let since = Instant::now();
                let reason = maintain_until_closed(&*server, slot, closed).await;
                state.pool.remove(slot);
                if since.elapsed() < MIN_LIFETIME_FOR_IMMEDIATE_RECONNECT {
                    sleep(RETRY_INTERVAL).await;
                }
                if let Some(suppressed) = state.closed_log.allow(Clock::System.now()) {
                    let program = state.names.program;
                    tracing::warn!(server = %state.endpoint, reason, suppressed, "a connection to {program} closed");
                }
                server.request_discovery();
            }
            Err(error) => {
                state.record_and_log_connect_error(&error);
                state.pool.set_first_attempt_done();
                server.request_discovery();
                sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Puts a connection into use.
fn put_connection_into_use<S: SupervisedServer>(
    server: &S,
    slot: usize,
    connected: Connected<S::Connection>,
) -> ClosedReceiver {
    let state = server.state();
    server.record_opened_connection();
    state.clear_misconfigured();
    state.pool.insert(slot, connected.connection);
    state.record_success();
    connected.closed
}

/// Waits until a connection closes, and returns the reason. Replaces it by a new one when requested.
///
/// The old connection serves until the new one is checked; a failed attempt is only logged.
async fn maintain_until_closed<S: SupervisedServer>(server: &S, slot: usize, mut closed: ClosedReceiver) -> String {
    let state = server.state();
    let mut retry = false;
    loop {
        tokio::select! {
            reason = &mut closed => {
                return reason.map_or_else(|_| "closed".to_owned(), |reason| io_error_text(&reason));
            }
            () = state.reconnect.notified() => {}
            () = sleep(REPLACE_INTERVAL), if retry => {}
        }
        match server.connect().await {
            // Commands in flight on the old connection complete there.
            Ok(connected) => {
                state.log_connected();
                closed = put_connection_into_use(server, slot, connected);
                retry = false;
            }
            Err(error) => {
                state.log_connect_error(&error);
                retry = true;
            }
        }
    }
}

/// Checks a server whose breaker is open, over its connections and over new ones, until it serves again.
///
/// New connections are needed after a network partition: an old one waits for the kernel's retransmission, which may
/// take longer than the partition did.
async fn check_until_recovered<S: SupervisedServer>(server: Arc<S>) {
    let state = server.state();
    loop {
        state.breaker_opened.notified().await;
        let since = Instant::now();
        while state.breaker.is_open() {
            if let Some(connection) = state.pool.next_connection() {
                match server.check_health(&connection).await {
                    Ok(()) => {
                        state.clear_misconfigured();
                        state.record_success();
                        break;
                    }
                    Err(error) => state.record_and_log_connect_error(&error),
                }
            }
            server.request_discovery();
            if since.elapsed() > RECONNECT_AFTER {
                // One connection at a time, because the server may be overloaded.
                state.request_reconnect();
            }
            sleep(RETRY_INTERVAL).await;
        }
    }
}

/// Logs in again when a file with credentials changes or a token is renewed, and requests new connections when that
/// fails or a certificate changes.
///
/// A provider of short-lived tokens closes connections whose token has expired, unless they log in again before.
async fn watch_credentials<S: SupervisedServer>(server: Arc<S>) {
    let state = server.state();
    let Some(mut seen) = server.hash_connect_files() else { return };
    loop {
        sleep(FILE_CHECK_INTERVAL).await;
        let Some(now) = server.hash_connect_files() else { return };
        if now != seen {
            let are_certificates_equal = now.has_certificates_of(&seen);
            seen = now;
            let names = state.names;
            if are_certificates_equal && server.renew_credentials().await {
                let (server, program) = (&state.endpoint, names.program);
                if seen.is_token {
                    tracing::debug!(%server, "logged in to {program} with a new token");
                } else {
                    tracing::info!(%server, "credentials for {program} changed: logged in again");
                }
                continue;
            }
            tracing::info!(server = %state.endpoint, "{} for {} changed: reconnecting", names.files, names.program);
            state.reconnect.notify_waiters();
        }
    }
}

/// Hashes of the files that connecting reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectFileHashes {
    /// `None` if no file has credentials.
    credentials: Option<[u8; 32]>,
    /// `None` if no file has certificates.
    certificates: Option<[u8; 32]>,
    /// True if the credentials are a token, which changes all the time.
    is_token: bool,
}

impl ConnectFileHashes {
    /// Hashes the file with credentials and the files with certificates; `None` if there are none.
    pub(crate) fn of_files<'a>(
        credentials: Option<&'a PathBuf>,
        certificates: impl Iterator<Item = &'a PathBuf>,
    ) -> Option<Self> {
        let (credentials, certificates) = (hash_files(credentials.into_iter()), hash_files(certificates));
        let hashes = Self { credentials, certificates, is_token: false };
        (hashes.credentials.is_some() || hashes.certificates.is_some()).then_some(hashes)
    }

    /// True if the certificates are those of `other`.
    pub(crate) fn has_certificates_of(&self, other: &Self) -> bool {
        self.certificates == other.certificates
    }

    /// Hashes the token in use, and the files with certificates.
    pub(crate) fn of_token<'a>(token: &str, certificates: impl Iterator<Item = &'a PathBuf>) -> Self {
        let credentials = Some(*blake3::hash(token.as_bytes()).as_bytes());
        Self { credentials, certificates: hash_files(certificates), is_token: true }
    }
}

/// Returns the hash of files; `None` if there are none. A file that cannot be read counts as empty.
fn hash_files<'a>(files: impl Iterator<Item = &'a PathBuf>) -> Option<[u8; 32]> {
    let mut files = files.peekable();
    files.peek()?;
    let mut hasher = blake3::Hasher::new();
    for path in files {
        let contents = std::fs::read(path).unwrap_or_default();
        hasher.update(&(contents.len() as u64).to_le_bytes());
        hasher.update(&contents);
    }
    Some(*hasher.finalize().as_bytes())
}
