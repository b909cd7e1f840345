//! Text protocol of memcached: commands, replies decoded within bounds, and errors: their kinds and advice, and the
//! meaning of error replies.
//!
//! A server may be broken or hostile: a length is checked before anything of that size is kept, and a line has a
//! maximum length.
//!
//! Decides: what a malformed or too large memcached reply means, or a key that holds no number.
//! Decides: which errors concern the whole server.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::base::named_enum::named_enum;
use crate::store::client::connect::{CallErrorKind, ConnectError};
use crate::store::client::pipeline::{NoMergeableCall, PipelineError, WireProtocol};

/// Text protocol of memcached. The last word of `add` is the value; keys must hold neither spaces nor control bytes.
#[derive(Debug)]
pub struct MemcacheProtocol;

impl WireProtocol for MemcacheProtocol {
    type Reply = MemcacheReply;
    type Mergeable = NoMergeableCall;

    const MAX_REPLY_BYTES: usize = MAX_VALUE_BYTES + (4 << 10);

    fn encode(out: &mut BytesMut, words: &[&[u8]]) {
        let (line, value) = match words {
            [b"add", .., value] => (&words[..words.len() - 1], Some(*value)),
            _ => (words, None),
        };
        for (index, word) in line.iter().enumerate() {
            if index > 0 {
                out.put_u8(b' ');
            }
            out.put_slice(word);
        }
        out.put_slice(b"\r\n");
        if let Some(value) = value {
            out.put_slice(value);
            out.put_slice(b"\r\n");
        }
    }

    fn decode(input: &mut BytesMut) -> io::Result<Option<MemcacheReply>> {
        decode_reply(input)
    }

    fn error_text(reply: &MemcacheReply) -> Option<&str> {
        if let MemcacheReply::Error(text) = reply { Some(text) } else { None }
    }
}

/// Maximum size of a value, in bytes: the default of memcached. Counters have at most 20.
pub const MAX_VALUE_BYTES: usize = 1 << 20;
/// Maximum length of a line, in bytes: a key of 250 bytes, and numbers.
const MAX_LINE_BYTES: usize = 1024;

/// Reply to one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemcacheReply {
    /// The number after an increment or a decrement.
    Number(u64),
    /// The value of a key.
    Value(Bytes),
    /// The key does not exist.
    Missing,
    /// The value was stored.
    Stored,
    /// The key exists already.
    NotStored,
    /// The key was deleted.
    Deleted,
    /// The version of the server.
    Version,
    /// An error reply, with its text.
    Error(String),
}

/// Removes the first reply from `input`; `None` while it is incomplete.
///
/// # Errors
/// The bytes are no reply, or the reply is too long.
pub fn decode_reply(input: &mut BytesMut) -> io::Result<Option<MemcacheReply>> {
    let Some(end) = find_line_end(input)? else { return Ok(None) };
    let line = &input[..end - 2];
    if let Some(header) = line.strip_prefix(b"VALUE ") {
        let length = parse_value_length(header)?;
        return Ok(take_value(input, end, length)?.map(MemcacheReply::Value));
    }
    let reply = parse_line(line)?;
    input.advance(end);
    Ok(Some(reply))
}

/// Returns the index after the first line; `None` while it is incomplete.
fn find_line_end(input: &[u8]) -> io::Result<Option<usize>> {
    let received = &input[..input.len().min(MAX_LINE_BYTES)];
    match memchr::memchr(b'\n', received) {
        Some(at) if at > 0 && received[at - 1] == b'\r' => Ok(Some(at + 1)),
        None if received.len() < MAX_LINE_BYTES => Ok(None),
        Some(_) | None => Err(invalid_reply()),
    }
}

/// Parses a reply of one line, other than the `VALUE` lines of a read.
fn parse_line(line: &[u8]) -> io::Result<MemcacheReply> {
    Ok(match line {
        b"NOT_FOUND" | b"END" => MemcacheReply::Missing,
        b"STORED" => MemcacheReply::Stored,
        b"NOT_STORED" => MemcacheReply::NotStored,
        b"DELETED" => MemcacheReply::Deleted,
        _ if line.starts_with(b"VERSION ") => MemcacheReply::Version,
        _ if line == b"ERROR" || line.starts_with(b"CLIENT_ERROR ") || line.starts_with(b"SERVER_ERROR ") => {
            MemcacheReply::Error(String::from_utf8_lossy(line).into_owned())
        }
        _ => MemcacheReply::Number(parse_number(line).ok_or_else(invalid_reply)?),
    })
}

/// Reads the length in `KEY FLAGS LENGTH`, which the number of a compare-and-swap may follow.
fn parse_value_length(header: &[u8]) -> io::Result<usize> {
    let length = header.split(|byte| *byte == b' ').nth(2).and_then(parse_number);
    let length = length.and_then(|length| usize::try_from(length).ok()).filter(|length| *length <= MAX_VALUE_BYTES);
    length.ok_or_else(invalid_reply)
}

