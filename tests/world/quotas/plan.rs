//! What a run of quotas does, drawn from a seed: hosts, rules, proxies, demand and faults.

use std::fmt;

use kit::seeded_random::Chance;
use tollkeeper::limit::algorithm::Algorithm;

use super::super::fleet::FleetPlan;
use super::super::plan::{Consistency, Fault, RulePlan, StoreErrorPolicy, TimedFault, draw_fault, rule_file};
use super::proxy::{BucketName, ProxyOptions, Tokens};

/// Time before the first request, in milliseconds.
pub const SETTLE_MS: u64 = 500;
/// Time after the last fault in which no more begins, in milliseconds.
const LAST_FAULT_MS: u64 = 5000;
/// Interval of reports of Envoy 1.40, in milliseconds.
const ENVOY_REPORT_MS: u64 = 5000;
/// Time for which demand stays with one proxy before it moves, in milliseconds.
const MOVE_MS: u64 = 20_000;
/// Maximum number of requests of a run.
const MAX_REQUESTS: u64 = 3000;
/// Maximum number of these that are calls over RLS.
const MAX_CALLS: u64 = 150;

/// Largest limit, in hits per second: a run has not many more requests.
const MAX_HITS_PER_SECOND: u64 = 30;

/// How demand is spread over proxies and time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// All proxies have as much.
    Even,
    /// The first has 80 %, the second 15 %, the others the rest.
    Skewed,
    /// One has 90 %, and another one after 20 s.
    Moving,
    /// Proxies have bursts of half a second, at random times.
    Bursty,
}

/// Source of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A proxy decides it.
    Proxy(usize),
    /// It is a call over RLS.
    Call,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Time of the run in milliseconds.
    pub at_ms: u64,
    /// Where it comes from.
    pub source: Source,
    /// Its bucket.
    pub name: BucketName,
}

/// A run.
#[derive(Clone, Debug)]
pub struct QuotaPlan {
    /// The hosts.
    pub fleet: FleetPlan,
    /// The rules.
    pub rules: Vec<RulePlan>,
    /// The proxies.
    pub proxies: Vec<ProxyOptions>,
    /// How demand is spread.
    pub demand: Demand,
    /// Number of requests.
    pub requests: u64,
    /// Share of them that are calls over RLS, in percent.
    pub calls_percent: u64,
    /// Time in which they come, in milliseconds.
    pub duration_ms: u64,
    /// What goes wrong.
    pub faults: Vec<TimedFault>,
}

impl QuotaPlan {
    /// Draws a run.
    pub fn draw(seed: u64) -> Self {
        let mut chance = Chance::new(seed ^ 0x7175_6f74);
        let mut fleet = FleetPlan::draw(seed, &mut chance);
        fleet.replicas = chance.pick(&[1, 1, 2, 3]);
        let rules: Vec<RulePlan> = (0..chance.pick(&[1, 1, 2])).map(|_| draw_rule(&mut chance)).collect();
        let count = chance.place(5) + 1;
        let allows_unassigned = chance.one_in(2);
        let fallback = chance.one_in(3).then(|| Tokens {
            max: (rules[0].limit / count as u64).max(1),
            fill: (rules[0].limit / count as u64).max(1),
            interval_s: rules[0].period_s,
        });
        let are_envoys = !chance.one_in(3);
        let mut intervals = Chance::new(seed ^ 6);
        let proxies = (0..count)
            .map(|_| {
                let is_envoy = are_envoys || chance.one_in(2);
                // The others report as often as they are told.
                let report_ms = if is_envoy { ENVOY_REPORT_MS } else { intervals.pick(&[ENVOY_REPORT_MS, 1000, 200]) };
                ProxyOptions { allows_unassigned, fallback, is_envoy, report_ms }
            })
            .collect::<Vec<_>>();
        let duration_ms = chance.between(40, 100) * 1000;
        // From what the limits admit to four times as much.
        let admitted: u64 =
            rules.iter().map(|rule| rule.limit * rule.values * duration_ms / 1000 / rule.period_s).sum();
        let requests = (admitted * chance.between(10, 40) / 10).clamp(200, MAX_REQUESTS);
        let fault_count = if chance.one_in(4) { 0 } else { chance.between(1, 5) };
        let mut faults: Vec<TimedFault> = Vec::new();
        for _ in 0..fault_count {
            let fault = draw_timed_fault(&mut chance, &fleet, &rules, count, duration_ms);
            if !faults.iter().any(|other| excludes(other, &fault) || excludes(&fault, other)) {
                faults.push(fault);
            }
        }
        let demand = chance.pick(&[Demand::Even, Demand::Skewed, Demand::Moving, Demand::Bursty]);
        let calls_percent = chance.pick(&[0, 0, 5, 30]);
        Self { fleet, rules, proxies, demand, requests, calls_percent, duration_ms, faults }
    }

