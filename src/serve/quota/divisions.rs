//! The divisions of all keys, and what is held of their counters in the store.
//!
//! A key has one call to the store in flight at most; what is used meanwhile goes with the next one. A key without
//! holders gives back what it holds, once no assignment can be in use any more, and is forgotten then.
//!
//! Decides: how many proxies may share a key (`MAX_HOLDERS_PER_KEY`).
//! Decides: when a proxy is told before its report (something becomes free).
//! Decides: what is held of a counter for proxies, also while the store fails.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use futures_util::StreamExt as _;
use futures_util::stream;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::room::leaves_room_for_other_clients;
use super::stats::Count;
use super::stream_handle::StreamHandle;
use crate::base::clock::Time;
use crate::base::sharded::{DEFAULT_SHARDS, Sharded, lock_ignoring_poison, upper_half};
use crate::decide::quota_buckets::BucketCounters;
use crate::limit::StoreFailurePolicy;
use crate::limit::charge::Charge;
use crate::limit::division::assignment::{Assignment, Retirement, Strategy};
use crate::limit::division::divided_limit::DividedLimit;
use crate::limit::division::holder::Usage;
use crate::limit::division::ledger::{Division, RATE_TTL_S};
use crate::limit::hold::{HoldAnswer, HoldRequest, PoolId};
use crate::serve::grpc::service::RateLimitService;
use crate::store::StoreContext;

/// Calls to the store that are in flight for one stream, or for all keys that are due.
const MAX_CALLS_IN_FLIGHT: usize = 128;
/// Maximum number of proxies that share a key at one replica: each report looks at all of them.
pub(super) const MAX_HOLDERS_PER_KEY: usize = 1000;
/// Time after the end of a window at which it is looked at, so that the store's clock has passed it too.
const WINDOW_END_DELAY_US: u64 = 20_000;

/// A holder of a key: a bucket of a stream.
#[derive(Clone, Debug)]
pub(super) struct BucketOfStream {
    pub(super) stream: Arc<StreamHandle>,
    pub(super) bucket: u32,
}

impl BucketOfStream {
    fn is_same(&self, other: &Self) -> bool {
        self.bucket == other.bucket && self.stream.id == other.stream.id
    }
}

/// All divisions.
#[derive(Debug)]
pub(super) struct Divisions {
    service: Arc<RateLimitService>,
    /// Base of the identities of this replica's pools at the counters.
    pool: PoolId,
    /// Requests to the store that failed.
    pub(super) store_failures: Count,
    keys: Sharded<HashMap<u128, KeyDivision>>,
    /// Keys by the time at which something becomes free, or a window ends.
    wakes: Mutex<BTreeMap<Time, Vec<u128>>>,
}

/// The division of one key.
#[derive(Debug)]
pub(super) struct KeyDivision {
    pub(super) division: Division<BucketOfStream>,
    pub(super) counters: Arc<BucketCounters>,
    wakes_at: Option<Time>,
    /// A call to the store is in flight.
    is_asking: bool,
    /// Holders came while the store was asked.
    has_waiting_holders: bool,
    /// The last call failed.
    pub(super) has_failed: bool,
    /// What is held is held of the fallback counters.
    is_local: bool,
}

/// Key of the division of these counters.
pub(super) fn division_key(counters: &BucketCounters) -> u128 {
    counters.counters.iter().fold(counters.path_hash, |key, counter| key.rotate_left(1) ^ counter.tag)
}

impl Divisions {
    /// No divisions yet, of a process with this service.
    pub(super) fn new(service: Arc<RateLimitService>) -> Self {
        Self {
            service,
            pool: PoolId::random(),
            store_failures: Count::default(),
            keys: Sharded::new(DEFAULT_SHARDS, HashMap::default),
            wakes: Mutex::default(),
        }
    }

    /// Passes the division of a key to `read`.
    pub(super) fn with<T>(&self, key: u128, read: impl FnOnce(&mut KeyDivision) -> T) -> Option<T> {
        self.keys.lock_shard(upper_half(key)).get_mut(&key).map(read)
    }

