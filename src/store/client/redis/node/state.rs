//! State that a node shares with its background tasks, and the optional commands that its server rejects.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use tokio::time::{sleep, timeout};

use crate::base::clock::Clock;
use crate::settings::endpoint::Endpoint;
use crate::store::client::connect::{Connected, ErrorKind};
use crate::store::client::redis::connection::Connection;
use crate::store::client::redis::deployment_context::DeploymentContext;
use crate::store::client::redis::error::{RedisConnectError, RedisError};
use crate::store::client::redis::health_check::OptionalCommands;
use crate::store::client::redis::server_clock::ServerClock;
use crate::store::client::redis::{connect, health_check};
use crate::store::client::server_state::{ServerNames, ServerState};
use crate::store::client::supervisor::{RECONNECT_AFTER, SupervisedServer};
use crate::telemetry::log_throttle::LogThrottle;

/// Maximum wait for the late reply of a health check before the next check is sent.
const LATE_REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Minimum time between two log lines about jumps of the clock.
const CLOCK_JUMP_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// State of a node.
#[derive(Debug)]
pub(super) struct NodeState {
    pub(super) server: ServerState<Connection>,
    pub(super) context: Arc<DeploymentContext>,
    pub(super) rejected_commands: RejectedCommands,
    /// A slot that the node owns, for the keys of health checks.
    pub(super) slot: AtomicU16,
    /// Calls on several keys may share a command.
    pub(super) can_merge: AtomicBool,
    pub(super) clock: ServerClock,
    pub(super) clock_jump_log: LogThrottle,
}

impl NodeState {
    /// Creates the state of the node at `endpoint`, without connections.
    pub(super) fn new(endpoint: Endpoint, context: Arc<DeploymentContext>) -> Self {
        let (setting, on_failure) = (Some(context.options.connect.setting), context.options.connect.on_failure);
        let names = ServerNames { program: "redis", files: "credentials or certificates", setting, on_failure };
        let server = ServerState::new(endpoint, context.options.connections, names);
        let clock = ServerClock::new(Arc::clone(&context.options.clock_jumps));
        Self {
            server,
            context,
            rejected_commands: RejectedCommands::new(),
            slot: AtomicU16::new(0),
            can_merge: AtomicBool::new(false),
            clock,
            clock_jump_log: LogThrottle::every(CLOCK_JUMP_LOG_INTERVAL),
        }
    }

    /// Records a failed call, and opens the breaker after too many failures of the server.
    pub(super) fn record_failure(&self, error: RedisError) {
        if error.is_misconfiguration() {
            self.server.record_misconfigured(&RedisConnectError { kind: error, text: error.to_string() });
        }
        if self.server.record_failure(error) {
            self.request_refresh();
        }
    }

    /// Finds out if calls on several keys may share a command.
    async fn check_merging(&self, connection: &Connection) {
        let keys = self.context.options.health_check.keys_for_merge_check();
        if self.context.is_cluster || keys.is_empty() {
            return;
        }
        let outcome =
            timeout(self.context.options.call_timeout, health_check::can_merge_calls(connection, &keys)).await;
        let can_merge = outcome.unwrap_or(false);
        if !can_merge {
            let server = &self.server.endpoint;
            tracing::info!(%server, "a script does not see the keys of this redis server together: calls are not merged");
        }
        self.can_merge.store(can_merge, Ordering::Relaxed);
    }

    async fn run_health_check(&self, connection: &Connection) -> Result<(), RedisConnectError> {
        let slot = self.context.is_cluster.then(|| self.slot.load(Ordering::Relaxed));
        health_check::run(&*self.context.options.health_check, connection, slot).await
    }
}

impl SupervisedServer for NodeState {
    type Connection = Connection;
    type Error = RedisError;

    fn state(&self) -> &ServerState<Connection> {
        &self.server
    }

    fn opened(&self) -> &AtomicU64 {
        &self.context.opened
    }

    fn fingerprint(&self) -> Option<[u8; 32]> {
        self.context.options.connect.fingerprint()
    }

