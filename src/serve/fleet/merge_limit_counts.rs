//! Decisions by limit, over all replicas.

use std::collections::HashMap;

use super::summary::{LimitSummary, ReplicaSummary, decode_sketch};
use crate::serve::report::rules::SlotCounts;
use crate::telemetry::hyperloglog::DistinctKeySketch;
use crate::telemetry::metrics::limit_stats::LimitName;

/// Maximum number of limits; the others are left out.
const MAX_LIMITS: usize = 20_000;
/// Maximum length of a name in bytes.
const MAX_LIMIT_NAME_BYTES: usize = 1024;

/// Decisions by limit.
#[derive(Debug, Default)]
pub struct MergedCountsByLimit {
    /// Decisions by the limit's name.
    pub by_name: HashMap<String, MergedLimitCounts>,
    /// Number of times that a limit of a replica was left out.
    pub left_out: usize,
}

/// Decisions of a limit, over all replicas.
#[derive(Debug, Default)]
pub struct MergedLimitCounts {
    /// Domain, as in metrics; `None` if it is not known, or if limits of two domains have the name.
    pub domain: Option<String>,
    /// Number of replicas that have the limit.
    pub replicas: usize,
    /// Number of decisions.
    pub matched: u64,
    /// Number of decisions that rejected.
    pub rejected: u64,
    /// Hits within the limit and above NEAR_LIMIT_RATIO of it.
    pub near_limit_hits: u64,
    /// Slots of a concurrent limit; `None` of others.
    pub slots: Option<SlotCounts>,
    /// Distinct keys.
    pub keys: MergedDistinctKeys,
    /// Distinct keys that were rejected.
    pub rejected_keys: MergedDistinctKeys,
}

/// Distinct keys over all replicas: union of their HyperLogLog sketches.
#[derive(Debug, Default)]
pub struct MergedDistinctKeys {
    union: DistinctKeySketch,
    merged: usize,
}

impl MergedCountsByLimit {
    /// Adds the limits of a summary; its sketches count if they have the seed `distinct_seed`.
    pub fn add_summary(&mut self, summary: &ReplicaSummary, distinct_seed: Option<&str>) {
        let has_seed = distinct_seed.is_some() && summary.distinct_seed.as_deref() == distinct_seed;
        self.left_out = self.left_out.saturating_add(summary.limits_left_out);
        for limit in &summary.limits {
            let name = summary.names.get(limit.name).filter(|name| name.len() <= MAX_LIMIT_NAME_BYTES);
            let has_room = |name: &String| self.by_name.len() < MAX_LIMITS || self.by_name.contains_key(name);
            match name.filter(|name| has_room(name)) {
                Some(name) => {
                    let domain_bytes = summary.domain_bytes.get(limit.name).copied();
                    let published = LimitName::from_published(name, domain_bytes);
                    let merged = self.by_name.entry(name.clone()).or_default();
                    merged.keep_domain_if_agreed(published.known_domain());
                    merged.add_limit_summary(limit, has_seed);
                }
                None => self.left_out = self.left_out.saturating_add(1),
            }
        }
    }
}

impl MergedLimitCounts {
    /// Keeps the domain while all replicas agree on it, otherwise clears it; to be called before a replica is counted.
    fn keep_domain_if_agreed(&mut self, domain: Option<&str>) {
        let is_first = self.replicas == 0;
        match domain {
            Some(domain) if is_first => self.domain = Some(domain.to_owned()),
            Some(domain) if self.domain.as_deref() != Some(domain) => self.domain = None,
            _ => {}
        }
    }

    fn add_limit_summary(&mut self, limit: &LimitSummary, has_seed: bool) {
        self.replicas += 1;
        self.matched = self.matched.saturating_add(limit.matched);
        self.rejected = self.rejected.saturating_add(limit.rejected);
        self.near_limit_hits = self.near_limit_hits.saturating_add(limit.near_limit_hits);
        if let Some(counts) = limit.slots {
            self.slots = Some(self.slots.unwrap_or_default().saturating_add(counts.into()));
        }
        if has_seed {
            self.keys.merge_sketch(limit.keys.as_deref());
            self.rejected_keys.merge_sketch(limit.rejected_keys.as_deref());
        }
    }

    /// Estimated number of distinct keys; `None` unless the sketches of all replicas were merged.
    pub fn distinct_keys(&self) -> Option<u64> {
        self.keys.estimate_distinct_keys(self.replicas)
    }

    /// Estimated number of distinct rejected keys; `None` unless the sketches of all replicas were merged.
    pub fn distinct_rejected_keys(&self) -> Option<u64> {
        self.rejected_keys.estimate_distinct_keys(self.replicas)
    }
}

impl MergedDistinctKeys {
    fn merge_sketch(&mut self, sketch: Option<&str>) {
        if let Some(sketch) = sketch.and_then(decode_sketch) {
            self.union.merge(&sketch);
            self.merged += 1;
        }
    }

    fn estimate_distinct_keys(&self, replicas: usize) -> Option<u64> {
        (self.merged == replicas).then(|| self.union.estimate())
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_LIMITS, MergedCountsByLimit};
    use crate::serve::fleet::summary::{LimitSummary, ReplicaSummary, encode_sketch};
    use crate::telemetry::hyperloglog::DistinctKeySketch;

    fn with_sketch(seed: &str) -> ReplicaSummary {
        let keys = DistinctKeySketch::from_nonzero_registers([(1, 1), (2, 3)]).expect("both are in range");
        ReplicaSummary {
            distinct_seed: Some(seed.to_owned()),
            names: vec!["shop.a".to_owned()],
            limits: vec![LimitSummary { matched: 2, keys: Some(encode_sketch(&keys)), ..LimitSummary::default() }],
            ..ReplicaSummary::default()
        }
    }

    #[test]
    fn distinct_keys_of_another_seed_are_not_merged() {
        let mut merged = MergedCountsByLimit::default();
        merged.add_summary(&with_sketch("a"), Some("a"));
        assert_eq!(merged.by_name["shop.a"].distinct_keys(), Some(2));
        // The same sketch is the same keys.
        merged.add_summary(&with_sketch("a"), Some("a"));
        assert_eq!(merged.by_name["shop.a"].distinct_keys(), Some(2));
        merged.add_summary(&with_sketch("b"), Some("a"));
        assert_eq!(merged.by_name["shop.a"].distinct_keys(), None);
        assert_eq!(merged.by_name["shop.a"].matched, 6);
    }

    #[test]
    fn limits_without_room_are_counted() {
        let mut merged = MergedCountsByLimit::default();
        for part in 0..3 {
            let names: Vec<String> = (0..MAX_LIMITS / 2).map(|name| format!("{part}.{name}")).collect();
            let limits = (0..names.len()).map(|name| LimitSummary { name, ..LimitSummary::default() }).collect();
            merged
                .add_summary(&ReplicaSummary { names, limits, limits_left_out: 7, ..ReplicaSummary::default() }, None);
        }
        assert_eq!((merged.by_name.len(), merged.left_out), (MAX_LIMITS, MAX_LIMITS / 2 + 3 * 7));
    }
}
