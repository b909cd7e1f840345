//! Report of the keys that were rejected most, overall and by limit.
//!
//! Counts have a lower and an upper bound, and `max_missed_hits` bounds the hits of every key that is not in the
//! report. Limits in shadow mode are included with the hits that they would have rejected.
//!
//! Decides: over how many minutes `/top` and `tollkeeper top` count, what they print, and how many keys (`--most`).

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::base::clock::Time;
use crate::base::text::escape_unprintable;
use crate::base::text_table::{Format, NumberAlignment, format_table};
use crate::decide::key_text::KeyEntry;
use crate::telemetry::metrics::limit_stats::LimitName;
use crate::telemetry::top_keys::{HitsInMinute, KEPT_MINUTES, KeyCount, TopKeys, TopKeysSnapshot, UnenforcedMode};

/// Query of `/top`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TopQuery {
    /// Format of the report.
    pub format: Format,
    /// Number of minutes, including the current one: 1 to [`KEPT_MINUTES`], default 5.
    pub minutes: Option<u64>,
    /// Maximum number of keys, overall and by limit: 1 to 1000, default 10.
    pub most: Option<usize>,
    /// Name of a limit, `domain.key_value.key`, or the start of one up to a dot.
    pub rule: Option<String>,
    /// True if `rule` is the whole name.
    pub exact: bool,
    /// Contents of the text form.
    pub show: TopTextContent,
}

/// Contents of the text form.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TopTextContent {
    /// The keys that were rejected most.
    #[default]
    Rejected,
    /// The keys with most hits.
    Busiest,
}

const DEFAULT_MINUTES: u64 = 5;
const DEFAULT_SHOWN_KEYS: usize = 10;
const MAX_SHOWN_KEYS: usize = 1000;
/// Maximum number of limits in [`TopReport::by_limit`].
const MAX_SHOWN_LIMITS: usize = 100;

/// The keys that were rejected most.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct TopReport {
    /// Number of minutes, including the current one.
    pub minutes: u64,
    /// Upper bound of the rejected hits of every key without a counter.
    pub max_missed_hits: u64,
    /// Keys of all limits, the most rejected first.
    pub overall: Vec<TopKey>,
    /// Limits that rejected most, with their keys.
    pub by_limit: Vec<RejectedKeysOfLimit>,
    /// Hits rejected in each of the last ten minutes, the oldest first; only of this process.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_minute: Vec<RejectedByMinute>,
    /// Keys with most hits, rejected or not, by an estimate from a sample.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub busiest: Vec<BusyKey>,
    /// Charges that `on_store_error: deny` rejected while the store failed; no key has them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub denied_by_failure_policy: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
pub(crate) const fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A key with many hits.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct BusyKey {
    /// Name of the first limit of its rule.
    pub rule: String,
    /// Domain, as requests name it; absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// As in [`TopKey`].
    pub key: String,
    /// As in [`TopKey`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<Vec<KeyEntry>>,
    /// Estimated number of hits.
    pub hits_about: u64,
}

/// Hits rejected in one minute.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct RejectedByMinute {
    /// Start of the minute in UTC, `hour:minute`.
    pub at: String,
    /// Start of the minute, in seconds since the Unix epoch.
    pub start_s: u64,
    /// Lower bound of the hits, from keys with a counter.
    pub rejected_at_least: u64,
}

/// Rejected keys of one limit.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RejectedKeysOfLimit {
    /// Name of the limit: `domain.key_value.key`.
    pub rule: String,
    /// Lower bound of the hits rejected by the limit, from keys with a counter.
    pub rejected_at_least: u64,
    /// Keys, the most rejected first.
    pub keys: Vec<TopKey>,
}

/// A rejected key.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct TopKey {
    /// Name of the limit that rejected it.
    pub rule: String,
    /// Domain, as requests name it; absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// `key=value,key=value`; `,`, `=` and `\` in them are escaped by `\`; cut after 256 bytes, with `,#` and a hash.
    pub key: String,
    /// Entries of the key; absent if it was cut or is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<Vec<KeyEntry>>,
    /// Lower bound of the rejected hits.
    pub rejected_at_least: u64,
    /// Upper bound of the rejected hits.
    pub rejected_at_most: u64,
    /// Lower bound of the rejected requests; a peek is one hit.
    #[serde(default)]
    pub requests_at_least: u64,
    /// Why the limit rejected nothing; absent if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<UnenforcedMode>,
}

