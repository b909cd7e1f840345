//! Numbers of commands sent, as envoyproxy/ratelimit counts them.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::store::client::memcache::error::MemcacheError;
use crate::store::client::memcache::reply::MemcacheReply;
use crate::store::stats::CommandCount;

/// Commands since the start, by outcome.
#[derive(Debug, Default)]
pub(super) struct CommandStats {
    increments: OutcomeCounts,
    adds: OutcomeCounts,
    gets: OutcomeCounts,
}

/// Outcomes of one command.
#[derive(Debug, Default)]
pub(super) struct OutcomeCounts {
    success: AtomicU64,
    /// The key is missing, or for `add` exists.
    miss: AtomicU64,
    error: AtomicU64,
}

impl CommandStats {
    /// Counts an increment or a decrement.
    pub(super) fn record_increment_or_decrement(&self, outcome: &Result<MemcacheReply, MemcacheError>) {
        self.increments.record(outcome);
    }

    /// Counts an `add`.
    pub(super) fn record_add(&self, outcome: &Result<MemcacheReply, MemcacheError>) {
        self.adds.record(outcome);
    }

    /// Counts a `get` of one key.
    pub(super) fn record_get(&self, outcome: &Result<MemcacheReply, MemcacheError>) {
        self.gets.record(outcome);
    }

    /// Counts by command and outcome.
    pub(super) fn counts(&self) -> Vec<CommandCount> {
        let Self { increments, adds, gets } = self;
        let count = |name, code, count| CommandCount { name, code: Some(code), count };
        let [gets_found, gets_missed, gets_failed] = gets.load();
        let [added, not_stored, adds_failed] = adds.load();
        let [incremented, missed, increments_failed] = increments.load();
        let found = gets_found + gets_missed;
        vec![
            count("memcache.multiget", "success", found),
            count("memcache.multiget", "error", gets_failed),
            count("memcache.increment", "success", incremented),
            count("memcache.increment", "miss", missed),
            count("memcache.increment", "error", increments_failed),
            count("memcache.add", "success", added),
            count("memcache.add", "error", adds_failed),
            count("memcache.add", "not_stored", not_stored),
            CommandCount { name: "memcache.keys_requested", code: None, count: found + gets_failed },
            CommandCount { name: "memcache.keys_found", code: None, count: gets_found },
        ]
    }
}

impl OutcomeCounts {
    fn record(&self, outcome: &Result<MemcacheReply, MemcacheError>) {
        let count = match outcome {
            Ok(MemcacheReply::Missing | MemcacheReply::NotStored) => &self.miss,
            Ok(_) => &self.success,
            Err(_) => &self.error,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    fn load(&self) -> [u64; 3] {
        [&self.success, &self.miss, &self.error].map(|count| count.load(Ordering::Relaxed))
    }
}
