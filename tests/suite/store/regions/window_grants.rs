//! Grants of a window's hits: never more than the limit, what the algorithm admits, and alike in Rust and Lua.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use redis::{Connection, RedisResult, cmd};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::global_bucket::GlobalBucketParameters;
use tollkeeper::limit::algorithm::global_window::{GlobalWindowParameters, ReturnedHits, State};
use tollkeeper::limit::algorithm::state::State as AlgorithmState;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::redis::regions::grant_encoding::{
    GlobalWindowAction, GlobalWindowReply, decode_global_window_reply, encode_global_window_call,
};
use tollkeeper::store::redis::script::global_window_script;

use kit::redis::options;

const START: Time = Time::from_secs(1_783_512_000);
const KEY: &str = "tk1:{shop|user=ann}:global:fixed_window:60s";
const PERIOD_US: u64 = 60_000_000;

/// Step of a history; times are moved by microseconds, also backwards.
#[derive(Clone, Copy, Debug)]
enum Step {
    Pass(i64),
    Grant(u32),
    /// Return of this part of the hits that a window has, in a window so many before this one.
    Return {
        hits: u64,
        windows_ago: u64,
        /// The hits were granted before the last reset.
        is_old: bool,
    },
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let period = i64::try_from(PERIOD_US).unwrap();
    let pass = prop_oneof![6 => 0..period, 1 => 0..4 * period, 1 => -3 * period..0];
    prop_oneof![
        3 => pass.prop_map(Step::Pass),
        6 => prop_oneof![4 => 0..500_u32, 1 => any::<u32>()].prop_map(Step::Grant),
        2 => (0..400_u64, 0..3_u64, any::<bool>())
            .prop_map(|(hits, windows_ago, is_old)| Step::Return { hits, windows_ago, is_old }),
        1 => Just(Step::Reset),
    ]
}

fn pool() -> impl Strategy<Value = GlobalWindowParameters> {
    let max = prop_oneof![6 => 1..2_000_u32, 1 => Just(0), 1 => Just(u32::MAX)];
    (any::<bool>(), max).prop_map(|(is_sliding, max)| GlobalWindowParameters { period_us: PERIOD_US, is_sliding, max })
}

/// Return of hits of the epoch of `state`, or of the one before.
fn returned(state: &State, window: u64, hits: u64, is_old: bool) -> ReturnedHits {
    let epoch = Time::from_micros(state.epoch.as_micros().saturating_sub(u64::from(is_old)));
    ReturnedHits { window, hits, epoch }
}

fn passed(now: Time, micros: i64) -> Time {
    Time::from_micros(now.as_micros().saturating_add_signed(micros))
}

proptest! {
    /// A grant is a charge that the algorithm admits, and one hit more than what is free is one that it rejects.
    #[test]
    fn grant_is_what_the_algorithm_admits(
        is_sliding in any::<bool>(),
        max in 1..2_000_u32,
        steps in proptest::collection::vec((0..2 * PERIOD_US, 1..2_000_u32), 1..40),
    ) {
        let algorithm = if is_sliding { Algorithm::SlidingWindowCounter } else { Algorithm::FixedWindow };
        let period = Period::new(Unit::Minute, 1).unwrap();
        let spec = LimitSpec { count_rejected: Some(false), ..LimitSpec::new(algorithm, max, period) };
        let limit = Limit::new(&spec).unwrap();
        let pool = GlobalWindowParameters { period_us: PERIOD_US, is_sliding, max };
        let (mut state, mut strict, mut now) = (State::default(), AlgorithmState::empty(algorithm), START);
        for (micros, wanted) in steps {
            now = now.plus_us(micros);
            let grant = state.grant(now, pool, wanted);
            prop_assert_eq!(grant.window, now.as_micros() / PERIOD_US);
            let charge = |hits: u32| ChargeRequest::new(Hits::Charge(u64::from(hits)), 0);
            prop_assert!(strict.charge(&limit, now, charge(grant.hits)).admitted);
            prop_assert!(strict.admits(&limit, now, charge(grant.free)), "{grant:?}");
            prop_assert!(!strict.admits(&limit, now, charge(grant.free + 1)), "{grant:?}");
            prop_assert!(grant.hits > 0 || grant.free == 0);
        }
    }

    /// Also with returns of any number of hits, for any window.
    #[test]
    fn window_never_grants_more_than_the_pool(pool in pool(), steps in proptest::collection::vec(step(), 1..80)) {
        let (mut state, mut now) = (State::default(), START);
        let (mut window, mut granted) = (0, 0);
        for step in steps {
            match step {
                // A clock that was wrong by two windows voids the state.
                Step::Pass(micros) => now = passed(now, micros.max(0)),
                Step::Reset => {
                    state.reset(now, pool);
                    granted = 0;
                }
                Step::Grant(wanted) => {
                    let grant = state.grant(now, pool, wanted);
                    granted = if grant.window == window { granted } else { 0 } + u64::from(grant.hits);
                    window = grant.window;
                    prop_assert!(granted <= u64::from(pool.max), "{granted} of {}", pool.max);
                }
                Step::Return { hits, windows_ago, is_old } => {
                    let of = (now.as_micros() / PERIOD_US).saturating_sub(windows_ago);
                    let is_forgotten = is_old && state.epoch > Time::default();
                    let taken = state.take_back(now, pool, returned(&state, of, hits, is_old));
                    prop_assert!(taken == 0 || windows_ago == 0 && !is_forgotten, "{taken} of {of}");
                    granted -= if of == window { taken } else { 0 };
                }
            }
        }
    }
}

