//! sliding_window_log: one entry for each admitted hit; never more than the limit in *any* window.
//!
//! count = hits in (now - period, now]; a request of n hits passes if count + n <= requests_per_unit. A hit exactly one
//! period old is out. Source: "sliding window log" in Figma's "An alternative approach to rate limiting" (2017).
//! Counts are whole hits, so nothing is rounded.
//!
//! Hits of one instant share a record, so a log has at most `requests_per_unit` records, which is bounded when rules
//! are compiled (10 000 by default). With `count_rejected`, rejected hits are recorded too, and the oldest are dropped:
//! the log keeps as many of its newest hits as it held before, at least the limit.
//!
//! Decides: when a hit leaves the log; which entries of a log are dropped; that a refund takes the newest hits.
//! Decides: how long a rejected request waits (Retry-After, reset).

use std::collections::VecDeque;

use super::stored_state::{MalformedReply, ReplyReader, ScriptCharge, ShareRatio, StoredState};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, EffectiveTime, StateChange, clamp_to_u32, effective_time};
use crate::limit::request::Hits;

/// Modulus of the number of hits ever entered in a log; `log.lua` has the same.
const HIT_SUM_MODULUS: u64 = 1 << 52;

/// Hits of the last period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Records, oldest first; each has a different time.
    pub records: VecDeque<LoggedHits>,
    /// Sum of the hits in `records`.
    pub held: u64,
    /// Time of the last charge.
    pub last: Time,
}

/// Hits of one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedHits {
    /// Time of the hits.
    pub at: Time,
    /// Number of hits, at least 1.
    pub hits: u32,
}

impl StoredState for State {
    #[inline]
    fn to_packed_words(&self) -> [u64; 2] {
        [self.held, 0]
    }

    /// Restores the sum only: a log is stored with its records, which `read_from_reply` decodes.
    #[inline]
    fn from_packed_words([held, _]: [u64; 2], last: Time) -> Self {
        Self { held, last, ..Default::default() }
    }

    /// Decodes a log: the running sum before the first record, the number of records, then each record.
    fn read_from_reply(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply> {
        let (mut sum, count) = (reply.read_number()?, reply.read_number()?);
        let mut log = Self { last, ..Default::default() };
        for _ in 0..count {
            let (at, next_sum) = (reply.read_time()?, reply.read_number()?);
            let hits = (next_sum + HIT_SUM_MODULUS).checked_sub(sum).ok_or(MalformedReply)? % HIT_SUM_MODULUS;
            let in_order = at <= last && log.records.back().is_none_or(|newest| newest.at < at);
            let hits = u32::try_from(hits).ok().filter(|hits| *hits > 0 && in_order).ok_or(MalformedReply)?;
            log.held += u64::from(hits);
            log.records.push_back(LoggedHits { at, hits });
            sum = next_sum;
        }
        Ok(log)
    }

    /// The sum of any record and all later ones is rounded up: as the oldest expire, the share is never less used than
    /// the limit was.
    fn scaled_to_fallback_share(&self, ratio: ShareRatio, _limit: &Limit, now: Time) -> Self {
        let mut records: VecDeque<LoggedHits> = VecDeque::new();
        let (mut seen, mut held) = (0, 0);
        for record in self.records.iter().rev() {
            seen += u64::from(record.hits);
            let hits = ratio.scale_rounded_up(seen) - held;
            held += hits;
            let (at, hits) = (record.at.min(now), clamp_to_u32(hits));
            match records.front_mut() {
                // Records with later times were reduced to the same one.
                Some(next) if next.at == at => next.hits = next.hits.saturating_add(hits),
                _ if hits > 0 => records.push_front(LoggedHits { at, hits }),
                _ => {}
            }
        }
        Self { records, held, last: self.last.min(now) }
    }

    /// The number of hits that the reply must cover: from the oldest on, less the hits that the log holds, and from the
    /// newest back. See `log.lua`.
    fn script_arguments<'c>(charges: impl Iterator<Item = ScriptCharge<'c>>, _now: Time) -> [i64; 2] {
        let signed = |hits| i64::try_from(hits).unwrap_or(i64::MAX);
        let (mut requested, mut max_debt, mut refunded, mut min_limit) = (0, 0, 0, i64::MAX);
        for ScriptCharge { limit, hits } in charges {
            // What a settlement gives back is known to the script only, so its reply has the whole log.
            if limit.reservations().is_some() {
                return [i64::from(u32::MAX), 0];
            }
            min_limit = min_limit.min(signed(limit.requests_per_unit()));
            match hits {
                Hits::Peek => requested += 1,
                Hits::Charge(hits) => {
                    requested += signed(hits);
                    // Rejected hits that count are entered before the hits that a later charge waits for: count them
                    // twice.
                    max_debt = max_debt.max(if limit.counts_rejected_hits() { signed(hits) } else { 0 });
                }
                Hits::Refund(hits) => refunded += signed(hits),
            }
        }
        [requested + max_debt - min_limit, refunded]
    }
}

