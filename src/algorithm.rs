//! The five algorithms: pure arithmetic on what a counter has used.
//!
//! `charge(limit, state, now, hits, max_delay_us) -> (state, level)`. The state is what was *used*, never what is left, so a
//! limit may change under a live counter. Everything is an integer; times are microseconds; products that can pass
//! 64 bits go through u128. Rounding is against the caller, but for sliding_window_counter, which floors.
//!
//! A counter's time never runs backwards: an algorithm's now is the later of the charge's and the last charge's. A
//! last charge more than a period ahead means that the clock was wrong, and the state is discarded.
//!
//! No clock, no I/O, no log here, and nothing about where states are kept.

pub(crate) mod leaky_level;
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
pub const MAX_COUNT: u64 = 1 << 53;

/// What is asked of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChargeRequest {
    /// The hits to take, to look for, or to give back.
    pub hits: Hits,
    /// The longest the answer may be held, in microseconds; the limit's own `max_wait` holds besides.
    pub max_delay_us: u64,
    /// Another limit of the same descriptor refused: hits are charged only where refused hits count.
    pub rejected_elsewhere: bool,
}

impl ChargeRequest {
    /// A charge of `hits` by itself.
    pub const fn new(hits: Hits, max_delay_us: u64) -> Self {
        Self { hits, max_delay_us, rejected_elsewhere: false }
    }

    /// How many hits must fit for the charge to pass: a look asks for one more, a refund for none.
    const fn wanted(self) -> u64 {
        match self.hits {
            Hits::Peek => 1,
            Hits::Charge(count) => count,
            Hits::Refund(_) => 0,
        }
    }

    /// What becomes of the hits once it is known whether they fit.
    const fn effect(self, fits: bool, limit: &Limit) -> Effect {
        match self.hits {
            Hits::Charge(count) if fits && !self.rejected_elsewhere => Effect::Charge(count),
            Hits::Charge(count) if limit.count_rejected() => Effect::Debt(count),
            Hits::Refund(count) => Effect::Refund(count),
            Hits::Charge(_) | Hits::Peek => Effect::Nothing,
        }
    }
}

/// What a charge does to a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// Nothing: a look, or a refusal that does not count.
    Nothing,
    /// Hits that pass.
    Charge(u64),
    /// Hits that are refused and count all the same.
    Debt(u64),
    /// Hits given back.
    Refund(u64),
}

