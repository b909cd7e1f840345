//! Keeps the map of a deployment true: asks the sentinels for their master, or nodes for their cluster's slots.
//!
//! It asks at intervals, and at once when a node is in trouble, ten times a second at most. Sentinels are asked all at
//! once and the most named master is believed: one that was cut off may not know of a failover yet. Of a cluster any
//! node that serves will do; what it does not know yet, redirections tell.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::connect::{self, ConnectError, ConnectOptions, Connected};
use super::error::{RedisError, ReplyError};
use super::error_dedup::ErrorDedup;
use super::node_address::announced_endpoint;
use super::reply::Reply;
use super::send::send_with_error_text;
use super::slot_range::{SlotRange, slot_ranges};
use super::topology::Topology;
use crate::settings::redis::{Endpoint, TopologySettings};

/// How often sentinels are asked when all is well.
const SENTINELS_ASKED: Duration = Duration::from_secs(1);
/// How often a cluster is asked when all is well.
const CLUSTER_ASKED: Duration = Duration::from_secs(5);
/// The least time between two questions.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest that one answer is waited for.
const PATIENCE: Duration = Duration::from_millis(400);

/// Begins to keep `topology` true; a single server needs no explorer.
pub(crate) fn start(topology: &Arc<Topology>) -> Option<AbortHandle> {
    let weak = Arc::downgrade(topology);
    let explorer = |sources: &[Endpoint], options: ConnectOptions, interval| {
        let sources = sources.iter().map(|endpoint| TopologySource::new(endpoint.clone(), &options)).collect();
        tokio::spawn(explore(weak, sources, interval)).abort_handle()
    };
    let options = (*topology.context.connect).clone();
    match &topology.settings {
        TopologySettings::Single(_) => {
            let _was_set = topology.discovered.set(());
            None
        }
        TopologySettings::Sentinel { sentinels, credentials, .. } => {
            let options =
                ConnectOptions { of_sentinels: true, credentials: credentials.clone(), database: None, ..options };
            Some(explorer(sentinels, options, SENTINELS_ASKED))
        }
        TopologySettings::Cluster(seeds) => Some(explorer(seeds, options, CLUSTER_ASKED)),
    }
}

async fn explore(topology: Weak<Topology>, mut sources: Vec<TopologySource>, interval: Duration) {
    let mut complaint = ErrorDedup::default();
    loop {
        let Some(topology) = topology.upgrade() else { return };
        let outcome = match &topology.settings {
            TopologySettings::Sentinel { master, .. } => {
                let current = topology.nodes().first().map(|node| node.endpoint().clone());
                let named = ask_sentinels(&mut sources, master, current.as_ref()).await;
                named.map(|endpoint| topology.set_primary(&endpoint))
            }
            _ => ask_cluster(&topology, &mut sources).await.map(|ranges| topology.set_slots(&ranges)),
        };
        let _was_set = topology.discovered.set(());
        let pause = match outcome {
            Ok(()) => {
                topology.misconfigured.store(None);
                complaint.end();
                interval
            }
            Err(error) => {
                let misconfigured = error.kind.is_misconfiguration();
                topology.misconfigured.store(misconfigured.then(|| Arc::new(error.text.clone())));
                if complaint.should_log(&error.text) {
                    tracing::error!(setting = topology.context.connect.setting, "cannot find redis: {error}");
                }
                PAUSE
            }
        };
        let _ = timeout(pause, topology.context.refresh_topology.notified()).await;
        sleep(PAUSE).await;
    }
}

/// Somebody to ask, over a connection of its own that is opened when it is needed.
#[derive(Debug)]
struct TopologySource {
    endpoint: Endpoint,
    options: Arc<ConnectOptions>,
    connection: Option<Connected>,
}

impl TopologySource {
    fn new(endpoint: Endpoint, options: &ConnectOptions) -> Self {
        let options = ConnectOptions { dial_timeout: options.dial_timeout.min(PATIENCE), ..options.clone() };
        Self { endpoint, options: Arc::new(options), connection: None }
    }

    async fn ask(&mut self, words: &[&[u8]]) -> Result<Reply, ConnectError> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                let dialled = connect::dial(&self.endpoint, &self.options).await;
                dialled.map_err(|error| ConnectError { text: format!("{}: {error}", self.endpoint), ..error })?
            }
        };
        match timeout(PATIENCE, send_with_error_text(&connection.connection, words)).await {
            Ok(Ok(answer)) => {
                self.connection = Some(connection);
                Ok(answer)
            }
            Ok(Err((refused, text))) => {
                let kind = match refused {
                    ReplyError::Failed(kind) => kind,
                    ReplyError::NoScript | ReplyError::Moved(_) | ReplyError::Ask(_) => RedisError::BadReply,
                };
                Err(ConnectError { kind, text: format!("{}: {text}", self.endpoint) })
            }
            Err(_) => Err(ConnectError { kind: RedisError::Timeout, text: format!("{}: no answer", self.endpoint) }),
        }
    }
}

