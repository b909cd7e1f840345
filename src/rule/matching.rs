//! Which rule a descriptor meets.
//!
//! One level an entry: the exact value, else the first wildcard in file order, else the bare key; then down, never
//! back to another choice. A rule counts only where the path ends. What matches is `key_value` as one text, so that a
//! rule `{key: a_b}` is met by the entry `(a, b)` too; envoyproxy/ratelimit does the same.

use smallvec::SmallVec;

use super::NodeId;
use super::set::{CompiledRule, DomainRules, RuleSet};
use crate::request::Entry;

/// A rule that a descriptor met.
#[derive(Clone, Debug)]
pub struct Match<'r> {
    /// The rule.
    pub rule: &'r CompiledRule,
    /// Entries whose values share one counter, by their place in the path, with the pattern that stands for them.
    pub shared: SmallVec<[(usize, &'r [u8]); 1]>,
}

/// How an entry met a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchKind {
    /// By its value.
    Exact,
    /// By a wildcard.
    Wildcard,
    /// By its key alone.
    Default,
}

impl RuleSet {
    /// The rule that the path of `entries` meets in `domain`, if any.
    pub fn find<'r>(&'r self, domain: &DomainRules, entries: &[Entry<'_>]) -> Option<Match<'r>> {
        let mut shared = SmallVec::new();
        let mut node = domain.root;
        let last = entries.len().checked_sub(1)?;
        for (place, entry) in entries.iter().enumerate() {
            let (next, met) = self.step(node, entry)?;
            let met_node = &self.nodes[next as usize];
            if met == MatchKind::Wildcard && met_node.share_threshold {
                shared.push((place, shared_text(&met_node.composite, entry.key)));
            }
            if place == last {
                return met_node.rule.as_deref().map(|rule| Match { rule, shared });
            }
            if met_node.children.is_empty() {
                return None;
            }
            node = next;
        }
        None
    }

    /// The child of `node` that an entry meets.
    pub(super) fn step(&self, node: NodeId, entry: &Entry<'_>) -> Option<(NodeId, MatchKind)> {
        if let Some(exact) = self.child(node, &[entry.key, b"_", entry.value]) {
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
        self.child(node, &[entry.key]).map(|default| (default, MatchKind::Default))
    }
}

/// What stands for the value of an entry that shares its counter: the pattern less the key before it, or all of the
/// pattern where the star is in the key.
fn shared_text<'r>(composite: &'r [u8], key: &[u8]) -> &'r [u8] {
    composite.strip_prefix(key).and_then(|rest| rest.strip_prefix(b"_")).unwrap_or(composite)
}
