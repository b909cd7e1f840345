//! The keys whose counters began last.
//!
//! The memory store knows its keys only as hashes, so that a key costs tens of bytes whatever its text. Whoever wants
//! to see counters needs the text: a ring of the latest is kept here, in shards by limit, so that a busy limit does not
//! push out all others. Noting one writes into a place that is there already, and when two threads want the same
//! shard one of them goes without.

use super::metrics::limit_stats::LimitStats;
use crate::sharded::Sharded;

const SHARDS: usize = 16;
/// Keys that a shard remembers.
pub const KEYS_PER_SHARD: usize = 512;
/// A key of more bytes is not remembered.
const LONGEST_BYTES: usize = 512;

/// The keys whose counters began last.
#[derive(Debug)]
pub struct RecentKeys {
    shards: Sharded<Ring>,
}

impl Default for RecentKeys {
    fn default() -> Self {
        Self { shards: Sharded::new(SHARDS, Ring::default) }
    }
}

#[derive(Debug, Default)]
struct Ring {
    keys: Vec<Key>,
    /// Where the next one goes once the ring is full.
    next: usize,
}

#[derive(Debug)]
struct Key {
    limit: u64,
    /// Each part, its length before it.
    parts: Vec<u8>,
}

impl RecentKeys {
    /// Notes the parts of a key whose counter under this limit began now.
    pub fn note<'a>(&self, limit: &LimitStats, parts: impl Iterator<Item = &'a [u8]> + Clone) {
        if parts.clone().map(|part| part.len() + 2).sum::<usize>() > LONGEST_BYTES {
            return;
        }
        let Some(mut ring) = self.shards.try_lock(hash(limit)) else { return };
        let mut written = match ring.keys.len() < KEYS_PER_SHARD {
            true => Vec::new(),
            false => {
                let place = ring.next;
                std::mem::take(&mut ring.keys[place].parts)
            }
        };
        written.clear();
        for part in parts {
            written.extend_from_slice(&u16::try_from(part.len()).unwrap_or(u16::MAX).to_le_bytes());
            written.extend_from_slice(part);
        }
        let key = Key { limit: limit.serial(), parts: written };
        if ring.keys.len() < KEYS_PER_SHARD {
            ring.keys.push(key);
        } else {
            let place = ring.next;
            ring.keys[place] = key;
            ring.next = (place + 1) % KEYS_PER_SHARD;
        }
    }

    /// The keys of a limit that are remembered, the latest first; one that began anew may be there twice.
    pub fn of(&self, limit: &LimitStats) -> Vec<Vec<Vec<u8>>> {
        let ring = self.shards.lock(hash(limit));
        let (later, earlier) = ring.keys.split_at(ring.next);
        let all = later.iter().rev().chain(earlier.iter().rev());
        all.filter(|key| key.limit == limit.serial()).map(|key| split(&key.parts)).collect()
    }
}

/// Spreads consecutive serials over all bits (Fibonacci hashing).
const fn hash(limit: &LimitStats) -> u64 {
    limit.serial().wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn split(mut parts: &[u8]) -> Vec<Vec<u8>> {
    let mut split = Vec::new();
    while let Some((length, rest)) = parts.split_first_chunk::<2>() {
        let (part, rest) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
        split.push(part.to_vec());
        parts = rest;
    }
    split
}
