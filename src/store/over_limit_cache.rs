//! Cache of rejections: a counter known to be over its limit is rejected here, without a call to Redis.
//!
//! A counter over its limit stays so until hits expire or are refunded. The rejection says when hits expire (its
//! `retry_after`). A refund through another replica is not visible here, so an entry is valid for at most 1 s from the
//! moment its call was *sent*. An entry applies only to charges that it implies are rejected too: same counters and
//! limits, at least as many hits, no longer delay; and only if the entry tells when they could pass. Peeks, refunds and
//! dry runs always go to Redis, and a refund through this process removes the entry.
//!
//! Only rejections are cached: a stale entry rejects for up to 1 s, and never admits. A rejection given here is not
//! counted in Redis, so counters whose rejected hits count (by default those of fixed windows) are not cached, unless
//! `LOCAL_CACHE_SIZE_IN_BYTES` asks for it; then only those whose rejections end at a fixed time. Of counters
//! with a ban, only bans are cached that no try prolongs. Rejections of held counters are not cached. A full cache
//! drops what has expired, else the new entry; an entry takes about 300 bytes. Reads no clock; callers pass the time.
//!
//! Decides: what is rejected without asking Redis, and for how long; what `LOCAL_CACHE_SIZE_IN_BYTES` changes.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::charge::{ChargeResults, OwnedCharge, OwnedCounter};
use crate::base::clock::to_micros;
use crate::base::sharded::{DEFAULT_SHARDS, PrehashedMap, Sharded, upper_half};
use crate::limit::algorithm::state::State;
use crate::limit::charge::{ChargeRequest, ChargeResult};
use crate::limit::overflow::ChainPosition;
use crate::limit::request::Hits;

/// Longest validity of an entry.
pub const MAX_VALIDITY: Duration = Duration::from_secs(1);
/// Smallest capacity, so that each shard has room for some entries.
const MIN_CAPACITY_BYTES: usize = 128 << 10;
/// Shortest time between two searches of a full shard for expired entries.
const EVICTION_INTERVAL_US: u64 = 50_000;

/// Valid rejections, by the hash of their counters.
#[derive(Debug)]
pub struct OverLimitCache {
    /// `None` if the cache is off.
    shards: Option<Sharded<CacheShard>>,
    max_shard_bytes: usize,
    /// True if counters whose rejected hits count are cached too.
    cache_counted: bool,
    /// Origin of all times in the cache.
    origin: Instant,
    /// Number of entries: while it is 0, no lock is taken.
    entries: AtomicUsize,
    rejected: AtomicU64,
}

/// Times of a call.
#[derive(Clone, Copy, Debug)]
pub struct CallTimes {
    /// Time of sending.
    pub sent: Instant,
    /// Arrival of its reply.
    pub answered: Instant,
}

#[derive(Debug, Default)]
struct CacheShard {
    rejections: PrehashedMap<CachedRejection>,
    bytes: usize,
    evicted_us: u64,
}

#[derive(Debug)]
struct CachedRejection {
    /// Time at which the results were right.
    at_us: u64,
    /// Time at which the entry expires.
    end_us: u64,
    hits: u64,
    max_delay_us: u64,
    limits: Box<[CachedLimitResult]>,
}

#[derive(Debug)]
struct CachedLimitResult {
    counter: OwnedCounter,
    result: ChargeResult,
}

impl OverLimitCache {
    /// Creates an empty cache of about `capacity_bytes`, at least 128 KiB; 0: the cache is off. `cache_counted`: cache
    /// counters whose rejected hits count too, as far as their rejections end at a fixed time.
    pub fn new(capacity_bytes: usize, cache_counted: bool, origin: Instant) -> Self {
        Self {
            shards: (capacity_bytes > 0).then(|| Sharded::new(DEFAULT_SHARDS, CacheShard::default)),
            max_shard_bytes: capacity_bytes.max(MIN_CAPACITY_BYTES) / DEFAULT_SHARDS,
            cache_counted,
            origin,
            entries: AtomicUsize::new(0),
            rejected: AtomicU64::new(0),
        }
    }

