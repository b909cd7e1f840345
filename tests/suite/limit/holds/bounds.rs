//! What all holders and all other callers admit together never exceeds what the algorithm admits.
//!
//! Hits are counted at the moment at which they are admitted, by a holder too, which reports them later or never. The
//! reference knows no holds: in a window the sum of hits, in a sliding window the weighted count, in a bucket a level.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::Limit;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::hold::{CounterHolds, HeldAmount, HoldRequest, StateWithLimit};
use tollkeeper::limit::period::Unit;
use tollkeeper::limit::request::Hits;

use super::{HELD, SECOND_US, holder, lent, limit, spec};
use crate::limit::algorithms::scenario::config;

const HOLDERS: usize = 3;
const START_US: u64 = 1_767_225_600 * SECOND_US;

/// Form in which a holder admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Hits that it was lent, which it reports.
    Lent,
    /// A part of each window, or a bucket of its own, which it does not report.
    Rate,
}

#[derive(Clone, Debug)]
enum Event {
    /// A caller without a hold asks for hits.
    Charge(u64),
    /// A holder admits a part of what it may, in percent.
    Use(usize, u64),
    /// A holder reports and asks for hits, for a time in milliseconds.
    Adjust { holder: usize, wanted: u64, refill: u64, lasts_ms: u64 },
    /// A holder dies without a word, and another one starts in its place.
    Die(usize),
}

#[derive(Clone, Copy, Debug)]
enum Jump {
    Micros(u64),
    /// To the end of the window, and some microseconds.
    Boundary(i64),
    /// To the end of one of the last granted holds, and some microseconds.
    HoldEnd(usize, i64),
}

fn jump() -> impl Strategy<Value = Jump> {
    prop_oneof![
        6 => (0..1000_u64).prop_map(Jump::Micros),
        2 => (0..300_000_u64).prop_map(Jump::Micros),
        1 => (0..4_000_000_u64).prop_map(Jump::Micros),
        1 => (-2..=2_i64).prop_map(Jump::Boundary),
        1 => (0..4_usize, -2..=2_i64).prop_map(|(age, off)| Jump::HoldEnd(age, off)),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (1..30_u64).prop_map(Event::Charge),
        4 => (0..HOLDERS, 1..=100_u64).prop_map(|(holder, percent)| Event::Use(holder, percent)),
        4 => (0..HOLDERS, 0..80_u64, 0..80_u64, 1..2500_u64)
            .prop_map(|(holder, wanted, refill, lasts_ms)| Event::Adjust { holder, wanted, refill, lasts_ms }),
        1 => (0..HOLDERS).prop_map(Event::Die),
    ]
}

/// A holder, as its process sees itself.
#[derive(Clone, Debug)]
struct Process {
    id: u8,
    held: HeldAmount,
    /// Hits admitted and not reported.
    unreported: u64,
    /// Time until which it may admit.
    until: Time,
    /// Hits of the rate form in the window with this index.
    in_window: (u64, u64),
    /// Level of its own bucket in hits x period, and its time.
    level: (u128, Time),
}

/// The counter with its holders, and the reference.
struct World {
    limit: Limit,
    form: Form,
    state: State,
    held: CounterHolds,
    processes: Vec<Process>,
    now: Time,
    /// Ends of granted holds, newest last.
    ends: Vec<Time>,
    next_id: u8,
    /// All admitted hits with their times.
    admitted: Vec<(Time, u64)>,
}

impl World {
    fn new(limit: Limit, form: Form) -> Self {
        let process = |id| Process {
            id,
            held: HeldAmount::default(),
            unreported: 0,
            until: Time::default(),
            in_window: (0, 0),
            level: (0, Time::default()),
        };
        Self {
            limit,
            form,
            state: State::empty(limit.counting_method()),
            held: CounterHolds::default(),
            processes: (0..u8::try_from(HOLDERS).unwrap()).map(process).collect(),
            now: Time::from_micros(START_US),
            ends: vec![Time::from_micros(START_US)],
            next_id: 100,
            admitted: Vec::new(),
        }
    }

