//! Matching with backtracking, for domains with `matching: { backtrack: true }`.
//!
//! A search in depth first tries the nodes that match an entry in their order: the exact value, wildcards and `match`
//! patterns in file order, the bare key. It ends at the first node for the last entry that has a rule, or that exempts
//! its values. Each node has one depth and one parent, so it is tried at most once: a search takes at most as many
//! steps as the compiler counted (`backtracking_bound`), whatever a descriptor contains. A domain with more than
//! `MAX_BACKTRACKING_STEPS` does not compile.

use smallvec::SmallVec;

use super::NodeId;
use super::set::{DomainRules, RuleSet};
use super::value_pattern::MatchKind;
use crate::limit::request::Entry;

/// Nodes that match an entry, best first.
pub(super) type MatchingChildren = SmallVec<[(NodeId, MatchKind); 4]>;

/// Nodes that the entries of a descriptor match, from the outermost on.
pub(super) type MatchedPath = SmallVec<[(NodeId, MatchKind); 4]>;

/// Children that one entry matches, and the one that is tried now.
struct SearchLevel {
    candidates: MatchingChildren,
    at: usize,
}

impl RuleSet {
    /// Returns all children of `node` that an entry matches, best first.
    pub(super) fn find_matching_children(&self, node: NodeId, entry: &Entry<'_>) -> MatchingChildren {
        let mut candidates = MatchingChildren::new();
        let exact = self.find_child(node, &[entry.key, b"_", entry.value]);
        candidates.extend(exact.map(|exact| (exact, MatchKind::Exact)));
        if let Some(patterns) = &self.nodes[node as usize].patterns {
            let matches = patterns.find_matches(entry).into_iter();
            // A wildcard is also matched by its own text, as a value.
            let others = matches.filter(|matching| Some(*matching) != exact);
            candidates.extend(others.map(|matching| (matching, self.nodes[matching as usize].match_kind)));
        }
        candidates.extend(self.find_child(node, &[entry.key]).map(|bare_key| (bare_key, MatchKind::Any)));
        candidates
    }

    /// Returns the path that a search with backtracking finds.
    pub(super) fn find_backtracking_path(&self, domain: &DomainRules, entries: &[Entry<'_>]) -> Option<MatchedPath> {
        self.find_backtracking_path_among(domain, entries.len(), |node, index| {
            self.find_matching_children(node, &entries[index])
        })
    }

    /// Searches a path of `length` entries among the candidates of each.
    pub(super) fn find_backtracking_path_among(
        &self,
        domain: &DomainRules,
        length: usize,
        candidates_of: impl Fn(NodeId, usize) -> MatchingChildren,
    ) -> Option<MatchedPath> {
        if length == 0 {
            return None;
        }
        let mut levels: SmallVec<[SearchLevel; 4]> = SmallVec::new();
        levels.push(SearchLevel { candidates: candidates_of(domain.root, 0), at: 0 });
        while let Some(level) = levels.last() {
            let depth = levels.len();
            let Some((node, _)) = level.candidates.get(level.at).copied() else {
                levels.pop();
                if let Some(above) = levels.last_mut() {
                    above.at += 1;
                }
                continue;
            };
            if depth == length && self.is_path_end(node) {
                return Some(levels.iter().map(|level| level.candidates[level.at]).collect());
            }
            if depth < length && !self.nodes[node as usize].children.is_empty() {
                levels.push(SearchLevel { candidates: candidates_of(node, depth), at: 0 });
            } else if let Some(level) = levels.last_mut() {
                level.at += 1;
            }
        }
        None
    }

    /// Returns `true` if a path may end at the node: it has a rule, or exempts its values.
    fn is_path_end(&self, node: NodeId) -> bool {
        let node = &self.nodes[node as usize];
        node.rule.is_some() || node.exempt
    }
}
