//! A table of a loaded rule set, whose rows are replaced while requests are decided.
//!
//! Rows are bound to the plans of the rule set before they are used, so a look-up never fails. The statistics of a
//! table live longer than a rule set. A table in Redis has no rows; its cache asks for them one by one.
//!
//! Decides: which rows of a table are in use while it is replaced.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwapOption;

use super::row_cache::RowCache;
use super::{FoundRow, NamedPlan, PlanOrLimit, PlanTable};
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;

/// Table of a loaded rule set.
#[derive(Debug)]
pub struct LiveTable {
    /// Name in the rules.
    pub name: Arc<str>,
    /// Statistics, which outlive the rule set.
    pub stats: Arc<TableStats>,
    rows: TableRows,
}

/// Rows of a table.
#[derive(Debug)]
enum TableRows {
    /// All rows of a file, replaced at once.
    Loaded(ArcSwapOption<BoundTable>),
    /// Rows in Redis, as far as they are known.
    Redis(Arc<RowCache>),
    /// Rows that recorded decisions found, for tools that repeat them.
    Recorded(Mutex<HashMap<Box<[u8]>, FoundRow>>),
}

/// Maximum number of recorded rows; each is set again before it is needed.
const MAX_RECORDED_ROWS: usize = 1 << 16;

/// Rows, with the plans of a rule set that they mean.
#[derive(Debug)]
pub struct BoundTable {
    table: Arc<PlanTable>,
    /// Index among the plans of the domain, by index among the plans that the table names.
    plans: Box<[u16]>,
}

/// Statistics of a table.
#[derive(Debug, Default)]
pub struct TableStats {
    absent_row_decisions: AtomicU64,
    unread_row_decisions: AtomicU64,
    reads: AtomicU64,
    failed_reads: AtomicU64,
    failed_loads: AtomicU64,
    rows: AtomicU64,
    bytes: AtomicU64,
    loaded_at_us: AtomicU64,
}

/// Result of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowLookUpResult {
    /// The table has this row.
    Row(FoundRow),
    /// The table has no row for the value.
    NoRow,
    /// The row could not be read from Redis in time.
    NotRead,
}

/// How the plan of a value was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanSource {
    /// The table has a row with a plan.
    Row,
    /// The table has a row with a limit of its own.
    OwnLimit,
    /// The table has no row for the value.
    Default,
    /// The row could not be read from Redis in time.
    NotRead,
}

impl PlanSource {
    /// Words for people.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Row => "a row of the table",
            Self::OwnLimit => "a row of the table with a limit of its own",
            Self::Default => "the default: the table has no row for the value",
            Self::NotRead => "the default: the row could not be read from Redis in time",
        }
    }

    /// Word for programs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Row => "row",
            Self::OwnLimit => "own",
            Self::Default => "default",
            Self::NotRead => "not_read",
        }
    }
}

impl BoundTable {
    /// Binds rows to the plans of a domain.
    ///
    /// # Errors
    /// The plans that rows name and the domain lacks.
    pub fn bind(table: Arc<PlanTable>, plans: &[Arc<str>]) -> Result<Self, Vec<NamedPlan>> {
        let mut unknown = Vec::new();
        let index_of = |named: &NamedPlan| {
            let index = plans.iter().position(|plan| **plan == *named.name).and_then(|index| u16::try_from(index).ok());
            if index.is_none() {
                unknown.push(named.clone());
            }
            index.unwrap_or(0)
        };
        let bound = table.named_plans().iter().map(index_of).collect();
        if unknown.is_empty() { Ok(Self { table, plans: bound }) } else { Err(unknown) }
    }

    fn find_row(&self, value: &[u8]) -> Option<FoundRow> {
        Some(match self.table.find(value)? {
            PlanOrLimit::Plan(index) => FoundRow::Plan(*self.plans.get(usize::from(index))?),
            PlanOrLimit::Own(own) => FoundRow::Own(own),
        })
    }
}

impl LiveTable {
    /// A table without rows.
    pub fn new(name: Arc<str>, stats: Arc<TableStats>) -> Self {
        Self { name, stats, rows: TableRows::Loaded(ArcSwapOption::empty()) }
    }

    /// A table whose rows are in Redis.
    pub const fn new_in_redis(name: Arc<str>, stats: Arc<TableStats>, cache: Arc<RowCache>) -> Self {
        Self { name, stats, rows: TableRows::Redis(cache) }
    }

