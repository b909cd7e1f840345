//! Processes of several regions, each with its Redis, and the global one behind a slow link: what `/store` shows.

use std::time::Duration;

use serde_json::Value;

use kit::redis::cluster::Cluster;
use kit::redis::{self as servers, Server};
use kit::scrape::{scrape, with_prometheus};
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::wait_for;

const RULES: &str = "
domain: shop
descriptors:
  - key: user
    rate_limit: { unit: minute, requests_per_unit: 1000 }
";

/// A process of `region` with this list, and the addresses of its Redis and the global one.
fn process(region: &str, regions: &str, redis: &str, global: &str) -> Setup {
    of_region(with_rules(RULES), region, redis, global).env("TOLLKEEPER_REGIONS", regions)
}

/// Settings of `region`, of two.
fn of_region(setup: Setup, region: &str, redis: &str, global: &str) -> Setup {
    setup
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("REDIS_URL", redis)
        .env("TOLLKEEPER_REGION", region)
        .env("TOLLKEEPER_REGIONS", "eu,us")
        .env("TOLLKEEPER_GLOBAL_REDIS_URL", global)
}

/// Notices of a connected region that is the only one to report.
const ALONE: &[&str] = &["never_reported"];

fn stats(process: &Tollkeeper) -> Value {
    process.store_stats()["regions"].clone()
}

fn notices(process: &Tollkeeper) -> Vec<String> {
    let stats = stats(process);
    let notices = stats["notices"].as_array().expect("there are notices");
    notices.iter().map(|notice| notice["notice"].as_str().expect("a notice has a name").to_owned()).collect()
}

fn wait_for_notices(process: &Tollkeeper, expected: &[&str]) {
    let mut last = Vec::new();
    wait_for(&format!("the notices {expected:?}"), || {
        last = notices(process);
        (last == expected).then_some(())
    });
}

fn wait_for_log(process: &Tollkeeper, text: &str) {
    wait_for(text, || process.stderr().contains(text).then_some(()));
}

fn clock<'s>(stats: &'s Value, deployment: &str) -> Vec<&'s Value> {
    let clocks = stats["clocks"].as_array().expect("there are clocks");
    clocks.iter().filter(|clock| clock["deployment"] == deployment).collect()
}

#[test]
fn store_page_shows_the_region_and_its_clocks() {
    let (redis, global) = (servers::options().start(), servers::options().start());
    let link = TcpProxy::to(&global.address());
    link.set(Mode::Delay(Duration::from_millis(60)));
    let process = process("eu", "us,eu", &redis.address(), &format!("127.0.0.1:{}", link.port())).start();
    wait_for_notices(&process, ALONE);
    let stats = stats(&process);
    assert_eq!((&stats["region"], &stats["connected"]), (&"eu".into(), &true.into()), "{stats}");
    assert_eq!(stats["names"], serde_json::json!(["eu", "us"]));
    assert!(stats["unanswered_s"].as_f64().is_some_and(|seconds| seconds < 5.0), "{stats}");
    assert_eq!(stats["clock_jumps"], 0);
    let (near, far) = (clock(&stats, "region"), clock(&stats, "global"));
    assert_eq!((near.len(), far.len()), (1, 1), "{stats}");
    assert_eq!(near[0]["address"], redis.address());
    // The interval is as wide as the round trip at least.
    let width = |clock: &Value| clock["uncertainty_ms"].as_f64().expect("the clock is known");
    assert!((120.0..5000.0).contains(&width(far[0])) && width(near[0]) < 1000.0, "{stats}");
    // Without regions there is nothing to show.
    let alone = with_rules(RULES).env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", redis.address()).start();
    assert!(alone.store_stats().get("regions").is_none());
}

