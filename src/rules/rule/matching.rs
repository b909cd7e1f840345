//! Matching: the rule that applies to a descriptor.
//!
//! Each entry takes one step down the tree: the exact value, else the first wildcard or `match` in file order, else
//! the bare key. A rule applies only if the path ends at its node. `key_value` is compared as one text, so a rule
//! `{key: a_b}` also matches the entry `(a, b)`; envoyproxy/ratelimit does the same.
//!
//! There is no backtracking, unless the domain has `matching: { backtrack: true }`. Then a search in depth first tries
//! the nodes that match an entry in their order: the exact value, wildcards and `match` patterns in file order, the
//! bare key. It ends at the first node for the last entry that has a rule, or that exempts its values. Each node has
//! one depth and one parent, so it is tried at most once: a search takes at most as many steps as the compiler counted
//! (`backtracking_bound`), whatever a descriptor contains. A domain with more than `MAX_BACKTRACKING_STEPS` does not
//! compile, and a call whose searches could take a hundred times as many together has no decision.
//!
//! Decides: which of two rules matches: exact value, wildcard or `match`, bare key; empty keys and values.
//! Decides: when the next match is tried (`backtrack`); a descriptor without entries (nothing).
//! Decides: which values share a counter (`share_threshold`); when a descriptor is unmatched.

use smallvec::SmallVec;

use super::NodeId;
use super::backtracking_bound::MAX_BACKTRACKING_STEPS_PER_CALL;
use super::set::{CompiledNode, CompiledRule, DomainRules, RuleSet};
use super::value_pattern::MatchKind;
use crate::limit::request::{Entry, Request};

