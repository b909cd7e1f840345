//! Bound of the steps that a search with backtracking takes, computed from the rules alone.
//!
//! Decides: how many steps `backtrack` may take, for a descriptor (`MAX_BACKTRACKING_STEPS`) and for a call.

use std::collections::HashMap;

use super::value_pattern::{MatchKind, has_star};
use super::{EntryOrder, MatchingOptions, RuleNode};

/// Maximum number of nodes that the search for one descriptor may try.
pub const MAX_BACKTRACKING_STEPS: u64 = 20_000;
/// Maximum number of nodes that the searches for all descriptors of a call may try: some tenths of a second.
pub(super) const MAX_BACKTRACKING_STEPS_PER_CALL: u64 = 100 * MAX_BACKTRACKING_STEPS;

/// Returns an upper bound of the nodes that the search for one descriptor tries among these and all nodes below; 0
/// without backtracking.
///
/// An entry has one key. It matches all patterns of that key at most, and one node by each of two look-ups: that of its
/// key and value, and that of its key. With entries in any order, each of the entries with one key is tried at each of
/// the levels with it.
pub fn max_backtracking_steps(nodes: &[RuleNode], matching: MatchingOptions) -> u64 {
    if !matching.backtrack {
        return 0;
    }
    let repeated = match matching.order {
        EntryOrder::AsWritten => HashMap::new(),
        EntryOrder::Any => count_repeated_keys(nodes),
    };
    max_backtracking_steps_below(nodes, &repeated)
}

fn max_backtracking_steps_below(nodes: &[RuleNode], repeated: &HashMap<&str, u64>) -> u64 {
    let mut patterns_of_keys: HashMap<&str, u64> = HashMap::new();
    // A `*` in a key matches any key.
    let mut patterns_of_all_keys = 0_u64;
    let mut most_of_one = 0;
    for node in nodes {
        let steps = max_backtracking_steps_below(&node.descriptors, repeated).saturating_add(1);
        match node.match_kind() {
            MatchKind::Exact | MatchKind::Any => most_of_one = steps.max(most_of_one),
            MatchKind::Wildcard | MatchKind::Match => {
                let of_key = match has_star(&node.key) {
                    true => &mut patterns_of_all_keys,
                    false => patterns_of_keys.entry(&node.key).or_default(),
                };
                *of_key = of_key.saturating_add(steps);
            }
        }
    }
    let most_repeats = repeated.values().copied().max().unwrap_or(1);
    let of_key = |(key, steps): (&&str, &u64)| steps.saturating_mul(repeated.get(*key).copied().unwrap_or(1));
    let of_patterns = patterns_of_keys.iter().map(of_key).max().unwrap_or(0).saturating_add(patterns_of_all_keys);
    of_patterns.saturating_add(most_of_one.saturating_mul(2 * most_repeats))
}

/// Returns the keys that a path has more than once, with the largest number of times.
pub(super) fn count_repeated_keys(nodes: &[RuleNode]) -> HashMap<&str, u64> {
    let mut repeated = HashMap::new();
    let mut waiting: Vec<(&RuleNode, &str, u64)> = nodes.iter().map(|node| (node, "", 0)).collect();
    while let Some((node, key_above, times_above)) = waiting.pop() {
        // Keys of a path are sorted.
        let times = if node.key == key_above { times_above + 1 } else { 1 };
        if times > 1 {
            let most = repeated.entry(&*node.key).or_insert(times);
            *most = times.max(*most);
        }
        waiting.extend(node.descriptors.iter().map(|child| (child, &*node.key, times)));
    }
    repeated
}
