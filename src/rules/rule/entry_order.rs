//! Entries in any order, for domains with `matching: { order: any }`.
//!
//! The compiler sorts the path of each rule by key. A request gets its entries sorted once, before anything reads them:
//! by key, then by value. So matching, counters, metrics and the decision log see one order whatever was sent.
//!
//! If a descriptor has a key more than once, its entries are assigned to the levels with that key by the order of
//! matching: at each level, of the entries that are left, the one with the best match goes there, the one with the
//! smallest value of equal ones. A descriptor with a key more often than any rule matches nothing and stays sorted.
//!
//! The entries of a quota's bucket never have an order, whatever the domain says: they get that of the rule for just
//! these entries, so that a bucket and a descriptor share a counter. Of several such rules the first best match at each
//! level counts.
//!
//! Decides: in which order entries match with `order: any`, a key twice; the order of entries of a quota's bucket.

use smallvec::SmallVec;

use super::set::{DomainRules, RuleSet};
use super::value_pattern::MatchKind;
use super::{EntryOrder, NodeId};
use crate::limit::request::{Entry, Request};

/// Entries of a descriptor.
type Entries<'m> = SmallVec<[Entry<'m>; 4]>;

/// Nodes of one level that entries match, each with the kind of match and the index of its entry.
type MatchesOfEntries = SmallVec<[(NodeId, MatchKind, usize); 4]>;

/// Maximum number of steps of the search for the order of a bucket's entries; a bucket that needs more has no rule.
const MAX_BUCKET_ORDER_STEPS: usize = 1000;

impl RuleSet {
    /// Returns the domain of that name if it takes entries in any order.
    #[inline]
    pub fn find_domain_with_any_order(&self, name: &str) -> Option<&DomainRules> {
        if !self.has_matching_options() {
            return None;
        }
        self.domain(name).filter(|domain| domain.matching.order == EntryOrder::Any)
    }

    /// Puts the entries of each descriptor in the order of the rules of its domain, which takes them in any order.
    pub fn sort_request_entries(&self, domain: &DomainRules, request: &mut Request<'_>) {
        request.descriptors.iter_mut().for_each(|descriptor| self.order_entries(domain, &mut descriptor.entries));
    }

