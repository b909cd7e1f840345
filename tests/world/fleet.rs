//! The hosts of a run: Redis, the replicas with their clocks, and the links between them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::time::Duration;

use kit::seeded_random::Chance;
use simulated_redis::cluster::{Address, HASH_SLOTS, SlotMap, SlotRange};
use simulated_redis::server::{Kind, Options, Role};
use tokio::runtime::{Builder, Handle};
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep, sleep_until};
use tollkeeper::base::clock::Time;
use tollkeeper::base::random::seed_this_thread;
use tollkeeper::limit::counter_path::CounterPath;

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

/// Redis of a fleet with one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deployment {
    /// One server.
    Single,
    /// A primary and a replica, which sentinels watch.
    Sentinel,
    /// A cluster of primaries that each have a replica.
    Cluster,
}

impl Deployment {
    /// Number of servers that count at a time.
    pub const fn shards(self) -> usize {
        if matches!(self, Self::Cluster) { CLUSTER_SHARDS } else { 1 }
    }
}

const CLUSTER_SHARDS: usize = 3;
const SENTINELS: usize = 3;
/// Name of the primary at the sentinels.
const PRIMARY_NAME: &str = "counters";

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
    /// Redis of a single region.
    pub deployment: Deployment,
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
    /// The Redis of each region, and the global one if there are several. Else the servers that count first, then a
    /// replica of each.
    pub servers: Vec<Rc<RedisHost>>,
    sentinels: Vec<Rc<RedisHost>>,
    deployment: Deployment,
    /// Index of the server that counts, by shard.
    primaries: RefCell<Vec<usize>>,
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
        let (servers, sentinels) = start_servers(plan, start, &links, &trace);
        let mut offset_us = || i64::try_from(chance.below(2 * MAX_CLOCK_OFFSET_US.unsigned_abs())).unwrap();
        let replica_clocks =
            (0..plan.replicas).map(|_| HostClock::new(start, offset_us() - MAX_CLOCK_OFFSET_US, 0)).collect();
        let environment = environment.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        let fleet = Rc::new(Self {
            seed: plan.seed,
            started: Instant::now(),
            servers,
            sentinels,
            deployment: plan.deployment,
            primaries: RefCell::new((0..plan.deployment.shards()).collect()),
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
        fleet.tell_primaries();
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
        let addresses = |servers: &[Rc<RedisHost>]| -> String {
            servers.iter().map(|server| server.address.as_str()).collect::<Vec<_>>().join(",")
        };
        let (kind, url) = match self.deployment {
            Deployment::Single => ("SINGLE", self.redis_of(index).address.clone()),
            Deployment::Sentinel => ("SENTINEL", format!("{PRIMARY_NAME},{}", addresses(&self.sentinels))),
            Deployment::Cluster => ("CLUSTER", addresses(&self.servers)),
        };
        environment.extend([("REDIS_SOCKET_TYPE", "tcp".to_owned()), ("REDIS_TYPE", kind.to_owned())]);
        environment.push(("REDIS_URL", url));
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

    /// Clock of the servers that count: those of a cluster share one.
    pub fn clock_of_counters(&self) -> Arc<HostClock> {
        match self.regions {
            1 => Arc::clone(&self.servers[self.primaries.borrow()[0]].clock),
            _ => Arc::clone(&self.servers[self.regions].clock),
        }
    }

    /// The server that counts for a shard, and its replica; `None` after a failover.
    pub fn primary_and_replica(&self, shard: usize) -> Option<(&Rc<RedisHost>, &Rc<RedisHost>)> {
        let primary = self.primaries.borrow()[shard];
        Some((&self.servers[primary], self.servers.get(primary + self.deployment.shards())?))
    }

    /// Makes the replica of a shard the server that counts for it.
    pub fn promote_replica(&self, shard: usize) {
        self.primaries.borrow_mut()[shard] += self.deployment.shards();
        self.tell_primaries();
    }

    /// Tells servers and sentinels which servers count.
    fn tell_primaries(&self) {
        if self.deployment == Deployment::Single {
            return;
        }
        let (primaries, shards) = (self.primaries.borrow(), self.deployment.shards());
        let address = |index: usize| address_of(&self.servers[index].address);
        for (index, server) in self.servers.iter().enumerate() {
            let primary = primaries[index % shards];
            let replica = Role::Replica { primary: address(primary), is_connected: true };
            server.server.borrow_mut().set_role(if primary == index { Role::Primary } else { replica });
            if self.deployment == Deployment::Cluster {
                let range = |shard: usize| SlotRange {
                    first: shard_start(shard),
                    last: shard_start(shard + 1) - 1,
                    owner: address(primaries[shard]),
                };
                let slots = SlotMap::new(address(index), (0..shards).map(range).collect());
                server.server.borrow_mut().set_slots(slots);
            }
        }
        for sentinel in &self.sentinels {
            sentinel.server.borrow_mut().set_watched_primary(PRIMARY_NAME, Some(address(primaries[0])));
        }
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

/// First slot of a shard.
fn shard_start(shard: usize) -> u16 {
    u16::try_from(usize::from(HASH_SLOTS) * shard / CLUSTER_SHARDS).unwrap()
}

fn address_of(text: &str) -> Address {
    let (host, port) = text.split_once(':').unwrap();
    Address { host: host.to_owned(), port: port.parse().unwrap() }
}

/// Starts the servers of a plan, and its sentinels.
fn start_servers(
    plan: &FleetPlan,
    start: Time,
    links: &Arc<Links>,
    trace: &Trace,
) -> (Vec<Rc<RedisHost>>, Vec<Rc<RedisHost>>) {
    let start_one = |address: &str, clock: &Arc<HostClock>, kind: Kind| {
        RedisHost::start(address, Arc::clone(clock), links, trace, Options { kind, ..Options::default() })
    };
    let clock = |index: usize| {
        let drift_ppm = if index.is_multiple_of(2) { plan.redis_drift_ppm } else { -plan.redis_drift_ppm };
        HostClock::new(start, 0, drift_ppm)
    };
    let count = match plan.deployment {
        Deployment::Single => plan.regions,
        Deployment::Sentinel | Deployment::Cluster => 2 * plan.deployment.shards(),
    };
    let global = (plan.regions > 1).then(|| "global:6379".to_owned());
    let addresses = (0..count).map(|index| format!("redis{index}:6379")).chain(global);
    let (common, kind) = (clock(0), if plan.deployment == Deployment::Cluster { Kind::Cluster } else { Kind::Single });
    let servers = addresses.enumerate().map(|(index, address)| match kind {
        Kind::Cluster => start_one(&address, &common, kind),
        _ => start_one(&address, &clock(index), kind),
    });
    let sentinel = |index: usize| start_one(&format!("sentinel{index}:26379"), &common, Kind::Sentinel);
    let sentinels = if plan.deployment == Deployment::Sentinel { SENTINELS } else { 0 };
    (servers.collect(), (0..sentinels).map(sentinel).collect())
}

/// Runs a future of a seed in virtual time. All random numbers of the program follow from the seed.
pub fn run_in_virtual_time<T>(seed: u64, run: impl Future<Output = T>) -> T {
    // The secret of hashes is one of the process, which the first run would draw.
    static SECRET_OF_HASHES: Once = Once::new();
    SECRET_OF_HASHES.call_once(|| {
        seed_this_thread(Some(0));
        CounterPath { domain: "", entries: &[], shared: &[], candidate: None }.hash_for_process();
    });
    seed_this_thread(Some(seed));
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let local = LocalSet::new();
    let outcome = local.block_on(&runtime, run);
    drop((local, runtime));
    seed_this_thread(None);
    outcome
}
