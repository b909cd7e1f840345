//! Registry of the statistics of all limits, by name.
//!
//! Statistics of rules are added when rules load and live until the rules are replaced. Others are named by requests,
//! and so by untrusted clients: limits sent with a request, values that a rule adds to its metric name, unknown
//! domains. A setting bounds these; beyond it, hits are counted under the matched rule or under [`OVERFLOW_NAME`], and
//! the overflow is counted. Series named by requests are removed after an hour without a change.
//!
//! Decides: how many series limits may have; when the series of an unused limit is removed (`MAX_IDLE_SWEEPS`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::limit_stats::{LimitName, LimitStats, MAX_REQUESTED_NAME_BYTES};

/// Name of the series that counts what exceeds the bound: domains, and limits without a rule.
pub const OVERFLOW_NAME: &str = "_other";
/// Number of sweeps without a change after which a series named by requests is removed.
const MAX_IDLE_SWEEPS: u32 = 360;

/// Registry of the statistics of all limits.
#[derive(Debug)]
pub struct LimitRegistry {
    /// By all parts of the name: two names can be equal in statsd, such as those of `a.b` with `c` and `a` with `b.c`.
    rules: RwLock<HashMap<LimitName, Arc<LimitStats>>>,
    requested: RwLock<HashMap<LimitName, StatsNamedByRequest>>,
    unknown_domains: RwLock<HashMap<Box<str>, UnknownDomainCounter>>,
    /// Size of `requested` and `unknown_domains` together; briefly too high while two threads add the same name.
    series: AtomicUsize,
    max_series: usize,
    overflow: AtomicU64,
}

/// Statistics that a request named.
#[derive(Debug)]
struct StatsNamedByRequest {
    stats: Arc<LimitStats>,
    idle: IdleDetector,
}

/// Counter of descriptors for a domain without rules.
#[derive(Debug, Default)]
struct UnknownDomainCounter {
    count: AtomicU64,
    idle: IdleDetector,
}

/// Detects that a count no longer changes.
#[derive(Debug, Default)]
struct IdleDetector {
    last: u64,
    sweeps: u32,
}

impl LimitRegistry {
    /// An empty registry with room for `max_series` series named by requests.
    pub fn new(max_series: usize) -> Self {
        Self {
            rules: RwLock::default(),
            requested: RwLock::default(),
            unknown_domains: RwLock::default(),
            series: AtomicUsize::new(0),
            max_series,
            overflow: AtomicU64::new(0),
        }
    }

    /// Returns the statistics of a rule's limit, adding them if needed.
    pub fn register_rule_limit(&self, name: LimitName) -> Arc<LimitStats> {
        let mut rules = write_lock(&self.rules);
        let entry = rules.entry(name);
        let name = entry.key().clone();
        Arc::clone(entry.or_insert_with(|| Arc::new(LimitStats::new(name))))
    }

