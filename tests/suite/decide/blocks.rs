//! Values that an operator blocks at once: in one process, and on all replicas.

use std::fs;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollkeeper::base::pb::RateLimitRequest;
use tollkeeper::base::pb::proto_json::response_to_json;
use tollkeeper::base::pb::rate_limit_descriptor::Entry;

use kit::grpc::{Client, descriptor, rate_limit_request};
use kit::http::{self, Response};
use kit::redis;
use kit::scrape::{scrape, with_prometheus};
use kit::tollkeeper::{Setup, Tollkeeper, inherited_env, program_path, with_rules, without_rules};
use kit::wait_for;

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 1000}}
";
const TOKEN: &str = "correct horse battery staple";

fn server() -> Setup {
    with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("TOLLKEEPER_ADMIN_TOKEN", TOKEN)
}

fn sharing(redis: &redis::Server) -> Setup {
    server().env("REDIS_URL", redis.address()).env("REDIS_SOCKET_TYPE", "tcp").env("TOLLKEEPER_STORE_TIMEOUT", "10s")
}

fn by(token: &str, request: http::Request) -> Response {
    request.header("authorization", format!("Bearer {token}")).send()
}

fn entry(value: &str) -> Value {
    json!({"key": "user", "value": value})
}

fn block_for(server: &Tollkeeper, value: &str, duration: &str) -> Response {
    let body = json!({"domain": "shop", "entry": entry(value), "for": duration, "reason": "abuse\r\n"}).to_string();
    by(TOKEN, http::post(server.debug_port(), "/block", body))
}

fn unblock(server: &Tollkeeper, value: &str) -> Response {
    let body = json!({"domain": "shop", "entry": entry(value)}).to_string();
    by(TOKEN, http::post(server.debug_port(), "/block", body).method("DELETE"))
}

fn request(value: &str, hits: &str) -> String {
    let path = json!([{"key": "path", "value": "/"}, {"key": "user", "value": value}]);
    let descriptors = json!([{"entries": [{"key": "user", "value": "other"}]}, {"entries": path, "hitsAddend": hits}]);
    json!({"domain": "shop", "descriptors": descriptors}).to_string()
}

fn status(server: &Tollkeeper, value: &str) -> u16 {
    server.post_json(&request(value, "1")).status
}

fn json_of(response: &Response) -> Value {
    serde_json::from_slice(&response.body).unwrap_or_else(|error| panic!("{error}: {response:?}"))
}

/// Waits for a status, for a second at most after `since`.
fn expect_within_a_second(server: &Tollkeeper, value: &str, expected: u16, since: Instant) {
    wait_for("the change of a block to be known", || (status(server, value) == expected).then_some(()));
    assert!(since.elapsed() < Duration::from_secs(1), "it took {:?}", since.elapsed());
}

#[test]
fn blocked_value_is_rejected_in_any_descriptor_until_it_is_unblocked() {
    let (setup, prometheus) = with_prometheus(server());
    let server = setup.start();
    assert_eq!(status(&server, "ann"), 200);
    let blocked = block_for(&server, "ann", "10m");
    assert_eq!(blocked.status, 200, "{blocked:?}");
    let answer = json_of(&blocked);
    assert_eq!((&answer["scope"], &answer["reason"]), (&"process".into(), &"abuse".into()), "{answer}");

    let rejected = server.post_json(&request("ann", "1"));
    assert_eq!(rejected.status, 429);
    assert!((598..=600).contains(&rejected.number("retry-after")), "{rejected:?}");
    let body = json_of(&rejected);
    assert_eq!((&body["statuses"][0]["code"], &body["statuses"][1]["code"]), (&"OK".into(), &"OVER_LIMIT".into()));
    assert!(!rejected.text().contains("abuse"), "the client is not told the reason");
    assert_eq!(status(&server, "bob"), 200);
    // The rule `user` matches nothing below `path`, and no counter was charged.
    let explained = server.explain(&request("ann", "0"));
    assert_eq!(
        (&explained["blocked"][0]["entry"], &explained["blocked"][0]["reason"]),
        (&"user=ann".into(), &"abuse".into())
    );
    let list = json_of(&by(TOKEN, http::get(server.debug_port(), "/blocks")));
    assert_eq!((list["blocks"].as_array().unwrap().len(), &list["blocks"][0]["entry"]), (1, &entry("ann")), "{list}");
    let metrics = scrape(prometheus.number());
    assert_eq!(metrics.count("tollkeeper_blocked_requests_total{domain=\"shop\"}"), 1);
    assert_eq!(metrics.count("tollkeeper_blocked_values"), 1);

    assert_eq!(unblock(&server, "ann").status, 200);
    assert_eq!((status(&server, "ann"), unblock(&server, "ann").status), (200, 404));
    let log = server.stderr();
    for line in ["value blocked", "value unblocked", "blocks listed"] {
        assert!(log.contains(line), "{line}: {log}");
    }
    assert!(log.contains("user") && log.contains("ann") && !log.contains(TOKEN), "{log}");
}