impl TopQuery {
    /// True if the limit is in the report.
    pub fn matches_limit_name(&self, name: &LimitName) -> bool {
        self.rule.as_ref().is_none_or(|rule| name.is_selected_by(rule, self.exact))
    }
}

impl TopReport {
    /// Computes the report of this process.
    pub fn new(top_keys: &TopKeys, now: Time, query: &TopQuery) -> Self {
        let snapshot = |minutes| top_keys.snapshot(now, minutes, |name| query.matches_limit_name(name));
        let mut report = Self::from_snapshot(snapshot, query);
        report.by_minute = top_keys
            .hits_by_minute(now, |name| query.matches_limit_name(name))
            .into_iter()
            .map(RejectedByMinute::from)
            .collect();
        report
    }

    /// Number of minutes that a query asks for.
    pub fn covered_minutes(query: &TopQuery) -> u64 {
        query.minutes.unwrap_or(DEFAULT_MINUTES).clamp(1, KEPT_MINUTES)
    }

    /// Adds the keys with most hits, the busiest first.
    #[must_use]
    pub fn with_busiest_keys(mut self, snapshot: &TopKeysSnapshot, query: &TopQuery) -> Self {
        let max_keys = query.most.unwrap_or(DEFAULT_SHOWN_KEYS).clamp(1, MAX_SHOWN_KEYS);
        self.busiest = snapshot
            .keys
            .iter()
            .take(max_keys)
            .map(|busy| {
                let TopKey { rule, domain, key, entries, .. } = TopKey::new(busy);
                BusyKey { rule, domain, key, entries, hits_about: busy.at_least }
            })
            .collect();
        self
    }

    /// Removes the values of entries, which are hashes that no request has.
    #[must_use]
    pub fn without_values(mut self) -> Self {
        let entries = self.keys_mut().filter_map(|key| key.entries.as_mut()).flatten();
        entries.for_each(|entry| entry.value = None);
        let busy = self.busiest.iter_mut().filter_map(|key| key.entries.as_mut()).flatten();
        busy.for_each(|entry| entry.value = None);
        self
    }

    fn keys_mut(&mut self) -> impl Iterator<Item = &mut TopKey> {
        self.overall.iter_mut().chain(self.by_limit.iter_mut().flat_map(|limit| &mut limit.keys))
    }

    /// Computes the report from the snapshot of this many minutes.
    pub fn from_snapshot(snapshot: impl FnOnce(u64) -> TopKeysSnapshot, query: &TopQuery) -> Self {
        let minutes = Self::covered_minutes(query);
        let max_keys = query.most.unwrap_or(DEFAULT_SHOWN_KEYS).clamp(1, MAX_SHOWN_KEYS);
        let TopKeysSnapshot { keys, max_missed } = snapshot(minutes);
        let mut by_limit: Vec<RejectedKeysOfLimit> = Vec::new();
        let mut indexes = HashMap::new();
        for rejected in &keys {
            let index = *indexes.entry((rejected.limit.as_str(), rejected.mode)).or_insert_with(|| {
                let rule = rejected.limit.as_str().to_owned();
                by_limit.push(RejectedKeysOfLimit { rule, rejected_at_least: 0, keys: Vec::new() });
                by_limit.len() - 1
            });
            let limit = &mut by_limit[index];
            limit.rejected_at_least += rejected.at_least;
            if limit.keys.len() < max_keys {
                limit.keys.push(TopKey::new(rejected));
            }
        }
        by_limit.sort_by(|a, b| (b.rejected_at_least, &a.rule).cmp(&(a.rejected_at_least, &b.rule)));
        by_limit.truncate(MAX_SHOWN_LIMITS);
        let overall = keys.iter().take(max_keys).map(TopKey::new).collect();
        Self {
            minutes,
            max_missed_hits: max_missed,
            overall,
            by_limit,
            by_minute: Vec::new(),
            busiest: Vec::new(),
            denied_by_failure_policy: 0,
        }
    }

    fn minutes_in_words(&self) -> String {
        if self.minutes == 1 { "this minute".to_owned() } else { format!("the last {} minutes", self.minutes) }
    }

    /// Formats the keys with most hits as text.
    fn format_busiest(&self) -> String {
        let minutes = self.minutes_in_words();
        if self.busiest.is_empty() {
            return format!("no hits were counted in {minutes}\n");
        }
        let row =
            |key: &BusyKey| [key.hits_about.to_string(), escape_unprintable(&key.rule), escape_unprintable(&key.key)];
        format!("Hits in {minutes}, rejected or not, by an estimate from a sample.\n\n")
            + &format_table(&["ABOUT", "RULE", "KEY"], self.busiest.iter().map(row), NumberAlignment::Right)
    }

