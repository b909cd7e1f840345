//! `/history`, `/alarms` and `/rule_text`: what the console shows beside the reports.

use std::fs;

use serde_json::{Value, json};

use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::tollkeeper::{Tollkeeper, with_rules};
use kit::wait_for;

const RULES: &str = "\
domain: shop
descriptors:
# Customers.
- key: user
  rate_limit:
    unit: day
    # ask ops: hunter2
    requests_per_unit: 20 # was 50, hunter2
- {key: 'it em', rate_limit: {unit: day, requests_per_unit: 5}}
";

fn server() -> Tollkeeper {
    with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start()
}

fn get(server: &Tollkeeper, page: &str) -> Value {
    let response = http::get(server.debug_port(), page).send();
    assert_eq!(response.status, 200, "{page}: {response:?}");
    serde_json::from_slice(&response.body).unwrap()
}

fn charge(server: &Tollkeeper, user: &str, times: usize) {
    let client = Client::connect(server.grpc_port());
    for _ in 0..times {
        client.call(&rate_limit_request("shop", &[("user", user)])).unwrap();
    }
}

fn sum(list: &Value) -> u64 {
    list.as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum()
}

#[test]
fn history_has_requests_and_limits_of_the_minute_that_runs() {
    let server = server();
    charge(&server, "ann", 25);
    let all = get(&server, "/history");
    assert_eq!((sum(&all["requests"]["requests"]), sum(&all["requests"]["rejected"])), (25, 5), "{all}");
    assert_eq!(all["loads"].as_array().map(Vec::len), Some(1), "{all}");
    for query in ["rule=shop.user&exact=true", "rule=shop"] {
        let limits = get(&server, &format!("/history?{query}"));
        let counts = ["matched", "passed", "rejected", "exceeded_in_shadow"].map(|name| sum(&limits["limits"][name]));
        assert_eq!(counts, [25, 20, 5, 0], "{query}: {limits}");
        let minutes = limits["start_s"].as_array().unwrap().len();
        assert!(limits["limits"]["matched"].as_array().unwrap().len() == minutes && minutes <= 61, "{limits}");
    }
    assert_eq!(get(&server, "/history?rule=shop.use")["limits"]["selected"], 0);
}

#[test]
fn history_marks_loads_that_worked_and_those_that_failed() {
    let server = server();
    fs::write(server.rules_path(), RULES.replace("20", "21")).unwrap();
    wait_for("the second load", || (get(&server, "/history")["loads"][1]["version"] == 2).then_some(()));
    fs::write(server.rules_path(), "domain: shop\nnonsense: 1\n").unwrap();
    let history =
        wait_for("the failed load", || Some(get(&server, "/history")).filter(|history| !history["loads"][2].is_null()));
    assert!(history["loads"][2]["version"].is_null(), "{history}");
    let alarms = wait_for("the alarm", || {
        Some(get(&server, "/alarms")).filter(|report| report["alarms"][0]["kind"] == "reload_failed")
    });
    assert!(alarms["alarms"][0]["text"].as_str().unwrap().contains("nonsense"), "{alarms}");
}

#[test]
fn alarms_name_the_replica_and_what_is_wrong() {
    let server = server();
    let report = get(&server, "/alarms");
    let others = report["alarms"].as_array().unwrap().iter().filter(|alarm| alarm["kind"] != "late");
    assert_eq!((others.count(), &report["replicas"]), (0, &json!(1)), "{report}");
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert!(!report["replica"].as_str().unwrap().is_empty());
    let client = Client::connect(server.grpc_port());
    client.call(&rate_limit_request("shopp", &[("user", "ann")])).unwrap();
    wait_for("the alarm", || (get(&server, "/alarms")["alarms"][0]["kind"] == "unmatched").then_some(()));

    let lost = with_rules(RULES).env("REDIS_URL", "redis://127.0.0.1:1").env("TOLLKEEPER_DRAIN_PERIOD", "0s");
    let lost = lost.start_unhealthy();
    let kinds = |report: &Value| -> Vec<Value> {
        report["alarms"].as_array().unwrap().iter().map(|alarm| alarm["kind"].clone()).collect()
    };
    wait_for("the alarm", || kinds(&get(&lost, "/alarms")).contains(&json!("store_lost")).then_some(()));
}

