//! HyperLogLog: an estimate of the number of distinct keys in 512 bytes.
//!
//! The first bits of a key's hash select a register, which holds the longest run of leading zeros in the other bits.
//! Registers are atomics that rarely change, so adding a key is usually one read. The estimator is Otmar Ertl's ("New
//! cardinality estimation algorithms for HyperLogLog sketches", 2017, section 4), which needs no table of corrections.
//! The standard error is 1.04 / sqrt(512), 4.6 %, at any count.
//!
//! Decides: how exact numbers of distinct keys are.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// Number of registers.
const REGISTER_COUNT: usize = 1 << REGISTER_BITS;
const REGISTER_BITS: u32 = 9;
/// Number of hash bits besides the register index.
const MAX_ZEROS: u32 = u64::BITS - REGISTER_BITS;

/// Relative standard error of [`HyperLogLog::estimate`].
pub const RELATIVE_STANDARD_ERROR: f64 = 0.046;

/// Sketch of a set of keys. Allocates when the first key is added.
#[derive(Debug, Default)]
pub struct HyperLogLog {
    registers: OnceLock<Box<[AtomicU8; REGISTER_COUNT]>>,
}

impl HyperLogLog {
    /// Adds a key by its hash, which must be uniform and unpredictable for clients.
    pub fn add_hash(&self, hash: u64) {
        let registers = self.registers.get_or_init(|| Box::new([const { AtomicU8::new(0) }; REGISTER_COUNT]));
        let index = usize::try_from(hash >> MAX_ZEROS).expect("nine bits fit");
        let zeros = (hash << REGISTER_BITS).leading_zeros().min(MAX_ZEROS);
        let rank = u8::try_from(zeros + 1).expect("there are at most 64 zeros");
        // Reading first keeps the cache line shared: registers soon stop changing.
        if registers[index].load(Ordering::Relaxed) < rank {
            registers[index].fetch_max(rank, Ordering::Relaxed);
        }
    }

    /// Estimates the number of distinct keys.
    pub fn estimate(&self) -> u64 {
        let Some(registers) = self.registers.get() else { return 0 };
        let mut counts = [0.0_f64; MAX_ZEROS as usize + 2];
        for register in &**registers {
            counts[usize::from(register.load(Ordering::Relaxed))] += 1.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "it is 512")]
        let all = REGISTER_COUNT as f64;
        let [lowest, between @ .., highest] = &counts;
        let above = between.iter().rfold(all * tau(1.0 - highest / all), |sum, count| 0.5 * (sum + count));
        let estimate = all * all / (2.0 * std::f64::consts::LN_2) / (above + all * sigma(lowest / all));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "never negative; saturates")]
        {
            estimate.round() as u64
        }
    }
}

/// Computes `x` plus the sum over k of `x^(2^k) * 2^(k-1)`.
fn sigma(mut x: f64) -> f64 {
    if x >= 1.0 {
        return f64::INFINITY;
    }
    let (mut factor, mut sum) = (1.0, x);
    loop {
        x *= x;
        let before = sum;
        sum += x * factor;
        factor += factor;
        if sum <= before {
            return sum;
        }
    }
}

/// Computes `(1 - x - sum) / 3`, with the sum over k of `(1 - x^(2^-k))^2 * 2^-k`.
fn tau(mut x: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return 0.0;
    }
    let (mut factor, mut sum) = (1.0, 1.0 - x);
    loop {
        x = x.sqrt();
        let before = sum;
        factor *= 0.5;
        sum -= (1.0 - x).powi(2) * factor;
        if sum >= before {
            return sum / 3.0;
        }
    }
}
