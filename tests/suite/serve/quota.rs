//! The rate limit quota service (RLQS): proxies decide by themselves, and report.
//!
//! Most tests play a proxy over a stream of their own, which says what it likes when it likes. With the real Envoy, a
//! test takes as long as its reports.

pub(crate) mod proxy;
mod reports;
mod streams;

use std::time::{Duration, Instant};

use self::proxy::{Assigned, Proxy};
use kit::envoy::Envoy;
use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::redis;
use kit::tollkeeper::{self, Tollkeeper};
use kit::{PATIENCE, wait_for};

/// Rules of the tests. Hours and days do not end while a test runs, as a rule.
const RULES: &str = r"
domain: quota
descriptors:
  - key: api
    value: v1
    descriptors:
      - key: user
        rate_limit: {unit: day, requests_per_unit: 40}
  - key: fast
    rate_limit: {unit: second, requests_per_unit: 80}
  - key: free
    rate_limit: {unlimited: true}
  - key: closed
    rate_limit: {unit: hour, requests_per_unit: 0}
  - key: queue
    rate_limit: {unit: second, requests_per_unit: 5, algorithm: leaky_bucket}
  - key: watched
    rate_limit: {unit: day, requests_per_unit: 3}
    shadow_mode: true
  - key: twice
    rate_limit:
      - {unit: second, requests_per_unit: 50}
      - {unit: day, requests_per_unit: 300}
";

fn start(rules: &str) -> Tollkeeper {
    tollkeeper::with_rules(rules).env("TOLLKEEPER_RLQS", "true").start()
}

const ANN: [(&str, &str); 2] = [("user", "ann"), ("api", "v1")];

/// Peeks at what RLS would admit of a user's key.
fn remaining_of_ann(server: &Tollkeeper) -> u32 {
    let mut request = rate_limit_request("quota", &[("api", "v1"), ("user", "ann")]);
    request.descriptors[0].hits_addend = Some(0);
    let response = Client::connect(server.grpc_port()).call(&request).unwrap();
    response.statuses[0].limit_remaining
}

#[test]
fn off_by_default() {
    let server = tollkeeper::with_rules(RULES).start();
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    proxy.report(&[(&ANN, 1, 0)]);
    let status = proxy.end().unwrap();
    assert_eq!(status.code(), tonic::Code::Unimplemented);
    assert!(status.message().contains("TOLLKEEPER_RLQS=true"), "{status}");
}

#[test]
fn refused_stream_is_logged_once_and_is_an_alarm() {
    let server = tollkeeper::with_rules(RULES).start();
    let alarms = || http::get(server.debug_port(), "/alarms").send().text();
    assert!(!alarms().contains("rlqs_off"), "{}", alarms());
    for _ in 0..3 {
        Proxy::connect(server.grpc_port(), "quota").end().unwrap();
    }
    let log = server.stderr();
    assert_eq!(log.matches("set TOLLKEEPER_RLQS=true and restart").count(), 1, "{log}");
    wait_for("the alarm", || alarms().contains("rlqs_off").then_some(()));
    let problems = http::get(server.debug_port(), "/problems").send().text();
    assert!(problems.contains("a quota stream was refused"), "{problems}");
}

/// Else Envoy would do, when their time ends, what it does without an assignment: most configurations admit requests.
#[test]
fn used_up_hits_are_denied_before_their_time_ends() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    proxy.report(&[(&ANN, 1, 0)]);
    let (mut used, mut assigned) = (1, proxy.next(&ANN));
    while let Assigned::Tokens { max, .. } = assigned {
        used += max;
        proxy.report(&[(&ANN, u64::from(max), 5)]);
        assigned = proxy.next(&ANN);
    }
    assert_eq!((used, assigned), (40, Assigned::Deny));
}

#[test]
fn first_report_is_answered_with_hits_of_the_counter() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    proxy.report(&[(&ANN, 1, 0)]);
    let assigned = proxy.next(&ANN);
    let Assigned::Tokens { max, fill: 0, ttl_s, .. } = assigned else { panic!("{assigned:?}") };
    assert!((30..40).contains(&max), "{max}");
    assert!(ttl_s >= 15, "{ttl_s}");
    // RLS sees what is left: neither the hit that was used nor what was lent.
    assert_eq!(remaining_of_ann(&server), 40 - 1 - max);
    let page = http::get(server.debug_port(), "/quota?format=text").send().text();
    assert!(page.contains("quota.api_v1.user") && page.contains("tokens"), "{page}");
}

