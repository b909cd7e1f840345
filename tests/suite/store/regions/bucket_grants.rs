//! Prepaid hits of a token bucket: never more than the bucket, for several regions, and alike in Rust and Lua.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use redis::{Connection, RedisResult, cmd};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::global_bucket::{GlobalBucketParameters, State};
use tollkeeper::store::redis::regions::grant_encoding::{
    GlobalBucketAction, GlobalBucketReply, decode_global_bucket_reply, encode_global_bucket_call,
};
use tollkeeper::store::redis::script::global_bucket_script;

use kit::redis::options;

const START: Time = Time::from_secs(1_783_512_000);
const KEY: &str = "tk1:{shop|user=ann}:global:token_bucket:60s";
const PERIOD_US: u64 = 60_000_000;

/// Step of a history; times are moved by microseconds, also backwards.
#[derive(Clone, Copy, Debug)]
enum Step {
    Pass(i64),
    Grant(u32),
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let period = i64::try_from(PERIOD_US).unwrap();
    let pass = prop_oneof![6 => 0..period / 10, 1 => 0..4 * period, 1 => -3 * period..0];
    prop_oneof![
        3 => pass.prop_map(Step::Pass),
        6 => prop_oneof![4 => 0..500_u32, 1 => any::<u32>()].prop_map(Step::Grant),
        1 => Just(Step::Reset),
    ]
}

fn pool() -> impl Strategy<Value = GlobalBucketParameters> {
    let number = || prop_oneof![6 => 1..2_000_u32, 1 => Just(0), 1 => Just(u32::MAX)];
    (number(), number()).prop_map(|(rate, capacity)| GlobalBucketParameters {
        period_us: PERIOD_US,
        rate,
        capacity,
        prepaid_lifetime_us: 3_000_000,
    })
}

proptest! {
    /// In any span of a clock that is never wrong; hits that are admitted later are those of grants of that time.
    #[test]
    fn grants_of_a_span_fit_into_the_bucket(
        pool in pool(),
        steps in proptest::collection::vec((0..PERIOD_US / 5, 1..2_000_u32), 1..40),
    ) {
        let (mut state, mut now) = (State::default(), START);
        let mut granted: Vec<(Time, u64)> = Vec::new();
        for (micros, wanted) in steps {
            now = now.plus_us(micros);
            let grant = state.grant(now, pool, wanted);
            prop_assert!(grant.hits <= wanted && grant.end == now.plus_us(pool.prepaid_lifetime_us));
            prop_assert!(grant.hits > 0 || grant.free == 0, "who asks gets something: {grant:?}");
            granted.push((now, grant.hits.into()));
            let mut in_span = 0;
            for (at, hits) in granted.iter().rev() {
                in_span += u128::from(*hits);
                let refilled = u128::from(now.since_us(*at)) * u128::from(pool.rate) / u128::from(PERIOD_US);
                prop_assert!(in_span <= u128::from(pool.capacity) + refilled + 1, "{in_span} since {at}");
            }
        }
    }

    /// A clock that goes back by at most a period, and is right again, refills no token twice.
    #[test]
    fn clock_that_was_set_back_refills_nothing_twice(back_us in 1..PERIOD_US, for_us in 0..PERIOD_US) {
        let pool = GlobalBucketParameters {
            period_us: PERIOD_US,
            rate: 1_000,
            capacity: 1_000,
            prepaid_lifetime_us: 3_000_000,
        };
        let mut state = State::default();
        let mut drain = |now: Time| (0..60).map(|_| u64::from(state.grant(now, pool, 1_000).hits)).sum::<u64>();
        prop_assert_eq!(drain(START), 1_000);
        let wrong = Time::from_micros(START.as_micros() - back_us);
        let mut refilled = drain(wrong) + drain(wrong.plus_us(for_us));
        refilled += drain(START.plus_us(for_us));
        prop_assert!(refilled <= for_us * 1_000 / PERIOD_US, "{refilled} in {for_us} us");
    }
}

/// Each region that asks gets tokens, also if another one always asks first.
#[test]
fn region_that_asks_last_gets_its_part() {
    let pool =
        GlobalBucketParameters { period_us: PERIOD_US, rate: 1_200, capacity: 1_200, prepaid_lifetime_us: 3_000_000 };
    let (mut state, mut now, mut got) = (State::default(), START, [0; 3]);
    for round in 0..120 {
        now = now.plus_us(1_000_000);
        for got in &mut got {
            let hits = u64::from(state.grant(now, pool, 1_000).hits);
            *got += if round < 60 { 0 } else { hits };
        }
    }
    assert!((1_190..=1_210).contains(&got.iter().sum::<u64>()), "all that refills: {got:?}");
    assert!(got.iter().all(|hits| *hits >= 200), "{got:?}");
}

fn call(connection: &mut Connection, argument: &[u8]) -> GlobalBucketReply {
    let reply: RedisResult<Vec<u8>> =
        cmd("EVAL").arg(&global_bucket_script().text).arg(1).arg(KEY).arg(argument).query(connection);
    decode_global_bucket_reply(&reply.expect("the script runs")).expect("the reply can be read")
}

fn read(connection: &mut Connection) -> State {
    let found: Vec<u8> = cmd("GET").arg(KEY).query(connection).expect("the server answers");
    let words: Vec<u64> = found.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let &[2, last, tokens, part, epoch] = &words[..] else { panic!("a state of {words:?}") };
    State { last: Time::from_micros(last), tokens, part, epoch: Time::from_micros(epoch) }
}

#[test]
fn script_agrees_with_the_pure_bucket() {
    let server = options().start();
    let client = redis::Client::open(format!("redis://{}", server.address())).expect("it is an address");
    let connection = RefCell::new(client.get_connection().expect("the server answers"));
    let histories = (pool(), proptest::collection::vec(step(), 1..80));
    let outcome = TestRunner::new(Config::default()).run(&histories, |(pool, steps)| {
        let connection = &mut *connection.borrow_mut();
        // A state of an earlier version is as none.
        let _: () = cmd("SET").arg(KEY).arg(&[0_u8; 48][..]).query(connection).expect("the server answers");
        let (mut state, mut now) = (State::default(), START);
        for step in steps {
            let (purpose, hits) = match step {
                Step::Pass(micros) => {
                    now = Time::from_micros(now.as_micros().saturating_add_signed(micros));
                    continue;
                }
                Step::Reset => {
                    state.reset(now, pool);
                    (GlobalBucketAction::Reset, 0)
                }
                Step::Grant(wanted) => {
                    (GlobalBucketAction::Grant { wanted }, u64::from(state.grant(now, pool, wanted).hits))
                }
            };
            let reply = call(connection, &encode_global_bucket_call(pool, purpose, Some(now)));
            let (epoch, end, free) = (state.epoch, now.plus_us(pool.prepaid_lifetime_us), state.tokens);
            prop_assert_eq!(reply, GlobalBucketReply { now, epoch, end, hits, free });
            prop_assert_eq!(read(connection), state);
        }
        Ok(())
    });
    outcome.unwrap();
}
