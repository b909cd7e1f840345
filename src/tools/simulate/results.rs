//! Results of a simulation, collected from its tallies. The field names of the JSON are an interface.
//!
//! Decides: which limits `simulate` calls changed, and their order; the order of keys that it lists.

use serde::Serialize;

use super::simulation::{KeyWithRejectingLimit, RuleReplay, Simulation, Verification};
use super::tally::{
    DelayResults, LimitFigures, LimitLabel, LimitTally, LongestRejectionRun, RejectionRun, ReplayTally, ReplayTotals,
    Timeline, TimelineResults,
};
use crate::telemetry::top_keys::space_saving::SpaceSaving;
use crate::tools::replay::source::SourceSummary;

/// Figures of a simulation.
#[derive(Clone, Debug, Serialize)]
pub struct SimulationResults {
    /// Version of the format.
    pub version: u32,
    /// The traffic.
    pub traffic: TrafficResults,
    /// Speed of the replay.
    pub speed: ReplaySpeed,
    /// Agreement with the record under the recorded rules, if these were replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verification: Option<Verification>,
    /// Reasons why the figures may differ from those of a server.
    pub warnings: Vec<String>,
    /// All requests under the new rules.
    pub new: ReplayTotals,
    /// All requests under the old rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub old: Option<ReplayTotals>,
    /// Changes by request; absent without old rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes: Option<VerdictChangeResults>,
    /// Every limit with traffic, by path.
    pub limits: Vec<LimitResults>,
    /// Top rejected keys; only without old rules.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rejected_keys: Vec<RejectedKeyResults>,
    /// All requests over time.
    pub timeline: TimelineResults,
    /// Conditions of `--fail-if`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<ConditionResult>,
}

/// The replayed traffic.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TrafficResults {
    /// Requests.
    pub requests: u64,
    /// Time of the first request, RFC 3339 in UTC.
    pub first: Option<String>,
    /// Latest time.
    pub last: Option<String>,
    /// Records that the log lost.
    pub dropped: u64,
    /// Rows without a descriptor.
    pub skipped: u64,
    /// Rows too far out of order to be sorted.
    pub late: u64,
    /// Share of keys in the log, 0 to 1; absent without a header.
    pub sample: Option<f64>,
}

/// Speed of a replay, in CPU time of one thread.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ReplaySpeed {
    /// Replayed decisions: one per request and rule set.
    pub decisions: u64,
    /// CPU time of the replay and its statistics, in seconds.
    pub replay_seconds: f64,
    /// CPU time of reading and decoding, in seconds.
    pub decode_seconds: f64,
    /// Replayed decisions per second of CPU time.
    pub decisions_per_second: f64,
    /// Decoded requests per second of CPU time.
    pub decoded_per_second: f64,
}

/// Requests that both rule sets answer, and those whose verdict the new rules change.
#[derive(Clone, Debug, Serialize)]
pub struct VerdictChangeResults {
    /// Requests that both rule sets answer.
    pub compared: u64,
    /// Requests that only the new rules reject.
    pub newly_rejected: u64,
    /// Requests that only the old rules reject.
    pub newly_admitted: u64,
    /// Keys with most newly rejected requests.
    pub newly_rejected_keys: Vec<RejectedKeyResults>,
    /// Keys with most newly admitted requests.
    pub newly_admitted_keys: Vec<RejectedKeyResults>,
}

/// One limit.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LimitResults {
    /// Path, as in `/rlconfig` and metrics.
    pub path: String,
    /// File, line and column of the rule.
    pub location: String,
    /// Name; empty if it has none.
    pub name: String,
    /// The limit in words.
    pub limit: String,
    /// Shadow mode: its rejections are those that it would make.
    pub shadow_mode: bool,
    /// Quota mode.
    pub quota_mode: bool,
    /// Candidate: charged as if it were the only limit of its rule.
    pub candidate: bool,
    /// Difference between the rule sets; absent without one, or without old rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<LimitChange>,
    /// Figures under the new rules; absent if they lack the limit.
    pub new: Option<LimitFigures>,
    /// Figures under the old rules; absent if they lack the limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub old: Option<LimitFigures>,
}

/// Difference of a limit between the old and the new rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitChange {
    /// Only the new rules have it.
    Added,
    /// Only the old rules have it.
    Removed,
    /// Its numbers, algorithm, period or mode differ.
    Changed,
}

impl LimitChange {
    /// Name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Changed => "changed",
        }
    }
}

