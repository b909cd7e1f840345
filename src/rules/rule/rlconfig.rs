//! Rules in the format of `/rlconfig`.
//!
//! One line for each limit, in file order, a node before its children. The first limit of a rule is written as
//! envoyproxy/ratelimit writes its only one. Keys that it lacks are appended only if they are not at their default, so
//! that scripts which parse these lines keep working.
//!
//! Decides: how `/rlconfig` shows a limit.

use super::set::RuleSet;
use super::{Rule, RuleAllowance, RuleLimit};
use crate::limit::GlobalScope;
use crate::limit::algorithm::Algorithm;

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
        RuleAllowance::Limits(limits) => {
            limits.iter().enumerate().map(|(index, limit)| format_limit(&rule.limit_path(index), limit)).collect()
        }
    }
}

fn format_limit(path: &str, RuleLimit { limit, active, shadow, quota, .. }: &RuleLimit) -> String {
    if limit.is_concurrent() {
        let (concurrent, period) = (limit.requests_per_unit(), limit.period());
        let mut line = format!(
            "{path}: unit=UNKNOWN requests_per_unit={concurrent}, shadow_mode: {shadow}, quota_mode: {quota}, \
             concurrent: {concurrent}, max_duration: {}s",
            period.micros() / 1_000_000
        );
        if let Some(active) = active {
            line.push_str(&format!(", active: {}", active.spec()));
        }
        return line;
    }
    let unit = limit.period().unit().name().to_ascii_uppercase();
    let requests = limit.requests_per_unit();
    let mut line =
        format!("{path}: unit={unit} requests_per_unit={requests}, shadow_mode: {shadow}, quota_mode: {quota}");
    if limit.period().multiplier() != 1 {
        line.push_str(&format!(", unit_multiplier: {}", limit.period().multiplier()));
    }
    if limit.algorithm() != Algorithm::default() {
        line.push_str(&format!(", algorithm: {}", limit.algorithm()));
    }
    if let Some(window) = limit.calendar_windows() {
        line.push_str(&format!(", window: {}", window.spec()));
    }
    if let Some(ban) = limit.ban() {
        line.push_str(&format!(", ban: {ban}"));
    }
    if let Some(reservations) = limit.reservations() {
        line.push_str(&format!(", reservations: {reservations}"));
    }
    if let Some(active) = active {
        line.push_str(&format!(", active: {}", active.spec()));
    }
    for (key, value) in limit.global_scope().into_iter().flat_map(GlobalScope::rule_file_keys) {
        line.push_str(&format!(", {key}: {value}"));
    }
    line
}
