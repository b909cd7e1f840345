//! Tables that map a value of a request to a plan, or to a limit of its own.
//!
//! A [`PlanTable`] is immutable once it is used: a hash table of 16-byte rows, so that a look-up costs little memory. A row
//! has a keyed 64-bit hash in place of the value, because a value would need another access to memory.
//! The keys are random, so a client cannot find a value with the hash of another one; with a million rows, about
//! one of 10^13 unknown values is taken for a known one. A [`live::LiveTable`] is the table of a loaded
//! rule set; its rows are replaced as a whole while requests are decided. No file is read here.
//!
//! The value of a row ([`RowValue`]) is the name of a plan, or a limit such as `500/minute`.
//!
//! Decides: look-up of a value's plan; rows of a table: how many, how long, twice or empty (`add_row`).
//! Decides: text of a row (`500/minute`, `RowValue::parse`); names of plans and tables.

pub mod row_cache;
pub mod live;

use std::fmt;
use std::hash::Hasher;
use std::path::Path;

use hashbrown::HashTable;
use siphasher::sip::SipHasher13;

use crate::base::random::random_u64_pair;
use crate::limit::period::{Period, Unit};

/// Maximum length of a value in a table, in bytes.
pub const MAX_VALUE_BYTES: usize = 4096;
/// Maximum number of rows.
const MAX_ROWS: usize = 1 << 27;
/// Maximum number of different plans that one table names.
const MAX_NAMED_PLANS: usize = 1000;

/// Extensions of the files of tables, which are never rules: CSV and JSON lines.
pub const TABLE_EXTENSIONS: [&str; 2] = ["csv", "jsonl"];

/// Returns true if a path has the extension of a table.
pub fn is_table_file(path: &Path) -> bool {
    path.extension().is_some_and(|extension| TABLE_EXTENSIONS.iter().any(|known| extension == *known))
}

/// Rows of a table.
#[derive(Debug)]
pub struct PlanTable {
    rows: HashTable<HashedRow>,
    hash_keys: HashKeys,
    /// Plans that rows name, in the order of their first row.
    plans: Vec<NamedPlan>,
}

/// A packed row with the hash of its value.
#[derive(Clone, Copy, Debug)]
struct HashedRow {
    hash: u64,
    row: u64,
}

/// Plan that a table names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPlan {
    /// Name of the plan.
    pub name: Box<str>,
    /// Line of the first row that names it, from 1.
    pub line: u64,
}

/// Row that cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// The value is empty.
    #[error("the value is empty")]
    EmptyValue,
    /// The value has this many bytes.
    #[error("a value of {0} bytes, more than {MAX_VALUE_BYTES}")]
    LongValue(usize),
    /// Another row has the value.
    #[error("an earlier row has the same value")]
    Duplicate,
    /// The table is full.
    #[error("more than {MAX_ROWS} rows")]
    TooManyRows,
    /// The rows name too many different plans.
    #[error("the rows name more than {MAX_NAMED_PLANS} different plans")]
    TooManyPlans,
}

impl PlanTable {
    /// Creates a table without rows, with room for `rows`.
    pub fn with_capacity(rows: usize) -> Self {
        let rows = HashTable::with_capacity(rows.min(MAX_ROWS));
        Self { rows, hash_keys: HashKeys::generate(), plans: Vec::new() }
    }

    /// Makes room for `rows` in all.
    pub fn ensure_row_capacity(&mut self, rows: usize) {
        let more = rows.min(MAX_ROWS).saturating_sub(self.rows.len());
        self.rows.reserve(more, |row| row.hash);
    }

    /// Adds a row of the line `line`.
    ///
    /// # Errors
    /// The value is empty, too long or known, or the table is full.
    pub fn add_row(&mut self, value: &[u8], row: RowValue<'_>, line: u64) -> Result<(), RowError> {
        match value.len() {
            0 => return Err(RowError::EmptyValue),
            length if length > MAX_VALUE_BYTES => return Err(RowError::LongValue(length)),
            _ if self.rows.len() == MAX_ROWS => return Err(RowError::TooManyRows),
            _ => {}
        }
        let hash = self.hash_keys.hash(value);
        if self.find_hash(hash).is_some() {
            return Err(RowError::Duplicate);
        }
        let row = match row {
            RowValue::Plan(name) => PlanOrLimit::Plan(self.find_or_add_plan(name, line)?),
            RowValue::Own(own) => PlanOrLimit::Own(own),
        };
        self.rows.insert_unique(hash, HashedRow { hash, row: row.pack() }, |row| row.hash);
        Ok(())
    }

