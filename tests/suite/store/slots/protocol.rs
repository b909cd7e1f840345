//! Each row of the protocol, through whole decisions, in memory and in Redis.

use std::sync::atomic::{AtomicU64, Ordering};

use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::DEFAULT_CALLER_DEADLINE;

use kit::fixtures::{decide, in_parallel, load_shop_rules, shop_request};
use kit::on_both_stores;
use kit::redis::Server;
use kit::streams::{SECOND, slot_token, stream_service};
use kit::test_service::{TestRequest, TestResponse, TestService};

const RULES: &str = "descriptors: [{key: k, rate_limit: {concurrent: 2, max_duration: 10m}}]";

/// Token of an answer.
fn token(response: &TestResponse) -> String {
    slot_token(&response.response).expect("the answer has a token")
}

fn service(server: Option<&Server>, rules: &str) -> TestService {
    stream_service(server, &[("TOLLKEEPER_RETRY_AFTER_HEADER", "")], rules)
}

/// Asks for the slot of a stream; returns the token, `None` if it is rejected.
fn acquire(service: &TestService, entries: &str, stream: &str) -> Option<String> {
    let response = decide(service, &shop_request(&format!("{entries},slot={stream},slot=7")));
    let token = token(&response);
    assert_eq!(token == "-", response.over_limit(), "{response:?}");
    Some(token).filter(|token| token != "-")
}

/// Reports the end of a stream.
fn release(service: &TestService, entries: &str, stream: &str, token: &str) {
    let response = decide(service, &shop_request(&format!("{entries},slot={stream},slot=7,release={token}")));
    assert!(!response.over_limit(), "{response:?}");
    assert!(response.response.response_headers_to_add.is_empty(), "{response:?}");
}

on_both_stores![
    full_limit_rejects_and_a_release_frees,
    repeated_acquire_keeps_its_slot_and_changes_the_token,
    release_of_a_rejected_request_does_nothing,
    unanswered_release_frees_or_buries,
    unanswered_release_keeps_a_redirect_from_taking_the_slot_again,
    late_request_may_come_again_within_the_life_of_a_tombstone,
    expired_tombstone_is_forgotten,
    release_without_slot_entries_goes_by_token,
    slot_ends_with_max_duration,
    lowered_limit_kills_nothing_and_a_raised_one_holds_at_once,
    peek_takes_no_slot,
    hits_are_seats,
    list_is_all_or_nothing,
    rejection_of_another_descriptor_gives_the_slot_back,
    shadow_limit_and_candidate_take_slots_and_reject_nothing,
    slot_of_a_replaced_limit_is_not_taken,
    limit_that_replaces_others_at_other_times_keeps_no_slot,
    release_under_another_plan_frees_the_slot,
    override_carries_the_number,
    formatter_sent_as_text_is_refused,
    reset_frees_all_slots,
    parallel_streams_never_exceed_the_limit,
    inactive_limit_frees_its_slots,
    entries_at_the_end_are_matched_in_other_domains,
];

fn full_limit_rejects_and_a_release_frees(server: Option<&Server>) {
    let service = service(server, RULES);
    let first = acquire(&service, "k=a", "1").unwrap();
    assert!(acquire(&service, "k=a", "2").is_some());
    assert_eq!(acquire(&service, "k=a", "3"), None);
    assert!(acquire(&service, "k=b", "3").is_some(), "each value has slots of its own");
    release(&service, "k=a", "1", &first);
    assert!(acquire(&service, "k=a", "3").is_some());
    // A second release of the same stream frees nothing.
    release(&service, "k=a", "1", &first);
    assert_eq!(acquire(&service, "k=a", "4"), None);
    let rejected = decide(&service, &shop_request("k=a,slot=5"));
    assert_eq!(rejected.statuses(), [(true, 0)]);
    assert_eq!(rejected.response.statuses[0].duration_until_reset.unwrap().seconds, 1);
}

fn repeated_acquire_keeps_its_slot_and_changes_the_token(server: Option<&Server>) {
    let service = service(server, RULES);
    let old = acquire(&service, "k=a", "1").unwrap();
    acquire(&service, "k=a", "2").unwrap();
    // An internal redirect: the second attempt comes before the release of the first, at the limit.
    let new = acquire(&service, "k=a", "1").expect("a slot that exists is admitted at the limit");
    assert_ne!(old, new);
    release(&service, "k=a", "1", &old);
    assert_eq!(acquire(&service, "k=a", "3"), None, "a late release frees nothing");
    release(&service, "k=a", "1", &new);
    assert!(acquire(&service, "k=a", "3").is_some());
}

