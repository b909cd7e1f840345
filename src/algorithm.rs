//! The five algorithms: pure arithmetic on what a counter has used.
//!
//! `draw(limit, state, now, hits, hold_us) -> (state, level)`. The state is what was *used*, never what is left, so a
//! limit may change under a live counter. Everything is an integer; times are microseconds; products that can pass
//! 64 bits go through u128. Rounding is against the caller, but for sliding_window_counter, which floors.
//!
//! A counter's time never runs backwards: an algorithm's now is the later of the draw's and the last charge's. A
//! last charge more than a period ahead means that the clock was wrong, and the state is discarded.
//!
//! No clock, no I/O, no log here, and nothing about where states are kept.

pub mod fixed_window;
pub mod leaky_bucket;
pub mod sliding_window_counter;
pub mod sliding_window_log;
pub mod token_bucket;


use smallvec::SmallVec;

use crate::clock::Time;
use crate::limit::{Algorithm, Limit};
use crate::request::Hits;

/// The largest count a counter holds: beyond it a double in a Lua script would not be exact.
pub const MOST_COUNTED: u64 = 1 << 53;

/// What a draw found and what it promises. Times count from the draw's own now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// Whether the hits pass.
    pub admitted: bool,
    /// Hits counted before the draw, rounded up.
    pub before: u64,
    /// Hits counted after it, rounded up; those refused are in it only if they count.
    pub after: u64,
    /// Hits that could still pass now.
    pub remaining: u32,
    /// Until the limit is full again (fixed_window: until the window ends), in microseconds.
    pub reset_us: u64,
    /// Until the same draw could pass, at the earliest, in microseconds. `None` if it passed, or never will.
    pub retry_after_us: Option<u64>,
    /// How long the answer is to be held, in microseconds.
    pub hold_us: u64,
}

/// A counter's state: one variant for each algorithm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// See [`token_bucket`].
    TokenBucket(token_bucket::State),
    /// See [`leaky_bucket`].
    LeakyBucket(leaky_bucket::State),
    /// See [`fixed_window`].
    FixedWindow(fixed_window::State),
    /// See [`sliding_window_log`].
    SlidingWindowLog(sliding_window_log::State),
    /// See [`sliding_window_counter`].
    SlidingWindowCounter(sliding_window_counter::State),
}

impl State {
    /// The state of a counter that nothing was drawn from.
    pub fn empty(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::TokenBucket => Self::TokenBucket(Default::default()),
            Algorithm::LeakyBucket => Self::LeakyBucket(Default::default()),
            Algorithm::FixedWindow => Self::FixedWindow(Default::default()),
            Algorithm::SlidingWindowLog => Self::SlidingWindowLog(Default::default()),
            Algorithm::SlidingWindowCounter => Self::SlidingWindowCounter(Default::default()),
        }
    }
}

/// The time an algorithm works at, and how far it lies ahead of the draw's own.
///
/// `None` if the last charge lies more than a period ahead: the state is void.
pub(crate) fn effective_now(now: Time, last: Time, period_us: u64) -> Option<(Time, u64)> {
    let ahead_us = last.since_us(now);
    (ahead_us <= period_us).then(|| (now.max(last), ahead_us))
}
