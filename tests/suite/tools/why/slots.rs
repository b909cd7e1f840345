//! Concurrent limits: which slots were held when a request was rejected, and that no wait is promised.

use serde_json::{Value, json};

use super::{Logs, NOON_US, SECOND_US, changed, decision, descriptor};

/// What `login=ann` does with a slot, at a second after noon; `change` is what became of the slot.
fn with_slot(second: u64, action: &str, id: u8, change: &str) -> Value {
    let rejected = change.is_empty() || change == "late";
    let verdict = if rejected && action == "acquire" { "over_limit" } else { "ok" };
    let mut of_slot = descriptor("login=ann", verdict);
    of_slot["slot"] = json!({
        "action": action, "id": format!("{id:032x}"), "token": "0000000000000001", "holder": "00000000000000aa",
    });
    if action != "acquire" {
        of_slot["hits"] = (-1).into();
    }
    let mut result = changed(of_slot["limits"][0]["result"].clone(), &json!({"before": 2, "after": 2}));
    if !change.is_empty() {
        result["slot"] = change.into();
    }
    let limit = json!({"algorithm": "concurrent", "requests_per_unit": 2, "unit": "minute", "result": result});
    of_slot["limits"][0] = limit;
    decision(second * SECOND_US, &[of_slot])
}

#[test]
fn rejection_names_the_slots_that_were_held() {
    let logs = Logs::new(&[
        with_slot(1, "acquire", 1, "taken"),
        with_slot(2, "acquire", 2, "taken"),
        with_slot(3, "release", 1, "freed"),
        with_slot(4, "acquire", 3, "taken"),
        with_slot(5, "acquire", 4, ""),
        // The second slot is over, and the third one not yet.
        with_slot(63, "acquire", 5, ""),
        with_slot(70, "acquire", 6, "late"),
    ]);
    let results = logs.json("");
    let held = |index: usize| results["decisions"][index]["rejected_by"][0]["held"].clone();
    let slot = |id: u8, second: u8| {
        json!({"id": format!("{id:032x}"), "holder": "00000000000000aa",
               "since": format!("2026-07-08T12:00:0{second}.000000Z")})
    };
    assert_eq!(held(0), json!({"seats": 2, "found": 2, "slots": [slot(2, 2), slot(3, 4)]}), "{results}");
    assert_eq!(held(1), json!({"seats": 2, "found": 1, "slots": [slot(3, 4)]}), "{results}");
    let remedies = |index: usize| results["decisions"][index]["rejected_by"][0]["remedies"].to_string();
    assert!(remedies(0).contains(r#""key":"concurrent""#) && !remedies(0).contains("wait"), "{}", remedies(0));
    assert!(remedies(2).contains("wait") && !remedies(2).contains("concurrent"), "{}", remedies(2));
    let text = logs.text("");
    for part in [
        "2 at once, max_duration minute",
        "2 seats were taken; the logs have 2 slots:\n",
        "        slot 00000000000000000000000000000002 of 00000000000000aa since 2026-07-08 12:00:02.000000 UTC\n",
        "would have passed with concurrent 3: 2 were counted before\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn latest_changes_of_slots_are_kept() {
    let early = (0..20_000_u64).map(|at| {
        let mut change = with_slot(0, "acquire", 0, "taken");
        change["time_us"] = (NOON_US + at).into();
        change["seq"] = (at + 1).into();
        change["descriptors"][0]["slot"]["id"] = format!("{:032x}", 1000 + at).into();
        change
    });
    // After the asked range, nothing can explain a rejection in it.
    let late = with_slot(7200, "acquire", 3, "taken");
    let rejected = [with_slot(1, "acquire", 1, "taken"), with_slot(2, "acquire", 2, "")];
    let logs = Logs::new(&early.chain([late]).chain(rejected).collect::<Vec<_>>());
    let held = &logs.json("--at 2026-07-08T12:00:02Z")["decisions"][0]["rejected_by"][0]["held"];
    assert_eq!(held["found"], 20_000, "the first one is forgotten: {held}");
}
