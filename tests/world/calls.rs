//! A run of calls over RLS: strict and eventual limits.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use kit::seeded_random::Chance;
use kit::test_service::TestRequest;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::sleep;
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::limit::StoreFailurePolicy;

use super::charge_watch::ChargeWatch;
use super::fleet::{Fleet, run_in_virtual_time};
use super::judge::{CallRecord, CounterLevel, LimitChange, Report, Verdict, find_breaches};
use super::plan::{Arrivals, Fault, Plan, RECOVERY_MS, TimedFault, rule_file};
use super::replica::Replica;
use super::simulation::{Outcome, Simulation};

/// Time before the first call, in milliseconds.
const SETTLE_MS: u64 = 500;
/// Time after the last call and the last fault in which the calls in flight end, in milliseconds.
const QUIET_MS: u64 = 1200;
/// Time after that in which what is left ends, in milliseconds.
const END_MS: u64 = 3000;

impl Simulation for Plan {
    fn draw(seed: u64) -> Self {
        match seed % 4 {
            2 | 3 => Self::draw_regions(seed),
            _ => Self::draw_calls(seed),
        }
    }

    fn run(&self) -> Outcome {
        let plan = Rc::new(self.clone());
        run_in_virtual_time(self.fleet.seed, async move {
            let max_replicas = plan.max_replicas.map(|count| ("TOLLKEEPER_MAX_REPLICAS", count.to_string()));
            let replicas = ("TOLLKEEPER_REPLICAS", plan.fleet.replicas.to_string());
            let replicas = Some(replicas).filter(|_| plan.is_replica_count_given());
            let variables: Vec<_> = max_replicas.into_iter().chain(replicas).collect();
            let environment: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let fleet = Fleet::start(&plan.fleet, &environment, plan.rule_file());
            let watch = ChargeWatch::new(&plan.rules, &fleet.trace);
            // Regions have scripts of their own.
            if plan.fleet.regions == 1 {
                fleet.servers.iter().for_each(|server| server.watch_charges(&watch));
            }
            let limits = RefCell::new(plan.rules.iter().map(|rule| rule.limit).collect());
            let (report, unanswered) = (RefCell::default(), RefCell::default());
            Rc::new(World { plan, fleet, watch, limits, report, unanswered, next_call: Cell::new(0) }).play().await
        })
    }

    fn faults_mut(&mut self) -> &mut Vec<TimedFault> {
        &mut self.faults
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fleet, calls, duration_ms, arrivals, max_replicas, .. } = self;
        writeln!(f, "{fleet:?}, {calls} calls in {duration_ms} ms, {arrivals:?}, {max_replicas:?} shares")?;
        f.write_str(&self.rule_file())
    }
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

/// A fleet, its plan, and what was told.
struct World {
    plan: Rc<Plan>,
    fleet: Rc<Fleet>,
    watch: Rc<ChargeWatch>,
    /// Limits of the rules that are in force.
    limits: RefCell<Vec<u64>>,
    report: RefCell<Report>,
    /// Calls that were sent and not yet answered, by number: what they charge is not known.
    unanswered: RefCell<BTreeMap<u64, CallRecord>>,
    next_call: Cell<u64>,
}

impl World {
    async fn play(self: Rc<Self>) -> Outcome {
        let faults = self.plan.faults.clone();
        let tasks: Vec<JoinHandle<()>> = faults
            .into_iter()
            .map(|fault| spawn_local(Rc::clone(&self).let_happen(fault)))
            .chain([spawn_local(Rc::clone(&self).make_calls())])
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        sleep(Duration::from_millis(QUIET_MS)).await;
        let levels = self.read_levels().await;
        sleep(Duration::from_millis(END_MS)).await;
        let mut report = self.report.take();
        report.losses = self.fleet.losses.take();
        if self.plan.fleet.regions > 1 {
            (report.losses, report.shorter_us) = self.plan.losses_in_regions();
            // All clocks drift.
            report.shorter_us += self.plan.rules[0].period_s * 2000;
        }
        let jumps = |fault: &TimedFault| matches!(fault.fault, Fault::RedisClockJumps(_) | Fault::RedisFailsOver(_));
        report.has_steady_clocks = !self.plan.faults.iter().any(jumps);
        report.held_back_us = self.plan.held_back_us();
        report.local_shares = self.plan.local_shares();
        report.calls.extend(self.unanswered.take().into_values());
        let mut breaches = find_breaches(&self.plan.rules, self.plan.fleet.replicas as u64, &report);
        breaches.extend(levels.iter().filter_map(|level| level.find_breach(&self.plan.rules, &report)));
        breaches.extend(self.watch.take_breaches());
        breaches.extend(self.find_late_recovery(&report));
        breaches.extend(self.find_untold_failures(&report));
        self.count_paths();
        breaches.extend(self.fleet.stop().await);
        let trace = &self.fleet.trace;
        Outcome { breaches, hash: trace.hash(), counts: trace.counts(), calls: report.calls.len() }
    }