/// Applies a request to the log.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let window = LogWindow::at_request_time(limit, state, now);
    let before = window.held;
    let max = limit.requests_per_unit();
    let fits = window.fits(limit, request);
    let effect = request.state_change(fits, limit);
    // A request without effect leaves the state as it is, the time of its last charge included.
    let mut expired = window.expired;
    if effect != StateChange::None {
        state.records.drain(..expired);
        (state.held, state.last, expired) = (before, window.at, 0);
    }
    match effect {
        StateChange::None => {}
        StateChange::Charge(hits) => state.append_hits(window.at, hits),
        StateChange::ChargeRejected(hits) => {
            let keep = before.max(max);
            state.append_hits(window.at, hits.min(keep));
            state.drop_oldest_hits(state.held.saturating_sub(keep));
        }
        StateChange::Refund(hits) if request.leased == 0 && !request.gives_back => state.drop_newest_hits(hits),
        // The newest hits may be leased, and must then stay for a period. Those of a reservation may be followed by
        // others.
        StateChange::Refund(hits) => state.drop_oldest_hits(hits.min(state.held.saturating_sub(request.leased))),
    }
    let after = if effect == StateChange::None { before } else { state.held };
    let until_expired =
        |record: &LoggedHits| window.ahead_us + record.at.plus_us(limit.period_us()).since_us(window.at);
    ChargeResult {
        admitted: fits,
        before,
        after,
        remaining: max.saturating_sub(after),
        reset_us: state.records.range(expired..).next_back().map_or(0, until_expired),
        retry_after_us: if fits || request.required_hits() > max {
            None
        } else {
            find_record_of_nth_hit(state.records.range(expired..), after + request.required_hits() - max)
                .map(until_expired)
        },
        delay_us: 0,
        ..ChargeResult::default()
    }
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    LogWindow::at_request_time(limit, state, now).fits(limit, request)
}

/// The part of a log that lies in the window of a request.
struct LogWindow {
    at: Time,
    /// Microseconds by which `at` lies ahead of the request's `now`.
    ahead_us: u64,
    /// Number of the oldest records that are older than the period.
    expired: usize,
    /// Hits in the other records.
    held: u64,
}

impl LogWindow {
    fn at_request_time(limit: &Limit, state: &State, now: Time) -> Self {
        let Some(EffectiveTime { at, ahead_us }) = effective_time(now, state.last, limit.period_us()) else {
            return Self { at: now, ahead_us: 0, expired: state.records.len(), held: 0 };
        };
        let is_expired = |record: &&LoggedHits| at.since_us(record.at) >= limit.period_us();
        let (mut expired, mut expired_hits) = (0, 0);
        for record in state.records.iter().take_while(is_expired) {
            expired += 1;
            expired_hits += u64::from(record.hits);
        }
        Self { at, ahead_us, expired, held: state.held - expired_hits }
    }

    fn fits(&self, limit: &Limit, request: ChargeRequest) -> bool {
        request.required_hits() == 0 || self.held + request.required_hits() <= limit.requests_per_unit()
    }
}

/// Returns the record that holds the `nth` hit from the oldest, counted from 1.
fn find_record_of_nth_hit<'s>(mut records: impl Iterator<Item = &'s LoggedHits>, nth: u64) -> Option<&'s LoggedHits> {
    let mut seen = 0;
    records.find(|record| {
        seen += u64::from(record.hits);
        seen >= nth
    })
}

impl State {
    /// Adds hits to the newest record, or a new record.
    fn append_hits(&mut self, at: Time, hits: u64) {
        // A limit of 0 keeps none of the hits that it rejects.
        if hits == 0 {
            return;
        }
        self.held += hits;
        match self.records.back_mut() {
            Some(newest) if newest.at == at => newest.hits = clamp_to_u32(u64::from(newest.hits) + hits),
            _ => self.records.push_back(LoggedHits { at, hits: clamp_to_u32(hits) }),
        }
    }

    fn drop_oldest_hits(&mut self, mut hits: u64) {
        while hits > 0 {
            let Some(mut oldest) = self.records.pop_front() else { break };
            let dropped = oldest.hits.min(clamp_to_u32(hits));
            oldest.hits -= dropped;
            if oldest.hits > 0 {
                self.records.push_front(oldest);
            }
            self.held -= u64::from(dropped);
            hits -= u64::from(dropped);
        }
    }

    fn drop_newest_hits(&mut self, mut hits: u64) {
        while hits > 0 {
            let Some(mut newest) = self.records.pop_back() else { break };
            let dropped = newest.hits.min(clamp_to_u32(hits));
            newest.hits -= dropped;
            if newest.hits > 0 {
                self.records.push_back(newest);
            }
            self.held -= u64::from(dropped);
            hits -= u64::from(dropped);
        }
    }
}
