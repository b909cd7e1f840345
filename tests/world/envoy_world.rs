//! A fleet with its Envoys: what they are, what happens to them, and checks that all kinds of their streams share.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use kit::seeded_random::Chance;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{interval, sleep};

use super::envoy::{Attempt, Envoy, EnvoyPlan, Journal, Outcome, StreamPlan};
use super::fleet::{Fleet, FleetPlan};
use super::plan::{Fault, RECOVERY_MS, TimedFault, draw_fault};

/// Time for which a call to Redis may be on its way, and releases are repeated and remembered, in milliseconds.
pub const LATE_MS: u64 = 15_000;
/// Interval in which a replica sweeps one part of its memory, and number of parts: as often as a server does all.
const SWEEP_INTERVAL: Duration = Duration::from_millis(500);
const SWEEP_PARTS: usize = 8;

/// A limit that an operator set.
#[derive(Clone, Copy, Debug)]
pub struct LimitInForce {
    /// Index of the rule.
    pub rule: usize,
    /// Time of the run, in milliseconds.
    pub from_ms: u64,
    /// The limit.
    pub limit: u64,
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

impl EnvoysPlan {
    /// Limits that operators set, in the order of time.
    pub fn limit_changes(&self) -> Vec<LimitInForce> {
        let change = |fault: &TimedFault| match fault.fault {
            Fault::LimitChanges(rule, limit) => Some(LimitInForce { rule, from_ms: fault.at_ms, limit }),
            _ => None,
        };
        let mut changes: Vec<LimitInForce> = self.faults.iter().filter_map(change).collect();
        changes.sort_by_key(|change| change.from_ms);
        changes
    }

    /// Limits that are in force from a time on, if the first ones are these.
    pub fn limits_at(&self, first: &[u64], at_ms: u64) -> Vec<u64> {
        let mut limits = first.to_vec();
        let changes = self.limit_changes().into_iter().filter(|change| change.from_ms <= at_ms);
        changes.for_each(|change| limits[change.rule] = change.limit);
        limits
    }

    /// Smallest and largest limit of a rule that was in force in a span, if the first one is this.
    pub fn limits_in_force(&self, rule: usize, first: u64, from_ms: u64, until_ms: u64) -> (u64, u64) {
        let (mut current, mut in_force) = (first, Vec::new());
        for change in self.limit_changes().iter().filter(|change| change.rule == rule && change.from_ms <= until_ms) {
            if change.from_ms >= from_ms {
                in_force.push(current);
            }
            current = change.limit;
        }
        let others = || in_force.iter().copied().chain([current]);
        (others().min().unwrap_or(current), others().max().unwrap_or(current))
    }

    /// Returns true if something failed in a span, or had not yet recovered.
    pub fn is_disturbed(&self, from_ms: u64, until_ms: u64) -> bool {
        self.faults.iter().any(|fault| fault.at_ms <= until_ms && from_ms <= fault.end_ms() + RECOVERY_MS)
    }

    /// Time by which the clock of Redis is set back, in milliseconds.
    pub fn time_set_back_ms(&self) -> u64 {
        let back = |fault: &TimedFault| match fault.fault {
            Fault::RedisClockJumps(by_ms) if by_ms < 0 => by_ms.unsigned_abs(),
            _ => 0,
        };
        self.faults.iter().map(back).sum()
    }

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
            names_streams: !chance.one_in(8),
        };
        let (envoys, duration_ms) = (usize::try_from(chance.between(1, 3)).unwrap(), chance.between(8000, 25_000));
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
        let streams = chance.between(50, 250);
        Self { envoy, envoys, streams, duration_ms, holder_timeout, faults }
    }
}

fn draw_envoy_fault(chance: &mut Chance, envoys: usize, replicas: usize, duration_ms: u64) -> TimedFault {
    let envoy = chance.place(envoys);
    let fault = match chance.below(5) {
        0..2 => Fault::ProxyIsKilled(envoy, !chance.one_in(4)),
        2 => Fault::ProxyStandsStill(envoy),
        3 => Fault::ProxyIsCutOff(envoy, None),
        _ => Fault::ProxyIsCutOff(envoy, Some(chance.place(replicas))),
    };
    let for_ms = chance.pick(&[50, 1000, 4000, 12_000]);
    TimedFault { at_ms: chance.between(1500, duration_ms), for_ms, server: 0, fault }
}

