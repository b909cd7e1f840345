//! `/fleet` and `top --fleet`: all replicas of one Redis, each of which shows the same.

mod alarms;
mod differences;
mod merge_keys;
mod rejection_rise;
mod summary;
mod view;

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollkeeper::serve::fleet::authentication::{AuthenticationKey, encode_summary};
use tollkeeper::serve::fleet::summary::{
    MAX_SUMMARY_BYTES, RejectedKeyCountSummary, RejectedKeySummary, RejectedKeysMinuteSummary, ReplicaSummary,
    SUMMARY_VERSION,
};

use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::redis;
use kit::tollkeeper::{Setup, Tollkeeper, program_path, with_rules};
use kit::wait_for;

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 3}}
- {key: path, rate_limit: {unit: day, requests_per_unit: 1000}}
";
const INDEX: &str = "tk1:{fleet}:replicas";

fn server(rules: &str) -> Setup {
    with_rules(rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("TOLLKEEPER_FLEET", "true")
}

fn replica(redis: &redis::Server, rules: &str) -> Setup {
    server(rules)
        .env("REDIS_URL", redis.address())
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
}

fn charge(server: &Tollkeeper, key: &str, value: &str, times: usize) {
    let client = Client::connect(server.grpc_port());
    for _ in 0..times {
        client.call(&rate_limit_request("shop", &[(key, value)])).unwrap();
    }
}

fn fleet(server: &Tollkeeper, query: &str) -> Value {
    let response = http::get(server.debug_port(), &format!("/fleet{query}")).send();
    assert_eq!(response.status, 200, "{response:?}");
    serde_json::from_slice(&response.body).unwrap()
}

/// Waits for a report that `accept` accepts.
fn wait_for_fleet(server: &Tollkeeper, what: &str, accept: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    wait_for(what, || {
        last = fleet(server, "?minutes=10");
        accept(&last).then(|| last.clone())
    })
}

fn count(report: &Value, field: &str) -> usize {
    report[field].as_array().map_or(0, Vec::len)
}

/// Rejected hits of the most rejected key over all replicas, at least.
fn rejected(report: &Value) -> u64 {
    report["top"]["overall"][0]["rejected_at_least"].as_u64().unwrap_or_default()
}

/// Kinds of the findings, but for that of a slow machine.
fn finding_kinds(report: &Value) -> Vec<&str> {
    let kinds = report["findings"].as_array().unwrap().iter().filter_map(|finding| finding["kind"].as_str());
    kinds.filter(|kind| *kind != "late").collect()
}

#[test]
fn every_replica_shows_all() {
    let redis = redis::options().start();
    let replicas: Vec<Tollkeeper> = (0..3).map(|_| replica(&redis, RULES).start()).collect();
    wait_for("all replicas to publish", || (redis.query::<usize>(&["ZCARD", INDEX]) == 3).then_some(()));
    for (index, replica) in replicas.iter().enumerate() {
        charge(replica, "user", "ann", 4 + index);
        (0..10).for_each(|path| charge(replica, "path", &path.to_string(), 1));
    }
    for replica in &replicas {
        let report = wait_for_fleet(replica, "the report", |report| rejected(report) == 12);
        assert_eq!(report["problem"], Value::Null, "{report}");
        assert_eq!(count(&report, "replicas"), 3, "{report}");
        assert_eq!(finding_kinds(&report), [""; 0], "{report}");
        assert_eq!(report["left_out"], json!([]), "{report}");
        let ids: Vec<&Value> = report["replicas"].as_array().unwrap().iter().map(|r| &r["this"]).collect();
        assert_eq!(ids, [&json!(true), &json!(false), &json!(false)]);
        // Three of fifteen hits passed.
        let top = &report["top"]["overall"][0];
        assert_eq!((&top["rule"], &top["key"]), (&json!("shop.user"), &json!("user=ann")), "{report}");
        assert_eq!((&top["rejected_at_least"], &top["rejected_at_most"]), (&json!(12), &json!(12)), "{report}");
        assert_eq!(report["recent"]["verdicts"], replicas_verdicts(&report), "{report}");
    }
    let text = Command::new(program_path())
        .args(["top", "--fleet", "--addr", &format!("127.0.0.1:{}", replicas[0].debug_port())])
        .output()
        .unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("(this)") && text.contains("user=ann") && text.contains("REPLICA"), "{text}");
    let mut replicas = replicas;
    let mut stopped = replicas.pop().unwrap();
    stopped.freeze();
    wait_for_fleet(&replicas[0], "the silence of a replica", |report| {
        report["findings"].as_array().unwrap().iter().any(|finding| finding["kind"] == "not_publishing")
    });
    stopped.thaw();
    stopped.signal("TERM");
    assert!(stopped.wait().success());
    let report = wait_for_fleet(&replicas[0], "one replica less", |report| count(report, "replicas") == 2);
    assert_eq!(report["problem"], Value::Null);
}