    /// Requests of the run, by their time.
    pub fn draw_requests(&self) -> Vec<Request> {
        let mut chance = Chance::new(self.fleet.seed ^ 5);
        let count = self.proxies.len();
        let bursts: Vec<(u64, usize)> =
            (0..self.duration_ms / 3000).map(|_| (chance.below(self.duration_ms - 500), chance.place(count))).collect();
        let calls = (self.requests * self.calls_percent / 100).min(MAX_CALLS);
        let mut requests: Vec<Request> = (0..self.requests)
            .map(|number| {
                let even_ms = chance.below(self.duration_ms);
                let (at_ms, proxy) = match self.demand {
                    Demand::Even => (even_ms, chance.place(count)),
                    Demand::Skewed => {
                        let rest = 2.min(count - 1) + chance.place(count.saturating_sub(2).max(1));
                        (
                            even_ms,
                            match chance.below(100) {
                                0..80 => 0,
                                80..95 => 1.min(count - 1),
                                _ => rest.min(count - 1),
                            },
                        )
                    }
                    Demand::Moving if chance.below(10) < 9 => {
                        (even_ms, usize::try_from(even_ms / MOVE_MS).unwrap() % count)
                    }
                    Demand::Moving => (even_ms, chance.place(count)),
                    Demand::Bursty => {
                        let (from_ms, proxy) = chance.pick(&bursts);
                        (from_ms + chance.below(500), proxy)
                    }
                };
                let source = if number < calls { Source::Call } else { Source::Proxy(proxy) };
                let rule = chance.place(self.rules.len());
                // A few values get most requests.
                let value = chance.below(self.rules[rule].values).min(chance.below(self.rules[rule].values));
                Request { at_ms: SETTLE_MS + at_ms, source, name: (rule, value) }
            })
            .collect();
        requests.sort_by_key(|request| request.at_ms);
        requests
    }

    /// Text of the rule file.
    pub fn rule_file(&self) -> String {
        rule_file(&self.rules, &self.rules.iter().map(|rule| rule.limit).collect::<Vec<_>>())
    }
}

impl fmt::Display for QuotaPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fleet, demand, requests, calls_percent, duration_ms, .. } = self;
        writeln!(
            f,
            "quotas: {fleet:?}, {requests} requests in {duration_ms} ms, {demand:?}, {calls_percent} % over RLS, {:?}",
            self.proxies
        )?;
        f.write_str(&self.rule_file())
    }
}

fn draw_rule(chance: &mut Chance) -> RulePlan {
    // Below 20 s: rates; the others: lent hits.
    let period_s = chance.pick(&[1, 2, 5, 10, 19, 20, 30, 60]);
    let limit = chance.pick(&[10, 20, 50, 100, 200]).min(MAX_HITS_PER_SECOND * period_s);
    RulePlan {
        algorithm: chance.pick(&[
            Algorithm::FixedWindow,
            Algorithm::FixedWindow,
            Algorithm::SlidingWindowCounter,
            Algorithm::TokenBucket,
            Algorithm::TokenBucket,
        ]),
        limit,
        period_s,
        size: chance.pick(&[limit, limit, limit / 2, 2 * limit]),
        consistency: Consistency::Strict,
        on_store_error: chance.pick(&[
            StoreErrorPolicy::Error,
            StoreErrorPolicy::Error,
            StoreErrorPolicy::Deny,
            StoreErrorPolicy::Local,
        ]),
        values: chance.pick(&[1, 1, 1, 4]),
        credits: None,
    }
}

/// True if a replica that stands still cannot have the other fault: it is over, or its links are cut, by both.
fn excludes(standstill: &TimedFault, other: &TimedFault) -> bool {
    let Fault::ReplicaStandsStill(replica) = standstill.fault else { return false };
    let is_of_replica = match other.fault {
        Fault::ReplicaIsKilled(index)
        | Fault::ReplicaStops(index)
        | Fault::LinkIsCut(index, ..)
        | Fault::ReplicaStandsStill(index) => index == replica,
        _ => false,
    };
    is_of_replica && standstill.at_ms <= other.end_ms() && other.at_ms <= standstill.end_ms()
}

fn draw_timed_fault(
    chance: &mut Chance,
    fleet: &FleetPlan,
    rules: &[RulePlan],
    proxies: usize,
    duration_ms: u64,
) -> TimedFault {
    let at_ms = chance.between(2000, duration_ms - LAST_FAULT_MS);
    let (proxy, replica, rule) = (chance.place(proxies), chance.place(fleet.replicas), chance.place(rules.len()));
    let for_ms = chance.pick(&[50, 400, 1500, 4000, 9000, 14_000, 25_000]).min(duration_ms - at_ms);
    let fault = match chance.below(14) {
        0..4 => {
            let mut fault = draw_fault(chance, fleet.replicas, duration_ms);
            if chance.one_in(3) {
                fault.for_ms = (fault.for_ms * 5).min(duration_ms - fault.at_ms);
            }
            return fault;
        }
        4 => Fault::LimitChanges(rule, chance.between(1, 2 * rules[rule].limit)),
        5 => Fault::LimitChanges(rule, chance.between(rules[rule].limit / 2, rules[rule].limit * 3 / 2)),
        6 => Fault::ReplicaStandsStill(replica),
        7 => Fault::ProxyIsKilled(proxy, true),
        8 | 9 => Fault::ProxyStandsStill(proxy),
        10 | 11 => {
            let (to_server, to_host) = chance.pick(&[(true, false), (false, true), (true, true)]);
            Fault::ProxyLinkIsCut(proxy, to_server, to_host)
        }
        12 => Fault::ProxyLinkIsSlow(proxy, chance.pick(&[20, 200, 900])),
        _ => Fault::ProxyStreamIsReset(proxy),
    };
    TimedFault { at_ms, for_ms, server: 0, fault }
}
