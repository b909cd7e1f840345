//! One source of traffic: a decision log in a file or a stream, or rows of another format with a mapping.
//!
//! A decision is logged after it was made, so those made at once are logged in any order: charges in Redis are sorted by
//! its time, within a second. The counters of a process itself have no common time; their records keep the order of the
//! log. Rows of another format are sorted by time within `MAX_UNSORTED_ROWS`.
//!
//! Decides: that a replay reads all of its traffic (no `--from`, `--to`).
//! Decides: how far records and rows may be out of order (`ReorderBuffer`).

use std::cmp;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::field_map::{AbsentField, FieldMap};
use super::log_completeness::SequenceFindings;
use super::record_converter::{RecordConverter, RuleSetCache};
use super::recorded_request::RecordedRequest;
use super::replayer::RecordedHeader;
use super::row_reader::{RowError, RowReader};
use crate::base::clock::Time;
use crate::decide::log::reader::{ReadError, RecordReader, decompress_input};
use crate::decide::log::record::Record;
use crate::decide::log::redis_stream::{EntryRange, StreamInput};
use crate::settings::decision_log::RedisStreamSettings;
use crate::settings::decisions::DecisionSettings;

/// Location of traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrafficLocation {
    /// A file; `-` is standard input.
    File(PathBuf),
    /// A stream in Redis.
    Stream(Box<RedisStreamSettings>),
}

/// Element of a file of traffic.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are requests")]
pub enum TrafficEvent {
    /// A request.
    Request(RecordedRequest),
    /// Settings and rules of a process.
    Header(Box<RecordedHeader>),
    /// Decisions that the log lost.
    Dropped(u64),
}

/// Properties of a file, known at its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceSummary {
    /// Rows that were read.
    pub rows: u64,
    /// Rows that are no request: no descriptor had all of its fields.
    pub skipped: u64,
    /// Descriptors whose values the log leaves out.
    pub hidden: u64,
    /// Requests too far out of order to be sorted.
    pub late: u64,
    /// The file ends within a record.
    pub truncated: bool,
    /// Fields of the mapping that rows lack.
    pub absent_fields: Vec<AbsentField>,
    /// Irregularities in the numbers of records, by process.
    pub sequences: Vec<SequenceFindings>,
}

impl SourceSummary {
    /// Adds the properties of another file.
    pub(super) fn add_summary(&mut self, other: Self) {
        self.rows += other.rows;
        self.skipped += other.skipped;
        self.hidden += other.hidden;
        self.late += other.late;
        self.truncated |= other.truncated;
        for AbsentField { field, rows } in other.absent_fields {
            match self.absent_fields.iter_mut().find(|known| known.field == field) {
                Some(known) => known.rows += rows,
                None => self.absent_fields.push(AbsentField { field, rows }),
            }
        }
    }
}

/// Traffic that cannot be read. Prints `file:line: problem`.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The file cannot be opened.
    #[error("{}: cannot be opened: {error}", .path.display())]
    Unopened {
        /// The file.
        path: PathBuf,
        /// Reason.
        error: io::Error,
    },
    /// The stream cannot be read.
    #[error("redis:{key}: {error}")]
    UnreadStream {
        /// Key of the stream.
        key: String,
        /// Reason.
        error: io::Error,
    },
    /// The file is no decision log, or is damaged.
    #[error("{0}")]
    Log(#[from] ReadError),
    /// The first line is not that of a decision log.
    #[error("{0} (give --map for an access log or a table)")]
    NotALog(ReadError),
    /// A record or a row cannot be used.
    #[error("{name}:{line}: {problem}")]
    Unusable {
        /// Name of the file.
        name: String,
        /// Number of the line, from 1.
        line: u64,
        /// Reason, and a fix.
        problem: String,
    },
}

/// Means of reading files, the same for all files of a replay.
#[derive(Clone, Debug)]
pub struct SourceOptions {
    /// Mapping of fields; `None` for decision logs.
    pub map: Option<FieldMap>,
    /// Settings that headers do not have.
    pub behaviour: DecisionSettings,
    pub(super) cache: Arc<RuleSetCache>,
}

impl SourceOptions {
    /// Creates the options of a replay.
    pub fn new(map: Option<FieldMap>, behaviour: DecisionSettings) -> Self {
        Self { map, behaviour, cache: Arc::default() }
    }
}

/// Reader of one file.
pub struct TrafficSource {
    name: String,
    format: SourceFormat,
}

