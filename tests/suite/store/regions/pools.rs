//! Pools of regions in a simulation: how much of a limit they use, and that they keep it, whatever happens.
//!
//! Regions ask and are answered as their processes do it, over links with a delay. The counters are those of both
//! Redis. Requests arrive at random times. `cargo test --test suite regions::pools -- --nocapture` prints what each
//! period admits, in percent of the limit, and the number of requests to the global Redis.
//!
//! Each hit of a pool is also charged to a strict counter with the limit of the global Redis, at its true time: it
//! must fit. Parts are counters of their own, so nothing else can exceed the limit.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use kit::seeded_random::Chance;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::region_pool::{LastAnswer, RegionPool};
use tollkeeper::limit::algorithm::state::{CounterWithPool, State};
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::hold::{CounterHolds, HoldAnswer, HoldRequest, PoolId, StateWithLimit};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::region_requests::{MIN_REQUEST_INTERVAL_US, check_interval_us, request_interval_us};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{GlobalScope, Limit, LimitSpec, Scope};

const REGIONS: usize = 3;
const SECOND_US: u64 = 1_000_000;
const MINUTE_US: u64 = 60 * SECOND_US;
/// Time that a simulation lasts.
const LENGTH_US: u64 = 7 * MINUTE_US;
/// Start of a window.
const START_US: u64 = 1_783_512_000_000_000;
const STEP_US: u64 = 10_000;

const ALGORITHMS: [Algorithm; 3] = [Algorithm::FixedWindow, Algorithm::SlidingWindowCounter, Algorithm::TokenBucket];
const DELAYS_MS: [u64; 3] = [50, 150, 300];

/// Limit and period of a simulation.
#[derive(Clone, Copy)]
struct Shape {
    requests: u32,
    period_us: u64,
}

const PER_MINUTE: Shape = Shape { requests: 1200, period_us: MINUTE_US };
const PER_TEN_SECONDS: Shape = Shape { requests: 1000, period_us: 10 * SECOND_US };
const SHAPES: [Shape; 2] = [PER_MINUTE, PER_TEN_SECONDS];

/// Rule that the simulation leaves out, to see that it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Breakage {
    /// Hits that were handed out while a request was open are forgotten when its answer comes.
    ForgetsUntold,
    /// Pools last for a minute longer than the hold.
    LastsTooLong,
    /// Half of the used hits are not reported.
    TellsHalf,
    /// The global Redis takes a request that a later one has overtaken.
    TakesLateRequests,
    /// An answer is taken although its request is not open.
    TakesLateAnswers,
}

/// Requests of all regions, and what goes wrong.
#[derive(Clone, Copy)]
struct Demand {
    /// Hits per period, in percent of the limit.
    percent: u64,
    /// Parts of the regions in percent, at a second of the simulation.
    parts: fn(u64) -> [u64; REGIONS],
    /// The first region dies at [`DEATH_US`].
    first_dies: bool,
    /// The first region is cut off from [`CUT_US`] to [`CUT_END_US`].
    is_cut: bool,
    /// Messages that are lost each way, in percent; clocks then differ and drift, and lost pools begin anew.
    lost_percent: u64,
    breakage: Option<Breakage>,
}

impl Demand {
    /// Demand of 1.3 times the limit, without a fault.
    const fn over_limit(parts: fn(u64) -> [u64; REGIONS]) -> Self {
        Self { percent: 130, parts, first_dies: false, is_cut: false, lost_percent: 0, breakage: None }
    }
}

/// Time of the death: in the middle of a window.
const DEATH_US: u64 = START_US + 3 * MINUTE_US + MINUTE_US / 2;
/// Time of the cut.
const CUT_US: u64 = START_US + 2 * MINUTE_US + 13 * SECOND_US;
const CUT_END_US: u64 = CUT_US + 50 * SECOND_US;

