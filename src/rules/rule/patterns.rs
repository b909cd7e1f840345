//! Children of one node that match more than one value: wildcards and `match` patterns, in one file order.
//!
//! The `match` patterns are indexed by key, then by operator: one map for the values of all lists, one cut of the
//! address space for all networks, automata for all expressions. So thousands of patterns cost as much as ten. Each set
//! from a file is probed by itself, so that it is not copied. Negated patterns have an index of their own: the first
//! that matches is the first that the look-up does not find, which takes at most as many steps as it finds. The index
//! of wildcards is in `wildcard`.
//!
//! Decides: how `match` matches: `in`, `cidr`, `regex`, `not`; which pattern is first.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use super::expression::Expressions;
use super::network::{Network, NetworkIndex, NetworkSet, NumericIpAddress};
use super::value_pattern::{MatchKind, MatchPattern, Operator, SetFile};
use super::value_set::ValueSet;
use super::wildcard::Wildcards;
use super::{MatchingNodes, NodeId};
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

/// All `match` patterns below one node.
#[derive(Debug)]
pub struct Operators {
    by_key: HashMap<Box<[u8]>, OperatorsOfKey>,
}

/// A node, and its pattern.
type NodePattern = (NodeId, Arc<MatchPattern>);

/// A node with a `match`.
#[derive(Debug)]
pub struct OperatorNode {
    /// Number of the node.
    pub node: NodeId,
    /// Key of the entry that the pattern matches.
    pub key: Box<[u8]>,
    /// Its pattern.
    pub pattern: Arc<MatchPattern>,
}

#[derive(Debug)]
struct OperatorsOfKey {
    plain: Option<PatternIndex>,
    negated: Option<NegatedPatterns>,
}

#[derive(Debug)]
struct NegatedPatterns {
    /// In file order.
    nodes: Vec<NodeId>,
    /// What the patterns negate.
    index: PatternIndex,
}

/// Patterns of one key, not negated; the identifier of each is its node, and nodes of a level are in file order.
#[derive(Debug)]
struct PatternIndex {
    /// Nodes of each value, ascending.
    lists: HashMap<Box<[u8]>, SmallVec<[NodeId; 2]>>,
    value_files: Vec<(NodeId, SetFile<ValueSet>)>,
    networks: Option<NetworkIndex<NodeId>>,
    network_files: Vec<(NodeId, SetFile<NetworkSet>)>,
    expressions: Expressions<NodeId>,
}

impl Operators {
    /// Indexes patterns, given in file order.
    pub fn new(nodes: Vec<OperatorNode>) -> Self {
        let mut groups: HashMap<Box<[u8]>, Vec<NodePattern>> = HashMap::new();
        for OperatorNode { node, key, pattern } in nodes {
            groups.entry(key).or_default().push((node, pattern));
        }
        let group = |(key, patterns): (_, Vec<_>)| (key, OperatorsOfKey::new(&patterns));
        Self { by_key: groups.into_iter().map(group).collect() }
    }

    /// Returns the first node in file order that matches.
    pub fn first_match(&self, key: &[u8], value: &[u8]) -> Option<NodeId> {
        let of_key = self.by_key.get(key)?;
        let plain = of_key.plain.as_ref().and_then(|index| index.lowest_match(value));
        let negated = of_key.negated.as_ref().and_then(|negated| negated.first_match(value));
        match (plain, negated) {
            (Some(plain), Some(negated)) => Some(plain.min(negated)),
            (found, None) | (None, found) => found,
        }
    }

    /// Adds all nodes that match, in no order.
    pub fn collect_matches(&self, key: &[u8], value: &[u8], found: &mut MatchingNodes) {
        let Some(of_key) = self.by_key.get(key) else { return };
        if let Some(index) = &of_key.plain {
            let start = found.len();
            index.for_each_match(value, |node| found.push(node));
            let mut own: MatchingNodes = found.drain(start..).collect();
            own.sort_unstable();
            own.dedup();
            found.extend(own);
        }
        if let Some(negated) = &of_key.negated {
            found.extend(negated.find_matches(value));
        }
    }
}

impl OperatorsOfKey {
    fn new(patterns: &[NodePattern]) -> Self {
        let (negated, plain): (Vec<_>, Vec<_>) = patterns.iter().partition(|(_, pattern)| pattern.negated);
        let index = |patterns: Vec<&NodePattern>| {
            PatternIndex::new(patterns.into_iter().map(|(node, pattern)| (*node, &pattern.operator)))
        };
        Self {
            plain: (!plain.is_empty()).then(|| index(plain)),
            negated: (!negated.is_empty()).then(|| NegatedPatterns {
                nodes: negated.iter().map(|(node, _)| *node).collect(),
                index: index(negated),
            }),
        }
    }
}

