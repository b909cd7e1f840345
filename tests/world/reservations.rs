//! A run of reservations: Envoys whose streams reserve an estimate, and settle with the true cost.

mod judge;

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use kit::seeded_random::Chance;
use kit::test_service::TestRequest;
use tokio::time::sleep;
use tollkeeper::limit::algorithm::Algorithm;

use self::judge::Judge;
use super::envoy::StreamPlan;
use super::envoy_world::{EnvoyWorld, EnvoysPlan, LATE_MS};
use super::fleet::{FleetPlan, run_in_virtual_time};
use super::plan::{Fault, StoreErrorPolicy, TimedFault};
use super::simulation::{Outcome, Simulation};

/// Time before the first stream, in milliseconds.
const SETTLE_MS: u64 = 500;
/// A day in seconds: a period in which nothing that was charged is forgotten.
const DAY_S: u64 = 86_400;
/// A limit that no run exhausts.
const LARGE_LIMIT: u64 = 1_000_000;

/// Largest estimate of a rule.
const LARGEST_ESTIMATE: u64 = 5;

/// A limit with reservations on each value of a key.
#[derive(Clone, Copy, Debug)]
pub struct ReservationRule {
    algorithm: Algorithm,
    limit: u64,
    period_s: u64,
    /// Size of a bucket.
    size: u64,
    settle_within_s: u64,
    /// What is not settled is given back.
    returns_unsettled: bool,
    /// Estimate of each request; `None`: its hits.
    estimate: Option<u64>,
    values: u64,
}

impl ReservationRule {
    fn draw(chance: &mut Chance, is_counted: bool) -> Self {
        let algorithms: &[Algorithm] = match is_counted {
            true => &[Algorithm::FixedWindow, Algorithm::SlidingWindowCounter],
            false => &[
                Algorithm::FixedWindow,
                Algorithm::SlidingWindowLog,
                Algorithm::SlidingWindowCounter,
                Algorithm::TokenBucket,
            ],
        };
        let limit = if is_counted { LARGE_LIMIT } else { chance.pick(&[5, 20, 60]) };
        Self {
            algorithm: chance.pick(algorithms),
            limit,
            period_s: if is_counted { DAY_S } else { chance.pick(&[2, 5, 20]) },
            size: chance.between(5, 2 * limit.max(5)),
            settle_within_s: chance.pick(&[3, 10]),
            returns_unsettled: chance.one_in(2),
            estimate: chance.one_in(3).then(|| chance.between(1, LARGEST_ESTIMATE)),
            values: chance.pick(&[1, 1, 3]),
        }
    }

    /// Estimate of a request with these hits.
    fn estimate_of(&self, hits: u64) -> u64 {
        self.estimate.unwrap_or(hits)
    }
}

/// A run.
#[derive(Clone, Debug)]
pub struct ReservationsRun {
    fleet: FleetPlan,
    rules: Vec<ReservationRule>,
    on_store_error: StoreErrorPolicy,
    /// No limit is ever exhausted: the counters are compared with what was settled.
    is_counted: bool,
    plan: EnvoysPlan,
}

impl Simulation for ReservationsRun {
    fn draw(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let fleet = FleetPlan::draw(seed, &mut chance);
        let is_counted = chance.one_in(2);
        let rules: Vec<ReservationRule> =
            (0..chance.between(1, 2)).map(|_| ReservationRule::draw(&mut chance, is_counted)).collect();
        let on_store_error = chance.pick(&[StoreErrorPolicy::Error, StoreErrorPolicy::Error, StoreErrorPolicy::Deny]);
        let limits: Vec<u64> = rules.iter().map(|rule| rule.limit).collect();
        let mut plan = EnvoysPlan::draw(&mut chance, fleet.replicas, &limits);
        // An estimate that never fits is refused.
        plan.faults.retain(|fault| match fault.fault {
            Fault::LimitChanges(_, limit) => !is_counted && limit >= LARGEST_ESTIMATE,
            _ => true,
        });
        Self { fleet, rules, on_store_error, is_counted, plan }
    }

    fn run(&self) -> Outcome {
        let run = self.clone();
        run_in_virtual_time(self.fleet.seed, async move {
            let limits: Vec<u64> = run.rules.iter().map(|rule| rule.limit).collect();
            let world = EnvoyWorld::start(&run.fleet, &run.plan, run.rule_file(&limits));
            run.play(&world, &limits).await
        })
    }

    fn faults_mut(&mut self) -> &mut Vec<TimedFault> {
        &mut self.plan.faults
    }
}

impl fmt::Display for ReservationsRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}, {}", self.fleet, self.plan)?;
        let limits: Vec<u64> = self.rules.iter().map(|rule| rule.limit).collect();
        f.write_str(&self.rule_file(&limits))
    }
}

