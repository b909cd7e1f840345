//! Text form of the report on the fleet.

use std::fmt::Write as _;

use super::findings::shown_hash;
use super::report::{FleetLimit, FleetPart, FleetRecent, FleetReport, LeftOutSummaries, ReplicaReport};
use crate::base::text::printable;
use crate::serve::report::text::columns;

/// Width of a terminal.
const MAX_COLUMNS: usize = 80;

impl FleetReport {
    /// Formats the report as text.
    pub fn text(&self, part: FleetPart) -> String {
        let mut page = String::new();
        if let Some(problem) = &self.problem {
            let _ = writeln!(page, "This replica only: {}\n", printable(problem));
        }
        let headings = ["CALLS/S", "REJECTED/S", "P99", "STORE", "RULES", "SLOT", "AGE", "REPLICA"];
        let total = (self.replicas.len() > 1).then(|| self.total_row());
        page += &columns(headings, total.into_iter().chain(self.replicas.iter().map(ReplicaReport::row)));
        for LeftOutSummaries { reason, summaries } in &self.left_out {
            let _ = writeln!(page, "\nSummaries left out: {summaries}, {}", printable(reason));
        }
        if self.recent.latency_left_out > 0 {
            let count = self.recent.latency_left_out;
            let _ = writeln!(page, "\nReplicas whose durations have other bounds and are left out: {count}");
        }
        for finding in &self.findings {
            page += "\n";
            page += &wrapped(&printable(&finding.advice), "");
            let names: Vec<String> = finding.replicas.iter().map(|name| printable(name)).collect();
            page += &wrapped(&names.join(", "), "  ");
        }
        page.push('\n');
        match part {
            FleetPart::Keys => page += &self.top.text(),
            FleetPart::Rules if self.rules.is_empty() => page += "no limit matches\n",
            FleetPart::Rules => {
                let headings = ["MATCHED", "REJECTED", "NEAR", "KEYS", "REJECTED KEYS", "REPLICAS", "RULE"];
                page += &columns(headings, self.rules.iter().map(FleetLimit::row));
                if self.limits > self.rules.len() {
                    let _ = writeln!(page, "\n{} of {} limits", self.rules.len(), self.limits);
                }
            }
        }
        if part == FleetPart::Rules && self.limits_left_out > 0 {
            let count = self.limits_left_out;
            let _ =
                writeln!(page, "\nLimits without room in the summary of a replica: {count}. Counts leave them out.");
        }
        page
    }

    /// Cells of the sum over all replicas.
    fn total_row(&self) -> [String; 8] {
        let none = || "-".to_owned();
        let replicas = format!("all {}", self.replicas.len());
        let [calls, rejected, p99] = self.recent.cells();
        [calls, rejected, p99, none(), none(), none(), none(), replicas]
    }
}

impl FleetRecent {
    /// Cells of the rates and of the duration.
    fn cells(&self) -> [String; 3] {
        let p99 = self.latency_us.and_then(|latency| latency.p99);
        let rate = |per_s: f64| format!("{per_s:.1}");
        [rate(self.calls_per_s), rate(self.rejected_per_s), p99.map_or_else(|| "-".to_owned(), duration)]
    }
}

impl ReplicaReport {
    /// Cells of the text form.
    fn row(&self) -> [String; 8] {
        let [calls, rejected, p99] = self.recent.cells();
        let store = match (self.store.available, self.store.breakers_open) {
            (false, _) => "lost".to_owned(),
            (true, 0) => printable(&self.store.kind),
            (true, open) => format!("{open} of {} lost", self.store.servers),
        };
        let this = if self.this { " (this)" } else { "" };
        [
            calls,
            rejected,
            p99,
            store,
            printable(&shown_hash(&self.rules.hash)),
            self.slot.map_or_else(|| "-".to_owned(), |slot| slot.to_string()),
            age(self.age_s),
            format!("{}{this}", printable(&self.name)),
        ]
    }
}

impl FleetLimit {
    /// Cells of the text form.
    fn row(&self) -> [String; 7] {
        let estimate = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
        let mode = match (self.candidate, self.shadow_mode) {
            (true, _) => " (candidate)",
            (false, true) => " (shadow mode)",
            (false, false) => "",
        };
        [
            self.matched.to_string(),
            self.rejected.to_string(),
            self.near_limit_hits.to_string(),
            estimate(self.distinct_keys),
            estimate(self.distinct_rejected_keys),
            self.replicas.to_string(),
            format!("{}{mode}", printable(&self.rule)),
        ]
    }
}

/// Formats microseconds with the unit that gives the fewest digits.
fn duration(us: u64) -> String {
    match us {
        0..1000 => format!("{us}us"),
        1000..1_000_000 => format!("{}.{}ms", us / 1000, us % 1000 / 100).replace(".0ms", "ms"),
        _ => format!("{}.{}s", us / 1_000_000, us % 1_000_000 / 100_000).replace(".0s", "s"),
    }
}

/// Formats an age with its largest unit.
fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Breaks a text into lines of at most 80 columns, as far as its words are shorter; `indent` begins each.
fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let width = word.chars().count();
        if column > 0 && column + 1 + width <= MAX_COLUMNS {
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
