//! One server that accepts writes: its connections and its circuit breaker.
//!
//! Background tasks keep the connections open; a call waits for one only while none is open. While the breaker is open,
//! calls fail at once, and a task checks the server ten times a second. A node sends a command once: callers follow
//! redirections and load scripts.
//!
//! Decides: which errors count for a node's breaker (NOSCRIPT and redirections are successes).
//! Decides: a server that became a replica; the wait for a usable connection; failed checks that replace a connection.
//! Decides: the warning that Redis may evict keys; whether calls may share a command (`detect_merge_support`).

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::time::{Instant, sleep, timeout};

use super::connect::ConnectOptions;
use super::connection::{Connection, MergeableScriptCall, error_reply_as_error, send_command};
use super::deployment_context::DeploymentContext;
use super::error::{RedisConnectError, RedisError, ReplyError};
use super::health_check::OptionalCommands;
use super::resp::{Reply, reply_integer};
use crate::base::clock::Clock;
use crate::settings::address::Endpoint;
use crate::store::client::connect::{CallErrorKind, Connected};
use crate::store::client::deadline::timeout_with_grace;
use crate::store::client::redis::{connect, health_check};
use crate::store::client::server_status::ServerStatus;
use crate::store::client::supervised_server::{
    ConnectFileHashes, RECONNECT_AFTER, ServerLogNames, ServerState, SupervisedHandle, SupervisedServer,
};
use crate::telemetry::log_throttle::LogThrottle;

/// Client of one server; dropping it closes its connections once their pending commands are done.
#[derive(Debug)]
pub(crate) struct Node {
    state: SupervisedHandle<NodeState>,
}

/// Reply to a command, and the number of replicas that have its writes.
#[derive(Debug)]
pub(crate) struct ReplicatedReply {
    pub(crate) reply: Reply,
    pub(crate) replicas: u32,
}

impl Node {
    /// Starts to connect to `endpoint`. Needs a tokio runtime.
    pub(crate) fn start(endpoint: Endpoint, context: Arc<DeploymentContext>) -> Arc<Self> {
        Arc::new(Self { state: SupervisedHandle::start(NodeState::new(endpoint, context)) })
    }

