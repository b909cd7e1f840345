//! Table of the eventual descriptors of this process, bounded in memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::budget::{DescriptorId, EventualDescriptor};
use super::entry::EventualEntry;
use crate::base::clock::Time;
use crate::base::sharded::{DEFAULT_SHARDS, PrehashedMap, Sharded, upper_half};
use crate::limit::request::Hits;
use crate::store::charge::{ChargeResults, DecidedBy, OwnedCharge, StoreOutcome};
use crate::store::redis::eventual::{AdmitContext, CallReport, LeaseTicket, LocalDecision};
use crate::store::redis::lease_arguments::OwnLease;
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
    leased: AtomicU64,
    lent: AtomicU64,
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
                self.counts.leased.fetch_add(hits, Ordering::Relaxed);
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
    pub fn record_report(&self, descriptor: &EventualDescriptor, report: CallReport) -> Option<LeaseTicket> {
        let &EventualDescriptor { id, ref budget, ref counters } = descriptor;
        let mut shard = self.shards.lock_shard(upper_half(id.path));
        let (sent, leased) = (report.sent, report.leased);
        let ticket = (leased > 0).then(|| {
            self.counts.lent.fetch_add(leased, Ordering::Relaxed);
            budget.issue_ticket(self.next_serial.fetch_add(1, Ordering::Relaxed), counters, &report)
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
        let EventualHitCounts { shared, leased, lent, returned } = &self.counts;
        EventualHitTotals { shared: read(shared), leased: read(leased), lent: read(lent), returned: read(returned) }
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
