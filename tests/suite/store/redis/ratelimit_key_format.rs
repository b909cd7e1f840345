//! `TOLLKEEPER_KEY_FORMAT=ratelimit`: the counters of envoyproxy/ratelimit, by INCRBY and EXPIRE.
//!
//! Both programs may serve one Redis at the same time, so the tests check what the other one sees: bytes of keys,
//! values, expiries, commands. A plain connection sends the commands of envoyproxy/ratelimit.

mod refunds;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use tollkeeper::base::clock::Time;

use kit::redis::cluster::Cluster;
use kit::redis::{self, Server};
use kit::replica::Replica;
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::test_service::TestRequest;
use kit::tollkeeper::with_rules;
use kit::{http, wait_for};

/// Time of most examples: twenty minutes after the epoch.
const NOW: Time = Time::from_secs(1234);
const SECOND_US: u64 = 1_000_000;
/// Jitter that is longer than any test.
const LONG_JITTER: (&str, &str) = ("EXPIRATION_JITTER_MAX_SECONDS", "31622400");
const FORMAT: (&str, &str) = ("TOLLKEEPER_KEY_FORMAT", "ratelimit");

const RULES: &str = "domain: domain
descriptors:
  - {key: key, rate_limit: {unit: second, requests_per_unit: 3}}
  - {key: minute, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: hour, rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 3}}
  - {key: week, rate_limit: {unit: week, requests_per_unit: 3}}
  - {key: month, rate_limit: {unit: month, requests_per_unit: 3}}
  - {key: year, rate_limit: {unit: year, requests_per_unit: 3}}
  - {key: other, rate_limit: {unit: minute, requests_per_unit: 1000}}
  - key: key2
    value: value2
    descriptors: [{key: subkey2, rate_limit: {unit: minute, requests_per_unit: 3}}]
  - {key: files, value: files/*, share_threshold: true, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: trial, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 1}}
";

fn replica_at(address: &str, env: &[(&str, &str)], start: Time) -> Replica {
    let replica = Replica::new(address, [FORMAT, LONG_JITTER].iter().chain(env).copied(), start);
    replica.service.load([("rules.yaml", RULES)]);
    replica
}

fn replica(server: &Server) -> Replica {
    replica_at(&server.address(), &[], NOW)
}

fn about(entries: &[(&str, &str)]) -> TestRequest {
    TestRequest::new("domain").descriptor(entries)
}

/// Value of each counter key, without the key of the health check.
fn counters(server: &Server) -> BTreeMap<String, String> {
    let keys: Vec<String> = server.query(&["KEYS", "*"]);
    let keys = keys.into_iter().filter(|key| !key.ends_with(":probe"));
    keys.map(|key| (key.clone(), server.query(&["GET", &key]))).collect()
}

fn ttl(server: &Server, key: &str) -> i64 {
    server.query(&["TTL", key])
}

fn statuses(replica: &Replica, request: &TestRequest) -> Vec<(bool, u32)> {
    replica.decide(request).expect("Redis decides").statuses()
}

/// Settings, a time and a request, and the expected key.
type Example<'a> = (&'a [(&'a str, &'a str)], Time, TestRequest, &'a str);

#[test]
fn keys_are_those_of_envoyproxy_ratelimit() {
    // Wednesday, July 8th 2026.
    const JULY: Time = Time::from_secs(1_783_513_296);
    let prefixed: &[(&str, &str)] = &[("CACHE_KEY_PREFIX", "prefix:")];
    let braced: &[(&str, &str)] = &[("CACHE_KEY_PREFIX", "{p}\\")];
    let calendar: &[(&str, &str)] = &[("USE_CALENDAR_MONTH_RATE_LIMIT", "true")];
    let table: &[Example<'_>] = &[
        (&[], NOW, about(&[("key", "value")]), "domain_key_value_1234"),
        (&[], NOW, about(&[("key2", "value2"), ("subkey2", "subvalue2")]), "domain_key2_value2_subkey2_subvalue2_1200"),
        (prefixed, NOW, about(&[("key", "value")]), "prefix:domain_key_value_1234"),
        (braced, NOW, about(&[("key", "value")]), "{p}\\domain_key_value_1234"),
        (&[], NOW, about(&[("minute", "")]), "domain_minute__1200"),
        (&[], NOW, about(&[("minute", "a_b|{c}\\=*")]), "domain_minute_a_b|{c}\\=*_1200"),
        (&[], NOW, about(&[("files", "files/a.pdf")]), "domain_files_files/*_1200"),
        // An override, for a path without a rule.
        (&[], NOW, about(&[("no", "rule"), ("at", "all")]).limit(5, 3, None), "domain_no_rule_at_all_0"),
        (&[], NOW, about(&[("key", "value")]).limit(5, 2, Some(1)), "domain_key_value_1200"),
        (&[], NOW, about(&[("trial", "v")]), "domain_trial_v_1200"),
        (&[], JULY, about(&[("key", "v")]), "domain_key_v_1783513296"),
        (&[], JULY, about(&[("minute", "v")]), "domain_minute_v_1783513260"),
        (&[], JULY, about(&[("hour", "v")]), "domain_hour_v_1783512000"),
        (&[], JULY, about(&[("day", "v")]), "domain_day_v_1783468800"),
        (&[], JULY, about(&[("week", "v")]), "domain_week_v_1782950400"),
        (&[], JULY, about(&[("month", "v")]), "domain_month_v_1783296000"),
        (&[], JULY, about(&[("year", "v")]), "domain_year_v_1766016000"),
        // July 1st.
        (calendar, JULY, about(&[("month", "v")]), "domain_month_v_1782864000"),
        (calendar, JULY, about(&[("day", "v")]), "domain_day_v_1783468800"),
    ];
    let server = redis::options().start();
    for (env, now, request, key) in table {
        server.query::<()>(&["FLUSHALL"]);
        let replica = replica_at(&server.address(), env, *now);
        assert!(!replica.decide(request).expect("Redis decides").over_limit());
        assert_eq!(counters(&server), BTreeMap::from([((*key).to_owned(), "1".to_owned())]), "{request:?}");
    }
    assert!(!server.command_counts().contains_key("eval"), "{:?}", server.command_counts());
}

#[test]
fn features_unknown_to_ratelimit_use_tk1_keys() {
    let rules = "domain: d
descriptors:
  - {key: epoch, rate_limit: {unit: hour, requests_per_unit: 3, epoch: 2}}
  - {key: multiple, rate_limit: {unit: minute, unit_multiplier: 60, requests_per_unit: 3}}
  - {key: spared, rate_limit: {unit: hour, requests_per_unit: 3, count_rejected: false}}
  - {key: bucket, rate_limit: {unit: hour, requests_per_unit: 3, algorithm: token_bucket}}
  - {key: log, rate_limit: {unit: hour, requests_per_unit: 3, algorithm: sliding_window_log}}
  - {key: weighted, rate_limit: {unit: hour, requests_per_unit: 3, algorithm: sliding_window_counter}}
  - {key: queue, rate_limit: {unit: hour, requests_per_unit: 3, algorithm: leaky_bucket}}
  - key: several
    rate_limit: [{unit: hour, requests_per_unit: 3}, {unit: day, requests_per_unit: 9}]
  - {key: one, rate_limit: [{unit: hour, requests_per_unit: 3}]}
";
    let table: &[(&str, &[&str])] = &[
        ("epoch", &["tk1:{d|epoch=v}:fixed_window:3600s:2"]),
        ("multiple", &["tk1:{d|multiple=v}:fixed_window:3600s"]),
        ("spared", &["tk1:{d|spared=v}:fixed_window:3600s"]),
        ("bucket", &["tk1:{d|bucket=v}:token_bucket:3600s"]),
        ("log", &["tk1:{d|log=v}:sliding_window_log:3600s"]),
        ("weighted", &["tk1:{d|weighted=v}:sliding_window_counter:3600s"]),
        ("queue", &["tk1:{d|queue=v}:leaky_bucket:3600s"]),
        ("several", &["tk1:{d|several=v}:fixed_window:3600s", "tk1:{d|several=v}:fixed_window:86400s"]),
        // A list of one limit is like a single limit.
        ("one", &["d_one_v_0"]),
    ];
    let server = redis::options().start();
    let replica = replica(&server);
    replica.service.load([("rules.yaml", rules)]);
    for (key, expected) in table {
        server.query::<()>(&["FLUSHALL"]);
        replica.decide(&TestRequest::new("d").descriptor(&[(key, "v")])).expect("Redis decides");
        let mut keys: Vec<String> = server.query(&["KEYS", "*"]);
        keys.retain(|key| !key.ends_with(":probe"));
        keys.sort_unstable();
        assert_eq!(keys, *expected);
    }
}

#[test]
fn count_continues_past_the_limit() {
    let server = redis::options().start();
    let replica = replica(&server);
    let responses: Vec<_> = (0..5).flat_map(|_| statuses(&replica, &about(&[("minute", "v")]))).collect();
    assert_eq!(responses, [(false, 2), (false, 1), (false, 0), (true, 0), (true, 0)]);
    assert_eq!(counters(&server)["domain_minute_v_1200"], "5");
    // The next window has another key.
    replica.service.advance_us(26 * SECOND_US);
    assert_eq!(statuses(&replica, &about(&[("minute", "v")])), [(false, 2)]);
    assert_eq!(counters(&server)["domain_minute_v_1260"], "1");
}

#[test]
fn each_hit_sets_expiry_to_window_plus_jitter() {
    let server = redis::options().start();
    for (jitter, spread) in [("0", 1), ("-5", 1), ("1", 1), ("20", 20)] {
        let env = [("EXPIRATION_JITTER_MAX_SECONDS", jitter)];
        let replica = replica_at(&server.address(), &env, NOW);
        let mut seen = Vec::new();
        for _ in 0..40 {
            server.command(&["PEXPIRE", "domain_minute_v_1200", "100000000"]).expect("it answers");
            replica.decide(&about(&[("minute", "v")])).expect("Redis decides");
            seen.push(ttl(&server, "domain_minute_v_1200"));
        }
        // One or two seconds may pass before the check.
        assert!(seen.iter().all(|ttl| (58..60 + spread).contains(ttl)), "{jitter}: {seen:?}");
        // 40 random jitters are all below 65 once in 10^24 runs.
        assert!(spread == 1 || seen.iter().any(|ttl| *ttl > 65), "{jitter}: {seen:?}");
    }
    // A calendar month's key expires with the month: in 23.2 days.
    let env = [("EXPIRATION_JITTER_MAX_SECONDS", "0"), ("USE_CALENDAR_MONTH_RATE_LIMIT", "true")];
    let replica = replica_at(&server.address(), &env, Time::from_secs(1_783_513_296));
    let response = replica.decide(&about(&[("month", "v")])).expect("Redis decides");
    let left = 1_785_542_400 - 1_783_513_296;
    assert_eq!(response.text(), format!("OK [OK 3/MONTH left 2 in {left} s]"));
    assert!((left - 2..=left).contains(&ttl(&server, "domain_month_v_1782864000")));
}

/// Commands that envoyproxy/ratelimit sends for a hit.
fn count_elsewhere(server: &Server, key: &str, hits: i64) -> i64 {
    let count = server.query(&["INCRBY", key, &hits.to_string()]);
    server.query::<()>(&["EXPIRE", key, "360"]);
    count
}

#[test]
fn both_programs_see_each_others_counts() {
    const KEY: &str = "domain_minute_v_1200";
    let server = redis::options().start();
    let replica = replica(&server);
    let request = about(&[("minute", "v")]);
    assert_eq!(count_elsewhere(&server, KEY, 1), 1);
    assert_eq!(statuses(&replica, &request), [(false, 1)]);
    assert_eq!(count_elsewhere(&server, KEY, 1), 3);
    assert_eq!(statuses(&replica, &request), [(true, 0)]);
    // envoyproxy/ratelimit sees that the limit is exceeded, too.
    assert_eq!(count_elsewhere(&server, KEY, 1), 5);
}

#[test]
fn peek_creates_the_key_and_is_rejected_past_the_limit() {
    let server = redis::options().start();
    let replica = replica(&server);
    let peek = about(&[("minute", "v")]).hits(0);
    assert_eq!(statuses(&replica, &peek), [(false, 3)]);
    assert_eq!(counters(&server)["domain_minute_v_1200"], "0");
    assert!(ttl(&server, "domain_minute_v_1200") > 60);
    assert_eq!(statuses(&replica, &about(&[("minute", "v")]).hits(3)), [(false, 0)]);
    assert_eq!(statuses(&replica, &peek), [(false, 0)]);
    assert_eq!(statuses(&replica, &about(&[("minute", "v")])), [(true, 0)]);
    assert_eq!(statuses(&replica, &peek), [(true, 0)]);
    assert_eq!(counters(&server)["domain_minute_v_1200"], "4");
}

#[test]
fn refunds_stop_at_zero() {
    let server = redis::options().start();
    let replica = replica(&server);
    let (take, refund) = (|hits| about(&[("minute", "v")]).hits(hits), |hits| about(&[("minute", "v")]).refund(hits));
    let table = [
        (refund(2), (false, 3), "0"),
        (take(2), (false, 1), "2"),
        (refund(1), (false, 2), "1"),
        (refund(5), (false, 3), "0"),
        (take(4), (true, 0), "4"),
        (refund(1), (false, 0), "3"),
        (refund(3), (false, 3), "0"),
    ];
    for (step, (request, status, count)) in table.into_iter().enumerate() {
        assert_eq!(statuses(&replica, &request), [status], "step {step}");
        assert_eq!(counters(&server)["domain_minute_v_1200"], count, "step {step}");
        assert!(ttl(&server, "domain_minute_v_1200") > 60, "step {step}");
    }
}

#[test]
fn concurrent_refunds_never_go_below_zero() {
    let server = redis::options().start();
    let replicas = [replica(&server), replica(&server), replica(&server)];
    for round in 0..20 {
        let value = round.to_string();
        let request = about(&[("other", &value)]);
        // Refunds exceed charges, with charges in between.
        let mixed: Vec<TestRequest> = (0..30)
            .map(|n| if n % 3 == 0 { request.clone().hits(2) } else { request.clone().refund(1 + n % 5) })
            .collect();
        std::thread::scope(|scope| {
            for replica in &replicas {
                let mixed = &mixed;
                scope.spawn(move || {
                    // Alone and coalesced.
                    for chunk in mixed.chunks(5) {
                        replica.decide_concurrently(chunk).into_iter().for_each(|response| {
                            response.expect("Redis decides");
                        });
                    }
                });
            }
        });
        let count: i64 = server.query(&["GET", &format!("domain_other_{value}_1200")]);
        assert!((0..=60).contains(&count), "round {round}: {count}");
    }
    // If the count is sufficient, no refund is lost.
    let request = about(&[("other", "enough")]);
    replicas[0].decide(&request.clone().hits(500)).expect("Redis decides");
    std::thread::scope(|scope| {
        for replica in &replicas {
            let refunds = vec![request.clone().refund(3); 20];
            scope.spawn(move || replica.decide_concurrently(&refunds));
        }
    });
    assert_eq!(server.query::<i64>(&["GET", "domain_other_enough_1200"]), 500 - 180);
}

#[test]
fn abandoned_refund_stops_at_zero() {
    let server = redis::options().start();
    let proxy = TcpProxy::to(&server.address());
    let env = [("TOLLKEEPER_STORE_TIMEOUT", "300ms")];
    let replica = replica_at(&format!("127.0.0.1:{}", proxy.port()), &env, NOW);
    wait_for("a connection", || replica.decide(&about(&[("minute", "v")])).ok());
    // The server learns the script.
    replica.decide(&about(&[("hour", "v")]).refund(1)).expect("Redis decides");
    proxy.set(Mode::Stall);
    // A refund passes by policy.
    replica.decide(&about(&[("minute", "v")]).refund(3)).expect("refunds pass");
    proxy.set(Mode::Pass);
    wait_for("the count to be even", || (counters(&server)["domain_minute_v_1200"] == "0").then_some(()));
    // One hit, and each refund in one step.
    assert_eq!(server.command_counts()["incrby"] - probes(&server), 3);
}

/// Number of INCRBY of the health check: each sets its key's expiry.
fn probes(server: &Server) -> u64 {
    server.query::<Vec<String>>(&["KEYS", "*:probe"]).iter().map(|key| server.query::<u64>(&["GET", key])).sum()
}

#[test]
fn equal_descriptors_are_counted_twice() {
    let server = redis::options().start();
    let replica = replica(&server);
    let request = about(&[("minute", "v")])
        .descriptor(&[("hour", "v")])
        .descriptor(&[("minute", "v")])
        .descriptor(&[("none", "v")]);
    assert_eq!(statuses(&replica, &request), [(false, 2), (false, 2), (false, 1), (false, 0)]);
    assert_eq!(statuses(&replica, &request), [(false, 0), (false, 1), (true, 0), (false, 0)]);
    let counted = [("domain_hour_v_0", "2"), ("domain_minute_v_1200", "4")];
    assert_eq!(counters(&server), counted.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
}

#[test]
fn stop_cache_key_increment_spares_siblings_of_a_rejected_descriptor() {
    let server = redis::options().start();
    let replica = replica_at(&server.address(), &[("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")], NOW);
    let both = || about(&[("minute", "v")]).descriptor(&[("hour", "v")]);
    // Reads are GET, and only the charge that exceeds the limit is counted.
    replica.decide(&about(&[("minute", "v")]).hits(3)).expect("Redis decides");
    server.reset_stats();
    assert_eq!(statuses(&replica, &both()), [(true, 0), (false, 3)]);
    let counted = [("domain_hour_v_0", "0"), ("domain_minute_v_1200", "4")];
    assert_eq!(counters(&server), counted.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    let commands = server.command_counts();
    // Two of them are of this test.
    assert_eq!((commands["get"] - 2, commands["incrby"], commands["expire"]), (2, 2, 2), "{commands:?}");
    assert!(ttl(&server, "domain_hour_v_0") > 3600);
    // None exceeds the limit: all are counted. A refund is always sent.
    assert_eq!(statuses(&replica, &about(&[("minute", "w")]).descriptor(&[("hour", "v")])), [(false, 2), (false, 2)]);
    let refund = both().refund(1);
    assert_eq!(statuses(&replica, &refund), [(true, 0), (false, 3)]);
    assert_eq!(counters(&server)["domain_hour_v_0"], "0");
    // Beside a limit in shadow mode the request passes, so the other limit is charged.
    replica.decide(&about(&[("trial", "v")])).expect("Redis decides");
    assert_eq!(statuses(&replica, &about(&[("trial", "v")]).descriptor(&[("minute", "x")])), [(false, 0), (false, 2)]);
}

#[test]
fn waiting_charges_use_their_own_time() {
    let server = redis::options().start();
    let proxy = TcpProxy::to(&server.address());
    let replica = replica_at(&format!("127.0.0.1:{}", proxy.port()), &[], NOW);
    replica.decide(&about(&[("minute", "v")])).expect("Redis decides");
    proxy.set(Mode::Stall);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| replica.decide(&about(&[("minute", "v")])).expect("Redis decides"));
        wait_for("the first call", || (replica.calls() == 2).then_some(()));
        replica.service.advance_us(10 * SECOND_US);
        let second = scope.spawn(|| replica.decide(&about(&[("minute", "v")])).expect("Redis decides"));
        // Waiting is not observable; if the charge is too late to wait, it is sent alone, with the same result.
        std::thread::yield_now();
        proxy.set(Mode::Pass);
        assert_eq!(first.join().unwrap().text(), "OK [OK 3/MINUTE left 1 in 26 s]");
        assert_eq!(second.join().unwrap().text(), "OK [OK 3/MINUTE left 0 in 16 s]");
    });
}

#[test]
fn non_numeric_value_fails_only_its_charge() {
    let server = redis::options().start();
    let replica = replica(&server);
    server.query::<()>(&["SET", "domain_minute_v_1200", "many"]);
    server.query::<()>(&["RPUSH", "domain_minute_w_1200", "1"]);
    server.query::<()>(&["SET", "domain_minute_x_1200", "9223372036854775807"]);
    for value in ["v", "w", "x"].repeat(5) {
        replica.decide(&about(&[("minute", value)])).expect_err("it cannot be counted");
        replica.decide(&about(&[("other", value)])).expect("others are counted");
    }
    // The largest and the smallest count of Redis.
    server.query::<()>(&["SET", "domain_minute_y_1200", "9223372036854775800"]);
    assert_eq!(statuses(&replica, &about(&[("minute", "y")])), [(true, 0)]);
    server.query::<()>(&["SET", "domain_minute_z_1200", "-9223372036854775807"]);
    assert_eq!(statuses(&replica, &about(&[("minute", "z")]).refund(1)), [(false, 3)]);
    assert_eq!(statuses(&replica, &about(&[("minute", "z")])), [(false, 2)]);
}

const LEAST: &str = "on >secret ~* -@all +ping +incrby +expire +get";

#[test]
fn acl_without_scripts_suffices_for_fixed_windows() {
    let server = redis::options().with(&[("user", "default off")]).user("plain", LEAST).start();
    let rules = format!(
        "{RULES}  - {{key: bucket, rate_limit: {{unit: day, requests_per_unit: 3, algorithm: token_bucket, on_store_error: deny}}}}\n"
    );
    let tollkeeper = with_rules(&rules)
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("REDIS_URL", server.address())
        .env("REDIS_AUTH", "plain:secret")
        .env("TOLLKEEPER_KEY_FORMAT", "ratelimit")
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
        .env("TOLLKEEPER_ON_STORE_ERROR", "error")
        .start();
    let ready = || http::get(tollkeeper.http_port(), "/readyz").send().status;
    let status_of = |key: &str| {
        let entries = format!(r#"[{{"key": "{key}", "value": "v"}}]"#);
        tollkeeper.post_json(&format!(r#"{{"domain": "domain", "descriptors": [{{"entries": {entries}}}]}}"#)).status
    };
    assert_eq!((0..4).map(|_| status_of("day")).collect::<Vec<_>>(), [200, 200, 200, 429]);
    wait_for("readiness", || (ready() == 200).then_some(()));
    // A rule that needs a script is reported, and affects no other rule.
    assert_eq!((0..20).map(|_| status_of("bucket")).collect::<Vec<_>>(), [429; 20]);
    wait_for("unreadiness", || (ready() == 503).then_some(()));
    let stderr = tollkeeper.stderr();
    assert!(stderr.contains("REDIS_AUTH") && stderr.contains("+evalsha"), "{stderr}");
    assert!(!stderr.contains("secret"), "{stderr}");
    assert_eq!((0..4).map(|_| status_of("year")).collect::<Vec<_>>(), [200, 200, 200, 429]);
    let counts: Vec<String> = counters(&server).into_values().collect();
    assert_eq!(counts, ["4", "4"]);
    // Once fixed, it recovers without a restart.
    server.query::<()>(&["ACL", "SETUSER", "plain", "+@all"]);
    assert_eq!(status_of("bucket"), 200);
    wait_for("readiness", || (ready() == 200).then_some(()));
}

#[test]
fn acl_without_incrby_is_a_misconfiguration() {
    for (missing, rules) in [("incrby", "+ping +expire +get"), ("expire", "+ping +incrby +get")] {
        let user = format!("on >secret ~* -@all {rules}");
        let server = redis::options().with(&[("user", "default off")]).user("plain", &user).start();
        let tollkeeper = with_rules(RULES)
            .env("REDIS_SOCKET_TYPE", "tcp")
            .env("REDIS_URL", server.address())
            .env("REDIS_AUTH", "plain:secret")
            .env("TOLLKEEPER_KEY_FORMAT", "ratelimit")
            .start();
        let ready = || http::get(tollkeeper.http_port(), "/readyz").send().status;
        wait_for(missing, || (ready() == 503 && tollkeeper.stderr().contains("+incrby +expire +get")).then_some(()));
        server.query::<()>(&["ACL", "SETUSER", "plain", &format!("+{missing}")]);
        wait_for("readiness", || (ready() == 200).then_some(()));
    }
}

#[test]
fn counts_are_exact_during_slot_migration() {
    let cluster = Cluster::start();
    let nodes = cluster.addresses().join(",");
    let env = [("REDIS_TYPE", "cluster"), ("REDIS_URL", &nodes)];
    let replica = replica_at("", &env, NOW);
    const KEY: &str = "domain_other_v_1200";
    let slot = cluster.slot(KEY);
    let request = about(&[("other", "v")]);
    // Charges, a refund that exceeds the count, and charges again: parts of a call may go to different nodes.
    let round = [request.clone().hits(2), request.clone().refund(5), request.clone().hits(3), request.clone().hits(0)];
    // The slots must be discovered first.
    wait_for("the map of the cluster", || replica.decide(&about(&[("other", "else")])).ok());
    let moving = AtomicBool::new(true);
    let mut rounds = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for to in [1, 2, 0].repeat(8) {
                if cluster.primary_of(slot) != to {
                    cluster.migrate_slot(slot, to);
                }
            }
            moving.store(false, Ordering::Release);
        });
        while moving.load(Ordering::Acquire) || rounds < 10 {
            let responses = replica.decide_concurrently(&round);
            let left: Vec<_> =
                responses.into_iter().flat_map(|response| response.expect("Redis decides").statuses()).collect();
            assert_eq!(
                left,
                [(false, 998 - 3 * u32::from(rounds > 0)), (false, 1000), (false, 997), (false, 997)],
                "{rounds}"
            );
            rounds += 1;
        }
    });
    let owner = cluster.node(cluster.primary_of(slot));
    assert_eq!(owner.query::<u64>(&["GET", KEY]), 3);
    assert!(ttl(owner, KEY) > 60);
}
