//! Recipes for MCP servers and models, with their traps.

use super::page::Recipe;
use super::{Served, assert_limit, assert_unlimited, serve};
use kit::http::{self, Request};
use kit::wait_for;

/// A call of a method of an MCP server.
fn mcp_call(served: &Served, agent: &str, message: &str) -> Request {
    let request = http::post(served.envoy.port(), "/mcp", message).header("x-agent", agent);
    request.header("accept", "application/json, text/event-stream")
}

/// A call of an MCP tool, as its clients send it.
fn tool_call(served: &Served, agent: &str, tool: &str) -> Request {
    let message =
        format!(r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"name":"{tool}","arguments":{{}}}}}}"#);
    mcp_call(served, agent, &message).header("content-type", "application/json")
}

#[test]
fn tools_have_limits_for_each_agent() {
    let served = serve(26);
    assert_limit(1, &tool_call(&served, "ann", "delete_user"));
    assert_limit(3, &tool_call(&served, "ann", "search"));
    assert_limit(3, &tool_call(&served, "ann", ""));
    assert_limit(1, &tool_call(&served, "bob", "delete_user"));
    let rejection = tool_call(&served, "ann", "delete_user").send();
    let error: serde_json::Value = serde_json::from_str(&rejection.text()).unwrap();
    assert_eq!(error["error"]["code"], -32029, "{rejection:?}");
    assert_eq!(error["error"]["data"]["retryAfterSeconds"], rejection.number("retry-after"));
    let list = mcp_call(&served, "ann", r#"{"jsonrpc":"2.0","id":8,"method":"tools/list"}"#);
    assert_unlimited(5, &list.header("content-type", "application/json"));
}

#[test]
fn traps_of_tools() {
    let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"delete_user"}}"#;
    let batch = format!("[{call}]");
    let served = serve(26);
    let others = |served: &Served| {
        let as_text = mcp_call(served, "ann", call).header("content-type", "text/plain");
        [as_text, mcp_call(served, "ann", &batch).header("content-type", "application/json")]
    };
    for request in others(&served) {
        assert_eq!(request.send().status, 400);
    }
    let mut recipe = Recipe::find(26);
    recipe.envoy["http_filters"][0]["typed_config"]["traffic_mode"] = "PASS_THROUGH".into();
    let served = Served::start(&recipe);
    others(&served).iter().for_each(|request| assert_unlimited(4, request));

    let unnamed = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{}}"#;
    let unnamed = |served: &Served| mcp_call(served, "ann", unnamed).header("content-type", "application/json");
    assert_limit(3, &unnamed(&served));
    let tool = &mut recipe.envoy["rate_limits"][0]["actions"][1]["metadata"];
    assert!(tool.as_object_mut().unwrap().remove("default_value").is_some());
    assert_unlimited(4, &unnamed(&Served::start(&recipe)));
}

/// Statuses of requests, each sent when the charge of the one before has arrived.
fn statuses_after_charges(served: &Served, requests: &[&Request]) -> Vec<u16> {
    let mut calls = served.envoy.stat("cluster.tollkeeper.upstream_rq_completed");
    let statuses = requests.iter().map(|request| {
        let status = request.send().status;
        calls += 2;
        wait_for("the charge", || {
            (served.envoy.stat("cluster.tollkeeper.upstream_rq_completed") >= calls).then_some(())
        });
        status
    });
    statuses.collect()
}

#[test]
fn tokens_are_read_from_the_answer_of_a_model() {
    let served = serve(27);
    let answered = served.envoy.get("/v1/chat/completions").header("x-team", "red").header("accept-encoding", "gzip");
    let without_usage = served.envoy.get("/v1/other").header("x-team", "red");
    // 100 tokens each; an answer without usage costs 600.
    let requests = [[&answered; 5].as_slice(), &[&without_usage, &answered, &without_usage]].concat();
    assert_eq!(statuses_after_charges(&served, &requests), [200, 200, 200, 200, 200, 200, 429, 429]);
    assert_eq!(served.envoy.get("/v1/chat/completions").header("x-team", "blue").send().status, 200);
}

/// Changes the cost of a recipe that reads usage.
fn replace_cost(recipe: &mut Recipe, change: impl Fn(&str) -> String) {
    let limits = &mut recipe.envoy["typed_per_filter_config"]["envoy.filters.http.ratelimit"]["rate_limits"];
    let cost = &mut limits[1]["hits_addend"]["format"];
    let changed = change(cost.as_str().expect("a text"));
    assert_ne!(*cost, changed.as_str());
    *cost = changed.into();
}

#[test]
fn traps_of_tokens_that_envoy_reads() {
    let peeks = |recipe: &Recipe, path: &str| {
        let served = Served::start(recipe);
        let request = served.envoy.get(path).header("x-team", "red");
        for _ in 0..3 {
            assert_eq!(request.send().status, 200);
        }
        // Nothing is sent after an answer.
        let last = request.send();
        (last.number("x-ratelimit-remaining"), served.envoy.stat("cluster.tollkeeper.upstream_rq_total"))
    };
    let mut recipe = Recipe::find(27);
    replace_cost(&mut recipe, |_| "%DYNAMIC_METADATA(llm_usage:total_tokens)%".to_owned());
    assert_eq!(peeks(&recipe, "/v1/chat/completions"), (1000, 4));
    let mut recipe = Recipe::find(27);
    replace_cost(&mut recipe, |_| "%TYPED_CEL(metadata.typed_filter_metadata.llm_usage.total_tokens)%".to_owned());
    assert_eq!(peeks(&recipe, "/v1/other"), (1000, 4));
    for wrong in ["* 4 ", "* 1.5 "] {
        let mut recipe = Recipe::find(28);
        replace_cost(&mut recipe, |cost| cost.replace("* 4u ", wrong));
        assert_eq!(peeks(&recipe, "/v1/chat/completions"), (1000, 4), "{wrong}");
    }
}

#[test]
fn output_tokens_have_a_weight() {
    let served = serve(28);
    let request = served.envoy.get("/v1/chat/completions").header("x-team", "red");
    // 20 + 4 x 80 each.
    assert_eq!(statuses_after_charges(&served, &[&request; 5]), [200, 200, 200, 429, 429]);
    let mut recipe = Recipe::find(28);
    replace_cost(&mut recipe, |cost| cost.replace("* 4u ", "* 3u / 2u "));
    let served = Served::start(&recipe);
    // 20 + 120 each.
    let request = served.envoy.get("/v1/chat/completions").header("x-team", "red");
    assert_eq!(statuses_after_charges(&served, &[&request; 9]), [200, 200, 200, 200, 200, 200, 200, 200, 429]);
}
