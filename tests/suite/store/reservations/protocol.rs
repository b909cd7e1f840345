//! Each row of the table of `limit::reservation`, through whole decisions, in memory and in Redis.

use std::sync::atomic::{AtomicU64, Ordering};

use tollkeeper::base::clock::Time;

use kit::fixtures::{decide, in_parallel, load_shop_rules, shop_request};
use kit::on_both_stores;
use kit::redis::Server;
use kit::streams::{NOON, SECOND, slot_token, stream_service};
use kit::test_service::{TestResponse, TestService};

const RULES: &str = "descriptors:
  - key: k
    rate_limit: { unit: hour, requests_per_unit: 100, reservations: { settle_within: 10m } }
  - key: returns
    rate_limit: { unit: hour, requests_per_unit: 100, reservations: { settle_within: 10m, unsettled: return } }
  - key: estimated
    rate_limit: { unit: hour, requests_per_unit: 100, reservations: { estimate: 40 } }";

/// Token of an answer.
fn token(response: &TestResponse) -> String {
    slot_token(&response.response).expect("the answer has a token")
}

fn service(server: Option<&Server>, rules: &str) -> TestService {
    stream_service(server, &[], rules)
}

/// Reserves hits for a stream; returns the token, `None` if it is rejected.
fn reserve(service: &TestService, entries: &str, stream: &str, hits: u64) -> Option<String> {
    let response = decide(service, &shop_request(&format!("{entries},slot={stream},slot=7")).hits(hits));
    let token = token(&response);
    assert_eq!(token == "-", response.over_limit(), "{response:?}");
    Some(token).filter(|token| token != "-")
}

/// Reports the end of a stream, and its true cost.
fn settle(service: &TestService, entries: &str, stream: &str, token: &str, cost: u64) {
    let request = shop_request(&format!("{entries},slot={stream},slot=7,release={token}")).hits(cost);
    let response = decide(service, &request);
    assert!(!response.over_limit(), "{response:?}");
}

/// Hits that are left of a limit of 100.
fn left(service: &TestService, entries: &str) -> u32 {
    let response = decide(service, &shop_request(&format!("{entries},slot=peek")).hits(0));
    response.statuses()[0].1
}

on_both_stores![
    settlement_gives_back_what_the_estimate_exceeds,
    settlement_above_the_estimate_is_charged_beyond_the_limit,
    repeated_request_is_charged_once_and_changes_the_token,
    settlement_counts_once,
    settlement_of_a_rejected_request_does_nothing,
    unanswered_settlement_goes_by_id_or_charges_the_cost,
    window_that_has_passed_is_not_refunded_into_the_next,
    unsettled_estimate_stays_or_is_given_back,
    settlement_without_an_answer_after_its_time_charges_nothing,
    hits_that_a_clock_set_back_discarded_are_not_given_back,
    repeated_request_goes_by_its_reservation_beside_other_limits,
    late_request_is_charged_to_no_other_limit,
    bucket_gives_each_reservation_back,
    bucket_refills_the_hits_of_others_first,
    bucket_remembers_what_a_settlement_gave_back,
    bucket_remembers_what_unsettled_estimates_gave_back,
    estimate_of_the_rule_replaces_the_hits,
    list_is_all_or_nothing,
    rejection_of_another_descriptor_gives_the_estimate_back,
    rejected_repetition_keeps_the_estimate_and_frees_the_slot,
    shadow_limit_and_candidate_reserve_and_reject_nothing,
    shadow_limit_without_room_leaves_no_reservation,
    replaced_limit_is_not_charged,
    limit_of_the_request_has_the_reservations_of_the_rule,
    changed_limit_settles_open_reservations,
    reset_forgets_reservations,
    refund_beside_a_reservation_gives_back_its_hits,
    lowered_bucket_gives_back_no_hits_of_others,
    parallel_streams_never_overspend,
];

