//! Global limits in processes of several regions, each with its Redis: demand, cuts, lost replies, takeover, resets.
//!
//! Limits of a day: their window does not end during a test.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::limit::algorithm::region_pool::RegionPool;
use tollkeeper::limit::algorithm::stored_state::ReplyReader;

use kit::grpc::{Client, rate_limit_request};
use kit::redis::{self as servers, Server};
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::{http, wait_for};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Limits of 1000 hits; two regions have 50 each in reserve, and 6 as share of the overshoot.
const RULES: &str = "
domain: shop
descriptors:
  - key: share
    rate_limit: { unit: day, requests_per_unit: 1000, algorithm: fixed_window, scope: global }
  - key: sliding
    rate_limit: { unit: day, requests_per_unit: 1000, algorithm: sliding_window_counter, scope: global }
  - key: deny
    rate_limit: { unit: day, requests_per_unit: 1000, algorithm: fixed_window, scope: global, on_region_loss: deny }
  - key: local
    rate_limit: { unit: day, requests_per_unit: 1000, algorithm: fixed_window, scope: global, on_region_loss: local }
  - key: allow
    rate_limit: { unit: day, requests_per_unit: 1000, algorithm: fixed_window, scope: global, on_region_loss: allow }
  - key: bucket
    rate_limit: { unit: day, requests_per_unit: 1000, algorithm: token_bucket, scope: global }
  - key: both
    rate_limit:
      - { unit: day, requests_per_unit: 1000, algorithm: fixed_window, scope: global }
      - { unit: day, requests_per_unit: 900, algorithm: sliding_window_counter, scope: global }
  - key: short
    rate_limit: { unit: second, unit_multiplier: 10, requests_per_unit: 1000, algorithm: fixed_window, scope: global }
  - key: lent
    rate_limit: { unit: day, requests_per_unit: 5000, algorithm: fixed_window, scope: global, consistency: eventual }
  - key: lent_sliding
    rate_limit:
      { unit: day, requests_per_unit: 5000, algorithm: sliding_window_counter, scope: global, consistency: eventual }
  - key: lent_bucket
    rate_limit: { unit: day, requests_per_unit: 5000, algorithm: token_bucket, scope: global, consistency: eventual }
  - key: lent_much
    rate_limit: { unit: day, requests_per_unit: 500000, algorithm: fixed_window, scope: global, consistency: eventual }
  - key: lent_much_bucket
    rate_limit: { unit: day, requests_per_unit: 500000, algorithm: token_bucket, scope: global, consistency: eventual }
  - key: strict_much
    rate_limit: { unit: day, requests_per_unit: 500000, algorithm: fixed_window, scope: global }
  - key: lent_deny
    rate_limit:
      unit: day
      requests_per_unit: 1000
      algorithm: fixed_window
      scope: global
      consistency: eventual
      on_region_loss: deny
";

/// Share of the overshoot of one of two regions: an eighth of 5 %.
const ALLOWANCE: u64 = 6;
/// Reserve of one of two regions: half of 10 %.
const RESERVE: u64 = 50;
const PERIOD_S: u64 = 10;

/// Region with its Redis, and a link to the global Redis for each process.
struct Region {
    redis: Server,
    replicas: Vec<(Tollkeeper, TcpProxy)>,
}

impl Region {
    fn start(name: &str, names: &str, global: &Server, replicas: usize) -> Self {
        let redis = servers::options().start();
        let start = |_| {
            let link = TcpProxy::to(&global.address());
            let process = setup(&redis, &link).env("TOLLKEEPER_REGION", name).env("TOLLKEEPER_REGIONS", names).start();
            (process, link)
        };
        let region = Self { replicas: (0..replicas).map(start).collect(), redis };
        region.wait_for_notices(&[]);
        region
    }

    /// Waits until all processes show these notices, whether or not the other region has reported.
    fn wait_for_notices(&self, expected: &[&str]) {
        for (process, _) in &self.replicas {
            wait_for(&format!("the notices {expected:?}"), || {
                let stats = stats(process);
                let notices = stats["notices"].as_array().expect("there are notices");
                let names = notices.iter().map(|notice| notice["notice"].as_str().unwrap_or(""));
                let is_connected = stats["unanswered_s"].is_number();
                (names.eq(expected.iter().copied()) && (is_connected || !expected.is_empty())).then_some(())
            });
        }
    }

