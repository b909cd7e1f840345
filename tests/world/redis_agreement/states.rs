//! States in which a server refuses or redirects commands: the same commands get the same errors.

use std::collections::BTreeSet;

use bytes::Bytes;
use kit::redis::cluster::Cluster;
use kit::redis::{REPLY_TIMEOUT, options};
use kit::wait_for;
use simulated_redis::cluster::{Address, SlotMap, SlotRange, slot_of_key};
use simulated_redis::refusals::Refusal;
use simulated_redis::server::{self, Kind, Role};

use super::server_pair::ServerPair;

/// Commands of all kinds, words separated by `|`.
const COMMANDS: &[&str] = &[
    "PING",
    "ECHO|text",
    "SELECT|0",
    "GET|string",
    "TYPE|string",
    "SET|string|value",
    "SET|string",
    "NOSUCH|word",
    "SETRANGE|string|0|x",
    "INCRBY|number|1",
    "PEXPIRE|string|100000",
    "DEL|none",
    "UNLINK|none",
    "HSET|hash|field|value",
    "HDEL|hash|none",
    "HSCAN|hash|0",
    "RPUSH|list|a",
    "LTRIM|list|0|1",
    "LSET|list|0|a",
    "ZADD|set|1|a",
    "ZREMRANGEBYSCORE|set|-inf|-inf",
    "XADD|stream|*|field|value",
    "XTRIM|stream|MAXLEN|5",
    "XREAD|STREAMS|none|0",
    "SCAN|0|MATCH|none",
    "EVAL|return 1|0",
    "EVAL|return KEYS[1]|1|string",
    "EVAL|return redis.call('GET', KEYS[1])|1|string",
    "EVAL|return redis.call('SET', KEYS[1], 'value')|1|string",
    "EVAL|return redis.pcall('SET', KEYS[1], 'value')|1|string",
    "EVAL|redis.call('PEXPIRE', KEYS[1], 100000) return redis.call('SET', KEYS[1], 'value')|1|string",
    "EVAL|redis.call('GET', KEYS[1]) return redis.call('SETRANGE', KEYS[1], 0, 'value')|1|string",
    "EVAL|return redis.call('UNLINK', KEYS[1])|1|none",
    "EVAL|return redis.call('PING')|0",
    "EVAL|return #redis.call('TIME')|0",
    "EVALSHA|e0e1f9fabfc9d4800c877a703b823ac0578ff8db|0",
    "EVALSHA|ffffffffffffffffffffffffffffffffffffffff|0",
    "SCRIPT|LOAD|return 1",
    "CLIENT|SETNAME|test",
    "CLIENT|GETNAME",
    "READONLY",
    "ASKING",
    "WAIT|0|1",
    "AUTH|wrong",
    "AUTH|default|wrong",
    "AUTH|other|wrong",
    "HELLO|4",
    "HELLO|x",
];

fn words(command: &str) -> Vec<Bytes> {
    command.split('|').map(|word| Bytes::copy_from_slice(word.as_bytes())).collect()
}

fn compare(pair: &mut ServerPair, commands: &[&str]) {
    for command in commands {
        pair.compare_replies(&words(command));
    }
}

fn configure(pair: &ServerPair, settings: &[(&str, &str)]) {
    for (name, value) in settings {
        pair.real().query::<()>(&["CONFIG", "SET", name, value]);
    }
}

#[test]
fn errors_of_full_memory_agree() {
    let mut pair = ServerPair::start();
    compare(&mut pair, COMMANDS);
    configure(&pair, &[("maxmemory", "1")]);
    pair.simulated.set_refusal(Some(Refusal::OutOfMemory));
    compare(&mut pair, COMMANDS);
    configure(&pair, &[("maxmemory", "0")]);
    pair.simulated.set_refusal(None);
    compare(&mut pair, COMMANDS);
}

#[test]
fn errors_of_missing_replicas_agree() {
    let mut pair = ServerPair::start();
    configure(&pair, &[("min-replicas-to-write", "1")]);
    pair.simulated.set_refusal(Some(Refusal::NoReplicas));
    compare(&mut pair, COMMANDS);
}

#[test]
fn errors_of_failed_snapshots_agree() {
    let mut pair = ServerPair::start();
    // The directory of the server is one that cannot be written to.
    configure(&pair, &[("dir", "/proc"), ("save", "3600 1")]);
    pair.real().query::<()>(&["BGSAVE"]);
    wait_for("the snapshot to fail", || (pair.real().info("rdb_last_bgsave_status") == "err").then_some(()));
    pair.simulated.set_refusal(Some(Refusal::SnapshotsFail));
    compare(&mut pair, COMMANDS);
}

