//! Invalid use, and hostile traffic.

use std::fs::File;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{Files, RULES, limit_of, settings, ten_users};
use crate::tools::simulate::Log;
use kit::tollkeeper::program_path;

#[test]
fn invalid_use_is_refused_with_a_fix() {
    let unlimited = "domain: shop\ndescriptors:\n- {key: login, rate_limit: {unlimited: true}}\n- {key: other, rate_limit: {unit: day, requests_per_unit: 1}}\n";
    let none = Log::with_settings("p", RULES, &settings(&json!({"values": "none"}))).request(0, &["login=a"]);
    let hashed = RULES.replace("key: login", "key: login, value: ann");
    let hashed = Log::with_settings("p", &hashed, &settings(&json!({"values": "hashed"}))).request(0, &["login=ann"]);
    let several = "domain: shop\ndescriptors:\n- {key: login, rate_limit: [{unit: day, requests_per_unit: 9}, {unit: minute, requests_per_unit: 2}]}\n\
                   - {key: checkout, rate_limit: {unit: day, requests_per_unit: 1}}\n";
    let several = Log::new("p", several).request(0, &["login=a"]);
    let concurrent = "domain: shop\ndescriptors:\n- {key: login, rate_limit: {concurrent: 2}}\n";
    let concurrent = Log::new("p", concurrent).request(0, &["login=a"]);
    let without_header: String = ten_users().text().split_once('\n').unwrap().1.to_owned();
    let files = Files::new()
        .with("log", ten_users().text())
        .with("unlimited.yaml", unlimited)
        .with("none", none.text())
        .with("hashed", hashed.text())
        .with("headless", without_header)
        .with("other", Log::new("p", RULES).request(0, &["path=/x"]).text())
        .with("several", several.text())
        .with("concurrent", concurrent.text())
        .with("empty", "");
    for (code, arguments, expected) in [
        (
            2,
            "--rule shop.logon --traffic log",
            "--rule shop.logon: the rules have no limit of that path (did you mean 'shop.login'?)",
        ),
        (
            2,
            "--rule shop.login --traffic log --rules unlimited.yaml",
            "the rule is unlimited (give --rules with any limit for it)",
        ),
        (2, "--rule shop.logins --traffic several", "(did you mean 'shop.login' or 'shop.login.minute_fixed_window'?)"),
        (2, "--rule shop.login --traffic concurrent", "the limit is concurrent, and recommend finds"),
        (2, "--rule shop.login --traffic headless", "the traffic has no rules (give --rules)"),
        (2, "--rule shop.login --traffic - --rules -", "standard input (-) can be read only once"),
        (2, "--rule shop.login --traffic log --map map.yaml", "--rules"),
        (2, "--rule shop.login --traffic log --rejected-keys 100%", "less than 100%"),
        (2, "--rule shop.login --traffic log --rejected-keys=-1%", "0%"),
        (2, "--rule shop.login --traffic log --rejected-keys NaN%", "0%"),
        (2, "--rule shop.login --traffic log --rejected-keys few", "write a share, such as 0.1%, or a number of keys"),
        (
            2,
            "--rule shop.login --traffic log --report out.html",
            "--report was removed: the text shows requests over time as a chart, and --json writes all figures",
        ),
        (2, "--traffic log", "--rule"),
        (1, "--rule shop.login --traffic missing", "missing: cannot be opened"),
        (1, "--rule shop.login --traffic empty", "the traffic has no requests"),
        (1, "--rule shop.login --traffic other", "no request of the traffic charged shop.login"),
        (1, "--rule shop.login --traffic none", "the log has no values"),
        (
            1,
            "--rule shop.login_ann --traffic hashed",
            "the values of the log are hashed, and rules.yaml:3:4 matches on a value",
        ),
    ] {
        let message = files.recommend(arguments).fails_with(code);
        assert!(message.contains(expected) && !message.contains("panicked"), "{arguments}: {message}");
    }
}

#[test]
fn standard_input_is_read() {
    let files = Files::new().with("log", ten_users().text());
    let mut program = Command::new(program_path());
    program.args(["recommend", "--rule", "shop.login", "--traffic", "-", "--json"]);
    let output = program.stdin(Stdio::from(File::open(files.path("log")).unwrap())).output().unwrap();
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(limit_of(&results, "minute"), 10);
}

#[test]
fn hostile_hits_and_times_have_an_answer() {
    let at = |log: &str, from: &str, to: &str| log.replacen(from, to, 1);
    let ordinary = ten_users().text();
    let huge = at(&ordinary, "\"hits\":1", "\"hits\":4294967296");
    let large = at(&ordinary, "\"hits\":1", "\"hits\":20000");
    let refunds = ordinary.replace("\"hits\":1", "\"hits\":-1");
    let backwards = at(&ordinary, "\"time_us\":1700000000300000", "\"time_us\":1");
    let endless = at(&ordinary, "\"time_us\":1700000120000000", "\"time_us\":9223372036854775807");
    let files = Files::new()
        .with("huge", huge)
        .with("large", large)
        .with("refunds", refunds)
        .with("backwards", backwards)
        .with("endless", endless);
    let recommend =
        |log: &str| files.recommend(&format!("--rule shop.login --traffic {log} --rejected-keys 0% --json"));
    // More hits than any limit has.
    let message = recommend("huge").fails_with(1);
    assert!(message.contains("no limit rejects so few keys (raise --rejected-keys, "), "{message}");
    // More than a log may hold.
    let message = recommend("large").fails_with(1);
    assert!(message.contains("or give --rules with another algorithm"), "{message}");
    // Nothing was charged.
    assert!(recommend("refunds").fails_with(1).contains("no request of the traffic charged shop.login"));
    for log in ["backwards", "endless"] {
        let results = recommend(log).json();
        for row in results["limits"].as_array().unwrap() {
            assert_eq!(row["rejected_keys"], 0, "{log}: {row}");
        }
    }
}