fn settlement_gives_back_what_the_estimate_exceeds(server: Option<&Server>) {
    let service = service(server, RULES);
    let first = reserve(&service, "k=a", "1", 60).unwrap();
    assert_eq!(left(&service, "k=a"), 40);
    assert_eq!(reserve(&service, "k=a", "2", 41), None, "what is reserved counts");
    let second = reserve(&service, "k=a", "3", 40).unwrap();
    settle(&service, "k=a", "1", &first, 10);
    assert_eq!(left(&service, "k=a"), 50);
    settle(&service, "k=a", "3", &second, 0);
    assert_eq!(left(&service, "k=a"), 90);
}

fn settlement_above_the_estimate_is_charged_beyond_the_limit(server: Option<&Server>) {
    let service = service(server, RULES);
    let first = reserve(&service, "k=a", "1", 90).unwrap();
    settle(&service, "k=a", "1", &first, 95);
    assert_eq!(left(&service, "k=a"), 5);
    let second = reserve(&service, "k=a", "2", 5).unwrap();
    settle(&service, "k=a", "2", &second, 30);
    assert_eq!(left(&service, "k=a"), 0);
    assert_eq!(reserve(&service, "k=a", "3", 1), None);
}

fn repeated_request_is_charged_once_and_changes_the_token(server: Option<&Server>) {
    let service = service(server, RULES);
    let old = reserve(&service, "k=a", "1", 60).unwrap();
    let new = reserve(&service, "k=a", "1", 60).expect("a repeated call is admitted although it does not fit again");
    assert_ne!(old, new);
    assert_eq!(left(&service, "k=a"), 40);
    settle(&service, "k=a", "1", &old, 0);
    assert_eq!(left(&service, "k=a"), 40, "an old token settles nothing");
    settle(&service, "k=a", "1", &new, 20);
    assert_eq!(left(&service, "k=a"), 80);
}

fn settlement_counts_once(server: Option<&Server>) {
    let service = service(server, RULES);
    let token = reserve(&service, "k=a", "1", 50).unwrap();
    for _ in 0..3 {
        settle(&service, "k=a", "1", &token, 10);
        assert_eq!(left(&service, "k=a"), 90);
        settle(&service, "k=a", "1", &token, 70);
        assert_eq!(left(&service, "k=a"), 90);
    }
}

fn settlement_of_a_rejected_request_does_nothing(server: Option<&Server>) {
    let service = service(server, RULES);
    reserve(&service, "k=a", "1", 50).unwrap();
    assert_eq!(reserve(&service, "k=a", "2", 60), None);
    for token in ["-", "made up"] {
        settle(&service, "k=a", "1", token, 10);
        settle(&service, "k=a", "2", token, 10);
    }
    assert_eq!(left(&service, "k=a"), 50);
}

fn unanswered_settlement_goes_by_id_or_charges_the_cost(server: Option<&Server>) {
    let service = service(server, RULES);
    reserve(&service, "k=a", "1", 50).unwrap();
    for _ in 0..2 {
        settle(&service, "k=a", "1", "?", 10);
        assert_eq!(left(&service, "k=a"), 90, "a repeated release counts once");
    }
    let late = decide(&service, &shop_request("k=a,slot=1,slot=7").hits(50));
    assert!(late.over_limit(), "its stream is gone");
    assert_eq!(token(&late), "-");
    assert!(late.text().contains("Retry-After: 15"), "{}", late.text());
    // The request passed without an answer, or comes late.
    settle(&service, "k=a", "2", "?", 20);
    assert_eq!(left(&service, "k=a"), 70);
    settle(&service, "k=a", "2", "?", 20);
    assert_eq!(left(&service, "k=a"), 70, "a repeated release is charged once");
    assert_eq!(reserve(&service, "k=a", "2", 1), None);
    assert_eq!(left(&service, "k=a"), 70);
    service.advance_us(15 * SECOND);
    assert!(reserve(&service, "k=a", "2", 1).is_some());
}

