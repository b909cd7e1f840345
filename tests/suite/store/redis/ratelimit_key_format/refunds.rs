//! Refunds in the key format of envoyproxy/ratelimit: no count goes below 0; without scripts they are dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{FORMAT, LEAST, NOW, RULES, about, counters, replica_at, statuses};
use kit::redis::cluster::Cluster;
use kit::redis::{self, Server};
use kit::replica::Replica;
use kit::scrape::{scrape, with_prometheus};
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::test_service::TestRequest;
use kit::tollkeeper::with_rules;
use kit::{http, wait_for};

/// Credentials of a user who may not run scripts.
const WITHOUT_SCRIPTS: (&str, &str) = ("REDIS_AUTH", "plain:secret");
/// User who may run scripts.
const WITH_SCRIPTS: (&str, &str) = ("REDIS_AUTH", "");

fn server() -> Server {
    redis::options().user("plain", LEAST).start()
}

/// Requests with more refunded than charged hits.
fn mixed(value: &str) -> Vec<TestRequest> {
    let request = about(&[("other", value)]);
    (0..30).map(|n| if n % 3 == 0 { request.clone().hits(2) } else { request.clone().refund(1 + n % 5) }).collect()
}

/// Lowest count of `key` on the server while the replicas decide.
fn lowest_count_of_a_race(server: &Server, key: &str, replicas: &[Replica], requests: &[TestRequest]) -> i64 {
    let racing = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let lowest = scope.spawn(|| {
            let mut client = server.connect(Duration::from_secs(10)).expect("the server accepts");
            let mut lowest = 0;
            while racing.load(Ordering::Acquire) {
                let count = client.command(&["GET", key]).expect("it answers");
                lowest = ::redis::from_redis_value::<Option<i64>>(count).expect("a count").unwrap_or(0).min(lowest);
            }
            lowest
        });
        let racers: Vec<_> = replicas
            .iter()
            .map(|replica| {
                scope.spawn(move || {
                    for _ in 0..60 {
                        for chunk in requests.chunks(5) {
                            replica.decide_concurrently(chunk).into_iter().for_each(|response| {
                                response.expect("Redis decides");
                            });
                        }
                    }
                })
            })
            .collect();
        let raced: Vec<_> = racers.into_iter().map(|racer| racer.join()).collect();
        racing.store(false, Ordering::Release);
        assert!(raced.iter().all(Result::is_ok), "all refunds are decided");
        lowest.join().expect("it reads")
    })
}

#[test]
fn racing_refunds_never_show_a_count_below_zero() {
    let server = server();
    let fleets = [[WITH_SCRIPTS; 3], [WITHOUT_SCRIPTS, WITH_SCRIPTS, WITHOUT_SCRIPTS]];
    for (fleet, users) in fleets.into_iter().enumerate() {
        let value = fleet.to_string();
        let key = format!("domain_other_{value}_1200");
        let replicas = users.map(|user| replica_at(&server.address(), &[user], NOW));
        assert_eq!(lowest_count_of_a_race(&server, &key, &replicas, &mixed(&value)), 0, "{users:?}");
    }
}

#[test]
fn racing_refunds_in_a_cluster_never_show_a_count_below_zero() {
    let cluster = Cluster::start();
    let nodes = cluster.addresses().join(",");
    let replicas = [(); 3].map(|()| replica_at("", &[("REDIS_TYPE", "cluster"), ("REDIS_URL", &nodes)], NOW));
    for replica in &replicas {
        wait_for("the map of the cluster", || replica.decide(&about(&[("other", "else")])).ok());
    }
    for value in ["plain", "{tag}", "{", "a}{b", "{}"] {
        let key = format!("domain_other_{value}_1200");
        let owner = cluster.node(cluster.primary_of(cluster.slot(&key)));
        assert_eq!(lowest_count_of_a_race(owner, &key, &replicas, &mixed(value)), 0, "{value}");
    }
}

#[test]
fn refund_cut_off_at_any_reply_leaves_the_limit_in_force() {
    let server = server();
    let proxy = TcpProxy::to(&server.address());
    let address = format!("127.0.0.1:{}", proxy.port());
    for (user, hits) in [WITH_SCRIPTS, WITHOUT_SCRIPTS].into_iter().flat_map(|user| [(user, 1 << 32), (user, 2)]) {
        let replica = replica_at(&address, &[user, ("TOLLKEEPER_STORE_TIMEOUT", "300ms")], NOW);
        // The server learns the script, if it may run.
        wait_for("a refund", || replica.decide(&about(&[("minute", "first")]).refund(1)).ok());
        for reply_bytes in (0..48).step_by(6) {
            let value = format!("{}_{hits}_{reply_bytes}", user.1);
            let request = about(&[("minute", &value)]);
            wait_for("a charge", || replica.decide(&request.clone().hits(2)).ok());
            proxy.set(Mode::Truncate(reply_bytes));
            // Refunds pass, whatever happens to them.
            replica.decide(&request.clone().refund(hits)).expect("refunds pass");
            proxy.set(Mode::Pass);
            let admitted =
                (0..8).filter(|_| !wait_for("a decision", || replica.decide(&request).ok()).over_limit()).count();
            let count: i64 = server.query(&["GET", &format!("domain_minute_{value}_1200")]);
            assert!(count >= 8 && admitted <= 3, "{user:?}, {hits}, {reply_bytes}: {count}, {admitted} admitted");
        }
    }
}

