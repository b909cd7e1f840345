//! Second ways of recipes, and what the first ones leave to other routes.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use super::page::Recipe;
use super::{NEW_YEAR, Served, assert_limit, assert_unlimited, simulate, top};
use crate::serve::envoy::concurrency::{OpenUpstream, open};
use kit::http::Request;
use kit::test_service::TestRequest;
use kit::tollkeeper::{inherited_env, program_path};
use kit::{read, repository, wait_for};

/// Serves a way of the recipe of that number.
fn serve_way(number: usize, way: usize) -> Served {
    Served::start(&Recipe::find_way(number, way))
}

/// A POST without a body.
fn post(served: &Served, path: &str) -> Request {
    served.envoy.get(path).method("POST").header("content-length", "0")
}

#[test]
fn trap_of_a_plan_that_a_user_invents() {
    let mut recipe = Recipe::find(1);
    recipe.replace_in_rules("    value: \"*\"\n", "");
    let comment = "    share_threshold: true                          # one counter of a user for all other plans\n";
    recipe.replace_in_rules(comment, "");
    let served = Served::start(&recipe);
    for plan in ["free", "trial", "other"] {
        assert_limit(5, &served.envoy.get("/").header("x-plan", plan).header("x-user", "bob"));
    }
}

#[test]
fn orders_of_a_route_have_a_limit_whatever_the_query() {
    let served = serve_way(2, 2);
    for path in ["/orders", "/orders?page=1", "//orders", "/a/../orders?page=2", "/orders?a=b&c"] {
        assert_unlimited(1, &post(&served, path));
    }
    assert_limit(0, &post(&served, "/orders?page=3"));
    assert_unlimited(6, &served.envoy.get("/orders"));
    assert_unlimited(6, &post(&served, "/orders/7"));
    assert_unlimited(6, &post(&served, "/orders/"));
    assert_unlimited(1, &post(&served, "/orders").from(2));
}

#[test]
fn trap_of_a_path_that_is_not_normalized() {
    for way in [1, 2] {
        let mut recipe = Recipe::find_way(2, way);
        assert_limit(5, &post(&Served::start(&recipe), "//orders"));
        for key in ["normalize_path", "merge_slashes"] {
            assert!(recipe.envoy.remove(key).is_some(), "{key}");
        }
        let served = Served::start(&recipe);
        for path in ["//orders", "/a/../orders"] {
            assert_unlimited(6, &post(&served, path));
        }
    }
}

/// Only the route of the recipe is limited, in both ways.
#[test]
fn only_logins_are_limited() {
    for way in [1, 2] {
        let served = serve_way(4, way);
        assert_limit(5, &post(&served, "/login?next=/").header("x-account", "ann"));
        assert_unlimited(1, &served.envoy.get("/login").header("x-account", "ann"));
        assert_unlimited(1, &post(&served, "/logout").header("x-account", "ann"));
    }
}

#[test]
fn accounts_and_addresses_have_limits_of_their_own() {
    let served = serve_way(4, 2);
    let login = |account: &str, last| post(&served, "/login").header("x-account", account).from(last);
    // Ten addresses, with five tries each.
    for address in 1..=10 {
        assert_unlimited(5, &login("ann", address));
    }
    assert_limit(0, &login("ann", 11));
    assert_unlimited(1, &login("bob", 1));
    // Thirty accounts, from one address.
    for number in 1..=30 {
        assert_unlimited(1, &login(&format!("account-{number}"), 100));
    }
    assert_limit(0, &login("carol", 100));
    assert_unlimited(1, &login("carol", 101));
    // Without an account the limit of the address is left.
    assert_limit(30, &post(&served, "/login").from(102));
}

#[test]
fn trap_of_an_account_whose_tries_someone_uses_up() {
    let served = serve_way(4, 2);
    let login = |account: &str, last| post(&served, "/login").header("x-account", account).from(last);
    for _ in 0..60 {
        login("ann", 1).send();
    }
    assert_limit(0, &login("ann", 2));
    assert_unlimited(1, &login("bob", 2));
}

