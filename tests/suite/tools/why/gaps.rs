//! Absent descriptors, hidden and hashed values, samples, missing records and damaged logs.

use serde_json::{Value, json};
use tollkeeper::decide::log::value_form::ValueForm;
use tollkeeper::limit::request::Entry;

use super::{Logs, changed, decision, descriptor, header, lines, of_ann};

const HASH_KEY: &str = "a key of sixteen bytes or more";

/// A decision on `login=ann` with a hashed value.
fn hashed(secret: &str) -> Value {
    let entry = ValueForm::hashed_with(secret).build_entry_record(&Entry { key: b"login", value: b"ann" });
    let entries = json!([{"key": "login", "value_hash": entry.value_hash.unwrap()}]);
    decision(0, &[changed(descriptor("login=ann", "over_limit"), &json!({"entries": entries}))])
}

#[test]
fn hashed_log_needs_its_key() {
    let logs = Logs::new(&[hashed(HASH_KEY)]);
    let ask = |name: &str, value: &str| {
        let mut command = logs.command("--domain shop --descriptor login=ann --log log.jsonl");
        let output = command.env(name, value).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    const KEY: &str = "TOLLKEEPER_DECISION_LOG_HASH_KEY";
    const FILE: &str = "TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE";
    let (code, text) = ask(KEY, HASH_KEY);
    assert!(code == 0 && text.contains("rejected 1 of 1 request"), "{text}");
    let path = logs.path("key");
    std::fs::write(&path, format!("{HASH_KEY}\n")).unwrap();
    assert_eq!(ask(FILE, path.to_str().unwrap()).0, 0);
    let (code, text) = ask(KEY, "another key of sixteen bytes");
    assert!(code == 1 && text.contains("descriptors with these keys and other, hashed values: 1"), "{text}");
    assert!(text.contains("TOLLKEEPER_DECISION_LOG_HASH_KEY (or _FILE) is not the key of the log"), "{text}");
    let (code, text) = ask("UNRELATED", "1");
    assert!(code == 1 && text.contains("hashed values: 1 (give the key of the log"), "{text}");
    let (code, text) = ask(KEY, "short");
    assert!(code == 2 && text.contains("too short to be a secret"), "{text}");
    let (code, text) = ask(FILE, "/nowhere");
    assert!(code == 2 && text.contains("cannot be read"), "{text}");
}

#[test]
fn absent_descriptor_has_reasons_and_near_ones() {
    let of = |text: &str| decision(0, &[descriptor(text, "ok")]);
    let anne = of("login=anne");
    let start = |settings: &Value| header(0, "start", "r1", settings);
    let hidden = changed(descriptor("login=x", "ok"), &json!({"entries": [{"key": "login"}]}));
    for (records, expected) in [
        (vec![anne.clone()], "nearest descriptors in the logs:\n  login=anne\n"),
        (vec![changed(of("login=ann"), &json!({"domain": "other"}))], "  login=ann in domain other\n"),
        (
            vec![decision(0, &[hidden])],
            "descriptors with these keys and without values: 1 (decision_log: none of their rule",
        ),
        (vec![start(&json!({"sample": 0.25})), anne.clone()], "TOLLKEEPER_DECISION_LOG_SAMPLE=0.25"),
        (vec![start(&json!({"when": ["rejected"]})), anne.clone()], "TOLLKEEPER_DECISION_LOG_WHEN=rejected"),
        (vec![start(&json!({}))], "the logs have no decisions"),
    ] {
        let logs = Logs::new(&records);
        let output = logs.ask("--log log.jsonl");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.code() == Some(1) && text.contains(expected), "{expected:?} is missing: {text}");
        assert!(text.contains("no requests with this descriptor were found"), "{text}");
    }
    // The question is a whole descriptor.
    let both = json!([{"key": "login", "value": "ann"}, {"key": "path", "value": "/"}]);
    let longer = decision(0, &[changed(descriptor("login=ann", "ok"), &json!({"entries": both}))]);
    let text = Logs::new(&[longer]).text("");
    assert!(
        text.contains("entries must be all those of the request") && text.contains("  login=ann,path=/\n"),
        "{text}"
    );
}

