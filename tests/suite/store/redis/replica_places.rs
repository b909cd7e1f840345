//! Replica places: claims, the time in which a share may be spent, the replica count, and its effect on `local`.
//!
//! Most tests send the script's requests as processes would, at chosen times; `model` checks the invariants over
//! random lives. The others watch processes, through their keys in Redis and their responses.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::time::Duration;

use redis::{Connection, RedisResult, cmd};
use tollkeeper::base::clock::Time;
use tollkeeper::store::redis::replicas::{self, CLAIM_DURATION, ClaimAction, ClaimReply, ProcessId, ReplicaMembership};
use tollkeeper::store::redis::{Redis, script};

use kit::fixtures::{load_shop_rules, shop_request};
use kit::redis::cluster::Cluster;
use kit::redis::{self as servers, Server};
use kit::redis_counters::{self, TimeSource};
use kit::replica::Replica;
use kit::test_service::store_runtime;
use kit::tollkeeper::{Setup, with_rules};
use kit::{http, wait_for};
use tokio::time::Instant;

mod model;

/// Time of the first claim.
const START: Time = Time::from_secs(1_783_512_000);
const SECOND: u64 = 1_000_000;

/// Registry of places in a Redis, called at chosen times.
struct Table {
    connection: Connection,
    key: String,
    now: Cell<Time>,
}

impl Table {
    fn new(server: &Server) -> Self {
        Self::at(server, "tk1:{replicas}")
    }

    fn at(server: &Server, key: &str) -> Self {
        let client = ::redis::Client::open(format!("redis://{}", server.address())).expect("it is an address");
        let connection = client.get_connection().expect("the server answers");
        Self { connection, key: key.to_owned(), now: Cell::new(START) }
    }

    fn pass(&self, span: Duration) {
        self.now.set(self.now.get().plus_us(u64::try_from(span.as_micros()).unwrap()));
    }

    fn try_claim(&mut self, owner: u8, places: u32, action: ClaimAction, now: Option<Time>) -> RedisResult<ClaimReply> {
        let argument = replicas::encode_claim_argument(ProcessId([owner + 1; 16]), places, action, now);
        let mut command = cmd("EVAL");
        command.arg(&script::replicas_script().text).arg(1).arg(&self.key).arg(&argument[..]);
        let reply: Vec<u8> = command.query(&mut self.connection)?;
        Ok(replicas::decode_claim_reply(&reply).expect("the reply can be read"))
    }

    fn claim(&mut self, owner: u8, places: u32, action: ClaimAction) -> ClaimReply {
        let reply = self.try_claim(owner, places, action, Some(self.now.get())).expect("the script has no mistake");
        assert_eq!(reply.now, self.now.get());
        reply
    }

    /// Claims or renews a place; returns it and the end of the previous claim.
    fn claim_or_renew(&mut self, owner: u8, places: u32) -> (Option<u32>, Time) {
        let reply = self.claim(owner, places, ClaimAction::Claim);
        (reply.place, reply.previous_end)
    }
}

fn never() -> Time {
    Time::default()
}

#[test]
fn each_process_gets_its_own_place_and_keeps_it() {
    let server = servers::options().start();
    let mut table = Table::new(&server);
    for owner in 0..3 {
        let expected =
            ClaimReply { now: START, place: Some(owner.into()), previous_end: never(), live: 1, max_replicas: 3 };
        assert_eq!(table.claim(owner, 3, ClaimAction::Claim), ClaimReply { live: u32::from(owner) + 1, ..expected });
    }
    // Processes beyond the places wait, and are counted.
    assert_eq!(table.claim(3, 3, ClaimAction::Claim).place, None);
    assert_eq!(table.claim(4, 3, ClaimAction::Claim).live, 5);
    for _ in 0..10 {
        table.pass(Duration::from_secs(29));
        for owner in 0..3 {
            assert_eq!(table.claim_or_renew(owner, 3), (Some(owner.into()), never()));
        }
        assert_eq!(table.claim(3, 3, ClaimAction::Claim).place, None);
    }
    assert_eq!(table.claim(0, 3, ClaimAction::Claim).live, 4, "one of those that waited has gone");
    let life: i64 = server.query(&["PTTL", "tk1:{replicas}"]);
    let longest = 366 * 86_400_000;
    assert!(longest - 60_000 < life && life <= longest, "{life}");
}

