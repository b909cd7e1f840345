//! One server that accepts writes: its connections and its circuit breaker.
//!
//! Background tasks keep the connections open; calls wait only for the first connection. While the
//! breaker is open, calls fail at once, and a task checks the server ten times a second. A node sends a command once:
//! callers follow redirections and load scripts.

mod state;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use self::state::NodeState;
use super::connection::{Connection, checked, send};
use super::deployment_context::DeploymentContext;
use super::error::{RedisError, ReplyError};
use super::reply::{Reply, integer};
use super::script::KeyCall;
use super::server_clock::{ClockReading, ServerClock};
use crate::base::clock::Clock;
use crate::settings::endpoint::Endpoint;
use crate::store::client::deadline::timeout_with_grace;
use crate::store::client::supervisor::Supervised;

/// Client of one server; dropping it closes its connections once their pending commands are done.
#[derive(Debug)]
pub(crate) struct Node {
    state: Supervised<NodeState>,
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
        Arc::new(Self { state: Supervised::start(NodeState::new(endpoint, context)) })
    }

    /// Address of the server.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.state.server.endpoint
    }

    /// Sets a slot that the node owns, for the keys of health checks.
    pub(crate) fn set_slot(&self, slot: u16) {
        self.state.slot.store(slot, Ordering::Relaxed);
    }

    /// Returns true if calls are sent to the server now.
    pub(crate) fn is_available(&self) -> bool {
        self.state.server.is_available()
    }

    /// Returns true while calls fail at once because the server failed too often.
    pub(crate) fn is_breaker_open(&self) -> bool {
        self.state.server.is_breaker_open()
    }

    /// Number of open connections.
    pub(crate) fn connections(&self) -> usize {
        self.state.server.pool.open()
    }

    /// Text of a configuration error, free of secrets; `None` without one.
    pub(crate) fn misconfigured(&self) -> Option<Arc<String>> {
        self.state.server.misconfigured().or_else(|| self.state.rejected_commands.text())
    }

    /// Clock of the server, known from the readings recorded here.
    pub(crate) fn clock(&self) -> &ServerClock {
        &self.state.clock
    }

    /// Records a reading of the server's clock; logs a jump.
    pub(crate) fn record_clock(&self, reading: &ClockReading) {
        if self.state.clock.record(reading)
            && let Some(suppressed) = self.state.clock_jump_log.allow(Clock::System.now())
        {
            let server = self.endpoint();
            tracing::warn!(%server, suppressed, "the clock of this redis server or of this machine jumped: measuring again");
        }
    }

    /// Sends a command, after an ASKING if `asking`, and waits for its reply until `deadline`.
    pub(crate) async fn call(&self, words: &[&[u8]], asking: bool, deadline: Instant) -> Result<Reply, ReplyError> {
        let connection = self.connection(deadline).await?;
        let outcome = send(&connection, words, asking, deadline).await;
        let optional = self.state.context.options.optional_commands.as_ref();
        match optional.filter(|optional| words[0].starts_with(optional.prefix)) {
            Some(optional) if matches!(outcome, Err(ReplyError::Failed(RedisError::Misconfigured))) => {
                self.state.rejected_commands.record(&self.state.server.endpoint, optional);
            }
            Some(_) => {
                if outcome.is_ok() {
                    self.state.rejected_commands.clear();
                }
                self.record_health(&outcome);
            }
            None => self.record(&outcome),
        }
        outcome
    }

    /// Returns true if calls on several keys may share a command.
    pub(crate) fn can_merge(&self) -> bool {
        self.state.can_merge.load(Ordering::Relaxed)
    }

    /// Calls a script on one key, in one command with calls that are queued at the same moment, and waits for its reply
    /// until `deadline`. For nodes with [`Node::can_merge`].
    pub(crate) async fn call_merged(&self, call: KeyCall, deadline: Instant) -> Result<Reply, ReplyError> {
        let connection = self.connection(deadline).await?;
        let outcome = checked(connection.call_merged(call, deadline).await);
        self.record(&outcome);
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
        let unreachable = ReplyError::Failed(RedisError::Unreachable);
        if self.is_breaker_open() {
            return Err(unreachable);
        }
        let connection = timeout_with_grace(self.state.server.pool.get_after_first_attempt(), deadline).await;
        let connection = connection.flatten().ok_or(unreachable)?;
        send(&connection, words, asking, deadline).await
    }

    /// Sends a command as [`Node::call`] does, but does not record an error reply that may only reject the command.
    ///
    /// For commands that callers can do without.
    pub(crate) async fn call_optional(
        &self,
        words: &[&[u8]],
        asking: bool,
        deadline: Instant,
    ) -> Result<Reply, ReplyError> {
        let connection = self.connection(deadline).await?;
        let outcome = send(&connection, words, asking, deadline).await;
        if !matches!(outcome, Err(ReplyError::Failed(RedisError::Misconfigured))) {
            self.record_health(&outcome);
        }
        outcome
    }

    /// Sends a command and WAIT in a row over one connection, and waits for both replies.
    ///
    /// The server runs no later command of that connection before a replica has the writes, or `limit` has passed.
    pub(crate) async fn call_and_wait(
        &self,
        words: &[&[u8]],
        asking: bool,
        limit: Duration,
        deadline: Instant,
    ) -> Result<ReplicatedReply, ReplyError> {
        // 0 would mean no limit.
        let limit_ms = limit.as_millis().max(1).to_string();
        let wait: [&[u8]; 3] = [b"WAIT", b"1", limit_ms.as_bytes()];
        let (reply, replicas) = self.call_two(words, &wait, asking, deadline).await;
        let (reply, replicas) = (reply?, replicas?);
        let replicas = integer(&replicas).and_then(|replicas| u32::try_from(replicas).ok());
        let replicas = replicas.ok_or(ReplyError::Failed(RedisError::BadReply))?;
        Ok(ReplicatedReply { reply, replicas })
    }

    /// Sends two commands in a row over one connection, and waits for both replies.
    pub(crate) async fn call_two(
        &self,
        first: &[&[u8]],
        second: &[&[u8]],
        asking: bool,
        deadline: Instant,
    ) -> (Result<Reply, ReplyError>, Result<Reply, ReplyError>) {
        let connection = match self.connection(deadline).await {
            Ok(connection) => connection,
            Err(error) => return (Err(error.clone()), Err(error)),
        };
        let first = send(&connection, first, asking, deadline);
        let second = send(&connection, second, asking, deadline);
        let outcomes = tokio::join!(biased; first, second);
        // Both commands share one write, so record one outcome.
        self.record(if outcomes.0.is_ok() { &outcomes.1 } else { &outcomes.0 });
        outcomes
    }

    /// Records that a call got no answer in time, and returns the error.
    fn record_timeout(&self) -> ReplyError {
        self.state.record_failure(RedisError::Timeout);
        ReplyError::Failed(RedisError::Timeout)
    }

    /// Returns a connection, unless the breaker is open.
    async fn connection(&self, deadline: Instant) -> Result<Arc<Connection>, ReplyError> {
        let unreachable = ReplyError::Failed(RedisError::Unreachable);
        if self.is_breaker_open() {
            return Err(unreachable);
        }
        if let Some(connection) = self.state.server.pool.get() {
            return Ok(connection);
        }
        // Boxed, because it is rare and its state is large.
        match Box::pin(timeout_with_grace(self.state.server.pool.get_after_first_attempt(), deadline)).await {
            Some(connection) => connection.ok_or(unreachable),
            None => Err(self.record_timeout()),
        }
    }

    fn record(&self, outcome: &Result<Reply, ReplyError>) {
        if outcome.is_ok() {
            self.state.server.clear_misconfigured();
        }
        self.record_health(outcome);
    }

    fn record_health(&self, outcome: &Result<Reply, ReplyError>) {
        match outcome {
            Ok(_) | Err(ReplyError::NoScript | ReplyError::Moved(_) | ReplyError::Ask(_)) => {
                self.state.server.record_success();
            }
            Err(ReplyError::Failed(error)) => self.state.record_failure(*error),
        }
    }
}
