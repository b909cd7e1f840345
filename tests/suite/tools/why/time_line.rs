//! Figures, the time line, the range of time, several logs and the use of flags.

use std::process::Command;

use serde_json::{Value, json};

use super::{DAY_US, Logs, NOON_US, SECOND_US, changed, decision, descriptor, header, lines, of_ann};

#[test]
fn summary_and_time_line_name_the_rule_and_its_line() {
    let logs = Logs::new(&[of_ann(1, "ok"), of_ann(2, "over_limit"), of_ann(3, "over_limit")]);
    let expected = "\
domain shop, descriptor login=ann
rejected 2 of 3 requests, from 2026-07-08 12:00:02.000000 to 2026-07-08 12:00:03.000000 UTC
  2 by shop.login (rules.yaml:7), 10 per minute token_bucket
  (with shadow_mode: true a limit rejects nothing)
  1 admitted, not shown (--all)

2026-07-08 (UTC)

12:00:02.000000  over_limit
  1 hit: over_limit, shop.login (rules.yaml:7), decided by counter
    10 per minute token_bucket: 10 -> 10 counted, 0 remaining, exceeded
      would have passed at 2026-07-08 12:00:08.000000 UTC (6 s later)
      would have passed with bucket_size 11: 10 were counted before

12:00:03.000000  over_limit
  1 hit: over_limit, shop.login (rules.yaml:7), decided by counter
    10 per minute token_bucket: 10 -> 10 counted, 0 remaining, exceeded
      would have passed at 2026-07-08 12:00:09.000000 UTC (6 s later)
      would have passed with bucket_size 11: 10 were counted before
";
    assert_eq!(logs.text(""), expected);
    let all = logs.text("--all");
    assert!(all.contains("12:00:01.000000  ok\n") && all.contains("3 -> 4 counted, 6 remaining, has room"), "{all}");
    assert!(!all.contains("not shown"), "{all}");
}

#[test]
fn time_of_day_is_that_of_the_last_day_that_the_log_reaches() {
    let on_day =
        |day: u64, second: u64| decision(day * DAY_US + second * SECOND_US, &[descriptor("login=ann", "over_limit")]);
    let other = |day: u64, second: u64| decision(day * DAY_US + second * SECOND_US, &[descriptor("login=bob", "ok")]);
    let logs = Logs::new(&[on_day(0, 0), on_day(1, 30), on_day(1, 61), on_day(2, 61), other(3, 0)]);
    let times = |at: &str| -> Vec<String> {
        let results = logs.json(&format!("--at {at}"));
        results["decisions"].as_array().unwrap().iter().map(|one| one["time"].as_str().unwrap().to_owned()).collect()
    };
    // The last day has the time, but not the key.
    assert_eq!(times("12:00"), [""; 0]);
    assert_eq!(times("12:02:01"), ["2026-07-10T12:01:01.000000Z"]);
    assert_eq!(times("2026-07-09T12:00"), ["2026-07-09T12:00:30.000000Z"]);
    assert_eq!(times("2026-07-09T14:00:00+02:00"), ["2026-07-09T12:00:30.000000Z"]);
    assert_eq!(times("2026-07-09T12:00 --window 61s"), ["2026-07-09T12:00:30.000000Z", "2026-07-09T12:01:01.000000Z"]);
    // Ranges of two days do not overlap.
    let range = logs.json("--at 12:00 --window 20h")["range"].clone();
    assert_eq!(
        (&range["from"], &range["to"]),
        (&json!("2026-07-11T00:00:00.000001Z"), &json!("2026-07-11T23:59:59.999999Z"))
    );
    assert_eq!(logs.json("--at 12:00")["range"]["at"], "2026-07-11T12:00:00.000000Z");
}

#[test]
fn logs_of_replicas_are_merged_by_time() {
    let of_replica = |second: u64, process: &str| changed(of_ann(second, "over_limit"), &json!({"process": process}));
    let logs = Logs::new(&[of_replica(1, "a"), of_replica(3, "a")])
        .with("b.jsonl", lines(&[of_replica(2, "b"), of_replica(4, "b")]));
    let output = Command::new("gzip").arg("-c").arg(logs.path("b.jsonl")).output().unwrap();
    std::fs::write(logs.path("b.gz"), output.stdout).unwrap();
    for other in ["b.jsonl", "b.gz"] {
        let output = logs.ask(&format!("--json --log {other} log.jsonl"));
        let results: Value = serde_json::from_slice(&output.stdout).unwrap();
        let processes: Vec<_> =
            results["decisions"].as_array().unwrap().iter().map(|it| it["record"]["process"].clone()).collect();
        assert_eq!(processes, ["a", "b", "a", "b"], "{other}");
    }
    // A clock that is 1.5 s fast, by that of Redis, which only the first decision has asked.
    let time_us = |half_seconds: u64| NOON_US + half_seconds * SECOND_US / 2;
    let mut charged = changed(of_replica(2, "b"), &json!({"time_us": time_us(7), "duration_us": 0}));
    charged["descriptors"][0]["now_us"] = json!(time_us(4));
    let mut cached = changed(of_replica(4, "b"), &json!({"time_us": time_us(11)}));
    cached["descriptors"][0]["decided_by"] = json!("over_limit_cache");
    let logs = logs.with("fast.jsonl", lines(&[charged, cached]));
    let results: Value = serde_json::from_slice(&logs.ask("--json --log fast.jsonl log.jsonl").stdout).unwrap();
    let times: Vec<_> = results["decisions"].as_array().unwrap().iter().map(|it| it["time"].clone()).collect();
    assert_eq!(times, [1, 2, 3, 4].map(|second| json!(format!("2026-07-08T12:00:0{second}.000000Z"))));
    let output = logs.ask_about_input(lines(&[of_ann(1, "over_limit")]).as_bytes());
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("rejected 1 of 1 request,"));
}

