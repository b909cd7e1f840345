//! Random numbers for identities, keys of hashes and jitter.
//!
//! Each call takes the hash keys of a new [`RandomState`], which the standard library derives from a seed of the
//! operating system: unpredictable for clients, and no source for secrets that leave the process. Evictions of the
//! memory store have a generator of their own, which is seeded and reproducible.

use std::hash::{BuildHasher as _, RandomState};

/// Returns 64 random bits.
pub fn random_u64() -> u64 {
    RandomState::new().hash_one(0_u8)
}

/// Returns two independent numbers of 64 random bits.
pub fn random_u64_pair() -> (u64, u64) {
    let random = RandomState::new();
    (random.hash_one(0_u8), random.hash_one(1_u8))
}

/// Returns a random number from 0 to below 1.
pub fn random_fraction() -> f64 {
    (random_u64() >> 11) as f64 / (1_u64 << 53) as f64
}
