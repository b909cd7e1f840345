//! A run of streams under concurrent limits: Envoys that take slots and release them, and die.

mod judge;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use kit::seeded_random::Chance;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{interval, sleep};

use super::envoy::{Envoy, EnvoyPlan, Journal, StreamPlan};
use super::fleet::{Fleet, FleetPlan, run_in_virtual_time};
use super::plan::{Fault, StoreErrorPolicy, TimedFault, draw_fault};
use super::simulation::{Outcome, Simulation};
use judge::{Judge, LimitInForce};

/// Time before the first stream, in milliseconds.
const SETTLE_MS: u64 = 500;
/// Time for which a release is remembered, and repeated, with a second more, in milliseconds.
const REMEMBERED_MS: u64 = 16_000;
/// Interval in which a replica sweeps one part of its memory, and number of parts: as often as a server does all.
const SWEEP_INTERVAL: Duration = Duration::from_millis(500);
const SWEEP_PARTS: usize = 8;

/// A concurrent limit on each value of a key.
#[derive(Clone, Copy, Debug)]
pub struct StreamRule {
    /// Seats.
    pub limit: u64,
    /// Time after which a slot ends, in seconds.
    pub max_duration_s: u64,
    /// What decides while Redis fails.
    pub on_store_error: StoreErrorPolicy,
    /// Number of values.
    pub values: u64,
}

/// Envoys of a run, and what happens to them.
#[derive(Clone, Debug)]
pub struct EnvoysPlan {
    /// How they are configured.
    pub envoy: EnvoyPlan,
    /// Number of Envoys.
    pub envoys: usize,
    /// Number of streams.
    pub streams: u64,
    /// Time in which they begin, in milliseconds.
    pub duration_ms: u64,
    /// Text of `TOLLKEEPER_HOLDER_TIMEOUT`, in seconds.
    pub holder_timeout: (&'static str, u64),
    /// What goes wrong.
    pub faults: Vec<TimedFault>,
}

/// A run.
#[derive(Clone, Debug)]
pub struct StreamsRun {
    fleet: FleetPlan,
    rules: Vec<StreamRule>,
    plan: EnvoysPlan,
}

impl EnvoysPlan {
    /// Draws Envoys and faults.
    pub fn draw(chance: &mut Chance, replicas: usize, limits: &[u64]) -> Self {
        let holder_timeout = chance.pick(&[("3s", 3), ("6s", 6), ("10s", 10), ("30s", 30)]);
        // One in six Envoys sends none; others three to six in the timeout; some two that are too far apart.
        let check_interval_ms = match chance.below(6) {
            0 => None,
            1 => Some(holder_timeout.1 * 1250),
            _ => Some(holder_timeout.1 * 1000 / chance.between(3, 6)),
        };
        let envoy = EnvoyPlan {
            max_latency_ms: chance.pick(&[1, 5, 30]),
            acquire_timeout_ms: chance.pick(&[20, 100, 250, 1000]),
            check_interval_ms,
            fails_open: chance.one_in(5),
        };
        let (envoys, duration_ms) = (usize::try_from(chance.between(1, 3)).unwrap(), chance.between(8000, 30_000));
        let count = if chance.one_in(6) { 0 } else { chance.between(1, 5) };
        let faults = (0..count)
            .map(|_| match chance.below(10) {
                0 => {
                    let rule = chance.place(limits.len());
                    let fault = Fault::LimitChanges(rule, chance.between(1, 2 * limits[rule]));
                    TimedFault { at_ms: chance.between(1500, duration_ms), for_ms: 0, server: 0, fault }
                }
                1..5 => draw_envoy_fault(chance, envoys, replicas, duration_ms),
                _ => {
                    let mut fault = draw_fault(chance, replicas, duration_ms);
                    if fault.for_ms >= 1000 && chance.one_in(2) {
                        fault.for_ms = chance.pick(&[4000, 8000]);
                    }
                    fault
                }
            })
            .collect();
        let streams = chance.between(50, 350);
        Self { envoy, envoys, streams, duration_ms, holder_timeout, faults }
    }
}

fn draw_envoy_fault(chance: &mut Chance, envoys: usize, replicas: usize, duration_ms: u64) -> TimedFault {
    let envoy = chance.place(envoys);
    let fault = match chance.below(5) {
        0..2 => Fault::EnvoyIsKilled(envoy, !chance.one_in(4)),
        2 => Fault::EnvoyIsFrozen(envoy),
        3 => Fault::EnvoyIsCutOff(envoy, None),
        _ => Fault::EnvoyIsCutOff(envoy, Some(chance.place(replicas))),
    };
    let for_ms = chance.pick(&[50, 1000, 4000, 12_000]);
    TimedFault { at_ms: chance.between(1500, duration_ms), for_ms, server: 0, fault }
}

impl Simulation for StreamsRun {
    fn draw(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let fleet = FleetPlan::draw(seed, &mut chance);
        let on_store_error = chance.pick(&[
            StoreErrorPolicy::Error,
            StoreErrorPolicy::Error,
            StoreErrorPolicy::Error,
            StoreErrorPolicy::Deny,
            StoreErrorPolicy::Local,
        ]);
        let rule = |chance: &mut Chance| StreamRule {
            limit: chance.pick(&[1, 2, 3, 8, 20]),
            max_duration_s: chance.pick(&[10, 30]),
            on_store_error,
            values: chance.pick(&[1, 1, 3]),
        };
        let rules: Vec<StreamRule> = (0..chance.between(1, 2)).map(|_| rule(&mut chance)).collect();
        let limits: Vec<u64> = rules.iter().map(|rule| rule.limit).collect();
        let plan = EnvoysPlan::draw(&mut chance, fleet.replicas, &limits);
        Self { fleet, rules, plan }
    }