#[test]
fn limits_of_rules_decide_the_strategy() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    let one = |key| [(key, "x")];
    let buckets = [one("fast"), one("free"), one("closed"), one("nothing"), one("watched"), one("twice")];
    let usages: Vec<_> = buckets.iter().map(|bucket| (&bucket[..], 1, 0)).collect();
    proxy.report(&usages);
    let Assigned::Tokens { max, fill, interval_s: 1, ttl_s, starts_full: false } = proxy.next(&buckets[0]) else {
        panic!("a rate is assigned: {proxy:?}");
    };
    assert!(max == fill && (60..=80).contains(&max) && ttl_s <= 15, "{max}, {fill}, {ttl_s}");
    assert_eq!(proxy.next(&buckets[1]), Assigned::Allow);
    assert_eq!(proxy.next(&buckets[2]), Assigned::Deny);
    assert_eq!(proxy.next(&buckets[3]), Assigned::Allow);
    assert_eq!(proxy.next(&buckets[4]), Assigned::Allow);
    // The tightest of both: no more than 300 in the time of the assignment.
    let Assigned::Tokens { max, fill, interval_s: 1, ttl_s, .. } = proxy.next(&buckets[5]) else {
        panic!("a rate is assigned: {proxy:?}");
    };
    assert!(max + fill * (ttl_s + 1) <= 300, "{max} {fill} {ttl_s}");
    // A queue cannot be divided.
    proxy.report(&[(&one("queue"), 1, 0), (&one("free"), 0, 0)]);
    wait_for("the refusal to be logged", || server.stderr().contains("leaky_bucket").then_some(()));
}

#[test]
fn two_proxies_share_a_limit() {
    let server = start(RULES);
    let mut first = Proxy::connect(server.grpc_port(), "quota");
    let mut second = Proxy::connect(server.grpc_port(), "quota");
    first.report(&[(&ANN, 1, 0)]);
    let Assigned::Tokens { max: first_has, .. } = first.next(&ANN) else { panic!("{first:?}") };
    second.report(&[(&ANN, 0, 1)]);
    let second_has = match second.next(&ANN) {
        Assigned::Tokens { max, .. } => max,
        Assigned::Deny => 0,
        Assigned::Allow => panic!("{second:?}"),
    };
    assert!(second_has > 0 && first_has + second_has < 40, "{first_has} and {second_has}");
    assert_eq!(remaining_of_ann(&server), 40 - 1 - first_has - second_has);
}

#[test]
fn hits_that_are_not_reported_count_as_used_after_the_stream() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    proxy.report(&[(&ANN, 1, 0)]);
    let Assigned::Tokens { max, .. } = proxy.next(&ANN) else { panic!("{proxy:?}") };
    proxy.report(&[(&ANN, 10, 0)]);
    wait_for("the hits to be charged", || (remaining_of_ann(&server) <= 40 - 1 - max).then_some(()));
    drop(proxy);
    // What may have been used of the rest counts as used.
    wait_for("the stream to end", || {
        let page = http::get(server.debug_port(), "/quota").send().text();
        page.contains("\"stream_count\": 0").then_some(())
    });
    // The assignment may have been raised by then.
    assert!(remaining_of_ann(&server) <= 40 - 1 - max);
}

#[test]
fn id_that_is_not_utf8_harms_no_other_bucket() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    proxy.report_bytes(&[(&[(b"user", b"caf\xe9"), (b"api", b"v1")], 1), (&[(b"free", b"x")], 1)]);
    assert_eq!(proxy.next(&[("free", "x")]), Assigned::Allow);
    assert!(server.stderr().contains("not UTF-8"), "{}", server.stderr());
}

#[test]
fn changed_rule_takes_back_at_once() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    let fast = [("fast", "x")];
    proxy.report(&[(&fast, 1, 0)]);
    let Assigned::Tokens { max, .. } = proxy.next(&fast) else { panic!("{proxy:?}") };
    let rules = RULES.replace("requests_per_unit: 80", "requests_per_unit: 20");
    std::fs::write(server.rules_path(), rules).unwrap();
    let less = proxy.next(&fast);
    assert!(matches!(less, Assigned::Tokens { max: less, .. } if less < max && less <= 20), "{less:?} after {max}");
}

