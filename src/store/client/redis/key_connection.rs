//! Connection of its own to the server that has one key, for tools.
//!
//! Connections of a [`Deployment`] are shared, so no command may block them, and they keep only the kind of an error.
//! This one belongs to its caller, and keeps the text. It is opened when it is needed and closed after an error, and it
//! follows the key through failovers and moved slots. Before a command it logs in again if credentials have changed
//! since the last login, and is replaced if that fails or certificates have changed; a connection that cannot be
//! replaced stays, and the next attempt comes later each time.
//!
//! Decides: how connections of their own (blocks, tables, streams, `events`) follow a failover, and log in again.
//! Decides: how often a command is sent (`MAX_SENDS`).

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::connect::{self, ConnectOptions};
use super::connection::Connection;
use super::deployment::Deployment;
use super::deployment_context::DeploymentOptions;
use super::error::{RedisConnectError, RedisError, ReplyError, sanitize_error_text};
use super::hash_slot::hash_slot;
use super::health_check::{CommandWords, HealthCheck};
use super::node::Node;
use super::resp::{Reply, is_reply_too_large};
use crate::settings::redis::deployment::DeploymentSettings;
use crate::store::client::connect::Connected;
use crate::store::client::supervised_server::{ConnectFileHashes, FILE_CHECK_INTERVAL};

/// Upper bound on the search for the server, in addition to that on a connection attempt.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time until a connection's files are compared again, after one with new files could not replace it.
const MAX_FILE_RECHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of times a command is sent, with those to other nodes.
const MAX_SENDS: usize = 5;

/// Failed command, with the text of the server.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct KeyCommandError {
    /// Kind of the error.
    pub kind: RedisError,
    /// Text for operators, free of secrets.
    pub text: String,
    /// The reply exceeds the bounds of the client: ask for less.
    pub is_too_large: bool,
}

impl KeyCommandError {
    /// Advice for the operator: the server lacks the command, as a proxy may; else its user may lack `permission`.
    pub fn advice(&self, permission: &'static str) -> &'static str {
        if self.kind == RedisError::Unauthenticated {
            return self.kind.advice();
        }
        match self.text.contains("unknown command") {
            true => "this server, perhaps a proxy before Redis, does not have the command: name a Redis in its place",
            false => permission,
        }
    }

    /// Returns true if the same command may succeed later.
    pub fn is_transient(&self) -> bool {
        match self.kind {
            RedisError::Timeout
            | RedisError::Unreachable
            | RedisError::BreakerOpen
            | RedisError::Broken
            | RedisError::ReadOnly
            | RedisError::NoWrites
            | RedisError::Busy
            | RedisError::Loading
            | RedisError::SlotDown
            | RedisError::Overloaded => true,
            // A blocked command ends so when the server changes its role.
            RedisError::BadReply => self.text.starts_with("UNBLOCKED"),
            RedisError::NoTime | RedisError::Unauthenticated | RedisError::WrongType | RedisError::Misconfigured => {
                false
            }
        }
    }
}

impl From<RedisConnectError> for KeyCommandError {
    fn from(RedisConnectError { kind, text }: RedisConnectError) -> Self {
        Self { kind, text, is_too_large: false }
    }
}

/// Connection to the server that has a key.
#[derive(Debug)]
pub struct KeyOwnerConnection {
    deployment: Arc<Deployment>,
    options: Arc<ConnectOptions>,
    slot: u16,
    open: Option<OpenConnection>,
}

/// Open connection to one node.
#[derive(Debug)]
struct OpenConnection {
    connected: Connected<Connection>,
    node: Arc<Node>,
    /// True to send ASKING before each command: the slot moves to this node.
    asking: bool,
    /// Files, or the token, that it logged in with.
    files: Option<ConnectFileHashes>,
    /// Time of the last comparison with the files.
    compared_at: Instant,
    /// Time until the next one.
    compared_again_after: Duration,
}

impl KeyOwnerConnection {
    /// Starts to look for the server; connects with the first command. Needs a tokio runtime.
    pub fn start(settings: &DeploymentSettings, key: &[u8]) -> Self {
        let connect = ConnectOptions::for_noncritical_servers(settings, "its data cannot be read");
        let options = Arc::new(connect.clone());
        let deployment = DeploymentOptions {
            connect,
            connections: 0,
            call_timeout: DISCOVERY_TIMEOUT,
            health_check: Box::new(NoHealthCheck),
            optional_commands: None,
        };
        let deployment = Arc::new(Deployment::start(settings.topology.clone(), deployment));
        Self { deployment, options, slot: hash_slot(key), open: None }
    }

    /// Creates a new connection to the same server, which connects with its first command.
    pub fn new_connection(&self) -> Self {
        let (deployment, options) = (Arc::clone(&self.deployment), Arc::clone(&self.options));
        Self { deployment, options, slot: self.slot, open: None }
    }

