//! Checks of a run of streams, by what Envoys saw: docs/concurrency.md.
//!
//! A stream has a slot from its answer until its end, whatever is in Redis. So streams that live at once are never more
//! than the limit. A request that is rejected must find the limit full: with streams that may have a slot, because they
//! live, or their release was not answered, or nobody reported their end.

use std::cell::Ref;

use bytes::Bytes;
use simulated_redis::keyspace::Value;

use super::StreamRule;
use crate::envoy::{Attempt, Journal, Moment, Outcome};
use crate::envoy_world::{EnvoysPlan, LATE_MS};
use crate::fleet::Fleet;
use crate::judge::Loss;
use crate::plan::{Fault, RECOVERY_MS, StoreErrorPolicy, TimedFault};

/// Time after the holder timeout in which the slots of a dead Envoy are free, in milliseconds.
const DEATH_IS_NOTICED_MS: u64 = 5000;
/// Time in which the slots of a rejected call are given back while nothing fails, in milliseconds.
const GIVEN_BACK_MS: u64 = 200;
/// Time between two walks over a full limit, and what clocks differ by, in milliseconds.
const WALK_MS: u64 = 1100;
/// What clocks differ by in a run, in milliseconds.
const DRIFT_MS: u64 = 100;

/// A run, as its judge sees it.
pub(super) struct Judge<'w> {
    pub(super) rules: &'w [StreamRule],
    pub(super) plan: &'w EnvoysPlan,
    pub(super) fleet: &'w Fleet,
    pub(super) journal: Ref<'w, Journal>,
}

/// A counter: rule and value.
type CounterId = (usize, u64);

