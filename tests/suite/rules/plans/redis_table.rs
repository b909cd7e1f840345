//! Tables in Redis: read once for each value, changed by a stream, and decided without Redis while it is away.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Files, RULES, TABLE, body, limit, passed, wait_for_limit};
use kit::redis::cluster::Cluster;
use kit::redis::sentinels::{NAME, Sentinels};
use kit::redis::{Server, options};
use kit::scrape::{scrape, with_prometheus};
use kit::tollkeeper::{Setup, Tollkeeper};
use kit::{http, wait_at_most, wait_for};
use tokio::time::Instant;

const ROWS: &str = "tk1:{table:customers}:rows";
const CHANGES: &str = "tk1:{table:customers}:changes";

fn files(keep: &str) -> Files {
    Files::new(&RULES.replace("{ file: customers.csv }", &format!("{{ redis: customers, keep: {keep} }}")), TABLE)
}

fn setup(files: &Files, redis: &Server) -> Setup {
    let setup = files.setup().env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", redis.address());
    setup.env("TOLLKEEPER_STORE_TIMEOUT", "5s")
}

fn set(redis: &Server, tenant: &str, row: &str) {
    redis.query::<i64>(&["HSET", ROWS, tenant, row]);
}

/// Tells of a change, as operators do.
fn announce(redis: &Server, tenant: &str) {
    redis.query::<String>(&["XADD", CHANGES, "MAXLEN", "~", "10000", "*", "value", tenant]);
}

/// Waits until the store counts, and the changes are followed.
fn wait_until_followed(server: &Tollkeeper, redis: &Server) {
    wait_for("the store", || {
        (server.post_json(&body("first", 1)).status == 200 && server.store_stats()["lost"] != true).then_some(())
    });
    wait_for("the reader", || redis.query::<String>(&["CLIENT", "LIST"]).contains("cmd=xread").then_some(()));
}

#[test]
fn rows_decide_and_a_change_is_seen_within_a_second() {
    let (redis, files) = (options().start(), files("24h"));
    for (tenant, row) in [("acme", "gold"), ("own", "7/day"), ("bad", "nonsense")] {
        set(&redis, tenant, row);
    }
    let server = setup(&files, &redis).start();
    wait_until_followed(&server, &redis);
    assert_eq!((passed(&server, "acme", 6), passed(&server, "own", 8), passed(&server, "x", 3)), (5, 7, 2));
    assert_eq!(limit(&server, "bad"), Some(2));
    assert!(server.stderr().contains("unknown plan 'nonsense'"), "{}", server.stderr());
    let found = |tenant| server.explain(&body(tenant, 0))["descriptors"][0]["rule"]["plan"]["found"].clone();
    assert_eq!((found("acme"), found("own"), found("never seen")), (json!("row"), json!("own"), json!("default")));
    // Each value was read once, however often it was used.
    assert_eq!(redis.command_counts()["hget"], 6, "first, acme, own, x, bad, never seen");
    for (tenant, row, expected) in [("acme", "9/day", 9), ("x", "gold", 5)] {
        set(&redis, tenant, row);
        assert_ne!(limit(&server, tenant), Some(expected), "nothing tells of the change yet");
        announce(&redis, tenant);
        let seen = || (limit(&server, tenant) == Some(expected)).then_some(());
        wait_at_most(Duration::from_secs(1), "the change", seen);
    }
    redis.query::<i64>(&["HDEL", ROWS, "acme"]);
    announce(&redis, "acme");
    wait_at_most(Duration::from_secs(1), "the deletion", || (limit(&server, "acme") == Some(2)).then_some(()));
}

#[test]
fn row_that_cannot_be_used_is_named_unless_its_value_is_private() {
    let rule = "  - key: tenant\n";
    let private_rule = RULES.replace(rule, &format!("{rule}    decision_log: none\n"));
    for (rules, values, is_shown) in [(RULES, "plain", true), (RULES, "none", false), (&private_rule, "plain", false)] {
        let files = Files::new(&rules.replace("{ file: customers.csv }", "{ redis: customers, keep: 24h }"), TABLE);
        let redis = options().start();
        set(&redis, "ann@example.com", "nonsense");
        let server = setup(&files, &redis).env("TOLLKEEPER_DECISION_LOG_VALUES", values).start();
        wait_until_followed(&server, &redis);
        assert_eq!(limit(&server, "ann@example.com"), Some(2));
        let problems = http::get(server.debug_port(), "/problems").send().text();
        for output in [server.stderr(), problems] {
            assert!(output.contains("unknown plan 'nonsense'"), "{output}");
            assert_eq!(output.contains("ann@example.com"), is_shown, "{values}: {output}");
        }
    }
}

