//! The wildcards of one level, and the first of them, in file order, that matches.
//!
//! Wildcards are indexed by their literal prefix, the part before the first `*`. A look-up probes once for each
//! distinct prefix length. Wildcards with the same prefix are indexed by another literal part, the rarest among them:
//! an Aho-Corasick automaton finds in one pass over the text which of these parts it contains. So thousands of
//! wildcards cost as much as one, unless they have all their literal parts in common; those are tried in file order.
//!
//! Decides: how `*` matches, also in the middle; the first of two wildcards.

use std::cmp::Reverse;
use std::collections::HashMap;

use aho_corasick::{AhoCorasick, AhoCorasickKind};
use smallvec::SmallVec;

use super::{MatchingNodes, NodeId};

/// Largest number of wildcards with one prefix that are tried without an automaton.
const MAX_WILDCARDS_WITHOUT_AUTOMATON: usize = 4;

/// Maximum depth of dense states: the number of bytes of a literal that are searched in them.
const MAX_DENSE_DEPTH: usize = 64;
/// Depth of dense states if [`MAX_DENSE_DEPTH`] would take too much memory.
const REDUCED_DENSE_DEPTH: usize = 2;
/// Maximum size of an automaton of [`MAX_DENSE_DEPTH`], in bytes for each literal.
const MAX_DENSE_BYTES_PER_LITERAL: usize = 1024;

/// All wildcards below one node.
#[derive(Debug)]
pub struct Wildcards {
    /// Patterns in file order.
    patterns: Vec<(NodeId, WildcardPattern)>,
    /// Distinct lengths of prefixes, shortest first.
    prefix_lengths: Vec<usize>,
    by_prefix: HashMap<Box<[u8]>, WildcardsOfPrefix>,
}

/// Patterns with one prefix, as indices in file order.
#[derive(Debug)]
struct WildcardsOfPrefix {
    /// Patterns that each text may match.
    always: Vec<u32>,
    /// Patterns that only a text with their literal part matches.
    by_literal: Option<LiteralIndex>,
}

/// Patterns by a literal part.
#[derive(Debug)]
struct LiteralIndex {
    automaton: AhoCorasick,
    /// Patterns of each literal of the automaton, ascending.
    patterns: Vec<Vec<u32>>,
}

impl Wildcards {
    /// Indexes composite keys, given in file order.
    pub fn new(composites: Vec<(NodeId, Box<[u8]>)>) -> Self {
        let patterns: Vec<_> =
            composites.into_iter().map(|(node, composite)| (node, WildcardPattern::new(&composite))).collect();
        let by_prefix: HashMap<Box<[u8]>, _> = group_by_prefix(patterns.iter().map(|(_, pattern)| pattern))
            .into_iter()
            .map(|(prefix, group)| (Box::from(prefix), WildcardsOfPrefix::new(&group)))
            .collect();
        let mut prefix_lengths: Vec<_> = by_prefix.keys().map(|prefix| prefix.len()).collect();
        prefix_lengths.sort_unstable();
        prefix_lengths.dedup();
        Self { patterns, prefix_lengths, by_prefix }
    }

    /// Returns the first node in file order that matches.
    pub fn first_match(&self, composite: &[u8]) -> Option<NodeId> {
        let mut best = self.patterns.len();
        for length in &self.prefix_lengths {
            let Some((prefix, rest)) = composite.split_at_checked(*length) else { break };
            let Some(group) = self.by_prefix.get(prefix) else { continue };
            self.update_first_match(&group.always, composite, &mut best);
            if let Some(index) = &group.by_literal {
                index.for_each_candidate(rest, |patterns| self.update_first_match(patterns, composite, &mut best));
            }
        }
        self.patterns.get(best).map(|(node, _)| *node)
    }

    /// Adds all nodes that match, each once, in no order.
    pub(super) fn collect_matches(&self, composite: &[u8], found: &mut MatchingNodes) {
        let mut add = |indices: &[u32]| {
            let patterns = indices.iter().filter_map(|index| self.patterns.get(*index as usize));
            found.extend(patterns.filter(|(_, pattern)| pattern.matches(composite)).map(|(node, _)| *node));
        };
        for length in &self.prefix_lengths {
            let Some((prefix, rest)) = composite.split_at_checked(*length) else { break };
            let Some(group) = self.by_prefix.get(prefix) else { continue };
            add(&group.always);
            if let Some(index) = &group.by_literal {
                index.for_each_candidate(rest, &mut add);
            }
        }
    }

    /// Sets `best` to the first of these indices whose pattern matches, if it is lower than `best`.
    fn update_first_match(&self, indices: &[u32], composite: &[u8], best: &mut usize) {
        let earlier = indices.iter().map(|index| *index as usize).take_while(|index| *index < *best);
        if let Some(index) = earlier.into_iter().find(|index| self.patterns[*index].1.matches(composite)) {
            *best = index;
        }
    }
}

/// Patterns by prefix, each with its index.
fn group_by_prefix<'p>(
    patterns: impl Iterator<Item = &'p WildcardPattern>,
) -> HashMap<&'p [u8], Vec<(u32, &'p WildcardPattern)>> {
    let mut groups: HashMap<&[u8], Vec<(u32, &WildcardPattern)>> = HashMap::new();
    for (index, pattern) in (0..).zip(patterns) {
        groups.entry(&pattern.parts[0]).or_default().push((index, pattern));
    }
    groups
}