    /// Calls that fail although the last fault ended long enough ago.
    fn find_late_recovery(&self, report: &Report) -> Option<String> {
        let end_ms = self.plan.faults.iter().map(TimedFault::end_ms).max().unwrap_or(0);
        let recovered_ms = (end_ms + RECOVERY_MS).max(SETTLE_MS);
        let is_late = |call: &&CallRecord| {
            call.verdict == Verdict::Failed && call.sent_ms > recovered_ms && call.deadline_ms >= 50
        };
        let late = report.calls.iter().find(is_late)?;
        Some(format!("no decision {} ms after the last fault: {late:?}", late.sent_ms - end_ms))
    }

    /// Time of the servers that count, in microseconds.
    fn time_of_counters(&self) -> u64 {
        self.fleet.clock_of_counters().now().as_micros()
    }

    /// Reads how many hits each strict counter has left, from the first replica that runs.
    async fn read_levels(&self) -> Vec<CounterLevel> {
        let mut levels = Vec::new();
        let Some(replica) = self.fleet.running_replicas().into_iter().next() else { return levels };
        for (rule, plan) in self.plan.rules.iter().enumerate() {
            for value in 0..plan.values {
                let mut request = request_of(rule, value);
                request.0.descriptors[0].hits_addend = Some(0);
                let redis_before_us = self.time_of_counters();
                let answer = replica.decide(&request, Duration::from_secs(1)).await;
                let status = answer.ok().and_then(|response| response.statuses.into_iter().next());
                let Some(status) = status.filter(|status| status.current_limit.is_some()) else { continue };
                self.fleet.trace.count("counters were compared with their callers");
                levels.push(CounterLevel {
                    rule,
                    value,
                    remaining: status.limit_remaining.into(),
                    limit: self.limits.borrow()[rule],
                    redis_before_us,
                    redis_after_us: self.time_of_counters(),
                });
            }
        }
        levels
    }

    /// Counts the ways that decisions took, for those replicas that run at the end.
    fn count_paths(&self) {
        let trace = &self.fleet.trace;
        for replica in self.fleet.running_replicas() {
            let Some(shared) = replica.service.decider.store.stats().shared else { continue };
            trace.count_many("calls were shared by charges", shared.charges.saturating_sub(shared.calls));
            trace.count_many("rejections came from the cache", shared.rejected_locally);
            trace.count_many("charges were abandoned", shared.abandoned);
            if let Some(eventual) = shared.eventual {
                trace.count_many("hits came from leases", eventual.hits.from_leases);
                trace.count_many("hits came from shares", eventual.hits.from_shares);
            }
            if let Some(regions) = shared.regions {
                trace.count_many("hits were granted to regions", regions.grants.granted);
                trace.count_many("hits went back to the global redis", regions.grants.returned);
                trace.count_many("grants were wasted", regions.grants.wasted);
                trace.count_many("requests to the global redis failed", regions.grants.failed);
            }
        }
        for server in &self.fleet.servers {
            let server = server.server.borrow();
            let unknown_scripts = server.statistics().errors_with_code("NOSCRIPT");
            trace.count_many("scripts were sent again", unknown_scripts);
        }
    }

    /// Failed decisions that no replica counts, and failures that none told a caller. Killed replicas count no more.
    fn find_untold_failures(&self, report: &Report) -> Option<String> {
        let ended = |fault: &TimedFault| matches!(fault.fault, Fault::ReplicaIsKilled(_) | Fault::ReplicaStops(_));
        if self.plan.faults.iter().any(ended) {
            return None;
        }
        let failed = report.calls.iter().filter(|call| call.verdict == Verdict::Failed).count() as u64;
        let replicas = self.fleet.running_replicas();
        let counted =
            |replica: &Rc<Replica>| replica.service.decider.policy_decided_charge_count(StoreFailurePolicy::Error);
        let counted: u64 = replicas.iter().map(counted).sum();
        (failed != counted).then(|| format!("{failed} decisions failed, and replicas count {counted}"))
    }

