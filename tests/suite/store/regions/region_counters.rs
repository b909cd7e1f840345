//! Counters of a region, by the true time of the global Redis, which their calls know as an interval only.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use proptest::prelude::*;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::RegionLossPolicy;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::region::GRANT_ANSWER_TIMEOUT_US;
use tollkeeper::limit::algorithm::region::GlobalTimeAndStanding;
use tollkeeper::limit::algorithm::region_bucket::{BucketCounts, PrepaidHitsGrant};
use tollkeeper::limit::algorithm::region_window::HitsGrant;
use tollkeeper::limit::algorithm::region_window::WindowCounts;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{GlobalScope, Limit, LimitSpec, Overshoot, Scope};

/// Period of all limits here: 10 s.
const PERIOD_US: u64 = 10_000_000;
/// Time of the region's Redis at the start of each history.
const START_US: u64 = 1_783_512_000_000_000;

/// Upper bound on the hits of a grant, exclusive.
const MOST_GRANTED: u64 = 60;

/// Event at a counter.
#[derive(Clone, Copy, Debug)]
struct Event {
    /// Time since the event before, in microseconds.
    after_us: u64,
    /// Uncertainty of the interval below and above true global time, in microseconds.
    below_us: i64,
    above_us: i64,
    action: Action,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Charge(u64),
    Refund(u64),
    /// The open request is answered with so many hits, or with a rate and a capacity of so many.
    Grant(u64),
}

fn events(with_refunds: bool) -> impl Strategy<Value = Vec<Event>> {
    let uncertainty = || prop_oneof![Just(0_i64), 0..200_000_i64, 0..12_000_000_i64];
    let after = prop_oneof![2 => Just(0), 5 => 0..1_500_000_u64, 1 => 0..25_000_000_u64];
    let refunds = u32::from(with_refunds);
    let action = prop_oneof![
        6 => (1..40_u64).prop_map(Action::Charge),
        2 => (0..MOST_GRANTED).prop_map(Action::Grant),
        refunds => (1..60_u64).prop_map(Action::Refund),
    ];
    let event = (after, uncertainty(), uncertainty(), action)
        .prop_map(|(after_us, below_us, above_us, action)| Event { after_us, below_us, above_us, action });
    proptest::collection::vec(event, 1..120)
}

/// A global limit of 400 in 10 s over 4 regions: the reserve of each is 10, its loss allowance 2.
fn limit(algorithm: Algorithm, on_region_loss: RegionLossPolicy) -> Limit {
    let max_overshoot = Overshoot::MilliPercent(10_000);
    let scope = GlobalScope { on_region_loss, max_overshoot, ..GlobalScope::new(NonZeroU16::new(4).unwrap()) };
    let period = Period::new(Unit::Second, 10).unwrap();
    let spec = LimitSpec { scope: Some(Scope::Global(scope)), ..LimitSpec::new(algorithm, 400, period) };
    Limit::new(&spec).unwrap().as_counted_in_region()
}

/// Counter of a region whose global Redis is ahead by a constant time.
struct RegionCounter {
    limit: Limit,
    state: State,
    now: Time,
    offset_us: i64,
}

impl RegionCounter {
    fn new(limit: Limit, offset_us: i64) -> Self {
        Self { limit, state: State::empty(limit.counting_method()), now: Time::from_micros(START_US), offset_us }
    }

    fn advance(&mut self, event: &Event) {
        self.now = self.now.plus_us(event.after_us);
        let around = |us: i64| Time::from_micros(self.now.as_micros().saturating_add_signed(us));
        self.state.set_global_view(&GlobalTimeAndStanding {
            valid_from: around(-1),
            valid_until: around(1),
            offset_lo: self.offset_us - event.below_us,
            offset_hi: self.offset_us + event.above_us,
            can_request: true,
            ..GlobalTimeAndStanding::UNKNOWN
        });
    }

    fn charge(&mut self, hits: Hits) -> ChargeResult {
        self.state.charge(&self.limit, self.now, ChargeRequest::new(hits, 0))
    }