    fn advance(&mut self, jump: Jump) {
        let period_us = self.limit.period_us();
        let next = match jump {
            Jump::Micros(us) => self.now.plus_us(us),
            Jump::Boundary(off) => {
                let boundary = (self.now.as_micros() / period_us + 1) * period_us;
                Time::from_micros(boundary.saturating_add_signed(off))
            }
            Jump::HoldEnd(age, off) => {
                let end = self.ends.iter().rev().nth(age).copied().unwrap_or_default();
                Time::from_micros(end.as_micros().saturating_add_signed(off))
            }
        };
        self.now = self.now.max(next);
    }

    fn apply(&mut self, event: &Event) {
        let now = self.now;
        match *event {
            Event::Charge(hits) => {
                let lasting =
                    self.held.total_hold().and_then(|hold| hold.keep_or_settle(&self.limit, &mut self.state, now));
                if lasting.is_none() {
                    self.held.clear_total();
                }
                let lowered = lasting.map_or(self.limit, |hold| hold.lower_limit(&self.limit));
                let result = self.state.charge(&lowered, now, ChargeRequest::new(Hits::Charge(hits), 0));
                if result.admitted {
                    self.admitted.push((now, hits));
                }
            }
            Event::Use(index, percent) => {
                let free = self.free_hits(index);
                let process = &mut self.processes[index];
                let hits = (free * percent).div_ceil(100);
                if now < process.until && hits > 0 {
                    self.admitted.push((now, hits));
                    process.unreported += hits;
                    process.in_window.1 += hits;
                    process.level.0 += u128::from(hits) * u128::from(self.limit.period_us());
                }
            }
            Event::Adjust { holder, wanted, refill, lasts_ms } => self.adjust(holder, wanted, refill, lasts_ms * 1000),
            Event::Die(index) => {
                let process = &mut self.processes[index];
                (process.id, process.held, process.unreported) = (self.next_id, HeldAmount::default(), 0);
                (process.until, process.in_window) = (Time::default(), (0, 0));
                process.level = (0, Time::default());
                self.next_id += 1;
            }
        }
    }

    /// Hits that a holder may admit now.
    fn free_hits(&mut self, index: usize) -> u64 {
        let (now, period_us) = (self.now, self.limit.period_us());
        let process = &mut self.processes[index];
        let window = now.as_micros() / period_us;
        if process.in_window.0 != window {
            process.in_window = (window, 0);
        }
        let drained = u128::from(now.since_us(process.level.1)) * u128::from(process.held.hits);
        process.level = (process.level.0.saturating_sub(drained), now);
        match (self.form, self.limit.algorithm()) {
            (Form::Rate, Algorithm::TokenBucket) => {
                let level = process.level.0.div_ceil(u128::from(period_us));
                process.held.capacity.saturating_sub(u64::try_from(level).unwrap())
            }
            (Form::Rate, _) => process.held.hits.saturating_sub(process.in_window.1),
            (Form::Lent, _) => super::size(process.held).saturating_sub(process.unreported),
        }
    }

    fn adjust(&mut self, index: usize, wanted: u64, refill: u64, lasts_us: u64) {
        self.free_hits(index);
        let (now, limit) = (self.now, self.limit);
        let process = &mut self.processes[index];
        if process.until <= now {
            // The store charged the own bucket with the end of the hold. What was used is reported all the same: in
            // windows it is still held.
            process.level.0 = 0;
        }
        let is_bucket = limit.algorithm() == Algorithm::TokenBucket;
        let wanted = match self.form {
            Form::Rate if is_bucket => HeldAmount { hits: refill, capacity: wanted },
            _ => lent(limit.algorithm(), wanted),
        };
        let used = match self.form {
            Form::Lent => process.unreported,
            // What it gives up may have been used just now.
            Form::Rate if is_bucket => process.held.capacity.saturating_sub(wanted.capacity),
            Form::Rate => process.held.hits.saturating_sub(wanted.hits),
        };
        let request = HoldRequest { used, wanted, lasts_us, demand: wanted.hits, ..HoldRequest::default() };
        let answer = self.held.charge_used_and_grant(
            StateWithLimit { limit: &limit, state: &mut self.state },
            holder(process.id),
            request,
            now,
        );
        process.held = answer.granted;
        process.unreported = 0;
        process.until = now.plus_us(lasts_us);
        let most = u128::from(answer.granted.capacity) * u128::from(limit.period_us());
        process.level.0 = process.level.0.min(most);
        self.ends.push(answer.until);
    }

