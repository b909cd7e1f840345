//! State that a server shares with its background tasks, which keep its connections open and find out when it serves
//! again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::connect::{self, MemcacheConnection, MemcacheOptions};
use super::error::{MemcacheConnectError, MemcacheError};
use crate::clock::Clock;
use crate::settings::endpoint::Endpoint;
use crate::telemetry::log_throttle::LogThrottle;
use crate::upstream::circuit_breaker::CircuitBreaker;
use crate::upstream::connection_pool::ConnectionPool;
use crate::upstream::error_dedup::ErrorDedup;
use crate::upstream::pipeline::Closed;
use crate::upstream::stream::io_error_text;

/// Pause between two connection attempts or checks of a failing server.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time that a server fails before its connections are replaced.
const RECONNECT_AFTER: Duration = Duration::from_millis(200);
/// Lifetime below which a closed connection is reopened only after [`RETRY_INTERVAL`].
const MIN_LIFETIME: Duration = Duration::from_millis(20);
/// Pause between two attempts to replace a connection that still works.
const REPLACE_INTERVAL: Duration = Duration::from_secs(1);
/// Pause between two checks for changed files.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum time between two log lines of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// State of a server.
#[derive(Debug)]
pub(super) struct ServerState {
    pub(super) endpoint: Endpoint,
    options: Arc<MemcacheOptions>,
    pub(super) breaker: CircuitBreaker,
    pub(super) pool: ConnectionPool<MemcacheConnection>,
    /// Text of a configuration error, free of secrets.
    pub(super) misconfigured: ArcSwapOption<String>,
    /// Connections opened since the start.
    pub(super) opened: AtomicU64,
    breaker_opened: Notify,
    reconnect: Notify,
    opened_log: LogThrottle,
    recovered_log: LogThrottle,
    closed_log: LogThrottle,
    connect_errors: Mutex<ErrorDedup>,
}

impl ServerState {
    /// Creates the state of the server at `endpoint`, without connections.
    pub(super) fn new(endpoint: Endpoint, options: Arc<MemcacheOptions>) -> Self {
        Self {
            endpoint,
            breaker: CircuitBreaker::default(),
            pool: ConnectionPool::new(options.connections),
            options,
            misconfigured: ArcSwapOption::empty(),
            opened: AtomicU64::new(0),
            breaker_opened: Notify::new(),
            reconnect: Notify::new(),
            opened_log: LogThrottle::every(LOG_INTERVAL),
            recovered_log: LogThrottle::every(LOG_INTERVAL),
            closed_log: LogThrottle::every(LOG_INTERVAL),
            connect_errors: Mutex::default(),
        }
    }

    /// Starts the tasks of the server. Needs a tokio runtime.
    pub(super) fn start(self: &Arc<Self>) -> Vec<AbortHandle> {
        let connections = (0..self.pool.size()).map(|slot| tokio::spawn(maintain(Arc::clone(self), slot)));
        let mut tasks: Vec<AbortHandle> = connections.map(|task| task.abort_handle()).collect();
        tasks.push(tokio::spawn(recover(Arc::clone(self))).abort_handle());
        tasks.push(tokio::spawn(watch_files(Arc::clone(self))).abort_handle());
        tasks
    }

    /// Records a success of the server.
    pub(super) fn record_success(&self) {
        if self.breaker.record_success()
            && let Some(suppressed) = self.recovered_log.allow(Clock::System.now())
        {
            tracing::warn!(server = %self.endpoint, suppressed, "memcached serves again");
        }
    }

    /// Records a failed call, and opens the breaker after too many failures of the server.
    pub(super) fn record_failure(&self, error: MemcacheError) {
        if error.is_of_server() && self.breaker.record_failure() {
            if let Some(suppressed) = self.opened_log.allow(Clock::System.now()) {
                let server = &self.endpoint;
                tracing::error!(
                    %server, %error, suppressed, "memcached fails: `on_store_error` decides until it is back"
                );
            }
            self.breaker_opened.notify_one();
        }
    }

