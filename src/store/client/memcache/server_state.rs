//! State of a server, for calls and for the supervisor of its connections.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use super::connect::{self, MemcacheConnection, MemcacheOptions};
use super::error::{MemcacheConnectError, MemcacheError};
use crate::settings::endpoint::Endpoint;
use crate::store::client::connect::Connected;
use crate::store::client::server_state::{ServerNames, ServerState};
use crate::store::client::supervisor::SupervisedServer;

/// State of a server, and the options of its connections.
#[derive(Debug)]
pub(super) struct MemcacheState {
    pub(super) server: ServerState<MemcacheConnection>,
    options: Arc<MemcacheOptions>,
    opened: AtomicU64,
}

impl MemcacheState {
    /// Creates the state of the server at `endpoint`, without connections.
    pub(super) fn new(endpoint: Endpoint, options: Arc<MemcacheOptions>) -> Self {
        let on_failure = "`on_store_error` decides";
        let names = ServerNames { program: "memcached", files: "certificates", setting: None, on_failure };
        let server = ServerState::new(endpoint, options.connections, names);
        Self { server, options, opened: AtomicU64::new(0) }
    }
}

impl SupervisedServer for MemcacheState {
    type Connection = MemcacheConnection;
    type Error = MemcacheError;

    fn state(&self) -> &ServerState<MemcacheConnection> {
        &self.server
    }

    fn opened(&self) -> &AtomicU64 {
        &self.opened
    }

    fn fingerprint(&self) -> Option<[u8; 32]> {
        self.options.fingerprint()
    }

    async fn connect(&self) -> Result<Connected<MemcacheConnection>, MemcacheConnectError> {
        connect::connect(&self.server.endpoint, &self.options).await
    }

    async fn check(&self, connection: &MemcacheConnection) -> Result<(), MemcacheConnectError> {
        connect::check(connection, Some(Instant::now() + self.options.call_timeout)).await
    }
}
