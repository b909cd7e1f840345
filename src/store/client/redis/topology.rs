//! Topology of a deployment: its nodes, and the slots that they own.
//!
//! Calls read the slot map and never wait for it. Discovery replaces it; a redirection changes the owner of one slot at
//! once. A node is dropped when it owns no slot and has no calls left.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::SetOnce;

use super::deployment_context::DeploymentContext;
use super::node::Node;
use super::slot_map::{SlotMap, SlotRange};
use crate::base::sharded::lock_ignoring_poison;
use crate::settings::endpoint::Endpoint;
use crate::settings::redis::deployment::TopologySettings;

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
            discovered: SetOnce::new(),
        }
    }

    /// Ends the wait for the first discovery, successful or not.
    pub(crate) fn set_discovered(&self) {
        if !self.discovered.initialized() {
            let _already_set = self.discovered.set(());
        }
    }

    /// Nodes that own at least one slot.
    pub(crate) fn nodes(&self) -> Vec<Arc<Node>> {
        self.slot_map.load().nodes().to_vec()
    }

    /// Returns the cluster node at `endpoint`; connecting starts if the node is new.
    pub(crate) fn node(&self, endpoint: &Endpoint) -> Arc<Node> {
        let mut nodes = lock_ignoring_poison(&self.nodes);
        let start = || Node::start(endpoint.clone(), Arc::clone(&self.context));
        Arc::clone(nodes.entry(endpoint.clone()).or_insert_with(start))
    }

    /// Requests a discovery now instead of at the next interval.
    pub(crate) fn request_refresh(&self) {
        self.context.refresh_topology.notify_one();
    }

    /// Switches to the primary at `endpoint`, unless it is the current one.
    pub(crate) fn set_primary(&self, endpoint: &Endpoint) {
        let same = self.slot_map.load().nodes().iter().any(|node| node.endpoint() == endpoint);
        if !same {
            let setting = self.context.options.connect.setting;
            tracing::warn!(setting, primary = %endpoint, "switched to a new redis primary");
            let node = Node::start(endpoint.clone(), Arc::clone(&self.context));
            self.slot_map.store(Arc::new(SlotMap::Single(node)));
        }
    }

    /// Replaces the slot map of a cluster.
    pub(crate) fn set_slots(&self, ranges: &[SlotRange]) {
        let slot_map = SlotMap::cluster(ranges, |endpoint| self.node(endpoint));
        lock_ignoring_poison(&self.nodes)
            .retain(|endpoint, _| slot_map.nodes().iter().any(|node| node.endpoint() == endpoint));
        self.slot_map.store(Arc::new(slot_map));
    }

    /// Sets the owner of one slot after a redirection, until the next discovery.
    pub(crate) fn set_slot_owner(&self, slot: u16, node: &Arc<Node>) {
        self.slot_map.rcu(|slot_map| match slot_map.with_owner(slot, node) {
            Some(changed) => Arc::new(changed),
            None => Arc::clone(slot_map),
        });
    }
}
