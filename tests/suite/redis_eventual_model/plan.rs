//! What happens in a run: descriptors, requests, delays, faults, and who comes and goes; drawn from a seed.
//!
//! Requests come alone, in clumps, and where it matters: at a window's end, and a period after the first of them. About
//! half of them are single hits, which fit a share; the others are as large as it takes to exceed the limit.

use std::num::NonZeroU32;

use smallvec::SmallVec;
use tollkeeper::limit::{Algorithm, Consistency, Limit, Overshoot, Period, Terms, Unit};
use tollkeeper::store::redis::eventual::{self, log_beyond_us};
use tollkeeper::store::redis::script::Counted;

use super::chance::Chance;

const MS: u64 = 1_000;
const S: u64 = 1_000_000;

/// What a run is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scene {
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
    Everything,
}

impl Scene {
    /// As a table has it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Steady => "steady load",
            Self::ColdBurst => "burst on a cold key at all replicas",
            Self::Skewed => "all load on one replica",
            Self::Boundary => "around the end of a window",
            Self::Churn => "replicas join, leave and crash",
            Self::Crowded => "more replicas than slots",
            Self::Frozen => "Redis frozen",
            Self::Unreachable => "Redis unreachable, back with its data",
            Self::Resized => "the number of slots changed in a roll",
            Self::Slow => "slow and lost replies",
            Self::Everything => "all of this",
        }
    }

    const fn is(self, other: Self) -> bool {
        matches!(self, Self::Everything) || self as u8 == other as u8
    }
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) at: u64,
    pub(super) key: usize,
    /// `None`: at any.
    pub(super) replica: Option<usize>,
    pub(super) hits: u64,
}

/// What becomes of a replica.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fate {
    Joins,
    /// Gives its leases back, and its slot.
    Leaves,
    Crashes,
    /// Leaves, and is back at once with another number of slots.
    Rolls(u32),
}

/// How long messages travel, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Network {
    pub(super) usual: (u64, u64),
    pub(super) slow: (u64, u64),
    /// One message in so many is slow; 0: none.
    pub(super) slow_in: u64,
    /// One message in so many is lost; 0: none.
    pub(super) lost_in: u64,
    /// The longest that a reply is waited for.
    pub(super) timeout: u64,
}

/// A run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) replicas: usize,
    pub(super) slots: u32,
    /// The live replicas, if they know how many they are.
    pub(super) live: Option<u64>,
    pub(super) keys: Vec<SmallVec<[Counted; 1]>>,
    pub(super) network: Network,
    /// Redis does nothing from one time to the other, and then all that has come.
    pub(super) frozen: Vec<(u64, u64)>,
    /// No message gets through.
    pub(super) cut: Vec<(u64, u64)>,
    pub(super) fates: Vec<(u64, usize, Fate)>,
    pub(super) arrivals: Vec<Arrival>,
    /// How long a claim of a slot runs.
    pub(super) claim: u64,
    /// What a replica may remember, in bytes.
    pub(super) bytes: usize,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// A limit as it is written.
pub(super) fn limit(terms: Terms, overshoot: Overshoot) -> Limit {
    let terms = Terms { consistency: Some(Consistency::Eventual(overshoot)), count_rejected: Some(false), ..terms };
    Limit::new(&terms).unwrap()
}

/// A counter as Redis has it.
pub(super) fn counted(limit: Limit, enforced: bool, tag: u128) -> Counted {
    Counted { limit: limit.lengthened(log_beyond_us(&limit)), enforced, tag }
}

