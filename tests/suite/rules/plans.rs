//! Plans and tables: a limit of one's own for each value.
//!
//! Decisions go through a real server whose rules stand beside their table; the swap of a table is tested in this
//! process, where threads can look up as fast as they can.

mod redis_table;
mod tables;
mod tools;
mod rows;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use kit::envoy::Envoy;
use kit::scrape::{scrape, with_prometheus};
use kit::tollkeeper::{self, Setup, Tollkeeper, inherited_env, program_path};
use kit::{http, wait_for};

/// Rules of the domain `shop`: two a day by default, five for gold, and a list for platinum.
pub(crate) const RULES: &str = "\
domain: shop
plans:
  free: { unit: day, requests_per_unit: 2 }
  gold: { unit: day, requests_per_unit: 5 }
  bucket: { unit: day, requests_per_unit: 5, algorithm: token_bucket }
  wide: { unit: day, requests_per_unit: 10, algorithm: token_bucket }
  platinum:
    - { unit: hour, requests_per_unit: 10 }
    - { unit: day, requests_per_unit: 8, name: daily }
  none: { unlimited: true }
tables:
  customers: { file: customers.csv }
descriptors:
  - key: tenant
    plan: { from: customers, default: free }
    descriptors:
      - key: path
        plan: { from: customers, key: tenant, default: free }
";

pub(crate) const TABLE: &str = "\
value,plan
acme,gold
\"big, and quoted\",platinum
own,7/day
staff,none
";

/// Rules with a table beside them.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn new(rules: &str, table: &str) -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        files.write("rules.yaml", rules);
        files.write("customers.csv", table);
        files
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Replaces a file by renaming, as deployments do.
    pub(crate) fn write(&self, name: &str, text: &str) {
        let new = self.path("new.tmp");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.path(name)).unwrap();
    }

    pub(crate) fn setup(&self) -> Setup {
        let setup = tollkeeper::without_rules().arg("--config").arg(self.path("rules.yaml"));
        setup.env("TOLLKEEPER_POLL_INTERVAL", "0").env("TOLLKEEPER_RELOAD_DEBOUNCE", "10ms")
    }

    fn command(&self, words: &[&str]) -> Output {
        let mut command = Command::new(program_path());
        command.args(words).current_dir(self.0.path()).env_clear().envs(inherited_env());
        command.output().unwrap()
    }
}

/// Body of a request with one entry.
pub(crate) fn body(tenant: &str, hits: u32) -> String {
    json!({"domain": "shop", "descriptors": [{"entries": [{"key": "tenant", "value": tenant}], "hitsAddend": hits.to_string()}]})
        .to_string()
}

/// Sends `count` requests of one hit; returns how many pass.
pub(crate) fn passed(server: &Tollkeeper, tenant: &str, count: u32) -> u32 {
    (0..count).map(|_| u32::from(server.post_json(&body(tenant, 1)).status == 200)).sum()
}

/// Limit that the response shows; `None` for none.
pub(crate) fn limit(server: &Tollkeeper, tenant: &str) -> Option<u64> {
    let response = server.post_json(&body(tenant, 0));
    let answer: Value = serde_json::from_slice(&response.body).unwrap_or_else(|_| panic!("{response:?}"));
    answer["statuses"][0]["currentLimit"]["requestsPerUnit"].as_u64()
}

pub(crate) fn wait_for_limit(server: &Tollkeeper, tenant: &str, expected: u64) {
    wait_for(&format!("{tenant} to have {expected}"), || (limit(server, tenant) == Some(expected)).then_some(()));
}

#[test]
fn table_chooses_plan_list_own_limit_and_default() {
    let files = Files::new(RULES, TABLE);
    let server = files.setup().start();
    assert_eq!(passed(&server, "unknown", 4), 2);
    assert_eq!(passed(&server, "acme", 7), 5);
    assert_eq!(passed(&server, "own", 9), 7);
    assert_eq!(passed(&server, "big, and quoted", 10), 8);
    assert_eq!(passed(&server, "staff", 20), 20);
    // The value of another entry on the path chooses, and each path has a counter of its own.
    let entries = |path: &str| {
        json!({"domain": "shop", "descriptors": [{"entries": [
            {"key": "tenant", "value": "acme"}, {"key": "path", "value": path}]}]})
        .to_string()
    };
    let count = (0..8).filter(|_| server.post_json(&entries("/cart")).status == 200).count();
    assert_eq!(count, 5);
}

