//! One store server, whatever its protocol: the state that calls share (the pool of connections, the circuit breaker,
//! errors), and the supervisor: background tasks that keep the connections open, and find out when a failing server
//! serves again.
//!
//! The breaker opens after [`MAX_CONSECUTIVE_FAILURES`] failures in a row and closes with the first success. It only
//! counts: callers decide which failures count, how to respond while it is open, and when to probe the server.
//!
//! [`SupervisedHandle`] starts the tasks and ends them when it is dropped. A kind of server implements
//! [`SupervisedServer`].
//!
//! Decides: when a server is given up (circuit breaker), probed again (`RETRY_INTERVAL`).
//! Decides: when connections are replaced (`RECONNECT_AFTER`); which connection of the pool takes a call.
//! Decides: when a lost connection is opened again, or logs in again; that the process starts while Redis is away.
//! Decides: how often its failures are logged.

use std::future::Future;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::sync::{Notify, SetOnce};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use super::connect::{CallErrorKind, ConnectError, Connected, io_error_text};
use super::pipeline::ClosedReceiver;
use super::server_status::{AnswerDuration, ServerStatus};
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::settings::address::Endpoint;
use crate::telemetry::log_throttle::{ErrorDedup, LogThrottle};

/// Minimum time between two log lines of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Names of a kind of server in log lines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerLogNames {
    /// Program of the server.
    pub(crate) program: &'static str,
    /// Contents of the files that connecting reads.
    pub(crate) files: &'static str,
    /// Environment variable that names the servers; `None` if the program has only one.
    pub(crate) setting: Option<&'static str>,
    /// Consequence of a failure, for logs.
    pub(crate) on_failure: &'static str,
    /// Decisions need the server.
    pub(crate) decides: bool,
    /// Upper bound on a call.
    pub(crate) call_timeout: Duration,
    /// Environment variable that sets `call_timeout`; `None` if none does.
    pub(crate) timeout_setting: Option<&'static str>,
    /// Names the settings that hold the credentials; `None` if there are none.
    pub(crate) login_setting: Option<&'static str>,
}

/// Why a server failed last.
#[derive(Debug)]
struct ServerFailure {
    text: String,
    at: Instant,
    /// It did not answer in time.
    is_timeout: bool,
}

/// Shortest time between two records of failed calls.
const FAILURE_UPDATE_INTERVAL: Duration = Duration::from_millis(100);
/// Time for which a late answer is told beside a timeout.
const MAX_LATE_ANSWER_AGE_S: u64 = 60;

/// Connections of one server, its circuit breaker, and its errors to log.
#[derive(Debug)]
pub(crate) struct ServerState<C> {
    pub(crate) endpoint: Endpoint,
    pub(crate) pool: ConnectionPool<C>,
    names: ServerLogNames,
    breaker: CircuitBreaker,
    /// Notified when the breaker opens.
    breaker_opened: Notify,
    /// Notified to replace connections by new ones.
    reconnect: Notify,
    closed_log: LogThrottle,
    opened_log: LogThrottle,
    recovered_log: LogThrottle,
    connect_errors: Mutex<ErrorDedup>,
    misconfigured: ArcSwapOption<String>,
    last_failure: ArcSwapOption<ServerFailure>,
    /// Mean duration of the last answers to charges.
    answers: AnswerDuration,
    /// Last answer to a health check that came too late.
    late_answer: AnswerDuration,
}

impl<C> ServerState<C> {
    /// Creates the state of the server at `endpoint`, with `connections` empty slots.
    pub(crate) fn new(endpoint: Endpoint, connections: usize, names: ServerLogNames) -> Self {
        Self {
            endpoint,
            pool: ConnectionPool::new(connections),
            names,
            breaker: CircuitBreaker::default(),
            breaker_opened: Notify::new(),
            reconnect: Notify::new(),
            closed_log: LogThrottle::every(LOG_INTERVAL),
            opened_log: LogThrottle::every(LOG_INTERVAL),
            recovered_log: LogThrottle::every(LOG_INTERVAL),
            connect_errors: Mutex::default(),
            misconfigured: ArcSwapOption::empty(),
            last_failure: ArcSwapOption::empty(),
            answers: AnswerDuration::default(),
            late_answer: AnswerDuration::default(),
        }
    }