    /// Address of the server.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.state.server.endpoint
    }

    /// Sets a slot that the node owns, for the keys of health checks.
    pub(crate) fn set_health_check_slot(&self, slot: u16) {
        self.state.slot.store(slot, Ordering::Relaxed);
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
    #[inline]
    pub(crate) fn record_answer(&self, sent: Instant, answered: Instant) {
        self.state.server.record_answer(sent, answered);
    }

    /// Returns true while calls fail at once because the server failed too often.
    pub(crate) fn is_breaker_open(&self) -> bool {
        self.state.server.is_breaker_open()
    }

    /// Number of open connections.
    pub(crate) fn open_connection_count(&self) -> usize {
        self.state.server.pool.open_connection_count()
    }

    /// Text of a configuration error, free of secrets; `None` without one.
    pub(crate) fn misconfiguration(&self) -> Option<Arc<String>> {
        self.state.server.misconfiguration().or_else(|| self.state.rejected_commands.current_advice())
    }

    /// Last reason why the server could not be used, with its address; `None` before the first.
    pub(crate) fn last_failure(&self) -> Option<Arc<String>> {
        self.state.server.last_failure()
    }

    /// Sends a command, after an ASKING if `asking`, and waits for its reply until `deadline`.
    pub(crate) async fn call(&self, words: &[&[u8]], asking: bool, deadline: Instant) -> Result<Reply, ReplyError> {
        let connection = self.usable_connection(deadline).await?;
        let outcome = send_command(&connection, words, asking, deadline).await;
        let optional = self.state.context.options.optional_commands.as_ref();
        match optional.filter(|optional| words[0].starts_with(optional.prefix)) {
            Some(optional) if matches!(outcome, Err(ReplyError::Failed(RedisError::Misconfigured))) => {
                self.state.rejected_commands.record(&self.state.server.endpoint, optional);
            }
            Some(_) => {
                if outcome.is_ok() {
                    self.state.rejected_commands.clear();
                }
                self.record_for_breaker(&outcome);
            }
            None => self.record_outcome(&outcome),
        }
        outcome
    }

    /// Returns true if calls on several keys may share a command: by default, unless the server is a node of a cluster
    /// or a proxy that divides the keys. Each connection finds out when it is made.
    pub(crate) fn can_merge_calls(&self) -> bool {
        self.state.can_merge.load(Ordering::Relaxed)
    }

    /// Calls a script on one key, in one command with calls that are queued at the same moment, and waits for its reply
    /// until `deadline`. For nodes with [`Node::can_merge_calls`].
    pub(crate) async fn call_mergeable(
        &self,
        call: MergeableScriptCall,
        deadline: Instant,
    ) -> Result<Reply, ReplyError> {
        let connection = self.usable_connection(deadline).await?;
        let outcome = error_reply_as_error(connection.call_mergeable(call, deadline).await);
        self.record_outcome(&outcome);
        outcome
    }

    /// Sends a command as [`Node::call`] does, but does not record the outcome.
    ///
    /// For commands that may fail although the server is healthy.
    pub(crate) async fn call_unrecorded(
        &self,
        words: &[&[u8]],
        asking: bool,
        deadline: Instant,
    ) -> Result<Reply, ReplyError> {
        if self.is_breaker_open() {
            return Err(ReplyError::Failed(RedisError::BreakerOpen));
        }
        let connection = timeout_with_grace(self.state.server.pool.wait_for_connection(), deadline).await;
        let connection = connection.flatten().ok_or(ReplyError::Failed(RedisError::Unreachable))?;
        send_command(&connection, words, asking, deadline).await
    }

    /// Sends a command as [`Node::call`] does, but does not record an error reply that may only reject the command.
    ///
    /// For commands that callers can do without.
    pub(crate) async fn call_tolerating_rejection(
        &self,
        words: &[&[u8]],
        asking: bool,
        deadline: Instant,
    ) -> Result<Reply, ReplyError> {
        let connection = self.usable_connection(deadline).await?;
        let outcome = send_command(&connection, words, asking, deadline).await;
        if !matches!(outcome, Err(ReplyError::Failed(RedisError::Misconfigured))) {
            self.record_for_breaker(&outcome);
        }
        outcome
    }

    /// Sends a command and WAIT in a row over one connection, and waits for both replies.
    ///
    /// The server runs no later command of that connection before a replica has the writes, or `limit` has passed.
    pub(crate) async fn call_and_wait_for_replica(
        &self,
        words: &[&[u8]],
        asking: bool,
        limit: Duration,
        deadline: Instant,
    ) -> Result<ReplicatedReply, ReplyError> {
        // 0 would mean no limit.
        let limit_ms = limit.as_millis().max(1).to_string();
        let wait: [&[u8]; 3] = [b"WAIT", b"1", limit_ms.as_bytes()];
        let (reply, replicas) = self.call_two_commands(words, &wait, asking, deadline).await;
        let (reply, replicas) = (reply?, replicas?);
        let replicas = reply_integer(&replicas).and_then(|replicas| u32::try_from(replicas).ok());
        let replicas = replicas.ok_or(ReplyError::Failed(RedisError::BadReply))?;
        Ok(ReplicatedReply { reply, replicas })
    }

    /// Sends two commands in a row over one connection, and waits for both replies.
    pub(crate) async fn call_two_commands(
        &self,
        first: &[&[u8]],
        second: &[&[u8]],
        asking: bool,
        deadline: Instant,
    ) -> (Result<Reply, ReplyError>, Result<Reply, ReplyError>) {
        let connection = match self.usable_connection(deadline).await {
            Ok(connection) => connection,
            Err(error) => return (Err(error.clone()), Err(error)),
        };
        let first = send_command(&connection, first, asking, deadline);
        let second = send_command(&connection, second, asking, deadline);
        let outcomes = tokio::join!(biased; first, second);
        // Both commands share one write, so record one outcome.
        self.record_outcome(if outcomes.0.is_ok() { &outcomes.1 } else { &outcomes.0 });
        outcomes
    }

    /// Records that a call got no answer in time, and returns the error.
    fn record_timeout(&self) -> ReplyError {
        self.state.record_failure(RedisError::Timeout);
        ReplyError::Failed(RedisError::Timeout)
    }

    /// Returns a connection, unless the breaker is open.
    async fn usable_connection(&self, deadline: Instant) -> Result<Arc<Connection>, ReplyError> {
        if self.is_breaker_open() {
            return Err(ReplyError::Failed(RedisError::BreakerOpen));
        }
        if let Some(connection) = self.state.server.pool.next_connection() {
            return Ok(connection);
        }
        // Boxed, because it is rare and its state is large.
        match Box::pin(timeout_with_grace(self.state.server.pool.wait_for_connection(), deadline)).await {
            Some(connection) => connection.ok_or(ReplyError::Failed(RedisError::Unreachable)),
            None => Err(self.record_timeout()),
        }
    }

    /// Records the outcome of a call for the breaker; a success also clears the configuration error.
    fn record_outcome(&self, outcome: &Result<Reply, ReplyError>) {
        if outcome.is_ok() {
            self.state.server.clear_misconfigured();
        }
        self.record_for_breaker(outcome);
    }

    /// Records the outcome of a call for the breaker. A redirection and a missing script count as successes.
    fn record_for_breaker(&self, outcome: &Result<Reply, ReplyError>) {
        match outcome {
            Ok(_) | Err(ReplyError::NoScript | ReplyError::Moved(_) | ReplyError::Ask(_)) => {
                self.state.server.record_success();
            }
            Err(ReplyError::Failed(error)) => self.state.record_failure(*error),
        }
    }
}

