//! The keys that were refused most: over all, and by limit.
//!
//! What is told is exact within stated bounds: a key was refused at least and at most so often, and one that is not
//! told of no more than `most_missed` says. Trials are told of too: what they would have refused.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::Format;
use super::text::{columns, plain};
use crate::clock::Time;
use crate::telemetry::metrics::limit_stats::LimitName;
use crate::telemetry::top_keys::{self, RejectedKey, TopKeys, TopKeysSnapshot};

/// What to tell.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TopQuery {
    /// How it is written.
    pub format: Format,
    /// Over how many minutes, the one that is running included: 1 to [`top_keys::MINUTES`]; 5 if it is not said.
    pub minutes: Option<u64>,
    /// How many keys, over all and of each limit: 1 to 1000; 10 if it is not said.
    pub most: Option<usize>,
    /// Only limits whose name, `domain.key_value.key`, is this or begins with it and a dot.
    pub rule: Option<String>,
}

const MAX_KEYS: usize = 1000;
/// Limits that are told of one by one.
const MAX_LIMITS: usize = 100;

/// The keys that were refused most.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct TopReport {
    /// Over how many minutes, the one that is running included.
    pub minutes: u64,
    /// The most hits that a key that is not counted here can have been refused.
    pub most_missed: u64,
    /// Over all limits, the most refused first.
    pub over_all: Vec<TopKey>,
    /// The limits that refused most, each with its keys.
    pub by_limit: Vec<LimitTopKeys>,
}

/// What one limit refused.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct LimitTopKeys {
    /// Its name: `domain.key_value.key`.
    pub rule: String,
    /// Hits that it refused to keys that are counted here, at least.
    pub refused_at_least: u64,
    /// Its keys, the most refused first.
    pub keys: Vec<TopKey>,
}

/// A key that was refused.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct TopKey {
    /// The limit that refused it.
    pub rule: String,
    /// `key=value,key=value`, cut after 256 bytes.
    pub key: String,
    /// Hits that were refused, at least.
    pub refused_at_least: u64,
    /// Hits that were refused, at most.
    pub refused_at_most: u64,
}

impl TopQuery {
    fn matches(&self, name: &LimitName) -> bool {
        self.rule.as_ref().is_none_or(|rule| name.is_or_is_below(rule))
    }
}

impl TopReport {
    /// What `top` counted until `now`.
    pub fn of(top: &TopKeys, now: Time, query: &TopQuery) -> Self {
        let minutes = query.minutes.unwrap_or(5).clamp(1, top_keys::MINUTES);
        let most = query.most.unwrap_or(10).clamp(1, MAX_KEYS);
        let TopKeysSnapshot { keys, most_missed } = top.snapshot(now, minutes, |name| query.matches(name));
        let mut by_limit: Vec<LimitTopKeys> = Vec::new();
        let mut indexes = HashMap::new();
        for refused in &keys {
            let index = *indexes.entry(refused.limit.key()).or_insert_with(|| {
                by_limit.push(LimitTopKeys {
                    rule: refused.limit.key().to_owned(),
                    refused_at_least: 0,
                    keys: Vec::new(),
                });
                by_limit.len() - 1
            });
            let limit = &mut by_limit[index];
            limit.refused_at_least += refused.at_least;
            if limit.keys.len() < most {
                limit.keys.push(key(refused));
            }
        }
        by_limit.sort_by(|a, b| (b.refused_at_least, &a.rule).cmp(&(a.refused_at_least, &b.rule)));
        by_limit.truncate(MAX_LIMITS);
        Self { minutes, most_missed, over_all: keys.iter().take(most).map(key).collect(), by_limit }
    }

    /// As text.
    pub fn text(&self) -> String {
        let minutes =
            if self.minutes == 1 { "this minute".to_owned() } else { format!("the last {} minutes", self.minutes) };
        if self.over_all.is_empty() {
            return format!("nothing was refused in {minutes}\n");
        }
        let missed = match self.most_missed {
            0 => "no key is missing".to_owned(),
            most => format!("a key that is missing was refused {most} hits at most"),
        };
        let mut page = format!("Hits refused in {minutes}; {missed}.\n\n");
        let row = |key: &TopKey| {
            [key.refused_at_least.to_string(), key.refused_at_most.to_string(), plain(&key.rule), plain(&key.key)]
        };
        page += &columns(["AT LEAST", "AT MOST", "RULE", "KEY"], self.over_all.iter().map(row));
        for limit in self.by_limit.iter().filter(|_| self.by_limit.len() > 1) {
            page += &format!("\n{}: {} at least\n", plain(&limit.rule), limit.refused_at_least);
            let row = |key: &TopKey| {
                [format!("  {}", key.refused_at_least), key.refused_at_most.to_string(), plain(&key.key)]
            };
            page += &columns(["  AT LEAST", "AT MOST", "KEY"], limit.keys.iter().map(row));
        }
        page
    }
}

fn key(refused: &RejectedKey) -> TopKey {
    TopKey {
        rule: refused.limit.key().to_owned(),
        key: refused.text.to_string(),
        refused_at_least: refused.at_least,
        refused_at_most: refused.at_most,
    }
}
