//! Gates: what cannot be compared or judged is told, and never passes.

use serde_json::{Value, json};

use super::{Files, Log, NEW_RULES, OLD_RULES, limit};

const GATE: &str = "newly_rejected(*) > 90%";

/// Twelve decisions by the old rules, and their header.
fn log() -> Log {
    Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob()
}

/// Runs the new rules over these lines of a log, with these arguments too.
fn simulate(lines: &[String], more: &[&str]) -> super::Simulated {
    let files = Files::new().with("log.jsonl", lines.join("\n") + "\n");
    files.run(&[&["--rules", "new.yaml", "--traffic", "log.jsonl"], more].concat())
}

fn has_warning(results: &Value, start: &str) -> bool {
    results["warnings"].as_array().unwrap().iter().any(|warning| warning.as_str().unwrap().starts_with(start))
}

#[test]
fn log_without_rules_cannot_be_compared() {
    let lines = &log().lines[1..];
    for more in [&[][..], &["--json"], &["--fail-if", GATE], &["--fail-if", "rejected(shop.login) > 90%"]] {
        let run = simulate(lines, more);
        let message = run.fails_with(2);
        assert!(message.contains("nothing was compared: the log has no rules (no header)"), "{more:?}: {message}");
        assert!(message.contains("give the rules of that time as --against"), "{message}");
        assert!(run.stdout().contains("shop.login"), "the figures of the new rules are missing: {run:?}");
    }
    let files = Files::new().with("log.jsonl", lines.join("\n") + "\n");
    let message = files.simulate("--traffic log.jsonl").fails_with(2);
    assert!(message.contains("the log has no rules (no header)"), "{message}");
}

#[test]
fn decisions_before_the_header_with_their_rules_are_not_compared() {
    let mut lines = log().lines;
    let header = lines.remove(0).replace("\"event\":\"start\"", "\"event\":\"rotation\"");
    lines.insert(8, header);
    let results = simulate(&lines, &["--json"]).json();
    assert_eq!(results["changes"]["compared"], 4, "{results}");
    assert!(has_warning(&results, "8 requests (66.67 %) are not compared: the log does not have their rules"));
    let message = simulate(&lines, &["--fail-if", GATE]).fails_with(2);
    assert!(message.contains("only 33.33 % of the requests could be compared"), "{message}");
    // Rules of another id are not those of the decisions.
    let other: Vec<_> = lines.iter().map(|line| line.replace("\"id\":\"r1\"", "\"id\":\"r2\"")).collect();
    let message = simulate(&other, &["--fail-if", GATE]).fails_with(2);
    assert!(message.contains("the log has no rules"), "{message}");
}

#[test]
fn decisions_of_unknown_rules_are_counted_and_bound_the_gate() {
    let mut lines = log().lines;
    let others = Log::without_header("q").ten_of_ann_and_two_of_bob().lines;
    lines.extend(others.iter().map(|line| line.replace("\"rules\":\"r1\"", "\"rules\":\"r9\"")));
    let results = simulate(&lines, &["--json"]).json();
    assert!(
        has_warning(&results, "12 requests (50.00 %) are not compared: the log does not have their rules"),
        "{results}"
    );
    assert_eq!((&results["traffic"]["requests"], &results["changes"]["compared"]), (&json!(24), &json!(12)));
    let message = simulate(&lines, &["--fail-if", GATE]).fails_with(2);
    assert!(message.contains("only 50.00 % of the requests could be compared"), "{message}");
    assert_eq!(simulate(&lines, &["--fail-if", GATE, "--min-fidelity", "50%"]).code(), 0);
}

#[test]
fn missing_records_are_named() {
    let mut lines = log().lines;
    lines.drain(4..7);
    let results = simulate(&lines, &["--json"]).json();
    assert!(has_warning(&results, "process p: 3 records are missing (first 4 to 6)"), "{results}");
    // Without its beginning, a log that has the start of the process has a gap too.
    let mut lines = log().lines;
    lines.drain(1..3);
    let results = simulate(&lines, &["--json"]).json();
    assert!(has_warning(&results, "process p: 2 records are missing (first 1 to 2)"), "{results}");
}

