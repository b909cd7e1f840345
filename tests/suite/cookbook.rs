//! Recipes of `docs/cookbook.md`, each through a real Envoy.
//!
//! The test reads the page: what Envoy sends, the rules, other files and the commands are those that a reader copies,
//! so that a page that is wrong fails. Limits are used up within a period much longer than a test, by rules without a
//! window boundary.

mod page;

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollkeeper::base::clock::Time;

use self::page::{Recipe, recipes};
use crate::kit::envoy::Envoy;
use crate::kit::http::Request;
use crate::kit::test_service::{TestRequest, TestService};
use crate::kit::tollkeeper::{PROGRAM, Tollkeeper, inherited_env, linked_as, without_rules};

/// 2026-01-01 00:00:00 UTC.
const NEW_YEAR: Time = Time::from_secs(1_767_225_600);

/// Envoy's bootstrap, without what the recipes show.
const TEMPLATE: &str = "tests/suite/cookbook/envoy.yaml";

/// Headings of the page; each has a test below.
const RECIPES: [&str; 8] = [
    "Premium users get more",
    "A limit for one path and method",
    "So many a day, and bursts",
    "Exceptions from a limit",
    "The office network is exempt",
    "Calls to a third party, smoothed",
    "All versions of a path, and everyone but a list",
    "Entries in any order",
];

/// A recipe's tollkeeper behind a recipe's Envoy.
struct Served {
    envoy: Envoy,
    tollkeeper: Tollkeeper,
    _files: TempDir,
}

impl Served {
    fn start(recipe: &Recipe) -> Self {
        let files = tempfile::tempdir().unwrap();
        recipe.write_files(files.path());
        let setup = without_rules().arg("--config").arg(files.path().join(format!("{}.yaml", recipe.domain())));
        let tollkeeper = setup.start();
        let envoy =
            Envoy::start_file(TEMPLATE, &[tollkeeper.grpc_port()], |template| recipe.bootstrap(&template));
        Self { envoy, tollkeeper, _files: files }
    }

    /// Envoy fails open: without this check a failed call appears as a request that passed.
    fn assert_no_call_failed(&self) {
        let failed = self.envoy.stat("cluster.upstream.ratelimit.error");
        assert_eq!(failed, 0, "calls failed; tollkeeper said:\n{}", self.tollkeeper.stderr());
    }
}

/// Serves the recipe under that heading.
fn serve(heading: &str) -> Served {
    Served::start(&Recipe::find(heading))
}

/// Sends `limit` requests that must pass and one that must be rejected.
fn assert_limit(limit: usize, request: &Request) {
    assert_unlimited(limit, request);
    assert_eq!(request.send().status, 429, "request {} of {request:?}", limit + 1);
}

/// Sends `count` requests that must pass.
fn assert_unlimited(count: usize, request: &Request) {
    for number in 1..=count {
        let response = request.send();
        assert_eq!(response.status, 200, "request {number} of {request:?}: {response:?}");
    }
}

#[test]
fn page_has_every_part_of_every_recipe() {
    let recipes = recipes();
    let headings: Vec<_> = recipes.iter().map(|recipe| recipe.heading.as_str()).collect();
    assert_eq!(headings, RECIPES);
    for recipe in &recipes {
        assert!(recipe.has_trap, "{} names no trap", recipe.heading);
        let explained = recipe.commands.iter().find(|command| command.text.starts_with("tollkeeper explain --config "));
        assert!(explained.is_some_and(|command| !command.output.is_empty()), "{} explains nothing", recipe.heading);
    }
}

