//! Holds on counters of a shard: a table beside the entries, which a charge looks at only if it is not empty.
//!
//! A hold outlives the entry of its counter: an evicted or reset counter is empty, but what is held stays held.
//!
//! Decides: which hits of a counter in memory are held, and what their end charges.

use smallvec::SmallVec;

use super::{CounterLookup, MemoryShard};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::joint_charge::{admits_each, charge_together};
use crate::limit::algorithm::state::State;
use crate::limit::charge::{Charge, ChargeRequest, ChargeResult, Counter, JointLimit};
use crate::limit::hold::{HeldAmount, HoldAnswer, HoldRequest, PoolId, StateWithLimit, TotalHold};
use crate::limit::request::Hits;
use crate::store::charge::LimitAdmissions;
use crate::store::error::MemoryFull;

/// Divisor of a shard's capacity: holds may take one such part beside it.
const HOLDS_CAPACITY_DIVISOR: u64 = 8;
/// Memory of the holds on one counter, with its place in the table.
const HELD_COUNTER_BYTES: u64 = 256;

impl MemoryShard {
    /// Returns true if a counter of the charge is held, or was until recently.
    pub(super) fn is_any_counter_held(&self, charge: &Charge<'_>) -> bool {
        let is_held = |counter: &Counter<'_>| self.holds.contains_key(&(charge.path_hash ^ counter.tag));
        !self.holds.is_empty() && charge.counters.iter().any(is_held)
    }

    /// Charges all counters of a descriptor, of which some are held.
    pub(super) fn charge_with_holds(
        &mut self,
        charge: &Charge<'_>,
        now: Time,
    ) -> Result<SmallVec<[ChargeResult; 1]>, MemoryFull> {
        let may_add = matches!(charge.request.hits, Hits::Charge(_));
        let mut slots = self.find_counters(charge);
        if let Err(full) = self.make_room(&mut slots, may_add, now) {
            return self.reject_by_existing_counter(&slots, charge, now).ok_or(full);
        }
        let found: SmallVec<[State; 4]> = slots.iter().map(|slot| self.take_state(slot)).collect();
        let mut settled = found.clone();
        let (holds, lowered) = self.settle_holds_and_lower_limits(&slots, &mut settled, now);
        let mut states = settled.clone();
        let mut results = charge_together(&to_joint_limits(&slots, &lowered), &mut states, now, charge.request);
        for (index, (slot, found)) in slots.iter().zip(found).enumerate() {
            let limit = slot.joint_limit.limit;
            let kept = result_for_expiry(results[index], holds[index], limit, now);
            if (slot.index.is_some() || may_add) && states[index] != settled[index] {
                self.put_state(slot, states[index].clone(), &kept, now);
                if let (None, Some(held)) = (holds[index], self.holds.get_mut(&slot.key)) {
                    held.clear_total();
                }
            } else if let Some(entry) = slot.index {
                // As in Redis, a charge that changes nothing leaves the end of a hold to a later one.
                self.write_state(entry, found);
            }
            if let Some(hold) = holds[index] {
                hold.add_wait_for_hold_end(&mut results[index], limit, charge.request, now);
            }
        }
        Ok(results)
    }

    /// Returns which limits of a descriptor would admit a charge, if some of its counters are held.
    pub(super) fn peek_held_admissions(&mut self, charge: &Charge<'_>, now: Time) -> LimitAdmissions {
        let slots = self.find_counters(charge);
        let states: SmallVec<[State; 4]> = slots.iter().map(|slot| self.take_state(slot)).collect();
        let mut settled = states.clone();
        let (_, lowered) = self.settle_holds_and_lower_limits(&slots, &mut settled, now);
        let admits = admits_each(&to_joint_limits(&slots, &lowered), &settled, now, charge.request);
        for (slot, state) in slots.iter().zip(states) {
            if let Some(index) = slot.index {
                self.write_state(index, state);
            }
        }
        admits
    }