#[test]
fn repeated_records_are_counted_once_and_named() {
    let files = Files::new().with("a.jsonl", log().text()).with("b.jsonl", log().text());
    let results = files.simulate("--rules new.yaml --traffic a.jsonl b.jsonl --json").json();
    assert_eq!((&results["traffic"]["requests"], &results["new"]["rejected"]), (&json!(12), &json!(7)));
    let told = "process p: 12 records occur again and were counted once (is a file given twice?)";
    assert!(has_warning(&results, told), "{results}");
}

#[test]
fn rotated_files_are_put_in_order() {
    let lines = log().lines;
    let ordered = simulate(&lines, &["--json"]).json();
    assert_eq!(ordered["warnings"], json!([]));
    let files = Files::new()
        .with("new.jsonl", [&lines[..1], &lines[7..]].concat().join("\n") + "\n")
        .with("old.jsonl", lines[..7].join("\n") + "\n");
    let results = files.simulate("--rules new.yaml --traffic new.jsonl old.jsonl --json").json();
    assert_eq!((&results["warnings"], &results["new"]["rejected"]), (&json!([]), &json!(7)));
}

#[test]
fn low_fidelity_judges_nothing() {
    // A limit that had been in use before the log begins.
    let unlike = (0..10).fold(Log::new("p", OLD_RULES), |log, number| log.decided(number * 100, "ann", number < 4));
    let run = simulate(&unlike.lines, &["--fail-if", GATE]);
    let message = run.fails_with(2);
    assert!(message.contains("--fail-if 'newly_rejected(*) > 90%': not judged: the fidelity is 90.00 %"), "{message}");
    assert!(message.contains("less than --min-fidelity 99%"), "{message}");
    let page = run.stdout();
    assert!(page.contains("fidelity  9 of 10 recorded decisions repeated (90.00 %)"), "{page}");
    assert!(page.contains("first difference: process p, decision 5: recorded over_limit, replayed ok"), "{page}");
    assert!(page.contains("condition newly_rejected(*) > 90%: not judged"), "{page}");
    assert_eq!(simulate(&unlike.lines, &["--fail-if", GATE, "--min-fidelity", "90%"]).code(), 0);
    let message = simulate(&unlike.lines, &["--fail-if", GATE, "--min-fidelity", "101%"]).fails_with(2);
    assert!(message.contains("--min-fidelity"), "{message}");
}

#[test]
fn reason_of_low_fidelity_is_told() {
    let mut lines = log().lines;
    lines.drain(2..5);
    let page = simulate(&lines, &[]).stdout();
    assert!(page.contains("records are missing"), "{page}");
    assert!(page.contains("reason    "), "{page}");
    assert!(!simulate(&log().lines, &[]).stdout().contains("reason    "));
    let results = simulate(&lines, &["--json"]).json();
    let reasons = results["verification"]["reasons"].as_array().unwrap();
    assert!(reasons.iter().any(|reason| reason == "records are missing"), "{results}");
}

#[test]
fn fidelity_is_needed_with_other_old_rules_too() {
    let files = Files::new().with("log.jsonl", log().text()).with("headless.jsonl", log().lines[1..].join("\n") + "\n");
    let run = |log: &str, more: &[&str]| {
        files.run(
            &[&["--rules", "new.yaml", "--against", "old.yaml", "--traffic", log, "--fail-if", GATE], more].concat(),
        )
    };
    assert_eq!(run("log.jsonl", &[]).code(), 0);
    let message = run("headless.jsonl", &[]).fails_with(2);
    assert!(message.contains("not judged: the fidelity is unknown"), "{message}");
    assert_eq!(run("headless.jsonl", &["--min-fidelity", "0%"]).code(), 0);
}

#[test]
fn each_condition_prints_its_figure() {
    let passing = "rejected(*) > 90%";
    let page = simulate(&log().lines, &["--fail-if", passing]).stdout();
    assert!(page.contains("condition rejected(*) > 90%: 58.33 % (7 of 12 requests), passed"), "{page}");
    let run = simulate(&log().lines, &["--fail-if", passing, "--fail-if", "rejected(*) > 1"]);
    assert_eq!(run.code(), 1);
    assert!(run.stdout().contains("condition rejected(*) > 1: 58.33 % (7 of 12 requests), failed"), "{run:?}");
}

