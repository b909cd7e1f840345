//! `simulate`, `recommend` and `config_check_cmd` with plans and tables.

use std::fs;
use std::process::Output;

use serde_json::{Value, json};

use super::{Files, RULES, TABLE, body};
use kit::tollkeeper::linked_as;

/// A log of 7 requests of `acme` (gold, 5 a day), 3 of a tenant without a row (2 a day) and 9 of `own` (7 a day).
fn record(files: &Files) {
    let log = format!("file:{}", files.path("log.jsonl").display());
    let setup = files.setup().env("TOLLKEEPER_DECISION_LOG", log).env("TOLLKEEPER_DRAIN_PERIOD", "0s");
    let mut server = setup.env("TOLLKEEPER_DECISION_LOG_WHEN", "all").start();
    for (tenant, requests) in [("acme", 7), ("nobody", 3), ("own", 9)] {
        (0..requests).for_each(|_| drop(server.post_json(&body(tenant, 1))));
    }
    server.signal("TERM");
    assert!(server.wait().success());
}

fn json_of(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Rejected requests of a limit, before and after.
fn rejected(results: &Value, path: &str) -> (Value, Value) {
    let limits = results["limits"].as_array().unwrap();
    let limit = limits.iter().find(|limit| limit["path"] == path).unwrap_or_else(|| panic!("{path}: {results}"));
    (limit["old"]["rejected"].clone(), limit["new"]["rejected"].clone())
}

#[test]
fn simulate_repeats_plans_and_tries_another_table() {
    let files = Files::new(RULES, TABLE);
    record(&files);
    // The rules of the log, whose table is not in it: each decision keeps its plan.
    let same = json_of(&files.command(&["simulate", "--traffic", "log.jsonl", "--rules", "rules.yaml", "--json"]));
    assert_eq!(same["verification"], json!({"compared": 19, "agreed": 19}), "{same}");
    assert_eq!((&same["old"]["rejected"], &same["new"]["rejected"]), (&json!(5), &json!(5)), "{same}");
    files.write("new.csv", "value,plan\nacme,free\nnobody,gold\nown,8/day\n");
    let simulate = ["simulate", "--traffic", "log.jsonl", "--rules", "rules.yaml", "--json", "--table"];
    let changed = json_of(&files.command(&[&simulate[..], &["customers=new.csv"]].concat()));
    assert_eq!((&changed["old"]["rejected"], &changed["new"]["rejected"]), (&json!(5), &json!(6)), "{changed}");
    assert_eq!(rejected(&changed, "shop.tenant.own"), (json!(2), json!(1)));
    let newly: Vec<_> = changed["changes"]["newly_rejected_keys"].as_array().unwrap().iter().collect();
    assert_eq!((newly.len(), &newly[0]["key"]), (1, &json!("tenant=acme")), "{changed}");
    // "What if gold were more?"
    files.write(
        "more.yaml",
        &RULES.replace("gold: { unit: day, requests_per_unit: 5 }", "gold: { unit: day, requests_per_unit: 6 }"),
    );
    let more = json_of(&files.command(&["simulate", "--traffic", "log.jsonl", "--rules", "more.yaml", "--json"]));
    assert_eq!(rejected(&more, "shop.tenant.gold"), (json!(2), json!(1)));
    let unknown = files.command(&[&simulate[..], &["customer=new.csv"]].concat());
    assert_eq!(unknown.status.code(), Some(2));
    let message = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(message.contains("no table of this name (did you mean 'customers'?)"), "{message}");
}

#[test]
fn recommend_finds_the_limit_of_a_plan() {
    let files = Files::new(RULES, TABLE);
    record(&files);
    let recommend = |more: &[&str]| {
        files.command(&[&["recommend", "--traffic", "log.jsonl", "--rejected-keys", "0"], more].concat())
    };
    // From the log alone, and from the files.
    for rules in [&[][..], &["--rules", "rules.yaml"]] {
        let results = json_of(&recommend(&[&["--rule", "shop.tenant.gold", "--json"], rules].concat()));
        let limit = &results["limits"][0];
        assert_eq!((&limit["requests_per_unit"], &results["basis"]["keys"]), (&json!(7), &json!(1)), "{results}");
        assert_eq!((&limit["rejected_keys"], &results["basis"]["requests"]), (&json!(0), &json!(7)), "{results}");
        let yaml = results["yaml"].as_str().unwrap();
        let expected = "domain: shop\nplans:\n  gold:\n    unit: day\n    requests_per_unit: 7\n";
        assert!(yaml.contains(expected) && yaml.contains("all rules with the plan get it"), "{yaml}");
    }
    files.write("new.csv", "value,plan\nacme,gold\nown,gold\n");
    let other = ["--rule", "shop.tenant.gold", "--rules", "rules.yaml", "--table", "customers=new.csv", "--json"];
    let results = json_of(&recommend(&other));
    let limit = &results["limits"][0];
    assert_eq!((&limit["requests_per_unit"], &results["basis"]["keys"]), (&json!(9), &json!(2)), "{results}");
    assert_eq!((&results["basis"]["requests"], &limit["rejected_keys"]), (&json!(16), &json!(0)));
    let whole = recommend(&["--rule", "shop.tenant"]);
    let message = String::from_utf8_lossy(&whole.stderr).into_owned();
    assert!(
        message.contains("the rule has plans (name the limit of one: ") && message.contains("shop.tenant.gold"),
        "{message}"
    );
    let unknown = recommend(&["--rule", "shop.tenant.gold", "--rules", "rules.yaml", "--table", "x=new.csv"]);
    assert_eq!(unknown.status.code(), Some(2), "{unknown:?}");
}

#[test]
fn config_check_cmd_reads_tables_and_sets() {
    let files = Files::new(RULES, TABLE);
    let set =
        "domain: other\ndescriptors:\n- {key: ip, match: {cidr: {file: offices.txt}}, rate_limit: {unlimited: true}}\n";
    files.write("set.yaml", set);
    files.write("offices.txt", "10.0.0.0/8\n");
    let names = tempfile::tempdir().unwrap();
    let program = linked_as(names.path(), "config_check_cmd");
    let check = || {
        let directory = files.path("");
        let output = std::process::Command::new(&program).arg("-config_dir").arg(directory).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (good, page) = check();
    assert!(good && page.ends_with("all rate limit configs ok\n"), "{page}");
    files.write("customers.csv", "value,plan\nacme,unknown\n");
    let (good, page) = check();
    assert!(!good && page.contains("customers.csv:2:1: unknown plan 'unknown'"), "{page}");
    files.write("customers.csv", TABLE);
    files.write("offices.txt", "10.0.0.0/8\nnonsense\n");
    let (good, page) = check();
    assert!(!good && page.contains("offices.txt:2:1: "), "{page}");
    fs::remove_file(files.path("customers.csv")).unwrap();
    files.write("offices.txt", "10.0.0.0/8\n");
    let (good, page) = check();
    assert!(!good && page.contains("customers.csv:1:1: no such file or directory"), "{page}");
}