#[test]
fn block_ends_at_its_time_and_can_be_changed() {
    let server = server().start();
    assert_eq!(block_for(&server, "ann", "10m").status, 200);
    assert_eq!(block_for(&server, "ann", "1s").status, 200);
    assert_eq!(status(&server, "ann"), 429);
    wait_for("the block to end", || (status(&server, "ann") == 200).then_some(()));
    let list = json_of(&by(TOKEN, http::get(server.debug_port(), "/blocks")));
    assert_eq!(list["blocks"], json!([]));
}

#[test]
fn shadow_mode_rejects_no_blocked_value() {
    let server = server().env("SHADOW_MODE", "true").start();
    let answer = json_of(&block_for(&server, "ann", "10m"));
    assert_eq!(answer["without_effect_by_shadow_mode"], true);
    assert_eq!(status(&server, "ann"), 200);
}

#[test]
fn pages_need_the_token_and_a_valid_body() {
    let server = server().start();
    let port = server.debug_port();
    for request in [
        http::get(port, "/blocks"),
        http::post(port, "/block", "{}"),
        http::post(port, "/block", "{}").method("DELETE"),
    ] {
        assert_eq!(by("wrong token", request).status, 401);
    }
    let valid = json!({"domain": "shop", "entry": entry("ann"), "for": "10m", "reason": "r"});
    let with = |name: &str, value: Value| {
        let mut body = valid.clone();
        body[name] = value;
        body.to_string()
    };
    let without = |name: &str| {
        let mut body = valid.clone();
        body.as_object_mut().unwrap().remove(name);
        body.to_string()
    };
    for (body, status, problem) in [
        (String::new(), 400, "write {\"domain\""),
        ("[".repeat(100_000), 400, "write {\"domain\""),
        (with("more", json!(1)), 400, "unknown field `more`"),
        (with("domain", json!("unknown")), 404, "domain not found"),
        (with("domain", json!("")), 400, "`domain` must have 1 to 256 bytes"),
        (with("entry", json!({"key": "", "value": "x"})), 400, "`entry.key` must have 1 to 256 bytes"),
        (with("entry", json!({"key": "k", "value": "x".repeat(1025)})), 400, "`entry.value` must have 0 to 1024 bytes"),
        (with("reason", json!("x".repeat(257))), 400, "`reason` must have 0 to 256 bytes"),
        (with("reason", json!(" ")), 400, "write a `reason`"),
        (without("reason"), 400, "write a `reason`"),
        (without("for"), 400, "write either `until` or `for`"),
        (with("until", json!("2099-01-01T00:00:00Z")), 400, "write either `until` or `for`"),
        (with("for", json!("soon")), 400, "`for` must be a duration such as 10m"),
        (with("for", json!("0s")), 400, "in the future, within 366 days"),
        (with("for", json!("10000h")), 400, "in the future, within 366 days"),
    ] {
        let response = by(TOKEN, http::post(port, "/block", body.clone()));
        assert_eq!(response.status, status, "{body:.100}: {response:?}");
        assert!(response.text().contains(problem), "{body:.100}: {}", response.text());
    }
    let mut past = valid.clone();
    past.as_object_mut().unwrap().remove("for");
    past["until"] = json!("2020-01-01T00:00:00Z");
    assert_eq!(by(TOKEN, http::post(port, "/block", past.to_string())).status, 400);
    assert!(server.stderr().contains("admin request rejected"), "{}", server.stderr());
    assert_eq!(status(&server, "ann"), 200);
}

