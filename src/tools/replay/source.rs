//! One source of traffic: a decision log in a file or a stream, or rows of another format with a mapping.

use std::cmp;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::field_map::FieldMap;
use super::record_converter::{RecordConverter, RuleSetCache};
use super::recorded_request::RecordedRequest;
use super::replayer::RecordedHeader;
use super::row_reader::RowReader;
use crate::base::clock::Time;
use crate::decide::log::reader::{ReadError, RecordReader, decompress_input};
use crate::decide::log::record::Record;
use crate::decide::log::stream::input::{EntryRange, StreamInput};
use crate::settings::decision_log::StreamSettings;
use crate::settings::decisions::DecisionSettings;

/// Location of traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrafficLocation {
    /// A file; `-` is standard input.
    File(PathBuf),
    /// A stream in Redis.
    Stream(Box<StreamSettings>),
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceSummary {
    /// Rows that are no request: no descriptor had all of its fields.
    pub skipped: u64,
    /// Descriptors whose values the log leaves out.
    pub hidden: u64,
    /// Requests too far out of order to be sorted.
    pub late: u64,
    /// The file ends within a record.
    pub truncated: bool,
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
    Log { reader: RecordReader, converter: Box<RecordConverter>, is_start: bool },
    Rows { reader: Box<RowReader>, sorted: ReorderBuffer },
}

/// Input that counts the bytes that are read.
struct CountedInput<R> {
    input: R,
    bytes: Arc<AtomicU64>,
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
        let path = match location {
            TrafficLocation::File(path) => path,
            TrafficLocation::Stream(stream) => {
                let input = StreamInput::open(stream, EntryRange::ALL)
                    .map_err(|error| SourceError::UnreadStream { key: stream.key.clone(), error })?;
                return Self::new(&format!("redis:{}", stream.key), CountedInput { input, bytes }, options);
            }
        };
        if path == Path::new("-") {
            return Self::new("standard input", CountedInput { input: io::stdin(), bytes }, options);
        }
        let file = File::open(path).map_err(|error| SourceError::Unopened { path: path.to_owned(), error })?;
        Self::new(&path.display().to_string(), CountedInput { input: file, bytes }, options)
    }

    fn new(name: &str, input: impl Read + Send + 'static, options: &SourceOptions) -> Result<Self, SourceError> {
        let unusable = |line, problem| SourceError::Unusable { name: name.to_owned(), line, problem };
        let format = match &options.map {
            Some(map) => {
                let input = decompress_input(input).map_err(|error| unusable(1, error.to_string()))?;
                let reader = RowReader::new(input, map.clone()).map_err(|error| unusable(error.line, error.problem))?;
                SourceFormat::Rows { reader: Box::new(reader), sorted: ReorderBuffer::default() }
            }
            None => {
                let converter = RecordConverter::new(Arc::clone(&options.cache), options.behaviour.clone());
                let reader = RecordReader::new(name, input)?;
                SourceFormat::Log { reader, converter: Box::new(converter), is_start: true }
            }
        };
        Ok(Self { name: name.to_owned(), format })
    }

    /// Reads the next event; `None` at the end.
    ///
    /// # Errors
    /// A line cannot be read.
    pub fn next_event(&mut self) -> Result<Option<TrafficEvent>, SourceError> {
        let unusable = |line, problem| SourceError::Unusable { name: self.name.clone(), line, problem };
        match &mut self.format {
            SourceFormat::Log { reader, converter, is_start } => {
                let line = reader.line_number() + 1;
                let record = match reader.next_record() {
                    Err(error @ ReadError::NotARecord { .. }) if *is_start => return Err(SourceError::NotALog(error)),
                    record => record?,
                };
                *is_start = false;
                let event = match record {
                    None => return Ok(None),
                    Some(Record::Decision(decision)) => {
                        converter.convert_decision(&decision).map(TrafficEvent::Request)
                    }
                    Some(Record::Header(header)) => {
                        converter.convert_header(*header).map(|header| TrafficEvent::Header(Box::new(header)))
                    }
                    Some(Record::Dropped(dropped)) => Ok(TrafficEvent::Dropped(dropped.count)),
                };
                event.map(Some).map_err(|problem| unusable(line, problem))
            }
            SourceFormat::Rows { reader, sorted } => loop {
                match reader.next_request().map_err(|error| unusable(error.line, error.problem))? {
                    None => return Ok(sorted.pop().map(TrafficEvent::Request)),
                    Some(request) => {
                        if let Some(earliest) = sorted.push(request) {
                            return Ok(Some(TrafficEvent::Request(earliest)));
                        }
                    }
                }
            },
        }
    }

    /// Copies the text that requests share, so that this thread and that of earlier requests do not share its counter.
    pub(super) fn renew_shared_text(&mut self) {
        if let SourceFormat::Log { converter, .. } = &mut self.format {
            converter.renew_shared_text();
        }
    }

    /// Properties of the part that was read.
    pub fn summary(&self) -> SourceSummary {
        match &self.format {
            SourceFormat::Log { reader, converter, .. } => {
                let (hidden, truncated) = (converter.hidden, reader.is_truncated());
                SourceSummary { hidden, truncated, ..SourceSummary::default() }
            }
            SourceFormat::Rows { reader, sorted } => {
                SourceSummary { skipped: reader.skipped, late: sorted.late, ..SourceSummary::default() }
            }
        }
    }
}

/// Requests that wait to be sorted.
const MAX_WAITING_REQUESTS: usize = 1 << 16;

/// Sorts requests by time, as far as [`MAX_WAITING_REQUESTS`] requests reach.
#[derive(Debug, Default)]
pub(super) struct ReorderBuffer {
    waiting: BinaryHeap<WaitingRequest>,
    added: u64,
    last: Time,
    /// Requests that came too late to be sorted.
    pub(super) late: u64,
}

#[derive(Debug)]
struct WaitingRequest {
    order: (Time, u64),
    request: RecordedRequest,
}

impl ReorderBuffer {
    /// Adds a request. Returns the earliest one if the buffer is full.
    pub(super) fn push(&mut self, mut request: RecordedRequest) -> Option<RecordedRequest> {
        self.added += 1;
        if request.arrival < self.last {
            self.late += 1;
            request.arrival = self.last;
        }
        self.waiting.push(WaitingRequest { order: (request.arrival, self.added), request });
        if self.waiting.len() > MAX_WAITING_REQUESTS { self.pop() } else { None }
    }

    /// Returns the earliest request.
    pub(super) fn pop(&mut self) -> Option<RecordedRequest> {
        let request = self.waiting.pop()?.request;
        self.last = request.arrival;
        Some(request)
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
