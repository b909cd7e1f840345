//! fixed_window: a count for each window; windows are aligned to the Unix epoch.
//!
//! A window ends, and the count with it: twice the limit can pass within a moment across a boundary. That is known and
//! documented, and the reason why the sliding windows exist. With `count_rejected` (the default of a rule's only limit,
//! as in envoyproxy/ratelimit) the count goes on past the limit, and a free look is refused only then.
//!
//! A window of months can follow the calendar in UTC; months are then counted from the year 0, so that a
//! multiplier of 3 gives quarters.

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use super::{ChargeRequest, ChargeResult, Effect, MAX_COUNT, effective_now, to_u32};
use crate::clock::Time;
use crate::limit::Limit;
use crate::request::Hits;

/// Hits in the window of `last`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Hits counted, at most [`MAX_COUNT`].
    pub count: u64,
    /// When the last of them were.
    pub last: Time,
}

/// Counts hits.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let window = Count::at(limit, state, now);
    let fits = window.fits(limit, request);
    let effect = request.effect(fits, limit);
    let after = match effect {
        Effect::Nothing => window.count,
        Effect::Charge(hits) | Effect::Debt(hits) => window.count.saturating_add(hits).min(MAX_COUNT),
        Effect::Refund(hits) => window.count.saturating_sub(hits),
    };
    if effect != Effect::Nothing {
        *state = State { count: after, last: window.at };
    }
    let ends_us = window.ahead_us + window.end.since_us(window.at);
    // In the next window the count is 0: what could not pass then never will.
    let ever = Count { count: 0, ..window }.fits(limit, request);
    ChargeResult {
        admitted: fits,
        before: window.count,
        after,
        remaining: to_u32(u64::from(limit.requests_per_unit()).saturating_sub(after)),
        reset_us: ends_us,
        retry_after_us: (!fits && ever).then_some(ends_us),
        delay_us: 0,
    }
}

/// Whether [`charge`] would pass.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    Count::at(limit, state, now).fits(limit, request)
}

/// The count of the window that a charge falls in.
#[derive(Clone, Copy)]
struct Count {
    count: u64,
    at: Time,
    ahead_us: u64,
    end: Time,
}

impl Count {
    fn at(limit: &Limit, state: &State, now: Time) -> Self {
        let (at, ahead_us) = match effective_now(now, state.last, limit.period_us()) {
            Some(effective) => effective,
            None => (now, 0),
        };
        let (start, end) = window(limit, at);
        // A void state lies ahead of `at`, one of an earlier window before `start`.
        let live = start <= state.last && state.last <= at;
        Self { count: if live { state.count } else { 0 }, at, ahead_us, end }
    }

    fn fits(&self, limit: &Limit, request: ChargeRequest) -> bool {
        let most = u64::from(limit.requests_per_unit());
        match request.hits {
            Hits::Refund(_) => true,
            Hits::Peek if limit.count_rejected() => self.count <= most,
            Hits::Peek | Hits::Charge(_) => self.count.saturating_add(request.wanted()) <= most,
        }
    }
}

/// The window that `at` falls in: its first point, and the first after it.
pub fn window(limit: &Limit, at: Time) -> (Time, Time) {
    if limit.calendar_months()
        && let Some(window) = calendar_window(limit.period().multiplier(), at)
    {
        return window;
    }
    let start = Time::from_micros(at.as_micros() / limit.period_us() * limit.period_us());
    (start, start.plus_us(limit.period_us()))
}

/// The run of `months` calendar months that `at` falls in. `None` beyond the year 9999.
fn calendar_window(months: u32, at: Time) -> Option<(Time, Time)> {
    let date = Timestamp::from_microsecond(i64::try_from(at.as_micros()).ok()?).ok()?.to_zoned(TimeZone::UTC).date();
    let months = i32::try_from(months).ok()?;
    let index = (i32::from(date.year()) * 12 + i32::from(date.month()) - 1) / months * months;
    Some((first_of_month(index)?, first_of_month(index + months)?))
}

/// Midnight on the first of a month, which is counted from January of the year 0.
fn first_of_month(index: i32) -> Option<Time> {
    let date = Date::new(i16::try_from(index / 12).ok()?, i8::try_from(index % 12 + 1).ok()?, 1).ok()?;
    let midnight = date.to_zoned(TimeZone::UTC).ok()?.timestamp();
    Some(Time::from_micros(u64::try_from(midnight.as_microsecond()).unwrap_or(0)))
}
