//! A run of quotas: proxies that decide by themselves, and replicas that divide limits among them.

mod connection;
mod judge;
mod plan;
mod proxy;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use kit::seeded_random::Chance;
use kit::test_service::TestRequest;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet, spawn_local};
use tokio::time::{Instant, sleep, sleep_until};
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::base::pb::rlqs::RateLimitQuotaResponse;
use tollkeeper::limit::algorithm::Algorithm;

use self::connection::{Connection, Running, connect, link_name};
use self::judge::{BucketRecord, Hits, QuotaReport, Request, find_breaches};
pub use self::plan::QuotaPlan;
use self::plan::{SETTLE_MS, Source};
use self::proxy::{Basis, BucketName, Decision, Proxy, ProxyOptions};
use super::fleet::{Fleet, run_in_virtual_time};
use super::judge::LimitChange;
use super::network::Link;
use super::plan::{Fault, TimedFault, rule_file};
use super::simulation::{Outcome, Simulation};

/// Shortest and longest time after which a response that was read is in force, in milliseconds.
const APPLY_MS: (u64, u64) = (2, 23);
/// Deadline of calls over RLS.
const CALL_DEADLINE: Duration = Duration::from_millis(200);
/// Time in which streams and buckets end after their proxies did, in milliseconds.
const STREAMS_END_MS: u64 = 2000;
/// Time after which no assignment is in use any more, and no window counts, in milliseconds: what a lost proxy had counts as
/// used at the end of its assignment, in two windows.
const ASSIGNMENTS_END_MS: u64 = 200_000;

impl Simulation for QuotaPlan {
    fn draw(seed: u64) -> Self {
        Self::draw(seed)
    }

    fn run(&self) -> Outcome {
        let plan = Rc::new(self.clone());
        run_in_virtual_time(self.fleet.seed, async move {
            let fleet = Fleet::start(&plan.fleet, &[("TOLLKEEPER_RLQS", "true")], plan.rule_file());
            let (count, limits) = (plan.proxies.len(), plan.rules.iter().map(|rule| rule.limit).collect());
            let world = World {
                chance: RefCell::new(Chance::new(plan.fleet.seed ^ 4)),
                hosts: (0..count).map(|_| ProxyHost::default()).collect(),
                standing: RefCell::new(vec![false; plan.fleet.replicas]),
                limits: RefCell::new(limits),
                report: RefCell::default(),
                fleet,
                plan,
            };
            Rc::new(world).play().await
        })
    }

    fn faults_mut(&mut self) -> &mut Vec<TimedFault> {
        &mut self.faults
    }
}

/// A host of a proxy.
#[derive(Debug, Default)]
struct ProxyHost {
    /// `None`: the process does not run.
    process: RefCell<Option<Rc<Process>>>,
    /// Faults that cut its links to and from replicas.
    cuts_to_server: Cell<u32>,
    cuts_to_host: Cell<u32>,
}

/// A process of a proxy.
struct Process {
    index: usize,
    options: ProxyOptions,
    proxy: RefCell<Proxy>,
    running: Rc<Running>,
    connection: RefCell<Option<Rc<Connection>>>,
    /// Responses that were read, with the time at which they are in force.
    read: mpsc::UnboundedSender<(Instant, RateLimitQuotaResponse)>,
    tasks: RefCell<JoinSet<()>>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "proxy {}: {:?}", self.index, self.proxy)
    }
}

impl Process {
    fn report(&self, report: Bytes) {
        if let Some(connection) = &*self.connection.borrow() {
            connection.report(report);
        }
    }
}

/// A fleet, its proxies, its plan, and what was decided.
struct World {
    plan: Rc<QuotaPlan>,
    fleet: Rc<Fleet>,
    hosts: Vec<ProxyHost>,
    /// Replicas that stand still.
    standing: RefCell<Vec<bool>>,
    /// Limits of the rules that are in force.
    limits: RefCell<Vec<u64>>,
    chance: RefCell<Chance>,
    report: RefCell<QuotaReport>,
}

impl World {
    async fn play(self: Rc<Self>) -> Outcome {
        for index in 0..self.hosts.len() {
            self.start_proxy(index);
        }
        let faults = self.plan.faults.clone();
        let tasks: Vec<JoinHandle<()>> = faults
            .into_iter()
            .map(|fault| spawn_local(Rc::clone(&self).let_happen(fault)))
            .chain([spawn_local(Rc::clone(&self).make_requests())])
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        self.fleet.wait_until(SETTLE_MS + self.plan.duration_ms).await;
        let mut breaches = self.end_proxies().await;
        let mut report = self.report.take();
        report.losses = self.fleet.losses.take();
        breaches.extend(find_breaches(&self.plan, &report));
        breaches.extend(self.fleet.stop().await);
        let trace = &self.fleet.trace;
        let calls = report.requests;
        Outcome { breaches, hash: trace.hash(), counts: trace.counts(), calls }
    }

