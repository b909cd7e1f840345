//! Readers of rows: one JSON object on each line, or CSV with a line of headings.
//!
//! Only the fields of the mapping are kept. The format is recognized by the first character.
//!
//! Decides: whether an access log is JSON or CSV, what is absent in it (empty, `-`); the longest line.

use std::borrow::Cow;
use std::fmt;
use std::io::{BufRead, Read as _};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::field_map::{AbsentField, FieldMap, FieldValues};
use super::recorded_request::RecordedRequest;
use crate::decide::log::record_field::RecordText;
use crate::rules::table_file::RowBoundedInput;

/// Maximum length of a line, in bytes.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// Reader of rows.
pub(super) struct RowReader {
    map: FieldMap,
    format: RowFormat,
    line: u64,
    /// Rows with a value for each field, or with some absent.
    pub(super) rows: u64,
    /// Rows without a descriptor.
    pub(super) skipped: u64,
    /// Rows that lack each field of the mapping.
    absent: Vec<u64>,
}

enum RowFormat {
    Json { input: Box<dyn BufRead + Send>, buffer: Vec<u8> },
    Csv(Box<CsvRows>),
}

/// Rows of CSV.
struct CsvRows {
    reader: csv::Reader<RowBoundedInput<Box<dyn BufRead + Send>>>,
    record: csv::StringRecord,
    /// Column of each field.
    columns: Vec<usize>,
}

/// Problem of a row, with the number of its line.
#[derive(Debug)]
pub(super) struct RowError {
    pub(super) line: u64,
    pub(super) problem: String,
}

impl RowReader {
    /// Reads the first character and, of CSV, the headings.
    pub(super) fn new(mut input: Box<dyn BufRead + Send>, map: FieldMap) -> Result<Self, RowError> {
        let at_start = |problem: String| RowError { line: 1, problem };
        let start = input.fill_buf().map_err(|error| at_start(error.to_string()))?;
        let is_json = start.trim_ascii_start().first().is_none_or(|first| *first == b'{');
        let format = if is_json {
            RowFormat::Json { input, buffer: Vec::new() }
        } else {
            RowFormat::Csv(Box::new(CsvRows::new(input, &map).map_err(at_start)?))
        };
        let absent = vec![0; map.fields().len()];
        Ok(Self { map, format, line: 0, rows: 0, skipped: 0, absent })
    }

    /// Reads the next request; `None` at the end.
    pub(super) fn next_request(&mut self) -> Result<Option<RecordedRequest>, RowError> {
        loop {
            let mut counted = FieldMapWithRowCounts { map: &self.map, rows: &mut self.rows, absent: &mut self.absent };
            let read = match &mut self.format {
                RowFormat::Json { input, buffer } => {
                    self.line += 1;
                    read_json_row(input, buffer, &mut counted)
                }
                RowFormat::Csv(rows) => {
                    let read = rows.read_row(&mut counted);
                    self.line = rows.reader.position().line();
                    read
                }
            };
            match read.map_err(|problem| RowError { line: self.line, problem })? {
                RowOutcome::End => return Ok(None),
                RowOutcome::Request(request) => return Ok(Some(*request)),
                RowOutcome::Blank => {}
                RowOutcome::WithoutDescriptor => self.skipped += 1,
            }
        }
    }

    /// Fields that rows lacked so far.
    pub(super) fn absent_fields(&self) -> Vec<AbsentField> {
        let fields = self.map.fields().iter().zip(&self.absent).filter(|(_, rows)| **rows > 0);
        fields.map(|(field, rows)| AbsentField { field: field.clone(), rows: *rows }).collect()
    }
}

/// A field map that counts the rows it builds requests from, and the fields that they lack.
struct FieldMapWithRowCounts<'r> {
    map: &'r FieldMap,
    rows: &'r mut u64,
    absent: &'r mut [u64],
}

impl FieldMapWithRowCounts<'_> {
    /// Builds the request of a row.
    fn build_request_from_row(&mut self, values: &FieldValues<'_>) -> Result<RowOutcome, String> {
        *self.rows += 1;
        for (absent, value) in self.absent.iter_mut().zip(values) {
            *absent += u64::from(value.is_none());
        }
        Ok(RowOutcome::from_request(self.map.build_request(values)?))
    }
}

