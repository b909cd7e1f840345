//! A Redis cluster for one test: three primaries with replicas, made by plain commands.
//!
//! Nodes are named by their index: 0 to 2 start as primaries, 3 to 5 as the replicas of 0 to 2. Failover is slow by
//! default, so that a busy machine does not trigger one; [`Cluster::set_fast_failover`] makes it fast, and
//! [`Cluster::fail_over`] kills a primary. Every wait ends when all running nodes agree.

use std::time::Duration;

use super::{KIT_USER, Options, Server, options};
use crate::wait_for;

/// The number of hash slots of any cluster.
pub const SLOTS: u16 = 16384;

const PRIMARIES: usize = 3;

/// The node timeout of a fast cluster.
const FAST: Duration = Duration::from_millis(500);
const SLOW: Duration = Duration::from_secs(15);

/// A running cluster; all of it is killed when dropped.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
}

/// One node's view of a node.
#[derive(Debug)]
struct NodeView {
    port: u16,
    flags: Vec<String>,
    linked: bool,
    /// First and last of each range it owns.
    slots: Vec<(u16, u16)>,
}

/// First slot, last slot and primary of each range, in order.
#[derive(PartialEq, Eq)]
struct SlotOwners(Vec<(u16, u16, usize)>);

impl Cluster {
    /// Starts a cluster without password, and waits until all slots are served.
    pub fn start() -> Self {
        Self::start_with(&options(), 1)
    }

    /// Starts a cluster with these node options and replicas per primary, and waits until all slots are served.
    ///
    /// With TLS, the nodes use it among themselves too.
    pub fn start_with(options: &Options, replicas: usize) -> Self {
        let slow = SLOW.as_millis().to_string();
        let mut options = options.clone().cluster().with(&[
            ("cluster-node-timeout", slow.as_str()),
            ("cluster-replica-validity-factor", "0"),
            ("cluster-allow-replica-migration", "no"),
        ]);
        if options.tls {
            options = options.with(&[("tls-cluster", "yes"), ("tls-replication", "yes")]);
        }
        let nodes: Vec<_> = (0..PRIMARIES * (1 + replicas)).map(|_| options.clone().launch()).collect();
        nodes.iter().for_each(Server::wait_until_ready);
        let cluster = Self { nodes };
        // A primary that saw no majority for a moment waits for the node timeout before it serves.
        cluster.set_fast_failover(true);
        cluster.assign_initial_slots();
        cluster.meet_all();
        cluster.assign_replicas();
        cluster.wait_until_healthy();
        cluster.set_fast_failover(false);
        cluster
    }

