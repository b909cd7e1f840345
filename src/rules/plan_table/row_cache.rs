//! Rows of a table in Redis, as this process knows them.
//!
//! A value without a row is remembered too, so that it is not asked for again and again. Rows stay after their
//! lifetime, because the last known row decides while Redis does not answer; they are only looked up again. Memory is
//! bounded by two generations in each shard: when the young one is full it becomes the old one, whose rows are dropped
//! next unless they are used. Nothing is read here.
//!
//! Decides: how soon a changed row of a table in Redis counts (`keep`), when it is read again, how many are kept.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::{FoundRow, HashKeys, RowTextError, RowValue};
use crate::base::sharded::{DEFAULT_SHARDS, Sharded};

/// Memory of a row beside its value, in bytes: its place in a map, and the allocation of the value.
const ROW_OVERHEAD_BYTES: usize = 112;
/// Divisor of the lifetime: after that part of it, a row that is used is looked up again in the background.
const REFRESH_LIFETIME_DIVISOR: u32 = 2;

/// Rows of one table in Redis.
#[derive(Debug)]
pub struct RowCache {
    /// Name of the table in Redis.
    pub table: Arc<str>,
    /// Lifetime of a row.
    pub keep: Duration,
    /// Plans of the domain, which rows name.
    pub plans: Vec<Arc<str>>,
    shards: Sharded<Generations>,
    hash_keys: HashKeys,
    shard_bytes: usize,
    /// Raised when every row must be looked up again.
    epoch: AtomicU64,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<Box<[u8]>, CachedRow>,
    young_bytes: usize,
    old: HashMap<Box<[u8]>, CachedRow>,
}

#[derive(Clone, Copy, Debug)]
struct CachedRow {
    /// `None`: Redis has no row for the value.
    row: Option<FoundRow>,
    read_at: Instant,
    epoch: u64,
    /// The row changed since.
    changed: bool,
}

/// What is known of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFreshness {
    /// Nothing.
    Unknown,
    /// Its row is past its lifetime, or has changed.
    Stale,
    /// Its row is to be looked up again soon.
    RefreshDue,
    /// Its row is up to date.
    Fresh,
}

/// Row in Redis that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRow {
    /// It is neither the name of a plan nor a limit.
    #[error("{0}")]
    Text(#[from] RowTextError),
    /// The domain has no such plan.
    #[error("unknown plan '{0}'")]
    UnknownPlan(String),
}

impl RowCache {
    /// A cache without rows, for `max_bytes` bytes of them.
    pub fn new(table: Arc<str>, keep: Duration, plans: Vec<Arc<str>>, max_bytes: usize) -> Self {
        Self {
            table,
            keep,
            plans,
            shards: Sharded::new(DEFAULT_SHARDS, Generations::default),
            hash_keys: HashKeys::generate(),
            // Both generations together are within the bound.
            shard_bytes: max_bytes / DEFAULT_SHARDS / 2,
            epoch: AtomicU64::new(0),
        }
    }

    /// Returns what the table has for a value, `Some(None)` if that is no row; `None` if it is not known.
    pub fn find(&self, value: &[u8]) -> Option<Option<FoundRow>> {
        self.with_row(value, |cached| cached.row)
    }

    /// Returns whether the row of a value is known and up to date.
    pub fn row_freshness(&self, value: &[u8], now: Instant) -> RowFreshness {
        let epoch = self.epoch.load(Ordering::Relaxed);
        let age_of = |cached: &CachedRow| {
            let age = now.saturating_duration_since(cached.read_at);
            match () {
                () if cached.changed || cached.epoch != epoch || age >= self.keep => RowFreshness::Stale,
                () if age >= self.keep / REFRESH_LIFETIME_DIVISOR => RowFreshness::RefreshDue,
                () => RowFreshness::Fresh,
            }
        };
        self.with_row(value, age_of).unwrap_or(RowFreshness::Unknown)
    }

    /// Sets the row that Redis had for a value at `read_at`; `None`: it had none.
    pub fn insert(&self, value: &[u8], row: Option<FoundRow>, read_at: Instant) {
        let epoch = self.epoch.load(Ordering::Relaxed);
        let mut shard = self.shards.lock_shard(self.hash(value));
        shard.old.remove(value);
        let cached = CachedRow { row, read_at, epoch, changed: false };
        shard.insert_young(value, cached, self.shard_bytes);
    }

    /// Parses the text of a row.
    ///
    /// # Errors
    /// The text is not a row, or names a plan that the domain lacks.
    pub fn parse_row(&self, text: &[u8]) -> Result<FoundRow, InvalidRow> {
        match RowValue::parse(text)? {
            RowValue::Own(own) => Ok(FoundRow::Own(own)),
            RowValue::Plan(name) => {
                let index = self.plans.iter().position(|plan| **plan == *name);
                let index = index.and_then(|index| u16::try_from(index).ok());
                index.map(FoundRow::Plan).ok_or_else(|| InvalidRow::UnknownPlan(name.to_owned()))
            }
        }
    }

    /// Marks the row of a value as changed, so that it is looked up before it is used again.
    pub fn mark_changed(&self, value: &[u8]) {
        let mut shard = self.shards.lock_shard(self.hash(value));
        let Generations { young, old, .. } = &mut *shard;
        if let Some(cached) = young.get_mut(value).or_else(|| old.get_mut(value)) {
            cached.changed = true;
        }
    }

    /// Marks all rows as changed.
    pub fn mark_all_changed(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of values whose rows are known, or known to be absent.
    pub fn len(&self) -> usize {
        self.shards.lock_each().map(|shard| shard.young.len() + shard.old.len()).sum()
    }

    /// Returns true if no value is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the row of a value, which counts as a use.
    fn with_row<T>(&self, value: &[u8], read: impl Fn(&CachedRow) -> T) -> Option<T> {
        let mut shard = self.shards.lock_shard(self.hash(value));
        if let Some(cached) = shard.young.get(value) {
            return Some(read(cached));
        }
        let cached = shard.old.remove(value)?;
        shard.insert_young(value, cached, self.shard_bytes);
        Some(read(&cached))
    }

    fn hash(&self, value: &[u8]) -> u64 {
        self.hash_keys.hash(value)
    }
}

impl Generations {
    fn insert_young(&mut self, value: &[u8], cached: CachedRow, max_bytes: usize) {
        let bytes = value.len() + ROW_OVERHEAD_BYTES;
        if self.young_bytes + bytes > max_bytes {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        if self.young.insert(value.into(), cached).is_none() {
            self.young_bytes += bytes;
        }
    }
}
