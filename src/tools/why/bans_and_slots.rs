//! State behind a rejection that only earlier records tell: rejections that began bans, and slots that were held.
//!
//! A record says how long a ban still lasts, and its limit how long it lasts in all; so the time of its beginning is
//! known, and the rejections up to then began it. Rejections during a ban begin nothing and are not kept.
//!
//! A record says which slot it took or freed, so those that were taken and not freed before are known, until
//! `max_duration`. The counter may know more: the logs lack requests whose callers gave up, and what came before them.
//!
//! Decides: which rejections began a ban, and which slots were held, by the logs.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::rejection::is_rejected_by_earlier_ban;
use super::time_range::format_time;
use crate::decide::log::record::{DecisionRecord, DescriptorRecord, LimitRecord, SlotRecord};
use crate::limit::algorithm::Algorithm;
use crate::limit::ban::Ban;
use crate::limit::period::Period;
use crate::limit::slot::{SlotChange, SlotUse};

/// Maximum number of rejections that are kept, of all limits together; the first ones are kept.
const MAX_KEPT_REJECTIONS: usize = 100_000;
/// Maximum number of rejections that a ban names; the last ones are named.
const MAX_NAMED_REJECTIONS: usize = 20;
/// Tolerance of times that two records imply, in microseconds: algorithms round to it.
const RECORD_TIME_TOLERANCE_US: u64 = 1000;

/// A ban, and the rejections that began it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BanFacts {
    /// Beginning.
    pub since: String,
    /// End, if no further try prolongs it.
    pub until: String,
    /// `ban` as in a rule file.
    pub ban: String,
    /// Number of rejections that begin it.
    pub after: u64,
    /// Number of those that the logs have.
    pub found: usize,
    /// Their times, the last 20 of them.
    pub rejections: Vec<String>,
}

/// Limit of a rule: path of the rule, and index of the limit.
type LimitId = (String, usize);

/// Rejections by limits with a ban, apart from those during one.
#[derive(Debug, Default)]
pub(super) struct BanHistory {
    rejections: HashMap<LimitId, Vec<KeptRejection>>,
    kept: usize,
}

/// A rejection, by the clock of its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct KeptRejection {
    at_us: u64,
    /// It began a ban.
    begins_ban: bool,
}

fn limit_id(descriptor: &DescriptorRecord<'_>, at: usize) -> LimitId {
    (descriptor.rule.as_ref().map(|rule| rule.path.to_string()).unwrap_or_default(), at)
}

/// Time of a charge by the clock of its counter.
fn charge_time_us(decision: &DecisionRecord<'_>, descriptor: &DescriptorRecord<'_>) -> u64 {
    descriptor.now_us.unwrap_or(decision.time_us)
}

impl BanHistory {
    /// Keeps the rejections of a descriptor by limits with a ban.
    pub(super) fn add_descriptor(&mut self, decision: &DecisionRecord<'_>, descriptor: &DescriptorRecord<'_>) {
        for (at, limit) in descriptor.limits.iter().enumerate().filter(|(_, limit)| limit.ban.is_some()) {
            let counts_peeks = || limit.ban.as_deref().and_then(Ban::from_text).is_some_and(Ban::counts_peeks);
            let counts = descriptor.hits > 0 || descriptor.hits == 0 && counts_peeks();
            let Some(result) = limit.result.filter(|result| !result.admitted && counts) else { continue };
            if is_rejected_by_earlier_ban(limit) || self.kept == MAX_KEPT_REJECTIONS {
                continue;
            }
            let kept = KeptRejection { at_us: charge_time_us(decision, descriptor), begins_ban: result.banned_us > 0 };
            self.rejections.entry(limit_id(descriptor, at)).or_default().push(kept);
            self.kept += 1;
        }
    }

    /// Explains the ban that the limit at `at` of a descriptor began or that rejected its hits; `None` without one.
    pub(super) fn explain_ban(
        &self,
        decision: &DecisionRecord<'_>,
        descriptor: &DescriptorRecord<'_>,
        at: usize,
    ) -> Option<BanFacts> {
        let limit = descriptor.limits.get(at)?;
        let result = limit.result.filter(|result| result.banned_us > 0)?;
        let text = limit.ban.as_ref()?;
        let ban = Ban::from_text(text)?;
        let until_us = charge_time_us(decision, descriptor).saturating_add(result.banned_us);
        let since_us = until_us.saturating_sub(ban.length_us());
        let of_limit = self.rejections.get(&limit_id(descriptor, at)).map_or(&[][..], Vec::as_slice);
        let mut before: Vec<_> = of_limit
            .iter()
            .copied()
            .filter(|kept| kept.at_us <= since_us.saturating_add(RECORD_TIME_TOLERANCE_US))
            .collect();
        before.sort_unstable();
        // An earlier ban used up the rejections before its own beginning.
        let is_earlier =
            |kept: &KeptRejection| kept.begins_ban && kept.at_us.saturating_add(RECORD_TIME_TOLERANCE_US) < since_us;
        let first = before.iter().rposition(is_earlier).map_or(0, |earlier| earlier + 1);
        let after = usize::try_from(ban.rejections_before_ban()).unwrap_or(usize::MAX);
        let own = &before[first.max(before.len().saturating_sub(after))..];
        let named = &own[own.len().saturating_sub(MAX_NAMED_REJECTIONS)..];
        Some(BanFacts {
            since: format_time(since_us),
            until: format_time(until_us),
            ban: text.to_string(),
            after: ban.rejections_before_ban(),
            found: own.len(),
            rejections: named.iter().map(|kept| format_time(kept.at_us)).collect(),
        })
    }
}

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
    let period = Period::new(limit.unit, limit.unit_multiplier.unwrap_or(1))?;
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
