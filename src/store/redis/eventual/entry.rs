//! State of one eventual descriptor: the last report of Redis, the used share, and the current leases.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::budget::{DescriptorId, EventualDescriptor, LocalBudget};
use crate::base::clock::{Time, to_micros};
use crate::limit::algorithm::state::{State, charge_together};
use crate::limit::charge::{ChargeRequest, ChargeResult, JointLimit};
use crate::limit::request::Hits;
use crate::store::charge::{ChargeResults, OwnedCharge, OwnedCounter};
use crate::store::redis::eventual::{AdmitContext, CallReport, LeaseTicket};
use crate::store::redis::lease_arguments::{OwnLease, StoredLease};

/// Leases of a descriptor at one time: the current one and the next.
const MAX_LEASES_PER_DESCRIPTOR: usize = 2;
/// Time after which a lease that was requested ahead and did not arrive is requested again.
const NEXT_LEASE_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time for which an entry without leases and used share is kept.
const IDLE_TIME: Duration = Duration::from_secs(2);

/// Local state of an eventual descriptor.
#[derive(Debug)]
pub(super) struct EventualEntry {
    /// Hash of the counters and limits that the entry belongs to.
    tags: u128,
    /// States that Redis last reported, with the hits admitted here since.
    states: SmallVec<[State; 1]>,
    last_report: Option<LastReportTimes>,
    share: UsedShare,
    leases: SmallVec<[Lease; MAX_LEASES_PER_DESCRIPTOR]>,
    pub(super) demand: Demand,
    requested_ahead: Option<Instant>,
    used: Instant,
}

/// Times of the last report.
#[derive(Clone, Copy, Debug)]
struct LastReportTimes {
    /// Time of sending the call.
    sent: Instant,
    /// Time of Redis in its reply.
    now: Time,
}

/// Share used in the tumbling period that began with its first use.
#[derive(Clone, Copy, Debug)]
struct UsedShare {
    hits: u64,
    start: Instant,
    /// End of that period.
    end: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    serial: u64,
    granted: u64,
    left: u64,
    end: Instant,
    recorded: StoredLease,
}

impl EventualEntry {
    /// Creates the entry of a descriptor that Redis has not reported on.
    pub(super) fn new(tags: u128, at: Instant) -> Self {
        Self {
            tags,
            states: SmallVec::new(),
            last_report: None,
            share: UsedShare { hits: 0, start: at, end: at },
            leases: SmallVec::new(),
            demand: Demand::new(at),
            requested_ahead: None,
            used: at,
        }
    }

    /// Returns true if the entry belongs to these limits, and not to others of the path.
    pub(super) const fn belongs_to(&self, id: DescriptorId) -> bool {
        self.tags == id.tags
    }

    /// Takes the entry over from other limits of the path, which a reload or an override replaced; returns false while
    /// it has leases of these. The share that they used counts as used, for at least a period of the new limits.
    pub(super) fn switch_descriptor(&mut self, id: DescriptorId, budget: &LocalBudget, at: Instant) -> bool {
        if !self.leases.is_empty() {
            return false;
        }
        let UsedShare { hits, start, end } = self.share;
        let new = Self::new(id.tags, at);
        let share = match at < end {
            true => UsedShare { hits, start, end: end.max(start + Duration::from_micros(budget.period_us)) },
            false => new.share,
        };
        *self = Self { share, demand: self.demand, ..new };
        true
    }

    /// Returns true if the entry can be dropped: no leases, no used share, not used for a while.
    pub(super) fn is_droppable(&self, at: Instant) -> bool {
        self.leases.is_empty() && at >= self.share.end && at >= self.used + IDLE_TIME
    }

    /// Admits hits from a lease; `None` if no lease has enough.
    pub(super) fn admit_from_lease(
        &mut self,
        hits: u64,
        charge: &OwnedCharge,
        context: AdmitContext,
    ) -> Option<ChargeResults> {
        let lease = self.leases.iter_mut().find(|lease| context.at < lease.end && lease.left >= hits)?;
        lease.left -= hits;
        self.used = context.at;
        let mut results = self.charge_known_states(charge, context);
        // The hits were charged already, whatever Redis has reported since.
        for (result, counter) in results.iter_mut().zip(&charge.counters) {
            if !counter.shadow && !result.admitted {
                *result = ChargeResult {
                    admitted: true,
                    after: result.before.saturating_add(hits),
                    retry_after_us: None,
                    ..*result
                };
            }
        }
        Some(results)
    }

