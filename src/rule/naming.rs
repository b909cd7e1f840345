//! The names of metrics that follow a request's values: `detailed_metric` and `value_to_metric`.
//!
//! They are what envoyproxy/ratelimit makes of them: the whole path as it was sent, or the value of one level in place
//! of what the rule says there. A value that shares its counter never shows: the pattern stands for it. How many such
//! names are kept is not decided here.

use smallvec::SmallVec;

use super::matching::MatchKind;
use super::set::{CompiledRule, DomainRules, RuleSet};
use crate::request::Entry;

/// The parts of a name below the domain.
pub type NameParts = SmallVec<[String; 4]>;

/// How one entry was met.
struct MatchedEntry<'r> {
    composite: &'r [u8],
    met: MatchKind,
    /// Its value shares a counter with others.
    shares: bool,
    /// Its value is wanted in the name.
    by_value: bool,
}

impl RuleSet {
    /// The name of `rule`, which `entries` met in `domain`, by the values of this request.
    pub fn name_by_request(&self, domain: &DomainRules, rule: &CompiledRule, entries: &[Entry<'_>]) -> NameParts {
        let mut steps: SmallVec<[MatchedEntry<'_>; 4]> = SmallVec::new();
        let mut node = domain.root;
        for entry in entries {
            let Some((next, met)) = self.step(node, entry) else { break };
            let met_node = &self.nodes[next as usize];
            let shares = met == MatchKind::Wildcard && met_node.share_threshold;
            steps.push(MatchedEntry {
                composite: &met_node.composite,
                met,
                shares,
                by_value: met_node.value_to_metric,
            });
            node = next;
        }
        let any_shares = steps.iter().any(|step| step.shares);
        let part = |(entry, step): (&Entry<'_>, &MatchedEntry<'_>)| match step.met {
            _ if step.shares => text(step.composite),
            _ if rule.rule.detailed_metric => joined(entry, !any_shares),
            MatchKind::Wildcard | MatchKind::Default if step.by_value => joined(entry, false),
            _ => text(step.composite),
        };
        entries.iter().zip(&steps).map(part).collect()
    }
}

/// `key_value`; the `_` stays where there is no value if `always` says so.
fn joined(entry: &Entry<'_>, always: bool) -> String {
    match entry.value.is_empty() && !always {
        true => text(entry.key),
        false => format!("{}_{}", text(entry.key), text(entry.value)),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
