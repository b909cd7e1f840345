//! Warnings that need the whole domain: rules that no request reaches, and `replaces` of unknown names.
//!
//! A rule is not reached if other rules of its level match first. Only what can be decided is reported: a wildcard that
//! an earlier one covers, lists and networks that earlier patterns contain, everything behind `*`. Without
//! backtracking, also a rule below a less exact match, for the values of a more exact one that has other rules below.
//!
//! A name in `replaces` may be that of a limit in another file, so it is looked for in all limits of the domain.
//!
//! Decides: which rules are said never to match (`warn_about_hidden_rules`); unknown names in `replaces`.

use std::collections::{HashMap, HashSet};

use super::plans::CompiledPlan;
use crate::limit::request::Entry;
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity, escape_for_message, find_similar_name};
use crate::rules::rule::network::{Network, NetworkIndex};
use crate::rules::rule::patterns::{Patterns, PatternsBuilder};
use crate::rules::rule::value_pattern::{MatchKind, ValuePattern};
use crate::rules::rule::value_pattern::{MatchPattern, Operator};
use crate::rules::rule::{Domain, Rule, RuleNode};

/// Maximum number of pairs of rules of one level that are compared for rules below.
const MAX_COMPARED_PAIRS: usize = 1_000_000;

/// Warns about the rules of a domain that no request reaches.
pub(super) fn warn_about_hidden_rules(domain: &Domain, found: &mut Diagnostics) {
    let mut waiting = vec![domain.descriptors.as_slice()];
    while let Some(nodes) = waiting.pop() {
        let has_patterns = nodes.iter().any(|node| match node.match_kind() {
            MatchKind::Wildcard | MatchKind::Match => true,
            MatchKind::Exact | MatchKind::Any => false,
        });
        if has_patterns {
            RuleLevel::new(nodes, domain.matching.backtrack).warn_about_covered_rules(found);
        }
        if !domain.matching.backtrack {
            warn_about_hidden_subtrees(nodes, found);
        }
        waiting.extend(nodes.iter().map(|node| node.descriptors.as_slice()).filter(|below| !below.is_empty()));
    }
}

/// Rules of one level; a rule is named by its index.
struct RuleLevel<'n> {
    nodes: &'n [RuleNode],
    patterns: Option<Box<Patterns>>,
    exact: HashMap<String, u32>,
    networks: HashMap<&'n str, NetworkIndex<u32>>,
    backtrack: bool,
}

impl<'n> RuleLevel<'n> {
    fn new(nodes: &'n [RuleNode], backtrack: bool) -> Self {
        let mut builder = PatternsBuilder::default();
        let mut networks: HashMap<&str, Vec<(Network, u32)>> = HashMap::new();
        let mut exact = HashMap::new();
        for (index, node) in (0_u32..).zip(nodes) {
            match (&node.value, node.match_kind()) {
                (ValuePattern::Match(pattern), _) => {
                    // Expressions are not compared, and automata are costly.
                    if !matches!(pattern.operator, Operator::Regex(_)) {
                        builder.add_operator(index, node.key.as_bytes(), pattern);
                    }
                    if let (Operator::Cidr(list), false) = (&pattern.operator, pattern.negated) {
                        networks.entry(&node.key).or_default().extend(list.iter().map(|one| (*one, index)));
                    }
                }
                (_, MatchKind::Wildcard) => builder.add_wildcard(index, node.composite_key().as_bytes()),
                (_, MatchKind::Exact) => {
                    exact.insert(node.composite_key(), index);
                }
                (_, MatchKind::Match | MatchKind::Any) => {}
            }
        }
        let networks = networks.into_iter().map(|(key, networks)| (key, NetworkIndex::new(networks))).collect();
        Self { nodes, patterns: builder.build(), exact, networks, backtrack }
    }

    fn warn_about_covered_rules(&self, found: &mut Diagnostics) {
        let reached_by_key: HashMap<&str, HashSet<u32>> =
            self.networks.iter().map(|(key, index)| (*key, index.reachable_patterns().collect())).collect();
        for (index, node) in (0_u32..).zip(self.nodes) {
            let covering = match &node.value {
                ValuePattern::Match(pattern) => {
                    let is_reached = reached_by_key.get(&*node.key).is_some_and(|reached| reached.contains(&index));
                    self.find_wildcard_covering_key(node, index)
                        .or_else(|| self.find_rule_covering_pattern(node, index, pattern, is_reached))
                }
                ValuePattern::Any | ValuePattern::Exact(_) | ValuePattern::Wildcard(_) => match node.match_kind() {
                    MatchKind::Exact => None,
                    // A wildcard goes before a bare key wherever it stands.
                    MatchKind::Any => self.find_wildcard_covering_key(node, u32::MAX),
                    MatchKind::Wildcard | MatchKind::Match => {
                        self.first_matching_wildcard(&node.composite_key()).filter(|first| *first < index)
                    }
                },
            };
            if let Some(first) = covering.and_then(|first| self.nodes.get(first as usize))
                && self.hides_once_covered(first, node)
            {
                warn_about_covered_rule(node, first, found);
            }
        }
    }