/// Maximum wait for the late reply of a health check before the next check is sent.
const LATE_REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum wait for the late reply to the first health check of a connection, to tell how late it is.
const MAX_LATE_FIRST_REPLY_WAIT: Duration = Duration::from_millis(200);

/// State of a node.
#[derive(Debug)]
struct NodeState {
    server: ServerState<Connection>,
    context: Arc<DeploymentContext>,
    rejected_commands: LastOptionalCommandRejection,
    /// A slot that the node owns, for the keys of health checks.
    slot: AtomicU16,
    /// Calls on several keys may share a command.
    can_merge: AtomicBool,
}

impl NodeState {
    /// Creates the state of the node at `endpoint`, without connections.
    fn new(endpoint: Endpoint, context: Arc<DeploymentContext>) -> Self {
        let ConnectOptions { setting, on_failure, decides, timeout_setting, .. } = context.options.connect;
        let (call_timeout, login_setting) = (context.options.call_timeout, context.options.connect.login_setting());
        let (program, files, setting) = ("redis", "credentials or certificates", Some(setting));
        let names = ServerLogNames {
            program,
            files,
            setting,
            on_failure,
            decides,
            call_timeout,
            timeout_setting,
            login_setting,
        };
        let server = ServerState::new(endpoint, context.options.connections, names);
        Self {
            server,
            context,
            rejected_commands: LastOptionalCommandRejection::new(),
            slot: AtomicU16::new(0),
            can_merge: AtomicBool::new(false),
        }
    }

    /// Records a failed call: health shows a misconfiguration; after too many failures of the server the breaker opens,
    /// and the servers of the deployment are looked for again.
    fn record_failure(&self, error: RedisError) {
        if error.is_misconfiguration() {
            self.server.update_misconfiguration(&RedisConnectError { kind: error, text: error.to_string() });
        }
        if self.server.record_failure(error) {
            self.request_discovery();
        }
    }

    /// Finds out if calls on several keys may share a command.
    async fn detect_merge_support(&self, connection: &Connection) {
        let keys = self.context.options.health_check.keys_for_merge_check();
        if self.context.is_cluster || keys.is_empty() {
            return;
        }
        let outcome =
            timeout(self.context.options.call_timeout, health_check::script_sees_all_keys(connection, &keys)).await;
        let can_merge = outcome.unwrap_or(false);
        if !can_merge {
            let server = &self.server.endpoint;
            tracing::info!(%server, "a script does not see the keys of this redis server together: calls are not merged");
        }
        self.can_merge.store(can_merge, Ordering::Relaxed);
    }

    /// Runs the health check of a new connection; of one that is late, records how late it is.
    async fn run_first_health_check(&self, connection: &Connection) -> Result<(), RedisConnectError> {
        let sent = Instant::now();
        let mut check = pin!(self.run_health_check(connection));
        if let Ok(outcome) = timeout(self.context.options.call_timeout, &mut check).await {
            return outcome;
        }
        if timeout(MAX_LATE_FIRST_REPLY_WAIT, check).await.is_ok_and(|outcome| outcome.is_ok()) {
            self.server.record_late_answer(sent);
        }
        Err(self.server.timeout_error())
    }

    async fn run_health_check(&self, connection: &Connection) -> Result<(), RedisConnectError> {
        let slot = self.context.is_cluster.then(|| self.slot.load(Ordering::Relaxed));
        health_check::run_health_check(&*self.context.options.health_check, connection, slot).await
    }
}

impl SupervisedServer for NodeState {
    type Connection = Connection;
    type Error = RedisError;

    fn state(&self) -> &ServerState<Connection> {
        &self.server
    }

    fn record_opened_connection(&self) {
        self.context.opened_connections.fetch_add(1, Ordering::Relaxed);
    }