fn release_of_a_rejected_request_does_nothing(server: Option<&Server>) {
    let service = service(server, RULES);
    acquire(&service, "k=a", "1").unwrap();
    acquire(&service, "k=a", "2").unwrap();
    let before = server.map(Server::command_counts);
    release(&service, "k=a", "1", "-");
    release(&service, "k=a", "9", "-");
    release(&service, "k=a", "1", "made up");
    if let (Some(before), Some(server)) = (before, server) {
        let of = |counts: &std::collections::BTreeMap<String, u64>| counts.get("evalsha").copied().unwrap_or(0);
        assert_eq!(of(&server.command_counts()), of(&before), "no call to the store");
    }
    assert_eq!(acquire(&service, "k=a", "3"), None);
    // It left no tombstone either.
    let other = TestRequest::new("shop").descriptor(&[("k", "b"), ("slot", "9"), ("slot", "7")]);
    assert!(!decide(&service, &other).over_limit());
}

fn unanswered_release_frees_or_buries(server: Option<&Server>) {
    let service = service(server, RULES);
    acquire(&service, "k=a", "1").unwrap();
    release(&service, "k=a", "1", "?");
    for stream in ["2", "3"] {
        assert!(acquire(&service, "k=a", stream).is_some());
    }
    // The release overtakes the request.
    release(&service, "k=b", "1", "?");
    assert_eq!(acquire(&service, "k=b", "1"), None);
    service.advance_us(15 * SECOND - 1);
    assert_eq!(acquire(&service, "k=b", "1"), None, "the tombstone stays");
    service.advance_us(1);
    assert!(acquire(&service, "k=b", "1").is_some());
}

/// The client leaves while an internal redirect asks. Its release overtakes the request, and frees the slot of the
/// attempt before.
fn unanswered_release_keeps_a_redirect_from_taking_the_slot_again(server: Option<&Server>) {
    let service = service(server, "descriptors: [{key: k, rate_limit: {concurrent: 1, max_duration: 10m}}]");
    let first = acquire(&service, "k=a", "1").unwrap();
    release(&service, "k=a", "1", "?");
    assert_eq!(acquire(&service, "k=a", "1"), None, "nothing would release it");
    release(&service, "k=a", "1", &first);
    assert!(acquire(&service, "k=a", "2").is_some(), "the slot is free");
}

fn late_request_may_come_again_within_the_life_of_a_tombstone(server: Option<&Server>) {
    let service = service(server, RULES);
    acquire(&service, "k=a", "1").unwrap();
    release(&service, "k=a", "2", "?");
    let late = decide(&service, &shop_request("k=a,slot=2,slot=7"));
    assert_eq!(late.statuses(), [(true, 0)]);
    assert_eq!(late.response.statuses[0].duration_until_reset.unwrap().seconds, 15);
}

/// A repeated request that finds its own tombstone expired, and nothing else.
fn expired_tombstone_is_forgotten(server: Option<&Server>) {
    let service = service(server, "descriptors: [{key: k, rate_limit: {concurrent: 0, max_duration: 10m}}]");
    let slots = || {
        let rules = service.inner.rules.current_rules_owned().expect("rules are loaded");
        let context = service.inner.build_decision_context(Some(&rules), DEFAULT_CALLER_DEADLINE);
        let message = shop_request("k=a").0;
        let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(30);
        let request = decode::convert_request(&message);
        kit::test_service::store_runtime()
            .block_on(service.inner.decider.explain_slots(context, &request, deadline))
            .remove(0)
            .remove(0)
    };
    for stream in ["1", "2"] {
        release(&service, "k=a", stream, "?");
    }
    assert_eq!(slots().tombstones, 2);
    service.advance_us(15 * SECOND);
    // Nothing is written for the request itself: the limit is full.
    assert_eq!(acquire(&service, "k=a", "1"), None);
    assert_eq!(slots().tombstones, 0);
    if let Some(server) = server {
        let head = slot_head(server);
        assert!(head.as_ref().is_none_or(|head| *head <= 1), "the tombstone of the request is counted: {head:?}");
    }
}

/// Number of tombstones at the head of the only hash of slots; `None` if there is none.
fn slot_head(server: &Server) -> Option<u64> {
    let keys: Vec<String> = server.query(&["KEYS", "*:concurrent*"]);
    let head: Vec<u8> = server.query(&["HGET", keys.first()?, ""]);
    Some(u64::from_le_bytes(head[8..16].try_into().unwrap()))
}

