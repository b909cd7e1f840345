//! Slot ranges of a cluster, as CLUSTER SLOTS reports them.

use super::hash_slot::HASH_SLOTS;
use super::node_address::announced_endpoint;
use super::reply::{Reply, integer};
use crate::settings::endpoint::Endpoint;

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
