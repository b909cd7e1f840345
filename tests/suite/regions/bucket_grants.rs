//! Division of a token bucket over regions: never more than the bucket, by need, and alike in Rust and Lua.

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};
use redis::{Connection, RedisResult, cmd};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::global_bucket::{MAX_GRANTS_PER_REGION, State, TermGrant, TermRequest, TokenPool};
use tollkeeper::store::redis::regions::grant_calls::{
    BucketReply, BucketResetReply, decode_bucket_request, decode_bucket_reset, encode_bucket_request,
    encode_bucket_reset,
};
use tollkeeper::store::redis::script::global_bucket_script;

use crate::kit::redis::options;

const START: Time = Time::from_secs(1_783_512_000);
const KEY: &str = "tk1:{shop|user=ann}:global:token_bucket:60s";

/// Step of a history.
#[derive(Clone, Copy, Debug)]
enum Step {
    Pass { micros: u64 },
    Request(TermRequest),
    Reset,
}

fn step(pool: TokenPool) -> impl Strategy<Value = Step> {
    let term_us = prop_oneof![1..3_000_000_u64, Just(30_000_000)];
    let wanted = prop_oneof![3 => 0..=pool.rate.saturating_mul(2), 1 => any::<u32>()];
    let request = (0..5_u32, wanted, term_us)
        .prop_map(move |(region, wanted, term_us)| Step::Request(TermRequest { region, wanted, term_us, pool }));
    prop_oneof![
        3 => (0..2_000_000_u64).prop_map(|micros| Step::Pass { micros }),
        5 => request,
        1 => Just(Step::Reset),
    ]
}

fn history() -> impl Strategy<Value = (TokenPool, Vec<Step>)> {
    let size = || prop_oneof![4 => 1..10_000_u32, 1 => Just(0), 1 => Just(u32::MAX)];
    (size(), size()).prop_flat_map(|(rate, capacity)| {
        let pool = TokenPool { rate, capacity };
        (Just(pool), proptest::collection::vec(step(pool), 1..80))
    })
}

/// Asserts that the grants that regions may use at `now` fit into the pool.
fn assert_fits(grants: &[TermGrant], now: Time, pool: TokenPool) -> TestCaseResult {
    let mut held: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
    for grant in grants.iter().filter(|grant| grant.end > now) {
        let (rate, capacity) = held.entry(grant.region).or_default();
        (*rate, *capacity) = ((*rate).max(grant.rate), (*capacity).max(grant.capacity));
    }
    let rates: u64 = held.values().map(|(rate, _)| u64::from(*rate)).sum();
    let capacities: u64 = held.values().map(|(_, capacity)| u64::from(*capacity)).sum();
    prop_assert!(rates <= u64::from(pool.rate), "{rates} of {}", pool.rate);
    prop_assert!(capacities <= u64::from(pool.capacity), "{capacities} of {}", pool.capacity);
    Ok(())
}

proptest! {
    /// Each region may use any of its grants that have not ended: replies are lost, repeated and late.
    #[test]
    fn regions_never_hold_more_than_the_pool((pool, steps) in history()) {
        let (mut state, mut now, mut granted) = (State::default(), START, Vec::new());
        for step in steps {
            match step {
                Step::Pass { micros } => now = now.plus_us(micros),
                Step::Reset => state.reset(now),
                Step::Request(request) => {
                    if let Some(grant) = state.grant(now, request) {
                        prop_assert!(grant.rate <= request.wanted);
                        granted.push(grant);
                    }
                }
            }
            assert_fits(&granted, now, pool)?;
            prop_assert!(state.grants.len() <= 5 * MAX_GRANTS_PER_REGION);
        }
    }

    #[test]
    fn regions_get_parts_by_need_within_two_terms(
        wants in proptest::collection::vec(1..2_000_u32, 2..6),
        first in any::<prop::sample::Index>(),
    ) {
        const TERM_US: u64 = 30_000_000;
        let pool = TokenPool { rate: 1_000, capacity: 500 };
        let (mut state, mut now, mut last) = (State::default(), START, vec![0; wants.len()]);
        // One region takes what it wants while it is alone.
        let first = first.index(wants.len());
        let all: u64 = wants.iter().map(|wanted| u64::from(*wanted)).sum();
        for round in 0..5 {
            let alone = round == 0;
            for (region, wanted) in wants.iter().enumerate().filter(|(region, _)| !alone || *region == first) {
                let region_number = u32::try_from(region).unwrap();
                let request = TermRequest { region: region_number, wanted: *wanted, term_us: TERM_US, pool };
                let grant = state.grant(now, request).expect("the region has few grants");
                last[region] = grant.rate;
                now = now.plus_us(1_000);
            }
            now = now.plus_us(TERM_US / 2);
        }
        for (region, wanted) in wants.iter().enumerate() {
            let fair = if all > 1_000 { 1_000 * u64::from(*wanted) / all } else { u64::from(*wanted) };
            prop_assert!(u64::from(last[region]) == fair, "region {region} of {wants:?}: {last:?}, not {fair}");
        }
    }
}

