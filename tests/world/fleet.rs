//! The hosts of a run: Redis, the replicas with their clocks, and the links between them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kit::seeded_random::Chance;
use tokio::runtime::{Builder, Handle};
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep, sleep_until};
use tollkeeper::base::clock::Time;
use tollkeeper::base::random::seed_this_thread;

use super::clock::HostClock;
use super::judge::Loss;
use super::network::{Link, LinkName, Links};
use super::replica::Replica;
use super::server::RedisHost;
use super::trace::Trace;

/// Name of the region at an index.
pub fn region_name(index: usize) -> String {
    format!("region{index}")
}

/// Time that all clocks show at the start: 2026-01-01, and up to an hour more.
const START_S: u64 = 1_767_225_600;
/// Largest offset of a replica's clock at the start, in microseconds.
const MAX_CLOCK_OFFSET_US: i64 = 10_000_000;
/// Time in which all tasks of a replica that has ended must end.
const TASKS_END: Duration = Duration::from_secs(5);

/// What a fleet is made of.
#[derive(Clone, Debug)]
pub struct FleetPlan {
    /// Seed of clocks and links.
    pub seed: u64,
    /// Number of replicas.
    pub replicas: usize,
    /// Number of regions, each with a Redis, beside which there is a global one; 1: a single Redis. Replicas are in the
    /// regions by turns.
    pub regions: usize,
    /// Time that bytes take to the global Redis, in milliseconds.
    pub global_latency_ms: u64,
    /// Links between replicas and Redis.
    pub link: Link,
    /// Largest drift of the clocks of Redis, in parts per million.
    pub redis_drift_ppm: i64,
}

