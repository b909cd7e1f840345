//! A replica of tollkeeper on a simulated host: the production code from a decoded request on.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kit::test_service::TestRequest;
use tokio::task::JoinSet;
use tollkeeper::base::pb::RateLimitResponse;
use tollkeeper::decide::Decider;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::live::{LiveRules, RuleSetOrigin};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::encode::AnswerError;
use tollkeeper::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService};
use tollkeeper::settings::Settings;
use tollkeeper::settings::store::StoreSettings;
use tollkeeper::store::Store;
use tollkeeper::store::client::connect::{Host, Network};

use super::clock::HostClock;
use super::network::{HostNetwork, Links};

/// Memory for counters of a replica without Redis, in bytes.
const FALLBACK_BYTES: u64 = 1 << 20;

/// A process.
#[derive(Debug)]
pub struct Replica {
    /// Name of its host; a process that is started again has another one.
    pub host: String,
    /// Answers calls.
    pub service: Arc<RateLimitService>,
    options: CompileOptions,
    /// Calls in flight.
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
        let service = RateLimitService::new(on_host.clock, Arc::new(LiveRules::default()), decider);
        let replica = Rc::new(Self {
            host: host.to_owned(),
            service: Arc::new(service),
            options,
            calls: RefCell::new(JoinSet::new()),
        });
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

    /// Resets the counters that a request charges, as `/reset` does.
    pub async fn reset(&self, request: &TestRequest) {
        let rules = self.service.rules.current_rules_owned();
        let context = self.service.build_decision_context(rules.as_deref(), DEFAULT_CALLER_DEADLINE);
        // Fails while Redis fails: the counters may be reset or not.
        let _ = self.service.decider.reset_counters(context, &decode::convert_request(&request.0)).await;
    }

    /// Runs a call, which ends with the process.
    pub fn spawn_call(&self, call: impl Future<Output = ()> + 'static) {
        let mut calls = self.calls.borrow_mut();
        while calls.try_join_next().is_some() {}
        calls.spawn_local(call);
    }

    /// Ends the calls in flight, as SIGKILL does. The caller cuts the host's links first: what is left of the process
    /// reaches nobody.
    pub fn kill(&self) {
        self.calls.borrow_mut().abort_all();
    }

    /// Stops as a process that drains: calls in flight end first.
    pub async fn stop(self: Rc<Self>) {
        let mut calls = self.calls.take();
        while calls.join_next().await.is_some() {}
        self.service.decider.store.shutdown().await;
    }
}
