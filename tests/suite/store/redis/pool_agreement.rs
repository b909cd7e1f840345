//! Scripts and algorithms agree on limits that regions share, alone and together with other limits.
//!
//! As `redis::agreement`, with what global limits add: pools beside the counters, and what the processes of a region do
//! to them between two calls.

use std::cell::RefCell;
use std::num::NonZeroU16;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::RegionConnection;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::region_pool::{LastAnswer, PoolGrant, RegionPool, TakenHits};
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::Period;
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{GlobalScope, Limit, LimitSpec, Overshoot, RegionLossPolicy, Scope};
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::redis::eventual::StoredLease;
use tollkeeper::store::redis::regions::exchange::{PoolOperation, decode_pool_reply, encode_pool_operation};
use tollkeeper::store::redis::script::{pool_exchange_script, replay_charges};

use super::agreement::{Redis, ScriptForm, expected};
use crate::limit::algorithms::scenario;
use kit::redis::options;

/// Sequence of calls on the counters of one descriptor.
#[derive(Clone, Debug)]
struct History {
    /// For each key, the limit before and after a change of the rules.
    keys: Vec<[OwnedCounter; 2]>,
    start: Time,
    calls: Vec<Call>,
}

#[derive(Clone, Debug)]
struct Call {
    /// Time since the call before, in thousandths of the first period; negative: the clock stepped back.
    after: i64,
    change: Option<Change>,
    /// Hits that are leased meanwhile.
    leased: Option<u64>,
    steps: Vec<Step>,
}

/// What a process does to all pools before a call.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// An answer to the last request, or if `is_late` to another one: hits in hundredths of the limit, times in
    /// thousandths of the first period.
    Answer {
        held: u64,
        lasts: u64,
        low: u64,
        next_request: u64,
        is_late: bool,
    },
    PoolCheck,
    /// Gives back all but hundredths of the limit.
    Keep(u64),
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
    (proptest::collection::vec(key, 1..=most_keys), start, proptest::collection::vec(call(), 1..25))
        .prop_map(|(keys, start, calls)| History { keys, start: Time::from_micros(start), calls })
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
    is_cut_off: bool,
}

