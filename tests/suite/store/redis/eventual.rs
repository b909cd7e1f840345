//! Replicas that decide eventual rules locally: real processes, one Redis, a bounded overshoot.
//!
//! Limits are per year, so that nothing refills meanwhile. Policy rejects, so that everything admitted was counted,
//! leased or shared.
//!
//! `TOLLKEEPER_TABLE` names a file that the overshoot is written to, as a table.

use std::env;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::thread;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;
use tollkeeper::base::pb::RateLimitRequest;
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::base::pb::rate_limit_service_client::RateLimitServiceClient;
use tollkeeper::limit::algorithm::Algorithm;
use tonic::transport::{Channel, Endpoint};

use kit::http;
use kit::redis::{Server, options};
use kit::test_service::{TestRequest, store_runtime};
use kit::tollkeeper::{Tollkeeper, with_rules};
use kit::{PATIENCE, wait_for};

const LIMIT: u64 = 2000;
const OVERSHOOT: u64 = 200;
/// Limit of the domain `large`, with an overshoot of 5 %.
const LARGE_LIMIT: u64 = 10_000;
/// Number of replicas: each has a share of 12 hits, 6 under token_bucket.
const SLOTS: usize = 8;
const CALLERS: usize = 48;
const TOKEN: &str = "correct horse battery staple";

fn algorithms() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::LeakyBucket)
}

fn rules() -> String {
    let mut rules =
        "domain: shop\ndefaults: {on_store_error: deny, consistency: eventual, max_overshoot: 10%}\ndescriptors:\n"
            .to_owned();
    for algorithm in algorithms() {
        writeln!(
            rules,
            "  - key: {algorithm}\n    rate_limit: {{unit: year, requests_per_unit: {LIMIT}, algorithm: {algorithm}, \
             consistency: eventual, max_overshoot: 10%}}"
        )
        .expect("a text grows");
    }
    // A larger limit has larger leases.
    let large = rules.replace("domain: shop", "domain: large").replace("10%", "5%");
    let large = large.replace(&LIMIT.to_string(), &LARGE_LIMIT.to_string());
    // Leases of 0.3 s, and almost no refill.
    let slow = "domain: slow\ndescriptors:\n  - key: user\n    rate_limit: {unit: hour, requests_per_unit: 2000, \
                algorithm: token_bucket, consistency: eventual, max_overshoot: 0.017%}\n";
    rules + "---\n" + &large + "---\n" + slow
}

/// Replica and its client.
struct Replica {
    process: Tollkeeper,
    client: RateLimitServiceClient<Channel>,
}

impl Replica {
    fn start(server: &Server, slots: usize) -> Self {
        Self::start_with(server, slots, &rules(), &[])
    }

    fn start_with(server: &Server, slots: usize, rules: &str, env: &[(&str, &str)]) -> Self {
        let setup = with_rules(rules);
        let setup = env.iter().fold(setup, |setup, (name, value)| setup.env(name, value));
        let process = setup
            .env("REDIS_SOCKET_TYPE", "tcp")
            .env("REDIS_URL", server.address())
            .env("TOLLKEEPER_STORE_TIMEOUT", "200ms")
            .env("TOLLKEEPER_MAX_REPLICAS", slots.to_string())
            .env("TOLLKEEPER_ADMIN_TOKEN", TOKEN)
            .start();
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", process.grpc_port())).expect("an address");
        let channel = store_runtime().block_on(endpoint.connect()).expect("the replica accepts");
        Self { process, client: RateLimitServiceClient::new(channel) }
    }

    /// Sends single hits from many callers at once; returns the number admitted. A stopped replica does not answer.
    fn offer(&self, key: &str, value: &str, hits: usize) -> u64 {
        store_runtime().block_on(join_all([self.offering(key, value, hits)]))[0]
    }

    /// Refunds more hits than the counter can have.
    fn refund(&self, key: &str, value: &str) {
        let refund = TestRequest::new("large").descriptor(&[(key, value)]).refund(1 << 31).0;
        let answer = store_runtime().block_on(self.client.clone().should_rate_limit(refund));
        assert_eq!(answer.expect("a refund is answered").into_inner().overall_code(), Code::Ok);
    }

    /// Resets the counter.
    fn reset(&self, key: &str, value: &str) {
        let body = json!({"domain": "large", "descriptors": [{"entries": [{"key": key, "value": value}]}]}).to_string();
        let request = http::post(self.process.debug_port(), "/reset", body);
        assert_eq!(request.header("authorization", format!("Bearer {TOKEN}")).send().status, 200);
    }

