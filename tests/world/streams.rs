//! A run of streams under concurrent limits: Envoys that take slots and release them, and die.

mod judge;

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use kit::seeded_random::Chance;
use tokio::time::sleep;

use self::judge::Judge;
use super::envoy::StreamPlan;
use super::envoy_world::{EnvoyWorld, EnvoysPlan, LATE_MS};
use super::fleet::{FleetPlan, run_in_virtual_time};
use super::plan::{StoreErrorPolicy, TimedFault};
use super::simulation::{Outcome, Simulation};

/// Time before the first stream, in milliseconds.
const SETTLE_MS: u64 = 500;
/// Time for which a release is remembered, with a second more, in milliseconds.
const REMEMBERED_MS: u64 = LATE_MS + 1000;

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

/// A run.
#[derive(Clone, Debug)]
pub struct StreamsRun {
    fleet: FleetPlan,
    rules: Vec<StreamRule>,
    plan: EnvoysPlan,
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
            run.play(&world, &limits).await
        })
    }

    fn faults_mut(&mut self) -> &mut Vec<TimedFault> {
        &mut self.plan.faults
    }
}

impl fmt::Display for StreamsRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}, {}", self.fleet, self.plan)?;
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
    async fn play(&self, world: &Rc<EnvoyWorld>, limits: &[u64]) -> Outcome {
        let rules = self.rules.clone();
        let tasks = world.let_faults_happen(limits, move |limits| rule_file(&rules, limits));
        self.make_streams(world).await;
        for task in tasks {
            task.await.unwrap();
        }
        // Releases end, but streams that began late go on.
        sleep(Duration::from_millis(REMEMBERED_MS)).await;
        let mut breaches = self.judge(world).find_wrong_counters();
        // All streams end, and slots that were never released.
        let longest_s = self.rules.iter().map(|rule| rule.max_duration_s).max().unwrap_or(0);
        sleep(Duration::from_millis(longest_s * 1000 + self.plan.time_set_back_ms())).await;
        self.fill_all_limits(world, &self.plan.limits_at(limits, u64::MAX)).await;
        sleep(Duration::from_millis(REMEMBERED_MS)).await;
        let judge = self.judge(world);
        breaches.extend(judge.find_breaches());
        breaches.extend(judge.find_slots_of_replicas());
        drop(judge);
        breaches.extend(world.find_failures());
        breaches.extend(world.stop().await);
        // A hash with releases that are remembered lives for as long as its slots might.
        world.fleet.servers[0].clock.jump(i64::try_from(longest_s * 2_000_000).unwrap());
        breaches.extend(world.find_keys());
        let (trace, calls) = (&world.fleet.trace, world.journal.borrow().attempts.len());
        Outcome { breaches, hash: trace.hash(), counts: trace.counts(), calls }
    }

    fn judge<'w>(&'w self, world: &'w EnvoyWorld) -> Judge<'w> {
        Judge { rules: &self.rules, plan: &self.plan, fleet: &world.fleet, journal: world.journal.borrow() }
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
            let hits = match chance.below(24) {
                // A peek.
                0 => 0,
                1..5 => chance.between(2, 3),
                _ => 1,
            };
            world.fleet.wait_until(at_ms).await;
            world.begin_stream(
                chance.next(),
                StreamPlan {
                    counters,
                    hits,
                    cost: chance.below(3),
                    ends_after_ms,
                    is_redirected: hits > 0 && chance.one_in(10),
                    release_delay_ms: if chance.one_in(10) { chance.between(100, 4000) } else { chance.below(10) },
                    release_again_after_ms: chance.one_in(15).then(|| chance.below(2000)),
                },
            );
        }
    }

    /// Begins as many streams as each limit admits, and one more.
    async fn fill_all_limits(&self, world: &Rc<EnvoyWorld>, limits: &[u64]) {
        for (rule, limit) in limits.iter().enumerate() {
            for value in 0..self.rules[rule].values {
                for index in 0..=*limit {
                    let counters = vec![(rule, value)];
                    world.begin_stream(
                        index,
                        StreamPlan {
                            counters,
                            hits: 1,
                            cost: 0,
                            ends_after_ms: 5000,
                            is_redirected: false,
                            release_delay_ms: 0,
                            release_again_after_ms: None,
                        },
                    );
                }
            }
        }
        sleep(Duration::from_millis(5000)).await;
    }
}
