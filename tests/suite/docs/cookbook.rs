//! Recipes of `docs/cookbook.md`, each through a real Envoy.
//!
//! The test reads the page: what Envoy sends, the rules, other files and the commands are those that a reader copies,
//! so that a page that is wrong fails. Limits are used up within a period much longer than a test, by rules without a
//! window boundary.

mod agents;
pub(crate) mod page;
mod ways;

use std::fs;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::json;
use tempfile::TempDir;
use tollkeeper::base::clock::Time;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::yaml::DocumentSelection;

use self::page::{Recipe, recipes};
use crate::serve::envoy::concurrency::{OpenUpstream, open};
use kit::envoy::Envoy;
use kit::http::{self, Request};
use kit::redis;
use kit::test_service::{TestRequest, TestService};
use kit::tollkeeper::{Setup, Tollkeeper, inherited_env, linked_as, program_path, without_rules};
use kit::{read, repository, wait_for};

/// 2026-01-01 00:00:00 UTC.
const NEW_YEAR: Time = Time::from_secs(1_767_225_600);

/// Envoy's bootstrap, without what the recipes show.
const TEMPLATE: &str = "tests/suite/docs/cookbook/envoy.yaml";

/// Headings of the page; each recipe has a test below, which names its number.
const RECIPES: [&str; 34] = [
    "Premium users get more",
    "A limit for one path and method",
    "So many a day, and bursts",
    "Login: few tries, then a ban",
    "Exceptions from a limit",
    "The office network is exempt",
    "Block a key now",
    "A monthly quota, with a warning at 80 percent",
    "Calls to a third party, smoothed",
    "A plan for each customer",
    "All versions of a path, and everyone but a list",
    "A lower limit during business hours",
    "Entries in any order",
    "Tokens of a language model",
    "One limit over several regions",
    "See first, reject later",
    "Streams at once: exports, WebSockets",
    "A hot limit without calls",
    "A number in a token",
    "Calls that cost more",
    "A slower backend instead of a 429",
    "Failed logins, until one succeeds",
    "Bytes uploaded",
    "Callers with a certificate",
    "A rejection that clients understand",
    "Tools of an MCP server",
    "Tokens without a gateway for models",
    "Tokens of output that cost more",
    "Bytes in and out as a monthly quota",
    "A usage page for each tenant",
    "A budget in micro-dollars, told at 80 percent",
    "A plan, then credits",
    "Some paths are refused without an answer",
    "A cost in a request header",
];

/// A recipe's tollkeeper behind a recipe's Envoy.
struct Served {
    envoy: Envoy,
    tollkeeper: Tollkeeper,
    files: TempDir,
    /// Calls that are to fail.
    failing_calls: u64,
}

impl Served {
    fn start(recipe: &Recipe) -> Self {
        Self::start_with(recipe, |setup| setup)
    }

    /// Same as [`Self::start`], with changed settings.
    fn start_with(recipe: &Recipe, change: impl FnOnce(Setup) -> Setup) -> Self {
        Self::start_both_with(recipe, change, |bootstrap| bootstrap)
    }

    /// Same as [`Self::start`], with a changed bootstrap.
    fn start_changed(recipe: &Recipe, change: impl FnOnce(String) -> String) -> Self {
        Self::start_both_with(recipe, |setup| setup, change)
    }

    fn start_both_with(
        recipe: &Recipe,
        change: impl FnOnce(Setup) -> Setup,
        change_bootstrap: impl FnOnce(String) -> String,
    ) -> Self {
        let files = tempfile::tempdir().unwrap();
        recipe.write_files(files.path());
        let setup = without_rules().arg("--config").arg(files.path().join(format!("{}.yaml", recipe.domain())));
        let tollkeeper = change(setup).start();
        let bootstrap = |template: String| change_bootstrap(recipe.bootstrap(&template));
        let envoy = Envoy::start_file(TEMPLATE, &[tollkeeper.grpc_port()], bootstrap);
        Self { envoy, tollkeeper, files, failing_calls: 0 }
    }

    /// Serves a way of the recipe of that number in front of an upstream whose answers stay open.
    fn start_before(number: usize, way: usize, upstream: &OpenUpstream) -> Self {
        Self::start_recipe_before(&Recipe::find_way(number, way), upstream)
    }

    /// Same as [`Self::start_before`], for a recipe that was changed.
    fn start_recipe_before(recipe: &Recipe, upstream: &OpenUpstream) -> Self {
        let files = tempfile::tempdir().unwrap();
        recipe.write_files(files.path());
        let rules = files.path().join(format!("{}.yaml", recipe.domain()));
        let tollkeeper = without_rules().arg("--config").arg(rules).start();
        let envoy = Envoy::start_file(TEMPLATE, &[tollkeeper.grpc_port()], |template| {
            upstream.replace_in(&recipe.bootstrap(&template))
        });
        Self { envoy, tollkeeper, files, failing_calls: 0 }
    }
}

