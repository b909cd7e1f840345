//! The limit_stats of all limits, found by name.
//!
//! Those of rules are found when rules load and live as long as the rules do. Others come with requests, as strangers
//! choose them: limits that travel with a request, values that a rule wants in its metric's name, unknown domains. So
//! many of these are kept as a setting says; what comes after is counted under the rule that was met, or under
//! [`OTHER`], and how much that was is counted too. They are forgotten when nothing was counted in them for an hour.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::limit_stats::{LimitName, LimitStats};

/// Stands for the domains and the limits without a rule for which there is no room.
pub const OTHER: &str = "_other";
/// The longest name that a request may make, in bytes.
const LONGEST_NAME_BYTES: usize = 512;
/// Sweeps without a change after which a series of a request's making is forgotten.
const IDLE_SWEEPS: u32 = 360;

/// All limit_stats.
#[derive(Debug)]
pub struct LimitRegistry {
    rules: RwLock<HashMap<Box<str>, Arc<LimitStats>>>,
    requested: RwLock<HashMap<Box<str>, Requested>>,
    unknown_domains: RwLock<HashMap<Box<str>, Unknown>>,
    /// How many of the last two there are; a little too many while two threads add one.
    kept: AtomicUsize,
    most_requested: usize,
    overflow: AtomicU64,
}

/// A stats that a request made.
#[derive(Debug)]
struct Requested {
    stats: Arc<LimitStats>,
    seen: u64,
    idle: u32,
}

#[derive(Debug, Default)]
struct Unknown {
    count: AtomicU64,
    seen: u64,
    idle: u32,
}

impl LimitRegistry {
    /// No limit_stats yet; at most so many of what requests bring, unknown domains included.
    pub fn new(most_requested: usize) -> Self {
        Self {
            rules: RwLock::default(),
            requested: RwLock::default(),
            unknown_domains: RwLock::default(),
            kept: AtomicUsize::new(0),
            most_requested,
            overflow: AtomicU64::new(0),
        }
    }

    /// The stats of a rule's limit.
    pub fn of_rule(&self, name: LimitName) -> Arc<LimitStats> {
        let mut rules = write(&self.rules);
        if let Some(stats) = rules.get(name.key()) {
            return Arc::clone(stats);
        }
        let stats = Arc::new(LimitStats::new(name));
        rules.insert(stats.name().key().into(), Arc::clone(&stats));
        stats
    }

    /// The stats of what a request brought, by its parts; `None` if there is no room for it.
    pub fn of_request(&self, parts: &[&str]) -> Option<Arc<LimitStats>> {
        let length: usize = parts.iter().map(|part| part.len() + 1).sum();
        if length > LONGEST_NAME_BYTES {
            self.overflow.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let name = LimitName::new(parts.iter().copied());
        if let Some(requested) = read(&self.requested).get(name.key()) {
            return Some(Arc::clone(&requested.stats));
        }
        // A rule may have that very name: then it is that rule's.
        if let Some(stats) = read(&self.rules).get(name.key()) {
            return Some(Arc::clone(stats));
        }
        if !self.has_room() {
            return None;
        }
        let mut requested = write(&self.requested);
        let entry = requested.entry(name.key().into()).or_insert_with(|| {
            self.kept.fetch_add(1, Ordering::Relaxed);
            Requested { stats: Arc::new(LimitStats::new(name)), seen: 0, idle: 0 }
        });
        Some(Arc::clone(&entry.stats))
    }

    /// Counts a descriptor that came for a domain without rules.
    pub fn note_unknown_domain(&self, domain: &str) {
        let name = LimitName::new([domain]);
        let name = if name.key().len() <= LONGEST_NAME_BYTES { name.key() } else { OTHER };
        if self.count_known_stranger(name) {
            return;
        }
        let name = if self.has_room() { name } else { OTHER };
        // No more is asked for than one place beside those that there are.
        if name == OTHER && self.count_known_stranger(OTHER) {
            return;
        }
        let mut unknown = write(&self.unknown_domains);
        let entry = unknown.entry(name.into()).or_insert_with(|| {
            self.kept.fetch_add(1, Ordering::Relaxed);
            Unknown::default()
        });
        entry.count.fetch_add(1, Ordering::Relaxed);
    }

    fn count_known_stranger(&self, domain: &str) -> bool {
        let known = read(&self.unknown_domains);
        let entry = known.get(domain);
        entry.is_some_and(|unknown| {
            unknown.count.fetch_add(1, Ordering::Relaxed);
            true
        })
    }

    /// Whether one more name that came with a request may be kept; that it may not is counted.
    fn has_room(&self) -> bool {
        let has_room = self.kept.load(Ordering::Relaxed) < self.most_requested;
        if !has_room {
            self.overflow.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    /// All limit_stats by name, those of rules first.
    pub fn all(&self) -> Vec<Arc<LimitStats>> {
        let sorted = |mut limit_stats: Vec<Arc<LimitStats>>| {
            limit_stats.sort_unstable_by(|a, b| a.name().key().cmp(b.name().key()));
            limit_stats
        };
        let mut all = sorted(read(&self.rules).values().cloned().collect());
        all.extend(sorted(read(&self.requested).values().map(|requested| Arc::clone(&requested.stats)).collect()));
        all
    }

    /// The domains that have no rules and were asked for, and how often, by name.
    pub fn unknown_domains(&self) -> Vec<(String, u64)> {
        let unknown = read(&self.unknown_domains);
        let mut domains: Vec<(String, u64)> =
            unknown.iter().map(|(name, unknown)| (name.to_string(), unknown.count.load(Ordering::Relaxed))).collect();
        domains.sort_unstable();
        domains
    }

    /// How many series requests have made, and how many they may make.
    pub fn requested(&self) -> (usize, usize) {
        (self.kept.load(Ordering::Relaxed), self.most_requested)
    }

    /// How often there was no room for a name that came with a request.
    pub fn overflow(&self) -> u64 {
        self.overflow.load(Ordering::Relaxed)
    }

    /// Forgets the limit_stats of rules that are gone, and those that requests made and no longer use. To be called every
    /// ten seconds, after what was counted was sent where it is to go.
    pub fn sweep(&self) {
        write(&self.rules).retain(|_, stats| Arc::strong_count(stats) > 1);
        let mut gone = 0;
        write(&self.requested).retain(|_, requested| {
            let stays = stays(requested.stats.decisions(), (&mut requested.seen, &mut requested.idle));
            gone += usize::from(!stays);
            stays
        });
        write(&self.unknown_domains).retain(|_, Unknown { count, seen, idle }| {
            let stays = stays(count.load(Ordering::Relaxed), (seen, idle));
            gone += usize::from(!stays);
            stays
        });
        self.kept.fetch_sub(gone, Ordering::Relaxed);
    }
}

/// Whether something that has counted so much is kept.
fn stays(total: u64, (seen, idle): (&mut u64, &mut u32)) -> bool {
    *idle = if total == *seen { *idle + 1 } else { 0 };
    *seen = total;
    *idle < IDLE_SWEEPS
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