    fn offering(&self, key: &str, value: &str, hits: usize) -> impl Future<Output = u64> + use<> {
        self.admissions(&about(key, value), hits)
    }

    fn admissions(&self, request: &RateLimitRequest, hits: usize) -> impl Future<Output = u64> + use<> {
        let callers = (0..CALLERS).map(|caller| {
            let share = hits / CALLERS + usize::from(caller < hits % CALLERS);
            let (mut client, request) = (self.client.clone(), request.clone());
            tokio::spawn(async move {
                let mut admitted = 0;
                for _ in 0..share {
                    let response = client.should_rate_limit(request.clone()).await;
                    admitted +=
                        u64::from(response.is_ok_and(|response| response.into_inner().overall_code() == Code::Ok));
                }
                admitted
            })
        });
        let callers: Vec<_> = store_runtime().block_on(async { callers.collect() });
        async { join_all(callers).await.into_iter().map(|admitted| admitted.expect("no caller panics")).sum() }
    }
}

fn about(key: &str, value: &str) -> RateLimitRequest {
    TestRequest::new("shop").descriptor(&[(key, value)]).0
}

fn offer_all(replicas: &[Replica], key: &str, value: &str, hits: usize) -> u64 {
    let offers: Vec<_> = replicas.iter().map(|replica| replica.offering(key, value, hits)).collect();
    store_runtime().block_on(join_all(offers)).into_iter().sum()
}

/// Writes the admitted hits to the table.
#[derive(Default)]
struct Table(String);

impl Table {
    /// Adds a line, and checks the bound.
    fn row(
        &mut self,
        (scenario, algorithm, replicas): (&str, Algorithm, usize),
        offered: usize,
        admitted: u64,
        calls: u64,
    ) {
        let per_thousand = calls * 1000 / offered as u64;
        writeln!(
            self.0,
            "| {scenario} | {algorithm} | {replicas} | {offered} | {admitted} | {LIMIT} | {} | {per_thousand} |",
            LIMIT + OVERSHOOT
        )
        .expect("a text grows");
        assert!(admitted <= LIMIT + OVERSHOOT, "{scenario}, {algorithm}, {replicas}: {admitted}");
    }

    fn publish(&self) {
        print!("{}", self.0);
        if let Some(path) = env::var_os("TOLLKEEPER_TABLE") {
            let head = "| scenario | algorithm | replicas | offered | admitted | limit | bound | calls per 1000 |\n\
                        |---|---|---|---|---|---|---|---|\n";
            let file = File::options().create(true).append(true).open(path);
            let all = format!("{head}{}", self.0);
            file.and_then(|mut file| file.write_all(all.as_bytes())).expect("the table can be written");
        }
    }
}

fn calls(server: &Server) -> u64 {
    let commands = server.command_counts();
    ["eval", "evalsha"].iter().filter_map(|name| commands.get(*name)).sum()
}

#[test]
fn cold_burst_at_all_replicas_stays_within_the_overshoot() {
    let mut table = Table::default();
    for count in [1, 3, 8] {
        let server = options().start();
        let replicas: Vec<Replica> = (0..count).map(|_| Replica::start(&server, SLOTS)).collect();
        for algorithm in algorithms() {
            let each = 3000 / count;
            let before = calls(&server);
            let admitted = offer_all(&replicas, algorithm.name(), "burst", each);
            table.row(("burst", algorithm, count), each * count, admitted, calls(&server) - before);
            // Unused hits of the other replicas' leases are returned.
            let (mut offered, mut admitted, before) = (each * count, admitted, calls(&server));
            // Each turn sends requests, which take long on a busy machine.
            let began = Instant::now();
            while admitted < LIMIT * 98 / 100 {
                assert!(
                    began.elapsed() < 4 * PATIENCE,
                    "{algorithm}, {count} replicas: {admitted} of {LIMIT} admitted, {offered} offered: {}",
                    replicas[0].process.store_stats()
                );
                offered += 2 * CALLERS;
                admitted += replicas[0].offer(algorithm.name(), "burst", 2 * CALLERS);
            }
            table.row(("and after it", algorithm, count), offered, admitted, calls(&server) - before);
        }
    }
    table.publish();
}