#[test]
fn counter_in_two_divisions_counts_what_proxies_still_have() {
    let rules = |more: &str| {
        format!(
            "domain: quota\ndescriptors:\n- key: fast\n  rate_limit:\n  - {{unit: hour, requests_per_unit: 600}}\n{more}"
        )
    };
    let server = start(&rules(""));
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    let fast = [("fast", "x")];
    proxy.report(&[(&fast, 1, 0)]);
    let Assigned::Tokens { max: first, .. } = proxy.next(&fast) else { panic!("{proxy:?}") };
    assert!(first > 300, "{first}");
    std::fs::write(server.rules_path(), rules("  - {unit: day, requests_per_unit: 10000}\n")).unwrap();
    // The counter of the hour is in two divisions now. All of the first part may have been used.
    match proxy.next(&fast) {
        Assigned::Tokens { max: second, .. } => assert!(first + second <= 600, "{first} and {second}"),
        Assigned::Deny => {}
        Assigned::Allow => panic!("{proxy:?}"),
    }
}

/// Two proxies report each 200 ms. One asks for 100 a second, the other for 5, and then it is the other way round.
#[test]
fn reports_below_a_second_move_the_share_of_a_rate() {
    const INTERVAL: Duration = Duration::from_millis(200);
    let server = start(RULES);
    let mut proxies = [(); 2].map(|()| Proxy::connect(server.grpc_port(), "quota"));
    let fast = [("fast", "x")];
    proxies.iter_mut().for_each(|proxy| proxy.report(&[(&fast, 0, 1)]));
    let mut fills = [0, 0];
    for busy in [0, 1] {
        let began = Instant::now();
        while fills[busy] < 3 * fills[1 - busy].max(10) {
            assert!(began.elapsed() < PATIENCE, "{fills:?} of 80, proxy {busy} is busy");
            std::thread::sleep(INTERVAL);
            for (index, proxy) in proxies.iter_mut().enumerate() {
                let hits = if index == busy { 20 } else { 1 };
                let passed = hits.min(u64::from(fills[index]) / 5);
                proxy.report_after(INTERVAL, &[(&fast, passed, hits - passed)]);
                match proxy.last_of_now(&fast) {
                    Some(Assigned::Tokens { fill, interval_s: 1, .. }) => fills[index] = fill,
                    Some(Assigned::Deny) => fills[index] = 0,
                    Some(other) => panic!("{other:?}"),
                    None => {}
                }
            }
            assert!(fills[0] + fills[1] <= 80, "{fills:?} of 80");
        }
    }
}

#[test]
fn changed_period_is_put_in_force() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    let fast = [("fast", "x")];
    proxy.report(&[(&fast, 1, 0)]);
    let before = proxy.next(&fast);
    assert!(matches!(before, Assigned::Tokens { interval_s: 1, .. }), "{before:?}");
    let rules = RULES.replace("requests_per_unit: 80", "requests_per_unit: 80, unit_multiplier: 10");
    std::fs::write(server.rules_path(), rules).unwrap();
    // Envoy ignores a bucket of which only the interval differs.
    let after = proxy.next(&fast);
    assert!(matches!(after, Assigned::Tokens { interval_s: 10, starts_full: true, .. }), "{after:?} after {before:?}");
}

#[test]
fn streams_end_with_the_drain() {
    let mut server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    proxy.report(&[(&ANN, 1, 0)]);
    proxy.next(&ANN);
    server.signal("TERM");
    assert!(server.wait().success());
}