    fn now_us(&self) -> u64 {
        self.fleet.now_ms() * 1000
    }

    /// Starts a process of a proxy.
    fn start_proxy(self: &Rc<Self>, index: usize) {
        let (read, responses) = mpsc::unbounded_channel();
        let options = self.plan.proxies[index];
        let process = Rc::new(Process {
            index,
            options,
            proxy: RefCell::new(Proxy::new(options)),
            running: Running::new(),
            connection: RefCell::default(),
            read,
            tasks: RefCell::default(),
        });
        *self.hosts[index].process.borrow_mut() = Some(Rc::clone(&process));
        self.open_stream(&process);
        let mut tasks = process.tasks.borrow_mut();
        tasks.spawn_local(Rc::clone(self).apply_responses(Rc::clone(&process), responses));
        tasks.spawn_local(Rc::clone(self).report_regularly(Rc::clone(&process)));
    }

    fn end_proxy(&self, index: usize) {
        if let Some(process) = self.hosts[index].process.take() {
            process.tasks.borrow_mut().abort_all();
            process.connection.take();
        }
    }

    async fn apply_responses(
        self: Rc<Self>,
        process: Rc<Process>,
        mut responses: mpsc::UnboundedReceiver<(Instant, RateLimitQuotaResponse)>,
    ) {
        while let Some((at, response)) = responses.recv().await {
            sleep_until(at).await;
            process.running.wait().await;
            let mut proxy = process.proxy.borrow_mut();
            proxy.apply(&response, self.now_us());
            self.fleet.trace.record(|| format!("proxy {} has {}", process.index, proxy.describe(self.now_us())));
        }
    }

    async fn report_regularly(self: Rc<Self>, process: Rc<Process>) {
        loop {
            sleep(Duration::from_millis(process.options.report_ms)).await;
            process.running.wait().await;
            let is_new_stream = process.connection.borrow().is_none();
            if is_new_stream {
                self.open_stream(&process);
            }
            let report = process.proxy.borrow_mut().report_all(self.now_us(), is_new_stream);
            process.report(report);
        }
    }

    /// Opens a stream to one of the replicas, if one runs.
    fn open_stream(self: &Rc<Self>, process: &Rc<Process>) {
        let running: Vec<usize> =
            (0..self.plan.fleet.replicas).filter(|index| self.fleet.replica(*index).is_some()).collect();
        if running.is_empty() {
            return;
        }
        let replica = self.chance.borrow_mut().pick(&running);
        self.fleet.trace.count("a stream was opened");
        self.fleet.trace.record(|| format!("proxy {} connects to replica {replica}", process.index));
        let (connection, receiver) = connect(&self.fleet, process.index, replica, process.options.is_envoy);
        *process.connection.borrow_mut() = Some(Rc::clone(&connection));
        let (world, process_of_task) = (Rc::clone(self), Rc::clone(process));
        let receive = async move {
            let process = process_of_task;
            let last = Cell::new(Instant::now());
            let take = |response| {
                let (min, max) = APPLY_MS;
                let delay = Duration::from_millis(world.chance.borrow_mut().between(min, max));
                last.set(last.get().max(Instant::now() + delay));
                // Fails if the process ends.
                let _ = process.read.send((last.get(), response));
            };
            receiver.run(&process.running, take).await;
            process.connection.borrow_mut().take_if(|current| Rc::ptr_eq(current, &connection));
            world.fleet.trace.count("a stream was lost");
            world.fleet.trace.record(|| format!("proxy {} lost its stream", process.index));
        };
        spawn_with_process(process, receive);
    }

    async fn make_requests(self: Rc<Self>) {
        for request in self.plan.draw_requests() {
            self.fleet.wait_until(request.at_ms).await;
            match request.source {
                Source::Proxy(index) => self.decide(index, request.name),
                Source::Call => self.start_call(request.name),
            }
        }
    }

