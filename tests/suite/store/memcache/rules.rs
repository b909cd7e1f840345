//! Rules that memcache cannot count, in a process that serves.

use std::fs;

use tonic::Code;

use super::{RULES, call, call_with_hits, client_of, counting_in, with_memcached};
use kit::grpc::Client;
use kit::memcached::memcached;
use kit::wait_for;

const LIST: &str = "domain: shop
descriptors:
  - key: user
    rate_limit:
      - {unit: minute, requests_per_unit: 3}
      - {unit: year, requests_per_unit: 9}
";

#[test]
fn refused_reload_keeps_the_last_valid_rules() {
    let server = memcached().start();
    let tollkeeper = counting_in(&server.address()).start();
    let client = client_of(&tollkeeper);
    let refused = [
        (LIST.to_owned(), "rules.yaml:4:5: a list of 2 limits"),
        (RULES.replace("500}", "500, algorithm: token_bucket}"), "rules.yaml:4:66: `algorithm: token_bucket`"),
        (RULES.replace("500}", "500, count_rejected: false}"), "rules.yaml:4:66: `count_rejected: false`"),
        (RULES.replace("500}", "500, consistency: eventual}"), "rules.yaml:4:66: `consistency: eventual`"),
    ];
    for ((rules, expected), count) in refused.into_iter().zip(1_u64..) {
        fs::write(tollkeeper.rules_path(), rules).unwrap();
        let status = wait_for("the rules to be refused", || {
            Some(tollkeeper.rules_status()).filter(|status| status["refused"] == count)
        });
        let error = status["last_error"].as_str().unwrap();
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("is not possible with BACKEND_TYPE=memcache"), "{error}");
    }
    assert_eq!(call(&client, "user", "ann"), Ok((true, 2)));
    fs::write(tollkeeper.rules_path(), RULES.replace("requests_per_unit: 3", "requests_per_unit: 7")).unwrap();
    wait_for("the new limit", || (call_with_hits(&client, "user", "bob", 0) == Ok((true, 7))).then_some(()));
}

#[test]
fn rules_that_memcache_cannot_count_leave_a_start_without_rules() {
    let server = memcached().start();
    let tollkeeper = with_memcached(&server.address(), LIST).start_unhealthy();
    let client = Client::connect(tollkeeper.grpc_port());
    assert_eq!(call(&client, "user", "ann"), Err(Code::Unavailable));
    let log = tollkeeper.stderr();
    assert!(log.contains("a list of 2 limits is not possible with BACKEND_TYPE=memcache"), "{log}");
}
