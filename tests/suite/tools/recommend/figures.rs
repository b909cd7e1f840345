//! Figures: the basis, the limits, the rules to paste, and what limits the figures.

use serde_json::{Value, json};

use super::{Files, RULES, limit_of, settings, ten_users};
use crate::tools::simulate::Log;

#[test]
fn limits_of_known_traffic_are_the_quantiles_of_use() {
    let files = Files::new().with("log", ten_users().text());
    let recommend = |share: &str| {
        files.recommend(&format!("--rule shop.login --traffic log --rejected-keys {share} --json")).json()
    };
    let results = recommend("10%");
    assert_eq!(results["version"], 2);
    assert_eq!(results["basis"]["keys"], 10);
    assert_eq!(results["basis"]["requests"], 56);
    assert_eq!(results["basis"]["span_seconds"], 120.0);
    assert_eq!(results["rule"]["rejected_keys"], 5);
    assert_eq!(results["use"][0], json!({"period": "minute", "p50": 5, "p90": 9, "p99": 10, "max": 10}));
    assert_eq!(limit_of(&results, "minute"), 9);
    assert_eq!(
        results["left_out_periods"],
        json!([
            {"period": "hour", "reason": "longer than the traffic"},
            {"period": "day", "reason": "longer than the traffic"},
        ])
    );
    assert_eq!(results["warnings"], json!([]));
    let first = &results["limits"][0];
    assert_eq!(
        (&first["algorithm"], &first["period"], &first["recommended"]),
        (&json!("sliding_window_log"), &json!("minute"), &json!(true))
    );
    assert_eq!((&first["rejected_keys"], &first["rejected_keys_share"]), (&json!(1), &json!(0.1)));
    assert_eq!(limit_of(&recommend("0%"), "minute"), 10);
    assert_eq!(limit_of(&recommend("3"), "minute"), 7);
    // One less than three keys of ten.
    assert_eq!(limit_of(&recommend("29.9%"), "minute"), 8);
    assert_eq!(limit_of(&recommend("30%"), "minute"), 7);
}

#[test]
fn text_shows_basis_table_and_rules() {
    let files = Files::new().with("log", ten_users().text());
    let page = files.recommend("--rule shop.login --traffic log --rejected-keys 10%").stdout();
    for expected in [
        "rule      shop.login: 5 per minute by sliding_window_log (rules.yaml:3:16)",
        "basis     56 requests of 10 keys in 2 min",
        "rejected  0 requests (0.00 %) of 0 keys were rejected already",
        "now       rejects 5 (50.00 %) of the keys",
        "goal      at most 1 key of 10 rejected",
        "left out  hour, day: longer than the traffic",
        "any minute *     5    9    10   10   9      1 (10.00 %)",
        "any second       5    9    10   10   9      1 (10.00 %)",
        "limits by sliding_window_log; * is that of the rule to paste",
        "    requests_per_unit: 9\n    algorithm: sliding_window_log\n",
        "under the recommended limit, requests per 2 s\n      54 │█",
        "       0 │▁",
    ] {
        assert!(page.contains(expected), "{expected} is missing:\n{page}");
    }
    let results = files.recommend("--rule shop.login --traffic log --rejected-keys 10% --json").json();
    let (requests, rejected) = (&results["timeline"]["requests"], &results["timeline"]["rejected"]);
    assert_eq!((&requests[0], &requests[60], &rejected[0]), (&json!(55), &json!(1), &json!(1)));
}

