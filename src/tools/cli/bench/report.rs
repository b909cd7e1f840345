//! Results of `bench` as text.

use std::fmt::Write as _;
use std::time::Duration;

use crate::base::table::{NumberAlignment, format_table};
use crate::serve::report::text::plain;
use crate::tools::bench::load_generator::LoadPlan;
use crate::tools::bench::record::VerdictCounts;
use crate::tools::bench::results::{BenchResults, LimitAccuracy, Percentiles, ServerUsage};
use crate::tools::cli::print::micros_text;

/// Formats the results.
pub(super) fn text(plan: &LoadPlan, results: &BenchResults) -> String {
    let mut page = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a String does not fail.
        let _ = writeln!(page, "{name:<11}{text}");
    };
    let load = match plan.rate {
        Some(rate) => format!("open loop, {rate} calls per second due"),
        None => format!("closed loop, {} streams on each", plan.streams),
    };
    let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
    line("load", format!("{}: {} connections, {load}, keys {}", plan.target.target, plan.connections, plan.keys));
    line("measured", format!("{} after {} of warm-up", seconds(plan.duration), seconds(plan.warm_up)));
    let VerdictCounts { ok, over_limit, unknown } = results.verdicts;
    line("responses", format!("{}, {:.0} per second", results.answers, results.answers_per_second));
    line("verdicts", format!("OK {ok}, OVER_LIMIT {over_limit}, UNKNOWN {unknown}"));
    line("latency", percentiles(&results.latency_us));
    line("", format!("{} calls took longer than Envoy's default timeout of 20 ms", results.later_than_20_ms));
    if let Some(send_delay) = &results.send_delay_us {
        line("send delay", format!("{} (part of the latency)", percentiles(send_delay)));
    }
    if let Some(ServerUsage { cpu_us_per_answer, cores, resident_bytes_before, resident_bytes }) = results.server {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        line("server", format!("{cpu_us_per_answer:.2} us of CPU per response, {cores:.2} cores busy"));
        let (before, after) = (megabytes(resident_bytes_before), megabytes(resident_bytes));
        line("", format!("{after:.1} MB resident, {before:.1} MB after the warm-up"));
    }
    for (error, count) in &results.errors {
        line("errors", format!("{count} times: {}", printable(error)));
    }
    page + &limits_text(results)
}

fn percentiles(percentiles: &Percentiles) -> String {
    let Percentiles { p50, p90, p99, p99_9, p99_99, max, .. } = *percentiles;
    [("p50", p50), ("p90", p90), ("p99", p99), ("p99.9", p99_9), ("p99.99", p99_99), ("max", max)]
        .map(|(name, value)| format!("{name} {}", micros_text(value)))
        .join("  ")
}

fn limits_text(results: &BenchResults) -> String {
    let mut page = String::new();
    if !results.limits.is_empty() {
        page += "\nlimits, from the start of the warm-up\n";
        page += &limits_table(&results.limits);
    }
    if results.unlimited > 0 {
        page += &format!("{} descriptors have no reported limit; --limit states one\n", results.unlimited);
    }
    if results.not_evaluated > 0 {
        page += &format!("{} descriptors were too many to evaluate\n", results.not_evaluated);
    }
    page
}

fn limits_table(limits: &[LimitAccuracy]) -> String {
    let row = |limit: &LimitAccuracy| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a period in microseconds")]
        let period = micros_text((limit.period_seconds * 1e6) as u64);
        let share = |hits: u64| format!("{hits} ({:.4} %)", hits as f64 / limit.requested.max(1) as f64 * 100.0);
        vec![
            format!("{} {}", printable(&limit.domain), printable(&limit.descriptor)),
            format!("{} in {period}", limit.limit),
            limit.counters.to_string(),
            format!("{} of {}", limit.admitted, limit.requested),
            format!("{} ({} over)", limit.max_in_a_period, limit.counters_over_in_a_period),
            format!("{} ({} over)", limit.max_in_a_window, limit.counters_over_in_a_window),
            share(limit.wrongly_admitted),
            share(limit.wrongly_rejected),
        ]
    };
    let headings = [
        "DESCRIPTOR",
        "LIMIT",
        "COUNTERS",
        "ADMITTED",
        "MAX IN ANY PERIOD",
        "MAX IN A WINDOW",
        "LOG WOULD REJECT",
        "LOG WOULD ADMIT",
    ];
    format_table(&headings, limits.iter().map(row), NumberAlignment::Left)
}
