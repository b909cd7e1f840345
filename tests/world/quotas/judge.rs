//! Checks of a run of quotas: each admitted hit against what docs/quota.md promises, counted independently.
//!
//! Counted are hits that assignments admitted, and those of calls over RLS. Hits before a bucket's first assignment, and
//! after its last one ended, are those that the page excludes. A limit that became smaller is in force once assignments of
//! the former one have ended.

use std::collections::{BTreeMap, VecDeque};

use tollkeeper::limit::algorithm::Algorithm;

use super::super::judge::{LimitChange, Loss};
use super::super::plan::{Fault, RulePlan, StoreErrorPolicy, TimedFault};
use super::plan::{Demand, QuotaPlan, SETTLE_MS};
use super::proxy::{Basis, BucketName, Decision};

/// Longest time for which an assignment is in use after it was sent, in milliseconds: 60 s, begun 10 s late, and margins.
const ASSIGNMENT_MS: u64 = 75_000;
/// Standstill of a proxy from which on its part may pass once more, in milliseconds.
const LONG_STANDSTILL_MS: u64 = 10_000;
/// Longest time in which a full limit is there again for limits that are assigned as a rate, in milliseconds.
const MAX_RATE_REFILL_MS: u64 = 20_000;
/// Time in which demand is learned, in milliseconds.
const LEARN_MS: u64 = 15_000;
/// Pause between requests within which a bucket is surely not abandoned, in milliseconds.
const MAX_PAUSE_MS: u64 = 30_000;
/// Hits of a limit that are enough to judge what of it is used: a part of fewer is chance.
const MIN_JUDGED_HITS: u64 = 100;
/// Drift of clocks, in parts per million.
const DRIFT_PPM: u64 = 500;
const MILLION: u64 = 1_000_000;

/// A hit that was admitted, between two times of the run and of Redis's clock.
#[derive(Clone, Copy, Debug)]
pub struct Hits {
    /// Its bucket.
    pub name: BucketName,
    /// Earliest time of the run, in milliseconds.
    pub from_ms: u64,
    /// Latest time of the run, in milliseconds.
    pub until_ms: u64,
    /// Earliest time of Redis, in microseconds.
    pub redis_from_us: u64,
    /// Latest time of Redis, in microseconds.
    pub redis_until_us: u64,
    /// A proxy admitted it, not a call over RLS.
    pub by_proxy: bool,
}

impl Hits {
    /// A hit of a proxy, whose time is known.
    pub const fn of_proxy_at(name: BucketName, at_ms: u64, redis_us: u64) -> Self {
        let (from_ms, until_ms, redis_from_us, redis_until_us) = (at_ms, at_ms, redis_us, redis_us);
        Self { name, from_ms, until_ms, redis_from_us, redis_until_us, by_proxy: true }
    }
}

/// A request that was decided.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Its bucket.
    pub name: BucketName,
    /// Time of the run in milliseconds.
    pub at_ms: u64,
    /// Time of Redis in microseconds.
    pub redis_us: u64,
}

/// Decisions of one bucket of one proxy.
#[derive(Clone, Copy, Debug)]
pub struct BucketRecord {
    first_ms: u64,
    last_ms: u64,
    requests: u64,
    admitted: u64,
    /// Hits that passed without an assignment.
    admitted_unassigned: u64,
    /// Decisions after an assignment had ended.
    ended: u64,
    /// Time since when it has no assignment, and the longest time without one, in milliseconds.
    unassigned_since: Option<u64>,
    longest_unassigned_ms: u64,
}

impl BucketRecord {
    /// A bucket whose first request comes now.
    pub const fn new(now_ms: u64) -> Self {
        Self {
            first_ms: now_ms,
            last_ms: now_ms,
            requests: 0,
            admitted: 0,
            admitted_unassigned: 0,
            ended: 0,
            unassigned_since: None,
            longest_unassigned_ms: 0,
        }
    }

    /// Records a decision.
    pub fn record(&mut self, decision: Decision, now_ms: u64) {
        self.requests += 1;
        // After a long pause the bucket may be a new one.
        if now_ms - std::mem::replace(&mut self.last_ms, now_ms) > MAX_PAUSE_MS {
            self.unassigned_since = None;
        }
        match decision.basis {
            Basis::Assignment => {
                self.admitted += u64::from(decision.passes);
                self.unassigned_since = None;
            }
            Basis::None => {
                self.admitted_unassigned += u64::from(decision.passes);
                let since = *self.unassigned_since.get_or_insert(now_ms);
                self.longest_unassigned_ms = self.longest_unassigned_ms.max(now_ms - since);
            }
            Basis::Ended => self.ended += 1,
        }
    }
}

