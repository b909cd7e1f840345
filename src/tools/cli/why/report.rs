//! Results of `why` as text. Everything from the logs is untrusted and is escaped.

use std::fmt::Write as _;

use crate::base::text::printable;
use crate::decide::log::record::{DescriptorRecord, LimitRecord, RecordedVerdict};
use crate::tools::cli::print::{counted, micros_text, truncated};
use crate::tools::why::question::entries_text;
use crate::tools::why::rejection::{decider_text, limit_text, origin_text};
use crate::tools::why::remedy::{NeverReason, Remedy};
use crate::tools::why::results::{LimitRemedies, ShownDecision, WhyResults};
use crate::tools::why::rule_changes::RuleChange;

/// Number of causes in the summary.
const MAX_CAUSES: usize = 10;
/// Length of a date at the start of a time.
const DATE_CHARS: usize = 10;

/// Formats the results.
pub(super) fn text(results: &WhyResults<'_>) -> String {
    let mut page = summary(results);
    let mut changes = results.rule_changes.iter().peekable();
    let mut date = "";
    for decision in &results.decisions {
        while let Some(change) = changes.next_if(|change| change.time_us <= decision.record.time_us) {
            page += &change_text(change);
        }
        let new_date = decision.time.get(..DATE_CHARS).unwrap_or_default();
        if date != new_date {
            let _ = writeln!(page, "\n{new_date} (UTC)");
            date = new_date;
        }
        page += &decision_text(decision);
    }
    changes.for_each(|change| page += &change_text(change));
    page
}

/// Formats the figures, the causes and the remarks. Writing to a String does not fail.
fn summary(results: &WhyResults<'_>) -> String {
    let mut page = format!("domain {}, descriptor {}\n", truncated(results.domain), truncated(&results.descriptor));
    if let Some(range) = &results.range {
        let _ = writeln!(page, "{} to {} UTC", moment(&range.from), moment(&range.to));
    }
    if results.requests > 0 {
        let requests = counted(results.requests, "request");
        let _ = write!(page, "rejected {} of {requests}", results.rejected);
        if let (Some(first), Some(last)) = (&results.first_rejected, &results.last_rejected) {
            let _ = write!(page, ", from {} to {} UTC", moment(first), moment(last));
        }
        page.push('\n');
    } else {
        page += "no requests with this descriptor were found\n";
    }
    for cause in results.causes.iter().take(MAX_CAUSES) {
        let _ = writeln!(page, "  {} by {}", cause.requests, printable(&cause.cause));
    }
    if results.causes.len() > MAX_CAUSES {
        let _ = writeln!(page, "  and {} more causes", results.causes.len() - MAX_CAUSES);
    }
    if results.rejected > 0 {
        page += "  (with shadow_mode: true a limit rejects nothing)\n";
    }
    let other = results.rejected_by_other_descriptors;
    for (count, text) in [
        (other, "rejected by another descriptor of the request: this one had room"),
        (results.shadow, "admitted in shadow mode: only a limit that does not reject was exceeded"),
        (results.errors, "without an answer"),
        (results.left_out, "not shown (--max)"),
    ] {
        if count > 0 {
            let _ = writeln!(page, "  {count} {text}");
        }
    }
    let hidden = results.requests - results.left_out - results.decisions.len() as u64;
    if hidden > 0 {
        let _ = writeln!(page, "  {hidden} admitted, not shown (--all)");
    }
    for note in &results.notes {
        let _ = writeln!(page, "note: {}", printable(note));
    }
    if !results.nearest.is_empty() {
        page += "nearest descriptors in the logs:\n";
        results.nearest.iter().for_each(|text| page += &format!("  {}\n", truncated(text)));
    }
    page
}

fn change_text(change: &RuleChange) -> String {
    let event = match change.event {
        crate::decide::log::header::HeaderEvent::Start => "process started",
        _ => "rules changed",
    };
    let rules = change.rules.as_deref().unwrap_or("none");
    let version =
        change.version.as_ref().map_or_else(String::new, |version| format!(", version {}", truncated(version)));
    format!(
        "\n{}  {event}: rules {}{version} (process {})\n",
        moment(&change.time),
        truncated(rules),
        truncated(&change.process)
    )
}

