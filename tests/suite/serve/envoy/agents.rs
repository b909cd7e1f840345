//! Calls of MCP tools and tokens of models, through an Envoy that reads them without a gateway.

use std::io::Write as _;

use kit::http::{self, Request, Response};
use kit::wait_for;

use super::{Pair, statuses};

const DELETE_USER: &str = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"delete_user"}}"#;

/// A message to an MCP server, as its clients send it.
fn message(pair: &Pair, agent: &str, message: &str) -> Request {
    post(pair, message).header("x-agent", agent).header("content-type", "application/json")
}

fn post(pair: &Pair, body: &str) -> Request {
    http::post(pair.envoy.port(), "/mcp", body).header("accept", "application/json, text/event-stream")
}

fn tool_call(pair: &Pair, agent: &str, tool: &str) -> Request {
    message(pair, agent, &DELETE_USER.replace("delete_user", tool))
}

#[test]
fn agent_has_a_limit_for_each_tool() {
    let pair = Pair::start("mcp");
    assert_eq!(statuses(&tool_call(&pair, "ann", "delete_user"), 3), [200, 429, 429]);
    assert_eq!(statuses(&tool_call(&pair, "ann", "search"), 5), [200, 200, 200, 429, 429]);
    assert_eq!(statuses(&tool_call(&pair, "ann", "read_file"), 4), [200, 200, 200, 429]);
    assert_eq!(statuses(&tool_call(&pair, "bob", "delete_user"), 2), [200, 429]);
    for method in ["initialize", "tools/list", "resources/list", "ping"] {
        let other = message(&pair, "ann", &format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}"}}"#));
        assert_eq!(statuses(&other, 5), [200; 5], "{method}");
    }
    let events = pair.envoy.get("/mcp").header("accept", "text/event-stream").header("x-agent", "ann");
    assert_eq!(statuses(&events, 5), [200; 5]);
    pair.assert_no_call_failed();
}

