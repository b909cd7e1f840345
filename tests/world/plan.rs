//! What a run of calls does, drawn from a seed: hosts, rules, demand and faults. Other kinds of runs draw hosts and faults
//! here too.
//!
//! Faults are a list that is drawn before the run, so that a run can be repeated without some of them.

use std::fmt;

use kit::seeded_random::Chance;
use simulated_redis::refusals::Refusal;
use tollkeeper::limit::algorithm::Algorithm;

use super::clock::MAX_DRIFT_PPM;
use super::fleet::{Deployment, FleetPlan};
use super::judge::Loss;
use super::network::Link;

/// Where counters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    /// Each charge is decided in Redis.
    Strict,
    /// Replicas admit from shares and leases, by at most so many percent beyond the limit.
    Eventual(u64),
    /// Regions get grants from the global Redis, and admit at most so many percent beyond the limit.
    Global(u64),
}

/// What decides while Redis fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreErrorPolicy {
    /// An error.
    Error,
    /// A rejection.
    Deny,
    /// The share of this replica.
    Local,
}

impl StoreErrorPolicy {
    /// Name in rule files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Deny => "deny",
            Self::Local => "local",
        }
    }
}

/// A rule: it limits each value of its key.
#[derive(Clone, Copy, Debug)]
pub struct RulePlan {
    /// Its algorithm.
    pub algorithm: Algorithm,
    /// Hits in a period.
    pub limit: u64,
    /// Period in seconds.
    pub period_s: u64,
    /// Size of the bucket or queue.
    pub size: u64,
    /// Where its counters are.
    pub consistency: Consistency,
    /// What decides while Redis fails.
    pub on_store_error: StoreErrorPolicy,
    /// Number of values that are called.
    pub values: u64,
    /// Hits of a second limit, of a year, which takes the overflow of this one; `None`: there is none.
    pub credits: Option<u64>,
}

impl RulePlan {
    /// Most hits that are admitted at once.
    pub const fn capacity(&self) -> u64 {
        match self.algorithm {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.size,
            _ => self.limit,
        }
    }
}

/// Something that goes wrong, or that an operator does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Redis does not run for a while, as after SIGSTOP.
    RedisFrozen,
    /// Redis is down for a while and comes back with its data.
    RedisRestarts,
    /// Redis is down for a while and comes back without data.
    RedisLosesData,
    /// Redis is down for a while and comes back with the data of so many milliseconds before.
    RedisRestoresSnapshot(u64),
    /// A server that counts goes down; after a while its replica takes its place, with the data of so many milliseconds
    /// before. Half a second later it comes back as a replica.
    RedisFailsOver(u64),
    /// Redis refuses commands for a while.
    RedisRefuses(Refusal),
    /// Each script takes so many milliseconds for a while.
    ScriptsAreSlow(u64),
    /// Redis forgets its scripts.
    ScriptsAreForgotten,
    /// Redis evicts the first key that starts so.
    KeyIsEvicted,
    /// The clock of Redis is set forwards or backwards, in milliseconds.
    RedisClockJumps(i64),
    /// The clock of a replica is set forwards or backwards, in milliseconds.
    ReplicaClockJumps(usize, i64),
    /// Nothing passes between a replica and Redis for a while: to Redis, to the replica, or both.
    LinkIsCut(usize, bool, bool),
    /// Each direction takes so many milliseconds longer for a while.
    LinkIsSlow(usize, u64),
    /// All connections of a replica are closed.
    ConnectionsAreReset(usize),
    /// A replica is killed, and another one starts after a while.
    ReplicaIsKilled(usize),
    /// A replica stops cleanly, and another one starts after a while.
    ReplicaStops(usize),
    /// The limit of a rule becomes so many hits.
    LimitChanges(usize, u64),
    /// All counters of a rule are reset.
    CountersAreReset(usize),
    /// A replica does not run for a while, as after SIGSTOP.
    ReplicaStandsStill(usize),
    /// A proxy is killed, and another process starts in its place after a while: under a new name, or the same. One with
    /// quotas has no name.
    ProxyIsKilled(usize, bool),
    /// A proxy does not run for a while, as after SIGSTOP.
    ProxyStandsStill(usize),
    /// Nothing passes between a proxy and a replica for a while, in both directions; `None`: all of them.
    ProxyIsCutOff(usize, Option<usize>),
    /// Nothing passes between a proxy and all replicas for a while: to the replicas, to the proxy, or both.
    ProxyLinkIsCut(usize, bool, bool),
    /// Each direction between a proxy and all replicas takes so many milliseconds longer for a while.
    ProxyLinkIsSlow(usize, u64),
    /// The stream of a proxy is reset.
    ProxyStreamIsReset(usize),
}