#[test]
fn max_keeps_the_nearest_or_the_last_and_tells_the_others() {
    let records: Vec<Value> = (0..10).map(|second| of_ann(second, "over_limit")).collect();
    let logs = Logs::new(&records);
    let seconds = |arguments: &str| -> Vec<u64> {
        let results = logs.json(arguments);
        assert_eq!(results["left_out"].as_u64().unwrap(), 7, "{results}");
        let time = |one: &Value| (one["record"]["time_us"].as_u64().unwrap() - NOON_US) / SECOND_US;
        results["decisions"].as_array().unwrap().iter().map(time).collect()
    };
    assert_eq!(seconds("--max 3"), [7, 8, 9]);
    assert_eq!(seconds("--max 3 --at 12:00:04"), [3, 4, 5]);
    let text = logs.text("--max 3");
    assert!(text.contains("rejected 10 of 10 requests") && text.contains("7 not shown (--max)"), "{text}");
}

#[test]
fn other_descriptor_that_rejected_is_told() {
    let path = descriptor("path=/", "over_limit");
    let logs = Logs::new(&[
        decision(0, &[descriptor("login=ann", "ok"), path.clone()]),
        decision(SECOND_US, &[descriptor("login=ann", "over_limit"), path]),
    ]);
    let text = logs.text("");
    for expected in [
        "rejected 2 of 2 requests",
        "  2 by shop.path (rules.yaml:7), 10 per minute token_bucket",
        "  1 by shop.login (rules.yaml:7), 10 per minute token_bucket",
        "  1 rejected by another descriptor of the request: this one had room",
        "  1 hit: ok, shop.login (rules.yaml:7), decided by counter\n    10 per minute token_bucket: 3 -> 4 counted",
        "  rejected by descriptor 2: path=/, 1 hit: over_limit, shop.path (rules.yaml:7)",
    ] {
        assert!(text.contains(expected), "{expected:?} is missing: {text}");
    }
}

#[test]
fn every_kind_of_decision_is_told() {
    let ann = || descriptor("login=ann", "ok");
    let limit = |changes: &Value| changed(ann()["limits"][0].clone(), changes);
    let exceeded = json!({"admitted": false, "before": 10, "after": 10, "remaining": 0, "reset_us": 1});
    let mut unmatched = changed(ann(), &json!({"limits": []}));
    unmatched.as_object_mut().unwrap().retain(|name, _| name != "rule" && name != "decided_by");
    let mut overridden =
        changed(ann(), &json!({"override": {"requests_per_unit": 5, "unit": "minute", "multiplier": 2}}));
    overridden.as_object_mut().unwrap().remove("rule");
    let by_policy = |policy: &str, verdict: &str| {
        let limits = json!([limit(&json!({"result": null}))]);
        let changes = json!({"limits": limits, "decided_by": "policy", "policy": policy, "reason": "timeout", "verdict": verdict});
        changed(ann(), &changes)
    };
    for (descriptor, expected) in [
        (changed(ann(), &json!({"hits": 0})), "peek: ok"),
        (changed(ann(), &json!({"hits": -2})), "refund of 2 hits: ok"),
        (changed(ann(), &json!({"limits": [], "unlimited": true})), "shop.login (rules.yaml:7), unlimited"),
        (unmatched, "1 hit: ok, no limit\n"),
        (overridden, "the limit that came with the request: 5 per 2 minutes"),
        (changed(ann(), &json!({"rule": {"path": "shop.login", "resource": "r"}})), "shop.login (resource r)"),
        (changed(ann(), &json!({"decided_by": "over_limit_cache"})), "decided by over-limit cache of the process"),
        (changed(ann(), &json!({"decided_by": "share"})), "decided by share of an eventual limit"),
        (changed(ann(), &json!({"decided_by": "lease"})), "decided by lease of an eventual limit"),
        (by_policy("allow", "ok"), "decided by on_store_error: allow, as the store failed (timeout)"),
        (by_policy("deny", "over_limit"), "would have passed with a store that answers"),
        (
            by_policy("deny", "over_limit"),
            "1 by shop.login (rules.yaml:7), on_store_error: deny, as the store failed (timeout)",
        ),
        (by_policy("error", "error"), "1 without an answer"),
        (
            changed(
                ann(),
                &json!({"verdict": "shadow", "limits": [limit(&json!({"shadow": true, "result": exceeded}))]}),
            ),
            "10 per minute token_bucket [in shadow mode, rejects nothing]: 10 -> 10 counted, 0 remaining, exceeded",
        ),
        (changed(ann(), &json!({"verdict": "shadow"})), "1 admitted in shadow mode"),
        (
            changed(ann(), &json!({"limits": [limit(&json!({"candidate": true, "name": "new", "result": exceeded}))]})),
            "10 per minute token_bucket (new) [candidate, rejects nothing]: 10 -> 10 counted",
        ),
        (changed(ann(), &json!({"limits": [limit(&json!({"quota": true}))]})), "[quota_mode, rejects only together"),
        (
            changed(ann(), &json!({"limits": [limit(&json!({"capacity": 20, "unit_multiplier": 3}))]})),
            "10 per 3 minutes token_bucket, bucket_size 20: ",
        ),
    ] {
        let text = Logs::new(&[decision(0, &[descriptor])]).text("--all");
        assert!(text.contains(expected), "{expected:?} is missing: {text}");
    }
    let failed = changed(decision(0, &[ann()]), &json!({"verdict": "error", "error": "no_rules", "trace_id": "abc"}));
    let text = Logs::new(&[failed]).text("");
    assert!(text.contains("error: no_rules  trace abc"), "{text}");
    let delayed = changed(decision(0, &[ann()]), &json!({"delay_us": 1_500_000}));
    assert!(Logs::new(&[delayed]).text("--all").contains("ok, delayed 2 s"));
}