/// Rule that applies to a descriptor.
#[derive(Clone, Debug)]
pub struct MatchedRule<'r> {
    /// The rule.
    pub rule: &'r CompiledRule,
    /// Entries whose values share one counter: index in the path, and the pattern that replaces the value.
    pub shared: SmallVec<[(usize, &'r [u8]); 1]>,
}

/// Rule for a path, or the reason why there is none.
#[derive(Clone, Debug)]
pub enum RuleMatch<'r> {
    /// A rule applies.
    Rule(MatchedRule<'r>),
    /// The path ends at a node that exempts its values on purpose.
    Exempt,
    /// The path matches nothing.
    None,
}

impl RuleSet {
    /// Returns the rule for the path of `entries` in `domain`, if any.
    pub fn find_rule<'r>(&'r self, domain: &DomainRules, entries: &[Entry<'_>]) -> Option<MatchedRule<'r>> {
        match self.match_path(domain, entries) {
            RuleMatch::Rule(found) => Some(found),
            RuleMatch::Exempt | RuleMatch::None => None,
        }
    }

    /// Returns the rule for the path of `entries` in `domain`, or whether its values are exempt.
    #[inline]
    pub fn match_path<'r>(&'r self, domain: &DomainRules, entries: &[Entry<'_>]) -> RuleMatch<'r> {
        if domain.matching.backtrack {
            return self.match_path_with_backtracking(domain, entries);
        }
        let mut shared = SmallVec::new();
        let mut node = domain.root;
        let Some(last) = entries.len().checked_sub(1) else { return RuleMatch::None };
        for (index, entry) in entries.iter().enumerate() {
            let Some((next, match_kind)) = self.match_entry(node, entry) else { return RuleMatch::None };
            let matched = &self.nodes[next as usize];
            if match_kind.can_share_counter() && matched.share_threshold {
                shared.push((index, shared_entry_text(&matched.composite, entry.key)));
            }
            if index == last {
                return matched.match_at_path_end(shared);
            }
            if matched.children.is_empty() {
                return RuleMatch::None;
            }
            node = next;
        }
        RuleMatch::None
    }

    /// Returns the rule that a search with backtracking finds, or whether its values are exempt.
    #[cold]
    fn match_path_with_backtracking<'r>(&'r self, domain: &DomainRules, entries: &[Entry<'_>]) -> RuleMatch<'r> {
        let Some(path) = self.find_backtracking_path(domain, entries) else { return RuleMatch::None };
        let mut shared = SmallVec::new();
        for (index, ((node, match_kind), entry)) in path.iter().zip(entries).enumerate() {
            let matched = &self.nodes[*node as usize];
            if match_kind.can_share_counter() && matched.share_threshold {
                shared.push((index, shared_entry_text(&matched.composite, entry.key)));
            }
        }
        match path.last() {
            Some((last, _)) => self.nodes[*last as usize].match_at_path_end(shared),
            None => RuleMatch::None,
        }
    }

    /// Returns the nodes that entries match: those of the rule that applies, else as many as match without
    /// backtracking.
    pub(super) fn find_matched_path(&self, domain: &DomainRules, entries: &[Entry<'_>]) -> MatchedPath {
        if domain.matching.backtrack
            && let Some(path) = self.find_backtracking_path(domain, entries)
        {
            return path;
        }
        let mut path = MatchedPath::new();
        let mut node = domain.root;
        for entry in entries {
            let Some(matched) = self.match_entry(node, entry) else { break };
            path.push(matched);
            node = matched.0;
        }
        path
    }

    /// Returns the rule of a counter that is stored: `shared` has the indices of entries whose value is a pattern that
    /// several values share.
    pub fn find_rule_of_counter(
        &self,
        domain: &DomainRules,
        entries: &[Entry<'_>],
        shared: &[usize],
    ) -> Option<&CompiledRule> {
        let candidates_of = |node: NodeId, index: usize| {
            let entry = &entries[index];
            // A `match` is not matched by its own text, as a value.
            let is_pattern = |child: &NodeId| {
                let child = &self.nodes[*child as usize];
                child.share_threshold
                    && child.composite.get(..child.key_length) == Some(entry.key)
                    && child.pattern.as_ref().is_some_and(|pattern| pattern.text().as_bytes() == entry.value)
            };
            let pattern = if shared.contains(&index) {
                self.nodes[node as usize].children.iter().copied().find(is_pattern)
            } else {
                None
            };
            match pattern {
                Some(pattern) => MatchingChildren::from_iter([(pattern, MatchKind::Match)]),
                None if domain.matching.backtrack => self.find_matching_children(node, entry),
                None => self.match_entry(node, entry).into_iter().collect(),
            }
        };
        let path = self.find_backtracking_path_among(domain, entries.len(), candidates_of)?;
        path.last().and_then(|(node, _)| self.nodes[*node as usize].rule.as_deref())
    }

    /// Returns the child of `node` that an entry matches.
    pub(super) fn match_entry(&self, node: NodeId, entry: &Entry<'_>) -> Option<(NodeId, MatchKind)> {
        if let Some(exact) = self.find_child(node, &[entry.key, b"_", entry.value]) {
            return Some((exact, MatchKind::Exact));
        }
        if let Some(patterns) = &self.nodes[node as usize].patterns
            && let Some(found) = patterns.first_match(entry)
        {
            return Some(found);
        }
        self.find_child(node, &[entry.key]).map(|bare_key| (bare_key, MatchKind::Any))
    }
}

impl CompiledNode {
    /// Returns what a path that ends at this node matches.
    #[inline]
    fn match_at_path_end<'r>(&'r self, shared: SmallVec<[(usize, &'r [u8]); 1]>) -> RuleMatch<'r> {
        match self.rule.as_deref() {
            Some(rule) => RuleMatch::Rule(MatchedRule { rule, shared }),
            None if self.exempt => RuleMatch::Exempt,
            None => RuleMatch::None,
        }
    }
}

/// Returns the text that replaces the value of an entry with a shared counter: the pattern without the key before it,
/// or the whole pattern if the star is in the key.
fn shared_entry_text<'r>(composite: &'r [u8], key: &[u8]) -> &'r [u8] {
    composite.strip_prefix(key).and_then(|rest| rest.strip_prefix(b"_")).unwrap_or(composite)
}

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
    /// Returns the maximum number of descriptors of a call in its domain, if `request` could take more steps of
    /// backtracking than these. The length of values does not count: a client of the proxy chooses it, and Envoy lets
    /// pass what is refused.
    #[inline]
    pub fn find_max_descriptors_if_exceeded(&self, request: &Request<'_>) -> Option<u64> {
        if !self.has_matching_options() {
            return None;
        }
        let steps = self.domain(request.domain)?.max_backtracking_steps;
        let max_descriptors = MAX_BACKTRACKING_STEPS_PER_CALL.checked_div(steps)?;
        (request.descriptors.len() as u64 > max_descriptors).then_some(max_descriptors)
    }

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
    fn find_backtracking_path(&self, domain: &DomainRules, entries: &[Entry<'_>]) -> Option<MatchedPath> {
        self.find_backtracking_path_among(domain, entries.len(), |node, index| {
            self.find_matching_children(node, &entries[index])
        })
    }

    /// Searches a path of `length` entries among the candidates of each.
    fn find_backtracking_path_among(
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