/// A key with many rejected requests.
#[derive(Clone, Debug, Serialize)]
pub struct RejectedKeyResults {
    /// Path of the limit that rejects it.
    pub limit: String,
    /// `key=value,key=value`.
    pub key: String,
    /// Number of requests, at most.
    pub requests: u64,
    /// Maximum overestimate in `requests`.
    pub error: u64,
}

/// A condition of `--fail-if` with its figure.
#[derive(Clone, Debug, Serialize)]
pub struct ConditionResult {
    /// The condition.
    pub condition: String,
    /// The figure in words.
    pub figure: String,
    /// The condition holds, so the command fails.
    pub fails: bool,
    /// Reason why the figure proves nothing; absent if the condition is judged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_judged: Option<String>,
}

impl ReplaySpeed {
    /// Speed of `decisions` of `requests`, by the CPU time of each part in seconds.
    pub fn new(decisions: u64, requests: u64, replay_seconds: f64, decode_seconds: f64) -> Self {
        let per_second = |count: u64, seconds: f64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        Self {
            decisions,
            replay_seconds,
            decode_seconds,
            decisions_per_second: per_second(decisions, replay_seconds),
            decoded_per_second: per_second(requests, decode_seconds),
        }
    }
}

/// Share of a whole, 0 to 1; 0 of nothing.
pub fn compute_share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Version of the JSON.
const RESULTS_VERSION: u32 = 1;

impl SimulationResults {
    /// Figures of a simulation that has ended; `top` bounds the lists of keys.
    pub fn new(simulation: &Simulation, summary: &SourceSummary, speed: ReplaySpeed, top: usize) -> Self {
        let requests = simulation.requests;
        let old = simulation.old.as_ref();
        let new_tally = simulation.new.tally.as_ref();
        let old_tally = old.and_then(|old| old.tally.as_ref());
        let replays = [old, simulation.verifier.as_ref(), Some(&simulation.new)];
        let verification = replays.into_iter().flatten().find_map(|replay| replay.verification.clone());
        Self {
            version: RESULTS_VERSION,
            traffic: TrafficResults {
                requests,
                first: simulation.span.map(|span| span.first.to_string()),
                last: simulation.span.map(|span| span.last.to_string()),
                dropped: simulation.log.dropped,
                skipped: summary.skipped,
                late: summary.late,
                sample: simulation.log.sample,
            },
            speed,
            verification: verification.filter(|verification| verification.compared > 0),
            warnings: Vec::new(),
            new: build_totals(&simulation.new, requests),
            old: old.map(|old| build_totals(old, requests)),
            changes: old.map(|_| VerdictChangeResults {
                compared: simulation.compared,
                newly_rejected: simulation.newly_rejected,
                newly_admitted: simulation.newly_admitted,
                newly_rejected_keys: list_top_keys(&simulation.top.newly_rejected, new_tally, top),
                newly_admitted_keys: list_top_keys(&simulation.top.newly_admitted, old_tally, top),
            }),
            limits: build_limit_results(new_tally, old_tally),
            rejected_keys: list_top_keys(&simulation.top.rejected, new_tally, top),
            timeline: build_timeline(new_tally.map(|tally| &tally.timeline), old_tally.map(|tally| &tally.timeline)),
            conditions: Vec::new(),
        }
    }
}

fn build_totals(replay: &RuleReplay, requests: u64) -> ReplayTotals {
    let (losses, tally) = (replay.counter_losses(), replay.tally.as_ref());
    let totals = tally.map(|tally| tally.totals).unwrap_or_default();
    ReplayTotals {
        rejected_share: compute_share(totals.rejected, requests),
        evicted_counters: losses.evicted,
        charges_without_counter: losses.without_counter,
        untracked_requests: tally.map_or(0, |tally| tally.keys.untracked),
        ..totals
    }
}

fn build_limit_results(new: Option<&ReplayTally>, old: Option<&ReplayTally>) -> Vec<LimitResults> {
    let news = new.iter().flat_map(|tally| &tally.limits);
    let removed = old.iter().flat_map(|tally| &tally.limits);
    let removed = removed.filter(|limit| new.is_none_or(|new| new.find_by_path(&limit.label.path).is_none()));
    let mut limits: Vec<LimitResults> = news
        .chain(removed)
        .map(|tally| {
            let label = &tally.label;
            let (in_new, in_old) = (find_limit_tally(new, &label.path), find_limit_tally(old, &label.path));
            LimitResults {
                path: label.path.clone(),
                location: label.location.clone(),
                name: label.name.clone(),
                limit: label.text.clone(),
                shadow_mode: label.shadow,
                quota_mode: label.quota,
                candidate: label.candidate,
                change: old.and_then(|_| find_limit_change(in_new, in_old)),
                new: in_new.map(LimitFigures::from_tally),
                old: in_old.map(LimitFigures::from_tally),
            }
        })
        .collect();
    limits.sort_by(|one, two| one.path.cmp(&two.path));
    limits
}

