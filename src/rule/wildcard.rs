//! The wildcards of one level: which is the first, in file order, that matches.
//!
//! They are filed by their literal prefix, the part before the first `*`. A look-up probes once for each length that
//! some prefix has, so thousands of wildcards with prefixes of their own cost no more than one. Those that share a
//! prefix are tried in file order.

use std::collections::HashMap;

use super::NodeId;

/// All wildcards below one node.
#[derive(Debug)]
pub(super) struct Wildcards {
    /// In file order.
    patterns: Vec<(NodeId, Pattern)>,
    /// Every length that a prefix has, shortest first.
    prefix_lengths: Vec<usize>,
    /// Prefix to places in `patterns`, ascending.
    by_prefix: HashMap<Box<[u8]>, Vec<u32>>,
}

impl Wildcards {
    /// Files the patterns, given in file order.
    pub(super) fn new(composites: Vec<(NodeId, Box<[u8]>)>) -> Self {
        let mut by_prefix: HashMap<Box<[u8]>, Vec<u32>> = HashMap::new();
        let mut patterns = Vec::with_capacity(composites.len());
        for ((node, composite), place) in composites.into_iter().zip(0..) {
            let pattern = Pattern::new(&composite);
            by_prefix.entry(pattern.parts[0].clone()).or_default().push(place);
            patterns.push((node, pattern));
        }
        let mut prefix_lengths: Vec<_> = by_prefix.keys().map(|prefix| prefix.len()).collect();
        prefix_lengths.sort_unstable();
        prefix_lengths.dedup();
        Self { patterns, prefix_lengths, by_prefix }
    }

    /// The first in file order that matches.
    pub(super) fn first_match(&self, composite: &[u8]) -> Option<NodeId> {
        let mut best = self.patterns.len();
        for length in &self.prefix_lengths {
            let Some(places) = composite.get(..*length).and_then(|prefix| self.by_prefix.get(prefix)) else { continue };
            let earlier = places.iter().map(|place| *place as usize).take_while(|place| *place < best);
            if let Some(place) = earlier.into_iter().find(|place| self.patterns[*place].1.matches(composite)) {
                best = place;
            }
        }
        self.patterns.get(best).map(|(node, _)| *node)
    }
}

/// Literal text with `*` in it, each standing for any run of bytes.
#[derive(Debug)]
pub(crate) struct Pattern {
    /// What stands between the stars; at least two parts if there is a star.
    parts: Vec<Box<[u8]>>,
}

impl Pattern {
    /// There is no escape: every `*` is a wildcard.
    pub(crate) fn new(text: &[u8]) -> Self {
        Self { parts: text.split(|byte| *byte == b'*').map(Box::from).collect() }
    }

    /// Whether all of `text` matches. The middle parts are found leftmost first, which is right because what comes
    /// before the next star is best kept short.
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

/// Where `part` first stands in `text`.
fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    match part {
        [] => Some(0),
        [byte] => text.iter().position(|b| b == byte),
        _ => memchr::memmem::find(text, part),
    }
}