    fn set_links(&self, mode: Mode) {
        self.replicas.iter().for_each(|(_, link)| link.set(mode));
    }

    /// Charges hits one by one, by turns at all replicas; returns how many were admitted.
    fn charge(&self, key: &str, hits: usize) -> u64 {
        let clients: Vec<_> = self.replicas.iter().map(|(process, _)| Client::connect(process.grpc_port())).collect();
        let request = rate_limit_request("shop", &[(key, "ann")]);
        let responses = clients.iter().cycle().take(hits).map(|client| client.call(&request).expect("it is decided"));
        responses.map(|response| u64::from(response.overall_code() == Code::Ok)).sum()
    }

    /// Pool of a key; `None` if there is none.
    fn pool(&self, key: &str) -> Option<RegionPool> {
        let value: Option<Vec<u8>> = self.redis.query(&["GET", &format!("{}:pool", part_key(key))]);
        RegionPool::read_from_reply(&mut ReplyReader::new(&value?)).ok()
    }

    /// Hits that were charged to the region's part; `None` if it has none.
    fn used_of_part(&self, key: &str) -> Option<u64> {
        words(&self.redis, &part_key(key)).get(1).copied()
    }
}

fn algorithm(key: &str) -> &'static str {
    match key {
        "sliding" => "sliding_window_counter",
        "bucket" => "token_bucket",
        _ => "fixed_window",
    }
}

fn part_key(key: &str) -> String {
    format!("tk1:{{shop|{key}=ann}}:part_{}:86400s", algorithm(key))
}

fn setup(redis: &Server, link: &TcpProxy) -> Setup {
    with_rules(RULES)
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("REDIS_URL", redis.address())
        .env("TOLLKEEPER_GLOBAL_REDIS_URL", format!("127.0.0.1:{}", link.port()))
        .env("TOLLKEEPER_STORE_TIMEOUT", "5s")
        .env("TOLLKEEPER_REPLICAS", "2")
        .env("TOLLKEEPER_ADMIN_TOKEN", TOKEN)
}

fn stats(process: &Tollkeeper) -> Value {
    process.store_stats()["regions"].clone()
}

fn body(key: &str) -> String {
    json!({"domain": "shop", "descriptors": [{"entries": [{"key": key, "value": "ann"}]}]}).to_string()
}

fn admits(process: &Tollkeeper, key: &str) -> bool {
    match process.post_json(&body(key)).status {
        200 => true,
        429 => false,
        status => panic!("{status}"),
    }
}