/// Removes a value of `length` bytes that starts at `start`, and the lines around it.
fn take_value(input: &mut BytesMut, start: usize, length: usize) -> io::Result<Option<Bytes>> {
    const END: &[u8] = b"\r\nEND\r\n";
    let value_end = start + length;
    let Some(after) = input.get(value_end..) else { return Ok(None) };
    if !END.starts_with(&after[..after.len().min(END.len())]) {
        return Err(invalid_reply());
    }
    if after.len() < END.len() {
        return Ok(None);
    }
    let mut reply = input.split_to(value_end + END.len());
    reply.advance(start);
    reply.truncate(length);
    Ok(Some(reply.freeze()))
}

/// Parses a number of decimal digits; `None` for anything else and above 64 bits. A decrement leaves spaces at the end.
pub fn parse_number(text: &[u8]) -> Option<u64> {
    let digits = text.trim_ascii_end();
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    is_number.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

fn invalid_reply() -> io::Error {
    io::Error::other("not a reply of memcached")
}

named_enum! {
    /// Reason why memcached did not complete a call. Kinds that Redis has too have the same names.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
    pub enum MemcacheError {
        /// No reply arrived before the deadline; the call may have run.
        #[error("no answer in time")]
        Timeout = "timeout",
        /// The caller's deadline is too short for a call.
        #[error("the caller leaves no time to ask")]
        NoTime = "no_time",
        /// No connection is open, or no server is known.
        #[error("not connected")]
        Unreachable = "unreachable",
        /// The breaker is open: the server was not asked, because its last calls failed.
        #[error("not asked, because its last calls failed")]
        BreakerOpen = "breaker_open",
        /// The connection closed before the reply; the call may have run.
        #[error("the connection broke")]
        Broken = "broken",
        /// The server cannot store values.
        #[error("the server takes no writes")]
        NoWrites = "no_writes",
        /// The value is not a number.
        #[error("the key holds a value that is no number")]
        WrongType = "wrong_type",
        /// The reply is invalid, or an error that the client does not know.
        #[error("an invalid reply")]
        BadReply = "bad_reply",
        /// The server or the connection needs other settings.
        #[error("the server does not serve this client")]
        Misconfigured = "misconfigured",
        /// Too many calls wait for one server.
        #[error("too many calls are queued")]
        Overloaded = "overloaded",
        /// The limit needs more than an increment.
        #[error("memcache cannot count such a limit")]
        Unsupported = "unsupported",
    }
}

impl MemcacheError {
    /// Setting or server property that an operator should check.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Timeout => "TOLLKEEPER_STORE_TIMEOUT bounds the wait",
            Self::NoTime => "its deadline (grpc-timeout) must leave more than 5 ms",
            Self::Unreachable | Self::BreakerOpen | Self::Broken => "see the preceding connection errors",
            Self::NoWrites => "its memory (-m) may be full",
            Self::WrongType => "CACHE_KEY_PREFIX separates keys from those of other programs",
            Self::BadReply => "is it memcached 1.4 or newer?",
            Self::Misconfigured => "see the preceding errors for the setting",
            Self::Overloaded => "the server cannot keep up with the load",
            Self::Unsupported => {
                "memcache counts strict fixed windows that count rejected hits, one for each descriptor"
            }
        }
    }

    /// Parses the text of an error reply.
    pub fn from_reply(text: &str) -> Self {
        let message = text.split_once(' ').map_or("", |(_, message)| message);
        if message.contains("non-numeric") {
            Self::WrongType
        } else if message.contains("out of memory") {
            Self::NoWrites
        } else if message.contains("unauthenticated") {
            Self::Misconfigured
        } else {
            Self::BadReply
        }
    }
}

impl CallErrorKind for MemcacheError {
    const TIMEOUT: Self = Self::Timeout;
    const BROKEN_CONNECTION: Self = Self::Broken;
    const MISCONFIGURED: Self = Self::Misconfigured;

    fn concerns_whole_server(self) -> bool {
        matches!(self, Self::Timeout | Self::Broken | Self::NoWrites | Self::Misconfigured)
    }

    fn is_misconfiguration(self) -> bool {
        self == Self::Misconfigured
    }
}

/// Reason why a server cannot be used.
pub(crate) type MemcacheConnectError = ConnectError<MemcacheError>;

impl From<PipelineError> for MemcacheError {
    fn from(error: PipelineError) -> Self {
        match error {
            PipelineError::Timeout => Self::Timeout,
            PipelineError::Broken => Self::Broken,
            PipelineError::Overloaded => Self::Overloaded,
        }
    }
}