    /// Checks the admitted hits against the reference.
    fn check(&self) -> TestCaseResult {
        let (period_us, most) = (self.limit.period_us(), self.limit.requests_per_unit());
        let index = |at: Time| at.as_micros() / period_us;
        let (mut window, mut current, mut previous) = (0, 0_u64, 0_u64);
        let (mut level, mut last) = (0_u128, Time::default());
        for &(at, hits) in &self.admitted {
            if index(at) != window {
                previous = if index(at) == window + 1 { current } else { 0 };
                (window, current) = (index(at), 0);
            }
            current += hits;
            level = level.saturating_sub(u128::from(at.since_us(last)) * u128::from(most));
            level += u128::from(hits) * u128::from(period_us);
            last = at;
            match self.limit.algorithm() {
                Algorithm::FixedWindow => prop_assert!(current <= most, "{current} of {most} in a window at {at}"),
                Algorithm::SlidingWindowCounter => {
                    let left_us = period_us - at.as_micros() % period_us;
                    let weight = current + previous * left_us / period_us;
                    prop_assert!(weight <= most, "{weight} of {most} at {at}");
                }
                Algorithm::TokenBucket => {
                    let capacity = u128::from(self.limit.capacity()) * u128::from(period_us);
                    prop_assert!(level <= capacity, "{level} of {capacity} at {at}");
                }
                Algorithm::LeakyBucket | Algorithm::SlidingWindowLog | Algorithm::Concurrent => {
                    unreachable!("they cannot be held")
                }
            }
        }
        Ok(())
    }
}

fn check(limit: Limit, form: Form, events: &[(Jump, Event)]) -> TestCaseResult {
    let mut world = World::new(limit, form);
    for (jump, event) in events {
        world.advance(*jump);
        world.apply(event);
        world.check()?;
    }
    Ok(())
}

fn events() -> impl Strategy<Value = Vec<(Jump, Event)>> {
    proptest::collection::vec((jump(), event()), 1..80)
}

fn bucket(requests: u32, size: u32) -> Limit {
    let spec = spec(Algorithm::TokenBucket, requests, Unit::Second);
    Limit::new(&tollkeeper::limit::LimitSpec { bucket_size: Some(size), ..spec }).unwrap()
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn fixed_window_admits_its_limit_with_holds(requests in 1..100_u32, events in events(), lent in any::<bool>()) {
        let form = if lent { Form::Lent } else { Form::Rate };
        check(limit(Algorithm::FixedWindow, requests, Unit::Second), form, &events)?;
    }

    #[test]
    fn sliding_window_counter_admits_its_limit_with_holds(requests in 1..100_u32, events in events()) {
        check(limit(Algorithm::SlidingWindowCounter, requests, Unit::Second), Form::Lent, &events)?;
    }

    #[test]
    fn token_bucket_admits_its_limit_with_holds(
        requests in 1..100_u32, size in 1..100_u32, events in events(), lent in any::<bool>(),
    ) {
        check(bucket(requests, size), if lent { Form::Lent } else { Form::Rate }, &events)?;
    }

    #[test]
    fn all_that_fits_is_granted(
        requests in 1..100_u32, charged in 0..50_u64, wanted in 0..200_u64, place in 0..3_usize,
    ) {
        let limit = limit(HELD[place], requests, Unit::Second);
        let mut state = State::empty(limit.counting_method());
        let now = Time::from_micros(START_US);
        let charged = charged.min(u64::from(requests));
        state.charge(&limit, now, ChargeRequest::new(Hits::Charge(charged), 0));
        let mut held = CounterHolds::default();
        let free = u64::from(requests) - charged;
        let mut adjust = |number, hits| {
            let counter = StateWithLimit { limit: &limit, state: &mut state };
            held.charge_used_and_grant(counter, holder(number), super::hold(0, lent(HELD[place], hits)), now)
        };
        let answer = adjust(1, wanted);
        prop_assert_eq!(super::size(answer.granted), wanted.min(free));
        let rest = adjust(2, 1000);
        prop_assert_eq!(super::size(rest.granted), free - wanted.min(free));
        prop_assert_eq!(rest.others.len(), usize::from(wanted > 0));
    }
}

