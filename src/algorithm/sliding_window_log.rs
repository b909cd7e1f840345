//! sliding_window_log: an entry for each admitted hit; never more than the limit in *any* window.
//!
//! The window is half-open, (now - period, now]: a hit exactly one period old is out. Hits of one instant share a
//! record, so a log has at most as many records as the limit has hits, and `limit` bounds those (10 000 unless a
//! setting says otherwise).
//!
//! With `count_rejected` refused hits are entered too, and the oldest give way: the log keeps as many of its newest
//! hits as it held before, at least the limit.

use std::collections::VecDeque;

use super::{ChargeRequest, ChargeResult, Effect, effective_now, to_u32};
use crate::clock::Time;
use crate::limit::Limit;

/// The hits of the last period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Oldest first, no two of one instant.
    pub records: VecDeque<Record>,
    /// All hits in `records`.
    pub held: u64,
    /// When the last were entered.
    pub last: Time,
}

/// Hits of one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// When.
    pub at: Time,
    /// How many, at least 1.
    pub hits: u32,
}

/// Enters hits into the log.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let window = Window::at(limit, state, now);
    let before = window.held;
    let most = u64::from(limit.requests_per_unit());
    let fits = window.fits(limit, request);
    let effect = request.effect(fits, limit);
    // A charge without effect leaves no trace, not even of the time it saw.
    let mut out = window.out;
    if effect != Effect::Nothing {
        state.records.drain(..out);
        (state.held, state.last, out) = (before, window.at, 0);
    }
    match effect {
        Effect::Nothing => {}
        Effect::Charge(hits) => state.enter(window.at, hits),
        Effect::Debt(hits) => {
            let keep = before.max(most);
            state.enter(window.at, hits.min(keep));
            state.drop_oldest(state.held.saturating_sub(keep));
        }
        Effect::Refund(hits) => state.drop_newest(hits),
    }
    let after = if effect == Effect::Nothing { before } else { state.held };
    let until_out = |record: &Record| window.ahead_us + record.at.plus_us(limit.period_us()).since_us(window.at);
    ChargeResult {
        admitted: fits,
        before,
        after,
        remaining: to_u32(most.saturating_sub(after)),
        reset_us: state.records.range(out..).next_back().map_or(0, until_out),
        retry_after_us: if fits || request.wanted() > most {
            None
        } else {
            nth_hit(state.records.range(out..), after + request.wanted() - most).map(until_out)
        },
        delay_us: 0,
    }
}

/// Whether [`charge`] would pass.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    Window::at(limit, state, now).fits(limit, request)
}

/// What of a log lies in the window of a charge.
struct Window {
    at: Time,
    ahead_us: u64,
    /// How many of the oldest records are out.
    out: usize,
    /// Hits in the records that are not.
    held: u64,
}

impl Window {
    fn at(limit: &Limit, state: &State, now: Time) -> Self {
        let Some((at, ahead_us)) = effective_now(now, state.last, limit.period_us()) else {
            return Self { at: now, ahead_us: 0, out: state.records.len(), held: 0 };
        };
        let is_out = |record: &&Record| at.since_us(record.at) >= limit.period_us();
        let (mut out, mut gone) = (0, 0);
        for record in state.records.iter().take_while(is_out) {
            out += 1;
            gone += u64::from(record.hits);
        }
        Self { at, ahead_us, out, held: state.held - gone }
    }

    fn fits(&self, limit: &Limit, request: ChargeRequest) -> bool {
        request.wanted() == 0 || self.held + request.wanted() <= u64::from(limit.requests_per_unit())
    }
}

/// The record that holds the `nth` hit from the oldest, counted from 1.
fn nth_hit<'s>(mut records: impl Iterator<Item = &'s Record>, nth: u64) -> Option<&'s Record> {
    let mut seen = 0;
    records.find(|record| {
        seen += u64::from(record.hits);
        seen >= nth
    })
}

impl State {
    fn enter(&mut self, at: Time, hits: u64) {
        // A limit of 0 keeps none of the hits it refuses.
        if hits == 0 {
            return;
        }
        self.held += hits;
        match self.records.back_mut() {
            Some(newest) if newest.at == at => newest.hits = to_u32(u64::from(newest.hits) + hits),
            _ => self.records.push_back(Record { at, hits: to_u32(hits) }),
        }
    }

    fn drop_oldest(&mut self, mut hits: u64) {
        while hits > 0 {
            let Some(mut oldest) = self.records.pop_front() else { break };
            let dropped = oldest.hits.min(to_u32(hits));
            oldest.hits -= dropped;
            if oldest.hits > 0 {
                self.records.push_front(oldest);
            }
            self.held -= u64::from(dropped);
            hits -= u64::from(dropped);
        }
    }

    fn drop_newest(&mut self, mut hits: u64) {
        while hits > 0 {
            let Some(mut newest) = self.records.pop_back() else { break };
            let dropped = newest.hits.min(to_u32(hits));
            newest.hits -= dropped;
            if newest.hits > 0 {
                self.records.push_back(newest);
            }
            self.held -= u64::from(dropped);
            hits -= u64::from(dropped);
        }
    }
}
