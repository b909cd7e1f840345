//! What stands in for a lost Redis under `on_store_error: local`: counters in this process, under this process's share
//! of each limit.
//!
//! The share is the limit divided by the replicas that count, rounded down, at least 1 unless the limit is 0. While
//! Redis answers, the results it reports for such rules are kept here as the same part of the share, rounded up, so that
//! a replica that loses Redis goes on from what it last saw and no counter begins anew.
//!
//! The last report wins, also over what was admitted here since the one before: a store that is back has the word. What
//! was admitted without it is not charged to it.
//!
//! How many replicas count may change, as they come and go. What is remembered is in hits of the share as it was at the
//! report. Until the next report, or until it drains, it is too much of a share that has become smaller, so that less
//! passes, and too little of one that has become larger: then hits that others had charged can pass once more.
//!
//! The memory is bounded as [`MemoryStore`] is; what finds no room is not
//! remembered, and what is charged then is limited in the small table that always has room.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use smallvec::SmallVec;

use super::memory::MemoryStore;
use super::memory::usage::MemoryUsage;
use crate::algorithm::state::State;
use crate::algorithm::{
    ChargeResult, fixed_window, leaky_bucket, sliding_window_counter, sliding_window_log, token_bucket,
};
use crate::clock::Time;
use crate::counter::{Charge, Counter};
use crate::limit::Limit;
use crate::request::Hits;

/// Counters that stand in for those of a lost Redis.
#[derive(Debug)]
pub struct Fallback {
    memory: MemoryStore,
    sharers: ReplicaCount,
}

/// How many processes share each limit, a number that may change.
#[derive(Clone, Debug)]
pub struct ReplicaCount(Arc<AtomicU32>);

impl ReplicaCount {
    /// So many, this process included.
    pub fn new(replicas: NonZeroU32) -> Self {
        Self(Arc::new(AtomicU32::new(replicas.get())))
    }

    /// So many from now on.
    pub fn set(&self, replicas: NonZeroU32) {
        self.0.store(replicas.get(), Ordering::Relaxed);
    }

    /// How many now.
    pub fn count(&self) -> NonZeroU32 {
        NonZeroU32::new(self.0.load(Ordering::Relaxed)).expect("only such numbers are stored")
    }
}

impl Fallback {
    /// No counters yet, for one of so many replicas that share each limit; of about `capacity_bytes` at most, and at
    /// least 256 KiB.
    pub fn new(capacity_bytes: u64, replicas: NonZeroU32) -> Self {
        Self { memory: MemoryStore::new(capacity_bytes), sharers: ReplicaCount::new(replicas) }
    }

    /// How many replicas share each limit; whoever counts them sets it.
    pub const fn sharers(&self) -> &ReplicaCount {
        &self.sharers
    }

    /// Decides a charge under this process's share of its limits; the results are those of the share. What is more than
    /// the share and not more than the limit can pass when the store is back: it is told to wait until the share is
    /// full again, not that it never will.
    pub fn charge(&self, charge: &Charge<'_>, now: Time) -> SmallVec<[ChargeResult; 1]> {
        let mut results = self.with_shares(charge, |charge| {
            self.memory.charge(charge, now).unwrap_or_else(|_| self.memory.charge_overflow(charge, now))
        });
        for (counter, result) in charge.counters.iter().zip(&mut results) {
            let fits_the_limit =
                matches!(charge.request.hits, Hits::Charge(hits) if hits <= u64::from(counter.limit.capacity()));
            if !result.admitted && result.retry_after_us.is_none() && fits_the_limit {
                result.retry_after_us = Some(result.reset_us);
            }
        }
        results
    }

    /// Whether [`Fallback::charge`] would pass all limits, trials too; changes nothing.
    pub fn admits(&self, charge: &Charge<'_>, now: Time) -> bool {
        self.with_shares(charge, |charge| self.memory.admits(charge, now))
    }

    /// Keeps the results that Redis reported for counters of the path with this key, each given by its limit and tag,
    /// `states` in the same order. `now` is this process's time: what another clock stamped ahead of it counts as of
    /// now.
    pub fn remember(&self, path: u128, counters: &[(Limit, u128)], states: &[State], now: Time) {
        let replicas = self.sharers.count();
        self.memory.put(path, now, |put| {
            for ((limit, tag), state) in counters.iter().zip(states) {
                let share = limit.share_of(replicas);
                put(&share, *tag, shared(state, (limit, &share), now));
            }
        });
    }

    /// Lets go of the counters of a charge.
    pub fn forget(&self, charge: &Charge<'_>) {
        self.memory.reset(charge);
    }

    /// Drops what has expired from a share of the counters: the `turn`th of `turns`.
    pub fn sweep(&self, now: Time, turn: usize, turns: usize) {
        self.memory.sweep(now, turn, turns);
    }

