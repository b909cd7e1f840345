//! Report of the rejections of the last hour by minute, limit and key: who was rejected at 14:05.
//!
//! It needs no decision log. It counts what `/top` counts, minute by minute, for this process; the number of keys of a
//! minute is bounded, and `max_missed_hits` bounds the hits of every other key.
//!
//! Decides: how rejections of the last hour are found by key, limit and time (`tollkeeper top --hour`).

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::top::parse_shown_entries;
use crate::base::clock::Time;
use crate::base::text::escape_unprintable;
use crate::base::text_table::{Format, NumberAlignment, format_table};
use crate::decide::key_text::KeyEntry;
use crate::telemetry::metrics::limit_stats::LimitName;
use crate::telemetry::top_keys::{TopKeys, UnenforcedMode};

/// Query of `/rejections`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RejectionsQuery {
    /// Format of the report.
    pub format: Format,
    /// Text that a key must contain, such as `user=ann`.
    pub key: Option<String>,
    /// Name of a limit, `domain.key_value.key`, or the start of one up to a dot.
    pub rule: Option<String>,
    /// Minute that is asked for, `14:05` in UTC; those before and after it are in the report too.
    pub at: Option<String>,
    /// Maximum number of rows: 1 to 1000, default 100.
    pub most: Option<usize>,
}

const DEFAULT_SHOWN_ROWS: usize = 100;
const MAX_SHOWN_ROWS: usize = 1000;
/// Minutes before and after the one that is asked for.
const MINUTES_AROUND: u64 = 2;
const MINUTES_PER_DAY: u64 = 1440;

/// Error of a time that is not written as `14:05`.
#[derive(Clone, Debug, thiserror::Error)]
#[error("at: not a minute of the last hour in UTC (write it as 14:05)")]
pub struct InvalidMinute;

/// Rejections of the last hour, the last first.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RejectionsReport {
    /// Number of rows that match the query, in the report or not.
    pub found: usize,
    /// Upper bound of the rejected hits of every key that is missing in a minute.
    pub max_missed_hits: u64,
    /// Rows: the last minute first, and in it the key rejected most.
    pub rejections: Vec<KeyRejectionsInMinute>,
}

/// Rejections of a key by one limit in one minute.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct KeyRejectionsInMinute {
    /// Start of the minute, RFC 3339 in UTC.
    pub minute: String,
    /// Name of the limit.
    pub rule: String,
    /// As in `/top`.
    pub key: String,
    /// As in `/top`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<Vec<KeyEntry>>,
    /// Lower bound of the rejected hits.
    pub rejected_at_least: u64,
    /// Upper bound of the rejected hits.
    pub rejected_at_most: u64,
    /// Lower bound of the rejected requests.
    pub requests_at_least: u64,
    /// Why the limit rejected nothing; absent if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<UnenforcedMode>,
}

impl RejectionsReport {
    /// Computes the report; `has_values` is false if the values of keys are hashes.
    ///
    /// # Errors
    /// The time of the query is none.
    pub fn new(
        top_keys: &TopKeys,
        now: Time,
        query: &RejectionsQuery,
        has_values: bool,
    ) -> Result<Self, InvalidMinute> {
        let asked = query.at.as_deref().map(parse_minute_of_day).transpose()?;
        let mut report = Self { found: 0, max_missed_hits: 0, rejections: Vec::new() };
        let most = query.most.unwrap_or(DEFAULT_SHOWN_ROWS).clamp(1, MAX_SHOWN_ROWS);
        for of_minute in top_keys.remembered_keys_by_minute(now).into_iter().rev() {
            if asked.is_some_and(|asked| !is_near(of_minute.minute % MINUTES_PER_DAY, asked)) {
                continue;
            }
            report.max_missed_hits = report.max_missed_hits.max(of_minute.max_missed);
            let is_asked_for = |key: &str| query.key.as_deref().is_none_or(|text| key.contains(text));
            let is_of_rule =
                |limit: &LimitName| query.rule.as_ref().is_none_or(|rule| limit.is_at_or_below_prefix(rule));
            for rejected in of_minute.keys.iter().filter(|key| is_asked_for(&key.text) && is_of_rule(&key.limit)) {
                report.found += 1;
                if report.rejections.len() < most {
                    report.rejections.push(KeyRejectionsInMinute {
                        minute: minute_text(of_minute.minute),
                        rule: rejected.limit.as_str().to_owned(),
                        key: rejected.text.to_string(),
                        entries: parse_shown_entries(&rejected.text, has_values),
                        rejected_at_least: rejected.at_least,
                        rejected_at_most: rejected.at_most,
                        requests_at_least: rejected.requests,
                        mode: rejected.mode,
                    });
                }
            }
        }
        Ok(report)
    }

    /// Formats the report as text.
    pub fn format_text(&self) -> String {
        let missed = match self.max_missed_hits {
            0 => "no key is missing".to_owned(),
            max => format!("every missing key had at most {max} hits in a minute"),
        };
        if self.rejections.is_empty() {
            return format!("no rejection of the last hour matches; {missed}\n");
        }
        let row = |row: &KeyRejectionsInMinute| {
            [
                row.minute.get(11..16).unwrap_or_default().to_owned(),
                row.rejected_at_least.to_string(),
                row.rejected_at_most.to_string(),
                row.requests_at_least.to_string(),
                escape_unprintable(&row.rule) + row.mode.map_or("", UnenforcedMode::name_suffix),
                escape_unprintable(&row.key),
            ]
        };
        let headings = ["UTC", "AT LEAST", "AT MOST", "REQUESTS", "RULE", "KEY"];
        let shown = self.rejections.len();
        let of_all = if self.found > shown { format!("; {shown} of {} rows", self.found) } else { String::new() };
        format!("Hits rejected in the last hour, by minute; {missed}{of_all}.\n\n")
            + &format_table(&headings, self.rejections.iter().map(row), NumberAlignment::Right)
    }
}

/// Parses `14:05`, the minute of a day; also at the end of a date, before seconds or a zone.
fn parse_minute_of_day(text: &str) -> Result<u64, InvalidMinute> {
    let time = text.rsplit_once('T').map_or(text, |(_, time)| time);
    let (hour, rest) = time.split_once(':').ok_or(InvalidMinute)?;
    let minute = rest.get(..2).ok_or(InvalidMinute)?;
    match (hour.parse(), minute.parse()) {
        (Ok(hour @ 0..24), Ok(minute @ 0..60)) => Ok::<u64, _>(hour * 60 + minute),
        _ => Err(InvalidMinute),
    }
}

/// True if a minute of the day is the one asked for, or shortly before or after it.
const fn is_near(minute: u64, asked: u64) -> bool {
    let apart = minute.abs_diff(asked);
    apart <= MINUTES_AROUND || MINUTES_PER_DAY - apart <= MINUTES_AROUND
}

fn minute_text(minute: u64) -> String {
    let seconds = i64::try_from(minute.saturating_mul(60)).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).map_or_else(|_| minute.to_string(), |time| time.to_string())
}
