//! Streams in Redis that hold a decision log: one record in the field `record` of each entry; and the input that reads
//! the records of a stream from begin to end, as the lines of a file.
//!
//! The sink `redis:STREAM` writes them. The input reads the entries that the stream has at the start, in parts, and
//! leaves them there. Other programs may write to a stream too: nothing in an entry is trusted.
//!
//! Decides: how a stream of the decision log is read, and how often a read is tried again.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use serde::de::IgnoredAny;
use tokio::runtime::{Builder, Runtime};

use crate::base::text::escape_unprintable_json;
use crate::settings::decision_log::RedisStreamSettings;
use crate::store::client::redis::key_connection::{KeyCommandError, KeyOwnerConnection};
use crate::store::client::redis::resp::{Reply, reply_bytes, reply_text};

/// Field of an entry that has the record.
const RECORD_FIELD: &[u8] = b"record";

/// Id of an entry: the time when it was written, and a number. Prints `MILLISECONDS-NUMBER`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId {
    /// Milliseconds since the Unix epoch, by the clock of Redis.
    pub ms: u64,
    /// Number within the millisecond.
    pub number: u64,
}

/// Text that cannot be read as the id of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an id of an entry, such as 1783512000000-0")]
pub struct InvalidEntryId;

impl EntryId {
    /// Greatest id.
    pub const MAX: Self = Self { ms: u64::MAX, number: u64::MAX };

    /// Next greater id; `None` after the greatest.
    pub fn next(self) -> Option<Self> {
        match self.number.checked_add(1) {
            Some(number) => Some(Self { number, ..self }),
            None => self.ms.checked_add(1).map(|ms| Self { ms, number: 0 }),
        }
    }
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.number)
    }
}

impl FromStr for EntryId {
    type Err = InvalidEntryId;

    fn from_str(text: &str) -> Result<Self, InvalidEntryId> {
        let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
            true => text.parse().map_err(|_| InvalidEntryId),
            false => Err(InvalidEntryId),
        };
        let (ms, rest) = text.split_once('-').ok_or(InvalidEntryId)?;
        Ok(Self { ms: number(ms)?, number: number(rest)? })
    }
}

/// Entry of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamEntry<'r> {
    /// Its id.
    pub id: EntryId,
    /// Value of the field `record`; `None` if the entry has no such field.
    pub record: Option<&'r [u8]>,
}

/// Reads the entries of a reply to XREAD of one stream; `None` if the reply has another form.
pub fn parse_read_entries(reply: &Reply) -> Option<Vec<StreamEntry<'_>>> {
    match reply {
        Reply::Array(streams) => match streams.first()? {
            Reply::Array(stream) => parse_entries(stream.get(1)?),
            _ => None,
        },
        Reply::Null => Some(Vec::new()),
        _ => None,
    }
}

/// Reads the entries of a reply to XRANGE; `None` if the reply has another form.
pub(crate) fn parse_entries(reply: &Reply) -> Option<Vec<StreamEntry<'_>>> {
    match reply {
        Reply::Array(replies) => replies.iter().map(parse_entry).collect(),
        _ => None,
    }
}

fn parse_entry(reply: &Reply) -> Option<StreamEntry<'_>> {
    let Reply::Array(parts) = reply else { return None };
    let [id, fields] = &**parts else { return None };
    let id = reply_text(id)?.parse().ok()?;
    let Reply::Array(fields) = fields else { return None };
    let record = fields.chunks_exact(2).find(|pair| reply_bytes(&pair[0]) == Some(RECORD_FIELD));
    Some(StreamEntry { id, record: record.and_then(|pair| reply_bytes(&pair[1])) })
}

/// Reason why the record of an entry cannot be printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableRecord {
    /// The entry has no field `record`.
    #[error("it has no field `record`")]
    Missing,
    /// The record is not JSON.
    #[error("its record is not JSON")]
    NotJson,
}

/// Returns a record as one line of JSON without unprintable characters, and without a line break at its end.
///
/// # Errors
/// The record is missing, or is no JSON object.
pub fn format_json_line(record: Option<&[u8]>) -> Result<String, UnusableRecord> {
    let record = record.ok_or(UnusableRecord::Missing)?;
    let text = std::str::from_utf8(record).map_err(|_| UnusableRecord::NotJson)?;
    if !text.trim_start().starts_with('{') || serde_json::from_str::<IgnoredAny>(text).is_err() {
        return Err(UnusableRecord::NotJson);
    }
    // Raw line feeds are between values only.
    Ok(escape_unprintable_json(text).replace('\n', " "))
}

/// Maximum number of entries of a read.
const MAX_ENTRIES_PER_READ: u64 = 500;
/// Upper bound on a read.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of times that a read is tried while the server cannot be reached.
const MAX_TRIES: u32 = 5;
/// Pause between two tries.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Longest time between a decision and its entry, differences of clocks included, that a range of times allows for.
const TIME_MARGIN_MS: u64 = 60_000;

/// Part of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryRange {
    first: EntryId,
    last: EntryId,
}

impl EntryRange {
    /// All entries.
    pub const ALL: Self = Self { first: EntryId { ms: 0, number: 0 }, last: EntryId::MAX };