/// Message that arrives at a time.
#[derive(Clone, Debug)]
enum Message {
    /// A request, at the global Redis. `asked` is the pool that asks.
    Request {
        region: usize,
        asked: RegionPool,
        request: HoldRequest,
    },
    Answer {
        region: usize,
        asked: RegionPool,
        answer: HoldAnswer,
    },
    /// The process that got the answer to a request checks the pool again.
    PoolCheck {
        region: usize,
        number: u64,
    },
}

/// Clock of a Redis.
#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    offset_us: u64,
    /// Drift in parts per million, above -500.
    ppm: i64,
}

impl Clock {
    fn at(self, true_us: u64) -> Time {
        let elapsed = i64::try_from(true_us - START_US).expect("it is small");
        let drifted = true_us.checked_add_signed(elapsed * self.ppm / 1_000_000).expect("it is after 1970");
        Time::from_micros(drifted + self.offset_us)
    }
}

struct Region {
    counter: CounterWithPool,
    clock: Clock,
}

struct Simulation {
    shape: Shape,
    limit: Limit,
    demand: Demand,
    now_us: u64,
    delay_us: u64,
    regions: Vec<Region>,
    global_clock: Clock,
    global: State,
    holds: CounterHolds,
    /// Counts each hit of a pool at its true time.
    strict: State,
    /// Hits of pools that do not fit it.
    over: u64,
    messages: BTreeMap<(u64, u64), Message>,
    sent: u64,
    /// Times at which hits were admitted, and the region of each.
    admitted: Vec<(u64, usize)>,
    /// Times at which requests were opened.
    requests: Vec<u64>,
    chance: Chance,
}

impl Simulation {
    fn new(shape: Shape, algorithm: Algorithm, delay_ms: u64, demand: Demand, seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let scope = Scope::Global(GlobalScope::new(NonZeroU16::new(3).expect("it is positive")));
        let seconds = u32::try_from(shape.period_us / SECOND_US).expect("it is small");
        let period = Period::new(Unit::Second, seconds).expect("it is a period");
        let spec = LimitSpec { scope: Some(scope), ..LimitSpec::new(algorithm, shape.requests.into(), period) };
        let limit = Limit::new(&spec).expect("the limit is valid");
        let mut clock = || match demand.lost_percent {
            0 => Clock::default(),
            _ => Clock {
                offset_us: chance.between(0, 2 * shape.period_us),
                ppm: i64::try_from(chance.between(0, 1000)).expect("it is small") - 500,
            },
        };
        Self {
            shape,
            limit,
            demand,
            now_us: START_US,
            delay_us: delay_ms * 1000,
            regions: (0..REGIONS).map(|_| Region { counter: CounterWithPool::empty(&limit), clock: clock() }).collect(),
            global_clock: clock(),
            global: State::empty(limit.counting_method()),
            holds: CounterHolds::default(),
            strict: State::empty(limit.counting_method()),
            over: 0,
            messages: BTreeMap::new(),
            sent: 0,
            admitted: Vec::new(),
            requests: Vec::new(),
            chance,
        }
    }

    fn run(shape: Shape, algorithm: Algorithm, delay_ms: u64, demand: Demand, seed: u64) -> Self {
        let mut simulation = Self::new(shape, algorithm, delay_ms, demand, seed);
        for step in 0..LENGTH_US / STEP_US {
            simulation.now_us = START_US + step * STEP_US;
            simulation.deliver();
            let mut parts = (demand.parts)(step * STEP_US / SECOND_US);
            if simulation.is_dead(0) {
                (parts[0], parts[1]) = (0, parts[0] + parts[1]);
            }
            if demand.lost_percent > 0 && simulation.chance.one_in(6000) {
                // Its Redis lost the key: the pool begins anew.
                let lost = simulation.chance.place(REGIONS);
                simulation.regions[lost].counter.pool = RegionPool::default();
            }
            for (region, part) in parts.into_iter().enumerate() {
                // A hundredth of it comes at each of 100 chances, in ten-thousandths of a hit.
                let due = demand.percent * u64::from(shape.requests) * STEP_US * part / shape.period_us;
                let hits = (0..100).filter(|_| simulation.chance.between(0, 999_999) < due).count();
                (0..hits).for_each(|_| simulation.charge(region));
            }
        }
        simulation
    }

