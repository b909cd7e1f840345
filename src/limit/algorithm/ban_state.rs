//! Ban of a client that exceeded a limit: its counter rejects everything until the ban ends.
//!
//! A ban is a state of its own beside the counter's, so that any algorithm can have one. A rejection of a charge by the
//! limit itself starts the ban, or the last of `after` rejections does: rejections less than a period apart add up.
//! While the ban lasts, nothing is charged and no further try prolongs it, unless rejected hits count: then each try
//! is counted as a rejected one is, and the ban ends a whole `for` after the last try. Peeks see the ban, and a rejected
//! one is a rejection like that of a charge if the ban has `count_peeks`; refunds pass and leave it.
//!
//! Decides: when a ban begins and ends, what prolongs it; that refunds pass it, and which peeks begin it.

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::ban::Ban;
use crate::limit::charge::{ChargeRequest, ChargeResult, EffectiveTime, effective_time};
use crate::limit::request::Hits;

/// State of a ban, beside that of its counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BanState {
    /// Time of the last rejection that changed the state.
    pub last: Time,
    /// End of the ban; a time that is past: there is none.
    pub until: Time,
    /// Rejections since the last ban, each less than a period after the one before.
    pub rejections: u64,
}

impl BanState {
    /// Packs the state into three words; the first is the time of the last rejection in microseconds.
    pub const fn to_packed_words(self) -> [u64; 3] {
        [self.last.as_micros(), self.until.as_micros(), self.rejections]
    }

    /// Unpacks the words of [`BanState::to_packed_words`].
    pub const fn from_packed_words([last, until, rejections]: [u64; 3]) -> Self {
        Self { last: Time::from_micros(last), until: Time::from_micros(until), rejections }
    }

    /// Time from which on the state equals an empty one.
    pub fn expires_at(&self, limit: &Limit) -> Time {
        self.until.max(self.last.plus_us(limit.period_us()))
    }

    /// Returns `true` if hits are rejected by the ban at `now`; refunds never are.
    pub(crate) fn rejects(&self, limit: &Limit, now: Time, hits: Hits) -> bool {
        let left_us = || limit.ban().map_or(0, |ban| CurrentBan::at_request_time(self, ban, limit, now).left_us);
        !matches!(hits, Hits::Refund(_)) && left_us() > 0
    }

    /// Applies the ban to the result of a charge on the counter, which was made as one that is rejected elsewhere if
    /// [`BanState::rejects`] it: records a rejection, and says until when the client is banned.
    pub(crate) fn apply_to_result(
        &mut self,
        limit: &Limit,
        now: Time,
        request: ChargeRequest,
        result: &mut ChargeResult,
    ) {
        let Some(ban) = limit.ban() else { return };
        let mut current = CurrentBan::at_request_time(self, ban, limit, now);
        let was_banned = current.left_us > 0;
        let is_rejected = request.counts_for_ban(limit) && (was_banned || !result.admitted);
        if is_rejected && (!was_banned || limit.counts_rejected_hits()) {
            current.record_rejection(self, ban, was_banned);
            result.ban_begun = !was_banned && current.left_us > 0;
        }
        if current.left_us == 0 {
            return;
        }
        let left_us = current.ahead_us + current.left_us;
        result.ban_left_us = left_us;
        result.remaining = 0;
        result.reset_us = result.reset_us.max(left_us);
        result.delay_us = if is_rejected { 0 } else { result.delay_us };
        let can_ever_pass = result.admitted || result.retry_after_us.is_some();
        if !matches!(request.hits, Hits::Refund(_)) {
            result.admitted = false;
            result.delay_us = 0;
            result.retry_after_us = can_ever_pass.then(|| result.retry_after_us.unwrap_or(0).max(left_us));
        }
    }
}

/// A ban at the time of a request.
struct CurrentBan {
    at: Time,
    /// Microseconds by which `at` lies ahead of the request's `now`.
    ahead_us: u64,
    /// Microseconds from `at` until the ban ends; 0: there is none.
    left_us: u64,
    /// Rejections that still count.
    rejections: u64,
}

impl CurrentBan {
    fn at_request_time(state: &BanState, ban: Ban, limit: &Limit, now: Time) -> Self {
        // A rejection further ahead is discarded, as the states of counters are: the clock was wrong.
        let Some(EffectiveTime { at, ahead_us }) =
            effective_time(now, state.last, limit.period_us().max(ban.length_us()))
        else {
            return Self { at: now, ahead_us: 0, left_us: 0, rejections: 0 };
        };
        let is_recent = at.since_us(state.last) <= limit.period_us();
        Self {
            at,
            ahead_us,
            // A ban that was shortened since ends by its new length.
            left_us: state.until.min(state.last.plus_us(ban.length_us())).since_us(at),
            rejections: if is_recent { state.rejections } else { 0 },
        }
    }

    fn record_rejection(&mut self, state: &mut BanState, ban: Ban, is_banned: bool) {
        let rejections = self.rejections + 1;
        let begins = is_banned || rejections >= ban.rejections_before_ban();
        let until = if begins { self.at.plus_us(ban.length_us()) } else { Time::default() };
        *state = BanState { last: self.at, until, rejections: if begins { 0 } else { rejections } };
        self.left_us = until.since_us(self.at);
    }
}