/// What a run told.
#[derive(Debug, Default)]
pub struct QuotaReport {
    /// Number of requests that were decided.
    pub requests: usize,
    /// All of these.
    pub asked: Vec<Request>,
    /// Hits that assignments or calls admitted.
    pub admitted: Vec<Hits>,
    /// Buckets, by their proxy.
    pub buckets: BTreeMap<(usize, BucketName), BucketRecord>,
    /// What Redis lost.
    pub losses: Vec<Loss>,
    /// Limits that operators set.
    pub changes: Vec<LimitChange>,
}

/// Checks a run; returns what is broken.
pub fn find_breaches(plan: &QuotaPlan, report: &QuotaReport) -> Vec<String> {
    let mut breaches = Vec::new();
    let mut by_name: BTreeMap<BucketName, Vec<&Hits>> = BTreeMap::new();
    for hit in &report.admitted {
        by_name.entry(hit.name).or_default().push(hit);
    }
    let exclusions = exclusions_of(plan, report);
    for (name, mut admitted) in by_name {
        admitted.sort_by_key(|hit| hit.until_ms);
        let counter = CounterCheck { plan, report, rule: &plan.rules[name.0], index: name.0, exclusions: &exclusions };
        let found = [counter.find_breach_of_meter(&admitted), counter.find_breach_of_window(&admitted)];
        breaches.extend(found.into_iter().flatten().map(|breach| format!("{name:?}: {breach}")));
    }
    if plan.faults.is_empty() {
        breaches.extend(find_idle_limits(plan, report));
        breaches.extend(report.buckets.iter().filter_map(|((proxy, name), bucket)| {
            // Calls over RLS take each hit of a full limit as it becomes free: proxies cannot have got those.
            let is_of_others =
                |hit: &&Hits| hit.by_proxy && hit.name == *name && hit.from_ms > bucket.first_ms + LEARN_MS;
            let admitted_later = report.admitted.iter().filter(is_of_others).count() as u64;
            let neglect = find_neglect(plan, &plan.rules[name.0], bucket, admitted_later)?;
            Some(format!("proxy {proxy}, {name:?}: {neglect}"))
        }));
    }
    breaches
}

/// What lets more pass, and until when: each lets the limit pass once more.
fn exclusions_of(plan: &QuotaPlan, report: &QuotaReport) -> Vec<Loss> {
    let mut exclusions: Vec<Loss> = Vec::new();
    // Counters begin anew, beside what proxies still have.
    exclusions.extend(report.losses.iter().map(|loss| Loss { until_ms: loss.until_ms + ASSIGNMENT_MS, ..*loss }));
    exclusions.extend(plan.rules.iter().enumerate().flat_map(|(index, rule)| changes_of_form(rule, index, report)));
    for timed in &plan.faults {
        let (from_ms, until_ms) = (timed.at_ms, timed.end_ms() + ASSIGNMENT_MS);
        match timed.fault {
            // Beyond the drift of clocks that is promised.
            Fault::ReplicaClockJumps(..) => exclusions.push(Loss { from_ms, until_ms: u64::MAX, rule: None }),
            Fault::ProxyStandsStill(_) if timed.for_ms > LONG_STANDSTILL_MS => {
                exclusions.push(Loss { from_ms, until_ms, rule: None });
            }
            _ if fails_the_store(timed) => {
                let rules = plan.rules.iter().enumerate();
                let local = rules.filter(|(_, rule)| rule.on_store_error == StoreErrorPolicy::Local);
                // Each replica divides its share, of a number of replicas that may be known late.
                for (rule, _) in local {
                    let share = Loss { from_ms, until_ms, rule: Some(rule) };
                    exclusions.extend(std::iter::repeat_n(share, plan.fleet.replicas));
                }
            }
            _ => {}
        }
    }
    exclusions
}

