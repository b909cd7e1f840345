//! A value split into shards, each behind its own lock, so that threads rarely wait for each other; and maps keyed by
//! hashes, which are not hashed again.
//!
//! A shard is chosen by the upper bits of a hash, with a multiplication in place of a division. Poisoned
//! locks are used too: every user leaves its shards consistent between any two statements that can panic.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Number of shards of a table, so that threads rarely wait for one another.
pub const DEFAULT_SHARDS: usize = 64;

/// Shards of one type, each behind a lock.
#[derive(Debug)]
pub struct Sharded<T> {
    shards: Box<[Mutex<T>]>,
}

impl<T> Sharded<T> {
    /// Creates `count` shards, at least one.
    pub fn new(count: usize, make: impl FnMut() -> T) -> Self {
        Self { shards: std::iter::repeat_with(make).take(count.max(1)).map(Mutex::new).collect() }
    }

    /// Locks the shard of a hash, whose upper bits must be uniformly distributed.
    pub fn lock_shard(&self, hash: u64) -> MutexGuard<'_, T> {
        lock_ignoring_poison(self.shard_of(hash))
    }

    /// Locks the shard of a hash unless another thread holds the lock.
    pub fn try_lock_shard(&self, hash: u64) -> Option<MutexGuard<'_, T>> {
        match self.shard_of(hash).try_lock() {
            Ok(shard) => Some(shard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Locks one shard after the other.
    pub fn lock_each(&self) -> impl Iterator<Item = MutexGuard<'_, T>> {
        self.shards.iter().map(lock_ignoring_poison)
    }

    /// Locks, one after the other, the shards of one of `parts` equal parts: the one at `part`.
    pub fn lock_each_of_part(&self, part: usize, parts: usize) -> impl Iterator<Item = MutexGuard<'_, T>> {
        let parts = parts.max(1);
        self.shards.iter().skip(part % parts).step_by(parts).map(lock_ignoring_poison)
    }

    fn shard_of(&self, hash: u64) -> &Mutex<T> {
        // Below the number of shards, as hash / 2^64 is below 1.
        let index = (u128::from(hash) * self.shards.len() as u128) >> 64;
        &self.shards[usize::try_from(index).expect("it is below a usize")]
    }
}

/// Upper half of a 128-bit key, as the hash that chooses a shard.
pub const fn upper_half(key: u128) -> u64 {
    (key >> 64) as u64
}

/// Lower half of a 128-bit key.
#[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
pub const fn lower_half(key: u128) -> u64 {
    key as u64
}

/// Locks a mutex, poisoned or not.
pub fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Map from 128-bit hashes to values.
pub type PrehashedMap<V> = HashMap<u128, V, BuildHasherDefault<IdentityHasher>>;

/// Hasher of keys that are keyed hashes already.
#[derive(Debug, Default)]
pub struct IdentityHasher(u64);

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