#[test]
fn limit_without_traffic_is_not_judged() {
    let rules = NEW_RULES.to_owned() + "- {key: cart, rate_limit: {unit: minute, requests_per_unit: 1}}\n";
    let files = Files::new().with("log.jsonl", log().text()).with("more.yaml", rules);
    let run = |condition: &str| {
        files.run(&["--rules", "more.yaml", "--traffic", "log.jsonl", "--json", "--fail-if", condition])
    };
    let message = run("rejected(shop.cart) > 1%").fails_with(2);
    assert!(
        message.contains("--fail-if 'rejected(shop.cart) > 1%': not judged: no request charged shop.cart"),
        "{message}"
    );
    assert_eq!(run("rejected(shop.login) > 90%").json()["conditions"][0]["fails"], false);
}

/// Mapping of rows whose names are in `user`.
const MAP: &str = "time: at\ndomain: shop\ndescriptors:\n- - {key: login, field: user}\n- - {key: path, field: path}\n";

#[test]
fn absent_fields_of_a_map_are_counted_and_named() {
    let row =
        |second: u64, user: &str| json!({"at": 1_700_000_000 + second, "user": user, "path": "/"}).to_string() + "\n";
    let rows: String = (0..4).map(|second| row(second, "ann")).collect();
    let files = Files::new()
        .with("map.yaml", MAP)
        .with("typo.yaml", MAP.replace("field: user", "field: usr"))
        .with("access.log", rows + &row(4, "-"));
    let run = |map: &str, more: &[&str]| {
        files.run(&[&["--rules", "new.yaml", "--traffic", "access.log", "--map", map], more].concat())
    };
    let results = run("map.yaml", &["--json"]).json();
    assert!(has_warning(&results, "field 'user' of --map is absent in 1 of 5 rows"), "{results}");
    assert_eq!(run("map.yaml", &["--fail-if", "rejected(shop.login) > 90%"]).code(), 0);
    let results = run("typo.yaml", &["--json"]).json();
    assert!(has_warning(&results, "field 'usr' of --map is absent in all 5 rows (is it misspelt?)"), "{results}");
    for condition in ["rejected(shop.login) > 90%", "rejected(*) > 90%"] {
        let message = run("typo.yaml", &["--fail-if", condition]).fails_with(2);
        assert!(message.contains("not judged: no row has the field 'usr' of --map"), "{message}");
    }
}

#[test]
fn directory_is_no_traffic() {
    let files = Files::new();
    std::fs::create_dir(files.path("logs")).unwrap();
    let message = files.simulate("--rules new.yaml --traffic logs").fails_with(2);
    assert!(message.contains("--traffic logs: is a directory (give its files, such as logs/*)"), "{message}");
}

#[test]
fn changed_limits_are_marked_and_come_first() {
    let more = "- {key: cart, rate_limit: {unit: minute, requests_per_unit: 100}}\n";
    let log = Log::new("p", &(OLD_RULES.to_owned() + more)).request(0, &["cart=a"]).ten_of_ann_and_two_of_bob();
    let files = Files::new().with("log.jsonl", log.text()).with("more.yaml", NEW_RULES.to_owned() + more);
    let run = files.simulate("--rules more.yaml --traffic log.jsonl");
    let page = run.stdout();
    let row = page.lines().find(|line| line.starts_with("shop.login (changed)")).unwrap_or_else(|| panic!("{page}"));
    assert!(row.contains("7 (58.33 %)  5 (41.67 %)  2 "), "{row}");
    assert!(page.find("shop.login (changed)") < page.find("shop.cart"), "{page}");
    let results = files.simulate("--rules more.yaml --traffic log.jsonl --json").json();
    assert_eq!(
        (&limit(&results, "shop.login")["change"], limit(&results, "shop.cart").get("change")),
        (&json!("changed"), None)
    );
}
