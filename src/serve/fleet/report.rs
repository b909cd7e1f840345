//! Report on the fleet: the body of `/fleet`, as data and as text.
//!
//! Decides: that sums over replicas leave silent ones out.
//! Decides: parameters of `/fleet`.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::differences::{abbreviate_hash, is_silent};
use super::finding::Finding;
use super::summary::{BlocksSummary, PublishedKeyForm, ReplicaSummary};
use super::view::FleetView;
use crate::base::text::{escape_unprintable, truncate_and_escape};
use crate::base::text_table::{Format, NumberAlignment, format_table};
use crate::decide::blocks::Block;
use crate::serve::quota::page::QuotaTotals;
use crate::serve::report::top::{TopQuery, TopReport, TopTextContent};
use crate::serve::status::{RecentDecisionRates, RulesStatus, StoreStatus};

/// Query of `/fleet`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FleetQuery {
    /// Format of the report.
    pub format: Format,
    /// Contents of the text form.
    pub show: TopTextContent,
    /// Number of minutes, including the current one: 1 to 10, default 5.
    pub minutes: Option<u64>,
    /// Maximum number of keys and of blocks: 1 to 1000, default 10 keys and 100 blocks.
    pub most: Option<usize>,
    /// Name of a limit, `domain.key_value.key`, or the start of one up to a dot.
    pub rule: Option<String>,
}

const DEFAULT_SHOWN_BLOCKS: usize = 100;
/// Number of blocks in the text form.
const MAX_BLOCKS_IN_TEXT: usize = 10;
const MAX_SHOWN_BLOCKS: usize = 1000;

/// Report on the fleet.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct FleetReport {
    /// Reason why other replicas are missing; null if they are not.
    pub problem: Option<String>,
    /// Time of the report, RFC 3339 in UTC, by the clock of Redis.
    pub at: String,
    /// All replicas, this one first.
    pub replicas: Vec<ReplicaReport>,
    /// Summaries that were left out.
    pub left_out: Vec<LeftOutSummaries>,
    /// What is wrong, with single replicas and between them.
    pub findings: Vec<Finding>,
    /// Decisions of all replicas in about the last minute.
    pub recent: RecentDecisionRates,
    /// Values that this replica blocks, the last to end first; with Redis those of all replicas.
    #[serde(default)]
    pub blocks: Vec<BlockReport>,
    /// Number of blocked values, in the report or not.
    #[serde(default)]
    pub blocked_values: usize,
    /// Keys that all replicas together rejected most.
    pub top: TopReport,
}

/// A block, without its value: that needs the admin token, at `/blocks`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct BlockReport {
    /// Domain.
    pub domain: String,
    /// Key of the blocked entry.
    pub key: String,
    /// End, RFC 3339 in UTC.
    pub until: String,
    /// Reason that the operator gave.
    pub reason: String,
}

/// Row of one replica in the report.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ReplicaReport {
    /// Host name; with the start of `incarnation` if several replicas have it.
    pub name: String,
    /// Random id of the process.
    pub incarnation: String,
    /// True for the replica that made the report.
    pub this: bool,
    /// Version of tollkeeper.
    pub build: String,
    /// Seconds since the start.
    pub age_s: u64,
    /// Seconds since it published its summary.
    pub published_s_ago: u64,
    /// True if it published nothing for a while and may have died; the sums leave it out.
    #[serde(default)]
    pub silent: bool,
    /// Time of Redis less that of the replica, in milliseconds.
    pub clock_offset_ms: i64,
    /// Loaded rules.
    pub rules: RulesStatus,
    /// Slot of eventual rules.
    pub slot: Option<u32>,
    /// State of the store.
    pub store: StoreStatus,
    /// Form of the keys that it published.
    pub values: PublishedKeyForm,
    /// Decisions in about the last minute.
    pub recent: RecentDecisionRates,
    /// Blocked values.
    #[serde(default)]
    pub blocks: BlocksSummary,
    /// Quota streams, and what the replica holds for them; absent if it publishes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<QuotaTotals>,
}

/// Summaries that were left out.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct LeftOutSummaries {
    /// Reason.
    pub reason: String,
    /// Number of summaries.
    pub summaries: usize,
}