    /// What is held now.
    pub fn usage(&self) -> MemoryUsage {
        self.memory.usage()
    }

    /// The same charge under this process's share of its limits.
    fn with_shares<T>(&self, charge: &Charge<'_>, then: impl FnOnce(&Charge<'_>) -> T) -> T {
        let replicas = self.sharers.count();
        if replicas == NonZeroU32::MIN {
            return then(charge);
        }
        let shares: SmallVec<[Limit; 2]> =
            charge.counters.iter().map(|counter| counter.limit.share_of(replicas)).collect();
        let under = |(counter, limit): (&Counter<'_>, _)| Counter { limit, ..*counter };
        // Put together anew: what a charge borrows can not live shorter than the charge.
        let counters = charge.counters.iter().zip(&shares).map(under).collect();
        then(&Charge { path: charge.path, key: charge.key, counters, request: charge.request })
    }
}

/// A state as the same part of the share as it was of the limit, rounded up.
fn shared(state: &State, (limit, share): (&Limit, &Limit), now: Time) -> State {
    let part = Ratio { of: u64::from(limit.capacity().max(1)), is: u64::from(share.capacity().max(1)) };
    match state {
        // A share may drain faster than that part of the limit, so what the limit has drained until now is left out.
        State::TokenBucket(state) => {
            let state = state.drained(limit, now);
            let (used, rest) = part.of_drained((state.used, state.part), limit);
            State::TokenBucket(token_bucket::State { used, part: rest, last: state.last.min(now) })
        }
        State::LeakyBucket(state) => {
            let state = state.drained(limit, now);
            let (queued, rest) = part.of_drained((u64::from(state.queued), state.part), limit);
            let narrow = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
            // Rounded down: what a refund may take is in favour of the caller.
            let tail = narrow(part.rounded_down(u64::from(state.tail)));
            State::LeakyBucket(leaky_bucket::State {
                queued: narrow(queued),
                part: rest,
                tail,
                last: state.last.min(now),
            })
        }
        State::FixedWindow(state) => {
            State::FixedWindow(fixed_window::State { count: part.rounded_up(state.count), last: state.last.min(now) })
        }
        State::SlidingWindowLog(state) => State::SlidingWindowLog(shared_log(state, part, now)),
        State::SlidingWindowCounter(state) => State::SlidingWindowCounter(sliding_window_counter::State {
            current: part.rounded_up(state.current),
            previous: part.rounded_up(state.previous),
            last: state.last.min(now),
        }),
    }
}

/// The hits of each record are scaled so that those of any record and all after it are, together, rounded up: as the
/// oldest go out, the share is never less used than the limit was.
fn shared_log(state: &sliding_window_log::State, part: Ratio, now: Time) -> sliding_window_log::State {
    let mut records: VecDeque<sliding_window_log::LogRecord> = VecDeque::new();
    let (mut seen, mut held) = (0, 0);
    for record in state.records.iter().rev() {
        seen += u64::from(record.hits);
        let hits = part.rounded_up(seen) - held;
        held += hits;
        let (at, hits) = (record.at.min(now), u32::try_from(hits).unwrap_or(u32::MAX));
        match records.front_mut() {
            // Those that were stamped ahead are of one instant now.
            Some(next) if next.at == at => next.hits = next.hits.saturating_add(hits),
            _ if hits > 0 => records.push_front(sliding_window_log::LogRecord { at, hits }),
            _ => {}
        }
    }
    sliding_window_log::State { records, held, last: state.last.min(now) }
}

/// A part of a whole: `is` of each `of`.
#[derive(Clone, Copy)]
struct Ratio {
    of: u64,
    is: u64,
}

impl Ratio {
    fn rounded_up(self, count: u64) -> u64 {
        if self.is == self.of {
            count
        } else {
            narrow((u128::from(count) * u128::from(self.is)).div_ceil(self.of.into()))
        }
    }

    fn rounded_down(self, count: u64) -> u64 {
        narrow(u128::from(count) * u128::from(self.is) / u128::from(self.of))
    }

    /// Of whole hits and parts of one, as a result that drains is kept; rounded up in the smallest of them.
    fn of_drained(self, (hits, rest): (u64, u64), limit: &Limit) -> (u64, u64) {
        if self.is == self.of {
            return (hits, rest);
        }
        let period = u128::from(limit.period_us());
        let units = u128::from(hits) * period + u128::from(rest);
        // It fits: results stay below 2^40 hits, periods below 2^45 us, and `is` below 2^32.
        let scaled = units.saturating_mul(self.is.into()).div_ceil(self.of.into());
        (narrow(scaled / period), narrow(scaled % period))
    }
}

fn narrow(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