    fn is_dead(&self, region: usize) -> bool {
        region == 0 && self.demand.first_dies && self.now_us >= DEATH_US
    }

    fn is_cut(&self, region: usize) -> bool {
        region == 0 && self.demand.is_cut && (CUT_US..CUT_END_US).contains(&self.now_us)
    }

    fn send(&mut self, after_us: u64, message: Message) {
        self.sent += 1;
        self.messages.insert((self.now_us + after_us, self.sent), message);
    }

    /// Sends a message between a region and the global Redis, which may be lost.
    fn send_far(&mut self, region: usize, message: Message) {
        let is_lost = self.chance.between(1, 100) <= self.demand.lost_percent;
        let late_us = if self.demand.lost_percent > 0 && self.chance.one_in(10) { 4 * SECOND_US } else { 0 };
        if !is_lost && !self.is_cut(region) {
            let late_us = if late_us > 0 { self.chance.between(0, late_us) } else { 0 };
            self.send(self.delay_us / 2 + late_us, message);
        }
    }

    fn charge(&mut self, region: usize) {
        let (limit, at) = (self.limit, &mut self.regions[region]);
        let now = at.clock.at(self.now_us);
        let (number, before) = (at.counter.pool.number, at.counter.taken);
        if at.counter.charge(&limit, now, ChargeRequest::new(Hits::Charge(1), 0)).admitted {
            self.admitted.push((self.now_us, region));
        }
        let of_pool = at.counter.taken.pool - before.pool;
        let is_opened = at.counter.pool.number != number;
        if of_pool > 0 {
            let request = ChargeRequest::new(Hits::Charge(of_pool), 0);
            let strict = self.strict.charge(&limit.without_region_parts(), self.global_clock.at(self.now_us), request);
            self.over += u64::from(!strict.admitted);
        }
        if is_opened {
            self.ask(region);
        }
    }

    /// Sends the open request of a region.
    fn ask(&mut self, region: usize) {
        let asked = self.regions[region].counter.pool;
        let mut request = asked.hold_request(&self.limit);
        if self.demand.breakage == Some(Breakage::TellsHalf) {
            request.used /= 2;
        }
        if self.demand.breakage == Some(Breakage::TakesLateRequests) {
            (request.number, request.first_number) = (0, 0);
        }
        self.requests.push(self.now_us);
        self.send_far(region, Message::Request { region, asked, request });
    }

    fn deliver(&mut self) {
        while let Some(entry) = self.messages.first_entry().filter(|entry| entry.key().0 <= self.now_us) {
            match entry.remove() {
                Message::Request { region, asked, request } => {
                    let limit = self.limit.without_region_parts();
                    let mut holder = [0; 16];
                    holder[0] = u8::try_from(region).expect("it is small");
                    holder[8..].copy_from_slice(&asked.id.to_le_bytes());
                    let counter = StateWithLimit { limit: &limit, state: &mut self.global };
                    let now = self.global_clock.at(self.now_us);
                    let answer = self.holds.charge_used_and_grant(counter, PoolId(holder), request, now);
                    self.send_far(region, Message::Answer { region, asked, answer });
                }
                // Its processes died too.
                Message::Answer { region, .. } | Message::PoolCheck { region, .. } if self.is_dead(region) => {}
                Message::Answer { region, asked, answer } => self.accept(region, &asked, &answer),
                Message::PoolCheck { region, number } => self.check_pool(region, number),
            }
        }
    }

    /// Gives back what a region does not need, and checks again later, until another request is answered.
    fn check_pool(&mut self, region: usize, number: u64) {
        let Region { counter: CounterWithPool { pool, .. }, clock } = &mut self.regions[region];
        let mut now = pool.at(&self.limit, clock.at(self.now_us));
        if pool.number != number {
            return;
        }
        match now.hits_to_keep(&self.limit) {
            Some(kept) => {
                now.start_request_keeping(kept);
                *pool = now;
                self.ask(region);
            }
            None => self.send_check(region),
        }
    }

