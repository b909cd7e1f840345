//! Local budget of an eventual descriptor: its share and the life of its leases. The proof is in
//! [`eventual`](super::super::eventual).
//!
//! Decides: how many hits a replica may admit without a call (share of `max_overshoot`); the life of a lease.
//! Decides: which changes of a rule concern leases.

use std::num::NonZeroU32;
use std::time::Duration;

use smallvec::SmallVec;

use super::{DescriptorStateReport, LeaseTicket, StoredLease};
use crate::base::clock::Time;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::{HitExpiry, fixed_window};
use crate::limit::period::Unit;
use crate::limit::{Consistency, Limit, Overshoot};
use crate::store::charge::OwnedCounter;

/// A day in microseconds.
const DAY_US: u64 = 86_400_000_000;
/// Longest life of a lease.
const MAX_LEASE_LIFE_US: u64 = 1_000_000;
/// Shortest life of a lease that is worth a call.
const MIN_LEASE_LIFE_US: u64 = 2_000;
/// Longest time by which a lease ends before its window, so that unused hits can be returned.
const MAX_MARGIN_BEFORE_WINDOW_END_US: u64 = 50_000;
/// Demand that a lease of a log covers at most: its unused hits stay charged.
const MAX_LOG_LEASE_DEMAND_SPAN_US: u64 = 25_000;
/// Time after the end of a lease in which its unused hits can still be returned to a bucket.
const LEASE_RETURN_TIME_US: u64 = 200_000;

/// Hits that this process may admit by itself for a descriptor whose limits are all eventual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalBudget {
    /// Hits of the share in each period; 0: no share.
    pub share: u64,
    /// Longest period of the limits, in microseconds.
    pub period_us: u64,
    /// Life of a lease, in microseconds; 0: no leases.
    pub life_us: u64,
}

impl LocalBudget {
    /// Computes the budget for one of `slots` slots; `None` if one of the counters is strict.
    pub fn for_counters(counters: &[OwnedCounter], slots: NonZeroU32) -> Option<Self> {
        let mut budget = Self { share: u64::MAX, period_us: 0, life_us: MAX_LEASE_LIFE_US };
        for OwnedCounter { limit, .. } in counters {
            let Consistency::Eventual(overshoot) = limit.consistency() else { return None };
            let is_global = limit.global_scope().is_some();
            let (for_shares, life_us) = match limit.algorithm().properties().hit_expiry {
                // The other half of the overshoot is for what refills during the life of a lease.
                HitExpiry::Continuous => (
                    overshoot.milli_hits(limit.requests_per_unit()) / 2,
                    bucket_lease_life_us(limit, overshoot, is_global),
                ),
                HitExpiry::WithWindow => (overshoot.milli_hits(limit.requests_per_unit()), MAX_LEASE_LIFE_US),
                HitExpiry::AfterPeriod => (
                    overshoot.milli_hits(limit.requests_per_unit()),
                    sliding_log_lease_life_us(limit.period().micros()),
                ),
            };
            // The overshoot of a global limit is for regions.
            let for_shares = if is_global { 0 } else { for_shares };
            budget.share = budget.share.min(for_shares / 1000 / (2 * u64::from(slots.get())));
            budget.period_us = budget.period_us.max(longest_window_us(limit));
            budget.life_us = budget.life_us.min(life_us);
        }
        if budget.life_us < MIN_LEASE_LIFE_US {
            budget.life_us = 0;
        }
        Some(budget)
    }

    /// Returns the life of a lease charged at `now`, in microseconds: it ends before its window, or its grant.
    pub(super) fn lease_life_us(&self, counters: &[OwnedCounter], states: &[State], now: Time) -> u64 {
        let left_us = |(OwnedCounter { limit, .. }, state): (&OwnedCounter, &State)| {
            let margin_us = MAX_MARGIN_BEFORE_WINDOW_END_US.min(limit.period_us() / 20);
            match limit.algorithm().properties().hit_expiry {
                _ if limit.is_counted_in_region() => state.grant_time_left_us(limit, now).saturating_sub(margin_us),
                HitExpiry::WithWindow => window_end(limit, state, now).since_us(now).saturating_sub(margin_us),
                HitExpiry::Continuous | HitExpiry::AfterPeriod => u64::MAX,
            }
        };
        counters.iter().zip(states).map(left_us).fold(self.life_us, u64::min)
    }

    /// Returns the time for which Redis records a lease, in microseconds: its life, and the time for its return.
    pub const fn lease_record_lifetime_us(&self) -> u64 {
        self.life_us + LEASE_RETURN_TIME_US
    }

    /// Returns the span of demand that a lease covers, in microseconds: its life, but less where unused hits can be
    /// returned in part or not at all. Before that, leases wasted up to 13 % of a log's limit in simulations.
    pub(super) fn lease_demand_span_us(counters: &[OwnedCounter], life_us: u64) -> u64 {
        let span_us = |counter: &OwnedCounter| match counter.limit.algorithm().properties().hit_expiry {
            // Nothing is returned.
            HitExpiry::AfterPeriod => (life_us / 4).min(MAX_LOG_LEASE_DEMAND_SPAN_US),
            _ if counter.limit.is_counted_in_region() => life_us,
            // What may have refilled since is not returned.
            HitExpiry::Continuous => life_us / 2,
            HitExpiry::WithWindow => life_us,
        };
        counters.iter().map(span_us).min().unwrap_or(life_us)
    }