fn words(server: &Server, key: &str) -> Vec<u64> {
    let found: Option<Vec<u8>> = server.query(&["GET", key]);
    found.unwrap_or_default().as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// Hits of a fixed window that the global Redis has charged, and those that it holds for regions.
fn charged_and_held(global: &Server, key: &str) -> [u64; 2] {
    let words = words(global, &format!("tk1:{{shop|{key}=ann}}:global_less_parts_fixed_window:86400s"));
    let word = |place: usize| words.get(place).copied().unwrap_or(0);
    [word(1), word(2) & 0xffff_ffff]
}

/// Charges until hits are granted and not used yet; returns how many were admitted.
fn charge_until_granted(region: &Region, key: &str) -> u64 {
    let mut admitted = 0;
    wait_for("granted hits", || {
        admitted += region.charge(key, 5);
        region.pool(key).filter(|pool| pool.left > 0).map(|_| ())
    });
    admitted
}

#[test]
fn two_algorithms_of_a_descriptor_count_apart() {
    let global = servers::options().start();
    let eu = Region::start("eu", "eu,us", &global, 1);
    assert_eq!(eu.charge("both", 3), 3);
    for algorithm in ["fixed_window", "sliding_window_counter"] {
        let words = words(&eu.redis, &format!("tk1:{{shop|both=ann}}:part_{algorithm}:86400s"));
        assert_eq!(words.get(1), Some(&3), "part used of {algorithm}: {words:?}");
    }
}

/// Charges in all regions at once until nothing is admitted for a while; returns what each admitted.
fn exhaust(regions: &[&Region], key: &str) -> Vec<u64> {
    thread::scope(|scope| {
        let charging = regions.iter().map(|region| {
            scope.spawn(move || {
                let (mut admitted, mut idle) = (0, 0);
                while idle < 2 {
                    let hits = region.charge(key, 100);
                    admitted += hits;
                    idle = if hits == 0 { idle + 1 } else { 0 };
                    // Until the next grant, more calls would only be rejected.
                    let pause_ms = match hits {
                        0 => 1_500,
                        100 => 0,
                        _ => 50,
                    };
                    thread::sleep(Duration::from_millis(pause_ms));
                }
                admitted
            })
        });
        let charging: Vec<_> = charging.collect();
        charging.into_iter().map(|region| region.join().expect("no region panics")).collect()
    })
}

#[test]
fn total_over_regions_is_the_limit() {
    let global = servers::options().start();
    let [eu, us] = ["eu", "us"].map(|name| Region::start(name, "eu,us", &global, 2));
    let admitted: u64 = exhaust(&[&eu, &us], "share").iter().sum();
    assert!(admitted <= 1000, "{admitted}");
    assert!(admitted >= 900, "what is left is granted to each region that asks: {admitted}");
    let [charged, held] = charged_and_held(&global, "share");
    assert!(charged + held <= 900, "the parts are never granted: {charged} + {held}");
}

#[test]
fn leases_of_replicas_stay_within_the_limit() {
    let global = servers::options().start();
    let [eu, us] = ["eu", "us"].map(|name| Region::start(name, "eu,us", &global, 2));
    // A bucket refills a hit in 17 s.
    let expected = [("lent", 4000..=5000), ("lent_sliding", 4000..=5000), ("lent_bucket", 4000..=5005)];
    for (key, expected) in expected {
        let admitted: u64 = exhaust(&[&eu, &us], key).iter().sum();
        assert!(expected.contains(&admitted), "{admitted} of {key}");
    }
}

#[test]
fn leases_of_a_global_limit_save_calls() {
    let global = servers::options().start();
    let [eu, _us] = ["eu", "us"].map(|name| Region::start(name, "eu,us", &global, 2));
    for (key, expected) in [("lent_much", 1..1000), ("lent_much_bucket", 1..1000), ("strict_much", 1900..4000)] {
        eu.redis.reset_stats();
        assert_eq!(eu.charge(key, 2000), 2000, "{key}");
        let counts = eu.redis.command_counts();
        let calls = counts.get("evalsha").copied().unwrap_or(0);
        assert!(expected.contains(&calls), "{calls} calls for 2000 decisions of {key}");
    }
}

#[test]
fn cut_off_region_lends_its_part_only() {
    let global = servers::options().start();
    let [eu, _us] = ["eu", "us"].map(|name| Region::start(name, "eu,us", &global, 2));
    eu.set_links(Mode::Reset);
    eu.wait_for_notices(&["cut_off"]);
    let admitted = eu.charge("lent_deny", 700);
    assert!((1..=RESERVE).contains(&admitted), "{admitted}");
}

#[test]
fn cut_off_region_admits_its_reserve_and_what_the_policy_says() {
    let global = servers::options().start();
    let [eu, us] = ["eu", "us"].map(|name| Region::start(name, "eu,us", &global, 2));
    eu.set_links(Mode::Reset);
    let elsewhere = thread::scope(|scope| {
        // The other region goes on, without the reserve of this one.
        let elsewhere = scope.spawn(|| exhaust(&[&us], "sliding")[0]);
        eu.wait_for_notices(&["cut_off"]);
        for (key, expected) in [("deny", RESERVE), ("sliding", RESERVE + ALLOWANCE), ("local", 500)] {
            assert_eq!(eu.charge(key, 700), expected, "{key}");
        }
        assert_eq!(eu.charge("allow", 1200), 1200);
        let explained = |region: &Region, key: &str| region.replicas[0].0.explain(&body(key));
        let [here, there] = [&eu, &us].map(|region| explained(region, "local")["region"].clone());
        assert_eq!(here, json!({"name": "eu", "cut_off": true}));
        assert_eq!(there, json!({"name": "us", "cut_off": false}));
        let share = explained(&eu, "sliding");
        let limit = &share["descriptors"][0]["limits"][0];
        let promise = format!(
            "global: all 2 regions together admit at most 5 % more than one region with this limit in any span of a period; reserve \
                       of a region: 50; when cut off, beyond what it holds: {} per period (on_region_loss: share)",
            RESERVE + ALLOWANCE
        );
        assert_eq!((&limit["guarantee"], &limit["counter"]["remaining"]), (&json!(promise), &json!(0)));
        elsewhere.join().expect("it does not panic")
    });
    assert!((700..=1000 - RESERVE).contains(&elsewhere), "{elsewhere}");
    eu.set_links(Mode::Pass);
    eu.wait_for_notices(&[]);
    let back = eu.charge("sliding", 100);
    assert!(RESERVE + elsewhere + back <= 1000, "{elsewhere} + {back}");
}

#[test]
fn region_that_loses_its_redis_admits_what_its_loss_policy_says() {
    let global = servers::options().start();
    let [eu, us] = ["eu", "us"].map(|name| Region::start(name, "eu,us", &global, 2));
    let mut total = charge_until_granted(&eu, "share");
    eu.redis.kill();
    // Its processes decide by `on_store_error: local`, the default.
    let alone = eu.charge("share", 300);
    assert_eq!((alone, eu.charge("deny", 300)), (ALLOWANCE, 0));
    assert!((400..=500).contains(&eu.charge("local", 700)), "half of the limit in a region, by its own choice");
    total += alone + exhaust(&[&us], "share")[0];
    assert!(total <= 1000, "{total}");
}

#[test]
fn region_with_all_demand_gets_most_of_the_limit() {
    let global = servers::options().start();
    let names = ["ap", "eu", "us"];
    let regions = names.map(|name| Region::start(name, "ap,eu,us", &global, 1));
    let eu = &regions[1];
    eu.set_links(Mode::Delay(Duration::from_millis(40)));
    let second = || SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is set").as_secs();
    let start = second() / PERIOD_S;
    // Requests of each window, and those that were admitted.
    let mut windows = vec![(0_u64, 0_u64); 1];
    // The first window begins before the test, and the demand of the second is known from it.
    while windows.len() <= 3 {
        let before = second() / PERIOD_S;
        let is_admitted = admits(&eu.replicas[0].0, "short");
        let window = usize::try_from(before - start).expect("it is small");
        windows.resize(windows.len().max(window + 1), (0, 0));
        windows[window].0 += 1;
        windows[window].1 += u64::from(is_admitted);
    }
    windows.truncate(3);
    // A hit at the very end may be counted in the next window.
    assert!(windows.iter().all(|(_, admitted)| *admitted <= 1020), "{windows:?}");
    // A busy machine sends fewer requests than the limit.
    let is_most = |(sent, admitted): &(u64, u64)| admitted * 4 >= *sent.min(&1000) * 3;
    assert!(windows[1..].iter().any(is_most), "{windows:?}");
    let totals = &stats(&eu.replicas[0].0)["grants"];
    assert!(totals["requested"].as_u64() < Some(120), "about two requests a second: {totals}");
}

#[test]
fn lost_replies_never_double_hits() {
    let global = servers::options().start();
    let eu = Region::start("eu", "eu,us", &global, 1);
    let failed = || stats(&eu.replicas[0].0)["grants"]["failed"].as_u64().expect("it is a number");
    // The request arrives, and is answered when its process has given up.
    global.freeze();
    assert_eq!(eu.charge("share", 60), RESERVE);
    wait_for("a failed request", || Some(()).filter(|()| failed() > 0));
    global.thaw();
    eu.wait_for_notices(&[]);
    let admitted = RESERVE + exhaust(&[&eu], "share")[0];
    assert!((900..=950).contains(&admitted), "all but the part of the other region: {admitted}");
}

#[test]
fn another_replica_requests_hits_for_one_that_died() {
    let global = servers::options().start();
    let mut eu = Region::start("eu", "eu,us", &global, 2);
    let (first, link) = &eu.replicas[0];
    // It opens a request that reaches no server, and dies.
    link.set(Mode::Blackhole);
    while admits(first, "share") {}
    let number = || eu.pool("share").map_or(0, |pool| pool.number);
    let opened = number();
    assert!(opened > 0 && charged_and_held(&global, "share") == [0, 0]);
    eu.replicas[0].0.kill();
    let second = &eu.replicas[1].0;
    wait_for("hits for the other replica", || admits(second, "share").then_some(()));
    assert!(eu.pool("share").is_some_and(|pool| pool.number != opened));
}

/// Hits that a region admitted, as its only process counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Admitted {
    from_grants: u64,
    from_reserves: u64,
}