    /// Looks up the row of a value.
    pub fn find(&self, value: &[u8]) -> RowLookUpResult {
        let row = match &self.rows {
            TableRows::Loaded(rows) => rows.load().as_ref().and_then(|rows| rows.find_row(value)),
            TableRows::Redis(cache) => match cache.find(value) {
                Some(row) => row,
                None => return RowLookUpResult::NotRead,
            },
            TableRows::Recorded(rows) => lock_ignoring_poison(rows).get(value).copied(),
        };
        row.map_or(RowLookUpResult::NoRow, RowLookUpResult::Row)
    }

    /// Rows in Redis as far as they are known; `None` for another table.
    pub const fn row_cache(&self) -> Option<&Arc<RowCache>> {
        match &self.rows {
            TableRows::Redis(cache) => Some(cache),
            TableRows::Loaded(_) | TableRows::Recorded(_) => None,
        }
    }

    /// Number of rows; of a table in Redis, of values whose row this process knows, or knows to be absent.
    pub fn row_count(&self) -> u64 {
        self.row_cache().map_or_else(|| self.stats.rows(), |cache| cache.len() as u64)
    }

    /// Keeps rows of recorded decisions from now on, in place of those of a file.
    pub fn switch_to_recorded_rows(&mut self) {
        self.rows = TableRows::Recorded(Mutex::default());
    }

    /// Sets the row that a recorded decision found; `None`: it found none. Has no effect on loaded rows.
    pub fn set_recorded_row(&self, value: &[u8], row: Option<FoundRow>) {
        let TableRows::Recorded(rows) = &self.rows else { return };
        let mut rows = lock_ignoring_poison(rows);
        match row {
            None => {
                rows.remove(value);
            }
            Some(row) => {
                if rows.len() >= MAX_RECORDED_ROWS {
                    rows.clear();
                }
                rows.insert(value.into(), row);
            }
        }
    }

    /// Replaces all rows at once.
    pub fn replace_rows(&self, rows: BoundTable) {
        self.stats.rows.store(rows.table.row_count() as u64, Ordering::Relaxed);
        self.stats.bytes.store(rows.table.memory_bytes() as u64, Ordering::Relaxed);
        match &self.rows {
            TableRows::Loaded(loaded) => loaded.store(Some(Arc::new(rows))),
            TableRows::Redis(_) | TableRows::Recorded(_) => {}
        }
    }
}

impl TableStats {
    /// Records a decision by the default plan, because the table has no row.
    pub fn record_absent_row_decision(&self) {
        self.absent_row_decisions.fetch_add(1, Ordering::Relaxed);
    }

    /// Records a decision by the default plan, because the row could not be read in time.
    pub fn record_unread_row_decision(&self) {
        self.unread_row_decisions.fetch_add(1, Ordering::Relaxed);
    }

    /// Records a read from Redis.
    pub fn record_read(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Records a read from Redis that failed.
    pub fn record_failed_read(&self) {
        self.failed_reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of decisions by the default plan because a row could not be read in time.
    pub fn unread_row_decisions(&self) -> u64 {
        self.unread_row_decisions.load(Ordering::Relaxed)
    }

    /// Number of reads from Redis.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Number of reads from Redis that failed.
    pub fn failed_reads(&self) -> u64 {
        self.failed_reads.load(Ordering::Relaxed)
    }

    /// Records a load that failed; the last good rows stay.
    pub fn record_failed_load(&self) {
        self.failed_loads.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the time of a load.
    pub fn record_load(&self, at: Time) {
        self.loaded_at_us.store(at.as_micros(), Ordering::Relaxed);
    }

    /// Number of decisions by the default plan because the table had no row, since the start.
    pub fn absent_row_decisions(&self) -> u64 {
        self.absent_row_decisions.load(Ordering::Relaxed)
    }

    /// Number of loads that failed since the start.
    pub fn failed_loads(&self) -> u64 {
        self.failed_loads.load(Ordering::Relaxed)
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }

    /// Memory of the rows, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Time of the last successful load; `None` before the first.
    pub fn loaded_at(&self) -> Option<Time> {
        let micros = self.loaded_at_us.load(Ordering::Relaxed);
        (micros > 0).then(|| Time::from_micros(micros))
    }
}