impl ReservationsRun {
    fn rule_file(&self, limits: &[u64]) -> String {
        let mut text = "domain: world\ndescriptors:\n".to_owned();
        for (index, (rule, limit)) in self.rules.iter().zip(limits).enumerate() {
            let size = match rule.algorithm {
                Algorithm::TokenBucket => format!(", bucket_size: {}", rule.size),
                _ => String::new(),
            };
            let estimate = rule.estimate.map_or_else(String::new, |estimate| format!(", estimate: {estimate}"));
            text += &format!(
                "  - key: rule{index}\n    rate_limit: {{ unit: second, unit_multiplier: {}, requests_per_unit: {limit}, \
                 algorithm: {}{size}, on_store_error: {}, reservations: {{ settle_within: {}s, unsettled: \
                 {}{estimate} }} }}\n",
                rule.period_s,
                rule.algorithm.name(),
                self.on_store_error.name(),
                rule.settle_within_s,
                if rule.returns_unsettled { "return" } else { "keep" },
            );
        }
        text
    }

    async fn play(&self, world: &Rc<EnvoyWorld>, limits: &[u64]) -> Outcome {
        let run = self.clone();
        let tasks = world.let_faults_happen(limits, move |limits| run.rule_file(limits));
        self.make_streams(world).await;
        for task in tasks {
            task.await.unwrap();
        }
        // All streams end, and all that is repeated.
        let longest_s = self.rules.iter().map(|rule| rule.settle_within_s).max().unwrap_or(0);
        sleep(Duration::from_millis(2 * LATE_MS + longest_s * 2000)).await;
        let mut used = Vec::new();
        for (rule, of) in self.rules.iter().enumerate().filter(|_| self.is_counted) {
            for value in 0..of.values {
                used.push(((rule, value), world.fleet.running_replicas()[0].peek_used(&request_of(rule, value)).await));
            }
        }
        let mut breaches = world.find_failures();
        {
            let journal = world.journal.borrow();
            let judge = Judge { run: self, fleet: &world.fleet, journal: &journal };
            breaches.extend(judge.find_breaches());
            breaches.extend(used.into_iter().filter_map(|(counter, used)| judge.find_wrong_sum(counter, used)));
        }
        breaches.extend(world.stop().await);
        let longest_s = self.rules.iter().map(|rule| rule.settle_within_s + 2 * rule.period_s).max().unwrap_or(0);
        // A bucket drains by the limit that is in force.
        let drains_s = self.plan.faults.iter().filter_map(|fault| match fault.fault {
            Fault::LimitChanges(index, limit) => {
                Some(self.rules[index].size * self.rules[index].period_s / limit.max(1))
            }
            _ => None,
        });
        let longest_s = longest_s + drains_s.max().unwrap_or(0);
        let longest_ms = longest_s * 1000 + self.plan.time_set_back_ms();
        world.fleet.servers[0].clock.jump(i64::try_from(longest_ms * 1000).unwrap());
        breaches.extend(world.find_keys());
        let (trace, calls) = (&world.fleet.trace, world.journal.borrow().attempts.len());
        Outcome { breaches, hash: trace.hash(), counts: trace.counts(), calls }
    }

    async fn make_streams(&self, world: &Rc<EnvoyWorld>) {
        let mut chance = Chance::new(self.fleet.seed ^ 5);
        let mut times: Vec<u64> =
            (0..self.plan.streams).map(|_| SETTLE_MS + chance.below(self.plan.duration_ms)).collect();
        times.sort_unstable();
        for at_ms in times {
            let rule = chance.place(self.rules.len());
            let mut counters = vec![(rule, chance.below(self.rules[rule].values))];
            if self.rules.len() > 1 && chance.one_in(5) {
                let other = (rule + 1) % self.rules.len();
                counters.push((other, chance.below(self.rules[other].values)));
            }
            let settle_within_ms = self.rules[rule].settle_within_s * 1000;
            let ends_after_ms = match chance.below(8) {
                0..2 => chance.below(40),
                2..5 => chance.between(50, 1000),
                5 => chance.between(1000, settle_within_ms - 500),
                6 => chance.between(settle_within_ms - 200, settle_within_ms + 200),
                _ => chance.between(100, 2 * settle_within_ms),
            };
            let hits = chance.between(1, 6);
            let cost = match chance.below(4) {
                0 => chance.between(hits, 2 * hits),
                1 => hits,
                _ => chance.below(hits),
            };
            world.fleet.wait_until(at_ms).await;
            world.begin_stream(
                chance.next(),
                StreamPlan {
                    counters,
                    hits,
                    cost,
                    ends_after_ms,
                    is_redirected: chance.one_in(10),
                    release_delay_ms: if chance.one_in(10) { chance.between(100, 4000) } else { chance.below(10) },
                    release_again_after_ms: chance.one_in(10).then(|| chance.below(2000)),
                },
            );
        }
    }
}

fn request_of(rule: usize, value: u64) -> TestRequest {
    TestRequest::new("world").descriptor(&[(&format!("rule{rule}"), &format!("value{value}"))]).hits(0)
}
