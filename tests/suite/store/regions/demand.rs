//! Use of global limits: hits go where the demand is, over regions in a simulation without faults.
//!
//! Regions ask and are answered as their processes do it, over links with a delay. The counters are those of both
//! Redis. Requests arrive at random times. `cargo test --test suite regions::demand -- --nocapture` prints what each
//! period admits, in percent of the limit, and the number of grant requests.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::global_bucket::{self, GlobalBucketParameters};
use tollkeeper::limit::algorithm::global_window::{self, GlobalWindowParameters, ReturnedHits};
use tollkeeper::limit::algorithm::region::GlobalTimeAndStanding;
use tollkeeper::limit::algorithm::region::MIN_GRANT_REQUEST_INTERVAL_US;
use tollkeeper::limit::algorithm::region_bucket::PrepaidHitsGrant;
use tollkeeper::limit::algorithm::region_window::HitsGrant;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{GlobalScope, Limit, LimitSpec, Scope};
use tollkeeper::store::redis::regions::demand::{BucketDemand, WindowDemand, jittered_pause_us};

const REGIONS: usize = 3;
const MINUTE_US: u64 = 60_000_000;
/// Time that a simulation lasts.
const LENGTH_US: u64 = 7 * MINUTE_US;
/// Start of a window.
const START_US: u64 = 1_783_512_000_000_000;
const STEP_US: u64 = 10_000;
const SECOND_US: u64 = 1_000_000;

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

/// Requests of all regions.
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
}

impl Demand {
    /// Demand of 1.3 times the limit, without a death.
    const fn over_limit(parts: fn(u64) -> [u64; REGIONS]) -> Self {
        Self { percent: 130, parts, first_dies: false, is_cut: false }
    }
}

/// Time of the death: in the middle of a window.
const DEATH_US: u64 = START_US + 3 * MINUTE_US + MINUTE_US / 2;
/// Time of the cut.
const CUT_US: u64 = START_US + 2 * MINUTE_US + 13 * SECOND_US;
const CUT_END_US: u64 = CUT_US + 50 * SECOND_US;

/// Random numbers, the same in each run.
struct Chance(u64);

impl Chance {
    /// Returns a number below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Message that arrives at a time.
#[derive(Clone, Copy, Debug)]
enum Message {
    /// A grant request, at the global Redis.
    Request {
        region: usize,
        ask: Ask,
    },
    Grant {
        region: usize,
        grant: HitsGrant,
    },
    Prepaid {
        region: usize,
        grant: PrepaidHitsGrant,
    },
    /// The unused hits of a window leave the region's counter.
    GiveBack {
        region: usize,
        window: u64,
    },
    Return(ReturnedHits),
}

#[derive(Clone, Copy, Debug)]
enum Ask {
    Window { request: u64, demand: WindowDemand },
    Bucket { request: u64, demand: BucketDemand },
}

struct Simulation {
    shape: Shape,
    limit: Limit,
    now_us: u64,
    delay_us: u64,
    regions: [State; REGIONS],
    windows: global_window::State,
    bucket: global_bucket::State,
    messages: BTreeMap<(u64, u64), Message>,
    sent: u64,
    /// Times at which hits were admitted, and the region of each.
    admitted: Vec<(u64, usize)>,
    /// Times at which grant requests were opened.
    requests: Vec<u64>,
    is_first_dead: bool,
    is_first_cut: bool,
    chance: Chance,
}

impl Simulation {
    fn run(shape: Shape, algorithm: Algorithm, delay_ms: u64, demand: Demand) -> Self {
        let scope = Scope::Global(GlobalScope::new(NonZeroU16::new(3).expect("it is positive")));
        let seconds = u32::try_from(shape.period_us / SECOND_US).expect("it is small");
        let period = Period::new(Unit::Second, seconds).expect("it is a period");
        let spec = LimitSpec { scope: Some(scope), ..LimitSpec::new(algorithm, shape.requests, period) };
        let limit = Limit::new(&spec).expect("the limit is valid").as_counted_in_region();
        let mut simulation = Self {
            shape,
            limit,
            now_us: START_US,
            delay_us: delay_ms * 1000,
            regions: std::array::from_fn(|_| State::empty(limit.counting_method())),
            windows: global_window::State::default(),
            bucket: global_bucket::State::default(),
            messages: BTreeMap::new(),
            sent: 0,
            admitted: Vec::new(),
            requests: Vec::new(),
            is_first_dead: false,
            is_first_cut: false,
            chance: Chance(delay_ms),
        };
        for step in 0..LENGTH_US / STEP_US {
            simulation.now_us = START_US + step * STEP_US;
            simulation.is_first_dead = demand.first_dies && simulation.now_us >= DEATH_US;
            simulation.is_first_cut = demand.is_cut && (CUT_US..CUT_END_US).contains(&simulation.now_us);
            simulation.deliver();
            let mut parts = (demand.parts)(step * STEP_US / SECOND_US);
            if simulation.is_first_dead {
                (parts[0], parts[1]) = (0, parts[0] + parts[1]);
            }
            for (region, part) in parts.into_iter().enumerate() {
                // A hundredth of it comes at each of 100 chances, in ten-thousandths of a hit.
                let due = demand.percent * u64::from(shape.requests) * STEP_US * part / shape.period_us;
                let hits = (0..100).filter(|_| simulation.chance.below(1_000_000) < due).count();
                (0..hits).for_each(|_| simulation.charge(region));
            }
        }
        simulation
    }