/// Envoy fails open: without this check a failed call appears as a request that passed.
impl Drop for Served {
    fn drop(&mut self) {
        if !thread::panicking() {
            let failed = self.envoy.stat("cluster.upstream.ratelimit.error");
            assert_eq!(failed, self.failing_calls, "calls failed; tollkeeper said:\n{}", self.tollkeeper.stderr());
        }
    }
}

/// Serves the recipe of that number.
fn serve(number: usize) -> Served {
    Served::start(&Recipe::find(number))
}

/// Sends `limit` requests that must pass and one that must be rejected.
#[track_caller]
fn assert_limit(limit: usize, request: &Request) {
    assert_unlimited(limit, request);
    assert_eq!(request.send().status, 429, "request {}", limit + 1);
}

/// Sends `count` requests that must pass.
#[track_caller]
fn assert_unlimited(count: usize, request: &Request) {
    for number in 1..=count {
        let response = request.send();
        assert_eq!(response.status, 200, "request {number}: {response:?}");
    }
}

#[test]
fn page_has_every_part_of_every_recipe() {
    let recipes = recipes();
    let first_ways = recipes.iter().filter(|recipe| recipe.way == 1);
    let headings: Vec<_> = first_ways.map(|recipe| (recipe.number, recipe.heading.as_str())).collect();
    assert_eq!(headings, (1..).zip(RECIPES).collect::<Vec<_>>());
    for recipe in &recipes {
        assert!(recipe.has_trap, "{} names no trap", recipe.heading);
        let explained = recipe.commands.iter().find(|command| command.text.starts_with("tollkeeper explain --config "));
        assert!(explained.is_some_and(|command| !command.output.is_empty()), "{} explains nothing", recipe.heading);
    }
}

/// Each line of the page is the line of the output, or its beginning, in the same order.
#[test]
fn check_finds_nothing_wrong_with_any_recipe() {
    let template = read(&repository(TEMPLATE));
    for recipe in recipes() {
        let files = tempfile::tempdir().unwrap();
        recipe.write_files(files.path());
        fs::write(files.path().join("envoy.conf"), recipe.bootstrap(&template)).unwrap();
        let rules = format!("{}.yaml", recipe.domain());
        let mut check = Command::new(program_path());
        check.args(["check", "--envoy", "envoy.conf", &rules]).current_dir(files.path());
        let output = check.env_clear().envs(inherited_env()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // Recipes name the header that identifies the caller, so that check tells of requests without it.
        let mut of_envoy = text.lines().filter(|line| line.starts_with("envoy.conf:"));
        let is_good = of_envoy.all(|line| line.ends_with("[descriptor-may-be-dropped]"));
        let is_good = is_good && text.contains("\n1 Envoy file, 0 errors, ");
        assert!(is_good, "{}:\n{text}", recipe.heading);
    }
}

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
            if !output.status.success() {
                wrong.push(format!("{}: {output:?}", command.text));
                continue;
            }
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
    let served = serve(1);
    let request = |plan: &str, user: &str| served.envoy.get("/").header("x-plan", plan).header("x-user", user);
    assert_limit(20, &request("premium", "ann"));
    assert_limit(5, &request("free", "bob"));
    assert_limit(0, &request("trial", "bob"));
    assert_limit(5, &request("trial", "ann"));
    assert_unlimited(1, &request("premium", "eve"));
    // Without the headers: no plan is another one, and callers without a name share a limit.
    assert_limit(0, &served.envoy.get("/").header("x-user", "bob"));
    assert_limit(5, &served.envoy.get("/"));
    assert_limit(0, &request("free", ""));
}

#[test]
fn path_and_method_have_a_limit_whatever_the_query() {
    let served = serve(2);
    let post = |path: &str| served.envoy.get(path).method("POST").header("content-length", "0");
    for path in ["/orders", "/orders?page=1", "/orders?page=2", "/orders?", "/orders?a=b&c"] {
        assert_unlimited(1, &post(path));
    }
    assert_limit(0, &post("/orders"));
    assert_limit(0, &post("/orders?page=3"));
    assert_unlimited(6, &served.envoy.get("/orders"));
    assert_unlimited(6, &post("/orders/7"));
    assert_unlimited(1, &post("/orders").from(2));
}

