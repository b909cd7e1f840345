//! What a run found, for people.

use std::fmt::Write as _;

use super::super::print::{span, table};
use crate::bench::findings::{Findings, Limit, Server, Spread};
use crate::bench::load::Plan;
use crate::report::text::plain;

/// The page.
pub(super) fn text(plan: &Plan, findings: &Findings) -> String {
    let mut page = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a String does not fail.
        let _ = writeln!(page, "{name:<11}{text}");
    };
    let load = match plan.rate {
        Some(rate) => format!("open loop, {rate} calls a second due"),
        None => format!("closed loop, {} streams on each", plan.streams),
    };
    let seconds = |time: std::time::Duration| format!("{} s", time.as_secs_f64());
    line("load", format!("{}: {} connections, {load}, keys {}", plan.dial.target, plan.connections, plan.keys));
    line("measured", format!("{} after {} of warm-up", seconds(plan.duration), seconds(plan.warm_up)));
    let Findings { answers, answers_per_second, verdicts, .. } = findings;
    line("answers", format!("{answers}, {answers_per_second:.0} a second"));
    line("verdicts", format!("OK {}, OVER_LIMIT {}, UNKNOWN {}", verdicts.ok, verdicts.over_limit, verdicts.unknown));
    line("latency", spread(&findings.latency_us));
    line("", format!("{} calls took longer than the 20 ms that Envoy waits by default", findings.later_than_20_ms));
    if let Some(unsent) = &findings.unsent_us {
        line("unsent", format!("{} (part of the latency)", spread(unsent)));
    }
    if let Some(Server { cpu_us_per_answer, cores, resident_bytes_before, resident_bytes }) = findings.server {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        line("server", format!("{cpu_us_per_answer:.2} us of CPU an answer, {cores:.2} CPUs busy"));
        let (before, after) = (megabytes(resident_bytes_before), megabytes(resident_bytes));
        line("", format!("{after:.1} MB resident, {before:.1} MB after the warm-up"));
    }
    for (kind, count) in &findings.errors {
        line("no answer", format!("{count} times: {}", plain(kind)));
    }
    if !findings.limits.is_empty() {
        page += "\nlimits, from the beginning of the warm-up on\n";
        page += &limits(&findings.limits);
    }
    let mut line = |text: String| page += &text;
    if findings.unlimited > 0 {
        line(format!("{} descriptors were told no limit; --limit states one\n", findings.unlimited));
    }
    if findings.not_judged > 0 {
        line(format!("{} descriptors were too many to be judged\n", findings.not_judged));
    }
    page
}

fn spread(spread: &Spread) -> String {
    let Spread { p50, p90, p99, p99_9, p99_99, max, .. } = *spread;
    [("p50", p50), ("p90", p90), ("p99", p99), ("p99.9", p99_9), ("p99.99", p99_99), ("max", max)]
        .map(|(name, value)| format!("{name} {}", span(value)))
        .join("  ")
}

fn limits(limits: &[Limit]) -> String {
    let share = |part: u64, limit: &Limit| format!("{part} ({:.4} %)", part as f64 / limit.asked.max(1) as f64 * 100.0);
    let row = |limit: &Limit| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a period in microseconds")]
        let period = span((limit.period_seconds * 1e6) as u64);
        vec![
            format!("{} {}", plain(&limit.domain), plain(&limit.descriptor)),
            format!("{} in {period}", limit.limit),
            limit.counters.to_string(),
            format!("{} of {}", limit.admitted, limit.asked),
            format!("{} ({} over)", limit.most_in_a_period, limit.counters_over_in_a_period),
            format!("{} ({} over)", limit.most_in_a_window, limit.counters_over_in_a_window),
            share(limit.wrongly_admitted, limit),
            share(limit.wrongly_refused, limit),
        ]
    };
    let headings = [
        "DESCRIPTOR",
        "LIMIT",
        "COUNTERS",
        "ADMITTED",
        "MOST IN ANY PERIOD",
        "IN A WINDOW",
        "LOG REFUSES",
        "LOG ADMITS",
    ];
    table(&headings, limits.iter().map(row))
}