impl FleetReport {
    /// Computes the report.
    pub fn new(view: &FleetView, query: &FleetQuery) -> Self {
        let top = TopQuery { minutes: query.minutes, most: query.most, rule: query.rule.clone(), ..Default::default() };
        let snapshot = |minutes| view.keys.snapshot(view.unix_minute(), minutes, |name| top.matches_limit_name(name));
        let busiest = view.busiest.snapshot(|name| top.matches_limit_name(name));
        Self {
            problem: view.problem.clone(),
            at: view.now.to_string(),
            replicas: (0..)
                .zip(&view.replicas)
                .map(|(index, replica)| build_replica_report(view, index, replica))
                .collect(),
            left_out: view
                .left_out
                .iter()
                .map(|(reason, count)| LeftOutSummaries { reason: reason.description().to_owned(), summaries: *count })
                .collect(),
            findings: view.findings.clone(),
            blocks: Vec::new(),
            blocked_values: 0,
            recent: RecentDecisionRates::sum(
                view.replicas.iter().filter(|replica| !is_silent(replica, view.now)).map(|replica| &replica.recent),
            ),
            top: TopReport::from_snapshot(snapshot, &top).with_busiest_keys(&busiest, &top),
        }
    }
}

/// What is wrong now, with this process and others.
#[derive(Clone, Debug, Serialize)]
pub struct AlarmReport {
    /// Host name of this replica.
    pub replica: String,
    /// Version of tollkeeper.
    pub version: &'static str,
    /// Number of replicas that are known, this one included.
    pub replicas: usize,
    /// Findings: those of this replica, of others, and differences between replicas.
    pub alarms: Vec<Finding>,
}

impl AlarmReport {
    /// Computes the report; the first replica of `view` is this one.
    pub fn new(view: &FleetView) -> Self {
        Self {
            replica: view.replicas.first().map(|own| own.name.clone()).unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION"),
            replicas: view.replicas.len(),
            alarms: view.findings.clone(),
        }
    }
}

impl FleetReport {
    /// Adds the values that this replica blocks: the rows that `query` asks for, 100 by default.
    #[must_use]
    pub fn with_blocks(mut self, mut blocks: Vec<Arc<Block>>, query: &FleetQuery) -> Self {
        self.blocked_values = blocks.len();
        blocks.sort_by_key(|block| Reverse(block.until));
        blocks.truncate(query.most.unwrap_or(DEFAULT_SHOWN_BLOCKS).clamp(1, MAX_SHOWN_BLOCKS));
        self.blocks = blocks.iter().map(|block| BlockReport::new(block)).collect();
        self
    }
}

impl BlockReport {
    fn new(block: &Block) -> Self {
        let key = String::from_utf8_lossy(&block.key).into_owned();
        Self { domain: block.domain.clone(), key, until: block.until.to_string(), reason: block.reason.clone() }
    }

    /// Formats the cells of the text form.
    fn format_row(&self) -> [String; 3] {
        let entry = format!("{} {}", self.domain, self.key);
        [escape_unprintable(&self.until), truncate_and_escape(&entry, 24), truncate_and_escape(&self.reason, 28)]
    }
}

/// Describes one replica; the first is this process.
fn build_replica_report(view: &FleetView, index: usize, replica: &ReplicaSummary) -> ReplicaReport {
    let since_s = |at_us: u64| view.now.as_micros().saturating_sub(at_us) / 1_000_000;
    ReplicaReport {
        name: replica.name.clone(),
        incarnation: replica.incarnation.clone(),
        this: index == 0,
        build: replica.build.clone(),
        age_s: since_s(replica.started_us),
        published_s_ago: since_s(replica.published_us),
        silent: is_silent(replica, view.now),
        clock_offset_ms: replica.clock_offset_us / 1000,
        rules: replica.rules.clone(),
        slot: replica.slot,
        store: replica.store.clone(),
        values: replica.values,
        recent: RecentDecisionRates::sum(std::iter::once(&replica.recent)),
        blocks: replica.blocks,
        quota: replica.quota,
    }
}

/// Width of a terminal.
const MAX_TEXT_COLUMNS: usize = 80;

impl FleetReport {
    /// Formats the report as text, with these keys.
    pub fn format_text(&self, show: TopTextContent) -> String {
        let mut page = String::new();
        if let Some(problem) = &self.problem {
            let _ = writeln!(page, "This replica only: {}\n", escape_unprintable(problem));
        }
        let headings = ["CALLS/S", "REJECTED/S", "P99", "STORE", "RULES", "PLACE", "UPTIME", "AGE", "REPLICA"];
        let total = (self.replicas.len() > 1).then(|| self.format_total_row(self.replicas.len()));
        page += &format_table(
            &headings,
            total.into_iter().chain(self.replicas.iter().map(ReplicaReport::format_row)),
            NumberAlignment::Right,
        );
        for LeftOutSummaries { reason, summaries } in &self.left_out {
            let _ = writeln!(page, "\nSummaries left out: {summaries}, {}", escape_unprintable(reason));
        }
        if self.recent.latency_left_out > 0 {
            let count = self.recent.latency_left_out;
            let _ = writeln!(page, "\nReplicas whose durations have other bounds and are left out: {count}");
        }
        for finding in &self.findings {
            page += "\n";
            page += &wrap_text(&escape_unprintable(&finding.text), "");
            let names: Vec<String> = finding.replicas.iter().map(|name| escape_unprintable(name)).collect();
            page += &wrap_text(&names.join(", "), "  ");
        }
        page += &self.format_blocks();
        page += &self.format_quotas();
        page.push('\n');
        page += &self.top.format_text(show);
        page
    }

