//! Warnings about `replaces` of names that no limit of the domain has.
//!
//! A name may be that of a limit in another file, so only the whole domain shows it.

use std::collections::HashSet;

use super::plans::CompiledPlan;
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity, escape_for_message, find_similar_name};
use crate::rules::rule::{Domain, Rule, RuleNode};

/// Maximum number of unknown names for which a similar one is searched.
const MAX_SEARCHED_NAMES: usize = 100;

/// Warns about each name that a rule replaces and no limit has.
pub(super) fn warn_about_unknown_names(domain: &Domain, plans: &[CompiledPlan], found: &mut Diagnostics) {
    let rules = rules_below(&domain.descriptors);
    if rules.iter().all(|rule| rule.replaces.is_empty()) {
        return;
    }
    let of_plans = plans.iter().flat_map(CompiledPlan::limit_names);
    let known: HashSet<&str> = rules.iter().flat_map(|rule| rule.allowance.limit_names()).chain(of_plans).collect();
    let mut searched = 0;
    for rule in rules {
        for name in rule.replaces.iter().filter(|name| !known.contains(&***name)) {
            let message =
                format!("`replaces` names '{}', and no limit of this domain has that name", escape_for_message(name));
            searched += 1;
            let near = (searched <= MAX_SEARCHED_NAMES).then(|| find_similar_name(name, known.iter().copied()));
            let hint = match near.flatten() {
                Some(near) => format!("did you mean `{}`?", escape_for_message(near)),
                None => "give the limit that it replaces this `name`, or remove it".to_owned(),
            };
            found.push(Diagnostic::at_location(Severity::Warning, &rule.location, message, hint));
        }
    }
}

fn rules_below(nodes: &[RuleNode]) -> Vec<&Rule> {
    let mut rules = Vec::new();
    let mut waiting: Vec<&RuleNode> = nodes.iter().collect();
    while let Some(node) = waiting.pop() {
        rules.extend(&node.rule);
        waiting.extend(node.descriptors.iter());
    }
    rules
}
