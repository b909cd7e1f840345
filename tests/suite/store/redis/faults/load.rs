//! A client that calls a tollkeeper at a steady rate and requires each response within 20 ms, as Envoy does.
//!
//! It calls one rule for each policy of `on_store_error`, made so that every response shows whether Redis or the
//! policy gave it. Calls start on schedule, whether earlier ones have ended or not.
//!
//! The machine's load must not fail a test. So each call has a twin, sent at the same time to a tollkeeper with a
//! healthy Redis: if that response was slow, the machine was, and calls of that time are not judged.

use std::cell::{Ref, RefCell};
use std::env;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval};
use tollkeeper::base::pb::RateLimitResponse;
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::base::pb::rate_limit_service_client::RateLimitServiceClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code as Status, Request};

use kit::grpc::rate_limit_request;
use kit::redis::{Server, options};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};

/// One rule for each policy, named after it. Half of the limit is local with two replicas.
const RULES: &str = "domain: faults
descriptors:
  - {key: deny, rate_limit: {unit: day, requests_per_unit: 1000000, on_store_error: deny}}
  - {key: local, rate_limit: {unit: day, requests_per_unit: 1000000, on_store_error: local}}
  - {key: allow, rate_limit: {unit: day, requests_per_unit: 1000000, on_store_error: allow}}
  - {key: error, rate_limit: {unit: day, requests_per_unit: 1000000, on_store_error: error}}
";
const KEYS: [&str; 4] = ["deny", "local", "allow", "error"];
const LIMIT: u32 = 1_000_000;

/// Different values of each key: enough for all shards.
const VALUES: usize = 40;
/// Interval between two calls: 100 a second. Three such tests together leave a machine of two cores some time.
const CALL_INTERVAL: Duration = Duration::from_millis(10);
/// Store timeout of a charge, or slightly less.
const CHARGE_TIMEOUT: Duration = Duration::from_millis(14);
/// Timeout of Envoy.
const ENVOY_TIMEOUT: Duration = Duration::from_millis(20);
/// A twin call that takes longer was disturbed.
const MAX_UNDISTURBED_LATENCY: Duration = Duration::from_millis(8);
/// Calls this close in number to a disturbed one count as disturbed too.
const DISTURBED_NEIGHBOURS: usize = 3;
/// Number of undisturbed strict calls in a row after which Redis counts as recovered.
const STRICT_CALLS_TO_RECOVER: usize = 20;
/// Deadline for using a recovered server again.
const MAX_RECOVERY_TIME: Duration = Duration::from_secs(2);

/// Deadline for enough undisturbed calls; a machine may be busy for minutes.
const PATIENCE: Duration = Duration::from_secs(180);
/// Interval between two looks at the calls: a look at thousands of them takes time that the calls need.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A tollkeeper with the rules that a [`Load`] calls; callers add the address of Redis.
pub(crate) fn with_policies() -> Setup {
    with_rules(RULES).env("TOLLKEEPER_REPLICAS", "2")
}

/// Hash tag of the Redis keys of a call.
pub(crate) fn tag(number: usize) -> String {
    format!("{{faults|{}={}}}", KEYS[number % KEYS.len()], value(number))
}

/// Hash tags of all counters.
pub(crate) fn tags() -> impl Iterator<Item = String> {
    (0..KEYS.len() * VALUES).map(tag)
}

fn value(number: usize) -> usize {
    number / KEYS.len() % VALUES
}

/// Decider of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Strict,
    Policy,
    /// No response in time.
    Late,
    /// Neither Redis nor a policy can have decided so.
    Wrong(String),
}

#[derive(Clone, Debug)]
struct Call {
    number: usize,
    sent: Instant,
    took: Duration,
    verdict: Verdict,
    /// The machine was slow then.
    disturbed: bool,
}

/// A caller at work; it stops when dropped.
pub(crate) struct Load {
    /// Calls that are over, by their number.
    calls: RefCell<Vec<Call>>,
    /// Calls that were over since the last look.
    ended: Receiver<Call>,
    stop: Arc<AtomicBool>,
    worker: Option<JoinHandle<()>>,
    _twin: (Tollkeeper, Server),
}

