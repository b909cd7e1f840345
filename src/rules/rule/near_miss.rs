//! Near misses: the rule for which a descriptor without a rule was probably meant, and why it does not match.
//!
//! A search repeats matching with one difference at a time: letters of another case, entries in another order, an entry
//! too few or too many, a similar key, other values, another domain. The first difference that leads to a rule is the
//! reason. Values may be unknown, as those of a header are in Envoy's configuration. It serves reports, so it may be
//! slow; it compares at most `MAX_COMPARISONS` nodes for each difference.
//!
//! Decides: which rule a descriptor nearly matches, and what differs (`explain`, `/unmatched`, sandbox).

use std::collections::HashSet;

use super::NodeId;
use super::set::{CompiledNode, DomainRules, RuleSet};
use super::value_pattern::MatchKind;
use super::wildcard::WildcardPattern;
use super::{EntryOrder, Rule, SourceLocation};
use crate::base::named_enum::{named_enum, serialize_by_name};
use crate::base::text::truncate_and_escape;
use crate::limit::request::Entry;

/// Maximum number of nodes that are compared for one difference.
const MAX_COMPARISONS: usize = 50_000;

/// Maximum number of entries of a descriptor that is searched for.
const MAX_ENTRIES: usize = 16;

/// Maximum number of domains in which a descriptor is searched for.
const MAX_SEARCHED_DOMAINS: usize = 100;

/// Smallest likeness of two keys, or two names of domains, one of which may be meant for the other.
const MIN_LIKENESS: f64 = 0.7;

/// Maximum number of characters of a text in a suggestion.
const MAX_TEXT_CHARS: usize = 60;

/// An entry whose value may be unknown.
#[derive(Clone, Copy, Debug)]
pub struct PossibleEntry<'e> {
    /// Key.
    pub key: &'e [u8],
    /// Value; `None`: any.
    pub value: Option<&'e [u8]>,
    /// The entry can be left out.
    pub is_optional: bool,
}

impl<'e> From<&Entry<'e>> for PossibleEntry<'e> {
    fn from(entry: &Entry<'e>) -> Self {
        Self { key: entry.key, value: Some(entry.value), is_optional: false }
    }
}

named_enum! {
    /// Difference between a descriptor and the rule that it misses.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum MissReason {
        /// Letters of another case, or `-` in place of `_`.
        Case = "case",
        /// Entries in another order.
        Order = "order",
        /// The rule has more entries.
        TooShort = "too_short",
        /// The rule has fewer entries.
        TooLong = "too_long",
        /// A similar key.
        Key = "key",
        /// The same keys with other values.
        Value = "value",
        /// Another domain.
        Domain = "domain",
    }
}
serialize_by_name!(MissReason);

/// The rule that a descriptor misses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NearMiss {
    /// What differs.
    pub reason: MissReason,
    /// Path of the rule, as in `/rlconfig`.
    pub rule: String,
    /// Location of the rule; `None` for a domain.
    pub location: Option<SourceLocation>,
    /// Descriptor that would match, or name of a domain.
    pub suggestion: String,
}

impl NearMiss {
    /// Sentence for people, without the location.
    pub fn describe(&self) -> String {
        let Self { reason, rule, suggestion, .. } = self;
        let rule = truncate_and_escape(rule, 2 * MAX_TEXT_CHARS);
        match reason {
            MissReason::Case => format!("letters or `-` and `_` differ from {rule}: did you mean {suggestion}?"),
            MissReason::Order => format!("{rule} has the entries in another order: did you mean {suggestion}?"),
            MissReason::TooShort => format!("{rule} has more entries: did you mean {suggestion}?"),
            MissReason::TooLong => format!("{rule} has fewer entries: did you mean {suggestion}?"),
            MissReason::Key => format!("{rule} has a similar key: did you mean {suggestion}?"),
            MissReason::Domain => format!("domain {suggestion} has a rule for it: did you mean that domain?"),
            MissReason::Value => format!("{rule} has other values: it would match {suggestion}"),
        }
    }
}

