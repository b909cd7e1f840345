//! Keys whose counters were created last.
//!
//! The memory store has only hashes of keys, so that a key costs tens of bytes regardless of its length. Listing
//! counters needs the text, so the most recent keys are kept in rings, sharded by limit, so that a busy limit does not
//! evict the keys of all others. Recording a key reuses an old buffer; if two threads want the same shard, one key is
//! not recorded.
//!
//! Decides: which counters of the memory store can be listed (`/counters`).

use super::metrics::limit_stats::LimitStats;
use crate::base::sharded::Sharded;

const SHARD_COUNT: usize = 16;
/// Number of keys per shard.
pub const KEYS_PER_SHARD: usize = 512;
/// Maximum size of a recorded key in bytes; longer keys are skipped.
const MAX_RECORDED_KEY_BYTES: usize = 512;

/// Keys whose counters were created last.
#[derive(Debug)]
pub struct RecentlyCreatedKeys {
    shards: Sharded<RecentKeyRing>,
}

#[derive(Debug, Default)]
struct RecentKeyRing {
    keys: Vec<RecentKey>,
    /// Index of the oldest key once the ring is full.
    next: usize,
}

#[derive(Debug)]
struct RecentKey {
    limit: u64,
    /// Parts of the key, each prefixed by its length as two bytes.
    parts: Vec<u8>,
}

impl Default for RecentlyCreatedKeys {
    fn default() -> Self {
        Self { shards: Sharded::new(SHARD_COUNT, RecentKeyRing::default) }
    }
}

impl RecentlyCreatedKeys {
    /// Records the parts of a key whose counter was created.
    pub fn record_key<'a>(&self, limit: &LimitStats, parts: impl Iterator<Item = &'a [u8]> + Clone) {
        if parts.clone().map(|part| part.len() + 2).sum::<usize>() > MAX_RECORDED_KEY_BYTES {
            return;
        }
        let Some(mut ring) = self.shards.try_lock_shard(shard_hash(limit)) else { return };
        let mut buffer = match ring.keys.len() < KEYS_PER_SHARD {
            true => Vec::new(),
            false => {
                let oldest = ring.next;
                std::mem::take(&mut ring.keys[oldest].parts)
            }
        };
        buffer.clear();
        for part in parts {
            buffer.extend_from_slice(&u16::try_from(part.len()).unwrap_or(u16::MAX).to_le_bytes());
            buffer.extend_from_slice(part);
        }
        let key = RecentKey { limit: limit.id(), parts: buffer };
        if ring.keys.len() < KEYS_PER_SHARD {
            ring.keys.push(key);
        } else {
            let oldest = ring.next;
            ring.keys[oldest] = key;
            ring.next = (oldest + 1) % KEYS_PER_SHARD;
        }
    }

    /// Returns the recorded keys of a limit, the latest first. A key whose counter expired and was created again can
    /// appear twice.
    pub fn keys_of_limit(&self, limit: &LimitStats) -> Vec<Vec<Vec<u8>>> {
        let ring = self.shards.lock_shard(shard_hash(limit));
        let (later, earlier) = ring.keys.split_at(ring.next);
        let latest_first = later.iter().rev().chain(earlier.iter().rev());
        latest_first.filter(|key| key.limit == limit.id()).map(|key| split_key_parts(&key.parts)).collect()
    }
}

/// Spreads consecutive ids over all bits (Fibonacci hashing).
const fn shard_hash(limit: &LimitStats) -> u64 {
    limit.id().wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn split_key_parts(mut parts: &[u8]) -> Vec<Vec<u8>> {
    let mut split = Vec::new();
    while let Some((length, rest)) = parts.split_first_chunk::<2>() {
        let (part, rest) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
        split.push(part.to_vec());
        parts = rest;
    }
    split
}
