//! Results of `recommend` as text.

use std::fmt::Write as _;

use crate::base::table::{NumberAlignment, format_table};
use crate::serve::report::text::plain;
use crate::tools::cli::print::{counted, micros_text};
use crate::tools::recommend::results::{
    AlreadyRejected, BasisResults, CurvePoint, RecommendationResults, SmallestLimit, UseResults,
};

/// Shares of rejected keys in the text plot, in percent.
const PLOTTED_PERCENT: [f64; 9] = [50.0, 20.0, 10.0, 5.0, 2.0, 1.0, 0.5, 0.1, 0.0];
/// Width of a bar that stands for all keys.
const BAR_WIDTH: f64 = 40.0;

/// Formats the results.
pub(super) fn text(results: &RecommendationResults) -> String {
    let mut page = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a String does not fail.
        let _ = writeln!(page, "{name:<10}{text}");
    };
    let (rule, basis) = (&results.rule, &results.basis);
    line("rule", printable(&format!("{}: {} ({})", rule.path, rule.limit, rule.location)));
    line("basis", basis_text(basis));
    line("", format!("{} to {}", basis.first, basis.last));
    if let Some(already) = &basis.already_rejected {
        line("rejected", already_text(already));
    }
    line("now", format!("rejects {} of the keys", part(rule.rejected_keys, basis.keys)));
    let allowed = results.goal.rejected_keys;
    line("goal", format!("at most {} of {} rejected", counted(allowed, "key"), basis.keys));
    for warning in &results.warnings {
        line("warning", printable(warning));
    }
    if let Some(first) = results.left_out_periods.first() {
        let periods: Vec<&str> = results.left_out_periods.iter().map(|left_out| &*left_out.period).collect();
        line("left out", format!("{}: {}", periods.join(", "), first.reason));
    }
    page += &uses(&results.uses);
    page += &limits(results);
    page += &curve(results);
    if let Some(yaml) = &results.yaml {
        // Values are escaped by the quotes of YAML.
        let _ = write!(page, "\n{yaml}");
    }
    page
}

fn basis_text(basis: &BasisResults) -> String {
    let BasisResults { keys, requests, hits, peeks, refunds, processes, .. } = *basis;
    let mut text = format!("{} of {}", counted(requests, "request"), counted(keys, "key"));
    if hits != requests {
        text += &format!(", {hits} hits");
    }
    for (number, what) in [(peeks, "peek"), (refunds, "refund")] {
        if number > 0 {
            text += &format!(", {}", counted(number, what));
        }
    }
    if processes > 1 {
        text += &format!(", {processes} processes");
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a duration")]
    let span = micros_text((basis.span_seconds * 1e6) as u64);
    text + &format!(" in {span}")
}

fn already_text(already: &AlreadyRejected) -> String {
    let AlreadyRejected { requests, keys, elsewhere, .. } = *already;
    let mut text = format!(
        "{requests} requests ({:.2} %) of {} were rejected already",
        already.share * 100.0,
        counted(keys, "key")
    );
    let by_limit = already.by_limit.iter().map(|(path, count)| format!("{count} by {path}"));
    let elsewhere = (elsewhere > 0).then(|| format!("{elsewhere} by other rules or policies"));
    let causes: Vec<String> = by_limit.chain(elsewhere).collect();
    if !causes.is_empty() {
        text += &format!(": {}", causes.join(", "));
    }
    printable(&text)
}

fn uses(uses: &[UseResults]) -> String {
    let row = |used: &UseResults| {
        let numbers = [used.p50, used.p90, used.p99, used.max].map(|number| number.to_string());
        [format!("any {}", used.period)].into_iter().chain(numbers).collect::<Vec<_>>()
    };
    format!(
        "\n{}",
        format_table(&["HITS PER KEY IN", "P50", "P90", "P99", "MAX"], uses.iter().map(row), NumberAlignment::Left)
    )
}

fn limits(results: &RecommendationResults) -> String {
    let keys = results.basis.keys;
    let row = |limit: &SmallestLimit| {
        let mark = if limit.recommended { " *" } else { "" };
        let number = |number: Option<u32>| number.map_or_else(String::new, |number| number.to_string());
        let rejected = part(limit.rejected_keys, keys);
        let rejected = match (&limit.verified, limit.requests_per_unit) {
            (_, None) => format!("at least {rejected}"),
            (Some(verified), _) if verified.rejected_keys == limit.rejected_keys => format!("{rejected}, verified"),
            (Some(verified), _) => format!("{rejected}, replay: {}", verified.rejected_keys),
            (None, _) => rejected,
        };
        vec![
            format!("{}{mark}", limit.algorithm),
            limit.period.clone(),
            limit.requests_per_unit.map_or_else(|| "none".to_owned(), |limit| limit.to_string()),
            number(limit.bucket_size.or(limit.queue_size)),
            rejected,
            limit.verified.map_or_else(String::new, |verified| part(verified.rejected_requests, verified.requests)),
        ]
    };
    let headings = ["ALGORITHM", "PERIOD", "LIMIT", "BUCKET", "REJECTED KEYS", "REJECTED REQUESTS"];
    let table = format_table(&headings, results.limits.iter().map(row), NumberAlignment::Left);
    let mut page = format!("\n{table}");
    if results.yaml.is_some() {
        page += "* recommended: the algorithm and the period of the rule come first\n";
    }
    // Writing to a String does not fail.
    let _ = writeln!(page, "leaky_bucket: callers wait for {} at most", micros_text(results.basis.max_delay_us));
    page
}

/// Formats the smallest limit for several shares of rejected keys, with bars.
fn curve(results: &RecommendationResults) -> String {
    let mut points: Vec<&CurvePoint> = Vec::new();
    for percent in PLOTTED_PERCENT {
        let Some(point) = results.curve.iter().find(|point| point.share * 100.0 <= percent) else { continue };
        if points.last() != Some(&point) {
            points.push(point);
        }
    }
    let rows = points.into_iter().map(|point| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to the width")]
        let width = (point.share * BAR_WIDTH).ceil() as usize;
        vec![point.number.to_string(), part(point.keys, results.basis.keys), "#".repeat(width)]
    });
    format!("\n{}", format_table(&["LIMIT", "REJECTED KEYS", ""], rows, NumberAlignment::Left))
}
