//! A [`TestService`] with counters in Redis and a runtime of its own: one replica of tollkeeper, in this process.
//!
//! Its clock is manual, and counters follow it. A charge that Redis does not decide is an error, never a decision by
//! policy. The timeout of a charge is long enough for a loaded machine, unless the environment sets one.

use std::num::NonZeroU32;
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};
use tollkeeper::base::clock::Time;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::encode::AnswerError;
use tollkeeper::serve::grpc::service::DEFAULT_CALLER_DEADLINE;
use tollkeeper::settings::{self, Settings};
use tollkeeper::store::Store;
use tollkeeper::store::fallback::Fallback;
use tollkeeper::store::redis::Redis;

use super::test_service::{TestRequest, TestResponse, TestService, decide_within};

/// A replica that counts in Redis.
#[derive(Debug)]
pub struct Replica {
    /// The service, with its counters in Redis.
    pub service: TestService,
    /// Store of the service.
    pub redis: Arc<Redis>,
    runtime: Runtime,
}

impl Replica {
    /// Settings from these variables and the `address` of a single Redis; no rules yet, at `start`.
    pub fn new<N: AsRef<str>>(address: &str, env: impl IntoIterator<Item = (N, N)>, start: Time) -> Self {
        let defaults = [
            ("REDIS_SOCKET_TYPE", "tcp"),
            ("REDIS_URL", address),
            ("TOLLKEEPER_STORE_TIMEOUT", "10s"),
            ("TOLLKEEPER_ON_STORE_ERROR", "error"),
        ];
        let mut variables: Vec<(String, String)> =
            defaults.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        for (name, value) in env {
            variables.retain(|(known, _)| known != name.as_ref());
            variables.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        }
        let os = variables.iter().map(|(name, value)| (name.into(), value.into()));
        let (settings, _) = Settings::from_env(os).expect("the settings are valid");
        let settings::store::StoreSettings::Redis(of_redis) = &settings.store else {
            panic!("the settings select a Redis")
        };
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let redis = {
            let _within = runtime.enter();
            let sharers = of_redis.replicas.unwrap_or(NonZeroU32::MIN);
            Arc::new(Redis::start_with_client_clock(of_redis, Fallback::new(1 << 20, sharers)))
        };
        let store = Store::from(Arc::clone(&redis));
        Self { service: TestService::new(variables, start).with_store(store), redis, runtime }
    }

    /// Decides a request with the default deadline.
    pub fn decide(&self, request: &TestRequest) -> Result<TestResponse, AnswerError> {
        self.runtime.block_on(self.decide_async(request))
    }

    /// Decides all requests concurrently; responses in the order of the requests.
    pub fn decide_concurrently(&self, requests: &[TestRequest]) -> Vec<Result<TestResponse, AnswerError>> {
        let all = requests.iter().map(|request| self.decide_async(request));
        self.runtime.block_on(futures_util::future::join_all(all))
    }

    /// Number of calls made to Redis; a coalesced call counts once.
    pub fn calls(&self) -> u64 {
        self.redis.stats().calls
    }

    async fn decide_async(&self, request: &TestRequest) -> Result<TestResponse, AnswerError> {
        let request = decode::convert_request(&request.0);
        decide_within(&self.service.inner, &request, DEFAULT_CALLER_DEADLINE).await
    }
}