#[test]
fn trap_of_a_query_that_changes_the_path() {
    let mut recipe = Recipe::find(2);
    recipe.replace_in_rules(r"match: { regex: '/orders(\?.*)?' }", "value: /orders");
    recipe.replace_in_rules("share_threshold: true", "");
    let served = Served::start(&recipe);
    let post = |path: &str| served.envoy.get(path).method("POST").header("content-length", "0");
    assert_limit(5, &post("/orders"));
    assert_unlimited(6, &post("/orders?page=1"));

    let mut recipe = Recipe::find(2);
    recipe.replace_in_rules("share_threshold: true", "");
    let served = Served::start(&recipe);
    let post = |path: &str| served.envoy.get(path).method("POST").header("content-length", "0");
    assert_limit(5, &post("/orders?page=1"));
    assert_limit(5, &post("/orders?page=2"));
}

#[test]
fn key_has_bursts_and_a_day() {
    let served = serve(3);
    let request = |key: &str| served.envoy.get("/").header("x-api-key", key);
    assert_limit(20, &request("k-1"));
    assert_unlimited(1, &request("k-2"));
}

/// A service with the rules of a recipe and a manual clock.
fn simulate(recipe: &Recipe, start: Time) -> TestService {
    let service = TestService::new([("LOG_LEVEL", "warn")], start);
    service.load([("rules.yaml", recipe.rules.as_str())]);
    service
}

/// Number of requests that pass in the first day, one every 30 s.
fn passed_in_a_day(recipe: &Recipe) -> usize {
    let service = simulate(recipe, NEW_YEAR);
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
    let mut recipe = Recipe::find(3);
    assert_eq!(passed_in_a_day(&recipe), 1000);
    let window = recipe.rules.lines().find(|line| line.contains("never more")).expect("it is there").to_owned();
    recipe.replace_in_rules(&window, "");
    let passed = passed_in_a_day(&recipe);
    assert!((1019..=1020).contains(&passed), "{passed}");
}

#[test]
fn login_is_banned_after_too_many_tries() {
    let served = serve(4);
    let request = |account: &str, last| {
        served.envoy.get("/login").method("POST").header("content-length", "0").header("x-account", account).from(last)
    };
    assert_unlimited(5, &request("ann", 1));
    for _ in 0..2 {
        let rejection = request("ann", 1).send();
        assert_eq!(rejection.status, 429);
        assert!((545..=600).contains(&rejection.number("retry-after")), "{rejection:?}");
    }
    assert_unlimited(1, &request("ann", 2));
    assert_unlimited(1, &request("bob", 1));
}

#[test]
fn ban_ends_after_ten_minutes_whatever_is_tried() {
    let recipe = Recipe::find(4);
    let service = simulate(&recipe, NEW_YEAR);
    let request = TestRequest::new(recipe.domain()).descriptor(&[("account", "ann"), ("remote_address", "192.0.2.7")]);
    let passed = |count| (0..count).filter(|_: &usize| !service.decide(&request).unwrap().over_limit()).count();
    assert_eq!(passed(6), 5);
    for _ in 0..599 {
        service.advance_us(1_000_000);
        assert_eq!(passed(1), 0);
    }
    service.advance_us(1_000_000);
    assert_eq!(passed(6), 5);
}

#[test]
fn listed_keys_are_exempt() {
    let served = serve(5);
    let request = |key: &str| served.envoy.get("/").header("x-api-key", key);
    for key in ["backup", "billing", "crawler", "monitor", "reports"] {
        assert_unlimited(6, &request(key));
    }
    assert_limit(5, &request("k-1"));
    assert_limit(5, &request("backup2"));
}

#[test]
fn trap_of_an_exception_from_one_descriptor() {
    let mut recipe = Recipe::find(5);
    let addresses = json!({"actions": [{"remote_address": {}}]});
    recipe.envoy["rate_limits"].as_array_mut().unwrap().push(addresses);
    let limit = "{ name: per-address, unit: minute, requests_per_unit: 3, algorithm: sliding_window_log }";
    recipe.rules += &format!("  - {{ key: remote_address, rate_limit: {limit} }}\n");
    let served = Served::start(&recipe);
    assert_limit(3, &served.envoy.get("/").header("x-api-key", "crawler"));

    let replaces = "reports] }, rate_limit: { unlimited: true, replaces: [{ name: per-address }] }";
    recipe.replace_in_rules("reports] }", replaces);
    let served = Served::start(&recipe);
    assert_unlimited(6, &served.envoy.get("/").header("x-api-key", "crawler"));
    assert_limit(3, &served.envoy.get("/").header("x-api-key", "k-1"));
}

#[test]
fn office_network_is_exempt_behind_a_proxy() {
    let served = serve(6);
    let request = |forwarded: &str| served.envoy.get("/").header("x-forwarded-for", forwarded);
    for office in ["10.1.2.3", "2001:db8::7", "192.0.2.9, 10.1.2.3"] {
        assert_unlimited(6, &request(office));
    }
    assert_limit(5, &request("192.0.2.7"));
    // A client writes an office's address; the load balancer appends the true one.
    assert_limit(0, &request("10.1.2.3, 192.0.2.7"));
    assert_limit(5, &request("11.0.0.1"));
}

