//! Trace of a match: the node that each entry matched, and others that match it too, with the reason why they do not
//! decide. `near_miss` is about descriptors that match no rule.
//!
//! Decides: which steps, and how many other matches of an entry, `explain` lists (`MAX_OTHER_MATCHES`).

use super::set::{CompiledRule, DomainRules, RuleSet};
use super::value_pattern::MatchKind;
use super::{NodeId, SourceLocation};
use crate::limit::request::Entry;

/// Path of a descriptor through the rule tree.
#[derive(Clone, Debug)]
pub struct MatchTrace<'r> {
    /// One step for each entry, up to the first that matches nothing or whose node has no children.
    pub steps: Vec<TraceStep<'r>>,
    /// End of the path.
    pub end: TraceEnd<'r>,
}

/// Match of one entry.
#[derive(Clone, Debug)]
pub struct TraceStep<'r> {
    /// Kind of match and node, if any.
    pub matched: Option<(MatchKind, NodeRef<'r>)>,
    /// Siblings that match the entry too, best first, with the reason why the path does not go through them; the first
    /// [`MAX_OTHER_MATCHES`].
    pub other_matches: Vec<(NodeRef<'r>, PassedOverReason)>,
    /// Number of others beyond those.
    pub more_other_matches: usize,
}

/// Reference to a node, for people.
#[derive(Clone, Copy, Debug)]
pub struct NodeRef<'r> {
    /// Composite key: `key` or `key_value`.
    pub composite: &'r [u8],
    /// Location in the rule files.
    pub location: &'r SourceLocation,
}

/// Reason why the path does not go through a node that matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassedOverReason {
    /// It is a wildcard or `match`, and an earlier one in the file matches too.
    LaterPattern,
    /// A value goes before a wildcard, and a wildcard before a bare key.
    LessExact,
    /// It takes precedence, but backtracking found no rule below it.
    NoRuleBelow,
}

/// End of a trace.
#[derive(Clone, Copy, Debug)]
pub enum TraceEnd<'r> {
    /// At a rule.
    Rule(&'r CompiledRule),
    /// The descriptor has no entries.
    NoEntries,
    /// The last entry matches no node.
    NoMatch,
    /// The path ends at a node without a `rate_limit`.
    NoLimit {
        /// Number of nodes below it.
        children: usize,
    },
    /// The path continues below a node without children, whose limit is for paths that end there.
    TooLong {
        /// Number of entries beyond it.
        beyond: usize,
    },
}

/// Maximum number of other matches in a step.
pub const MAX_OTHER_MATCHES: usize = 16;

impl RuleSet {
    /// Traces the path of `entries` through the rules of `domain`.
    pub fn trace_match<'r>(&'r self, domain: &DomainRules, entries: &[Entry<'_>]) -> MatchTrace<'r> {
        let mut steps = Vec::new();
        let mut node = domain.root;
        let path = self.find_matched_path(domain, entries);
        for (index, entry) in entries.iter().enumerate() {
            let matched = path.get(index).copied();
            steps.push(self.build_trace_step(node, entry, matched));
            let Some((next, _)) = matched else { return MatchTrace { steps, end: TraceEnd::NoMatch } };
            let node_reached = &self.nodes[next as usize];
            let beyond = entries.len() - index - 1;
            if beyond == 0 {
                let end = match node_reached.rule.as_deref() {
                    Some(rule) => TraceEnd::Rule(rule),
                    None => TraceEnd::NoLimit { children: node_reached.children.len() },
                };
                return MatchTrace { steps, end };
            }
            if node_reached.children.is_empty() {
                return MatchTrace { steps, end: TraceEnd::TooLong { beyond } };
            }
            node = next;
        }
        MatchTrace { steps, end: TraceEnd::NoEntries }
    }

    fn build_trace_step(
        &self,
        parent: NodeId,
        entry: &Entry<'_>,
        matched: Option<(NodeId, MatchKind)>,
    ) -> TraceStep<'_> {
        let matching = self.find_matching_children(parent, entry);
        let place = matched.and_then(|(matched, _)| matching.iter().position(|(node, _)| *node == matched));
        let reason = |index: usize, kind: MatchKind| match (place, matched) {
            (Some(place), Some((_, matched_by))) if index > place => match (kind, matched_by) {
                (MatchKind::Wildcard | MatchKind::Match, MatchKind::Wildcard | MatchKind::Match) => {
                    PassedOverReason::LaterPattern
                }
                _ => PassedOverReason::LessExact,
            },
            _ => PassedOverReason::NoRuleBelow,
        };
        let others = matching.iter().enumerate().filter(|(index, _)| Some(*index) != place);
        let others: Vec<_> =
            others.filter_map(|(index, (node, kind))| Some((self.node_ref(*node)?, reason(index, *kind)))).collect();
        TraceStep {
            matched: matched.and_then(|(node, kind)| Some((kind, self.node_ref(node)?))),
            more_other_matches: others.len().saturating_sub(MAX_OTHER_MATCHES),
            other_matches: others.into_iter().take(MAX_OTHER_MATCHES).collect(),
        }
    }

    fn node_ref(&self, node: NodeId) -> Option<NodeRef<'_>> {
        let node = &self.nodes[node as usize];
        node.location.as_ref().map(|location| NodeRef { composite: &node.composite, location })
    }
}
