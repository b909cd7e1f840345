//! Slots of concurrent limits: which were held when a request was rejected.
//!
//! A record says which slot it took or freed, so those that were taken and not freed before are known, until
//! `max_duration`. The counter may know more: the logs lack requests whose callers gave up, and what came before them.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::ban_history::{LimitId, charge_time_us, limit_id};
use super::time_range::format_time;
use crate::decide::log::record::{DecisionRecord, DescriptorRecord, LimitRecord, SlotRecord};
use crate::limit::algorithm::Algorithm;
use crate::limit::period::Period;
use crate::limit::slot::{SlotChange, SlotUse};

/// Maximum number of changes that are kept, of all limits together; the latest are kept.
const MAX_KEPT_CHANGES: usize = 20_000;
/// Maximum number of slots that are named; those that were taken first are named.
const MAX_NAMED_SLOTS: usize = 20;

/// Slots that were held when a request was rejected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeldSlots {
    /// Seats in use, by the counter.
    pub seats: u64,
    /// Number of slots that the logs say were held.
    pub found: usize,
    /// The slots, the oldest first, at most 20.
    pub slots: Vec<HeldSlot>,
}

/// A slot that was held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeldSlot {
    /// Hash of the holder and of the values that identify the stream.
    pub id: String,
    /// Hash of the holder's name.
    pub holder: String,
    /// Time at which it was taken, or renewed.
    pub since: String,
}

/// Changes of slots, by the time of the counter and the number of the change.
#[derive(Debug, Default)]
pub(super) struct SlotHistory {
    changes: BTreeMap<(u64, u64), (LimitId, KeptSlotChange)>,
    added: u64,
}

/// A slot that was taken or freed, by the clock of its counter.
#[derive(Clone, Copy, Debug)]
struct KeptSlotChange {
    at_us: u64,
    slot: SlotUse,
    /// End without a release; `None`: it was freed.
    ends_us: Option<u64>,
}

/// `max_duration` of a limit in microseconds; `None` if the limit has no slots.
fn max_duration_us(limit: &LimitRecord<'_>) -> Option<u64> {
    let period = Period::new(limit.unit, limit.unit_multiplier)?;
    (limit.algorithm == Algorithm::Concurrent).then(|| period.micros())
}

impl SlotHistory {
    /// Keeps the slots that a descriptor took or freed.
    pub(super) fn add_descriptor(&mut self, decision: &DecisionRecord<'_>, descriptor: &DescriptorRecord<'_>) {
        let Some(slot) = descriptor.slot.as_ref().and_then(SlotRecord::to_slot_use) else { return };
        let at_us = charge_time_us(decision, descriptor);
        for (at, limit) in descriptor.limits.iter().enumerate() {
            let Some(max_duration_us) = max_duration_us(limit) else { continue };
            let ends_us = match limit.result.map(|result| result.slot) {
                Some(SlotChange::Taken | SlotChange::Renewed) => Some(at_us.saturating_add(max_duration_us)),
                Some(SlotChange::Freed) => None,
                _ => continue,
            };
            self.added += 1;
            let change = KeptSlotChange { at_us, slot, ends_us };
            self.changes.insert((at_us, self.added), (limit_id(descriptor, at), change));
            if self.changes.len() > MAX_KEPT_CHANGES {
                self.changes.pop_first();
            }
        }
    }

    /// Slots of the limit at `at` that were held at the time of a decision; `None` if the limit has no slots.
    pub(super) fn find_held_slots(
        &self,
        decision: &DecisionRecord<'_>,
        descriptor: &DescriptorRecord<'_>,
        at: usize,
    ) -> Option<HeldSlots> {
        let limit = descriptor.limits.get(at)?;
        max_duration_us(limit)?;
        let now_us = charge_time_us(decision, descriptor);
        let id = limit_id(descriptor, at);
        let changes = self.changes.range(..=(now_us, u64::MAX)).filter(|(_, (limit, _))| *limit == id);
        let last: HashMap<u128, &KeptSlotChange> = changes.map(|(_, (_, change))| (change.slot.id.0, change)).collect();
        let is_held = |change: &&KeptSlotChange| change.ends_us.is_some_and(|ends_us| ends_us > now_us);
        let mut held: Vec<&KeptSlotChange> = last.into_values().filter(is_held).collect();
        held.sort_by_key(|change| (change.at_us, change.slot.id.0));
        let named = held.iter().take(MAX_NAMED_SLOTS).map(|change| HeldSlot {
            id: format!("{:032x}", change.slot.id.0),
            holder: format!("{:016x}", change.slot.holder.0),
            since: format_time(change.at_us),
        });
        let seats = limit.result.map_or(0, |result| result.before);
        Some(HeldSlots { seats, found: held.len(), slots: named.collect() })
    }
}