    /// Returns the statistics under a name from a request, adding them if there is room; `None` if there is not.
    pub fn register_request_limit(&self, parts: &[&str]) -> Option<Arc<LimitStats>> {
        let Some(name) = LimitName::from_request(parts) else {
            self.overflow.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        if let Some(requested) = read_lock(&self.requested).get(&name) {
            return Some(Arc::clone(&requested.stats));
        }
        // A rule can have the same name.
        if let Some(stats) = read_lock(&self.rules).get(&name) {
            return Some(Arc::clone(stats));
        }
        if !self.has_room_or_count_overflow() {
            return None;
        }
        let mut requested = write_lock(&self.requested);
        let entry = requested.entry(name.clone()).or_insert_with(|| {
            self.series.fetch_add(1, Ordering::Relaxed);
            StatsNamedByRequest { stats: Arc::new(LimitStats::new(name)), idle: IdleDetector::default() }
        });
        Some(Arc::clone(&entry.stats))
    }

    /// Counts a descriptor for a domain without rules.
    pub fn record_unknown_domain(&self, domain: &str) {
        let name = LimitName::new([domain]);
        let name = if name.as_str().len() <= MAX_REQUESTED_NAME_BYTES { name.as_str() } else { OVERFLOW_NAME };
        if self.count_registered_unknown_domain(name) {
            return;
        }
        let name = if self.has_room_or_count_overflow() { name } else { OVERFLOW_NAME };
        // `OVERFLOW_NAME` may exceed the bound by one series.
        if name == OVERFLOW_NAME && self.count_registered_unknown_domain(OVERFLOW_NAME) {
            return;
        }
        let mut unknown = write_lock(&self.unknown_domains);
        let entry = unknown.entry(name.into()).or_insert_with(|| {
            self.series.fetch_add(1, Ordering::Relaxed);
            UnknownDomainCounter::default()
        });
        entry.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a descriptor if its domain is registered as unknown; returns false if it is not.
    fn count_registered_unknown_domain(&self, domain: &str) -> bool {
        let domains = read_lock(&self.unknown_domains);
        domains.get(domain).is_some_and(|unknown| {
            unknown.count.fetch_add(1, Ordering::Relaxed);
            true
        })
    }

    /// True if one more series from a request fits; counts an overflow if not.
    fn has_room_or_count_overflow(&self) -> bool {
        let has_room = self.series.load(Ordering::Relaxed) < self.max_series;
        if !has_room {
            self.overflow.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    /// Returns all statistics by name, those of rules first.
    pub fn all_limit_stats(&self) -> Vec<Arc<LimitStats>> {
        let mut all = self.rule_limit_stats();
        let requested = read_lock(&self.requested).values().map(|requested| Arc::clone(&requested.stats)).collect();
        all.extend(sort_by_name(requested));
        all
    }

    /// Returns the statistics of the limits of rules by name, without those that requests name.
    pub fn rule_limit_stats(&self) -> Vec<Arc<LimitStats>> {
        sort_by_name(read_lock(&self.rules).values().cloned().collect())
    }

    /// Returns the requested domains without rules and the number of their descriptors, by name.
    pub fn unknown_domain_counts(&self) -> Vec<(String, u64)> {
        let unknown = read_lock(&self.unknown_domains);
        let mut domains: Vec<(String, u64)> =
            unknown.iter().map(|(name, unknown)| (name.to_string(), unknown.count.load(Ordering::Relaxed))).collect();
        domains.sort_unstable();
        domains
    }

    /// Number of series named by requests.
    pub fn request_series_count(&self) -> usize {
        self.series.load(Ordering::Relaxed)
    }

    /// Maximum number of series named by requests.
    pub const fn max_request_series(&self) -> usize {
        self.max_series
    }

    /// Number of times that a name from a request got no series: there was no room, or the name was too long.
    pub fn series_overflow_count(&self) -> u64 {
        self.overflow.load(Ordering::Relaxed)
    }

    /// Removes the statistics of removed rules, and unused series named by requests. Called every ten seconds, after
    /// metrics were reported.
    pub fn remove_unused_stats(&self) {
        write_lock(&self.rules).retain(|_, stats| Arc::strong_count(stats) > 1);
        let mut removed = 0;
        write_lock(&self.requested).retain(|_, requested| {
            let stays = requested.idle.record_count_and_is_used(requested.stats.decision_count());
            removed += usize::from(!stays);
            stays
        });
        write_lock(&self.unknown_domains).retain(|_, UnknownDomainCounter { count, idle }| {
            let stays = idle.record_count_and_is_used(count.load(Ordering::Relaxed));
            removed += usize::from(!stays);
            stays
        });
        self.series.fetch_sub(removed, Ordering::Relaxed);
    }
}

impl IdleDetector {
    /// Records the current count; false once it has not changed for [`MAX_IDLE_SWEEPS`].
    fn record_count_and_is_used(&mut self, count: u64) -> bool {
        self.sweeps = if count == self.last { self.sweeps + 1 } else { 0 };
        self.last = count;
        self.sweeps < MAX_IDLE_SWEEPS
    }
}

fn read_lock<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write_lock<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

fn sort_by_name(mut limits: Vec<Arc<LimitStats>>) -> Vec<Arc<LimitStats>> {
    limits.sort_unstable_by(|a, b| a.name().cmp(b.name()));
    limits
}
