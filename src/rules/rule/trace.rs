//! Trace of a match: the node that each entry matched, and the reasons why similar nodes did not match.
//!
//! A trace takes the same steps as matching and also inspects siblings. It serves `explain`, so it may be slow; its
//! lists are bounded.
//!
//! Decides: which steps and near misses `explain` lists (`MAX_NEAR_MISSES`).

use super::network::NumericIpAddress;
use super::set::{CompiledRule, DomainRules, RuleSet};
use super::value_pattern::{MatchKind, Operator};
use super::wildcard::WildcardPattern;
use super::{NodeId, SourceLocation};
use crate::limit::request::Entry;

/// Path of a descriptor through the rule tree.
#[derive(Clone, Debug)]
pub struct MatchTrace<'r> {
    /// One step for each entry that was matched or did not match.
    pub steps: Vec<TraceStep<'r>>,
    /// End of the path.
    pub end: TraceEnd<'r>,
}

/// Match of one entry.
#[derive(Clone, Debug)]
pub struct TraceStep<'r> {
    /// Kind of match and node, if any.
    pub matched: Option<(MatchKind, NodeRef<'r>)>,
    /// Similar siblings with the reason why they do not match; the first [`MAX_NEAR_MISSES`].
    pub near_misses: Vec<(NodeRef<'r>, MismatchReason)>,
    /// Number of near misses beyond those.
    pub more_near_misses: usize,
}

/// Reference to a node, for people.
#[derive(Clone, Copy, Debug)]
pub struct NodeRef<'r> {
    /// Composite key: `key` or `key_value`.
    pub composite: &'r [u8],
    /// Location in the rule files.
    pub location: &'r SourceLocation,
}

/// Reason why a sibling did not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MismatchReason {
    /// It has the key and another value.
    OtherValue,
    /// Its wildcard does not match the value.
    PatternDiffers,
    /// Its `match` does not match the value.
    MatchDiffers,
    /// It matches addresses, and the value is no address.
    NotAnAddress,
    /// Its wildcard or `match` matches too, but is later in the file.
    LaterWildcard,
    /// It matches too, but a value goes before a wildcard, and a wildcard before a bare key.
    LessExact,
    /// It matches better, but has no rule for the entries after it: the search went on.
    NothingBelow,
    /// It has another key.
    OtherKey,
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

/// Maximum number of near misses in a step.
pub const MAX_NEAR_MISSES: usize = 16;

/// What is known when siblings are compared with an entry.
struct MismatchContext<'a> {
    key: &'a [u8],
    value: &'a [u8],
    composite: &'a [u8],
    /// Children that match, best first.
    matching: &'a [(NodeId, MatchKind)],
    /// The child that the path goes through.
    matched: Option<(NodeId, MatchKind)>,
}

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
        let composite = [entry.key, b"_", entry.value].concat();
        let siblings =
            self.nodes[parent as usize].children.iter().filter(|child| matched.is_none_or(|(node, _)| node != **child));
        let matching = self.find_matching_children(parent, entry);
        let context =
            MismatchContext { key: entry.key, value: entry.value, composite: &composite, matching: &matching, matched };
        // Nodes with the entry's key come first, in file order; only as many are kept as are listed.
        let (mut near, mut far, mut count) = (Vec::new(), Vec::new(), 0);
        for child in siblings {
            let miss = self.classify_mismatch(*child, &context);
            let kept = if miss == MismatchReason::OtherKey { &mut far } else { &mut near };
            if matched.is_some() && miss == MismatchReason::OtherKey {
                continue;
            }
            count += 1;
            if kept.len() < MAX_NEAR_MISSES {
                kept.extend(self.node_ref(*child).map(|node| (node, miss)));
            }
        }
        let near_misses: Vec<_> = near.into_iter().chain(far).take(MAX_NEAR_MISSES).collect();
        let more_near_misses = count - near_misses.len();
        TraceStep {
            matched: matched.and_then(|(node, kind)| Some((kind, self.node_ref(node)?))),
            near_misses,
            more_near_misses,
        }
    }

    fn classify_mismatch(&self, child: NodeId, context: &MismatchContext<'_>) -> MismatchReason {
        let node = &self.nodes[child as usize];
        let has_key = node.composite.get(..node.key_length) == Some(context.key);
        let place = |id: NodeId| context.matching.iter().position(|(candidate, _)| *candidate == id);
        let matched = context.matched.and_then(|(matched, kind)| Some((place(matched)?, kind)));
        match (place(child), matched) {
            (Some(own), Some((matched, _))) if own < matched => return MismatchReason::NothingBelow,
            (Some(_), None) => return MismatchReason::NothingBelow,
            (Some(_), Some((_, matched_by))) => {
                return match (node.match_kind, matched_by) {
                    (MatchKind::Wildcard | MatchKind::Match, MatchKind::Wildcard | MatchKind::Match) => {
                        MismatchReason::LaterWildcard
                    }
                    _ => MismatchReason::LessExact,
                };
            }
            (None, _) => {}
        }
        match node.match_kind {
            MatchKind::Wildcard if WildcardPattern::new(&node.composite).matches(context.composite) => {
                MismatchReason::LaterWildcard
            }
            MatchKind::Exact | MatchKind::Wildcard | MatchKind::Match | MatchKind::Any if !has_key => {
                MismatchReason::OtherKey
            }
            MatchKind::Exact => MismatchReason::OtherValue,
            MatchKind::Wildcard => MismatchReason::PatternDiffers,
            MatchKind::Match => match node.pattern.as_ref().map(|pattern| &pattern.operator) {
                Some(Operator::Cidr(_) | Operator::CidrFile(_))
                    if NumericIpAddress::from_value(context.value).is_none() =>
                {
                    MismatchReason::NotAnAddress
                }
                _ => MismatchReason::MatchDiffers,
            },
            MatchKind::Any => MismatchReason::LessExact,
        }
    }

    fn node_ref(&self, node: NodeId) -> Option<NodeRef<'_>> {
        let node = &self.nodes[node as usize];
        node.location.as_ref().map(|location| NodeRef { composite: &node.composite, location })
    }
}
