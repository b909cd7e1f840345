//! Use of global limits: hits go where the demand is, over regions in a simulation without faults.
//!
//! Regions ask and are answered as their processes do it, over links with a delay. The counters are those of both
//! Redis. Requests are spread evenly over time. `cargo test --test suite regions::demand -- --nocapture` prints what
//! each period admits, in percent of the limit, and the number of grant requests.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::global_bucket::{self, TermRequest, TokenPool};
use tollkeeper::limit::algorithm::global_window::{self, WindowPool, WindowReturn};
use tollkeeper::limit::algorithm::region::GlobalView;
use tollkeeper::limit::algorithm::region::REQUEST_INTERVAL_US;
use tollkeeper::limit::algorithm::region_bucket::RateGrant;
use tollkeeper::limit::algorithm::region_window::HitsGrant;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{GlobalScope, Limit, LimitSpec, Scope};
use tollkeeper::store::redis::regions::demand::{BucketDemand, WindowDemand};

const REGIONS: usize = 3;
const LIMIT: u32 = 1200;
const PERIOD_US: u64 = 60_000_000;
const PERIODS: usize = 7;
/// Start of a window.
const START_US: u64 = 1_783_512_000_000_000;
const STEP_US: u64 = 10_000;

const ALGORITHMS: [Algorithm; 3] = [Algorithm::FixedWindow, Algorithm::SlidingWindowCounter, Algorithm::TokenBucket];
const DELAYS_MS: [u64; 3] = [50, 150, 300];

/// Requests of all regions.
#[derive(Clone, Copy)]
struct Demand {
    /// Hits per period, in percent of the limit.
    percent: u64,
    /// Parts of the regions in percent, in a period.
    parts: fn(usize) -> [u64; REGIONS],
    /// The first region dies at [`DEATH_US`].
    first_dies: bool,
}

impl Demand {
    /// Demand of 1.3 times the limit, without a death.
    const fn over_limit(parts: fn(usize) -> [u64; REGIONS]) -> Self {
        Self { percent: 130, parts, first_dies: false }
    }
}

/// Time of the death: in the middle of a window.
const DEATH_US: u64 = START_US + 3 * PERIOD_US + PERIOD_US / 2;

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
    Term {
        region: usize,
        term: RateGrant,
    },
    /// The unused hits of a window leave the region's counter.
    GiveBack {
        region: usize,
        window: u64,
    },
    Return(WindowReturn),
}

#[derive(Clone, Copy, Debug)]
enum Ask {
    Window { request: u64, demand: WindowDemand },
    Bucket { request: u64, demand: BucketDemand },
}

struct Simulation {
    limit: Limit,
    now_us: u64,
    delay_us: u64,
    regions: [State; REGIONS],
    windows: global_window::State,
    bucket: global_bucket::State,
    messages: BTreeMap<(u64, u64), Message>,
    sent: u64,
    /// Times at which hits were admitted.
    admitted: Vec<u64>,
    /// Times at which grant requests were opened.
    requests: Vec<u64>,
    is_first_dead: bool,
}

impl Simulation {
    fn run(algorithm: Algorithm, delay_ms: u64, demand: Demand) -> Self {
        let scope = Scope::Global(GlobalScope::new(NonZeroU16::new(3).expect("it is positive")));
        let period = Period::new(Unit::Minute, 1).expect("it is a period");
        let spec = LimitSpec { scope: Some(scope), ..LimitSpec::new(algorithm, LIMIT, period) };
        let limit = Limit::new(&spec).expect("the limit is valid").in_region();
        let mut simulation = Self {
            limit,
            now_us: START_US,
            delay_us: delay_ms * 1000,
            regions: std::array::from_fn(|_| State::empty(limit.counting())),
            windows: global_window::State::default(),
            bucket: global_bucket::State::default(),
            messages: BTreeMap::new(),
            sent: 0,
            admitted: Vec::new(),
            requests: Vec::new(),
            is_first_dead: false,
        };
        // Ten-thousandths of a hit.
        let mut due = [0; REGIONS];
        for step in 0..PERIODS as u64 * PERIOD_US / STEP_US {
            simulation.now_us = START_US + step * STEP_US;
            simulation.is_first_dead = demand.first_dies && simulation.now_us >= DEATH_US;
            simulation.deliver();
            let mut parts = (demand.parts)(usize::try_from(step * STEP_US / PERIOD_US).expect("it is small"));
            if simulation.is_first_dead {
                (parts[0], parts[1]) = (0, parts[0] + parts[1]);
            }
            for region in 0..REGIONS {
                due[region] += demand.percent * u64::from(LIMIT) * STEP_US * parts[region] / PERIOD_US;
                while due[region] >= 10_000 {
                    due[region] -= 10_000;
                    simulation.charge(region);
                }
            }
        }
        simulation
    }