/// The master that most sentinels name.
async fn ask_sentinels(
    sources: &mut Vec<TopologySource>,
    master: &str,
    current: Option<&Endpoint>,
) -> Result<Endpoint, ConnectError> {
    let mut asked = JoinSet::new();
    for mut source in sources.drain(..) {
        let master = master.to_owned();
        asked.spawn(async move {
            let answer = source.ask(&[b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", master.as_bytes()]).await;
            (source, answer)
        });
    }
    let mut votes: Vec<(Endpoint, usize)> = Vec::new();
    let mut trouble = ConnectError { kind: RedisError::Unreachable, text: "no sentinel answers".to_owned() };
    for (source, answer) in asked.join_all().await {
        match answer.map_err(sentinel_trouble).and_then(|answer| named_master(&answer, &source, master)) {
            Ok(endpoint) => match votes.iter_mut().find(|(voted, _)| *voted == endpoint) {
                Some((_, count)) => *count += 1,
                None => votes.push((endpoint, 1)),
            },
            Err(error) => trouble = error,
        }
        sources.push(source);
    }
    // On a tie nothing changes.
    votes
        .into_iter()
        .max_by_key(|(endpoint, count)| (*count, current == Some(endpoint)))
        .map(|(endpoint, _)| endpoint)
        .ok_or(trouble)
}

fn sentinel_trouble(error: ConnectError) -> ConnectError {
    match error.kind {
        // A failed dial has said what to look at.
        RedisError::Misconfigured if error.text.contains("ERR ") => {
            ConnectError::misconfigured(format!("{error}; is it a sentinel, as REDIS_TYPE=sentinel says?"))
        }
        _ => error,
    }
}

fn named_master(answer: &Reply, source: &TopologySource, master: &str) -> Result<Endpoint, ConnectError> {
    match answer {
        Reply::Null => Err(ConnectError::misconfigured(format!(
            "the sentinel {} knows no master `{master}`; the first word of the URL is its name",
            source.endpoint
        ))),
        Reply::Array(parts) => match &**parts {
            [host, port] => announced_endpoint(host, port, &source.endpoint),
            _ => None,
        }
        .ok_or_else(|| nonsense(source)),
        _ => Err(nonsense(source)),
    }
}

fn nonsense(source: &TopologySource) -> ConnectError {
    ConnectError { kind: RedisError::BadReply, text: format!("{}: a reply that makes no sense", source.endpoint) }
}

/// The slots as the first node sees them that serves, or the first seed that answers.
async fn ask_cluster(topology: &Topology, seeds: &mut Vec<TopologySource>) -> Result<Vec<SlotRange>, ConnectError> {
    // Nodes that have not been asked yet become sources too: seeds may be long gone.
    for node in topology.nodes() {
        if !seeds.iter().any(|source| source.endpoint == *node.endpoint()) {
            seeds.push(TopologySource::new(node.endpoint().clone(), &topology.context.connect));
        }
    }
    let serving: Vec<Endpoint> =
        topology.nodes().iter().filter(|node| node.is_available()).map(|node| node.endpoint().clone()).collect();
    // In turns: one that is cut off from the others believes what it always did.
    seeds.rotate_left(1);
    seeds.sort_by_key(|source| !serving.contains(&source.endpoint));
    let mut trouble = ConnectError { kind: RedisError::Unreachable, text: "no node answers".to_owned() };
    for place in 0..seeds.len() {
        match seeds[place].ask(&[b"CLUSTER", b"SLOTS"]).await {
            Ok(answer) => match slot_ranges(&answer, &seeds[place].endpoint) {
                Some(ranges) if !ranges.is_empty() => {
                    forget_gone(seeds, &topology.settings, &ranges);
                    return Ok(ranges);
                }
                Some(_) => {
                    trouble = ConnectError { kind: RedisError::SlotDown, text: "no node owns a slot".to_owned() }
                }
                None => trouble = nonsense(&seeds[place]),
            },
            Err(error) => trouble = cluster_trouble(error),
        }
    }
    Err(trouble)
}

/// Keeps as sources the seeds and the owners of slots.
fn forget_gone(sources: &mut Vec<TopologySource>, topology: &TopologySettings, ranges: &[SlotRange]) {
    let TopologySettings::Cluster(seeds) = topology else { return };
    sources
        .retain(|source| seeds.contains(&source.endpoint) || ranges.iter().any(|range| range.owner == source.endpoint));
}

fn cluster_trouble(error: ConnectError) -> ConnectError {
    match error.kind {
        RedisError::Misconfigured if error.text.contains("ERR ") => {
            ConnectError::misconfigured(format!("{error}; is it a node of a cluster, as REDIS_TYPE=cluster says?"))
        }
        _ => error,
    }
}
