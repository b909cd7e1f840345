//! Local admission of charges on eventual descriptors, and the leases that calls request on the way.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use super::budget::{DescriptorId, EventualDescriptor, LocalBudget, can_be_lent};
use super::lease_reaper::LeaseReaper;
use super::table::EventualTable;
use crate::base::clock::Time;
use crate::limit::request::Hits;
use crate::store::charge::{ChargeResults, OwnedCharge, StoreOutcome};
use crate::store::over_limit_cache::OverLimitCache;
use crate::store::redis::eventual::{AdmitContext, CallReport, LeaseTicket, LocalDecision};
use crate::store::redis::lease_arguments::{LeaseArguments, LeasePurpose, OwnLease};
use crate::store::redis::prepared_call::PreparedCall;
use crate::store::redis::replicas::ReplicaMembership;

/// Shares and leases of this process.
#[derive(Debug)]
pub(crate) struct LocalAdmission {
    table: EventualTable,
    reaper: LeaseReaper,
    replicas: Arc<ReplicaMembership>,
    /// False if counters follow the clock of charges, as in tests: all rules are strict then.
    is_enabled: bool,
}

/// Reply to the charge of a lease.
#[derive(Debug)]
pub(crate) struct LeaseReply {
    /// Hits requested.
    pub(crate) hits: u64,
    /// Results of the charge.
    pub(crate) results: ChargeResults,
}

impl LocalAdmission {
    /// Creates an empty table of about `bytes`.
    pub(crate) fn new(bytes: usize, replicas: Arc<ReplicaMembership>, is_enabled: bool) -> Self {
        Self { table: EventualTable::new(bytes), reaper: LeaseReaper::default(), replicas, is_enabled }
    }

    /// Returns the eventual counters of a charge; `None` if one of them is strict.
    pub(crate) fn build_eventual_descriptor(&self, path: u128, charge: &OwnedCharge) -> Option<EventualDescriptor> {
        let counters = &charge.counters;
        let budget = LocalBudget::for_counters(counters, self.replicas.slot_count()).filter(|_| self.is_enabled)?;
        Some(EventualDescriptor { id: DescriptorId::new(path, counters), budget, counters: counters.clone() })
    }

    /// Admits a new charge from a share or a lease, or leaves it to Redis.
    pub(crate) fn try_admit(
        &self,
        descriptor: &EventualDescriptor,
        charge: &OwnedCharge,
        now: Time,
        at: Instant,
    ) -> LocalDecision {
        self.table.try_admit(descriptor, charge, self.build_admit_context(descriptor, now, at))
    }

    /// Decides a charge that has waited for a call, if the call brought a lease for it; else the next call does.
    pub(crate) fn decide_after_wait(&self, call: &PreparedCall, charge: &OwnedCharge) -> Option<StoreOutcome> {
        // The charge may have another limit than the leader's.
        let is_same = |descriptor: &&EventualDescriptor| !charge.dry_run && charge.counters == descriptor.counters;
        let descriptor = call.eventual.as_ref().filter(is_same)?;
        let context = AdmitContext { is_retry: true, ..self.build_admit_context(descriptor, call.now, Instant::now()) };
        match self.table.try_admit(descriptor, charge, context) {
            LocalDecision::Local { outcome, .. } => Some(outcome),
            LocalDecision::CallRedis => None,
        }
    }

    fn build_admit_context(&self, descriptor: &EventualDescriptor, now: Time, at: Instant) -> AdmitContext {
        let budget = &descriptor.budget;
        let may_use_share = budget.share > 0 && self.replicas.may_use_share(budget.period_us, at);
        AdmitContext { at, now: self.replicas.redis_time(at).unwrap_or(now), may_use_share, is_retry: false }
    }

    /// Returns the number of hits that a call which is about to be sent should lease; 0 if demand requires no lease.
    pub(crate) fn hits_to_lease(&self, call: &PreparedCall, sent: Instant) -> u64 {
        let Some(descriptor) = call.eventual.as_ref().filter(|_| self.reaper.has_room()) else { return 0 };
        let live = self.replicas.live_replicas().map_or(1, NonZeroU32::get);
        self.table.hits_to_lease(descriptor, sent, u64::from(live))
    }

    /// Returns what a call says of leases: `requested` hits that its last charge leases, and for refunds the current
    /// leases of this process; `None` if it concerns no lease.
    pub(crate) fn build_lease_arguments(
        &self,
        call: &PreparedCall,
        charges: &[OwnedCharge],
        requested: u64,
    ) -> Option<LeaseArguments> {
        let is_refund = |charge: &OwnedCharge| {
            let can_be_lent = || charge.counters.iter().any(|counter| can_be_lent(&counter.limit));
            matches!(charge.request.hits, Hits::Refund(_)) && !charge.dry_run && can_be_lent()
        };
        let has_refund = charges.iter().any(is_refund);
        (requested > 0 || has_refund).then(|| LeaseArguments {
            purpose: LeasePurpose::Charge {
                requested,
                kept_us: call.eventual.as_ref().map_or(0, |descriptor| descriptor.budget.lease_record_lifetime_us()),
            },
            own: if has_refund { self.table.own_leases(call.id.path) } else { SmallVec::new() },
        })
    }

    /// Ends the leases of a path before its counters are reset; returns them.
    pub(crate) fn end_own_leases(&self, path: u128) -> SmallVec<[OwnLease; 2]> {
        self.table.end_leases(path)
    }

    /// Records the report of a call, and the lease that it requested, if any.
    pub(crate) fn record_call_report(&self, call: &PreparedCall, mut report: CallReport, lease: Option<LeaseReply>) {
        let Some(descriptor) = &call.eventual else { return };
        // A shadow limit without room was not charged; nothing may be returned to it.
        let is_charged_everywhere = lease.as_ref().is_some_and(|lease| lease.results.iter().all(|it| it.admitted));
        let is_granted = |lease: &LeaseReply| {
            let mut results = lease.results.iter().zip(&descriptor.counters);
            results.all(|(result, counter)| result.admitted || counter.shadow)
        };
        report.leased = lease.filter(is_granted).map_or(0, |lease| lease.hits);
        if let Some(ticket) = self.table.record_report(descriptor, report) {
            let ticket = LeaseTicket { void_from: ticket.void_from.filter(|_| is_charged_everywhere), ..ticket };
            self.reaper.add_lease(ticket, Arc::new(call.clone()));
        }
    }

    /// Ends leases when their life is over; runs until it is dropped.
    pub(crate) async fn reap_leases(&self, rejections: &OverLimitCache) {
        self.reaper.end_due_leases(&self.table, rejections).await;
    }

    /// Ends all leases and returns their unused hits.
    pub(crate) async fn return_leases(&self, rejections: &OverLimitCache) {
        self.reaper.end_all(&self.table, rejections).await;
    }

    /// Drops unused entries from one of `parts` equal parts of the table: the part with index `part`.
    pub(crate) fn sweep(&self, at: Instant, part: usize, parts: usize) {
        self.table.sweep(at, part, parts);
    }

    /// Returns the table.
    pub(crate) const fn table(&self) -> &EventualTable {
        &self.table
    }
}
