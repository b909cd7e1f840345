//! The rule, limit or policy that rejected a descriptor, as text.

use crate::decide::log::record::{
    DecisionSource, DescriptorRecord, GlobalRecord, LimitRecord, OverrideRecord, RecordedVerdict, RuleRecord,
};
use crate::limit::StorePolicy;
use crate::limit::period::period_in_words;
use crate::limit::regions::percent_text;

use super::remedy::rejects;

/// Formats a limit: `10 per minute token_bucket, bucket_size 20 (burst)`.
pub fn limit_text(limit: &LimitRecord<'_>) -> String {
    let period = period_in_words(limit.unit.name(), limit.unit_multiplier);
    let mut text = format!("{} per {period} {}", limit.requests_per_unit, limit.algorithm);
    if let Some(capacity) = limit.capacity {
        let key = limit.algorithm.properties().capacity.key().unwrap_or("capacity");
        text += &format!(", {key} {capacity}");
    }
    if let Some(GlobalRecord { reserve_milli_percent, max_overshoot, on_region_loss }) = limit.global {
        let reserve = percent_text(reserve_milli_percent);
        let policy = on_region_loss.name();
        text += &format!(", scope global, reserve {reserve}, max_overshoot {max_overshoot}, on_region_loss {policy}");
    }
    if !limit.name.is_empty() {
        text += &format!(" ({})", &*limit.name);
    }
    text
}

/// Formats a rule: `shop.login (rules.yaml:7)`.
pub fn rule_text(rule: &RuleRecord<'_>) -> String {
    let path = &*rule.path;
    match (&rule.file, rule.line, &rule.resource) {
        (Some(file), Some(line), _) => format!("{path} ({}:{line})", &**file),
        (_, _, Some(resource)) => format!("{path} (resource {})", &**resource),
        (_, _, None) => path.to_owned(),
    }
}

/// Formats the origin of the limits of a descriptor.
pub fn origin_text(descriptor: &DescriptorRecord<'_>) -> String {
    match (&descriptor.rule, &descriptor.limit_override) {
        (Some(rule), _) => rule_text(rule),
        (None, Some(OverrideRecord { requests_per_unit, unit, multiplier })) => {
            let period = period_in_words(unit, (*multiplier).max(1));
            format!("the limit that came with the request: {requests_per_unit} per {period}")
        }
        (None, None) => "no rule".to_owned(),
    }
}

/// Formats the part of the service that decided.
pub fn decider_text(descriptor: &DescriptorRecord<'_>) -> Option<String> {
    Some(match descriptor.decided_by? {
        DecisionSource::Counter => "counter".to_owned(),
        DecisionSource::OverLimitCache => "over-limit cache of the process".to_owned(),
        DecisionSource::Share => "share of an eventual limit in the process".to_owned(),
        DecisionSource::Lease => "lease of an eventual limit in the process".to_owned(),
        DecisionSource::Policy => policy_text(descriptor),
    })
}

fn policy_text(descriptor: &DescriptorRecord<'_>) -> String {
    let policy = descriptor.policy.map_or("unknown", StorePolicy::name);
    let reason = descriptor.reason.as_ref().map_or("unknown", |reason| &**reason);
    format!("on_store_error: {policy}, as the store failed ({reason})")
}

/// Causes of the rejection of a descriptor, each with its rule; empty if it is not rejected.
pub fn causes(descriptor: &DescriptorRecord<'_>) -> Vec<String> {
    if descriptor.verdict != RecordedVerdict::OverLimit {
        return Vec::new();
    }
    let origin = origin_text(descriptor);
    let by_policy = descriptor.decided_by == Some(DecisionSource::Policy);
    let suffix = if by_policy { format!(", {}", policy_text(descriptor)) } else { String::new() };
    let rejecting = descriptor.limits.iter().filter(|limit| rejects(limit));
    let mut causes: Vec<String> = rejecting.map(|limit| format!("{origin}, {}{suffix}", limit_text(limit))).collect();
    if causes.is_empty() {
        causes.push(format!("{origin}{suffix}"));
    }
    causes
}