/// Lists limits with those first that differ between the rule sets.
pub fn list_changed_limits_first(limits: &[LimitResults]) -> Vec<&LimitResults> {
    let (changed, others): (Vec<_>, Vec<_>) = limits.iter().partition(|limit| limit.change.is_some());
    [changed, others].concat()
}

fn find_limit_tally<'t>(tally: Option<&'t ReplayTally>, path: &str) -> Option<&'t LimitTally> {
    tally?.find_by_path(path)
}

/// Finds how a limit differs between two rule sets; a limit without traffic counts as absent.
fn find_limit_change(new: Option<&LimitTally>, old: Option<&LimitTally>) -> Option<LimitChange> {
    let compared = |tally: &LimitTally| {
        let LimitLabel { text, shadow, quota, candidate, .. } = &tally.label;
        (text.clone(), *shadow, *quota, *candidate)
    };
    match (new.map(compared), old.map(compared)) {
        (Some(_), None) => Some(LimitChange::Added),
        (None, Some(_)) => Some(LimitChange::Removed),
        (new, old) => (new != old).then_some(LimitChange::Changed),
    }
}

impl LimitFigures {
    fn from_tally(tally: &LimitTally) -> Self {
        let (keys, rejected_keys) = (tally.keys.count(), tally.rejected_keys.count());
        let RejectionRun { requests: run, duration_us } = tally.longest_run;
        Self {
            limit: tally.label.text.clone(),
            rejected_share: compute_share(tally.figures.rejected, tally.figures.requests),
            keys,
            rejected_keys,
            rejected_keys_share: compute_share(rejected_keys, keys).min(1.0),
            keys_are_estimates: tally.keys.is_estimate(),
            longest_run: (run > 0).then(|| LongestRejectionRun {
                requests: run,
                seconds: duration_us as f64 / 1e6,
                key: tally.longest_run_key.to_string(),
            }),
            delays: (tally.delays.count() > 0).then(|| DelayResults {
                requests: tally.delays.count(),
                p50_us: tally.delays.value_at_quantile(0.5),
                p99_us: tally.delays.value_at_quantile(0.99),
                max_us: tally.delays.value_at_quantile(1.0),
            }),
            timeline: tally.timeline.as_ref().map(|of| build_timeline(Some(of), None)),
            ..tally.figures.clone()
        }
    }
}

/// Keys that a replay rejects most; `tally` has the counts of that replay.
fn list_top_keys(
    sketch: &SpaceSaving<KeyWithRejectingLimit>,
    tally: Option<&ReplayTally>,
    top: usize,
) -> Vec<RejectedKeyResults> {
    let path_of = |index: usize| Some(tally?.limits.get(index)?.label.path.clone());
    let mut keys: Vec<RejectedKeyResults> = sketch
        .iter()
        .map(|(_, label, count)| RejectedKeyResults {
            limit: path_of(label.limit).unwrap_or_default(),
            key: label.text.to_string(),
            requests: count.count,
            error: count.error,
        })
        .collect();
    let order =
        |key: &RejectedKeyResults| (std::cmp::Reverse(key.requests - key.error), key.limit.clone(), key.key.clone());
    keys.sort_by_cached_key(order);
    keys.truncate(top);
    keys
}

/// Timeline of a replay beside that of the old rules.
pub fn build_timeline(new: Option<&Timeline>, old: Option<&Timeline>) -> TimelineResults {
    let Some(new) = new else { return TimelineResults::default() };
    let (mut new, mut old) = (new.clone(), old.cloned());
    if let Some(old) = &mut old {
        old.widen_spans(new.span_length_us());
        new.widen_spans(old.span_length_us());
    }
    let rejected = |timeline: &Timeline| timeline.spans().iter().map(|span| span.rejected).collect();
    TimelineResults {
        start: new.start_time().to_string(),
        span_seconds: new.span_length_us() / 1_000_000,
        requests: new.spans().iter().map(|span| span.requests).collect(),
        rejected: rejected(&new),
        rejected_before: old.as_ref().map(rejected),
    }
}