fn window_that_has_passed_is_not_refunded_into_the_next(server: Option<&Server>) {
    let rules = "descriptors: [{key: k, rate_limit: {unit: minute, requests_per_unit: 100, reservations: 10m}}]";
    let service = service(server, rules);
    let first = reserve(&service, "k=a", "1", 80).unwrap();
    let second = reserve(&service, "k=a", "2", 20).unwrap();
    service.advance_us(60 * SECOND);
    reserve(&service, "k=a", "3", 50).unwrap();
    settle(&service, "k=a", "1", &first, 10);
    assert_eq!(left(&service, "k=a"), 50);
    settle(&service, "k=a", "2", &second, 25);
    assert_eq!(left(&service, "k=a"), 45, "what exceeds the estimate is charged to the window of the settlement");
}

fn unsettled_estimate_stays_or_is_given_back(server: Option<&Server>) {
    let service = service(server, RULES);
    for key in ["k=a", "returns=a"] {
        let token = reserve(&service, key, "1", 80).unwrap();
        service.advance_us(600 * SECOND);
        let fits = reserve(&service, key, "2", 40).is_some();
        assert_eq!(fits, key == "returns=a", "{key}");
        let before = left(&service, key);
        settle(&service, key, "1", &token, 1);
        settle(&service, key, "1", "?", 0);
        assert_eq!(left(&service, key), before, "{key}: a late settlement changes nothing");
        assert_eq!(before, if key == "k=a" { 20 } else { 60 });
    }
}

fn settlement_without_an_answer_after_its_time_charges_nothing(server: Option<&Server>) {
    let service = service(server, RULES);
    for (key, expected) in [("k=a", 50), ("returns=a", 100)] {
        reserve(&service, key, "1", 50).unwrap();
        service.advance_us(600 * SECOND);
        for _ in 0..2 {
            settle(&service, key, "1", "?", 30);
            assert_eq!(left(&service, key), expected, "{key}: also if it is repeated");
        }
        assert_eq!(reserve(&service, key, "1", 1), None, "{key}: its stream is gone");
    }
}

fn hits_that_a_clock_set_back_discarded_are_not_given_back(server: Option<&Server>) {
    let service = service(server, RULES);
    let first = reserve(&service, "k=a", "1", 60).unwrap();
    service.inner.clock.set(Time::from_micros(NOON.as_micros() - 3 * 3600 * SECOND));
    reserve(&service, "k=a", "2", 80).expect("the counter begins anew");
    settle(&service, "k=a", "1", &first, 0);
    assert_eq!(left(&service, "k=a"), 20);
}

const ESTIMATE_AND_RATE: &str = "descriptors:
  - key: k
    rate_limit:
      - {unit: hour, requests_per_unit: 100, name: tokens, reservations: {estimate: 60}}
      - {unit: minute, requests_per_unit: 1000, name: rate}";

fn repeated_request_goes_by_its_reservation_beside_other_limits(server: Option<&Server>) {
    let service = service(server, ESTIMATE_AND_RATE);
    reserve(&service, "k=a", "1", 1).unwrap();
    let second = reserve(&service, "k=a", "1", 1).expect("it is admitted although it does not fit again");
    assert_eq!(reserve(&service, "k=a", "1", 1000), None, "the rate rejects");
    settle(&service, "k=a", "1", &second, 10);
    assert_eq!(left(&service, "k=a"), 90, "the rejection handed out no token");
}

fn late_request_is_charged_to_no_other_limit(server: Option<&Server>) {
    let service = service(server, ESTIMATE_AND_RATE);
    settle(&service, "k=a", "1", "?", 0);
    assert!(decide(&service, &shop_request("k=a,slot=1,slot=7").hits(0)).over_limit(), "its stream is gone");
    for _ in 0..2 {
        assert_eq!(reserve(&service, "k=a", "1", 600), None);
    }
    assert!(reserve(&service, "k=a", "2", 600).is_some());
}

const BUCKET: &str = "descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 100, algorithm: token_bucket, reservations: 10m}}";

fn bucket_gives_each_reservation_back(server: Option<&Server>) {
    let service = service(server, BUCKET);
    let first = reserve(&service, "k=a", "1", 50).unwrap();
    let second = reserve(&service, "k=a", "2", 50).unwrap();
    for (stream, token, expected) in [("2", second, 50), ("1", first, 100)] {
        settle(&service, "k=a", stream, &token, 0);
        assert_eq!(left(&service, "k=a"), expected, "{stream}");
    }
}

