//! Metric names with a request's values: `detailed_metric`, `value_to_metric` and limits that came with the request.
//!
//! The names are those of envoyproxy/ratelimit: the whole path as sent, or the value of one level in place of the
//! rule's. A value with a shared counter does not appear; its pattern does. The number of names is bounded by
//! telemetry.
//!
//! Decides: names of limits in metrics (`detailed_metric`, `value_to_metric`).

use smallvec::SmallVec;

use super::set::{CompiledRule, DomainRules, RuleSet};
use super::value_pattern::MatchKind;
use crate::limit::request::Entry;

/// Parts of a name below the domain.
pub type MetricNameParts = SmallVec<[String; 4]>;

/// Returns the metric name of a limit that came with a request: a composite key for each entry.
pub fn build_override_metric_name(entries: &[Entry<'_>]) -> MetricNameParts {
    entries.iter().map(|entry| join_key_value(entry, false)).collect()
}

/// An entry with the node that it matched.
struct MatchedEntry<'r> {
    composite: &'r [u8],
    match_kind: MatchKind,
    /// Values share one counter.
    shares: bool,
    /// The name contains the value.
    by_value: bool,
}

impl RuleSet {
    /// Returns the metric name of `rule`, which `entries` matched in `domain`, with the values of this request.
    pub fn metric_name_by_request(
        &self,
        domain: &DomainRules,
        rule: &CompiledRule,
        entries: &[Entry<'_>],
    ) -> MetricNameParts {
        let mut steps: SmallVec<[MatchedEntry<'_>; 4]> = SmallVec::new();
        for (node, match_kind) in self.find_matched_path(domain, entries) {
            let matched = &self.nodes[node as usize];
            let shares = match_kind.can_share_counter() && matched.share_threshold;
            steps.push(MatchedEntry {
                composite: &matched.composite,
                match_kind,
                shares,
                by_value: matched.value_to_metric,
            });
        }
        let any_shares = steps.iter().any(|step| step.shares);
        let part = |(entry, step): (&Entry<'_>, &MatchedEntry<'_>)| {
            if step.shares {
                to_lossy_text(step.composite)
            } else if rule.rule.detailed_metric {
                join_key_value(entry, !any_shares)
            } else if step.by_value && step.match_kind.has_many_values() {
                join_key_value(entry, false)
            } else {
                to_lossy_text(step.composite)
            }
        };
        entries.iter().zip(&steps).map(part).collect()
    }
}

/// Returns `key_value`; without a value, `key_` if `always`, else `key`.
fn join_key_value(entry: &Entry<'_>, always: bool) -> String {
    match entry.value.is_empty() && !always {
        true => to_lossy_text(entry.key),
        false => format!("{}_{}", to_lossy_text(entry.key), to_lossy_text(entry.value)),
    }
}

fn to_lossy_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
