//! Descriptors that match no rule: `/unmatched`, `top --unmatched`, the metric, `explain`; and the busiest keys.

use std::process::Command;

use proptest::prelude::*;
use serde_json::{Value, json};
use tollkeeper::limit::request::Entry;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::rule::near_miss::{MissReason, PossibleEntry};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;

use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::tollkeeper::{Setup, Tollkeeper, program_path, with_rules};

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 1000}}
- key: api_key
  descriptors:
  - {key: path, rate_limit: {unit: day, requests_per_unit: 1000}}
- {key: plan, value: gold, rate_limit: {unit: day, requests_per_unit: 1000}}
- {key: plan, value: free}
---
domain: other
descriptors:
- {key: tenant, rate_limit: {unit: day, requests_per_unit: 1000}}
";

fn rule_set(text: &str) -> RuleSet {
    let text = RuleText { name: "shop.yaml".into(), bytes: text.into(), documents: DocumentSelection::All };
    RuleSet::new(compile_texts(&[text], &CompileOptions::default()).expect("good rules").domains)
}

fn server() -> Setup {
    with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

fn send(server: &Tollkeeper, domain: &str, entries: &[(&str, &str)], times: usize) {
    let client = Client::connect(server.grpc_port());
    (0..times).for_each(|_| drop(client.call(&rate_limit_request(domain, entries)).unwrap()));
}

fn page(server: &Tollkeeper, path: &str) -> String {
    http::get(server.debug_port(), path).send().text()
}

fn json_page(server: &Tollkeeper, path: &str) -> Value {
    let page = page(server, path);
    serde_json::from_str(&page).unwrap_or_else(|error| panic!("{error}: {page}"))
}

/// Output of a command that succeeds.
fn output(arguments: &[&str]) -> String {
    let output = Command::new(program_path()).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn unmatched_descriptors_are_counted_and_explained() {
    let server = server().start();
    for (domain, entries, times) in [
        ("shop", &[("User", "ann")][..], 6),
        ("shop", &[("path", "/"), ("api_key", "k")], 5),
        ("shop", &[("api_key", "k")], 4),
        ("shop", &[("user", "ann"), ("path", "/")], 3),
        ("shop", &[("tenant", "acme")], 2),
        ("Shop", &[("user", "ann")], 7),
        ("shop", &[("plan", "silver")], 1),
        // These match, or are exempt on purpose.
        ("shop", &[("user", "ann")], 3),
        ("shop", &[("plan", "free")], 3),
    ] {
        send(&server, domain, entries, times);
    }
    let report = json_page(&server, "/unmatched");
    let rows: Vec<Value> = report["descriptors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| json!([row["domain"], row["example"], row["about"], row["reason"], row["suggestion"]]))
        .collect();
    assert_eq!(
        rows,
        [
            json!(["Shop", "user=ann", 7, "unknown_domain", "shop"]),
            json!(["shop", "User=ann", 6, "case", "user=ann"]),
            json!(["shop", "path=/,api_key=k", 5, "order", "api_key=k,path=/"]),
            json!(["shop", "api_key=k", 4, "too_short", "api_key=k,path=..."]),
            json!(["shop", "user=ann,path=/", 3, "too_long", "user=ann"]),
            json!(["shop", "tenant=acme", 2, "domain", "other"]),
            json!(["shop", "plan=silver", 1, "value", "plan=gold"]),
        ],
        "{report:#}"
    );
    assert_eq!(
        report["domains"],
        json!([
            {"domain": "shop", "has_rules": true, "unmatched": 21, "matched": 3},
            {"domain": "Shop", "has_rules": false, "unmatched": 7, "matched": 0},
        ])
    );
    assert_eq!(report["findings"][0]["kind"], "unknown_domain");
    assert_eq!(report["findings"].as_array().unwrap().len(), 1);
    let origin = report["descriptors"][1]["origin"].as_str().unwrap();
    assert!(origin.ends_with(".yaml:3:15"), "{origin}");
    let text = output(&["top", "--unmatched", "--addr", &format!("127.0.0.1:{}", server.debug_port())]);
    for line in [
        "! no rules for domain Shop, so all its requests pass: did you mean shop?",
        "6 of shop: User=ann",
        "  letters or `-` and `_` differ from shop.user: did you mean user=ann?",
        "  domain other has a rule for it: did you mean that domain?",
    ] {
        assert!(text.lines().any(|other| other == line), "{line:?} is not in\n{text}");
    }
    let only = json_page(&server, "/unmatched?domain=Shop&most=1");
    assert_eq!((only["domains"].as_array().unwrap().len(), only["descriptors"].as_array().unwrap().len()), (1, 1));
    assert_eq!(http::get(server.debug_port(), "/unmatched?what=1").send().status, 400);
}

#[test]
fn domain_of_which_nothing_matches_is_a_finding() {
    let server = server().start();
    send(&server, "other", &[("Tenant", "a")], 3);
    let findings = &json_page(&server, "/unmatched")["findings"];
    assert_eq!((&findings[0]["kind"], &findings[0]["domain"]), (&json!("nothing_matches"), &json!("other")));
    send(&server, "other", &[("tenant", "a")], 1);
    // A page is shown again for a second.
    kit::wait_for("the finding to go", || (json_page(&server, "/unmatched")["findings"] == json!([])).then_some(()));
}

#[test]
fn nothing_unmatched_is_said_and_tracking_can_be_off() {
    let server = server().env("TOLLKEEPER_TOP_KEYS", "0").start();
    assert_eq!(page(&server, "/unmatched?format=text"), "every descriptor matched a rule, or there was none\n");
    send(&server, "shop", &[("User", "ann")], 2);
    kit::wait_for("the count", || {
        let text = page(&server, "/unmatched?format=text");
        (text.contains("2        0  shop") && text.contains("TOLLKEEPER_TOP_KEYS=0")).then_some(())
    });
}

#[test]
fn hidden_values_are_in_no_page_and_keys_are_explained() {
    let server = server()
        .env("TOLLKEEPER_TOP_VALUES", "hashed")
        .env("TOLLKEEPER_DECISION_LOG_HASH_KEY", "a secret of all replicas")
        .start();
    send(&server, "shop", &[("User", "ann")], 2);
    send(&server, "shop", &[("user", "bob")], 2);
    for path in ["/unmatched", "/unmatched?format=text", "/top", "/top?format=text&show=busiest", "/fleet"] {
        let page = page(&server, path);
        assert!(!page.contains("ann\"") && !page.contains("=ann") && !page.contains("=bob"), "{path}: {page}");
    }
    let row = &json_page(&server, "/unmatched")["descriptors"][0];
    assert_eq!((&row["reason"], &row["suggestion"]), (&json!("case"), &json!("user=...")), "{row:#}");
    assert_eq!(row["entries"], json!([{"key": "User"}]));
}

#[test]
fn busiest_keys_are_shown_whether_rejected_or_not() {
    let server = server().start();
    send(&server, "shop", &[("user", "ann")], 9);
    send(&server, "shop", &[("user", "bob")], 4);
    let report = json_page(&server, "/top");
    assert_eq!(report["overall"], json!([]));
    assert_eq!(
        report["busiest"],
        json!([
            {"rule": "shop.user", "domain": "shop", "key": "user=ann", "entries": [{"key": "user", "value": "ann"}], "hits_about": 9},
            {"rule": "shop.user", "domain": "shop", "key": "user=bob", "entries": [{"key": "user", "value": "bob"}], "hits_about": 4},
        ])
    );
    let address = format!("127.0.0.1:{}", server.debug_port());
    let text = output(&["top", "--busiest", "--addr", &address]);
    let expected = "\
Hits in the last 5 minutes, rejected or not, by an estimate from a sample.

ABOUT  RULE       KEY
    9  shop.user  user=ann
    4  shop.user  user=bob
";
    assert_eq!(text, expected);
    let fleet = output(&["top", "--busiest", "--fleet", "--addr", &address]);
    assert!(fleet.contains("    9  shop.user  user=ann"), "{fleet}");
}

#[test]
fn estimates_of_many_requests_are_near_the_truth() {
    let server = server().start();
    send(&server, "shop", &[("user", "ann")], 3000);
    send(&server, "shop", &[("User", "ann")], 3000);
    let busiest = json_page(&server, "/top?minutes=10")["busiest"][0]["hits_about"].as_u64().unwrap();
    let unmatched = json_page(&server, "/unmatched")["descriptors"][0]["about"].as_u64().unwrap();
    // The sample of a thread has one of 16 after its first 1024: a standard error of 7 %.
    for estimate in [busiest, unmatched] {
        assert!((2000..=4200).contains(&estimate), "{estimate}");
    }
}

/// Descriptor with these entries, and the near miss that is found for it.
fn near_miss(rules: &RuleSet, entries: &[(String, String)]) -> Option<(MissReason, String)> {
    let entries: Vec<Entry<'_>> =
        entries.iter().map(|(key, value)| Entry { key: key.as_bytes(), value: value.as_bytes() }).collect();
    let possible: Vec<PossibleEntry<'_>> = entries.iter().map(PossibleEntry::from).collect();
    let near = rules.find_near_miss(rules.domain("d").unwrap(), &possible)?;
    Some((near.reason, near.suggestion))
}

proptest! {

    /// Whatever the suggestion of a near miss is, a rule matches it; and a descriptor that matches has none.
    #[test]
    fn suggestions_match_a_rule(
        keys in prop::collection::hash_set("[a-d]{2,4}", 1..4),
        values in prop::collection::vec("[x-z]{1,2}", 4),
        change in 0..5_usize,
        at in 0..3_usize,
    ) {
        let keys: Vec<String> = keys.into_iter().collect();
        let mut text = "domain: d\ndescriptors:\n".to_owned();
        for (depth, key) in keys.iter().enumerate() {
            let value = if depth % 2 == 0 { String::new() } else { format!(", value: {}", values[depth]) };
            let below = if depth + 1 == keys.len() { "rate_limit: {unit: day, requests_per_unit: 1}" } else { "descriptors: [" };
            text += &format!("{}{{key: {key}{value}, {below}", if depth == 0 { "- " } else { "" });
        }
        text += &"}]".repeat(keys.len() - 1);
        text += "}\n";
        let rules = rule_set(&text);
        let mut entries: Vec<(String, String)> = keys.iter().cloned().zip(values).collect();
        prop_assert_eq!(near_miss(&rules, &entries), None, "{}", text);
        let at = at % entries.len();
        let expected = match change {
            0 => { entries[at].0 = entries[at].0.to_uppercase(); Some(MissReason::Case) }
            1 if entries.len() > 1 => { entries.reverse(); Some(MissReason::Order) }
            2 if entries.len() > 1 => { entries.remove(at); Some(MissReason::TooShort) }
            3 => { entries.insert(at, ("zz".to_owned(), "z".to_owned())); Some(MissReason::TooLong) }
            _ => { entries[at].0 += "-x-long-other-key"; None }
        };
        let found = near_miss(&rules, &entries);
        if let Some(expected) = expected {
            prop_assert_eq!(found.as_ref().map(|(reason, _)| *reason), Some(expected), "{}\n{:?}", text, entries);
        }
        if let Some((_, suggestion)) = found {
            let suggested: Vec<(String, String)> = suggestion
                .split(',')
                .filter_map(|entry| entry.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())))
                .collect();
            prop_assert_eq!(near_miss(&rules, &suggested), None, "{}\n{}", text, suggestion);
        }
    }
}