#[test]
fn bucket_matches_the_rule_with_its_entries_in_any_order() {
    let rules = r"
domain: quota
descriptors:
  - key: b
    descriptors:
      - key: a
        value: one
        rate_limit: {unit: day, requests_per_unit: 100}
  - key: a
    rate_limit: {unit: day, requests_per_unit: 200}
    descriptors:
      - key: c
        value: x*
        descriptors:
          - key: b
            rate_limit: {unit: day, requests_per_unit: 300}
";
    let server = start(rules);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    let (two, one, three) = ([("a", "one"), ("b", "y")], [("a", "one")], [("a", "q"), ("b", "y"), ("c", "xyz")]);
    let none = [("a", "two"), ("b", "y")];
    proxy.report(&[(&two, 1, 0), (&one, 1, 0), (&three, 1, 0), (&none, 1, 0)]);
    for (bucket, limit) in [(&two[..], 100), (&one[..], 200), (&three[..], 300)] {
        let assigned = proxy.next(bucket);
        let Assigned::Tokens { max, .. } = assigned else { panic!("{assigned:?} for {bucket:?}") };
        assert!((limit / 2..limit).contains(&max), "{max} of {limit}");
    }
    assert_eq!(proxy.next(&none), Assigned::Allow);
    let mut request = rate_limit_request("quota", &[("b", "y"), ("a", "one")]);
    request.descriptors[0].hits_addend = Some(0);
    let response = Client::connect(server.grpc_port()).call(&request).unwrap();
    assert!(response.statuses[0].limit_remaining < 50, "the descriptor has the counter of the bucket: {response:?}");
}

#[test]
fn check_names_limits_that_cannot_be_divided() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("rules.yaml");
    std::fs::write(&path, RULES).unwrap();
    let regions = [
        ("TOLLKEEPER_REGION", "a"),
        ("TOLLKEEPER_REGIONS", "a,b"),
        ("TOLLKEEPER_GLOBAL_REDIS_URL", "redis://localhost:6380"),
        ("REDIS_URL", "localhost:6379"),
    ];
    let run = |arguments: &[&str]| {
        let mut check = std::process::Command::new(tollkeeper::program_path());
        let output = check.env_clear().envs(regions).args(arguments).arg(&path).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let page = run(&["check", "--quota"]);
    assert!(page.contains("quota.queue: RLQS assigns nothing to its buckets: leaky_bucket"), "{page}");
    assert!(!run(&["check"]).contains("RLQS"));
    std::fs::write(
        &path,
        RULES.replace(
            "second, requests_per_unit: 5, algorithm: leaky_bucket",
            "day, requests_per_unit: 90000, scope: global",
        ),
    )
    .unwrap();
    let page = run(&["check", "--quota"]);
    assert!(page.contains("quota.queue: RLQS assigns nothing to its buckets: `scope: global`"), "{page}");
}

#[test]
fn stream_that_never_reads_harms_no_other() {
    let server = start(RULES);
    let mut deaf = Proxy::connect(server.grpc_port(), "quota");
    // Far more than the windows of HTTP/2 hold: the answers to each are about 100 kB.
    let users: Vec<String> = (0..1000).map(|number| format!("deaf-{number}")).collect();
    let buckets: Vec<[(&str, &str); 2]> = users.iter().map(|user| [("user", user.as_str()), ("api", "v1")]).collect();
    let usages: Vec<_> = buckets.iter().map(|bucket| (&bucket[..], 1, 0)).collect();
    for _ in 0..8 {
        deaf.report(&usages);
    }
    let mut other = Proxy::connect(server.grpc_port(), "quota");
    other.report(&[(&ANN, 1, 0)]);
    assert!(matches!(other.next(&ANN), Assigned::Tokens { .. }), "{other:?}");
    let buckets = format!("\"bucket_count\": {}", 1001);
    wait_for("all buckets to be known", || {
        http::get(server.debug_port(), "/quota").send().text().contains(&buckets).then_some(())
    });
}

/// Number of buckets of all streams.
fn bucket_count(server: &Tollkeeper) -> u64 {
    let page = http::get(server.debug_port(), "/quota").send();
    let page: serde_json::Value = serde_json::from_slice(&page.body).unwrap();
    page["bucket_count"].as_u64().unwrap()
}

