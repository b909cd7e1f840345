//! State that a node shares with its background tasks.

use std::pin::pin;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::misconfiguration::Misconfiguration;
use crate::clock::Clock;
use crate::redis::connect::{self, Connected};
use crate::redis::connect_error::ConnectError;
use crate::redis::connection::Connection;
use crate::redis::deployment_context::DeploymentContext;
use crate::redis::error::RedisError;
use crate::redis::health_check;
use crate::settings::endpoint::Endpoint;
use crate::telemetry::log_throttle::LogThrottle;
use crate::upstream::circuit_breaker::CircuitBreaker;
use crate::upstream::connection_pool::ConnectionPool;
use crate::upstream::error_dedup::ErrorDedup;
use crate::upstream::pipeline::Closed;

/// Maximum wait for the late reply of a health check before the next check is sent.
const LATE_REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that a health check is late before a new connection is opened beside the old one.
pub(super) const RECONNECT_AFTER: Duration = Duration::from_millis(200);
/// Minimum time between two log lines of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// State of a node.
#[derive(Debug)]
pub(super) struct NodeState {
    pub(super) endpoint: Endpoint,
    pub(super) context: Arc<DeploymentContext>,
    pub(super) breaker: CircuitBreaker,
    pub(super) pool: ConnectionPool<Connection>,
    pub(super) misconfiguration: Misconfiguration,
    /// Notified when the breaker opens.
    pub(super) breaker_opened: Notify,
    /// Notified to replace connections by new ones.
    pub(super) reconnect: Notify,
    /// A slot that the node owns, for the keys of health checks.
    pub(super) slot: AtomicU16,
    opened_log: LogThrottle,
    recovered_log: LogThrottle,
    pub(super) closed_log: LogThrottle,
    connect_errors: Mutex<ErrorDedup>,
}

impl NodeState {
    /// Creates the state of the node at `endpoint`, without connections.
    pub(super) fn new(endpoint: Endpoint, context: Arc<DeploymentContext>) -> Self {
        let pool = ConnectionPool::new(context.connections);
        Self {
            endpoint,
            context,
            breaker: CircuitBreaker::default(),
            pool,
            misconfiguration: Misconfiguration::new(),
            breaker_opened: Notify::new(),
            reconnect: Notify::new(),
            slot: AtomicU16::new(0),
            opened_log: LogThrottle::every(LOG_INTERVAL),
            recovered_log: LogThrottle::every(LOG_INTERVAL),
            closed_log: LogThrottle::every(LOG_INTERVAL),
            connect_errors: Mutex::default(),
        }
    }

    /// Records a success of the server.
    pub(super) fn record_success(&self) {
        if self.breaker.record_success()
            && let Some(suppressed) = self.recovered_log.allow(Clock::System.now())
        {
            tracing::warn!(server = %self.endpoint, suppressed, "redis serves again");
        }
    }

    /// Records a failed call, and opens the breaker after too many failures of the server.
    pub(super) fn record_failure(&self, error: RedisError) {
        if error.is_misconfiguration() {
            self.record_connect_error(&ConnectError { kind: error, text: error.to_string() });
        }
        if error.is_of_server() && self.breaker.record_failure() {
            if let Some(suppressed) = self.opened_log.allow(Clock::System.now()) {
                let server = &self.endpoint;
                tracing::error!(%server, %error, suppressed, "redis fails: `on_store_error` decides until it is back");
            }
            self.breaker_opened.notify_one();
            self.request_topology_refresh();
        }
    }

    /// Records the configuration error that `error` may be.
    pub(super) fn record_connect_error(&self, error: &ConnectError) {
        self.misconfiguration.record(&self.endpoint, error);
    }

    /// Requests a discovery: another server may be the primary now.
    pub(super) fn request_topology_refresh(&self) {
        self.context.refresh_topology.notify_one();
    }

    /// Puts a checked connection into use.
    pub(super) fn publish(&self, slot: usize, connected: Connected) -> Closed {
        self.context.opened.fetch_add(1, Ordering::Relaxed);
        self.misconfiguration.clear();
        self.pool.insert(slot, connected.connection);
        self.record_success();
        connected.closed
    }

    /// Connects, then runs the health check.
    pub(super) async fn connect(&self) -> Result<Connected, ConnectError> {
        let connected = connect::connect(&self.endpoint, &self.context.connect).await?;
        let check = self.run_health_check(&connected.connection);
        timeout(self.context.call_timeout, check).await.unwrap_or_else(|_| Err(health_check_timeout()))?;
        Ok(connected)
    }

    /// Runs the health check; after its timeout, waits up to [`LATE_REPLY_TIMEOUT`] for the reply before it fails.
    ///
    /// Without that wait, health checks would pile up before a frozen server.
    pub(super) async fn health_check(&self, connection: &Connection) -> Result<(), ConnectError> {
        let mut check = pin!(self.run_health_check(connection));
        if let Ok(outcome) = timeout(self.context.call_timeout, &mut check).await {
            return outcome;
        }
        let late = health_check_timeout();
        self.record_connect_error(&late);
        self.log_connect_error(&late);
        self.request_topology_refresh();
        let reconnect = async {
            sleep(RECONNECT_AFTER).await;
            self.reconnect.notify_one();
        };
        let _late = timeout(LATE_REPLY_TIMEOUT, async { tokio::join!(&mut check, reconnect) }).await;
        Err(late)
    }

    async fn run_health_check(&self, connection: &Connection) -> Result<(), ConnectError> {
        let slot = self.context.is_cluster.then(|| self.slot.load(Ordering::Relaxed));
        health_check::run(&*self.context.health_check, connection, slot).await
    }

    /// Logs why the node cannot be used, if that is new.
    pub(super) fn log_connect_error(&self, error: &ConnectError) {
        if self.connect_errors.lock().unwrap_or_else(PoisonError::into_inner).is_new(&error.text) {
            let setting = self.context.connect.setting;
            tracing::error!(setting, server = %self.endpoint, "cannot use redis: {error}");
        }
    }

    /// Logs that the node is connected.
    pub(super) fn log_connected(&self) {
        if self.connect_errors.lock().unwrap_or_else(PoisonError::into_inner).clear() {
            tracing::warn!(server = %self.endpoint, "connected to redis again");
        } else {
            tracing::info!(server = %self.endpoint, "connected to redis");
        }
    }
}

fn health_check_timeout() -> ConnectError {
    ConnectError { kind: RedisError::Timeout, text: "the health check got no answer in time".to_owned() }
}
