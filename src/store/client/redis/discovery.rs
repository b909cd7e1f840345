//! Start of a deployment, and discovery of its topology: queries sentinels for their primary, or nodes of a cluster for
//! their slots.
//!
//! Discovery runs at intervals, and at once when a node fails, at most ten times a second.
//!
//! Decides: how the primary is found, so that copies (replicas) are never read; sentinels that disagree.
//! Decides: how often sentinels and the slot map are asked; an empty or unknown address that a node announces.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::connect::{self, ConnectOptions};
use super::connection::{Connection, error_kind, send_with_error_text};
use super::deployment::{Deployment, SlotRange, Topology};
use super::deployment_context::{DeploymentContext, DeploymentOptions};
use super::error::{RedisConnectError, RedisError};
use super::hash_slot::HASH_SLOTS;
use super::resp::{Reply, reply_integer, reply_text};
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
        topology.replace_slot_map(&query_slots(topology, sources).await?);
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

/// Returns the slots that the first available node reports, or else the first seed that answers.
///
/// # Errors
/// No node reports any slots.
async fn query_slots(
    topology: &Topology,
    sources: &mut Vec<TopologySource>,
) -> Result<Vec<SlotRange>, RedisConnectError> {
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
    for index in 0..sources.len() {
        let source = &mut sources[index];
        match source.query(&[b"CLUSTER", b"SLOTS"]).await {
            Ok(reply) => match parse_slot_ranges(&reply, &source.endpoint) {
                Some(ranges) if !ranges.is_empty() => {
                    retain_seeds_and_owners(sources, &topology.settings, &ranges);
                    return Ok(ranges);
                }
                Some(_) => {
                    last_error =
                        RedisConnectError { kind: RedisError::SlotDown, text: "no node owns a slot".to_owned() };
                }
                None => last_error = source.invalid_reply(),
            },
            Err(error) => {
                last_error =
                    add_hint_if_unknown_command(error, "is it a node of a cluster, as REDIS_TYPE=cluster says?");
            }
        }
    }
    Err(last_error)
}

/// Keeps the seeds and the owners of slots as sources.
fn retain_seeds_and_owners(sources: &mut Vec<TopologySource>, settings: &TopologySettings, ranges: &[SlotRange]) {
    let TopologySettings::Cluster(seeds) = settings else { return };
    sources
        .retain(|source| seeds.contains(&source.endpoint) || ranges.iter().any(|range| range.owner == source.endpoint));
}

/// Reads the reply to CLUSTER SLOTS, `[first, last, [host, port, ...], replicas...]` for each range, ordered by slot.
///
/// `None` if the reply is invalid, such as with a slot in two ranges. `responder` is the server that sent it.
pub fn parse_slot_ranges(reply: &Reply, responder: &Endpoint) -> Option<Vec<SlotRange>> {
    let Reply::Array(ranges) = reply else { return None };
    // Each slot is in one range at most, so there are no more owners than slots.
    let mut ranges: Vec<_> = ranges.iter().map(|range| parse_slot_range(range, responder)).collect::<Option<_>>()?;
    ranges.sort_by_key(|range| range.first);
    ranges.is_sorted_by(|range, next| range.last < next.first).then_some(ranges)
}

fn parse_slot_range(range: &Reply, responder: &Endpoint) -> Option<SlotRange> {
    let Reply::Array(parts) = range else { return None };
    let [first, last, Reply::Array(primary), ..] = &**parts else { return None };
    let [host, port, ..] = &**primary else { return None };
    let slot = |reply: &Reply| u16::try_from(reply_integer(reply)?).ok().filter(|slot| *slot < HASH_SLOTS);
    let (first, last) = (slot(first)?, slot(last)?);
    (first <= last).then_some(SlotRange { first, last, owner: parse_announced_endpoint(host, port, responder)? })
}

/// Reads the `host` and `port` of a reply; `None` if they are invalid.
///
/// An empty host stands for the host of `responder`.
pub(crate) fn parse_announced_endpoint(host: &Reply, port: &Reply, responder: &Endpoint) -> Option<Endpoint> {
    let port = u16::try_from(reply_integer(port)?).ok().filter(|port| *port != 0)?;
    let host = match (reply_text(host), responder) {
        (None | Some(""), Endpoint::Tcp { host, .. }) => host.clone(),
        (Some(host), _) if !host.is_empty() && host != "?" => host.to_owned(),
        _ => return None,
    };
    Some(Endpoint::Tcp { host, port })
}
