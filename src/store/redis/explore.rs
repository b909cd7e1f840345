//! Keeps the map of a deployment true: asks the sentinels for their master, or nodes for their cluster's slots.
//!
//! It asks at intervals, and at once when a node is in trouble, ten times a second at most. Sentinels are asked all at
//! once and the most named master is believed: one that was cut off may not know of a failover yet. Of a cluster any
//! node that serves will do; what it does not know yet, redirections tell.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::complaint::Complaint;
use super::connect::{self, Connection, DialError, Entrance};
use super::failure::{RedisError, Refused};
use super::reply::{Range, Reply, endpoint, ranges};
use super::route::Chart;
use super::send::send_and_tell;
use crate::settings::redis::{Endpoint, Topology};

/// How often sentinels are asked when all is well.
const SENTINELS_ASKED: Duration = Duration::from_secs(1);
/// How often a cluster is asked when all is well.
const CLUSTER_ASKED: Duration = Duration::from_secs(5);
/// The least time between two questions.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest that one answer is waited for.
const PATIENCE: Duration = Duration::from_millis(400);

/// Begins to keep `chart` true; a single server needs no explorer.
pub(super) fn start(chart: &Arc<Chart>) -> Option<AbortHandle> {
    let weak = Arc::downgrade(chart);
    let explorer = |witnesses: &[Endpoint], entrance: Entrance, interval| {
        let witnesses = witnesses.iter().map(|endpoint| Witness::new(endpoint.clone(), &entrance)).collect();
        tokio::spawn(explore(weak, witnesses, interval)).abort_handle()
    };
    let entrance = (*chart.ground.entrance).clone();
    match &chart.topology {
        Topology::Single(_) => None,
        Topology::Sentinel { sentinels, credentials, .. } => {
            let entrance =
                Entrance { of_sentinels: true, credentials: credentials.clone(), database: None, ..entrance };
            Some(explorer(sentinels, entrance, SENTINELS_ASKED))
        }
        Topology::Cluster(seeds) => Some(explorer(seeds, entrance, CLUSTER_ASKED)),
    }
}

async fn explore(chart: Weak<Chart>, mut witnesses: Vec<Witness>, interval: Duration) {
    let mut complaint = Complaint::default();
    loop {
        let Some(chart) = chart.upgrade() else { return };
        let outcome = match &chart.topology {
            Topology::Sentinel { master, .. } => {
                let current = chart.current().first().map(|node| node.endpoint().clone());
                let named = ask_sentinels(&mut witnesses, master, current.as_ref()).await;
                named.map(|endpoint| chart.master_is(&endpoint))
            }
            _ => ask_cluster(&chart, &mut witnesses).await.map(|ranges| chart.slots_are(&ranges)),
        };
        chart.explored.set();
        let pause = match outcome {
            Ok(()) => {
                chart.misconfigured.store(None);
                complaint.end();
                interval
            }
            Err(error) => {
                let misconfigured = error.kind.is_misconfiguration();
                chart.misconfigured.store(misconfigured.then(|| Arc::new(error.text.clone())));
                if complaint.is_due(&error.text) {
                    tracing::error!(setting = chart.ground.entrance.setting, "cannot find redis: {error}");
                }
                PAUSE
            }
        };
        let _ = timeout(pause, chart.ground.trouble.notified()).await;
        sleep(PAUSE).await;
    }
}

/// Somebody to ask, over a connection of its own that is opened when it is needed.
#[derive(Debug)]
struct Witness {
    endpoint: Endpoint,
    entrance: Arc<Entrance>,
    connection: Option<Connection>,
}

impl Witness {
    fn new(endpoint: Endpoint, entrance: &Entrance) -> Self {
        let entrance = Entrance { dial_timeout: entrance.dial_timeout.min(PATIENCE), ..entrance.clone() };
        Self { endpoint, entrance: Arc::new(entrance), connection: None }
    }

    async fn ask(&mut self, words: &[&[u8]]) -> Result<Reply, DialError> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                let dialled = connect::dial(&self.endpoint, &self.entrance).await;
                dialled.map_err(|error| DialError { text: format!("{}: {error}", self.endpoint), ..error })?
            }
        };
        match timeout(PATIENCE, send_and_tell(&connection.line, words)).await {
            Ok(Ok(answer)) => {
                self.connection = Some(connection);
                Ok(answer)
            }
            Ok(Err((refused, text))) => {
                let kind = match refused {
                    Refused::Failed(kind) => kind,
                    Refused::NoScript | Refused::Moved(_) | Refused::ChargeRequest(_) => RedisError::BadReply,
                };
                Err(DialError { kind, text: format!("{}: {text}", self.endpoint) })
            }
            Err(_) => Err(DialError { kind: RedisError::Timeout, text: format!("{}: no answer", self.endpoint) }),
        }
    }
}

