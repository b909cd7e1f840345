//! fixed_window: one count for each window; windows are aligned to the Unix epoch.
//!
//! window(now) = floor(now / period); a request of n hits passes if count + n <= requests_per_unit. Source:
//! envoyproxy/ratelimit, which has only this algorithm. Counts are whole hits, so nothing is rounded.
//!
//! Twice the limit can pass within a moment across a boundary; the sliding windows exist for that reason. With
//! `count_rejected` (the default of a rule's only limit, as in envoyproxy/ratelimit) the count grows past the limit,
//! and a peek is rejected only when the count is past it.
//!
//! A window of months can follow the calendar in UTC. Months are then counted from the year 0, so that a multiplier of
//! 3 gives quarters.
//!
//! Decides: when a window starts; calendar months in UTC; why `requests_per_unit: 0` rejects everything (no hit fits).
//! Decides: what rejected hits and refunds change in a window.
//! Decides: how long a rejected request waits (Retry-After, reset).

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use super::stored_state::{MalformedReply, ReplyReader, ScriptCharge, ShareRatio, StoredState};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, EffectiveTime, MAX_COUNT, StateChange, effective_time};
use crate::limit::request::Hits;

/// Hits in the window of the last charge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Hits counted, at most [`MAX_COUNT`].
    pub count: u64,
    /// Time of the last charge.
    pub last: Time,
}

impl StoredState for State {
    #[inline]
    fn to_packed_words(&self) -> [u64; 2] {
        [self.count, 0]
    }

    #[inline]
    fn from_packed_words([count, _]: [u64; 2], last: Time) -> Self {
        Self { count, last }
    }

    #[inline]
    fn read_from_reply(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply> {
        Ok(Self { count: reply.read_number()?, last })
    }

    fn scaled_to_fallback_share(&self, ratio: ShareRatio, _limit: &Limit, now: Time) -> Self {
        Self { count: ratio.scale_rounded_up(self.count), last: self.last.min(now) }
    }

    /// The number of calendar months in a window, 0 if a window has the period's length.
    #[inline]
    fn script_arguments<'c>(mut charges: impl Iterator<Item = ScriptCharge<'c>>, _now: Time) -> [i64; 2] {
        let calendar = charges.next().map(|charge| charge.limit).filter(|limit| limit.follows_calendar_months());
        [calendar.map_or(0, |limit| i64::from(limit.period().multiplier())), 0]
    }

    fn derive_wait_from_result_us(_limit: &Limit, result: &ChargeResult, _request: ChargeRequest) -> Option<u64> {
        Some(result.reset_us)
    }
}

/// Applies a request to the count.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let window = CurrentWindow::at_request_time(limit, state, now);
    let (count, result) = window.compute_charge(limit, request);
    if let Some(count) = count {
        *state = State { count, last: window.at };
    }
    result
}

/// Returns `true` if [`charge`] would admit the hits.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    CurrentWindow::at_request_time(limit, state, now).fits(limit, request)
}

/// The window that contains a request, with its count.
#[derive(Clone, Copy)]
pub(super) struct CurrentWindow {
    pub(super) count: u64,
    pub(super) at: Time,
    /// Microseconds by which `at` lies ahead of the request's `now`.
    pub(super) ahead_us: u64,
    pub(super) end: Time,
}

impl CurrentWindow {
    fn at_request_time(limit: &Limit, state: &State, now: Time) -> Self {
        let discarded = EffectiveTime { at: now, ahead_us: 0 };
        let EffectiveTime { at, ahead_us } = effective_time(now, state.last, limit.period_us()).unwrap_or(discarded);
        let (start, end) = window_bounds(limit, at);
        // A discarded state lies after `at`, and one of an earlier window before `start`.
        let live = start <= state.last && state.last <= at;
        Self { count: if live { state.count } else { 0 }, at, ahead_us, end }
    }

    /// Returns the new count, `None` if the request changes nothing, and the result.
    #[inline]
    pub(super) fn compute_charge(&self, limit: &Limit, request: ChargeRequest) -> (Option<u64>, ChargeResult) {
        let fits = self.fits(limit, request);
        let effect = request.state_change(fits, limit);
        let after = match effect {
            StateChange::None => self.count,
            StateChange::Charge(hits) | StateChange::ChargeRejected(hits) => {
                self.count.saturating_add(hits).min(MAX_COUNT)
            }
            StateChange::Refund(hits) => self.count.saturating_sub(hits).max(self.count.min(request.leased)),
        };
        let ends_us = self.ahead_us + self.end.since_us(self.at);
        // In the next window the count is 0: a request that could not pass then never will.
        let can_ever_pass = Self { count: 0, ..*self }.fits(limit, request);
        let result = ChargeResult {
            admitted: fits,
            before: self.count,
            after,
            remaining: limit.requests_per_unit().saturating_sub(after),
            reset_us: ends_us,
            retry_after_us: (!fits && can_ever_pass).then_some(ends_us),
            delay_us: 0,
            ..ChargeResult::default()
        };
        ((effect != StateChange::None).then_some(after), result)
    }

    pub(super) fn fits(&self, limit: &Limit, request: ChargeRequest) -> bool {
        let max = limit.requests_per_unit();
        match request.hits {
            Hits::Refund(_) => true,
            Hits::Peek if limit.passes_peeks_at_limit() => self.count <= max,
            Hits::Peek | Hits::Charge(_) => self.count.saturating_add(request.required_hits()) <= max,
        }
    }
}

/// Returns the window that contains `at`: its start, and its end, which is the start of the next one.
pub fn window_bounds(limit: &Limit, at: Time) -> (Time, Time) {
    if let Some(window) = limit.calendar_windows() {
        let bounds = window.bounds_at(at);
        return (bounds.start, bounds.end);
    }
    if limit.follows_calendar_months()
        && let Some(window) = calendar_month_bounds(limit.period().multiplier(), at)
    {
        return window;
    }
    let start = Time::from_micros(at.as_micros() / limit.period_us() * limit.period_us());
    (start, start.plus_us(limit.period_us()))
}

/// Returns the run of `months` calendar months that contains `at`; `None` beyond the year 9999.
fn calendar_month_bounds(months: u32, at: Time) -> Option<(Time, Time)> {
    let date = Timestamp::from_microsecond(i64::try_from(at.as_micros()).ok()?).ok()?.to_zoned(TimeZone::UTC).date();
    let months = i32::try_from(months).ok()?;
    let index = (i32::from(date.year()) * 12 + i32::from(date.month()) - 1) / months * months;
    Some((first_of_month(index)?, first_of_month(index + months)?))
}

/// Returns midnight on the first of a month; months are counted from January of the year 0.
fn first_of_month(index: i32) -> Option<Time> {
    let date = Date::new(i16::try_from(index / 12).ok()?, i8::try_from(index % 12 + 1).ok()?, 1).ok()?;
    let midnight = date.to_zoned(TimeZone::UTC).ok()?.timestamp();
    Some(Time::from_micros(u64::try_from(midnight.as_microsecond()).unwrap_or(0)))
}
