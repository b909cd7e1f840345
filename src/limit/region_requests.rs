//! Requests of a region's pool to the global Redis: how many hits it wants, what it gives back, what an answer grants.
//!
//! Decides: how many hits a region wants (`hits_wanted`), for how long (`hold_length_us`), and how often it asks
//! (`request_interval_us`).
//! Decides: when a region gives hits back (`hits_to_keep`).

use super::Limit;
use super::algorithm::Algorithm;
use super::algorithm::region_pool::{LastAnswer, PoolGrant, RegionPool, less_drift_us};
use super::charge::MAX_COUNT;
use super::division::fair_share::FillLevel;
use super::hold::{HeldAmount, HoldAnswer, HoldRequest, windows_until_hold_end};
use crate::base::clock::Time;

/// Shortest time between two requests of a limit, in microseconds.
pub const MIN_REQUEST_INTERVAL_US: u64 = 1_000_000;
/// Time before the end of a window, or of a hold on a bucket, at which a region tells what it used and gives back what
/// it does not need, in microseconds. An answer from across an ocean is there before the end.
pub const LAST_REQUEST_LEAD_US: u64 = 500_000;

/// Shortest time over which demand is measured, in microseconds.
const MIN_DEMAND_SPAN_US: u64 = 250_000;
/// Time that the hits which are left must last: until an answer has crossed an ocean, with some margin.
const LOOKAHEAD_US: u64 = 1_500_000;
/// Time after the start of a window for which hits are wanted before it begins, in microseconds.
const NEXT_WINDOW_US: u64 = 500_000;
/// Length of a hold on windows, in microseconds; it lasts until the window of its end is over.
const WINDOW_HOLD_US: u64 = 2_000_000;

impl RegionPool {
    /// Hits that callers ask for in a span beyond the part, by the demand of the last seconds, rounded up.
    fn hits_asked_for_in(&self, span_us: u64) -> u64 {
        let measured_us = self.last.since_us(self.demand_since).max(MIN_DEMAND_SPAN_US);
        let hits = (u128::from(self.demand) * u128::from(span_us)).div_ceil(u128::from(measured_us));
        u64::try_from(hits).unwrap_or(u64::MAX).min(MAX_COUNT)
    }

    /// Hits to hold at the global Redis, without regard to what is left.
    ///
    /// Of windows: those that are asked for until the window ends, at most the region's part of what may be left of it.
    /// Of a bucket: those that are asked for while the hold lasts, at most the region's part of what it has or is refilled.
    pub fn hits_wanted(&self, limit: &Limit) -> u64 {
        let period_us = limit.period_us();
        let demand = self.hits_asked_for_in(period_us);
        if demand == 0 {
            return self.unmet;
        }
        let is_contended = self.answer.fair_share < MAX_COUNT;
        let LastAnswer { room, fair_share, others_share, held_by_others, window_end } = self.answer;
        let fair_share = if self.until == Time::default() { MAX_COUNT } else { fair_share };
        let fair = demand.min(fair_share);
        let scale = |hits: u64, part: u64, whole: u64| {
            u64::try_from(u128::from(hits) * u128::from(part) / u128::from(whole.max(1))).unwrap_or(u64::MAX)
        };
        let wanted = if limit.holds_take_capacity() {
            let lasts_us = hold_length_us(limit);
            let asked = self.hits_asked_for_in(lasts_us);
            // A region that gets less than it asks for holds its part of what the bucket has, or a little more than its
            // part of what is refilled, to use all of it.
            match u128::from(fair) * 100 > u128::from(demand) * 97 {
                true => asked,
                false => {
                    let refilled = scale(fair.saturating_mul(13), lasts_us, 10 * period_us) + 1;
                    refilled.max(scale(self.left + room + held_by_others, fair, fair + others_share)).min(asked)
                }
            }
        } else {
            let is_in_window = window_end > self.last;
            let (rest_us, available) = match is_in_window {
                true => (window_end.since_us(self.last), self.left + room + held_by_others),
                false => (period_us, limit.without_region_parts().requests_per_unit()),
            };
            let part = scale(available, fair, fair + others_share);
            let until_end = self.hits_asked_for_in(rest_us + NEXT_WINDOW_US);
            // Where all get what they ask for, half as much again makes requests rare; what is too much goes back.
            let until_end = if is_contended { until_end } else { until_end + until_end / 2 + 4 };
            until_end.min(part.max(1))
        };
        (wanted + 1).max(self.unmet)
    }