/// Changes of a limit from a rate to lent hits, or back: its counter begins anew.
fn changes_of_form(rule: &RulePlan, index: usize, report: &QuotaReport) -> Vec<Loss> {
    let is_rate = |limit: u64| {
        let capacity = if rule.algorithm == Algorithm::TokenBucket { rule.size } else { limit };
        rule.period_s * 1000 * capacity < MAX_RATE_REFILL_MS * limit
    };
    let mut before = rule.limit;
    let of_rule = report.changes.iter().filter(|change| change.rule == index);
    let others =
        of_rule.filter(|change| is_rate(std::mem::replace(&mut before, change.limit)) != is_rate(change.limit));
    let anew = |change: &LimitChange| Loss {
        from_ms: change.from_ms,
        until_ms: change.from_ms + ASSIGNMENT_MS + rule.period_s * 1000,
        rule: Some(index),
    };
    others.map(anew).collect()
}

const fn fails_the_store(timed: &TimedFault) -> bool {
    match timed.fault {
        Fault::RedisFrozen
        | Fault::RedisRestarts
        | Fault::RedisLosesData
        | Fault::RedisRestoresSnapshot(_)
        | Fault::RedisFailsOver(_)
        | Fault::RedisRefuses(_)
        | Fault::ScriptsAreSlow(_)
        | Fault::ScriptsAreForgotten
        | Fault::RedisClockJumps(_)
        | Fault::LinkIsCut(..)
        | Fault::LinkIsSlow(..)
        | Fault::ConnectionsAreReset(_)
        | Fault::ReplicaStandsStill(_) => true,
        Fault::KeyIsEvicted
        | Fault::ReplicaClockJumps(..)
        | Fault::ReplicaIsKilled(_)
        | Fault::ReplicaStops(_)
        | Fault::LimitChanges(..)
        | Fault::CountersAreReset(_)
        | Fault::ProxyIsKilled(..)
        | Fault::ProxyStandsStill(_)
        | Fault::ProxyIsCutOff(..)
        | Fault::ProxyLinkIsCut(..)
        | Fault::ProxyLinkIsSlow(..)
        | Fault::ProxyStreamIsReset(_) => false,
    }
}

/// One counter, and what is promised of it.
struct CounterCheck<'r> {
    plan: &'r QuotaPlan,
    report: &'r QuotaReport,
    rule: &'r RulePlan,
    index: usize,
    exclusions: &'r [Loss],
}

