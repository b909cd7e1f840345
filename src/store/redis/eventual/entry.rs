//! One eventual descriptor: what is believed of its counters, what was used of the share, and the leases at hand.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::demand::Demand;
use super::{AdmitContext, CallReport, LeaseTicket, LocalBudget};
use crate::algorithm::state::{State, charge_together};
use crate::algorithm::{ChargeRequest, ChargeResult, EnforcedLimit};
use crate::clock::{Time, micros};
use crate::request::Hits;
use crate::store::outcome::ChargeResults;
use crate::store::redis::command::{ChargeCommand, OwnedCounter};

/// Leases at once: one that is given out, and the next.
const MOST_LEASES: usize = 2;
/// A lease that was asked for ahead and did not come is asked for again after this time.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// What is believed of a descriptor that nobody asks for is kept so long.
const IDLE: Duration = Duration::from_secs(2);

/// A descriptor.
#[derive(Debug)]
pub(super) struct Entry {
    tags: u128,
    /// What Redis last told, and what was admitted here since.
    states: SmallVec<[State; 1]>,
    /// When Redis was asked, and the time it told.
    heard: Option<(Instant, Time)>,
    share: Share,
    leases: SmallVec<[Lease; MOST_LEASES]>,
    pub(super) demand: Demand,
    asked_ahead: Option<Instant>,
    used: Instant,
}

/// What was used of the share in the period that began at its first use.
#[derive(Clone, Copy, Debug)]
struct Share {
    used: u64,
    /// When that period ends.
    end: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    serial: u64,
    granted: u64,
    left: u64,
    end: Instant,
}

impl Entry {
    /// A descriptor that nothing is known of.
    pub(super) fn new(tags: u128, at: Instant) -> Self {
        Self {
            tags,
            states: SmallVec::new(),
            heard: None,
            share: Share { used: 0, end: at },
            leases: SmallVec::new(),
            demand: Demand::new(at),
            asked_ahead: None,
            used: at,
        }
    }

    /// Whether other counters of the path still hold it: a reload has changed its limits, and what they were promised
    /// is not over.
    pub(super) fn is_of_others(&mut self, tags: u128, at: Instant) -> bool {
        if self.tags == tags {
            return false;
        }
        if self.leases.is_empty() && at >= self.share.end {
            *self = Self::new(tags, at);
            return false;
        }
        true
    }

    /// Whether nothing of it is wanted any more.
    pub(super) fn is_done(&self, at: Instant) -> bool {
        self.leases.is_empty() && at >= self.share.end && at >= self.used + IDLE
    }

    /// Admits hits from a lease.
    pub(super) fn take_leased(
        &mut self,
        hits: u64,
        command: &ChargeCommand,
        moment: AdmitContext,
    ) -> Option<ChargeResults> {
        let lease = self.leases.iter_mut().find(|lease| moment.at < lease.end && lease.left >= hits)?;
        lease.left -= hits;
        self.used = moment.at;
        let mut levels = self.count(command, moment);
        // They were charged already, whatever has been heard since.
        for (level, counted) in levels.iter_mut().zip(&command.counters) {
            if counted.enforced && !level.admitted {
                *level = ChargeResult {
                    admitted: true,
                    after: level.before.saturating_add(hits),
                    retry_after_us: None,
                    ..*level
                };
            }
        }
        Some(levels)
    }

    /// Admits hits from the share.
    pub(super) fn take_shared(
        &mut self,
        hits: u64,
        command: &ChargeCommand,
        terms: &LocalBudget,
        moment: AdmitContext,
    ) -> Option<ChargeResults> {
        let begins = moment.at >= self.share.end;
        let used = if begins { 0 } else { self.share.used };
        if used + hits > terms.share {
            return None;
        }
        if self.states.len() != command.counters.len() {
            self.states = command.counters.iter().map(|counted| State::empty(counted.limit.algorithm())).collect();
        }
        let levels = self.count(command, moment);
        let passes = levels.iter().zip(&command.counters).all(|(level, counted)| level.admitted || !counted.enforced);
        passes.then(|| {
            if begins {
                self.share.end = moment.at + Duration::from_micros(terms.period_us);
            }
            self.share.used = used + hits;
            self.used = moment.at;
            levels
        })
    }