#[test]
fn key_is_blocked_and_unblocked_by_commands() {
    let recipe = Recipe::find(7);
    let token = "correct horse battery staple";
    let run = |served: &Served, name: &str| {
        let command = recipe.commands.iter().find(|command| command.text.starts_with(&format!("tollkeeper {name} ")));
        let text = &command.unwrap_or_else(|| panic!("the page has no {name}")).text;
        let mut program = Command::new(program_path());
        program.args(text.split(' ').skip(1)).arg("--addr");
        program.arg(format!("127.0.0.1:{}", served.tollkeeper.debug_port()));
        program.env_clear().envs(inherited_env()).env("TOLLKEEPER_ADMIN_TOKEN", token).output().unwrap()
    };
    let served = Served::start_with(&recipe, |setup| setup.env("TOLLKEEPER_ADMIN_TOKEN", token));
    let request = served.envoy.get("/").header("x-api-key", "k-667");
    assert_unlimited(1, &request);
    assert!(run(&served, "block").status.success());
    assert_limit(0, &request);
    assert!(run(&served, "unblock").status.success());
    assert_unlimited(1, &request);

    // The trap: a server without a token refuses.
    let served = Served::start(&recipe);
    assert_eq!(run(&served, "block").status.code(), Some(1));
    assert_unlimited(1, &served.envoy.get("/").header("x-api-key", "k-667"));
}

/// The header that the upstream saw, at the last of `count` requests.
fn exceeded(request: &Request, count: usize) -> Option<String> {
    assert_unlimited(count - 1, request);
    let response = request.send();
    assert_eq!(response.status, 200, "{response:?}");
    response.header("seen-exceeded")
}

#[test]
fn upstream_is_warned_of_a_quota() {
    let shown = "TOLLKEEPER_EXCEEDED_LIMITS_HEADER=x-ratelimit-exceeded";
    let page = read(&repository("docs/cookbook.md"));
    assert!(page.contains(shown) && page.contains("`x-ratelimit-exceeded: warning;shadow`"));
    let (name, value) = shown.split_once('=').unwrap();
    let start = |recipe: &Recipe| Served::start_with(recipe, |setup| setup.env(name, value));
    let warning = Some("warning;shadow".to_owned());

    let mut recipe = Recipe::find_way(8, 2);
    let served = start(&recipe);
    let request = served.envoy.get("/reports").header("x-customer", "acme").header("x-ratelimit-exceeded", "forged");
    assert_eq!(exceeded(&request, 40), None);
    assert_eq!(exceeded(&request, 1), warning);
    assert_eq!(exceeded(&request, 9), warning);
    assert_limit(0, &request);

    // The traps: what a client sends stays, unless it is removed; a candidate is not named.
    assert!(recipe.envoy.remove("early_header_mutation_extensions").is_some());
    let served = start(&recipe);
    let request = served.envoy.get("/reports").header("x-customer", "acme").header("x-ratelimit-exceeded", "forged");
    assert_eq!(exceeded(&request, 1).as_deref(), Some("forged"));
    let served = start(&Recipe::find(8));
    assert_eq!(exceeded(&served.envoy.get("/reports").header("x-customer", "acme"), 50), None);
}

#[test]
fn methods_and_versions_share_a_limit() {
    let served = serve_way(11, 2);
    let request =
        |client: &str, method: &str, path: &str| served.envoy.get(path).method(method).header("x-client", client);
    for number in 0..5 {
        assert_unlimited(1, &request("ann", "GET", &format!("/v{number}/reports")));
        assert_unlimited(1, &request("ann", "HEAD", &format!("//v{number}/reports?page={number}")));
    }
    assert_limit(0, &request("ann", "GET", "/v7/reports"));
    assert_limit(0, &request("ann", "HEAD", "/v8/reports"));
    assert_unlimited(11, &request("ann", "PUT", "/v1/reports").header("content-length", "0"));
    assert_unlimited(1, &request("bob", "GET", "/v1/reports"));

    let mut recipe = Recipe::find_way(11, 2);
    recipe.replace_in_rules("share_threshold: true                       # one counter for both methods", "");
    let served = Served::start(&recipe);
    for method in ["GET", "HEAD"] {
        assert_limit(10, &served.envoy.get("/v1/reports").method(method).header("x-client", "ann"));
    }
}

#[test]
fn lower_limit_counts_beside_the_current_one() {
    let served = serve_way(16, 2);
    assert_limit(20, &served.envoy.get("/").header("x-user", "ann"));
    assert_eq!(top(&served, "?rule=rollout.user.lower"), [("rollout.user.lower user=ann".to_owned(), 16)]);
}

/// Calls to tollkeeper after requests to a route without limits, which end before this returns.
fn calls_of_the_other_route(served: &Served) -> u64 {
    let called = || served.envoy.stat("cluster.tollkeeper.upstream_rq_total");
    let before = called();
    assert_unlimited(10, &served.envoy.get("/now"));
    // A release is sent when the stream has ended; a later one is seen too.
    thread::sleep(Duration::from_millis(500));
    called() - before
}

