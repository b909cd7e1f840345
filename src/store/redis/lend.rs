//! What this process may decide by itself, and what it leases for that on the way of its calls.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use super::coalescer::{ChargeBatch, Role};
use super::command::{ChargeCommand, OwnedCounter};
use super::eventual::{Admission, AdmitContext, DescriptorId, EventualCounters, LocalBudget};
use super::lead::{InFlightGuard, lead};
use super::prepared_call::PreparedCall;
use super::{Group, Shared};
use crate::clock::Time;
use crate::counter::Charge;
use crate::store::outcome::StoreOutcome;

impl Shared {
    /// What may be leased on the counters of a group; `None`: they are strict.
    pub(super) fn lending(&self, group: &Group) -> Option<EventualCounters> {
        let command = group.commands.first()?;
        let terms =
            LocalBudget::of(&command.counters, self.heartbeat.replicas().slots()).filter(|_| !self.client_clock)?;
        // Limits too: what was charged under one must not be given out under another.
        let tags = command.counters.iter().fold(0_u128, |tags, OwnedCounter { limit, tag, .. }| {
            let amounts = u128::from(limit.requests_per_unit()) << 32 | u128::from(limit.capacity());
            tags.rotate_left(1) ^ tag ^ amounts.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
        });
        Some(EventualCounters {
            id: DescriptorId { path: group.path, tags },
            terms,
            counters: command.counters.clone(),
        })
    }

    /// What a charge finds that this process may decide by itself.
    pub(super) fn answer_here(
        self: &Arc<Self>,
        group: &Group,
        charge: &Charge<'_>,
        lending: &EventualCounters,
        now: Time,
    ) -> Option<StoreOutcome> {
        let [command @ ChargeCommand { dry_run: false, .. }] = &*group.commands else { return None };
        let moment = self.moment(lending, now);
        match self.eventual.admit(lending, command, moment) {
            Admission::Local { outcome: found, lease_ahead: ahead } => {
                if ahead {
                    self.lease_ahead(group, charge, lending, (now, moment.at));
                }
                Some(found)
            }
            Admission::AskStore => None,
        }
    }

    fn moment(&self, lending: &EventualCounters, now: Time) -> AdmitContext {
        let (at, replicas) = (Instant::now(), self.heartbeat.replicas());
        let may_share = lending.terms.share > 0 && replicas.usable(lending.terms.period_us, at);
        AdmitContext { at, now: replicas.redis_time(at).unwrap_or(now), may_share, again: false }
    }

    /// Leases before it is needed, unless a call is in flight, which sees to that itself.
    fn lease_ahead(
        self: &Arc<Self>,
        group: &Group,
        charge: &Charge<'_>,
        lending: &EventualCounters,
        (now, at): (Time, Instant),
    ) {
        if let Role::Leader(none) = self.coalescer.enter(group.id, ChargeBatch::new(), (now, at).into()) {
            let place = self.place(charge, (group.id, group.path), Some(lending.clone()), now);
            let busy = InFlightGuard::new(Arc::clone(self), group.id);
            tokio::spawn(lead(busy, place, none, at + self.timeout));
        }
    }

    /// How many hits to lease with a call that is about to be sent.
    pub(super) fn lease(&self, lending: &EventualCounters, at: Instant) -> u64 {
        if !self.settle.has_room() {
            return 0;
        }
        let live = self.heartbeat.replicas().live().map_or(1, NonZeroU32::get);
        self.eventual.lease(lending, at, u64::from(live))
    }

    /// Decides a charge that has waited for a call, if that has brought what it takes.
    pub(super) fn admit_again(&self, place: &PreparedCall, command: &ChargeCommand) -> Option<StoreOutcome> {
        // It may bring another limit than the charge that leads.
        let alike = |lending: &&EventualCounters| !command.dry_run && command.counters == lending.counters;
        let lending = place.lending.as_ref().filter(alike)?;
        let moment = AdmitContext { again: true, ..self.moment(lending, place.now) };
        match self.eventual.admit(lending, command, moment) {
            Admission::Local { outcome: found, .. } => Some(found),
            Admission::AskStore => None,
        }
    }
}
