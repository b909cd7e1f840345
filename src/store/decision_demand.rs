//! Demand of decisions on counters of which this process holds a part: the division of a limit leaves them their part.
//!
//! Costs one load of a shared number for each request while nothing is held.
//!
//! Decides: how calls over RLS are counted as demand beside RLQS.

use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::base::sharded::{DEFAULT_SHARDS, PrehashedMap, Sharded, upper_half};
use crate::limit::charge::Charge;
use crate::limit::request::Hits;

/// Hits that decisions asked for, by path; paths without a hold are not counted.
#[derive(Debug)]
pub struct DecisionDemand {
    watched: AtomicUsize,
    paths: Sharded<PrehashedMap<WatchedPath>>,
}

#[derive(Debug, Default)]
struct WatchedPath {
    watchers: usize,
    hits: u64,
}

impl Default for DecisionDemand {
    fn default() -> Self {
        Self { watched: AtomicUsize::new(0), paths: Sharded::new(DEFAULT_SHARDS, PrehashedMap::default) }
    }
}

impl DecisionDemand {
    /// Begins to count the hits of a path. Each call needs one of [`Self::unwatch`].
    pub fn watch(&self, path_hash: u128) {
        self.watched.fetch_add(1, Ordering::Relaxed);
        self.paths.lock_shard(upper_half(path_hash)).entry(path_hash).or_default().watchers += 1;
    }

    /// Ends what one call of [`Self::watch`] began.
    pub fn unwatch(&self, path_hash: u128) {
        self.watched.fetch_sub(1, Ordering::Relaxed);
        if let Entry::Occupied(mut path) = self.paths.lock_shard(upper_half(path_hash)).entry(path_hash) {
            path.get_mut().watchers -= 1;
            if path.get().watchers == 0 {
                path.remove();
            }
        }
    }

    /// Takes the hits of a path since the last call.
    pub fn take_hits(&self, path_hash: u128) -> u64 {
        let mut paths = self.paths.lock_shard(upper_half(path_hash));
        paths.get_mut(&path_hash).map_or(0, |path| std::mem::take(&mut path.hits))
    }

    /// Counts the hits of a charge.
    pub(super) fn record(&self, charge: &Charge<'_>) {
        if self.watched.load(Ordering::Relaxed) == 0 {
            return;
        }
        let Hits::Charge(hits) = charge.request.hits else { return };
        if let Some(path) = self.paths.lock_shard(upper_half(charge.path_hash)).get_mut(&charge.path_hash) {
            path.hits = path.hits.saturating_add(hits);
        }
    }
}
