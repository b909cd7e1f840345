//! An Envoy with two rate limit filters: what it sends for a stream, and when.
//!
//! The filter `acquire` asks once, and gives up after its timeout, or when the client leaves. The filter `release` sends
//! its call when the stream has ended, with the token of the answer, and repeats it at another replica while it fails.
//! Health checks go to each replica. What happened is recorded as the Envoy saw it, for the judges.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use kit::seeded_random::Chance;
use kit::streams::slot_token;
use kit::test_service::TestRequest;
use tokio::sync::{Notify, oneshot};
use tokio::task::{AbortHandle, JoinSet, spawn_local};
use tokio::time::{sleep, timeout};
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::base::pb::{RateLimitRequest, RateLimitResponse};
use tonic::Status;

use super::fleet::Fleet;

/// Timeout of a release, and of each of its tries, in milliseconds: envoy/concurrency.yaml.
pub const RELEASE_TIMEOUT_MS: u64 = 10_000;
const TRY_TIMEOUT_MS: u64 = 2000;
/// Tries of a release after the first.
const RETRIES: u32 = 8;
/// Shortest backoff before another try, in milliseconds.
const BACKOFF_MS: u64 = 100;
/// Timeout of a health check, in milliseconds.
const CHECK_TIMEOUT_MS: u64 = 1000;

/// How the Envoys of a run are configured.
#[derive(Clone, Copy, Debug)]
pub struct EnvoyPlan {
    /// Largest time that a call takes in each direction, in milliseconds.
    pub max_latency_ms: u64,
    /// Timeout of the filter `acquire`, in milliseconds.
    pub acquire_timeout_ms: u64,
    /// Interval of health checks, in milliseconds; `None`: there are none.
    pub check_interval_ms: Option<u64>,
    /// Streams whose call fails pass (`failure_mode_deny: false`).
    pub fails_open: bool,
    /// Entries `slot` name the stream. Else there is one filter, which sends nothing if the client left before the answer.
    pub names_streams: bool,
}

/// A stream as its client makes it.
#[derive(Clone, Debug)]
pub struct StreamPlan {
    /// Rule and value of each descriptor.
    pub counters: Vec<(usize, u64)>,
    /// Hits of the request: its seats, or its estimate.
    pub hits: u64,
    /// Hits of the release: its true cost.
    pub cost: u64,
    /// Time after which the client leaves, or the response is complete, in milliseconds.
    pub ends_after_ms: u64,
    /// Envoy follows a redirect at the end, with the same identity.
    pub is_redirected: bool,
    /// Time after the end of the stream before the release is sent, in milliseconds.
    pub release_delay_ms: u64,
    /// The release is sent once more, so many milliseconds later.
    pub release_again_after_ms: Option<u64>,
}

/// A point in a run. Points have an order also within a millisecond.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Number of the point.
    pub order: u64,
    /// Milliseconds since the start of the run.
    pub at_ms: u64,
    /// What the clock of Redis showed, in microseconds.
    pub redis_us: u64,
}

/// What Envoy learned of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing yet, or nothing at all: the client left, or the Envoy ended.
    Unknown,
    /// Nothing within the timeout, or an error.
    Failed,
    /// It has a slot.
    Admitted,
    /// It is rejected.
    Rejected,
}

/// A request with its two calls. A stream that is redirected has two.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Number of the process of the Envoy.
    pub envoy: usize,
    /// Number of the stream in this process.
    pub stream: u64,
    /// The first request of the stream was sent then.
    pub begun: Moment,
    /// What its client does.
    pub plan: StreamPlan,
    /// The request was sent.
    pub sent: Moment,
    /// The answer was read.
    pub answered: Option<Moment>,
    /// What it said.
    pub outcome: Outcome,
    /// Entry `release` of its end.
    pub release: String,
    /// The stream ended.
    pub ended: Option<Moment>,
    /// The first of its releases was sent.
    pub release_sent: Option<Moment>,
    /// A release was answered.
    pub released: Option<Moment>,
}

impl Attempt {
    /// Returns true if the request belongs to a stream that was redirected before.
    pub const fn is_redirection(&self) -> bool {
        self.begun.order != self.sent.order
    }
}

/// What one process of Envoy did.
#[derive(Clone, Debug, Default)]
pub struct EnvoyRecord {
    /// Time at which it was killed, in milliseconds.
    pub killed_ms: Option<u64>,
    /// Health checks that arrived, in milliseconds.
    pub checks_ms: Vec<u64>,
    /// Spans between two arrivals at replicas in which it was frozen or cut off, in milliseconds.
    silences_ms: Vec<(u64, u64)>,
    heard_ms: u64,
    was_disturbed: bool,
}