#[test]
fn pasted_rules_pass_check_and_reject_as_told() {
    let hostile = "domain: \"sh: op\"\ndescriptors:\n- {key: \"lo: #gin\", value: \"on\", rate_limit: {name: 'a\"b\u{202e}', unit: minute, unit_multiplier: 2, \
                   requests_per_unit: 4, algorithm: token_bucket, bucket_size: 9, max_wait: 1500ms}}\n";
    let log = Log::new("p", hostile);
    let text = log.request(0, &["lo: #gin=on"]).request(1, &["lo: #gin=on"]).request(200_000, &["lo: #gin=on"]).text();
    let text = text.replace("\"domain\":\"shop\"", "\"domain\":\"sh: op\"");
    let files = Files::new().with("log", ten_users().text()).with("hostile", text);
    for (log, rule) in [("log", "shop.login"), ("hostile", "PATH")] {
        let mut arguments = format!("--rule {rule} --traffic {log} --json");
        arguments = arguments.replace(' ', "\t").replace("PATH", "sh: op.lo: #gin_on");
        let mut program = std::process::Command::new(kit::tollkeeper::program_path());
        let output = program.arg("recommend").args(arguments.split('\t')).current_dir(files.0.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let results: Value = serde_json::from_slice(&output.stdout).unwrap();
        let yaml = results["yaml"].as_str().unwrap();
        std::fs::write(files.path("pasted.yaml"), yaml).unwrap();
        let checked = files.run("check", "pasted.yaml");
        assert!(checked.0.status.success(), "{yaml}\n{checked:?}");
        if rule == "PATH" {
            // A terminal would print the rest from right to left.
            assert!(yaml.contains("name: \"a\\\"b\\u202e\"") && !yaml.contains('\u{202e}'), "{yaml}");
            assert!(yaml.contains("max_wait: 1500ms") && yaml.contains("unit_multiplier: 2"), "{yaml}");
        }
    }
    // simulate agrees with the figures under the pasted rules.
    let results = files.recommend("--rule shop.login --traffic log --rejected-keys 20% --json").json();
    std::fs::write(files.path("pasted.yaml"), results["yaml"].as_str().unwrap()).unwrap();
    let simulated = files.run("simulate", "--rules pasted.yaml --traffic log --json").json();
    assert_eq!(simulated["limits"][0]["new"]["rejected_keys"], 2);
}

#[test]
fn rule_to_paste_names_its_algorithm_and_keys_without_a_charge_do_not_count() {
    let rules = RULES.replace("sliding_window_log", "fixed_window");
    let refund = |name: &str| json!({"entries": [{"key": "login", "value": name}], "hits": -1, "sampled": true, "verdict": "ok"});
    let mut log = Log::new("p", &rules);
    log.push(0, &[refund("only_refunds")]);
    let log = (0..7).fold(log, |log, number| log.request(number * 100, &["login=a"]));
    let files = Files::new().with("log", log.request(61_000, &["login=b"]).text());
    let results = files.recommend("--rule shop.login --traffic log --rejected-keys 0% --json").json();
    // Defaults of rules may name another algorithm.
    assert!(results["yaml"].as_str().unwrap().contains("    algorithm: fixed_window\n"), "{results}");
    assert_eq!((&results["basis"]["keys"], &results["basis"]["refunds"]), (&json!(2), &json!(1)));
    assert_eq!(results["use"][0]["p50"], 1);
}

#[test]
fn rule_to_paste_keeps_window_ban_and_active_and_its_use_is_that_of_active_times() {
    // The log begins at 22:13:20 UTC.
    let limit = "unit: day, requests_per_unit: 2, window: {timezone: Europe/Berlin, day_starts: \"06:00\"}, \
                 ban: {for: 10m, after: 3}, active: {days: mon-sun, from: \"22:14\", to: \"22:16\", timezone: UTC}";
    let rules = format!("domain: shop\ndescriptors:\n- {{key: login, rate_limit: {{{limit}}}}}\n");
    let requests = [0, 1, 2, 3, 50, 51, 52].map(|second| second * 1000);
    let log = requests.into_iter().fold(Log::new("p", &rules), |log, at_ms| log.request(at_ms, &["login=a"]));
    let files = Files::new().with("log", log.text());
    let results = files.recommend("--rule shop.login --traffic log --rejected-keys 0 --json").json();
    assert_eq!((&results["basis"]["requests"], &results["limits"][0]["requests_per_unit"]), (&json!(3), &json!(3)));
    let yaml = results["yaml"].as_str().unwrap();
    let active = "{days: \"mon,tue,wed,thu,fri,sat,sun\", from: \"22:14\", to: \"22:16\", timezone: UTC}";
    let expected = format!(
        "    window: {{timezone: Europe/Berlin, day_starts: \"06:00\"}}\n    ban: {{for: 10m, after: 3}}\n    \
         active: {active}\n"
    );
    assert!(yaml.contains(&expected), "{yaml}");
    let shown = results["rule"]["limit"].as_str().unwrap();
    assert!(shown.ends_with(&format!(", ban {{for: 10m, after: 3}}, active {active}")), "{shown}");
    std::fs::write(files.path("pasted.yaml"), yaml).unwrap();
    let checked = files.run("check", "pasted.yaml");
    assert!(checked.0.status.success(), "{yaml}\n{checked:?}");
}

#[test]
fn recommended_limit_stays_global_if_it_can() {
    let recommended = |requests: u32, algorithm: &str| {
        let rules = format!(
            "domain: shop\ndescriptors:\n- {{key: login, rate_limit: {{unit: minute, requests_per_unit: 5000, \
             algorithm: {algorithm}, scope: global, max_overshoot: 40, reserve: 20%, on_region_loss: deny}}}}\n"
        );
        let mut log = Log::with_settings("p", &rules, &settings(&json!({"regions": 3})));
        for request in 0..requests {
            log = log.request(u64::from(request), &["login=a"]);
        }
        let files = Files::new().with("log", log.request(90_000, &["login=a"]).text());
        let results = files.recommend("--rule shop.login --traffic log --json").json();
        let yaml = results["yaml"].as_str().expect("there is a rule to paste").to_owned();
        std::fs::write(files.path("pasted.yaml"), &yaml).unwrap();
        let checked = files.run("check", "pasted.yaml");
        assert!(checked.0.status.success(), "{yaml}\n{checked:?}");
        (yaml, results["warnings"].to_string())
    };
    for algorithm in ["fixed_window", "token_bucket"] {
        let (yaml, warnings) = recommended(200, algorithm);
        let keys = "    scope: global\n    reserve: 20%\n    max_overshoot: 40\n    on_region_loss: deny\n";
        assert!(yaml.ends_with(keys), "{yaml}");
        assert!(warnings.contains("was replayed as one limit without regions"), "{warnings}");
        assert!(!warnings.contains("for one region"), "{warnings}");
    }
    // The reserve of a limit this small is nothing for three regions.
    let (yaml, warnings) = recommended(3, "fixed_window");
    assert!(!yaml.contains("scope"), "{yaml}");
    assert!(warnings.contains("the recommended limit cannot have `scope: global`"), "{warnings}");
}

#[test]
fn what_limits_the_figures_is_told() {
    let warned = |files: &Files, arguments: &str, expected: &str| {
        let results = files.recommend(&format!("--rule shop.login --json {arguments}")).json();
        let warnings = results["warnings"].to_string();
        assert!(warnings.contains(expected), "{arguments}: {expected} is missing: {warnings}");
        results
    };
    let header = |changes: &Value| {
        Log::with_settings("p", RULES, &settings(changes)).request(0, &["login=a"]).request(90_000, &["login=a"]).text()
    };
    let dropped = ten_users().text()
        + &json!({"v": 1, "type": "dropped", "process": "p", "time_us": 0, "count": 7, "reason": "queue_full"})
            .to_string()
        + "\n";
    let with_override = ten_users().text().replacen(
        "\"hits\":1",
        "\"override\":{\"requests_per_unit\":3,\"unit\":\"minute\",\"multiplier\":1},\"hits\":1",
        1,
    );
    let q = Log::new("q", RULES).request(0, &["login=a"]).text();
    let in_memory = |text: String| text.replace("\"store\":\"redis\"", "\"store\":\"memory\"");
    let files = Files::new()
        .with("log", ten_users().text())
        .with("sample", header(&json!({"sample": 0.25})))
        .with("incomplete", header(&json!({"when": ["rejected"]})))
        .with("hashed", header(&json!({"values": "hashed"})))
        .with("dropped", dropped)
        .with("override", with_override)
        .with("p", in_memory(ten_users().text()))
        .with("q", in_memory(q))
        .with("short", Log::new("p", RULES).request(0, &["login=a"]).request(900, &["login=a"]).text())
        .with("rules.yaml", RULES)
        .with("map.yaml", "time: t\ndomain: shop\ndescriptors: [[{key: login, field: user}]]\n")
        .with("table.csv", "t,user\n1700000000,ann\n1700000001,ann\n1700000100,bob\n");
    warned(&files, "--traffic sample", "the log has 25 % of the keys");
    warned(&files, "--traffic incomplete", "leaves out admitted decisions");
    warned(&files, "--traffic dropped", "the log lost 7 decisions");
    warned(&files, "--traffic short", "the traffic is shorter than two periods (minute)");
    warned(&files, "--traffic log", "too few keys for this share (10)");
    let results = warned(&files, "--traffic override", "1 descriptors brought a limit of their own");
    assert_eq!(results["basis"]["requests"], 55);
    let results = warned(&files, "--traffic p q", "2 processes counted in their own memory");
    assert_eq!((&results["basis"]["keys"], &results["basis"]["processes"]), (&json!(11), &json!(2)));
    let results = warned(&files, "--traffic log --max-keys 4 --rejected-keys 0%", "requests of keys beyond --max-keys");
    assert_eq!(
        (&results["basis"]["keys"], &limit_of(&results, "minute"), &results["basis"]["requests"]),
        (&json!(4), &json!(4), &json!(11))
    );
    let results = warned(&files, "--traffic table.csv --rules rules.yaml --map map.yaml", "the traffic has no answers");
    assert!(results["basis"]["already_rejected"].is_null(), "{results}");
    assert_eq!(files.recommend("--rule shop.login --traffic hashed --json").json()["basis"]["keys"], 1);
}

#[test]
fn traffic_beyond_memory_is_left_out_and_told() {
    let mut log = Log::new("p", RULES);
    for number in 0..40_000 {
        log = log.request(number * 5, &[&format!("login=u{}", number % 7)]);
    }
    let files = Files::new().with("log", log.text());
    let results = files.recommend("--rule shop.login --traffic log --memory 1MiB --json").json();
    let read = results["basis"]["requests"].as_u64().unwrap();
    assert!((10_000..40_000).contains(&read), "{read}");
    let warnings = results["warnings"].to_string();
    assert!(warnings.contains(&format!("memory was full after {read} requests")), "{warnings}");
}
