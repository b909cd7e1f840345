//! State of one server that calls share with the tasks of its supervisor: the pool of connections, the circuit breaker,
//! errors.
//!
//! The breaker opens after [`MAX_CONSECUTIVE_FAILURES`] failures in a row and closes with the first success. It only
//! counts: callers decide which failures count, how to respond while it is open, and when to probe the server.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::sync::{Notify, SetOnce};

use super::connect::{CallErrorKind, ConnectError};
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
}

/// Connections of one server, its circuit breaker, and its errors to log.
#[derive(Debug)]
pub(crate) struct ServerState<C> {
    pub(crate) endpoint: Endpoint,
    pub(crate) pool: ConnectionPool<C>,
    pub(super) names: ServerLogNames,
    pub(super) breaker: CircuitBreaker,
    /// Notified when the breaker opens.
    pub(super) breaker_opened: Notify,
    /// Notified to replace connections by new ones.
    pub(super) reconnect: Notify,
    pub(super) closed_log: LogThrottle,
    opened_log: LogThrottle,
    recovered_log: LogThrottle,
    connect_errors: Mutex<ErrorDedup>,
    misconfigured: ArcSwapOption<String>,
    last_failure: ArcSwapOption<String>,
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

    /// Last reason why the server could not be used, with its address, as the log has it; `None` before the first.
    pub(crate) fn last_failure(&self) -> Option<Arc<String>> {
        self.last_failure.load_full()
    }

    fn record_last_failure(&self, text: &str) {
        let text = format!("{}: {text}", self.endpoint);
        if self.last_failure.load().as_ref().is_none_or(|last| **last != text) {
            self.last_failure.store(Some(Arc::new(text)));
        }
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
        let opened = error.concerns_whole_server() && self.breaker.record_failure();
        if opened {
            self.record_last_failure(&error.to_string());
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

    /// Records a configuration error; any other error but a timeout clears it.
    pub(crate) fn update_misconfiguration<K: CallErrorKind>(&self, error: &ConnectError<K>) {
        // A slow server may still be misconfigured.
        if error.kind != K::TIMEOUT_KIND {
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
    pub(super) fn log_connect_error<K: CallErrorKind>(&self, error: &ConnectError<K>) {
        self.record_last_failure(&error.text);
        if lock_ignoring_poison(&self.connect_errors).should_log(&error.text) {
            let ServerLogNames { program, setting, on_failure, decides, .. } = self.names;
            let (server, text) = (&self.endpoint, &error.text);
            // A server that is away comes back by itself; wrong settings do not become right.
            match decides && error.kind.is_misconfiguration() {
                true => tracing::error!(setting, %server, "cannot use {program}: {text}"),
                false => tracing::warn!(setting, %server, "cannot use {program}: {text} ({on_failure})"),
            }
        }
    }

    /// Logs that the server is connected.
    pub(super) fn log_connected(&self) {
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