    fn send_check(&mut self, region: usize) {
        let Region { counter: CounterWithPool { pool, .. }, clock } = &self.regions[region];
        let now = clock.at(self.now_us);
        if pool.left + pool.unreported > 0 && now < pool.until {
            let after_us = pool.final_check_at().since_us(now).clamp(STEP_US, check_interval_us(&self.limit));
            let number = pool.number;
            self.send(after_us, Message::PoolCheck { region, number });
        }
    }

    fn accept(&mut self, region: usize, asked: &RegionPool, answer: &HoldAnswer) {
        let interval_us = request_interval_us(&self.limit);
        let pause_us = interval_us / 4 * 3 + self.chance.between(0, interval_us / 2);
        let mut grant = asked.grant_of(&self.limit, answer, pause_us);
        let pool = &mut self.regions[region].counter.pool;
        if self.demand.breakage == Some(Breakage::LastsTooLong) {
            grant.until = grant.until.plus_us(MINUTE_US);
        }
        let unreported = pool.unreported;
        if self.demand.breakage == Some(Breakage::TakesLateAnswers) {
            (pool.number, pool.first_number) = (grant.number, grant.number);
        }
        if pool.accept(&grant) {
            if self.demand.breakage == Some(Breakage::ForgetsUntold) {
                pool.left += unreported;
            }
            self.send_check(region);
        }
    }

    /// Hits admitted in each minute, in percent of the limit.
    fn percents(&self) -> Vec<u64> {
        let mut admitted = vec![0; usize::try_from(LENGTH_US / MINUTE_US).expect("it is small")];
        for (at_us, _) in &self.admitted {
            admitted[usize::try_from((at_us - START_US) / MINUTE_US).expect("it is small")] += 1;
        }
        let limit = u64::from(self.shape.requests) * MINUTE_US / self.shape.period_us;
        admitted.into_iter().map(|hits: u64| 100 * hits / limit).collect()
    }

    /// Longest time without an admitted hit of a region after a time, in microseconds.
    fn longest_pause_us(&self, region: usize, from_us: u64) -> u64 {
        let times =
            self.admitted.iter().filter(|(at_us, of)| *of == region && *at_us >= from_us).map(|(at_us, _)| *at_us);
        let times: Vec<u64> = [from_us].into_iter().chain(times).chain([START_US + LENGTH_US]).collect();
        times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
    }
}

/// Least use of the limit in percent.
#[derive(Clone, Copy)]
struct Least(u64);

/// Asserts the mean use of the limit in some minutes, and the bound on requests.
fn assert_used(name: &str, shape: Shape, demand: Demand, Least(least): Least, minutes: impl Fn(usize) -> bool) {
    let mut missed = Vec::new();
    for (algorithm, delay_ms) in ALGORITHMS.into_iter().flat_map(|it| DELAYS_MS.map(|delay_ms| (it, delay_ms))) {
        let run = Simulation::run(shape, algorithm, delay_ms, demand, delay_ms);
        let percents = run.percents();
        let counted: Vec<u64> =
            (0..percents.len()).filter(|minute| minutes(*minute)).map(|minute| percents[minute]).collect();
        let mean = counted.iter().sum::<u64>() / counted.len() as u64;
        let text = format!(
            "{name:10} {} s {algorithm:?} {delay_ms} ms: {mean} %, {percents:?} %, {} requests",
            shape.period_us / SECOND_US,
            run.requests.len()
        );
        println!("{text}");
        assert_eq!(run.over, 0, "hits above the strict counter: {text}");
        // Each second, in each region; more for short periods.
        let seconds = usize::try_from(LENGTH_US / MIN_REQUEST_INTERVAL_US).expect("it is small");
        assert!(run.requests.len() <= seconds * REGIONS * if shape.period_us < MINUTE_US { 3 } else { 1 }, "{text}");
        // What a sliding window frees lies idle until the next request, and in one of 10 s for a part of a round trip.
        let least = match algorithm {
            Algorithm::SlidingWindowCounter => least - if shape.period_us < MINUTE_US { 7 } else { 2 },
            _ => least,
        };
        if counted.iter().sum::<u64>() < least * counted.len() as u64 {
            missed.push(text);
        }
    }
    assert!(missed.is_empty(), "less than {least} % of the limit:\n{}", missed.join("\n"));
}

