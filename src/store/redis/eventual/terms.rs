//! What an eventual descriptor may do by itself: its share, and the life of a lease. The argument stands in the module
//! above.

use std::num::NonZeroU32;
use std::time::Duration;

use super::{CallReport, LeaseTicket};
use crate::algorithm::fixed_window;
use crate::algorithm::state::State;
use crate::clock::Time;
use crate::limit::algorithm::Algorithm;
use crate::limit::{Consistency, Limit, Overshoot};
use crate::store::redis::command::OwnedCounter;

/// A day in microseconds.
const DAY_US: u64 = 86_400_000_000;
/// A lease lives no longer, in microseconds.
const LONGEST_LIFE_US: u64 = 1_000_000;
/// Nor is a shorter one worth asking for.
const SHORTEST_LIFE_US: u64 = 2_000;
/// A lease ends so long before its window at the most, in microseconds.
const LONGEST_MARGIN_US: u64 = 50_000;
/// What a log is charged stays: no more is leased of it than demand asks for in this time, in microseconds.
const KEPT_US: u64 = 25_000;
/// So long after its end a lease may still be given back to a bucket, in microseconds.
const RETURN_US: u64 = 200_000;

/// What a descriptor whose limits are all eventual may do by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalBudget {
    /// Hits that a process may admit of its own in each period. 0: none.
    pub share: u64,
    /// The longest period of its limits, in microseconds.
    pub period_us: u64,
    /// How long hits may be used after they were charged, in microseconds. 0: there are no leases.
    pub life_us: u64,
}

impl LocalBudget {
    /// Of these counters, for one of so many slots. `None`: they are strict.
    pub fn of(counters: &[OwnedCounter], slots: NonZeroU32) -> Option<Self> {
        let mut terms = Self { share: u64::MAX, period_us: 0, life_us: LONGEST_LIFE_US };
        for OwnedCounter { limit, .. } in counters {
            let Consistency::Eventual(overshoot) = limit.consistency() else { return None };
            let for_shares = match limit.algorithm() {
                // The other half is for what comes back while hits are lent.
                Algorithm::TokenBucket => milli_hits(limit, overshoot) / 2,
                Algorithm::LeakyBucket => return None,
                _ => milli_hits(limit, overshoot),
            };
            terms.share = terms.share.min(for_shares / 1000 / (2 * u64::from(slots.get())));
            terms.period_us = terms.period_us.max(longest_period_us(limit));
            terms.life_us = terms.life_us.min(life_us(limit, overshoot));
        }
        if terms.life_us < SHORTEST_LIFE_US {
            terms.life_us = 0;
        }
        Some(terms)
    }

    /// How long a lease lives that is charged at `now`, in microseconds: not into another window.
    pub(super) fn life_at(&self, counters: &[OwnedCounter], states: &[State], now: Time) -> u64 {
        let left_us = |(OwnedCounter { limit, .. }, state): (&OwnedCounter, &State)| match limit.algorithm() {
            Algorithm::FixedWindow | Algorithm::SlidingWindowCounter => {
                // It ends a little before, so that what is left can be given back.
                let margin_us = LONGEST_MARGIN_US.min(limit.period_us() / 20);
                window_end(limit, state, now).since_us(now).saturating_sub(margin_us)
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::SlidingWindowLog => u64::MAX,
        };
        counters.iter().zip(states).map(left_us).fold(self.life_us, u64::min)
    }

    /// For how much of demand to lease, in microseconds, with a lease that lives so long: where little or nothing
    /// can be given back in the end, no more than will be used.
    pub(super) fn span_us(counters: &[OwnedCounter], life_us: u64) -> u64 {
        let span_us = |counted: &OwnedCounter| match counted.limit.algorithm() {
            Algorithm::SlidingWindowLog => (life_us / 4).min(KEPT_US),
            Algorithm::TokenBucket => life_us / 2,
            Algorithm::FixedWindow | Algorithm::SlidingWindowCounter | Algorithm::LeakyBucket => life_us,
        };
        counters.iter().map(span_us).min().unwrap_or(life_us)
    }

    /// A lease of counters as they were charged.
    pub(super) fn lent(&self, serial: u64, counters: &[OwnedCounter], report: &CallReport) -> LeaseTicket {
        let life_us = self.life_at(counters, &report.states, report.now);
        let mut until = Some(report.now.plus_us(self.life_us + RETURN_US));
        let mut less = 0;
        for (OwnedCounter { limit, .. }, state) in counters.iter().zip(&report.states) {
            match limit.algorithm() {
                Algorithm::FixedWindow | Algorithm::SlidingWindowCounter => {
                    until = until.map(|until| until.min(window_end(limit, state, report.now)));
                }
                Algorithm::TokenBucket => less = less.max(drained(limit, self.life_us + RETURN_US)),
                Algorithm::SlidingWindowLog | Algorithm::LeakyBucket => until = None,
            }
        }
        LeaseTicket { serial, end: report.sent + Duration::from_micros(life_us), until, less }
    }
}

/// The longest window of a limit, in microseconds: months of the calendar have up to 31 days.
fn longest_period_us(limit: &Limit) -> u64 {
    match limit.calendar_months() {
        true => u64::from(limit.period().multiplier()) * 31 * DAY_US,
        false => limit.period_us(),
    }
}

/// How much longer than a period the log of an eventual limit keeps hits, in microseconds.
pub fn log_beyond_us(limit: &Limit) -> u64 {
    match (limit.algorithm(), limit.consistency()) {
        (Algorithm::SlidingWindowLog, Consistency::Eventual(_)) => log_life_us(limit.period().micros()),
        _ => 0,
    }
}

/// A fiftieth of the period in whole milliseconds: what a log keeps longer for it is the limit's loss.
fn log_life_us(period_us: u64) -> u64 {
    (period_us / 50 / 1000 * 1000).min(LONGEST_LIFE_US)
}

fn life_us(limit: &Limit, overshoot: Overshoot) -> u64 {
    match limit.algorithm() {
        Algorithm::TokenBucket => {
            // While this long, half of the overshoot comes back.
            let milli_limit = 1000 * u128::from(limit.requests_per_unit().max(1));
            let half = u128::from(milli_hits(limit, overshoot) / 2);
            let life_us = half * u128::from(limit.period_us()) / milli_limit;
            u64::try_from(life_us).unwrap_or(u64::MAX)
        }
        Algorithm::SlidingWindowLog => log_life_us(limit.period().micros()),
        _ => LONGEST_LIFE_US,
    }
}

/// The overshoot in thousandths of a hit, rounded down.
fn milli_hits(limit: &Limit, overshoot: Overshoot) -> u64 {
    match overshoot {
        Overshoot::MilliPercent(part) => u64::from(limit.requests_per_unit()) * u64::from(part) / 100,
        Overshoot::Hits(hits) => 1000 * u64::from(hits),
    }
}

/// The end of the window in which hits were charged.
fn window_end(limit: &Limit, state: &State, now: Time) -> Time {
    fixed_window::window(limit, state.time(limit, now)).1
}

/// The most hits that a bucket gets back in so many microseconds, rounded up.
fn drained(limit: &Limit, span_us: u64) -> u64 {
    let hits = u128::from(limit.requests_per_unit()) * u128::from(span_us);
    u64::try_from(hits.div_ceil(u128::from(limit.period_us()))).unwrap_or(u64::MAX)
}
