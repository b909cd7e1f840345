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
use crate::telemetry::top_keys::{KEPT_MINUTES, KeyCount, TopKeysSnapshot, UnenforcedMode};

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
    mode: Option<UnenforcedMode>,
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

/// Rejected hits of a key in one minute: a lower bound, and the key's excess over the floor; and its requests.
#[derive(Clone, Copy, Debug, Default)]
struct MergedKeyCount {
    at_least: u64,
    requests: u64,
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
                let limit = self.find_or_add_limit_name(name, summary.domains.get(key.name).map(String::as_str))?;
                Some(MergedRejectedKey { limit, mode: key.mode, text: key.text.as_str().into(), has_plain_values })
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
    fn find_or_add_limit_name(&mut self, name: &str, domain: Option<&str>) -> Option<Arc<LimitName>> {
        let new = LimitName::from_published(name, domain);
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
                sum.requests = sum.requests.saturating_add(count.requests);
                sum.at_most = sum.at_most.saturating_add(merged.floor.saturating_add(count.excess));
                sum.covered = sum.covered.saturating_add(missed);
            }
        }
        let mut keys: Vec<KeyCount> = sums
            .into_iter()
            .map(|(key, sum)| KeyCount {
                limit: Arc::clone(&key.limit),
                mode: key.mode,
                text: Arc::clone(&key.text),
                has_plain_values: key.has_plain_values,
                at_least: sum.at_least,
                at_most: sum.at_most.saturating_add(max_missed.saturating_sub(sum.covered)),
                requests: sum.requests,
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
    requests: u64,
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
            let new = MergedKeyCount { excess: self.dropped, ..MergedKeyCount::default() };
            let merged = self.keys.entry(key.clone()).or_insert(new);
            // A key that is listed twice covers the floor once.
            let covered = if known.insert(key) { floor } else { 0 };
            merged.at_least = merged.at_least.saturating_add(count.at_least);
            merged.requests = merged.requests.saturating_add(count.requests);
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
            let limit = LimitName::from_published(name, summary.domains.get(busy.name).map(String::as_str));
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
        let mut keys: Vec<KeyCount> = self
            .hits
            .iter()
            .filter(|(id, _)| filter(&id.limit))
            .map(|(id, hits)| KeyCount {
                limit: Arc::new(id.limit.clone()),
                mode: None,
                text: id.text.as_str().into(),
                has_plain_values: id.has_plain_values,
                at_least: *hits,
                at_most: *hits,
                requests: 0,
                in_bursts: 0,
                largest_burst: 0,
            })
            .collect();
        keys.sort_by(|a, b| (b.at_least, &a.text, &a.limit).cmp(&(a.at_least, &b.text, &b.limit)));
        TopKeysSnapshot { keys, max_missed: 0 }
    }
}