#[test]
fn hits_of_a_dead_holder_stay_held_until_the_end_and_return_once() {
    for algorithm in HELD {
        let limit = limit(algorithm, 100, Unit::Minute);
        let (mut state, mut held) = (State::empty(limit.counting_method()), CounterHolds::default());
        let start = Time::from_micros(START_US);
        let answer = held.charge_used_and_grant(
            StateWithLimit { limit: &limit, state: &mut state },
            holder(1),
            super::hold(0, lent(algorithm, 100)),
            start,
        );
        assert_eq!(super::size(answer.granted), 100, "{algorithm}");
        let one = ChargeRequest::new(Hits::Charge(1), 0);
        let admits = |at: Time| {
            let mut state = state.clone();
            let lasting = held.total_hold().and_then(|hold| hold.keep_or_settle(&limit, &mut state, at));
            state.charge(&lasting.map_or(limit, |hold| hold.lower_limit(&limit)), at, one).admitted
        };
        // A bucket refills one token in 0.6 s, a window ends, a sliding window is weighed in the next one.
        let free_after_us = match algorithm {
            Algorithm::TokenBucket => 20 * SECOND_US + 600_000,
            Algorithm::SlidingWindowCounter => 120 * SECOND_US,
            _ => 60 * SECOND_US,
        };
        assert!(!admits(start.plus_us(free_after_us - 1)), "{algorithm}");
        assert!(admits(start.plus_us(free_after_us)), "{algorithm}");
    }
}

#[test]
fn used_up_bucket_is_refilled_beside_a_hold_of_its_refill() {
    let limit = limit(Algorithm::TokenBucket, 50, Unit::Second);
    let (mut state, mut held) = (State::empty(limit.counting_method()), CounterHolds::default());
    let start = Time::from_micros(START_US);
    let all = HeldAmount { hits: 50, capacity: 50 };
    let mut adjust = |number, at| {
        let counter = StateWithLimit { limit: &limit, state: &mut state };
        held.charge_used_and_grant(counter, holder(number), super::hold(0, all), at).granted
    };
    assert_eq!(adjust(1, start), all);
    // The holder stood still, and its capacity is charged at the end of its hold.
    let ends = start.plus_us(20 * SECOND_US);
    assert_eq!(adjust(1, ends.plus_us(SECOND_US / 2)), HeldAmount { hits: 25, capacity: 25 });
    assert_eq!(adjust(1, ends.plus_us(2 * SECOND_US)), all);
}

#[test]
fn repeated_call_charges_its_hits_once() {
    for algorithm in HELD {
        let limit = limit(algorithm, 100, Unit::Minute);
        let (mut state, mut held) = (State::empty(limit.counting_method()), CounterHolds::default());
        let mut adjust = |number, used, wanted| {
            let counter = StateWithLimit { limit: &limit, state: &mut state };
            let request = HoldRequest { number, ..super::hold(used, lent(algorithm, wanted)) };
            super::size(held.charge_used_and_grant(counter, holder(1), request, Time::from_micros(START_US)).granted)
        };
        adjust(1, 0, 80);
        assert_eq!(adjust(2, 30, 50), 50, "{algorithm}");
        // Its answer was lost.
        assert_eq!(adjust(2, 30, 50), 50, "{algorithm}");
        assert_eq!(adjust(3, 10, 100), 60, "{algorithm}: 40 of 100 are used");
    }
}

