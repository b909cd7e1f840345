//! Reads rows of tables in Redis before limits are selected.
//!
//! A value is read once, however many requests wait for it; each waits for half of the time that it has, so that the
//! other half is left for its charge. Then the last known row decides, else the default plan. Each table of a domain has
//! one read in flight, which takes along all values that came since the last one began; so made-up values do not keep
//! others from being read. Reads in a second are bounded, and with them what made-up values cost Redis.
//!
//! Decides: when a row of a table in Redis is read, how long a request waits; which values share a read.
//! Decides: how many reads of unknown values there are each second (`ReadBudget`); what decides meanwhile.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::watch;
use tokio::time::Instant;

use super::decision::DecisionContext;
use super::log::value_form::ValueForm;
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::request::Request;
use crate::rules::plan_table::live::{LiveTable, TableStats};
use crate::rules::plan_table::row_cache::{RowCache, RowFreshness};
use crate::rules::rule::RuleLogging;
use crate::store::{Store, TableRowSource};
use crate::telemetry::log_throttle::LogThrottle;

/// Maximum number of values in one read.
const MAX_VALUES_PER_READ: usize = 128;
/// Maximum number of values of one table that wait for a read.
const MAX_WAITING_VALUES: usize = 16_384;
/// Time that Redis has for a read.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Reader of rows for all decisions of this process.
#[derive(Debug)]
pub(super) struct PlanRowReader {
    /// Reads of unknown values per second, of each table.
    unknown_reads_per_s: u32,
    /// Tables whose rows were read, by the address of their cache.
    tables: Arc<TablesByAddress>,
}

/// Reads of one table.
#[derive(Debug)]
struct TableReads {
    /// Keeps the address of the cache in use.
    cache: Weak<RowCache>,
    /// Values that are being read or wait for it; each ends when its sender is dropped.
    pending: HashMap<Box<[u8]>, watch::Receiver<()>>,
    /// Those that wait.
    waiting: Vec<WaitingValue>,
    /// A task reads.
    is_reading: bool,
    unknown: ReadBudget,
}

/// Value that waits for a read.
#[derive(Debug)]
struct WaitingValue {
    value: Box<[u8]>,
    /// The log may name it.
    is_shown: bool,
    /// Nothing is known of it.
    is_unknown: bool,
    done: watch::Sender<()>,
}

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
    /// A reader that reads unknown values so often per second and table.
    pub(super) fn new(unknown_reads_per_s: u32) -> Self {
        Self { unknown_reads_per_s, tables: Arc::default() }
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
                age => self.begin_read(store, table, value, age == RowFreshness::Unknown),
            };
            awaited.extend(read.filter(|_| age != RowFreshness::RefreshDue));
        }
        let Some(deadline) = context.store.deadline.filter(|_| !awaited.is_empty()) else { return };
        let wait = deadline.saturating_duration_since(now) / 2;
        // The end of a read drops its sender, which is what is waited for.
        let all = join_all(awaited.iter_mut().map(watch::Receiver::changed));
        let _ = tokio::time::timeout(wait, all).await;
    }

    /// Has a row read, unless it is being read. `None`: too many values wait.
    fn begin_read(
        &self,
        store: &Store,
        table: &LiveTable,
        row: RowValue<'_>,
        is_unknown: bool,
    ) -> Option<watch::Receiver<()>> {
        let RowValue { value, is_shown } = row;
        let cache = table.row_cache()?;
        let address = Arc::as_ptr(cache).addr();
        let mut tables = lock_ignoring_poison(&self.tables);
        if !tables.contains_key(&address) {
            tables.retain(|_, reads| reads.cache.strong_count() > 0);
            tables.insert(address, TableReads::new(Arc::downgrade(cache), self.unknown_reads_per_s));
        }
        let reads = tables.get_mut(&address)?;
        if let Some(reading) = reads.pending.get(value) {
            return Some(reading.clone());
        }
        if reads.waiting.len() >= MAX_WAITING_VALUES {
            return None;
        }
        let (done, reading) = watch::channel(());
        reads.pending.insert(value.into(), reading.clone());
        reads.waiting.push(WaitingValue { value: value.into(), is_shown, is_unknown, done });
        if !std::mem::replace(&mut reads.is_reading, true) {
            let (tables, cache, stats) = (Arc::clone(&self.tables), Arc::clone(cache), Arc::clone(&table.stats));
            let rows = store.table_row_source();
            tokio::spawn(async move {
                while let Some(batch) = take_batch(&tables, address) {
                    read_batch(&rows, &cache, &stats, &batch).await;
                    end_batch(&tables, address, batch);
                }
            });
        }
        Some(reading)
    }
}

impl TableReads {
    /// Reads of a table of which none has begun.
    fn new(cache: Weak<RowCache>, unknown_reads_per_s: u32) -> Self {
        let unknown = ReadBudget::new(unknown_reads_per_s, Instant::now());
        Self { cache, pending: HashMap::new(), waiting: Vec::new(), is_reading: false, unknown }
    }
}

/// Tables whose rows are read, by the address of their cache.
type TablesByAddress = Mutex<HashMap<usize, TableReads>>;

/// Takes the values of the next read; `None` ends the task. Without a read left, unknown values are given up.
fn take_batch(tables: &TablesByAddress, address: usize) -> Option<Vec<WaitingValue>> {
    let mut tables = lock_ignoring_poison(tables);
    let reads = tables.get_mut(&address)?;
    let is_next = |waiting: &[WaitingValue]| waiting.iter().take(MAX_VALUES_PER_READ).any(|one| one.is_unknown);
    if is_next(&reads.waiting) && !reads.unknown.try_take_read(Instant::now()) {
        let (given_up, known) = std::mem::take(&mut reads.waiting).into_iter().partition(|one| one.is_unknown);
        let given_up: Vec<WaitingValue> = given_up;
        reads.waiting = known;
        given_up.iter().for_each(|one| drop(reads.pending.remove(&one.value)));
    }
    if reads.waiting.is_empty() {
        reads.is_reading = false;
        return None;
    }
    let count = reads.waiting.len().min(MAX_VALUES_PER_READ);
    Some(reads.waiting.drain(..count).collect())
}

/// Reads the rows of some values, and keeps what Redis has for them.
async fn read_batch(rows: &TableRowSource, cache: &RowCache, stats: &TableStats, batch: &[WaitingValue]) {
    let started = Instant::now();
    batch.iter().for_each(|_| stats.record_read());
    let values: Vec<&[u8]> = batch.iter().map(|one| &*one.value).collect();
    let found = rows.read(&cache.table, &values, started + READ_TIMEOUT).await;
    for (one, row) in batch.iter().zip(found) {
        let of = RowValue { value: &one.value, is_shown: one.is_shown };
        match row {
            Ok(text) => cache_row(cache, stats, of, text.as_deref(), started),
            Err(_) => stats.record_failed_read(),
        }
    }
}

/// Forgets the values of a read, and wakes those who wait for them.
fn end_batch(tables: &TablesByAddress, address: usize, batch: Vec<WaitingValue>) {
    if let Some(reads) = lock_ignoring_poison(tables).get_mut(&address) {
        batch.iter().for_each(|one| drop(reads.pending.remove(&one.value)));
    }
    // What waiters wait for.
    drop(batch.into_iter().map(|one| one.done).collect::<Vec<_>>());
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
