//! Clients of tollkeeper behind a real Envoy.
//!
//! Each bootstrap of `envoy/` runs with its own rules, so these tests cover the shipped examples. Limits are
//! used up within a period much longer than a test, by rules without a window boundary; the queue is checked against
//! the earliest times of its responses, which no load can falsify.

mod agents;
mod call_headers;
pub(crate) mod concurrency;
mod descriptors;
mod quota;
mod reservations;

use std::fs;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use kit::envoy::{Envoy, validate};
use kit::http::{self, Request, Response};
use kit::port::Port;
use kit::tollkeeper::{self, Setup, Tollkeeper, program_path};
use kit::{read, repository, wait_for};

/// A tollkeeper with the rules of `envoy/NAME.rules.yaml`, behind an Envoy with `envoy/NAME.yaml`.
struct Pair {
    envoy: Envoy,
    tollkeeper: Tollkeeper,
}

impl Pair {
    fn start(name: &str) -> Self {
        let rules = read(&repository(&format!("envoy/{name}.rules.yaml")));
        Self::start_with(name, tollkeeper::with_rules(&rules))
    }

    fn start_with(name: &str, setup: Setup) -> Self {
        Self::start_changed(name, setup, |bootstrap| bootstrap)
    }

    /// Same as [`Self::start_with`], with a changed bootstrap.
    fn start_changed(name: &str, setup: Setup, change: impl FnOnce(String) -> String) -> Self {
        let tollkeeper = setup.start();
        let envoy = Envoy::start_with(name, &[tollkeeper.grpc_port()], change);
        Self { envoy, tollkeeper }
    }

    /// Waits until tollkeeper has answered `count` calls; Envoy sends a usage report after its response.
    fn wait_for_calls(&self, count: u64) {
        wait_for("the calls to be answered", || {
            (self.envoy.stat("cluster.tollkeeper.upstream_rq_completed") >= count).then_some(())
        });
    }

    /// Envoy fails open: without this check a failed call appears as a request that passed.
    fn assert_no_call_failed(&self) {
        let failed = self.envoy.stat("cluster.upstream.ratelimit.error");
        assert_eq!(failed, 0, "calls failed; tollkeeper said:\n{}", self.tollkeeper.stderr());
    }
}

/// Statuses of `count` equal requests, sent one after the other.
fn statuses(request: &Request, count: usize) -> Vec<u16> {
    (0..count).map(|_| request.send().status).collect()
}

/// Sends `limit` requests that must pass and one that must be rejected; returns the rejection.
fn rejection_after(limit: usize, request: &Request) -> Response {
    assert_eq!(statuses(request, limit), vec![200; limit]);
    let rejection = request.send();
    assert_eq!(rejection.status, 429, "{rejection:?}");
    rejection
}

#[test]
fn shipped_bootstraps_are_valid() {
    let mut checked = Vec::new();
    for entry in fs::read_dir(repository("envoy")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".yaml") && !name.ends_with(".rules.yaml") {
            let output = validate(&path);
            assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
            checked.push(name);
        }
    }
    checked.sort();
    let names = [
        "concurrency",
        "egress",
        "gateway",
        "layers",
        "llm",
        "mcp",
        "overrides",
        "queue",
        "quota",
        "replicas",
        "tcp",
        "usage-reservations",
        "usage",
    ];
    assert_eq!(checked, names.map(|name| format!("{name}.yaml")));
}

#[test]
fn client_gets_remaining_and_retry_after_headers() {
    let pair = Pair::start("gateway");
    let request = pair.envoy.get("/");
    let limits = r#"5, 60;w=60;name="per-address", 5;w=60;name="anonymous""#;
    for left in (0..5).rev() {
        let response = request.send();
        assert_eq!(response.status, 200);
        assert_eq!(response.header("x-ratelimit-limit").as_deref(), Some(limits));
        assert_eq!(response.number("x-ratelimit-remaining"), left);
        assert!((1..=60).contains(&response.number("x-ratelimit-reset")), "{response:?}");
        assert_eq!(response.header("retry-after"), None);
    }
    let rejection = request.send();
    assert_eq!(rejection.status, 429);
    assert_eq!(rejection.header("x-envoy-ratelimited").as_deref(), Some("true"));
    assert_eq!(rejection.header("x-ratelimit-limit").as_deref(), Some(limits));
    assert_eq!(rejection.number("x-ratelimit-remaining"), 0);
    // All hits came within a few seconds; the oldest one leaves the window after a minute.
    assert!((1..=60).contains(&rejection.number("retry-after")), "{rejection:?}");
    assert_eq!(rejection.header("x-ratelimit-reset"), rejection.header("retry-after"));
    pair.assert_no_call_failed();
}