    /// Returns true if calls are sent to the server now.
    pub(crate) fn is_available(&self) -> bool {
        !self.is_breaker_open() && self.pool.next_connection().is_some()
    }

    /// Returns true while calls fail at once because the server failed too often.
    pub(crate) fn is_breaker_open(&self) -> bool {
        self.breaker.is_open()
    }

    /// Text of a configuration error, free of secrets; `None` without one.
    pub(crate) fn misconfiguration(&self) -> Option<Arc<String>> {
        self.misconfigured.load_full()
    }

    /// Last reason why the server could not be used, with its address; `None` before the first.
    pub(crate) fn last_failure(&self) -> Option<Arc<String>> {
        let status = self.status(None);
        Some(Arc::new(format!("{}: {}", status.address, status.last_error?)))
    }

    /// State of the server. `late_by` is the last time by which an answer on its connections exceeded its deadline, with
    /// its age in seconds.
    pub(crate) fn status(&self, late_by: Option<(u64, Duration)>) -> ServerStatus {
        let milliseconds = |duration: Duration| (duration.as_secs_f64() * 100_000.0).round() / 100.0;
        let late_call = late_by.map(|(age_s, late_by)| (age_s, self.names.call_timeout + late_by));
        let late = late_call.into_iter().chain(self.late_answer.read()).min_by_key(|(age_s, _)| *age_s);
        let (answers, failure) = (self.answers.read(), self.last_failure.load_full());
        let describe = |failure: &ServerFailure| match late {
            Some((age_s, took)) if failure.is_timeout && age_s <= MAX_LATE_ANSWER_AGE_S => {
                format!("{}; the last late one came after {} ms", failure.text, took.as_millis())
            }
            _ => failure.text.clone(),
        };
        ServerStatus {
            address: self.endpoint.to_string(),
            is_breaker_open: self.is_breaker_open(),
            answer_ms: answers.map(|(_, mean)| milliseconds(mean)),
            last_success_s: answers.map(|(age_s, _)| age_s),
            last_error: failure.as_deref().map(describe),
            last_error_s: failure.map(|failure| failure.at.elapsed().as_secs()),
            last_late_answer_ms: late.map(|(_, took)| milliseconds(took)),
        }
    }

    /// Records the answer to a charge that was sent at `sent`.
    #[inline]
    pub(crate) fn record_answer(&self, sent: Instant, answered: Instant) {
        self.answers.record_for_mean(answered, answered.saturating_duration_since(sent));
    }

    /// Records the answer to a check, sent at `sent`, that came too late.
    pub(crate) fn record_late_answer(&self, sent: Instant) {
        self.late_answer.record_last(Instant::now(), sent.elapsed());
    }

    /// Error of a server that did not answer in time.
    pub(crate) fn timeout_error<K: CallErrorKind>(&self) -> ConnectError<K> {
        ConnectError { kind: K::TIMEOUT, text: self.describe_timeout() }
    }

    fn describe_timeout(&self) -> String {
        let ServerLogNames { call_timeout, timeout_setting, .. } = self.names;
        let setting = timeout_setting.map_or_else(String::new, |setting| format!(" ({setting})"));
        format!("no answer within {} ms{setting}", call_timeout.as_millis())
    }

    fn record_last_failure(&self, text: String, is_timeout: bool) {
        self.last_failure.store(Some(Arc::new(ServerFailure { text, at: Instant::now(), is_timeout })));
    }