fn bucket_refills_the_hits_of_others_first(server: Option<&Server>) {
    let service = service(server, BUCKET);
    // Without a reservation that is open, what was given back is forgotten.
    reserve(&service, "k=a", "0", 10).unwrap();
    let settled = reserve(&service, "k=a", "1", 50).unwrap();
    settle(&service, "k=a", "1", &settled, 0);
    reserve(&service, "k=a", "2", 40).unwrap();
    let third = reserve(&service, "k=a", "3", 50).unwrap();
    service.advance_us(300 * SECOND);
    settle(&service, "k=a", "3", &third, 0);
    assert_eq!(left(&service, "k=a"), 58, "8 were refilled, of the hits that were in the bucket before");
}

/// What was given back is gone from the level of the charge, so the refill took hits of the reservation itself.
fn bucket_remembers_what_a_settlement_gave_back(server: Option<&Server>) {
    let service = service(server, BUCKET);
    let first = reserve(&service, "k=a", "1", 50).unwrap();
    let second = reserve(&service, "k=a", "2", 50).unwrap();
    settle(&service, "k=a", "1", &first, 0);
    service.advance_us(300 * SECOND);
    reserve(&service, "k=a", "3", 50).unwrap();
    settle(&service, "k=a", "2", &second, 0);
    assert_eq!(left(&service, "k=a"), 49, "the 50 of the third stream count");
}

/// As above, with hits that an estimate without a settlement gave back.
fn bucket_remembers_what_unsettled_estimates_gave_back(server: Option<&Server>) {
    let rules = "descriptors:
  - key: k
    rate_limit:
      unit: hour
      requests_per_unit: 100
      algorithm: token_bucket
      reservations: { settle_within: 10m, unsettled: return }";
    let service = service(server, rules);
    reserve(&service, "k=a", "1", 50).unwrap();
    service.advance_us(590 * SECOND);
    let second = reserve(&service, "k=a", "2", 50).unwrap();
    service.advance_us(20 * SECOND);
    assert_eq!(reserve(&service, "k=a", "3", 60), None, "it lacks hits, so the first estimate is given back");
    assert_eq!(left(&service, "k=a"), 49);
    service.advance_us(490 * SECOND);
    reserve(&service, "k=a", "4", 50).unwrap();
    settle(&service, "k=a", "2", &second, 0);
    assert_eq!(left(&service, "k=a"), 48, "the 50 of the fourth stream count");
}

fn estimate_of_the_rule_replaces_the_hits(server: Option<&Server>) {
    let service = service(server, RULES);
    let first = reserve(&service, "estimated=a", "1", 1).unwrap();
    reserve(&service, "estimated=a", "2", 99).unwrap();
    let peek = decide(&service, &shop_request("estimated=a,slot=9").hits(0));
    assert!(peek.over_limit(), "a third estimate of 40 does not fit");
    assert_eq!(reserve(&service, "estimated=a", "3", 1), None);
    settle(&service, "estimated=a", "1", &first, 15);
    assert!(reserve(&service, "estimated=a", "4", 1).is_some());
}

fn list_is_all_or_nothing(server: Option<&Server>) {
    let rules = "descriptors:
  - key: k
    rate_limit:
      - {unit: hour, requests_per_unit: 100, name: tokens, reservations: {estimate: 30}}
      - {concurrent: 2, name: streams}
      - {unit: minute, requests_per_unit: 4, name: rate}";
    let service = service(server, rules);
    let first = reserve(&service, "k=a", "1", 1).unwrap();
    let second = reserve(&service, "k=a", "2", 1).unwrap();
    for stream in ["3", "4"] {
        assert_eq!(reserve(&service, "k=a", stream, 1), None, "no slot is free");
    }
    settle(&service, "k=a", "1", &first, 30);
    settle(&service, "k=a", "2", &second, 30);
    // Three estimates fit beside nothing else, so the rejected requests charged nothing.
    let third = reserve(&service, "k=a", "5", 1).expect("30 hits, a slot and two of the rate are left");
    assert_eq!(reserve(&service, "k=a", "6", 1), None, "10 hits are left");
    settle(&service, "k=a", "5", &third, 10);
    assert!(reserve(&service, "k=a", "7", 1).is_some());
    assert_eq!(reserve(&service, "k=a", "8", 1), None, "the rate is used up");
}

