//! Checks of a run of reservations, by what Envoys saw: docs/concurrency.md.
//!
//! A request that is admitted must fit beside what certainly counts: estimates of streams that go on, and true costs, or
//! estimates if they are lower, of those that ended. If a limit is never exhausted, its counter is the sum of all costs.

use tollkeeper::limit::algorithm::Algorithm;

use super::{LARGE_LIMIT, ReservationRule, ReservationsRun};
use crate::envoy::{Attempt, Journal, Outcome};
use crate::envoy_world::LATE_MS;
use crate::fleet::Fleet;

/// What clocks differ by in a run, and longest time of a call while nothing fails, in milliseconds.
const CLOSE_MS: u64 = 300;
/// Time for which settlements of a window are looked back at, in milliseconds.
const LOOK_BACK_MS: u64 = 25_000;

/// A counter: rule and value.
type CounterId = (usize, u64);

/// A run, as its judge sees it.
pub(super) struct Judge<'w> {
    pub(super) run: &'w ReservationsRun,
    pub(super) fleet: &'w Fleet,
    pub(super) journal: &'w Journal,
}

impl Judge<'_> {
    /// Returns what is broken, except for sums.
    pub(super) fn find_breaches(&self) -> Vec<String> {
        let check = |one: &Attempt| match one.outcome {
            Outcome::Admitted => one.plan.counters.iter().find_map(|of| self.find_excess(one, *of)),
            Outcome::Rejected => self.find_needless_rejection(one),
            Outcome::Failed | Outcome::Unknown => None,
        };
        self.journal.attempts.iter().filter_map(check).collect()
    }

    /// Requests on a counter.
    fn on(&self, counter: CounterId) -> impl Iterator<Item = &Attempt> {
        self.journal.attempts.iter().filter(move |one| one.plan.counters.contains(&counter))
    }

    fn rule_of(&self, counter: CounterId) -> &ReservationRule {
        &self.run.rules[counter.0]
    }

    /// Returns true if the Envoy of a request may have been taken for dead until a time.
    fn may_be_dead(&self, one: &Attempt, until_ms: u64) -> bool {
        let envoy = &self.journal.envoys[one.envoy];
        let timeout_ms = self.run.plan.holder_timeout.1 * 1000;
        let is_silent = |(from_ms, to_ms): (u64, u64)| to_ms.saturating_sub(from_ms) + CLOSE_MS >= timeout_ms;
        envoy.killed_ms.is_some_and(|killed_ms| killed_ms <= until_ms) || envoy.silences_ms().any(is_silent)
    }

    /// Hits of a request that certainly count when another one is decided.
    fn certain_hits(&self, one: &Attempt, rule: &ReservationRule, other: &Attempt) -> u64 {
        let Some(decided) = other.answered else { return 0 };
        let is_before = one.answered.is_some_and(|answered| answered.order < other.sent.order);
        // A redirection charges nothing, unless the first request was settled before.
        if one.outcome != Outcome::Admitted || !is_before || one.is_redirection() {
            return 0;
        }
        let estimate = rule.estimate_of(one.plan.hits);
        let may_be_over = one.sent.at_ms + rule.settle_within_s * 1000 <= decided.at_ms + CLOSE_MS;
        match one.ended {
            _ if rule.returns_unsettled && (may_be_over || self.may_be_dead(one, decided.at_ms)) => 0,
            Some(ended) if ended.order < decided.order => estimate.min(one.plan.cost),
            _ => estimate,
        }
    }

    /// A request that was admitted although it does not fit.
    fn find_excess(&self, admitted: &Attempt, counter: CounterId) -> Option<String> {
        let rule = self.rule_of(counter);
        let decided = admitted.answered?;
        if admitted.is_redirection() {
            return None;
        }
        let losses = self.fleet.losses.borrow();
        let lost_ms = losses.iter().filter(|loss| loss.from_ms <= decided.at_ms).map(|loss| loss.until_ms).max();
        let (own, period_us) = (rule.estimate_of(admitted.plan.hits), rule.period_s * 1_000_000);
        let is_counted = |one: &&Attempt| match rule.algorithm {
            Algorithm::SlidingWindowLog => decided.redis_us < one.sent.redis_us + period_us,
            Algorithm::TokenBucket => true,
            _ => one.sent.redis_us / period_us == decided.redis_us / period_us,
        };
        let kept = self.on(counter).filter(|one| lost_ms.is_none_or(|lost_ms| one.sent.at_ms > lost_ms));
        let before: Vec<&Attempt> = kept.filter(is_counted).collect();
        // A log forgets what exceeds its limit.
        let forgotten: u64 = match rule.algorithm {
            Algorithm::SlidingWindowLog => {
                self.on(counter).map(|one| one.plan.cost.saturating_sub(rule.estimate_of(one.plan.hits))).sum()
            }
            _ => 0,
        };
        let mut hits = own;
        for one in before.iter().rev() {
            hits += self.certain_hits(one, rule, admitted);
            let (_, limit) = self.run.plan.limits_in_force(counter.0, rule.limit, one.sent.at_ms, decided.at_ms);
            let allowed = match rule.algorithm {
                Algorithm::TokenBucket => {
                    rule.size + (decided.redis_us.saturating_sub(one.sent.redis_us) * limit).div_ceil(period_us)
                }
                _ => limit + forgotten,
            };
            if hits > allowed {
                return Some(format!(
                    "{counter:?}: {hits} hits count, at most {allowed}: from {one:?} to {admitted:?}"
                ));
            }
        }
        None
    }

    /// A request that was rejected although it fits into its fixed window whatever counts.
    fn find_needless_rejection(&self, rejected: &Attempt) -> Option<String> {
        let answered = rejected.answered?;
        let plan = &self.run.plan;
        if plan.is_disturbed(rejected.sent.at_ms.saturating_sub(LOOK_BACK_MS), answered.at_ms) {
            return None;
        }
        let mut told = Vec::new();
        for counter in &rejected.plan.counters {
            let rule = self.rule_of(*counter);
            let window = |us: u64| us / (rule.period_s * 1_000_000);
            let own = window(rejected.sent.redis_us);
            if rule.algorithm != Algorithm::FixedWindow || own != window(answered.redis_us) {
                return None;
            }
            let counts = |one: &&Attempt| {
                let charged_last = one.answered.map_or(u64::MAX, |answered| window(answered.redis_us));
                let settled = one.release_sent.is_some_and(|at| window(at.redis_us) <= own)
                    && one.released.is_none_or(|at| window(at.redis_us) >= own);
                one.sent.order < answered.order
                    && one.sent.order != rejected.sent.order
                    && (window(one.sent.redis_us) <= own && own <= charged_last || settled)
            };
            let most: u64 = self.on(*counter).filter(counts).map(|one| self.most_hits(one, *counter, rejected)).sum();
            let (limit, _) = plan.limits_in_force(counter.0, rule.limit, rejected.sent.at_ms, answered.at_ms);
            if most + rule.estimate_of(rejected.plan.hits) > limit {
                return None;
            }
            told.push(format!("{counter:?}: at most {most} of {limit} hits count"));
        }
        Some(format!("{}: rejected: {rejected:?}", told.join(", ")))
    }

    /// Most hits of a request that count when another one is decided.
    fn most_hits(&self, one: &Attempt, counter: CounterId, other: &Attempt) -> u64 {
        let rule = self.rule_of(counter);
        let estimate = rule.estimate_of(one.plan.hits);
        let is_settled = one.released.is_some_and(|released| released.order < other.sent.order);
        let in_time = one.released.is_some_and(|at| at.at_ms + CLOSE_MS < one.sent.at_ms + rule.settle_within_s * 1000);
        let same_window = |us: u64| us / (rule.period_s * 1_000_000) == one.sent.redis_us / (rule.period_s * 1_000_000);
        match one.outcome {
            Outcome::Rejected if one.release == "-" && one.plan.counters.len() == 1 => 0,
            _ if is_settled && in_time && one.released.is_some_and(|at| same_window(at.redis_us)) => one.plan.cost,
            _ if self.may_be_forgotten(one, counter) => estimate + one.plan.cost,
            _ => estimate.max(one.plan.cost),
        }
    }

    /// Says how the sum of a counter that forgets nothing differs from what was settled.
    pub(super) fn find_wrong_sum(&self, counter: CounterId, used: u64) -> Option<String> {
        if !self.fleet.losses.borrow().is_empty() {
            return None;
        }
        let (mut least, mut most) = (0, 0);
        for one in self.on(counter) {
            let (of_least, of_most) = self.charged_hits(one, counter);
            (least, most) = (least + of_least, most + of_most);
        }
        assert!(most < LARGE_LIMIT, "the limit is large enough");
        let is_wrong = !(least..=most).contains(&used);
        is_wrong.then(|| format!("{counter:?}: {used} hits are charged, {least} to {most} were settled"))
    }

    /// Least and most hits that a request leaves charged when all is quiet.
    fn charged_hits(&self, one: &Attempt, counter: CounterId) -> (u64, u64) {
        let rule = self.rule_of(counter);
        let (estimate, cost) = (rule.estimate_of(one.plan.hits), one.plan.cost);
        if let (Outcome::Rejected, "-") = (one.outcome, &*one.release) {
            return (0, 0);
        }
        // A settlement without an answer is remembered for 15 s; one that is repeated longer may count twice.
        let is_repeated = one.release == "?"
            && one
                .release_sent
                .zip(one.released)
                .is_none_or(|(sent, at)| self.run.plan.is_disturbed(sent.at_ms, at.at_ms + LATE_MS));
        let end_ms = one.sent.at_ms + rule.settle_within_s * 1000;
        let is_late = one.released.is_none_or(|at| at.at_ms + CLOSE_MS >= end_ms);
        let counts_twice = self.may_be_forgotten(one, counter) || is_repeated && is_late;
        let most = if counts_twice { estimate + cost } else { estimate.max(cost) };
        let least = if rule.returns_unsettled { 0 } else { estimate.min(cost) };
        let Some((sent, released)) = one.release_sent.zip(one.released) else { return (0, most.max(2 * cost)) };
        if !self.run.plan.envoy.names_streams && one.outcome != Outcome::Admitted {
            return (0, most);
        }
        match one.is_redirection() || self.is_redirected(one) {
            // The first settlement counts, unless the second request renewed the reservation before.
            true => (0, most),
            false if is_repeated => (least, most.max(2 * cost)),
            false if self.may_be_dead(one, released.at_ms) => (least, most),
            false if !is_late => (cost, cost),
            false if sent.at_ms > end_ms + CLOSE_MS && one.outcome == Outcome::Admitted => match rule.returns_unsettled
            {
                true => (0, estimate),
                false => (estimate, estimate),
            },
            false => (least, most),
        }
    }

    /// Returns true if Redis may have forgotten a reservation when it was settled without an answer: the cost is charged
    /// beside the estimate. Those that are over are kept while others are written in time: no walk removes them without
    /// giving back what they charged.
    fn may_be_forgotten(&self, one: &Attempt, counter: CounterId) -> bool {
        let rule = self.rule_of(counter);
        let kept_ms = rule.settle_within_s * 1000 + if rule.returns_unsettled { rule.period_s * 1000 } else { 0 };
        // What was certainly written: the latest time of it, and the time until which it keeps all reservations.
        let reserved = self.on(counter).filter(|other| other.outcome == Outcome::Admitted);
        let reserved = reserved.filter_map(|other| Some((other.answered?.at_ms, other.sent.at_ms + kept_ms)));
        let unanswered = self.on(counter).filter(|other| other.release == "?");
        let unanswered =
            unanswered.filter_map(|other| Some((other.released?.at_ms, other.release_sent?.at_ms + LATE_MS)));
        let mut writes: Vec<(u64, u64)> = reserved.chain(unanswered).collect();
        writes.sort_unstable();
        let kept_until_ms = writes.iter().fold(one.sent.at_ms + kept_ms, |kept_until_ms, (written_ms, until_ms)| {
            if *written_ms <= kept_until_ms { kept_until_ms.max(*until_ms) } else { kept_until_ms }
        });
        self.run.plan.envoy.names_streams
            && one.release == "?"
            && one.released.is_none_or(|released| kept_until_ms < released.at_ms)
    }

    fn is_redirected(&self, first: &Attempt) -> bool {
        let is_second = |one: &Attempt| one.is_redirection() && one.begun.order == first.begun.order;
        self.journal.attempts.iter().any(is_second)
    }
}
