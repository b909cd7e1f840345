//! Client of one deployment: a server, a primary that sentinels watch, or a cluster.
//!
//! A deployment finds the node that owns a key, sends a command there, and follows the node's redirections. Discovery
//! keeps its topology up to date, at intervals and at once when a node fails.

use std::mem::replace;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::task::AbortHandle;

use super::deployment_context::{DeploymentContext, DeploymentOptions};
use super::discovery;
use super::error::{RedisError, ReplyError};
use super::hash_slot::hash_slot;
use super::node::Node;
use super::reply::Reply;
use super::server_clock::{InstantRange, OffsetInterval};
use super::slot_map::{SlotOwner, redirect_endpoint};
use super::topology::Topology;
use crate::settings::redis::deployment::TopologySettings;
use crate::store::client::deadline::timeout_with_grace;

/// Maximum number of times a call is sent to another node.
const MAX_REDIRECTS: usize = 5;

/// Connections and breakers of a deployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeploymentStats {
    /// Connections in use.
    pub(crate) connections: usize,
    /// Connections opened since the start.
    pub(crate) opened: u64,
    /// Address of each server in use, and whether its breaker is open.
    pub(crate) nodes: Vec<(String, bool)>,
}

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

    /// Sends a command to the node that owns `key`, and waits for its reply until `deadline`.
    ///
    /// # Errors
    /// No reply by `deadline`, an error reply, or too many redirections.
    pub(crate) async fn call_key(&self, key: &[u8], words: &[&[u8]], deadline: Instant) -> Result<Reply, RedisError> {
        let mut target = self.target(key, deadline).await?;
        loop {
            match target.node.call(words, target.asking, deadline).await {
                Ok(reply) => return Ok(reply),
                Err(error) => target.follow(error)?,
            }
        }
    }

    /// Sends a command as [`Deployment::call_key`] does, but does not record failures for the breaker of the node.
    ///
    /// # Errors
    /// As for [`Deployment::call_key`].
    pub(crate) async fn call_key_unrecorded(
        &self,
        key: &[u8],
        words: &[&[u8]],
        deadline: Instant,
    ) -> Result<Reply, RedisError> {
        let mut target = self.target(key, deadline).await?;
        loop {
            match target.node.call_unrecorded(words, target.asking, deadline).await {
                Ok(reply) => return Ok(reply),
                Err(error) => target.follow(error)?,
            }
        }
    }

    /// Returns the node that owns `key`, for calls that are more than one command: those call [`TargetNode::follow`]
    /// with each error, and try again.
    ///
    /// # Errors
    /// No owner is known by `deadline`.
    pub(crate) async fn target<'c>(&'c self, key: &'c [u8], deadline: Instant) -> Result<TargetNode<'c>, RedisError> {
        let node = self.owner(|| hash_slot(key), deadline).await?;
        Ok(TargetNode { deployment: self, key, node, asking: false, owner: None, followed: 0 })
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

/// Node that a call is sent to, updated from MOVED and ASK replies.
#[derive(Debug)]
pub(crate) struct TargetNode<'c> {
    deployment: &'c Deployment,
    /// A key of the call; all of them are in one slot.
    key: &'c [u8],
    pub(crate) node: Arc<Node>,
    /// True to send ASKING before the call.
    pub(crate) asking: bool,
    /// Owner of the slot, while the node is one that an ASK reply named.
    owner: Option<Arc<Node>>,
    followed: usize,
}

impl TargetNode<'_> {
    /// Returns to the owner of the slot after a command that an ASK reply redirected: other keys may still be there.
    pub(crate) fn end_asking(&mut self) {
        if let Some(owner) = self.owner.take() {
            (self.node, self.asking, self.followed) = (owner, false, 0);
        }
    }

    /// Follows a redirection, so that the call can be sent again.
    ///
    /// # Errors
    /// The error is a failure, or the call was redirected too often.
    pub(crate) fn follow(&mut self, error: ReplyError) -> Result<(), RedisError> {
        let (address, moved) = match error {
            ReplyError::Failed(error) => {
                if error == RedisError::SlotDown {
                    self.deployment.request_refresh();
                }
                return Err(error);
            }
            ReplyError::NoScript => return Err(RedisError::BadReply),
            ReplyError::Moved(address) => (address, true),
            ReplyError::Ask(address) => (address, false),
        };
        let next = self.deployment.node_at(&address, &self.node).ok_or(RedisError::Misconfigured)?;
        if moved {
            self.deployment.set_slot_owner(hash_slot(self.key), &next);
        }
        let previous = replace(&mut self.node, next);
        self.asking = !moved;
        self.owner = if moved { None } else { Some(self.owner.take().unwrap_or(previous)) };
        self.followed += 1;
        if self.followed > MAX_REDIRECTS { Err(RedisError::SlotDown) } else { Ok(()) }
    }
}
