//! More of what recipes do, with their traps, and what they leave to other routes.

use std::fs;
use std::io::Write as _;
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::json;

use super::page::Recipe;
use super::{NEW_YEAR, Served, assert_limit, assert_unlimited, run_at, serve, simulate, top};
use crate::serve::envoy::concurrency::{OpenUpstream, open};
use kit::http::{self, Request};
use kit::redis::certificates::Certificates;
use kit::test_service::TestRequest;
use kit::tollkeeper::{inherited_env, program_path};
use kit::{read, repository, wait_for};

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
fn trap_of_a_path_that_is_not_normalized() {
    let mut recipe = Recipe::find(2);
    assert_limit(5, &post(&Served::start(&recipe), "//orders"));
    for key in ["normalize_path", "merge_slashes"] {
        assert!(recipe.envoy.remove(key).is_some(), "{key}");
    }
    let served = Served::start(&recipe);
    for path in ["//orders", "/a/../orders"] {
        assert_unlimited(6, &post(&served, path));
    }
}

/// Only the route of the recipe is limited.
#[test]
fn only_logins_are_limited() {
    let served = serve(4);
    assert_limit(5, &post(&served, "/login?next=/").header("x-account", "ann"));
    assert_unlimited(1, &served.envoy.get("/login").header("x-account", "ann"));
    assert_unlimited(1, &post(&served, "/logout").header("x-account", "ann"));
}

#[test]
fn accounts_and_addresses_have_limits_of_their_own() {
    let served = serve(4);
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
    let served = serve(4);
    let login = |account: &str, last| post(&served, "/login").header("x-account", account).from(last);
    for _ in 0..60 {
        login("ann", 1).send();
    }
    assert_limit(0, &login("ann", 2));
    assert_unlimited(1, &login("bob", 2));

    // The cure: what the ban rejects is charged to nothing else.
    let cure = "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT";
    assert!(read(&repository("docs/cookbook.md")).contains(&format!("`{cure}=true`")));
    let served = Served::start_with(&Recipe::find(4), |setup| setup.env(cure, "true"));
    let login = |account: &str, last| post(&served, "/login").header("x-account", account).from(last);
    for _ in 0..60 {
        login("ann", 1).send();
    }
    assert_unlimited(1, &login("ann", 2));
}

/// Tokens of the page's key with the claim `tenant`, a number.
const TOKENS: [(u32, &str); 2] = [
    (
        42,
        "eyJhbGciOiJIUzI1NiIsImtpZCI6ImsxIn0.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUiLCJ0ZW5hbnQiOjQyfQ.Aiv8mAayx4sQsV488O_atnOGDQA5S9_WW2kixxnHE0Y",
    ),
    (
        43,
        "eyJhbGciOiJIUzI1NiIsImtpZCI6ImsxIn0.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUiLCJ0ZW5hbnQiOjQzfQ.tfjKsk9maasob3hcaIMs0LRN7G75MKJ-f9pWsZXQXzU",
    ),
];

#[test]
fn number_in_a_token_is_a_value() {
    let served = serve(19);
    for (tenant, token) in TOKENS {
        let request = served.envoy.get("/").header("authorization", format!("Bearer {token}"));
        assert_limit(5, &request.header("x-tenant", "99"));
        let key = format!("tenants.tenant tenant={tenant}");
        assert!(top(&served, "").iter().any(|(rejected, _)| *rejected == key), "{:?}", top(&served, ""));
    }
    assert_eq!(served.envoy.get("/").header("x-tenant", "1").send().status, 401);
}

#[test]
fn methods_of_grpc_have_costs() {
    let served = serve(20);
    let call = |method: &str, user: &str| served.envoy.get(&format!("/shop.Orders/{method}")).header("x-user", user);
    assert_unlimited(9, &call("Export", "ann"));
    assert_limit(10, &call("List", "ann"));
    assert_limit(100, &call("List", "bob"));
    assert_limit(10, &call("Export", "eve"));
}

