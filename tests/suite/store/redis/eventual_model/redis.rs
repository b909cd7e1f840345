//! Redis in the simulation: counters that the algorithms charge, and the places that replicas claim.
//!
//! A call runs at one instant. Refunded hits are void from the time given with them. The record of leases follows
//! `src/store/redis/lua/leases.lua`.

use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::joint_charge::charge_together;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult, JointLimit, MAX_COUNT};
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::redis::eventual::{LeaseArguments, LeasePurpose, StoredLease};

/// Results of a charge's limits.
pub(in crate::store::redis) type ChargeResults = SmallVec<[ChargeResult; 1]>;

/// States of a descriptor's counters.
pub(in crate::store::redis) type States = SmallVec<[State; 1]>;

/// Stored counters.
#[derive(Debug)]
pub(super) struct Redis {
    counters: Vec<StoredCounters>,
    pub(super) places: Places,
}

impl Redis {
    /// Creates empty counters for these descriptors.
    pub(super) fn new(descriptors: &[SmallVec<[OwnedCounter; 1]>]) -> Self {
        let counters = descriptors.iter().map(|counters| StoredCounters::new(counters)).collect();
        Self { counters, places: Places::default() }
    }

    /// Makes a call; returns the results of its charges and the states after them.
    pub(super) fn call(
        &mut self,
        key: usize,
        commands: &[OwnedCharge],
        leases: Option<&LeaseArguments>,
        now: Time,
    ) -> (Vec<ChargeResults>, States) {
        let counters = &mut self.counters[key];
        (counters.call(commands, leases, now).0, counters.states.clone())
    }
}

/// Counters of a descriptor, and the record of its leases.
#[derive(Debug)]
pub(in crate::store::redis) struct StoredCounters {
    pub(in crate::store::redis) states: States,
    pub(in crate::store::redis) record: Vec<StoredLease>,
}

impl StoredCounters {
    /// Creates empty counters.
    pub(in crate::store::redis) fn new(counters: &[OwnedCounter]) -> Self {
        let states = counters.iter().map(|it| State::empty(it.limit.algorithm())).collect();
        Self { states, record: Vec::new() }
    }

    /// Makes charges in order; returns their results, and the hits that refunds leave charged.
    pub(in crate::store::redis) fn call(
        &mut self,
        commands: &[OwnedCharge],
        leases: Option<&LeaseArguments>,
        now: Time,
    ) -> (Vec<ChargeResults>, u64) {
        let leased = leases.map_or(0, |leases| self.leased(leases, now));
        if leased == 0 && leases.is_some_and(|leases| leases.purpose == LeasePurpose::Reset) {
            for (state, counter) in self.states.iter_mut().zip(&commands[0].counters) {
                *state = State::empty(counter.limit.algorithm());
            }
            return (Vec::new(), 0);
        }
        let results: Vec<_> = commands.iter().map(|command| charge(command, &mut self.states, now, leased)).collect();
        if let Some(&LeaseArguments { purpose: LeasePurpose::Charge { requested: hits @ 1.., kept_us }, .. }) = leases {
            let (charge, results) = (commands.last().unwrap(), results.last().unwrap());
            if results.iter().zip(&charge.counters).all(|(result, it)| result.admitted || it.shadow) {
                self.record.push(StoredLease { end: now.plus_us(kept_us), hits });
            }
        }
        (results, leased)
    }

    /// Drops the leases that have ended or that the call ends; returns the hits that refunds leave charged.
    fn leased(&mut self, leases: &LeaseArguments, now: Time) -> u64 {
        let (mut own, mut leased, mut is_known) = (leases.own.to_vec(), 0, false);
        let ends = matches!(leases.purpose, LeasePurpose::Return | LeasePurpose::Reset);
        self.record.retain(|lease| {
            if lease.end <= now {
                return false;
            }
            let found = own.iter().position(|it| it.lease == *lease).map(|index| own.remove(index));
            leased += lease.hits - found.map_or(0, |it| it.done);
            is_known |= found.is_some();
            found.is_none() || !ends
        });
        match leases.purpose {
            LeasePurpose::Return => {
                if is_known {
                    0
                } else {
                    MAX_COUNT
                }
            }
            LeasePurpose::Charge { .. } | LeasePurpose::Reset => leased,
        }
    }
}

fn charge(command: &OwnedCharge, states: &mut States, now: Time, leased: u64) -> ChargeResults {
    let limits = command.joint_limits();
    let request = ChargeRequest { leased, ..command.request };
    let Some(until) = command.void_from else { return charge_together(&limits, states, now, request) };
    let refund = |(limit, state): (&JointLimit<'_>, &mut State)| {
        let is_void = state.effective_charge_time(limit.limit, now) >= until;
        if is_void { state.clone().charge(limit.limit, now, request) } else { state.charge(limit.limit, now, request) }
    };
    limits.iter().zip(states.iter_mut()).map(refund).collect()
}

/// Place claims: each place has one holder at a time, which knows the end of the claim before its own.
#[derive(Debug, Default)]
pub(super) struct Places(Vec<Place>);

#[derive(Clone, Copy, Debug)]
struct Place {
    owner: u64,
    end: Time,
    /// End of the claim before the owner's.
    before: Time,
}

impl Places {
    /// Claims one of `count` places, or renews the claim; returns the end of the claim before it.
    pub(super) fn claim(&mut self, owner: u64, count: usize, (now, life_us): (Time, u64)) -> Option<Time> {
        if self.0.len() != count {
            // Claims under another count must end first; that counts as the end of all claims.
            if self.0.iter().any(|place| place.end > now) {
                return None;
            }
            let ended = if self.0.is_empty() { Time::default() } else { now };
            self.0 = vec![Place { owner: 0, end: ended, before: ended }; count];
        }
        let runs = |place: &&mut Place| place.end > now;
        if let Some(own) = self.0.iter_mut().filter(runs).find(|place| place.owner == owner) {
            own.end = now.plus_us(life_us);
            return Some(own.before);
        }
        let free = self.0.iter_mut().find(|place| place.end <= now)?;
        *free = Place { owner, end: now.plus_us(life_us), before: free.end };
        Some(free.before)
    }

    /// Releases a place.
    pub(super) fn leave(&mut self, owner: u64, now: Time) {
        for place in self.0.iter_mut().filter(|place| place.owner == owner) {
            place.end = place.end.min(now);
        }
    }
}