/// How nodes are compared with entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ComparisonMode {
    /// As matching does.
    Exact,
    /// Letters of any case, and `-` as `_`.
    IgnoringCase,
    /// Similar keys too.
    SimilarKeys,
    /// Equal keys with any value.
    KeysOnly,
}

/// What a search allows that matching does not.
#[derive(Clone, Copy, Debug)]
struct AllowedDifference {
    comparison: ComparisonMode,
    /// Entries may be in any order.
    any_order: bool,
    /// Number of entries that the descriptor may lack.
    lacking: usize,
}

impl AllowedDifference {
    const NONE: Self = Self { comparison: ComparisonMode::Exact, any_order: false, lacking: 0 };
}

/// Search of one path.
struct Search<'s> {
    set: &'s RuleSet,
    entries: &'s [PossibleEntry<'s>],
    comparison: ComparisonMode,
    any_order: bool,
    comparisons_left: usize,
    /// Nodes of the path, each with the index of its entry; `None`: the descriptor lacks it.
    path: Vec<(NodeId, Option<usize>)>,
    /// All nodes that match, if they are wanted rather than the first.
    all: Option<&'s mut HashSet<NodeId>>,
}

/// Entries that a search has not used yet, as a set of indices.
#[derive(Clone, Copy)]
struct UnusedEntries(u32);

impl UnusedEntries {
    const fn contains(self, index: usize) -> bool {
        self.0 & (1 << index) != 0
    }

    /// Returns the entries that are left once the entry at `index` is used. Where order counts, those before it are
    /// used too.
    const fn after_using(self, index: usize, any_order: bool) -> Self {
        let used = if any_order { 1 << index } else { (1_u32 << index) | ((1 << index) - 1) };
        Self(self.0 & !used)
    }
}

impl Search<'_> {
    /// Searches below `node`; `lacking` is the number of entries that the descriptor may lack.
    fn search(&mut self, node: NodeId, unused: UnusedEntries, lacking: usize) -> bool {
        let set = self.set;
        let reached = &set.nodes[node as usize];
        let is_complete =
            (0..self.entries.len()).all(|index| !unused.contains(index) || self.entries[index].is_optional);
        if is_complete && !self.path.is_empty() && (reached.rule.is_some() || reached.exempt) {
            match &mut self.all {
                None => return true,
                Some(all) => {
                    all.insert(node);
                }
            }
        }
        for child in &reached.children {
            let Some(left) = self.comparisons_left.checked_sub(1) else { return false };
            self.comparisons_left = left;
            let compiled = &set.nodes[*child as usize];
            for index in 0..self.entries.len() {
                if !unused.contains(index) {
                    continue;
                }
                if node_fits(compiled, &self.entries[index], self.comparison) {
                    self.path.push((*child, Some(index)));
                    if self.search(*child, unused.after_using(index, self.any_order), lacking) {
                        return true;
                    }
                    self.path.pop();
                }
                if !self.any_order && !self.entries[index].is_optional {
                    break;
                }
            }
            if lacking > 0 {
                self.path.push((*child, None));
                if self.search(*child, unused, lacking - 1) {
                    return true;
                }
                self.path.pop();
            }
        }
        false
    }
}

/// Returns `true` if a node can match an entry.
fn node_fits(node: &CompiledNode, entry: &PossibleEntry<'_>, comparison: ComparisonMode) -> bool {
    let key = node.composite.get(..node.key_length).unwrap_or_default();
    match comparison {
        ComparisonMode::Exact => composite_fits(&node.composite, key, node, entry.key, entry.value),
        ComparisonMode::IgnoringCase => {
            let [composite, node_key, entry_key] = [&node.composite, key, entry.key].map(fold_case_and_dashes);
            let value = entry.value.map(fold_case_and_dashes);
            composite_fits(&composite, &node_key, node, &entry_key, value.as_deref())
        }
        ComparisonMode::SimilarKeys => {
            key == entry.key && node_fits(node, entry, ComparisonMode::Exact)
                || (are_alike(key, entry.key)
                    && node_fits(node, &PossibleEntry { key, ..*entry }, ComparisonMode::Exact))
        }
        ComparisonMode::KeysOnly => key == entry.key,
    }
}