#[test]
fn requests_above_a_limit_go_to_a_slower_backend() {
    let setting = "TOLLKEEPER_EXCEEDED_LIMITS_HEADER=x-ratelimit-exceeded";
    let (name, value) = setting.split_once('=').unwrap();
    let sent_to_slow = |recipe: &Recipe, header: &str| {
        let served = Served::start_with(recipe, |setup| setup.env(name, value));
        assert_unlimited(8, &served.envoy.get("/").header("x-user", "ann").header(header, "forged"));
        served.envoy.stat("cluster.slow.upstream_rq_total")
    };
    let mut recipe = Recipe::find(21);
    assert_eq!(sent_to_slow(&recipe, "x-ratelimit-exceeded"), 3);
    // The traps.
    assert!(recipe.envoy.remove("early_header_mutation_extensions").is_some());
    assert_eq!(sent_to_slow(&recipe, "x-ratelimit-exceeded"), 8, "whatever was used");
    assert!(recipe.envoy.remove("http_filters").is_some());
    assert_eq!(sent_to_slow(&recipe, "x-other"), 0);
}

#[test]
fn wrong_passwords_count_until_a_right_one() {
    let served = serve(22);
    let mut calls = 0;
    // A peek, and one report after the answer: the other descriptor ends at no rule.
    let mut login = |account: &str, password: &str| {
        let request = served.envoy.get("/").header("x-account", account).header("x-test-password", password);
        let status = request.send().status;
        calls += if status == 429 { 1 } else { 2 };
        wait_for("the report", || {
            (served.envoy.stat("cluster.tollkeeper.upstream_rq_completed") >= calls).then_some(())
        });
        status
    };
    for _ in 0..4 {
        assert_eq!(login("ann", "wrong"), 401);
    }
    assert_eq!(login("ann", "right"), 200);
    for _ in 0..5 {
        assert_eq!(login("ann", "wrong"), 401);
    }
    assert_eq!((login("ann", "right"), login("bob", "right")), (429, 200));
}

#[test]
fn uploads_are_charged_by_their_bytes() {
    let served = serve(23);
    let upload =
        |user: &str| http::post(served.envoy.port(), "/", vec![b'x'; 4000]).header("x-user", user).send().status;
    let mut statuses = Vec::new();
    for number in 1..=4_u64 {
        statuses.push(upload("ann"));
        wait_for("the size to be reported", || {
            (served.envoy.stat("cluster.tollkeeper.upstream_rq_completed") >= 2 * number.min(3)).then_some(())
        });
    }
    assert_eq!(statuses, [200, 200, 200, 429]);
    assert_eq!(upload("bob"), 200);

    // The rejected upload is charged too: 4000 of 10000 bytes an hour are 1440 s more.
    let wait_s = || {
        let request = http::post(served.envoy.port(), "/", vec![b'x'; 4000]).header("x-user", "ann");
        request.send().number("retry-after")
    };
    let first = wait_s();
    wait_for("the second report", || (wait_s() > first + 1000).then_some(()));
}

#[test]
fn client_certificate_is_a_value() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    certificates.issue_server("server");
    for name in ["shop", "other"] {
        certificates.issue_client_with_uri(name, &format!("spiffe://example/{name}"));
    }
    let path = |name: &str| serde_json::json!({ "filename": certificates.path(name) });
    let context = serde_json::json!({
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "require_client_certificate": true,
        "common_tls_context": {
            "tls_certificates": [{ "certificate_chain": path("server.crt"), "private_key": path("server.key") }],
            "validation_context": { "trusted_ca": path("ca.crt") },
        },
    });
    let socket = format!(
        "- transport_socket: {{ name: envoy.transport_sockets.tls, typed_config: {context} }}\n          filters:"
    );
    let served = Served::start_changed(&Recipe::find(24), |bootstrap| bootstrap.replacen("- filters:", &socket, 1));
    let status = |name: &str| {
        let mut curl = Command::new("curl");
        curl.args(["-s", "--noproxy", "*", "-o", "/dev/null", "-w", "%{http_code}", "--cacert"])
            .arg(certificates.path("ca.crt"));
        curl.arg("--cert").arg(certificates.path(&format!("{name}.crt")));
        curl.arg("--key").arg(certificates.path(&format!("{name}.key")));
        let output = curl.arg(format!("https://localhost:{}/", served.envoy.port())).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!([(); 6].map(|()| status("shop")), ["200", "200", "200", "200", "200", "429"]);
    assert_eq!(status("other"), "200");
}

