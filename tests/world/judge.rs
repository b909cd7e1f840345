//! Checks of a run: each admitted hit against what the page of its algorithm promises, counted independently.
//!
//! A call is known by two times of Redis's clock, when it was sent and when it was answered; its charge was made
//! between. So hits of which the first was sent at `a` and the last answered at `b` were admitted within `b - a`, at most.
//! A bound that they break is broken whatever happened between.

use std::collections::BTreeMap;

use tollkeeper::limit::algorithm::Algorithm;

use super::plan::{Consistency, RulePlan, StoreErrorPolicy};

/// A call and its answer.
#[derive(Clone, Copy, Debug)]
pub struct CallRecord {
    /// Index of the rule.
    pub rule: usize,
    /// Number of the value.
    pub value: u64,
    /// Hits; 0: a peek.
    pub hits: u64,
    /// Deadline of the caller in milliseconds.
    pub deadline_ms: u64,
    /// Time of the run when it was sent, in milliseconds.
    pub sent_ms: u64,
    /// Time of the run when it was answered, in milliseconds.
    pub answered_ms: u64,
    /// Time of Redis when it was sent, in microseconds.
    pub redis_sent_us: u64,
    /// Time of Redis when it was answered, in microseconds.
    pub redis_answered_us: u64,
    /// Its answer.
    pub verdict: Verdict,
}

/// Answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Admitted.
    Ok,
    /// Rejected.
    OverLimit,
    /// No decision, because the store failed.
    Failed,
}

/// Something that lets more hits pass than the limit, because counters were lost or time was set.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// Time of the run at which it began, in milliseconds.
    pub from_ms: u64,
    /// Time of the run at which it was over, in milliseconds.
    pub until_ms: u64,
    /// Rule that it concerns; `None`: all.
    pub rule: Option<usize>,
}

/// A limit that was in force.
#[derive(Clone, Copy, Debug)]
pub struct LimitChange {
    /// Index of the rule.
    pub rule: usize,
    /// Time of the run from which it may have been in force, in milliseconds.
    pub from_ms: u64,
    /// Hits in a period.
    pub limit: u64,
}

/// What a run told.
#[derive(Debug, Default)]
pub struct Report {
    /// All calls.
    pub calls: Vec<CallRecord>,
    /// What was lost.
    pub losses: Vec<Loss>,
    /// Limits that operators set.
    pub changes: Vec<LimitChange>,
    /// The promise is that of a period that is shorter by so much, in microseconds.
    pub shorter_us: u64,
    /// What was sent may run later by so much after its caller was told that it failed, in microseconds.
    pub held_back_us: u64,
    /// No clock of a Redis jumped.
    pub has_steady_clocks: bool,
    /// Shares of `on_store_error: local` that processes use in a period, if all know the number of replicas.
    pub local_shares: Option<u64>,
}

/// A bound on the hits that are admitted in any span: `burst` at once, and `rate` of them in a time `per_us`.
#[derive(Clone, Copy, Debug)]
struct Bound {
    burst: u64,
    /// Hits that are added in `per_us`.
    rate: u64,
    per_us: u64,
    /// Longest span that the bound holds for; `None`: any.
    within_us: Option<u64>,
}

impl Bound {
    /// Hits that may be admitted in a span.
    fn hits_in(self, span_us: u64) -> u64 {
        let added = u128::from(self.rate) * u128::from(span_us) / u128::from(self.per_us);
        self.burst.saturating_add(u64::try_from(added).unwrap_or(u64::MAX))
    }
}

