//! Start of a deployment, and discovery of its topology: queries sentinels for their primary, or nodes of a cluster for
//! their slots.
//!
//! Discovery runs at intervals, and at once when a node fails, at most ten times a second.
//!
//! Decides: how the primary is found, so that copies (replicas) are never read; sentinels that disagree.
//! Decides: how often sentinels and the slot map are asked; an empty or unknown address (`?`) that a node announces.
//! Decides: slots without a usable node (`cluster-announce-hostname`): told, and not ready under `on_store_error: error`.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::connect::{self, ConnectOptions};
use super::connection::{Connection, error_kind, send_with_error_text};
use super::deployment::{Deployment, SlotRange, Topology, announced_endpoint};
use super::deployment_context::{DeploymentContext, DeploymentOptions};
use super::error::{RedisConnectError, RedisError};
use super::hash_slot::HASH_SLOTS;
use super::resp::{Reply, reply_integer, reply_text};
use crate::base::text::truncate_and_escape;
use crate::settings::address::Endpoint;
use crate::settings::redis::deployment::TopologySettings;
use crate::store::client::connect::{CallErrorKind, Connected};
use crate::telemetry::log_throttle::ErrorDedup;

/// Interval of sentinel queries.
const SENTINEL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of cluster queries.
const CLUSTER_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum time between two discoveries.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// Server that is queried for the topology: a sentinel, or a node of a cluster. Its own connection is opened when it is
/// needed.
#[derive(Debug)]
struct TopologySource {
    endpoint: Endpoint,
    options: Arc<ConnectOptions>,
    connected: Option<Connected<Connection>>,
}

impl Deployment {
    /// Starts to discover and connect to the servers of `settings`, and returns at once. Needs a tokio runtime.
    pub fn start(settings: TopologySettings, options: DeploymentOptions) -> Self {
        let context = DeploymentContext::new(options, matches!(settings, TopologySettings::Cluster(_)));
        let topology = Arc::new(Topology::new(settings, Arc::new(context)));
        let discovery = start_discovery(&topology);
        Self { topology, discovery }
    }
}

/// Starts to keep `topology` up to date; a single server needs no discovery.
fn start_discovery(topology: &Arc<Topology>) -> Option<AbortHandle> {
    let start = |sources: &[Endpoint], options: &ConnectOptions, interval| {
        let sources = sources.iter().map(|endpoint| TopologySource::new(endpoint.clone(), options)).collect();
        Some(tokio::spawn(discover_repeatedly(Arc::downgrade(topology), sources, interval)).abort_handle())
    };
    let options = &topology.context.options.connect;
    match &topology.settings {
        TopologySettings::Single(_) => {
            topology.set_first_discovery_done();
            None
        }
        TopologySettings::Sentinel { sentinels, credentials, .. } => {
            start(sentinels, &options.for_sentinels(credentials), SENTINEL_INTERVAL)
        }
        TopologySettings::Cluster(seeds) => start(seeds, options, CLUSTER_INTERVAL),
    }
}

async fn discover_repeatedly(topology: Weak<Topology>, mut sources: Vec<TopologySource>, interval: Duration) {
    let mut errors = ErrorDedup::default();
    loop {
        let Some(topology) = topology.upgrade() else { return };
        let outcome = refresh_topology(&topology, &mut sources).await;
        topology.set_first_discovery_done();
        let pause = match outcome {
            Ok(()) => {
                topology.misconfigured.store(None);
                topology.last_failure.store(None);
                errors.forget_errors();
                interval
            }
            Err(error) => {
                let misconfigured = error.kind.is_misconfiguration();
                let text = Arc::new(error.text.clone());
                topology.misconfigured.store(misconfigured.then(|| Arc::clone(&text)));
                topology.last_failure.store(Some(text));
                if errors.should_log(&error.text) {
                    let setting = topology.context.options.connect.setting;
                    match misconfigured {
                        true => tracing::error!(setting, "cannot find redis: {error}"),
                        false => tracing::warn!(setting, "cannot find redis: {error}"),
                    }
                }
                MIN_INTERVAL
            }
        };
        let _ = timeout(pause, topology.context.refresh_topology.notified()).await;
        sleep(MIN_INTERVAL).await;
    }
}