#[test]
fn replicas_share_blocks_within_a_second_and_keep_them_over_a_restart() {
    let redis = redis::options().start();
    let (a, b) = (sharing(&redis).start(), sharing(&redis).start());
    let since = Instant::now();
    let answer = json_of(&block_for(&a, "ann", "10m"));
    assert_eq!(answer["scope"], "fleet");
    assert_eq!(status(&a, "ann"), 429);
    expect_within_a_second(&b, "ann", 429, since);
    drop(b);
    let b = sharing(&redis).start();
    assert_eq!(status(&b, "ann"), 429, "the first request after a restart");
    let since = Instant::now();
    assert_eq!(unblock(&b, "ann").status, 200);
    expect_within_a_second(&a, "ann", 200, since);

    block_for(&a, "bob", "1s");
    wait_for("the block to reach the other", || (status(&b, "bob") == 429).then_some(()));
    wait_for("the block to end", || ([&a, &b].map(|server| status(server, "bob")) == [200, 200]).then_some(()));
}

#[test]
fn blocks_stay_while_redis_is_away_and_are_written_back_after_it_lost_its_data() {
    let redis = redis::options().start();
    let server = sharing(&redis).start();
    assert_eq!(block_for(&server, "ann", "10m").status, 200);
    redis.freeze();
    assert_eq!(status(&server, "ann"), 429, "no call to Redis is needed");
    assert_eq!(block_for(&server, "bob", "10m").status, 502);
    redis.thaw();
    let _: () = redis.query(&["FLUSHALL"]);
    wait_for("the block to be written back", || {
        (redis.query::<u64>(&["HLEN", "tk1:{blocks}:list"]) >= 1).then_some(())
    });
    let other = sharing(&redis).start();
    wait_for("the other to know", || (status(&other, "ann") == 429).then_some(()));
    assert_eq!(status(&server, "ann"), 429);
}

#[test]
fn number_of_blocks_is_bounded_and_what_is_no_block_is_ignored() {
    let redis = redis::options().start();
    let fill = "local until_us = redis.call('TIME')[1] * 1000000 + 600000000
        for i = 1, 9999 do
            local record = '{\"domain\":\"shop\",\"key\":\"user\",\"value\":\"u' .. i .. '\",\"reason\":\"r\",\"until_us\":'
            redis.call('HSET', KEYS[1], i, record .. string.format('%.0f', until_us) .. '}')
        end
        redis.call('HSET', KEYS[1], 'bad', 'no block')
        redis.call('SET', KEYS[2], 'v')";
    let _: () = redis.query(&["EVAL", fill, "2", "tk1:{blocks}:list", "tk1:{blocks}:version"]);
    let server = sharing(&redis).start();
    assert_eq!(["u1", "u9999", "ann"].map(|value| status(&server, value)), [429, 429, 200]);
    let full = block_for(&server, "ann", "10m");
    assert_eq!(full.status, 409, "{full:?}");
    assert!(full.text().contains("10000 blocks already"), "{}", full.text());
    let _: () = redis.query(&["HDEL", "tk1:{blocks}:list", "bad"]);
    assert_eq!(block_for(&server, "ann", "10m").status, 200);
    assert_eq!(status(&server, "ann"), 429);
}

