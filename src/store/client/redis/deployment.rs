//! Client of one deployment: a server, a primary that sentinels watch, or a cluster. `discovery.rs` starts it and its
//! discovery.
//!
//! A deployment finds the node that owns a key, sends a command there, and follows the node's redirections. Calls read
//! the map of slots and never wait for it: [`discovery`](super::discovery) replaces it, at intervals and at once when a
//! node fails, and a redirection changes the owner of one slot at once. A node is dropped when it owns no slot and has
//! no calls left.
//!
//! Decides: MOVED, ASK and CLUSTERDOWN: what is sent again, and how often (`follow_redirection`, `MAX_REDIRECTS`).
//! Decides: when a deployment is lost: not with one of several nodes.

use std::collections::HashMap;
use std::mem::replace;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::SetOnce;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::connect::ConnectOptions;
use super::deployment_context::DeploymentContext;
use super::error::{RedisError, ReplyError};
use super::hash_slot::{HASH_SLOTS, hash_slot};
use super::node::Node;
use super::resp::Reply;
use crate::base::sharded::lock_ignoring_poison;
use crate::settings::address::Endpoint;
use crate::settings::redis::deployment::TopologySettings;
use crate::store::client::deadline::timeout_with_grace;
use crate::store::client::server_status::ServerStatus;

/// Maximum number of times a call is sent to another node.
const MAX_REDIRECTS: usize = 5;

/// Connections and breakers of a deployment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DeploymentStats {
    /// Connections in use.
    pub(crate) open_connection_count: usize,
    /// Connections opened since the start.
    pub(crate) opened_connections_total: u64,
    /// Servers in use.
    pub(crate) servers: Vec<ServerStatus>,
}

/// Client of a deployment; dropping it stops discovery and closes all connections.
#[derive(Debug)]
pub struct Deployment {
    pub(super) topology: Arc<Topology>,
    /// Task that keeps the topology up to date; `None` for a single server.
    pub(super) discovery: Option<AbortHandle>,
}

impl Drop for Deployment {
    fn drop(&mut self) {
        if let Some(task) = &self.discovery {
            task.abort();
        }
    }
}

impl Deployment {
    /// Sends a command to the node that owns `key`, and waits for its reply until `deadline`.
    ///
    /// # Errors
    /// No reply by `deadline`, an error reply, or too many redirections.
    pub async fn call_key(&self, key: &[u8], words: &[&[u8]], deadline: Instant) -> Result<Reply, RedisError> {
        let mut target = self.target_node(key, deadline).await?;
        loop {
            match target.node.call(words, target.asking, deadline).await {
                Ok(reply) => return Ok(reply),
                Err(error) => target.follow_redirection(error)?,
            }
        }
    }

    /// Sends a command as [`Deployment::call_key`] does, but does not record failures for the breaker of the node.
    ///
    /// # Errors
    /// As for [`Deployment::call_key`].
    pub async fn call_key_unrecorded(
        &self,
        key: &[u8],
        words: &[&[u8]],
        deadline: Instant,
    ) -> Result<Reply, RedisError> {
        let mut target = self.target_node(key, deadline).await?;
        loop {
            match target.node.call_unrecorded(words, target.asking, deadline).await {
                Ok(reply) => return Ok(reply),
                Err(error) => target.follow_redirection(error)?,
            }
        }
    }

