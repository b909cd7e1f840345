//! One run of a plan: starts the hosts, makes the calls, lets things go wrong, and judges.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kit::seeded_random::Chance;
use kit::test_service::TestRequest;
use tokio::runtime::{Builder, Handle};
use tokio::task::{JoinHandle, LocalSet, spawn_local};
use tokio::time::{Instant, sleep, sleep_until};
use tollkeeper::base::clock::Time;
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::base::random::seed_this_thread;

use super::clock::HostClock;
use super::judge::{CallRecord, Report, Verdict, find_breaches};
use super::network::{LinkName, Links};
use super::plan::{Arrivals, Plan, RECOVERY_MS, rule_file};
use super::replica::Replica;
use super::server::RedisHost;
use super::trace::Trace;

/// Address of Redis.
pub const REDIS: &str = "redis:6379";
/// Variables of each replica.
const ENVIRONMENT: &[(&str, &str)] = &[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", REDIS)];
/// Time that all clocks show at the start: 2026-01-01, and up to an hour more.
const START_S: u64 = 1_767_225_600;
/// Time before the first call, in milliseconds.
const SETTLE_MS: u64 = 500;
/// Time after the last call in which what is left ends, in milliseconds.
const END_MS: u64 = 3000;

/// Result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// What is broken; empty if all promises held.
    pub breaches: Vec<String>,
    /// Hash of all that happened.
    pub hash: u64,
    /// How often each fault and recovery happened.
    pub counts: BTreeMap<&'static str, u64>,
    /// Number of calls that were answered.
    pub calls: usize,
}

/// Runs a plan in virtual time.
pub fn run(plan: &Plan) -> Outcome {
    seed_this_thread(Some(plan.seed));
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let local = LocalSet::new();
    let plan = Rc::new(plan.clone());
    let outcome = local.block_on(&runtime, async move {
        let world = World::start(Rc::clone(&plan));
        world.play().await
    });
    drop((local, runtime));
    seed_this_thread(None);
    outcome
}

/// A call.
#[derive(Clone, Copy, Debug)]
struct CallPlan {
    rule: usize,
    value: u64,
    /// 0: a peek.
    hits: u64,
    deadline_ms: u64,
}

/// All that there is in a run.
pub struct World {
    pub plan: Rc<Plan>,
    started: Instant,
    pub links: Arc<Links>,
    pub redis: Rc<RedisHost>,
    pub replicas: RefCell<Vec<Option<Rc<Replica>>>>,
    pub replica_clocks: Vec<Arc<HostClock>>,
    /// Processes that were started.
    starts: Cell<usize>,
    pub limits: RefCell<Vec<u64>>,
    pub report: RefCell<Report>,
    pub trace: Trace,
}

impl World {
    fn start(plan: Rc<Plan>) -> Rc<Self> {
        let mut chance = Chance::new(plan.seed ^ 1);
        let trace = Trace::new();
        let start = Time::from_micros((START_S * 1000 + chance.below(3_600_000)) * 1000);
        let links = Links::new(plan.link, plan.seed ^ 2);
        let redis_clock = HostClock::new(start, 0, plan.redis_drift_ppm);
        let replica_clocks = (0..plan.replicas)
            .map(|_| HostClock::new(start, i64::try_from(chance.below(20_000_000)).unwrap() - 10_000_000, 0))
            .collect();
        let world = Rc::new(Self {
            started: Instant::now(),
            redis: RedisHost::start(REDIS, redis_clock, &links, &trace),
            links,
            replicas: RefCell::new(vec![None; plan.replicas]),
            replica_clocks,
            starts: Cell::new(0),
            limits: RefCell::new(plan.rules.iter().map(|rule| rule.limit).collect()),
            report: RefCell::default(),
            trace,
            plan,
        });
        for index in 0..world.plan.replicas {
            world.start_replica(index);
        }
        world
    }

    pub fn start_replica(&self, index: usize) {
        let number = self.starts.replace(self.starts.get() + 1);
        let host = format!("replica{index}-{number}");
        let rules = rule_file(&self.plan.rules, &self.limits.borrow());
        let replica = Replica::start(&host, &self.replica_clocks[index], &self.links, ENVIRONMENT, &rules);
        self.replicas.borrow_mut()[index] = Some(replica);
    }

    pub fn replica(&self, index: usize) -> Option<Rc<Replica>> {
        self.replicas.borrow()[index].clone()
    }

