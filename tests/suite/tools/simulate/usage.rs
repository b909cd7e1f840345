//! Conditions of `--fail-if`, and the use of flags.

use super::{Files, Log, OLD_RULES, Simulated};

fn files() -> Files {
    Files::new().with("log.jsonl", Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob().text())
}

/// Runs the new rules over the log, with these arguments too.
fn simulate(files: &Files, more: &[&str]) -> Simulated {
    files.run(&[&["--rules", "new.yaml", "--traffic", "log.jsonl"], more].concat())
}

#[test]
fn condition_that_holds_fails_the_command_with_its_figure() {
    let files = files();
    for (condition, figure) in [
        ("rejected(shop.login) > 1%", "58.33 % (7 of 12 requests)"),
        ("rejected(*) >= 7", "58.33 % (7 of 12 requests)"),
        ("rejected_keys(shop.login)>49.9%", "50.00 % (1 of 2 keys)"),
        ("newly_rejected(*) > 1", "16.67 % (2 of 12 requests)"),
        ("newly_rejected(shop.login) >= 2", "16.67 % (2 of 12 requests)"),
        ("newly_admitted(shop.login) <= 0", "0.00 % (0 of 12 requests)"),
        ("longest_run( shop.login ) > 6", "7 requests"),
        ("delayed(shop.login) < 1 %", "0.00 % (0 of 12 requests)"),
    ] {
        let run = simulate(&files, &["--fail-if", condition]);
        assert_eq!(run.fails_with(1), format!("tollkeeper: --fail-if '{condition}': {figure}\n"));
    }
    for condition in ["rejected(*) > 7", "rejected(shop.login) > 58.4%", "longest_run(shop.login) > 7"] {
        let results = simulate(&files, &["--json", "--fail-if", condition]);
        assert_eq!(results.json()["conditions"][0]["fails"], false, "{condition}");
    }
    let run = simulate(&files, &["--fail-if", "rejected(*) > 90%", "--fail-if", "rejected(*) > 1"]);
    assert!(run.fails_with(1).contains("rejected(*) > 1"), "{run:?}");
}

#[test]
fn invalid_use_is_refused_with_a_fix() {
    let files = files();
    for (condition, expected) in [
        ("rejected", "there is no `(` (write METRIC(LIMIT) > NUMBER, such as 'rejected(shop.login) > 1%')"),
        ("rejected(a > 1", "there is no `)`"),
        ("refused(shop.login) > 1", "'refused' is no metric (use one of rejected, rejected_keys,"),
        ("rejected() > 1", "the limit is missing"),
        ("rejected(shop.login) = 1", "there is no >, >=, < or <= after `)`"),
        ("rejected(shop.login) > many", "'many' is not a number from 0 on"),
        ("rejected(shop.login) > -1", "'-1' is not a number from 0 on"),
        ("longest_run(shop.login) > 1%", "longest_run is a number of requests (leave out the %)"),
        ("delayed(*) > 1", "this metric needs a limit"),
        ("rejected(shop.logon) > 1", "the rules have no limit 'shop.logon' (did you mean 'shop.login'?)"),
    ] {
        let run = simulate(&files, &["--fail-if", condition]);
        let message = run.fails_with(2);
        assert!(message.contains(expected), "{condition}: {message}");
    }
    for (arguments, expected) in [
        ("--rules - --traffic -", "standard input (-) can be read only once"),
        ("--traffic log.jsonl --against old.yaml", "--rules"),
        ("--traffic log.jsonl --map map.yaml", "--map needs --rules"),
        ("--rules new.yaml", "--traffic"),
        ("--rules new.yaml --traffic log.jsonl --memory 1", "out of range"),
        (
            "--rules new.yaml --traffic log.jsonl --report out.html",
            "--report was removed: the text shows requests over time as a chart, and --json writes all figures",
        ),
    ] {
        let message = files.simulate(arguments).fails_with(2);
        assert!(message.contains(expected), "{arguments}: {message}");
    }
    let files = files.with("bad.yaml", "domain: shop\ndescriptors:\n- {key: login, rate_limit: {}}\n");
    let message = files.simulate("--rules bad.yaml --traffic log.jsonl").fails_with(1);
    assert!(message.contains("the rules of --rules have errors\nbad.yaml:3:"), "{message}");
}