/// A fault with its times, in milliseconds from the start of the run.
#[derive(Clone, Copy, Debug)]
pub struct TimedFault {
    /// Begin.
    pub at_ms: u64,
    /// Duration, if the fault lasts.
    pub for_ms: u64,
    /// Number of the Redis that it concerns, if it concerns one: 0 is the first.
    pub server: usize,
    /// What happens.
    pub fault: Fault,
}

impl TimedFault {
    /// Time at which it has ended.
    pub const fn end_ms(&self) -> u64 {
        self.at_ms + self.for_ms
    }
}

impl fmt::Display for TimedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {} ms for {} ms, redis {}: {:?}", self.at_ms, self.for_ms, self.server, self.fault)
    }
}

/// When calls come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// At any time alike.
    Even,
    /// In bursts of a tenth of a second, each second.
    Bursts,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The hosts.
    pub fleet: FleetPlan,
    /// The rules.
    pub rules: Vec<RulePlan>,
    /// Number of calls.
    pub calls: u64,
    /// When they come.
    pub arrivals: Arrivals,
    /// Time in which they come, in milliseconds.
    pub duration_ms: u64,
    /// `TOLLKEEPER_MAX_REPLICAS`; `None`: unset.
    pub max_replicas: Option<u64>,
    /// What goes wrong.
    pub faults: Vec<TimedFault>,
}

/// Time before the first fault, in milliseconds: connections open meanwhile.
const FIRST_FAULT_MS: u64 = 1500;
/// Time within which counting resumes after the last fault, in milliseconds: docs/failures.md.
pub const RECOVERY_MS: u64 = 2000;

impl FleetPlan {
    /// Draws the hosts of a run.
    pub fn draw(seed: u64, chance: &mut Chance) -> Self {
        let replicas = usize::try_from(chance.between(1, 4)).unwrap();
        // A call and one that waits for it must fit into the timeout of the store.
        let link = Link { latency_ms: chance.between(0, 1), jitter_ms: chance.between(0, 2), ..Link::default() };
        let drift_ppm = i64::try_from(chance.between(0, 2 * MAX_DRIFT_PPM.unsigned_abs())).unwrap() - MAX_DRIFT_PPM;
        Self {
            seed,
            replicas,
            regions: 1,
            global_latency_ms: chance.between(5, 80),
            deployment: Deployment::Single,
            link,
            redis_drift_ppm: drift_ppm,
        }
    }
}

impl Plan {
    /// Returns true if the replicas are told their number (`TOLLKEEPER_REPLICAS`); else they count themselves.
    pub const fn is_replica_count_given(&self) -> bool {
        self.fleet.regions == 1 && self.fleet.seed / 8 % 4 == 3
    }

    /// Shares of `on_store_error: local` that processes use in a period: each process has one, and one more after its
    /// clock jumped or the counters were reset.
    pub fn local_shares(&self) -> Option<u64> {
        let replicas = self.fleet.replicas as u64;
        let more = self.faults.iter().map(|fault| match fault.fault {
            Fault::ReplicaIsKilled(_) | Fault::ReplicaStops(_) | Fault::ReplicaClockJumps(..) => 1,
            Fault::CountersAreReset(_) => replicas,
            _ => 0,
        });
        self.is_replica_count_given().then(|| replicas + more.sum::<u64>())
    }
}

impl Plan {
    /// Draws a run.
    pub fn draw_calls(seed: u64) -> Self {
        let mut of_demand = Chance::new(seed ^ 0x7368_6172_6573);
        match of_demand.one_in(4) {
            true => Self::draw_mixed_calls(seed).with_busy_counter(&mut of_demand),
            false => Self::draw_mixed_calls(seed),
        }
    }

