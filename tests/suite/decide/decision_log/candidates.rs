//! Candidate limits in records of decisions: listed after the limits that decide, and without effect on verdicts.

use tempfile::tempdir;
use tollkeeper::decide::log::record::{DecisionRecord, RecordedVerdict};

use super::{decisions, logging_service};
use kit::fixtures::shop_request;

const RULES: &str = "descriptors:
  - key: user
    rate_limit:
      - {unit: day, requests_per_unit: 2, shadow_mode: true, name: lower}
      - {unit: day, requests_per_unit: 3}
      - {unit: day, requests_per_unit: 9, shadow_mode: true, name: higher}
  - {key: plain, rate_limit: {unit: day, requests_per_unit: 9}}
";

/// Limit, candidate, and admission of each limit of a descriptor.
fn limits(decision: &DecisionRecord<'_>, descriptor: usize) -> Vec<(u64, bool, bool)> {
    let limits = &decision.descriptors[descriptor].limits;
    limits.iter().map(|limit| (limit.requests_per_unit, limit.candidate, limit.result.unwrap().admitted)).collect()
}

#[test]
fn candidates_are_logged_after_the_limits_that_decide() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let service = logging_service(&file, &[("TOLLKEEPER_DECISION_LOG_WHEN", "all")], RULES);
    for _ in 0..4 {
        service.decide(&shop_request("plain=x; user=a; user=b")).unwrap();
        service.decide(&shop_request("user=b")).unwrap();
    }
    service.finish_log();
    let found = decisions(&file);
    assert_eq!(limits(&found[0], 0), [(9, false, true)]);
    for descriptor in [1, 2] {
        assert_eq!(limits(&found[0], descriptor), [(3, false, true), (2, true, true), (9, true, true)]);
    }
    // The third hit of `b` is the second of `a`.
    assert_eq!(limits(&found[2], 1), [(3, false, true), (2, true, true), (9, true, true)]);
    assert_eq!(limits(&found[2], 2), [(3, false, true), (2, true, false), (9, true, true)]);
    assert_eq!(found[2].verdict, RecordedVerdict::Ok);
    assert_eq!(limits(&found[4], 2), [(3, false, false), (2, true, false), (9, true, true)]);
    assert_eq!(found[4].verdict, RecordedVerdict::OverLimit);
}

#[test]
fn decision_that_a_candidate_would_reject_counts_as_one_in_shadow_mode() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let service = logging_service(&file, &[("TOLLKEEPER_DECISION_LOG_WHEN", "shadow")], RULES);
    (0..3).for_each(|_| drop(service.decide(&shop_request("user=a")).unwrap()));
    service.finish_log();
    let found = decisions(&file);
    assert_eq!(
        found.iter().map(|decision| limits(decision, 0)).collect::<Vec<_>>(),
        [[(3, false, true), (2, true, false), (9, true, true)]]
    );
}