#[test]
fn claim_expires_after_30_seconds_and_the_longest_free_place_is_next() {
    let server = servers::options().start();
    let mut table = Table::new(&server);
    table.claim_or_renew(0, 2);
    table.pass(Duration::from_secs(1));
    table.claim_or_renew(1, 2);
    table.pass(CLAIM_DURATION - Duration::from_secs(1) - Duration::from_micros(1));
    assert_eq!(table.claim_or_renew(2, 2).0, None);
    table.pass(Duration::from_micros(1));
    let end = START.plus_us(30 * SECOND);
    assert_eq!(table.claim_or_renew(2, 2), (Some(0), end));
    // Renewals do not change the end of the previous claim.
    table.pass(Duration::from_secs(10));
    assert_eq!(table.claim_or_renew(2, 2), (Some(0), end));
    assert_eq!(table.claim_or_renew(3, 2), (Some(1), START.plus_us(31 * SECOND)));
    // A process that lost its place gets another.
    table.pass(Duration::from_secs(31));
    assert_eq!(table.claim_or_renew(3, 2).0, Some(1), "its own, though the other is free for longer");
    assert_eq!(table.claim_or_renew(0, 2), (Some(0), START.plus_us(70 * SECOND)));
    // A process that regains its place has not used it meanwhile.
    table.pass(Duration::from_secs(100));
    assert_eq!(table.claim_or_renew(0, 2), (Some(0), START.plus_us(101 * SECOND)));
}

#[test]
fn share_is_usable_one_period_after_the_previous_claim_for_30_seconds() {
    let server = servers::options().start();
    let mut table = Table::new(&server);
    let [first, second] = [(); 2].map(|()| ReplicaMembership::new(NonZeroU32::MIN));
    let (sent, received) = (Instant::now(), Instant::now() + Duration::from_millis(5));
    let micro = Duration::from_micros(1);
    let period = 60 * SECOND;
    assert!(!first.may_use_share(period, received));
    first.record_claim_reply(&table.claim(0, 1, ClaimAction::Claim), sent, received);
    assert!(!first.may_use_share(0, received - micro));
    assert!(first.may_use_share(u64::MAX, received), "it never had a holder");
    assert!(first.may_use_share(period, sent + CLAIM_DURATION - micro));
    assert!(!first.may_use_share(0, sent + CLAIM_DURATION));
    assert_eq!(first.redis_time(received + Duration::from_secs(1)), Some(START.plus_us(SECOND)));
    assert_eq!(
        first.redis_time(received - Duration::from_secs(1)),
        Some(Time::from_secs(START.as_micros() / SECOND - 1))
    );

    // Ten seconds after its end another process has the place, and learns it a second later.
    table.pass(CLAIM_DURATION + Duration::from_secs(10));
    let received = sent + CLAIM_DURATION + Duration::from_secs(11);
    let mut renewed = received - Duration::from_secs(1);
    second.record_claim_reply(&table.claim(1, 1, ClaimAction::Claim), renewed, received);
    let due = received + Duration::from_secs(50);
    while renewed + CLAIM_DURATION <= due {
        assert!(second.may_use_share(10 * SECOND, received));
        assert!(!second.may_use_share(10 * SECOND + 1, received));
        table.pass(Duration::from_secs(10));
        renewed += Duration::from_secs(10);
        second.record_claim_reply(
            &table.claim(1, 1, ClaimAction::Claim),
            renewed,
            renewed + Duration::from_millis(300),
        );
    }
    assert!(!second.may_use_share(period, due - micro));
    assert!(second.may_use_share(period, due));
    second.end_place_use();
    assert!(!second.may_use_share(0, due));
}

#[test]
fn released_place_is_free_at_once() {
    let server = servers::options().start();
    let mut table = Table::new(&server);
    table.claim_or_renew(0, 1);
    table.pass(Duration::from_secs(3));
    assert_eq!(table.claim(1, 1, ClaimAction::Claim).live, 2);
    let ended = table.claim(0, 1, ClaimAction::Release);
    assert_eq!((ended.place, ended.live), (None, 1));
    let end = table.now.get();
    table.pass(Duration::from_secs(2));
    assert_eq!(table.claim_or_renew(1, 1), (Some(0), end));
    // A process without a place releases no place of others.
    assert_eq!(table.claim(0, 1, ClaimAction::Release).live, 1);
    assert_eq!(table.claim(2, 1, ClaimAction::Release).live, 1);
    assert_eq!(table.claim_or_renew(1, 1), (Some(0), end));
}

