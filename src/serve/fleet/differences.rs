//! What one replica does and others do not, and what only the sums over replicas show.
//!
//! Decides: which findings there are between replicas; when rules, settings or clocks differ.
//! Decides: when a replica is silent (12 s).

use std::collections::BTreeMap;
use std::time::Duration;

use super::finding::{Finding, MAX_NAMED_REPLICAS};
use super::summary::ReplicaSummary;
use crate::base::clock::{Time, shorten_in_tests, to_micros};
use crate::base::text::escape_unprintable;

/// Minimum number of recent calls of a replica for others without traffic to be found.
const MIN_CALLS_OF_BUSY_REPLICA: u64 = 100;
/// Minimum time of observation for a replica without traffic to be reported, in microseconds.
const MIN_OBSERVATION_FOR_NO_TRAFFIC_US: u64 = 30_000_000;
/// Time without a summary that is reported: two are missing.
const MAX_SILENCE: Duration = Duration::from_secs(12);
/// Number of characters of a hash of rules that are shown.
pub(super) const SHOWN_HASH_CHARS: usize = 6;
/// Largest difference of a clock from the median that is not reported, in microseconds.
const MAX_CLOCK_DIFFERENCE_US: u64 = 1_000_000;

/// Minimum number of recent descriptors without a rule for these to be reported.
const MIN_UNMATCHED: u64 = 100;

/// Finds what replicas do differently, and what only their sums show. `now` is the time of Redis.
pub fn find_problems(replicas: &[ReplicaSummary], now: Time) -> Vec<Finding> {
    let found = find_replica_differences(replicas, now).into_iter().chain(find_unmatched_descriptors(replicas));
    found.map(Finding::with_advice).collect()
}

/// Finds replicas of whose descriptors more than half match no rule.
fn find_unmatched_descriptors(replicas: &[ReplicaSummary]) -> Option<Finding> {
    let unmatched = |replica: &ReplicaSummary| replica.recent.unmatched;
    let is_concerned = |replica: &ReplicaSummary| {
        unmatched(replica) >= MIN_UNMATCHED && unmatched(replica) > replica.recent.verdicts.total()
    };
    let sum = replicas.iter().filter(|replica| is_concerned(replica)).map(unmatched).fold(0, u64::saturating_add);
    build_finding(replicas, "unmatched_descriptors", is_concerned, |count| {
        format!(
            "{sum} descriptors of the last minute matched no rule on {count} of {} replicas, more than matched one: \
             nothing limits them (`tollkeeper top --unmatched` shows why)",
            replicas.len()
        )
    })
}

/// Finds what replicas do differently.
///
/// `now` is the time of Redis.
pub fn find_replica_differences(replicas: &[ReplicaSummary], now: Time) -> Vec<Finding> {
    if replicas.len() < 2 {
        return Vec::new();
    }
    let found = [
        find_not_publishing(replicas, now),
        find_different_rules(replicas),
        find_no_traffic(replicas),
        find_clocks_apart(replicas),
        find_different_builds(replicas),
        find_replicas_with_different_key_forms(replicas),
    ];
    found.into_iter().flatten().collect()
}

/// Builds a finding about the replicas that `is_concerned` selects; `None` if it selects none.
fn build_finding(
    replicas: &[ReplicaSummary],
    kind: &'static str,
    is_concerned: impl Fn(&ReplicaSummary) -> bool,
    text: impl FnOnce(usize) -> String,
) -> Option<Finding> {
    let concerned: Vec<&ReplicaSummary> = replicas.iter().filter(|replica| is_concerned(replica)).collect();
    let names = concerned.iter().take(MAX_NAMED_REPLICAS).map(|replica| replica.name.clone());
    (!concerned.is_empty()).then(|| Finding::new(kind, names.collect(), text(concerned.len())))
}

/// The most frequent value; of equally frequent ones the smallest.
fn find_most_frequent<'r>(values: impl Iterator<Item = &'r str>) -> Option<&'r str> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(value, _)| value)
}

/// True for a replica that published nothing for a while and may have died; `now` is the time of Redis.
pub(super) fn is_silent(replica: &ReplicaSummary, now: Time) -> bool {
    now.as_micros().saturating_sub(replica.published_us) >= to_micros(shorten_in_tests(MAX_SILENCE))
}