/// Runs a command against the server, with its token.
fn command(server: &Tollkeeper, words: &[&str]) -> Output {
    let mut command = Command::new(program_path());
    command.args(words).args(["--addr", &format!("127.0.0.1:{}", server.debug_port())]);
    command.env_clear().envs(inherited_env()).env("TOLLKEEPER_ADMIN_TOKEN", TOKEN).output().unwrap()
}

/// Standard output of a command that succeeds.
fn output(server: &Tollkeeper, words: &[&str]) -> String {
    let output = command(server, words);
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Standard error of a command that fails.
fn failure(server: &Tollkeeper, words: &[&str]) -> String {
    let output = command(server, words);
    assert_eq!(output.status.code(), Some(1), "{words:?}: {output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn commands_block_list_and_unblock() {
    let server = server().start();
    assert_eq!(output(&server, &["blocks"]), "nothing is blocked\n");
    let entry = ["--domain", "shop", "--key", "user", "--value", "ann"];
    let blocked = output(&server, &[&["block"], &entry[..], &["--for", "10m", "--reason", "abuse"]].concat());
    assert!(blocked.starts_with("blocked user=ann until 2") && blocked.contains("on this server only"), "{blocked}");
    assert!(!blocked.contains("warning"), "{blocked}");
    let unknown_key = ["--domain", "shop", "--key", "usr", "--value", "x"];
    let unknown_key_block = [&["block"], &unknown_key[..], &["--for", "10m", "--reason", "typo"]].concat();
    let warned = output(&server, &unknown_key_block);
    assert!(warned.contains("warning: no rule of this domain has this key"), "{warned}");
    output(&server, &[&["unblock"], &unknown_key[..]].concat());
    assert_eq!((status(&server, "ann"), status(&server, "bob")), (429, 200));
    let list = output(&server, &["blocks"]);
    assert!(["user=ann", "abuse", "1 of at most 10000"].iter().all(|text| list.contains(text)), "{list}");
    let json: Value = serde_json::from_str(&output(&server, &["blocks", "--json"])).unwrap();
    assert_eq!(json["blocks"][0]["entry"], self::entry("ann"));
    let unblock = [&["unblock"], &entry[..]].concat();
    assert!(output(&server, &unblock).starts_with("unblocked on this server only"));
    assert_eq!(status(&server, "ann"), 200);
    assert!(failure(&server, &unblock).contains("answered 404: there is no such block"));
    let long = [&["block"], &entry[..], &["--until", "2999-01-01T00:00:00Z", "--reason", "r"]].concat();
    assert!(failure(&server, &long).contains("within 366 days"));
    let unknown = ["block", "--domain", "nowhere", "--key", "k", "--value", "v", "--for", "1m", "--reason", "r"];
    assert!(failure(&server, &unknown).contains("domain not found"));
}

#[test]
fn commands_say_which_token_is_missing() {
    let server = server().start();
    let mut command = Command::new(program_path());
    command.args(["blocks", "--addr", &format!("127.0.0.1:{}", server.debug_port())]).env_clear().envs(inherited_env());
    let without = command.output().unwrap();
    assert_eq!(without.status.code(), Some(1), "{without:?}");
    assert!(String::from_utf8_lossy(&without.stderr).contains("set TOLLKEEPER_ADMIN_TOKEN or"), "{without:?}");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    fs::write(&file, format!("{TOKEN}\n")).unwrap();
    assert!(command.env("TOLLKEEPER_ADMIN_TOKEN_FILE", &file).output().unwrap().status.success());
    fs::write(&file, "another token, long enough").unwrap();
    let wrong = command.output().unwrap();
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("answered 401"), "{wrong:?}");
    let hidden = String::from_utf8_lossy(&wrong.stderr).contains("another token");
    assert!(!hidden, "{wrong:?}");
}

/// A request whose second descriptor has the value.
fn bytes_request(value: &'static [u8]) -> RateLimitRequest {
    let mut request = rate_limit_request("shop", &[("user", "other")]);
    let mut with_bytes = descriptor(&[("user", "")]);
    with_bytes.entries = vec![Entry { key: "user".into(), value: value.into() }];
    request.descriptors.push(with_bytes);
    request
}

#[test]
fn bytes_that_are_not_utf8_are_blocked_in_base64_and_survive_redis() {
    let redis = redis::options().start();
    let (a, b) = (sharing(&redis).start(), sharing(&redis).start());
    let entry = ["--domain", "shop", "--key", "user", "--value-base64", "/wA="];
    output(&a, &[&["block"], &entry[..], &["--for", "10m", "--reason", "r"]].concat());
    for server in [&a, &b] {
        let client = Client::connect(server.grpc_port());
        let code = |value| client.call(&bytes_request(value)).unwrap().overall_code;
        wait_for("the block to be known", || (code(b"\xff\0") == 2).then_some(()));
        assert_eq!((code(b"\xff"), code(b"")), (1, 1));
    }
    let listed = json_of(&by(TOKEN, http::get(b.debug_port(), "/blocks")));
    assert_eq!(listed["blocks"][0]["entry"], json!({"key": "user", "value_base64": "/wA="}), "{listed}");
    assert!(output(&b, &["blocks"]).contains("user=base64:/wA="));
    output(&b, &[&["unblock"], &entry[..]].concat());
    assert_eq!(Client::connect(b.grpc_port()).call(&bytes_request(b"\xff\0")).unwrap().overall_code, 1);

    let post = |entry: Value| {
        let body = json!({"domain": "shop", "entry": entry, "for": "1m", "reason": "r"}).to_string();
        let response = by(TOKEN, http::post(a.debug_port(), "/block", body));
        (response.status, response.text().to_owned())
    };
    for (entry, problem) in [
        (json!({"key": "user"}), "write either `entry.value`, or `entry.value_base64`"),
        (json!({"key": "user", "value": "a", "value_base64": "YQ=="}), "write either `entry.value`"),
        (json!({"key": "user", "value_base64": "?"}), "`entry.value_base64` must be base64"),
        (json!({"key": "user", "value_base32": "A"}), "unknown field `value_base32`"),
    ] {
        let (status, text) = post(entry.clone());
        assert!(status == 400 && text.contains(problem), "{entry}: {status} {text}");
    }
}

#[test]
fn refund_beside_a_blocked_entry_is_not_lost() {
    let redis = redis::options().start();
    for setup in [server(), sharing(&redis)] {
        let server = setup.start();
        let client = Client::connect(server.grpc_port());
        let mut charge = rate_limit_request("shop", &[("user", "bob")]);
        charge.descriptors[0].hits_addend = Some(10);
        assert_eq!(client.call(&charge).unwrap().overall_code, 1);
        assert_eq!(block_for(&server, "ann", "10m").status, 200);
        let mut request = rate_limit_request("shop", &[("user", "bob")]);
        (request.descriptors[0].hits_addend, request.descriptors[0].is_negative_hits) = (Some(4), true);
        request.descriptors.push(descriptor(&[("user", "ann")]));
        request.descriptors.push(descriptor(&[("user", "cat")]));
        let rejected = client.call(&request).unwrap();
        assert_eq!(rejected.overall_code, 2);
        assert_eq!(rejected.statuses.iter().map(|status| status.code).collect::<Vec<_>>(), [1, 2, 1]);
        let used = |user: &str| {
            let body = json!({"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": user}]}]});
            server.explain(&body.to_string())["descriptors"][0]["limits"][0]["counter"]["used"].as_u64()
        };
        assert_eq!((used("bob"), used("ann"), used("cat")), (Some(6), Some(0), Some(0)), "only the refund counts");
    }
}

