//! Which server has a key: one, the master that sentinels name, or a cluster's owner of its slot.
//!
//! A map says who owns what and is replaced as a whole; charges read it and never wait for it. An explorer keeps it true:
//! it asks sentinels or nodes now and then, and at once when a node is in trouble. A cluster's redirection is
//! believed at once, for its slot. Nodes live as long as they own something.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::explore;
use super::failure::RedisError;
use super::node::{Ground, Node};
use super::readings::Condition;
use crate::settings::redis::{Endpoint, Topology};
use crate::store::guard::patiently;

/// The slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// The servers of a deployment, and what is where.
#[derive(Debug)]
pub(super) struct Route {
    chart: Arc<Chart>,
    explorer: Option<AbortHandle>,
}

impl Drop for Route {
    fn drop(&mut self) {
        if let Some(task) = &self.explorer {
            task.abort();
        }
    }
}

/// What is known of a deployment.
#[derive(Debug)]
pub(super) struct Chart {
    pub(super) topology: Topology,
    pub(super) ground: Arc<Ground>,
    owners: ArcSwap<Owners>,
    nodes: Mutex<HashMap<Endpoint, Arc<Node>>>,
    /// What somebody has to mend before the servers can be found.
    pub(super) misconfigured: ArcSwapOption<String>,
    /// Somebody has looked for the servers, found or not.
    pub(super) explored: Once,
}

/// Something that happens once, and can be waited for.
#[derive(Debug, Default)]
pub(super) struct Once {
    done: AtomicBool,
    rung: Notify,
}

impl Once {
    fn is_due(&self) -> bool {
        !self.done.load(Ordering::Acquire)
    }

    async fn wait(&self) {
        let rung = self.rung.notified();
        if self.is_due() {
            rung.await;
        }
    }

    /// It has happened.
    pub(super) fn set(&self) {
        if self.is_due() {
            self.done.store(true, Ordering::Release);
            self.rung.notify_waiters();
        }
    }
}

/// Who owns what.
#[derive(Debug)]
enum Owners {
    /// Nobody is known yet.
    Nobody,
    /// One server has all keys.
    One(Arc<Node>),
    /// The nodes of a cluster, and for each slot the place of its owner; [`NOBODY`]: none.
    Slots { nodes: Vec<Arc<Node>>, slots: Box<[u16]> },
}

const NOBODY: u16 = u16::MAX;

impl Route {
    /// Begins to find and connect to the servers of `topology`.
    pub(super) fn start(topology: Topology, ground: Arc<Ground>) -> Self {
        let single = match &topology {
            Topology::Single(endpoint) => Some(Node::start(endpoint.clone(), Arc::clone(&ground))),
            Topology::Sentinel { .. } | Topology::Cluster(_) => None,
        };
        let owners = single.map_or(Owners::Nobody, Owners::One);
        let chart = Arc::new(Chart {
            topology,
            ground,
            owners: ArcSwap::from_pointee(owners),
            nodes: Mutex::default(),
            misconfigured: ArcSwapOption::empty(),
            explored: Once::default(),
        });
        let explorer = explore::start(&chart);
        if explorer.is_none() {
            chart.explored.set();
        }
        Self { chart, explorer }
    }

    /// The server that has the keys of `slot`. The slot is only worked out if there is a choice. Waits only for the
    /// first map of all, not longer than `until`.
    pub(super) async fn owner(&self, slot: impl FnOnce() -> u16, until: Instant) -> Result<Arc<Node>, RedisError> {
        if self.chart.explored.is_due() {
            patiently(self.chart.explored.wait(), until).await.ok_or(RedisError::Timeout)?;
        }
        match &**self.chart.owners.load() {
            Owners::Nobody => Err(RedisError::Unreachable),
            Owners::One(node) => Ok(Arc::clone(node)),
            Owners::Slots { nodes, slots } => match slots[usize::from(slot())] {
                NOBODY => {
                    self.chart.ground.trouble.notify_one();
                    Err(RedisError::SlotDown)
                }
                place => Ok(Arc::clone(&nodes[usize::from(place)])),
            },
        }
    }

    /// The node that `asked` names in a redirection.
    pub(super) fn node_at(&self, address: &str, asked: &Node) -> Option<Arc<Node>> {
        matches!(self.chart.topology, Topology::Cluster(_)).then_some(())?;
        let endpoint = parse_address(address, asked.endpoint())?;
        Some(self.chart.node(&endpoint))
    }