    /// Creates the ticket of a lease that the reported call charged.
    pub(super) fn issue_ticket(
        &self,
        serial: u64,
        counters: &[OwnedCounter],
        report: &DescriptorStateReport,
    ) -> LeaseTicket {
        let life_us = self.lease_life_us(counters, &report.states, report.now);
        let return_span_us = self.lease_record_lifetime_us();
        let recorded = StoredLease { end: report.now.plus_us(return_span_us), hits: report.leased };
        let mut void_from = Some(recorded.end);
        let mut refilled = 0;
        for (OwnedCounter { limit, .. }, state) in counters.iter().zip(&report.states) {
            match limit.algorithm().properties().hit_expiry {
                // A return to a bucket would let hits live longer than their grant.
                HitExpiry::Continuous if limit.is_counted_in_region() => void_from = None,
                _ if limit.is_counted_in_region() => {
                    let end = report.now.plus_us(state.grant_time_left_us(limit, report.now));
                    void_from = void_from.map(|time| time.min(end));
                }
                HitExpiry::WithWindow => {
                    void_from = void_from.map(|time| time.min(window_end(limit, state, report.now)));
                }
                HitExpiry::Continuous => refilled = refilled.max(max_refilled_hits(limit, return_span_us)),
                HitExpiry::AfterPeriod => void_from = None,
            }
        }
        LeaseTicket { serial, end: report.sent + Duration::from_micros(life_us), recorded, void_from, refilled }
    }
}

/// Returns true if hits of the counter may be lent to a process, now or under the rules of a moment ago.
pub fn can_be_lent(limit: &Limit) -> bool {
    limit.algorithm().properties().can_be_eventual()
}

/// Returns how much longer than a period the log of an eventual limit keeps hits, in microseconds.
pub fn log_extension_us(limit: &Limit) -> u64 {
    match (limit.algorithm().properties().hit_expiry, limit.consistency()) {
        (HitExpiry::AfterPeriod, Consistency::Eventual(_)) => sliding_log_lease_life_us(limit.period().micros()),
        (HitExpiry::AfterPeriod, Consistency::Strict) => 0,
        (HitExpiry::WithWindow | HitExpiry::Continuous, _) => 0,
    }
}

/// Returns the longest window of a limit, in microseconds: calendar months have up to 31 days, years 366.
fn longest_window_us(limit: &Limit) -> u64 {
    let months = u64::from(limit.period().multiplier()) * 31 * DAY_US;
    match limit.period().unit() {
        Unit::Month if limit.follows_calendar_months() => months,
        // Parts of a day end with it at the latest.
        Unit::Second | Unit::Minute | Unit::Hour => limit.period_us(),
        // A day more than the calendar's longest: clocks are put back, and `day_starts` may be skipped.
        Unit::Month if limit.calendar_windows().is_some() => months + DAY_US,
        Unit::Year if limit.calendar_windows().is_some() => 367 * DAY_US,
        _ if limit.calendar_windows().is_some() => limit.period_us() + DAY_US,
        _ => limit.period_us(),
    }
}

/// Returns the life of a log's leases: a fiftieth of the period in whole milliseconds, at most [`MAX_LEASE_LIFE_US`].
/// The log keeps hits longer by it, so a longer life would lower the rate that the limit admits.
fn sliding_log_lease_life_us(period_us: u64) -> u64 {
    (period_us / 50 / 1000 * 1000).min(MAX_LEASE_LIFE_US)
}

/// Returns the time in which half of the overshoot refills, in microseconds; a quarter for a global limit.
fn bucket_lease_life_us(limit: &Limit, overshoot: Overshoot, is_global: bool) -> u64 {
    let milli_limit = 1000 * u128::from(limit.requests_per_unit().max(1));
    let parts = if is_global { 4 } else { 2 };
    let part = u128::from(overshoot.milli_hits(limit.requests_per_unit()) / parts);
    let life_us = part * u128::from(limit.period_us()) / milli_limit;
    u64::try_from(life_us).unwrap_or(u64::MAX)
}

/// Returns the end of the window in which hits were charged.
fn window_end(limit: &Limit, state: &State, now: Time) -> Time {
    if let State::CalendarWindow(calendar) = state {
        return calendar.end;
    }
    fixed_window::window_bounds(limit, state.effective_charge_time(limit, now)).1
}

/// Returns the most hits that a bucket refills in a span, rounded up.
fn max_refilled_hits(limit: &Limit, span_us: u64) -> u64 {
    let hits = u128::from(limit.requests_per_unit()) * u128::from(span_us);
    u64::try_from(hits.div_ceil(u128::from(limit.period_us()))).unwrap_or(u64::MAX)
}

/// Identity of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorId {
    /// Hash of its path.
    pub path: u128,
    /// Hash of its set of counters and their limits.
    pub tags: u128,
}

/// Descriptor whose counters are all eventual.
#[derive(Clone, Debug)]
pub struct EventualDescriptor {
    /// Identity.
    pub id: DescriptorId,
    /// Hits that this process may admit by itself.
    pub budget: LocalBudget,
    /// The counters.
    pub counters: SmallVec<[OwnedCounter; 1]>,
}

impl DescriptorId {
    /// Identifies a descriptor. The limits are part of it: a budget of one limit must not be used under another.
    pub fn new(path: u128, counters: &[OwnedCounter]) -> Self {
        let tags = counters.iter().fold(0_u128, |tags, OwnedCounter { limit, tag, .. }| {
            let amounts = u128::from(limit.requests_per_unit()) << 32 | u128::from(limit.capacity());
            tags.rotate_left(1) ^ tag ^ amounts.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
        });
        Self { path, tags }
    }
}
