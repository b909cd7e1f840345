//! Bodies of `/json`, compared with another JSON parser; accepted requests are decided and answered.

use tollkeeper::base::pb::proto_json::{request_from_json, request_to_json, response_to_json};

use super::decider;

pub(crate) fn check(data: &[u8]) {
    let Ok(request) = request_from_json(data) else { return };
    let other: serde_json::Value = serde_json::from_slice(data).expect("accepted bodies are JSON");
    assert!(other.is_object(), "{other}");
    if let Some(domain) = other.get("domain").and_then(serde_json::Value::as_str) {
        assert_eq!(request.domain, domain);
    }
    let text = request_to_json(&request).expect("a parsed request can be serialized");
    assert_eq!(request_from_json(text.as_bytes()).expect("it is our own"), request);
    for response in decider::decide(&request) {
        let answer = response_to_json(&response).expect("our own answer");
        serde_json::from_str::<serde_json::Value>(&answer).expect("our own JSON");
    }
}