#[test]
fn only_the_route_of_a_concurrent_limit_is_released() {
    for (number, headers) in [(17, "x-user: ann"), (18, "x-user: ann\nconnection: upgrade\nupgrade: websocket")] {
        let upstream = OpenUpstream::start();
        let served = Served::start_before(number, &upstream);
        let called = || served.envoy.stat("cluster.tollkeeper.upstream_rq_total");
        let calls_before = called();
        let stream = open(&served.envoy, headers).expect("a slot is free");
        drop(stream);
        wait_for("an acquire and a release", || (called() == calls_before + 2).then_some(()));
        assert_eq!(calls_of_the_other_route(&served), 0, "recipe {number}");
    }
}

#[test]
fn trap_of_a_release_in_the_filter() {
    let mut recipe = Recipe::find(17);
    let per_route = recipe.envoy.remove("typed_per_filter_config").expect("it is there");
    let release = &mut recipe.envoy["http_filters"][0];
    assert!(release.as_object_mut().unwrap().remove("disabled").is_some());
    release["typed_config"]["rate_limits"] = per_route["release"]["rate_limits"].clone();
    let upstream = OpenUpstream::start();
    let served = Served::start_recipe_before(&recipe, &upstream);
    wait_for("releases of the other route", || (calls_of_the_other_route(&served) >= 10).then_some(()));
}

/// Four requests a second, in the first 58 s: a bucket starts full and refills, a window does not.
#[test]
fn trap_of_a_bucket_that_starts_full() {
    let mut recipe = Recipe::find(19);
    let passed = |recipe: &Recipe| {
        let service = simulate(recipe, NEW_YEAR);
        let request = TestRequest::new(recipe.domain()).descriptor(&[("backend", "search")]);
        let passes = |_: &usize| {
            service.advance_us(250_000);
            !service.decide(&request).unwrap().over_limit()
        };
        (0..232).filter(passes).count()
    };
    assert_eq!(passed(&recipe), 60);
    recipe.replace_in_rules("requests_per_unit: 60 }", "requests_per_unit: 60, algorithm: token_bucket }");
    assert!((115..=119).contains(&passed(&recipe)), "{}", passed(&recipe));
}

/// The bootstrap of `docs/envoy.md`: its filter, descriptors and cluster in a listener.
#[test]
fn check_finds_nothing_wrong_with_the_cluster_that_recipes_refer_to() {
    let page = read(&repository("docs/envoy.md"));
    let section = page.split("\n## ").find(|section| section.starts_with("Filter, descriptors, cluster\n")).unwrap();
    let blocks: Vec<_> = section.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let [filters, limits, clusters] = blocks[..] else { panic!("{} blocks", blocks.len()) };
    let part = |text: &str| -> serde_json::Value { serde_saphyr::from_str(text).unwrap() };
    let (mut filters, mut clusters) = (part(filters)["http_filters"].clone(), part(clusters)["clusters"].clone());
    let type_url = |name: &str| format!("type.googleapis.com/envoy.extensions.filters.{name}");
    filters.as_array_mut().unwrap().push(serde_json::json!({
        "name": "envoy.filters.http.router", "typed_config": {"@type": type_url("http.router.v3.Router")}
    }));
    clusters.as_array_mut().unwrap().push(serde_json::json!({"name": "upstream", "connect_timeout": "1s"}));
    let route = serde_json::json!({
        "match": {"prefix": "/"}, "route": {"cluster": "upstream", "rate_limits": part(limits)["rate_limits"]}
    });
    let manager = serde_json::json!({
        "@type": type_url("network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "page",
        "http_filters": filters,
        "route_config": {"virtual_hosts": [{"name": "page", "domains": ["*"], "routes": [route]}]},
    });
    let chain = serde_json::json!({"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]});
    let listener = serde_json::json!({
        "name": "page",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 10000}},
        "filter_chains": [chain],
    });
    let bootstrap = serde_json::json!({"static_resources": {"listeners": [listener], "clusters": clusters}});
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("envoy.json");
    fs::write(&path, bootstrap.to_string()).unwrap();
    let mut check = Command::new(program_path());
    check.arg("check").arg("--envoy").arg(&path).arg(repository("config/example.yaml"));
    let output = check.env_clear().envs(inherited_env()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("1 Envoy file, 0 errors, 0 warnings, 1 hint\n"), "{text}");
    assert!(text.contains("hint: this descriptor needs `x-login`, which a request may lack"), "{text}");
}