impl Admitted {
    fn by(region: &Region) -> Self {
        let grants = stats(&region.replicas[0].0)["grants"].clone();
        let count = |name: &str| grants[name].as_u64().expect("it is a number");
        Self { from_grants: count("admitted_from_grants"), from_reserves: count("admitted_from_reserves") }
    }

    fn total(self) -> u64 {
        self.from_grants + self.from_reserves
    }
}

#[test]
fn admitted_hits_are_counted_by_what_they_came_from() {
    for key in ["share", "sliding", "bucket"] {
        let global = servers::options().start();
        let eu = Region::start("eu", "eu,us", &global, 1);
        let mut total = eu.charge(key, 5);
        assert_eq!(Admitted::by(&eu), Admitted { from_grants: 0, from_reserves: 5 }, "{key}");
        wait_for("granted hits", || {
            total += eu.charge(key, 10);
            Some(()).filter(|()| Admitted::by(&eu).from_grants > 0)
        });
        if key == "share" {
            assert_eq!(eu.used_of_part(key), Some(Admitted::by(&eu).from_reserves), "{key}");
        }
        eu.set_links(Mode::Reset);
        eu.wait_for_notices(&["cut_off"]);
        total += eu.charge(key, 1_000);
        assert_eq!(Admitted::by(&eu).total(), total, "{key}");
    }
}