/// Returns true if the composite key fits, compared as matching does it: `key_value` as one text.
fn composite_fits(
    composite: &[u8],
    node_key: &[u8],
    node: &CompiledNode,
    entry_key: &[u8],
    value: Option<&[u8]>,
) -> bool {
    // The value that the node has if its text begins with the key of the entry.
    let own_value = composite.strip_prefix(entry_key).and_then(|rest| rest.strip_prefix(b"_"));
    let Some(value) = value else {
        return match node.match_kind {
            MatchKind::Any => node_key == entry_key || own_value.is_some(),
            MatchKind::Exact => own_value.is_some(),
            MatchKind::Match => node_key == entry_key,
            MatchKind::Wildcard => {
                let literal = composite.split(|byte| *byte == b'*').next().unwrap_or_default();
                let prefix = [entry_key, b"_"].concat();
                literal.starts_with(&prefix) || prefix.starts_with(literal)
            }
        };
    };
    match node.match_kind {
        MatchKind::Any => node_key == entry_key || own_value == Some(value),
        MatchKind::Exact => own_value == Some(value),
        MatchKind::Wildcard => WildcardPattern::new(composite).matches(&[entry_key, b"_", value].concat()),
        MatchKind::Match => {
            node_key == entry_key && node.pattern.as_ref().is_some_and(|pattern| pattern.matches(value))
        }
    }
}

fn fold_case_and_dashes(text: &[u8]) -> Vec<u8> {
    text.iter().map(|byte| if *byte == b'-' { b'_' } else { byte.to_ascii_lowercase() }).collect()
}

/// Returns `true` if one of two short texts may be meant for the other.
fn are_alike(one: &[u8], other: &[u8]) -> bool {
    let (Ok(one), Ok(other)) = (std::str::from_utf8(one), std::str::from_utf8(other)) else { return false };
    // Bounded, because a comparison takes time proportional to the length.
    one != other
        && one.len().max(other.len()) <= 40
        && strsim::normalized_damerau_levenshtein(one, other) >= MIN_LIKENESS
}

