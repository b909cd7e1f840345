//! Reads the file of a table: CSV with a heading, or JSON lines.
//!
//! A file is read row by row, so that its text is never in memory as a whole. All problems are reported, each with its
//! line; a file with a problem is not used at all. Values may be any bytes in CSV, as in requests; other columns and
//! fields are ignored.
//!
//! Decides: how the rows of a file of a table are read (bad rows).

use std::borrow::Cow;
use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, Visitor};

use super::diagnostic::{Diagnostic, Diagnostics, Severity, escape_for_message};
use super::files::read::open_regular_file;
use super::files::walk::FileStamp;
use super::files::{MAX_TABLE_BYTES, PathProblem};
use super::plan_table::{PlanTable, RowError, RowValue};

/// Maximum length of a line of JSON, in bytes.
const MAX_LINE_BYTES: u64 = 64 << 10;
/// Maximum length of a row of CSV, in bytes.
const MAX_ROW_BYTES: u64 = 1 << 20;
/// Size of the buffer that a file is read through, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// Table that was read, with the stamp of its file.
#[derive(Clone, Debug)]
pub struct TableWithStamp {
    /// The rows.
    pub table: Arc<PlanTable>,
    /// Stamp of the file when reading began.
    pub stamp: FileStamp,
}

/// Reads the file at `path`. Blocks on disk I/O.
///
/// # Errors
/// Every problem of the file.
pub fn read_table(path: &Path, within: Option<&Path>) -> Result<TableWithStamp, Diagnostics> {
    let mut reader = TableReader::new(path);
    let result = open_regular_file(path, within).and_then(|file| {
        let metadata = file.metadata().map_err(|error| PathProblem::from(&error))?;
        if metadata.len() > MAX_TABLE_BYTES {
            return Err(PathProblem::TableTooLarge(metadata.len()));
        }
        Ok((file, FileStamp::from_metadata(&metadata), metadata.len()))
    });
    let (file, stamp, size) = match result {
        Ok(opened) => opened,
        Err(problem) => {
            reader.report(1, problem.to_string(), problem.suggested_fix());
            return Err(reader.found);
        }
    };
    reader.file_bytes = size;
    // A file that grows meanwhile is read again, because its stamp changes.
    let file = BufReader::with_capacity(BUFFER_BYTES, file.take(MAX_TABLE_BYTES));
    match path.extension().is_some_and(|extension| extension == "jsonl") {
        true => reader.read_json_lines(file),
        false => reader.read_csv(file),
    }
    if reader.found.has_errors() {
        return Err(reader.found);
    }
    Ok(TableWithStamp { table: Arc::new(reader.table), stamp })
}

/// Input of a reader.
type TableFileInput = BufReader<io::Take<std::fs::File>>;

/// Input of rows of CSV that fails if a row is too long: neither its columns nor a quoted text have a bound of their own.
#[derive(Debug)]
pub struct RowBoundedInput<R> {
    input: R,
    max_row_bytes: u64,
    left: u64,
}

impl<R> RowBoundedInput<R> {
    /// Bounds each row to about `max_row_bytes`.
    pub const fn new(input: R, max_row_bytes: u64) -> Self {
        Self { input, max_row_bytes, left: max_row_bytes }
    }

    /// Begins the next row.
    pub const fn begin_row(&mut self) {
        self.left = self.max_row_bytes;
    }
}

impl<R: Read> Read for RowBoundedInput<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.left = self.left.saturating_sub(read as u64);
        if read > 0 && self.left == 0 {
            let max = self.max_row_bytes;
            return Err(io::Error::other(format!("a row is longer than {max} bytes (is a quote missing?)")));
        }
        Ok(read)
    }
}

/// Collects rows and problems of one file.
struct TableReader {
    file: Arc<str>,
    table: PlanTable,
    found: Diagnostics,
    /// Size of the file.
    file_bytes: u64,
    /// Bytes of the values and plans of the rows so far.
    row_bytes: u64,
}