    /// Clears the configuration error.
    pub(crate) fn clear_misconfigured(&self) {
        // Load first: in the common case there is nothing to clear.
        if self.misconfigured.load().is_some() {
            self.misconfigured.store(None);
        }
    }

    /// Records a success of the server.
    pub(crate) fn record_success(&self) {
        if self.breaker.record_success()
            && let Some(suppressed) = self.recovered_log.allow(Clock::System.now())
        {
            tracing::warn!(server = %self.endpoint, suppressed, "{} serves again", self.names.program);
        }
    }

    /// Records a failed call; returns true if it opened the breaker, after too many failures of the server.
    pub(crate) fn record_failure(&self, error: impl CallErrorKind) -> bool {
        self.record_call_failure(error);
        let opened = error.concerns_whole_server() && self.breaker.record_failure();
        if opened {
            if let Some(suppressed) = self.opened_log.allow(Clock::System.now()) {
                let Self { endpoint: server, names: ServerLogNames { program, on_failure, .. }, .. } = self;
                match error.is_misconfiguration() {
                    true => {
                        tracing::error!(%server, %error, suppressed, "{program} fails: {on_failure} until it is back");
                    }
                    false => {
                        tracing::warn!(%server, %error, suppressed, "{program} fails: {on_failure} until it is back");
                    }
                }
            }
            self.breaker_opened.notify_one();
        }
        opened
    }

    /// Records why a call failed, unless a failure was recorded just now: calls may fail by thousands.
    fn record_call_failure<K: CallErrorKind>(&self, error: K) {
        let is_timeout = error == K::TIMEOUT;
        let is_recent =
            |last: &Arc<ServerFailure>| last.is_timeout == is_timeout && last.at.elapsed() < FAILURE_UPDATE_INTERVAL;
        if !self.last_failure.load().as_ref().is_some_and(is_recent) {
            let text = if is_timeout { self.describe_timeout() } else { error.to_string() };
            self.record_last_failure(text, is_timeout);
        }
    }

    /// Records a configuration error; any other error but a timeout clears it.
    pub(crate) fn update_misconfiguration<K: CallErrorKind>(&self, error: &ConnectError<K>) {
        // A slow server may still be misconfigured.
        if error.kind != K::TIMEOUT {
            let text = || Arc::new(format!("{}: {}", self.endpoint, error.text));
            self.misconfigured.store(error.kind.is_misconfiguration().then(text));
        }
    }

    /// Records why the server cannot be used, and logs it.
    pub(crate) fn record_and_log_connect_error<K: CallErrorKind>(&self, error: &ConnectError<K>) {
        self.update_misconfiguration(error);
        self.log_connect_error(error);
    }

    /// Logs why the server cannot be used, if that is new.
    fn log_connect_error<K: CallErrorKind>(&self, error: &ConnectError<K>) {
        self.record_last_failure(error.text.clone(), error.kind == K::TIMEOUT);
        if lock_ignoring_poison(&self.connect_errors).should_log(&error.text) {
            let ServerLogNames { program, setting, on_failure, decides, login_setting, .. } = self.names;
            let setting = login_setting.filter(|_| error.kind.is_login_failure()).or(setting);
            let (server, text) = (&self.endpoint, &error.text);
            // A server that is away comes back by itself; wrong settings do not become right.
            match decides && error.kind.is_misconfiguration() {
                true => tracing::error!(setting, %server, "cannot use {program}: {text}"),
                false => tracing::warn!(setting, %server, "cannot use {program}: {text} ({on_failure})"),
            }
        }
    }

    /// Logs that the server is connected.
    fn log_connected(&self) {
        let program = self.names.program;
        if lock_ignoring_poison(&self.connect_errors).forget_errors() {
            tracing::warn!(server = %self.endpoint, "connected to {program} again");
        } else {
            tracing::info!(server = %self.endpoint, "connected to {program}");
        }
    }

    /// Requests a new connection in place of one.
    pub(crate) fn request_reconnect(&self) {
        self.reconnect.notify_one();
    }
}

