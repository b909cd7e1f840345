//! Records of decisions: contents, and which decisions have one.

use serde_json::{Value, json};
use tempfile::tempdir;
use tollkeeper::decide::log::header::HeaderReason;
use tollkeeper::decide::log::record::{DecisionRecord, Record, RecordedVerdict};

use super::{decisions, logging_service, records};
use kit::fixtures::shop_request;
use kit::test_service::TestRequest;

const ALL: (&str, &str) = ("TOLLKEEPER_DECISION_LOG_WHEN", "all");

/// Rules with an enforced limit, limits in shadow mode, and each choice of decisions to log.
const RULES: &str = "descriptors:
  - {key: user, rate_limit: {unit: minute, requests_per_unit: 1, algorithm: token_bucket, bucket_size: 2}}
  - {key: trial, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: loud, decision_log: all, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: calm, decision_log: rejected, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: silent, decision_log: none, rate_limit: {unit: hour, requests_per_unit: 1}}
";

/// Values of the first entries of the logged decisions.
fn logged(env: &[(&str, &str)], requests: &[&str]) -> Vec<String> {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let service = logging_service(&file, env, RULES);
    for request in requests {
        service.decide(&shop_request(request)).unwrap();
    }
    service.finish_log();
    let text = |decision: &DecisionRecord<'_>| {
        let keys = decision.descriptors.iter().map(|descriptor| descriptor.entries[0].key.as_deref().unwrap());
        format!("{} {:?}", keys.collect::<Vec<_>>().join("+"), decision.verdict)
    };
    decisions(&file).iter().map(text).collect()
}

#[test]
fn record_has_the_inputs_and_the_result_of_a_decision() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let service = logging_service(&file, &[ALL, ("TOLLKEEPER_ZONE", "europe-west1-b")], RULES);
    service.decide(&shop_request("user=alice").hits(2)).unwrap();
    service.advance_us(30_000_000);
    service.decide(&shop_request("user=alice; other=x").request_hits(3).limit(5, 3, Some(2))).unwrap();
    service.decide(&shop_request("user=alice").refund(1)).unwrap();
    service.finish_log();
    let lines = kit::read(&file);
    let found: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (header, first) = (&found[0], &found[1]);
    assert_eq!((&header["type"], &header["event"], &header["seq"]), (&json!("header"), &json!("start"), &json!(0)));
    let rules = format!("domain: shop\n{RULES}");
    assert_eq!(header["rules"]["documents"], json!([{"name": "rules.yaml", "format": "yaml_first", "text": rules}]));
    let expected = json!({
        "v": 1, "type": "decision", "process": header["process"], "seq": 1, "time_us": 1_783_512_000_000_000_u64,
        "zone": "europe-west1-b", "domain": "shop",
        "descriptors": [{
            "entries": [{"key": "user", "value": "alice"}], "hits": 2, "sampled": true,
            "rule": {"path": "shop.user", "file": "rules.yaml", "line": 3},
            "limits": [{
                "algorithm": "token_bucket", "requests_per_unit": 1, "unit": "minute", "capacity": 2,
                "result": {"admitted": true, "before": 0, "after": 2, "remaining": 0, "reset_us": 120_000_000},
            }],
            "decided_by": "counter", "verdict": "ok",
        }],
        "verdict": "ok", "max_delay_us": 29_998_000, "rules": header["rules"]["id"], "duration_us": 0,
    });
    assert_eq!(first, &expected);
    assert_eq!(found[2]["hits_addend"], 3);
    assert_eq!(found[2]["time_us"], 1_783_512_030_000_000_u64);
    let sent = json!({"requests_per_unit": 5, "unit": "hour", "multiplier": 2});
    assert_eq!(found[2]["descriptors"][1]["override"], sent);
    assert_eq!(found[2]["descriptors"][1]["limits"][0]["unit_multiplier"], 2);
    assert_eq!(found[2]["descriptors"][1]["rule"], Value::Null);
    assert_eq!(found[3]["descriptors"][0]["hits"], -1);
    assert_eq!(found.len(), 4);
}