    async fn connect(&self) -> Result<(MemcacheConnection, Closed), MemcacheConnectError> {
        let connected = connect::connect(&self.endpoint, &self.options).await?;
        if self.connect_errors.lock().unwrap_or_else(PoisonError::into_inner).clear() {
            tracing::warn!(server = %self.endpoint, "connected to memcached again");
        } else {
            tracing::info!(server = %self.endpoint, "connected to memcached");
        }
        Ok(connected)
    }

    fn publish(&self, slot: usize, connection: MemcacheConnection) {
        self.opened.fetch_add(1, Ordering::Relaxed);
        self.misconfigured.store(None);
        self.pool.insert(slot, connection);
        self.record_success();
    }

    /// Records why the server cannot be used, and logs it.
    fn record_connect_error(&self, error: &MemcacheConnectError) {
        // A slow server may still be misconfigured.
        if error.kind != MemcacheError::Timeout {
            let is_misconfigured = error.kind == MemcacheError::Misconfigured;
            self.misconfigured.store(is_misconfigured.then(|| Arc::new(format!("{}: {error}", self.endpoint))));
        }
        self.log_connect_error(error);
    }

    /// Logs why the server cannot be used, if that is new.
    fn log_connect_error(&self, error: &MemcacheConnectError) {
        if self.connect_errors.lock().unwrap_or_else(PoisonError::into_inner).is_new(&error.text) {
            tracing::error!(server = %self.endpoint, "cannot use memcached: {error}");
        }
    }
}

/// Keeps the connection of one pool slot open.
async fn maintain(state: Arc<ServerState>, slot: usize) {
    loop {
        match state.connect().await {
            Ok((connection, closed)) => {
                state.publish(slot, connection);
                let since = Instant::now();
                let reason = serve_until_closed(&state, slot, closed).await;
                state.pool.remove(slot);
                if since.elapsed() < MIN_LIFETIME {
                    sleep(RETRY_INTERVAL).await;
                }
                if let Some(suppressed) = state.closed_log.allow(Clock::System.now()) {
                    tracing::warn!(server = %state.endpoint, reason, suppressed, "a connection to memcached closed");
                }
            }
            Err(error) => {
                state.record_connect_error(&error);
                state.pool.set_first_attempt_done();
                sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Waits until a connection closes, and returns the reason. Replaces it by a new one when requested.
async fn serve_until_closed(state: &ServerState, slot: usize, mut closed: Closed) -> String {
    let mut retry = false;
    loop {
        tokio::select! {
            reason = &mut closed => {
                return reason.map_or_else(|_| "closed".to_owned(), |reason| io_error_text(&reason));
            }
            () = state.reconnect.notified() => {}
            () = sleep(REPLACE_INTERVAL), if retry => {}
        }
        match state.connect().await {
            // Commands in flight on the old connection complete there.
            Ok((connection, new_closed)) => {
                state.publish(slot, connection);
                closed = new_closed;
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
async fn recover(state: Arc<ServerState>) {
    loop {
        state.breaker_opened.notified().await;
        let since = Instant::now();
        while state.breaker.is_open() {
            if let Some(connection) = state.pool.get() {
                match connect::check(&connection, Some(Instant::now() + state.options.call_timeout)).await {
                    Ok(()) => {
                        state.misconfigured.store(None);
                        state.record_success();
                        break;
                    }
                    Err(error) => state.record_connect_error(&error),
                }
            }
            if since.elapsed() > RECONNECT_AFTER {
                // After a network partition, an old connection waits for the kernel's retransmission.
                state.reconnect.notify_one();
            }
            sleep(RETRY_INTERVAL).await;
        }
    }
}

/// Requests new connections when certificate files change.
async fn watch_files(state: Arc<ServerState>) {
    let Some(mut seen) = state.options.fingerprint() else { return };
    loop {
        sleep(FILE_CHECK_INTERVAL).await;
        let Some(now) = state.options.fingerprint() else { return };
        if now != seen {
            seen = now;
            tracing::info!(server = %state.endpoint, "certificates for memcached changed: reconnecting");
            state.reconnect.notify_waiters();
        }
    }
}
