//! Table of the eventual descriptors of this process, bounded in memory, and the state of each one: the last report of
//! Redis, the used share, and the current leases.
//!
//! Decides: which charges of an eventual limit are answered here (`try_admit`), by lease or share.
//! Decides: hits of a lease (`hits_to_lease`, `MAX_LEASE_HITS`), leases of a counter (`MAX_LEASES_PER_DESCRIPTOR`).
//! Decides: leases after a changed rule; leases that Redis lost (FLUSHALL, failover): used up.
//! Decides: full memory (`TOLLKEEPER_EVENTUAL_BYTES`); when an idle counter is forgotten.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::descriptor::{DescriptorId, EventualDescriptor};
use super::{AdmitContext, DescriptorStateReport, LeaseTicket, LocalDecision, OwnLease, StoredLease};
use crate::base::clock::{Time, to_micros};
use crate::base::sharded::{DEFAULT_SHARDS, PrehashedMap, Sharded, upper_half};
use crate::limit::algorithm::joint_charge::charge_together;
use crate::limit::algorithm::state::State;
use crate::limit::charge::{ChargeRequest, ChargeResult, JointLimit};
use crate::limit::local_budget::LocalBudget;
use crate::limit::request::Hits;
use crate::store::charge::{ChargeResults, DecidedBy, OwnedCharge, OwnedCounter, StoreOutcome};
use crate::store::stats::EventualHitTotals;

/// Memory of a descriptor, table included, in bytes.
const ENTRY_BYTES: usize = 2 * size_of::<EventualEntry>();
/// Shortest time between two sweeps of a full shard.
const MIN_FULL_SHARD_SWEEP_INTERVAL: Duration = Duration::from_millis(100);
/// Largest lease, in hits.
const MAX_LEASE_HITS: u64 = 1 << 20;

/// Shares and leases of all eventual descriptors.
#[derive(Debug)]
pub struct EventualTable {
    shards: Sharded<EventualShard>,
    max_shard_entries: usize,
    next_serial: AtomicU64,
    counts: EventualHitCounts,
}

#[derive(Debug, Default)]
struct EventualShard {
    entries: PrehashedMap<EventualEntry>,
    swept: Option<Instant>,
}

/// Hits of eventual rules since the start, by what they were admitted from.
#[derive(Debug, Default)]
struct EventualHitCounts {
    shared: AtomicU64,
    from_leases: AtomicU64,
    leased: AtomicU64,
    returned: AtomicU64,
}

impl EventualTable {
    /// Creates an empty table of about `bytes` of memory at most.
    pub fn new(bytes: usize) -> Self {
        Self {
            shards: Sharded::new(DEFAULT_SHARDS, EventualShard::default),
            max_shard_entries: bytes / ENTRY_BYTES / DEFAULT_SHARDS,
            next_serial: AtomicU64::new(0),
            counts: EventualHitCounts::default(),
        }
    }

    /// Admits a charge from a lease or the share, or leaves it to Redis.
    pub fn try_admit(
        &self,
        descriptor: &EventualDescriptor,
        charge: &OwnedCharge,
        context: AdmitContext,
    ) -> LocalDecision {
        let &EventualDescriptor { id, ref budget, .. } = descriptor;
        let Hits::Charge(hits @ 1..) = charge.request.hits else { return LocalDecision::CallRedis };
        let may_use_share = context.may_use_share && hits <= budget.share;
        let mut shard = self.shards.lock_shard(upper_half(id.path));
        if let Some(entry) = shard.entries.get_mut(&id.path) {
            if !entry.belongs_to(id) && !entry.switch_descriptor(id, budget, context.at) {
                return LocalDecision::CallRedis;
            }
            if !context.is_retry {
                entry.demand.record_hits(hits, context.at);
            }
            if let Some(results) = entry.admit_from_lease(hits, charge, context) {
                self.counts.from_leases.fetch_add(hits, Ordering::Relaxed);
                let outcome = StoreOutcome { results, decided_by: DecidedBy::Lease, now: context.now };
                return LocalDecision::Local {
                    outcome,
                    lease_ahead: entry.begin_lease_request_if_due(budget, context.at),
                };
            }
            let results = if may_use_share { entry.admit_from_share(hits, charge, budget, context) } else { None };
            return results.map_or(LocalDecision::CallRedis, |results| {
                self.record_admission_by_share(hits, results, context.now)
            });
        }
        if !(may_use_share && self.make_room(&mut shard, context.at)) {
            return LocalDecision::CallRedis;
        }
        let mut entry = EventualEntry::new(id.tags, context.at);
        entry.demand.record_hits(hits, context.at);
        let Some(results) = entry.admit_from_share(hits, charge, budget, context) else {
            return LocalDecision::CallRedis;
        };
        shard.entries.insert(id.path, entry);
        self.record_admission_by_share(hits, results, context.now)
    }