    fn decide(&self, index: usize, name: BucketName) {
        let Some(process) = self.hosts[index].process.borrow().clone() else { return };
        if !process.running.is_running() {
            return;
        }
        let now_ms = self.fleet.now_ms();
        let (decision, new) = process.proxy.borrow_mut().decide(name, self.now_us());
        if let Some(report) = new {
            process.report(report);
        }
        self.fleet.trace.record(|| format!("proxy {index}, {name:?}: {decision:?}"));
        let report = &mut *self.report.borrow_mut();
        report.requests += 1;
        let redis_us = self.fleet.servers[0].clock.now().as_micros();
        report.asked.push(Request { name, at_ms: now_ms, redis_us });
        let bucket = report.buckets.entry((index, name)).or_insert_with(|| BucketRecord::new(now_ms));
        bucket.record(decision, now_ms);
        self.fleet.trace.count(match decision {
            Decision { passes: true, basis: Basis::Assignment } => "admitted by an assignment",
            Decision { passes: true, basis: Basis::None } => "admitted before an assignment",
            Decision { passes: true, basis: Basis::Ended } => "admitted after an assignment",
            Decision { passes: false, .. } => "denied",
        });
        if decision.passes && decision.basis == Basis::Assignment {
            report.admitted.push(Hits::of_proxy_at(name, now_ms, redis_us));
        }
    }

    fn start_call(self: &Rc<Self>, name: BucketName) {
        let running: Vec<usize> = (0..self.plan.fleet.replicas)
            .filter(|index| self.fleet.replica(*index).is_some() && !self.standing.borrow()[*index])
            .collect();
        if running.is_empty() {
            return;
        }
        let replica = self.fleet.replica(self.chance.borrow_mut().pick(&running)).expect("it runs");
        let world = Rc::clone(self);
        let of_call = Rc::clone(&replica);
        replica.spawn_call(async move {
            let (from_ms, from_us) = (world.fleet.now_ms(), world.fleet.servers[0].clock.now().as_micros());
            let is_ok = matches!(of_call.decide(&request_of(name, 1), CALL_DEADLINE).await,
                Ok(response) if response.overall_code() == Code::Ok);
            let (until_ms, until_us) = (world.fleet.now_ms(), world.fleet.servers[0].clock.now().as_micros());
            world.fleet.trace.record(|| format!("call of {name:?}: {is_ok}"));
            let report = &mut *world.report.borrow_mut();
            report.requests += 1;
            report.asked.push(Request { name, at_ms: until_ms, redis_us: until_us });
            if is_ok {
                world.fleet.trace.count("admitted over RLS");
                report.admitted.push(Hits {
                    name,
                    from_ms,
                    until_ms,
                    redis_from_us: from_us,
                    redis_until_us: until_us,
                    by_proxy: false,
                });
            }
        });
    }

    async fn let_happen(self: Rc<Self>, timed: TimedFault) {
        self.fleet.wait_until(timed.at_ms).await;
        let for_ms = Duration::from_millis(timed.for_ms);
        self.fleet.trace.record(|| timed.to_string());
        match timed.fault {
            Fault::LimitChanges(rule, limit) => self.change_limit(rule, limit),
            Fault::ReplicaStandsStill(index) => {
                self.fleet.trace.count("a replica stood still");
                self.set_replica_running(index, false);
                sleep(for_ms).await;
                self.set_replica_running(index, true);
            }
            Fault::ProxyIsKilled(index, _) => {
                self.fleet.trace.count("a proxy was killed");
                self.end_proxy(index);
                sleep(for_ms).await;
                if self.hosts[index].process.borrow().is_none() {
                    self.start_proxy(index);
                }
            }
            Fault::ProxyStandsStill(index) => {
                let Some(process) = self.hosts[index].process.borrow().clone() else { return };
                self.fleet.trace.count("a proxy stood still");
                process.running.set(false);
                sleep(for_ms).await;
                process.running.set(true);
            }
            Fault::ProxyLinkIsCut(index, to_server, to_host) => {
                self.fleet.trace.count("a link of a proxy was cut");
                self.add_cuts(index, (to_server, to_host), 1);
                sleep(for_ms).await;
                self.add_cuts(index, (to_server, to_host), -1);
            }
            Fault::ProxyLinkIsSlow(index, milliseconds) => {
                self.fleet.trace.count("a link of a proxy was slow");
                let change_all = |change: &dyn Fn(&mut Link)| {
                    (0..self.plan.fleet.replicas)
                        .for_each(|replica| self.fleet.links.change(&link_name(index, replica), change));
                };
                change_all(&|link| link.latency_ms += milliseconds);
                sleep(for_ms).await;
                change_all(&|link| link.latency_ms -= milliseconds);
            }
            Fault::ProxyStreamIsReset(index) => {
                self.fleet.trace.count("a stream was reset");
                let process = self.hosts[index].process.borrow().clone();
                if let Some(connection) = process.and_then(|process| process.connection.borrow().clone()) {
                    connection.reset();
                }
            }
            _ => Rc::clone(&self.fleet).let_happen(timed).await,
        }
    }