#[test]
fn settings_and_rules_choose_the_decisions_that_are_logged() {
    let requests = [
        "user",
        "user",
        "user",
        "trial",
        "trial",
        "loud",
        "loud",
        "calm",
        "calm",
        "silent",
        "silent",
        "other",
        "silent; user",
        "silent; other",
        "user; loud",
    ];
    let everything = [
        "user Ok",
        "user Ok",
        "user OverLimit",
        "trial Ok",
        "trial Shadow",
        "loud Ok",
        "loud OverLimit",
        "calm OverLimit",
        "other Ok",
        "silent+user OverLimit",
        "silent+other OverLimit",
        "user+loud OverLimit",
    ];
    assert_eq!(logged(&[ALL], &requests), everything);
    let rejected = ["user OverLimit", "loud Ok", "loud OverLimit", "calm OverLimit"];
    let rest = ["silent+user OverLimit", "silent+other OverLimit", "user+loud OverLimit"];
    assert_eq!(logged(&[("TOLLKEEPER_DECISION_LOG_WHEN", "rejected")], &requests), [&rejected[..], &rest].concat());
    let shadow = ["trial Shadow", "loud Ok", "loud OverLimit", "calm OverLimit", "user+loud OverLimit"];
    assert_eq!(logged(&[("TOLLKEEPER_DECISION_LOG_WHEN", "shadow")], &requests), shadow);
    let by_default = ["user OverLimit", "trial Shadow", "loud Ok", "loud OverLimit", "calm OverLimit"];
    assert_eq!(logged(&[], &requests), [&by_default[..], &rest].concat());
    let global = logged(&[("SHADOW_MODE", "true"), ("TOLLKEEPER_DECISION_LOG_WHEN", "shadow")], &requests[..3]);
    assert_eq!(global, ["user Shadow"]);
}

#[test]
fn rule_that_is_not_logged_hides_its_values_in_records_of_other_rules() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let service = logging_service(&file, &[ALL], RULES);
    service.decide(&shop_request("silent=token; user=alice")).unwrap();
    service.finish_log();
    let lines = kit::read(&file);
    assert!(lines.contains("alice") && lines.contains("silent") && !lines.contains("token\""), "{lines}");
    let decisions = decisions(&file);
    assert_eq!(decisions[0].descriptors[0].entries[0].value_bytes(), None);
}

#[test]
fn request_without_a_decision_is_logged_with_the_reason() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let service = logging_service(&file, &[], RULES);
    let requests = [TestRequest::new("").descriptor(&[("k", "v")]), TestRequest::new("shop")];
    for request in &requests {
        service.decide(request).unwrap_err();
    }
    service.finish_log();
    let without_rules = directory.path().join("without_rules");
    let sink = format!("file:{}", without_rules.display());
    let service = kit::test_service::TestService::new([("TOLLKEEPER_DECISION_LOG", &*sink)], super::NOON);
    service.inner.decider.log.as_ref().unwrap().write_header(None);
    service.decide(&shop_request("user=alice")).unwrap_err();
    service.finish_log();
    let found: Vec<_> = decisions(&file).into_iter().chain(decisions(&without_rules)).collect();
    let errors: Vec<_> = found.iter().map(|decision| decision.error.as_deref().unwrap()).collect();
    assert_eq!(errors, ["empty_domain", "no_descriptors", "no_rules"]);
    assert!(found.iter().all(|decision| decision.verdict == RecordedVerdict::Error));
    assert_eq!(found[2].descriptors[0].entries[0].value_bytes().unwrap(), &b"alice"[..]);
    assert!(matches!(&records(&without_rules)[0], Record::Header(header) if header.rules.is_none()));
}

#[test]
fn explain_is_not_logged() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let service = logging_service(&file, &[ALL], RULES);
    let request = shop_request("user=alice");
    let decoded = tollkeeper::serve::grpc::decode::convert_request(&request.0);
    let rules = service.inner.rules.current_rules_owned();
    let context = service.inner.build_decision_context(rules.as_deref(), std::time::Duration::from_secs(1));
    let peek = service.inner.decider.peek_counters(context, &decoded);
    kit::test_service::store_runtime().block_on(peek);
    service.finish_log();
    assert_eq!(decisions(&file).len(), 0);
}

#[test]
fn each_reload_writes_a_header_with_the_new_rules() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let service = logging_service(&file, &[ALL], RULES);
    service.decide(&shop_request("user=alice")).unwrap();
    let other = "domain: shop\ndescriptors: [{key: other}]\n";
    service.load([("other.yaml", other)]);
    service.decide(&shop_request("user=alice")).unwrap();
    service.finish_log();
    let records = records(&file);
    let headers: Vec<_> = records
        .iter()
        .filter_map(|record| if let Record::Header(header) = record { Some(header) } else { None })
        .collect();
    assert_eq!(
        headers.iter().map(|header| header.event).collect::<Vec<_>>(),
        [HeaderReason::Start, HeaderReason::Reload]
    );
    let ids: Vec<_> = headers.iter().map(|header| header.rules.as_ref().unwrap().id.clone()).collect();
    assert_ne!(ids[0], ids[1]);
    let used: Vec<_> = decisions(&file).iter().map(|decision| decision.rules.to_string()).collect();
    assert_eq!(used, ids);
}