#[test]
fn demand_at_one_of_three_replicas_gets_the_whole_limit() {
    let server = options().start();
    let replicas: Vec<Replica> = (0..3).map(|_| Replica::start(&server, SLOTS)).collect();
    let mut table = Table::default();
    for algorithm in algorithms() {
        let before = calls(&server);
        let offered = 4000;
        let admitted = replicas[1].offer(algorithm.name(), "skewed", offered);
        table.row(("skewed", algorithm, 3), offered, admitted, calls(&server) - before);
        assert!(admitted >= LIMIT * 95 / 100, "{algorithm}: {admitted}");
    }
    table.publish();
    let tally = replicas[1].process.store_stats();
    let count = |name: &str| tally[name].as_u64().unwrap_or_else(|| panic!("{name} in {tally}"));
    // Three times the share of a window, and of a bucket.
    assert_eq!(count("admitted_from_shares"), 3 * 12 + 6);
    assert!(count("leased_hits") >= count("admitted_from_leases") && count("admitted_from_leases") > 0, "{tally}");
    assert_eq!(count("slots"), SLOTS as u64, "{tally}");
}

#[test]
fn crashing_replicas_stay_within_the_overshoot() {
    let server = options().start();
    let mut table = Table::default();
    for algorithm in algorithms() {
        let mut admitted = 0;
        let mut offered = 0;
        let steady = Replica::start(&server, SLOTS);
        for turn in 0..4 {
            let crashing = Replica::start(&server, SLOTS);
            let offers =
                [steady.offering(algorithm.name(), "crash", 600), crashing.offering(algorithm.name(), "crash", 600)];
            offered += 1200;
            let crash = thread::spawn(move || {
                // While it is answering.
                thread::sleep(Duration::from_millis(20 + 30 * turn));
                drop(crashing);
            });
            admitted += store_runtime().block_on(join_all(offers)).into_iter().sum::<u64>();
            crash.join().expect("it ends");
        }
        table.row(("crashes", algorithm, 2), offered, admitted, 0);
    }
    table.publish();
}

#[test]
fn lease_of_one_limit_is_not_used_for_another() {
    let server = options().start();
    let replica = Replica::start(&server, SLOTS);
    let key = Algorithm::FixedWindow.name();
    assert_eq!(replica.offer(key, "leased", 500), 500);
    // Overrides count on the same key: far fewer than were admitted, also per year.
    let lower = TestRequest::new("shop").descriptor(&[(key, "leased")]).limit(10, 6, None).0;
    assert_eq!(store_runtime().block_on(join_all([replica.admissions(&lower, 200)])), [0]);
}

#[test]
fn changed_limit_gets_leases_before_the_period_of_the_used_share_ends() {
    let server = options().start();
    let replica = Replica::start(&server, SLOTS);
    for algorithm in algorithms() {
        let key = algorithm.name();
        // The share is used for a year.
        assert_eq!(replica.offer(key, "changed", 500), 500);
        let changed = TestRequest::new("shop").descriptor(&[(key, "changed")]).limit(9000, 6, None).0;
        let from_leases = || replica.process.store_stats()["admitted_from_leases"].as_u64().unwrap();
        let before = from_leases();
        wait_for("leases of the new limit", || {
            store_runtime().block_on(replica.admissions(&changed, 200));
            (from_leases() > before).then_some(())
        });
    }
}

#[test]
fn returned_lease_ends_a_cached_rejection() {
    let server = options().start();
    let replica = Replica::start(&server, SLOTS);
    // A busy machine may take a second for what takes 0.3 s.
    let is_admitted_in_time = |value: usize| {
        let value = value.to_string();
        let request = |hits| TestRequest::new("slow").descriptor(&[("user", &value)]).hits(hits).0;
        // Demand that never passes, and a hit that does: with it a lease is charged, of which nothing is used.
        assert_eq!(store_runtime().block_on(replica.admissions(&request(2001), 50)), 0);
        assert_eq!(store_runtime().block_on(replica.admissions(&request(1), 1)), 1);
        let state: Vec<u8> = server.query(&["GET", &format!("tk1:{{slow|user={value}}}:token_bucket:3600s")]);
        let used = u64::from_le_bytes(state[8..16].try_into().expect("three numbers"));
        // Fits once hits of the lease have been returned.
        let large = request(2000 - used + 10);
        let began = Instant::now();
        used > 20 && store_runtime().block_on(replica.admissions(&large, 1)) == 0 && {
            wait_for("the lease to end", || {
                (store_runtime().block_on(replica.admissions(&large, 1)) == 1).then_some(())
            });
            // The rejection may be cached for a second.
            began.elapsed() < Duration::from_secs(1)
        }
    };
    assert!((0..20).any(is_admitted_in_time));
}