    fn change_limit(&self, rule: usize, limit: u64) {
        self.fleet.trace.count("a limit changed");
        self.report.borrow_mut().changes.push(LimitChange { rule, from_ms: self.fleet.now_ms(), limit });
        self.limits.borrow_mut()[rule] = limit;
        self.fleet.load_rules(rule_file(&self.plan.rules, &self.limits.borrow()));
    }

    /// Stops a replica, as SIGSTOP does, or lets it go on: no time passes for it, and nothing comes or goes.
    fn set_replica_running(&self, index: usize, runs: bool) {
        self.fleet.replica_clocks[index].set_running(runs);
        self.standing.borrow_mut()[index] = !runs;
        self.update_links();
        if let Some(replica) = self.fleet.replica(index) {
            let cut = |link: &mut Link| (link.is_cut_to_server, link.is_cut_to_host) = (!runs, !runs);
            self.fleet.links.change(&(replica.host.clone(), self.fleet.servers[0].address.clone()), cut);
        }
    }

    /// Counts a fault that cuts the links of a proxy, to replicas and from them, or, with -1, its end.
    fn add_cuts(&self, proxy: usize, (to_server, to_host): (bool, bool), by: i32) {
        let host = &self.hosts[proxy];
        for (cuts, is_cut) in [(&host.cuts_to_server, to_server), (&host.cuts_to_host, to_host)] {
            if is_cut {
                cuts.set(cuts.get().checked_add_signed(by).unwrap());
            }
        }
        self.update_links();
    }

    /// Cuts the links between proxies and replicas that must be.
    fn update_links(&self) {
        for (proxy, host) in self.hosts.iter().enumerate() {
            for (replica, stands) in self.standing.borrow().iter().enumerate() {
                self.fleet.links.change(&link_name(proxy, replica), |link| {
                    link.is_cut_to_server = *stands || host.cuts_to_server.get() > 0;
                    link.is_cut_to_host = *stands || host.cuts_to_host.get() > 0;
                });
            }
        }
    }

    /// Ends all proxies; says what is left of them at replicas, and of their hits in Redis.
    async fn end_proxies(&self) -> Vec<String> {
        let mut breaches = Vec::new();
        (0..self.hosts.len()).for_each(|index| self.end_proxy(index));
        sleep(Duration::from_millis(STREAMS_END_MS)).await;
        for replica in self.fleet.running_replicas() {
            let quota = replica.quota.as_ref().expect("it is on");
            let (streams, buckets) = (quota.stream_count(), quota.bucket_count());
            if (streams, buckets) != (0, 0) {
                breaches.push(format!("{streams} streams and {buckets} buckets of {} are left", replica.host));
            }
        }
        let is_clock_jump =
            |fault: &TimedFault| matches!(fault.fault, Fault::ReplicaClockJumps(..) | Fault::RedisClockJumps(_));
        if self.plan.faults.iter().any(is_clock_jump) {
            return breaches;
        }
        sleep(Duration::from_millis(ASSIGNMENTS_END_MS)).await;
        for replica in self.fleet.running_replicas() {
            let totals = replica.quota.as_ref().expect("it is on").compute_totals();
            if totals.keys > 0 {
                breaches.push(format!("{} divisions of {} are left: {totals:?}", totals.keys, replica.host));
            }
        }
        // All that was held has come back.
        let Some(replica) = self.fleet.running_replicas().into_iter().next() else { return breaches };
        for (index, rule) in self.plan.rules.iter().enumerate() {
            let hits = if rule.algorithm == Algorithm::TokenBucket { rule.size } else { self.limits.borrow()[index] };
            // A bucket that a small limit does not refill in this time is not full.
            if hits * rule.period_s * 1000 / self.limits.borrow()[index] > ASSIGNMENTS_END_MS / 2 {
                continue;
            }
            for value in 0..rule.values {
                let name = (index, value);
                let response = replica.decide(&request_of(name, hits), CALL_DEADLINE).await;
                let is_ok = matches!(&response, Ok(response) if response.overall_code() == Code::Ok);
                if !is_ok {
                    breaches.push(format!("{hits} hits of {name:?} are not free at the end: {response:?}"));
                }
            }
        }
        breaches
    }
}

/// Runs a task that ends with the process of a proxy.
fn spawn_with_process(process: &Rc<Process>, task: impl Future<Output = ()> + 'static) {
    let mut tasks = process.tasks.borrow_mut();
    while tasks.try_join_next().is_some() {}
    tasks.spawn_local(task);
}

fn request_of((rule, value): BucketName, hits: u64) -> TestRequest {
    let mut request = TestRequest::new("world").descriptor(&[(&format!("rule{rule}"), &format!("value{value}"))]);
    request.0.descriptors[0].hits_addend = Some(hits);
    request
}
