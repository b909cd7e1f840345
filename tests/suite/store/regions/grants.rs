//! Global limits in processes of several regions, each with its Redis: demand, cuts, lost replies, takeover, resets.
//!
//! Limits of a day: their window does not end during a test.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::limit::algorithm::region::GrantCycle;
use tollkeeper::limit::algorithm::region_bucket::BucketCounts;
use tollkeeper::limit::algorithm::region_window::WindowCounts;

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
/// That of a token bucket.
const BUCKET_ALLOWANCE: u64 = 3;
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
                let names: Vec<_> = names.filter(|name| *name != "never_reported").collect();
                // No clock is known before the first exchange.
                let knows_clocks = clocks_are_known(&stats);
                (names == expected && knows_clocks).then_some(())
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

    /// State of the counter of a key; `None` if there is none.
    fn state(&self, key: &str) -> Option<WindowCounts> {
        let algorithm = if key == "sliding" { "sliding_window_counter" } else { "fixed_window" };
        let key = format!("tk1:{{shop|{key}=ann}}:region_{algorithm}:86400s");
        let words = words(&self.redis, &key);
        let &[_, window, granted, reserve_used, .., granted_total, _, _, _, open_request, _, epoch, _, _] = &*words
        else {
            return None;
        };
        let spent = WindowCounts { window, granted, granted_total, reserve_used, ..Default::default() };
        Some(WindowCounts { cycle: GrantCycle { open_request, epoch, ..Default::default() }, ..spent })
    }

    /// State of the bucket; `None` if there is none.
    fn bucket(&self) -> Option<BucketCounts> {
        let words = words(&self.redis, "tk1:{shop|bucket=ann}:region_token_bucket:86400s");
        let &[_, tokens, .., epoch, _, _] = &*words else { return None };
        Some(BucketCounts { tokens, cycle: GrantCycle { epoch, ..Default::default() }, ..Default::default() })
    }

    /// Hits that were admitted in the window of the state of a key, without the loss allowance.
    fn used(&self, key: &str) -> u64 {
        self.state(key).map_or(0, |state| state.granted_total - state.granted + state.reserve_used)
    }

    fn epoch(&self, key: &str) -> u64 {
        self.state(key).map_or(0, |state| state.cycle.epoch)
    }
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