/// Sum of the verdicts of all replicas.
fn replicas_verdicts(report: &Value) -> Value {
    let mut sum = report["replicas"][0]["recent"]["verdicts"].clone();
    for replica in &report["replicas"].as_array().unwrap()[1..] {
        for (verdict, count) in replica["recent"]["verdicts"].as_object().unwrap() {
            sum[verdict] = (sum[verdict].as_u64().unwrap() + count.as_u64().unwrap()).into();
        }
    }
    sum
}

#[test]
fn without_redis_the_page_says_so_and_shows_this_replica() {
    let alone = server(RULES).start();
    charge(&alone, "user", "ann", 5);
    let report = fleet(&alone, "");
    assert!(report["problem"].as_str().unwrap().contains("not in Redis"), "{report}");
    assert_eq!(count(&report, "replicas"), 1);
    assert_eq!(report["top"]["overall"][0]["rejected_at_least"], 2, "{report}");

    let redis = redis::options().start();
    let replica = replica(&redis, RULES).start();
    charge(&replica, "user", "ann", 5);
    redis.kill();
    let report = wait_for_fleet(&replica, "the loss of Redis", |report| report["problem"] != Value::Null);
    assert!(report["problem"].as_str().unwrap().starts_with("Redis: "), "{report}");
    assert_eq!(report["top"]["overall"][0]["rejected_at_least"], 2, "{report}");
    redis.restart();
    wait_for_fleet(&replica, "Redis to be back", |report| report["problem"] == Value::Null);
}

#[test]
fn replica_that_differs_is_found() {
    let redis = redis::options().start();
    let usual = [replica(&redis, RULES).start(), replica(&redis, RULES).start()];
    let _other = replica(&redis, &RULES.replace("1000", "999")).start();
    // A replica that has just started may not have reached the store yet, which is a finding too.
    wait_for_fleet(&usual[0], "the finding", |report| {
        report["findings"].as_array().unwrap().iter().any(|finding| finding["kind"] == "different_rules")
    });
}

/// A plausible summary of another replica, published at `now_us`.
fn plausible(incarnation: &str, now_us: u64) -> ReplicaSummary {
    ReplicaSummary {
        v: SUMMARY_VERSION,
        incarnation: incarnation.to_owned(),
        name: format!("pod-{incarnation}"),
        build: env!("CARGO_PKG_VERSION").to_owned(),
        started_us: now_us - 60_000_000,
        published_us: now_us,
        names: vec!["shop.user".to_owned()],
        keys: vec![RejectedKeySummary { name: 0, text: "user=ann".to_owned(), mode: None }],
        minutes: vec![RejectedKeysMinuteSummary {
            minute: now_us / 60_000_000,
            max_missed: 0,
            counts: vec![RejectedKeyCountSummary { key: 0, at_least: 7, at_most: 7, requests: 7 }],
        }],
        ..ReplicaSummary::default()
    }
}

fn redis_time_us(redis: &redis::Server) -> u64 {
    let time: Vec<String> = redis.query(&["TIME"]);
    time[0].parse::<u64>().unwrap() * 1_000_000
}

fn publish(redis: &redis::Server, id: &str, sealed: &[u8], now_us: u64) {
    let text = String::from_utf8_lossy(sealed).into_owned();
    redis.query::<()>(&["SET", &format!("tk1:{{fleet}}:replica:{id}"), &text]);
    redis.query::<()>(&["ZADD", INDEX, &(now_us / 1_000_000).to_string(), id]);
}

