//! Redis in the simulation: counters that the algorithms charge, and the slots that replicas claim.
//!
//! A call runs at one instant. Refunded hits are void from the time given with them.

use smallvec::SmallVec;
use tollkeeper::algorithm::state::{State, charge_together};
use tollkeeper::algorithm::{ChargeResult, EnforcedLimit};
use tollkeeper::clock::Time;
use tollkeeper::store::redis::command::{ChargeCommand, OwnedCounter};

/// Results of a charge's limits.
pub(super) type ChargeResults = SmallVec<[ChargeResult; 1]>;

/// States of a descriptor's counters.
pub(super) type States = SmallVec<[State; 1]>;

/// Stored counters.
#[derive(Debug)]
pub(super) struct Redis {
    counters: Vec<States>,
    pub(super) slots: Slots,
}

impl Redis {
    /// Creates empty counters for these descriptors.
    pub(super) fn new(descriptors: &[SmallVec<[OwnedCounter; 1]>]) -> Self {
        let empty = |counters: &SmallVec<_>| {
            counters.iter().map(|it: &OwnedCounter| State::empty(it.limit.algorithm())).collect()
        };
        Self { counters: descriptors.iter().map(empty).collect(), slots: Slots::default() }
    }

    /// Makes charges in order; returns their results and the states after them.
    pub(super) fn charge(&mut self, key: usize, commands: &[ChargeCommand], now: Time) -> (Vec<ChargeResults>, States) {
        let states = &mut self.counters[key];
        let results = commands.iter().map(|command| charge(command, states, now)).collect();
        (results, states.clone())
    }
}

fn charge(command: &ChargeCommand, states: &mut States, now: Time) -> ChargeResults {
    let limits: SmallVec<[EnforcedLimit<'_>; 1]> =
        command.counters.iter().map(|it| EnforcedLimit { limit: &it.limit, enforced: it.enforced }).collect();
    let Some(until) = command.void_from else { return charge_together(&limits, states, now, command.request) };
    let refund = |(limit, state): (&EnforcedLimit<'_>, &mut State)| {
        let is_void = state.time(limit.limit, now) >= until;
        if is_void {
            state.clone().charge(limit.limit, now, command.request)
        } else {
            state.charge(limit.limit, now, command.request)
        }
    };
    limits.iter().zip(states.iter_mut()).map(refund).collect()
}

/// Slot claims: each slot has one holder at a time, which knows the end of the claim before its own.
#[derive(Debug, Default)]
pub(super) struct Slots(Vec<Slot>);

#[derive(Clone, Copy, Debug)]
struct Slot {
    owner: u64,
    end: Time,
    /// End of the claim before the owner's.
    before: Time,
}

impl Slots {
    /// Claims one of `count` slots, or renews the claim; returns the end of the claim before it.
    pub(super) fn claim(&mut self, owner: u64, count: usize, (now, life_us): (Time, u64)) -> Option<Time> {
        if self.0.len() != count {
            // Claims under another count must end first; that counts as the end of all claims.
            if self.0.iter().any(|slot| slot.end > now) {
                return None;
            }
            let ended = if self.0.is_empty() { Time::default() } else { now };
            self.0 = vec![Slot { owner: 0, end: ended, before: ended }; count];
        }
        let runs = |slot: &&mut Slot| slot.end > now;
        if let Some(own) = self.0.iter_mut().filter(runs).find(|slot| slot.owner == owner) {
            own.end = now.plus_us(life_us);
            return Some(own.before);
        }
        let free = self.0.iter_mut().find(|slot| slot.end <= now)?;
        *free = Slot { owner, end: now.plus_us(life_us), before: free.end };
        Some(free.before)
    }

    /// Releases a slot.
    pub(super) fn leave(&mut self, owner: u64, now: Time) {
        for slot in self.0.iter_mut().filter(|slot| slot.owner == owner) {
            slot.end = slot.end.min(now);
        }
    }
}