    fn now(&self) -> Time {
        Time::from_micros(self.now_us)
    }

    /// Clock of a process that has measured the round trip only.
    fn clock(&self) -> GlobalView {
        let half = i64::try_from(self.delay_us / 2).expect("it is small");
        let (valid_from, valid_until) = (Time::from_micros(0), Time::from_micros(1 << 53));
        let (offset_lo, offset_hi) = (-half, half);
        GlobalView { valid_from, valid_until, offset_lo, offset_hi, can_request: true, ..GlobalView::UNKNOWN }
    }

    fn send(&mut self, after_us: u64, message: Message) {
        self.sent += 1;
        self.messages.insert((self.now_us + after_us, self.sent), message);
    }

    fn charge(&mut self, region: usize) {
        let (now, clock) = (self.now(), self.clock());
        let state = &mut self.regions[region];
        let before = state.open_request();
        state.set_view(&clock);
        if state.charge(&self.limit, now, ChargeRequest::new(Hits::Charge(1), 0)).admitted {
            self.admitted.push(self.now_us);
        }
        let request = state.open_request();
        if request == before || request == 0 {
            return;
        }
        let ask = match state {
            State::RegionWindow(state) => {
                let reserve = u64::from(self.limit.region_reserve());
                Ask::Window { request, demand: WindowDemand::at(&state.counts, reserve, PERIOD_US, self.now_us) }
            }
            State::RegionBucket(state) => {
                Ask::Bucket { request, demand: BucketDemand::at(&self.limit, &state.counts, self.now_us) }
            }
            other => panic!("{other:?} is not counted in a region"),
        };
        self.requests.push(self.now_us);
        self.send(self.delay_us / 2, Message::Request { region, ask });
    }

    fn deliver(&mut self) {
        let (now, clock) = (self.now(), self.clock());
        while let Some(entry) = self.messages.first_entry().filter(|entry| entry.key().0 <= now.as_micros()) {
            match entry.remove() {
                Message::Request { region, ask } => self.answer(region, ask),
                Message::Grant { region, grant } => self.give(region, &grant),
                Message::Term { region, term } => {
                    let State::RegionBucket(state) = &mut self.regions[region] else { panic!("it is no bucket") };
                    *state.view = clock;
                    state.take_grant(&self.limit, now, &term);
                }
                // Its process died too.
                Message::GiveBack { region: 0, .. } if self.is_first_dead => {}
                Message::GiveBack { region, window } => {
                    let State::RegionWindow(state) = &mut self.regions[region] else { panic!("it has no windows") };
                    let hits = state.counts.give_back(window);
                    self.send(self.delay_us / 2, Message::Return(WindowReturn { window, hits, epoch: now }));
                }
                Message::Return(unused) => {
                    self.windows.take_back(now, self.pool(), unused);
                }
            }
        }
    }

    fn pool(&self) -> WindowPool {
        let is_sliding = self.limit.algorithm() == Algorithm::SlidingWindowCounter;
        WindowPool { period_us: PERIOD_US, is_sliding, max: self.limit.max_granted() }
    }

    fn answer(&mut self, region: usize, ask: Ask) {
        let now = self.now();
        let answer = match ask {
            Ask::Window { request, demand } => {
                let grant = self.windows.grant(now, self.pool(), demand.wanted());
                let (hits, exhausted) = (u64::from(grant.hits), grant.hits == 0);
                let is_over = exhausted && self.limit.algorithm() == Algorithm::FixedWindow;
                let pause_us = if is_over { demand.rest_us.min(5_000_000) } else { 0 }.max(REQUEST_INTERVAL_US);
                let next_request_at = Time::from_micros(request).plus_us(pause_us);
                let (window, low) = (grant.window, demand.low_after(hits));
                let grant = HitsGrant { request, window, epoch: 0, hits, low, exhausted, next_request_at };
                Message::Grant { region, grant }
            }
            Ask::Bucket { request, demand: BucketDemand { wanted, term_us } } => {
                let pool = TokenPool::of(&self.limit);
                let number = u32::try_from(region).expect("it is small");
                let grant = self.bucket.grant(now, TermRequest { region: number, wanted, term_us, pool });
                let Some(grant) = grant else { return };
                let pause_us = BucketDemand { wanted, term_us }.pause_us(grant.rate);
                let term = RateGrant {
                    request,
                    epoch: 0,
                    rate: grant.rate,
                    capacity: grant.capacity,
                    start: now,
                    end: grant.end,
                    exhausted: grant.rate < wanted,
                    next_request_at: Time::from_micros(request).plus_us(pause_us),
                };
                Message::Term { region, term }
            }
        };
        self.send(self.delay_us / 2, answer);
    }