    fn record_admission_by_share(&self, hits: u64, results: ChargeResults, now: Time) -> LocalDecision {
        self.counts.shared.fetch_add(hits, Ordering::Relaxed);
        LocalDecision::Local {
            outcome: StoreOutcome { results, decided_by: DecidedBy::Share, now },
            lease_ahead: false,
        }
    }

    /// Returns the number of hits to lease with a call that is about to be sent; `live` replicas share what is left.
    pub fn hits_to_lease(&self, descriptor: &EventualDescriptor, at: Instant, live: u64) -> u64 {
        let id = descriptor.id;
        let mut shard = self.shards.lock_shard(upper_half(id.path));
        let Some(entry) = shard.entries.get_mut(&id.path) else { return 0 };
        if entry.belongs_to(id) { entry.hits_to_lease(descriptor, at, live).min(MAX_LEASE_HITS) } else { 0 }
    }

    /// Records a report of Redis. A lease in it can be used until [`EventualTable::end_lease`].
    pub fn record_report(&self, descriptor: &EventualDescriptor, report: DescriptorStateReport) -> Option<LeaseTicket> {
        let &EventualDescriptor { id, ref counters, .. } = descriptor;
        let mut shard = self.shards.lock_shard(upper_half(id.path));
        let (sent, leased) = (report.sent, report.leased);
        let ticket = (leased > 0).then(|| {
            self.counts.leased.fetch_add(leased, Ordering::Relaxed);
            descriptor.issue_ticket(self.next_serial.fetch_add(1, Ordering::Relaxed), &report)
        });
        let is_known = shard.entries.contains_key(&id.path);
        if is_known || self.make_room(&mut shard, sent) {
            let entry = shard.entries.entry(id.path).or_insert_with(|| EventualEntry::new(id.tags, sent));
            if entry.belongs_to(id) {
                entry.record_report(counters, report, ticket);
            }
        }
        ticket
    }

    /// Ends a lease; returns its unused hits.
    pub fn end_lease(&self, id: DescriptorId, serial: u64) -> u64 {
        let unused = self
            .shards
            .lock_shard(upper_half(id.path))
            .entries
            .get_mut(&id.path)
            .map_or(0, |entry| entry.end_lease(serial));
        self.counts.returned.fetch_add(unused, Ordering::Relaxed);
        unused
    }

    /// Returns the current leases of a path, and how many of their hits were admitted.
    pub fn own_leases(&self, path: u128) -> SmallVec<[OwnLease; 2]> {
        let shard = self.shards.lock_shard(upper_half(path));
        shard.entries.get(&path).map_or_else(SmallVec::new, EventualEntry::own_leases)
    }

    /// Ends the leases of a path before its counters are reset; returns them.
    pub fn end_leases(&self, path: u128) -> SmallVec<[OwnLease; 2]> {
        let mut shard = self.shards.lock_shard(upper_half(path));
        shard.entries.get_mut(&path).map_or_else(SmallVec::new, EventualEntry::reset)
    }

    /// Drops unused entries from one of `parts` equal parts of the table: the part with index `part`.
    pub fn sweep(&self, at: Instant, part: usize, parts: usize) {
        self.shards.lock_each_of_part(part, parts).for_each(|mut shard| shard.sweep(at));
    }

    /// Returns statistics since the start.
    pub fn stats(&self) -> EventualHitTotals {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let EventualHitCounts { shared, from_leases, leased, returned } = &self.counts;
        EventualHitTotals {
            from_shares: read(shared),
            from_leases: read(from_leases),
            leased: read(leased),
            returned: read(returned),
        }
    }

    /// Returns the number of descriptors in the table.
    pub fn descriptor_count(&self) -> usize {
        self.shards.lock_each().map(|shard| shard.entries.len()).sum()
    }