impl Judge<'_> {
    /// Returns what is broken.
    pub(super) fn find_breaches(&self) -> Vec<String> {
        let mut breaches = Vec::new();
        for attempt in &self.journal.attempts {
            let found = match attempt.outcome {
                Outcome::Admitted => attempt.plan.counters.iter().find_map(|of| self.find_excess(attempt, *of)),
                Outcome::Rejected => self.find_needless_rejection(attempt),
                Outcome::Failed | Outcome::Unknown => None,
            };
            breaches.extend(found);
        }
        breaches
    }

    /// Returns counters in Redis that differ from the streams that live, when releases have ended.
    pub(super) fn find_wrong_counters(&self) -> Vec<String> {
        let now = Moment { order: u64::MAX, at_ms: self.fleet.now_ms(), redis_us: 0 };
        let mut breaches = Vec::new();
        for counter in self.counters() {
            let used = self.seats_in_redis(counter);
            let lost_ms = self.last_loss_ms(now.at_ms);
            let certain = |one: &&Attempt| self.has_slot(one, now) && one.sent.at_ms > lost_ms;
            let least: u64 = self.on(counter).filter(certain).map(|one| one.plan.hits).sum();
            let possible = |one: &&Attempt| self.hold_ends_ms(one, counter.0) != Some(0) && !self.is_released(one);
            let most: u64 = self.on(counter).filter(possible).map(|one| one.plan.hits).sum();
            if !self.may_admit_alone() && !(least..=most).contains(&used) {
                breaches.push(format!("{counter:?}: redis has {used} seats in use, streams have {least} to {most}"));
            }
        }
        breaches
    }

    /// Returns replicas that have slots of their own when all is quiet. One whose clock was set back has them for longer.
    pub(super) fn find_slots_of_replicas(&self) -> Vec<String> {
        if self.plan.faults.iter().any(|fault| matches!(fault.fault, Fault::ReplicaClockJumps(_, ..0))) {
            return Vec::new();
        }
        let replicas = self.fleet.running_replicas();
        let has_slots = replicas.iter().filter(|replica| replica.service.decider.store.has_fallback_slots());
        has_slots.map(|replica| format!("{} has slots of its own", replica.host)).collect()
    }

    fn counters(&self) -> impl Iterator<Item = CounterId> {
        self.rules.iter().enumerate().flat_map(|(rule, of)| (0..of.values).map(move |value| (rule, value)))
    }

    /// Requests on a counter.
    fn on(&self, counter: CounterId) -> impl Iterator<Item = &Attempt> {
        self.journal.attempts.iter().filter(move |one| one.plan.counters.contains(&counter))
    }

    /// Returns true if replicas may admit without Redis: after a fault, or when a script is sent for the first time.
    fn may_admit_alone(&self) -> bool {
        self.rules.iter().any(|rule| rule.on_store_error == StoreErrorPolicy::Local)
    }

    /// Losses of data. A clock that is set loses none: `max_duration` ends earlier or later.
    fn losses(&self) -> Vec<Loss> {
        let is_jump = |fault: &TimedFault| matches!(fault.fault, Fault::RedisClockJumps(_));
        let jumps_ms: Vec<u64> = self.plan.faults.iter().filter(|fault| is_jump(fault)).map(|one| one.at_ms).collect();
        self.fleet.losses.borrow().iter().filter(|loss| !jumps_ms.contains(&loss.from_ms)).copied().collect()
    }

    /// Time until which data was lost that had begun to be lost at a time, in milliseconds; 0: none was.
    fn last_loss_ms(&self, at_ms: u64) -> u64 {
        self.losses().iter().filter(|loss| loss.from_ms <= at_ms).map(|loss| loss.until_ms).max().unwrap_or(0)
    }

    fn limits_in_force(&self, rule: usize, from_ms: u64, until_ms: u64) -> (u64, u64) {
        self.plan.limits_in_force(rule, self.rules[rule].limit, from_ms, until_ms)
    }

    /// Returns true if a stream lives and must have its slot.
    fn has_slot(&self, one: &Attempt, at: Moment) -> bool {
        let envoy = &self.journal.envoys[one.envoy];
        let timeout_ms = self.plan.holder_timeout.1 * 1000;
        let is_given_away = self.plan.envoy.check_interval_ms.is_some()
            && envoy.silences_ms().any(|(from_ms, until_ms)| {
                let dead_ms = (from_ms + timeout_ms).saturating_sub(DRIFT_MS);
                one.sent.at_ms <= until_ms && dead_ms <= until_ms && dead_ms <= at.at_ms
            });
        let jumps = self.plan.faults.iter().filter(|fault| (one.sent.at_ms..=at.at_ms).contains(&fault.at_ms));
        let forwards_ms = jumps.map(|fault| match fault.fault {
            Fault::RedisClockJumps(by_ms) => u64::try_from(by_ms).unwrap_or(0),
            _ => 0,
        });
        let life_ms = one.plan.counters.iter().map(|(rule, _)| self.rules[*rule].max_duration_s * 1000).min();
        let age_ms = at.at_ms - one.sent.at_ms.min(at.at_ms) + DRIFT_MS + forwards_ms.sum::<u64>();
        one.outcome == Outcome::Admitted
            && one.answered.is_some_and(|answered| answered.order <= at.order)
            && one.ended.is_none_or(|ended| ended.order > at.order)
            && envoy.killed_ms.is_none_or(|killed_ms| killed_ms > at.at_ms)
            && !is_given_away
            && life_ms.is_some_and(|life_ms| age_ms < life_ms)
    }

    /// More streams than the limit when a request was admitted.
    fn find_excess(&self, admitted: &Attempt, counter: CounterId) -> Option<String> {
        if self.may_admit_alone() {
            return None;
        }
        let at = admitted.answered?;
        let lost_ms = self.last_loss_ms(at.at_ms);
        let live: Vec<&Attempt> = self.on(counter).filter(|one| self.has_slot(one, at)).collect();
        let largest_limit = |of: &[&Attempt]| {
            let span = |one: &&Attempt| (one.begun.at_ms, one.answered.map_or(at.at_ms, |answered| answered.at_ms));
            of.iter().map(span).map(|(from, until)| self.limits_in_force(counter.0, from, until).1).max().unwrap_or(0)
        };
        let seats = |of: &[&Attempt]| of.iter().map(|one| one.plan.hits).sum::<u64>();
        let first_ms = live.iter().map(|one| one.begun.at_ms).min().unwrap_or(0);
        let lasting = |loss: &&Loss| loss.from_ms <= at.at_ms && first_ms <= loss.until_ms;
        let losses = self.losses().iter().filter(lasting).count() as u64;
        let kept: Vec<&Attempt> =
            live.iter().copied().filter(|one| one.begun.at_ms > lost_ms || lost_ms == 0).collect();
        let before = kept.iter().copied().filter(|one| one.answered.is_some_and(|it| it.order < admitted.sent.order));
        let before: Vec<&Attempt> = before.collect();
        // A redirection has its slot already; a peek that fails is admitted.
        let is_failed_peek = admitted.plan.hits == 0 && self.plan.is_disturbed(admitted.sent.at_ms, at.at_ms);
        let own_limit = match admitted.is_redirection() || is_failed_peek {
            true => u64::MAX,
            false => self.limits_in_force(counter.0, admitted.sent.at_ms, at.at_ms).1,
        };
        let checks = [
            ("live", seats(&live), largest_limit(&live) * (1 + losses)),
            ("live, admitted after the last loss", seats(&kept), largest_limit(&kept)),
            ("live when it was sent, and its own", seats(&before) + admitted.plan.hits.max(1), own_limit),
        ];
        let (what, found, allowed) = checks.into_iter().find(|(_, found, allowed)| found > allowed)?;
        let of: Vec<String> = live.iter().map(|one| format!("{one:?}")).collect();
        Some(format!("{counter:?}: {found} seats {what}, at most {allowed}: {}", of.join("\n    ")))
    }

    /// A rejection although the limit cannot be full.
    fn find_needless_rejection(&self, rejected: &Attempt) -> Option<String> {
        let answered = rejected.answered?;
        let is_of_policy = self.rules.iter().any(|rule| rule.on_store_error != StoreErrorPolicy::Error);
        // The slot of a request that was redirected is its own.
        let is_same = |one: &&Attempt| {
            let is_same_stream = one.envoy == rejected.envoy && one.stream == rejected.stream;
            is_same_stream && (self.plan.envoy.names_streams || one.sent.order == rejected.sent.order)
        };
        if is_of_policy && !self.plan.faults.is_empty() {
            return None;
        }
        let mut told = Vec::new();
        for counter in &rejected.plan.counters {
            let (limit, _) = self.limits_in_force(counter.0, rejected.sent.at_ms, answered.at_ms);
            let may_hold = |one: &&Attempt| {
                let is_over = match self.is_released(one) {
                    true => one.released.is_some_and(|released| released.order < rejected.sent.order),
                    false => self.hold_ends_ms(one, counter.0).is_some_and(|ends_ms| ends_ms < rejected.sent.at_ms),
                };
                !is_same(one) && one.sent.order < answered.order && !is_over
            };
            let held: u64 = self.on(*counter).filter(may_hold).map(|one| one.plan.hits).sum();
            if held + rejected.plan.hits.max(1) > limit {
                return None;
            }
            told.push(format!("{counter:?}: at most {held} of {limit} seats are taken"));
        }
        Some(format!("{}: rejected: {rejected:?}", told.join(", ")))
    }

    /// Returns true if a release was answered, and no loss can have undone it.
    fn is_released(&self, one: &Attempt) -> bool {
        let undone = |loss: &Loss, released: Moment| {
            loss.from_ms <= released.at_ms && one.begun.at_ms <= loss.until_ms + LATE_MS
        };
        one.released.is_some_and(|released| !self.losses().iter().any(|loss| undone(loss, released)))
            && !(one.outcome == Outcome::Rejected && one.plan.counters.len() > 1)
            // Without a name, nothing frees the slot of a request without an answer.
            && (self.plan.envoy.names_streams || one.outcome == Outcome::Admitted)
    }

    /// Time until which a request may have a slot that nothing is known to have released, in milliseconds; 0: it never
    /// has one.
    fn hold_ends_ms(&self, one: &Attempt, rule: usize) -> Option<u64> {
        let answered_ms = one.answered.map(|answered| answered.at_ms);
        if let (Outcome::Rejected, Some(answered_ms), "-") = (one.outcome, answered_ms, &*one.release) {
            let until_ms = answered_ms + GIVEN_BACK_MS;
            match one.plan.counters.len() {
                1 => return Some(0),
                _ if !self.plan.is_disturbed(one.sent.at_ms, until_ms) => return Some(until_ms),
                _ => {}
            }
        }
        let late_ms = if self.plan.faults.is_empty() { 0 } else { LATE_MS };
        let life_ms = self.rules[rule].max_duration_s * 1000;
        let ends_ms = one.sent.at_ms + life_ms + WALK_MS + late_ms + self.plan.time_set_back_ms();
        let is_lost = self.losses().iter().any(|loss| one.begun.at_ms <= loss.until_ms + LATE_MS);
        let dead_ms = self.death_is_noticed_ms(one).filter(|_| !is_lost);
        Some(dead_ms.map_or(ends_ms, |dead_ms| dead_ms.min(ends_ms)))
    }

    /// Time at which all replicas know that the Envoy of a request is dead; `None`: they need not know it.
    fn death_is_noticed_ms(&self, one: &Attempt) -> Option<u64> {
        let envoy = &self.journal.envoys[one.envoy];
        let (killed_ms, timeout_ms) = (envoy.killed_ms?, self.plan.holder_timeout.1 * 1000);
        let interval_ms = self.plan.envoy.check_interval_ms.filter(|interval_ms| *interval_ms < timeout_ms)?;
        // Two checks, and an exchange between replicas.
        let known_ms = envoy.checks_ms.first()? + 3 * interval_ms + timeout_ms / 6 + 1000;
        let has_old_name =
            |fault: &TimedFault| matches!(fault.fault, Fault::ProxyIsKilled(_, false)) && fault.at_ms == killed_ms;
        if killed_ms < known_ms || self.plan.is_disturbed(0, known_ms) || self.plan.faults.iter().any(has_old_name) {
            return None;
        }
        let mut noticed_ms = killed_ms + timeout_ms + DEATH_IS_NOTICED_MS;
        let is_of_hosts = |fault: &&TimedFault| {
            !matches!(
                fault.fault,
                Fault::LimitChanges(..)
                    | Fault::ProxyIsKilled(..)
                    | Fault::ProxyStandsStill(_)
                    | Fault::ProxyIsCutOff(..)
            )
        };
        let mut faults: Vec<&TimedFault> = self.plan.faults.iter().filter(is_of_hosts).collect();
        faults.sort_by_key(|fault| fault.at_ms);
        for fault in faults {
            let end_ms = fault.end_ms() + RECOVERY_MS;
            if fault.at_ms <= noticed_ms && end_ms >= killed_ms.saturating_sub(timeout_ms) {
                noticed_ms = noticed_ms.max(end_ms + timeout_ms + DEATH_IS_NOTICED_MS);
            }
        }
        Some(noticed_ms)
    }

    /// Seats in use of a counter in Redis.
    fn seats_in_redis(&self, (rule, value): CounterId) -> u64 {
        let now_us = self.fleet.servers[0].clock.now().as_micros();
        let name = Bytes::from(format!("tk1:{{world|rule{rule}=value{value}}}:concurrent"));
        let server = self.fleet.servers[0].server.borrow();
        let entry = server.live_keys(now_us).into_iter().find(|(key, _)| **key == name).map(|(_, entry)| entry);
        let Some(Value::Hash(hash)) = entry.map(|entry| &entry.value) else { return 0 };
        let head = hash.get(&Bytes::new()).unwrap();
        u64::from_le_bytes(*head.first_chunk().unwrap())
    }
}