#[test]
fn traps_of_an_office_network() {
    let mut recipe = Recipe::find(6);
    recipe.replace_in_rules(r#"match: { cidr: [10.0.0.0/8, "2001:db8::/32"] }"#, "value: 10.0.0.0/8");
    let served = Served::start(&recipe);
    assert_limit(5, &served.envoy.get("/").header("x-forwarded-for", "10.1.2.3"));

    let mut recipe = Recipe::find(6);
    assert!(recipe.envoy.remove("xff_num_trusted_hops").is_some());
    let served = Served::start(&recipe);
    let request = |forwarded: &str| served.envoy.get("/").header("x-forwarded-for", forwarded);
    assert_limit(5, &request("10.1.2.3"));
    assert_limit(0, &request("192.0.2.7"));

    let mut recipe = Recipe::find(6);
    recipe.envoy.insert("xff_num_trusted_hops".to_owned(), 2.into());
    let served = Served::start(&recipe);
    let request = |forwarded: &str| served.envoy.get("/").header("x-forwarded-for", forwarded);
    assert_unlimited(6, &request("10.1.2.3, 192.0.2.7"));
}

/// Runs a command of the page that calls a server, at the server's own address.
fn run_at(served: &Served, recipe: &Recipe, name: &str, token: &str) -> Output {
    let command = recipe.commands.iter().find(|command| command.text.starts_with(&format!("tollkeeper {name} ")));
    let text = &command.unwrap_or_else(|| panic!("the page has no {name}")).text;
    let mut program = Command::new(program_path());
    program.args(text.split(' ').skip(1)).arg("--addr");
    program.arg(format!("127.0.0.1:{}", served.tollkeeper.debug_port()));
    program.env_clear().envs(inherited_env()).env("TOLLKEEPER_ADMIN_TOKEN", token).output().unwrap()
}

#[test]
fn key_is_blocked_now_and_for_good() {
    let recipe = Recipe::find(7);
    let token = "correct horse battery staple";
    let served = Served::start_with(&recipe, |setup| setup.env("TOLLKEEPER_ADMIN_TOKEN", token));
    let request = |key: &str| served.envoy.get("/").header("x-api-key", key);
    let rejection = request("k-666").send();
    assert_eq!((rejection.status, rejection.text().as_str()), (429, "this key is blocked"));
    assert_unlimited(1, &request("k-667"));
    assert!(run_at(&served, &recipe, "block", token).status.success());
    let rejection = request("k-667").send();
    assert_eq!(rejection.status, 429);
    assert!((3540..=3600).contains(&rejection.number("retry-after")), "{rejection:?}");

    assert_unlimited(1, &request("k-668"));
    let (_, text) = &recipe.files[0];
    fs::write(served.files.path().join("blocked.txt"), format!("{text}k-668\n")).unwrap();
    wait_for("the new line of the file", || (request("k-668").send().status == 429).then_some(()));
    assert_limit(0, &request("k-666"));
}

#[test]
fn trap_of_an_exact_rule_before_the_list() {
    let mut recipe = Recipe::find(7);
    let exact = "descriptors:\n  - { key: api_key, value: k-666, rate_limit: { unit: day, requests_per_unit: 9 } }\n";
    recipe.replace_in_rules("descriptors:\n", exact);
    let token = "correct horse battery staple";
    let served = Served::start_with(&recipe, |setup| setup.env("TOLLKEEPER_ADMIN_TOKEN", token));
    assert_unlimited(1, &served.envoy.get("/").header("x-api-key", "k-666"));

    recipe.replace_in_rules("value: k-666", "value: k-667");
    let served = Served::start_with(&recipe, |setup| setup.env("TOLLKEEPER_ADMIN_TOKEN", token));
    assert!(run_at(&served, &recipe, "block", token).status.success());
    assert_limit(0, &served.envoy.get("/").header("x-api-key", "k-667"));
}

/// Rule and key of the rejected keys, with the hits that were rejected at least.
fn top(served: &Served, query: &str) -> Vec<(String, u64)> {
    let page = http::get(served.tollkeeper.debug_port(), &format!("/top{query}")).send().text();
    let page: serde_json::Value = serde_json::from_str(&page).unwrap_or_else(|_| panic!("{page}"));
    let keys = page["overall"].as_array().unwrap_or_else(|| panic!("{page}"));
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_else(|| panic!("{page}")).to_owned();
    let keys = keys.iter().map(|key| {
        let name = format!("{} {}", text(&key["rule"]), text(&key["key"]));
        (name, key["rejected_at_least"].as_u64().unwrap_or_else(|| panic!("{page}")))
    });
    keys.collect()
}

#[test]
fn customer_has_a_monthly_quota_and_a_warning() {
    let served = serve(8);
    let request = served.envoy.get("/reports").header("x-customer", "acme");
    assert_unlimited(50, &request);
    // Hits 41 to 50 are above 80 %.
    assert_eq!(
        top(&served, "?rule=exports.customer.warning"),
        [("exports.customer.warning customer=acme".to_owned(), 10)]
    );
    let rejection = request.send();
    assert_eq!(rejection.status, 429);
    // The 31 days of October are an hour longer in Berlin.
    assert!((1..=31 * 86_400 + 3600).contains(&rejection.number("retry-after")), "{rejection:?}");
    assert_unlimited(1, &served.envoy.get("/reports").header("x-customer", "globex"));
}

#[test]
fn month_begins_at_midnight_in_berlin() {
    // 2026-03-31 21:59:00 UTC: in Berlin, where summer time began two days ago, it is a minute before April.
    let before = Time::from_secs(1_774_994_340);
    let passed_before_and_after = |recipe: &Recipe| {
        let service = simulate(recipe, before);
        let request = TestRequest::new(recipe.domain()).descriptor(&[("customer", "acme")]);
        [0, 59_999_999, 1].map(|later_us| {
            service.advance_us(later_us);
            (0..60).filter(|_| !service.decide(&request).unwrap().over_limit()).count()
        })
    };
    let mut recipe = Recipe::find(8);
    assert_eq!(passed_before_and_after(&recipe), [50, 0, 50]);
    recipe.replace_in_rules(", window: { timezone: Europe/Berlin }", "");
    assert_eq!(passed_before_and_after(&recipe), [50, 0, 0]);
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
    let served = serve(9);
    let (passed, rejected) = send_at_once(&served, 40);
    assert!(passed.len() >= 9 && rejected > 0, "{} passed", passed.len());
    // The k-th call leaves at least k x 100 ms after the first came; 5 ms allow for clock corrections.
    for (after, place) in passed.iter().zip(0..) {
        assert!(*after + Duration::from_millis(5) >= Duration::from_millis(100) * place, "{place}: {after:?}");
    }
}

#[test]
fn trap_of_a_caller_that_does_not_wait() {
    let recipe = Recipe::find(9);
    let service = simulate(&recipe, NEW_YEAR);
    let request = TestRequest::new(recipe.domain()).descriptor(&[("api", "payments")]);
    let passed = |timeout_ms| {
        let decide =
            |_: &usize| !service.decide_within(&request, Duration::from_millis(timeout_ms)).unwrap().over_limit();
        (0..20).filter(decide).count()
    };
    assert_eq!(passed(20), 1, "Envoy's default timeout");
    assert_eq!(passed(2000), 8, "the rest of the queue");
}

#[test]
fn each_customer_has_the_limit_of_its_plan() {
    let recipe = Recipe::find(10);
    let served = Served::start(&recipe);
    let request = |customer: &str| served.envoy.get("/").header("x-customer", customer);
    assert_limit(20, &request("acme"));
    assert_limit(10, &request("globex"));
    assert_limit(5, &request("initech"));

    // An upgrade counts what was used: 5 of 5 are 5 of 20.
    let (name, text) = &recipe.files[0];
    let path = served.files.path().join(name);
    fs::write(&path, format!("{text}initech,gold\n")).unwrap();
    wait_for("the new plan", || (request("initech").send().status == 200).then_some(()));
    assert_limit(14, &request("initech"));

    // The trap: a file with an error changes nothing.
    fs::write(&path, "value,plan\nglobex,1000/minute\nhooli,silver\n").unwrap();
    wait_for("the error", || served.tollkeeper.stderr().contains("customers.csv:3").then_some(()));
    assert_limit(0, &request("globex"));
    assert_limit(5, &request("hooli"));
}

#[test]
fn versions_of_a_path_share_a_limit_and_robots_are_exempt() {
    let served = serve(11);
    let request = |client: &str, path: &str| served.envoy.get(path).header("x-client", client);
    for path in ["/v1/login", "/v2/login", "/v2/login?next=/", "/v10/login", "/v3/login"] {
        assert_unlimited(1, &request("ann", path));
    }
    assert_limit(0, &request("ann", "/v4/login"));
    assert_unlimited(6, &request("ann", "/v4/logout"));
    assert_unlimited(6, &request("robot-1", "/v1/login"));
    assert_unlimited(6, &request("robot-2", "/v1/login"));
    assert_limit(5, &request("robot-3", "/v1/login"));
}

#[test]
fn traps_of_versions_and_clients() {
    let mut recipe = Recipe::find(11);
    recipe.replace_in_rules(r"/login(\?.*)?'", "/login'");
    let served = Served::start(&recipe);
    assert_unlimited(6, &served.envoy.get("/v2/login?next=/").header("x-client", "ann"));

    let mut recipe = Recipe::find(11);
    let robots = "match: { not: { in: [robot-1, robot-2] } }";
    recipe.replace_in_rules(robots, &format!("{robots}\n    share_threshold: true"));
    let served = Served::start(&recipe);
    let request = |client: &str| served.envoy.get("/v1/login").header("x-client", client);
    assert_unlimited(3, &request("ann"));
    assert_limit(2, &request("bob"));
}

/// Business hours as the page has them.
const BUSINESS_HOURS: &str = r#"{ days: mon-fri, from: "08:00", to: "20:00", timezone: Europe/Berlin }"#;

#[test]
fn limit_is_lower_during_business_hours() {
    let now_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let hour = |later: u64| format!("{:02}:00", (now_s / 3600 + later) % 24);
    for (from, to, limit) in [(hour(23), hour(2), 5), (hour(3), hour(22), 20)] {
        let mut recipe = Recipe::find(12);
        recipe.replace_in_rules(BUSINESS_HOURS, &format!("{{ from: \"{from}\", to: \"{to}\" }}"));
        let served = Served::start(&recipe);
        let request = |user: &str| served.envoy.get("/").header("x-user", user);
        assert_limit(limit, &request("ann"));
        assert_limit(limit, &request("bob"));
    }
}

#[test]
fn business_hours_are_those_of_berlin() {
    let recipe = Recipe::find(12);
    // Friday, 2026-01-02, and the next Monday, at UTC; Berlin is an hour ahead.
    let day = 24 * 60 * 60;
    let (friday, hour) = (1_767_225_600 + day, 60 * 60);
    let table = [
        (friday + 7 * hour - 1, 20),
        (friday + 7 * hour, 5),
        (friday + 19 * hour - 1, 5),
        (friday + 19 * hour, 20),
        (friday + day + 12 * hour, 20),
        (friday + 3 * day + 12 * hour, 5),
    ];
    for (at_s, limit) in table {
        let service = simulate(&recipe, Time::from_secs(at_s));
        let request = TestRequest::new(recipe.domain()).descriptor(&[("user", "ann")]);
        let passed = (0..30).filter(|_| !service.decide(&request).unwrap().over_limit()).count();
        assert_eq!(passed, limit, "at {at_s}");
    }
}

#[test]
fn trap_of_limits_that_are_active_at_once() {
    let times = |days: &str| format!("{{ days: {days}, from: \"20:00\", to: \"08:00\" }}");
    let problems = |saturday: &str| {
        let mut recipe = Recipe::find(12);
        let limit = |active: &str| format!("      - {{ unit: minute, requests_per_unit: 9, active: {active} }}\n");
        recipe.rules += &(limit(&times("mon-fri")) + &limit(saturday));
        let source = RuleText { name: "r.yaml".into(), bytes: recipe.rules.into(), documents: DocumentSelection::All };
        compile_texts(&[source], &CompileOptions::default()).err().map(|problems| problems.to_string())
    };
    assert!(problems("{ days: sat }").is_some_and(|problems| problems.contains("two limits of fixed_window")));
    assert_eq!(problems("{ days: sat, from: \"08:00\" }"), None);
}

#[test]
fn entries_come_in_any_order() {
    let recipe = Recipe::find(13);
    let mut turned = Recipe::find(13);
    let actions = turned.envoy["rate_limits"][0]["actions"].as_array_mut().unwrap();
    actions.reverse();
    for recipe in [recipe, turned] {
        let served = Served::start(&recipe);
        let request =
            |user: &str, action: &str| served.envoy.get("/").header("x-user", user).header("x-action", action);
        assert_limit(1, &request("alice", "upload"));
        assert_limit(10, &request("alice", "home"));
        assert_limit(10, &request("bob", "upload"));
    }
}

#[test]
fn traps_of_an_order_and_of_the_better_match() {
    let matching = "matching: { order: any, backtrack: true }";
    let mut recipe = Recipe::find(13);
    recipe.replace_in_rules(matching, "matching: { order: any }");
    let served = Served::start(&recipe);
    let request = |user: &str| served.envoy.get("/").header("x-user", user).header("x-action", "upload");
    assert_limit(1, &request("alice"));
    assert_unlimited(11, &request("bob"));

    let mut recipe = Recipe::find(13);
    recipe.replace_in_rules(matching, "matching: { backtrack: true }");
    let served = Served::start(&recipe);
    assert_unlimited(11, &served.envoy.get("/").header("x-user", "alice").header("x-action", "upload"));
}

#[test]
fn tokens_are_charged_after_the_answer() {
    let served = serve(14);
    let request = |team: &str| served.envoy.get("/chat").header("x-team", team).header("x-test-cost", "90");
    let wait_for_report = |calls: u64| {
        wait_for("the cost to be reported", || {
            (served.envoy.stat("cluster.tollkeeper.upstream_rq_completed") >= calls).then_some(())
        });
    };
    // 100 units: the first leaves 10, the second makes a debt of 80.
    for number in 1..=2 {
        assert_eq!(request("red").send().status, 200, "request {number}");
        wait_for_report(number * 2);
    }
    assert_limit(0, &request("red"));
    assert_unlimited(1, &request("blue"));
}

#[test]
fn budget_is_told_at_80_percent_and_shown_whole() {
    let recipe = Recipe::find(31);
    let setup = |setup: Setup| setup.env("TOLLKEEPER_POLICY_HEADERS", "true").env("LOG_LEVEL", "info");
    let served = Served::start_with(&recipe, setup);
    let request = |cost: &str| {
        let response = served.envoy.get("/chat").header("x-team", "red").header("x-test-cost", cost).send();
        assert_eq!(response.status, 200, "{response:?}");
        response
    };
    let level = "limit used up to a level: 80% of budget.team reached for team=red: 24000000000 of 30000000000";
    for number in 1..=24_u64 {
        assert!(!served.tollkeeper.stderr().contains(level), "request {number}");
        request("1000000000");
        wait_for("the cost to be reported", || {
            (served.envoy.stat("cluster.tollkeeper.upstream_rq_completed") >= number * 2).then_some(())
        });
    }
    wait_for("the level", || served.tollkeeper.stderr().contains(level).then_some(()));
    // A cost that Envoy drops changes nothing.
    request("1000000001");
    let shown = request("1");
    assert_eq!(shown.header("ratelimit-policy").unwrap(), "\"budget\";q=30000000000");
    assert!(shown.header("ratelimit").unwrap().starts_with("\"budget\";r=6000000000;t="), "{shown:?}");
    assert_eq!(served.tollkeeper.stderr().matches("limit used up to a level").count(), 1);
}

#[test]
fn credits_pay_what_is_beyond_the_plan() {
    let served = serve(32);
    let of = |customer| served.envoy.get("/").header("x-customer", customer);
    assert_limit(8, &of("ann"));
    assert_unlimited(8, &of("bob"));
    assert_unlimited(9, &served.envoy.get("/"));
}

#[test]
fn traps_of_tokens() {
    let mut recipe = Recipe::find(14);
    recipe.replace_in_rules(", count_rejected: true", "");
    let served = Served::start(&recipe);
    let request = served.envoy.get("/chat").header("x-team", "red").header("x-test-cost", "90");
    for number in 1..=3 {
        assert_eq!(request.send().status, 200, "request {number}");
        wait_for("the cost to be reported", || {
            (served.envoy.stat("cluster.tollkeeper.upstream_rq_completed") >= number * 2).then_some(())
        });
    }
    let served = serve(14);
    assert_unlimited(3, &served.envoy.get("/chat").header("x-team", "red"));
}

#[test]
fn regions_share_a_limit() {
    let recipe = Recipe::find(15);
    let page = read(&repository("docs/cookbook.md"));
    let [eu, us, global] = [(); 3].map(|()| redis::options().start());
    let setting = |setup: Setup, name: &str, value: &str| {
        assert!(page.contains(&format!("    {name}=")), "the recipe does not set {name}");
        setup.env(name, value)
    };
    let of_region = |setup: Setup, region: &str, own: &str| {
        let setup = setting(setup, "REDIS_URL", own).env("REDIS_SOCKET_TYPE", "tcp");
        let setup = setting(setup, "TOLLKEEPER_REGION", region);
        let setup = setting(setup, "TOLLKEEPER_REGIONS", "eu,us");
        setting(setup, "TOLLKEEPER_GLOBAL_REDIS_URL", &global.address()).env("TOLLKEEPER_STORE_TIMEOUT", "10s")
    };
    let regions = [("eu", &eu), ("us", &us)]
        .map(|(region, own)| Served::start_with(&recipe, |setup| of_region(setup, region, &own.address())));
    for region in &regions {
        wait_for("the regions to know each other", || {
            (region.tollkeeper.store_stats()["regions"]["notices"] == json!([])).then_some(())
        });
    }
    // Twenty hits a call, in turn, until neither region admits any.
    let body = r#"{"domain": "worldwide", "hitsAddend": 20, "descriptors": [{"entries": [{"key": "api_key", "value": "k-1"}]}]}"#;
    let mut admitted = 0;
    let mut last = Instant::now();
    wait_for("the limit to be used up", || {
        for region in &regions {
            if region.tollkeeper.post_json(body).status == 200 {
                admitted += 20;
                last = Instant::now();
            }
        }
        (last.elapsed() > Duration::from_secs(3)).then_some(())
    });
    assert!((800..=1050).contains(&admitted), "{admitted}");
    // What is left is less than 20 hits a region.
    for region in &regions {
        let request = region.envoy.get("/").header("x-api-key", "k-1");
        assert!((0..40).any(|_| request.send().status == 429));
        assert_unlimited(1, &region.envoy.get("/").header("x-api-key", "k-2"));
    }
}

#[test]
fn first_roll_out_rejects_nothing_and_shows_who_would_be() {
    let recipe = Recipe::find(16);
    let served = Served::start_with(&recipe, |setup| setup.env("SHADOW_MODE", "true"));
    assert_unlimited(6, &served.envoy.get("/").header("x-user", "ann"));
    assert_eq!(top(&served, ""), [("rollout.user user=ann".to_owned(), 1)]);

    // Later: each rule in shadow mode by itself, then one of them no more. Its counter went on.
    let rule = "algorithm: sliding_window_log }";
    let shadow = recipe.rules.replace(rule, &format!("{rule}\n    shadow_mode: true"));
    assert_ne!(shadow, recipe.rules);
    let mut later = Recipe::find(16);
    later.rules = shadow;
    let served = Served::start(&later);
    assert_unlimited(6, &served.envoy.get("/").header("x-user", "ann"));
    fs::write(served.files.path().join("rollout.yaml"), &recipe.rules).unwrap();
    wait_for("the rule to reject", || {
        (served.envoy.get("/").header("x-user", "ann").send().status == 429).then_some(())
    });
}

#[test]
fn payments_are_refused_without_an_answer() {
    let mut served = Served::start(&Recipe::find(33));
    let (payment, other) = (served.envoy.get("/payments/7"), served.envoy.get("/"));
    assert_limit(60, &payment);
    assert_eq!(other.send().status, 429, "one limit for both");
    served.tollkeeper.kill();
    served.failing_calls = 2;
    assert_eq!((payment.send().status, other.send().status), (503, 200));
}

#[test]
fn cost_in_a_header_is_charged_and_what_is_none_is_refused() {
    let served = serve(34);
    let costs = |cost: &str| served.envoy.get("/graphql").header("x-user", "ann").header("x-query-cost", cost);
    assert_eq!(costs("400").send().status, 200);
    assert_eq!(served.envoy.get("/graphql").header("x-user", "ann").send().status, 400);
    for none in ["", "0", "-5", "abc", "1.5", "0x10", "1000000000"] {
        assert_eq!(costs(none).send().status, 400, "{none:?}");
    }
    assert_eq!(costs("601").send().status, 429);
    assert_eq!(costs("500").header("x-query-cost", "1").send().status, 200, "the first value counts");
    assert_eq!(costs("101").send().status, 429);
    assert_eq!(costs("100").send().status, 200);
}

#[test]
fn ten_exports_run_at_once() {
    let upstream = OpenUpstream::start();
    let served = Served::start_before(17, 1, &upstream);
    let mut streams: Vec<_> = (0..10).map(|_| open(&served.envoy, "x-user: ann").expect("a slot is free")).collect();
    assert_eq!(open(&served.envoy, "x-user: bob").err(), Some(429));
    streams.pop();
    streams.push(wait_for("the slot that was freed", || open(&served.envoy, "x-user: bob").ok()));
    assert_eq!(open(&served.envoy, "x-user: ann").err(), Some(429));
}

#[test]
fn user_has_twenty_websockets() {
    let upstream = OpenUpstream::start();
    let served = Served::start_before(17, 2, &upstream);
    let socket = |user: &str| open(&served.envoy, &format!("x-user: {user}\nconnection: upgrade\nupgrade: websocket"));
    let mut sockets: Vec<_> = (0..20).map(|_| socket("ann").expect("a slot is free")).collect();
    assert_eq!(socket("ann").err(), Some(429));
    assert!(socket("bob").is_ok());
    sockets.pop();
    sockets.push(wait_for("the slot of the closed socket", || socket("ann").ok()));
    assert_eq!(socket("ann").err(), Some(429));
}

#[test]
fn proxy_decides_by_itself_what_it_was_assigned() {
    let served = Served::start_with(&Recipe::find(18), |setup| setup.env("TOLLKEEPER_RLQS", "true"));
    let request = served.envoy.get("/");
    let minute = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() / 60;
    let began = minute();
    wait_for("the first assignment", || (request.send().status == 200).then_some(()));
    let passed = 1 + (0..1000).take_while(|_| request.send().status == 200).count() as u64;
    let most = 60 * (minute() - began + 1);
    assert!((20..=most).contains(&passed), "{passed} of {most} passed");
    assert_eq!(served.envoy.stat("cluster.upstream.ratelimit.ok"), 0, "Envoy asks for no request");
    let page = http::get(served.tollkeeper.debug_port(), "/quota?format=text").send().text();
    assert!(page.contains("hot.backend_search"), "{page}");
}