    /// True global time.
    fn global(&self) -> Time {
        Time::from_micros(self.now.as_micros().saturating_add_signed(self.offset_us))
    }

    fn window(&self) -> u64 {
        self.global().as_micros() / PERIOD_US
    }

    fn counts(&mut self) -> &mut WindowCounts {
        match &mut self.state {
            State::RegionWindow(state) => &mut state.counts,
            other => panic!("{other:?} is no window"),
        }
    }

    /// Answers the open request in the true window; true if the counter took it.
    fn grant(&mut self, hits: u64) -> bool {
        let grant = HitsGrant {
            request: self.state.open_grant_request_id(),
            window: self.window(),
            epoch: 0,
            hits,
            low: hits / 3,
            exhausted: false,
            next_request_at: self.now,
        };
        self.counts().accept_grant(&grant)
    }
}

proptest! {
    #[test]
    fn window_admits_its_grants_and_its_reserve(events in events(false), offset_us in -9_000_000..9_000_000_i64) {
        let limit = limit(Algorithm::FixedWindow, RegionLossPolicy::Deny);
        let mut counter = RegionCounter::new(limit, offset_us);
        let mut room: BTreeMap<u64, u64> = BTreeMap::new();
        for event in &events {
            counter.advance(event);
            let left = room.entry(counter.window()).or_insert(u64::from(limit.region_reserve()));
            match event.action {
                Action::Grant(hits) => *left += if counter.grant(hits) { hits } else { 0 },
                Action::Charge(hits) => {
                    if counter.charge(Hits::Charge(hits)).admitted {
                        prop_assert!(hits <= *left, "{hits} of {left} at {event:?}");
                        *left -= hits;
                    }
                }
                Action::Refund(_) => {}
            }
        }
    }

    #[test]
    fn refund_returns_what_the_window_spent_at_most(events in events(true)) {
        let limit = limit(Algorithm::FixedWindow, RegionLossPolicy::Deny);
        let mut counter = RegionCounter::new(limit, 0);
        for event in &events {
            counter.advance(event);
            match event.action {
                Action::Grant(hits) => { counter.grant(hits); }
                Action::Charge(hits) => { counter.charge(Hits::Charge(hits)); }
                Action::Refund(hits) => {
                    let result = counter.charge(Hits::Refund(hits));
                    prop_assert_eq!(result.before - result.after, if result.before == result.after { 0 } else {
                        hits.min(result.before)
                    });
                }
            }
            let reserve = u64::from(limit.region_reserve());
            let counts = *counter.counts();
            prop_assert!(counts.granted <= counts.granted_total);
            prop_assert!(counts.reserve_used <= reserve && counts.next_reserve_used <= reserve, "{counts:?}");
        }
    }

    #[test]
    fn grant_requests_are_opened_once_until_their_answer_is_overdue(
        events in events(true),
        algorithm in prop_oneof![Just(Algorithm::FixedWindow), Just(Algorithm::TokenBucket)],
    ) {
        let mut counter = RegionCounter::new(limit(algorithm, RegionLossPolicy::Share), 0);
        let mut opened_at = 0;
        for event in &events {
            counter.advance(event);
            let before = counter.state.open_grant_request_id();
            match event.action {
                Action::Charge(hits) => {
                    let is_admitted = counter.charge(Hits::Charge(hits)).admitted;
                    let request = counter.state.open_grant_request_id();
                    if request != before {
                        prop_assert!(request >= opened_at + GRANT_ANSWER_TIMEOUT_US, "{opened_at} and {request}");
                        opened_at = request;
                    } else if !is_admitted && event.below_us + event.above_us < 1_000_000 {
                        let answer_due_at_us = opened_at + GRANT_ANSWER_TIMEOUT_US;
                        prop_assert!(counter.now.as_micros() < answer_due_at_us, "a rejection without a request");
                    }
                }
                Action::Refund(hits) => { counter.charge(Hits::Refund(hits)); }
                Action::Grant(_) => {}
            }
        }
    }

    #[test]
    fn without_a_clock_only_the_loss_allowance_is_spent(
        events in events(false),
        algorithm in prop_oneof![Just(Algorithm::FixedWindow), Just(Algorithm::SlidingWindowCounter)],
        is_jump in any::<bool>(),
    ) {
        let limit = limit(algorithm, RegionLossPolicy::Share);
        let mut counter = RegionCounter::new(limit, 0);
        counter.advance(&Event { after_us: 0, below_us: 0, above_us: 0, action: Action::Charge(9) });
        counter.charge(Hits::Charge(9));
        prop_assert!(counter.grant(50));
        let before = *counter.counts();
        let mut spent: Vec<(u64, u64)> = Vec::new();
        for event in &events {
            counter.now = counter.now.plus_us(event.after_us);
            let valid_from = counter.now.plus_us(1);
            let jumped = GlobalTimeAndStanding { valid_from, valid_until: valid_from.plus_us(9), ..GlobalTimeAndStanding::UNKNOWN };
            counter.state.set_global_view(if is_jump { &jumped } else { &GlobalTimeAndStanding::UNKNOWN });
            let Action::Charge(hits) = event.action else { continue };
            let hits = hits % 3 + 1;
            let now_us = counter.now.as_micros();
            if counter.charge(Hits::Charge(hits)).admitted {
                spent.push((now_us, hits));
            }
            let in_span = spent.iter().filter(|(at, _)| at + PERIOD_US > now_us).map(|(_, hits)| hits).sum::<u64>();
            prop_assert!(in_span <= 2 * limit.cut_off_allowance(), "{in_span} in a period");
            let counts = *counter.counts();
            prop_assert_eq!((counts.granted, counts.reserve_used), (before.granted, before.reserve_used));
            prop_assert_eq!(counts.cycle.open_request, 0);
        }
    }

    #[test]
    fn bucket_admits_its_own_tokens_and_prepaid_hits_until_they_end(
        events in events(true),
        jumps in proptest::collection::vec(proptest::option::weighted(0.1, -60_000_000..60_000_000_i64), 120),
        offset_us in -9_000_000..9_000_000_i64,
    ) {
        let limit = limit(Algorithm::TokenBucket, RegionLossPolicy::Deny);
        let mut counter = RegionCounter::new(limit, offset_us);
        // Tokens x period of a bucket that knows global time exactly, with what half of the overshoot adds; and prepaid
        // hits that have not ended by true global time.
        let (rate, capacity) = (u64::from(limit.region_reserve()), u64::from(limit.region_capacity()));
        let most = capacity * PERIOD_US + limit.clock_slack_us() * rate;
        let (mut units, mut last) = (most, counter.global());
        let mut prepaid: Vec<(Time, u64)> = Vec::new();
        for (event, jump) in events.iter().zip(&jumps) {
            if let Some(jump_us) = jump {
                counter.now = Time::from_micros(counter.now.as_micros().saturating_add_signed(*jump_us));
                counter.offset_us -= jump_us;
            }
            counter.advance(event);
            let now = counter.global();
            units = (units + now.since_us(last) * rate).min(most);
            last = now;
            prepaid.retain(|(end, _)| *end > now);
            match event.action {
                Action::Grant(hits) => {
                    let end = now.plus_us(hits * 100_000);
                    let grant = PrepaidHitsGrant {
                        request: counter.state.open_grant_request_id(),
                        epoch: 0,
                        hits,
                        low: hits / 3,
                        start: now,
                        end,
                        exhausted: false,
                        next_request_at: counter.now,
                    };
                    let State::RegionBucket(state) = &mut counter.state else { panic!("no bucket") };
                    if state.counts.accept_grant(capacity, &grant) {
                        prepaid.push((end, hits));
                        prepaid.sort_unstable();
                    }
                }
                Action::Charge(hits) => {
                    if counter.charge(Hits::Charge(hits)).admitted {
                        let mut rest = hits;
                        for (_, left) in &mut prepaid {
                            let spent = rest.min(*left);
                            (*left, rest) = (*left - spent, rest - spent);
                        }
                        prop_assert!(rest * PERIOD_US <= units, "{rest} of {units} at {event:?}");
                        units -= rest * PERIOD_US;
                    }
                }
                // What is returned may be admitted again.
                Action::Refund(hits) => {
                    let result = counter.charge(Hits::Refund(hits));
                    let returned = result.before - result.after;
                    let own = returned.min((most - units) / PERIOD_US);
                    units = (units + returned * PERIOD_US).min(most);
                    if let Some((_, left)) = prepaid.last_mut() {
                        *left += returned - own.min(returned);
                    }
                }
            }
        }
    }
}