#[test]
fn hostile_summaries_are_left_out_and_counted() {
    let redis = redis::options().start();
    let replica = replica(&redis, RULES).start();
    let now_us = redis_time_us(&redis);
    for index in 0..80 {
        let id = format!("good{index}");
        publish(&redis, &id, &encode_summary(&plausible(&id, now_us), None).unwrap(), now_us);
    }
    let hostile = |change: fn(&mut ReplicaSummary)| {
        let mut summary = plausible("bad", now_us);
        change(&mut summary);
        encode_summary(&summary, None).unwrap()
    };
    let sealed: Vec<Vec<u8>> = vec![
        b"-".to_vec(),
        vec![b'x'; 4 << 20],
        [b"-".repeat(64), b"\n".to_vec(), b"[".repeat(MAX_SUMMARY_BYTES / 2)].concat(),
        hostile(|summary| summary.v = SUMMARY_VERSION + 1),
        hostile(|summary| summary.incarnation = "good1".to_owned()),
        hostile(|summary| summary.published_us = u64::MAX),
        hostile(|summary| summary.published_us = 0),
        hostile(|summary| summary.name = "n".repeat(10_000)),
    ];
    for (index, sealed) in sealed.iter().enumerate() {
        publish(&redis, &format!("bad{index}"), sealed, now_us);
    }
    let partly: [fn(&mut ReplicaSummary); 3] = [
        |summary| summary.minutes[0].counts[0].key = usize::MAX,
        |summary| summary.names[0] = "n".repeat(30_000),
        |summary| summary.minutes.push(summary.minutes[0].clone()),
    ];
    for (index, change) in partly.iter().enumerate() {
        let mut summary = plausible(&format!("odd{index}"), now_us);
        change(&mut summary);
        publish(&redis, &summary.incarnation, &encode_summary(&summary, None).unwrap(), now_us);
    }
    // Control characters of a name do not reach a terminal; huge numbers do not wrap.
    let mut loud = plausible("loud", now_us);
    loud.name = "\u{1b}[2Jpod".to_owned();
    loud.recent.verdicts.ok = u64::MAX;
    loud.recent.calls = u64::MAX;
    publish(&redis, "loud", &encode_summary(&loud, None).unwrap(), now_us);
    redis.query::<()>(&["LPUSH", "tk1:{fleet}:replica:list", "x"]);
    redis.query::<()>(&["ZADD", INDEX, &(now_us / 1_000_000).to_string(), "list"]);
    redis.query::<()>(&["ZADD", INDEX, "inf", &"x".repeat(100_000)]);

    let report = wait_for_fleet(&replica, "all summaries", |report| count(report, "replicas") >= 85);
    assert_eq!(count(&report, "replicas"), 1 + 80 + 3 + 1, "{report}");
    let left_out: u64 = report["left_out"].as_array().unwrap().iter().map(|l| l["summaries"].as_u64().unwrap()).sum();
    // Eight and the list as a whole, and a part of each of two; the third has a limit without a name.
    assert_eq!(left_out, 8 + 1 + 3, "{report}");
    let top = &report["top"]["overall"][0];
    assert_eq!(top["rejected_at_least"], json!(7 * 82), "{report}");
    let text = http::get(replica.debug_port(), "/fleet?format=text").send();
    assert!(!text.body.contains(&0x1b) && text.body.len() < 200_000);
    charge(&replica, "user", "bob", 1);
}

#[test]
fn summaries_without_the_common_secret_are_left_out() {
    const SECRET: &str = "correct horse battery staple";
    let redis = redis::options().start();
    let keyed = |setup: Setup| setup.env("TOLLKEEPER_DECISION_LOG_HASH_KEY", SECRET);
    let replicas = [keyed(replica(&redis, RULES)).start(), keyed(replica(&redis, RULES)).start()];
    let now_us = redis_time_us(&redis);
    publish(&redis, "forged", &encode_summary(&plausible("forged", now_us), None).unwrap(), now_us);
    let other = AuthenticationKey::new("another horse battery staple");
    publish(&redis, "other", &encode_summary(&plausible("other", now_us), Some(&other)).unwrap(), now_us);
    let own = AuthenticationKey::new(SECRET);
    publish(&redis, "honest", &encode_summary(&plausible("honest", now_us), Some(&own)).unwrap(), now_us);
    let report = wait_for_fleet(&replicas[0], "all summaries", |report| count(report, "replicas") == 3);
    assert_eq!(report["left_out"][0]["summaries"], 2, "{report}");
    assert!(report["left_out"][0]["reason"].as_str().unwrap().contains("not authenticated"), "{report}");
}