#[test]
fn errors_of_a_replica_agree() {
    let mut pair = ServerPair::start();
    compare(&mut pair, COMMANDS);
    pair.real().query::<()>(&["REPLICAOF", "127.0.0.1", "1"]);
    let primary = Address { host: "127.0.0.1".to_owned(), port: 1 };
    pair.simulated.set_role(Role::Replica { primary, is_connected: false });
    compare(&mut pair, COMMANDS);
    configure(&pair, &[("replica-serve-stale-data", "no")]);
    pair.simulated.set_refusal(Some(Refusal::MasterDown));
    compare(&mut pair, COMMANDS);
}

#[test]
fn errors_of_a_busy_server_agree() {
    let mut pair = ServerPair::start();
    compare(&mut pair, COMMANDS);
    configure(&pair, &[("busy-reply-threshold", "1")]);
    let mut busy = pair.real().connect(REPLY_TIMEOUT).expect("the server accepts");
    busy.send(&["EVAL", "while true do end", "0"]).expect("the server reads");
    let is_busy = || pair.real().command(&["GET", "string"]).is_err().then_some(());
    wait_for("the server to be busy", is_busy);
    pair.simulated.set_refusal(Some(Refusal::Busy));
    compare(&mut pair, COMMANDS);
    pair.real().query::<()>(&["SCRIPT", "KILL"]);
}

#[test]
fn errors_of_a_loading_server_agree() {
    let mut pair = ServerPair::start();
    compare(&mut pair, COMMANDS);
    // The server answers between keys while it loads them, and loads a key in a millisecond.
    configure(&pair, &[("key-load-delay", "1000"), ("loading-process-events-interval-bytes", "1024")]);
    pair.real().query::<()>(&["DEBUG", "POPULATE", "20000"]);
    let mut loading = pair.real().connect(REPLY_TIMEOUT).expect("the server accepts");
    loading.send(&["DEBUG", "RELOAD"]).expect("the server reads");
    let is_loading = || pair.real().command(&["GET", "string"]).is_err().then_some(());
    wait_for("the server to load", is_loading);
    pair.simulated.set_refusal(Some(Refusal::Loading));
    compare(&mut pair, COMMANDS);
}

#[test]
fn logins_agree() {
    let mut pair = ServerPair::start();
    compare(&mut pair, &["PING"]);
    configure(&pair, &[("requirepass", "secret")]);
    pair.simulated.set_password(Some("secret".to_owned()));
    compare(&mut pair, &["PING", "AUTH|wrong"]);
    pair.reconnect();
    compare(&mut pair, COMMANDS);
    compare(
        &mut pair,
        &["HELLO|2|AUTH|default|wrong", "HELLO|2|WHAT", "AUTH|secret", "GET|string", "AUTH|wrong", "PING"],
    );
    pair.reconnect();
    compare(&mut pair, &["AUTH|default|secret", "GET|string"]);
}

/// Nodes of a cluster, each with its simulated twin.
struct ClusterPair {
    cluster: Cluster,
    pairs: Vec<ServerPair>,
    slots: Vec<SlotMap>,
}

impl ClusterPair {
    fn start() -> Self {
        let settings = [("cluster-require-full-coverage", "no")];
        let cluster = Cluster::start_with(&options().with(&settings), 0);
        let address = |node: usize| Address { host: "127.0.0.1".to_owned(), port: cluster.node(node).port() };
        let range = |first, last, node| SlotRange { first, last, owner: address(node) };
        let ranges = vec![range(0, 5460, 0), range(5461, 10_922, 1), range(10_923, 16_383, 2)];
        let slots: Vec<SlotMap> = (0..3).map(|node| SlotMap::new(address(node), ranges.clone())).collect();
        let server = || server::Server::new(server::Options { kind: Kind::Cluster, ..server::Options::default() });
        let pairs = (0..3).map(|node| ServerPair::with(cluster.node(node).port(), server())).collect();
        let mut nodes = Self { cluster, pairs, slots };
        nodes.update_slots();
        nodes
    }

    /// Tells the simulated nodes their slots.
    fn update_slots(&mut self) {
        for (pair, slots) in self.pairs.iter_mut().zip(&self.slots) {
            pair.simulated.set_slots(slots.clone());
        }
    }

