//! Charges of a request, grouped by counter: each group travels in one call.

use std::collections::HashMap;

use smallvec::{SmallVec, smallvec};

use super::key_scheme::{CounterId, KeyScheme};
use crate::base::clock::Time;
use crate::limit::charge::ChargeRequest;
use crate::limit::counter::Charge;
use crate::store::charge::{ChargeBatch, ChargeMode, MAX_CHARGES_PER_CALL, OwnedCharge, OwnedCounter};

/// Number of charges up to which a search is faster than a hash table.
const MAX_SEARCHED: usize = 16;

/// Charges of one request on the same counters.
pub(super) struct ChargeGroup {
    pub(super) id: CounterId,
    pub(super) charges: ChargeBatch,
    /// Index of each charge in the request.
    pub(super) indices: SmallVec<[usize; 1]>,
}

impl ChargeGroup {
    /// Creates a group of one charge, which has this index in the request.
    pub(super) fn of_one(keys: &KeyScheme, charge: &Charge<'_>, mode: ChargeMode, now: Time) -> Self {
        Self {
            id: keys.counter_id(charge, now),
            charges: SmallVec::from_iter([owned_charge(keys, charge, mode)]),
            indices: smallvec![0],
        }
    }
}

/// Groups the charges of a request, each group in their order.
pub(super) fn group(
    keys: &KeyScheme,
    charges: &[Charge<'_>],
    mode: ChargeMode,
    now: Time,
) -> SmallVec<[ChargeGroup; 2]> {
    let mut groups: SmallVec<[ChargeGroup; 2]> = SmallVec::with_capacity(charges.len());
    let mut group_of = HashMap::new();
    for (index, charge) in charges.iter().enumerate() {
        let id = keys.counter_id(charge, now);
        let owned = owned_charge(keys, charge, mode);
        let known = if charges.len() <= MAX_SEARCHED {
            groups.iter().rposition(|group| group.id.counters == id.counters)
        } else {
            group_of.get(&id.counters).copied()
        };
        match known.filter(|&known| groups[known].charges.len() < MAX_CHARGES_PER_CALL) {
            Some(known) => {
                groups[known].charges.push(owned);
                groups[known].indices.push(index);
            }
            None => {
                if charges.len() > MAX_SEARCHED {
                    group_of.insert(id.counters, groups.len());
                }
                let charges = SmallVec::from_iter([owned]);
                groups.push(ChargeGroup { id, charges, indices: smallvec![index] });
            }
        }
    }
    groups
}

/// Copies a charge, so that a call can outlive its request.
fn owned_charge(keys: &KeyScheme, charge: &Charge<'_>, mode: ChargeMode) -> OwnedCharge {
    let counters: SmallVec<[OwnedCounter; 1]> = charge
        .counters
        .iter()
        .map(|counter| OwnedCounter {
            limit: keys.counted_limit(counter.limit),
            shadow: counter.shadow,
            quota: counter.quota,
            tag: counter.tag,
        })
        .collect();
    // If no limit delays, the longest delay must not make equal charges look different.
    let may_delay = counters.iter().any(|counter| counter.limit.max_wait_us() > 0);
    let max_delay_us = if may_delay { charge.request.max_delay_us } else { 0 };
    let request = ChargeRequest { max_delay_us, ..charge.request };
    OwnedCharge { dry_run: mode == ChargeMode::DryRun, ..OwnedCharge::new(counters, request) }
}