/// Holds of pool 1 on a counter of 100 a minute.
struct Held {
    algorithm: Algorithm,
    limit: Limit,
    state: State,
    held: CounterHolds,
}

impl Held {
    fn of(algorithm: Algorithm) -> Self {
        let limit = limit(algorithm, 100, Unit::Minute);
        Self { algorithm, limit, state: State::empty(limit.counting_method()), held: CounterHolds::default() }
    }

    /// Asks for `wanted` hits for 2 s; returns how many are granted.
    fn ask(&mut self, number: u64, used: u64, wanted: u64, second: u64) -> u64 {
        let counter = StateWithLimit { limit: &self.limit, state: &mut self.state };
        let request = super::hold(used, lent(self.algorithm, wanted));
        let request = HoldRequest { number, first_number: number, lasts_us: 2 * SECOND_US, ..request };
        let now = Time::from_micros(START_US).plus_us(second * SECOND_US);
        super::size(self.held.charge_used_and_grant(counter, holder(1), request, now).granted)
    }

    fn ask_again(&mut self, [number, first_number]: [u64; 2], used: u64, second: u64) {
        let counter = StateWithLimit { limit: &self.limit, state: &mut self.state };
        let request = super::hold(used, HeldAmount::default());
        let request = HoldRequest { number, first_number, demand: 0, lasts_us: 2 * SECOND_US, ..request };
        let now = Time::from_micros(START_US).plus_us(second * SECOND_US);
        self.held.charge_used_and_grant(counter, holder(1), request, now);
    }

    /// Hits that are charged.
    fn charged(&self, second: u64) -> u64 {
        let now = Time::from_micros(START_US).plus_us(second * SECOND_US);
        self.state.clone().charge(&self.limit, now, ChargeRequest::new(Hits::Peek, 0)).before
    }
}

#[test]
fn request_repeated_after_the_end_of_a_hold_is_charged_once() {
    for algorithm in HELD {
        let mut held = Held::of(algorithm);
        held.ask(1, 0, 60, 0);
        held.ask(2, 30, 10, 1);
        // The answers are lost. The hold of a bucket ends at 3 s.
        for (second, number) in [(4, 3), (7, 4), (10, 5), (14, 6)] {
            held.ask_again([number, 2], 30, second);
        }
        let refilled = if algorithm == Algorithm::TokenBucket { 14 * 100 / 60 } else { 0 };
        let charged = held.charged(14);
        assert!((30 - refilled..=40).contains(&charged), "{algorithm}: {charged} charged");
    }
}

#[test]
fn late_request_forgets_nothing_of_a_later_one() {
    for algorithm in HELD {
        let mut held = Held::of(algorithm);
        held.ask(1, 0, 60, 0);
        // The third repeats the second; its answer is lost, the second arrives late, and the fourth repeats both.
        held.ask_again([3, 2], 30, 1);
        held.ask_again([2, 2], 30, 1);
        held.ask_again([4, 2], 30, 1);
        let charged = held.charged(1);
        assert!((28..=30).contains(&charged), "{algorithm}: {charged} charged");
    }
}

#[test]
fn pools_of_a_new_window_see_the_demand_of_the_one_before() {
    let mut held = Held::of(Algorithm::FixedWindow);
    held.ask(1, 0, 60, 55);
    let limit = held.limit;
    let demands_seen = |held: &mut Held, second: u64| {
        let counter = StateWithLimit { limit: &limit, state: &mut held.state };
        let now = Time::from_micros(START_US).plus_us(second * SECOND_US);
        let asked = super::hold(0, lent(held.algorithm, 10));
        let others = held.held.charge_used_and_grant(counter, holder(2), asked, now).others;
        others.iter().map(|other| (super::size(other.held), other.demand > 0)).collect::<Vec<_>>()
    };
    // START_US begins a minute.
    assert_eq!(demands_seen(&mut held, 59), [(60, true)]);
    assert_eq!(demands_seen(&mut held, 60), [(0, true)]);
    assert_eq!(demands_seen(&mut held, 69), [(0, true)]);
    assert_eq!(demands_seen(&mut held, 71), []);
}

