//! Concurrent limits: what would have let a rejected request pass, and that no wait is promised.

use serde_json::{Value, json};

use super::{Logs, SECOND_US, changed, decision, descriptor};

/// What `login=ann` asks for, at a second after noon; `change` is what became of the slot.
fn with_slot(second: u64, id: u8, change: &str) -> Value {
    let rejected = change.is_empty() || change == "late";
    let mut of_slot = descriptor("login=ann", if rejected { "over_limit" } else { "ok" });
    of_slot["slot"] = json!({
        "action": "acquire", "id": format!("{id:032x}"), "token": "0000000000000001", "holder": "00000000000000aa",
    });
    let mut result = changed(of_slot["limits"][0]["result"].clone(), &json!({"before": 2, "after": 2}));
    if !change.is_empty() {
        result["slot"] = change.into();
    }
    let limit = json!({"algorithm": "concurrent", "requests_per_unit": 2, "unit": "minute", "result": result});
    of_slot["limits"][0] = limit;
    decision(second * SECOND_US, &[of_slot])
}

#[test]
fn rejection_without_a_free_slot_promises_no_wait() {
    let logs =
        Logs::new(&[with_slot(1, 1, "taken"), with_slot(2, 2, "taken"), with_slot(5, 4, ""), with_slot(70, 6, "late")]);
    let results = logs.json("");
    let remedies = |index: usize| results["decisions"][index]["rejected_by"][0]["remedies"].to_string();
    assert!(remedies(0).contains(r#""key":"concurrent""#) && !remedies(0).contains("wait"), "{}", remedies(0));
    assert!(remedies(1).contains("wait") && !remedies(1).contains("concurrent"), "{}", remedies(1));
    let text = logs.text("");
    for part in ["2 at once, max_duration minute", "would have passed with concurrent 3: 2 were counted before\n"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