fn release_without_slot_entries_goes_by_token(server: Option<&Server>) {
    let service = service(server, "descriptors: [{key: k, rate_limit: {concurrent: 1}}]");
    let named = acquire(&service, "k=a", "1").unwrap();
    assert!(!decide(&service, &shop_request(&format!("k=a,release={named}"))).over_limit());
    // Streams that nothing names have slots too.
    let unnamed = decide(&service, &shop_request("k=a"));
    assert!(!unnamed.over_limit());
    assert!(decide(&service, &shop_request("k=a")).over_limit());
    assert!(!decide(&service, &shop_request("k=a,release=?")).over_limit());
    assert!(decide(&service, &shop_request("k=a")).over_limit());
    assert!(!decide(&service, &shop_request(&format!("k=a,release={}", token(&unnamed)))).over_limit());
    assert!(!decide(&service, &shop_request("k=a")).over_limit());
}

fn slot_ends_with_max_duration(server: Option<&Server>) {
    let service = service(server, RULES);
    let old = acquire(&service, "k=a", "1").unwrap();
    acquire(&service, "k=a", "2").unwrap();
    service.advance_us(600 * SECOND - 1);
    assert_eq!(acquire(&service, "k=a", "3"), None);
    service.advance_us(SECOND);
    assert!(acquire(&service, "k=a", "3").is_some());
    release(&service, "k=a", "1", &old);
    assert!(acquire(&service, "k=a", "4").is_some());
    assert_eq!(acquire(&service, "k=a", "5"), None);
}

fn lowered_limit_kills_nothing_and_a_raised_one_holds_at_once(server: Option<&Server>) {
    let service = service(server, "descriptors: [{key: k, rate_limit: {concurrent: 3}}]");
    let tokens: Vec<_> = ["1", "2", "3"].map(|stream| acquire(&service, "k=a", stream).unwrap()).into();
    load_shop_rules(&service, "descriptors: [{key: k, rate_limit: {concurrent: 1, max_duration: 5m}}]");
    release(&service, "k=a", "1", &tokens[0]);
    release(&service, "k=a", "2", &tokens[1]);
    assert_eq!(acquire(&service, "k=a", "4"), None);
    assert!(acquire(&service, "k=a", "3").is_some(), "the slot that is left goes on");
    load_shop_rules(&service, "descriptors: [{key: k, rate_limit: {concurrent: 2}}]");
    assert!(acquire(&service, "k=a", "4").is_some());
    assert_eq!(acquire(&service, "k=a", "5"), None);
    load_shop_rules(&service, "descriptors: [{key: k, rate_limit: {concurrent: 0}}]");
    assert_eq!(acquire(&service, "k=b", "5"), None);
}

fn peek_takes_no_slot(server: Option<&Server>) {
    let service = service(server, RULES);
    let peek = || decide(&service, &shop_request("k=a,slot=1").hits(0)).over_limit();
    for _ in 0..5 {
        assert!(!peek());
    }
    acquire(&service, "k=a", "2").unwrap();
    acquire(&service, "k=a", "3").unwrap();
    assert!(peek());
}

fn hits_are_seats(server: Option<&Server>) {
    let service = service(server, "descriptors: [{key: k, rate_limit: {concurrent: 10}}]");
    let big = decide(&service, &shop_request("k=a,slot=1").hits(7));
    assert_eq!(big.statuses(), [(false, 3)]);
    assert!(decide(&service, &shop_request("k=a,slot=2").hits(4)).over_limit());
    assert!(!decide(&service, &shop_request("k=a,slot=3").hits(3)).over_limit());
    // The hits of a release do not count.
    decide(&service, &shop_request(&format!("k=a,slot=1,release={}", token(&big))).hits(100));
    assert_eq!(decide(&service, &shop_request("k=a,slot=4")).statuses(), [(false, 6)]);
    let too_many = decide(&service, &shop_request("k=a,slot=5").hits(11));
    assert!(too_many.over_limit());
}

const LIST: &str = "descriptors:
  - key: k
    rate_limit:
      - {unit: minute, requests_per_unit: 3, name: rate}
      - {concurrent: 2, name: streams}";

fn list_is_all_or_nothing(server: Option<&Server>) {
    let service = service(server, LIST);
    let first = acquire(&service, "k=a", "1").unwrap();
    acquire(&service, "k=a", "2").unwrap();
    // No slot is free, so the rate is not charged: one hit is left for later.
    for stream in ["3", "4", "5"] {
        assert_eq!(acquire(&service, "k=a", stream), None);
    }
    release(&service, "k=a", "1", &first);
    let third = acquire(&service, "k=a", "6").expect("the third hit is left, and a slot");
    release(&service, "k=a", "6", &third);
    // The rate is used up, so no slot is taken.
    assert_eq!(acquire(&service, "k=a", "7"), None);
    service.advance_us(60 * SECOND);
    assert!(acquire(&service, "k=a", "8").is_some());
    assert_eq!(acquire(&service, "k=a", "9"), None);
}