fn find_not_publishing(replicas: &[ReplicaSummary], now: Time) -> Option<Finding> {
    let silence_us = |replica: &ReplicaSummary| now.as_micros().saturating_sub(replica.published_us);
    let longest = replicas.iter().map(silence_us).max()?;
    build_finding(
        replicas,
        "not_publishing",
        |replica| is_silent(replica, now),
        |count| {
            format!(
                "{count} of {} replicas published nothing for up to {} s: they died, or do not reach Redis; their rows are old",
                replicas.len(),
                longest / 1_000_000
            )
        },
    )
}

fn find_different_rules(replicas: &[ReplicaSummary]) -> Option<Finding> {
    let hashes = || replicas.iter().map(|replica| replica.rules.hash.as_str());
    let usual = find_most_frequent(hashes())?;
    let have = |hash: &str| hashes().filter(|other| *other == hash).count();
    let is_tie = hashes().any(|hash| hash != usual && have(hash) == have(usual));
    build_finding(
        replicas,
        "different_rules",
        |replica| is_tie || replica.rules.hash != usual,
        |count| {
            const COMPARE: &str =
                "a change is not everywhere yet, did not arrive or was refused (compare /rlconfig of these)";
            match is_tie {
                true => format!("{count} replicas have different rules: {COMPARE}"),
                false => format!(
                    "{count} of {} replicas have other rules than {}: {COMPARE}",
                    replicas.len(),
                    abbreviate_hash(usual)
                ),
            }
        },
    )
}

/// Start of a hash of rules.
pub(super) fn abbreviate_hash(hash: &str) -> String {
    if hash.is_empty() { "none".to_owned() } else { hash.chars().take(SHOWN_HASH_CHARS).collect() }
}

fn find_no_traffic(replicas: &[ReplicaSummary]) -> Option<Finding> {
    let busiest = replicas
        .iter()
        .map(|replica| replica.recent.calls)
        .max()
        .filter(|calls| *calls >= MIN_CALLS_OF_BUSY_REPLICA)?;
    build_finding(
        replicas,
        "no_traffic",
        |replica| replica.recent.calls == 0 && replica.recent.span_us >= MIN_OBSERVATION_FOR_NO_TRAFFIC_US,
        |count| {
            format!(
                "{count} of {} replicas got no call in the last minute, the busiest got {busiest}: clients may keep \
                 their connections to the others (see GRPC_MAX_CONNECTION_AGE)",
                replicas.len()
            )
        },
    )
}

fn find_clocks_apart(replicas: &[ReplicaSummary]) -> Option<Finding> {
    let mut offsets: Vec<i64> = replicas.iter().map(|replica| replica.clock_offset_us).collect();
    offsets.sort_unstable();
    let median = *offsets.get(offsets.len() / 2)?;
    let difference = |replica: &ReplicaSummary| replica.clock_offset_us.abs_diff(median);
    let worst = replicas.iter().max_by_key(|replica| difference(replica))?;
    // The offset is the time of Redis less that of the replica.
    let direction = if worst.clock_offset_us < median { "ahead" } else { "behind" };
    build_finding(
        replicas,
        "clocks_apart",
        |replica| difference(replica) > MAX_CLOCK_DIFFERENCE_US,
        |count| {
            format!(
                "the clocks of {count} of {} replicas differ from most, that of {} is {} s {direction}: logs and \
                 windows in the key format of envoyproxy/ratelimit follow them (synchronize the hosts' clocks)",
                replicas.len(),
                escape_unprintable(&worst.name),
                difference(worst).div_ceil(1_000_000)
            )
        },
    )
}

fn find_different_builds(replicas: &[ReplicaSummary]) -> Option<Finding> {
    let usual = find_most_frequent(replicas.iter().map(|replica| replica.build.as_str()))?;
    build_finding(
        replicas,
        "different_builds",
        |replica| replica.build != usual,
        |count| format!("{count} of {} replicas have another version of tollkeeper than {usual}", replicas.len()),
    )
}

fn find_replicas_with_different_key_forms(replicas: &[ReplicaSummary]) -> Option<Finding> {
    let usual = find_most_frequent(replicas.iter().map(|replica| replica.values.name()))?;
    build_finding(
        replicas,
        "different_values",
        |replica| replica.values.name() != usual,
        |count| {
            format!(
                "{count} of {} replicas publish no rejected keys with {usual} values: the bounds of such keys leave \
                 their rejections out (set TOLLKEEPER_TOP_VALUES and TOLLKEEPER_TOP_KEYS alike)",
                replicas.len()
            )
        },
    )
}
