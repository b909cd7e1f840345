//! Scripts and algorithms agree on limits that regions share, alone and together with other limits.
//!
//! As `redis::agreement`, with what global limits add: the clock of the global Redis in each call, right, wide, wrong
//! or
//! unknown, and grants that appear in a state between two calls.

use std::cell::RefCell;
use std::num::NonZeroU16;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::region::GlobalTimeAndStanding;
use tollkeeper::limit::algorithm::region_bucket::PrepaidHitsGrant;
use tollkeeper::limit::algorithm::region_window::WindowCounts;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::algorithm::{Algorithm, region_bucket};
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::Period;
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{GlobalScope, Limit, LimitSpec, Overshoot, RegionLossPolicy, Scope};
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::redis::eventual::StoredLease;
use tollkeeper::store::redis::regions::grant_encoding::encode_prepaid_hits_grant;
use tollkeeper::store::redis::script::{ReplyContext, region_bucket_grant_script, replay_charges};

use super::agreement::{Redis, ScriptForm, expected};
use crate::limit::algorithms::scenario;
use kit::redis::{Server, options};

/// Sequence of calls on the counters of one descriptor.
#[derive(Clone, Debug)]
struct History {
    /// For each key, the limit before and after a change of the rules.
    keys: Vec<[OwnedCounter; 2]>,
    start: Time,
    /// Global time minus the time of the region's Redis, in thousandths of the first period.
    offset: i64,
    calls: Vec<Call>,
}

#[derive(Clone, Debug)]
struct Call {
    /// Time since the call before, in thousandths of the first period; negative: the clock stepped back.
    after: i64,
    clock: ClockKind,
    flags: [bool; 3],
    grant: Option<Grant>,
    /// Hits that are lent meanwhile.
    lent: Option<u64>,
    steps: Vec<Step>,
}

/// Knowledge of the clock of the global Redis.
#[derive(Clone, Copy, Debug)]
enum ClockKind {
    Unknown,
    /// Known to thousandths of the first period below and above, and valid from and until microseconds from now.
    Known {
        below: i64,
        above: i64,
        from_us: i64,
        until_us: i64,
    },
    /// Known to end this many microseconds from the end of a window, below and above.
    AtBoundary {
        below_us: i64,
        above_us: i64,
    },
}

/// Grant that arrived before a call, in hundredths of the limit.
#[derive(Clone, Copy, Debug)]
struct Grant {
    hits: u64,
    low: u64,
    exhausted: bool,
    next_request_ms: u64,
}

/// Run of equal charges.
#[derive(Clone, Copy, Debug)]
struct Step {
    changed_rule: bool,
    amount: StepAmount,
    dry_run: bool,
    /// Refunds are void from this many microseconds after the call.
    void_from_us: Option<i64>,
    times: usize,
}

/// Hits of a charge.
#[derive(Clone, Copy, Debug)]
enum StepAmount {
    Peek,
    Few(u64),
    /// Hundredths of the first limit.
    Part(u64),
    Refund(u64),
    RefundAll,
}

fn history(most_keys: usize, countings: &'static [(Algorithm, bool)]) -> impl Strategy<Value = History> {
    let key =
        proptest::sample::select(countings).prop_flat_map(|(algorithm, is_global)| counters(algorithm, is_global));
    let start = prop_oneof![Just(1), 1..5_000_000_u64, 1_700_000_000_000_000..1_800_000_000_000_000_u64];
    let offset = prop_oneof![Just(0), -1500..1500_i64, -9_000..9_000_i64];
    (proptest::collection::vec(key, 1..=most_keys), start, offset, proptest::collection::vec(call(), 1..25))
        .prop_map(|(keys, start, offset, calls)| History { keys, start: Time::from_micros(start), offset, calls })
}

/// Two limits of one counter, and their periods.
fn counters(algorithm: Algorithm, is_global: bool) -> impl Strategy<Value = [OwnedCounter; 2]> {
    (scenario::period(), limit_numbers(), limit_numbers(), any::<bool>()).prop_filter_map(
        "the reserve is too small",
        move |(period, first, second, enforced)| {
            let counter = |numbers: &LimitNumbers| {
                let limit = numbers.limit(algorithm, period, is_global)?;
                Some(OwnedCounter { limit, shadow: !enforced, quota: false, tag: 0 })
            };
            Some([counter(&first)?, counter(&second)?])
        },
    )
}

