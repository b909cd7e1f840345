//! Owners of keys: one server, or the nodes of a cluster by slot, as servers announce them.

use std::sync::Arc;

use super::hash_slot::HASH_SLOTS;
use super::node::Node;
use super::reply::{Reply, integer, text};
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

/// Reads the reply to CLUSTER SLOTS, `[first, last, [host, port, ...], replicas...]` for each range, ordered by slot.
///
/// `None` if the reply is invalid, such as with a slot in two ranges. `responder` is the server that sent it.
pub fn slot_ranges(reply: &Reply, responder: &Endpoint) -> Option<Vec<SlotRange>> {
    let Reply::Array(ranges) = reply else { return None };
    // Each slot is in one range at most, so there are no more owners than slots.
    let mut ranges: Vec<_> = ranges.iter().map(|range| slot_range(range, responder)).collect::<Option<_>>()?;
    ranges.sort_by_key(|range| range.first);
    ranges.is_sorted_by(|range, next| range.last < next.first).then_some(ranges)
}

fn slot_range(range: &Reply, responder: &Endpoint) -> Option<SlotRange> {
    let Reply::Array(parts) = range else { return None };
    let [first, last, Reply::Array(primary), ..] = &**parts else { return None };
    let [host, port, ..] = &**primary else { return None };
    let slot = |reply: &Reply| u16::try_from(integer(reply)?).ok().filter(|slot| *slot < HASH_SLOTS);
    let (first, last) = (slot(first)?, slot(last)?);
    (first <= last).then_some(SlotRange { first, last, owner: announced_endpoint(host, port, responder)? })
}

/// Reads the `host` and `port` of a reply; `None` if they are invalid.
///
/// An empty host stands for the host of `responder`.
pub(crate) fn announced_endpoint(host: &Reply, port: &Reply, responder: &Endpoint) -> Option<Endpoint> {
    let port = u16::try_from(integer(port)?).ok().filter(|port| *port != 0)?;
    let host = match (text(host), responder) {
        (None | Some(""), Endpoint::Tcp { host, .. }) => host.clone(),
        (Some(host), _) if !host.is_empty() && host != "?" => host.to_owned(),
        _ => return None,
    };
    Some(Endpoint::Tcp { host, port })
}

/// Reads the `host:port` of a redirection; an empty host stands for the host of `responder`. `None` if it is invalid.
pub(crate) fn redirect_endpoint(address: &str, responder: &Endpoint) -> Option<Endpoint> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = port.parse().ok().filter(|port| *port != 0)?;
    match (host, responder) {
        ("", Endpoint::Tcp { host, .. }) => Some(Endpoint::Tcp { host: host.clone(), port }),
        ("" | "?", _) => None,
        (host, _) => Some(Endpoint::Tcp { host: host.to_owned(), port }),
    }
}
