//! Matching: the rule that applies to a descriptor.
//!
//! Each entry takes one step down the tree: the exact value, else the first wildcard in file order, else the bare key.
//! There is no backtracking. A rule applies only if the path ends at its node. `key_value` is compared as one text, so
//! a rule `{key: a_b}` also matches the entry `(a, b)`; envoyproxy/ratelimit does the same.

use smallvec::SmallVec;

use super::NodeId;
use super::set::{CompiledRule, DomainRules, RuleSet};
use super::value_pattern::MatchKind;
use crate::limit::request::Entry;

/// Rule that applies to a descriptor.
#[derive(Clone, Debug)]
pub struct Match<'r> {
    /// The rule.
    pub rule: &'r CompiledRule,
    /// Entries whose values share one counter: index in the path, and the pattern that replaces the value.
    pub shared: SmallVec<[(usize, &'r [u8]); 1]>,
}

impl RuleSet {
    /// Returns the rule for the path of `entries` in `domain`, if any.
    pub fn find_rule<'r>(&'r self, domain: &DomainRules, entries: &[Entry<'_>]) -> Option<Match<'r>> {
        let mut shared = SmallVec::new();
        let mut node = domain.root;
        let last = entries.len().checked_sub(1)?;
        for (index, entry) in entries.iter().enumerate() {
            let (next, match_kind) = self.match_entry(node, entry)?;
            let matched = &self.nodes[next as usize];
            if match_kind.can_share_counter() && matched.share_threshold {
                shared.push((index, shared_counter_value(&matched.composite, entry.key)));
            }
            if index == last {
                return matched.rule.as_deref().map(|rule| Match { rule, shared });
            }
            if matched.children.is_empty() {
                return None;
            }
            node = next;
        }
        None
    }

    /// Returns the child of `node` that an entry matches.
    pub(super) fn match_entry(&self, node: NodeId, entry: &Entry<'_>) -> Option<(NodeId, MatchKind)> {
        if let Some(exact) = self.find_child(node, &[entry.key, b"_", entry.value]) {
            return Some((exact, MatchKind::Exact));
        }
        if let Some(wildcards) = &self.nodes[node as usize].wildcards {
            let mut composite = SmallVec::<[u8; 128]>::from_slice(entry.key);
            composite.push(b'_');
            composite.extend_from_slice(entry.value);
            if let Some(wildcard) = wildcards.first_match(&composite) {
                return Some((wildcard, MatchKind::Wildcard));
            }
        }
        self.find_child(node, &[entry.key]).map(|bare_key| (bare_key, MatchKind::Any))
    }
}

/// Returns the text that replaces the value of an entry with a shared counter: the pattern without the key before it,
/// or the whole pattern if the star is in the key.
fn shared_counter_value<'r>(composite: &'r [u8], key: &[u8]) -> &'r [u8] {
    composite.strip_prefix(key).and_then(|rest| rest.strip_prefix(b"_")).unwrap_or(composite)
}