    fn hash_connect_files(&self) -> Option<ConnectFileHashes> {
        self.context.options.connect.hash_connect_files()
    }

    /// Tries the credentials on a connection of its own first, so that wrong ones, or a user without permissions, reach
    /// no call.
    async fn renew_credentials(&self) -> bool {
        let Ok(_tried) = SupervisedServer::connect(self).await else { return false };
        for connection in self.server.pool.open_connections() {
            if connect::log_in_again(&connection, &self.context.options.connect).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Connects, then runs the health check and the check for merged calls.
    async fn connect(&self) -> Result<Connected<Connection>, RedisConnectError> {
        let connected = connect::connect(&self.server.endpoint, &self.context.options.connect).await?;
        self.run_first_health_check(&connected.connection).await?;
        self.detect_merge_support(&connected.connection).await;
        Ok(connected)
    }

    /// Runs the health check; after its timeout, waits up to [`LATE_REPLY_TIMEOUT`] for the reply before it fails.
    ///
    /// Without that wait, health checks would pile up before a frozen server.
    async fn check_health(&self, connection: &Connection) -> Result<(), RedisConnectError> {
        let sent = Instant::now();
        let mut check = pin!(self.run_health_check(connection));
        if let Ok(outcome) = timeout(self.context.options.call_timeout, &mut check).await {
            return outcome;
        }
        let late = self.server.timeout_error();
        self.server.record_and_log_connect_error(&late);
        self.request_discovery();
        let reconnect = async {
            sleep(RECONNECT_AFTER).await;
            self.server.request_reconnect();
        };
        let late_reply = async {
            if check.await.is_ok() {
                self.server.record_late_answer(sent);
            }
        };
        let _late = timeout(LATE_REPLY_TIMEOUT, async { tokio::join!(late_reply, reconnect) }).await;
        Err(late)
    }

    /// Warns if the server may evict keys when its memory is full.
    async fn warn_if_keys_may_be_evicted(&self, connection: &Connection) {
        let policy =
            timeout(self.context.options.call_timeout, health_check::read_policy_if_evicting(connection)).await;
        if let Ok(Some(policy)) = policy {
            tracing::warn!(
                server = %self.server.endpoint,
                maxmemory_policy = policy,
                "redis may evict keys when its memory is full: set `maxmemory-policy noeviction`"
            );
        }
    }

    /// Requests a discovery: another server may be the primary now.
    fn request_discovery(&self) {
        self.context.refresh_topology.notify_one();
    }
}

/// Time for which health shows the advice on a rejected optional command, and between two log lines about it.
const REJECTION_ADVICE_LIFETIME: Duration = Duration::from_secs(60);
/// Time in which further rejections change nothing.
const REJECTED_COMMAND_UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// Last rejection of an optional command, for logs and health pages.
#[derive(Debug)]
struct LastOptionalCommandRejection {
    last: ArcSwapOption<CommandRejection>,
    log: LogThrottle,
}

/// Text and time of a rejection.
#[derive(Debug)]
struct CommandRejection {
    text: String,
    at: Instant,
}

impl LastOptionalCommandRejection {
    /// Creates the state without a rejection.
    fn new() -> Self {
        Self { last: ArcSwapOption::empty(), log: LogThrottle::every(REJECTION_ADVICE_LIFETIME) }
    }

    /// Advice for the last rejection; `None` without one.
    fn current_advice(&self) -> Option<Arc<String>> {
        let last = self.last.load_full();
        // The calls that needed the command may have ended.
        let recent = last.filter(|last| last.at.elapsed() < REJECTION_ADVICE_LIFETIME);
        recent.map(|last| Arc::new(last.text.clone()))
    }

    /// Records that the server rejected an optional command, and logs it.
    fn record(&self, endpoint: &Endpoint, optional: &OptionalCommands) {
        let is_known = {
            let last = self.last.load();
            last.as_ref().is_some_and(|last| last.at.elapsed() < REJECTED_COMMAND_UPDATE_INTERVAL)
        };
        if !is_known {
            let OptionalCommands { consequence, advice, .. } = optional;
            if let Some(suppressed) = self.log.allow(Clock::System.now()) {
                tracing::error!(server = %endpoint, suppressed, "{consequence}: {advice}");
            }
            let rejection = CommandRejection { text: format!("{endpoint}: {advice}"), at: Instant::now() };
            self.last.store(Some(Arc::new(rejection)));
        }
    }

    /// Clears the rejection of optional commands.
    fn clear(&self) {
        if self.last.load().is_some() {
            self.last.store(None);
        }
    }
}
