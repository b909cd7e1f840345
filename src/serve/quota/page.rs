//! Report of streams and shares, for `/quota` and `tollkeeper quota`.
//!
//! Decides: parameters and figures of `/quota`.

use std::cmp::Reverse;
use std::collections::HashMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::divisions::{BucketOfStream, KeyDivision, division_key};
use super::service::QuotaService;
use super::stream_handle::StreamHandle;
use crate::base::clock::Time;
use crate::base::text::escape_unprintable;
use crate::base::text_table::{Format, NumberAlignment, format_table};
use crate::decide::decision::DecisionContext;
use crate::decide::explain::{ExplainedProxyShares, LimitShareReport, ProxyShareReport};
use crate::decide::key_text::KeyEntry;
use crate::decide::quota_buckets::BucketLimits;
use crate::limit::division::assignment::Strategy;
use crate::limit::division::divided_limit::AssignmentForm;
use crate::limit::division::holder::{HolderReport, ShareHolder};
use crate::limit::request::Entry;

/// Query of `/quota`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QuotaQuery {
    /// Format of the report.
    pub format: Format,
    /// Maximum number of streams, and of keys: 1 to 10 000, default 100.
    pub most: Option<usize>,
    /// Name of a rule, whose keys are shown.
    pub rule: Option<String>,
}

const DEFAULT_SHOWN_ROWS: usize = 100;
const MAX_SHOWN_ROWS: usize = 10_000;
/// Maximum number of holders of a key that are shown.
const MAX_SHOWN_HOLDERS: usize = 100;

/// Keys of a rule that are divided among proxies.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct RuleQuotaCounts {
    /// Number of keys.
    pub keys: usize,
    /// Number of assignments of these keys that proxies have.
    pub proxies: usize,
    /// Seconds until the last of these assignments ends, unless it is renewed.
    pub ends_s: u64,
}

/// Sums over all streams and keys of a replica, which it publishes to the fleet.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct QuotaTotals {
    /// Number of streams.
    pub streams: u64,
    /// Number of buckets of all streams.
    pub buckets: u64,
    /// Number of keys whose limits are divided.
    pub keys: u64,
    /// Number of these keys for which the store does not answer.
    pub failed_keys: u64,
    /// Hits of all limits that the replica holds; of rates, hits per period.
    pub held_hits: u64,
    /// Part of these hits that proxies may still use.
    pub assigned_hits: u64,
    /// Seconds until the last hold ends, unless it is renewed.
    pub held_for_s: u64,
}

/// Streams, and what they hold.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct QuotaReport {
    /// Number of streams.
    pub stream_count: usize,
    /// Number of buckets of all streams.
    pub bucket_count: usize,
    /// Number of keys whose limits are divided.
    pub key_count: usize,
    /// Streams, the oldest first.
    pub streams: Vec<StreamReport>,
    /// Keys, those with the largest demand first.
    pub keys: Vec<KeyReport>,
}

/// One stream.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct StreamReport {
    /// Number of the stream in this process.
    pub stream: u64,
    /// Address of the proxy; empty for a Unix socket.
    pub peer: String,
    /// Domain.
    pub domain: String,
    /// Number of its buckets.
    pub buckets: usize,
    /// Number of its reports.
    pub reports: u64,
    /// Seconds since it was opened.
    pub open_s: u64,
    /// Seconds since its last report.
    pub reported_s: u64,
}

/// One key.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct KeyReport {
    /// Name of the rule.
    pub rule: String,
    /// Domain; empty from older versions.
    #[serde(default)]
    pub domain: String,
    /// Entries, `key=value,key=value`, with values in the form of the settings.
    pub key: String,
    /// The entries one by one; absent if values are hashed or left out, or not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<Vec<KeyEntry>>,
    /// Its limits.
    pub limits: Vec<LimitShareReport>,
    /// The store does not answer.
    pub store_failed: bool,
    /// Proxies that share it, up to 100, those with most hits first.
    pub proxies: Vec<ProxyShareReport>,
    /// Number of proxies that share it.
    #[serde(default)]
    pub proxy_count: usize,
}

