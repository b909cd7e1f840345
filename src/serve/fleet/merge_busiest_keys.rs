//! Keys with most hits over all replicas, from the estimates in their summaries.
//!
//! A replica publishes its busiest keys of ten minutes, so the sum over replicas is an estimate too: a replica where a
//! key is not among the busiest has no part in it.

use std::collections::HashMap;
use std::sync::Arc;

use super::summary::{PublishedKeyForm, ReplicaSummary};
use crate::telemetry::metrics::limit_stats::LimitName;
use crate::telemetry::top_keys::{RejectedKey, TopKeysSnapshot};

/// Maximum number of keys of one summary; replicas publish no more.
pub const MAX_BUSY_KEYS: usize = 50;
/// Maximum number of keys of all summaries.
const MAX_MERGED_KEYS: usize = 10_000;
/// Maximum length of a name or text in bytes; replicas publish shorter ones.
const MAX_TEXT_BYTES: usize = 1024;

/// Busiest keys of several replicas.
#[derive(Debug, Default)]
pub struct MergedBusiestKeys {
    hits: HashMap<BusyKeyId, u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct BusyKeyId {
    limit: LimitName,
    text: String,
    has_plain_values: bool,
}

impl MergedBusiestKeys {
    /// Adds the busiest keys of a summary, without those that refer to no name, or whose name or text is too long.
    pub fn add_summary(&mut self, summary: &ReplicaSummary) {
        for busy in summary.busy.iter().take(MAX_BUSY_KEYS) {
            let Some(name) = summary.names.get(busy.name) else { continue };
            if name.len() > MAX_TEXT_BYTES || busy.text.len() > MAX_TEXT_BYTES {
                continue;
            }
            let limit = LimitName::from_published(name, summary.domain_bytes.get(busy.name).copied());
            let has_plain_values = summary.values == PublishedKeyForm::Plain;
            let id = BusyKeyId { limit, text: busy.text.clone(), has_plain_values };
            if self.hits.len() < MAX_MERGED_KEYS || self.hits.contains_key(&id) {
                let sum = self.hits.entry(id).or_default();
                *sum = sum.saturating_add(busy.hits);
            }
        }
    }

    /// Returns the keys of limits that `filter` accepts, the busiest first.
    pub fn snapshot(&self, filter: impl Fn(&LimitName) -> bool) -> TopKeysSnapshot {
        let mut keys: Vec<RejectedKey> = self
            .hits
            .iter()
            .filter(|(id, _)| filter(&id.limit))
            .map(|(id, hits)| RejectedKey {
                limit: Arc::new(id.limit.clone()),
                text: id.text.as_str().into(),
                has_plain_values: id.has_plain_values,
                at_least: *hits,
                at_most: *hits,
                in_bursts: 0,
                largest_burst: 0,
            })
            .collect();
        keys.sort_by(|a, b| (b.at_least, &a.text, &a.limit).cmp(&(a.at_least, &b.text, &b.limit)));
        TopKeysSnapshot { keys, max_missed: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_BUSY_KEYS, MergedBusiestKeys};
    use crate::serve::fleet::summary::{BusyKeySummary, PublishedKeyForm, ReplicaSummary};

    fn summary(keys: &[(usize, &str, u64)]) -> ReplicaSummary {
        let busy =
            keys.iter().map(|(name, text, hits)| BusyKeySummary { name: *name, text: (*text).into(), hits: *hits });
        ReplicaSummary {
            names: vec!["shop.user".to_owned(), "shop.path".to_owned()],
            domain_bytes: vec![4, 4],
            busy: busy.collect(),
            values: PublishedKeyForm::Plain,
            ..ReplicaSummary::default()
        }
    }

    #[test]
    fn hits_of_a_key_are_added_up_and_hostile_entries_are_left_out() {
        let mut merged = MergedBusiestKeys::default();
        merged.add_summary(&summary(&[(0, "user=ann", 5), (1, "path=/", 7), (9, "user=eve", 1)]));
        merged.add_summary(&summary(&[(0, "user=ann", 4), (0, &"x".repeat(5000), u64::MAX)]));
        let many: Vec<_> = (0..MAX_BUSY_KEYS + 9).map(|_| (0, "user=bob", 1)).collect();
        merged.add_summary(&summary(&many));
        let rows = |filter: fn(&str) -> bool| -> Vec<(String, u64)> {
            let snapshot = merged.snapshot(|name| filter(name.as_str()));
            snapshot.keys.iter().map(|key| (key.text.to_string(), key.at_least)).collect()
        };
        let row = |text: &str, hits| (text.to_owned(), hits);
        assert_eq!(rows(|_| true), [row("user=bob", 50), row("user=ann", 9), row("path=/", 7)]);
        assert_eq!(rows(|name| name == "shop.path"), [row("path=/", 7)]);
    }
}