fn call(connection: &mut Connection, argument: &[u8]) -> GlobalWindowReply {
    let reply: RedisResult<Vec<u8>> =
        cmd("EVAL").arg(&global_window_script().text).arg(1).arg(KEY).arg(argument).query(connection);
    decode_global_window_reply(&reply.expect("the script runs")).expect("the reply can be read")
}

fn read(connection: &mut Connection) -> State {
    let found: Vec<u8> = cmd("GET").arg(KEY).query(connection).expect("the server answers");
    let words: Vec<u64> = found.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let &[window, current, previous, epoch] = &words[..] else { panic!("a state of {} words", words.len()) };
    State { window, current, previous, epoch: Time::from_micros(epoch) }
}

#[test]
fn script_agrees_with_the_pure_grants() {
    let server = options().start();
    let client = redis::Client::open(format!("redis://{}", server.address())).expect("it is an address");
    let connection = RefCell::new(client.get_connection().expect("the server answers"));
    let histories = (pool(), proptest::collection::vec(step(), 1..80));
    let outcome = TestRunner::new(Config::default()).run(&histories, |(pool, steps)| {
        let connection = &mut *connection.borrow_mut();
        let _: i64 = cmd("DEL").arg(KEY).query(connection).expect("the server answers");
        let (mut state, mut now) = (State::default(), START);
        for step in steps {
            let (purpose, hits, free) = match step {
                Step::Pass(micros) => {
                    now = passed(now, micros);
                    continue;
                }
                Step::Reset => {
                    state.reset(now, pool);
                    (GlobalWindowAction::Reset, 0, 0)
                }
                Step::Grant(wanted) => {
                    let grant = state.grant(now, pool, wanted);
                    (GlobalWindowAction::Grant { wanted }, u64::from(grant.hits), u64::from(grant.free))
                }
                Step::Return { hits, windows_ago, is_old } => {
                    let window = (now.as_micros() / PERIOD_US).saturating_sub(windows_ago);
                    let unused = returned(&state, window, hits, is_old);
                    (GlobalWindowAction::Return(unused), state.take_back(now, pool, unused), 0)
                }
            };
            let reply = call(connection, &encode_global_window_call(pool, purpose, Some(now)));
            let State { window, epoch, .. } = state;
            prop_assert_eq!(reply, GlobalWindowReply { now, epoch, window, hits, free });
            prop_assert_eq!(read(connection), state);
        }
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn regions_that_do_not_know_each_other_divide_the_pool() {
    let pool = GlobalWindowParameters { period_us: PERIOD_US, is_sliding: false, max: 1000 };
    let parts = |groups: &[u32], listed| {
        groups.iter().map(|&group| pool.scaled_to_reported_regions(group, listed).max).collect::<Vec<_>>()
    };
    assert_eq!(parts(&[0, 1, 2, 3, 4], 3), [0, 333, 666, 1000, 1000]);
    let all = GlobalWindowParameters { max: u32::MAX, ..pool }.scaled_to_reported_regions(64, 64);
    assert_eq!(all.max, u32::MAX);
    assert_eq!(pool.scaled_to_reported_regions(0, 0).max, 0);
    let bucket = GlobalBucketParameters { period_us: PERIOD_US, rate: 1000, capacity: 50, prepaid_lifetime_us: 9 };
    let expected = GlobalBucketParameters { period_us: PERIOD_US, rate: 666, capacity: 33, prepaid_lifetime_us: 9 };
    assert_eq!(bucket.scaled_to_reported_regions(2, 3), expected);
}