/// An error would let them pass a proxy that admits requests on errors.
#[test]
fn blocked_requests_are_rejected_without_rules_and_with_too_many_descriptors_for_them() {
    let level = |indent: &str, below: &str| {
        (0..20).map(|at| format!("{indent}- key: k\n{indent}  value: '*a{at}*'\n{below}")).collect::<String>()
    };
    let last = "    descriptors: [{key: z, value: z, rate_limit: {unit: day, requests_per_unit: 1}}]\n";
    let both = level("", &format!("  descriptors:\n{}", level("  ", last)));
    let backtracking = format!("domain: shop\nmatching: {{order: any, backtrack: true}}\ndescriptors:\n{both}");
    for (setup, count) in
        [(without_rules().arg("--config").arg("/nowhere/rules.yaml"), 1), (with_rules(&backtracking), 300)]
    {
        let setup = setup.env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("TOLLKEEPER_ADMIN_TOKEN", TOKEN);
        let server = if count == 1 { setup.start_unhealthy() } else { setup.start() };
        let client = Client::connect(server.grpc_port());
        let mut request = rate_limit_request("shop", &[("user", "ann")]);
        request.descriptors.resize(count, descriptor(&[("k", "x")]));
        assert!(client.call(&request).is_err());
        assert_eq!(block_for(&server, "ann", "10m").status, 200);
        let rejected = client.call(&request).unwrap();
        assert_eq!((rejected.overall_code, rejected.statuses[0].code, rejected.statuses.len()), (2, 2, count));
    }
}