    fn now(&self) -> Time {
        Time::from_micros(self.now_us)
    }

    /// Clock of a process of a region, which has measured the round trip only.
    fn clock(&self, region: usize) -> GlobalTimeAndStanding {
        let half = i64::try_from(self.delay_us / 2).expect("it is small");
        let (valid_from, valid_until) = (Time::from_micros(0), Time::from_micros(1 << 53));
        let (offset_lo, offset_hi) = (-half, half);
        let can_request = !(region == 0 && self.is_first_cut);
        GlobalTimeAndStanding {
            valid_from,
            valid_until,
            offset_lo,
            offset_hi,
            can_request,
            ..GlobalTimeAndStanding::UNKNOWN
        }
    }

    fn send(&mut self, after_us: u64, message: Message) {
        self.sent += 1;
        self.messages.insert((self.now_us + after_us, self.sent), message);
    }

    fn charge(&mut self, region: usize) {
        let (now, clock) = (self.now(), self.clock(region));
        let state = &mut self.regions[region];
        let before = state.open_grant_request_id();
        state.set_global_view(&clock);
        if state.charge(&self.limit, now, ChargeRequest::new(Hits::Charge(1), 0)).admitted {
            self.admitted.push((self.now_us, region));
        }
        let request = state.open_grant_request_id();
        if request == before || request == 0 {
            return;
        }
        let ask = match state {
            State::RegionWindow(state) => {
                let reserve = u64::from(self.limit.region_reserve());
                Ask::Window {
                    request,
                    demand: WindowDemand::estimate_at(&state.counts, reserve, self.shape.period_us, self.now_us),
                }
            }
            State::RegionBucket(state) => {
                let pool = GlobalBucketParameters::from_limit(&self.limit);
                Ask::Bucket { request, demand: BucketDemand::estimate_at(&state.counts, pool, self.now_us) }
            }
            other => panic!("{other:?} is not counted in a region"),
        };
        self.requests.push(self.now_us);
        self.send(self.delay_us / 2, Message::Request { region, ask });
    }

    fn deliver(&mut self) {
        let now = self.now();
        while let Some(entry) = self.messages.first_entry().filter(|entry| entry.key().0 <= now.as_micros()) {
            match entry.remove() {
                Message::Request { region, ask } => self.answer(region, ask),
                Message::Grant { region, grant } => self.give(region, &grant),
                Message::Prepaid { region, grant } => {
                    let State::RegionBucket(state) = &mut self.regions[region] else { panic!("it is no bucket") };
                    state.counts.accept_grant(self.limit.region_capacity().into(), &grant);
                }
                // Its process died too.
                Message::GiveBack { region: 0, .. } if self.is_first_dead => {}
                Message::GiveBack { region, window } => {
                    let State::RegionWindow(state) = &mut self.regions[region] else { panic!("it has no windows") };
                    let hits = state.counts.take_unused_hits(window);
                    self.send(self.delay_us / 2, Message::Return(ReturnedHits { window, hits, epoch: now }));
                }
                Message::Return(unused) => {
                    self.windows.take_back(now, self.pool(), unused);
                }
            }
        }
    }

    fn pool(&self) -> GlobalWindowParameters {
        let is_sliding = self.limit.algorithm() == Algorithm::SlidingWindowCounter;
        GlobalWindowParameters { period_us: self.shape.period_us, is_sliding, max: self.limit.max_granted_hits() }
    }