/// Patterns with one prefix by the literal part that the fewest of them have, of equally rare ones the longest. The
/// empty literal has those without another part.
fn group_by_rarest_literal<'p>(group: &[(u32, &'p WildcardPattern)]) -> HashMap<&'p [u8], Vec<u32>> {
    let mut users: HashMap<&[u8], usize> = HashMap::new();
    let parts =
        |pattern: &'p WildcardPattern| pattern.parts[1..].iter().map(|part| &**part).filter(|part| !part.is_empty());
    group.iter().flat_map(|(_, pattern)| parts(pattern)).for_each(|part| *users.entry(part).or_default() += 1);
    let mut literals: HashMap<&[u8], Vec<u32>> = HashMap::new();
    for (index, pattern) in group {
        let rarest = parts(pattern).min_by_key(|part| (users.get(part).copied(), Reverse(part.len())));
        literals.entry(rarest.unwrap_or_default()).or_default().push(*index);
    }
    literals
}

/// Largest number of these patterns that must be tried one after the other for one text.
pub fn max_tried_patterns<'p>(patterns: impl Iterator<Item = &'p WildcardPattern>) -> usize {
    let largest =
        |group: Vec<(u32, &WildcardPattern)>| group_by_rarest_literal(&group).values().map(Vec::len).max().unwrap_or(0);
    group_by_prefix(patterns).into_values().map(largest).max().unwrap_or(0)
}

impl WildcardsOfPrefix {
    fn new(group: &[(u32, &WildcardPattern)]) -> Self {
        let all = || Self { always: group.iter().map(|(index, _)| *index).collect(), by_literal: None };
        if group.len() <= MAX_WILDCARDS_WITHOUT_AUTOMATON {
            return all();
        }
        let mut literals = group_by_rarest_literal(group);
        let always = literals.remove(&[][..]).unwrap_or_default();
        let (literals, patterns): (Vec<&[u8]>, Vec<Vec<u32>>) = literals.into_iter().unzip();
        match build_automaton(&literals) {
            Some(automaton) => Self { always, by_literal: Some(LiteralIndex { automaton, patterns }) },
            None => all(),
        }
    }
}

/// Builds the automaton that finds these literals; `None` if it would exceed four gigabytes.
///
/// A dense state takes the same steps for any number of literals, but may take a kilobyte.
fn build_automaton(literals: &[&[u8]]) -> Option<AhoCorasick> {
    let build = |dense_depth| {
        // A prefilter makes few literals cheaper, so that the cost would depend on their number.
        let mut builder = AhoCorasick::builder();
        builder.kind(Some(AhoCorasickKind::ContiguousNFA)).prefilter(false).dense_depth(dense_depth).build(literals)
    };
    let dense = build(MAX_DENSE_DEPTH)
        .ok()
        .filter(|dense| dense.memory_usage() <= MAX_DENSE_BYTES_PER_LITERAL * literals.len());
    dense.or_else(|| build(REDUCED_DENSE_DEPTH).ok())
}

impl LiteralIndex {
    /// Calls `each` with the patterns of each literal in `text`, once.
    fn for_each_candidate(&self, text: &[u8], mut each: impl FnMut(&[u32])) {
        let mut seen = ReportedLiterals::default();
        for found in self.automaton.find_overlapping_iter(text) {
            let literal = found.pattern().as_usize();
            if seen.insert(literal, self.patterns.len()) {
                each(&self.patterns[literal]);
            }
        }
    }
}

/// Literals that were found: a list while they are few, then one bit for each.
#[derive(Debug, Default)]
struct ReportedLiterals {
    few: SmallVec<[usize; 8]>,
    bits: Vec<u64>,
}

impl ReportedLiterals {
    /// Adds one of `count` literals; returns false if it was there.
    fn insert(&mut self, literal: usize, count: usize) -> bool {
        const BITS: usize = u64::BITS as usize;
        if self.few.contains(&literal) {
            return false;
        }
        if self.few.len() < self.few.inline_size() {
            self.few.push(literal);
            return true;
        }
        if self.bits.is_empty() {
            self.bits = vec![0; count.div_ceil(BITS)];
        }
        let (word, bit) = (literal / BITS, 1 << (literal % BITS));
        let is_new = self.bits[word] & bit == 0;
        self.bits[word] |= bit;
        is_new
    }
}

/// Text in which each `*` matches any run of bytes.
#[derive(Debug)]
pub struct WildcardPattern {
    /// Literal parts between the stars; at least two if there is a star.
    parts: Vec<Box<[u8]>>,
}

impl WildcardPattern {
    /// Parses a pattern. Every `*` is a wildcard; there is no escape.
    pub fn new(text: &[u8]) -> Self {
        Self { parts: text.split(|byte| *byte == b'*').map(Box::from).collect() }
    }

    /// Returns `true` if the whole `text` matches.
    ///
    /// Each middle part is taken at its leftmost occurrence: that leaves the most text for the parts after it.
    pub fn matches(&self, text: &[u8]) -> bool {
        let [first, middle @ .., last] = &*self.parts else { return self.parts.iter().any(|only| **only == *text) };
        let Some(mut rest) = text.strip_prefix(&**first).and_then(|rest| rest.strip_suffix(&**last)) else {
            return false;
        };
        middle.iter().all(|part| match find_bytes(rest, part) {
            Some(at) => {
                rest = &rest[at + part.len()..];
                true
            }
            None => false,
        })
    }
}

/// Returns the index of the first `part` in `text`.
fn find_bytes(text: &[u8], part: &[u8]) -> Option<usize> {
    match part {
        [] => Some(0),
        [byte] => text.iter().position(|b| b == byte),
        _ => memchr::memmem::find(text, part),
    }
}