    fn run(&self) -> Outcome {
        let run = self.clone();
        run_in_virtual_time(self.fleet.seed, async move {
            let limits: Vec<u64> = run.rules.iter().map(|rule| rule.limit).collect();
            let world = EnvoyWorld::start(&run.fleet, &run.plan, rule_file(&run.rules, &limits));
            run.play(&world, limits).await
        })
    }

    fn faults(&self) -> &[TimedFault] {
        &self.plan.faults
    }

    fn without_fault(&self, index: usize) -> Self {
        let mut run = self.clone();
        run.plan.faults.remove(index);
        run
    }
}

impl fmt::Display for StreamsRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EnvoysPlan { envoy, envoys, streams, duration_ms, holder_timeout: (timeout, _), .. } = &self.plan;
        writeln!(f, "{:?}, {envoys} envoys, {envoy:?}, {streams} streams in {duration_ms} ms, {timeout}", self.fleet)?;
        let limits: Vec<u64> = self.rules.iter().map(|rule| rule.limit).collect();
        f.write_str(&rule_file(&self.rules, &limits))
    }
}

fn rule_file(rules: &[StreamRule], limits: &[u64]) -> String {
    let mut text = "domain: world\ndescriptors:\n".to_owned();
    for (index, (rule, limit)) in rules.iter().zip(limits).enumerate() {
        text += &format!(
            "  - key: rule{index}\n    rate_limit: {{ concurrent: {limit}, max_duration: {}s, on_store_error: {} }}\n",
            rule.max_duration_s,
            rule.on_store_error.name(),
        );
    }
    text
}

impl StreamsRun {
    async fn play(&self, world: &Rc<EnvoyWorld>, limits: Vec<u64>) -> Outcome {
        let in_force = Rc::new(RefCell::new(Vec::new()));
        let mut tasks = world.let_faults_happen();
        for fault in self.plan.faults.clone() {
            if let Fault::LimitChanges(rule, limit) = fault.fault {
                let (run, world, in_force) = (self.clone(), Rc::clone(world), Rc::clone(&in_force));
                tasks.push(spawn_local(async move {
                    world.fleet.wait_until(fault.at_ms).await;
                    world.fleet.trace.count("a limit changed");
                    in_force.borrow_mut().push(LimitInForce { rule, from_ms: fault.at_ms, limit });
                    let mut limits: Vec<u64> = run.rules.iter().map(|rule| rule.limit).collect();
                    in_force.borrow().iter().for_each(|change| limits[change.rule] = change.limit);
                    world.fleet.load_rules(rule_file(&run.rules, &limits));
                }));
            }
        }
        self.make_streams(world).await;
        for task in tasks {
            task.await.unwrap();
        }
        // Releases end, but streams that began late go on.
        sleep(Duration::from_millis(REMEMBERED_MS)).await;
        let mut breaches = self.judge(world, &in_force).find_wrong_counters();
        // All streams end, and slots that were never released.
        let longest_s = self.rules.iter().map(|rule| rule.max_duration_s).max().unwrap_or(0);
        sleep(Duration::from_millis(longest_s * 1000 + self.time_set_back_ms())).await;
        let mut last_limits = limits;
        in_force.borrow().iter().for_each(|change| last_limits[change.rule] = change.limit);
        self.fill_all_limits(world, &last_limits).await;
        sleep(Duration::from_millis(REMEMBERED_MS)).await;
        let judge = self.judge(world, &in_force);
        breaches.extend(judge.find_breaches());
        breaches.extend(judge.find_slots_of_replicas());
        drop(judge);
        breaches.extend(world.stop().await);
        // A hash with releases that are remembered lives for as long as its slots might.
        world.fleet.servers[0].clock.jump(i64::try_from(longest_s * 2_000_000).unwrap());
        breaches.extend(self.judge(world, &in_force).find_keys());
        let (trace, calls) = (&world.fleet.trace, world.journal.borrow().attempts.len());
        Outcome { breaches, hash: trace.hash(), counts: trace.counts(), calls }
    }