    fn jittered_pause_us(&mut self, pause_us: u64) -> u64 {
        jittered_pause_us(pause_us, self.chance.below(1_000_000))
    }

    fn answer(&mut self, region: usize, ask: Ask) {
        let now = self.now();
        let answer = match ask {
            Ask::Window { request, demand } => {
                let grant = self.windows.grant(now, self.pool(), demand.hits_to_request());
                let (hits, exhausted) = (u64::from(grant.hits), grant.hits == 0);
                let is_sliding = self.limit.algorithm() == Algorithm::SlidingWindowCounter;
                let next_request_pause_us = demand.next_request_pause_us(is_sliding, hits);
                let next_request_at = Time::from_micros(request).plus_us(self.jittered_pause_us(next_request_pause_us));
                let (window, low) = (grant.window, demand.request_more_at_hits_left(hits));
                let grant = HitsGrant { request, window, epoch: 0, hits, low, exhausted, next_request_at };
                Message::Grant { region, grant }
            }
            Ask::Bucket { request, demand } => {
                let grant =
                    self.bucket.grant(now, GlobalBucketParameters::from_limit(&self.limit), demand.hits_to_request());
                let hits = u64::from(grant.hits);
                let next_request_pause_us = demand.next_request_pause_us(hits, grant.free.into());
                let grant = PrepaidHitsGrant {
                    request,
                    epoch: 0,
                    hits,
                    low: demand.request_more_at_hits_left(hits),
                    start: now,
                    end: grant.end,
                    exhausted: hits == 0,
                    next_request_at: Time::from_micros(request).plus_us(self.jittered_pause_us(next_request_pause_us)),
                };
                Message::Prepaid { region, grant }
            }
        };
        self.send(self.delay_us / 2, answer);
    }

