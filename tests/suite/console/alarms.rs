//! `/alarms`: what it says of traffic and of rules that do nothing.

use serde_json::Value;

use crate::kit::grpc::{Client, rate_limit_request};
use crate::kit::http;
use crate::kit::tollkeeper::{Tollkeeper, with_rules};
use crate::kit::wait_for;

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 20}}
- key: campaign
  descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 5}}
";

/// Texts of the alarms of a kind.
fn alarms(server: &Tollkeeper, kind: &str) -> Vec<String> {
    let response = http::get(server.debug_port(), "/alarms").send();
    let report: Value = serde_json::from_slice(&response.body).unwrap();
    let alarms = report["alarms"].as_array().unwrap().iter().filter(|alarm| alarm["kind"] == kind);
    alarms.map(|alarm| alarm["text"].as_str().unwrap().to_owned()).collect()
}

fn call(server: &Tollkeeper, entries: &[(&str, &str)], times: usize) {
    let client = Client::connect(server.grpc_port());
    (0..times).for_each(|_| drop(client.call(&rate_limit_request("shop", entries)).unwrap()));
}

#[test]
fn rejections_of_most_requests_are_an_alarm_that_names_the_limit() {
    let server = with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    call(&server, &[("user", "ann")], 39);
    call(&server, &[("other", "x")], 21);
    assert_eq!(alarms(&server, "mostly_rejected"), [""; 0], "19 of 60 are few");
    call(&server, &[("user", "ann")], 80);
    let found = wait_for("the alarm", || Some(alarms(&server, "mostly_rejected")).filter(|found| !found.is_empty()));
    let expected =
        "99 of 140 requests of the last two to three minutes were rejected, 99 decisions of them by shop.user";
    assert_eq!(found, [expected]);
}

#[test]
fn entries_in_another_order_than_a_rule_are_an_alarm() {
    let server = with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    // The first rule takes `user` alone, so both match nothing.
    call(&server, &[("user", "ann"), ("campaign", "spring")], 40);
    call(&server, &[("tenant", "x")], 40);
    let found =
        wait_for("the alarm", || Some(alarms(&server, "almost_matches_rule")).filter(|found| !found.is_empty()));
    assert_eq!(found.len(), 1, "another key is no mistake: {found:?}");
    let parts =
        ["descriptors of shop are not limited: shop.campaign.user has the entries in another order", "rules.yaml:6:"];
    assert!(parts.iter().all(|part| found[0].contains(part)), "{found:?}");
}