    /// Returns the result of each of these charges if all are equal and known to be rejected, with times relative to
    /// `now`. `id` is the hash of their counters.
    pub fn find_rejection(&self, id: u128, charges: &[OwnedCharge], now: Instant) -> Option<ChargeResults> {
        if self.entry_count() == 0 {
            return None;
        }
        let now_us = self.micros_since_origin(now);
        let mut shard = self.shards.as_ref()?.lock_shard(upper_half(id));
        let rejection = shard.rejections.get(&id)?;
        if rejection.end_us <= now_us {
            self.remove_from_shard(&mut shard, id);
            return None;
        }
        let (first, others) = charges.split_first()?;
        if others.iter().any(|charge| charge != first) {
            return None;
        }
        let results = rejection.derive_rejection(first, now_us)?;
        self.rejected.fetch_add(charges.len() as u64, Ordering::Relaxed);
        Some(results)
    }

    /// Updates the cache from the results of a call's charges. The last rejection replaces an older one; an admitted
    /// charge or a refund after it removes the entry.
    pub fn record_results(&self, id: u128, charges: &[OwnedCharge], results: &[ChargeResults], times: CallTimes) {
        if self.shards.is_none() {
            return;
        }
        for (charge, results) in charges.iter().zip(results).rev() {
            match (charge.request.hits, results_reject_descriptor(charge, results)) {
                (Hits::Charge(_), true) if !charge.dry_run => {
                    return self.insert_if_cacheable(id, charge, results, times);
                }
                // A dry run too: it shows that an older rejection no longer holds.
                (Hits::Charge(_), false) | (Hits::Refund(_), _) => return self.remove(id),
                (Hits::Charge(_) | Hits::Peek, _) => {}
            }
        }
    }

    /// Removes expired entries from one of `parts` equal parts of the cache: the part with index `part`.
    pub fn sweep(&self, now: Instant, part: usize, parts: usize) {
        if let Some(shards) = self.shards.as_ref().filter(|_| self.entry_count() > 0) {
            let now_us = self.micros_since_origin(now);
            shards.lock_each_of_part(part, parts).for_each(|mut shard| self.evict_expired(&mut shard, now_us));
        }
    }