#[derive(Clone, Debug)]
struct LimitNumbers {
    requests: u32,
    reserve_milli_percent: u32,
    overshoot: u32,
    on_region_loss: RegionLossPolicy,
    regions: u16,
}

fn limit_numbers() -> impl Strategy<Value = LimitNumbers> {
    let requests = prop_oneof![1 => Just(0), 6 => 1..300_u32, 1 => Just(u32::MAX)];
    let reserve = prop_oneof![Just(10_000_u32), 500..=100_000_u32];
    (requests, reserve, 1..=100_000_u32, proptest::sample::select(&RegionLossPolicy::ALL[..]), 1..5_u16).prop_map(
        |(requests, reserve_milli_percent, overshoot, on_region_loss, regions)| LimitNumbers {
            requests,
            reserve_milli_percent,
            overshoot,
            on_region_loss,
            regions,
        },
    )
}

impl LimitNumbers {
    fn limit(&self, algorithm: Algorithm, period: Period, is_global: bool) -> Option<Limit> {
        let scope = Scope::Global(GlobalScope {
            max_overshoot: Overshoot::MilliPercent(self.overshoot),
            reserve_milli_percent: self.reserve_milli_percent,
            on_region_loss: self.on_region_loss,
            regions: NonZeroU16::new(self.regions)?,
        });
        let scope = is_global.then_some(scope);
        let requests = if algorithm == Algorithm::SlidingWindowLog { self.requests.min(300) } else { self.requests };
        let spec = LimitSpec { scope, ..LimitSpec::new(algorithm, requests, period) };
        Limit::new(&spec).ok().map(|limit| limit.as_counted_in_region())
    }
}

fn call() -> impl Strategy<Value = Call> {
    let after = prop_oneof![2 => Just(0), 6 => 0..400_i64, 3 => 400..1400_i64, 1 => 1400..5000_i64, 1 => -2500..0_i64];
    let edge = || prop_oneof![4 => -5_000_000..=-1_i64, 1 => -1..=1_i64];
    let known = (-300..100_i64, 0..500_i64, edge(), edge()).prop_map(|(below, width, from, until)| ClockKind::Known {
        below,
        above: below + width,
        from_us: from,
        until_us: -until,
    });
    let at_boundary = (-3..3_i64, 0..5_i64)
        .prop_map(|(below_us, width)| ClockKind::AtBoundary { below_us, above_us: below_us + width });
    let narrow = (-2..=0_i64, 0..3_i64).prop_map(|(below, width)| ClockKind::Known {
        below,
        above: below + width,
        from_us: -1_000,
        until_us: 1_000,
    });
    let clock = prop_oneof![1 => Just(ClockKind::Unknown), 3 => known, 2 => at_boundary, 6 => narrow];
    let flags = [proptest::bool::weighted(0.7), proptest::bool::weighted(0.2), proptest::bool::weighted(0.1)];
    let grant = (0..80_u64, 0..40_u64, proptest::bool::weighted(0.2), 0..5_000_u64)
        .prop_map(|(hits, low, exhausted, next_request_ms)| Grant { hits, low, exhausted, next_request_ms });
    let steps = proptest::collection::vec(step(), 1..6);
    let lent = proptest::option::weighted(0.3, 0..200_u64);
    (after, clock, flags, proptest::option::weighted(0.3, grant), lent, steps)
        .prop_map(|(after, clock, flags, grant, lent, steps)| Call { after, clock, flags, grant, lent, steps })
}

fn step() -> impl Strategy<Value = Step> {
    let amount = prop_oneof![
        1 => Just(StepAmount::Peek),
        6 => (1..6_u64).prop_map(StepAmount::Few),
        4 => (0..120_u64).prop_map(StepAmount::Part),
        2 => (1..9_u64).prop_map(StepAmount::Refund),
        1 => Just(StepAmount::RefundAll),
    ];
    let times = prop_oneof![4 => Just(1), 1 => 2..6_usize];
    let void_from_us = proptest::option::weighted(0.2, -2_000_000..2_000_000_i64);
    let (changed_rule, dry_run) = (proptest::bool::weighted(0.2), proptest::bool::weighted(0.1));
    (changed_rule, amount, dry_run, void_from_us, times).prop_map(
        |(changed_rule, amount, dry_run, void_from_us, times)| Step {
            changed_rule,
            amount,
            dry_run,
            void_from_us,
            times,
        },
    )
}

