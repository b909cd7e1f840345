//! Reader of decision logs: files and standard input, plain or compressed.
//!
//! Compression is recognized by the first bytes. A line that was cut off at the end of the input, as a crash leaves it,
//! ends the log; every other invalid line is an error with its number. Records borrow from the current line.
//!
//! Decides: what a reader of the log ignores, which versions (`v`) it reads.
//! Decides: how gzip is recognized (`decompress_input`), and the refusal of zstd; a line that is no record.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use serde::Deserialize;

use super::record::{FORMAT_VERSION, Record};
use super::record_field::RecordText;

/// Maximum length of a line, in bytes: a header has all rules, 256 MiB at most, in base64 if they are not UTF-8.
const MAX_LINE_BYTES: u64 = 384 << 20;
/// Size of a read, in bytes.
const BUFFER_BYTES: usize = 256 * 1024;
/// Start of the lines of decisions that this program writes.
const DECISION_LINE_START: &str = "{\"v\":1,\"type\":\"decision\",";

/// Problem of a log. Prints `name:line: problem`.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened.
    #[error("{}: cannot be opened: {error}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Reason.
        error: io::Error,
    },
    /// The file cannot be read, or its compressed data are damaged.
    #[error("{name}:{line}: cannot be read: {error}")]
    Unreadable {
        /// Name of the input.
        name: String,
        /// Number of the line, from 1.
        line: u64,
        /// Reason.
        error: io::Error,
    },
    /// A line is no record.
    #[error("{name}:{line}: not a record of a decision log: {problem}")]
    NotARecord {
        /// Name of the input.
        name: String,
        /// Number of the line, from 1.
        line: u64,
        /// Reason.
        problem: String,
    },
    /// A newer program wrote the record.
    #[error("{name}:{line}: format version {version} is not supported, only {FORMAT_VERSION} (use a newer tollkeeper)")]
    UnknownVersion {
        /// Name of the input.
        name: String,
        /// Number of the line, from 1.
        line: u64,
        /// Version of the record.
        version: u32,
    },
}

/// Common fields of all records.
#[derive(Deserialize)]
struct RecordHead<'a> {
    v: u32,
    #[serde(borrow)]
    r#type: RecordText<'a>,
}

/// Problem of a line.
#[derive(Debug)]
enum LineProblem {
    UnknownVersion(u32),
    NotARecord(String),
}

impl From<serde_json::Error> for LineProblem {
    fn from(error: serde_json::Error) -> Self {
        Self::NotARecord(error.to_string())
    }
}

/// Type of a record that this version knows.
#[derive(Clone, Copy)]
enum RecordType {
    Decision,
    Header,
    Dropped,
}

impl RecordType {
    /// Type of the record in a line; `None` if this version does not know it.
    fn of_line(line: &str) -> Result<Option<Self>, LineProblem> {
        if line.starts_with(DECISION_LINE_START) {
            return Ok(Some(Self::Decision));
        }
        let head: RecordHead<'_> = serde_json::from_str(line)?;
        if head.v != FORMAT_VERSION {
            return Err(LineProblem::UnknownVersion(head.v));
        }
        Ok(match &*head.r#type {
            "decision" => Some(Self::Decision),
            "header" => Some(Self::Header),
            "dropped" => Some(Self::Dropped),
            _ => None,
        })
    }

    fn parse_line(self, line: &str) -> serde_json::Result<Record<'_>> {
        Ok(match self {
            Self::Decision => Record::Decision(serde_json::from_str(line)?),
            Self::Header => Record::Header(serde_json::from_str(line)?),
            Self::Dropped => Record::Dropped(serde_json::from_str(line)?),
        })
    }
}

/// Reads the records of one log in their order.
pub struct RecordReader {
    name: String,
    input: Box<dyn BufRead + Send>,
    buffer: Vec<u8>,
    line: u64,
    is_truncated: bool,
}