    /// Returns the node that owns `key`, for calls that are more than one command: those call
    /// [`TargetNode::follow_redirection`] with each error, and try again.
    ///
    /// # Errors
    /// No owner is known by `deadline`.
    pub(crate) async fn target_node<'c>(
        &'c self,
        key: &'c [u8],
        deadline: Instant,
    ) -> Result<TargetNode<'c>, RedisError> {
        let node = self.slot_owner(|| hash_slot(key), deadline).await?;
        Ok(TargetNode { deployment: self, key, node, asking: false, owner: None, followed: 0 })
    }

    /// Returns the node that owns `slot`. Calls `slot` only in a cluster; waits only for the first discovery.
    ///
    /// # Errors
    /// No node is known by `deadline`, or the slot has no owner.
    pub(crate) async fn slot_owner(
        &self,
        slot: impl FnOnce() -> u16,
        deadline: Instant,
    ) -> Result<Arc<Node>, RedisError> {
        if !self.topology.discovered.initialized() {
            // Boxed, because it happens once and its state is large.
            let discovered = Box::pin(timeout_with_grace(self.topology.discovered.wait(), deadline));
            discovered.await.ok_or(RedisError::Timeout)?;
        }
        match self.topology.slot_map.load().owner(slot) {
            SlotOwner::Node(node) => Ok(Arc::clone(node)),
            SlotOwner::Unknown => Err(RedisError::Unreachable),
            SlotOwner::Unassigned => {
                self.topology.request_discovery();
                Err(RedisError::SlotDown)
            }
        }
    }

    /// Returns the node that a redirection by `responder` names; `None` outside a cluster or if the address is invalid.
    pub(crate) fn node_at_address(&self, address: &str, responder: &Node) -> Option<Arc<Node>> {
        matches!(self.topology.settings, TopologySettings::Cluster(_)).then_some(())?;
        let endpoint = parse_redirection_address(address, responder.endpoint())?;
        Some(self.topology.node_at_endpoint(&endpoint))
    }

    /// Requests a discovery now instead of at the next interval.
    pub(crate) fn request_discovery(&self) {
        self.topology.request_discovery();
    }

    /// Sets the owner of a slot after a MOVED reply.
    pub(crate) fn record_moved_slot(&self, slot: u16, node: &Arc<Node>) {
        self.topology.record_moved_slot(slot, node);
        self.topology.request_discovery();
    }

    /// Returns true if at least one node accepts calls.
    pub(crate) fn has_available_node(&self) -> bool {
        self.topology.slot_map.load().nodes().iter().any(|node| node.is_available())
    }

    /// Connections and breakers of the nodes.
    pub(crate) fn stats(&self) -> DeploymentStats {
        let nodes = self.topology.nodes();
        DeploymentStats {
            open_connection_count: nodes.iter().map(|node| node.open_connection_count()).sum(),
            opened_connections_total: self.topology.context.opened_connections.load(Ordering::Relaxed),
            servers: nodes.iter().map(|node| node.status()).collect(),
        }
    }

    /// Nodes that own at least one slot.
    pub(crate) fn nodes(&self) -> Vec<Arc<Node>> {
        self.topology.nodes()
    }

    /// Text of a configuration error, free of secrets; `None` without one.
    pub fn misconfiguration(&self) -> Option<Arc<String>> {
        let of_topology = self.topology.misconfigured.load_full();
        of_topology.or_else(|| self.topology.nodes().iter().find_map(|node| node.misconfiguration()))
    }

    /// How many slots of the cluster no node serves, and why; `None` if all are served.
    pub(crate) fn unserved_slots(&self) -> Option<Arc<String>> {
        self.topology.unserved_slots.load_full()
    }

    /// Last reason why a server that is not available could not be used, or none was found; `None` if none is known.
    pub(crate) fn last_failure(&self) -> Option<Arc<String>> {
        let nodes = self.topology.nodes();
        let of_nodes = nodes.iter().filter(|node| !node.is_available()).find_map(|node| node.last_failure());
        of_nodes.or_else(|| self.topology.last_failure.load_full())
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
    pub(crate) fn follow_redirection(&mut self, error: ReplyError) -> Result<(), RedisError> {
        let (address, moved) = match error {
            ReplyError::Failed(error) => {
                if error == RedisError::SlotDown {
                    self.deployment.request_discovery();
                }
                return Err(error);
            }
            ReplyError::NoScript => return Err(RedisError::BadReply),
            ReplyError::Moved(address) => (address, true),
            ReplyError::Ask(address) => (address, false),
        };
        let next = self.deployment.node_at_address(&address, &self.node).ok_or(RedisError::Misconfigured)?;
        if moved && address.starts_with('?') && Arc::ptr_eq(&next, &self.node) {
            // The node has no name, and is not here: only the map of slots may have its address.
            self.deployment.request_discovery();
            return Err(RedisError::SlotDown);
        }
        if moved {
            self.deployment.record_moved_slot(hash_slot(self.key), &next);
        }
        let previous = replace(&mut self.node, next);
        self.asking = !moved;
        self.owner = if moved { None } else { Some(self.owner.take().unwrap_or(previous)) };
        self.followed += 1;
        if self.followed > MAX_REDIRECTS { Err(RedisError::SlotDown) } else { Ok(()) }
    }
}

/// Reads the `host:port` of a redirection, as [`announced_endpoint`] does. `None` if it is invalid.
pub(crate) fn parse_redirection_address(address: &str, responder: &Endpoint) -> Option<Endpoint> {
    let (host, port) = address.rsplit_once(':')?;
    announced_endpoint(host, port.parse().ok()?, responder)
}

