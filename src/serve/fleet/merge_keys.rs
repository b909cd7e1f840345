//! Rejected keys of all replicas, from the sketches in their summaries, and keys with most hits, from the estimates.
//!
//! For rejected keys, a summary tells for each minute the counts of some keys, as bounds, and a *floor*: no other key
//! had more hits. So in one minute, over all summaries, a key has
//!
//! - at least the sum of its lower bounds, and
//! - at most the sum of its upper bounds, plus the floors of the summaries that lack it.
//!
//! The second sum is kept as the sum of all floors plus, for each summary that has the key, what its bound exceeds the
//! floor by, if it does: the key's *excess*. See Agarwal et al., "Mergeable summaries", 2013, section 3. If there are
//! too many keys, those with the smallest excess are dropped; from then on, their largest excess is added to that of
//! every key that is new or missing, because it may be one of those dropped.
//!
//! A replica publishes its busiest keys of ten minutes, so their sum over replicas is an estimate too: a replica where
//! a key is not among the busiest has no part in it.
//!
//! Decides: how busy keys are added up over replicas.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::summary::{PublishedKeyForm, RejectedKeysMinuteSummary, ReplicaSummary};
use crate::telemetry::metrics::limit_stats::LimitName;
use crate::telemetry::top_keys::{KEPT_MINUTES, RejectedKey, TopKeysSnapshot};

/// Maximum number of keys in a minute; more are kept until there are twice as many.
const MAX_KEYS_PER_MINUTE: usize = 3_000;
/// Maximum length of a key's text in bytes; replicas publish shorter ones.
const MAX_KEY_TEXT_BYTES: usize = 400;
/// Maximum length of a limit's name in bytes; replicas publish shorter ones.
const MAX_LIMIT_NAME_BYTES: usize = 1024;
/// Maximum number of limits with rejected keys.
const MAX_LIMITS: usize = 20_000;
/// Maximum number of domains that have a limit of one name.
const MAX_DOMAINS_PER_LIMIT_NAME: usize = 16;

/// Rejected keys of several replicas.
#[derive(Debug, Default)]
pub struct MergedRejectedKeys {
    minutes: HashMap<u64, MergedMinuteCounts>,
    /// Names by their text; several only if they have different domains.
    limits: HashMap<String, Vec<Arc<LimitName>>>,
}

/// A rejected key: its limit, and its text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct MergedRejectedKey {
    limit: Arc<LimitName>,
    text: Arc<str>,
    has_plain_values: bool,
}

/// Rejected hits of one minute by key, over all summaries.
#[derive(Debug, Default)]
struct MergedMinuteCounts {
    keys: HashMap<MergedRejectedKey, MergedKeyCount>,
    /// Sum of the floors of all summaries.
    floor: u64,
    /// Largest excess of a key that was dropped.
    dropped: u64,
}

/// Rejected hits of a key in one minute: a lower bound, and the key's excess over the floor.
#[derive(Clone, Copy, Debug, Default)]
struct MergedKeyCount {
    at_least: u64,
    excess: u64,
}

impl MergedRejectedKeys {
    /// Adds the keys of a summary, without minutes that are not among the last [`KEPT_MINUTES`] before `minute`.
    ///
    /// Returns false if a part was left out because it contradicts itself.
    pub fn add_summary(&mut self, summary: &ReplicaSummary, minute: u64) -> bool {
        let has_plain_values = summary.values == PublishedKeyForm::Plain;
        let keys: Vec<Option<MergedRejectedKey>> = summary
            .keys
            .iter()
            .map(|key| {
                let name = summary.names.get(key.name).filter(|_| key.text.len() <= MAX_KEY_TEXT_BYTES)?;
                let limit = self.find_or_add_limit_name(name, summary.domain_bytes.get(key.name).copied())?;
                Some(MergedRejectedKey { limit, text: key.text.as_str().into(), has_plain_values })
            })
            .collect();
        let mut is_complete = true;
        let mut known = HashSet::new();
        for of_summary in &summary.minutes {
            if !is_recent_minute(of_summary.minute, minute) {
                continue;
            }
            let is_valid = known.insert(of_summary.minute) && has_valid_counts(of_summary, &keys);
            is_complete &= is_valid;
            if is_valid {
                self.minutes.entry(of_summary.minute).or_default().add_minute(of_summary, &keys);
            }
        }
        is_complete
    }

