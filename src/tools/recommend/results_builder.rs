//! Figures of a recommendation from its parts.
//!
//! Decides: warnings of `recommend`.

use std::collections::BTreeSet;

use super::demand::{DemandCollector, ExistingLimit, LimitDemand, RecordedRejections};
use super::recommendation::{Recommendation, RejectedKeysGoal, SmallestLimit, build_limit_timeline};
use super::results::{
    ExistingLimitResults, RecommendationResults, RejectionGoalResults, SmallestLimitResults, TrafficBasisResults,
};
use crate::base::text::escape_unprintable;
use crate::limit::Consistency;
use crate::limit::algorithm::CapacityRuleKey;
use crate::rules::rule::RuleLimit;
use crate::rules::rule::decompile::{LimitPlace, RulePath, format_plan_yaml, format_rule_yaml};
use crate::tools::replay::replayer::CounterLosses;
use crate::tools::simulate::results::compute_share;
use crate::tools::simulate::simulation::LogProperties;

/// Version of the JSON.
const RESULTS_VERSION: u32 = 2;

/// Traffic of a recommendation.
#[derive(Clone, Debug)]
pub struct TrafficBasis {
    /// Properties of the log.
    pub log: LogProperties,
    /// Number of processes.
    pub processes: u64,
    /// Counters that the first replay lost.
    pub losses: CounterLosses,
    /// Requests of all rules that were read.
    pub requests: u64,
    /// Memory was full after these requests, and the rest was left out.
    pub is_cut: bool,
    /// Warnings about the files.
    pub warnings: Vec<String>,
}

impl TrafficBasis {
    /// Takes the basis from a collector; `warnings` are about the files.
    pub fn new(collector: &DemandCollector, is_cut: bool, warnings: Vec<String>) -> Self {
        let processes: &BTreeSet<_> = &collector.processes;
        Self {
            log: collector.log.clone(),
            processes: processes.len() as u64,
            losses: collector.counter_losses(),
            requests: collector.requests,
            is_cut,
            warnings,
        }
    }
}

/// Parts that the figures of a recommendation are built from.
#[derive(Clone, Copy, Debug)]
pub struct RecommendationParts<'a> {
    /// Path of the limit.
    pub path: &'a str,
    /// Descriptors of its rule.
    pub entries: Option<&'a RulePath>,
    /// The demand.
    pub demand: &'a LimitDemand,
    /// The limit that is in the rules.
    pub asked: &'a ExistingLimit,
    /// The goal.
    pub goal: RejectedKeysGoal,
    /// The traffic.
    pub basis: &'a TrafficBasis,
    /// The limits found.
    pub recommendation: &'a Recommendation,
}

impl RecommendationResults {
    /// Figures of a recommendation.
    pub fn new(parts: RecommendationParts<'_>) -> Self {
        let RecommendationParts { path, demand, asked, goal, recommendation, .. } = parts;
        let keys = demand.keys as u64;
        let rejected_now = recommendation.rejected_now;
        let limits = recommendation.limits.iter().enumerate();
        let limits = limits.map(|(index, found)| build_smallest_limit(found, keys, index == 0));
        Self {
            version: RESULTS_VERSION,
            rule: ExistingLimitResults {
                path: path.to_owned(),
                location: asked.location.clone(),
                limit: match asked.active {
                    Some(active) => format!("{}, active {}", asked.limit, active.spec()),
                    None => asked.limit.to_string(),
                },
                rejected_keys: rejected_now,
                rejected_keys_share: compute_share(rejected_now, keys),
            },
            basis: build_traffic_basis(parts),
            goal: RejectionGoalResults {
                rejected_keys_share: match goal {
                    RejectedKeysGoal::Keys(_) => None,
                    RejectedKeysGoal::Billionths(of) => Some(of as f64 / RejectedKeysGoal::BILLIONTHS_IN_WHOLE as f64),
                },
                rejected_keys: recommendation.allowed,
            },
            warnings: collect_warnings(parts),
            uses: recommendation.uses.clone(),
            left_out_periods: recommendation.left_out_periods.clone(),
            limits: limits.collect(),
            timeline: recommendation.limits.first().map(|found| build_limit_timeline(demand, &found.limit)),
            yaml: format_yaml_to_paste(parts),
        }
    }
}

fn build_smallest_limit(found: &SmallestLimit, keys: u64, recommended: bool) -> SmallestLimitResults {
    let SmallestLimit { limit, rejected_keys } = *found;
    let capacity = |key| (limit.algorithm().properties().capacity == key).then(|| limit.capacity());
    SmallestLimitResults {
        algorithm: limit.algorithm().name(),
        period: limit.period().to_string(),
        requests_per_unit: limit.requests_per_unit(),
        bucket_size: capacity(CapacityRuleKey::BucketSize),
        queue_size: capacity(CapacityRuleKey::QueueSize),
        rejected_keys,
        rejected_keys_share: compute_share(rejected_keys, keys),
        recommended,
    }
}