/// Returns the endpoint that a server announces; `None` if it cannot be used. An empty host and `?`, which stand for an
/// unknown one, mean the host of `responder`.
pub(super) fn announced_endpoint(host: &str, port: u16, responder: &Endpoint) -> Option<Endpoint> {
    let host = match (host.trim_start_matches('[').trim_end_matches(']'), responder) {
        ("" | "?", Endpoint::Tcp { host, .. }) => host,
        ("" | "?", Endpoint::Unix(_)) => return None,
        (host, _) => host,
    };
    (port != 0).then(|| Endpoint::Tcp { host: host.to_owned(), port })
}

/// Known servers of a deployment.
#[derive(Debug)]
pub(crate) struct Topology {
    pub(crate) settings: TopologySettings,
    pub(crate) context: Arc<DeploymentContext>,
    /// Owners of the slots.
    pub(crate) slot_map: ArcSwap<SlotMap>,
    nodes: Mutex<HashMap<Endpoint, Arc<Node>>>,
    /// Text of a configuration error that prevents discovery; `None` without one.
    pub(crate) misconfigured: ArcSwapOption<String>,
    /// Why the last discovery failed; `None` if it did not.
    pub(crate) last_failure: ArcSwapOption<String>,
    /// How many slots no node serves, and why; `None` if all are served.
    unserved_slots: ArcSwapOption<String>,
    /// Set after the first discovery, successful or not.
    pub(crate) discovered: SetOnce<()>,
}

impl Topology {
    /// Creates the topology; a single server is known at once, and connecting to it starts.
    pub(crate) fn new(settings: TopologySettings, context: Arc<DeploymentContext>) -> Self {
        let slot_map = match &settings {
            TopologySettings::Single(endpoint) => SlotMap::Single(Node::start(endpoint.clone(), Arc::clone(&context))),
            TopologySettings::Sentinel { .. } | TopologySettings::Cluster(_) => SlotMap::Empty,
        };
        Self {
            settings,
            context,
            slot_map: ArcSwap::from_pointee(slot_map),
            nodes: Mutex::default(),
            misconfigured: ArcSwapOption::empty(),
            last_failure: ArcSwapOption::empty(),
            unserved_slots: ArcSwapOption::empty(),
            discovered: SetOnce::new(),
        }
    }

    /// Ends the wait for the first discovery, successful or not.
    pub(crate) fn set_first_discovery_done(&self) {
        if !self.discovered.initialized() {
            let _already_set = self.discovered.set(());
        }
    }

    /// Nodes that own at least one slot.
    pub(crate) fn nodes(&self) -> Vec<Arc<Node>> {
        self.slot_map.load().nodes().to_vec()
    }

    /// Returns the cluster node at `endpoint`; connecting starts if the node is new.
    pub(crate) fn node_at_endpoint(&self, endpoint: &Endpoint) -> Arc<Node> {
        let mut nodes = lock_ignoring_poison(&self.nodes);
        let start = || Node::start(endpoint.clone(), Arc::clone(&self.context));
        Arc::clone(nodes.entry(endpoint.clone()).or_insert_with(start))
    }

    /// Requests a discovery now instead of at the next interval.
    pub(crate) fn request_discovery(&self) {
        self.context.refresh_topology.notify_one();
    }

    /// Switches to the primary at `endpoint`, unless it is the current one.
    pub(crate) fn set_primary(&self, endpoint: &Endpoint) {
        let same = self.slot_map.load().nodes().iter().any(|node| node.endpoint() == endpoint);
        if !same {
            let setting = self.context.options.connect.setting;
            if self.nodes().is_empty() {
                tracing::debug!(setting, primary = %endpoint, "sentinels name the redis primary");
            } else {
                tracing::warn!(setting, primary = %endpoint, "switched to a new redis primary");
            }
            let node = Node::start(endpoint.clone(), Arc::clone(&self.context));
            self.slot_map.store(Arc::new(SlotMap::Single(node)));
        }
    }

    /// Replaces the slot map of a cluster.
    pub(crate) fn replace_slot_map(&self, ranges: &[SlotRange]) {
        let slot_map = SlotMap::from_slot_ranges(ranges, |endpoint| self.node_at_endpoint(endpoint));
        lock_ignoring_poison(&self.nodes)
            .retain(|endpoint, _| slot_map.nodes().iter().any(|node| node.endpoint() == endpoint));
        self.slot_map.store(Arc::new(slot_map));
    }

