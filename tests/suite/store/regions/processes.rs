//! Processes of several regions, each with its Redis, and the global one behind a slow link: what `/store` shows.

use std::time::Duration;

use serde_json::Value;

use kit::redis as servers;
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

/// Notices of a connected region that is the only one to report, in its first minute.
const ALONE: &[&str] = &[];

fn stats(process: &Tollkeeper) -> Value {
    process.store_stats()["regions"].clone()
}

fn notices(process: &Tollkeeper) -> Vec<String> {
    let stats = stats(process);
    let notices = stats["notices"].as_array().expect("there are notices");
    notices.iter().map(|notice| notice["notice"].as_str().expect("a notice has a name").to_owned()).collect()
}

/// Waits for these notices, and for an answer of the global Redis if it is to be connected.
fn wait_for_notices(process: &Tollkeeper, expected: &[&str]) {
    wait_for(&format!("the notices {expected:?}"), || {
        let is_answered = stats(process)["unanswered_s"].is_number();
        (notices(process) == expected && (is_answered || expected.contains(&"cut_off"))).then_some(())
    });
}

fn wait_for_log(process: &Tollkeeper, text: &str) {
    wait_for(text, || process.stderr().contains(text).then_some(()));
}

#[test]
fn store_page_shows_the_region() {
    let (redis, global) = (servers::options().start(), servers::options().start());
    let link = TcpProxy::to(&global.address());
    link.set(Mode::Delay(Duration::from_millis(60)));
    let process = process("eu", "us,eu", &redis.address(), &format!("127.0.0.1:{}", link.port())).start();
    wait_for_notices(&process, ALONE);
    let stats = stats(&process);
    assert_eq!((&stats["region"], &stats["connected"]), (&"eu".into(), &true.into()), "{stats}");
    assert_eq!(stats["names"], serde_json::json!(["eu", "us"]));
    assert!(stats["unanswered_s"].as_f64().is_some_and(|seconds| seconds < 5.0), "{stats}");
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
        wait_for_log(&process, "the global Redis does not answer: this region spends");
        assert_eq!(stats(&process)["connected"], false);
        assert_eq!(process.healthcheck(), 200, "decisions do not need the global Redis");
        if round == 0 {
            global.thaw();
        } else {
            global.restart();
        }
        wait_for_notices(&process, ALONE);
    }
    wait_for_log(&process, "the global Redis answers again");
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
fn lists_that_differ_are_noticed_in_both_regions() {
    let [first, second, global] = [(); 3].map(|()| servers::options().start());
    let eu = process("eu", "us,eu", &first.address(), &global.address()).start();
    wait_for_notices(&eu, ALONE);
    let us = process("us", "asia,us,eu", &second.address(), &global.address()).start();
    for process in [&us, &eu] {
        wait_for_notices(process, &["other_lists"]);
    }
    wait_for_log(&eu, "TOLLKEEPER_REGIONS differs in us:");
    drop(us);
    let us = process("us", "eu,us", &second.address(), &global.address()).start();
    for process in [&us, &eu] {
        wait_for_notices(process, &[]);
    }
    wait_for_log(&eu, "all regions have the same TOLLKEEPER_REGIONS again");
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