#[test]
fn new_place_count_waits_for_old_claims_to_end() {
    let server = servers::options().start();
    let mut table = Table::new(&server);
    table.claim_or_renew(0, 2);
    table.claim_or_renew(1, 2);
    for _ in 0..5 {
        table.pass(Duration::from_secs(20));
        table.claim_or_renew(0, 2);
        let rejected = table.claim(7, 4, ClaimAction::Claim);
        assert_eq!((rejected.place, rejected.max_replicas, rejected.previous_end), (None, 2, never()));
        assert_eq!(table.claim(7, 4, ClaimAction::Release).max_replicas, 2);
        table.claim(7, 4, ClaimAction::Claim);
    }
    table.claim(0, 2, ClaimAction::Release);
    // That counts as the end of every claim, also of places that never had a holder.
    let end = table.now.get();
    let first = table.claim(7, 4, ClaimAction::Claim);
    assert_eq!((first.place, first.max_replicas, first.previous_end, first.live), (Some(0), 4, end, 1));
    table.pass(Duration::from_secs(1));
    for (place, owner) in [8, 9, 10].into_iter().enumerate() {
        assert_eq!(table.claim_or_renew(owner, 4), (u32::try_from(place + 1).ok(), end));
    }
    assert_eq!(table.claim(0, 2, ClaimAction::Claim).max_replicas, 4);
    assert_eq!(table.claim_or_renew(11, 4).0, None);
}

#[test]
fn clock_set_back_keeps_no_place_for_long() {
    let server = servers::options().start();
    let mut table = Table::new(&server);
    table.pass(Duration::from_secs(400 * 86_400));
    table.claim_or_renew(0, 1);
    table.now.set(START);
    assert_eq!(table.claim_or_renew(1, 1).0, None, "it may still be in use");
    table.pass(CLAIM_DURATION);
    assert_eq!(table.claim_or_renew(1, 1), (Some(0), table.now.get()));
}

#[test]
fn places_are_claimed_again_after_a_flush() {
    let server = servers::options().start();
    let mut table = Table::new(&server);
    table.claim_or_renew(0, 3);
    table.claim_or_renew(1, 3);
    server.query::<()>(&["FLUSHALL"]);
    assert_eq!(table.claim_or_renew(1, 3), (Some(0), never()));
    assert_eq!(table.claim_or_renew(0, 3), (Some(1), never()));
    assert_eq!(table.claim(2, 3, ClaimAction::Claim).live, 3);
}

#[test]
fn waiting_processes_are_counted_up_to_a_thousand() {
    let server = servers::options().start();
    let mut table = Table::new(&server);
    table.claim_or_renew(0, 1000);
    let claim_live = |table: &mut Table, number: u16| {
        let mut owner = [0xff; 16];
        owner[..2].copy_from_slice(&number.to_le_bytes());
        let argument = replicas::encode_claim_argument(ProcessId(owner), 1, ClaimAction::Claim, Some(START));
        let mut command = cmd("EVAL");
        command.arg(&script::replicas_script().text).arg(1).arg(&table.key).arg(&argument[..]);
        replicas::decode_claim_reply(&command.query::<Vec<u8>>(&mut table.connection).unwrap()).unwrap().live
    };
    let counted: Vec<u32> = (0..1003).map(|number| claim_live(&mut table, number)).collect();
    let expected: Vec<u32> = (0..1003).map(|number| 1 + (number + 1).min(1000)).collect();
    assert_eq!(counted, expected);
    let bytes: u64 = server.query(&["STRLEN", "tk1:{replicas}"]);
    assert_eq!(bytes, 8 + 32 * 1000 + 24 * 1000);
    table.pass(CLAIM_DURATION);
    assert_eq!(table.claim(1, 1, ClaimAction::Claim).live, 1);
    assert_eq!(server.query::<u64>(&["STRLEN", "tk1:{replicas}"]), 8 + 32);
}