/// Number of rows after which the number of all rows is estimated.
const ROWS_BEFORE_ESTIMATE: usize = 1000;
/// Bytes of a line of CSV beside its cells.
const BYTES_BESIDE_CELLS: u64 = 2;

/// Columns of a CSV file.
struct Columns {
    value: usize,
    plan: Option<usize>,
    limit: Option<usize>,
}

/// Hint for a row without plan or limit, or with both.
const PLAN_HINT: &str = "write either the name of a plan, or a limit such as 500/minute";

impl TableReader {
    fn new(path: &Path) -> Self {
        let file = path.to_string_lossy().into();
        Self { file, table: PlanTable::with_capacity(0), found: Diagnostics::default(), file_bytes: 0, row_bytes: 0 }
    }

    fn report(&mut self, line: u64, message: impl Into<String>, hint: &str) {
        self.found.push(Diagnostic {
            severity: Severity::Error,
            file: Arc::clone(&self.file),
            line: u32::try_from(line).unwrap_or(u32::MAX),
            column: 1,
            path: String::new(),
            message: message.into(),
            hint: Some(hint.to_owned()),
        });
    }

    fn read_csv(&mut self, input: TableFileInput) {
        let mut rows = csv::ReaderBuilder::new().from_reader(RowBoundedInput::new(input, MAX_ROW_BYTES));
        let columns = match rows.byte_headers() {
            Ok(heading) => Columns::from_heading(heading),
            Err(error) => return self.report_csv_error(&error),
        };
        let Some(columns) = columns else {
            let message = "the first line does not name the columns `value` and `plan`, or `limit`";
            return self.report(1, message, "begin the file with the line `value,plan`");
        };
        let mut row = csv::ByteRecord::new();
        loop {
            rows.get_mut().begin_row();
            match rows.read_byte_record(&mut row) {
                Ok(false) => return,
                Ok(true) => {
                    let line = line_of_row(&row, rows.position().line());
                    let cell = |column: Option<usize>| column.and_then(|column| row.get(column)).unwrap_or_default();
                    let (value, plan, limit) = (cell(Some(columns.value)), cell(columns.plan), cell(columns.limit));
                    self.add_row(line, value, plan, limit);
                }
                Err(error) => {
                    self.report_csv_error(&error);
                    if error.is_io_error() {
                        return;
                    }
                }
            }
        }
    }

