//! Entries of a stream, and their ids.

use std::fmt;
use std::str::FromStr;

use crate::store::client::redis::reply::{Reply, bytes, text};

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
pub(crate) fn entries(reply: &Reply) -> Option<Vec<StreamEntry<'_>>> {
    match reply {
        Reply::Array(replies) => replies.iter().filter(|reply| **reply != Reply::Null).map(entry).collect(),
        Reply::Null => Some(Vec::new()),
        _ => None,
    }
}

fn entry(reply: &Reply) -> Option<StreamEntry<'_>> {
    let Reply::Array(parts) = reply else { return None };
    let [id, fields] = &**parts else { return None };
    let id = text(id)?.parse().ok()?;
    // An entry that was deleted after it was delivered has null in place of its fields.
    let Reply::Array(fields) = fields else { return Some(StreamEntry { id, record: None }) };
    let record = fields.chunks_exact(2).find(|pair| bytes(&pair[0]) == Some(RECORD_FIELD));
    Some(StreamEntry { id, record: record.and_then(|pair| bytes(&pair[1])) })
}