/// Resets the counters of a key by a request to a region.
fn reset(region: &Region, key: &str, expected: u16) {
    let request = http::post(region.replicas[0].0.debug_port(), "/reset", body(key));
    let response = request.header("authorization", format!("Bearer {TOKEN}")).send();
    assert_eq!(response.status, expected);
    // No permission is missing where the global Redis is.
    let text = response.text();
    assert!(expected == 200 || text.starts_with("global redis: "), "{text}");
}

#[test]
fn reset_empties_the_counter_of_a_region_and_the_one_above() {
    let global = servers::options().start();
    let [eu, us] = ["eu", "us"].map(|name| Region::start(name, "eu,us", &global, 2));
    for region in [&eu, &us] {
        assert!(charge_until_granted(region, "share") >= RESERVE);
        assert!(region.charge("share", 5) > 0);
    }
    reset(&eu, "share", 200);
    assert_eq!((eu.used_of_part("share"), eu.pool("share")), (None, None));
    assert_eq!(charged_and_held(&global, "share"), [0, 0]);
    assert_eq!(us.used_of_part("share"), Some(RESERVE), "that of another region stays until its window ends");
    assert_eq!(eu.charge("share", usize::try_from(RESERVE).expect("it is small")), RESERVE);
    // What the other region used since its last request is reported after the reset.
    wait_for("hits that another region tells", || {
        us.charge("share", 5);
        (charged_and_held(&global, "share")[0] > 0).then_some(())
    });
    // Without the global Redis nothing is reset.
    let used = eu.used_of_part("share");
    eu.set_links(Mode::Reset);
    reset(&eu, "share", 502);
    assert_eq!(eu.used_of_part("share"), used);
}

#[test]
fn reset_of_an_eventual_global_limit_leaves_no_lease_to_return() {
    let global = servers::options().start();
    let eu = Region::start("eu", "eu,us", &global, 2);
    let records = || {
        let keys: Vec<String> = eu.redis.query(&["KEYS", "tk1:*:leases"]);
        keys.len()
    };
    wait_for("a lease", || {
        eu.charge("lent_much", 100);
        (records() > 0).then_some(())
    });
    reset(&eu, "lent_much", 200);
    assert_eq!(records(), 0);
}
