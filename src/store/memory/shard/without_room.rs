//! Charges for which a shard has no room: rejected nevertheless if an existing counter rejects them.
//!
//! A rejection needs no room. Without this, a descriptor over its limit would be decided by a failure policy whenever a
//! new counter beside it has no room, as after the end of a shorter period.

use smallvec::SmallVec;

use super::{CounterSlot, MemoryShard};
use crate::base::clock::Time;
use crate::limit::algorithm::state::{State, charge_together};
use crate::limit::charge::{ChargeResult, EnforcedLimit};
use crate::limit::counter::Charge;

impl MemoryShard {
    /// Returns the results of a charge if an existing counter rejects it for all limits; changes no counter. `None` if
    /// the charge needs room.
    pub(super) fn reject_without_room(
        &mut self,
        slots: &[CounterSlot<'_>],
        charge: &Charge<'_>,
        now: Time,
    ) -> Option<SmallVec<[ChargeResult; 1]>> {
        let states: SmallVec<[State; 4]> = slots.iter().map(|slot| self.take_state(slot)).collect();
        let is_rejected = slots.iter().zip(&states).any(|(slot, state)| {
            let EnforcedLimit { limit, enforced } = slot.enforced_limit;
            let decides = slot.index.is_some() && (enforced || slots.len() == 1);
            decides && !state.admits(limit, now, charge.request)
        });
        let results = is_rejected.then(|| {
            let limits: SmallVec<[EnforcedLimit<'_>; 4]> = slots.iter().map(|slot| slot.enforced_limit).collect();
            charge_together(&limits, &mut states.clone(), now, charge.request)
        });
        for (slot, state) in slots.iter().zip(states) {
            if let Some(index) = slot.index {
                self.keep_state(index, state);
            }
        }
        results
    }
}
