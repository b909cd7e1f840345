//! Streams of concurrent limits and of reservations: services with counters of their own, and the tokens of answers.

use std::sync::atomic::{AtomicU64, Ordering};

use prost_types::value::Kind;
use tollkeeper::base::clock::Time;
use tollkeeper::base::pb::RateLimitResponse;
use tollkeeper::store::Store;

use super::fixtures::load_shop_rules;
use super::redis::Server;
use super::redis_counters::{TimeSource, start_store, wait_until_connected};
use super::test_service::TestService;

/// A second in microseconds.
pub const SECOND: u64 = 1_000_000;
/// Time at which the services start: noon UTC on a Wednesday.
pub const NOON: Time = Time::from_secs(1_783_512_000);

/// Token of an answer, `-` or `?`; `None` without one.
pub fn slot_token(response: &RateLimitResponse) -> Option<String> {
    match &response.dynamic_metadata.as_ref()?.fields.get("slot")?.kind {
        Some(Kind::StringValue(token)) => Some(token.clone()),
        other => panic!("{other:?}"),
    }
}

/// A service with these rules of the domain `shop` and this environment, whose counters are in memory or in this Redis.
pub fn stream_service(server: Option<&Server>, env: &[(&str, &str)], rules: &str) -> TestService {
    static SERVICES: AtomicU64 = AtomicU64::new(0);
    let own = [("TOLLKEEPER_ON_STORE_ERROR", "error")];
    let mut service = TestService::new(own.into_iter().chain(env.iter().copied()), NOON);
    if let Some(server) = server {
        let prefix = format!("{}:", SERVICES.fetch_add(1, Ordering::Relaxed));
        let address = server.address();
        let redis = start_store(
            &[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &address), ("CACHE_KEY_PREFIX", &prefix)],
            TimeSource::Caller,
        );
        wait_until_connected(&redis);
        service = service.with_store(Store::from(redis));
    }
    load_shop_rules(&service, rules);
    service
}

/// Tests that take an `Option<&Server>` and run on both stores.
#[macro_export]
macro_rules! on_both_stores {
    ($($name:ident),+ $(,)?) => {
        mod memory {
            $(#[test] fn $name() { super::$name(None); })+
        }
        mod redis {
            $(#[test] fn $name() { super::$name(Some(&$crate::redis::options().start())); })+
        }
    };
}
