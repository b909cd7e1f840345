//! Sorts the paths of a domain's rules by key, for `matching: { order: any }`.
//!
//! A path is all descriptors down to one that has a rule, or that exempts its values. Descriptors with one key are
//! sorted by kind and text, because their order means nothing either. The rules get the names of their sorted paths. Of
//! patterns that meet at one level, the one that comes first in the files stays first.

use std::collections::HashMap;

use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity, escape_for_message};
use crate::rules::rule::value_pattern::has_star;
use crate::rules::rule::{Domain, RuleNode};

/// A node of the new tree.
struct SortedNode {
    /// Without descriptors.
    node: RuleNode,
    below: SortedLevel,
}

/// Nodes of one level of the new tree, by composite key.
#[derive(Default)]
struct SortedLevel {
    nodes: Vec<SortedNode>,
    by_composite: HashMap<String, usize>,
}

/// Sorts the rules of a domain; reports keys that cannot be sorted, and paths that become the same.
pub(super) fn sort_rules(domain: &mut Domain, found: &mut Diagnostics) {
    let mut sorted = SortedLevel::default();
    for node in std::mem::take(&mut domain.descriptors).into_vec() {
        add_sorted_paths(node, &mut Vec::new(), &mut sorted, &domain.name, found);
    }
    domain.descriptors = sorted.into_nodes().into();
}

/// Adds the paths through `node`; `above` has the nodes before it, without descriptors.
fn add_sorted_paths(
    mut node: RuleNode,
    above: &mut Vec<RuleNode>,
    sorted: &mut SortedLevel,
    domain: &str,
    found: &mut Diagnostics,
) {
    if has_star(&node.key) {
        let message = format!("a `*` in the key '{}' with `order: any`", escape_for_message(&node.key));
        let hint = "write the keys out: entries are sorted by key";
        found.push(Diagnostic::at_location(Severity::Error, &node.location, message, hint));
    }
    let below = std::mem::take(&mut node.descriptors);
    let step = RuleNode { rule: None, exempt: false, ..node.clone() };
    if node.rule.is_some() || node.exempt {
        // The rule belongs to the path, not to the descriptor that has it.
        let (mut rule, exempt) = (node.rule.take(), std::mem::take(&mut node.exempt));
        let mut numbered: Vec<(usize, RuleNode)> = above.iter().cloned().chain([node]).enumerate().collect();
        let location = step.location.clone();
        numbered.sort_by_cached_key(|(_, node)| (node.key.clone(), node.match_kind() as u8, node.composite_key()));
        if let Some(choices) = rule.as_mut().and_then(|rule| rule.plan.as_mut()).and_then(|plan| plan.choices.as_mut())
        {
            choices.entry = numbered.iter().position(|(index, _)| *index == choices.entry).unwrap_or(choices.entry);
        }
        let mut path: Vec<RuleNode> = numbered.into_iter().map(|(_, node)| node).collect();
        if let Some(last) = path.last_mut() {
            (last.rule, last.exempt, last.location) = (rule, exempt, location);
        }
        sorted.add_path(path, domain, found);
    }
    above.push(step);
    for child in below.into_vec() {
        add_sorted_paths(child, above, sorted, domain, found);
    }
    above.pop();
}

impl SortedLevel {
    fn add_path(&mut self, path: Vec<RuleNode>, domain: &str, found: &mut Diagnostics) {
        let name = path.iter().fold(domain.to_owned(), |name, node| format!("{name}.{}", node.composite_key()));
        let mut level = self;
        let last = path.len().saturating_sub(1);
        for (depth, mut node) in path.into_iter().enumerate() {
            if let Some(rule) = &mut node.rule {
                rule.path.clone_from(&name);
                rule.plan_rules_mut().for_each(|rule| rule.path.clone_from(&name));
            }
            let composite = node.composite_key();
            let at = level.by_composite.get(&composite).copied();
            let at = at.unwrap_or_else(|| {
                level.by_composite.insert(composite, level.nodes.len());
                let plain = RuleNode { rule: None, exempt: false, ..node.clone() };
                level.nodes.push(SortedNode { node: plain, below: Self::default() });
                level.nodes.len() - 1
            });
            let SortedNode { node: known, below } = &mut level.nodes[at];
            report_keys_set_differently(known, &node, found);
            if depth == last {
                if known.rule.is_some() || known.exempt {
                    let message = format!("with `order: any`, '{}' is there twice", escape_for_message(&name));
                    let hint = format!("the first is at {}; remove one", known.location);
                    found.push(Diagnostic::at_location(Severity::Error, &node.location, message, hint));
                }
                (known.rule, known.exempt, known.location) = (node.rule.take(), node.exempt, node.location);
            }
            level = below;
        }
    }

    fn into_nodes(self) -> Vec<RuleNode> {
        let node = |SortedNode { node, below }| RuleNode { descriptors: below.into_nodes().into(), ..node };
        self.nodes.into_iter().map(node).collect()
    }
}

/// Reports keys that two descriptors set differently, which become one.
fn report_keys_set_differently(known: &RuleNode, node: &RuleNode, found: &mut Diagnostics) {
    for (key, differs) in [
        ("share_threshold", known.share_threshold != node.share_threshold),
        ("value_to_metric", known.value_to_metric != node.value_to_metric),
    ] {
        if differs {
            let message =
                format!("with `order: any`, this is the descriptor at {} with another `{key}`", known.location);
            found.push(Diagnostic::at_location(Severity::Error, &node.location, message, "set it the same in both"));
        }
    }
}