impl CounterCheck<'_> {
    /// Largest limit that was in force in a span, or before it while assignments may have lasted.
    fn largest_limit(&self, from_ms: u64, until_ms: u64) -> u64 {
        let from_ms = from_ms.saturating_sub(ASSIGNMENT_MS + self.rule.period_s * 1000);
        let (mut in_force, mut largest) = (self.rule.limit, 0);
        for change in self.report.changes.iter().filter(|change| change.rule == self.index) {
            if change.from_ms > until_ms {
                break;
            }
            if change.from_ms > from_ms {
                largest = largest.max(in_force);
            }
            in_force = change.limit;
        }
        largest.max(in_force)
    }

    /// How many times the limit may pass in a span.
    fn times(&self, from_ms: u64, until_ms: u64) -> u64 {
        let concerns = |loss: &&Loss| {
            loss.rule.is_none_or(|rule| rule == self.index) && loss.from_ms <= until_ms && from_ms <= loss.until_ms
        };
        1 + self.exclusions.iter().filter(concerns).count() as u64
    }

    /// Hits that passed before a first assignment, and count as used of it: as many more may pass.
    fn unassigned_hits(&self, name: BucketName) -> u64 {
        let buckets = self.report.buckets.iter().filter(|((_, of), _)| *of == name);
        buckets.map(|(_, bucket)| bucket.admitted_unassigned).sum()
    }

    fn capacity(&self, limit: u64) -> u64 {
        if self.rule.algorithm == Algorithm::TokenBucket { self.rule.size } else { limit }
    }

    /// True if all that passes is within a bucket of the capacity, which the limit refills: of token buckets, and of rates
    /// without other decisions. src/limit/division.rs proves it for any span, docs/quota.md promises less, for a span of a
    /// period: that is what counts for a rule whose limit changes, which may then be assigned in the other form.
    fn is_within_bucket(&self) -> bool {
        if self.report.changes.iter().any(|change| change.rule == self.index) {
            return false;
        }
        let is_rate = self.rule.period_s * 1000 < MAX_RATE_REFILL_MS;
        self.rule.algorithm == Algorithm::TokenBucket || is_rate && self.plan.calls_percent == 0
    }

    /// Pours each hit into a bucket of the capacity, which leaks at the limit: it never runs over.
    fn find_breach_of_meter(&self, admitted: &[&Hits]) -> Option<String> {
        if !self.is_within_bucket() {
            return None;
        }
        let period_us = u128::from(self.rule.period_s * MILLION);
        // When within this time a call was charged is not known.
        let unknown_ms = admitted.iter().map(|hit| hit.until_ms - hit.from_ms).max().unwrap_or(0);
        let (mut level, mut last_ms, mut last_times) = (0_u128, 0, 1);
        for hit in admitted {
            let now_ms = hit.until_ms;
            let (limit, times) = (self.largest_limit(now_ms, now_ms), self.times(now_ms, now_ms));
            let leak = |span_ms: u64| {
                u128::from(limit * times) * u128::from(span_ms * 1000) * u128::from(MILLION + DRIFT_PPM)
                    / u128::from(MILLION)
            };
            let most = u128::from(self.capacity(limit) * times) * period_us;
            if times < last_times {
                // What an exclusion let pass is over.
                level = level.min(most);
            }
            level = level.saturating_sub(leak(now_ms - last_ms)) + period_us;
            (last_ms, last_times) = (now_ms, times);
            // A timer fires in the millisecond after its time.
            if level > most + leak(unknown_ms + 1) {
                let tenths = level * 10 / period_us;
                return Some(format!(
                    "{tenths} tenths of a hit in a bucket of {} that {limit} refill, {times} times: at {now_ms} ms",
                    self.capacity(limit)
                ));
            }
        }
        None
    }

    /// Counts the hits of each period, and of each window.
    fn find_breach_of_window(&self, admitted: &[&Hits]) -> Option<String> {
        let period_ms = self.rule.period_s * 1000;
        let unknown_ms = admitted.iter().map(|hit| hit.until_ms - hit.from_ms).max().unwrap_or(0);
        let drift_ms = period_ms * DRIFT_PPM / MILLION + 1;
        let unassigned = admitted.first().map_or(0, |hit| self.unassigned_hits(hit.name));
        let (mut in_period, mut worst): (VecDeque<u64>, Option<(u64, String)>) = (VecDeque::new(), None);
        for hit in admitted {
            let now_ms = hit.until_ms;
            in_period.push_back(now_ms);
            while in_period.front().is_some_and(|at| at + period_ms <= now_ms + unknown_ms + drift_ms) {
                in_period.pop_front();
            }
            let from_ms = now_ms.saturating_sub(period_ms);
            let (limit, times) = (self.largest_limit(from_ms, now_ms), self.times(from_ms, now_ms));
            let most = (limit + self.capacity(limit)) * times + unassigned;
            let hits = in_period.len() as u64;
            if hits > most && worst.as_ref().is_none_or(|(excess, _)| hits - most > *excess) {
                let told =
                    format!("{hits} hits in a period, at most {most} are promised ({times} times): at {now_ms} ms");
                worst = Some((hits - most, told));
            }
        }
        if let Some((_, told)) = worst {
            return Some(told);
        }
        if self.rule.algorithm != Algorithm::FixedWindow || period_ms < MAX_RATE_REFILL_MS {
            return None;
        }
        let window = |us: u64| us / (self.rule.period_s * MILLION);
        let mut by_window: BTreeMap<u64, (u64, u64, u64)> = BTreeMap::new();
        for hit in admitted.iter().filter(|hit| window(hit.redis_from_us) == window(hit.redis_until_us)) {
            let entry = by_window.entry(window(hit.redis_from_us)).or_insert((0, hit.from_ms, 0));
            (entry.0, entry.2) = (entry.0 + 1, hit.until_ms);
        }
        by_window.into_values().find_map(|(hits, from_ms, until_ms)| {
            let (limit, times) = (self.largest_limit(from_ms, until_ms), self.times(from_ms, until_ms));
            let most = limit * times + unassigned;
            (hits > most).then(|| format!("{hits} hits of {most} in the window from {from_ms} to {until_ms} ms"))
        })
    }
}

