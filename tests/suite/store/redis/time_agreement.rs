//! Rust and Lua agree on windows of a calendar and on bans, in random histories with several counters.
//!
//! Replicas with other zone data use one counter: the limits of a counter alternate between zones. In calls at the
//! server's time, the caller's clock is off by up to a quarter of a period.

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{TestCaseResult, TestRunner};
use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::ban::Ban;
use tollkeeper::limit::calendar::{TimeOfDay, Weekday, Zone};
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult};
use tollkeeper::limit::period::{MAX_PERIOD_US, Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::window::{MonthLength, WindowSpec};
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};

use super::agreement::{Redis, ScriptForm, alike, expected};
use crate::limit::algorithms::scenario;
use kit::redis::options;

/// Pairs of zones whose windows begin at different times.
const ZONES: [[&str; 2]; 4] = [
    ["Europe/Berlin", "Europe/London"],
    ["Australia/Lord_Howe", "Asia/Kolkata"],
    ["Pacific/Apia", "America/New_York"],
    ["UTC", "Africa/Casablanca"],
];

#[derive(Clone, Debug)]
struct History {
    /// For each key, the limits that charges use in turn.
    keys: Vec<Vec<(Limit, bool)>>,
    start: Time,
    calls: Vec<Call>,
    /// Thousandths of a quarter of the shortest period by which the caller's clock is ahead.
    skew: i64,
}

#[derive(Clone, Copy, Debug)]
enum Jump {
    Micros(u64),
    /// Thousandths of the first limit's period.
    Share(u64),
    /// To the last result's reset, and some microseconds.
    Reset(i64),
    /// To the last result's retry_after, and some microseconds.
    Retry(i64),
    /// Thousandths of the first limit's period back.
    Back(u64),
}

/// A call of one replica, whose charges have the limits that it knows.
#[derive(Clone, Debug)]
struct Call {
    jump: Jump,
    limit: Index,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
struct Step {
    /// Negative: a refund; 0: a peek.
    hits: i64,
    dry_run: bool,
    /// A client asks.
    is_sent_by_client: bool,
    times: usize,
}

fn window() -> impl Strategy<Value = [WindowSpec; 2]> {
    let day_starts = proptest::sample::select(&["00:00", "02:30", "06:00"][..]);
    let days = (day_starts, proptest::sample::select(&Weekday::ALL[..]), 1..=31_u8, any::<bool>());
    (proptest::sample::select(&ZONES[..]), days).prop_map(|(zones, (day_starts, week_starts, month_day, calendar))| {
        zones.map(|zone| WindowSpec {
            day_starts: TimeOfDay::parse(day_starts).unwrap(),
            week_starts,
            month_day,
            month: if calendar { MonthLength::Calendar } else { MonthLength::ThirtyDays },
            ..WindowSpec::in_zone(Zone::from_name(zone).unwrap())
        })
    })
}

fn key() -> impl Strategy<Value = Vec<(Limit, bool)>> {
    let period = proptest::sample::select(
        &[
            (Unit::Second, 1),
            (Unit::Minute, 1),
            (Unit::Hour, 1),
            (Unit::Hour, 6),
            (Unit::Day, 1),
            (Unit::Day, 3),
            (Unit::Week, 1),
            (Unit::Month, 1),
            (Unit::Month, 2),
            (Unit::Year, 1),
        ][..],
    );
    let algorithm = prop_oneof![2 => Just(Algorithm::FixedWindow), 1 => proptest::sample::select(&Algorithm::ALL[..])];
    let ban = proptest::option::weighted(0.6, (1..3_000_u64, 1..5_u32, any::<bool>()));
    let limits = proptest::collection::vec((0..8_u32, any::<bool>(), proptest::bool::weighted(0.8)), 2..=2);
    (algorithm, period, proptest::option::weighted(0.7, window()), ban, limits).prop_map(
        |(algorithm, (unit, multiplier), window, ban, limits)| {
            let period = Period::new(unit, multiplier).unwrap();
            // A ban of up to three periods.
            let ban = ban.map(|(share, after, counts_peeks)| {
                let ban = Ban::new((period.micros() / 1000 * share).min(MAX_PERIOD_US), after).unwrap();
                ban.with_count_of_peeks(counts_peeks)
            });
            let window = window.filter(|_| algorithm == Algorithm::FixedWindow);
            let limit = |(place, (requests, counted, enforced)): (usize, (u32, bool, bool))| {
                let spec = LimitSpec {
                    window: window.map(|window| window[place]),
                    ban,
                    count_rejected: Some(counted && algorithm != Algorithm::LeakyBucket),
                    ..LimitSpec::new(algorithm, requests.into(), period)
                };
                (Limit::new(&spec).unwrap(), enforced)
            };
            limits.into_iter().enumerate().map(limit).collect()
        },
    )
}

fn history() -> impl Strategy<Value = History> {
    let off = -1..=1_i64;
    let jump = prop_oneof![
        3 => (0..4_u64).prop_map(Jump::Micros),
        3 => (0..1_500_u64).prop_map(Jump::Share),
        3 => off.clone().prop_map(Jump::Reset),
        3 => off.prop_map(Jump::Retry),
        1 => (0..3_000_u64).prop_map(Jump::Back),
    ];
    let hits = prop_oneof![3 => Just(0), 8 => 1..4_i64, 1 => 4..10_i64, 1 => -4..0_i64];
    let times = prop_oneof![4 => Just(1), 1 => 2..6_usize];
    let step = (hits, proptest::bool::weighted(0.1), any::<bool>(), times);
    let step =
        step.prop_map(|(hits, dry_run, is_sent_by_client, times)| Step { hits, dry_run, is_sent_by_client, times });
    let call = (jump, any::<Index>(), proptest::collection::vec(step, 1..5));
    let call = call.prop_map(|(jump, limit, steps)| Call { jump, limit, steps });
    let calls = proptest::collection::vec(call, 1..20);
    // Ten years, with changes of the clock.
    let start = (1_500_000_000_000_000..1_815_000_000_000_000_u64).prop_map(Time::from_micros);
    (proptest::collection::vec(key(), 1..=3), start, calls, -1000..=1000_i64)
        .prop_map(|(keys, start, calls, skew)| History { keys, start, calls, skew })
}

impl History {
    fn charges(&self, limit: Index, step: &Step) -> impl Iterator<Item = OwnedCharge> + use<> {
        let counter = |limits: &Vec<(Limit, bool)>| {
            let &(limit, enforced) = limit.get(limits);
            OwnedCounter { limit, shadow: !enforced, quota: false, tag: 0 }
        };
        let counters: SmallVec<[_; 1]> = self.keys.iter().map(counter).collect();
        let hits = match step.hits {
            0 => Hits::Peek,
            hits if hits < 0 => Hits::Refund(hits.unsigned_abs()),
            hits => Hits::Charge(hits.unsigned_abs()),
        };
        let request = ChargeRequest { is_sent_by_client: step.is_sent_by_client, ..ChargeRequest::new(hits, 0) };
        let charge = OwnedCharge { dry_run: step.dry_run, ..OwnedCharge::new(counters, request) };
        std::iter::repeat_n(charge, step.times)
    }