/// Fixed number of connection slots, used in turn.
#[derive(Debug)]
pub(crate) struct ConnectionPool<C> {
    slots: Box<[ArcSwapOption<C>]>,
    next: AtomicUsize,
    /// Set once the first connection attempt has succeeded or failed.
    first_attempt_done: SetOnce<()>,
}

impl<C> ConnectionPool<C> {
    /// Creates a pool of `size` empty slots.
    pub(crate) fn new(size: usize) -> Self {
        Self {
            slots: (0..size).map(|_| ArcSwapOption::empty()).collect(),
            next: AtomicUsize::new(0),
            first_attempt_done: SetOnce::new(),
        }
    }

    /// Number of slots.
    pub(crate) fn size(&self) -> usize {
        self.slots.len()
    }

    /// Number of open connections.
    pub(crate) fn open_connection_count(&self) -> usize {
        self.slots.iter().filter(|slot| slot.load().is_some()).count()
    }

    /// Returns all open connections.
    pub(crate) fn open_connections(&self) -> impl Iterator<Item = Arc<C>> {
        self.slots.iter().filter_map(ArcSwapOption::load_full)
    }

    /// Returns the next open connection; `None` if none is open.
    pub(crate) fn next_connection(&self) -> Option<Arc<C>> {
        if let [slot] = &*self.slots {
            return slot.load_full();
        }
        self.connection_from_slot(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the first open connection from slot `first` on, modulo the number of slots; `None` if none is open.
    pub(crate) fn connection_from_slot(&self, first: usize) -> Option<Arc<C>> {
        let size = self.slots.len();
        (0..size).find_map(|step| self.slots[first.wrapping_add(step) % size].load_full())
    }

    /// Waits for the first connection attempt, then returns a connection; callers bound the wait.
    pub(crate) async fn wait_for_connection(&self) -> Option<Arc<C>> {
        self.first_attempt_done.wait().await;
        self.next_connection()
    }

    /// Puts a connection into a slot.
    pub(crate) fn insert(&self, slot: usize, connection: C) {
        self.slots[slot].store(Some(Arc::new(connection)));
        self.set_first_attempt_done();
    }

    /// Empties a slot.
    pub(crate) fn remove(&self, slot: usize) {
        self.slots[slot].store(None);
    }

    /// Empties all slots.
    pub(crate) fn clear(&self) {
        self.slots.iter().for_each(|slot| slot.store(None));
    }

    /// Ends the wait for the first connection attempt.
    pub(crate) fn set_first_attempt_done(&self) {
        if !self.first_attempt_done.initialized() {
            let _already_set = self.first_attempt_done.set(());
        }
    }
}

/// Consecutive failures that open a breaker.
const MAX_CONSECUTIVE_FAILURES: u32 = 5;

/// Circuit breaker: blocks calls after [`MAX_CONSECUTIVE_FAILURES`] failures in a row.
#[derive(Debug, Default)]
pub(crate) struct CircuitBreaker {
    failures: AtomicU32,
}

impl CircuitBreaker {
    /// Returns true while calls are blocked.
    pub(crate) fn is_open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= MAX_CONSECUTIVE_FAILURES
    }

    /// Records a failure; returns true if this failure opened the breaker.
    pub(crate) fn record_failure(&self) -> bool {
        // The count stops at the maximum, so it cannot wrap.
        let max = MAX_CONSECUTIVE_FAILURES;
        let counted = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |failures| (failures < max).then_some(failures + 1));
        counted == Ok(max - 1)
    }

    /// Records a success; returns true if it closed the breaker.
    pub(crate) fn record_success(&self) -> bool {
        // Load first: in the common case, success after success, nothing is written.
        self.failures.load(Ordering::Relaxed) > 0
            && self.failures.swap(0, Ordering::Relaxed) >= MAX_CONSECUTIVE_FAILURES
    }
}

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