#[test]
fn capacity_of_an_ended_hold_is_charged_once() {
    let mut held = Held::of(Algorithm::TokenBucket);
    assert_eq!(held.ask(1, 0, 60, 0), 60);
    // A decision finds the end of the hold, and settles it.
    let later = Time::from_micros(START_US).plus_us(3 * SECOND_US);
    let total = held.held.total_hold().expect("it holds something");
    assert_eq!(total.keep_or_settle(&held.limit, &mut held.state, later), None);
    held.held.clear_total();
    let before = held.charged(3);
    held.ask(2, 0, 0, 3);
    assert_eq!(held.charged(3), before);
}

#[test]
fn bucket_that_was_fitted_to_a_size_stays_so_while_hits_are_held() {
    // 1000 of 1000 are used, then the limit is 100, then 1000 again.
    let [large, small] = [1000, 100].map(|requests| limit(Algorithm::TokenBucket, requests, Unit::Hour));
    for is_held in [false, true] {
        let (mut state, mut held) = (State::empty(large.counting_method()), CounterHolds::default());
        let at = |second| Time::from_micros(START_US).plus_us(second * SECOND_US);
        state.charge(&large, at(0), ChargeRequest::new(Hits::Charge(1000), 0));
        state.charge(&small, at(400), ChargeRequest::new(Hits::Charge(1), 0));
        if is_held {
            for (number, wanted, second) in [(1, 10, 400), (2, 0, 430)] {
                let counter = StateWithLimit { limit: &small, state: &mut state };
                let request = HoldRequest { number, ..super::hold(0, lent(Algorithm::TokenBucket, wanted)) };
                held.charge_used_and_grant(counter, holder(1), request, at(second));
            }
        }
        let result = state.charge(&large, at(430), ChargeRequest::new(Hits::Peek, 0));
        assert!(result.remaining < 150, "held: {is_held}, {result:?}");
    }
}

#[test]
fn wild_numbers_are_bounded() {
    for algorithm in HELD {
        let limit = limit(algorithm, 100, Unit::Minute);
        let (mut state, mut held) = (State::empty(limit.counting_method()), CounterHolds::default());
        let now = Time::from_micros(START_US);
        let all = HeldAmount { hits: u64::MAX, capacity: u64::MAX };
        let wild = HoldRequest {
            used: u64::MAX,
            number: u64::MAX,
            first_number: 0,
            wanted: all,
            lasts_us: u64::MAX,
            demand: u64::MAX,
        };
        let answer =
            held.charge_used_and_grant(StateWithLimit { limit: &limit, state: &mut state }, holder(1), wild, now);
        assert_eq!(answer.granted, HeldAmount::default(), "{algorithm}: all room is debt");
        assert!(answer.until <= now.plus_us(3_600 * SECOND_US + 2 * limit.period_us()), "{algorithm}");
        for number in 0..=u8::MAX {
            held.charge_used_and_grant(
                StateWithLimit { limit: &limit, state: &mut state },
                holder(number),
                super::hold(0, HeldAmount::default()),
                now,
            );
            held.charge_used_and_grant(
                StateWithLimit { limit: &limit, state: &mut state },
                holder(number),
                HoldRequest { demand: 1, ..super::hold(0, lent(algorithm, 1)) },
                now,
            );
        }
        let answer = held.charge_used_and_grant(
            StateWithLimit { limit: &limit, state: &mut state },
            holder(1),
            super::hold(0, lent(algorithm, 1)),
            now,
        );
        assert!(answer.others.len() <= 128, "{algorithm}: {}", answer.others.len());
    }
}
