//! Rules that may be eventually consistent: answered from this process, settled with Redis apart from it.
//!
//! A descriptor is eventual if all its limits are; one that has a strict limit besides is decided strictly. The
//! promise: all replicas together admit, in any span of one period, at most what the strict algorithm could admit, and
//! `limit x max_overshoot`. There are two means; whatever neither allows is charged from Redis as a strict rule is.
//!
//! **Share.** A process holds one of R slots (see `replicas.rs`: at no time do two processes hold one, and a new holder
//! uses none of a limit's share before a period after the end of the claim before its own). For a limit it admits
//! `floor(overshoot / 2R)` hits in each of its periods, tumbling from the first of them, and asks nobody. A span of one
//! period meets at most two of those, so a slot gives out 2 x overshoot / 2R in it, and R slots the overshoot. What was
//! used is kept until its period is over; where there is no room to keep it, nothing is given out.
//!
//! **Lease.** n hits are charged in Redis as one charge, by the strict algorithm, and given out here within a short life
//! from the moment at which the charge was *sent*. So at most that many hits are used that were charged, each no earlier
//! than it was charged and no later than a life after. What that adds to a span of one period:
//! - fixed_window, sliding_window_counter: nothing. A lease ends with the window in which it was charged, by the time
//!   of Redis, so each hit is used in the window that has it; and the weight of the last window only falls until then.
//! - sliding_window_log: nothing. The log keeps hits for a period and a life, so hits used within a period were charged
//!   within a period and a life, which hold no more than the limit.
//! - token_bucket: what comes back in a life, `limit x life / period`. A life is at most half of the overshoot's part
//!   of the period, which leaves the other half for shares.
//!
//! **Return.** Hits that were not used go back, void from a time of Redis on.
//! - A window takes them until it ends, so that they leave the count that has them.
//! - A bucket takes them less what may have come back since the charge, `limit x time / period` up to the time from
//!   which on they are void, so that they are still in its level.
//! - A log is given none back. It would forget its newest hits, which may be others', whose place then the older ones
//!   take that were given back; and if these are given back in turn, yet others': from return to return hits would
//!   become older without end. So of a log no more is leased than is surely used.
//!
//! A crash wastes the leases at hand, for the rest of a window or until they have come back; a lost reply likewise.
//!
//! Nothing here asks Redis, and no clock is read: whoever calls does both.

mod demand;
mod entry;
mod terms;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use self::entry::Entry;
pub use self::terms::{LocalBudget, log_beyond_us};
use super::coalescer::IdentityHasher;
use super::command::{ChargeCommand, OwnedCounter};
use crate::algorithm::state::State;
use crate::clock::Time;
use crate::request::Hits;
use crate::sharded::{Sharded, upper_half};
use crate::store::outcome::{ChargeResults, DecidedBy, StoreOutcome};

/// Enough that threads seldom meet.
const SHARDS: usize = 64;
/// What a descriptor takes, table included, in bytes.
const ENTRY_BYTES: usize = 2 * size_of::<Entry>();
/// A full shard is swept no more often.
const SWEPT: Duration = Duration::from_millis(100);
/// The largest lease.
const MOST_LENT: u64 = 1 << 20;

/// What this process knows of eventual descriptors, and may give out.
#[derive(Debug)]
pub struct EventualTable {
    shards: Sharded<Shard>,
    most: usize,
    serials: AtomicU64,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Shard {
    entries: HashMap<u128, Entry, BuildHasherDefault<IdentityHasher>>,
    swept: Option<Instant>,
}

/// How hits were admitted, since the start.
#[derive(Debug, Default)]
struct Counts {
    shared: AtomicU64,
    leased: AtomicU64,
    lent: AtomicU64,
    returned: AtomicU64,
}

/// Hits since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventualStats {
    /// Admitted from shares.
    pub shared: u64,
    /// Admitted from leases.
    pub leased: u64,
    /// Taken on lease.
    pub lent: u64,
    /// Left of leases when they ended.
    pub returned: u64,
}

/// Which descriptor: its path, and its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorId {
    /// The hash of its path.
    pub path: u128,
    /// What tells its set of counters from others of the path.
    pub tags: u128,
}

/// A descriptor whose counters are eventual.
#[derive(Clone, Debug)]
pub struct EventualCounters {
    /// Which.
    pub id: DescriptorId,
    /// What it may do by itself.
    pub terms: LocalBudget,
    /// Its counters.
    pub counters: SmallVec<[OwnedCounter; 1]>,
}

/// What a caller knows when it asks.
#[derive(Clone, Copy, Debug)]
pub struct AdmitContext {
    /// Now.
    pub at: Instant,
    /// About the time of Redis, for descriptors of which nothing was heard.
    pub now: Time,
    /// Whether this process's share may be used.
    pub may_share: bool,
    /// Whether the charge was brought before, and is no new demand.
    pub again: bool,
}

/// What becomes of a charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It passes, and these are its levels.
    Local {
        /// What it finds, as far as that is known here.
        outcome: StoreOutcome,
        /// It is time for the next lease.
        lease_ahead: bool,
    },
    /// Redis is to decide it.
    AskStore,
}

/// What Redis said of a descriptor.
#[derive(Clone, Debug)]
pub struct CallReport {
    /// When it was asked.
    pub sent: Instant,
    /// Its time.
    pub now: Time,
    /// The states after all charges, the lease included.
    pub states: SmallVec<[State; 1]>,
    /// Hits that were charged for a lease.
    pub lent: u64,
}