    fn compare(&mut self, commands: &[&str]) {
        self.pairs.iter_mut().for_each(|pair| compare(pair, commands));
    }
}

/// Commands on keys of one slot, `{a}`, and of another one, `{b}`.
const CLUSTER_COMMANDS: &[&str] = &[
    "GET|{a}1",
    "ASKING",
    "GET|{a}1",
    "GET|{a}1",
    "DEL|{a}1|{a}2",
    "ASKING",
    "DEL|{a}none|{a}2",
    "DEL|{a}1|{b}1",
    "DEL|{b}1|{a}1",
    "SET|{a}3|value",
    "ASKING",
    "SET|{a}3|value",
    "ASKING",
    "EXISTS|{a}3|{a}none",
    "ASKING",
    "EXISTS|{a}3",
    "GET|{}{a}",
    "GET|}{a}{b}",
    "EVAL|return KEYS[1]|1|{a}1",
    "EVAL|return KEYS[1]|2|{a}1|{b}1",
    "EVAL|return redis.call('GET', KEYS[1])|1|{a}1",
    "EVAL|return redis.call('GET', ARGV[1])|1|{a}1|{a}none",
    "EVAL|return redis.pcall('GET', ARGV[1])|1|{a}1|{b}1",
    "EVAL|return 1|0",
    "XREAD|STREAMS|{b}none|{b}other|0|0",
    "CLUSTER|KEYSLOT|{a}b",
    "SCAN|0",
    "PING",
    "SELECT|0",
    "SELECT|1",
    "READONLY",
    "GET|{b}1",
    "READWRITE",
    "CLUSTER|KEYSLOT",
    "CLUSTER|SLOTS|x",
];

#[test]
fn redirections_of_a_cluster_agree() {
    let mut nodes = ClusterPair::start();
    let (slot_of_a, slot_of_b) = (slot_of_key(b"{a}"), slot_of_key(b"{b}"));
    let (owner, importer) = (nodes.cluster.primary_of(slot_of_a), nodes.cluster.primary_of(slot_of_b));
    assert_ne!(owner, importer, "the slots have different owners");
    nodes.compare(&["SET|{a}1|value", "SET|{a}2|value", "SET|{b}1|value"]);
    nodes.compare(CLUSTER_COMMANDS);

    nodes.compare(&["SET|{a}1|value"]);
    nodes.cluster.begin_migration(slot_of_a, importer);
    let to = nodes.slots[importer].own.clone();
    nodes.slots[owner].migrating.insert(slot_of_a, to);
    nodes.slots[importer].importing = BTreeSet::from([slot_of_a]);
    nodes.update_slots();
    nodes.compare(CLUSTER_COMMANDS);
    nodes.compare(&["ASKING", "DEL|{a}3", "DEL|{a}1"]);
    nodes.cluster.end_migration(slot_of_a, owner, importer);

    nodes.cluster.unassign_slot(slot_of_a);
    for slots in &mut nodes.slots {
        (slots.migrating, slots.importing) = Default::default();
        let at = slots.ranges.iter().position(|range| (range.first..=range.last).contains(&slot_of_a));
        let range = slots.ranges.remove(at.expect("the slot has an owner"));
        slots.ranges.push(SlotRange { last: slot_of_a - 1, ..range.clone() });
        slots.ranges.push(SlotRange { first: slot_of_a + 1, ..range });
    }
    nodes.update_slots();
    nodes.compare(CLUSTER_COMMANDS);
}

#[test]
fn errors_of_a_cluster_that_is_down_agree() {
    let server = options().cluster().start();
    let mut slots = SlotMap::new(Address { host: "127.0.0.1".to_owned(), port: server.port() }, Vec::new());
    let options = server::Options { kind: Kind::Cluster, ..server::Options::default() };
    let mut pair = ServerPair::with(server.port(), server::Server::new(options));
    pair.simulated.set_refusal(Some(Refusal::ClusterDown));
    for ranges in [[(0, 100); 0].as_slice(), &[(0, 16_382)]] {
        for (first, last) in ranges {
            server.query::<()>(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
            slots.ranges.push(SlotRange { first: *first, last: *last, owner: slots.own.clone() });
        }
        pair.simulated.set_slots(slots.clone());
        compare(&mut pair, COMMANDS);
        compare(&mut pair, CLUSTER_COMMANDS);
    }
}
