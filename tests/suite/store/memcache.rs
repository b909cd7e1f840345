//! Counters in memcache: processes that share one memcached or several.
//!
//! All of it needs `memcached`. Rules count years, so that no window ends during a test.

mod count_bounds;
mod eviction;
mod exactness;
mod faults;
mod keys;
mod pages;
mod rules;
mod servers;
mod srv;
mod test_kit;
mod tls;
mod client;
mod counter_keys;

use tonic::Code;

use kit::grpc::{Client, rate_limit_request};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::wait_for;

/// Rules of the domain `shop`.
const RULES: &str = "domain: shop
descriptors:
  - {key: user, rate_limit: {unit: year, requests_per_unit: 3}}
  - {key: load, rate_limit: {unit: year, requests_per_unit: 500}}
";

/// A process that counts in these servers, and answers UNAVAILABLE for what they do not count.
fn counting_in(servers: &str) -> Setup {
    with_memcached(servers, RULES).env("TOLLKEEPER_STORE_TIMEOUT", "10s").env("TOLLKEEPER_ON_STORE_ERROR", "error")
}

/// A process with these rules that counts in these servers.
fn with_memcached(servers: &str, rules: &str) -> Setup {
    with_rules(rules).env("BACKEND_TYPE", "memcache").env("MEMCACHE_HOST_PORT", servers)
}

/// Calls for one descriptor `key=value`: whether it is admitted and what remains, or the code of the error.
fn call(client: &Client, key: &str, value: &str) -> Result<(bool, u32), Code> {
    call_with_hits(client, key, value, 1)
}

/// Calls for one descriptor with this number of hits; 0 asks without counting.
fn call_with_hits(client: &Client, key: &str, value: &str, hits: u64) -> Result<(bool, u32), Code> {
    let mut request = rate_limit_request("shop", &[(key, value)]);
    request.descriptors[0].hits_addend = Some(hits);
    let response = client.call(&request).map_err(|status| status.code())?;
    let admitted = response.overall_code() == tollkeeper::base::pb::rate_limit_response::Code::Ok;
    Ok((admitted, response.statuses[0].limit_remaining))
}

/// A client, once the process counts in all of its servers.
fn client_of(tollkeeper: &Tollkeeper) -> Client {
    let client = Client::connect(tollkeeper.grpc_port());
    wait_until_counting(&client);
    client
}

/// Waits until charges of many counters succeed, so that each server has some of them. Peeks always succeed.
fn wait_until_counting(client: &Client) {
    wait_for("counters in memcache", || {
        (0..40).all(|number| call(client, "load", &format!("wait{number}")).is_ok()).then_some(())
    });
}
