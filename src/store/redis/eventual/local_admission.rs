//! Local admission of charges on eventual descriptors, the leases that calls request on the way, and the end of leases.
//!
//! Each lease is added to the reaper when it is granted, with the call that its return needs. A task ends expired
//! leases in groups and returns their unused hits to Redis in the background: the returns of a group are sent together,
//! and the next group is sent after their replies. Hits that cannot be returned in time, or whose return fails, stay
//! charged. The number of outstanding leases is bounded; no more are requested above it.
//!
//! Decides: when unused leased hits return (`LeaseReaper`); leases of all counters at once (`MAX_OUTSTANDING_LEASES`).

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};
use tokio::time::{Instant, sleep};

use super::descriptor::{DescriptorId, EventualDescriptor, can_be_leased};
use super::table::EventualTable;
use super::{AdmitContext, DescriptorStateReport, LeaseArguments, LeasePurpose, LeaseTicket, LocalDecision, OwnLease};
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::charge::ChargeRequest;
use crate::limit::local_budget::LocalBudget;
use crate::limit::request::Hits;
use crate::store::charge::{ChargeBatch, ChargeResults, OwnedCharge, StoreOutcome};
use crate::store::over_limit_cache::OverLimitCache;
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
        let limits = counters.iter().map(|counter| &counter.limit);
        let budget = LocalBudget::for_limits(limits, self.replicas.max_replicas()).filter(|_| self.is_enabled)?;
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
            let can_be_leased = || charge.counters.iter().any(|counter| can_be_leased(&counter.limit));
            matches!(charge.request.hits, Hits::Refund(_)) && !charge.dry_run && can_be_leased()
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
    pub(crate) fn record_call_report(
        &self,
        call: &PreparedCall,
        mut report: DescriptorStateReport,
        lease: Option<LeaseReply>,
    ) {
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

/// Upper bound on outstanding leases.
const MAX_OUTSTANDING_LEASES: usize = 65_536;
/// Upper bound on the returns that are sent together.
const MAX_RETURNS_PER_BATCH: usize = 256;
/// Time between two searches for expired leases.
const SEARCH_INTERVAL: Duration = Duration::from_millis(20);
/// Upper bound on the wait for a return.
const RETURN_TIMEOUT: Duration = Duration::from_millis(100);

/// Outstanding leases, whose unused hits are returned when they end.
#[derive(Debug, Default)]
struct LeaseReaper {
    outstanding: Mutex<BinaryHeap<OutstandingLease>>,
}

/// Lease that has not ended; the one that ends first is the greatest.
#[derive(Debug)]
struct OutstandingLease {
    ticket: LeaseTicket,
    call: Arc<PreparedCall>,
}

impl LeaseReaper {
    /// Returns true if another lease may be requested.
    fn has_room(&self) -> bool {
        self.lock_outstanding().len() < MAX_OUTSTANDING_LEASES
    }

    /// Adds a lease that `call` charged.
    fn add_lease(&self, ticket: LeaseTicket, call: Arc<PreparedCall>) {
        self.lock_outstanding().push(OutstandingLease { ticket, call });
    }

    /// Ends leases when their life is over; runs until it is dropped.
    async fn end_due_leases(&self, table: &EventualTable, rejections: &OverLimitCache) {
        loop {
            sleep(SEARCH_INTERVAL).await;
            while self.end_lease_batch(table, rejections, Some(Instant::now())).await {}
        }
    }

    /// Ends all leases now.
    async fn end_all(&self, table: &EventualTable, rejections: &OverLimitCache) {
        while self.end_lease_batch(table, rejections, None).await {}
    }

    /// Ends up to [`MAX_RETURNS_PER_BATCH`] leases that are over at `by`, any leases if it is `None`; returns true if
    /// there were any.
    async fn end_lease_batch(&self, table: &EventualTable, rejections: &OverLimitCache, by: Option<Instant>) -> bool {
        let ended: Vec<OutstandingLease> = {
            let mut outstanding = self.lock_outstanding();
            let is_over = |lease: &OutstandingLease| by.is_none_or(|by| lease.ticket.end <= by);
            let mut ended = Vec::new();
            while ended.len() < MAX_RETURNS_PER_BATCH && outstanding.peek().is_some_and(is_over) {
                ended.extend(outstanding.pop());
            }
            ended
        };
        let had_some = !ended.is_empty();
        join_all(ended.into_iter().map(|lease| lease.end_lease(table, rejections))).await;
        had_some
    }

    fn lock_outstanding(&self) -> MutexGuard<'_, BinaryHeap<OutstandingLease>> {
        lock_ignoring_poison(&self.outstanding)
    }
}

impl OutstandingLease {
    /// Ends the lease and returns its unused hits; a cached rejection of its counters is out of date then.
    async fn end_lease(self, table: &EventualTable, rejections: &OverLimitCache) {
        let Some(descriptor) = &self.call.eventual else { return };
        let unused = table.end_lease(descriptor.id, self.ticket.serial).saturating_sub(self.ticket.refilled);
        let Some(void_from) = self.ticket.void_from.filter(|_| unused > 0) else { return };
        let refund = OwnedCharge {
            void_from: Some(void_from),
            ..OwnedCharge::new(descriptor.counters.clone(), ChargeRequest::new(Hits::Refund(unused), 0))
        };
        let charges: ChargeBatch = smallvec![refund];
        let own = smallvec![OwnLease { lease: self.ticket.recorded, done: self.ticket.recorded.hits }];
        let leases = LeaseArguments { purpose: LeasePurpose::Return, own };
        // If it fails, the hits stay charged, which is safe.
        let _failed = self.call.send_charges(&charges, Some(&leases), Instant::now() + RETURN_TIMEOUT, None).await;
        rejections.remove(self.call.id.counters);
    }
}

impl Ord for OutstandingLease {
    fn cmp(&self, other: &Self) -> Ordering {
        other.ticket.end.cmp(&self.ticket.end)
    }
}

impl PartialOrd for OutstandingLease {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for OutstandingLease {
    fn eq(&self, other: &Self) -> bool {
        self.ticket.end == other.ticket.end
    }
}

impl Eq for OutstandingLease {}