    /// Gives all calls to one eventual counter, more than it admits; few replicas have shares of it, and these are
    /// stopped or cut off. There may be more replicas than shares: the others get none.
    fn with_busy_counter(self, chance: &mut Chance) -> Self {
        let rule = RulePlan {
            algorithm: chance.pick(&[
                Algorithm::SlidingWindowLog,
                Algorithm::SlidingWindowLog,
                Algorithm::TokenBucket,
                Algorithm::FixedWindow,
                Algorithm::SlidingWindowCounter,
            ]),
            limit: chance.pick(&[20, 100]),
            period_s: chance.pick(&[2, 10, 10, 20]),
            size: chance.pick(&[5, 20, 100]),
            consistency: Consistency::Eventual(chance.pick(&[5, 50, 50])),
            on_store_error: chance.pick(&[StoreErrorPolicy::Error, StoreErrorPolicy::Deny]),
            values: 1,
            credits: None,
        };
        // One replica after the other gets the same share; or one is cut off until another one has got it.
        let is_cut_off = chance.one_in(2);
        let replicas = if is_cut_off { self.fleet.replicas.max(2) } else { self.fleet.replicas };
        let fleet = FleetPlan { replicas, deployment: Deployment::Single, ..self.fleet };
        let duration_ms = if is_cut_off { chance.between(80_000, 110_000) } else { chance.between(14_000, 20_000) };
        let from_ms = chance.between(FIRST_FAULT_MS, 5000);
        let restart = |chance: &mut Chance| TimedFault {
            at_ms: from_ms + chance.below(9000 - RECOVERY_MS),
            for_ms: chance.pick(&[5, 50, 300]),
            server: 0,
            fault: Fault::ReplicaStops(chance.place(replicas)),
        };
        let faults = match is_cut_off {
            true => vec![TimedFault {
                at_ms: from_ms,
                for_ms: chance.between(45_000, 70_000),
                server: 0,
                fault: Fault::LinkIsCut(chance.place(replicas), true, true),
            }],
            false => (0..chance.between(2, 8)).map(|_| restart(chance)).collect(),
        };
        let (calls, max_replicas) = (chance.between(800, 2000), Some(chance.pick(&[1, 1, 2])));
        Self { fleet, rules: vec![rule], calls, duration_ms, max_replicas, faults, ..self }
    }

    fn draw_mixed_calls(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let deployment = chance.pick(&[
            Deployment::Single,
            Deployment::Single,
            Deployment::Single,
            Deployment::Sentinel,
            Deployment::Cluster,
        ]);
        let fleet = FleetPlan { deployment, ..FleetPlan::draw(seed, &mut chance) };
        let mut rules: Vec<RulePlan> = (0..chance.between(1, 3)).map(|_| draw_rule(&mut chance)).collect();
        add_credits(seed, &mut rules);
        // Claims of replicas end after 30 s.
        let is_long = chance.one_in(6);
        let duration_ms = if is_long { chance.between(50_000, 90_000) } else { chance.between(4000, 16_000) };
        let count = if chance.one_in(6) { 0 } else { chance.between(1, 6) };
        let faults = (0..count)
            .map(|_| match chance.below(8) {
                0 => draw_operation(&mut chance, &rules, duration_ms),
                1 | 2 if deployment != Deployment::Single => TimedFault {
                    server: chance.place(deployment.shards()),
                    fault: Fault::RedisFailsOver(chance.pick(&[0, 5, 500])),
                    ..draw_fault(&mut chance, fleet.replicas, duration_ms)
                },
                _ => TimedFault {
                    server: chance.place(deployment.shards()),
                    ..draw_fault(&mut chance, fleet.replicas, duration_ms)
                },
            })
            .collect();
        let (calls, arrivals) = (chance.between(100, 700), chance.pick(&[Arrivals::Even, Arrivals::Bursts]));
        Self { fleet, rules, calls, arrivals, duration_ms, max_replicas: None, faults }
    }

