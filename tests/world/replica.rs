//! A replica of tollkeeper on a simulated host: the production code from a decoded request on.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use http_body_util::Full;
use kit::test_service::TestRequest;
use tokio::task::{AbortHandle, JoinSet};
use tollkeeper::base::pb::codec::{GRPC_FRAME_HEAD_BYTES, decode_with_field_bound, encode_grpc_frame};
use tollkeeper::base::pb::{RateLimitRequest, RateLimitResponse};
use tollkeeper::decide::decider::Decider;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::live::{LiveRules, RuleSetOrigin};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::serve::grpc::call::{CallHead, SLOT_HOLDER_HEADER};
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::encode::AnswerError;
use tollkeeper::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService, ShouldRateLimitMethod};
use tollkeeper::serve::quota::service::QuotaService;
use tollkeeper::settings::Settings;
use tollkeeper::settings::store::StoreSettings;
use tollkeeper::store::Store;
use tollkeeper::store::client::connect::{Host, Network};
use tonic::Status;

use super::clock::HostClock;
use super::network::{HostNetwork, Links};

/// Memory for counters of a replica without Redis, in bytes.
const FALLBACK_BYTES: u64 = 1 << 20;

/// Largest message of a call, in bytes.
const MAX_MESSAGE_BYTES: usize = 1 << 16;

/// A process.
#[derive(Debug)]
pub struct Replica {
    /// Name of its host; a process that is started again has another one.
    pub host: String,
    /// Answers calls.
    pub service: Arc<RateLimitService>,
    /// Answers calls of gRPC.
    method: ShouldRateLimitMethod,
    /// Serves quota streams; `None` unless its variables say so.
    pub quota: Option<Arc<QuotaService>>,
    options: CompileOptions,
    /// Calls and streams in flight.
    calls: RefCell<JoinSet<()>>,
}

impl Replica {
    /// Starts a process with these variables and rules.
    pub fn start(
        host: &str,
        clock: &Arc<HostClock>,
        links: &Arc<Links>,
        env: &[(&str, String)],
        rules: &str,
    ) -> Rc<Self> {
        let variables = env.iter().map(|(name, value)| ((*name).into(), value.into()));
        let (settings, _) = Settings::from_env(variables).expect("the settings are valid");
        let StoreSettings::Redis(of_redis) = &settings.store else { panic!("the settings select a Redis") };
        let network = Network::simulated(Arc::new(HostNetwork { host: host.to_owned(), links: Arc::clone(links) }));
        let on_host = Host { clock: clock.as_process_clock(), network };
        let store = Store::open_redis(of_redis, FALLBACK_BYTES, settings.slots.holder_timeout, &on_host);
        let options = CompileOptions::from(&settings);
        let decider = Decider::new(store, settings.decisions, Arc::default());
        let service = Arc::new(RateLimitService::new(on_host.clock, Arc::new(LiveRules::default()), decider));
        let method = ShouldRateLimitMethod::new(Arc::clone(&service), MAX_MESSAGE_BYTES);
        let quota = settings.grpc.max_quota_buckets.map(|max| QuotaService::start(Arc::clone(&service), max));
        let calls = RefCell::new(JoinSet::new());
        let replica = Rc::new(Self { host: host.to_owned(), service, method, quota, options, calls });
        replica.load(rules);
        replica
    }

    /// Replaces the rules.
    pub fn load(&self, rules: &str) {
        let text = RuleText {
            name: "rules.yaml".into(),
            bytes: rules.as_bytes().to_vec(),
            documents: DocumentSelection::FirstOnly,
        };
        let compiled = compile_texts(&[text], &self.options).unwrap_or_else(|found| panic!("{found}\n{rules}"));
        let set = RuleSet::from_domains(compiled.domains, &self.service.decider.metrics.limits);
        self.service.rules.swap_rules(set, RuleSetOrigin::default(), self.service.clock.now());
    }

    /// Decides a request, as a call does that comes with this deadline.
    pub async fn decide(&self, request: &TestRequest, deadline: Duration) -> Result<RateLimitResponse, AnswerError> {
        self.service.answer_request(&decode::convert_request(&request.0), deadline, None).await
    }

    /// Answers a call of gRPC that an Envoy makes and gives up after `timeout`.
    pub async fn answer_grpc_call(
        &self,
        holder: &str,
        request: &RateLimitRequest,
        timeout: Duration,
    ) -> Result<RateLimitResponse, Status> {
        let headers = HeaderMap::from_iter([(SLOT_HOLDER_HEADER, HeaderValue::from_str(holder).unwrap())]);
        let mut head = CallHead::from_headers(&headers, None).unwrap();
        head.timeout = Some(timeout);
        let frame = self.method.answer_call(head, Full::new(encode_grpc_frame(request))).await?;
        decode_with_field_bound(frame.slice(GRPC_FRAME_HEAD_BYTES..))
    }

    /// Hits that a limit has used, as a peek tells.
    pub async fn peek_used(&self, peek: &TestRequest) -> u64 {
        let response = self.decide(peek, DEFAULT_CALLER_DEADLINE).await.unwrap();
        let status = &response.statuses[0];
        u64::from(status.current_limit.as_ref().unwrap().requests_per_unit - status.limit_remaining)
    }

    /// Hears a health check of an Envoy.
    pub fn hear_health_check(&self, holder: &str) {
        let holders = self.service.decider.store.slot_holders();
        holders.record_heartbeat(holder.as_bytes(), self.service.clock.now());
    }

    /// Does what a server does repeatedly for its holders and its memory.
    pub fn sweep(&self, part: usize, parts: usize) {
        let (store, now) = (&self.service.decider.store, self.service.clock.now());
        store.slot_holders().record_that_process_runs(now);
        store.sweep(now, part, parts);
        if part == 0 {
            store.slot_holders().warn_and_forget_silent(now);
        }
    }

    /// Resets the counters that a request charges, as `/reset` does.
    pub async fn reset(&self, request: &TestRequest) {
        let rules = self.service.rules.current_rules_owned();
        let context = self.service.build_decision_context(rules.as_deref(), DEFAULT_CALLER_DEADLINE);
        // Fails while Redis fails: the counters may be reset or not.
        let _ = self.service.decider.reset_counters(context, &decode::convert_request(&request.0)).await;
    }

    /// Runs a call or a stream, which ends with the process.
    pub fn spawn_call(&self, call: impl Future<Output = ()> + 'static) -> AbortHandle {
        let mut calls = self.calls.borrow_mut();
        while calls.try_join_next().is_some() {}
        calls.spawn_local(call)
    }

    /// Ends the calls in flight, as SIGKILL does. The caller cuts the host's links first: what is left of the process
    /// reaches nobody.
    pub fn kill(&self) {
        self.calls.borrow_mut().abort_all();
    }

    /// Stops as a process that drains: calls in flight end first, streams at once.
    pub async fn stop(self: Rc<Self>) {
        if let Some(quota) = &self.quota {
            quota.end_streams();
        }
        let mut calls = self.calls.take();
        while calls.join_next().await.is_some() {}
        self.service.decider.store.shutdown().await;
    }
}