#[test]
fn foreign_value_is_left_alone() {
    let server = servers::options().start();
    let mut table = Table::new(&server);
    let plants: [&[&str]; 6] = [
        &["SET", "tk1:{replicas}", ""],
        &["SET", "tk1:{replicas}", "nonsense"],
        &["SET", "tk1:{replicas}", "\u{1}\0\0\0\0\0\0\0"],
        &["SET", "tk1:{replicas}", "\0\0\0\0\0\0\0\0"],
        &["RPUSH", "tk1:{replicas}", "x"],
        &["HSET", "tk1:{replicas}", "r", "16"],
    ];
    for plant in plants {
        server.query::<()>(plant);
        let planted: Vec<u8> = server.query(&["DUMP", "tk1:{replicas}"]);
        let error = table.try_claim(0, 16, ClaimAction::Claim, Some(START)).unwrap_err();
        assert_eq!(error.code(), Some("WRONGTYPE"), "{plant:?}: {error}");
        assert_eq!(server.query::<Vec<u8>>(&["DUMP", "tk1:{replicas}"]), planted);
        server.query::<()>(&["DEL", "tk1:{replicas}"]);
    }
}

#[test]
fn registry_key_differs_from_all_counter_keys() {
    assert_eq!(replicas::replica_registry_key(""), "tk1:{replicas}");
    assert_eq!(replicas::replica_registry_key("prod:{x}"), "prod:\\7bx\\7dtk1:{replicas}");
}

/// Waits until a store counts this many live replicas; it renews at once instead of after ten seconds.
fn wait_until_live(redis: &Redis, live: u32) {
    wait_for("the others to be counted", || {
        let _within = store_runtime().enter();
        redis.claim_replica_place();
        (redis.replica_membership().live_replicas() == NonZeroU32::new(live)).then_some(())
    });
}

#[test]
fn store_claims_a_place_on_single_and_cluster() {
    let server = servers::options().start();
    let cluster = Cluster::start();
    let (single, nodes) = (server.address(), cluster.addresses().join(","));
    for env in [
        vec![("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", single.as_str())],
        vec![("REDIS_TYPE", "cluster"), ("REDIS_URL", nodes.as_str())],
    ] {
        let [one, other] = [(); 2].map(|()| redis_counters::start_store(&env, TimeSource::Redis));
        assert_eq!(
            (one.replica_membership().live_replicas(), one.replica_membership().max_replicas().get()),
            (None, 16)
        );
        wait_until_live(&one, 1);
        wait_until_live(&other, 2);
        wait_until_live(&one, 2);
        assert_eq!([&one, &other].map(|store| store.replica_membership().place()), [Some(0), Some(1)]);
        assert!(other.replica_membership().may_use_share(u64::MAX, Instant::now()));
        store_runtime().block_on(other.shutdown());
        assert!(!other.replica_membership().may_use_share(0, Instant::now()));
        wait_until_live(&one, 1);
    }
}

#[test]
fn ratelimit_key_format_claims_no_place() {
    let server = servers::options().start();
    let address = server.address();
    let env = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", address.as_str()), ("TOLLKEEPER_KEY_FORMAT", "ratelimit")];
    let store = redis_counters::start_store(&env, TimeSource::Redis);
    let _within = store_runtime().enter();
    store.claim_replica_place();
    redis_counters::wait_until_connected(&store);
    assert_eq!(server.query::<u64>(&["EXISTS", "tk1:{replicas}"]), 0);
    assert_eq!(store.replica_membership().live_replicas(), None);
}

/// Number of ten requests that pass at a replica without its Redis, under a limit of ten.
fn passes_alone(replica: &Replica) -> usize {
    (0..10).filter(|_| !replica.decide(&shop_request("k=x")).expect("it decides by itself").over_limit()).count()
}

#[test]
fn local_policy_divides_by_the_last_seen_replica_count_unless_set() {
    for (told, expected) in [(None, 3), (Some("2"), 5)] {
        let server = servers::options().start();
        let env: Vec<_> = [("TOLLKEEPER_ON_STORE_ERROR", "local"), ("TOLLKEEPER_STORE_TIMEOUT", "100ms")]
            .into_iter()
            .chain(told.map(|replicas| ("TOLLKEEPER_REPLICAS", replicas)))
            .collect();
        let replicas = [(); 3].map(|()| {
            let replica = Replica::new(&server.address(), env.clone(), START);
            load_shop_rules(
                &replica.service,
                "descriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 10}}]",
            );
            replica
        });
        replicas.iter().zip(1..).for_each(|(replica, live)| wait_until_live(&replica.redis, live));
        replicas.iter().for_each(|replica| wait_until_live(&replica.redis, 3));
        server.kill();
        assert_eq!(replicas.each_ref().map(passes_alone), [expected; 3], "{told:?}");
    }
}