    /// Returns the number of entries, expired ones included.
    pub fn entry_count(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    /// Returns the number of charges rejected here since the start.
    pub fn rejected_charge_count(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    /// Removes the rejection of a counter that has changed.
    pub fn remove(&self, id: u128) {
        if let Some(shards) = self.shards.as_ref().filter(|_| self.entry_count() > 0) {
            self.remove_from_shard(&mut shards.lock_shard(upper_half(id)), id);
        }
    }

    fn insert_if_cacheable(&self, id: u128, charge: &OwnedCharge, results: &ChargeResults, times: CallTimes) {
        let Hits::Charge(hits) = charge.request.hits else { return };
        let is_cacheable = |(counter, result): (&OwnedCounter, &ChargeResult)| {
            let limit = &counter.limit;
            // The store counts the rejections before a ban, and those that prolong it.
            if limit.ban().is_some() && !result.admitted {
                return result.ban_left_us > 0 && !limit.counts_rejected_hits();
            }
            // Only of one hit the wait of a chain is exact.
            if limit.chain_position() != ChainPosition::NotInChain && hits > 1 {
                return false;
            }
            // Any release may end the rejection of a concurrent limit, or of one with reservations.
            if limit.follows_streams() {
                return false;
            }
            // The next grant may end the rejection of a global limit at any time.
            !limit.is_counted_in_region()
                && (!limit.counts_rejected_hits()
                    || self.cache_counted && limit.algorithm().properties().rejection_end_is_fixed)
        };
        if !charge.counters.iter().zip(results).all(is_cacheable) {
            return;
        }
        // The results are wrong as soon as one of the rejecting limits could admit the charge.
        let waits = results.iter().filter(|result| !result.admitted).filter_map(|result| result.retry_after_us);
        let validity_us = waits.fold(to_micros(MAX_VALIDITY), u64::min);
        let (at_us, end_us) = (
            self.micros_since_origin(times.answered),
            self.micros_since_origin(times.sent).saturating_add(validity_us),
        );
        if end_us <= at_us {
            return;
        }
        let limits = charge.counters.iter().zip(results);
        let limits = limits.map(|(counter, result)| CachedLimitResult { counter: *counter, result: *result }).collect();
        let rejection = CachedRejection { at_us, end_us, hits, max_delay_us: charge.request.max_delay_us, limits };
        let Some(shards) = &self.shards else { return };
        let mut shard = shards.lock_shard(upper_half(id));
        self.remove_from_shard(&mut shard, id);
        let bytes = rejection.memory_bytes();
        let may_evict = shard.evicted_us.saturating_add(EVICTION_INTERVAL_US) <= at_us;
        if shard.bytes + bytes > self.max_shard_bytes && may_evict {
            self.evict_expired(&mut shard, at_us);
        }
        if shard.bytes + bytes <= self.max_shard_bytes {
            shard.bytes += bytes;
            shard.rejections.insert(id, rejection);
            self.entries.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn remove_from_shard(&self, shard: &mut CacheShard, id: u128) {
        if let Some(rejection) = shard.rejections.remove(&id) {
            shard.bytes -= rejection.memory_bytes();
            self.entries.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn evict_expired(&self, shard: &mut CacheShard, now_us: u64) {
        shard.evicted_us = now_us;
        let before = shard.rejections.len();
        let bytes = &mut shard.bytes;
        shard.rejections.retain(|_, rejection| {
            let is_valid = now_us < rejection.end_us;
            *bytes -= if is_valid { 0 } else { rejection.memory_bytes() };
            is_valid
        });
        self.entries.fetch_sub(before - shard.rejections.len(), Ordering::Relaxed);
        if shard.rejections.is_empty() {
            shard.rejections.shrink_to_fit();
        }
    }

    fn micros_since_origin(&self, at: Instant) -> u64 {
        to_micros(at.saturating_duration_since(self.origin))
    }
}

impl CachedRejection {
    /// Returns the results of a charge if this rejection implies that it is rejected too, and when it could pass; times
    /// are reduced by what has passed since.
    fn derive_rejection(&self, charge: &OwnedCharge, now_us: u64) -> Option<ChargeResults> {
        let Hits::Charge(hits) = charge.request.hits else { return None };
        let same_counters = charge.counters.iter().eq(self.limits.iter().map(|limit| &limit.counter));
        if charge.dry_run || !same_counters || hits < self.hits || charge.request.max_delay_us > self.max_delay_us {
            return None;
        }
        let passed_us = now_us.saturating_sub(self.at_us);
        let is_equal = hits == self.hits && charge.request.max_delay_us == self.max_delay_us;
        let request = charge.request_with_bounded_delay();
        let later = |limit: &CachedLimitResult| {
            let result = if is_equal { limit.result } else { limit.derive_result(request)? };
            Some(ChargeResult {
                reset_us: result.reset_us.saturating_sub(passed_us),
                retry_after_us: result.retry_after_us.map(|wait_us| wait_us.saturating_sub(passed_us).max(1)),
                ban_left_us: if result.ban_left_us > 0 {
                    result.ban_left_us.saturating_sub(passed_us).max(1)
                } else {
                    0
                },
                ban_begun: false,
                ..result
            })
        };
        self.limits.iter().map(later).collect()
    }

    /// Returns the approximate memory use: a table entry after growth, and the limits with the allocator's overhead.
    fn memory_bytes(&self) -> usize {
        const TABLE_ENTRY_BYTES: usize = (size_of::<(u128, CachedRejection)>() + 1) * 16 / 7;
        const ALLOCATION_OVERHEAD_BYTES: usize = 16;
        TABLE_ENTRY_BYTES + ALLOCATION_OVERHEAD_BYTES + size_of_val(&*self.limits)
    }
}

impl CachedLimitResult {
    /// Returns the result of a charge of at least the cached hits with at most the cached delay; `None` if it cannot be
    /// known.
    fn derive_result(&self, request: ChargeRequest) -> Option<ChargeResult> {
        let Self { counter: OwnedCounter { limit, .. }, result } = self;
        let Hits::Charge(hits) = request.hits else { return None };
        if result.admitted {
            return (hits <= result.remaining).then_some(*result);
        }
        if limit.chain_position() != ChainPosition::NotInChain {
            return None;
        }
        if result.ban_left_us > 0 {
            // The wait of more hits may be that of the counter.
            return None;
        }
        let never_fits = hits > limit.capacity() || limit.requests_per_unit() == 0;
        let wait_us = if never_fits { None } else { Some(State::derive_wait_from_result_us(limit, result, request)?) };
        Some(ChargeResult { retry_after_us: wait_us, ..*result })
    }
}

/// Returns true if the descriptor rejects the charge and charges no admitted hits: if a limit rejects it that is not a
/// quota, or if all limits that are not in shadow mode do. Beside a quota that rejects alone, the other limits must be
/// charged each time.
fn results_reject_descriptor(charge: &OwnedCharge, results: &ChargeResults) -> bool {
    let mut deciding = charge.counters.iter().zip(results).filter(|(counter, _)| !counter.shadow).peekable();
    deciding.peek().is_some()
        && (deciding.clone().any(|(counter, result)| !counter.quota && !result.admitted)
            || deciding.all(|(_, result)| !result.admitted))
}