impl EnvoyRecord {
    /// Spans in which no replica heard of it because it was frozen or cut off, in milliseconds.
    pub fn silences_ms(&self) -> impl Iterator<Item = (u64, u64)> {
        let last = self.was_disturbed.then_some((self.heard_ms, u64::MAX));
        self.silences_ms.iter().copied().chain(last)
    }
}

/// All that the Envoys of a run did.
#[derive(Debug, Default)]
pub struct Journal {
    /// Requests in the order in which they were sent.
    pub attempts: Vec<Attempt>,
    /// Processes of Envoys.
    pub envoys: Vec<EnvoyRecord>,
    moments: u64,
}

/// A process of Envoy.
#[derive(Debug)]
pub struct Envoy {
    plan: EnvoyPlan,
    number: usize,
    started_ms: u64,
    /// Name in calls and health checks.
    name: String,
    fleet: Rc<Fleet>,
    journal: Rc<RefCell<Journal>>,
    chance: RefCell<Chance>,
    is_frozen: Cell<bool>,
    /// Replicas that it does not reach.
    cut_off: RefCell<Vec<bool>>,
    changed: Notify,
    streams: Cell<u64>,
    tasks: RefCell<JoinSet<()>>,
}

impl Envoy {
    /// Starts a process. Must be called within a `LocalSet`.
    pub fn start(plan: EnvoyPlan, name: String, fleet: &Rc<Fleet>, journal: &Rc<RefCell<Journal>>) -> Rc<Self> {
        let number = journal.borrow().envoys.len();
        journal.borrow_mut().envoys.push(EnvoyRecord { heard_ms: fleet.now_ms(), ..EnvoyRecord::default() });
        let replicas = fleet.replica_clocks.len();
        let envoy = Rc::new(Self {
            plan,
            number,
            started_ms: fleet.now_ms(),
            chance: RefCell::new(Chance::new(fleet.seed ^ (0x100 + number as u64))),
            name,
            fleet: Rc::clone(fleet),
            journal: Rc::clone(journal),
            is_frozen: Cell::new(false),
            cut_off: RefCell::new(vec![false; replicas]),
            changed: Notify::new(),
            streams: Cell::new(0),
            tasks: RefCell::new(JoinSet::new()),
        });
        for replica in 0..replicas {
            if let Some(interval_ms) = plan.check_interval_ms {
                envoy.tasks.borrow_mut().spawn_local(Rc::clone(&envoy).check_health(replica, interval_ms));
            }
        }
        envoy
    }

    /// Name in calls and health checks.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Begins a stream.
    pub fn begin_stream(self: &Rc<Self>, plan: StreamPlan) {
        let stream = self.streams.replace(self.streams.get() + 1);
        self.spawn(Rc::clone(self).serve_stream(stream, plan));
    }

    /// Ends the process as SIGKILL does: its streams end, nothing is released.
    pub fn kill(&self) {
        self.tasks.borrow_mut().abort_all();
        self.journal.borrow_mut().envoys[self.number].killed_ms = Some(self.fleet.now_ms());
    }

    /// Stops the process, as SIGSTOP does, or lets it go on.
    pub fn set_frozen(&self, is_frozen: bool) {
        self.journal.borrow_mut().envoys[self.number].was_disturbed = true;
        self.is_frozen.set(is_frozen);
        self.changed.notify_waiters();
    }

    /// Cuts it off from a replica, or connects it again; `None`: all.
    pub fn set_cut_off(&self, replica: Option<usize>, is_cut_off: bool) {
        self.journal.borrow_mut().envoys[self.number].was_disturbed = true;
        for (index, cut_off) in self.cut_off.borrow_mut().iter_mut().enumerate() {
            *cut_off = if replica.is_none_or(|one| one == index) { is_cut_off } else { *cut_off };
        }
        self.changed.notify_waiters();
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        while tasks.try_join_next().is_some() {}
        tasks.spawn_local(task);
    }

    fn now(&self) -> Moment {
        let mut journal = self.journal.borrow_mut();
        journal.moments += 1;
        let redis_us = self.fleet.servers[0].clock.now().as_micros();
        Moment { order: journal.moments, at_ms: self.fleet.now_ms(), redis_us }
    }

    fn update(&self, attempt: usize, update: impl FnOnce(&mut Attempt)) {
        update(&mut self.journal.borrow_mut().attempts[attempt]);
    }

    async fn wait_until_running(&self) {
        while self.is_frozen.get() {
            self.changed.notified().await;
        }
    }

    async fn wait_for_link(&self, replica: usize) {
        let latency_ms = self.chance.borrow_mut().between(0, self.plan.max_latency_ms);
        sleep(Duration::from_millis(latency_ms)).await;
        while self.cut_off.borrow()[replica] {
            self.changed.notified().await;
        }
    }