    fn judge<'w>(&'w self, world: &'w EnvoyWorld, changes: &Rc<RefCell<Vec<LimitInForce>>>) -> Judge<'w> {
        Judge {
            rules: &self.rules,
            plan: &self.plan,
            fleet: &world.fleet,
            journal: world.journal.borrow(),
            changes: changes.borrow().clone(),
            set_back_ms: self.time_set_back_ms(),
        }
    }

    /// Time by which the clock of Redis is set back, in milliseconds.
    fn time_set_back_ms(&self) -> u64 {
        let back = |fault: &TimedFault| match fault.fault {
            Fault::RedisClockJumps(by_ms) if by_ms < 0 => by_ms.unsigned_abs(),
            _ => 0,
        };
        self.plan.faults.iter().map(back).sum()
    }

    async fn make_streams(&self, world: &Rc<EnvoyWorld>) {
        let mut chance = Chance::new(self.fleet.seed ^ 4);
        let mut times: Vec<u64> =
            (0..self.plan.streams).map(|_| SETTLE_MS + chance.below(self.plan.duration_ms)).collect();
        times.sort_unstable();
        for at_ms in times {
            let rule = chance.place(self.rules.len());
            let mut counters = vec![(rule, chance.below(self.rules[rule].values))];
            if self.rules.len() > 1 && chance.one_in(4) {
                let other = (rule + 1) % self.rules.len();
                counters.push((other, chance.below(self.rules[other].values)));
            }
            let longest_ms = counters.iter().map(|(rule, _)| self.rules[*rule].max_duration_s).min().unwrap() * 1000;
            let ends_after_ms = match chance.below(8) {
                0..3 => chance.below(40),
                3..6 => chance.between(100, 3000),
                6 => chance.between(3000, 8000),
                // Shorter than `max_duration` by more than a call takes.
                _ => chance.between(longest_ms / 2, longest_ms - 2000),
            };
            let hits = if chance.one_in(6) { chance.between(2, 3) } else { 1 };
            world.fleet.wait_until(at_ms).await;
            world.begin_stream(chance.next(), StreamPlan {
                counters,
                hits,
                cost: chance.below(3),
                ends_after_ms,
                is_redirected: chance.one_in(10),
                release_delay_ms: if chance.one_in(10) { chance.between(100, 4000) } else { chance.below(10) },
                release_again_after_ms: chance.one_in(15).then(|| chance.below(2000)),
            });
        }
    }

    /// Begins as many streams as each limit admits, and one more.
    async fn fill_all_limits(&self, world: &Rc<EnvoyWorld>, limits: &[u64]) {
        for (rule, limit) in limits.iter().enumerate() {
            for value in 0..self.rules[rule].values {
                for index in 0..=*limit {
                    let counters = vec![(rule, value)];
                    world.begin_stream(index, StreamPlan {
                        counters,
                        hits: 1,
                        cost: 0,
                        ends_after_ms: 5000,
                        is_redirected: false,
                        release_delay_ms: 0,
                        release_again_after_ms: None,
                    });
                }
            }
        }
        sleep(Duration::from_millis(5000)).await;
    }
}