    /// Name of a limit; `None` if it is too long or one too many.
    ///
    /// A replica that does not tell the domain means any limit of this name, so that bounds stay bounds.
    fn find_or_add_limit_name(&mut self, name: &str, domain_bytes: Option<u32>) -> Option<Arc<LimitName>> {
        let new = LimitName::from_published(name, domain_bytes);
        let means =
            |limit: &&Arc<LimitName>| new.known_domain().is_none() || limit.known_domain().is_none() || ***limit == new;
        let of_name = self.limits.get(name).map(Vec::as_slice).unwrap_or_default();
        if let Some(limit) = of_name.iter().find(means) {
            return Some(Arc::clone(limit));
        }
        let has_room = name.len() <= MAX_LIMIT_NAME_BYTES
            && self.limits.len() < MAX_LIMITS
            && of_name.len() < MAX_DOMAINS_PER_LIMIT_NAME;
        has_room.then(|| {
            let limit = Arc::new(new);
            self.limits.entry(name.to_owned()).or_default().push(Arc::clone(&limit));
            limit
        })
    }

    /// Returns the keys rejected in the last `minutes` up to `minute`, by limits that `filter` accepts.
    pub fn snapshot(&self, minute: u64, minutes: u64, filter: impl Fn(&LimitName) -> bool) -> TopKeysSnapshot {
        let first = (minute + 1).saturating_sub(minutes.clamp(1, KEPT_MINUTES));
        let mut max_missed = 0_u64;
        let mut sums: HashMap<&MergedRejectedKey, KeyCountOverMinutes> = HashMap::new();
        for (_, merged) in self.minutes.iter().filter(|(at, _)| **at >= first) {
            let missed = merged.max_hits_of_missing_key();
            max_missed = max_missed.saturating_add(missed);
            for (key, count) in merged.keys.iter().filter(|(key, _)| filter(&key.limit)) {
                let sum = sums.entry(key).or_default();
                sum.at_least = sum.at_least.saturating_add(count.at_least);
                sum.at_most = sum.at_most.saturating_add(merged.floor.saturating_add(count.excess));
                sum.covered = sum.covered.saturating_add(missed);
            }
        }
        let mut keys: Vec<RejectedKey> = sums
            .into_iter()
            .map(|(key, sum)| RejectedKey {
                limit: Arc::clone(&key.limit),
                text: Arc::clone(&key.text),
                has_plain_values: key.has_plain_values,
                at_least: sum.at_least,
                at_most: sum.at_most.saturating_add(max_missed.saturating_sub(sum.covered)),
                in_bursts: 0,
                largest_burst: 0,
            })
            .collect();
        keys.sort_by(|a, b| (b.at_least, b.at_most, &a.text).cmp(&(a.at_least, a.at_most, &b.text)));
        TopKeysSnapshot { keys, max_missed }
    }
}

/// Sum of a key's counts over several minutes.
#[derive(Clone, Copy, Debug, Default)]
struct KeyCountOverMinutes {
    at_least: u64,
    at_most: u64,
    /// Bound of the hits that may be missing here: summed over the minutes that list this key, what a key that a minute
    /// does not list may have had in it.
    covered: u64,
}

impl MergedMinuteCounts {
    fn add_minute(&mut self, summary: &RejectedKeysMinuteSummary, keys: &[Option<MergedRejectedKey>]) {
        let floor = summary.max_missed;
        self.floor = self.floor.saturating_add(floor);
        let mut known = HashSet::new();
        for count in &summary.counts {
            let Some(key) = keys.get(count.key).and_then(Option::as_ref) else { continue };
            let new = MergedKeyCount { at_least: 0, excess: self.dropped };
            let merged = self.keys.entry(key.clone()).or_insert(new);
            // A key that is listed twice covers the floor once.
            let covered = if known.insert(key) { floor } else { 0 };
            merged.at_least = merged.at_least.saturating_add(count.at_least);
            merged.excess = merged.excess.saturating_add(count.at_most.saturating_sub(covered));
        }
        if self.keys.len() > 2 * MAX_KEYS_PER_MINUTE {
            self.drop_smallest_keys();
        }
    }

