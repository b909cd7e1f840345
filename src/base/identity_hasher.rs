//! Hash maps keyed by hashes, which are not hashed again.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::base::sharded::lower_half;

/// Number of shards of a table, so that threads rarely wait for one another.
pub(crate) const SHARDS: usize = 64;

/// Map from 128-bit hashes to values.
pub(crate) type HashKeyMap<V> = HashMap<u128, V, BuildHasherDefault<IdentityHasher>>;

/// Hasher of keys that are keyed hashes already.
#[derive(Debug, Default)]
pub(crate) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 ^= u64::from_le_bytes(word);
        }
    }

    fn write_u128(&mut self, key: u128) {
        self.0 = lower_half(key);
    }
}
