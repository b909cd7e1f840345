//! Resets of global limits: the list in the global Redis, and counters that follow it.

use redis::{Connection, RedisResult, cmd};
use tollkeeper::base::clock::Time;
use tollkeeper::store::client::redis::connection::Script;
use tollkeeper::store::redis::regions::grant_encoding::encode_counter_reset;
use tollkeeper::store::redis::regions::resets::{self, CounterToReset, ListedReset, ResetsReply};
use tollkeeper::store::redis::script::{global_resets_script, region_reset_script};

use kit::redis::{self as servers, Server};

const START: Time = Time::from_secs(1_783_512_000);
const LIST: &str = "tk1:{resets}";
const COUNTER: &str = "tk1:{shop|user=ann}:region_fixed_window:60s";
const NEVER: Time = Time::from_micros(0);

fn after(seconds: u64) -> Time {
    START.plus_us(seconds * 1_000_000)
}

fn connect(server: &Server) -> Connection {
    let client = redis::Client::open(format!("redis://{}", server.address())).expect("it is an address");
    client.get_connection().expect("the server answers")
}

fn try_run<T: redis::FromRedisValue>(
    connection: &mut Connection,
    script: &Script,
    key: &str,
    argument: &[u8],
) -> RedisResult<T> {
    cmd("EVAL").arg(&script.text).arg(1).arg(key).arg(argument).query(connection)
}

fn list(connection: &mut Connection, argument: &[u8]) -> ResetsReply {
    let reply: Vec<u8> = try_run(connection, global_resets_script(), LIST, argument).expect("the script runs");
    resets::decode_resets_reply(&reply).expect("the reply can be read")
}

fn counter(name: &str) -> CounterToReset {
    CounterToReset { key: name.to_owned().into(), period_ms: 60_000 }
}

fn add(connection: &mut Connection, time: Time, names: &[&str], now: Time) -> Time {
    let counters: Vec<CounterToReset> = names.iter().copied().map(counter).collect();
    let reply = list(connection, &resets::encode_resets_addition(time, &counters, Some(now)));
    assert_eq!((reply.now, reply.resets), (now, vec![]));
    reply.newest
}

/// Names of the counters after a time, and the time of the newest.
fn read(connection: &mut Connection, after: Time, now: Time) -> (Vec<String>, Time) {
    let reply = list(connection, &resets::encode_resets_read(after, Some(now)));
    let name = |ListedReset { time, counter }: ListedReset| {
        assert!(time <= reply.newest && counter.period_ms == 60_000);
        String::from_utf8(counter.key.to_vec()).expect("it is text")
    };
    (reply.resets.into_iter().map(name).collect(), reply.newest)
}

#[test]
fn list_returns_the_resets_after_a_time() {
    let server = servers::options().start();
    let connection = &mut connect(&server);
    assert_eq!(read(connection, NEVER, START), (vec![], NEVER));
    assert_eq!(add(connection, START, &["a", "b"], after(1)), after(1));
    assert_eq!(read(connection, NEVER, after(2)), (vec!["a".to_owned(), "b".to_owned()], after(1)));
    // A counter's node may be ahead, and a clock may be set back: times rise all the same.
    assert_eq!(add(connection, after(9), &["c"], after(3)), after(9));
    assert_eq!(add(connection, after(4), &["d"], after(4)), after(9).plus_us(1));
    assert_eq!(read(connection, after(1), after(5)), (vec!["d".to_owned(), "c".to_owned()], after(9).plus_us(1)));
    assert_eq!(read(connection, after(9).plus_us(1), after(5)), (vec![], after(9).plus_us(1)));
    // What a failover lost is read again.
    let all = ["d", "c", "a", "b"].map(str::to_owned).to_vec();
    assert_eq!(read(connection, after(100), after(5)), (all, after(9).plus_us(1)));
    // Kept for an hour.
    assert_eq!(add(connection, NEVER, &["e"], after(3605)), after(3605));
    assert_eq!(read(connection, NEVER, after(3605)).0, ["e", "d", "c"]);
    let life: i64 = server.query(&["PTTL", LIST]);
    assert!(3_500_000 < life && life <= 3_600_000, "{life}");
}

#[test]
fn list_is_bounded_and_rejects_other_values() {
    let server = servers::options().start();
    let connection = &mut connect(&server);
    let names: Vec<String> = (0..700).map(|number| format!("counter {number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for second in 0..4 {
        add(connection, NEVER, &names, after(second));
    }
    let length: u64 = server.query(&["STRLEN", LIST]);
    assert!(length <= 1_700 * 40, "at most 1000 of before are kept: {length}");
    assert_eq!(read(connection, NEVER, after(4)).0.len(), 1000);
    for value in ["x", &"\u{1}".repeat(30)] {
        server.query::<()>(&["SET", LIST, value]);
        let argument = resets::encode_resets_read(NEVER, None);
        let error = try_run::<Vec<u8>>(connection, global_resets_script(), LIST, &argument).unwrap_err();
        assert!(error.to_string().contains("WRONGTYPE"), "{error}");
    }
    assert!(resets::decode_resets_reply(&[0; 40]).is_ok_and(|reply| reply.resets.len() == 1));
    for broken in [&[0; 15][..], &[0; 39], &[255; 16], &[&[0; 32][..], &[1, 0, 0, 0, 0, 0, 0, 0]].concat()] {
        assert!(resets::decode_resets_reply(broken).is_err(), "{broken:?}");
    }
}

#[test]
fn counter_follows_a_reset_once() {
    let server = servers::options().start();
    let connection = &mut connect(&server);
    let mut follow = |time: Time| -> u64 {
        try_run(connection, region_reset_script(), COUNTER, &encode_counter_reset(60_000, time))
            .expect("the script runs")
    };
    assert_eq!(follow(after(1)), 0, "no counter");
    let state = |epoch: u64| [[7_u64; 12].as_slice(), &[epoch, 5, 6]].concat();
    let write = |words: &[u64]| {
        let value: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut connection = connect(&server);
        let _: () = cmd("SET").arg(COUNTER).arg(value).query(&mut connection).expect("the server answers");
    };
    let read = || -> Vec<u64> {
        let found: Vec<u8> = server.query(&["GET", COUNTER]);
        found.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    };
    let empty = [[0_u64; 12].as_slice(), &[after(1).as_micros(), 0, 0]].concat();
    for epoch in [0, START.as_micros()] {
        write(&state(epoch));
        assert_eq!(follow(after(1)), 1);
        assert_eq!(read(), empty);
        let life: i64 = server.query(&["PTTL", COUNTER]);
        assert!(110_000 < life && life <= 122_000, "{life}");
    }
    let used = [[9_u64; 12].as_slice(), &[after(1).as_micros(), 0, 0]].concat();
    write(&used);
    assert_eq!(follow(after(1)), 0, "again");
    assert_eq!(follow(START), 0, "an older reset");
    assert_eq!(read(), used);
    server.query::<()>(&["SET", COUNTER, "x"]);
    let error =
        try_run::<u64>(&mut connect(&server), region_reset_script(), COUNTER, &encode_counter_reset(60_000, START));
    assert!(error.unwrap_err().to_string().contains("WRONGTYPE"));
}