#[test]
fn address_over_its_limit_is_rejected_and_another_is_not() {
    let pair = Pair::start("gateway");
    let keyed = |key: String, last| pair.envoy.get("/").header("x-api-key", key).from(last);
    for key in 0..4 {
        assert_eq!(statuses(&keyed(format!("key-{key}"), 2), 15), vec![200; 15]);
    }
    assert_eq!(keyed("fresh".to_owned(), 2).send().status, 429);
    assert_eq!(keyed("fresh".to_owned(), 3).send().status, 200);
    // A header that claims another address changes nothing.
    assert_eq!(keyed("fresh".to_owned(), 2).header("x-forwarded-for", "192.0.2.1").send().status, 429);
    pair.assert_no_call_failed();
}

#[test]
fn requests_without_a_key_share_the_anonymous_limit() {
    let pair = Pair::start("gateway");
    let missing = pair.envoy.get("/");
    let empty = pair.envoy.get("/").header("x-api-key", "").from(2);
    let oversized = pair.envoy.get("/").header("x-api-key", "k".repeat(9000)).from(3);
    assert_eq!(statuses(&missing, 3), [200, 200, 200]);
    assert_eq!(empty.send().status, 200);
    assert_eq!(oversized.send().status, 200);
    for request in [&missing, &empty, &oversized] {
        let rejection = request.send();
        assert_eq!(rejection.status, 429);
        assert_eq!(rejection.header("content-type").as_deref(), Some("application/json"));
        assert_eq!(rejection.text(), r#"{"error":"send an x-api-key for more than 5 requests a minute"}"#);
    }
    assert_eq!(missing.clone().header("x-api-key", "alice").send().status, 200);
    pair.assert_no_call_failed();
}

#[test]
fn second_value_of_a_key_gives_no_limit_of_its_own() {
    let pair = Pair::start("gateway");
    let twice =
        |second| pair.envoy.get("/").header("x-api-key", "alice").header("x-api-key", format!("other-{second}"));
    let answers: Vec<u16> = (0..30).map(|second| twice(second).send().status).collect();
    // The bucket of 20 gains a token in 6 s.
    assert!(answers[20..].contains(&429), "{answers:?}");
    pair.assert_no_call_failed();
}

#[test]
fn key_that_is_not_utf8_is_limited() {
    let pair = Pair::start("gateway");
    let request = pair.envoy.get("/").header("x-api-key", b"caf\xe9");
    assert_eq!(statuses(&request, 20), vec![200; 20]);
    // The bucket of 20 gains a token in 6 s: of the extra requests at least one is rejected, even on a slow machine.
    assert!(statuses(&request, 10).contains(&429));
    assert_eq!(pair.envoy.get("/").header("x-api-key", b"caf\xea").send().status, 200);
    pair.assert_no_call_failed();
}

#[test]
fn spellings_and_queries_of_a_path_share_one_limit() {
    let pair = Pair::start("gateway");
    let spellings = ["/search", "/search?q=1", "/search?q=2", "/x/../search", "//search", "/%73earch", "/search/deep"];
    let request = |path| pair.envoy.get(path).header("x-api-key", "alice");
    for path in spellings {
        assert_eq!(request(path).send().status, 200, "{path}");
    }
    assert_eq!(request("/search").send().status, 200);
    for path in spellings {
        assert_eq!(request(path).send().status, 429, "{path}");
    }
    assert_eq!(request("/").send().status, 200);
    pair.assert_no_call_failed();
}

#[test]
fn route_with_the_filter_disabled_is_never_limited() {
    let pair = Pair::start("gateway");
    rejection_after(5, &pair.envoy.get("/"));
    let health = pair.envoy.get("/health");
    assert_eq!(statuses(&health, 10), vec![200; 10]);
    assert_eq!(health.send().header("x-ratelimit-limit"), None);
    pair.assert_no_call_failed();
}

#[test]
fn health_checks_of_envoy_pass() {
    let pair = Pair::start("gateway");
    wait_for("two health checks", || (pair.envoy.stat("cluster.tollkeeper.health_check.success") >= 2).then_some(()));
    assert_eq!(pair.envoy.stat("cluster.tollkeeper.health_check.failure"), 0);
    assert_eq!(pair.envoy.stat("cluster.tollkeeper.membership_healthy"), 1);
}

#[test]
fn gateway_without_the_service_fails_open_and_counts() {
    let mut pair = Pair::start("gateway");
    let request = pair.envoy.get("/");
    rejection_after(5, &request);
    pair.tollkeeper.kill();
    assert_eq!(request.send().status, 200);
    assert_eq!(pair.envoy.stat("cluster.upstream.ratelimit.failure_mode_allowed"), 1);
}

#[test]
fn response_headers_reach_the_client_once() {
    let rules = read(&repository("envoy/gateway.rules.yaml"));
    let setup = tollkeeper::with_rules(&rules).env("LIMIT_RESPONSE_HEADERS_ENABLED", "true");
    let pair = Pair::start_with("gateway", setup);
    let request = pair.envoy.get("/");
    let response = request.send();
    assert_eq!(response.number("ratelimit-limit"), 5);
    assert_eq!(response.number("ratelimit-remaining"), 4);
    assert!((1..=60).contains(&response.number("ratelimit-reset")), "{response:?}");
    let rejection = rejection_after(4, &request);
    assert_eq!(rejection.number("ratelimit-remaining"), 0);
    assert_eq!(rejection.header("ratelimit-reset"), rejection.header("retry-after"));
    pair.assert_no_call_failed();
}

#[test]
fn policy_headers_reach_the_client() {
    let rules = read(&repository("envoy/gateway.rules.yaml"));
    let pair = Pair::start_with("gateway", tollkeeper::with_rules(&rules).env("TOLLKEEPER_POLICY_HEADERS", "true"));
    let request = pair.envoy.get("/");
    let response = request.send();
    let policies = response.header("ratelimit-policy").unwrap();
    assert!(policies.contains(";q=5;w=60"), "{response:?}");
    assert!(response.header("ratelimit").unwrap().contains(";r=4;t="), "{response:?}");
    let rejection = rejection_after(4, &request);
    let wait_s = rejection.header("retry-after").unwrap();
    assert!(rejection.header("ratelimit").unwrap().ends_with(&format!(";r=0;t={wait_s}")), "{rejection:?}");
    assert_eq!(rejection.header("ratelimit-policy").unwrap(), policies);
    pair.assert_no_call_failed();
}

#[test]
fn upstream_is_told_the_exceeded_limits_by_name() {
    let rules = "\
domain: gateway
descriptors:
- {key: api_key, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 1, name: \"a, b\\r\\nx: y\"}}
- {key: api_key, value: paid, rate_limit: {unit: day, requests_per_unit: 2}}
";
    let setup = tollkeeper::with_rules(rules)
        .env("TOLLKEEPER_EXCEEDED_LIMITS_HEADER", "x-ratelimit-exceeded")
        .env("LIMIT_REQUEST_HEADERS_ENABLED", "true")
        .env("LIMIT_REQUEST_REMAINING_HEADER", "x-left");
    // The upstream shows the client what it got.
    let pair = Pair::start_changed("gateway", setup, |bootstrap| {
        let echo = |name: &str| {
            format!("{{ header: {{ key: seen-{name}, value: \"%REQ({name})%\" }}, keep_empty_value: false }}")
        };
        let headers = [echo("x-ratelimit-exceeded"), echo("x-left")].join(", ");
        let route = "direct_response: { status: 200,";
        assert!(bootstrap.contains(route));
        let changed = bootstrap
            .replace(route, &format!("response_headers_to_add: [{headers}]\n                          {route}"));
        // Envoy adds its header behind one that the client sent, so the latter has to go before.
        let mutations = "                      mutations:\n";
        assert!(changed.contains(mutations));
        changed.replace(mutations, &format!("{mutations}                        - remove: x-ratelimit-exceeded\n"))
    });
    let request = pair.envoy.get("/").header("x-api-key", "ann");
    let seen = |response: &Response| response.header("seen-x-ratelimit-exceeded").filter(|value| value != "-");
    assert_eq!(seen(&request.send()), None, "the first request exceeds nothing");
    let second = request.send();
    assert_eq!((second.status, seen(&second).as_deref()), (200, Some("a%2C%20b%0D%0Ax:%20y;shadow")), "{second:?}");
    assert_eq!(second.header("seen-x-left").as_deref(), Some("0"), "{second:?}");
    let forged = request.header("x-ratelimit-exceeded", "none").send();
    assert_eq!(seen(&forged).as_deref(), Some("a%2C%20b%0D%0Ax:%20y;shadow"), "{forged:?}");
    pair.assert_no_call_failed();
}

#[test]
fn rule_text_cannot_split_the_response() {
    let rules = r#"
        domain: gateway
        descriptors:
          - key: api_key
            rate_limit:
              unit: minute
              requests_per_unit: 0
              name: "a\r\nx-injected: by-name"
              over_limit_body: "no\r\n\r\nHTTP/1.1 200 OK\r\n"
    "#;
    let pair = Pair::start_with("gateway", tollkeeper::with_rules(rules));
    let rejection = pair.envoy.get("/").send();
    assert_eq!(rejection.status, 429);
    assert_eq!(rejection.all("x-injected"), [""; 0], "{rejection:?}");
    assert_eq!(rejection.text(), "no\r\n\r\nHTTP/1.1 200 OK\r\n");
    pair.assert_no_call_failed();
}

#[test]
fn edited_limit_applies_while_running() {
    let pair = Pair::start("gateway");
    let request = pair.envoy.get("/").header("x-api-key", "alice");
    assert_eq!(request.send().status, 200);
    let rules = read(&pair.tollkeeper.rules_path()).replace("requests_per_unit: 60", "requests_per_unit: 1");
    fs::write(pair.tollkeeper.rules_path(), rules).unwrap();
    // The first response under the new limit is a rejection: hits from before the edit count.
    let response = wait_for("an answer under the new limit", || {
        let limits = |response: &Response| response.header("x-ratelimit-limit").unwrap_or_default();
        Some(request.send()).filter(|response| limits(response).contains(r#", 1;w=60;name="per-address""#))
    });
    assert_eq!(response.status, 429);
    pair.assert_no_call_failed();
}

#[test]
fn local_layer_rejects_without_a_call_and_global_layer_with_one() {
    let pair = Pair::start("layers");
    let user = pair.envoy.get("/").header("x-user", "ann");
    let rejection = rejection_after(10, &user);
    assert_eq!(rejection.header("x-limited-by").as_deref(), Some("global"));
    assert!((1..=60).contains(&rejection.number("retry-after")), "{rejection:?}");

    // The local bucket has a capacity of 30, and 11 tokens are used.
    let rejection = rejection_after(19, &pair.envoy.get("/"));
    assert_eq!(rejection.header("x-limited-by").as_deref(), Some("local"));
    let rejection = user.send();
    assert_eq!((rejection.status, rejection.header("x-limited-by").as_deref()), (429, Some("local")));
    assert_eq!(pair.envoy.stat("cluster.tollkeeper.upstream_rq_total"), 11);
    pair.assert_no_call_failed();
}

#[test]
fn demo_runs_on_ports_of_its_own() {
    let names = ["ENVOY_PORT", "UPSTREAM_PORT", "ADMIN_PORT", "GRPC_PORT", "PORT", "DEBUG_PORT"];
    let ports = names.map(|name| (name, Port::reserve()));
    let mut demo = Command::new(repository("envoy/demo.sh"));
    demo.env("TOLLKEEPER_BIN", program_path());
    demo.envs(ports.iter().map(|(name, port)| (*name, port.number().to_string())));
    let output = demo.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.ends_with("done: every answer was the expected one\n"), "{text}");

    let refused = Command::new(repository("envoy/demo.sh")).env("ENVOY_PORT", "http").output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("ENVOY_PORT=http is not a port"), "{text}");
}

#[test]
fn replica_without_valid_rules_gets_no_calls() {
    let good = read(&repository("envoy/replicas.rules.yaml"));
    let setting = "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED";
    assert!(read(&repository("envoy/replicas.yaml")).contains(&format!("#     {setting}=true ")));
    let setup = |rules: &str| tollkeeper::with_rules(rules).env(setting, "true");
    let replicas =
        [setup(&good).start(), setup("domain: replicas\nrules: []\n").start_unhealthy(), setup(&good).start()];
    let envoy = Envoy::start("replicas", &replicas.each_ref().map(Tollkeeper::grpc_port));
    wait_for("health checks of all", || (envoy.stat("cluster.tollkeeper.health_check.attempt") >= 3).then_some(()));
    wait_for("two healthy replicas", || (envoy.stat("cluster.tollkeeper.membership_healthy") == 2).then_some(()));
    let request = envoy.get("/").header("x-user", "ann");
    assert_eq!(statuses(&request, 30), vec![200; 30]);
    assert_eq!(envoy.stat("cluster.upstream.ratelimit.ok"), 30);
    assert_eq!(envoy.stat("cluster.upstream.ratelimit.error"), 0);
}

#[test]
fn override_in_metadata_takes_precedence_over_the_rule() {
    let pair = Pair::start("overrides");
    let request = |user: &str| pair.envoy.get("/").header("x-user", user);
    for (plan, requests) in [("silver", 4), ("gold", 6)] {
        let request = request(plan).header("x-plan", plan);
        let rejection = rejection_after(requests, &request);
        assert_eq!(rejection.header("x-ratelimit-limit"), Some(format!("{requests}, {requests};w=60")));
        assert!((1..=60).contains(&rejection.number("retry-after")), "{rejection:?}");
        assert_eq!(rejection.text(), r#"{"error":"your plan has no requests left in this minute"}"#);
    }
    rejection_after(2, &request("without"));
    rejection_after(2, &request("unknown").header("x-plan", "platinum"));
    pair.assert_no_call_failed();
}

#[test]
fn access_log_names_the_rule_that_rejected() {
    let files = tempfile::tempdir().unwrap();
    let log = files.path().join("access.log");
    let rules = read(&repository("envoy/gateway.rules.yaml"));
    let setup = tollkeeper::with_rules(&rules).env("TOLLKEEPER_METADATA_VERDICTS", "true");
    let pair = Pair::start_changed("gateway", setup, |bootstrap| {
        assert!(bootstrap.contains("path: /dev/stdout"));
        bootstrap.replace("path: /dev/stdout", &format!("path: {}", log.display()))
    });
    rejection_after(5, &pair.envoy.get("/"));
    let searching = pair.envoy.get("/search?q=1").header("x-api-key", "alice");
    rejection_after(8, &searching);
    let lines = wait_for("two lines", || {
        let lines: Vec<_> = read(&log).lines().map(str::to_owned).collect();
        (lines.len() >= 2).then_some(lines)
    });
    let lines: Vec<serde_json::Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let rejections: Vec<_> = lines.iter().map(|line| (&line["over_limit"], &line["status"])).collect();
    let rule = |rule: &str, name: &str| serde_json::json!([{"rule": rule, "name": name}]);
    let (anonymous, search) = (rule("gateway.api_key_anonymous", "anonymous"), rule("gateway.path_/search*", "search"));
    let status = serde_json::json!(429);
    assert_eq!(rejections, [(&anonymous, &status), (&search, &status)], "{lines:#?}");
    pair.assert_no_call_failed();
}

#[test]
fn callers_of_a_paid_api_share_one_counter() {
    let pair = Pair::start("egress");
    let from = |service: &str| pair.envoy.get("/v1/charges").header("x-service", service);
    assert_eq!(statuses(&from("checkout"), 8), vec![200; 8]);
    assert_eq!(statuses(&from("billing"), 4), vec![200; 4]);
    for caller in [from("checkout"), from("billing"), from("reports"), pair.envoy.get("/v1/charges")] {
        let rejection = caller.send();
        assert_eq!(rejection.status, 429);
        assert!((1..=60).contains(&rejection.number("retry-after")), "{rejection:?}");
    }
    pair.assert_no_call_failed();
}

#[test]
fn one_service_cannot_use_up_the_share_of_others() {
    let pair = Pair::start("egress");
    let from = |service: &str| pair.envoy.get("/v1/charges").header("x-service", service);
    rejection_after(8, &from("batch"));
    assert_eq!(from("checkout").send().status, 200);
    pair.assert_no_call_failed();
}

#[test]
fn egress_call_is_rejected_if_the_service_is_down() {
    let mut pair = Pair::start("egress");
    let call = pair.envoy.get("/v1/charges");
    assert_eq!(call.send().status, 200);
    pair.tollkeeper.kill();
    assert_eq!(call.send().status, 503);
}

#[test]
fn usage_reported_after_a_response_rejects_the_next_request() {
    let pair = Pair::start("usage");
    let request = |path| pair.envoy.get(path).header("x-user", "ann");
    let first = request("/small").send();
    assert_eq!((first.status, first.number("x-ratelimit-remaining")), (200, 100));
    pair.wait_for_calls(2);
    let second = request("/large").send();
    assert_eq!((second.status, second.number("x-ratelimit-remaining")), (200, 90));
    pair.wait_for_calls(4);

    // All 100 units are used, and one is refilled every 36 s. A rejected request costs nothing.
    let rejection = request("/small").send();
    assert_eq!(rejection.status, 429);
    let wait_s = rejection.number("retry-after");
    assert!((1..=36).contains(&wait_s), "{rejection:?}");
    pair.wait_for_calls(6);
    assert!(request("/small").send().number("retry-after") <= wait_s);
    assert_eq!(pair.envoy.get("/small").header("x-user", "bob").send().status, 200);
    pair.assert_no_call_failed();
}

#[test]
fn usage_over_the_limit_becomes_debt() {
    let pair = Pair::start("usage");
    let request = pair.envoy.get("/large").header("x-user", "ann");
    for calls in [2, 4] {
        assert_eq!(request.send().status, 200);
        pair.wait_for_calls(calls);
    }
    // 180 of 100 units are used: 81 units must refill, 36 s each, before one more fits.
    let wait_s = request.send().number("retry-after");
    assert!((2800..=81 * 36).contains(&wait_s), "{wait_s}");
    pair.assert_no_call_failed();
}

#[test]
fn response_of_unknown_cost_counts_one() {
    let pair = Pair::start("usage");
    let request = pair.envoy.get("/other").header("x-user", "ann");
    assert_eq!(request.send().number("x-ratelimit-remaining"), 100);
    pair.wait_for_calls(2);
    assert_eq!(request.send().number("x-ratelimit-remaining"), 99);
    pair.assert_no_call_failed();
}

#[test]
fn queue_spreads_a_burst_and_rejects_the_excess() {
    let pair = Pair::start("queue");
    let request = pair.envoy.get("/");
    let began = Instant::now();
    let burst: Vec<_> = (0..40)
        .map(|_| {
            let request = request.clone();
            thread::spawn(move || (request.send(), began.elapsed()))
        })
        .collect();
    let responses: Vec<_> = burst.into_iter().map(|one| one.join().unwrap()).collect();
    let (passed, rejected): (Vec<_>, Vec<_>) = responses.into_iter().partition(|(response, _)| response.status == 200);

    // The k-th response leaves at least k x 100 ms after the first request came; 5 ms allow for clock corrections.
    assert!(passed.len() >= 8, "{} passed", passed.len());
    let mut passed: Vec<_> = passed.into_iter().map(|(_, after)| after).collect();
    passed.sort();
    for (after, place) in passed.iter().zip(0..) {
        let earliest = Duration::from_millis(100) * place;
        assert!(*after + Duration::from_millis(5) >= earliest, "place {place} left after {after:?}");
    }
    assert!(!rejected.is_empty(), "all 40 passed");
    for (rejection, _) in rejected {
        assert_eq!((rejection.status, rejection.number("retry-after")), (429, 1));
    }
    pair.assert_no_call_failed();
}

#[test]
fn queue_rejects_none_that_fit() {
    let pair = Pair::start("queue");
    let request = pair.envoy.get("/");
    let burst: Vec<_> = (0..8)
        .map(|_| {
            let request = request.clone();
            thread::spawn(move || request.send().status)
        })
        .collect();
    let statuses: Vec<_> = burst.into_iter().map(|one| one.join().unwrap()).collect();
    assert_eq!(statuses, [200; 8]);
    pair.assert_no_call_failed();
}

#[test]
fn connections_over_the_limit_are_closed_at_once() {
    let pair = Pair::start("tcp");
    let here = Ipv4Addr::LOCALHOST;
    let open: Vec<_> = (0..5).map(|_| echo(pair.envoy.port(), here)).collect();
    assert_eq!(open, [true; 5]);
    assert!(!echo(pair.envoy.port(), here));
    assert!(echo(pair.envoy.port(), Ipv4Addr::new(127, 0, 0, 2)));
    assert_eq!(pair.envoy.stat("ratelimit.tcp.error"), 0);
    assert_eq!(pair.envoy.stat("ratelimit.tcp.over_limit"), 1);
}

/// True if a new connection from that address reaches the echoing upstream.
fn echo(port: u16, from: Ipv4Addr) -> bool {
    let mut stream = http::connect(port, from).expect("the listener accepts");
    let mut response = [0; 4];
    // A close and a reset both end the connection without a reply.
    stream.write_all(b"ping").and_then(|()| stream.read_exact(&mut response)).is_ok() && response == *b"ping"
}