/// Queries the sources and updates the topology.
async fn refresh_topology(topology: &Topology, sources: &mut Vec<TopologySource>) -> Result<(), RedisConnectError> {
    if let TopologySettings::Sentinel { primary, .. } = &topology.settings {
        let current = topology.nodes().first().map(|node| node.endpoint().clone());
        topology.set_primary(&query_primary(sources, primary, current.as_ref()).await?);
    } else {
        let announced = query_slots(topology, sources).await?;
        topology.replace_slot_map(&announced.ranges);
        topology.record_unserved_slots(announced.describe_unserved_slots());
    }
    Ok(())
}

impl TopologySource {
    /// Creates a source without a connection.
    fn new(endpoint: Endpoint, options: &ConnectOptions) -> Self {
        let connect_timeout = options.connect_timeout.min(options.query_timeout);
        let options = Arc::new(ConnectOptions { connect_timeout, ..options.clone() });
        Self { endpoint, options, connected: None }
    }

    /// Sends a command and returns its reply.
    ///
    /// # Errors
    /// The server cannot be reached in time, or sends an error reply.
    async fn query(&mut self, words: &[&[u8]]) -> Result<Reply, RedisConnectError> {
        let connected = match self.connected.take() {
            Some(connected) => connected,
            None => {
                let outcome = connect::connect(&self.endpoint, &self.options).await;
                outcome.map_err(|error| self.query_error(error.kind, &error.text))?
            }
        };
        match timeout(self.options.query_timeout, send_with_error_text(&connected.connection, words)).await {
            Ok(Ok(reply)) => {
                self.connected = Some(connected);
                Ok(reply)
            }
            Ok(Err((error, text))) => Err(self.query_error(error_kind(&error), &text)),
            Err(_) => Err(self.query_error(RedisError::Timeout, "no answer")),
        }
    }

    /// Returns the error for a reply that cannot be parsed.
    fn invalid_reply(&self) -> RedisConnectError {
        self.query_error(RedisError::BadReply, "an invalid reply")
    }

    fn query_error(&self, kind: RedisError, text: &str) -> RedisConnectError {
        RedisConnectError { kind, text: format!("{}: {text}", self.endpoint) }
    }
}

/// Adds `hint` to the error of a command that the server does not know.
fn add_hint_if_unknown_command(error: RedisConnectError, hint: &str) -> RedisConnectError {
    match error.kind {
        // Errors of connecting name the setting to check.
        RedisError::Misconfigured if error.text.contains("ERR ") => {
            RedisConnectError::misconfigured(format!("{error}; {hint}"))
        }
        _ => error,
    }
}

/// Queries all sentinels at once, and returns the primary that most of them name.
///
/// A sentinel that was partitioned may not know of a failover yet. A tie keeps the `current` primary.
///
/// # Errors
/// No sentinel names a primary.
async fn query_primary(
    sentinels: &mut Vec<TopologySource>,
    name: &str,
    current: Option<&Endpoint>,
) -> Result<Endpoint, RedisConnectError> {
    let mut queries = JoinSet::new();
    for mut sentinel in sentinels.drain(..) {
        let name = name.to_owned();
        queries.spawn(async move {
            let reply = sentinel.query(&[b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name.as_bytes()]).await;
            (sentinel, reply)
        });
    }
    let mut votes: Vec<(Endpoint, usize)> = Vec::new();
    let mut last_error = RedisConnectError { kind: RedisError::Unreachable, text: "no sentinel answers".to_owned() };
    for (sentinel, reply) in queries.join_all().await {
        let reply =
            reply.map_err(|error| add_hint_if_unknown_command(error, "is it a sentinel, as REDIS_TYPE=sentinel says?"));
        match reply.and_then(|reply| parse_primary(&reply, &sentinel, name)) {
            Ok(endpoint) => match votes.iter_mut().find(|(voted, _)| *voted == endpoint) {
                Some((_, count)) => *count += 1,
                None => votes.push((endpoint, 1)),
            },
            Err(error) => last_error = error,
        }
        sentinels.push(sentinel);
    }
    votes
        .into_iter()
        .max_by_key(|(endpoint, count)| (*count, current == Some(endpoint)))
        .map(|(endpoint, _)| endpoint)
        .ok_or(last_error)
}