/// Who invents buckets gets no more than a part of the room, and the others keep theirs and get new ones.
#[test]
fn buckets_of_one_proxy_leave_room_for_others() {
    let long = "x".repeat(1000);
    // A bucket with a long id takes two places.
    for (most, text, expected) in [("100", "", 80), ("200", &*long, 80)] {
        let setup = tollkeeper::with_rules(RULES).env("TOLLKEEPER_RLQS", "true");
        let server = setup.env("TOLLKEEPER_RLQS_MAX_BUCKETS", most).start();
        let mut early = Proxy::connect(server.grpc_port(), "quota");
        early.report(&[(&ANN, 1, 0)]);
        assert!(matches!(early.next(&ANN), Assigned::Tokens { .. }), "{early:?}");
        let mut hostile = Proxy::connect(server.grpc_port(), "quota");
        let users: Vec<String> = (0..300).map(|number| format!("{number}{text}")).collect();
        let buckets: Vec<[(&str, &str); 2]> =
            users.iter().map(|user| [("user", user.as_str()), ("api", "v1")]).collect();
        let usages: Vec<_> = buckets.iter().map(|bucket| (&bucket[..], 1, 0)).collect();
        hostile.report(&usages);
        wait_for("a bucket without room", || {
            server.stderr().contains("raise TOLLKEEPER_RLQS_MAX_BUCKETS,").then_some(())
        });
        let mut late = Proxy::connect(server.grpc_port(), "quota");
        late.report(&[(&[("user", "bob"), ("api", "v1")], 1, 0)]);
        assert!(matches!(late.next(&[("user", "bob"), ("api", "v1")]), Assigned::Tokens { .. }), "{late:?}");
        let count = bucket_count(&server);
        assert!((expected - 5..=expected + 5).contains(&count), "{count} buckets, {most}");
        drop(hostile);
        wait_for("the room to be free again", || (bucket_count(&server) == 2).then_some(()));
        early.report(&[(&ANN, 3, 0)]);
        drop(early);
        drop(late);
        wait_for("all to be free", || (bucket_count(&server) == 0).then_some(()));
    }
}

/// A client with long ids that reads nothing, or little at once.
#[test]
fn responses_with_long_ids_are_sent_in_parts() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    let long = "x".repeat(4000);
    let users: Vec<String> = (0..800).map(|number| format!("{number}{long}")).collect();
    for part in users.chunks(400) {
        let buckets: Vec<[(&str, &str); 2]> =
            part.iter().map(|user| [("user", user.as_str()), ("api", "v1")]).collect();
        let usages: Vec<_> = buckets.iter().map(|bucket| (&bucket[..], 1, 0)).collect();
        proxy.report(&usages);
    }
    // The client of this test refuses a message above 4 MiB.
    for user in &users {
        let bucket = [("user", user.as_str()), ("api", "v1")];
        assert!(matches!(proxy.next(&bucket), Assigned::Tokens { .. }), "{user}");
    }
}

#[test]
fn buckets_of_a_report_are_answered_together() {
    let server = start(RULES);
    let mut proxy = Proxy::connect(server.grpc_port(), "quota");
    let users: Vec<String> = (0..500).map(|number| number.to_string()).collect();
    let buckets: Vec<[(&str, &str); 2]> = users.iter().map(|user| [("user", user.as_str()), ("api", "v1")]).collect();
    let usages: Vec<_> = buckets.iter().map(|bucket| (&bucket[..], 1, 0)).collect();
    proxy.report(&usages);
    buckets.iter().for_each(|bucket| assert!(matches!(proxy.next(bucket), Assigned::Tokens { .. }), "{bucket:?}"));
    // A machine that is slow needs some, as a response has all that was ready in a fifth of a second.
    assert!(proxy.responses_read < 100, "{}", proxy.responses_read);
}

#[test]
fn real_envoy_keeps_to_a_limit_that_rls_shares() {
    keeps_to_a_limit_that_rls_shares(&start(RULES));
}

#[test]
fn real_envoy_keeps_to_a_limit_in_redis() {
    let redis = redis::options().start();
    let server = tollkeeper::with_rules(RULES)
        .env("TOLLKEEPER_RLQS", "true")
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("REDIS_URL", redis.address())
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
        .start();
    keeps_to_a_limit_that_rls_shares(&server);
}

fn keeps_to_a_limit_that_rls_shares(server: &Tollkeeper) {
    let envoy = Envoy::start_file("tests/suite/serve/quota/envoy.yaml", &[server.grpc_port()], |bootstrap| bootstrap);
    let request = envoy.get("/").header("x-user", "ann");
    let began = Instant::now();
    let mut passed = 0;
    // Two reports and more: what is left after the first assignment is lent with them.
    while began.elapsed() < Duration::from_secs(17) {
        let status = request.send().status;
        assert!(matches!(status, 200 | 429), "{status}");
        passed += u32::from(status == 200);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!((38..=40).contains(&passed), "{passed} of 40 passed;\n{}", server.stderr());
    wait_for("the last hits to be reported", || (remaining_of_ann(server) == 0).then_some(()));
}
