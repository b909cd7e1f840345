//! The rules in force, and what became of the last attempt to replace them.
//!
//! A reload replaces all rules or none. Whoever decides takes the rules once and keeps them until the decision is made,
//! so no decision sees half a change. Reading them takes no lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwapOption, Guard};
use serde::Serialize;

use crate::clock::Time;
use crate::rule::set::RuleSet;

/// The rules in force.
#[derive(Debug, Default)]
pub struct LiveRules {
    current: ArcSwapOption<LoadedRules>,
    attempt: Mutex<LoadAttempt>,
}

/// A set of rules that was loaded.
#[derive(Debug)]
pub struct LoadedRules {
    /// The rules.
    pub rules: RuleSet,
    /// 1 for the first set that this process loaded, and so on.
    pub version: u64,
    /// When it was loaded.
    pub loaded_at: Time,
    /// The names of the files it came from.
    pub sources: Vec<Arc<str>>,
}

/// The last attempt to load rules.
#[derive(Clone, Debug, Default)]
struct LoadAttempt {
    at: Option<Time>,
    error: Option<String>,
    refused: u64,
}

/// What `/rlconfig/status` says.
#[derive(Clone, Debug, Serialize)]
pub struct LoadStatus {
    /// The version in force; 0 before any.
    pub version: u64,
    /// When it was loaded, RFC 3339 in UTC.
    pub loaded_at: Option<String>,
    /// The files it came from.
    pub sources: Vec<Arc<str>>,
    /// Domains in it.
    pub domains: usize,
    /// Rules in it.
    pub rules: usize,
    /// When loading was last tried.
    pub last_attempt_at: Option<String>,
    /// Why that was refused, if it was.
    pub last_error: Option<String>,
    /// How many attempts were refused since the start.
    pub refused: u64,
}

impl LiveRules {
    /// The rules in force, if any were loaded.
    pub fn load(&self) -> Guard<Option<Arc<LoadedRules>>> {
        self.current.load()
    }

    /// The same for whoever has to wait while it decides.
    pub fn load_full(&self) -> Option<Arc<LoadedRules>> {
        self.current.load_full()
    }

    /// Puts a new set in force; its version.
    pub fn replace(&self, rules: RuleSet, sources: Vec<Arc<str>>, now: Time) -> u64 {
        let mut attempt = self.attempt();
        let version = self.current.load().as_ref().map_or(0, |loaded| loaded.version) + 1;
        let old = self.current.swap(Some(Arc::new(LoadedRules { rules, version, loaded_at: now, sources })));
        *attempt = LoadAttempt { at: Some(now), error: None, refused: attempt.refused };
        drop(attempt);
        if let Some(old) = old {
            await_sole_owner(&old);
        }
        version
    }

    /// Notes that a new set was refused; the one in force stays.
    pub fn refuse(&self, error: String, now: Time) {
        let mut attempt = self.attempt();
        *attempt = LoadAttempt { at: Some(now), error: Some(error), refused: attempt.refused + 1 };
    }

    /// What is in force, and what became of the last attempt.
    pub fn status(&self) -> LoadStatus {
        let attempt = self.attempt().clone();
        let loaded = self.current.load();
        let loaded = loaded.as_ref();
        LoadStatus {
            version: loaded.map_or(0, |loaded| loaded.version),
            loaded_at: loaded.map(|loaded| loaded.loaded_at.to_string()),
            sources: loaded.map_or_else(Vec::new, |loaded| loaded.sources.clone()),
            domains: loaded.map_or(0, |loaded| loaded.rules.domain_count()),
            rules: loaded.map_or(0, |loaded| loaded.rules.rule_count()),
            last_attempt_at: attempt.at.map(|at| at.to_string()),
            last_error: attempt.error,
            refused: attempt.refused,
        }
    }

    fn attempt(&self) -> MutexGuard<'_, LoadAttempt> {
        self.attempt.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until nobody else holds an old set, so that it is taken apart here, on the thread that reloads: whoever lets
/// go of it last pays for every rule in it, and that must not be a decision. A decision holds a set for microseconds.
fn await_sole_owner(old: &Arc<LoadedRules>) {
    const PATIENCE: Duration = Duration::from_secs(1);
    let started = Instant::now();
    while Arc::strong_count(old) > 1 && started.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }
}
