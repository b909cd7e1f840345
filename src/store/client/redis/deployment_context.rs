//! State that all nodes of a deployment share.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::Notify;

use super::connect::ConnectOptions;
use super::hash_slot::prepare_hash_tags;
use super::health_check::{HealthCheck, OptionalCommands};

/// What the connections to a deployment share: settings, and what is known of its servers.
#[derive(Debug)]
pub struct DeploymentOptions {
    /// Options of new connections.
    pub connect: ConnectOptions,
    /// Number of connections to each node.
    pub connections: usize,
    /// Upper bound on a health check, the same as on a call.
    pub call_timeout: Duration,
    /// Check of a server before calls are sent to it.
    pub health_check: Box<dyn HealthCheck>,
    /// Commands that a server may reject while it still serves the others; `None` if there are no such commands.
    pub optional_commands: Option<OptionalCommands>,
}

/// Settings of a deployment, and events and counters of its nodes.
#[derive(Debug)]
pub(crate) struct DeploymentContext {
    pub(crate) options: DeploymentOptions,
    /// True if the nodes form a cluster.
    pub(crate) is_cluster: bool,
    /// Notified when a node fails, so that discovery looks for a new primary at once.
    pub(crate) refresh_topology: Notify,
    /// Number of connections that were opened since the start.
    pub(crate) opened_connections: AtomicU64,
}

impl DeploymentContext {
    /// Creates the context; `is_cluster` is true if the nodes form a cluster.
    pub(crate) fn new(options: DeploymentOptions, is_cluster: bool) -> Self {
        if is_cluster {
            // Here, because a health check has a deadline and this takes milliseconds.
            prepare_hash_tags();
        }
        Self { options, is_cluster, refresh_topology: Notify::new(), opened_connections: AtomicU64::new(0) }
    }
}