    /// Formats the report as text.
    pub fn format_text(&self, show: TopTextContent) -> String {
        if show == TopTextContent::Busiest {
            return self.format_busiest();
        }
        let minutes = self.minutes_in_words();
        let denied = match self.denied_by_failure_policy {
            0 => String::new(),
            count => format!(
                "`on_store_error: deny` rejected {count} charges in {minutes}, because the store failed: see /store\n"
            ),
        };
        if self.overall.is_empty() {
            return denied + &format!("no hits were rejected by a limit in {minutes}\n");
        }
        let missed = match self.max_missed_hits {
            0 => "no key is missing".to_owned(),
            max => format!("every missing key had at most {max}"),
        };
        let has_mode = self.overall.iter().any(|key| key.mode.is_some());
        let what = if has_mode { "rejected, or that would be," } else { "rejected" };
        let mut page = format!("{denied}Hits {what} in {minutes}; {missed}.\n\n");
        let row = |key: &TopKey| {
            [
                key.rejected_at_least.to_string(),
                key.rejected_at_most.to_string(),
                key.requests_at_least.to_string(),
                escape_unprintable(&key.rule) + key.mode.map_or("", UnenforcedMode::name_suffix),
                escape_unprintable(&key.key),
            ]
        };
        page += &format_table(
            &["AT LEAST", "AT MOST", "REQUESTS", "RULE", "KEY"],
            self.overall.iter().map(row),
            NumberAlignment::Right,
        );
        for limit in self.by_limit.iter().filter(|_| self.by_limit.len() > 1) {
            let mark = limit.keys.first().and_then(|key| key.mode).map_or("", UnenforcedMode::name_suffix);
            page += &format!("\n{}{mark}: at least {}\n", escape_unprintable(&limit.rule), limit.rejected_at_least);
            let row = |key: &TopKey| {
                [
                    format!("  {}", key.rejected_at_least),
                    key.rejected_at_most.to_string(),
                    key.requests_at_least.to_string(),
                    escape_unprintable(&key.key),
                ]
            };
            let headings = ["  AT LEAST", "AT MOST", "REQUESTS", "KEY"];
            page += &format_table(&headings, limit.keys.iter().map(row), NumberAlignment::Right);
        }
        page
    }
}

impl TopKey {
    fn new(rejected: &KeyCount) -> Self {
        Self {
            rule: rejected.limit.as_str().to_owned(),
            domain: rejected.limit.known_domain().map(str::to_owned),
            key: rejected.text.to_string(),
            entries: parse_shown_entries(&rejected.text, rejected.has_plain_values),
            rejected_at_least: rejected.at_least,
            rejected_at_most: rejected.at_most,
            requests_at_least: rejected.requests,
            mode: rejected.mode,
        }
    }
}

impl From<HitsInMinute> for RejectedByMinute {
    fn from(sum: HitsInMinute) -> Self {
        let HitsInMinute { minute, at_least: rejected_at_least } = sum;
        let at = format!("{:02}:{:02}", minute / 60 % 24, minute % 60);
        Self { at, start_s: minute * 60, rejected_at_least }
    }
}

/// Parses the entries of a key's text, without their values unless they are as sent.
pub(super) fn parse_shown_entries(text: &str, has_plain_values: bool) -> Option<Vec<KeyEntry>> {
    let mut entries = parse_key_entries(text);
    if !has_plain_values {
        entries.iter_mut().flatten().for_each(|entry| entry.value = None);
    }
    entries
}

/// Parses the entries of a key's text, in which a value may be left out; `None` if it was cut or is not UTF-8.
fn parse_key_entries(text: &str) -> Option<Vec<KeyEntry>> {
    let mut entries = vec![KeyEntry { key: String::new(), value: None }];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        let entry = entries.last_mut()?;
        match character {
            '=' if entry.value.is_none() => entry.value = Some(String::new()),
            ',' => entries.push(KeyEntry { key: String::new(), value: None }),
            character => {
                let character = if character == '\\' { characters.next()? } else { character };
                entry.value.as_mut().unwrap_or(&mut entry.key).push(character);
            }
        }
    }
    // A text that was cut ends in `#` and a hash, without a value.
    let is_cut = entries.last().is_none_or(|last| last.value.is_none() && last.key.starts_with('#'));
    (!is_cut).then_some(entries)
}
