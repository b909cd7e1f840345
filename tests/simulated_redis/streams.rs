//! Streams: entries in the order of their ids, and trimming.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use bytes::Bytes;

/// Entries of a full node. An approximate trim removes whole nodes.
const ENTRIES_PER_NODE: usize = 100;

/// Id of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId {
    /// Time in milliseconds.
    pub ms: u64,
    /// Number of the entry within the millisecond.
    pub sequence: u64,
}

impl StreamId {
    /// Largest id.
    pub(crate) const MAX: Self = Self { ms: u64::MAX, sequence: u64::MAX };

    /// Next id; `None` after the largest.
    pub(crate) fn next(self) -> Option<Self> {
        match self.sequence.checked_add(1) {
            Some(sequence) => Some(Self { sequence, ..self }),
            None => Some(Self { ms: self.ms.checked_add(1)?, sequence: 0 }),
        }
    }

    /// Previous id; `None` before the smallest.
    pub(crate) fn previous(self) -> Option<Self> {
        match self.sequence.checked_sub(1) {
            Some(sequence) => Some(Self { sequence, ..self }),
            None => Some(Self { ms: self.ms.checked_sub(1)?, sequence: u64::MAX }),
        }
    }
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.sequence)
    }
}

/// Stream of entries.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stream {
    entries: BTreeMap<StreamId, Vec<Bytes>>,
    last_id: StreamId,
    nodes: VecDeque<Node>,
}

/// Node of the real server: entries that are stored together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    live_entries: usize,
    entries: usize,
}

/// What a trim keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trim {
    /// Number of entries, the newest.
    pub(crate) kept: usize,
    /// Removes whole nodes only.
    pub(crate) is_approximate: bool,
}

impl Stream {
    /// Entries, oldest first: id, then fields and values in turn.
    pub const fn entries(&self) -> &BTreeMap<StreamId, Vec<Bytes>> {
        &self.entries
    }

    /// Id of the last entry that was added.
    pub const fn last_id(&self) -> StreamId {
        self.last_id
    }

    /// Adds an entry with a larger id than the last one.
    pub(crate) fn push(&mut self, id: StreamId, fields: Vec<Bytes>) {
        match self.nodes.back_mut() {
            Some(node) if node.entries < ENTRIES_PER_NODE => {
                node.live_entries += 1;
                node.entries += 1;
            }
            _ => self.nodes.push_back(Node { live_entries: 1, entries: 1 }),
        }
        self.last_id = id;
        self.entries.insert(id, fields);
    }

    /// Removes old entries and returns their number.
    pub(crate) fn trim(&mut self, trim: Trim) -> usize {
        let surplus = self.entries.len().saturating_sub(trim.kept);
        let mut removed = 0;
        while let Some(node) = self.nodes.front_mut() {
            if node.live_entries <= surplus - removed {
                removed += node.live_entries;
                self.nodes.pop_front();
                continue;
            }
            if !trim.is_approximate {
                node.live_entries -= surplus - removed;
                removed = surplus;
            }
            break;
        }
        for _ in 0..removed {
            self.entries.pop_first();
        }
        removed
    }
}
