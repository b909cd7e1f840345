//! The protocol of a subscription, without I/O.

use std::time::Duration;

use proptest::prelude::*;
use prost_types::Any;
use tokio::time::Instant;
use tollkeeper::base::pb::xds::{DiscoveryRequest, DiscoveryResponse, Node};
use tollkeeper::rules::xds::subscription::{MAX_REFUSAL_DELAY, MIN_REFUSAL_DELAY, Reaction, Subscription, TYPE_URL};

fn subscription() -> Subscription {
    Subscription::new(Node { id: "node".to_owned(), metadata: None })
}

fn set(contents: &[&str]) -> Vec<Any> {
    contents.iter().map(|text| Any { type_url: TYPE_URL.to_owned(), value: text.as_bytes().to_vec() }).collect()
}

fn response(version: &str, nonce: &str, contents: &[&str]) -> DiscoveryResponse {
    let type_url = TYPE_URL.to_owned();
    DiscoveryResponse { version_info: version.into(), nonce: nonce.into(), type_url, resources: set(contents) }
}

/// Version, nonce and error of a request.
fn facts(request: &DiscoveryRequest) -> (&str, &str, Option<&str>) {
    let error = request.error_detail.as_ref().map(|status| status.message.as_str());
    (&request.version_info, &request.response_nonce, error)
}

/// Applies a response that must be new, with this result; returns the answer.
fn apply(subscription: &mut Subscription, response: DiscoveryResponse, result: Result<(), &str>) -> DiscoveryRequest {
    let reaction = subscription.handle_response(response, Instant::now());
    assert!(matches!(reaction, Reaction::Apply(_)), "{reaction:?}");
    subscription.conclude_apply(&result.map_err(str::to_owned)).unwrap()
}

#[test]
fn first_request_subscribes_to_all_without_version_and_nonce() {
    let mut subscription = subscription();
    let first = subscription.begin_stream();
    assert_eq!(facts(&first), ("", "", None));
    assert_eq!((first.type_url.as_str(), first.resource_names.len()), (TYPE_URL, 0));
    assert_eq!(first.node.unwrap().id, "node");
}

#[test]
fn accepted_version_is_claimed_on_its_stream_only() {
    let mut subscription = subscription();
    subscription.begin_stream();
    assert_eq!(facts(&apply(&mut subscription, response("7", "a", &["one"]), Ok(()))), ("7", "a", None));
    let refused = apply(&mut subscription, response("8", "b", &["two"]), Err("bad\nworse"));
    assert_eq!(facts(&refused), ("7", "b", Some("bad")));
    assert_eq!(facts(&subscription.begin_stream()), ("", "", None));
    let refused = apply(&mut subscription, response("9", "a", &["three"]), Err("bad"));
    assert_eq!(facts(&refused), ("", "a", Some("bad")));
}

#[test]
fn content_in_force_is_accepted_in_any_order_and_under_any_version_without_applying_it() {
    let mut subscription = subscription();
    subscription.begin_stream();
    apply(&mut subscription, response("1", "a", &["one", "two"]), Ok(()));
    for (version, nonce, contents) in [("2", "b", ["two", "one"]), ("1", "c", ["one", "two"])] {
        match subscription.handle_response(response(version, nonce, &contents), Instant::now()) {
            Reaction::Accept(request) => assert_eq!(facts(&request), (version, nonce, None)),
            other => panic!("{other:?}"),
        }
    }
    subscription.begin_stream();
    let again = subscription.handle_response(response("1", "a", &["one", "two"]), Instant::now());
    assert!(matches!(again, Reaction::Accept(_)), "{again:?}");
    for other in [&["one"][..], &["one", "one", "two"], &["onetwo"], &[]] {
        apply(&mut subscription, response("1", "d", other), Ok(()));
        apply(&mut subscription, response("1", "e", &["one", "two"]), Ok(()));
    }
}

