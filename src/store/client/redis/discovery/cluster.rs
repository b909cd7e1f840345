//! Discovery of the slots of a cluster.

use super::topology_source::{TopologySource, with_hint};
use crate::settings::endpoint::Endpoint;
use crate::settings::redis::TopologySettings;
use crate::store::client::redis::error::{RedisConnectError, RedisError};
use crate::store::client::redis::slot_range::{SlotRange, slot_ranges};
use crate::store::client::redis::topology::Topology;

/// Returns the slots that the first available node reports, or else the first seed that answers.
///
/// # Errors
/// No node reports any slots.
pub(super) async fn query_slots(
    topology: &Topology,
    sources: &mut Vec<TopologySource>,
) -> Result<Vec<SlotRange>, RedisConnectError> {
    // Known nodes become sources too, because the seeds may have left the cluster.
    let nodes = topology.nodes();
    for node in &nodes {
        if !sources.iter().any(|source| source.endpoint == *node.endpoint()) {
            sources.push(TopologySource::new(node.endpoint().clone(), &topology.context.connect));
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
            Ok(reply) => match slot_ranges(&reply, &source.endpoint) {
                Some(ranges) if !ranges.is_empty() => {
                    retain_members(sources, &topology.settings, &ranges);
                    return Ok(ranges);
                }
                Some(_) => {
                    last_error =
                        RedisConnectError { kind: RedisError::SlotDown, text: "no node owns a slot".to_owned() };
                }
                None => last_error = source.invalid_reply(),
            },
            Err(error) => last_error = with_hint(error, "is it a node of a cluster, as REDIS_TYPE=cluster says?"),
        }
    }
    Err(last_error)
}

/// Keeps the seeds and the owners of slots as sources.
fn retain_members(sources: &mut Vec<TopologySource>, settings: &TopologySettings, ranges: &[SlotRange]) {
    let TopologySettings::Cluster(seeds) = settings else { return };
    sources
        .retain(|source| seeds.contains(&source.endpoint) || ranges.iter().any(|range| range.owner == source.endpoint));
}