    fn run(&self, redis: &mut Redis) -> TestCaseResult {
        let first: Vec<Limit> = self.keys.iter().map(|limits| limits[0].0).collect();
        let mut names = redis.new_keys(first.len());
        let bans = names.iter().zip(&first).filter(|(_, limit)| limit.ban().is_some());
        let bans: Vec<String> = bans.map(|(name, _)| format!("{name}:ban")).collect();
        names.extend(bans);
        let shortest_us = first.iter().map(Limit::period_us).min().unwrap_or(0);
        redis.caller_ahead_us = i64::try_from(shortest_us / 4000).unwrap() * self.skew;
        let mut states: Vec<State> = first.iter().map(State::empty_for).collect();
        let (mut now, mut last) = (self.start, ChargeResult::default());
        for Call { jump, limit, steps } in &self.calls {
            let period_us = first[0].period_us();
            let later = |us: u64, off: i64| now.plus_us(us).as_micros().saturating_add_signed(off);
            now = Time::from_micros(match *jump {
                Jump::Micros(us) => later(us, 0),
                Jump::Share(share) => later(period_us / 1000 * share, 0),
                Jump::Reset(off) => later(last.reset_us, off),
                Jump::Retry(off) => later(last.retry_after_us.unwrap_or(0), off),
                Jump::Back(share) => now.as_micros().saturating_sub(period_us / 1000 * share),
            });
            // Beyond the reach of a jump there is nothing to compare.
            now = now.clamp(Time::from_secs(1_400_000_000), Time::from_secs(4_000_000_000));
            let charges: Vec<_> = steps.iter().flat_map(|step| self.charges(*limit, step)).collect();
            let outcome = redis.call(&names, &charges, Some(now)).expect("a script that works");
            // Keys must not expire by the clock of the machine.
            redis.lives(&names);
            let (results, _) = expected(&charges, &mut states, now);
            prop_assert_eq!(outcome.now, now);
            prop_assert_eq!(&outcome.results, &results, "{:?} at {}", charges, now);
            for (found, state) in outcome.states.iter().zip(&states) {
                prop_assert!(alike(found, state), "{found:?} is not {state:?}");
            }
            last = results.last().map_or(last, |results| results[0]);
        }
        Ok(())
    }
}

fn check(form: ScriptForm) {
    let server = options().start();
    let mut redis = Redis::new(&server);
    redis.form = form;
    let redis = std::cell::RefCell::new(redis);
    let config = ProptestConfig { source_file: Some(file!()), ..scenario::config() };
    let outcome = TestRunner::new(config).run(&history(), |history| history.run(&mut redis.borrow_mut()));
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

#[test]
fn windows_and_bans_agree_at_the_callers_time() {
    check(ScriptForm::CallerTime);
}

#[test]
fn windows_and_bans_agree_at_the_servers_time() {
    check(ScriptForm::ServerTime);
}

#[test]
fn windows_agree_in_calls_that_share_a_command() {
    check(ScriptForm::Merged);
}