    /// Sends a command, and waits up to `limit` for its reply. Dropping the future closes the connection.
    ///
    /// # Errors
    /// The server cannot be reached or rejects the command. After [`RedisError::Timeout`] and [`RedisError::Broken`]
    /// the command may have run.
    pub async fn call(&mut self, words: &[&[u8]], limit: Duration) -> Result<Reply, KeyCommandError> {
        for _ in 0..MAX_SENDS {
            let open = match self.open.take() {
                Some(open) => self.renew_if_files_changed(open).await,
                None => self.connect().await?,
            };
            let reply = open.connected.connection.call(words, open.asking, Some(Instant::now() + limit)).await;
            let text = match reply {
                Ok(Reply::Error(text)) => text,
                Ok(reply) => {
                    self.open = Some(open);
                    return Ok(reply);
                }
                Err(kind) => return Err(open.close_and_build_error(kind).await),
            };
            let (address, asking) = match ReplyError::from_reply(&text) {
                ReplyError::Moved(address) => (address, false),
                ReplyError::Ask(address) => (address, true),
                ReplyError::NoScript => (String::new(), false),
                ReplyError::Failed(kind) => {
                    if matches!(kind, RedisError::ReadOnly | RedisError::SlotDown) {
                        // Another node may be the primary now.
                        self.deployment.request_discovery();
                    } else {
                        self.open = Some(open);
                    }
                    return Err(RedisConnectError { kind, text: sanitize_error_text(&text) }.into());
                }
            };
            let Some(node) = self.deployment.node_at_address(&address, &open.node) else {
                return Err(RedisConnectError::misconfigured(sanitize_error_text(&text)).into());
            };
            if !asking {
                self.deployment.record_moved_slot(self.slot, &node);
            }
            self.open = Some(self.connect_to_node(node, asking).await?);
        }
        let text = "the command was redirected too often".to_owned();
        Err(RedisConnectError { kind: RedisError::SlotDown, text }.into())
    }

    /// Connects to the owner of the key.
    async fn connect(&self) -> Result<OpenConnection, KeyCommandError> {
        let owner = self.deployment.slot_owner(|| self.slot, Instant::now() + DISCOVERY_TIMEOUT).await;
        let node = owner.map_err(|kind| {
            let cause = self.deployment.misconfiguration();
            let text = cause.map_or_else(|| format!("{kind}: no server is known"), |text| text.to_string());
            let kind = if self.deployment.misconfiguration().is_some() { RedisError::Misconfigured } else { kind };
            RedisConnectError { kind, text }
        })?;
        self.connect_to_node(node, false).await
    }

    /// Logs in again, or returns a new connection, if what connecting reads has changed, compared once a second.
    async fn renew_if_files_changed(&self, mut open: OpenConnection) -> OpenConnection {
        let Some(seen) = open.files else { return open };
        if open.compared_at.elapsed() < open.compared_again_after {
            return open;
        }
        open.compared_at = Instant::now();
        // Hashed first: what changes meanwhile is found by the next comparison.
        let files = self.options.hash_connect_files();
        if files == open.files {
            return open;
        }
        let is_login_only = files.is_some_and(|files| files.has_certificates_of(&seen));
        if is_login_only && connect::log_in_again(&open.connected.connection, &self.options).await.is_ok() {
            (open.files, open.compared_again_after) = (files, FILE_CHECK_INTERVAL);
            return open;
        }
        match self.connect_to_node(Arc::clone(&open.node), open.asking).await {
            Ok(new) => new,
            Err(_) => {
                open.compared_again_after = (2 * open.compared_again_after).min(MAX_FILE_RECHECK_INTERVAL);
                open
            }
        }
    }

    async fn connect_to_node(&self, node: Arc<Node>, asking: bool) -> Result<OpenConnection, KeyCommandError> {
        // Hashed first: a file that changes meanwhile is found by the next comparison.
        let files = self.options.hash_connect_files();
        match connect::connect(node.endpoint(), &self.options).await {
            Ok(connected) => Ok(OpenConnection {
                connected,
                node,
                asking,
                files,
                compared_at: Instant::now(),
                compared_again_after: FILE_CHECK_INTERVAL,
            }),
            Err(RedisConnectError { kind, text }) => {
                self.deployment.request_discovery();
                Err(RedisConnectError { kind, text: format!("{}: {text}", node.endpoint()) }.into())
            }
        }
    }
}

impl OpenConnection {
    /// Closes the connection, and returns the reason why a command got no reply.
    async fn close_and_build_error(self, kind: RedisError) -> KeyCommandError {
        let Self { connected: Connected { connection, closed }, node, .. } = self;
        let reason = if kind == RedisError::Broken { closed.await.ok() } else { None };
        drop(connection);
        let text = reason.as_ref().map_or_else(|| kind.to_string(), ToString::to_string);
        let is_too_large = reason.is_some_and(|reason| is_reply_too_large(&reason));
        KeyCommandError { kind, text: format!("{}: {text}", node.endpoint()), is_too_large }
    }
}

/// Check of a deployment without shared connections.
#[derive(Debug)]
struct NoHealthCheck;

impl HealthCheck for NoHealthCheck {
    fn commands(&self, _hash_tag: u32) -> Vec<CommandWords> {
        Vec::new()
    }

    fn advice(&self, error: RedisError, text: &str) -> String {
        format!("{text} ({})", error.advice())
    }
}
