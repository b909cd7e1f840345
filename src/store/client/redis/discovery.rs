//! Topology discovery: queries sentinels for their primary, or nodes of a cluster for their slots.
//!
//! Discovery runs at intervals, and at once when a node fails, at most ten times a second.

mod cluster;
mod sentinel;
mod topology_source;

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use self::topology_source::TopologySource;
use super::connect_options::ConnectOptions;
use super::error::RedisConnectError;
use super::topology::Topology;
use crate::settings::endpoint::Endpoint;
use crate::settings::redis::TopologySettings;
use crate::store::client::connect_error::ErrorKind;
use crate::telemetry::error_dedup::ErrorDedup;

/// Interval of sentinel queries.
const SENTINEL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of cluster queries.
const CLUSTER_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum time between two discoveries.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// Starts to keep `topology` up to date; a single server needs no discovery.
pub(crate) fn start(topology: &Arc<Topology>) -> Option<AbortHandle> {
    let start = |sources: &[Endpoint], options: &ConnectOptions, interval| {
        let sources = sources.iter().map(|endpoint| TopologySource::new(endpoint.clone(), options)).collect();
        Some(tokio::spawn(run(Arc::downgrade(topology), sources, interval)).abort_handle())
    };
    let options = &*topology.context.connect;
    match &topology.settings {
        TopologySettings::Single(_) => {
            topology.set_discovered();
            None
        }
        TopologySettings::Sentinel { sentinels, credentials, .. } => {
            start(sentinels, &options.for_sentinels(credentials), SENTINEL_INTERVAL)
        }
        TopologySettings::Cluster(seeds) => start(seeds, options, CLUSTER_INTERVAL),
    }
}

async fn run(topology: Weak<Topology>, mut sources: Vec<TopologySource>, interval: Duration) {
    let mut errors = ErrorDedup::default();
    loop {
        let Some(topology) = topology.upgrade() else { return };
        let outcome = refresh(&topology, &mut sources).await;
        topology.set_discovered();
        let pause = match outcome {
            Ok(()) => {
                topology.misconfigured.store(None);
                errors.clear();
                interval
            }
            Err(error) => {
                let misconfigured = error.kind.is_misconfiguration();
                topology.misconfigured.store(misconfigured.then(|| Arc::new(error.text.clone())));
                if errors.is_new(&error.text) {
                    tracing::error!(setting = topology.context.connect.setting, "cannot find redis: {error}");
                }
                MIN_INTERVAL
            }
        };
        let _ = timeout(pause, topology.context.refresh_topology.notified()).await;
        sleep(MIN_INTERVAL).await;
    }
}

/// Queries the sources and updates the topology.
async fn refresh(topology: &Topology, sources: &mut Vec<TopologySource>) -> Result<(), RedisConnectError> {
    if let TopologySettings::Sentinel { primary, .. } = &topology.settings {
        let current = topology.nodes().first().map(|node| node.endpoint().clone());
        topology.set_primary(&sentinel::query_primary(sources, primary, current.as_ref()).await?);
    } else {
        topology.set_slots(&cluster::query_slots(topology, sources).await?);
    }
    Ok(())
}
