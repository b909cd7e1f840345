//! Rules in the format of `/rlconfig`.
//!
//! One line for each limit, in file order, a node before its children. The first limit of a rule is written as
//! envoyproxy/ratelimit writes its only one. Keys that it lacks are appended only if they are not at their default, so
//! that scripts which parse these lines keep working.
//!
//! Decides: how `/rlconfig` shows a limit.

use super::decompile::LimitPlace;
use super::set::RuleSet;
use super::{Rule, RuleAllowance, RuleLimit};
use crate::limit::algorithm::{Algorithm, CapacityRuleKey};

/// Returns the lines of `/rlconfig`, without line breaks.
pub fn format_rlconfig(rules: &RuleSet) -> Vec<String> {
    rules.rules().flat_map(|compiled| format_rule(&compiled.rule)).collect()
}

fn format_rule(rule: &Rule) -> Vec<String> {
    match &rule.allowance {
        RuleAllowance::Unlimited { requests_per_unit, shadow, quota, .. } => vec![format!(
            "{}: unit=UNKNOWN requests_per_unit={requests_per_unit}, shadow_mode: {shadow}, quota_mode: {quota}",
            rule.path
        )],
        RuleAllowance::Limits(limits) => LimitPlace::of_limits(limits)
            .enumerate()
            .map(|(index, (limit, place))| format_limit(&rule.limit_path(index), limit, place))
            .collect(),
    }
}

/// Keys that envoyproxy/ratelimit writes in its own way, or not at all.
const KEYS_OF_LINE: [&str; 6] = ["unit", "requests_per_unit", "shadow_mode", "quota_mode", "name", "replaces"];

fn format_limit(path: &str, limit: &RuleLimit, place: LimitPlace) -> String {
    let unit = match limit.limit.is_concurrent() {
        true => "UNKNOWN".to_owned(),
        false => limit.limit.period().unit().name().to_ascii_uppercase(),
    };
    let (requests, RuleLimit { shadow, quota, .. }) = (limit.limit.requests_per_unit(), limit);
    let mut line =
        format!("{path}: unit={unit} requests_per_unit={requests}, shadow_mode: {shadow}, quota_mode: {quota}");
    let default_capacity = match limit.limit.algorithm().properties().capacity {
        CapacityRuleKey::QueueSize => 1,
        CapacityRuleKey::BucketSize | CapacityRuleKey::RequestsPerUnit => requests,
    };
    for (key, value) in limit.rule_file_keys(place) {
        let is_default = match key {
            "algorithm" => value == Algorithm::default().name(),
            "bucket_size" | "queue_size" => limit.limit.capacity() == default_capacity,
            _ => false,
        };
        if !is_default && !KEYS_OF_LINE.contains(&key) {
            line.push_str(&format!(", {key}: {value}"));
        }
    }
    line
}