impl RuleSet {
    /// Returns `true` if a descriptor with these entries can match a rule, or values that a rule exempts; also if that
    /// takes too long to find out.
    pub fn can_match(&self, domain: &DomainRules, entries: &[PossibleEntry<'_>]) -> bool {
        self.find_match_possibility(domain, entries) != MatchPossibility::None
    }

    /// Adds all nodes that a descriptor with these entries can match to `reached`. Returns `false` if there is too much to
    /// compare.
    pub fn collect_matches(
        &self,
        domain: &DomainRules,
        entries: &[PossibleEntry<'_>],
        reached: &mut HashSet<NodeId>,
    ) -> bool {
        if entries.len() > MAX_ENTRIES {
            return false;
        }
        let any_order = domain.matching.order == EntryOrder::Any;
        let mut search = self.new_near_miss_search(entries, ComparisonMode::Exact, any_order);
        search.all = Some(reached);
        search.search(domain.root, mark_all_unused(entries), 0);
        search.comparisons_left > 0
    }

    /// Rules of a domain whose nodes are not in `reached`.
    pub fn unreached_rules(&self, domain: &DomainRules, reached: &HashSet<NodeId>) -> Vec<&Rule> {
        let nodes = self.nodes_below(domain).into_iter().filter(|node| !reached.contains(node));
        nodes.filter_map(|node| Some(&self.nodes[node as usize].rule.as_ref()?.rule)).collect()
    }

    /// Returns a respelled value that rules of the domain count apart from the value itself, or not at all, where a rule
    /// has this key. `sample` is a value where the rules have none.
    pub fn find_escaping_value(
        &self,
        domain: &DomainRules,
        key: &[u8],
        sample: &str,
        respell: impl Fn(&str) -> Vec<String>,
    ) -> Option<String> {
        self.nodes_below(domain).into_iter().find_map(|node| {
            let node = &self.nodes[node as usize];
            if node.composite.get(..node.key_length) != Some(key) {
                return None;
            }
            let own = node.composite.get(node.key_length + 1..).map(String::from_utf8_lossy);
            let value = match (node.match_kind, &own) {
                (MatchKind::Exact, Some(own)) => own.to_string(),
                (MatchKind::Wildcard, Some(own)) => own.replace('*', ""),
                _ => sample.to_owned(),
            };
            respell(&value).into_iter().find(|spelling| match node.match_kind {
                MatchKind::Exact | MatchKind::Any => true,
                // What an expression matches is not compared.
                MatchKind::Match => !node.share_threshold,
                MatchKind::Wildcard => {
                    !node.share_threshold
                        || !WildcardPattern::new(&node.composite).matches(&[key, b"_", spelling.as_bytes()].concat())
                }
            })
        })
    }

    /// Nodes of a domain, without its root.
    fn nodes_below(&self, domain: &DomainRules) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = self.nodes[domain.root as usize].children.to_vec();
        let mut next = 0;
        while let Some(node) = nodes.get(next) {
            nodes.extend_from_slice(&self.nodes[*node as usize].children);
            next += 1;
        }
        nodes
    }

    /// Returns the name of a domain for which `name` was probably meant.
    pub fn find_similar_domain(&self, name: &str) -> Option<&str> {
        let mut names: Vec<&str> = self.domains().map(|domain| &*domain.name).collect();
        names.sort_unstable();
        let folded = fold_case_and_dashes(name.as_bytes());
        let same = names.iter().find(|known| fold_case_and_dashes(known.as_bytes()) == folded);
        same.or_else(|| names.iter().find(|known| are_alike(known.as_bytes(), name.as_bytes()))).copied()
    }

    /// Returns the rule for which a descriptor that matches none was probably meant.
    pub fn find_near_miss(&self, domain: &DomainRules, entries: &[PossibleEntry<'_>]) -> Option<NearMiss> {
        if entries.is_empty() || entries.len() > MAX_ENTRIES || self.can_match(domain, entries) {
            return None;
        }
        let find = |comparison, any_order, lacking| {
            self.search_with_difference(domain, entries, AllowedDifference { comparison, any_order, lacking })
        };
        let miss = |reason, path: Vec<(NodeId, Option<usize>)>| self.build_near_miss(reason, &path, entries);
        if let Some(path) = find(ComparisonMode::IgnoringCase, false, 0) {
            return miss(MissReason::Case, path);
        }
        if let Some(path) = find(ComparisonMode::Exact, true, 0) {
            return miss(MissReason::Order, path);
        }
        if let Some(path) = find(ComparisonMode::Exact, false, 1).or_else(|| find(ComparisonMode::Exact, false, 2)) {
            return miss(MissReason::TooShort, path);
        }
        if let Some(near) = self.find_with_fewer_entries(domain, entries) {
            return Some(near);
        }
        if let Some(path) = find(ComparisonMode::SimilarKeys, false, 0) {
            return miss(MissReason::Key, path);
        }
        if let Some(path) = find(ComparisonMode::KeysOnly, false, 0) {
            return miss(MissReason::Value, path);
        }
        self.find_in_other_domain(domain, entries)
    }

    /// Searches with one entry left out, the last one first.
    fn find_with_fewer_entries(&self, domain: &DomainRules, entries: &[PossibleEntry<'_>]) -> Option<NearMiss> {
        if entries.len() < 2 {
            return None;
        }
        (0..entries.len()).rev().find_map(|left_out| {
            let mut fewer = entries.to_vec();
            fewer.remove(left_out);
            let path = self.search_with_difference(domain, &fewer, AllowedDifference::NONE)?;
            self.build_near_miss(MissReason::TooLong, &path, &fewer)
        })
    }

    /// Searches in other domains, by their names.
    fn find_in_other_domain(&self, domain: &DomainRules, entries: &[PossibleEntry<'_>]) -> Option<NearMiss> {
        let mut others: Vec<&DomainRules> = self.domains().filter(|other| other.name != domain.name).collect();
        others.sort_unstable_by_key(|other| &*other.name);
        let other = others
            .into_iter()
            .take(MAX_SEARCHED_DOMAINS)
            .find(|other| matches!(self.find_match_possibility(other, entries), MatchPossibility::Found))?;
        let suggestion = truncate_and_escape(&other.name, MAX_TEXT_CHARS);
        Some(NearMiss { reason: MissReason::Domain, rule: other.name.clone(), location: None, suggestion })
    }

    fn find_match_possibility(&self, domain: &DomainRules, entries: &[PossibleEntry<'_>]) -> MatchPossibility {
        if entries.len() > MAX_ENTRIES {
            return MatchPossibility::Unknown;
        }
        let any_order = domain.matching.order == EntryOrder::Any;
        let mut search = self.new_near_miss_search(entries, ComparisonMode::Exact, any_order);
        match (search.search(domain.root, mark_all_unused(entries), 0), search.comparisons_left) {
            (true, _) => MatchPossibility::Found,
            (false, 0) => MatchPossibility::Unknown,
            (false, _) => MatchPossibility::None,
        }
    }

    fn search_with_difference(
        &self,
        domain: &DomainRules,
        entries: &[PossibleEntry<'_>],
        difference: AllowedDifference,
    ) -> Option<Vec<(NodeId, Option<usize>)>> {
        let AllowedDifference { comparison, any_order, lacking } = difference;
        let any_order = any_order || domain.matching.order == EntryOrder::Any;
        let mut search = self.new_near_miss_search(entries, comparison, any_order);
        search.search(domain.root, mark_all_unused(entries), lacking).then_some(search.path)
    }

    fn new_near_miss_search<'s>(
        &'s self,
        entries: &'s [PossibleEntry<'s>],
        comparison: ComparisonMode,
        any_order: bool,
    ) -> Search<'s> {
        Search {
            set: self,
            entries,
            comparison,
            any_order,
            comparisons_left: MAX_COMPARISONS,
            path: Vec::new(),
            all: None,
        }
    }

    fn build_near_miss(
        &self,
        reason: MissReason,
        path: &[(NodeId, Option<usize>)],
        entries: &[PossibleEntry<'_>],
    ) -> Option<NearMiss> {
        let (last, _) = path.last()?;
        let last = &self.nodes[*last as usize];
        let written: Vec<String> = path
            .iter()
            .map(|(node, index)| {
                let node = &self.nodes[*node as usize];
                format_suggested_entry(node, index.and_then(|index| entries.get(index)), reason)
            })
            .collect();
        let suggestion = written.join(",");
        let rule = last.rule.as_ref().map_or_else(|| suggestion.clone(), |rule| rule.rule.path.clone());
        let location = last.rule.as_ref().map(|rule| rule.rule.location.clone()).or_else(|| last.location.clone());
        Some(NearMiss { reason, rule, location, suggestion })
    }
}

/// Whether a descriptor can match a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MatchPossibility {
    Found,
    None,
    /// There are too many nodes, or entries.
    Unknown,
}

fn mark_all_unused(entries: &[PossibleEntry<'_>]) -> UnusedEntries {
    UnusedEntries((1_u32 << entries.len().min(MAX_ENTRIES)) - 1)
}

/// Writes an entry that the node matches: with the node's own value, else with the descriptor's, else with `...`.
fn format_suggested_entry(node: &CompiledNode, entry: Option<&PossibleEntry<'_>>, reason: MissReason) -> String {
    let text = |bytes: &[u8]| truncate_and_escape(&String::from_utf8_lossy(bytes), MAX_TEXT_CHARS);
    let key = node.composite.get(..node.key_length).unwrap_or_default();
    let own = node.composite.get(node.key_length + 1..);
    let value = match (node.match_kind, own, entry.and_then(|entry| entry.value)) {
        (MatchKind::Exact, Some(own), _) => text(own),
        (MatchKind::Wildcard | MatchKind::Match, Some(own), _) if reason == MissReason::Value => text(own),
        (MatchKind::Wildcard | MatchKind::Match, Some(own), None) => text(own),
        (_, _, Some(value)) => text(value),
        (_, _, None) => "...".to_owned(),
    };
    format!("{}={value}", text(key))
}