    /// Formats the blocked values, if there are any.
    fn format_blocks(&self) -> String {
        if self.blocked_values == 0 {
            return String::new();
        }
        let rejected = self.replicas.iter().map(|replica| replica.blocks.rejected_requests);
        let rejected = rejected.fold(0, u64::saturating_add);
        let rows = self.blocks.iter().take(MAX_BLOCKS_IN_TEXT).map(BlockReport::format_row);
        format!(
            "\nBlocked values: {}, which rejected {rejected} requests (`tollkeeper blocks` lists them)\n{}",
            self.blocked_values,
            format_table(&["UNTIL", "DOMAIN AND KEY", "REASON"], rows, NumberAlignment::Left)
        )
    }

    /// Formats what replicas hold for proxies over quota streams, if any has streams or holds something.
    fn format_quotas(&self) -> String {
        let quotas = self.replicas.iter().filter_map(|replica| Some((replica, replica.quota?)));
        let quotas: Vec<_> = quotas.filter(|(_, quota)| quota.streams > 0 || quota.keys > 0).collect();
        if quotas.is_empty() {
            return String::new();
        }
        let rows = quotas.into_iter().map(|(replica, quota)| {
            let QuotaTotals { streams, buckets, keys, failed_keys, held_hits, assigned_hits, held_for_s } = quota;
            let failed = if failed_keys > 0 { format!(" ({failed_keys} without a store)") } else { String::new() };
            let counts = [streams, buckets, keys, held_hits, assigned_hits].map(|count| count.to_string());
            let [streams, buckets, keys, held, assigned] = counts;
            let name = format!("{}{failed}", escape_unprintable(&replica.name));
            [streams, buckets, keys, held, assigned, format!("{held_for_s}s"), name]
        });
        let headings = ["STREAMS", "BUCKETS", "KEYS", "HITS HELD", "OF PROXIES", "ENDS IN", "REPLICA"];
        let table = format_table(&headings, rows, NumberAlignment::Right);
        format!("\nHits held for proxies (`tollkeeper quota` shows those of a replica)\n{table}")
    }

    /// Formats the cells of the sum over all replicas.
    fn format_total_row(&self, replicas: usize) -> [String; 9] {
        let none = || "-".to_owned();
        let replicas = format!("all {replicas}");
        let [calls, rejected, p99] = self.recent.format_rate_cells();
        [calls, rejected, p99, none(), none(), none(), none(), none(), replicas]
    }
}

impl ReplicaReport {
    /// Formats the cells of the text form.
    fn format_row(&self) -> [String; 9] {
        let [calls, rejected, p99] = self.recent.format_rate_cells();
        let store = match (self.store.available, self.store.breakers_open) {
            (false, _) => "lost".to_owned(),
            (true, 0) => escape_unprintable(&self.store.kind),
            (true, open) => format!("{open} of {} lost", self.store.servers),
        };
        let state = match (self.this, self.silent) {
            (true, _) => " (this)",
            (false, true) => " (silent)",
            (false, false) => "",
        };
        [
            calls,
            rejected,
            p99,
            store,
            escape_unprintable(&abbreviate_hash(&self.rules.hash)),
            self.slot.map_or_else(|| "-".to_owned(), |slot| slot.to_string()),
            format_age(self.age_s),
            format_age(self.published_s_ago),
            format!("{}{state}", escape_unprintable(&self.name)),
        ]
    }
}

/// Formats an age with its largest unit.
fn format_age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Breaks a text into lines of at most 80 columns, as far as its words are shorter; `indent` begins each.
fn wrap_text(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let width = word.chars().count();
        if column > 0 && column + 1 + width <= MAX_TEXT_COLUMNS {
            lines += " ";
            column += 1;
        } else {
            lines += if column > 0 { "\n" } else { "" };
            lines += indent;
            column = indent.len();
        }
        lines += word;
        column += width;
    }
    lines + "\n"
}