    /// What is where wants looking into.
    pub(super) fn is_in_doubt(&self) {
        self.chart.ground.trouble.notify_one();
    }

    /// `slot` is said to be `node`'s now.
    pub(super) fn moved(&self, slot: u16, node: &Arc<Node>) {
        self.chart.moved(slot, node);
        self.chart.ground.trouble.notify_one();
    }

    /// Whether any server takes charges.
    pub(super) fn serves_some(&self) -> bool {
        self.chart.current().iter().any(|node| node.serves())
    }

    /// How its servers are.
    pub(super) fn condition(&self) -> Condition {
        let nodes = self.chart.current();
        Condition {
            connections: nodes.iter().map(|node| node.connections()).sum(),
            opened: self.chart.ground.opened.load(Ordering::Relaxed),
            nodes: nodes.iter().map(|node| (node.endpoint().to_string(), node.is_shut_off())).collect(),
        }
    }

    /// The nodes that own something.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        self.chart.current()
    }

    /// What somebody has to mend, if anything.
    pub(super) fn misconfigured(&self) -> Option<Arc<String>> {
        let of_chart = self.chart.misconfigured.load_full();
        of_chart.or_else(|| self.chart.current().iter().find_map(|node| node.misconfigured()))
    }
}

impl Chart {
    /// The nodes that own something.
    pub(super) fn current(&self) -> Vec<Arc<Node>> {
        match &**self.owners.load() {
            Owners::Nobody => Vec::new(),
            Owners::One(node) => vec![Arc::clone(node)],
            Owners::Slots { nodes, .. } => nodes.clone(),
        }
    }

    /// The node at `endpoint`, which begins to connect if it is new.
    fn node(&self, endpoint: &Endpoint) -> Arc<Node> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        let start = || Node::start(endpoint.clone(), Arc::clone(&self.ground));
        Arc::clone(nodes.entry(endpoint.clone()).or_insert_with(start))
    }

    /// The master is there.
    pub(super) fn master_is(&self, endpoint: &Endpoint) {
        let same = self.current().iter().any(|node| node.endpoint() == endpoint);
        if !same {
            tracing::warn!(setting = self.ground.entrance.setting, master = %endpoint, "the redis master is here");
            self.owners.store(Arc::new(Owners::One(Node::start(endpoint.clone(), Arc::clone(&self.ground)))));
        }
    }

    /// The cluster's slots are so divided: ranges, both ends included, with their owners.
    pub(super) fn slots_are(&self, ranges: &[(u16, u16, Endpoint)]) {
        let mut nodes: Vec<Arc<Node>> = Vec::new();
        let mut slots = vec![NOBODY; usize::from(SLOTS)].into_boxed_slice();
        for (first, last, endpoint) in ranges {
            let known = nodes.iter().position(|node| node.endpoint() == endpoint);
            let place = known.unwrap_or_else(|| {
                nodes.push(self.node(endpoint));
                nodes[nodes.len() - 1].owns(*first);
                nodes.len() - 1
            });
            let place = u16::try_from(place).expect("a cluster has at most as many nodes as slots");
            slots[usize::from(*first)..=usize::from(*last)].fill(place);
        }
        self.nodes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|endpoint, _| nodes.iter().any(|node| node.endpoint() == endpoint));
        self.owners.store(Arc::new(Owners::Slots { nodes, slots }));
    }

    fn moved(&self, slot: u16, node: &Arc<Node>) {
        self.owners.rcu(|owners| match &**owners {
            Owners::Slots { nodes, slots } => {
                let mut nodes = nodes.clone();
                let mut slots = slots.clone();
                let known = nodes.iter().position(|other| Arc::ptr_eq(other, node));
                let place = known.unwrap_or_else(|| {
                    nodes.push(Arc::clone(node));
                    nodes.len() - 1
                });
                slots[usize::from(slot)] = u16::try_from(place).unwrap_or(NOBODY);
                Arc::new(Owners::Slots { nodes, slots })
            }
            Owners::Nobody | Owners::One(_) => Arc::clone(owners),
        });
    }
}

/// `host:port` as a redirection has it; without a host, the one that was asked.
pub(super) fn parse_address(address: &str, asked: &Endpoint) -> Option<Endpoint> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = port.parse().ok().filter(|port| *port != 0)?;
    match (host, asked) {
        ("", Endpoint::Tcp { host, .. }) => Some(Endpoint::Tcp { host: host.clone(), port }),
        ("" | "?", _) => None,
        (host, _) => Some(Endpoint::Tcp { host: host.to_owned(), port }),
    }
}