    /// Records that a replica hears of this process now.
    fn record_arrival(&self, is_check: bool) {
        let now_ms = self.fleet.now_ms();
        let record = &mut self.journal.borrow_mut().envoys[self.number];
        if std::mem::take(&mut record.was_disturbed) {
            record.silences_ms.push((record.heard_ms, now_ms));
        }
        let is_disturbed = self.is_frozen.get() || self.cut_off.borrow().contains(&true);
        record.was_disturbed |= is_disturbed;
        record.heard_ms = now_ms;
        if is_check {
            record.checks_ms.push(now_ms);
        }
    }

    async fn check_health(self: Rc<Self>, replica: usize, interval_ms: u64) {
        let first_ms = self.chance.borrow_mut().below(interval_ms);
        sleep(Duration::from_millis(first_ms)).await;
        loop {
            self.wait_until_running().await;
            let check = async {
                self.wait_for_link(replica).await;
                if let Some(process) = self.fleet.replica(replica) {
                    process.hear_health_check(&self.name);
                    self.record_arrival(true);
                }
            };
            // A check that got no answer is sent anew.
            let _ = timeout(Duration::from_millis(CHECK_TIMEOUT_MS), check).await;
            sleep(Duration::from_millis(interval_ms)).await;
        }
    }

    /// Makes a call; `None`: no connection, or it broke. If the future is dropped, Envoy gave the call up.
    async fn call(
        &self,
        replica: usize,
        request: &RateLimitRequest,
        patience_ms: u64,
    ) -> Option<Result<RateLimitResponse, Status>> {
        self.wait_for_link(replica).await;
        let process = self.fleet.replica(replica)?;
        self.record_arrival(false);
        let (answer, answered) = oneshot::channel();
        let (name, request) = (self.name.clone(), request.clone());
        let serving = Rc::clone(&process);
        let call = process.spawn_call(async move {
            let patience = Duration::from_millis(patience_ms);
            // Nobody waits if the call was given up.
            let _ = answer.send(serving.answer_grpc_call(&name, &request, patience).await);
        });
        let latency_ms = self.chance.borrow_mut().between(0, self.plan.max_latency_ms);
        let given_up = ResetOnDrop { call, latency_ms };
        let answer = answered.await.ok()?;
        drop(given_up);
        self.wait_for_link(replica).await;
        Some(answer)
    }

    async fn serve_stream(self: Rc<Self>, stream: u64, plan: StreamPlan) {
        let first = self.attempt(stream, &plan, None).await;
        let (outcome, begun) = {
            let first = &self.journal.borrow().attempts[first];
            (first.outcome, first.begun)
        };
        // Only a response of the upstream redirects.
        if plan.is_redirected && outcome == Outcome::Admitted {
            self.fleet.trace.count("a stream was redirected");
            self.attempt(stream, &plan, Some(begun)).await;
        }
    }

    /// Serves a stream, or one redirection of it, until it ends; the release is then under way.
    async fn attempt(self: &Rc<Self>, stream: u64, plan: &StreamPlan, begun: Option<Moment>) -> usize {
        self.wait_until_running().await;
        let sent = self.now();
        let attempt = {
            let attempts = &mut self.journal.borrow_mut().attempts;
            attempts.push(Attempt {
                envoy: self.number,
                stream,
                begun: begun.unwrap_or(sent),
                plan: plan.clone(),
                sent,
                answered: None,
                outcome: Outcome::Unknown,
                release: "?".to_owned(),
                ended: None,
                release_sent: None,
                released: None,
            });
            attempts.len() - 1
        };
        let request = self.build_request(stream, plan, None);
        let replica = self.chance.borrow_mut().place(self.fleet.replica_clocks.len());
        let client = sleep(Duration::from_millis(plan.ends_after_ms));
        tokio::pin!(client);
        let patience = Duration::from_millis(self.plan.acquire_timeout_ms);
        let answer = tokio::select! {
            biased;
            () = &mut client => None,
            answer = timeout(patience, self.call(replica, &request, self.plan.acquire_timeout_ms)) => Some(answer),
        };
        self.wait_until_running().await;
        let passes = match answer {
            None => false,
            Some(answer) => {
                let at = self.now();
                let (outcome, release) = match answer {
                    Ok(Some(Ok(response))) => {
                        let token = slot_token(&response).unwrap();
                        let is_over = response.overall_code() == Code::OverLimit;
                        (if is_over { Outcome::Rejected } else { Outcome::Admitted }, token)
                    }
                    _ => (Outcome::Failed, "?".to_owned()),
                };
                self.record_outcome(attempt, outcome, &release);
                self.update(attempt, |attempt| {
                    (attempt.answered, attempt.outcome, attempt.release) = (Some(at), outcome, release);
                });
                outcome == Outcome::Admitted || outcome == Outcome::Failed && self.plan.fails_open
            }
        };
        if passes {
            client.await;
            self.wait_until_running().await;
        }
        let at = self.now();
        self.update(attempt, |attempt| attempt.ended = Some(at));
        if self.plan.names_streams || self.journal.borrow().attempts[attempt].answered.is_some() {
            self.spawn(Rc::clone(self).release(attempt));
        }
        attempt
    }