#[test]
fn limits_of_a_rule_can_be_loaded() {
    let server = server();
    let origin = get(&server, "/rules?rule=shop.user&exact=true")["rules"][0]["origin"].clone();
    let text = get(&server, &format!("/rule_text?origin={}", origin.as_str().unwrap()));
    assert_eq!(text["limits"][0]["yaml"], "{unit: day, requests_per_unit: 20, algorithm: fixed_window}");
    let other = with_rules(text["yaml"].as_str().unwrap()).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    assert_eq!(get(&other, "/rules")["rules"][0]["limit"], get(&server, "/rules?order=file")["rules"][0]["limit"]);
    for (origin, status) in [("rules.yaml:1:1", 404), ("", 404), ("../../etc/passwd:1:1", 404)] {
        assert_eq!(
            http::get(server.debug_port(), &format!("/rule_text?origin={origin}")).send().status,
            status,
            "{origin}"
        );
    }
}

#[test]
fn removed_page_names_what_to_use_in_its_place() {
    let response = http::get(server().debug_port(), "/what_if?rule=shop.user&limit=x").send();
    assert!(response.status == 410 && response.text().contains("tollkeeper simulate"), "{response:?}");
}

#[test]
fn limits_are_sorted_and_filtered_by_the_server_and_a_page_of_many_is_small() {
    let mut rules = "domain: shop\ndescriptors:\n".to_owned();
    for number in 0..2000 {
        let requests = if number == 900 { 10 } else { 2000 / (number + 1).max(1000) };
        rules += &format!(
            "- {{key: key_of_a_typical_length_{number:04}, rate_limit: {{unit: day, requests_per_unit: {requests}}}}}\n"
        );
    }
    let server = with_rules(&rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    let client = Client::connect(server.grpc_port());
    for (number, times) in [(7, 9), (900, 12), (1500, 5)] {
        let key = format!("key_of_a_typical_length_{number:04}");
        (0..times).for_each(|_| drop(client.call(&rate_limit_request("shop", &[(key.as_str(), "x")])).unwrap()));
    }
    let names = |query: &str| -> Vec<String> {
        let report = get(&server, &format!("/rules?most=3&{query}"));
        report["rules"]
            .as_array()
            .unwrap()
            .iter()
            .map(|limit| limit["rule"].as_str().unwrap()[29..].to_owned())
            .collect()
    };
    // Of 9, 12 and 5 decisions, 7, 2 and 4 rejected.
    assert_eq!(names("order=rejected"), ["0007", "1500", "0900"]);
    assert_eq!(names(""), ["0007", "1500", "0900"], "the last ten minutes");
    assert_eq!(names("order=matched"), ["0900", "0007", "1500"]);
    assert_eq!(names("order=share"), ["1500", "0007", "0900"]);
    assert_eq!(names("order=name&offset=1998"), ["1998", "1999"]);
    assert_eq!(names("order=keys&rejecting=true&search=0900"), ["0900"]);
    assert_eq!(names("rejecting=true&order=name"), ["0007", "0900", "1500"]);
    // What a console loads before its first row.
    let files = ["/", "/console.css", "/console.js"].map(str::to_owned);
    let modules = ["dom", "server", "charts", "keys", "limits", "fleet"].map(|name| format!("/console/{name}.js"));
    let loaded = files.into_iter().chain(modules).chain(["/rules?order=rejected&most=100".to_owned()]);
    let bytes: usize = loaded.map(|path| http::get(server.debug_port(), &path).send().body.len()).sum();
    assert!(bytes < 200_000, "{bytes} bytes");
}

#[test]
fn search_has_few_words() {
    let server = server();
    let words = |count: usize| vec!["user"; count].join("%20");
    let ask = |search: &str| http::get(server.debug_port(), &format!("/rules?search={search}")).send();
    assert_eq!(ask(&words(16)).status, 200);
    for search in [words(17), "u".repeat(257)] {
        let refused = ask(&search);
        assert!(refused.status == 400 && refused.text().contains("at most 16 words and 256 bytes"), "{refused:?}");
    }
}

#[test]
fn limits_that_a_policy_rejects_are_among_those_that_reject() {
    let rules = RULES.replace("requests_per_unit: 20", "requests_per_unit: 20\n    on_store_error: deny");
    let server = with_rules(&rules).env("REDIS_URL", "redis://127.0.0.1:1").env("TOLLKEEPER_DRAIN_PERIOD", "0s");
    let server = server.start_unhealthy();
    charge(&server, "ann", 3);
    let report = get(&server, "/rules?rejecting=true&order=share");
    assert_eq!((&report["rules"][0]["rule"], &report["rules"][0]["rejected"]), (&json!("shop.user"), &json!(3)));
}