impl Step {
    fn charges(&self, keys: &[[OwnedCounter; 2]], now: Time) -> impl Iterator<Item = OwnedCharge> + use<> {
        let counters: SmallVec<[_; 1]> = keys.iter().map(|counters| counters[usize::from(self.changed_rule)]).collect();
        let requests = u64::from(counters[0].limit.requests_per_unit());
        let hits = match self.amount {
            StepAmount::Peek => Hits::Peek,
            StepAmount::Few(hits) => Hits::Charge(hits),
            StepAmount::Part(hundredths) => Hits::Charge((requests * hundredths / 100).max(1)),
            StepAmount::Refund(hits) => Hits::Refund(hits),
            StepAmount::RefundAll => Hits::Refund(1 << 53),
        };
        let void_from = self.void_from_us.filter(|_| matches!(hits, Hits::Refund(_)));
        let void_from = void_from.map(|off| Time::from_micros(now.as_micros().saturating_add_signed(off).max(1)));
        let request = ChargeRequest::new(hits, 0);
        std::iter::repeat_n(OwnedCharge { counters, request, dry_run: self.dry_run, void_from, slot: None }, self.times)
    }
}

impl Call {
    /// Clock of the call, if global time is `offset_us` ahead of the region's.
    fn clock(&self, now: Time, offset_us: i64, period_us: i64) -> GlobalTimeAndStanding {
        let [can_request, cut_off, parts_unusable] = self.flags;
        let from_now = |off| Time::from_micros(now.as_micros().saturating_add_signed(off));
        let thousandths = |part: i64| offset_us + period_us / 1000 * part;
        let (offset_lo, offset_hi, from_us, until_us) = match self.clock {
            ClockKind::Unknown => {
                return GlobalTimeAndStanding {
                    can_request,
                    cut_off,
                    parts_unusable,
                    ..GlobalTimeAndStanding::UNKNOWN
                };
            }
            ClockKind::Known { below, above, from_us, until_us } => {
                (thousandths(below), thousandths(above), from_us, until_us)
            }
            ClockKind::AtBoundary { below_us, above_us } => {
                let global = i64::try_from(now.as_micros()).unwrap() + offset_us;
                let to_end = period_us - global.rem_euclid(period_us);
                (offset_us + to_end + below_us, offset_us + to_end + above_us, -1, 1)
            }
        };
        let valid = [from_us, until_us].map(from_now);
        let [valid_from, valid_until] = valid;
        GlobalTimeAndStanding { valid_from, valid_until, offset_lo, offset_hi, can_request, cut_off, parts_unusable }
    }
}

impl Grant {
    /// Puts the grant into the state, as the script of a grant does.
    fn apply(self, counts: &mut WindowCounts, limit: &Limit, now: Time) {
        let part = |hundredths: u64| u64::from(limit.max_granted_hits()) * hundredths / 100;
        counts.granted += part(self.hits);
        counts.granted_total += part(self.hits);
        counts.low = part(self.low);
        counts.cycle.exhausted = self.exhausted;
        counts.cycle.open_request = 0;
        counts.cycle.next_request_at = now.plus_us(self.next_request_ms * 1000);
    }
}

impl Grant {
    /// Hits of a bucket that answer the open request, or another one.
    fn prepaid(
        self,
        state: &region_bucket::State,
        limit: &Limit,
        now: Time,
        clock: &GlobalTimeAndStanding,
    ) -> PrepaidHitsGrant {
        let left_us = limit.period_us() / 100 * self.low;
        PrepaidHitsGrant {
            request: state.counts.cycle.open_request + u64::from(self.low % 7 == 6),
            epoch: if self.low % 5 == 4 { state.counts.cycle.epoch + 1 } else { 0 },
            hits: u64::from(limit.max_granted_hits()) * self.hits / 100,
            low: u64::from(limit.max_granted_hits()) * self.low / 400,
            start: Time::from_micros(now.as_micros().saturating_add_signed(clock.offset_lo) + self.low % 3),
            end: Time::from_micros(now.as_micros().saturating_add_signed(clock.offset_hi) + left_us),
            exhausted: self.exhausted,
            next_request_at: now.plus_us(self.next_request_ms * 1000),
        }
    }
}