impl NegatedPatterns {
    fn first_match(&self, value: &[u8]) -> Option<NodeId> {
        self.find_matches(value).next()
    }

    /// Nodes whose operator does not match, in file order.
    fn find_matches(&self, value: &[u8]) -> impl Iterator<Item = NodeId> {
        let mut contained = MatchingNodes::new();
        self.index.for_each_match(value, |node| contained.push(node));
        contained.sort_unstable();
        self.nodes.iter().copied().filter(move |node| contained.binary_search(node).is_err())
    }
}

impl PatternIndex {
    fn new<'p>(patterns: impl Iterator<Item = (NodeId, &'p Operator)>) -> Self {
        let mut lists: HashMap<Box<[u8]>, SmallVec<[NodeId; 2]>> = HashMap::new();
        let (mut value_files, mut network_files) = (Vec::new(), Vec::new());
        let mut networks: Vec<(Network, NodeId)> = Vec::new();
        let mut expressions: Vec<(&str, NodeId)> = Vec::new();
        for (node, operator) in patterns {
            match operator {
                Operator::In(values) => {
                    values.iter().for_each(|value| lists.entry(value.as_bytes().into()).or_default().push(node));
                }
                Operator::InFile(file) => value_files.push((node, file.clone())),
                Operator::Cidr(of_node) => networks.extend(of_node.iter().map(|network| (*network, node))),
                Operator::CidrFile(file) => network_files.push((node, file.clone())),
                Operator::Regex(expression) => expressions.push((expression, node)),
            }
        }
        lists.shrink_to_fit();
        Self {
            lists,
            value_files,
            networks: (!networks.is_empty()).then(|| NetworkIndex::new(networks)),
            network_files,
            expressions: Expressions::new(&expressions),
        }
    }

    /// Returns the lowest node that matches.
    fn lowest_match(&self, value: &[u8]) -> Option<NodeId> {
        let mut lowest = None;
        let mut consider = |node: NodeId| lowest = Some(lowest.map_or(node, |lowest: NodeId| lowest.min(node)));
        if let Some(first) = self.find_list_nodes(value).and_then(|nodes| nodes.first()) {
            consider(*first);
        }
        if let Some(address) = self.parse_address(value) {
            self.networks.iter().filter_map(|index| index.lowest_pattern(address)).for_each(&mut consider);
            self.for_each_network_file_match(address, &mut consider);
        }
        self.for_each_value_file_match(value, &mut consider);
        self.expressions.for_each_match(value, consider);
        lowest
    }

    /// Calls `each` with every node that matches, with some of them more than once.
    fn for_each_match(&self, value: &[u8], mut each: impl FnMut(NodeId)) {
        self.find_list_nodes(value).into_iter().flatten().for_each(|node| each(*node));
        if let Some(address) = self.parse_address(value) {
            self.networks.iter().for_each(|index| index.for_each_match(address, &mut each));
            self.for_each_network_file_match(address, &mut each);
        }
        self.for_each_value_file_match(value, &mut each);
        self.expressions.for_each_match(value, each);
    }

    /// Nodes of the lists that have the value, ascending.
    fn find_list_nodes(&self, value: &[u8]) -> Option<&SmallVec<[NodeId; 2]>> {
        // An empty map would hash the value too.
        if self.lists.is_empty() { None } else { self.lists.get(value) }
    }

    /// The value as an address, if it is one and there are networks.
    fn parse_address(&self, value: &[u8]) -> Option<NumericIpAddress> {
        let has_networks = self.networks.is_some() || !self.network_files.is_empty();
        if has_networks { NumericIpAddress::from_value(value) } else { None }
    }

    fn for_each_network_file_match(&self, address: NumericIpAddress, mut each: impl FnMut(NodeId)) {
        let containing = self.network_files.iter().filter(|(_, file)| file.set.contains(address));
        containing.for_each(|(node, _)| each(*node));
    }

    fn for_each_value_file_match(&self, value: &[u8], mut each: impl FnMut(NodeId)) {
        let containing = self.value_files.iter().filter(|(_, file)| file.set.contains(value));
        containing.for_each(|(node, _)| each(*node));
    }
}
