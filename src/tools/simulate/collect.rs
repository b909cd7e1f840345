//! Collection of the figures of a simulation that has ended.

use super::key_tallies::RejectionRun;
use super::limit_tally::LimitTally;
use super::replay_tally::ReplayTally;
use super::results::{
    ChangeResults, DelayResults, LimitFigures, LimitResults, RejectedKeyResults, ReplaySpeed, ReplayTotals, RunResults,
    SimulationResults, TimelineResults, TrafficResults, share,
};
use super::simulation::{KeyOfLimit, RuleReplay, Simulation};
use super::timeline::Timeline;
use crate::telemetry::top_keys::space_saving::SpaceSaving;
use crate::tools::replay::source::SourceSummary;

/// Version of the JSON.
const VERSION: u32 = 1;

impl SimulationResults {
    /// Figures of a simulation that has ended; `top` bounds the lists of keys.
    pub fn new(simulation: &Simulation, summary: SourceSummary, speed: ReplaySpeed, top: usize) -> Self {
        let requests = simulation.requests;
        let old = simulation.old.as_ref();
        let new_tally = simulation.new.tally.as_ref();
        let old_tally = old.and_then(|old| old.tally.as_ref());
        let verification = old.and_then(|old| old.verification.clone()).or(simulation.new.verification.clone());
        Self {
            version: VERSION,
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
            new: totals(&simulation.new, requests),
            old: old.map(|old| totals(old, requests)),
            changes: old.map(|_| ChangeResults {
                newly_rejected: simulation.newly_rejected,
                newly_admitted: simulation.newly_admitted,
                newly_rejected_keys: top_keys(&simulation.top.newly_rejected, new_tally, top),
                newly_admitted_keys: top_keys(&simulation.top.newly_admitted, old_tally, top),
            }),
            limits: limits(new_tally, old_tally),
            rejected_keys: top_keys(&simulation.top.rejected, new_tally, top),
            timeline: timeline(new_tally.map(|tally| &tally.timeline), old_tally.map(|tally| &tally.timeline)),
            conditions: Vec::new(),
        }
    }
}

fn totals(replay: &RuleReplay, requests: u64) -> ReplayTotals {
    let losses = replay.losses();
    let mut totals = ReplayTotals {
        evicted_counters: losses.evicted,
        charges_without_counter: losses.without_counter,
        ..ReplayTotals::default()
    };
    if let Some(tally) = &replay.tally {
        totals.rejected = tally.rejected;
        totals.rejected_share = share(tally.rejected, requests);
        totals.unmatched_descriptors = tally.unmatched;
        totals.failed = tally.failed;
        totals.untracked_requests = tally.keys.untracked;
    }
    totals
}

fn limits(new: Option<&ReplayTally>, old: Option<&ReplayTally>) -> Vec<LimitResults> {
    let news = new.iter().flat_map(|tally| &tally.limits);
    let removed = old.iter().flat_map(|tally| &tally.limits);
    let removed = removed.filter(|limit| new.is_none_or(|new| new.of_path(&limit.label.path).is_none()));
    let mut limits: Vec<LimitResults> = news
        .chain(removed)
        .map(|tally| {
            let label = &tally.label;
            let figures_in = |tally: Option<&ReplayTally>| Some(LimitFigures::of(tally?.of_path(&label.path)?));
            LimitResults {
                path: label.path.clone(),
                location: label.location.clone(),
                name: label.name.clone(),
                limit: label.text.clone(),
                shadow_mode: label.shadow,
                quota_mode: label.quota,
                candidate: label.candidate,
                new: figures_in(new),
                old: figures_in(old),
            }
        })
        .collect();
    limits.sort_by(|one, two| one.path.cmp(&two.path));
    limits
}

impl LimitFigures {
    fn of(tally: &LimitTally) -> Self {
        let (keys, rejected_keys) = (tally.keys.count(), tally.rejected_keys.count());
        let RejectionRun { requests: run, duration_us } = tally.longest_run;
        Self {
            limit: tally.label.text.clone(),
            requests: tally.requests,
            hits: tally.hits,
            peeks: tally.peeks,
            refunds: tally.refunds,
            rejected: tally.rejected,
            rejected_share: share(tally.rejected, tally.requests),
            rejected_here_only: tally.changed,
            keys,
            rejected_keys,
            rejected_keys_share: share(rejected_keys, keys).min(1.0),
            keys_are_estimates: tally.keys.is_estimate(),
            longest_run: (run > 0).then(|| RunResults {
                requests: run,
                seconds: duration_us as f64 / 1e6,
                key: tally.longest_run_key.to_string(),
            }),
            delays: tally.delays.as_ref().map(|delays| DelayResults {
                requests: delays.len(),
                p50_us: delays.value_at_quantile(0.5),
                p99_us: delays.value_at_quantile(0.99),
                max_us: delays.max(),
            }),
            timeline: tally.timeline.as_ref().map(|of| timeline(Some(of), None)),
        }
    }
}

/// Keys that a replay rejects most; `tally` has the counts of that replay.
fn top_keys(sketch: &SpaceSaving<KeyOfLimit>, tally: Option<&ReplayTally>, top: usize) -> Vec<RejectedKeyResults> {
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
fn timeline(new: Option<&Timeline>, old: Option<&Timeline>) -> TimelineResults {
    let Some(new) = new else { return TimelineResults::default() };
    let (mut new, mut old) = (new.clone(), old.cloned());
    if let Some(old) = &mut old {
        old.widen(new.span_us());
        new.widen(old.span_us());
    }
    let rejected = |timeline: &Timeline| timeline.spans().iter().map(|span| span.rejected).collect();
    TimelineResults {
        start: new.start().to_string(),
        span_seconds: new.span_us() / 1_000_000,
        requests: new.spans().iter().map(|span| span.requests).collect(),
        rejected: rejected(&new),
        rejected_before: old.as_ref().map(rejected),
    }
}