impl RecordReader {
    /// Opens a log; `-` is standard input.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        if path.as_os_str() == "-" {
            return Self::new("standard input", io::stdin());
        }
        let file = File::open(path).map_err(|error| ReadError::Open { path: path.to_owned(), error })?;
        Self::new(&path.display().to_string(), file)
    }

    /// Reads a log from `input`; messages contain `name`.
    ///
    /// # Errors
    /// The input cannot be read.
    pub fn new(name: &str, input: impl Read + Send + 'static) -> Result<Self, ReadError> {
        let unreadable = |error| ReadError::Unreadable { name: name.to_owned(), line: 1, error };
        let input = decompress_input(input).map_err(unreadable)?;
        Ok(Self { name: name.to_owned(), input, buffer: Vec::new(), line: 0, is_truncated: false })
    }

    /// Reads the next record; `None` at the end.
    ///
    /// # Errors
    /// The line cannot be read or is no record. Reading can continue after an invalid line.
    pub fn next_record(&mut self) -> Result<Option<Record<'_>>, ReadError> {
        let record_type = loop {
            if !self.read_line()? {
                return Ok(None);
            }
            if self.buffer.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            match decode_utf8(&self.buffer).and_then(RecordType::of_line) {
                Ok(Some(known)) => break known,
                Ok(None) => {}
                Err(LineProblem::NotARecord(_)) if self.mark_truncated_if_cut_off() => return Ok(None),
                Err(problem) => return Err(self.add_location(problem)),
            }
        };
        match decode_utf8(&self.buffer).and_then(|line| Ok(record_type.parse_line(line)?)) {
            Ok(record) => Ok(Some(record)),
            Err(_) if !self.buffer.ends_with(b"\n") => {
                self.is_truncated = true;
                Ok(None)
            }
            Err(problem) => Err(self.add_location(problem)),
        }
    }

    /// Marks the log as truncated if the current line has no line end. Returns true if the log is truncated.
    fn mark_truncated_if_cut_off(&mut self) -> bool {
        self.is_truncated |= !self.buffer.ends_with(b"\n");
        self.is_truncated
    }

    /// Number of the current line, from 1; 0 before the first.
    pub const fn line_number(&self) -> u64 {
        self.line
    }

    /// True if the log ended within a record, which was left out.
    pub const fn is_truncated(&self) -> bool {
        self.is_truncated
    }

    /// Reads the next line into the buffer; `false` at the end.
    fn read_line(&mut self) -> Result<bool, ReadError> {
        self.buffer.clear();
        self.line += 1;
        let read = (&mut self.input).take(MAX_LINE_BYTES).read_until(b'\n', &mut self.buffer);
        match read {
            Ok(0) => Ok(false),
            Ok(count) if count as u64 == MAX_LINE_BYTES => {
                Err(self
                    .add_location(LineProblem::NotARecord(format!("the line is longer than {MAX_LINE_BYTES} bytes"))))
            }
            Ok(_) => Ok(true),
            // Compressed data that a crash cut off; the complete lines before the cut were read.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.is_truncated = true;
                Ok(false)
            }
            Err(error) => Err(ReadError::Unreadable { name: self.name.clone(), line: self.line, error }),
        }
    }

    fn add_location(&self, problem: LineProblem) -> ReadError {
        let (name, line) = (self.name.clone(), self.line);
        match problem {
            LineProblem::UnknownVersion(version) => ReadError::UnknownVersion { name, line, version },
            LineProblem::NotARecord(problem) => ReadError::NotARecord { name, line, problem },
        }
    }
}

fn decode_utf8(line: &[u8]) -> Result<&str, LineProblem> {
    std::str::from_utf8(line).map_err(|error| LineProblem::NotARecord(error.to_string()))
}

/// Decompresses gzip, recognized by its first bytes.
///
/// # Errors
/// The input cannot be read, or is compressed with zstd, as earlier versions wrote it.
pub fn decompress_input(input: impl Read + Send + 'static) -> io::Result<Box<dyn BufRead + Send>> {
    let mut start = Vec::new();
    let mut input = input;
    (&mut input).take(4).read_to_end(&mut start)?;
    let format: [u8; 4] = std::array::from_fn(|index| start.get(index).copied().unwrap_or(0));
    let whole = BufReader::with_capacity(BUFFER_BYTES, io::Cursor::new(start).chain(input));
    Ok(match format {
        [0x28, 0xb5, 0x2f, 0xfd] => {
            let problem = "it is compressed with zstd (decompress it with `zstd -d FILE`, or use gzip)";
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        [0x1f, 0x8b, ..] => Box::new(BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(whole))),
        _ => Box::new(whole),
    })
}