#[test]
fn pattern_is_told_apart_from_a_value() {
    let logs = Logs::new(&[decision(0, &[descriptor("path=/search?q=1", "over_limit")])]);
    let output = logs.command("--domain shop --descriptor path=/search* --log log.jsonl").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("a `*` is no pattern here") && text.contains("  path=/search?q=1\n"), "{text}");
    let sent = logs.command("--domain shop --descriptor path=/search?q=1 --log log.jsonl").output().unwrap();
    assert!(!String::from_utf8(sent.stdout).unwrap().contains("pattern"));
}

#[test]
fn near_descriptors_are_bounded() {
    let of = |number: u32| decision(0, &[descriptor(&format!("login=user{number}{}", "x".repeat(300)), "ok")]);
    let results = Logs::new(&(0..50).map(of).collect::<Vec<_>>()).json("");
    let nearest = results["nearest"].as_array().unwrap();
    assert_eq!(nearest.len(), 5);
    assert!(nearest.iter().all(|text| text.as_str().unwrap().len() < 250), "{nearest:?}");
}

#[test]
fn gaps_in_the_range_are_told() {
    let dropped = |second: u64| {
        json!({"v": 1, "type": "dropped", "process": "p", "time_us": super::NOON_US + second * super::SECOND_US,
               "count": 3, "reason": "queue_full"})
    };
    let logs = Logs::new(&[of_ann(1, "over_limit"), dropped(2), of_ann(600, "over_limit")]);
    let is_told = |arguments: &str| logs.text(arguments).contains("up to 3 records are missing here");
    assert!(is_told("") && is_told("--at 12:00:30"));
    assert!(!is_told("--at 12:10:00"));
    // The record is written later than the gap.
    let logs = Logs::new(&[of_ann(1, "over_limit"), dropped(300), of_ann(600, "over_limit")]);
    let is_told = |at: &str| logs.text(&format!("--at {at}")).contains("up to 3 records are missing here");
    assert!(is_told("12:00:00") && is_told("12:03:00") && !is_told("12:08:00"));
    let text = logs.text("--at 12:05:00");
    assert!(text.contains("the descriptor 2 times at other times, 2026-07-08T12:00:01"), "{text}");
    let unsampled = changed(descriptor("login=ann", "over_limit"), &json!({"sampled": false}));
    let text = Logs::new(&[decision(0, &[unsampled])]).text("");
    assert!(text.contains("the sample leaves this key out: 1 of these decisions"), "{text}");
}

#[test]
fn range_outside_of_the_log_is_told() {
    let logs = Logs::new(&[of_ann(0, "over_limit"), of_ann(10, "over_limit")]);
    for (at, expected) in [
        ("2026-07-09T12:00", "the logs end before, at 2026-07-08T12:00:10"),
        ("2026-07-07T12:00", "the logs begin later, at 2026-07-08T12:00:00"),
        ("2026-07-08T12:00:30", "the logs begin within this time"),
    ] {
        let text = logs.text(&format!("--at {at}"));
        assert!(text.contains(expected), "{expected:?} is missing: {text}");
    }
    let from_start = Logs::new(&[header(0, "rotation", "r1", &json!({})), of_ann(70, "over_limit")]);
    let text = from_start.text("--at 12:01:10");
    assert!(!text.contains("the logs begin"), "its header is older: {text}");
}

#[test]
fn damaged_logs_are_told_and_read_on() {
    let good = lines(&[of_ann(0, "over_limit")]);
    let logs = Logs::new(&[]).with("log.jsonl", format!("{good}nonsense\n{good}{{\"v\":2,\"type\":\"x\"}}\n"));
    let text = logs.text("");
    assert!(text.contains("rejected 2 of 2 requests"), "{text}");
    assert!(text.contains("2 lines are left out; the first: log.jsonl:2: not a record"), "{text}");
    let cut = logs.with("log.jsonl", format!("{good}{}", &good[..good.len() / 2]));
    assert!(cut.text("").contains("a log ends within a record"));
    for (contents, expected) in [("nonsense\n", "log.jsonl:1: not a record of a decision log"), ("", "")] {
        let output = Logs::new(&[]).with("log.jsonl", contents).ask("--log log.jsonl");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && text.contains(expected), "{text}");
    }
    let output = Logs::new(&[of_ann(0, "over_limit")]).ask("--log missing log.jsonl");
    assert!(output.status.code() == Some(1), "{output:?}");
    assert!(String::from_utf8(output.stderr).unwrap().contains("missing: cannot be opened"));
    assert!(String::from_utf8(output.stdout).unwrap().contains("rejected 1 of 1 request"));
}
