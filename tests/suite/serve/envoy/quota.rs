//! Quotas (RLQS) behind real Envoys: one limit for all of them, and the responses of `envoy/quota.yaml`.

use std::time::Duration;

use super::Pair;
use kit::envoy::Envoy;
use kit::http::Request;
use kit::tollkeeper::{self, Setup};
use kit::{read, repository, wait_at_most, wait_for};

fn with_quotas(rules: &str) -> Setup {
    tollkeeper::with_rules(rules).env("TOLLKEEPER_RLQS", "true")
}

/// Before its first assignment a bucket is denied, so that every admitted request was assigned.
#[expect(clippy::needless_pass_by_value, reason = "the signature that a start takes")]
fn with_denied_first_requests(bootstrap: String) -> String {
    assert!(bootstrap.contains("blanket_rule: ALLOW_ALL"), "{bootstrap}");
    let bootstrap = bootstrap.replace("blanket_rule: ALLOW_ALL", "blanket_rule: DENY_ALL");
    // Else the end of a connection with a rejection takes a second.
    let prefix = "                stat_prefix: quota\n";
    assert!(bootstrap.contains(prefix), "{bootstrap}");
    bootstrap.replace(prefix, &format!("{prefix}                delayed_close_timeout: 0s\n"))
}

fn admitted(requests: &[Request]) -> usize {
    requests.iter().filter(|request| request.send().status == 200).count()
}

#[test]
fn two_envoys_share_one_limit() {
    let rules = "domain: quota\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 100}}]\n";
    let tollkeeper = with_quotas(rules).start();
    let envoys = [(); 2].map(|()| Envoy::start_with("quota", &[tollkeeper.grpc_port()], with_denied_first_requests));
    let requests = envoys.each_ref().map(|envoy| envoy.get("/").header("x-user", "ann"));
    let mut sum = 0;
    // Shares move when proxies report, each 5 s.
    wait_at_most(Duration::from_secs(60), "most of the limit to be used", || {
        sum += admitted(&requests);
        (sum >= 90).then_some(())
    });
    for _ in 0..100 {
        sum += admitted(&requests);
    }
    assert!(sum <= 100, "{sum} of 100; tollkeeper said:\n{}", tollkeeper.stderr());
    let rejection = wait_for("a rejection", || Some(requests[0].send()).filter(|response| response.status == 429));
    assert_eq!(rejection.header("x-limited-by").as_deref(), Some("quota-user"));
}

#[test]
fn first_requests_and_rejections_are_as_the_bootstrap_says() {
    let pair = Pair::start_with("quota", with_quotas(&read(&repository("envoy/quota.rules.yaml"))));
    let anonymous = pair.envoy.get("/");
    let first = anonymous.send();
    assert_eq!((first.status, first.text().as_str()), (429, "send x-user\n"));
    assert_eq!(first.header("x-limited-by").as_deref(), Some("quota-anonymous"));
    wait_for("an assignment", || (anonymous.send().status == 200).then_some(()));
    assert_eq!(pair.envoy.get("/").header("x-user", "ann").send().status, 200);
    // Not a name: empty, and bytes that are not ASCII. Both use the bucket that has an assignment.
    for name in [&b""[..], b"caf\xe9"] {
        wait_for("an answer", || (anonymous.send().status == 200).then_some(()));
        assert_eq!(pair.envoy.get("/").header("x-user", name).send().status, 200);
    }
}

#[test]
fn route_without_the_filter_is_not_limited() {
    let rules = "domain: quota\ndescriptors: [{key: caller, value: anonymous, rate_limit: {requests_per_unit: 0}}]\n";
    let pair = Pair::start_with("quota", with_quotas(rules));
    assert_eq!(pair.envoy.get("/").send().status, 429);
    assert_eq!(super::statuses(&pair.envoy.get("/health"), 5), vec![200; 5]);
}