    pub fn link_of(&self, index: usize) -> Option<LinkName> {
        Some((self.replica(index)?.host.clone(), REDIS.to_owned()))
    }

    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap()
    }

    pub async fn wait_until(&self, at_ms: u64) {
        sleep_until(self.started + Duration::from_millis(at_ms)).await;
    }

    async fn play(self: Rc<Self>) -> Outcome {
        let tasks: Vec<JoinHandle<()>> = self
            .plan
            .faults
            .iter()
            .map(|fault| spawn_local(Rc::clone(&self).let_happen(*fault)))
            .chain([spawn_local(Rc::clone(&self).make_calls())])
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        sleep(Duration::from_millis(END_MS)).await;
        let mut breaches = find_breaches(&self.plan.rules, self.plan.replicas as u64, &self.report.borrow());
        breaches.extend(self.find_late_recovery());
        let calls = self.report.borrow().calls.len();
        for replica in self.replicas.take().into_iter().flatten() {
            replica.stop().await;
        }
        sleep(Duration::from_secs(5)).await;
        let left = Handle::current().metrics().num_alive_tasks();
        if left > 0 {
            breaches.push(format!("{left} tasks run after all replicas ended"));
        }
        Outcome { breaches, hash: self.trace.hash(), counts: self.trace.counts(), calls }
    }

    /// Calls that fail although the last fault ended long enough ago.
    fn find_late_recovery(&self) -> Option<String> {
        let recovered_ms = self.plan.last_fault_end_ms() + RECOVERY_MS;
        let report = self.report.borrow();
        let late = report.calls.iter().find(|call| {
            call.verdict == Verdict::Failed && call.sent_ms > recovered_ms.max(SETTLE_MS) && call.deadline_ms >= 50
        })?;
        Some(format!("no decision {} ms after the last fault: {late:?}", late.sent_ms - self.plan.last_fault_end_ms()))
    }

    async fn make_calls(self: Rc<Self>) {
        let mut chance = Chance::new(self.plan.seed ^ 3);
        let mut times: Vec<u64> = (0..self.plan.calls)
            .map(|_| match self.plan.arrivals {
                Arrivals::Even => SETTLE_MS + chance.below(self.plan.duration_ms),
                Arrivals::Bursts => SETTLE_MS + chance.below(self.plan.duration_ms / 1000) * 1000 + chance.below(100),
            })
            .collect();
        times.sort_unstable();
        for at_ms in times {
            self.wait_until(at_ms).await;
            let rule = chance.place(self.plan.rules.len());
            // A few values get most calls.
            let value = chance.below(self.plan.rules[rule].values).min(chance.below(self.plan.rules[rule].values));
            let hits = match chance.below(20) {
                0 => 0,
                1 => chance.between(2, 5),
                _ => 1,
            };
            let deadline_ms = chance.pick(&[20, 50, 200, 1000]);
            let index = chance.place(self.plan.replicas);
            if let Some(replica) = self.replica(index) {
                let call = Rc::clone(&self).call(Rc::clone(&replica), CallPlan { rule, value, hits, deadline_ms });
                replica.spawn_call(call);
            }
        }
    }

    async fn call(self: Rc<Self>, replica: Rc<Replica>, CallPlan { rule, value, hits, deadline_ms }: CallPlan) {
        let (key, value_text) = (format!("rule{rule}"), format!("value{value}"));
        let mut request = TestRequest::new("world").descriptor(&[(&key, &value_text)]);
        request.0.descriptors[0].hits_addend = Some(hits);
        let (sent_ms, redis_sent_us) = (self.now_ms(), self.redis.clock.now().as_micros());
        let answer = replica.decide(&request, Duration::from_millis(deadline_ms)).await;
        let verdict = match answer {
            Ok(response) if response.overall_code() == Code::OverLimit => Verdict::OverLimit,
            Ok(_) => Verdict::Ok,
            Err(_) => Verdict::Failed,
        };
        let call = CallRecord {
            rule,
            value,
            hits,
            deadline_ms,
            sent_ms,
            answered_ms: self.now_ms(),
            redis_sent_us,
            redis_answered_us: self.redis.clock.now().as_micros(),
            verdict,
        };
        self.trace.record(|| format!("{}: {call:?}", replica.host));
        self.trace.count(match verdict {
            Verdict::Ok => "admitted",
            Verdict::OverLimit => "rejected",
            Verdict::Failed => "failed",
        });
        self.report.borrow_mut().calls.push(call);
    }
}
