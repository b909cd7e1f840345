//! Maps that SCAN and HSCAN walk.
//!
//! They are ordered by a hash of the name, and a cursor is a hash: a walk returns all names that were there throughout,
//! whatever happens between its steps.

use std::collections::BTreeMap;

use bytes::Bytes;

/// Name in a map that SCAN or HSCAN walks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ScanKey {
    hash: u64,
    name: Bytes,
}

impl ScanKey {
    /// Creates the key of a name.
    pub(crate) fn new(name: &Bytes) -> Self {
        // FNV-1a, and 48 bits of it: cursors are short, and none is 0, which ends a walk.
        let hash = name
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
        Self { hash: ((hash >> 32) ^ hash) & 0xffff_ffff_ffff | 1, name: name.clone() }
    }

    /// The name.
    pub(crate) const fn name(&self) -> &Bytes {
        &self.name
    }
}

/// Part of a walk.
#[derive(Clone, Debug)]
pub(crate) struct ScanPage<T> {
    /// Cursor of the next part; 0 after the last.
    pub(crate) next_cursor: u64,
    pub(crate) found: Vec<T>,
}

/// Walks a map from a cursor on, until at least `count` names are found.
pub(crate) fn scan<V>(map: &BTreeMap<ScanKey, V>, cursor: u64, count: usize) -> ScanPage<(&ScanKey, &V)> {
    let mut found: Vec<(&ScanKey, &V)> = Vec::new();
    for (key, value) in map.range(ScanKey { hash: cursor, name: Bytes::new() }..) {
        if found.len() >= count && found.last().is_some_and(|(last, _)| last.hash != key.hash) {
            return ScanPage { next_cursor: key.hash, found };
        }
        found.push((key, value));
    }
    ScanPage { next_cursor: 0, found }
}