    /// Returns the row of a value; a plan is an index among [`PlanTable::named_plans`].
    pub fn find(&self, value: &[u8]) -> Option<PlanOrLimit> {
        self.find_hash(self.hash_keys.hash(value))
    }

    /// Number of rows.
    pub fn row_count(&self) -> usize {
        self.rows.len()
    }

    /// Plans that rows name, in the order of their first row.
    pub fn named_plans(&self) -> &[NamedPlan] {
        &self.plans
    }

    /// Memory of the table, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.rows.allocation_size() + self.plans.capacity() * size_of::<NamedPlan>()
    }

    fn find_hash(&self, hash: u64) -> Option<PlanOrLimit> {
        self.rows.find(hash, |row| row.hash == hash).map(|found| PlanOrLimit::unpack(found.row))
    }

    fn find_or_add_plan(&mut self, name: &str, line: u64) -> Result<u16, RowError> {
        let known = self.plans.iter().position(|plan| &*plan.name == name);
        let index = known.unwrap_or(self.plans.len());
        if known.is_none() {
            if index == MAX_NAMED_PLANS {
                return Err(RowError::TooManyPlans);
            }
            self.plans.push(NamedPlan { name: name.into(), line });
        }
        u16::try_from(index).map_err(|_| RowError::TooManyPlans)
    }
}

/// Random keys of a hash of values.
#[derive(Clone, Copy, Debug)]
struct HashKeys(u64, u64);

impl HashKeys {
    fn generate() -> Self {
        let (first, second) = random_u64_pair();
        Self(first, second)
    }

    fn hash(self, value: &[u8]) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.0, self.1);
        hasher.write(value);
        hasher.finish()
    }
}

/// Value of a row as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowValue<'a> {
    /// Name of a plan.
    Plan(&'a str),
    /// Limit of the row's own.
    Own(OwnLimit),
}

/// Limit of a row's own; its other properties come from the defaults of the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnLimit {
    /// Hits in a period; 0 rejects everything.
    pub requests_per_unit: u32,
    /// The period.
    pub period: Period,
}

/// Value of a row, a plan by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanOrLimit {
    /// Index of a plan.
    Plan(u16),
    /// Limit of the row's own.
    Own(OwnLimit),
}

/// Row that a look-up found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundRow {
    /// Index among the plans of the domain.
    Plan(u16),
    /// Limit of the row's own.
    Own(OwnLimit),
}

/// Text that is neither the name of a plan nor a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowTextError {
    /// The text is not UTF-8.
    #[error("the plan is not UTF-8")]
    NotUtf8,
    /// The text is empty.
    #[error("there is no plan")]
    Empty,
    /// The text has a slash and is not a limit.
    #[error("`{0}` is not a limit")]
    InvalidLimit(String),
    /// The text cannot be the name of a plan.
    #[error("`{0}` is not the name of a plan")]
    InvalidName(String),
}

impl RowTextError {
    /// Fix to suggest.
    pub const fn suggested_fix(&self) -> &'static str {
        match self {
            Self::NotUtf8 | Self::Empty | Self::InvalidName(_) => {
                "write the name of a plan, or a limit such as 500/minute"
            }
            Self::InvalidLimit(_) => "write a number and a unit, such as 500/minute or 100/5 minutes",
        }
    }
}

/// Maximum length of the name of a plan or of a table, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Maximum number of characters of a text in a message.
const MAX_QUOTED_CHARS: usize = 40;

/// Returns true if a plan or a table can have this name: letters, digits, `_` and `-`.
pub fn is_valid_plan_or_table_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_allowed)
}