impl History {
    /// Runs the history on new keys of a Redis and on bare states.
    fn live(&self, redis: &mut Redis) -> TestCaseResult {
        let names = redis.new_keys(self.keys.len());
        let first: Vec<Limit> = self.keys.iter().map(|counters| counters[0].limit).collect();
        let mut states: Vec<State> = first.iter().map(|limit| State::empty(limit.counting_method())).collect();
        let period_us = i64::try_from(first[0].period_us()).unwrap();
        let offset_us = period_us / 1000 * self.offset;
        let mut now = self.start;
        for call in &self.calls {
            now = Time::from_micros(
                now.as_micros().saturating_add_signed(period_us / 1000 * call.after).clamp(1, 1 << 52),
            );
            for ((state, limit), name) in states.iter_mut().zip(&first).zip(&names) {
                if let (State::RegionWindow(state), Some(grant)) = (&mut *state, call.grant) {
                    grant.apply(&mut state.counts, limit, now);
                    redis.query::<()>(&[b"SET", name.as_bytes(), &encoded(state.last, &state.counts)]);
                }
            }
            let clock = call.clock(now, offset_us, period_us);
            states.iter_mut().for_each(|state| state.set_global_view(&clock));
            for ((state, limit), name) in states.iter_mut().zip(&first).zip(&names) {
                if let (State::RegionBucket(state), Some(grant)) = (state, call.grant) {
                    let grant = grant.prepaid(state, limit, now, &clock);
                    let taken = redis.give_prepaid(name, limit, &grant);
                    let own_capacity = limit.region_capacity().into();
                    prop_assert_eq!(state.counts.accept_grant(own_capacity, &grant), taken, "{:?} at {}", grant, now);
                }
            }
            let requests_before: Vec<u64> = states.iter().map(State::open_grant_request_id).collect();
            let mut charges: Vec<_> = call.steps.iter().flat_map(|step| step.charges(&self.keys, now)).collect();
            let outcome = if let Some(hits) = call.lent {
                charges.iter_mut().for_each(|charge| charge.request.lent = hits);
                let lent = StoredLease { end: now.plus_us(1_000_000), hits };
                redis.call_while_lent(&names, &charges, lent, &clock, now)
            } else {
                let outcome = redis.call_with_clock(&names, &charges, Some(now), Some(&clock));
                outcome.expect("a script that fails has a mistake")
            };
            let (results, _) = expected(&charges, &mut states, now);
            prop_assert_eq!(&outcome.results, &results, "{:?} at {} with {:?}", charges, now, clock);
            let requests =
                (0..states.len()).filter(|&place| states[place].open_grant_request_id() != requests_before[place]);
            prop_assert_eq!(&outcome.region.requesting_counters, &requests.collect::<Vec<_>>());
            for (place, (name, state)) in names.iter().zip(&states).enumerate() {
                if let State::SlidingWindowLog(_) = state {
                    continue;
                }
                let stored = stored(redis, name, self.keys[place][0], &clock);
                prop_assert_eq!(&stored, state, "{:?} at {} with {:?}", charges, now, clock);
                prop_assert_eq!(&outcome.states[place], state);
            }
            let lives = redis.lives(&names);
            for (limit, life_ms) in first.iter().zip(lives).filter(|(limit, _)| limit.is_counted_in_region()) {
                let (window_ms, life_ms) = (2 * limit.period_us() / 1000 + 2000, u64::try_from(life_ms).unwrap_or(0));
                let is_window = limit.algorithm() != Algorithm::TokenBucket;
                prop_assert!(life_ms <= window_ms || !is_window, "{life_ms}");
            }
        }
        Ok(())
    }
}

/// Value of a key with a state of `region_window`.
fn encoded(last: Time, counts: &WindowCounts) -> Vec<u8> {
    stored_words(last, counts).into_iter().flat_map(u64::to_le_bytes).collect()
}