#[test]
fn unannounced_change_is_seen_after_the_lifetime() {
    let (redis, files) = (options().start(), files("1s"));
    set(&redis, "acme", "gold");
    let server = setup(&files, &redis).start();
    wait_for_limit(&server, "acme", 5);
    set(&redis, "acme", "9/day");
    wait_for_limit(&server, "acme", 9);
}

#[test]
fn last_known_row_then_the_default_decides_without_redis() {
    let (redis, files) = (options().start(), files("1s"));
    set(&redis, "acme", "gold");
    let (setup, port) = with_prometheus(setup(&files, &redis).env("TOLLKEEPER_STORE_TIMEOUT", "200ms"));
    let server = setup.start();
    wait_until_followed(&server, &redis);
    wait_for_limit(&server, "acme", 5);
    redis.kill();
    // Past its lifetime the row still decides.
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1500) {
        assert_eq!(limit(&server, "acme"), Some(5));
    }
    assert_eq!(limit(&server, "new"), Some(2));
    let page = scrape(port.number());
    let sample = |name: &str| page.samples[&format!("{name}{{domain=\"shop\",table=\"customers\"}}")];
    assert!(sample("tollkeeper_table_unread_total") >= 1.0 && sample("tollkeeper_table_read_errors_total") >= 1.0);
    redis.restart();
    set(&redis, "acme", "free");
    set(&redis, "new", "gold");
    wait_for_limit(&server, "acme", 2);
    wait_for_limit(&server, "new", 5);
    // Changes are followed again.
    wait_for("the reader", || redis.query::<String>(&["CLIENT", "LIST"]).contains("cmd=xread").then_some(()));
    set(&redis, "acme", "9/day");
    announce(&redis, "acme");
    wait_for_limit(&server, "acme", 9);
}

#[test]
fn rotated_values_cost_bounded_reads() {
    const REQUESTS: usize = 20;
    const DESCRIPTORS: usize = 100;
    let (redis, files) = (options().start(), files("24h"));
    let server = setup(&files, &redis).start();
    wait_until_followed(&server, &redis);
    redis.reset_stats();
    let rotate = |from: usize, requests: usize| {
        for request in 0..requests {
            let descriptor = |at: usize| {
                let value = format!("v{}", from + request * DESCRIPTORS + at);
                json!({"entries": [{"key": "tenant", "value": value}], "hitsAddend": "0"})
            };
            let descriptors: Vec<Value> = (0..DESCRIPTORS).map(descriptor).collect();
            let response = server.post_json(&json!({"domain": "shop", "descriptors": descriptors}).to_string());
            assert_eq!(response.status, 200);
        }
    };
    let reads = || {
        let counts = redis.command_counts();
        ["hget", "hmget"].iter().filter_map(|name| counts.get(*name)).sum::<u64>()
    };
    let began = Instant::now();
    rotate(0, REQUESTS);
    let first = reads();
    assert!(first as f64 <= 2000.0 * (1.0 + began.elapsed().as_secs_f64()), "{first} reads");
    // The values of a request share a read; at most its first value has one of its own.
    assert!(first <= 2 * REQUESTS as u64, "{first} reads");
    // Values without rows are remembered: the same ones again cost nothing if all could be read.
    rotate(0, REQUESTS);
    assert_eq!(reads(), first);
    // Beyond the budget of a second, new values are decided by the default plan without Redis.
    let began = Instant::now();
    rotate(1_000_000, 8 * REQUESTS);
    let more = reads() - first;
    assert!(more as f64 <= 2000.0 * (1.0 + began.elapsed().as_secs_f64()), "{more} reads in {:?}", began.elapsed());
}