    /// Entries that decisions of these times may have, in microseconds since the Unix epoch; a minute more at each end.
    ///
    /// Headers before them are outside.
    pub const fn around_decision_times(from_us: u64, to_us: u64) -> Self {
        let first = EntryId { ms: (from_us / 1000).saturating_sub(TIME_MARGIN_MS), number: 0 };
        Self { first, last: EntryId { ms: (to_us / 1000).saturating_add(TIME_MARGIN_MS), number: u64::MAX } }
    }
}

/// Reader of the lines of a stream.
#[derive(Debug)]
pub struct StreamInput {
    settings: Arc<RedisStreamSettings>,
    connection: KeyOwnerConnection,
    /// Next entry, and the last one; `None` at the end.
    rest: Option<EntryRange>,
    /// Lines that were read from Redis, and the number of bytes that were passed on.
    lines: Vec<u8>,
    passed: usize,
    /// Thread of the connection; dropped after it.
    runtime: Runtime,
}

impl StreamInput {
    /// Opens a stream, and finds its last entry. Blocks; not for asynchronous code.
    ///
    /// # Errors
    /// Redis cannot be reached or rejects the command, or the stream has no entries.
    pub fn open(settings: &RedisStreamSettings, range: EntryRange) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let connection = {
            let _within = runtime.enter();
            KeyOwnerConnection::start(&settings.deployment, settings.key.as_bytes())
        };
        let settings = Arc::new(settings.clone());
        let mut input = Self { settings, connection, rest: None, lines: Vec::new(), passed: 0, runtime };
        let last =
            input.send_command(&[b"XREVRANGE", input.settings.clone().key.as_bytes(), b"+", b"-", b"COUNT", b"1"])?;
        let last = parse_entries(&last).ok_or_else(|| input.invalid_reply_error())?.first().map(|entry| entry.id);
        let Some(last) = last else {
            let text = "the stream has no entries (check its name, and the address of Redis)";
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        };
        // Entries that are written meanwhile are left out, so that the input ends.
        input.rest = Some(EntryRange { last: range.last.min(last), ..range });
        Ok(input)
    }

    /// Reads the next entries; no lines at the end.
    fn read_next_entries(&mut self) -> io::Result<()> {
        (self.passed, self.lines) = (0, Vec::new());
        let mut count = MAX_ENTRIES_PER_READ;
        while let Some(EntryRange { first, last }) = self.rest.filter(|range| range.first <= range.last) {
            let settings = Arc::clone(&self.settings);
            let [from, to, most] = [first.to_string(), last.to_string(), count.to_string()];
            let words = [b"XRANGE", settings.key.as_bytes(), from.as_bytes(), to.as_bytes(), b"COUNT", most.as_bytes()];
            let reply = match self.send_command(&words) {
                // Large entries: fewer at a time.
                Err(error) if error.kind() == io::ErrorKind::FileTooLarge && count > 1 => {
                    count = count.div_ceil(8);
                    continue;
                }
                reply => reply?,
            };
            let found = parse_entries(&reply).ok_or_else(|| self.invalid_reply_error())?;
            self.rest = found.last().and_then(|entry| entry.id.next()).map(|first| EntryRange { first, last });
            found.iter().try_for_each(|entry| self.append_line(entry))?;
            if !self.lines.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Appends the line of an entry.
    fn append_line(&mut self, entry: &StreamEntry<'_>) -> io::Result<()> {
        let Some(record) = entry.record else {
            let text = format!("the entry {} has no field `record` (is it a decision log?)", entry.id);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        };
        let start = self.lines.len();
        self.lines.extend_from_slice(record);
        // One entry is one line; in JSON, a line break can only be white space.
        self.lines[start..].iter_mut().filter(|byte| **byte == b'\n').for_each(|byte| *byte = b' ');
        self.lines.push(b'\n');
        Ok(())
    }

    /// Sends a command that changes nothing, again if the server cannot be reached.
    fn send_command(&mut self, words: &[&[u8]]) -> io::Result<Reply> {
        let mut tries = 1;
        loop {
            match self.runtime.block_on(self.connection.call(words, READ_TIMEOUT)) {
                Ok(reply) => return Ok(reply),
                Err(error) if error.is_transient() && !error.is_too_large && tries < MAX_TRIES => {
                    tries += 1;
                    thread::sleep(RETRY_INTERVAL);
                }
                Err(error) => return Err(to_io_error(&error)),
            }
        }
    }

    fn invalid_reply_error(&self) -> io::Error {
        io::Error::other("an invalid reply (is it Redis 5.0 or newer, or Valkey?)")
    }
}

fn to_io_error(error: &KeyCommandError) -> io::Error {
    let kind = if error.is_too_large { io::ErrorKind::FileTooLarge } else { io::ErrorKind::Other };
    let needs = if error.text.starts_with("NOPERM") { " (the user needs +xrange +xrevrange)" } else { "" };
    io::Error::new(kind, format!("redis: {}{needs}", error.text))
}

impl Read for StreamInput {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.passed == self.lines.len() {
            self.read_next_entries()?;
        }
        let read = buffer.len().min(self.lines.len() - self.passed);
        buffer[..read].copy_from_slice(&self.lines[self.passed..self.passed + read]);
        self.passed += read;
        Ok(read)
    }
}