    /// Returns `true` if a rule that matches whenever `hidden` does keeps it from being reached.
    fn hides_once_covered(&self, first: &RuleNode, hidden: &RuleNode) -> bool {
        !self.backtrack || (first.descriptors.is_empty() && hidden.descriptors.is_empty())
    }

    fn first_matching_wildcard(&self, composite: &str) -> Option<u32> {
        self.patterns.as_ref()?.first_matching_wildcard(composite.as_bytes())
    }

    /// Returns a wildcard before `index` that matches every value of the key.
    fn find_wildcard_covering_key(&self, node: &RuleNode, index: u32) -> Option<u32> {
        // What matches a `*` as a character matches any text in its place.
        self.first_matching_wildcard(&format!("{}_*", node.key)).filter(|first| *first < index)
    }

    /// Returns a rule before `index` that matches the first value of a pattern, if earlier rules match all its values.
    fn find_rule_covering_pattern(
        &self,
        node: &RuleNode,
        index: u32,
        pattern: &MatchPattern,
        is_reached: bool,
    ) -> Option<u32> {
        if pattern.negated {
            return None;
        }
        match &pattern.operator {
            Operator::In(values) => {
                let mut first_found = None;
                for value in &**values {
                    let first = self.first_match(node, value)?;
                    // A rule with exactly the value goes before it, wherever it stands.
                    if first == index
                        || self.nodes.get(first as usize).is_none_or(|first| !self.hides_once_covered(first, node))
                    {
                        return None;
                    }
                    first_found = first_found.or(Some(first));
                }
                first_found
            }
            Operator::Cidr(networks) if !is_reached => {
                let index = self.networks.get(&*node.key)?;
                networks.first().and_then(|network| index.lowest_pattern(network.first_address()))
            }
            Operator::Cidr(_) | Operator::InFile(_) | Operator::CidrFile(_) | Operator::Regex(_) => None,
        }
    }

    fn first_match(&self, node: &RuleNode, value: &str) -> Option<u32> {
        let exact = self.exact.get(&format!("{}_{value}", node.key)).copied();
        let entry = Entry { key: node.key.as_bytes(), value: value.as_bytes() };
        exact.or_else(|| self.patterns.as_ref()?.first_match(&entry).map(|(first, _)| first))
    }
}

fn warn_about_covered_rule(node: &RuleNode, first: &RuleNode, found: &mut Diagnostics) {
    let message = format!(
        "'{}' never matches: '{}' at {} matches first",
        escape_for_message(&node.composite_key()),
        escape_for_message(&first.composite_key()),
        first.location
    );
    let hint = match node.descriptors.is_empty() {
        true => "put it before that one, or remove it",
        false => "put it before that one, or write `matching: {backtrack: true}` in the document",
    };
    found.push(Diagnostic::at_location(Severity::Warning, &node.location, message, hint));
}

/// Warns about descriptors whose values never reach a rule below a less exact descriptor.
fn warn_about_hidden_subtrees(nodes: &[RuleNode], found: &mut Diagnostics) {
    let bare: HashMap<&str, &RuleNode> = nodes
        .iter()
        .filter(|node| node.match_kind() == MatchKind::Any && !node.descriptors.is_empty())
        .map(|node| (&*node.key, node))
        .collect();
    let mut pairs_left = MAX_COMPARED_PAIRS;
    for node in nodes.iter().filter(|node| node.match_kind() != MatchKind::Any && !node.descriptors.is_empty()) {
        let Some(less_exact) = bare.get(&*node.key) else { continue };
        let pairs = less_exact.descriptors.len().saturating_mul(node.descriptors.len());
        let Some(left) = pairs_left.checked_sub(pairs) else { return };
        pairs_left = left;
        let is_hidden = |below: &&RuleNode| !node.descriptors.iter().any(|own| may_be_meant_instead_of(own, below));
        if let Some(hidden) = less_exact.descriptors.iter().find(is_hidden) {
            let message = format!(
                "values of '{}' never reach '{}' below '{}' at {}",
                escape_for_message(&node.composite_key()),
                escape_for_message(&hidden.composite_key()),
                escape_for_message(&less_exact.composite_key()),
                hidden.location
            );
            let hint = "repeat that rule here, or write `matching: {backtrack: true}` in the document";
            found.push(Diagnostic::at_location(Severity::Warning, &node.location, message, hint));
        }
    }
}

/// Returns `true` if `own` is there for some of the entries that `other` matches, so that it may be meant in its place.
fn may_be_meant_instead_of(own: &RuleNode, other: &RuleNode) -> bool {
    own.composite_key() == other.composite_key()
        || (own.key == other.key && own.match_kind() == MatchKind::Any)
        || (own.key == other.key && own.value.pattern_text() == "*")
}

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