#[test]
fn one_region_gets_the_limit() {
    for shape in SHAPES {
        assert_used("one", shape, Demand::over_limit(|_| [100, 0, 0]), Least(90), |minute| minute >= 2);
    }
}

#[test]
fn even_demand_uses_the_limit() {
    for shape in SHAPES {
        assert_used("even", shape, Demand::over_limit(|_| [34, 33, 33]), Least(95), |minute| minute >= 2);
    }
}

#[test]
fn uneven_demand_uses_the_limit() {
    for shape in SHAPES {
        assert_used("uneven", shape, Demand::over_limit(|_| [80, 15, 5]), Least(95), |minute| minute >= 2);
    }
}

/// Nine tenths of the demand come from one region, another one every 20 s.
fn moving(second: u64) -> [u64; REGIONS] {
    [[90, 5, 5], [5, 90, 5], [5, 5, 90]][usize::try_from(second / 20 % 3).unwrap_or(0)]
}

#[test]
fn demand_that_moves_uses_the_limit() {
    for shape in SHAPES {
        assert_used("moving", shape, Demand::over_limit(moving), Least(90), |minute| minute >= 1);
    }
}

#[test]
fn part_of_a_dead_region_is_used_by_the_others() {
    let demand = Demand { first_dies: true, ..Demand::over_limit(|_| [60, 30, 10]) };
    // A window that the region held counts in the next one too.
    assert_used("dead", PER_MINUTE, demand, Least(90), |minute| minute >= 5);
}

#[test]
fn no_region_starves_after_a_cut() {
    for shape in SHAPES {
        let demand = Demand { is_cut: true, ..Demand::over_limit(|_| [34, 33, 33]) };
        // A fixed window may be used up before it ends.
        for algorithm in [Algorithm::SlidingWindowCounter, Algorithm::TokenBucket] {
            let run = Simulation::run(shape, algorithm, 150, demand, 150);
            let pauses = [0, 1, 2].map(|region| run.longest_pause_us(region, CUT_END_US));
            println!("cut {} s {algorithm:?}: {pauses:?} us", shape.period_us / SECOND_US);
            assert!(pauses.iter().all(|pause_us| *pause_us <= 5 * SECOND_US), "{algorithm:?}: {pauses:?}");
        }
    }
}

#[test]
fn few_hits_are_asked_for_far_from_the_limit() {
    for (algorithm, delay_ms) in ALGORITHMS.into_iter().flat_map(|it| DELAYS_MS.map(|delay_ms| (it, delay_ms))) {
        let demand = Demand { percent: 30, ..Demand::over_limit(|_| [80, 15, 5]) };
        let run = Simulation::run(PER_MINUTE, algorithm, delay_ms, demand, delay_ms);
        let percents = run.percents();
        let admitted = run.admitted.len();
        // In the first minute regions learn the demand.
        let later = run.requests.iter().filter(|at_us| **at_us >= START_US + MINUTE_US).count();
        println!(
            "far        {algorithm:?} {delay_ms} ms: {percents:?} %, {admitted} hits, {later} requests after the first minute"
        );
        // A busy key asks every second or two for the hits of a bucket.
        let most = if algorithm == Algorithm::TokenBucket { 30 } else { 6 };
        assert!(later <= most * REGIONS * 6, "{algorithm:?}: {later} requests");
    }
}

