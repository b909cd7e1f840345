//! Chart of admitted and rejected requests over time, by block characters, for the results of `simulate` and
//! `recommend`.
//!
//! Each series has three rows of text and the same scale, so that heights can be compared. Blocks are rounded up to an
//! eighth of a row, so that a single request is seen; labels are exact. There is no colour, as in all output.

use std::fmt::Write as _;
use std::io;

use super::print::format_micros;
use crate::tools::simulate::tally::TimelineResults;

/// Width of the chart if standard output is not a terminal, in columns.
const DEFAULT_WIDTH: usize = 80;
/// Maximum width of the chart: that of the help texts.
const MAX_WIDTH: usize = 120;
/// Minimum width of the blocks: room for two times below.
const MIN_PLOT_WIDTH: usize = 42;
/// Rows of text of one series.
const ROWS: u64 = 3;
/// Blocks by their height in eighths of a row.
const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Width of the terminal at standard output, in columns; without one, the default.
pub(super) fn chart_width() -> usize {
    let columns = rustix::termios::tcgetwinsize(io::stdout()).map_or(0, |size| usize::from(size.ws_col));
    if columns == 0 { DEFAULT_WIDTH } else { columns.min(MAX_WIDTH) }
}

/// Formats the chart, `width` columns wide or the least that it needs; empty without requests. `last` is the time of
/// the last request.
pub fn format_timeline_chart(title: &str, timeline: &TimelineResults, last: &str, width: usize) -> String {
    let total = timeline.requests.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
    if total == 0 {
        return String::new();
    }
    let label_width = "admitted".len().max(total.to_string().len());
    let plot_width = width.saturating_sub(label_width + 2).max(MIN_PLOT_WIDTH);
    let joined = timeline.requests.len().div_ceil(plot_width);
    let spans = timeline.requests.len().div_ceil(joined);
    let admitted: Vec<u64> =
        timeline.requests.iter().zip(&timeline.rejected).map(|(all, rejected)| all.saturating_sub(*rejected)).collect();
    let mut series = vec![("admitted", &admitted), ("rejected", &timeline.rejected)];
    series.extend(timeline.rejected_before.as_ref().map(|before| ("before", before)));
    let series = series.into_iter().map(|(name, counts)| (name, sum_neighbours(counts, joined)));
    let series: Vec<(&str, Vec<u64>)> = series.collect();
    let highest = series.iter().flat_map(|(_, counts)| counts).copied().max().unwrap_or(0).max(1);
    let span_us = timeline.span_seconds.saturating_mul(joined as u64).saturating_mul(1_000_000);
    let mut chart = format!("\n{title}, requests per {}\n", format_micros(span_us));
    for (name, counts) in &series {
        for (row, label) in [highest.to_string().as_str(), name, "0"].into_iter().enumerate() {
            let below = (ROWS - 1 - row as u64) * 8;
            let count_at = |column: usize| counts.get(column * spans / plot_width).copied().unwrap_or(0);
            let blocks: String = (0..plot_width).map(|column| block(count_at(column), highest, below)).collect();
            // Writing to a String does not fail.
            let _ = writeln!(chart, "{}", format!("{label:>label_width$} │{blocks}").trim_end());
        }
    }
    let [first, last] = [timeline.start.as_str(), last].map(format_to_second);
    let last_width = plot_width.saturating_sub(first.len());
    let _ = writeln!(chart, "{:label_width$}  {first}{last:>last_width$}", "");
    chart
}

/// Sums each `joined` neighbours.
fn sum_neighbours(counts: &[u64], joined: usize) -> Vec<u64> {
    counts.chunks(joined).map(|spans| spans.iter().fold(0, |sum: u64, count| sum.saturating_add(*count))).collect()
}

/// Block of a count in a row that begins `below` eighths above zero.
fn block(count: u64, highest: u64, below: u64) -> char {
    let eighths = (u128::from(count) * u128::from(ROWS * 8)).div_ceil(u128::from(highest));
    let filled = eighths.saturating_sub(u128::from(below)).min(8);
    BLOCKS[usize::try_from(filled).unwrap_or(8)]
}

/// Cuts an RFC 3339 time in UTC to whole seconds.
fn format_to_second(time: &str) -> String {
    let seconds = time.get(.."2026-07-08T12:00:00".len()).unwrap_or(time);
    format!("{}Z", seconds.trim_end_matches('Z'))
}