/// What a charge found and what it promises. Times count from the charge's own now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChargeResult {
    /// Whether this limit lets the hits pass.
    pub admitted: bool,
    /// Hits counted before the charge, rounded as the algorithm rounds.
    pub before: u64,
    /// Hits counted after it; those refused are in it only if they count.
    pub after: u64,
    /// Hits that there is room for at once, by those counted; whether a caller would wait long enough for its turn in
    /// a leaky_bucket, or for tokens that a token_bucket lends, is not in it. 0 under a limit of 0.
    pub remaining: u32,
    /// Until the limit is full again (fixed_window: until the window ends), in microseconds; 0 if it is, or never will
    /// be.
    pub reset_us: u64,
    /// Until the same charge could pass, at the earliest, in microseconds. `None` if it passed, or never will.
    pub retry_after_us: Option<u64>,
    /// How long the answer is to be held, in microseconds; 0 if the hits do not pass.
    pub delay_us: u64,
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
    /// The state of a counter that nothing was charged from.
    pub fn empty(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::TokenBucket => Self::TokenBucket(Default::default()),
            Algorithm::LeakyBucket => Self::LeakyBucket(Default::default()),
            Algorithm::FixedWindow => Self::FixedWindow(Default::default()),
            Algorithm::SlidingWindowLog => Self::SlidingWindowLog(Default::default()),
            Algorithm::SlidingWindowCounter => Self::SlidingWindowCounter(Default::default()),
        }
    }

    /// The time that [`State::charge`] works at: the later of the charge's and the last charge's, unless that is void.
    pub fn time(&self, limit: &Limit, now: Time) -> Time {
        effective_now(now, self.last(), limit.period_us()).map_or(now, |(at, _)| at)
    }

    /// When hits were last counted.
    pub const fn last(&self) -> Time {
        match self {
            Self::TokenBucket(state) => state.last,
            Self::LeakyBucket(state) => state.last,
            Self::FixedWindow(state) => state.last,
            Self::SlidingWindowLog(state) => state.last,
            Self::SlidingWindowCounter(state) => state.last,
        }
    }

    /// Charges from this state, which must be of the limit's algorithm; any other is taken as empty.
    pub fn charge(&mut self, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
        match (limit.algorithm(), &mut *self) {
            (Algorithm::TokenBucket, Self::TokenBucket(state)) => token_bucket::charge(limit, state, now, request),
            (Algorithm::LeakyBucket, Self::LeakyBucket(state)) => leaky_bucket::charge(limit, state, now, request),
            (Algorithm::FixedWindow, Self::FixedWindow(state)) => fixed_window::charge(limit, state, now, request),
            (Algorithm::SlidingWindowLog, Self::SlidingWindowLog(state)) => {
                sliding_window_log::charge(limit, state, now, request)
            }
            (Algorithm::SlidingWindowCounter, Self::SlidingWindowCounter(state)) => {
                sliding_window_counter::charge(limit, state, now, request)
            }
            (algorithm, _) => {
                *self = Self::empty(algorithm);
                self.charge(limit, now, request)
            }
        }
    }

    /// Whether [`State::charge`] would let the hits pass; changes nothing.
    pub fn admits(&self, limit: &Limit, now: Time, request: ChargeRequest) -> bool {
        match (limit.algorithm(), self) {
            (Algorithm::TokenBucket, Self::TokenBucket(state)) => token_bucket::admits(limit, state, now, request),
            (Algorithm::LeakyBucket, Self::LeakyBucket(state)) => leaky_bucket::admits(limit, state, now, request),
            (Algorithm::FixedWindow, Self::FixedWindow(state)) => fixed_window::admits(limit, state, now, request),
            (Algorithm::SlidingWindowLog, Self::SlidingWindowLog(state)) => {
                sliding_window_log::admits(limit, state, now, request)
            }
            (Algorithm::SlidingWindowCounter, Self::SlidingWindowCounter(state)) => {
                sliding_window_counter::admits(limit, state, now, request)
            }
            (algorithm, _) => Self::empty(algorithm).admits(limit, now, request),
        }
    }
}

/// One of the limits that are decided together for a descriptor.
#[derive(Clone, Copy, Debug)]
pub struct EnforcedLimit<'r> {
    /// The limit.
    pub limit: &'r Limit,
    /// Whether its refusal refuses the descriptor; a trial's does not.
    pub enforced: bool,
}

/// Charges from all limits of a descriptor at once: hits are charged to all of them, or, if an enforced one refuses, to
/// none but those where refused hits count. `states` are those of `limits`, in the same order.
pub fn charge_together(
    limits: &[EnforcedLimit<'_>],
    states: &mut [State],
    now: Time,
    request: ChargeRequest,
) -> SmallVec<[ChargeResult; 1]> {
    if let ([limit], [state]) = (limits, &mut *states) {
        return SmallVec::from([state.charge(limit.limit, now, request)]);
    }
    let rejected = limits
        .iter()
        .zip(states.iter())
        .any(|(limit, state)| limit.enforced && !state.admits(limit.limit, now, request));
    // Where these hits do not fit either, it makes no difference that another limit refused them.
    let request = ChargeRequest { rejected_elsewhere: request.rejected_elsewhere || rejected, ..request };
    limits.iter().zip(states).map(|(limit, state)| state.charge(limit.limit, now, request)).collect()
}

/// The time an algorithm works at, and how far it lies ahead of the charge's own.
///
/// `None` if the last charge lies more than a period ahead: the state is void.
fn effective_now(now: Time, last: Time, period_us: u64) -> Option<(Time, u64)> {
    let ahead_us = last.since_us(now);
    (ahead_us <= period_us).then(|| (now.max(last), ahead_us))
}

/// A count for the caller's eyes.
fn to_u32(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