#[test]
fn region_is_cut_off_while_the_global_redis_is_silent() {
    let (redis, global) = (servers::options().start(), servers::options().start());
    let process = process("eu", "us,eu", &redis.address(), &global.address()).start();
    wait_for_notices(&process, ALONE);
    for round in 0..2 {
        if round == 0 {
            global.freeze();
        } else {
            global.kill();
        }
        wait_for_notices(&process, &["cut_off"]);
        assert_eq!(stats(&process)["connected"], false);
        assert_eq!(process.healthcheck(), 200, "decisions do not need the global Redis");
        if round == 0 {
            global.thaw();
        } else {
            global.restart();
        }
        wait_for_notices(&process, ALONE);
    }
    wait_for_log(&process, "on_region_loss decides");
    wait_for_log(&process, "the global Redis answers again");
}

/// Waits until a region's Redis knows a lease, and its identity is settled or its list has changed.
fn wait_for_lease(redis: &Server) {
    wait_for("a lease", || {
        let [is_new, lease] = [("40", "47"), ("64", "71")]
            .map(|(from, to)| redis.query::<Vec<u8>>(&["GETRANGE", "tk1:{identity}", from, to]));
        (is_new == [0; 8] && lease != [0; 8]).then_some(())
    });
}

#[test]
fn process_that_starts_in_a_cut_off_region_has_the_lease_of_the_others() {
    let (redis, global) = (servers::options().start(), servers::options().start());
    let start = || process("eu", "us,eu", &redis.address(), &global.address()).start();
    let first = start();
    wait_for_notices(&first, ALONE);
    wait_for_lease(&redis);
    global.kill();
    wait_for_notices(&start(), &["cut_off"]);
    // Without any lease there is nothing to share.
    redis.kill();
    redis.restart();
    drop(first);
    redis.kill();
    redis.restart();
    wait_for_notices(&start(), &["new_redis", "cut_off", "lease_ended"]);
}

#[test]
fn regions_that_report_elsewhere_are_named() {
    let [first, second, global, other] = [(); 4].map(|()| servers::options().start());
    let eu = process("eu", "us,eu", &first.address(), &global.address()).start();
    let us = process("us", "us,eu", &second.address(), &other.address()).start();
    wait_for_notices(&eu, ALONE);
    wait_for_notices(&us, ALONE);
    wait_for_log(&us, "eu never reported to this global Redis");
    drop(us);
    let us = process("us", "us,eu", &second.address(), &global.address());
    let prefixed = us.env("CACHE_KEY_PREFIX", "other:").start();
    wait_for_notices(&prefixed, ALONE);
    drop(prefixed);
    let us = process("us", "us,eu", &second.address(), &global.address()).start();
    wait_for_notices(&us, &[]);
    wait_for_notices(&eu, &[]);
}

const GLOBAL_RULES: &str = "
domain: shop
descriptors:
  - key: user
    rate_limit: { unit: hour, requests_per_unit: 1000, scope: global }
";

