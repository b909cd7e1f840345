//! Client of one deployment: a server, a primary that sentinels watch, or a cluster.
//!
//! A deployment finds the node that owns a key. Discovery keeps its topology up to date, at intervals and at once when
//! a node fails.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::task::AbortHandle;

use super::deployment_context::{DeploymentContext, DeploymentOptions};
use super::discovery;
use super::error::RedisError;
use super::node::Node;
use super::node_address::redirect_endpoint;
use super::server_clock::{InstantRange, OffsetInterval};
use super::slot_map::SlotOwner;
use super::stats::DeploymentStats;
use super::topology::Topology;
use crate::settings::redis::TopologySettings;
use crate::store::client::deadline::timeout_with_grace;

/// Client of a deployment; dropping it stops discovery and closes all connections.
#[derive(Debug)]
pub(crate) struct Deployment {
    topology: Arc<Topology>,
    discovery: Option<AbortHandle>,
}

impl Drop for Deployment {
    fn drop(&mut self) {
        if let Some(task) = &self.discovery {
            task.abort();
        }
    }
}

impl Deployment {
    /// Starts to discover and connect to the servers of `settings`, and returns at once. Needs a tokio runtime.
    pub(crate) fn start(settings: TopologySettings, options: DeploymentOptions) -> Self {
        let context = DeploymentContext::new(options, matches!(settings, TopologySettings::Cluster(_)));
        let topology = Arc::new(Topology::new(settings, Arc::new(context)));
        let discovery = discovery::start(&topology);
        Self { topology, discovery }
    }

    /// Returns the node that owns `slot`. Calls `slot` only in a cluster; waits only for the first discovery.
    ///
    /// # Errors
    /// No node is known by `deadline`, or the slot has no owner.
    pub(crate) async fn owner(&self, slot: impl FnOnce() -> u16, deadline: Instant) -> Result<Arc<Node>, RedisError> {
        if !self.topology.discovered.initialized() {
            // Boxed, because it happens once and its state is large.
            let discovered = Box::pin(timeout_with_grace(self.topology.discovered.wait(), deadline));
            discovered.await.ok_or(RedisError::Timeout)?;
        }
        match self.topology.slot_map.load().owner(slot) {
            SlotOwner::Node(node) => Ok(Arc::clone(node)),
            SlotOwner::Unknown => Err(RedisError::Unreachable),
            SlotOwner::Unassigned => {
                self.topology.request_refresh();
                Err(RedisError::SlotDown)
            }
        }
    }

    /// Returns the node that a redirection by `responder` names; `None` outside a cluster or if the address is invalid.
    pub(crate) fn node_at(&self, address: &str, responder: &Node) -> Option<Arc<Node>> {
        matches!(self.topology.settings, TopologySettings::Cluster(_)).then_some(())?;
        let endpoint = redirect_endpoint(address, responder.endpoint())?;
        Some(self.topology.node(&endpoint))
    }

    /// Requests a discovery now instead of at the next interval.
    pub(crate) fn request_refresh(&self) {
        self.topology.request_refresh();
    }

    /// Sets the owner of a slot after a MOVED reply.
    pub(crate) fn set_slot_owner(&self, slot: u16, node: &Arc<Node>) {
        self.topology.set_slot_owner(slot, node);
        self.topology.request_refresh();
    }

    /// Returns true if at least one node accepts calls.
    pub(crate) fn is_available(&self) -> bool {
        self.topology.slot_map.load().nodes().iter().any(|node| node.is_available())
    }

    /// Returns the offset of the clock of the node that owns `slot`; `None` if the node or its clock is unknown.
    pub(crate) fn clock_offset(&self, slot: impl FnOnce() -> u16, range: InstantRange) -> Option<OffsetInterval> {
        match self.topology.slot_map.load().owner(slot) {
            SlotOwner::Node(node) => node.clock().offset(range),
            SlotOwner::Unknown | SlotOwner::Unassigned => None,
        }
    }

    /// Connections and breakers of the nodes.
    pub(crate) fn stats(&self) -> DeploymentStats {
        let nodes = self.topology.nodes();
        DeploymentStats {
            connections: nodes.iter().map(|node| node.connections()).sum(),
            opened: self.topology.context.opened.load(Ordering::Relaxed),
            nodes: nodes.iter().map(|node| (node.endpoint().to_string(), node.is_breaker_open())).collect(),
        }
    }

    /// Nodes that own at least one slot.
    pub(crate) fn nodes(&self) -> Vec<Arc<Node>> {
        self.topology.nodes()
    }

    /// Text of a configuration error, free of secrets; `None` without one.
    pub(crate) fn misconfigured(&self) -> Option<Arc<String>> {
        let of_topology = self.topology.misconfigured.load_full();
        of_topology.or_else(|| self.topology.nodes().iter().find_map(|node| node.misconfigured()))
    }
}