/// One share of so many.
pub(super) fn slots(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

/// A limit of which shares are worth a few hits, which single hits can use up.
fn small_limit(chance: &mut Chance, algorithm: Algorithm) -> Limit {
    let requests = chance.pick(&[40, 100, 200]);
    let period = Period::new(Unit::Second, chance.pick(&[1, 10])).unwrap();
    let overshoot = chance.pick(&[Overshoot::MilliPercent(50_000), Overshoot::Hits(requests)]);
    limit(Terms::new(algorithm, requests, period), overshoot)
}

fn random_limit(chance: &mut Chance, algorithm: Algorithm) -> Limit {
    let requests = match algorithm {
        // Each hit may be a record, and runs are many.
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
    limit(Terms { bucket_size, ..Terms::new(algorithm, requests, period.unwrap()) }, overshoot)
}

/// One limit as a rule, at times two, or one on trial besides.
fn random_counters(chance: &mut Chance, algorithm: Algorithm) -> SmallVec<[Counted; 1]> {
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
    /// A run with the algorithm as that of the first limits.
    pub(super) fn new(scene: Scene, replicas: usize, algorithm: Algorithm, seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let chance = &mut chance;
        // The worst that can be done to shares takes a plan of its own.
        let worst = chance.one_in(3);
        let keys: Vec<_> = match worst {
            true => vec![SmallVec::from_iter([counted(small_limit(chance, algorithm), true, 1)])],
            false => (0..chance.between(1, 3)).map(|_| random_counters(chance, algorithm)).collect(),
        };
        let period = keys[0][0].limit.period().micros();
        let count = replicas as u64;
        let slots = if scene.is(Scene::Crowded) {
            chance.between(1, (count - 1).max(1))
        } else {
            chance.pick(&[count, if worst { count } else { 16 }, count + 1])
        };
        let comes_and_goes = scene.is(Scene::Churn) || scene.is(Scene::Crowded) || scene.is(Scene::Resized);
        let start = 1_700_000_000 * S + chance.below(period);
        let end = start + if comes_and_goes { 6 * period } else { 7 * period / 2 };
        let mut plan = Self {
            replicas,
            slots: u32::try_from(slots).unwrap(),
            live: chance.one_in(2).then_some(count),
            keys,
            network: network(scene, period, chance),
            frozen: Vec::new(),
            cut: Vec::new(),
            fates: Vec::new(),
            arrivals: Vec::new(),
            claim: if comes_and_goes { chance.pick(&[30 * S, 3 * period / 2, period / 2]) } else { 30 * S },
            // Room for one descriptor of those that meet.
            bytes: if chance.one_in(6) { 40_000 } else { 64 << 20 },
            start,
            end,
        };
        plan.add_faults(scene, chance);
        plan.add_fates(scene, chance);
        for key in 0..plan.keys.len() {
            plan.add_arrivals(scene, key, chance);
        }
        if worst {
            plan.use_shares_up(chance);
        }
        plan
    }

    fn add_faults(&mut self, scene: Scene, chance: &mut Chance) {
        let period = self.keys[0][0].limit.period().micros();
        for _ in 0..2 {
            let from = chance.between(self.start, self.end);
            let span = (from, from + chance.between(period / 10, 3 * period / 2));
            if scene.is(Scene::Frozen) {
                self.frozen.push(span);
            }
            let from = chance.between(self.start, self.end);
            if scene.is(Scene::Unreachable) {
                self.cut.push((from, from + chance.between(period / 10, 3 * period / 2)));
            }
        }
    }

    fn add_fates(&mut self, scene: Scene, chance: &mut Chance) {
        let period = self.keys[0][0].limit.period().micros();
        if scene.is(Scene::Churn) || scene.is(Scene::Crowded) {
            for _ in 0..2 * self.replicas + 4 {
                let (at, replica) = (chance.between(self.start, self.end), chance.place(self.replicas));
                let goes = if chance.one_in(3) { Fate::Leaves } else { Fate::Crashes };
                self.fates.push((at, replica, goes));
                let pause = if chance.one_in(2) { 0 } else { chance.below(period) };
                self.fates.push((at + pause, replica, Fate::Joins));
            }
        }
        if scene.is(Scene::Resized) {
            let next = u32::try_from(chance.between(1, 2 * u64::from(self.slots))).unwrap();
            let (mut at, step) = (chance.between(self.start, self.start + period), chance.pick(&[10 * MS, period / 4]));
            for replica in 0..self.replicas {
                self.fates.push((at, replica, Fate::Rolls(next)));
                at += chance.below(step);
            }
        }
    }

    fn add_arrivals(&mut self, scene: Scene, key: usize, chance: &mut Chance) {
        let (keys, limit) = (self.keys.len() as u64, self.keys[key][0].limit);
        let (period, requests) = (limit.period().micros(), u64::from(limit.requests_per_unit()));
        let length = self.end - self.start;
        let count = chance.between(60, 360) / keys + 20;
        let periods = (length / period).max(1);
        let demand = requests * periods * chance.pick(&[1, 3, 4, 6, 12]) / 2;
        let large = (2 * demand / count).max(1);
        let mut add = |at: u64, replica: Option<usize>, chance: &mut Chance| {
            let hits = if chance.one_in(2) { 1 } else { chance.between(1, large) };
            let replica = if scene == Scene::Skewed && !chance.one_in(50) { Some(0) } else { replica };
            self.arrivals.push(Arrival { at, key, replica, hits });
        };
        let begin = self.start + if scene.is(Scene::ColdBurst) { chance.below(period.min(length / 2)) } else { 0 };
        let edge = |chance: &mut Chance| match chance.one_in(2) {
            true => (begin / period + chance.below(periods + 1)) * period,
            false => begin + chance.below(periods + 1) * period - chance.below(period / 8),
        };
        if scene.is(Scene::ColdBurst) {
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
            let at = match scene.is(Scene::Boundary) && !chance.one_in(4) {
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
    /// Single hits at each replica: one to begin its period, then the rest of its share late in that, within a window,
    /// and the next share at once; then more than the limit.
    fn use_shares_up(&mut self, chance: &mut Chance) {
        let limit = self.keys[0][0].limit;
        let period = limit.period().micros();
        let share = replica_share(&self.keys[0], self.slots);
        let late = chance.between(MS, period / 20);
        // The end of a window, or no particular time.
        let window = (self.start / period + 1) * period;
        let ends = if chance.one_in(4) { self.start + chance.below(period) + period } else { window + late };
        let begin = ends.max(self.start + period) - period;
        let jitter = late / 2;
        // Nobody else asks before.
        self.arrivals.retain(|it| it.at > begin + period + late);
        for replica in 0..self.replicas {
            let mut add = |at: u64, hits: u64| {
                self.arrivals.push(Arrival { at, key: 0, replica: Some(replica), hits });
            };
            let first = begin + chance.below(jitter);
            add(first, 1);
            for _ in 1..share {
                add(first + period - 1 - chance.below(jitter), 1);
            }
            for _ in 0..share {
                add(first + period + chance.below(jitter), 1);
            }
            let (limit, replicas) = (u64::from(limit.requests_per_unit()), self.replicas as u64);
            for _ in 0..2 * limit / replicas {
                add(first + period + late + chance.below(period / 4), chance.between(1, 2));
            }
        }
        self.end = self.end.max(begin + 3 * period);
    }
}

fn replica_share(counters: &[Counted], count: u32) -> u64 {
    eventual::Terms::of(counters, slots(count)).unwrap().share
}

fn network(scene: Scene, period: u64, chance: &mut Chance) -> Network {
    let usual = chance.pick(&[(100, 300), (200, 2 * MS), (MS, 6 * MS)]);
    match scene.is(Scene::Slow) {
        true => Network {
            usual,
            slow: (20 * MS, chance.pick(&[60 * MS, 1500 * MS, 3 * period / 2])),
            slow_in: chance.between(2, 20),
            lost_in: chance.pick(&[0, 20]),
            timeout: chance.pick(&[15 * MS, 100 * MS, 4 * period]),
        },
        false => Network { usual, slow: (0, 0), slow_in: 0, lost_in: 0, timeout: chance.pick(&[15 * MS, S]) },
    }
}
