//! Charges of a request, grouped by counter: each group travels in one call.

use std::collections::HashMap;

use smallvec::{SmallVec, smallvec};

use super::key_scheme::{CounterId, KeyScheme};
use crate::base::clock::Time;
use crate::limit::charge::ChargeRequest;
use crate::limit::counter::Charge;
use crate::store::charge_context::ChargeMode;
use crate::store::command::{ChargeBatch, ChargeCommand, MAX_CHARGES_PER_CALL, OwnedCounter};

/// Number of charges up to which a search is faster than a hash table.
const MAX_SEARCHED: usize = 16;

/// Charges of one request on the same counters.
pub(super) struct ChargeGroup {
    pub(super) id: CounterId,
    pub(super) commands: ChargeBatch,
    /// Index of each charge in the request.
    pub(super) indices: SmallVec<[usize; 1]>,
}

impl ChargeGroup {
    /// Creates a group of one charge, which has this index in the request.
    pub(super) fn of_one(keys: &KeyScheme, charge: &Charge<'_>, mode: ChargeMode, now: Time) -> Self {
        Self {
            id: keys.counter_id(charge, now),
            commands: SmallVec::from_iter([command(keys, charge, mode)]),
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
        let command = command(keys, charge, mode);
        let known = if charges.len() <= MAX_SEARCHED {
            groups.iter().rposition(|group| group.id.counters == id.counters)
        } else {
            group_of.get(&id.counters).copied()
        };
        match known.filter(|&known| groups[known].commands.len() < MAX_CHARGES_PER_CALL) {
            Some(known) => {
                groups[known].commands.push(command);
                groups[known].indices.push(index);
            }
            None => {
                if charges.len() > MAX_SEARCHED {
                    group_of.insert(id.counters, groups.len());
                }
                let commands = SmallVec::from_iter([command]);
                groups.push(ChargeGroup { id, commands, indices: smallvec![index] });
            }
        }
    }
    groups
}

/// Copies a charge into a command.
fn command(keys: &KeyScheme, charge: &Charge<'_>, mode: ChargeMode) -> ChargeCommand {
    let counters: SmallVec<[OwnedCounter; 1]> = charge
        .counters
        .iter()
        .map(|counter| OwnedCounter {
            limit: keys.counted(counter.limit),
            enforced: counter.enforced,
            quota: counter.quota,
            tag: counter.tag,
        })
        .collect();
    // If no limit delays, the longest delay must not make equal charges look different.
    let may_delay = counters.iter().any(|counter| counter.limit.max_wait_us() > 0);
    let max_delay_us = if may_delay { charge.request.max_delay_us } else { 0 };
    let request = ChargeRequest { max_delay_us, ..charge.request };
    ChargeCommand { dry_run: mode == ChargeMode::DryRun, ..ChargeCommand::new(counters, request) }
}