#[test]
fn reason_is_in_the_metadata_the_decision_log_and_why() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log.jsonl");
    let mut server = server()
        .env("TOLLKEEPER_METADATA_VERDICTS", "true")
        .env("TOLLKEEPER_DECISION_LOG", format!("file:{}", log.display()))
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
        .start();
    assert_eq!(block_for(&server, "ann", "10m").status, 200);
    let mut request = rate_limit_request("shop", &[("user", "ann")]);
    request.descriptors.push(descriptor(&[("user", "bob")]));
    let response = Client::connect(server.grpc_port()).call(&request).unwrap();
    let metadata: Value = serde_json::from_str(&response_to_json(&response).unwrap()).unwrap();
    let blocked = &metadata["dynamicMetadata"]["over_limit"][0]["blocked"];
    assert_eq!((&blocked["key"], &blocked["reason"]), (&"user".into(), &"abuse".into()), "{metadata}");
    assert!(!metadata.to_string().contains("ann"), "values stay out: {metadata}");
    let all_of_bob = RateLimitRequest { hits_addend: 1000, ..rate_limit_request("shop", &[("user", "bob")]) };
    assert!(response_to_json(&Client::connect(server.grpc_port()).call(&all_of_bob).unwrap()).unwrap().contains("OK"));
    server.signal("TERM");
    assert!(server.wait().success());
    let lines = fs::read_to_string(&log).unwrap();
    let decision: Value = lines.lines().find(|line| line.contains("\"decision\"")).unwrap().parse().unwrap();
    let [of_ann, of_bob] = [0, 1].map(|index| decision["descriptors"][index].clone());
    assert_eq!((&of_ann["decided_by"], &of_ann["block"]["reason"]), (&"block".into(), &"abuse".into()), "{decision}");
    assert_eq!((&of_bob["decided_by"], &of_bob["block"]), (&Value::Null, &Value::Null), "{decision}");
    let mut why = Command::new(program_path());
    why.args(["why", "--domain", "shop", "--descriptor", "user=ann", "--log"]).arg(&log);
    let text = String::from_utf8(why.env_clear().envs(inherited_env()).output().unwrap().stdout).unwrap();
    assert!(text.contains("1 by the block of user until 2") && text.contains(": abuse"), "{text}");
    assert!(text.contains("would have passed after `tollkeeper unblock`"), "{text}");
    let mut simulate = Command::new(program_path());
    simulate.args(["simulate", "--json", "--traffic"]).arg(&log).env_clear().envs(inherited_env());
    let results: Value = serde_json::from_slice(&simulate.output().unwrap().stdout).unwrap();
    assert_eq!((&results["traffic"]["requests"], &results["new"]["rejected"]), (&2.into(), &1.into()), "{results}");
    assert_eq!(
        (&results["verification"]["compared"], &results["verification"]["agreed"]),
        (&1.into(), &1.into()),
        "{results}"
    );
}