fn rejection_of_another_descriptor_gives_the_slot_back(server: Option<&Server>) {
    let rules = "descriptors:
  - {key: k, rate_limit: {concurrent: 1}}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 1}}";
    let service = service(server, rules);
    let ask = |stream: &str| decide(&service, &shop_request(&format!("k=a,slot={stream}; day=x,slot={stream}")));
    let first = ask("1");
    assert!(!first.over_limit());
    let end = format!("k=a,slot=1,release={0}; day=x,slot=1,release={0}", token(&first));
    assert!(!decide(&service, &shop_request(&end)).over_limit());
    for stream in ["2", "3", "4"] {
        let rejected = ask(stream);
        assert!(rejected.over_limit());
        assert_eq!(token(&rejected), "-");
        // In Redis the slot is given back after the answer.
        kit::wait_for("the slot that was given back", || {
            (!decide(&service, &shop_request("k=a,slot=peek").hits(0)).over_limit()).then_some(())
        });
    }
    assert!(!decide(&service, &shop_request("k=a,slot=5")).over_limit());
}

fn shadow_limit_and_candidate_take_slots_and_reject_nothing(server: Option<&Server>) {
    let rules = "descriptors:
  - {key: shadow, shadow_mode: true, rate_limit: {concurrent: 1}}
  - key: k
    rate_limit:
      - {concurrent: 5}
      - {concurrent: 1, name: tighter, shadow_mode: true}";
    let service = service(server, rules);
    for stream in ["1", "2", "3"] {
        assert!(acquire(&service, "shadow=a", stream).is_some());
        assert!(acquire(&service, "k=a", stream).is_some());
    }
    let rejected = decide(&service, &shop_request("shadow=a,slot=9").hits(0));
    assert!(!rejected.over_limit());
}

fn slot_of_a_replaced_limit_is_not_taken(server: Option<&Server>) {
    let rules = "descriptors:
  - {key: k, rate_limit: {concurrent: 1, name: streams}}
  - {key: vip, rate_limit: {unlimited: true, replaces: [{name: streams}]}}";
    let service = service(server, rules);
    for stream in ["1", "2"] {
        let request = shop_request(&format!("k=a,slot={stream}; vip=y,slot={stream}"));
        assert!(!decide(&service, &request).over_limit());
    }
    assert!(acquire(&service, "k=a", "3").is_some());
    assert_eq!(acquire(&service, "k=a", "4"), None);
}

/// An inactive limit replaces nothing, so the slot is taken; it may be active when the stream ends.
fn limit_that_replaces_others_at_other_times_keeps_no_slot(server: Option<&Server>) {
    // It is noon UTC, and 12:02 at the end, before the slot expires.
    for active in [r#"{from: "08:00", to: "09:00"}"#, r#"{from: "12:01", to: "15:00"}"#] {
        let rules = format!(
            "descriptors:
  - {{key: k, rate_limit: {{concurrent: 1, name: streams}}}}
  - {{key: vip, rate_limit: {{unit: day, requests_per_unit: 9, replaces: [{{name: streams}}], active: {active}}}}}"
        );
        // The rule that replaces the limit decides the request that frees the slot, or is released by it too.
        for is_vip_decided in [false, true] {
            let service = service(server, &rules);
            let first = token(&decide(&service, &shop_request("k=a,slot=1; vip=y,slot=1")));
            assert_eq!(acquire(&service, "k=a", "2"), None);
            service.advance_us(120 * SECOND);
            let other = if is_vip_decided { String::new() } else { format!(",slot=1,release={first}") };
            decide(&service, &shop_request(&format!("k=a,slot=1,release={first}; vip=y{other}")));
            assert!(acquire(&service, "k=a", "2").is_some(), "{active} {is_vip_decided}");
        }
    }
}

/// The row of the value changed, or could not be read when the stream ended.
fn release_under_another_plan_frees_the_slot(server: Option<&Server>) {
    let rules = |default: &str| {
        format!(
            "plans: {{few: {{concurrent: 1}}, free: {{unlimited: true}}}}
tables: {{t: {{redis: t}}}}
descriptors: [{{key: k, plan: {{from: t, default: {default}}}}}]"
        )
    };
    let service = service(server, &rules("few"));
    let first = acquire(&service, "k=a", "1").unwrap();
    load_shop_rules(&service, &rules("free"));
    release(&service, "k=a", "1", &first);
    load_shop_rules(&service, &rules("few"));
    assert!(acquire(&service, "k=a", "2").is_some());
}