    async fn make_calls(self: Rc<Self>) {
        let mut chance = Chance::new(self.plan.fleet.seed ^ 3);
        let mut times: Vec<u64> = (0..self.plan.calls)
            .map(|_| match self.plan.arrivals {
                Arrivals::Even => SETTLE_MS + chance.below(self.plan.duration_ms),
                Arrivals::Bursts => SETTLE_MS + chance.below(self.plan.duration_ms / 1000) * 1000 + chance.below(100),
            })
            .collect();
        times.sort_unstable();
        for at_ms in times {
            self.fleet.wait_until(at_ms).await;
            let rule = chance.place(self.plan.rules.len());
            // A few values get most calls.
            let value = chance.below(self.plan.rules[rule].values).min(chance.below(self.plan.rules[rule].values));
            let hits = match chance.below(20) {
                0 => 0,
                1 => chance.between(2, 5),
                _ => 1,
            };
            let deadline_ms = chance.pick(&[20, 50, 200, 1000]);
            let index = chance.place(self.plan.fleet.replicas);
            if let Some(replica) = self.fleet.replica(index) {
                let plan = CallPlan { rule, value, hits, deadline_ms };
                replica.spawn_call(Rc::clone(&self).call(Rc::clone(&replica), plan));
            }
        }
    }

    async fn call(self: Rc<Self>, replica: Rc<Replica>, plan: CallPlan) {
        let CallPlan { rule, value, hits, deadline_ms } = plan;
        let mut request = request_of(rule, value);
        request.0.descriptors[0].hits_addend = Some(hits);
        let (sent_ms, redis_sent_us) = (self.fleet.now_ms(), self.time_of_counters());
        let number = self.next_call.replace(self.next_call.get() + 1);
        let (answered_ms, redis_answered_us, verdict) = (u64::MAX, u64::MAX, Verdict::Failed);
        let unanswered = CallRecord {
            rule,
            value,
            hits,
            deadline_ms,
            sent_ms,
            answered_ms,
            redis_sent_us,
            redis_answered_us,
            verdict,
        };
        self.unanswered.borrow_mut().insert(number, unanswered);
        let answer = replica.decide(&request, Duration::from_millis(deadline_ms)).await;
        let shown = answer.as_ref().ok().and_then(|response| response.statuses.first()?.current_limit.as_ref());
        if shown.is_some_and(|limit| limit.name == "credits") {
            self.fleet.trace.count("credits were used or next to be");
        }
        let verdict = match answer {
            Ok(response) if response.overall_code() == Code::OverLimit => Verdict::OverLimit,
            Ok(_) => Verdict::Ok,
            Err(_) => Verdict::Failed,
        };
        self.unanswered.borrow_mut().remove(&number);
        let (answered_ms, redis_answered_us) = (self.fleet.now_ms(), self.time_of_counters());
        let call = CallRecord { answered_ms, redis_answered_us, verdict, ..unanswered };
        self.fleet.trace.record(|| format!("{}: {call:?}", replica.host));
        self.fleet.trace.count(match verdict {
            Verdict::Ok => "admitted",
            Verdict::OverLimit => "rejected",
            Verdict::Failed => "failed",
        });
        self.report.borrow_mut().calls.push(call);
    }

    async fn let_happen(self: Rc<Self>, timed: TimedFault) {
        match timed.fault {
            Fault::LimitChanges(rule, limit) => {
                self.fleet.wait_until(timed.at_ms).await;
                self.change_limit(rule, limit);
            }
            Fault::CountersAreReset(rule) => {
                self.fleet.wait_until(timed.at_ms).await;
                self.reset_counters(rule).await;
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

    /// Resets all values of a rule, as `/reset` does at one replica.
    async fn reset_counters(&self, rule: usize) {
        let Some(replica) = self.fleet.running_replicas().into_iter().next() else { return };
        let from_ms = self.fleet.now_ms();
        for value in 0..self.plan.rules[rule].values {
            replica.reset(&request_of(rule, value)).await;
        }
        self.fleet.record_loss(from_ms, Some(rule));
        self.fleet.trace.count("counters were reset");
    }
}

fn request_of(rule: usize, value: u64) -> TestRequest {
    TestRequest::new("world").descriptor(&[(&format!("rule{rule}"), &format!("value{value}"))])
}
