//! Registry of the statistics of all limits, by name.
//!
//! Statistics of rules are added when rules load and live until the rules are replaced. Others are named by requests,
//! and so by untrusted clients: limits sent with a request, values that a rule adds to its metric name, unknown
//! domains. A setting bounds these; beyond it, hits are counted under the matched rule or under [`OTHER`], and the
//! overflow is counted. Series named by requests are removed after an hour without a change.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::limit_stats::{LimitName, LimitStats, MAX_NAME_BYTES};

/// Name of the series that counts what exceeds the bound: domains, and limits without a rule.
pub const OTHER: &str = "_other";
/// Number of sweeps without a change after which a series named by requests is removed.
const MAX_IDLE_SWEEPS: u32 = 360;

/// Registry of the statistics of all limits.
#[derive(Debug)]
pub struct LimitRegistry {
    /// By all parts of the name: two names can be equal in statsd, such as those of `a.b` with `c` and `a` with `b.c`.
    rules: RwLock<HashMap<LimitName, Arc<LimitStats>>>,
    requested: RwLock<HashMap<LimitName, RequestedLimit>>,
    unknown_domains: RwLock<HashMap<Box<str>, UnknownDomain>>,
    /// Size of `requested` and `unknown_domains` together; briefly too high while two threads add the same name.
    series: AtomicUsize,
    max_series: usize,
    overflow: AtomicU64,
}

/// Statistics that a request named.
#[derive(Debug)]
struct RequestedLimit {
    stats: Arc<LimitStats>,
    idle: IdleCount,
}

/// Counter of descriptors for a domain without rules.
#[derive(Debug, Default)]
struct UnknownDomain {
    count: AtomicU64,
    idle: IdleCount,
}

/// Detects that a count no longer changes.
#[derive(Debug, Default)]
struct IdleCount {
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
    pub fn of_rule(&self, name: LimitName) -> Arc<LimitStats> {
        let mut rules = write(&self.rules);
        let entry = rules.entry(name);
        let name = entry.key().clone();
        Arc::clone(entry.or_insert_with(|| Arc::new(LimitStats::new(name))))
    }

    /// Returns the statistics under a name from a request, adding them if there is room; `None` if there is not.
    pub fn of_request(&self, parts: &[&str]) -> Option<Arc<LimitStats>> {
        let Some(name) = LimitName::of_request(parts) else {
            self.overflow.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        if let Some(requested) = read(&self.requested).get(&name) {
            return Some(Arc::clone(&requested.stats));
        }
        // A rule can have the same name.
        if let Some(stats) = read(&self.rules).get(&name) {
            return Some(Arc::clone(stats));
        }
        if !self.has_room() {
            return None;
        }
        let mut requested = write(&self.requested);
        let entry = requested.entry(name.clone()).or_insert_with(|| {
            self.series.fetch_add(1, Ordering::Relaxed);
            RequestedLimit { stats: Arc::new(LimitStats::new(name)), idle: IdleCount::default() }
        });
        Some(Arc::clone(&entry.stats))
    }

    /// Counts a descriptor for a domain without rules.
    pub fn record_unknown_domain(&self, domain: &str) {
        let name = LimitName::new([domain]);
        let name = if name.key().len() <= MAX_NAME_BYTES { name.key() } else { OTHER };
        if self.count_known_domain(name) {
            return;
        }
        let name = if self.has_room() { name } else { OTHER };
        // `OTHER` may exceed the bound by one series.
        if name == OTHER && self.count_known_domain(OTHER) {
            return;
        }
        let mut unknown = write(&self.unknown_domains);
        let entry = unknown.entry(name.into()).or_insert_with(|| {
            self.series.fetch_add(1, Ordering::Relaxed);
            UnknownDomain::default()
        });
        entry.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a descriptor if its domain is registered as unknown; returns false if it is not.
    fn count_known_domain(&self, domain: &str) -> bool {
        let domains = read(&self.unknown_domains);
        domains.get(domain).is_some_and(|unknown| {
            unknown.count.fetch_add(1, Ordering::Relaxed);
            true
        })
    }

    /// True if one more series from a request fits; counts an overflow if not.
    fn has_room(&self) -> bool {
        let has_room = self.series.load(Ordering::Relaxed) < self.max_series;
        if !has_room {
            self.overflow.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    /// Returns all statistics by name, those of rules first.
    pub fn all(&self) -> Vec<Arc<LimitStats>> {
        let sorted = |mut limits: Vec<Arc<LimitStats>>| {
            limits.sort_unstable_by(|a, b| a.name().cmp(b.name()));
            limits
        };
        let mut all = sorted(read(&self.rules).values().cloned().collect());
        all.extend(sorted(read(&self.requested).values().map(|requested| Arc::clone(&requested.stats)).collect()));
        all
    }

    /// Returns the requested domains without rules and the number of their descriptors, by name.
    pub fn unknown_domains(&self) -> Vec<(String, u64)> {
        let unknown = read(&self.unknown_domains);
        let mut domains: Vec<(String, u64)> =
            unknown.iter().map(|(name, unknown)| (name.to_string(), unknown.count.load(Ordering::Relaxed))).collect();
        domains.sort_unstable();
        domains
    }

    /// Number of series named by requests.
    pub fn series(&self) -> usize {
        self.series.load(Ordering::Relaxed)
    }

    /// Maximum number of series named by requests.
    pub const fn max_series(&self) -> usize {
        self.max_series
    }

    /// Number of times that a name from a request did not fit.
    pub fn overflow(&self) -> u64 {
        self.overflow.load(Ordering::Relaxed)
    }

    /// Removes the statistics of removed rules, and unused series named by requests. Called every ten seconds, after
    /// metrics were reported.
    pub fn sweep(&self) {
        write(&self.rules).retain(|_, stats| Arc::strong_count(stats) > 1);
        let mut removed = 0;
        write(&self.requested).retain(|_, requested| {
            let stays = requested.idle.keeps(requested.stats.decisions());
            removed += usize::from(!stays);
            stays
        });
        write(&self.unknown_domains).retain(|_, UnknownDomain { count, idle }| {
            let stays = idle.keeps(count.load(Ordering::Relaxed));
            removed += usize::from(!stays);
            stays
        });
        self.series.fetch_sub(removed, Ordering::Relaxed);
    }
}

impl IdleCount {
    /// Records the current count; false once it has not changed for [`MAX_IDLE_SWEEPS`].
    fn keeps(&mut self, count: u64) -> bool {
        self.sweeps = if count == self.last { self.sweeps + 1 } else { 0 };
        self.last = count;
        self.sweeps < MAX_IDLE_SWEEPS
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