/// Bounds of a rule with this limit, from the table of docs/algorithms.md, and docs/eventual.md.
fn bounds_of(rule: &RulePlan, limit: u64) -> Vec<Bound> {
    let per_us = rule.period_s * 1_000_000;
    let extra = match rule.consistency {
        Consistency::Strict => 0,
        Consistency::Eventual(percent) | Consistency::Global(percent) => limit * percent / 100,
    };
    let extra = extra + rule.credits.unwrap_or(0);
    let in_period = |burst| Bound { burst: burst + extra, rate: 0, per_us, within_us: Some(per_us) };
    match rule.algorithm {
        // The bucket, and what refills. Eventual: in any period.
        Algorithm::TokenBucket if matches!(rule.consistency, Consistency::Strict) => {
            vec![Bound { burst: rule.size + extra, rate: limit, per_us, within_us: None }]
        }
        Algorithm::TokenBucket => vec![in_period(rule.size + limit)],
        Algorithm::LeakyBucket => vec![Bound { burst: rule.size + extra, rate: limit, per_us, within_us: None }],
        Algorithm::SlidingWindowLog => vec![in_period(limit)],
        Algorithm::FixedWindow | Algorithm::SlidingWindowCounter => vec![in_period(2 * limit)],
        Algorithm::Concurrent => panic!("no run has concurrent limits"),
    }
}

/// Checks a run; returns what is broken.
pub fn find_breaches(rules: &[RulePlan], replicas: u64, report: &Report) -> Vec<String> {
    let mut breaches = Vec::new();
    let mut by_counter: BTreeMap<(usize, u64), Vec<&CallRecord>> = BTreeMap::new();
    for call in &report.calls {
        let took_ms = call.answered_ms - call.sent_ms;
        // A timer of tokio fires in the millisecond after its time. The process of a call without an answer was killed.
        if call.answered_ms < u64::MAX && took_ms > call.deadline_ms + 1 {
            breaches.push(format!("answered {took_ms} ms after the call, beyond its deadline: {call:?}"));
        }
        by_counter.entry((call.rule, call.value)).or_default().push(call);
    }
    for ((index, value), calls) in by_counter {
        if let Some(rejected) =
            rules[index].credits.and_then(|credits| find_early_rejection(credits, &calls, report, rules))
        {
            breaches
                .push(format!("rule {index}, value {value}: rejected before both limits were used up: {rejected:?}"));
        }
        let mut admitted: Vec<&CallRecord> =
            calls.into_iter().filter(|call| call.verdict == Verdict::Ok && call.hits > 0).collect();
        admitted.sort_by_key(|call| (call.answered_ms, call.sent_ms));
        let counter = CounterCheck { rules, index, replicas, report, admitted: &admitted };
        if let Some(breach) = counter.find_breach() {
            breaches.push(format!("rule {index}, value {value}: {breach}"));
        }
    }
    breaches
}

/// A rejection although all hits of its counter that were ever charged, with its own, would fit into the limit and its
/// credits.
fn find_early_rejection<'c>(
    credits: u64,
    calls: &[&'c CallRecord],
    report: &Report,
    rules: &[RulePlan],
) -> Option<&'c CallRecord> {
    let smallest = |index: usize| {
        let changes = report.changes.iter().filter(|change| change.rule == index).map(|change| change.limit);
        // A change of the limit leaves a bucket its size.
        changes.fold(rules[index].capacity().min(rules[index].limit), u64::min)
    };
    let is_early = |rejected: &&&CallRecord| {
        let may_be_charged =
            |call: &&&CallRecord| call.verdict != Verdict::OverLimit && call.sent_ms <= rejected.answered_ms;
        let charged: u64 = calls.iter().filter(may_be_charged).map(|call| call.hits).sum();
        rejected.verdict == Verdict::OverLimit && charged + rejected.hits.max(1) <= smallest(rejected.rule) + credits
    };
    calls.iter().find(is_early).copied()
}

/// Time for which a lease is used and recorded at most, in milliseconds: docs/eventual.md.
const MAX_LEASE_MS: u64 = 1200;

/// The admitted calls of one counter.
struct CounterCheck<'r> {
    rules: &'r [RulePlan],
    index: usize,
    replicas: u64,
    report: &'r Report,
    admitted: &'r [&'r CallRecord],
}

