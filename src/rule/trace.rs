//! Why a descriptor met the rule it met, and why its near near_misses did not match.
//!
//! A trace takes the very steps that matching takes, and looks at the siblings on the way. It is for people
//! (`explain`), so it may be slow; what it lists is bounded.

use super::NodeId;
use super::SourceLocation;
use super::matching::MatchKind;
use super::set::{CompiledRule, DomainRules, RuleSet};
use super::wildcard::Pattern;
use crate::request::Entry;

/// The way of a descriptor through the tree.
#[derive(Clone, Debug)]
pub struct MatchTrace<'r> {
    /// One for each entry that was looked at.
    pub steps: Vec<TraceStep<'r>>,
    /// How it ended.
    pub end: TraceEnd<'r>,
}

/// What one entry met.
#[derive(Clone, Debug)]
pub struct TraceStep<'r> {
    /// The node it met, and how.
    pub met: Option<(MatchKind, NodeRef<'r>)>,
    /// Siblings that could be taken for a match, with the reason why they are none; the first [`MAX_NEAR_MISSES`].
    pub near_misses: Vec<(NodeRef<'r>, NearMiss)>,
    /// Near near_misses beyond those.
    pub more_near_misses: usize,
}

/// A node of the tree, as a person knows it.
#[derive(Clone, Copy, Debug)]
pub struct NodeRef<'r> {
    /// `key` or `key_value`.
    pub composite: &'r [u8],
    /// Where it stands.
    pub location: &'r SourceLocation,
}

/// Why a sibling did not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NearMiss {
    /// It has the key and another value.
    OtherValue,
    /// Its wildcard does not match the value.
    PatternDiffers,
    /// Its wildcard matches too, but stands later in the file.
    LaterWildcard,
    /// It matches too, but a value goes before a wildcard, and a wildcard before a bare key.
    LessExact,
    /// It has another key.
    OtherKey,
}

/// How a trace ended.
#[derive(Clone, Copy, Debug)]
pub enum TraceEnd<'r> {
    /// At a rule.
    Rule(&'r CompiledRule),
    /// The descriptor has no entries.
    NoEntries,
    /// The last entry looked at met nothing.
    NothingMet,
    /// The path ended at a node without a `rate_limit`; it has so many children.
    NoLimit {
        /// Nodes below it.
        children: usize,
    },
    /// The path goes on below a node without children; what that node limits is for paths that end there.
    TooLong {
        /// Entries beyond it.
        beyond: usize,
    },
}

/// Near near_misses that a step lists.
pub const MAX_NEAR_MISSES: usize = 16;

impl RuleSet {
    /// The way of `entries` through the rules of `domain`.
    pub fn trace<'r>(&'r self, domain: &DomainRules, entries: &[Entry<'_>]) -> MatchTrace<'r> {
        let mut steps = Vec::new();
        let mut node = domain.root;
        for (place, entry) in entries.iter().enumerate() {
            let met = self.step(node, entry);
            steps.push(self.describe(node, entry, met));
            let Some((next, _)) = met else { return MatchTrace { steps, end: TraceEnd::NothingMet } };
            let met_node = &self.nodes[next as usize];
            let beyond = entries.len() - place - 1;
            if beyond == 0 {
                let end = match met_node.rule.as_deref() {
                    Some(rule) => TraceEnd::Rule(rule),
                    None => TraceEnd::NoLimit { children: met_node.children.len() },
                };
                return MatchTrace { steps, end };
            }
            if met_node.children.is_empty() {
                return MatchTrace { steps, end: TraceEnd::TooLong { beyond } };
            }
            node = next;
        }
        MatchTrace { steps, end: TraceEnd::NoEntries }
    }

    fn describe(&self, parent: NodeId, entry: &Entry<'_>, met: Option<(NodeId, MatchKind)>) -> TraceStep<'_> {
        let composite = [entry.key, b"_", entry.value].concat();
        let siblings =
            self.nodes[parent as usize].children.iter().filter(|child| met.is_none_or(|(met, _)| met != **child));
        // What has the key comes before what has not; file order otherwise. No more is kept than is listed.
        let (mut near, mut far, mut count) = (Vec::new(), Vec::new(), 0);
        for child in siblings {
            let miss = self.miss(*child, entry.key, &composite, met);
            let kept = if miss == NearMiss::OtherKey { &mut far } else { &mut near };
            if met.is_some() && miss == NearMiss::OtherKey {
                continue;
            }
            count += 1;
            if kept.len() < MAX_NEAR_MISSES {
                kept.extend(self.place(*child).map(|place| (place, miss)));
            }
        }
        let near_misses: Vec<_> = near.into_iter().chain(far).take(MAX_NEAR_MISSES).collect();
        let more_near_misses = count - near_misses.len();
        TraceStep { met: met.and_then(|(node, how)| Some((how, self.place(node)?))), near_misses, more_near_misses }
    }

    fn miss(&self, child: NodeId, key: &[u8], composite: &[u8], met: Option<(NodeId, MatchKind)>) -> NearMiss {
        let node = &self.nodes[child as usize];
        let has_key = node.composite.get(..node.key_length) == Some(key);
        if node.composite.contains(&b'*') {
            return match (Pattern::new(&node.composite).matches(composite), met) {
                (true, Some((_, MatchKind::Exact))) => NearMiss::LessExact,
                (true, _) => NearMiss::LaterWildcard,
                (false, _) if has_key => NearMiss::PatternDiffers,
                (false, _) => NearMiss::OtherKey,
            };
        }
        match has_key {
            true if node.composite.len() == node.key_length => NearMiss::LessExact,
            true => NearMiss::OtherValue,
            false => NearMiss::OtherKey,
        }
    }

    fn place(&self, node: NodeId) -> Option<NodeRef<'_>> {
        let node = &self.nodes[node as usize];
        node.location.as_ref().map(|location| NodeRef { composite: &node.composite, location })
    }
}