    /// Admits hits from the share; `None` if it has too few left, or if the reported states reject the charge.
    pub(super) fn admit_from_share(
        &mut self,
        hits: u64,
        charge: &OwnedCharge,
        budget: &LocalBudget,
        context: AdmitContext,
    ) -> Option<ChargeResults> {
        let is_new_period = context.at >= self.share.end;
        let used = if is_new_period { 0 } else { self.share.hits };
        if used + hits > budget.share {
            return None;
        }
        if self.states.len() != charge.counters.len() {
            self.states = charge.counters.iter().map(|counter| State::empty(counter.limit.counting_method())).collect();
        }
        let results = self.charge_known_states(charge, context);
        let passes = results.iter().zip(&charge.counters).all(|(result, counter)| result.admitted || counter.shadow);
        passes.then(|| {
            if is_new_period {
                let end = context.at + Duration::from_micros(budget.period_us);
                self.share = UsedShare { hits: 0, start: context.at, end };
            }
            self.share.hits = used + hits;
            self.used = context.at;
            results
        })
    }

    /// Charges the states known here: all of them or, if one rejects, none. Quotas reject for all too, so that their
    /// hits come from the share and leases.
    fn charge_known_states(&mut self, charge: &OwnedCharge, context: AdmitContext) -> ChargeResults {
        let now = self.latest_possible_redis_time(context.at).unwrap_or(context.now);
        let request = ChargeRequest { max_delay_us: 0, ..charge.request };
        let limits =
            charge.counters.iter().map(|counter| JointLimit { limit: &counter.limit, rejects_others: !counter.shadow });
        let limits: SmallVec<[JointLimit<'_>; 1]> = limits.collect();
        charge_together(&limits, &mut self.states, now, request)
    }

    /// Returns an upper bound on the time of Redis at `at`; `None` before the first report.
    fn latest_possible_redis_time(&self, at: Instant) -> Option<Time> {
        let LastReportTimes { sent, now } = self.last_report?;
        Some(now.plus_us(to_micros(at.saturating_duration_since(sent))))
    }

    /// Returns true if it is time to request the next lease: there is demand, and the current lease is half used or
    /// nearly over. Returns true once per request.
    pub(super) fn begin_lease_request_if_due(&mut self, budget: &LocalBudget, at: Instant) -> bool {
        if self.leases.len() >= MAX_LEASES_PER_DESCRIPTOR
            || self.requested_ahead.is_some_and(|when| at < when + NEXT_LEASE_RETRY_INTERVAL)
        {
            return false;
        }
        let [lease] = &*self.leases else { return false };
        let ends_soon = lease.end.saturating_duration_since(at) < Duration::from_micros(budget.life_us / 4);
        if lease.left > lease.granted / 2 && !ends_soon || self.demand.predict(budget.life_us, at) < 2 {
            return false;
        }
        self.requested_ahead = Some(at);
        true
    }

    /// Returns the number of hits to lease now; `live` replicas share what is left of the limit.
    ///
    /// A lease covers the demand that is expected while it lives, less what the current leases still cover. Hits that
    /// lie unused in a lease are missing to other replicas, so it has at most a quarter of what is left for each live
    /// replica: leases get smaller towards the limit. It has at least the hits of one charge, if so many are left.
    pub(super) fn hits_to_lease(&mut self, descriptor: &EventualDescriptor, at: Instant, live: u64) -> u64 {
        let EventualDescriptor { budget, counters, .. } = descriptor;
        if budget.life_us == 0 || self.leases.len() >= MAX_LEASES_PER_DESCRIPTOR || self.states.len() != counters.len()
        {
            return 0;
        }
        let Some(now) = self.latest_possible_redis_time(at) else { return 0 };
        let peek = ChargeRequest::new(Hits::Peek, 0);
        let remaining =
            counters.iter().zip(&self.states).map(|(OwnedCounter { limit, shadow, .. }, state)| match shadow {
                true => u64::MAX,
                false => u64::from(state.clone().charge(limit, now, peek).remaining),
            });
        let outstanding: u64 = self.leases.iter().map(|lease| lease.left).sum();
        let room = remaining.min().unwrap_or(0).saturating_sub(outstanding);
        let available: u64 = self.leases.iter().filter(|lease| at < lease.end).map(|lease| lease.left).sum();
        let life_us = budget.lease_life_us(counters, &self.states, now);
        let span_us = LocalBudget::lease_demand_span_us(counters, life_us);
        let wanted = self.demand.predict(span_us, at).saturating_sub(available);
        // Round down to whole charges of the last size: a remainder could not be used.
        let charge_hits = self.demand.last_hits.max(1);
        let size = wanted.min((room / (4 * live.max(1))).max(charge_hits)).min(room);
        size / charge_hits * charge_hits
    }

    /// Records a report of Redis, and the lease that came with it. The report that was sent last wins.
    pub(super) fn record_report(&mut self, counters: &[OwnedCounter], report: CallReport, ticket: Option<LeaseTicket>) {
        self.requested_ahead = None;
        self.used = self.used.max(report.sent);
        if self.last_report.is_none_or(|last| last.sent <= report.sent) {
            self.last_report = Some(LastReportTimes { sent: report.sent, now: report.now });
            self.states = report.states;
            // Only what a call decides needs a view that is surely right.
            self.states.iter_mut().for_each(State::assume_view_is_always_valid);
            // Leased hits are counted here when they are admitted.
            if report.leased > 0 {
                for (OwnedCounter { limit, .. }, state) in counters.iter().zip(&mut self.states) {
                    state.charge(limit, report.now, ChargeRequest::new(Hits::Refund(report.leased), 0));
                }
            }
        }
        if let Some(LeaseTicket { serial, end, recorded, .. }) = ticket {
            self.leases.push(Lease { serial, granted: report.leased, left: report.leased, end, recorded });
        }
    }

    /// Ends a lease; returns its unused hits.
    pub(super) fn end_lease(&mut self, serial: u64) -> u64 {
        let Some(index) = self.leases.iter().position(|lease| lease.serial == serial) else { return 0 };
        self.leases.remove(index).left
    }

    /// Returns the current leases, and how many of their hits were admitted.
    pub(super) fn own_leases(&self) -> SmallVec<[OwnLease; MAX_LEASES_PER_DESCRIPTOR]> {
        self.leases.iter().map(|lease| OwnLease { lease: lease.recorded, done: lease.granted - lease.left }).collect()
    }

    /// Ends all leases before a reset, and forgets the reported states; returns the leases.
    pub(super) fn reset(&mut self) -> SmallVec<[OwnLease; MAX_LEASES_PER_DESCRIPTOR]> {
        self.states.clear();
        self.last_report = None;
        self.leases.drain(..).map(|lease| OwnLease { lease: lease.recorded, done: lease.granted }).collect()
    }
}

/// Length of the intervals in which demand is counted.
const DEMAND_INTERVAL: Duration = Duration::from_millis(100);

/// Demand of a descriptor: hits requested in this interval and in the previous one.
///
/// The first charge of an interval is not counted: a single charge does not predict another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    interval_start: Instant,
    /// Hits of the last charge.
    pub(super) last_hits: u64,
    interval_is_new: bool,
    hits: u64,
    previous_hits: u64,
}