impl CounterCheck<'_> {
    fn rule(&self) -> &RulePlan {
        &self.rules[self.index]
    }

    /// Largest limit that was in force in a span, with one period before it, whose hits count on.
    fn largest_limit(&self, from_ms: u64, until_ms: u64) -> u64 {
        let from_ms = from_ms.saturating_sub(self.rule().period_s * 1000);
        let mut in_force = self.rule().limit;
        let mut largest = 0;
        for change in self.report.changes.iter().filter(|change| change.rule == self.index) {
            if change.from_ms > from_ms {
                largest = largest.max(in_force);
            }
            if change.from_ms > until_ms {
                break;
            }
            in_force = change.limit;
        }
        largest.max(in_force)
    }

    /// Number of losses that may have happened in a span.
    fn losses(&self, from_ms: u64, until_ms: u64) -> u64 {
        // Leases and grants of before the loss are used on, and no counter has their hits.
        let used_on_ms = match self.rule().consistency {
            Consistency::Strict => 0,
            Consistency::Eventual(_) => MAX_LEASE_MS,
            Consistency::Global(_) => self.rule().period_s * 1000,
        };
        let concerns = |loss: &&Loss| {
            loss.rule.is_none_or(|rule| rule == self.index)
                && loss.from_ms <= until_ms
                && from_ms <= loss.until_ms + used_on_ms
        };
        self.report.losses.iter().filter(concerns).count() as u64
    }

    /// Hits that policies may admit beyond the limit in a span.
    fn hits_of_policy(&self, limit: u64, span_us: u64) -> u64 {
        let is_global = matches!(self.rule().consistency, Consistency::Global(_));
        // Of a global limit it is a part of the overshoot.
        if self.rule().on_store_error != StoreErrorPolicy::Local || is_global {
            return 0;
        }
        // The shares of all replicas are the limit, in a window of their own. A number of replicas that is counted lags.
        let periods = span_us / (self.rule().period_s * 1_000_000) + 2;
        let most = limit.max(self.rule().capacity());
        match self.report.local_shares {
            Some(shares) => most.div_ceil(self.replicas) * periods * shares,
            None => (most + self.replicas) * periods * self.replicas,
        }
    }

    fn find_breach(&self) -> Option<String> {
        for (start, first) in self.admitted.iter().enumerate() {
            let mut hits = 0;
            for (end, last) in self.admitted.iter().enumerate() {
                // Calls sent before the first one are in no span that begins with it.
                if last.sent_ms < first.sent_ms || end < start && last.answered_ms < first.answered_ms {
                    continue;
                }
                hits += last.hits;
                if let Some(breach) = self.breach_of_span(first, last, hits) {
                    return Some(breach);
                }
            }
        }
        None
    }

    /// Says how `hits` that were admitted from the sending of `first` to the answer of `last` break a bound.
    fn breach_of_span(&self, first: &CallRecord, last: &CallRecord, hits: u64) -> Option<String> {
        let limit = self.largest_limit(first.sent_ms, last.answered_ms);
        let losses = self.losses(first.sent_ms, last.answered_ms);
        let real_us = (last.answered_ms - first.sent_ms) * 1000;
        // The clock of Redis tells the span, unless it jumps.
        let span_us = match losses == 0 && self.report.has_steady_clocks {
            true => last.redis_answered_us - first.redis_sent_us,
            false => real_us + real_us / 1000 + 1000,
        };
        for bound in bounds_of(self.rule(), limit) {
            if bound.within_us.is_some_and(|within_us| span_us + self.report.shorter_us >= within_us) {
                continue;
            }
            let allowed = bound.hits_in(span_us) * (1 + losses) + self.hits_of_policy(limit, real_us);
            if hits > allowed {
                return Some(format!(
                    "{hits} hits in {span_us} us, at most {allowed} are promised ({losses} losses, limit {limit}): from \
                     {first:?} to {last:?}"
                ));
            }
        }
        self.breach_of_window(first, last, (hits, limit)).filter(|_| losses == 0)
    }

    /// Says how `hits` of calls in one window break its limit.
    fn breach_of_window(&self, first: &CallRecord, last: &CallRecord, (hits, limit): (u64, u64)) -> Option<String> {
        let rule = self.rule();
        let limit = match rule.consistency {
            Consistency::Strict if rule.on_store_error != StoreErrorPolicy::Local => limit + rule.credits.unwrap_or(0),
            // Leases end with their window.
            Consistency::Eventual(percent) if rule.on_store_error != StoreErrorPolicy::Local => {
                limit + limit * percent / 100
            }
            // Each region has windows of its own.
            _ => return None,
        };
        let window = |us: u64| us / (rule.period_s * 1_000_000);
        let (from_us, until_us) = (first.redis_sent_us, last.redis_answered_us);
        let is_broken = rule.algorithm == Algorithm::FixedWindow && window(from_us) == window(until_us) && hits > limit;
        is_broken.then(|| format!("{hits} hits in one window of {limit}: from {first:?} to {last:?}"))
    }
}