#[test]
fn record_of_leases_is_no_counter_of_the_listing() {
    let server = options().start();
    let replica = Replica::start(&server, SLOTS);
    let key = Algorithm::FixedWindow.name();
    assert_eq!(replica.offer(key, "listed", 500), 500);
    let record = format!("tk1:{{shop|{key}=listed}}:leases");
    assert_eq!(server.query::<u64>(&["STRLEN", &record]) % 16, 0);
    assert_eq!(server.query::<u64>(&["EXISTS", &record]), 1);
    let counter = format!("tk1:{{shop|{key}=listed}}:{key}:31536000s");
    assert_eq!(replica.offer(key, "other", 100), 100);
    // A charge of the lease may still be on its way and make the counter again, and there is room for one only.
    let listing = wait_for("a complete listing", || {
        server.query::<u64>(&["DEL", &counter]);
        let page = http::get(replica.process.debug_port(), &format!("/counters?domain=shop&rule=shop.{key}&most=1"));
        let page = page.header("authorization", format!("Bearer {TOKEN}")).send();
        let listing: serde_json::Value = serde_json::from_slice(&page.body).unwrap_or_else(|_| panic!("{page:?}"));
        (listing["complete"] == true).then_some(listing)
    });
    assert_eq!(listing["counters"][0]["entries"][0][1], "other", "{listing}");
}

#[test]
fn shutdown_refunds_leases() {
    let server = options().start();
    // With this many slots there are no shares: all admitted hits are counted.
    let replica = Replica::start(&server, 1000);
    let key = Algorithm::FixedWindow.name();
    let admitted = replica.offer(key, "stop", 500);
    assert_eq!(admitted, 500);
    let mut process = replica.process;
    process.signal("TERM");
    assert!(process.wait().success());
    let state: Vec<u8> = server.query(&["GET", &format!("tk1:{{shop|{key}=stop}}:{key}:31536000s")]);
    let count = u64::from_le_bytes(state[8..16].try_into().expect("two numbers"));
    assert_eq!(count, admitted);
}

/// Makes demand for leases at three replicas, then empties the counter, a few times. Checks what is admitted after
/// that.
fn check_leases_outlive(what: &str, empty: fn(&Replica, &str, &str)) {
    const HITS: u64 = 10;
    let server = options().start();
    let replicas: Vec<Replica> = (0..3).map(|_| Replica::start(&server, SLOTS)).collect();
    for algorithm in algorithms() {
        for emptied in 0..3 {
            let (key, value) = (algorithm.name(), format!("{what}{emptied}"));
            let request = TestRequest::new("large").descriptor(&[(key, &value)]).hits(HITS).0;
            let offer = |requests| {
                let offers: Vec<_> = replicas.iter().map(|replica| replica.admissions(&request, requests)).collect();
                store_runtime().block_on(join_all(offers)).into_iter().sum::<u64>()
            };
            offer(120);
            empty(&replicas[emptied], key, &value);
            let admitted = HITS * offer(600);
            assert!(admitted <= LARGE_LIMIT + LARGE_LIMIT / 20, "{what}, {algorithm}: {admitted}");
            assert!(admitted >= LARGE_LIMIT / 2, "{what}, {algorithm}: {admitted}");
        }
    }
}

#[test]
fn refund_of_more_hits_than_were_charged_leaves_leases_charged() {
    check_leases_outlive("refunded", Replica::refund);
}

#[test]
fn reset_leaves_leases_charged() {
    check_leases_outlive("reset", Replica::reset);
}

#[test]
fn strict_limit_holds_beside_an_eventual_one_if_rejected_requests_are_spared() {
    let server = options().start();
    let rules = "domain: shop
defaults: {on_store_error: deny}
descriptors:
  - {key: strict, rate_limit: {unit: year, requests_per_unit: 5}}
  - {key: eventual, rate_limit: {unit: year, requests_per_unit: 1000000, consistency: eventual, max_overshoot: 1}}";
    let env = [("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")];
    let replica = Replica::start_with(&server, 2, rules, &env);
    let both = TestRequest::new("shop").descriptor(&[("strict", "x")]).descriptor(&[("eventual", "x")]).0;
    // A strict override uses up the counter while a lease is out. Leased hits count as used in Redis, but admit here.
    let rest = TestRequest::new("shop").descriptor(&[("eventual", "x")]).limit(1_000_000, 6, None).hits(1_000_000).0;
    wait_for("a lease with hits left", || {
        replica.offer("eventual", "x", 500);
        let stats = replica.process.store_stats();
        let [leased, admitted] = ["leased_hits", "admitted_from_leases"].map(|name| stats[name].as_u64().unwrap());
        (leased > admitted + 50).then_some(())
    });
    store_runtime().block_on(replica.admissions(&rest, 1));
    let admitted = store_runtime().block_on(replica.admissions(&both, 200));
    assert!(admitted <= 5, "{admitted} of 5");
}