    fn make_room(&self, shard: &mut EventualShard, at: Instant) -> bool {
        let is_full = shard.entries.len() >= self.max_shard_entries;
        if is_full && shard.swept.is_none_or(|swept| at >= swept + MIN_FULL_SHARD_SWEEP_INTERVAL) {
            shard.sweep(at);
        }
        shard.entries.len() < self.max_shard_entries
    }
}

impl EventualShard {
    fn sweep(&mut self, at: Instant) {
        self.entries.retain(|_, entry| !entry.is_droppable(at));
        if self.entries.capacity() > 4 * self.entries.len() {
            self.entries.shrink_to(2 * self.entries.len());
        }
        self.swept = Some(at);
    }
}

/// Leases of a descriptor at one time: the current one and the next.
const MAX_LEASES_PER_DESCRIPTOR: usize = 2;
/// Time after which a lease that was requested ahead and did not arrive is requested again.
const NEXT_LEASE_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time for which an entry without leases and used share is kept.
const IDLE_TIME: Duration = Duration::from_secs(2);

/// Local state of an eventual descriptor.
#[derive(Debug)]
struct EventualEntry {
    /// Hash of the counters and limits that the entry belongs to.
    tags: u128,
    /// States that Redis last reported, with the hits admitted here since.
    states: SmallVec<[State; 1]>,
    last_report: Option<LastReportTimes>,
    share: UsedShare,
    leases: SmallVec<[Lease; MAX_LEASES_PER_DESCRIPTOR]>,
    demand: Demand,
    requested_ahead: Option<Instant>,
    used: Instant,
}

/// Times of the last report.
#[derive(Clone, Copy, Debug)]
struct LastReportTimes {
    /// Time of sending the call.
    sent: Instant,
    /// Time of Redis in its reply.
    now: Time,
}

/// Share used in the tumbling period that began with its first use.
#[derive(Clone, Copy, Debug)]
struct UsedShare {
    hits: u64,
    start: Instant,
    /// End of that period.
    end: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    serial: u64,
    granted: u64,
    left: u64,
    end: Instant,
    recorded: StoredLease,
}

impl EventualEntry {
    /// Creates the entry of a descriptor that Redis has not reported on.
    fn new(tags: u128, at: Instant) -> Self {
        Self {
            tags,
            states: SmallVec::new(),
            last_report: None,
            share: UsedShare { hits: 0, start: at, end: at },
            leases: SmallVec::new(),
            demand: Demand::new(at),
            requested_ahead: None,
            used: at,
        }
    }

    /// Returns true if the entry belongs to these limits, and not to others of the path.
    const fn belongs_to(&self, id: DescriptorId) -> bool {
        self.tags == id.tags
    }

    /// Takes the entry over from other limits of the path, which a reload or an override replaced; returns false while
    /// it has leases of these. The share that they used counts as used, for at least a period of the new limits.
    fn switch_descriptor(&mut self, id: DescriptorId, budget: &LocalBudget, at: Instant) -> bool {
        if !self.leases.is_empty() {
            return false;
        }
        let UsedShare { hits, start, end } = self.share;
        let new = Self::new(id.tags, at);
        let share = match at < end {
            true => UsedShare { hits, start, end: end.max(start + Duration::from_micros(budget.period_us)) },
            false => new.share,
        };
        *self = Self { share, demand: self.demand, ..new };
        true
    }

    /// Returns true if the entry can be dropped: no leases, no used share, not used for a while.
    fn is_droppable(&self, at: Instant) -> bool {
        self.leases.is_empty() && at >= self.share.end && at >= self.used + IDLE_TIME
    }

    /// Admits hits from a lease; `None` if no lease has enough.
    fn admit_from_lease(&mut self, hits: u64, charge: &OwnedCharge, context: AdmitContext) -> Option<ChargeResults> {
        let lease = self.leases.iter_mut().find(|lease| context.at < lease.end && lease.left >= hits)?;
        lease.left -= hits;
        self.used = context.at;
        let mut results = self.charge_known_states(charge, context);
        // The hits were charged already, whatever Redis has reported since.
        for (result, counter) in results.iter_mut().zip(&charge.counters) {
            if !counter.shadow && !result.admitted {
                *result = ChargeResult {
                    admitted: true,
                    after: result.before.saturating_add(hits),
                    retry_after_us: None,
                    ..*result
                };
            }
        }
        Some(results)
    }