#[test]
fn entry_of_a_plan_is_found_in_any_order() {
    let rules = format!("matching: {{ order: any }}\n{RULES}");
    let files = Files::new(&rules, TABLE);
    let server = files.setup().start();
    assert_eq!(passed(&server, "acme", 7), 5);
    // Sorted by key, the path comes before the tenant.
    let entries = |names: [&str; 2]| {
        let value = |name: &str| if name == "tenant" { "acme" } else { "/cart" };
        let entries = names.map(|name| json!({"key": name, "value": value(name)}));
        json!({"domain": "shop", "descriptors": [{"entries": entries}]}).to_string()
    };
    let count = |names| (0..4).filter(|_| server.post_json(&entries(names)).status == 200).count();
    assert_eq!((count(["tenant", "path"]), count(["path", "tenant"])), (4, 1), "one counter of the plan gold");
}

#[test]
fn changed_plan_keeps_the_counter_of_window_and_bucket() {
    let files = Files::new(RULES, TABLE);
    let server = files.setup().start();
    assert_eq!(passed(&server, "acme", 4), 4);
    files.write("customers.csv", "value,plan\nacme,free\nbucketed,bucket\n");
    wait_for_limit(&server, "acme", 2);
    assert_eq!(passed(&server, "acme", 3), 0, "four of two are used");
    files.write("customers.csv", "value,plan\nacme,6/day\nbucketed,bucket\n");
    wait_for_limit(&server, "acme", 6);
    // Rejected hits of a single fixed window count: 4 + 3 are used.
    assert_eq!(passed(&server, "acme", 3), 0);
    files.write("customers.csv", "value,plan\nacme,12/day\nbucketed,bucket\n");
    wait_for_limit(&server, "acme", 12);
    assert_eq!(passed(&server, "acme", 3), 2, "10 were used");
    // A token bucket keeps what was used too.
    assert_eq!(passed(&server, "bucketed", 4), 4);
    files.write("customers.csv", "value,plan\nbucketed,wide\n");
    wait_for_limit(&server, "bucketed", 10);
    assert_eq!(passed(&server, "bucketed", 8), 6, "four of ten were used");
}

