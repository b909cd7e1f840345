//! Grants and returns at a region's counter of windows: taken once, in their window, and alike in Rust and Lua.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use redis::{Connection, RedisResult, cmd};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::region::{CutOffAllowanceUse, GrantCycle};
use tollkeeper::limit::algorithm::region_window::{HitsGrant, WindowCounts};
use tollkeeper::store::redis::regions::grant_encoding::{encode_hits_grant, encode_hits_return};
use tollkeeper::store::redis::script::region_grant_script;

use crate::store::redis::region_agreement::stored_words;
use kit::redis::options;

const KEY: &str = "tk1:{shop|user=ann}:region_window:60s";
const LAST: u64 = 1_783_512_000_000_000;
const PERIOD_MS: u64 = 60_000;

fn counts() -> impl Strategy<Value = WindowCounts> {
    let hits = || 0..1_000_u64;
    let spent = (hits(), hits(), hits(), hits());
    let demand = (hits(), hits(), hits(), any::<bool>());
    (100..103_u64, spent, demand, 0..3_u64, 0..5_u64, 0..3_u64).prop_map(
        |(window, spent, demand, open_request, next_request_at, epoch)| WindowCounts {
            window,
            granted: spent.0,
            granted_total: spent.0 + spent.1,
            reserve_used: spent.2,
            next_reserve_used: spent.3,
            requested: demand.0,
            previous_requested: demand.1,
            low: demand.2,
            cycle: GrantCycle {
                exhausted: demand.3,
                open_request,
                next_request_at: Time::from_micros(next_request_at),
                epoch,
                cut_off: CutOffAllowanceUse { start: Time::from_micros(7), used: 3 },
            },
        },
    )
}

fn grant() -> impl Strategy<Value = HitsGrant> {
    (0..3_u64, 100..104_u64, 0..3_u64, 0..1_000_u64, 0..500_u64, any::<bool>(), 0..5_u64).prop_map(
        |(request, window, epoch, hits, low, exhausted, next_request_at)| HitsGrant {
            request,
            window,
            epoch,
            hits,
            low,
            exhausted,
            next_request_at: Time::from_micros(next_request_at),
        },
    )
}

proptest! {
    #[test]
    fn grant_is_taken_once_and_in_its_window(before in counts(), grant in grant()) {
        let mut after = before;
        let taken = after.accept_grant(&grant);
        let is_answer = grant.request != 0 && grant.request == before.cycle.open_request;
        prop_assert_eq!(taken, is_answer && (grant.window == before.window || grant.window == before.window + 1));
        if taken {
            let kept = if grant.window == before.window && grant.epoch <= before.cycle.epoch { before.granted } else { 0 };
            prop_assert_eq!(after.granted, kept + grant.hits);
            prop_assert_eq!((after.window, after.cycle.epoch), (grant.window, before.cycle.epoch.max(grant.epoch)));
            let again = after;
            prop_assert!(!after.accept_grant(&grant), "the same answer twice");
            prop_assert_eq!(after, again);
        } else {
            prop_assert_eq!((after.granted, after.granted_total), match after.window == before.window {
                true => (before.granted, before.granted_total),
                false => (0, 0),
            });
        }
    }

    #[test]
    fn returned_hits_cannot_be_spent(before in counts(), window in 100..104_u64) {
        let mut after = before;
        let returned = after.take_unused_hits(window);
        prop_assert_eq!(returned, if window == before.window { before.granted } else { 0 });
        prop_assert_eq!(after.granted, before.granted - returned);
        prop_assert_eq!(after.granted_total, before.granted_total - returned);
        prop_assert_eq!(after.take_unused_hits(window), 0);
    }
}

fn write(connection: &mut Connection, counts: &WindowCounts) {
    let value: Vec<u8> = words(counts).into_iter().flat_map(u64::to_le_bytes).collect();
    let _: () = cmd("SET").arg(KEY).arg(value).query(connection).expect("the server answers");
}

fn read(connection: &mut Connection) -> Vec<u64> {
    let found: Vec<u8> = cmd("GET").arg(KEY).query(connection).expect("the server answers");
    found.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn words(counts: &WindowCounts) -> Vec<u64> {
    stored_words(Time::from_micros(LAST), counts).to_vec()
}

fn call(connection: &mut Connection, argument: &[u8]) -> u64 {
    let reply: RedisResult<u64> =
        cmd("EVAL").arg(&region_grant_script().text).arg(1).arg(KEY).arg(argument).query(connection);
    reply.expect("the script runs")
}

#[test]
fn script_agrees_with_the_pure_counts() {
    let server = options().start();
    let client = redis::Client::open(format!("redis://{}", server.address())).expect("it is an address");
    let connection = RefCell::new(client.get_connection().expect("the server answers"));
    let outcome =
        TestRunner::new(Config::default()).run(&(counts(), grant(), 100..104_u64), |(before, grant, window)| {
            let connection = &mut *connection.borrow_mut();
            let mut taken = before;
            write(connection, &before);
            let is_taken = u64::from(taken.accept_grant(&grant));
            prop_assert_eq!(call(connection, &encode_hits_grant(PERIOD_MS, &grant)), is_taken);
            prop_assert_eq!(read(connection), words(if is_taken == 1 { &taken } else { &before }));
            write(connection, &before);
            let mut returned = before;
            let hits = returned.take_unused_hits(window);
            prop_assert_eq!(call(connection, &encode_hits_return(PERIOD_MS, window)), hits);
            prop_assert_eq!(read(connection), words(&returned));
            Ok(())
        });
    outcome.unwrap();
    let connection = &mut *connection.borrow_mut();
    let _: i64 = cmd("DEL").arg(KEY).query(connection).expect("the server answers");
    assert_eq!(call(connection, &encode_hits_return(PERIOD_MS, 100)), 0, "a counter that has expired");
}
