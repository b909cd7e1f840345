//! Events of a run: descriptors, requests, delays, faults, and the replicas that start and stop; generated from a
//! seed.
//!
//! Requests come alone, in bursts, and at critical times: at a window's end, and a period after the first of them.
//! About half of them are single hits, which fit a share; the others are as large as needed to exceed the limit.

use std::num::NonZeroU32;

use smallvec::SmallVec;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::local_budget::{LocalBudget, log_extension_us};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::{Consistency, Limit, LimitSpec, Overshoot};
use tollkeeper::store::charge::OwnedCounter;

use kit::seeded_random::Chance;

const MS: u64 = 1_000;
const S: u64 = 1_000_000;

/// Kind of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScenarioKind {
    Steady,
    ColdBurst,
    Skewed,
    Boundary,
    Churn,
    Crowded,
    Frozen,
    Unreachable,
    Resized,
    Slow,
    Unused,
    Adjusted,
    Reloaded,
    Everything,
}

impl ScenarioKind {
    /// Name in the table.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Steady => "steady load",
            Self::ColdBurst => "burst on a cold key at all replicas",
            Self::Skewed => "all load on one replica",
            Self::Boundary => "around the end of a window",
            Self::Churn => "replicas join, leave and crash",
            Self::Crowded => "more replicas than places",
            Self::Frozen => "Redis frozen",
            Self::Unreachable => "Redis unreachable, back with its data",
            Self::Resized => "the number of places changed in a roll",
            Self::Slow => "slow and lost replies",
            Self::Unused => "leases that are left unused",
            Self::Adjusted => "hits refunded, counters reset",
            Self::Reloaded => "other limits reloaded",
            Self::Everything => "all of this",
        }
    }

    const fn is(self, other: Self) -> bool {
        matches!(self, Self::Everything) || self as u8 == other as u8
    }
}

/// Request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) at: u64,
    pub(super) key: usize,
    /// `None`: any replica.
    pub(super) replica: Option<usize>,
    pub(super) hits: u64,
}

/// Change of a replica.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReplicaEvent {
    Joins,
    /// Returns its leases, and releases its place.
    Leaves,
    Crashes,
    /// Stops, and restarts at once with another number of places.
    Rolls(u32),
}

/// Administration of a counter.
#[derive(Clone, Copy, Debug)]
pub(super) enum Adjustment {
    Refund(u64),
    Reset,
}

/// Travel time of messages, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Network {
    pub(super) usual: (u64, u64),
    pub(super) slow: (u64, u64),
    /// One message in this many is slow; 0: none.
    pub(super) slow_in: u64,
    /// One message in this many is lost; 0: none.
    pub(super) lost_in: u64,
    /// Additional delay of refunds.
    pub(super) returns: (u64, u64),
    /// Upper bound on the wait for a reply.
    pub(super) timeout: u64,
}

impl Network {
    /// No message is slow or lost.
    pub(super) const fn quick(usual: (u64, u64), timeout: u64) -> Self {
        Self { usual, slow: (0, 0), slow_in: 0, lost_in: 0, returns: (0, 0), timeout }
    }
}

/// Plan of a run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) replicas: usize,
    pub(super) places: u32,
    /// Number of live replicas that each replica assumes; `None`: random.
    pub(super) live: Option<u64>,
    pub(super) keys: Vec<SmallVec<[OwnedCounter; 1]>>,
    pub(super) network: Network,
    /// Redis is frozen from the first time to the second, then runs all that has arrived.
    pub(super) frozen: Vec<(u64, u64)>,
    /// No message is delivered from the first time to the second.
    pub(super) cut: Vec<(u64, u64)>,
    pub(super) replica_changes: Vec<(u64, usize, ReplicaEvent)>,
    pub(super) arrivals: Vec<Arrival>,
    /// Keys with the limits that reloads bring, in pairs with `keys`; empty: none.
    pub(super) changed_keys: Vec<SmallVec<[OwnedCounter; 1]>>,
    /// Time, replica and key of changes to the other limits, and back.
    pub(super) reloads: Vec<(u64, usize, usize)>,
    /// Time, replica and key of refunds and resets.
    pub(super) adjustments: Vec<(u64, usize, usize, Adjustment)>,
    /// Lifetime of a place's claim.
    pub(super) claim: u64,
    /// Memory bound of a replica, in bytes.
    pub(super) bytes: usize,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// Limit of a rule.
