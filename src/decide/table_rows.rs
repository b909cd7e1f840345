//! Reads rows of tables in Redis before limits are selected.
//!
//! A value is read once, however many requests wait for it; each waits for half of the time that it has, so that the
//! other half is left for its charge. Then the last known row decides, else the default plan. Reads in flight are
//! bounded, and so are reads of unknown values in a second: made-up values cost Redis no more than that.
//!
//! Decides: when a row of a table in Redis is read, how long a request waits.
//! Decides: how many unknown values are read each second (`ReadBudget`); what decides meanwhile.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::{Semaphore, watch};

use super::decision::DecisionContext;
use super::log::value_form::ValueForm;
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::request::Request;
use crate::rules::plan_table::live::{LiveTable, TableStats};
use crate::rules::plan_table::row_cache::{RowCache, RowFreshness};
use crate::rules::rule::RuleLogging;
use crate::store::Store;
use crate::telemetry::log_throttle::LogThrottle;

/// Maximum number of reads in flight.
const MAX_READS_IN_FLIGHT: usize = 256;
/// Time that Redis has for a read.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Reader of rows for all decisions of this process.
#[derive(Debug)]
pub(super) struct PlanRowReader {
    permits: Arc<Semaphore>,
    /// Reads in flight, by table and value; each ends when its sender is dropped.
    pending: Arc<Mutex<HashMap<PendingReadKey, watch::Receiver<()>>>>,
    unknown: Mutex<ReadBudget>,
}

/// Table, by the address of its cache, and value.
type PendingReadKey = (usize, Box<[u8]>);

/// Token bucket of reads of unknown values.
#[derive(Debug)]
pub struct ReadBudget {
    /// Reads per second, and in a burst.
    most: f64,
    reads: f64,
    at: Instant,
}

impl ReadBudget {
    /// A full budget of so many reads per second.
    pub fn new(per_s: u32, now: Instant) -> Self {
        Self { most: f64::from(per_s), reads: f64::from(per_s), at: now }
    }

    /// Takes a read, if one is left.
    pub fn try_take_read(&mut self, now: Instant) -> bool {
        let refill = now.saturating_duration_since(self.at).as_secs_f64() * self.most;
        self.reads = (self.reads + refill).min(self.most);
        self.at = now;
        let is_left = self.reads >= 1.0;
        if is_left {
            self.reads -= 1.0;
        }
        is_left
    }
}

/// Value whose row is read.
#[derive(Clone, Copy)]
struct RowValue<'v> {
    value: &'v [u8],
    /// The log may name it.
    is_shown: bool,
}

impl PlanRowReader {
    /// A reader that reads so many unknown values per second.
    pub(super) fn new(unknown_reads_per_s: u32) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(MAX_READS_IN_FLIGHT)),
            pending: Arc::default(),
            unknown: Mutex::new(ReadBudget::new(unknown_reads_per_s, Instant::now())),
        }
    }

    /// Reads the rows that the descriptors of a request need and that are not known, or not up to date.
    ///
    /// Values are named in the log only if `key_values` shows them as they are, and their rule does not hide them.
    pub(super) async fn read_missing_rows(
        &self,
        store: &Store,
        key_values: &ValueForm,
        context: DecisionContext<'_>,
        request: &Request<'_>,
    ) {
        let Some(rules) = context.rules else { return };
        let Some(domain) = rules.domain(request.domain) else { return };
        // Matching here and again for the selection is for domains whose rows are in Redis only.
        if domain.tables.iter().all(|table| table.row_cache().is_none()) {
            return;
        }
        let now = Instant::now();
        let mut awaited: SmallVec<[watch::Receiver<()>; 2]> = SmallVec::new();
        for descriptor in request.descriptors.iter().filter(|descriptor| descriptor.limit_override.is_none()) {
            let found = rules.find_rule(domain, &descriptor.entries);
            let needed =
                found.as_ref().and_then(|found| found.rule.looked_up_table_and_value(domain, &descriptor.entries));
            let Some((table, value)) = needed else { continue };
            let Some(cache) = table.row_cache() else { continue };
            let is_private = found.as_ref().is_some_and(|found| found.rule.rule.logging == Some(RuleLogging::None));
            let value = RowValue { value, is_shown: !is_private && matches!(key_values, ValueForm::Plain) };
            let age = cache.row_freshness(value.value, now);
            let read = match age {
                RowFreshness::Fresh => None,
                RowFreshness::RefreshDue | RowFreshness::Stale => self.begin_read(store, table, value),
                RowFreshness::Unknown => {
                    let may_read = lock_ignoring_poison(&self.unknown).try_take_read(now);
                    may_read.then(|| self.begin_read(store, table, value)).flatten()
                }
            };
            awaited.extend(read.filter(|_| age != RowFreshness::RefreshDue));
        }
        let Some(deadline) = context.store.deadline.filter(|_| !awaited.is_empty()) else { return };
        let wait = deadline.saturating_duration_since(now) / 2;
        // The end of a read drops its sender, which is what is waited for.
        let all = join_all(awaited.iter_mut().map(watch::Receiver::changed));
        let _ = tokio::time::timeout(wait, all).await;
    }

    /// Begins to read a row, unless it is being read. `None`: too many reads are in flight.
    fn begin_read(&self, store: &Store, table: &LiveTable, row: RowValue<'_>) -> Option<watch::Receiver<()>> {
        let RowValue { value, is_shown } = row;
        let cache = table.row_cache()?;
        let key: PendingReadKey = (Arc::as_ptr(cache).addr(), value.into());
        let mut pending = lock_ignoring_poison(&self.pending);
        if let Some(reading) = pending.get(&key) {
            return Some(reading.clone());
        }
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let (done, reading) = watch::channel(());
        pending.insert(key.clone(), reading.clone());
        drop(pending);
        let read = store.read_table_row(&cache.table, value, Instant::now() + READ_TIMEOUT);
        let (cache, stats, pending) = (Arc::clone(cache), Arc::clone(&table.stats), Arc::clone(&self.pending));
        tokio::spawn(async move {
            let started = Instant::now();
            stats.record_read();
            match read.await {
                Ok(text) => cache_row(&cache, &stats, RowValue { value: &key.1, is_shown }, text.as_deref(), started),
                Err(_) => stats.record_failed_read(),
            }
            lock_ignoring_poison(&pending).remove(&key);
            drop((done, permit));
        });
        Some(reading)
    }
}

/// Keeps what Redis has for a value. A row that cannot be used counts as none.
fn cache_row(cache: &RowCache, stats: &TableStats, of: RowValue<'_>, text: Option<&[u8]>, read_at: Instant) {
    static INVALID_ROW_LOG_THROTTLE: LogThrottle = LogThrottle::every(LOG_INTERVAL);
    let row = text.map(|text| cache.parse_row(text)).transpose().unwrap_or_else(|error| {
        stats.record_failed_load();
        if let Some(suppressed) = INVALID_ROW_LOG_THROTTLE.allow(Clock::System.now()) {
            let (table, shown) = (&*cache.table, if of.is_shown { of.value } else { b"(not shown)" });
            let value = String::from_utf8_lossy(shown);
            let fix = "write the name of a plan, or a limit such as 500/minute";
            tracing::warn!(table, %value, %error, fix, suppressed, "row in Redis ignored: the default plan decides");
        }
        None
    });
    cache.insert(of.value, row, read_at);
}