/// Numbers of a stored state of `region_window`, in their order.
pub(in crate::store) fn stored_words(last: Time, counts: &WindowCounts) -> [u64; 15] {
    [
        last.as_micros(),
        counts.window,
        counts.granted,
        counts.reserve_used,
        counts.requested,
        counts.low,
        counts.granted_total,
        counts.next_reserve_used,
        counts.previous_requested,
        u64::from(counts.cycle.exhausted),
        counts.cycle.open_request,
        counts.cycle.next_request_at.as_micros(),
        counts.cycle.epoch,
        counts.cycle.cut_off.start.as_micros(),
        counts.cycle.cut_off.used,
    ]
}

/// State of a key: a script returns it as it is stored.
fn stored(redis: &mut Redis, name: &str, counter: OwnedCounter, clock: &GlobalTimeAndStanding) -> State {
    let Some(value) = redis.query::<Option<Vec<u8>>>(&[b"GET", name.as_bytes()]) else {
        let mut empty = State::empty(counter.limit.counting_method());
        empty.set_global_view(clock);
        return empty;
    };
    let peek = OwnedCharge::new(SmallVec::from_iter([counter]), ChargeRequest::new(Hits::Peek, 0));
    let reply = [&0_u64.to_le_bytes()[..], &value].concat();
    let arguments = ReplyContext { has_leases: false, view: Some(clock) };
    replay_charges(&[peek], &reply, arguments).expect("the value is a state").states.remove(0)
}

impl Redis {
    /// Gives a grant to a bucket, as the store does; true if it was taken.
    fn give_prepaid(&mut self, name: &str, limit: &Limit, grant: &PrepaidHitsGrant) -> bool {
        let script = region_bucket_grant_script().text.as_bytes();
        self.query::<u64>(&[b"EVAL", script, b"1", name.as_bytes(), &encode_prepaid_hits_grant(limit, grant)]) == 1
    }
}

/// Runs random histories, as many as `PROPTEST_CASES` says.
fn check(histories: impl Strategy<Value = History>) {
    check_with(&options().start(), ScriptForm::CallerTime, histories);
}

fn check_with(server: &Server, form: ScriptForm, histories: impl Strategy<Value = History>) {
    let mut redis = Redis::new(server);
    redis.form = form;
    let redis = RefCell::new(redis);
    let config = ProptestConfig { source_file: Some(file!()), ..scenario::config() };
    let outcome = TestRunner::new(config).run(&histories, |history| history.live(&mut redis.borrow_mut()));
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn script_charges_a_region_window_like_the_algorithm() {
    check(history(1, &[(Algorithm::FixedWindow, true), (Algorithm::SlidingWindowCounter, true)]));
}

#[test]
fn script_of_a_user_without_setrange_charges_a_region_window_too() {
    let server = options().start();
    server.query::<()>(&["ACL", "SETUSER", "default", "-setrange"]);
    check_with(&server, ScriptForm::CallerTime, history(1, &[(Algorithm::FixedWindow, true)]));
}

#[test]
fn merged_script_charges_regions_like_the_algorithms() {
    const WINDOWS: [(Algorithm, bool); 2] = [(Algorithm::FixedWindow, true), (Algorithm::SlidingWindowCounter, true)];
    check_with(&options().start(), ScriptForm::Merged, history(1, &WINDOWS));
    check_with(&options().start(), ScriptForm::Merged, history(1, &[(Algorithm::TokenBucket, true)]));
}

#[test]
fn script_charges_a_region_bucket_like_the_algorithm() {
    check(history(1, &[(Algorithm::TokenBucket, true)]));
}

#[test]
fn script_charges_global_and_region_limits_together() {
    const COUNTINGS: [(Algorithm, bool); 8] = [
        (Algorithm::TokenBucket, true),
        (Algorithm::FixedWindow, true),
        (Algorithm::SlidingWindowCounter, true),
        (Algorithm::FixedWindow, false),
        (Algorithm::SlidingWindowCounter, false),
        (Algorithm::SlidingWindowLog, false),
        (Algorithm::TokenBucket, false),
        (Algorithm::LeakyBucket, false),
    ];
    check(history(3, &COUNTINGS));
}