    /// Counts a charge on what is believed.
    fn count(&mut self, command: &ChargeCommand, moment: AdmitContext) -> ChargeResults {
        let terms: SmallVec<[EnforcedLimit<'_>; 1]> = command
            .counters
            .iter()
            .map(|counted| EnforcedLimit { limit: &counted.limit, enforced: counted.enforced })
            .collect();
        let now = self.time(moment.at).unwrap_or(moment.now);
        charge_together(&terms, &mut self.states, now, ChargeRequest { max_delay_us: 0, ..command.request })
    }

    /// The time of Redis, at the latest.
    fn time(&self, at: Instant) -> Option<Time> {
        let (sent, now) = self.heard?;
        Some(now.plus_us(micros(at.saturating_duration_since(sent))))
    }

    /// Whether it is time to ask for the next lease: there is demand for one, and most of those at hand is gone.
    pub(super) fn wants_more(&mut self, terms: &LocalBudget, at: Instant) -> bool {
        if self.leases.len() >= MOST_LEASES || self.asked_ahead.is_some_and(|asked| at < asked + ASK_AGAIN) {
            return false;
        }
        let [lease] = &*self.leases else { return false };
        let soon_over = lease.end.saturating_duration_since(at) < Duration::from_micros(terms.life_us / 4);
        if lease.left > lease.granted / 2 && !soon_over || self.demand.within(terms.life_us, at) < 2 {
            return false;
        }
        self.asked_ahead = Some(at);
        true
    }

    /// How many hits to lease now.
    pub(super) fn lease(&mut self, counters: &[OwnedCounter], terms: &LocalBudget, at: Instant, live: u64) -> u64 {
        if terms.life_us == 0 || self.leases.len() >= MOST_LEASES || self.states.len() != counters.len() {
            return 0;
        }
        let Some(now) = self.time(at) else { return 0 };
        let look = ChargeRequest::new(Hits::Peek, 0);
        let remaining =
            counters.iter().zip(&self.states).map(|(OwnedCounter { limit, enforced, .. }, state)| match enforced {
                true => u64::from(state.clone().charge(limit, now, look).remaining),
                false => u64::MAX,
            });
        let outstanding: u64 = self.leases.iter().map(|lease| lease.left).sum();
        let room = remaining.min().unwrap_or(0).saturating_sub(outstanding);
        let at_hand: u64 = self.leases.iter().filter(|lease| at < lease.end).map(|lease| lease.left).sum();
        let life_us = terms.life_at(counters, &self.states, now);
        let span_us = LocalBudget::span_us(counters, life_us);
        let wanted = self.demand.within(span_us, at).saturating_sub(at_hand);
        // What is no whole number of charges like the last one would only be given back.
        let charge = self.demand.last.max(1);
        let lease = wanted.min((room / (4 * live.max(1))).max(charge)).min(room);
        lease / charge * charge
    }

    /// Takes note of what Redis told, and of the lease that came with it.
    pub(super) fn heard(&mut self, counters: &[OwnedCounter], report: CallReport, lease: Option<LeaseTicket>) {
        self.asked_ahead = None;
        self.used = self.used.max(report.sent);
        if self.heard.is_none_or(|(sent, _)| sent <= report.sent) {
            self.heard = Some((report.sent, report.now));
            self.states = report.states;
            // What is lent is counted as it is given out.
            if report.lent > 0 {
                for (OwnedCounter { limit, .. }, state) in counters.iter().zip(&mut self.states) {
                    state.charge(limit, report.now, ChargeRequest::new(Hits::Refund(report.lent), 0));
                }
            }
        }
        if let Some(LeaseTicket { serial, end, .. }) = lease {
            self.leases.push(Lease { serial, granted: report.lent, left: report.lent, end });
        }
    }

    /// Ends a lease; what is left of it.
    pub(super) fn collect(&mut self, serial: u64) -> u64 {
        let Some(place) = self.leases.iter().position(|lease| lease.serial == serial) else { return 0 };
        self.leases.remove(place).left
    }
}
