//! Server that is queried for the topology: a sentinel, or a node of a cluster.

use std::sync::Arc;

use tokio::time::timeout;

use crate::settings::endpoint::Endpoint;
use crate::store::client::connect::Connected;
use crate::store::client::redis::connect;
use crate::store::client::redis::connect_options::ConnectOptions;
use crate::store::client::redis::connection::Connection;
use crate::store::client::redis::error::{RedisConnectError, RedisError};
use crate::store::client::redis::reply::Reply;
use crate::store::client::redis::send::{error_kind, send_with_error_text};

/// Queried server, with its own connection that is opened when needed.
#[derive(Debug)]
pub(super) struct TopologySource {
    pub(super) endpoint: Endpoint,
    options: Arc<ConnectOptions>,
    connected: Option<Connected<Connection>>,
}

impl TopologySource {
    /// Creates a source without a connection.
    pub(super) fn new(endpoint: Endpoint, options: &ConnectOptions) -> Self {
        let connect_timeout = options.connect_timeout.min(options.query_timeout);
        let options = Arc::new(ConnectOptions { connect_timeout, ..options.clone() });
        Self { endpoint, options, connected: None }
    }

    /// Sends a command and returns its reply.
    ///
    /// # Errors
    /// The server cannot be reached in time, or sends an error reply.
    pub(super) async fn query(&mut self, words: &[&[u8]]) -> Result<Reply, RedisConnectError> {
        let connected = match self.connected.take() {
            Some(connected) => connected,
            None => {
                let outcome = connect::connect(&self.endpoint, &self.options).await;
                outcome.map_err(|error| self.error(error.kind, &error.text))?
            }
        };
        match timeout(self.options.query_timeout, send_with_error_text(&connected.connection, words)).await {
            Ok(Ok(reply)) => {
                self.connected = Some(connected);
                Ok(reply)
            }
            Ok(Err((error, text))) => Err(self.error(error_kind(&error), &text)),
            Err(_) => Err(self.error(RedisError::Timeout, "no answer")),
        }
    }

    /// Returns the error for a reply that cannot be parsed.
    pub(super) fn invalid_reply(&self) -> RedisConnectError {
        self.error(RedisError::BadReply, "an invalid reply")
    }

    fn error(&self, kind: RedisError, text: &str) -> RedisConnectError {
        RedisConnectError { kind, text: format!("{}: {text}", self.endpoint) }
    }
}

/// Adds a question to the error of a command that the server does not know.
pub(super) fn with_hint(error: RedisConnectError, hint: &str) -> RedisConnectError {
    match error.kind {
        // Errors of connecting name the setting to check.
        RedisError::Misconfigured if error.text.contains("ERR ") => {
            RedisConnectError::misconfigured(format!("{error}; {hint}"))
        }
        _ => error,
    }
}