    /// Records and logs how many slots no node serves, and why; `None` if all are served.
    pub(crate) fn record_unserved_slots(&self, what: Option<String>) {
        let before = self.unserved_slots.load_full();
        if before.as_deref() != what.as_ref() {
            let ConnectOptions { setting, on_failure, .. } = self.context.options.connect;
            match &what {
                Some(what) => tracing::warn!(setting, "{what} ({on_failure} for their keys)"),
                None => tracing::warn!(setting, "nodes serve all hash slots of the cluster again"),
            }
            self.unserved_slots.store(what.map(Arc::new));
        }
    }

    /// Sets the owner of one slot after a redirection, until the next discovery.
    pub(crate) fn record_moved_slot(&self, slot: u16, node: &Arc<Node>) {
        self.slot_map.rcu(|slot_map| match slot_map.with_owner(slot, node) {
            Some(changed) => Arc::new(changed),
            None => Arc::clone(slot_map),
        });
    }
}

/// Immutable map from slots to nodes; replaced as a whole.
#[derive(Debug)]
pub(crate) enum SlotMap {
    /// No server is known yet.
    Empty,
    /// One server owns all keys.
    Single(Arc<Node>),
    /// Nodes of a cluster, and for each slot the index of its owner, or [`NO_OWNER`].
    Cluster { nodes: Vec<Arc<Node>>, owners: Box<[u16]> },
}

/// Index of the owner of a slot that has none.
const NO_OWNER: u16 = u16::MAX;

/// Owner of a slot.
pub(crate) enum SlotOwner<'m> {
    /// This node owns the key.
    Node(&'m Arc<Node>),
    /// The cluster has no owner for the slot.
    Unassigned,
    /// No server is known yet.
    Unknown,
}

impl SlotMap {
    /// Builds the map of a cluster; `node` returns the node at an address.
    pub(crate) fn from_slot_ranges(ranges: &[SlotRange], mut node: impl FnMut(&Endpoint) -> Arc<Node>) -> Self {
        let mut nodes: Vec<Arc<Node>> = Vec::new();
        let mut owners = vec![NO_OWNER; usize::from(HASH_SLOTS)].into_boxed_slice();
        for SlotRange { first, last, owner } in ranges {
            let known = nodes.iter().position(|node| node.endpoint() == owner);
            let index = known.unwrap_or_else(|| {
                nodes.push(node(owner));
                nodes[nodes.len() - 1].set_health_check_slot(*first);
                nodes.len() - 1
            });
            let index = u16::try_from(index).expect("a cluster has at most as many nodes as slots");
            owners[usize::from(*first)..=usize::from(*last)].fill(index);
        }
        Self::Cluster { nodes, owners }
    }

    /// Returns the owner of a slot; calls `slot` only if the map has several nodes.
    pub(crate) fn owner(&self, slot: impl FnOnce() -> u16) -> SlotOwner<'_> {
        match self {
            Self::Empty => SlotOwner::Unknown,
            Self::Single(node) => SlotOwner::Node(node),
            Self::Cluster { nodes, owners } => match owners[usize::from(slot())] {
                NO_OWNER => SlotOwner::Unassigned,
                index => SlotOwner::Node(&nodes[usize::from(index)]),
            },
        }
    }

    /// Nodes that own at least one slot.
    pub(crate) fn nodes(&self) -> &[Arc<Node>] {
        match self {
            Self::Empty => &[],
            Self::Single(node) => std::slice::from_ref(node),
            Self::Cluster { nodes, .. } => nodes,
        }
    }

    /// Returns a copy in which `node` owns `slot`; `None` outside a cluster.
    pub(crate) fn with_owner(&self, slot: u16, node: &Arc<Node>) -> Option<Self> {
        let Self::Cluster { nodes, owners } = self else { return None };
        let (mut nodes, mut owners) = (nodes.clone(), owners.clone());
        let known = nodes.iter().position(|other| Arc::ptr_eq(other, node));
        let index = known.unwrap_or_else(|| {
            nodes.push(Arc::clone(node));
            nodes.len() - 1
        });
        owners[usize::from(slot)] = u16::try_from(index).unwrap_or(NO_OWNER);
        Some(Self::Cluster { nodes, owners })
    }
}

/// Consecutive slots with one owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotRange {
    /// First slot.
    pub first: u16,
    /// Last slot, included; below [`HASH_SLOTS`].
    pub last: u16,
    /// Primary that owns the slots.
    pub owner: Endpoint,
}
