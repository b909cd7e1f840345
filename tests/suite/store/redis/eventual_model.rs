//! Eventually consistent rules in a simulation of replicas and Redis: the overshoot stays bounded over thousands of
//! runs.
//!
//! The core of such rules does no I/O and reads no clock, so a run needs neither Redis nor time: one thread goes from
//! event to event. Replicas have clocks of their own; messages take time, and some are lost; Redis freezes or is
//! unreachable; replicas start, stop and crash, and keep slots while they run. [`ledger`] then checks the
//! admissions on the time line of Redis, by each kind of limit.
//!
//! `PROPTEST_CASES=4000 cargo test --test suite redis::eventual_model` executes 2000 runs of each scenario and
//! number of replicas. `TOLLKEEPER_TABLE` names a file that the admitted hits are written to, as a table.

mod ledger;
mod scenario;
pub(super) mod redis;
mod replica;
mod overload;
mod simulation;

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;

use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::store::stats::EventualHitTotals;

use self::ledger::{Worst, check, check_changed};
use self::scenario::{Plan, ScenarioKind};
use self::simulation::{Outcome, World};

/// Algorithms that can be eventual.
const ALGORITHMS: [Algorithm; 4] =
    [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindowLog, Algorithm::SlidingWindowCounter];

/// Runs of each scenario and number of replicas, all algorithms together.
fn runs() -> u64 {
    kit::histories(32)
}

/// Results of many runs.
#[derive(Default)]
struct Tally {
    /// Overshoot of the worst run.
    worst: Option<Worst>,
    requests: u64,
    calls: u64,
    usage: EventualHitTotals,
    charged: u64,
}

impl Tally {
    fn add(&mut self, plan: &Plan, seed: u64) -> Result<(), String> {
        let (Outcome { uses, adjustments, requests, calls, .. }, usage) = World::live(plan, seed);
        for (key, (counters, (uses, adjustments))) in plan.keys.iter().zip(uses.iter().zip(&adjustments)).enumerate() {
            self.charged += uses.iter().filter(|it| it.by == ledger::By::Redis).map(|it| it.hits).sum::<u64>();
            for (place, counted) in counters.iter().enumerate().filter(|(_, counted)| !counted.shadow) {
                let limit = counted.limit.with_longer_period(0);
                let changed = plan.changed_keys.get(key).map(|counters| counters[place].limit.with_longer_period(0));
                let outcome = changed.map_or_else(
                    || check(&limit, uses, adjustments),
                    |changed| check_changed(&limit, &changed, uses, adjustments),
                );
                let worst = outcome.map_err(|what| format!("{what}, under {limit:?}"))?;
                if self.worst.is_none_or(|worst_so_far| worst_so_far.overshot() < worst.overshot()) {
                    self.worst = Some(worst);
                }
            }
        }
        (self.requests, self.calls) = (self.requests + requests, self.calls + calls);
        self.usage.from_shares += usage.from_shares;
        self.usage.from_leases += usage.from_leases;
        self.usage.leased += usage.leased;
        self.usage.returned += usage.returned;
        Ok(())
    }
}

/// Executes many runs of a scenario with this number of replicas, and checks the bound of each.
fn live(kind: ScenarioKind, fleets: &[usize]) {
    let mut table = String::new();
    for &replicas in fleets {
        let (mut tallies, mut failures) = (ALGORITHMS.map(|algorithm| (algorithm, Tally::default())), Vec::new());
        for seed in 0..runs() {
            let place = usize::try_from(seed).unwrap() % tallies.len();
            let (algorithm, tally) = &mut tallies[place];
            let plan = Plan::new(kind, replicas, *algorithm, seed);
            let failed = tally.add(&plan, seed).err();
            failures.extend(failed.map(|what| format!("{}, {replicas} replicas, run {seed}: {what}", kind.name())));
        }
        for (algorithm, tally) in &tallies {
            let Tally { worst, requests, calls, usage, charged } = tally;
            let Worst { admitted, promised, strict } = worst.expect("there are runs");
            let (name, per) = (kind.name(), 1000 * calls / requests.max(&1));
            let EventualHitTotals { from_shares, from_leases, leased, returned } = usage;
            let ways = format!("{charged} | {from_leases} | {from_shares} | {leased} | {returned}");
            let parts = format!("{admitted:.3} | {promised:.3} | {strict:.3}");
            writeln!(table, "| {name} | {replicas} | {algorithm} | {parts} | {per} | {ways} |").unwrap();
        }
        failures.truncate(5);
        assert!(failures.is_empty(), "{}", failures.join("\n"));
        // Otherwise the runs prove nothing.
        let usages = tallies.map(|(_, tally)| tally.usage);
        let some = |of: fn(&EventualHitTotals) -> u64| usages.iter().map(of).sum::<u64>() > 0;
        assert!(some(|it| it.from_shares) && some(|it| it.from_leases) && some(|it| it.returned), "{usages:?}");
    }
    publish(&table);
}

/// Appends to the table of `TOLLKEEPER_TABLE`, with a header if it is new.
fn publish(lines: &str) {
    print!("{lines}");
    if let Some(path) = std::env::var_os("TOLLKEEPER_TABLE") {
        let file = File::options().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(lines.as_bytes())).expect("the table can be written");
    }
}

#[test]
fn overshoot_is_bounded_under_steady_load() {
    live(ScenarioKind::Steady, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_when_a_cold_key_is_hit_at_all_replicas() {
    live(ScenarioKind::ColdBurst, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_when_one_replica_has_all_the_load() {
    live(ScenarioKind::Skewed, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_around_the_end_of_a_window() {
    live(ScenarioKind::Boundary, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_while_replicas_join_leave_and_crash() {
    live(ScenarioKind::Churn, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_with_more_replicas_than_slots() {
    live(ScenarioKind::Crowded, &[3, 8, 12]);
}

#[test]
fn overshoot_is_bounded_while_redis_freezes() {
    live(ScenarioKind::Frozen, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_when_redis_comes_back_with_its_data() {
    live(ScenarioKind::Unreachable, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_when_the_slot_count_changes_in_a_rollout() {
    live(ScenarioKind::Resized, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_with_slow_and_lost_replies() {
    live(ScenarioKind::Slow, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_when_leases_are_left_unused() {
    live(ScenarioKind::Unused, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_when_hits_are_refunded_and_counters_reset() {
    live(ScenarioKind::Adjusted, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_when_replicas_reload_other_limits() {
    live(ScenarioKind::Reloaded, &[1, 3, 8]);
}

#[test]
fn overshoot_is_bounded_when_all_faults_happen() {
    live(ScenarioKind::Everything, &[1, 3, 8]);
}