#[test]
fn known_tenants_keep_their_plans_beside_made_up_names() {
    const TENANTS: usize = 300;
    let (redis, files) = (options().start(), files("24h"));
    (0..TENANTS).for_each(|tenant| set(&redis, &format!("t{tenant}"), "gold"));
    let server = setup(&files, &redis).start();
    wait_until_followed(&server, &redis);
    let is_over = AtomicBool::new(false);
    let made_up = AtomicUsize::new(0);
    thread::scope(|scope| {
        for stranger in 0..3 {
            let (server, is_over, made_up) = (&server, &is_over, &made_up);
            scope.spawn(move || {
                for request in 0.. {
                    let names = (0..100).map(|at| format!("x{stranger}-{request}-{at}"));
                    let descriptors = names.map(|name| json!({"entries": [{"key": "tenant", "value": name}]}));
                    let descriptors: Vec<Value> = descriptors.collect();
                    server.post_json(&json!({"domain": "shop", "descriptors": descriptors}).to_string());
                    made_up.fetch_add(100, Ordering::Relaxed);
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }
        // Made-up names alone have used up what a replica once read in a second.
        wait_for("made-up names", || (made_up.load(Ordering::Relaxed) > 2500).then_some(()));
        let has_plan = |tenant: &usize| limit(&server, &format!("t{tenant}")) == Some(5);
        let (with_plan, without): (Vec<_>, Vec<_>) = (0..TENANTS).partition(has_plan);
        // A read takes a second at most, which a busy machine may exceed; the next request has the row.
        let asked_again = without.iter().filter(|tenant| has_plan(tenant)).count();
        is_over.store(true, Ordering::Relaxed);
        let made_up = made_up.load(Ordering::Relaxed);
        assert!(with_plan.len() > TENANTS * 95 / 100, "{} beside {made_up} made-up names", with_plan.len());
        assert_eq!(asked_again, without.len(), "beside {made_up} made-up names");
    });
}

#[test]
fn user_without_hmget_has_values_read_one_by_one() {
    let redis = options().user("plans", "on >secret ~* +@all -hmget").start();
    let files = files("24h");
    ["a", "b", "c"].iter().for_each(|tenant| set(&redis, tenant, "gold"));
    let server = setup(&files, &redis).env("REDIS_AUTH", "plans:secret").start();
    wait_until_followed(&server, &redis);
    let descriptors = ["a", "b", "c"].map(|tenant| json!({"entries": [{"key": "tenant", "value": tenant}]}));
    let answer = server.post_json(&json!({"domain": "shop", "descriptors": descriptors}).to_string()).text();
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    let limits = answer["statuses"].as_array().expect("statuses").iter();
    assert!(limits.clone().all(|status| status["currentLimit"]["requestsPerUnit"] == 5), "{answer}");
}

#[test]
fn table_in_redis_needs_counters_in_redis() {
    let files = files("1m");
    let server = files.setup().start_unhealthy();
    let expected = "rules.yaml:12:3: the table 'customers' is in Redis, and the counters are not, set REDIS_URL";
    assert!(server.stderr().contains(expected), "{}", server.stderr());
}

#[test]
fn table_is_read_and_followed_in_a_cluster() {
    let (cluster, files) = (Cluster::start(), files("24h"));
    let primary = cluster.node(cluster.primary_of(cluster.slot(ROWS)));
    set(primary, "acme", "gold");
    let setup = files.setup().env("REDIS_TYPE", "cluster").env("REDIS_URL", cluster.addresses().join(","));
    let server = setup.env("TOLLKEEPER_STORE_TIMEOUT", "5s").start();
    wait_for_limit(&server, "acme", 5);
    assert_eq!((passed(&server, "acme", 6), passed(&server, "nobody", 3)), (5, 2));
    wait_for("the change", || {
        set(primary, "acme", "9/day");
        announce(primary, "acme");
        (limit(&server, "acme") == Some(9)).then_some(())
    });
}

#[test]
fn table_is_read_and_followed_after_a_failover_of_sentinels() {
    let (sentinels, files) = (Sentinels::start_with(&options(), &options()), files("24h"));
    set(sentinels.server(sentinels.primary()), "acme", "gold");
    let addresses: Vec<String> = [NAME.to_owned()].into_iter().chain(sentinels.addresses()).collect();
    let setup = files.setup().env("REDIS_TYPE", "sentinel").env("REDIS_URL", addresses.join(","));
    let server = setup.env("TOLLKEEPER_STORE_TIMEOUT", "5s").start();
    wait_for_limit(&server, "acme", 5);
    let primary = sentinels.planned_failover();
    assert_eq!(limit(&server, "acme"), Some(5), "the known row stays");
    wait_for("the change", || {
        set(sentinels.server(primary), "acme", "9/day");
        announce(sentinels.server(primary), "acme");
        (limit(&server, "acme") == Some(9)).then_some(())
    });
}

mod read_budget {
    use std::time::Duration;

    use tokio::time::Instant;

    use tollkeeper::decide::table_rows::ReadBudget;

    #[test]
    fn unknown_values_have_a_budget() {
        let now = Instant::now();
        let mut budget = ReadBudget::new(2000, now);
        let taken = |budget: &mut ReadBudget, at| (0..10_000).filter(|_| budget.try_take_read(at)).count();
        assert_eq!(taken(&mut budget, now), 2000);
        assert_eq!(taken(&mut budget, now + Duration::from_millis(500)), 1000);
        assert_eq!(taken(&mut budget, now + Duration::from_secs(60)), 2000);
    }
}