impl Demand {
    /// No demand yet.
    pub(super) const fn new(at: Instant) -> Self {
        Self { interval_start: at, last_hits: 0, interval_is_new: true, hits: 0, previous_hits: 0 }
    }

    /// Counts the hits of a charge.
    pub(super) fn record_hits(&mut self, hits: u64, at: Instant) {
        self.advance_interval(at);
        self.last_hits = hits;
        if !std::mem::take(&mut self.interval_is_new) {
            self.hits = self.hits.saturating_add(hits);
        }
    }

    /// Predicts the hits of the next `span_us` microseconds, if demand stays the same.
    pub(super) fn predict(&mut self, span_us: u64, at: Instant) -> u64 {
        self.advance_interval(at);
        let max_hits = u128::from(self.hits.max(self.previous_hits));
        u64::try_from(max_hits * u128::from(span_us) / DEMAND_INTERVAL.as_micros()).unwrap_or(u64::MAX)
    }

    fn advance_interval(&mut self, at: Instant) {
        let passed = at.saturating_duration_since(self.interval_start);
        if passed >= DEMAND_INTERVAL {
            self.previous_hits = if passed < 2 * DEMAND_INTERVAL { self.hits } else { 0 };
            (self.interval_start, self.interval_is_new, self.hits) = (at, true, 0);
        }
    }
}