    /// Draws a run of several regions.
    pub fn draw_regions(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let regions = usize::try_from(chance.between(2, 3)).unwrap();
        let fleet =
            FleetPlan { regions, replicas: regions * chance.pick(&[1, 1, 2]), ..FleetPlan::draw(seed, &mut chance) };
        let rule = RulePlan {
            algorithm: chance.pick(&[Algorithm::FixedWindow, Algorithm::SlidingWindowCounter, Algorithm::TokenBucket]),
            limit: chance.pick(&[50, 100, 200]),
            period_s: chance.pick(&[5, 10, 20]),
            // A tenth of it has a hit for each region.
            size: chance.between(40, 200),
            consistency: Consistency::Global(chance.pick(&[5, 10, 50])),
            on_store_error: chance.pick(&[StoreErrorPolicy::Error, StoreErrorPolicy::Deny, StoreErrorPolicy::Local]),
            values: chance.pick(&[1, 1, 2]),
            credits: None,
        };
        let duration_ms = chance.between(20_000, 60_000);
        let count = if chance.one_in(6) { 0 } else { chance.between(1, 6) };
        let faults = (0..count)
            .map(|_| {
                let fault = draw_fault(&mut chance, fleet.replicas, duration_ms);
                // Some faults of the global Redis last long: parts and policies decide meanwhile.
                let for_ms = if chance.one_in(4) { chance.between(3000, 12_000) } else { fault.for_ms };
                TimedFault { server: chance.place(regions + 1), for_ms, ..fault }
            })
            .collect();
        let (calls, arrivals) = (chance.between(500, 1000), chance.pick(&[Arrivals::Even, Arrivals::Bursts]));
        Self { fleet, rules: vec![rule], calls, arrivals, duration_ms, max_replicas: None, faults }
    }

    /// Longest time for which a command that was sent may be held back, by clocks that drift, in microseconds.
    pub fn held_back_us(&self) -> u64 {
        let holds_back = |fault: &&TimedFault| {
            matches!(
                fault.fault,
                Fault::RedisFrozen | Fault::ScriptsAreSlow(_) | Fault::LinkIsCut(..) | Fault::LinkIsSlow(..)
            )
        };
        self.faults.iter().filter(holds_back).map(|fault| (fault.for_ms + 1) * 1000).sum()
    }

    /// What may let more hits pass than the limit in several regions, by docs/regions.md, and by how much the period is
    /// shorter, in microseconds.
    pub fn losses_in_regions(&self) -> (Vec<Loss>, u64) {
        let mut shorter_us = 0;
        let mut losses = Vec::new();
        for fault in &self.faults {
            let from_ms = match fault.fault {
                Fault::RedisLosesData | Fault::KeyIsEvicted => fault.at_ms,
                Fault::RedisRestoresSnapshot(age_ms) => fault.at_ms.saturating_sub(age_ms),
                Fault::RedisClockJumps(by_ms) if by_ms.unsigned_abs() <= 1000 => {
                    shorter_us += by_ms.unsigned_abs() * 1000;
                    continue;
                }
                Fault::RedisClockJumps(_) => fault.at_ms,
                _ => continue,
            };
            losses.push(Loss { from_ms, until_ms: fault.end_ms(), rule: None });
        }
        (losses, shorter_us)
    }

    /// Text of the rule file.
    pub fn rule_file(&self) -> String {
        let limits: Vec<u64> = self.rules.iter().map(|rule| rule.limit).collect();
        rule_file(&self.rules, &limits)
    }
}

/// Text of a rule file with these limits.
pub fn rule_file(rules: &[RulePlan], limits: &[u64]) -> String {
    let mut text = "domain: world\ndescriptors:\n".to_owned();
    for (index, (rule, limit)) in rules.iter().zip(limits).enumerate() {
        let size = match rule.algorithm {
            Algorithm::TokenBucket => format!(", bucket_size: {}", rule.size),
            Algorithm::LeakyBucket => format!(", queue_size: {}", rule.size),
            _ => String::new(),
        };
        let consistency = match rule.consistency {
            Consistency::Strict => String::new(),
            Consistency::Eventual(percent) => format!(", consistency: eventual, max_overshoot: {percent}%"),
            Consistency::Global(percent) => format!(", scope: global, max_overshoot: {percent}%"),
        };
        let on_store_error = rule.on_store_error.name();
        let limit = format!(
            "unit: second, unit_multiplier: {}, requests_per_unit: {limit}, algorithm: {}{size}{consistency}, \
             on_store_error: {on_store_error}",
            rule.period_s,
            rule.algorithm.name(),
        );
        text += &match rule.credits {
            None => format!("  - key: rule{index}\n    rate_limit: {{ {limit} }}\n"),
            Some(credits) => format!(
                "  - key: rule{index}\n    rate_limit:\n      - {{ name: own, overflow_to: credits, {limit} }}\n      - {{ \
                 name: credits, unit: year, requests_per_unit: {credits}, on_store_error: {on_store_error} }}\n"
            ),
        };
    }
    text
}

