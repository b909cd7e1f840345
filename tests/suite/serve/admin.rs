//! Admin actions with and without the token, and their log lines.

use std::fs;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tollkeeper::decide::log::record::DecisionRecord;

use kit::grpc::{Client, rate_limit_request};
use kit::http::{self, Response};
use kit::redis;
use kit::tollkeeper::{Setup, Tollkeeper, inherited_env, program_path, with_rules};
use kit::wait_for;

const RULES: &str = "\
domain: shop
descriptors:
- {key: login, rate_limit: {unit: day, requests_per_unit: 3}}
- key: user
  rate_limit:
  - {unit: day, requests_per_unit: 3}
  - {unit: hour, requests_per_unit: 100, algorithm: token_bucket}
- {key: path, value: /a*, share_threshold: true, rate_limit: {unit: day, requests_per_unit: 3}}
";
const TOKEN: &str = "correct horse battery staple";

fn server() -> Setup {
    with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

fn with_token() -> Setup {
    server().env("TOLLKEEPER_ADMIN_TOKEN", TOKEN)
}

/// Counts in Redis, with a timeout that is long enough for a busy machine.
fn counting_in(redis: &redis::Server, setup: Setup) -> Setup {
    setup.env("REDIS_URL", redis.address()).env("REDIS_SOCKET_TYPE", "tcp").env("TOLLKEEPER_STORE_TIMEOUT", "10s")
}

fn charge(server: &Tollkeeper, key: &str, value: &str) -> bool {
    let response = Client::connect(server.grpc_port()).call(&rate_limit_request("shop", &[(key, value)])).unwrap();
    response.overall_code == 1
}

fn charge_times(server: &Tollkeeper, key: &str, value: &str, times: usize) {
    for _ in 0..times {
        charge(server, key, value);
    }
}

fn by(token: &str, request: http::Request) -> Response {
    request.header("authorization", format!("Bearer {token}")).send()
}

fn reset(server: &Tollkeeper, token: &str, key: &str, value: &str) -> Response {
    let body = json!({"domain": "shop", "descriptors": [{"entries": [{"key": key, "value": value}]}]}).to_string();
    by(token, http::post(server.debug_port(), "/reset", body))
}

fn counters(server: &Tollkeeper, rule: &str) -> Value {
    let response = by(TOKEN, http::get(server.debug_port(), &format!("/counters?domain=shop&rule={rule}")));
    serde_json::from_slice(&response.body).unwrap_or_else(|error| panic!("{error}: {response:?}"))
}

/// `value: used`, in order.
fn used(listing: &Value) -> Vec<String> {
    let counters = listing["counters"].as_array().unwrap().iter();
    let line = |counter: &Value| {
        let used: Vec<_> =
            counter["limits"].as_array().unwrap().iter().map(|limit| limit["used"].to_string()).collect();
        format!("{}: {}", counter["entries"][0][1].as_str().unwrap(), used.join(" "))
    };
    let mut lines: Vec<_> = counters.map(line).collect();
    lines.sort();
    lines
}

fn lists_and_resets(setup: Setup, complete: bool) {
    let server = setup.env("TOLLKEEPER_ADMIN_TOKEN", TOKEN).start();
    wait_for("the store to be there", || {
        let response = by(TOKEN, http::get(server.debug_port(), "/counters?domain=shop&rule=shop.login"));
        (response.status == 200).then_some(())
    });
    charge_times(&server, "login", "ann", 5);
    charge(&server, "login", "b|o=b{}*");
    charge_times(&server, "user", "u1", 2);
    charge(&server, "path", "/a1");
    charge(&server, "path", "/a2");
    let listing = counters(&server, "shop.login");
    assert_eq!(used(&listing), ["ann: 5", "b|o=b{}*: 1"]);
    assert_eq!(listing["complete"], complete, "{listing}");
    assert_eq!(used(&counters(&server, "shop.user")), ["u1: 2 2"]);
    assert_eq!(used(&counters(&server, "shop.path_/a*")), ["/a*: 2"]);
    let few = by(TOKEN, http::get(server.debug_port(), "/counters?domain=shop&rule=shop.login&most=1")).text();
    assert_eq!(few.matches("\"used\"").count(), 1, "{few}");

    assert!(!charge(&server, "login", "ann"), "ann exceeds the limit");
    let response = reset(&server, TOKEN, "login", "ann");
    assert_eq!(
        (response.status, response.text().replace(char::is_whitespace, "")),
        (200, r#"{"reset":[1]}"#.to_owned())
    );
    assert!(charge(&server, "login", "ann"), "the counter of ann starts at 0");
    assert_eq!(used(&counters(&server, "shop.login")), ["ann: 1", "b|o=b{}*: 1"]);
    assert!(reset(&server, TOKEN, "user", "u1").text().contains('2'), "a counter for each limit");
    assert!(reset(&server, TOKEN, "user", "unknown").text().contains('0'));

    let log = server.stderr();
    let line = |what: &str| log.lines().filter(|line| line.contains(what)).map(str::to_owned).collect::<Vec<_>>();
    let resets = line("counters reset");
    assert_eq!(resets.len(), 3, "{log}");
    assert!(resets[0].contains("descriptors=\"login=ann\"") && resets[0].contains("counters=1"), "{}", resets[0]);
    assert!(resets[0].contains("peer=\"127.0.0.1:") || resets[0].contains("peer=127.0.0.1:"), "{}", resets[0]);
    assert!(line("counters listed").len() > 5, "{log}");
    assert!(!log.contains(TOKEN), "{log}");
}

/// Rules of `match` whose values share a counter, each with two values of it and one of none.
const SHARED_MATCHES: [(&str, [&str; 2], &str); 5] = [
    ("in: [\"a,b\", \"c)\"]", ["a,b", "c)"], "a"),
    ("cidr: [10.0.0.0/8, \"2001:db8::/32\"]", ["10.1.2.3", "2001:db8::1"], "11.0.0.1"),
    ("regex: \"/v[0-9]+/(login|x)\"", ["/v1/login", "/v22/x"], "/v/login"),
    ("not: { in: [x, y] }", ["z", ""], "x"),
    ("not: { cidr: [10.0.0.0/8] }", ["11.0.0.1", "no address"], "10.0.0.1"),
];

/// Lists and resets counters that all values of a `match` share.
fn lists_and_resets_shared(setup: impl Fn(&str) -> Setup) {
    for (pattern, [one, other], unmatched) in SHARED_MATCHES {
        let rules = format!(
            "domain: shop\ndescriptors:\n- key: k\n  match: {{ {pattern} }}\n  share_threshold: true\n  \
             rate_limit: {{unit: day, requests_per_unit: 3}}\n"
        );
        let server = setup(&rules).env("TOLLKEEPER_ADMIN_TOKEN", TOKEN).start();
        let body = |value: &str| {
            json!({"domain": "shop", "descriptors": [{"entries": [{"key": "k", "value": value}]}]}).to_string()
        };
        let path = server.explain(&body(one))["descriptors"][0]["rule"]["path"].as_str().unwrap().to_owned();
        let encoded: String = path.bytes().map(|byte| format!("%{byte:02X}")).collect();
        wait_for("the store to be there", || {
            let page = format!("/counters?domain=shop&rule={encoded}");
            (by(TOKEN, http::get(server.debug_port(), &page)).status == 200).then_some(())
        });
        assert!(charge(&server, "k", one) && charge(&server, "k", other) && charge(&server, "k", unmatched));
        let listing = counters(&server, &encoded);
        let [counter] = listing["counters"].as_array().unwrap().as_slice() else { panic!("{pattern}: {listing}") };
        assert_eq!((&counter["limits"][0]["used"], &counter["entries"][0][0]), (&2.into(), &"k".into()), "{listing}");
        assert!(charge(&server, "k", one) && !charge(&server, "k", other), "{pattern}: one counter");
        // By a value other than the one that was charged first.
        let response = reset(&server, TOKEN, "k", other);
        assert_eq!(response.text().replace(char::is_whitespace, ""), r#"{"reset":[1]}"#, "{pattern}");
        assert!(charge(&server, "k", one), "{pattern}: it starts at 0");
        assert_eq!(counters(&server, &encoded)["counters"][0]["limits"][0]["used"], 1, "{pattern}");
        assert_eq!(reset(&server, TOKEN, "k", unmatched).text().replace(char::is_whitespace, ""), r#"{"reset":[0]}"#);
    }
}

#[test]
fn memory_counters_that_values_of_a_match_share_are_listed_and_reset() {
    lists_and_resets_shared(|rules| with_rules(rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s"));
}

#[test]
fn redis_counters_that_values_of_a_match_share_are_listed_and_reset() {
    let redis = redis::options().start();
    lists_and_resets_shared(|rules| {
        let _: () = redis.query(&["FLUSHALL"]);
        counting_in(&redis, with_rules(rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s"))
    });
}

#[test]
fn memory_counters_are_listed_and_reset() {
    lists_and_resets(server(), false);
}

#[test]
fn redis_counters_are_listed_and_reset() {
    let redis = redis::options().start();
    lists_and_resets(counting_in(&redis, server()), true);
}

#[test]
fn counter_in_ratelimit_key_format_is_reset() {
    let redis = redis::options().start();
    let server = counting_in(&redis, with_token()).env("TOLLKEEPER_KEY_FORMAT", "ratelimit").start();
    wait_for("the store to be there", || (reset(&server, TOKEN, "login", "ann").status == 200).then_some(()));
    charge_times(&server, "login", "ann", 4);
    assert!(!charge(&server, "login", "ann"));
    assert!(reset(&server, TOKEN, "login", "ann").text().contains('1'));
    assert!(charge(&server, "login", "ann"));
}

/// Who may reach the listener must neither fill the log nor lock out those with the token.
#[test]
fn refused_requests_log_little_and_lock_nobody_out() {
    let body = "debug";
    for (server, token, status) in
        [(server().start(), None, 403), (with_token().start(), None, 401), (with_token().start(), Some("guess"), 401)]
    {
        let pages = [
            ("GET", "/blocks"),
            ("POST", "/block"),
            ("DELETE", "/block"),
            ("POST", "/reset"),
            ("GET", "/counters"),
            ("PUT", "/log_level"),
        ];
        for (method, page) in pages.iter().cycle().take(120) {
            let request = http::post(server.debug_port(), page, body).method(method);
            let response = match token {
                Some(token) => by(token, request),
                None => request.send(),
            };
            assert_eq!(response.status, status, "{method} {page} {response:?}");
        }
        let log = server.stderr();
        let lines = log.lines().filter(|line| line.contains("admin request rejected")).count();
        assert!((1..=20).contains(&lines), "{lines} lines for 120 requests: {log}");
        assert!(!log.contains("guess"), "{log}");
        if status == 401 {
            assert_eq!(put_level(&server, Some(TOKEN), "warn").status, 200);
        }
    }
}

/// A command with the token.
fn command(server: &Tollkeeper, words: &[&str]) -> Command {
    let mut command = Command::new(program_path());
    command.args(words).args(["--addr", &format!("127.0.0.1:{}", server.debug_port())]).stdout(Stdio::piped());
    command.env_clear().envs(inherited_env()).env("TOLLKEEPER_ADMIN_TOKEN", TOKEN);
    command
}

fn output(command: Child) -> String {
    let output = command.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn reset_command_deletes_counters() {
    let server = with_token().start();
    charge_times(&server, "login", "ann", 4);
    charge_times(&server, "user", "u1", 1);
    let words = ["reset", "--domain", "shop", "--descriptor", "login=ann", "--descriptor", "user=u1"];
    let text = output(command(&server, &words).spawn().unwrap());
    assert_eq!(text, "1 counter deleted: login=ann\n2 counters deleted: user=u1\n");
    assert_eq!(counters(&server, "shop.login")["counters"], json!([]));
    let refused = command(&server, &["reset", "--domain", "none", "--descriptor", "a=b"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("answered 404: domain not found"), "{refused:?}");
}

#[test]
fn tap_shows_the_decisions_of_its_filter() {
    let server = with_token().start();
    let port = server.debug_port();
    assert_eq!(http::get(port, "/tap").send().status, 401);
    assert_eq!(by(TOKEN, http::get(port, "/tap?verdict=maybe")).status, 400);
    let filter = ["--domain", "shop", "--entry", "login=ann", "--verdict", "over_limit"];
    let tap = |more: &[&str]| command(&server, &[&["tap", "--count", "2"], more].concat()).spawn().unwrap();
    let (records, lines, mut other) =
        (tap(&[&filter[..], &["--json"]].concat()), tap(&filter), tap(&["--domain", "x"]));
    wait_for("the taps", || (server.stderr().matches("decisions tapped").count() == 3).then_some(()));
    charge_times(&server, "login", "bob", 4);
    charge_times(&server, "login", "ann", 5);
    let records = output(records);
    let records: Vec<DecisionRecord<'_>> = records.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.len(), 2);
    for record in &records {
        assert_eq!((&*record.domain, record.verdict.name()), ("shop", "over_limit"));
        assert_eq!(record.descriptors[0].limits[0].requests_per_unit, 3);
    }
    let lines = output(lines);
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(lines.lines().all(|line| line.contains("over_limit  shop login=ann (1 hits) -> shop.login")), "{lines}");
    // Those that ended leave room for others.
    let _more: Vec<_> = (0..3).map(|_| tap(&["--domain", "x"])).map(KilledAtEnd).collect();
    wait_for("the taps", || (server.stderr().matches("decisions tapped").count() == 6).then_some(()));
    let refused = by(TOKEN, http::get(port, "/tap"));
    assert!(refused.status == 503 && refused.text().contains("4 taps"), "{refused:?}");
    other.kill().unwrap();
    other.wait().unwrap();
}

/// A process that ends with the test.
struct KilledAtEnd(Child);

impl Drop for KilledAtEnd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn listing_and_reset_require_the_token() {
    let cases = [
        (server(), vec![(None, 403), (Some(TOKEN), 403)]),
        (
            with_token(),
            vec![(None, 401), (Some(""), 401), (Some("correct horse battery stapl"), 401), (Some(TOKEN), 200)],
        ),
    ];
    for (setup, tries) in cases {
        let server = setup.start();
        for (token, expected) in tries {
            let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"login","value":"x"}]}]}"#;
            let requests = [
                http::post(server.debug_port(), "/reset", body),
                http::get(server.debug_port(), "/counters?domain=shop&rule=shop.login"),
            ];
            for request in requests {
                let response = match token {
                    Some(token) => by(token, request),
                    None => request.send(),
                };
                assert_eq!(response.status, expected, "{token:?}: {response:?}");
                assert_eq!(response.header("www-authenticate").is_some(), expected == 401, "{response:?}");
            }
        }
        let log = server.stderr();
        assert!(log.contains("admin request rejected") && !log.contains(TOKEN), "{log}");
    }
}

#[test]
fn token_file_is_reread_while_running() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let server = server().env("TOLLKEEPER_ADMIN_TOKEN_FILE", &file).start();
    assert_eq!(reset(&server, TOKEN, "login", "x").status, 200);
    fs::write(&file, "another token that is long enough").unwrap();
    assert_eq!(reset(&server, TOKEN, "login", "x").status, 401);
    assert_eq!(reset(&server, "another token that is long enough", "login", "x").status, 200);
    for (text, what) in [(Some(""), "too short"), (Some("short"), "too short"), (None, "No such file")] {
        match text {
            Some(text) => fs::write(&file, text).unwrap(),
            None => fs::remove_file(&file).unwrap(),
        }
        let response = reset(&server, "", "login", "x");
        assert_eq!(response.status, 500, "{response:?}");
        assert!(
            response.text().starts_with("TOLLKEEPER_ADMIN_TOKEN_FILE: ") && response.text().contains(what),
            "{response:?}"
        );
    }
}

#[test]
fn weak_token_stops_the_start() {
    let ended = server().env("TOLLKEEPER_ADMIN_TOKEN", "secret").run();
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("TOLLKEEPER_ADMIN_TOKEN") && ended.stderr.contains("16 bytes"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("secret\""), "{}", ended.stderr);
    let ended = with_token().env("TOLLKEEPER_ADMIN_TOKEN_FILE", "/nowhere").run();
    assert!(ended.stderr.contains("TOLLKEEPER_ADMIN_TOKEN_FILE"), "{}", ended.stderr);
}

#[test]
fn invalid_request_is_rejected_with_a_reason() {
    let server = with_token().start();
    let port = server.debug_port();
    let many = (0..101).map(|_| r#"{"entries":[{"key":"login","value":"x"}]}"#).collect::<Vec<_>>().join(",");
    for (request, status, why) in [
        (http::post(port, "/reset", "{"), 400, "EOF"),
        (http::post(port, "/reset", format!(r#"{{"domain":"shop","descriptors":[{many}]}}"#)), 400, "100 descriptors"),
        (http::get(port, "/reset"), 405, ""),
        (http::get(port, "/counters?domain=shop"), 400, "rule"),
        (http::get(port, "/counters?domain=none&rule=x"), 404, "domain"),
        (http::get(port, "/counters?domain=shop&rule=shop.none"), 404, "/rlconfig"),
    ] {
        let response = by(TOKEN, request);
        assert!(response.status == status && response.text().contains(why), "{response:?}");
    }
}

#[test]
fn settings_page_masks_secrets() {
    let redis = redis::options().start();
    let server = with_token()
        .env("REDIS_URL", format!("redis://me:hunter2hunter2@{}", redis.address()))
        .env("REDIS_AUTH", "opensesame!")
        .start();
    let page = http::get(server.debug_port(), "/settings").send().text();
    assert!(!page.contains("hunter2") && !page.contains("opensesame") && !page.contains(TOKEN), "{page}");
    let all: Vec<Value> = serde_json::from_str(&page).unwrap();
    let find = |name: &str| all.iter().find(|setting| setting["name"] == name).unwrap().clone();
    assert_eq!(find("TOLLKEEPER_DRAIN_PERIOD"), json!({"name": "TOLLKEEPER_DRAIN_PERIOD", "value": "0s", "set": true}));
    assert_eq!(find("NEAR_LIMIT_RATIO"), json!({"name": "NEAR_LIMIT_RATIO", "value": "0.8", "set": false}));
    assert_eq!(find("REDIS_AUTH")["set"], true);
}

/// Response to a PUT of `body` to `/log_level`.
fn put_level(server: &Tollkeeper, token: Option<&str>, body: &str) -> Response {
    let request = http::post(server.debug_port(), "/log_level", body).method("PUT");
    match token {
        Some(token) => by(token, request),
        None => request.send(),
    }
}

#[test]
fn log_level_changes_while_running() {
    let server = with_token().env("LOG_LEVEL", "error").start();
    let page = || http::get(server.debug_port(), "/log_level").send().text();
    assert_eq!(page(), "error\n");
    let changed = put_level(&server, Some(TOKEN), "INFO\n");
    assert_eq!((changed.status, changed.text().as_str()), (200, "info\n"));
    assert_eq!(page(), "info\n");
    let reload = || {
        let version = server.rules_status()["version"].as_u64().unwrap();
        fs::write(server.rules_path(), format!("{RULES}# after {version}\n")).unwrap();
        wait_for("another version", || (server.rules_status()["version"].as_u64().unwrap() > version).then_some(()));
    };
    assert!(!server.stderr().contains("rules loaded"), "a warning: {}", server.stderr());
    reload();
    wait_for("a warning", || server.stderr().contains("rules loaded").then_some(()));
    // Libraries would log about connections at this level.
    charge(&server, "login", "ann");
    assert!(!server.stderr().contains("level=debug"), "{}", server.stderr());
    assert_eq!(put_level(&server, Some(TOKEN), "trace").status, 200);
    charge(&server, "login", "ann");
    wait_for("what helps a developer", || server.stderr().contains("level=debug").then_some(()));
    assert_eq!(put_level(&server, Some(TOKEN), "panic").status, 200);
    let lines = server.stderr().matches("rules loaded").count();
    reload();
    assert_eq!(server.stderr().matches("rules loaded").count(), lines);
    assert_eq!(put_level(&server, Some(TOKEN), "debug").status, 200);
    let log = server.stderr();
    let audit: Vec<_> = log.lines().filter(|line| line.contains("log level changed")).collect();
    assert_eq!(audit.len(), 4, "at any level: {log}");
    assert!(audit[0].contains("from=error to=info") && audit[0].contains("peer=127.0.0.1:"), "{audit:?}");
    assert!(audit[3].contains("from=panic to=debug"), "{audit:?}");
}

#[test]
fn audit_lines_carry_their_target_and_path_in_text_and_json() {
    for format in ["text", "json"] {
        let server = with_token().env("LOG_FORMAT", format).start();
        charge(&server, "login", "ann");
        let statuses = [
            put_level(&server, Some(TOKEN), "debug"),
            put_level(&server, Some(TOKEN), "loud"),
            put_level(&server, None, "debug"),
            reset(&server, TOKEN, "login", "ann"),
            by(TOKEN, http::post(server.debug_port(), "/reset", r#"{"domain":"misspelled"}"#)),
            by(TOKEN, http::post(server.debug_port(), "/reset", "nonsense")),
            by(TOKEN, http::get(server.debug_port(), "/counters?domain=shop&rule=gone")),
            by(TOKEN, http::get(server.debug_port(), "/counters")),
        ]
        .map(|response| response.status);
        assert_eq!(statuses, [200, 400, 401, 200, 404, 400, 404, 400]);
        let log = server.stderr();
        let audit: Vec<_> = log.lines().filter(|line| line.contains("tollkeeper::audit")).collect();
        assert_eq!(audit.len(), statuses.len(), "{log}");
        for line in audit {
            match format {
                "json" => {
                    let line: Value = serde_json::from_str(line).unwrap();
                    assert_eq!(line["target"], "tollkeeper::audit", "{line}");
                    assert!(line["path"].as_str().unwrap().starts_with('/') && line["peer"].is_string(), "{line}");
                }
                _ => {
                    assert!(line.contains(" target=tollkeeper::audit"), "{line}");
                    assert!(line.contains(" path=/") && line.contains(" peer=127.0.0.1:"), "{line}");
                }
            }
        }
        let others = log.lines().filter(|line| line.contains("serving"));
        assert!(others.clone().count() > 0 && others.clone().all(|line| !line.contains("target")), "{log}");
    }
}

#[test]
fn log_level_change_requires_the_token_and_a_known_level() {
    let server = with_token().start();
    for (token, body, status, why) in [
        (None, "debug", 401, "Bearer"),
        (Some("another token, of some length"), "debug", 401, "Bearer"),
        (Some(TOKEN), "loud", 400, "panic, fatal, error, warn, warning, info, debug, trace"),
        (Some(TOKEN), "", 400, "panic, fatal"),
        (Some(TOKEN), "debug, please", 400, "panic, fatal"),
    ] {
        let response = put_level(&server, token, body);
        assert!(response.status == status && response.text().contains(why), "{token:?} {body}: {response:?}");
    }
    assert_eq!(http::get(server.debug_port(), "/log_level").send().text(), "warn\n");
    let log = server.stderr();
    assert!(!log.contains("log level changed") && log.contains("admin request rejected"), "{log}");
    let closed = self::server().start();
    let refused = put_level(&closed, Some(TOKEN), "debug");
    assert_eq!(refused.status, 403);
    assert!(refused.text().contains("for the server and restart it"), "{refused:?}");
}