    /// Passes each division to `read`.
    pub(super) fn for_each(&self, mut read: impl FnMut(&KeyDivision)) {
        for shard in self.keys.lock_each() {
            shard.values().for_each(&mut read);
        }
    }

    /// Number of keys.
    pub(super) fn count(&self) -> usize {
        self.keys.lock_each().map(|shard| shard.len()).sum()
    }

    /// Adds a holder, if it is not there; limits of the same counters replace those of the division.
    /// Returns false if there is no room for it.
    pub(super) fn join(&self, key: u128, counters: BucketCounters, holder: BucketOfStream, now: Time) -> bool {
        let mut shard = self.keys.lock_shard(upper_half(key));
        let entry = match shard.entry(key) {
            Entry::Vacant(vacant) => {
                self.service.decider.store.decision_demand.watch(counters.path_hash);
                vacant.insert(KeyDivision::new(counters, now))
            }
            Entry::Occupied(occupied) => {
                let entry = occupied.into_mut();
                if *entry.counters != counters {
                    let limits = counters.counters.iter().map(|counter| DividedLimit::new(&counter.limit));
                    entry.division.change_limits(limits);
                    entry.counters = Arc::new(counters);
                }
                entry
            }
        };
        if entry.find(&holder).is_none() {
            let (keeps_ratio, client) = (holder.stream.keeps_ratio, holder.stream.client);
            let holders = &entry.division.holders;
            let of_client = holders.iter().filter(|other| other.key.stream.client == client).count();
            if !leaves_room_for_other_clients(of_client, holders.len(), MAX_HOLDERS_PER_KEY) {
                return false;
            }
            entry.division.join(holder, keeps_ratio, now);
        }
        true
    }

    /// Records that the proxy of a holder that just joined may have an assignment of other counters.
    pub(super) fn note_assignment_of_former_key(&self, key: u128, holder: &BucketOfStream) {
        self.with(key, |entry| {
            if let Some(index) = entry.find(holder) {
                entry.division.holders[index].has_unknown_assignment = true;
            }
        });
    }

    /// Removes a holder.
    pub(super) fn leave(&self, key: u128, holder: &BucketOfStream, now: Time) {
        self.with(key, |entry| {
            if let Some(index) = entry.find(holder) {
                entry.division.leave(index, now);
            }
        });
        self.wake_at(key, now);
    }

    /// Records a report; returns the hits beyond what was assigned.
    pub(super) fn record_report(&self, key: u128, holder: &BucketOfStream, usage: Usage, now: Time) -> u64 {
        let report = |entry: &mut KeyDivision| {
            let index = entry.find(holder)?;
            Some(entry.division.record_report(index, usage, now))
        };
        self.with(key, report).flatten().unwrap_or(0)
    }

    /// Records the acknowledgement of a PING.
    pub(super) fn record_ping_ack(&self, key: u128, holder: &BucketOfStream, sent_before: Time, now: Time) {
        self.with(key, |entry| {
            if let Some(index) = entry.find(holder) {
                entry.division.record_ping_ack(index, sent_before, now);
            }
        });
        self.schedule(key, now);
    }

    /// Returns what to tell a holder.
    pub(super) fn assign(&self, key: u128, holder: &BucketOfStream, now: Time) -> Option<Assignment> {
        let assignment = self.with(key, |entry| {
            let index = entry.find(holder)?;
            if entry.has_failed && !entry.is_local && entry.is_hold_ending(now) {
                let strategy = match entry.counters.strictest_failure_policy() {
                    StoreFailurePolicy::Allow => Strategy::Allow,
                    StoreFailurePolicy::Deny => Strategy::Deny,
                    StoreFailurePolicy::Error | StoreFailurePolicy::Local => return None,
                };
                return entry.division.assign_blanket(index, strategy, RATE_TTL_S, now);
            }
            entry.division.assign(index, now)
        });
        self.schedule(key, now);
        assignment.flatten()
    }