impl Load {
    /// Starts to call.
    pub(crate) fn on(tollkeeper: &Tollkeeper) -> Self {
        let ((sender, ended), stop) = (channel(), Arc::new(AtomicBool::new(false)));
        let well = options().start();
        let twin = with_policies().env("REDIS_URL", well.address()).start();
        let targets = [tollkeeper, &twin].map(|tollkeeper| format!("http://127.0.0.1:{}", tollkeeper.grpc_port()));
        let stopped = Arc::clone(&stop);
        let worker = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be built").block_on(call_on_schedule(targets, sender, &stopped));
        });
        Self { calls: RefCell::default(), ended, stop, worker: Some(worker), _twin: (twin, well) }
    }

    /// Starts to call, and waits until all calls are strict.
    pub(crate) fn strict_on(tollkeeper: &Tollkeeper) -> Self {
        let load = Self::on(tollkeeper);
        load.wait_until_strict_since(Instant::now());
        load
    }

    /// Waits for `calls` more undisturbed calls.
    pub(crate) fn wait_for_calls(&self, calls: usize) {
        let began = Instant::now();
        poll("calls to be over", || (self.judged(began).len() >= calls).then_some(()));
    }

    /// Runs a fault until the store has recovered, then waits until all calls are strict.
    pub(crate) fn run_fault(&self, name: &str, fault: impl FnOnce(&Self)) -> FaultEffects {
        self.wait_until_strict_since(Instant::now());
        let began = Instant::now();
        fault(self);
        let recovered_at = Instant::now();
        self.fault_effects(name, began, recovered_at)
    }

    /// Same as [`Load::run_fault`], with a store that was unreachable from the first call on.
    pub(crate) fn run_recovery(&self, name: &str, appear: impl FnOnce()) -> FaultEffects {
        let began = self.calls_since_start()[0].sent;
        appear();
        self.fault_effects(name, began, Instant::now())
    }

    fn fault_effects(&self, name: &str, began: Instant, recovered_at: Instant) -> FaultEffects {
        let recovery_time = self.wait_until_strict_since(recovered_at);
        let of_it = |call: &Call| call.sent >= began && call.sent <= recovery_time;
        let all = self.calls_since_start().iter().filter(|call| of_it(call)).count();
        let calls: Vec<Call> = self.judged(began).into_iter().filter(of_it).collect();
        let disturbed = all - calls.len();
        let until_back = calls.iter().filter(|call| call.sent > recovered_at).count();
        let recovery_time = CALL_INTERVAL * u32::try_from(until_back).expect("calls are few");
        FaultEffects { name: name.to_owned(), calls, disturbed, recovered_at, recovery_time }
    }

    /// Send time of the first call after `since` from which on all are strict.
    fn wait_until_strict_since(&self, since: Instant) -> Instant {
        poll("all to be strict", || {
            let calls = self.judged(since);
            let strict = |calls: &[Call]| calls.iter().filter(|call| call.verdict == Verdict::Strict).count();
            let run = calls
                .windows(STRICT_CALLS_TO_RECOVER)
                .find(|run| run[0].verdict == Verdict::Strict && strict(run) * 10 >= STRICT_CALLS_TO_RECOVER * 8);
            // No call was waiting before the first one: the state of the store before the next call is unknown.
            run.map(|run| if run[0].number == calls[0].number { since } else { run[0].sent })
        })
    }

    /// Calls that are over and were not disturbed, in order.
    fn judged(&self, begin: Instant) -> Vec<Call> {
        let calls = self.calls_since_start();
        let calls = calls.iter().filter(|call| call.sent >= begin);
        let disturbed: Vec<usize> = calls.clone().filter(|call| call.disturbed).map(|call| call.number).collect();
        let is_near = |number: usize| {
            let next = disturbed.partition_point(|other| *other + DISTURBED_NEIGHBOURS < number);
            disturbed.get(next).is_some_and(|other| *other <= number + DISTURBED_NEIGHBOURS)
        };
        calls.filter(|call| !is_near(call.number)).cloned().collect()
    }

    /// All calls that are over, in order.
    fn calls_since_start(&self) -> Ref<'_, Vec<Call>> {
        let mut calls = self.calls.borrow_mut();
        calls.extend(self.ended.try_iter());
        calls.sort_by_key(|call| call.number);
        drop(calls);
        self.calls.borrow()
    }
}