    fn give(&mut self, region: usize, grant: &HitsGrant) {
        let State::RegionWindow(state) = &mut self.regions[region] else { panic!("it has no windows") };
        let is_first = state.counts.granted_total == 0;
        if state.counts.take_grant(grant) && is_first && self.limit.algorithm() == Algorithm::SlidingWindowCounter {
            let rest_us = ((grant.window + 1) * PERIOD_US).saturating_sub(self.now_us);
            let after_us = rest_us.saturating_sub((2 * self.delay_us).max(1_000_000));
            self.send(after_us, Message::GiveBack { region, window: grant.window });
        }
    }

    /// Hits admitted in each period, in percent of the limit.
    fn percents(&self) -> [u64; PERIODS] {
        let mut admitted = [0; PERIODS];
        for at_us in &self.admitted {
            admitted[usize::try_from((at_us - START_US) / PERIOD_US).expect("it is small")] += 1;
        }
        admitted.map(|hits: u64| 100 * hits / u64::from(LIMIT))
    }
}

/// Asserts that at least 90 % of the limit is admitted in each of some periods, and the bound on grant requests.
fn assert_used(name: &str, demand: Demand, periods: impl Fn(usize) -> bool) {
    let mut missed = Vec::new();
    for (algorithm, delay_ms) in ALGORITHMS.into_iter().flat_map(|it| DELAYS_MS.map(|delay_ms| (it, delay_ms))) {
        let run = Simulation::run(algorithm, delay_ms, demand);
        let percents = run.percents();
        let text = format!("{name:10} {algorithm:?} {delay_ms} ms: {percents:?} %, {} requests", run.requests.len());
        println!("{text}");
        // Each second at most, in each region.
        let seconds = usize::try_from(PERIODS as u64 * PERIOD_US / REQUEST_INTERVAL_US).expect("it is small");
        assert!(run.requests.len() <= seconds * REGIONS, "{text}");
        if percents.iter().enumerate().any(|(period, percent)| periods(period) && *percent < 90) {
            missed.push(text);
        }
    }
    assert!(missed.is_empty(), "less than 90 % of the limit:\n{}", missed.join("\n"));
}

#[test]
fn one_region_gets_the_limit_within_three_periods() {
    assert_used("one", Demand::over_limit(|_| [100, 0, 0]), |period| period >= 2);
}

#[test]
fn uneven_demand_is_admitted() {
    assert_used("even", Demand::over_limit(|_| [34, 33, 33]), |period| period >= 2);
    assert_used("uneven", Demand::over_limit(|_| [80, 15, 5]), |period| period >= 2);
}

#[test]
fn demand_that_moves_is_followed_within_a_period() {
    let parts = |period| if period < 3 { [90, 5, 5] } else { [0, 100, 0] };
    assert_used("moving", Demand::over_limit(parts), |period| period == 2 || period >= 4);
}

#[test]
fn part_of_a_dead_region_is_used_by_the_others() {
    let demand = Demand { first_dies: true, ..Demand::over_limit(|_| [60, 30, 10]) };
    // A window that the region was granted counts in the next one too.
    assert_used("dead", demand, |period| period == 2 || period >= 5);
}

#[test]
fn few_grants_are_requested_far_from_the_limit() {
    for (algorithm, delay_ms) in ALGORITHMS.into_iter().flat_map(|it| DELAYS_MS.map(|delay_ms| (it, delay_ms))) {
        let demand = Demand { percent: 30, parts: |_| [80, 15, 5], first_dies: false };
        let run = Simulation::run(algorithm, delay_ms, demand);
        let percents = run.percents();
        assert!(percents.iter().all(|percent| *percent >= 29), "all of it is admitted: {algorithm:?} {percents:?}");
        // In the first period regions learn the demand.
        let later = run.requests.iter().filter(|at_us| **at_us >= START_US + PERIOD_US).count();
        println!("far        {algorithm:?} {delay_ms} ms: {percents:?} %, {later} requests after the first period");
        assert!(later <= 2 * REGIONS * (PERIODS - 1), "{algorithm:?}: {later} requests");
    }
}