enum SourceFormat {
    Log(Box<LogSource>),
    Rows { reader: Box<RowReader>, sorted: ReorderBuffer, last: Time, late: u64 },
}

/// A decision log.
struct LogSource {
    reader: RecordReader,
    converter: RecordConverter,
    is_start: bool,
    sorted: ReorderBuffer,
    /// Header that follows the requests being sorted.
    next_header: Option<TrafficEvent>,
}

/// Input that counts the bytes that are read.
pub struct CountedInput<R> {
    /// The input.
    pub input: R,
    /// Counter to which the bytes are added.
    pub bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for CountedInput<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl TrafficSource {
    /// Opens a file or a stream. Adds the bytes that are read to `bytes`.
    ///
    /// # Errors
    /// It cannot be opened or read.
    pub fn open(
        location: &TrafficLocation,
        options: &SourceOptions,
        bytes: Arc<AtomicU64>,
    ) -> Result<Self, SourceError> {
        let name = location.name();
        let input = CountedInput { input: location.open_input(EntryRange::ALL)?, bytes };
        let unusable = |line, problem| SourceError::Unusable { name: name.clone(), line, problem };
        let format = match &options.map {
            Some(map) => {
                let input = decompress_input(input).map_err(|error| unusable(1, error.to_string()))?;
                let reader = RowReader::new(input, map.clone()).map_err(|error| unusable(error.line, error.problem))?;
                let sorted = ReorderBuffer::new(MAX_UNSORTED_ROWS, u64::MAX);
                SourceFormat::Rows { reader: Box::new(reader), sorted, last: Time::default(), late: 0 }
            }
            None => SourceFormat::Log(Box::new(LogSource {
                reader: RecordReader::new(&name, input)?,
                converter: RecordConverter::new(Arc::clone(&options.cache), options.behaviour.clone()),
                is_start: true,
                sorted: ReorderBuffer::new(MAX_UNSORTED_DECISIONS, MAX_DISORDER_US),
                next_header: None,
            })),
        };
        Ok(Self { name, format })
    }

    /// Reads the next event; `None` at the end.
    ///
    /// # Errors
    /// A line cannot be read.
    pub fn next_event(&mut self) -> Result<Option<TrafficEvent>, SourceError> {
        match &mut self.format {
            SourceFormat::Log(log) => log.next_event(&self.name),
            SourceFormat::Rows { reader, sorted, last, late } => loop {
                let row = reader.next_request().map_err(|RowError { line, problem }| SourceError::Unusable {
                    name: self.name.clone(),
                    line,
                    problem,
                })?;
                let earliest = match row {
                    Some(request) => match sorted.push(request) {
                        None => continue,
                        earliest => earliest,
                    },
                    None => sorted.pop(),
                };
                return Ok(earliest.map(|mut request| {
                    *late += u64::from(request.arrival < *last);
                    *last = request.arrival.max(*last);
                    request.arrival = *last;
                    TrafficEvent::Request(request)
                }));
            },
        }
    }

    /// Copies the text that requests share, so that this thread and that of earlier requests do not share its counter.
    pub(super) fn renew_shared_arcs(&mut self) {
        if let SourceFormat::Log(log) = &mut self.format {
            log.converter.renew_shared_arcs();
        }
    }

    /// Properties of the part that was read.
    pub fn summary(&self) -> SourceSummary {
        match &self.format {
            SourceFormat::Log(log) => {
                let (hidden, truncated) = (log.converter.hidden, log.reader.is_truncated());
                SourceSummary { hidden, truncated, ..SourceSummary::default() }
            }
            SourceFormat::Rows { reader, late, .. } => SourceSummary {
                rows: reader.rows,
                skipped: reader.skipped,
                absent_fields: reader.absent_fields(),
                late: *late,
                ..SourceSummary::default()
            },
        }
    }
}

impl TrafficLocation {
    /// Name in messages.
    pub fn name(&self) -> String {
        match self {
            Self::Stream(stream) => format!("redis:{}", stream.key),
            Self::File(path) if path == Path::new("-") => "standard input".to_owned(),
            Self::File(path) => path.display().to_string(),
        }
    }