    /// Returns the entries of a quota's bucket in the order of the rule for just these entries, if there is one.
    pub fn order_bucket_entries<'m>(&self, domain: &DomainRules, mut entries: Entries<'m>) -> Entries<'m> {
        match domain.matching.order {
            EntryOrder::Any => self.order_entries(domain, &mut entries),
            EntryOrder::AsWritten => {
                if let Some(order) = self.find_bucket_entry_order(domain, &entries) {
                    entries = order.into_iter().map(|index| entries[index]).collect();
                }
            }
        }
        entries
    }

    /// Searches an order of the entries that ends at a rule, in at most [`MAX_BUCKET_ORDER_STEPS`] steps.
    fn find_bucket_entry_order(&self, domain: &DomainRules, entries: &[Entry<'_>]) -> Option<SmallVec<[usize; 8]>> {
        let mut used: SmallVec<[bool; 8]> = SmallVec::from_elem(false, entries.len());
        let mut path: SmallVec<[MatchesOfEntries; 4]> = SmallVec::new();
        let mut chosen: SmallVec<[usize; 8]> = SmallVec::new();
        path.push(self.find_bucket_matches(domain, domain.root, entries, &used));
        for _ in 0..MAX_BUCKET_ORDER_STEPS {
            let Some((node, _, index)) = path.last_mut()?.pop() else {
                path.pop();
                used[chosen.pop()?] = false;
                continue;
            };
            let compiled = &self.nodes[node as usize];
            if path.len() == entries.len() {
                if compiled.rule.is_some() || compiled.exempt {
                    chosen.push(index);
                    return Some(chosen);
                }
            } else if !compiled.children.is_empty() {
                used[index] = true;
                chosen.push(index);
                path.push(self.find_bucket_matches(domain, node, entries, &used));
            }
        }
        None
    }

    /// Returns the matches below `node` of the entries that are left, best last.
    fn find_bucket_matches(
        &self,
        domain: &DomainRules,
        node: NodeId,
        entries: &[Entry<'_>],
        used: &[bool],
    ) -> MatchesOfEntries {
        let left = entries.iter().enumerate().filter(|(index, _)| !used[*index]);
        let mut found: MatchesOfEntries = left
            .flat_map(|(index, entry)| {
                let matches = match domain.matching.backtrack {
                    true => self.find_matching_children(node, entry),
                    false => self.match_entry(node, entry).into_iter().collect(),
                };
                matches.into_iter().map(move |(node, kind)| (node, kind, index))
            })
            .collect();
        found.sort_by_key(|(node, kind, index)| std::cmp::Reverse((match_rank(*kind), *node, *index)));
        found
    }

    fn order_entries(&self, domain: &DomainRules, entries: &mut Entries<'_>) {
        entries.sort_by(|one, other| (one.key, one.value).cmp(&(other.key, other.value)));
        let may_match = |group: &[Entry<'_>]| {
            domain.repeated_keys.get(group[0].key).is_some_and(|times| group.len() as u64 <= *times)
        };
        let mut repeated =
            entries.chunk_by(|one, other| one.key == other.key).filter(|group| group.len() > 1).peekable();
        if repeated.peek().is_some()
            && repeated.all(may_match)
            && let Some(order) = self.assign_entries(domain, entries)
        {
            *entries = order.into_iter().map(|index| entries[index]).collect();
        }
    }

    /// Assigns sorted entries to levels; returns their order, if all match.
    fn assign_entries(&self, domain: &DomainRules, entries: &[Entry<'_>]) -> Option<SmallVec<[usize; 8]>> {
        struct SearchLevel {
            candidates: MatchesOfEntries,
            at: usize,
        }
        let mut levels: SmallVec<[SearchLevel; 4]> = SmallVec::new();
        let mut used: SmallVec<[bool; 8]> = SmallVec::from_elem(false, entries.len());
        let find_level = |node, depth, used: &[bool]| {
            let mut candidates = self.find_assignments(node, entries, depth, used);
            if !domain.matching.backtrack {
                candidates.truncate(1);
            }
            SearchLevel { candidates, at: 0 }
        };
        levels.push(find_level(domain.root, 0, &used));
        while let Some(level) = levels.last_mut() {
            let Some((node, _, index)) = level.candidates.get(level.at).copied() else {
                // Without backtracking each level has one candidate, so the search ends here.
                levels.pop();
                if let Some(above) = levels.last_mut() {
                    used[above.candidates[above.at].2] = false;
                    above.at += 1;
                }
                continue;
            };
            let depth = levels.len();
            let compiled = &self.nodes[node as usize];
            let is_end = !domain.matching.backtrack || compiled.rule.is_some() || compiled.exempt;
            if depth == entries.len() && is_end {
                return Some(levels.iter().map(|level| level.candidates[level.at].2).collect());
            }
            if depth < entries.len() && !compiled.children.is_empty() {
                used[index] = true;
                levels.push(find_level(node, depth, &used));
            } else if let Some(level) = levels.last_mut() {
                level.at += 1;
            }
        }
        None
    }

    /// Returns the matches below `node` of the entries that are left and have the key of the entry at `depth`, best
    /// first.
    fn find_assignments(&self, node: NodeId, entries: &[Entry<'_>], depth: usize, used: &[bool]) -> MatchesOfEntries {
        let key = entries[depth].key;
        let start = entries.partition_point(|entry| entry.key < key);
        let mut found = MatchesOfEntries::new();
        let mut last_value = None;
        for (index, entry) in entries.iter().enumerate().skip(start).take_while(|(_, entry)| entry.key == key) {
            // Equal entries are interchangeable.
            if used[index] || last_value == Some(entry.value) {
                continue;
            }
            last_value = Some(entry.value);
            found.extend(self.find_matching_children(node, entry).into_iter().map(|(node, kind)| (node, kind, index)));
        }
        found.sort_by_key(|(node, kind, index)| (match_rank(*kind), *node, *index));
        found
    }
}

/// Rank of a kind of match, lowest first.
const fn match_rank(kind: MatchKind) -> u8 {
    match kind {
        MatchKind::Exact => 0,
        MatchKind::Wildcard | MatchKind::Match => 1,
        MatchKind::Any => 2,
    }
}