fn build_traffic_basis(RecommendationParts { demand, basis, .. }: RecommendationParts<'_>) -> TrafficBasisResults {
    let totals = &demand.totals;
    let span = demand.span;
    TrafficBasisResults {
        keys: demand.keys as u64,
        totals: totals.clone(),
        first: span.map_or_else(String::new, |span| span.first.to_string()),
        last: span.map_or_else(String::new, |span| span.last.to_string()),
        span_seconds: span.map_or(0.0, |span| span.last.since_us(span.first) as f64 / 1e6),
        processes: basis.processes,
        sample: basis.log.sample,
        dropped: basis.log.dropped,
        already_rejected: (totals.answered > 0).then(|| RecordedRejections {
            share: compute_share(totals.rejections.requests, totals.answered),
            ..totals.rejections.clone()
        }),
    }
}

fn format_yaml_to_paste(parts: RecommendationParts<'_>) -> Option<String> {
    let RecommendationParts { path, entries, asked, recommendation, .. } = parts;
    let limit = recommendation.limits.first()?.limit;
    let global = asked.limit.global_scope().and_then(|scope| limit.with_global_scope(scope));
    let limit = global.unwrap_or(limit);
    let reserving = asked.limit.reservations().map(|reservations| limit.with_reservations(reservations));
    let limit = reserving.unwrap_or(limit).with_max_wait_of(&asked.limit);
    let mut pasted = RuleLimit { name: asked.name.clone(), active: asked.active, ..RuleLimit::from(limit) }
        .rule_file_keys(LimitPlace::Sole);
    // It stays as it is.
    pasted.retain(|(key, _)| *key != "count_rejected");
    if let Some(plan) = &asked.plan {
        let text = format_plan_yaml(entries?, plan, pasted);
        return Some(format!(
            "# {}: all rules with the plan get it; other keys and limits of the plan stay as they are\n{text}",
            escape_unprintable(path)
        ));
    }
    let text = format_rule_yaml(entries?, pasted);
    Some(format!("# {}: other keys and limits of the rule stay as they are\n{text}", escape_unprintable(path)))
}

fn collect_warnings(parts: RecommendationParts<'_>) -> Vec<String> {
    let RecommendationParts { demand, asked, basis, recommendation, .. } = parts;
    let mut warnings = basis.warnings.clone();
    let mut warn = |applies: bool, text: String| {
        if applies {
            warnings.push(text);
        }
    };
    let totals = &demand.totals;
    warn(
        totals.rejections.requests > 0,
        "rejected requests are part of the use, but clients may have asked for more (raise the limit, or record in \
         shadow mode)"
            .to_owned(),
    );
    warn(
        totals.answered == 0,
        "the traffic has no answers: requests that were rejected before it was recorded are unknown".to_owned(),
    );
    warn(
        recommendation.is_short,
        format!("the traffic is shorter than two periods ({}): use in a whole one may be higher", asked.limit.period()),
    );
    let keys = demand.keys as u64;
    warn(
        recommendation.allowed == 0
            && !matches!(parts.goal, RejectedKeysGoal::Keys(0) | RejectedKeysGoal::Billionths(0)),
        format!("too few keys for this share ({keys}): no key is rejected, so the busiest one decides"),
    );
    warn(
        basis.is_cut,
        format!("memory was full after {} requests: the rest was left out (raise --memory)", basis.requests),
    );
    let untracked = totals.untracked;
    warn(untracked > 0, format!("{untracked} requests of keys beyond --max-keys were left out (raise it)"));
    let overrides = totals.overrides;
    warn(overrides > 0, format!("{overrides} descriptors brought a limit of their own and were left out"));
    let own = totals.own_counters;
    warn(own > 1, format!("{own} processes counted in their own memory: a limit is for each of them"));
    let lost = basis.losses.without_counter;
    warn(lost > 0, format!("{lost} charges found no room for a counter and were left out (raise --memory)"));
    let eventual = matches!(asked.limit.consistency(), Consistency::Eventual(_));
    warn(eventual, "the limit has `consistency: eventual`, and was replayed as strict".to_owned());
    let global = asked.limit.global_scope().is_some();
    warn(global, "the limit has `scope: global`, and was replayed as one limit without regions".to_owned());
    let recommended = recommendation.limits.first();
    let remains_global = |scope| recommended.is_none_or(|found| found.limit.with_global_scope(scope).is_some());
    warn(
        asked.limit.global_scope().is_some_and(|scope| !remains_global(scope)),
        "the recommended limit cannot have `scope: global`, so the rule to paste is for one region".to_owned(),
    );
    warnings
}