/// The master that most sentinels name.
async fn ask_sentinels(
    witnesses: &mut Vec<Witness>,
    master: &str,
    current: Option<&Endpoint>,
) -> Result<Endpoint, DialError> {
    let mut asked = JoinSet::new();
    for mut witness in witnesses.drain(..) {
        let master = master.to_owned();
        asked.spawn(async move {
            let answer = witness.ask(&[b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", master.as_bytes()]).await;
            (witness, answer)
        });
    }
    let mut votes: Vec<(Endpoint, usize)> = Vec::new();
    let mut trouble = DialError { kind: RedisError::Unreachable, text: "no sentinel answers".to_owned() };
    for (witness, answer) in asked.join_all().await {
        match answer.map_err(sentinel_trouble).and_then(|answer| named_master(&answer, &witness, master)) {
            Ok(endpoint) => match votes.iter_mut().find(|(voted, _)| *voted == endpoint) {
                Some((_, count)) => *count += 1,
                None => votes.push((endpoint, 1)),
            },
            Err(error) => trouble = error,
        }
        witnesses.push(witness);
    }
    // On a tie nothing changes.
    votes
        .into_iter()
        .max_by_key(|(endpoint, count)| (*count, current == Some(endpoint)))
        .map(|(endpoint, _)| endpoint)
        .ok_or(trouble)
}

fn sentinel_trouble(error: DialError) -> DialError {
    match error.kind {
        // A failed dial has said what to look at.
        RedisError::Misconfigured if error.text.contains("ERR ") => {
            DialError::misconfigured(format!("{error}; is it a sentinel, as REDIS_TYPE=sentinel says?"))
        }
        _ => error,
    }
}

fn named_master(answer: &Reply, witness: &Witness, master: &str) -> Result<Endpoint, DialError> {
    match answer {
        Reply::Null => Err(DialError::misconfigured(format!(
            "the sentinel {} knows no master `{master}`; the first word of the URL is its name",
            witness.endpoint
        ))),
        Reply::Array(parts) => match &**parts {
            [host, port] => endpoint(host, port, &witness.endpoint),
            _ => None,
        }
        .ok_or_else(|| nonsense(witness)),
        _ => Err(nonsense(witness)),
    }
}

fn nonsense(witness: &Witness) -> DialError {
    DialError { kind: RedisError::BadReply, text: format!("{}: a reply that makes no sense", witness.endpoint) }
}

/// The slots as the first node sees them that serves, or the first seed that answers.
async fn ask_cluster(chart: &Chart, seeds: &mut Vec<Witness>) -> Result<Vec<Range>, DialError> {
    // Nodes that have not been asked yet become witnesses too: seeds may be long gone.
    for node in chart.current() {
        if !seeds.iter().any(|witness| witness.endpoint == *node.endpoint()) {
            seeds.push(Witness::new(node.endpoint().clone(), &chart.ground.entrance));
        }
    }
    let serving: Vec<Endpoint> =
        chart.current().iter().filter(|node| node.serves()).map(|node| node.endpoint().clone()).collect();
    // In turns: one that is cut off from the others believes what it always did.
    seeds.rotate_left(1);
    seeds.sort_by_key(|witness| !serving.contains(&witness.endpoint));
    let mut trouble = DialError { kind: RedisError::Unreachable, text: "no node answers".to_owned() };
    for place in 0..seeds.len() {
        match seeds[place].ask(&[b"CLUSTER", b"SLOTS"]).await {
            Ok(answer) => match ranges(&answer, &seeds[place].endpoint) {
                Some(ranges) if !ranges.is_empty() => {
                    forget_gone(seeds, &chart.topology, &ranges);
                    return Ok(ranges);
                }
                Some(_) => trouble = DialError { kind: RedisError::SlotDown, text: "no node owns a slot".to_owned() },
                None => trouble = nonsense(&seeds[place]),
            },
            Err(error) => trouble = cluster_trouble(error),
        }
    }
    Err(trouble)
}

/// Keeps as witnesses the seeds and the owners of slots.
fn forget_gone(witnesses: &mut Vec<Witness>, topology: &Topology, ranges: &[Range]) {
    let Topology::Cluster(seeds) = topology else { return };
    witnesses.retain(|witness| {
        seeds.contains(&witness.endpoint) || ranges.iter().any(|(_, _, owner)| *owner == witness.endpoint)
    });
}

fn cluster_trouble(error: DialError) -> DialError {
    match error.kind {
        RedisError::Misconfigured if error.text.contains("ERR ") => {
            DialError::misconfigured(format!("{error}; is it a node of a cluster, as REDIS_TYPE=cluster says?"))
        }
        _ => error,
    }
}