fn call<T>(
    connection: &mut Connection,
    argument: &[u8],
    decode: fn(&[u8]) -> Result<T, tollkeeper::limit::algorithm::stored_state::MalformedReply>,
) -> T {
    let reply: RedisResult<Vec<u8>> =
        cmd("EVAL").arg(&global_bucket_script().text).arg(1).arg(KEY).arg(argument).query(connection);
    decode(&reply.expect("the script runs")).expect("the reply can be read")
}

/// State as Redis keeps it; the default if there is none.
fn read(connection: &mut Connection) -> State {
    let found: Option<Vec<u8>> = cmd("GET").arg(KEY).query(connection).expect("the server answers");
    let words: Vec<u64> = found
        .iter()
        .flatten()
        .copied()
        .collect::<Vec<u8>>()
        .as_chunks::<8>()
        .0
        .iter()
        .map(|w| u64::from_le_bytes(*w))
        .collect();
    let Some((epoch, grants)) = words.split_first() else { return State::default() };
    let number = |word: u64| u32::try_from(word).unwrap();
    let grants = grants.as_chunks::<5>().0.iter().map(|[region, rate, capacity, wanted, end]| TermGrant {
        region: number(*region),
        rate: number(*rate),
        capacity: number(*capacity),
        wanted: number(*wanted),
        end: Time::from_micros(*end),
    });
    State { epoch: Time::from_micros(*epoch), grants: grants.collect() }
}

#[test]
fn script_agrees_with_the_pure_division() {
    let server = options().start();
    let client = redis::Client::open(format!("redis://{}", server.address())).expect("it is an address");
    let connection = RefCell::new(client.get_connection().expect("the server answers"));
    let mut runner = TestRunner::new(Config::default());
    let outcome = runner.run(&history(), |(_, steps)| {
        let connection = &mut *connection.borrow_mut();
        let _: i64 = cmd("DEL").arg(KEY).query(connection).expect("the server answers");
        let (mut state, mut now) = (State::default(), START);
        for step in steps {
            match step {
                Step::Pass { micros } => now = now.plus_us(micros),
                Step::Reset => {
                    state.reset(now);
                    let reply = call(connection, &encode_bucket_reset(Some(now)), decode_bucket_reset);
                    prop_assert_eq!(reply, BucketResetReply { now, epoch: state.epoch });
                    prop_assert_eq!(read(connection), state.clone());
                }
                Step::Request(request) => {
                    let grant = state.grant(now, request);
                    let reply = call(connection, &encode_bucket_request(request, Some(now)), decode_bucket_request);
                    let (rate, capacity) = grant.map_or((0, 0), |grant| (grant.rate, grant.capacity));
                    let end = grant.map_or(Time::default(), |grant| grant.end);
                    prop_assert_eq!(reply, BucketReply { now, epoch: state.epoch, rate, capacity, end });
                    prop_assert_eq!(read(connection), state.clone());
                }
            }
        }
        Ok(())
    });
    outcome.unwrap();
}
