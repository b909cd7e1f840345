//! sliding_window_counter: this window's count plus the last one's, weighted by what is left of it.
//!
//! weight = floor(current + previous x (period - elapsed in this window) / period); a charge passes if the weight plus
//! its hits is within the limit. It takes the last window's hits to have come evenly, so it can be off either way, at a
//! fixed cost of two counts. This is the one algorithm that rounds in favour of the caller.

use super::{ChargeRequest, ChargeResult, Effect, effective_now, to_u32};
use crate::clock::Time;
use crate::limit::Limit;

/// The counts of two neighbouring windows, aligned to the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Hits in the window of `last`.
    pub current: u64,
    /// Hits in the window before it.
    pub previous: u64,
    /// When hits were last counted.
    pub last: Time,
}

/// Counts hits.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let mut counts = Counts::at(limit, state, now);
    let before = counts.weight();
    let most = u64::from(limit.requests_per_unit());
    let fits = counts.fits(limit, request);
    let effect = request.effect(fits, limit);
    match effect {
        Effect::Nothing => {}
        Effect::Charge(hits) => counts.current += hits,
        // Debt ends at the limit twice over and never lowers the count.
        Effect::Debt(hits) => counts.current = counts.current.max((2 * most).min(counts.current + hits)),
        Effect::Refund(hits) => {
            let beyond = hits.saturating_sub(counts.current);
            counts.current = counts.current.saturating_sub(hits);
            counts.previous = counts.previous.saturating_sub(beyond);
        }
    }
    if effect != Effect::Nothing {
        *state = State { current: counts.current, previous: counts.previous, last: counts.at };
    }
    let after = counts.weight();
    ChargeResult {
        admitted: fits,
        before,
        after,
        remaining: to_u32(most.saturating_sub(after)),
        reset_us: counts.until_weight_us(0),
        retry_after_us: match most.checked_sub(request.wanted()) {
            Some(room) if !fits => Some(counts.until_weight_us(room)),
            _ => None,
        },
        delay_us: 0,
    }
}

/// Whether [`charge`] would pass.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    Counts::at(limit, state, now).fits(limit, request)
}

/// The counts at the time of a charge.
struct Counts {
    current: u64,
    previous: u64,
    at: Time,
    ahead_us: u64,
    /// Elapsed in this window, in microseconds, less than the period.
    elapsed_us: u64,
    period_us: u64,
}

impl Counts {
    fn at(limit: &Limit, state: &State, now: Time) -> Self {
        let period_us = limit.period_us();
        let (state, at, ahead_us) = match effective_now(now, state.last, period_us) {
            Some((at, ahead_us)) => (*state, at, ahead_us),
            None => (State::default(), now, 0),
        };
        let windows = at.as_micros() / period_us - state.last.as_micros() / period_us;
        let (current, previous) = match windows {
            0 => (state.current, state.previous),
            1 => (0, state.current),
            _ => (0, 0),
        };
        Self { current, previous, at, ahead_us, elapsed_us: at.as_micros() % period_us, period_us }
    }

    fn weight(&self) -> u64 {
        self.current + scale(self.previous, self.period_us - self.elapsed_us, self.period_us)
    }

    fn fits(&self, limit: &Limit, request: ChargeRequest) -> bool {
        request.wanted() == 0 || self.weight() + request.wanted() <= u64::from(limit.requests_per_unit())
    }

    /// Microseconds from the charge's own now until the weight is at most `most`; 0 if it is.
    ///
    /// Within this window only the previous count falls; in the next one this window's count does.
    fn until_weight_us(&self, most: u64) -> u64 {
        let until_us = match most.checked_sub(self.current) {
            _ if self.weight() <= most => return 0,
            Some(room) => faded_at(self.previous, room, self.period_us) - self.elapsed_us,
            None => self.period_us - self.elapsed_us + faded_at(self.current, most, self.period_us),
        };
        self.ahead_us + until_us
    }
}

/// floor(count x left / period).
fn scale(count: u64, left_us: u64, period_us: u64) -> u64 {
    let product = u128::from(count) * u128::from(left_us) / u128::from(period_us);
    u64::try_from(product).unwrap_or(u64::MAX)
}

/// The first point of a window, in microseconds from its start, at which the share of a `count` of the window before
/// it is at most `most`, with `count` > `most`: count x (period - t) < (most + 1) x period; at most the window's end.
fn faded_at(count: u64, most: u64, period_us: u64) -> u64 {
    let left = (u128::from(most + 1) * u128::from(period_us)).div_ceil(u128::from(count));
    let left = u64::try_from(left).unwrap_or(period_us).min(period_us);
    (period_us - left + 1).min(period_us)
}
