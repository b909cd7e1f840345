//! Rules as `/rlconfig` prints them.
//!
//! One line for each limit, in file order, a node before its children. The first limit of a rule is written as
//! envoyproxy/ratelimit writes its only one; what that program lacks is appended, and only where it is not the default,
//! so that scripts which read these lines keep working.

use crate::limit::Algorithm;
use crate::rule::{Allowance, Domain, Node, Rule, RuleLimit};

/// The lines of `/rlconfig`, without line breaks at their ends.
pub fn rlconfig_lines(domains: &[Domain]) -> Vec<String> {
    let mut lines = Vec::new();
    for domain in domains {
        add(&domain.descriptors, &mut lines);
    }
    lines
}

fn add(nodes: &[Node], lines: &mut Vec<String>) {
    for node in nodes {
        match node.rule.as_ref().map(|rule| (rule, &rule.allowance)) {
            Some((rule, Allowance::Unlimited { requests_per_unit, shadow, quota, .. })) => lines.push(format!(
                "{}: unit=UNKNOWN requests_per_unit={requests_per_unit}, shadow_mode: {shadow}, quota_mode: {quota}",
                rule.path
            )),
            Some((rule, Allowance::Limits(limits))) => {
                lines.extend(limits.iter().enumerate().map(|(index, limit)| line(&limit_path(rule, index), limit)));
            }
            None => {}
        }
        add(&node.descriptors, lines);
    }
}

/// The name of one limit of a rule in `/rlconfig` and metrics: the rule's path for the first, with `.<name>`, or else
/// `.<period>_<algorithm>`, appended for later ones.
pub fn limit_path(rule: &Rule, index: usize) -> String {
    match &rule.allowance {
        Allowance::Limits(limits) if index > 0 => match limits.get(index) {
            Some(RuleLimit { name, .. }) if !name.is_empty() => format!("{}.{name}", rule.path),
            Some(RuleLimit { limit, .. }) => format!("{}.{}_{}", rule.path, limit.period(), limit.algorithm()),
            None => rule.path.clone(),
        },
        _ => rule.path.clone(),
    }
}

fn line(path: &str, RuleLimit { limit, shadow, quota, .. }: &RuleLimit) -> String {
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
    line
}