#[test]
fn publishing_takes_less_than_one_command_a_second() {
    let redis = redis::options().start();
    let _replica = replica(&redis, RULES).start();
    let summaries = |counts: &std::collections::BTreeMap<String, u64>| counts.get("zadd").copied().unwrap_or(0);
    wait_for("the first summary", || (summaries(&redis.command_counts()) > 0).then_some(()));
    redis.reset_stats();
    let counts = wait_for("the next summary", || Some(redis.command_counts()).filter(|counts| summaries(counts) > 0));
    // One summary in five seconds; GET is for blocks.
    let published: u64 = counts.iter().filter(|(command, _)| *command != "get").map(|(_, count)| count).sum();
    assert!(published <= 5, "{counts:?}");
}

#[test]
fn reset_drops_what_other_replicas_cache() {
    const TOKEN: &str = "a token of an operator";
    // A long retry time, and one hit at a time, so that rejections come from the cache of the replica.
    let rules = "\
domain: shop
descriptors:
- key: user
  rate_limit: {unit: day, requests_per_unit: 3, count_rejected: false}
";
    let redis = redis::options().start();
    let replicas =
        [0, 1].map(|_| replica(&redis, rules).env("TOLLKEEPER_ADMIN_TOKEN", TOKEN).env("LOG_LEVEL", "debug").start());
    let admits = |replica: &Tollkeeper| {
        let client = Client::connect(replica.grpc_port());
        client.call(&rate_limit_request("shop", &[("user", "ann")])).unwrap().overall_code == 1
    };
    (0..3).for_each(|_| assert!(admits(&replicas[0])));
    // Fresh resets reach a replica whose cache would reject for a second more, again and again.
    for round in 0..5 {
        assert!(!admits(&replicas[1]), "round {round}");
        let body = json!({"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]});
        let reset = http::post(replicas[0].debug_port(), "/reset", body.to_string())
            .header("authorization", format!("Bearer {TOKEN}"))
            .send();
        let reset: Value = serde_json::from_slice(&reset.body).unwrap();
        assert_eq!((&reset["reset"], &reset["announced"]), (&json!([1]), &json!(true)), "{reset}");
        // A cached rejection ends after a second too, so the log has to tell.
        let dropped = || replicas[1].stderr().matches("dropped what was cached").count();
        wait_for("the other replica to drop its caches", || (dropped() > round).then_some(()));
        assert!(admits(&replicas[1]), "round {round}");
        (0..2).for_each(|_| assert!(admits(&replicas[0])));
    }
}

#[test]
fn replicas_of_a_cluster_and_behind_sentinels_see_each_other() {
    let cluster = redis::cluster::Cluster::start();
    let of_cluster = |rules: &str| {
        server(rules)
            .env("REDIS_TYPE", "CLUSTER")
            .env("REDIS_URL", cluster.addresses().join(","))
            .env("REDIS_SOCKET_TYPE", "tcp")
    };
    let sentinels = redis::sentinels::Sentinels::start_with(&redis::options(), &redis::options());
    let behind_sentinels = |rules: &str| {
        let url = format!("{},{}", redis::sentinels::NAME, sentinels.addresses().join(","));
        server(rules).env("REDIS_TYPE", "SENTINEL").env("REDIS_URL", url).env("REDIS_SOCKET_TYPE", "tcp")
    };
    for setup in [&of_cluster as &dyn Fn(&str) -> Setup, &behind_sentinels] {
        let replicas = [setup(RULES).start(), setup(RULES).start()];
        for replica in &replicas {
            let report = wait_for_fleet(replica, "both replicas", |report| count(report, "replicas") == 2);
            assert_eq!(report["problem"], Value::Null, "{report}");
        }
    }
}

#[test]
fn missing_permissions_are_told_and_change_no_decision() {
    let redis = redis::options()
        .user("least", "on >secret ~tk1:* -@all +eval +evalsha +time +get +set +pexpire +@list")
        .start();
    let replica = replica(&redis, RULES).env("REDIS_AUTH", "least:secret").start();
    charge(&replica, "user", "ann", 5);
    // At first there is no connection yet.
    let report = wait_for_fleet(&replica, "the problem", |report| {
        let problem = report["problem"].as_str().unwrap_or_default();
        problem.contains("TOLLKEEPER_FLEET=false") && problem.contains("docs/redis.md")
    });
    assert_eq!(report["top"]["overall"][0]["rejected_at_least"], 2, "{report}");
    let ready = http::get(replica.http_port(), "/readyz").send();
    assert_eq!(ready.status, 200, "{ready:?}");
}

#[test]
fn frozen_redis_delays_neither_the_page_nor_the_stop() {
    let redis = redis::options().start();
    let mut replica = replica(&redis, RULES).start();
    wait_for_fleet(&replica, "Redis", |report| report["problem"] == Value::Null);
    charge(&replica, "user", "ann", 5);
    redis.freeze();
    let report = wait_for_fleet(&replica, "the loss of Redis", |report| report["problem"] != Value::Null);
    assert_eq!(count(&report, "replicas"), 1, "{report}");
    assert_eq!(report["top"]["overall"][0]["rejected_at_least"], 2, "{report}");
    let began = Instant::now();
    let text = top(&replica, &["--fleet"]);
    assert!(text.starts_with("This replica only: Redis"), "{text}");
    // The timeout of decisions is not that of the page.
    assert!(!text.contains("TOLLKEEPER_STORE_TIMEOUT"), "{text}");
    replica.signal("TERM");
    assert!(replica.wait().success());
    assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
    redis.thaw();
}

/// Output of `top` with these arguments.
fn top(server: &Tollkeeper, arguments: &[&str]) -> String {
    let address = format!("127.0.0.1:{}", server.debug_port());
    let output = Command::new(program_path()).arg("top").args(arguments).args(["--addr", &address]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn text_shows_the_sum_and_fits_a_terminal() {
    let redis = redis::options().start();
    let replicas = [replica(&redis, RULES).start(), replica(&redis, &RULES.replace("1000", "999")).start()];
    wait_for("both to publish", || (redis.query::<usize>(&["ZCARD", INDEX]) == 2).then_some(()));
    replicas.iter().for_each(|replica| charge(replica, "user", "ann", 5));
    wait_for_fleet(&replicas[0], "both", |report| {
        rejected(report) == 7 && finding_kinds(report) == ["different_rules"]
    });
    let keys = top(&replicas[0], &["--fleet"]);
    assert!(
        keys.contains("all 2") && keys.contains("user=ann") && keys.contains("2 replicas have different rules"),
        "{keys}"
    );
    let address = format!("127.0.0.1:{}", replicas[0].debug_port());
    let refused =
        Command::new(program_path()).args(["top", "--rules", "--fleet", "--addr", &address]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("sum by (domain, rule, verdict)"), "{refused:?}");
    assert!(keys.lines().all(|line| line.chars().count() <= 80));
}

#[test]
fn replica_without_keys_is_told_and_one_without_statistics_has_no_page() {
    let redis = redis::options().start();
    let usual = [replica(&redis, RULES).start(), replica(&redis, RULES).start()];
    let _without_keys = replica(&redis, RULES).env("TOLLKEEPER_TOP_KEYS", "0").start();
    let without_statistics = replica(&redis, RULES).env("DISABLE_STATS", "true").start();
    let report = wait_for_fleet(&usual[0], "the finding", |report| {
        report["findings"].as_array().unwrap().iter().any(|finding| finding["kind"] == "different_values")
    });
    assert!(report["replicas"].as_array().unwrap().iter().any(|replica| replica["values"] == "none"), "{report}");
    let response = http::get(without_statistics.debug_port(), "/fleet").send();
    assert_eq!(response.status, 503, "{response:?}");
    assert!(response.text().contains("DISABLE_STATS"), "{response:?}");
}

/// Largest summary whose limits and keys are those of no other.
fn largest(index: usize, now_us: u64) -> Vec<u8> {
    let mut summary = plausible(&format!("large{index}"), now_us);
    summary.names = (0..600).map(|name| format!("{index}.{name}")).collect();
    summary.keys = (0..80)
        .map(|key| RejectedKeySummary { name: key, text: format!("{index}.{key}.{}", "x".repeat(380)), mode: None })
        .collect();
    let minute = summary.minutes[0].minute;
    summary.minutes = (0..10)
        .map(|ago| RejectedKeysMinuteSummary {
            minute: minute - ago,
            max_missed: u64::MAX,
            counts: (0..4)
                .map(|key| RejectedKeyCountSummary {
                    key: usize::try_from(ago).unwrap() * 8 + key,
                    at_least: 7,
                    at_most: u64::MAX,
                    requests: 7,
                })
                .collect(),
        })
        .collect();
    encode_summary(&summary, None).unwrap()
}

#[test]
fn a_thousand_large_summaries_take_bounded_memory() {
    let redis = redis::options().start();
    // They must live until the last one is published.
    let replica = replica(&redis, RULES).env("TEST_PACE", "1").start();
    let before = replica.peak_mib();
    let now_us = redis_time_us(&redis);
    for index in 0..999 {
        publish(&redis, &format!("large{index}"), &largest(index, now_us), now_us);
    }
    let report = fleet(&replica, "?most=1000&minutes=10");
    // A slow machine may not read them in time.
    assert!(report["problem"] != Value::Null || count(&report, "replicas") > 900);
    assert!(replica.peak_mib() - before < 200, "{before} to {} MiB", replica.peak_mib());
    charge(&replica, "user", "bob", 1);
}

/// Adds an entry to the stream of resets.
fn forge_reset(redis: &redis::Server, sealed: &str) {
    redis.query::<String>(&["XADD", "tk1:{fleet}:resets", "*", "reset", sealed]);
}

#[test]
fn forged_reset_drops_caches_and_no_counters() {
    const TOKEN: &str = "a token of an operator";
    let redis = redis::options().start();
    let debug = |setup: Setup| setup.env("LOG_LEVEL", "debug").env("REDIS_SOCKET_TYPE", "tcp");
    let open = debug(replica(&redis, RULES)).start();
    let keyed = debug(replica(&redis, RULES))
        .env("TOLLKEEPER_DECISION_LOG_HASH_KEY", "correct horse battery")
        .env("TOLLKEEPER_ADMIN_TOKEN", TOKEN)
        .start();
    charge(&open, "user", "ann", 3);
    let is_rejected = |replica: &Tollkeeper| {
        let client = Client::connect(replica.grpc_port());
        client.call(&rate_limit_request("shop", &[("user", "ann")])).unwrap().overall_code == 2
    };
    assert!(is_rejected(&open) && is_rejected(&keyed));
    let message = json!({"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]});
    forge_reset(&redis, "no reset");
    forge_reset(&redis, &format!("{}\n{}", "-".repeat(64), "[".repeat(60_000)));
    forge_reset(&redis, &"x".repeat(1 << 20));
    redis.query::<String>(&["XADD", "tk1:{fleet}:resets", "*", "a", "b", "c", "d"]);
    forge_reset(&redis, &format!("{}\n{message}", "-".repeat(64)));
    let dropped = |replica: &Tollkeeper| replica.stderr().matches("dropped what was cached").count();
    wait_for("the forged reset", || (dropped(&open) == 1).then_some(()));
    assert!(is_rejected(&open) && is_rejected(&keyed));
    // Entries are read in their order: after an authentic one, the forged ones were passed over.
    let reset = http::post(keyed.debug_port(), "/reset", message.to_string())
        .header("authorization", format!("Bearer {TOKEN}"))
        .send();
    assert_eq!(reset.status, 200, "{reset:?}");
    wait_for("the authentic reset", || (dropped(&keyed) > 0).then_some(()));
    assert_eq!(dropped(&keyed), 1);
}

#[test]
fn reset_drops_leases_of_other_replicas_and_returns_none() {
    const TOKEN: &str = "a token of an operator";
    let rules = "\
domain: shop
descriptors:
- key: user
  rate_limit: {unit: year, requests_per_unit: 2000, consistency: eventual, max_overshoot: 10%}
";
    let redis = redis::options().start();
    let replicas = [0, 1].map(|_| {
        let setup = replica(&redis, rules).env("TOLLKEEPER_ADMIN_TOKEN", TOKEN).env("LOG_LEVEL", "debug");
        setup.env("TOLLKEEPER_MAX_REPLICAS", "8").start()
    });
    let admitted = |replica: &Tollkeeper, hits: usize| {
        let client = Client::connect(replica.grpc_port());
        let request = rate_limit_request("shop", &[("user", "ann")]);
        (0..hits).filter(|_| client.call(&request).unwrap().overall_code == 1).count()
    };
    let stat = |replica: &Tollkeeper, name: &str| replica.store_stats()[name].as_u64().unwrap();
    let unused = |replica: &Tollkeeper| {
        let [leased, admitted, left] =
            ["leased_hits", "admitted_from_leases", "lease_hits_left"].map(|name| stat(replica, name));
        leased - admitted - left
    };
    assert_eq!(admitted(&replicas[1], 300), 300);
    wait_for("a lease with unused hits", || {
        assert_eq!(admitted(&replicas[1], 1), 1);
        (unused(&replicas[1]) > 0).then_some(())
    });
    let left = stat(&replicas[1], "lease_hits_left");
    let body = json!({"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]});
    let reset = http::post(replicas[0].debug_port(), "/reset", body.to_string())
        .header("authorization", format!("Bearer {TOKEN}"))
        .send();
    assert_eq!(reset.status, 200, "{reset:?}");
    let dropped = || replicas[1].stderr().contains("dropped what was cached");
    wait_for("the other replica to drop its leases", || dropped().then_some(()));
    // The next charge finds neither a lease nor a share that is free again, and nothing was returned.
    let calls = stat(&replicas[1], "calls");
    assert_eq!(admitted(&replicas[1], 1), 1);
    assert_eq!(stat(&replicas[1], "calls"), calls + 1);
    assert_eq!(stat(&replicas[1], "lease_hits_left"), left);
    let after = 1 + admitted(&replicas[1], 2500) + admitted(&replicas[0], 2500);
    assert!(after <= 2200, "{after}");
}

#[test]
fn silent_replica_is_marked_and_not_counted_as_heard() {
    let redis = redis::options().start();
    let (seen, silent) = (replica(&redis, RULES).start(), replica(&redis, RULES).start());
    wait_for_fleet(&seen, "both replicas", |report| count(report, "replicas") == 2);
    let marked = |report: &Value| -> Vec<Value> {
        let replicas = report["replicas"].as_array().expect("there are replicas").iter();
        let silent = replicas.filter(|replica| replica["silent"] == true);
        silent.map(|replica| replica["this"].clone()).collect()
    };
    assert!(marked(&fleet(&seen, "")).is_empty(), "{}", fleet(&seen, ""));
    silent.freeze();
    let report = wait_for_fleet(&seen, "the mark", |report| !marked(report).is_empty());
    assert_eq!(marked(&report), [false], "{report}");
    assert!(report.to_string().contains("published nothing for"), "{report}");
    assert!(top(&seen, &["--fleet"]).contains(" (silent)"));
    silent.thaw();
    wait_for_fleet(&seen, "the end of the mark", |report| marked(report).is_empty());
}

/// Keys of the second limit of a rule, and of a candidate, are counted as those of the first.
#[test]
fn distinct_keys_of_later_limits_are_counted() {
    let rules = "\
domain: shop
descriptors:
- key: user
  rate_limit:
  - {unit: day, requests_per_unit: 1000}
  - {unit: hour, requests_per_unit: 1000, name: hourly}
  - {unit: day, requests_per_unit: 100, name: lower, shadow_mode: true}
";
    let server = with_rules(rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    (0..10).for_each(|user| charge(&server, "user", &format!("user {user}"), 1));
    wait_for("the keys of all three limits", || {
        let report: Value = serde_json::from_slice(&http::get(server.debug_port(), "/rules").send().body).unwrap();
        let rules = report["rules"].as_array().into_iter().flatten();
        // An estimate: two of the ten keys share a register of the sketch in one run of ten, three in very few.
        let counted =
            rules.filter(|limit| limit["distinct_keys"].as_u64().is_some_and(|keys| (8..=12).contains(&keys)));
        (counted.count() == 3).then_some(())
    });
}