    fn assign_initial_slots(&self) {
        for (index, node) in self.nodes.iter().enumerate() {
            node.query::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]);
        }
        for (node, (first, last)) in self.nodes.iter().zip([(0, 5460), (5461, 10_922), (10_923, SLOTS - 1)]) {
            node.query::<()>(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
        }
    }

    /// Makes all nodes meet all others, which is faster than gossip.
    fn meet_all(&self) {
        for (index, node) in self.nodes.iter().enumerate() {
            for other in &self.nodes[index + 1..] {
                let (port, bus) = (other.announced_port().to_string(), other.bus_port().to_string());
                node.query::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
            }
        }
        wait_for("all nodes to know each other", || {
            let knows = |node| {
                let views = self.views(node);
                let connected = |view: &NodeView| view.linked && !view.flags.iter().any(|flag| flag == "handshake");
                views.len() == self.nodes.len() && views.iter().all(connected)
            };
            (0..self.nodes.len()).all(knows).then_some(())
        });
    }

    fn assign_replicas(&self) {
        for replica in PRIMARIES..self.nodes.len() {
            let id: String = self.nodes[replica % PRIMARIES].query(&["CLUSTER", "MYID"]);
            self.nodes[replica].query::<()>(&["CLUSTER", "REPLICATE", &id]);
        }
    }

    /// The server of a node.
    pub fn node(&self, node: usize) -> &Server {
        &self.nodes[node]
    }

    /// The addresses of all nodes, without TLS.
    pub fn addresses(&self) -> Vec<String> {
        self.nodes.iter().map(Server::address).collect()
    }

    /// The slot of a key, as the servers compute it.
    pub fn slot(&self, key: &str) -> u16 {
        self.first_up().query(&["CLUSTER", "KEYSLOT", key])
    }

    /// Primary of a slot; waits until all nodes agree on it.
    pub fn primary_of(&self, slot: u16) -> usize {
        wait_for("the nodes to agree on a slot's owner", || self.agreed_owners()?.of(slot))
    }

    /// Switches running nodes between fast failover, after half a second, and slow failover.
    ///
    /// A restarted node is slow.
    pub fn set_fast_failover(&self, fast: bool) {
        let timeout = if fast { FAST } else { SLOW }.as_millis().to_string();
        for node in self.up() {
            node.query::<()>(&["CONFIG", "SET", "cluster-node-timeout", &timeout]);
        }
    }

    /// Kills a primary, waits until its replica has taken over, and returns the replica.
    pub fn fail_over(&self, primary: usize) -> usize {
        self.set_fast_failover(true);
        let slot = self.a_slot_of(primary);
        self.nodes[primary].kill();
        let successor = self.wait_for_successor(primary, slot);
        self.set_fast_failover(false);
        successor
    }

    /// Waits until a slot has a different primary and all slots are served; returns the new primary.
    pub fn wait_for_successor(&self, primary: usize, slot: u16) -> usize {
        let successor = wait_for("another primary to take over", || {
            self.agreed_owners()?.of(slot).filter(|owner| *owner != primary)
        });
        self.wait_until_healthy();
        successor
    }

    /// Makes a replica the primary while both run (`CLUSTER FAILOVER`), and waits for completion.
    pub fn planned_failover(&self, primary: usize, replica: usize) {
        let slot = self.a_slot_of(primary);
        self.nodes[replica].query::<()>(&["CLUSTER", "FAILOVER"]);
        assert_eq!(self.wait_for_successor(primary, slot), replica);
    }

    /// Moves a slot with its keys, under load if there is any, and waits until all nodes agree.
    pub fn migrate_slot(&self, slot: u16, to: usize) {
        let from = self.begin_migration(slot, to);
        while self.migrate_keys(slot, from, to, 100) > 0 {}
        self.end_migration(slot, from, to);
    }

    /// Starts to migrate a slot; returns its primary, which then replies ASK for missing keys.
    pub fn begin_migration(&self, slot: u16, to: usize) -> usize {
        let from = self.primary_of(slot);
        let id = |node: usize| self.nodes[node].query::<String>(&["CLUSTER", "MYID"]);
        self.set_slot(to, slot, &["IMPORTING", &id(from)]);
        self.set_slot(from, slot, &["MIGRATING", &id(to)]);
        from
    }

    /// Moves up to `count` keys of a migrating slot; returns the number moved.
    pub fn migrate_keys(&self, slot: u16, from: usize, to: usize, max_keys: usize) -> usize {
        let (slot, max_keys) = (slot.to_string(), max_keys.to_string());
        let keys: Vec<String> = self.nodes[from].query(&["CLUSTER", "GETKEYSINSLOT", &slot, &max_keys]);
        let port = self.nodes[to].announced_port().to_string();
        let mut words = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "10000", "REPLACE"];
        words.extend(["AUTH2", KIT_USER, KIT_USER, "KEYS"]);
        words.extend(keys.iter().map(String::as_str));
        if !keys.is_empty() {
            self.nodes[from].query::<()>(&words);
        }
        keys.len()
    }

    /// Ends the migration of a slot whose old primary has no keys left, and waits until all nodes agree.
    pub fn end_migration(&self, slot: u16, from: usize, to: usize) {
        let id: String = self.nodes[to].query(&["CLUSTER", "MYID"]);
        // The new owner first: otherwise both might disown the slot for a while.
        for node in [to, from] {
            self.set_slot(node, slot, &["NODE", &id]);
        }
        wait_for("all nodes to know the slot's new primary", || (self.agreed_owners()?.of(slot)? == to).then_some(()));
    }

    fn set_slot(&self, node: usize, slot: u16, words: &[&str]) {
        let slot = slot.to_string();
        let words: Vec<_> = ["CLUSTER", "SETSLOT", &slot].into_iter().chain(words.iter().copied()).collect();
        self.nodes[node].query::<()>(&words);
    }

    /// Unassigns a slot of a cluster with `cluster-require-full-coverage no`, and waits until all nodes agree.
    pub fn unassign_slot(&self, slot: u16) {
        let owner = self.primary_of(slot);
        let text = slot.to_string();
        wait_for("all nodes to have lost a slot", || {
            for node in [&self.nodes[owner]].into_iter().chain(self.up()) {
                let _ = node.command(&["CLUSTER", "DELSLOTS", &text]);
            }
            self.agreed_owners().is_some_and(|owners| owners.of(slot).is_none()).then_some(())
        });
    }

    /// Assigns an unowned slot to a node, and waits until all nodes know.
    pub fn assign_slot(&self, slot: u16, owner: usize) {
        self.nodes[owner].query::<()>(&["CLUSTER", "ADDSLOTS", &slot.to_string()]);
        self.wait_until_healthy();
    }

    /// Waits until the nodes that run agree that all slots are served, and their primaries send each write to their
    /// replicas.
    pub fn wait_until_healthy(&self) {
        wait_for("the cluster to be whole", || {
            let owners = self.agreed_owners()?;
            let well = |node: &Server| {
                let primary = node.info("master_port").parse().ok().map(|port| &self.nodes[self.index_of(port)]);
                let in_step = primary.is_none_or(|primary| primary.is_up() && primary.streams_to(node));
                node.cluster_state() == "ok" && in_step
            };
            (owners.cover_all_slots() && self.up().all(well)).then_some(())
        });
    }

    /// Primary of each slot, if all running nodes agree.
    fn agreed_owners(&self) -> Option<SlotOwners> {
        let mut all = (0..self.nodes.len()).filter(|node| self.nodes[*node].is_up()).map(|node| self.owners(node));
        let first = all.next().expect("a node runs");
        all.all(|other| other == first).then_some(first)
    }

    /// Each slot's primary, as a node sees it.
    fn owners(&self, node: usize) -> SlotOwners {
        let mut ranges = Vec::new();
        for view in self.views(node) {
            ranges.extend(view.slots.iter().map(|(first, last)| (*first, *last, self.index_of(view.port))));
        }
        ranges.sort_unstable();
        SlotOwners(ranges)
    }

    fn a_slot_of(&self, primary: usize) -> u16 {
        let of_it = |owners: SlotOwners| owners.0.into_iter().find(|(_, _, owner)| *owner == primary);
        wait_for("the primary to have a slot", || self.agreed_owners().and_then(of_it)).0
    }

    fn views(&self, node: usize) -> Vec<NodeView> {
        let text: String = self.nodes[node].query(&["CLUSTER", "NODES"]);
        text.lines()
            .map(|line| NodeView::parse(line).unwrap_or_else(|| panic!("a line of CLUSTER NODES: {line}")))
            .collect()
    }

    fn up(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().filter(|node| node.is_up())
    }

    fn first_up(&self) -> &Server {
        self.up().next().expect("a node runs")
    }

    /// Node of a port, with TLS or without: nodes report the port of the client's protocol.
    fn index_of(&self, port: u16) -> usize {
        let is_its = |node: &Server| node.port() == port || node.announced_port() == port;
        self.nodes.iter().position(is_its).expect("the port is a node's")
    }
}