#[test]
fn bad_table_keeps_the_last_good_one_and_names_the_line() {
    let files = Files::new(RULES, TABLE);
    let (setup, port) = with_prometheus(files.setup());
    let server = setup.start();
    files.write("customers.csv", "value,plan\nacme,free\nacme,gold\nx,goald\ny,5/eon\n");
    let status =
        wait_for("the error", || Some(server.rules_status()).filter(|s| s["tables"][0]["last_error"].is_string()));
    let error = status["tables"][0]["last_error"].as_str().unwrap();
    for expected in ["customers.csv:3:1: the value 'acme'", "customers.csv:5:1: `5/eon` is not a limit"] {
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(limit(&server, "acme"), Some(5));
    files.write("customers.csv", "value,plan\nacme,free\nx,goald\n");
    wait_for("the plan to be unknown", || server.stderr().contains("unknown plan 'goald'").then_some(()));
    assert!(server.stderr().contains("customers.csv:3:1"), "{}", server.stderr());
    assert_eq!(limit(&server, "acme"), Some(5));
    files.write("customers.csv", "value,plan\nacme,free\n");
    wait_for_limit(&server, "acme", 2);
    let status = server.rules_status();
    assert_eq!((&status["tables"][0]["last_error"], &status["tables"][0]["rows"]), (&Value::Null, &json!(1)));
    assert_eq!(passed(&server, "nobody", 1), 1);
    let page = scrape(port.number());
    let sample = |name: &str| page.samples[&format!("{name}{{domain=\"shop\",table=\"customers\"}}")];
    assert!(sample("tollkeeper_table_load_errors_total") >= 2.0);
    assert!(sample("tollkeeper_table_rows") == 1.0 && sample("tollkeeper_table_default_plan_total") >= 1.0);
    assert!(sample("tollkeeper_table_loaded_timestamp_seconds") > 1.6e9);
    assert!(page.text.contains(r#"rule="shop.tenant.free""#), "{}", page.text);
}

#[test]
fn rules_without_a_plan_that_the_table_names_are_refused() {
    let files = Files::new(RULES, TABLE);
    let server = files.setup().start();
    files.write("rules.yaml", &RULES.replace("  gold:", "  silver:"));
    let refused = |server: &Tollkeeper| Some(server.rules_status()).filter(|status| status["refused"] == 1);
    let status = wait_for("the rules to be refused", || refused(&server));
    let error = status["last_error"].as_str().unwrap();
    assert!(error.contains("customers.csv:2:1: unknown plan 'gold' of the domain 'shop'"), "{error}");
    assert_eq!(limit(&server, "acme"), Some(5));
    // A table that is bad at the start keeps the rules from loading.
    let bad = Files::new(RULES, "value,plan\nacme,nothing\n");
    let server = bad.setup().start_unhealthy();
    assert_eq!(server.rules_status()["version"], 0);
    assert!(server.stderr().contains("customers.csv:2:1: unknown plan 'nothing'"), "{}", server.stderr());
}

#[test]
fn check_reads_the_table() {
    let files = Files::new(RULES, TABLE);
    let good = files.command(&["check", "rules.yaml"]);
    assert!(good.status.success(), "{good:?}");
    files.write("customers.csv", "value,plan\nacme,\n,gold\nx,gold,more\n");
    let bad = files.command(&["check", "rules.yaml"]);
    let text = String::from_utf8(bad.stdout).unwrap();
    assert_eq!(bad.status.code(), Some(1));
    for expected in [
        "customers.csv:2:1: a row without plan and limit",
        "customers.csv:3:1: the value is empty",
        "customers.csv:4:1: a row of 3 columns under a heading of 2",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    fs::remove_file(files.path("customers.csv")).unwrap();
    let missing = String::from_utf8(files.command(&["check", "rules.yaml"]).stdout).unwrap();
    assert!(missing.contains("customers.csv:1:1: no such file or directory"), "{missing}");
}

#[test]
fn explain_top_and_the_decision_log_name_the_plan() {
    let files = Files::new(RULES, TABLE);
    let log = files.path("decisions.jsonl");
    let destination = format!("file:{}", log.display());
    let mut server =
        files.setup().env("TOLLKEEPER_DECISION_LOG", destination).env("TOLLKEEPER_DECISION_LOG_WHEN", "all").start();
    assert_eq!((passed(&server, "acme", 6), passed(&server, "x", 3), passed(&server, "own", 8)), (5, 2, 7));
    let plan = |tenant| server.explain(&body(tenant, 0))["descriptors"][0]["rule"]["plan"].clone();
    assert_eq!(plan("acme")["name"], "gold");
    assert_eq!((&plan("acme")["table"], &plan("acme")["found"]), (&json!("customers"), &json!("row")));
    assert_eq!((&plan("x")["name"], &plan("x")["found"]), (&json!("free"), &json!("default")));
    assert_eq!((&plan("own")["name"], &plan("own")["found"]), (&json!("own"), &json!("own")));
    let top = http::get(server.debug_port(), "/top?format=json").send().text();
    let top: Value = serde_json::from_str(&top).unwrap();
    let rules: Vec<_> =
        top["by_limit"].as_array().unwrap().iter().map(|limit| limit["rule"].as_str().unwrap()).collect();
    assert_eq!(rules, ["shop.tenant.free", "shop.tenant.gold", "shop.tenant.own"]);
    let text = files.command(&["explain", "--config", "rules.yaml", "--domain", "shop", "--descriptor", "tenant=acme"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("plan gold of the table customers: a row of the table"), "{text}");
    server.signal("TERM");
    server.wait();
    let text = fs::read_to_string(log).unwrap();
    let plans: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|record| record["type"] == "decision")
        .map(|record| record["descriptors"][0]["rule"]["plan"].clone())
        .collect();
    assert_eq!(plans.iter().filter(|plan| **plan == json!("gold")).count(), 6);
    assert_eq!(plans.iter().filter(|plan| **plan == json!("own")).count(), 8);

    // What if gold had one request, and if acme were free?
    let rules = files.path("rules.yaml");
    let fewer = fs::read_to_string(rules).unwrap().replace("requests_per_unit: 5 }", "requests_per_unit: 1 }");
    files.write("fewer.yaml", &fewer);
    let simulate = |words: &str| {
        let output = files.command(&words.split(' ').collect::<Vec<_>>());
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let results = simulate("simulate --rules fewer.yaml --traffic decisions.jsonl --json");
    assert_eq!(results["verification"]["agreed"], results["verification"]["compared"], "{results}");
    let of = |results: &Value, path: &str| {
        let limits = results["limits"].as_array().unwrap();
        limits.iter().find(|limit| limit["path"] == path).unwrap_or_else(|| panic!("{path}: {results}")).clone()
    };
    let gold = of(&results, "shop.tenant.gold");
    assert_eq!((&gold["new"]["rejected"], &gold["old"]["rejected"]), (&json!(5), &json!(1)));
    files.write("new.csv", "value,plan\nacme,free\nown,gold\n");
    let results = simulate("simulate --rules rules.yaml --table customers=new.csv --traffic decisions.jsonl --json");
    assert_eq!(of(&results, "shop.tenant.free")["new"]["rejected"], 1 + 4);
    assert_eq!(of(&results, "shop.tenant.gold")["new"]["rejected"], 3);
    assert_eq!(of(&results, "shop.tenant.own")["old"]["rejected"], 1);
    assert_eq!(results["changes"]["newly_rejected"], 3 + 2);
    let wrong = files.command(&["simulate", "--rules", "rules.yaml", "--table", "customer=new.csv", "--traffic", "x"]);
    let wrong = String::from_utf8(wrong.stderr).unwrap();
    assert!(wrong.contains("did you mean 'customers'?"), "{wrong}");
}

#[test]
fn tables_in_a_runtime_directory_are_not_rules() {
    let files = vec![("shop.yaml".to_owned(), RULES.to_owned()), ("customers.csv".to_owned(), TABLE.to_owned())];
    let server = tollkeeper::with_runtime_files(files).start();
    assert_eq!((limit(&server, "acme"), limit(&server, "x")), (Some(5), Some(2)));
}

#[test]
fn rejection_behind_envoy_names_the_plan() {
    let files = Files::new(&RULES.replace("domain: shop", "domain: gateway").replace("tenant", "api_key"), TABLE);
    let server = files.setup().env("TOLLKEEPER_METADATA_VERDICTS", "true").start();
    let log = files.path("access.log");
    let path = format!("path: {}", log.display());
    let envoy = Envoy::start_with("gateway", &[server.grpc_port()], |text| text.replace("path: /dev/stdout", &path));
    let statuses = |key: &str, count| {
        (0..count).map(|_| envoy.get("/").header("x-api-key", key).send().status).collect::<Vec<_>>()
    };
    assert_eq!(statuses("acme", 6), [200, 200, 200, 200, 200, 429]);
    assert_eq!(statuses("somebody", 3), [200, 200, 429]);
    let lines = wait_for("the access log", || fs::read_to_string(&log).ok().filter(|text| text.lines().count() == 2));
    let plans: Vec<Value> = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect();
    assert_eq!(plans[0]["over_limit"], json!([{"name": "", "plan": "gold", "rule": "gateway.api_key.gold"}]));
    assert_eq!(plans[1]["over_limit"][0]["plan"], "free");
}