pub(super) fn limit(budget: LimitSpec, overshoot: Overshoot) -> Limit {
    let spec = LimitSpec { consistency: Some(Consistency::Eventual(overshoot)), count_rejected: Some(false), ..budget };
    Limit::new(&spec).unwrap()
}

/// Counter in Redis.
pub(super) fn counted(limit: Limit, enforced: bool, tag: u128) -> OwnedCounter {
    OwnedCounter { limit: limit.with_longer_period(log_extension_us(&limit)), shadow: !enforced, quota: false, tag }
}

/// Share of one of `count` places.
pub(super) fn places(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

/// Limit whose shares are a few hits, so that single hits use them up.
fn small_limit(chance: &mut Chance, algorithm: Algorithm) -> Limit {
    let requests = chance.pick(&[40, 100, 200]);
    let period = Period::new(Unit::Second, chance.pick(&[1, 10])).unwrap();
    let overshoot = chance.pick(&[Overshoot::MilliPercent(50_000), Overshoot::Hits(requests)]);
    limit(LimitSpec::new(algorithm, requests.into(), period), overshoot)
}

fn random_limit(chance: &mut Chance, algorithm: Algorithm) -> Limit {
    let requests = match algorithm {
        // Each hit may be a record; keep runs short.
        Algorithm::SlidingWindowLog => chance.pick(&[1, 3, 10, 40, 100, 300]),
        _ => chance.pick(&[1, 3, 10, 40, 100, 400, 1000, 5000]),
    };
    let period = match chance.below(3) {
        0 => Period::new(Unit::Second, 1),
        1 => Period::new(Unit::Second, 10),
        _ => Period::new(Unit::Minute, 1),
    };
    let overshoot = match chance.below(5) {
        0 => Overshoot::MilliPercent(1_000),
        1 => Overshoot::MilliPercent(5_000),
        2 | 3 => Overshoot::MilliPercent(50_000),
        _ => Overshoot::Hits(u32::try_from(chance.between(1, u64::from(requests))).unwrap()),
    };
    let bucket_size = chance.pick(&[(requests / 2).max(1), requests, 2 * requests]);
    let bucket_size = (algorithm == Algorithm::TokenBucket).then_some(bucket_size);
    limit(LimitSpec { bucket_size, ..LimitSpec::new(algorithm, requests.into(), period.unwrap()) }, overshoot)
}

/// Mostly one limit, sometimes two, or one and another in shadow mode.
fn random_counters(chance: &mut Chance, algorithm: Algorithm) -> SmallVec<[OwnedCounter; 1]> {
    const OTHERS: [Algorithm; 4] =
        [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindowLog, Algorithm::SlidingWindowCounter];
    let mut counters = SmallVec::from_iter([counted(random_limit(chance, algorithm), true, 1)]);
    if chance.one_in(5) {
        let other = chance.pick(&OTHERS);
        counters.push(counted(random_limit(chance, other), !chance.one_in(4), 2));
    }
    counters
}

impl Plan {
    /// Plans a run whose first limits have this algorithm.
    pub(super) fn new(kind: ScenarioKind, replicas: usize, algorithm: Algorithm, seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let chance = &mut chance;
        if kind == ScenarioKind::Unused || kind == ScenarioKind::Adjusted && chance.one_in(2) {
            let mut plan = Self::unused(replicas, algorithm, chance);
            plan.add_adjustments(kind, chance);
            return plan;
        }
        // The worst case for shares needs a plan of its own.
        let worst = chance.one_in(3);
        let keys: Vec<_> = match worst {
            true => vec![SmallVec::from_iter([counted(small_limit(chance, algorithm), true, 1)])],
            false => (0..chance.between(1, 3)).map(|_| random_counters(chance, algorithm)).collect(),
        };
        let period = keys[0][0].limit.period().micros();
        let count = replicas as u64;
        let places = if kind.is(ScenarioKind::Crowded) {
            chance.between(1, (count - 1).max(1))
        } else {
            chance.pick(&[count, if worst { count } else { 16 }, count + 1])
        };
        let comes_and_goes =
            kind.is(ScenarioKind::Churn) || kind.is(ScenarioKind::Crowded) || kind.is(ScenarioKind::Resized);
        let start = 1_700_000_000 * S + chance.below(period);
        let end = start + if comes_and_goes { 6 * period } else { 7 * period / 2 };
        let mut plan = Self {
            replicas,
            places: u32::try_from(places).unwrap(),
            live: chance.one_in(2).then_some(count),
            keys,
            network: network(kind, period, chance),
            frozen: Vec::new(),
            cut: Vec::new(),
            replica_changes: Vec::new(),
            arrivals: Vec::new(),
            adjustments: Vec::new(),
            changed_keys: Vec::new(),
            reloads: Vec::new(),
            claim: if comes_and_goes { chance.pick(&[30 * S, 3 * period / 2, period / 2]) } else { 30 * S },
            // Memory for one of the descriptors in use.
            bytes: if chance.one_in(6) { 40_000 } else { 64 << 20 },
            start,
            end,
        };
        plan.add_faults(kind, chance);
        plan.add_replica_changes(kind, chance);
        for key in 0..plan.keys.len() {
            plan.add_arrivals(kind, key, chance);
        }
        if worst {
            plan.use_shares_up(chance);
        }
        plan.add_adjustments(kind, chance);
        plan.add_reloads(kind, chance);
        plan
    }

    /// Reloads of limits that are larger or smaller, some of them again and again.
    fn add_reloads(&mut self, kind: ScenarioKind, chance: &mut Chance) {
        if !kind.is(ScenarioKind::Reloaded) || kind == ScenarioKind::Everything && chance.one_in(2) {
            return;
        }
        for counters in &self.keys {
            let changed = |counter: &OwnedCounter| {
                let limit = counter.limit;
                let requests = (limit.requests_per_unit() * chance.pick(&[1, 5, 8, 12, 20, 40]) / 10).max(1);
                let bucket_size =
                    (limit.algorithm() == Algorithm::TokenBucket).then(|| u32::try_from(requests).unwrap());
                let spec = LimitSpec { bucket_size, ..LimitSpec::new(limit.algorithm(), requests, limit.period()) };
                let overshoot = Overshoot::MilliPercent(chance.pick(&[5_000, 20_000, 50_000]));
                counted(self::limit(spec, overshoot), !counter.shadow, counter.tag)
            };
            self.changed_keys.push(counters.iter().map(changed).collect());
        }
        for _ in 0..chance.between(1, 20) {
            let at = match self.arrivals.len() {
                1.. if chance.one_in(2) => self.arrivals[chance.place(self.arrivals.len())].at + chance.below(MS),
                _ => chance.between(self.start, self.end),
            };
            self.reloads.push((at, chance.place(self.replicas), chance.place(self.keys.len())));
        }
    }

    /// Refunds and resets, most of them soon after a request; some refund more than was charged.
    fn add_adjustments(&mut self, kind: ScenarioKind, chance: &mut Chance) {
        if !kind.is(ScenarioKind::Adjusted) {
            return;
        }
        for _ in 0..chance.between(1, 12) {
            let key = chance.place(self.keys.len());
            let at = match self.arrivals.len() {
                1.. if !chance.one_in(4) => self.arrivals[chance.place(self.arrivals.len())].at + chance.below(50 * MS),
                _ => chance.between(self.start, self.end),
            };
            let capacity = self.keys[key][0].limit.capacity();
            let adjustment = match chance.below(4) {
                0 => Adjustment::Refund(chance.between(1, 3)),
                1 => Adjustment::Refund(chance.between(1, capacity)),
                2 => Adjustment::Refund(3 * capacity),
                _ => Adjustment::Reset,
            };
            self.adjustments.push((at, chance.place(self.replicas), key, adjustment));
        }
        self.adjustments.sort_by_key(|(at, ..)| *at);
    }

    fn add_faults(&mut self, kind: ScenarioKind, chance: &mut Chance) {
        let period = self.keys[0][0].limit.period().micros();
        for _ in 0..2 {
            let from = chance.between(self.start, self.end);
            let span = (from, from + chance.between(period / 10, 3 * period / 2));
            if kind.is(ScenarioKind::Frozen) {
                self.frozen.push(span);
            }
            let from = chance.between(self.start, self.end);
            if kind.is(ScenarioKind::Unreachable) {
                self.cut.push((from, from + chance.between(period / 10, 3 * period / 2)));
            }
        }
    }

    fn add_replica_changes(&mut self, kind: ScenarioKind, chance: &mut Chance) {
        let period = self.keys[0][0].limit.period().micros();
        if kind.is(ScenarioKind::Churn) || kind.is(ScenarioKind::Crowded) {
            for _ in 0..2 * self.replicas + 4 {
                let (at, replica) = (chance.between(self.start, self.end), chance.place(self.replicas));
                let event = if chance.one_in(3) { ReplicaEvent::Leaves } else { ReplicaEvent::Crashes };
                self.replica_changes.push((at, replica, event));
                let pause = if chance.one_in(2) { 0 } else { chance.below(period) };
                self.replica_changes.push((at + pause, replica, ReplicaEvent::Joins));
            }
        }
        if kind.is(ScenarioKind::Resized) {
            let next = u32::try_from(chance.between(1, 2 * u64::from(self.places))).unwrap();
            let (mut at, step) = (chance.between(self.start, self.start + period), chance.pick(&[10 * MS, period / 4]));
            for replica in 0..self.replicas {
                self.replica_changes.push((at, replica, ReplicaEvent::Rolls(next)));
                at += chance.below(step);
            }
        }
    }

    fn add_arrivals(&mut self, kind: ScenarioKind, key: usize, chance: &mut Chance) {
        let (keys, limit) = (self.keys.len() as u64, self.keys[key][0].limit);
        let (period, requests) = (limit.period().micros(), limit.requests_per_unit());
        let length = self.end - self.start;
        let count = chance.between(60, 360) / keys + 20;
        let periods = (length / period).max(1);
        let demand = requests * periods * chance.pick(&[1, 3, 4, 6, 12]) / 2;
        let large = (2 * demand / count).max(1);
        let mut add = |at: u64, replica: Option<usize>, chance: &mut Chance| {
            let hits = if chance.one_in(2) { 1 } else { chance.between(1, large) };
            let replica = if kind == ScenarioKind::Skewed && !chance.one_in(50) { Some(0) } else { replica };
            self.arrivals.push(Arrival { at, key, replica, hits });
        };
        let begin =
            self.start + if kind.is(ScenarioKind::ColdBurst) { chance.below(period.min(length / 2)) } else { 0 };
        let edge = |chance: &mut Chance| match chance.one_in(2) {
            true => (begin / period + chance.below(periods + 1)) * period,
            false => begin + chance.below(periods + 1) * period - chance.below(period / 8),
        };
        if kind.is(ScenarioKind::ColdBurst) {
            for place in 0..count {
                let replica = usize::try_from(place).unwrap() % self.replicas;
                add(begin + chance.below(10 * MS), Some(replica), chance);
            }
        } else {
            add(begin, None, chance);
        }
        let mut left = count;
        while left > 0 {
            let alone = chance.one_in(3);
            let (size, spread) = match alone {
                true => (1, 1),
                false => (chance.between(2, 30).min(left), chance.pick(&[5 * MS, 50 * MS, 300 * MS, 1500 * MS])),
            };
            let at = match kind.is(ScenarioKind::Boundary) && !chance.one_in(4) {
                true => edge(chance).saturating_sub(chance.below(spread)),
                false => chance.between(begin, self.end),
            };
            let replica = chance.one_in(4).then(|| chance.place(self.replicas));
            for _ in 0..size {
                add(at.max(begin) + chance.below(spread), replica, chance);
            }
            left -= size;
        }
    }
}

impl Plan {
    /// Single hits at each replica: one to start its period, the rest of its share near the end of that period, the
    /// next share at once, another one period later; then more than the limit.
    fn use_shares_up(&mut self, chance: &mut Chance) {
        let limit = self.keys[0][0].limit;
        let period = limit.period().micros();
        let share = replica_share(&self.keys[0], self.places);
        let late = chance.between(MS, period / 20);
        // The end of a window, or a random time.
        let window = (self.start / period + 1) * period;
        let ends = if chance.one_in(4) { self.start + chance.below(period) + period } else { window + late };
        let begin = ends.max(self.start + period) - period;
        let again = chance.pick(&[period, period, period - 2 * MS, period / 10 * 9, period / 2]);
        // No other request arrives before.
        self.arrivals.retain(|it| it.at > begin + 2 * period + late);
        let (requests, replicas) = (limit.requests_per_unit(), self.replicas as u64);
        for replica in 0..self.replicas {
            let mut add = |at: u64, hits: u64| {
                self.arrivals.push(Arrival { at, key: 0, replica: Some(replica), hits });
            };
            let first = begin + chance.below(late / 2);
            add(first, 1);
            for _ in 1..share {
                add(first + again - 1 - chance.below(MS / 2), 1);
            }
            for after in [again, 2 * again] {
                for _ in 0..share {
                    add(first + after + chance.below(MS / 2), 1);
                }
            }
            let then = if again == period && chance.one_in(2) { again } else { 2 * again };
            for _ in 0..2 * requests / replicas {
                add(first + then + late + chance.below(period / 4), chance.between(1, 2));
            }
        }
        self.end = self.end.max(begin + 4 * period);
    }

    /// Demand that cannot be met causes leases that are not used. Near their end, while they are returned, more than
    /// the limit is requested, and again one period later.
    fn unused(replicas: usize, algorithm: Algorithm, chance: &mut Chance) -> Self {
        let requests = chance.pick(&[100, 200]);
        let period = Period::new(Unit::Second, chance.pick(&[1, 10])).unwrap();
        let overshoot = Overshoot::MilliPercent(chance.pick(&[1_000, 5_000, 20_000]));
        let bucket_size = (algorithm == Algorithm::TokenBucket).then_some(requests * chance.pick(&[1, 2]));
        let limit = limit(LimitSpec { bucket_size, ..LimitSpec::new(algorithm, requests.into(), period) }, overshoot);
        let (period, capacity) = (period.micros(), limit.capacity());
        let returns = chance.pick(&[(0, 0), (0, 30 * MS), (100 * MS, 170 * MS), (700 * MS, S)]);
        let window = 1_700_000_000 * S / period * period;
        let start = window + if chance.one_in(2) { 0 } else { chance.below(period) };
        let mut plan = Self {
            replicas,
            places: 16,
            live: Some(1),
            keys: vec![SmallVec::from_iter([counted(limit, true, 1)])],
            network: Network { returns, ..Network::quick((100, 300), S) },
            frozen: Vec::new(),
            cut: Vec::new(),
            replica_changes: Vec::new(),
            arrivals: Vec::new(),
            adjustments: Vec::new(),
            changed_keys: Vec::new(),
            reloads: Vec::new(),
            claim: 30 * S,
            bytes: 64 << 20,
            start,
            end: start + 8 * period,
        };
        let life = local_budget(&plan.keys[0], 16).life_us;
        if chance.one_in(2) {
            plan.lease_in_a_chain(life, capacity, chance);
            return plan;
        }
        for round in 0..3 {
            // The leases are granted 46 ms later.
            let begin = start + (2 * round + 1) * period - chance.pick(&[50 * MS, 100 * MS, 300 * MS]);
            plan.charge_more_than_the_limit(begin, capacity, chance);
            let leased = begin + 46 * MS;
            let ends = leased + chance.pick(&[life / 10 * 9, life / 10 * 19, life + 5 * MS, life + returns.0]);
            plan.add_requests_over(2 * capacity, (ends, 3 * MS), chance);
            plan.add_requests_over(capacity, (ends, returns.1 + 50 * MS), chance);
            plan.add_requests_over(2 * capacity, (leased + period + chance.pick(&[0, life]), 100 * MS), chance);
        }
        plan
    }

    /// Each lease is charged before the previous one is returned. Late in the period more than the limit is requested,
    /// and again when the first lease has expired from the log.
    fn lease_in_a_chain(&mut self, life: u64, capacity: u64, chance: &mut Chance) {
        let period = self.keys[0][0].limit.period().micros();
        let steps = chance.between(2, 16);
        let (mut at, begin) = (self.start, self.start);
        for _ in 0..steps {
            self.charge_more_than_the_limit(at, capacity, chance);
            at += life.max(50 * MS) + chance.below(30 * MS);
        }
        let pause = chance.pick(&[0, life / 2, life + 5 * MS]);
        self.add_requests_over(2 * capacity, (at + pause, 5 * MS), chance);
        self.add_requests_over(2 * capacity, (begin + period + life, at - begin), chance);
    }

    /// Charges at each replica that never pass, then one that does.
    fn charge_more_than_the_limit(&mut self, begin: u64, capacity: u64, chance: &mut Chance) {
        for replica in 0..self.replicas {
            for step in 0..6 {
                let at = begin + step * 9 * MS + chance.below(MS);
                let hits = if step == 5 { 1 } else { capacity + 1 };
                self.arrivals.push(Arrival { at, key: 0, replica: Some(replica), hits });
            }
        }
    }

    /// A few hits at a time, at all replicas, over a span.
    fn add_requests_over(&mut self, hits: u64, (from, span): (u64, u64), chance: &mut Chance) {
        for _ in 0..hits / 2 {
            let (at, hits) = (from + chance.below(span), chance.between(1, 3));
            self.arrivals.push(Arrival { at, key: 0, replica: None, hits });
        }
    }
}

fn replica_share(counters: &[OwnedCounter], count: u32) -> u64 {
    local_budget(counters, count).share
}

fn local_budget(counters: &[OwnedCounter], count: u32) -> LocalBudget {
    LocalBudget::for_limits(counters.iter().map(|counter| &counter.limit), places(count)).unwrap()
}

fn network(kind: ScenarioKind, period: u64, chance: &mut Chance) -> Network {
    let usual = chance.pick(&[(100, 300), (200, 2 * MS), (MS, 6 * MS)]);
    match kind.is(ScenarioKind::Slow) {
        true => Network {
            usual,
            slow: (20 * MS, chance.pick(&[60 * MS, 1500 * MS, 3 * period / 2])),
            slow_in: chance.between(2, 20),
            lost_in: chance.pick(&[0, 20]),
            returns: (0, 0),
            timeout: chance.pick(&[15 * MS, 100 * MS, 4 * period]),
        },
        false => Network::quick(usual, chance.pick(&[15 * MS, S])),
    }
}