    /// Admits hits from the share; `None` if it has too few left, or if the reported states reject the charge.
    fn admit_from_share(
        &mut self,
        hits: u64,
        charge: &OwnedCharge,
        budget: &LocalBudget,
        context: AdmitContext,
    ) -> Option<ChargeResults> {
        let is_new_period = context.at >= self.share.end;
        let used = if is_new_period { 0 } else { self.share.hits };
        if used + hits > budget.share {
            return None;
        }
        if self.states.len() != charge.counters.len() {
            self.states = charge.counters.iter().map(|counter| State::empty(counter.limit.counting_method())).collect();
        }
        let results = self.charge_known_states(charge, context);
        let passes = results.iter().zip(&charge.counters).all(|(result, counter)| result.admitted || counter.shadow);
        passes.then(|| {
            if is_new_period {
                let end = context.at + Duration::from_micros(budget.period_us);
                self.share = UsedShare { hits: 0, start: context.at, end };
            }
            self.share.hits = used + hits;
            self.used = context.at;
            results
        })
    }

    /// Charges the states known here: all of them or, if one rejects, none. Quotas reject for all too, so that their
    /// hits come from the share and leases.
    fn charge_known_states(&mut self, charge: &OwnedCharge, context: AdmitContext) -> ChargeResults {
        let now = self.latest_possible_redis_time(context.at).unwrap_or(context.now);
        let request = ChargeRequest { max_delay_us: 0, ..charge.request };
        let limits =
            charge.counters.iter().map(|counter| JointLimit { limit: &counter.limit, rejects_others: !counter.shadow });
        let limits: SmallVec<[JointLimit<'_>; 1]> = limits.collect();
        charge_together(&limits, &mut self.states, now, request)
    }

    /// Returns an upper bound on the time of Redis at `at`; `None` before the first report.
    fn latest_possible_redis_time(&self, at: Instant) -> Option<Time> {
        let LastReportTimes { sent, now } = self.last_report?;
        Some(now.plus_us(to_micros(at.saturating_duration_since(sent))))
    }

    /// Returns true if it is time to request the next lease: there is demand, and the current lease is half used or
    /// nearly over. Returns true once per request.
    fn begin_lease_request_if_due(&mut self, budget: &LocalBudget, at: Instant) -> bool {
        if self.leases.len() >= MAX_LEASES_PER_DESCRIPTOR
            || self.requested_ahead.is_some_and(|when| at < when + NEXT_LEASE_RETRY_INTERVAL)
        {
            return false;
        }
        let [lease] = &*self.leases else { return false };
        let ends_soon = lease.end.saturating_duration_since(at) < Duration::from_micros(budget.life_us / 4);
        if lease.left > lease.granted / 2 && !ends_soon || self.demand.predict(budget.life_us, at) < 2 {
            return false;
        }
        self.requested_ahead = Some(at);
        true
    }

    /// Returns the number of hits to lease now; `live` replicas share what is left of the limit.
    ///
    /// A lease covers the demand that is expected while it lives, less what the current leases still cover. Hits that
    /// lie unused in a lease are missing to other replicas, so it has at most a quarter of what is left for each live
    /// replica: leases get smaller towards the limit. It has at least the hits of one charge, if so many are left.
    fn hits_to_lease(&mut self, descriptor: &EventualDescriptor, at: Instant, live: u64) -> u64 {
        let EventualDescriptor { budget, counters, .. } = descriptor;
        if budget.life_us == 0 || self.leases.len() >= MAX_LEASES_PER_DESCRIPTOR || self.states.len() != counters.len()
        {
            return 0;
        }
        let Some(now) = self.latest_possible_redis_time(at) else { return 0 };
        let peek = ChargeRequest::new(Hits::Peek, 0);
        let remaining =
            counters.iter().zip(&self.states).map(|(OwnedCounter { limit, shadow, .. }, state)| match shadow {
                true => u64::MAX,
                false => state.clone().charge(limit, now, peek).remaining,
            });
        let outstanding: u64 = self.leases.iter().map(|lease| lease.left).sum();
        let room = remaining.min().unwrap_or(0).saturating_sub(outstanding);
        let available: u64 = self.leases.iter().filter(|lease| at < lease.end).map(|lease| lease.left).sum();
        let life_us = descriptor.lease_life_us(&self.states, now);
        let span_us = descriptor.lease_demand_span_us(life_us);
        let wanted = self.demand.predict(span_us, at).saturating_sub(available);
        // Round down to whole charges of the last size: a remainder could not be used.
        let charge_hits = self.demand.last_hits.max(1);
        let size = wanted.min((room / (4 * live.max(1))).max(charge_hits)).min(room);
        size / charge_hits * charge_hits
    }

    /// Records a report of Redis, and the lease that came with it. The report that was sent last wins.
    fn record_report(&mut self, counters: &[OwnedCounter], report: DescriptorStateReport, ticket: Option<LeaseTicket>) {
        self.requested_ahead = None;
        self.used = self.used.max(report.sent);
        if self.last_report.is_none_or(|last| last.sent <= report.sent) {
            self.last_report = Some(LastReportTimes { sent: report.sent, now: report.now });
            self.states = report.states;
            // Leased hits are counted here when they are admitted.
            if report.leased > 0 {
                for (OwnedCounter { limit, .. }, state) in counters.iter().zip(&mut self.states) {
                    state.charge(limit, report.now, ChargeRequest::new(Hits::Refund(report.leased), 0));
                }
            }
        }
        if let Some(LeaseTicket { serial, end, recorded, .. }) = ticket {
            self.leases.push(Lease { serial, granted: report.leased, left: report.leased, end, recorded });
        }
    }

    /// Ends a lease; returns its unused hits.
    fn end_lease(&mut self, serial: u64) -> u64 {
        let Some(index) = self.leases.iter().position(|lease| lease.serial == serial) else { return 0 };
        self.leases.remove(index).left
    }

    /// Returns the current leases, and how many of their hits were admitted.
    fn own_leases(&self) -> SmallVec<[OwnLease; MAX_LEASES_PER_DESCRIPTOR]> {
        self.leases.iter().map(|lease| OwnLease { lease: lease.recorded, done: lease.granted - lease.left }).collect()
    }

    /// Ends all leases before a reset, and forgets the reported states; returns the leases.
    fn reset(&mut self) -> SmallVec<[OwnLease; MAX_LEASES_PER_DESCRIPTOR]> {
        self.states.clear();
        self.last_report = None;
        self.leases.drain(..).map(|lease| OwnLease { lease: lease.recorded, done: lease.granted }).collect()
    }
}

/// Length of the intervals in which demand is counted.
const DEMAND_INTERVAL: Duration = Duration::from_millis(100);

/// Demand of a descriptor: hits requested in this interval and in the previous one.
///
/// The first charge of an interval is not counted: a single charge does not predict another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    interval_start: Instant,
    /// Hits of the last charge.
    last_hits: u64,
    interval_is_new: bool,
    hits: u64,
    previous_hits: u64,
}