/// As after a clock of the global Redis that was set back.
#[test]
fn grants_before_the_last_end_when_the_first_of_them_does() {
    let at = |seconds: u64| Time::from_micros(seconds * 1_000_000);
    let mut counts =
        BucketCounts { granted: 5, granted_until: at(7), earlier: 4, earlier_until: at(9), ..Default::default() };
    counts.cycle.open_request = 1;
    let grant = PrepaidHitsGrant {
        request: 1,
        epoch: 0,
        hits: 3,
        low: 1,
        start: at(1),
        end: at(8),
        exhausted: false,
        next_request_at: at(1),
    };
    assert!(counts.accept_grant(10, &grant));
    assert_eq!((counts.earlier, counts.earlier_until), (9, at(7)));
}

proptest! {
    #[test]
    fn lent_hits_end_with_their_window(
        (below_us, above_us) in (0..3_000_000_i64, 0..3_000_000_i64),
        offset_us in -9_000_000..9_000_000_i64,
        later in 0..100_u64,
    ) {
        for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindowCounter] {
            let mut counter = RegionCounter::new(limit(algorithm, RegionLossPolicy::Deny), offset_us);
            counter.advance(&Event { after_us: 0, below_us, above_us, action: Action::Charge(1) });
            if counter.charge(Hits::Charge(1)).admitted {
                let window = counter.counts().window;
                let left_us = counter.state.grant_time_left_us(&counter.limit, counter.now);
                let last_us = (left_us * later / 100).min(left_us.saturating_sub(1));
                let global_us = counter.global().as_micros() + last_us;
                prop_assert!(left_us == 0 || global_us / PERIOD_US == window, "{global_us} is not in {window}");
                prop_assert!(left_us + above_us.unsigned_abs() <= PERIOD_US);
            }
        }
    }
}

