//! Results of `simulate` as text.

use std::fmt::Write as _;

use crate::base::table::{NumberAlignment, format_table};
use crate::serve::report::text::plain;
use crate::tools::cli::print::{counted, micros_text, truncated};
use crate::tools::simulate::results::{
    ChangeResults, LimitFigures, LimitResults, RejectedKeyResults, ReplayTotals, SimulationResults, TimelineResults,
    share,
};

/// Rows of the time line.
const MAX_ROWS: usize = 12;

/// Formats the results.
pub(super) fn text(results: &SimulationResults) -> String {
    let mut page = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a String does not fail.
        let _ = writeln!(page, "{name:<10}{text}");
    };
    let traffic = &results.traffic;
    let time = |at: &Option<String>| at.clone().unwrap_or_default();
    let span = format!("{} to {}", time(&traffic.first), time(&traffic.last));
    line("traffic", format!("{}, {span}", counted(traffic.requests, "request")));
    line("new", totals(&results.new, traffic.requests));
    if let Some(old) = &results.old {
        line("old", totals(old, traffic.requests));
    }
    if let Some(ChangeResults { newly_rejected, newly_admitted, .. }) = &results.changes {
        line("changes", format!("{newly_rejected} newly rejected, {newly_admitted} newly admitted"));
    }
    if let Some(verification) = &results.verification {
        let (agreed, compared) = (verification.agreed, verification.compared);
        let percent = share(agreed, compared) * 100.0;
        let first = verification.first_difference.as_ref();
        let first = first.map_or_else(String::new, |first| format!("; first difference: {}", printable(first)));
        line("fidelity", format!("{agreed} of {compared} recorded decisions repeated ({percent:.2} %){first}"));
    }
    let speed = results.speed;
    line(
        "speed",
        format!(
            "{:.2} million decisions per second and core; decoding {:.2} million requests",
            speed.decisions_per_second / 1e6,
            speed.decoded_per_second / 1e6
        ),
    );
    for warning in &results.warnings {
        line("warning", printable(warning));
    }
    page += &limits(&results.limits, results.old.is_some());
    page += &keys(results);
    page += &timeline(&results.timeline);
    page
}

fn totals(totals: &ReplayTotals, requests: u64) -> String {
    let ReplayTotals { rejected, unmatched_descriptors, failed, .. } = *totals;
    let mut text = format!("{} rejected", part(rejected, requests));
    if unmatched_descriptors > 0 {
        text += &format!(", {} without a rule", counted(unmatched_descriptors, "descriptor"));
    }
    if failed > 0 {
        text += &format!(", {failed} without an answer");
    }
    text
}

fn limits(limits: &[LimitResults], has_old: bool) -> String {
    let mut headings = vec!["LIMIT", "REQUESTS", "REJECTED"];
    headings.extend(has_old.then_some("BEFORE"));
    headings.extend(["KEYS", "REJECTED KEYS", "LONGEST RUN", "DELAYED"]);
    let row = |limit: &LimitResults| {
        let mode = match (limit.candidate, limit.shadow_mode) {
            (true, _) => " (candidate)",
            (false, true) => " (shadow)",
            (false, false) => "",
        };
        let mut row = vec![format!("{}{mode}", printable(&limit.path))];
        let none = LimitFigures::default();
        let new = limit.new.as_ref().unwrap_or(&none);
        row.push(if limit.new.is_some() { new.requests.to_string() } else { "removed".to_owned() });
        row.push(part(new.rejected, new.requests));
        if has_old {
            let before = |old: &LimitFigures| part(old.rejected, old.requests);
            row.push(limit.old.as_ref().map_or_else(|| "-".to_owned(), before));
        }
        let about = if new.keys_are_estimates { "about " } else { "" };
        row.push(format!("{about}{}", new.keys));
        row.push(format!("{about}{}", part(new.rejected_keys, new.keys)));
        row.push(new.longest_run.as_ref().map_or_else(String::new, |run| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a duration")]
            let duration = micros_text((run.seconds * 1e6) as u64);
            format!("{} in {duration}", run.requests)
        }));
        row.push(new.delays.map_or_else(String::new, |delays| {
            let (p99, max) = (micros_text(delays.p99_us), micros_text(delays.max_us));
            format!("{}: p99 {p99}, max {max}", delays.requests)
        }));
        row
    };
    format!("\n{}", format_table(&headings, limits.iter().map(row), NumberAlignment::Left))
}

fn keys(results: &SimulationResults) -> String {
    let mut page = String::new();
    let mut list = |title: &str, keys: &[RejectedKeyResults]| {
        if !keys.is_empty() {
            let row = |key: &RejectedKeyResults| {
                let about = if key.error > 0 { "at most " } else { "" };
                vec![format!("{about}{}", key.requests), printable(&key.limit), truncated(&key.key)]
            };
            page +=
                &format!("\n{}", format_table(&[title, "LIMIT", "KEY"], keys.iter().map(row), NumberAlignment::Left));
        }
    };
    list("REJECTED", &results.rejected_keys);
    if let Some(changes) = &results.changes {
        list("NEWLY REJECTED", &changes.newly_rejected_keys);
        list("NEWLY ADMITTED", &changes.newly_admitted_keys);
    }
    page
}

/// Formats the time line, with neighbouring spans joined so that it stays short.
fn timeline(timeline: &TimelineResults) -> String {
    let joined = timeline.requests.len().div_ceil(MAX_ROWS).max(1);
    let span_us = timeline.span_seconds * 1_000_000 * joined as u64;
    let sums = |counts: &[u64]| counts.chunks(joined).map(|spans| spans.iter().sum()).collect::<Vec<u64>>();
    let (requests, rejected) = (sums(&timeline.requests), sums(&timeline.rejected));
    let before = timeline.rejected_before.as_deref().map(sums);
    let mut headings = vec!["FROM START", "REQUESTS", "REJECTED"];
    headings.extend(before.is_some().then_some("BEFORE"));
    let rows = requests.iter().enumerate().map(|(index, requests)| {
        let at = |counts: &Vec<u64>| part(counts.get(index).copied().unwrap_or(0), *requests);
        let mut row = vec![micros_text(index as u64 * span_us), requests.to_string(), at(&rejected)];
        row.extend(before.as_ref().map(at));
        row
    });
    format!("\n{}", format_table(&headings, rows, NumberAlignment::Left))
}