/// Formats a decision: its verdict, then each descriptor that was asked for or rejected.
fn decision_text(shown: &ShownDecision<'_>) -> String {
    let record = &shown.record;
    let time = shown.time.get(DATE_CHARS + 1..).unwrap_or_default().trim_end_matches('Z');
    let mut page = format!("\n{time}  {}", record.verdict.name());
    if record.delay_us > 0 {
        let _ = write!(page, ", delayed {}", micros_text(record.delay_us));
    }
    if let Some(error) = &record.error {
        let _ = write!(page, ": {}", truncated(error));
    }
    if let Some(trace_id) = &record.trace_id {
        let _ = write!(page, "  trace {}", truncated(trace_id));
    }
    page.push('\n');
    for (index, descriptor) in record.descriptors.iter().enumerate() {
        let is_asked = shown.asked.contains(&index);
        let rejects = record.verdict == RecordedVerdict::OverLimit && descriptor.verdict == RecordedVerdict::OverLimit;
        if is_asked || rejects {
            let name = if is_asked {
                String::new()
            } else {
                format!("rejected by descriptor {}: {}, ", index + 1, truncated(&entries_text(&descriptor.entries)))
            };
            let _ = writeln!(page, "  {name}{}", descriptor_text(descriptor));
            let of = |it: &&LimitRemedies| it.descriptor == index;
            limits_text(&mut page, descriptor, &shown.rejected_by.iter().filter(of).collect::<Vec<_>>());
        }
    }
    page
}

/// Formats the hits, the verdict, the rule and the decider of a descriptor.
fn descriptor_text(descriptor: &DescriptorRecord<'_>) -> String {
    let hits = match descriptor.hits {
        0 => "peek".to_owned(),
        hits if hits < 0 => format!("refund of {}", counted(hits.unsigned_abs(), "hit")),
        hits => counted(hits.unsigned_abs(), "hit"),
    };
    let mut text = format!("{hits}: {}, {}", descriptor.verdict.name(), printable(&origin_text(descriptor)));
    if descriptor.unlimited {
        text += ", unlimited";
    }
    if let Some(decider) = decider_text(descriptor) {
        let _ = write!(text, ", decided by {}", printable(&decider));
    }
    text
}

fn limits_text(page: &mut String, descriptor: &DescriptorRecord<'_>, rejected_by: &[&LimitRemedies]) {
    for (at, limit) in descriptor.limits.iter().enumerate() {
        let _ = writeln!(page, "    {}", limit_line(limit));
        let found = rejected_by.iter().find(|remedies| remedies.limit == Some(at));
        found.iter().for_each(|found| remedies_text(page, found));
    }
    let without_limit = rejected_by.iter().find(|remedies| remedies.limit.is_none());
    without_limit.iter().for_each(|found| remedies_text(page, found));
}

/// Formats a limit with its level before and after.
fn limit_line(limit: &LimitRecord<'_>) -> String {
    let mut text = printable(&limit_text(limit));
    for (is_so, mode) in [
        (limit.candidate, "candidate, rejects nothing"),
        (limit.shadow && !limit.candidate, "shadow_mode, rejects nothing"),
        (limit.quota, "quota_mode, rejects only together with all other quotas"),
    ] {
        if is_so {
            let _ = write!(text, " [{mode}]");
        }
    }
    match &limit.result {
        Some(result) => {
            let verdict = if result.admitted { "has room" } else { "exceeded" };
            let (before, after, remaining) = (result.before, result.after, result.remaining);
            let _ = write!(text, ": {before} -> {after} counted, {remaining} remaining, {verdict}");
            if result.delay_us > 0 {
                let _ = write!(text, ", delay {}", micros_text(result.delay_us));
            }
        }
        None => text += ": no counter was read",
    }
    text
}

/// Formats changes; the summary has `shadow_mode`.
fn remedies_text(page: &mut String, rejected_by: &LimitRemedies) {
    for remedy in &rejected_by.remedies {
        let text = match remedy {
            Remedy::Wait { until, wait_us } => format!("at {} UTC ({} later)", moment(until), micros_text(*wait_us)),
            Remedy::NeverByWaiting { reason } => {
                let reason = match reason {
                    NeverReason::LimitIsZero => "the limit is 0",
                    NeverReason::MoreHitsThanLimit => "more hits than the limit",
                };
                let _ = writeln!(page, "      never passes later: {reason}");
                continue;
            }
            Remedy::Limit { key, value, counted, delay_us } => {
                let delay =
                    delay_us.map_or_else(String::new, |delay_us| format!(" and a delay of {}", micros_text(delay_us)));
                format!("with {key} {value}{delay}: {counted} were counted before")
            }
            Remedy::LongerDelay { delay_us } => {
                format!("with a delay of {} (max_wait, the caller's deadline)", micros_text(*delay_us))
            }
            Remedy::FewerHits { hits } => format!("with {}", counted(*hits, "hit")),
            Remedy::ShadowMode => continue,
            Remedy::WorkingStore => "with a store that answers, or with on_store_error: allow".to_owned(),
        };
        let _ = writeln!(page, "      would have passed {text}");
    }
}

/// Formats a time for reading: `2026-07-08 10:05:30.000000`.
fn moment(time: &str) -> String {
    time.trim_end_matches('Z').replacen('T', " ", 1)
}