impl fmt::Display for EnvoysPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { envoy, envoys, streams, duration_ms, holder_timeout: (timeout, _), .. } = self;
        write!(f, "{envoys} envoys, {envoy:?}, {streams} streams in {duration_ms} ms, holder timeout {timeout}")
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

    /// Begins tasks that let all faults happen. The first limits of the rules are these; `rule_file` writes the rules with
    /// others.
    pub fn let_faults_happen(
        self: &Rc<Self>,
        limits: &[u64],
        rule_file: impl Fn(&[u64]) -> String + 'static,
    ) -> Vec<JoinHandle<()>> {
        let rule_file = Rc::new(rule_file);
        let faults = self.plan.faults.iter().map(|fault| spawn_local(Rc::clone(self).let_happen(*fault)));
        let changes = self.plan.limit_changes().into_iter().map(|change| {
            let (world, rule_file) = (Rc::clone(self), Rc::clone(&rule_file));
            let limits = self.plan.limits_at(limits, change.from_ms);
            spawn_local(async move {
                world.fleet.wait_until(change.from_ms).await;
                world.fleet.trace.count("a limit changed");
                world.fleet.load_rules(rule_file(&limits));
            })
        });
        faults.chain(changes).collect()
    }

    async fn let_happen(self: Rc<Self>, timed: TimedFault) {
        let for_ms = Duration::from_millis(timed.for_ms);
        let (index, what) = match timed.fault {
            Fault::ProxyIsKilled(index, _) => (index, "a proxy was killed"),
            Fault::ProxyStandsStill(index) => (index, "a proxy stood still"),
            Fault::ProxyIsCutOff(index, None) => (index, "a proxy was cut off"),
            Fault::ProxyIsCutOff(index, Some(_)) => (index, "a proxy was cut off from a replica"),
            _ => return Rc::clone(&self.fleet).let_happen(timed).await,
        };
        self.fleet.wait_until(timed.at_ms).await;
        let Some(envoy) = self.envoys.borrow()[index].clone() else { return };
        self.fleet.trace.record(|| timed.to_string());
        self.fleet.trace.count(what);
        match timed.fault {
            Fault::ProxyIsKilled(_, has_new_name) => {
                self.envoys.borrow_mut()[index] = None;
                envoy.kill();
                sleep(for_ms).await;
                let number = self.journal.borrow().envoys.len();
                let name = if has_new_name { format!("envoy{index}/{number}") } else { envoy.name().to_owned() };
                let new = Envoy::start(self.plan.envoy, name, &self.fleet, &self.journal);
                self.envoys.borrow_mut()[index] = Some(new);
            }
            Fault::ProxyStandsStill(_) => {
                envoy.set_frozen(true);
                sleep(for_ms).await;
                envoy.set_frozen(false);
            }
            Fault::ProxyIsCutOff(_, replica) => {
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

/// Checks of any kind of streams.
impl EnvoyWorld {
    /// Returns failures of calls when nothing else failed.
    pub fn find_failures(&self) -> Vec<String> {
        let journal = self.journal.borrow();
        let failed = journal.attempts.iter().filter(|one| one.outcome == Outcome::Failed);
        let late = failed.filter_map(|one| self.find_late_recovery(one));
        let lost = journal.attempts.iter().filter_map(|one| {
            let sent_ms = one.release_sent?.at_ms;
            let is_alive = journal.envoys[one.envoy].killed_ms.is_none();
            let is_lost = one.released.is_none() && is_alive && !self.plan.is_disturbed(sent_ms, sent_ms + LATE_MS);
            is_lost.then(|| format!("its release failed although nothing else did: {one:?}"))
        });
        late.chain(lost).collect()
    }

    /// Returns keys of limits that are left in Redis.
    pub fn find_keys(&self) -> Vec<String> {
        let redis = &self.fleet.servers[0];
        let (now_us, server) = (redis.clock.now().as_micros(), redis.server.borrow());
        let keys = server.live_keys(now_us).into_iter().map(|(name, _)| name.escape_ascii().to_string());
        keys.filter(|name| name.contains("rule")).map(|name| format!("{name} is left in redis")).collect()
    }

    /// A request without an answer although nothing has failed for long enough.
    fn find_late_recovery(&self, failed: &Attempt) -> Option<String> {
        let is_patient = self.plan.envoy.acquire_timeout_ms >= 250;
        let is_late = is_patient && !self.plan.is_disturbed(failed.sent.at_ms, u64::MAX);
        is_late.then(|| format!("no answer although nothing has failed for {RECOVERY_MS} ms: {failed:?}"))
    }
}