fn parse_primary(reply: &Reply, sentinel: &TopologySource, name: &str) -> Result<Endpoint, RedisConnectError> {
    match reply {
        Reply::Null => Err(RedisConnectError::misconfigured(format!(
            "the sentinel {} knows no master `{name}`; the first word of the URL is its name",
            sentinel.endpoint
        ))),
        Reply::Array(parts) => match &**parts {
            [host, port] => parse_announced_endpoint(host, port, &sentinel.endpoint),
            _ => None,
        }
        .ok_or_else(|| sentinel.invalid_reply()),
        _ => Err(sentinel.invalid_reply()),
    }
}

/// Returns the slots that the first available node reports, or else the first seed that answers. If its reply has
/// entries that cannot be used, the others are asked too, and the reply with most slots counts.
///
/// # Errors
/// No node reports any slots.
async fn query_slots(
    topology: &Topology,
    sources: &mut Vec<TopologySource>,
) -> Result<AnnouncedSlots, RedisConnectError> {
    // Known nodes become sources too, because the seeds may have left the cluster.
    let nodes = topology.nodes();
    for node in &nodes {
        if !sources.iter().any(|source| source.endpoint == *node.endpoint()) {
            sources.push(TopologySource::new(node.endpoint().clone(), &topology.context.options.connect));
        }
    }
    let available: Vec<&Endpoint> =
        nodes.iter().filter(|node| node.is_available()).map(|node| node.endpoint()).collect();
    // In turn, because a partitioned node reports outdated slots.
    sources.rotate_left(1);
    sources.sort_by_key(|source| !available.contains(&&source.endpoint));
    let mut last_error = RedisConnectError { kind: RedisError::Unreachable, text: "no node answers".to_owned() };
    let mut best: Option<AnnouncedSlots> = None;
    for source in sources.iter_mut() {
        match source.query(&[b"CLUSTER", b"SLOTS"]).await {
            Ok(reply) => match parse_slot_ranges(&reply, &source.endpoint) {
                Some(announced) if announced.ranges.is_empty() => {
                    let text = announced.unusable.unwrap_or_else(|| "no node owns a slot".to_owned());
                    last_error = RedisConnectError { kind: RedisError::SlotDown, text };
                }
                Some(announced) => {
                    let is_complete = announced.unusable.is_none();
                    if best.as_ref().is_none_or(|best| best.slot_count() < announced.slot_count()) {
                        best = Some(announced);
                    }
                    if is_complete {
                        break;
                    }
                }
                None => last_error = source.invalid_reply(),
            },
            Err(error) => {
                last_error =
                    add_hint_if_unknown_command(error, "is it a node of a cluster, as REDIS_TYPE=cluster says?");
            }
        }
    }
    let best = best.ok_or(last_error)?;
    retain_seeds_and_owners(sources, &topology.settings, &best.ranges);
    Ok(best)
}

/// Keeps the seeds and the owners of slots as sources.
fn retain_seeds_and_owners(sources: &mut Vec<TopologySource>, settings: &TopologySettings, ranges: &[SlotRange]) {
    let TopologySettings::Cluster(seeds) = settings else { return };
    sources
        .retain(|source| seeds.contains(&source.endpoint) || ranges.iter().any(|range| range.owner == source.endpoint));
}

/// Slots of a cluster and their owners, as one node announces them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnnouncedSlots {
    /// Slots with a usable owner, ordered by slot; each slot is in one range at most.
    pub ranges: Vec<SlotRange>,
    /// Why the first entry without a usable owner was left out; `None` without such an entry.
    pub unusable: Option<String>,
}

impl AnnouncedSlots {
    /// Number of slots with a usable owner.
    pub fn slot_count(&self) -> u16 {
        self.ranges.iter().map(|range| range.last - range.first + 1).sum()
    }

