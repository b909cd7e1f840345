//! Random numbers for identities, keys of hashes and jitter.
//!
//! Each call takes the hash keys of a new [`RandomState`], which the standard library derives from a seed of the
//! operating system: unpredictable for clients, and no source for secrets that leave the process. Evictions of the
//! memory store have a generator of their own, which is seeded and reproducible.

use std::cell::Cell;
use std::hash::{BuildHasher as _, RandomState};

thread_local! {
    static GENERATOR_STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Makes all random numbers of this thread follow from `seed` from now on; `None`: random again. For simulations: the
/// numbers are no secret then.
pub fn seed_this_thread(seed: Option<u64>) {
    GENERATOR_STATE.set(seed);
}

/// Returns 64 random bits.
pub fn random_u64() -> u64 {
    match GENERATOR_STATE.get() {
        None => RandomState::new().hash_one(0_u8),
        Some(state) => {
            let state = state.wrapping_add(SPLIT_MIX_INCREMENT);
            GENERATOR_STATE.set(Some(state));
            mix_bits(state)
        }
    }
}

/// Increment of the state of SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators").
const SPLIT_MIX_INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// Output function of SplitMix64.
const fn mix_bits(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// Returns two independent numbers of 64 random bits.
pub fn random_u64_pair() -> (u64, u64) {
    (random_u64(), random_u64())
}

/// Returns 16 random bytes: an identity that nothing else has.
pub fn random_id() -> [u8; 16] {
    let (first, second) = random_u64_pair();
    (u128::from(first) << 64 | u128::from(second)).to_be_bytes()
}

/// Returns a random number from 0 to below 1.
pub fn random_fraction() -> f64 {
    (random_u64() >> 11) as f64 / (1_u64 << 53) as f64
}