fn clocks_are_known(stats: &Value) -> bool {
    stats["clocks"].as_array().expect("there are clocks").iter().all(|clock| clock["uncertainty_ms"].is_number())
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

/// Hits of a limit of a day that the global Redis has granted, less those returned.
fn granted(global: &Server, key: &str, algorithm: &str) -> u64 {
    words(global, &format!("tk1:{{shop|{key}=ann}}:global_{algorithm}:86400s")).get(1).copied().unwrap_or(0)
}

#[test]
fn two_algorithms_of_a_descriptor_count_apart() {
    let global = servers::options().start();
    let eu = Region::start("eu", "eu,us", &global, 1);
    assert_eq!(eu.charge("both", 3), 3);
    for algorithm in ["fixed_window", "sliding_window_counter"] {
        let words = words(&eu.redis, &format!("tk1:{{shop|both=ann}}:region_{algorithm}:86400s"));
        assert_eq!(words.get(3), Some(&3), "reserve used of {algorithm}: {words:?}");
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
fn regions_with_different_global_redis_divide_the_limit() {
    let [first, second] = [(); 2].map(|()| servers::options().start());
    let [eu, us] = [("eu", &first), ("us", &second)].map(|(name, global)| Region::start(name, "eu,us", global, 1));
    let admitted = exhaust(&[&eu, &us], "share");
    assert!(admitted.iter().all(|admitted| (450..=500).contains(admitted)), "{admitted:?}");
}

#[test]
fn total_over_regions_is_the_limit() {
    let global = servers::options().start();
    let [eu, us] = ["eu", "us"].map(|name| Region::start(name, "eu,us", &global, 2));
    let admitted: u64 = exhaust(&[&eu, &us], "share").iter().sum();
    assert!(admitted <= 1000, "{admitted}");
    assert!(admitted >= 900, "what is left is granted to each region that asks: {admitted}");
    assert!(granted(&global, "share", "fixed_window") <= 900, "the reserves are never granted");
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
fn cut_off_region_lends_no_hits() {
    let global = servers::options().start();
    let [eu, _us] = ["eu", "us"].map(|name| Region::start(name, "eu,us", &global, 2));
    eu.set_links(Mode::Reset);
    eu.wait_for_notices(&["cut_off"]);
    assert_eq!(eu.charge("lent_deny", 700), RESERVE);
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
        for (key, expected) in [("deny", RESERVE), ("sliding", RESERVE + ALLOWANCE), ("local", RESERVE + 500)] {
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
                       of a region: 50; when cut off, beyond its grants and reserve: {ALLOWANCE} per period (on_region_loss: share)"
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
    let mut total = eu.charge("share", 40);
    wait_for("a grant", || (granted(&global, "share", "fixed_window") > 0).then_some(()));
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
    assert!(totals["requested"].as_u64() < Some(60), "about one request a second: {totals}");
}

#[test]
fn lost_replies_waste_hits_and_never_double_them() {
    let global = servers::options().start();
    let eu = Region::start("eu", "eu,us", &global, 1);
    let count = |name: &str| stats(&eu.replicas[0].0)["grants"][name].as_u64().expect("it is a number");
    // The global Redis has the script from now on.
    wait_for("a grant", || {
        eu.charge("deny", 10);
        Some(()).filter(|()| count("granted_hits") > 0)
    });
    let (failed, of_other) = (count("failed"), count("granted_hits"));
    // The request arrives, and is answered when its process has given up.
    global.freeze();
    assert_eq!(eu.charge("share", 60), RESERVE);
    wait_for("a failed request", || Some(()).filter(|()| count("failed") > failed));
    global.thaw();
    let lost = wait_for("a lost grant", || Some(granted(&global, "share", "fixed_window")).filter(|lost| *lost > 0));
    assert_eq!(eu.state("share").map(|state| state.granted_total), Some(0), "nothing was granted to the region");
    eu.wait_for_notices(&[]);
    wait_for("another grant, and each reply used at most once", || {
        eu.charge("share", 10);
        let of_share = count("granted_hits") - of_other;
        Some(()).filter(|()| of_share > 0 && of_share + lost == granted(&global, "share", "fixed_window"))
    });
    let total = eu.state("share").map(|state| state.granted_total + lost);
    assert_eq!(total, Some(granted(&global, "share", "fixed_window")));
}

#[test]
fn another_replica_requests_the_grants_of_one_that_died() {
    let global = servers::options().start();
    let mut eu = Region::start("eu", "eu,us", &global, 2);
    let (first, link) = &eu.replicas[0];
    // It opens a request that reaches no server, and dies.
    link.set(Mode::Blackhole);
    while admits(first, "share") {}
    let open_request = || eu.state("share").map_or(0, |state| state.cycle.open_request);
    let open = open_request();
    assert!(open > 0 && granted(&global, "share", "fixed_window") == 0);
    eu.replicas[0].0.kill();
    let second = &eu.replicas[1].0;
    wait_for("a grant to the other replica", || admits(second, "share").then_some(()));
    assert!(eu.state("share").is_some_and(|state| state.cycle.open_request != open));
    assert!(granted(&global, "share", "fixed_window") > 0);
}

/// Hits that a region admitted, as its only process counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Admitted {
    from_grants: u64,
    from_reserves: u64,
    from_loss_allowances: u64,
}

impl Admitted {
    fn by(region: &Region) -> Self {
        let grants = stats(&region.replicas[0].0)["grants"].clone();
        let count = |name: &str| grants[name].as_u64().expect("it is a number");
        Self {
            from_grants: count("admitted_from_grants"),
            from_reserves: count("admitted_from_reserves"),
            from_loss_allowances: count("admitted_from_loss_allowances"),
        }
    }

    fn total(self) -> u64 {
        self.from_grants + self.from_reserves + self.from_loss_allowances
    }
}

#[test]
fn admitted_hits_are_counted_by_what_they_came_from() {
    for (key, allowance) in [("share", ALLOWANCE), ("sliding", ALLOWANCE), ("bucket", BUCKET_ALLOWANCE)] {
        let global = servers::options().start();
        let eu = Region::start("eu", "eu,us", &global, 1);
        let mut total = eu.charge(key, 5);
        let first = Admitted { from_grants: 0, from_reserves: 5, from_loss_allowances: 0 };
        assert_eq!(Admitted::by(&eu), first, "{key}");
        wait_for("granted hits", || {
            total += eu.charge(key, 10);
            Some(()).filter(|()| Admitted::by(&eu).from_grants > 0)
        });
        if let Some(state) = eu.state(key) {
            let Admitted { from_grants, from_reserves, .. } = Admitted::by(&eu);
            assert_eq!(
                (from_grants, from_reserves),
                (state.granted_total - state.granted, state.reserve_used),
                "{key}"
            );
        }
        eu.set_links(Mode::Reset);
        eu.wait_for_notices(&["cut_off"]);
        total += eu.charge(key, 1_000);
        let admitted = Admitted::by(&eu);
        assert_eq!((admitted.total(), admitted.from_loss_allowances), (total, allowance), "{key}: {admitted:?}");
    }
}

/// Resets the counters of a key in all regions, by a request to one.
fn reset(region: &Region, key: &str, expected: u16) {
    let request = http::post(region.replicas[0].0.debug_port(), "/reset", body(key));
    let response = request.header("authorization", format!("Bearer {TOKEN}")).send();
    assert_eq!(response.status, expected);
    // No permission is missing where the global Redis is.
    let text = response.text();
    assert!(expected == 200 || text.starts_with("global redis: ") && !text.contains("+unlink"), "{text}");
}

/// Charges until the bucket of a region has nothing left, and no grant is under way.
fn empty_bucket(region: &Region) {
    let requests_nothing = || region.bucket().is_some_and(|bucket| bucket.cycle.open_request == 0);
    wait_for("an empty bucket", || (region.charge("bucket", 20) == 0 && requests_nothing()).then_some(()));
}

#[test]
fn reset_fills_the_token_buckets_of_all_regions_and_of_one_that_was_cut_off_later() {
    let global = servers::options().start();
    let [eu, us, ap] = ["eu", "us", "ap"].map(|name| Region::start(name, "ap,eu,us", &global, 1));
    // Part of a bucket that a region has without any grant: a third of the reserve.
    let own = RESERVE * 2 / 3;
    let epoch = || words(&global, "tk1:{shop|bucket=ann}:global_token_bucket:86400s").get(4).copied().unwrap_or(0);
    [&eu, &us, &ap].into_iter().for_each(empty_bucket);
    // A counter follows a reset that is surely younger than itself.
    thread::sleep(Duration::from_secs(1));
    ap.set_links(Mode::Reset);
    ap.wait_for_notices(&["cut_off"]);
    // The loss allowance is all that is left.
    let lost = ap.charge("bucket", 100);
    assert!(lost <= BUCKET_ALLOWANCE, "{lost}");
    assert_eq!(epoch(), 0);
    reset(&eu, "bucket", 200);
    let first = epoch();
    assert!(first > 0);
    assert_eq!(eu.bucket(), None);
    let follows = |region: &Region| region.bucket().is_some_and(|bucket| bucket.cycle.epoch >= first);
    wait_for("the other region", || follows(&us).then_some(()));
    assert!(!follows(&ap) && ap.charge("bucket", 20) == 0, "it is cut off");
    for region in [&eu, &us] {
        let admitted = region.charge("bucket", usize::try_from(own).expect("it is small"));
        assert_eq!(admitted, own, "the region's own part is full again");
    }
    ap.set_links(Mode::Pass);
    wait_for("the region that was cut off", || follows(&ap).then_some(()));
    // The reset may arrive before the answer that ends the cut.
    ap.wait_for_notices(&[]);
    assert_eq!(ap.charge("bucket", 20), 20);
    assert_eq!(epoch(), first, "nothing repeats the reset");
    // Without the global Redis nothing is reset.
    eu.set_links(Mode::Reset);
    reset(&eu, "bucket", 502);
    assert!(eu.bucket().is_some() && epoch() == first);
}

#[test]
fn reset_reaches_all_regions_and_one_that_was_cut_off_later() {
    let global = servers::options().start();
    let [eu, us, ap] = ["eu", "us", "ap"].map(|name| Region::start(name, "ap,eu,us", &global, 2));
    for region in [&eu, &us, &ap] {
        assert!(region.charge("share", 40) > 0);
    }
    wait_for("a grant", || (granted(&global, "share", "fixed_window") > 0).then_some(()));
    // A counter follows a reset that is surely younger than itself.
    thread::sleep(Duration::from_secs(1));
    let first_epochs = [&us, &ap].map(|region| region.epoch("share"));
    ap.set_links(Mode::Reset);
    let is_reset = |region: &Region, before: u64| region.used("share") == 0 && region.epoch("share") > before;
    reset(&eu, "share", 200);
    assert_eq!(granted(&global, "share", "fixed_window"), 0);
    assert_eq!(eu.state("share"), None);
    wait_for("the other region", || is_reset(&us, first_epochs[0]).then_some(()));
    assert!(!is_reset(&ap, first_epochs[1]), "it is cut off");
    let epoch = us.epoch("share");
    // Neither replica repeats the reset.
    let used = us.charge("share", 10);
    thread::sleep(Duration::from_millis(2_500));
    assert_eq!((us.used("share"), us.epoch("share")), (used, epoch));
    ap.set_links(Mode::Pass);
    wait_for("the region that was cut off", || is_reset(&ap, first_epochs[1]).then_some(()));
    assert_eq!(ap.epoch("share"), epoch);
    // Without the global Redis nothing is reset: the hits of other regions would stay.
    let used = eu.charge("share", 10);
    eu.set_links(Mode::Reset);
    reset(&eu, "share", 502);
    assert_eq!(eu.used("share"), used);
}