/// Clock of a call at `now`, when global time is exactly `offset_us` later.
fn exact_clock(now: Time, offset_us: i64) -> GlobalTimeAndStanding {
    let (valid_from, valid_until) = (now, now.plus_us(1));
    GlobalTimeAndStanding {
        valid_from,
        valid_until,
        offset_lo: offset_us,
        offset_hi: offset_us,
        ..GlobalTimeAndStanding::UNKNOWN
    }
}

#[test]
fn jump_of_the_regions_clock_refills_no_tokens() {
    const HOUR_US: i64 = 3_600_000_000;
    let limit = limit(Algorithm::TokenBucket, RegionLossPolicy::Deny);
    for jump_us in [HOUR_US, -HOUR_US, 1_000_000] {
        for is_known_at_once in [true, false] {
            let mut counter = RegionCounter::new(limit, 0);
            counter.state.set_global_view(&exact_clock(counter.now, 0));
            assert!(counter.charge(Hits::Charge(10)).admitted, "all that the region always has");
            counter.now = Time::from_micros(counter.now.as_micros().saturating_add_signed(jump_us));
            if !is_known_at_once {
                counter.state.set_global_view(&GlobalTimeAndStanding::UNKNOWN);
                assert!(!counter.charge(Hits::Charge(1)).admitted, "{jump_us}");
            }
            counter.state.set_global_view(&exact_clock(counter.now, -jump_us));
            assert!(!counter.charge(Hits::Charge(1)).admitted, "{jump_us}");
            // A tenth of the period later by global time, and by that of the region.
            counter.now = counter.now.plus_us(PERIOD_US / 10);
            counter.state.set_global_view(&exact_clock(counter.now, -jump_us));
            assert!(counter.charge(Hits::Charge(1)).admitted && !counter.charge(Hits::Charge(1)).admitted, "{jump_us}");
        }
    }
}

