//! Converts compiled rules back to their tree form, for tools that change them.

use std::sync::Arc;

use super::set::RuleSet;
use super::value_pattern::ValuePattern;
use super::{Domain, Rule, RuleNode, SourceLocation};

/// Descriptors that lead to a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulePath {
    /// Domain.
    pub domain: String,
    /// Descriptors from the outermost to that of the rule, at least one.
    pub entries: Vec<RuleDescriptor>,
}

/// A descriptor as a rule file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleDescriptor {
    /// Key.
    pub key: String,
    /// Values of the key that it matches.
    pub value: ValuePattern,
    /// All values that the pattern matches share one counter.
    pub share_threshold: bool,
}

impl RuleSet {
    /// Returns copies of all domains, with each rule changed by `edit`.
    pub fn to_edited_domains(&self, mut edit: impl FnMut(&mut Rule)) -> Vec<Domain> {
        // A child has a higher index than its parent, so one pass from the end needs no recursion.
        let mut children: Vec<Vec<RuleNode>> = self.nodes.iter().map(|_| Vec::new()).collect();
        for (id, node) in self.nodes.iter().enumerate().rev() {
            // The root of a domain has no key.
            if node.composite.is_empty() {
                continue;
            }
            let mut descriptors = std::mem::take(&mut children[id]);
            descriptors.reverse();
            let RuleDescriptor { key, value, share_threshold } = self.to_rule_descriptor(id);
            let rule = node.rule.as_deref().map(|compiled| {
                let mut rule = compiled.to_rule();
                edit(&mut rule);
                rule.plan_rules_mut().for_each(&mut edit);
                rule
            });
            let unknown = || SourceLocation { file: "".into(), line: 0, column: 0 };
            children[node.parent as usize].push(RuleNode {
                key,
                value,
                rule,
                share_threshold,
                value_to_metric: node.value_to_metric,
                exempt: node.exempt,
                descriptors: descriptors.into(),
                location: node.location.clone().unwrap_or_else(unknown),
            });
        }
        let domains = self.domains().map(|domain| {
            let mut descriptors = std::mem::take(&mut children[domain.root as usize]);
            descriptors.reverse();
            domain.to_domain_with_descriptors(descriptors)
        });
        domains.collect()
    }

    /// Returns the descriptors that lead to the rule with this path; `None` if there is none.
    pub fn find_rule_path(&self, path: &str) -> Option<RulePath> {
        let has_path = |id: &usize| self.nodes[*id].rule.as_deref().is_some_and(|rule| rule.rule.path == path);
        let mut id = (0..self.nodes.len()).find(has_path)?;
        let mut entries = Vec::new();
        while !self.nodes[id].composite.is_empty() {
            entries.push(self.to_rule_descriptor(id));
            id = self.nodes[id].parent as usize;
        }
        entries.reverse();
        let domain = self.domains().find(|domain| domain.root as usize == id)?.name.clone();
        Some(RulePath { domain, entries })
    }

    fn to_rule_descriptor(&self, id: usize) -> RuleDescriptor {
        let node = &self.nodes[id];
        let (key, rest) = node.composite.split_at(node.key_length);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let value = match &node.pattern {
            Some(pattern) => ValuePattern::Match(Arc::clone(pattern)),
            // A value follows the key and `_`.
            None => ValuePattern::from(text(rest.get(1..).unwrap_or_default())),
        };
        RuleDescriptor { key: text(key), value, share_threshold: node.share_threshold }
    }
}