#[test]
fn fleet_shows_blocks_without_their_values() {
    let redis = redis::options().start();
    let server = sharing(&redis).start();
    assert_eq!(block_for(&server, "ann", "10m").status, 200);
    assert_eq!(status(&server, "ann"), 429);
    let fleet = wait_for("the block in /fleet", || {
        let fleet = json_of(&http::get(server.debug_port(), "/fleet").send());
        (fleet["replicas"][0]["blocks"]["rejected_requests"] == 1).then_some(fleet)
    });
    assert_eq!((&fleet["blocked_values"], &fleet["replicas"][0]["blocks"]["values"]), (&1.into(), &1.into()));
    let block = &fleet["blocks"][0];
    assert_eq!((&block["domain"], &block["key"], &block["reason"]), (&"shop".into(), &"user".into(), &"abuse".into()));
    assert!(!fleet["blocks"].to_string().contains("ann"), "{fleet}");
    let text = http::get(server.debug_port(), "/fleet?format=text").send();
    assert!(text.text().contains("Blocked values: 1, which rejected 1 requests"), "{}", text.text());
    assert!(text.text().contains("shop user") && text.text().contains("abuse"), "{}", text.text());
}

mod matching {
    use tollkeeper::base::clock::Time;
    use tollkeeper::decide::blocks::{Block, Blocks};
    use tollkeeper::limit::request::{Descriptor, Entry, Hits, Request};

    fn block(value: &str, until_s: u64) -> Block {
        let [domain, reason] = ["shop", "abuse"].map(str::to_owned);
        Block { domain, key: b"user".to_vec(), value: value.into(), until: Time::from_secs(until_s), reason }
    }

    fn request<'r>(domain: &'r str, value: &'r str, hits: Hits) -> Request<'r> {
        let entries = [("path", "/"), ("user", value)];
        let entries = entries.iter().map(|(key, value)| Entry { key: key.as_bytes(), value: value.as_bytes() });
        let descriptor = Descriptor { entries: entries.collect(), hits, hits_addend: None, limit_override: None };
        Request { domain, descriptors: [descriptor].into_iter().collect(), hits_addend: 0 }
    }

    #[test]
    fn entry_is_blocked_in_its_domain_until_the_end_unless_hits_are_refunded() {
        let blocks = Blocks::default();
        let meets = |domain, value, hits, at| {
            blocks.find_for_request(&request(domain, value, hits), Time::from_secs(at)).is_some()
        };
        assert!(!meets("shop", "ann", Hits::Charge(1), 1));
        blocks.replace_all(vec![block("ann", 10)]);
        assert!(meets("shop", "ann", Hits::Charge(1), 9) && meets("shop", "ann", Hits::Peek, 9));
        assert!(!meets("shop", "ann", Hits::Refund(1), 9));
        assert!(!meets("shop", "ann", Hits::Charge(1), 10), "the block has ended");
        assert!(!meets("shop", "bob", Hits::Charge(1), 9) && !meets("api", "ann", Hits::Charge(1), 9));
        assert_eq!((blocks.list(Time::from_secs(9)).len(), blocks.list(Time::from_secs(10)).len()), (1, 0));
        blocks.replace_all(Vec::new());
        assert!(!meets("shop", "ann", Hits::Charge(1), 9));
    }

    #[test]
    fn rejections_of_many_domains_are_counted_together() {
        let blocks = Blocks::default();
        (0..150).for_each(|number| blocks.count_rejection(&number.to_string()));
        let counts = blocks.rejection_counts();
        assert_eq!(counts.len(), 101);
        assert_eq!(counts.iter().find(|(name, _)| name == "other").map(|(_, count)| *count), Some(50));
    }
}
