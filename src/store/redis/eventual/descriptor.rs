//! Eventual descriptor: its counters with their local budget, and what a lease of it is. The proof is in
//! [`eventual`](super::super::eventual).
//!
//! Decides: when a lease ends before its window; the demand that a lease covers; which returns have no effect.
//! Decides: which changes of a rule concern leases.

use std::time::Duration;

use smallvec::SmallVec;

use super::{DescriptorStateReport, LeaseTicket, StoredLease};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::{HitExpiry, fixed_window};
use crate::limit::local_budget::LocalBudget;
use crate::store::charge::OwnedCounter;

/// Longest time by which a lease ends before its window, so that unused hits can be returned.
const MAX_MARGIN_BEFORE_WINDOW_END_US: u64 = 50_000;
/// Demand that a lease of a log covers at most: its unused hits stay charged.
const MAX_LOG_LEASE_DEMAND_SPAN_US: u64 = 25_000;

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
            let amounts = u128::from(limit.requests_per_unit()) << 64 | u128::from(limit.capacity());
            tags.rotate_left(1) ^ tag ^ amounts.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
        });
        Self { path, tags }
    }
}

impl EventualDescriptor {
    /// Returns the life of a lease charged at `now`, in microseconds: it ends before its window, or its grant.
    pub(super) fn lease_life_us(&self, states: &[State], now: Time) -> u64 {
        let left_us = |(OwnedCounter { limit, .. }, state): (&OwnedCounter, &State)| {
            let margin_us = MAX_MARGIN_BEFORE_WINDOW_END_US.min(limit.period_us() / 20);
            match limit.algorithm().properties().hit_expiry {
                _ if limit.is_counted_in_region() => lease_time_left_us(limit, state, now).saturating_sub(margin_us),
                HitExpiry::WithWindow => window_end(limit, state, now).since_us(now).saturating_sub(margin_us),
                HitExpiry::Continuous | HitExpiry::AfterPeriod => u64::MAX,
            }
        };
        self.counters.iter().zip(states).map(left_us).fold(self.budget.life_us, u64::min)
    }

    /// Returns the span of demand that a lease covers, in microseconds: its life, but less where unused hits can be
    /// returned in part or not at all. Before that, leases wasted up to 13 % of a log's limit in simulations.
    pub(super) fn lease_demand_span_us(&self, life_us: u64) -> u64 {
        let span_us = |counter: &OwnedCounter| match counter.limit.algorithm().properties().hit_expiry {
            // Nothing is returned.
            HitExpiry::AfterPeriod => (life_us / 4).min(MAX_LOG_LEASE_DEMAND_SPAN_US),
            _ if counter.limit.is_counted_in_region() => life_us,
            // What may have refilled since is not returned.
            HitExpiry::Continuous => life_us / 2,
            HitExpiry::WithWindow => life_us,
        };
        self.counters.iter().map(span_us).min().unwrap_or(life_us)
    }

    /// Creates the ticket of a lease that the reported call charged.
    pub(super) fn issue_ticket(&self, serial: u64, report: &DescriptorStateReport) -> LeaseTicket {
        let life_us = self.lease_life_us(&report.states, report.now);
        let return_span_us = self.budget.lease_record_lifetime_us();
        let recorded = StoredLease { end: report.now.plus_us(return_span_us), hits: report.leased };
        let mut void_from = Some(recorded.end);
        let mut refilled = 0;
        for (OwnedCounter { limit, .. }, state) in self.counters.iter().zip(&report.states) {
            match limit.algorithm().properties().hit_expiry {
                // A return to a bucket would let hits live longer than their grant.
                HitExpiry::Continuous if limit.is_counted_in_region() => void_from = None,
                _ if limit.is_counted_in_region() => {
                    let end = report.now.plus_us(lease_time_left_us(limit, state, report.now));
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

/// Returns true if hits of the counter may be leased to a process, now or under the rules of a moment ago.
pub fn can_be_leased(limit: &Limit) -> bool {
    limit.algorithm().properties().can_be_eventual()
}

/// Returns the time for which a lease of a region's counter may last, in microseconds.
fn lease_time_left_us(limit: &Limit, state: &State, now: Time) -> u64 {
    state.pool().map_or(0, |counter| counter.lease_time_left_us(limit, now))
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