/// A lease that is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTicket {
    /// Which.
    pub serial: u64,
    /// When nothing more is given out of it.
    pub end: Instant,
    /// From this time of Redis on its return is void; `None`: nothing is given back.
    pub until: Option<Time>,
    /// So many hits fewer than are left are given back.
    pub less: u64,
}

impl EventualTable {
    /// Knows nothing yet; takes about `bytes` of memory at most.
    pub fn new(bytes: usize) -> Self {
        Self {
            shards: Sharded::new(SHARDS, Shard::default),
            most: bytes / ENTRY_BYTES / SHARDS,
            serials: AtomicU64::new(0),
            counts: Counts::default(),
        }
    }

    /// Decides a charge from what this process may give out.
    pub fn admit(&self, lending: &EventualCounters, command: &ChargeCommand, moment: AdmitContext) -> Admission {
        let &EventualCounters { id, ref terms, .. } = lending;
        let Hits::Charge(hits @ 1..) = command.request.hits else { return Admission::AskStore };
        let shares = moment.may_share && hits <= terms.share;
        let mut shard = self.shard(id);
        if let Some(entry) = shard.entries.get_mut(&id.path) {
            if entry.is_of_others(id.tags, moment.at) {
                return Admission::AskStore;
            }
            if !moment.again {
                entry.demand.note(hits, moment.at);
            }
            if let Some(levels) = entry.take_leased(hits, command, moment) {
                self.counts.leased.fetch_add(hits, Ordering::Relaxed);
                let found = StoreOutcome { results: levels, decided_by: DecidedBy::Lease };
                return Admission::Local { outcome: found, lease_ahead: entry.wants_more(terms, moment.at) };
            }
            let levels = if shares { entry.take_shared(hits, command, terms, moment) } else { None };
            return levels.map_or(Admission::AskStore, |levels| self.shared(hits, levels));
        }
        if !(shares && self.has_room(&mut shard, moment.at)) {
            return Admission::AskStore;
        }
        let mut entry = Entry::new(id.tags, moment.at);
        entry.demand.note(hits, moment.at);
        let Some(levels) = entry.take_shared(hits, command, terms, moment) else { return Admission::AskStore };
        shard.entries.insert(id.path, entry);
        self.shared(hits, levels)
    }

    fn shared(&self, hits: u64, levels: ChargeResults) -> Admission {
        self.counts.shared.fetch_add(hits, Ordering::Relaxed);
        Admission::Local { outcome: StoreOutcome { results: levels, decided_by: DecidedBy::Share }, lease_ahead: false }
    }

    /// How many hits to lease with a charge that is about to be sent; `live` processes share what is left. 0: none.
    pub fn lease(&self, lending: &EventualCounters, at: Instant, live: u64) -> u64 {
        let &EventualCounters { id, ref terms, ref counters } = lending;
        let mut shard = self.shard(id);
        let Some(entry) = shard.entries.get_mut(&id.path) else { return 0 };
        if entry.is_of_others(id.tags, at) { 0 } else { entry.lease(counters, terms, at, live).min(MOST_LENT) }
    }

    /// Takes note of what Redis said; the lease, if there is one, is at hand until [`EventualTable::collect`] ends it.
    pub fn heard(&self, lending: &EventualCounters, report: CallReport) -> Option<LeaseTicket> {
        let &EventualCounters { id, ref terms, ref counters } = lending;
        let mut shard = self.shard(id);
        let (sent, lent) = (report.sent, report.lent);
        let lease = (lent > 0).then(|| {
            self.counts.lent.fetch_add(lent, Ordering::Relaxed);
            terms.lent(self.serials.fetch_add(1, Ordering::Relaxed), counters, &report)
        });
        let known = shard.entries.contains_key(&id.path);
        if known || self.has_room(&mut shard, sent) {
            let entry = shard.entries.entry(id.path).or_insert_with(|| Entry::new(id.tags, sent));
            if !entry.is_of_others(id.tags, sent) {
                entry.heard(counters, report, lease);
            }
        }
        lease
    }

    /// Ends a lease; how many hits are left of it.
    pub fn collect(&self, id: DescriptorId, serial: u64) -> u64 {
        let left = self.shard(id).entries.get_mut(&id.path).map_or(0, |entry| entry.collect(serial));
        self.counts.returned.fetch_add(left, Ordering::Relaxed);
        left
    }

    /// Forgets what is no longer wanted in a share of the table: the `turn`th of `turns`.
    pub fn sweep(&self, at: Instant, turn: usize, turns: usize) {
        self.shards.iter_part(turn, turns).for_each(|mut shard| shard.sweep(at));
    }

    /// What was admitted and how, since the start.
    pub fn usage(&self) -> EventualStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counts { shared, leased, lent, returned } = &self.counts;
        EventualStats { shared: read(shared), leased: read(leased), lent: read(lent), returned: read(returned) }
    }

    /// Descriptors that are known.
    pub fn known(&self) -> usize {
        self.shards.iter().map(|shard| shard.entries.len()).sum()
    }

    fn has_room(&self, shard: &mut Shard, at: Instant) -> bool {
        if shard.entries.len() >= self.most && shard.swept.is_none_or(|swept| at >= swept + SWEPT) {
            shard.sweep(at);
        }
        shard.entries.len() < self.most
    }

    fn shard(&self, id: DescriptorId) -> MutexGuard<'_, Shard> {
        self.shards.lock(upper_half(id.path))
    }
}

impl Shard {
    fn sweep(&mut self, at: Instant) {
        self.entries.retain(|_, entry| !entry.is_done(at));
        if self.entries.capacity() > 4 * self.entries.len() {
            self.entries.shrink_to(2 * self.entries.len());
        }
        self.swept = Some(at);
    }
}