/// Each line of the page is the line of the output, or its beginning, in the same order.
#[test]
fn explain_prints_what_the_page_shows() {
    let mut wrong = Vec::new();
    for recipe in recipes() {
        let files = tempfile::tempdir().unwrap();
        recipe.write_files(files.path());
        linked_as(files.path(), "tollkeeper");
        let search = format!("{}:{}", files.path().display(), std::env::var("PATH").unwrap());
        for command in recipe.commands.iter().filter(|command| command.text.starts_with("tollkeeper explain ")) {
            let mut shell = Command::new("bash");
            shell.args(["-c", &command.text]).current_dir(files.path());
            let output = shell.env_clear().envs(inherited_env()).env("PATH", &search).output().unwrap();
            assert!(output.status.success(), "{}: {output:?}", command.text);
            let output = String::from_utf8(output.stdout).unwrap();
            let mut printed = output.lines().map(str::trim);
            for line in command.output.iter().map(|line| line.trim()) {
                if !printed.by_ref().any(|printed| printed.starts_with(line)) {
                    wrong.push(format!("{}: {line}\nnot in, or not in this order:\n{output}", recipe.heading));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn premium_users_have_more() {
    let served = serve(RECIPES[0]);
    let request = |plan: &str, user: &str| served.envoy.get("/").header("x-plan", plan).header("x-user", user);
    assert_limit(20, &request("premium", "ann"));
    assert_limit(5, &request("free", "bob"));
    assert_limit(5, &request("trial", "ann"));
    assert_unlimited(1, &request("premium", "eve"));
    // The trap: without a header there is no descriptor, and so no limit.
    assert_unlimited(6, &served.envoy.get("/").header("x-user", "bob"));
    served.assert_no_call_failed();
}

#[test]
fn path_and_method_have_a_limit_whatever_the_query() {
    let served = serve(RECIPES[1]);
    let post = |path: &str| served.envoy.get(path).method("POST").header("content-length", "0");
    for path in ["/orders", "/orders?page=1", "/orders?page=2", "/orders?", "/orders?a=b&c"] {
        assert_unlimited(1, &post(path));
    }
    assert_limit(0, &post("/orders"));
    assert_limit(0, &post("/orders?page=3"));
    assert_unlimited(6, &served.envoy.get("/orders"));
    assert_unlimited(6, &post("/orders/7"));
    assert_unlimited(1, &post("/orders").from(2));
    served.assert_no_call_failed();
}

#[test]
fn trap_of_a_query_that_changes_the_path() {
    let mut recipe = Recipe::find(RECIPES[1]);
    recipe.replace_in_rules(r"match: { regex: '/orders(\?.*)?' }", "value: /orders");
    recipe.replace_in_rules("share_threshold: true", "");
    let served = Served::start(&recipe);
    let post = |path: &str| served.envoy.get(path).method("POST").header("content-length", "0");
    assert_limit(5, &post("/orders"));
    assert_unlimited(6, &post("/orders?page=1"));

    let mut recipe = Recipe::find(RECIPES[1]);
    recipe.replace_in_rules("share_threshold: true", "");
    let served = Served::start(&recipe);
    let post = |path: &str| served.envoy.get(path).method("POST").header("content-length", "0");
    assert_limit(5, &post("/orders?page=1"));
    assert_limit(5, &post("/orders?page=2"));
    served.assert_no_call_failed();
}

#[test]
fn key_has_bursts_and_a_day() {
    let served = serve(RECIPES[2]);
    let request = |key: &str| served.envoy.get("/").header("x-api-key", key);
    assert_limit(20, &request("k-1"));
    assert_unlimited(1, &request("k-2"));
    served.assert_no_call_failed();
}

/// Number of requests that pass in the first day, one every 30 s.
fn passed_in_a_day(recipe: &Recipe) -> usize {
    let service = TestService::new([("LOG_LEVEL", "warn")], NEW_YEAR);
    service.load([("rules.yaml", recipe.rules.as_str())]);
    let request = TestRequest::new(recipe.domain()).descriptor(&[("api_key", "k-1")]);
    let passes = |_: &usize| {
        let is_over = service.decide(&request).unwrap().over_limit();
        service.advance_us(30_000_000);
        !is_over
    };
    (0..2880).filter(passes).count()
}

#[test]
fn day_admits_no_more_than_its_limit_unless_there_is_only_a_bucket() {
    let mut recipe = Recipe::find(RECIPES[2]);
    assert_eq!(passed_in_a_day(&recipe), 1000);
    let window = recipe.rules.lines().find(|line| line.contains("never more")).expect("it is there").to_owned();
    recipe.replace_in_rules(&window, "");
    let passed = passed_in_a_day(&recipe);
    assert!((1019..=1020).contains(&passed), "{passed}");
}

#[test]
fn listed_keys_are_exempt() {
    let served = serve(RECIPES[3]);
    let request = |key: &str| served.envoy.get("/").header("x-api-key", key);
    for key in ["backup", "billing", "crawler", "monitor", "reports"] {
        assert_unlimited(6, &request(key));
    }
    assert_limit(5, &request("k-1"));
    assert_limit(5, &request("backup2"));
    served.assert_no_call_failed();
}

#[test]
fn office_network_is_exempt_behind_a_proxy() {
    let served = serve(RECIPES[4]);
    let request = |forwarded: &str| served.envoy.get("/").header("x-forwarded-for", forwarded);
    for office in ["10.1.2.3", "2001:db8::7", "192.0.2.9, 10.1.2.3"] {
        assert_unlimited(6, &request(office));
    }
    assert_limit(5, &request("192.0.2.7"));
    // A client writes an office's address; the load balancer appends the true one.
    assert_limit(0, &request("10.1.2.3, 192.0.2.7"));
    assert_limit(5, &request("11.0.0.1"));
    served.assert_no_call_failed();
}

#[test]
fn traps_of_an_office_network() {
    let mut recipe = Recipe::find(RECIPES[4]);
    recipe.replace_in_rules(r#"match: { cidr: [10.0.0.0/8, "2001:db8::/32"] }"#, "value: 10.0.0.0/8");
    let served = Served::start(&recipe);
    assert_limit(5, &served.envoy.get("/").header("x-forwarded-for", "10.1.2.3"));

    let mut recipe = Recipe::find(RECIPES[4]);
    assert!(recipe.envoy.remove("xff_num_trusted_hops").is_some());
    let served = Served::start(&recipe);
    let request = |forwarded: &str| served.envoy.get("/").header("x-forwarded-for", forwarded);
    assert_limit(5, &request("10.1.2.3"));
    assert_limit(0, &request("192.0.2.7"));

    let mut recipe = Recipe::find(RECIPES[4]);
    recipe.envoy.insert("xff_num_trusted_hops".to_owned(), 2.into());
    let served = Served::start(&recipe);
    let request = |forwarded: &str| served.envoy.get("/").header("x-forwarded-for", forwarded);
    assert_unlimited(6, &request("10.1.2.3, 192.0.2.7"));
    served.assert_no_call_failed();
}

/// Responses to `count` requests at once: the time when each that passed came, in order, and the number of others.
fn send_at_once(served: &Served, count: usize) -> (Vec<Duration>, usize) {
    let began = Instant::now();
    let burst: Vec<_> = (0..count)
        .map(|_| {
            let request = served.envoy.get("/v1/charges");
            thread::spawn(move || (request.send().status, began.elapsed()))
        })
        .collect();
    let answers: Vec<_> = burst.into_iter().map(|one| one.join().unwrap()).collect();
    assert!(answers.iter().all(|(status, _)| [200, 429].contains(status)), "{answers:?}");
    let mut passed: Vec<_> = answers.iter().filter(|(status, _)| *status == 200).map(|(_, after)| *after).collect();
    passed.sort();
    let rejected = count - passed.len();
    (passed, rejected)
}

#[test]
fn calls_to_a_third_party_are_smoothed() {
    let served = serve(RECIPES[5]);
    let (passed, rejected) = send_at_once(&served, 40);
    assert!(passed.len() >= 9 && rejected > 0, "{} passed", passed.len());
    // The k-th call leaves at least k x 100 ms after the first came; 5 ms allow for clock corrections.
    for (after, place) in passed.iter().zip(0..) {
        assert!(*after + Duration::from_millis(5) >= Duration::from_millis(100) * place, "{place}: {after:?}");
    }
    served.assert_no_call_failed();
}

#[test]
fn trap_of_a_caller_that_does_not_wait() {
    let recipe = Recipe::find(RECIPES[5]);
    let service = TestService::new([("LOG_LEVEL", "warn")], NEW_YEAR);
    service.load([("rules.yaml", recipe.rules.as_str())]);
    let request = TestRequest::new(recipe.domain()).descriptor(&[("api", "payments")]);
    let passed = |timeout_ms| {
        let decide = |_: &usize| !service.decide_within(&request, Duration::from_millis(timeout_ms)).unwrap().over_limit();
        (0..20).filter(decide).count()
    };
    assert_eq!(passed(20), 1, "Envoy's default timeout");
    assert_eq!(passed(2000), 8, "the rest of the queue");
}

#[test]
fn versions_of_a_path_share_a_limit_and_robots_are_exempt() {
    let served = serve(RECIPES[6]);
    let request = |client: &str, path: &str| served.envoy.get(path).header("x-client", client);
    for path in ["/v1/login", "/v2/login", "/v2/login?next=/", "/v10/login", "/v3/login"] {
        assert_unlimited(1, &request("ann", path));
    }
    assert_limit(0, &request("ann", "/v4/login"));
    assert_unlimited(6, &request("ann", "/v4/logout"));
    assert_unlimited(6, &request("robot-1", "/v1/login"));
    assert_unlimited(6, &request("robot-2", "/v1/login"));
    assert_limit(5, &request("robot-3", "/v1/login"));
    served.assert_no_call_failed();
}

#[test]
fn entries_come_in_any_order() {
    let recipe = Recipe::find(RECIPES[7]);
    let mut turned = Recipe::find(RECIPES[7]);
    let actions = turned.envoy["rate_limits"][0]["actions"].as_array_mut().unwrap();
    actions.reverse();
    for recipe in [recipe, turned] {
        let served = Served::start(&recipe);
        let request = |user: &str, path: &str| served.envoy.get(path).header("x-user", user);
        assert_limit(1, &request("alice", "/upload"));
        assert_limit(10, &request("alice", "/home"));
        assert_limit(10, &request("bob", "/upload"));
        served.assert_no_call_failed();
    }
    let mut trap = Recipe::find(RECIPES[7]);
    trap.replace_in_rules("matching: { order: any, backtrack: true }", "matching: { order: any }");
    let served = Served::start(&trap);
    // Rules are sorted by key: `path` is the outer level here, and /upload has no rule for bob.
    assert_unlimited(11, &served.envoy.get("/upload").header("x-user", "bob"));
}