#[test]
fn rejection_speaks_the_language_of_an_api() {
    let served = Served::start(&Recipe::find(25));
    assert_unlimited(5, &served.envoy.get("/").header("x-team", "red"));
    let rejected = served.envoy.get("/").header("x-team", "red").send();
    assert_eq!(rejected.status, 429);
    assert_eq!(rejected.header("content-type").as_deref(), Some("application/json"));
    assert_eq!(rejected.header("x-should-retry").as_deref(), Some("false"));
    let body: serde_json::Value = serde_json::from_slice(&rejected.body).unwrap();
    assert_eq!(body["error"]["code"], "rate_limit_exceeded");
    let retry_after = rejected.number("retry-after");
    let message =
        format!("Rate limit reached for team budget: limit 5, remaining 0. Please try again in {retry_after}s.");
    assert_eq!(body["error"]["message"], message);
}

/// Sends a POST with that many bytes and waits until its report has arrived: `calls` of all requests, rejected ones too.
fn move_bytes(served: &Served, user: &str, bytes: usize, calls: u64) -> u16 {
    let request = http::post(served.envoy.port(), "/", vec![b'x'; bytes]).header("x-user", user);
    let status = request.send().status;
    wait_for("the report", || (served.envoy.stat("cluster.tollkeeper.upstream_rq_completed") >= calls).then_some(()));
    status
}

/// What is left of the user's quota, by tollkeeper's own answer to a peek.
fn left(served: &Served, user: &str) -> u64 {
    let entry = json!({ "key": "user", "value": user });
    let peek = json!({ "domain": "traffic", "descriptors": [{ "entries": [entry], "hitsAddend": 0 }] });
    let response = served.tollkeeper.post_json(&peek.to_string());
    let answer: serde_json::Value = serde_json::from_slice(&response.body).unwrap();
    answer["statuses"][0]["limitRemaining"].as_u64().unwrap_or(0)
}

#[test]
fn bytes_in_both_directions_are_a_quota() {
    let mut recipe = Recipe::find(29);
    recipe.replace_in_rules("requests_per_unit: 10485760", "requests_per_unit: 10");
    let served = Served::start(&recipe);
    // 5000 bytes and the headers of both directions are 5 or 6 KiB.
    let statuses = [2, 4, 6].map(|calls| move_bytes(&served, "ann", 5000, calls));
    assert_eq!(statuses, [200, 200, 429]);
    assert_eq!(move_bytes(&served, "bob", 5000, 8), 200);
    // A small request costs 1.
    assert_eq!(move_bytes(&served, "eve", 1, 10), 200);
    assert_eq!(left(&served, "eve"), 9);
}

#[test]
fn upload_that_breaks_off_is_charged_by_what_came() {
    let left_after = |format: &str| {
        let mut recipe = Recipe::find(29);
        recipe.replace_in_envoy("(request.total_size + response.total_size + 1023) / 1024", format);
        let upstream = OpenUpstream::start();
        let served = Served::start_recipe_before(&recipe, &upstream);
        let mut upload = TcpStream::connect(("127.0.0.1", served.envoy.port())).unwrap();
        let head = "POST / HTTP/1.1\r\nhost: a\r\nx-user: ann\r\ncontent-length: 10000000\r\n\r\n";
        upload.write_all(format!("{head}{}", "x".repeat(5000)).as_bytes()).unwrap();
        // No answer comes before the end of the body.
        let sent = || served.envoy.stat("cluster.upstream.upstream_cx_tx_bytes_total");
        wait_for("the bytes to arrive", || (sent() >= 5000).then_some(()));
        drop(upload);
        wait_for("the report", || (served.envoy.stat("cluster.tollkeeper.upstream_rq_completed") >= 2).then_some(()));
        left(&served, "ann")
    };
    assert_eq!(left_after("(request.total_size + response.total_size + 1023) / 1024"), 10_485_760 - 6);
    assert_eq!(left_after("request.size"), 10_485_760 - 10_000_000);
}

#[test]
fn trap_of_a_report_that_envoy_drops() {
    let used_by = |cost: &str| {
        let mut recipe = Recipe::find(29);
        let formula = "%TYPED_CEL((request.total_size + response.total_size + 1023) / 1024)%";
        recipe.replace_in_envoy(formula, "%REQ(x-cost)%");
        recipe.replace_in_rules("requests_per_unit: 10485760", "requests_per_unit: 4000000000");
        let served = Served::start(&recipe);
        // The second of them sends a report in any case.
        for cost in [cost, "1"] {
            let request = served.envoy.get("/").header("x-user", "ann");
            assert_eq!(request.header("x-cost", cost).send().status, 200);
        }
        wait_for("the second report", || Some(4_000_000_000 - left(&served, "ann")).filter(|used| used % 10 == 1))
    };
    assert_eq!(used_by("1000000000"), 1_000_000_001);
    assert_eq!(used_by("1000000001"), 1);
}