    fn report_csv_error(&mut self, error: &csv::Error) {
        let line = error.position().map_or(1, csv::Position::line);
        let message = match error.kind() {
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!("a row of {len} columns under a heading of {expected_len}")
            }
            _ => escape_for_message(&error.to_string()),
        };
        self.report(line, message, "write as many columns as the heading has; put texts with commas in quotes");
    }

    fn read_json_lines(&mut self, mut input: TableFileInput) {
        let mut text = Vec::new();
        for line in 1.. {
            text.clear();
            match input.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut text) {
                Ok(0) => return,
                Ok(_) if text.len() as u64 == MAX_LINE_BYTES && !text.ends_with(b"\n") => {
                    let message = format!("a line of more than {MAX_LINE_BYTES} bytes");
                    return self.report(line, message, "write one object on each line");
                }
                Ok(_) if text.trim_ascii().is_empty() => {}
                Ok(_) => match serde_json::from_slice::<JsonRow<'_>>(&text) {
                    Ok(JsonRow { value, plan, limit }) => {
                        let bytes = |text: &Option<RowText<'_>>| {
                            text.as_ref().map_or(&[][..], |text| text.0.as_bytes()).to_vec()
                        };
                        self.add_row(line, value.0.as_bytes(), &bytes(&plan), &bytes(&limit));
                    }
                    Err(error) => {
                        let message = format!("not a row: {}", escape_for_message(&error.to_string()));
                        self.report(line, message, r#"write an object such as {"value": "acme", "plan": "gold"}"#);
                    }
                },
                Err(error) => {
                    return self.report(line, error.to_string(), PathProblem::from(&error).suggested_fix());
                }
            }
        }
    }

    /// Adds a row, or reports its problem.
    fn add_row(&mut self, line: u64, value: &[u8], plan: &[u8], limit: &[u8]) {
        let row = match (plan.trim_ascii(), limit.trim_ascii()) {
            (b"", b"") => return self.report(line, "a row without plan and limit", PLAN_HINT),
            (text, b"") | (b"", text) => text,
            (_, _) => return self.report(line, "a row with a plan and a limit", PLAN_HINT),
        };
        let row = match RowValue::parse(row) {
            Ok(row) => row,
            Err(error) => return self.report(line, escape_for_message(&error.to_string()), error.suggested_fix()),
        };
        self.row_bytes += value.len() as u64 + plan.len() as u64 + limit.len() as u64 + BYTES_BESIDE_CELLS;
        if self.table.row_count() == ROWS_BEFORE_ESTIMATE {
            // Growing step by step would need twice the memory; a wrong estimate only grows once more.
            let rows = self.file_bytes.saturating_mul(ROWS_BEFORE_ESTIMATE as u64) / self.row_bytes;
            self.table.ensure_row_capacity(usize::try_from(rows + rows / 64).unwrap_or(0));
        }
        if let Err(error) = self.table.add_row(value, row, line) {
            let hint = match error {
                RowError::EmptyValue => "write the value that requests have",
                RowError::LongValue(_) => "no request needs such a value",
                RowError::Duplicate => "remove one of the two rows",
                RowError::TooManyRows => "split the table",
                RowError::TooManyPlans => "write limits such as 500/minute in place of plans for single values",
            };
            let shown = escape_for_message(&String::from_utf8_lossy(value));
            let message = match error {
                RowError::Duplicate => format!("the value '{shown}': {error}"),
                RowError::EmptyValue | RowError::LongValue(_) | RowError::TooManyRows | RowError::TooManyPlans => {
                    error.to_string()
                }
            };
            self.report(line, message, hint);
        }
    }
}

/// Line of a row, if reading has come to the line `next`. The position of a row is that of the blank lines before it.
fn line_of_row(row: &csv::ByteRecord, next: u64) -> u64 {
    let start = row.position().map_or(0, csv::Position::line);
    let line_breaks = row.as_slice().iter().filter(|byte| **byte == b'\n').count() as u64;
    start.max(next.saturating_sub(1 + line_breaks))
}

impl Columns {
    /// Returns the columns by the heading; `None` if it lacks one.
    fn from_heading(heading: &csv::ByteRecord) -> Option<Self> {
        let find = |name: &[u8]| heading.iter().position(|cell| cell.trim_ascii().eq_ignore_ascii_case(name));
        let (plan, limit) = (find(b"plan"), find(b"limit"));
        plan.or(limit)?;
        Some(Self { value: find(b"value")?, plan, limit })
    }
}

/// A row as JSON; other fields are ignored.
#[derive(Deserialize)]
struct JsonRow<'a> {
    #[serde(borrow)]
    value: RowText<'a>,
    #[serde(borrow, default)]
    plan: Option<RowText<'a>>,
    #[serde(borrow, default)]
    limit: Option<RowText<'a>>,
}

/// Text, or a whole number as its text.
struct RowText<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for RowText<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = RowText<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("text or a whole number")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(RowText(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(RowText(Cow::Owned(text.to_owned())))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
                Ok(RowText(Cow::Owned(number.to_string())))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Self::Value, E> {
                Ok(RowText(Cow::Owned(number.to_string())))
            }

            fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Self::Value, E> {
                Err(E::custom("a number that is not whole; write it as text"))
            }
        }
        deserializer.deserialize_any(TextVisitor)
    }
}