    /// Hits to keep when a process checks the pool, for [`Self::start_request_keeping`]; `None`: there is nothing to report.
    ///
    /// At the end of the window or of the hold all that are not wanted go back. Before it they do where others get less
    /// than they ask for and a fourth more than wanted is left, or where nobody does and four times as much is. Where
    /// little is left beside the holds, a region asks every sixth of a period how much the others ask for.
    pub fn hits_to_keep(&self, limit: &Limit) -> Option<u64> {
        let wanted = self.hits_wanted(limit);
        let LastAnswer { room, fair_share, held_by_others, .. } = self.answer;
        let ends_soon = self.final_check_at() <= self.last && self.left + self.unreported > 0;
        let most = if fair_share < MAX_COUNT { wanted + wanted / 4 + 2 } else { 4 * wanted + 10 };
        let is_outdated = self.last > self.requested_at.plus_us(limit.period_us() / 6)
            && self.left > 0
            && room < self.left + held_by_others;
        (self.first_number == 0 && (ends_soon || self.left > most || is_outdated)).then_some(wanted)
    }

    /// Time at which a region tells what it used and gives back what it does not need: the first after the last request.
    pub fn final_check_at(&self) -> Time {
        let before = |end: Time| Time::from_micros(end.as_micros().saturating_sub(LAST_REQUEST_LEAD_US));
        let in_window = before(self.answer.window_end);
        if in_window > self.requested_at { in_window } else { before(self.until).max(self.requested_at) }
    }

    /// The request that the global Redis gets, for a pool whose request is open.
    pub fn hold_request(&self, limit: &Limit) -> HoldRequest {
        // What was used and is not in this request stays held until it is in one.
        let wanted = self.hits_wanted(limit).max(self.left).saturating_add(self.unreported);
        let wanted = match limit.holds_take_capacity() {
            true => HeldAmount { hits: 0, capacity: wanted },
            false => HeldAmount { hits: wanted, capacity: 0 },
        };
        HoldRequest {
            used: self.reported,
            number: self.number,
            first_number: self.first_number,
            wanted,
            lasts_us: hold_length_us(limit),
            demand: self.hits_asked_for_in(limit.period_us()),
        }
    }

    /// The grant of an answer to [`Self::hold_request`], whose next request comes after `pause_us`.
    ///
    /// All times count from when the request was opened, which was before the global Redis answered, and are shorter by
    /// a thousandth: clocks drift by 500 ppm at most.
    pub fn grant_of(&self, limit: &Limit, answer: &HoldAnswer, pause_us: u64) -> PoolGrant {
        let after_us = |us: u64| self.requested_at.plus_us(less_drift_us(us));
        // The last window of a hold is for hits that were used just before it.
        let last_windows_us = windows_until_hold_end(limit).saturating_sub(1) * limit.period_us();
        let usable_us = answer.until.since_us(answer.now).saturating_sub(last_windows_us);
        let amount = |held: HeldAmount| if limit.holds_take_capacity() { held.capacity } else { held.hits };
        let held = amount(answer.granted);
        let others = answer.others.iter();
        let mut wants: Vec<u64> = others.clone().map(|other| other.demand).collect();
        wants.push(self.hits_asked_for_in(limit.period_us()));
        let whole = limit.without_region_parts().requests_per_unit();
        let fair_share = FillLevel::fill(whole, &mut wants, 0).level.min(MAX_COUNT);
        PoolGrant {
            number: self.number,
            held,
            until: after_us(usable_us),
            low: self.hits_asked_for_in(LOOKAHEAD_US).min(held / 2).max(1),
            next_request_at: self.requested_at.plus_us(pause_us),
            answer: LastAnswer {
                room: amount(answer.room).min(MAX_COUNT),
                fair_share,
                others_share: others
                    .clone()
                    .map(|other| other.demand.min(fair_share))
                    .fold(0, u64::saturating_add)
                    .min(MAX_COUNT),
                held_by_others: others.map(|other| amount(other.held)).fold(0, u64::saturating_add).min(MAX_COUNT),
                window_end: answer.window_end.map_or(Time::default(), |end| after_us(end.since_us(answer.now))),
            },
        }
    }
}

/// Length of a hold that a region asks for, in microseconds: of windows until the window is over, of a bucket a
/// twentieth of the period within 2 to 30 s.
pub fn hold_length_us(limit: &Limit) -> u64 {
    match limit.holds_take_capacity() {
        true => (limit.period_us() / 20).clamp(WINDOW_HOLD_US, 15 * WINDOW_HOLD_US),
        false => WINDOW_HOLD_US,
    }
}

/// Time between two requests of a pool, in microseconds: a second, or a thirtieth of a shorter sliding window and a
/// twentieth of another short period, because what becomes free between two requests lies idle.
pub fn request_interval_us(limit: &Limit) -> u64 {
    let divisor = if limit.algorithm() == Algorithm::SlidingWindowCounter { 30 } else { 20 };
    (limit.period_us() / divisor).clamp(MIN_REQUEST_INTERVAL_US / 4, MIN_REQUEST_INTERVAL_US)
}

/// Longest time between two checks of a pool, whether it has more than it needs, in microseconds.
pub fn check_interval_us(limit: &Limit) -> u64 {
    (limit.period_us() / 20).clamp(500_000, 5_000_000)
}