    /// Connects, then runs the health check and the check for merged calls.
    async fn connect(&self) -> Result<Connected<Connection>, RedisConnectError> {
        let connected = connect::connect(&self.server.endpoint, &self.context.options.connect).await?;
        let check = self.run_health_check(&connected.connection);
        timeout(self.context.options.call_timeout, check).await.unwrap_or_else(|_| Err(health_check_timeout()))?;
        self.check_merging(&connected.connection).await;
        Ok(connected)
    }

    /// Runs the health check; after its timeout, waits up to [`LATE_REPLY_TIMEOUT`] for the reply before it fails.
    ///
    /// Without that wait, health checks would pile up before a frozen server.
    async fn check(&self, connection: &Connection) -> Result<(), RedisConnectError> {
        let mut check = pin!(self.run_health_check(connection));
        if let Ok(outcome) = timeout(self.context.options.call_timeout, &mut check).await {
            return outcome;
        }
        let late = health_check_timeout();
        self.server.record_connect_error(&late);
        self.request_refresh();
        let reconnect = async {
            sleep(RECONNECT_AFTER).await;
            self.server.replace_connection();
        };
        let _late = timeout(LATE_REPLY_TIMEOUT, async { tokio::join!(&mut check, reconnect) }).await;
        Err(late)
    }

    /// Warns if the server may evict keys when its memory is full.
    async fn inspect(&self, connection: &Connection) {
        let policy = timeout(self.context.options.call_timeout, health_check::eviction_policy(connection)).await;
        if let Ok(Some(policy)) = policy {
            tracing::warn!(
                server = %self.server.endpoint,
                maxmemory_policy = policy,
                "redis may evict keys when its memory is full: set `maxmemory-policy noeviction`"
            );
        }
    }

    /// Requests a discovery: another server may be the primary now.
    fn request_refresh(&self) {
        self.context.refresh_topology.notify_one();
    }
}

fn health_check_timeout() -> RedisConnectError {
    RedisConnectError { kind: RedisError::Timeout, text: "the health check got no answer in time".to_owned() }
}

/// Minimum time between two log lines about rejected optional commands, and time until a rejection is forgotten.
const REJECTION_INTERVAL: Duration = Duration::from_secs(60);
/// Time in which further rejections change nothing.
const REJECTION_UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// Last rejection of an optional command, for logs and health pages.
#[derive(Debug)]
pub(super) struct RejectedCommands {
    last: ArcSwapOption<Rejection>,
    log: LogThrottle,
}

/// Last rejection of an optional command.
#[derive(Debug)]
struct Rejection {
    text: String,
    at: Instant,
}

impl RejectedCommands {
    /// Creates the state without a rejection.
    pub(super) fn new() -> Self {
        Self { last: ArcSwapOption::empty(), log: LogThrottle::every(REJECTION_INTERVAL) }
    }

    /// Advice for the last rejection; `None` without one.
    pub(super) fn text(&self) -> Option<Arc<String>> {
        let last = self.last.load_full();
        // The calls that needed the command may have ended.
        let recent = last.filter(|last| last.at.elapsed() < REJECTION_INTERVAL);
        recent.map(|last| Arc::new(last.text.clone()))
    }

    /// Records that the server rejected an optional command, and logs it.
    pub(super) fn record(&self, endpoint: &Endpoint, optional: &OptionalCommands) {
        let is_known = {
            let last = self.last.load();
            last.as_ref().is_some_and(|last| last.at.elapsed() < REJECTION_UPDATE_INTERVAL)
        };
        if !is_known {
            let OptionalCommands { consequence, advice, .. } = optional;
            if let Some(suppressed) = self.log.allow(Clock::System.now()) {
                tracing::error!(server = %endpoint, suppressed, "{consequence}: {advice}");
            }
            let rejection = Rejection { text: format!("{endpoint}: {advice}"), at: Instant::now() };
            self.last.store(Some(Arc::new(rejection)));
        }
    }

    /// Clears the rejection of optional commands.
    pub(super) fn clear(&self) {
        if self.last.load().is_some() {
            self.last.store(None);
        }
    }
}