fn override_carries_the_number(server: Option<&Server>) {
    let service = service(server, RULES);
    let ask = |stream: &str| decide(&service, &shop_request(&format!("k=a,slot={stream}")).limit(3, 0, None));
    for stream in ["1", "2", "3"] {
        assert!(!ask(stream).over_limit(), "{stream}");
    }
    assert!(ask("4").over_limit());
    assert_eq!(acquire(&service, "k=a", "5"), None, "the rule's number holds without");
}

fn formatter_sent_as_text_is_refused(server: Option<&Server>) {
    let service = service(server, RULES);
    for request in ["k=a,slot=%STREAM_ID%", "k=a,slot=%STREAM_ID%,slot=%CONNECTION_ID%", "k=a,slot=1,release=%X%"] {
        let error = service.decide(&shop_request(request)).expect_err("it is refused");
        assert!(error.to_string().contains("enable_formatter_for_ratelimit_action_descriptor_value"), "{error}");
        assert_eq!(error.grpc_code(), tonic::Code::InvalidArgument);
    }
    assert!(!decide(&service, &shop_request("other=%x%")).over_limit());
    // The client's x-request-id, beside a value that it cannot choose: its call must not fail.
    assert!(acquire(&service, "k=a", "%STREAM_ID%").is_some());
    // Alone too, unless it is a formatter.
    for stream in ["%", "%%", "%41", "%x%", "100%"] {
        let token = acquire(&service, "k=b", stream).unwrap_or_else(|| panic!("{stream}"));
        release(&service, "k=b", stream, &token);
    }
}

fn reset_frees_all_slots(server: Option<&Server>) {
    let service = service(server, RULES);
    acquire(&service, "k=a", "1").unwrap();
    acquire(&service, "k=a", "2").unwrap();
    let rules = service.inner.rules.current_rules_owned().expect("rules are loaded");
    let context = service.inner.build_decision_context(Some(&rules), DEFAULT_CALLER_DEADLINE);
    let message = shop_request("k=a").0;
    let request = decode::convert_request(&message);
    let deleted = kit::test_service::store_runtime().block_on(service.inner.decider.reset_counters(context, &request));
    assert_eq!(deleted.expect("the store answers"), [1]);
    assert!(acquire(&service, "k=a", "3").is_some());
}

fn parallel_streams_never_exceed_the_limit(server: Option<&Server>) {
    let service = service(server, "descriptors: [{key: k, rate_limit: {concurrent: 3}}]");
    let (now, most) = (AtomicU64::new(0), AtomicU64::new(0));
    in_parallel(8, |thread| {
        // Each thread gets as many slots, however often others have all of them.
        let mut admitted = 0;
        for turn in 0.. {
            if admitted == 15 {
                break;
            }
            let stream = format!("{thread}.{turn}");
            let Some(token) = acquire(&service, "k=a", &stream) else {
                std::thread::yield_now();
                continue;
            };
            admitted += 1;
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            now.fetch_sub(1, Ordering::SeqCst);
            release(&service, "k=a", &stream, &token);
        }
    });
    assert!(most.into_inner() <= 3);
    for stream in ["a", "b", "c"] {
        assert!(acquire(&service, "k=a", stream).is_some(), "all slots are free");
    }
}

fn inactive_limit_frees_its_slots(server: Option<&Server>) {
    // Noon UTC on a Wednesday.
    let rules = "descriptors: [{key: k, rate_limit: {concurrent: 1, active: {from: \"11:00\", to: \"13:00\"}}}]";
    let service = service(server, rules);
    let token = acquire(&service, "k=a", "1").unwrap();
    service.advance_us(2 * 3600 * SECOND);
    release(&service, "k=a", "1", &token);
    service.advance_us(22 * 3600 * SECOND);
    assert!(acquire(&service, "k=a", "2").is_some());
}

fn entries_at_the_end_are_matched_in_other_domains(server: Option<&Server>) {
    let rules = "descriptors: [{key: k, descriptors: [{key: slot, rate_limit: {unit: day, requests_per_unit: 1}}]}]";
    let service = service(server, rules);
    assert!(!decide(&service, &shop_request("k=a,slot=%1")).over_limit());
    assert!(decide(&service, &shop_request("k=a,slot=%1")).over_limit());
    assert!(decide(&service, &shop_request("k=a,slot=%1")).response.dynamic_metadata.is_none());
}