#[test]
fn tokens_spent_at_an_unknown_time_do_not_refill_twice() {
    let limit = limit(Algorithm::TokenBucket, RegionLossPolicy::Deny);
    let mut counter = RegionCounter::new(limit, 0);
    counter.state.set_global_view(&exact_clock(counter.now, 0));
    assert!(counter.charge(Hits::Charge(1)).admitted);
    counter.now = counter.now.plus_us(10 * PERIOD_US);
    counter.state.set_global_view(&GlobalTimeAndStanding::UNKNOWN);
    assert!(counter.charge(Hits::Charge(9)).admitted);
    // Known to half a period at first, then exactly.
    for offset_lo in [-5_000_000, 0] {
        counter.now = counter.now.plus_us(1);
        counter.state.set_global_view(&GlobalTimeAndStanding { offset_lo, ..exact_clock(counter.now, 0) });
        assert!(!counter.charge(Hits::Charge(2)).admitted, "they were spent 2 us ago");
    }
}

/// A span of one period by another clock, which runs slower by 1000 ppm, lasts so long by the region's, in
/// microseconds.
const DRIFTED_PERIOD_US: u64 = PERIOD_US + PERIOD_US / 1000;

#[test]
fn period_meets_two_loss_allowances_however_clocks_drift() {
    let limit = limit(Algorithm::FixedWindow, RegionLossPolicy::Share);
    for length in [PERIOD_US, DRIFTED_PERIOD_US] {
        let mut counter = RegionCounter::new(limit, 0);
        counter.state.set_global_view(&GlobalTimeAndStanding::UNKNOWN);
        let start = counter.now;
        let mut admitted: Vec<u64> = Vec::new();
        // Of the first period, one hit at its start and the others at its end; then all at the start of each.
        for (at_us, hits) in [(0, 1), (length - 1, 4), (length, 4), (2 * length - 1, 4), (2 * length, 4)] {
            counter.now = start.plus_us(at_us);
            let all = (0..hits).filter(|_| counter.charge(Hits::Charge(1)).admitted);
            admitted.extend(all.map(|_| at_us).collect::<Vec<_>>());
            let in_span = admitted.iter().filter(|at| *at + DRIFTED_PERIOD_US > at_us).count();
            assert!(in_span as u64 <= 2 * limit.cut_off_allowance(), "{in_span} hits in a period");
        }
        assert!(admitted.len() >= 4, "{admitted:?}");
    }
}

#[test]
fn only_an_allowance_that_is_a_part_of_the_limit_needs_the_other_regions() {
    let cases = [
        (RegionLossPolicy::Share, 0),
        (RegionLossPolicy::Deny, 0),
        (RegionLossPolicy::Local, 100),
        (RegionLossPolicy::Allow, 400),
    ];
    for (algorithm, (policy, expected)) in
        [Algorithm::FixedWindow, Algorithm::TokenBucket].into_iter().flat_map(|it| cases.map(|case| (it, case)))
    {
        let mut counter = RegionCounter::new(limit(algorithm, policy), 0);
        let mut admitted = |view: GlobalTimeAndStanding| {
            counter.state.set_global_view(&view);
            (0..400).filter(|_| counter.charge(Hits::Charge(1)).admitted).count()
        };
        let in_doubt = GlobalTimeAndStanding { cut_off: true, parts_unusable: true, ..GlobalTimeAndStanding::UNKNOWN };
        let valid_from = Time::from_micros(START_US + 1);
        let displaced = GlobalTimeAndStanding { valid_from, valid_until: valid_from.plus_us(9), ..in_doubt };
        assert_eq!(admitted(displaced), 0, "{algorithm:?} {policy:?}: a clock jumped");
        assert_eq!(admitted(in_doubt), expected, "{algorithm:?} {policy:?}");
    }
}