impl QuotaService {
    /// Builds the report.
    pub fn build_report(&self, query: &QuotaQuery) -> QuotaReport {
        let now = self.service.clock.now();
        let most = query.most.unwrap_or(DEFAULT_SHOWN_ROWS).clamp(1, MAX_SHOWN_ROWS);
        let mut handles: Vec<_> = self.stream_handles();
        handles.sort_by_key(|handle| handle.id);
        let streams = handles.iter().take(most).map(|handle| handle.build_report(now)).collect();
        let mut keys: Vec<KeyReport> = Vec::new();
        self.divisions.for_each(|division| {
            let is_wanted = query.rule.as_ref().is_none_or(|rule| **rule == *division.counters.rule);
            // Of the rest only the largest are kept; a second time, so that the list stays short.
            if is_wanted {
                keys.push(division.build_report(self, now));
                if keys.len() >= 2 * most {
                    keep_largest(&mut keys, most);
                }
            }
        });
        keep_largest(&mut keys, most);
        QuotaReport {
            stream_count: handles.len(),
            bucket_count: self.bucket_count(),
            key_count: self.key_count(),
            streams,
            keys,
        }
    }

    /// Counts what is divided, by the name of the rule.
    pub fn count_by_rule(&self) -> HashMap<Box<str>, RuleQuotaCounts> {
        let now = self.service.clock.now();
        let mut counts: HashMap<Box<str>, RuleQuotaCounts> = HashMap::new();
        self.divisions.for_each(|entry| {
            let count = counts.entry(entry.counters.rule.clone()).or_default();
            count.keys += 1;
            for holder in &entry.division.holders {
                let HolderReport { strategy, ends, .. } = entry.division.build_holder_report(holder);
                count.proxies += usize::from(strategy.is_some());
                count.ends_s = count.ends_s.max(ends.since_us(now) / 1_000_000);
            }
        });
        counts
    }

    /// Sums up what is divided. Looks at every key: takes milliseconds for 20 000.
    pub fn compute_totals(&self) -> QuotaTotals {
        let now = self.service.clock.now();
        let (streams, buckets) = (self.stream_count() as u64, self.bucket_count() as u64);
        let mut totals = QuotaTotals { streams, buckets, ..QuotaTotals::default() };
        self.divisions.for_each(|entry| {
            totals.keys += 1;
            totals.failed_keys += u64::from(entry.has_failed);
            for (index, pool) in entry.division.pools.iter().enumerate() {
                totals.held_hits = totals.held_hits.saturating_add(pool.hits.held);
                totals.assigned_hits = totals.assigned_hits.saturating_add(entry.division.reserved(index));
                totals.held_for_s = totals.held_for_s.max(pool.hits.until.since_us(now) / 1_000_000);
            }
        });
        totals
    }

    /// Who holds what of the limits of a descriptor with these entries, and until when; `None` if they are not divided.
    pub fn explain_proxy_shares(
        &self,
        context: DecisionContext<'_>,
        domain: &str,
        entries: &[Entry<'_>],
    ) -> Option<ExplainedProxyShares> {
        let BucketLimits::Divided(counters) =
            self.service.decider.select_bucket_limits(context, domain, &Bytes::new(), entries).limits
        else {
            return None;
        };
        let report = |entry: &mut KeyDivision| entry.build_report(self, context.store.now);
        let report = self.divisions.with(division_key(&counters), report)?;
        let KeyReport { limits, proxies, proxy_count, store_failed, .. } = report;
        Some(ExplainedProxyShares { limits, proxies, proxy_count, store_failed })
    }
}

fn keep_largest(keys: &mut Vec<KeyReport>, most: usize) {
    keys.sort_by(|one, other| other.demand().total_cmp(&one.demand()).then_with(|| one.key.cmp(&other.key)));
    keys.truncate(most);
}

impl KeyReport {
    fn demand(&self) -> f64 {
        self.proxies.iter().map(|proxy| proxy.demand_per_s).sum()
    }
}

impl StreamHandle {
    fn build_report(&self, now: Time) -> StreamReport {
        let state = self.lock();
        StreamReport {
            stream: self.id,
            peer: self.peer.clone(),
            domain: state.domain.clone(),
            buckets: state.buckets,
            reports: state.reports,
            open_s: now.since_us(self.opened) / 1_000_000,
            reported_s: now.since_us(state.last_report.max(self.opened)) / 1_000_000,
        }
    }
}

impl KeyDivision {
    fn build_report(&self, quota: &QuotaService, now: Time) -> KeyReport {
        let limits = self.division.pools.iter().zip(&self.counters.counters).enumerate();
        let limits = limits.map(|(index, (pool, counter))| LimitShareReport {
            limit: counter.limit.to_string(),
            form: match pool.limit.form {
                AssignmentForm::Rate => "rate".to_owned(),
                AssignmentForm::Lent => "hits".to_owned(),
            },
            held: pool.hits.held,
            free: self.division.free_share(index),
            held_for_s: pool.hits.until.since_us(now) / 1_000_000,
        });
        KeyReport {
            rule: self.counters.rule.to_string(),
            domain: self.counters.domain.to_string(),
            key: quota.service.decider.bucket_key_text(&self.counters),
            entries: quota.service.decider.shown_bucket_entries(&self.counters),
            limits: limits.collect(),
            store_failed: self.has_failed,
            proxies: self.report_proxies(now),
            proxy_count: self.division.holders.len(),
        }
    }