/// A fleet and its Envoys.
#[derive(Debug)]
pub struct EnvoyWorld {
    /// The hosts.
    pub fleet: Rc<Fleet>,
    /// What the Envoys did.
    pub journal: Rc<RefCell<Journal>>,
    plan: EnvoysPlan,
    /// Processes of Envoys; `None`: it does not run.
    envoys: RefCell<Vec<Option<Rc<Envoy>>>>,
    has_ended: Cell<bool>,
}

impl EnvoyWorld {
    /// Starts all hosts and Envoys. Must be called within a `LocalSet`.
    pub fn start(fleet: &FleetPlan, plan: &EnvoysPlan, rules: String) -> Rc<Self> {
        let environment = [("TOLLKEEPER_HOLDER_TIMEOUT", plan.holder_timeout.0)];
        let (fleet, journal) = (Fleet::start(fleet, &environment, rules), Rc::new(RefCell::default()));
        let start = |index: usize| Some(Envoy::start(plan.envoy, format!("envoy{index}/0"), &fleet, &journal));
        let envoys = RefCell::new((0..plan.envoys).map(start).collect());
        let world = Rc::new(Self { envoys, plan: plan.clone(), fleet, journal, has_ended: Cell::new(false) });
        spawn_local(Rc::clone(&world).sweep_replicas());
        world
    }

    async fn sweep_replicas(self: Rc<Self>) {
        let mut ticks = interval(SWEEP_INTERVAL);
        for part in (0..SWEEP_PARTS).cycle() {
            ticks.tick().await;
            if self.has_ended.get() {
                return;
            }
            self.fleet.running_replicas().iter().for_each(|replica| replica.sweep(part, SWEEP_PARTS));
        }
    }

    /// Begins a stream at one of the Envoys that run.
    pub fn begin_stream(&self, choice: u64, stream: StreamPlan) {
        let envoys = self.envoys.borrow();
        if let Some(envoy) = &envoys[usize::try_from(choice % envoys.len() as u64).unwrap()] {
            envoy.begin_stream(stream);
        }
    }

    /// Begins tasks that let all faults happen but those of rules.
    pub fn let_faults_happen(self: &Rc<Self>) -> Vec<JoinHandle<()>> {
        self.plan.faults.iter().map(|fault| spawn_local(Rc::clone(self).let_happen(*fault))).collect()
    }

    async fn let_happen(self: Rc<Self>, timed: TimedFault) {
        let for_ms = Duration::from_millis(timed.for_ms);
        let (index, what) = match timed.fault {
            Fault::EnvoyIsKilled(index, _) => (index, "an envoy was killed"),
            Fault::EnvoyIsFrozen(index) => (index, "an envoy was frozen"),
            Fault::EnvoyIsCutOff(index, None) => (index, "an envoy was cut off"),
            Fault::EnvoyIsCutOff(index, Some(_)) => (index, "an envoy was cut off from a replica"),
            _ => return Rc::clone(&self.fleet).let_happen(timed).await,
        };
        self.fleet.wait_until(timed.at_ms).await;
        let Some(envoy) = self.envoys.borrow()[index].clone() else { return };
        self.fleet.trace.record(|| timed.to_string());
        self.fleet.trace.count(what);
        match timed.fault {
            Fault::EnvoyIsKilled(_, has_new_name) => {
                self.envoys.borrow_mut()[index] = None;
                envoy.kill();
                sleep(for_ms).await;
                let number = self.journal.borrow().envoys.len();
                let name = if has_new_name { format!("envoy{index}/{number}") } else { envoy.name().to_owned() };
                let new = Envoy::start(self.plan.envoy, name, &self.fleet, &self.journal);
                self.envoys.borrow_mut()[index] = Some(new);
            }
            Fault::EnvoyIsFrozen(_) => {
                envoy.set_frozen(true);
                sleep(for_ms).await;
                envoy.set_frozen(false);
            }
            Fault::EnvoyIsCutOff(_, replica) => {
                envoy.set_cut_off(replica, true);
                sleep(for_ms).await;
                envoy.set_cut_off(replica, false);
            }
            _ => {}
        }
    }

    /// Stops all; says what is left.
    pub async fn stop(&self) -> Option<String> {
        self.has_ended.set(true);
        self.envoys.take().iter().flatten().for_each(|envoy| envoy.kill());
        self.fleet.stop().await
    }
}