/// Process with an ACL user that has the documented permissions, on keys of these patterns.
fn process(server: &Server, keys: &[&str]) -> Setup {
    const MAY: &str = "-@all +eval +evalsha +time +get +set +pexpire +llen +lindex +lrange +lset +ltrim +rpush";
    let mut words = vec!["ACL", "SETUSER", "documented", "on", ">secret"];
    words.extend(keys.iter().copied().chain(MAY.split(' ')));
    server.query::<()>(&words);
    with_rules("domain: shop\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 10}}]")
        .env("REDIS_URL", format!("redis://documented:secret@{}", server.address()))
        .env("REDIS_SOCKET_TYPE", "tcp")
}

/// Documented key patterns.
const DOCUMENTED: &[&str] = &["~tk1:*"];

fn wait_for_the_registry(server: &Server) {
    wait_for("a claim", || (server.query::<u64>(&["EXISTS", "tk1:{replicas}"]) == 1).then_some(()));
}

#[test]
fn process_claims_a_place_and_releases_it_on_shutdown() {
    let server = servers::options().start();
    let mut process = process(&server, DOCUMENTED).start();
    wait_for_the_registry(&server);
    let mut table = Table::new(&server);
    let other = table.try_claim(1, 16, ClaimAction::Claim, None).unwrap();
    assert_eq!((other.place, other.previous_end, other.live), (Some(1), never(), 2));
    process.signal("TERM");
    assert!(process.wait().success());
    let alone = table.try_claim(1, 16, ClaimAction::Claim, None).unwrap();
    assert_eq!(alone.live, 1);
    table.try_claim(1, 16, ClaimAction::Release, None).unwrap();
    let next = table.try_claim(2, 16, ClaimAction::Claim, None).unwrap();
    assert_eq!(next.place, Some(2), "a place without an earlier holder has been free for longest");
}

#[test]
fn disagreement_about_the_place_count_is_logged_once() {
    let server = servers::options().start();
    let _first = process(&server, DOCUMENTED).start();
    wait_for_the_registry(&server);
    let second = process(&server, DOCUMENTED).env("TOLLKEEPER_MAX_REPLICAS", "8").start();
    let warning = "TOLLKEEPER_MAX_REPLICAS differs between replicas: 8 here, 16 in running replicas";
    wait_for("a warning", || second.stderr().contains(warning).then_some(()));
    assert_eq!(second.stderr().matches(warning).count(), 1);
    let mut table = Table::new(&server);
    assert_eq!(table.try_claim(1, 16, ClaimAction::Claim, None).unwrap().live, 3);
}

/// Number of script calls sent, permitted or not.
fn script_calls(server: &Server) -> u64 {
    let stats = server.info("cmdstat_eval");
    let counts = stats.split(',').filter_map(|field| field.split_once('='));
    counts
        .filter(|(name, _)| ["calls", "rejected_calls"].contains(name))
        .map(|(_, count)| count.parse::<u64>().unwrap())
        .sum()
}

#[test]
fn unusable_registry_does_no_other_harm() {
    let server = servers::options().start();
    server.query::<()>(&["RPUSH", "tk1:{replicas}", "of another program"]);
    // The key has another type, or the user may not access it.
    for keys in [DOCUMENTED, &["resetkeys", "~tk1:{[0-9]*", "~tk1:{shop*"]] {
        let process = process(&server, keys).start();
        wait_for("a warning", || process.stderr().contains("cannot register this replica").then_some(()));
        let body = r#"{"domain": "shop", "descriptors": [{"entries": [{"key": "k", "value": "x"}]}]}"#;
        let before = script_calls(&server);
        wait_for("it to try again", || (script_calls(&server) > before + 1).then_some(()));
        assert_eq!(process.post_json(body).status, 200);
        let ready = http::get(process.http_port(), "/readyz").send();
        assert_eq!(ready.status, 200, "{}", ready.text());
        assert_eq!(process.stderr().matches("cannot register this replica").count(), 1);
    }
}