/// Result of reading a row.
enum RowOutcome {
    End,
    Blank,
    WithoutDescriptor,
    Request(Box<RecordedRequest>),
}

impl RowOutcome {
    fn from_request(request: Option<RecordedRequest>) -> Self {
        request.map_or(Self::WithoutDescriptor, |request| Self::Request(Box::new(request)))
    }
}

impl CsvRows {
    fn new(input: Box<dyn BufRead + Send>, map: &FieldMap) -> Result<Self, String> {
        let mut reader = csv::Reader::from_reader(RowBoundedInput::new(input, MAX_LINE_BYTES));
        let headings = reader.headers().map_err(|error| error.to_string())?;
        let column = |field: &String| {
            headings.iter().position(|heading| heading == field).ok_or_else(|| {
                let known: Vec<&str> = headings.iter().take(20).collect();
                format!("there is no column '{field}' (the columns are: {})", known.join(", "))
            })
        };
        let columns = map.fields().iter().map(column).collect::<Result<_, _>>()?;
        Ok(Self { reader, record: csv::StringRecord::new(), columns })
    }

    fn read_row(&mut self, map: &mut FieldMapWithRowCounts<'_>) -> Result<RowOutcome, String> {
        self.reader.get_mut().begin_row();
        if !self.reader.read_record(&mut self.record).map_err(|error| error.to_string())? {
            return Ok(RowOutcome::End);
        }
        let value = |column: &usize| self.record.get(*column).filter(|text| !is_absent_value(text)).map(Cow::Borrowed);
        let values: Vec<_> = self.columns.iter().map(value).collect();
        map.build_request_from_row(&values)
    }
}

/// Envoy writes `-` for what is absent.
fn is_absent_value(text: &str) -> bool {
    text.is_empty() || text == "-"
}

fn read_json_row(
    input: &mut Box<dyn BufRead + Send>,
    buffer: &mut Vec<u8>,
    map: &mut FieldMapWithRowCounts<'_>,
) -> Result<RowOutcome, String> {
    buffer.clear();
    let read = input.take(MAX_LINE_BYTES).read_until(b'\n', buffer).map_err(|error| error.to_string())?;
    if read == 0 {
        return Ok(RowOutcome::End);
    }
    if read as u64 == MAX_LINE_BYTES {
        return Err(format!("the line is longer than {MAX_LINE_BYTES} bytes"));
    }
    if buffer.trim_ascii().is_empty() {
        return Ok(RowOutcome::Blank);
    }
    let mut json = serde_json::Deserializer::from_slice(buffer);
    let values = FieldSeed(map.map).deserialize(&mut json).and_then(|values| json.end().map(|()| values));
    match values {
        // The last line of a log that is still written.
        Err(_) if !buffer.ends_with(b"\n") => Ok(RowOutcome::End),
        Err(error) => Err(format!("not a JSON object: {error}")),
        Ok(values) => map.build_request_from_row(&values),
    }
}

/// Deserializes the fields of a mapping from an object.
struct FieldSeed<'m>(&'m FieldMap);

impl<'de> DeserializeSeed<'de> for FieldSeed<'_> {
    type Value = Vec<Option<Cow<'de, str>>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldSeed<'_> {
    type Value = Vec<Option<Cow<'de, str>>>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut values = vec![None; self.0.fields().len()];
        while let Some(RecordText(key)) = map.next_key::<RecordText<'de>>()? {
            match self.0.fields().iter().position(|field| **field == *key) {
                Some(index) => values[index] = read_json_text(map.next_value()?),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(values)
    }
}

/// Reads the text of a JSON value; `None` for what Envoy writes if a value is absent.
fn read_json_text(value: &RawValue) -> Option<Cow<'_, str>> {
    let json = value.get();
    let text = match json.as_bytes().first() {
        Some(b'"') => serde_json::from_str::<RecordText<'_>>(json).ok()?.0,
        Some(b'n') => return None,
        _ => Cow::Borrowed(json),
    };
    Some(text).filter(|text| !is_absent_value(text))
}
