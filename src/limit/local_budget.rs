//! Local budget of an eventual descriptor: its share of the overshoot, and the life of its leases. The proof is in
//! `store::redis::eventual`.
//!
//! Decides: how many hits a replica may admit without a call (share of `max_overshoot`); the life of a lease.

use std::num::NonZeroU32;

use super::algorithm::HitExpiry;
use super::period::Unit;
use super::{Consistency, Limit, Overshoot};

/// A day in microseconds.
const DAY_US: u64 = 86_400_000_000;
/// Longest life of a lease.
const MAX_LEASE_LIFE_US: u64 = 1_000_000;
/// Shortest life of a lease that is worth a call.
const MIN_LEASE_LIFE_US: u64 = 2_000;
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
    /// Computes the budget of a descriptor for one of so many replicas; `None` if one of its limits is strict.
    pub fn for_limits<'l>(limits: impl Iterator<Item = &'l Limit>, max_replicas: NonZeroU32) -> Option<Self> {
        let mut budget = Self { share: u64::MAX, period_us: 0, life_us: MAX_LEASE_LIFE_US };
        for limit in limits {
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
            budget.share = budget.share.min(for_shares / 1000 / (2 * u64::from(max_replicas.get())));
            budget.period_us = budget.period_us.max(longest_window_us(limit));
            budget.life_us = budget.life_us.min(life_us);
        }
        if budget.life_us < MIN_LEASE_LIFE_US {
            budget.life_us = 0;
        }
        Some(budget)
    }

    /// Returns the time for which Redis records a lease, in microseconds: its life, and the time for its return.
    pub const fn lease_record_lifetime_us(&self) -> u64 {
        self.life_us + LEASE_RETURN_TIME_US
    }
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
