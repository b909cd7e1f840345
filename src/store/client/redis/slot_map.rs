//! Owners of keys: one server, or the nodes of a cluster by slot.

use std::sync::Arc;

use super::hash_slot::HASH_SLOTS;
use super::node::Node;
use super::slot_range::SlotRange;
use crate::settings::endpoint::Endpoint;

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
    pub(crate) fn cluster(ranges: &[SlotRange], mut node: impl FnMut(&Endpoint) -> Arc<Node>) -> Self {
        let mut nodes: Vec<Arc<Node>> = Vec::new();
        let mut owners = vec![NO_OWNER; usize::from(HASH_SLOTS)].into_boxed_slice();
        for SlotRange { first, last, owner } in ranges {
            let known = nodes.iter().position(|node| node.endpoint() == owner);
            let index = known.unwrap_or_else(|| {
                nodes.push(node(owner));
                nodes[nodes.len() - 1].set_slot(*first);
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