    /// Takes back what an idle holder has, step by step.
    pub(super) fn retire(&self, key: u128, holder: &BucketOfStream, now: Time) -> Retirement {
        let retire = |entry: &mut KeyDivision| Some(entry.division.retire(entry.find(holder)?, now));
        self.with(key, retire).flatten().unwrap_or(Retirement::Done)
    }

    /// Tells the store what was used of each of these keys, and asks for what their pools want.
    pub(super) async fn settle_keys_with_store(&self, keys: impl IntoIterator<Item = u128>) {
        stream::iter(keys).for_each_concurrent(MAX_CALLS_IN_FLIGHT, |key| self.settle(key)).await;
    }

    /// Tells the store what was used of a key, and asks for what its pools want.
    pub(super) async fn settle(&self, key: u128) {
        let now = self.service.clock.now();
        let decision_demand = &self.service.decider.store.decision_demand;
        let begin = |entry: &mut KeyDivision| {
            entry.division.expire(now);
            entry.division.record_decision_demand(decision_demand.take_hits(entry.counters.path_hash), now);
            if entry.is_asking {
                entry.has_waiting_holders = true;
                return None;
            }
            let requests: SmallVec<[(usize, HoldRequest); 1]> = (0..entry.division.pools.len())
                .filter_map(|index| Some((index, entry.division.next_pool_request(index, now)?)))
                .collect();
            entry.is_asking = !requests.is_empty();
            Some((requests, Arc::clone(&entry.counters)))
        };
        let Some(Some((requests, counters))) = self.with(key, begin) else { return };
        for (index, request) in requests {
            // The hold began before the answer came.
            let asked = self.service.clock.now();
            let answer = self.adjust_hold(&counters, index, &request).await;
            let answered = self.service.clock.now();
            self.with(key, |entry| entry.take_answer(index, &request, answer, StoreCallTimes { asked, answered }));
        }
        self.with(key, |entry| {
            entry.is_asking = false;
            if std::mem::take(&mut entry.has_waiting_holders) {
                entry.wake_waiting_holders();
            }
            entry.wake_holders_to_tell(self.service.clock.now());
        });
        self.schedule(key, now);
        self.forget_if_empty(key);
    }

    fn forget_if_empty(&self, key: u128) {
        let mut shard = self.keys.lock_shard(upper_half(key));
        if shard.get(&key).is_some_and(|entry| entry.division.is_empty() && !entry.is_asking)
            && let Some(entry) = shard.remove(&key)
        {
            self.service.decider.store.decision_demand.unwatch(entry.counters.path_hash);
        }
    }

    /// Looks at a key again when something becomes free.
    fn schedule(&self, key: u128, now: Time) {
        let next = self.with(key, |entry| {
            let next = entry.division.next_event(now)?.plus_us(WINDOW_END_DELAY_US);
            let is_earlier = entry.wakes_at.is_none_or(|at| next < at || at <= now);
            is_earlier.then(|| *entry.wakes_at.insert(next))
        });
        if let Some(Some(next)) = next {
            self.wake_at(key, next);
        }
    }

    fn wake_at(&self, key: u128, at: Time) {
        lock_ignoring_poison(&self.wakes).entry(at).or_default().push(key);
    }

    /// Settles the keys that are due, and makes their streams look at them.
    pub(super) async fn settle_and_wake_due_keys(&self, now: Time) {
        let due = {
            let mut wakes = lock_ignoring_poison(&self.wakes);
            let later = wakes.split_off(&now.plus_us(1));
            std::mem::replace(&mut *wakes, later)
        };
        if due.is_empty() {
            return;
        }
        let mut keys: Vec<u128> = due.into_values().flatten().collect();
        keys.sort_unstable();
        keys.dedup();
        let wake = |key| async move {
            self.with(key, |entry| entry.wakes_at = None);
            self.settle(key).await;
            self.with(key, |entry| {
                for holder in &entry.division.holders {
                    holder.key.stream.mark_due(holder.key.bucket);
                }
            });
        };
        stream::iter(keys).for_each_concurrent(MAX_CALLS_IN_FLIGHT, wake).await;
    }
}