    /// Adjusts the hold of a pool on the only counter of the charge: see
    /// [`CounterHolds::charge_used_and_grant`](crate::limit::hold::CounterHolds::charge_used_and_grant).
    pub(in crate::store::memory) fn adjust_hold(
        &mut self,
        charge: &Charge<'_>,
        pool: PoolId,
        mut request: HoldRequest,
        now: Time,
    ) -> Result<HoldAnswer, MemoryFull> {
        let Some(counter) = charge.counters.first() else { return Ok(HoldAnswer::nothing_granted(now)) };
        let (key, limit) = (charge.path_hash ^ counter.tag, counter.limit);
        let mut slots = [self.find_counter(key, counter.as_joint_limit())];
        self.make_room(&mut slots, true, now)?;
        let known = self.holds.remove(&key);
        if known.is_none() && !self.has_room_for_hold(now) {
            request = HoldRequest { wanted: HeldAmount::default(), demand: 0, ..request };
        }
        let mut held = known.unwrap_or_default();
        let mut state = self.take_state(&slots[0]);
        let answer = held.charge_used_and_grant(StateWithLimit { limit, state: &mut state }, pool, request, now);
        let result = state.charge(limit, now, ChargeRequest::new(Hits::Peek, 0));
        self.put_state(&slots[0], state, &result_for_expiry(result, held.total_hold(), limit, now), now);
        if !held.is_over(now) {
            self.holds.insert(key, held);
        }
        Ok(answer)
    }

    /// Drops the holds that are over.
    pub(super) fn sweep_holds(&mut self, now: Time) {
        self.holds.retain(|_, held| !held.is_over(now));
        if self.holds.capacity() > 4 * self.holds.len() {
            self.holds.shrink_to(2 * self.holds.len());
        }
    }

    /// Bytes of the table of holds, about.
    pub(super) fn hold_table_bytes(&self) -> u64 {
        self.holds.capacity() as u64 * HELD_COUNTER_BYTES
    }

    fn has_room_for_hold(&mut self, now: Time) -> bool {
        let most = self.capacity_bytes / HOLDS_CAPACITY_DIVISOR / HELD_COUNTER_BYTES;
        if self.holds.len() as u64 >= most {
            self.sweep_holds(now);
        }
        (self.holds.len() as u64) < most
    }

    pub(super) fn find_counters<'r>(&self, charge: &Charge<'r>) -> SmallVec<[CounterLookup<'r>; 4]> {
        let find = |counter: &Counter<'r>| self.find_counter(charge.path_hash ^ counter.tag, counter.as_joint_limit());
        charge.counters.iter().map(find).collect()
    }

    /// Settles holds that have ended into the states; returns those that last, and the limits without them.
    fn settle_holds_and_lower_limits(
        &self,
        slots: &[CounterLookup<'_>],
        states: &mut [State],
        now: Time,
    ) -> (SmallVec<[Option<TotalHold>; 4]>, SmallVec<[Limit; 4]>) {
        let lower = |(slot, state): (&CounterLookup<'_>, &mut State)| {
            let limit = slot.joint_limit.limit;
            let hold = self.holds.get(&slot.key).and_then(|held| held.total_hold()?.keep_or_settle(limit, state, now));
            (hold, hold.map_or(*limit, |hold| hold.lower_limit(limit)))
        };
        slots.iter().zip(states).map(lower).unzip()
    }
}

/// Returns lowered limits as they are charged together, each with what its counter rejects.
fn to_joint_limits<'l>(slots: &[CounterLookup<'_>], lowered: &'l [Limit]) -> SmallVec<[JointLimit<'l>; 4]> {
    let joint = |(slot, limit): (&CounterLookup<'_>, &'l Limit)| JointLimit {
        limit,
        rejects_others: slot.joint_limit.rejects_others,
    };
    slots.iter().zip(lowered).map(joint).collect()
}

/// Returns the result from which the expiry of an entry is computed: its reset comes after the end of the hold, and
/// after the time in which the bucket becomes full again.
fn result_for_expiry(result: ChargeResult, hold: Option<TotalHold>, limit: &Limit, now: Time) -> ChargeResult {
    let needed_us = hold.map_or(0, |hold| hold.until.since_us(now).saturating_add(hold.max_refill_time_us(limit)));
    ChargeResult { reset_us: result.reset_us.max(needed_us), ..result }
}
