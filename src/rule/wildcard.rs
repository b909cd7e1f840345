//! The wildcards of one level, and the first of them, in file order, that matches.
//!
//! Wildcards are indexed by their literal prefix, the part before the first `*`. A look-up probes once for each
//! distinct prefix length, so thousands of wildcards with distinct prefixes of one length cost as much as one.
//! Wildcards with the same prefix are tried in file order.

use std::collections::HashMap;

use super::NodeId;

/// All wildcards below one node.
#[derive(Debug)]
pub(super) struct Wildcards {
    /// Patterns in file order.
    patterns: Vec<(NodeId, Pattern)>,
    /// Distinct lengths of prefixes, shortest first.
    prefix_lengths: Vec<usize>,
    /// Indices in `patterns` by prefix, ascending.
    by_prefix: HashMap<Box<[u8]>, Vec<u32>>,
}

impl Wildcards {
    /// Indexes composite keys, given in file order.
    pub(super) fn new(composites: Vec<(NodeId, Box<[u8]>)>) -> Self {
        let mut by_prefix: HashMap<Box<[u8]>, Vec<u32>> = HashMap::new();
        let mut patterns = Vec::with_capacity(composites.len());
        for ((node, composite), index) in composites.into_iter().zip(0..) {
            let pattern = Pattern::new(&composite);
            by_prefix.entry(pattern.parts[0].clone()).or_default().push(index);
            patterns.push((node, pattern));
        }
        let mut prefix_lengths: Vec<_> = by_prefix.keys().map(|prefix| prefix.len()).collect();
        prefix_lengths.sort_unstable();
        prefix_lengths.dedup();
        Self { patterns, prefix_lengths, by_prefix }
    }

    /// Returns the first node in file order that matches.
    pub(super) fn first_match(&self, composite: &[u8]) -> Option<NodeId> {
        let mut best = self.patterns.len();
        for length in &self.prefix_lengths {
            let Some(indices) = composite.get(..*length).and_then(|prefix| self.by_prefix.get(prefix)) else {
                continue;
            };
            let earlier = indices.iter().map(|index| *index as usize).take_while(|index| *index < best);
            if let Some(index) = earlier.into_iter().find(|index| self.patterns[*index].1.matches(composite)) {
                best = index;
            }
        }
        self.patterns.get(best).map(|(node, _)| *node)
    }
}

/// Text in which each `*` matches any run of bytes.
#[derive(Debug)]
pub(crate) struct Pattern {
    /// Literal parts between the stars; at least two if there is a star.
    parts: Vec<Box<[u8]>>,
}

impl Pattern {
    /// Parses a pattern. Every `*` is a wildcard; there is no escape.
    pub(crate) fn new(text: &[u8]) -> Self {
        Self { parts: text.split(|byte| *byte == b'*').map(Box::from).collect() }
    }

    /// Returns `true` if the whole `text` matches.
    ///
    /// Each middle part is taken at its leftmost occurrence: that leaves the most text for the parts after it.
    pub(crate) fn matches(&self, text: &[u8]) -> bool {
        let [first, middle @ .., last] = &*self.parts else { return self.parts.iter().any(|only| **only == *text) };
        let Some(mut rest) = text.strip_prefix(&**first).and_then(|rest| rest.strip_suffix(&**last)) else {
            return false;
        };
        middle.iter().all(|part| match find(rest, part) {
            Some(at) => {
                rest = &rest[at + part.len()..];
                true
            }
            None => false,
        })
    }
}

/// Returns the index of the first `part` in `text`.
fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    match part {
        [] => Some(0),
        [byte] => text.iter().position(|b| b == byte),
        _ => memchr::memmem::find(text, part),
    }
}