    fn report_proxies(&self, now: Time) -> Vec<ProxyShareReport> {
        let mut holders: Vec<_> =
            self.division.holders.iter().map(|holder| (holder, self.division.build_holder_report(holder))).collect();
        holders.sort_by_key(|(holder, report)| (Reverse(report.reserved), holder.key.stream.id));
        holders.truncate(MAX_SHOWN_HOLDERS);
        let report =
            |(holder, HolderReport { strategy, reserved, ends }): (&ShareHolder<BucketOfStream>, _)| ProxyShareReport {
                stream: holder.key.stream.id,
                peer: holder.key.stream.peer.clone(),
                demand_per_s: per_second(holder.demand.mhps),
                assignment: strategy.map_or_else(|| "none".to_owned(), describe_strategy),
                reserved,
                ends_s: ends.since_us(now) / 1_000_000,
            };
        holders.into_iter().map(report).collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn per_second(demand_mhps: u64) -> f64 {
    demand_mhps as f64 / 1000.0
}

fn describe_strategy(strategy: Strategy) -> String {
    match strategy {
        Strategy::Allow => "allow".to_owned(),
        Strategy::Deny => "deny".to_owned(),
        Strategy::Tokens(tokens) if tokens.fill == 0 => format!("{} tokens", tokens.max),
        Strategy::Tokens(tokens) => format!("{} tokens, {} per {} s", tokens.max, tokens.fill, tokens.interval_s),
    }
}

impl QuotaReport {
    /// The report as text.
    pub fn format_text(&self) -> String {
        let mut text = format!(
            "{} streams, {} buckets, {} keys with divided limits\n",
            self.stream_count, self.bucket_count, self.key_count
        );
        if !self.streams.is_empty() {
            let head = ["stream", "peer", "domain", "buckets", "reports", "open", "last report"];
            let rows = self.streams.iter().map(|stream| {
                [
                    stream.stream.to_string(),
                    escape_unprintable(&stream.peer),
                    escape_unprintable(&stream.domain),
                    stream.buckets.to_string(),
                    stream.reports.to_string(),
                    format!("{} s", stream.open_s),
                    format!("{} s ago", stream.reported_s),
                ]
            });
            text.push('\n');
            text += &format_table(&head, rows, NumberAlignment::Right);
        }
        for key in &self.keys {
            text += &format!("\n{} {}", escape_unprintable(&key.rule), escape_unprintable(&key.key));
            text += if key.store_failed { " (the store does not answer)\n" } else { "\n" };
            text += &format_shares(&key.limits, &key.proxies, key.proxy_count);
        }
        text
    }
}

/// What this replica holds of limits, and what proxies have of that; `proxy_count` of them share it.
pub fn format_shares(limits: &[LimitShareReport], proxies: &[ProxyShareReport], proxy_count: usize) -> String {
    let mut text = String::new();
    for limit in limits {
        let unit = if limit.form == "rate" { "per period" } else { "hits" };
        text += &format!(
            "  {}: holds {} {unit} for {} s, {} free\n",
            escape_unprintable(&limit.limit),
            limit.held,
            limit.held_for_s,
            limit.free
        );
    }
    let head = ["stream", "peer", "demand", "assignment", "reserved", "ends in"];
    let rows = proxies.iter().map(|proxy| {
        [
            proxy.stream.to_string(),
            escape_unprintable(&proxy.peer),
            format!("{:.1}/s", proxy.demand_per_s),
            escape_unprintable(&proxy.assignment),
            proxy.reserved.to_string(),
            format!("{} s", proxy.ends_s),
        ]
    });
    text += &format_table(&head, rows, NumberAlignment::Right);
    match proxy_count.saturating_sub(proxies.len()) {
        0 => {}
        others => text += &format!("{others} other proxies have less\n"),
    }
    text
}