/// Charges the limit of [`GLOBAL_RULES`], and returns the status.
fn charge(process: &Tollkeeper) -> u16 {
    process.post_json(r#"{"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]}"#).status
}

/// Returns a count of grants.
fn grants(process: &Tollkeeper, name: &str) -> u64 {
    stats(process)["grants"][name].as_u64().expect("it is a number")
}

#[test]
fn second_redis_of_a_region_gets_grants_without_parts() {
    let [first, second, global] = [(); 3].map(|()| servers::options().start());
    let setup = |redis: &Server| of_region(with_rules(GLOBAL_RULES), "eu", &redis.address(), &global.address());
    let start = |redis: &Server| setup(redis).start();
    let (watched, port) = with_prometheus(setup(&first));
    let rightful = watched.start();
    wait_for_notices(&rightful, ALONE);
    let replica = start(&first);
    let other = start(&second);
    wait_for_notices(&other, &["second_redis", "new_redis", "never_reported"]);
    wait_for_notices(&replica, &["second_redis", "never_reported"]);
    wait_for_notices(&rightful, &["second_redis", "never_reported"]);
    wait_for_log(&other, "another Redis has the name of this region and last reported");
    for process in [&rightful, &other] {
        wait_for("an admitted request", || (charge(process) == 200).then_some(()));
        assert_eq!(stats(process)["grants"]["admitted_from_reserves"], 0);
        wait_for("a grant", || (grants(process, "granted_hits") > 0).then_some(()));
    }
    let request = r#"{"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]}"#;
    let region = rightful.explain(request)["region"].clone();
    assert_eq!(region["cut_off"], false, "{region}");
    assert_eq!(region["restricted_by"], serde_json::json!(["second_redis", "never_reported"]), "{region}");
    let metrics = scrape(port.number());
    let notice = |name: &str| metrics.count(&format!("tollkeeper_region_notice{{notice=\"{name}\"}}"));
    assert_eq!((notice("second_redis"), notice("cut_off")), (1, 0));
    assert_eq!(metrics.count("tollkeeper_region_restricted"), 1);
}

#[test]
fn copy_of_a_regions_redis_is_noticed_by_both() {
    let [first, global] = [(); 2].map(|()| servers::options().start());
    let start = |redis: &Server| process("eu", "us,eu", &redis.address(), &global.address()).start();
    let original = start(&first);
    wait_for_notices(&original, ALONE);
    let primary = format!("127.0.0.1 {}", first.port());
    let second = servers::options().with(&[("replicaof", &primary)]).start();
    wait_for("the copy", || second.query::<bool>(&["EXISTS", "tk1:{identity}"]).then_some(()));
    second.query::<()>(&["REPLICAOF", "NO", "ONE"]);
    let copy = start(&second);
    wait_for_notices(&original, &["copied_redis", "never_reported"]);
    wait_for_notices(&copy, &["copied_redis", "never_reported"]);
    wait_for_log(&copy, "is a copy of another that is used too");
}

#[test]
fn lists_that_differ_are_noticed_in_both_regions() {
    let [first, second, global] = [(); 3].map(|()| servers::options().start());
    let eu = process("eu", "us,eu", &first.address(), &global.address()).start();
    wait_for_notices(&eu, ALONE);
    let us = process("us", "asia,us,eu", &second.address(), &global.address()).start();
    wait_for_notices(&us, &["other_lists", "new_redis", "never_reported"]);
    wait_for_notices(&eu, &["other_lists"]);
    wait_for_log(&eu, "TOLLKEEPER_REGIONS differs in us:");
    // A changed list is unused for a while, in all regions, and also after a restart.
    drop(us);
    let us = process("us", "eu,us", &second.address(), &global.address()).start();
    wait_for_notices(&us, &["list_changed"]);
    wait_for_notices(&eu, &["list_changed"]);
    wait_for_lease(&second);
    drop(us);
    global.kill();
    let us = process("us", "eu,us", &second.address(), &global.address()).start();
    wait_for_notices(&us, &["list_changed", "cut_off"]);
    assert!(stats(&us)["changed_before_s"].as_f64().is_some_and(|seconds| seconds < 600.0), "{}", stats(&us));
}

#[test]
fn lost_identity_is_written_back() {
    let [redis, global] = [(); 2].map(|()| servers::options().start());
    let process = process("eu", "us,eu", &redis.address(), &global.address()).start();
    let identity = || redis.command(&["GETRANGE", "tk1:{identity}", "0", "47"]).expect("it answers");
    let settled = || {
        wait_for("the settled identity", || {
            let is_new: Vec<u8> = redis.query(&["GETRANGE", "tk1:{identity}", "40", "47"]);
            (is_new == [0; 8]).then(identity)
        })
    };
    wait_for_notices(&process, ALONE);
    let before = settled();
    redis.kill();
    redis.restart();
    assert_eq!(settled(), before, "a Redis without persistence restarted");
    wait_for_notices(&process, &["never_reported", "region_clock_jumped"]);
}

#[test]
fn each_node_of_a_global_cluster_has_a_clock() {
    let (redis, cluster) = (servers::options().start(), Cluster::start());
    let global = cluster.addresses().join(",");
    let process =
        process("eu", "us,eu", &redis.address(), &global).env("TOLLKEEPER_GLOBAL_REDIS_TYPE", "cluster").start();
    wait_for("all clocks", || {
        let stats = stats(&process);
        let clocks = clock(&stats, "global");
        (clocks.len() == 3 && clocks.iter().all(|clock| clock["uncertainty_ms"].is_f64())).then_some(())
    });
    wait_for_notices(&process, ALONE);
}

#[test]
fn missing_permission_in_the_global_redis_is_explained() {
    let redis = servers::options().start();
    let global = servers::options()
        .user("ann", "on >word ~* +eval +evalsha +time +get +set")
        .user("bob", "on >word ~* +eval +evalsha +time +get")
        .start();
    let url = |user: &str| format!("redis://{user}:word@{}", global.address());
    let start = |user: &str| process("eu", "us,eu", &redis.address(), &url(user));
    wait_for_notices(&start("ann").start(), ALONE);
    let without_set = start("bob").start();
    wait_for_notices(&without_set, &["cut_off", "misconfigured"]);
    let without_wait = start("ann").env("TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS", "1").start();
    wait_for_notices(&without_wait, &["cut_off", "misconfigured"]);
    let page = without_wait.store_stats().to_string();
    assert!(page.contains("TOLLKEEPER_GLOBAL_REDIS_AUTH") && page.contains("+wait"), "{page}");
    assert!(!page.contains("word@"), "{page}");
}

#[test]
fn grant_is_used_only_after_a_replica_has_it() {
    let [redis, global] = [(); 2].map(|()| servers::options().start());
    let setup = of_region(with_rules(GLOBAL_RULES), "eu", &redis.address(), &global.address());
    let process = setup.env("TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS", "1").start();
    wait_for_notices(&process, ALONE);
    wait_for("a failed request", || {
        charge(&process);
        (grants(&process, "failed") > 0).then_some(())
    });
    assert_eq!(grants(&process, "granted_hits"), 0);
    wait_for("the end of the reserve", || (charge(&process) == 429).then_some(()));
    let primary = format!("127.0.0.1 {}", global.port());
    let _replica = servers::options().with(&[("replicaof", &primary)]).start();
    wait_for("a grant", || {
        charge(&process);
        (grants(&process, "granted_hits") > 0).then_some(())
    });
    wait_for("an admitted request", || (charge(&process) == 200).then_some(()));
}

#[test]
fn clock_of_the_global_redis_that_jumps_back_and_forth_admits_nothing_more() {
    const DAY_S: i64 = 86_400;
    let rules = "
domain: shop
descriptors:
  - key: user
    rate_limit: { unit: day, requests_per_unit: 200, scope: global }
";
    let (redis, global) = (servers::options().start(), servers::options().own_clock().start());
    let (watched, port) = with_prometheus(of_region(with_rules(rules), "eu", &redis.address(), &global.address()));
    let eu = watched.start();
    let jumps = || scrape(port.number()).count("tollkeeper_clock_jumps_total");
    let notice = || scrape(port.number()).count("tollkeeper_region_notice{notice=\"global_clock_jumped\"}");
    let mut admitted = 0;
    let mut charge_often = |times: u32| {
        admitted += (0..times).filter(|_| charge(&eu) == 200).count();
        admitted
    };
    wait_for("the first grant", || {
        charge_often(1);
        (grants(&eu, "granted_hits") > 0).then_some(())
    });
    assert_eq!(jumps(), 0, "{}", stats(&eu));
    for (offset_s, least_jumps) in [(-2 * DAY_S, 1), (0, 2), (2 * DAY_S, 3), (0, 4)] {
        global.set_clock(offset_s);
        wait_for("the jump to be noticed", || {
            charge_often(10);
            (jumps() >= least_jumps).then_some(())
        });
        assert!(notices(&eu).contains(&"global_clock_jumped".to_owned()), "{:?}", notices(&eu));
        assert_eq!(notice(), 1);
        let admitted = charge_often(100);
        assert!(admitted <= 200, "{admitted} of 200 after the clock jumped to {offset_s} s; {}", stats(&eu));
    }
    wait_for_log(&eu, "notice=global_clock_jumped");
}