#[test]
fn rejected_tool_call_gets_an_error_of_json_rpc() {
    let pair = Pair::start("mcp");
    let request = tool_call(&pair, "ann", "delete_user");
    assert_eq!(request.send().text(), r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#);
    let rejection = request.send();
    assert_eq!(rejection.header("content-type").as_deref(), Some("application/json"));
    let wait_s = rejection.number("retry-after");
    assert!((1..=60).contains(&wait_s), "{rejection:?}");
    let expected = format!(
        r#"{{"jsonrpc":"2.0","id":null,"error":{{"code":-32029,"message":"Too many requests","data":{{"limit":"delete_user","retryAfterSeconds":{wait_s}}}}}}}"#
    );
    assert_eq!(rejection.text(), expected);
    pair.assert_no_call_failed();
}

#[test]
fn agents_without_a_name_share_a_limit() {
    let pair = Pair::start("mcp");
    let unnamed = post(&pair, DELETE_USER).header("content-type", "application/json");
    assert_eq!(unnamed.send().status, 200);
    assert_eq!(message(&pair, "", DELETE_USER).send().status, 429);
    assert_eq!(message(&pair, "anonymous", DELETE_USER).send().status, 429);
    pair.assert_no_call_failed();
}

#[test]
fn message_that_envoy_cannot_read_is_rejected() {
    let pair = Pair::start("mcp");
    let large = DELETE_USER.replace(r#""params":{"#, &format!(r#""params":{{"text":"{}","#, "x".repeat(66_000)));
    let messages = [
        "delete_user",
        r#"{"method":"tools/call","params":{"name":"delete_user"}}"#,
        &format!("[{DELETE_USER}]"),
        &format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping"}}{DELETE_USER}"#),
        &DELETE_USER.replace("}}", r#"},"method":"ping"}"#),
        &DELETE_USER.replace("}}", r#"},"\u006dethod":"ping"}"#),
        &DELETE_USER.replace("}}", r#","name":"search"}}"#),
        &DELETE_USER.replace("}}", r#"},"params":{}}"#),
        &large,
    ];
    for body in messages {
        let response = message(&pair, "ann", body).send();
        assert_eq!(response.status, 400, "{response:?}: {body:.100}");
    }
    let with = |name: &str, value: &str| post(&pair, DELETE_USER).header("x-agent", "ann").header(name, value);
    for request in [
        with("content-type", "text/plain"),
        with("x-without", "content-type"),
        message(&pair, "ann", DELETE_USER).method("PUT"),
        http::post(pair.envoy.port(), "/mcp", DELETE_USER).header("content-type", "application/json"),
        message(&pair, "ann", "").header("content-encoding", "gzip"),
        pair.envoy.get("/mcp").header("accept", "text/html"),
    ] {
        let response = request.send();
        assert_eq!(response.status, 400, "{response:?}");
    }
    assert_eq!(pair.envoy.stat("cluster.tollkeeper.upstream_rq_total"), 0, "nothing was counted");
}

#[test]
fn spelling_of_a_tool_call_gets_around_no_limit() {
    let pair = Pair::start("mcp");
    assert_eq!(message(&pair, "ann", DELETE_USER).send().status, 200);
    let large = DELETE_USER.replace(r#""params":{"#, &format!(r#""params":{{"text":"{}","#, "x".repeat(60_000)));
    for same in [
        &DELETE_USER.replace("method", r"m\u0065thod"),
        &DELETE_USER.replace("delete_user", r"d\u0065lete_user"),
        &DELETE_USER.replace("}}", r#","arguments":{"name":"search"}}}"#),
        &DELETE_USER.replace("}}", r#"},"params.name":"search"}"#),
        &large,
    ] {
        assert_eq!(message(&pair, "ann", same).send().status, 429, "{same:.100}");
    }
    // A name that is missing or is no text counts as the tool `none`.
    let unnamed = [r#"{"name":5}"#, r#"{"name":["delete_user"]}"#, "{}", r#"["delete_user"]"#]
        .map(|params| message(&pair, "ann", &DELETE_USER.replace(r#"{"name":"delete_user"}"#, params)).send().status);
    assert_eq!(unnamed, [200, 200, 200, 429]);
    pair.assert_no_call_failed();
}

/// Sends a request of a team, and waits until what it cost is charged. Each request makes two calls.
fn send_and_charge(pair: &Pair, request: &Request, number: &mut u64) -> Response {
    let response = request.send();
    *number += 1;
    pair.wait_for_calls(*number * 2);
    response
}

fn charged_statuses(pair: &Pair, request: &Request, count: usize, number: &mut u64) -> Vec<u16> {
    (0..count).map(|_| send_and_charge(pair, request, number).status).collect()
}

#[test]
fn team_has_tokens_and_a_price_that_weights_them() {
    let pair = Pair::start("llm");
    let mut number = 0;
    let request = |team: &str, path: &str| pair.envoy.get(path).header("x-team", team);
    // 100 tokens, and a price of 20 + 4 x 80: the price is used up first.
    let chat = request("red", "/v1/chat/completions");
    assert_eq!(charged_statuses(&pair, &chat, 8, &mut number), [200, 200, 200, 200, 200, 200, 429, 429]);
    let rejection = send_and_charge(&pair, &chat, &mut number);
    assert!(rejection.text().contains("Rate limit reached for price: limit 1800,"), "{rejection:?}");
    assert_eq!(rejection.header("x-should-retry").as_deref(), Some("false"));
    // 610 tokens, and a price of 590 + 4 x 20: the tokens are used up first.
    let long = request("blue", "/v1/long-prompt").header("accept-encoding", "gzip");
    assert_eq!(charged_statuses(&pair, &long, 3, &mut number), [200, 200, 429]);
    let rejection = send_and_charge(&pair, &long, &mut number);
    assert!(rejection.text().contains("Rate limit reached for tokens: limit 1000,"), "{rejection:?}");
    // Teams without a name share one budget.
    let unnamed = pair.envoy.get("/v1/long-prompt");
    assert_eq!(charged_statuses(&pair, &unnamed, 2, &mut number), [200, 200]);
    assert_eq!(request("", "/v1/long-prompt").send().status, 429);
    pair.assert_no_call_failed();
}

#[test]
fn answer_without_usage_has_a_cost() {
    let pair = Pair::start("llm");
    let stream = pair.envoy.get("/v1/stream").header("x-team", "red");
    assert_eq!(charged_statuses(&pair, &stream, 3, &mut 0), [200, 200, 429]);
    pair.assert_no_call_failed();
}

#[test]
fn embeddings_cost_their_input() {
    let pair = Pair::start("llm");
    let embeddings = pair.envoy.get("/v1/embeddings").header("x-team", "red");
    assert_eq!(charged_statuses(&pair, &embeddings, 10, &mut 0), [200; 10]);
    // 80 of 1000 tokens are used, and one is refilled every 3.6 s.
    let left = embeddings.send().number("x-ratelimit-remaining");
    assert!((920..=950).contains(&left), "{left}");
    pair.assert_no_call_failed();
}

#[test]
fn client_that_goes_before_the_answer_pays() {
    let pair = Pair::start_changed(
        "llm",
        super::tollkeeper::with_rules(&kit::read(&kit::repository("envoy/llm.rules.yaml"))),
        |bootstrap| {
            // The upstream answers after a delay that no test waits for.
            let fault = r#"- { name: delay, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault, delay: { fixed_delay: 600s, percentage: { numerator: 100 } } } }"#;
            let (clients, upstream) = bootstrap.split_once("    - name: upstream\n      address").expect("a listener");
            let filters = "                http_filters:\n";
            assert!(upstream.contains(filters));
            let upstream = upstream.replacen(filters, &format!("{filters}                  {fault}\n"), 1);
            format!("{clients}    - name: upstream\n      address{upstream}")
        },
    );
    for number in 1..=2 {
        let mut client = http::connect(pair.envoy.port(), [127, 0, 0, 1].into()).unwrap();
        client.write_all(b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-team: red\r\n\r\n").unwrap();
        wait_for("the request to reach the upstream", || {
            (pair.envoy.stat("cluster.upstream.upstream_rq_total") >= number).then_some(())
        });
        drop(client);
        pair.wait_for_calls(number * 2);
    }
    assert_eq!(pair.envoy.get("/v1/chat/completions").header("x-team", "red").send().status, 429);
    pair.assert_no_call_failed();
}