#[test]
fn changed_rules_stand_between_the_decisions() {
    let none = json!({});
    let logs = Logs::new(&[
        header(0, "start", "r1", &none),
        of_ann(1, "over_limit"),
        header(2, "rotation", "r1", &none),
        header(3, "reload", "r1", &none),
        header(4, "reload", "r2", &none),
        of_ann(5, "over_limit"),
    ]);
    let text = logs.text("--at 12:00:00");
    let positions: Vec<usize> = [
        "12:00:00.000000  process started: rules r1 (process p)",
        "12:00:01.000000  over_limit",
        "12:00:04.000000  rules changed: rules r2 (process p)",
        "12:00:05.000000  over_limit",
    ]
    .iter()
    .map(|expected| text.find(expected).unwrap_or_else(|| panic!("{expected:?} is missing: {text}")))
    .collect();
    assert!(positions.is_sorted(), "{text}");
    assert_eq!(text.matches("rules changed").count(), 1, "the same rules are no change: {text}");
    assert!(!logs.text("--at 12:30").contains("process started"));
}

#[test]
fn untrusted_text_cannot_control_the_terminal() {
    let bad = "a\u{1b}[2J\u{202e}\n";
    let mut hostile = descriptor("login=ann", "over_limit");
    hostile["rule"] = json!({"path": bad, "file": bad, "line": 1});
    hostile["limits"][0]["name"] = json!(bad);
    hostile["reason"] = json!(bad);
    hostile["decided_by"] = json!("policy");
    let mut other = descriptor("path=/", "over_limit");
    other["entries"] = json!([{"key": bad, "value": bad}]);
    let start = changed(header(0, "start", bad, &json!({"when": [bad]})), &json!({"process": bad}));
    let record = changed(decision(1, &[hostile, other]), &json!({"trace_id": bad, "error": bad}));
    for records in [
        vec![start.clone(), record.clone()],
        vec![
            start,
            decision(1, &[changed(descriptor("a=b", "ok"), &json!({"entries": [{"key": bad, "value": bad}]}))]),
        ],
    ] {
        let text = Logs::new(&records).text("");
        assert!(text.contains("\\u{1b}"), "{text:?}");
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text:?}");
    }
    let output = Logs::new(&[]).command("--domain d\u{1b} --descriptor k=\u{1b} --log \u{1b}").output().unwrap();
    assert!(!output.stdout.contains(&0x1b) && !output.stderr.contains(&0x1b), "{output:?}");
}

#[test]
fn invalid_use_is_refused_with_a_fix() {
    let logs = Logs::new(&[of_ann(0, "ok")]);
    for (arguments, expected) in [
        ("--log log.jsonl --at noon", "write 10:05, 10:05:30 or 2026-07-08T10:05 in UTC"),
        ("--log log.jsonl --at 2026-07-08", "write 10:05"),
        ("--log log.jsonl --at 25:00", "write 10:05"),
        ("--log log.jsonl --window 1m", "--at <TIME>"),
        ("--log - -", "standard input (-) can be read only once"),
        ("", "--log"),
    ] {
        let output = logs.ask(arguments);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && text.contains(expected), "{arguments}: {text}");
    }
}