/// Limits of a run without faults of which too little is used, of what one limiter would admit of the same requests.
fn find_idle_limits(plan: &QuotaPlan, report: &QuotaReport) -> Vec<String> {
    let mut breaches = Vec::new();
    // The page tells of three Envoys at one replica.
    if plan.fleet.replicas > 1 || plan.proxies.len() > 3 || plan.proxies.iter().any(|proxy| !proxy.is_envoy) {
        return breaches;
    }
    for (index, rule) in plan.rules.iter().enumerate() {
        // Smaller ones are not worth a division; parts of sliding windows have buckets of a quarter.
        let is_sliding = rule.algorithm == Algorithm::SlidingWindowCounter;
        if is_sliding || rule.limit < 10 * plan.proxies.len() as u64 {
            continue;
        }
        for value in 0..rule.values {
            let asked: Vec<&Request> = report.asked.iter().filter(|asked| asked.name == (index, value)).collect();
            let ideal = hits_of_one_limiter(plan, rule, &asked);
            let is_counted = |hit: &&Hits| {
                hit.name == (index, value) && counts_for_use(plan, rule, hit.until_ms, hit.redis_until_us)
            };
            let used = report.admitted.iter().filter(is_counted).count() as u64;
            if ideal >= MIN_JUDGED_HITS && used * 100 < ideal * least_use_percent(plan.demand) {
                breaches.push(format!("({index}, {value}): {used} hits were admitted of {ideal}"));
            }
        }
    }
    breaches
}

/// What of a limit must be used, in percent: a safe part of what docs/quota.md tells of three Envoys.
const fn least_use_percent(demand: Demand) -> u64 {
    match demand {
        Demand::Even | Demand::Skewed => 60,
        Demand::Moving => 45,
        Demand::Bursty => 15,
    }
}

/// True for hits that count for the use of a limit: of whole windows, once demand is known.
fn counts_for_use(plan: &QuotaPlan, rule: &RulePlan, at_ms: u64, redis_us: u64) -> bool {
    let (learned_ms, end_ms) = (SETTLE_MS + LEARN_MS, SETTLE_MS + plan.duration_ms);
    if rule.algorithm == Algorithm::TokenBucket {
        return at_ms >= learned_ms;
    }
    let into_window_ms = redis_us / 1000 % (rule.period_s * 1000);
    at_ms >= learned_ms + into_window_ms && at_ms - into_window_ms + rule.period_s * 1000 <= end_ms
}

/// Hits that one limiter would admit of these requests, of those that count.
fn hits_of_one_limiter(plan: &QuotaPlan, rule: &RulePlan, asked: &[&Request]) -> u64 {
    let is_bucket = rule.algorithm == Algorithm::TokenBucket;
    let (period_us, full) = (rule.period_s * MILLION, rule.size * rule.period_s * MILLION);
    let (mut level, mut last_us, mut window, mut hits) = (0, 0, 0, 0);
    for request in asked {
        let now_us = request.redis_us;
        let admits = if is_bucket {
            level = u64::saturating_sub(level, (now_us - last_us).saturating_mul(rule.limit));
            level + period_us <= full
        } else {
            if now_us / period_us != window {
                (window, level) = (now_us / period_us, 0);
            }
            level < rule.limit * period_us
        };
        last_us = now_us;
        if admits {
            level += period_us;
            hits += u64::from(counts_for_use(plan, rule, request.at_ms, now_us));
        }
    }
    hits
}

/// Says how a bucket of a run without faults was left without an assignment, or got nothing although hits were admitted
/// since its demand was known, `admitted_later`: a limit that was used up before has nothing to give.
fn find_neglect(plan: &QuotaPlan, rule: &RulePlan, bucket: &BucketRecord, admitted_later: u64) -> Option<String> {
    if bucket.ended > 0 {
        return Some(format!("{} decisions after an assignment ended: {bucket:?}", bucket.ended));
    }
    if bucket.longest_unassigned_ms > 1000 {
        return Some(format!("no assignment for {} ms: {bucket:?}", bucket.longest_unassigned_ms));
    }
    // A share of a rate that moves between replicas takes longer; the page tells nothing of other clients than Envoys, and
    // bursts may be over before a share has grown.
    let is_lent = rule.period_s * 1000 * rule.capacity() >= MAX_RATE_REFILL_MS * rule.limit;
    let must_be_served = (plan.fleet.replicas == 1 || is_lent)
        && plan.demand != Demand::Bursty
        && plan.proxies.iter().all(|proxy| proxy.is_envoy)
        && rule.limit.min(rule.capacity()) >= 10 * plan.proxies.len() as u64;
    let has_room = admitted_later >= rule.limit / 5;
    if must_be_served
        && has_room
        && bucket.admitted == 0
        && bucket.requests > 30
        && bucket.last_ms - bucket.first_ms > 30_000
    {
        return Some(format!("nothing was admitted: {bucket:?}"));
    }
    None
}