impl<'a> RowValue<'a> {
    /// Parses the name of a plan, or a limit: `NUMBER/UNIT` or `NUMBER/MULTIPLIER UNITs`. Blanks around it are ignored.
    ///
    /// # Errors
    /// The text is neither.
    pub fn parse(text: &'a [u8]) -> Result<Self, RowTextError> {
        let text = std::str::from_utf8(text).map_err(|_| RowTextError::NotUtf8)?.trim();
        let quoted = || text.chars().take(MAX_QUOTED_CHARS).collect();
        match text.split_once('/') {
            _ if text.is_empty() => Err(RowTextError::Empty),
            Some((requests, period)) => {
                let limit = parse_own_limit(requests.trim(), period.trim());
                limit.map(Self::Own).ok_or_else(|| RowTextError::InvalidLimit(quoted()))
            }
            None if is_valid_plan_or_table_name(text) => Ok(Self::Plan(text)),
            None => Err(RowTextError::InvalidName(quoted())),
        }
    }
}

fn parse_own_limit(requests: &str, period: &str) -> Option<OwnLimit> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let requests_per_unit = requests.parse().ok().filter(|_| is_number(requests))?;
    let digits = period.bytes().take_while(u8::is_ascii_digit).count();
    let (multiplier, unit) = period.split_at(digits);
    let multiplier = if multiplier.is_empty() { 1 } else { multiplier.parse().ok()? };
    let unit = unit.trim();
    let unit = Unit::from_name(unit).or_else(|| Unit::from_name(unit.strip_suffix('s').filter(|_| multiplier > 1)?))?;
    Some(OwnLimit { requests_per_unit, period: Period::new(unit, multiplier)? })
}

/// Writes `500/minute`, as it can be parsed again.
impl fmt::Display for OwnLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = self.period.unit().name();
        match self.period.multiplier() {
            1 => write!(f, "{}/{unit}", self.requests_per_unit),
            multiplier => write!(f, "{}/{multiplier} {unit}s", self.requests_per_unit),
        }
    }
}

/// Encoding of a row: bit 0 tells limits from plans; then the index of a plan, or four bits for the unit, 27 for the
/// multiplier and 32 for the hits. The longest period has fewer than 2^25 seconds.
const OWN_LIMIT_BIT: u64 = 1;
const PERIOD_UNIT_SHIFT: u32 = 1;
const PERIOD_MULTIPLIER_SHIFT: u32 = 5;
const HITS_SHIFT: u32 = 32;
/// Mask of a unit; another unit than these needs one more bit.
const UNIT_MASK: u64 = (1 << (PERIOD_MULTIPLIER_SHIFT - PERIOD_UNIT_SHIFT)) - 1;
const _: () = assert!(Unit::ALL.len() as u64 <= UNIT_MASK + 1, "a row has too few bits for the units of periods");

impl PlanOrLimit {
    /// Packs the row.
    fn pack(self) -> u64 {
        match self {
            Self::Plan(index) => u64::from(index) << PERIOD_UNIT_SHIFT,
            Self::Own(OwnLimit { requests_per_unit, period }) => {
                let unit = (period.unit() as u64) << PERIOD_UNIT_SHIFT;
                let multiplier = u64::from(period.multiplier()) << PERIOD_MULTIPLIER_SHIFT;
                OWN_LIMIT_BIT | unit | multiplier | u64::from(requests_per_unit) << HITS_SHIFT
            }
        }
    }

    /// Unpacks a row that [`PlanOrLimit::pack`] made.
    #[expect(clippy::cast_possible_truncation, reason = "each part has as many bits as it is masked to")]
    fn unpack(row: u64) -> Self {
        if row & OWN_LIMIT_BIT == 0 {
            return Self::Plan((row >> PERIOD_UNIT_SHIFT) as u16);
        }
        let unit = Unit::ALL.get((row >> PERIOD_UNIT_SHIFT & UNIT_MASK) as usize).copied().unwrap_or(Unit::Second);
        let multiplier = (row >> PERIOD_MULTIPLIER_SHIFT) as u32 & ((1 << (HITS_SHIFT - PERIOD_MULTIPLIER_SHIFT)) - 1);
        let period = Period::new(unit, multiplier).unwrap_or(const { Period::new(Unit::Second, 1).expect("a second") });
        Self::Own(OwnLimit { requests_per_unit: (row >> HITS_SHIFT) as u32, period })
    }
}