fn rejection_of_another_descriptor_gives_the_estimate_back(server: Option<&Server>) {
    let rules = "descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 100, reservations: 10m}}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 0}}";
    let service = service(server, rules);
    for stream in ["1", "2", "3"] {
        let rejected = decide(&service, &shop_request(&format!("k=a,slot={stream}; day=x,slot={stream}")).hits(60));
        assert!(rejected.over_limit());
        assert_eq!(token(&rejected), "-");
        // In Redis the hits are given back after the answer.
        kit::wait_for("the estimate that was given back", || (left(&service, "k=a") == 100).then_some(()));
    }
}

/// As after a redirect inside Envoy whose second attempt is rejected: the first one may have used up what it reserved.
fn rejected_repetition_keeps_the_estimate_and_frees_the_slot(server: Option<&Server>) {
    let rules = "descriptors:
  - {key: k, rate_limit: [{unit: hour, requests_per_unit: 100, reservations: 10m}, {concurrent: 60}]}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 1}}";
    let service = service(server, rules);
    let attempt = || decide(&service, &shop_request("day=x,slot=1; k=a,slot=1").hits(60));
    assert!(!attempt().over_limit());
    assert!(attempt().over_limit());
    // In Redis the slot is given back after the answer.
    kit::wait_for("the slot", || reserve(&service, "k=a", "2", 40));
    assert_eq!(reserve(&service, "k=a", "3", 1), None);
}

fn shadow_limit_and_candidate_reserve_and_reject_nothing(server: Option<&Server>) {
    let rules = "descriptors:
  - {key: shadow, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 10, reservations: 10m}}
  - key: k
    rate_limit:
      - {unit: hour, requests_per_unit: 100}
      - {unit: hour, requests_per_unit: 10, name: tighter, shadow_mode: true, reservations: 10m}";
    let service = service(server, rules);
    for key in ["shadow=a", "k=a"] {
        for stream in ["1", "2"] {
            let token = reserve(&service, key, stream, 8).expect("nothing is rejected");
            settle(&service, key, stream, &token, 8);
        }
    }
    assert_eq!(left(&service, "k=a"), 84, "the deciding limit has no reservations");
}

fn shadow_limit_without_room_leaves_no_reservation(server: Option<&Server>) {
    let rules = "descriptors:
  - {key: k, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 100, reservations: 10m}}";
    let service = service(server, rules);
    reserve(&service, "k=a", "1", 80).unwrap();
    let second = reserve(&service, "k=a", "2", 80).expect("nothing is rejected");
    settle(&service, "k=a", "2", &second, 0);
    assert_eq!(left(&service, "k=a"), 20, "the second request charged nothing");
}

fn replaced_limit_is_not_charged(server: Option<&Server>) {
    let rules = "descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 100, name: tokens, reservations: 10m}}
  - {key: vip, rate_limit: {unlimited: true, replaces: [{name: tokens}]}}";
    let service = service(server, rules);
    let response = decide(&service, &shop_request("k=a,slot=1; vip=y,slot=1").hits(70));
    assert!(!response.over_limit());
    assert_eq!(left(&service, "k=a"), 100);
}

fn limit_of_the_request_has_the_reservations_of_the_rule(server: Option<&Server>) {
    let service = service(server, RULES);
    let ask = |entries: &str, hits| decide(&service, &shop_request(entries).limit(50, 4, None).hits(hits));
    let first = ask("k=a,slot=1", 40);
    assert!(!first.over_limit());
    assert!(ask("k=a,slot=2", 20).over_limit());
    ask(&format!("k=a,slot=1,release={}", token(&first)), 10);
    assert!(!ask("k=a,slot=3", 40).over_limit());
}