    /// Says how many slots no node serves, and why; `None` if all are served.
    fn describe_unserved_slots(&self) -> Option<String> {
        let unserved = HASH_SLOTS - self.slot_count();
        let why =
            || self.unusable.clone().unwrap_or_else(|| "they have no owner (CLUSTER ADDSLOTS assigns them)".to_owned());
        (unserved > 0)
            .then(|| format!("no node serves {unserved} of {HASH_SLOTS} hash slots of the cluster: {}", why()))
    }
}

/// Reads the reply to CLUSTER SLOTS, `[first, last, [host, port, id, [name, value, ...]], replicas...]` for each range.
///
/// An entry that cannot be used, such as one whose slots are in an earlier entry, concerns its own slots only. `None` if
/// the reply is no list. `responder` is the server that sent it.
pub fn parse_slot_ranges(reply: &Reply, responder: &Endpoint) -> Option<AnnouncedSlots> {
    let Reply::Array(entries) = reply else { return None };
    let mut announced = AnnouncedSlots::default();
    let mut leave_out = |why: String| {
        announced.unusable.get_or_insert_with(|| format!("{responder} announces {why}"));
    };
    let mut ranges: Vec<SlotRange> = Vec::new();
    for entry in entries {
        match parse_slot_range(entry, responder) {
            Ok(range) => ranges.push(range),
            Err(why) => leave_out(why),
        }
    }
    // Stable: of entries with equal slots, the first counts.
    ranges.sort_by_key(|range| range.first);
    for range in ranges {
        match announced.ranges.last() {
            Some(SlotRange { last, owner, .. }) if range.first <= *last => {
                if *owner != range.owner {
                    leave_out(format!("slot {} with two owners, {owner} and {}", range.first, range.owner));
                }
            }
            // Each slot is in one range at most, so there are no more owners than slots.
            Some(_) | None => announced.ranges.push(range),
        }
    }
    Some(announced)
}

/// Reads an entry.
///
/// # Errors
/// The entry cannot be used; the text says why, and what to do.
fn parse_slot_range(entry: &Reply, responder: &Endpoint) -> Result<SlotRange, String> {
    let slot = |reply: &Reply| u16::try_from(reply_integer(reply)?).ok().filter(|slot| *slot < HASH_SLOTS);
    let parts = if let Reply::Array(parts) = entry { &**parts } else { &[] };
    let [first, last, primary, ..] = parts else { return Err("an entry without slots or node".to_owned()) };
    let slots = slot(first).zip(slot(last)).filter(|(first, last)| first <= last);
    let (first, last) = slots.ok_or_else(|| "an entry whose slots are no numbers in order".to_owned())?;
    let node = if let Reply::Array(node) = primary { &**node } else { &[] };
    let [host, port, rest @ ..] = node else { return Err(format!("no node for slots {first} to {last}")) };
    // A node without a host name has its address beside it.
    let address = match (reply_text(host), rest) {
        (Some("?"), [_, Reply::Array(names), ..]) => {
            names.chunks_exact(2).find(|pair| reply_text(&pair[0]) == Some("ip")).map(|pair| &pair[1])
        }
        _ => None,
    };
    let host = address.filter(|address| reply_text(address).is_some_and(|text| !text.is_empty())).unwrap_or(host);
    match parse_announced_endpoint(host, port, responder) {
        Some(owner) => Ok(SlotRange { first, last, owner }),
        None => {
            let shown =
                |reply: &Reply| truncate_and_escape(reply_text(reply).unwrap_or_default(), MAX_SHOWN_HOST_CHARS);
            let port = reply_integer(port).unwrap_or_default();
            Err(format!(
                "the node of slots {first} to {last} as host `{}` and port {port} (set cluster-announce-ip, or \
                 cluster-announce-hostname, and cluster-announce-port of that node)",
                shown(host)
            ))
        }
    }
}

/// Maximum number of characters of an announced host in messages.
const MAX_SHOWN_HOST_CHARS: usize = 100;

/// Reads the `host` and `port` of a reply; `None` if they are invalid.
fn parse_announced_endpoint(host: &Reply, port: &Reply, responder: &Endpoint) -> Option<Endpoint> {
    let host = match host {
        Reply::Null => "",
        host => reply_text(host)?,
    };
    announced_endpoint(host, u16::try_from(reply_integer(port)?).ok()?, responder)
}
