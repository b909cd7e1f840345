//! Streams in Redis that hold a decision log: one record in the field `record` of each entry.
//!
//! The sink `redis:STREAM` writes them. [`input`] reads one from begin to end, as a file is read. `consumer_group`
//! reads one as a consumer group, which shares the entries among its consumers. Other programs may write to a stream
//! too: nothing in an entry is trusted.

pub mod input;
pub(crate) mod consumer_group;

use std::fmt;
use std::str::FromStr;

use serde::de::IgnoredAny;

use crate::base::text::escape_unprintable_json;
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
pub(crate) struct StreamEntry<'r> {
    pub(crate) id: EntryId,
    /// Value of the field `record`; `None` if the entry has no such field.
    pub(crate) record: Option<&'r [u8]>,
}

/// Reads the entries of a reply to XRANGE or XCLAIM; nulls, which stand for deleted entries, are left out.
///
/// Returns `None` if the reply has another form.
pub(crate) fn parse_entries(reply: &Reply) -> Option<Vec<StreamEntry<'_>>> {
    match reply {
        Reply::Array(replies) => replies.iter().filter(|reply| **reply != Reply::Null).map(parse_entry).collect(),
        Reply::Null => Some(Vec::new()),
        _ => None,
    }
}

fn parse_entry(reply: &Reply) -> Option<StreamEntry<'_>> {
    let Reply::Array(parts) = reply else { return None };
    let [id, fields] = &**parts else { return None };
    let id = reply_text(id)?.parse().ok()?;
    // An entry that was deleted after it was delivered has null in place of its fields.
    let Reply::Array(fields) = fields else { return Some(StreamEntry { id, record: None }) };
    let record = fields.chunks_exact(2).find(|pair| reply_bytes(&pair[0]) == Some(RECORD_FIELD));
    Some(StreamEntry { id, record: record.and_then(|pair| reply_bytes(&pair[1])) })
}

/// Reason why the record of an entry cannot be printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnusableRecord {
    /// The entry has no field `record`.
    #[error("it has no field `record`")]
    Missing,
    /// The record is not JSON.
    #[error("its record is not JSON")]
    NotJson,
    /// The entry is larger than a reply may be.
    #[error("it is larger than 16 MiB")]
    TooLarge,
}

/// Returns a record as one line of JSON without unprintable characters, and without a line break at its end.
///
/// # Errors
/// The record is missing, or is no JSON object.
pub(crate) fn format_json_line(record: Option<&[u8]>) -> Result<String, UnusableRecord> {
    let record = record.ok_or(UnusableRecord::Missing)?;
    let text = std::str::from_utf8(record).map_err(|_| UnusableRecord::NotJson)?;
    if !text.trim_start().starts_with('{') || serde_json::from_str::<IgnoredAny>(text).is_err() {
        return Err(UnusableRecord::NotJson);
    }
    // Raw line feeds are between values only.
    Ok(escape_unprintable_json(text).replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use super::{UnusableRecord, format_json_line};

    #[test]
    fn line_is_the_same_json_without_control_characters() {
        let record = "{\n\"a\":\t\"x\u{7f}\u{9b}2J\\u001b \u{e9}\"\r\n}\n";
        let line = format_json_line(Some(record.as_bytes())).unwrap();
        assert!(!line.contains(char::is_control), "{line:?}");
        let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(parse(&line), parse(record));
    }

    #[test]
    fn record_that_is_not_an_object_of_json_is_unusable() {
        assert_eq!(format_json_line(None), Err(UnusableRecord::Missing));
        let nested = "{\"a\":".to_owned() + &"[".repeat(1 << 20);
        for record in
            [&b""[..], b"text", b"[1]", b"{}\n{}", b"{\"a\":\"\x1b\"}", b"{\"a\":\"\xff\"}", nested.as_bytes()]
        {
            assert_eq!(format_json_line(Some(record)), Err(UnusableRecord::NotJson));
        }
    }
}
