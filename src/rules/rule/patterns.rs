//! Children of one node that match more than one value: wildcards and `match` patterns, in one file order.

use std::sync::Arc;

use smallvec::SmallVec;

use super::NodeId;
use super::match_pattern::MatchPattern;
use super::operators::{MatchingNodes, OperatorNode, Operators};
use super::value_pattern::MatchKind;
use super::wildcard::Wildcards;
use crate::limit::request::Entry;

/// Wildcards and `match` patterns below one node; at least one.
#[derive(Debug)]
pub(crate) struct Patterns {
    wildcards: Option<Wildcards>,
    operators: Option<Operators>,
}

/// Patterns while they are collected, in file order.
#[derive(Debug, Default)]
pub(crate) struct PatternsBuilder {
    wildcards: Vec<(NodeId, Box<[u8]>)>,
    operators: Vec<OperatorNode>,
}

impl PatternsBuilder {
    pub(crate) fn add_wildcard(&mut self, node: NodeId, composite: &[u8]) {
        self.wildcards.push((node, composite.into()));
    }

    pub(crate) fn add_operator(&mut self, node: NodeId, key: &[u8], pattern: &Arc<MatchPattern>) {
        self.operators.push(OperatorNode { node, key: key.into(), pattern: Arc::clone(pattern) });
    }

    /// Indexes the patterns; `None` if there are none.
    pub(crate) fn build(self) -> Option<Box<Patterns>> {
        let Self { wildcards, operators } = self;
        if wildcards.is_empty() && operators.is_empty() {
            return None;
        }
        Some(Box::new(Patterns {
            wildcards: (!wildcards.is_empty()).then(|| Wildcards::new(wildcards)),
            operators: (!operators.is_empty()).then(|| Operators::new(operators)),
        }))
    }
}

impl Patterns {
    /// Returns the first node in file order that matches.
    pub(crate) fn first_match(&self, entry: &Entry<'_>) -> Option<(NodeId, MatchKind)> {
        let wildcard = self.wildcards.as_ref().and_then(|wildcards| wildcards.first_match(&join_composite(entry)));
        let operator = self.operators.as_ref().and_then(|operators| operators.first_match(entry.key, entry.value));
        match (wildcard, operator) {
            (Some(wildcard), Some(operator)) if operator < wildcard => Some((operator, MatchKind::Match)),
            (Some(wildcard), _) => Some((wildcard, MatchKind::Wildcard)),
            (None, operator) => operator.map(|operator| (operator, MatchKind::Match)),
        }
    }

    /// Returns the first wildcard in file order that matches a composite key.
    pub(crate) fn first_matching_wildcard(&self, composite: &[u8]) -> Option<NodeId> {
        self.wildcards.as_ref().and_then(|wildcards| wildcards.first_match(composite))
    }

    /// Returns all nodes that match, in file order.
    pub(super) fn find_matches(&self, entry: &Entry<'_>) -> MatchingNodes {
        let mut found = MatchingNodes::new();
        if let Some(wildcards) = &self.wildcards {
            wildcards.collect_matches(&join_composite(entry), &mut found);
        }
        if let Some(operators) = &self.operators {
            operators.collect_matches(entry.key, entry.value, &mut found);
        }
        found.sort_unstable();
        found
    }
}

fn join_composite(entry: &Entry<'_>) -> SmallVec<[u8; 128]> {
    let mut composite = SmallVec::<[u8; 128]>::from_slice(entry.key);
    composite.push(b'_');
    composite.extend_from_slice(entry.value);
    composite
}