    /// Keeps [`MAX_KEYS_PER_MINUTE`] keys.
    fn drop_smallest_keys(&mut self) {
        let mut excesses: Vec<u64> = self.keys.values().map(|count| count.excess).collect();
        let (_, largest_dropped, _) = excesses.select_nth_unstable_by(MAX_KEYS_PER_MINUTE, |a, b| b.cmp(a));
        let largest_dropped = *largest_dropped;
        self.keys.retain(|_, count| count.excess > largest_dropped);
        self.dropped = self.dropped.max(largest_dropped);
    }

    /// Upper bound of the hits of a key that this minute does not list.
    fn max_hits_of_missing_key(&self) -> u64 {
        self.floor.saturating_add(self.dropped)
    }
}

fn is_recent_minute(minute: u64, current: u64) -> bool {
    minute <= current.saturating_add(1) && minute.saturating_add(KEPT_MINUTES) > current
}

/// True if all keys exist, and all bounds are in order.
fn has_valid_counts(minute: &RejectedKeysMinuteSummary, keys: &[Option<MergedRejectedKey>]) -> bool {
    minute
        .counts
        .iter()
        .all(|count| keys.get(count.key).is_some_and(Option::is_some) && count.at_least <= count.at_most)
}

/// Maximum number of keys of one summary; replicas publish no more.
pub const MAX_BUSY_KEYS: usize = 50;
/// Maximum number of keys of all summaries.
const MAX_MERGED_BUSY_KEYS: usize = 10_000;
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
            if self.hits.len() < MAX_MERGED_BUSY_KEYS || self.hits.contains_key(&id) {
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
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{MAX_BUSY_KEYS, MAX_KEYS_PER_MINUTE, MergedBusiestKeys, MergedRejectedKeys};
    use crate::base::clock::Time;
    use crate::serve::fleet::replica_summary_builder::{ListedLimitNames, add_rejected_keys};
    use crate::serve::fleet::summary::{
        BusyKeySummary, PublishedKeyForm, RejectedKeyCountSummary, RejectedKeySummary, RejectedKeysMinuteSummary,
        ReplicaSummary,
    };
    use crate::telemetry::metrics::limit_stats::{LimitName, LimitStats};
    use crate::telemetry::top_keys::{KEPT_MINUTES, KeyRejection, TopKeys};

    /// First minute of the tests.
    const FIRST: u64 = 30_000_000;

    fn minute(number: u64) -> Time {
        Time::from_secs((FIRST + number) * 60)
    }

    /// Summary of these rejections, with room for this many bytes of keys.
    fn summary(top_keys: &TopKeys, room: usize) -> ReplicaSummary {
        let (mut summary, mut names) = (ReplicaSummary::default(), ListedLimitNames::default());
        add_rejected_keys(&mut summary, &top_keys.rejected_keys_by_minute(minute(5)), &mut names, room);
        (summary.names, summary.domain_bytes) = (names.listed, names.domain_bytes);
        summary
    }

    proptest! {
        /// Rejections are (replica, minute, key, hits).
        #[test]
        fn merged_counts_stay_within_their_bounds(
            mut rejections in prop::collection::vec((0_usize..5, 0_u64..6, 0_usize..40, 1_u64..5), 1..600),
            counters in 8_usize..64,
            room in 100_usize..4000,
        ) {
            rejections.sort_by_key(|(_, minute, ..)| *minute);
            let stats = [["shop", "a"], ["shop", "b"]].map(|name| LimitStats::new(LimitName::new(name)));
            let replicas: Vec<TopKeys> = (0..5).map(|_| TopKeys::new(counters)).collect();
            let mut truth: BTreeMap<(String, String), u64> = BTreeMap::new();
            for (replica, at, key, hits) in rejections {
                let (limit, text) = (&stats[key % 2], key.to_string());
                // Each process hashes keys in its own way.
                let id = (key as u128 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835 + replica as u128 * 2);
                let rejection = KeyRejection { id, limit, hits };
                replicas[replica].record_rejection(rejection, minute(at), |pushed| pushed.extend_from_slice(text.as_bytes()));
                *truth.entry((limit.name().as_str().to_owned(), text)).or_default() += hits;
            }
            let mut merged = MergedRejectedKeys::default();
            for top_keys in &replicas {
                prop_assert!(merged.add_summary(&summary(top_keys, room), FIRST + 5));
            }
            let found = merged.snapshot(FIRST + 5, KEPT_MINUTES, |_| true);
            let bounds: BTreeMap<_, _> = found
                .keys
                .iter()
                .map(|key| ((key.limit.as_str().to_owned(), key.text.to_string()), (key.at_least, key.at_most)))
                .collect();
            for (key, hits) in &truth {
                match bounds.get(key) {
                    Some((least, most)) => prop_assert!(least <= hits && hits <= most, "{key:?}: {hits} in {least}..={most}"),
                    None => prop_assert!(*hits <= found.max_missed, "{key:?}: {hits} > {}", found.max_missed),
                }
            }
        }
    }

    /// Summary with these keys and their exact counts in one minute.
    fn exact(keys: impl Iterator<Item = (usize, u64)>) -> ReplicaSummary {
        let mut summary = ReplicaSummary { names: vec!["shop.a".to_owned()], ..ReplicaSummary::default() };
        let mut minute = RejectedKeysMinuteSummary { minute: FIRST, ..RejectedKeysMinuteSummary::default() };
        for (index, (key, hits)) in keys.enumerate() {
            summary.keys.push(RejectedKeySummary { name: 0, text: key.to_string() });
            minute.counts.push(RejectedKeyCountSummary { key: index, at_least: hits, at_most: hits });
        }
        summary.minutes.push(minute);
        summary
    }

    #[test]
    fn keys_are_bounded_and_those_dropped_are_in_the_bound() {
        let mut merged = MergedRejectedKeys::default();
        for part in 0..5 {
            let keys = (0..MAX_KEYS_PER_MINUTE).map(|key| (part * MAX_KEYS_PER_MINUTE + key, 1 + (key % 7) as u64));
            assert!(merged.add_summary(&exact(keys), FIRST));
            assert!(merged.minutes[&FIRST].keys.len() <= 2 * MAX_KEYS_PER_MINUTE, "{part}");
        }
        // A key that was dropped comes back.
        assert!(merged.add_summary(&exact([(0, 10)].into_iter()), FIRST));
        let found = merged.snapshot(FIRST, 1, |_| true);
        let key = found.keys.iter().find(|key| &*key.text == "0").expect("the last key is kept");
        assert!(key.at_least <= 11 && 11 <= key.at_most, "{key:?}");
        assert!(found.max_missed >= 7, "{}", found.max_missed);
    }

    #[test]
    fn contradictory_minute_is_left_out() {
        let broken: [fn(&mut ReplicaSummary); 4] = [
            |summary| summary.minutes[0].counts[0].key = 7,
            |summary| summary.minutes[0].counts[0].at_least = 9,
            |summary| summary.keys[0].name = usize::MAX,
            |summary| summary.keys[0].text = "x".repeat(10_000),
        ];
        for change in broken {
            let mut summary = exact([(1, 5)].into_iter());
            change(&mut summary);
            let mut merged = MergedRejectedKeys::default();
            assert!(!merged.add_summary(&summary, FIRST), "{summary:?}");
            assert!(merged.snapshot(FIRST, 1, |_| true).keys.is_empty());
        }
        let mut far = exact([(1, 5)].into_iter());
        far.minutes[0].minute = u64::MAX;
        let mut merged = MergedRejectedKeys::default();
        assert!(merged.add_summary(&far, FIRST));
        assert!(merged.snapshot(FIRST, 1, |_| true).keys.is_empty());
    }

    /// Summary of these busiest keys, as (name, text, hits).
    fn busy_summary(keys: &[(usize, &str, u64)]) -> ReplicaSummary {
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
        merged.add_summary(&busy_summary(&[(0, "user=ann", 5), (1, "path=/", 7), (9, "user=eve", 1)]));
        merged.add_summary(&busy_summary(&[(0, "user=ann", 4), (0, &"x".repeat(5000), u64::MAX)]));
        let many: Vec<_> = (0..MAX_BUSY_KEYS + 9).map(|_| (0, "user=bob", 1)).collect();
        merged.add_summary(&busy_summary(&many));
        let rows = |filter: fn(&str) -> bool| -> Vec<(String, u64)> {
            let snapshot = merged.snapshot(|name| filter(name.as_str()));
            snapshot.keys.iter().map(|key| (key.text.to_string(), key.at_least)).collect()
        };
        let row = |text: &str, hits| (text.to_owned(), hits);
        assert_eq!(rows(|_| true), [row("user=bob", 50), row("user=ann", 9), row("path=/", 7)]);
        assert_eq!(rows(|name| name == "shop.path"), [row("path=/", 7)]);
    }
}