fn draw_rule(chance: &mut Chance) -> RulePlan {
    let is_eventual = chance.one_in(3);
    let algorithm = match is_eventual {
        true => chance.pick(&[
            Algorithm::FixedWindow,
            Algorithm::SlidingWindowLog,
            Algorithm::SlidingWindowCounter,
            Algorithm::TokenBucket,
        ]),
        false => chance.pick(&[
            Algorithm::FixedWindow,
            Algorithm::SlidingWindowLog,
            Algorithm::SlidingWindowCounter,
            Algorithm::TokenBucket,
            Algorithm::LeakyBucket,
        ]),
    };
    let limit = chance.pick(&[3, 10, 30, 100]);
    RulePlan {
        algorithm,
        limit,
        period_s: chance.pick(&[1, 2, 5, 10]),
        size: chance.between(1, 2 * limit),
        consistency: if is_eventual { Consistency::Eventual(chance.pick(&[5, 10, 50])) } else { Consistency::Strict },
        on_store_error: chance.pick(&[
            StoreErrorPolicy::Error,
            StoreErrorPolicy::Error,
            StoreErrorPolicy::Deny,
            StoreErrorPolicy::Local,
        ]),
        values: chance.pick(&[1, 1, 3, 20]),
        credits: None,
    }
}

/// Gives some strict rules credits, by a chance of their own, so that other draws stay as they are.
fn add_credits(seed: u64, rules: &mut [RulePlan]) {
    let mut chance = Chance::new(seed ^ 0x6f76_6572_666c_6f77);
    for rule in rules {
        let may_overflow = rule.consistency == Consistency::Strict && rule.algorithm != Algorithm::LeakyBucket;
        if may_overflow && chance.one_in(3) {
            rule.credits = Some(chance.pick(&[1, 5, 40]));
            rule.on_store_error = StoreErrorPolicy::Error;
        }
    }
}

fn draw_operation(chance: &mut Chance, rules: &[RulePlan], duration_ms: u64) -> TimedFault {
    let rule = chance.place(rules.len());
    let fault = match chance.one_in(2) {
        true => Fault::LimitChanges(rule, chance.between(1, 2 * rules[rule].limit)),
        false => Fault::CountersAreReset(rule),
    };
    TimedFault { at_ms: chance.between(FIRST_FAULT_MS, duration_ms - RECOVERY_MS), for_ms: 0, server: 0, fault }
}

/// Draws a fault of the hosts of a run that lasts so long.
pub fn draw_fault(chance: &mut Chance, replicas: usize, duration_ms: u64) -> TimedFault {
    let at_ms = chance.between(FIRST_FAULT_MS, duration_ms - RECOVERY_MS);
    let for_ms = chance.pick(&[5, 50, 300, 1000, 2500]);
    let replica = chance.place(replicas);
    let jump_ms = |chance: &mut Chance| chance.pick(&[-3_600_000_i64, -5000, -200, 200, 5000, 3_600_000]);
    let fault = match chance.below(15) {
        0 => Fault::RedisFrozen,
        1 => Fault::RedisRestarts,
        2 => Fault::RedisLosesData,
        3 => Fault::RedisRestoresSnapshot(chance.between(1, at_ms)),
        4 => Fault::RedisRefuses(chance.pick(&[
            Refusal::Loading,
            Refusal::ReadOnly,
            Refusal::OutOfMemory,
            Refusal::Busy,
            Refusal::SnapshotsFail,
            Refusal::NoReplicas,
            Refusal::MasterDown,
        ])),
        5 => Fault::ScriptsAreSlow(chance.between(1, 40)),
        6 => Fault::ScriptsAreForgotten,
        7 => Fault::KeyIsEvicted,
        8 => Fault::RedisClockJumps(jump_ms(chance)),
        9 => Fault::ReplicaClockJumps(replica, jump_ms(chance)),
        10 => {
            let (to_server, to_host) = chance.pick(&[(true, false), (false, true), (true, true)]);
            Fault::LinkIsCut(replica, to_server, to_host)
        }
        11 => Fault::LinkIsSlow(replica, chance.between(5, 40)),
        12 => Fault::ConnectionsAreReset(replica),
        13 => Fault::ReplicaIsKilled(replica),
        _ => Fault::ReplicaStops(replica),
    };
    TimedFault { at_ms, for_ms, server: 0, fault }
}