#[test]
fn refunds_of_one_key_share_a_round_trip() {
    let server = server();
    for (user, count) in [(WITH_SCRIPTS, "499"), (WITHOUT_SCRIPTS, "700")] {
        let replica = replica_at(&server.address(), &[user], NOW);
        let request = about(&[("other", user.1)]);
        replica.decide(&request.clone().hits(500)).expect("Redis decides");
        replica.decide(&request.clone().refund(1)).expect("Redis decides");
        server.reset_stats();
        // Refunds and charges in turn.
        let requests = vec![[request.clone().refund(1), request.clone()]; 200].concat();
        replica.decide_concurrently(&requests).into_iter().for_each(|response| {
            response.expect("Redis decides");
        });
        let commands = server.command_counts();
        assert!(commands["incrby"] < 20, "{user:?}: {commands:?}");
        assert_eq!(counters(&server)[&format!("domain_other_{}_1200", user.1)], count, "{user:?}");
    }
}

#[test]
fn refunds_apply_in_order_with_scripts() {
    let server = server();
    let replica = replica_at(&server.address(), &[], NOW);
    // One request is one batch.
    let request = about(&[("minute", "v")])
        .hits(2)
        .descriptor(&[("minute", "v")])
        .refund(5)
        .descriptor(&[("minute", "v")])
        .hits(4)
        .descriptor(&[("minute", "v")])
        .refund(3);
    assert_eq!(statuses(&replica, &request), [(false, 1), (false, 3), (true, 0), (false, 2)]);
    assert_eq!(counters(&server)["domain_minute_v_1200"], "1");
}

#[test]
fn refunds_without_scripts_are_dropped_and_the_charges_of_their_batch_count() {
    let server = server();
    let replica = replica_at(&server.address(), &[WITHOUT_SCRIPTS], NOW);
    let request = about(&[("minute", "v")])
        .refund(5)
        .descriptor(&[("minute", "v")])
        .hits(2)
        .descriptor(&[("minute", "v")])
        .refund(1);
    assert_eq!(statuses(&replica, &request), [(false, 3), (false, 1), (false, 1)]);
    assert_eq!(statuses(&replica, &about(&[("minute", "v")]).refund(1)), [(false, 1)]);
    assert_eq!(counters(&server)["domain_minute_v_1200"], "2");
    assert_eq!(replica.redis.stats().refunds_dropped, Some(3));
}

#[test]
fn dropped_refunds_are_counted_and_no_misconfiguration() {
    // A user without permission, and a server or proxy without the command.
    let without_eval = [("rename-command", "EVAL \"\""), ("rename-command", "EVALSHA \"\"")];
    let servers = [(redis::options(), LEAST), (redis::options().with(&without_eval), "on >secret ~* +@all")];
    for (options, user) in servers {
        let server = options.user("plain", user).start();
        let (setup, port) = with_prometheus(with_rules(RULES));
        let tollkeeper = setup
            .env("REDIS_SOCKET_TYPE", "tcp")
            .env("REDIS_URL", server.address())
            .env(WITHOUT_SCRIPTS.0, WITHOUT_SCRIPTS.1)
            .env(FORMAT.0, FORMAT.1)
            .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
            .env("TOLLKEEPER_ON_STORE_ERROR", "error")
            .start();
        let status_of = |hits: &str| {
            let descriptor = format!(r#"{{"entries": [{{"key": "year", "value": "v"}}], {hits}}}"#);
            tollkeeper.post_json(&format!(r#"{{"domain": "domain", "descriptors": [{descriptor}]}}"#)).status
        };
        let (three, refund_two) = (r#""hitsAddend": 3"#, r#""hitsAddend": 2, "isNegativeHits": true"#);
        assert_eq!([three, refund_two, refund_two].map(status_of), [200; 3]);
        // Nothing is left of three.
        assert_eq!(status_of(r#""hitsAddend": 1"#), 429);
        wait_for("readiness", || (http::get(tollkeeper.http_port(), "/readyz").send().status == 200).then_some(()));
        assert_eq!(scrape(port.number()).count("tollkeeper_refunds_dropped_total"), 2);
        let stderr = tollkeeper.stderr();
        assert_eq!(stderr.matches("refunds are dropped").count(), 1, "{stderr}");
    }
}

#[test]
fn charges_beside_dropped_refunds_are_exact_during_slot_migration() {
    const KEY: &str = "domain_other_v_1200";
    let options = redis::options().user("plain", &format!("{LEAST} +cluster|slots +asking"));
    let cluster = Cluster::start_with(&options, 0);
    let nodes = cluster.addresses().join(",");
    let env = [("REDIS_TYPE", "cluster"), ("REDIS_URL", nodes.as_str()), WITHOUT_SCRIPTS];
    let replicas = [(); 2].map(|()| replica_at("", &env, NOW));
    let request = about(&[("other", "v")]);
    for replica in &replicas {
        wait_for("the map of the cluster", || replica.decide(&about(&[("other", "else")])).ok());
    }
    let slot = cluster.slot(KEY);
    let moving = AtomicBool::new(true);
    let rounds: u64 = std::thread::scope(|scope| {
        let racers = replicas.each_ref().map(|replica| {
            scope.spawn(|| {
                let mut rounds = 0;
                while moving.load(Ordering::Acquire) {
                    for step in [request.clone().hits(1), request.clone().refund(1)] {
                        replica.decide(&step).expect("Redis decides");
                    }
                    rounds += 1;
                }
                rounds
            })
        });
        for to in [1, 2, 0].repeat(8) {
            if cluster.primary_of(slot) != to {
                cluster.migrate_slot(slot, to);
            }
        }
        moving.store(false, Ordering::Release);
        racers.into_iter().map(|racer| racer.join().expect("it decides")).sum()
    });
    let dropped: u64 = replicas.iter().map(|replica| replica.redis.stats().refunds_dropped.unwrap_or(0)).sum();
    let owner = cluster.node(cluster.primary_of(slot));
    assert_eq!(owner.query::<u64>(&["GET", KEY]), dropped, "{rounds} rounds");
}