fn changed_limit_settles_open_reservations(server: Option<&Server>) {
    let service = service(server, RULES);
    let first = reserve(&service, "k=a", "1", 60).unwrap();
    let rules = "descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 50, reservations: {settle_within: 5m, unsettled: return}}}";
    load_shop_rules(&service, rules);
    assert_eq!(reserve(&service, "k=a", "2", 1), None);
    settle(&service, "k=a", "1", &first, 20);
    assert!(reserve(&service, "k=a", "2", 30).is_some());
    assert_eq!(reserve(&service, "k=a", "3", 1), None);
}

fn reset_forgets_reservations(server: Option<&Server>) {
    use tollkeeper::serve::grpc::decode;
    use tollkeeper::serve::grpc::service::DEFAULT_CALLER_DEADLINE;
    let service = service(server, RULES);
    let token = reserve(&service, "k=a", "1", 60).unwrap();
    let rules = service.inner.rules.current_rules_owned().expect("rules are loaded");
    let context = service.inner.build_decision_context(Some(&rules), DEFAULT_CALLER_DEADLINE);
    let message = shop_request("k=a").0;
    let request = decode::convert_request(&message);
    let deleted = kit::test_service::store_runtime().block_on(service.inner.decider.reset_counters(context, &request));
    assert_eq!(deleted.expect("the store answers"), [1]);
    assert_eq!(left(&service, "k=a"), 100);
    reserve(&service, "k=a", "2", 30).unwrap();
    settle(&service, "k=a", "1", &token, 0);
    assert_eq!(left(&service, "k=a"), 70, "the settlement gives back nothing that others charged");
}

fn parallel_streams_never_overspend(server: Option<&Server>) {
    let service = service(server, RULES);
    let (spent, admitted) = (AtomicU64::new(0), AtomicU64::new(0));
    in_parallel(8, |thread| {
        for turn in 0..50_u64 {
            let stream = format!("{thread}.{turn}");
            let Some(token) = reserve(&service, "k=a", &stream, 20) else { continue };
            admitted.fetch_add(1, Ordering::SeqCst);
            std::thread::yield_now();
            let cost = 1 + (thread + turn) % 4;
            spent.fetch_add(cost, Ordering::SeqCst);
            settle(&service, "k=a", &stream, &token, cost);
        }
    });
    let spent = spent.into_inner();
    assert!(spent <= 100, "{spent} of 100 were spent");
    assert!(admitted.into_inner() > 20, "what is given back can be reserved again");
    assert_eq!(u64::from(left(&service, "k=a")), 100 - spent, "nothing leaks");
}

/// An ordinary refund is no settlement, although it names a stream.
fn refund_beside_a_reservation_gives_back_its_hits(server: Option<&Server>) {
    let rules = "descriptors:
  - key: k
    rate_limit:
      - {unit: hour, requests_per_unit: 100, name: tokens, reservations: 10m}
      - {unit: day, requests_per_unit: 50, name: plain}";
    let service = service(server, rules);
    reserve(&service, "k=a", "1", 30).unwrap();
    let refund = shop_request("k=a,slot=1,slot=7").refund(5);
    assert!(!decide(&service, &refund).over_limit());
    assert_eq!(left(&service, "k=a"), 25, "20 were left of the plain limit");
}

/// Its tokens were refilled at the higher rate, and others have them.
fn lowered_bucket_gives_back_no_hits_of_others(server: Option<&Server>) {
    let bucket = |rate: u32| {
        format!(
            "descriptors: [{{key: k, rate_limit: {{unit: minute, requests_per_unit: {rate}, bucket_size: 100, \
             algorithm: token_bucket, reservations: 10m}}}}]"
        )
    };
    let service = service(server, &bucket(600));
    let first = reserve(&service, "k=a", "1", 100).unwrap();
    service.advance_us(10 * SECOND);
    reserve(&service, "k=a", "2", 100).expect("all tokens are back after 10 s");
    load_shop_rules(&service, &bucket(6));
    settle(&service, "k=a", "1", &first, 0);
    assert_eq!(left(&service, "k=a"), 0);
}
