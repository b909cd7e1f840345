//! Scales the state of a counter in Redis to this process's share of the limit.
//!
//! Rounding is against the caller: the share is used at least as much as the limit was.

use std::collections::VecDeque;

use crate::algorithm::state::State;
use crate::algorithm::{fixed_window, leaky_bucket, sliding_window_counter, sliding_window_log, token_bucket};
use crate::clock::Time;
use crate::limit::Limit;

/// Returns a state that uses the same part of the share as `state` uses of the limit, rounded up.
pub(super) fn scaled_to_share(state: &State, limit: &Limit, share: &Limit, now: Time) -> State {
    let ratio = Ratio { limit: u64::from(limit.capacity().max(1)), share: u64::from(share.capacity().max(1)) };
    match state {
        // A share may drain faster than that part of the limit, so the hits that drained until now are excluded.
        State::TokenBucket(state) => {
            let state = state.drained(limit, now);
            let level = ratio.scale_level(FractionalHits { hits: state.used, part: state.part }, limit);
            State::TokenBucket(token_bucket::State { used: level.hits, part: level.part, last: state.last.min(now) })
        }
        State::LeakyBucket(state) => {
            let state = state.drained(limit, now);
            let level = ratio.scale_level(FractionalHits { hits: u64::from(state.queued), part: state.part }, limit);
            let narrow = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
            // Rounded down, because refunds of these hits favour the caller.
            let tail = narrow(ratio.rounded_down(u64::from(state.tail)));
            State::LeakyBucket(leaky_bucket::State {
                queued: narrow(level.hits),
                part: level.part,
                tail,
                last: state.last.min(now),
            })
        }
        State::FixedWindow(state) => {
            State::FixedWindow(fixed_window::State { count: ratio.rounded_up(state.count), last: state.last.min(now) })
        }
        State::SlidingWindowLog(state) => State::SlidingWindowLog(scaled_log(state, ratio, now)),
        State::SlidingWindowCounter(state) => State::SlidingWindowCounter(sliding_window_counter::State {
            current: ratio.rounded_up(state.current),
            previous: ratio.rounded_up(state.previous),
            last: state.last.min(now),
        }),
    }
}

/// Scales the records of a log so that the sum of any record and all later ones is rounded up: as the oldest expire,
/// the share is never less used than the limit was.
fn scaled_log(state: &sliding_window_log::State, ratio: Ratio, now: Time) -> sliding_window_log::State {
    let mut records: VecDeque<sliding_window_log::LogRecord> = VecDeque::new();
    let (mut seen, mut held) = (0, 0);
    for record in state.records.iter().rev() {
        seen += u64::from(record.hits);
        let hits = ratio.rounded_up(seen) - held;
        held += hits;
        let (at, hits) = (record.at.min(now), u32::try_from(hits).unwrap_or(u32::MAX));
        match records.front_mut() {
            // Records with later times were reduced to the same one.
            Some(next) if next.at == at => next.hits = next.hits.saturating_add(hits),
            _ if hits > 0 => records.push_front(sliding_window_log::LogRecord { at, hits }),
            _ => {}
        }
    }
    sliding_window_log::State { records, held, last: state.last.min(now) }
}

/// A leaky level: hits, and a fraction of one.
#[derive(Clone, Copy)]
struct FractionalHits {
    hits: u64,
    /// Fraction of a hit, 0 to period - 1 (microseconds).
    part: u64,
}

/// Ratio of a share to its limit, by capacity.
#[derive(Clone, Copy)]
struct Ratio {
    limit: u64,
    share: u64,
}

impl Ratio {
    fn rounded_up(self, count: u64) -> u64 {
        if self.share == self.limit {
            count
        } else {
            narrow((u128::from(count) * u128::from(self.share)).div_ceil(self.limit.into()))
        }
    }

    fn rounded_down(self, count: u64) -> u64 {
        narrow(u128::from(count) * u128::from(self.share) / u128::from(self.limit))
    }

    /// Scales a level, rounded up to the smallest fraction of a hit.
    fn scale_level(self, level: FractionalHits, limit: &Limit) -> FractionalHits {
        if self.share == self.limit {
            return level;
        }
        let period = u128::from(limit.period_us());
        let units = u128::from(level.hits) * period + u128::from(level.part);
        // No overflow: levels are below 2^40 hits, periods below 2^45 us, and shares below 2^32.
        let scaled = units.saturating_mul(self.share.into()).div_ceil(self.limit.into());
        FractionalHits { hits: narrow(scaled / period), part: narrow(scaled % period) }
    }
}

fn narrow(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