/// Repeats `condition` until it gives a value; panics with `what` after [`PATIENCE`].
fn poll<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(began.elapsed() < PATIENCE, "gave up waiting for {what}");
        thread::sleep(POLL_INTERVAL);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(worker) = self.worker.take() {
            // The thread panics if the tollkeeper is unreachable, and its message is already printed.
            let _ = worker.join();
        }
    }
}

async fn call_on_schedule([target, twin]: [String; 2], ended: Sender<Call>, stop: &AtomicBool) {
    let endpoint = |target| Endpoint::from_shared(target).expect("the target is valid");
    let channel = endpoint(target).connect().await.expect("the tollkeeper accepts");
    let twin = endpoint(twin).connect().await.expect("its twin accepts");
    let mut due = interval(CALL_INTERVAL);
    due.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for number in 0.. {
        due.tick().await;
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let (channel, twin, ended) = (channel.clone(), twin.clone(), ended.clone());
        tokio::spawn(async move {
            let (mut call, twin) = tokio::join!(call_rule(channel, number), call_rule(twin, number));
            call.disturbed = twin.took > MAX_UNDISTURBED_LATENCY || twin.verdict != Verdict::Strict;
            // Nobody receives the last calls of a load that is dropped.
            let _ = ended.send(call);
        });
    }
}

async fn call_rule(channel: Channel, number: usize) -> Call {
    let value = value(number).to_string();
    let mut request = Request::new(rate_limit_request("faults", &[(KEYS[number % KEYS.len()], &value)]));
    request.set_timeout(ENVOY_TIMEOUT);
    let sent = Instant::now();
    let response = RateLimitServiceClient::new(channel).should_rate_limit(request).await;
    let took = sent.elapsed();
    let verdict = match response {
        Ok(response) => judge(KEYS[number % KEYS.len()], response.get_ref()),
        Err(status) if matches!(status.code(), Status::Cancelled | Status::DeadlineExceeded) => Verdict::Late,
        Err(status) if status.code() == Status::Unavailable && KEYS[number % KEYS.len()] == "error" => Verdict::Policy,
        Err(status) => Verdict::Wrong(status.to_string()),
    };
    Call { number, sent, took, verdict, disturbed: false }
}

/// Source of a response.
///
/// Half of the limit remaining means `local`; the other policies that admit report no limit.
fn judge(key: &str, response: &RateLimitResponse) -> Verdict {
    let status = &response.statuses[0];
    let limit = status.current_limit.as_ref().map(|limit| limit.requests_per_unit);
    match (key, response.overall_code(), limit) {
        ("local", Code::Ok, Some(LIMIT)) if status.limit_remaining < LIMIT / 2 => Verdict::Policy,
        ("deny", Code::OverLimit, _) | ("allow", Code::Ok, None) => Verdict::Policy,
        (_, Code::Ok, Some(LIMIT)) => Verdict::Strict,
        _ => Verdict::Wrong(format!("{key}: {response:?}")),
    }
}

/// Effects of a fault on callers.
#[derive(Debug)]
pub(crate) struct FaultEffects {
    name: String,
    /// Undisturbed calls from the start of the fault until all were strict again.
    calls: Vec<Call>,
    disturbed: usize,
    /// Time at which the store recovered.
    recovered_at: Instant,
    /// Recovery time from then, without time that the machine was busy.
    recovery_time: Duration,
}

impl FaultEffects {
    /// Checks the effects against the contract, and adds a row to the table of faults if one is requested.
    pub(crate) fn expect_contract(self) -> Self {
        self.note();
        let wrong = self.calls.iter().find_map(|call| match &call.verdict {
            Verdict::Wrong(what) => Some(what),
            _ => None,
        });
        assert_eq!(wrong, None, "{}: an answer that no policy allows", self.name);
        assert!(
            self.in_time() >= 95.0 - self.tolerance_percent(),
            "{}: answers within {ENVOY_TIMEOUT:?}: {:.1} %",
            self.name,
            self.in_time()
        );
        assert!(
            self.recovery_time <= MAX_RECOVERY_TIME,
            "{}: strict again only after {:?}",
            self.name,
            self.recovery_time
        );
        self
    }