impl SlotOwners {
    fn of(&self, slot: u16) -> Option<usize> {
        let range = self.0.iter().find(|(first, last, _)| (*first..=*last).contains(&slot));
        range.map(|(_, _, owner)| *owner)
    }

    fn cover_all_slots(&self) -> bool {
        self.0.iter().map(|(first, last, _)| last - first + 1).sum::<u16>() == SLOTS
    }
}

impl NodeView {
    /// `ID IP:PORT@BUS FLAGS PRIMARY PING PONG EPOCH LINK SLOT...`, where a slot in brackets is one being moved.
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split(' ').collect();
        let port = words.get(1)?.split_once('@')?.0.rsplit_once(':')?.1.parse().ok()?;
        let flags = words.get(2)?.split(',').map(str::to_owned).collect();
        let linked = *words.get(7)? == "connected";
        let ranges = words[8..].iter().filter(|word| !word.starts_with('['));
        let range = |word: &&str| {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            Some((first.parse().ok()?, last.parse().ok()?))
        };
        Some(Self { port, flags, linked, slots: ranges.map(range).collect::<Option<_>>()? })
    }
}

impl Server {
    fn cluster_state(&self) -> String {
        let info: String = self.query(&["CLUSTER", "INFO"]);
        let state = info.lines().find_map(|line| line.strip_prefix("cluster_state:"));
        state.expect("a node knows the state of its cluster").to_owned()
    }
}