    fn give(&mut self, region: usize, grant: &HitsGrant) {
        let State::RegionWindow(state) = &mut self.regions[region] else { panic!("it has no windows") };
        let is_first = state.counts.granted_total == 0;
        if state.counts.accept_grant(grant) && is_first && self.limit.algorithm() == Algorithm::SlidingWindowCounter {
            let rest_us = ((grant.window + 1) * self.shape.period_us).saturating_sub(self.now_us);
            let after_us = rest_us.saturating_sub((2 * self.delay_us).max(1_000_000));
            self.send(after_us, Message::GiveBack { region, window: grant.window });
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

/// Asserts the mean use of the limit in some minutes, and the bound on grant requests.
fn assert_used(name: &str, shape: Shape, demand: Demand, Least(least): Least, minutes: impl Fn(usize) -> bool) {
    let mut missed = Vec::new();
    for (algorithm, delay_ms) in ALGORITHMS.into_iter().flat_map(|it| DELAYS_MS.map(|delay_ms| (it, delay_ms))) {
        let run = Simulation::run(shape, algorithm, delay_ms, demand);
        let percents = run.percents();
        let text = format!(
            "{name:10} {} s {algorithm:?} {delay_ms} ms: {percents:?} %, {} requests",
            shape.period_us / SECOND_US,
            run.requests.len()
        );
        println!("{text}");
        // Each second, in each region; more for short sliding windows.
        let seconds = usize::try_from(LENGTH_US / MIN_GRANT_REQUEST_INTERVAL_US).expect("it is small");
        assert!(run.requests.len() <= seconds * REGIONS * if shape.period_us < MINUTE_US { 3 } else { 1 }, "{text}");
        let counted: Vec<u64> =
            (0..percents.len()).filter(|minute| minutes(*minute)).map(|minute| percents[minute]).collect();
        // A sliding window of 10 s lies idle for a part of a round trip after each request.
        let is_short = algorithm == Algorithm::SlidingWindowCounter && shape.period_us < MINUTE_US;
        let least = if is_short { least - 5 } else { least };
        if counted.iter().sum::<u64>() < least * counted.len() as u64 {
            missed.push(text);
        }
    }
    assert!(missed.is_empty(), "less than {least} % of the limit:\n{}", missed.join("\n"));
}

const SHAPES: [Shape; 2] = [PER_MINUTE, PER_TEN_SECONDS];

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

#[test]
fn demand_that_moves_uses_the_limit() {
    let parts = |second| [[90, 5, 5], [5, 90, 5], [5, 5, 90]][usize::try_from(second / 20 % 3).unwrap_or(0)];
    for shape in SHAPES {
        assert_used("moving", shape, Demand::over_limit(parts), Least(90), |minute| minute >= 1);
    }
}

#[test]
fn part_of_a_dead_region_is_used_by_the_others() {
    let demand = Demand { first_dies: true, ..Demand::over_limit(|_| [60, 30, 10]) };
    // A window that the region was granted counts in the next one too.
    assert_used("dead", PER_MINUTE, demand, Least(90), |minute| minute >= 5);
}

#[test]
fn no_region_starves_after_a_cut() {
    for shape in SHAPES {
        let demand = Demand { is_cut: true, ..Demand::over_limit(|_| [34, 33, 33]) };
        // A fixed window may be used up before it ends.
        for algorithm in [Algorithm::SlidingWindowCounter, Algorithm::TokenBucket] {
            let run = Simulation::run(shape, algorithm, 150, demand);
            let pauses = [0, 1, 2].map(|region| run.longest_pause_us(region, CUT_END_US));
            println!("cut {} s {algorithm:?}: {pauses:?} us", shape.period_us / SECOND_US);
            assert!(pauses.iter().all(|pause_us| *pause_us <= 5 * SECOND_US), "{algorithm:?}: {pauses:?}");
        }
    }
}

#[test]
fn few_grants_are_requested_far_from_the_limit() {
    for (algorithm, delay_ms) in ALGORITHMS.into_iter().flat_map(|it| DELAYS_MS.map(|delay_ms| (it, delay_ms))) {
        let demand = Demand { percent: 30, ..Demand::over_limit(|_| [80, 15, 5]) };
        let run = Simulation::run(PER_MINUTE, algorithm, delay_ms, demand);
        let percents = run.percents();
        let admitted = run.admitted.len();
        // In the first minute regions learn the demand.
        let later = run.requests.iter().filter(|at_us| **at_us >= START_US + MINUTE_US).count();
        println!(
            "far        {algorithm:?} {delay_ms} ms: {percents:?} %, {admitted} hits, {later} requests after the first minute"
        );
        // A busy key asks every second or two for the hits of a bucket.
        let most = if algorithm == Algorithm::TokenBucket { 30 } else { 2 };
        assert!(later <= most * REGIONS * 6, "{algorithm:?}: {later} requests");
    }
}

mod estimate {
    use tollkeeper::limit::algorithm::region_window::WindowCounts;
    use tollkeeper::store::redis::regions::demand::WindowDemand;

    const PERIOD_US: u64 = 60_000_000;

    fn demand(counts: WindowCounts, elapsed_us: u64) -> WindowDemand {
        WindowDemand::estimate_at(&WindowCounts { window: 7, ..counts }, 30, PERIOD_US, 7 * PERIOD_US + elapsed_us)
    }

    #[test]
    fn steady_demand_is_requested_once_for_the_whole_window() {
        // 10 a second for 6 s, of which the reserve took 30 and the rest was rejected.
        let counts = WindowCounts { requested: 60, reserve_used: 30, ..Default::default() };
        let demand = demand(counts, 6_000_000);
        assert_eq!(demand.hits_to_request(), 540 + 54);
        assert_eq!(demand.request_more_at_hits_left(594), 15);
    }

    #[test]
    fn first_moment_of_a_window_is_not_extended_to_all_of_it() {
        let counts = WindowCounts { requested: 100, reserve_used: 30, ..Default::default() };
        let wanted = demand(counts, 200_000).hits_to_request();
        assert!(wanted < 1_400, "{wanted}");
        assert!(wanted >= 750, "what comes within 1.5 s: {wanted}");
        let steady = WindowCounts { previous_requested: 600, ..Default::default() };
        assert_eq!(demand(steady, 0).hits_to_request(), 630, "as in the window before, less the reserve");
    }

    #[test]
    fn requests_grow_with_a_burst_late_in_a_window() {
        let counts = WindowCounts { requested: 430, granted_total: 400, reserve_used: 30, ..Default::default() };
        let wanted = demand(counts, 59_000_000).hits_to_request();
        assert_eq!(wanted, 107, "a fourth of 430, where the mean of the window asks for 10");
    }

    #[test]
    fn at_least_one_hit_is_requested() {
        let counts = WindowCounts { requested: 1, granted: 500, granted_total: 500, ..Default::default() };
        assert_eq!(demand(counts, 59_999_999).hits_to_request(), 1);
        assert_eq!(demand(counts, 70_000_000).rest_us, 0, "a clock ahead of the window");
    }
}