#[test]
fn same_content_is_refused_again_at_a_growing_pace() {
    let mut subscription = subscription();
    subscription.begin_stream();
    apply(&mut subscription, response("1", "0", &["bad"]), Err("bad"));
    let start = Instant::now();
    let mut delays = Vec::new();
    for nonce in 1..=6 {
        let reaction = subscription.handle_response(response("1", &nonce.to_string(), &["bad"]), start);
        assert!(matches!(reaction, Reaction::RefuseLater), "{reaction:?}");
        let due = subscription.next_refusal_time().unwrap();
        // A response that arrives meanwhile postpones nothing, and the refusal is of the last one.
        let last = format!("{nonce}b");
        subscription.handle_response(response("2", &last, &["bad"]), start + Duration::from_millis(400));
        assert_eq!(subscription.next_refusal_time(), Some(due));
        delays.push(due - start);
        assert_eq!(facts(&subscription.take_delayed_refusal().unwrap()), ("", last.as_str(), Some("bad")));
        assert!(subscription.next_refusal_time().is_none());
    }
    assert_eq!((delays[0], delays[5]), (MIN_REFUSAL_DELAY, MAX_REFUSAL_DELAY));
    assert!(delays.is_sorted());
}

#[test]
fn other_content_resets_the_pace_and_drops_the_delayed_refusal() {
    let mut subscription = subscription();
    subscription.begin_stream();
    apply(&mut subscription, response("1", "0", &["good"]), Ok(()));
    apply(&mut subscription, response("2", "1", &["bad"]), Err("bad"));
    subscription.handle_response(response("2", "2", &["bad"]), Instant::now());
    // The good content again is applied, which clears the error that is shown.
    apply(&mut subscription, response("3", "3", &["good"]), Ok(()));
    assert!(subscription.next_refusal_time().is_none());
    let refused = apply(&mut subscription, response("4", "4", &["bad"]), Err("bad"));
    assert_eq!(facts(&refused), ("3", "4", Some("bad")));
}

#[test]
fn response_of_another_type_is_ignored() {
    let mut subscription = subscription();
    subscription.begin_stream();
    let other = DiscoveryResponse { type_url: "type.googleapis.com/other".to_owned(), ..response("1", "a", &[]) };
    assert!(matches!(subscription.handle_response(other, Instant::now()), Reaction::Ignore));
    assert!(subscription.conclude_apply(&Ok(())).is_none());
}

#[test]
fn long_error_is_cut_at_a_character() {
    let mut subscription = subscription();
    subscription.begin_stream();
    let refused = apply(&mut subscription, response("1", "a", &["x"]), Err(&"é".repeat(5000)));
    assert_eq!(refused.error_detail.unwrap().message.len(), 2048);
}

proptest! {
    /// Whatever a server sends, each response gets at most one answer, with its nonce and a version accepted on this
    /// stream, and no content is applied twice in a row.
    #[test]
    fn each_response_is_answered_once(steps in prop::collection::vec((0..4_usize, 0..5_u8), 1..60)) {
        let mut subscription = subscription();
        subscription.begin_stream();
        let contents: [&[&str]; 4] = [&["one", "two"], &["two", "one"], &["bad"], &[]];
        let mut accepted = String::new();
        let mut in_force: Option<usize> = None;
        let start = Instant::now();
        for (number, (choice, action)) in steps.into_iter().enumerate() {
            if action == 0 {
                let first = subscription.begin_stream();
                prop_assert_eq!(facts(&first), ("", "", None));
                accepted.clear();
            }
            let (version, nonce) = (format!("v{number}"), format!("n{number}"));
            let is_bad = choice == 2;
            match subscription.handle_response(response(&version, &nonce, contents[choice]), start) {
                Reaction::Apply(_) => {
                    let result = if is_bad { Err("bad".to_owned()) } else { Ok(()) };
                    let answer = subscription.conclude_apply(&result).unwrap();
                    if !is_bad {
                        accepted.clone_from(&version);
                        in_force = Some(choice.max(1));
                    }
                    prop_assert_eq!(facts(&answer), (accepted.as_str(), nonce.as_str(), is_bad.then_some("bad")));
                }
                Reaction::Accept(answer) => {
                    prop_assert_eq!(in_force, Some(choice.max(1)));
                    accepted.clone_from(&version);
                    prop_assert_eq!(facts(&answer), (version.as_str(), nonce.as_str(), None));
                }
                Reaction::RefuseLater => {
                    prop_assert!(is_bad);
                    prop_assert!(subscription.next_refusal_time().unwrap() <= start + MAX_REFUSAL_DELAY);
                    if action > 2 {
                        let answer = subscription.take_delayed_refusal().unwrap();
                        prop_assert_eq!(facts(&answer), (accepted.as_str(), nonce.as_str(), Some("bad")));
                    }
                }
                Reaction::Ignore => prop_assert!(false, "the type is right"),
            }
            prop_assert_eq!(subscription.accepted_version(), accepted.as_str());
        }
    }
}