    /// Checks that policy decided most calls during the fault, and Redis none.
    pub(crate) fn expect_by_policy(self) -> Self {
        let share = self.share(&Verdict::Policy, |_| true);
        assert!(share >= 50.0, "{}: answered by policy: {share:.1} %", self.name);
        self
    }

    /// Checks that most calls were decided at once during the fault: a breaker was open.
    pub(crate) fn expect_immediate_decisions(self) -> Self {
        let during: Vec<_> = self.calls.iter().filter(|call| call.sent < self.recovered_at).collect();
        let waited = during.iter().filter(|call| call.took >= CHARGE_TIMEOUT).count();
        let share = percent(waited, during.len());
        assert!(
            share <= 30.0 + self.tolerance_percent(),
            "{}: waited {CHARGE_TIMEOUT:?} and more: {share:.1} %",
            self.name
        );
        self
    }

    /// True if policy decided most calls on these keys, by their tag, during the fault.
    pub(crate) fn is_mostly_by_policy(&self, of: impl Fn(&str) -> bool) -> bool {
        self.share(&Verdict::Policy, |call| of(&tag(call.number))) >= 50.0
    }

    /// Checks that `percent` of the calls on these keys, by their tag, were strict during the fault.
    pub(crate) fn expect_strict(self, percent: f64, of: impl Fn(&str) -> bool) -> Self {
        let share = self.share(&Verdict::Strict, |call| of(&tag(call.number)));
        assert!(share >= percent - self.tolerance_percent(), "{}: strict: {share:.1} %", self.name);
        self
    }

    /// Tolerance in percent: if the machine disturbed many calls, it disturbed some of the others too.
    fn tolerance_percent(&self) -> f64 {
        match self.disturbed * 2 / self.calls.len().max(1) {
            0 => 0.0,
            1..4 => 25.0,
            _ => 50.0,
        }
    }

    fn in_time(&self) -> f64 {
        let late = self.calls.iter().filter(|call| call.verdict == Verdict::Late).count();
        percent(self.calls.len() - late, self.calls.len())
    }

    /// Percent of the calls while the fault lasted.
    fn share(&self, verdict: &Verdict, of: impl Fn(&Call) -> bool) -> f64 {
        let during: Vec<_> = self.calls.iter().filter(|call| call.sent < self.recovered_at && of(call)).collect();
        percent(during.iter().filter(|call| call.verdict == *verdict).count(), during.len())
    }

    /// `fault | calls | not judged | in 20 ms % | strict during % | policy during % | longest ms | back after ms`.
    fn note(&self) {
        let answered = self.calls.iter().filter(|call| call.verdict != Verdict::Late);
        let longest = answered.map(|call| call.took).max().unwrap_or_default();
        let mut row = String::new();
        write!(
            row,
            "| {} | {} | {} | {:.1} | {:.0} | {:.0} | {:.1} | {} |",
            self.name,
            self.calls.len(),
            self.disturbed,
            self.in_time(),
            self.share(&Verdict::Strict, |_| true),
            self.share(&Verdict::Policy, |_| true),
            longest.as_secs_f64() * 1e3,
            self.recovery_time.as_millis(),
        )
        .expect("a text can be written to");
        println!("{row}");
        if let Some(path) = env::var_os("TOLLKEEPER_FAULT_TABLE") {
            let table = File::options().create(true).append(true).open(path);
            writeln!(table.expect("the table can be opened"), "{row}").expect("the table can be written");
        }
    }
}

fn percent(part: usize, whole: usize) -> f64 {
    let as_f64 = |count| f64::from(u32::try_from(count).expect("calls are few"));
    if whole == 0 { 100.0 } else { as_f64(part) * 100.0 / as_f64(whole) }
}