/// Hits that a counter has left when all is quiet.
#[derive(Clone, Copy, Debug)]
pub struct CounterLevel {
    /// Index of the rule.
    pub rule: usize,
    /// Number of the value.
    pub value: u64,
    /// Hits that are left.
    pub remaining: u64,
    /// The limit in force.
    pub limit: u64,
    /// Time of Redis before it was asked, in microseconds.
    pub redis_before_us: u64,
    /// Time of Redis after it was asked, in microseconds.
    pub redis_after_us: u64,
}

impl CounterLevel {
    /// Says how the counter differs from what callers were told: it counts the admitted hits of its window or log, and
    /// beside them at most those of calls whose outcome is not known.
    pub fn find_breach(&self, rules: &[RulePlan], report: &Report) -> Option<String> {
        let rule = &rules[self.rule];
        let period_us = rule.period_s * 1_000_000;
        let concerns = |loss: &Loss| loss.rule.is_none_or(|rule| rule == self.rule);
        let is_exact = rule.consistency == Consistency::Strict
            && rule.on_store_error != StoreErrorPolicy::Local
            && rule.credits.is_none();
        if !is_exact || report.losses.iter().any(concerns) {
            return None;
        }
        // Where hits begin to count: surely, and at the earliest.
        let (surely_from_us, maybe_from_us) = match rule.algorithm {
            Algorithm::FixedWindow => {
                let window = |us: u64| us / period_us * period_us;
                (window(self.redis_after_us), window(self.redis_before_us))
            }
            Algorithm::SlidingWindowLog => (self.redis_after_us - period_us, self.redis_before_us - period_us),
            _ => return None,
        };
        let of_counter = || report.calls.iter().filter(|call| (call.rule, call.value) == (self.rule, self.value));
        let admitted = |call: &&CallRecord| call.verdict == Verdict::Ok;
        // A charge that fails may have been made; `deny` answers it with a rejection.
        let counts_rejected = rule.algorithm == Algorithm::FixedWindow || rule.on_store_error == StoreErrorPolicy::Deny;
        let may_count = |call: &&CallRecord| {
            let is_charged = call.verdict != Verdict::OverLimit || counts_rejected;
            let is_known = match call.verdict {
                Verdict::Ok => true,
                Verdict::OverLimit => rule.on_store_error != StoreErrorPolicy::Deny,
                _ => false,
            };
            let held_back_us = if is_known { 0 } else { report.held_back_us };
            is_charged && call.redis_answered_us.saturating_add(held_back_us) >= maybe_from_us
        };
        let surely: u64 = of_counter()
            .filter(admitted)
            .filter(|call| call.redis_sent_us > surely_from_us)
            .map(|call| call.hits)
            .sum();
        let maybe: u64 = of_counter().filter(may_count).map(|call| call.hits).sum();
        let used = self.limit - self.remaining.min(self.limit);
        let is_right = used >= surely.min(self.limit) && used <= maybe;
        (!is_right).then(|| format!("the counter has {used} hits, callers know of {surely} to {maybe}: {self:?}"))
    }
}