/// All hosts.
#[derive(Debug)]
pub struct Fleet {
    /// Seed of the run.
    pub seed: u64,
    started: Instant,
    /// Links of all hosts.
    pub links: Arc<Links>,
    /// The Redis of each region, and the global one if there are several.
    pub servers: Vec<Rc<RedisHost>>,
    regions: usize,
    global_latency_ms: u64,
    /// Processes; `None`: the process does not run.
    pub replicas: RefCell<Vec<Option<Rc<Replica>>>>,
    /// Clocks of the hosts of the replicas.
    pub replica_clocks: Vec<Arc<HostClock>>,
    /// Processes that were started.
    starts: Cell<usize>,
    /// Variables of each replica beside the address of Redis.
    environment: Vec<(&'static str, String)>,
    /// Text of the rule file that a process loads at its start.
    pub rules: RefCell<String>,
    /// What made counters be lost, or set their clock.
    pub losses: RefCell<Vec<Loss>>,
    /// What happened.
    pub trace: Trace,
}

impl Fleet {
    /// Starts all hosts. Must be called within a `LocalSet`.
    pub fn start(plan: &FleetPlan, environment: &[(&'static str, &str)], rules: String) -> Rc<Self> {
        let mut chance = Chance::new(plan.seed ^ 1);
        let trace = Trace::new();
        let start = Time::from_micros((START_S * 1000 + chance.below(3_600_000)) * 1000);
        let links = Links::new(plan.link, plan.seed ^ 2);
        let global = (plan.regions > 1).then(|| "global:6379".to_owned());
        let addresses = (0..plan.regions).map(|index| format!("redis{index}:6379")).chain(global);
        let servers = addresses.enumerate().map(|(index, address)| {
            let drift_ppm = if index % 2 == 0 { plan.redis_drift_ppm } else { -plan.redis_drift_ppm };
            RedisHost::start(&address, HostClock::new(start, 0, drift_ppm), &links, &trace)
        });
        let servers = servers.collect();
        let mut offset_us = || i64::try_from(chance.below(2 * MAX_CLOCK_OFFSET_US.unsigned_abs())).unwrap();
        let replica_clocks =
            (0..plan.replicas).map(|_| HostClock::new(start, offset_us() - MAX_CLOCK_OFFSET_US, 0)).collect();
        let environment = environment.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        let fleet = Rc::new(Self {
            seed: plan.seed,
            started: Instant::now(),
            servers,
            regions: plan.regions,
            global_latency_ms: plan.global_latency_ms,
            links,
            replicas: RefCell::new(vec![None; plan.replicas]),
            replica_clocks,
            starts: Cell::new(0),
            environment,
            rules: RefCell::new(rules),
            losses: RefCell::default(),
            trace,
        });
        for index in 0..plan.replicas {
            fleet.start_replica(index);
        }
        fleet
    }

    /// Starts the process of a replica.
    pub fn start_replica(&self, index: usize) {
        let number = self.starts.replace(self.starts.get() + 1);
        let host = format!("replica{index}-{number}");
        let mut environment = self.environment.clone();
        let redis = self.redis_of(index).address.clone();
        environment.extend([("REDIS_SOCKET_TYPE", "tcp".to_owned()), ("REDIS_URL", redis)]);
        if self.regions > 1 {
            let link = (host.clone(), self.servers[self.regions].address.clone());
            self.links.change(&link, |link| link.latency_ms = self.global_latency_ms);
            let names: Vec<String> = (0..self.regions).map(region_name).collect();
            environment.extend([
                ("TOLLKEEPER_REGION", region_name(index % self.regions)),
                ("TOLLKEEPER_REGIONS", names.join(",")),
                ("TOLLKEEPER_GLOBAL_REDIS_URL", format!("redis://{}", self.servers[self.regions].address)),
            ]);
        }
        let (clock, rules) = (&self.replica_clocks[index], self.rules.borrow());
        let replica = Replica::start(&host, clock, &self.links, &environment, &rules);
        self.replicas.borrow_mut()[index] = Some(replica);
    }

    /// The process of a replica, if it runs.
    pub fn replica(&self, index: usize) -> Option<Rc<Replica>> {
        self.replicas.borrow()[index].clone()
    }

    /// The processes that run.
    pub fn running_replicas(&self) -> Vec<Rc<Replica>> {
        self.replicas.borrow().iter().flatten().cloned().collect()
    }

    /// The Redis that a replica counts in.
    pub fn redis_of(&self, replica: usize) -> &Rc<RedisHost> {
        &self.servers[replica % self.regions]
    }

    /// Link between a process and a Redis.
    pub fn link_of(&self, replica: usize, server: usize) -> Option<LinkName> {
        Some((self.replica(replica)?.host.clone(), self.servers[server].address.clone()))
    }

    /// Time since the start of the run, in milliseconds.
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap()
    }

    /// Waits until a time of the run.
    pub async fn wait_until(&self, at_ms: u64) {
        sleep_until(self.started + Duration::from_millis(at_ms)).await;
    }

    /// Gives all running processes these rules, and those that start later.
    pub fn load_rules(&self, rules: String) {
        for replica in self.running_replicas() {
            replica.load(&rules);
        }
        *self.rules.borrow_mut() = rules;
    }

    /// Records that counters were lost, or that their clock was set, from a time of the run until now.
    pub fn record_loss(&self, from_ms: u64, rule: Option<usize>) {
        self.losses.borrow_mut().push(Loss { from_ms, until_ms: self.now_ms(), rule });
    }

    /// Stops all replicas cleanly; says what is left of them.
    pub async fn stop(&self) -> Option<String> {
        for replica in self.replicas.take().into_iter().flatten() {
            replica.stop().await;
        }
        sleep(TASKS_END).await;
        let left = Handle::current().metrics().num_alive_tasks();
        (left > 0).then(|| format!("{left} tasks run after all replicas ended"))
    }
}

/// Runs a future of a seed in virtual time. All random numbers of the program follow from the seed.
pub fn run_in_virtual_time<T>(seed: u64, run: impl Future<Output = T>) -> T {
    seed_this_thread(Some(seed));
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let local = LocalSet::new();
    let outcome = local.block_on(&runtime, run);
    drop((local, runtime));
    seed_this_thread(None);
    outcome
}