/// Runs with faults: lost and late messages, a cut, clocks apart that drift, lost pools.
fn count_hits_over(breakage: Option<Breakage>, algorithm: Algorithm, seed: u64) -> u64 {
    const DEMANDS: [fn(u64) -> [u64; REGIONS]; 3] = [|_| [34, 33, 33], |_| [80, 15, 5], moving];
    let mut chance = Chance::new(seed);
    let demand = Demand {
        percent: chance.pick(&[90, 130, 250]),
        is_cut: chance.one_in(2),
        lost_percent: chance.pick(&[1, 5, 20]),
        breakage,
        ..Demand::over_limit(chance.pick(&DEMANDS))
    };
    let shape = chance.pick(&SHAPES);
    Simulation::run(shape, algorithm, chance.pick(&DELAYS_MS), demand, seed).over
}

#[test]
fn charge_that_can_never_pass_holds_nothing() {
    for algorithm in ALGORITHMS {
        let Simulation { limit, mut regions, .. } =
            Simulation::new(PER_MINUTE, algorithm, 150, Demand::over_limit(|_| [34, 33, 33]), 1);
        let counter = &mut regions[0].counter;
        for (hits, is_wanted) in [(5000, false), (1000, true)] {
            for second in 0..5 {
                let request = ChargeRequest::new(Hits::Charge(hits), 0);
                let at = Time::from_micros(START_US + second * SECOND_US);
                assert!(!counter.charge(&limit, at, request).admitted, "{algorithm}: {hits}");
            }
            let wanted = counter.pool.hits_wanted(&limit);
            assert_eq!(wanted >= hits, is_wanted, "{algorithm}: {wanted} wanted for {hits}");
            assert!(is_wanted || wanted == 0, "{algorithm}: {wanted} wanted for {hits}");
        }
    }
}

#[test]
fn lease_whose_charge_opens_a_grant_request_ends_with_the_global_window() {
    let now = Time::from_micros(START_US);
    let demand = Demand::over_limit(|_| [34, 33, 33]);
    let Simulation { limit, mut regions, .. } = Simulation::new(PER_MINUTE, Algorithm::FixedWindow, 150, demand, 1);
    let counter = &mut regions[0].counter;
    let charge = |counter: &mut CounterWithPool, hits| {
        assert!(counter.charge(&limit, now, ChargeRequest::new(Hits::Charge(hits), 0)).admitted, "{hits}");
    };
    charge(counter, limit.region_part().requests_per_unit());
    let answer = LastAnswer { window_end: now.plus_us(SECOND_US / 4), ..LastAnswer::default() };
    let until = now.plus_us(MINUTE_US);
    counter.pool = RegionPool { last: now, id: 1, left: 500, low: 500, until, answer, ..RegionPool::default() };
    charge(counter, 100);
    assert!(counter.pool.first_number > 0, "the charge opened a request");
    assert_eq!(counter.lease_time_left_us(&limit, now), SECOND_US / 4);
}

#[test]
fn no_hit_of_a_pool_exceeds_a_strict_counter() {
    let seeds: u64 = std::env::var("POOL_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(10);
    for (seed, algorithm) in (0..seeds).flat_map(|seed| ALGORITHMS.map(|algorithm| (seed, algorithm))) {
        let over = count_hits_over(None, algorithm, seed);
        assert_eq!(over, 0, "{algorithm:?}, seed {seed}");
    }
}

#[test]
fn each_rule_is_needed() {
    use Breakage::{ForgetsUntold, LastsTooLong, TakesLateAnswers, TakesLateRequests, TellsHalf};
    for breakage in [ForgetsUntold, LastsTooLong, TellsHalf, TakesLateRequests, TakesLateAnswers] {
        let mut runs = (0..100).flat_map(|seed| ALGORITHMS.map(|algorithm| (seed, algorithm)));
        let found = runs.find(|(seed, algorithm)| count_hits_over(Some(breakage), *algorithm, *seed) > 0);
        println!("{breakage:?}: {found:?}");
        assert!(found.is_some(), "{breakage:?} changes nothing");
    }
}
