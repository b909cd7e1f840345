//! What is wrong: a sentence, since when, and what to do about it. Each replica finds its own and publishes it with its
//! summary (`alarms`); the fleet joins equal ones, and adds what one replica does and others do not.
//!
//! Decides: which findings there are between replicas; when rules, settings or clocks differ.
//! Decides: when a replica is silent (12 s).
//! Decides: advice and runbook of each alarm (`ADVICE`).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::summary::ReplicaSummary;
use crate::base::clock::{Time, shorten_in_tests, to_micros};
use crate::base::text::escape_unprintable;

/// A condition that an operator should know, as it holds now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Finding {
    /// Name of the condition, such as `store_lost`.
    pub kind: Cow<'static, str>,
    /// Replicas that it concerns, by name, at most [`MAX_NAMED_REPLICAS`]; none as a replica publishes it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<String>,
    /// What is wrong, and a remedy.
    pub text: String,
    /// What to do first; not published.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub advice: Cow<'static, str>,
    /// Where to read more: a path of the repository and of its site; not published.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub runbook: Cow<'static, str>,
    /// Time at which it was seen first, RFC 3339 in UTC.
    pub since: String,
}

/// Times at which findings were seen first.
#[derive(Debug, Default)]
pub struct FirstSeen(BTreeMap<(Cow<'static, str>, Vec<String>), Time>);

/// Maximum number of findings that a replica publishes.
pub const MAX_FINDINGS: usize = 24;
/// Maximum number of findings of one kind, with texts that differ.
const MAX_TEXTS_OF_KIND: usize = 3;
/// Maximum length of the text of a published finding, in bytes.
pub const MAX_FINDING_TEXT_BYTES: usize = 768;
/// Text of findings of a kind beyond [`MAX_TEXTS_OF_KIND`].
const FURTHER_TEXTS: &str = "these replicas have it too, with other figures: see their own pages";

/// Maximum number of replicas that a finding names.
pub const MAX_NAMED_REPLICAS: usize = 10;
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

/// What to do about a finding, and the page that has more.
pub const ADVICE: [(&str, &str, &str); 21] = [
    ("not_ready", "see the text, and /problems", "docs/runbooks.md#alarm-not-ready"),
    ("store_lost", "see the error in the text, and /store", "docs/runbooks.md#tollkeeper-store-lost"),
    ("server_not_used", "see /store, which names the server's failure", "docs/runbooks.md#tollkeeper-store-errors"),
    ("reload_failed", "mend the file that /problems names, or go back", "docs/runbooks.md#tollkeeper-config-refused"),
    (
        "xds_stream_lost",
        "see xds in /rlconfig/status, and the control plane",
        "docs/runbooks.md#tollkeeper-xds-stream-down",
    ),
    ("rlqs_off", "set TOLLKEEPER_RLQS=true and restart", "docs/quota.md"),
    ("mostly_rejected", "see `tollkeeper top`, then the limit", "docs/runbooks.md#tollkeeper-refusals-surging"),
    (
        "rejections_rose_after_load",
        "see what the load changed, and undo it",
        "docs/runbooks.md#alarm-rejections-rose-after-load",
    ),
    ("no_requests", "see the statistics of Envoy's cluster", "docs/runbooks.md#tollkeeper-envoy-fail-open"),
    ("hot_key", "find out who it is: `tollkeeper top`, `tollkeeper tap`", "docs/runbooks.md#alarm-hot-key"),
    ("unmatched", "compare with `tollkeeper top --unmatched`", "docs/runbooks.md#tollkeeper-nothing-matches"),
    (
        "unmatched_descriptors",
        "compare with `tollkeeper top --unmatched`",
        "docs/runbooks.md#tollkeeper-nothing-matches",
    ),
    (
        "almost_matches_rule",
        "correct the rule, or the descriptor in Envoy",
        "docs/troubleshooting.md#a-limit-does-nothing",
    ),
    ("late", "give the process more CPU, and no limit of it", "docs/runbooks.md#tollkeeper-decisions-slow"),
    ("certificate_expired", "renew the certificate", "docs/runbooks.md#tollkeeper-certificate-expiring"),
    ("certificate_expires", "renew the certificate", "docs/runbooks.md#tollkeeper-certificate-expiring"),
    ("not_publishing", "see whether it runs and reaches Redis", "docs/runbooks.md#tollkeeper-replicas-missing"),
    ("different_rules", "compare /rlconfig/status of the replicas", "docs/runbooks.md#tollkeeper-replicas-differ"),
    ("answers_by_policy", "see /store of these replicas", "docs/runbooks.md#tollkeeper-store-errors"),
    ("clocks_apart", "synchronize the hosts' clocks", "docs/runbooks.md#tollkeeper-clock-skew"),
    ("different_builds", "end the update that is under way", "docs/runbooks.md#tollkeeper-replicas-differ"),
];

/// Advice on other findings, and their page.
const OTHER_ADVICE: (&str, &str) = ("see the text", "docs/operations.md#alarms-of-the-console");

impl Finding {
    /// A finding of a process about itself, or of one replica about others, without a time.
    pub fn new(kind: &'static str, replicas: Vec<String>, text: String) -> Self {
        Self { kind: kind.into(), replicas, text, ..Self::default() }
    }

    /// True for a finding that a replica may have published: its texts are short.
    pub fn is_short(&self) -> bool {
        self.kind.len() <= 64 && self.since.len() <= 40 && self.text.len() <= MAX_FINDING_TEXT_BYTES
    }

    /// The finding with what to do about it.
    fn with_advice(mut self) -> Self {
        let advice = ADVICE.iter().find(|(of, ..)| *of == self.kind).map(|(_, advice, runbook)| (*advice, *runbook));
        let (advice, runbook) = advice.unwrap_or(OTHER_ADVICE);
        (self.advice, self.runbook) = (advice.into(), runbook.into());
        self
    }
}

impl FirstSeen {
    /// Sets since when the findings are there, and forgets those that ended.
    pub fn set_times(&mut self, findings: &mut [Finding], now: Time) {
        let before = std::mem::take(&mut self.0);
        for finding in findings {
            let id = (finding.kind.clone(), finding.replicas.clone());
            let first = before.get(&id).copied().unwrap_or(now);
            finding.since = self.0.entry(id).or_insert(first).to_string();
        }
    }
}

/// Joins what replicas published: equal findings are one, since the earliest, and name the replicas that have it.
pub fn join_findings<'r>(published: impl Iterator<Item = (&'r str, Finding)>) -> Vec<Finding> {
    let mut joined: Vec<Finding> = Vec::new();
    for (replica, mut finding) in published {
        let of_kind = || joined.iter().filter(|known| known.kind == finding.kind);
        if of_kind().count() >= MAX_TEXTS_OF_KIND && !of_kind().any(|known| known.text == finding.text) {
            finding.text = FURTHER_TEXTS.to_owned();
        }
        let known = joined.iter_mut().find(|known| known.kind == finding.kind && known.text == finding.text);
        match known {
            Some(known) => {
                if known.replicas.len() < MAX_NAMED_REPLICAS {
                    known.replicas.push(replica.to_owned());
                }
                known.since = finding.since.min(std::mem::take(&mut known.since));
            }
            None => joined.push(Finding { replicas: vec![replica.to_owned()], ..finding }.with_advice()),
        }
    }
    joined
}

/// Formats the time of day, in UTC: `14:03`.
pub(super) fn format_minute_of_day(time: Time) -> String {
    let minute = time.as_micros() / 60_000_000;
    format!("{:02}:{:02}", minute / 60 % 24, minute % 60)
}

/// Finds what replicas do differently, and what only their sums show. `now` is the time of Redis.
pub fn find_problems(replicas: &[ReplicaSummary], now: Time) -> Vec<Finding> {
    let found = find_differences(replicas, now).into_iter().chain(find_unmatched_descriptors(replicas));
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
pub fn find_differences(replicas: &[ReplicaSummary], now: Time) -> Vec<Finding> {
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