    fn record_outcome(&self, attempt: usize, outcome: Outcome, release: &str) {
        let trace = &self.fleet.trace;
        trace.record(|| format!("{}: request {attempt}: {outcome:?}, {release}", self.name));
        trace.count(match outcome {
            Outcome::Admitted => "streams admitted",
            Outcome::Rejected => "streams rejected",
            Outcome::Failed | Outcome::Unknown => "streams without an answer",
        });
    }

    fn build_request(&self, stream: u64, plan: &StreamPlan, release: Option<&str>) -> RateLimitRequest {
        // The client chose the first. The others are those of another Envoy too, but not of another process in its place.
        let (connection, time) = ((stream / 4).to_string(), format!("{}.{stream}", self.started_ms));
        let mut request = TestRequest::new("world");
        for (rule, value) in &plan.counters {
            let (rule, value) = (format!("rule{rule}"), format!("value{value}"));
            let mut entries = vec![(rule.as_str(), value.as_str())];
            if self.plan.names_streams {
                entries.extend([("slot", "forged"), ("slot", &connection), ("slot", &time)]);
            }
            entries.extend(release.map(|release| ("release", release)));
            request = request.descriptor(&entries).hits(if release.is_some() { plan.cost } else { plan.hits });
        }
        request.0
    }

    async fn release(self: Rc<Self>, attempt: usize) {
        let (stream, plan, value) = {
            let attempt = &self.journal.borrow().attempts[attempt];
            (attempt.stream, attempt.plan.clone(), attempt.release.clone())
        };
        let request = self.build_request(stream, &plan, Some(&value));
        sleep(Duration::from_millis(plan.release_delay_ms)).await;
        self.send_release(attempt, &request).await;
        if let Some(after_ms) = plan.release_again_after_ms {
            self.fleet.trace.count("a release was sent twice");
            sleep(Duration::from_millis(after_ms)).await;
            self.send_release(attempt, &request).await;
        }
    }

    async fn send_release(&self, attempt: usize, request: &RateLimitRequest) {
        self.wait_until_running().await;
        let at = self.now();
        self.update(attempt, |attempt| attempt.release_sent = attempt.release_sent.or(Some(at)));
        let whole = Duration::from_millis(RELEASE_TIMEOUT_MS);
        let is_released = timeout(whole, self.try_release(request)).await.unwrap_or(false);
        let at = self.now();
        self.fleet.trace.record(|| format!("{}: request {attempt} released: {is_released}", self.name));
        match is_released {
            true => self.update(attempt, |attempt| attempt.released = attempt.released.or(Some(at))),
            false => self.fleet.trace.count("a release was given up"),
        }
    }

    async fn try_release(&self, request: &RateLimitRequest) -> bool {
        let mut last = usize::MAX;
        for retry in 0..=RETRIES {
            let mut replica = self.chance.borrow_mut().place(self.fleet.replica_clocks.len());
            if replica == last {
                replica = (replica + 1) % self.fleet.replica_clocks.len();
            }
            last = replica;
            let call = self.call(replica, request, TRY_TIMEOUT_MS);
            let answer = timeout(Duration::from_millis(TRY_TIMEOUT_MS), call).await;
            self.wait_until_running().await;
            if let Ok(Some(Ok(_))) = answer {
                return true;
            }
            self.fleet.trace.count("a release was tried again");
            let backoff_ms = self.chance.borrow_mut().between(1, (BACKOFF_MS << retry).min(TRY_TIMEOUT_MS));
            sleep(Duration::from_millis(backoff_ms)).await;
        }
        false
    }
}

/// A call that ends a moment after Envoy gives it up.
struct ResetOnDrop {
    call: AbortHandle,
    latency_ms: u64,
}

impl Drop for ResetOnDrop {
    fn drop(&mut self) {
        if !self.call.is_finished() {
            let (call, latency_ms) = (self.call.clone(), self.latency_ms);
            spawn_local(async move {
                sleep(Duration::from_millis(latency_ms)).await;
                call.abort();
            });
        }
    }
}