/// Token of the page's key without the claim `tenant`.
const TOKEN_WITHOUT_TENANT: &str = "eyJhbGciOiJIUzI1NiIsImtpZCI6ImsxIn0.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUifQ.oRugj_qldcXEo-oE9mRWJqm90W74g2lgqGOw9rdiKEk";

#[test]
fn tenant_sees_its_own_usage_and_no_other() {
    let served = serve(30);
    let [own, other] = TOKENS.map(|(_, token)| token);
    let get = |path: &str, token: &str| served.envoy.get(path).header("authorization", format!("Bearer {token}"));
    let usage = |path: &str, token: &str, forged: &str| {
        let response = get(path, token).header("x-tenant", forged).send();
        assert_eq!(response.header("content-type").as_deref(), Some("application/json"), "{response:?}");
        assert_eq!((response.status, response.header("retry-after")), (200, None));
        serde_json::from_slice::<serde_json::Value>(&response.body).unwrap()
    };
    assert_unlimited(3, &get("/", own));
    // Looking charges nothing, and names in the query or in headers change nothing.
    for _ in 0..10 {
        assert_eq!(usage("/usage?tenant=43&x-tenant=43", own, "43")["remaining"], 2);
    }
    let full = usage("/usage", other, "42");
    assert_eq!(full, json!({ "limit": 5, "remaining": 5, "reset": 0 }));
    assert_limit(2, &get("/", own));
    let exceeded = usage("/usage", own, "43");
    assert_eq!((&exceeded["limit"], &exceeded["remaining"]), (&5.into(), &0.into()));
    assert!((1..=60).contains(&exceeded["reset"].as_u64().unwrap()), "{exceeded}");
    // The request that was rejected, and the look.
    assert_eq!(served.envoy.stat("cluster.upstream.ratelimit.over_limit"), 2);
    assert_limit(5, &get("/", other));

    // Without a token, and with one that names no tenant, nothing of a tenant is shown.
    assert_eq!(served.envoy.get("/usage").header("x-tenant", "42").send().status, 401);
    let nobody = get("/usage", TOKEN_WITHOUT_TENANT).header("x-tenant", "42").send();
    assert_eq!((nobody.text().as_str(), nobody.header("x-ratelimit-limit")), ("served\n", None));
}

#[test]
fn key_is_blocked_and_unblocked_by_commands() {
    let recipe = Recipe::find(7);
    let token = "correct horse battery staple";
    let run = |served: &Served, name: &str| run_at(served, &recipe, name, token);
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

/// Calls to tollkeeper after requests to a route without limits, which end before this returns.
fn calls_of_the_other_route(served: &Served) -> u64 {
    let called = || served.envoy.stat("cluster.tollkeeper.upstream_rq_total");
    let before = called();
    assert_unlimited(10, &served.envoy.get("/now").header("x-user", "ann"));
    // A release is sent when the stream has ended; a later one is seen too.
    thread::sleep(Duration::from_millis(500));
    called() - before
}

#[test]
fn only_the_route_of_a_concurrent_limit_is_released() {
    for (way, headers) in [(1, "x-user: ann"), (2, "x-user: ann\nconnection: upgrade\nupgrade: websocket")] {
        let upstream = OpenUpstream::start();
        let served = Served::start_before(17, way, &upstream);
        let called = || served.envoy.stat("cluster.tollkeeper.upstream_rq_total");
        let calls_before = called();
        let stream = open(&served.envoy, headers).expect("a slot is free");
        drop(stream);
        wait_for("an acquire and a release", || (called() == calls_before + 2).then_some(()));
        assert_eq!(calls_of_the_other_route(&served), 0, "way {way}");
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
    let mut recipe = Recipe::find(18);
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
    assert!(text.contains("1 Envoy file, 0 errors, 0 warnings, "), "{text}");
    // The page has one limit of the many in that file.
    let others = text.matches(": hint: ").count() - text.matches("[rule-unreachable]").count();
    assert_eq!(others, 1, "{text}");
    assert!(text.contains("hint: this descriptor needs `x-login`, which a request may lack"), "{text}");
}