    /// Opens the file, or these entries of the stream.
    ///
    /// # Errors
    /// It cannot be opened or read.
    pub fn open_input(&self, entries: EntryRange) -> Result<Box<dyn Read + Send>, SourceError> {
        match self {
            Self::Stream(stream) => match StreamInput::open(stream, entries) {
                Ok(input) => Ok(Box::new(input)),
                Err(error) => Err(SourceError::UnreadStream { key: stream.key.clone(), error }),
            },
            Self::File(path) if path == Path::new("-") => Ok(Box::new(io::stdin())),
            Self::File(path) => match File::open(path) {
                Ok(file) => Ok(Box::new(file)),
                Err(error) => Err(SourceError::Unopened { path: path.to_owned(), error }),
            },
        }
    }
}

impl LogSource {
    /// Reads the next event, with requests in the order of their charges in Redis.
    fn next_event(&mut self, name: &str) -> Result<Option<TrafficEvent>, SourceError> {
        loop {
            if self.next_header.is_some() {
                return Ok(self.sorted.pop().map(TrafficEvent::Request).or_else(|| self.next_header.take()));
            }
            match self.read_event(name)? {
                Some(TrafficEvent::Request(request)) => {
                    if request.last_charge_time_in_redis().is_none() && self.sorted.is_empty() {
                        return Ok(Some(TrafficEvent::Request(request)));
                    }
                    if let Some(earliest) = self.sorted.push(request) {
                        return Ok(Some(TrafficEvent::Request(earliest)));
                    }
                }
                // The rules of the requests before it are those of earlier headers.
                Some(header @ TrafficEvent::Header(_)) => self.next_header = Some(header),
                Some(dropped @ TrafficEvent::Dropped(_)) => return Ok(Some(dropped)),
                None => return Ok(self.sorted.pop().map(TrafficEvent::Request)),
            }
        }
    }

    fn read_event(&mut self, name: &str) -> Result<Option<TrafficEvent>, SourceError> {
        let Self { reader, converter, is_start, .. } = self;
        let line = reader.line_number() + 1;
        let unusable = |problem| SourceError::Unusable { name: name.to_owned(), line, problem };
        let record = match reader.next_record() {
            Err(error @ ReadError::NotARecord { .. }) if *is_start => return Err(SourceError::NotALog(error)),
            record => record?,
        };
        *is_start = false;
        let event = match record {
            None => return Ok(None),
            Some(Record::Decision(decision)) => {
                TrafficEvent::Request(converter.convert_decision(&decision).map_err(unusable)?)
            }
            Some(Record::Header(header)) => {
                TrafficEvent::Header(Box::new(converter.convert_header(*header).map_err(unusable)?))
            }
            Some(Record::Dropped(dropped)) => TrafficEvent::Dropped(dropped.count),
        };
        Ok(Some(event))
    }
}

/// Maximum number of rows that wait to be sorted.
const MAX_UNSORTED_ROWS: usize = 1 << 16;
/// Maximum number of decisions that wait to be sorted, of each file.
const MAX_UNSORTED_DECISIONS: usize = 1 << 13;
/// Time within which decisions are sorted: it takes less from a charge in Redis to its record.
const MAX_DISORDER_US: u64 = 1_000_000;

/// Sorts requests by time, as far as a number of requests and a time reach.
#[derive(Debug)]
struct ReorderBuffer {
    waiting: BinaryHeap<WaitingRequest>,
    added: u64,
    latest: Time,
    max_requests: usize,
    max_disorder_us: u64,
}

#[derive(Debug)]
struct WaitingRequest {
    order: (Time, u64),
    request: RecordedRequest,
}

impl ReorderBuffer {
    fn new(max_requests: usize, max_disorder_us: u64) -> Self {
        Self { waiting: BinaryHeap::new(), added: 0, latest: Time::default(), max_requests, max_disorder_us }
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a request. Returns the earliest one if none that comes later can be before it.
    fn push(&mut self, request: RecordedRequest) -> Option<RecordedRequest> {
        self.added += 1;
        let at = request.order_time();
        self.latest = self.latest.max(at);
        self.waiting.push(WaitingRequest { order: (at, self.added), request });
        let is_due = |earliest: &WaitingRequest| self.latest.since_us(earliest.order.0) > self.max_disorder_us;
        let returns = self.waiting.len() > self.max_requests || self.waiting.peek().is_some_and(is_due);
        if returns { self.pop() } else { None }
    }

    /// Returns the earliest request.
    fn pop(&mut self) -> Option<RecordedRequest> {
        self.waiting.pop().map(|waiting| waiting.request)
    }
}

/// The earliest request is the greatest, because a heap returns the greatest.
impl Ord for WaitingRequest {
    fn cmp(&self, other: &Self) -> cmp::Ordering {
        other.order.cmp(&self.order)
    }
}

impl PartialOrd for WaitingRequest {
    fn partial_cmp(&self, other: &Self) -> Option<cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for WaitingRequest {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for WaitingRequest {}