fn limit_numbers() -> impl Strategy<Value = LimitNumbers> {
    let requests = prop_oneof![1 => Just(0), 6 => 1..300_u32, 1 => Just(u32::MAX)];
    let reserve = prop_oneof![Just(10_000_u32), 500..=100_000_u32];
    let policy = proptest::sample::select(&RegionLossPolicy::ALL[..]);
    (requests, reserve, 1..=100_000_u32, policy, 1..5_u16, proptest::bool::weighted(0.2)).prop_map(
        |(requests, reserve_milli_percent, overshoot, on_region_loss, regions, is_cut_off)| LimitNumbers {
            requests,
            reserve_milli_percent,
            overshoot,
            on_region_loss,
            regions,
            is_cut_off,
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
        let spec = LimitSpec { scope, ..LimitSpec::new(algorithm, requests.into(), period) };
        let connection = if self.is_cut_off { RegionConnection::CutOff } else { RegionConnection::Connected };
        Limit::new(&spec).ok().map(|limit| limit.as_counted_in_region(connection))
    }
}

fn call() -> impl Strategy<Value = Call> {
    let after = prop_oneof![2 => Just(0), 6 => 0..400_i64, 3 => 400..1400_i64, 1 => 1400..5000_i64, 1 => -2500..0_i64];
    let answer = (0..120_u64, 0..3000_u64, 0..40_u64, 0..500_u64, proptest::bool::weighted(0.1)).prop_map(
        |(held, lasts, low, next_request, is_late)| Change::Answer { held, lasts, low, next_request, is_late },
    );
    let change = prop_oneof![5 => answer, 1 => Just(Change::PoolCheck), 2 => (0..60_u64).prop_map(Change::Keep)];
    let steps = proptest::collection::vec(step(), 1..6);
    let leased = proptest::option::weighted(0.3, 0..200_u64);
    (after, proptest::option::weighted(0.5, change), leased, steps).prop_map(|(after, change, leased, steps)| Call {
        after,
        change,
        leased,
        steps,
    })
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
        let requests = counters[0].limit.requests_per_unit();
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

impl Change {
    /// Changes a pool in Redis and here, and compares them.
    #[expect(clippy::too_many_arguments, reason = "the arguments of one change")]
    fn apply(self, redis: &mut Redis, key: &str, limit: &Limit, pool: &mut RegionPool, now: Time) -> TestCaseResult {
        let part = |hundredths: u64| limit.requests_per_unit() * hundredths / 100;
        let span = |thousandths: u64| limit.period_us() / 1000 * thousandths;
        let mut expected = *pool;
        let (argument, is_taken) = match self {
            Self::Answer { held, lasts, low, next_request, is_late } => {
                let grant = PoolGrant {
                    number: pool.number + u64::from(is_late),
                    held: part(held),
                    until: now.plus_us(span(lasts)),
                    low: part(low),
                    next_request_at: now.plus_us(span(next_request)),
                    answer: LastAnswer { room: held, window_end: now, ..Default::default() },
                };
                let argument = encode_pool_operation(Some(now), grant.number, PoolOperation::Accept(&grant));
                (argument, expected.accept(&grant))
            }
            Self::PoolCheck => (encode_pool_operation(Some(now), pool.number, PoolOperation::Read), true),
            Self::Keep(kept) => {
                expected.last = if pool.last > now.plus_us(1_000_000) { now } else { pool.last.max(now) };
                expected.left = if expected.last < pool.until { pool.left } else { 0 };
                expected.start_request_keeping(part(kept));
                (encode_pool_operation(Some(now), pool.number, PoolOperation::RequestKeeping(part(kept))), true)
            }
        };
        let is_taken = is_taken && *pool != RegionPool::default();
        let script = pool_exchange_script().text.as_bytes();
        let reply: Vec<u8> = redis.query(&[b"EVAL", script, b"1", key.as_bytes(), &argument]);
        let reply = decode_pool_reply(&reply).expect("the script's reply can be read");
        prop_assert_eq!(reply.map(|reply| (reply.now, reply.pool)), is_taken.then_some((now, expected)), "{:?}", self);
        if is_taken {
            *pool = expected;
        }
        Ok(())
    }
}

impl History {
    /// Runs the history on new keys of a Redis and on bare states.
    fn live(&self, redis: &mut Redis) -> TestCaseResult {
        let first: Vec<Limit> = self.keys.iter().map(|counters| counters[0].limit).collect();
        let pools = first.iter().filter(|limit| limit.is_counted_in_region()).count();
        let names = redis.new_keys(self.keys.len() + pools);
        let mut states: Vec<State> = first.iter().map(State::empty_for).collect();
        let period_us = i64::try_from(first[0].period_us()).unwrap();
        let mut now = self.start;
        for call in &self.calls {
            now = Time::from_micros(
                now.as_micros().saturating_add_signed(period_us / 1000 * call.after).clamp(1, 1 << 52),
            );
            let mut pool_names = names[self.keys.len()..].iter();
            for (state, limit) in states.iter_mut().zip(&first) {
                if let State::WithPool(counter) = state {
                    counter.taken = TakenHits::default();
                    let name = pool_names.next().expect("each pool has a key");
                    if let Some(change) = call.change {
                        change.apply(redis, name, limit, &mut counter.pool, now)?;
                    }
                }
            }
            let number = |state: &State| state.pool().map(|counter| counter.pool.number);
            let numbers_before: Vec<_> = states.iter().map(number).collect();
            let mut charges: Vec<_> = call.steps.iter().flat_map(|step| step.charges(&self.keys, now)).collect();
            let outcome = if let Some(hits) = call.leased {
                charges.iter_mut().for_each(|charge| charge.request.leased = hits);
                let leased = StoredLease { end: now.plus_us(1_000_000), hits };
                redis.call_while_leased(&names, &charges, leased, now)
            } else {
                redis.call(&names, &charges, Some(now)).expect("a script that fails has a mistake")
            };
            let (results, _) = expected(&charges, &mut states, now);
            prop_assert_eq!(&outcome.results, &results, "{:?} at {}", charges, now);
            let requesting = (0..states.len()).filter(|&place| number(&states[place]) != numbers_before[place]);
            prop_assert_eq!(&outcome.pools.requesting, &requesting.collect::<Vec<_>>());
            let mut pool_names = names[self.keys.len()..].iter();
            for (place, (name, state)) in names.iter().zip(&mut states).enumerate() {
                let pool_name = state.pool().and_then(|_| pool_names.next());
                if let State::SlidingWindowLog(_) = state {
                    continue;
                }
                prop_assert_eq!(&outcome.states[place], &*state);
                let stored = stored(redis, name, pool_name, self.keys[place][0]);
                match (&mut *state, stored.unwrap_or_else(|| State::empty_for(&first[place]))) {
                    (State::WithPool(state), State::WithPool(stored)) => {
                        prop_assert_eq!(&stored.part, &state.part, "{:?} at {}", charges, now);
                        // A pool that a charge took nothing of is not written.
                        let at_now = |pool: &RegionPool| pool.at(&first[place], now);
                        prop_assert_eq!(at_now(&stored.pool), at_now(&state.pool), "{:?} at {}", charges, now);
                        state.pool = stored.pool;
                    }
                    (state, stored) => prop_assert_eq!(&stored, &*state, "{:?} at {}", charges, now),
                }
            }
        }
        Ok(())
    }
}

/// State of a counter as Redis stores it, and its pool; `None` if there is neither.
fn stored(redis: &mut Redis, name: &str, pool_name: Option<&String>, counter: OwnedCounter) -> Option<State> {
    let value: Option<Vec<u8>> = redis.query(&[b"GET", name.as_bytes()]);
    let pool: Option<Option<Vec<u8>>> = pool_name.map(|name| redis.query(&[b"GET", name.as_bytes()]));
    if value.is_none() && pool.as_ref().is_none_or(Option::is_none) {
        return None;
    }
    let bytes = match counter.limit.algorithm() {
        Algorithm::FixedWindow => 16,
        _ => 24,
    };
    let value = value.unwrap_or_else(|| vec![0; bytes]);
    let pool = pool.map(|pool| pool.unwrap_or_else(|| vec![0; RegionPool::STORED_BYTES])).unwrap_or_default();
    let peek = OwnedCharge::new(SmallVec::from_iter([counter]), ChargeRequest::new(Hits::Peek, 0));
    let reply = [&0_u64.to_le_bytes()[..], &value, &pool].concat();
    Some(replay_charges(&[peek], &reply, false).expect("the value is a state").states.remove(0))
}

/// Runs random histories, as many as `PROPTEST_CASES` says.
fn check_in_form(form: ScriptForm, histories: impl Strategy<Value = History>) {
    let server = options().start();
    let mut redis = Redis::new(&server);
    redis.form = form;
    let redis = RefCell::new(redis);
    let config = ProptestConfig { source_file: Some(file!()), ..scenario::config() };
    let outcome = TestRunner::new(config).run(&histories, |history| history.live(&mut redis.borrow_mut()));
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn script_charges_a_region_like_the_algorithms() {
    for algorithm in
        [(Algorithm::FixedWindow, true), (Algorithm::SlidingWindowCounter, true), (Algorithm::TokenBucket, true)]
    {
        let algorithms: &'static [(Algorithm, bool)] = Box::leak(Box::new([algorithm]));
        check_in_form(ScriptForm::CallerTime, history(1, algorithms));
    }
}

#[test]
fn script_with_the_time_of_its_server_charges_a_region_too() {
    check_in_form(
        ScriptForm::ServerTime,
        history(1, &[(Algorithm::FixedWindow, true), (Algorithm::TokenBucket, true)]),
    );
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
    check_in_form(ScriptForm::CallerTime, history(3, &COUNTINGS));
}