impl KeyDivision {
    fn new(counters: BucketCounters, now: Time) -> Self {
        let limits = counters.counters.iter().map(|counter| DividedLimit::new(&counter.limit));
        Self {
            division: Division::new(limits, now),
            counters: Arc::new(counters),
            wakes_at: None,
            is_asking: false,
            has_waiting_holders: false,
            has_failed: false,
            is_local: false,
        }
    }

    fn find(&self, holder: &BucketOfStream) -> Option<usize> {
        self.division.holders.iter().position(|other| other.key.is_same(holder))
    }

    /// True if the hold of a pool has ended, or ends within 3 s: too soon to assign from it.
    fn is_hold_ending(&self, now: Time) -> bool {
        self.division.pools.iter().any(|pool| pool.hits.until.since_us(now) < 3_000_000)
    }

    /// Makes the streams look at holders that have nothing, or too little.
    fn wake_waiting_holders(&self) {
        for holder in self.division.holders.iter().filter(|holder| holder.is_waiting()) {
            holder.key.stream.mark_due(holder.key.bucket);
        }
    }

    /// Makes the streams look at holders that must be told something, and did not report now.
    fn wake_holders_to_tell(&mut self, now: Time) {
        for index in self.division.find_holders_to_tell(now) {
            let holder = &self.division.holders[index];
            holder.key.stream.mark_due(holder.key.bucket);
        }
    }

    fn take_answer(&mut self, index: usize, request: &HoldRequest, answer: HoldOutcome, times: StoreCallTimes) {
        let StoreCallTimes { asked, answered: now } = times;
        self.has_failed = matches!(answer, HoldOutcome::Failed | HoldOutcome::HeldLocally(_));
        match answer {
            HoldOutcome::Held(answer) => {
                self.is_local = false;
                self.division.record_answer(index, request, answer.with_times_by_clock_at(now), asked);
            }
            // What the store gave before lasts until its end.
            HoldOutcome::HeldLocally(_) if !self.is_hold_ending(now) && !self.is_local => {
                self.division.record_unanswered_request(index, request);
            }
            HoldOutcome::HeldLocally(answer) => {
                self.is_local = true;
                self.division.record_answer(index, request, answer.with_times_by_clock_at(now), asked);
            }
            HoldOutcome::Failed => self.division.record_unanswered_request(index, request),
        }
    }
}

/// Times of a request to the store.
#[derive(Clone, Copy)]
struct StoreCallTimes {
    /// It was sent.
    asked: Time,
    /// Its answer came.
    answered: Time,
}

/// Outcome of a request to the store.
#[derive(Debug)]
enum HoldOutcome {
    /// The store answered.
    Held(HoldAnswer),
    /// The store failed, and the fallback counters of this process answered.
    HeldLocally(HoldAnswer),
    /// The store failed.
    Failed,
}

impl Divisions {
    /// Changes what this replica holds of a counter.
    async fn adjust_hold(&self, counters: &BucketCounters, index: usize, request: &HoldRequest) -> HoldOutcome {
        let store = &self.service.decider.store;
        // A counter may be in several divisions, each with a pool of its own.
        let pool = self.pool.with_purpose(division_key(counters));
        let now = self.service.clock.now();
        let deadline = Instant::now() + store.timeout();
        let context = StoreContext { now, deadline: Some(deadline), span_ref: None, charge_times: &[] };
        let answer = counters.call_with_charge(index, |charge| store.adjust_hold(charge, pool, *request, context));
        let Some(answer) = answer else { return HoldOutcome::Failed };
        match answer.await {
            Ok(answer) => HoldOutcome::Held(answer),
            Err(_) => {
                self.store_failures.add(1);
                if counters.strictest_failure_policy() != StoreFailurePolicy::Local {
                    return HoldOutcome::Failed;
                }
                let ask = |charge: &Charge<'_>| store.adjust_fallback_hold(charge, pool, *request, now);
                match counters.call_with_charge(index, ask) {
                    Some(Ok(answer)) => HoldOutcome::HeldLocally(answer),
                    Some(Err(_)) | None => HoldOutcome::Failed,
                }
            }
        }
    }
}
