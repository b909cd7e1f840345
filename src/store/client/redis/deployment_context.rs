//! State that all nodes of a deployment share.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::connect::ConnectOptions;
use super::hash_slot::prepare_hash_tags;
use super::health_check::{HealthCheck, OptionalCommands};
use super::server_clock::ClockJumps;

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
    /// Jumps of the clocks that are compared with those of the nodes.
    pub clock_jumps: Arc<ClockJumps>,
}

/// Settings of a deployment, and events and counters of its nodes.
#[derive(Debug)]
pub(crate) struct DeploymentContext {
    pub(crate) options: DeploymentOptions,
    /// True if the nodes form a cluster.
    pub(crate) is_cluster: bool,
    /// Notified when a node fails, so that discovery looks for a new primary at once.
    pub(crate) refresh_topology: Notify,
    /// Connections that were opened.
    pub(crate) connection_openings: Arc<ConnectionOpenings>,
}

/// Connections of a deployment that were opened since the start.
///
/// Behind a new connection may be a server that lost its data, or another server.
#[derive(Debug)]
pub struct ConnectionOpenings {
    total: AtomicU64,
    /// Process time at which the last one was opened.
    last_opened_at_us: AtomicI64,
    opened: Notify,
}

impl Default for ConnectionOpenings {
    fn default() -> Self {
        Self { total: AtomicU64::new(0), last_opened_at_us: AtomicI64::new(i64::MIN), opened: Notify::new() }
    }
}

impl ConnectionOpenings {
    /// Records a connection opened at a process time in microseconds, before calls use it.
    pub fn record(&self, at_us: i64) {
        self.last_opened_at_us.fetch_max(at_us, Ordering::AcqRel);
        self.total.fetch_add(1, Ordering::Relaxed);
        self.opened.notify_one();
    }

    /// Returns the number of connections.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Process time at which the last one was opened, in microseconds; the smallest number if there was none.
    pub fn last_opened_at_us(&self) -> i64 {
        self.last_opened_at_us.load(Ordering::Acquire)
    }

    /// Waits until a connection is opened, or was since the last wait.
    pub async fn wait_for_next(&self) {
        self.opened.notified().await;
    }
}

impl DeploymentContext {
    /// Creates the context; `is_cluster` is true if the nodes form a cluster.
    pub(crate) fn new(options: DeploymentOptions, is_cluster: bool) -> Self {
        if is_cluster {
            // Here, because a health check has a deadline and this takes milliseconds.
            prepare_hash_tags();
        }
        Self { options, is_cluster, refresh_topology: Notify::new(), connection_openings: Arc::default() }
    }
}