impl Demand {
    /// No demand yet.
    pub(super) const fn new(at: Instant) -> Self {
        Self { interval_start: at, last_hits: 0, interval_is_new: true, hits: 0, previous_hits: 0 }
    }

    /// Counts the hits of a charge.
    fn record_hits(&mut self, hits: u64, at: Instant) {
        self.advance_interval(at);
        self.last_hits = hits;
        if !std::mem::take(&mut self.interval_is_new) {
            self.hits = self.hits.saturating_add(hits);
        }
    }

    /// Predicts the hits of the next `span_us` microseconds, if demand stays the same.
    fn predict(&mut self, span_us: u64, at: Instant) -> u64 {
        self.advance_interval(at);
        let max_hits = u128::from(self.hits.max(self.previous_hits));
        u64::try_from(max_hits * u128::from(span_us) / DEMAND_INTERVAL.as_micros()).unwrap_or(u64::MAX)
    }

    fn advance_interval(&mut self, at: Instant) {
        let passed = at.saturating_duration_since(self.interval_start);
        if passed >= DEMAND_INTERVAL {
            self.previous_hits = if passed < 2 * DEMAND_INTERVAL { self.hits } else { 0 };
            (self.interval_start, self.interval_is_new, self.hits) = (at, true, 0);
        }
    }
}
